"""What `nvidia-smi topo -m` and `rocm-smi --showtopo` print on a node -> a Machine of one node.

These texts say which device reaches which and how, but not how fast. Unless `rates` says otherwise, rates
are those of one NVLink (3 or 4), one xGMI link of an MI300X, one PCIe 4 x16 slot and one 400 Gb/s NIC.

    NV#, XGMI (one hop)   links of the pair; a port per rank where the pairs' links are more than a GPU has
    PIX PXB PHB NODE      the route through the host, PCIE too; GPUs of one PCIe switch share its uplink
    SYS                   the same, and all pairs of ranks of two sockets share the bus between these

Not covered: which NIC is nearest to which GPU (NICs are shared evenly, in order).
"""

from __future__ import annotations

import re
from itertools import permutations
from typing import NamedTuple

from ..errors import TopologyError
from .machine import Bus, Machine

MOST_NVLINKS = 18  # of one GPU; pairs with more in all are behind a switch
HOST = ("PIX", "PXB", "PHB", "NODE", "SYS")
CELL = re.compile(rf"X|NV\d+|{'|'.join(HOST)}")
AMD = re.compile(r"={3,}\s*(.*?)\s*={3,}$")
AMD_CELLS = {"Link Type": re.compile(r"XGMI|PCIE|0"), "Weight": re.compile(r"\d+")}
AFFINITY = "CPU|NUMA|GPU NUMA"
HEADER = re.compile(r"\s*GPU0(\s+(GPU1|NIC0|mlx|CPU)|$)")


class Rates(NamedTuple):
    """What the texts do not say, in GB/s per direction."""

    nvlink_gbps: float = 25.0
    xgmi_gbps: float = 64.0
    host_gbps: float = 25.0
    nic_gbps: float = 50.0


def plain_lines(text: str) -> list[str]:
    """Lines without colour codes and trailing blanks."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).splitlines()]


def is_topology(text: str) -> bool:
    """Whether a text looks like one of the two tools' output."""
    return any(re.match(r"\s*GPU\d+\b", line) for line in plain_lines(text))


def parse_topology(text: str, name: str = "node", *, rates: Rates = Rates()) -> Machine:  # noqa: B008
    """The Machine a topology tool's output describes.

    Args:
        text: as printed; colour codes, ragged blanks and other lines around it are fine.

    Raises:
        TopologyError: no table of GPUs, or the line that cannot be read.

    >>> pair = parse_topology("GPU0 GPU1 CPU Affinity\\nGPU0 X NV4 0-9\\nGPU1 NV4 X 0-9")
    >>> pair.ranks, pair.resources(0, 1), pair.capacity_gbps("link 0>1")
    (2, ('link 0>1',), 100.0)
    """
    lines = plain_lines(text)
    if any(AMD.match(line) for line in lines):
        kind = _amd(lines)
        return _build(name, kind, 0, rates, "rocm-smi --showtopo")
    kind, nics = _nvidia(lines)
    return _build(name, kind, nics, rates, "nvidia-smi topo -m")


def _wrong(lines: list[str], at: int, why: str) -> TopologyError:
    return TopologyError(f"topology text, line {at + 1}: {why}: {lines[at].strip()!r}")


def _table(
    lines: list[str], start: int, cell: re.Pattern[str]
) -> tuple[list[list[str]], list[str]]:
    """Cells of the rows below the header in line `start`, and the header's devices."""
    devices = re.findall(r"GPU\d+|NIC\d+|\bmlx\d_\w+", re.split(AFFINITY, lines[start])[0])
    rows: list[list[str]] = []
    for at in range(start + 1, len(lines)):
        if len(rows) == len(devices):
            break
        if not lines[at].strip():
            continue
        first, *cells = lines[at].split()
        if first != devices[len(rows)]:
            raise _wrong(lines, at, f"expected the row of {devices[len(rows)]}")
        cells = cells[: len(devices)]
        if bad := next((text for text in cells if not cell.fullmatch(text)), None):
            raise _wrong(lines, at, f"cannot read cell {bad!r}")
        if len(cells) < len(devices):
            raise _wrong(lines, at, f"{len(cells)} cells of {len(devices)}")
        rows.append(cells)
    if len(rows) < len(devices):
        raise _wrong(lines, start, f"the table of {len(devices)} devices has {len(rows)} rows")
    return rows, devices


