"""Which visible (query, key) pairs each rank computes, and in which step: the check's count of work."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .guests import Away, in_units
from .plan import Plan
from .tiles import pair_table, take, working_order

NEVER = np.iinfo(np.int64).max // 2


class Lost(NamedTuple):
    """Pairs nobody computes: `rank` never receives this share."""

    rank: int
    owner: int
    share: int
    pairs: int


def count_pairs(plan: Plan, arrival: np.ndarray) -> tuple[np.ndarray, Lost | None]:
    """Pairs computed, int64 [ranks, steps + 1], or the first that are not.

    Args:
        arrival: the step in which (rank, owner, share) arrives; -1 its own, NEVER if it does not.
    """
    meets = plan.schedule.meets
    hops = plan.hops()
    steps = max(int(hops.step.max(initial=-1)) + 2, int(meets.step.max(initial=0)) + 1)
    work = np.zeros((plan.ranks, steps), dtype=np.int64)
    counter = _Counter(plan, arrival)
    away = in_units(plan, meets)
    given = counter.pair(away.q_unit, away.k_unit)
    for rank in range(plan.ranks):
        lost = counter.at_home(rank, work[rank], given)
        if lost:
            return work, lost
    if len(given):
        counter.away(away, given, work)
    return work, None


class _Counter:
    def __init__(self, plan: Plan, arrival: np.ndarray) -> None:
        units, shares = plan.units, plan.schedule.num_shares
        self.plan, self.arrival, self.pieces = plan, arrival, units.pieces
        self.unit = np.repeat(np.arange(len(units.low)), np.diff(units.first))
        self.owner, self.share = self.unit // (units.parts * shares), self.unit % shares

    def pair(self, q_unit: np.ndarray, k_unit: np.ndarray) -> np.ndarray:
        """One number for a pair of units."""
        return q_unit * len(self.plan.units.low) + k_unit

    def at_home(self, rank: int, work: np.ndarray, given: np.ndarray) -> Lost | None:
        """Count pairs of the rank's own queries, but for those given away."""
        plan, docs = self.plan, self.plan.docs
        turn = plan.schedule.own_steps(rank)
        cut = len(given) > 0 or turn.any()
        if cut:
            mine = np.flatnonzero(self.owner == rank)
            queries, keys = take(self.pieces, mine), np.arange(len(self.unit))
        else:  # whole runs of own tokens: fewer pairs
            queries = plan.layout.pieces(rank)
            own = take(queries, working_order(queries))
            work[0] += pair_table(queries, own, docs).area.sum()
            keys = np.flatnonzero(self.owner != rank)
        keys = keys[working_order(take(self.pieces, keys))]
        pairs = pair_table(queries, take(self.pieces, keys), docs)
        k, seen = keys[pairs.k], pairs.area > 0
        if len(given):
            seen &= ~np.isin(self.pair(self.unit[mine[pairs.q]], self.unit[k]), given)
        step = self.arrival[rank, self.owner, self.share][k] + 1
        if cut:
            home = self.owner[k] == rank
            step[home] = turn[self.share[mine[pairs.q[home]]]]
        lost = np.flatnonzero(seen & (step > NEVER))
        if lost.size:
            first = k[lost[0]]
            owner, share = int(self.owner[first]), int(self.share[first])
            return Lost(rank, owner, share, int(pairs.area[lost].sum()))
        np.add.at(work, step[seen], pairs.area[seen])
        return None

    def away(self, away: Away, given: np.ndarray, work: np.ndarray) -> None:
        """Count pairs computed for other ranks."""
        queries = np.flatnonzero(np.isin(self.unit, away.q_unit))
        keys = np.flatnonzero(np.isin(self.unit, away.k_unit))
        keys = keys[working_order(take(self.pieces, keys))]
        sides = take(self.pieces, queries), take(self.pieces, keys)
        pairs = pair_table(*sides, self.plan.docs)
        found = self.pair(self.unit[queries[pairs.q]], self.unit[keys[pairs.k]])
        order = np.argsort(given)
        at = order[np.minimum(np.searchsorted(given[order], found), len(given) - 1)]
        some = given[at] == found
        np.add.at(work, (away.rank[at[some]], away.step[at[some]]), pairs.area[some])
