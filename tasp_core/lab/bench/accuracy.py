"""Run a plan on real ranks, forward and backward, and compare it with attention in float64 on one device.

The command `run`, the demo and the tests share `verify`: nothing is reported before it is compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...costs.bytes import RowBytes, wire_bytes
from ...kernels.kernel import Kernel
from ...kernels.reference import Math, oracle
from ...kernels.resolve import resolve
from ...lowering.lower import lower
from ...planning.plan import Plan
from ...runtime.attention import attention
from ...runtime.launch import launch
from ...runtime.sharding import shard, unshard
from ...sequence.documents import Documents

NAMES = ("out", "lse", "dq", "dk", "dv")
FLOOR_ULP = 8  # roundings of the largest value: an error below them is always within its limit


@dataclass(frozen=True)
class Inputs:
    """Global q [T, H, D], k [T, K, D], v [T, K, E] and the output's gradient dout [T, H, E].

    T tokens, H query heads, K key/value heads, D and E head dims.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(
        cls,
        tokens: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Inputs:
        """Standard normal values, seeded."""
        generator = torch.Generator().manual_seed(seed)
        sizes = (heads, kv_heads, kv_heads, heads)
        return cls(
            *(torch.randn(tokens, n, head_dim, generator=generator).to(dtype) for n in sizes)
        )

    def to(self, device: torch.device) -> Inputs:
        """These inputs on a device."""
        return Inputs(*(x.to(device) for x in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, dout."""
        return self.q, self.k, self.v, self.dout


def verify(
    plan: Plan,
    inputs: Inputs,
    *,
    kernel: str = "auto",
    timeout_s: float = 120.0,
    reference: Reference | None = None,
) -> tuple[Errors, list[float]]:
    """Run the plan on newly forked ranks.

    Args:
        reference: of these inputs, where it is already known.

    Returns:
        Errors against the reference, and each rank's seconds of forward and backward pass.
    """
    reference = reference or Reference(inputs, plan.docs, kernel)
    if plan.ranks == 1:
        results = [run_rank(0, None, plan, inputs, kernel)]
    else:
        results = launch(run_rank, plan.ranks, plan, inputs, kernel, timeout_s=timeout_s)
    pieces, seconds = zip(*results, strict=True)
    return reference.errors(pieces, plan), [*seconds]


def run_rank(
    rank: int, group: Any, plan: Plan, inputs: Inputs, kernel: str | Kernel = "auto"
) -> tuple[list[Tensor], float]:
    """One rank's out, lse, dq, dk, dv, and the seconds of its forward and backward pass."""
    q, k, v, dout = (shard(x, plan, rank) for x in inputs.tensors())
    for x in (q, k, v):
        x.requires_grad_()
    if plan.ranks > 1:
        dist.barrier(group=group)
    start = time.perf_counter()
    out, lse = attention(q, k, v, plan, group, kernel=kernel, return_lse=True)
    out.backward(dout)
    seconds = time.perf_counter() - start
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (q, k, v)]
    return [out.detach(), lse, *grads], seconds


class Reference:
    """Attention in float64 and by a plain kernel, both on one device, to compare many plans with.

    Under a window or slices the plain kernel is `math` in the inputs' dtype: no other takes one.

    Args:
        kernel: the plain kernel's name. backward: whether gradients are compared too.
    """

    def __init__(
        self, inputs: Inputs, docs: Documents, kernel: str = "auto", *, backward: bool = True
    ) -> None:
        q, k, v, dout = inputs.tensors()
        out_grad = dout if backward else None
        self.exact = oracle(q, k, v, docs, dout=out_grad)
        masked = docs.window is not None or docs.slices is not None
        plain_kernel = (
            Math(docs.window, docs.slices) if masked else resolve(kernel, q.device.type, q.dtype)
        )
        plain_results = oracle(q, k, v, docs, dout=out_grad, kernel=plain_kernel)
        self.names = NAMES if backward else NAMES[:2]
        self.plain_errors, self.limits = {}, {}
        for name in self.names:
            exact = self.exact[name]
            self.plain_errors[name] = _largest(_gap(plain_results[name], exact))
            eps, finite = torch.finfo(plain_results[name].dtype).eps, exact[exact.isfinite()]
            self.limits[name] = max(2 * self.plain_errors[name], FLOOR_ULP * eps * _largest(finite))

    def errors(self, pieces: Sequence[Sequence[Tensor]], plan: Plan) -> Errors:
        """Errors of a plan's results: out, lse, dq, dk, dv of each rank."""
        ours = {}
        for i, name in enumerate(self.names):
            result = unshard([p[i] for p in pieces], plan)
            ours[name] = _largest(_gap(result, self.exact[name]))
        return Errors(ours, self.plain_errors, self.limits)

    def own_errors(self, pieces: Sequence[Tensor], plan: Plan, rank: int, group: Any) -> Errors:
        """The same, inside a running group: every rank gives its own results and gets all ranks' errors."""
        gaps = [
            _largest(_gap(x, shard(self.exact[name], plan, rank).to(x.device)))
            for name, x in zip(self.names, pieces, strict=False)
        ]
        worst = torch.tensor(gaps, dtype=torch.float64, device=pieces[0].device)
        worst[worst.isnan()] = torch.inf  # MAX over ranks is not defined for NaN
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        ours = dict(zip(self.names, worst.tolist(), strict=True))
        return Errors(ours, self.plain_errors, self.limits)


def _gap(x: Tensor, exact: Tensor) -> Tensor:
    """Difference from the exact values; 0 where both are -inf, the log-sum-exp of no key at all."""
    return torch.where(x == exact, 0.0, x.double() - exact)


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


@dataclass(frozen=True)
class Errors:
    """Largest absolute errors against the float64 reference, by the tensor's name.

    Attributes:
        ours: of the plan's results. plain: of the same kernel on one device.
        limit: twice `plain`, or 8 roundings of the largest value where that is more.
    """

    ours: dict[str, float]
    plain: dict[str, float]
    limit: dict[str, float]

    @property
    def ok(self) -> bool:
        """Whether every error is within its limit (NaN is not)."""
        return all(self.ours[n] <= self.limit[n] for n in self.limit)

    @property
    def ratio(self) -> float:
        """The largest error over half its limit, which is the plain kernel's error unless that is tiny."""
        pairs = [(self.ours[n], limit / 2) for n, limit in self.limit.items() if limit > 0]
        return max((a / b for a, b in pairs), default=0.0)


def as_dict(errors: Errors) -> dict[str, Any]:
    """Errors for a result file."""
    return {**asdict(errors), "ok": errors.ok, "ratio": errors.ratio}


def sent_bytes(
    plan: Plan, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, list[int]]:
    """Bytes each rank sends, by rank, in the forward and the backward pass; from the lowered programs."""
    row = RowBytes.of(heads, kv_heads, head_dim, dtype.itemsize)
    return {
        name: [
            wire_bytes(lower(plan, rank, backward=backward), row, sent=True, backward=backward)
            for rank in range(plan.ranks)
        ]
        for name, backward in (("forward", False), ("backward", True))
    }
