"""The ranks a measurement runs on: torchrun's (or srun's) if it was started so, else forked local ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..launch import launch


def started() -> bool:
    """Whether a launcher has given this process a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def on_ranks(fn: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 600.0) -> Any:
    """fn(rank, group, device, *args) on every rank; rank 0's result, None on a launcher's others.

    Args:
        ranks: how many to fork where no launcher has started this process; the launcher's count else.
    """
    if not started():
        device = torch.device("cpu")

        def local(rank: int, group: Any) -> Any:
            return fn(rank, group, device, *args)

        return launch(local, ranks, timeout_s=timeout_s)[0]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"  # RCCL answers to NCCL's name
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        result = fn(dist.get_rank(), dist.group.WORLD, device, *args)
        return result if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()
