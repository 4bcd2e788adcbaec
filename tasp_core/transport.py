"""Messages of one step between the ranks of a group, and the handshake before a plan is first used.

`p2p` posts one send or receive a message, in an order both ends agree on; `all_to_all` packs a step
into one collective (every link of K_n at once). A message that does not arrive raises
`TransportError` with rank, step, peer and share. How long to wait is the group's own time-out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import PlanError, TransportError
from .lower import ACC, LANDING, Message, Step
from .schedules import KINDS

Wait = Callable[[], None]
NOTE_BYTES = 4096
TAGS = 1 << 12


class Exchange:
    """The ranks of one process group, or some of them, for one plan's passes.

    Args:
        members: the ranks of `group` that take part, in plan order; None: all of them. Collectives
            are still called by all ranks of `group`, each with its own members.
    """

    def __init__(self, group: Any, members: Sequence[int] | None = None) -> None:
        self.group = dist.group.WORLD if group is None else group
        own, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if own < 0:
            raise PlanError("this process is not in the group it passed to attention")
        self.members = list(range(self.world) if members is None else members)
        self.rank, self.ranks = self.members.index(own), len(self.members)
        self.on_cpu = dist.get_backend(self.group) != "nccl"

    def _device(self) -> torch.device:
        return (
            torch.device("cpu")
            if self.on_cpu
            else torch.device("cuda", torch.cuda.current_device())
        )

    @contextmanager
    def _naming(self, t: int, what: str) -> Iterator[None]:
        """A failure of gloo or NCCL inside becomes an error that says who waited for what."""
        try:
            yield
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank}, step {t}: {what} failed; look for that rank's own error "
                f"first. ({str(error).splitlines()[0]})"
            ) from error

    def handshake(self, note: dict[str, str], error: type[ValueError] = PlanError) -> None:
        """Compare what every rank is about to do; the same error on all ranks where they differ.

        Args:
            note: what must be equal on all ranks; the key "error" holds a rank's own complaint.

        Raises:
            error (PlanError): a rank's complaint, or the ranks that differ and in what.
        """
        text = json.dumps({key: value[:400] for key, value in note.items()}).encode()
        mine = torch.zeros(NOTE_BYTES, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        mine = mine.to(self._device())
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
                found = ", ".join(f"rank {r} has {values[r]}" for r in others[:4])
                lines.append(f"{key}: {found}; the others have {usual}")
        if lines:
            raise error(
                "ranks are about to run different plans, nothing was exchanged; "
                "give every rank the same documents, options and shapes. " + "; ".join(lines)
            )

    def post(self, t: int, step: Step, buffers: dict[str, Tensor]) -> Wait:
        """Start the step's sends and receives; the returned function waits for all of them."""
        works = []
        for op, messages in ((dist.isend, step.sends), (dist.irecv, step.recvs)):
            for m in messages:
                rows = buffers[m.buffer][m.low : m.low + m.count]
                tag = t % TAGS * TAGS + m.tag % TAGS
                works.append(
                    (
                        dist.P2POp(
                            op, rows, group=self.group, tag=tag, group_peer=self.members[m.peer]
                        ),
                        m,
                    )
                )
        if not works:
            return lambda: None
        peers = ", ".join(sorted({str(m.peer) for _, m in works}))
        with self._naming(t, f"posting {len(works)} messages to and from ranks {peers}"):
            pending = dist.batch_isend_irecv([w[0] for w in works])
        sending = len(step.sends)

        def wait() -> None:
            if len(pending) < len(works):  # NCCL: one handle for all
                with self._naming(t, f"exchanging with ranks {peers}"):
                    for work in pending:
                        work.wait()
                return
            for i, (work, (_, m)) in enumerate(zip(pending, works, strict=True)):
                word = f"{KINDS[m.kind]}{m.owner}.{m.share}"
                to = f"sending {word} to" if i < sending else f"waiting for {word} from"
                with self._naming(t, f"{to} rank {m.peer}"):
                    work.wait()

        return wait

    def post_all_to_all(self, t: int, step: Step, buffers: dict[str, Tensor]) -> Wait:
        """The same as one all-to-all for each kind of buffer; packs, so it needs one more copy."""
        finish = []
        for names in ((ACC, LANDING), ("own", "arena")):
            out = [m for m in step.sends if m.buffer in names]
            into = [m for m in step.recvs if m.buffer in names]
            like = next((buffers[n] for n in names if n in buffers), None)
            if like is None:
                continue
            packed = [buffers[m.buffer][m.low : m.low + m.count] for m in out]
            send = torch.cat([like[:0], *packed])
            recv = like.new_empty((sum(m.count for m in into), *like.shape[1:]))
            splits = (self._splits(into), self._splits(out))
            with self._naming(t, "the step's all-to-all"):
                work = dist.all_to_all_single(recv, send, *splits, group=self.group, async_op=True)
            finish.append((work, recv, into))

        def wait() -> None:
            for work, recv, into in finish:
                with self._naming(t, "the step's all-to-all"):
                    work.wait()
                at = 0
                for m in into:
                    buffers[m.buffer][m.low : m.low + m.count] = recv[at : at + m.count]
                    at += m.count

        return wait

    def all_gather(self, own: Tensor, arena: Tensor, rows: int) -> Wait:
        """Every rank's rows, padded to `rows`, into the arena in rank order."""
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
