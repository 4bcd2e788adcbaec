"""The wave: a staged direct exchange inside nodes, pipelined along rails between them.

Rank k m + r is local rank r of node k. KV is cut into `blocks`; at step t a rank takes its own
block t and what its rail brought in step t - 1, gives each to its node peers and to the next node.
Mates forward nothing. `twins` b > 0 cuts each block into b shares of which some reach a peer over
its own rail instead of over the node's links, where links are scarcer than NICs.

    own block        fan to peers (step e), rail to the next node (step e)
    rail arrival     fan to peers, rail on; so a block reaches node distance j at step e + j - 1

On one node this is the staged direct exchange (step j: send your share j to everybody); with one
block it is an all-gather; with one rank a node it is a pipelined ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import PlanError
from ..machines.machine import Machine
from .hops import DKV, KV, Hops
from .schedule import DeclaredLimits, Schedule

MOST_SHARES = 1 << 20
Steps = tuple[np.ndarray, np.ndarray]
Times = tuple[Steps, Steps, Steps]


def link_gbps(machine: Machine) -> float:
    """What each of a rank's links to its peers can have when all are busy.

    >>> from tasp_core import machine
    >>> link_gbps(machine("mesh8")), round(link_gbps(machine("h100")), 1)
    (64.3, 64.3)
    """
    ways = (machine.link_gbps, machine.port_gbps / (machine.node_size - 1), machine.host_gbps)
    return min(x for x in ways if x)


def best_twins(machine: Machine) -> int:
    """The number of twins with the least time for large KV, or 0 where they gain under 2 %.

    Per subchunk of KV: links inside carry u - (u-1)/b, each NIC carries (u-1)(1 + (m-1)/b).

    >>> from tasp_core import machine
    >>> [best_twins(machine(name)) for name in ("mesh8x2", "mesh4x2", "mesh8x4")]
    [14, 7, 0]
    """
    m, u = machine.node_size, machine.num_nodes
    if m < 2 or u < 2:
        return 0
    link = link_gbps(machine)

    def seconds(b: int) -> float:
        saved, extra = ((u - 1) / b, (m - 1) / b) if b else (0.0, 0.0)
        return max((u - saved) / link, (u - 1) * (1 + extra) / machine.nic_gbps)

    best = min(range(65), key=lambda b: (seconds(b), b))
    return best if seconds(best) < 0.98 * seconds(0) else 0


@dataclass(frozen=True)
class Wave(Schedule):
    """staged direct exchange in a node, rails between nodes; near the bound on any nodes"""

    blocks: int = 1
    twins: int = 0

    name = "wave"
    rank_symmetric = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, least in (("blocks", 1), ("twins", 0)):
            value = getattr(self, key)
            if type(value) is not int or value < least:
                raise PlanError(
                    f"schedule {self.name!r}: {key} must be a whole number >= {least}, got {value!r}"
                )
        if self.num_shares > MOST_SHARES:
            raise PlanError(
                f"schedule {self.name!r}: blocks x twins must be at most {MOST_SHARES} shares, "
                f"got {self.blocks} x {self.twins}"
            )
        if self.twins and (self.ranks == self.node_size or self.node_size == 1):
            raise PlanError(
                f"schedule 'wave': twins={self.twins} need at least two nodes of two ranks; use twins=0"
            )

    @property
    def num_nodes(self) -> int:
        """Nodes, u."""
        return self.ranks // self.node_size

    @property
    def parts(self) -> int:
        """Shares a block."""
        return max(self.twins, 1)

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "blocks": self.blocks, "twins": self.twins}

    @property
    def num_shares(self) -> int:
        return self.blocks * self.parts

    def _twin(self, d: np.ndarray, e: np.ndarray, part: np.ndarray) -> np.ndarray:
        """Whether peer r + d gets this part of remote blocks e over its own rail."""
        if not self.twins:
            return np.zeros(np.broadcast_shapes(d.shape, part.shape), dtype=bool)
        return (d >= 1) & ((d - 1) % self.twins == part)

    def _times(self, j: np.ndarray, d: np.ndarray, e: np.ndarray, twin: np.ndarray) -> Times:
        """Steps of fan, rail and twin arcs, out and, as gradients come home, back."""
        home = e + 2 * self.num_nodes - j - (2 if self.node_size == 1 else 0)  # from j to j - 1
        fan_home = np.where((j == 0) & twin, e + 2 * self.num_nodes, e + j + 2)
        return (e + j, fan_home), (e + j - 1, home + 1), (e + j, home)

    @property
    def limits(self) -> DeclaredLimits:
        m, u = self.node_size, self.num_nodes
        d, part = np.arange(1, m)[:, None], np.arange(self.parts)[None, :]
        kept = (~self._twin(d, np.zeros(1), part)).sum(axis=1).max(initial=0)
        across = (u - 1) * (self.parts + (m - 1 if self.twins else 0))
        arriving_steps = 1 if self.blocks == 1 and u == 1 else 2
        buffer = arriving_steps * (self.ranks - 1) / self.blocks
        return DeclaredLimits(self.parts + (u - 1) * int(kept), across, buffer)

    def _arcs(self, rank: int | None, backward: bool) -> Hops:
        """Fan, rail and twin arcs; backward: reversed, at the steps at which gradients come home."""
        m, u, n = self.node_size, self.num_nodes, self.ranks
        j = np.arange(u)[:, None, None, None]  # node distance
        d = np.arange(m)[:, None, None]  # local distance
        e = np.arange(self.blocks)[:, None]
        i = np.arange(self.parts)[None, :]
        twin = self._twin(d, e, i)
        share = e * self.parts + i
        fan, rail, over = self._times(j, d, e, twin)
        # (which arcs, change of node, change of local rank, owner's local rank behind src, steps)
        kinds = (
            ((d >= 1) & ((j == 0) | ~twin), 0, d, 0, *fan),
            ((j >= 1) & (d == 0), 1, 0, 0, *rail),
            ((j >= 1) & twin, 1, 0, d, *over),
        )
        tables = []
        for mask, nodes, shift, behind, out, back in kinds:
            for role in ("src",) if rank is None else ("src", "dst"):
                at = np.arange(n)[:, None, None, None, None] if rank is None else np.array(rank)
                node, local = at // m, at % m
                if role == "dst":
                    node, local = node - nodes, local - shift
                src = (node % u) * m + local % m
                dst = ((node + nodes) % u) * m + (local + shift) % m
                # fan arcs leave at distance j; rail and twin arcs arrive at it
                owner = ((node + nodes - j) % u) * m + (local - behind) % m
                step, a, b = (back, dst, src) if backward else (out, src, dst)
                tables.append(Hops.grid(DKV if backward else KV, mask, step, a, b, owner, share))
        return Hops.concat(tables)

    def forward(self, rank: int | None) -> Hops:
        return self._arcs(rank, False)

    def gradients(self, rank: int | None) -> Hops:
        return self._arcs(rank, True)


class AllGather(Wave):
    """every rank's KV to every rank at once (Llama 3): one step, memory for n KV"""

    name = "all_gather"
    rank_symmetric = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.exchange, self.blocks, self.twins) != ("p2p", 1, 0):
            raise PlanError(
                "schedule 'all_gather' takes no exchange, blocks or twins: its keys move in one "
                "collective; use 'wave' with blocks=1 for single messages"
            )

    @property
    def options(self) -> dict[str, Any]:
        return {}

    @property
    def collective(self) -> str | None:
        return "all_gather" if self.ranks > 1 else None
