"""Arrivals: in which step each share comes to each rank that needs it.

A step lasts as long as its slowest rank computes, so a pass takes about the sum over its steps of the
largest work of any rank. Shares of equal size are not equal work: the first keys of a document are seen by
more queries than the last ones. And a step lasts as long as its busiest link carries. So a share goes into
the step in which the ranks that need it have the least to compute so far and its link carries least, among
the steps in which their buffers have room for it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..counts import load_table

STEPS_PER_DEAL = 4  # one share of this many steps' shares is placed at a time
LOADS = 3  # even loads of links and NICs count this many times as much as even work


class Arrivals(NamedTuple):
    """One row for each share and each rank that needs it and does not own it; int64 arrays.

    Attributes:
        dst: the rank. owner: the rank that owns the share. share: number of the share among all.
        size: tokens of the share.
        work: visible pairs that the rank computes with it.
        ingress: the rank of dst's node that receives it from its owner: dst itself, or a node peer that
            hands it on one step later.
        visit: number of (rank, document) whose queries see it; arrivals of one visit that fall into the
            same step write those queries' outputs once.
    """

    dst: np.ndarray
    owner: np.ndarray
    share: np.ndarray
    size: np.ndarray
    work: np.ndarray
    ingress: np.ndarray
    visit: np.ndarray


def place_arrivals(
    arrivals: Arrivals,
    visit_rows: np.ndarray,
    ranks: int,
    node_size: int,
    budget: int,
    steps: int,
    *,
    evenly: bool = True,
) -> np.ndarray:
    """The communication step of each arrival, int64 [arrivals].

    What comes from afar and is handed on inside the node is placed first, as it has the fewest choices.

    Args:
        visit_rows: of each visit, the price of writing its queries' outputs.
        budget: the most tokens that a rank receives in a step; no share is larger.
        steps: over how many communication steps to spread; more are used where the budget needs them.
        evenly: whether each step gets the same work; else everything comes as early as there is room.
    """
    result = np.zeros(len(arrivals.dst), dtype=np.int64)
    loads = _Loads(ranks, steps, visit_rows, evenly)
    key = arrivals.share * ranks + arrivals.ingress
    handed_on = arrivals.ingress != arrivals.dst
    shared = np.isin(key, key[handed_on])
    for rows, members in ((np.flatnonzero(shared), node_size), (np.flatnonzero(~shared), 1)):
        if len(rows):
            few = Arrivals(*(column[rows] for column in arrivals))
            _, first, group = np.unique(key[rows], return_index=True, return_inverse=True)
            step = loads.place(_Groups.of(few, first, group, members), node_size, budget)
            result[rows] = step[group] + handed_on[rows]
    return result


class _Groups(NamedTuple):
    """Arrivals that are placed as one: of one share at one node's members, or at one rank alone.

    Attributes:
        place: the node, or the rank, int64 [groups]. owner, size: of the share.
        work, visit: of each member of the place, int64 [groups, members].
        delay: 1 where the share is handed on to the member, else 0.
        comes: whether it comes to the member at all, bool [groups, members].
    """

    place: np.ndarray
    owner: np.ndarray
    size: np.ndarray
    work: np.ndarray
    visit: np.ndarray
    delay: np.ndarray
    comes: np.ndarray

    @classmethod
    def of(cls, arrivals: Arrivals, first: np.ndarray, group: np.ndarray, members: int) -> _Groups:
        """Groups from the first arrival of each, and the group of each arrival."""
        shape = (len(first), members)
        work, visit, delay, comes = np.zeros((4, *shape), dtype=np.int64)
        at = group, arrivals.dst % members
        work[at], visit[at], comes[at] = arrivals.work, arrivals.visit, 1
        delay[at] = arrivals.ingress != arrivals.dst
        owner, size = arrivals.owner[first], arrivals.size[first]
        return cls(arrivals.dst[first] // members, owner, size, work, visit, delay, comes > 0)

    def at(self, index: np.ndarray) -> _Groups:
        return _Groups(*(column[index] for column in self))


class _Loads:
    """What ranks compute, receive and send in each step, by what has been placed so far.

    Attributes:
        work: int64 [ranks, compute steps]. received: tokens, int64 [ranks, communication steps].
        written: whether a visit's outputs are written in a compute step anyway, bool [visits, steps].
    """

    def __init__(self, ranks: int, steps: int, visit_rows: np.ndarray, evenly: bool) -> None:
        self.evenly = evenly
        self.work = np.zeros((ranks, steps + 1), dtype=np.int64)
        self.received = np.zeros((ranks, steps), dtype=np.int64)
        self.visit_rows = visit_rows
        self.written = np.zeros((len(visit_rows), steps + 1), dtype=bool)

    def place(self, groups: _Groups, node_size: int, budget: int) -> np.ndarray:
        """The step in which each group's share leaves its owner, int64 [groups].

        All places take their largest group at once, then their next one, and so on.
        """
        result = np.zeros(len(groups.place), dtype=np.int64)
        by_place = np.lexsort((-groups.work.sum(axis=1), groups.place))
        place = groups.place[by_place]
        turn = np.arange(len(place)) - np.searchsorted(place, place)
        order = np.argsort(turn, kind="stable")
        groups, members = groups.at(by_place[order]), groups.work.shape[1]
        rank = groups.place[:, None] * members + np.arange(members)
        late = int(groups.delay.max())
        all_work = load_table((len(self.work),), rank.ravel(), amount=groups.work.ravel())
        carriers = _Carriers.of(groups, self.received.shape[1], node_size)
        # with many steps, some groups of each place are dealt out at once, one to each of its best steps
        deal = max(1, self.received.shape[1] // STEPS_PER_DEAL)
        bounds = np.searchsorted(turn[order], np.arange(0, turn.max() + deal + 1, deal)).tolist()
        for low, high in pairwise(bounds):
            left = np.arange(low, high)
            largest = int(groups.size[low:high].max(initial=0))
            while len(left):
                _, first, at = np.unique(groups.place[left], return_index=True, return_inverse=True)
                lead, who = groups.at(left[first]), rank[left[first]]
                cost, free = self._costs(lead, who, late, budget, all_work)
                if self.evenly:
                    cost += LOADS * carriers.cost(left[first], cost.shape[1])
                if not np.isfinite(cost).any(axis=1).all():
                    self._add_step()
                    carriers.add_step()
                    continue
                nth = _number_within(at)
                step = cost.argsort(axis=1, kind="stable")[at, np.minimum(nth, cost.shape[1] - 1)]
                # beside the first, one that is handed on and one that arrives may meet at a rank
                fits = (nth == 0) | ((nth < cost.shape[1]) & (free[at, step] >= 2 * largest))
                self._add(groups.at(left[fits]), rank[left[fits]], step[fits])
                carriers.add(left[fits], step[fits], groups.size[left[fits]])
                result[by_place[order[left[fits]]]] = step[fits]
                left = left[~fits]
        return result

    def _costs(
        self,
        now: _Groups,
        rank: np.ndarray,
        late: int,
        budget: int,
        all_work: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """How uneven each step's work would get, inf where a group does not fit; and the room there."""
        steps = self.received.shape[1] - late
        at = np.arange(steps) + now.delay[:, :, None]
        who = rank[:, :, None]
        room = budget - self.received[who, at]
        full = ((room < now.size[:, None, None]) & now.comes[:, :, None]).any(axis=1)
        if late:  # whatever comes to the place, both as it arrives and as it is handed on
            room = np.minimum(room, budget - self.received[who, at + 1 - 2 * now.delay[:, :, None]])
        if not self.evenly:
            early = np.broadcast_to(np.arange(float(steps)), full.shape)
            return np.where(full, np.inf, early), room.min(axis=1)
        more = self._more(now, at)
        # the increase of the sum of squares, over what it would be if all steps were even
        rise = (more * (self.work[who, at + 1] + more / 2)).sum(axis=1)
        even = np.maximum(1.0, (now.work * (all_work[rank] / steps)).sum(axis=1))
        return np.where(full, np.inf, rise / even[:, None]), room.min(axis=1)

    def _more(self, now: _Groups, at: np.ndarray) -> np.ndarray:
        """What each member would compute more in each step, float64 [groups, members, steps]."""
        new = ~self.written[now.visit[:, :, None], at + 1] & now.comes[:, :, None]
        more = now.work[:, :, None] + new * self.visit_rows[now.visit][:, :, None]
        return more.astype(float)

    def _add(self, now: _Groups, rank: np.ndarray, step: np.ndarray) -> None:
        """Count groups in the steps that they have got."""
        at = step[:, None] + now.delay
        more = self._more(now, at[:, :, None])[:, :, 0].astype(np.int64)
        comes = now.comes
        np.add.at(self.work, (rank[comes], at[comes] + 1), more[comes])
        size = np.broadcast_to(now.size[:, None], at.shape)
        np.add.at(self.received, (rank[comes], at[comes]), size[comes])
        self.written[now.visit[comes], at[comes] + 1] = True

    def _add_step(self) -> None:
        self.work, self.received, self.written = (
            np.concatenate([x, np.zeros_like(x[:, :1])], axis=1)
            for x in (self.work, self.received, self.written)
        )


