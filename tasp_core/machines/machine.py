"""Machine: ranks, and the capacity-limited resources a transfer between two of them uses.

Rank k * node_size + r is local rank r of node k. A transfer takes the first way all of which is alive:

    link S>D, then port_out S, port_in D      of these what the machine has (mesh: MI300X; switch: H100)
    host_out S, buses of the node, host_in D  through the hosts (PCIe), where there is no such link
    nic_out S, nic_in D                       between nodes; a rank whose NIC is dead uses a peer's

Everything else asks `resources` and `capacity_gbps`. Not covered: memory limits, links with loss.
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
    """What transfers through the hosts from a local rank in `src` to one in `dst` share, in each node."""

    name: str
    gbps: float
    src: tuple[int, ...]
    dst: tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """Ranks and capacities, in GB/s (1e9 bytes a second) for each direction.

    Attributes:
        name, source: what to call it, and where the figures come from.
        node_size, num_nodes: ranks a node, m (of unequal nodes a number that divides each); nodes, u.
        link_gbps: capacity of each ordered pair inside a node (full mesh); 0: no such links.
        port_gbps: capacity of each rank's in- and out-port inside a node; 0: not limited by ports.
        nic_gbps: capacity of each rank's (or each shared) way out of, and into, its node.
        latency_s: time a step costs besides its bytes.
        host_gbps: capacity of each rank's way to its host, in and out; 0: not limited, no such way.
        nics: NICs a node, each shared by consecutive ranks and named by the first; 0: one a rank.
        nodes: how many runs of node_size ranks make each node, e.g. (2, 1); (): one each.
        buses: `Bus` rows: limits of the ways through hosts that several ranks share.
        overrides: (resource, GB/s) where it differs; 0: dead. A mapping is taken too.
        message_s, kernel_s: time each message costs the rank that posts it, and each kernel call.
        tflops, backward_tflops: attention kernel rates (0: no time; backward 0: as forward).
        memory_gbps: rate at which query and output rows are read, merged and written; 0: no time.
        all_gather: how the library's all-gather runs: one "ring" in rank order (Gloo), or "direct".
        message_cpu_s, copy_gbps: what a message and its bytes cost, at either end, of the processor
            that computes, too; 0: nothing, as on GPUs.
        ranks_a_core: ranks that share a core of one host, all rates being of all at once; 0: none do.
        burst_bytes: what a resource carries at once after a pause (token buckets); 0: nothing.
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
            self._whole(key, getattr(self, key), 1)
        self._whole("nics", self.nics, 0)
        for key in (f.name for f in fields(self) if f.type == "float"):
            self._rate(key, getattr(self, key))
        if self.all_gather not in (gathers := ("ring", "direct")):
            raise self._error(f"all_gather must be one of {gathers}, got {self.all_gather!r}")
        self._read_tables()
        inside = self.link_gbps or self.port_gbps or self.host_gbps or self.overrides
        if self.node_size > 1 and not inside:
            raise self._error("ranks of a node have no route; give link_gbps or port_gbps")
        if len(self._sizes) > 1 and not self.nic_gbps:
            raise self._error("nodes have no route; give nic_gbps")
        if self.nics > (min(self._sizes) if self.nic_gbps else 0):
            raise self._error(f"nics={self.nics} need nic_gbps, and as many ranks a node or more")
        for name, _ in self.overrides:
            self._known(name)
        self._reachable()

    def _error(self, text: str) -> TopologyError:
        return TopologyError(f"machine {self.name!r}: {text}")

    def _whole(self, what: str, value: Any, least: int) -> None:
        if not isinstance(value, int) or value < least:
            raise self._error(f"{what} must be a whole number >= {least}, got {value!r}")

    def _rate(self, what: str, value: Any) -> None:
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self._error(f"{what} must be a finite number >= 0, got {value!r}")

    def _read_tables(self) -> None:
        """Nodes, buses and overrides as tuples, whatever lists a file or a caller gave."""
        try:
            overrides = tuple(sorted((str(k), v) for k, v in dict(self.overrides).items()))
            buses = tuple(Bus(str(n), gbps, tuple(a), tuple(b)) for n, gbps, a, b in self.buses)
        except (TypeError, ValueError) as error:
            raise self._error(f"cannot read overrides or buses: {error}") from None
        for what, rate in (*overrides, *((f"bus {bus.name}", bus.gbps or None) for bus in buses)):
            self._rate(what, rate)
        nodes = tuple(self.nodes)
        for size in nodes:
            self._whole("each of nodes", size, 1)
        if nodes and sum(nodes) != self.num_nodes:
            raise self._error(f"nodes {nodes} must add up to num_nodes, {self.num_nodes}")
        for key, value in (("overrides", overrides), ("buses", buses), ("nodes", nodes)):
            object.__setattr__(self, key, value)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(self.node_size * k for k in self.nodes or (1,) * self.num_nodes)

    @cached_property
    def _home(self) -> tuple[tuple[int, int, int], ...]:
        """Of each rank: its node, the node's first rank, the node's ranks."""
        starts = accumulate(self._sizes, initial=0)
        rows = [(k, s, m) for k, (s, m) in enumerate(zip(starts, self._sizes, strict=False))]
        return tuple(row for row in rows for _ in range(row[2]))

    @cached_property
    def _changed(self) -> dict[str, float]:
        return dict(self.overrides)

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.node_size * self.num_nodes

    @property
    def homogeneous(self) -> bool:
        """Whether all ranks, and all nodes, are alike."""
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
            nodes = range(len(self._sizes))
            good = name in {f"bus {b.name} {k}" for b in self.buses for k in nodes}
        if not good:
            raise self._error(f"override of {name!r}, which is no resource of it")

    def _reachable(self) -> None:
        """Raise TopologyError for two ranks without a route; of many ranks, try those named as dead."""
        dead = {
            int(r) for name, gbps in self.overrides if not gbps for r in re.findall(r"\d+", name)
        }
        some = range(self.ranks) if self.ranks <= 64 else sorted(dead & set(range(self.ranks)))
        for a, b in product(some, range(self.ranks)) if self.overrides else ():
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
        """The way between two ranks of one node, () if there is none."""
        link, ways = f"link {src}>{dst}", []
        ports = (f"port_out {src}", f"port_in {dst}") if self.port_gbps else ()
        if self.link_gbps or link in self._changed:
            ways.append((link, *ports))
        elif ports:
            ways.append(ports)
        if self.host_gbps:
            node, first, _ = self._home[src]
            shared = (b for b in self.buses if src - first in b.src and dst - first in b.dst)
            buses = (f"bus {b.name} {node}" for b in shared)
            ways.append((f"host_out {src}", *buses, f"host_in {dst}"))
        return next((way for way in ways if self._alive(way)), ())

    def _outside(self, rank: int, side: str) -> tuple[str, ...]:
        """The way between a rank and its NIC, or a peer's where its own is dead; () if there is none."""
        peers = self.node_peers(rank)
        others = (*range(rank, peers.stop), *range(peers.start, rank))
        for x in others if self.nic_gbps else ():
            way: tuple[str, ...] = (f"host_{side} {rank}",) if self.host_gbps else ()
            if x != rank and not way:
                way = self._inside(rank, x) if side == "out" else self._inside(x, rank)
                if not way:
                    continue
            nic = (f"nic_{side} {self._nic(x)}",)
            way = way + nic if side == "out" else nic + way
            if self._alive(way):
                return way
        return ()

    def resources(self, src: int, dst: int) -> tuple[str, ...]:
        """Names of the resources a transfer src -> dst uses, in this order.

        Raises:
            TopologyError: no way between the two is alive.
        """
        same = self.node(src) == self.node(dst)
        way = self._inside(src, dst) if same else ()
        if not way:
            out, into = self._outside(src, "out"), self._outside(dst, "in")
            way = out + into if out and into else ()
        if not way:
            raise self._error(f"no route from rank {src} to rank {dst} is alive")
        return way

    def capacity_gbps(self, resource: str) -> float:
        """Capacity of a resource named by `resources`."""
        if resource in self._changed:
            return self._changed[resource]
        kind, _, rest = resource.partition(" ")
        if kind == "bus":
            return next(b.gbps for b in self.buses if b.name == rest.rpartition(" ")[0])
        return getattr(self, f"{kind.partition('_')[0]}_gbps")

    def route_gbps(self, src: int, dst: int) -> float:
        """What a transfer src -> dst can have at most, alone."""
        return min(map(self.capacity_gbps, self.resources(src, dst)))

    def degraded(self, overrides: Mapping[str, float], name: str | None = None) -> Machine:
        """This machine with some resources slower, or dead (0).

        Raises:
            TopologyError: no such resource, or two ranks are left without a route.

        >>> from tasp_core import machine
        >>> machine("h100x2").degraded({"nic_out 3": 0}).resources(3, 8)     # by a peer's NIC
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
