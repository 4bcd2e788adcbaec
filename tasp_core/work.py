"""Work: the visible pairs each rank computes in each step, and what it needs from whom.

Compute step t takes the shares that arrived in communication step t - 1; own keys are step 0, or later.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .errors import PlanError
from .plan import Plan
from .schedules import KV, Hops
from .tiles import pair_table, take, working_order


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
    plan = plan.inner
    units, shares, n = plan.units, plan.schedule.num_shares, plan.ranks
    unit = np.repeat(np.arange(len(units.low)), np.diff(units.first))
    owner, share = unit // (units.parts * shares), unit % shares
    order = working_order(units.pieces)
    keys, held = take(units.pieces, order), (owner * shares + share)[order]
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
        queries = plan.layout.pieces(rank) if own is None else take(units.pieces, own)
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
        meets, shares = plan.schedule.meets, plan.schedule.num_shares
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
