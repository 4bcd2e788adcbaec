"""Masks: which keys each query of a packed sequence sees, as a list of slices.

A slice is a range of queries, a range of keys, and a kind: what is visible of the rectangle of the two.
Queries go down and keys go across; of 3 queries and 5 keys a slice shows

    FULL         CAUSAL       INVERSE_CAUSAL    BAND(-1, 1)
    x x x x x    x x x . .    x x x x x         x x . . .
    x x x x x    x x x x .    . x x x x         x x x . .
    x x x x x    x x x x x    . . x x x         . x x x .

CAUSAL is aligned to the bottom right corner: the last query sees the last key. INVERSE_CAUSAL is aligned to
the top left one: the first query sees the first key. A band counts from the top left corner too: row a
sees columns a + low .. a + high. So every slice is a rectangle and a band of its diagonals, and a `Mask`
stores exactly that. Slices of a mask do not overlap; pairs in no slice are not visible.

    Mask.of([(0, 8, 0, 8, "causal"), (8, 12, 0, 4)], total=12)      # of any slices
    Documents.of([8, 4]).mask                                       # of documents

Not covered: masks whose shape depends on values, and biases added to scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..errors import PlanError, check_int
from .pieces import Pieces, ranges

FULL, CAUSAL, INVERSE_CAUSAL, BAND = "full", "causal", "inverse_causal", "band"
KINDS = (FULL, CAUSAL, INVERSE_CAUSAL, BAND)
MOST_DIAGONAL = 1 << 62
PAIRS_AT_ONCE = 1 << 20  # pairs of slices that are compared at once


class Slice(NamedTuple):
    """Queries [q_start, q_stop), keys [k_start, k_stop), and what is visible of them.

    Attributes:
        kind: one of KINDS.
        low, high: of a BAND only: row a of the slice sees its columns a + low .. a + high.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: str = FULL
    low: int | None = None
    high: int | None = None

    def as_list(self) -> list[int | str]:
        """The values that `Mask.of` reads back."""
        return [value for value in self if value is not None]

    def __str__(self) -> str:
        band = f"({self.low}, {self.high})" if self.kind == BAND else ""
        queries, keys = f"[{self.q_start}, {self.q_stop})", f"[{self.k_start}, {self.k_stop})"
        return f"queries {queries} x keys {keys}, {self.kind.upper()}{band}"


class Bands(NamedTuple):
    """What query pieces see of key pieces (pieces.py): per entry a rectangle and a band of its diagonals.

    The rectangle is some rows of query piece `q` and some columns of key piece `k`. Row a of it sees its
    columns a + low .. a + high. Int64 arrays of equal length.
    """

    q: np.ndarray
    k: np.ndarray
    q_first: np.ndarray  # where the rectangle begins in the query piece
    rows: np.ndarray
    k_first: np.ndarray  # where it begins in the key piece
    columns: np.ndarray
    low: np.ndarray
    high: np.ndarray
    area: np.ndarray  # visible (query, key) pairs


