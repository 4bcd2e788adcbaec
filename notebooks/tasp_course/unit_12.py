"""Unit 12, the capstone: checks of a machine, a plan for it, a prediction and its defence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import tasp_core as tasp
from tasp_core import Documents, Machine, Plan, PlanError, TopologyError
from tasp_core.lab.emulation.wiring import emulated, wiring
from tasp_core.machines.topology_text import parse_topology

from .rehearsal import KV_BYTES, RECORD, TOPOLOGIES, Rehearsal, recorded, rehearse
from .verdict import Verdict, exercise, expect, recap

__all__ = ["RECORD", "rehearse"]

LENGTHS = (30000, 8000, 4000, 12000, 11536)  # of the documents of the packed sequence
HEADS: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
SCHEDULES = ("ring", "tasp", "wave", "all_gather", "sap")
LAYOUTS = ("zigzag", "per_document", "balanced")
GOOD, NEAR, HIDDEN = 1.2, 0.15, 1.05
MINE = "mine"  # the name of the learner's machine
SLOW_TFLOPS, FAST_TFLOPS = 1.0, 10_000.0

Messages = list[tuple[int, int, int]]


def texts() -> dict[str, str]:
    """Shipped outputs of topology tools, by name: for learners without such a node."""
    return {path.stem: path.read_text() for path in sorted(TOPOLOGIES.glob("*.txt"))}


def machine_of(mine: dict[str, Any]) -> Machine:
    """The machine of a topology text, with the rate of its attention kernel.

    Raises:
        TopologyError: a text that cannot be read.
    """
    return replace(parse_topology(mine["text"], MINE), tflops=float(mine["tflops"]))


def _unfit(machine: Machine) -> str:
    """Why the emulated network cannot build a machine, "" where it can."""
    try:
        wiring(emulated(machine, link_mbit=50.0))
    except TopologyError as error:
        return str(error)
    return ""


@lru_cache
def usable() -> tuple[str, ...]:
    """Names of the shipped texts whose machines can be emulated."""
    return tuple(name for name, text in texts().items() if not _unfit(parse_topology(text)))


def mine_or_example(mine: dict[str, Any]) -> dict[str, Any]:
    """The learner's machine, or a shipped one where there is none yet, or one that fails the check."""
    fits = check_machine(mine).state == "right"
    return mine if fits else {"text": texts()["v100_cube"], "tflops": 90}


@exercise
def check_machine(answer: dict[str, Any]) -> None:
    """A topology text that can be read, planned for and emulated, and a kernel rate in TFLOP/s."""
    for key in ("text", "tflops"):
        expect(key in answer, f"{key!r} is missing")
    hint = f"shipped texts that can be used: {', '.join(usable())}"
    text = answer["text"]
    known = f'; for a shipped text, write unit.texts()["{text}"]' if text in texts() else ""
    expect(
        isinstance(text, str) and "\n" in text,
        f"text is the output of the tool, several lines{known}",
    )
    try:
        unfit = _unfit(machine_of(answer))
    except TopologyError as error:
        unfit = str(error)
    expect(not unfit, f"{unfit}; {hint}")
    tflops = float(answer["tflops"])
    expect(
        SLOW_TFLOPS <= tflops <= FAST_TFLOPS,
        f"{tflops:g} TFLOP/s is not the rate of an accelerator: 1 TFLOP/s is 1e12 flops per second",
    )


@lru_cache
def best(machine: Machine) -> float:
    """The least modelled seconds of a forward pass, over SCHEDULES and LAYOUTS."""
    seconds = []
    for schedule, layout in product(SCHEDULES, LAYOUTS):
        try:
            plan = tasp.plan(
                LENGTHS, machine.ranks, schedule=schedule, layout=layout, machine=machine
            )
        except PlanError:  # this schedule does not support the machine
            continue
        seconds.append(tasp.simulate(plan, **HEADS).total_s)
    return min(seconds)


def _expect_mine(plan: Plan) -> None:
    """Fail unless a plan is one for LENGTHS, on the learner's machine."""
    expect(isinstance(plan, Plan), "a plan is asked for: tasp.plan(LENGTHS, ...)")
    right = plan.docs == Documents.of(LENGTHS)
    expect(right, f"the plan must be for causal documents of the lengths {LENGTHS}")
    here = plan.machine.name.startswith(MINE) and plan.machine.tflops > 0
    expect(here, f"this plan is for {plan.machine.name}; plan for your machine: machine=machine")


