"""An interpreter of programs on integers: a key is its token id, a query's result counts how often it
met each key, a key's gradient how often each query met it. Rows in flight hold POISON.

Messages move as the program's exchange moves them: p2p by sender, receiver, tag and kind; all_to_all by
rows that every rank takes part in for each kind and step; an all-gather by rank, padded to equal rows."""

from __future__ import annotations

import numpy as np

from tasp_core import Plan, lower
from tasp_core.lowering.passes import buffer_rows
from tasp_core.lowering.program import (
    Add,
    AllGather,
    Attend,
    Call,
    Free,
    Instruction,
    Merge,
    Message,
    Pack,
    Post,
    Program,
    Recv,
    Send,
    Unpack,
    Wait,
    Zero,
)

POISON = -(10**9)
Arrived = dict[int, list[tuple[Message, np.ndarray]]]  # by rank: what each of its receives gets


class Machine:
    """One rank: token ids for keys and queries, counts [rows, tokens] for results and gradients."""

    def __init__(self, p: Plan, program: Program) -> None:
        self.program, self.tokens, total = program, p.tokens(program.rank), p.docs.total
        own = len(self.tokens)
        self.buffers = {}
        for name, rows in buffer_rows(program).items():
            shape = (rows,) if name in ("kv", "q") else (rows, total)
            self.buffers[name] = np.full(shape, POISON)
        for name in ("kv", "q"):
            self.buffers[name][:own] = self.tokens
        self.result = self.buffers["dq" if program.backward else "out"]
        self.grad = self.buffers["dkv"]
        self.result[:own], self.grad[:own] = 0, 0
        self.sends: list[tuple[Message, np.ndarray]] = []  # in flight, with their rows at SEND
        self.recvs: list[Message] = []
        self.posted = self.gathers = False

    def read(self, m: Message) -> np.ndarray:
        assert sum(count for _, count in m.ranges) == m.count
        for low, count in m.ranges:
            assert 0 <= low < low + count <= len(self.buffers[m.buffer])
        return np.concatenate([self.buffers[m.buffer][low : low + n] for low, n in m.ranges])

    def write(self, m: Message, rows: np.ndarray | int) -> None:
        at = 0
        for low, count in m.ranges:
            part = rows if isinstance(rows, int) else rows[at : at + count]
            self.buffers[m.buffer][low : low + count] = part
            at += count

    def run(self, i: Instruction) -> None:
        """One instruction; WAIT only checks what is in flight: the messages are moved by `interpret`."""
        match i:
            case Send(message=m):
                self.sends.append((m, self.read(m)))
            case Recv(message=m):
                self.write(m, POISON)  # from now until the wait, these rows hold anything
                self.recvs.append(m)
            case Post():
                self.posted = True
            case AllGather():
                self.gathers = True
            case Wait():
                assert self.posted != self.gathers, "nothing is under way, or too much"
                for m, rows in self.sends:  # may leave at once or at the wait
                    assert np.array_equal(rows, self.read(m)), "a send's rows change under it"
                    assert (rows >= 0).all(), "rows in flight, or never filled, are sent"
            case Unpack(result=result, rows=rows):
                for low, count in runs_of(rows.dst, rows.count):
                    assert (self.buffers["q"][low : low + count] >= 0).all()
                    self.buffers[result][low : low + count] = 0
            case Zero(buffer=buffer, rows=rows):
                for low, count in runs_of(rows.dst, rows.count):
                    self.buffers[buffer][low : low + count] = 0
            case Free(buffer=buffer, rows=rows):
                for low, count in runs_of(rows.dst, rows.count):
                    self.buffers[buffer][low : low + count] = POISON
            case Pack(source=source, target=target, rows=rows):
                for s, d, n in zip(*(c.tolist() for c in rows), strict=True):
                    self.buffers[target][d : d + n] = self.buffers[source][s : s + n]
            case (
                Add(source=source, target=target, rows=rows)
                | Merge(source=source, target=target, rows=rows)
            ):
                for s, d, n in zip(*(c.tolist() for c in rows), strict=True):
                    self.buffers[target][d : d + n] += self.buffers[source][s : s + n]
            case Attend():
                self.compute(i)
            case _:
                raise AssertionError(i)

    def attend(self, call: Call, keys: np.ndarray) -> np.ndarray:
        """Count a call's pairs into the queries' results; its key rows' counts end to end."""
        parts, grads, total = [], [], self.grad.shape[1]
        last = len(call.sequences.q_lo) - call.inverse_causal
        for i, (a, m, b, n) in enumerate(zip(*(c.tolist() for c in call.sequences), strict=True)):
            ids, asking = keys[b : b + n], self.buffers["q"][a : a + m]
            assert (len(ids), len(asking)) == (n, m)
            assert min(ids.min(), asking.min()) >= 0, "a kernel reads rows in flight"
            pairs = np.tri(m, n, dtype=int) if call.causal else np.ones((m, n), dtype=int)
            pairs = pairs[::-1, ::-1] if i >= last else pairs
            part, grad = (np.zeros((x, total), dtype=int) for x in (m, n))
            np.add.at(part.T, ids, pairs.T)
            np.add.at(grad.T, asking, pairs)
            parts.append(part)
            grads.append(grad)
        for runs in call.q_runs:
            add(self.result, np.concatenate(parts), runs)
        return np.concatenate(grads)

    def compute(self, compute: Attend) -> None:
        keys = self.buffers["kv"][compute.low : compute.low + compute.count]
        assert len(keys) == compute.count
        keys = keys if compute.gather is None else keys[compute.gather]
        worked = np.zeros((len(keys), self.grad.shape[1]), dtype=int)
        for call in compute.calls:
            grads = self.attend(call, keys)
            for runs in call.k_runs:
                add(worked, grads, runs)
        for runs in compute.grads:
            add(self.grad, worked, runs)


