"""The interface of an attention kernel: forward and backward over the sequences of one call.

A call (`Call` of lowering/program.py) is a set of sequences: query rows against key rows, all FULL or all
square CAUSAL, some of the latter INVERSE_CAUSAL. So a kernel needs no window, and how it would align one
does not matter.
Backward takes the row's FINAL out and lse, so that each call's dq, dk, dv are exact partial sums.
Shapes: q [t, H, D], k [s, K, D], v [s, K, E], out [t, H, E], lse [t, H]; K divides H.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..lowering.program import Call

Triple = tuple[Tensor, Tensor, Tensor]
HALF = (torch.float16, torch.bfloat16)


class Kernel(ABC):
    """A forward and a backward over the sequences of a call.

    Attributes:
        name: for error texts and result files.
        computes: whether calls are made at all; without them a pass is its exchange alone.
        native_partials: whether half-precision inputs give half-precision partial results. Else inputs
            are converted to float32 where results of several calls are merged.
    """

    name = ""
    computes = True
    native_partials = False

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to compute in when the result of inputs of `dtype` is merged from several calls."""
        narrow = dtype in HALF and not self.native_partials
        return torch.float32 if narrow else dtype

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out [rows, H, E] and lse [rows, H] of the call's query rows, sequence after sequence.

        The two tensors are given away: the caller may go on with them as its own, so a kernel must not
        write to them again, nor return views of its inputs.

        Args:
            q, k, v: whole buffers; the call's sequences name the rows to read.
            scale: factor on the scores.
        """

    @abstractmethod
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
        """dq [rows, H, D], dk [key rows, K, D] and dv [key rows, K, E], sequence after sequence.

        Args:
            dout, q, out, lse: of all query rows of the buffers, as k, v of all key rows; out and lse are
                the final ones, over all keys.
            scale: factor on the scores.
        """

    def finish(self) -> None:  # noqa: B027 (most are done when they return)
        """Wait for calls that still run, before results are sent or returned; CUDA streams need no wait."""
