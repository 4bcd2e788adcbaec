"""Run a Program: the forward and the backward pass of one rank, and the autograd function around them.

At each step: post the messages, compute on what has arrived, wait. Partial results are merged in
float32 (float64 for float64 inputs) in the program's fixed order, so equal inputs give equal bits.
Shapes: T this rank's tokens, H query heads, K key/value heads, D key dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import Kernel
from .layout import ranges
from .lower import ACC, ARENA, LANDING, OWN, Compute, Program, Runs, Step, lower
from .merge import merge_
from .plan import Plan
from .transport import Exchange, Wait
from .views import once

program_of = lru_cache(maxsize=128)(lower)
MANY = 8  # from this number of runs on, one indexed operation instead of one for each run


@dataclass(frozen=True)
class Context:
    """What both passes of a call share; plan and rank are those between groups."""

    plan: Plan
    rank: int
    exchange: Exchange | None
    kernel: Kernel
    scale: float
    grad_comm_dtype: torch.dtype | None = None

    def program(self, *, backward: bool) -> Program:
        return program_of(self.plan, self.rank, backward=backward)

    def post(self, program: Program, t: int, step: Step, buffers: dict[str, Tensor]) -> Wait:
        if self.exchange is None:
            return lambda: None
        if program.collective and t == 0:
            return self.exchange.all_gather(buffers[OWN], buffers[ARENA], program.gathered_rows)
        if self.plan.schedule.exchange == "all_to_all":
            return self.exchange.post_all_to_all(t, step, buffers)
        return self.exchange.post(t, step, buffers)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of accumulators."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _views(runs: Runs, device: torch.device) -> Iterator[tuple[Any, Any]]:
    """(src, dst) row selections of runs: slices, or one pair of indices where runs are many."""
    if len(runs.src) < MANY:
        for s, d, n in zip(*(c.tolist() for c in runs), strict=True):
            yield slice(s, s + n), slice(d, d + n)
        return

    def index(low: np.ndarray) -> Tensor:
        return torch.from_numpy(ranges(low, low + runs.count)[0]).to(device)

    yield (
        once(runs.src, "rows", device, lambda: index(runs.src)),
        once(runs.dst, "rows", device, lambda: index(runs.dst)),
    )


def _add(target: Tensor, source: Tensor, runs: Runs) -> None:
    """target[dst] += source[src]; the runs' dst rows do not overlap."""
    for src, dst in _views(runs, target.device):
        target[dst] += source[src]


def _add_in_turn(target: Tensor, source: Tensor, runs: Runs) -> None:
    """target[dst] += source[src], run after run: several may add to the same rows."""
    for s, d, n in zip(*(c.tolist() for c in runs), strict=True):
        target[d : d + n] += source[s : s + n]


class _Keys:
    """The key and value rows of one compute step, gathered and widened as far as needed."""

    def __init__(self, compute: Compute, buffers: dict[str, Tensor], dtype: torch.dtype, dim: int):
        rows = buffers[compute.buffer][compute.low : compute.low + compute.count]
        self.gather, index = None, compute.gather
        if index is not None:
            device = rows.device
            self.gather = once(index, "rows", device, lambda: torch.tensor(index, device=device))
            rows = rows.index_select(0, self.gather)
        self.rows = rows.to(dtype)
        self.k, self.v = self.rows[..., :dim], self.rows[..., dim:]


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """K and V of a rank as one buffer [T, K, D + E], so that they travel as one message."""
    return torch.cat([k, v], dim=-1)


