"""SAP, sequence-aware parallelism: every rank's own list of transfers, compiled from the documents.

From where a row's documents lie, and which rank holds what, follows exactly which tokens of which
rank each rank's queries can see. Owners' runs are cut where the set of ranks that need them changes,
so that nothing travels that nobody needs; pairs of ranks without a common document exchange nothing.

    one node        a share goes from its owner straight to each rank that needs it
    several nodes   once to one rank of each other node (over the owner's rail where that rank needs
                    it too), which hands it on to its node mates

Steps are filled receiver by receiver up to `buffer_tokens`, each receiver starting with the rank
after it, and there are no more steps than that needs. Gradients return on reversed arcs, added up on
the way. Source: the idea of HSAP (arXiv 2606.30460); the compilation rules are this project's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..errors import PlanError, whole
from ..layout import Layout, ranges
from ..tiles import edges
from .base import DKV, KV, Hops, Promise, Schedule

SPLIT = 8  # no share is larger than this part of a step's buffer


class _Shares(NamedTuple):
    """Every rank's shares: runs of one document whose tokens are all needed by the same ranks."""

    owner: np.ndarray
    number: np.ndarray  # within the owner
    low: np.ndarray  # first local token
    size: np.ndarray
    stride: np.ndarray
    doc: np.ndarray
    first: np.ndarray  # first and last global token
    last: np.ndarray


class _Needs(NamedTuple):
    """For each (document, rank) that has queries of it, sorted: the tokens [low, high) they see.

    Under a window for each piece of such queries, as far pieces leave a gap between what they see.
    """

    doc: np.ndarray
    rank: np.ndarray
    start: np.ndarray  # first query
    low: np.ndarray
    high: np.ndarray


def return_arcs(hops: Hops, shape: tuple[int, int, int]) -> Hops:
    """The dkv hops that bring every share's gradient home: each kv arc reversed, as early as can be.

    A rank's contribution is computed in the step after its arrival and can leave in the one after;
    what its own receivers send back must have arrived.

    Args:
        hops: the kv hops. shape: (ranks, ranks, shares).
    """
    leaves = np.zeros(shape, dtype=np.int64)
    order = np.argsort(-hops.step, kind="stable")  # children's arcs come later than their parents'
    for step in np.unique(hops.step)[::-1]:
        some = hops.where(hops.step == step)
        at = (some.dst, some.owner, some.share)
        leaves[at] = np.maximum(leaves[at], some.step + 2)
        np.maximum.at(leaves, (some.src, some.owner, some.share), leaves[at] + 1)
    back = hops.where(order)
    step = leaves[back.dst, back.owner, back.share]
    kind = np.full_like(step, DKV)
    return Hops(step, back.dst, back.src, back.owner, back.share, kind)


def fill_steps(
    receiver: np.ndarray, order: np.ndarray, size: np.ndarray, budget: int
) -> np.ndarray:
    """A step for each arrival: by receiver, in `order`, about `budget` tokens a step (one share more)."""
    index = np.lexsort((order, receiver))
    r, n = receiver[index], size[index]
    before = np.cumsum(n) - n
    new = np.concatenate([[True], r[1:] != r[:-1]])[: len(r)]
    start = np.maximum.accumulate(np.where(new, np.arange(len(r)), 0))
    steps = np.empty_like(size)
    steps[index] = (before - before[start]) // budget
    return steps


