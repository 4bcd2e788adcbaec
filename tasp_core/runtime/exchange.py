"""How ranks exchange rows of their buffers: the protocol `Exchange`, and what carries it.

    exchange = exchange_of(group, device=q.device)   # GlooExchange or NcclExchange, by the group
    exchange.handshake(signature)                    # what this rank is about to do
    wait = exchange.post(t, sends, recvs, buffers)   # starts the messages of step t
    ...                                              # compute on what has arrived before
    wait()                                           # returns when ranks agree and messages have arrived

`attention` takes an `Exchange` in the place of a process group, so another way to exchange is one class
in one file. Others: `CountingExchange` below, and in lab/bench `InProcessExchange` (one_process.py) and
`NoOpExchange` (passes.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PlanError, TransportError
from ..lowering.program import RECEIVES, Message
from ..schedules import DKV, KINDS, KV
from .handshake import Handshake
from .packing import TAGS, Buffers, PackedMessage, packed_messages, put_rows, take_rows
from .process_group import GroupRank, carriage_error, over_nccl, ranks_text

Wait = Callable[[], None]
Transfer = tuple[Tensor, int, int]  # rows, the peer's rank in the group, tag
# a tag has 31 bits: 15 of the handshake's prefix, 4 of the step, 12 of the message (packing.TAGS)
STEPS = 1 << 4


def _nothing() -> None:
    """The wait where nothing was started."""


class Exchange(ABC):
    """One rank's side of all that the ranks of a plan exchange.

    A new one defines `post`, and what else its plans need:

        method                         called                                           default
        post                           at each step of plans with exchange="p2p"        -
        post_all_to_all                at each step of plans with "all_to_all"          post
        all_gather                     at step 0 of schedule all_gather's passes        refused
        all_to_all                     around each pass, with a Ulysses degree above 1  refused
        handshake, finish_handshake    before each pass, and before its results count   all agree

    `post`, `post_all_to_all` and `all_gather` return a function that waits for what they have started.
    Until it returns, rows that are sent must not change and rows that arrive must not be read. A wait
    finishes the handshake first, so that no rank computes on data of a rank that runs something else.
    All ranks of a plan call these methods in the same order of steps.

    Args:
        rank, ranks: this rank among those of the plan that runs, and their number.
        group_rank, group_size: the same among all ranks that call `attention` together; a plan with a
            Ulysses degree runs in several subsets of them. Default: the same.

    Messages name peers by their rank in the plan. Between two ranks the i-th message that one sends in
    a step is the i-th that the other one receives.
    """

    def __init__(
        self, rank: int, ranks: int, group_rank: int | None = None, group_size: int | None = None
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.group_rank = rank if group_rank is None else group_rank
        self.group_size = ranks if group_size is None else group_size

    # ---- agreement

    def carriage_error(self, device: torch.device) -> str:
        """Why tensors of this device cannot travel, or ""."""
        return ""

    def handshake(
        self,
        signature: Mapping[str, str],
        error: type[ValueError] = PlanError,
        *,
        begins: bool = True,
    ) -> int:
        """Start to compare what every rank is about to do; `finish_handshake`, or the first wait, ends it.

        Args:
            signature: what must be equal on all ranks; the key "pass" says which pass it is, the key
                "error" holds what is wrong with this rank's own arguments.
            error: what is raised where ranks differ.
            begins: whether a new call begins; False for a later pass of a call, whose number is then
                part of signature["pass"].

        Returns:
            the number of the call in this group, from 1.
        """
        return 0

    def finish_handshake(self) -> None:
        """End the handshake; does nothing where none is open.

        Raises:
            the `error` of `handshake`, the same on all ranks: names a rank and its own error, or the
                ranks that differ and in what.
        """
        return

    # ---- messages

    @abstractmethod
    def post(
        self, t: int, sends: Sequence[Message], recvs: Sequence[Message], buffers: Buffers
    ) -> Wait:
        """Start the messages of step t.

        Args:
            buffers: by name, [rows, heads, dim] each. A message of kind k travels in the dtype of
                buffers[RECEIVES[k]].

        Raises:
            TransportError: here or in the wait, a message cannot be exchanged; with rank, step and peer.
        """

    def post_all_to_all(
        self,
        t: int,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        buffers: Buffers,
        kinds: Sequence[int] = (KV, DKV),
    ) -> Wait:
        """`post` as one all-to-all for each kind of message.

        Args:
            kinds: the kinds of messages that any rank has in the pass. Every rank calls one collective
                for each of them, in this order, even if it has no messages of that kind.
        """
        return self.post(t, sends, recvs, buffers)

    def all_gather(self, own: Tensor, gathered: Tensor, rows: int) -> Wait:
        """Start to bring every rank's rows to all ranks.

        Args:
            own: [t, heads, dim], up to `rows` rows of this rank.
            gathered: [ranks * rows, heads, dim], to be filled in rank order. A rank with fewer than
                `rows` rows leaves the others unspecified.
        """
        raise PlanError(f"{type(self).__name__} has no all-gather; use another schedule")

    def all_to_all(
        self, peers: Sequence[int], parts: Sequence[Tensor], shapes: Sequence[torch.Size], what: str
    ) -> list[Tensor]:
        """Send parts[j] to peers[j], and return what peers[j] has sent, of shapes[j].

        Args:
            peers: consecutive ranks of the group, this one among them, that all call this together.
            what: a name of what is exchanged, for error texts.
        """
        raise PlanError(
            f"{type(self).__name__} exchanges no {what}; use a Ulysses degree (intra) of 1"
        )


class ProcessGroupExchange(Exchange):
    """The ranks of one torch process group, or some of them, for one plan's passes.

    Args:
        group: the process group; None: the default one.
        members: the ranks of `group` that run the plan together, in plan order; None: all of them.
            Handshakes and collectives are still called by all ranks of `group`, each with its members.
        device: of the tensors that travel; default: the CPU.
    """

    def __init__(
        self,
        group: Any,
        members: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.me = GroupRank(group)
        self.group = self.me.group
        self.members = list(range(self.me.size) if members is None else members)
        self.device = device or torch.device("cpu")
        self._handshake = Handshake(self.me)
        super().__init__(
            self.members.index(self.me.rank), len(self.members), self.me.rank, self.me.size
        )

    # ---- agreement

    def carriage_error(self, device: torch.device) -> str:
        return carriage_error(self.group, device)

    def handshake(
        self,
        signature: Mapping[str, str],
        error: type[ValueError] = PlanError,
        *,
        begins: bool = True,
    ) -> int:
        call = self._handshake.begin(signature, error, begins=begins)
        if signature.get("error"):
            self.finish_handshake()
        return call

    def finish_handshake(self) -> None:
        self._handshake.finish()

    # ---- messages

    @abstractmethod
    def transfer(self, recvs: Sequence[Transfer], sends: Sequence[Transfer]) -> list[Any]:
        """Start receives and sends of contiguous rows; returns what waits for them (`wait()` each)."""

    def start(self, t: int, recvs: list[PackedMessage], sends: list[PackedMessage]) -> list[Any]:
        """Start a step's messages; the handles of `transfer`."""
        first_tag = (self._handshake.tag_prefix * STEPS + t % STEPS) * TAGS
        incoming, outgoing = (
            [(p.rows, self.members[p.message.peer], first_tag + p.tag) for p in packed]
            for packed in (recvs, sends)
        )
        return self.transfer(incoming, outgoing)

    def post(
        self, t: int, sends: Sequence[Message], recvs: Sequence[Message], buffers: Buffers
    ) -> Wait:
        incoming, scattered = packed_messages(recvs, buffers, receive=True)
        outgoing, _ = packed_messages(sends, buffers, receive=False)
        posted = [*incoming, *outgoing]
        if not posted:
            return _nothing
        try:
            handles = self.start(t, incoming, outgoing)
        except RuntimeError as error:
            peers = self._peers(posted)
            what = f"step {t}: posting {len(posted)} messages to and from {ranks_text(peers)}"
            raise self.me.failure(what, error, peers) from error

        def wait() -> None:
            try:
                self.finish_handshake()
            except BaseException:
                # keep the rows of messages in flight: without them gloo stops reading the connection
                self.me.state.refused_messages.append((handles, posted, scattered))
                raise
            for i, handle in enumerate(handles):
                try:
                    handle.wait()
                except RuntimeError as error:
                    what, peers = self._waits_for(posted, i, len(incoming))
                    raise self.me.failure(f"step {t}: {what}", error, peers) from error
            for messages, rows in scattered:
                put_rows(messages, rows, buffers)

        return wait

    def _peers(self, posted: Sequence[PackedMessage]) -> list[int]:
        return sorted({self.members[p.message.peer] for p in posted})

    def _waits_for(
        self, posted: Sequence[PackedMessage], i: int, received: int
    ) -> tuple[str, list[int]]:
        """What the i-th handle waits for, in words, and its peers; the first `received` are receives.

        Args:
            posted: the messages of the handles, in their order.
        """
        m, peer = posted[i].message, self.members[posted[i].message.peer]
        # with Ulysses a rank holds some heads of its group's tokens: the share is that rank's
        share = f"{KINDS[m.kind]}{self.members[m.owner]}.{m.share}"
        share += " and more" * (len(m.ranges) > 1)
        what = f"waiting for {share} from" if i < received else f"sending {share} to"
        return f"{what} rank {peer}", [peer]

    def post_all_to_all(
        self,
        t: int,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        buffers: Buffers,
        kinds: Sequence[int] = (KV, DKV),
    ) -> Wait:
        """As `Exchange.post_all_to_all`; copies a step's messages into one tensor per kind.

        Raises:
            PlanError: a message whose kind is not in `kinds`, which would not be sent.
        """
        behind = [m for m in (*sends, *recvs) if m.kind not in kinds]
        if behind:
            m, carried = behind[0], ", ".join(KINDS[kind] for kind in kinds)
            raise PlanError(
                f"rank {self.rank}, step {t}: {KINDS[m.kind]}{m.owner}.{m.share} is to move, the step's "
                f"all-to-all carries {carried or 'nothing'}; name its kind in the schedule's kinds()"
            )
        self.finish_handshake()
        started = []
        for kind in kinds:
            # a rank that moves no queries has no buffer of theirs, and no rows to send or receive
            buffer = buffers.get(RECEIVES[kind], buffers["kv"][:0])
            out = [m for m in sends if m.kind == kind]
            into = [m for m in recvs if m.kind == kind]
            send = torch.cat([buffer[:0], *(take_rows([m], buffers) for m in out)])
            recv = buffer.new_empty((sum(m.count for m in into), *buffer.shape[1:]))
            splits = (self._splits(into), self._splits(out))
            with self.me.naming(t, "the step's all-to-all"):
                work = dist.all_to_all_single(recv, send, *splits, group=self.group, async_op=True)
            started.append((work, recv, send, into))

        def wait() -> None:
            for work, recv, _, into in started:  # what is sent must live until it has left
                with self.me.naming(t, "the step's all-to-all"):
                    work.wait()
                for m, rows in zip(into, recv.split([m.count for m in into]), strict=True):
                    put_rows([m], rows, buffers)

        return wait

    def _splits(self, messages: Iterable[Message]) -> list[int]:
        """Rows exchanged with each rank of the group."""
        sizes = [0] * self.group_size
        for m in messages:
            sizes[self.members[m.peer]] += m.count
        return sizes

    def all_gather(self, own: Tensor, gathered: Tensor, rows: int) -> Wait:
        self.finish_handshake()
        padded = own if len(own) == rows else own.new_zeros((rows, *own.shape[1:]))
        if padded is not own:
            padded[: len(own)] = own
        with self.me.naming(0, "the all-gather of every rank's kv"):
            if self.ranks == self.group_size:
                everyone = list(gathered.unflatten(0, (self.ranks, rows)).unbind())
                work = dist.all_gather(everyone, padded, group=self.group, async_op=True)
            else:  # members of one larger group: the same rows to each of them
                sizes = [rows if r in self.members else 0 for r in range(self.group_size)]
                copies = padded.repeat(self.ranks, *(1,) * (padded.dim() - 1))
                work = dist.all_to_all_single(
                    gathered, copies, sizes, sizes, group=self.group, async_op=True
                )

        def wait() -> None:
            with self.me.naming(0, "the all-gather of every rank's kv"):
                work.wait()

        return wait

    def _all_to_all_error(
        self, peers: Sequence[int], what: str, error: RuntimeError, peer: int | None = None
    ) -> TransportError:
        waited = "" if peer is None else f" in waiting for rank {peer}"
        return self.me.error(
            f"rank {self.group_rank}: {what} of ranks {peers[0]} to {peers[-1]} were not exchanged"
            f"{waited}; look for another rank's own error first. ",
            error,
            [] if peer is None else [peer],
        )


