"""Formulas of bytes and buffers against what the lowered programs send and hold."""

from __future__ import annotations

import itertools

import pytest
from spread import spread

import tasp_core as tasp
from tasp_core.costs.bytes import RowBytes, formula, wire_bytes
from tasp_core.schedules import SCHEDULES

ROW = RowBytes.of(8, 2, 64, 2)
DENSE = tasp.Documents.of([480], causal=False)
ROWS = (
    DENSE,
    tasp.Documents.of([480]),
    tasp.Documents.of([137, 300, 7]),
    tasp.Documents.of([5, 1]),
)
MACHINES = (None, "mesh2x2", "mesh3x2")


def counted(p: tasp.Plan) -> tuple[list[int], int]:
    """Bytes all ranks send, forward and backward, and the most a rank holds in the forward pass."""
    passes = [[tasp.lower(p, r, backward=b) for r in range(p.ranks)] for b in (False, True)]
    sent = [
        sum(wire_bytes(x, ROW, sent=True, backward=bool(b)) for x in programs)
        for b, programs in enumerate(passes)
    ]
    held = [
        x.kv_buffer_rows * ROW.kv + x.remote_query_rows * (ROW.q[0] + ROW.partial[0])
        for x in passes[0]
    ]
    return sent, max(held)


@pytest.mark.parametrize(
    ("schedule", "layout"),
    spread(itertools.product(tasp.schedules(), tasp.layouts()), keep=2 * len(tasp.schedules())),
)
def test_formulas_are_what_programs_send_and_hold(schedule, layout):
    seen = 0
    for docs in ROWS:
        for machine in MACHINES:
            ranks = tasp.machine(machine).ranks if machine else 5
            options = {"schedule": schedule, "layout": layout, "machine": machine}
            if not tasp.supports(docs, ranks, **options):
                continue
            p = tasp.plan(docs, ranks, **options)
            closed = formula(p, ROW)
            if closed is None:
                assert p.schedule.variable_size
                continue
            sent, held = counted(p)
            assert list(closed.sent) == sent, str(p)
            assert held <= closed.buffers + 1e-6, str(p)
            seen += 1
    assert seen > 0 or SCHEDULES[schedule].variable_size


def test_two_kv_are_the_buffers_of_relays_and_a_bound_that_binds():
    p = tasp.plan([480], 4, schedule="ring")
    assert formula(p, ROW).buffers == 2 * 120 * ROW.kv + 2 * 2 * ROW.kv
    assert counted(p)[1] == 2 * 120 * ROW.kv


@pytest.mark.parametrize("intra", [2, 4])
@pytest.mark.parametrize("heads", [(8, 2), (8, 1), (40, 8)])
def test_ulysses_bytes_add_up_to_what_explain_says(intra, heads):
    docs = tasp.Documents.of([480])
    p = tasp.plan(docs, 8, schedule="ring", machine="mesh4x2", intra=intra)
    cost = tasp.explain(p, heads=heads[0], kv_heads=heads[1], head_dim=64)
    q = sum(heads[0] // intra * 64 * 2 * r.tokens * (intra - 1) for r in cost.ranks)
    for r in cost.ranks:  # dq comes in as q went out; whatever leaves a rank reaches another
        assert r.bytes_heads[0] > 0
    assert sum(r.bytes_heads[0] for r in cost.ranks) > 2 * q
    assert sum(r.bytes_heads[0] for r in cost.ranks) == sum(r.bytes_heads[1] for r in cost.ranks)
