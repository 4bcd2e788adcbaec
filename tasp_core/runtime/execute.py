"""Run a Program: the forward and the backward pass of one rank, and the autograd function around them.

At each step: post the messages, compute on what has arrived, wait. Partial results are merged in
float32 (float64 for float64 inputs) in the program's fixed order, so equal inputs give equal bits.
Shapes: T this rank's tokens, H query heads, K key/value heads, D key dim, E value dim.

A remote query, i.e. a query of another rank, brings in one message what its pass needs: q, and in the
backward pass also dout, out and lse (its bits, since float32 must survive a bf16 message). It is unpacked
where it arrives, once.
Shapes: t own rows, g remote query rows, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import PlanError
from ..kernels.kernel import Kernel
from ..kernels.views import aligned, once
from ..lowering.buffers import Runs
from ..lowering.lower import lower
from ..lowering.program import Compute, Program, Step
from ..planning.plan import Plan
from ..schedules import EXCHANGES, OUT
from ..sequence.layouts import ranges
from .exchange import Exchange, Wait
from .merge import merge_
from .packing import Buffers
from .ulysses import Ulysses

MANY = 8  # from this number of runs on, one indexed operation instead of one for each run


@lru_cache(maxsize=128)
def program_of(
    plan: Plan, rank: int, *, backward: bool, keep_kv: bool = False, computes: bool = True
) -> Program:
    """The rank's lowered program, remembered; without `computes` its exchange alone."""
    program = lower(plan, rank, backward=backward, keep_kv=keep_kv)
    if computes:
        return program
    return replace(program, steps=tuple(s._replace(compute=None) for s in program.steps))


@dataclass(frozen=True)
class Context:
    """What both passes of a call share; plan and rank are those between groups.

    Attributes:
        exchange: the ranks that share a row; None: this process alone.
        ulysses: the exchange of heads for tokens around it, with `intra` above 1.
        signature: what all ranks must agree on before the backward pass exchanges anything.
    """

    plan: Plan
    rank: int
    exchange: Exchange | None
    kernel: Kernel
    scale: float
    grad_comm_dtype: torch.dtype | None = None
    keep_kv: bool = False
    ulysses: Ulysses | None = None
    signature: Mapping[str, str] | None = None

    def program(self, *, backward: bool) -> Program:
        return program_of(
            self.plan,
            self.rank,
            backward=backward,
            keep_kv=self.keep_kv,
            computes=self.kernel.computes,
        )

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """K and V of the rank as one buffer, so that they travel as one message, and room for others'.

        [T + arena rows, K, D + E].
        """
        rows = len(k) + self.program(backward=False).kv_buffer_rows
        kv = k.new_empty((rows, k.shape[1], k.shape[2] + v.shape[2]))
        torch.cat([k, v], dim=-1, out=kv[: len(k)])
        return kv

    def post(self, program: Program, t: int, step: Step, buffers: Buffers) -> Wait:
        self.kernel.finish()
        if self.exchange is None or self.plan.ranks == 1:
            return lambda: None
        if program.collective and t == 0:
            if program.collective != "all_gather" or step.sends or step.recvs:
                moved = " and messages" * bool(step.sends or step.recvs)
                raise PlanError(
                    f"rank {self.rank}, step 0: the executor knows one collective, all_gather, by itself; "
                    f"the plan asks for {program.collective!r}{moved}; prove it with tasp.check"
                )
            own, arena = buffers["kv"].split([program.tokens, program.kv_buffer_rows])
            return self.exchange.all_gather(own, arena, program.gathered_rows)
        if program.exchange == "p2p":
            return self.exchange.post(t, step.sends, step.recvs, buffers)
        if program.exchange == "all_to_all":
            return self.exchange.post_all_to_all(t, step.sends, step.recvs, buffers, program.kinds)
        raise PlanError(f"exchange must be one of {EXCHANGES}, got {program.exchange!r}")


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

    def __init__(self, compute: Compute, kv: Tensor, dtype: torch.dtype, dim: int):
        rows, index = kv[compute.low : compute.low + compute.count], compute.gather
        if index is not None:
            device = rows.device
            pick = once(index, "rows", device, lambda: torch.tensor(index, device=device))
            rows = rows.index_select(0, pick)
        self.rows = rows.to(dtype)
        self.k, self.v = self.rows[..., :dim], self.rows[..., dim:]


