"""Ulysses around any schedule (USP = ulysses x ring, HSAP = ulysses x sap); cases H1, H2, L8."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from spread import spread

import tasp_core as tasp
from tasp_core.lab.bench.accuracy import Inputs, Reference, run_rank, verify
from tasp_core.planning.heads import split_heads
from tasp_core.runtime import ulysses
from tasp_core.runtime.exchange import GlooExchange

ROW = [67, 101, 0, 1, 44]
INNER = (("ring", None), ("tasp", None), ("all_gather", None), ("sap", None), ("wave", "nodes"))


def run_all(rank, group, jobs):
    return [run_rank(rank, group, p, inputs)[0] for p, inputs in jobs]


def wrong(ranks, plans, heads):
    """Plans whose results are not within their limits."""
    inputs = {p.docs: Inputs.random(p.docs.total, *heads, 8) for p in plans}
    judges = {docs: Reference(inputs[docs], docs) for docs in inputs}
    by_rank = tasp.launch(run_all, ranks, [(p, inputs[p.docs]) for p in plans])
    found = [judges[p.docs].errors([r[i] for r in by_rank], p) for i, p in enumerate(plans)]
    return [(p.summary(), e) for p, e in zip(plans, found, strict=True) if not e.ok]


@pytest.mark.parametrize(
    ("degrees", "heads"),
    spread(
        itertools.product(
            [(2, 2), (4, 2), (4, 4), (8, 4)], [(8, 2), (8, 1), (40, 8), (24, 6), (12, 6)]
        ),
        keep=8,
    ),
)
def test_exact_around_every_schedule(degrees, heads):
    ranks, intra = degrees
    plans = []
    for schedule, where in INNER:
        machine = f"mesh{ranks // 2}x2" if where else None
        if where and (ranks // 2) % intra:
            continue
        for causal in (True, False):
            docs = tasp.Documents.of(ROW, causal=causal)
            plans.append(tasp.plan(docs, ranks, schedule=schedule, machine=machine, intra=intra))
    assert wrong(ranks, plans, heads) == []


def test_h1_many_ranks():
    for ranks, intra, heads in ((8, 8, (32, 2)), (8, 8, (8, 1)), (16, 4, (40, 8))):
        assert wrong(ranks, [tasp.plan([50], ranks, intra=intra)], heads) == []


def test_l8_odd_length():
    plans = [tasp.plan([4097], 4, schedule=s, intra=2) for s in ("ring", "sap")]
    assert wrong(4, plans, (2, 1)) == []


def test_tokens_are_placed_once_and_located():
    p = tasp.plan(ROW, 8, intra=2, layout="per_document")
    tokens = [p.tokens(r) for r in range(8)]
    assert sorted(np.concatenate(tokens).tolist()) == list(range(sum(ROW)))
    for rank, mine in enumerate(tokens):
        assert len(mine) == p.num_tokens(rank)
        found, row = p.locate(mine)
        assert (found == rank).all()
        assert (row == np.arange(len(mine))).all()
    x = torch.arange(sum(ROW))
    assert torch.equal(tasp.unshard([tasp.shard(x, p, r) for r in range(8)], p), x)
    assert tasp.Plan.from_json(p.to_json()) == p
    assert p.fingerprint() != tasp.plan(ROW, 8, intra=4, layout="per_document").fingerprint()
    assert tasp.check(p).pairs == p.docs.num_pairs


@pytest.mark.parametrize(
    ("ranks", "heads"), [(2, (6, 3)), (4, (20, 5)), (4, (28, 7)), (8, (40, 10))]
)
def test_query_heads_that_no_kernel_could_share_among_the_held_kv_heads(ranks, heads):
    """A member holds 3 query heads of 2 kv heads, say: a kernel would read behind them."""
    plans = [tasp.plan(ROW, ranks, intra=ranks)]
    if ranks == 2:
        plans += [tasp.plan(ROW, 4, intra=2, schedule=s) for s in ("ring", "sap")]
    assert wrong(ranks, plans[:1], heads) == []
    assert ranks > 2 or wrong(4, plans[1:], heads) == []


def test_every_query_head_meets_its_kv_head():
    """What a kernel makes of the heads of a member: query head i with kv head i // (queries per kv)."""
    uneven = 0
    for kv_heads, per_kv, degree in itertools.product(range(1, 17), range(1, 9), range(2, 17)):
        heads = kv_heads * per_kv
        if heads % degree:
            continue
        split = tuple(split_heads(heads, kv_heads, degree))
        for member, mine in enumerate(split):
            group = ulysses.Group(None, 0, member, (1,) * degree, split)
            expand = ulysses.Ulysses(group, heads, kv_heads).expand
            held = range(mine.kv_high - mine.kv_low) if expand is None else expand
            uneven += expand is not None
            each, rest = divmod(mine.q_high - mine.q_low, len(held))
            assert rest == 0
            for i, head in enumerate(range(mine.q_low, mine.q_high)):
                assert mine.kv_low + held[i // each] == head // per_kv
    assert uneven > 100


def test_key_value_heads_travel_no_more_than_they_must():
    assert [h[2:] for h in split_heads(8, 2, 8)] == [(0, 1)] * 4 + [(1, 2)] * 4
    assert [h[2:] for h in split_heads(24, 6, 4)] == [(0, 2), (1, 3), (3, 5), (4, 6)]


def test_h2_heads_that_cannot_be_shared_are_refused_with_what_works():
    reason = tasp.supports([100], 8, heads=28, kv_heads=4, intra=8).reason
    assert "28 query heads" in reason
    assert "use intra=4" in reason
    assert tasp.supports([100], 8, heads=28, kv_heads=4, intra=4)

    def attend(rank, group):
        p = tasp.plan([40], 2, intra=2)
        q, k, v, _ = (tasp.shard(x, p, rank) for x in Inputs.random(40, 3, 1, 8).tensors())
        with pytest.raises(tasp.PlanError, match="use intra=1"):
            tasp.attention(q, k, v, p, group)

    tasp.launch(attend, 2)


def test_groups_lie_inside_nodes_or_are_whole_nodes():
    for intra in (3, 6, 16):
        with pytest.raises(
            tasp.PlanError, match=rf"intra={intra} does not divide .* use one of 1, 2, 4, 8$"
        ):
            tasp.plan([64], 8, machine="mesh2x4", intra=intra)
    assert tasp.plan([64], 8, machine="mesh4x2", intra=4).machine.node_size == 1
    over_nodes = tasp.plan([64], 8, machine="mesh2x4", intra=4)
    assert (over_nodes.machine.ranks, over_nodes.machine.node_size) == (2, 1)
    assert tasp.plan([64], 8, machine="mesh2x4", intra=8).machine.ranks == 1
    uneven = tasp.Machine("uneven", 2, 3, link_gbps=60.0, nic_gbps=5.0, nodes=(2, 1))
    with pytest.raises(tasp.PlanError, match=r"use one of 1, 2$"):
        tasp.plan([64], 6, machine=uneven, intra=6)


@pytest.mark.parametrize(("machine", "intra"), [("mesh2x2", 4), ("mesh1x4", 2)])
def test_groups_over_nodes_are_exact(machine, intra):
    docs = tasp.Documents.of([50, 3, 27])
    p = tasp.plan(docs, 4, schedule="sap", layout="balanced", machine=machine, intra=intra)
    tasp.check(p)
    assert tasp.Plan.from_json(p.to_json()) == p
    assert verify(p, Inputs.random(80, 8, 2, 16))[0].ok


def test_time_over_nodes_needs_the_machine_itself():
    sizes = {"heads": 8, "head_dim": 64}
    p = tasp.plan([4096], 8, machine="mesh4x2", intra=8)
    with pytest.raises(tasp.PlanError, match="give simulate the machine itself"):
        tasp.simulate(p, **sizes)
    across = tasp.simulate(p, "mesh4x2", **sizes)
    inside = tasp.simulate(tasp.plan([4096], 8, intra=8), "mesh8", **sizes)
    assert any(name.startswith("nic") for name in across.link_bytes)
    assert across.comm_s > inside.comm_s
    rows = tasp.select([4096], "mesh4x2", **sizes).table
    assert any(row.intra == 8 and not row.excluded for row in rows)


def test_batches_equal_rows_one_by_one():
    def attend(rank, group):
        p = tasp.plan([30, 11], 4, intra=2, schedule="sap")
        rows = [Inputs.random(41, 4, 2, 8, seed=s).tensors()[:3] for s in (1, 2)]
        local = [[tasp.shard(x, p, rank) for x in row] for row in rows]
        batch = [torch.stack(x) for x in zip(*local, strict=True)]
        one_by_one = torch.stack([tasp.attention(*row, p, group) for row in local])
        return float((tasp.attention(*batch, p, group) - one_by_one).abs().max())

    assert max(tasp.launch(attend, 4)) < 1e-6


def test_a_member_that_fails_is_missed_by_its_peers():
    def broken(*args):
        raise OSError("the network card is on fire")

    def work(rank, group):
        if rank == 1:
            GlooExchange.transfer = broken
        return run_rank(rank, group, tasp.plan([90], 2, intra=2), Inputs.random(90, 4, 2, 8))

    with pytest.raises(tasp.RankError, match="the network card is on fire") as caught:
        tasp.launch(work, 2)
    assert "heads and tokens of ranks 0 to 1 were not exchanged" in caught.value.errors[0]