@dataclass(frozen=True)
class Sap(Schedule):
    """only what the row's documents need, compiled rank by rank (HSAP's inter-node part)"""

    layout: Layout | None = None
    buffer_tokens: int = 0  # a step's arrivals; 0: the largest rank's tokens

    name = "sap"
    uneven = True

    def __post_init__(self) -> None:
        whole(self.buffer_tokens, "sap: buffer_tokens", 0, PlanError)

    @property
    def options(self) -> dict[str, Any]:
        given = {"buffer_tokens": self.buffer_tokens} if self.buffer_tokens else {}
        return {**super().options, **given}

    @cached_property
    def _needs(self) -> _Needs:
        layout = self._layout
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
        return _Needs(key // n, key % n, first, low, high)

    @property
    def _layout(self) -> Layout:
        if self.layout is None:
            raise PlanError("schedule 'sap' is compiled for a layout; make it with tasp.plan(...)")
        return self.layout

    @cached_property
    def _budget(self) -> int:
        return max(1, self.buffer_tokens or int(self._layout.counts.max()))

    def cuts(self, layout: Layout, rank: int) -> np.ndarray:
        """Local borders of the rank's shares, int64 [1, num_shares + 1]; the last ones may be empty."""
        own = self._cuts[rank]
        return np.concatenate([own, np.full(self.num_shares + 1 - len(own), own[-1])])[None, :]

    @cached_property
    def _cuts(self) -> list[np.ndarray]:
        needs, most = self._needs, max(1, self._budget // SPLIT)
        limits = np.unique(np.concatenate([needs.low, needs.high]))
        result = []
        for rank in range(self.ranks):
            p = self._layout.pieces(rank)
            inner, at = ranges(
                np.searchsorted(limits, p.start, "right"), np.searchsorted(limits, p.last, "right")
            )
            borders = p.offset[at] - ((p.start[at] - limits[inner]) // p.stride[at])
            cut = np.unique(np.concatenate([p.offset, borders, [self._layout.num_tokens(rank)]]))
            parts, which = ranges(np.zeros_like(cut[1:]), -(-np.diff(cut) // most))
            result.append(np.append(cut[:-1][which] + parts * most, cut[-1]))
        return result

    @cached_property
    def num_shares(self) -> int:
        return max(1, *(len(c) - 1 for c in self._cuts))

    @cached_property
    def _shares(self) -> _Shares:
        columns = []
        for rank in range(self.ranks):
            cut = self._cuts[rank]
            p = self._layout.pieces(rank)
            low, size = cut[:-1], np.diff(cut)
            at = np.searchsorted(p.offset, low, side="right") - 1
            first = p.start[at] + (low - p.offset[at]) * p.stride[at]
            last = first + (size - 1) * p.stride[at]
            who, number = np.full_like(low, rank), np.arange(len(low))
            columns.append((who, number, low, size, p.stride[at], p.doc[at], first, last))
        return _Shares(*(np.concatenate(c) for c in zip(*columns, strict=True)))

    @cached_property
    def table(self) -> Hops:
        """All kv hops."""
        shares, needs, m = self._shares, self._needs, self.node_size
        low, high = (np.searchsorted(needs.doc, shares.doc, side=s) for s in ("left", "right"))
        who, share = ranges(low, high)
        seen = (needs.high[who] > shares.first[share]) & (needs.low[who] <= shares.last[share])
        seen &= (needs.rank[who] != shares.owner[share]) & (shares.size[share] > 0)
        who, share = who[seen], share[seen]
        if self._layout.docs.window_size:
            who, share = self._in_window(who, share, self._layout.docs.window_size)
        dst = needs.rank[who]
        owner, size = shares.owner[share], shares.size[share]
        # the gate of a node: the rank that needs the share and is next after the owner's rail
        away = dst // m != owner // m
        rail = (dst - owner) % m
        order = np.lexsort((rail, dst // m, share))
        s, node = share[order], (dst // m)[order]
        new = np.concatenate([[True], (s[1:] != s[:-1]) | (node[1:] != node[:-1])])[: len(s)]
        gate = np.empty_like(dst)
        gate[order] = dst[order][np.maximum.accumulate(np.where(new, np.arange(len(s)), 0))]
        src = np.where(away & (gate != dst), gate, owner)
        turn = ((owner - dst - 1) % self.ranks) * self.num_shares + shares.number[share]
        step = np.zeros(len(dst), dtype=np.int64)
        relayed = away & (gate != dst)
        budget = self._budget - self._budget // SPLIT
        if relayed.any():  # three kinds of arrivals share the buffer: near, from afar, handed on
            budget = self._budget // 3 - self._budget // SPLIT
        near, far = ~away, away & ~relayed
        for some, into in ((near, dst), (far, dst // m if relayed.any() else dst)):
            step[some] = fill_steps(into[some], turn[some], size[some], max(1, budget))
        if (
            relayed.any()
        ):  # a gate hands on in the step after; what a node takes in a step is bounded
            far_key = share[far] * self.ranks + dst[far]
            order = np.argsort(far_key)
            at = np.searchsorted(far_key[order], share[relayed] * self.ranks + src[relayed])
            step[relayed] = step[far][order][at] + 1
        else:
            _, step = np.unique(step, return_inverse=True)  # steps without work are merged away
        return Hops(step, src, dst, owner, shares.number[share], np.full_like(dst, KV))

    def _in_window(
        self, who: np.ndarray, share: np.ndarray, window_size: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Each rank once a share, and no stripes of which no two tokens come as close as the window."""
        shares, needs = self._shares, self._needs
        lead = shares.first[share] - needs.start[who]
        least, most = edges(lead, shares.stride[share], window_size)
        key = np.where(least <= most, share * self.ranks + needs.rank[who], -1)
        found, at = np.unique(key, return_index=True)
        return who[at[found >= 0]], share[at[found >= 0]]

    @cached_property
    def _returns(self) -> Hops:
        return return_arcs(self.table, (self.ranks, self.ranks, self.num_shares))

    @property
    def promise(self) -> Promise:
        if self.layout is None:
            return Promise(1, 1, 2.0)
        hops, node = self.table, self.table.src // self.node_size
        inside = node == hops.dst // self.node_size
        link = _most(hops.step[inside], hops.src[inside] * self.ranks + hops.dst[inside])
        across = max(_most(hops.step[~inside], end[~inside]) for end in (hops.src, hops.dst))
        largest = max(1, int(self._layout.counts.max()))
        # one share over the budget for each kind of arrival; tiny rows round up to whole tokens
        slack = 2 * 3 * max(1, self._budget // SPLIT) if self._budget < 8 * SPLIT else 0
        return Promise(link, across, (2 * self._budget + slack) / largest)

    def _of(self, table: Hops, rank: int | None) -> Hops:
        return table if rank is None else table.where((table.src == rank) | (table.dst == rank))

    def forward(self, rank: int | None) -> Hops:
        return self._of(self.table, rank)

    def gradients(self, rank: int | None) -> Hops:
        return self._of(self._returns, rank)

    def num_steps(self, *, backward: bool = False) -> int:
        step = (self._returns if backward else self.table).step
        return int(step.max()) + 1 if step.size else 0


def _most(step: np.ndarray, resource: np.ndarray) -> int:
    """Most shares one resource carries in one step."""
    if not step.size:
        return 0
    return int(np.unique(np.stack([step, resource]), axis=1, return_counts=True)[1].max())
