"""Which visible (query, key) pairs each rank computes, in which step, and what it needs from whom.

Compute step t takes the shares that arrived in communication step t - 1; own keys are step 0, or later.

    work_of              pairs, rows, kernel calls and needed shares by rank and step: the one counter
                         of `check`, `simulate` and the figures
    offloaded_subchunks  pairs of sub-chunks computed on another rank than their queries', for lowering
    group_by_keys        query sub-chunks that attend to the same key sub-chunks, for lowering
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..schedules import KV, Hops, OffloadedPairs
from ..sequence.tiles import pair_table, take, working_order
from .plan import Plan


class OffloadedSubchunks(NamedTuple):
    """Pairs of sub-chunks computed on another rank than the one that owns their queries, int64."""

    step: np.ndarray
    rank: np.ndarray  # the one that computes them
    q_subchunk: np.ndarray
    k_subchunk: np.ndarray

    def at(self, mask: np.ndarray) -> OffloadedSubchunks:
        """The pairs of a boolean mask, or of indices."""
        return OffloadedSubchunks(*(column[mask] for column in self))


def in_subchunks(plan: Plan, offloaded: OffloadedPairs) -> OffloadedSubchunks:
    """Pairs of shares as pairs of sub-chunks: every part of one with every part of the other.

    Sub-chunks without tokens are dropped.
    """
    parts, shares = plan.subchunks.parts, plan.schedule.num_shares
    part = np.arange(parts)
    q = (offloaded.q_owner[:, None] * parts + part) * shares + offloaded.q_share[:, None]
    k = (offloaded.owner[:, None] * parts + part) * shares + offloaded.share[:, None]
    step, rank = offloaded.step[:, None, None], offloaded.rank[:, None, None]
    columns = np.broadcast_arrays(step, rank, q[:, :, None], k[:, None])
    pairs = OffloadedSubchunks(*map(np.ravel, columns))
    count = plan.subchunks.count
    return pairs.at((count[pairs.q_subchunk] > 0) & (count[pairs.k_subchunk] > 0))


def offloaded_subchunks(plan: Plan, rank: int) -> tuple[OffloadedSubchunks, OffloadedSubchunks]:
    """What the rank computes for other ranks' queries, and what other ranks compute for its own."""
    offloaded = plan.schedule.offloaded
    remote_queries = in_subchunks(plan, offloaded.where(offloaded.rank == rank))
    return remote_queries, in_subchunks(plan, offloaded.where(offloaded.q_owner == rank))


