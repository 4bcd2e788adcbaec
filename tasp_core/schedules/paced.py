"""The paced wave: the wave's arcs (wave.py) in as few steps as keep all links and NICs busy.

The wave sends block t in step t, to node peers and to the next node alike. Its first and last steps
leave links or NICs idle, so that it needs many steps. Here each step has quotas: a rank sends at most
`nic` shares to other nodes, and at most `link` shares to each node peer. Within the quotas, a step takes

    to other nodes    rails first, nearest nodes first, for others wait for them; then duplicated chunks
    to node peers     shares of other nodes first; the rank's own shares fill what is left

The first `twins` shares of every rank are the duplicated chunks: they reach ranks of other nodes over
those ranks' own rails. Gradients return over the reversed arcs in reverse order. Two nodes of 8 ranks
need 3 steps where the wave needs 16, at the price of larger buffers. Source: this project's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import PlanError
from ..machines.machine import Machine
from ..sequence.layouts import Layout
from .counts import last_uses, live_table
from .schedule import DeclaredLimits, Example, option
from .wave import Times, Wave, link_gbps

MOST_STEPS = 64
MOST_NODES = 16
MOST_TRIED = 400
SHARES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 21, 28, 35, 56)
SMALL_BUFFER = 4.0  # KV in the buffer of the second set of quotas that `select` tries


class ArcSteps(NamedTuple):
    """Steps of the arcs by node distance: rails and broadcasts by share, duplicates by (share, peer)."""

    rail: list[list[int]]
    broadcast: list[list[int]]
    duplicate: list[list[int]]
    loads: list[tuple[int, int]]  # of each step: shares per NIC, shares per link


@lru_cache(maxsize=4096)
def arc_steps(m: int, u: int, shares: int, twins: int, nic: int, link: int) -> ArcSteps | None:
    """The steps of all arcs, filled one after the other up to the quotas.

    All ranks do the same, so lists hold the step of each arc of one rank, by node distance j.

    Args:
        m, u: ranks per node, nodes.
        shares, twins: shares per rank, and how many of them are duplicated chunks.
        nic, link: the quotas: shares per step that a rank sends over its NIC, and to each node peer.

    Returns:
        None where more than MOST_STEPS steps are needed, or where nothing can be sent in a step.
    """
    lists: list[list[list[int]]] = [[[] for _ in range(u)] for _ in range(3)]
    rail, broadcast, duplicate = lists
    loads: list[tuple[int, int]] = []
    each = twins * (m - 1)
    # arcs still to be given a step, over NICs and over links
    left = (u - 1) * (shares + each), (m > 1) * (shares + (u - 1) * (shares - twins))
    while max(left) > 0:
        # what earlier steps have brought and may now be sent on: by rails, own shares, duplicates
        arrived = [shares, *(len(x) for x in rail[1:])]
        own, passed = len(broadcast[0]), [len(x) for x in duplicate]
        before, quota, t = left, [nic, link], len(loads)

        def take(
            done: list[int], ready: int, kind: int, quota: list[int] = quota, t: int = t
        ) -> None:
            """Give step t to as many of the first `ready` arcs as are not `done` and fit the quota."""
            count = max(0, min(quota[kind], ready - len(done)))
            quota[kind] -= count
            done.extend([t] * count)

        for j in range(1, u):
            take(rail[j], arrived[j - 1], 0)
        for j in range(1, u):
            take(duplicate[j], min(own, twins) * (m - 1) if j == 1 else passed[j - 1], 0)
        for j in range(1, u if m > 1 else 1):
            take(broadcast[j], arrived[j] - twins, 1)
        take(broadcast[0], shares * (m > 1), 1)
        loads.append((nic - quota[0], link - quota[1]))
        left = before[0] - loads[-1][0], before[1] - loads[-1][1]
        if left == before or t >= MOST_STEPS:
            return None
    return ArcSteps(rail, broadcast, duplicate, loads)


def best_quotas(
    machine: Machine, kv_bytes: float = 64e6, buffer_kv: float = float("inf")
) -> dict[str, int]:
    """The options with the least time for `kv_bytes` bytes of KV per rank.

    Args:
        buffer_kv: the most KV of other ranks that a rank may hold, as a multiple of its own. Where
            none of the MOST_TRIED quickest options fits, the one with the smallest buffer is taken.

    Raises:
        PlanError: more than MOST_NODES nodes.

    >>> from tasp_core import machine
    >>> best_quotas(machine("h100x2"))
    {'blocks': 14, 'twins': 1, 'nic': 7, 'link': 9}
    """
    return dict(
        zip(("blocks", "twins", "nic", "link"), _search(machine, kv_bytes, buffer_kv), strict=True)
    )


@lru_cache(maxsize=256)
def _search(machine: Machine, kv_bytes: float, buffer_kv: float) -> tuple[int, int, int, int]:
    m, u = machine.node_size, machine.num_nodes
    if u > MOST_NODES:
        raise PlanError(
            f"schedule 'paced' is searched for up to {MOST_NODES} nodes, not {u}; use 'wave', which is "
            "near the bound there, or give blocks, twins, nic and link"
        )
    links = link_gbps(machine) if m > 1 else float("inf")
    nics = machine.nic_gbps * (machine.nics or m) / m
    seen: list[tuple[float, tuple[int, int, int, int]]] = []
    for shares in SHARES:
        for twins in (0, 1, 2) if m > 1 else (0,):
            total = (u - 1) * (shares + twins * (m - 1))
            for nic in {-(-total // steps) for steps in range(u, MOST_STEPS)}:
                for slack in (0.85, 0.9, 1.0, 1.1, 1.25):
                    link = max(1, round(nic * links / nics * slack)) if m > 1 else 1
                    arcs = arc_steps(m, u, shares, twins, nic, link) if twins < shares else None
                    if arcs:
                        busy = sum(max(a / nics, b / links) for a, b in arcs.loads)
                        latency = len(arcs.loads) * machine.latency_s
                        seconds = busy * kv_bytes / 1e9 / shares + latency
                        seen.append((seconds, (shares, twins, nic, link)))
    buffers = []
    for _, quota in sorted(seen)[:MOST_TRIED]:
        arcs = arc_steps(m, u, *quota)
        buffers.append((most_held(arcs, m, quota[0]) if arcs else float("inf"), quota))
        if buffers[-1][0] <= buffer_kv:
            break
    return (buffers[-1] if buffers[-1][0] <= buffer_kv else min(buffers))[1]


def most_held(arcs: ArcSteps, m: int, shares: int) -> float:
    """The most KV of other ranks that a rank holds, as a multiple of its own; equal on all ranks."""
    u = len(arcs.rail)
    first, last = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]

    def alive(births: list[int], *uses: list[int]) -> None:
        first.append(np.asarray(births, dtype=np.int64))
        used = (np.asarray(steps[: len(births)], dtype=np.int64) for steps in uses)
        last.append(last_uses(first[-1] + 1, *((np.arange(len(x)), x) for x in used)))

    for j in range(u):
        twins = len(arcs.duplicate[1]) // max(1, m - 1) if u > 1 else 0
        onward = arcs.duplicate[j + 1] if j + 1 < u else []
        if j:
            broadcasts = [0] * twins + arcs.broadcast[j]
            alive(arcs.rail[j], broadcasts, arcs.rail[j + 1] if j + 1 < u else [])
            alive(arcs.duplicate[j], onward)
        for d in range(m - 1):  # from each peer, its share s; the first ones go on as duplicates
            alive(arcs.broadcast[j], onward[d :: m - 1] if j == 0 else [])
    arrives, leaves = np.concatenate(first), np.concatenate(last)
    live = live_table(1, np.zeros_like(arrives), arrives, leaves)
    return float(live.max(initial=0)) / shares


@dataclass(frozen=True)
class Paced(Wave):
    """the wave in few, full steps: nearest the bound on nodes, with larger buffers"""

    nic: int = option(1, "shares that a rank sends to other nodes in a step, at most")
    link: int = option(1, "shares that a rank sends to each node peer in a step, at most")

    name = "paced"
    order = 70
    example = Example("mesh2x2", steps=3, options={"blocks": 3, "twins": 1, "nic": 2, "link": 2})
    buffer_slack = 1.2

    @classmethod
    def resolve(
        cls, machine: Machine, options: Mapping[str, Any], layout: Layout | None
    ) -> dict[str, Any]:
        """The quickest options for 64 MB of KV per rank, unless all four are asked for."""
        if set(options) >= {"blocks", "twins", "nic", "link"} or machine.num_nodes == 1:
            return dict(options)
        return {**best_quotas(machine), **options}

    @classmethod
    def candidates(cls, machine: Machine, kv_bytes: float) -> Iterable[dict[str, Any]]:
        """The quickest quotas for this much KV, and the quickest ones that need little memory."""
        if not 1 < machine.num_nodes <= MOST_NODES:
            return ({},)
        limits = float("inf"), SMALL_BUFFER
        quick, small = (best_quotas(machine, kv_bytes, most) for most in limits)
        return (quick, small) if small != quick else (quick,)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("nic", "link"):
            value = getattr(self, key)
            if type(value) is not int or value < 1:
                raise PlanError(
                    f"schedule 'paced': {key} must be a whole number >= 1, got {value!r}"
                )
        if self.twins >= self.blocks:
            raise PlanError(f"schedule 'paced': twins must be below blocks, {self.blocks}")
        if self.num_nodes == 1:
            raise PlanError("schedule 'paced' needs at least two nodes; use 'wave' on one node")
        if self._arc_steps is None:
            raise PlanError(
                f"schedule 'paced': quotas too small for {MOST_STEPS} steps; raise them"
            )

    @cached_property
    def _arc_steps(self) -> ArcSteps | None:
        quota = self.nic, self.link
        return arc_steps(self.node_size, self.num_nodes, self.blocks, self.twins, *quota)

    @property
    def parts(self) -> int:
        return 1

    @cached_property
    def limits(self) -> DeclaredLimits:
        assert self._arc_steps is not None
        nics, links = (max(x) for x in zip(*self._arc_steps.loads, strict=True))
        return DeclaredLimits(links, nics, most_held(self._arc_steps, self.node_size, self.blocks))

    def _duplicated(self, d: np.ndarray, e: np.ndarray, part: np.ndarray) -> np.ndarray:
        return (d >= 1) & (e < self.twins)

    def _times(self, j: np.ndarray, d: np.ndarray, e: np.ndarray, duplicated: np.ndarray) -> Times:
        assert self._arc_steps is not None
        u, m, arcs = self.num_nodes, self.node_size, self._arc_steps
        rail, broadcast, duplicate = np.zeros((3, u, m, self.blocks, 1), dtype=np.int64)
        for k in range(u):
            rail[k, :, :, 0] = arcs.rail[k] if k else 0
            broadcast[k, :, self.twins if k else 0 :, 0] = arcs.broadcast[k] if m > 1 else 0
            if k and self.twins:
                steps = np.reshape(arcs.duplicate[k], (self.twins, m - 1))
                duplicate[k, 1:, : self.twins, 0] = steps.T
        last = 2 * len(arcs.loads)  # reverse order: the gradient of the last arc two steps after it
        return (broadcast, last - broadcast), (rail, last - rail), (duplicate, last - duplicate)
