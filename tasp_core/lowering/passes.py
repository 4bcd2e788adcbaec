"""The passes that make a Program of a plan: each takes the draft of the one before and adds one thing.

    expand_hops      what this rank sends, receives and computes; not yet when it computes, nor any rows
    order            the compute step of each pairing: the one after the communication step that brings
                     its KV. No other pass knows this rule
    assign_rows      buffer rows for what arrives, by liveness
    pack_messages    the messages of each step, and the rows to which received sums are added
    kernel_calls     the tiles of each step as kernel calls
    emit             instructions, sorted by step and, inside a step, by PHASES
    insert_frees     a FREE after the last use of rows

`lower` runs them all; `stages` keeps what each has made, for pictures (visualize/lowering.py) and tests.
No tensors here. A row is one token in a buffer; nothing is proportional to heads or head dim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..errors import PlanError
from ..planning.messages import Moves, moves_of, starts
from ..planning.plan import Plan
from ..planning.work import group_by_keys, offloaded_subchunks, own_steps
from ..schedules import DKV, DQ, KINDS, KV, OUT, Q
from ..sequence.layouts import Pieces, ranges
from ..sequence.tiles import take
from .buffers import NO_RUNS, Place, Runs, join_runs, last_use, place, rows_to_themselves, union
from .kernel_calls import Group, attend
from .program import (
    IN_FLIGHT,
    OWN_ROWS,
    RECEIVES,
    SENDS,
    Add,
    AllGather,
    Attend,
    Free,
    Instruction,
    Merge,
    Message,
    Pack,
    Post,
    Program,
    Recv,
    Region,
    Send,
    Unpack,
    Wait,
    Zero,
)

FOREVER = np.iinfo(np.int64).max // 2
OWN = -1  # "after" of what needs no arrival


class Pairing(NamedTuple):
    """Query sub-chunks that attend to KV sub-chunks.

    Attributes:
        queries, kv: sub-chunk numbers; None: all of the rank's own tokens, not cut into sub-chunks.
        after: the communication step that brings the KV; OWN where none does.
        step: the compute step; before `order` has run, the earliest one that the schedule allows.
    """

    queries: np.ndarray | None
    kv: np.ndarray | None
    after: int
    step: int


class Times(NamedTuple):
    """Compute steps that follow from arrivals: when received KV and queries are first used."""

    kv_use: np.ndarray  # for each of `Draft.kv_arrivals`
    q_use: np.ndarray  # for each of `Draft.q_arrivals`
    num_steps: int


class Rows(NamedTuple):
    """Where received sub-chunks lie, after the rank's own rows, and how many rows of each kind there are.

    Attributes:
        kv, q, dkv: first row of each received sub-chunk in the buffers of these names.
        gathered_rows: rows per rank in the result of an all-gather; 0 without one.
    """

    kv: Place
    q: Place
    dkv: Place
    kv_buffer_rows: int
    remote_query_rows: int
    remote_grad_rows: int
    gathered_rows: int


class Posted(NamedTuple):
    """One step's messages, and what is done with received sums.

    Attributes:
        add: from rows of `dkv_recv` to the rows of `dkv` to which they are added.
        merge: from rows of `partial_recv` to the query rows whose results they are merged or added into.
    """

    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    add: Runs
    merge: Runs


@dataclass(frozen=True)
class Draft:
    """A program in the making: what the passes have made so far; the later fields are empty at first.

    Attributes:
        keep_kv: whether the forward pass leaves received KV for the backward pass, where it stays put.
        ahead: steps by which messages may arrive before their step: their rows are free as early.
        moves: all that the rank's hop table moves, by sub-chunk, in the order of the table.
        posted: the rows of `moves` that travel as messages. The others are moved by a collective, or
            are KV that the forward pass has kept.
        kv_arrivals, q_arrivals: the rows of `moves` that bring other ranks' KV and queries.
    """

    plan: Plan
    rank: int
    backward: bool
    keep_kv: bool
    ahead: int
    moves: Moves
    posted: Moves
    kv_arrivals: Moves
    q_arrivals: Moves
    collective: bool
    pairings: tuple[Pairing, ...]
    times: Times | None = None
    rows: Rows | None = None
    messages: tuple[Posted, ...] = ()
    attends: tuple[Attend | None, ...] = field(default=())

    @property
    def tokens(self) -> int:
        """The rank's own tokens."""
        return self.plan.num_tokens(self.rank)


