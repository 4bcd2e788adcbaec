"""Run a Program: the forward and the backward pass of one rank, and the autograd function around them.

An executor runs a program's instructions in the order of the list. Each kind of instruction is one method
below; the list alone decides when it runs. Partial results are merged in float32 (float64 for float64
inputs) in that order, so equal inputs give equal bits.

A remote query, i.e. a query of another rank, arrives in one message with all that its pass needs: q, and
in the backward pass also dout, out and lse. The message has q's dtype; lse travels as its bits, so that a
bf16 message does not round it. UNPACK takes the message apart.

Shapes: T this rank's tokens, B batch, H query heads, K key/value heads, D key dim, E value dim, g rows of
remote queries, W values per head of a remote query's message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import PlanError
from ..kernels.kernel import Kernel
from ..kernels.views import aligned, device_cached
from ..lowering.buffers import Runs
from ..lowering.lower import lower
from ..lowering.program import (
    Add,
    AllGather,
    Attend,
    Free,
    Instruction,
    Merge,
    Message,
    Pack,
    Post,
    Program,
    Recv,
    Send,
    Unpack,
    Wait,
    Zero,
)
from ..planning.plan import Plan
from ..schedules import EXCHANGES
from ..sequence.layouts import ranges
from . import dependencies
from .exchange import Exchange
from .merge import merge_
from .packing import Buffers
from .ulysses import Ulysses

MANY = 8  # from so many runs on, rows are indexed in one operation instead of run by run


@lru_cache(maxsize=128)
def program_of(
    plan: Plan,
    rank: int,
    *,
    backward: bool,
    keep_kv: bool = False,
    computes: bool = True,
    ahead: int = 0,
) -> Program:
    """The rank's lowered program, cached; without `computes` its exchange alone, no ATTEND."""
    program = lower(plan, rank, backward=backward, keep_kv=keep_kv, ahead=ahead)
    if computes:
        return program
    rest = (i for i in program.instructions if not isinstance(i, Attend))
    return replace(program, instructions=tuple(rest))


@dataclass(frozen=True)
class Context:
    """What both passes of a call share.

    Attributes:
        plan, rank: the context-parallel plan, and this rank's number in it.
        exchange: the ranks that share a packed sequence; None: this process alone.
        ulysses: the exchange of heads for tokens around it, with `intra` above 1.
        signature: what all ranks must agree on before the backward pass exchanges anything.
        by_dependencies: whether instructions run as soon as what they depend on has ended
            (dependencies.py), and not step by step.
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
    by_dependencies: bool = False

    def program(self, *, backward: bool) -> Program:
        return program_of(
            self.plan,
            self.rank,
            backward=backward,
            keep_kv=self.keep_kv,
            computes=self.kernel.computes,
            ahead=int(self.by_dependencies),
        )

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """The buffer `kv`, [T + received rows, K, D + E]: the rank's own rows, then room for received ones.

        K and V lie side by side, so that they travel as one message.
        """
        rows = len(k) + self.program(backward=False).kv_buffer_rows
        kv = k.new_empty((rows, k.shape[1], k.shape[2] + v.shape[2]))
        torch.cat([k, v], dim=-1, out=kv[: len(k)])
        return kv

    def post(
        self,
        instruction: Post | AllGather,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        buffers: Buffers,
    ) -> Callable[[], None]:
        """Start what POST or ALL_GATHER starts; the returned function waits for it.

        Raises:
            PlanError: an exchange that is not known.
        """
        if self.exchange is None or self.plan.ranks == 1:
            return lambda: None
        step = instruction.step
        if isinstance(instruction, AllGather):
            kv, own, rows = buffers["kv"], instruction.tokens, instruction.rows
            gathered = kv[own : own + instruction.ranks * rows]
            return self.exchange.all_gather(kv[:own], gathered, rows)
        if instruction.exchange == "p2p":
            return self.exchange.post(step, sends, recvs, buffers)
        if instruction.exchange == "all_to_all":
            return self.exchange.post_all_to_all(step, sends, recvs, buffers, instruction.kinds)
        raise PlanError(f"exchange must be one of {EXCHANGES}, got {instruction.exchange!r}")


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results of tensors of `dtype` are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _views(runs: Runs, device: torch.device) -> Iterator[tuple[Any, Any]]:
    """(src, dst) row selections: a pair of slices per run, or one pair of indices where runs are many."""
    if len(runs.src) < MANY:
        for s, d, n in zip(*(c.tolist() for c in runs), strict=True):
            yield slice(s, s + n), slice(d, d + n)
        return

    def index(low: Any) -> Tensor:
        return torch.from_numpy(ranges(low, low + runs.count)[0]).to(device)

    yield (
        device_cached(runs.src, "rows", device, lambda: index(runs.src)),
        device_cached(runs.dst, "rows", device, lambda: index(runs.dst)),
    )


def _add(target: Tensor, source: Tensor, runs: Runs) -> None:
    """target[dst] += source[src]; the runs' dst rows do not overlap."""
    for src, dst in _views(runs, target.device):
        target[dst] += source[src]


