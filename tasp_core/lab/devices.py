"""A device of its own for each rank: kernels that take time and no processor, as on a GPU.

Where several ranks share a few cores, their kernels and their messages contend for them, which no
rank with a GPU knows. A `Device` does each call with the CPU's kernel the first time it is asked for
it, remembers the result, and from then on gives it back after the time its rate says. So what is
first held against the oracle is computed and sent for real, and what is timed then has real messages
and real merges, and computation that lasts as long as asked for. A call is known by itself: give all
passes of one plan the same tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..formulas import BACKWARD, FORWARD
from ..kernels import Kernel, Triple, resolve
from ..program import Call

CORE_TFLOPS = 0.04  # float32, what one core of a laptop does
CALL_S = 1e-4  # a call's own time: launches and tails


class Device(Kernel):
    """Remembered results of the CPU's kernel, after (operations / rate) seconds.

    Args:
        tflops: operations a second, in 1e12, forward and backward.
    """

    name = "device"

    def __init__(self, tflops: float, dtype: torch.dtype = torch.float32) -> None:
        self.tflops, self.kernel = tflops, resolve("auto", "cpu", dtype)
        self.native_partials = self.kernel.native_partials
        # the call is kept with its result, so that its id stays its own
        self.known: dict[tuple[str, int], tuple[Call, tuple[Tensor, ...]]] = {}

    def _after(
        self, name: str, call: Call, operations: float, work: Callable[[], tuple[Tensor, ...]]
    ) -> Any:
        until = time.perf_counter() + CALL_S + operations / (self.tflops * 1e12)
        key = name, id(call)
        if key not in self.known:
            self.known[key] = call, work()
        result = tuple(x.clone() for x in self.known[key][1])  # callers may add to what they get
        time.sleep(max(0.0, until - time.perf_counter()))
        return result

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor]:
        operations = FORWARD * call.pairs * q.shape[1] * q.shape[2]
        return self._after(
            "forward", call, operations, lambda: self.kernel.forward(q, k, v, call, scale)
        )

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call,
        scale: float,
    ) -> Triple:  # fmt: skip
        operations = BACKWARD * call.pairs * q.shape[1] * q.shape[2]
        args = dout, q, k, v, out, lse, call, scale
        return self._after("backward", call, operations, lambda: self.kernel.backward(*args))