def run_forward(
    ctx: Context, q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One rank's forward pass.

    Args:
        q: [T, H, D]; k: [T, K, D]; v: [T, K, E]. kv: `ctx.pack(k, v)`, to be kept by the caller.

    Returns:
        out [T, H, E] and lse [T, H] in float32, or float64 for float64 inputs.
    """
    # kernels would read the memory behind k and v
    assert q.shape[1] % k.shape[1] == 0, (q.shape, k.shape)
    program = ctx.program(backward=False)
    dtype, dim = _compute_dtype(ctx, program, q), k.shape[-1]
    own, kv = program.tokens, ctx.pack(k, v) if kv is None else kv
    queries = Queries(program, [q], dtype)
    (q,) = queries.rows
    out = q.new_zeros((*q.shape[:2], v.shape[-1]), dtype=wide(q.dtype))
    # the rounding of lse is an error of every weight of its row, so it is kept in float64
    lse = torch.full_like(out[..., 0], -torch.inf, dtype=torch.float64)
    answers = out.new_empty((program.received_partial_rows, q.shape[1], v.shape[-1] + 1))
    buffers: Buffers = {"kv": kv, "answers": answers, **queries.buffers}
    untouched = True
    for t, step in enumerate(program.steps):
        queries.unpack(step, (out, 0.0), (lse, -torch.inf))
        if any(m.kind == OUT for m in step.sends):
            buffers["found"] = torch.cat([out[own:], lse[own:, :, None].to(out.dtype)], dim=-1)
        wait = ctx.post(program, t, step, buffers)
        compute = step.compute
        keys = _Keys(compute, kv, dtype, dim) if compute else None
        for call in compute.calls if compute else ():
            assert keys is not None
            part, part_lse = ctx.kernel.forward(q, keys.k, keys.v, call, ctx.scale)
            for runs in call.q_runs:
                for src, dst in _views(runs, q.device):
                    if untouched and runs.count.tolist() == [len(part)] == [len(out)]:
                        out, lse = part.to(out.dtype), part_lse.to(lse.dtype)
                    else:
                        _merge_rows(out, lse, dst, part[src], part_lse[src])
                    untouched = False
        wait()
        for s, d, n in zip(*(c.tolist() for c in step.merge), strict=True):
            found = answers[s : s + n]
            merge_(out[d : d + n], lse[d : d + n], found[..., :-1], found[..., -1])
    ctx.kernel.finish()
    return out[:own], lse[:own].to(out.dtype)


def _merge_rows(out: Tensor, lse: Tensor, dst: Any, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into rows `dst`, a slice or indices."""
    rows, row_lse = out[dst], lse[dst]
    merge_(rows, row_lse, part, part_lse)
    if not isinstance(dst, slice):
        out[dst], lse[dst] = rows, row_lse


def run_backward(
    ctx: Context,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One rank's backward pass.

    Args:
        dout, out: [T, H, E]; q: [T, H, D]; k: [T, K, D]; v: [T, K, E]; lse: [T, H], of all keys.
        kv: what the forward pass has left in `ctx.pack(k, v)`, with ctx.keep_kv.

    Returns:
        dq [T, H, D], dk [T, K, D], dv [T, K, E] in float32, or float64 for float64 inputs.
    """
    program = ctx.program(backward=True)
    dtype, dim = _compute_dtype(ctx, program, q), k.shape[-1]
    own, kv = program.tokens, ctx.pack(k, v) if kv is None else kv
    exact = wide(q.dtype)
    wire = ctx.grad_comm_dtype or exact
    queries = Queries(program, [q, dout, out, lse], dtype)
    q, dout, out, lse = queries.rows
    grad = kv.new_empty((own + program.remote_grad_rows, *kv.shape[1:]), dtype=exact)
    grad[:own] = 0
    dq = torch.zeros_like(q, dtype=exact)
    buffers: Buffers = {
        "kv": kv,
        **queries.buffers,
        "grad": grad,
        "landing": kv.new_empty((program.grad_receive_rows, *kv.shape[1:]), dtype=wire),
        "found": dq[own:],
        "answers": q.new_empty((program.received_partial_rows, *q.shape[1:]), dtype=wire),
    }
    for t, step in enumerate(program.steps):
        queries.unpack(step, (dq, 0.0))
        wait = ctx.post(program, t, step, buffers)
        for low, count in zip(step.clear.dst.tolist(), step.clear.count.tolist(), strict=True):
            grad[low : low + count] = 0
        if step.compute:
            keys = _Keys(step.compute, kv, dtype, dim)

            def part(call: Any, keys: _Keys = keys) -> tuple[Tensor, Tensor, Tensor]:
                return ctx.kernel.backward(dout, q, keys.k, keys.v, out, lse, call, ctx.scale)

            _contribute(step.compute, keys, part, dq, grad, dim)
        wait()
        _add_in_turn(grad, buffers["landing"], step.add)
        _add_in_turn(dq, buffers["answers"], step.merge)
    ctx.kernel.finish()
    return dq[:own], grad[:own, :, :dim], grad[:own, :, dim:]


def _compute_dtype(ctx: Context, program: Program, q: Tensor) -> torch.dtype:
    """One call a pass: the plain kernel as it is. Several: in a dtype in which parts add up exactly."""
    alone = (
        program.num_calls <= 1
        and not program.remote_query_rows
        and not program.received_partial_rows
    )
    return q.dtype if alone else ctx.kernel.partial_dtype(q.dtype)


def _contribute(
    compute: Compute,
    keys: _Keys,
    part: Callable[[Any], tuple[Tensor, Tensor, Tensor]],
    dq: Tensor,
    grad: Tensor,
    dim: int,
) -> None:
    """Add one step's dq, and its dk, dv to the rows of `grad` of the keys it has used."""
    runs, count = compute.grads, len(keys.rows)
    direct = len(runs) == 1 and len(runs[0].src) == 1 and int(runs[0].count[0]) == count
    if direct:
        start = int(runs[0].dst[0])
        target = grad[start : start + count]
    else:
        target = grad.new_zeros(keys.rows.shape)
    for call in compute.calls:
        dq_part, dk_part, dv_part = part(call)
        for one in call.q_runs:
            _add(dq, dq_part, one)
        for one in call.k_runs:
            _add(target[..., :dim], dk_part, one)
            _add(target[..., dim:], dv_part, one)
    for one in () if direct else runs:
        _add(grad, target, one)


def _no_autocast(x: Tensor) -> Any:
    """Passes choose their own dtypes; autocast would round what kernel `math` computes."""
    return torch.autocast(x.device.type, enabled=False)


class Attention(torch.autograd.Function):
    """Autograd around the two passes of a call; q, k, v are [t, H, D] or [t, B, H, D].

    A batch is more heads: every row follows the same plan. Each pass is one node of the graph, with
    all of its exchanges, and begins with a handshake: ranks that run backward passes in different
    orders are told so before they exchange.
    """

    @staticmethod
    def forward(ctx: Any, run: Context, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with _no_autocast(q):
            ulysses, exchange = run.ulysses, run.exchange
            if ulysses:
                assert exchange is not None
                exchange.finish_handshake()
                q, k, v = ulysses.queries(q), ulysses.keys(k), ulysses.keys(v)
            batch = q.shape[1:-2]
            q, k, v = (x.flatten(1, -2) for x in (q, k, v))
            q, kv = aligned(q), run.pack(k, v)
            out, lse = run_forward(run, q, k, v, kv)
            out = out.to(q.dtype)
            if exchange:
                exchange.finish_handshake()  # where a plan exchanges nothing, no wait has ended it
            ctx.run, ctx.batch = run, batch
            ctx.save_for_backward(q, k, v, out, lse, *[kv] * run.keep_kv)
            if batch:
                out, lse = out.unflatten(1, (*batch, -1)), lse.unflatten(1, (*batch, -1))
            if ulysses:
                out = ulysses.results(out)
                lse = ulysses.results(lse[..., None])[..., 0]
            ctx.mark_non_differentiable(lse)
            return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[None, Tensor, Tensor, Tensor]:
        run, ulysses = ctx.run, ctx.run.ulysses
        if run.exchange and run.signature:
            run.exchange.handshake(run.signature, begins=False)
        with _no_autocast(dout):
            q, k, v, out, lse, *kept = ctx.saved_tensors
            if ulysses:
                run.exchange.finish_handshake()
                dout = ulysses.queries(dout)
            grads = run_backward(run, aligned(dout.flatten(1, -2)), q, k, v, out, lse, *kept)
            if run.exchange:
                run.exchange.finish_handshake()
            dq, dk, dv = (
                g.to(x.dtype).unflatten(1, (*ctx.batch, -1))
                for g, x in zip(grads, (q, k, v), strict=True)
            )
            if ulysses:
                dq = ulysses.results(dq)
                dk, dv = ulysses.key_gradients(dk), ulysses.key_gradients(dv)
            return None, dq, dk, dv


class Queries:
    """Own rows of tensors [t, H, *] in `dtype`, and room for remote queries behind them.

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
        if not program.remote_query_rows and not program.sends_queries:
            return
        q = tensors[0]
        packed = torch.cat([_bits(x, q.dtype) for x in tensors], dim=-1)
        wire = packed.new_empty((own + program.remote_query_rows, *packed.shape[1:]))
        wire[:own] = packed
        self.buffers["q"] = wire
        self.widths = [_bits(x, q.dtype).shape[-1] for x in tensors]
        grown = [x.new_empty((len(wire), *x.shape[1:])) for x in self.rows]
        for x, mine in zip(grown, self.rows, strict=True):
            x[:own] = mine
        self.rows = grown

    def unpack(self, step: Step, *found: tuple[Tensor, float]) -> None:
        """Unpack the step's remote queries; their rows of each `found` tensor begin at the given value."""
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