class _Carriers:
    """What links and NICs carry in each step: inside nodes a link per pair of ranks, else the owner's NIC.

    Attributes:
        carrier: of each group, its number. tokens: of each carrier, in all steps, int64 [carriers].
        carried: tokens by step, int64 [carriers, communication steps].
    """

    def __init__(self, carrier: np.ndarray, tokens: np.ndarray, steps: int) -> None:
        self.carrier, self.tokens = carrier, tokens
        self.carried = np.zeros((len(tokens), steps), dtype=np.int64)

    @classmethod
    def of(cls, groups: _Groups, steps: int, node_size: int) -> _Carriers:
        """The carriers of these groups; one rank of a place of several brings in what comes to it."""
        inside = (groups.place // node_size == groups.owner // node_size) & (
            groups.work.shape[1] == 1
        )
        key = groups.owner * (1 + int(groups.place.max())) + np.where(inside, groups.place, 0)
        _, carrier = np.unique(2 * key + inside, return_inverse=True)
        return cls(
            carrier, load_table((int(carrier.max()) + 1,), carrier, amount=groups.size), steps
        )

    def cost(self, group: np.ndarray, steps: int) -> np.ndarray:
        """What the carriers of groups carry so far, over what they would if all steps were even."""
        carrier = self.carrier[group]
        return self.carried[carrier, :steps] / (self.tokens[carrier, None] / steps)

    def add(self, group: np.ndarray, step: np.ndarray, size: np.ndarray) -> None:
        """Count groups in the steps that they have got."""
        np.add.at(self.carried, (self.carrier[group], step), size)

    def add_step(self) -> None:
        """One more step."""
        self.carried = np.concatenate([self.carried, 0 * self.carried[:, :1]], axis=1)


def _number_within(group: np.ndarray) -> np.ndarray:
    """Each item's number among the items of its group, in the given order.

    >>> _number_within(np.array([5, 3, 5, 5, 3])).tolist()
    [0, 0, 1, 2, 1]
    """
    order = np.argsort(group, kind="stable")
    result = np.empty_like(order)
    result[order] = np.arange(len(order)) - np.searchsorted(group[order], group[order])
    return result
