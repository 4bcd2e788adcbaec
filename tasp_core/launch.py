"""Real ranks for notebooks, tests and laptops: forked processes joined by gloo.

    def hello(rank, group, name):
        return f"{name} {rank}"

    tasp.launch(hello, 4, "rank")        # ['rank 0', 'rank 1', 'rank 2', 'rank 3']

Forking keeps closures and notebook functions usable and starts four ranks in about 0.2 s. It must
not be used once CUDA is initialised in the parent; on clusters use torchrun instead.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from .errors import PlanError

STACKS_S = 0.2
GRACE_S = 5.0  # after one rank has failed, how long the others may take to say why they stopped


class RankError(RuntimeError):
    """Ranks that raised, died or hung; `errors` maps each such rank to what it said."""

    def __init__(self, errors: dict[int, str], first: int, cause: BaseException | None) -> None:
        self.errors, self.first, self.cause = errors, first, cause
        others = [r for r in sorted(errors) if r != first]
        more = "".join(f"\n  then rank {r}: {errors[r].strip().splitlines()[-1]}" for r in others)
        super().__init__(f"rank {first} failed first:\n{errors[first]}{more}")


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def _share_cores() -> None:
    """Let ranks that share cores finish their turns, unless the user has set another policy.

    A rank stopped in the midst of sending, by one that wakes up, keeps its connection locked, and
    gloo's own thread spins on it.
    """
    with suppress(AttributeError, OSError):  # macOS has none, a sandbox may refuse
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _child(pipe: Any, fn: Callable[..., Any], rank: int, ranks: int, path: str, args: tuple[Any, ...],
           timeout_s: float, enter: Callable[[int], None] | None) -> None:  # fmt: skip
    import torch
    import torch.distributed as dist

    # what the parent has dropped must not be collected here: a process group would wait for its threads,
    # which a fork does not copy
    gc.freeze()
    torch.set_num_threads(1)  # a forked OpenMP pool can hang
    _share_cores()
    stacks = open(f"{path}.{rank}", "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.register(signal.SIGUSR2, stacks)
    if name := _loopback():
        os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        if enter is not None:
            enter(rank)
        dist.init_process_group(
            "gloo", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        result = fn(rank, dist.group.WORLD, *args)
        pipe.send_bytes(pickle.dumps((True, result, None)))
        dist.barrier()  # nobody leaves while a peer still reads from it
    except BaseException as error:
        text = traceback.format_exc()
        try:
            payload = pickle.dumps((False, text, error))
            pickle.loads(payload)
        except Exception:
            payload = pickle.dumps((False, text, None))
        pipe.send_bytes(payload)
    finally:
        pipe.close()
        os._exit(0)  # a forked child must not run the parent's exit handlers


def launch(
    fn: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 120.0,
    enter: Callable[[int], None] | None = None,
) -> list[Any]:  # fmt: skip
    """Run fn(rank, group, *args) on real gloo ranks and return each rank's result, by rank.

    Args:
        fn: any function, closures included; its result must be picklable.
        ranks: how many, >= 1.
        timeout_s: how long all of it may take, and how long one message may.
        enter: called with its rank in each new process before it joins the others.

    Raises:
        PlanError: ranks below 1, or a platform that cannot fork.
        ImportError: torch is missing, or older than the oldest that was tried.
        RankError: names the rank that raised, died or hung first; all ranks are ended.
    """
    if int(ranks) != ranks or ranks < 1:
        raise PlanError(f"launch needs a whole number of ranks >= 1, got {ranks!r}")
    if not hasattr(os, "fork"):
        raise PlanError("launch forks its ranks, which this platform cannot; use torchrun or WSL")
    from . import torch_required  # noqa: F401, I001 (before all that imports torch)
    import torch

    with suppress(ImportError):  # what a first backward imports: here once, not in every rank
        import_module("torch.fx.experimental.symbolic_shapes")
    if torch.cuda.is_initialized():
        raise PlanError("launch forks, which breaks an initialised CUDA; use torchrun")
    context = get_context("fork")
    with tempfile.TemporaryDirectory(prefix="tasp-") as folder:
        path, pipes, processes = os.path.join(folder, "store"), [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, daemon=True,
                args=(theirs, fn, rank, ranks, path, args, timeout_s, enter),
            )  # fmt: skip
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout_s, lambda r: _stacks(processes[r].pid, f"{path}.{r}"))
        finally:
            _end(processes)


def _stacks(pid: int | None, path: str) -> str:
    """Where a process's threads are, in their own words."""
    with suppress(OSError):
        if pid:
            os.kill(pid, signal.SIGUSR2)
            time.sleep(STACKS_S)
        return Path(path).read_text().strip()
    return ""


def _collect(pipes: list[Any], timeout_s: float, stacks: Callable[[int], str]) -> list[Any]:
    """Results by rank; once a rank fails, the others get a few seconds to report as well.

    Args:
        stacks: where a rank that hangs is, as text.
    """
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    first: tuple[int, BaseException | None] | None = None
    deadline = time.monotonic() + timeout_s
    open_pipes: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        ready: list[Any] = connection.wait(list(open_pipes), timeout=left)
        for pipe in ready:
            rank = open_pipes.pop(pipe)
            try:
                ok, value, cause = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ok, value, cause = False, f"rank {rank} died without a word (killed?)", None
            if ok:
                results[rank] = value
                continue
            errors[rank] = value
            if first is None:
                first = rank, cause
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for rank in open_pipes.values():
        errors[rank] = "still running when it was ended"
        if not first:
            errors[rank] = f"hung: no result in {timeout_s} s\n{stacks(rank)}"
    if errors:
        rank, cause = first or (min(errors), None)
        raise RankError(errors, rank, cause) from cause
    return [results[rank] for rank in range(len(pipes))]


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.join(0.5)
        if process.exitcode is None:
            process.kill()
            process.join()
