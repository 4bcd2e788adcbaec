"""Hops: the messages that a schedule consists of.

A hop is `(step, src, dst, owner, share, kind)`: in communication step `step`, rank `src` sends rank
`dst` something of share `share` of rank `owner`; a share is one chunk of a rank's tokens. Compute step t
uses what arrived in communication step t - 1. A rank computes on its own KV in compute step 0, unless a
schedule puts that work into steps that have little else to compute.

    kv    the share's keys and values; in the backward pass they travel again by the same hops
    dkv   the sum so far of the gradient of its KV, in the backward pass
    q     its queries (backward: with the gradient of their output), where a schedule moves queries
    out   partial outputs of its queries, (out, lse), directly to their owner
    dq    the gradient of its queries, directly to their owner, in the backward pass
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..errors import PlanError

EXCHANGES = ("p2p", "all_to_all")
KINDS = ("kv", "dkv", "q", "out", "dq")
MOST_PLACES = 1 << 27  # (rank, owner, share) triples of a table that is proved
KV, DKV, Q, OUT, DQ = range(5)


class Hops(NamedTuple):
    """The hop table by column: int64 arrays of equal length, in no particular order."""

    step: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    owner: np.ndarray
    share: np.ndarray
    kind: np.ndarray

    def where(self, mask: np.ndarray) -> Hops:
        """The rows of a boolean mask, or of indices."""
        return Hops(*(column[mask] for column in self))

    def ordered(self) -> Hops:
        """Sorted by step, then link, then what travels: the order both ends agree on."""
        keys = (self.step, self.src, self.dst, self.kind, self.owner, self.share)
        if not len(self.step):
            return self
        shape = [int(key.max()) + 1 for key in keys]
        if math.prod(shape) < 1 << 62 and all(int(key.min()) >= 0 for key in keys):
            # sorting one number is three times as fast as sorting by six
            return self.where(np.argsort(np.ravel_multi_index(keys, shape), kind="stable"))
        return self.where(np.lexsort(keys[::-1]))

    def lines(self) -> list[str]:
        """Each hop as text, "t3 2>5 kv1.4": at step 3 rank 2 sends rank 5 share 4 of rank 1's KV."""
        return [
            f"t{t} {a}>{b} {KINDS[kind]}{owner}.{share}"
            for t, a, b, owner, share, kind in zip(*(c.tolist() for c in self), strict=True)
        ]

    @classmethod
    def parse(cls, lines: Iterable[str]) -> Hops:
        """Read hops from text; `Hops.parse(h.lines())` is `h`.

        Raises:
            PlanError: a line that is not a hop.

        >>> Hops.parse(["t3 2>5 kv1.4"]).lines()
        ['t3 2>5 kv1.4']
        """
        rows = []
        number = "([0-9]{1,18})"  # int64 holds these
        form = re.compile(
            rf"t{number} {number}>{number} ({'|'.join(KINDS)}){number}\.{number}", re.ASCII
        )
        for line in lines:
            match = form.fullmatch(line.strip()) if isinstance(line, str) else None
            if not match:
                raise PlanError(f"cannot read hop {line!r:.80}; a hop looks like 't3 2>5 kv1.4'")
            step, src, dst, kind, owner, share = match.groups()
            rows.append([int(x) for x in (step, src, dst, owner, share)] + [KINDS.index(kind)])
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)

    @classmethod
    def concat(cls, parts: Iterable[Hops]) -> Hops:
        """Tables end to end."""
        parts = list(parts)
        if not parts:
            return cls(*np.zeros((6, 0), dtype=np.int64))
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    @classmethod
    def grid(
        cls,
        kind: int,
        mask: np.ndarray | bool,
        step: np.ndarray,
        src: np.ndarray,
        dst: np.ndarray,
        owner: np.ndarray,
        share: np.ndarray,
    ) -> Hops:
        """Hops of one kind from arrays that broadcast together, where `mask` holds."""
        *columns, keep = np.broadcast_arrays(step, src, dst, owner, share, mask)
        flat = [np.ascontiguousarray(c[keep], dtype=np.int64) for c in columns]
        return cls._make([*flat, np.full(flat[0].shape, kind, dtype=np.int64)])


class OffloadedPairs(NamedTuple):
    """Offloaded attention pairs: queries of (q_owner, q_share) with the KV of (owner, share).

    Rank `rank`, which is not q_owner, computes them in compute step `step`; int64 arrays.
    """

    step: np.ndarray
    rank: np.ndarray
    q_owner: np.ndarray
    q_share: np.ndarray
    owner: np.ndarray
    share: np.ndarray

    def where(self, mask: np.ndarray) -> OffloadedPairs:
        """The rows of a boolean mask, or of indices."""
        return OffloadedPairs(*(column[mask] for column in self))


def arrivals(hops: Hops, kind: int, shape: tuple[int, int, int]) -> np.ndarray:
    """The step in which a share arrives at a rank, int64 [rank, owner, share]; -1 where it never does."""
    table = np.full(shape, -1)
    hops = hops.where(hops.kind == kind)
    table[hops.dst, hops.owner, hops.share] = hops.step
    return table


NO_OFFLOADED = OffloadedPairs(*np.zeros((6, 0), dtype=np.int64))
