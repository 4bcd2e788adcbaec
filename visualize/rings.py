"""Rings: ranks on a circle, arrows for hops; one panel a ring, or a step where there is no ring.

    rings(plan) -> SVG text

A ring schedule shows its rings: share i goes round ring i, whatever the step. Any other shows its
steps; steps that use the same links alike share one panel. Opposite arrows keep to their right, so
both are seen. Not shown: whose share a hop carries (see `print(plan)`).
"""

from __future__ import annotations

import cmath
import math
from typing import NamedTuple

import numpy as np

from tasp_core import Plan
from tasp_core.schedules import RingSchedule

from .svg import (
    INK,
    INNER,
    SOFT,
    Drawing,
    Figure,
    arrow,
    colour,
    document,
    grid,
    ink,
    mix,
    text,
    unit,
)
from .traffic import Traffic

GAP, NAMED = 16, 11.0  # px: between panels; least radius of a disc with a number


class Panel(NamedTuple):
    """One small multiple; arcs: int64 [arcs, 3] of (src, dst, shares); hue -1: the sender's."""

    caption: str
    detail: str
    arcs: np.ndarray
    hue: int


class Stage(NamedTuple):
    """Where ranks stand in a panel: node boxes, discs and arrows all start from here."""

    side: float
    radius: float
    disc: float
    places: tuple[complex, ...]
    node_size: int

    @property
    def centre(self) -> complex:
        """The middle of the circle."""
        return complex(self.side / 2, self.side / 2)

    @property
    def named(self) -> bool:
        """Whether discs have room for their rank."""
        return self.disc >= NAMED


