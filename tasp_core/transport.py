"""Messages of one step between the ranks of a group, and the handshake of a call.

`p2p` posts one send or receive a peer and kind, or one a message where these are large, in an order
both ends agree on; `all_to_all` packs a step into one collective (every link of K_n at once). A
message that does not arrive raises `TransportError` with rank, step, peer and share. How long to wait
is the group's own time-out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import PlanError, TransportError
from .parcels import TAGS, Buffers, Parcel, parcels, put_rows, take_rows
from .program import RECEIVES, Message, Step
from .schedules import DKV, KINDS, KV

Wait = Callable[[], None]
Way = tuple[Tensor, int, int]  # rows, the peer's rank in the group, tag
NOTE_BYTES = 4096
STEPS = 1 << 4  # told apart in tags, which have 31 bits: 15 of salt, 4 of these, 12 of a parcel
_CALLS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of attention, by group
_NCCL: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def _settled() -> None:
    """Nothing to compare."""


def over_nccl(group: Any) -> bool:
    """Whether NCCL (or RCCL) joins the group; remembered, asking torch takes as long as a message."""
    if (found := _NCCL.get(group)) is None:
        found = _NCCL[group] = dist.get_backend(group) == "nccl"
    return found


def post(group: Any, recvs: Sequence[Way], sends: Sequence[Way]) -> list[Any]:
    """Start receives, then sends: one handle each, or of NCCL one for all.

    gloo sends once it hears that the receiver is ready, and that word must not queue up behind a
    message's bytes.
    """
    if not over_nccl(group):  # isend and irecv check as long as the call itself takes
        return [
            *(group.recv([rows], peer, tag) for rows, peer, tag in recvs),
            *(group.send([rows], peer, tag) for rows, peer, tag in sends),
        ]
    ops = [
        dist.P2POp(op, rows, group=group, tag=tag, group_peer=peer)
        for op, ways in ((dist.irecv, recvs), (dist.isend, sends))
        for rows, peer, tag in ways
    ]
    return list(dist.batch_isend_irecv(ops)) if ops else []


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
        self.on_cpu = not over_nccl(self.group)
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
        recvs, landing = parcels(step.recvs, buffers, receive=True)
        sends, _ = parcels(step.sends, buffers, receive=False)
        posted = [*recvs, *sends]
        if not posted:
            return lambda: None

        def peers() -> str:
            return "ranks " + ", ".join(sorted({str(p.message.peer) for p in posted}))

        def what(i: int) -> str:
            if len(pending) < len(posted):  # NCCL: one handle for all messages
                return f"exchanging with {peers()}"
            to = "waiting for {} from" if i < len(recvs) else "sending {} to"
            return f"{to.format(posted[i])} rank {posted[i].message.peer}"

        try:
            pending = self.start(t, recvs, sends)
        except RuntimeError as error:
            messages = f"posting {len(posted)} messages to and from {peers()}"
            raise self._failure(t, messages, error) from error

        def wait() -> None:
            self.settle()
            for i, work in enumerate(pending):
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self._failure(t, what(i), error) from error
            for messages, rows in landing:
                put_rows(messages, rows, buffers)

        return wait

    def start(self, t: int, recvs: list[Parcel], sends: list[Parcel]) -> list[Any]:
        """Post a step's parcels."""
        first = (self._salt * STEPS + t % STEPS) * TAGS
        sides = (
            [(p.rows, self.members[p.message.peer], first + p.tag) for p in some]
            for some in (recvs, sends)
        )
        return post(self.group, *sides)

    def post_all_to_all(
        self, t: int, step: Step, buffers: Buffers, kinds: Sequence[int] = (KV, DKV)
    ) -> Wait:
        """The same as one all-to-all for each kind of message; packs, so it needs one more copy.

        Args:
            kinds: of which there are messages in the pass, on any rank: all ranks call the collective of
                each, in this order, with or without messages of their own.

        Raises:
            PlanError: a message of another kind, which would stay behind.
        """
        behind = [m for m in (*step.sends, *step.recvs) if m.kind not in kinds]
        if behind:
            m, carried = behind[0], ", ".join(KINDS[kind] for kind in kinds)
            raise PlanError(
                f"rank {self.rank}, step {t}: {KINDS[m.kind]}{m.owner}.{m.share} is to move, the step's "
                f"all-to-all carries {carried or 'nothing'}; name its kind in the schedule's kinds()"
            )
        self.settle()
        finish = []
        for kind in kinds:
            # a rank that moves no queries has no buffer of theirs, and no rows to send or receive
            like = buffers.get(RECEIVES[kind], buffers["kv"][:0])
            out = [m for m in step.sends if m.kind == kind]
            into = [m for m in step.recvs if m.kind == kind]
            send = torch.cat([like[:0], *(take_rows([m], buffers) for m in out)])
            recv = like.new_empty((sum(m.count for m in into), *like.shape[1:]))
            splits = (self._splits(into), self._splits(out))
            with self._naming(t, "the step's all-to-all"):
                work = dist.all_to_all_single(recv, send, *splits, group=self.group, async_op=True)
            finish.append((work, recv, send, into))

        def wait() -> None:
            for work, recv, _, into in finish:  # what is sent must live until it has left
                with self._naming(t, "the step's all-to-all"):
                    work.wait()
                for m, rows in zip(into, recv.split([m.count for m in into]), strict=True):
                    put_rows([m], rows, buffers)

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
