"""Measure a running group into a Machine: links, ports, NICs, latency, messages, kernels.

    python -m tasp_core calibrate --ranks 4 --out results/machine.json         # local gloo ranks
    torchrun --nproc-per-node 8 -m tasp_core calibrate --out machine.json      # NCCL, RCCL or gloo

Each way is measured alone, then together with the others that may share a port or a NIC with it.
What is more than 30 % slower than its like becomes an override. Every sample is the slowest rank's.
Not covered: ways through hosts, NICs shared by ranks; write those into the file by hand.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import TopologyError
from ..kernels import resolve
from ..merge import merge_
from ..program import Call
from ..tiles import Sequences
from ..topology import Machine
from ..transport import Way, post
from .ranks import on_ranks

Pairs = Sequence[tuple[int, int]]
LEAST_S, LEAST_BYTES, MOST_BYTES = 0.1, 1 << 18, 1 << 28
SLOW, ROUNDS, BUSY = 0.7, 16, 4
MOST_PAIRS = 64
LENGTHS = (256, 512, 1024, 2048)


@dataclass
class Bench:
    """Timed transfers and kernels on the ranks of a group; all ranks call alike."""

    group: Any
    device: torch.device
    repeats: int = 3
    samples: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)

    def slowest(self, seconds: float) -> float:
        """The slowest rank's time, on all ranks."""
        worst = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.group)
        return float(worst)

    def timed(self, run: Callable[[], Any]) -> float:
        """Seconds of the slowest rank, all having met first."""
        dist.barrier(group=self.group)
        start = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.slowest(time.perf_counter() - start)

    def send(self, pairs: Pairs, nbytes: int, messages: int = 1) -> None:
        """All transfers at once, each in so many messages."""

        def ways(peers: list[int]) -> list[Way]:
            size = nbytes // messages
            return [
                (torch.empty(size, dtype=torch.uint8, device=self.device), peer, tag)
                for tag in range(messages)
                for peer in peers
            ]

        recvs = ways([a for a, b in pairs if b == self.rank])
        sends = ways([b for a, b in pairs if a == self.rank])
        for work in post(self.group, recvs, sends):
            work.wait()

    def gbps(self, name: str, pairs: Pairs) -> float:
        """GB/s that each transfer gets when all run at once; a first one takes what buckets hold."""
        nbytes, seconds = LEAST_BYTES // 2, 0.0
        while seconds < LEAST_S and nbytes < MOST_BYTES:
            nbytes *= 2 if seconds == 0 else max(2, min(16, int(LEAST_S / seconds) + 1))
            seconds = self.timed(partial(self.send, pairs, nbytes))
        found = [self.timed(lambda: self.send(pairs, nbytes)) for _ in range(self.repeats)]
        self.samples[f"{name}, {nbytes} bytes"] = found
        return nbytes / float(np.median(found)) / 1e9

    def steps(self, name: str, pairs: Pairs, nbytes: int, messages: int) -> float:
        """Seconds a step of that many messages on each way takes, one step after another."""

        def steps() -> None:
            for _ in range(ROUNDS):
                self.send(pairs, nbytes, messages)

        found = [self.timed(steps) / ROUNDS for _ in range(self.repeats + 1)][1:]
        self.samples[f"{name}, {nbytes} bytes in {messages} messages a step"] = found
        return float(np.median(found))


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
    """latency_s and message_s: what a step costs besides its bytes, and what each message posted adds.

    The step's messages keep the ways busy for several times what tiny ones take: what goes on beside
    the bytes (a queue drained, the next message on its way) is no cost. The bytes' own time is taken
    off by the rate of longer messages.
    """
    ways = [(r, (r + 1) % bench.ranks) for r in range(bench.ranks)]
    name = "every rank to the next"
    rate = bench.gbps(f"{name}, long", ways) * 1e9
    tiny = bench.steps(name, ways, 17 * 64, 1)
    nbytes = 17 * max(64, int(BUSY * tiny * rate / 17))
    one, many = (bench.steps(name, ways, nbytes, k) for k in (1, 17))
    posted = max(0.0, (many - one) / 32)  # 16 more sent and 16 more received
    return {"latency_s": max(0.0, one - nbytes / rate - 2 * posted), "message_s": posted}


def kernels(
    bench: Bench, *, heads: int = 8, kv_heads: int = 8, head_dim: int = 64,
    dtype: torch.dtype = torch.float32, lengths: Sequence[int] = LENGTHS, kernel: str = "auto",
) -> dict[str, float]:  # fmt: skip
    """tflops, backward_tflops, kernel_s and memory_gbps, all ranks computing at the same time."""
    run = resolve(kernel, bench.device.type, dtype)
    flops: list[float] = []
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    for t in lengths:
        q, k, v, dout = (
            torch.randn(t, h, head_dim, device=bench.device).to(dtype)
            for h in (heads, kv_heads, kv_heads, heads)
        )
        one = np.array([0]), np.array([t])
        call, scale = Call(False, Sequences(*one, *one), (), ()), head_dim**-0.5
        out, lse = run.forward(q, k, v, call, scale)
        flops.append(4.0 * t * t * head_dim * heads)
        works: dict[str, Callable[[], Any]] = {
            "forward": partial(run.forward, q, k, v, call, scale),
            "backward": partial(run.backward, dout, q, k, v, out, lse, call, scale),
        }
        for name, work in works.items():
            found = [bench.timed(work) for _ in range(bench.repeats + 1)][1:]
            bench.samples[f"kernel {name}, {t} tokens"] = found
            times[name].append(float(np.median(found)))
    tflops, kernel_s = _fit(flops, times["forward"])
    backward, _ = _fit([2.5 * x for x in flops], times["backward"])
    return {
        "tflops": tflops, "backward_tflops": backward, "kernel_s": kernel_s,
        "memory_gbps": _memory(bench, heads, head_dim, dtype),
    }  # fmt: skip


def _fit(flops: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """TFLOP/s and seconds a call, with equal relative weight on all lengths.

    Where noise would make one of them negative, a call costs nothing besides its work.

    >>> [round(x, 9) for x in _fit([1e12, 2e12], [1.5, 2.5])], _fit([1e12, 2e12], [1.0, 0.5])
    ([1.0, 0.5], (2.5, 0.0))
    """
    work, taken = np.asarray(flops) / 1e12, np.asarray(seconds)
    columns = np.stack([work, np.ones(len(work))], axis=1) / taken[:, None]
    slope, start = np.linalg.lstsq(columns, np.ones(len(work)), rcond=None)[0]
    if slope <= 0 or start < 0:
        return float(np.mean(work / taken)), 0.0
    return float(1 / slope), float(start)


def _memory(bench: Bench, heads: int, head_dim: int, dtype: torch.dtype) -> float:
    """GB/s at which q and a partial result are read and the sum is read and written."""
    rows = 4096
    out = torch.zeros(rows, heads, head_dim, device=bench.device)
    lse = torch.zeros(rows, heads, device=bench.device, dtype=torch.float64)
    part, part_lse = out.to(dtype), lse.float()
    found = [
        bench.timed(lambda: merge_(out, lse, part, part_lse)) for _ in range(bench.repeats + 1)
    ][1:]
    bench.samples[f"merge of {rows} rows"] = found
    row = 3 * dtype.itemsize + 2 * out.dtype.itemsize
    return rows * heads * head_dim * row / float(np.median(found)) / 1e9


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
    backend = dist.get_backend(bench.group)
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
