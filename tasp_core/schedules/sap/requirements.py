"""What each rank's queries need: KV cut into shares that the same ranks need, and who needs which.

The documents of a packed sequence and its layout determine which tokens the queries of each rank see.
Every rank's tokens are cut where the set of ranks that see them changes, so that nothing travels that
nobody needs. Offloaded queries (offload.py) need their KV on the rank that computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...sequence.layouts import Layout, ranges
from ...sequence.tiles import edges
from .offload import Offload


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
    def _needs(self) -> Needs:
        layout = self.layout
        docs, n = layout.docs, layout.ranks
        pieces = [layout.pieces(r) for r in range(n)]
        rank = np.repeat(np.arange(n), [len(p.doc) for p in pieces])
        doc, start, last = (
            np.concatenate([getattr(p, k) for p in pieces]) for k in ("doc", "start", "last")
        )
        before, after = docs.window_size or (docs.total, 0 if docs.causal else docs.total)
        key, at = np.unique(doc * n + rank, return_inverse=True)
        if docs.window_size:
            order = np.argsort(at, kind="stable")
            key, at = key[at[order]], np.argsort(order)
        first = np.full(len(key), docs.total)
        high = np.zeros(len(key), dtype=np.int64)
        np.minimum.at(first, at, start)
        np.maximum.at(high, at, last + 1)
        begin, end = docs.cu_seqlens[key // n], docs.cu_seqlens[key // n + 1]
        low, high = np.maximum(begin, first - before), np.minimum(end, high + after)
        return Needs(key // n, key % n, first, low, high)

    @cached_property
    def cuts(self) -> list[np.ndarray]:
        """Of each rank: local tokens at which its shares begin, and where the last one ends."""
        needs, most = self._needs, self.most
        limits = np.unique(np.concatenate([needs.low, needs.high, self._chunk_borders]))
        result = []
        for rank in range(self.layout.ranks):
            p = self.layout.pieces(rank)
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
            p = self.layout.pieces(rank)
            low, size = cut[:-1], np.diff(cut)
            at = np.searchsorted(p.offset, low, side="right") - 1
            first = p.start[at] + (low - p.offset[at]) * p.stride[at]
            last = first + (size - 1) * p.stride[at]
            who, number = np.full_like(low, rank), np.arange(len(low))
            columns.append((who, number, low, size, p.stride[at], p.doc[at], first, last))
        return Shares(*(np.concatenate(c) for c in zip(*columns, strict=True)))

    def _visible(self, shares: Shares) -> tuple[np.ndarray, np.ndarray]:
        """Every (rank, share) of which some query of the rank sees the share; its own shares, too."""
        needs = self._needs
        low, high = (np.searchsorted(needs.doc, shares.doc, side=s) for s in ("left", "right"))
        who, share = ranges(low, high)
        seen = (needs.high[who] > shares.first[share]) & (needs.low[who] <= shares.last[share])
        seen &= shares.size[share] > 0
        who, share = who[seen], share[seen]
        if self.layout.docs.window_size:
            who, share = self._in_window(who, share, self.layout.docs.window_size)
        return needs.rank[who], share

    def _in_window(
        self, who: np.ndarray, share: np.ndarray, window_size: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Each rank once per share; not the stripes of which no two tokens are as close as the window."""
        shares, needs = self.shares, self._needs
        lead = shares.first[share] - needs.start[who]
        least, most = edges(lead, shares.stride[share], window_size)
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
        seen = self._sees(shares, q, k)
        return q[seen], k[seen], worker[seen]

    def _sees(self, shares: Shares, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Whether some query of share q sees some key of share k; both are of the same document."""
        docs = self.layout.docs
        seen = shares.first[k] <= shares.last[q] if docs.causal else np.ones(q.shape, dtype=bool)
        if docs.window is not None:
            seen &= shares.last[k] > shares.first[q] - docs.window
            seen &= shares.first[k] < shares.last[q] + docs.window
        return seen & (shares.size[q] > 0) & (shares.size[k] > 0)

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
                stay = self._sees(shares, a, b) & (shares.doc[a] == shares.doc[b])
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
