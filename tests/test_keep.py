"""keep_kv: keys that arrive in the forward pass are kept, and none travel in the backward pass."""

from __future__ import annotations

import pytest
import torch
from spread import spread

import tasp_core as tasp
from tasp_core.lab.bench.accuracy import Inputs
from tasp_core.schedules import KV

DOCS = tasp.Documents.of([137, 300, 75])
INPUTS = Inputs.random(DOCS.total, 4, 2, 16)
PLANS = [
    tasp.plan(DOCS, 4, schedule=schedule, layout=layout)
    for schedule in tasp.schedules()
    for layout in ("contiguous", "zigzag", "balanced")
    if tasp.supports(DOCS, 4, schedule=schedule, layout=layout)
]


def gradients(rank, group, plans, keep):
    found = []
    for p in plans:
        q, k, v, dout = (tasp.shard(x, p, rank) for x in INPUTS.tensors())
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = tasp.attention(q, k, v, p, group, keep_kv=keep)
        out.backward(dout)
        found.append([out.detach(), q.grad, k.grad, v.grad])
    return found


@pytest.mark.parametrize("layout", spread(["contiguous", "zigzag", "balanced"], keep=1))
def test_the_same_bits_with_half_the_trips(layout):
    plans = [p for p in PLANS if p.layout.name == layout]
    one, other = (tasp.launch(gradients, 4, plans, keep) for keep in (False, True))
    for a, b in zip(one, other, strict=True):
        for p, x, y in zip(plans, a, b, strict=True):
            assert all(map(torch.equal, x, y)), str(p)


@pytest.mark.parametrize("p", PLANS, ids=lambda p: f"{p.schedule.name}-{p.layout.name}")
def test_no_keys_travel_in_the_backward_pass(p):
    grown = False
    for rank in range(4):
        kept = [tasp.lower(p, rank, backward=b, keep_kv=True) for b in (False, True)]
        usual = tasp.lower(p, rank)
        assert not any(m.kind == KV for s in kept[1].steps for m in (*s.sends, *s.recvs))
        assert kept[1].collective is None
        assert kept[0].kv_buffer_rows == kept[1].kv_buffer_rows >= usual.kv_buffer_rows
        grown |= kept[0].kv_buffer_rows > usual.kv_buffer_rows
        forward = [[(m.peer, m.count) for m in s.sends] for s in usual.steps]
        assert forward == [[(m.peer, m.count) for m in s.sends] for s in kept[0].steps]
    assert grown or p.schedule.name not in ("ring", "tasp")


def test_ranks_that_do_not_agree_are_told():
    def work(rank, group):
        q, k, v, _ = (tasp.shard(x, PLANS[0], rank) for x in INPUTS.tensors())
        with pytest.raises(tasp.PlanError, match="keep_kv: rank 2 has True"):
            tasp.attention(q, k, v, PLANS[0], group, keep_kv=rank == 2)

    tasp.launch(work, 4, timeout_s=20)
