"""Measure a running group into a Machine: links, ports, NICs, latency, messages, kernels.

    python -m tasp_core calibrate --ranks 4 --out results/machine.json         # local gloo ranks
    torchrun --nproc-per-node 8 -m tasp_core calibrate --out machine.json      # NCCL, RCCL or gloo

Each way is measured alone, then together with the others that may share a port or a NIC with it.
What is more than 30 % slower than its like becomes an override. Every sample is the slowest rank's.
Not covered: ways through hosts, NICs shared by ranks; write those into the file by hand.

What computing and messages cost is measured on passes of all ranks at the same time, not on kernels and
messages alone: what the executor adds is in it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...costs.bytes import BACKWARD, FORWARD
from ...errors import TopologyError
from ...lowering.lower import lower
from ...machines.machine import Machine
from ...planner import plan
from ...runtime.exchange import Transfer, exchange_of
from ...runtime.launch import on_ranks
from ...runtime.process_group import backend_of
from ...sequence.documents import Documents
from .accuracy import Inputs
from .passes import DIRECTIONS, Pass

SLOW, BUSY = 0.7, 4
MOST_PAIRS = 64


def _ways(bench: Bench, inside: bool, node_size: int) -> Pairs:
    """Ordered pairs within nodes, or between them; of many, a regular choice."""
    n = bench.ranks
    pairs = [
        (a, b)
        for a in range(n)
        for b in range(n)
        if a != b and (a // node_size == b // node_size) == inside
    ]
    return pairs[:: -(-len(pairs) // MOST_PAIRS)] if pairs else []


def _rates(bench: Bench, node_size: int, inside: bool) -> dict[str, float]:
    """Rates of single ways by "a>b"."""
    return {
        f"{a}>{b}": bench.gbps(f"{a}>{b}", [(a, b)]) for a, b in _ways(bench, inside, node_size)
    }


def network(bench: Bench, node_size: int) -> dict[str, Any]:
    """Machine fields of links, ports and NICs.

    One rank to all its peers at once gets as much as to each alone times their number: a mesh; as
    much as to one of them: a port that they share. With a single peer both are the same: a link.
    """
    found: dict[str, Any] = {}
    if node_size > 1:
        alone = _rates(bench, node_size, inside=True)
        usual = float(np.median([*alone.values()]))
        peers = [(0, b) for b in range(1, node_size)]
        together = len(peers) * bench.gbps("0 to all its peers", peers) if peers[1:] else usual
        mesh = not peers[1:] or together > 0.5 * (1 + len(peers)) * usual
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
    group: Any = None,
    *,
    node_size: int | None = None,
    name: str = "calibrated",
    device: torch.device | str = "cpu",
    repeats: int = 3,
    **sizes: Any,
) -> tuple[Machine, dict[str, list[float]]]:
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
        name,
        node_size,
        bench.ranks // node_size,
        source=f"measured over {backend}",
        all_gather="ring" if backend == "gloo" else "direct",
        **fields,
    )
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


LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (4096, 8192, 16384, 32768)}
BUSY_S, MOST_TOKENS = (
    0.1,
    1 << 14,
)  # how long a pass's messages keep links busy, unless that is too many
TOKEN_BYTES = 4096


def _pass(
    bench: Bench,
    tokens: int,
    heads: tuple[int, int, int],
    schedule: str,
    kernel: str,
    dtype: torch.dtype,
) -> Pass:
    """A pass of a full mask over as many tokens on each rank."""
    docs = Documents.of([tokens * bench.ranks], causal=False)
    one = plan(docs, bench.ranks, schedule=schedule, layout="contiguous")
    like = torch.ones(1, 1, 1, dtype=dtype, device=bench.device)
    q, kv, dim = heads
    inputs = Inputs(*(like.expand(docs.total, n, dim) for n in (q, kv, kv, q)))

    def meet() -> None:
        dist.barrier(group=bench.group)

    return Pass(one, bench.rank, bench.group, inputs, meet, kernel=kernel)


def kernels(
    bench: Bench,
    *,
    heads: int = 8,
    kv_heads: int = 8,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    lengths: Sequence[int] = (),
    kernel: str = "auto",
) -> dict[str, float]:
    """tflops, backward_tflops, kernel_s and memory_gbps, from calls of several lengths."""
    seconds = []
    lengths = lengths or LENGTHS[bench.device.type]
    for tokens in lengths:
        one = _pass(bench, tokens, (heads, kv_heads, head_dim), "ring", kernel, dtype)
        found = (
            np.array(
                [
                    [bench.slowest(s) for s in one.run("computation", backward=True)]
                    for _ in range(bench.repeats + 1)
                ][1:]
            )
            / bench.ranks
        )
        seconds.append(np.median(found, axis=0))
        for name, times in zip(DIRECTIONS, found.T, strict=True):
            bench.samples[f"a call {name}, {tokens} tokens"] = times.tolist()
    forward, backward = np.array(seconds).T
    rows = np.array(lengths, dtype=float)
    work = rows**2 * heads * head_dim / 1e12
    # as `simulate` counts them: queries are read, a part is written, from the second call on merged
    item, wide, n = dtype.itemsize, max(4, dtype.itemsize), bench.ranks
    gbytes = rows * heads * head_dim * (2 * item + (n - 1) / n * (item + 2 * wide)) / 1e9
    each, gbyte_s, call_s = _fit([work, gbytes, np.ones_like(rows)], forward)
    rest = backward - 2 * gbytes * gbyte_s - call_s
    back = float(np.mean(np.where(rest > 0, rest, backward) / work))
    return {
        "tflops": FORWARD / each,
        "backward_tflops": BACKWARD / back,
        "kernel_s": call_s,
        "memory_gbps": 1 / gbyte_s if gbyte_s else 0.0,
    }


def _fit(columns: Sequence[np.ndarray], seconds: np.ndarray) -> list[float]:
    """Factors >= 0 whose sum of columns is `seconds`, with equal relative weight on all rows.

    What noise would make negative costs nothing; the first column always costs something.

    >>> one, two = np.array([1.0, 2.0]), np.ones(2)
    >>> [round(x, 9) for x in _fit([one, two], np.array([1.5, 2.5]))]
    [1.0, 0.5]
    >>> _fit([one, two], np.array([1.0, 0.5]))
    [0.625, 0.0]
    """
    used = list(range(len(columns)))
    while True:
        matrix = np.stack([columns[i] for i in used], axis=1) / seconds[:, None]
        found = np.linalg.lstsq(matrix, np.ones(len(seconds)), rcond=None)[0]
        if len(used) == 1:
            found = np.array([np.mean(seconds / columns[0])])
        worst = 1 + int(np.argmin(found[1:])) if len(used) > 1 else 0
        if len(used) == 1 or (found[0] > 0 and found[worst] >= 0):
            break
        used.pop(worst)
    factors = [0.0] * len(columns)
    for i, value in zip(used, found.tolist(), strict=True):
        factors[i] = value
    return factors


def processor(bench: Bench, gbps: float) -> dict[str, float]:
    """message_cpu_s and copy_gbps: what passes' messages take of the cores that compute; ranks_a_core.

    Nothing where messages have cores of their own. A pass's fixed cost counts as its messages'.

    Args:
        gbps: of a way between two ranks.
    """
    crowd = _ranks_a_core(bench)
    if not crowd:
        return {}

    def a_pass(tokens: int) -> Pass:
        return _pass(bench, tokens, (8, 8, 64), "tasp", "auto", torch.float32)

    def busy_s(one: Pass) -> float:
        found = []
        for _ in range(bench.repeats + 1):
            bench.timed(lambda: one.run("communication", backward=False))
            found.append(bench.busy_s)
        name = f"processor, a pass of messages, {one.plan.num_tokens(0)} tokens"
        bench.samples[name] = found[1:]
        return float(np.median(found[1:]))

    few = a_pass(1).plan.schedule.num_shares  # a token a message
    many = min(MOST_TOKENS, max(2 * few, int(BUSY_S * gbps * 1e9 / TOKEN_BYTES)))
    short, long = a_pass(few), a_pass(many)
    steps = lower(short.plan, bench.rank).steps
    ends = sum(len(step.sends) + len(step.recvs) for step in steps)
    least = busy_s(short)
    copied = max(0.0, busy_s(long) - least) / (2 * (bench.ranks - 1) * (many - few) * TOKEN_BYTES)
    return {
        "message_cpu_s": crowd * least / ends,
        "copy_gbps": 1e-9 / (crowd * copied) if copied else 0.0,
        "ranks_a_core": crowd,
    }


def _ranks_a_core(bench: Bench) -> float:
    """How many ranks of the first rank's host share a core that all their kernels keep busy.

    0 where messages have cores left, and on GPUs.
    """
    if bench.device.type != "cpu":
        return 0.0
    many = range(os.cpu_count() or 1)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else many
    found: list[Any] = [None] * bench.ranks
    own = (socket.gethostname(), sorted(cores), torch.get_num_threads())
    dist.all_gather_object(found, own, group=bench.group)
    peers = [x for x in found if x[0] == found[0][0]]
    shared = len(set().union(*(x[1] for x in peers)))
    return len(peers) / shared if sum(x[2] for x in peers) >= shared else 0.0


Pairs = Sequence[tuple[int, int]]
LEAST_S, LEAST_BYTES, MOST_BYTES, ROUNDS = 0.1, 1 << 18, 1 << 28, 16


@dataclass
class Bench:
    """Timed transfers and kernels on the ranks of a group; all ranks call alike."""

    group: Any
    device: torch.device
    repeats: int = 3
    samples: dict[str, list[float]] = field(default_factory=dict)
    busy_s: float = 0.0  # processor time of the last timed run, mean over ranks

    def __post_init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)

    def slowest(self, seconds: float) -> float:
        """The slowest rank's time, on all ranks."""
        return self._agreed(seconds, dist.ReduceOp.MAX)

    def _agreed(self, seconds: float, how: dist.ReduceOp.RedOpType) -> float:
        value = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, how, group=self.group)
        return float(value)

    def timed(self, run: Callable[[], Any]) -> float:
        """Seconds of the slowest rank, all having met first."""
        dist.barrier(group=self.group)
        start, busy = time.perf_counter(), time.process_time()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        self.busy_s = self._agreed(busy, dist.ReduceOp.SUM) / self.ranks
        return self.slowest(seconds)

    def send(self, pairs: Pairs, nbytes: int, messages: int = 1) -> None:
        """All transfers at once, each in so many messages."""

        def ways(peers: list[int]) -> list[Transfer]:
            size = nbytes // messages
            return [
                (torch.empty(size, dtype=torch.uint8, device=self.device), peer, tag)
                for tag in range(messages)
                for peer in peers
            ]

        recvs = ways([a for a, b in pairs if b == self.rank])
        sends = ways([b for a, b in pairs if a == self.rank])
        for work in exchange_of(self.group, device=self.device).transfer(recvs, sends):
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
