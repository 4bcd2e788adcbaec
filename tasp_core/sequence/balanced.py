"""Balanced placement of packed documents: even work, even tokens, and few keys that travel.

    pieces = place(lengths, ranks)    for each rank int64 [k, 3]: (document, start, stop)
    measure(pieces, lengths)          work and token balance, tokens that travel, pieces
    lower_bound(lengths, ranks)       no placement within the tolerances moves fewer tokens

A rank needs the keys of its documents up to its own last token. So long documents are cut from the
tail down, and a tail, few tokens and much work, is filled up with short documents, the opposite.
Exact sums, stable sorts: equal input, equal output. Not covered: windows (taken as none), 2^31 tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import LayoutError
from .documents import Documents
from .masks import rows_area

DOC, START, STOP, RATE, TOKENS, WORK = range(6)  # rows of an item table; RATE: 2 WORK / TOKENS
FAR = 2**62  # more work than any row has
TRIES = ((0.2, 0.2), (0.1, 0.6), (0.1, 0.3))  # (heavy / mean work, ease / tolerance) of a run


class Balance(NamedTuple):
    """How even a placement is, the tokens its ranks need and do not hold, and its pieces."""

    work_max_mean: float
    tokens_max_mean: float
    moved_tokens: int
    segments: int


def place(
    lengths: np.ndarray,
    ranks: int,
    *,
    work_tolerance: float = 0.05,
    token_tolerance: float = 0.0,
    grid: int = 1,
    causal: bool = True,
) -> list[np.ndarray]:
    """Pieces (document, start, stop) of every rank, int64 [k, 3], sorted; every token exactly once.

    Rank r holds floor(T (r + 1) / P) - floor(T r / P) tokens, give or take `token_tolerance` T / P
    and 2 `grid` - 2; documents are cut at multiples of `grid`. Of some tries and the zigzag over the
    row, those within 1 + `work_tolerance` of the mean work compete by tokens moved; if there are
    none, the most even one is returned. The same holds for full masks. Raises ValueErrors.

    >>> [p.tolist() for p in place(np.array([6, 1, 1, 1, 9]), 2)]
    [[[1, 0, 1], [2, 0, 1], [3, 0, 1], [4, 0, 2], [4, 5, 9]], [[0, 0, 6], [4, 2, 5]]]
    """
    sizes, most = Documents.of(lengths).lengths, 1 + work_tolerance
    if min(ranks, grid) < 1 or not min(work_tolerance, token_tolerance) >= 0:
        got = f"{ranks=}, {grid=}, {work_tolerance=}, {token_tolerance=}"
        raise LayoutError(f"ranks and grid must be at least 1, tolerances at least 0, got {got}")
    if not sizes.sum():
        return [np.zeros((0, 3), dtype=np.int64) for _ in range(ranks)]
    tried = [_joined(*_zigzag(sizes, ranks, grid), ranks)]
    for heavy, ease in TRIES:
        run = _Run(sizes, causal, grid)
        tried.append(_joined(*run.place(ranks, most, token_tolerance, heavy, ease), ranks))
        if measure(tried[-1], sizes, causal=causal).work_max_mean <= most:
            break
    balances = [measure(pieces, sizes, causal=causal) for pieces in tried]
    scores = [(max(most, x.work_max_mean), x.moved_tokens) for x in balances]
    return tried[scores.index(min(scores))]


def measure(pieces: list[np.ndarray], lengths: np.ndarray, *, causal: bool = True) -> Balance:
    """Balance of a placement; a rank needs its documents up to its last token, or whole if full.

    >>> measure([np.array([[0, 2, 4]]), np.array([[0, 0, 2], [1, 0, 1]])], np.array([4, 1]))
    Balance(work_max_mean=1.2727272727272727, tokens_max_mean=1.2, moved_tokens=2, segments=3)
    """
    sizes, ranks = np.asarray(lengths, dtype=np.int64), len(pieces)
    rank = np.repeat(np.arange(ranks), [len(p) for p in pieces])
    doc, start, stop = np.concatenate([np.zeros((0, 3), dtype=np.int64), *pieces]).T
    work, tokens = np.zeros((2, ranks), dtype=np.int64)
    np.add.at(work, rank, _work(sizes, causal, doc, start, stop))
    np.add.at(tokens, rank, stop - start)
    pairs, pair = np.unique(rank * len(sizes) + doc, return_inverse=True)
    need = np.zeros(len(pairs), dtype=np.int64)
    np.maximum.at(need, pair, stop if causal else sizes[doc])
    max_mean = [float(x.max()) * ranks / float(x.sum()) if x.any() else 1.0 for x in (work, tokens)]
    return Balance(max_mean[0], max_mean[1], int(need.sum() - tokens.sum()), len(rank))


def lower_bound(
    lengths: np.ndarray, ranks: int, *, work_tolerance: float = 0.05, token_tolerance: float = 0.0
) -> int:
    """Tokens that any placement within the tolerances moves at least, causal mask; not tight.

    The m ranks that reach furthest into a document hold all of it behind the end of the next one,
    and not more than m ranks may: so the next one needs e_m tokens or more. Sum over m >= 1.

    >>> lower_bound(np.array([4096]), 2, work_tolerance=0.0)
    2896
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    work, share = sizes * (sizes + 1) // 2, -(-int(sizes.sum()) // ranks)
    most_work = int((1 + work_tolerance) * int(work.sum()) / ranks) + 1
    most_tokens = share + int(token_tolerance * share)
    long, m = (sizes > most_tokens) | (work > most_work), np.arange(1, ranks)[:, None]
    root = np.sqrt(8.0 * np.maximum(work[long] - m * most_work, 0) + 1)  # e (e + 1) / 2 = the rest
    return int(np.maximum((root - 1) // 2, sizes[long] - m * most_tokens).sum())


def _work(sizes: np.ndarray, causal: bool, doc: Any, start: Any, stop: Any) -> Any:
    """Visible pairs of pieces: a token sees the tokens up to itself, or its whole document."""
    return rows_area(sizes[doc], causal, start, stop)


def _joined(rank: np.ndarray, pieces: np.ndarray, ranks: int) -> list[np.ndarray]:
    """The pieces of each rank, sorted; adjacent ones joined."""
    order = np.lexsort((pieces[START], pieces[DOC], rank))
    rank, (doc, start, stop) = rank[order], pieces[:, order]
    same = (rank[1:] == rank[:-1]) & (doc[1:] == doc[:-1]) & (start[1:] == stop[:-1])
    first, last = np.flatnonzero(np.append(True, ~same)), np.flatnonzero(np.append(~same, True))
    rows = np.stack([doc[first], start[first], stop[last]], axis=1)
    return np.split(rows, np.searchsorted(rank[first], range(1, ranks)))


def _zigzag(sizes: np.ndarray, ranks: int, grid: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks r and 2P - 1 - r of 2P blocks of the sequence: ranks, columns (document, start, stop)."""
    borders = np.append(0, np.cumsum(sizes))
    share = np.diff(borders[-1] * np.arange(ranks + 1) // ranks)
    ends = np.cumsum(np.append(share // 2, (share - share // 2)[::-1]))[:-1]
    doc = np.minimum(np.searchsorted(borders, ends, "right"), len(sizes)) - 1
    nearest = (ends - borders[doc] + grid // 2) // grid * grid  # position where it may be cut
    ends = borders[doc] + np.minimum(nearest, sizes[doc])
    cuts = np.unique(np.append(borders, ends))
    block = np.searchsorted(ends, cuts[:-1], "right")
    doc = np.searchsorted(borders, cuts[:-1], "right") - 1
    pieces = np.stack([doc, cuts[:-1] - borders[doc], cuts[1:] - borders[doc]])
    return np.minimum(block, 2 * ranks - 1 - block), pieces


class _Run:
    """Fills one rank after the other from the open items, of each document at most one interval.

    `items` ascend in work per token; `sums` are tokens and work of the first i. The rank at hand
    `want`s tokens, has `room` for work, and some work is `due` lest too much is left to the others.
    """

    def __init__(self, sizes: np.ndarray, causal: bool, grid: int) -> None:
        self.work, self.grid = partial(_work, sizes, causal), grid
        self.owner: list[int] = []  # of the columns of `placed`
        self.placed: list[np.ndarray] = []
        docs = np.flatnonzero(sizes)
        items = self._describe(docs, 0 * docs, sizes[docs])
        self._open(items[:, np.argsort(items[RATE], kind="stable")])

    def place(
        self, ranks: int, most: float, spare: float, heavy: float, ease: float
    ) -> tuple[np.ndarray, np.ndarray]:
        total, work = self.sums[:, -1].tolist()
        cap, eased = (int((1 + x * (most - 1)) * work / ranks) for x in (0.99, ease))
        self.slack = work // (100 * ranks)  # lets costlier documents than the cheapest fill up
        self.spare = max(int(spare * total / ranks), self.grid // 2)
        for self.rank in range(ranks):
            self.tails: set[int] = set()  # documents of whose open end this rank took a part
            others, (tokens_left, work_left) = ranks - 1 - self.rank, self.sums[:, -1].tolist()
            self.want = total * (self.rank + 1) // ranks - (total - tokens_left)
            self.room, self.due = cap, work_left - others * eased
            if not others:
                self._take(slice(None))
            elif self.want > 0:
                self._fill(int(1.02 * work_left) // (1 + others) - cap, int(heavy * work / ranks))
        return np.array(self.owner), np.concatenate(self.placed, axis=1)

    def _fill(self, aim: int, heavy: int) -> None:
        top = self.items.shape[1] - 1
        if self._fitting(np.array([top])).size:
            self._take(slice(top, None))
        else:
            self._cut_tail()
        if self.tails:
            self._take_spread()
        else:
            self._take_whole(WORK, heavy, top)
            self._take_window(aim + self.room)
        self._take_whole(TOKENS, 0, 8)
        while self.want > self.spare:
            self._take_missing()

    def _take_whole(self, row: int, least: int, times: int) -> None:
        """Whole items with `least` in that row of the table or more, the largest that fit first."""
        for _ in range(times):
            at = self._fitting(np.flatnonzero(self.items[row] >= least))
            if not at.size:
                return
            i = int(at[self.items[row, at].argmax()])
            self._take(slice(i, i + 1))

    def _cut_tail(self) -> None:
        """Holds [x, stop) of the top item, x the smallest that lets the rank fill up after it."""
        doc, start, stop = self.items[:RATE, -1].tolist()
        tokens, work = self.sums[:, -2].tolist()  # of the other items
        grid, first = self.grid, max(start, stop - self.want)

        def head(x: int) -> int:  # where others run out, from start to here: keys it needs anyway
            return start + min(max(self.want - (stop - x) - tokens, 0), x - start) // grid * grid

        def fits(x: int) -> bool:
            rest = max(self.want - (stop - x) - (head(x) - start) - (grid - 1), 0)
            least = int(self._cheapest(np.array(rest), 1))
            filling = max(least, min(least + self.slack, rest * work // max(1, tokens)))
            return self.work(doc, start, head(x)) + self.work(doc, x, stop) + filling <= self.room

        cuts = range(-(-first // grid) * grid, stop, grid)
        if (k := bisect_left(cuts, True, key=fits)) < len(cuts):
            self._cut(self.items.shape[1] - 1, head(cuts[k]), cuts[k])

    def _take_spread(self) -> None:
        """Take items spread evenly over the cheapest: fewer pieces, and other ranks get cheap ones too.

        Items are sorted by work per token; `sums` are running sums of their tokens and work.
        """
        # the most work to take: a little more than that of the cheapest tokens
        most = min(int(self._cheapest(np.array(self.want))) + self.slack, self.room)
        mean = self.sums[1, 1:] // self.sums[0, 1:]  # work per token of the first i items
        # of the first `among` items, `want` tokens of mean work are within it; take each among/count-th
        among = int(np.searchsorted(mean * self.want, most, "right"))
        count = min(among, among * self.want // max(1, int(self.sums[0, among])))
        at = np.arange(count) * among // max(1, count)
        tokens, work = np.cumsum(self.items[TOKENS:, at], axis=1)
        self._take(at[(tokens <= self.want) & (work <= self.room)])

    def _take_window(self, aim: int) -> None:
        """The items next to each other whose work comes closest to `aim` from below."""
        tokens, work = self.sums
        end = tokens.searchsorted(tokens + self.want, "right") - 1
        got, rest = work[end] - work, self.want - (tokens[end] - tokens)
        fits = got + self._cheapest(np.minimum(rest, tokens[-1])) <= self.room
        at = np.flatnonzero(fits & (got <= aim) & (rest <= 0.4 * self.want))
        i = int(at[-1]) if at.size else 0
        self._take(slice(i, int(end[i])))

    def _take_missing(self) -> None:
        """Take the missing tokens from the two ends of one item.

        Tried are the three cheapest items that are long enough, and those of documents of which this rank
        has the tail; each with all tokens from its front, all from its end, or as many from its end as the
        work that is due asks for. The best violates `room` and `due` least, then moves the fewest tokens.
        """
        at = np.flatnonzero(self.items[TOKENS] >= self.want)
        if not at.size:  # none is long enough: the cheapest go whole
            self._take(slice(int(np.searchsorted(self.sums[0], self.want, "right")) - 1))
            return
        options, grid, half = [], self.grid, self.grid // 2
        mine = at[3:][np.isin(self.items[DOC, at[3:]], list(self.tails))]
        for i in np.append(at[:3], mine).tolist():
            doc, start, stop = self.items[:RATE, i].tolist()
            more = self.due - self.work(doc, start, start + self.want)
            moves = -(-more // max(1, stop - start - self.want))  # tokens, from front to end
            for behind in (0, min(max(0, moves), self.want), self.want):
                # take [start, y) and [x, stop), leave [y, x) open; cuts at multiples of grid
                x = min(max((stop - behind + half) // grid * grid, start), stop) if behind else stop
                y = min(max((start + self.want - stop + x + half) // grid * grid, start), x)
                work = self.work(doc, start, y) + self.work(doc, x, stop)
                cost = 0 if doc in self.tails else x if x < stop else y
                options.append((max(0, work - self.room, self.due - work), cost, i, y, x))
        self._cut(*min(options)[2:])

    def _describe(self, doc: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        work, tokens = self.work(doc, start, stop), stop - start
        return np.stack([doc, start, stop, 2 * work // np.maximum(tokens, 1), tokens, work])

    def _open(self, items: np.ndarray) -> None:
        self.items = items
        self.sums = np.zeros((2, items.shape[1] + 1), dtype=np.int64)
        np.cumsum(items[TOKENS:], axis=1, out=self.sums[:, 1:])

    def _cheapest(self, tokens: np.ndarray, without: int = 0) -> np.ndarray:
        """Least work of so many open tokens, the top items left out; FAR if there are not so many."""
        upto, work = self.sums
        end = self.items.shape[1] - without
        i = np.minimum(upto.searchsorted(tokens, "right"), max(1, end)) - 1
        least = work[i] + (tokens - upto[i]) * self.items[RATE, i] // 2
        return np.where(tokens > upto[end], FAR, least)

    def _fitting(self, at: np.ndarray) -> np.ndarray:
        """Those of the items `at` that the rank can take and then fill up with cheap tokens."""
        at = at[self.items[TOKENS, at] <= self.want]
        filling = self._cheapest(self.want - self.items[TOKENS, at])
        return at[self.items[WORK, at] + filling <= self.room]

    def _hold(self, items: np.ndarray) -> None:
        tokens, work = items[TOKENS:].sum(axis=1).tolist()
        self.want, self.room, self.due = self.want - tokens, self.room - work, self.due - work
        self.placed.append(items[:RATE])
        self.owner += [self.rank] * items.shape[1]

    def _take(self, at: np.ndarray | slice) -> None:
        self._hold(self.items[:, at])
        self._open(np.delete(self.items, at, axis=1))

    def _cut(self, i: int, start: int, stop: int) -> None:
        """Leaves [start, stop) of item i open and holds what lies before and behind it."""
        doc, first, end = self.items[:RATE, i].tolist()
        self.tails |= {doc} if stop < end else set()
        new = self._describe(*np.array([[doc] * 3, [first, start, stop], [start, stop, end]]))
        self._hold(new[:, [k for k in (0, 2) if new[TOKENS, k]]])
        rest = np.delete(self.items, i, axis=1)
        at = [int(rest[RATE].searchsorted(new[RATE, 1], "right"))]
        self._open(np.insert(rest, at, new[:, 1:2], axis=1) if start < stop else rest)