# ---- expand hops


def expand_hops(plan: Plan, rank: int, *, backward: bool, keep_kv: bool, ahead: int = 0) -> Draft:
    """What a rank moves and which of its queries attend to which KV, after which arrival.

    Raises:
        PlanError: a collective that no executor knows, or one beside which there are messages.
    """
    moves = moves_of(plan, plan.hops(rank, backward=backward))
    kept, is_kv = keep_kv and backward, moves.kind == KV
    name = plan.schedule.collective
    collective = name is not None and not kept
    posted = moves
    if kept:  # the forward pass has left the KV here
        posted = moves.at(~is_kv)
    elif collective:
        posted = moves.at(~(is_kv & (moves.step == 0)))
        beside = bool((posted.step == 0).any())
        if name != "all_gather" or beside:
            raise PlanError(
                f"rank {rank}, step 0: executors know one collective, all_gather, by itself; the plan asks "
                f"for {name!r}{' and messages' * beside}; prove it with tasp.check"
            )
    arrives = moves.dst == rank
    kv_arrivals = moves.at(arrives & is_kv)
    q_arrivals = moves.at(arrives & (moves.kind == Q) & (moves.owner != rank))
    pairings = tuple(_pairings(plan, rank, kv_arrivals, backward))
    return Draft(
        plan,
        rank,
        backward,
        keep_kv,
        ahead,
        moves,
        posted,
        kv_arrivals,
        q_arrivals,
        collective,
        pairings,
    )


