"""Schedules compiled for a layout: from how keys and queries travel to all hops of both passes.

Remote queries send what they found straight home; in the backward pass queries travel with the gradient of
their output, dq returns as out did, and dkv on reversed arcs.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..errors import PlanError
from ..sequence.layouts import Layout
from .counts import most_load
from .hops import DKV, KV, NO_OFFLOADED, OUT, Hops, OffloadedPairs, Q
from .schedule import DeclaredLimits, Schedule


class Routes(NamedTuple):
    """A schedule that moves queries: kv, q and out hops, what is computed away, and dkv hops."""

    forward: Hops
    offloaded: OffloadedPairs
    returns: Hops


def return_arcs(hops: Hops, ready: np.ndarray) -> Hops:
    """The dkv hops that bring every share's gradient home: each kv arc reversed, as early as can be.

    A rank's contribution can leave in the step after it is computed; what its own receivers send
    back must have arrived.

    Args:
        hops: the kv hops. ready: the compute step of each (rank, owner, share)'s contribution.
    """
    leaves = np.zeros_like(ready)
    for step in np.unique(hops.step)[::-1]:  # children's arcs come later than their parents'
        some = hops.where(hops.step == step)
        at = (some.dst, some.owner, some.share)
        leaves[at] = np.maximum(leaves[at], ready[at] + 1)
        np.maximum.at(leaves, (some.src, some.owner, some.share), leaves[at] + 1)
    step = leaves[hops.dst, hops.owner, hops.share]
    return Hops(step, hops.dst, hops.src, hops.owner, hops.share, np.full_like(step, DKV))


def arrivals(hops: Hops, kind: int, shape: tuple[int, int, int]) -> np.ndarray:
    """The step each (rank, owner, share) arrives in, -1 for what does not travel."""
    table = np.full(shape, -1)
    some = hops.where(hops.kind == kind)
    table[some.dst, some.owner, some.share] = some.step
    return table


def complete(moves: Hops, away: OffloadedPairs, shape: tuple[int, int, int]) -> Routes:
    """Routes from how kv and q travel and what meets away from home (its steps are found here)."""
    keys = arrivals(moves, KV, shape)
    if not len(away.rank):
        return Routes(moves, NO_OFFLOADED, return_arcs(moves, keys + 1))
    remote_queries = arrivals(moves, Q, shape)
    key, remote_query = (away.rank, away.owner, away.share), (away.rank, away.q_owner, away.q_share)
    meets = away._replace(step=np.maximum(keys[key], remote_queries[remote_query]) + 1)
    leaves, ready = np.zeros(shape, dtype=np.int64), keys + 1
    np.maximum.at(leaves, remote_query, meets.step + 1)
    np.maximum.at(ready, key, meets.step)
    rank, owner, share = np.nonzero(leaves)
    step = leaves[rank, owner, share]
    out = Hops(step, rank, owner, owner, share, np.full_like(step, OUT))
    kv = moves.where(moves.kind == KV)
    return Routes(Hops.concat([moves, out]), meets, return_arcs(kv, ready))


@dataclass(frozen=True)
class Routed(Schedule):
    """A schedule compiled for a layout into Routes."""

    layout: Layout | None = None

    variable_size = True

    @property
    def _layout(self) -> Layout:
        if self.layout is None:
            raise PlanError(
                f"schedule {self.name!r} is compiled for a layout; make it with tasp.plan(...)"
            )
        return self.layout

    @cached_property
    @abstractmethod
    def _routes(self) -> Routes:
        """All hops, and what is computed away from home."""

    @property
    def offloaded(self) -> OffloadedPairs:
        return self._routes.offloaded

    def forward(self, rank: int | None) -> Hops:
        return of_rank(self._routes.forward, rank)

    def gradients(self, rank: int | None) -> Hops:
        return of_rank(self._routes.returns, rank)

    def num_steps(self, *, backward: bool = False) -> int:
        step = self.hops(backward=backward).step
        return int(step.max()) + 1 if step.size else 0


def of_rank(table: Hops, rank: int | None) -> Hops:
    """The hops that leave or reach a rank; all for None."""
    return table if rank is None else table.where((table.src == rank) | (table.dst == rank))


def busiest(hops: Hops, ranks: int, node_size: int) -> DeclaredLimits:
    """Most shares a link, and a NIC, carries in a step."""
    inside = hops.src // node_size == hops.dst // node_size
    link = most_load(hops.step[inside], (hops.src * ranks + hops.dst)[inside])
    across = max(most_load(hops.step[~inside], end[~inside]) for end in (hops.src, hops.dst))
    return DeclaredLimits(link, across, 0.0)
