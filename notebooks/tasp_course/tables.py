"""Tables of hops in words, and their proof: what learners' schedules are held to.

prove(["t0 0>1 kv0.0", "t0 1>0 kv1.0"], 2)          # a Report, or PlanError with the table
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

import tasp_core as tasp
from tasp_core import Plan, Report
from tasp_core.schedules import DeclaredLimits, Hops

TOKENS = 24  # a rank, a multiple of most numbers of shares


def ring_words(n: int) -> list[str]:
    """Ring's keys and values: in each step every rank passes on to the next what it got last.

    >>> ring_words(2)
    ['t0 0>1 kv0.0', 't0 1>0 kv1.0']
    """
    return tasp.plan([n], n, schedule="ring").hops().lines()


def home_words(words: Iterable[str]) -> list[str]:
    """Gradients straight home after the last step, for tables that move keys only."""
    hops = Hops.parse(words)
    last = int(hops.step.max(initial=0)) + 2
    columns = (c.tolist() for c in (hops.dst, hops.owner, hops.share))
    arrived = sorted(set(zip(*columns, strict=True)))
    return [
        f"t{last} {rank}>{owner} dkv{owner}.{share}"
        for rank, owner, share in arrived
        if rank != owner
    ]


def table_plan(
    words: Iterable[str], ranks: int, *, num_shares: int = 1, link: int = 1, kv: float | None = None
) -> Plan:
    """The plan with these kv words, on a full mask, in which every rank needs all keys.

    Args:
        num_shares: shares a rank. link: most shares a link may carry in a step.
        kv: most travelling KV a rank may hold; default: all of the others'.

    Raises:
        PlanError: a word that is no hop.
    """
    kv_words = list(words)
    docs = tasp.Documents.of([TOKENS * ranks], causal=False)
    limits = DeclaredLimits(link, link, float(ranks if kv is None else kv))
    whole = tasp.plan(docs, ranks, schedule="ring", layout="contiguous")
    return whole.with_hops(kv_words + home_words(kv_words), num_shares=num_shares, limits=limits)


def prove(
    words: Iterable[str], ranks: int, *, num_shares: int = 1, link: int = 1, kv: float | None = None
) -> Report:
    """`tasp.check` of `table_plan`.

    Raises:
        PlanError: what is wrong with the table.
    """
    return tasp.check(table_plan(words, ranks, num_shares=num_shares, link=link, kv=kv))


def loads(words: Iterable[str], ranks: int) -> np.ndarray:
    """Shares each ordered pair of ranks carries in each step, int64 [steps, src, dst]."""
    hops = Hops.parse(words)
    load = np.zeros((int(hops.step.max(initial=-1)) + 1, ranks, ranks), dtype=np.int64)
    np.add.at(load, (hops.step, hops.src, hops.dst), 1)
    return load
