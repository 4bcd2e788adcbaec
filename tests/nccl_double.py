"""A stand-in for torch.distributed over NCCL: all ranks in one process, each a thread, one runs at a time.

    double = Double(4)
    double.install(monkeypatch)                   # in the modules that exchange
    results = double.run(lambda rank, group: ...)  # of each rank

What it takes from NCCL:

    order       no tags: between two ranks the i-th send meets the i-th receive, whatever they are
    batches     a `batch_isend_irecv` is one unit: done when every operation of it has met its partner
    streams     a rank's batches and collectives run one after the other, in the order of their calls
    blocking    nothing is buffered: a send waits until its receive runs, a collective for all ranks

A pair of different sizes or dtypes raises `MispairedError`, a circular wait `HangError`, with the ranks
and the batches in it. Rows under way are poisoned where they are to arrive, and must not change where
they leave. Not covered: more than one group, streams of one's own, time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as real
from torch import Tensor

from tasp_core.runtime import exchange, process_group, sharding


class MispairedError(RuntimeError):
    """A send has met a receive of another size or dtype, or a collective another one."""


class HangError(RuntimeError):
    """No rank can go on."""


class AbortedError(RuntimeError):
    """Another rank has failed."""


class P2POp(NamedTuple):
    """One send or receive, as torch.distributed.P2POp."""

    op: Any
    tensor: Tensor
    peer: int | None = None
    group: Any = None
    tag: int = 0
    group_peer: int | None = None


class Transfer(NamedTuple):
    """A send or receive in a batch; `number` is its turn between its two ranks."""

    send: bool
    peer: int
    number: int
    rows: Tensor
    before: Tensor | None  # of a send: its rows when it was posted

    def __str__(self) -> str:
        way = "send to" if self.send else "receive from"
        return f"{way} rank {self.peer} ({list(self.rows.shape)} {self.rows.dtype})"


class Batch:
    """What a rank has called as one: transfers, or a collective of all ranks."""

    def __init__(self, rank: int, number: int, transfers: Sequence[Transfer], what: str) -> None:
        self.rank, self.number, self.what = rank, number, what
        self.open = list(transfers)  # have not met their partners
        self.run: Callable[[list[Batch]], None] | None = None  # of a collective
        self.data: tuple[Any, ...] = ()
        self.done = False

    def __str__(self) -> str:
        missing = ", ".join(map(str, self.open)) or self.what
        return f"rank {self.rank} in batch {self.number}: {missing}"


class Work(NamedTuple):
    """The handle of a batch."""

    double: Double
    batch: Batch

    def wait(self) -> bool:
        self.double.block(self.batch)
        return True


class Group:
    """One rank's end of the double's only group."""

    def __init__(self, double: Double, rank: int) -> None:
        self.double, self.rank = double, rank

    def size(self) -> int:
        return self.double.ranks


class Double:
    """`ranks` ranks that exchange as NCCL lets them.

    Args:
        seed: which of the ranks that can go on does, at every post and wait.
        eager: transfers happen as soon as they can; otherwise as late as they can.
        joined: whether the communicator exists, as after any collective. NCCL makes it at the first
            call, in which all ranks have to take part: until then nothing moves.
    """

    def __init__(
        self, ranks: int, *, seed: int = 0, eager: bool = False, joined: bool = True
    ) -> None:
        self.ranks, self.eager, self.dice = ranks, eager, random.Random(seed)
        self.joined = joined
        self.groups = [Group(self, rank) for rank in range(ranks)]
        self.transfers = 0
        self._lock, self._turn = Condition(), -1
        self._queues: list[list[Batch]] = [[] for _ in range(ranks)]
        self._batches = [0] * ranks
        self._numbers: dict[tuple[int, int, bool], int] = defaultdict(int)
        self._waits: dict[int, Batch | None] = {}  # of ranks that have not finished
        self._error: BaseException | None = None

    def install(self, monkeypatch: Any) -> None:
        """Puts it where the modules that exchange look for torch.distributed."""
        stand_in = Dist()
        for module in (process_group, exchange, sharding):
            monkeypatch.setattr(module, "dist", stand_in)
        for module in (process_group, exchange):
            monkeypatch.setattr(module, "over_nccl", lambda *_: True)

    # ---- ranks as threads, one at a time

    def run(self, fn: Callable[[int, Group], Any]) -> list[Any]:
        """fn(rank, group) of every rank.

        Raises:
            MispairedError, HangError, or what the first rank to fail has raised.
        """
        results: list[Any] = [None] * self.ranks
        self._waits = dict.fromkeys(range(self.ranks))

        def one(rank: int) -> None:
            with self._lock:
                try:
                    self._sleep(rank)
                    results[rank] = fn(rank, self.groups[rank])
                except BaseException as error:  # told to the caller, below
                    self._fail(error)
                finally:
                    self._waits.pop(rank, None)
                    self._next()

        threads = [Thread(target=one, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        with self._lock:
            self._next()
        for thread in threads:
            thread.join()
        if self._error is None:
            self._progress()
            left = [str(batch) for queue in self._queues for batch in queue]
            if left:
                raise HangError("all ranks have finished, and left " + "; ".join(left))
        else:
            raise self._error
        return results

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._lock.notify_all()

    def _sleep(self, rank: int) -> None:
        """Until it is the rank's turn."""
        self._lock.wait_for(lambda: self._turn == rank or self._error)
        if self._error:
            raise AbortedError(f"rank {rank} stops: another one has failed") from self._error

    def _next(self) -> None:
        """Give the turn to a rank that can go on."""
        if self._error:
            return
        ready = [rank for rank, batch in self._waits.items() if batch is None or batch.done]
        if not ready and self._waits:
            # the tail of what a rank has called may wait behind what blocks it
            stuck = [str(queue[0]) for queue in self._queues if queue]
            ended = sorted(set(range(self.ranks)) - set(self._waits))
            also = f"; finished: ranks {', '.join(map(str, ended))}" if ended else ""
            self._fail(HangError(f"no rank can go on: {'; '.join(stuck)}{also}"))
            return
        if ready:
            self._turn = self.dice.choice(ready)
            self._lock.notify_all()

    def _yield(self, rank: int, batch: Batch | None) -> None:
        self._waits[rank] = batch
        self._next()
        self._sleep(rank)
        self._waits[rank] = None

    def block(self, batch: Batch) -> None:
        """Let others run until a batch of the rank that runs is done."""
        self._progress()
        self._yield(batch.rank, batch)

    # ---- what NCCL does

    def post(self, rank: int, ops: Sequence[tuple[bool, int, Tensor]]) -> Work:
        """Sends (True) and receives (False) with peers, as one batch."""
        transfers = []
        for send, peer, rows in ops:
            if not rows.is_contiguous() or not rows.numel():
                raise MispairedError(
                    f"rank {rank} posts rows that NCCL does not take: {rows.shape}"
                )
            link = (rank, peer) if send else (peer, rank)
            number = self._numbers[*link, send]
            self._numbers[*link, send] += 1
            before = rows.clone() if send else None
            if not send:
                poison(rows)
            transfers.append(Transfer(send, peer, number, rows, before))
        return self._queue(Batch(rank, self._batches[rank], transfers, "transfers"))

    def collective(
        self, rank: int, what: str, run: Callable[[list[Batch]], None], *data: Any
    ) -> Work:
        """One rank's part of a collective of all ranks, which `run` does on all parts."""
        batch = Batch(rank, self._batches[rank], (), what)
        batch.run, batch.data = run, data
        return self._queue(batch)

    def _queue(self, batch: Batch) -> Work:
        self._batches[batch.rank] += 1
        self._queues[batch.rank].append(batch)
        if self.eager:
            self._progress()
        self._yield(batch.rank, None)
        return Work(self, batch)

    def _progress(self) -> None:
        """All that the batches at the heads of the ranks' streams can do."""
        self.joined = self.joined or min(self._batches) > 0
        moved = self.joined
        while moved:
            heads = [queue[0] if queue else None for queue in self._queues]
            moved = any([self._meet(src, heads) for src in heads if src is not None])
            some = [head for head in heads if head is not None and head.run]
            if len(some) == self.ranks:
                kinds = {head.what for head in some}
                if len(kinds) > 1:
                    raise MispairedError("; ".join(map(str, some)))
                assert some[0].run is not None
                some[0].run(some)
                for head in some:
                    head.run = None
                    moved = True
            for queue in self._queues:
                if queue and not queue[0].open and queue[0].run is None:
                    queue.pop(0).done = True

    def _meet(self, batch: Batch, heads: list[Batch | None]) -> bool:
        """Transfers of a batch at its stream's head to those of others."""
        found = False
        for send in [x for x in batch.open if x.send]:
            other = heads[send.peer]
            for recv in other.open if other else ():
                if not recv.send and (recv.peer, recv.number) == (batch.rank, send.number):
                    self._move(batch.rank, send, recv)
                    batch.open.remove(send)
                    other.open.remove(recv)
                    found = True
                    break
        return found

    def _move(self, src: int, send: Transfer, recv: Transfer) -> None:
        a, b = send.rows, recv.rows
        if (a.dtype, a.numel()) != (b.dtype, b.numel()):
            raise MispairedError(
                f"send {send.number} of rank {src} to rank {send.peer} is {list(a.shape)} {a.dtype}, "
                f"the receive that it meets {list(b.shape)} {b.dtype}"
            )
        if not torch.equal(a.view(torch.uint8), send.before.view(torch.uint8)):
            raise MispairedError(f"rows that rank {src} sends to rank {send.peer} change under way")
        b.view(-1).copy_(a.view(-1))
        self.transfers += 1


