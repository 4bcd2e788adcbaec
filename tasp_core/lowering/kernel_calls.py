"""Kernel calls: groups of queries and of the KV they attend to, as one FULL and one CAUSAL call.

Most steps have one group: the rank's own queries and the KV that has just arrived. Where queries move, a
remote query may attend to other KV than the rank's own queries do; its sequences join the same two calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..sequence.documents import Documents
from ..sequence.layouts import Pieces, ranges
from ..sequence.tiles import Sequences, take, tile
from .buffers import in_rounds
from .program import Attend, Call, call_of


class Group(NamedTuple):
    """Queries and the KV that all of them attend to; offsets are rows of `q` and of `kv`."""

    queries: Pieces
    keys: Pieces
    grad: np.ndarray  # first `dkv` row of each KV piece


def _in_place(keys: Pieces) -> bool:
    """Whether each document's pieces lie end to end."""
    follows = keys.offset[1:] == keys.offset[:-1] + keys.count[:-1]
    return bool((follows | (keys.doc[1:] != keys.doc[:-1])).all())


def _joined(parts: Iterable[Sequences]) -> Sequences:
    return Sequences(*(np.concatenate(c) for c in zip(*parts, strict=True)))


def attend(groups: list[Group], docs: Documents, step: int, *, backward: bool) -> Attend | None:
    """What a step computes; None where no query sees any key.

    KV rows are read in place where the pieces of each document lie end to end, else gathered first.
    """
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
    merged = docs.window_size is None  # else every sequence reads one piece
    apart = len(tiled) > 1 and high - low > 2 * size  # own rows and received ones, say
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
    calls: list[Call] = []
    inverse_causal = sum(len(seq.q_lo) for seq in parts[1])
    for causal, sequences in ((True, parts[0] + parts[1]), (False, parts[2])):
        seq = _joined(sequences)
        if len(seq.q_lo):
            calls.append(call_of(causal, seq, inverse_causal * causal))
    if not backward:
        return Attend(step, low, high - low, gather, tuple(calls), ())
    _, first_of = np.unique(work, return_index=True)  # read in place, groups share rows
    grads = in_rounds(work[first_of], grad[first_of], keys.count[first_of])
    return Attend(step, low, high - low, gather, tuple(calls), grads, backward=True)