def _header(lines: list[str]) -> int:
    """The line of the first table's header."""
    header = next((at for at, line in enumerate(lines) if HEADER.match(line)), None)
    if header is None:
        raise TopologyError(
            "topology text has no table of GPUs (a line that begins with GPU0); "
            "give the whole output of nvidia-smi topo -m or rocm-smi --showtopo"
        )
    return header


def _nvidia(lines: list[str]) -> tuple[list[list[str]], int]:
    """Kinds between GPUs, and the NICs that can be used by them."""
    cells, devices = _table(lines, _header(lines), CELL)
    gpus = sum(d.startswith("GPU") for d in devices)
    to_nics = [row[gpus:] for row in cells[:gpus]]
    near = [any(row[i] in ("PIX", "PXB") for row in to_nics) for i in range(len(devices) - gpus)]
    return [row[:gpus] for row in cells[:gpus]], sum(near) or len(near)


def _amd(lines: list[str]) -> list[list[str]]:
    """Kinds between GPUs in nvidia-smi's words: XGMI of one hop, else the route through the hosts."""
    tables: dict[str, list[list[str]]] = {}
    numa: dict[int, str] = {}
    section = ""
    for at, line in enumerate(lines):
        if title := AMD.match(line):
            section = title[1].split(" between")[0]
        elif gpu := re.match(r"GPU\[(\d+)\].*Numa Node:\s*(-?\d+)", line):
            numa[int(gpu[1])] = gpu[2]
        elif HEADER.match(line) and section in AMD_CELLS:
            tables[section] = _table(lines, at, AMD_CELLS[section])[0]
    if "Link Type" not in tables:
        raise TopologyError(
            'topology text has no section "Link Type between two GPUs"; give the whole output of '
            "rocm-smi --showtopo"
        )
    kinds, weight = tables["Link Type"], tables.get("Weight")
    least = min((int(w) for row in weight or [] for w in row if w != "0"), default=0)

    def kind(a: int, b: int) -> str:
        # hops are printed as 1 even for two of them, but each adds the same weight
        if kinds[a][b] == "XGMI" and (weight is None or int(weight[a][b]) == least):
            return "XGMI"
        return "X" if a == b else "SYS" if numa.get(a) != numa.get(b) else "NODE"

    return [[kind(a, b) for b in range(len(kinds))] for a in range(len(kinds))]


def _groups(kinds: list[list[str]], near: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Groups of GPUs that reach each other by one of the kinds of connection, in order."""
    everyone = range(len(kinds))
    return sorted({tuple(b for b in everyone if a == b or kinds[a][b] in near) for a in everyone})


def _buses(kinds: list[list[str]], gbps: float) -> list[Bus]:
    """Uplinks of PCIe switches with several GPUs, and the buses between sockets."""
    buses = []
    for i, group in enumerate(_groups(kinds, HOST[:2])):
        rest = tuple(r for r in range(len(kinds)) if r not in group)
        if len(group) > 1 and rest:
            buses += [Bus(f"up{i}", gbps, group, rest), Bus(f"down{i}", gbps, rest, group)]
    sockets = _groups(kinds, HOST[:4])
    for (i, a), (j, b) in permutations(enumerate(sockets), 2):
        if kinds[a[0]][b[0]] == "SYS" and len(a) * len(b) > 1:
            buses.append(Bus(f"socket{i}>{j}", gbps, a, b))
    return buses


def _build(name: str, kinds: list[list[str]], nics: int, rates: Rates, tool: str) -> Machine:
    n = len(kinds)
    per = {"XGMI": rates.xgmi_gbps}
    per |= {f"NV{k}": k * rates.nvlink_gbps for k in range(1, MOST_NVLINKS + 1)}
    speeds = {(a, b): per.get(kinds[a][b], 0.0) for a, b in permutations(range(n), 2)}
    links = max((sum(int(x[2:]) for x in row if x[:2] == "NV") for row in kinds), default=0)
    equal, rate = len(set(speeds.values())) < 2, next(iter(speeds.values()), 0.0)
    switched = equal and links > MOST_NVLINKS
    overrides = {} if equal else {f"link {a}>{b}": x for (a, b), x in speeds.items() if x}
    return Machine(
        name,
        n,
        link_gbps=rate if equal and not switched else 0.0,
        port_gbps=rate if switched else 0.0,
        host_gbps=0.0 if all(speeds.values()) else rates.host_gbps,
        nic_gbps=rates.nic_gbps,
        nics=nics if nics < n else 0,
        buses=tuple(_buses(kinds, rates.host_gbps)),
        overrides=tuple(overrides.items()),
        source=f"{tool}; rates are nominal",
    )
