"""Colours: one per rank or ring, ramps for amounts; colour-blind readers can tell all of them apart.

Lightness differs as well as hue, and no picture relies on colour alone.
"""

from __future__ import annotations

# Okabe & Ito 2008, with grey for black and a darker yellow: all are seen on white
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#A89C00")
TURNS = (0.0, 0.4, 0.6, 0.2, 0.5, 0.3, 0.66, 0.1, 0.73)  # how far a hue's shades are from it
RAMP = ("#F1F6FB", "#6BAED6", "#08306B")
INK, SOFT, PALE, ACCENT = "#1A1A1A", "#555555", "#E4E4E4", "#D55E00"


def mix(a: str, b: str, part: float) -> str:
    """The colour between a and b: a where `part` is 0, b where it is 1.

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
    part = TURNS[(turn + 1) // 2 % len(TURNS)]
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