def runs_of(low: np.ndarray, count: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(low.tolist(), count.tolist(), strict=True))


def add(target: np.ndarray, source: np.ndarray, runs) -> None:
    """target[dst] += source[src] for the runs of one round, which must not overlap."""
    written = np.zeros(len(target), dtype=bool)
    for s, d, n in zip(*(c.tolist() for c in runs), strict=True):
        assert not written[d : d + n].any()
        written[d : d + n] = True
        target[d : d + n] += source[s : s + n]


def _single(live: list[Machine]) -> Arrived:
    """Messages by sender, receiver, tag and kind; none is left over."""
    mail = {}
    for r in live:
        for m, rows in r.sends:
            key = r.program.rank, m.peer, m.tag, m.kind
            assert key not in mail, "two messages that nothing tells apart"
            mail[key] = rows
    arrived: Arrived = {}
    for r in live:
        own = r.program.rank
        arrived[own] = [(m, mail.pop((m.peer, own, m.tag, m.kind))) for m in r.recvs]
    assert not mail, "a message that nobody receives"
    return arrived


def _all_to_all(live: list[Machine]) -> Arrived:
    """For each kind one collective: rows by rank, in the order of each side's messages."""
    count, kinds = live[0].program.ranks, live[0].program.kinds
    assert len(live) == count, "a rank takes no part in a collective"
    arrived: Arrived = {r.program.rank: [] for r in live}
    for r in live:
        assert r.program.kinds == kinds, "ranks call other collectives"
        moved = {m.kind for m in (*(m for m, _ in r.sends), *r.recvs)}
        assert moved <= set(kinds), "a kind that stays behind"
    for kind in kinds:
        rows: dict[tuple[int, int], list[int]] = {}
        for r in live:
            of_kind = [(m, x) for m, x in r.sends if m.kind == kind]
            peers = [m.peer for m, _ in of_kind]
            assert peers == sorted(peers), "what is sent lies in the order of ranks"
            for m, x in of_kind:
                rows.setdefault((r.program.rank, m.peer), []).extend(x)
        for r in live:
            into = [m for m in r.recvs if m.kind == kind]
            assert [m.peer for m in into] == sorted(m.peer for m in into)
            for m in into:
                here = rows[m.peer, r.program.rank]
                arrived[r.program.rank].append((m, np.array(here[: m.count])))
                assert len(here) >= m.count, "both ends have other sizes"
                del here[: m.count]
        assert not any(rows.values()), "both ends have other sizes"
    return arrived


EXCHANGE = {"p2p": _single, "all_to_all": _all_to_all}


def _gather(ranks: list[Machine]) -> Arrived:
    """Every rank's keys into every rank's buffer, in rank order, with whatever pads them."""
    rows = {r.program.gathered_rows for r in ranks}
    assert len(rows) == 1, "ranks gather other sizes"
    (count,) = rows
    for r in ranks:
        assert len(r.tokens) <= count
        assert not r.sends, "messages beside the collective"
        assert not r.recvs, "messages beside the collective"
        assert r.program.kv_buffer_rows == len(ranks) * count
        for other in ranks:
            at = len(r.tokens) + other.program.rank * count
            padded = np.concatenate([other.tokens, np.full(count - len(other.tokens), POISON)])
            r.buffers["kv"][at : at + count] = padded
    return {r.program.rank: [] for r in ranks}


def interpret(p: Plan, *, backward: bool, programs: list[Program] | None = None) -> list[Machine]:
    """Every rank after a pass; ranks meet at each step's WAIT."""
    programs = programs or [lower(p, rank, backward=backward) for rank in range(p.ranks)]
    ranks = [Machine(p, program) for program in programs]
    assert len({(r.program.exchange, r.program.collective) for r in ranks}) == 1
    exchange = ranks[0].program.exchange
    pending = [list(r.program.instructions)[::-1] for r in ranks]
    while any(pending):
        waiting = []
        step = min(rest[-1].step for rest in pending if rest)
        for r, rest in zip(ranks, pending, strict=True):
            while rest and rest[-1].step == step:
                instruction = rest.pop()
                r.run(instruction)
                if isinstance(instruction, Wait):
                    waiting.append(r)
                    break
        gathers = [r.gathers for r in waiting]
        assert not any(gathers) or (all(gathers) and len(waiting) == len(ranks))
        arrived = (
            _gather(waiting) if any(gathers) else EXCHANGE[exchange](waiting) if waiting else {}
        )
        for r in waiting:
            for m, rows in arrived[r.program.rank]:
                r.write(m, rows)
            r.sends, r.recvs, r.posted, r.gathers = [], [], False, False
    assert not any(r.sends or r.recvs for r in ranks), "messages that nobody waits for"
    return ranks


def assert_right(p: Plan) -> None:
    """Every query meets exactly its visible keys, once; every key's gradient comes home whole."""
    doc = p.docs.document_of(ids := np.arange(p.docs.total))
    ahead = ids - ids[:, None]
    visible = (doc[:, None] == doc[None, :]) & ((ahead <= 0) | (not p.docs.causal))
    visible &= abs(ahead) < (p.docs.window or p.docs.total + 1)
    for backward in (False, True):
        for r in interpret(p, backward=backward):
            own = len(r.tokens)
            assert np.array_equal(r.result[:own], visible[r.tokens]), (str(p), r.program.rank)
            if backward:
                assert np.array_equal(r.grad[:own], visible.T[r.tokens]), (str(p), r.program.rank)
