"""Proofs over a plan, on sets and counts; no tensors.

`check(plan)` proves, or raises `PlanError` with the table and the bad step marked:

    holding    a rank sends only what it owns or what arrived in an earlier step
    coverage   every visible (query, key) pair is computed exactly once, no invisible one is
    exchange   a collective moves what the plan says it moves
    links      no link or NIC of the machine carries more shares in a step than the schedule declares
               (a collective's links are the library's choice: the report says so)
    memory     no rank holds more travelling KV, or more remote queries, than the schedule declares
    gradients  every rank's part of every share's gradient is added up on the way and ends at its owner
    pairing    both ends of every link derive the same messages, in the same order, from their own tables
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError
from ..schedules import DKV, DQ, KINDS, KV, OUT, DeclaredLimits, Hops, Q
from ..schedules.counts import last_uses, live_table, load_table
from .messages import mispairing
from .plan import Plan
from .work import work_of

NEVER = np.iinfo(np.int64).max // 2  # the arrival of what does not arrive


@dataclass(frozen=True)
class Report:
    """What `check` found; loads count shares per link and step of the forward pass.

    Attributes:
        max_load, min_load: most and least shares that a link inside a node carries in a step (between
            nodes of one rank: a NIC).
        max_nic, min_nic: the same for shares that a rank sends over its NIC.
        busy: mean share of the links that carry something in a step.
        busiest: (src, dst, shares) of the link, or (rank, rank, shares) of the NIC, with the most in all.
        pairs: visible (query, key) pairs, each computed exactly once.
        peak_shards: most received KV that a rank holds, in multiples of one rank's KV.
        peak_remote_queries: most remote queries that a rank holds, in multiples of one rank's tokens.
        work: pairs computed, int64 [ranks, steps + 1].
        tokens_sent: tokens whose KV or queries each rank sends, int64 [ranks].
        messages: hops with tokens in them, whole forward pass.
        limits: the loads and buffers that the plan was held to.
        links_proved: whether loads were held to it; a collective's are the library's own choice.
    """

    max_load: int
    min_load: int
    max_nic: int
    min_nic: int
    busy: float
    busiest: tuple[int, int, int]
    pairs: int
    peak_shards: float
    peak_remote_queries: float
    work: np.ndarray
    tokens_sent: np.ndarray
    messages: int
    limits: DeclaredLimits
    links_proved: bool

    @property
    def balance(self) -> float:
        """Work of the busiest rank over the mean; 1.0 is perfect."""
        total = self.work.sum(axis=1)
        return float(total.max() / total.mean()) if total.any() else 1.0

    @property
    def step_balance(self) -> float:
        """The worst step's work max/mean over ranks."""
        mean = self.work.mean(axis=0)
        busy = mean > 0
        return float((self.work.max(axis=0)[busy] / mean[busy]).max(initial=1.0))

    def _links(self) -> str:
        if not self.links_proved:
            return "not proved: what links carry in a collective is the choice of its library"
        most = f" ({self.limits.inside} declared)" * (self.limits.inside > self.max_load)
        nics = f", {self.min_nic}..{self.max_nic} per NIC" if self.max_nic else ""
        nics += f" ({self.limits.across} declared)" * (self.limits.across > self.max_nic > 0)
        return (
            f"proved: {self.min_load}..{self.max_load} shares per link and step{most}{nics}, "
            f"{self.busy:.1%} of the links busy per step"
        )

    def __str__(self) -> str:
        return "\n".join(
            (
                f"holding    proved: every hop sends what its rank holds ({self.messages} messages)",
                f"coverage   proved: {self.pairs} visible pairs, each computed once, no other pair",
                f"links      {self._links()}",
                f"memory     proved: at most {self.peak_shards:.3g} travelling KV per rank"
                + f", {self.peak_remote_queries:.3g} shards of remote queries"
                * (self.peak_remote_queries > 0),
                "gradients  proved: every contribution reaches its owner exactly once",
                f"work       max/mean {self.balance:.4f} over ranks, "
                f"{self.step_balance:.4f} in the worst step",
            )
        )


MOST_STEPS = 1_000_000


