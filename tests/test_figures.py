"""Figures of every subject: well-formed, legible, alike in SVG and plotly, and what the plan says."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from test_visualize import SVG, named, text_boxes, texts, tip

from tasp_core import Documents, lower, machine, plan
from tasp_core.costs.simulate import Timeline
from visualize import (
    Figure,
    balance,
    compare,
    hops,
    links,
    lowering,
    mask,
    memory,
    results,
    rings,
    timeline,
    together,
    topology,
)
from visualize.colours import colour, mix
from visualize.figure import CELL

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "visualize" / "recorded"
ROW = [20, 9, 0, 35]


def make(schedule: str, ranks: int, where: str | None = None, layout: str = "zigzag", docs=ROW):
    return plan(docs, ranks, schedule=schedule, machine=where, layout=layout)


def times(ranks: int = 3, steps: int = 4) -> Timeline:
    """A timeline: step t of rank r computes r + 1 ms and sends 3 ms, the last step sends nothing."""
    start = 3e-3 * np.arange(steps)[None, :] + np.zeros((ranks, 1))
    compute = np.stack([start, start + 1e-3 * (1 + np.arange(ranks))[:, None]], axis=2)
    comm = np.stack([start, start + 3e-3], axis=2)
    comm[:, -1, 1] = comm[:, -1, 0]
    ends = float(compute.max()), 3e-3 * (steps - 1), 1e-3 * ranks * steps
    return Timeline("a pass", compute, comm, *ends, link_bytes={}, bound_s=1e-3)


@cache
def gallery() -> dict[str, Figure]:
    """Each subject, in its plain and in its odd states."""
    eight, packed = make("tasp", 8), make("sap", 4, layout="balanced", docs=[4096, 137, 89, 640])
    found = {
        "rings": rings(eight),
        "links": links([eight, make("ring", 8)]),
        "balance": balance(eight),
        "hops": hops(eight, step=3),
        "hops wave": hops(make("wave", 8, "mesh4x2"), step=1),
        "hops sap": hops(packed),
        "hops 1": hops(make("ring", 1)),
        "hops 64": hops(make("ring", 64)),
        "rings mesh": rings(make("mesh", 6)),
        "hops mesh": hops(make("mesh", 6)),
        "links mesh": links(make("mesh", 6)),
        "memory mesh": memory(make("mesh", 6), backward=True),
        "mask docs": mask(Documents.of([300, 5000, 89], causal=False)),
        "mask window": mask(Documents.of([300, 5000, 89], window=700)),
        "mask": mask(packed),
        "mask exact": mask(eight),
        "mask 30": mask(make("tasp", 30)),
        "mask 1": mask(make("ring", 1)),
        "mask helper": mask(make("helper", 5), rank=1),
        "mask striped": mask(make("ring", 4, layout="striped", docs=[900]), rank=1),
        "mask step": mask(packed, rank=3, step=1),
        "memory": memory(eight, backward=True),
        "memory wave": memory(make("wave", 8, "mesh4x2"), rank=3),
        "memory 1": memory(make("ring", 1)),
        "memory all": memory(make("all_gather", 5)),
        "memory 40": memory(make("tasp", 40, docs=[4000])),
        "lowering": lowering(eight, rank=3, backward=True, first=1),
        "lowering sap": lowering(packed, rank=3),
        "lowering mesh": lowering(make("mesh", 6), steps=3),
        "lowering 1": lowering(make("ring", 1)),
        "timeline": timeline([("Ring", times()), ("long label " * 9, times(8, 8))]),
        "compare": compare([("Ring", times()), ("long label " * 9, times(8, 8))]),
        "timeline 1": timeline(times(1, 1)),
        "timeline 70": timeline(times(70, 70)),
        "m mesh": topology(machine("mi300x")),
        "m nodes": topology(machine("h100x9")),
        "m pcie": topology(machine("a100_pciex2")),
        "m one": topology(machine("mesh1")),
        "m dead": topology(machine("mesh5").degraded({"link 0>1": 0, "link 3>2": 5})),
        **{f"results {k}": results(RESULTS / f"{k}.json") for k in ("demo", "packed", "overhead")},
    }
    return {**found, "together": together([found["rings"], found["links"]])}


EVERY = pytest.mark.parametrize("name", gallery())


@EVERY
def test_svg_is_well_formed_described_and_legible(name):
    svg = gallery()[name].svg
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    assert [child.tag for child in root[:2]] == [SVG + "title", SVG + "desc"]
    assert all(len(child.text or "") > 10 for child in root[:2])
    assert svg.isascii()
    assert "nan" not in svg
    width, height = (float(root.get(key, 0)) for key in ("width", "height"))
    assert width <= 1200
    assert all(float(t.get("font-size", 0)) >= 13 for t in texts(root))
    boxes = sorted(text_boxes(root))
    for i, a in enumerate(boxes):
        assert 0 <= a.left < a.right <= width, a
        assert 0 <= a.top < a.bottom <= height, a
        for b in boxes[i + 1 :]:
            if b.left >= a.right:
                break
            assert b.top >= a.bottom or a.top >= b.bottom, (a, b)


@EVERY
def test_three_forms_say_the_same(name):
    fig = gallery()[name]
    bundle = fig._repr_mimebundle_()
    assert list(bundle) == ["text/plain", "image/svg+xml", "application/vnd.plotly.v1+json"]
    drawn = json.loads(json.dumps(bundle["application/vnd.plotly.v1+json"], allow_nan=False))
    words = [w for t in drawn["data"] if t.get("mode") == "text" for w in t["text"]]
    words = [html.unescape(re.sub("</?b>", "", w)) for w in words] + [
        a["text"] for a in drawn["layout"]["annotations"]
    ]
    assert sorted(words) == sorted(t.text or "" for t in texts(ET.fromstring(fig.svg)))
    tips = [w for t in drawn["data"] if "hovertemplate" in t for w in t["text"]]
    assert sorted(tips) == sorted(t for e in ET.fromstring(fig.svg)[2:] if (t := tip(e)))
    assert fig.title in bundle["text/plain"]
    assert fig.desc in bundle["text/plain"]


def test_plotly_fits_a_cell_as_a_whole():
    for fig in (rings(make("tasp", 8)), hops(make("ring", 4), step=0)):
        drawn, wide = fig.plotly, float(re.search(r'width="(\d+)"', fig.svg)[1])
        by = drawn["layout"]["width"] / wide
        assert drawn["layout"]["width"] <= CELL < wide
        sizes = {s for t in drawn["data"] for s in t.get("textfont", {}).get("size", ())}
        assert max(sizes) == pytest.approx(20 * by, abs=0.1)
        x = [v for t in drawn["data"] for v in t["x"] if v is not None]
        assert max(x) < drawn["layout"]["width"]


def test_plotly_accepts_every_figure():
    go = pytest.importorskip("plotly.graph_objects", reason="plotly comes with make notebooks")
    for fig in gallery().values():
        assert len(go.Figure(fig.plotly).data) == len(fig.plotly["data"])


def test_plotly_has_grids_below_and_frames_above():
    data = links(make("wave", 8, "mesh4x2")).plotly["data"]
    looks = [(t.get("fillcolor"), t["line"]["color"]) for t in data if "color" in t.get("line", {})]
    assert looks[0] == (None, "#BBBBBB")
    assert looks[-2:] == [(None, "#D55E00"), (None, "#1A1A1A")]


def test_frames_replace_what_changes():
    p = make("ring", 4)
    first = hops(p, step=0).plotly
    assert [f["name"] for f in first["frames"]] == ["0", "1", "2"]
    assert [s["label"] for s in first["layout"]["sliders"][0]["steps"]] == ["0", "1", "2"]
    for step, frame in enumerate(first["frames"]):
        shown = list(first["data"])
        for trace, index in zip(frame["data"], frame["traces"], strict=True):
            shown[index] = trace
        assert shown == hops(p, step=step).plotly["data"]


def test_a_rank_has_one_colour_in_all_figures():
    row = make("tasp", 8, docs=[8000])
    wanted = [colour(r) for r in range(8)]
    discs = named(ET.fromstring(topology(machine("mi300x")).svg), "rank")
    assert [d.get("fill") for d in discs] == wanted
    assert [d.get("fill") for d in named(ET.fromstring(hops(row).svg), "rank")] == wanted
    assert [c.get("fill") for c in named(ET.fromstring(balance(row).svg), "rank")] == wanted
    holders = {c.get("fill") for c in named(ET.fromstring(mask(row).svg), "holder")}
    assert holders - {"#8C8C8C"} == set(wanted)
    bars = named(ET.fromstring(timeline(times(8)).svg), "compute")
    assert {(int(re.findall(r"\d+", tip(b))[0]), b.get("fill")) for b in bars} == set(
        enumerate(wanted)
    )
    spans = named(ET.fromstring(memory(row).svg), "span")
    fills = {(int(tip(s)[2]), s.get("fill")) for s in spans}  # pale in the first step
    assert fills == {
        (r, f) for r in range(1, 8) for f in (wanted[r], mix(wanted[r], "#FFFFFF", 0.55))
    }


def test_the_last_panel_of_lowering_is_the_program():
    p = make("tasp", 4, docs=[64])
    program = lower(p, 2, backward=True)
    fig = lowering(p, rank=2, backward=True, first=1, steps=1)
    words = [t.text or "" for t in texts(ET.fromstring(fig.svg))]
    last = " ".join(words[words.index("insert_frees") :]).split()
    expected = " ".join(map(str, program.steps[1].instructions)).split()
    assert len(expected) > 40
    assert [x for x in last if x in set(expected)][-len(expected) :] == expected


def test_bad_requests_are_refused():
    p, docs = make("ring", 4), Documents.of(ROW)
    cases = [
        (lambda: hops(p, step=3), "step 3 does not exist"),
        (lambda: hops(p, step=-1), "step -1"),
        (lambda: mask(p, rank=4), "rank 4 does not exist: ranks are 0..3"),
        (lambda: mask(p, rank=0, step=4), "step 4 does not exist"),
        (lambda: mask(make("ring", 2, docs=[0, 0])), "a row of 0 tokens"),
        (lambda: mask(p, step=0), "give rank, too"),
        (lambda: mask(docs, rank=0), "have no ranks"),
        (lambda: timeline([]), "at least one"),
        (lambda: memory(p, rank=4), "rank 4 does not exist"),
        (lambda: lowering(p, rank=4), "rank 4 does not exist"),
        (lambda: lowering(p, first=4), r"there are steps 0..3, got first=4, steps=2"),
        (lambda: lowering(p, steps=0), "steps=0"),
        (lambda: mask(make("ring", 129)), "at most 128"),
        (lambda: hops(make("ring", 129)), "at most"),
        (lambda: topology(machine("mesh129")), "at most"),
        (lambda: rings(p).save("r.png"), ".svg"),
    ]
    for ask, what in cases:
        with pytest.raises(ValueError, match=what):
            ask()


def test_large_pictures_are_quick():
    cut = np.sort(np.random.default_rng(0).choice(2**20 - 1, 999, replace=False) + 1)
    row = np.diff(np.concatenate([[0], cut, [2**20]])).tolist()
    long, many = make("tasp", 8, docs=row, layout="per_document"), make("tasp", 64, docs=[65536])
    many.subchunks, long.layout.counts  # noqa: B018  (planning is not drawing)
    draws = [
        lambda: mask(long),
        lambda: mask(long, rank=3),
        lambda: mask(make("tasp", 64, docs=row)),
    ]
    draws += [lambda f=f: f(many) for f in (rings, links, balance, hops, mask, memory)]
    draws.append(lambda: timeline(times(64, 64)))
    for i, draw in enumerate(draws):
        start = time.process_time()
        assert len(draw().svg) < 2_000_000
        assert time.process_time() - start < 3, f"draw {i}: a quiet machine needs less than 1 s"


def test_save_and_imports(tmp_path):
    path = rings(make("ring", 3)).save(tmp_path / "r.svg")
    assert ET.fromstring(path.read_text()).get("role") == "img"
    code = "import sys, visualize; print({'torch', 'plotly', 'ipywidgets'} & set(sys.modules))"
    look = {"env": {"PYTHONPATH": str(ROOT)}, "timeout": 60}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, **look)
    assert said.stdout == b"set()\n"
