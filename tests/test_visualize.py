"""Pictures are what the plan says: one arrow a hop, one number a link, text that can be read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import namedtuple
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest

from tasp_core import Plan, check, plan
from visualize import balance, links, rings
from visualize.__main__ import main
from visualize.colours import colour, ramp

SVG = "{http://www.w3.org/2000/svg}"
CASES = [("ring", 1, None), ("ring", 7, None), *(("tasp", n, None) for n in (2, 4, 5, 8, 20))]
CASES += [("tasp", 6, "mesh2x3"), ("wave", 4, "mesh1x4"), ("wave", 8, "mesh4x2")]
CASES += [("all_gather", 8, None), ("tasp_rails", 16, "mesh4x4"), ("tasp_paths", 8, "mesh4x2")]
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}")


def make(schedule: str, ranks: int, machine: str | None = None, layout: str = "zigzag") -> Plan:
    return plan([300, 1, 211], ranks, schedule=schedule, machine=machine, layout=layout)


def named(root: ET.Element, name: str) -> list[ET.Element]:
    return [e for e in root.iter() if e.get("class") == name]


def tip(element: ET.Element) -> str:
    return element.findtext(SVG + "title") or ""


def link_of(element: ET.Element) -> tuple[int, int]:
    found = re.match(r"(\d+) to (\d+)", tip(element))
    assert found
    return int(found[1]), int(found[2])


def texts(root: ET.Element) -> list[ET.Element]:
    return list(root.iter(SVG + "text"))


Box = namedtuple("Box", "left top right bottom text")


def text_boxes(e: ET.Element) -> list[Box]:
    """Where all upright texts stand, widths on the safe side."""
    move = e.get("transform", "")
    if "rotate" in move:
        return []
    if e.tag != SVG + "text":
        return [box for child in e for box in text_boxes(child)]
    size, words = float(e.get("font-size", 0)), e.text or ""
    wide = len(words) * size * (0.62 if e.get("font-weight") == "700" else 0.56)
    part = {"start": 0, "middle": 0.5, "end": 1}[e.get("text-anchor", "middle")]
    left, foot = float(e.get("x", 0)) - part * wide, float(e.get("y", 0))
    return [Box(left, foot - 0.75 * size, left + wide, foot + 0.05 * size, words)] if words else []


@EVERY
def test_no_two_texts_overlap(case):
    p = make(*case)
    pair = [("long label " * 9, p), ("two", make("ring", 8, "mesh4x2", "contiguous"))]
    for svg in (rings(p).svg, links(pair).svg, balance(pair).svg):
        boxes = sorted(text_boxes(ET.fromstring(svg)))
        for i, a in enumerate(boxes):
            for b in boxes[i + 1 :]:
                if b.left >= a.right:
                    break
                assert b.top >= a.bottom or a.top >= b.bottom, (a, b)


@EVERY
def test_every_picture_is_xml_with_alt_text_and_nothing_outside(case):
    p = make(*case)
    for svg in (rings(p).svg, links([("a", p)]).svg, balance(p).svg):
        root = ET.fromstring(svg)
        assert root.get("role") == "img"
        assert [child.tag for child in root[:2]] == [SVG + "title", SVG + "desc"]
        assert all(len(child.text or "") > 10 for child in root[:2])
        width = float(root.get("width", 0))
        assert width <= 1200
        assert all(float(t.get("font-size", 0)) >= 13 for t in texts(root))
        assert svg.isascii()
        assert "nan" not in svg
        for box in text_boxes(root):
            assert 0 <= box.left < box.right <= width, box
            assert 0 <= box.top < box.bottom <= float(root.get("height", 0)), box


@pytest.mark.parametrize("case", [("ring", 8), ("tasp", 4), ("tasp", 5), ("tasp", 8)])
def test_ring_arrows_are_the_arcs_of_the_rings(case):
    p = make(*case)
    found = [link_of(a) for a in named(ET.fromstring(rings(p).svg), "arrow")]
    wanted = [arc for c in p.schedule.rings.cycles for arc in pairwise((*c, c[0]))]
    assert found == wanted


@pytest.mark.parametrize("machine", ["mesh8", "mesh4x2", "mesh2x4", "mesh1x8"])
@pytest.mark.parametrize("schedule", ["wave", "all_gather"])
def test_step_arrows_are_the_hops_of_the_step(schedule, machine):
    p = make(schedule, 8, machine)
    root, hops = ET.fromstring(rings(p, max_rings=99).svg), p.hops()
    steps: list[set[tuple[int, int]]] = [set() for _ in range(p.schedule.num_steps())]
    for t, *link in zip(*(c.tolist() for c in hops[:3]), strict=True):
        steps[t].add(tuple(link))
    bold = [t.text or "" for t in texts(root) if re.match(r"(step|each of steps) \d", t.text or "")]
    arrows = iter(named(root, "arrow"))
    covered = []
    for caption in bold:
        first, *last = (int(x) for x in re.findall(r"\d+", caption))
        alike = range(first, (last or [first])[0] + 1)
        covered += alike
        shown = {link_of(next(arrows)) for _ in range(len(steps[first]))}
        assert all(shown == steps[t] for t in alike)
    assert covered == list(range(p.schedule.num_steps()))
    assert next(arrows, None) is None


def test_max_rings_limits_panels_and_says_so():
    svg = rings(Plan.from_json(make("tasp", 8).to_json()), max_rings=2).svg
    assert svg.count('class="arrow"') == 16
    assert "Shown: the first 2 of 7 rings" in svg
    assert "Shown" not in rings(make("tasp", 8)).svg


def test_nodes_are_boxes_with_names_and_framed_links():
    p, flat = make("tasp_rails", 8, "mesh4x2"), make("tasp", 8)
    root = ET.fromstring(rings(p, max_rings=1).svg)
    assert len(named(root, "node")) == 2
    assert {"node 0", "node 1"} <= {t.text for t in texts(root)}
    assert not named(ET.fromstring(rings(flat).svg), "node")
    framed = ET.fromstring(links([("w", p)]).svg)
    assert len(named(framed, "inside")) == 2
    assert framed[0].text == "w uses all 24 links inside nodes and all 8 NICs"
    assert not named(ET.fromstring(links([("w", flat)]).svg), "inside")


@EVERY
def test_heat_map_numbers_are_the_hops_over_shares(case):
    p = make(*case)
    n, hops, root = p.ranks, p.hops(), ET.fromstring(links([("x", p)]).svg)
    kv = np.bincount(hops.src * n + hops.dst, minlength=n * n) / p.schedule.num_shares
    wanted = {(a, b): f"{kv[a * n + b]:.3g}" for a, b in permutations(range(n), 2)}
    assert [tip(c) for c in named(root, "cell")] == [
        f"{a} to {b}: {x} KV" for (a, b), x in wanted.items()
    ]
    assert [t.text for t in named(root, "kv")] == (list(wanted.values()) if n <= 8 else [])


def test_bars_are_the_busy_links_of_each_step():
    for p in (make("ring", 8), make("tasp", 8)):
        bars = [tip(b) for b in named(ET.fromstring(links([("x", p)]).svg), "bar")]
        assert bars == [f"step {t}: {check(p).busy:.1%} busy" for t in range(7)]


def test_links_share_one_scale_and_one_panel_where_traffic_is_equal():
    pairs = [("Ring", make("ring", 8, layout="contiguous")), ("Zigzag-Ring", make("ring", 8))]
    root = ET.fromstring(links([*pairs, ("TASP", make("tasp", 8))]).svg)
    assert root[0].text == "Ring uses 8 of 56 links; TASP uses all 56 links, equally"
    assert "Ring, Zigzag-Ring" in {t.text for t in texts(root)}
    cells = named(root, "cell")
    assert {c.get("fill") for c in cells[:56]} == {"#FFFFFF", ramp(1)}
    assert {c.get("fill") for c in cells[56:]} == {ramp(1 / 7)}


def test_a_collective_is_not_called_a_user_of_all_links():
    title = ET.fromstring(links([("g", make("all_gather", 8)), ("r", make("ring", 8))]).svg)[0].text
    assert title == "r uses 8 of 56 links"
    assert "the library picks the routes" in links([("g", make("all_gather", 8))]).svg


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_balance_bars_are_the_work_of_check(layout):
    p = make("ring", 5, layout=layout)
    report, root = check(p), ET.fromstring(balance([("x", p)]).svg)
    found = np.zeros_like(report.work)
    foot = [set() for _ in range(5)]
    for bar in named(root, "work"):
        rank, step, pairs = (int(x) for x in re.findall(r"\d+", tip(bar)))
        found[rank, step] = pairs
        foot[rank] |= {round(float(bar.get("y")) + float(bar.get("height")))}
    assert [len(places) for places in foot] == np.count_nonzero(found, axis=1).tolist()
    np.testing.assert_array_equal(found, report.work)
    ratios = report.work.sum(axis=1) / report.work.sum(axis=1).mean()
    assert [t.text for t in named(root, "total")] == [f"{x:.2f}" for x in ratios]
    assert f"busiest rank / mean = {report.balance:.2f}" in {t.text for t in texts(root)}


def test_balance_names_bare_plans():
    assert balance(make("tasp", 4)).svg == balance([("tasp, zigzag", make("tasp", 4))]).svg


def test_no_plan_and_too_many_ranks_are_refused():
    for draw in (links, balance):
        with pytest.raises(ValueError, match="at least one"):
            draw([])
    p = make("ring", 129)
    for draw in (rings, balance, lambda p: links([("x", p)]).svg):
        with pytest.raises(ValueError, match="at most 128"):
            draw(p)


def test_labels_are_escaped():
    svg = links([('<&">\x00', make("ring", 3))]).svg
    assert '<&">?' in {t.text for t in texts(ET.fromstring(svg))}


def test_colours_of_many_ids_differ():
    assert len({colour(i) for i in range(128)}) == 128


ROWS = (("Ring", "ring"), ("TASP", "tasp"), ("Zigzag-TASP", "tasp"))


def result(rows=ROWS) -> dict:
    plans = [{"label": x, "plan": json.loads(make(s, 5).to_json())} for x, s in rows]
    return {"schema": 1, "kind": "demo", "attention": plans}


def run(tmp_path: Path, text: str, out: str = "out.svg") -> tuple[int, Path]:
    source, target = tmp_path / "result.json", tmp_path / out
    source.write_text(text)
    return main([str(source), "-o", str(target)]), target


def test_main_draws_rings_of_the_star_above_links_of_all(tmp_path, capsys):
    code, out = run(tmp_path, json.dumps(result()))
    assert code == 0
    assert capsys.readouterr().out == f"{out}\n"
    root = ET.fromstring(out.read_text())
    assert len(named(root, "arrow")) == 20
    assert len(named(root, "cell")) == 2 * 20
    start = "Zigzag-TASP on 5 ranks: 4 rings use all 20 links, equally; Ring uses 5 of 20 links; "
    assert (root[0].text or "").startswith(start)


def test_main_without_the_star(tmp_path):
    for rows, start in ((ROWS[:2], "TASP on 5"), (ROWS[:1], "Ring uses 5 of 20 links")):
        code, out = run(tmp_path, json.dumps(result(rows)))
        assert code == 0
        assert (ET.fromstring(out.read_text())[0].text or "").startswith(start)


BAD = {
    "is not JSON": "{",
    "is not a demo result of schema 1: schema and kind are list": "[1]",
    "schema and kind are (1, 'bench')": '{"schema": 1, "kind": "bench"}',
    "schema and kind are (2, 'demo')": json.dumps({**result(), "schema": 2}),
    "no rows": json.dumps({**result(), "attention": []}),
    "lacks a label or a plan": json.dumps({**result(), "attention": [{"label": "x"}]}),
    "row 'x': not a plan": json.dumps(
        {**result(), "attention": [{"label": "x", "plan": {"schema": 1}}]}
    ),
}


@pytest.mark.parametrize("reason", BAD)
def test_main_says_in_one_sentence_what_is_wrong(tmp_path, capsys, reason):
    code, out = run(tmp_path, BAD[reason])
    said = capsys.readouterr()
    assert code == 2
    assert not out.exists()
    assert reason in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_main_missing_file_and_unwritable_output(tmp_path, capsys):
    assert main([str(tmp_path / "none.json"), "-o", str(tmp_path / "o.svg")]) == 2
    assert "none.json" in capsys.readouterr().err
    assert run(tmp_path, json.dumps(result()), "no/such/folder.svg")[0] == 2


def test_main_as_a_module_and_no_torch(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(result()))
    code = (
        "import sys, runpy, visualize; assert 'torch' not in sys.modules; "
        "sys.argv[1:] = ['r.json', '-o', 'o.svg']\n"
        "try: runpy.run_module('visualize', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    root = Path(__file__).resolve().parent.parent
    look = {"cwd": tmp_path, "env": {"PYTHONPATH": str(root)}, "timeout": 60}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, **look)
    assert said.stdout == b"o.svg\n"
    assert (tmp_path / "o.svg").exists()
