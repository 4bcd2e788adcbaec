"""Curves: time against sequence length with bound and model; speed-up against CCR with published points.

    curves(table) -> [("time", Figure), ("speedup", Figure)]        table: tasp_core.lab.bench.collect

CCR is the time of computation alone over that of communication alone. Measured points are discs joined by
lines, modelled curves are dashed, bounds are dotted, published points (other machines) are hollow squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from .colours import INK, PALE, SOFT, colour
from .figure import Figure
from .marks import INNER, Drawing, Marks, disc, fit, line, number, rect, small, stack, text
from .timeline import seconds

LEFT, RIGHT, TOP, HIGH = 90.0, 330.0, 40.0, 360.0
LONG = 5  # an axis over so many powers of ten has no ticks at 2 and 5
# TASP, arXiv 2509.26541: MI300X, full mask, batch 48, 10K to 100K tokens: (CCR, speed-up over Ring)
PUBLISHED = ((0.39, 2.4), (0.65, 1.8), (0.80, 1.5), (0.98, 1.3), (1.17, 1.1))
DASHES = {"measured": "", "modelled": "7 4", "bound": "2 4"}


class Curve(NamedTuple):
    """The (x, y) points of one label and kind (`how`: measured, modelled, bound or published)."""

    label: str
    how: str
    tone: str
    points: tuple[tuple[float, float], ...]


class Axis(NamedTuple):
    """A logarithmic axis, `px` pixels long."""

    low: float
    high: float
    px: float

    @classmethod
    def over(cls, values: Sequence[float], px: float) -> Axis:
        """An axis for these values, with a margin at both ends."""
        return cls(min(values) / 1.15, max(values) * 1.15, px)

    def at(self, value: float) -> float:
        """The position of a value, in pixels from the low end."""
        return self.px * math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        """Powers of ten on the axis, and on a short axis 2 and 5 times these."""
        first, last = (math.floor(math.log10(x)) for x in (self.low, self.high))
        steps = (1, 2, 5) if last - first < LONG else (1,)
        candidates = (m * 10.0**e for e in range(first, last + 1) for m in steps)
        return [x for x in candidates if self.low <= x <= self.high]


def _axes(x: Axis, y: Axis, x_name: str, y_name: str, show: Callable[[float], str]) -> Marks:
    """Grid lines, tick labels and names of the axes."""
    foot, marks = TOP + HIGH, []
    for tick in x.ticks():
        at = LEFT + x.at(tick)
        marks += [
            line(complex(at, TOP), complex(at, foot), stroke=PALE),
            small(complex(at, foot + 14), number(tick)),
        ]
    for tick in y.ticks():
        at = foot - y.at(tick)
        marks.append(line(complex(LEFT, at), complex(LEFT + x.px, at), stroke=PALE))
        marks.append(small(complex(LEFT - 8, at), show(tick), "end"))
    marks.append(small(complex(LEFT + x.px / 2, foot + 36), x_name))
    return [*marks, text(complex(LEFT, TOP - 16), y_name, anchor="start", fill=SOFT)]


def _curve(curve: Curve, x: Axis, y: Axis) -> Marks:
    foot = TOP + HIGH
    places = [complex(LEFT + x.at(a), foot - y.at(b)) for a, b in sorted(curve.points)]
    if curve.how == "published":
        return [
            rect(p - 5 - 5j, 10 + 10j, fill="#FFFFFF", stroke=INK, name="published") for p in places
        ]
    dash = DASHES[curve.how]
    marks = [line(a, b, stroke=curve.tone, width=2, dash=dash) for a, b in pairwise(places)]
    if curve.how == "measured":
        marks += [disc(p, 4, fill=curve.tone, stroke=curve.tone, name="measured") for p in places]
    return marks


def plot(
    curves: Sequence[Curve], x_name: str, y_name: str, show: Callable[[float], str] = number
) -> Drawing:
    """Curves on logarithmic axes, with a legend on the right."""
    points = [p for c in curves for p in c.points]
    x = Axis.over([p[0] for p in points], INNER - LEFT - RIGHT)
    y = Axis.over([p[1] for p in points], HIGH)
    marks = _axes(x, y, x_name, y_name, show)
    for i, curve in enumerate(curves):
        marks += _curve(curve, x, y)
        at = complex(INNER - RIGHT + 24, TOP + 11 + 22 * i)
        if curve.how == "published":
            marks.append(rect(at + 10 - 5j, 10 + 10j, fill="#FFFFFF", stroke=INK))
        else:
            marks.append(line(at, at + 30, stroke=curve.tone, width=2, dash=DASHES[curve.how]))
        marks.append(
            small(at + 38, fit(f"{curve.label}, {curve.how}", RIGHT - 70, size=13), "start")
        )
    return Drawing(INNER, max(TOP + HIGH + 50, TOP + 22 * len(curves)), marks)


def _series(rows: Iterable[Any], tone: dict[str, str], what: str) -> list[Curve]:
    """Time against tokens, one curve for each method, measured, modelled or bound."""
    points_of: dict[tuple[str, str], dict[float, float]] = {}
    for r in rows:
        if r.quantity == (f"bound {what}" if r.how == "bound" else f"whole {what}"):
            label = "all methods" if r.how == "bound" else r.method
            points_of.setdefault((label, r.how), {})[r.tokens] = r.median
    return [
        Curve(label, how, tone.get(label, SOFT), tuple(points.items()))
        for (label, how), points in points_of.items()
        if how != "bound" or len(set(points.values())) > 1
    ]


def _times(table: Sequence[Any]) -> Figure | None:
    """Time against length, a panel for each case and direction with several lengths."""
    panels, summary = [], []
    rows = [r for r in table if r.kind == "attention"]
    tone = {m: colour(i) for i, m in enumerate(dict.fromkeys(r.method for r in rows))}
    for case in dict.fromkeys(r.case for r in rows):
        here = [r for r in rows if r.case == case]
        for what in ("forward", "backward"):
            series = _series(here, tone, what)
            if series and len({r.tokens for r in here}) > 1:
                title = text(8j, f"{case}, {what}", size=16, anchor="start", bold=True)
                panels += [Drawing(INNER, 22, [title]), plot(series, "tokens", "one pass", seconds)]
                summary.append(f"{case}, {what}: {len(series)} curves")
    if not panels:
        return None
    notes = (
        "Discs are measured medians; dashed and dotted lines are modelled. "
        "Both axes are logarithmic.",
    )
    return Figure(
        "Time of one pass against the length of the packed sequence",
        notes,
        "; ".join(summary),
        stack(panels, gap=14),
    )


def gains(table: Sequence[Any]) -> dict[str, list[tuple[float, float]]]:
    """(CCR, speed-up over the first method) of complete forward passes, by method."""
    points: dict[str, list[tuple[float, float]]] = {}
    passes = [r for r in table if r.quantity == "whole forward" and r.how == "measured" and r.ccr]
    for key in dict.fromkeys((r.file, r.case, r.tokens) for r in passes):
        base, *others = [r for r in passes if (r.file, r.case, r.tokens) == key]
        for r in others:
            points.setdefault(f"{r.method} over {base.method}", []).append(
                (r.ccr, base.median / r.median)
            )
    return points


FABRIC = (
    "Baseline: Ring in the same layout, on emulated links. With (cores), kernels run on the cores that "
    "also carry the messages; otherwise on emulated devices, which take time but no core.",
)


def _speedups(table: Sequence[Any]) -> Figure | None:
    by_method: dict[str, list[tuple[float, float]]] = {}
    for group, tail in (("devices:", ""), ("mesh:", " (cores)")):
        rows = [r for r in table if r.kind == "fabric" and r.case.startswith(group)]
        by_method |= {m.split(" over ")[0] + tail: points for m, points in gains(rows).items()}
    emulated, by_method = bool(by_method), by_method or gains(table)
    if not by_method:
        return None
    ccrs = [a for points in by_method.values() for a, _ in points] + [p[0] for p in PUBLISHED]
    lines = [
        Curve(m, "measured", colour(i), tuple(p)) for i, (m, p) in enumerate(by_method.items())
    ]
    ranks = max(r.ranks for r in table)
    steps = sorted({min(ccrs), max(ccrs), 1 / (ranks - 1), 1.0})
    limit = tuple((x, max(1.0, min(ranks - 1, 1 / x))) for x in steps)
    lines.append(Curve(f"perfect overlap, {ranks} ranks", "bound", SOFT, limit))
    lines.append(Curve("TASP, 8 MI300X", "published", INK, PUBLISHED))
    summary = "; ".join(
        f"{c.label} ({c.how}): " + ", ".join(f"{number(b)} at CCR {number(a)}" for a, b in c.points)
        for c in lines
    )
    notes = (
        "CCR: time of the baseline's computation alone over its communication alone. Published points "
        "are of other machines, measured by the authors of arXiv 2509.26541.",
        *FABRIC * emulated,
    )
    drawing = plot(lines, "CCR of the baseline", "speed-up, forward pass")
    return Figure(
        "Speed-up against the ratio of computation to communication (CCR)", notes, summary, drawing
    )


def curves(table: Sequence[Any]) -> list[tuple[str, Figure]]:
    """The figures for which the table has points, as (name, figure)."""
    made = (("time", _times(table)), ("speedup", _speedups(table)))
    return [(name, figure) for name, figure in made if figure is not None]
