"""What each rank's queries need: KV cut into shares that the same ranks need, and who needs which.

The documents of a packed sequence and its layout determine which tokens the queries of each rank see.
Every rank's tokens are cut where the set of ranks that see them changes, so that nothing travels that
nobody needs. Offloaded queries (offload.py) need their KV on the rank that computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...sequence.layouts import Layout
from ...sequence.masks import band_area, edges
from ...sequence.pieces import Pieces, ranges
from ...sequence.tiles import pair_table, take, working_order
from ..counts import load_table
from .offload import Offload

MOST_AT_ONCE = 1 << 20  # pairs of pieces in one table


class Shares(NamedTuple):
    """Every rank's shares: runs of one document whose tokens are all needed by the same ranks."""

    owner: np.ndarray
    number: np.ndarray  # within the owner
    low: np.ndarray  # first local token
    size: np.ndarray
    stride: np.ndarray
    doc: np.ndarray
    first: np.ndarray  # first and last global token
    last: np.ndarray


class Needs(NamedTuple):
    """For each (document, rank with queries of it), sorted: the tokens [low, high) that the queries see.

    With a window, for each piece of such queries: distant pieces leave a gap between what they see.
    """

    doc: np.ndarray
    rank: np.ndarray
    start: np.ndarray  # first query
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Requirements:
    """The shares of a layout, and the ranks that need them.

    Args:
        most: tokens of the largest share.
        offload: the attention pairs that are offloaded, or None.
    """

    layout: Layout
    most: int
    offload: Offload | None = None

    @cached_property
    def _pieces(self) -> list[Pieces]:
        """Every rank's pieces."""
        return [self.layout.pieces(rank) for rank in range(self.layout.ranks)]

    @cached_property
    def _queries(self) -> tuple[np.ndarray, Pieces]:
        """Every rank's pieces, and the rank of each."""
        pieces = self._pieces
        rank = np.repeat(np.arange(self.layout.ranks), [len(p.doc) for p in pieces])
        return rank, Pieces(*(np.concatenate(columns) for columns in zip(*pieces, strict=True)))

    @cached_property
    def _needs(self) -> Needs:
        docs, n = self.layout.docs, self.layout.ranks
        rank, pieces = self._queries
        doc, start, last = pieces.doc, pieces.start, pieces.last
        if docs.slices is not None:
            piece, low, high = docs.slices.spans(pieces)
            return Needs(doc[piece], rank[piece], start[piece], low, high)
        least, most = docs.diagonals
        key, at = np.unique(doc * n + rank, return_inverse=True)
        if docs.window_size:
            order = np.argsort(at, kind="stable")
            key, at = key[at[order]], np.argsort(order)
        first = np.full(len(key), docs.total)
        high = np.zeros(len(key), dtype=np.int64)
        np.minimum.at(first, at, start)
        np.maximum.at(high, at, last + 1)
        begin, end = docs.cu_seqlens[key // n], docs.cu_seqlens[key // n + 1]
        low, high = np.maximum(begin, first + least), np.minimum(end, high + most)
        return Needs(key // n, key % n, first, low, high)

    @cached_property
    def cuts(self) -> list[np.ndarray]:
        """Of each rank: local tokens at which its shares begin, and where the last one ends."""
        needs, most = self._needs, self.most
        limits = np.unique(np.concatenate([needs.low, needs.high, self._chunk_borders]))
        result = []
        for rank in range(self.layout.ranks):
            p = self._pieces[rank]
            inside, at = ranges(
                np.searchsorted(limits, p.start, "right"), np.searchsorted(limits, p.last, "right")
            )
            borders = p.offset[at] - ((p.start[at] - limits[inside]) // p.stride[at])
            cut = np.unique(np.concatenate([p.offset, borders, [self.layout.num_tokens(rank)]]))
            parts, which = ranges(np.zeros_like(cut[1:]), -(-np.diff(cut) // most))
            result.append(np.append(cut[:-1][which] + parts * most, cut[-1]))
        return result

    @property
    def _chunk_borders(self) -> np.ndarray:
        """Global tokens at which offloaded query chunks begin or end."""
        if self.offload is None:
            return np.zeros(0, dtype=np.int64)
        chunks = self.offload.chunks.at(np.unique(self.offload.chunk))
        begin = self.layout.docs.cu_seqlens[chunks.doc]
        return np.concatenate([begin + chunks.low, begin + chunks.high])

    @cached_property
    def num_shares(self) -> int:
        """Shares of the rank that has the most of them."""
        return max(1, *(len(c) - 1 for c in self.cuts))

    @cached_property
    def shares(self) -> Shares:
        """All shares, rank by rank."""
        columns = []
        for rank in range(self.layout.ranks):
            cut = self.cuts[rank]
            p = self._pieces[rank]
            low, size = cut[:-1], np.diff(cut)
            at = np.searchsorted(p.offset, low, side="right") - 1
            first = p.start[at] + (low - p.offset[at]) * p.stride[at]
            last = first + (size - 1) * p.stride[at]
            who, number = np.full_like(low, rank), np.arange(len(low))
            columns.append((who, number, low, size, p.stride[at], p.doc[at], first, last))
        return Shares(*(np.concatenate(c) for c in zip(*columns, strict=True)))

    def _visible(self, shares: Shares) -> tuple[np.ndarray, np.ndarray]:
        """Every (rank, share) of which some query of the rank sees the share; its own shares, too."""
        docs, needs = self.layout.docs, self._needs
        if docs.slices is not None:
            keys = self.pieces(np.arange(len(shares.owner)))
            holder, queries = self._queries
            bands = docs.slices.bands(queries, keys)
            pairs = np.unique(bands.k * self.layout.ranks + holder[bands.q])
            return pairs % self.layout.ranks, pairs // self.layout.ranks
        low, high = (np.searchsorted(needs.doc, shares.doc, side=s) for s in ("left", "right"))
        who, share = ranges(low, high)
        seen = (needs.high[who] > shares.first[share]) & (needs.low[who] <= shares.last[share])
        seen &= shares.size[share] > 0
        who, share = who[seen], share[seen]
        if docs.window_size:
            who, share = self._in_window(who, share)
        return needs.rank[who], share

    def _in_window(self, who: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each rank once per share; not the stripes of which no two tokens are as close as the window."""
        shares, needs = self.shares, self._needs
        lead = shares.first[share] - needs.start[who]
        least, most = edges(lead, shares.stride[share], *self.layout.docs.diagonals)
        key = np.where(least <= most, share * self.layout.ranks + needs.rank[who], -1)
        key, at = np.unique(key, return_index=True)
        return who[at[key >= 0]], share[at[key >= 0]]

    @cached_property
    def offloaded(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The offloaded pairs of shares: (query share, KV share, rank that computes them)."""
        shares, offload = self.shares, self.offload
        assert offload is not None
        begin = self.layout.docs.cu_seqlens
        chunks, kv_runs = offload.chunks.at(offload.chunk), offload.kv_runs.at(offload.kv_run)
        pair, parts = np.arange(len(offload.chunk)), []
        for runs in (chunks, kv_runs):
            # a run's shares are consecutive: its tokens are in the order of the packed sequence
            order = np.lexsort((shares.first, shares.owner))
            where = shares.owner[order] * begin[-1] + shares.first[order]
            at = runs.rank * begin[-1] + begin[runs.doc]
            ends = (np.searchsorted(where, at + x) for x in (runs.low, runs.high))
            index, which = ranges(*ends)
            parts.append((order[index], which))
        (q, q_pair), (k, k_pair) = parts
        low, high = (np.searchsorted(k_pair, pair, side=s) for s in ("left", "right"))
        index, at = ranges(low[q_pair], high[q_pair])
        q, k, worker = q[at], k[index], offload.worker[q_pair[at]]
        seen = self.area(q, k) > 0
        return q[seen], k[seen], worker[seen]

    def area(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Visible pairs of the queries of share q and the keys of share k of the same document."""
        shares = self.shares
        lead = shares.first[k] - shares.first[q]
        band = edges(lead, shares.stride[q], *self.layout.docs.diagonals)
        return band_area(shares.size[q], shares.size[k], *band)

    def required(self) -> tuple[np.ndarray, np.ndarray]:
        """Every (rank, KV share) of which the share must be sent to the rank."""
        shares = self.shares
        rank, share = self._visible(shares)
        if self.offloads:
            n = len(shares.owner)
            q, k, worker = self.offloaded
            sources = np.unique(shares.owner[q])
            keep = ~np.isin(rank, sources)
            pairs = [rank[keep] * n + share[keep], worker * n + k]
            for source in sources.tolist():  # what the queries that are not offloaded still see
                seen = share[rank == source]
                mine = np.flatnonzero(shares.owner == source)
                a, b = np.broadcast_arrays(mine[:, None], seen)
                stay = (self.area(a, b) > 0) & (shares.doc[a] == shares.doc[b])
                own = shares.owner[q] == source
                gone = q[own] - mine[0], np.searchsorted(seen, k[own])
                stay[gone] = False
                pairs.append(source * n + seen[stay.any(axis=0)])
            rank, share = np.divmod(np.unique(np.concatenate(pairs)), n)
        remote = rank != shares.owner[share]
        return rank[remote], share[remote]

    @property
    def offloads(self) -> bool:
        """Whether there are offloaded pairs."""
        return self.offload is not None and len(self.offload.chunk) > 0

    @cached_property
    def _work(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys rank * shares + share, sorted, and the visible pairs of each, int64; see `work`."""
        shares = self.shares
        count = len(shares.owner)
        keys = self.pieces(np.arange(count))
        order = working_order(keys)
        keys = take(keys, order)
        holder, pieces = self._queries
        of_doc = (
            np.bincount(x.doc, minlength=len(self.layout.docs.lengths)) for x in (pieces, keys)
        )
        parts = 1 + int(np.multiply(*of_doc).sum()) // MOST_AT_ONCE
        counted = []  # (key, pairs)
        for part in np.array_split(np.arange(len(holder)), parts):
            pairs = pair_table(take(pieces, part), keys, self.layout.docs)
            seen = pairs.area > 0
            key = holder[part[pairs.q[seen]]] * count + order[pairs.k[seen]]
            counted.append(_summed(key, pairs.area[seen]))
        if self.offloads:
            q, k, worker = self.offloaded
            area = self.area(q, k)
            counted += [(shares.owner[q] * count + k, -area), (worker * count + k, area)]
        return _summed(*(np.concatenate(column) for column in zip(*counted, strict=True)))

    def work(self, rank: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Visible pairs that each rank computes with each share, int64.

        Its own queries' pairs that are not offloaded, and the pairs offloaded to it.
        """
        key, pairs = self._work
        wanted = rank * len(self.shares.owner) + share
        at = np.minimum(np.searchsorted(key, wanted), max(0, len(key) - 1))
        return np.where(key[at] == wanted, pairs[at], 0) if len(key) else 0 * wanted

    @cached_property
    def own_work(self) -> np.ndarray:
        """Visible pairs of each share's queries with their own rank's KV, without offloaded ones: int64.

        0 for all shares where there are too many of them to be worth it, and where there are stripes,
        whose queries cannot always be cut where its keys are.
        """
        shares = self.shares
        result = np.zeros(len(shares.owner), dtype=np.int64)
        document = shares.owner * len(self.layout.docs.lengths) + shares.doc
        squares = np.unique(document, return_counts=True)[1].astype(np.int64) ** 2
        if (shares.stride != 1).any() or squares.sum() > MOST_AT_ONCE:
            return result
        bounds = np.searchsorted(shares.owner, np.arange(self.layout.ranks + 1)).tolist()
        for low, high in pairwise(bounds):
            own = self.pieces(np.arange(low, high))
            pairs = pair_table(own, take(own, working_order(own)), self.layout.docs)
            np.add.at(result, low + pairs.q, pairs.area)
        if self.offloads:
            q, k, _ = self.offloaded
            same = shares.owner[q] == shares.owner[k]
            np.subtract.at(result, q[same], self.area(q[same], k[same]))
        return result

    def pieces(self, share: np.ndarray) -> Pieces:
        """Shares as pieces of the packed sequence."""
        s = self.shares
        return Pieces(*(c[share] for c in (s.low, s.size, s.first, s.stride, s.doc)))

    def tokens_of(self, rank: np.ndarray, doc: np.ndarray) -> np.ndarray:
        """Tokens of a document that each rank holds, int64; both arguments of equal shape."""
        holder, pieces = self._queries
        documents = len(self.layout.docs.lengths)
        key, at = np.unique(holder * documents + pieces.doc, return_inverse=True)
        tokens = load_table((len(key),), at, amount=pieces.count)
        wanted = rank * documents + doc
        index = np.minimum(np.searchsorted(key, wanted), max(0, len(key) - 1))
        return np.where(key[index] == wanted, tokens[index], 0) if len(key) else 0 * wanted


def _summed(key: np.ndarray, amount: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Equal keys as one, sorted, with the sum of their amounts, int64.

    >>> [x.tolist() for x in _summed(np.array([7, 2, 7]), np.array([1, 5, 2]))]
    [[2, 7], [5, 3]]
    """
    keys, at = np.unique(key, return_inverse=True)
    return keys, load_table((len(keys),), at, amount=amount.astype(np.int64))
