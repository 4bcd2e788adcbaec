"""The small pieces every picture is made of: colours, text, lines, arrows, panels, the document.

A `Drawing` is SVG text with its size; `grid` and `stack` lay drawings out, `document` makes a file
with title and alt text of them. Points are complex numbers, x + y j, in px, y downwards.
Text widths are estimates (0.56 em a character), on the safe side for common sans-serif fonts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

# Okabe & Ito 2008, with grey for black and a darker yellow: all are seen on white
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#A89C00")
RAMP = ("#F1F6FB", "#6BAED6", "#08306B")
INK, SOFT, PALE, ACCENT = "#1A1A1A", "#555555", "#E4E4E4", "#D55E00"
INNER, MARGIN, SIZE = 1160, 20, 14  # px: room between margins, margin, font
MOST_RANKS = 128


class Drawing(NamedTuple):
    """SVG elements and the room they take, in px from (0, 0)."""

    width: float
    height: float
    body: str


class Figure(NamedTuple):
    """A drawing with the sentence it shows, notes on how to read it, and its text alternative."""

    title: str
    notes: tuple[str, ...]
    desc: str
    drawing: Drawing


def mix(a: str, b: str, part: float) -> str:
    """The colour `part` of the way from a to b.

    >>> mix("#000000", "#FFFFFF", 0.5)
    '#808080'
    """
    pairs = ((int(a[i : i + 2], 16), int(b[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(x + (y - x) * part):02X}" for x, y in pairs)


def colour(number: int) -> str:
    """The colour of a rank or ring; from 8 on the same hues, alternately darker and lighter.

    >>> colour(0), colour(8)
    ('#0072B2', '#00446B')
    """
    turn, index = divmod(number, len(PALETTE))
    part = 1 - 1 / (1 + (turn + 1) // 2 / 1.5)
    return mix(PALETTE[index], "#000000" if turn % 2 else "#FFFFFF", part)


def ramp(value: float) -> str:
    """The colour of an amount between 0 (pale) and 1 (dark); lightness alone tells them apart."""
    half = min(1, int(2 * value))
    return mix(RAMP[half], RAMP[half + 1], 2 * value - half)


def ink(fill: str) -> str:
    """Black or white, whichever is read better on a fill.

    >>> ink("#08306B"), ink("#E69F00")
    ('#FFFFFF', '#1A1A1A')
    """
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return "#FFFFFF" if 0.3 * red + 0.59 * green + 0.11 * blue < 125 else INK


def clean(label: str) -> str:
    """Text as it may stand in XML."""
    return escape("".join(c if c.isprintable() else "?" for c in label))


def number(value: float) -> str:
    """A number as short as three digits and two decimals allow.

    >>> number(7.0), number(13 / 7), number(1 / 7)
    ('7', '1.86', '0.14')
    """
    return f"{round(value, 2):.3g}"


def span(least: float, most: float) -> str:
    """Two numbers as a range, or one if they read the same."""
    low, high = number(least), number(most)
    return low if low == high else f"{low} to {high}"


def room(width: float, *, size: int = SIZE, weight: int = 400) -> int:
    """How many characters fit a width."""
    return max(8, int(width / (size * (0.56 if weight < 600 else 0.64))))


def fit(label: str, width: float, *, size: int = SIZE, weight: int = 400) -> str:
    """The label, cut to a width.

    >>> fit("Ring, Zigzag-Ring, Striped", 120)
    'Ring, Zigzag...'
    """
    most = room(width, size=size, weight=weight)
    return label if len(label) <= most else label[: most - 3] + "..."


def text(
    at: complex,
    label: str,
    *,
    size: int = SIZE,
    anchor: str = "middle",
    fill: str = INK,
    weight: int = 400,
    name: str = "",
    halo: bool = False,
) -> str:
    """One line of text, its middle height at `at`; a halo parts it from what it crosses."""
    kind = f' class="{name}"' if name else ""
    if halo:
        kind += ' stroke="#FFFFFF" stroke-width="4" paint-order="stroke"'
    return (
        f'<text{kind} x="{at.real:.1f}" y="{at.imag + 0.35 * size:.1f}" font-size="{size}" '
        f'text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">{clean(label)}</text>'
    )


def lines(at: complex, label: str, width: float, *, size: int = SIZE, weight: int = 400) -> Drawing:
    """Text from the left edge `at`, broken into lines of `width`."""
    rows = textwrap.wrap(label, room(width, size=size, weight=weight)) or [""]
    pitch = 1.4 * size
    places = (at + 1j * pitch * (i + 0.5) for i in range(len(rows)))
    marks = [
        text(z, row, size=size, anchor="start", weight=weight, fill=INK if weight > 400 else SOFT)
        for z, row in zip(places, rows, strict=True)
    ]
    return Drawing(width, pitch * len(rows), "".join(marks))


def line(a: complex, b: complex, *, stroke: str = PALE, width: float = 1, dash: str = "") -> str:
    """A straight line."""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{a.real:.1f}" y1="{a.imag:.1f}" x2="{b.real:.1f}" y2="{b.imag:.1f}" '
        f'stroke="{stroke}" stroke-width="{width:.1f}"{dashes}/>'
    )


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
) -> str:
    """A rectangle from its upper left corner; `tip` is shown when a mouse rests on it."""
    kind = f' class="{name}"' if name else ""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    inner = f"<title>{clean(tip)}</title>" if tip else ""
    return (
        f'<rect{kind} x="{at.real:.1f}" y="{at.imag:.1f}" width="{size.real:.1f}" '
        f'height="{size.imag:.1f}" fill="{fill}" stroke="{stroke}" '
        f'stroke-width="{width:.1f}"{dashes}>{inner}</rect>'
    )


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
) -> str:
    """An arrow between discs of radius `trim`, bent `bend` px to its right: opposite ones part."""
    way = end - start
    control = start + way / 2 + bend * 1j * unit(way)
    a = start + trim * unit(control - start)
    ahead = unit(end - control)
    head = 2 + 3.5 * width
    point = end - trim * ahead
    base = point - head * ahead
    wing = 0.42j * head * ahead
    p, q = base + wing, base - wing
    return (
        f'<g class="arrow"><title>{clean(tip)}</title><path d="M{a.real:.1f} {a.imag:.1f}'
        f'Q{control.real:.1f} {control.imag:.1f} {base.real:.1f} {base.imag:.1f}" fill="none" '
        f'stroke="{stroke}" stroke-width="{width:.1f}"/><path d="M{point.real:.1f} {point.imag:.1f}'
        f'L{p.real:.1f} {p.imag:.1f} {q.real:.1f} {q.imag:.1f}Z" fill="{stroke}"/></g>'
    )


def stack(drawings: Sequence[Drawing], *, gap: float = 0) -> Drawing:
    """Drawings one below the other, left edges aligned."""
    return grid(drawings, 1, gap=gap)


def grid(drawings: Sequence[Drawing], columns: int, *, gap: float = 0) -> Drawing:
    """Drawings row by row; rows are as high as their highest, columns as wide as the widest."""
    wide = max((d.width for d in drawings), default=0.0)
    y, parts = 0.0, []
    for first in range(0, len(drawings), columns):
        row = drawings[first : first + columns]
        for i, d in enumerate(row):
            parts.append(f'<g transform="translate({i * (wide + gap):.1f} {y:.1f})">{d.body}</g>')
        y += max(d.height for d in row) + gap
    across = min(columns, len(drawings))
    return Drawing(across * wide + max(0, across - 1) * gap, max(0.0, y - gap), "".join(parts))


def document(figures: Sequence[Figure]) -> str:
    """One SVG file of figures below each other, each under its title and notes."""
    wide = max(720.0, *(f.drawing.width for f in figures))
    parts: list[Drawing] = []
    for figure in figures:
        if parts:
            parts.append(Drawing(wide, 16, line(12j, complex(wide, 12))))
        notes = [lines(0j, note, wide) for note in figure.notes]
        heading = lines(0j, figure.title, wide, size=20, weight=700)
        inner = (wide - figure.drawing.width) / 2
        body = f'<g transform="translate({inner:.1f} 0)">{figure.drawing.body}</g>'
        parts.append(stack([heading, *notes]))
        parts.append(figure.drawing._replace(width=wide, body=body))
    page = stack(parts, gap=18)
    width, height = page.width + 2 * MARGIN, page.height + 2 * MARGIN
    title = clean("; ".join(f.title for f in figures))
    desc = clean(" ".join(f.desc for f in figures))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" '
        f'style="max-width:100%;height:auto">\n<title>{title}</title>\n<desc>{desc}</desc>\n'
        f'<rect width="100%" height="100%" fill="#FFFFFF"/>\n'
        f'<g transform="translate({MARGIN} {MARGIN})">{page.body}</g>\n</svg>\n'
    )
