"""SAP, sequence-aware parallelism: every rank's own list of transfers, compiled from the documents.

The documents of a packed sequence and its layout determine which tokens the queries of each rank see.
Every rank's KV is cut into shares where the set of ranks that see it changes (requirements.py), so that
nothing travels that nobody needs. Ranks without a common document exchange nothing.

    one node        a share goes from its owner directly to each rank that needs it
    relay=4         on a full mesh: over four steps, some shares through a third rank whose links are
                    idle (two_hop.py)
    several nodes   a share goes once to each other node, to its ingress rank: the rank on the owner's
                    rail if it needs the share, else the next one that does; the ingress rank sends it
                    on to its node peers

A layout may leave ranks with unequal work, and tokens may not be permuted (`contiguous`). Then queries of
busy ranks are computed on other ranks (`move_q`; offload.py), and their partial outputs return.

A rank receives at most `buffer_tokens` tokens per step, and what arrives is spread so that each step has
the same work (arrivals.py); work on a rank's own KV fills what is left (own_work.py). Gradients return over
the reversed arcs and are added up on the way. Source: the idea of HSAP (arXiv 2606.30460); the compilation
rules are this project's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...errors import PlanError, check_int
from ...machines.machine import Machine
from ...machines.presets import MESH, PRESETS
from ...sequence.layouts import Layout
from ..counts import load_rows, load_table
from ..hops import DQ, KV, NO_OFFLOADED, OUT, Hops, OffloadedPairs, Q
from ..own_work import Messages, OwnWork, Pass, Prices, place_own
from ..routed import Routed, Routes, busiest, complete
from ..schedule import DeclaredLimits, Example, Schedule, option
from .arrivals import Arrivals, place_arrivals
from .offload import offload
from .requirements import Requirements
from .two_hop import spread

RELAY = 6  # steps that `select` tries
MOST_RELAYING = 16  # ranks: routes are searched for every share and receiver
MOST_RELAY_STEPS = 1 << 10
MOST_STEPS = 1 << 16
FEW_STEPS = 4  # up to so many steps it is tried what comes of arrivals as early as possible
WORTH_A_STEP = 0.002  # one more step must make both passes shorter by this part
LATENCY = 16  # times what is computed
NEAR_ENOUGH = 1.05  # times what a pass would take if no rank waited; no more steps are tried then
FORWARD_PAIR, BACKWARD_PAIR = 2, 5  # time of a visible pair
SPLIT = 8  # no share is larger than this part of a step's buffer


def _first_of_run(*columns: np.ndarray) -> np.ndarray:
    """For each row the index of the first row of its run of equal rows.

    >>> _first_of_run(np.array([4, 4, 2, 2, 4])).tolist()
    [0, 0, 2, 2, 4]
    """
    new = np.ones(len(columns[0]), dtype=bool)
    new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))


class Visits(NamedTuple):
    """Ranks and documents of which the rank has queries that see other ranks' KV; int64 arrays.

    Attributes:
        key: rank * documents + document, sorted. rank: the rank. tokens: its tokens of the document.
    """

    key: np.ndarray
    rank: np.ndarray
    tokens: np.ndarray


class Compiled(NamedTuple):
    """A schedule for one layout.

    Attributes:
        routes: all hops, and the offloaded pairs.
        own_steps: when each share's queries meet own KV, int64 [2, ranks, shares], forward and backward.
        price: what both passes take, and `least`, what they would if no rank ever waited.
        steps: over how many communication steps arrivals were spread.
    """

    routes: Routes
    own_steps: np.ndarray
    price: int
    least: int
    steps: int

    @property
    def is_latency(self) -> bool:
        """Whether computing is next to nothing beside messages: then no other steps are tried."""
        return self.least * LATENCY < self.price


@dataclass(frozen=True)
class Sap(Routed):
    """only what the documents need, compiled rank by rank (HSAP's inter-node part)"""

    buffer_tokens: int = option(
        0,
        "tokens that a rank receives per step; 0: as many as the largest rank has",
        omit_default=True,
    )
    move_q: bool = option(False, "whether queries of busy ranks are computed on other ranks")
    relay: int = option(
        0,
        "steps over which shares are spread, directly or through a third rank; 0: directly",
        omit_default=True,
    )
    steps: int = option(
        0,
        "communication steps for what arrives, at least; 0: as few as buffers allow; open: or one more",
    )

    name = "sap"
    order = 130
    sends_only_what_is_needed = True
    example = Example("mesh2x2", steps=2, lengths=(30, 9, 25), layout="balanced")

    @classmethod
    def on(
        cls,
        machine: Machine,
        options: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> Schedule:
        """As `Routed.on`; where `steps` is left open, one more step is tried than the buffers need.

        It is taken, and recorded as the option, where that makes both passes together shorter.
        """
        best = super().on(machine, options, layout)
        assert isinstance(best, Sap)
        if layout is None or best.relay or "steps" in (options or {}):
            return best
        cost, steps = best._nominal, best._compiled.steps + 1
        if cost.price <= cost.least * NEAR_ENOUGH or cost.is_latency or steps > MOST_STEPS:
            return best
        other = replace(best, steps=steps)
        other.__dict__.update(best._shared)
        return other if other._nominal.price < cost.price * (1 - WORTH_A_STEP) else best

    @classmethod
    def resolve(
        cls, machine: Machine, options: Mapping[str, Any], layout: Layout | None
    ) -> dict[str, Any]:
        """Queries move where the layout keeps tokens in order, and messages are point to point."""
        if layout is None:
            return dict(options)
        in_order = layout.name == "contiguous" and layout.docs.slices is None
        return {"move_q": in_order and options.get("exchange", "p2p") == "p2p", **options}

    @classmethod
    def candidates(cls, machine: Machine, kv_bytes: float) -> Iterable[dict[str, Any]]:
        """Directly, and on a full mesh over six steps and third ranks."""
        mesh = machine.num_nodes == 1 and machine.link_gbps and not machine.port_gbps
        return ({}, {"relay": RELAY}) if mesh and machine.ranks <= MOST_RELAYING else ({},)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self.buffer_tokens, "sap: buffer_tokens", 0, PlanError)
        if check_int(self.relay, "sap: relay", 0, PlanError) > MOST_RELAY_STEPS:
            raise PlanError(f"sap: relay is at most {MOST_RELAY_STEPS} steps, got {self.relay}")
        if check_int(self.steps, "sap: steps", 0, PlanError) > MOST_STEPS:
            raise PlanError(f"sap: steps is at most {MOST_STEPS}, got {self.steps}")
        if self.steps and self.relay:
            raise PlanError(
                "sap: relay says over how many steps shares are spread; leave steps at 0"
            )
        if self.relay and self.node_size < self.ranks:
            raise PlanError("sap: relay is for the links of one node; over nodes leave it at 0")
        if self.relay and self.ranks > MOST_RELAYING:
            raise PlanError(
                f"sap: relay is searched for up to {MOST_RELAYING} ranks, not {self.ranks}; leave it at 0"
            )
        if not isinstance(self.move_q, bool):
            raise PlanError(f"sap: move_q must be true or false, got {self.move_q!r}")
        if self.move_q and self.layout is not None and self.layout.name == "striped":
            raise PlanError("sap: move_q=True cannot cut stripes; they are even without it")
        if self.move_q and self.layout is not None and self.layout.docs.slices is not None:
            raise PlanError(
                "sap: move_q=True is for masks of documents, not for slices; leave it out"
            )

    @cached_property
    def _budget(self) -> int:
        most = max(1, self._layout.docs.total)
        return max(1, min(self.buffer_tokens, most) or int(self._layout.counts.max()))

    def cuts(self, layout: Layout, rank: int) -> np.ndarray:
        """Local borders of the rank's shares, int64 [1, num_shares + 1]; the last ones may be empty."""
        own = self._requirements.cuts[rank]
        return np.concatenate([own, np.full(self.num_shares + 1 - len(own), own[-1])])[None, :]

    @cached_property
    def _requirements(self) -> Requirements:
        pairs = offload(self._layout) if self.move_q else None
        most = self._budget // SPLIT
        if self.relay:  # shares small enough for all routes and steps to get some
            most = min(most, int(self._layout.counts.max()) // (4 * self.ranks))
        return Requirements(self._layout, max(1, most), pairs)

    @property
    def num_shares(self) -> int:
        return self._requirements.num_shares

    @property
    def _routes(self) -> Routes:
        return self._compiled.routes

    def own_steps(self, rank: int, *, backward: bool) -> np.ndarray:
        """Work on the rank's own KV fills the steps in which the rank would wait; see own_work.py."""
        return self._compiled.own_steps[int(backward), rank]

    @property
    def _rates(self) -> Machine:
        """A preset of the machine's kind, for all choices on which messages depend.

        Ranks may each have measured their own rates, and must come to the same plan.
        """
        switch = self.machine is not None and self.machine.port_gbps and not self.machine.link_gbps
        return PRESETS["h100"] if switch else MESH

    @cached_property
    def _nominal(self) -> Compiled:
        """What both passes take with rates that all ranks have in common."""
        return self._placed(self._compiled.routes, self._rates)

    @property
    def _shared(self) -> dict[str, Any]:
        """What does not depend on the number of steps, by the names of cached properties."""
        names = "_requirements", "_visits", "_own_work", "_remote_queries"
        return {name: getattr(self, name) for name in names}

    @cached_property
    def _compiled(self) -> Compiled:
        dst, share = self._requirements.required()
        if self.relay:
            return self._finished(self._two_hop(dst, share), self.relay, self.machine or MESH)
        arrivals = self._arrivals(dst, share)
        received = load_table((self.ranks,), dst, amount=arrivals.size)
        room = max(1, self._budget - self._budget // SPLIT)  # the last share of a step may not fit
        fewest = max(1, -(-int(received.max()) // room)) + bool((arrivals.ingress != dst).any())
        steps = max(self.steps, fewest)
        kv = self._kv_hops(arrivals, steps)
        if 1 < steps <= FEW_STEPS:
            # with little to even out, fewer parts of queries to merge may be worth more
            even = self._finished(kv, steps, self._rates)
            if not even.is_latency:
                early = self._kv_hops(arrivals, steps, evenly=False)
                if self._finished(early, steps, self._rates).price < even.price:
                    kv = early
        return self._finished(kv, steps, self.machine or MESH)

    def _kv_hops(self, arrivals: Arrivals, steps: int, *, evenly: bool = True) -> Hops:
        """The kv hops of arrivals spread over communication steps."""
        rows = self._visits.tokens * Prices.of(self._rates, backward=False).row
        step = place_arrivals(
            arrivals, rows, self.ranks, self.node_size, self._budget, steps, evenly=evenly
        )
        if len(step):
            _, step = np.unique(step, return_inverse=True)  # steps without hops are left out
        src = np.where(arrivals.ingress == arrivals.dst, arrivals.owner, arrivals.ingress)
        number = self._requirements.shares.number[arrivals.share]
        return Hops(step, src, arrivals.dst, arrivals.owner, number, np.full_like(step, KV))

    def _arrivals(self, dst: np.ndarray, share: np.ndarray) -> Arrivals:
        """Where each share comes from: its owner, or, if that is on another node, an ingress rank."""
        requirements, m = self._requirements, self.node_size
        shares = requirements.shares
        owner = shares.owner[share]
        # the ingress rank of a node for a share: of its ranks that need it, the first from the owner's
        # rail on, in cyclic order
        node = dst // m
        by_rail = np.lexsort(((dst - owner) % m, node, share))
        ingress = np.empty_like(dst)
        ingress[by_rail] = dst[by_rail][_first_of_run(share[by_rail], node[by_rail])]
        ingress = np.where(node == owner // m, dst, ingress)
        visit = self._visit_of(dst, shares.doc[share])
        work = requirements.work(dst, share)
        return Arrivals(dst, owner, share, shares.size[share], work, ingress, visit)

    def _two_hop(self, dst: np.ndarray, share: np.ndarray) -> Hops:
        """kv hops that bring each share to its `dst` over `relay` steps, directly or by a third rank."""
        shares = self._requirements.shares
        order = np.lexsort((dst, share))
        # a gradient stays on a third rank for four steps, KV for two
        budget = max(1, 3 * (self._budget - self._budget // SPLIT) // 5)
        moves = spread(
            dst[order], share[order], shares.owner, shares.size, self.ranks, budget, self.relay
        )
        _, step = np.unique(moves.step, return_inverse=True)
        owner, number = shares.owner[moves.share], shares.number[moves.share]
        return Hops(step, moves.src, moves.dst, owner, number, np.full_like(owner, KV))

    def _finished(self, kv: Hops, steps: int, machine: Machine) -> Compiled:
        """All hops of both passes, and when ranks compute on their own KV on a machine.

        The machine's rates decide nothing about hops: ranks compare their schedules' options, not rates.
        """
        moves = Hops.concat([kv, self._remote_queries])
        shape = (self.ranks, self.ranks, self.num_shares)
        routes, *others = (complete(moves, pairs, shape) for pairs in self._offloaded_pairs(kv))
        if others:
            routes = min((routes, *others), key=lambda r: self._placed(r, self._rates).price)
        return self._placed(routes, machine)._replace(steps=steps)

    def _placed(self, routes: Routes, machine: Machine) -> Compiled:
        """When ranks compute on their own KV, on a machine."""
        own, shares = self._own_work, self._requirements.shares
        own_steps = np.zeros((2, self.ranks, self.num_shares), dtype=np.int64)
        price = least = 0
        for backward, pair in ((False, FORWARD_PAIR), (True, BACKWARD_PAIR)):
            prices = Prices.of(machine, backward=backward)
            step, cost, busiest_rank = place_own(self._pass(routes, prices, backward=backward), own)
            own_steps[int(backward), shares.owner, shares.number] = step
            price, least = price + pair * cost, least + pair * busiest_rank
        own_steps.setflags(write=False)
        return Compiled(routes, own_steps, price, least, 0)

    def _pass(self, routes: Routes, prices: Prices, *, backward: bool) -> Pass:
        """What a pass does besides work on own KV."""
        requirements, shares = self._requirements, self._requirements.shares
        hops = routes.forward
        if backward:
            kind = np.where(hops.kind == OUT, DQ, hops.kind)
            hops = Hops.concat([hops._replace(kind=kind), routes.returns])
        number = np.searchsorted(shares.owner, hops.owner) + hops.share
        messages = Messages.of(hops, shares.size[number], self.ranks, self.node_size, prices)
        count = max(int(hops.step.max(initial=-1)), int(routes.offloaded.step.max(initial=-1))) + 2
        written = np.zeros((len(self._visits.tokens), count), dtype=bool)
        kv = hops.kind == KV
        rank, share, step = hops.dst[kv], number[kv], hops.step[kv] + 1
        # a third rank of a two-hop route may need nothing of what it passes on
        pairs = requirements.work(rank, share)
        work = load_table((self.ranks, count), rank, step, amount=pairs)
        visit = self._visit_of(rank, shares.doc[share])
        seen = (pairs > 0) & (visit >= 0)
        written[visit[seen], step[seen]] = True
        np.add.at(work, self._visits.rank, written * (self._visits.tokens * prices.row)[:, None])
        self._add_remote(work, routes.offloaded, prices)
        return Pass(work, written, messages, prices)

    def _add_remote(self, work: np.ndarray, offloaded: OffloadedPairs, prices: Prices) -> None:
        """Add to each rank's work what it computes for remote queries with own KV, and their outputs."""
        if not len(offloaded.step):
            return
        shares = self._requirements.shares
        q, k = self._share_numbers(offloaded)
        own = offloaded.owner == offloaded.rank
        at = offloaded.rank[own], offloaded.step[own]
        np.add.at(work, at, self._requirements.area(q[own], k[own]))
        (rank, step, q), _ = load_rows((offloaded.rank, offloaded.step, q), q)
        np.add.at(work, (rank, step), shares.size[q] * prices.row)

    def _share_numbers(self, offloaded: OffloadedPairs) -> tuple[np.ndarray, np.ndarray]:
        """Numbers among all shares of the queries' and the keys' shares."""
        first = np.searchsorted(self._requirements.shares.owner, np.arange(self.ranks))
        q, k = first[offloaded.q_owner], first[offloaded.owner]
        return q + offloaded.q_share, k + offloaded.share

    def _offloaded_pairs(self, kv: Hops) -> Iterator[OffloadedPairs]:
        """The offloaded pairs: all as early as they can be, then those with own KV in even steps."""
        requirements, shares = self._requirements, self._requirements.shares
        if not requirements.offloads:
            yield NO_OFFLOADED
            return
        q, k, worker = requirements.offloaded
        columns = shares.owner[q], shares.number[q], shares.owner[k], shares.number[k]
        pairs = OffloadedPairs(np.ones_like(q), worker, *columns)
        yield pairs
        number = np.searchsorted(shares.owner, kv.owner) + kv.share
        amount = requirements.work(kv.dst, number)
        steps = int(kv.step.max(initial=0)) + 2
        work = load_table((self.ranks, steps), kv.dst, kv.step + 1, amount=amount)
        own = np.flatnonzero(shares.owner[k] == worker)
        group, at = np.unique(worker[own] * len(shares.owner) + q[own], return_inverse=True)
        area = load_table((len(group),), at, amount=requirements.area(q[own], k[own]))
        step = np.zeros(len(group), dtype=np.int64)
        for i in np.argsort(-area, kind="stable").tolist():  # the largest first
            rank = int(group[i]) // len(shares.owner)
            step[i] = 1 + int(work[rank, 1:].argmin())
            work[rank, step[i]] += area[i]
        even = pairs.step.copy()
        even[own] = step[at]
        yield pairs._replace(step=even)

    @cached_property
    def _remote_queries(self) -> Hops:
        """The hops of queries that are computed on other ranks, all in step 0."""
        if not self._requirements.offloads:
            return Hops.concat([])
        shares, (q, _, worker) = self._requirements.shares, self._requirements.offloaded
        rank, share = np.divmod(np.unique(worker * len(shares.owner) + q), len(shares.owner))
        zero, owner = np.zeros_like(rank), shares.owner[share]
        return Hops(zero, owner, rank, owner, shares.number[share], np.full_like(rank, Q))

    @cached_property
    def _visits(self) -> Visits:
        """Every (rank, document) of which the rank has queries that see other ranks' KV."""
        dst, share = self._requirements.required()
        documents = len(self._layout.docs.lengths)
        key = np.unique(dst * documents + self._requirements.shares.doc[share])
        return Visits(
            key, key // documents, self._requirements.tokens_of(*np.divmod(key, documents))
        )

    def _visit_of(self, rank: np.ndarray, doc: np.ndarray) -> np.ndarray:
        """Numbers among the visits; -1 for those that there are not."""
        key, wanted = self._visits.key, rank * len(self._layout.docs.lengths) + doc
        if not len(key):
            return np.full_like(wanted, -1)
        at = np.minimum(np.searchsorted(key, wanted), len(key) - 1)
        return np.where(key[at] == wanted, at, -1)

    @cached_property
    def _own_work(self) -> OwnWork:
        """All shares' queries with own KV."""
        requirements, shares = self._requirements, self._requirements.shares
        visit = self._visit_of(shares.owner, shares.doc)
        return OwnWork(shares.owner, requirements.own_work, shares.size, visit)

    @property
    def limits(self) -> DeclaredLimits:
        if self.layout is None:
            return DeclaredLimits(1, 1, 2.0)
        forward = self._routes.forward
        link, across, *_ = busiest(forward, self.ranks, self.node_size)
        largest = max(1, int(self._layout.counts.max()))
        # one share over the budget for each kind of arrival; tiny sequences round up to one token
        slack = (
            2 * 3 * max(1, self._budget // SPLIT) if self.relay and self._budget < 8 * SPLIT else 0
        )
        q = forward.where(forward.kind == Q)  # all arrive in the first step
        shares = self._requirements.shares
        size = shares.size[np.searchsorted(shares.owner, q.owner) + q.share]
        remote_queries = int(load_table((self.ranks,), q.dst, amount=size).max())
        return DeclaredLimits(
            link, across, (2 * self._budget + slack) / largest, remote_queries / largest
        )
