"""Which kernel runs: a name, a device type and a dtype to a `Kernel`.

math    plain tensor operations 512 rows at a time, at least in float32; any device and dtype
aten    torch's own flash kernels: CPU (all float dtypes), CUDA and ROCm (fp16, bf16)
flash   flash-attn 2, 3 or 4 where installed (fp16, bf16)
"""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch

from ..errors import PlanError
from ..kernels import flash
from .aten import AtenCpu
from .kernel import HALF, Kernel
from .reference import Math
from .varlen import VarlenKernel


@lru_cache(maxsize=64)
def resolve(name: str | Kernel, device_type: str, dtype: torch.dtype) -> Kernel:
    """The kernel for a name ("auto", "math", "aten", "flash"), device type and dtype; a Kernel is itself.

    "auto" is aten on a CPU; on a GPU flash where installed, else aten, and math for wide dtypes.

    Raises:
        PlanError: an unknown name, or a kernel that cannot serve the device or dtype.
    """
    if device_type not in ("cpu", "cuda"):
        raise PlanError(f"tensors must be on a CPU or a GPU (CUDA, ROCm), got {device_type!r}")
    gpu = device_type != "cpu"
    if isinstance(name, Kernel):
        return name
    if name == "auto":
        if gpu and dtype not in HALF:
            warnings.warn(
                f"flash kernels take no {dtype} on {device_type}: using the slow kernel 'math'",
                stacklevel=2,
            )
            return Math()
        name = "flash" if gpu and flash.best(device_type) else "aten"
    if name == "math":
        return Math()
    if name not in ("aten", "flash"):
        raise PlanError(f"no kernel {name!r}; known are auto, math, aten, flash")
    if name == "aten" and not gpu:
        return AtenCpu()
    if dtype not in HALF:
        raise PlanError(
            f"kernel {name!r} on {device_type} takes fp16 and bf16, not {dtype}; use 'math'"
        )
    varlen = flash.AtenFlash() if name == "aten" else flash.find("flash")
    return VarlenKernel(varlen)
