"""What this machine can do: versions, devices, kernels and why others are missing, a ping."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from .. import flash
from ..launch import launch
from .results import environment


def _ping(rank: int, group: Any) -> float:
    """Seconds of one small all-reduce after a warm-up."""
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    start = time.perf_counter()
    dist.all_reduce(x, group=group)
    return time.perf_counter() - start


def examine() -> dict[str, dict[str, str]]:
    """Sections of name: text."""
    env = environment()
    packages = {name: found or "not installed" for name, found in env.pop("packages").items()}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = {f"gpu {i}": torch.cuda.get_device_name(i) for i in range(gpus)}
    kernels = {"math": "ok (any device; slow)", "aten cpu": "ok"}
    kind = "cuda" if gpus else "cpu"
    kernels |= {name: text for name, text in flash.available(kind).items()}
    backends = {
        name: "ok" if getattr(dist, f"is_{name}_available")() else "not in this torch"
        for name in ("gloo", "nccl", "mpi")
    }
    try:
        seconds = launch(_ping, 2, timeout_s=30.0)
        ping = f"ok, {max(seconds) * 1e6:.0f} us between two forked gloo ranks"
    except Exception as error:  # whatever stops two ranks is what this command is for
        ping = f"FAILED: {error}"
    return {
        "machine": {k: str(v) for k, v in env.items()},
        "packages": packages,
        "devices": devices or {"gpu": "none; the CPU runs everything"},
        "kernels": kernels,
        "backends": backends,
        "ranks": {"ping": ping},
    }
