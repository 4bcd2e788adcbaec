"""A byte-level Llama of any size: rotary positions, RMSNorm, SwiGLU, grouped-query attention.

The model knows nothing of ranks: it takes its tokens' positions and a function that attends. The smallest
one trains in the demo, and is complete enough that a wrong position or gradient shows in the loss.
Shapes: T tokens, D model width, H heads, K kv heads, F hidden width of SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from ...errors import PlanError
from ...runtime.checkpointing import keep_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Recompute = Literal["none", "kept", "all"]
VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Size:
    """Widths of a model; `hidden` is that of SwiGLU."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int

    @property
    def parameters(self) -> int:
        """Parameters in all.

        >>> SIZES["7b"].parameters       # Llama's 6.74e9 less its larger vocabulary
        6478368768
        """
        head_dim = self.dim // self.heads
        attention = self.dim * (2 * self.heads + 2 * self.kv_heads) * head_dim
        block = attention + 3 * self.dim * self.hidden + 2 * self.dim
        return self.layers * block + 2 * VOCABULARY * self.dim + self.dim


SIZES = {
    "tiny": Size(64, 2, 4, 2, 128),
    "15m": Size(288, 12, 6, 6, 1152),
    "110m": Size(768, 12, 12, 4, 3072),
    "350m": Size(1024, 24, 16, 8, 3584),
    "1b": Size(2048, 16, 32, 8, 8192),
    "3b": Size(3072, 28, 24, 8, 8192),
    "7b": Size(4096, 32, 32, 32, 11008),
}


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary embedding of x [T, H, D] at positions [T]."""
    half = x.shape[-1] // 2
    rate = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = (positions[:, None].double() * rate).to(x.dtype)[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and added to its input."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = 2 * dim if hidden is None else hidden
        self.sizes = (heads, kv_heads, kv_heads)
        self.head_dim = dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.down = (
            nn.Linear(dim, 2 * hidden, bias=False),
            nn.Linear(hidden, dim, bias=False),
        )

    def heads(self, x_TD: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k [T, K, D], v [T, K, D] of normed inputs, q and k rotated."""
        packed = self.qkv(self.norm1(x_TD)).unflatten(-1, (-1, self.head_dim))
        q, k, v = packed.split(self.sizes, dim=1)
        # v is copied: a view would keep all of `packed` alive
        return rotate(q, positions), rotate(k, positions), v.contiguous()

    def forward(self, x_TD: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x_TD = x_TD + self.out(attend(*self.heads(x_TD, positions)).flatten(1))
        gate_TF, up_TF = self.up(self.norm2(x_TD)).chunk(2, dim=-1)
        return x_TD + self.down(silu(gate_TF) * up_TF)


class TinyLlama(nn.Module):
    """`layers` blocks over byte tokens; forward(ids [T], positions [T], attend) -> logits [T, 256].

    Args:
        recompute: what is computed again in the backward pass. "none": nothing; "kept": blocks without
            attention and its messages, whose results are kept; "all": these too.
    """

    def __init__(
        self,
        dim: int = 64,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        hidden: int | None = None,
        *,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)
        self.recompute = recompute

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x_TD = self.embed(ids)
        for block in self.blocks:
            x_TD = self._run(block)(x_TD, positions, attend)
        return self.head(self.norm(x_TD))

    def _run(self, block: nn.Module) -> Callable[..., Any]:
        if self.recompute == "none":
            return block
        options: dict[str, Any] = {"context_fn": keep_attention} if self.recompute == "kept" else {}
        return partial(checkpoint, block, use_reentrant=False, **options)


def llama(size: str, recompute: Recompute = "none") -> TinyLlama:
    """A model of a named size.

    Raises:
        PlanError: a size that is not in SIZES.
    """
    if size not in SIZES:
        raise PlanError(f"no model size {size!r}; known are {', '.join(SIZES)}")
    return TinyLlama(**vars(SIZES[size]), recompute=recompute)


@torch.no_grad()
def init_weights(model: TinyLlama, seed: int) -> None:
    """Seeded weights, one tensor after the other: the same however they are sharded."""
    depth = (2 * len(model.blocks)) ** -0.5
    for i, (name, w) in enumerate(model.named_parameters()):
        if w.dim() == 1:
            w.fill_(1.0)
            continue
        generator = torch.Generator().manual_seed(seed * 10007 + i)
        full = torch.randn(w.shape, generator=generator) * 0.02
        if name.endswith(("out.weight", "down.weight")):
            full *= depth  # what is added to the stream does not grow with the number of layers
        full = full.to(w.device)
        if isinstance(w, DTensor):
            full = distribute_tensor(full, w.device_mesh, w.placements, src_data_rank=None)
        w.copy_(full)