@exercise
def check_plan(answer: Plan) -> None:
    """A proved plan for LENGTHS that is about as fast as the best of the library's."""
    _expect_mine(answer)
    expect(answer.intra == 1, "plan without Ulysses: intra=1")
    try:
        tasp.check(answer)
    except PlanError as error:
        expect(False, f"the checker says: {str(error).splitlines()[0]}")
    seconds, least = tasp.simulate(answer, **HEADS).total_s, best(answer.machine)
    expect(
        seconds <= GOOD * least,
        f"modelled {seconds * 1e3:.2f} ms; {least * 1e3:.2f} ms are possible here, and at most {GOOD} "
        "times as much is allowed: is the work even, and do all links carry about the same?",
    )


def steps_of(plan: Plan) -> list[Messages]:
    """The (src, dst, bytes) of each step's messages, with heads and dtype of a rehearsal."""
    hops = plan.hops()
    columns = (hops.step, hops.src, hops.dst, plan.tokens_moved(hops))
    steps: list[Messages] = [[] for _ in range(plan.schedule.num_steps())]
    for step, src, dst, tokens in zip(*(c.tolist() for c in columns), strict=True):
        if tokens:
            steps[step].append((src, dst, tokens * KV_BYTES))
    return steps


@exercise
def check_prediction(answer: Callable[[Machine, list[Messages]], float]) -> None:
    """Seconds of communication, compared with recorded runs on emulated machines."""
    for case in recorded():
        got, measured_s = answer(case.machine, steps_of(case.plan)), case.median_s
        expect(
            abs(got / measured_s - 1) <= NEAR,
            f"{case.name}: emulated {measured_s:.3f} s (recorded), predicted {got:.3f} s; "
            "add up the steps, each of which lasts as long as its busiest resource is busy",
        )


def busiest(plan: Plan) -> dict[str, float]:
    """Seconds for which each resource is busy in a forward pass."""
    nbytes = tasp.simulate(plan, **HEADS).link_bytes
    return {name: b / plan.machine.capacity_gbps(name) / 1e9 for name, b in nbytes.items()}


@exercise
def check_defence(answer: dict[str, Any]) -> None:
    """A plan's busiest resource, its ratio to the cut bound, and whether communication is hidden."""
    plan = answer["plan"]
    _expect_mine(plan)
    times, busy = tasp.simulate(plan, **HEADS), busiest(plan)
    name = str(answer["busiest"])
    expect(
        name in busy,
        f"there is no resource {name!r} in use; those in use are {', '.join(list(busy)[:3])}...",
    )
    most = max(busy.values())
    hint = "compare bytes / capacity, not bytes"
    expect(
        busy[name] >= most * (1 - 1e-9),
        f"{name} is busy for {busy[name] * 1e3:.3f} ms, another resource for {most * 1e3:.3f} ms: {hint}",
    )
    right = times.comm_s / (times.bound_s or 1)
    got = float(answer["bounds"])
    expect(
        abs(got / right - 1) < 0.02, f"communication takes {right:.2f} cut bounds, got {got:.2f}"
    )
    hidden = "yes" if times.total_s <= HIDDEN * times.compute_s else "no"
    got_hidden = str(answer["hidden"]).strip().casefold()
    hint = f"total {times.total_s * 1e3:.2f} ms, computing alone {times.compute_s * 1e3:.2f} ms"
    expect(got_hidden == hidden, f'hidden is not "{got_hidden}": {hint}')


def compared(rehearsal: Rehearsal) -> Verdict:
    """Whether the model of a rehearsal is within 15 % (`NEAR`) of its measured time."""
    off = abs(rehearsal.modelled_s / rehearsal.median_s - 1)
    if off <= NEAR:
        return Verdict("right", f"{rehearsal.how}: {off:.1%} off")
    hint = "is this computer busy with something else, or is the model too simple?"
    return Verdict("wrong", f"{rehearsal.how}: {off:.1%} off; {hint}")


check_recap = recap(
    ("no", "the text says which links there are; bandwidths are nominal, or measured by calibrate"),
    ("check", "which function proves a plan, and needs no tensor?"),
    ("bytes", "latencies and kernels are not slowed down"),
    ("recorded", "it was measured at another time, on another machine"),
    (1.25, "5 ms over 4 ms"),
)
