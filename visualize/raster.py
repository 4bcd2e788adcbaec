"""Raster: a packed row's mask counted into few cells; nothing is proportional to tokens squared.

A packed sequence of any length becomes at most CELLS x CELLS cells. What a query sees is a few runs of
keys, so the visible part of a cell is exact along the keys; of its queries, up to SAMPLES are asked.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tasp_core import Documents, Plan
from tasp_core.planning.work import own_steps, work_of
from tasp_core.schedules import KV

CELLS, SAMPLES = 100, 24


class Grid(NamedTuple):
    """Cells of the picture: borders [B + 1] in tokens, sampled tokens [B, R] of each cell."""

    edges: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, total: int) -> Grid:
        """Cells of a row: one a token while they are few."""
        count = min(CELLS, max(1, total))
        edges = total * np.arange(count + 1) // count
        most = min(SAMPLES, int(np.diff(edges).max(initial=1)))
        # jittered: evenly spaced samples would meet the same stripe again and again
        part = (np.arange(most) + np.random.default_rng(0).random((count, most))) / most
        return cls(edges, (edges[:-1, None] + np.diff(edges)[:, None] * part).astype(np.int64))

    @property
    def exact(self) -> bool:
        """Whether a cell is a token."""
        return len(self.edges) - 1 == self.edges[-1]


def cover(docs: Documents, grid: Grid) -> np.ndarray:
    """Part of the keys of cell j that sampled query r of cell i sees, float [i, r, j]."""
    index, low, high = docs.mask.runs(grid.tokens.ravel())
    left = np.maximum(low[:, None], grid.edges[:-1])
    right = np.minimum(high[:, None], grid.edges[1:])
    seen = np.zeros((grid.tokens.size, len(grid.edges) - 1), dtype=np.int64)
    np.add.at(seen, index, np.maximum(right - left, 0))
    return seen.reshape(*grid.tokens.shape, -1) / np.maximum(1, np.diff(grid.edges))


def holders(plan: Plan, grid: Grid) -> np.ndarray:
    """The rank that holds each sampled token, int64 [cells, samples]."""
    return plan.layout.locate(grid.tokens.ravel())[0].reshape(grid.tokens.shape)


def alternating(values: np.ndarray) -> np.ndarray:
    """Whether a cell's samples change value so often that it has no one value, bool [cells]."""
    return (np.diff(values, axis=1) != 0).sum(axis=1) > 2


def shares(values: np.ndarray, count: int) -> np.ndarray:
    """Part of each cell's samples that has each value, float [cells, count]; values below 0: none."""
    return (values[..., None] == np.arange(count)).mean(axis=1)


def share_of(plan: Plan, tokens: np.ndarray) -> np.ndarray:
    """The share each token is in: owner * num_shares + share."""
    layout, schedule = plan.layout, plan.schedule
    owner, row = layout.locate(tokens.ravel())
    share = np.zeros_like(owner)
    for one in np.unique(owner).tolist():
        mine = owner == one
        low = schedule.cuts(layout, one)[:, :-1].ravel()
        number = np.searchsorted(low, row[mine], side="right") - 1
        share[mine] = one * schedule.num_shares + number % schedule.num_shares
    return share.reshape(tokens.shape)


def arrived(plan: Plan, rank: int) -> np.ndarray:
    """Step in which a rank computes on each share's keys, by `share_of`; -1: it never gets them."""
    table, shares = plan.hops(rank), plan.schedule.num_shares
    step = np.full(plan.layout.ranks * shares, -1)
    step[rank * shares : (rank + 1) * shares] = 0
    into = table.where((table.dst == rank) & (table.kind == KV))
    step[into.owner * shares + into.share] = into.step + 1
    return step


def arrival(plan: Plan, rank: int, tokens: np.ndarray) -> np.ndarray:
    """Step in which a rank computes on each token's key; -1: it never gets it."""
    return arrived(plan, rank)[share_of(plan, tokens)]


def by_pairs(plan: Plan) -> bool:
    """Whether who computes a pair, or when, is not given by the key alone: queries or own work moves."""
    schedule = plan.schedule
    return len(schedule.offloaded.rank) > 0 or bool(own_steps(plan, backward=False).any())


def moved(plan: Plan, grid: Grid) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For a plan `by_pairs`: of a few pairs of each cell which are visible, who computes
    them and when; each [query cell, sample, key cell, sample].
    """
    tokens, shares, meets = grid.tokens[:, ::4], plan.schedule.num_shares, plan.schedule.offloaded
    when = np.repeat([arrived(plan, r) for r in range(plan.layout.ranks)], shares, axis=0)
    where = np.repeat(np.arange(plan.layout.ranks), shares)[:, None] + np.zeros_like(when)
    for rank in range(plan.layout.ranks):
        mine = slice(rank * shares, (rank + 1) * shares)
        when[mine, mine] = own_steps(plan, backward=False)[rank][:, None]
    at = (meets.q_owner * shares + meets.q_share, meets.owner * shares + meets.share)
    where[at], when[at] = meets.rank, meets.step
    seen = plan.docs.mask.dense(tokens.ravel(), tokens.ravel())
    share = share_of(plan, tokens)
    pair = (share[..., None, None], share)
    return seen.reshape(*tokens.shape, *tokens.shape), where[pair], when[pair]


def pairs_by_rank(plan: Plan) -> np.ndarray:
    """Visible pairs that each rank computes or should compute, int64 [ranks]."""
    counted = work_of(plan)
    return counted.pairs.sum(axis=1) + counted.lost


def pairs_by_step(plan: Plan, rank: int) -> np.ndarray:
    """Visible pairs that a rank computes in each step, and last those it never does, int64 [steps + 1]."""
    counted, steps = work_of(plan), plan.schedule.num_steps() + 1
    pairs = np.zeros(steps + 1, dtype=np.int64)
    done = counted.pairs[rank, :steps]
    pairs[: len(done)] = done
    pairs[-1] = counted.lost[rank]
    return pairs


def blocks(codes: np.ndarray) -> list[tuple[int, int, int, int, int]]:
    """Rectangles (code, top, bottom, left, right) of equal codes >= 0, rows joined where alike.

    >>> blocks(np.array([[1, 1, -1], [1, 1, 2]]))
    [(1, 0, 2, 0, 2), (2, 1, 2, 2, 3)]
    """
    done, live = [], dict[tuple[int, int, int], int]()
    for i, row in enumerate([*codes.tolist(), []]):
        cut = [j for j in range(len(row) + 1) if j in (0, len(row)) or row[j] != row[j - 1]]
        runs = {(row[a], a, b) for a, b in pairwise(cut) if row[a] >= 0}
        for run in [r for r in live if r not in runs]:
            done.append((run[0], live.pop(run), i, *run[1:]))
        for run in sorted(runs - live.keys()):
            live[run] = i
    return done
