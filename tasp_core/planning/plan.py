"""Plan: documents + layout + schedule. What is drawn, proved, predicted and run is this one object.

    >>> from tasp_core import plan
    >>> p = plan(Documents.of([5, 7]), ranks=3, schedule="ring", layout="contiguous")
    >>> print(p)
    plan: ring x contiguous, 3 ranks, 12 tokens in 2 documents, causal; 1 share per rank, 2 steps
    step  into 0    into 1    into 2
    0     2>kv2.0   0>kv0.0   1>kv1.0
    1     2>kv1.0   0>kv2.0   1>kv0.0
    >>> p.hops().lines()[0], Plan.from_json(p.to_json()) == p
    ('t0 0>1 kv0.0', True)

A layout holds a rank's tokens in one or more blocks, and every block is cut into as many parts as there
are shares. Share j is part j of each block. One of these parts is a sub-chunk: a contiguous run of local
tokens. A zigzag share has two, one of the front block and one of the back block.

Everything here is NumPy; no tensor library is imported.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import LayoutError, PlanError, check_int
from ..machines.machine import Machine
from ..machines.presets import MESH
from ..machines.presets import machine as find_machine
from ..schedules import KINDS, DeclaredLimits, Hops, Schedule, Table, build
from ..schedules.routed import busiest
from ..schedules.schedule import cached_by_name
from ..sequence.documents import Documents
from ..sequence.layouts import Layout, Pieces
from .plan_file import (
    MOST_RANKS,
    mask_slices,
    read_documents,
    read_json,
    read_layout,
    read_machine,
    read_schedule,
    spec,
)

SCHEMA = 1
MOST_TOKENS = 1 << 31
MOST_WINDOW = 1 << 60
OVER_NODES = " over nodes"  # ends the name of a machine of groups that are several nodes each
MOST_IDLE = 16  # steps without hops that a table shows one by one


@dataclass(frozen=True)
class Plan:
    """How the attention of one packed sequence is computed on `ranks` ranks; frozen, hashable, picklable.

    Build it with `plan(...)`.

    Attributes:
        docs: the documents and their mask.
        layout, schedule, machine: with `intra` above 1 they are those between groups: what they call a
            rank is a group of `intra` ranks.
        intra: the Ulysses degree.
    """

    docs: Documents
    layout: Layout
    schedule: Schedule
    machine: Machine
    intra: int = 1

    def __post_init__(self) -> None:
        """Every plan passes here, whether options, hop lines, JSON or a pickle make it.

        Raises:
            PlanError: parts that do not belong together; more ranks or tokens than can be counted.
        """
        intra = check_int(self.intra, "intra", 1, PlanError)
        n = self.layout.ranks
        if n * intra > MOST_RANKS:
            raise PlanError(f"a plan has at most {MOST_RANKS} ranks, got {n} groups of {intra}")
        if self.docs.total > MOST_TOKENS:
            raise PlanError(
                f"a plan has at most {MOST_TOKENS} tokens, so that pairs can be counted; "
                f"the packed sequence has {self.docs.total}"
            )
        if (self.docs.window or 0) > MOST_WINDOW:
            raise PlanError(f"a window is at most {MOST_WINDOW} tokens, got {self.docs.window}")
        for what, ranks in (("schedule", self.schedule.ranks), ("machine", self.machine.ranks)):
            if ranks != n:
                raise PlanError(f"the {what} is for {ranks} ranks, the layout for {n}")
        if self.layout.docs != self.docs:
            raise PlanError(
                "the layout is of other documents than the plan; make it with tasp.plan"
            )
        node_size = n if self.schedule.collective else self.machine.node_size
        if n > 1 and self.schedule.node_size != node_size:
            raise PlanError(
                f"the schedule is for nodes of {self.schedule.node_size} ranks, "
                f"the machine has nodes of {node_size}"
            )
        like = self.schedule.like if isinstance(self.schedule, Table) else self.schedule
        compiled = getattr(like, "layout", None)
        if compiled not in (None, self.layout):
            raise PlanError(
                f"the schedule is compiled for layout {compiled.name!r} of other tokens; "
                "make it with tasp.plan"
            )

    @property
    def ranks(self) -> int:
        """Ranks that the plan is for: `intra` for each rank of `context_plan`."""
        return self.layout.ranks * self.intra

    @cached_property
    def context_plan(self) -> Plan:
        """The plan between Ulysses groups, each of which it treats as one rank; itself where intra is 1."""
        return self if self.intra == 1 else replace(self, intra=1)

    def member_tokens(self, group: int) -> np.ndarray:
        """Which tokens of a group each member holds, int64 [intra + 1].

        Member i holds local tokens border[i] to border[i + 1] - 1 of the group.
        """
        return self.layout.num_tokens(group) * np.arange(self.intra + 1) // self.intra

    def tokens(self, rank: int) -> np.ndarray:
        """Global token ids of a rank in local order, int64: row i of its q, k, v is this token.

        Raises:
            LayoutError: the rank does not exist.
        """
        group, member = divmod(self._rank(rank), self.intra)
        low, high = self.member_tokens(group)[member : member + 2]
        return self.layout.tokens(group)[low:high]

    def positions(self, rank: int) -> np.ndarray:
        """Position of each of the rank's tokens inside its document (for rotary embeddings), int64."""
        return self.docs.positions(self.tokens(rank))

    def num_tokens(self, rank: int) -> int:
        """Number of tokens that a rank holds.

        Raises:
            LayoutError: the rank does not exist.
        """
        group, member = divmod(self._rank(rank), self.intra)
        low, high = self.member_tokens(group)[member : member + 2]
        return int(high - low)

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise LayoutError(f"rank {rank} does not exist: ranks are 0..{self.ranks - 1}")
        return rank

    def locate(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rank that holds each global token, and the token's local index there; int64 arrays."""
        group, row = self.layout.locate(tokens)
        if self.intra == 1:
            return group, row
        borders = np.stack([self.member_tokens(g) for g in range(self.layout.ranks)])[group]
        member = (row[:, None] >= borders[:, 1:]).sum(axis=1)
        return group * self.intra + member, row - borders[np.arange(len(row)), member]

    def hops(self, rank: int | None = None, *, backward: bool = False) -> Hops:
        """The hop table of the forward or backward pass, of one rank or all.

        With `intra` above 1 it is between groups, and `rank` is a group's number.

        Raises:
            PlanError: the rank, or group, does not exist.
        """
        if rank is not None and not 0 <= rank < self.layout.ranks:
            what = "rank" if self.intra == 1 else f"group of {self.intra} ranks"
            raise PlanError(
                f"{what} {rank} does not exist: {what.split()[0]}s are 0..{self.layout.ranks - 1}"
            )
        return self.schedule.hops(rank, backward=backward)

    def with_hops(
        self,
        hops: Iterable[str],
        *,
        num_shares: int | None = None,
        limits: DeclaredLimits | None = None,
    ) -> Plan:
        """The same plan with other hops, kv and dkv, as lines of text; prove it with `check`."""
        old = self.schedule
        shares = old.num_shares if num_shares is None else num_shares
        if old.variable_size and shares != old.num_shares:
            raise PlanError(
                "num_shares cannot change: this schedule's shares have sizes of their own"
            )
        like = old.like if isinstance(old, Table) else old if old.variable_size else None
        if limits is None:
            limits = old.limits
            if old.collective:  # its hops are single messages, over the machine's links and NICs
                buffer = limits.buffer
                limits = busiest(old.hops(), old.ranks, self.machine.node_size)
                limits = limits._replace(buffer=buffer)
        table = Table(
            self.layout.ranks,
            self.machine.node_size,
            old.exchange,
            tuple(hops),
            check_int(shares, "num_shares", 1, PlanError),
            limits,
            like,
        )
        return replace(self, schedule=table)

    @cached_property
    def subchunks(self) -> Subchunks:
        """The sub-chunks of every rank's shares, and the pieces of documents in them."""
        return cut_subchunks(self.layout, self.schedule)

    def subchunk_of(self, hops: Hops, part: int) -> np.ndarray:
        """Number of the sub-chunk in block `part` that each hop moves, int64 [hops]; see `Subchunks`."""
        return (hops.owner * self.subchunks.parts + part) * self.schedule.num_shares + hops.share

    def amounts(self, hops: Hops) -> tuple[np.ndarray, int]:
        """What each hop moves, int64 [hops], and the most that a rank holds.

        In tokens where the schedule is variable-size, else in shares.
        """
        if not self.schedule.variable_size:
            return np.ones_like(hops.share), self.schedule.num_shares
        return self.tokens_moved(hops), max(1, int(self.layout.counts.max()))

    def tokens_moved(self, hops: Hops) -> np.ndarray:
        """Number of tokens that each hop moves, int64 [hops]."""
        parts = range(self.subchunks.parts)
        return np.sum([self.subchunks.count[self.subchunk_of(hops, p)] for p in parts], axis=0)

    @cached_property
    def derived(self) -> dict[str, Any]:
        """What other modules have worked out for this plan and keep with it, by a name of theirs."""
        return {}

    @cached_property
    def _digest(self) -> str:
        mask = [self.docs.causal, self.docs.window, *mask_slices(self.docs).values()]
        text = json.dumps([SCHEMA, spec(self), mask], sort_keys=True).encode()
        return hashlib.sha256(text + self.docs.cu_seqlens.astype("<i8").tobytes()).hexdigest()

    def fingerprint(self) -> str:
        """Hex digest, equal on two ranks iff they have the same documents, layout and schedule."""
        return self._digest

    def to_json(self) -> str:
        """JSON text that `Plan.from_json` reads back to an equal plan."""
        documents = {
            "cu_seqlens": self.docs.cu_seqlens.tolist(),
            "causal": self.docs.causal,
            "window": self.docs.window,
            **mask_slices(self.docs),
        }
        machine = asdict(self.machine)
        return json.dumps(
            {
                "schema": SCHEMA,
                "documents": documents,
                **spec(self),
                "world_size": self.ranks,
                "machine": machine,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read `to_json` text.

        Raises:
            PlanError: not a plan, another schema version, or values that no plan can have.
        """
        data = read_json(text, SCHEMA)
        docs, machine = read_documents(data), read_machine(data)
        layout = read_layout(data, docs)
        return cls(docs, layout, read_schedule(data, machine, layout), machine, data["intra"])

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.docs, self.layout, self.schedule, self.machine, self.intra)

    def __eq__(self, other: object) -> bool:
        # a schedule's class may be defined again, in a notebook: its name is the same, its hops are not
        return (
            isinstance(other, Plan)
            and self._digest == other._digest
            and type(self.schedule) is type(other.schedule)
        )

    def __hash__(self) -> int:
        return hash(self._digest)

    def summary(self) -> str:
        """One line: what the plan is."""
        docs, shares = self.docs, self.schedule.num_shares
        num = len(docs.lengths)
        steps = self.schedule.num_steps()
        mask = "causal" if docs.causal else "full"
        mask += "" if docs.window is None else f" in a window of {docs.window}"
        if docs.slices is not None:
            mask = f"a mask of {len(docs.slices)} slice{'s' * (len(docs.slices) != 1)}"
        return (
            f"plan: {self.schedule.name} x {self.layout.name}, {self.ranks} ranks, {docs.total} tokens "
            f"in {num} document{'s' * (num != 1)}, {mask}; "
            f"{shares} share{'s' * (shares != 1)} per rank, {steps} steps{self._inside()}"
        )

    def _inside(self) -> str:
        if self.intra == 1:
            return ""
        last = self.layout.ranks - 1
        return (
            f"; heads over groups of {self.intra} ranks, the table is between {last + 1} groups: "
            f"{self.name_of(last)}"
        )

    def name_of(self, number: int) -> str:
        """What a number in hops and tables means: "rank 3", or "group 3 (ranks 6..7)" where intra is 2."""
        if self.intra == 1:
            return f"rank {number}"
        return f"group {number} (ranks {number * self.intra}..{(number + 1) * self.intra - 1})"

    def table(self, *, backward: bool = False, mark: int | None = None, width: int = 4) -> str:
        """The step x rank table: what each rank receives, "src>kvOWNER.SHARE"; `mark` points at a step.

        A cell shows at most `width` hops, then "+k" for k more; many steps without hops are one line.
        """
        hops = self.hops(backward=backward)
        used = np.unique(hops.step).tolist()
        cells: dict[tuple[int, int], list[str]] = {}
        rows = zip(*(c.tolist() for c in hops), strict=True)
        for step, src, dst, owner, share, kind in rows:
            cells.setdefault((step, dst), []).append(f"{src}>{KINDS[kind]}{owner}.{share}")
        into = "into" if self.intra == 1 else "into group"
        lines = [["step", *(f"{into} {r}" for r in range(self.layout.ranks))]]
        for before, step in zip([-1, *used], used, strict=False):
            if step - before > MOST_IDLE:
                lines.append(["...", *["-"] * self.layout.ranks])
                before = step - 1
            for t in range(before + 1, step + 1):
                row = [f"{t}" + (" <--" if t == mark else "")]
                for rank in range(self.layout.ranks):
                    lines_here = cells.get((t, rank), ["-"])
                    more = f" +{len(lines_here) - width}" if len(lines_here) > width else ""
                    row.append(" ".join(lines_here[:width]) + more)
                lines.append(row)
        widths = [max(8, *(len(x) for x in column)) + 2 for column in zip(*lines, strict=True)]
        widths[0] = max(6, *(len(line[0]) + 2 for line in lines))
        text = ("".join(x.ljust(w) for x, w in zip(line, widths, strict=True)) for line in lines)
        return "\n".join(line.rstrip() for line in text)

    def __str__(self) -> str:
        return f"{self.summary()}\n{self.table()}"


def make_plan(
    docs: Documents | Iterable[int],
    ranks: int,
    *,
    schedule: str = "tasp",
    layout: str = "zigzag",
    machine: Machine | str | None = None,
    intra: int = 1,
    schedule_options: Mapping[str, Any] | None = None,
) -> Plan:
    """`tasp_core.plan` for a named schedule and a named layout.

    Raises:
        PlanError, LayoutError, TopologyError: what was asked, what was found, what to do.
    """
    ranks = check_int(ranks, "ranks", 1, PlanError)
    if not isinstance(docs, Documents):
        docs = Documents.of(docs)
    intra = check_int(intra, "intra", 1, PlanError)
    groups = between_groups(resolve_machine(machine, ranks), intra)
    try:
        options = tuple(sorted((schedule_options or {}).items()))
        return _planned(docs, schedule, layout, groups, intra, options)
    except TypeError:  # an option that is not hashable: `build` says why it is wrong
        placed = Layout(layout, docs, groups.ranks)
        return Plan(docs, placed, build(schedule, groups, schedule_options, placed), groups, intra)


@cached_by_name(maxsize=32)
def _planned(
    docs: Documents,
    schedule: str,
    layout: str,
    machine: Machine,
    intra: int,
    options: tuple[tuple[str, Any], ...],
) -> Plan:
    """A plan on the machine between groups; asked again, the same object with all that it has cached."""
    placed = _laid_out(layout, docs, machine.ranks)
    return Plan(docs, placed, build(schedule, machine, dict(options), placed), machine, intra)


@lru_cache(maxsize=32)
def _laid_out(layout: str, docs: Documents, ranks: int) -> Layout:
    """One object for plans that differ in their schedules only, so that they share what it has cached."""
    return Layout(layout, docs, ranks)


def resolve_machine(machine: Machine | str | None, ranks: int) -> Machine:
    """A machine of `ranks` ranks: the given one, a named one, or one full mesh.

    Raises:
        PlanError: it has another number of ranks.
    """
    if machine is None:
        return replace(MESH, name=f"mesh{ranks}", node_size=ranks)
    resolved = machine if isinstance(machine, Machine) else find_machine(machine)
    if resolved.ranks != ranks:
        raise PlanError(
            f"machine {resolved.name!r} has {resolved.ranks} ranks ({resolved.num_nodes} nodes of "
            f"{resolved.node_size}), the plan is for {ranks}; give a machine with {ranks} ranks"
        )
    return resolved


def between_groups(machine: Machine, intra: int) -> Machine:
    """The machine of which each group of `intra` consecutive ranks is one rank.

    A group lies inside a node, or it is several whole nodes; then every group is a node of its own.

    Raises:
        PlanError: groups that are neither; names the degrees that fit.
    """
    m, n = machine.node_size, machine.ranks
    if intra == 1:
        return machine
    if intra > m and machine.homogeneous and intra % m == 0 and n % intra == 0:
        name = f"{machine.name}/{intra}{OVER_NODES}"
        return replace(machine, name=name, node_size=1, num_nodes=n // intra)
    if m % intra:
        fit = [a for a in range(1, m + 1) if m % a == 0]
        if machine.homogeneous:
            fit += [a for a in range(2 * m, n + 1, m) if n % a == 0]
        not_nodes = "are not whole nodes" if machine.homogeneous else "span nodes that differ"
        raise PlanError(
            f"intra={intra} does not divide the {m} ranks of a node of {machine.name!r}, and groups of "
            f"{intra} ranks {not_nodes}; use one of {', '.join(map(str, fit))}"
        )
    name = f"{machine.name}/{intra}"
    if machine.homogeneous:
        return replace(machine, name=name, node_size=m // intra)
    # members of a group work side by side: the slowest one's link or NIC is their group's
    slowest: dict[str, float] = {}
    for resource, gbps in machine.overrides:
        group = re.sub(r"\d+", lambda r: str(int(r[0]) // intra), resource)
        ends = set(re.findall(r"\d+", group))
        if not resource.startswith("bus") and len(ends) > resource.startswith("link"):
            slowest[group] = min(gbps, slowest.get(group, gbps))
    nic_gbps = machine.nic_gbps * (machine.nics or m) / m
    return replace(
        machine,
        name=name,
        node_size=m // intra,
        nic_gbps=nic_gbps,
        nics=0,
        buses=(),
        overrides=tuple(slowest.items()),
    )


class Subchunks(NamedTuple):
    """All sub-chunks of a plan: the part of one share in one block, a contiguous run of the owner's tokens.

    The number of a sub-chunk is ((owner * parts) + part) * shares + share.

    Attributes:
        parts: sub-chunks per share, as many as the layout has blocks.
        low, count: first local token of each sub-chunk in its owner, and its tokens.
        first: pieces first[u] .. first[u + 1] - 1 make up sub-chunk u, in local order.
        pieces: each inside one document; offsets count from the beginning of the sub-chunk.
    """

    parts: int
    low: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count
    first: np.ndarray
    pieces: Pieces


def cut_subchunks(layout: Layout, schedule: Schedule) -> Subchunks:
    """Every rank's tokens cut into sub-chunks, and those into pieces of documents."""
    shares = schedule.num_shares
    lows, counts, numbers, pieces = [], [], [], []
    for rank in range(layout.ranks):
        cuts = schedule.cuts(layout, rank)
        low = cuts[:, :-1].ravel()
        part = layout.pieces(rank, np.unique(cuts))
        # empty sub-chunks begin where the next one does; the last of those holds the tokens
        number = np.searchsorted(low, part.offset, side="right") - 1
        lows.append(low)
        counts.append(np.diff(cuts, axis=1).ravel())
        numbers.append(number + rank * len(low))
        pieces.append(part._replace(offset=part.offset - low[number]))
    low = np.concatenate(lows)
    first = np.zeros(len(low) + 1, dtype=np.int64)
    np.cumsum(np.bincount(np.concatenate(numbers), minlength=len(low)), out=first[1:])
    joined = Pieces(*(np.concatenate(columns) for columns in zip(*pieces, strict=True)))
    return Subchunks(
        len(low) // (shares * layout.ranks), low, np.concatenate(counts), first, joined
    )
