"""All settings of a training run, and which of them make it the same run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from ...errors import PlanError
from .llama import Recompute

DTYPES = ("float32", "bfloat16")
# What a resumed run must have in common with the run it continues; ranks, schedule, layout may change.
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
    """A run; every field is an option of slurm/train.py, with this text for help."""

    out: Annotated[Path, "Folder for checkpoints, metrics.jsonl and run.json."]
    data: Annotated[tuple[str, ...], "File or folder; repeat. Default: Python's manual."] = ()
    size: Annotated[str, "tiny, 15m, 110m, 350m, 1b, 3b, 7b."] = "tiny"
    tokens: Annotated[int, "Tokens (bytes) of a packed sequence."] = 4096
    rows: Annotated[int, "Packed sequences per step, of all ranks together."] = 1
    steps: Annotated[int, "Optimiser steps."] = 100
    ranks: Annotated[int, "Ranks that share a packed sequence; 0: all."] = 0
    schedule: Annotated[str, "See python -m tasp_core plan --help."] = "tasp"
    layout: Annotated[str, "See python -m tasp_core plan --help."] = "zigzag"
    machine: Annotated[str | None, "A name, or a JSON file."] = None
    intra: Annotated[int, "Ulysses degree: ranks of a group that divides the heads."] = 1
    kernel: Annotated[str, "auto, math, aten or flash."] = "auto"
    dtype: Annotated[str, "Of computation: float32 or bfloat16."] = "float32"
    recompute: Annotated[
        Recompute, "Activations: none, kept (all but attention run again), all."
    ] = "kept"
    sft: Annotated[bool, "Do not train on prompts."] = False
    lr: Annotated[float, "Learning rate after the warm-up."] = 3e-3
    warmup: Annotated[int, "Steps of the warm-up."] = 10
    weight_decay: Annotated[float, "AdamW's."] = 0.01
    clip: Annotated[float, "Largest gradient norm."] = 1.0
    seed: Annotated[int, "Of weights and of the documents' order."] = 0
    save_every: Annotated[int, "Steps between checkpoints."] = 50
    eval_every: Annotated[int, "Steps between evaluations on held-out text; 0: never."] = 0
    eval_rows: Annotated[int, "Packed sequences of an evaluation."] = 1
    peak_tflops: Annotated[float | None, "Of a device, for MFU."] = None
    gbps: Annotated[float | None, "GB/s a rank sends, for the roofline."] = None

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
        """The settings in TRAJECTORY, and `data`, the fingerprint of the corpus."""
        values = asdict(self)
        return {name: values[name] for name in TRAJECTORY} | {"data": data}


def refuse_other_run(ours: dict[str, Any], stored: dict[str, Any], where: Path) -> None:
    """Raise PlanError where a checkpoint's trajectory is not ours."""
    other = [name for name in ours if ours[name] != stored.get(name)]
    if other:
        changes = ", ".join(f"{n} {stored.get(n)!r} (now {ours[n]!r})" for n in other)
        raise PlanError(
            f"{where} is of another run: {changes}; give the same settings, or another --out"
        )
