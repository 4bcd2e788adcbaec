"""Lowering: a plan and a rank -> a Program of messages, buffer rows and kernel calls.

At step t a program posts its messages, computes on what arrived at step t - 1 (own keys at step 0)
in at most two kernel calls, then waits. What arrives in one step lies end to end in one slot, in
row order, so that kernels read it in place wherever pieces of a document end up adjacent; otherwise
`gather` lists the rows to copy. Slots are reused as soon as liveness allows: relays need two.

In the backward pass `acc` holds gradients on their way home: a share's own contribution lands there
at its compute step, what arrives (`landing`) is added in a fixed order, the sum is sent on.

No tensors here; execute.py runs programs. Rows are int64; nothing is proportional to heads or dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .buffers import Place, Runs, join_runs, last_use, place
from .documents import Documents
from .layout import Pieces, ranges
from .plan import Plan
from .schedules import DKV, KV, Hops
from .tiles import Sequences, rounds, take, tile

OWN, ARENA, ACC, LANDING, GRAD = "own", "arena", "acc", "landing", "grad"


class Message(NamedTuple):
    """One send or receive of rows [low, low + count) of a buffer."""

    peer: int
    buffer: str
    low: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    kind: int
    owner: int
    share: int
    tag: int


class Call(NamedTuple):
    """One variable-length kernel call; its output rows are its sequences' query rows end to end."""

    causal: bool
    sequences: Sequences
    q_runs: tuple[Runs, ...]  # output rows -> query rows, one entry a round
    k_runs: tuple[Runs, ...]  # key gradient rows -> key rows
    mirrored: int = 0  # so many of the last sequences of a causal call, see tiles.py


class Compute(NamedTuple):
    """What a step computes: the calls, and the rows [low, low + count) of `buffer` they read keys from."""

    buffer: str
    low: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    gather: np.ndarray | None  # key rows to copy first, relative to `low`; None: read in place
    calls: tuple[Call, ...]
    grads: Runs | None  # contributions (relative to `low`) -> acc rows; None: own keys


class Step(NamedTuple):
    """One step: post sends and receives, compute, wait, then add what landed."""

    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    compute: Compute | None
    add_own: Runs  # landing rows -> own gradient rows
    add_acc: Runs  # landing rows -> acc rows


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's part of a pass. Buffer sizes are in tokens (rows)."""

    rank: int
    ranks: int
    tokens: int
    arena_rows: int
    acc_rows: int
    landing_rows: int
    steps: tuple[Step, ...]
    collective: str | None
    gathered_rows: int  # rows of one rank in a collective's buffer

    @property
    def num_calls(self) -> int:
        """Kernel calls of the pass."""
        return sum(len(s.compute.calls) for s in self.steps if s.compute)


class _Rows(NamedTuple):
    """Hops by unit (part of a share), parts without tokens dropped."""

    step: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    owner: np.ndarray
    share: np.ndarray
    kind: np.ndarray
    unit: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count
    tag: np.ndarray

    def at(self, mask: np.ndarray) -> _Rows:
        return _Rows(*(column[mask] for column in self))

    def during(self, step: int) -> _Rows:
        low, high = np.searchsorted(self.step, (step, step + 1))
        return _Rows(*(column[low:high] for column in self))


def _expand(plan: Plan, hops: Hops) -> _Rows:
    """One row for each unit moved, in the order both ends agree on, numbered within its link and step."""
    parts = plan.units.parts
    unit = np.stack([plan.unit_of(hops, p) for p in range(parts)], axis=1).ravel()
    count = plan.units.count[unit]
    keep = count > 0
    columns = [np.repeat(c, parts)[keep] for c in hops]
    step, src, dst = columns[:3]
    new = np.ones(len(step), dtype=bool)
    new[1:] = (np.diff(step) != 0) | (np.diff(src) != 0) | (np.diff(dst) != 0)
    first = np.flatnonzero(new)
    tag = np.arange(len(step)) - first[np.cumsum(new) - 1] if len(step) else step
    return _Rows._make([*columns, unit[keep], count[keep], tag])


