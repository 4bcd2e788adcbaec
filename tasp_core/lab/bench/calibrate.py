"""Measure a running group into a Machine: links, ports, NICs, latency, messages, kernels.

    python -m tasp_core calibrate --ranks 4 --out results/machine.json         # local gloo ranks
    torchrun --nproc-per-node 8 -m tasp_core calibrate --out machine.json      # NCCL, RCCL or gloo

Each pair of ranks is measured alone, then together with those that may share a port or a NIC with it.
A link below 70 % of the median becomes an override. Every sample is the slowest rank's. Costs of computing
and of messages are measured on passes of all ranks at once, so that what the executor adds is in them.
Not covered: routes through hosts, NICs shared by ranks; write those into the file by hand.
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

Pairs = Sequence[tuple[int, int]]  # (source, destination) ranks
SLOW = 0.7  # of the median rate: below it a link gets a rate of its own
MOST_PAIRS = 64  # that are measured, one after another
LEAST_S, LEAST_BYTES, MOST_BYTES = 0.1, 1 << 18, 1 << 28  # of the messages that show a rate
ROUNDS = 16  # steps of messages per sample
MANY = 17  # messages of a step, against 1, show what each costs
BUSY = 4  # a step's bytes keep links busy so many times as long as MANY tiny messages take
# tokens of kernel calls
LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (4096, 8192, 16384, 32768)}
BUSY_S, MOST_TOKENS = (
    0.1,
    1 << 14,
)  # a long pass of `processor`: seconds of its messages, and tokens at most
TOKEN_BYTES = 4096  # of a token's KV in the passes of `processor`


def measure_ranks(
    ranks: int, node_size: int = 0, name: str = "calibrated", dtype: str = ""
) -> tuple[Machine, dict[str, list[float]]] | None:
    """`calibrate` on a launcher's ranks (None on all but the first), or on forked local ones.

    Args:
        node_size: ranks per node; 0: what torchrun says, else all. dtype: of kernels; "": float32 on
            a CPU, bfloat16 on a GPU.
    """
    return on_ranks(_rank, ranks, node_size, name, dtype)


def _rank(
    rank: int, group: Any, device: torch.device, node_size: int, name: str, dtype: str
) -> tuple[Machine, dict[str, list[float]]]:
    size = node_size or int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or None
    kind = getattr(torch, dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    return calibrate(group, node_size=size, name=name, device=device, dtype=kind)


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
        node_size: ranks per node; default: all of them. sizes: of `kernels`.

    Raises:
        TopologyError: fewer than two ranks, or a number that is not a multiple of node_size.
    """
    bench = Bench(group if group is not None else dist.group.WORLD, torch.device(device), repeats)
    node_size = node_size or bench.ranks
    if bench.ranks < 2 or bench.ranks % node_size:
        raise TopologyError(
            f"calibrate needs 2 or more ranks in nodes of one size, got {bench.ranks} ranks in "
            f"nodes of {node_size}"
        )
    machine_fields = network(bench, node_size) | messages(bench) | kernels(bench, **sizes)
    backend = backend_of(bench.group, bench.device.type)
    machine = Machine(
        name,
        node_size,
        bench.ranks // node_size,
        source=f"measured over {backend}",
        all_gather="ring" if backend == "gloo" else "direct",
        **machine_fields,
    )
    return machine, bench.samples


@dataclass
class Bench:
    """Timed transfers and kernels on a group; all its ranks make the same calls.

    Attributes:
        samples: seconds, by what was timed.
        busy_s: processor time of the last timed run, mean over ranks.
    """

    group: Any
    device: torch.device
    repeats: int = 3
    samples: dict[str, list[float]] = field(default_factory=dict)
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)

    def gbps(self, name: str, pairs: Pairs) -> float:
        """GB/s that each transfer gets when all run at once; the first one empties token buckets."""
        nbytes, seconds = LEAST_BYTES // 2, 0.0
        while seconds < LEAST_S and nbytes < MOST_BYTES:
            nbytes *= 2 if seconds == 0 else max(2, min(16, int(LEAST_S / seconds) + 1))
            seconds = self.timed(partial(self.send, pairs, nbytes))
        samples = [self.timed(partial(self.send, pairs, nbytes)) for _ in range(self.repeats)]
        self.samples[f"{name}, {nbytes} bytes"] = samples
        return nbytes / float(np.median(samples)) / 1e9

    def steps(self, name: str, pairs: Pairs, nbytes: int, messages: int) -> float:
        """Seconds per step in which each pair exchanges that many messages, one step after another."""

        def steps() -> None:
            for _ in range(ROUNDS):
                self.send(pairs, nbytes, messages)

        samples = [self.timed(steps) / ROUNDS for _ in range(self.repeats + 1)][1:]
        self.samples[f"{name}, {nbytes} bytes in {messages} messages per step"] = samples
        return float(np.median(samples))

    def send(self, pairs: Pairs, nbytes: int, messages: int = 1) -> None:
        """All pairs' transfers at once, each of `nbytes` in `messages` messages."""

        def transfers(peers: list[int]) -> list[Transfer]:
            size = nbytes // messages
            return [
                (torch.empty(size, dtype=torch.uint8, device=self.device), peer, tag)
                for tag in range(messages)
                for peer in peers
            ]

        recvs = transfers([a for a, b in pairs if b == self.rank])
        sends = transfers([b for a, b in pairs if a == self.rank])
        for work in exchange_of(self.group, device=self.device).transfer(recvs, sends):
            work.wait()

    def timed(self, run: Callable[[], Any]) -> float:
        """Seconds of the slowest rank; all begin together."""
        dist.barrier(group=self.group)
        start, busy = time.perf_counter(), time.process_time()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        self.busy_s = self._reduced(busy, dist.ReduceOp.SUM) / self.ranks
        return self.slowest(seconds)

    def slowest(self, seconds: float) -> float:
        """The slowest rank's time, on all ranks."""
        return self._reduced(seconds, dist.ReduceOp.MAX)

    def _reduced(self, seconds: float, how: dist.ReduceOp.RedOpType) -> float:
        value = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, how, group=self.group)
        return float(value)


