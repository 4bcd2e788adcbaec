"""Measure a running group into a Machine: links, ports, NICs, latency, messages, kernels.

    python -m tasp_core calibrate --ranks 4 --out results/machine.json         # local gloo ranks
    torchrun --nproc-per-node 8 -m tasp_core calibrate --out machine.json      # NCCL, RCCL or gloo

Each way is measured alone, then together with the others that may share a port or a NIC with it.
What is more than 30 % slower than its like becomes an override. Every sample is the slowest rank's.
Not covered: ways through hosts, NICs shared by ranks; write those into the file by hand.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import TopologyError
from ..topology import Machine
from ..transport import backend_of
from .pass_rates import kernels, processor
from .ranks import on_ranks
from .timing import Bench, Pairs

SLOW, BUSY = 0.7, 4
MOST_PAIRS = 64


def _ways(bench: Bench, inside: bool, node_size: int) -> Pairs:
    """Ordered pairs within nodes, or between them; of many, a regular choice."""
    n = bench.ranks
    pairs = [
        (a, b) for a in range(n) for b in range(n)
        if a != b and (a // node_size == b // node_size) == inside
    ]  # fmt: skip
    return pairs[:: -(-len(pairs) // MOST_PAIRS)] if pairs else []


def _rates(bench: Bench, node_size: int, inside: bool) -> dict[str, float]:
    """Rates of single ways by "a>b"."""
    return {
        f"{a}>{b}": bench.gbps(f"{a}>{b}", [(a, b)]) for a, b in _ways(bench, inside, node_size)
    }


def network(bench: Bench, node_size: int) -> dict[str, Any]:
    """Machine fields of links, ports and NICs.

    One rank to all its mates at once gets as much as to each alone times their number: a mesh; as
    much as to one of them: a port that they share. With a single mate both are the same: a link.
    """
    found: dict[str, Any] = {}
    if node_size > 1:
        alone = _rates(bench, node_size, inside=True)
        usual = float(np.median([*alone.values()]))
        mates = [(0, b) for b in range(1, node_size)]
        together = len(mates) * bench.gbps("0 to all its mates", mates) if mates[1:] else usual
        mesh = not mates[1:] or together > 0.5 * (1 + len(mates)) * usual
        found["link_gbps" if mesh else "port_gbps"] = usual if mesh else max(usual, together)
        if mesh:
            found["overrides"] = {f"link {k}": v for k, v in alone.items() if v < SLOW * usual}
    if node_size < bench.ranks:
        alone = _rates(bench, node_size, inside=False)
        usual = float(np.median([*alone.values()]))
        across = [(r, (r + node_size) % bench.ranks) for r in range(bench.ranks)]
        found["nic_gbps"] = min(usual, bench.gbps("every rank to the next node", across))
    return found


def messages(bench: Bench) -> dict[str, float]:
    """latency_s and message_s: what a step costs besides its bytes, and what each message posted adds;
    what `processor` finds.

    The step's messages keep the ways busy for several times what tiny ones take: what goes on beside
    the bytes (a queue drained, the next message on its way) is no cost. The bytes' own time is taken
    off by the rate of longer messages.
    """
    ways = [(r, (r + 1) % bench.ranks) for r in range(bench.ranks)]
    name = "every rank to the next"
    gbps = bench.gbps(f"{name}, long", ways)
    tiny = bench.steps(name, ways, 17 * 64, 1)
    nbytes = 17 * max(64, int(BUSY * tiny * gbps * 1e9 / 17))
    one, many = (bench.steps(name, ways, nbytes, k) for k in (1, 17))
    posted = max(0.0, (many - one) / 32)  # 16 more sent and 16 more received
    latency = max(0.0, one - nbytes / gbps / 1e9 - 2 * posted)
    return {"latency_s": latency, "message_s": posted} | processor(bench, gbps)


def calibrate(
    group: Any = None, *, node_size: int | None = None, name: str = "calibrated",
    device: torch.device | str = "cpu", repeats: int = 3, **sizes: Any,
) -> tuple[Machine, dict[str, list[float]]]:  # fmt: skip
    """The group's Machine and the raw samples, on every rank.

    Args:
        node_size: ranks a node; default: all of them. sizes: of `kernels`.

    Raises:
        TopologyError: fewer than two ranks, or nodes that are not alike.
    """
    bench = Bench(group if group is not None else dist.group.WORLD, torch.device(device), repeats)
    node_size = node_size or bench.ranks
    if bench.ranks < 2 or bench.ranks % node_size:
        raise TopologyError(
            f"calibrate needs 2 or more ranks in nodes of one size, got {bench.ranks} ranks in "
            f"nodes of {node_size}"
        )
    fields = network(bench, node_size) | messages(bench) | kernels(bench, **sizes)
    backend = backend_of(bench.group, bench.device.type)
    machine = Machine(
        name, node_size, bench.ranks // node_size, source=f"measured over {backend}",
        all_gather="ring" if backend == "gloo" else "direct", **fields,
    )  # fmt: skip
    return machine, bench.samples


def _rank(
    rank: int, group: Any, device: torch.device, node_size: int, name: str, dtype: str
) -> tuple[Machine, dict[str, list[float]]]:
    size = node_size or int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or None
    kind = getattr(torch, dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    return calibrate(group, node_size=size, name=name, device=device, dtype=kind)


def measure_ranks(
    ranks: int, node_size: int = 0, name: str = "calibrated", dtype: str = ""
) -> tuple[Machine, dict[str, list[float]]] | None:
    """`calibrate` on a launcher's ranks (None on all but the first), or on forked local ones.

    Args:
        node_size: ranks a node; 0: what torchrun says, else all. dtype: of kernels; "": float32 on
            a CPU, bfloat16 on a GPU.
    """
    return on_ranks(_rank, ranks, node_size, name, dtype)