def edges(
    lead: np.ndarray, stride: np.ndarray, low: int | np.ndarray, high: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The band of a rectangle, in rows and columns, of the pairs with low <= key - query <= high in tokens.

    Args:
        lead: the rectangle's first key minus its first query, in tokens.
        stride: tokens from one row to the next, and from one column to the next.
        low, high: in tokens.

    Returns:
        low and high of the band: row a sees columns a + low .. a + high.
    """
    # row a and column b are lead + (b - a) stride tokens apart; low is rounded up, high down
    return -((lead - low) // stride), (high - lead) // stride


def band_area(
    rows: np.ndarray, columns: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Pairs (a, b) of a rows x columns rectangle with low <= b - a <= high.

    >>> band_area(*np.array([[3], [5], [-1], [1]])).tolist()
    [8]
    """

    def triangle(n: np.ndarray) -> np.ndarray:  # 1 + 2 + .. + n
        return np.where(n > 0, n * (n + 1) // 2, 0)

    def upto(x: np.ndarray) -> np.ndarray:  # pairs with b - a <= x
        # row a has a + x + 1 such columns, but those beyond the last column do not exist
        beyond = triangle(rows + x - columns) - triangle(x - columns)
        return triangle(rows + x) - triangle(x) - beyond

    return upto(high) - upto(low - 1)


def rows_area(length: Any, causal: bool, start: Any, stop: Any) -> Any:
    """Visible pairs of rows [start, stop) of a causal or full square of `length` tokens; exact integers.

    >>> rows_area(4, True, 1, 4), rows_area(4, False, 1, 4)
    (9, 12)
    """
    return (stop - start) * (start + stop + 1) // 2 if causal else (stop - start) * length


@dataclass(frozen=True, eq=False)
class Mask:
    """Slices of a mask, in the order of their queries, then keys; int64 arrays of equal length.

    Query i sees key j if one slice has q_start <= i < q_stop, k_start <= j < k_stop and
    low <= j - i <= high. Diagonals are clipped to the rectangle, so that a mask does not depend on
    the kinds in which it was written.

    >>> mask = Mask.of([(0, 3, 0, 3, "causal"), (3, 5, 0, 4, "band", -1, 1)], total=5)
    >>> mask.num_pairs, mask.dense(np.arange(5), np.arange(5)).astype(int).tolist()[2:]
    (11, [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
    """

    q_start: np.ndarray
    q_stop: np.ndarray
    k_start: np.ndarray
    k_stop: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, slices: Iterable[Slice | Sequence[Any]], total: int) -> Mask:
        """The mask of any disjoint slices of a packed sequence of `total` tokens.

        Args:
            slices: (q_start, q_stop, k_start, k_stop), then a kind (default FULL), then low and high
                of a BAND. Slices without a visible pair are dropped.

        Raises:
            PlanError: names a value that is not a slice, a slice outside the sequence, or two slices
                that overlap.
        """
        parsed = [_read(one, f"slice {i}", total) for i, one in enumerate(slices)]
        table = np.array([[*one[:4], *_diagonals(one)] for one in parsed], dtype=np.int64)
        table = table.reshape(-1, 6)
        q_start, q_stop, k_start, k_stop, low, high = table.T
        number = np.flatnonzero((q_start < q_stop) & (k_start < k_stop) & (low <= high))
        number = number[np.lexsort((k_start[number], q_start[number]))]
        mask = cls(*(np.ascontiguousarray(column[number]) for column in table.T))
        mask._refuse_overlap([(int(i), parsed[i]) for i in number])
        return mask

    @classmethod
    def of_documents(cls, cu_seqlens: np.ndarray, low: int, high: int) -> Mask:
        """One slice per document: a query sees the keys of its document with low <= key - query <= high."""
        filled = cu_seqlens[1:] > cu_seqlens[:-1]
        start, stop = cu_seqlens[:-1][filled], cu_seqlens[1:][filled]
        most = stop - start - 1
        return cls(start, stop, start, stop, np.maximum(low, -most), np.minimum(high, most))

    def __len__(self) -> int:
        return len(self.q_start)

    @property
    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.q_start, self.q_stop, self.k_start, self.k_stop, self.low, self.high

    @property
    def slices(self) -> list[Slice]:
        """The slices, each with the first of KINDS that describes it."""
        full_low, full_high = self.k_start - self.q_stop + 1, self.k_stop - 1 - self.q_start
        upper, lower = self.high == full_high, self.low == full_low
        causal = lower & (self.high == self.k_stop - self.q_stop)
        inverse = upper & (self.low == self.k_start - self.q_start)
        kind = np.select([upper & lower, causal, inverse], [0, 1, 2], 3)  # indices of KINDS
        lead = self.k_start - self.q_start
        columns = (*self._columns[:4], kind, self.low - lead, self.high - lead)
        return [
            Slice._make([*row[:4], KINDS[row[4]], *(row[5:] if row[4] == 3 else [None, None])])
            for row in zip(*(c.tolist() for c in columns), strict=True)
        ]

    @cached_property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs, exact."""
        return int(self.areas().sum())

    def areas(self) -> np.ndarray:
        """Visible pairs of each slice; Python integers where int64 would overflow."""
        columns = self._columns
        if max(int(x.max(initial=0)) for x in (self.q_stop, self.k_stop)) > 2**30:
            columns = tuple(column.astype(object) for column in columns)
        q_start, q_stop, k_start, k_stop, low, high = columns
        lead = k_start - q_start
        return band_area(q_stop - q_start, k_stop - k_start, low - lead, high - lead)

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return bool((self.high <= 0).all())

    def runs(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The runs of keys that queries see: (index into `queries`, first key, the one after the last)."""
        order = np.argsort(queries, kind="stable")
        ordered = queries[order]
        # for each slice s: the places in `ordered` of the queries that it contains
        at, s = ranges(*(np.searchsorted(ordered, end) for end in (self.q_start, self.q_stop)))
        index, token = order[at], ordered[at]
        first = np.maximum(self.k_start[s], token + self.low[s])
        stop = np.minimum(self.k_stop[s], token + self.high[s] + 1)
        seen = first < stop
        return index[seen], first[seen], stop[seen]

    def dense(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Whether each query sees each key, bool [queries, keys]; for small blocks."""
        index, first, stop = self.runs(queries)
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        # +1 where a run begins, -1 after its end: the running sum is the number of runs over a key
        change = np.zeros((len(queries), len(keys) + 1), dtype=np.int32)
        np.add.at(change, (index, np.searchsorted(ordered, first)), 1)
        np.add.at(change, (index, np.searchsorted(ordered, stop)), -1)
        seen = np.zeros((len(queries), len(keys)), dtype=bool)
        seen[:, order] = np.cumsum(change, axis=1)[:, :-1] > 0
        return seen

    def spans(self, queries: Pieces) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What query pieces see of each slice they cross: (piece, first key, the one after the last)."""
        s, piece, first, stop = _inside(queries, self.q_start, self.q_stop)
        start, stride = queries.start[piece], queries.stride[piece]
        low = np.maximum(self.k_start[s], start + first * stride + self.low[s])
        high = np.minimum(self.k_stop[s], start + (stop - 1) * stride + self.high[s] + 1)
        seen = low < high
        return piece[seen], low[seen], high[seen]

    def bands(self, queries: Pieces, keys: Pieces) -> Bands:
        """What query pieces see of key pieces, sorted by query piece, then key piece; none is empty."""
        q_slice, q, q_first, q_stop = _inside(queries, self.q_start, self.q_stop)
        k_slice, k, k_first, k_stop = _inside(keys, self.k_start, self.k_stop)
        # every part of a query piece with every part of a key piece in the same slice s
        k_part, q_part = ranges(
            *(np.searchsorted(k_slice, q_slice, side=side) for side in ("left", "right"))
        )
        s, q, q_first, q_stop = (column[q_part] for column in (q_slice, q, q_first, q_stop))
        k, k_first, k_stop = (column[k_part] for column in (k, k_first, k_stop))
        stride = queries.stride[q]
        lead = keys.start[k] + k_first * stride - queries.start[q] - q_first * stride
        low, high = edges(lead, stride, self.low[s], self.high[s])
        rows, columns = q_stop - q_first, k_stop - k_first
        area = np.where(low <= high, band_area(rows, columns, low, high), 0)
        # where the first row sees all columns there is no upper edge for tiles.py to cut along
        high = np.where(high == columns - 1, columns, high)
        order = np.lexsort((k, q))
        order = order[area[order] > 0]
        result = (q, k, q_first, rows, k_first, columns, low, high, area)
        return Bands(*(column[order] for column in result))

    def _refuse_overlap(self, named: list[tuple[int, Slice]]) -> None:
        """Raise for the first two slices that have a pair in common."""
        # slices are sorted by their first query: those that share queries with one follow it
        count = np.searchsorted(self.q_start, self.q_stop) - np.arange(len(self)) - 1
        ends = np.cumsum(count)
        low = 0
        while low < len(self):
            high = max(low + 1, int(np.searchsorted(ends, ends[low] + PAIRS_AT_ONCE, "right")))
            first = np.arange(low, high)
            b, a = ranges(first + 1, first + 1 + count[low:high])
            a = a + low
            q0, k0, least = (np.maximum(x[a], x[b]) for x in (self.q_start, self.k_start, self.low))
            q1, k1, most = (np.minimum(x[a], x[b]) for x in (self.q_stop, self.k_stop, self.high))
            # a rectangle has a pair on each of its diagonals
            least, most = np.maximum(least, k0 - q1 + 1), np.minimum(most, k1 - 1 - q0)
            met = np.flatnonzero((q0 < q1) & (k0 < k1) & (least <= most))
            if met.size:
                i = met[0]
                (one, x), (other, y) = sorted((named[a[i]], named[b[i]]))
                query = max(q0[i], k0[i] - most[i])
                key = max(k0[i], query + least[i])
                raise PlanError(
                    f"slices of a mask must not overlap, but slice {one} ({x}) and slice {other} ({y}) "
                    f"both show key {key} to query {query}; cut one of them"
                )
            low = high

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> bytes:
        """Bytes that are equal for equal masks only."""
        return np.stack(self._columns).astype("<i8").tobytes()


def _read(written: Any, name: str, total: int) -> Slice:
    """A slice from values of a user or of a plan file."""
    written = written.tolist() if isinstance(written, np.ndarray) else written
    readable = isinstance(written, Sequence) and not isinstance(written, str)
    values: list[Any] = list(written) if readable else []
    if not 4 <= len(values) <= 7:
        raise PlanError(
            f"{name} of the mask must be (q_start, q_stop, k_start, k_stop, kind), "
            f"and low and high for a band, got {written!r:.80}"
        )
    kind, low, high = values[4:] + [FULL, None, None][len(values) - 4 :]
    if kind not in KINDS:
        raise PlanError(f"{name} of the mask must be one of {', '.join(KINDS)}, got {kind!r:.80}")
    ends = [check_int(x, f"an end of {name} of the mask", 0, PlanError) for x in values[:4]]
    band = [
        None
        if x is None
        else check_int(x, f"{name} of the mask: {what}", -MOST_DIAGONAL, PlanError)
        for what, x in (("low", low), ("high", high))
    ]
    if max(x or 0 for x in band) > MOST_DIAGONAL:
        raise PlanError(f"{name} of the mask: low and high must be at most {MOST_DIAGONAL}")
    if (kind == BAND) != (None not in band) or (kind != BAND and band != [None, None]):
        raise PlanError(
            f"{name} of the mask has low {low!r:.80} and high {high!r:.80}: "
            "a band has both, the other kinds have neither"
        )
    q_start, q_stop, k_start, k_stop = ends
    result = Slice(q_start, q_stop, k_start, k_stop, kind, *band)
    for what, start, stop in (("queries", q_start, q_stop), ("keys", k_start, k_stop)):
        if not start <= stop <= total:
            raise PlanError(
                f"{name} of the mask ({result}) has {what} outside the packed sequence: "
                f"ranges must be within 0..{total} and must not end before they begin"
            )
    return result


def _diagonals(one: Slice) -> tuple[int, int]:
    """Lowest and highest key - query of a slice's visible pairs; lowest > highest: none is visible."""
    least, most = one.k_start - one.q_stop + 1, one.k_stop - 1 - one.q_start
    lead = one.k_start - one.q_start
    if one.kind == CAUSAL:
        return least, min(most, one.k_stop - one.q_stop)
    if one.kind == INVERSE_CAUSAL:
        return max(least, lead), most
    if one.kind == BAND and one.low is not None and one.high is not None:
        return max(least, lead + one.low), min(most, lead + one.high)
    return least, most


def _inside(
    pieces: Pieces, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(range, piece, first, stop), sorted by range: rows [first, stop) of the piece lie in the range."""
    order = np.argsort(pieces.start, kind="stable")
    # stripes interleave, so a later start may have an earlier end: take the last end so far
    reach = np.maximum.accumulate(pieces.last[order])
    low, high = np.searchsorted(reach, start), np.searchsorted(pieces.start[order], stop)
    at, which = ranges(low, high)
    piece = order[at]
    first, stride, count = pieces.start[piece], pieces.stride[piece], pieces.count[piece]
    begin, end = (np.clip(-((first - x[which]) // stride), 0, count) for x in (start, stop))
    common = begin < end
    return which[common], piece[common], begin[common], end[common]
