"""Machines whose links differ, and plans made of a planner's answers: unit 9 and its score board.

A planner is a function `step(rate, have)` that says what is sent in the next step:

    rate     {(src, dst): GB/s} of every link
    have     {rank: set of shares}, a share is (owner, number)
    returns  [(src, dst, share), ...]: at most one share per link, from a rank that has it to one without

`planned` calls it until every rank has every share, and makes a plan of it, backward pass included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np

import tasp_core as tasp
from tasp_core import Machine, Plan, PlanError
from tasp_core.machines.presets import MESH
from tasp_core.schedules import KV, DeclaredLimits, Hops
from tasp_core.schedules.hops import NO_OFFLOADED
from tasp_core.schedules.routed import complete

TOKENS = 4096  # of each rank
HEADS, HEAD_DIM = 8, 128
KV_BYTES = TOKENS * 2 * HEADS * HEAD_DIM * 2  # of one rank, bf16
FASTEST_GBPS, SLOWDOWN, PROBABILITY = 64.0, (1, 0.5, 0.25, 0.1), (0.5, 0.2, 0.15, 0.15)

Share = tuple[int, int]
Rate = dict[tuple[int, int], float]
Have = dict[int, set[Share]]
Sent = list[tuple[int, int, Share]]
Planner = Callable[[Rate, Have], Sent]


def random_mesh(ranks: int, seed: int) -> Machine:
    """A full mesh of which about half of the links are 2, 4 or 10 times slower than the others."""
    links = [f"link {a}>{b}" for a in range(ranks) for b in range(ranks) if a != b]
    factors = np.random.default_rng(seed).choice(SLOWDOWN, len(links), p=PROBABILITY).tolist()
    mesh = replace(
        MESH,
        node_size=ranks,
        link_gbps=FASTEST_GBPS,
        nic_gbps=0.0,
        latency_s=1e-6,
        source="drawn at random",
    )
    slow = {name: FASTEST_GBPS * x for name, x in zip(links, factors, strict=True) if x < 1}
    return mesh.degraded(slow, f"random{seed}")


@lru_cache
def machines(count: int = 20) -> tuple[Machine, ...]:
    """The machines of the score board: 3 to 6 ranks."""
    return tuple(random_mesh(3 + seed % 4, seed) for seed in range(count))


def rates(machine: Machine) -> Rate:
    """GB/s of every link."""
    ranks = range(machine.ranks)
    return {(a, b): machine.route_gbps(a, b) for a in ranks for b in ranks if a != b}


def _validation_error(step: Sent, have: Have, rate: Rate) -> str:
    """What is wrong with a step, "" if nothing."""
    if not step:
        return "the planner sends nothing, but some rank still lacks shares"
    for entry in step:
        is_hop = isinstance(entry, tuple) and len(entry) == 3 and isinstance(entry[2], tuple)
        if not is_hop:
            return f"an entry is (src, dst, (owner, number)), got {entry}"
    links = [(src, dst) for src, dst, _ in step]
    for (src, dst), (_, _, share) in zip(links, step, strict=True):
        if (src, dst) not in rate:
            return f"there is no link {src}>{dst}"
        if share not in have[src]:
            return f"rank {src} sends share {share}, which it does not have"
        if share in have[dst]:
            return f"rank {dst} has share {share} already"
    if len(set(links)) < len(links):
        return "two shares on one link in one step"
    if len({(dst, share) for _, dst, share in step}) < len(step):
        return "the same share is sent to a rank twice in one step"
    return ""


def planned(machine: Machine, planner: Planner, shares: int = 2) -> Plan:
    """The plan that a planner makes, with each rank's KV cut into `shares`.

    Raises:
        PlanError: a step that is not possible.
    """
    n, rate, rows, step = machine.ranks, rates(machine), [], 0
    have: Have = {r: {(r, j) for j in range(shares)} for r in range(n)}
    while any(len(has) < n * shares for has in have.values()):
        sent = planner(dict(rate), {r: set(has) for r, has in have.items()})
        if not isinstance(sent, list):
            raise PlanError(f"a planner returns a list of (src, dst, share), got {sent!r}")
        if wrong := _validation_error(sent, have, rate):
            raise PlanError(f"step {step} on {machine.name}: {wrong}")
        rows += [(step, src, dst, *share, KV) for src, dst, share in sent]
        for _, dst, share in sent:
            have[dst].add(share)
        step += 1
    routes = complete(Hops(*np.array(rows).T), NO_OFFLOADED, (n, n, shares))
    lines = Hops.concat([routes.forward, routes.returns]).lines()
    ring = tasp.plan([n * TOKENS], n, schedule="ring", layout="contiguous", machine=machine)
    return ring.with_hops(lines, num_shares=shares, limits=DeclaredLimits(1, 1, float(n)))


def ratio(plan: Plan) -> float:
    """Modelled communication time of the forward pass over the cut bound."""
    times = tasp.simulate(plan, heads=HEADS, head_dim=HEAD_DIM)
    return times.comm_s / tasp.cut_bound(plan.machine, KV_BYTES)


def scores(planner: Planner | str, shares: int = 2) -> list[float]:
    """The ratios of a planner, or of a schedule by name, on the machines of the board.

    Raises:
        PlanError: a plan that `check` rejects.
    """
    ratios = []
    for machine in machines():
        if isinstance(planner, str):
            lengths = [machine.ranks * TOKENS]
            plan = tasp.plan(
                lengths, machine.ranks, schedule=planner, layout="contiguous", machine=machine
            )
        else:
            plan = planned(machine, planner, shares)
            tasp.check(plan)
        ratios.append(ratio(plan))
    return ratios
