"""What each rank's queries need: keys cut into shares that the same ranks need, and who needs which.

From where a row's documents lie, and which rank holds what, follows exactly which tokens of which
rank each rank's queries can see. Owners' runs are cut where that set of ranks changes, so that nothing
travels that nobody needs. Queries given away (offload.py) need their keys where they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...sequence.layouts import Layout
from ...sequence.masks import band_area, edges
from ...sequence.pieces import Pieces, ranges
from .offload import Given


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
    """For each (document, rank) that has queries of it, sorted: the tokens [low, high) they see.

    Under a window for each piece of such queries, as far pieces leave a gap between what they see;
    under slices for each piece and slice.
    """

    doc: np.ndarray
    rank: np.ndarray
    start: np.ndarray  # first query
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Wants:
    """Cuts and needs of a layout.

    Args:
        most: tokens of the largest share. given: queries computed away from home, or None.
    """

    layout: Layout
    most: int
    given: Given | None = None

    @cached_property
    def _queries(self) -> tuple[np.ndarray, Pieces]:
        """Every rank's pieces, and the rank of each."""
        pieces = [self.layout.pieces(rank) for rank in range(self.layout.ranks)]
        rank = np.repeat(np.arange(self.layout.ranks), [len(p.doc) for p in pieces])
        return rank, Pieces(*(np.concatenate(columns) for columns in zip(*pieces, strict=True)))

    @cached_property
    def _needs(self) -> Needs:
        layout = self.layout
        docs, n = layout.docs, layout.ranks
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
        needs, most = self._needs, self.most
        limits = np.unique(np.concatenate([needs.low, needs.high, self._chunk_borders]))
        result = []
        for rank in range(self.layout.ranks):
            p = self.layout.pieces(rank)
            inner, at = ranges(
                np.searchsorted(limits, p.start, "right"), np.searchsorted(limits, p.last, "right")
            )
            borders = p.offset[at] - ((p.start[at] - limits[inner]) // p.stride[at])
            cut = np.unique(np.concatenate([p.offset, borders, [self.layout.num_tokens(rank)]]))
            parts, which = ranges(np.zeros_like(cut[1:]), -(-np.diff(cut) // most))
            result.append(np.append(cut[:-1][which] + parts * most, cut[-1]))
        return result

    @property
    def _chunk_borders(self) -> np.ndarray:
        """Global tokens at which queries that are given away begin or end."""
        if self.given is None:
            return np.zeros(0, dtype=np.int64)
        chunks = self.given.chunks.at(np.unique(self.given.chunk))
        begin = self.layout.docs.cu_seqlens[chunks.doc]
        return np.concatenate([begin + chunks.low, begin + chunks.high])

    @cached_property
    def num_shares(self) -> int:
        """Shares of the rank that has most."""
        return max(1, *(len(c) - 1 for c in self.cuts))

    @cached_property
    def shares(self) -> Shares:
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
        """(rank, share) for which some query of the rank sees the share, its own shares too."""
        docs, needs = self.layout.docs, self._needs
        if docs.slices is not None:
            keys = Pieces(shares.low, shares.size, shares.first, shares.stride, shares.doc)
            holder, queries = self._queries
            bands = docs.slices.bands(queries, keys)
            share, rank = np.divmod(
                np.unique(bands.k * self.layout.ranks + holder[bands.q]), self.layout.ranks
            )
            return rank, share
        low, high = (np.searchsorted(needs.doc, shares.doc, side=s) for s in ("left", "right"))
        who, share = ranges(low, high)
        seen = (needs.high[who] > shares.first[share]) & (needs.low[who] <= shares.last[share])
        seen &= shares.size[share] > 0
        who, share = who[seen], share[seen]
        if docs.window_size:
            who, share = self._in_window(who, share)
        return needs.rank[who], share

    def _in_window(self, who: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each rank once per share, and no stripes of which no two tokens come as close as the window."""
        shares, needs = self.shares, self._needs
        lead = shares.first[share] - needs.start[who]
        least, most = edges(lead, shares.stride[share], *self.layout.docs.diagonals)
        key = np.where(least <= most, share * self.layout.ranks + needs.rank[who], -1)
        found, at = np.unique(key, return_index=True)
        return who[at[found >= 0]], share[at[found >= 0]]

    @cached_property
    def away(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(query share, key share, rank) of the pairs of shares computed away from home."""
        shares, given = self.shares, self.given
        assert given is not None
        begin = self.layout.docs.cu_seqlens
        chunks, keys = given.chunks.at(given.chunk), given.keys.at(given.key)
        pair, parts = np.arange(len(given.chunk)), []
        for runs in (chunks, keys):
            # a run's shares are consecutive: tokens of a rank's run are in row order
            order = np.lexsort((shares.first, shares.owner))
            where = shares.owner[order] * begin[-1] + shares.first[order]
            at = runs.rank * begin[-1] + begin[runs.doc]
            ends = (np.searchsorted(where, at + x) for x in (runs.low, runs.high))
            index, which = ranges(*ends)
            parts.append((order[index], which))
        (q, q_pair), (k, k_pair) = parts
        low, high = (np.searchsorted(k_pair, pair, side=s) for s in ("left", "right"))
        index, at = ranges(low[q_pair], high[q_pair])
        q, k, worker = q[at], k[index], given.worker[q_pair[at]]
        seen = self._sees(shares, q, k)
        return q[seen], k[seen], worker[seen]

    def _sees(self, shares: Shares, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Whether some query of share q sees some key of share k, of the same document."""
        lead = shares.first[k] - shares.first[q]
        band = edges(lead, shares.stride[q], *self.layout.docs.diagonals)
        return band_area(shares.size[q], shares.size[k], *band) > 0

    def wanted(self) -> tuple[np.ndarray, np.ndarray]:
        """(rank, share) of every key share that must come to a rank."""
        shares = self.shares
        rank, share = self._visible(shares)
        if self.moves_some:
            n = len(shares.owner)
            q, k, worker = self.away
            givers = np.unique(shares.owner[q])
            keep = ~np.isin(rank, givers)
            pairs = [rank[keep] * n + share[keep], worker * n + k]
            for giver in givers.tolist():  # what the queries that stay still see
                seen = share[rank == giver]
                mine = np.flatnonzero(shares.owner == giver)
                a, b = np.broadcast_arrays(mine[:, None], seen)
                stay = self._sees(shares, a, b) & (shares.doc[a] == shares.doc[b])
                some = shares.owner[q] == giver
                gone = q[some] - mine[0], np.searchsorted(seen, k[some])
                stay[gone] = False
                pairs.append(giver * n + seen[stay.any(axis=0)])
            rank, share = np.divmod(np.unique(np.concatenate(pairs)), n)
        away = rank != shares.owner[share]
        return rank[away], share[away]

    @property
    def moves_some(self) -> bool:
        return self.given is not None and len(self.given.chunk) > 0
