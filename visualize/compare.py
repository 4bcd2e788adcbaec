"""Compare: modelled times of several plans for the same attention, and which is fastest.

    compare([("ring", simulate(plan_a, ...)), ("wave", simulate(plan_b, ...))]) -> Figure

All times are modelled. Communication is hidden if the pass takes no longer than compute alone.
"""

from __future__ import annotations

from tasp_core.costs.simulate import Timeline

from .colours import ACCENT
from .figure import Figure
from .marks import (
    INNER,
    Drawing,
    Marks,
    fit,
    gridline,
    legend,
    line,
    number,
    rect,
    small,
    stack,
    text,
)
from .timeline import Timelines, labelled, seconds, ticks

NAMES, NUMBERS, ROW, BAR = 200.0, 250.0, 62.0, 14.0
BARS = (("total", "#1A1A1A"), ("compute", "#6BAED6"), ("communication", "#9A9A9A"))


def ratio(times: Timeline) -> float:
    """Time of communication alone over time of compute alone; infinite where computing takes no time."""
    return times.comm_s / times.compute_s if times.compute_s else float("inf")


def _row(label: str, times: Timeline, y: float, scale: float, *, best: bool) -> Marks:
    """The three bars of one plan, and its times."""
    values = (times.total_s, times.compute_s, times.comm_s)
    name = fit(label, NAMES - 12, bold=best)
    marks = [text(complex(NAMES - 12, y + 1.5 * BAR), name, anchor="end", bold=best)]
    for i, ((what, tone), value) in enumerate(zip(BARS, values, strict=True)):
        at, box = complex(NAMES, y + i * BAR), complex(value * scale, BAR - 2)
        marks.append(rect(at, box, fill=tone, name=what, tip=f"{label}: {what} {seconds(value)}"))
        after = at + box.real + 8 + 0.5j * BAR
        marks.append(small(after, seconds(value), "start"))
    right = complex(INNER, y + 1.5 * BAR)
    return [*marks, text(right, number(ratio(times)), anchor="end", bold=best)]


def compare(timelines: Timelines) -> Figure:
    """Draw how long each plan takes, and how long its compute and its communication take alone.

    Args:
        timelines: from `tasp_core.costs.simulate`, each bare or with a label: (label, timeline).

    Raises:
        ValueError: no timeline.
    """
    named = labelled(timelines)
    last = max(max(t.total_s, t.comm_s, t.compute_s) for _, t in named) or 1.0
    scale, foot = (INNER - NAMES - NUMBERS) / last, ROW * len(named)
    marks: Marks = [small(complex(INNER, -8), "communication / compute", "end")]
    for tick in ticks(last):
        x = NAMES + tick * scale
        marks.append(gridline(complex(x, 0), complex(x, foot)))
        marks.append(small(complex(x, foot + 12), seconds(tick)))
    bounds = sorted({t.bound_s for _, t in named if t.bound_s})
    for bound in bounds:
        x = NAMES + bound * scale
        marks.append(
            line(complex(x, -4), complex(x, foot), stroke=ACCENT, width=1.5, dash="6 4", layer=1)
        )
    best = min(named, key=lambda pair: pair[1].total_s)
    for i, pair in enumerate(named):
        marks += _row(*pair, 8 + ROW * i, scale, best=pair is best)
    keys = legend(
        [
            (BARS[0][1], "the pass"),
            (BARS[1][1], "compute alone"),
            (BARS[2][1], "communication alone"),
        ]
    )
    title = f"Modelled: {best[0] or 'the pass'} is fastest with {seconds(best[1].total_s)}"
    note = (
        "Alone means: as if the other took no time. Communication is hidden if the pass takes no longer "
        "than compute alone. "
    )
    if bounds:
        note += "Dashed line: no schedule can communicate faster on this machine (cut bound)."
    facts = (
        f"{label}: {seconds(t.total_s)}, compute {seconds(t.compute_s)}, communication "
        f"{seconds(t.comm_s)}"
        for label, t in named
    )
    drawn = stack([keys, Drawing(INNER, foot + 24, marks)], gap=16)
    return Figure(title, (note,), f"{title}. {'; '.join(facts)}.", drawn)
