"""Messages of one step between the ranks of a group, and the handshake of a call.

`p2p` posts one send or receive a peer and kind, or one a message where these are large, in an order
both ends agree on; `all_to_all` packs a step into one collective (every link of K_n at once). A
message that does not arrive raises `TransportError` with rank, step, peer and share. How long to wait
is the group's own time-out.

Every pass begins with a handshake: the ranks compare, on the host and over a gloo group of its own,
what each is about to do. A GPU is not waited for.
Ranks in messages to the user are those of the process group.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PlanError, TransportError
from ..lowering.program import RECEIVES, Message
from ..schedules import DKV, KINDS, KV
from .packing import TAGS, Buffers, PackedMessage, packed_messages, put_rows, take_rows

Wait = Callable[[], None]
Way = tuple[Tensor, int, int]  # rows, the peer's rank in the group, tag
NOTE_BYTES = 1 << 15  # of a note that is told to the other ranks
STEPS = (
    1 << 4
)  # told apart in tags, which have 31 bits: 15 of tag prefix, 4 of these, 12 of a message
PREFIXES = 1 << 15
REPORT_S = 2.0  # after a failure, how long ranks wait for each other's word on where they are
_CALLS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of attention, by group
_BACKENDS: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()
_CONTROL: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # gloo groups for handshakes
_AGREED: WeakKeyDictionary[Any, dict[bytes, None]] = WeakKeyDictionary()  # NCCL groups' digests
_SPENT: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()  # tag prefixes of failed handshakes
_JOINED: WeakKeyDictionary[Any, bool] = (
    WeakKeyDictionary()
)  # NCCL groups that have their communicator
_ABANDONED: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()  # messages of refused calls
_FAILURES: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # exchanges that failed, by group


def _finished() -> None:
    """Nothing to compare."""


def read_backends(config: str) -> dict[str, str]:
    """Each device type's backend, from torch's text of a group's backends.

    >>> read_backends("cpu:gloo,cuda:nccl")
    {'cpu': 'gloo', 'cuda': 'nccl'}
    """
    return dict(part.split(":", 1) for part in config.lower().split(",") if ":" in part)


def backend_of(group: Any, device_type: str) -> str | None:
    """The backend that carries tensors of a device type in this group, e.g. "nccl"; None: none does.

    A group may have several ("cpu:gloo,cuda:nccl"; so has one made without a name), so its own name
    does not tell. Remembered: asking torch takes as long as a message.
    """
    if (found := _BACKENDS.get(group)) is None:
        found = _BACKENDS[group] = read_backends(dist.get_backend_config(group))
    return found.get(device_type)


def over_nccl(group: Any, device_type: str) -> bool:
    """Whether NCCL (or RCCL) carries tensors of this device type in the group."""
    return backend_of(group, device_type) == "nccl"


def carriage_error(group: Any, device: torch.device) -> str:
    """Why tensors of this device cannot travel in the group, or ""."""
    backend = backend_of(group, device.type)
    if backend == {"cpu": "gloo", "cuda": "nccl"}.get(device.type, backend) and backend:
        return ""
    wanted = {"cpu": "'gloo'", "cuda": "'nccl'"}.get(device.type, "its own backend")
    carrier = (
        f"carries {device.type} tensors by {backend}" if backend else "has no backend for them"
    )
    return (
        f"tensors are on {device}, and the process group {carrier}; make the group with backend "
        f"{wanted} or 'cpu:gloo,cuda:nccl'"
    )


def _store(group: Any) -> Any:
    """The group's own key-value store."""
    found = getattr(group, "get_group_store", None)
    return found() if found else dist.distributed_c10d._get_process_group_store(group)


