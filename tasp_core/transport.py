"""Messages of one step between the ranks of a group, and the handshake before a plan is first used.

`p2p` posts one send or receive a peer and kind, or one a message where these are large, in an order
both ends agree on; `all_to_all` packs a step into one collective (every link of K_n at once). A
message that does not arrive raises `TransportError` with rank, step, peer and share. How long to wait
is the group's own time-out.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import PlanError, TransportError
from .program import RECEIVES, SMALL_BYTES, Message, Step
from .schedules import DKV, KINDS, KV

Wait = Callable[[], None]
Buffers = dict[str, Tensor]
NOTE_BYTES = 4096
TAGS, STEPS = 1 << 12, 1 << 4  # with 15 bits of salt a tag has 31
PARTS = 64
_CALLS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def _settled() -> None:
    """Nothing to compare."""


class Exchange:
    """The ranks of one process group, or some of them, for one plan's passes.

    Args:
        members: the ranks of `group` that take part, in plan order; None: all of them. Collectives
            are still called by all ranks of `group`, each with its own members.
    """

    def __init__(self, group: Any, members: Sequence[int] | None = None) -> None:
        self.group: Any = dist.group.WORLD if group is None else group
        own, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if own < 0:
            raise PlanError("this process is not in the group it passed to attention")
        self.members = list(range(self.world) if members is None else members)
        self.rank, self.ranks = self.members.index(own), len(self.members)
        self.on_cpu = dist.get_backend(self.group) != "nccl"
        self._salt, self._open = 0, _settled

    def _bytes(self, data: bytes) -> Tensor:
        device = "cpu" if self.on_cpu else torch.device("cuda", torch.cuda.current_device())
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)

    def _failure(self, t: int, what: str, error: RuntimeError) -> TransportError:
        """A failure of gloo or NCCL as an error that says who waited for what."""
        return TransportError(
            f"rank {self.rank}, step {t}: {what} failed; look for that rank's own error "
            f"first. ({str(error).splitlines()[0]})"
        )

    @contextmanager
    def _naming(self, t: int, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._failure(t, what, error) from error

    def handshake(self, note: dict[str, str], error: type[ValueError] = PlanError) -> None:
        """Start to compare what every rank is about to do; `settle`, or the first wait, ends it.

        Until then tags keep messages of ranks that do not agree from meeting.

        Args:
            note: what must be equal on all ranks; the key "error" holds a rank's own complaint.
        """
        calls = _CALLS[self.group] = _CALLS.get(self.group, 0) + 1
        note = {key: value[:400] for key, value in note.items()}
        text = json.dumps(note | {"call": str(calls)} if self.on_cpu else note).encode()
        digest = hashlib.sha256(text).digest()
        self._salt = int.from_bytes(digest[:2], "big") >> 1
        mine = self._bytes(digest)
        found = mine.new_empty((self.ranks, len(mine)))  # all at once: a gather would walk a ring
        everyone = mine.repeat(self.ranks, 1)
        work = dist.all_to_all_single(found, everyone, group=self.group, async_op=True)

        def finish() -> None:
            with self._naming(0, "comparing plans with the other ranks"):
                work.wait()
            if note.get("error") or bool((found != everyone).any()):
                self._explain(text, error)

        self._open = finish

    def settle(self) -> None:
        """End the handshake; the same error on all ranks where they differ.

        Raises:
            error of `handshake`: a rank's complaint, or the ranks that differ and in what.
        """
        finish, self._open = self._open, _settled
        finish()

    def _explain(self, text: bytes, error: type[ValueError]) -> None:
        mine = self._bytes(text.ljust(NOTE_BYTES, b"\0"))
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(everyone, mine, group=self.group)
        notes = [json.loads(row.cpu().numpy().tobytes().rstrip(b"\0")) for row in everyone]
        errors = [f"rank {r}: {n['error']}" for r, n in enumerate(notes) if n.get("error")]
        if errors:
            more = f" (and {len(errors) - 1} more ranks)" if len(errors) > 1 else ""
            raise error(errors[0] + more)
        lines = []
        for key in notes[0]:
            values = [n.get(key) for n in notes]
            if len(set(values)) > 1:
                usual = max(values, key=values.count)
                others = [r for r, v in enumerate(values) if v != usual]
                odd = ", ".join(f"rank {r} has {values[r]}" for r in others[:4])
                lines.append(f"{key}: {odd}; the others have {usual}")
        raise error(
            "ranks are about to run different plans, nothing was exchanged; "
            "give every rank the same documents, options and shapes. " + "; ".join(lines)
        )

    def post(self, t: int, step: Step, buffers: Buffers) -> Wait:
        """Start the step's sends and receives; the returned function waits for all of them."""
        recvs = [part for m in step.recvs for part in _parcels(m, buffers, receive=True)]
        sends = [part for m in step.sends for part in _parcels(m, buffers, receive=False)]
        parcels = [*recvs, *sends]
        if not parcels:
            return lambda: None

        def peers() -> str:
            return "ranks " + ", ".join(sorted({str(p.message.peer) for p in parcels}))

        def what(i: int) -> str:
            if len(pending) < len(parcels):  # NCCL: one handle for all messages
                return f"exchanging with {peers()}"
            to = "waiting for {} from" if i < len(recvs) else "sending {} to"
            return f"{to.format(parcels[i])} rank {parcels[i].message.peer}"

        try:
            pending = self.start(t, recvs, sends)
        except RuntimeError as error:
            messages = f"posting {len(parcels)} messages to and from {peers()}"
            raise self._failure(t, messages, error) from error

        def wait() -> None:
            self.settle()
            for i, work in enumerate(pending):
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self._failure(t, what(i), error) from error
            for p in recvs:
                if p.ranges:
                    put_rows(p.ranges, p.rows, buffers[p.message.buffer])

        return wait

    def start(self, t: int, recvs: list[Parcel], sends: list[Parcel]) -> list[Any]:
        """Start receives, then sends: gloo sends once it hears that the receiver is ready, and that
        word must not queue up behind a message's bytes. One handle each, or one for all."""
        group, to = self.group, self.members
        first = (self._salt * STEPS + t % STEPS) * TAGS
        if self.on_cpu:  # without the checks of isend and irecv, which cost as much again
            return [
                *(group.recv([p.rows], to[p.message.peer], first + p.tag) for p in recvs),
                *(group.send([p.rows], to[p.message.peer], first + p.tag) for p in sends),
            ]
        ops = [
            dist.P2POp(op, p.rows, group=group, tag=first + p.tag, group_peer=to[p.message.peer])
            for op, some in ((dist.irecv, recvs), (dist.isend, sends))
            for p in some
        ]
        return list(dist.batch_isend_irecv(ops))

    def post_all_to_all(self, t: int, step: Step, buffers: Buffers) -> Wait:
        """The same as one all-to-all for each kind of message; packs, so it needs one more copy."""
        self.settle()
        finish = []
        for kind in (DKV, KV):
            like = buffers.get(RECEIVES[kind])
            if like is None:
                continue
            out = [m for m in step.sends if m.kind == kind]
            into = [m for m in step.recvs if m.kind == kind]
            send = torch.cat([like[:0], *(take_rows(m, m.ranges, buffers) for m in out)])
            recv = like.new_empty((sum(m.count for m in into), *like.shape[1:]))
            splits = (self._splits(into), self._splits(out))
            with self._naming(t, "the step's all-to-all"):
                work = dist.all_to_all_single(recv, send, *splits, group=self.group, async_op=True)
            finish.append((work, recv, into))

        def wait() -> None:
            for work, recv, into in finish:
                with self._naming(t, "the step's all-to-all"):
                    work.wait()
                for m, rows in zip(into, recv.split([m.count for m in into]), strict=True):
                    put_rows(m.ranges, rows, buffers[m.buffer])

        return wait

    def all_gather(self, own: Tensor, arena: Tensor, rows: int) -> Wait:
        """Every rank's rows, padded to `rows`, into the arena in rank order."""
        self.settle()
        padded = own if len(own) == rows else own.new_zeros((rows, *own.shape[1:]))
        if padded is not own:
            padded[: len(own)] = own
        everyone = list(arena.unflatten(0, (self.ranks, rows)).unbind())
        with self._naming(0, "the all-gather of every rank's kv"):
            if self.ranks == self.world:
                work = dist.all_gather(everyone, padded, group=self.group, async_op=True)
            else:  # members of one larger group: the same rows to each of them
                sizes = [rows if r in self.members else 0 for r in range(self.world)]
                copies = padded.repeat(self.ranks, *(1,) * (padded.dim() - 1))
                work = dist.all_to_all_single(
                    arena, copies, sizes, sizes, group=self.group, async_op=True
                )

        def wait() -> None:
            with self._naming(0, "the all-gather of every rank's kv"):
                work.wait()

        return wait

    def _splits(self, messages: Iterable[Message]) -> list[int]:
        sizes = [0] * self.world
        for m in messages:
            sizes[self.members[m.peer]] += m.count
        return sizes


