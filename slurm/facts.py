"""One node's part of the rank -> node -> device map, and its topology; common.sh runs it once per node.

facts.py DEVICE RANKS FOLDER prints a line for each of the node's ranks, as torch numbers its devices:

    rank 9 -> node n1 -> cuda:1 NVIDIA H100 80GB HBM3 1f2e3d4c-...

and writes the vendor tool's table of links to FOLDER/NODE.txt. Exit 1 where there are too few devices.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOPOLOGY = {"cuda": ("nvidia-smi", "topo", "-m"), "rocm": ("rocm-smi", "--showtopo")}


def devices(kind: str, ranks: int) -> list[str]:
    """The name of each rank's device.

    Raises:
        ValueError: torch sees fewer devices.
    """
    if kind == "cpu":
        return ["cpu"] * ranks
    import torch

    count = torch.cuda.device_count()
    if count < ranks:
        raise ValueError(
            f"torch {torch.__version__} sees {count} {kind} devices, {ranks} ranks need one each"
        )
    properties = [torch.cuda.get_device_properties(i) for i in range(ranks)]
    return [f"cuda:{i} {p.name} {p.uuid}" for i, p in enumerate(properties)]


def topology(kind: str) -> str:
    """What the vendor's tool prints, or why it prints nothing."""
    if kind not in TOPOLOGY:
        return f"no topology tool for {kind}\n"
    try:
        process = subprocess.run(
            TOPOLOGY[kind], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(TOPOLOGY[kind])}: {error}\n"
    return process.stdout + process.stderr


def main(kind: str, ranks: int, folder: Path) -> None:
    """Print the lines, write the file."""
    node, first = os.environ["SLURMD_NODENAME"], int(os.environ["SLURM_NODEID"]) * ranks
    (folder / f"{node}.txt").write_text(topology(kind))
    try:
        names = devices(kind, ranks)
    except ValueError as error:
        sys.exit(f"tasp: node {node}: {error}")
    for i, name in enumerate(names):
        print(f"rank {first + i} -> node {node} -> {name}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