def _slices(rows: Runs) -> Iterator[tuple[slice, slice]]:
    """(src, dst) of each run, in their order."""
    for s, d, n in zip(*(c.tolist() for c in rows), strict=True):
        yield slice(s, s + n), slice(d, d + n)


class _Keys:
    """The KV rows of one ATTEND: read in place, or gathered where `attend.gather` lists rows.

    Args:
        kv: the buffer, [rows, K, D + E].
        dtype: to compute in.
        dim: D.

    Attributes:
        rows: [s, K, D + E]; k [s, K, D] and v [s, K, E] are views of it.
    """

    def __init__(self, attend: Attend, kv: Tensor, dtype: torch.dtype, dim: int):
        rows, index = kv[attend.low : attend.low + attend.count], attend.gather
        if index is not None:
            device = rows.device
            pick = device_cached(index, "rows", device, lambda: torch.tensor(index, device=device))
            rows = rows.index_select(0, pick)
        self.rows = rows.to(dtype)
        self.k, self.v = self.rows[..., :dim], self.rows[..., dim:]


class Executor:
    """Runs instructions one after the other; the two subclasses below define those that compute.

    SEND and RECV list messages, POST starts those listed, WAIT waits for them. With
    `ctx.by_dependencies` messages and computations run beside each other (dependencies.py).
    """

    def __init__(self, ctx: Context, program: Program, buffers: Buffers) -> None:
        self.ctx, self.program, self.buffers = ctx, program, buffers
        self.sends: list[Message] = []
        self.recvs: list[Message] = []
        self.waits: list[Callable[[], None]] = []

    def run(self) -> None:
        """Run the program to its end."""
        if self.ctx.by_dependencies:
            dependencies.run(self, self.perform)
        else:
            for instruction in self.program.instructions:
                if isinstance(instruction, Post | AllGather):
                    self.ctx.kernel.finish()
                self.perform(instruction)
        self.ctx.kernel.finish()

    def perform(self, instruction: Instruction) -> None:
        """Run one instruction."""
        METHODS[type(instruction)](self, instruction)

    def send(self, instruction: Send) -> None:
        self.sends.append(instruction.message)

    def recv(self, instruction: Recv) -> None:
        self.recvs.append(instruction.message)

    def post(self, instruction: Post | AllGather) -> None:
        self.waits.append(self.ctx.post(instruction, self.sends, self.recvs, self.buffers))
        self.sends, self.recvs = [], []

    def wait(self, _: Wait) -> None:
        waits, self.waits = self.waits, []
        for wait in waits:
            wait()

    def zero(self, instruction: Zero) -> None:
        for _, rows in _slices(instruction.rows):
            self.buffers[instruction.buffer][rows] = 0

    def add(self, instruction: Add) -> None:
        target, source = self.buffers[instruction.target], self.buffers[instruction.source]
        for src, dst in _slices(instruction.rows):
            target[dst] += source[src]

    def free(self, _: Free) -> None:
        """Nothing to do: buffers are there for the whole pass, and rows are used again by others."""

    def _unexpected(self, instruction: Instruction) -> PlanError:
        """The error of a program with an instruction that this pass has none of."""
        return PlanError(
            f"{type(self).__name__} runs no {type(instruction).__name__}: {instruction}"
        )

    def unpack(self, instruction: Unpack) -> None:
        raise self._unexpected(instruction)

    def pack(self, instruction: Pack) -> None:
        raise self._unexpected(instruction)

    def attend(self, instruction: Attend) -> None:
        raise self._unexpected(instruction)

    def merge(self, instruction: Merge) -> None:
        raise self._unexpected(instruction)


