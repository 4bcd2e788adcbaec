"""Variable-length flash kernels of a GPU behind the kernel interface."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..lowering.program import Call
from .aten import _equal_dims
from .kernel import Kernel, Triple
from .views import Picker, aligned


class VarlenKernel(Kernel):
    """A variable-length flash kernel of a GPU; rows are copied end to end where they are not yet."""

    native_partials = True

    def __init__(self, varlen: Any) -> None:
        self.varlen, self.name = varlen, varlen.name

    def _fit(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Of one head dim that the kernel takes, every row and head of them at a 16-byte border.

        K and V are two slices of one row, [tokens, K, D + E]: of head dims such as 24 and 20 one of
        them is padded, which aligns it, and the other one may lie anywhere. Kernels load 16 bytes at
        once, of all of these; lse they read number by number.
        """
        padded = _equal_dims(*tensors, multiple=self.varlen.head_dim_multiple)
        return tuple(aligned(x) for x in padded)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor]:
        value_dim, pick = v.shape[-1], Picker.of(call, q.device)
        q, k, v = self._fit(q, k, v)
        q, k, v = pick.q(q), pick.k(k), pick.k(v)
        out, lse = self.varlen.forward(q, k, v, *pick.sizes, call.causal, scale)
        return pick.back_q(out)[..., :value_dim], pick.back_q(lse)

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
        key_dim, value_dim = q.shape[-1], v.shape[-1]
        pick = Picker.of(call, q.device)
        q, k, v, dout, out = self._fit(q, k, v, dout, out)
        dq, dk, dv = self.varlen.backward(
            *(pick.q(x) for x in (dout, q)),
            *(pick.k(x) for x in (k, v)),
            *(pick.q(x) for x in (out, lse)),
            *pick.sizes,
            call.causal,
            scale,
        )
        dq, dk, dv = pick.back_q(dq), pick.back_k(dk), pick.back_k(dv)
        return dq[..., :key_dim], dk[..., :key_dim], dv[..., :value_dim]
