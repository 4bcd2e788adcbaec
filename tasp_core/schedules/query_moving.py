"""Schedules that move queries: whole ranks' queries and keys meet where neither or one of them lives.

    helper      DistFlashAttn: rank r fetches keys of r - 1, r - 2, ...; early ranks, whose causal work
                is done soonest, take queries of late ranks instead: about n/2 steps, not n - 1
    token_ring  TokenRing: queries travel round the ring, keys stay; (out, lse) goes straight home
    mesh        ranks as rows x columns: queries go along rows, keys along columns, and meet where these
                cross: (columns - 1) queries and (rows - 1) keys a rank, about sqrt(n), not n - 1

Pairs of ranks that see nothing of each other exchange nothing.
Sources: DistFlashAttn (Li et al. 2023); TokenRing (Wang et al. 2024); Mesh-Attention (2025).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ..errors import PlanError
from ..sequence.tiles import rank_areas
from .hops import KV, Hops, OffloadedPairs, Q
from .routed import Routed, Routes, busiest, complete
from .schedule import DeclaredLimits


@dataclass(frozen=True)
class RankPairs(Routed):
    """One share a rank; where the queries of each pair of ranks meet the keys."""

    buffer: ClassVar[float] = 0.0  # travelling keys and remote queries, in shards
    remote_queries: ClassVar[float] = 0.0

    @property
    def num_shares(self) -> int:
        return 1

    @cached_property
    def _areas(self) -> np.ndarray:
        return rank_areas(self._layout)

    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Ranks (a, b), a != b, where a's queries see some of b's keys."""
        a, b = np.nonzero(self._areas)
        return a[a != b], b[a != b]

    @abstractmethod
    def _moves(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, Hops]:
        """The rank on which a's queries meet b's keys, and the kv and q hops."""

    @cached_property
    def _routes(self) -> Routes:
        a, b = self._pairs()
        worker, moves = self._moves(a, b)
        away, zero = worker != a, np.zeros_like(a)
        meets = OffloadedPairs(zero, worker, a, zero, b, zero).where(away)
        _, step = np.unique(moves.step, return_inverse=True)  # steps without work are merged away
        return complete(moves._replace(step=step), meets, (self.ranks, self.ranks, 1))

    @property
    def limits(self) -> DeclaredLimits:
        return busiest(self._routes.forward, self.ranks, self.node_size)._replace(
            buffer=self.buffer, remote_queries=self.remote_queries
        )


def _direct(step: np.ndarray, src: np.ndarray, dst: np.ndarray, kind: int) -> Hops:
    """Every rank's own keys or queries straight to where they are needed, once each."""
    _, one = np.unique(np.stack([src, dst]), axis=1, return_index=True)
    zero = np.zeros_like(one)
    return Hops(step[one], src[one], dst[one], src[one], zero, np.full_like(one, kind))


class Helper(RankPairs):
    """early ranks help late ones (DistFlashAttn): causal contiguous rows in n/2 steps; moves q"""

    name = "helper"
    buffer, remote_queries = 2.0, 3.0

    def _moves(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, Hops]:
        n, distance = self.ranks, (a - b) % self.ranks
        # b takes a's queries where it would be idle: nothing of a is visible to b
        helps = (a > b) & (2 * distance > n) & (self._areas[b, a] == 0)
        fetch = ~helps
        kv = _direct(distance[fetch] - 1, b[fetch], a[fetch], KV)
        q = _direct(n - distance[helps] - 1, a[helps], b[helps], Q)
        return np.where(helps, b, a), Hops.concat([kv, q])


class TokenRing(RankPairs):
    """queries travel round a ring, keys stay, results go straight home (TokenRing); moves q"""

    name = "token_ring"
    remote_queries = 3.0  # one arrives, one is computed, what the one before found is sent

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


@dataclass(frozen=True)
class Mesh(RankPairs):
    """ranks as rows x columns: q along rows, keys along columns (Mesh-Attention); moves q"""

    rows: int = 1

    name = "mesh"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.rows) is not int or self.rows < 1 or self.ranks % self.rows:
            fit = ", ".join(str(r) for r in range(1, self.ranks + 1) if self.ranks % r == 0)
            raise PlanError(f"mesh: rows={self.rows!r} must divide {self.ranks} ranks: use {fit}")

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "rows": self.rows}

    @property
    def columns(self) -> int:
        """Ranks a row."""
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