def control_group(group: Any) -> Any:
    """A gloo group of the same ranks that nobody else uses: handshakes meet handshakes only.

    On the group itself they would meet collectives that its user has under way, which each rank may
    post at another time. Made at the first handshake, with the group's time-out, by its ranks alone.
    """
    if (found := _CONTROL.get(group)) is None:
        timeout = dist.default_pg_timeout
        for device_type in ("cpu", "cuda"):
            if backend_of(group, device_type) in ("gloo", "nccl"):
                timeout = group._get_backend(torch.device(device_type)).options._timeout
                break
        store = dist.PrefixStore("tasp_handshake", _store(group))
        found = _CONTROL[group] = dist.ProcessGroupGloo(
            store, dist.get_rank(group), dist.get_world_size(group), timeout
        )
    return found


def post(group: Any, recvs: Sequence[Way], sends: Sequence[Way]) -> list[Any]:
    """Start receives, then sends: one handle each, or of NCCL one for all.

    gloo sends once it hears that the receiver is ready, and that word must not queue up behind a
    message's bytes.
    """
    device_type = next((rows.device.type for rows, _, _ in (*recvs, *sends)), "cpu")
    if not over_nccl(group, device_type):  # isend and irecv check as long as the call itself takes
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


def _ranks(some: Sequence[int]) -> str:
    """Ranks in words.

    >>> _ranks([3]), _ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    return f"rank{'s' * (len(some) != 1)} {', '.join(map(str, some))}"


class Exchange:
    """The ranks of one process group, or some of them, for one plan's passes.

    Args:
        members: the ranks of `group` that take part, in plan order; None: all of them. Handshakes
            and collectives are still called by all ranks of `group`, each with its own members.
        device: of the tensors that travel.
    """

    def __init__(
        self,
        group: Any,
        members: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.group: Any = dist.group.WORLD if group is None else group
        self.own, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.own < 0:
            raise PlanError("this process is not in the group it passed to attention")
        self.members = list(range(self.world) if members is None else members)
        self.rank, self.ranks = self.members.index(self.own), len(self.members)
        self.device = device or torch.device("cpu")
        self.nccl = over_nccl(self.group, self.device.type)
        self._salt, self._open = 0, _finished
        self.doing = "its first exchange"  # in words, for a peer that waits for this rank

    def failure(
        self, what: str, error: RuntimeError, peers: Sequence[int] = (), *, collective: bool = False
    ) -> TransportError:
        """A failure of gloo or NCCL as an error that says who waited for what.

        A collective's own error names no rank, so the ranks that have failed tell each other.

        Args:
            peers: ranks of the group that were waited for.
        """
        where = ""
        if collective:
            where, peers = self._whereabouts()
        return TransportError(
            f"rank {self.own}, {what} failed; {where}look for that rank's own error first. "
            f"({str(error).splitlines()[0]})",
            peers=[dist.get_global_rank(self.group, r) for r in peers],
        )

    @contextmanager
    def _naming(self, t: int, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.failure(f"step {t}: {what}", error, collective=True) from error

    def _whereabouts(self) -> tuple[str, list[int]]:
        """After a failed collective: where ranks say that they are, and the ranks that say nothing."""
        turn = _FAILURES[self.group] = _FAILURES.get(self.group, 0) + 1
        said: dict[int, str] = {}
        with suppress(Exception):  # the store may be gone with the rank that held it
            store = _store(self.group)

            def key(rank: int) -> str:
                return f"tasp_failure/{turn}/{rank}"

            store.set(key(self.own), self.doing)
            end = time.monotonic() + REPORT_S
            while len(said) < self.world and time.monotonic() < end:
                for r in range(self.world):
                    if r not in said and store.check([key(r)]):
                        said[r] = store.get(key(r)).decode()
                time.sleep(0.05)
        silent = [r for r in range(self.world) if r not in said]
        places: dict[str, list[int]] = {}
        for r, text in sorted(said.items()):
            places.setdefault(text, []).append(r)
        parts = [f"{_ranks(some)} in {text}" for text, some in places.items()]
        if silent:
            parts.append(f"{_ranks(silent)} did not take part and reported no failure")
        return f"{'; '.join(parts)}; ", silent

    def handshake(
        self, note: dict[str, str], error: type[ValueError] = PlanError, *, begins: bool = True
    ) -> int:
        """Start to compare what every rank is about to do; `finish_handshake`, or the first wait, ends it.

        Until then tags keep messages of ranks that do not agree from meeting. NCCL has no tags: there
        a note that this group has not agreed on yet is compared at once.

        Args:
            note: what must be equal on all ranks; the key "error" holds a rank's own validation_error.
            begins: whether a new call begins; False for another pass of a call, whose note says of
                which.

        Returns:
            the number of the call in this group, from 1.
        """
        calls = _CALLS[self.group] = _CALLS.get(self.group, 0) + begins
        note = {key: value[:400] for key, value in note.items()}
        what = hashlib.sha256(json.dumps(note).encode()).digest()
        text = json.dumps(note | {"call": str(calls)} if begins else note).encode()
        self.doing = note.get("pass", "a forward pass") + (f" of call {calls}" if begins else "")
        digest = hashlib.sha256(text).digest()
        self._salt = self._prefix(digest)
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        everyone = mine.repeat(self.world, 1)
        received = torch.empty_like(everyone)  # all at once: a gather would walk a ring
        try:
            work = control_group(self.group).alltoall_base(received, everyone, [], [])
        except RuntimeError as failed:
            what_failed = "meeting the other ranks to compare plans"
            raise self.failure(what_failed, failed, collective=True) from failed

        def finish() -> None:
            with self._naming(0, "comparing plans with the other ranks"):
                work.wait()
            if note.get("error") or bool((received != everyone).any()):
                # messages of this call may wait for ever; no later one may meet them
                spent = _SPENT.setdefault(self.group, set())
                if len(spent) > PREFIXES // 2:
                    spent.clear()
                spent.update([self._prefix(row.numpy().tobytes()) for row in received])
                self._explain(text, error)
            self._join()
            agreed = _AGREED.setdefault(self.group, {})
            agreed[what] = None
            if len(agreed) > 4096:
                agreed.pop(next(iter(agreed)))

        self._open = finish
        if note.get("error") or (self.nccl and what not in _AGREED.get(self.group, {})):
            self.finish_handshake()
        return calls

    def _join(self) -> None:
        """Make NCCL's communicator before the first message of a group.

        It is made at the first call, in which every rank must take part; a rank without messages in a
        step does not.
        """
        if self.nccl and not _JOINED.get(self.group):
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
            _JOINED[self.group] = True

    def _prefix(self, digest: bytes) -> int:
        """The tag prefix of a note: 15 bits of its digest that no failed handshake has used."""
        prefix, spent = int.from_bytes(digest[:2], "big") >> 1, _SPENT.get(self.group, ())
        while prefix in spent:
            prefix = (prefix + 1) % PREFIXES
        return prefix

    def finish_handshake(self) -> None:
        """End the handshake; the same error on all ranks where they differ.

        Raises:
            error of `handshake`: a rank's validation_error, or the ranks that differ and in what.
        """
        finish, self._open = self._open, _finished
        finish()

    def _explain(self, text: bytes, error: type[ValueError]) -> None:
        mine = torch.frombuffer(bytearray(text.ljust(NOTE_BYTES, b"\0")), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        with self._naming(0, "hearing what the other ranks are about to do"):
            control_group(self.group).allgather([everyone], [mine]).wait()
        notes = [json.loads(row.numpy().tobytes().rstrip(b"\0")) for row in everyone]
        errors = [f"rank {r}: {n['error']}" for r, n in enumerate(notes) if n.get("error")]
        if errors:
            more = f" (and {len(errors) - 1} more ranks)" if len(errors) > 1 else ""
            raise error(errors[0] + more)
        lines = []
        for key in {key: None for n in notes for key in n}:
            values = [n.get(key) for n in notes]
            if (
                len(set(values)) > 1 and None not in values
            ):  # not what other passes have no word for
                usual = max(values, key=values.count)
                others = [r for r, v in enumerate(values) if v != usual]
                odd = ", ".join(f"rank {r} has {values[r]}" for r in others[:4])
                lines.append(f"{key}: {odd}; the others have {usual}")
        raise error(
            "ranks are about to do different things, no result is returned; give every rank the same "
            "documents, options and shapes, and let all call in the same order. "
            + "; ".join(lines)
            + "."
        )

    def post(
        self,
        t: int,
        sends_listed: Sequence[Message],
        recvs_listed: Sequence[Message],
        buffers: Buffers,
    ) -> Wait:
        """Start the step's sends and receives; the returned function waits for all of them."""
        recvs, landing = packed_messages(recvs_listed, buffers, receive=True)
        sends, _ = packed_messages(sends_listed, buffers, receive=False)
        posted = [*recvs, *sends]
        if not posted:
            return lambda: None

        peers = sorted({self.members[p.message.peer] for p in posted})

        def failed(i: int, error: RuntimeError) -> TransportError:
            if len(pending) < len(posted):  # NCCL: one handle for all messages
                return self.failure(f"step {t}: exchanging with {_ranks(peers)}", error, peers)
            m, peer = posted[i].message, self.members[posted[i].message.peer]
            # with Ulysses a rank holds some heads of its group's tokens: the share is that rank's
            name = f"{KINDS[m.kind]}{self.members[m.owner]}.{m.share}"
            name += " and more" * (len(m.ranges) > 1)
            what = f"waiting for {name} from" if i < len(recvs) else f"sending {name} to"
            return self.failure(f"step {t}: {what} rank {peer}", error, [peer])

        try:
            pending = self.start(t, recvs, sends)
        except RuntimeError as error:
            what = f"step {t}: posting {len(posted)} messages to and from {_ranks(peers)}"
            raise self.failure(what, error, peers) from error

        def wait() -> None:
            try:
                self.finish_handshake()
            except BaseException:
                # what is on its way must find its rows, or gloo never reads that connection again
                kept = _ABANDONED.setdefault(self.group, deque(maxlen=16))
                kept.append((pending, posted, landing))
                raise
            for i, work in enumerate(pending):
                try:
                    work.wait()
                except RuntimeError as error:
                    raise failed(i, error) from error
            for messages, rows in landing:
                put_rows(messages, rows, buffers)

        return wait

    def start(self, t: int, recvs: list[PackedMessage], sends: list[PackedMessage]) -> list[Any]:
        """Post a step's messages."""
        first = (self._salt * STEPS + t % STEPS) * TAGS
        sides = (
            [(p.rows, self.members[p.message.peer], first + p.tag) for p in some]
            for some in (recvs, sends)
        )
        return post(self.group, *sides)

    def post_all_to_all(
        self,
        t: int,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        buffers: Buffers,
        kinds: Sequence[int] = (KV, DKV),
    ) -> Wait:
        """The same as one all-to-all for each kind of message; packs, so it needs one more copy.

        Args:
            kinds: of which there are messages in the pass, on any rank: all ranks call the collective of
                each, in this order, with or without messages of their own.

        Raises:
            PlanError: a message of another kind, which would stay behind.
        """
        behind = [m for m in (*sends, *recvs) if m.kind not in kinds]
        if behind:
            m, carried = behind[0], ", ".join(KINDS[kind] for kind in kinds)
            raise PlanError(
                f"rank {self.rank}, step {t}: {KINDS[m.kind]}{m.owner}.{m.share} is to move, the step's "
                f"all-to-all carries {carried or 'nothing'}; name its kind in the schedule's kinds()"
            )
        self.finish_handshake()
        finish = []
        for kind in kinds:
            # a rank that moves no queries has no buffer of theirs, and no rows to send or receive
            like = buffers.get(RECEIVES[kind], buffers["kv"][:0])
            out = [m for m in sends if m.kind == kind]
            into = [m for m in recvs if m.kind == kind]
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
        self.finish_handshake()
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
