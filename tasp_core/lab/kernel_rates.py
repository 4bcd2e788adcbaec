"""Rates of attention kernels and merges, all ranks of a group computing at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..documents import Documents
from ..kernels import Kernel, resolve
from ..merge import merge_
from ..plan import plan
from ..program import Call
from ..tiles import Sequences
from .measure import Inputs
from .passes import Pass
from .timing import Bench

LENGTHS = (256, 512, 1024, 2048)


def kernels(
    bench: Bench, *, heads: int = 8, kv_heads: int = 8, head_dim: int = 64,
    dtype: torch.dtype = torch.float32, lengths: Sequence[int] = LENGTHS, kernel: str = "auto",
) -> dict[str, float]:  # fmt: skip
    """tflops, backward_tflops, kernel_s and memory_gbps, all ranks computing at the same time.

    kernel_s is what a call takes in a pass of many short ones: the executor's time is in it.
    """
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
    tflops, _ = _fit(flops, times["forward"])
    backward, _ = _fit([2.5 * x for x in flops], times["backward"])
    return {
        "tflops": tflops, "backward_tflops": backward,
        "kernel_s": _call(bench, Inputs.random(bench.ranks, heads, kv_heads, head_dim, dtype=dtype), run),
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


def _call(bench: Bench, inputs: Inputs, kernel: Kernel) -> float:
    """Seconds a call takes in a pass of one token a rank."""
    each = plan(Documents.of([bench.ranks], causal=False), bench.ranks, layout="contiguous")
    one = Pass(each, bench.rank, bench.group, inputs.to(bench.device), lambda: None, kernel=kernel)
    found = [
        bench.timed(lambda: one.run("computation", backward=False)) / bench.ranks
        for _ in range(bench.repeats + 1)
    ][1:]
    bench.samples[f"a call, in a pass of {bench.ranks}"] = found
    return float(np.median(found))


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
