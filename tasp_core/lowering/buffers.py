"""Rows of buffers: row ranges, and which rows a received sub-chunk gets for as long as it is needed.

Regions that live over disjoint spans of steps share a slot (interval colouring), so a ring, in which
everything lives for two steps, needs two slots whatever the number of ranks. Rows count tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..sequence.tiles import rounds


class Runs(NamedTuple):
    """Row ranges src[i] .. src[i] + count[i] -> dst[i] .., applied in this order."""

    src: np.ndarray
    dst: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count


NO_RUNS = Runs(*np.zeros((3, 0), dtype=np.int64))


def _slots(birth: np.ndarray, death: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, int]:
    """First rows of regions alive in [birth, death], and rows in all: who dies first frees a slot."""
    slot = np.zeros(len(birth), dtype=np.int64)
    busy_until: list[int] = []
    for i in np.argsort(birth, kind="stable").tolist():
        at = next((j for j, end in enumerate(busy_until) if end < birth[i]), len(busy_until))
        busy_until[at : at + 1] = [int(death[i])]
        slot[i] = at
    sizes = np.zeros(len(busy_until), dtype=np.int64)
    np.maximum.at(sizes, slot, size)
    base = np.concatenate([[0], np.cumsum(sizes)])
    return base[slot], int(base[-1])


class Place(NamedTuple):
    """Where sub-chunks lie: sorted sub-chunk numbers and their first rows."""

    subchunk: np.ndarray
    row: np.ndarray

    def of(self, subchunk: np.ndarray) -> np.ndarray:
        """First row of each of these sub-chunks, which must all have a place."""
        return self.row[np.searchsorted(self.subchunk, subchunk)]


def place(
    subchunk: np.ndarray,
    birth: np.ndarray,
    death: np.ndarray,
    count: np.ndarray,
    order: np.ndarray,
    base: int = 0,
) -> tuple[Place, int]:
    """Rows for sub-chunks that are needed from step `birth` to step `death`, and rows in all.

    Sub-chunks of equal birth and death lie end to end, by `order`, in one region, from row `base` on.
    """
    index = np.lexsort((order, death, birth))
    b, d, c = birth[index], death[index], count[index]
    new = np.ones(len(index), dtype=bool)
    new[1:] = (np.diff(b) != 0) | (np.diff(d) != 0)
    first = np.flatnonzero(new)
    region = np.cumsum(new) - 1
    ends = np.cumsum(c)
    inside = ends - c
    sizes = np.add.reduceat(c, first) if len(first) else c
    offset, rows = _slots(b[first], d[first], sizes)
    row = offset[region] + inside - inside[first[region]] if len(first) else inside
    back = np.argsort(subchunk[index], kind="stable")
    return Place(subchunk[index][back], base + row[back]), rows


def join_runs(src: np.ndarray, dst: np.ndarray, count: np.ndarray) -> Runs:
    """Row ranges, those that continue each other on both sides joined."""
    if not len(src):
        return Runs(src, dst, count)
    joins = (src[1:] == src[:-1] + count[:-1]) & (dst[1:] == dst[:-1] + count[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~joins]))
    return Runs(src[first], dst[first], np.add.reduceat(count, first))


def in_rounds(src: np.ndarray, dst: np.ndarray, count: np.ndarray) -> tuple[Runs, ...]:
    """Row ranges in rounds: destination rows of one round do not overlap."""
    number = rounds(dst, count)
    picks = (number == i for i in range(int(number.max(initial=-1)) + 1))
    return tuple(join_runs(src[p], dst[p], count[p]) for p in picks)


def end_to_end(rows: np.ndarray, count: np.ndarray) -> tuple[Runs, ...]:
    """A kernel call's output rows, sequence after sequence, to the `rows` they belong to."""
    return in_rounds(np.cumsum(count) - count, rows, count)


def rows_to_themselves(low: np.ndarray, count: np.ndarray) -> Runs:
    """Row ranges onto the same rows, in their order, those that continue each other joined."""
    order = np.argsort(low, kind="stable")
    return join_runs(low[order], low[order], count[order])


def union(low: np.ndarray, count: np.ndarray) -> list[tuple[int, int]]:
    """The rows of any range, as sorted (low, high) that neither overlap nor touch.

    >>> union(np.array([4, 0, 2]), np.array([1, 3, 2]))
    [(0, 5)]
    """
    if len(low) < 2:
        return [(int(a), int(a + n)) for a, n in zip(low, count, strict=True)]
    order = np.argsort(low, kind="stable")
    begins = low[order]
    ends = np.maximum.accumulate(begins + count[order])
    first = np.flatnonzero(np.append(True, begins[1:] > ends[:-1]))
    last = np.append(first[1:], len(low)) - 1
    return list(zip(begins[first].tolist(), ends[last].tolist(), strict=True))


def last_use(
    subchunk: np.ndarray, first: np.ndarray, user: np.ndarray, step: np.ndarray
) -> np.ndarray:
    """For each sub-chunk, the later of `first` and the last step of its users."""
    last, order = first.copy(), np.argsort(subchunk)
    np.maximum.at(last, order[np.searchsorted(subchunk[order], user)], step)
    return last
