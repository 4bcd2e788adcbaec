"""The interface of a schedule, and the register into which every schedule enters itself.

A schedule is one class in one file of this package. The package imports all its files, and a class with
a `name` of its own registers itself, so that a new schedule adds one file and edits no other. It says:

    name, docstring        its public name, and its line in `tasp_core.schedules()`
    option(...) fields     its options: type, default and one line each; plan files hold them
    resolve                values for the options left open, from the machine and the layout
    forward, gradients     the hops of both passes
    offloaded              for one that moves queries: which pairs are computed where, and when
    limits                 loads of links and sizes of buffers; `tasp_core.check` proves them
    token_counts           what is sent and held, in closed form; costs/bytes.py makes bytes of it
    candidates, unsuited   what `tasp_core.select` tries on a machine, or why it tries nothing
    example                a small plan that shows it; the tests run it

tests/test_registered.py proves all this of every registered schedule, a new one too. ring.py is the
shortest file to start from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from ..errors import PlanError, check_int
from ..machines.machine import Machine
from ..sequence.layouts import Layout
from .hops import (
    DKV,
    DQ,
    EXCHANGES,
    KV,
    MOST_PLACES,
    NO_OFFLOADED,
    OUT,
    Hops,
    OffloadedPairs,
    Q,
    arrivals,
)


class DeclaredLimits(NamedTuple):
    """What `check` holds a schedule to, in the forward pass.

    Attributes:
        inside: the most shares that a link between two ranks of one node carries in one step.
        across: the most shares that a rank sends, or receives, over its NIC in one step.
        buffer: the most KV of other ranks that a rank holds, as a multiple of the largest rank's KV.
        remote_queries: the most queries of other ranks that a rank holds, as a multiple of the largest
            rank's tokens.
    """

    inside: int
    across: int
    buffer: float
    remote_queries: float = 0.0


RING_LIMITS = DeclaredLimits(1, 1, 2.0)


class TokenCounts(NamedTuple):
    """What a schedule sends and holds, in tokens and in closed form.

    Attributes:
        kv: tokens whose keys and values all ranks together send, in each of the two passes.
        dkv: tokens whose KV gradients all ranks together send, in the backward pass.
        queries: tokens whose queries travel, and whose partial outputs (backward: dq) return, in
            each of the two passes.
        buffer_kv: the most tokens of other ranks' KV that a rank holds in the forward pass.
        buffer_queries: the most tokens of other ranks' queries that a rank holds in it.
    """

    kv: int
    dkv: int
    queries: int
    buffer_kv: float
    buffer_queries: float


class Option(NamedTuple):
    """An option of a schedule: its name, type ("int", "str", ...), default and one line."""

    name: str
    type: str
    default: Any
    doc: str
    omit_default: bool


def option(default: Any, doc: str, *, omit_default: bool = False) -> Any:
    """A dataclass field that is a public option of a schedule.

    Args:
        default: what a schedule has that is made without it; `resolve` may choose another value.
        doc: one line.
        omit_default: whether plan files and fingerprints leave it out while it has its default. An
            option that is added to a published schedule needs this, or old plan files change.
    """
    return field(default=default, metadata={"doc": doc, "omit_default": omit_default})


class Example(NamedTuple):
    """A small plan that shows what a schedule does.

    Attributes:
        machine: a name that `tasp_core.machine` knows; the plan is for all its ranks.
        steps: communication steps of the forward pass.
        lengths: tokens of each document. causal: the mask. layout: a name of `tasp_core.layouts()`.
        options: of the schedule; what is left out comes from the machine.
    """

    machine: str
    steps: int
    lengths: tuple[int, ...] = (64,)
    causal: bool = True
    layout: str = "zigzag"
    options: Mapping[str, Any] = MappingProxyType({})


SCHEDULES: dict[str, type[Schedule]] = {}  # every registered schedule by name, in `order`


Result = TypeVar("Result")
_CACHES: list[Any] = []
RESERVED = {
    "auto": "it asks `select` for a schedule",
    "table": "plan files call a schedule so that lists its hops",
}


def cached_by_name(maxsize: int) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """`lru_cache` for a function of schedules' names: it forgets all when a class is registered."""

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        cached = lru_cache(maxsize)(function)
        _CACHES.append(cached)
        return cached

    return decorate