class GlooExchange(ProcessGroupExchange):
    """Over gloo, and any backend whose messages have tags: each message has a handle of its own.

    Ranks that do not agree use different tags, so their messages never meet. The first messages may
    therefore be posted before the handshake has ended.
    """

    def transfer(self, recvs: Sequence[Transfer], sends: Sequence[Transfer]) -> list[Any]:
        """Receives first: gloo sends once the receiver has said that it is ready.

        That notice must not wait in a queue behind the bytes of a message.
        """
        group = self.group  # dist.isend and irecv check as long as the call itself takes
        return [
            *(group.recv([rows], peer, tag) for rows, peer, tag in recvs),
            *(group.send([rows], peer, tag) for rows, peer, tag in sends),
        ]

    def all_to_all(
        self, peers: Sequence[int], parts: Sequence[Tensor], shapes: Sequence[torch.Size], what: str
    ) -> list[Tensor]:
        # gloo's own all-to-all leaves links idle: it takes 1.5 times as long on limited ones
        own, n = peers.index(self.group_rank), len(peers)
        outgoing = [part.contiguous() for part in parts]
        incoming = [part.new_empty(shape) for part, shape in zip(parts, shapes, strict=True)]
        incoming[own] = outgoing[own].view(shapes[own])
        turns = [(own + d) % n for d in range(1, n)]  # so no two ranks send to one peer first

        def transfers(rows: list[Tensor], order: Iterable[int]) -> list[Transfer]:
            return [(rows[j], peers[j], 0) for j in order if rows[j].numel()]

        recvs, sends = transfers(incoming, reversed(turns)), transfers(outgoing, turns)
        try:
            handles = self.transfer(recvs, sends)
        except RuntimeError as error:
            raise self._all_to_all_error(peers, what, error) from error
        for (_, peer, _), handle in zip((*recvs, *sends), handles, strict=True):
            try:
                handle.wait()
            except RuntimeError as error:
                raise self._all_to_all_error(peers, what, error, peer) from error
        return incoming


