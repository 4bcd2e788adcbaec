"""Units: what one message carries, i.e. one part of one share of one rank's keys and values.

Share j of a rank is part j of each of its layout's blocks: a zigzag share has two parts, a piece of
the front block and a piece of the back block, and each of them is one contiguous run of local tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .layout import Layout, Pieces
from .schedules import Schedule


class Units(NamedTuple):
    """The parts of shares: what one message carries. Unit ((owner * parts) + part) * shares + share.

    `low` and `count` are the owner's local tokens; pieces `first[u] .. first[u + 1] - 1` make up
    unit u, in local order, each inside one document.
    """

    parts: int
    low: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count
    first: np.ndarray
    pieces: Pieces


def cut_units(layout: Layout, schedule: Schedule) -> Units:
    """Every rank's tokens cut into units, and those into pieces of documents."""
    shares = schedule.num_shares
    lows, counts, numbers, pieces = [], [], [], []
    for rank in range(layout.ranks):
        cuts = schedule.cuts(layout, rank)
        low = cuts[:, :-1].ravel()
        part = layout.pieces(rank, np.unique(cuts))
        # empty units share their low end with the next one; the last such unit has the tokens
        number = np.searchsorted(low, part.offset, side="right") - 1
        lows.append(low)
        counts.append(np.diff(cuts, axis=1).ravel())
        numbers.append(number + rank * len(low))
        pieces.append(part._replace(offset=part.offset - low[number]))
    low = np.concatenate(lows)
    first = np.zeros(len(low) + 1, dtype=np.int64)
    np.cumsum(np.bincount(np.concatenate(numbers), minlength=len(low)), out=first[1:])
    joined = Pieces(*(np.concatenate(columns) for columns in zip(*pieces, strict=True)))
    return Units(len(low) // (shares * layout.ranks), low, np.concatenate(counts), first, joined)
