"""What test_slurm.py runs as a job's ranks: says who it is, dies, or saves when it is told to stop.

    meet WORDS...   joins the others by gloo and prints one JSON line
    refuse WHY      raises in every rank
    die RANK        that rank is killed while the others wait for it
    save FILE       waits for SIGUSR1, then leaves FILE.RANK; with these files there, ends at once

It imports torch only where it talks, so that `save` is soon ready for the signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WHO = {
    "rank": RANK,
    "node": os.environ["SLURMD_NODENAME"],
    "local_rank": int(os.environ["LOCAL_RANK"]),
    "threads": os.environ["OMP_NUM_THREADS"],
}


def total(value: float) -> float:
    """The sum of the ranks' values."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.tensor([value])
    dist.all_reduce(x)
    dist.destroy_process_group()  # a rank that just exits can abort in gloo's threads
    return float(x)


def meet(*words: str) -> None:
    print(json.dumps(WHO | {"words": words, "total": total(RANK)}), flush=True)


def refuse(why: str) -> None:
    raise ValueError(why)


def die(rank: str) -> None:
    if int(rank) == RANK:
        print(f"killed at {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    total(1)


def save(path: str) -> None:
    if all(Path(f"{path}.{rank}").exists() for rank in range(RANKS)):
        print(f"rank {RANK} goes on from what it saved", flush=True)
        return
    told: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: told.append(number))
    print(f"rank {RANK} waits", flush=True)
    while not told:
        time.sleep(0.1)
    Path(f"{path}.{RANK}").write_text("saved")


if __name__ == "__main__":
    {"meet": meet, "refuse": refuse, "die": die, "save": save}[sys.argv[1]](*sys.argv[2:])
