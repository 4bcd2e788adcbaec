"""Trees on what a machine really has: dead or slow links, partial meshes, buses, shared NICs, uneven nodes.

Every share of every rank travels along a tree of its own to all other ranks. Trees are grown share by
share, arc by arc, each time by the way whose busiest resource then is the least busy: what is slow is
used less, what is dead not at all, and a bus or NIC is crossed once where one crossing is enough.
Arcs are then placed in steps, those with the longest way still behind them first, each resource up to
an even share of its load a step. Gradients return by the reversed arcs in inverse causal order.

`wires` is the machine as JSON, so that the table follows from the options alone. The search is greedy
and meant for few ranks; on machines whose ranks are all alike wave, paced and rings do as well.
Source: packing of spanning trees (Edmonds 1973); the greedy is this project's own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..errors import PlanError, check_int
from ..machines.machine import Machine
from .counts import last_uses, live_table
from .hops import DKV, KV, Hops
from .routed import busiest
from .schedule import DeclaredLimits, Schedule

MOST_ARCS = 1 << 15
STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
TYPICAL_KV_BYTES = 64e6


class _Ways(NamedTuple):
    """Resources by number: of each ordered pair, int64 [src, dst, most]; GB/s of each.

    The last one is endless: it fills up the rows of pairs that use fewer than others.
    """

    used: np.ndarray
    gbps: np.ndarray


def _ways(machine: Machine) -> _Ways:
    n, names = machine.ranks, dict[str, int]()
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    ways = [[names.setdefault(x, len(names)) for x in machine.resources(*pair)] for pair in pairs]
    used = np.full((n, n, max(map(len, ways), default=1)), len(names))
    for (a, b), way in zip(pairs, ways, strict=True):
        used[a, b, : len(way)] = way
    return _Ways(used, np.array([*map(machine.capacity_gbps, names), np.inf]))


def _grow(ways: _Ways, shares: int, floor: float) -> tuple[np.ndarray, float]:
    """The rank each rank gets each share from, int64 [owner, share, rank], and the busiest load / GB/s.

    Ways slower than `floor` GB/s are taken only where there is no other.
    """
    n = len(ways.used)
    slow = ways.gbps[ways.used].min(axis=2) < floor
    load = np.zeros(len(ways.gbps))
    parent = np.full((n, shares, n), -1)
    for share in range(shares):
        for owner in range(n):
            depth = np.full(n, -1)
            depth[owner] = 0
            for _ in range(n - 1):
                rows, columns = np.flatnonzero(depth >= 0), np.flatnonzero(depth < 0)
                used = ways.used[rows[:, None], columns]
                busy = ((load[used] + 1) / ways.gbps[used]).max(axis=2)
                busy *= 1 + 0.01 * depth[rows][:, None]  # of equal ways, the shallowest
                busy[slow[rows[:, None], columns]] *= 1e6
                a, b = np.unravel_index(busy.argmin(), busy.shape)
                src, dst = rows[a], columns[b]
                parent[owner, share, dst], depth[dst] = src, depth[src] + 1
                np.add.at(load, ways.used[src, dst], 1)
    return parent, float((load / ways.gbps)[:-1].max())


@lru_cache(maxsize=64)
def _grown(wires: str, shares: int, floor: float) -> tuple[_Ways, np.ndarray, float]:
    ways = _ways(Machine(**json.loads(wires)))
    return ways, *_grow(ways, shares, floor)


def _place(parent: np.ndarray, ways: _Ways, even: float) -> tuple[np.ndarray, float]:
    """A step for each arc, int64 like `parent`, and the sum over steps of the busiest load / GB/s."""
    shape = parent.shape
    height = np.zeros(shape, dtype=np.int64)
    owner, share, dst = (x.ravel() for x in np.indices(shape))
    src = parent.ravel()
    for _ in range(shape[2]):  # the longest way behind each arc
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
    held = np.zeros(shape, dtype=bool)
    held[np.arange(shape[0]), :, np.arange(shape[0])] = True
    quota = even * ways.gbps
    total = np.zeros(len(ways.gbps))
    while order.size:
        load = np.zeros(len(ways.gbps))
        taken = np.zeros(order.size, dtype=bool)
        ready = held[owner[order], share[order], src[order]]
        for i in np.flatnonzero(ready).tolist():
            used = ways.used[src[order[i]], dst[order[i]]]
            # quotas below one share save up for it
            fits = load[used] + 1 <= quota[used] + 1e-9
            saved = (load[used] == 0) & (total[used] + 1 <= quota[used] * (t + 1) + 1e-9)
            if (fits | saved).all():
                load[used] += 1
                taken[i] = True
        if not taken.any():
            first = int(ready.argmax())
            np.add.at(load, ways.used[src[order[first]], dst[order[first]]], 1)
            taken[first] = True
        total += load
        some = order[taken]
        step.ravel()[some] = t
        held[owner[some], share[some], dst[some]] = True
        seconds += float((load / ways.gbps)[:-1].max())
        order, t = order[~taken], t + 1
    return step, seconds


@lru_cache(maxsize=256)
def _searched(wires: str, ranks: int, shares: int, steps: int, floor: float) -> tuple[Hops, float]:
    """All kv hops, and seconds of communication for each GB of KV a rank."""
    machine = Machine(**json.loads(wires))
    if machine.ranks != ranks:
        raise PlanError(f"schedule 'trees': wires describe {machine.ranks} ranks, not {ranks}")
    if ranks == 1:
        return Hops.concat([]), 0.0
    ways, parent, busiest = _grown(wires, shares, floor)
    step, seconds = _place(parent, ways, busiest / steps)
    owner, share, dst = np.nonzero(parent >= 0)
    at = (owner, share, dst)
    hops = Hops(step[at], parent[at], dst, owner, share, np.full_like(dst, KV))
    return hops, seconds / shares


def tree_options(machine: Machine, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Wires of the machine, a number of shares that keeps the search short, and the best steps.

    Raises:
        PlanError: too many ranks.
    """
    n, given = machine.ranks, dict(options or {})
    wires = given.setdefault("wires", _wires(machine))
    shares = given.setdefault("shares", max(1, min(2 * (n - 1), MOST_ARCS // n**3)))
    if "steps" not in given:
        rates = sorted({machine.route_gbps(a, b) for a in range(n) for b in range(n) if a != b})
        best = []
        for floor, steps in product([given["floor"]] if "floor" in given else rates[:4], STEPS):
            made = Trees(n, machine.node_size, wires=wires, shares=shares, steps=steps, floor=floor)
            seconds = made.gbyte_s * TYPICAL_KV_BYTES / 1e9 + made.num_steps() * machine.latency_s
            best.append((seconds, floor, steps))
        _, given["floor"], given["steps"] = min(best, default=(0.0, 0.0, 1))
    return given


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
    """trees grown on what the machine has: dead or slow links, buses, shared NICs, uneven nodes"""

    wires: str = ""
    shares: int = 1
    steps: int = 1
    floor: float = 0.0

    name = "trees"

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
    def options(self) -> dict[str, Any]:
        own = {"wires": self.wires, "shares": self.shares, "steps": self.steps, "floor": self.floor}
        return {**super().options, **own}

    @property
    def num_shares(self) -> int:
        return self.shares

    @cached_property
    def _found(self) -> tuple[Hops, float]:
        """All kv hops, and seconds a GB of KV a rank."""
        return _searched(self.wires, self.ranks, self.shares, self.steps, self.floor)

    @property
    def gbyte_s(self) -> float:
        """Seconds of communication for each GB of KV a rank, without latency."""
        return self._found[1]

    @cached_property
    def limits(self) -> DeclaredLimits:
        hops, n = self._found[0], self.ranks
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
        return self._of(self._found[0], rank)

    def gradients(self, rank: int | None) -> Hops:
        kv = self._found[0]
        last = 2 * (int(kv.step.max()) + 1) if kv.step.size else 0
        back = kv._replace(step=last - kv.step, src=kv.dst, dst=kv.src, kind=kv.kind * 0 + DKV)
        return self._of(back, rank)

    def num_steps(self, *, backward: bool = False) -> int:
        step = self._found[0].step
        return (int(step.max()) + 1) * (1 + backward) + backward if step.size else 0