@dataclass(frozen=True)
class Schedule(ABC):
    """A communication schedule for `ranks` ranks: hops as a function of rank and direction."""

    ranks: int
    node_size: int
    exchange: str = option(
        "p2p",
        'how a step\'s messages move: "p2p", one message per link, or "all_to_all", one collective',
        omit_default=True,
    )

    name: ClassVar[str] = ""
    order: ClassVar[int] = 1000  # its place in lists; the first is the baseline of comparisons
    example: ClassVar[Example | None] = None
    # the published method that it is, if `select` should always say how long that one would take
    compared_as: ClassVar[str] = ""
    # whether tokens' KV is sent to ranks only that have queries which see it
    sends_only_what_is_needed: ClassVar[bool] = False
    # whether shares differ in size: buffers are then counted in tokens, not in shares
    variable_size: ClassVar[bool] = False
    # whether in every step all ranks send and receive equally much over equivalent routes
    rank_symmetric: ClassVar[bool] = False
    # how much larger a KV receive buffer may be than `limits.buffer`, where subchunks of different
    # sizes do not fit into each other's places
    buffer_slack: ClassVar[float] = 1.0

    def __init_subclass__(cls, *, register: bool = True, **kwargs: Any) -> None:
        """Registers a class that has a `name` of its own; the same class defined again takes its place.

        Raises:
            PlanError: another class has that name, or it is reserved.
        """
        super().__init_subclass__(**kwargs)
        if not register or not cls.__dict__.get("name"):
            return
        if cls.name in RESERVED:
            raise PlanError(f"schedule name {cls.name!r} is reserved: {RESERVED[cls.name]}")
        taken = SCHEDULES.get(cls.name)
        here = (cls.__module__, cls.__qualname__)
        if taken is not None and (taken.__module__, taken.__qualname__) != here:
            raise PlanError(
                f"schedule name {cls.name!r} is taken by {taken.__module__}.{taken.__qualname__}; "
                f"give {cls.__module__}.{cls.__qualname__} another name"
            )
        SCHEDULES[cls.name] = cls
        in_order = sorted(SCHEDULES.items(), key=lambda item: (item[1].order, item[0]))
        SCHEDULES.clear()
        SCHEDULES.update(in_order)
        for cached in _CACHES:  # a notebook's cell that defines the class may run again, changed
            cached.cache_clear()

    @classmethod
    def is_built_in(cls) -> bool:
        """Whether the class is one of this package's; `select` proposes no other by itself."""
        return cls.__module__.startswith(__name__.rpartition(".")[0] + ".")

    @classmethod
    def options_taken(cls) -> tuple[Option, ...]:
        """The options that `schedule_options` may set, in order."""
        return tuple(
            Option(
                f.name,
                f.type if isinstance(f.type, str) else f.type.__name__,
                f.default,
                **f.metadata,
            )
            for f in fields(cls)
            if "doc" in f.metadata
        )

    @classmethod
    def resolve(
        cls, machine: Machine, options: Mapping[str, Any], layout: Layout | None
    ) -> dict[str, Any]:
        """`options`, and values for those left open that suit the machine and the layout.

        Args:
            layout: None where a schedule is built without a plan.
        """
        return dict(options)

    @classmethod
    def resolved(
        cls, machine: Machine, options: Mapping[str, Any] | None, layout: Layout | None
    ) -> dict[str, Any]:
        """All options that are not left at their defaults: those asked for, and `resolve`'s.

        Raises:
            PlanError: an option that the schedule does not have.
        """
        asked = dict(options or {})
        names = [x.name for x in cls.options_taken()]
        unknown = sorted(set(asked) - set(names))
        if unknown:
            raise PlanError(
                f"schedule {cls.name!r} has no option {', '.join(unknown)}; "
                f"it takes {', '.join(names) or 'none'}"
            )
        return cls.resolve(machine, asked, layout)

    @classmethod
    def on(
        cls,
        machine: Machine,
        options: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> Schedule:
        """The schedule on a machine.

        Raises:
            PlanError: an option that the schedule does not have, or a machine it cannot serve.
        """
        schedule = cls(
            machine.ranks, cls.node_size_on(machine), **cls.resolved(machine, options, layout)
        )
        schedule.limits  # noqa: B018  (a schedule that cannot exist on this machine says so here)
        return schedule

    @classmethod
    def node_size_on(cls, machine: Machine) -> int:
        """Ranks of what the schedule treats as one node."""
        return machine.node_size

    @classmethod
    def candidates(cls, machine: Machine, kv_bytes: float) -> Iterable[dict[str, Any]]:
        """The options that `select` tries.

        Args:
            machine: with Ulysses inside, of groups.
            kv_bytes: of one rank's 16-bit keys and values.
        """
        return ({},)

    @classmethod
    def unsuited(cls, machine: Machine) -> str:
        """Why `select` does not try the schedule on a machine by itself; "" where it does."""
        return ""

    def __post_init__(self) -> None:
        """Every schedule passes here, whether options, hop lines, JSON or a pickle make it.

        A subclass with checks of its own calls this one first.

        Raises:
            PlanError: impossible ranks or node size, or an exchange that no executor knows.
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
        """Local borders of a rank's shares, int64 [parts, shares + 1]; share j has slice j of each part."""
        return layout.share_cuts(rank, self.num_shares)

    @property
    @abstractmethod
    def num_shares(self) -> int:
        """Shares into which every rank's KV is cut."""

    @property
    @abstractmethod
    def limits(self) -> DeclaredLimits:
        """The loads and buffers this schedule declares; `check` proves them."""

    @property
    def options(self) -> dict[str, Any]:
        """The resolved options that, with name, ranks and node size, rebuild this schedule."""
        return {
            x.name: getattr(self, x.name)
            for x in self.options_taken()
            if not (x.omit_default and getattr(self, x.name) == x.default)
        }

    def token_counts(self, layout: Layout) -> TokenCounts | None:
        """What is sent and held for a layout in closed form, or None where it depends on the documents.

        Here: every share reaches every other rank once.
        """
        if self.variable_size:
            return None
        visits = (self.ranks - 1) * layout.docs.total
        largest = int(layout.counts.max())
        # shares that do not divide a block differ by a token
        rounding = 2 * self.num_shares * len(self.cuts(layout, 0))
        buffer_kv = self.buffer_slack * self.limits.buffer * largest + rounding
        return TokenCounts(visits, visits, 0, buffer_kv, 0.0)

    @property
    def collective(self) -> str | None:
        """A torch.distributed collective that does step 0, or None for point-to-point messages."""
        return None

    def collective_hops(self, node_size: int) -> Hops:
        """The messages of `collective` where its library sends directly, on nodes of `node_size` ranks."""
        return Hops.concat([])

    @property
    def offloaded(self) -> OffloadedPairs:
        """The pairs computed on another rank than that of their queries."""
        return NO_OFFLOADED

    def own_steps(self, rank: int, *, backward: bool) -> np.ndarray | None:
        """The compute steps in which the queries of the rank's shares meet its own KV, int64 [shares].

        None: the plan decides, see planning/work.py.
        """
        return None

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
        if backward:  # dq returns as partial outputs did
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
class Table(Schedule, register=False):
    """A schedule given hop by hop: for experiments, and for proving that a wrong one is caught."""

    lines: tuple[str, ...] = ()
    shares: int = 1
    claim: DeclaredLimits = RING_LIMITS
    like: Schedule | None = None  # of variable-size shares: the schedule whose cuts it keeps

    name = "table"

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_int(self.shares, "num_shares", 1, PlanError) * self.ranks**2 > MOST_PLACES:
            raise PlanError(
                f"num_shares must be at most {max(1, MOST_PLACES // self.ranks**2)} of {self.ranks} ranks, "
                f"so that a proof fits into memory; got {self.shares}"
            )
        object.__setattr__(self, "claim", read_limits(self.claim))
        if isinstance(self.lines, str) or not isinstance(self.lines, Iterable):
            raise PlanError(f"hops must be words such as 't3 2>5 kv1.4', got {self.lines!r:.80}")
        object.__setattr__(self, "lines", tuple(self.lines))
        self._table  # noqa: B018  (lines that cannot be read say so here)
        if self.like is None:
            return
        if not isinstance(self.like, Schedule) or not self.like.variable_size:
            fit = ", ".join(x.name for x in SCHEDULES.values() if x.variable_size)
            raise PlanError(
                f"like must be a schedule that cuts shares of its own sizes ({fit}), "
                f"got {getattr(self.like, 'name', self.like)!r}; leave it out"
            )
        if (self.like.ranks, self.like.num_shares) != (self.ranks, self.shares):
            raise PlanError(
                f"num_shares is {self.shares} of {self.ranks} ranks; {self.like.name!r}, whose cuts the "
                f"table keeps, has {self.like.num_shares} of {self.like.ranks}: they must be equal"
            )

    @cached_property
    def _table(self) -> Hops:
        return Hops.parse(self.lines)

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
        """Those of the schedule whose cuts it keeps, as early as this table's own arrivals allow."""
        pairs = self.like.offloaded if self.like else NO_OFFLOADED
        hops, ranks = self._table, self.ranks
        known = (hops.dst < ranks) & (hops.owner < ranks) & (hops.share < self.shares)
        if not len(pairs.step) or not known.all():
            return pairs
        shape = (ranks, ranks, self.shares)
        keys = arrivals(hops, KV, shape)[pairs.rank, pairs.owner, pairs.share]
        queries = arrivals(hops, Q, shape)[pairs.rank, pairs.q_owner, pairs.q_share]
        return pairs._replace(step=np.maximum(keys, queries) + 1)

    def own_steps(self, rank: int, *, backward: bool) -> np.ndarray | None:
        steps = self.like.own_steps(rank, backward=backward) if self.like else None
        return (
            steps if steps is None else np.minimum(steps, self.num_steps(backward=backward))
        )  # the table may be shorter

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
        limits = DeclaredLimits(*claim)
    except TypeError:
        raise PlanError(
            f"limits must be {len(names)} numbers, {names}, got {claim!r:.80}"
        ) from None
    for name in names[:2]:
        check_int(getattr(limits, name), f"limits: {name}", 0, PlanError)
    for name in names[2:]:
        value = getattr(limits, name)
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf"):
            raise PlanError(f"limits: {name} must be a finite number >= 0, got {value!r:.80}")
    return DeclaredLimits(
        int(limits.inside), int(limits.across), float(limits.buffer), float(limits.remote_queries)
    )
