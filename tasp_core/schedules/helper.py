"""Schedules that move queries: whole ranks' queries and keys meet where neither or one of them lives.

    helper      DistFlashAttn: rank r fetches keys of r - 1, r - 2, ...; early ranks, whose causal work
                is done soonest, take queries of late ranks instead: about n/2 steps, not n - 1
    token_ring  TokenRing: queries travel round the ring, keys stay; (out, lse) goes straight home
    mesh        ranks as rows x columns: queries go along rows, keys along columns, and meet where these
                cross: (columns - 1) queries and (rows - 1) keys a rank, about sqrt(n), not n - 1

Compiled for a layout: pairs of ranks that see nothing of each other exchange nothing. Guests send
what they found straight home; in the backward pass queries travel with the gradient of their output,
dq returns as out did, and dkv on reversed arcs.
Sources: DistFlashAttn (Li et al. 2023); TokenRing (Wang et al. 2024); Mesh-Attention (2025).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..errors import PlanError
from ..layout import Layout
from ..tiles import rank_areas
from .base import DKV, KV, NO_MEETS, OUT, Hops, Meets, Promise, Q, Schedule


class Routes(NamedTuple):
    """A schedule that moves queries: kv, q and out hops, what is computed away, and dkv hops."""

    forward: Hops
    meets: Meets
    returns: Hops


def return_arcs(hops: Hops, ready: np.ndarray) -> Hops:
    """The dkv hops that bring every share's gradient home: each kv arc reversed, as early as can be.

    A rank's contribution can leave in the step after it is computed; what its own receivers send
    back must have arrived.

    Args:
        hops: the kv hops. ready: the compute step of each (rank, owner, share)'s contribution.
    """
    leaves = np.zeros_like(ready)
    for step in np.unique(hops.step)[::-1]:  # children's arcs come later than their parents'
        some = hops.where(hops.step == step)
        at = (some.dst, some.owner, some.share)
        leaves[at] = np.maximum(leaves[at], ready[at] + 1)
        np.maximum.at(leaves, (some.src, some.owner, some.share), leaves[at] + 1)
    step = leaves[hops.dst, hops.owner, hops.share]
    return Hops(step, hops.dst, hops.src, hops.owner, hops.share, np.full_like(step, DKV))


def arrivals(hops: Hops, kind: int, shape: tuple[int, int, int]) -> np.ndarray:
    """The step each (rank, owner, share) arrives in, -1 for what does not travel."""
    table = np.full(shape, -1)
    some = hops.where(hops.kind == kind)
    table[some.dst, some.owner, some.share] = some.step
    return table


def complete(moves: Hops, away: Meets, shape: tuple[int, int, int]) -> Routes:
    """Routes from how kv and q travel and what meets away from home (its steps are found here)."""
    keys = arrivals(moves, KV, shape)
    if not len(away.rank):
        return Routes(moves, NO_MEETS, return_arcs(moves, keys + 1))
    guests = arrivals(moves, Q, shape)
    key, guest = (away.rank, away.owner, away.share), (away.rank, away.q_owner, away.q_share)
    meets = away._replace(step=np.maximum(keys[key], guests[guest]) + 1)
    leaves, ready = np.zeros(shape, dtype=np.int64), keys + 1
    np.maximum.at(leaves, guest, meets.step + 1)
    np.maximum.at(ready, key, meets.step)
    rank, owner, share = np.nonzero(leaves)
    step = leaves[rank, owner, share]
    out = Hops(step, rank, owner, owner, share, np.full_like(step, OUT))
    kv = moves.where(moves.kind == KV)
    return Routes(Hops.concat([moves, out]), meets, return_arcs(kv, ready))


@dataclass(frozen=True)
class Routed(Schedule):
    """A schedule compiled for a layout into Routes."""

    layout: Layout | None = None

    uneven = True

    @property
    def _layout(self) -> Layout:
        if self.layout is None:
            raise PlanError(
                f"schedule {self.name!r} is compiled for a layout; make it with tasp.plan(...)"
            )
        return self.layout

    @cached_property
    @abstractmethod
    def _routes(self) -> Routes:
        """All hops, and what is computed away from home."""

    @property
    def meets(self) -> Meets:
        return self._routes.meets

    def forward(self, rank: int | None) -> Hops:
        return of_rank(self._routes.forward, rank)

    def gradients(self, rank: int | None) -> Hops:
        return of_rank(self._routes.returns, rank)

    def num_steps(self, *, backward: bool = False) -> int:
        step = self.hops(backward=backward).step
        return int(step.max()) + 1 if step.size else 0


@dataclass(frozen=True)
class RankPairs(Routed):
    """One share a rank; where the queries of each pair of ranks meet the keys."""

    buffer: ClassVar[float] = 0.0  # travelling keys and guests, in shards
    guests: ClassVar[float] = 0.0

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
        meets = Meets(zero, worker, a, zero, b, zero).where(away)
        _, step = np.unique(moves.step, return_inverse=True)  # steps without work are merged away
        return complete(moves._replace(step=step), meets, (self.ranks, self.ranks, 1))

    @property
    def promise(self) -> Promise:
        return busiest(self._routes.forward, self.ranks, self.node_size)._replace(
            buffer=self.buffer, guests=self.guests
        )


def of_rank(table: Hops, rank: int | None) -> Hops:
    """The hops that leave or reach a rank; all for None."""
    return table if rank is None else table.where((table.src == rank) | (table.dst == rank))


def busiest(hops: Hops, ranks: int, node_size: int) -> Promise:
    """Most shares a link, and a NIC, carries in a step."""
    inside = hops.src // node_size == hops.dst // node_size
    link = _most(hops.step[inside], hops.src[inside] * ranks + hops.dst[inside])
    across = max(_most(hops.step[~inside], end[~inside]) for end in (hops.src, hops.dst))
    return Promise(link, across, 0.0)


def _most(step: np.ndarray, resource: np.ndarray) -> int:
    """Most shares one resource carries in one step."""
    if not step.size:
        return 0
    return int(np.unique(np.stack([step, resource]), axis=1, return_counts=True)[1].max())


def _direct(step: np.ndarray, src: np.ndarray, dst: np.ndarray, kind: int) -> Hops:
    """Every rank's own keys or queries straight to where they are needed, once each."""
    _, one = np.unique(np.stack([src, dst]), axis=1, return_index=True)
    zero = np.zeros_like(one)
    return Hops(step[one], src[one], dst[one], src[one], zero, np.full_like(one, kind))


class Helper(RankPairs):
    """early ranks help late ones (DistFlashAttn): causal contiguous rows in n/2 steps; moves q"""

    name = "helper"
    buffer, guests = 2.0, 3.0

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
    guests = 3.0  # one arrives, one is computed, what the one before found is sent

    def _moves(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, Hops]:
        n = self.ranks
        far = np.zeros(n, dtype=np.int64)
        np.maximum.at(far, a, (b - a) % n)
        distance, owner = np.arange(n)[None, :], np.arange(n)[:, None]
        hops = Hops.grid(
            Q, distance < far[:, None], distance, (owner + distance) % n,
            (owner + distance + 1) % n, owner, np.array(0),
        )  # fmt: skip
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
    def promise(self) -> Promise:
        return super().promise._replace(buffer=self.rows - 1.0, guests=self.columns - 1.0)

    def _moves(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, Hops]:
        worker = a // self.columns * self.columns + b % self.columns
        along, down = (worker - a) % self.columns, (worker - b) // self.columns % self.rows
        q = _direct(along[along > 0] - 1, a[along > 0], worker[along > 0], Q)
        kv = _direct(down[down > 0] - 1, b[down > 0], worker[down > 0], KV)
        return worker, Hops.concat([kv, q])
