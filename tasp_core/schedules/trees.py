"""Trees for irregular machines: dead or slow links, partial meshes, buses, shared NICs, unequal nodes.

Every share of every rank travels along a spanning tree of its own to all other ranks. Trees grow share by
share, arc by arc. Each arc is the one that leaves the busiest resource on its route (link, bus, NIC)
least busy. So slow resources are used less, dead ones not at all, and a bus or NIC is crossed only once
where one crossing is enough. Arcs are then put into steps, those with the longest path still to go first;
in each step a resource gets at most an equal part of its total load. Gradients return over the reversed
arcs in reverse order.

The option `wires` is the machine as JSON, so that the hops follow from the options alone. The search is
greedy and meant for few ranks. On machines whose ranks are all equal, wave, paced and rings are as good.
Source: packing of spanning trees (Edmonds 1973); the greedy search is this project's own. networkx has
spanning arborescences of least total weight, but none whose weights change with every arc that is added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..errors import PlanError, check_int
from ..machines.machine import Machine
from ..sequence.layouts import Layout
from .counts import last_uses, live_table
from .hops import DKV, KV, Hops
from .routed import busiest
from .schedule import DeclaredLimits, Example, Schedule, option

MOST_ARCS = 1 << 15
STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
TYPICAL_KV_BYTES = 64e6


class _Routes(NamedTuple):
    """Resources by number: those of each ordered pair of ranks, int64 [src, dst, most], and their GB/s.

    The last resource is infinitely fast: it pads the entries of pairs that use fewer than others.
    """

    used: np.ndarray
    gbps: np.ndarray


def _routes(machine: Machine) -> _Routes:
    """The resources of every route, numbered in the order in which routes name them."""
    n, names = machine.ranks, dict[str, int]()  # names: number of each resource
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    routes = [[names.setdefault(x, len(names)) for x in machine.resources(*pair)] for pair in pairs]
    used = np.full((n, n, max(map(len, routes), default=1)), len(names))
    for (a, b), route in zip(pairs, routes, strict=True):
        used[a, b, : len(route)] = route
    return _Routes(used, np.array([*map(machine.capacity_gbps, names), np.inf]))


def _grow(routes: _Routes, shares: int, floor: float) -> tuple[np.ndarray, float]:
    """A spanning tree for every share of every owner, grown one arc at a time.

    Args:
        shares: per rank.
        floor: routes slower than so many GB/s are taken only where there is no other.

    Returns:
        parent, int64 [owner, share, rank]: who sends this rank the share, -1 at the owner; and the load of
        the busiest resource, in shares / (GB/s).
    """
    n = len(routes.used)
    slow = routes.gbps[routes.used].min(axis=2) < floor
    load = np.zeros(len(routes.gbps))
    parent = np.full((n, shares, n), -1)
    for share in range(shares):
        for owner in range(n):
            depth = np.full(n, -1)
            depth[owner] = 0
            for _ in range(n - 1):
                # of all arcs from ranks in the tree (rows) to others (columns), the one whose busiest
                # resource would have the least load
                rows, columns = np.flatnonzero(depth >= 0), np.flatnonzero(depth < 0)
                used = routes.used[rows[:, None], columns]
                busy = ((load[used] + 1) / routes.gbps[used]).max(axis=2)
                busy *= 1 + 0.01 * depth[rows][:, None]  # of equally busy arcs, the shallowest
                busy[slow[rows[:, None], columns]] *= 1e6  # last choice
                a, b = np.unravel_index(busy.argmin(), busy.shape)
                src, dst = rows[a], columns[b]
                parent[owner, share, dst], depth[dst] = src, depth[src] + 1
                np.add.at(load, routes.used[src, dst], 1)
    return parent, float((load / routes.gbps)[:-1].max())


@lru_cache(maxsize=64)
def _grown(wires: str, shares: int, floor: float) -> tuple[_Routes, np.ndarray, float]:
    routes = _routes(Machine(**json.loads(wires)))
    return routes, *_grow(routes, shares, floor)


def _place(parent: np.ndarray, routes: _Routes, even: float) -> tuple[np.ndarray, float]:
    """A step for each arc, int64 like `parent`, and the sum over steps of the busiest load / GB/s."""
    shape = parent.shape
    height = np.zeros(shape, dtype=np.int64)
    owner, share, dst = (x.ravel() for x in np.indices(shape))
    src = parent.ravel()
    for _ in range(shape[2]):  # the longest path from the end of each arc to a leaf
        real = src >= 0
        above = np.zeros(shape, dtype=np.int64)
        ends = (owner[real], share[real], src[real])
        np.maximum.at(above, ends, height.ravel()[real] + 1)
        if (above == height).all():
            break
        height = above
    order = np.lexsort((share, -height.ravel()))
    order = order[src[order] >= 0]
    step, seconds, t = np.full(shape, -1), 0.0, 0
    arrived = np.zeros(shape, dtype=bool)
    arrived[np.arange(shape[0]), :, np.arange(shape[0])] = True
    quota = even * routes.gbps
    total = np.zeros(len(routes.gbps))
    while order.size:
        load = np.zeros(len(routes.gbps))
        taken = np.zeros(order.size, dtype=bool)
        ready = arrived[owner[order], share[order], src[order]]
        for i in np.flatnonzero(ready).tolist():
            used = routes.used[src[order[i]], dst[order[i]]]
            # quotas below one share add up over steps until they reach one
            fits = load[used] + 1 <= quota[used] + 1e-9
            saved = (load[used] == 0) & (total[used] + 1 <= quota[used] * (t + 1) + 1e-9)
            if (fits | saved).all():
                load[used] += 1
                taken[i] = True
        if not taken.any():
            first = int(ready.argmax())
            np.add.at(load, routes.used[src[order[first]], dst[order[first]]], 1)
            taken[first] = True
        total += load
        placed = order[taken]
        step.ravel()[placed] = t
        arrived[owner[placed], share[placed], dst[placed]] = True
        seconds += float((load / routes.gbps)[:-1].max())
        order, t = order[~taken], t + 1
    return step, seconds


@lru_cache(maxsize=256)
def _searched(wires: str, ranks: int, shares: int, steps: int, floor: float) -> tuple[Hops, float]:
    """All kv hops, and seconds of communication for each GB of KV per rank."""
    machine = Machine(**json.loads(wires))
    if machine.ranks != ranks:
        raise PlanError(f"schedule 'trees': wires describe {machine.ranks} ranks, not {ranks}")
    if ranks == 1:
        return Hops.concat([]), 0.0
    routes, parent, busiest = _grown(wires, shares, floor)
    step, seconds = _place(parent, routes, busiest / steps)
    owner, share, dst = np.nonzero(parent >= 0)
    at = (owner, share, dst)
    hops = Hops(step[at], parent[at], dst, owner, share, np.full_like(dst, KV))
    return hops, seconds / shares


def tree_options(machine: Machine, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """The machine as JSON, a number of shares that keeps the search short, and the best floor and steps.

    Raises:
        PlanError: too many ranks.
    """
    n, resolved = machine.ranks, dict(options or {})
    wires = resolved.setdefault("wires", _wires(machine))
    shares = resolved.setdefault("shares", max(1, min(2 * (n - 1), MOST_ARCS // n**3)))
    if "steps" not in resolved:
        rates = sorted({machine.route_gbps(a, b) for a in range(n) for b in range(n) if a != b})
        best = []
        floors = [resolved["floor"]] if "floor" in resolved else rates[:4]
        for floor, steps in product(floors, STEPS):
            made = Trees(n, machine.node_size, wires=wires, shares=shares, steps=steps, floor=floor)
            seconds = made.gbyte_s * TYPICAL_KV_BYTES / 1e9 + made.num_steps() * machine.latency_s
            best.append((seconds, floor, steps))
        _, resolved["floor"], resolved["steps"] = min(best, default=(0.0, 0.0, 1))
    return resolved


WIRES = (
    "node_size",
    "num_nodes",
    "link_gbps",
    "port_gbps",
    "nic_gbps",
    "host_gbps",
    "nics",
    "nodes",
    "buses",
    "overrides",
)


def _wires(machine: Machine) -> str:
    bare = Machine("", 1)
    keep = {k: v for k, v in asdict(machine).items() if k in WIRES and v != getattr(bare, k)}
    return json.dumps({"name": "", "node_size": 1, **keep}, sort_keys=True)


@dataclass(frozen=True)
class Trees(Schedule):
    """trees for irregular machines: dead or slow links, buses, shared NICs, unequal nodes"""

    wires: str = option("", "the machine's links, NICs and buses, as JSON")
    shares: int = option(1, "shares, and so trees, per rank")
    steps: int = option(1, "steps over which the busiest resource's load is spread")
    floor: float = option(0.0, "GB/s below which a route is taken only where there is no other")

    name = "trees"
    order = 80
    example = Example("a100_pcie", steps=8, options={"shares": 2, "steps": 2})

    @classmethod
    def resolve(
        cls, machine: Machine, options: Mapping[str, Any], layout: Layout | None
    ) -> dict[str, Any]:
        return tree_options(machine, dict(options))

    @classmethod
    def unsuited(cls, machine: Machine) -> str:
        return "made for machines whose ranks are not all alike" if machine.homogeneous else ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("shares", "steps"):
            check_int(getattr(self, key), f"schedule 'trees': {key}", 1, PlanError)
        if self.shares * self.ranks**3 > 4 * MOST_ARCS and self.ranks > 2:
            raise PlanError(
                f"schedule 'trees': {self.shares} shares of {self.ranks} ranks are too many to search; "
                "use fewer shares, or 'wave'"
            )

    @property
    def num_shares(self) -> int:
        return self.shares

    @cached_property
    def _search(self) -> tuple[Hops, float]:
        """All kv hops, and seconds per GB of KV per rank."""
        return _searched(self.wires, self.ranks, self.shares, self.steps, self.floor)

    @property
    def gbyte_s(self) -> float:
        """Seconds of communication for each GB of KV per rank, without latency."""
        return self._search[1]

    @cached_property
    def limits(self) -> DeclaredLimits:
        hops, n = self._search[0], self.ranks
        if not hops.step.size:
            return DeclaredLimits(1, 1, 0.0)
        computed = (hops.dst, hops.owner, hops.share, hops.step + 1)
        sent_on = (hops.src, hops.owner, hops.share, hops.step)
        last = last_uses(np.zeros((n, n, self.shares), dtype=np.int64), computed, sent_on)
        live = live_table(n, hops.dst, hops.step, last[hops.dst, hops.owner, hops.share])
        most = busiest(hops, n, self.node_size)
        return most._replace(buffer=float(live.max()) / self.shares)

    def _of(self, table: Hops, rank: int | None) -> Hops:
        return table if rank is None else table.where((table.src == rank) | (table.dst == rank))

    def forward(self, rank: int | None) -> Hops:
        return self._of(self._search[0], rank)

    def gradients(self, rank: int | None) -> Hops:
        kv = self._search[0]
        last = 2 * (int(kv.step.max()) + 1) if kv.step.size else 0
        back = kv._replace(step=last - kv.step, src=kv.dst, dst=kv.src, kind=kv.kind * 0 + DKV)
        return self._of(back, rank)

    def num_steps(self, *, backward: bool = False) -> int:
        step = self._search[0].step
        return (int(step.max()) + 1) * (1 + backward) + backward if step.size else 0