METHODS: dict[type[Instruction], Callable[[Executor, Any], None]] = {
    Send: lambda executor, i: executor.send(i),
    Recv: lambda executor, i: executor.recv(i),
    Post: lambda executor, i: executor.post(i),
    AllGather: lambda executor, i: executor.post(i),
    Wait: lambda executor, i: executor.wait(i),
    Unpack: lambda executor, i: executor.unpack(i),
    Pack: lambda executor, i: executor.pack(i),
    Zero: lambda executor, i: executor.zero(i),
    Attend: lambda executor, i: executor.attend(i),
    Add: lambda executor, i: executor.add(i),
    Merge: lambda executor, i: executor.merge(i),
    Free: lambda executor, i: executor.free(i),
}


class ForwardExecutor(Executor):
    """The forward pass; see `run_forward`.

    Args:
        q: [T, H, D]. kv: `ctx.pack(k, v)`. dim: D.

    Attributes:
        q, out, lse: [T + g, H, D], [T + g, H, E] and [T + g, H], own rows first.
    """

    def __init__(self, ctx: Context, program: Program, q: Tensor, kv: Tensor, dim: int) -> None:
        self.dtype, self.dim = _compute_dtype(ctx, program, q), dim
        self.queries = Queries(program, [q], self.dtype)
        (self.q,) = self.queries.rows
        shape = (*self.q.shape[:2], kv.shape[-1] - dim)
        self.out = self.q.new_zeros(shape, dtype=accumulator_dtype(self.q.dtype))
        # the rounding of lse is an error of every weight of its row, so it is kept in float64
        self.lse = torch.full_like(self.out[..., 0], -torch.inf, dtype=torch.float64)
        self.untouched = True  # nothing is in `out` yet
        partial = (q.shape[1], shape[-1] + 1)
        buffers = {
            "kv": kv,
            "partial_send": self.out.new_empty((len(self.q) - program.tokens, *partial)),
            "partial_recv": self.out.new_empty((program.received_partial_rows, *partial)),
        }
        super().__init__(ctx, program, buffers | self.queries.buffers)

    def unpack(self, instruction: Unpack) -> None:
        self.queries.unpack(instruction, (self.out, 0.0), (self.lse, -torch.inf))
        self.untouched = False

    def pack(self, instruction: Pack) -> None:
        target = self.buffers[instruction.target]
        for src, dst in _slices(instruction.rows):
            target[dst, :, :-1], target[dst, :, -1] = self.out[src], self.lse[src]

    def attend(self, instruction: Attend) -> None:
        ctx, device = self.ctx, self.q.device
        keys = _Keys(instruction, self.buffers["kv"], self.dtype, self.dim)
        ctx.kernel.finish()
        for call in instruction.calls:
            part, part_lse = ctx.kernel.forward(self.q, keys.k, keys.v, call, ctx.scale)
            for runs in call.q_runs:
                for src, dst in _views(runs, device):
                    # the first partial result of all rows is taken as it is, without a merge
                    if self.untouched and runs.count.tolist() == [len(part)] == [len(self.out)]:
                        self.out = part.to(self.out.dtype)
                        self.lse = part_lse.to(self.lse.dtype)
                    else:
                        _merge_rows(self.out, self.lse, dst, part[src], part_lse[src])
                    self.untouched = False

    def merge(self, instruction: Merge) -> None:
        self.untouched = False
        for src, dst in _slices(instruction.rows):
            partial = self.buffers[instruction.source][src]
            merge_(self.out[dst], self.lse[dst], partial[..., :-1], partial[..., -1])


