"""Document lengths of packed sequences as in training: pretraining, sft, code and one giant document.

    row_lengths("sft", 2**20, seed=0)    int64 lengths that sum to 2**20; the same for the same seed

Modelled distributions, not samples of a data set. Seeded by NumPy's default_rng.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class LogNormal(NamedTuple):
    """Tokens of a document: exp(normal(ln median, sigma)), at least 1, at most `longest`."""

    median: float
    sigma: float
    longest: int

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` lengths, int64."""
        tokens = rng.lognormal(np.log(self.median), self.sigma, count)
        return np.clip(tokens, 1, self.longest).astype(np.int64)


LOGNORMALS = {
    "pretraining": LogNormal(600, 1.4, 128 * 1024),
    "sft": LogNormal(700, 0.9, 16 * 1024),
    "code": LogNormal(1200, 1.6, 256 * 1024),
}
NAMES = (*LOGNORMALS, "giant")


def row_lengths(name: str, total: int, seed: int) -> np.ndarray:
    """Lengths in tokens of the documents of a packed sequence, int64; they sum to `total`.

    "giant" is one document of half the sequence among documents of 64 to 512 tokens. The last
    document drawn is cut to fit.

    >>> row_lengths("sft", 4096, seed=0).tolist()
    [783, 621, 1245, 769, 432, 246]

    Raises:
        ValueError: an unknown name, or a negative total.
    """
    if name not in NAMES:
        raise ValueError(f"no distribution {name!r} of document lengths; known: {', '.join(NAMES)}")
    if total < 0:
        raise ValueError(f"a packed sequence has 0 or more tokens, got {total}")
    rng = np.random.default_rng(seed)
    if name != "giant":
        return _fill(total, lambda count: LOGNORMALS[name].draw(rng, count))
    short = _fill(total - total // 2, lambda count: rng.integers(64, 513, count))
    giant = np.full(min(1, total // 2), total // 2, dtype=np.int64)
    return rng.permutation(np.concatenate([giant, short]))


def _fill(total: int, draw: Callable[[int], np.ndarray]) -> np.ndarray:
    """Lengths drawn until they reach `total`; the last one is cut to fit."""
    lengths = np.zeros(0, dtype=np.int64)
    while lengths.sum() < total:
        lengths = np.concatenate([lengths, draw(256)])
    ends = np.minimum(np.cumsum(lengths), total)
    ends = ends[: np.searchsorted(ends, total) + 1] if total else ends[:0]
    return np.diff(ends, prepend=0)
