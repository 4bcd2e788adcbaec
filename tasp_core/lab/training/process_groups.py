"""The process groups of a training run, and the signals that ask it to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...errors import PlanError
from ...integrations.fsdp import flat
from ...kernels.resolve import resolve
from ...planner import plan
from .settings import Settings


class Stop:
    """Inside the `with` block, SIGUSR1 and SIGTERM only set `asked`."""

    def __init__(self) -> None:
        self.asked = False
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            self.handlers[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


@dataclass(frozen=True)
class ProcessGroups:
    """All ranks as a mesh of data parallelism x sequence parallelism, and this process's device.

    Attributes:
        mesh: its axes are "dp" (packed sequences at the same time) and "sp" (ranks that share one).
        everyone: the same ranks on one axis.
    """

    mesh: DeviceMesh
    everyone: DeviceMesh
    device: torch.device

    @classmethod
    def join(cls, s: Settings) -> ProcessGroups:
        """Join the other processes, as torchrun's environment says; without it, alone.

        Raises:
            PlanError: a number of processes that the settings do not fit.
        """
        started = dist.is_initialized()
        size = dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", "1"))
        ranks = s.ranks or size
        if size % ranks:
            raise PlanError(
                f"{size} processes are no whole number of groups of {ranks}; set --ranks"
            )
        parts = size // ranks
        if s.rows % parts:
            raise PlanError(
                f"{s.rows} rows per step do not divide among {parts} groups of {ranks} ranks; set --rows"
            )
        plan(
            [s.tokens],
            ranks,
            schedule=s.schedule,
            layout=s.layout,
            machine=s.machine,
            intra=s.intra,
        )
        gpu = torch.cuda.is_available()
        kind = "cuda" if gpu else "cpu"
        resolve(s.kernel, kind, getattr(torch, s.dtype))
        if gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not started:
            alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            where: dict[str, Any] = {} if "RANK" in os.environ else alone
            dist.init_process_group("nccl" if gpu else "gloo", **where)
        mesh = init_device_mesh(kind, (parts, ranks), mesh_dim_names=("dp", "sp"))
        return cls(mesh, flat(mesh, "dp", "sp"), torch.device(kind))

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.mesh.size()

    @property
    def first(self) -> bool:
        """Whether this process prints and writes for all."""
        return dist.get_rank() == 0

    def add_up(self, values: Sequence[Any]) -> list[float]:
        """The sum of each value over all ranks, in float64."""
        packed = torch.stack([torch.as_tensor(v).double().to(self.device) for v in values])
        dist.all_reduce(packed)
        return packed.tolist()
