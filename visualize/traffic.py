"""What a plan's forward hops put on the links: counts that several pictures show.

Inside a node every ordered pair of ranks is a link; between nodes a rank sends over its one NIC,
whatever the destination. Amounts are in KV: multiples of one rank's keys and values.

    >>> from tasp_core import plan
    >>> traffic = Traffic.of(plan([64], 8, schedule="ring"))
    >>> traffic.usage(), traffic.amounts()
    ('8 of 56 links', '8 of 56 links: 7 KV each')
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from tasp_core import Plan, check
from tasp_core.planning.work import NEVER, count_pairs
from tasp_core.schedules import KV
from tasp_core.schedules.counts import load_table

from .figure import few_enough
from .marks import span


def work(plan: Plan) -> np.ndarray:
    """Visible pairs each rank computes in each step, int64 [ranks, steps + 1]; in groups of `intra`.

    Raises:
        PlanError: a plan that leaves pairs out, as `check` finds it.
    """
    plan = plan.context_plan
    arrival = np.full((plan.ranks, plan.ranks, plan.schedule.num_shares), NEVER)
    arrival[np.arange(plan.ranks), np.arange(plan.ranks)] = -1
    keys = plan.hops()
    keys = keys.where(keys.kind == KV)
    arrival[keys.dst, keys.owner, keys.share] = keys.step
    found, lost = count_pairs(plan, arrival)
    return check(plan).work if lost else found


class Traffic(NamedTuple):
    """Forward traffic of a plan.

    Attributes:
        kv: KV a link carries in all, float [src, dst].
        crossing: whether src and dst are on different nodes, bool [src, dst].
        used: links and NICs that carry something, and how many there are: ((used, all) of each).
        busy: share of the links and NICs that carry something in a step, float [steps].
        step_kv: most KV a link or NIC carries in one step.
        collective: the library call that moves everything, if one does.
        queries: whether queries travel, too; one rank's queries, or answers, count as 1 KV.
    """

    kv: np.ndarray
    crossing: np.ndarray
    used: tuple[tuple[int, int], tuple[int, int]]
    busy: np.ndarray
    step_kv: Fraction
    collective: str | None
    queries: bool

    @classmethod
    def of(cls, plan: Plan) -> Traffic:
        """Count a plan's hops.

        Raises:
            ValueError: more ranks than a picture can show.
        """
        few_enough(plan.ranks)
        n, hops = plan.layout.ranks, plan.hops()
        moved, whole = plan.amounts(hops)
        queries = bool((hops.kind != KV).any())
        node = np.array([plan.machine.node(rank) for rank in range(n)])
        crossing = node[:, None] != node[None, :]
        kv = load_table((n, n), hops.src, hops.dst, amount=moved) / whole
        nic = crossing[hops.src, hops.dst]
        channel = np.where(nic, n * n + hops.src, hops.src * n + hops.dst)
        steps = int(hops.step.max()) + 1 if hops.step.size else 0
        size = n * n + n
        load = load_table((steps, size), hops.step, channel, amount=moved)
        working = np.asarray(load.any(axis=0))
        num_links = int(np.count_nonzero(~crossing)) - n
        num_nics = n if crossing.any() else 0
        used = (int(working[: n * n].sum()), num_links), (int(working[n * n :].sum()), num_nics)
        busy = (load > 0).sum(axis=1) / max(1, num_links + num_nics)
        step_kv = Fraction(int(load.max(initial=0)), whole)
        return cls(kv, crossing, used, busy, step_kv, plan.schedule.collective, queries)

    @property
    def all_used(self) -> bool:
        """Whether every link and NIC is used."""
        return len(self.kv) > 1 and all(part == total for part, total in self.used)

    @property
    def even(self) -> bool:
        """Whether one node's links are all used, and equally."""
        links = self.kv[~np.eye(len(self.kv), dtype=bool)]
        return self.all_used and not self.crossing.any() and bool(np.ptp(links) < 1e-9)

    @property
    def part(self) -> float:
        """The part of all links and NICs that is used."""
        used, total = np.sum(self.used, axis=0).tolist()
        return used / max(1, total)

    def _counts(self) -> list[tuple[str, str, np.ndarray]]:
        """(how many, of what, KV on each in use) of links and of NICs, if the machine has any."""
        inside = self.kv[~self.crossing & (self.kv > 0)]
        nic_out = self.kv.sum(axis=1, where=self.crossing)
        each = (inside, nic_out[nic_out > 0])
        rows = []
        for (used, total), what, kv in zip(self.used, ("links", "NICs"), each, strict=True):
            if total:
                every = f"all {total}" if total > 2 else "both"
                rows.append((every if used == total else f"{used} of {total}", what, kv))
        return rows

    def usage(self) -> str:
        """How many of the links are used, in words."""
        rows = self._counts()
        words = [f"{many} {what}" for many, what, _ in rows]
        if len(rows) > 1:
            words[0] += " inside nodes"
        return " and ".join(words) or "no link"

    def amounts(self) -> str:
        """How many links are used and what each of these carries, in words."""
        rows = [
            f"{many} {what}" + (f": {span(kv.min(), kv.max())} KV each" if kv.size else "")
            for many, what, kv in self._counts()
        ]
        return "; ".join(rows) or "one rank: nothing travels"
