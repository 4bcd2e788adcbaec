"""Kernel calls of a step: groups of queries and of the keys they meet, as one FULL and one CAUSAL call.

Most steps have one group: the rank's own queries and what has just arrived. Where queries move, a
remote query may meet other keys than the rank's own queries do; its sequences join the same two calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..sequence.documents import Documents
from ..sequence.layouts import Pieces, ranges
from ..sequence.tiles import Sequences, rounds, take, tile
from .buffers import Runs, join_runs
from .program import Call, Compute


class Group(NamedTuple):
    """Queries and the keys all of them meet; offsets are rows of `q` and of `kv`."""

    queries: Pieces
    keys: Pieces
    grad: np.ndarray  # first `grad` row of each key piece


def _in_rounds(src: np.ndarray, dst: np.ndarray, count: np.ndarray) -> tuple[Runs, ...]:
    """Row ranges in rounds whose dst rows do not overlap."""
    number = rounds(dst, count)
    picks = (number == i for i in range(int(number.max(initial=-1)) + 1))
    return tuple(join_runs(src[p], dst[p], count[p]) for p in picks)


def _end_to_end(rows: np.ndarray, count: np.ndarray) -> tuple[Runs, ...]:
    """A call's output rows, sequence after sequence, to the `rows` they belong to."""
    return _in_rounds(np.cumsum(count) - count, rows, count)


def _in_place(keys: Pieces) -> bool:
    """Whether each document's pieces lie end to end."""
    follows = keys.offset[1:] == keys.offset[:-1] + keys.count[:-1]
    return bool((follows | (keys.doc[1:] != keys.doc[:-1])).all())


def _joined(parts: Iterable[Sequences]) -> Sequences:
    return Sequences(*(np.concatenate(c) for c in zip(*parts, strict=True)))


def compute(groups: list[Group], docs: Documents) -> Compute | None:
    """What a step computes; None where there is nothing to do."""
    tiled = [(g, tile(g.queries, g.keys, docs)) for g in groups]
    tiled = [(g, t) for g, t in tiled if len(t.used)]
    if not tiled:
        return None
    used = [take(g.keys, t.used) for g, t in tiled]
    grad = np.concatenate([g.grad[t.used] for g, t in tiled])
    keys = Pieces(*(np.concatenate(c) for c in zip(*used, strict=True)))
    size = int(keys.count.sum())
    low, high = int(keys.offset.min()), int((keys.offset + keys.count).max())
    gather, work = None, keys.offset - low  # where each piece begins among the rows kernels read
    merged = docs.prefixes  # else every sequence reads one piece
    apart = len(tiled) > 1 and high - low > 2 * size  # own rows and travelling ones, say
    if apart or (merged and not all(map(_in_place, used))):
        gather = ranges(keys.offset - low, keys.offset - low + keys.count)[0]
        work = np.cumsum(keys.count) - keys.count
    parts: list[list[Sequences]] = [[], [], []]  # causal, inverse causal, full
    at = 0
    for pieces, (_, t) in zip(used, tiled, strict=True):
        border = np.cumsum(pieces.count) - pieces.count  # first working row of each used piece
        first = work[at : at + len(border)]
        at += len(border)
        for kind, seq in zip(parts, (t.causal, t.inverse_causal, t.full), strict=True):
            piece = np.searchsorted(border, seq.k_lo, side="right") - 1
            kind.append(seq._replace(k_lo=first[piece] + seq.k_lo - border[piece]))
    calls = []
    inverse_causal = sum(len(seq.q_lo) for seq in parts[1])
    for causal, sequences in ((True, parts[0] + parts[1]), (False, parts[2])):
        seq = _joined(sequences)
        if len(seq.q_lo):
            q_runs, k_runs = _end_to_end(seq.q_lo, seq.q_n), _end_to_end(seq.k_lo, seq.k_n)
            calls.append(Call(causal, seq, q_runs, k_runs, inverse_causal * causal))
    _, once = np.unique(work, return_index=True)  # read in place, groups share rows
    grads = _in_rounds(work[once], grad[once], keys.count[once])
    return Compute(low, high - low, gather, tuple(calls), grads)