def run_forward(
    ctx: Context, q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One rank's forward pass.

    Args:
        q: [T, H, D]; k: [T, K, D]; v: [T, K, E].
        kv: `ctx.pack(k, v)`, for a caller that keeps it for the backward pass; default: packed here.

    Returns:
        out [T, H, E] and lse [T, H] in float32, or float64 for float64 inputs.
    """
    # with other numbers of heads kernels would read beyond the memory of k and v
    assert q.shape[1] % k.shape[1] == 0, (q.shape, k.shape)
    program = ctx.program(backward=False)
    kv = ctx.pack(k, v) if kv is None else kv
    executor = ForwardExecutor(ctx, program, q, kv, k.shape[-1])
    executor.run()
    out, own = executor.out, program.tokens
    return out[:own], executor.lse[:own].to(out.dtype)


def _merge_rows(out: Tensor, lse: Tensor, dst: Any, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into rows `dst`, a slice or indices."""
    rows, row_lse = out[dst], lse[dst]
    merge_(rows, row_lse, part, part_lse)
    if not isinstance(dst, slice):
        out[dst], lse[dst] = rows, row_lse


class BackwardExecutor(Executor):
    """The backward pass; see `run_backward`.

    Args:
        tensors: q [T, H, D], dout [T, H, E], out [T, H, E] and lse [T, H].
        kv: `ctx.pack(k, v)`. dim: D.

    Attributes:
        dq: [T + g, H, D]; dkv: [T + rows of remote KV gradients, K, D + E]; own rows first, in the
            accumulator dtype.
    """

    def __init__(
        self, ctx: Context, program: Program, tensors: Sequence[Tensor], kv: Tensor, dim: int
    ) -> None:
        q, own = tensors[0], program.tokens
        self.dtype, self.dim = _compute_dtype(ctx, program, q), dim
        exact = accumulator_dtype(q.dtype)
        sent = ctx.grad_comm_dtype or exact  # the dtype in which gradients travel
        self.queries = Queries(program, tensors, self.dtype)
        self.dkv = kv.new_empty((own + program.remote_grad_rows, *kv.shape[1:]), dtype=exact)
        self.dkv[:own] = 0
        self.dq = torch.zeros_like(self.queries.rows[0], dtype=exact)
        buffers = {
            "kv": kv,
            "dkv": self.dkv,
            "dkv_recv": kv.new_empty((program.grad_receive_rows, *kv.shape[1:]), dtype=sent),
            "dq": self.dq,
            "partial_recv": q.new_empty((program.received_partial_rows, *q.shape[1:]), dtype=sent),
        }
        super().__init__(ctx, program, buffers | self.queries.buffers)

    def unpack(self, instruction: Unpack) -> None:
        self.queries.unpack(instruction, (self.dq, 0.0))

    def attend(self, instruction: Attend) -> None:
        keys = _Keys(instruction, self.buffers["kv"], self.dtype, self.dim)
        kernel, scale = self.ctx.kernel, self.ctx.scale
        q, dout, out, lse = self.queries.rows
        kernel.finish()
        runs, count, dim, dkv = instruction.grads, len(keys.rows), self.dim, self.dkv
        # add to `dkv` directly where its rows lie as those of the keys, else by way of a buffer
        direct = len(runs) == 1 and len(runs[0].src) == 1 and int(runs[0].count[0]) == count
        if direct:
            start = int(runs[0].dst[0])
            target = dkv[start : start + count]
        else:
            target = dkv.new_zeros(keys.rows.shape)
        for call in instruction.calls:
            dq_part, dk_part, dv_part = kernel.backward(
                dout, q, keys.k, keys.v, out, lse, call, scale
            )
            for rows in call.q_runs:
                _add(self.dq, dq_part, rows)
            for rows in call.k_runs:
                _add(target[..., :dim], dk_part, rows)
                _add(target[..., dim:], dv_part, rows)
        for rows in () if direct else runs:
            _add(dkv, target, rows)


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
        kv: with ctx.keep_kv, the buffer `kv` as the forward pass has left it.

    Returns:
        dq [T, H, D], dk [T, K, D], dv [T, K, E] in float32, or float64 for float64 inputs.
    """
    program, dim = ctx.program(backward=True), k.shape[-1]
    kv = ctx.pack(k, v) if kv is None else kv
    executor = BackwardExecutor(ctx, program, [q, dout, out, lse], kv, dim)
    executor.run()
    own, dkv = program.tokens, executor.dkv
    return executor.dq[:own], dkv[:own, :, :dim], dkv[:own, :, dim:]


def _compute_dtype(ctx: Context, program: Program, q: Tensor) -> torch.dtype:
    """The dtype to compute in: q's where a pass is one kernel call, else the one for partial results."""
    alone = (
        program.num_calls <= 1
        and not program.remote_query_rows
        and not program.received_partial_rows
    )
    return q.dtype if alone else ctx.kernel.partial_dtype(q.dtype)


def _no_autocast(x: Tensor) -> Any:
    """A context without autocast: passes choose their dtypes, and autocast would round kernel `math`."""
    return torch.autocast(x.device.type, enabled=False)


class Attention(torch.autograd.Function):
    """Autograd around the two passes of a call; q, k, v are [T, H, D] or [T, B, H, D].

    All packed sequences of a batch follow the same plan, so their heads are joined: [T, B H, D]. Each pass
    is one node of the graph with all of its exchanges. The backward pass begins with a handshake too, so
    that ranks that run their backward passes in different orders all raise an error.
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
                exchange.finish_handshake()  # no wait has ended it if the plan exchanges nothing
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
    """Own rows of tensors [T, H, *] in `dtype`, and room for remote queries after them.

    Args:
        tensors: q, or (q, dout, out, lse); lse [T, H] keeps its dtype.

    Attributes:
        rows: the same tensors, [T + g, H, *].
        buffers: {"q": what travels, [T + g, H, W] in q's dtype}; empty where no query moves.
    """

    def __init__(self, program: Program, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.buffers: dict[str, Tensor] = {}
        own = program.tokens
        self.rows = [x if x.dim() == 2 else x.to(dtype) for x in tensors]
        if not program.remote_query_rows and not program.sends_queries:
            return
        q = tensors[0]
        packed = torch.cat([_bits(x, q.dtype) for x in tensors], dim=-1)
        travelling = packed.new_empty((own + program.remote_query_rows, *packed.shape[1:]))
        travelling[:own] = packed
        self.buffers["q"] = travelling
        self.widths = [_bits(x, q.dtype).shape[-1] for x in tensors]
        grown = [x.new_empty((len(travelling), *x.shape[1:])) for x in self.rows]
        for x, mine in zip(grown, self.rows, strict=True):
            x[:own] = mine
        self.rows = grown

    def unpack(self, instruction: Unpack, *results: tuple[Tensor, float]) -> None:
        """Take the messages of remote queries apart, and set their rows of results to a first value.

        Args:
            results: (tensor [T + g, ...], first value of its rows).
        """
        for _, here in _slices(instruction.rows):
            parts = self.buffers["q"][here].split(self.widths, -1)
            for x, part in zip(self.rows, parts, strict=True):
                x[here] = part.contiguous().view(x.dtype)[..., 0] if x.dim() == 2 else part
            for x, value in results:
                x[here] = value


def _bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H, *] as it is; lse [T, H] as the same bits in `dtype`, [T, H, n]."""
    return x[..., None].contiguous().view(dtype) if x.dim() == 2 else x
