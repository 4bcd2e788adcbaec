"""Tiles: which (query piece, key piece) pairs attend to each other, and how.

Inside one document, with pieces that are runs or stripes of the packed sequence, a pair of pieces is

    nothing     every query comes before every key
    FULL        every query sees every key
    CAUSAL      a square, row i sees columns 0..i; then FULL for the queries below it (stripes)

so no dense mask is ever needed. Keys are put in (document, last token) order. In that order the
keys a query sees whole are always a prefix of its document's keys, hence every query row needs one
contiguous key range and a step needs at most two kernel calls: one FULL, one CAUSAL.

Under a sliding window a pair is a band: row a sees columns a + low .. a + high. It is cut into FULL
rectangles, CAUSAL squares along its upper edge and INVERSE_CAUSAL ones along its lower: there row i sees
columns i.. of the square. With rows and columns read backwards these are CAUSAL too and join that
call, so kernels need no window. A window of 3 (C causal, M inverse causal):

    C . . . . .
    C C . . . .
    C C C . . .
    . M M C . .
    . . M C C .
    . . . C C C
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..errors import PlanError
from .documents import Documents
from .layouts import Layout
from .masks import Bands, band_area, edges
from .pieces import Pieces, ranges


class Pairs(NamedTuple):
    """Pairs of pieces of one document of which queries see prefixes; `k` counts in working order."""

    q: np.ndarray
    k: np.ndarray
    first: np.ndarray  # first query row that sees any key
    full: np.ndarray  # first query row that sees all keys through the FULL call
    area: np.ndarray  # visible (query, key) pairs


class Sequences(NamedTuple):
    """Sequences of one variable-length kernel call: query rows [q_lo, q_lo + q_n) over key rows."""

    q_lo: np.ndarray
    q_n: np.ndarray
    k_lo: np.ndarray
    k_n: np.ndarray


class Tiles(NamedTuple):
    """What one rank computes in one step; key rows count in the working order of `used` pieces."""

    used: np.ndarray  # indices of the key pieces that any query sees, in working order
    full: Sequences
    causal: Sequences
    inverse_causal: (
        Sequences  # squares in which row i sees columns i.. instead of ..i; under a window
    )


def take(pieces: Pieces, index: np.ndarray) -> Pieces:
    """The pieces at `index`."""
    return Pieces(*(column[index] for column in pieces))


def working_order(keys: Pieces) -> np.ndarray:
    """Indices that put key pieces in (document, last token) order."""
    return np.lexsort((keys.last, keys.doc))


def pair_table(queries: Pieces, keys: Pieces, docs: Documents) -> Pairs | Bands:
    """Every pair of a query piece and a key piece that may see it; keys in working order.

    Raises:
        PlanError: pieces interleave in a way that is not a square (a stripe cut in two).
    """
    if docs.slices is not None:
        return docs.slices.bands(queries, keys)
    low, high = (np.searchsorted(keys.doc, queries.doc, side=s) for s in ("left", "right"))
    k, q = ranges(low, high)
    rows, columns = queries.count[q], keys.count[k]
    lead = keys.start[k] - queries.start[q]  # how far the keys begin after the queries
    stride = queries.stride[q]
    zero = np.zeros_like(q)
    if docs.prefixes and not docs.causal:
        return Pairs(q, k, zero, zero, rows * columns)
    low, high = edges(lead, stride, *docs.diagonals)
    if not docs.prefixes:
        area = band_area(rows, columns, low, high)
        return Bands(q, k, zero, rows, zero, columns, low, high, area)
    square = keys.last[k] >= queries.start[q]
    if (square & (lead <= -stride)).any():
        raise PlanError("a query piece begins inside a key piece; cut the key piece there")
    first = np.where(square, np.clip(-high, 0, rows), 0)
    full = np.where(square, np.minimum(first + columns, rows), 0)
    size = full - first
    return Pairs(q, k, first, full, size * (size + 1) // 2 + (rows - full) * columns)


def rank_areas(layout: Layout) -> np.ndarray:
    """Visible pairs of each rank's queries with each rank's keys, int64 [ranks, ranks]."""
    rows = [layout.pieces(rank) for rank in range(layout.ranks)]
    rank = np.repeat(np.arange(layout.ranks), [len(p.doc) for p in rows])
    pieces = Pieces(*(np.concatenate(columns) for columns in zip(*rows, strict=True)))
    order = working_order(pieces)
    area = np.zeros((layout.ranks, layout.ranks), dtype=np.int64)
    pairs = pair_table(pieces, take(pieces, order), layout.docs)
    np.add.at(area, (rank[pairs.q], rank[order[pairs.k]]), pairs.area)
    return area


def tile(queries: Pieces, keys: Pieces, docs: Documents) -> Tiles:
    """The FULL and CAUSAL sequences of `queries` against `keys` (any order)."""
    order = working_order(keys)
    pairs = pair_table(queries, take(keys, order), docs)
    seen = np.zeros(len(order), dtype=bool)
    seen[pairs.k[pairs.area > 0]] = True
    used = order[seen]
    # renumber the keys: pairs with unused keys see nothing and drop out
    columns = [column[seen[pairs.k]] for column in pairs]
    columns[1] = (np.cumsum(seen) - 1)[columns[1]]
    if isinstance(pairs, Bands):
        return Tiles(used, *_cut(queries, take(keys, used), Bands(*columns)))
    return Tiles(used, *_prefix_sequences(queries, take(keys, used), Pairs(*columns)))


def _prefix_sequences(
    queries: Pieces, keys: Pieces, pairs: Pairs
) -> tuple[Sequences, Sequences, Sequences]:
    """FULL, CAUSAL and no INVERSE_CAUSAL sequences, without a window."""
    q, k, first, full = pairs[:4]
    border = np.concatenate([[0], np.cumsum(keys.count)])
    doc_first = border[np.searchsorted(keys.doc, keys.doc, side="left")]
    # rows from this pair's `full` up to the next pair's see the document's keys through k
    last_of_q = np.concatenate([q[1:] != q[:-1], [True]])[: len(q)]
    following = np.concatenate([full[1:], [0]])[: len(q)]
    rows = np.where(last_of_q, queries.count[q], following) - full
    at = rows > 0
    low = doc_first[k[at]]
    rectangle = Sequences(queries.offset[q[at]] + full[at], rows[at], low, border[k[at] + 1] - low)
    size = full - first
    at = size > 0
    square = Sequences(queries.offset[q[at]] + first[at], size[at], border[k[at]], size[at])
    return rectangle, square, Sequences(*np.zeros((4, 0), dtype=np.int64))


def _cut(queries: Pieces, keys: Pieces, bands: Bands) -> tuple[Sequences, Sequences, Sequences]:
    """FULL, CAUSAL and INVERSE_CAUSAL sequences of bands."""
    bands = Bands(*(column[bands.area > 0] for column in bands))
    q, k, rows, columns = bands.q, bands.k, bands.rows, bands.columns
    low, high, width = bands.low, bands.high, bands.high - bands.low + 1
    q_first = queries.offset[q] + bands.q_first
    k_first = (np.cumsum(keys.count) - keys.count)[k] + bands.k_first
    begin, end = np.clip(-high, 0, rows), np.minimum(rows, columns - low)
    # rows before `enter` miss the last columns, rows from `leave` on the first ones
    enter, leave = columns - high, 1 - low
    one, two = (np.clip(f(enter, leave), begin, end) for f in (np.minimum, np.maximum))
    every, both = np.arange(len(q)), leave < enter
    i, pair = ranges(np.zeros_like(one), np.where(both, -((one - two) // width), 0))
    t = one[pair] + i * width[pair]  # where the blocks of rows with both edges begin
    size = np.minimum(width[pair], two[pair] - t)
    ahead, behind = one - begin, end - two  # rows with one edge

    def part(pair: np.ndarray, a: np.ndarray, m: np.ndarray, b: np.ndarray, n: np.ndarray) -> Any:
        filled = (m > 0) & (n > 0)
        return np.stack([q_first[pair] + a, m, k_first[pair] + b, n])[:, filled]

    causal = (
        part(every, begin, ahead, begin + high, ahead),
        part(pair, t, size, t + high[pair], size),
    )
    less = np.minimum(size, width[pair] - 1)
    inverse_causal = (
        part(pair, t, less, t + low[pair], less),
        part(every, two, behind, two + low, behind),
    )
    full = (
        part(every, begin, ahead, 0 * begin, begin + high),
        part(pair, t, size, t + low[pair] + size, width[pair] - 1 - size),
        part(every, one, np.where(both, 0, two - one), 0 * one, columns),
        part(every, two, behind, end + low, columns - end - low),
    )
    rectangles, squares, inverse_squares = (
        Sequences(*np.concatenate(parts, axis=1)) for parts in (full, causal, inverse_causal)
    )
    return rectangles, squares, inverse_squares


def rounds(low: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Number each range so that ranges of equal number never overlap (interval colouring).

    >>> rounds(np.array([0, 0, 4]), np.array([4, 2, 3])).tolist()
    [0, 1, 0]
    """
    order = np.argsort(low, kind="stable")
    ends = (low + count)[order]
    number = np.zeros(len(low), dtype=np.int64)
    if not (low[order][1:] < ends[:-1]).any():
        return number
    free: list[int] = []  # where each round's last range ends
    for i, start, end in zip(order.tolist(), low[order].tolist(), ends.tolist(), strict=True):
        at = next((j for j, stop in enumerate(free) if stop <= start), len(free))
        free[at : at + 1] = [end]
        number[i] = at
    return number
