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
    """A forward and a backward over the sequences of a call."""

    name = ""
    computes = True  # whether calls are made at all; without, a pass is its exchange alone
    native_partials = False  # whether partial results come in the input dtype even if narrow

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to compute in when a row's result is merged from several calls."""
        narrow = dtype in HALF and not self.native_partials
        return torch.float32 if narrow else dtype

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out [rows, H, E] and lse [rows, H] of the call's query rows, sequence after sequence."""

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
        """dq of the call's query rows, dk and dv of its key rows, sequence after sequence."""

    def finish(self) -> None:  # noqa: B027 (most are done when they return)
        """Wait for what is begun, before results leave the rank or the pass; streams wait by themselves."""
