"""Schedules compiled for a layout: from the kv and q hops to all hops of both passes.

Partial outputs of remote queries go directly to the queries' owner. In the backward pass, queries travel
with the gradient of their output, dq returns as partial outputs did, and dkv over the reversed kv arcs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..errors import PlanError
from ..machines.machine import Machine
from ..sequence.layouts import Layout
from .counts import most_load
from .hops import DKV, KV, NO_OFFLOADED, OUT, Hops, OffloadedPairs, Q, arrivals
from .schedule import DeclaredLimits, Schedule


class Routes(NamedTuple):
    """What a schedule is compiled into: kv, q and out hops, the offloaded pairs, and dkv hops."""

    forward: Hops
    offloaded: OffloadedPairs
    returns: Hops


def return_arcs(hops: Hops, ready: np.ndarray) -> Hops:
    """The dkv hops that return every share's gradient to its owner: kv arcs reversed, as early as possible.

    A rank sends a gradient in the step after it has computed its own contribution, or later, once the
    gradients have arrived from all ranks to which it had sent the share.

    Args:
        hops: the kv hops.
        ready: the compute step of each rank's contribution, int64 [rank, owner, share].
    """
    leaves = np.zeros_like(ready)
    for step in np.unique(hops.step)[::-1]:  # children's arcs come later than their parents'
        arcs = hops.where(hops.step == step)
        at = (arcs.dst, arcs.owner, arcs.share)
        leaves[at] = np.maximum(leaves[at], ready[at] + 1)
        np.maximum.at(leaves, (arcs.src, arcs.owner, arcs.share), leaves[at] + 1)
    step = leaves[hops.dst, hops.owner, hops.share]
    return Hops(step, hops.dst, hops.src, hops.owner, hops.share, np.full_like(step, DKV))


def complete(moves: Hops, pairs: OffloadedPairs, shape: tuple[int, int, int]) -> Routes:
    """All routes of a schedule, from its kv and q hops and its offloaded pairs.

    An offloaded pair is computed in the step after its KV and its query have both arrived. The partial
    output of a share's queries leaves in the step after the last of their pairs.

    Args:
        moves: the kv and q hops.
        pairs: their steps are the earliest ones; later where KV or queries arrive later.
        shape: (ranks, ranks, shares).
    """
    kv_step = arrivals(moves, KV, shape)
    if not len(pairs.rank):
        return Routes(moves, NO_OFFLOADED, return_arcs(moves, kv_step + 1))
    q_step = arrivals(moves, Q, shape)
    kv_at, q_at = (pairs.rank, pairs.owner, pairs.share), (pairs.rank, pairs.q_owner, pairs.q_share)
    arrived = np.maximum(kv_step[kv_at], q_step[q_at])
    pairs = pairs._replace(step=np.maximum(pairs.step, arrived + 1))
    # by (rank, owner, share): when partial outputs leave, and when KV has been computed on
    leaves, ready = np.zeros(shape, dtype=np.int64), kv_step + 1
    np.maximum.at(leaves, q_at, pairs.step + 1)
    np.maximum.at(ready, kv_at, pairs.step)
    rank, owner, share = np.nonzero(leaves)
    step = leaves[rank, owner, share]
    out = Hops(step, rank, owner, owner, share, np.full_like(step, OUT))
    kv = moves.where(moves.kind == KV)
    return Routes(Hops.concat([moves, out]), pairs, return_arcs(kv, ready))


@dataclass(frozen=True)
class Routed(Schedule):
    """A schedule that is compiled for a layout."""

    layout: Layout | None = None
    machine: Machine | None = field(default=None, repr=False, compare=False)

    variable_size = True

    @classmethod
    def on(
        cls,
        machine: Machine,
        options: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> Schedule:
        """The schedule on a machine; it has hops only where `layout` is given.

        Raises:
            PlanError: an option that the schedule does not have, or a machine it cannot serve.
        """
        resolved = cls.resolved(machine, options, layout)
        return cls(
            machine.ranks, cls.node_size_on(machine), layout=layout, machine=machine, **resolved
        )

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
        """All hops, and the offloaded pairs."""

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
    """The most shares that a link, and a NIC, carries in one step."""
    inside = hops.src // node_size == hops.dst // node_size
    link = most_load(hops.step[inside], (hops.src * ranks + hops.dst)[inside])
    across = max(most_load(hops.step[~inside], end[~inside]) for end in (hops.src, hops.dst))
    return DeclaredLimits(link, across, 0.0)
