"""All ranks of a plan in one process, on one device: the same programs, messages are copies.

    pieces = run_in_process(plan, Inputs.random(...))      # [out, lse, dq, dk, dv] of every rank

Each rank is a thread that runs until it waits for a message; on a GPU all submit to one stream, so that
what they compute adds up there. For checks of kernels, and of the work around them, on one GPU.
Not covered: Ulysses groups, and the schedules' collectives (use exchange="p2p").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition
from typing import Any

import torch
from torch import Tensor

from ...errors import PlanError, TransportError
from ...kernels.kernel import Kernel
from ...kernels.resolve import resolve
from ...lowering.program import Message
from ...planning.plan import Plan
from ...runtime.exchange import Exchange, Wait
from ...runtime.execute import Context, run_backward, run_forward
from ...runtime.packing import Buffers, put_rows, take_rows
from ...runtime.sharding import shard
from .accuracy import Inputs

TIMEOUT_S = 60.0


class Clock:
    """Marks on a device's time line; on a GPU they are events, on a CPU seconds of this process."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.spans: dict[str, list[tuple[Any, Any]]] = {}

    def _mark(self) -> Any:
        if not self.gpu:
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What is submitted inside counts as `name`."""
        start = self._mark()
        yield
        self.spans.setdefault(name, []).append((start, self._mark()))

    def seconds(self, name: str) -> float:
        """All spans of a name together."""
        if self.gpu:
            torch.cuda.synchronize()
            return sum(a.elapsed_time(b) for a, b in self.spans.get(name, ())) / 1e3
        return sum(b - a for a, b in self.spans.get(name, ()))


class Mailbox:
    """Messages on their way, by (step, source, destination, tag), and the lock of the rank that runs."""

    def __init__(self, clock: Clock) -> None:
        self.rows: dict[tuple[int, int, int, int], Tensor] = {}
        self.lock, self.clock = Condition(), clock

    def put(self, key: tuple[int, int, int, int], rows: Tensor) -> None:
        with self.clock.span("messages"):
            self.rows[key] = rows.clone()
        self.lock.notify_all()

    def take(self, key: tuple[int, int, int, int]) -> Tensor:
        if not self.lock.wait_for(lambda: key in self.rows, TIMEOUT_S):  # others run meanwhile
            raise TransportError("rank {2}, step {0}: nothing came from rank {1}".format(*key))
        return self.rows.pop(key)


class InProcessExchange(Exchange):
    """One rank's side of a mailbox; used by one thread, which holds the mailbox's lock while it runs."""

    def __init__(self, mailbox: Mailbox, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.mailbox = mailbox

    def post(
        self, t: int, sends: Sequence[Message], recvs: Sequence[Message], buffers: Buffers
    ) -> Wait:
        for m in sends:
            self.mailbox.put((t, self.rank, m.peer, m.tag), take_rows([m], buffers))

        def wait() -> None:
            for m in recvs:
                rows = self.mailbox.take((t, m.peer, self.rank, m.tag))
                with self.mailbox.clock.span("messages"):
                    put_rows([m], rows, buffers)

        return wait


class TimedKernel(Kernel):
    """A kernel whose calls a clock counts as "kernel"."""

    def __init__(self, kernel: Kernel, clock: Clock) -> None:
        self.kernel, self.clock = kernel, clock
        self.name, self.native_partials = kernel.name, kernel.native_partials

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        with self.clock.span("kernel"):
            return self.kernel.forward(*args)

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        with self.clock.span("kernel"):
            return self.kernel.backward(*args)


class InProcessRanks:
    """A plan's ranks and their shards; `clock` holds the spans "all", "messages" and "kernel"."""

    def __init__(self, plan: Plan, inputs: Inputs, kernel: str = "auto") -> None:
        """Raises PlanError for plans whose messages are not single ones."""
        if plan.intra > 1 or plan.schedule.collective or plan.schedule.exchange != "p2p":
            raise PlanError(
                f"ranks in one process exchange single messages only, not {plan.summary()}"
            )
        self.plan, self.scale = plan, inputs.q.shape[-1] ** -0.5
        self.clock = Clock(inputs.q.device)
        self.kernel = TimedKernel(resolve(kernel, inputs.q.device.type, inputs.q.dtype), self.clock)
        self.shards = [[shard(x, plan, r) for x in inputs.tensors()] for r in range(plan.ranks)]

    def _all(self, fn: Callable[[Context, int], Any]) -> list[Any]:
        """fn(context, rank) of every rank; the first error of any."""
        mailbox = Mailbox(self.clock)

        def one(rank: int) -> Any:
            exchange = InProcessExchange(mailbox, rank, self.plan.ranks)
            context = Context(self.plan, rank, exchange, self.kernel, self.scale)
            with mailbox.lock, torch.no_grad():
                return fn(context, rank)

        with self.clock.span("all"), ThreadPoolExecutor(self.plan.ranks) as pool:
            return list(pool.map(one, range(self.plan.ranks)))

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        """(out, lse) of every rank, in the dtype of accumulators."""
        return self._all(lambda context, rank: run_forward(context, *self.shards[rank][:3]))

    def backward(self, results: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(dq, dk, dv) of every rank, in the dtype of accumulators, from `forward`'s results."""

        def one(context: Context, rank: int) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v, dout = self.shards[rank]
            out, lse = results[rank]
            return run_backward(context, dout, q, k, v, out.to(q.dtype), lse)

        return self._all(one)


def run_in_process(plan: Plan, inputs: Inputs, kernel: str = "auto") -> list[list[Tensor]]:
    """out, lse, dq, dk, dv of every rank; out and gradients in the inputs' dtype."""
    ranks = InProcessRanks(plan, inputs, kernel)
    results = ranks.forward()
    grads = ranks.backward(results)
    dtype = inputs.q.dtype
    return [
        [out.to(dtype), lse, *(g.to(dtype) for g in grad)]
        for (out, lse), grad in zip(results, grads, strict=True)
    ]
