"""An interpreter of programs on integers: a key is its token id, a query's result counts how often it
met each key, a key's gradient how often each query met it. Rows in flight hold POISON."""

from __future__ import annotations

import numpy as np

from tasp_core import Plan, lower
from tasp_core.program import Call, Compute, Message, Program, Step

POISON = -(10**9)


class Machine:
    """One rank: token ids for keys and queries, counts [rows, tokens] for results and gradients."""

    def __init__(self, p: Plan, program: Program) -> None:
        self.program, self.tokens, total = program, p.tokens(program.rank), p.docs.total
        own = len(self.tokens)

        def room(rows: int, *shape: int) -> np.ndarray:
            return np.full((rows, *shape), POISON)

        ids = [
            np.concatenate([self.tokens, room(n)]) for n in (program.arena_rows, program.guest_rows)
        ]
        self.result = room(own + program.guest_rows, total)
        self.buffers = {
            "kv": ids[0],
            "q": ids[1],
            "grad": room(own + program.acc_rows, total),
            "landing": room(program.landing_rows, total),
            "found": self.result[own:],
            "answers": room(program.answer_rows, total),
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
        last = len(call.sequences.q_lo) - call.mirrored
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
            (self.grad, "landing", step.add), (self.result, "answers", step.merge),
        ):  # fmt: skip
            for s, d, n in zip(*(c.tolist() for c in runs), strict=True):
                target[d : d + n] += self.buffers[source][s : s + n]


def add(target: np.ndarray, source: np.ndarray, runs) -> None:
    """target[dst] += source[src] for the runs of one round, which must not overlap."""
    written = np.zeros(len(target), dtype=bool)
    for s, d, n in zip(*(c.tolist() for c in runs), strict=True):
        assert not written[d : d + n].any()
        written[d : d + n] = True
        target[d : d + n] += source[s : s + n]


def interpret(p: Plan, *, backward: bool) -> list[Machine]:
    """Every rank after a pass."""
    ranks = [Machine(p, lower(p, rank, backward=backward)) for rank in range(p.ranks)]
    for t in range(max(len(r.program.steps) for r in ranks)):
        live = [(r, r.program.steps[t]) for r in ranks if t < len(r.program.steps)]
        mail = {}
        for r, step in live:
            if r.program.collective and t == 0:
                for other in ranks:
                    at = len(r.tokens) + other.program.rank * r.program.gathered_rows
                    r.buffers["kv"][at : at + len(other.tokens)] = other.tokens
            r.begin(step)
            for m in step.recvs:
                r.write(m, POISON)  # from now until the wait, these rows hold anything
            early = [r.read(m) for m in step.sends]
            if step.compute:
                r.compute(step.compute, backward)
            for m, rows in zip(step.sends, early, strict=True):  # may leave at once or at the wait
                assert np.array_equal(rows, r.read(m)), "a send's rows change under it"
                assert (rows >= 0).all(), "rows in flight, or never filled, are sent"
                mail[r.program.rank, m.peer, m.tag, m.kind] = rows
        for r, step in live:
            for m in step.recvs:
                r.write(m, mail.pop((m.peer, r.program.rank, m.tag, m.kind)))
            r.finish(step)
        assert not mail
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
