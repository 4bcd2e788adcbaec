"""Train a Llama on packed rows of text. Under torchrun, or alone; `--help` lists the options.

    torchrun --nproc-per-node 4 slurm/train.py --out results/run --size tiny --ranks 2 --eval-every 20

It goes on from the newest checkpoint in --out/checkpoints. SIGUSR1 and SIGTERM: the step ends, the state
is saved, exit code 0. Exit code 2: a question that has no answer; nothing was overwritten.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tasp_core.lab.training.settings import Settings


def train(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, metrics.jsonl and run.json.")],
    data: Annotated[
        list[str] | None, typer.Option(help="File or folder; repeat. Default: Python's manual.")
    ] = None,
    size: Annotated[str, typer.Option(help="tiny, 15m, 110m, 350m, 1b, 3b, 7b.")] = "tiny",
    tokens: Annotated[int, typer.Option(help="Tokens (bytes) of a packed row.")] = 4096,
    rows: Annotated[int, typer.Option(help="Rows a step, of all ranks together.")] = 1,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 100,
    ranks: Annotated[int, typer.Option(help="Ranks a row is spread over; 0: all.")] = 0,
    schedule: Annotated[str, typer.Option(help="See python -m tasp_core plan --help.")] = "tasp",
    layout: Annotated[str, typer.Option(help="See python -m tasp_core plan --help.")] = "zigzag",
    machine: Annotated[str | None, typer.Option(help="A name, or a JSON file.")] = None,
    intra: Annotated[int, typer.Option(help="Ranks of a Ulysses group.")] = 1,
    kernel: Annotated[str, typer.Option(help="auto, math, aten or flash.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of computation: float32 or bfloat16.")] = "float32",
    recompute: Annotated[
        str, typer.Option(help="Activations: none, kept (all but attention run again), all.")
    ] = "kept",
    sft: Annotated[bool, typer.Option("--sft", help="Do not train on prompts.")] = False,
    lr: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = 3e-3,
    warmup: Annotated[int, typer.Option(help="Steps of the warm-up.")] = 10,
    weight_decay: Annotated[float, typer.Option(help="AdamW's.")] = 0.01,
    clip: Annotated[float, typer.Option(help="Largest gradient norm.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of weights and of the documents' order.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
    eval_every: Annotated[int, typer.Option(help="Steps between held-out losses; 0: never.")] = 0,
    eval_rows: Annotated[int, typer.Option(help="Rows of the held-out loss.")] = 1,
    peak_tflops: Annotated[float | None, typer.Option(help="Of a device, for MFU.")] = None,
    gbps: Annotated[float | None, typer.Option(help="GB/s a rank sends, for the roofline.")] = None,
) -> None:
    """Train a Llama on packed rows of text, each spread over several ranks."""
    from tasp_core.lab.training.run import run

    given = {**locals(), "data": tuple(data or ())}
    run(Settings(**{k: v for k, v in given.items() if k != "run"}))


def main() -> None:
    """One line for what a user can mend, from each rank that met it."""
    try:
        typer.run(train)
    except ValueError as error:
        print(f"error: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
