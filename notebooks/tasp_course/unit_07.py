"""Unit 7, how long will it take: checks, and the modelled times that they compare answers with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import isfinite
from typing import Any

import tasp_core as tasp
from tasp_core import Documents, Machine, Plan, Timeline

from .verdict import exercise, expect, recap

HEADS: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
KV_BYTES = 2 * HEADS["kv_heads"] * HEADS["head_dim"] * 2  # of one token: k and v in bf16
MACHINES = ("h100", "mi300x", "a100_pcie")
SCHEDULES = ("ring", "tasp", "all_gather")
RACES = (("h100", 4096), ("mi300x", 4096), ("mi300x", 16384), ("a100_pcie", 4096))
ROUND_OFF, CLOSE = 1e-6, 0.02

Messages = list[tuple[int, int, int]]
Race = tuple[str, int]


def full(tokens: int, schedule: str, machine: Machine) -> Plan:
    """Full attention in contiguous blocks: every step has the same work."""
    docs = Documents.of([tokens], causal=False)
    return tasp.plan(docs, machine.ranks, schedule=schedule, layout="contiguous", machine=machine)


def messages_of(plan: Plan, step: int = 0) -> Messages:
    """The messages of a step, (src, dst, bytes) each."""
    hops = plan.hops()
    hops = hops.where(hops.step == step)
    size = (plan.tokens_moved(hops) * KV_BYTES).tolist()
    return list(zip(hops.src.tolist(), hops.dst.tolist(), size, strict=True))


def step_times(tokens: int, schedule: str, machine: Machine) -> tuple[float, float]:
    """Seconds for which the second step communicates, and for which it computes, on rank 0."""
    times = tasp.simulate(full(tokens, schedule, machine), machine, **HEADS)
    (a, b), (c, d) = times.comm[0, 1], times.compute[0, 1]
    return float(b - a), float(d - c)


def race(name: str, tokens: int, schedules: tuple[str, ...] = SCHEDULES) -> dict[str, Timeline]:
    """The modelled times of each schedule, for one causal document in zigzag."""
    machine = tasp.machine(name)
    plans = {
        schedule: tasp.plan([tokens], machine.ranks, schedule=schedule, machine=machine)
        for schedule in schedules
    }
    return {schedule: tasp.simulate(plan, machine, **HEADS) for schedule, plan in plans.items()}


@exercise
def check_step(answer: Callable[[Machine, Messages], float]) -> None:
    """Seconds of a step from its messages."""
    slow = replace(tasp.machine("mesh4"), latency_s=1e-3, message_s=1e-4)
    got = answer(slow, [(0, 1, 64_300_000)])
    hint = "one message of 64.3 MB over 64.3 GB/s, latency 1 ms, 0.1 ms per message: 2.1 ms, got"
    expect(abs(got / 2.1e-3 - 1) < ROUND_OFF, f"{hint} {got * 1e3:.4g} ms")
    got = answer(slow, [(0, 1, 64_300_000), (2, 0, 100)])
    expect(
        abs(got / 2.2e-3 - 1) < ROUND_OFF,
        f"rank 0 now posts two messages, one it sends and one it receives: 2.2 ms, got {got * 1e3:.4g} ms",
    )
    for name in MACHINES:
        machine = tasp.machine(name)
        for schedule in ("ring", "tasp"):
            right = step_times(16384, schedule, machine)[0]
            got = answer(machine, messages_of(full(16384, schedule, machine)))
            expect(
                abs(got / right - 1) < ROUND_OFF,
                f"a step of {schedule} on {name} takes {right * 1e6:.2f} us, got {got * 1e6:.2f}; "
                "messages over the same resource share its capacity: add up their bytes first",
            )


def without_merging(machine: Machine) -> Machine:
    """The machine, with merging of partial outputs that takes no time."""
    return replace(machine, memory_gbps=0.0)


@lru_cache
def hidden_from(machine: Machine) -> int:
    """The least number of tokens, a multiple of the ranks, from which on a ring's step hides its sends."""
    low, high = 1, 1 << 16
    while low < high:
        middle = (low + high) // 2
        comm_s, compute_s = step_times(middle * machine.ranks, "ring", machine)
        low, high = (low, middle) if comm_s <= compute_s else (middle + 1, high)
    return low * machine.ranks


@exercise
def check_hidden(answer: Callable[[Machine], float]) -> None:
    """Tokens of the sequence from which on computing hides communication, from the machine's attributes."""
    for name in MACHINES:
        machine = without_merging(tasp.machine(name))
        right, got = hidden_from(machine), float(answer(machine))
        expect(isfinite(got), f"{name}: {got} is not a number of tokens")
        hint = "that is the number of tokens of one rank; the sequence has the tokens of all ranks"
        if abs(got * machine.ranks / right - 1) >= CLOSE:
            hint = "at that length a step computes for {1:.1f} us and communicates for {0:.1f} us".format(
                *(s * 1e6 for s in step_times(max(1, round(got / 8)) * 8, "ring", machine))
            )
        expect(abs(got / right - 1) <= CLOSE, f"{name}, {got:.0f} tokens: {hint}")


@exercise
def check_order(answer: dict[Race, list[str]]) -> None:
    """The order of the schedules, the fastest first."""
    for name, tokens in RACES:
        order = list(answer[name, tokens])
        expect(
            sorted(order) == sorted(SCHEDULES),
            f"{name}, {tokens} tokens: each of {', '.join(SCHEDULES)} once, got {order}",
        )
        times = {schedule: t.total_s for schedule, t in race(name, tokens).items()}
        for first, second in pairwise(order):
            expect(
                times[first] <= times[second] * (1 + CLOSE),
                f"{name}, {tokens} tokens: {first} is not faster than {second}; "
                "count the steps for the latencies, and the bytes of the busiest resource",
            )


check_recap = recap(
    (30.0, "latency, and bytes over bandwidth: 10 us + 1 MB / (50 GB/s)"),
    (4, "a step computes (tokens per rank) x (tokens per rank) pairs"),
    ("latency", "4 kB need 0.08 us of the 10.08"),
    (155.0, "both begin together, and the step ends when both are done"),
    ("port", "on h100 every rank has one connection to the switch of its node"),
)
