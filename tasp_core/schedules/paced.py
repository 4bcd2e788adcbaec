"""The paced wave: the wave's arcs (wave.py) in as few steps as keep all links and NICs busy.

The wave sends its block t in step t, to peers and to the next node alike, so its first and last steps
leave links or NICs idle, and few of them have to be many. Here a step is a quota: `nic` shares a rank
sends to other nodes, `link` shares to each peer. Rails go first, nearest nodes first, for others wait
for them; then twins. Mates get what came from afar first, then the rank's own, which fills the gaps.

`twins` whole shares, instead of parts of each, reach peers of other nodes over the peers' own rails.
Gradients return by the reversed arcs in inverse causal order. Two nodes of 8 need 3 steps where the wave
needs 16, at the price of larger buffers. Source: this project's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import PlanError
from ..machines.machine import Machine
from .counts import last_uses, live_table
from .schedule import DeclaredLimits
from .wave import Times, Wave, link_gbps

MOST_STEPS = 64
MOST_NODES = 16
MOST_TRIED = 400
SHARES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 21, 28, 35, 56)


class Pace(NamedTuple):
    """Steps of the arcs by node distance: rails and fans by share, twins by (share, peer)."""

    rail: list[list[int]]
    fan: list[list[int]]
    twin: list[list[int]]
    loads: list[tuple[int, int]]  # shares a NIC, shares a link, in each step


@lru_cache(maxsize=4096)
def pace(m: int, u: int, shares: int, twins: int, nic: int, link: int) -> Pace | None:
    """Fill steps up to the quotas; None where that takes more than MOST_STEPS or makes no end."""
    lists: list[list[list[int]]] = [[[] for _ in range(u)] for _ in range(3)]
    rail, fan, twin = lists
    loads: list[tuple[int, int]] = []
    found = Pace(rail, fan, twin, loads)
    each = twins * (m - 1)
    left = (u - 1) * (shares + each), (m > 1) * (shares + (u - 1) * (shares - twins))
    while max(left) > 0:
        held = [shares, *(len(x) for x in rail[1:])]
        own, passed = len(fan[0]), [len(x) for x in twin]
        before, quota, t = left, [nic, link], len(loads)

        def take(
            done: list[int], ready: int, kind: int, quota: list[int] = quota, t: int = t
        ) -> None:
            count = max(0, min(quota[kind], ready - len(done)))
            quota[kind] -= count
            done.extend([t] * count)

        for j in range(1, u):
            take(rail[j], held[j - 1], 0)
        for j in range(1, u):
            take(twin[j], min(own, twins) * (m - 1) if j == 1 else passed[j - 1], 0)
        for j in range(1, u if m > 1 else 1):
            take(fan[j], held[j] - twins, 1)
        take(fan[0], shares * (m > 1), 1)
        loads.append((nic - quota[0], link - quota[1]))
        left = before[0] - loads[-1][0], before[1] - loads[-1][1]
        if left == before or t >= MOST_STEPS:
            return None
    return found


def best_pace(
    machine: Machine, kv_bytes: float = 64e6, buffer_kv: float = float("inf")
) -> dict[str, int]:
    """The options with the least time for `kv_bytes` of KV a rank.

    Args:
        buffer_kv: the most travelling KV a rank may hold, in multiples of its own; where none of
            the quickest fits, the one of them that holds least.

    Raises:
        PlanError: more than MOST_NODES nodes.

    >>> from tasp_core import machine
    >>> best_pace(machine("h100x2"))
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
                    found = pace(m, u, shares, twins, nic, link) if twins < shares else None
                    if found:
                        busy = sum(max(a / nics, b / links) for a, b in found.loads)
                        latency = len(found.loads) * machine.latency_s
                        seconds = busy * kv_bytes / 1e9 / shares + latency
                        seen.append((seconds, (shares, twins, nic, link)))
    held = []
    for _, quota in sorted(seen)[:MOST_TRIED]:
        found = pace(m, u, *quota)
        held.append((most_held(found, m, quota[0]) if found else float("inf"), quota))
        if held[-1][0] <= buffer_kv:
            break
    return (held[-1] if held[-1][0] <= buffer_kv else min(held))[1]


def most_held(found: Pace, m: int, shares: int) -> float:
    """The most travelling KV a rank holds, as a multiple of its own: all ranks hold the same."""
    u = len(found.rail)
    first, last = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]

    def alive(births: list[int], *uses: list[int]) -> None:
        first.append(np.asarray(births, dtype=np.int64))
        used = (np.asarray(steps[: len(births)], dtype=np.int64) for steps in uses)
        last.append(last_uses(first[-1] + 1, *((np.arange(len(x)), x) for x in used)))

    for j in range(u):
        twins = len(found.twin[1]) // max(1, m - 1) if u > 1 else 0
        onward = found.twin[j + 1] if j + 1 < u else []
        if j:
            fans = [0] * twins + found.fan[j]
            alive(found.rail[j], fans, found.rail[j + 1] if j + 1 < u else [])
            alive(found.twin[j], onward)
        for d in range(m - 1):  # from each peer, its share s; the first ones go on as twins
            alive(found.fan[j], onward[d :: m - 1] if j == 0 else [])
    came, gone = np.concatenate(first), np.concatenate(last)
    live = live_table(1, np.zeros_like(came), came, gone)
    return float(live.max(initial=0)) / shares


@dataclass(frozen=True)
class Paced(Wave):
    """the wave in few, full steps: nearest the bound on nodes, with larger buffers"""

    nic: int = 1
    link: int = 1

    name = "paced"

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
        if self._pace is None:
            raise PlanError(
                f"schedule 'paced': quotas too small for {MOST_STEPS} steps; raise them"
            )

    @cached_property
    def _pace(self) -> Pace | None:
        quota = self.nic, self.link
        return pace(self.node_size, self.num_nodes, self.blocks, self.twins, *quota)

    @property
    def parts(self) -> int:
        return 1

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "nic": self.nic, "link": self.link}

    @cached_property
    def limits(self) -> DeclaredLimits:
        assert self._pace is not None
        nics, links = (max(x) for x in zip(*self._pace.loads, strict=True))
        return DeclaredLimits(links, nics, most_held(self._pace, self.node_size, self.blocks))

    def _twin(self, d: np.ndarray, e: np.ndarray, part: np.ndarray) -> np.ndarray:
        return (d >= 1) & (e < self.twins)

    def _times(self, j: np.ndarray, d: np.ndarray, e: np.ndarray, twin: np.ndarray) -> Times:
        assert self._pace is not None
        u, m = self.num_nodes, self.node_size
        rail, fan, over = np.zeros((3, u, m, self.blocks, 1), dtype=np.int64)
        for k in range(u):
            rail[k, :, :, 0] = self._pace.rail[k] if k else 0
            fan[k, :, self.twins if k else 0 :, 0] = self._pace.fan[k] if m > 1 else 0
            if k and self.twins:
                steps = np.reshape(self._pace.twin[k], (self.twins, m - 1))
                over[k, 1:, : self.twins, 0] = steps.T
        last = 2 * len(
            self._pace.loads
        )  # inverse_causal: the latest arcs first, two steps after them
        return (fan, last - fan), (rail, last - rail), (over, last - over)
