"""Real ranks for notebooks, tests and laptops: forked processes joined by gloo.

    def hello(rank, group, name):
        return f"{name} {rank}"

    tasp.launch(hello, 4, "rank")        # ['rank 0', 'rank 1', 'rank 2', 'rank 3']

Forking keeps closures and notebook functions usable and starts four ranks in about 0.2 s. It must
not be used once CUDA is initialised in the parent; on clusters use torchrun instead.

`on_ranks` takes the ranks of a launcher (torchrun, srun) if the process was started by one, else forks.
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
from typing import Any, NamedTuple

from ..errors import PlanError, TransportError

# What a first pass imports: here once, not in every rank.
FIRST_IMPORTS = (
    "torch.fx.experimental.symbolic_shapes",
    "numpy.ma",
    ".checkpointing",
    ".execute",
    "..kernels.resolve",
)
STACKS_S = 0.2
GRACE_S = 5.0  # after one rank has failed, how long the others may take to say why they stopped


class RankError(RuntimeError):
    """Ranks that raised, died or hung.

    Attributes:
        errors: the text of each such rank's error, by rank.
        first: the rank at fault, as far as the reports tell; not one that waited for another in vain.
        cause: the exception that `first` raised; None where it died or hung.
    """

    def __init__(self, errors: dict[int, str], first: int, cause: BaseException | None) -> None:
        self.errors, self.first, self.cause = errors, first, cause
        others = [r for r in sorted(errors) if r != first]
        more = "".join(f"\n  then rank {r}: {errors[r].strip().splitlines()[-1]}" for r in others)
        super().__init__(f"rank {first} failed first:\n{errors[first]}{more}")


class _Failure(NamedTuple):
    """What a rank reported instead of a result.

    Attributes:
        waited_for: ranks whose messages did not arrive, as far as known; None: a failure of its own.
    """

    text: str
    cause: BaseException | None
    waited_for: tuple[int, ...] | None


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def _waited_for(error: BaseException | None) -> tuple[int, ...] | None:
    """The ranks an error says it waited for, () if it says only that messages failed; else None."""
    from torch.distributed import DistError

    while error is not None:
        if isinstance(error, TransportError):
            return error.peers
        if isinstance(error, DistError) or (
            isinstance(error, RuntimeError) and "/gloo/" in str(error)
        ):
            return ()  # of a call of torch.distributed itself
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _share_cores() -> None:
    """Let ranks that share cores finish their time slices, unless the user has set another policy.

    A rank that is preempted while it sends keeps its connection locked, and gloo's own thread spins on
    the lock.
    """
    with suppress(AttributeError, OSError):  # macOS has none, a sandbox may refuse
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _child(
    pipe: Any,
    fn: Callable[..., Any],
    rank: int,
    ranks: int,
    path: str,
    args: tuple[Any, ...],
    timeout_s: float,
    message_s: float,
    enter: Callable[[int], None] | None,
    leave: Any,
) -> None:
    # what the parent has dropped must not be collected here: a process group would wait for its threads,
    # which a fork does not copy
    gc.freeze()
    import torch
    import torch.distributed as dist

    all_reported, writer = leave
    writer.close()  # the parent's copy alone keeps this process here
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
            "gloo",
            store=dist.FileStore(path, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=message_s),
        )
        result = fn(rank, dist.group.WORLD, *args)
        pipe.send_bytes(pickle.dumps((True, result)))
        # nobody leaves while a peer still reads from it; a barrier's messages could be taken for a user's
        all_reported.poll(timeout_s)
    except BaseException as error:
        failure = _Failure(traceback.format_exc(), error, _waited_for(error))
        try:
            payload = pickle.dumps((False, failure))
            pickle.loads(payload)
        except Exception:
            payload = pickle.dumps((False, failure._replace(cause=None)))
        pipe.send_bytes(payload)
    finally:
        pipe.close()
        os._exit(0)  # a forked child must not run the parent's exit handlers


def launch(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout_s: float = 120.0,
    message_timeout_s: float | None = None,
    enter: Callable[[int], None] | None = None,
) -> list[Any]:
    """Run fn(rank, group, *args) on real gloo ranks and return each rank's result, by rank.

    Args:
        fn: any function, closures included; its result must be picklable.
        ranks: how many, >= 1.
        timeout_s: how long all of it may take.
        message_timeout_s: how long a rank may wait for one message; it must be shorter, so that ranks
            that wait in vain can say for whom before all are ended. Default: three quarters of timeout_s.
        enter: called with its rank in each new process before it joins the others.

    Raises:
        PlanError: ranks below 1, impossible time-outs, or a platform that cannot fork.
        ImportError: torch is missing, or older than the oldest that was tried.
        RankError: names the rank that raised, died or hung first; all ranks are ended.

    >>> launch(lambda rank, group, base: base + rank, 3, 10)
    [10, 11, 12]
    """
    if isinstance(ranks, bool | str) or int(ranks) != ranks or ranks < 1:
        raise PlanError(f"launch needs a whole number of ranks >= 1, got {ranks!r}")
    if not 0 < timeout_s < float("inf"):
        raise PlanError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}")
    message_s = 0.75 * timeout_s if message_timeout_s is None else message_timeout_s
    if not 0 < message_s < timeout_s:
        raise PlanError(
            f"message_timeout_s must be above 0 and below timeout_s, {timeout_s}, got {message_s!r}"
        )
    if not hasattr(os, "fork"):
        raise PlanError("launch forks its ranks, which this platform cannot; use torchrun or WSL")
    from .. import torch_required  # noqa: F401, I001 (before all that imports torch)
    import torch

    for name in FIRST_IMPORTS:
        with suppress(ImportError):
            import_module(name, __package__)
    if torch.cuda.is_initialized():
        raise PlanError("launch forks, which breaks an initialised CUDA; use torchrun")
    context = get_context("fork")
    leave = context.Pipe(duplex=False)  # closed once all ranks have reported, or with this process
    with tempfile.TemporaryDirectory(prefix="tasp-") as folder:
        path, pipes, processes = os.path.join(folder, "store"), [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                daemon=True,
                args=(theirs, fn, rank, ranks, path, args, timeout_s, message_s, enter, leave),
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _Reports(pipes, processes, path, timeout_s, message_s).collect()
        finally:
            for end in leave:
                end.close()
            _end(processes)


class _Reports:
    """The reports of one launch's ranks, and which rank is at fault where something failed."""

    def __init__(
        self, pipes: list[Any], processes: list[Any], path: str, timeout_s: float, message_s: float
    ) -> None:
        self.pipes, self.processes, self.path = pipes, processes, path
        self.timeout_s, self.message_s, self.start = timeout_s, message_s, time.monotonic()
        self.results: dict[int, Any] = {}
        self.failures: dict[int, _Failure] = {}  # in the order in which they were reported
        self.silent = set(range(len(pipes)))

    def collect(self) -> list[Any]:
        """Results by rank.

        Raises:
            RankError: a rank failed. The others are given time to report as well.
        """
        deadline = end = self.start + self.timeout_s
        while self.silent and (left := deadline - time.monotonic()) > 0:
            waiting = {self.pipes[rank]: rank for rank in self.silent}
            ready: list[Any] = connection.wait(list(waiting), timeout=left)
            for pipe in ready:
                self._receive(waiting[pipe])
            if ready and self.failures:
                deadline = min(self._until(deadline), end)
        if self.failures or self.silent:
            raise self._error()
        return [self.results[rank] for rank in range(len(self.pipes))]

    def _receive(self, rank: int) -> None:
        """Read the rank's report, (True, result) or (False, failure); a closed pipe is a failure too."""
        self.silent.discard(rank)
        try:
            good, value = pickle.loads(self.pipes[rank].recv_bytes())
        except EOFError:
            process = self.processes[rank]
            process.join(1.0)
            code = process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
            text = f"rank {rank} died without a word (killed? {how})"
            good, value = False, _Failure(text, None, None)
        (self.results if good else self.failures)[rank] = value

    def _until(self, deadline: float) -> float:
        """The time until which ranks that have not reported are waited for, after a report."""
        soon = time.monotonic() + GRACE_S
        if any(f.waited_for is None for f in self.failures.values()):
            return min(deadline, soon)
        # of several that are silent, some may still wait for the one at fault
        return soon if len(self.silent) == 1 else soon + self.message_s

    def _error(self) -> RankError:
        """The error of a launch that failed: every rank's text, and the rank at fault with its cause."""
        hung = self._stacks()
        first = self._first(hung)
        errors = {rank: f.text for rank, f in self.failures.items()}
        for rank, where in hung.items():
            errors[rank] = "still running when it was ended"
            if rank == first:
                seconds = time.monotonic() - self.start
                errors[rank] = f"hung: no result in {seconds:.3g} s\n{where}"
        cause = self.failures[first].cause if first in self.failures else None
        error = RankError(errors, first, cause)
        error.__cause__ = cause
        return error

    def _first(self, hung: dict[int, str]) -> int:
        """The rank at fault: followed from the first report by whom each waited for.

        Args:
            hung: where each rank that did not report is.
        """
        own = [r for r, f in self.failures.items() if f.waited_for is None]
        # of ranks that hang, one that does not itself wait for a message comes first
        culprits = [*own, *sorted(hung, key=lambda r: (_waits(hung[r]), r))]
        if not self.failures:
            return culprits[0]
        followed = list(self.failures)[:1]
        for rank in followed:  # grows
            more = self.failures[rank].waited_for if rank in self.failures else None
            followed += [r for r in more or () if r not in followed]
        blamed = [r for r in culprits if r in followed]
        return (blamed or culprits or followed)[0]

    def _stacks(self) -> dict[int, str]:
        """Stack traces of each process that has not reported, by rank."""
        stacks = {}
        for rank in sorted(self.silent):
            pid = self.processes[rank].pid
            with suppress(OSError):  # no /proc on macOS
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state in "Tt":
                    stacks[rank] = "the process is stopped, by SIGSTOP or a debugger"
                    continue
            with suppress(OSError):
                os.kill(pid, signal.SIGUSR2)
        if len(stacks) < len(self.silent):
            time.sleep(STACKS_S)
        for rank in sorted(self.silent - stacks.keys()):
            stacks[rank] = ""
            with suppress(OSError):
                stacks[rank] = Path(f"{self.path}.{rank}").read_text().strip()
        return stacks


def _waits(stacks: str) -> bool:
    """Whether a process whose stacks these are waits for a message."""
    return "torch/distributed/" in stacks or "tasp_core/runtime/exchange.py" in stacks


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.join(0.5)
        if process.exitcode is None:
            process.kill()
            process.join()


def started() -> bool:
    """Whether a launcher has given this process a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def on_ranks(fn: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 600.0) -> Any:
    """fn(rank, group, device, *args) on every rank; rank 0's result, None on a launcher's others.

    Args:
        ranks: how many to fork where no launcher has started this process; the launcher's count else.
    """
    import torch
    import torch.distributed as dist

    if not started():
        device = torch.device("cpu")

        def local(rank: int, group: Any) -> Any:
            return fn(rank, group, device, *args)

        return launch(local, ranks, timeout_s=timeout_s)[0]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"  # RCCL answers to NCCL's name
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        result = fn(dist.get_rank(), dist.group.WORLD, device, *args)
        return result if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()
