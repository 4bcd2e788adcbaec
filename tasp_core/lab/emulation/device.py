"""A device of its own for each rank: kernels that take time but no processor, as on a GPU.

Where several ranks share a few cores, their kernels and their messages contend for them, which does not
happen to ranks with a GPU each. A `Device` computes each call with the CPU's kernel the first time and
remembers the result. From then on it returns the result at once and is busy for as long as its rate says.

As on a stream, a call begins when the previous step is done and its messages have arrived, not when the
host launches it; messages wait for it (`finish`). So the pass that is compared with the reference computes
and sends for real; passes that are timed have real messages, real merges (on the host, beside the device)
and computation that lasts as long as was asked for.
A call is known by its identity: give all passes of one plan the same tensors.
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

CORE_TFLOPS = 0.04  # what one core of a laptop does in float32
CALL_S = 1e-4  # what a call takes besides its operations: launches and tails


class Device(Kernel):
    """Remembered results of the CPU's kernel; each call keeps the device busy for operations / rate.

    Args:
        tflops: 1e12 operations per second, forward and backward.
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