def _pairings(plan: Plan, rank: int, arrivals: Moves, backward: bool) -> Iterator[Pairing]:
    """Which queries attend to which KV on this rank.

    In this order: own queries with KV that arrives, own queries with own KV, remote queries.
    """
    remote, offloaded = offloaded_subchunks(plan, rank)
    own = _own_subchunks(plan, rank)
    turns = own_steps(plan, backward=backward)[
        rank
    ]  # by share: the step in which its queries meet own KV

    def parts(kv: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(own query sub-chunks, those of `kv` to which they attend here), without offloaded pairs."""
        here = offloaded.at(np.isin(offloaded.k_subchunk, kv))
        yield own[~np.isin(own, here.q_subchunk)], kv
        for queries, elsewhere in group_by_keys(here.q_subchunk, here.k_subchunk):
            yield queries, kv[~np.isin(kv, elsewhere)]

    for step in np.unique(arrivals.step).tolist():
        kv = arrivals.during(step).subchunk
        if np.isin(offloaded.k_subchunk, kv).any():
            yield from (Pairing(q, k, step, 0) for q, k in parts(kv))
        else:
            yield Pairing(None, kv, step, 0)
    if not turns.any() and not np.isin(offloaded.k_subchunk, own).any():
        yield Pairing(None, None, OWN, 0)
    else:
        for queries, kv in parts(own):
            turn = turns[queries % len(turns)]
            for step in np.unique(turn).tolist():
                yield Pairing(queries[turn == step], kv, OWN, step)
    for step in np.unique(remote.step).tolist():
        now = remote.at(remote.step == step)
        for queries, kv in group_by_keys(now.q_subchunk, now.k_subchunk):
            yield Pairing(queries, kv, OWN, step)


def _own_subchunks(plan: Plan, rank: int) -> np.ndarray:
    """Numbers of the rank's own sub-chunks that hold tokens."""
    size = plan.subchunks.parts * plan.schedule.num_shares
    subchunk = np.arange(rank * size, (rank + 1) * size)
    return subchunk[plan.subchunks.count[subchunk] > 0]


# ---- order

# Inside a step: what has just arrived is unpacked, messages start before the computation and are waited
# for after it, so that both take place at once; then what they have brought is added up.
PHASES = (Unpack, Pack, Send, Recv, AllGather, Post, Zero, Attend, Wait, Add, Merge)


def order(draft: Draft) -> Draft:
    """Give every pairing its step: the one after its KV arrives, or later where the schedule says so."""
    plan, moves = draft.plan, draft.moves
    pairings = [p._replace(step=max(p.step, p.after + 1)) for p in draft.pairings]
    pairings.sort(key=lambda p: p.step)  # stable: in a step, arrivals, own KV, remote queries
    times = Times(draft.kv_arrivals.step + 1, draft.q_arrivals.step + 1, 0)
    uses = (*times[:2], own_steps(plan, backward=draft.backward)[draft.rank])
    last = max(
        int(moves.step.max(initial=-1)),
        *(int(step.max(initial=0)) for step in uses),
        *(p.step for p in pairings),
    )
    num_steps = last + 1
    if plan.schedule.exchange == "all_to_all":  # every rank takes part in every step
        num_steps = plan.schedule.num_steps(backward=draft.backward) + 1
    times = times._replace(num_steps=num_steps)
    return replace(draft, pairings=tuple(pairings), times=times)


# ---- assign rows


def assign_rows(draft: Draft) -> Draft:
    """Give received KV, queries and gradients buffer rows from arrival to last use."""
    kv, kv_buffer_rows, gathered_rows = _kv_rows(draft)
    q, remote_query_rows = _query_rows(draft)
    dkv, remote_grad_rows = _gradient_rows(draft, kv) if draft.backward else (kv, 0)
    rows = Rows(kv, q, dkv, kv_buffer_rows, remote_query_rows, remote_grad_rows, gathered_rows)
    return replace(draft, rows=rows)


def _kv_rows(draft: Draft) -> tuple[Place, int, int]:
    """Rows of received KV, how many they are, and how many per rank a collective gathers (else 0)."""
    plan, arrivals, tokens = draft.plan, draft.kv_arrivals, draft.tokens
    assert draft.times is not None
    if plan.schedule.collective:
        rows = int(
            plan.layout.counts.max()
        )  # every rank's KV, padded to the largest, in rank order
        by_number = np.argsort(arrivals.subchunk, kind="stable")
        subchunk, owner = arrivals.subchunk[by_number], arrivals.owner[by_number]
        row = owner * rows + plan.subchunks.low[subchunk]
        return Place(subchunk, tokens + row), plan.ranks * rows, rows
    moves = draft.moves
    sends = moves.at((moves.src == draft.rank) & (moves.kind == KV) & (moves.owner != draft.rank))
    # a sub-chunk is needed until it is computed on, sent on, and used by the last remote query
    death = last_use(arrivals.subchunk, draft.times.kv_use, sends.subchunk, sends.step)
    used, step = _remote_pairs(draft, 1)
    here = np.isin(used, arrivals.subchunk)
    death = last_use(arrivals.subchunk, death, used[here], step[here])
    if draft.keep_kv:  # until the backward pass has used it
        death = np.full_like(death, FOREVER)
    latest = np.zeros(draft.times.num_steps + 1, dtype=np.int64)
    np.maximum.at(latest, arrivals.step, death)
    together = latest[arrivals.step]
    first = plan.subchunks.pieces.start[plan.subchunks.first[arrivals.subchunk]]
    birth = np.maximum(0, arrivals.step - draft.ahead)
    # what arrives together lies end to end until the last of it dies, unless that takes more rows
    deaths = [together] if (together == death).all() else [together, death]
    kv_rows, count = min(
        (place(arrivals.subchunk, birth, d, arrivals.count, first, tokens) for d in deaths),
        key=lambda placed: placed[1],
    )
    return kv_rows, count, 0


def _query_rows(draft: Draft) -> tuple[Place, int]:
    """Rows of remote queries, and how many; their results lie in the same rows of `out` or `dq`."""
    moves, arrivals = draft.moves, draft.q_arrivals
    assert draft.times is not None
    leaves = np.isin(moves.kind, (Q, OUT, DQ)) & (moves.owner != draft.rank)
    sends = moves.at(leaves & (moves.src == draft.rank))
    death = last_use(arrivals.subchunk, draft.times.q_use, sends.subchunk, sends.step)
    death = last_use(arrivals.subchunk, death, *_remote_pairs(draft, 0))
    birth = np.maximum(0, arrivals.step - draft.ahead)
    return place(arrivals.subchunk, birth, death, arrivals.count, arrivals.subchunk, draft.tokens)


def _remote_pairs(draft: Draft, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Query (side 0) or KV (1) sub-chunks of pairs computed for other ranks, and their steps."""
    remote = offloaded_subchunks(draft.plan, draft.rank)[0]
    return (remote.q_subchunk, remote.k_subchunk)[side], remote.step


def _gradient_rows(draft: Draft, kv: Place) -> tuple[Place, int]:
    """Rows in which gradients of remote KV accumulate until they are sent on, and how many."""
    arrivals, moves = draft.kv_arrivals, draft.moves
    assert draft.times is not None
    sends = moves.at((moves.src == draft.rank) & (moves.kind == DKV))
    birth = draft.times.kv_use
    leaves = last_use(arrivals.subchunk, birth, sends.subchunk, sends.step)
    by_kv_row = kv.of(arrivals.subchunk)
    return place(arrivals.subchunk, birth, leaves, arrivals.count, by_kv_row, draft.tokens)


# ---- pack messages


def pack_messages(draft: Draft) -> Draft:
    """Join transfers into messages: those of a step, link and kind that follow each other are one.

    Both ends post a link's messages in the order of the hop table, see planning/messages.py.
    """
    assert draft.times is not None
    messages = []
    most = [_most_received(draft, kinds) for kinds in SUMS]
    for step in range(draft.times.num_steps):
        here = draft.posted.during(step)
        # what arrives early must not meet what is still being added up: steps take turns
        base = [step % (1 + draft.ahead) * rows for rows in most]
        recvs, add, merge = _receives(draft, here.at(here.dst == draft.rank), base)
        sends = here.at(here.src == draft.rank)
        low = _first_rows(draft, sends)
        partial = sends.kind == OUT
        low[partial] -= draft.tokens  # `partial_send` holds rows of remote queries only
        messages.append(Posted(_messages(sends, sends.dst, low, SENDS), recvs, add, merge))
    return replace(draft, messages=tuple(messages))


def _first_rows(draft: Draft, moves: Moves) -> np.ndarray:
    """First row of each sub-chunk in the buffer in which it is kept (not in a receive buffer of sums)."""
    rows = draft.rows
    assert rows is not None
    low = draft.plan.subchunks.low[moves.subchunk]
    remote = moves.owner != draft.rank
    for kind, at in ((KV, rows.kv), (DKV, rows.dkv), (Q, rows.q), (OUT, rows.q), (DQ, rows.q)):
        of_kind = remote & (moves.kind == kind)
        if of_kind.any():
            low[of_kind] = at.of(moves.subchunk[of_kind])
    return low


SUMS = ((DKV,), (OUT, DQ))  # kinds that arrive in a receive buffer, by buffer


def _most_received(draft: Draft, kinds: tuple[int, ...]) -> int:
    """The most rows of these kinds that this rank receives in a step."""
    moves = draft.posted
    here = moves.at((moves.dst == draft.rank) & np.isin(moves.kind, kinds))
    return int(np.bincount(here.step, here.count, minlength=1).max())


def _receives(
    draft: Draft, moves: Moves, base: list[int]
) -> tuple[tuple[Message, ...], Runs, Runs]:
    """A step's received messages, then `Posted.add` and `Posted.merge`.

    Gradients and partial results arrive in a receive buffer of their own, end to end from row `base` on,
    and are added from there. KV and queries arrive where they are kept.
    """
    target = _first_rows(draft, moves)
    low, runs = target.copy(), []
    for kinds, first in zip(SUMS, base, strict=True):
        of_kind = np.isin(moves.kind, kinds)
        count = moves.count[of_kind]
        low[of_kind] = first + np.cumsum(count) - count
        own_first = np.argsort(moves.owner[of_kind] != draft.rank, kind="stable")
        columns = (low[of_kind], target[of_kind], count)
        runs.append(join_runs(*(c[own_first] for c in columns)) if len(count) else NO_RUNS)
    return _messages(moves, moves.src, low, RECEIVES), runs[0], runs[1]


def _messages(
    moves: Moves, peers: np.ndarray, low: np.ndarray, buffers: dict[int, str]
) -> tuple[Message, ...]:
    """Moves as messages, in their order.

    Args:
        peers: the other rank of each move.
        low: its first row in the buffer that it is sent from or received into.
        buffers: the name of this buffer, by kind: SENDS or RECEIVES.
    """
    if not len(low):
        return ()
    # moves first[i] .. ends[i] - 1 are message i; `before` counts the tokens of all moves before each
    first = np.flatnonzero(starts(moves.message))
    ends = np.append(first[1:], len(low))
    before = np.cumsum(moves.count) - moves.count
    size = before[ends - 1] + moves.count[ends - 1] - before[first]
    columns = [x[first] for x in (peers, low, moves.kind, moves.owner, moves.share, moves.tag)]
    names = list(zip(moves.owner.tolist(), moves.share.tolist(), strict=True))
    result = []
    lists = (c.tolist() for c in (first, ends, size, *columns))
    for a, b, n, peer, at, kind, owner, share, tag in zip(*lists, strict=True):
        parts, shares = None, None
        if b - a > 1:
            parts = Runs(low[a:b], before[a:b] - before[a], moves.count[a:b])
            shares = tuple(names[a:b])
        message = Message(peer, buffers[kind], at, n, kind, owner, share, tag, parts, shares)
        result.append(message)
    return tuple(result)


# ---- kernel calls


def kernel_calls(draft: Draft) -> Draft:
    """Turn each step's pairings into at most two kernel calls: one FULL and one CAUSAL."""
    assert draft.times is not None
    by_step: dict[int, list[Group]] = defaultdict(list)
    for pairing in draft.pairings:
        by_step[pairing.step].append(_group(draft, pairing))
    attends = [
        attend(by_step[step], draft.plan.docs, step, backward=draft.backward)
        for step in range(draft.times.num_steps)
    ]
    return replace(draft, attends=tuple(attends))


def _group(draft: Draft, pairing: Pairing) -> Group:
    """A pairing as pieces of documents at buffer rows."""
    plan, own, rows = draft.plan, draft.plan.layout.pieces(draft.rank), draft.rows
    assert rows is not None
    queries = own
    if pairing.queries is not None:
        row = _rows_of(draft, pairing.queries, rows.q)
        queries, index = _pieces(plan, pairing.queries)
        queries = queries._replace(offset=queries.offset + row[index])
    if pairing.kv is None:
        return Group(queries, own, own.offset)
    row = _rows_of(draft, pairing.kv, rows.kv)
    by_row = np.argsort(row, kind="stable")
    subchunk, row = pairing.kv[by_row], row[by_row]
    keys, index = _pieces(plan, subchunk)
    grad = _rows_of(draft, subchunk, rows.dkv) if draft.backward else row
    offset = keys.offset
    return Group(queries, keys._replace(offset=offset + row[index]), offset + grad[index])


def _pieces(plan: Plan, subchunk: np.ndarray) -> tuple[Pieces, np.ndarray]:
    """The document pieces of sub-chunks, offsets inside them, and the index of the sub-chunk of each."""
    first = plan.subchunks.first
    index, owner = ranges(first[subchunk], first[subchunk + 1])
    return take(plan.subchunks.pieces, index), owner


def _rows_of(draft: Draft, subchunk: np.ndarray, received: Place) -> np.ndarray:
    """First rows of sub-chunks, the rank's own or received ones."""
    plan = draft.plan
    row = plan.subchunks.low[subchunk]
    remote = subchunk // (plan.subchunks.parts * plan.schedule.num_shares) != draft.rank
    row[remote] = received.of(subchunk[remote])
    return row


# ---- instructions


def emit(draft: Draft) -> Program:
    """All of a draft as instructions, sorted by step and, inside a step, by PHASES."""
    plan, rows, times = draft.plan, draft.rows, draft.times
    assert rows is not None
    assert times is not None
    made = [i for step in range(times.num_steps) for i in _step(draft, step)]
    phase = {kind: number for number, kind in enumerate(PHASES)}
    made.sort(key=lambda i: (i.step, phase[type(i)]))
    received = [(1 + draft.ahead) * _most_received(draft, kinds) for kinds in SUMS]
    return Program(
        draft.rank,
        plan.ranks,
        draft.backward,
        draft.tokens,
        rows.kv_buffer_rows,
        rows.remote_grad_rows,
        received[0],
        rows.remote_query_rows,
        received[1],
        rows.gathered_rows,
        times.num_steps,
        plan.schedule.exchange,
        plan.schedule.kinds(backward=draft.backward),
        tuple(made),
    )


def _step(draft: Draft, step: int) -> Iterator[Instruction]:
    """The instructions of one step."""
    plan, rows, times = draft.plan, draft.rows, draft.times
    assert rows is not None
    assert times is not None
    result = "dq" if draft.backward else "out"
    posted, work = draft.messages[step], draft.attends[step]
    fresh = draft.q_arrivals.at(times.q_use == step)
    if len(fresh.step):
        yield Unpack(step, result, rows_to_themselves(rows.q.of(fresh.subchunk), fresh.count))
    partial = [(low, n) for m in posted.sends if m.kind == OUT for low, n in m.ranges]
    if partial:
        own = rows_to_themselves(*np.array(partial, dtype=np.int64).T)
        yield Pack(step, "out", "partial_send", own._replace(src=own.src + draft.tokens))
    yield from (Send(step, m) for m in posted.sends)
    yield from (Recv(step, m) for m in posted.recvs)
    gathers = draft.collective and step == 0
    if gathers:
        yield AllGather(step, draft.tokens, rows.gathered_rows, plan.ranks)
    exchange = plan.schedule.exchange
    everyone = exchange == "all_to_all" and step + 1 < times.num_steps
    moves = bool(posted.sends or posted.recvs) or everyone
    if moves and not gathers:
        kinds = plan.schedule.kinds(backward=draft.backward) if exchange == "all_to_all" else ()
        yield Post(step, exchange, kinds)
    born = draft.kv_arrivals.at(times.kv_use == step)
    if draft.backward and len(born.step):
        yield Zero(step, "dkv", rows_to_themselves(rows.dkv.of(born.subchunk), born.count))
    if work:
        yield work
    if moves or gathers:
        yield Wait(step)
    if len(posted.add.src):
        yield Add(step, "dkv_recv", "dkv", posted.add)
    if len(posted.merge.src):
        yield (Add if draft.backward else Merge)(step, "partial_recv", result, posted.merge)


# ---- frees


def insert_frees(program: Program, *, keep_kv: bool = False) -> Program:
    """The program with a FREE after the last use of each row; rows in flight are in use until their WAIT.

    Args:
        keep_kv: the KV buffer stays as it is, for the backward pass or from the forward pass.
    """
    # Liveness, from the last instruction to the first: a row that is used and not yet live is used here
    # for the last time. Where an instruction gives a row new contents, its old ones are not live before.
    after: dict[int, dict[str, list[np.ndarray]]] = defaultdict(dict)  # by index: rows by buffer
    live: dict[str, np.ndarray] = {}  # by buffer: whether each row is needed later on, bool [rows]
    sizes = buffer_rows(program)
    in_flight = _waited_for(program)
    for index in range(len(program.instructions) - 1, -1, -1):
        instruction = program.instructions[index]
        used = (*instruction.reads, *instruction.writes, *in_flight.get(index, ()))
        for region in used:
            if keep_kv and region.buffer == "kv":
                continue
            rows = live.setdefault(region.buffer, np.zeros(sizes[region.buffer], dtype=bool))
            here = rows[region.low : region.high]
            if not here.all():
                last = region.low + np.flatnonzero(~here)
                after[index].setdefault(region.buffer, []).append(last)
                here[:] = True
        for region in instruction.begins:
            if region.buffer in live:
                live[region.buffer][region.low : region.high] = False
    instructions: list[Instruction] = []
    for index, instruction in enumerate(program.instructions):
        instructions.append(instruction)
        for buffer, parts in sorted(after.get(index, {}).items()):
            last = np.concatenate(parts)
            # own rows are the caller's, and stay
            last = last[last >= program.tokens] if buffer in OWN_ROWS else last
            if len(last):
                runs = rows_to_themselves(last, np.ones_like(last))
                instructions.append(Free(instruction.step, buffer, runs))
    return replace(program, instructions=tuple(instructions))


def _waited_for(program: Program) -> dict[int, list[Region]]:
    """By the index of each WAIT: the rows that are in flight until then."""
    result: dict[int, list[Region]] = {}
    in_flight: list[Region] = []
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, IN_FLIGHT):
            in_flight += [*instruction.reads, *instruction.writes]
        elif isinstance(instruction, Wait):
            result[index], in_flight = in_flight, []
    return result


def buffer_rows(program: Program) -> dict[str, int]:
    """Rows of every buffer of a pass, the rank's own among them."""
    own, query = program.tokens, program.tokens + program.remote_query_rows
    return {
        "kv": own + program.kv_buffer_rows,
        "q": query,
        "out": query,
        "dq": query,
        "dkv": own + program.remote_grad_rows,
        "dkv_recv": program.grad_receive_rows,
        "partial_send": program.remote_query_rows,
        "partial_recv": program.received_partial_rows,
    }


# ---- all of them

PASSES: tuple[Callable[[Draft], Draft], ...] = (order, assign_rows, pack_messages, kernel_calls)


def lower_passes(
    plan: Plan, rank: int, *, backward: bool, keep_kv: bool, ahead: int = 0
) -> Program:
    """One rank's program of a context-parallel plan: all passes, one after the other."""
    draft = expand_hops(plan, rank, backward=backward, keep_kv=keep_kv, ahead=ahead)
    for one in PASSES:
        draft = one(draft)
    return insert_frees(emit(draft), keep_kv=keep_kv)


class Line(NamedTuple):
    """What a draft says about one message or computation; `step` is None where none is known yet."""

    step: int | None
    text: str
    owners: tuple[int, ...]  # whose KV, queries or gradients it is about


def stages(
    plan: Plan, rank: int, *, backward: bool = False, keep_kv: bool = False
) -> list[tuple[str, list[Line]]]:
    """(name of the pass, lines that describe the draft or program after it) of every pass, to be read.

    >>> from tasp_core import plan
    >>> for name, lines in stages(plan([64], ranks=4, schedule="ring"), 0)[:3]:
    ...     print(name, "|", next(line.text for line in lines if "RECV" in line.text))
    expand_hops | RECV kv3.0 <-3
    order | RECV kv3.0 <-3
    assign_rows | RECV kv3.0 <-3 @kv 16..32
    """
    draft = expand_hops(plan, rank, backward=backward, keep_kv=keep_kv)
    result = [(expand_hops.__name__, _draft_lines(draft))]
    for one in PASSES:
        draft = one(draft)
        result.append((one.__name__, _draft_lines(draft)))
    program = emit(draft)
    result.append((emit.__name__, _program_lines(program)))
    freed = insert_frees(program, keep_kv=keep_kv)
    return [*result, (insert_frees.__name__, _program_lines(freed))]


def _program_lines(program: Program) -> list[Line]:
    lines = []
    for i in program.instructions:
        owners = {o for o, *_ in i.message.parts} if isinstance(i, Send | Recv) else set()
        lines.append(Line(i.step, str(i), tuple(sorted(owners))))
    return lines


def _draft_lines(draft: Draft) -> list[Line]:
    """Messages, then computations, in the text form of program.py as far as it is known by now."""
    if draft.messages:
        lines = [
            Line(step, str(make(step, m)), tuple(sorted({o for o, *_ in m.parts})))
            for step, posted in enumerate(draft.messages)
            for make, messages in ((Send, posted.sends), (Recv, posted.recvs))
            for m in messages
        ]
    else:
        lines = _transfer_lines(draft)
    if draft.attends:
        return lines + [Line(a.step, str(a), ()) for a in draft.attends if a]
    for p in draft.pairings:
        queries = "q" if p.queries is None else _names(draft, Q, p.queries)
        own = p.kv is None
        kv = f"kv{draft.rank}" if p.kv is None else _names(draft, KV, p.kv)
        text = f"ATTEND {queries} x {kv}"
        if draft.rows and p.kv is not None:
            row = _rows_of(draft, p.kv, draft.rows.kv)
            text += f" @kv {_union_text(row, draft.plan.subchunks.count[p.kv])}"
        size = draft.plan.subchunks.parts * draft.plan.schedule.num_shares
        owners = (draft.rank,) if p.kv is None else tuple(np.unique(p.kv // size).tolist())
        if draft.times is None:
            when = f", not before step {p.step}" if p.step else ""
            text += " (own KV)" if own or p.after == OWN else f", which step {p.after} brings"
            lines.append(Line(None, text + when, owners))
        else:
            lines.append(Line(p.step, text, owners))
    return lines


def _transfer_lines(draft: Draft) -> list[Line]:
    """One line for each share that is sent or received."""
    lines: list[Line] = []
    posted = draft.posted
    columns = (posted.step, posted.src, posted.dst, posted.kind, posted.owner, posted.share)
    if not len(posted.step):
        return lines
    first = np.flatnonzero(starts(*columns))
    ends = np.append(first[1:], len(posted.step))
    low = _first_rows(draft, posted) if draft.rows else None
    for a, b in zip(first, ends, strict=True):
        step, src, dst, kind, owner, share = (int(column[a]) for column in columns)
        sends = src == draft.rank
        text = f"{'SEND' if sends else 'RECV'} {KINDS[kind]}{owner}.{share} "
        text += f"->{dst}" if sends else f"<-{src}"
        buffer = (SENDS if sends else RECEIVES)[kind]
        if low is not None and buffer in OWN_ROWS:
            text += f" @{buffer} {_union_text(low[a:b], posted.count[a:b])}"
        lines.append(Line(step, text, (owner,)))
    return lines


def _union_text(low: np.ndarray, count: np.ndarray) -> str:
    """Row ranges as text, joined where they touch: "16..32 48..64"."""
    return " ".join(f"{a}..{b}" for a, b in union(low, count))


def _names(draft: Draft, kind: int, subchunk: np.ndarray) -> str:
    """The shares that sub-chunks belong to, as text with at most four names: "kv1.0+kv1.1+2 more"."""
    shares = draft.plan.schedule.num_shares
    owner = subchunk // (draft.plan.subchunks.parts * shares)
    names = list(
        dict.fromkeys(
            f"{KINDS[kind]}{o}.{s}"
            for o, s in zip(owner.tolist(), (subchunk % shares).tolist(), strict=True)
        )
    )
    return "+".join(names[:4]) + f"+{len(names) - 4} more" * (len(names) > 4)
