"""Balance: the attention pairs that each rank computes, step by step, as stacked bars.

    balance([("contiguous", plan_a), ("zigzag", plan_b)]) -> Figure

Heights are (query, key) pairs over the mean of all ranks, so that plans of any length can be compared.
"""

from __future__ import annotations

import numpy as np

from .colours import ACCENT, colour, ramp
from .figure import Figure, Plans, few_enough, named
from .marks import (
    Drawing,
    Marks,
    beside,
    every,
    fit,
    grid,
    gridline,
    line,
    rect,
    scale,
    small,
    stack,
    text,
)
from .traffic import work

PANEL, LEFT, TOP, HIGH = 570.0, 52.0, 66.0, 190.0
DASH = "6 4"


def over_mean(work: np.ndarray) -> float:
    """Work of the busiest rank over the mean of all ranks; 1 where there is no work.

    >>> over_mean(np.array([1, 3]))
    1.5
    """
    return float(work.max() / work.mean()) if work.any() else 1.0


def verdict(pairs: np.ndarray) -> str:
    """The balance in words.

    >>> from tasp_core import plan
    >>> verdict(work(plan([64], 4, schedule="ring", layout="contiguous")))
    'busiest rank / mean = 1.74'
    """
    return f"busiest rank / mean = {over_mean(pairs.sum(axis=1)):.2f}"


def _bars(pairs: np.ndarray, top: float) -> Marks:
    """A stack of bars per rank with the first step at the bottom, the mean as a dashed line, totals."""
    n, steps = pairs.shape
    mean = max(1.0, pairs.sum() / n)
    pitch = min(64.0, (PANEL - LEFT - 10) / n)
    foot, marks, totals = TOP + HIGH, [], []
    edge = "none" if steps > 20 else "#7A7A7A"
    for rank, row in enumerate((pairs / mean).tolist()):
        below, x = 0.0, LEFT + pitch * (rank + 0.12)
        for step, pairs_over_mean in enumerate(row):
            high = pairs_over_mean / top * HIGH
            if pairs_over_mean:
                at = complex(x, foot - below - high)
                box, fill = complex(0.76 * pitch, high), ramp(step / max(1, steps - 1))
                tip = f"rank {rank}, step {step}: {pairs[rank, step]} pairs"
                marks.append(rect(at, box, fill=fill, stroke=edge, width=0.5, name="work", tip=tip))
            below += high
        if n <= 10:
            at = complex(x + 0.38 * pitch, foot - below - 10)
            totals.append(text(at, f"{sum(row):.2f}", size=13, name="total", halo=True))
        chip = rect(complex(x, foot + 3), complex(0.76 * pitch, 5), fill=colour(rank), name="rank")
        marks.append(chip)
        if rank % every(pitch, 20) == 0:
            marks.append(small(complex(x + 0.38 * pitch, foot + 19), str(rank)))
    marks.append(small(complex(LEFT + pitch * n / 2, foot + 38), "rank"))
    y = foot - HIGH / top
    mark = line(
        complex(LEFT, y), complex(PANEL - 10, y), stroke=ACCENT, width=1.5, dash=DASH, layer=1
    )
    return [*marks, mark, *totals]


def _panel(label: str, pairs: np.ndarray, top: float) -> Drawing:
    """The panel of one plan: label, balance in words, bars."""
    foot = TOP + HIGH
    name = fit(label, PANEL, size=16, bold=True)
    marks = [text(8j, name, size=16, anchor="start", bold=True)]
    marks.append(text(30j, verdict(pairs), anchor="start"))
    worst = f"worst single step: {max(map(over_mean, pairs.T)):.2f}"
    marks.append(small(complex(PANEL - 10, 30), worst, "end"))
    for value in range(int(top) + 1):
        y = foot - value / top * HIGH
        marks.append(gridline(complex(LEFT, y), complex(PANEL - 10, y)))
        marks.append(small(complex(LEFT - 6, y), str(value), "end"))
    return Drawing(PANEL, foot + 50, marks + _bars(pairs, top))


def _legend() -> Drawing:
    """The meaning of the shades and of the dashed line."""
    mean = [line(9j, 36 + 9j, stroke=ACCENT, width=1.5, dash=DASH)]
    mean.append(text(44 + 9j, "mean of all ranks", size=13, anchor="start"))
    return beside([scale("step:", "first", "last"), Drawing(170, 20, mean)], gap=40)


def balance(plans: Plans) -> Figure:
    """Draw how many pairs each rank computes, and in which step.

    Args:
        plans: a plan, or several, each bare or with a label: (label, plan).

    Raises:
        PlanError: a plan that is not correct.
        ValueError: no plan, or more ranks than can be drawn.
    """
    labelled = named(plans)
    for _, plan in labelled:
        few_enough(plan.ranks)
    counted = [(label, work(plan)) for label, plan in labelled]
    ratios = [(label, over_mean(pairs.sum(axis=1))) for label, pairs in counted]
    top = 1.15 * max(ratio for _, ratio in ratios)
    ordered = sorted(ratios, key=lambda pair: -pair[1])
    ends = ordered if len(ordered) < 3 else [ordered[0], ordered[-1]]
    values = (f"{ratio:.2f} with {label}" for label, ratio in ends)
    title = "Work of the busiest rank over the mean: " + "; ".join(values)
    notes = (
        "A bar is the (query, key) pairs that one rank computes, over the mean of all ranks; "
        "a shade is one step. The busiest rank determines the time.",
    )
    drawn = grid([_panel(*pair, top) for pair in counted], min(2, len(counted)), gap=20)
    facts = "; ".join(f"{label}: {verdict(pairs)}" for label, pairs in counted)
    desc = f"Stacked bars of work per rank and step. {facts}."
    return Figure(title, notes, desc, stack([_legend(), drawn], gap=16))
