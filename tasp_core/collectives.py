"""Seconds and bytes of collectives: a schedule's all-gather, and the all-to-alls of Ulysses groups."""

from __future__ import annotations

import numpy as np

from .hardware import Machine
from .plan import Plan
from .schedules import build
from .traffic import Sizes, Traffic, charge


def gathered(plan: Plan, machine: Machine, sizes: Sizes) -> tuple[Traffic, float]:
    """What the schedule's all-gather moves, as one step, and the seconds it costs besides its bytes.

    Over all ranks it is the library's: one ring in rank order takes n - 1 turns, a direct one a turn
    for each node. Between groups of ranks it is an all-to-all.
    """
    inner, a = plan.inner, plan.intra
    rows, n = int(inner.layout.counts.max()), inner.ranks
    if a > 1 or not plan.schedule.collective:
        ends = np.argwhere(~np.eye(n if plan.schedule.collective else 0, dtype=bool)).T
        (src, dst), times, turns = ends, np.ones_like(ends[0]), 1
    elif machine.all_gather == "ring":
        src, turns = np.arange(n), n - 1
        dst, times = (src + 1) % n, np.full_like(src, n - 1)
    else:  # each rank's rows once to every node, and from there to the node's ranks
        hops = build("wave", plan.machine, {"blocks": 1, "twins": 0}).forward(None)
        pair, times = np.unique(hops.src * n + hops.dst, return_counts=True)
        src, dst, turns = pair // n, pair % n, machine.num_nodes
    member = np.tile(np.arange(a), len(src))
    per = [sizes.kv(p) * sizes.item for p in sizes.parts]
    nbytes = np.outer(times * rows, per).ravel().astype(float)
    src, dst = np.repeat(src, a) * a + member, np.repeat(dst, a) * a + member
    zero = np.zeros(len(member), dtype=np.int64)
    return Traffic(zero, src, dst, nbytes, zero), turns * (machine.latency_s + machine.message_s)


def ulysses(
    plan: Plan, machine: Machine, sizes: Sizes, backward: bool
) -> tuple[tuple[float, float], dict[str, float]]:
    """Seconds of the all-to-alls before and after the inner attention, and their bytes."""
    a = plan.intra
    if a == 1:
        return (0.0, 0.0), {}
    tokens = np.array([plan.num_tokens(r) for r in range(plan.ranks)])
    ends = [
        (g * a + i, g * a + j) for g in range(plan.inner.ranks) for i in range(a) for j in range(a)
    ]
    src, dst = np.array([e for e in ends if e[0] != e[1]]).T
    q = np.array([sizes.q(p) * sizes.item for p in sizes.parts])
    kv = np.array([sizes.kv(p) * sizes.item for p in sizes.parts])
    lse = np.array([sizes.q(p) // sizes.head_dim * sizes.wide for p in sizes.parts])
    # to heads: own tokens, the other's heads; to tokens: the other's tokens, own heads
    if backward:  # dout, then dq, dk, dv
        phases = (tokens[src] * q[dst % a], 1), (tokens[dst] * (q + kv)[src % a], 3)
    else:  # q, k, v, then out and lse
        phases = (tokens[src] * (q + kv)[dst % a], 3), (tokens[dst] * (q + lse)[src % a], 2)
    seconds, zero = [], np.zeros_like(src)
    totals: dict[str, float] = {}
    for nbytes, times in phases:
        found = charge(machine, Traffic(zero, src, dst, nbytes.astype(float), zero))
        each = machine.latency_s + (a - 1) * machine.message_s
        seconds.append(float(found.seconds.max()) + times * each)
        totals = sum_bytes(totals, found.link_bytes)
    return (seconds[0], seconds[1]), totals


def sum_bytes(*tables: dict[str, float]) -> dict[str, float]:
    total: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            total[name] = total.get(name, 0.0) + value
    return total