class Parcel(NamedTuple):
    """What is sent or received at once: a message, or one part of a large one."""

    message: Message
    rows: Tensor  # a view of the buffer where its rows are adjacent
    tag: int
    ranges: Sequence[tuple[int, int]] = ()  # buffer rows, where `rows` is no view of them

    def __str__(self) -> str:
        m = self.message
        return f"{KINDS[m.kind]}{m.owner}.{m.share}" + " and more" * (len(m.ranges) > 1)


def _parcels(m: Message, buffers: Buffers, *, receive: bool) -> Iterator[Parcel]:
    """Both ends know the sizes of a message's parts, so both divide it alike."""
    buffer, dtype = buffers[m.buffer], buffers[RECEIVES[m.kind]].dtype
    if m.rows is None:
        yield Parcel(m, buffer[m.low : m.low + m.count].to(dtype), m.tag * PARTS % TAGS)
        return
    ranges = m.ranges
    row_bytes = math.prod(buffer.shape[1:]) * dtype.itemsize
    small = m.count * row_bytes <= len(ranges) * SMALL_BYTES
    for i, part in enumerate([ranges] if small else [[r] for r in ranges]):
        tag = (m.tag * PARTS + i) % TAGS
        if not receive:
            yield Parcel(m, take_rows(m, part, buffers), tag)
        elif (rows := _view(part, buffer)) is not None:
            yield Parcel(m, rows, tag)
        else:
            room = buffer.new_empty((sum(n for _, n in part), *buffer.shape[1:]))
            yield Parcel(m, room, tag, part)


def _view(ranges: list[tuple[int, int]], buffer: Tensor) -> Tensor | None:
    """The rows as a view, None where they are apart."""
    ends = [low + count for low, count in ranges]
    if any(low != end for (low, _), end in zip(ranges[1:], ends, strict=False)):
        return None
    return buffer[ranges[0][0] : ends[-1]]


def take_rows(m: Message, ranges: list[tuple[int, int]], buffers: Buffers) -> Tensor:
    """The rows to send, in the dtype in which they are received; copied where apart."""
    buffer = buffers[m.buffer]
    rows = _view(ranges, buffer)
    if rows is None:
        rows = torch.cat([buffer[low : low + count] for low, count in ranges])
    return rows.to(buffers[RECEIVES[m.kind]].dtype)


def put_rows(ranges: Sequence[tuple[int, int]], rows: Tensor, buffer: Tensor) -> None:
    """Rows that have arrived, to where they belong."""
    parts = rows.split([count for _, count in ranges])
    for (low, count), part in zip(ranges, parts, strict=True):
        buffer[low : low + count] = part
