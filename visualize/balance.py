"""Balance: the attention each rank computes, step by step, as stacked bars.

    balance([("contiguous", plan_a), ("zigzag", plan_b)]) -> SVG text

Heights are (query, key) pairs over the mean of all ranks, so that plans of any length compare.
Counts come from `check(plan)`, which also proves the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasp_core import Plan, Report, check

from .svg import (
    ACCENT,
    INK,
    MOST_RANKS,
    PALE,
    SOFT,
    Drawing,
    Figure,
    document,
    fit,
    grid,
    line,
    ramp,
    rect,
    stack,
    text,
)

PANEL, LEFT, TOP, HIGH = 570.0, 52.0, 66.0, 190.0
Plans = Plan | Sequence[Plan | tuple[str, Plan]]


def named(plans: Plans) -> list[tuple[str, Plan]]:
    """(label, plan) pairs; a bare plan is called by its schedule and layout."""
    some = [plans] if isinstance(plans, Plan) else list(plans)
    if not some:
        raise ValueError("balance needs at least one plan, got none")
    return [(f"{p.schedule.name}, {p.layout.name}", p) if isinstance(p, Plan) else p for p in some]


def verdict(report: Report) -> str:
    """The balance in words.

    >>> from tasp_core import plan
    >>> verdict(check(plan([64], 4, schedule="ring", layout="contiguous")))
    'busiest rank / mean = 1.74'
    """
    return f"busiest rank / mean = {report.balance:.2f}"


def _bars(report: Report, top: float) -> str:
    """A stack for each rank, the first step at the foot; the mean as a dashed line; totals."""
    n, steps = report.work.shape
    mean = max(1.0, report.work.sum() / n)
    pitch = min(64.0, (PANEL - LEFT - 10) / n)
    foot, marks, totals = TOP + HIGH, [], []
    for rank, row in enumerate((report.work / mean).tolist()):
        below, x = 0.0, LEFT + pitch * (rank + 0.12)
        for step, part in enumerate(row):
            high = part / top * HIGH
            if part:
                at = complex(x, foot - below - high)
                fill, edge = ramp(step / max(1, steps - 1)), "none" if steps > 20 else "#7A7A7A"
                tip = f"rank {rank}, step {step}: {report.work[rank, step]} pairs"
                box = complex(0.76 * pitch, high)
                marks.append(rect(at, box, fill=fill, stroke=edge, width=0.5, name="work", tip=tip))
            below += high
        if n <= 10:
            at = complex(x + 0.38 * pitch, foot - below - 10)
            totals.append(text(at, f"{sum(row):.2f}", size=13, name="total", halo=True))
        if rank % (1 if pitch >= 20 else 2 if pitch >= 12 else 8) == 0:
            marks.append(text(complex(x + 0.38 * pitch, foot + 13), str(rank), size=13, fill=SOFT))
    marks.append(text(complex(LEFT + pitch * n / 2, foot + 32), "rank", size=13, fill=SOFT))
    y = foot - HIGH / top
    mark = line(complex(LEFT, y), complex(PANEL - 10, y), stroke=ACCENT, width=1.5, dash="6 4")
    return "".join([*marks, mark, *totals])


def _panel(label: str, report: Report, top: float) -> Drawing:
    """One plan: label, verdict, bars."""
    foot = TOP + HIGH
    name = fit(label, PANEL, size=16, weight=700)
    marks = [text(8j, name, size=16, anchor="start", weight=700)]
    marks.append(text(30j, verdict(report), anchor="start"))
    worst = f"worst single step: {report.step_balance:.2f}"
    marks.append(text(complex(PANEL - 10, 30), worst, size=13, anchor="end", fill=SOFT))
    for value in range(int(top) + 1):
        y = foot - value / top * HIGH
        marks.append(line(complex(LEFT, y), complex(PANEL - 10, y), stroke=PALE))
        marks.append(text(complex(LEFT - 6, y), str(value), size=13, anchor="end", fill=SOFT))
    marks.append(_bars(report, top))
    return Drawing(PANEL, foot + 44, "".join(marks))


def _legend() -> Drawing:
    """What shades and the dashed line mean."""
    size, cells = 9.0, 16
    marks = [text(9j, "first step (own keys)", size=13, anchor="start")]
    start = 160.0
    for i in range(cells):
        at = complex(start + i * size, 1)
        marks.append(rect(at, complex(size + 0.5, 16), fill=ramp(i / (cells - 1))))
    x = start + cells * size + 10
    marks.append(text(complex(x, 9), "last step", size=13, anchor="start"))
    x += 110
    marks.append(line(complex(x, 9), complex(x + 36, 9), stroke=ACCENT, width=1.5, dash="6 4"))
    marks.append(text(complex(x + 44, 9), "mean", size=13, anchor="start", fill=INK))
    return Drawing(PANEL, 22, "".join(marks))


def figure(plans: Plans) -> Figure:
    """The figure that `balance` draws."""
    pairs = named(plans)
    for label, plan in pairs:
        if plan.ranks > MOST_RANKS:
            raise ValueError(f"{label!r} has {plan.ranks} ranks; draw at most {MOST_RANKS}")
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


def balance(plans: Plans) -> str:
    """Draw who computes how much, and in which step, as SVG text.

    Args:
        plans: a plan, or several, each bare or with a label: (label, plan).

    Raises:
        PlanError: a plan that is wrong.
        ValueError: no plan, or more ranks than can be drawn.
    """
    return document([figure(plans)])
