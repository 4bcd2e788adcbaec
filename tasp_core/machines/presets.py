"""Machines by name or file: presets with their sources, machine files, output of topology tools.

    >>> machine("h100x2").num_nodes, machine("mesh4x2").ranks
    (2, 8)
    >>> machine("mesh4").degraded({"link 0>1": 0}).resources(0, 1)      # by the NICs instead
    ('nic_out 0', 'nic_in 1')

Latencies and message costs of presets are round figures; `calibrate` measures a real cluster.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import TopologyError
from .machine import Bus, Machine
from .topology_text import is_topology, parse_topology

__all__ = ["MESH", "PRESETS", "Bus", "Machine", "as_machine", "machine"]

# Kernels at head dim 128, bf16: FlashAttention-3's paper gives 648 TFLOP/s forward and about 550
# backward on an H100, FlashAttention-2's 225 and 190 on an A100; MI300X: a third of its 1,307 peak.
H100_KERNEL: dict[str, Any] = {
    "tflops": 640.0,
    "backward_tflops": 550.0,
    "kernel_s": 5e-6,
    "memory_gbps": 2700.0,
}
MESH = Machine(
    "mesh", 1, link_gbps=64.3, nic_gbps=50.0, source="64.3:50 as H100 pair : NIC", **H100_KERNEL
)
PRESETS = {
    "mi300x": Machine(
        "mi300x",
        8,
        link_gbps=64.0,
        nic_gbps=50.0,
        source="7 xGMI links, vendor peak",
        tflops=450.0,
        backward_tflops=350.0,
        kernel_s=5e-6,
        memory_gbps=4200.0,
        message_s=1e-6,
        all_gather="direct",
    ),
    "h100": Machine(
        "h100",
        8,
        port_gbps=450.0,
        nic_gbps=50.0,
        source="NVLink 4 and 400 Gb/s NICs",
        message_s=1e-6,
        all_gather="direct",
        **H100_KERNEL,
    ),
    "a100_pcie": Machine(
        "a100_pcie",
        8,
        host_gbps=25.0,
        nic_gbps=25.0,
        nics=2,
        message_s=1e-6,
        source="PCIe 4 x16 as commonly reached, two sockets of four GPUs and a 200 Gb/s NIC each",
        buses=(
            Bus("socket_out", 30.0, (0, 1, 2, 3), (4, 5, 6, 7)),
            Bus("socket_in", 30.0, (4, 5, 6, 7), (0, 1, 2, 3)),
        ),
        tflops=220.0,
        backward_tflops=190.0,
        kernel_s=5e-6,
        memory_gbps=1500.0,
    ),
}


def machine(name: str | Path) -> Machine:
    """A preset, a preset on U nodes ("h100x2", "mesh4x2"), or a file.

    Args:
        name: one of PRESETS (such as "h100"), or meshN, each with xU for U nodes; or the path of a
            machine's JSON file, or of what `nvidia-smi topo -m` or `rocm-smi --showtopo` printed on a node.

    Raises:
        TopologyError: neither a known name nor a readable file, or a file with a line that cannot be read;
            the error names the line.

    >>> machine("mi300x").link_gbps, machine("h100x2").ranks
    (64.0, 16)
    """
    match = re.fullmatch(rf"({'|'.join(PRESETS)}|mesh([1-9]\d*))(?:x([1-9]\d*))?", str(name))
    if match:
        base = PRESETS.get(match[1]) or replace(MESH, name=match[1], node_size=int(match[2]))
        return replace(base, name=str(name), num_nodes=int(match[3] or 1))
    path = Path(name)
    if not path.is_file():
        raise TopologyError(
            f"no machine {str(name)!r}: known are {', '.join(PRESETS)}, meshN, each with xU for U nodes "
            "(h100x2, mesh4x2), or the path of a machine's JSON file or of a topology tool's output"
        )
    text = path.read_text()
    return parse_topology(text, path.stem) if is_topology(text) else Machine.from_json(text)


def as_machine(named: Machine | str | Path) -> Machine:
    """A Machine as it is; a name or a path as `machine` reads it.

    Raises:
        TopologyError: neither a known name nor a readable file.
    """
    return named if isinstance(named, Machine) else machine(named)
