"""Machine: ranks, and the capacity-limited resources a transfer between two of them uses.

Rank k * node_size + r is local rank r of node k. A transfer takes the first route whose resources
are all alive:

    link S>D, then port_out S, port_in D      those that the machine has (mesh: MI300X; switch: H100)
    host_out S, buses of the node, host_in D  through the hosts (PCIe), where no such link is alive
    nic_out S, nic_in D                       between nodes; a rank whose NIC is dead uses a node peer's

All other modules ask `resources` and `capacity_gbps`. Not covered: memory limits, lossy links.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, product
from typing import Any, NamedTuple

from ..errors import TopologyError

SCHEMA = 1


class Bus(NamedTuple):
    """A limit, in each node, that transfers through the hosts from local ranks `src` to `dst` share."""

    name: str
    gbps: float
    src: tuple[int, ...]
    dst: tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """Ranks and capacities, in GB/s (1e9 bytes per second) per direction.

    Attributes:
        name, source: what to call it, and where the figures come from.
        node_size: ranks per node; of nodes of unequal size a number that divides each size.
        num_nodes: nodes; of nodes of unequal size their total in units of node_size ranks.
        link_gbps: capacity of the link of each ordered pair of ranks of a node (full mesh); 0: no links.
        port_gbps: capacity of each rank's port to the node's switch, per direction; 0: ports limit nothing.
        nic_gbps: capacity of each NIC, per direction.
        latency_s: time that a step costs besides its bytes.
        host_gbps: capacity of the route from each rank to its host, per direction; 0: no such route.
        nics: NICs per node, each shared by consecutive ranks and named by the first; 0: one per rank.
        nodes: for unequal nodes, the size of each in units of node_size, e.g. (2, 1); (): all are equal.
        buses: `Bus` tuples: limits, shared by several ranks, of routes through the hosts.
        overrides: (resource, GB/s) for each resource that differs; 0: dead. A mapping is accepted too.
        message_s: time that each message costs the rank that posts it.
        kernel_s: time that each kernel call costs besides its work.
        tflops, backward_tflops: rates of the attention kernel; 0: no time; backward 0: as forward.
        memory_gbps: rate at which query and output rows are read, merged and written; 0: no time.
        all_gather: how the library's all-gather runs: "ring", one ring in rank order (Gloo), or "direct".
        message_cpu_s, copy_gbps: time per message, and GB/s at which its bytes are copied, of the processor
            that also computes, at both ends; 0: none, as on GPUs.
        ranks_a_core: ranks that share one processor core, if all rates are those of ranks that all work at
            once; 0: ranks share none.
        burst_bytes: bytes that a resource carries at once after a pause (token bucket); 0: none.
    """

    name: str
    node_size: int
    num_nodes: int = 1
    link_gbps: float = 0.0
    port_gbps: float = 0.0
    nic_gbps: float = 0.0
    latency_s: float = 10e-6
    source: str = ""
    host_gbps: float = 0.0
    nics: int = 0
    nodes: tuple[int, ...] = ()
    buses: tuple[Bus, ...] = ()
    overrides: tuple[tuple[str, float], ...] = ()
    message_s: float = 0.0
    tflops: float = 0.0
    backward_tflops: float = 0.0
    kernel_s: float = 0.0
    memory_gbps: float = 0.0
    all_gather: str = "ring"
    message_cpu_s: float = 0.0
    copy_gbps: float = 0.0
    ranks_a_core: float = 0.0
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        for key in ("node_size", "num_nodes"):
            self._check_int(key, getattr(self, key), 1)
        self._check_int("nics", self.nics, 0)
        for key in (f.name for f in fields(self) if f.type == "float"):
            self._check_rate(key, getattr(self, key))
        if self.all_gather not in (gathers := ("ring", "direct")):
            raise self._error(f"all_gather must be one of {gathers}, got {self.all_gather!r}")
        self._read_tables()
        inside = self.link_gbps or self.port_gbps or self.host_gbps or self.overrides
        if self.node_size > 1 and not inside:
            raise self._error("ranks of a node have no route; give link_gbps or port_gbps")
        if len(self._node_sizes) > 1 and not self.nic_gbps:
            raise self._error("nodes have no route; give nic_gbps")
        if self.nics > (min(self._node_sizes) if self.nic_gbps else 0):
            raise self._error(
                f"nics={self.nics} need nic_gbps, and at least as many ranks per node"
            )
        for name, _ in self.overrides:
            self._known(name)
        self._reachable()

    def _error(self, text: str) -> TopologyError:
        return TopologyError(f"machine {self.name!r}: {text}")

    def _check_int(self, what: str, value: Any, least: int) -> None:
        if not isinstance(value, int) or value < least:
            raise self._error(f"{what} must be a whole number >= {least}, got {value!r}")

    def _check_rate(self, what: str, value: Any) -> None:
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self._error(f"{what} must be a finite number >= 0, got {value!r}")

    def _read_tables(self) -> None:
        """Makes tuples of nodes, buses and overrides, whatever lists a file or a caller gave."""
        try:
            overrides = tuple(sorted((str(k), v) for k, v in dict(self.overrides).items()))
            buses = tuple(Bus(str(n), gbps, tuple(a), tuple(b)) for n, gbps, a, b in self.buses)
        except (TypeError, ValueError) as error:
            raise self._error(f"cannot read overrides or buses: {error}") from None
        for what, rate in (*overrides, *((f"bus {bus.name}", bus.gbps or None) for bus in buses)):
            self._check_rate(what, rate)
        nodes = tuple(self.nodes)
        for size in nodes:
            self._check_int("each of nodes", size, 1)
        if nodes and sum(nodes) != self.num_nodes:
            raise self._error(f"nodes {nodes} must add up to num_nodes, {self.num_nodes}")
        for key, value in (("overrides", overrides), ("buses", buses), ("nodes", nodes)):
            object.__setattr__(self, key, value)

    @cached_property
    def _node_sizes(self) -> tuple[int, ...]:
        return tuple(self.node_size * k for k in self.nodes or (1,) * self.num_nodes)

    @cached_property
    def _home(self) -> tuple[tuple[int, int, int], ...]:
        """For each rank: its node, the node's first rank, the number of the node's ranks."""
        starts = accumulate(self._node_sizes, initial=0)
        rows = [(k, s, m) for k, (s, m) in enumerate(zip(starts, self._node_sizes, strict=False))]
        return tuple(row for row in rows for _ in range(row[2]))

    @cached_property
    def _changed(self) -> dict[str, float]:
        return dict(self.overrides)

    @property
    def ranks(self) -> int:
        """All ranks of the machine."""
        return self.node_size * self.num_nodes

    @property
    def homogeneous(self) -> bool:
        """Whether all ranks, and all nodes, have the same capacities."""
        return not (self.nics or self.nodes or self.buses or self.overrides)

    def node(self, rank: int) -> int:
        """The node a rank is in."""
        return self._home[rank][0]

    def node_peers(self, rank: int) -> range:
        """The ranks of a rank's node, itself among them."""
        _, first, size = self._home[rank]
        return range(first, first + size)

    def _known(self, name: str) -> None:
        """Raise TopologyError where an override names no resource of this machine."""
        kind, _, end = name.rpartition(" ")
        ranks = [int(x) for x in re.findall(r"\d+", end)]
        good = all(r < self.ranks for r in ranks)
        if re.fullmatch(r"link \d+>\d+", name):
            good = good and ranks[1] != ranks[0] and ranks[1] in self.node_peers(ranks[0])
        elif re.fullmatch(r"(port|nic|host)_(in|out) \d+", name):
            good = good and getattr(self, f"{kind.split('_')[0]}_gbps") > 0
            good = good and (kind[0] != "n" or self._nic(ranks[0]) == ranks[0])
        else:
            nodes = range(len(self._node_sizes))
            good = name in {f"bus {b.name} {k}" for b in self.buses for k in nodes}
        if not good:
            raise self._error(f"override of {name!r}, which is no resource of it")

    def _reachable(self) -> None:
        """Raise TopologyError for two ranks without a route.

        Of more than 64 ranks only those are tried that a dead resource is named by. A route is the first
        of a fixed list (see the head of this file), not any path of a graph: no graph search replaces this.
        """
        dead = {
            int(r) for name, gbps in self.overrides if not gbps for r in re.findall(r"\d+", name)
        }
        tried = range(self.ranks) if self.ranks <= 64 else sorted(dead & set(range(self.ranks)))
        for a, b in product(tried, range(self.ranks)) if self.overrides else ():
            if a != b:
                self.resources(a, b), self.resources(b, a)

    def _nic(self, rank: int) -> int:
        """The rank that names this rank's NIC: itself, or the first of those who share it."""
        _, first, size = self._home[rank]
        number = (rank - first) * self.nics // size
        return first + -(-number * size // self.nics) if self.nics else rank

    def _alive(self, names: tuple[str, ...]) -> bool:
        return all(self._changed.get(name, 1) for name in names)

    def _inside(self, src: int, dst: int) -> tuple[str, ...]:
        """The route between two ranks of one node, () if there is none."""
        link, routes = f"link {src}>{dst}", list[tuple[str, ...]]()
        ports = (f"port_out {src}", f"port_in {dst}") if self.port_gbps else ()
        if self.link_gbps or link in self._changed:
            routes.append((link, *ports))
        elif ports:
            routes.append(ports)
        if self.host_gbps:
            node, first, _ = self._home[src]
            shared = (b for b in self.buses if src - first in b.src and dst - first in b.dst)
            buses = (f"bus {b.name} {node}" for b in shared)
            routes.append((f"host_out {src}", *buses, f"host_in {dst}"))
        return next((route for route in routes if self._alive(route)), ())

    def _outside(self, rank: int, side: str) -> tuple[str, ...]:
        """The route between a rank and its NIC (a node peer's if its own is dead); () if there is none."""
        peers = self.node_peers(rank)
        others = (*range(rank, peers.stop), *range(peers.start, rank))
        for x in others if self.nic_gbps else ():
            route: tuple[str, ...] = (f"host_{side} {rank}",) if self.host_gbps else ()
            if x != rank and not route:
                route = self._inside(rank, x) if side == "out" else self._inside(x, rank)
                if not route:
                    continue
            nic = (f"nic_{side} {self._nic(x)}",)
            route = route + nic if side == "out" else nic + route
            if self._alive(route):
                return route
        return ()

    def resources(self, src: int, dst: int) -> tuple[str, ...]:
        """The route of a transfer src -> dst: names of the resources that it uses, in this order.

        Raises:
            TopologyError: no route between the two is alive.
        """
        same = self.node(src) == self.node(dst)
        route = self._inside(src, dst) if same else ()
        if not route:
            out, into = self._outside(src, "out"), self._outside(dst, "in")
            route = out + into if out and into else ()
        if not route:
            raise self._error(f"no route from rank {src} to rank {dst} is alive")
        return route

    def capacity_gbps(self, resource: str) -> float:
        """Capacity, in GB/s, of a resource named by `resources`."""
        if resource in self._changed:
            return self._changed[resource]
        kind, _, rest = resource.partition(" ")
        if kind == "bus":
            return next(b.gbps for b in self.buses if b.name == rest.rpartition(" ")[0])
        return getattr(self, f"{kind.partition('_')[0]}_gbps")

    def route_gbps(self, src: int, dst: int) -> float:
        """GB/s of a transfer src -> dst that shares its resources with no other."""
        return min(map(self.capacity_gbps, self.resources(src, dst)))

    def degraded(self, overrides: Mapping[str, float], name: str | None = None) -> Machine:
        """This machine with other capacities of some resources, in GB/s; 0: dead.

        Raises:
            TopologyError: no such resource, or two ranks are left without a route.

        >>> from tasp_core import machine
        >>> machine("h100x2").degraded({"nic_out 3": 0}).resources(3, 8)     # by the NIC of rank 4
        ('port_out 3', 'port_in 4', 'nic_out 4', 'nic_in 8')
        """
        changed = tuple({**self._changed, **overrides}.items())
        return replace(self, name=name or f"{self.name} degraded", overrides=changed)

    def to_json(self) -> str:
        """JSON text that `machine(path)` and `Machine.from_json` read back."""
        return json.dumps({"schema": SCHEMA, **asdict(self), "overrides": self._changed}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Read `to_json` text.

        Raises:
            TopologyError: not JSON, another schema, unknown or missing keys, impossible values.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise TopologyError(f"machine file is not JSON: {error}") from None
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise TopologyError(f'machine file must be an object with "schema": {SCHEMA}')
        known = {f.name for f in fields(cls)}
        unknown, missing = sorted(set(data) - known), sorted({"name", "node_size"} - set(data))
        if unknown or missing:
            raise TopologyError(
                f"machine file: unknown keys {unknown}, missing keys {missing}; known are {sorted(known)}"
            )
        return cls(**data)
