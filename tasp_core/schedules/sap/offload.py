"""Balance without permuting tokens: which queries of busy ranks are computed by ranks with idle time.

A busy rank's queries are cut into chunks of little work. A chunk goes, together with its answer's way
back, to a rank that

    holds earlier keys of its document      only queries travel, for the part that meets those keys
    or to any other rank                    the keys that it lacks travel too

whichever gives most work per token moved, until no rank has more than TOLERANCE over the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...sequence.documents import Documents
from ...sequence.layouts import Layout
from ...sequence.masks import band_area, edges
from ...sequence.tiles import rank_areas

TOLERANCE = 0.04
CHUNKS = 32  # a chunk is at most the mean work of a rank over this
LEAST = 8  # tokens of a chunk
QUERY = 2  # a query token goes and its answer comes back; a key token goes once


class Runs(NamedTuple):
    """Runs of one document, `low` .. `high` counted from its first token, each on one rank."""

    rank: np.ndarray
    doc: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def at(self, index: np.ndarray) -> Runs:
        return Runs(*(column[index] for column in self))


class Given(NamedTuple):
    """Query chunks and key runs, and which of them meet on another rank than the chunk's."""

    chunks: Runs
    keys: Runs
    chunk: np.ndarray
    key: np.ndarray
    worker: np.ndarray


def area(docs: Documents, a: Runs, b: Runs) -> np.ndarray:
    """Visible pairs of query runs `a` with key runs `b` of the same documents."""

    lead = b.low - a.low
    band = edges(lead, np.ones_like(lead), *docs.diagonals)
    return band_area(a.high - a.low, b.high - b.low, *band)


def _runs(layout: Layout) -> Runs:
    pieces = [layout.pieces(rank) for rank in range(layout.ranks)]
    rank = np.repeat(np.arange(layout.ranks), [len(p.doc) for p in pieces])
    doc, start, count = (
        np.concatenate([getattr(p, k) for p in pieces]) for k in ("doc", "start", "count")
    )
    low = start - layout.docs.cu_seqlens[doc]
    return Runs(rank, doc, low, low + count)


def _whole(docs: Documents, runs: Runs) -> Runs:
    """The documents of runs as key runs."""
    return runs._replace(low=np.zeros_like(runs.low), high=docs.lengths[runs.doc])


def _chunks(docs: Documents, runs: Runs, most: float) -> Runs:
    """Runs cut so that no part has much more work than `most`."""
    parts = []
    for i in range(len(runs.rank)):
        run = runs.at(np.array([i]))
        work = int(area(docs, run, _whole(docs, run))[0])
        number = max(1, min(int(run.high[0] - run.low[0]) // LEAST, int(np.ceil(work / most))))
        grid = np.unique(np.linspace(run.low[0], run.high[0], 16 * number + 1).astype(np.int64))
        upto = area(docs, Runs(run.rank, run.doc, run.low, grid), _whole(docs, run))
        cuts = np.interp(work * np.arange(1, number) / number, upto, grid).astype(np.int64)
        border = np.unique(np.concatenate([run.low, cuts, run.high]))
        size = np.ones_like(border[1:])
        parts.append(Runs(run.rank * size, run.doc * size, border[:-1], border[1:]))
    return Runs(*(np.concatenate(c) for c in zip(*parts, strict=True)))


class _Giver:
    """Gives chunks of one busy rank away, best bargain first."""

    def __init__(self, layout: Layout, keys: Runs, chunks: Runs) -> None:
        docs, n = layout.docs, layout.ranks
        self.chunks, self.keys, self.ranks = chunks, keys, n
        c, k = np.nonzero(chunks.doc[:, None] == keys.doc[None, :])
        size = area(docs, chunks.at(c), keys.at(k))
        self.c, self.k, self.size = c[size > 0], k[size > 0], size[size > 0]
        self.tokens = np.minimum(keys.high[self.k], chunks.high[self.c]) - keys.low[self.k]
        if not docs.causal:
            self.tokens = keys.high[self.k] - keys.low[self.k]
        self.left = np.ones(len(self.c), dtype=bool)
        self.visits = np.zeros((len(chunks.rank), n), dtype=bool)

    def bargains(self, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Work and tokens moved of giving [the part a rank's own keys meet, all] of a chunk to it."""
        shape = (2, len(self.chunks.rank), self.ranks)
        work, moved = np.zeros(shape), np.zeros(shape)
        c, k, size = (x[self.left] for x in (self.c, self.k, self.size))
        np.add.at(work[0], (c, self.keys.rank[k]), size)
        work[1] = np.bincount(c, size, minlength=shape[1])[:, None]
        lacking = ~held[:, k].T * self.tokens[self.left][:, None]
        np.add.at(moved[1], c, lacking)
        rows = self.chunks.high - self.chunks.low
        return work, moved + QUERY * rows[None, :, None] * ~self.visits[None] + 1e-9

    def give(self, held: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, int] | None:
        """The pairs given by the best bargain that fits, and the rank that takes them."""
        work, moved = self.bargains(held)
        fits = (work > 0) & (work <= room[None, None, :])
        if not fits.any():
            return None
        best = int(np.argmax(np.where(fits, work / moved, -1.0)))
        everything, chunk, worker = (int(x) for x in np.unravel_index(best, work.shape))
        pairs = self.left & (self.c == chunk)
        if not everything:
            pairs &= self.keys.rank[self.k] == worker
        held[worker, self.k[pairs]] = True
        self.visits[chunk, worker] = True
        self.left &= ~pairs
        return np.flatnonzero(pairs), worker


def offload(layout: Layout) -> Given:
    """Which queries of busy ranks meet which keys elsewhere, so that work is even.

    Every chunk lies inside one document and one of its rank's runs.
    """
    docs, keys = layout.docs, _runs(layout)
    load = rank_areas(layout).sum(axis=1).astype(float)
    mean = load.mean()
    target = (1 + TOLERANCE) * mean
    # what a rank's own queries need is there anyway: keys of its documents before its last query
    last = np.zeros((layout.ranks, len(docs.lengths)), dtype=np.int64)
    np.maximum.at(last, (keys.rank, keys.doc), keys.high)
    held = last[:, keys.doc] > (keys.low if docs.causal else 0)
    chunks: list[Runs] = []
    parts = []
    for busy in np.argsort(-load, kind="stable").tolist():
        if load[busy] <= target:
            break
        own = keys.at(np.flatnonzero((keys.rank == busy) & (keys.high > keys.low)))
        giver = _Giver(layout, keys, _chunks(docs, own, mean / CHUNKS))
        first = int(sum(len(c.rank) for c in chunks))
        chunks.append(giver.chunks)
        while load[busy] > target:
            room = target - load
            room[busy] = -1.0
            given = giver.give(held, room)
            if given is None:
                break
            pairs, worker = given
            moved = float(giver.size[pairs].sum())
            load[busy] -= moved
            load[worker] += moved
            parts.append((first + giver.c[pairs], giver.k[pairs], np.full_like(pairs, worker)))
    nothing = np.zeros(0, dtype=np.int64)
    joined = [np.concatenate([nothing, *c]) for c in zip(*parts, strict=True)] or [nothing] * 3
    cut = (
        Runs(*(np.concatenate([nothing, *c]) for c in zip(*chunks, strict=True)))
        if chunks
        else None
    )
    return Given(cut or Runs(*[nothing] * 4), keys, *joined)
