"""Rings: ranks on a circle, arrows for hops; one panel a ring, or a step where there is no ring.

    rings(plan) -> Figure

A ring schedule shows its rings: share i goes round ring i, whatever the step. Any other shows its
steps; steps that use the same links alike share one panel. Opposite arrows keep to their right, so
both are seen. Not shown: whose share a hop carries, see `hops(plan, step)`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tasp_core import Plan
from tasp_core.schedules import KV
from tasp_core.schedules.counts import load_rows
from tasp_core.schedules.ring import RingSchedule

from .colours import INK, colour, mix
from .figure import Figure
from .marks import INNER, Drawing, grid, small, text
from .stage import Stage, between, discs, nodes, nodes_of, stage
from .traffic import Traffic

GAP = 16  # px between panels


class Panel(NamedTuple):
    """One small multiple; arcs: int64 [arcs, 3] of (src, dst, shares); hue -1: the sender's."""

    caption: str
    detail: str
    arcs: np.ndarray
    hue: int


def ring_panels(schedule: RingSchedule) -> list[Panel]:
    """A panel a ring, in the ring's colour."""
    panels = []
    for i, cycle in enumerate(schedule.rings.array if schedule.ranks > 1 else []):
        arcs = np.stack([cycle, np.roll(cycle, -1), np.ones_like(cycle)], axis=1)
        way = " > ".join(map(str, [*cycle, cycle[0]])) if len(cycle) <= 9 else ""
        panels.append(Panel(f"ring {i} carries share {i}", way, arcs, i))
    return panels


def _step_words(first: int, last: int, arcs: np.ndarray, num_shares: int) -> tuple[str, str]:
    """Caption and detail of steps first..last, which use the same arcs."""
    steps = f"step {first}" if first == last else f"each of steps {first} to {last}"
    low, high = int(arcs[:, 2].min()), int(arcs[:, 2].max())
    load = f"{low}" if low == high else f"{low} to {high}"
    each = (
        f"each {load} of {num_shares} shares" if num_shares > 1 else "each one rank's whole share"
    )
    return steps, f"{len(arcs)} arrows, {each}"


def step_panels(plan: Plan) -> list[Panel]:
    """A panel for each run of steps with the same arcs, arrows in the colour of their sender."""
    hops, runs = plan.hops(), list[tuple[int, int, np.ndarray]]()
    one_each = np.ones(len(hops.step), dtype=np.int64)
    (steps, *ends), [count] = load_rows((hops.step, hops.src, hops.dst), one_each)
    every_arc = np.stack([*ends, count], axis=1)
    for step in np.unique(steps).tolist():
        arcs = every_arc[steps == step]
        if runs and runs[-1][1] == step - 1 and np.array_equal(runs[-1][2], arcs):
            runs[-1] = (runs[-1][0], step, arcs)
        else:
            runs.append((step, step, arcs))
    shares = plan.schedule.num_shares
    return [Panel(*_step_words(a, b, arcs, shares), arcs, -1) for a, b, arcs in runs]


def _draw(panel: Panel, s: Stage, most: int) -> Drawing:
    """One panel: a square and two lines of caption below; `most` shares make the widest arrow."""
    thin = min(s.thin, 1.4 if len(panel.arcs) > 24 else 2.2)
    pairs = {(src, dst) for src, dst, _ in panel.arcs.tolist()}
    opposed = any((dst, src) in pairs for src, dst in pairs)
    marks = nodes(s)
    for src, dst, load in panel.arcs.tolist():
        stroke = colour(src if panel.hue < 0 else panel.hue)
        tip = f"{src} to {dst}, {load} share{'s' * (load != 1)} a step"
        width = thin * (0.4 + 0.6 * load / most)
        marks.append(between(s, src, dst, stroke=stroke, width=width, tip=tip, opposed=opposed))
    marks += discs(s, coloured=panel.hue < 0)
    tone = INK if panel.hue < 0 else mix(colour(panel.hue), "#000000", 0.3)
    at = complex(s.side / 2, s.side + 4)
    marks.append(text(at, panel.caption, size=15, bold=True, fill=tone))
    marks.append(small(at + 21j, panel.detail))
    return Drawing(s.side, s.side + 40, marks)


