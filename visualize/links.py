"""Links: how much KV each directed link carries, and how many links work in each step.

    links([("Ring", plan_a), ("TASP", plan_b)]) -> Figure

One panel per plan: senders down, receivers across, one colour scale for all panels; beside it one bar
per step. Plans that load the links equally (one schedule with several layouts) share a panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tasp_core import Plan

from .colours import ACCENT, INK, PALE, SOFT, ink, ramp
from .figure import Figure, Plans, named
from .marks import (
    Drawing,
    Marks,
    beside,
    every,
    fit,
    grid,
    line,
    number,
    rect,
    scale,
    small,
    span,
    stack,
    text,
)
from .traffic import Traffic

PANEL, SIDE, TOP, LEFT, BARS, FEW = 570.0, 296.0, 84.0, 58.0, 150.0, 8
DASH = "5 3"
Named = tuple[tuple[str, ...], Traffic]


def merge(plans: Sequence[tuple[str, Plan]]) -> list[Named]:
    """(labels, traffic), plans with equal traffic as one."""
    by_traffic: dict[tuple[object, ...], Named] = {}
    for label, plan in plans:
        t = Traffic.of(plan)
        arrays = (t.kv.tobytes(), t.crossing.tobytes(), t.busy.tobytes())
        key = (arrays, t.step_kv, t.collective, t.queries)
        by_traffic[key] = ((*by_traffic.get(key, ((), t))[0], label), t)
    return list(by_traffic.values())


def _size(traffic: Traffic) -> float:
    """The side of a cell."""
    return min(48.0, SIDE / len(traffic.kv))


def _cell(traffic: Traffic, src: int, dst: int, most: float) -> Marks:
    """One link: its colour and, for few ranks, its number."""
    n, kv, size = len(traffic.kv), float(traffic.kv[src, dst]), _size(traffic)
    at, box = complex(LEFT + size * dst, TOP + size * src), complex(size, size)
    if src == dst:
        return [rect(at, box, fill="#CFCFCF", stroke="#FFFFFF")]
    tip = f"{src} to {dst}: {number(kv)} KV" if n <= 32 else ""
    fill = ramp(kv / most) if kv else "#FFFFFF"
    marks = [rect(at, box, fill=fill, stroke=PALE, name="cell", tip=tip)]
    if n <= FEW:
        shade = ink(fill) if kv else "#8C8C8C"
        marks.append(text(at + box / 2, number(kv), size=13, fill=shade, name="kv"))
    return marks


def _frames(traffic: Traffic) -> Marks:
    """Frames: dashed round the links between nodes, solid round the links inside each node."""
    n, size, at = len(traffic.kv), _size(traffic), complex(LEFT, TOP)
    side = n * size
    if not traffic.crossing.any():
        return [rect(at, complex(side, side), stroke="#999999", layer=1)]
    starts = np.flatnonzero(np.diagonal(traffic.crossing, 1)) + 1
    cuts = [0, *starts.tolist(), n]
    marks = []
    for cut in cuts:
        for a, b in (
            (cut * size, complex(cut * size, side)),
            (1j * cut * size, complex(side, cut * size)),
        ):
            marks.append(line(at + a, at + b, stroke=ACCENT, width=2, dash=DASH, layer=1))
    for low, high in pairwise(cuts):
        corner, box = at + complex(low, low) * size, complex(high - low, high - low) * size
        marks.append(rect(corner, box, stroke=INK, width=2, name="inside", layer=1))
    return marks


def _heat(traffic: Traffic, most: float) -> Marks:
    """The heat map, its axes and frames."""
    n, size, at = len(traffic.kv), _size(traffic), complex(LEFT, TOP)
    marks = [
        mark
        for src in range(n)
        for dst in range(n)
        if n <= 32 or traffic.kv[src, dst] or src == dst
        for mark in _cell(traffic, src, dst, most)
    ]
    marks += _frames(traffic)
    for rank in range(0, n, every(size, 20)):
        along = size * (rank + 0.5)
        marks.append(small(at + complex(along, -11), str(rank)))
        marks.append(small(at + complex(-8, along), str(rank), "end"))
    marks.append(small(at + complex(max(n * size / 2, 25), -29), "to rank"))
    middle = complex(LEFT - 40, TOP + max(n * size / 2, 32))
    marks.append(text(middle, "from rank", size=13, fill=SOFT, turn=-90))
    return marks


def _bars(traffic: Traffic, left: float, wide: float) -> Marks:
    """A bar for each step; outlines where a library decides what is really busy."""
    foot, steps = TOP + BARS, len(traffic.busy)
    pitch = min(40.0, wide / steps)
    fill, stroke, dash = ("none", SOFT, "3 3") if traffic.collective else (SOFT, "none", "")
    marks = []
    for step, busy in enumerate(traffic.busy.tolist()):
        at = complex(left + pitch * (step + 0.12), foot - busy * BARS)
        box, tip = complex(0.76 * pitch, busy * BARS), f"step {step}: {busy:.1%} busy"
        marks.append(rect(at, box, fill=fill, stroke=stroke, dash=dash, name="bar", tip=tip))
        if step % every(pitch, 22) == 0:
            marks.append(small(complex(left + pitch * (step + 0.5), foot + 13), str(step)))
    return marks


def _strip(traffic: Traffic) -> Marks:
    """The fraction of links and NICs that are busy in each step, and its summary."""
    edge = LEFT + SIDE + 24
    left, wide, foot, steps = edge + 40, PANEL - edge - 46, TOP + BARS, len(traffic.busy)
    if not steps:
        return []
    marks = [small(complex(edge, TOP - 29), "links busy in each step", "start")]
    for part in (0, 0.5, 1):
        y = foot - part * BARS
        marks.append(line(complex(left, y), complex(left + wide, y), stroke="#BBBBBB", layer=-1))
        marks.append(small(complex(left - 6, y), f"{part:.0%}", "end"))
    marks += _bars(traffic, left, wide)
    marks.append(small(complex(left + wide / 2, foot + 32), "step"))
    mean = f"{span(100 * traffic.busy.min(), 100 * traffic.busy.max())} % busy"
    if traffic.collective:
        mean = "if sent directly"
    marks.append(text(complex(edge, foot + 62), mean, anchor="start", bold=True))
    many = "1 step of" if steps == 1 else f"{steps} steps, each"
    for row, words in enumerate((f"{many} at most", f"{traffic.step_kv} KV over a link")):
        marks.append(small(complex(edge, foot + 82 + 18 * row), words, "start"))
    return marks


def _panel(labels: tuple[str, ...], traffic: Traffic, most: float) -> Drawing:
    """One plan, or several with equal traffic: labels, what they use, heat map, bars of steps."""
    what = traffic.amounts()
    if traffic.collective:
        what = "one library call, drawn as direct sends; the library picks the routes"
    name = fit(", ".join(labels), PANEL, size=16, bold=True)
    marks = [text(8j, name, size=16, anchor="start", bold=True)]
    marks.append(small(30j, fit(what, PANEL, size=13), "start"))
    high = max(len(traffic.kv) * _size(traffic), BARS + 110 if len(traffic.busy) else 64.0)
    return Drawing(PANEL, TOP + high + 6, marks + _heat(traffic, most) + _strip(traffic))


def _legend(most: float, between: bool) -> Drawing:
    """The colour scale and the meaning of frames."""
    keys = [(rect(1j, 16 + 16j, fill="#CFCFCF"), "the rank itself")]
    if between:
        keys.append((rect(1j, 16 + 16j, stroke=INK, width=2), "inside a node"))
        dashed = rect(1j, 16 + 16j, stroke=ACCENT, width=2, dash=DASH)
        keys.append((dashed, "between nodes (NICs)"))
    shown = [
        Drawing(150, 20, [mark, text(24 + 9j, words, size=13, anchor="start")])
        for mark, words in keys
    ]
    amount = scale("KV over a link in the whole forward pass:", "0", number(most))
    return beside([amount, *shown], gap=30)


def headline(panels: Sequence[Named]) -> str:
    """The title: the plan that uses the fewest links, against one that uses all.

    >>> from tasp_core import plan
    >>> headline(merge([(s, plan([64], 8, schedule=s)) for s in ("ring", "tasp")]))
    'ring uses 8 of 56 links; tasp uses all 56 links, equally'
    """
    own = [p for p in panels if not p[1].collective and len(p[1].kv) > 1]
    if not own:
        return "KV that each link carries"
    least = min(own, key=lambda panel: panel[1].part)
    best = max(own, key=lambda panel: (panel[1].all_used, panel[1].even))
    ends = [least, best] if best[1].all_used and not least[1].all_used else [least]
    return "; ".join(f"{who[0]} uses {t.usage()}{', equally' * t.even}" for who, t in ends)


def links(plans: Plans) -> Figure:
    """Draw what each link carries under each plan.

    Args:
        plans: a plan, or several, each bare or with a label: (label, plan).

    Raises:
        ValueError: no plan, or more ranks than can be drawn.

    >>> from tasp_core import plan
    >>> links([("TASP", plan([64], 5))]).svg.count('class="cell"')
    20
    """
    pairs = named(plans)
    panels = merge(pairs)
    most = max(float(t.kv.max()) for _, t in panels) or 1.0
    between = any(bool(t.crossing.any()) for _, t in panels)
    notes = "1 KV = the keys and values of one rank. "
    notes += "A cell is what the rank on its left sends the rank above it."
    if len(panels) < len(pairs):
        notes += " Plans that load every link equally in every step share a panel."
    if between:
        notes += " Inside a node each ordered pair of ranks has a link; each rank has one NIC."
    if any(t.queries for _, t in panels):
        notes += (
            " Queries that travel, and their partial outputs, count as the KV of as many tokens."
        )
    title = headline(panels)
    facts = (f"{', '.join(who)}: {t.amounts()}, in {len(t.busy)} steps" for who, t in panels)
    desc = f"{title}. Heat maps of KV from rank to rank, and bars of links busy in each step. "
    drawn = grid([_panel(who, t, most) for who, t in panels], min(2, len(panels)), gap=20)
    body = stack([_legend(most, between), drawn], gap=14)
    return Figure(title, (notes,), desc + "; ".join(facts) + ".", body)
