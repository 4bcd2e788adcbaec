"""Work: the visible pairs each rank computes in each step, and what it needs from whom.

Compute step t takes the shares that arrived in communication step t - 1; own keys are step 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .errors import PlanError
from .lower import lower
from .plan import Plan
from .schedules import KV, Hops
from .tiles import pair_table, take, working_order


class Work(NamedTuple):
    """By rank and step, int64 [ranks, steps].

    Attributes:
        pairs: visible (query, key) pairs of one head.
        rows: query rows that see any of the step's keys.
        calls: kernel calls: one FULL, one CAUSAL.
        needed: bool [ranks, ranks, shares], by (rank, owner, share): whether its queries see any of it.
    """

    pairs: np.ndarray
    rows: np.ndarray
    calls: np.ndarray
    needed: np.ndarray


def work_of(plan: Plan, hops: Hops, ranks: range, steps: int) -> Work:
    """Work of some ranks, by `steps` compute steps, from hops that have all their arrivals.

    Raises:
        PlanError: a rank needs a share that never arrives.
    """
    plan = plan.inner
    units, shares, n = plan.units, plan.schedule.num_shares, plan.ranks
    unit = np.repeat(np.arange(len(units.low)), np.diff(units.first))
    order = working_order(units.pieces)
    keys = take(units.pieces, order)
    held = (unit // (units.parts * shares) * shares + unit % shares)[
        order
    ]  # owner * shares + share
    if len(plan.schedule.meets.step):
        return _lowered(plan, ranks, steps)
    pairs, rows, calls = np.zeros((3, len(ranks), steps), dtype=np.int64)
    needed = np.zeros((len(ranks), n * shares), dtype=bool)
    kv = hops.where(hops.kind == KV)
    kv = kv.where(np.argsort(kv.dst, kind="stable"))
    bounds = np.searchsorted(kv.dst, np.arange(n + 1))
    for i, rank in enumerate(ranks):
        step = np.full(n * shares, steps, dtype=np.int64)
        step[rank * shares : (rank + 1) * shares] = 0
        mine = slice(*bounds[rank : rank + 2])
        step[kv.owner[mine] * shares + kv.share[mine]] = kv.step[mine] + 1
        queries = plan.layout.pieces(rank)
        found = pair_table(queries, keys, plan.docs)
        seen = found.area > 0
        q, k, area = found.q[seen], found.k[seen], found.area[seen]
        at = step[held[k]]
        if (at >= steps).any():
            raise PlanError(f"rank {rank} never receives keys it needs: check(plan) says which")
        needed[i, held[k]] = True
        pairs[i] = np.bincount(at, weights=area, minlength=steps)[:steps]
        some = np.unique(at * len(queries.count) + q)
        touched = queries.count[some % len(queries.count)]
        rows[i] = np.bincount(some // len(queries.count), weights=touched, minlength=steps)
        whole = area == queries.count[q] * keys.count[k]
        for kind in (whole, ~whole):
            calls[i, np.unique(at[kind])] += 1
    return Work(pairs, rows, calls, needed.reshape(len(ranks), n, shares))


def _lowered(plan: Plan, ranks: range, steps: int) -> Work:
    """Work read off the lowered programs: where queries move, it is not with their owners."""
    pairs, rows, calls = np.zeros((3, len(ranks), steps), dtype=np.int64)
    for i, rank in enumerate(ranks):
        for t, step in enumerate(lower(plan, rank).steps):
            for call in step.compute.calls if step.compute else ():
                _, q, _, k = call.sequences
                pairs[i, t] += (q * (q + 1) // 2 if call.causal else q * k).sum()
                rows[i, t] += q.sum()
                calls[i, t] += 1
    return Work(pairs, rows, calls, np.ones((len(ranks), plan.ranks, 1), dtype=bool))
