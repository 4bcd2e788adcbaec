"""The wave: a staged direct exchange inside nodes, pipelined along rails between them.

Rank k m + r is local rank r of node k; ranks with equal r form a rail. KV is cut into `blocks`. In step
t a rank sends its own block t, and the blocks that came over its rail in step t - 1, to all node peers
(intra-node broadcast) and over its rail to the next node. Node peers forward nothing.

    own block e            broadcast and rail in step e
    block from the rail    reaches node distance j in step e + j - 1; broadcast and rail in step e + j

`twins` b > 0 is for nodes whose links are slower than their NICs. Each block is cut into b shares, and
some of them reach a peer over the peer's own rail instead of over the links of the node: a duplicated
chunk, which crosses from node to node more than once.

On one node this is the staged direct exchange (in step j every rank sends its share j to all others);
with one block it is an all-gather; with one rank per node it is a pipelined ring.
Source: this project's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import PlanError
from ..machines.machine import Machine
from ..sequence.layouts import Layout
from .hops import DKV, KV, Hops
from .schedule import DeclaredLimits, Example, Option, Schedule, TokenCounts, option

MOST_SHARES = 1 << 20
MOST_ARRIVALS = 1 << 18  # of one rank, with the default number of blocks
Steps = tuple[np.ndarray, np.ndarray]
Times = tuple[Steps, Steps, Steps]


def link_gbps(machine: Machine) -> float:
    """GB/s of each of a rank's links to its node peers when all of them are busy.

    >>> from tasp_core import machine
    >>> link_gbps(machine("mesh8")), round(link_gbps(machine("h100")), 1)
    (64.3, 64.3)
    """
    rates = (machine.link_gbps, machine.port_gbps / (machine.node_size - 1), machine.host_gbps)
    return min(x for x in rates if x)


def best_twins(machine: Machine) -> int:
    """The `twins` with the least time for large KV, or 0 where they gain less than 2 %.

    For each block of KV, a link inside a node carries u - (u-1)/b, each NIC (u-1)(1 + (m-1)/b) blocks.

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

    blocks: int = option(1, "blocks that KV is cut into; one block is sent per step")
    twins: int = option(
        0, "shares per block, some of which reach a peer over its own rail; 0: none"
    )

    name = "wave"
    order = 60
    example = Example("mesh2x2", steps=3, options={"blocks": 2, "twins": 0})
    rank_symmetric = True

    @classmethod
    def resolve(
        cls, machine: Machine, options: Mapping[str, Any], layout: Layout | None
    ) -> dict[str, Any]:
        """n - 1 blocks, so that a buffer of two KV is enough; the twins that suit the machine's rates.

        Above 512 ranks fewer blocks, so that a rank's table is planned within seconds.
        """
        others = max(1, machine.ranks - 1)
        defaults = {"blocks": min(others, MOST_ARRIVALS // others), "twins": best_twins(machine)}
        return {**defaults, **options}

    @classmethod
    def candidates(cls, machine: Machine, kv_bytes: float) -> Iterable[dict[str, Any]]:
        """The defaults, and fewer blocks for where steps and messages cost more than bytes."""
        others = machine.ranks - 1
        coarser = sorted({1, round(others**0.5)} - {others, 0})
        return ({}, *({"blocks": blocks, "twins": 0} for blocks in coarser))

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
        """Shares per block."""
        return max(self.twins, 1)

    @property
    def num_shares(self) -> int:
        return self.blocks * self.parts

    def _duplicated(self, d: np.ndarray, e: np.ndarray, part: np.ndarray) -> np.ndarray:
        """Whether peer r + d gets share `part` of blocks e of other nodes over its own rail."""
        if not self.twins:
            return np.zeros(np.broadcast_shapes(d.shape, part.shape), dtype=bool)
        return (d >= 1) & ((d - 1) % self.twins == part)

    def _times(self, j: np.ndarray, d: np.ndarray, e: np.ndarray, duplicated: np.ndarray) -> Times:
        """Steps of broadcasts, rails and duplicated chunks: (forward, gradients back) of each."""
        back = e + 2 * self.num_nodes - j - (2 if self.node_size == 1 else 0)  # from j to j - 1
        broadcast_back = np.where((j == 0) & duplicated, e + 2 * self.num_nodes, e + j + 2)
        return (e + j, broadcast_back), (e + j - 1, back + 1), (e + j, back)

    @property
    def limits(self) -> DeclaredLimits:
        m, u = self.node_size, self.num_nodes
        d, part = np.arange(1, m)[:, None], np.arange(self.parts)[None, :]
        kept = (~self._duplicated(d, np.zeros(1), part)).sum(axis=1).max(initial=0)
        across = (u - 1) * (self.parts + (m - 1 if self.twins else 0))
        arriving_steps = 1 if self.blocks == 1 and u == 1 else 2
        buffer = arriving_steps * (self.ranks - 1) / self.blocks
        return DeclaredLimits(self.parts + (u - 1) * int(kept), across, buffer)

    def _arcs(self, rank: int | None, backward: bool) -> Hops:
        """Arcs of broadcasts, rails and duplicated chunks; backward: reversed, in the gradients' steps.

        Arrays have the axes [rank if all, node distance j, local distance d, block e, part i]; an arc moves
        share (e, i) of the rank that is j nodes, and for duplicated chunks d local ranks, behind.
        """
        m, u, n = self.node_size, self.num_nodes, self.ranks
        j = np.arange(u)[:, None, None, None]  # node distance
        d = np.arange(m)[:, None, None]  # local distance
        e = np.arange(self.blocks)[:, None]
        i = np.arange(self.parts)[None, :]
        duplicated = self._duplicated(d, e, i)
        share = e * self.parts + i
        broadcast, rail, duplicate = self._times(j, d, e, duplicated)
        # (which arcs, change of node, change of local rank, owner's local rank behind src, steps)
        kinds = (
            ((d >= 1) & ((j == 0) | ~duplicated), 0, d, 0, *broadcast),
            ((j >= 1) & (d == 0), 1, 0, 0, *rail),
            ((j >= 1) & duplicated, 1, 0, d, *duplicate),
        )
        tables = []
        for mask, nodes, shift, behind, out, back in kinds:
            for role in ("src",) if rank is None else ("src", "dst"):
                at = np.arange(n)[:, None, None, None, None] if rank is None else np.array(rank)
                node, local = at // m, at % m
                if role == "dst":  # arcs that arrive at the rank begin so far before it
                    node, local = node - nodes, local - shift
                src = (node % u) * m + local % m
                dst = ((node + nodes) % u) * m + (local + shift) % m
                # broadcast arcs leave at node distance j; arcs between nodes arrive at it
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
    order = 90
    example = Example("mesh4", steps=1)
    rank_symmetric = False

    @classmethod
    def options_taken(cls) -> tuple[Option, ...]:
        return ()

    @classmethod
    def resolve(
        cls, machine: Machine, options: Mapping[str, Any], layout: Layout | None
    ) -> dict[str, Any]:
        return dict(options)

    @classmethod
    def candidates(cls, machine: Machine, kv_bytes: float) -> Iterable[dict[str, Any]]:
        return ({},)

    @classmethod
    def node_size_on(cls, machine: Machine) -> int:
        """All ranks: the routes between nodes are the choice of the collective's library."""
        return machine.ranks

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.exchange, self.blocks, self.twins) != ("p2p", 1, 0):
            raise PlanError(
                "schedule 'all_gather' takes no exchange, blocks or twins: its KV moves in one "
                "collective; use 'wave' with blocks=1 for single messages"
            )

    def token_counts(self, layout: Layout) -> TokenCounts | None:
        """Every rank sends, and all buffers hold, as many tokens as the largest rank has."""
        if self.collective is None:
            return super().token_counts(layout)
        n, largest = self.ranks, int(layout.counts.max())
        gathered = n * (n - 1) * largest
        return TokenCounts(gathered, (n - 1) * layout.docs.total, 0, n * largest, 0.0)

    def collective_hops(self, node_size: int) -> Hops:
        """Each rank's KV once to every node, and there from one rank to its node peers."""
        return Wave(self.ranks, node_size).forward(None)

    @property
    def collective(self) -> str | None:
        return "all_gather" if self.ranks > 1 else None
