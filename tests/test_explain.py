"""explain: what is counted is what is sent, held and called (case G8)."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch

import tasp_core as tasp
from tasp_core.costs.traffic import Sizes, traffic_of
from tasp_core.lab.bench.accuracy import Inputs
from tasp_core.runtime.attention import members_of
from tasp_core.runtime.exchange import CountingExchange, exchange_of

PLANS = [
    tasp.plan([137, 201, 89], 4, schedule=s, layout=lay, machine=m, intra=a)
    for s, m, a in (
        ("ring", None, 1),
        ("tasp", None, 1),
        ("wave", "mesh2x2", 1),
        ("sap", None, 1),
        ("ring", None, 2),
    )
    for lay in ("zigzag", "per_document")
]


def counted(rank, group, plans):
    """Bytes that this rank sends, forward and backward; and by link and step, of each of both."""
    result = []
    for p in plans:
        exchange = CountingExchange(exchange_of(group, members_of(p, group)))
        inputs = Inputs.random(p.docs.total, 4, 2, 8)
        q, k, v, dout = (tasp.shard(x, p, rank) for x in inputs.tensors())
        for x in (q, k, v):
            x.requires_grad_()
        out = tasp.attention(q, k, v, p, exchange)
        forward, links = exchange.total_bytes, [exchange.step_bytes]
        exchange.reset()
        out.backward(dout)
        result.append(((forward, exchange.total_bytes), [*links, exchange.step_bytes]))
    return result


@pytest.fixture(scope="module")
def by_rank():
    return tasp.launch(counted, 4, PLANS)


def test_bytes_are_those_that_are_sent(by_rank):
    for i, p in enumerate(PLANS):
        cost = tasp.explain(p, heads=4, kv_heads=2, head_dim=8, dtype="float32")
        lse = [p.num_tokens(r) * 0 for r in range(4)]
        if p.intra > 1:  # the log-sum-exp travels home too: 4 bytes a token and head of the others
            groups = [np.diff(p.member_tokens(g)) for g in range(p.context_plan.ranks)]
            lse = [4 * 2 * int(g.sum() - g[m]) for g in groups for m in range(p.intra)]
        for r in cost.ranks:
            out, inside = r.bytes_out, r.bytes_heads
            expected = (out[0] + inside[0] + lse[r.rank], out[1] + inside[1])
            assert by_rank[r.rank][i][0] == expected, (p.summary(), r)


def test_each_link_carries_in_each_step_what_its_cost_is_made_of(by_rank):
    for i, p in enumerate(PLANS):
        if p.intra > 1:
            continue
        sizes = Sizes.of(p, 4, 2, 8, "float32", 1)
        for backward in (False, True):
            cost = traffic_of(p, p.hops(backward=backward), sizes, backward)
            columns = (c.tolist() for c in (cost.step, cost.src, cost.dst, cost.nbytes))
            expected = {(t, src, dst): n for t, src, dst, n in zip(*columns, strict=True) if n}
            sent = [rank[i][1][backward] for rank in by_rank]
            assert sum(sent, Counter()) == expected, (p.summary(), backward)


def test_sums_steps_and_calls():
    for p in PLANS:
        cost = tasp.explain(p, heads=4, kv_heads=2, head_dim=8, dtype=str(torch.bfloat16))
        assert sum(r.tokens for r in cost.ranks) == p.docs.total
        assert sum(r.work for r in cost.ranks) == p.docs.num_pairs * p.intra
        for i in (0, 1):
            assert sum(r.bytes_in[i] for r in cost.ranks) == sum(r.bytes_out[i] for r in cost.ranks)
        assert all(r.calls[0] <= 2 * r.steps[0] for r in cost.ranks)
        json.dumps(cost.as_dict())
        assert len(str(cost).splitlines()) == 4 + 3


def test_errors():
    with pytest.raises(tasp.PlanError, match="dtype must be one of float16"):
        tasp.explain(PLANS[0], dtype="int8")
    with pytest.raises(tasp.PlanError, match="use intra=1"):
        tasp.explain(PLANS[-1], heads=3, kv_heads=1)
