"""SAP over relays: shares by way of a third rank, own keys computed in steps that have little to do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasp_core as tasp
from tasp_core.lab.bench.accuracy import Inputs, verify
from tasp_core.lab.bench.document_lengths import row_lengths
from tasp_core.lowering.lower import lower
from tasp_core.planning.work import own_steps, work_of
from tasp_core.schedules import KV, DeclaredLimits

SIZES = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "float32"}
ROW = tasp.Documents.of(row_lengths("sft", 16384, 1000))


def sap(docs, ranks, relay, layout="balanced", **options):
    return tasp.plan(
        docs,
        ranks,
        schedule="sap",
        layout=layout,
        schedule_options={"relay": relay, "buffer_tokens": 0, **options},
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 120), min_size=1, max_size=12),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(sorted(tasp.layouts())),
    st.booleans(),
    st.none() | st.integers(1, 40),
    st.sampled_from([0, 7, 60]),
)
def test_proved_for_any_row(lengths, ranks, relay, layout, causal, window, buffer_tokens):
    docs = tasp.Documents.of(lengths, causal=causal, window=window)
    p = sap(docs, ranks, relay, layout, move_q=False, buffer_tokens=buffer_tokens)
    report = tasp.check(p)
    hops = p.hops()
    found = work_of(p, hops, range(ranks), p.schedule.num_steps() + 1)
    computed = np.zeros_like(found.pairs)
    for rank in range(ranks):
        for t, step in enumerate(lower(p, rank).steps):
            computed[rank, t] += sum(c.pairs for c in (step.compute.calls if step.compute else ()))
    assert found.pairs.tolist() == computed.tolist()
    assert report.work.sum() == computed.sum()
    # what is passed on came in the step before, or from its owner
    came = {
        (d, o, s): t for t, d, o, s in zip(hops.step, hops.dst, hops.owner, hops.share, strict=True)
    }
    for t, src, owner, share in zip(hops.step, hops.src, hops.owner, hops.share, strict=True):
        assert src == owner or came[src, owner, share] == t - 1


def test_idle_links_carry_some_and_nobody_waits_long():
    straight, spread = (sap(ROW, 8, relay, buffer_tokens=4096) for relay in (0, 6))
    on = replace(tasp.machine("mesh8"), latency_s=0.0, message_s=0.0)
    for backward in (False, True):
        one, other = (tasp.simulate(p, on, backward=backward, **SIZES) for p in (straight, spread))
        assert len(other.link_bytes) > 1.5 * len(one.link_bytes)
        assert other.comm_s < 0.6 * one.comm_s
        assert other.total_s < 1.35 * max(other.comm_s, other.compute_s)


@pytest.mark.parametrize("buffer_tokens", [256, 2048])
def test_buffers_are_those_of_two_steps(buffer_tokens):
    p = sap(ROW, 8, 4, buffer_tokens=buffer_tokens)
    tasp.check(p)
    for rank in range(8):
        forward, backward = (lower(p, rank, backward=b) for b in (False, True))
        assert forward.kv_buffer_rows <= 2 * buffer_tokens
        assert backward.remote_grad_rows <= (2 if buffer_tokens == 2048 else 3) * buffer_tokens
    hops = p.hops()
    tokens = p.tokens_moved(hops)
    for rank in range(8):
        into = np.bincount(hops.step[hops.dst == rank], tokens[hops.dst == rank])
        assert into.max() <= buffer_tokens


@pytest.mark.parametrize(
    ("lengths", "ranks", "layout", "options"),
    [
        ([137, 300, 75, 1, 0, 90], 4, "balanced", {}),
        ([512], 3, "zigzag", {}),
        ([400, 20, 90], 4, "contiguous", {"move_q": True}),
        ([260, 250], 5, "per_document", {"exchange": "all_to_all"}),
    ],
)
def test_exact_on_real_ranks(lengths, ranks, layout, options):
    docs = tasp.Documents.of(lengths)
    p = sap(docs, ranks, 3, layout, **{"move_q": False, **options})
    assert (p.hops().src != p.hops().owner).any()
    assert bool(len(p.schedule.offloaded.step)) == options.get("move_q", False)
    errors, _ = verify(p, Inputs.random(docs.total, 4, 2, 16))
    assert errors.ok, errors


def test_plans_travel_and_tables_keep_their_turns():
    p = sap([90, 300, 40], 4, 4)
    assert tasp.Plan.from_json(p.to_json()) == p
    assert p.fingerprint() != sap([90, 300, 40], 4, 0).fingerprint()
    again = p.with_hops(p.hops(backward=True).lines())
    assert (tasp.check(again).work == tasp.check(p).work).all()
    hops = p.hops()  # the same in fewer steps than `relay` fills with own work
    names = list(zip(hops.dst, hops.owner, hops.share, strict=True))
    words = [f"t0 {o}>{d} kv{o}.{s}" for d, o, s in names]
    words += [f"t2 {d}>{o} dkv{o}.{s}" for d, o, s in names]
    short = p.with_hops(words, limits=DeclaredLimits(1000, 1000, 9.0))
    assert tasp.check(short).work.sum() == p.docs.num_pairs
    calls = [
        c for r in range(4) for s in lower(short, r).steps if s.compute for c in s.compute.calls
    ]
    assert sum(c.pairs for c in calls) == p.docs.num_pairs
    with pytest.raises(tasp.PlanError):
        tasp.check(p.with_hops(p.hops(backward=True).lines(), num_shares=p.schedule.num_shares + 2))
    with pytest.raises(ValueError, match="read-only"):
        own_steps(p, backward=False)[0] = 0
    kept = [w for w in p.hops(backward=True).lines() if not w.startswith("t1 ")]
    with pytest.raises(tasp.PlanError):
        tasp.check(p.with_hops(kept))
    assert (p.hops().kind == KV).all()


def test_over_nodes_or_many_ranks_it_is_refused():
    with pytest.raises(tasp.PlanError, match="relay is for the links of one node"):
        tasp.plan([64], 4, schedule="sap", machine="mesh2x2", schedule_options={"relay": 2})
    with pytest.raises(tasp.PlanError, match="up to 16 ranks, not 17; leave it at 0"):
        sap([64], 17, 2)
    with pytest.raises(tasp.PlanError, match="relay must be a whole number"):
        tasp.plan([64], 4, schedule="sap", schedule_options={"relay": -1})
