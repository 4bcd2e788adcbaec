"""Which visible (query, key) pairs each rank computes, in which step, and what it needs from whom.

Compute step t takes the shares that arrived in communication step t - 1; own keys are step 0, or later.

    offloaded_subchunks      pairs of subchunks computed away from their queries' home, for lowering
    work_of      pairs, rows, kernel calls and needed shares by rank and step, for predictions
    count_pairs  pairs by rank and step, and the first that nobody computes, for the proof
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..errors import PlanError
from ..schedules import KV, Hops, OffloadedPairs
from ..sequence.tiles import pair_table, take, working_order
from .plan import Plan


class Away(NamedTuple):
    """Pairs of subchunks computed away from their queries' home, int64."""

    step: np.ndarray
    rank: np.ndarray  # where
    q_subchunk: np.ndarray
    k_subchunk: np.ndarray

    def at(self, mask: np.ndarray) -> Away:
        return Away(*(column[mask] for column in self))


def in_subchunks(plan: Plan, meets: OffloadedPairs) -> Away:
    """OffloadedPairs of shares as pairs of subchunks, those without tokens dropped."""
    parts, shares = plan.subchunks.parts, plan.schedule.num_shares
    part = np.arange(parts)
    q = (meets.q_owner[:, None] * parts + part) * shares + meets.q_share[:, None]
    k = (meets.owner[:, None] * parts + part) * shares + meets.share[:, None]
    when, where = meets.step[:, None, None], meets.rank[:, None, None]
    pairs = Away(*map(np.ravel, np.broadcast_arrays(when, where, q[:, :, None], k[:, None])))
    count = plan.subchunks.count
    return pairs.at((count[pairs.q_subchunk] > 0) & (count[pairs.k_subchunk] > 0))


def offloaded_subchunks(plan: Plan, rank: int) -> tuple[Away, Away]:
    """What the rank computes for others, by step; what others compute of its queries."""
    meets = plan.schedule.offloaded
    remote_queries = in_subchunks(plan, meets.where(meets.rank == rank))
    return remote_queries, in_subchunks(plan, meets.where(meets.q_owner == rank))


