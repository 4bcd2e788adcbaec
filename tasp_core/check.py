"""Proofs over a plan, on sets and counts; no tensors.

`check(plan)` proves, or raises `PlanError` with the table and the bad step marked:

    holding    a rank sends only what it owns or what arrived in an earlier step
    coverage   every visible (query, key) pair is computed exactly once, no invisible one is
    links      no link or NIC carries more shares in a step than the schedule promises
    memory     no rank holds more travelling KV than the schedule promises
    gradients  every rank's part of every share's gradient is added up on the way and ends at its owner
"""

from __future__ import annotations

import numpy as np

from .errors import PlanError
from .plan import Plan
from .report import Report
from .schedules import DKV, KV, Hops
from .tiles import pair_table, take, working_order

MOST_STEPS = 1_000_000
NEVER = np.iinfo(np.int64).max // 2


class _Checker:
    """One pass over one plan; each method proves one property."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.n, self.shares = plan, plan.ranks, plan.schedule.num_shares
        self.hops = plan.hops()
        self.back = plan.hops(backward=True)
        self.arrival = np.full((self.n, self.n, self.shares), NEVER)
        ids = np.arange(self.n)
        self.arrival[ids, ids] = -1

    def fail(
        self, what: str, hops: Hops | None = None, row: int = 0, backward: bool = False
    ) -> None:
        mark, word = None, ""
        if hops is not None:
            mark, word = int(hops.step[row]), f" at {hops.where(np.array([row])).words()[0]}"
        table = self.plan.table(backward=backward, mark=mark)
        raise PlanError(f"{what}{word}\n{self.plan.summary()}\n{table}")

    def names(self) -> None:
        for hops, backward in ((self.hops, False), (self.back, True)):
            ranks_ok = [(c >= 0) & (c < self.n) for c in (hops.src, hops.dst, hops.owner)]
            good = np.logical_and.reduce(ranks_ok) & (hops.src != hops.dst)
            good &= (hops.share >= 0) & (hops.share < self.shares) & (hops.step < MOST_STEPS)
            bad = np.flatnonzero(~good)
            if bad.size:
                what = f"a hop names a rank outside 0..{self.n - 1}, a share outside 0..{self.shares - 1}"
                self.fail(
                    f"{what}, its own sender or a step beyond {MOST_STEPS}", hops, bad[0], backward
                )

    def holding(self) -> None:
        hops = self.hops
        key = np.ravel_multi_index((hops.dst, hops.owner, hops.share), self.arrival.shape)
        _, first = np.unique(key, return_index=True)
        again = np.setdiff1d(np.arange(len(key)), first)
        own = np.flatnonzero(hops.dst == hops.owner)
        for rows, what in ((own, "a rank is sent its own share"), (again, "a share arrives twice")):
            if rows.size:
                self.fail(what, hops, rows[0])
        self.arrival[hops.dst, hops.owner, hops.share] = hops.step
        early = np.flatnonzero(self.arrival[hops.src, hops.owner, hops.share] >= hops.step)
        if early.size:
            self.fail("a rank sends what it does not hold yet", hops, early[0])
        kv = self.back.where(self.back.kind == KV)
        if set(kv.words()) != set(hops.words()):
            self.fail("the backward table moves kv by other hops than the forward table", None)

    def coverage(self) -> np.ndarray:
        plan, units = self.plan, self.plan.units
        tokens = np.concatenate([plan.tokens(r) for r in range(self.n)])
        if (np.bincount(tokens, minlength=plan.docs.total) != 1).any():
            self.fail(f"layout {plan.layout.name!r} does not place every token exactly once")
        unit = np.repeat(np.arange(len(units.low)), np.diff(units.first))
        owner, share = unit // (units.parts * self.shares), unit % self.shares
        steps = int(self.hops.step.max()) + 2 if self.hops.step.size else 1
        work = np.zeros((self.n, steps), dtype=np.int64)
        for rank in range(self.n):
            queries = plan.layout.pieces(rank)
            mine = take(queries, working_order(queries))
            work[rank, 0] = pair_table(queries, mine, plan.docs).area.sum()
            arrived = self.arrival[rank, owner, share]
            other = np.flatnonzero(owner != rank)
            keys = other[working_order(take(units.pieces, other))]
            pairs = pair_table(queries, take(units.pieces, keys), plan.docs)
            step = arrived[keys[pairs.k]] + 1
            lost = np.flatnonzero((pairs.area > 0) & (step > NEVER))
            if lost.size:
                missing = keys[pairs.k[lost[0]]]
                self.fail(
                    f"rank {rank} needs share {share[missing]} of rank {owner[missing]}'s KV "
                    f"and never receives it: {int(pairs.area[lost].sum())} visible pairs are not computed"
                )
            seen = pairs.area > 0
            np.add.at(work[rank], step[seen], pairs.area[seen])
        if work.sum() != plan.docs.num_pairs:
            self.fail(f"{work.sum()} pairs are computed, {plan.docs.num_pairs} are visible")
        return work

    def loads(self) -> tuple[np.ndarray, np.ndarray]:
        """Shares a (step, src, dst) inside nodes, and a (step, rank) over NICs; raises over the promise."""
        hops, promise = self.hops, self.plan.schedule.promise
        steps = int(hops.step.max()) + 1 if hops.step.size else 0
        node = np.arange(self.n) // self.plan.machine.node_size
        load = np.zeros((steps, self.n, self.n), dtype=np.int64)
        np.add.at(load, (hops.step, hops.src, hops.dst), 1)
        same = node[:, None] == node[None, :]
        if self.plan.schedule.collective:  # a collective's traffic is the library's own choice
            return load, (load * ~same).sum(axis=2)
        cross = load * ~same
        nic_out, nic_in = cross.sum(axis=2), cross.sum(axis=1)
        nodes_match = self.plan.schedule.node_size == self.plan.machine.node_size
        limits = (
            (load * same, promise.inside, "link"),
            (nic_out, promise.across, "NIC out"),
            (nic_in, promise.across, "NIC in"),
        )
        for loads, limit, what in limits if nodes_match else ():
            over = np.argwhere(loads > limit)
            if over.size:
                at = tuple(over[0])
                where = ">".join(map(str, at[1:]))
                crossing = node[hops.src] != node[hops.dst]
                ends = {
                    "link": [hops.src, hops.dst], "NIC out": [hops.src], "NIC in": [hops.dst],
                }[what]  # fmt: skip
                fits = np.logical_and.reduce([e == r for e, r in zip(ends, at[1:], strict=True)])
                fits &= (hops.step == at[0]) & (crossing == (what != "link"))
                row = int(np.flatnonzero(fits)[-1])
                self.fail(
                    f"{what} {where} carries {loads[at]} shares in step {at[0]}, {limit} are promised;",
                    hops, row,
                )  # fmt: skip
        return load, nic_out

    def memory(self) -> float:
        hops = self.hops
        if not hops.step.size:
            return 0.0
        last = np.where(self.arrival < NEVER, self.arrival + 1, -1)
        relayed = hops.src != hops.owner
        at = (hops.src[relayed], hops.owner[relayed], hops.share[relayed])
        np.maximum.at(last, at, hops.step[relayed])
        change = np.zeros((self.n, int(last.max()) + 2), dtype=np.int64)
        rank, owner, share = np.nonzero((self.arrival >= 0) & (self.arrival < NEVER))
        size, most = self.plan.amounts(Hops(owner, rank, rank, owner, share, owner))
        np.add.at(change, (rank, self.arrival[rank, owner, share]), size)
        np.add.at(change, (rank, last[rank, owner, share] + 1), -size)
        live = np.cumsum(change, axis=1)
        peak = float(live.max() / most)
        promised = self.plan.schedule.promise.buffer
        if peak > promised + 1e-9:
            where, step = (int(x) for x in np.unravel_index(live.argmax(), live.shape))
            into = (hops.dst == where) & (hops.step <= step)
            row = int(np.flatnonzero(into)[-1])
            self.fail(
                f"rank {where} holds {peak:.3g} travelling KV in step {step}, {promised:.3g} are promised;",
                hops, row,
            )  # fmt: skip
        return peak

    def gradients(self) -> None:
        hops = self.back.where(self.back.kind == DKV)
        shape = self.arrival.shape
        key = np.ravel_multi_index((hops.src, hops.owner, hops.share), shape)
        _, first = np.unique(key, return_index=True)
        again = np.setdiff1d(np.arange(len(key)), first)
        if again.size:
            self.fail("a gradient leaves a rank twice", hops, again[0], True)
        home = np.flatnonzero(hops.src == hops.owner)
        if home.size:
            self.fail("an owner sends its own gradient away", hops, home[0], True)
        leaves = np.full(shape, NEVER)
        leaves[hops.src, hops.owner, hops.share] = hops.step
        computed = self.arrival + 1
        early = np.flatnonzero(computed[hops.src, hops.owner, hops.share] >= hops.step)
        if early.size:
            self.fail("a gradient leaves before it is computed", hops, early[0], True)
        # every receiver is the owner or passes it on later: steps increase, so all paths end at home
        stuck = np.flatnonzero(
            (hops.dst != hops.owner) & (leaves[hops.dst, hops.owner, hops.share] <= hops.step)
        )
        lost = np.flatnonzero(
            (hops.dst != hops.owner) & (leaves[hops.dst, hops.owner, hops.share] >= NEVER)
        )
        for rows, what in (
            (stuck, "arrives after its sum has left"),
            (lost, "stops before its owner"),
        ):
            if rows.size:
                self.fail(f"a gradient {what}", hops, rows[0], True)
        kept = np.argwhere((self.arrival >= 0) & (self.arrival < NEVER) & (leaves >= NEVER))
        if kept.size:
            rank, owner, share = kept[0]
            self.fail(f"rank {rank} never sends its part of dkv{owner}.{share} home", backward=True)


def check(plan: Plan) -> Report:
    """Prove a plan right, forward and backward, or say what is wrong; with `intra`, between groups.

    Raises:
        PlanError: the first property that fails, the hop at fault, and the table with its step marked.

    >>> from .plan import plan
    >>> report = check(plan([100], ranks=5, schedule="tasp"))
    >>> report.max_load, report.min_load, report.busy, report.peak_shards
    (1, 1, 1.0, 2.0)
    """
    plan = plan.inner
    checker = _Checker(plan)
    checker.names()
    checker.holding()
    work = checker.coverage()
    load, nic = checker.loads()
    peak = checker.memory()
    checker.gradients()
    hops = checker.hops
    node = np.arange(plan.ranks) // plan.machine.node_size
    inside = (node[:, None] == node[None, :]) & ~np.eye(plan.ranks, dtype=bool)
    links = load[:, inside] if inside.any() else nic
    total = load.sum(axis=0) if inside.any() else np.diag(nic.sum(axis=0))
    top = np.unravel_index(total.argmax(), total.shape)
    tokens = plan.tokens_moved(hops)
    return Report(
        max_load=int(links.max(initial=0)),
        min_load=int(links.min()) if links.size else 0,
        max_nic=int(nic.max(initial=0)),
        min_nic=int(nic.min()) if nic.size else 0,
        busy=float((links > 0).mean()) if links.size else 0.0,
        busiest=(int(top[0]), int(top[1]), int(total.max(initial=0))),
        pairs=int(work.sum()),
        peak_shards=peak,
        work=work,
        tokens_sent=np.bincount(hops.src, weights=tokens, minlength=plan.ranks).astype(np.int64)
        if hops.step.size
        else np.zeros(plan.ranks, dtype=np.int64),
        messages=int(np.count_nonzero(tokens)),
    )