class NcclExchange(ProcessGroupExchange):
    """Over NCCL or RCCL: a step's messages are one batch, and pair up by their order, without tags.

    Messages of ranks that do not agree would meet, so the handshake of a signature that is new to the
    group ends before the first message.
    """

    def handshake(
        self,
        signature: Mapping[str, str],
        error: type[ValueError] = PlanError,
        *,
        begins: bool = True,
    ) -> int:
        call = super().handshake(signature, error, begins=begins)
        if not self._handshake.known:
            self.finish_handshake()
        return call

    def finish_handshake(self) -> None:
        if self._handshake.is_open:
            super().finish_handshake()
            self._make_communicator()

    def _make_communicator(self) -> None:
        """Make NCCL's communicator before the first message of a group.

        NCCL makes it in the group's first call, in which every rank must take part. A step is no such
        call, since ranks without messages in it make none.
        """
        if not self.me.state.has_communicator:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
            self.me.state.has_communicator = True

    def transfer(self, recvs: Sequence[Transfer], sends: Sequence[Transfer]) -> list[Any]:
        operations = [
            dist.P2POp(op, rows, group=self.group, tag=tag, group_peer=peer)
            for op, transfers in ((dist.irecv, recvs), (dist.isend, sends))
            for rows, peer, tag in transfers
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def _waits_for(
        self, posted: Sequence[PackedMessage], i: int, received: int
    ) -> tuple[str, list[int]]:
        if len(posted) == 1:
            return super()._waits_for(posted, i, received)
        peers = self._peers(posted)  # one handle for all messages
        return f"exchanging with {ranks_text(peers)}", peers

    def all_to_all(
        self, peers: Sequence[int], parts: Sequence[Tensor], shapes: Sequence[torch.Size], what: str
    ) -> list[Tensor]:
        """One all-to-all of the group, in which all of its ranks take part, each with its own peers."""
        out, into = [0] * self.group_size, [0] * self.group_size
        for peer, part, shape in zip(peers, parts, shapes, strict=True):
            out[peer], into[peer] = part.numel(), shape.numel()
        send = torch.cat([part.reshape(-1) for part in parts])
        recv = send.new_empty(sum(into))
        try:
            dist.all_to_all_single(recv, send, into, out, group=self.group)
        except RuntimeError as error:
            raise self._all_to_all_error(peers, what, error) from error
        pieces = recv.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def exchange_of(
    group: Any, members: Sequence[int] | None = None, device: torch.device | None = None
) -> ProcessGroupExchange:
    """The exchange of a process group for tensors of a device; arguments of `ProcessGroupExchange`.

    Raises:
        PlanError: this process is not in the group.
    """
    group = GroupRank(group).group
    nccl = over_nccl(group, device.type if device else "cpu")
    return (NcclExchange if nccl else GlooExchange)(group, members, device)


class CountingExchange(Exchange):
    """Another exchange, with the bytes counted that this rank sends over it.

    Attributes:
        step_bytes: by (step, source, destination) in ranks of the plan, of messages and all-gathers.
        group_bytes: by (source, destination) in ranks of the group, of `all_to_all`.
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.rank, exchange.ranks, exchange.group_rank, exchange.group_size)
        self.exchange = exchange
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self.step_bytes: Counter[tuple[int, int, int]] = Counter()
        self.group_bytes: Counter[tuple[int, int]] = Counter()

    @property
    def total_bytes(self) -> int:
        """All bytes that were sent since the last reset."""
        return self.step_bytes.total() + self.group_bytes.total()

    def carriage_error(self, device: torch.device) -> str:
        return self.exchange.carriage_error(device)

    def handshake(
        self,
        signature: Mapping[str, str],
        error: type[ValueError] = PlanError,
        *,
        begins: bool = True,
    ) -> int:
        return self.exchange.handshake(signature, error, begins=begins)

    def finish_handshake(self) -> None:
        self.exchange.finish_handshake()

    def _count(self, t: int, sends: Sequence[Message], buffers: Buffers) -> None:
        for m in sends:
            row = math.prod(buffers[m.buffer].shape[1:]) * buffers[RECEIVES[m.kind]].itemsize
            self.step_bytes[t, self.rank, m.peer] += m.count * row

    def post(
        self, t: int, sends: Sequence[Message], recvs: Sequence[Message], buffers: Buffers
    ) -> Wait:
        self._count(t, sends, buffers)
        return self.exchange.post(t, sends, recvs, buffers)

    def post_all_to_all(
        self,
        t: int,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        buffers: Buffers,
        kinds: Sequence[int] = (KV, DKV),
    ) -> Wait:
        self._count(t, sends, buffers)
        return self.exchange.post_all_to_all(t, sends, recvs, buffers, kinds)

    def all_gather(self, own: Tensor, gathered: Tensor, rows: int) -> Wait:
        for peer in range(self.ranks):
            if peer != self.rank:
                size = rows * math.prod(own.shape[1:]) * own.itemsize
                self.step_bytes[0, self.rank, peer] += size
        return self.exchange.all_gather(own, gathered, rows)

    def all_to_all(
        self, peers: Sequence[int], parts: Sequence[Tensor], shapes: Sequence[torch.Size], what: str
    ) -> list[Tensor]:
        for peer, part in zip(peers, parts, strict=True):
            if peer != self.group_rank:
                self.group_bytes[self.group_rank, peer] += part.numel() * part.itemsize
        return self.exchange.all_to_all(peers, parts, shapes, what)
