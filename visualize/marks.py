"""Marks: what every picture is made of, and how they are laid out; no file format here.

A `Drawing` is marks with the room they take; `grid`, `stack` and `beside` lay drawings out. svg.py and
plotly_json.py turn the same marks into files. Points are complex numbers, x + y j, in px, y downwards.
Text widths are estimates (0.56 em a character), on the safe side for common sans-serif fonts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from .colours import INK, PALE, SOFT, ramp

INNER, MARGIN, SIZE = 1160, 20, 14  # px: room between margins, margin, font
Shape = Literal["rect", "disc", "line", "shape", "arrow", "text"]
Anchor = Literal["start", "middle", "end"]


class Mark(NamedTuple):
    """One thing drawn; what `points` are depends on the shape.

    rect    two opposite corners
    disc    its centre; `size` is the radius
    line    its ends
    shape   the corners of a closed polygon
    arrow   tail, control point of its bend, and point
    text    where its middle height is; `size` is the font's, `turn` degrees clockwise

    Higher layers lie over lower ones: -1 for grids, 1 for what crosses bars and cells.
    """

    shape: Shape
    points: tuple[complex, ...]
    fill: str = "none"
    stroke: str = "none"
    width: float = 1
    dash: str = ""
    size: float = 0
    words: str = ""
    anchor: Anchor = "middle"
    bold: bool = False
    halo: bool = False
    turn: int = 0
    name: str = ""
    tip: str = ""
    layer: int = 0

    def moved(self, by: complex) -> Mark:
        """The mark, `by` further right and down."""
        return self._replace(points=tuple([p + by for p in self.points]))

    def scaled(self, by: float) -> Mark:
        """The mark, `by` times as large, as seen from (0, 0)."""
        points, dash = tuple([p * by for p in self.points]), self.dash
        if dash:
            dash = " ".join(f"{float(part) * by:.3g}" for part in dash.split())
        return self._replace(points=points, width=self.width * by, size=self.size * by, dash=dash)


Marks = list[Mark]


class Drawing(NamedTuple):
    """Marks and the room they take, in px from (0, 0)."""

    width: float
    height: float
    marks: Marks

    def scaled(self, by: float) -> Drawing:
        """The drawing, `by` times as large."""
        return Drawing(self.width * by, self.height * by, [m.scaled(by) for m in self.marks])


def number(value: float) -> str:
    """A number as short as three digits and two decimals allow.

    >>> number(7.0), number(13 / 7), number(1 / 7), number(12345)
    ('7', '1.86', '0.14', '12345')
    """
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{round(value, 2):.3g}"


def span(least: float, most: float) -> str:
    """Two numbers as a range, or one if they read the same."""
    low, high = number(least), number(most)
    return low if low == high else f"{low} to {high}"


def every(pitch: float, room: float) -> int:
    """Label every so many places that are `pitch` px apart for each label to have `room` px.

    >>> every(30, 20), every(7, 20)
    (1, 5)
    """
    most = 10**9
    return next((k * 10**e for e in range(9) for k in (1, 2, 5) if k * 10**e * pitch >= room), most)


def room(width: float, *, size: int = SIZE, bold: bool = False) -> int:
    """How many characters fit a width."""
    return max(8, int(width / (size * (0.64 if bold else 0.56))))


def fit(label: str, width: float, *, size: int = SIZE, bold: bool = False) -> str:
    """The label, cut to a width.

    >>> fit("Ring, Zigzag-Ring, Striped", 120)
    'Ring, Zigzag...'
    """
    most = room(width, size=size, bold=bold)
    return label if len(label) <= most else label[: most - 3] + "..."


def text(
    at: complex,
    words: str,
    *,
    size: int = SIZE,
    anchor: Anchor = "middle",
    fill: str = INK,
    bold: bool = False,
    halo: bool = False,
    turn: int = 0,
    name: str = "",
) -> Mark:
    """One line of text, its middle height at `at`; a halo parts it from what it crosses."""
    return Mark(
        "text",
        (at,),
        fill,
        size=size,
        words=words,
        anchor=anchor,
        bold=bold,
        halo=halo,
        turn=turn,
        name=name,
    )


def small(at: complex, words: str, anchor: Anchor = "middle") -> Mark:
    """A label of an axis or a note: smaller and paler."""
    return text(at, words, size=13, anchor=anchor, fill=SOFT)


def line(
    a: complex,
    b: complex,
    *,
    stroke: str = SOFT,
    width: float = 1,
    dash: str = "",
    tip: str = "",
    layer: int = 0,
) -> Mark:
    """A straight line."""
    return Mark("line", (a, b), stroke=stroke, width=width, dash=dash, tip=tip, layer=layer)


def gridline(a: complex, b: complex) -> Mark:
    """A pale line below everything else."""
    return line(a, b, stroke=PALE, layer=-1)


def rect(
    at: complex,
    size: complex,
    *,
    fill: str = "none",
    stroke: str = "none",
    width: float = 1,
    dash: str = "",
    name: str = "",
    tip: str = "",
    layer: int = 0,
) -> Mark:
    """A rectangle from its upper left corner; `tip` is shown when a mouse rests on it."""
    ends = (at, at + size)
    return Mark("rect", ends, fill, stroke, width, dash, name=name, tip=tip, layer=layer)


def disc(at: complex, radius: float, *, fill: str, stroke: str = INK, name: str = "") -> Mark:
    """A circle."""
    return Mark("disc", (at,), fill, stroke, 1.5, size=radius, name=name)


def unit(z: complex) -> complex:
    """The direction of z."""
    return z / abs(z)


def arrow(
    start: complex,
    end: complex,
    *,
    stroke: str,
    width: float,
    trim: float,
    bend: float,
    tip: str,
) -> Mark:
    """An arrow between discs of radius `trim`, bent `bend` px to its right: opposite ones part."""
    shaft = end - start
    control = start + shaft / 2 + bend * 1j * unit(shaft)
    a = start + trim * unit(control - start)
    point = end - trim * unit(end - control)
    return Mark("arrow", (a, control, point), stroke=stroke, width=width, name="arrow", tip=tip)


def head(mark: Mark) -> tuple[complex, complex, complex]:
    """The corners of an arrow's head: its point, and its wings, between which the shaft ends."""
    _, control, point = mark.points
    ahead, long = unit(point - control), 2 + 3.5 * mark.width
    base, wing = point - long * ahead, 0.42j * long * ahead
    return point, base + wing, base - wing


