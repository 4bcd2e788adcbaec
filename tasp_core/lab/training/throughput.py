"""Throughput of a training step, and its roofline: operations, bytes sent, and what devices do at best.

Operations and bytes are counted from the model's size and from lowered plans. A device's peak is given,
quoted (PEAK_TFLOPS), or measured by one matrix product, and labelled so.
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


@dataclass(frozen=True)
class Throughput:
    """Costs of one run's steps.

    Attributes:
        gbps: GB/s that a rank can send; None: not known.
    """

    size: Size
    world_size: int
    dtype: str
    peak: Peak
    gbps: float | None

    @classmethod
    def of(cls, s: Settings, device: torch.device, world_size: int) -> Throughput:
        """The throughput of a run on `world_size` ranks."""
        dtype = getattr(torch, s.dtype)
        return cls(SIZES[s.size], world_size, s.dtype, peak(device, dtype, s.peak_tflops), s.gbps)

    def of_step(self, batch: Batch, seconds: float) -> dict[str, Any]:
        """Throughput of a step, as metrics.jsonl has it; tokens and documents are those of all ranks."""
        done = flops(self.size, batch.tokens, batch.pairs) / self.world_size / seconds
        return {
            "seconds": seconds,
            "tokens": batch.tokens,
            "targets": batch.targets,
            "documents": batch.documents,
            "mean_length": batch.tokens / batch.documents,
            "tokens_per_s_per_device": batch.tokens / seconds / self.world_size,
            "tflops_per_device": done / 1e12,
            "mfu": done / 1e12 / self.peak.tflops,
        }

    def roofline(self, batch: Batch, rank: int) -> dict[str, Any]:
        """Least seconds of a step, by computation and by links, and which of them is the bound."""
        operations = flops(self.size, batch.tokens, batch.pairs) / self.world_size
        sent = parameter_bytes(self.size, self.world_size, BYTES[self.dtype]) * len(batch.rows)
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
    """The roofline as text, with the measured seconds of a step."""
    links = "links unknown" if line["links_s"] is None else f"{line['links_s']:.3g} s of links"
    return (
        f"roofline of a rank's step: {line['flop'] / 1e12:.3g} TFLOP at {line['peak_tflops']:.3g} "
        f"TFLOP/s ({line['peak_is']}) = {line['compute_s']:.3g} s; "
        f"{line['bytes_sent'] / 1e6:.3g} MB sent, {links}; "
        f"bound by {line['bound']}; measured {seconds:.3g} s"
    )


class Peak(NamedTuple):
    """The most TFLOP/s that a device does, and how that is known."""

    tflops: float
    source: str


def peak(device: torch.device, dtype: torch.dtype, given_tflops: float | None = None) -> Peak:
    """A device's peak: given, quoted for its name, or measured by a matrix product."""
    if given_tflops is not None:
        return Peak(given_tflops, "given")
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
    """Operations of a training step: 6 per weight and token, 12 x head dim per visible pair and query head.

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


def parameter_bytes(size: Size, world_size: int, itemsize: int) -> int:
    """Bytes that a rank sends for FSDP per step: weights are gathered twice, float32 gradients reduced."""
    return (2 * itemsize + 4) * size.parameters * (world_size - 1) // world_size
