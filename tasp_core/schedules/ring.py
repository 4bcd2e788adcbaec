"""Schedules along Hamiltonian cycles: share i of every rank travels round ring i.

    ring        one ring, one share: Ring Attention; uses 1 of every n - 1 links of a full mesh
    tasp        the n - 1 rings of K_n, n - 1 shares: every link of a full mesh, equally, in every step
    tasp_paths  m rings over u nodes, (m-K_m-m)^u as published: each NIC carries one share a step
    tasp_rails  the same with hops between nodes that keep their rail

Each rank holds what it computes on and what arrives: two KV, whatever n is. In the backward pass a
share's gradient rides one hop behind its keys and comes home by the arc that closes the ring.

Source: Ring Attention (Liu et al. 2023); TASP (arXiv 2509.26541).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import PlanError, TopologyError
from .hamiltonian import Rings, decompose, node_rings
from .hops import DKV, KV, Hops
from .schedule import DeclaredLimits, Schedule


@dataclass(frozen=True)
class RingSchedule(Schedule):
    """Share i goes round ring i of `rings`."""

    @cached_property
    def rings(self) -> Rings:
        """The rings, one a share."""
        return Rings(np.arange(self.ranks, dtype=np.int64)[None, :], 0)

    @property
    def num_shares(self) -> int:
        return max(1, len(self.rings))

    @property
    def limits(self) -> DeclaredLimits:
        node = self.rings.array // self.node_size
        crossing = self.rings.array[node != np.roll(node, -1, axis=1)]
        across = int(np.bincount(crossing).max()) if crossing.size else 0
        return DeclaredLimits(max(1, self.rings.fold), across, 2.0)

    @cached_property
    def _place(self) -> np.ndarray:
        """Where each rank stands on each ring, int64 [rings, ranks]."""
        return np.argsort(self.rings.array, axis=1)

    def _grid(self, kind: int, rank: int | None, distance: np.ndarray, delay: int) -> Hops:
        """Every share `distance` hops from its owner moves on at step distance + delay."""
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
    """one ring (Ring Attention): n - 1 steps, one link a rank"""

    name = "ring"


class Tasp(RingSchedule):
    """all rings of the complete digraph: n - 1 steps, every link equally"""

    name = "tasp"
    rank_symmetric = True

    @cached_property
    def rings(self) -> Rings:
        return decompose(self.ranks)


class TaspPaths(RingSchedule):
    """rings through several nodes as published, (m-K_m-m)^u: one share a NIC and step"""

    name = "tasp_paths"
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
    rail_aligned = True