def lines(words: str, width: float, *, size: int = SIZE, bold: bool = False) -> Drawing:
    """Text broken into lines of `width`."""
    rows = textwrap.wrap(words, room(width, size=size, bold=bold)) or [""]
    pitch = 1.4 * size
    fill = INK if bold else SOFT
    marks = [
        text(1j * pitch * (i + 0.5), row, size=size, anchor="start", bold=bold, fill=fill)
        for i, row in enumerate(rows)
    ]
    return Drawing(width, pitch * len(rows), marks)


def stack(drawings: Sequence[Drawing], *, gap: float = 0) -> Drawing:
    """Drawings one below the other, left edges aligned."""
    return grid(drawings, 1, gap=gap)


def beside(drawings: Sequence[Drawing], *, gap: float = 0) -> Drawing:
    """Drawings one right of the other, upper edges aligned, each as wide as it is."""
    x, marks = 0.0, []
    for d in drawings:
        marks += [m.moved(x) for m in d.marks]
        x += d.width + gap
    return Drawing(x - gap, max(d.height for d in drawings), marks)


def grid(drawings: Sequence[Drawing], columns: int, *, gap: float = 0) -> Drawing:
    """Drawings row by row; rows are as high as their highest, columns as wide as the widest."""
    wide = max((d.width for d in drawings), default=0.0)
    y, marks = 0.0, []
    for first in range(0, len(drawings), columns):
        row = drawings[first : first + columns]
        for i, d in enumerate(row):
            marks += [m.moved(complex(i * (wide + gap), y)) for m in d.marks]
        y += max(d.height for d in row) + gap
    across = min(columns, len(drawings))
    return Drawing(across * wide + max(0, across - 1) * gap, max(0.0, y - gap), marks)


def legend(keys: Iterable[tuple[str, str]], width: float = INNER) -> Drawing:
    """Swatches with words, side by side, in as many rows as the width asks for."""
    marks, x, y = [], 0.0, 0.0
    for fill, words in keys:
        wide = 24 + 0.56 * 13 * len(words) + 18
        if x and x + wide > width:
            x, y = 0.0, y + 24
        edge = "#999999" if fill == "#FFFFFF" else "none"
        marks.append(rect(complex(x, y + 2), 14 + 14j, fill=fill, stroke=edge))
        marks.append(text(complex(x + 21, y + 9), words, size=13, anchor="start"))
        x += wide
    return Drawing(width, y + 20, marks)


def scale(words: str, least: str, most: str, *, cells: int = 24) -> Drawing:
    """A ramp between two named amounts, behind what it stands for."""
    ends = [0.56 * 13 * len(w) for w in (words, least, most)]
    start, size = ends[0] + 14 + ends[1] + 8, 6.0
    marks = [text(9j, words, size=13, anchor="start"), small(ends[0] + 14 + 9j, least, "start")]
    for i in range(cells):
        at = complex(start + size * i, 1)
        marks.append(rect(at, complex(size + 0.5, 16), fill=ramp(i / (cells - 1))))
    marks.append(small(start + size * cells + 8 + 9j, most, "start"))
    return Drawing(start + size * cells + 8 + ends[2], 20, marks)
