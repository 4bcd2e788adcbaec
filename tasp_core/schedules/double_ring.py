"""Double ring: KV goes round inside each node while it moves on to the next node (LoongTrain).

Rank k m + r is local rank r of node k; ranks with equal r form a rail. In round j = 0 .. u - 1 a rank
sends the KV that came over its rail in round j - 1 (in round 0 its own KV) round the rings of its node,
which takes m - 1 steps. Meanwhile it sends the same KV over its rail to the next node:

    ring    k m + x -> k m + y          step j L + d     x, y neighbours on ring i of K_m, d < m - 1
    rail    (k - 1) m + r -> k m + r    step (j - 1) L + i mod L            L = m - 1 steps per round

"rings": "all" cuts KV into one share for each ring of K_m, which loads all links of a node equally;
"one" sends all of it round one ring, as published. A gradient follows one hop behind its KV round the
node; from the rank at which the KV entered the node it goes directly to its owner.
Source: LoongTrain (Gu et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import PlanError
from .hamiltonian import Rings, decompose
from .hops import DKV, KV, Hops
from .schedule import DeclaredLimits, Example, Schedule, option

RINGS = ("all", "one")


@dataclass(frozen=True)
class DoubleRing(Schedule):
    """rings inside nodes, an outer ring between them, one round after the other (LoongTrain)"""

    rings: str = option("all", 'rings inside a node: "all" of its full mesh, or "one"')

    name = "double_ring"
    order = 20
    example = Example("mesh3x2", steps=4)
    buffer_slack = 1.2
    rank_symmetric = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rings not in RINGS:
            raise PlanError(
                f"schedule 'double_ring': rings must be one of {RINGS}, got {self.rings!r}"
            )

    @cached_property
    def node_rings(self) -> Rings:
        """The rings of local ranks, one per share."""
        m = self.node_size
        one = m == 1 or self.rings == "one"
        return Rings(np.arange(m, dtype=np.int64)[None, :], 0) if one else decompose(m)

    @property
    def num_shares(self) -> int:
        return len(self.node_rings)

    @property
    def round(self) -> int:
        """Steps per round, L."""
        return max(1, self.node_size - 1)

    @property
    def limits(self) -> DeclaredLimits:
        nodes = self.ranks // self.node_size
        rails = -(-self.num_shares // self.round) if nodes > 1 else 0
        # arrivals of two steps on rings; for the next round, one rank's KV and what still has to go on
        waiting = 1 + rails / self.num_shares * (nodes > 2) if rails and self.node_size > 1 else 0
        return DeclaredLimits(max(1, self.node_rings.fold), rails, 2.0 + waiting)

    def _inside(self, kind: int, rank: int | None) -> Hops:
        """Hops round the rings of nodes; gradients follow one hop behind and close the ring.

        Arrays have the axes [ring, node, place on the ring, round j, hop d of the round].
        """
        m, u = self.node_size, self.ranks // self.node_size
        cycle = self.node_rings.array
        ring = np.arange(len(cycle))[:, None, None, None, None]
        j, d = np.arange(u)[:, None], np.arange(m - 1) + (kind == DKV)
        if rank is None:
            node, at = np.arange(u)[:, None, None, None], np.arange(m)[:, None, None]
        else:  # the hops that leave the rank, and those that leave its predecessor
            place = np.argsort(cycle, axis=1)[:, rank % m].reshape(-1, 1, 1, 1, 1)
            node, at = np.array(rank // m), (place - np.array([0, 1])[:, None, None]) % m
        local = node * m + cycle[ring, at]
        after = node * m + cycle[ring, (at + 1) % m]
        owner = (node - j) % u * m + cycle[ring, (at - d) % m]
        step = j * self.round + d + (kind == DKV)
        return Hops.grid(kind, m > 1, step, local, after, owner, ring)

    def _between(self, kind: int, rank: int | None) -> Hops:
        """Hops to the next node; gradients go directly to the owner once the node's sum is complete."""
        m, u, length = self.node_size, self.ranks // self.node_size, self.round
        share = np.arange(self.num_shares)
        j = np.arange(1, u)[:, None]
        step = (j - 1) * length + share % length
        if kind == DKV:
            step = step + length + m + (m > 1)
        reach = -j if kind == DKV else np.ones_like(j)
        tables = []
        for back in (0,) if rank is None else (0, 1):
            at = np.arange(self.ranks)[:, None, None] if rank is None else np.array(rank)
            node, local = at // m - back * reach, at % m
            to = node + reach
            owner = to if kind == DKV else to - j
            src, dst, whose = (x % u * m + local for x in (node, to, owner))
            tables.append(Hops.grid(kind, True, step, src, dst, whose, share))
        return Hops.concat(tables)

    def forward(self, rank: int | None) -> Hops:
        return Hops.concat([self._inside(KV, rank), self._between(KV, rank)])

    def gradients(self, rank: int | None) -> Hops:
        return Hops.concat([self._inside(DKV, rank), self._between(DKV, rank)])
