"""What computing and messages cost in real passes, all ranks of a group at the same time.

Measured on passes, not on kernels and messages alone: what the executor adds is in it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..documents import Documents
from ..formulas import BACKWARD, FORWARD
from ..lower import lower
from ..plan import plan
from .measure import Inputs
from .passes import DIRECTIONS, Pass
from .timing import Bench

LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (4096, 8192, 16384, 32768)}
BUSY_S, MOST_TOKENS = (
    0.1,
    1 << 14,
)  # how long a pass's messages keep links busy, unless that is too many
TOKEN_BYTES = 4096


def _pass(bench: Bench, tokens: int, heads: tuple[int, int, int], schedule: str, kernel: str,
          dtype: torch.dtype) -> Pass:  # fmt: skip
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
    bench: Bench, *, heads: int = 8, kv_heads: int = 8, head_dim: int = 64,
    dtype: torch.dtype = torch.float32, lengths: Sequence[int] = (), kernel: str = "auto",
) -> dict[str, float]:  # fmt: skip
    """tflops, backward_tflops, kernel_s and memory_gbps, from calls of several lengths."""
    seconds = []
    lengths = lengths or LENGTHS[bench.device.type]
    for tokens in lengths:
        one = _pass(bench, tokens, (heads, kv_heads, head_dim), "ring", kernel, dtype)
        found = np.array([
            [bench.slowest(s) for s in one.run("computation", backward=True)]
            for _ in range(bench.repeats + 1)
        ][1:]) / bench.ranks  # fmt: skip
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
        "tflops": FORWARD / each, "backward_tflops": BACKWARD / back, "kernel_s": call_s,
        "memory_gbps": 1 / gbyte_s if gbyte_s else 0.0,
    }  # fmt: skip


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
    }  # fmt: skip


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
    mates = [x for x in found if x[0] == found[0][0]]
    shared = len(set().union(*(x[1] for x in mates)))
    return len(mates) / shared if sum(x[2] for x in mates) >= shared else 0.0
