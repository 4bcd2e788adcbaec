"""Memory of a training step on one rank: a model of it, and how to measure it.

The model (d width, q = width of q, k and v together, h SwiGLU's width, all in values per token; L layers):

    states       16 bytes per parameter / world size: weight, gradient, two moments
    gathered     two blocks and the root's weights, one block's gradient; nothing on one rank
    saved        L x (x d, q k v q, out d, lse) where attention is kept; L x d where all runs again;
                 L x (5 d + 2 q + 4 h, rotary 4 head dims, lse, 2) where nothing runs again (float32)
    kept KV      L x the rows that attention(keep_kv=True) keeps; none where all runs again: then one
                 block's at a time are kept, in place of KV receive buffers
    working      one block of the backward pass: 4 d + q + 6 h, and its own q k v, out where all runs again;
                 d + 3 h where nothing does
    logits       3 x vocabulary in float32, where that is more than a block

A rank holds 1/P of a packed sequence's tokens, so saved and working fall with P, the ranks that share a
sequence; states fall with the world size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import PlanError
from .llama import VOCABULARY, Size


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by purpose."""

    states: int
    gathered: int
    saved: int
    working: int

    @property
    def total(self) -> int:
        """At the peak of a step."""
        return self.states + self.gathered + self.saved + self.working


def predict(
    size: Size,
    tokens: int,
    world_size: int,
    recompute: str,
    itemsize: int = 4,
    *,
    kept_rows: int = 0,
) -> Memory:
    """The model's figures for a rank that holds `tokens` tokens.

    Args:
        kept_rows: with attention(keep_kv=True), the rows of KV it keeps: `tokens` +
            `lower(plan, rank, keep_kv=True).kv_buffer_rows`.

    Raises:
        PlanError: recompute is not none, kept or all.
    """
    d, h = size.dim, size.hidden
    head_dim = d // size.heads
    kv = 2 * size.kv_heads * head_dim
    q = d + kv
    root = 2 * VOCABULARY * d + d
    block = (size.parameters - root) // size.layers
    lse = 4 * size.heads
    modes = {  # saved of a block, in bytes; working, in values
        "none": ((5 * d + 2 * q + 4 * h + 4 * head_dim + 2) * itemsize + lse, d + 3 * h),
        "kept": ((2 * d + q) * itemsize + lse, 4 * d + q + 6 * h),
        "all": (d * itemsize, 5 * d + 2 * q + 6 * h),
    }
    if recompute not in modes:
        raise PlanError(f"recompute must be {', '.join(modes)}, got {recompute!r}")
    saved, working = modes[recompute]
    kept = 0 if recompute == "all" else kept_rows * kv * itemsize
    logits = 3 * VOCABULARY * 4
    alone = world_size == 1
    return Memory(
        16 * size.parameters // world_size,
        0 if alone else (2 * block + root) * itemsize + block * 4,
        size.layers * (tokens * saved + kept),
        tokens * max(working * itemsize, logits),
    )


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's weights and optimiser states."""
    values = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    return sum(_local(v).numel() * v.element_size() for v in values)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def measure_cpu(step: Callable[[], Any]) -> int:
    """Peak of the bytes that `step` allocates for CPU tensors, beyond those allocated before it."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        step()
    now = most = 0
    for event in profile.profiler.kineto_results.events():  # in order of time
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
