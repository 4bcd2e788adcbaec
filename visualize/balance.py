"""Balance: the attention each rank computes, step by step, as stacked bars.

    balance([("contiguous", plan_a), ("zigzag", plan_b)]) -> Figure

Heights are (query, key) pairs over the mean of all ranks, so that plans of any length compare.
Counts come from `check(plan)`, which also proves the plan.
"""

from __future__ import annotations

from tasp_core import Report, check

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

PANEL, LEFT, TOP, HIGH = 570.0, 52.0, 66.0, 190.0
DASH = "6 4"


def verdict(report: Report) -> str:
    """The balance in words.

    >>> from tasp_core import plan
    >>> verdict(check(plan([64], 4, schedule="ring", layout="contiguous")))
    'busiest rank / mean = 1.74'
    """
    return f"busiest rank / mean = {report.balance:.2f}"


def _bars(report: Report, top: float) -> Marks:
    """A stack for each rank, the first step at the foot; the mean as a dashed line; totals."""
    n, steps = report.work.shape
    mean = max(1.0, report.work.sum() / n)
    pitch = min(64.0, (PANEL - LEFT - 10) / n)
    foot, marks, totals = TOP + HIGH, [], []
    edge = "none" if steps > 20 else "#7A7A7A"
    for rank, row in enumerate((report.work / mean).tolist()):
        below, x = 0.0, LEFT + pitch * (rank + 0.12)
        for step, part in enumerate(row):
            high = part / top * HIGH
            if part:
                at = complex(x, foot - below - high)
                box, fill = complex(0.76 * pitch, high), ramp(step / max(1, steps - 1))
                tip = f"rank {rank}, step {step}: {report.work[rank, step]} pairs"
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


def _panel(label: str, report: Report, top: float) -> Drawing:
    """One plan: label, verdict, bars."""
    foot = TOP + HIGH
    name = fit(label, PANEL, size=16, bold=True)
    marks = [text(8j, name, size=16, anchor="start", bold=True)]
    marks.append(text(30j, verdict(report), anchor="start"))
    worst = f"worst single step: {report.step_balance:.2f}"
    marks.append(small(complex(PANEL - 10, 30), worst, "end"))
    for value in range(int(top) + 1):
        y = foot - value / top * HIGH
        marks.append(gridline(complex(LEFT, y), complex(PANEL - 10, y)))
        marks.append(small(complex(LEFT - 6, y), str(value), "end"))
    return Drawing(PANEL, foot + 50, marks + _bars(report, top))


def _legend() -> Drawing:
    """What shades and the dashed line mean."""
    mean = [line(9j, 36 + 9j, stroke=ACCENT, width=1.5, dash=DASH)]
    mean.append(text(44 + 9j, "mean of all ranks", size=13, anchor="start"))
    return beside([scale("step:", "first (own keys)", "last"), Drawing(170, 20, mean)], gap=40)


def balance(plans: Plans) -> Figure:
    """Draw who computes how much, and in which step.

    Args:
        plans: a plan, or several, each bare or with a label: (label, plan).

    Raises:
        PlanError: a plan that is wrong.
        ValueError: no plan, or more ranks than can be drawn.
    """
    pairs = named(plans)
    for _, plan in pairs:
        few_enough(plan.ranks)
    reports = [(label, check(plan)) for label, plan in pairs]
    top = 1.15 * max(report.balance for _, report in reports)
    facts = "; ".join(f"{label}: {verdict(report)}" for label, report in reports)
    ordered = sorted(reports, key=lambda pair: -pair[1].balance)
    ends = ordered if len(ordered) < 3 else [ordered[0], ordered[-1]]
    said = (f"{r.balance:.2f} with {label}" for label, r in ends)
    title = "Work of the busiest rank over the mean: " + "; ".join(said)
    notes = (
        "A bar: the (query, key) pairs one rank computes, over the mean of all ranks; "
        "a shade: one step. The busiest rank sets the time.",
    )
    columns = min(2, len(reports))
    drawn = grid([_panel(label, report, top) for label, report in reports], columns, gap=20)
    desc = f"Stacked bars of work per rank and step. {facts}."
    return Figure(title, notes, desc, stack([_legend(), drawn], gap=16))
