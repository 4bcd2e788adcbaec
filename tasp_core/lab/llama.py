"""A tiny byte-level Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention.

It knows nothing of ranks: it is given its tokens' positions and a function that attends. Small
enough to train in a demo, complete enough that a wrong position or gradient shows in the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary embedding of x [T, H, D] at positions [T]."""
    half = x.shape[-1] // 2
    rate = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = (positions[:, None].double() * rate).to(x.dtype)[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and added to its input."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.sizes = (heads, kv_heads, kv_heads)
        self.head_dim = dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.down = (
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(2 * dim, dim, bias=False),
        )

    def heads(self, x_TD: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k [T, K, D], v [T, K, D] of normed inputs, q and k rotated."""
        packed = self.qkv(self.norm1(x_TD)).unflatten(-1, (-1, self.head_dim))
        q, k, v = packed.split(self.sizes, dim=1)
        return rotate(q, positions), rotate(k, positions), v

    def forward(self, x_TD: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x_TD = x_TD + self.out(attend(*self.heads(x_TD, positions)).flatten(1))
        gate, up = self.up(self.norm2(x_TD)).chunk(2, dim=-1)
        return x_TD + self.down(silu(gate) * up)


class TinyLlama(nn.Module):
    """`layers` blocks over byte tokens; forward(ids [T], positions [T], attend) -> logits [T, 256]."""

    def __init__(self, dim: int = 64, layers: int = 2, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, 256, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x_TD = self.embed(ids)
        for block in self.blocks:
            x_TD = block(x_TD, positions, attend)
        return self.head(self.norm(x_TD))