def run_forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One rank's forward pass.

    Args:
        q: [T, H, D]; k: [T, K, D]; v: [T, K, E].

    Returns:
        out [T, H, E] and lse [T, H] in float32, or float64 for float64 inputs.
    """
    program = ctx.program(backward=False)
    dtype, dim = _compute_dtype(ctx, program, q), k.shape[-1]
    own = _pack(k, v)
    buffers = {OWN: own, ARENA: own.new_empty((program.arena_rows, *own.shape[1:]))}
    q = q.to(dtype)
    out = q.new_zeros((*q.shape[:2], v.shape[-1]), dtype=wide(q.dtype))
    # the rounding of lse is an error of every weight of its row, so it is kept in float64
    lse = torch.full_like(out[..., 0], -torch.inf, dtype=torch.float64)
    untouched = True
    for t, step in enumerate(program.steps):
        wait = ctx.post(program, t, step, buffers)
        compute = step.compute
        keys = _Keys(compute, buffers, dtype, dim) if compute and compute.calls else None
        for call in compute.calls if compute else ():
            assert keys is not None
            part, part_lse = ctx.kernel.forward(q, keys.k, keys.v, call, ctx.scale)
            for runs in call.q_runs:
                for src, dst in _views(runs, q.device):
                    if untouched and runs.count.tolist() == [len(part)] == [len(out)]:
                        out, lse = part.to(out.dtype), part_lse.to(lse.dtype)
                    elif isinstance(dst, slice):
                        merge_(out[dst], lse[dst], part[src], part_lse[src])
                    else:
                        rows, row_lse = out[dst], lse[dst]
                        merge_(rows, row_lse, part[src], part_lse[src])
                        out[dst], lse[dst] = rows, row_lse
                    untouched = False
        wait()
    return out, lse.to(out.dtype)


def run_backward(
    ctx: Context, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One rank's backward pass.

    Args:
        dout, out: [T, H, E]; q: [T, H, D]; k: [T, K, D]; v: [T, K, E]; lse: [T, H], of all keys.

    Returns:
        dq [T, H, D], dk [T, K, D], dv [T, K, E] in float32, or float64 for float64 inputs.
    """
    program = ctx.program(backward=True)
    dtype, dim = _compute_dtype(ctx, program, q), k.shape[-1]
    own = _pack(k, v)
    wire = ctx.grad_comm_dtype or wide(q.dtype)
    shape = own.shape[1:]
    grad = own.new_zeros(own.shape, dtype=wide(q.dtype))
    buffers = {
        OWN: own,
        ARENA: own.new_empty((program.arena_rows, *shape)),
        ACC: own.new_empty((program.acc_rows, *shape), dtype=wide(q.dtype)),
        LANDING: own.new_empty((program.landing_rows, *shape), dtype=wire),
    }
    dout, q, out = dout.to(dtype), q.to(dtype), out.to(dtype)
    dq = torch.zeros_like(q, dtype=grad.dtype)
    for t, step in enumerate(program.steps):
        on_wire = buffers if wire == grad.dtype else {**buffers, ACC: buffers[ACC].to(wire)}
        wait = ctx.post(program, t, step, on_wire)
        if step.compute:
            keys = _Keys(step.compute, buffers, dtype, dim)

            def part(call: Any, keys: _Keys = keys) -> tuple[Tensor, Tensor, Tensor]:
                return ctx.kernel.backward(dout, q, keys.k, keys.v, out, lse, call, ctx.scale)

            _contribute(step.compute, keys, part, dq, grad, buffers[ACC], dim)
        wait()
        _add_in_turn(grad, buffers[LANDING], step.add_own)
        _add_in_turn(buffers[ACC], buffers[LANDING], step.add_acc)
    return dq, grad[..., :dim], grad[..., dim:]


def _compute_dtype(ctx: Context, program: Program, q: Tensor) -> torch.dtype:
    """One call a pass: the plain kernel as it is. Several: in a dtype in which parts add up exactly."""
    return q.dtype if program.num_calls <= 1 else ctx.kernel.partial_dtype(q.dtype)


def _contribute(
    compute: Compute,
    keys: _Keys,
    part: Callable[[Any], tuple[Tensor, Tensor, Tensor]],
    dq: Tensor,
    grad: Tensor,
    acc: Tensor,
    dim: int,
) -> None:
    """Add one step's dq; put its dk, dv into the own gradient or, for shares that go home, into acc."""
    runs = compute.grads
    direct = runs is not None and len(runs.src) == 1
    if runs is None:
        rows = grad
    elif direct:
        start = int(runs.dst[0])
        rows = acc[start : start + compute.count].zero_()
    else:
        rows = acc.new_zeros((compute.count, *acc.shape[1:]))
    target = rows if keys.gather is None else rows.new_zeros(keys.rows.shape)
    for call in compute.calls:
        dq_part, dk_part, dv_part = part(call)
        for one in call.q_runs:
            _add(dq, dq_part, one)
        for one in call.k_runs:
            _add(target[..., :dim], dk_part, one)
            _add(target[..., dim:], dv_part, one)
    if keys.gather is not None:
        rows[keys.gather] += target
    if runs is not None and not direct:
        for src, dst in _views(runs, acc.device):
            acc[dst] = rows[src]


class Attention(torch.autograd.Function):
    """Autograd around the two passes."""

    @staticmethod
    def forward(ctx: Any, run: Context, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = run_forward(run, q, k, v)
        out = out.to(q.dtype)
        ctx.run = run
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[None, Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = run_backward(ctx.run, dout, q, k, v, out, lse)
        dq, dk, dv = (g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))
        return None, dq, dk, dv
