"""Lowering: a plan and a rank -> a Program of messages, buffer rows and kernel calls.

At step t a program posts its messages, computes on what arrived at step t - 1 (at 0: own keys)
in at most two kernel calls, then waits. What arrives in one step lies end to end in one slot, in
row order, so that kernels read it in place wherever pieces of a document end up adjacent; otherwise
`gather` lists the rows to copy. Slots are reused as soon as liveness allows: relays need two.

In the backward pass `grad` holds, after the own rows, gradients on their way home: a share's own
contribution is added at its compute step, what arrives (`landing`) in a fixed order; the sum is sent.

No tensors here; execute.py runs programs. Rows are int64; nothing is proportional to heads or dims.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import LayoutError
from ..planning.messages import Moves, moves_of, starts
from ..planning.plan import Plan
from ..planning.work import group_by_keys, offloaded_subchunks
from ..schedules import DKV, DQ, KV, OUT, Q
from ..sequence.layouts import Pieces, ranges
from ..sequence.tiles import take
from .buffers import Place, Runs, join_runs, last_use, place
from .kernel_calls import Group, compute
from .program import RECEIVES, SENDS, Message, Program, Step

FOREVER = np.iinfo(np.int64).max // 2


class _Lowering:
    """Lowers one pass of one rank."""

    def __init__(self, plan: Plan, rank: int, backward: bool, keep_kv: bool) -> None:
        self.plan, self.rank, self.backward, self.keep_kv = plan, rank, backward, keep_kv
        self.subchunks, self.tokens = plan.subchunks, plan.num_tokens(rank)
        self.size = plan.subchunks.parts * plan.schedule.num_shares  # subchunks of a rank
        self.queries, self.own_steps = plan.layout.pieces(rank), plan.schedule.own_steps(rank)
        rows = moves_of(plan, plan.hops(rank, backward=backward))
        self.rows = rows
        self.steps = int(rows.step.max()) + 1 if len(rows.step) else 0
        self.remote_queries, self.given = offloaded_subchunks(plan, rank)
        self.arrivals = rows.at((rows.dst == rank) & (rows.kind == KV))
        self.grad_receive_rows = self.received_partial_rows = self.gathered_rows = 0
        self.arena, self.kv_buffer_rows = self._arena()
        self.q, self.remote_query_rows = self._remote_queries()
        self.acc, self.remote_grad_rows = self._acc() if backward else (self.arena, 0)

    def _arena(self) -> tuple[Place, int]:
        """Rows of travelling keys, after the own ones."""
        plan, here = self.plan, self.arrivals
        if plan.schedule.collective:
            self.gathered_rows = int(plan.layout.counts.max())
            order = np.argsort(here.subchunk, kind="stable")
            subchunk, owner = here.subchunk[order], here.owner[order]
            row = owner * self.gathered_rows + self.subchunks.low[subchunk]
            return Place(subchunk, self.tokens + row), plan.ranks * self.gathered_rows
        sends = self.rows.at((self.rows.src == self.rank) & (self.rows.kind == KV))
        sends = sends.at(sends.owner != self.rank)
        death = last_use(here.subchunk, here.step + 1, sends.subchunk, sends.step)
        met = self.remote_queries.at(np.isin(self.remote_queries.k_subchunk, here.subchunk))
        death = last_use(here.subchunk, death, met.k_subchunk, met.step)
        if self.keep_kv:  # until the backward pass has used it
            death = np.full_like(death, FOREVER)
        latest = np.zeros(self.steps + 1, dtype=np.int64)
        np.maximum.at(latest, here.step, death)
        together = latest[here.step]
        first = self.subchunks.pieces.start[self.subchunks.first[here.subchunk]]
        # what arrives together lies together, unless some of it would stay too long
        ways = [together] if (together == death).all() else [together, death]
        places = [place(here.subchunk, here.step, d, here.count, first, self.tokens) for d in ways]
        return min(places, key=lambda found: found[1])

    def _remote_queries(self) -> tuple[Place, int]:
        """Rows of remote queries, and of what they find, after the own ones."""
        moved = self.rows.at(np.isin(self.rows.kind, (Q, OUT, DQ)) & (self.rows.owner != self.rank))
        here = moved.at((moved.dst == self.rank) & (moved.kind == Q))
        sends = moved.at(moved.src == self.rank)
        death = last_use(here.subchunk, here.step + 1, sends.subchunk, sends.step)
        death = last_use(
            here.subchunk, death, self.remote_queries.q_subchunk, self.remote_queries.step
        )
        self.fresh = here
        return place(here.subchunk, here.step, death, here.count, here.subchunk, self.tokens)

    def _acc(self) -> tuple[Place, int]:
        """Rows of gradients on their way home, after the own ones."""
        here, rows = self.arrivals, self.rows
        home = rows.at((rows.src == self.rank) & (rows.kind == DKV))
        leaves = last_use(here.subchunk, here.step + 1, home.subchunk, home.step)
        at = self.arena.of(here.subchunk)
        return place(here.subchunk, here.step + 1, leaves, here.count, at, self.tokens)

    def _row(self, rows: Moves) -> np.ndarray:
        """First row of each subchunk in the buffer it is sent from or received into."""
        low = self.subchunks.low[rows.subchunk]
        away = rows.owner != self.rank
        for kind, where in ((KV, self.arena), (DKV, self.acc), (Q, self.q)):
            some = away & (rows.kind == kind)
            if some.any():
                low[some] = where.of(rows.subchunk[some])
        return low

    def _sends(self, rows: Moves) -> tuple[Message, ...]:
        low = self._row(rows)
        found = (rows.kind == OUT) | (rows.kind == DQ)  # counted from the first remote query row
        low[found] = self.q.of(rows.subchunk[found]) - self.tokens
        return _messages(rows, rows.dst, low, SENDS)

    def _recvs(self, rows: Moves) -> tuple[tuple[Message, ...], Runs, Runs]:
        """Messages, and where what lands is added: gradient rows, query rows."""
        target = self._row(rows)
        low, runs, size = target.copy(), [], []
        for some in (rows.kind == DKV, (rows.kind == OUT) | (rows.kind == DQ)):
            ends = np.cumsum(rows.count[some])
            low[some] = ends - rows.count[some]
            order = np.argsort(rows.owner[some] != self.rank, kind="stable")  # own rows first
            runs.append(join_runs(*(c[some][order] for c in (low, target, rows.count))))
            size.append(int(ends[-1]) if len(ends) else 0)
        self.grad_receive_rows = max(self.grad_receive_rows, size[0])
        self.received_partial_rows = max(self.received_partial_rows, size[1])
        return _messages(rows, rows.src, low, RECEIVES), runs[0], runs[1]

    def _pieces(self, subchunk: np.ndarray, row: np.ndarray, grad: np.ndarray) -> Group:
        """The pieces of key subchunks that lie at `row`, their gradients at `grad`; no queries yet."""
        index, owner = ranges(self.subchunks.first[subchunk], self.subchunks.first[subchunk + 1])
        pieces = take(self.subchunks.pieces, index)
        at = pieces.offset
        return Group(pieces, pieces._replace(offset=at + row[owner]), at + grad[owner])

    def _keys(self, subchunk: np.ndarray) -> Group:
        """Key subchunks, own or held."""
        low = self.subchunks.low[subchunk]
        row, grad = low.copy(), low.copy()
        held = subchunk // self.size != self.rank
        row[held] = self.arena.of(subchunk[held])
        if self.backward:
            grad[held] = self.acc.of(subchunk[held])
        order = np.argsort(row, kind="stable")
        return self._pieces(subchunk[order], row[order], grad[order])

    def _query(self, subchunk: np.ndarray) -> Pieces:
        """Query subchunks, own or remote queries."""
        row = self.subchunks.low[subchunk]
        held = subchunk // self.size != self.rank
        row[held] = self.q.of(subchunk[held])
        return self._pieces(subchunk, row, row).keys

    def _groups(self, step: int) -> Iterator[Group]:
        """Own queries with what has just arrived (own keys when it is their turn), then remote queries."""
        keys = self.arrivals.during(step - 1).subchunk if step else self._own_subchunks()
        given = self.given
        if len(given.step):
            given = given.at(np.isin(given.k_subchunk, keys))
        if not len(given.step):
            if step:
                yield self._keys(keys)._replace(queries=self.queries)
            yield from self._at_home(step)
        else:
            mine = self._own_subchunks()
            stay = mine[~np.isin(mine, given.q_subchunk)]
            parts = [(stay, keys[:0]), *group_by_keys(given.q_subchunk, given.k_subchunk)]
            for q, gone in parts:
                yield self._keys(keys[~np.isin(keys, gone)])._replace(queries=self._query(q))
        remote_queries = self.remote_queries.at(self.remote_queries.step == step)
        for q, k in group_by_keys(remote_queries.q_subchunk, remote_queries.k_subchunk):
            yield self._keys(k)._replace(queries=self._query(q))

    def _at_home(self, step: int) -> Iterator[Group]:
        """Own queries with own keys, those whose turn it is."""
        mine = self._own_subchunks()
        if self.own_steps.any():
            turn = self._query(mine[self.own_steps[mine % len(self.own_steps)] == step])
            yield self._keys(mine)._replace(queries=turn)
        elif not step:
            yield Group(self.queries, self.queries, self.queries.offset)

    def _own_subchunks(self) -> np.ndarray:
        subchunk = np.arange(self.rank * self.size, (self.rank + 1) * self.size)
        return subchunk[self.subchunks.count[subchunk] > 0]

    def _step(self, t: int) -> Step:
        rank, here = self.rank, self.rows.during(t)
        if (self.plan.schedule.collective and t == 0) or (self.keep_kv and self.backward):
            here = here.at(here.kind != KV)
        recvs, add, merge = self._recvs(here.at(here.dst == rank))
        sends = self._sends(here.at(here.src == rank))
        fresh, born = self.fresh.during(t - 1), self.arrivals.during(t - 1)
        new = _spans(self.q.of(fresh.subchunk), fresh.count)
        clear = _spans(self.acc.of(born.subchunk), born.count) if self.backward else NOTHING
        work = compute(list(self._groups(t)), self.plan.docs)
        return Step(sends, recvs, work, new, clear, add, merge)

    def program(self) -> Program:
        after = [
            self.remote_queries.step,
            self.own_steps,
            *(x.step + 1 for x in (self.arrivals, self.fresh)),
        ]
        count = max(self.steps, *(int(step.max(initial=0)) + 1 for step in after))
        plan = self.plan
        collective = None if self.keep_kv and self.backward else plan.schedule.collective
        if plan.schedule.exchange == "all_to_all":  # every rank takes part in every step
            count = plan.schedule.num_steps(backward=self.backward) + 1
        steps = tuple(self._step(t) for t in range(count))
        return Program(
            self.rank,
            plan.ranks,
            self.tokens,
            self.kv_buffer_rows,
            self.remote_grad_rows,
            self.grad_receive_rows,
            self.remote_query_rows,
            self.received_partial_rows,
            steps,
            collective,
            self.gathered_rows,
            plan.schedule.exchange,
            plan.schedule.kinds(backward=self.backward),
        )


NOTHING = Runs(*np.zeros((3, 0), dtype=np.int64))


def _spans(low: np.ndarray, count: np.ndarray) -> Runs:
    """Rows to themselves, those that continue each other joined."""
    order = np.argsort(low)
    return join_runs(low[order], low[order], count[order])


def _messages(
    rows: Moves, peers: np.ndarray, low: np.ndarray, buffers: dict[int, str]
) -> tuple[Message, ...]:
    """Moves as messages, in their order: both ends post a link's messages in it, see messages.py."""
    if not len(low):
        return ()
    first = np.flatnonzero(starts(rows.message))
    ends = np.append(first[1:], len(low))
    before = np.cumsum(rows.count) - rows.count
    size = before[ends - 1] + rows.count[ends - 1] - before[first]
    columns = [x[first] for x in (peers, low, rows.kind, rows.owner, rows.share, rows.tag)]
    result = []
    lists = (c.tolist() for c in (first, ends, size, *columns))
    for a, b, n, peer, at, kind, owner, share, tag in zip(*lists, strict=True):
        parts = Runs(low[a:b], before[a:b] - before[a], rows.count[a:b]) if b - a > 1 else None
        result.append(Message(peer, buffers[kind], at, n, kind, owner, share, tag, parts))
    return tuple(result)


def lower(plan: Plan, rank: int, *, backward: bool = False, keep_kv: bool = False) -> Program:
    """One rank's Program for the forward or the backward pass; with `intra`, its group's.

    With keep_kv all keys that arrive in the forward pass stay for the backward pass, in which none
    travel: more memory, fewer bytes.

    Raises:
        LayoutError: the rank does not exist.

    >>> from tasp_core import plan
    >>> program = lower(plan([64], ranks=4, schedule="ring"), 0)
    >>> program.kv_buffer_rows, [len(s.compute.calls) for s in program.steps]
    (32, [2, 1, 1, 1])
    """
    if not 0 <= rank < plan.ranks:
        raise LayoutError(f"rank {rank} does not exist: ranks are 0..{plan.ranks - 1}")
    return _Lowering(plan.context_plan, rank // plan.intra, backward, keep_kv).program()
