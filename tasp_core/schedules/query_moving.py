"""Schedules that move queries: where the queries of one rank meet the KV of another is a choice.

    helper      DistFlashAttn: rank r receives the KV of r - 1, r - 2, ...; early ranks, which run out of
                causal work first, receive queries of late ranks instead: about n/2 steps, not n - 1
    token_ring  TokenRing: queries travel round the ring, KV stays; (out, lse) goes directly to the owner
    mesh        ranks as rows x columns: queries travel along rows, KV along columns, and they meet where
                these cross: a rank receives the queries of (columns - 1) and the KV of (rows - 1) ranks,
                about 2 sqrt(n) together, where a ring brings it the KV of n - 1

A pair of ranks whose queries do not see each other's KV exchanges nothing.
Sources: DistFlashAttn (Li et al. 2023); TokenRing (Wang et al. 2024); Mesh-Attention (2025).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ..errors import PlanError
from ..machines.machine import Machine
from ..sequence.layouts import Layout
from ..sequence.tiles import rank_areas
from .hops import KV, Hops, OffloadedPairs, Q
from .routed import Routed, Routes, busiest, complete
from .schedule import DeclaredLimits, Example, TokenCounts, option


@dataclass(frozen=True)
class RankPairs(Routed):
    """One share per rank; `_moves` says on which rank the queries of one rank meet the KV of another."""

    # declared limits: as multiples of the largest rank's KV and tokens
    buffer: ClassVar[float] = 0.0
    remote_queries: ClassVar[float] = 0.0

    @property
    def num_shares(self) -> int:
        return 1

    @cached_property
    def _areas(self) -> np.ndarray:
        return rank_areas(self._layout)

    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Ranks (a, b), a != b, where a's queries see some of b's KV."""
        a, b = np.nonzero(self._areas)
        return a[a != b], b[a != b]

    @abstractmethod
    def _moves(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, Hops]:
        """The rank on which a's queries meet b's KV, and the kv and q hops."""

    @cached_property
    def _routes(self) -> Routes:
        a, b = self._pairs()
        worker, moves = self._moves(a, b)
        zero = np.zeros_like(a)
        pairs = OffloadedPairs(zero, worker, a, zero, b, zero).where(worker != a)
        _, step = np.unique(moves.step, return_inverse=True)  # steps without hops are left out
        return complete(moves._replace(step=step), pairs, (self.ranks, self.ranks, 1))

    @property
    def limits(self) -> DeclaredLimits:
        return busiest(self._routes.forward, self.ranks, self.node_size)._replace(
            buffer=self.buffer, remote_queries=self.remote_queries
        )

    def _full_mask_counts(self, layout: Layout, rows: int, columns: int) -> TokenCounts | None:
        """The closed form where all ranks have tokens and see each other's: ranks as rows x columns."""
        docs = layout.docs
        full = docs.prefixes and not docs.causal and len(docs.lengths) == 1
        if not full or layout.counts.min() == 0:
            return None
        kv, queries = (rows - 1) * docs.total, (columns - 1) * docs.total
        limits, largest = self.limits, int(layout.counts.max())
        return TokenCounts(
            kv, kv, queries, limits.buffer * largest, limits.remote_queries * largest
        )


def _direct(step: np.ndarray, src: np.ndarray, dst: np.ndarray, kind: int) -> Hops:
    """Hops of ranks' own KV or queries, each (src, dst) once."""
    _, first = np.unique(np.stack([src, dst]), axis=1, return_index=True)
    zero = np.zeros_like(first)
    return Hops(step[first], src[first], dst[first], src[first], zero, np.full_like(first, kind))


class Helper(RankPairs):
    """early ranks help late ones (DistFlashAttn): causal, contiguous in n/2 steps; moves q"""

    name = "helper"
    order = 100
    compared_as = "DistFlashAttn"
    example = Example("mesh5", steps=4, layout="contiguous")
    buffer, remote_queries = 2.0, 3.0

    def _moves(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, Hops]:
        n, distance = self.ranks, (a - b) % self.ranks
        # b takes a's queries where it would be idle: its own queries see nothing of a's KV
        helps = (a > b) & (2 * distance > n) & (self._areas[b, a] == 0)
        fetch = ~helps
        kv = _direct(distance[fetch] - 1, b[fetch], a[fetch], KV)
        q = _direct(n - distance[helps] - 1, a[helps], b[helps], Q)
        return np.where(helps, b, a), Hops.concat([kv, q])


class TokenRing(RankPairs):
    """queries travel round a ring, KV stays, results return directly (TokenRing); moves q"""

    name = "token_ring"
    order = 110
    example = Example("mesh4", steps=5, layout="contiguous", causal=False)
    remote_queries = 3.0  # one arrives, one is computed, the partial output of one is sent

    def _moves(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, Hops]:
        n = self.ranks
        far = np.zeros(n, dtype=np.int64)
        np.maximum.at(far, a, (b - a) % n)
        distance, owner = np.arange(n)[None, :], np.arange(n)[:, None]
        hops = Hops.grid(
            Q,
            distance < far[:, None],
            distance,
            (owner + distance) % n,
            (owner + distance + 1) % n,
            owner,
            np.array(0),
        )
        return b, hops

    def token_counts(self, layout: Layout) -> TokenCounts | None:
        return self._full_mask_counts(layout, 1, self.ranks)


@dataclass(frozen=True)
class Mesh(RankPairs):
    """ranks as rows x columns: q along rows, KV along columns (Mesh-Attention); moves q"""

    rows: int = option(1, "rows of the mesh of ranks; it must divide them")

    name = "mesh"
    order = 120
    example = Example("mesh6", steps=4, causal=False, options={"rows": 2})

    @classmethod
    def resolve(
        cls, machine: Machine, options: Mapping[str, Any], layout: Layout | None
    ) -> dict[str, Any]:
        """One row per node, so that queries stay inside; on one node as many rows as columns, or nearly."""
        n, u = machine.ranks, machine.num_nodes
        divisors = [r for r in range(1, n + 1) if n % r == 0]
        square = min(divisors, key=lambda r: abs(r - n // r))
        return {"rows": u if u > 1 else square, **options}

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.rows) is not int or self.rows < 1 or self.ranks % self.rows:
            fit = ", ".join(str(r) for r in range(1, self.ranks + 1) if self.ranks % r == 0)
            raise PlanError(f"mesh: rows={self.rows!r} must divide {self.ranks} ranks: use {fit}")

    @property
    def columns(self) -> int:
        """Ranks per row."""
        return self.ranks // self.rows

    @property
    def limits(self) -> DeclaredLimits:
        return super().limits._replace(buffer=self.rows - 1.0, remote_queries=self.columns - 1.0)

    def _moves(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, Hops]:
        worker = a // self.columns * self.columns + b % self.columns
        along, down = (worker - a) % self.columns, (worker - b) // self.columns % self.rows
        q = _direct(along[along > 0] - 1, a[along > 0], worker[along > 0], Q)
        kv = _direct(down[down > 0] - 1, b[down > 0], worker[down > 0], KV)
        return worker, Hops.concat([kv, q])

    def token_counts(self, layout: Layout) -> TokenCounts | None:
        return self._full_mask_counts(layout, self.rows, self.columns)
