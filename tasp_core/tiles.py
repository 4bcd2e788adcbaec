"""Tiles: which (query piece, key piece) pairs attend to each other, and how.

Inside one document, with pieces that are runs or stripes of the row, a pair of pieces is

    nothing     every query comes before every key
    FULL        every query sees every key
    CAUSAL      a square, row i sees columns 0..i; then FULL for the queries below it (stripes)

so no dense mask is ever needed. Keys are put in (document, last token) order. In that order the
keys a query sees whole are always a prefix of its document's keys, hence every query row needs one
contiguous key range and a step needs at most two kernel calls: one FULL, one CAUSAL.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .errors import PlanError
from .layout import Layout, Pieces, ranges


class Pairs(NamedTuple):
    """Pairs of pieces of the same document; `k` indexes the keys in working order."""

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


def take(pieces: Pieces, index: np.ndarray) -> Pieces:
    """The pieces at `index`."""
    return Pieces(*(column[index] for column in pieces))


def working_order(keys: Pieces) -> np.ndarray:
    """Indices that put key pieces in (document, last token) order."""
    return np.lexsort((keys.last, keys.doc))


def pair_table(queries: Pieces, keys: Pieces, causal: bool) -> Pairs:
    """Every pair of a query piece and a key piece of the same document; keys in working order.

    Raises:
        PlanError: pieces interleave in a way that is not a square (a stripe cut in two).
    """
    low, high = (np.searchsorted(keys.doc, queries.doc, side=s) for s in ("left", "right"))
    k, q = ranges(low, high)
    rows, columns = queries.count[q], keys.count[k]
    if not causal:
        zero = np.zeros_like(q)
        return Pairs(q, k, zero, zero, rows * columns)
    lead = keys.start[k] - queries.start[q]  # how far the keys begin after the queries
    stride = queries.stride[q]
    square = keys.last[k] >= queries.start[q]
    if (square & (lead <= -stride)).any():
        raise PlanError("a query piece begins inside a key piece; cut the key piece there")
    first = np.where(square, np.clip(-(-lead // stride), 0, rows), 0)
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
    pairs = pair_table(pieces, take(pieces, order), layout.docs.causal)
    np.add.at(area, (rank[pairs.q], rank[order[pairs.k]]), pairs.area)
    return area


def tile(queries: Pieces, keys: Pieces, causal: bool) -> Tiles:
    """The FULL and CAUSAL sequences of `queries` against `keys` (any order)."""
    order = working_order(keys)
    pairs = pair_table(queries, take(keys, order), causal)
    seen = np.zeros(len(order), dtype=bool)
    seen[pairs.k[pairs.area > 0]] = True
    used = order[seen]
    # renumber the keys: pairs with unused keys see nothing and drop out
    keep = seen[pairs.k]
    q, first, full = pairs.q[keep], pairs.first[keep], pairs.full[keep]
    k = (np.cumsum(seen) - 1)[pairs.k[keep]]
    border = np.concatenate([[0], np.cumsum(keys.count[used])])
    doc_first = border[np.searchsorted(keys.doc[used], keys.doc[used], side="left")]
    # rows from this pair's `full` up to the next pair's see the document's keys through k
    last_of_q = np.concatenate([q[1:] != q[:-1], [True]])[: len(q)]
    following = np.concatenate([full[1:], [0]])[: len(q)]
    rows = np.where(last_of_q, queries.count[q], following) - full
    some = rows > 0
    low = doc_first[k[some]]
    whole = Sequences(
        queries.offset[q[some]] + full[some], rows[some], low, border[k[some] + 1] - low
    )
    size = full - first
    some = size > 0
    square = Sequences(
        queries.offset[q[some]] + first[some], size[some], border[k[some]], size[some]
    )
    return Tiles(used, whole, square)


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
