"""Buffer rows by liveness: where what arrives is put, and when its rows may be used again.

Regions that live over disjoint spans of steps share a slot (interval colouring), so a relay, in which
everything lives for two steps, needs two slots whatever the number of ranks. Rows count tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Runs(NamedTuple):
    """Row ranges src[i] .. src[i] + count[i] -> dst[i] .., applied in this order."""

    src: np.ndarray
    dst: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count


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
    """Where subchunks lie: sorted subchunk numbers and their first rows."""

    subchunk: np.ndarray
    row: np.ndarray

    def of(self, subchunk: np.ndarray) -> np.ndarray:
        return self.row[np.searchsorted(self.subchunk, subchunk)]


def place(
    subchunk: np.ndarray,
    birth: np.ndarray,
    death: np.ndarray,
    count: np.ndarray,
    order: np.ndarray,
    base: int = 0,
) -> tuple[Place, int]:
    """Subchunks of equal birth and death lie end to end, by `order`, in one region, from row `base` on."""
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


def last_use(
    subchunk: np.ndarray, first: np.ndarray, user: np.ndarray, step: np.ndarray
) -> np.ndarray:
    """Per subchunk, the later of `first` and the last step of its users."""
    last, order = first.copy(), np.argsort(subchunk)
    np.maximum.at(last, order[np.searchsorted(subchunk[order], user)], step)
    return last
