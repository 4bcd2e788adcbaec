"""Per-query rows of a pass: the rank's own, then those of guests from other ranks.

A guest brings in one message what its pass needs: q, and in the backward pass also dout, out and lse
(its bits, since float32 must survive a bf16 message). It is unpacked where it arrives, once.
Shapes: t own rows, g guest rows, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .program import Program, Step


class Queries:
    """Own rows of tensors [t, H, *] in `dtype`, and room for guests behind them.

    Args:
        tensors: q, or (q, dout, out, lse); lse [t, H] keeps its dtype.

    Attributes:
        rows: the same tensors, [t + g, H, *].
        buffers: {"q": what travels, [t + g, H, W] in q's dtype}; empty where no query moves.
    """

    def __init__(self, program: Program, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.buffers: dict[str, Tensor] = {}
        own = program.tokens
        self.rows = [x if x.dim() == 2 else x.to(dtype) for x in tensors]
        if not program.guest_rows and not program.sends_queries:
            return
        q = tensors[0]
        packed = torch.cat([_bits(x, q.dtype) for x in tensors], dim=-1)
        wire = packed.new_empty((own + program.guest_rows, *packed.shape[1:]))
        wire[:own] = packed
        self.buffers["q"] = wire
        self.widths = [_bits(x, q.dtype).shape[-1] for x in tensors]
        grown = [x.new_empty((len(wire), *x.shape[1:])) for x in self.rows]
        for x, mine in zip(grown, self.rows, strict=True):
            x[:own] = mine
        self.rows = grown

    def welcome(self, step: Step, *found: tuple[Tensor, float]) -> None:
        """Unpack the step's guests; their rows of each `found` tensor begin at the given value."""
        for low, count in zip(step.fresh.src.tolist(), step.fresh.count.tolist(), strict=True):
            here = slice(low, low + count)
            parts = self.buffers["q"][here].split(self.widths, -1)
            for x, part in zip(self.rows, parts, strict=True):
                x[here] = part.contiguous().view(x.dtype)[..., 0] if x.dim() == 2 else part
            for x, value in found:
                x[here] = value


def _bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[t, H, *] as it is; lse [t, H] as the same bits in `dtype`, [t, H, n]."""
    return x[..., None].contiguous().view(dtype) if x.dim() == 2 else x