def group_by_keys(
    q_subchunk: np.ndarray, k_subchunk: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Query sub-chunks that are paired with the same set of key sub-chunks, and that set.

    >>> queries, keys = np.array([1, 1, 2, 3, 3]), np.array([7, 8, 7, 8, 7])
    >>> [(q.tolist(), k.tolist()) for q, k in group_by_keys(queries, keys)]
    [([1, 3], [7, 8]), ([2], [7])]
    """
    order = np.lexsort((k_subchunk, q_subchunk))
    q, first = np.unique(q_subchunk[order], return_index=True)
    sets: dict[bytes, list[int]] = {}
    for i, keys in enumerate(np.split(k_subchunk[order], first[1:])):
        sets.setdefault(keys.tobytes(), []).append(i)
    for keys_of_set, members in sets.items() if len(q) else ():
        yield q[members], np.frombuffer(keys_of_set, dtype=np.int64)


class Missing(NamedTuple):
    """Visible pairs that nobody computes: `rank` never receives this share of the owner's KV."""

    rank: int
    owner: int
    share: int
    pairs: int  # of all such pairs of the rank


class Work(NamedTuple):
    """By rank and step, int64 [ranks, steps].

    Attributes:
        pairs: visible (query, key) pairs of one head.
        rows: query rows that see any of the step's keys.
        calls: kernel calls: one FULL, one CAUSAL (where queries are cut, at most one more or less).
        needed: bool [ranks, ranks, shares], by (rank, owner, share): whether its queries see any of it.
        lost: visible pairs of a rank's queries that nobody computes, int64 [ranks].
        missing: the first share at fault for those, or None.
    """

    pairs: np.ndarray
    rows: np.ndarray
    calls: np.ndarray
    needed: np.ndarray
    lost: np.ndarray
    missing: Missing | None


def work_of(
    plan: Plan, hops: Hops | None = None, ranks: range | None = None, steps: int | None = None
) -> Work:
    """Who computes which visible pairs, and when, by a plan's own tables.

    Every visible pair is counted once: where the offloaded pairs list it, else where its query is, in the
    step after its key has arrived. That a pair is not listed twice, and that ranks hold what they
    compute with, is for `check` to prove.

    Args:
        hops: a table with all arrivals of these ranks, of which each happens once; default: the plan's.
        ranks: the ranks to count; default: all. Where queries move, it must be all ranks.
        steps: compute steps; default: as many as the plan needs.
    """
    plan = plan.context_plan
    hops = plan.hops() if hops is None else hops
    ranks = range(plan.ranks) if ranks is None else ranks
    if steps is None:
        last = int(plan.schedule.offloaded.step.max(initial=0))
        steps = max(int(hops.step.max(initial=-1)) + 2, last + 1)
    subchunks, shares, n = plan.subchunks, plan.schedule.num_shares, plan.ranks
    subchunk = np.repeat(np.arange(len(subchunks.low)), np.diff(subchunks.first))
    owner, share = subchunk // (subchunks.parts * shares), subchunk % shares
    order = working_order(subchunks.pieces)
    keys, share_of_key = take(subchunks.pieces, order), (owner * shares + share)[order]
    pairs, rows = np.zeros((2, n, steps), dtype=np.int64)
    kinds = np.zeros((n, steps, 2), dtype=bool)  # whether some pair is seen in part, or in full
    needed = np.zeros((len(ranks), n * shares), dtype=bool)
    lost, missing = np.zeros(n, dtype=np.int64), None
    kv = hops.where(hops.kind == KV)
    kv = kv.where(np.argsort(kv.dst, kind="stable"))
    bounds = np.searchsorted(kv.dst, np.arange(n + 1))
    offloaded = _OffloadedIndex.of(plan)
    for i, rank in enumerate(ranks):
        step = np.full(n * shares, steps, dtype=np.int64)
        step[rank * shares : (rank + 1) * shares] = 0
        mine = slice(*bounds[rank : rank + 2])
        step[kv.owner[mine] * shares + kv.share[mine]] = kv.step[mine] + 1
        own_steps = plan.schedule.own_steps(rank)
        own = np.flatnonzero(owner == rank) if offloaded or own_steps.any() else None
        # uncut runs of own tokens will do where all queries stay and meet own keys in one step
        queries = plan.layout.pieces(rank) if own is None else take(subchunks.pieces, own)
        table = pair_table(queries, keys, plan.docs)
        seen = table.area > 0
        q, k, area = table.q[seen], table.k[seen], table.area[seen]
        in_full = area == queries.count[q] * keys.count[k]
        k = share_of_key[k]
        where, at = np.full_like(k, rank), step[k]
        if own is not None:
            home = k // shares == rank
            at[home] = own_steps[share[own[q[home]]]]
        if offloaded and own is not None:
            offloaded.move(rank * shares + share[own[q]], k, where, at)
        needed[i, k] = True
        never = np.flatnonzero(at >= steps)
        if never.size:
            lost[rank] = area[never].sum()
            missing = missing or Missing(rank, *divmod(int(k[never[0]]), shares), int(lost[rank]))
            some_step = at < steps
            q, area, in_full, where, at = (x[some_step] for x in (q, area, in_full, where, at))
        np.add.at(pairs, (where, at), area)
        kinds[where, at, in_full.astype(int)] = True
        when, q = np.divmod(
            np.unique((where * steps + at) * len(queries.count) + q), len(queries.count)
        )
        np.add.at(rows.reshape(-1), when, queries.count[q])
    few = slice(ranks.start, ranks.stop)
    calls, by_share = kinds.sum(axis=2), needed.reshape(len(ranks), n, shares)
    return Work(pairs[few], rows[few], calls[few], by_share, lost[few], missing)


class _OffloadedIndex(NamedTuple):
    """Offloaded pairs of shares, sorted by a number for (query share, key share); where and when."""

    pair: np.ndarray
    rank: np.ndarray
    step: np.ndarray
    size: int  # a pair is query share * size + key share, each of them owner * shares + share

    @classmethod
    def of(cls, plan: Plan) -> _OffloadedIndex | None:
        listed, shares = plan.schedule.offloaded, plan.schedule.num_shares
        if not len(listed.step):
            return None
        size = plan.ranks * shares
        q, k = listed.q_owner * shares + listed.q_share, listed.owner * shares + listed.share
        pair = q * size + k
        order = np.argsort(pair)
        return cls(pair[order], listed.rank[order], listed.step[order], size)

    def move(self, q: np.ndarray, k: np.ndarray, where: np.ndarray, at: np.ndarray) -> None:
        """Write where and when pairs of shares are computed, for those that are offloaded."""
        pair = q * self.size + k
        index = np.minimum(np.searchsorted(self.pair, pair), len(self.pair) - 1)
        moved = self.pair[index] == pair
        where[moved], at[moved] = self.rank[index[moved]], self.step[index[moved]]
