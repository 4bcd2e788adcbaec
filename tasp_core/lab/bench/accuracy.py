"""Run a plan on real ranks, forward and backward, and hold it against the float64 oracle.

`verify` is what `run`, the demo and the tests share: nothing is reported before it is compared.
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
FLOOR_ULP = 8  # below so many roundings of the largest value, a ratio of errors says nothing


@dataclass(frozen=True)
class Inputs:
    """Global q [T, H, D], k [T, K, D], v [T, K, E] and the output's gradient dout [T, H, E]."""

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
        """The same on a device."""
        return Inputs(*(x.to(device) for x in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.dout


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


@dataclass(frozen=True)
class Errors:
    """Largest absolute errors against the float64 oracle, by name: ours, the plain kernel's, limits.

    The limit is twice the plain single-device kernel's own error, or 8 roundings of the largest
    value where that is more.
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
        """The worst of ours over the plain kernel's, where the latter is not below the floor."""
        pairs = [(self.ours[n], limit / 2) for n, limit in self.limit.items() if limit > 0]
        return max((a / b for a, b in pairs), default=0.0)


class Reference:
    """The oracle's and the plain kernel's results of one row, to hold many plans against.

    Under a window or slices the plain kernel is `math` in the inputs' dtype: no other takes one.

    Args:
        backward: whether gradients are judged too.
    """

    def __init__(
        self, inputs: Inputs, docs: Documents, kernel: str = "auto", *, backward: bool = True
    ) -> None:
        q, k, v, dout = inputs.tensors()
        out_grad = dout if backward else None
        self.exact = oracle(q, k, v, docs, dout=out_grad)
        masked = docs.window is not None or docs.slices is not None
        plain = (
            Math(docs.window, docs.slices) if masked else resolve(kernel, q.device.type, q.dtype)
        )
        self.plain = oracle(q, k, v, docs, dout=out_grad, kernel=plain)
        self.names = NAMES if backward else NAMES[:2]
        self.single, self.limits = {}, {}
        for name in self.names:
            exact = self.exact[name]
            self.single[name] = _largest(_gap(self.plain[name], exact))
            eps, finite = torch.finfo(self.plain[name].dtype).eps, exact[exact.isfinite()]
            self.limits[name] = max(2 * self.single[name], FLOOR_ULP * eps * _largest(finite))

    def errors(self, pieces: Sequence[Sequence[Tensor]], plan: Plan) -> Errors:
        """Errors of the ranks' pieces (out, lse, dq, dk, dv each)."""
        ours = {}
        for i, name in enumerate(self.names):
            whole = unshard([p[i] for p in pieces], plan)
            ours[name] = _largest(_gap(whole, self.exact[name]))
        return Errors(ours, self.single, self.limits)

    def own_errors(self, pieces: Sequence[Tensor], plan: Plan, rank: int, group: Any) -> Errors:
        """The same on every rank of a running group, each with its own pieces."""
        gaps = [
            _largest(_gap(x, shard(self.exact[name], plan, rank).to(x.device)))
            for name, x in zip(self.names, pieces, strict=False)
        ]
        worst = torch.tensor(gaps, dtype=torch.float64, device=pieces[0].device)
        worst[worst.isnan()] = torch.inf  # the largest of numbers and NaN is not defined
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        return Errors(dict(zip(self.names, worst.tolist(), strict=True)), self.single, self.limits)


def _gap(x: Tensor, exact: Tensor) -> Tensor:
    """Difference from the exact values; 0 where both are -inf, the log-sum-exp of no key at all."""
    return torch.where(x == exact, 0.0, x.double() - exact)


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def sent_bytes(
    plan: Plan, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, list[int]]:
    """Bytes each rank sends, forward and backward, read off the lowered programs."""
    row = RowBytes.of(heads, kv_heads, head_dim, dtype.itemsize)
    return {
        name: [
            wire_bytes(lower(plan, rank, backward=backward), row, sent=True, backward=backward)
            for rank in range(plan.ranks)
        ]
        for name, backward in (("forward", False), ("backward", True))
    }


def verify(
    plan: Plan,
    inputs: Inputs,
    *,
    kernel: str = "auto",
    timeout_s: float = 120.0,
    judge: Reference | None = None,
) -> tuple[Errors, list[float]]:
    """Run the plan on freshly forked ranks; errors against the oracle, seconds of each rank."""
    judge = judge or Reference(inputs, plan.docs, kernel)
    if plan.ranks == 1:
        answers = [run_rank(0, None, plan, inputs, kernel)]
    else:
        answers = launch(run_rank, plan.ranks, plan, inputs, kernel, timeout_s=timeout_s)
    return judge.errors([a[0] for a in answers], plan), [a[1] for a in answers]


def as_dict(errors: Errors) -> dict[str, Any]:
    """Errors for a result file."""
    return {**asdict(errors), "ok": errors.ok, "ratio": errors.ratio}
