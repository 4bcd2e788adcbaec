"""Tables of hops in text form, and the proof of a learner's schedule.

prove(["t0 0>1 kv0.0", "t0 1>0 kv1.0"], 2)          # a Report, or PlanError with the table
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

import tasp_core as tasp
from tasp_core import Plan, Report
from tasp_core.schedules import DeclaredLimits, Hops

TOKENS = 24  # per rank, a multiple of most numbers of shares


def ring_lines(n: int) -> list[str]:
    """The KV hops of a ring: in each step every rank forwards what it received last.

    >>> ring_lines(2)
    ['t0 0>1 kv0.0', 't0 1>0 kv1.0']
    """
    return tasp.plan([n], n, schedule="ring").hops().lines()


def gradient_lines(kv_lines: Iterable[str]) -> list[str]:
    """Gradient hops for tables with KV hops only: directly to the owner, after the last step."""
    hops = Hops.parse(kv_lines)
    last = int(hops.step.max(initial=0)) + 2
    columns = (c.tolist() for c in (hops.dst, hops.owner, hops.share))
    received = sorted(set(zip(*columns, strict=True)))
    return [
        f"t{last} {rank}>{owner} dkv{owner}.{share}"
        for rank, owner, share in received
        if rank != owner
    ]


def table_plan(
    lines: Iterable[str], ranks: int, *, num_shares: int = 1, link: int = 1, kv: float | None = None
) -> Plan:
    """The plan with these KV hops, for full attention: every rank needs all KV.

    Args:
        lines: hops in text form.
        num_shares: shares per rank.
        link: most shares that a link may carry in a step.
        kv: most KV of other ranks that a rank may hold at a time, in units of its own; default: all.

    Raises:
        PlanError: a line that is not a hop.
    """
    kv_lines = list(lines)
    docs = tasp.Documents.of([TOKENS * ranks], causal=False)
    limits = DeclaredLimits(link, link, float(ranks if kv is None else kv))
    ring = tasp.plan(docs, ranks, schedule="ring", layout="contiguous")
    return ring.with_hops(kv_lines + gradient_lines(kv_lines), num_shares=num_shares, limits=limits)


def prove(
    lines: Iterable[str], ranks: int, *, num_shares: int = 1, link: int = 1, kv: float | None = None
) -> Report:
    """`tasp.check` of `table_plan`.

    Raises:
        PlanError: what is wrong with the table.
    """
    return tasp.check(table_plan(lines, ranks, num_shares=num_shares, link=link, kv=kv))


def loads(lines: Iterable[str], ranks: int) -> np.ndarray:
    """Shares that each ordered pair of ranks carries in each step, int64 [steps, src, dst]."""
    hops = Hops.parse(lines)
    load = np.zeros((int(hops.step.max(initial=-1)) + 1, ranks, ranks), dtype=np.int64)
    np.add.at(load, (hops.step, hops.src, hops.dst), 1)
    return load
