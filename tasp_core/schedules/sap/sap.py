"""SAP, sequence-aware parallelism: every rank's own list of transfers, compiled from the documents.

The documents of a packed sequence and its layout determine which tokens the queries of each rank see.
Every rank's KV is cut into shares where the set of ranks that see it changes (requirements.py), so that
nothing travels that nobody needs. Ranks without a common document exchange nothing.

    one node        a share goes from its owner directly to each rank that needs it
    relay=4         on a full mesh: over four steps, some shares through a third rank whose links are
                    idle (two_hop.py); work on a rank's own KV fills the steps that have the least
    several nodes   a share goes once to each other node, to its ingress rank: the rank on the owner's
                    rail if it needs the share, else the next one that does; the ingress rank sends it
                    on to its node peers

A layout may leave ranks with unequal work, and tokens may not be permuted (`contiguous`). Then queries of
busy ranks are computed on other ranks (`move_q`; offload.py), and their partial outputs return.

Every receiver's arrivals are put into steps of about `buffer_tokens` tokens, starting with those of the
rank after it; there are no more steps than that takes. Gradients return over the reversed arcs and are
added up on the way. Source: the idea of HSAP (arXiv 2606.30460); the compilation rules are this
project's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...errors import PlanError, check_int
from ...machines.machine import Machine
from ...sequence.layouts import Layout, Pieces
from ...sequence.tiles import pair_table, take, working_order
from ..counts import load_table
from ..hops import KV, NO_OFFLOADED, Hops, OffloadedPairs, Q
from ..routed import Routed, Routes, busiest, complete
from ..schedule import DeclaredLimits, Example, option
from .offload import offload
from .requirements import Requirements, Shares
from .two_hop import spread

RELAY = 6  # steps that `select` tries
MOST_RELAYING = 16  # ranks: routes are searched for every share and receiver
MOST_RELAY_STEPS = 1 << 10
SPLIT = 8  # no share is larger than this part of a step's buffer


def fill_steps(
    receiver: np.ndarray, order: np.ndarray, size: np.ndarray, budget: int
) -> np.ndarray:
    """The step of each arrival: every receiver's arrivals fill its steps one after the other, in `order`.

    Args:
        receiver, order, size: of each arrival: who receives it, its rank among those of the receiver, and
            its tokens.
        budget: tokens per step and receiver; the last share of a step may exceed it.

    Returns:
        int64 [arrivals], from 0 for every receiver.
    """
    index = np.lexsort((order, receiver))
    receivers, sizes = receiver[index], size[index]
    before = (
        np.cumsum(sizes) - sizes
    )  # tokens of all arrivals before this one, then of its receiver's
    first = _first_of_run(receivers)
    steps = np.empty_like(size)
    steps[index] = (before - before[first]) // budget
    return steps


def _first_of_run(*columns: np.ndarray) -> np.ndarray:
    """For each row the index of the first row of its run of equal rows.

    >>> _first_of_run(np.array([4, 4, 2, 2, 4])).tolist()
    [0, 0, 2, 2, 4]
    """
    new = np.ones(len(columns[0]), dtype=bool)
    new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))


@dataclass(frozen=True)
class Sap(Routed):
    """only what the documents need, compiled rank by rank (HSAP's inter-node part)"""

    buffer_tokens: int = option(
        0,
        "tokens that a rank receives per step; 0: as many as the largest rank has",
        omit_default=True,
    )
    move_q: bool = option(False, "whether queries of busy ranks are computed on other ranks")
    relay: int = option(
        0,
        "steps over which shares are spread, directly or through a third rank; 0: directly",
        omit_default=True,
    )

    name = "sap"
    order = 130
    example = Example("mesh2x2", steps=5, lengths=(30, 9, 25), layout="balanced")

    @classmethod
    def resolve(
        cls, machine: Machine, options: Mapping[str, Any], layout: Layout | None
    ) -> dict[str, Any]:
        """Queries move where the layout keeps tokens in order, and messages are point to point."""
        if layout is None:
            return dict(options)
        in_order = layout.name == "contiguous" and layout.docs.slices is None
        return {"move_q": in_order and options.get("exchange", "p2p") == "p2p", **options}

    @classmethod
    def candidates(cls, machine: Machine, kv_bytes: float) -> Iterable[dict[str, Any]]:
        """Directly, and on a full mesh over six steps and third ranks."""
        mesh = machine.num_nodes == 1 and machine.link_gbps and not machine.port_gbps
        return ({}, {"relay": RELAY}) if mesh and machine.ranks <= MOST_RELAYING else ({},)

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

    @cached_property
    def _budget(self) -> int:
        return max(1, self.buffer_tokens or int(self._layout.counts.max()))

    def cuts(self, layout: Layout, rank: int) -> np.ndarray:
        """Local borders of the rank's shares, int64 [1, num_shares + 1]; the last ones may be empty."""
        own = self._requirements.cuts[rank]
        return np.concatenate([own, np.full(self.num_shares + 1 - len(own), own[-1])])[None, :]

    @cached_property
    def _requirements(self) -> Requirements:
        pairs = offload(self._layout) if self.move_q else None
        most = self._budget // SPLIT
        if self.relay:  # shares small enough for all routes and steps to get some
            most = min(most, int(self._layout.counts.max()) // (4 * self.ranks))
        return Requirements(self._layout, max(1, most), pairs)

    @property
    def num_shares(self) -> int:
        return self._requirements.num_shares

    @cached_property
    def _routes(self) -> Routes:
        shape = (self.ranks, self.ranks, self.num_shares)
        kv = self._kv_hops()
        if not self._requirements.offloads:
            return complete(kv, NO_OFFLOADED, shape)
        shares, (q, k, worker) = self._requirements.shares, self._requirements.offloaded
        visits = np.unique(worker * len(shares.owner) + q)
        rank, share = np.divmod(visits, len(shares.owner))
        zero, owner = np.zeros_like(rank), shares.owner[share]
        remote_queries = Hops(zero, owner, rank, owner, shares.number[share], np.full_like(rank, Q))
        pairs = OffloadedPairs(
            np.zeros_like(q),
            worker,
            shares.owner[q],
            shares.number[q],
            shares.owner[k],
            shares.number[k],
        )
        return complete(Hops.concat([kv, remote_queries]), pairs, shape)

    def _kv_hops(self) -> Hops:
        """One kv hop for each (share, rank that needs it and does not own it).

        Such a hop is one of three: `near`, from the owner inside its node; `far`, from the owner to the
        ingress rank of another node; `relayed`, from that ingress rank to a node peer, one step later.
        """
        shares, m = self._requirements.shares, self.node_size
        dst, share = self._requirements.required()
        if self.relay:
            return self._relayed(dst, share)
        owner, size = shares.owner[share], shares.size[share]
        # the ingress rank of a node for a share: of its ranks that need it, the first from the owner's
        # rail on, in cyclic order
        dst_node = dst // m
        by_rail = np.lexsort(((dst - owner) % m, dst_node, share))
        ingress = np.empty_like(dst)
        ingress[by_rail] = dst[by_rail][_first_of_run(share[by_rail], dst_node[by_rail])]
        across = dst_node != owner // m
        relayed = across & (ingress != dst)
        near, far, relays = ~across, across & ~relayed, bool(relayed.any())
        src = np.where(relayed, ingress, owner)
        # a receiver takes shares of the rank after it first, then of the next one, ...
        turn = ((owner - dst - 1) % self.ranks) * self.num_shares + shares.number[share]
        # with relays, arrivals from the node, from other nodes and from ingress ranks share the buffer
        budget = self._budget // (3 if relays else 1) - self._budget // SPLIT
        step = np.zeros(len(dst), dtype=np.int64)
        # what its ingress ranks receive reaches all ranks of a node, so one budget is the whole node's
        for these, into in ((near, dst), (far, dst_node if relays else dst)):
            step[these] = fill_steps(into[these], turn[these], size[these], max(1, budget))
        if relays:
            # one step after the hop that brings the share to the ingress rank, which is found by
            # (share, receiver)
            far_key = share[far] * self.ranks + dst[far]
            order = np.argsort(far_key)
            at = np.searchsorted(far_key[order], share[relayed] * self.ranks + src[relayed])
            step[relayed] = step[far][order][at] + 1
        else:
            _, step = np.unique(step, return_inverse=True)  # steps without hops are left out
        return Hops(step, src, dst, owner, shares.number[share], np.full_like(dst, KV))

    def _relayed(self, dst: np.ndarray, share: np.ndarray) -> Hops:
        """kv hops that bring each share to its `dst` over `relay` steps, directly or by a third rank."""
        shares = self._requirements.shares
        order = np.lexsort((dst, share))
        # a gradient stays on a third rank for four steps, KV for two
        budget = max(1, 3 * (self._budget - self._budget // SPLIT) // 5)
        moves = spread(
            dst[order], share[order], shares.owner, shares.size, self.ranks, budget, self.relay
        )
        _, step = np.unique(moves.step, return_inverse=True)
        owner, number = shares.owner[moves.share], shares.number[moves.share]
        return Hops(step, moves.src, moves.dst, owner, number, np.full_like(owner, KV))

    def own_steps(self, rank: int) -> np.ndarray:
        """With `relay`, work on the rank's own KV fills the steps in which there is least to compute."""
        return self._fill[rank] if self.relay else super().own_steps(rank)

    @cached_property
    def _fill(self) -> list[np.ndarray]:
        """By rank: the compute step of each of its own shares' queries with own KV, int64 [num_shares].

        The share with the most work comes first, into the step that has least to compute by then.
        """
        layout, shares, hops = self._layout, self._requirements.shares, self._routes.forward
        index = np.searchsorted(shares.owner, hops.owner) + hops.share
        result = []
        for rank in range(self.ranks):
            step = np.zeros(self.num_shares, dtype=np.int64)
            result.append(step)
            if self._requirements.offloads or not len(hops.step):
                continue
            mine, received = np.flatnonzero(shares.owner == rank), np.flatnonzero(hops.dst == rank)
            own, remote = (self._pieces(shares, x) for x in (mine, index[received]))
            order = working_order(remote)
            pairs = pair_table(layout.pieces(rank), take(remote, order), layout.docs)
            when = hops.step[received][order][pairs.k] + 1
            work = np.bincount(when, weights=pairs.area, minlength=int(hops.step.max()) + 2)
            pairs = pair_table(own, take(own, working_order(own)), layout.docs)
            area = np.bincount(pairs.q, weights=pairs.area, minlength=len(mine))
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
        # one share over the budget for each kind of arrival; tiny sequences round up to one token
        slack = 2 * 3 * max(1, self._budget // SPLIT) if self._budget < 8 * SPLIT else 0
        q = forward.where(forward.kind == Q)  # all arrive in the first step
        shares = self._requirements.shares
        size = shares.size[np.searchsorted(shares.owner, q.owner) + q.share]
        remote_queries = int(load_table((self.ranks,), q.dst, amount=size).max())
        return DeclaredLimits(
            link, across, (2 * self._budget + slack) / largest, remote_queries / largest
        )
