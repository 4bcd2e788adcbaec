"""Wrong answers to the exercises of unit 12."""

from __future__ import annotations

from typing import Any

import tasp_core as tasp
from tasp_core import Machine, Plan
from tasp_course.unit_12 import HEADS, HIDDEN, LENGTHS, Messages, busiest, machine_of, texts

MI300X = {"text": texts()["mi300x"], "tflops": 450}
ON = machine_of(MI300X)


def _plan(schedule: str, layout: str, lengths: tuple[int, ...] = LENGTHS) -> Plan:
    return tasp.plan(lengths, ON.ranks, schedule=schedule, layout=layout, machine=ON)


def _lost_hop() -> Plan:
    plan = _plan("tasp", "per_document")
    return plan.with_hops(plan.hops(backward=True).lines()[1:])


def _busy(machine: Machine, messages: Messages) -> dict[str, float]:
    busy: dict[str, float] = {}
    for src, dst, nbytes in messages:
        for name in machine.resources(src, dst):
            busy[name] = busy.get(name, 0) + nbytes / machine.capacity_gbps(name) / 1e9
    return busy


def _one_step(machine: Machine, steps: list[Messages]) -> float:
    return max(_busy(machine, steps[0]).values())


def _alone(machine: Machine, steps: list[Messages]) -> float:
    return sum(
        max(n / machine.route_gbps(a, b) / 1e9 for a, b, n in messages) for messages in steps
    )


def _all_bytes(machine: Machine, steps: list[Messages]) -> float:
    return sum(sum(_busy(machine, messages).values()) for messages in steps)


def _defence(plan: Plan) -> dict[str, Any]:
    times, busy = tasp.simulate(plan, **HEADS), busiest(plan)
    return {
        "plan": plan,
        "busiest": max(busy, key=busy.__getitem__),
        "bounds": times.comm_s / (times.bound_s or 1),
        "hidden": "yes" if times.total_s <= HIDDEN * times.compute_s else "no",
    }


DEFENCE = _defence(_plan("tasp", "per_document"))

WRONG = {
    "check_machine": {
        "no table": {"text": "GPU topology\nof our cluster", "tflops": 450},
        "flops, not teraflops": {**MI300X, "tflops": 450e12},
        "one GPU": {"text": texts()["one_gpu"], "tflops": 450},
        "no kernel rate": {"text": texts()["mi300x"]},
        "the name of a text": {**MI300X, "text": "mi300x"},
        "routes that share links of the host": {**MI300X, "text": texts()["a100_pcie"]},
    },
    "check_plan": {
        "contiguous": _plan("ring", "contiguous"),
        "even as if one document": _plan("tasp", "zigzag"),
        "another sequence": _plan("tasp", "per_document", (65536,)),
        "a lost hop": _lost_hop(),
        "a name": "tasp",
        "on another machine": tasp.plan(
            LENGTHS, 8, schedule="tasp", layout="per_document", machine="mi300x"
        ),
    },
    "check_prediction": {
        "the first step": _one_step,
        "all resources one after the other": _all_bytes,
        "each message alone": _alone,
        "half the time": lambda machine, steps: _alone(machine, steps) / 2,
        "a constant": lambda machine, steps: 0.9,
    },
    "check_defence": {
        "no such resource": {**DEFENCE, "busiest": "the network"},
        "the bound itself": {**DEFENCE, "bounds": 1.0},
        "not hidden": {**DEFENCE, "hidden": "no"},
        "of another sequence": _defence(_plan("tasp", "per_document", (65536,))),
    },
    "check_recap": {
        "yes": ["yes", "check", "bytes", "recorded", 1.25],
        "the other way round": ["no", "check", "bytes", "recorded", 0.8],
    },
}
