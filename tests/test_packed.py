"""The packed-row benchmark and what it must show at full size (balance, volume, compile time)."""

from __future__ import annotations

import pytest

import tasp_core as tasp
from tasp_core.lab.bench import packed
from tasp_core.lab.bench.accuracy import Errors
from tasp_core.lab.bench.document_lengths import row_lengths

MOVED = {  # percent of a plain ring's, P = 8, 16, 64, mean of five seeds
    "pretraining": (0.45, 0.70, 1.15),
    "sft": (0.02, 0.02, 0.12),
    "code": (2.0, 2.6, 3.5),
    "giant": (33.5, 33.5, 33.5),
}


def test_a_small_row_is_planned_and_run():
    r = packed.planned("sft", 1 << 15, 4, "balanced", "sap")
    assert r["worst_work_max_mean"] <= 1.05
    assert r["tokens_max_mean"] == 1.0
    assert r["moved_percent"] < packed.planned("sft", 1 << 15, 4, "zigzag", "sap")["moved_percent"]
    devices = packed.timed(2048, 2, repeats=1, tflops=0.1)
    assert devices["right"]
    docs = tasp.Documents.of(row_lengths("sft", 2048, packed.SEEDS[0]))
    for method in devices["methods"]:
        p = tasp.plan(docs, 2, schedule=method["schedule"], layout=method["layout"])
        kernels_s = tasp.check(p).work.sum(axis=1).max() * (4 + 10) * 8 * 64 / 0.1e12
        assert method["wall_s"][0] >= kernels_s > 0.02
    run = packed.timed(2048, 2, repeats=1)
    assert run["right"]
    assert [m["schedule"] for m in run["methods"]] == [s for _, s in packed.RUN]
    assert all(len(m["wall_s"]) == 1 and m["wall_s"][0] > 0 for m in run["methods"])


@pytest.mark.full
@pytest.mark.parametrize("name", packed.DISTRIBUTIONS)
@pytest.mark.parametrize("ranks", [8, 16])
def test_rows_that_may_not_be_permuted_are_balanced_by_moving_queries(name, ranks):
    r = packed.planned(name, 1 << 20, ranks, "contiguous", "sap")
    assert r["worst_work_max_mean"] <= (1.25 if name == "giant" else 1.10)
    assert r["tokens_max_mean"] <= 1.001
    assert 0 < r["queries_percent"] < 10
    assert r["peak_travelling_kv"] <= 2.0


def test_gathers_cost_little():
    found = packed.gathering(8192, 2)
    assert found["share"] <= 0.05


def test_nothing_is_timed_that_is_wrong(monkeypatch):
    wrong = Errors(
        dict.fromkeys(("out", "lse", "dq", "dk", "dv"), 1.0),
        {},
        dict.fromkeys(("out", "lse", "dq", "dk", "dv"), 0.5),
    )
    monkeypatch.setattr(packed, "verify", lambda *a, **k: (wrong, [0.0]))
    run = packed.timed(512, 2, repeats=1)
    assert not run["right"]
    assert "methods" not in run
    assert packed._run_lines(run).startswith("WRONG")


@pytest.mark.full
@pytest.mark.parametrize("name", packed.DISTRIBUTIONS)
@pytest.mark.parametrize(("at", "ranks"), [(0, 8), (1, 16), (2, 64)])
def test_balance_and_volume_at_a_million_tokens(name, at, ranks):
    r = packed.planned(name, 1 << 20, ranks, "balanced", "sap")
    assert r["worst_work_max_mean"] <= 1.0501
    assert r["worst_tokens_max_mean"] <= 1.02
    assert r["moved_percent"] <= MOVED[name][at]
    assert r["peak_travelling_kv"] <= 2.0
