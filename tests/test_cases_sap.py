"""CASES L1-L4, L12, L13, N12 with SAP: whole documents, moved queries, two nodes, a window; real ranks."""

from __future__ import annotations

import itertools
import resource

import numpy as np
import pytest

import tasp_core as tasp
from tasp_core.lab.bench.accuracy import Inputs, Reference, run_rank

ROWS = {
    "L1": (2, (200, 300, 24, 400, 100)),
    "L2": (4, (698,)),
    "L3": (2, (7, 3)),
    "L4": (8, (137, 2041, 89)),
    "L12": (4, (30, 500, 2)),  # middle ranks hold keys of a document whose queries are elsewhere
    "L13": (4, (2000,)),
    "L13 tiny": (8, (3,)),
    "L11": (4, (0, 1, 0, 1)),
}


def results(rank, group, plans, inputs):
    return [run_rank(rank, group, p, inputs)[0] for p in plans]


def plans_of(lengths, ranks, window):
    docs = tasp.Documents.of(lengths, window=window)
    machines = (None, f"mesh{ranks // 2}x2")
    return [
        tasp.plan(docs, ranks, schedule="sap", layout=layout, machine=machine)
        for layout, machine in itertools.product(("balanced", "contiguous"), machines)
    ]


@pytest.mark.parametrize("name", ROWS)
def test_sap_on_rows_that_broke_others(name):
    ranks, lengths = ROWS[name]
    inputs = Inputs.random(sum(lengths), 4, 2, 16, seed=len(lengths))
    plain, windowed = (plans_of(lengths, ranks, window) for window in (None, 50))
    for p in (*plain, *windowed):
        tasp.check(p)
    first = tasp.launch(results, ranks, [*plain, *windowed], inputs)
    again = tasp.launch(results, ranks, plain, inputs)
    judges = {p.docs: Reference(inputs, p.docs) for p in (plain[0], windowed[0])}
    for i, p in enumerate((*plain, *windowed)):
        errors = judges[p.docs].errors([pieces[i] for pieces in first], p)
        assert errors.ok, (str(p), errors)
    for one, other in zip(first, again, strict=True):  # L2: the same bits
        for a, b in zip(one[: len(plain)], other, strict=True):
            assert all((x == y).all() for x, y in zip(a, b, strict=True))


def test_l12_there_are_ranks_with_keys_and_without_queries_of_a_document():
    p = tasp.plan(ROWS["L12"][1], 4, schedule="sap", layout="contiguous")
    assert len(p.schedule.offloaded.step)  # queries that are computed where only their keys live
    held = [set(p.docs.document_of(p.tokens(r)).tolist()) for r in range(4)]
    homes = {
        (int(r), int(q))
        for r, q in zip(p.schedule.offloaded.rank, p.schedule.offloaded.q_owner, strict=True)
    }
    assert any(held[r] != held[q] for r, q in homes)


def test_n12_planning_and_proving_a_long_row_builds_nothing_dense():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for layout in ("balanced", "contiguous"):
        p = tasp.plan([50_000], 8, schedule="sap", layout=layout)
        assert tasp.check(p).pairs == 50_000 * 50_001 // 2
        assert all(np.isfinite(tasp.lower(p, r).kv_buffer_rows) for r in range(8))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB; a bool mask: 2.5 GB
    assert grown < 300_000
