"""Pieces: runs of a packed sequence's tokens, one after the other in the memory of a rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Pieces(NamedTuple):
    """Pieces of one rank, each inside one segment (layouts.py) and one document; int64 arrays."""

    offset: np.ndarray  # first local index
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count
    start: np.ndarray  # first global token; the next ones follow at the segment's stride
    stride: np.ndarray
    doc: np.ndarray

    @property
    def last(self) -> np.ndarray:
        """Last global token of each piece."""
        return self.start + (self.count - 1) * self.stride


def ranges(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All integers of the ranges [low_i, high_i) end to end, and the i each belongs to.

    >>> [x.tolist() for x in ranges(np.array([0, 5]), np.array([2, 8]))]
    [[0, 1, 5, 6, 7], [0, 0, 1, 1, 1]]
    """
    sizes = np.maximum(high - low, 0)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    first = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) - first[owner] + low[owner], owner