def alike(
    q_subchunk: np.ndarray, k_subchunk: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Query subchunks that are paired with the same set of key subchunks, and that set.

    >>> [(q.tolist(), k.tolist()) for q, k in alike(np.array([1, 1, 2, 3, 3]), np.array([7, 8, 7, 8, 7]))]
    [([1, 3], [7, 8]), ([2], [7])]
    """
    order = np.lexsort((k_subchunk, q_subchunk))
    q, first = np.unique(q_subchunk[order], return_index=True)
    sets: dict[bytes, list[int]] = {}
    for i, keys in enumerate(np.split(k_subchunk[order], first[1:])):
        sets.setdefault(keys.tobytes(), []).append(i)
    for same, which in sets.items() if len(q) else ():
        yield q[which], np.frombuffer(same, dtype=np.int64)


class Work(NamedTuple):
    """By rank and step, int64 [ranks, steps].

    Attributes:
        pairs: visible (query, key) pairs of one head.
        rows: query rows that see any of the step's keys.
        calls: kernel calls: one FULL, one CAUSAL (where queries are cut, at most one more or less).
        needed: bool [ranks, ranks, shares], by (rank, owner, share): whether its queries see any of it.
    """

    pairs: np.ndarray
    rows: np.ndarray
    calls: np.ndarray
    needed: np.ndarray


def work_of(plan: Plan, hops: Hops, ranks: range, steps: int) -> Work:
    """Work of some ranks, by `steps` compute steps, from hops that have all their arrivals.

    Where queries move, `ranks` must be all ranks.

    Raises:
        PlanError: a rank needs a share that never arrives.
    """
    plan = plan.context_plan
    subchunks, shares, n = plan.subchunks, plan.schedule.num_shares, plan.ranks
    subchunk = np.repeat(np.arange(len(subchunks.low)), np.diff(subchunks.first))
    owner, share = subchunk // (subchunks.parts * shares), subchunk % shares
    order = working_order(subchunks.pieces)
    keys, held = take(subchunks.pieces, order), (owner * shares + share)[order]
    pairs, rows = np.zeros((2, n, steps), dtype=np.int64)
    kinds = np.zeros((n, steps, 2), dtype=bool)  # whether some pair is seen in part, or whole
    needed = np.zeros((len(ranks), n * shares), dtype=bool)
    kv = hops.where(hops.kind == KV)
    kv = kv.where(np.argsort(kv.dst, kind="stable"))
    bounds = np.searchsorted(kv.dst, np.arange(n + 1))
    away = _Away.of(plan)
    for i, rank in enumerate(ranks):
        step = np.full(n * shares, steps, dtype=np.int64)
        step[rank * shares : (rank + 1) * shares] = 0
        mine = slice(*bounds[rank : rank + 2])
        step[kv.owner[mine] * shares + kv.share[mine]] = kv.step[mine] + 1
        turn = plan.schedule.own_steps(rank)
        own = np.flatnonzero(owner == rank) if away or turn.any() else None
        # where all queries stay and have one turn whole runs of own tokens will do: fewer pairs
        queries = plan.layout.pieces(rank) if own is None else take(subchunks.pieces, own)
        found = pair_table(queries, keys, plan.docs)
        seen = found.area > 0
        q, k, area = found.q[seen], found.k[seen], found.area[seen]
        whole = area == queries.count[q] * keys.count[k]
        k = held[k]
        where, at = np.full_like(k, rank), step[k]
        if own is not None:
            home = k // shares == rank
            at[home] = turn[share[own[q[home]]]]
        if away and own is not None:
            away.move(rank * shares + share[own[q]], k, where, at)
        if (at >= steps).any():
            raise PlanError(f"rank {rank} never receives keys it needs: check(plan) says which")
        needed[i, k] = True
        np.add.at(pairs, (where, at), area)
        kinds[where, at, whole.astype(int)] = True
        when, q = np.divmod(
            np.unique((where * steps + at) * len(queries.count) + q), len(queries.count)
        )
        np.add.at(rows.reshape(-1), when, queries.count[q])
    few = slice(ranks.start, ranks.stop)
    calls = kinds.sum(axis=2)
    return Work(pairs[few], rows[few], calls[few], needed.reshape(len(ranks), n, shares))


class _Away(NamedTuple):
    """What is computed away from home: sorted numbers of (queries, keys), and where and when."""

    pair: np.ndarray
    rank: np.ndarray
    step: np.ndarray
    size: int  # a pair is queries * size + keys, both of them owner * shares + share

    @classmethod
    def of(cls, plan: Plan) -> _Away | None:
        meets, shares = plan.schedule.offloaded, plan.schedule.num_shares
        if not len(meets.step):
            return None
        size = plan.ranks * shares
        pair = (meets.q_owner * shares + meets.q_share) * size + meets.owner * shares + meets.share
        order = np.argsort(pair)
        return cls(pair[order], meets.rank[order], meets.step[order], size)

    def move(self, q: np.ndarray, k: np.ndarray, where: np.ndarray, at: np.ndarray) -> None:
        """Put pairs of shares where and when they are computed, those that are not at home."""
        pair = q * self.size + k
        index = np.minimum(np.searchsorted(self.pair, pair), len(self.pair) - 1)
        gone = self.pair[index] == pair
        where[gone], at[gone] = self.rank[index[gone]], self.step[index[gone]]


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
    meets = plan.schedule.offloaded
    hops = plan.hops()
    steps = max(int(hops.step.max(initial=-1)) + 2, int(meets.step.max(initial=0)) + 1)
    work = np.zeros((plan.ranks, steps), dtype=np.int64)
    counter = _Counter(plan, arrival)
    away = in_subchunks(plan, meets)
    given = counter.pair(away.q_subchunk, away.k_subchunk)
    for rank in range(plan.ranks):
        lost = counter.at_home(rank, work[rank], given)
        if lost:
            return work, lost
    if len(given):
        counter.away(away, given, work)
    return work, None


class _Counter:
    def __init__(self, plan: Plan, arrival: np.ndarray) -> None:
        subchunks, shares = plan.subchunks, plan.schedule.num_shares
        self.plan, self.arrival, self.pieces = plan, arrival, subchunks.pieces
        self.subchunk = np.repeat(np.arange(len(subchunks.low)), np.diff(subchunks.first))
        self.owner, self.share = self.subchunk // (subchunks.parts * shares), self.subchunk % shares

    def pair(self, q_subchunk: np.ndarray, k_subchunk: np.ndarray) -> np.ndarray:
        """One number for a pair of subchunks."""
        return q_subchunk * len(self.plan.subchunks.low) + k_subchunk

    def at_home(self, rank: int, work: np.ndarray, given: np.ndarray) -> Lost | None:
        """Count pairs of the rank's own queries, but for those given away."""
        plan, docs = self.plan, self.plan.docs
        turn = plan.schedule.own_steps(rank)
        cut = len(given) > 0 or turn.any()
        if cut:
            mine = np.flatnonzero(self.owner == rank)
            queries, keys = take(self.pieces, mine), np.arange(len(self.subchunk))
        else:  # whole runs of own tokens: fewer pairs
            queries = plan.layout.pieces(rank)
            own = take(queries, working_order(queries))
            work[0] += pair_table(queries, own, docs).area.sum()
            keys = np.flatnonzero(self.owner != rank)
        keys = keys[working_order(take(self.pieces, keys))]
        pairs = pair_table(queries, take(self.pieces, keys), docs)
        k, seen = keys[pairs.k], pairs.area > 0
        if len(given):
            seen &= ~np.isin(self.pair(self.subchunk[mine[pairs.q]], self.subchunk[k]), given)
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
        queries = np.flatnonzero(np.isin(self.subchunk, away.q_subchunk))
        keys = np.flatnonzero(np.isin(self.subchunk, away.k_subchunk))
        keys = keys[working_order(take(self.pieces, keys))]
        sides = take(self.pieces, queries), take(self.pieces, keys)
        pairs = pair_table(*sides, self.plan.docs)
        found = self.pair(self.subchunk[queries[pairs.q]], self.subchunk[keys[pairs.k]])
        order = np.argsort(given)
        at = order[np.minimum(np.searchsorted(given[order], found), len(given) - 1)]
        some = given[at] == found
        np.add.at(work, (away.rank[at[some]], away.step[at[some]]), pairs.area[some])