def _notes(plan: Plan, by_ring: bool, shown: int, panels: int) -> tuple[str, ...]:
    """How to read the picture."""
    shares, steps = plan.schedule.num_shares, plan.schedule.num_steps()
    first = "A circle is a rank (one device), an arrow a link in use. "
    if plan.ranks == 1:
        return (first + "One rank has all keys and values (KV).",)
    what = "Each rank's keys and values (KV)"
    if (plan.hops().kind != KV).any():
        what += ", or queries and what they found,"
    first += f"{what} are cut into {shares} shares." if shares > 1 else f"{what} travel as 1 share."
    each = f"In each of {steps} steps" if steps > 1 else "In one step"
    if by_ring:
        along = " along every ring, all rings at once" if shares > 1 else ""
        second = f"{each} every rank passes one share on{along}; then all have seen all shares."
    else:
        second = f"{steps} steps, one after the other; " if steps > 1 else "One step; "
        second += "in a step all arrows work at once. Arrows have their sender's colour"
        second += "; steps that use the same links alike share a panel." if steps > panels else "."
    if plan.schedule.collective:
        second += " The library picks the real routes."
    if shown < panels:
        second += f" Shown: the first {shown} of {panels} {'rings' if by_ring else 'patterns'}."
    return (first, second)


def place(plan: Plan, label: str) -> str:
    """The plan and where it runs, in words."""
    n, u = plan.context_plan.ranks, plan.machine.num_nodes
    what = "rank" if plan.intra == 1 else f"groups of {plan.intra} rank"
    where = f"{label or plan.schedule.name} on {n} {what}{'s' * (n * plan.intra != 1)}"
    return where + (f" in {u} nodes" if u > 1 else "")


def _title(plan: Plan, label: str, num_rings: int) -> str:
    """The sentence the picture shows."""
    traffic, steps = Traffic.of(plan), plan.schedule.num_steps()
    where = place(plan, label)
    if plan.context_plan.ranks == 1:
        return f"{where}: nothing travels"
    if traffic.collective:
        return f"{where}: one library call, drawn as direct sends"
    count, what = (num_rings, "ring") if num_rings else (steps, "step")
    verb = f"{what} uses" if count == 1 else f"{what}s use"
    return f"{where}: {count} {verb} {traffic.usage()}{', equally' * traffic.even}"


def rings(plan: Plan, *, max_rings: int = 8, label: str = "") -> Figure:
    """Draw the way keys and values travel.

    Args:
        max_rings: panels at most.
        label: what to call the plan; default: its schedule's name.

    Raises:
        ValueError: more ranks than can be drawn.

    >>> from tasp_core import plan
    >>> rings(plan([64], 5)).svg.count('class="arrow"')
    20
    """
    schedule = plan.schedule
    by_ring = isinstance(schedule, RingSchedule)
    title = _title(plan, label, schedule.num_shares if by_ring else 0)
    panels = ring_panels(schedule) if isinstance(schedule, RingSchedule) else step_panels(plan)
    shown = panels[: max(1, max_rings)]
    if not shown:
        shown = [Panel("", "no arrow", np.zeros((0, 3), dtype=np.int64), 0)]
    most = max(int(p.arcs[:, 2].max(initial=1)) for p in shown)
    n = plan.context_plan.ranks
    columns = min(len(shown), 4 if n <= (8 if plan.machine.num_nodes > 1 else 24) else 3)
    side = (INNER - 3 * GAP) / 4 if columns == 4 else (INNER - 2 * GAP) / 3
    ground = stage(nodes_of(plan.machine), side if n > 1 else 110)
    drawn = grid([_draw(p, ground, most) for p in shown], columns, gap=GAP)
    what = "; ".join(f"{p.caption}: {p.detail}" if p.detail else p.caption for p in shown)
    desc = f"{title}. Ranks on a circle, arrows from sender to receiver. {what}."
    return Figure(title, _notes(plan, by_ring, len(shown), len(panels)), desc, drawn)
