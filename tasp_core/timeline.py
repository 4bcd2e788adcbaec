"""Timeline: what `simulate` predicts about one pass of a plan on a machine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Timeline:
    """What `simulate` predicts; seconds and bytes of one pass.

    Attributes:
        title: the plan and the machine in words.
        compute, comm: (begin, end) by rank and step, float64 [ranks, steps, 2].
        total_s: from the first rank's begin to the last rank's end.
        comm_s: the same if computing took no time. compute_s: the busiest rank's computing alone.
        link_bytes: bytes of each resource that carries any.
        bound_s: the cut bound of the bytes ranks need (backward: with as many gradients back);
            None with intra > 1.
    """

    title: str
    compute: np.ndarray
    comm: np.ndarray
    total_s: float
    comm_s: float
    compute_s: float
    link_bytes: dict[str, float]
    bound_s: float | None

    @property
    def steps(self) -> int:
        """Steps of a rank."""
        return self.compute.shape[1]

    @cached_property
    def idle(self) -> float:
        """Share of the time in which ranks, on average, do not compute."""
        busy = float(np.diff(self.compute, axis=2).sum(axis=1).mean())
        return 1 - busy / self.total_s if self.total_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**data, "compute": self.compute.tolist(), "comm": self.comm.tolist()}

    def __str__(self) -> str:
        bound = "" if self.bound_s is None else f" (cut bound {_ms(self.bound_s)})"
        lines = [
            self.title,
            f"total {_ms(self.total_s)}: communication alone {_ms(self.comm_s)}{bound}, "
            f"computing alone {_ms(self.compute_s)}",
            f"{self.steps} steps; ranks compute nothing {self.idle:.1%} of the time",
        ]
        if self.link_bytes:
            name, most = max(self.link_bytes.items(), key=lambda item: item[1])
            lines.append(f"most bytes: {name}, {most / 1e6:.2f} MB")
        return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
