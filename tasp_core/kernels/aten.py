"""Kernel `aten` on a CPU: torch's own flash kernel, for all float dtypes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..lowering.program import Call
from .kernel import Kernel, Triple
from .views import batches


class AtenCpu(Kernel):
    """torch's CPU flash kernel; sequences of one shape at even distances run as one batch."""

    name = "aten"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        value_dim = v.shape[-1]
        q, k, v = _equal_dims(q, k, v)
        outs, lses = [], []
        for rows, keys, back in batches(call):
            out, lse = op(rows(q), keys(k), keys(v), 0.0, call.causal, scale=scale)
            outs.append(back(out)[..., :value_dim])
            lses.append(back(lse[..., None])[..., 0])
        return _cat1(outs), _cat1(lses)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        scale: float,
    ) -> Triple:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        key_dim, value_dim = q.shape[-1], v.shape[-1]
        q, k, v, dout, out = _equal_dims(q, k, v, dout, out)
        grads = []
        for rows, keys, back in batches(call):
            row_lse = rows(lse[..., None])[..., 0]
            dq, dk, dv = op(
                rows(dout),
                rows(q),
                keys(k),
                keys(v),
                rows(out),
                row_lse,
                0.0,
                call.causal,
                scale=scale,
            )
            dq, dk = (back(x)[..., :key_dim] for x in (dq, dk))
            grads.append((dq, dk, back(dv)[..., :value_dim]))
        return _cat(grads)


def _equal_dims(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Zero-padded to one head dim, a multiple of `multiple`: scores and output do not change.

    The head dim is made innermost in memory where it is not: flash kernels take that for granted.
    """
    size = -(-max(x.shape[-1] for x in tensors) // multiple) * multiple
    rows = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    return tuple(x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in rows)


def _cat1(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cat(parts: list[Triple]) -> Triple:
    dq, dk, dv = (_cat1(list(column)) for column in zip(*parts, strict=True))
    return dq, dk, dv