class _Checker:
    """One pass over one plan; each method proves one property."""

    def __init__(self, plan: Plan) -> None:
        self.full_plan, self.plan = plan, plan.context_plan
        self.n, self.shares = plan.context_plan.ranks, plan.schedule.num_shares
        self.all = plan.hops()
        self.hops = self.all.where(self.all.kind == KV)
        self.remote_queries = self.all.where(self.all.kind == Q)
        self.partial_outputs = self.all.where(self.all.kind == OUT)
        self.back = plan.hops(backward=True)
        self.offloaded = plan.schedule.offloaded
        shape = (self.n, self.n, self.shares)
        # by (rank, owner, share): the step in which KV arrives, and in which queries do; every rank has
        # its own from the beginning (-1). Without remote queries one array serves as both.
        self.arrival = np.full(shape, NEVER)
        ids = np.arange(self.n)
        self.arrival[ids, ids] = -1
        self.visit = self.arrival.copy() if len(self.remote_queries.step) else self.arrival

    def fail(
        self, what: str, hops: Hops | None = None, row: int = 0, backward: bool = False
    ) -> None:
        mark, hop = None, ""
        if hops is not None:
            mark, hop = int(hops.step[row]), f" at {hops.where(np.array([row])).lines()[0]}"
        table = self.full_plan.table(backward=backward, mark=mark)
        raise PlanError(f"{what}{hop}\n{self.full_plan.summary()}\n{table}")

    @property
    def who(self) -> str:
        """What the numbers of hops and tables count."""
        return "rank" if self.full_plan.intra == 1 else "group"

    @property
    def between(self) -> str:
        return "" if self.full_plan.intra == 1 else " between groups"

    def name(self, number: int) -> str:
        """A rank; of groups of ranks, the group and its ranks."""
        return self.full_plan.name_of(int(number))

    def exchange(self) -> None:
        """A plan with a collective lists exactly the hops that the collective makes."""
        collective = self.plan.schedule.collective
        if collective is None:
            return
        if collective != "all_gather":
            self.fail(f"the executor knows no collective {collective!r}, only 'all_gather'")
        other = np.flatnonzero((self.all.step == 0) & (self.all.kind != KV))
        if other.size:
            self.fail("an all-gather moves KV only", self.all, other[0])
        kv = self.hops
        odd = np.flatnonzero((kv.step != 0) | (kv.src != kv.owner))
        if odd.size:
            self.fail("an all-gather moves everything at step 0, from its owner", kv, odd[0])
        moved = np.zeros((self.n, self.n, self.shares), dtype=bool)
        moved[kv.dst, kv.owner, kv.share] = True
        lacking = np.argwhere(~moved & ~np.eye(self.n, dtype=bool)[:, :, None])
        if lacking.size:
            rank, owner, share = lacking[0]
            self.fail(
                f"an all-gather moves everything to everybody; {self.name(rank)} is not to receive "
                f"kv{owner}.{share}"
            )

    def names(self) -> None:
        for hops, backward in ((self.all, False), (self.back, True)):
            ranks_ok = [(c >= 0) & (c < self.n) for c in (hops.src, hops.dst, hops.owner)]
            good = np.logical_and.reduce(ranks_ok) & (hops.src != hops.dst)
            good &= (hops.share >= 0) & (hops.share < self.shares)
            good &= (hops.step >= 0) & (hops.step < MOST_STEPS)
            bad = np.flatnonzero(~good)
            if bad.size:
                what = f"a hop names a {self.who} outside 0..{self.n - 1}"
                what += f", a share outside 0..{self.shares - 1}"
                self.fail(
                    f"{what}, its own sender or a step outside 0..{MOST_STEPS - 1}",
                    hops,
                    bad[0],
                    backward,
                )

    def holding(self) -> None:
        self._check_holding(self.hops, self.arrival)
        if len(self.remote_queries.step):
            self._check_holding(self.remote_queries, self.visit)
        kv = self.back.where(np.isin(self.back.kind, (KV, Q)))
        moved = np.concatenate([self._numbers(self.hops), self._numbers(self.remote_queries)])
        if not np.array_equal(np.unique(self._numbers(kv)), np.unique(moved)):
            self.fail("the backward table moves kv or q by other hops than the forward table", None)

    def _numbers(self, hops: Hops) -> np.ndarray:
        """One number for each hop, equal where hops are."""
        shape = (MOST_STEPS, self.n, self.n, self.n, self.shares, len(KINDS))
        return np.ravel_multi_index(tuple(hops), shape)

    def _check_holding(self, hops: Hops, arrival: np.ndarray) -> None:
        """Prove that ranks send only what they hold, and that no share arrives twice or at its owner.

        Args:
            hops: of one kind, KV or Q.
            arrival: [rank, owner, share], the step in which the share arrives at the rank: -1 at its
                owner, NEVER elsewhere; written here from `hops`.
        """
        key = np.ravel_multi_index((hops.dst, hops.owner, hops.share), arrival.shape)
        _, first = np.unique(key, return_index=True)
        again = np.setdiff1d(np.arange(len(key)), first)
        own = np.flatnonzero(hops.dst == hops.owner)
        for rows, what in (
            (own, f"a {self.who} is sent its own share"),
            (again, "a share arrives twice"),
        ):
            if rows.size:
                self.fail(what, hops, rows[0])
        arrival[hops.dst, hops.owner, hops.share] = hops.step
        early = np.flatnonzero(arrival[hops.src, hops.owner, hops.share] >= hops.step)
        if early.size:
            self.fail(f"a {self.who} sends what it does not hold yet", hops, early[0])

    def offloading(self) -> None:
        """Offloaded pairs: computed once, with what the rank holds, and sent to the owner afterwards."""
        m = self.offloaded
        keys = self.arrival[m.rank, m.owner, m.share]
        visit = self.visit[m.rank, m.q_owner, m.q_share]
        wrong = np.flatnonzero((m.rank == m.q_owner) | (np.maximum(keys, visit) >= m.step))
        if wrong.size:
            i = wrong[0]
            self.fail(
                f"at step {m.step[i]} {self.name(m.rank[i])} is to compute "
                f"q{m.q_owner[i]}.{m.q_share[i]} with kv{m.owner[i]}.{m.share[i]} and does not hold "
                "both, or is their home"
            )
        pairs = np.stack([m.q_owner, m.q_share, m.owner, m.share])
        if np.unique(pairs, axis=1).shape[1] < len(m.step):
            self.fail("a pair of shares is offloaded twice")
        last = np.zeros(self.arrival.shape, dtype=np.int64)
        np.maximum.at(last, (m.rank, m.q_owner, m.q_share), m.step)
        for kind, hops in (
            (OUT, self.partial_outputs),
            (DQ, self.back.where(self.back.kind == DQ)),
        ):
            at = (hops.src, hops.owner, hops.share)
            sent = np.zeros_like(last)
            np.add.at(sent, at, 1)
            early = np.flatnonzero((last[at] >= hops.step) | (hops.dst != hops.owner))
            if early.size:
                self.fail(
                    "a partial output must go directly to the owner of its queries after its last "
                    "contribution is computed; this is not so",
                    hops,
                    early[0],
                    kind == DQ,
                )
            lost = np.argwhere(sent != (last > 0))
            if lost.size:
                rank, owner, share = lost[0]
                self.fail(
                    f"{self.name(rank)} must send its partial output of q{owner}.{share} home "
                    f"once if it computes one, else never; it sends it {sent[rank, owner, share]} times",
                    backward=kind == DQ,
                )

    def coverage(self) -> np.ndarray:
        """Pairs computed, int64 [ranks, steps + 1]."""
        plan = self.plan
        tokens = np.concatenate([plan.tokens(r) for r in range(self.n)])
        if (np.bincount(tokens, minlength=plan.docs.total) != 1).any():
            self.fail(f"layout {plan.layout.name!r} does not place every token exactly once")
        work = work_of(plan, self.all)
        if missing := work.missing:
            self.fail(
                f"{self.name(missing.rank)} needs share {missing.share} of {self.name(missing.owner)}'s "
                f"KV and never receives it: {missing.pairs} visible pairs are not computed"
            )
        computed, visible = int(work.pairs.sum()), plan.docs.num_pairs
        if computed != visible:
            self.fail(f"{computed} pairs are computed, {visible} are visible")
        return work.pairs

    def loads(self) -> tuple[np.ndarray, np.ndarray]:
        """Shares a (step, src, dst) inside nodes, and a (step, rank) over NICs; raises over the limits.

        Steps in which nothing moves are left out.
        """
        hops, limits = self.all, self.plan.schedule.limits
        steps, number = np.unique(hops.step, return_inverse=True)
        node = np.arange(self.n) // self.plan.machine.node_size
        load = load_table((len(steps), self.n, self.n), number, hops.src, hops.dst)
        same = node[:, None] == node[None, :]
        if self.plan.schedule.collective:  # its traffic is the library's choice: the report says so
            return load, (load * ~same).sum(axis=2)
        cross = load * ~same
        nic_out, nic_in = cross.sum(axis=2), cross.sum(axis=1)
        bounds = (
            (load * same, limits.inside, "link"),
            (nic_out, limits.across, "NIC out"),
            (nic_in, limits.across, "NIC in"),
        )
        for loads, limit, what in bounds:
            over = np.argwhere(loads > limit)
            if over.size:
                at = tuple(over[0])
                where = ">".join(map(str, at[1:]))
                crossing = node[hops.src] != node[hops.dst]
                ends = {
                    "link": [hops.src, hops.dst],
                    "NIC out": [hops.src],
                    "NIC in": [hops.dst],
                }[what]
                fits = np.logical_and.reduce([e == r for e, r in zip(ends, at[1:], strict=True)])
                fits &= (number == at[0]) & (crossing == (what != "link"))
                row = int(np.flatnonzero(fits)[-1])
                self.fail(
                    f"{what} {where}{self.between} carries {loads[at]} shares in step {steps[at[0]]}, "
                    f"{limit} are declared;",
                    hops,
                    row,
                )
        return load, nic_out

    def memory(self) -> tuple[float, float]:
        """Most received KV and most remote queries that a rank holds; raises over the limits."""
        limits, m = self.plan.schedule.limits, self.offloaded
        kv = self._peak(
            self.hops,
            self.arrival,
            [(m.rank, m.owner, m.share, m.step)],
            limits.buffer,
            "travelling KV",
        )
        # a remote query is needed until its last pair is computed and its partial output is sent
        out, computed = self.partial_outputs, (m.rank, m.q_owner, m.q_share, m.step)
        uses = [computed, (out.src, out.owner, out.share, out.step)]
        remote_queries = self._peak(
            self.remote_queries,
            self.visit,
            uses,
            limits.remote_queries,
            "shards of remote queries",
        )
        return kv, remote_queries

    def _peak(
        self,
        hops: Hops,
        arrival: np.ndarray,
        uses: Sequence[tuple[np.ndarray, ...]],
        declared: float,
        what: str,
    ) -> float:
        """The most of what came by these hops that a rank holds at once, in multiples of one rank's own.

        Args:
            arrival: [rank, owner, share], the step in which the share arrives; see `_check_holding`.
            uses: (rank, owner, share, step) of what else needs a share than the step after its arrival.
            declared: the limit.
        """
        if not hops.step.size:
            return 0.0
        relayed = hops.where(hops.src != hops.owner)
        sent_on = (relayed.src, relayed.owner, relayed.share, relayed.step)
        last = last_uses(np.where(arrival < NEVER, arrival + 1, -1), *uses, sent_on)
        rank, owner, share = at = np.nonzero((arrival >= 0) & (arrival < NEVER))
        size, most = self.plan.amounts(Hops(owner, rank, rank, owner, share, owner))
        live = live_table(self.n, rank, arrival[at], last[at], size)
        peak = float(live.max() / most)
        if peak > declared + 1e-9:
            where, step = (int(x) for x in np.unravel_index(live.argmax(), live.shape))
            row = int(np.flatnonzero((hops.dst == where) & (hops.step <= step))[-1])
            self.fail(
                f"{self.name(where)} holds {peak:.3g} {what} in step {step}, {declared:.3g} are declared;",
                hops,
                row,
            )
        return peak

    def gradients(self) -> None:
        hops = self.back.where(self.back.kind == DKV)
        shape = self.arrival.shape
        key = np.ravel_multi_index((hops.src, hops.owner, hops.share), shape)
        _, first = np.unique(key, return_index=True)
        again = np.setdiff1d(np.arange(len(key)), first)
        if again.size:
            self.fail(f"a gradient leaves a {self.who} twice", hops, again[0], True)
        home = np.flatnonzero(hops.src == hops.owner)
        if home.size:
            self.fail("an owner sends its own gradient away", hops, home[0], True)
        leaves = np.full(shape, NEVER)
        leaves[hops.src, hops.owner, hops.share] = hops.step
        computed, m = self.arrival + 1, self.offloaded
        np.maximum.at(computed, (m.rank, m.owner, m.share), m.step)
        early = np.flatnonzero(computed[hops.src, hops.owner, hops.share] >= hops.step)
        if early.size:
            self.fail("a gradient leaves before it is computed", hops, early[0], True)
        # a receiver's own part is what its sum begins with: what arrives before that would be lost
        before = np.flatnonzero(
            (hops.dst != hops.owner) & (self.arrival[hops.dst, hops.owner, hops.share] >= hops.step)
        )
        if before.size:
            what = f"a gradient arrives at a {self.who} that has not computed its own part yet"
            self.fail(what, hops, before[0], True)
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
            self.fail(
                f"{self.name(rank)} never sends its part of dkv{owner}.{share} home", backward=True
            )

    def pairing(self) -> None:
        for hops, backward in ((self.all, False), (self.back, True)):
            steps = self.plan.schedule.num_steps(backward=backward)
            beyond = np.flatnonzero(hops.step >= steps)
            if beyond.size and self.plan.schedule.exchange == "all_to_all":
                what = f"every rank takes part in {steps} all-to-alls, which end before the hop"
                self.fail(what, hops, beyond[0], backward)
            if fault := mispairing(self.plan, hops, backward=backward):
                table = self.plan.table(backward=backward, mark=fault.step)
                raise PlanError(f"{fault}\n{self.plan.summary()}\n{table}")