def network(bench: Bench, node_size: int) -> dict[str, Any]:
    """Machine fields of links, ports and NICs.

    One rank to all its peers at once gets as much as to each alone times their number: a mesh; as
    much as to one of them: a port that they share. With a single peer both are the same: a link.
    """
    machine_fields: dict[str, Any] = {}
    if node_size > 1:
        alone = _rates(bench, node_size, inside=True)
        usual = float(np.median([*alone.values()]))
        peers = [(0, b) for b in range(1, node_size)]
        together = len(peers) * bench.gbps("0 to all its peers", peers) if peers[1:] else usual
        if not peers[1:] or together > 0.5 * (1 + len(peers)) * usual:
            machine_fields["link_gbps"] = usual
            machine_fields["overrides"] = {
                f"link {pair}": rate for pair, rate in alone.items() if rate < SLOW * usual
            }
        else:
            machine_fields["port_gbps"] = max(usual, together)
    if node_size < bench.ranks:
        usual = float(np.median([*_rates(bench, node_size, inside=False).values()]))
        across = [(r, (r + node_size) % bench.ranks) for r in range(bench.ranks)]
        machine_fields["nic_gbps"] = min(usual, bench.gbps("every rank to the next node", across))
    return machine_fields


def _rates(bench: Bench, node_size: int, inside: bool) -> dict[str, float]:
    """Rates of ordered pairs within nodes, or between them, by "a>b"; of many pairs, a regular choice."""
    n = bench.ranks
    pairs = [
        (a, b)
        for a in range(n)
        for b in range(n)
        if a != b and (a // node_size == b // node_size) == inside
    ]
    stride = max(1, -(-len(pairs) // MOST_PAIRS))
    return {f"{a}>{b}": bench.gbps(f"{a}>{b}", [(a, b)]) for a, b in pairs[::stride]}


def messages(bench: Bench) -> dict[str, float]:
    """latency_s, message_s, and what `processor` measures.

    latency_s is what a step costs besides its bytes, message_s what each message posted adds. Steps of
    many messages and of one are compared, whose bytes keep the links busy for several times what tiny
    messages take: what goes on beside the bytes (a queue drained, the next message on its way) costs
    nothing. The time of the bytes is taken off by the rate of longer messages.
    """
    pairs = [(r, (r + 1) % bench.ranks) for r in range(bench.ranks)]
    name = "every rank to the next"
    gbps = bench.gbps(f"{name}, long", pairs)
    tiny = bench.steps(name, pairs, MANY * 64, 1)
    nbytes = MANY * max(64, int(BUSY * tiny * gbps * 1e9 / MANY))
    one, many = (bench.steps(name, pairs, nbytes, count) for count in (1, MANY))
    ends = 2 * (MANY - 1)  # MANY - 1 more messages are sent, and as many received
    posted = max(0.0, (many - one) / ends)
    latency = max(0.0, one - nbytes / gbps / 1e9 - 2 * posted)
    return {"latency_s": latency, "message_s": posted} | processor(bench, gbps)


def processor(bench: Bench, gbps: float) -> dict[str, float]:
    """message_cpu_s and copy_gbps, what messages take of the cores that compute, and ranks_a_core.

    Nothing where messages have cores of their own. A pass's fixed cost counts as its messages'.

    Args:
        gbps: between two ranks.
    """
    ranks_per_core = _ranks_per_core(bench)
    if not ranks_per_core:
        return {}

    def a_pass(tokens: int) -> Pass:
        return _pass(bench, tokens, (8, 8, 64), "tasp", "auto", torch.float32)

    def busy_s(one: Pass) -> float:
        samples = []
        for _ in range(bench.repeats + 1):
            bench.timed(lambda: one.run("communication", backward=False))
            samples.append(bench.busy_s)
        name = f"processor, a pass of messages, {one.plan.num_tokens(0)} tokens"
        bench.samples[name] = samples[1:]
        return float(np.median(samples[1:]))

    few = a_pass(1).plan.schedule.num_shares  # one token per message
    many = min(MOST_TOKENS, max(2 * few, int(BUSY_S * gbps * 1e9 / TOKEN_BYTES)))
    short, long = a_pass(few), a_pass(many)
    steps = lower(short.plan, bench.rank).steps
    ends = sum(len(step.sends) + len(step.recvs) for step in steps)
    least = busy_s(short)
    copied = max(0.0, busy_s(long) - least) / (2 * (bench.ranks - 1) * (many - few) * TOKEN_BYTES)
    return {
        "message_cpu_s": ranks_per_core * least / ends,
        "copy_gbps": 1e-9 / (ranks_per_core * copied) if copied else 0.0,
        "ranks_a_core": ranks_per_core,
    }


def _ranks_per_core(bench: Bench) -> float:
    """Ranks per core of the first rank's host, where their kernels keep all cores busy.

    0 where messages have cores left, and on GPUs.
    """
    if bench.device.type != "cpu":
        return 0.0
    all_cores = range(os.cpu_count() or 1)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else all_cores
    hosts: list[Any] = [None] * bench.ranks
    own = (socket.gethostname(), sorted(cores), torch.get_num_threads())
    dist.all_gather_object(hosts, own, group=bench.group)
    peers = [x for x in hosts if x[0] == hosts[0][0]]
    shared = len(set().union(*(x[1] for x in peers)))
    return len(peers) / shared if sum(x[2] for x in peers) >= shared else 0.0


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
    """tflops, backward_tflops, kernel_s and memory_gbps, fitted to calls of several lengths."""
    medians = []
    lengths = lengths or LENGTHS[bench.device.type]
    for tokens in lengths:
        one = _pass(bench, tokens, (heads, kv_heads, head_dim), "ring", kernel, dtype)
        samples = [
            [bench.slowest(s) / bench.ranks for s in one.run("computation", backward=True)]
            for _ in range(bench.repeats + 1)
        ][1:]  # the first one warms up
        medians.append(np.median(samples, axis=0))
        for name, seconds in zip(DIRECTIONS, zip(*samples, strict=True), strict=True):
            bench.samples[f"a call {name}, {tokens} tokens"] = [*seconds]
    forward, backward = np.array(medians).T
    rows = np.array(lengths, dtype=float)
    work = rows**2 * heads * head_dim / 1e12
    # as `simulate` counts them: queries are read, a part is written, from the second call on merged
    item, accumulator_item, n = dtype.itemsize, max(4, dtype.itemsize), bench.ranks
    row_bytes = heads * head_dim * (2 * item + (n - 1) / n * (item + 2 * accumulator_item))
    gbytes = rows * row_bytes / 1e9
    work_s, gbyte_s, call_s = _fit([work, gbytes, np.ones_like(rows)], forward)
    rest = backward - 2 * gbytes * gbyte_s - call_s
    backward_work_s = float(np.mean(np.where(rest > 0, rest, backward) / work))
    return {
        "tflops": FORWARD / work_s,
        "backward_tflops": BACKWARD / backward_work_s,
        "kernel_s": call_s,
        "memory_gbps": 1 / gbyte_s if gbyte_s else 0.0,
    }


def _pass(
    bench: Bench,
    tokens: int,
    heads: tuple[int, int, int],
    schedule: str,
    kernel: str,
    dtype: torch.dtype,
) -> Pass:
    """A pass of a full mask over `tokens` tokens on each rank.

    Args:
        heads: query heads, KV heads, head dim.
    """
    docs = Documents.of([tokens * bench.ranks], causal=False)
    one = plan(docs, bench.ranks, schedule=schedule, layout="contiguous")
    ones = torch.ones(1, 1, 1, dtype=dtype, device=bench.device)
    q, kv, dim = heads
    inputs = Inputs(*(ones.expand(docs.total, n, dim) for n in (q, kv, kv, q)))

    def barrier() -> None:
        dist.barrier(group=bench.group)

    return Pass(one, bench.rank, bench.group, inputs, barrier, kernel=kernel)


def _fit(columns: Sequence[np.ndarray], seconds: np.ndarray) -> list[float]:
    """Least-squares factors >= 0 such that the sum of factor x column is `seconds`, with relative errors.

    A factor that would be negative, by noise, is 0; the first factor is always positive.

    >>> one, two = np.array([1.0, 2.0]), np.ones(2)
    >>> [round(x, 9) for x in _fit([one, two], np.array([1.5, 2.5]))]
    [1.0, 0.5]
    >>> _fit([one, two], np.array([1.0, 0.5]))
    [0.625, 0.0]
    """
    used = list(range(len(columns)))
    while True:
        matrix = np.stack([columns[i] for i in used], axis=1) / seconds[:, None]
        solution = np.linalg.lstsq(matrix, np.ones(len(seconds)), rcond=None)[0]
        if len(used) == 1:
            solution = np.array([np.mean(seconds / columns[0])])
            break
        least = 1 + int(np.argmin(solution[1:]))
        if solution[0] > 0 and solution[least] >= 0:
            break
        used.pop(least)
    factors = [0.0] * len(columns)
    for i, value in zip(used, solution.tolist(), strict=True):
        factors[i] = value
    return factors
