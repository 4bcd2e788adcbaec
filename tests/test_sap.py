"""SAP: nothing travels that nobody needs, everything needed does; gradients return on the same arcs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasp_core as tasp
from tasp_core.lowering.lower import lower
from tasp_core.schedules import DKV, KV
from tasp_core.schedules.routed import arrivals, return_arcs

LENGTHS = st.lists(st.integers(0, 60), max_size=9)


def needed(p: tasp.Plan) -> list[set[int]]:
    """Tokens each rank's queries see and it does not hold, by brute force."""
    docs = p.docs
    result = []
    for rank in range(p.ranks):
        mine = p.tokens(rank)
        seen: set[int] = set()
        for token in mine.tolist():
            d = int(docs.document_of(np.array(token)))
            begin, end = docs.cu_seqlens[d], docs.cu_seqlens[d + 1]
            low, high = begin, token + 1 if docs.causal else end
            if docs.window is not None:
                low, high = max(low, token - docs.window + 1), min(high, token + docs.window)
            seen |= set(range(low, high))
        result.append(seen - set(mine.tolist()))
    return result


def arriving(p: tasp.Plan) -> list[list[int]]:
    hops, units = p.hops(), p.subchunks
    result: list[list[int]] = [[] for _ in range(p.ranks)]
    rows = zip(hops.dst.tolist(), hops.owner.tolist(), p.subchunk_of(hops, 0).tolist(), strict=True)
    for dst, owner, unit in rows:
        low = units.low[unit]
        result[dst] += p.tokens(owner)[low : low + units.count[unit]].tolist()
    return result


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    LENGTHS,
    st.integers(1, 8),
    st.sampled_from(sorted(tasp.layouts())),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(1, 40),
)
def test_exactly_what_is_needed_travels_once(lengths, ranks, layout, causal, nodes, window):
    docs = tasp.Documents.of(lengths, causal=causal, window=window)
    machine = f"mesh{ranks // 2}x2" if nodes and ranks % 2 == 0 else None
    options = {"move_q": False}
    p = tasp.plan(
        docs, ranks, schedule="sap", layout=layout, machine=machine, schedule_options=options
    )
    tasp.check(p)
    for wanted, found in zip(needed(p), arriving(p), strict=True):
        assert len(found) == len(set(found))
        assert wanted == set(found)


def test_ranks_without_a_common_document_exchange_nothing():
    p = tasp.plan([64] * 4, 4, schedule="sap", layout="contiguous")
    assert not p.hops().step.size
    assert p.schedule.num_steps(backward=True) == 0
    assert all(len(lower(p, r).steps) == 1 for r in range(4))


def test_a_share_crosses_to_a_node_once_and_is_handed_on():
    p = tasp.plan([800], 8, schedule="sap", layout="zigzag", machine="mesh4x2")
    hops = p.hops()
    crossing = hops.where(hops.src // 4 != hops.dst // 4)
    key = np.stack([crossing.owner, crossing.share, crossing.dst // 4])
    assert np.unique(key, axis=1).shape[1] == len(crossing.step)
    assert (crossing.src == crossing.owner).all()
    direct = tasp.plan([800], 8, schedule="sap", layout="zigzag").hops()
    assert len(crossing.step) < (direct.src // 4 != direct.dst // 4).sum() / 2


@pytest.mark.parametrize("machine", [None, "mesh4x2", "mesh2x4"])
@pytest.mark.parametrize("buffer_tokens", [0, 40, 400])
def test_buffers_are_bounded_and_a_larger_one_means_fewer_steps(machine, buffer_tokens):
    options = {"buffer_tokens": buffer_tokens} if buffer_tokens else None
    p = tasp.plan([700, 100], 8, schedule="sap", machine=machine, schedule_options=options)
    report = tasp.check(p)
    budget = buffer_tokens or 100
    assert report.peak_shards * 100 <= 2 * budget + (
        2 * 3 * (budget // 8 + 1) if budget < 64 else 0
    )
    assert max(lower(p, r).kv_buffer_rows for r in range(8)) <= 2 * budget + 6 * (budget // 8 + 1)
    if buffer_tokens == 400:
        assert (
            p.schedule.num_steps()
            < tasp.plan([700, 100], 8, schedule="sap", machine=machine).schedule.num_steps()
        )


def ready(p: tasp.Plan) -> np.ndarray:
    return arrivals(p.hops(), KV, (p.ranks, p.ranks, p.schedule.num_shares)) + 1


def test_gradient_arcs_are_the_rings_own_on_a_ring():
    ring = tasp.plan([64], 5, schedule="tasp", layout="zigzag")
    back = ring.hops(backward=True)
    wave = tasp.plan([64], 8, schedule="wave", machine="mesh4x2")
    table = wave.hops(backward=True)
    derived = return_arcs(wave.hops(), ready(wave))
    assert set(derived.lines()) == set(table.where(table.kind == DKV).lines())
    # on rings the closing arc is shorter than the way back, so they have their own rule
    assert back.step.max() < return_arcs(ring.hops(), ready(ring)).step.max()


def test_plans_without_a_layout_are_refused_and_tables_keep_their_cuts():
    p = tasp.plan([90, 3], 4, schedule="sap", layout="striped")
    again = p.with_hops(p.hops(backward=True).lines())
    assert (tasp.check(again).work == tasp.check(p).work).all()
    assert tasp.Plan.from_json(again.to_json()) == again
    with pytest.raises(tasp.PlanError):
        tasp.check(p.with_hops(p.hops(backward=True).lines()[1:]))
    with pytest.raises(tasp.PlanError, match="buffer_tokens must be a whole number"):
        tasp.plan([9], 2, schedule="sap", schedule_options={"buffer_tokens": -1})