def _rounds(rows: np.ndarray, count: np.ndarray) -> tuple[Runs, ...]:
    """A call's output rows, end to end, to the `rows` they belong to, in rounds without overlap."""
    number = rounds(rows, count)
    out = np.cumsum(count) - count
    picks = (number == i for i in range(int(number.max(initial=-1)) + 1))
    return tuple(join_runs(out[p], rows[p], count[p]) for p in picks)


def _compute(
    buffer: str,
    low: int,
    count: int,
    queries: Pieces,
    keys: Pieces,
    docs: Documents,
    grads: Runs | None,
) -> Compute:
    """Tiles of the queries against key pieces whose offsets are rows from `low`."""
    tiles = tile(queries, keys, docs)
    used = take(keys, tiles.used)
    border = np.cumsum(used.count) - used.count  # first working row of each used piece
    follows = used.offset[1:] == used.offset[:-1] + used.count[:-1]
    gather = None
    merged = docs.window_size is None  # else every sequence reads one piece
    if merged and not (follows | (used.doc[1:] != used.doc[:-1])).all():
        gather = ranges(used.offset, used.offset + used.count)[0]
    calls = []
    for causal, parts in ((True, (tiles.causal, tiles.mirrored)), (False, (tiles.full,))):
        seq = Sequences(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        if not len(seq.q_lo):
            continue
        if gather is None:
            at = np.searchsorted(border, seq.k_lo, side="right") - 1
            seq = seq._replace(k_lo=used.offset[at] + seq.k_lo - border[at])
        runs = _rounds(seq.q_lo, seq.q_n), _rounds(seq.k_lo, seq.k_n)
        calls.append(Call(causal, seq, *runs, len(tiles.mirrored.q_lo) * causal))
    return Compute(buffer, low, count, gather, tuple(calls), grads)


def _unit_pieces(plan: Plan, unit: np.ndarray, row: np.ndarray) -> Pieces:
    """The pieces of units that lie at `row`."""
    first = plan.units.first
    index, owner = ranges(first[unit], first[unit + 1])
    pieces = take(plan.units.pieces, index)
    return pieces._replace(offset=pieces.offset + row[owner])


def _messages(
    rows: _Rows, peers: np.ndarray, names: list[str], low: np.ndarray
) -> tuple[Message, ...]:
    columns = (peers, low, rows.count, rows.kind, rows.owner, rows.share, rows.tag)
    values = zip(names, *(c.tolist() for c in columns), strict=True)
    return tuple(
        Message(peer, name, at, n, k, o, s, tag) for name, peer, at, n, k, o, s, tag in values
    )


class _Lowering:
    """Lowers one pass of one rank."""

    def __init__(self, plan: Plan, rank: int, backward: bool) -> None:
        self.plan, self.rank, self.backward = plan, rank, backward
        self.queries = plan.layout.pieces(rank)
        rows = _expand(plan, plan.hops(rank, backward=backward))
        self.rows = rows
        self.steps = int(rows.step.max()) + 1 if len(rows.step) else 0
        arrivals = rows.at((rows.dst == rank) & (rows.kind == KV))
        sends = rows.at((rows.src == rank) & (rows.kind == KV) & (rows.owner != rank))
        self.arrivals = arrivals
        collective = plan.schedule.collective
        self.gathered_rows = int(plan.layout.counts.max()) if collective else 0
        if collective:
            order = np.argsort(arrivals.unit, kind="stable")
            unit, owner = arrivals.unit[order], arrivals.owner[order]
            self.arena = Place(unit, owner * self.gathered_rows + plan.units.low[unit])
            self.arena_rows = plan.ranks * self.gathered_rows
        else:
            death = last_use(arrivals.unit, arrivals.step + 1, sends.unit, sends.step)
            together = np.zeros(self.steps + 1, dtype=np.int64)
            np.maximum.at(together, arrivals.step, death)
            death = together[arrivals.step]  # what arrives together stays together
            first = plan.units.pieces.start[plan.units.first[arrivals.unit]]
            self.arena, self.arena_rows = place(
                arrivals.unit, arrivals.step, death, arrivals.count, first
            )
        self.acc, self.acc_rows, self.landing_rows = Place(arrivals.unit, arrivals.unit), 0, 0
        if backward:
            home = rows.at((rows.src == rank) & (rows.kind == DKV))
            leaves = last_use(arrivals.unit, arrivals.step + 1, home.unit, home.step)
            row = self.arena.of(arrivals.unit)
            self.acc, self.acc_rows = place(
                arrivals.unit, arrivals.step + 1, leaves, arrivals.count, row
            )

    def _sends(self, rows: _Rows) -> tuple[Message, ...]:
        low = np.zeros(len(rows.unit), dtype=np.int64)
        own, acc = rows.owner == self.rank, rows.kind == DKV
        low[own] = self.plan.units.low[rows.unit[own]]
        for mask, where in ((~own & ~acc, self.arena), (acc, self.acc)):
            low[mask] = where.of(rows.unit[mask])
        names = [ACC if a else OWN if o else ARENA for a, o in zip(acc, own, strict=True)]
        return _messages(rows, rows.dst, names, low)

    def _recvs(self, rows: _Rows) -> tuple[tuple[Message, ...], Runs, Runs]:
        """Messages, and where what lands is added: own gradient rows, acc rows."""
        landing = rows.kind == DKV
        low = np.zeros(len(rows.unit), dtype=np.int64)
        low[~landing] = self.arena.of(rows.unit[~landing])
        low[landing] = np.cumsum(rows.count[landing]) - rows.count[landing]
        names = [LANDING if x else ARENA for x in landing]
        messages = _messages(rows, rows.src, names, low)
        self.landing_rows = max(self.landing_rows, int(rows.count[landing].sum()))
        home, passing = landing & (rows.owner == self.rank), landing & (rows.owner != self.rank)
        own = join_runs(low[home], self.plan.units.low[rows.unit[home]], rows.count[home])
        acc = join_runs(low[passing], self.acc.of(rows.unit[passing]), rows.count[passing])
        return messages, own, acc

    def _compute(self, step: int) -> Compute | None:
        plan, queries = self.plan, self.queries
        if step == 0:
            tokens = plan.num_tokens(self.rank)
            return _compute(OWN, 0, tokens, queries, queries, plan.docs, None)
        here = self.arrivals.during(step - 1)
        if not len(here.unit):
            return None
        row = self.arena.of(here.unit)
        low, high = int(row.min()), int((row + here.count).max())
        order = np.argsort(row)
        grads = None
        if self.backward:
            unit = here.unit[order]
            grads = join_runs(row[order] - low, self.acc.of(unit), here.count[order])
        pieces = _unit_pieces(plan, here.unit[order], row[order] - low)
        return _compute(ARENA, low, high - low, queries, pieces, plan.docs, grads)

    def program(self) -> Program:
        rows, rank = self.rows, self.rank
        last = int(self.arrivals.step.max()) + 1 if len(self.arrivals.step) else 0
        count = max(self.steps, last + 1)
        if self.plan.schedule.exchange == "all_to_all":  # every rank takes part in every step
            count = self.plan.schedule.num_steps(backward=self.backward) + 1
        steps = []
        for t in range(count):
            here = rows.during(t)
            if self.plan.schedule.collective and t == 0:
                here = here.at(here.kind == DKV)
            recvs, add_own, add_acc = self._recvs(here.at(here.dst == rank))
            sends = self._sends(here.at(here.src == rank))
            steps.append(Step(sends, recvs, self._compute(t), add_own, add_acc))
        plan = self.plan
        return Program(
            rank, plan.ranks, plan.num_tokens(rank), self.arena_rows, self.acc_rows,
            self.landing_rows, tuple(steps), plan.schedule.collective, self.gathered_rows,
        )  # fmt: skip


def lower(plan: Plan, rank: int, *, backward: bool = False) -> Program:
    """One rank's Program for the forward or the backward pass; with `intra`, its group's.

    Raises:
        LayoutError: the rank does not exist.

    >>> from .plan import plan
    >>> program = lower(plan([64], ranks=4, schedule="ring"), 0)
    >>> program.arena_rows, [len(s.compute.calls) for s in program.steps]
    (32, [2, 1, 1, 1])
    """
    return _Lowering(plan.inner, rank // plan.intra, backward).program()
