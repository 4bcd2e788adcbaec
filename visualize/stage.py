"""Stage: ranks on a circle, boxes round nodes; the ground on which arrows are drawn."""

from __future__ import annotations

import cmath
import math
from typing import NamedTuple

from tasp_core import Machine

from .colours import colour, ink
from .marks import Anchor, Mark, Marks, arrow, disc, every, small, text, unit

NAMED = 11.0  # px: least radius of a disc with a number
ROUND = 0.15  # px that a box's corners, drawn as straight pieces, may be off


class Stage(NamedTuple):
    """Where ranks stand: node boxes, discs and arrows all start from here."""

    side: float
    radius: float
    disc: float
    places: tuple[complex, ...]
    nodes: tuple[range, ...]

    @property
    def centre(self) -> complex:
        """The middle of the circle."""
        return complex(self.side / 2, self.side / 2)

    @property
    def named(self) -> bool:
        """Whether discs have room for their rank."""
        return self.disc >= NAMED

    @property
    def thin(self) -> float:
        """The width of arrows that suits discs of this size."""
        return min(2.2, self.disc / 4)


def nodes_of(machine: Machine) -> tuple[range, ...]:
    """The ranks of each node."""
    return tuple(dict.fromkeys(machine.node_peers(rank) for rank in range(machine.ranks)))


def stage(nodes: tuple[range, ...], side: float) -> Stage:
    """Ranks clockwise on a circle, from the top; an empty place separates nodes."""
    n, m, u = sum(map(len, nodes)), len(nodes[0]), len(nodes)
    gap = int(u > 1)
    margin = 34 if u == 1 else 60 if u in (2, 4) else 78 if u <= 16 else 40
    slots, radius = n + gap * u, side / 2 - margin
    turn = 2 * math.pi / slots
    room = turn * radius  # a rank's; discs too small for a number are made smaller yet, for arrows
    disc = max(NAMED, min(14.0, 0.33 * room)) if 0.38 * room >= NAMED else 0.27 * room
    # one node: rank 0 on top; two or three: node 0 on top; more: nodes left and right of the top
    first = -math.pi / 2 - gap * turn * ((m - 1) / 2 if u < 4 else -1)
    slot = [rank + gap * k for k, peers in enumerate(nodes) for rank in peers]
    angles = (first + turn * (i - slot[0]) for i in slot)
    middle = complex(side / 2, side / 2)
    return Stage(
        side, radius, disc, tuple(middle + radius * cmath.exp(1j * a) for a in angles), nodes
    )


def _arc(middle: complex, start: complex, turn: float) -> list[complex]:
    """Points from `start` clockwise round `middle`, `turn` radians far."""
    piece = math.sqrt(8 * ROUND / abs(start - middle))
    count = max(2, round(turn / piece))
    return [middle + (start - middle) * cmath.exp(1j * turn * i / count) for i in range(count + 1)]


def _box(a: complex, b: complex, s: Stage, pad: float) -> Mark:
    """A rounded box round the places from a clockwise to b, and the chords between them."""
    look = {"fill": "#F2F2F2", "stroke": "#A8A8A8", "name": "node"}
    if a == b:
        return Mark("shape", tuple(_arc(a, a + pad, 2 * math.pi)[:-1]), **look)  # type: ignore[arg-type]
    turn = cmath.phase((b - s.centre) / (a - s.centre)) % (2 * math.pi)
    inward = 1j * pad * unit(b - a)
    out_a, out_b = (pad * unit(z - s.centre) for z in (a, b))
    cap = cmath.phase(inward / out_b) % (2 * math.pi)
    points = _arc(s.centre, a + out_a, turn) + _arc(b, b + out_b, cap)
    points += _arc(a, a + inward, cmath.phase(out_a / inward) % (2 * math.pi))
    return Mark("shape", tuple(points), **look)  # type: ignore[arg-type]


def nodes(s: Stage) -> Marks:
    """A box behind the ranks of each node, its name outside."""
    marks: Marks = []
    count = len(s.nodes)
    pad = s.disc + min(8.0, 0.9 * s.disc)
    for node, peers in enumerate(s.nodes if count > 1 else ()):
        a, b = s.places[peers[0]], s.places[peers[-1]]
        marks.append(_box(a, b, s, pad))
        half = cmath.phase((b - s.centre) / (a - s.centre)) % (2 * math.pi) / 2
        out = (a - s.centre) / s.radius * cmath.exp(1j * half)
        anchor: Anchor = "middle" if abs(out.real) < 0.3 else "start" if out.real > 0 else "end"
        away = s.radius + pad + (10 if s.named else 26)
        if count <= 16:
            marks.append(small(s.centre + away * out, f"node {node}", anchor))
    return marks


def discs(s: Stage, *, coloured: bool = True) -> Marks:
    """The ranks, numbered inside, or outside every few ranks where discs are small."""
    n, first, marks = len(s.places), s.nodes[0].start, []
    apart = every(abs(s.places[1] - s.places[0]) if n > 1 else 1000.0, 28)
    for rank, z in enumerate(s.places, first):
        fill = colour(rank) if coloured else "#FFFFFF"
        marks.append(disc(z, s.disc, fill=fill, name="rank"))
        if s.named:
            marks.append(text(z, str(rank), size=13, bold=True, fill=ink(fill)))
        elif rank % apart == 0 and rank + apart <= n + first:
            away = (2 * s.disc + 14) if len(s.nodes) > 1 else (s.disc + 12)
            marks.append(text(z + away * (z - s.centre) / s.radius, str(rank), size=13))
    return marks


def between(
    s: Stage, src: int, dst: int, *, stroke: str, width: float, tip: str, opposed: bool
) -> Mark:
    """An arrow between two ranks; `opposed`: others go the other way, so it bends."""
    a, b = s.places[src], s.places[dst]
    # all links at once: bent by this, arrows in and out alternate evenly round each rank
    part = min(0.13, max(0.03, math.tan(math.pi / (4 * len(s.places))) / 2))
    bend = part * abs(b - a) + s.disc / 5 if opposed else 0.02 * abs(b - a)
    return arrow(a, b, stroke=stroke, width=width, trim=s.disc + 1, bend=bend, tip=tip)
