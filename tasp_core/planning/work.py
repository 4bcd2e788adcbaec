"""Which visible (query, key) pairs each rank computes, in which step, and what it needs from whom.

Compute step t takes the shares that arrived in communication step t - 1; own keys are in step 0, or later.

    work_of              pairs, rows, kernel calls and needed shares by rank and step: the one counter
                         of `check`, `simulate` and the figures
    offloaded_subchunks  pairs of sub-chunks computed on another rank than their queries', for lowering
    group_by_keys        query sub-chunks that attend to the same key sub-chunks, for lowering
    own_steps            in which steps each rank computes on its own KV
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..schedules import KV, Hops, OffloadedPairs
from ..schedules.own_work import GOOD_ENOUGH, Messages, OwnWork, Pass, Prices, place_own
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
    plan: Plan,
    hops: Hops | None = None,
    ranks: range | None = None,
    steps: int | None = None,
    *,
    backward: bool = False,
    own: np.ndarray | None = None,
) -> Work:
    """Who computes which visible pairs, and when, by a plan's own tables.

    Every visible pair is counted once: where the offloaded pairs list it, else where its query is, in the
    step after its key has arrived. That a pair is not listed twice, and that ranks hold what they
    compute with, is for `check` to prove.

    Args:
        hops: a table with all arrivals of these ranks, of which each happens once; default: the plan's.
        ranks: the ranks to count; default: all. Where queries move, it must be all ranks.
        steps: compute steps; default: as many as the plan needs.
        backward: of which pass: work on own KV may be in other steps, all else is the same.
        own: the steps of work on own KV, int64 [ranks, shares]; default: the plan's.
    """
    plan = plan.context_plan
    hops = plan.hops() if hops is None else hops
    ranks = range(plan.ranks) if ranks is None else ranks
    own = own_steps(plan, backward=backward) if own is None else own
    if steps is None:
        last = max(int(plan.schedule.offloaded.step.max(initial=0)), int(own.max(initial=0)))
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
        arrived = slice(*bounds[rank : rank + 2])
        step[kv.owner[arrived] * shares + kv.share[arrived]] = kv.step[arrived] + 1
        mine = np.flatnonzero(owner == rank) if offloaded or own[rank].any() else None
        # uncut runs of own tokens will do where all queries stay and meet own keys in one step
        queries = plan.layout.pieces(rank) if mine is None else take(subchunks.pieces, mine)
        table = pair_table(queries, keys, plan.docs)
        seen = table.area > 0
        q, k, area = table.q[seen], table.k[seen], table.area[seen]
        in_full = area == queries.count[q] * keys.count[k]
        k = share_of_key[k]
        where, at = np.full_like(k, rank), step[k]
        if mine is not None:
            home = k // shares == rank
            at[home] = own[rank, share[mine[q[home]]]]
        if offloaded and mine is not None:
            offloaded.move(rank * shares + share[mine[q]], k, where, at)
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


# ---- own work

MOST_PIECES = (
    1 << 20
)  # pairs of pieces that are counted to place own work; beyond, it stays in step 0


def own_steps(plan: Plan, *, backward: bool) -> np.ndarray:
    """The compute steps in which each share's queries meet their own rank's KV, int64 [ranks, shares].

    As the schedule says; else where they make the pass shortest (schedules/own_work.py). They stay in
    step 0 where every rank does the same anyway (one document whose tokens see all before them), where
    queries move, beside collectives, and with stripes, whose queries cannot be cut where keys are.
    """
    plan = plan.context_plan
    name = f"own steps, {'backward' if backward else 'forward'}"
    if name not in plan.derived:
        steps = _scheduled_own_steps(plan, backward)
        steps.setflags(write=False)
        plan.derived[name] = steps
    result: np.ndarray = plan.derived[name]
    return result


def _scheduled_own_steps(plan: Plan, backward: bool) -> np.ndarray:
    scheduled = [plan.schedule.own_steps(rank, backward=backward) for rank in range(plan.ranks)]
    if all(steps is not None for steps in scheduled):
        return np.array(scheduled, dtype=np.int64).reshape(plan.ranks, plan.schedule.num_shares)
    nothing = np.zeros((plan.ranks, plan.schedule.num_shares), dtype=np.int64)
    pieces, docs = plan.subchunks.pieces, plan.docs
    stays = plan.schedule.collective or len(plan.schedule.offloaded.step) or plan.ranks == 1
    one_document = docs.prefixes and len(docs.lengths) == 1
    of_doc = np.bincount(pieces.doc, minlength=1)
    if stays or one_document or (pieces.stride != 1).any() or (of_doc**2).sum() > MOST_PIECES:
        return nothing
    hops = plan.hops(backward=backward)
    ends = np.concatenate([hops.src, hops.dst, hops.owner])
    if (ends >= plan.ranks).any() or (hops.share >= plan.schedule.num_shares).any():
        return nothing  # a table that `check` refuses
    prices = Prices.of(plan.machine, backward=backward)
    steps = int(hops.step.max(initial=-1)) + 1
    if docs.num_pairs < prices.message * steps // GOOD_ENOUGH:
        return nothing  # messages' latency is nearly all of the pass
    counted = work_of(plan, hops, backward=backward, own=nothing)
    own = _own_work(plan)
    work = counted.pairs + counted.rows * prices.row
    work[:, 0] = 0
    messages = Messages.of(
        hops, plan.tokens_moved(hops), plan.ranks, plan.machine.node_size, prices
    )
    no_visits = np.zeros((0, work.shape[1]), dtype=bool)
    step = place_own(Pass(work, no_visits, messages, prices), own)[0]
    return step.reshape(nothing.shape)


def _own_work(plan: Plan) -> OwnWork:
    """Each share's queries with their rank's KV."""
    subchunks, shares = plan.subchunks, plan.schedule.num_shares
    subchunk = np.repeat(np.arange(len(subchunks.low)), np.diff(subchunks.first))
    owner = subchunk // (subchunks.parts * shares)
    number = owner * shares + subchunk % shares
    pairs, rows = np.zeros((2, plan.ranks * shares), dtype=np.int64)
    np.add.at(rows, number, subchunks.pieces.count)
    for rank in range(plan.ranks):
        mine = np.flatnonzero(owner == rank)
        pieces = take(subchunks.pieces, mine)
        table = pair_table(pieces, take(pieces, working_order(pieces)), plan.docs)
        np.add.at(pairs, number[mine[table.q]], table.area)
    return OwnWork(np.repeat(np.arange(plan.ranks), shares), pairs, rows, np.full_like(pairs, -1))
