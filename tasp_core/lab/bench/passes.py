"""One plan's pass on one rank, timed as a whole, or only its communication, or only its computation.

The whole and the communication are `attention` itself, the latter without any kernel call or merge; the
computation is the executor with an exchange that moves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...kernels.kernel import Kernel, Triple
from ...kernels.resolve import resolve
from ...lowering.program import Message
from ...planning.plan import Plan
from ...runtime.attention import attention
from ...runtime.exchange import Exchange, Wait
from ...runtime.execute import Context, run_backward, run_forward
from ...runtime.packing import Buffers
from ...runtime.sharding import shard
from .accuracy import Errors, Inputs, Reference, run_rank

Mode = Literal["whole", "communication", "computation"]
MODES: tuple[Mode, ...] = ("communication", "computation", "whole")
DIRECTIONS = ("forward", "backward")
Samples = dict[str, list[float]]  # by "whole forward" and the like, seconds


class NoOpKernel(Kernel):
    """No kernel: a pass is its exchange alone."""

    name = "no-op"
    computes = False

    def forward(self, *_: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("NoOpKernel is never called")

    def backward(self, *_: Any) -> Triple:
        raise NotImplementedError("NoOpKernel is never called")


class NoOpExchange(Exchange):
    """An exchange that moves nothing: what would have arrived is filled with ordinary numbers."""

    def post(
        self, t: int, sends: Sequence[Message], recvs: Sequence[Message], buffers: Buffers
    ) -> Wait:
        for m in recvs:
            for low, count in m.ranges:
                buffers[m.buffer][low : low + count] = 0.5
        return lambda: None

    def all_gather(self, own: Tensor, gathered: Tensor, rows: int) -> Wait:
        gathered.fill_(0.5)
        return lambda: None


class Pass:
    """A plan's passes on this rank.

    Args:
        ready: called before each timed pass, e.g. a barrier.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        group: Any,
        inputs: Inputs,
        ready: Callable[[], None],
        *,
        kernel: str | Kernel = "auto",
    ) -> None:
        self.plan, self.rank, self.group, self.ready = plan, rank, group, ready
        self.inputs = inputs
        self.tensors = [shard(x, plan, rank) for x in inputs.tensors()]
        self.kernel = resolve(kernel, self.tensors[0].device.type, self.tensors[0].dtype)
        for one in (self.kernel, NoOpKernel()):  # programs are lowered before anything is timed
            for backward in (False, True):
                self._context(None, one).program(backward=backward)

    def _context(self, exchange: Exchange | None, kernel: Kernel) -> Context:
        scale = self.tensors[0].shape[-1] ** -0.5
        return Context(
            self.plan.context_plan, self.rank // self.plan.intra, exchange, kernel, scale
        )

    def _timed(self, run: Callable[[], Any]) -> tuple[float, Any]:
        self.ready()
        start = time.perf_counter()
        result = run()
        if self.tensors[0].is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start, result

    def run(self, mode: Mode, *, backward: bool) -> list[float]:
        """Seconds of the forward pass, and with `backward` of the backward pass."""
        return self._alone(backward) if mode == "computation" else self.attend(mode, backward)[0]

    def attend(self, mode: Mode, backward: bool) -> tuple[list[float], Tensor]:
        """Seconds as `run`, and the output."""
        *qkv, dout = self.tensors
        q, k, v = (x.detach().requires_grad_(backward) for x in qkv)
        kernel = NoOpKernel() if mode == "communication" else self.kernel
        seconds, out = self._timed(lambda: attention(q, k, v, self.plan, self.group, kernel=kernel))
        if not backward:
            return [seconds], out
        return [seconds, self._timed(lambda: out.backward(dout))[0]], out.detach()

    def _alone(self, backward: bool) -> list[float]:
        """The rank's computation: with Ulysses inside, that of its heads over its group's tokens."""
        rank, ranks = self.rank // self.plan.intra, self.plan.context_plan.ranks
        context = self._context(NoOpExchange(rank, ranks), self.kernel)
        tokens = context.plan.num_tokens(context.rank)
        q, k, v, dout = (
            x.new_ones((tokens, max(1, x.shape[-2] // self.plan.intra), x.shape[-1]))
            for x in self.tensors
        )
        forward_s, (out, lse) = self._timed(lambda: run_forward(context, q, k, v))
        if not backward:
            return [forward_s]
        return [
            forward_s,
            self._timed(lambda: run_backward(context, dout, q, k, v, out, lse))[0],
        ]


def method_errors(passes: Sequence[Pass], reference: Reference) -> list[Errors]:
    """Every method's errors against the reference, the same on all ranks; this also warms up."""
    return [
        reference.own_errors(
            run_rank(x.rank, x.group, x.plan, x.inputs, x.kernel)[0], x.plan, x.rank, x.group
        )
        for x in passes
    ]


def in_turn(
    passes: Sequence[Pass], *, modes: Sequence[Mode] = MODES, backward: bool, repeats: int
) -> list[Samples]:
    """This rank's samples of every method, methods in turn; all ranks call it with the same arguments."""
    results: list[Samples] = [{} for _ in passes]
    for _ in range(repeats):
        for one, samples in zip(passes, results, strict=True):
            for mode in modes:
                seconds = one.run(mode, backward=backward)
                for direction, value in zip(DIRECTIONS, seconds, strict=False):
                    samples.setdefault(f"{mode} {direction}", []).append(value)
    return results


def slowest(by_rank: Sequence[Samples]) -> Samples:
    """Of every sample the slowest rank's."""
    return {
        name: np.max([samples[name] for samples in by_rank], axis=0).tolist() for name in by_rank[0]
    }
