"""An interpreter of programs on integers: a key is its token id, a query's result counts how often it
met each key, a key's gradient how often each query met it. Rows in flight hold POISON.

Messages move as the program's exchange moves them: p2p by sender, receiver, tag and kind; all_to_all by
rows that every rank takes part in for each kind and step; an all-gather by rank, padded to equal rows."""

from __future__ import annotations

import numpy as np

from tasp_core import Plan, lower
from tasp_core.lowering.program import Call, Compute, Message, Program, Step

POISON = -(10**9)
Arrived = dict[int, list[tuple[Message, np.ndarray]]]  # by rank: what each of its receives gets


class Machine:
    """One rank: token ids for keys and queries, counts [rows, tokens] for results and gradients."""

    def __init__(self, p: Plan, program: Program) -> None:
        self.program, self.tokens, total = program, p.tokens(program.rank), p.docs.total
        own = len(self.tokens)

        def room(rows: int, *shape: int) -> np.ndarray:
            return np.full((rows, *shape), POISON)

        ids = [
            np.concatenate([self.tokens, room(n)])
            for n in (program.kv_buffer_rows, program.remote_query_rows)
        ]
        self.result = room(own + program.remote_query_rows, total)
        self.buffers = {
            "kv": ids[0],
            "q": ids[1],
            "grad": room(own + program.remote_grad_rows, total),
            "landing": room(program.grad_receive_rows, total),
            "found": self.result[own:],
            "answers": room(program.received_partial_rows, total),
        }
        self.grad = self.buffers["grad"]
        self.result[:own], self.grad[:own] = 0, 0

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

    def begin(self, step: Step) -> None:
        for runs, target in ((step.fresh, self.result), (step.clear, self.grad)):
            for low, count in zip(runs.dst.tolist(), runs.count.tolist(), strict=True):
                target[low : low + count] = 0

    def meet(self, call: Call, keys: np.ndarray) -> np.ndarray:
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

    def compute(self, compute: Compute, backward: bool) -> None:
        keys = self.buffers["kv"][compute.low : compute.low + compute.count]
        assert len(keys) == compute.count
        keys = keys if compute.gather is None else keys[compute.gather]
        worked = np.zeros((len(keys), self.grad.shape[1]), dtype=int)
        for call in compute.calls:
            grads = self.meet(call, keys)
            for runs in call.k_runs:
                add(worked, grads, runs)
        for runs in compute.grads if backward else ():
            add(self.grad, worked, runs)

    def finish(self, step: Step) -> None:
        for target, source, runs in (
            (self.grad, "landing", step.add),
            (self.result, "answers", step.merge),
        ):
            for s, d, n in zip(*(c.tolist() for c in runs), strict=True):
                target[d : d + n] += self.buffers[source][s : s + n]


def add(target: np.ndarray, source: np.ndarray, runs) -> None:
    """target[dst] += source[src] for the runs of one round, which must not overlap."""
    written = np.zeros(len(target), dtype=bool)
    for s, d, n in zip(*(c.tolist() for c in runs), strict=True):
        assert not written[d : d + n].any()
        written[d : d + n] = True
        target[d : d + n] += source[s : s + n]


def _single(live: list[tuple[Machine, Step]], sent: dict[int, list[np.ndarray]]) -> Arrived:
    """Messages by sender, receiver, tag and kind; none is left over."""
    mail = {}
    for r, step in live:
        for m, rows in zip(step.sends, sent[r.program.rank], strict=True):
            key = r.program.rank, m.peer, m.tag, m.kind
            assert key not in mail, "two messages that nothing tells apart"
            mail[key] = rows
    found: Arrived = {}
    for r, step in live:
        own = r.program.rank
        found[own] = [(m, mail.pop((m.peer, own, m.tag, m.kind))) for m in step.recvs]
    assert not mail, "a message that nobody receives"
    return found


def _all_to_all(live: list[tuple[Machine, Step]], sent: dict[int, list[np.ndarray]]) -> Arrived:
    """For each kind one collective: rows by rank, in the order of each side's messages."""
    count, kinds = live[0][0].program.ranks, live[0][0].program.kinds
    assert len(live) == count, "a rank takes no part in a collective"
    found: Arrived = {r.program.rank: [] for r, _ in live}
    for r, step in live:
        assert r.program.kinds == kinds, "ranks call other collectives"
        assert {m.kind for m in (*step.sends, *step.recvs)} <= set(kinds), (
            "a kind that stays behind"
        )
    for kind in kinds:
        rows: dict[tuple[int, int], list[int]] = {}
        for r, step in live:
            of_kind = [
                (m, x)
                for m, x in zip(step.sends, sent[r.program.rank], strict=True)
                if m.kind == kind
            ]
            peers = [m.peer for m, _ in of_kind]
            assert peers == sorted(peers), "what is sent lies in the order of ranks"
            for m, x in of_kind:
                rows.setdefault((r.program.rank, m.peer), []).extend(x)
        for r, step in live:
            into = [m for m in step.recvs if m.kind == kind]
            assert [m.peer for m in into] == sorted(m.peer for m in into)
            for m in into:
                here = rows[m.peer, r.program.rank]
                found[r.program.rank].append((m, np.array(here[: m.count])))
                assert len(here) >= m.count, "both ends have other sizes"
                del here[: m.count]
        assert not any(rows.values()), "both ends have other sizes"
    return found


EXCHANGE = {"p2p": _single, "all_to_all": _all_to_all}


def _gather(ranks: list[Machine]) -> None:
    """Every rank's keys into every rank's buffer, in rank order, with whatever pads them."""
    rows = {r.program.gathered_rows for r in ranks}
    assert len(rows) == 1, "ranks gather other sizes"
    (count,) = rows
    for r in ranks:
        assert len(r.tokens) <= count
        assert r.program.kv_buffer_rows == len(ranks) * count
        for other in ranks:
            at = len(r.tokens) + other.program.rank * count
            padded = np.concatenate([other.tokens, np.full(count - len(other.tokens), POISON)])
            r.buffers["kv"][at : at + count] = padded


def interpret(p: Plan, *, backward: bool) -> list[Machine]:
    """Every rank after a pass."""
    ranks = [Machine(p, lower(p, rank, backward=backward)) for rank in range(p.ranks)]
    assert len({(r.program.exchange, r.program.collective) for r in ranks}) == 1
    exchange, collective = ranks[0].program.exchange, ranks[0].program.collective
    assert collective in (None, "all_gather")
    for t in range(max(len(r.program.steps) for r in ranks)):
        live = [(r, r.program.steps[t]) for r in ranks if t < len(r.program.steps)]
        gathers = collective is not None and t == 0
        assert not gathers or len(live) == len(ranks)
        sent = {}
        for r, step in live:
            assert not gathers or not (step.sends or step.recvs), "messages beside the collective"
            r.begin(step)
            for m in step.recvs:
                r.write(m, POISON)  # from now until the wait, these rows hold anything
            early = [r.read(m) for m in step.sends]
            if step.compute:
                r.compute(step.compute, backward)
            for m, rows in zip(step.sends, early, strict=True):  # may leave at once or at the wait
                assert np.array_equal(rows, r.read(m)), "a send's rows change under it"
                assert (rows >= 0).all(), "rows in flight, or never filled, are sent"
            sent[r.program.rank] = early
        if gathers:
            _gather(ranks)
        arrived = EXCHANGE[exchange](live, sent)
        for r, step in live:
            for m, rows in arrived[r.program.rank]:
                r.write(m, rows)
            r.finish(step)
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
