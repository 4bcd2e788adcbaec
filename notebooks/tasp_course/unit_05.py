"""Unit 5, machines are graphs: checks of machines, loads and link matrices."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import tasp_core as tasp
from tasp_core import Machine
from tasp_core.machines.topology_text import parse_topology
from tasp_core.schedules import Hops

from .verdict import exercise, expect, recap

NVLINK_GBPS = 25.0
TOPOLOGIES = Path(__file__).parents[2] / "tests" / "topo"


def ends(line: str) -> tuple[int, int]:
    """Sender and receiver of a hop in text form.

    >>> ends("t3 2>5 kv1.4")
    (2, 5)
    """
    hop = Hops.parse([line])
    return int(hop.src[0]), int(hop.dst[0])


@exercise
def check_machines(answer: Any) -> None:
    """Three machines, by the routes between their ranks."""
    pairs: dict[str, dict[tuple[int, int], tuple[tuple[str, ...], int]]] = {
        "mesh": {(0, 3): (("link 0>3",), 50), (2, 1): (("link 2>1",), 50)},
        "switch": {(0, 7): (("port_out 0", "port_in 7"), 450)},
        "cluster": {(4, 6): (("link 4>6",), 64), (1, 6): (("nic_out 1", "nic_in 6"), 25)},
    }
    sizes = {"mesh": (4, 1), "switch": (8, 1), "cluster": (4, 2)}
    for name, routes in pairs.items():
        made = answer[name]
        expect(isinstance(made, Machine), f"{name}: a tasp.Machine is asked for")
        size = (made.node_size, made.num_nodes)
        expect(
            size == sizes[name],
            f"{name}: this machine has {size[1]} node(s) of {size[0]} ranks, which is not asked for",
        )
        for (src, dst), (route, gbps) in routes.items():
            used = made.resources(src, dst)
            expect(
                used == route, f"{name}: a message {src}>{dst} uses {used}, it should use {route}"
            )
            rate = made.route_gbps(src, dst)
            expect(rate == gbps, f"{name}: a message {src}>{dst} has {rate} GB/s, not {gbps}")


@exercise
def check_load(answer: Any) -> None:
    """Shares that each resource carries, on a mesh, a switch and two nodes."""
    for name, schedule in (
        ("mesh5", "tasp"),
        ("h100", "ring"),
        ("mesh4x2", "wave"),
        ("h100x2", "ring"),
    ):
        where = tasp.machine(name)
        lines = tasp.plan([64], where.ranks, schedule=schedule, machine=where).hops().lines()
        right = Counter(r for line in lines for r in where.resources(*ends(line)))
        load, what = answer(lines, where), f"{schedule} on {name}"
        expect(isinstance(load, dict), f"{what}: return a dict, not {load!r:.60}")
        for resource in sorted(right):
            got = load.get(resource, 0)
            expect(
                got == right[resource],
                f"{what}: {resource} carries {right[resource]} shares, not {got}",
            )
        extra = sorted(set(load) - set(right))
        expect(not extra, f"{what}: {extra and extra[0]} carries nothing; leave it out")


@exercise
def check_nvlinks(answer: Any) -> None:
    """NVLinks of each pair, in three outputs of nvidia-smi topo -m."""
    for name, gpus in (("v100_cube", 8), ("a100_nv4", 4), ("h100_nvswitch", 8)):
        text = (TOPOLOGIES / f"{name}.txt").read_text()
        node = parse_topology(text)
        got = [list(row) for row in answer(text)]
        size = [len(row) for row in got]
        expect(size == [gpus] * gpus, f"{name}: return {gpus} lists of {gpus} numbers")
        for a in range(gpus):
            for b in range(gpus):
                right = 0 if a == b else _nvlinks(node, a, b)
                hint = f"{name}: between GPU{a} and GPU{b} there are {right} NVLinks, not {got[a][b]!r}"
                expect(got[a][b] == right, hint)


def _nvlinks(node: Machine, a: int, b: int) -> int:
    if node.resources(a, b)[0].startswith("host"):
        return 0
    return round(node.route_gbps(a, b) / NVLINK_GBPS)


check_recap = recap(
    (56, "each of the ranks has a link to every other one"),
    (8, "each rank sends to one other rank"),
    (150, "50 GB/s from each of the three others"),
    ("nic", "rank 9 is in the second node"),
    ("switch", "on a switch, a transfer to one peer can use the full bandwidth of the port"),
)
