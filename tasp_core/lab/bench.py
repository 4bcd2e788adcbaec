"""Benchmarks that compare with the oracle first and then measure ratios within one run."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from ..attention import attention
from ..documents import Documents
from ..kernels import oracle, resolve
from ..launch import launch
from ..plan import Plan, plan
from ..tensors import shard
from .measure import Inputs, as_dict, verify


def _forward_cpu_s(rank: int, group: Any, p: Plan, inputs: Inputs, repeats: int) -> list[float]:
    """CPU seconds of this rank's process for each forward pass, all threads."""
    q, k, v = (shard(x, p, rank) for x in inputs.tensors()[:3])
    samples = []
    with torch.no_grad():
        for i in range(repeats + 1):  # the first one warms up
            dist.barrier(group=group)
            start = time.process_time()
            attention(q, k, v, p, group)
            if i:
                samples.append(time.process_time() - start)
    return samples


def _plain_cpu_s(
    rank: int, group: Any, docs: Documents, inputs: Inputs, repeats: int
) -> list[float]:
    """CPU seconds of the plain kernel over the whole row on one process with one thread."""
    q, k, v = inputs.tensors()[:3]
    kernel = resolve("auto", q.device.type, q.dtype)
    samples = []
    with torch.no_grad():
        for i in range(repeats + 1):
            start = time.process_time()
            oracle(q, k, v, docs, kernel=kernel)
            if i:
                samples.append(time.process_time() - start)
    return samples


def overhead(
    *, ranks: int = 4, tokens: int = 8192, heads: int = 8, head_dim: int = 64, repeats: int = 5,
    schedule: str = "tasp", layout: str = "zigzag",
) -> dict[str, Any]:  # fmt: skip
    """Total CPU time of all ranks' forward pass over the plain kernel's on one process.

    Causal, float32. Errors are checked first; the ratio is of medians over `repeats` passes.
    """
    docs = Documents.of([tokens])
    p = plan(docs, ranks, schedule=schedule, layout=layout)
    inputs = Inputs.random(tokens, heads, heads, head_dim)
    errors, _ = verify(p, inputs)
    result: dict[str, Any] = {
        "config": {"ranks": ranks, "tokens": tokens, "heads": heads, "head_dim": head_dim,
                   "schedule": schedule, "layout": layout, "repeats": repeats},
        "errors": as_dict(errors),
    }  # fmt: skip
    if not errors.ok:
        return result
    plain = launch(_plain_cpu_s, 1, docs, inputs, repeats)[0]
    each = launch(_forward_cpu_s, ranks, p, inputs, repeats)
    total = [sum(column) for column in zip(*each, strict=True)]
    ratio = _median(total) / _median(plain)
    return result | {"plain_cpu_s": plain, "ranks_cpu_s": total, "ratio": ratio}


def _median(samples: list[float]) -> float:
    return sorted(samples)[len(samples) // 2]
