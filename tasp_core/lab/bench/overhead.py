"""`bench overhead`: CPU time of attention on several ranks over that of the plain kernel.

The plain kernel is the same attention of the packed sequence in one process, without a plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...kernels.reference import oracle
from ...kernels.resolve import resolve
from ...planner import plan
from ...planning.plan import Plan
from ...runtime.attention import attention
from ...runtime.launch import launch
from ...runtime.sharding import shard
from ...sequence.documents import Documents
from .accuracy import Inputs, as_dict, verify


def overhead(
    say: Callable[[str], None],
    *,
    ranks: int = 4,
    tokens: int = 8192,
    heads: int = 8,
    head_dim: int = 64,
    repeats: int = 9,
    schedule: str = "tasp",
    layout: str = "zigzag",
) -> dict[str, Any]:
    """CPU time of all ranks' forward passes over the plain kernel's in one process, both measured in turn.

    Causal, float32, one thread per process; nothing is timed if an error is above its limit.

    Returns:
        "ratio": the median of each rank, added up, over the median of the plain kernel. "least_ratio": the
        same of the least samples, which other work on the machine has disturbed least. "rank_cpu_s" and
        "plain_cpu_s": the samples, in seconds.
    """
    docs = Documents.of([tokens])
    p = plan(docs, ranks, schedule=schedule, layout=layout)
    inputs = Inputs.random(tokens, heads, heads, head_dim)
    errors, _ = verify(p, inputs)
    result: dict[str, Any] = {
        "config": {
            "ranks": ranks,
            "tokens": tokens,
            "heads": heads,
            "head_dim": head_dim,
            "schedule": schedule,
            "layout": layout,
            "repeats": repeats,
        },
        "errors": as_dict(errors),
        "right": errors.ok,
    }
    if not errors.ok:
        say("WRONG: the result is not within its error limit; nothing was timed")
        return result
    by_rank = launch(_forward_cpu_s, ranks, p, inputs, repeats)
    ours = [[sample[0] for sample in samples] for samples in by_rank]
    plain_s = [sample[1] for sample in by_rank[0]]
    ratio = float(sum(map(np.median, ours)) / np.median(plain_s))
    least = sum(map(min, ours)) / min(plain_s)
    say(
        f"{ranks} ranks, {tokens} tokens, {heads} heads of {head_dim}, {layout} {schedule}, causal "
        f"forward: {ratio:.3f} x the CPU time of the plain kernel on one process (least samples: "
        f"{least:.3f} x)"
    )
    return result | {
        "plain_cpu_s": plain_s,
        "rank_cpu_s": ours,
        "ratio": ratio,
        "least_ratio": least,
    }


def _forward_cpu_s(
    rank: int, group: Any, p: Plan, inputs: Inputs, repeats: int
) -> list[tuple[float, float]]:
    """Per repeat the CPU seconds of this process: its forward pass, and on rank 0 the plain kernel."""
    q, k, v = (shard(x, p, rank) for x in inputs.tensors()[:3])
    kernel = resolve("auto", inputs.q.device.type, inputs.q.dtype)
    samples = []
    with torch.no_grad():
        for _ in range(repeats + 1):  # the first one warms up
            dist.barrier(group=group)
            start = time.process_time()
            attention(q, k, v, p, group)
            ours = time.process_time() - start
            dist.barrier(group=group)
            start = time.process_time()
            if rank == 0:
                oracle(inputs.q, inputs.k, inputs.v, p.docs, kernel=kernel)
            samples.append((ours, time.process_time() - start))
    return samples[1:]
