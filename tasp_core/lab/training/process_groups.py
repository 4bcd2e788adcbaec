"""A training process among the others, and the signals that ask it to stop."""

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
    """Inside `with`, SIGUSR1 and SIGTERM do no more than set `asked`."""

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            self.before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


@dataclass(frozen=True)
class ProcessGroups:
    """Ranks as rows at once x ranks a row ("dp" x "sp"), and where this process's tensors live."""

    mesh: DeviceMesh
    everyone: DeviceMesh
    device: torch.device

    @classmethod
    def join(cls, s: Settings) -> ProcessGroups:
        """Meet the others, by torchrun's environment, or alone.

        Raises:
            PlanError: a world size that the plan cannot have.
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
                f"{s.rows} rows a step cannot be shared out to {parts} groups of {ranks} ranks; set --rows"
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
        """All processes."""
        return self.mesh.size()

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return dist.get_rank() == 0

    def add_up(self, values: Sequence[Any]) -> list[float]:
        """Sums over all ranks, in float64."""
        packed = torch.stack([torch.as_tensor(v).double().to(self.device) for v in values])
        dist.all_reduce(packed)
        return packed.tolist()
