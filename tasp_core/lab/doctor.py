"""What this machine can do: versions, devices, links, kernels and why others are missing, a ping.

python -m tasp_core doctor --ranks 4                     # forks ranks here
torchrun --nproc-per-node 8 -m tasp_core doctor          # the job's own ranks, devices and backend
"""

from __future__ import annotations

import os
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from ..kernels import flash
from ..result_file import environment
from ..runtime.launch import launch
from ..runtime.process_group import over_nccl

OPTIONAL = ("transformers", "accelerate", "safetensors", "flash-attn")
TOPOLOGY = (("nvidia-smi", "topo", "-m"), ("rocm-smi", "--showtopo"))
REPEATS = 5
LARGE = 1 << 22  # bytes of the message that shows a link's rate


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _round_trip(rank: int, a: int, b: int, x: torch.Tensor, group: Any) -> float:
    """Least seconds of a message from a to b and back; both call it."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        for src, dst in ((a, b), (b, a)):
            if rank in (src, dst):
                op, peer = (dist.isend, dst) if rank == src else (dist.irecv, src)
                for work in dist.batch_isend_irecv(
                    [dist.P2POp(op, x, group=group, group_peer=peer)]
                ):
                    work.wait()
        if x.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def ping(rank: int, group: Any) -> list[list[tuple[float, float] | None]]:
    """Per pair of ranks: microseconds one way of a small message, GB/s of a large one; on every rank."""
    ranks = dist.get_world_size(group)
    gpu = over_nccl(group, "cuda")
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    mine: dict[tuple[int, int], tuple[float, float]] = {}
    for a in range(ranks):
        for b in range(a + 1, ranks):
            if rank in (a, b):
                small, large = (
                    torch.zeros(n, dtype=torch.uint8, device=device) for n in (8, LARGE)
                )
                seconds = [_round_trip(rank, a, b, x, group) / 2 for x in (small, large)]
                mine[a, b] = seconds[0] * 1e6, LARGE / seconds[1] / 1e9
            dist.barrier(group=group)  # one pair at a time
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, mine, group=group)
    return [
        [None if a == b else everyone[min(a, b)][min(a, b), max(a, b)] for b in range(ranks)]
        for a in range(ranks)
    ]


def _matrix(found: list[list[tuple[float, float] | None]], what: str) -> dict[str, str]:
    """The ping's result as lines: a row a rank, "microseconds/GB/s" a pair."""
    cells = [["-" if x is None else f"{x[0]:.0f}/{x[1]:.2f}" for x in row] for row in found]
    width = max(len(c) for row in cells for c in row) + 2
    times = [x for row in found for x in row if x]
    slowest = max((x[0] for x in times), default=0.0)
    head = "".join(f"{b}".rjust(width) for b in range(len(found)))
    rows = {f"rank {a}": "".join(c.rjust(width) for c in row) for a, row in enumerate(cells)}
    return {
        "ping": f"ok, at most {slowest:.0f} us between {len(found)} {what}",
        "us/(GB/s) to": head,
        **rows,
    }


def ranks_section(ranks: int) -> dict[str, str]:
    """The ping between this job's ranks, or between forked ones of this machine."""
    try:
        if under_torchrun():
            return _matrix(ping(dist.get_rank(), dist.group.WORLD), f"{dist.get_backend()} ranks")
        return _matrix(launch(ping, ranks, timeout_s=60.0)[0], "forked gloo ranks")
    except Exception as error:  # whatever stops ranks is what this command is for
        return {"ping": f"FAILED: {error}"}


def start() -> bool:
    """Meet the ranks that torchrun started, if it did; whether this process speaks for all."""
    if not under_torchrun():
        return True
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    return dist.get_rank() == 0


def end() -> None:
    """Leave them."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _devices(gpus: int) -> dict[str, str]:
    """Name, memory and peers of each device."""
    found = {}
    for i in range(gpus):
        p = torch.cuda.get_device_properties(i)
        peers = [str(j) for j in range(gpus) if j != i and torch.cuda.can_device_access_peer(i, j)]
        found[f"gpu {i}"] = (
            f"{p.name}, {p.total_memory / 2**30:.0f} GiB, reaches {','.join(peers) or 'none'}"
        )
    return found or {"gpu": "none; the CPU runs everything"}


def _links() -> dict[str, str]:
    """What the vendor's tool says of the links, line by line."""
    for command in TOPOLOGY:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        return {f"{command[0]} {i}": line for i, line in enumerate(lines)}
    return {"matrix": "none: neither nvidia-smi topo -m nor rocm-smi --showtopo runs here"}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def examine(ranks: int = 2) -> dict[str, dict[str, str]]:
    """Sections of name: text; under torchrun every rank calls it, and the first one's is complete.

    Args:
        ranks: how many to fork for the ping, where torchrun started none.
    """
    env = environment()
    packages = {name: found or "not installed" for name, found in env.pop("packages").items()}
    packages |= {name: _version(name) for name in OPTIONAL}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pinged = ranks_section(ranks)
    kernels = {"math": "ok (any device; slow)", "aten cpu": "ok"}
    kernels |= flash.available("cuda" if gpus else "cpu")
    backends = {
        name: "ok" if getattr(dist, f"is_{name}_available")() else "not in this torch"
        for name in ("gloo", "nccl", "mpi")
    }
    if gpus:
        backends["nccl"] += f", version {'.'.join(map(str, torch.cuda.nccl.version()))}"
    runtime = {"cuda": str(torch.version.cuda), "hip": str(torch.version.hip)}
    return {
        "machine": {k: str(v) for k, v in env.items()},
        "packages": packages,
        "runtime": runtime,
        "devices": _devices(gpus),
        "links": _links(),
        "kernels": kernels,
        "backends": backends,
        "ranks": pinged,
    }
