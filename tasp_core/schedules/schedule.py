"""The interface of a schedule: a table of hops, and what it declares about links and buffers.

A schedule that moves queries says in `meets` what is computed away from home, where and when.
A new schedule is one file with a subclass of `Schedule`, named in schedules/__init__.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ..errors import PlanError, check_int
from ..sequence.layouts import Layout
from .hops import DKV, DQ, EXCHANGES, KV, MOST_PLACES, NO_OFFLOADED, OUT, Hops, OffloadedPairs, Q


class DeclaredLimits(NamedTuple):
    """What `check` holds a schedule to, in the forward pass.

    Attributes:
        inside: most shares a link between two ranks of one node carries in a step.
        across: most shares a rank sends, or takes in, over its NIC in a step.
        buffer: most travelling KV a rank holds, as a multiple of the largest rank's KV.
        remote_queries: most queries of other ranks it holds, as a multiple of the largest rank's tokens.
    """

    inside: int
    across: int
    buffer: float
    remote_queries: float = 0.0


RING_LIMITS = DeclaredLimits(1, 1, 2.0)


@dataclass(frozen=True)
class Schedule(ABC):
    """A communication schedule for `ranks` ranks: hops as a function of rank and direction."""

    ranks: int
    node_size: int
    exchange: str = "p2p"  # or "all_to_all": each step is one collective for each kind

    name = ""
    variable_size = False  # shares differ in size: memory is counted in tokens, not in shares
    rank_symmetric = (
        False  # whether in every step all ranks send and receive as much, over alike routes
    )

    def __post_init__(self) -> None:
        """Every schedule passes here, whether options, words, JSON or a pickle make it.

        A subclass with checks of its own calls this one first.

        Raises:
            PlanError: ranks or node size that cannot be, or an exchange that no executor knows.
        """
        ranks = check_int(self.ranks, f"schedule {self.name!r}: ranks", 1, PlanError)
        node_size = check_int(self.node_size, f"schedule {self.name!r}: node_size", 1, PlanError)
        if ranks % node_size:
            raise PlanError(
                f"schedule {self.name!r}: node_size must divide {ranks} ranks, got {node_size}"
            )
        if not isinstance(self.exchange, str) or self.exchange not in EXCHANGES:
            raise PlanError(
                f"schedule {self.name!r}: exchange must be one of {EXCHANGES}, got {self.exchange!r}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (type(self), {f.name: getattr(self, f.name) for f in fields(self)})

    def cuts(self, layout: Layout, rank: int) -> np.ndarray:
        """Local borders of a rank's shares, int64 [parts, num_shares + 1]: share j has part j of each."""
        return layout.share_cuts(rank, self.num_shares)

    @property
    @abstractmethod
    def num_shares(self) -> int:
        """Shares into which every rank's KV is cut."""

    @property
    @abstractmethod
    def limits(self) -> DeclaredLimits:
        """The loads and buffers this schedule claims; `check` proves them."""

    @property
    def options(self) -> dict[str, Any]:
        """The resolved options that, with name, ranks and node size, rebuild this schedule."""
        return {} if self.exchange == "p2p" else {"exchange": self.exchange}

    @property
    def collective(self) -> str | None:
        """A torch.distributed collective that does step 0, or None for point-to-point messages."""
        return None

    @property
    def offloaded(self) -> OffloadedPairs:
        """What is computed away from home; all else is where the queries are, when keys arrive."""
        return NO_OFFLOADED

    def own_steps(self, rank: int) -> np.ndarray:
        """For each share of the rank's queries: the compute step in which they meet its own keys."""
        return np.zeros(self.num_shares, dtype=np.int64)

    @abstractmethod
    def forward(self, rank: int | None) -> Hops:
        """The kv, q and out hops; of one rank (as sender or receiver), or all."""

    @abstractmethod
    def gradients(self, rank: int | None) -> Hops:
        """The dkv hops of the backward pass; of one rank, or all."""

    def hops(self, rank: int | None = None, *, backward: bool = False) -> Hops:
        """The hop table of a pass, in the order both ends of a link agree on."""
        if rank is not None and not 0 <= rank < self.ranks:
            raise PlanError(f"rank {rank} does not exist: ranks are 0..{self.ranks - 1}")
        table = self.forward(rank)
        if backward:  # dq comes home as out did
            kind = np.where(table.kind == OUT, DQ, table.kind)
            table = Hops.concat([table._replace(kind=kind), self.gradients(rank)])
        return table.ordered()

    def num_steps(self, *, backward: bool = False) -> int:
        """Communication steps of a pass."""
        step = self.hops(0, backward=backward).step
        return int(step.max()) + 1 if step.size else 0

    def kinds(self, *, backward: bool = False) -> tuple[int, ...]:
        """What moves in a pass, on any rank: all ranks take part in collectives of these kinds."""
        if len(self.offloaded.step):
            return _kinds(self.hops(backward=backward))
        return (KV, DKV) if backward else (KV,)


