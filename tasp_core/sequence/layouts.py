"""Layout: which tokens of the packed sequence each rank holds, and in which local order.

A rank holds segments (start, stop, stride) of global tokens, laid end to end; `blocks` are the
local runs that are cut separately into shares, so that each share is a fair sample of the rank.
Four ranks, one document, "0" = held by rank 0:

    contiguous    0000 1111 2222 3333          blocks: 1
    zigzag        00 11 22 33 33 22 11 00      blocks: front and back, so causal work is even
    striped       0123 0123 0123 0123          blocks: 1; even too, but every tile is a stripe
    per_document  zigzag inside each document  blocks: all fronts, all backs
    balanced      see balanced.py              blocks: 1; made for schedule sap

Ranks may hold different counts, so no length needs padding: what 2P does not divide makes the first
zigzag blocks one token longer, where a token has the least work.
A new layout is one function in LAYOUTS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ..errors import LayoutError, check_int
from .balanced import place
from .documents import Documents
from .pieces import Pieces, ranges


class Shard(NamedTuple):
    """What one rank holds.

    Attributes:
        segments: int64 [k, 3] of (start, stop, stride): global tokens, in local order.
        blocks: int64 [blocks + 1], local tokens at which blocks begin and the last one ends.
    """

    segments: np.ndarray
    blocks: np.ndarray


def _bounds(length: np.ndarray, start: np.ndarray, ranks: int, i: int | np.ndarray) -> np.ndarray:
    """Where zigzag block i of a document's 2P blocks begins, from the document's own start.

    Blocks differ by at most one token. Front blocks get the tokens over first, then back blocks from
    the last one on: that keeps work on one document within 1 %. A document goes on in this order
    where the one before left off (start mod 2P), so that short documents fill all ranks alike.
    """
    pieces = 2 * ranks
    even, extra, first = length // pieces, length % pieces, start % pieces

    def longer(low: int | np.ndarray, high: int | np.ndarray) -> np.ndarray:
        """How many of the blocks at places [low, high) of that order have one token more."""
        ends = ((first, np.minimum(first + extra, pieces)), (0, first + extra - pieces))
        return sum(np.maximum(np.minimum(high, b) - np.maximum(low, a), 0) for a, b in ends)

    front, back = np.minimum(i, ranks), np.maximum(i - ranks, 0)
    return even * i + longer(0, front) + longer(pieces - back, pieces)


def _contiguous(docs: Documents, ranks: int, rank: int) -> Shard:
    """equal runs in the order of the sequence; cheapest to explain, uneven causal work"""
    lo, hi = docs.total * rank // ranks, docs.total * (rank + 1) // ranks
    return Shard(np.array([[lo, hi, 1]]), np.array([0, hi - lo]))


def _zigzag(docs: Documents, ranks: int, rank: int) -> Shard:
    """block r and block 2P-1-r of 2P blocks of the packed sequence: equal causal work on one document"""
    bound = _bounds(np.array(docs.total), np.array(0), ranks, np.arange(2 * ranks + 1))
    at = np.array([rank, 2 * ranks - 1 - rank])
    sizes = bound[at + 1] - bound[at]
    segments = np.stack([bound[at], bound[at + 1], np.ones(2, dtype=np.int64)], axis=1)
    return Shard(segments, np.array([0, *np.cumsum(sizes)]))


def _striped(docs: Documents, ranks: int, rank: int) -> Shard:
    """every P-th token: equal causal work, whatever the documents"""
    count = max(0, -(-(docs.total - rank) // ranks))
    return Shard(np.array([[rank, docs.total, ranks]]), np.array([0, count]))


def _per_document(docs: Documents, ranks: int, rank: int) -> Shard:
    """zigzag inside every document: equal causal work, but every document visits every rank"""
    pieces, start, length = 2 * ranks, docs.cu_seqlens[:-1], docs.lengths

    def bound(i: int) -> np.ndarray:
        return start + _bounds(length, start, ranks, i)

    front = np.stack([bound(rank), bound(rank + 1)], axis=1)
    back = np.stack([bound(pieces - 1 - rank), bound(pieces - rank)], axis=1)
    both = np.concatenate([front, back])
    sizes = both[:, 1] - both[:, 0]
    cut = int(sizes[: len(front)].sum())
    segments = np.concatenate([both, np.ones((len(both), 1), dtype=np.int64)], axis=1)
    return Shard(segments, np.array([0, cut, int(sizes.sum())]))


@lru_cache(maxsize=64)
def _placed(docs: Documents, ranks: int) -> list[np.ndarray]:
    return place(docs.lengths, ranks, causal=docs.causal)


def _balanced(docs: Documents, ranks: int, rank: int) -> Shard:
    """short documents whole, long ones cut: equal tokens and work, and little has to move"""
    pieces = _placed(docs, ranks)[rank]
    begin = docs.cu_seqlens[pieces[:, 0]]
    ends = [begin + pieces[:, 1], begin + pieces[:, 2], np.ones_like(begin)]
    return Shard(np.stack(ends, axis=1), np.array([0, (pieces[:, 2] - pieces[:, 1]).sum()]))


LAYOUTS: dict[str, Callable[[Documents, int, int], Shard]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "striped": _striped,
    "per_document": _per_document,
    "balanced": _balanced,
}


def layouts() -> dict[str, str]:
    """Names of the layouts with one line each.

    >>> list(layouts())
    ['contiguous', 'zigzag', 'striped', 'per_document', 'balanced']
    """
    return {name: str(build.__doc__) for name, build in LAYOUTS.items()}


@dataclass(frozen=True)
class Layout:
    """Tokens of `docs` on `ranks` ranks by the named rule; each rank's part is built when asked for.

    >>> layout = Layout("zigzag", Documents.of([10]), 2)
    >>> [layout.tokens(r).tolist() for r in (0, 1)]
    [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]
    """

    name: str
    docs: Documents
    ranks: int

    def __post_init__(self) -> None:
        if self.name not in LAYOUTS:
            raise LayoutError(f"no layout {self.name!r}; known are {', '.join(LAYOUTS)}")
        object.__setattr__(self, "ranks", check_int(self.ranks, "ranks", 1, LayoutError))

    def __reduce__(self) -> tuple[type[Layout], tuple[str, Documents, int]]:
        return Layout, (self.name, self.docs, self.ranks)

    def shard(self, rank: int) -> Shard:
        """Segments of a rank in local order, adjacent ones joined, and its block borders."""
        if not 0 <= rank < self.ranks:
            raise LayoutError(f"rank {rank} does not exist: ranks are 0..{self.ranks - 1}")
        if rank not in self._shards:
            self._shards[rank] = _build_shard(self.name, self.docs, self.ranks, rank)
        return self._shards[rank]

    @cached_property
    def _shards(self) -> dict[int, Shard]:
        return {}

    def num_tokens(self, rank: int) -> int:
        """Tokens a rank holds."""
        return int(self.shard(rank).blocks[-1])

    @cached_property
    def counts(self) -> np.ndarray:
        """Tokens of every rank, int64 [ranks]."""
        return np.array([self.num_tokens(r) for r in range(self.ranks)], dtype=np.int64)

    def tokens(self, rank: int) -> np.ndarray:
        """Global token ids a rank holds, in local order, int64."""
        segments = self.shard(rank).segments
        count = -((segments[:, 0] - segments[:, 1]) // segments[:, 2])
        index, owner = ranges(np.zeros_like(count), count)
        return segments[owner, 0] + index * segments[owner, 2]

    def pieces(self, rank: int, cuts: np.ndarray | None = None) -> Pieces:
        """The rank's tokens cut at segment and document borders, and at `cuts` (local indices)."""
        segments = self.shard(rank).segments
        start, stop, stride = segments.T
        offset = np.concatenate([[0], np.cumsum(-((start - stop) // stride))])
        cu = self.docs.cu_seqlens
        # document borders strictly inside each segment, as local indices
        inside, seg = ranges(np.searchsorted(cu, start, "right"), np.searchsorted(cu, stop, "left"))
        borders = offset[seg] - ((start[seg] - cu[inside]) // stride[seg])
        extra = np.zeros(0, dtype=np.int64) if cuts is None else cuts
        cut = np.unique(np.concatenate([offset, borders, extra]))
        low, count = cut[:-1], np.diff(cut)
        seg = np.searchsorted(offset, low, side="right") - 1
        first = start[seg] + (low - offset[seg]) * stride[seg]
        return Pieces(low, count, first, stride[seg], self.docs.document_of(first))

    def share_cuts(self, rank: int, num_shares: int) -> np.ndarray:
        """Local borders of the shares, int64 [blocks, num_shares + 1]: share j is part j of each block."""
        blocks = self.shard(rank).blocks
        sizes = np.diff(blocks)[:, None]
        return blocks[:-1, None] + sizes * np.arange(num_shares + 1)[None, :] // num_shares

    def locate(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rank and local index of global tokens."""
        start, stride, rank, offset = self._index
        at = np.searchsorted(start, tokens, side="right") - 1
        if self.name == "striped":  # stripes start at 0..P-1 and interleave
            at = np.asarray(tokens) % self.ranks
        return rank[at], offset[at] + (tokens - start[at]) // stride[at]

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        rows = [self.pieces(r) for r in range(self.ranks)]
        if self.name == "striped":
            ids = np.arange(self.ranks)
            return ids, np.full(self.ranks, self.ranks), ids, np.zeros(self.ranks, dtype=np.int64)
        rank = np.repeat(np.arange(self.ranks), [len(p.count) for p in rows])
        start, offset = (np.concatenate([getattr(p, k) for p in rows]) for k in ("start", "offset"))
        order = np.argsort(start, kind="stable")
        return start[order], np.ones(len(order), dtype=np.int64), rank[order], offset[order]


def _build_shard(name: str, docs: Documents, ranks: int, rank: int) -> Shard:
    # one rank holds the packed sequence in its own order, whatever the rule
    segments, blocks = LAYOUTS["contiguous" if ranks == 1 else name](docs, ranks, rank)
    segments = segments[segments[:, 0] < segments[:, 1]].astype(np.int64)
    if len(segments) > 1:
        joined = (segments[1:, 0] == segments[:-1, 1]) & (segments[1:, 2] == 1)
        first = np.flatnonzero(np.concatenate([[True], ~joined]))
        last = np.concatenate([first[1:], [len(segments)]]) - 1
        segments = np.stack([segments[first, 0], segments[last, 1], segments[first, 2]], axis=1)
    return Shard(segments, blocks.astype(np.int64))
