"""What computing and messages cost in real passes, all ranks of a group at the same time.

Measured on passes, not on kernels and messages alone: what the executor adds is in it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from ..documents import Documents
from ..formulas import BACKWARD, FORWARD
from ..plan import plan
from .measure import Inputs
from .passes import DIRECTIONS, Pass
from .timing import Bench

LENGTHS = (256, 512, 1024, 2048)
BUSY_S = 0.1  # how long a pass's messages keep links busy


def _pass(bench: Bench, tokens: int, heads: tuple[int, int, int], schedule: str, kernel: str,
          dtype: torch.dtype) -> Pass:  # fmt: skip
    """A pass of a full mask over as many tokens on each rank."""
    docs = Documents.of([tokens * bench.ranks], causal=False)
    one = plan(docs, bench.ranks, schedule=schedule, layout="contiguous")
    inputs = Inputs.random(docs.total, *heads, dtype=dtype).to(bench.device)

    def meet() -> None:
        dist.barrier(group=bench.group)

    return Pass(one, bench.rank, bench.group, inputs, meet, kernel=kernel)


def kernels(
    bench: Bench, *, heads: int = 8, kv_heads: int = 8, head_dim: int = 64,
    dtype: torch.dtype = torch.float32, lengths: Sequence[int] = LENGTHS, kernel: str = "auto",
) -> dict[str, float]:  # fmt: skip
    """tflops, backward_tflops, kernel_s and memory_gbps, from calls of several lengths."""
    seconds = []
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
    # as `simulate` counts them: queries are read, a part is written and merged
    gbytes = rows * heads * head_dim * (3 * dtype.itemsize + 2 * max(4, dtype.itemsize)) / 1e9
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


def processor(bench: Bench, node_size: int, gbps: float) -> dict[str, float]:
    """message_cpu_s and copy_gbps: what passes' messages take of the cores that compute; ranks_a_core.

    Args:
        gbps: of a way between two ranks.
    """
    crowd, n = _ranks_a_core(bench, node_size), bench.ranks
    few, many = n - 1, max(2 * (n - 1), int(BUSY_S * gbps * 1e9 / 4096))  # tokens of 4 KB
    busy = []
    for tokens in (few, many) if crowd else ():
        one = _pass(bench, tokens, (8, 8, 64), "tasp", "auto", torch.float32)
        found = []
        for _ in range(bench.repeats + 1):
            bench.timed(lambda one=one: one.run("communication", backward=False))  # type: ignore[misc]
            found.append(bench.busy_s)
        bench.samples[f"processor, a pass of messages, {tokens} tokens"] = found[1:]
        busy.append(float(np.median(found[1:])))
    if not crowd:
        return {}
    ends = 2 * (n - 1)  # messages of a step, and shards of a pass, sent and received
    copied = max(0.0, busy[1] - busy[0]) / (ends * (many - few) * 4096)
    return {
        "message_cpu_s": crowd * busy[0] / (ends * (n - 1)),
        "copy_gbps": 1e-9 / (crowd * copied) if copied else 0.0,
        "ranks_a_core": crowd,
    }  # fmt: skip


def _ranks_a_core(bench: Bench, node_size: int) -> float:
    """How many ranks share a core that all their kernels keep busy; 0 where messages have cores left."""
    if bench.device.type != "cpu":
        return 0.0
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    found: list[list[int]] = [[] for _ in range(bench.ranks)]
    dist.all_gather_object(found, own or list(range(os.cpu_count() or 1)), group=bench.group)
    cores = len(set().union(*found[:node_size]))
    return node_size / cores if node_size * torch.get_num_threads() >= cores else 0.0
