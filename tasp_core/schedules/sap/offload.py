"""Balance without permuting tokens: which queries of busy ranks are computed by less busy ranks.

A busy rank's queries are cut into query chunks of little work each. A chunk is sent to another rank, and
its partial outputs are sent back. It may offload

    its pairs with the KV that one other rank owns, to that rank      only queries and outputs travel
    all its pairs, to any rank                                        the KV which that rank lacks, too

The transfer with the most work per token sent is taken first, until no rank has more than TOLERANCE over
the mean work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...sequence.documents import Documents
from ...sequence.layouts import Layout
from ...sequence.tiles import rank_areas

TOLERANCE = 0.04
CHUNKS = 32  # a chunk has at most this part of a rank's mean work
LEAST = 8  # tokens of a chunk, at least
QUERY = 2  # a query token is sent and its partial output returns; a token's KV is sent once


class Runs(NamedTuple):
    """Runs of tokens, each in one document and on one rank: from `low` to `high` in the document."""

    rank: np.ndarray
    doc: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def at(self, index: np.ndarray) -> Runs:
        return Runs(*(column[index] for column in self))


class Offload(NamedTuple):
    """Which pairs of a query chunk and a KV run are computed on another rank than the chunk's.

    Attributes:
        chunks: query chunks. kv_runs: runs of tokens whose KV one rank owns.
        chunk, kv_run: of each pair, its index in these. worker: the rank that computes it.
    """

    chunks: Runs
    kv_runs: Runs
    chunk: np.ndarray
    kv_run: np.ndarray
    worker: np.ndarray


def _before(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Number of pairs of a query i < x and a key j <= i in [low, high)."""
    n, t = high - low, np.maximum(x - low, 0)
    return np.where(t <= n, t * (t + 1) // 2, n * (n + 1) // 2 + (t - n) * n)


def area(docs: Documents, a: Runs, b: Runs) -> np.ndarray:
    """Number of visible pairs of query runs `a` and KV runs `b` of the same documents."""

    def seen(shift: int) -> np.ndarray:
        """Pairs with key <= query + shift."""
        ends = (_before(x + shift, b.low, b.high) for x in (a.high, a.low))
        return next(ends) - next(ends)

    reach = docs.window
    if docs.causal:
        return seen(0) - (seen(-reach) if reach else 0)
    if reach:
        return seen(reach - 1) - seen(-reach)
    return (a.high - a.low) * (b.high - b.low)


def _runs(layout: Layout) -> Runs:
    pieces = [layout.pieces(rank) for rank in range(layout.ranks)]
    rank = np.repeat(np.arange(layout.ranks), [len(p.doc) for p in pieces])
    doc, start, count = (
        np.concatenate([getattr(p, k) for p in pieces]) for k in ("doc", "start", "count")
    )
    low = start - layout.docs.cu_seqlens[doc]
    return Runs(rank, doc, low, low + count)


def _documents(docs: Documents, runs: Runs) -> Runs:
    """The documents in which runs lie, as KV runs."""
    return runs._replace(low=np.zeros_like(runs.low), high=docs.lengths[runs.doc])


def _chunks(docs: Documents, runs: Runs, most: float) -> Runs:
    """Runs cut into chunks of about `most` work, and of LEAST tokens at least."""
    parts = []
    for i in range(len(runs.rank)):
        run = runs.at(np.array([i]))
        work = int(area(docs, run, _documents(docs, run))[0])
        number = max(1, min(int(run.high[0] - run.low[0]) // LEAST, int(np.ceil(work / most))))
        grid = np.unique(np.linspace(run.low[0], run.high[0], 16 * number + 1).astype(np.int64))
        upto = area(docs, Runs(run.rank, run.doc, run.low, grid), _documents(docs, run))
        cuts = np.interp(work * np.arange(1, number) / number, upto, grid).astype(np.int64)
        border = np.unique(np.concatenate([run.low, cuts, run.high]))
        size = np.ones_like(border[1:])
        parts.append(Runs(run.rank * size, run.doc * size, border[:-1], border[1:]))
    return Runs(*(np.concatenate(c) for c in zip(*parts, strict=True)))


class _Offloader:
    """Offloads chunks of one busy rank, the transfer with the most work per token sent first.

    `c`, `k` are the pairs of a chunk and a KV run that have visible pairs of tokens, `size` of them;
    `tokens` is how many tokens of the KV run the chunk sees. `remaining` marks what is not offloaded yet.
    """

    def __init__(self, layout: Layout, kv_runs: Runs, chunks: Runs) -> None:
        docs, n = layout.docs, layout.ranks
        self.chunks, self.kv_runs, self.ranks = chunks, kv_runs, n
        c, k = np.nonzero(chunks.doc[:, None] == kv_runs.doc[None, :])
        size = area(docs, chunks.at(c), kv_runs.at(k))
        self.c, self.k, self.size = c[size > 0], k[size > 0], size[size > 0]
        self.tokens = np.minimum(kv_runs.high[self.k], chunks.high[self.c]) - kv_runs.low[self.k]
        if not docs.causal:
            self.tokens = kv_runs.high[self.k] - kv_runs.low[self.k]
        self.remaining = np.ones(len(self.c), dtype=bool)
        self.visits = np.zeros((len(chunks.rank), n), dtype=bool)

    def transfers(self, available: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Work and tokens sent of every possible transfer, both [2, chunks, ranks].

        Index 0 offloads the pairs with the KV that the rank owns, index 1 all pairs of the chunk.
        """
        shape = (2, len(self.chunks.rank), self.ranks)
        work, sent = np.zeros(shape), np.zeros(shape)
        c, k, size = (x[self.remaining] for x in (self.c, self.k, self.size))
        np.add.at(work[0], (c, self.kv_runs.rank[k]), size)
        work[1] = np.bincount(c, size, minlength=shape[1])[:, None]
        lacking = ~available[:, k].T * self.tokens[self.remaining][:, None]
        np.add.at(sent[1], c, lacking)
        queries = self.chunks.high - self.chunks.low
        return work, sent + QUERY * queries[None, :, None] * ~self.visits[None] + 1e-9

    def take_best(self, available: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, int] | None:
        """Take the best transfer that fits: its pairs and the rank that computes them; None if none fits.

        Args:
            available: whether a rank has the KV of a run anyway, bool [ranks, runs]; updated.
            room: work that each rank can still take.
        """
        work, sent = self.transfers(available)
        fits = (work > 0) & (work <= room[None, None, :])
        if not fits.any():
            return None
        best = int(np.argmax(np.where(fits, work / sent, -1.0)))
        everything, chunk, worker = (int(x) for x in np.unravel_index(best, work.shape))
        pairs = self.remaining & (self.c == chunk)
        if not everything:
            pairs &= self.kv_runs.rank[self.k] == worker
        available[worker, self.k[pairs]] = True
        self.visits[chunk, worker] = True
        self.remaining &= ~pairs
        return np.flatnonzero(pairs), worker


def offload(layout: Layout) -> Offload:
    """Which query chunks of busy ranks meet which KV on other ranks, so that work is balanced.

    Every chunk lies inside one document and one of its rank's runs.
    """
    docs, kv_runs = layout.docs, _runs(layout)
    load = rank_areas(layout).sum(axis=1).astype(float)
    mean = load.mean()
    target = (1 + TOLERANCE) * mean
    # a rank has, for its own queries, the KV of its documents up to its last query
    last = np.zeros((layout.ranks, len(docs.lengths)), dtype=np.int64)
    np.maximum.at(last, (kv_runs.rank, kv_runs.doc), kv_runs.high)
    available = last[:, kv_runs.doc] > (kv_runs.low if docs.causal else 0)
    chunks: list[Runs] = []
    parts = []
    for busy in np.argsort(-load, kind="stable").tolist():
        if load[busy] <= target:
            break
        own = kv_runs.at(np.flatnonzero((kv_runs.rank == busy) & (kv_runs.high > kv_runs.low)))
        source = _Offloader(layout, kv_runs, _chunks(docs, own, mean / CHUNKS))
        first = int(sum(len(c.rank) for c in chunks))
        chunks.append(source.chunks)
        while load[busy] > target:
            room = target - load
            room[busy] = -1.0
            transfer = source.take_best(available, room)
            if transfer is None:
                break
            pairs, worker = transfer
            work = float(source.size[pairs].sum())
            load[busy] -= work
            load[worker] += work
            parts.append((first + source.c[pairs], source.k[pairs], np.full_like(pairs, worker)))
    nothing = np.zeros(0, dtype=np.int64)
    joined = [np.concatenate([nothing, *c]) for c in zip(*parts, strict=True)] or [nothing] * 3
    cut = (
        Runs(*(np.concatenate([nothing, *c]) for c in zip(*chunks, strict=True)))
        if chunks
        else None
    )
    return Offload(cut or Runs(*[nothing] * 4), kv_runs, *joined)
