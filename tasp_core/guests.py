"""Queries away from home, for lowering: what a rank computes for others, and what others do for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .plan import Plan
from .schedules import Meets


class Away(NamedTuple):
    """Pairs of units computed away from their queries' home, int64."""

    step: np.ndarray
    rank: np.ndarray  # where
    q_unit: np.ndarray
    k_unit: np.ndarray

    def at(self, mask: np.ndarray) -> Away:
        return Away(*(column[mask] for column in self))


def in_units(plan: Plan, meets: Meets) -> Away:
    """Meets of shares as pairs of units, those without tokens dropped."""
    parts, shares = plan.units.parts, plan.schedule.num_shares
    part = np.arange(parts)
    q = (meets.q_owner[:, None] * parts + part) * shares + meets.q_share[:, None]
    k = (meets.owner[:, None] * parts + part) * shares + meets.share[:, None]
    when, where = meets.step[:, None, None], meets.rank[:, None, None]
    pairs = Away(*map(np.ravel, np.broadcast_arrays(when, where, q[:, :, None], k[:, None])))
    count = plan.units.count
    return pairs.at((count[pairs.q_unit] > 0) & (count[pairs.k_unit] > 0))


def away_of(plan: Plan, rank: int) -> tuple[Away, Away]:
    """What the rank computes for others, by step; what others compute of its queries."""
    meets = plan.schedule.meets
    guests = in_units(plan, meets.where(meets.rank == rank))
    return guests, in_units(plan, meets.where(meets.q_owner == rank))


def alike(q_unit: np.ndarray, k_unit: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Query units that are paired with the same set of key units, and that set.

    >>> [(q.tolist(), k.tolist()) for q, k in alike(np.array([1, 1, 2, 3, 3]), np.array([7, 8, 7, 8, 7]))]
    [([1, 3], [7, 8]), ([2], [7])]
    """
    order = np.lexsort((k_unit, q_unit))
    q, first = np.unique(q_unit[order], return_index=True)
    sets: dict[bytes, list[int]] = {}
    for i, keys in enumerate(np.split(k_unit[order], first[1:])):
        sets.setdefault(keys.tobytes(), []).append(i)
    for same, which in sets.items() if len(q) else ():
        yield q[which], np.frombuffer(same, dtype=np.int64)
