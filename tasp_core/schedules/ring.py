"""Schedules along Hamiltonian cycles: share i of every rank travels round ring i.

    ring        one ring, one share: Ring Attention; uses 1 of every n - 1 links of a full mesh
    tasp        the n - 1 rings of K_n, n - 1 shares: every link of a full mesh, equally, in every step
    tasp_paths  m rings over u nodes, (m-K_m-m)^u as published: each NIC carries one share per step
    tasp_rails  the same, but hops between nodes keep their rail (the local rank in the node)

Besides its own KV, a rank holds the KV that it computes on and the KV that arrives. So its KV receive
buffer has room for the KV of two ranks, whatever n is. In the backward pass the gradient of a share
follows its KV one step later. The last hop of the ring brings it back to the owner.

Source: Ring Attention (Liu et al. 2023); TASP (arXiv 2509.26541).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import PlanError, TopologyError
from .hamiltonian import Rings, decompose, node_rings
from .hops import DKV, KV, Hops
from .schedule import DeclaredLimits, Example, Schedule


@dataclass(frozen=True)
class RingSchedule(Schedule):
    """Share i of every rank goes round ring i of `rings`."""

    @cached_property
    def rings(self) -> Rings:
        """The rings, one per share."""
        return Rings(np.arange(self.ranks, dtype=np.int64)[None, :], 0)

    @property
    def num_shares(self) -> int:
        return max(1, len(self.rings))

    @property
    def limits(self) -> DeclaredLimits:
        node = self.rings.array // self.node_size
        # the ranks that send to another node, once per ring on which they do
        crossing = self.rings.array[node != np.roll(node, -1, axis=1)]
        across = int(np.bincount(crossing).max()) if crossing.size else 0
        return DeclaredLimits(max(1, self.rings.fold), across, 2.0)

    @cached_property
    def _place(self) -> np.ndarray:
        """The position of each rank on each ring, int64 [rings, ranks]."""
        return np.argsort(self.rings.array, axis=1)

    def _grid(self, kind: int, rank: int | None, distance: np.ndarray, delay: int) -> Hops:
        """Hops of all rings: a share `distance` hops from its owner moves on in step distance + delay.

        Args:
            kind: KV or DKV.
            rank: only hops that this rank sends or receives; None: all.
            distance: int64 array of the distances from which a share moves on.
        """
        cycle, n = self.rings.array, self.ranks
        ring = np.arange(len(cycle))[:, None, None]
        if rank is None:
            at = np.arange(n)[None, :, None]
        else:  # the hops that leave the rank, and those that leave its predecessor
            at = ((self._place[:, rank][:, None] - np.array([0, 1])) % n)[:, :, None]
        src, dst = cycle[ring, at], cycle[ring, (at + 1) % n]
        return Hops.grid(
            kind, True, distance + delay, src, dst, cycle[ring, (at - distance) % n], ring
        )

    def forward(self, rank: int | None) -> Hops:
        return self._grid(KV, rank, np.arange(self.ranks - 1), 0)

    def gradients(self, rank: int | None) -> Hops:
        return self._grid(DKV, rank, np.arange(1, self.ranks), 1)


class Ring(RingSchedule):
    """one ring (Ring Attention): n - 1 steps, one link per rank"""

    name = "ring"
    order = 10
    example = Example("mesh4", steps=3)


class Tasp(RingSchedule):
    """all rings of the complete digraph: n - 1 steps, every link equally"""

    name = "tasp"
    order = 30
    example = Example("mesh5", steps=4)
    rank_symmetric = True

    @cached_property
    def rings(self) -> Rings:
        return decompose(self.ranks)


class TaspPaths(RingSchedule):
    """rings through several nodes as published, (m-K_m-m)^u: one share per NIC and step"""

    name = "tasp_paths"
    order = 40
    example = Example("mesh4x2", steps=7)
    rank_symmetric = True
    rail_aligned = False

    @cached_property
    def rings(self) -> Rings:
        num_nodes = self.ranks // self.node_size
        try:
            return node_rings(self.node_size, num_nodes, rail_aligned=self.rail_aligned)
        except TopologyError as error:
            raise PlanError(f"schedule {self.name!r}: {error}") from None


class TaspRails(TaspPaths):
    """rings through several nodes whose hops between nodes keep their rail"""

    name = "tasp_rails"
    order = 50
    rail_aligned = True