def check(plan: Plan) -> Report:
    """Prove a plan right, forward and backward, or say what is wrong.

    With `intra` above 1 the proof, and what hops and tables name, is between groups of ranks.

    Raises:
        PlanError: the first property that fails, the hop at fault, and the table with its step marked.

    >>> from tasp_core import plan
    >>> report = check(plan([100], ranks=5, schedule="tasp"))
    >>> report.max_load, report.min_load, report.busy, report.peak_shards
    (1, 1, 1.0, 2.0)
    """
    checker = _Checker(plan)
    plan = plan.context_plan
    checker.names()
    checker.exchange()
    checker.holding()
    checker.offloading()
    work = checker.coverage()
    load, nic = checker.loads()
    peak, remote_queries = checker.memory()
    checker.gradients()
    checker.pairing()
    hops = checker.all
    node = np.arange(plan.ranks) // plan.machine.node_size
    inside = (node[:, None] == node[None, :]) & ~np.eye(plan.ranks, dtype=bool)
    links = load[:, inside] if inside.any() else nic
    steps = int(hops.step.max()) + 1 if hops.step.size else 0
    idle = steps > len(load)  # some steps move nothing
    total = load.sum(axis=0) if inside.any() else np.diag(nic.sum(axis=0))
    top = np.unravel_index(total.argmax(), total.shape)
    tokens = plan.tokens_moved(hops)
    return Report(
        max_load=int(links.max(initial=0)),
        min_load=int(links.min()) if links.size and not idle else 0,
        max_nic=int(nic.max(initial=0)),
        min_nic=int(nic.min()) if nic.size and not idle else 0,
        busy=float((links > 0).mean(axis=1).sum() / steps) if links.size else 0.0,
        busiest=(int(top[0]), int(top[1]), int(total.max(initial=0))),
        pairs=int(work.sum()),
        peak_shards=peak,
        peak_remote_queries=remote_queries,
        work=work,
        tokens_sent=np.bincount(hops.src, weights=tokens, minlength=plan.ranks).astype(np.int64)
        if hops.step.size
        else np.zeros(plan.ranks, dtype=np.int64),
        messages=int(np.count_nonzero(tokens)),
        limits=plan.schedule.limits,
        links_proved=plan.schedule.collective is None,
    )
