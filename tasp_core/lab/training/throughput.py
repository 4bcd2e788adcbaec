"""What a training step costs, counted: operations, bytes, memory; and what a device could do at best.

Counted figures come from the model's size and from lowered plans; peaks are quoted (PEAK_TFLOPS), given,
or measured by one matrix product, and are labelled so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...costs.bytes import BYTES, RowBytes, wire_bytes
from ...lowering.lower import lower
from ...planning.heads import split_heads
from ...planning.plan import Plan
from .data import Batch
from .llama import SIZES, Size
from .settings import Settings

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "MI300X": 1307.0, "A100": 312.0}  # bf16, dense, quoted


class Peak(NamedTuple):
    """The most operations a second a device does, and how that is known."""

    tflops: float
    source: str


def peak(device: torch.device, dtype: torch.dtype, given: float | None = None) -> Peak:
    """A device's peak: given, quoted for its name, or measured by a matrix product."""
    if given is not None:
        return Peak(given, "given")
    if device.type == "cuda" and dtype.itemsize == 2:
        name = torch.cuda.get_device_name(device)
        for known, tflops in PEAK_TFLOPS.items():
            if known in name:
                return Peak(tflops, f"quoted, {known}")
    n = 4096 if device.type == "cuda" else 512
    x = torch.randn(n, n, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        (x @ x)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return Peak(2 * n**3 / best / 1e12, "measured, one matrix product")


def flops(size: Size, tokens: int, pairs: int) -> int:
    """Operations of a training step: 6 a weight and token, 12 head dims a visible pair and query head.

    Recomputation is not counted: it is not progress.
    """
    weights = size.parameters - 256 * size.dim  # the embedding is looked up
    return 6 * weights * tokens + 12 * size.dim * size.layers * pairs


def attention_bytes(size: Size, plan: Plan, rank: int, dtype: str) -> int:
    """Bytes that a rank's attention sends in all layers, forward and backward, between Ulysses groups."""
    own = split_heads(size.heads, size.kv_heads, plan.intra)[rank % plan.intra]
    kv_heads = own.kv_high - own.kv_low
    row = RowBytes.of(size.heads // plan.intra, kv_heads, size.dim // size.heads, BYTES[dtype])
    return size.layers * sum(
        wire_bytes(lower(plan, rank, backward=b), row, sent=True, backward=b) for b in (False, True)
    )


def parameter_bytes(size: Size, world: int, itemsize: int) -> int:
    """Bytes that FSDP has a rank send in a step: weights gathered twice, float32 gradients reduced."""
    return (2 * itemsize + 4) * size.parameters * (world - 1) // world


@dataclass(frozen=True)
class Throughput:
    """The costs of one run's steps; gbps: gigabytes a second a rank can send, or None."""

    size: Size
    world: int
    dtype: str
    peak: Peak
    gbps: float | None

    @classmethod
    def of(cls, s: Settings, device: torch.device, world: int) -> Throughput:
        """The meter of a run on `world` ranks."""
        dtype = getattr(torch, s.dtype)
        return cls(SIZES[s.size], world, s.dtype, peak(device, dtype, s.peak_tflops), s.gbps)

    def of_step(self, batch: Batch, seconds: float) -> dict[str, Any]:
        """Throughput of a step; what concerns data is of all ranks together."""
        done = flops(self.size, batch.tokens, batch.pairs) / self.world / seconds
        return {
            "seconds": seconds,
            "tokens": batch.tokens,
            "targets": batch.targets,
            "documents": batch.documents,
            "mean_length": batch.tokens / batch.documents,
            "tokens_per_s_per_device": batch.tokens / seconds / self.world,
            "tflops_per_device": done / 1e12,
            "mfu": done / 1e12 / self.peak.tflops,
        }

    def roofline(self, batch: Batch, rank: int) -> dict[str, Any]:
        """Least seconds of a step, by computation and by links, and which of them bounds it."""
        operations = flops(self.size, batch.tokens, batch.pairs) / self.world
        sent = parameter_bytes(self.size, self.world, BYTES[self.dtype]) * len(batch.rows)
        sent += sum(attention_bytes(self.size, r.plan, rank, self.dtype) for r in batch.rows)
        compute = operations / (self.peak.tflops * 1e12)
        link = None if self.gbps is None else sent / (self.gbps * 1e9)
        return {
            "flop": operations,
            "bytes_sent": sent,
            "peak_tflops": self.peak.tflops,
            "peak_is": self.peak.source,
            "compute_s": compute,
            "links_s": link,
            "bound": "computation" if link is None or compute >= link else "links",
        }


def roofline_line(line: dict[str, Any], seconds: float) -> str:
    """The same for people, beside the measured seconds of a step."""
    links = "links unknown" if line["links_s"] is None else f"{line['links_s']:.3g} s of links"
    return (
        f"roofline of a rank's step: {line['flop'] / 1e12:.3g} TFLOP at {line['peak_tflops']:.3g} "
        f"TFLOP/s ({line['peak_is']}) = {line['compute_s']:.3g} s; "
        f"{line['bytes_sent'] / 1e6:.3g} MB sent, {links}; "
        f"bound by {line['bound']}; measured {seconds:.3g} s"
    )