def stage(plan: Plan, side: float) -> Stage:
    """Ranks clockwise on a circle, from the top; a free place parts the nodes."""
    n, m, u = plan.ranks, plan.machine.node_size, plan.machine.num_nodes
    gap = int(u > 1)
    margin = 34 if u == 1 else 60 if u in (2, 4) else 78 if u <= 16 else 40
    slots, radius = n + gap * u, side / 2 - margin
    turn = 2 * math.pi / slots
    room = turn * radius  # a rank's; discs too small for a number are made smaller yet, for arrows
    disc = min(14.0, 0.38 * room) if 0.38 * room >= NAMED else 0.27 * room
    # one node: rank 0 on top; two or three: node 0 on top; more: nodes left and right of the top
    first = -math.pi / 2 - gap * turn * ((m - 1) / 2 if u < 4 else -1)
    angles = (first + turn * (rank + gap * (rank // m)) for rank in range(n))
    middle = complex(side / 2, side / 2)
    return Stage(side, radius, disc, tuple(middle + radius * cmath.exp(1j * a) for a in angles), m)


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
    each = f"each {load} of {num_shares} shares" if num_shares > 1 else "each all of one rank's KV"
    return steps, f"{len(arcs)} arrows, {each}"


def step_panels(plan: Plan) -> list[Panel]:
    """A panel for each run of steps with the same arcs, arrows in the colour of their sender."""
    n, hops = plan.ranks, plan.hops()
    runs: list[tuple[int, int, np.ndarray]] = []
    for step in np.unique(hops.step).tolist():
        here = hops.step == step
        pair, count = np.unique(hops.src[here] * n + hops.dst[here], return_counts=True)
        arcs = np.stack([pair // n, pair % n, count], axis=1)
        if runs and runs[-1][1] == step - 1 and np.array_equal(runs[-1][2], arcs):
            runs[-1] = (runs[-1][0], step, arcs)
        else:
            runs.append((step, step, arcs))
    shares = plan.schedule.num_shares
    return [Panel(*_step_words(a, b, arcs, shares), arcs, -1) for a, b, arcs in runs]


def _box(a: complex, b: complex, s: Stage, pad: float) -> str:
    """A rounded box round the places from a clockwise to b, and the chords between them."""
    look = 'class="node" fill="#F2F2F2" stroke="#A8A8A8"'
    if a == b:
        return f'<circle {look} cx="{a.real:.1f}" cy="{a.imag:.1f}" r="{pad:.1f}"/>'
    grow, inward = 1 + pad / s.radius, 1j * pad * unit(b - a)
    corners = (s.centre + grow * (a - s.centre), s.centre + grow * (b - s.centre))
    p, q, r, t = (f"{z.real:.1f} {z.imag:.1f}" for z in (*corners, b + inward, a + inward))
    out, cap = (f"{x:.1f} {x:.1f} 0 0 1" for x in (s.radius + pad, pad))
    return f'<path {look} d="M{p}A{out} {q}A{cap} {r}L{t}A{cap} {p}Z"/>'


def _nodes(s: Stage) -> str:
    """A box behind the ranks of each node, its name outside."""
    marks, m, count = [], s.node_size, len(s.places) // s.node_size
    pad = s.disc + min(8.0, 0.9 * s.disc)
    for node in range(count if count > 1 else 0):
        a, b = s.places[node * m], s.places[node * m + m - 1]
        marks.append(_box(a, b, s, pad))
        half = cmath.phase((b - s.centre) / (a - s.centre)) % (2 * math.pi) / 2
        out = (a - s.centre) / s.radius * cmath.exp(1j * half)
        anchor = "middle" if abs(out.real) < 0.3 else "start" if out.real > 0 else "end"
        away = s.radius + pad + (10 if s.named else 26)
        if count <= 16:
            at = s.centre + away * out
            marks.append(text(at, f"node {node}", size=13, anchor=anchor, fill=SOFT))
    return "".join(marks)


def _discs(s: Stage, hue: int) -> str:
    """The ranks, numbered inside, or outside every few ranks where discs are small."""
    n, marks = len(s.places), []
    apart = abs(s.places[1] - s.places[0]) if n > 1 else 1000.0
    every = next(k for k in (1, 2, 4, 8, 16, 32) if k * apart >= 28)
    for rank, z in enumerate(s.places):
        fill = colour(rank) if hue < 0 else "#FFFFFF"
        marks.append(
            f'<circle class="rank" cx="{z.real:.1f}" cy="{z.imag:.1f}" r="{s.disc:.1f}" '
            f'fill="{fill}" stroke="{INK}" stroke-width="1.5"/>'
        )
        if s.named:
            marks.append(text(z, str(rank), size=13, weight=700, fill=ink(fill)))
        elif rank % every == 0 and rank + every <= n:
            away = (2 * s.disc + 14) if s.node_size < n else (s.disc + 12)
            at = z + away * (z - s.centre) / s.radius
            marks.append(text(at, str(rank), size=13))
    return "".join(marks)


def _draw(panel: Panel, s: Stage, most: int) -> Drawing:
    """One panel: a square and two lines of caption below; `most` shares make the widest arrow."""
    thin = min(s.disc / 4, 1.4 if len(panel.arcs) > 24 else 2.2)
    # all links at once: bent by this, arrows in and out alternate evenly round each rank
    bend = min(0.13, max(0.03, math.tan(math.pi / (4 * len(s.places))) / 2))
    pairs = {(src, dst) for src, dst, _ in panel.arcs.tolist()}
    opposed = any((dst, src) in pairs for src, dst in pairs)
    marks = [_nodes(s)]
    for src, dst, load in panel.arcs.tolist():
        a, b = s.places[src], s.places[dst]
        marks.append(
            arrow(
                a,
                b,
                stroke=colour(src if panel.hue < 0 else panel.hue),
                width=thin * (0.4 + 0.6 * load / most),
                trim=s.disc + 1,
                bend=bend * abs(b - a) + s.disc / 5 if opposed else 0.02 * abs(b - a),
                tip=f"{src} to {dst}, {load} share{'s' * (load != 1)} a step",
            )
        )
    marks.append(_discs(s, panel.hue))
    tone = INK if panel.hue < 0 else mix(colour(panel.hue), "#000000", 0.3)
    at = complex(s.side / 2, s.side + 4)
    marks.append(text(at, panel.caption, size=15, weight=700, fill=tone))
    marks.append(text(at + 21j, panel.detail, size=13, fill=SOFT))
    return Drawing(s.side, s.side + 40, "".join(marks))


def _notes(plan: Plan, by_ring: bool, shown: int, panels: int) -> tuple[str, ...]:
    """How to read the picture."""
    shares, steps = plan.schedule.num_shares, plan.schedule.num_steps()
    first = "A circle is a rank (one device), an arrow a link in use. "
    if plan.ranks == 1:
        return (first + "One rank has all keys and values (KV).",)
    first += "Each rank's keys and values (KV) "
    first += f"are cut into {shares} shares." if shares > 1 else "travel whole, as 1 share."
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


def _title(plan: Plan, label: str, num_rings: int) -> str:
    """The sentence the picture shows."""
    traffic, nodes, steps = Traffic.of(plan), plan.machine.num_nodes, plan.schedule.num_steps()
    where = f"{label or plan.schedule.name} on {plan.ranks} rank{'s' * (plan.ranks != 1)}"
    where += f" in {nodes} nodes" if nodes > 1 else ""
    if plan.ranks == 1:
        return f"{where}: nothing travels"
    if traffic.collective:
        return f"{where}: one library call, drawn as direct sends"
    count, what = (num_rings, "ring") if num_rings else (steps, "step")
    verb = f"{what} uses" if count == 1 else f"{what}s use"
    return f"{where}: {count} {verb} {traffic.usage()}{', equally' * traffic.even}"


def figure(plan: Plan, max_rings: int = 8, *, label: str = "") -> Figure:
    """The figure that `rings` draws."""
    schedule = plan.schedule
    by_ring = isinstance(schedule, RingSchedule)
    title = _title(plan, label, schedule.num_shares if by_ring else 0)
    panels = ring_panels(schedule) if isinstance(schedule, RingSchedule) else step_panels(plan)
    shown = panels[: max(1, max_rings)]
    if not shown:
        shown = [Panel("", "no arrow", np.zeros((0, 3), dtype=np.int64), 0)]
    most = max(int(p.arcs[:, 2].max(initial=1)) for p in shown)
    columns = min(len(shown), 4 if plan.ranks <= 24 else 3)
    side = (INNER - 3 * GAP) / 4 if columns == 4 else (INNER - 2 * GAP) / 3
    place = stage(plan, side if plan.ranks > 1 else 110)
    drawn = grid([_draw(p, place, most) for p in shown], columns, gap=GAP)
    what = "; ".join(f"{p.caption}: {p.detail}" if p.detail else p.caption for p in shown)
    desc = f"{title}. Ranks on a circle, arrows from sender to receiver. {what}."
    return Figure(title, _notes(plan, by_ring, len(shown), len(panels)), desc, drawn)


def rings(plan: Plan, max_rings: int = 8, *, label: str = "") -> str:
    """Draw the way keys and values travel, as SVG text.

    Args:
        max_rings: panels at most.
        label: what to call the plan; default: its schedule's name.

    Raises:
        ValueError: more ranks than can be drawn.

    >>> from tasp_core import plan
    >>> rings(plan([64], 5)).count('class="arrow"')
    20
    """
    return document([figure(plan, max_rings, label=label)])
