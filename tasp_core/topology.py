"""Machine: ranks, and the capacity-limited resources a transfer between two of them uses.

Inside a node either every ordered pair has a link of its own (full mesh: MI300X) or every rank has
an out-port and an in-port that all its peers share (NVSwitch: H100). Between nodes every rank has
a NIC with an out and an in side. Rank k * node_size + r is local rank r of node k.

    >>> machine("h100x2").num_nodes, machine("mesh4x2").ranks
    (2, 8)

Not covered: NICs shared by several ranks, nodes of different sizes, host memory limits.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from .errors import TopologyError

SCHEMA = 1


@dataclass(frozen=True)
class Machine:
    """Ranks and capacities, in GB/s (1e9 bytes a second) for each direction.

    Attributes:
        name: what to call it.
        node_size: ranks a node, m.
        num_nodes: nodes, u.
        link_gbps: capacity of each ordered pair inside a node (full mesh); 0: no such links.
        port_gbps: capacity of each rank's in- and out-port inside a node; 0: not limited by ports.
        nic_gbps: capacity of each rank's way out of, and into, its node.
        latency_s: time a step costs besides its bytes.
        source: where the figures come from.
    """

    name: str
    node_size: int
    num_nodes: int = 1
    link_gbps: float = 0.0
    port_gbps: float = 0.0
    nic_gbps: float = 0.0
    latency_s: float = 10e-6
    source: str = ""

    def __post_init__(self) -> None:
        for key in ("node_size", "num_nodes"):
            value = getattr(self, key)
            if not isinstance(value, int) or value < 1:
                raise TopologyError(
                    f"machine {self.name!r}: {key} must be a whole number >= 1, got {value!r}"
                )
        for key in ("link_gbps", "port_gbps", "nic_gbps", "latency_s"):
            value = getattr(self, key)
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise TopologyError(
                    f"machine {self.name!r}: {key} must be a finite number >= 0, got {value!r}"
                )
        if self.node_size > 1 and not (self.link_gbps or self.port_gbps):
            raise TopologyError(
                f"machine {self.name!r}: ranks of a node have no route; give link_gbps or port_gbps"
            )
        if self.num_nodes > 1 and not self.nic_gbps:
            raise TopologyError(f"machine {self.name!r}: nodes have no route; give nic_gbps")

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.node_size * self.num_nodes

    def resources(self, src: int, dst: int) -> tuple[str, ...]:
        """Names of the resources a transfer src -> dst uses."""
        if src // self.node_size != dst // self.node_size:
            return (f"nic_out {src}", f"nic_in {dst}")
        link = (f"link {src}>{dst}",) if self.link_gbps else ()
        return link + ((f"port_out {src}", f"port_in {dst}") if self.port_gbps else ())

    def capacity_gbps(self, resource: str) -> float:
        """Capacity of a resource named by `resources`."""
        return {"nic": self.nic_gbps, "lin": self.link_gbps, "por": self.port_gbps}[resource[:3]]

    def to_json(self) -> str:
        """JSON text that `machine(path)` and `Machine.from_json` read back."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

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


MESH = Machine("mesh", 1, link_gbps=64.3, nic_gbps=50.0, source="64.3:50 as H100 pair : NIC")
PRESETS = {
    "mi300x": Machine(
        "mi300x", 8, link_gbps=64.0, nic_gbps=50.0, source="7 xGMI links, vendor peak"
    ),
    "h100": Machine("h100", 8, port_gbps=450.0, nic_gbps=50.0, source="NVLink 4 and 400 Gb/s NICs"),
}


def machine(name: str | Path) -> Machine:
    """A preset ("mi300x", "h100", "meshN"), a preset on U nodes ("h100x2", "mesh4x2"), or a JSON file.

    Raises:
        TopologyError: neither a known name nor a readable machine file.
    """
    match = re.fullmatch(r"(mi300x|h100|mesh([1-9]\d*))(?:x([1-9]\d*))?", str(name))
    if match:
        base = PRESETS.get(match[1]) or replace(MESH, name=match[1], node_size=int(match[2]))
        return replace(base, name=str(name), num_nodes=int(match[3] or 1))
    path = Path(name)
    if not path.is_file():
        raise TopologyError(
            f"no machine {str(name)!r}: known are {', '.join(PRESETS)}, meshN, each with xU for U nodes "
            "(h100x2, mesh4x2), or the path of a machine's JSON file"
        )
    return Machine.from_json(path.read_text())


def cut_bound(machine: Machine, bytes_per_rank: float) -> float:
    """Least seconds in which every rank can take in every other rank's keys and values.

    For each set of ranks, what must enter it over what can enter it a second; the largest of these
    over single ranks and whole nodes, which on these symmetric machines is the largest of all.

    Args:
        bytes_per_rank: bytes of one rank's keys and values.

    >>> round(cut_bound(machine("mesh8x2"), 1e9), 4)
    0.03
    """
    m, u = machine.node_size, machine.num_nodes
    inside = [x for x in ((m - 1) * machine.link_gbps, machine.port_gbps) if x]
    into_rank = (min(inside) if m > 1 else 0.0) + (machine.nic_gbps if u > 1 else 0.0)
    into_node = m * machine.nic_gbps
    rank_s = (m * u - 1) / into_rank if into_rank else 0.0
    node_s = (u - 1) * m / into_node if u > 1 else 0.0
    return max(rank_s, node_s) * bytes_per_rank / 1e9
