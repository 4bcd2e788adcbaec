"""Uneven machines and what a planner is for: units 9 and its score board.

A planner is a function `step(rate, have)` that says what moves next:

    rate    {(src, dst): GB/s} of every link
    have    {rank: set of pieces}, a piece is (owner, number)
    answer  [(src, dst, piece), ...]: at most one piece a link, from a rank that has it to one without

`planned` calls it until every rank has every piece, and makes a plan of it, backward pass included.
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
SLOWER, OFTEN = (1, 0.5, 0.25, 0.1), (0.5, 0.2, 0.15, 0.15)

Piece = tuple[int, int]
Rate = dict[tuple[int, int], float]
Have = dict[int, set[Piece]]
Sent = list[tuple[int, int, Piece]]
Planner = Callable[[Rate, Have], Sent]


def uneven(ranks: int, seed: int) -> Machine:
    """A full mesh of which about half of the links are 2, 4 or 10 times slower than the rest."""
    links = [f"link {a}>{b}" for a in range(ranks) for b in range(ranks) if a != b]
    part = np.random.default_rng(seed).choice(SLOWER, len(links), p=OFTEN).tolist()
    mesh = replace(
        MESH,
        node_size=ranks,
        link_gbps=64.0,
        nic_gbps=0.0,
        latency_s=1e-6,
        source="drawn at random",
    )
    slow = {name: 64.0 * x for name, x in zip(links, part, strict=True) if x < 1}
    return mesh.degraded(slow, f"uneven{seed}")


@lru_cache
def machines(count: int = 20) -> tuple[Machine, ...]:
    """The machines of the score board: 3 to 6 ranks."""
    return tuple(uneven(3 + seed % 4, seed) for seed in range(count))


def rates(machine: Machine) -> Rate:
    """GB/s of every link."""
    ranks = range(machine.ranks)
    return {(a, b): machine.route_gbps(a, b) for a in ranks for b in ranks if a != b}


def _validation_error(step: Sent, have: Have, rate: Rate) -> str:
    """What is wrong with a step, "" if nothing."""
    if not step:
        return "an empty step, and some rank still lacks pieces"
    for entry in step:
        whole = isinstance(entry, tuple) and len(entry) == 3 and isinstance(entry[2], tuple)
        if not whole:
            return f"an entry is (src, dst, (owner, number)), got {entry}"
    links = [(src, dst) for src, dst, _ in step]
    for (src, dst), (_, _, piece) in zip(links, step, strict=True):
        if (src, dst) not in rate:
            return f"there is no link {src}>{dst}"
        if piece not in have[src]:
            return f"rank {src} sends piece {piece}, which it does not have"
        if piece in have[dst]:
            return f"rank {dst} has piece {piece} already"
    if len(set(links)) < len(links):
        return "two pieces on one link in one step"
    if len({(dst, piece) for _, dst, piece in step}) < len(step):
        return "the same piece is sent to a rank twice in one step"
    return ""


def planned(machine: Machine, planner: Planner, pieces: int = 2) -> Plan:
    """The plan that a planner makes, each rank's keys cut into `pieces`.

    Raises:
        PlanError: a step that cannot be.
    """
    n, rate, rows, step = machine.ranks, rates(machine), [], 0
    have: Have = {r: {(r, j) for j in range(pieces)} for r in range(n)}
    while any(len(held) < n * pieces for held in have.values()):
        sent = planner(dict(rate), {r: set(held) for r, held in have.items()})
        if not isinstance(sent, list):
            raise PlanError(f"a planner answers with a list of (src, dst, piece), got {sent!r}")
        if wrong := _validation_error(sent, have, rate):
            raise PlanError(f"step {step} on {machine.name}: {wrong}")
        rows += [(step, src, dst, *piece, KV) for src, dst, piece in sent]
        for _, dst, piece in sent:
            have[dst].add(piece)
        step += 1
    routes = complete(Hops(*np.array(rows).T), NO_OFFLOADED, (n, n, pieces))
    words = Hops.concat([routes.forward, routes.returns]).lines()
    ring = tasp.plan([n * TOKENS], n, schedule="ring", layout="contiguous", machine=machine)
    return ring.with_hops(words, num_shares=pieces, limits=DeclaredLimits(1, 1, float(n)))


def ratio(plan: Plan) -> float:
    """Modelled communication of the forward pass over the cut bound."""
    times = tasp.simulate(plan, heads=HEADS, head_dim=HEAD_DIM)
    return times.comm_s / tasp.cut_bound(plan.machine, KV_BYTES)


def scores(planner: Planner | str, pieces: int = 2) -> list[float]:
    """The ratios of a planner, or of a schedule named, on the machines of the board.

    Raises:
        PlanError: a plan that `check` refuses.
    """
    found = []
    for machine in machines():
        if isinstance(planner, str):
            row = [machine.ranks * TOKENS]
            plan = tasp.plan(
                row, machine.ranks, schedule=planner, layout="contiguous", machine=machine
            )
        else:
            plan = planned(machine, planner, pieces)
            tasp.check(plan)
        found.append(ratio(plan))
    return found
