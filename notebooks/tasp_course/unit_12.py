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

ROW = (30000, 8000, 4000, 12000, 11536)
HEADS: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
SCHEDULES = ("ring", "tasp", "wave", "all_gather", "sap")
LAYOUTS = ("zigzag", "per_document", "balanced")
GOOD, NEAR, HIDDEN = 1.2, 0.15, 1.05
MINE = "mine"  # the name of the learner's machine
SLOW_TFLOPS, FAST_TFLOPS = 1.0, 10_000.0

Messages = list[tuple[int, int, int]]


def texts() -> dict[str, str]:
    """Shipped outputs of topology tools, by name: for those who have no such node at hand."""
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


def given(mine: dict[str, Any]) -> dict[str, Any]:
    """The learner's machine, or a shipped one where there is none yet, or none that will do."""
    fits = check_machine(mine).state == "right"
    return mine if fits else {"text": texts()["v100_cube"], "tflops": 90}


@exercise
def check_machine(answer: dict[str, Any]) -> None:
    """A topology text that can be read, planned for and emulated, and a kernel rate in TFLOP/s."""
    for key in ("text", "tflops"):
        expect(key in answer, f"{key!r} is missing")
    hint = f"texts that work: {', '.join(usable())}"
    text = answer["text"]
    known = f'; of a shipped one it is unit.texts()["{text}"]' if text in texts() else ""
    expect(
        isinstance(text, str) and "\n" in text, f"text is what the tool prints, many lines{known}"
    )
    try:
        unfit = _unfit(machine_of(answer))
    except TopologyError as error:
        unfit = str(error)
    expect(not unfit, f"{unfit}; {hint}")
    tflops = float(answer["tflops"])
    expect(
        SLOW_TFLOPS <= tflops <= FAST_TFLOPS,
        f"{tflops:g} TFLOP/s is no rate of an accelerator: 1 TFLOP/s is 1e12 flops a second",
    )


@lru_cache
def best(machine: Machine) -> float:
    """The least modelled seconds of the row, forward, over SCHEDULES and LAYOUTS."""
    found = []
    for schedule, layout in product(SCHEDULES, LAYOUTS):
        try:
            plan = tasp.plan(ROW, machine.ranks, schedule=schedule, layout=layout, machine=machine)
        except PlanError:  # this machine cannot have that schedule
            continue
        found.append(tasp.simulate(plan, **HEADS).total_s)
    return min(found)


def _expect_mine(plan: Plan) -> None:
    """Reference whether a plan is one of the row, on the learner's machine."""
    expect(isinstance(plan, Plan), "a plan is asked for: tasp.plan(ROW, ...)")
    right = plan.docs == Documents.of(ROW)
    expect(right, f"the plan must be of the documents {ROW}, causal")
    here = plan.machine.name.startswith(MINE) and plan.machine.tflops > 0
    expect(here, f"this plan is on {plan.machine.name}; plan it on your machine: machine=machine")


@exercise
def check_plan(answer: Plan) -> None:
    """A proved plan of the row that is about as quick as the best of the library's."""
    _expect_mine(answer)
    expect(answer.intra == 1, "without Ulysses, please: intra=1")
    try:
        tasp.check(answer)
    except PlanError as error:
        expect(False, f"the checker says: {str(error).splitlines()[0]}")
    seconds, least = tasp.simulate(answer, **HEADS).total_s, best(answer.machine)
    expect(
        seconds <= GOOD * least,
        f"modelled {seconds * 1e3:.2f} ms; {least * 1e3:.2f} ms are possible here, at most {GOOD} times "
        "that is asked for: is the work even, and does each link carry its part?",
    )


def steps_of(plan: Plan) -> list[Messages]:
    """The (src, dst, bytes) of each step's messages, tensors as in a rehearsal."""
    hops = plan.hops()
    columns = (hops.step, hops.src, hops.dst, plan.tokens_moved(hops))
    steps: list[Messages] = [[] for _ in range(plan.schedule.num_steps())]
    for step, src, dst, tokens in zip(*(c.tolist() for c in columns), strict=True):
        if tokens:
            steps[step].append((src, dst, tokens * KV_BYTES))
    return steps


@exercise
def check_prediction(answer: Callable[[Machine, list[Messages]], float]) -> None:
    """Seconds of communication, held against recorded runs on emulated machines."""
    for case in recorded():
        got, found = answer(case.machine, steps_of(case.plan)), case.median_s
        expect(
            abs(got / found - 1) <= NEAR,
            f"{case.name}: emulated {found:.3f} s (recorded), predicted {got:.3f} s; "
            "add up the steps, each as long as its busiest resource",
        )


def busiest(plan: Plan) -> dict[str, float]:
    """Seconds for which each resource is busy in a forward pass."""
    nbytes = tasp.simulate(plan, **HEADS).link_bytes
    return {name: b / plan.machine.capacity_gbps(name) / 1e9 for name, b in nbytes.items()}


@exercise
def check_defence(answer: dict[str, Any]) -> None:
    """What a plan's figures say: the busiest resource, its distance to the bound, hidden or not."""
    plan = answer["plan"]
    _expect_mine(plan)
    times, busy = tasp.simulate(plan, **HEADS), busiest(plan)
    name = str(answer["busiest"])
    expect(
        name in busy,
        f"no resource {name!r} carries anything; there are {', '.join(list(busy)[:3])}...",
    )
    most = max(busy.values())
    hint = "bytes / capacity, not bytes"
    expect(
        busy[name] >= most * (1 - 1e-9),
        f"{name} is busy for {busy[name] * 1e3:.3f} ms, another one for {most * 1e3:.3f} ms: {hint}",
    )
    right = times.comm_s / (times.bound_s or 1)
    got = float(answer["bounds"])
    expect(
        abs(got / right - 1) < 0.02, f"communication takes {right:.2f} cut bounds, got {got:.2f}"
    )
    hidden = "yes" if times.total_s <= HIDDEN * times.compute_s else "no"
    said = str(answer["hidden"]).strip().casefold()
    hint = f"total {times.total_s * 1e3:.2f} ms, computing alone {times.compute_s * 1e3:.2f} ms"
    expect(said == hidden, f'hidden: "{said}"? {hint}')


def held(found: Rehearsal) -> Verdict:
    """Whether a rehearsal is within the asked-for 15 % of the model."""
    off = abs(found.modelled_s / found.median_s - 1)
    if off <= NEAR:
        return Verdict("right", f"{found.how}: {off:.1%} off")
    hint = "is the machine busy with something else, or the model too simple?"
    return Verdict("wrong", f"{found.how}: {off:.1%} off; {hint}")


check_recap = recap(
    ("no", "the text says which links there are; rates are nominal, or measured by calibrate"),
    ("check", "which function proves a plan, before any tensor is there?"),
    ("bytes", "latencies and kernels are not slowed down"),
    ("recorded", "what does a figure say of another time and another machine?"),
    (1.25, "5 ms over 4 ms"),
)
