"""What figures count: arrows, cells, tiles, spans and bars are those of the plan, timeline or file."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from test_figures import ROW, make, times
from test_visualize import SVG, named, texts, tip

from tasp_core import Documents, Machine, check, lower, machine, plan
from tasp_core.planning.work import own_steps
from tasp_core.schedules import KV, Q
from visualize import Figure, View, compare, hops, mask, results, timeline, topology
from visualize.colours import SOFT, colour
from visualize.memory import buffers
from visualize.raster import pairs_by_rank, pairs_by_step

MOVED = [("helper", 6), ("token_ring", 4), ("mesh", 6)]  # schedules that move queries


@pytest.mark.parametrize(
    "case", [*MOVED, ("ring", 5), ("tasp", 5), ("wave", 8, "mesh4x2"), ("sap", 4)]
)
def test_arrows_of_a_step_are_its_hops_and_cells_what_is_held(case):
    p = make(*case)
    table, n = p.hops(), p.ranks
    for step in range(p.schedule.num_steps()):
        root = ET.fromstring(hops(p, step=step).svg)
        here = table.where(table.step == step)
        wanted = sorted({f"{a} to {b}" for a, b in zip(here.src, here.dst, strict=True)})
        assert sorted(tip(a).split(":")[0] for a in named(root, "arrow")) == wanted
        for mark in named(root, "arrow"):
            src, dst = map(int, tip(mark).split(":")[0].split(" to "))
            owners = set(here.owner[(here.src == src) & (here.dst == dst)].tolist())
            assert mark[1].get("stroke") == (colour(*owners) if len(owners) == 1 else SOFT)
        got = table.where(table.step <= step)
        has = np.zeros((n, n))
        keys, moved = (got.where(got.kind == kind) for kind in (KV, Q))
        np.add.at(has, (keys.dst, keys.owner), p.tokens_moved(keys))
        has = has / np.maximum(1, p.layout.counts) + np.eye(n)
        held = {tip(c): c.get("fill") for c in named(root, "held")}
        assert held == {
            f"rank {a} has {has[a, b]:.0%} of rank {b}'s KV": colour(b)
            for a, b in np.argwhere(has > 0).tolist()
        }
        links = {(a, b) for a, b in zip(moved.dst.tolist(), moved.owner.tolist(), strict=True)}
        rings = {
            tuple(map(int, re.findall(r"rank (\d+)", tip(g)))) for g in named(root, "remote query")
        }
        assert rings == links


def tiles(fig: Figure, cell: float) -> dict[str, float]:
    """Cells by tip."""
    found: dict[str, float] = {}
    for t in named(ET.fromstring(fig.svg), "tile"):
        area = float(t.get("width", 0)) * float(t.get("height", 0)) / cell**2
        found[tip(t)] = found.get(tip(t), 0) + area
    return found


@pytest.mark.parametrize("schedule", ["ring", "helper", "token_ring", "mesh"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "per_document", "balanced"])
@pytest.mark.parametrize("window", [None, 6])
def test_tiles_of_a_short_row_are_its_pairs(layout, schedule, window):
    p = make(schedule, 4, layout=layout, docs=Documents.of(ROW, window=window))
    work, cell = check(p).work, 600 / 64
    by_rank = tiles(mask(p), cell)
    assert by_rank == pytest.approx(
        {f"rank {r}": w for r, w in enumerate(work.sum(axis=1))}, rel=0.01
    )
    for rank in range(4):
        by_step = tiles(mask(p, rank=rank), cell)
        del by_step["other ranks"]
        wanted = {f"step {t}" + " (own keys)" * (t == 0): w for t, w in enumerate(work[rank]) if w}
        assert by_step == pytest.approx(wanted, rel=0.01)


def test_tiles_of_own_keys_that_fill_steps_are_those_of_the_check():
    slow = Machine("slow links", 4, link_gbps=5.0, latency_s=1e-9, tflops=0.05)
    p = plan(
        [40, 9, 30],
        4,
        schedule="sap",
        layout="balanced",
        machine=slow,
        schedule_options={"relay": 3},
    )
    work, filled = check(p).work, 0
    for rank in range(4):
        by_step = tiles(mask(p, rank=rank), 600 / 79)
        del by_step["other ranks"]
        own = own_steps(p, backward=False)[rank].any()
        filled += own
        first = "" if own else " (own keys)"
        wanted = {f"step {t}" + first * (t == 0): w for t, w in enumerate(work[rank]) if w}
        assert by_step == pytest.approx(wanted, rel=0.01)
    assert filled


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7, 60])
def test_documents_alone_with_windows(causal, window):
    docs = Documents.of(ROW, causal=causal, window=window)
    assert tiles(mask(docs), 600 / 64) == pytest.approx({"visible": docs.num_pairs}, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 4])
def test_stripes_of_a_long_row_are_no_one_s_cells(ranks):
    p = make("ring", ranks, layout="striped", docs=[4800])
    assert set(tiles(mask(p), 6)) == {"several"}
    assert set(tiles(mask(make("ring", ranks, docs=[4800])), 6)) == {
        f"rank {r}" for r in range(ranks)
    }


@pytest.mark.parametrize(
    "case", [*MOVED, ("ring", 3), ("tasp", 8), ("wave", 8, "mesh4x2"), ("sap", 5)]
)
def test_pairs_are_those_of_check(case):
    p = make(*case, docs=[0, 811, 3, 1, 190])
    work = check(p).work
    assert pairs_by_rank(p).tolist() == work.sum(axis=1).tolist()
    for rank in range(p.ranks):
        *steps, never = pairs_by_step(p, rank).tolist()
        assert steps[: work.shape[1]] == work[rank].tolist()
        assert never == sum(steps[work.shape[1] :]) == 0


def test_a_hop_that_is_missing_leaves_pairs_black():
    p = make("ring", 4, layout="contiguous", docs=[64])
    words = [w for w in p.hops(backward=True).lines() if w != "t2 2>3 kv0.0"]
    fig = mask(p.with_hops(words), rank=3)
    never = int(pairs_by_step(p.with_hops(words), 3)[-1])
    assert never == check(p).work[3, 3] > 0
    assert f"never: {never} pairs" in fig.desc
    assert tiles(fig, 600 / 64)["never"] == pytest.approx(never, rel=0.01)


@pytest.mark.parametrize(
    "case", [*MOVED, ("ring", 5), ("tasp", 8), ("wave", 8, "mesh4x2"), ("sap", 4)]
)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("window", [None, 50])
def test_spans_fill_the_buffers_and_never_overlap(case, backward, window):
    p = make(*case, docs=Documents.of([700, 3, 80], window=window))
    for rank in range(p.ranks):
        program = lower(p, rank, backward=backward)
        for _, spans, size in buffers(p, program):
            used = np.zeros((size, len(program.steps) + 1), dtype=int)
            for s in spans:
                used[s.low : s.low + s.count, s.first : s.last + 1] += 1
            assert used.max(initial=1) == 1
            assert used.any(axis=1).all()
        got = sum(m.count for step in program.steps for m in step.recvs if m.kind == KV)
        assert sum(s.count for s in buffers(p, program)[0][1]) == got


def test_timeline_bars_are_the_spans_on_one_scale():
    t = times()
    root = ET.fromstring(timeline([("a", t), ("b", t)]).svg)
    bars = [b for b in named(root, "compute")][: len(t.compute.reshape(-1, 2))]
    wide = np.array([float(b.get("width", 0)) for b in bars]).reshape(3, 4)
    np.testing.assert_allclose(wide / wide[0, 0], [[1] * 4, [2] * 4, [3] * 4], atol=0.01)
    assert len(named(root, "comm")) == 2 * 3 * 3
    words = [x.text for x in texts(root)]
    assert words.count("0%") == words.count("33%") == words.count("67%") == 2


def test_compare_marks_the_fastest_and_its_bars_are_seconds():
    quick, slow = times(2), times(8, 8)
    root = ET.fromstring(compare([("slow", slow), ("quick", quick)]).svg)
    assert (root[0].text or "").endswith("quick is fastest with 11 ms")
    bars = [(tip(b), float(b.get("width", 0))) for b in root.iter(SVG + "rect") if tip(b)]
    assert [t for t, _ in bars][3:] == [
        "quick: total 11 ms",
        "quick: compute 8 ms",
        "quick: communication 9 ms",
    ]
    wide = [w for _, w in bars]
    np.testing.assert_allclose(
        np.array(wide) / wide[3], np.array([29, 64, 21, 11, 8, 9]) / 11, rtol=0.01
    )
    bold = [t.text for t in texts(root) if t.get("font-weight") == "700"]
    assert bold[1:] == ["quick", "1.12"]


def test_topology_lines_are_links():
    def lines(where) -> list[str]:
        root = ET.fromstring(topology(where).svg)
        return [t for e in root.iter(SVG + "path") if "GB/s" in (t := tip(e))]

    assert len(lines(machine("mi300x"))) == 28
    assert len(lines(machine("h100"))) == 0
    slow = lines(machine("mesh4").degraded({"link 3>2": 5}))
    assert [t for t in slow if " to " in t] == ["2 and 3: 5 to 64.3 GB/s"]


def result(tmp_path: Path, **body) -> Path:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"schema": 1, "kind": "x", **body}))
    return path


def test_results_keep_measured_modelled_and_quoted_apart(tmp_path):
    rows = [{"name": "a", "m": [3.0, 1.0, 2.0], "p": 4.0, "q": 5.0}]
    views = [
        View("rows", ("name",), key, "s", how, f"of {key}")
        for key, how in (("q", "quoted"), ("p", "modelled"), ("m", "measured"))
    ]
    root = ET.fromstring(results(result(tmp_path, rows=rows), views).svg)
    words = [t.text or "" for t in texts(root)]
    order = [
        next(i for i, w in enumerate(words) if w.startswith(x))
        for x in ("measured:", "of m", "modelled:", "of p", "quoted:", "of q")
    ]
    assert order == sorted(order)
    assert [tip(b) for b in named(root, "bar")] == ["a: 2 s", "a: 4 s", "a: 5 s"]
    assert len({(b.get("fill"), b.get("stroke-dasharray")) for b in named(root, "bar")}) == 3


def test_results_say_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="of kind 'x'; known are demo, packed, steps, overhead"):
        results(result(tmp_path))
    with pytest.raises(ValueError, match="there is no 'rows' of 'rows', only schema, kind"):
        results(result(tmp_path), [View("rows", (), "", "s", "measured", "t")])
    for text, what in (
        ("{", "is not JSON"),
        ("[1]", "not a result file"),
        ('{"schema": 2}', "not a result file"),
    ):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(ValueError, match=what):
            results(tmp_path / "b.json")