def poison(rows: Tensor) -> None:
    """What is under way may be anything until it has been waited for."""
    rows.fill_(torch.nan if rows.dtype.is_floating_point else torch.iinfo(rows.dtype).max)


class Dist:
    """The part of torch.distributed that the core uses, on ends of a `Double`; the rest is torch's."""

    P2POp = P2POp
    isend, irecv = "isend", "irecv"

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: Group) -> int:
        return group.rank

    def get_world_size(self, group: Group) -> int:
        return group.double.ranks

    def get_global_rank(self, group: Group, rank: int) -> int:
        return rank

    def batch_isend_irecv(self, ops: Sequence[P2POp]) -> list[Work]:
        group = ops[0].group
        assert all(op.group is group for op in ops)
        some = [(op.op == self.isend, op.group_peer, op.tensor) for op in ops]
        return [group.double.post(group.rank, some)]

    def _called(self, work: Work, async_op: bool) -> Work | None:
        if async_op:
            return work
        work.wait()
        return None

    def all_gather(
        self, everyone: list[Tensor], own: Tensor, group: Group, async_op: bool = False
    ) -> Work | None:
        def run(parts: list[Batch]) -> None:
            for part in parts:
                for rows, other in zip(part.data[0], parts, strict=True):
                    copy(rows, other.data[1], part.rank, other.rank)

        for rows in everyone:
            poison(rows)
        work = group.double.collective(group.rank, "all_gather", run, everyone, own)
        return self._called(work, async_op)

    def all_to_all_single(
        self,
        into: Tensor,
        out: Tensor,
        into_sizes: list[int] | None = None,
        out_sizes: list[int] | None = None,
        group: Group | None = None,
        async_op: bool = False,
    ) -> Work | None:
        def run(parts: list[Batch]) -> None:
            for part in parts:
                for rows, other in zip(part.data[0], parts, strict=True):
                    copy(rows, other.data[1][part.rank], part.rank, other.rank)

        assert group is not None
        ranks = group.double.ranks
        sides = []
        for rows, sizes in ((into, into_sizes), (out, out_sizes)):
            even = len(rows) // ranks
            if not rows.is_contiguous() or sum(sizes or [even] * ranks) != len(rows):
                raise MispairedError(
                    f"rank {group.rank}: {sizes} of {list(rows.shape)} in all_to_all"
                )
            sides.append(rows.split(sizes or [even] * ranks))
        poison(into)
        work = group.double.collective(group.rank, "all_to_all_single", run, *sides)
        return self._called(work, async_op)

    def all_reduce(self, rows: Tensor, group: Group, async_op: bool = False) -> Work | None:
        def run(parts: list[Batch]) -> None:
            if len({(p.data[0].shape, p.data[0].dtype) for p in parts}) > 1:
                raise MispairedError("; ".join(f"{p}: {p.data[0].shape}" for p in parts))
            total = sum(p.data[0].clone() for p in parts)
            for p in parts:
                p.data[0].copy_(total)

        return self._called(group.double.collective(group.rank, "all_reduce", run, rows), async_op)

    def barrier(self, group: Group) -> None:
        group.double.collective(group.rank, "barrier", lambda parts: None).wait()


def copy(into: Tensor, out: Tensor, rank: int, other: int) -> None:
    """Rows of a collective from rank `other` to `rank`."""
    if (into.dtype, into.numel()) != (out.dtype, out.numel()):
        raise MispairedError(
            f"rank {rank} expects {list(into.shape)} {into.dtype} of rank {other} in a collective, "
            f"which sends {list(out.shape)} {out.dtype}"
        )
    into.copy_(out.reshape(into.shape))
