"""A device of its own for each rank: kernels that take time and no processor, as on a GPU.

Where several ranks share a few cores, their kernels and their messages contend for them, which no rank
with a GPU knows. A `Device` does each call with the CPU's kernel the first time it is asked for it,
remembers the result, and from then on gives it back at once and is busy as long as its rate says. As on
a stream, a call begins when the step before is done and its messages are there, not when the host comes
round to launching it, and messages wait for it (`finish`). So what is first held against the oracle is
computed and sent for real, and what is timed then has real messages, real merges (beside the device,
not on it), and computation that lasts as long as asked for. A call is known by itself: give all passes
of one plan the same tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...costs.bytes import BACKWARD, FORWARD
from ...kernels.kernel import Kernel, Triple
from ...kernels.resolve import resolve
from ...lowering.program import Call

CORE_TFLOPS = 0.04  # float32, what one core of a laptop does
CALL_S = 1e-4  # a call's own time: launches and tails


class Device(Kernel):
    """Remembered results of the CPU's kernel, and (operations / rate) seconds until the device is free.

    Args:
        tflops: operations a second, in 1e12, forward and backward.
    """

    name = "device"

    def __init__(self, tflops: float, dtype: torch.dtype = torch.float32) -> None:
        self.tflops, self.kernel = tflops, resolve("auto", "cpu", dtype)
        self.native_partials = self.kernel.native_partials
        self.free = 0.0  # when all it has been given is done
        # the call is kept with its result, so that its id stays its own
        self.known: dict[tuple[str, int], tuple[Call, tuple[Tensor, ...]]] = {}

    def _launch(
        self, name: str, call: Call, operations: float, work: Callable[[], tuple[Tensor, ...]]
    ) -> Any:
        self.free += CALL_S + operations / (self.tflops * 1e12)
        key = name, id(call)
        if key not in self.known:
            self.known[key] = call, work()
        return tuple(x.clone() for x in self.known[key][1])  # callers may add to what they get

    def finish(self) -> None:
        """Sleep until the device is free; what follows begins no earlier."""
        time.sleep(max(0.0, self.free - time.perf_counter()))
        self.free = time.perf_counter()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor]:
        operations = FORWARD * call.pairs * q.shape[1] * q.shape[2]
        return self._launch(
            "forward", call, operations, lambda: self.kernel.forward(q, k, v, call, scale)
        )

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
        operations = BACKWARD * call.pairs * q.shape[1] * q.shape[2]
        args = dout, q, k, v, out, lse, call, scale
        return self._launch("backward", call, operations, lambda: self.kernel.backward(*args))
