"""Program: one rank's part of a pass, as messages, buffer rows and kernel calls. No tensors here.

Buffers count rows (tokens): `kv` and `grad` hold the rank's own rows first, then what travels; so does
`q` where queries of other ranks come. Partial outputs of remote queries leave from `found`; gradients of
keys arrive in `landing`, partial outputs of own queries in `answers`, before they are added or merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..schedules import DKV, DQ, KV, OUT, Q
from ..sequence.tiles import Sequences
from .buffers import Runs

SMALL_BYTES = 1 << 20  # a message with parts up to this size, on average, is not divided
SENDS = {KV: "kv", DKV: "grad", Q: "q", OUT: "found", DQ: "found"}
RECEIVES = {KV: "kv", DKV: "landing", Q: "q", OUT: "answers", DQ: "answers"}


class Message(NamedTuple):
    """One send or receive of rows [low, low + count) of a buffer, or of `rows` where it has parts."""

    peer: int
    buffer: str
    low: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    kind: int
    owner: int
    share: int
    tag: int
    rows: Runs | None = None  # buffer rows `src` -> rows of the message, part by part

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Buffer rows (low, count) of its parts, in the order in which they travel."""
        if self.rows is None:
            return [(self.low, self.count)]
        return list(zip(self.rows.src.tolist(), self.rows.count.tolist(), strict=True))


class Call(NamedTuple):
    """One variable-length kernel call; its output rows are its sequences' query rows end to end."""

    causal: bool
    sequences: Sequences
    q_runs: tuple[Runs, ...]  # output rows -> query rows, one entry a round
    k_runs: tuple[Runs, ...]  # key gradient rows -> key rows
    inverse_causal: int = 0  # so many of the last sequences of a causal call, see tiles.py

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs, of one head."""
        _, q, _, k = self.sequences
        return int((q * (q + 1) // 2 if self.causal else q * k).sum())


class Compute(NamedTuple):
    """What a step computes on rows [low, low + count) of `kv`, or on those of them in `gather`."""

    low: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    gather: np.ndarray | None  # key rows to copy first, relative to `low`; None: read in place
    calls: tuple[Call, ...]
    grads: tuple[Runs, ...]  # key rows of the calls -> `grad` rows, one entry a round


class Step(NamedTuple):
    """One step: start remote queries, post sends and receives, compute, wait, then add what landed.

    Messages are posted in the order in which they stand here. To and from one peer they come in the
    order of their tags, on both ends alike: NCCL pairs messages by that order, gloo by their tags.
    """

    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    compute: Compute | None
    fresh: Runs  # q rows of remote queries that have just arrived
    clear: Runs  # grad rows that begin at zero
    add: Runs  # landing rows -> grad rows
    merge: Runs  # answers rows -> own query rows


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's part of a pass. Buffer sizes are in tokens (rows), beside the rank's own."""

    rank: int
    ranks: int
    tokens: int
    kv_buffer_rows: int
    remote_grad_rows: int
    grad_receive_rows: int
    remote_query_rows: int
    received_partial_rows: int
    steps: tuple[Step, ...]
    collective: str | None
    gathered_rows: int  # rows of one rank in a collective's buffer
    exchange: str  # how messages move: one of schedules.EXCHANGES
    kinds: tuple[int, ...]  # what moves in the pass on any rank; equal on all ranks

    @property
    def num_calls(self) -> int:
        """Kernel calls of the pass."""
        return sum(len(s.compute.calls) for s in self.steps if s.compute)

    @property
    def sends_queries(self) -> bool:
        """Whether its own queries travel."""
        return any(m.kind == Q for step in self.steps for m in step.sends)
