"""SAP, sequence-aware parallelism: every rank's own list of transfers, compiled from the documents.

From where a row's documents lie, and which rank holds what, follows exactly which tokens of which
rank each rank's queries can see. Owners' runs are cut where the set of ranks that need them changes,
so that nothing travels that nobody needs; pairs of ranks without a common document exchange nothing.

    one node        a share goes from its owner straight to each rank that needs it
    relay=4         on a mesh: over four steps, some of it by way of a third rank whose links are idle;
                    own keys are computed in the steps that have least to do
    several nodes   once to one rank of each other node (over the owner's rail where that rank needs
                    it too), which hands it on to its node peers

Where the layout leaves ranks with uneven work and tokens may not be permuted (`contiguous`), queries
of busy ranks are computed by idle ones (`move_q`; offload.py) and their answers come home.

Steps are filled receiver by receiver up to `buffer_tokens`, each receiver starting with the rank
after it, and there are no more steps than that needs. Gradients return on reversed arcs, added up on
the way. Source: the idea of HSAP (arXiv 2606.30460); the compilation rules are this project's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...errors import PlanError, check_int
from ...sequence.layouts import Layout, Pieces
from ...sequence.tiles import pair_table, take, working_order
from ..hops import KV, NO_OFFLOADED, Hops, OffloadedPairs, Q
from ..routed import Routed, Routes, busiest, complete
from ..schedule import DeclaredLimits
from .offload import offload
from .requirements import Shares, Wants
from .two_hop import spread

MOST_RELAYING = 16  # ranks: a way is searched for every share and receiver
MOST_RELAY_STEPS = 1 << 10
SPLIT = 8  # no share is larger than this part of a step's buffer


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
class Sap(Routed):
    """only what the row's documents need, compiled rank by rank (HSAP's inter-node part)"""

    buffer_tokens: int = 0  # a step's arrivals; 0: the largest rank's tokens
    move_q: bool = False
    # steps over which shares are spread, straight or by way of a third rank; 0: straight
    relay: int = 0

    name = "sap"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self.buffer_tokens, "sap: buffer_tokens", 0, PlanError)
        if check_int(self.relay, "sap: relay", 0, PlanError) > MOST_RELAY_STEPS:
            raise PlanError(f"sap: relay is at most {MOST_RELAY_STEPS} steps, got {self.relay}")
        if self.relay and self.node_size < self.ranks:
            raise PlanError("sap: relay is for the links of one node; over nodes leave it at 0")
        if self.relay and self.ranks > MOST_RELAYING:
            raise PlanError(
                f"sap: relay is searched for up to {MOST_RELAYING} ranks, not {self.ranks}; leave it at 0"
            )
        if not isinstance(self.move_q, bool):
            raise PlanError(f"sap: move_q must be true or false, got {self.move_q!r}")
        if self.move_q and self.layout is not None and self.layout.name == "striped":
            raise PlanError("sap: move_q=True cannot cut stripes; they are even without it")
        if self.move_q and self.layout is not None and self.layout.docs.slices is not None:
            raise PlanError(
                "sap: move_q=True is for masks of documents, not for slices; leave it out"
            )

    @property
    def options(self) -> dict[str, Any]:
        given = {"buffer_tokens": self.buffer_tokens} if self.buffer_tokens else {}
        given |= {"relay": self.relay} if self.relay else {}
        return {**super().options, **given, "move_q": self.move_q}

    @cached_property
    def _budget(self) -> int:
        return max(1, self.buffer_tokens or int(self._layout.counts.max()))

    def cuts(self, layout: Layout, rank: int) -> np.ndarray:
        """Local borders of the rank's shares, int64 [1, num_shares + 1]; the last ones may be empty."""
        own = self._wants.cuts[rank]
        return np.concatenate([own, np.full(self.num_shares + 1 - len(own), own[-1])])[None, :]

    @cached_property
    def _wants(self) -> Wants:
        given = offload(self._layout) if self.move_q else None
        most = self._budget // SPLIT
        if self.relay:  # so many parts that all ways and steps get some
            most = min(most, int(self._layout.counts.max()) // (4 * self.ranks))
        return Wants(self._layout, max(1, most), given)

    @property
    def num_shares(self) -> int:
        return self._wants.num_shares

    @cached_property
    def _routes(self) -> Routes:
        shape = (self.ranks, self.ranks, self.num_shares)
        keys = self._keys()
        if not self._wants.moves_some:
            return complete(keys, NO_OFFLOADED, shape)
        shares, (q, k, worker) = self._wants.shares, self._wants.away
        visits = np.unique(worker * len(shares.owner) + q)
        rank, share = np.divmod(visits, len(shares.owner))
        zero, owner = np.zeros_like(rank), shares.owner[share]
        remote_queries = Hops(zero, owner, rank, owner, shares.number[share], np.full_like(rank, Q))
        meets = OffloadedPairs(
            np.zeros_like(q),
            worker,
            shares.owner[q],
            shares.number[q],
            shares.owner[k],
            shares.number[k],
        )
        return complete(Hops.concat([keys, remote_queries]), meets, shape)

    def _keys(self) -> Hops:
        """The kv hops."""
        shares, m = self._wants.shares, self.node_size
        dst, share = self._wants.wanted()
        if self.relay:
            return self._relayed(dst, share)
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

    def _relayed(self, dst: np.ndarray, share: np.ndarray) -> Hops:
        shares = self._wants.shares
        order = np.lexsort((dst, share))
        # a gradient on its way by a third rank stays there for four steps, keys stay for two
        budget = max(1, 3 * (self._budget - self._budget // SPLIT) // 5)
        found = spread(
            dst[order], share[order], shares.owner, shares.size, self.ranks, budget, self.relay
        )
        _, step = np.unique(found.step, return_inverse=True)
        owner, number = shares.owner[found.share], shares.number[found.share]
        return Hops(step, found.src, found.dst, owner, number, np.full_like(owner, KV))

    def own_steps(self, rank: int) -> np.ndarray:
        """With `relay` own work fills the steps in which there is least to compute."""
        return self._fill[rank] if self.relay else super().own_steps(rank)

    @cached_property
    def _fill(self) -> list[np.ndarray]:
        layout, shares, hops = self._layout, self._wants.shares, self._routes.forward
        index = np.searchsorted(shares.owner, hops.owner) + hops.share
        result = []
        for rank in range(self.ranks):
            step = np.zeros(self.num_shares, dtype=np.int64)
            result.append(step)
            if self._wants.moves_some or not len(hops.step):
                continue
            mine, come = np.flatnonzero(shares.owner == rank), np.flatnonzero(hops.dst == rank)
            own, keys = (self._pieces(shares, x) for x in (mine, index[come]))
            order = working_order(keys)
            found = pair_table(layout.pieces(rank), take(keys, order), layout.docs)
            when = hops.step[come][order][found.k] + 1
            work = np.bincount(when, weights=found.area, minlength=int(hops.step.max()) + 2)
            found = pair_table(own, take(own, working_order(own)), layout.docs)
            area = np.bincount(found.q, weights=found.area, minlength=len(mine))
            for i in np.argsort(-area, kind="stable").tolist():  # the largest first
                step[shares.number[mine[i]]] = least = int(work.argmin())
                work[least] += area[i]
            step.setflags(write=False)
        return result

    @staticmethod
    def _pieces(shares: Shares, at: np.ndarray) -> Pieces:
        columns = (shares.low, shares.size, shares.first, shares.stride, shares.doc)
        return Pieces(*(c[at] for c in columns))

    @property
    def limits(self) -> DeclaredLimits:
        if self.layout is None:
            return DeclaredLimits(1, 1, 2.0)
        forward = self._routes.forward
        link, across, *_ = busiest(forward, self.ranks, self.node_size)
        largest = max(1, int(self._layout.counts.max()))
        # one share over the budget for each kind of arrival; tiny rows round up to whole tokens
        slack = 2 * 3 * max(1, self._budget // SPLIT) if self._budget < 8 * SPLIT else 0
        q = forward.where(forward.kind == Q)  # all come in the first step
        size = self._wants.shares.size[np.searchsorted(self._wants.shares.owner, q.owner) + q.share]
        remote_queries = int(np.bincount(q.dst, size, minlength=1).max())
        return DeclaredLimits(
            link, across, (2 * self._budget + slack) / largest, remote_queries / largest
        )
