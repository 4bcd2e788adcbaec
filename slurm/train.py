"""Train a Llama on packed sequences of text. Under torchrun, or alone; `--help` lists the options.

    torchrun --nproc-per-node 4 slurm/train.py --out results/run --size tiny --ranks 2 --eval-every 20

A run continues from the newest checkpoint in --out/checkpoints. SIGUSR1 and SIGTERM: the step ends, the
state is saved, exit code 0. Exit code 2: wrong settings or data; nothing was overwritten.
"""

from __future__ import annotations

import os
import sys

import typer

from tasp_core.cli.options import command
from tasp_core.lab.training.settings import Settings

app = typer.Typer(add_completion=False)


@command(app)
def train(settings: Settings) -> None:
    """Train a Llama on packed sequences of text, each shared by several ranks."""
    from tasp_core.lab.training.run import run

    run(settings)


def main() -> None:
    """Run the command; what a user can mend is one line from each rank that met it."""
    try:
        app()
    except ValueError as error:
        print(f"error: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
