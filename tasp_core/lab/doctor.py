"""What this machine can do: versions, devices, links, kernels (or why they are missing), a ping of ranks.

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
REPEATS = 5  # of each message
LARGE = 1 << 22  # bytes of the message that shows a link's rate


def examine(ranks: int = 2) -> dict[str, dict[str, str]]:
    """Lines of text, by section and name; under torchrun every rank calls it.

    Args:
        ranks: how many to fork for the ping, where torchrun started none.
    """
    env = environment()
    packages = {name: number or "not installed" for name, number in env.pop("packages").items()}
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


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _devices(gpus: int) -> dict[str, str]:
    """Name, memory and peers of each device."""
    devices = {}
    for i in range(gpus):
        p = torch.cuda.get_device_properties(i)
        peers = [str(j) for j in range(gpus) if j != i and torch.cuda.can_device_access_peer(i, j)]
        devices[f"gpu {i}"] = (
            f"{p.name}, {p.total_memory / 2**30:.0f} GiB, reaches {','.join(peers) or 'none'}"
        )
    return devices or {"gpu": "none; the CPU runs everything"}


def _links() -> dict[str, str]:
    """The vendor tool's table of links, line by line."""
    for command in TOPOLOGY:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        return {f"{command[0]} {i}": line for i, line in enumerate(lines)}
    return {"matrix": "none: neither nvidia-smi topo -m nor rocm-smi --showtopo runs here"}


def ranks_section(ranks: int) -> dict[str, str]:
    """The ping between this job's ranks, or between forked ones of this machine."""
    try:
        if under_torchrun():
            return _matrix(ping(dist.get_rank(), dist.group.WORLD), f"{dist.get_backend()} ranks")
        return _matrix(launch(ping, ranks, timeout_s=60.0)[0], "forked gloo ranks")
    except Exception as error:  # whatever stops ranks is what this command is for
        return {"ping": f"FAILED: {error}"}


def ping(rank: int, group: Any) -> list[list[tuple[float, float] | None]]:
    """Of each pair of ranks: microseconds of a small message, GB/s of a large one; on every rank."""
    ranks = dist.get_world_size(group)
    gpu = over_nccl(group, "cuda")
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    measured: dict[tuple[int, int], tuple[float, float]] = {}
    for a in range(ranks):
        for b in range(a + 1, ranks):
            if rank in (a, b):
                small, large = (
                    torch.zeros(n, dtype=torch.uint8, device=device) for n in (8, LARGE)
                )
                seconds = [_round_trip(rank, a, b, x, group) / 2 for x in (small, large)]
                measured[a, b] = seconds[0] * 1e6, LARGE / seconds[1] / 1e9
            dist.barrier(group=group)  # one pair at a time
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, measured, group=group)
    return [
        [None if a == b else everyone[min(a, b)][min(a, b), max(a, b)] for b in range(ranks)]
        for a in range(ranks)
    ]


def _round_trip(rank: int, a: int, b: int, x: torch.Tensor, group: Any) -> float:
    """Least seconds of a message from a to b and back; ranks a and b both call it."""
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


def _matrix(pairs: list[list[tuple[float, float] | None]], what: str) -> dict[str, str]:
    """The ping's result as lines: one line per rank, "microseconds/(GB/s)" for each pair."""
    cells = [["-" if x is None else f"{x[0]:.0f}/{x[1]:.2f}" for x in row] for row in pairs]
    width = max(len(c) for row in cells for c in row) + 2
    times = [x for row in pairs for x in row if x]
    slowest = max((x[0] for x in times), default=0.0)
    head = "".join(f"{b}".rjust(width) for b in range(len(pairs)))
    rows = {f"rank {a}": "".join(c.rjust(width) for c in row) for a, row in enumerate(cells)}
    return {
        "ping": f"ok, at most {slowest:.0f} us between {len(pairs)} {what}",
        "us/(GB/s) to": head,
        **rows,
    }


def start() -> bool:
    """Join the ranks that torchrun started, if it did; whether this process prints for all."""
    if not under_torchrun():
        return True
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    return dist.get_rank() == 0


def end() -> None:
    """Leave the ranks that `start` joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
