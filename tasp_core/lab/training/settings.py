"""All settings of a training run, and which of them make it the same run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import PlanError
from .llama import Recompute

DTYPES = ("float32", "bfloat16")
# What a resumed run has in common with the one it goes on from; ranks, schedule, layout may change.
TRAJECTORY = (
    "size",
    "tokens",
    "rows",
    "steps",
    "lr",
    "warmup",
    "weight_decay",
    "clip",
    "seed",
    "sft",
    "dtype",
)


@dataclass(frozen=True)
class Settings:
    """A run; every field is an option of slurm/train.py, described there."""

    out: Path
    data: tuple[str, ...] = ()
    size: str = "tiny"
    tokens: int = 4096
    rows: int = 1
    steps: int = 100
    ranks: int = 0
    schedule: str = "tasp"
    layout: str = "zigzag"
    machine: str | None = None
    intra: int = 1
    kernel: str = "auto"
    dtype: str = "float32"
    recompute: Recompute = "kept"
    sft: bool = False
    lr: float = 3e-3
    warmup: int = 10
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    save_every: int = 50
    eval_every: int = 0
    eval_rows: int = 1
    peak_tflops: float | None = None
    gbps: float | None = None

    def __post_init__(self) -> None:
        least = {
            "tokens": 1,
            "rows": 1,
            "steps": 1,
            "save_every": 1,
            "eval_rows": 1,
            "ranks": 0,
            "warmup": 0,
            "eval_every": 0,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise PlanError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise PlanError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.recompute not in ("none", "kept", "all"):
            raise PlanError(f"recompute must be none, kept or all, got {self.recompute!r}")

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth.

        >>> s = Settings(Path("x"), lr=1.0, warmup=10, steps=110)
        >>> [round(s.learning_rate(i), 3) for i in (0, 9, 10, 60, 110)]
        [0.1, 1.0, 1.0, 0.55, 0.1]
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        through = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, through)))

    def trajectory(self, data: str) -> dict[str, Any]:
        """The settings in TRAJECTORY, and the data's fingerprint."""
        found = asdict(self)
        return {name: found[name] for name in TRAJECTORY} | {"data": data}


def refuse_other_run(ours: dict[str, Any], stored: dict[str, Any], where: Path) -> None:
    """Raise PlanError where a checkpoint's trajectory is not ours."""
    other = [name for name in ours if ours[name] != stored.get(name)]
    if other:
        found = ", ".join(f"{n} {stored.get(n)!r} (now {ours[n]!r})" for n in other)
        raise PlanError(
            f"{where} is of another run: {found}; give the same settings, or another --out"
        )
