"""Attention kernels that return (out, lse), and their backward with a given out and lse.

A new kernel is one file with a subclass of `Kernel`; pass an instance to `attention(kernel=...)`, or name
it in resolve.py.
"""

from .. import torch_required
from .aten import AtenCpu
from .kernel import HALF, Kernel
from .reference import Math, oracle
from .resolve import resolve
from .varlen import VarlenKernel

__all__ = ["HALF", "AtenCpu", "Kernel", "Math", "VarlenKernel", "oracle", "resolve"]