def _kinds(hops: Hops) -> tuple[int, ...]:
    return tuple(np.unique(hops.kind).tolist())


def _remake(cls: type[Schedule], values: dict[str, Any]) -> Schedule:
    """A schedule from a pickle: made anew, so that it is checked as any other."""
    return cls(**values)


@dataclass(frozen=True)
class Table(Schedule):
    """A schedule given hop by hop: for experiments, and for proving that a wrong one is caught."""

    words: tuple[str, ...] = ()
    shares: int = 1
    claim: DeclaredLimits = RING_LIMITS
    like: Schedule | None = None  # whose cuts of tokens into shares it keeps, where they are uneven

    name = "table"

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_int(self.shares, "num_shares", 1, PlanError) * self.ranks**2 > MOST_PLACES:
            raise PlanError(
                f"num_shares must be at most {max(1, MOST_PLACES // self.ranks**2)} of {self.ranks} ranks, "
                f"so that a proof fits into memory; got {self.shares}"
            )
        object.__setattr__(self, "claim", read_limits(self.claim))
        if isinstance(self.words, str) or not isinstance(self.words, Iterable):
            raise PlanError(f"hops must be words such as 't3 2>5 kv1.4', got {self.words!r:.80}")
        object.__setattr__(self, "words", tuple(self.words))
        self._table  # noqa: B018  (words that cannot be read say so here)
        if self.like is None:
            return
        if not isinstance(self.like, Schedule) or not self.like.variable_size:
            raise PlanError(
                "like must be a schedule that cuts shares of its own sizes (sap, helper, mesh, "
                f"token_ring), got {getattr(self.like, 'name', self.like)!r}; leave it out"
            )
        if (self.like.ranks, self.like.num_shares) != (self.ranks, self.shares):
            raise PlanError(
                f"num_shares is {self.shares} of {self.ranks} ranks; {self.like.name!r}, like which the "
                f"tokens are cut, has {self.like.num_shares} of {self.like.ranks}: they must be equal"
            )

    @cached_property
    def _table(self) -> Hops:
        return Hops.parse(self.words)

    @property
    def variable_size(self) -> bool:  # type: ignore[override]
        return self.like is not None

    def cuts(self, layout: Layout, rank: int) -> np.ndarray:
        return self.like.cuts(layout, rank) if self.like else super().cuts(layout, rank)

    @property
    def num_shares(self) -> int:
        return self.shares

    @property
    def limits(self) -> DeclaredLimits:
        return self.claim

    @property
    def offloaded(self) -> OffloadedPairs:
        return self.like.offloaded if self.like else NO_OFFLOADED

    def own_steps(self, rank: int) -> np.ndarray:
        if self.like is None:
            return super().own_steps(rank)
        return np.minimum(self.like.own_steps(rank), self.num_steps())  # the table may be shorter

    def _rows(self, kinds: tuple[int, ...], rank: int | None) -> Hops:
        table = self._table
        mine = True if rank is None else (table.src == rank) | (table.dst == rank)
        return table.where(np.isin(table.kind, kinds) & mine)

    def forward(self, rank: int | None) -> Hops:
        table = self._rows((KV, Q, OUT, DQ), rank)
        return table._replace(kind=np.where(table.kind == DQ, OUT, table.kind))

    def gradients(self, rank: int | None) -> Hops:
        return self._rows((DKV,), rank)

    def num_steps(self, *, backward: bool = False) -> int:
        step = self.hops(backward=backward).step
        return int(step.max()) + 1 if step.size else 0

    def kinds(self, *, backward: bool = False) -> tuple[int, ...]:
        return _kinds(self.hops(backward=backward))


def read_limits(claim: Any) -> DeclaredLimits:
    """Limits whose values are numbers in range.

    Raises:
        PlanError: loads that are not whole numbers >= 0, or buffers that are not finite numbers >= 0.
    """
    names = DeclaredLimits._fields
    try:
        given = DeclaredLimits(*claim)
    except TypeError:
        raise PlanError(
            f"limits must be {len(names)} numbers, {names}, got {claim!r:.80}"
        ) from None
    for name in names[:2]:
        check_int(getattr(given, name), f"limits: {name}", 0, PlanError)
    for name in names[2:]:
        value = getattr(given, name)
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf"):
            raise PlanError(f"limits: {name} must be a finite number >= 0, got {value!r:.80}")
    return DeclaredLimits(
        int(given.inside), int(given.across), float(given.buffer), float(given.remote_queries)
    )
