"""Wrong answers to the exercises of unit 7."""

from __future__ import annotations

from tasp_core import Machine
from tasp_course.unit_07 import HEADS, KV_BYTES, RACES, Messages


def _no_sharing(machine: Machine, messages: Messages) -> float:
    slowest = max(n / machine.route_gbps(a, b) / 1e9 for a, b, n in messages)
    posted = [sum(r in m[:2] for m in messages) for r in range(machine.ranks)]
    return machine.latency_s + machine.message_s * max(posted) + slowest


def _sends_only(machine: Machine, messages: Messages) -> float:
    load: dict[str, float] = {}
    for a, b, n in messages:
        for name in machine.resources(a, b):
            load[name] = load.get(name, 0) + n
    posted = max(sum(r == m[0] for m in messages) for r in range(machine.ranks))
    busiest = max(n / machine.capacity_gbps(name) / 1e9 for name, n in load.items())
    return machine.latency_s + machine.message_s * posted + busiest


def _crossing(machine: Machine, flops: int = 4, all_ranks: bool = True) -> float:
    square = flops * HEADS["heads"] * HEADS["head_dim"] / (machine.tflops * 1e12)
    linear = KV_BYTES / (machine.route_gbps(0, 1) * 1e9)
    fixed = machine.latency_s + 2 * machine.message_s - machine.kernel_s
    t = (linear + (linear**2 + 4 * square * fixed) ** 0.5) / (2 * square)
    return t * (machine.ranks if all_ranks else 1)


WRONG = {
    "check_step": {
        "no latency": lambda machine, messages: _no_sharing(machine, messages) - machine.latency_s,
        "each message as if alone": _no_sharing,
        "only sends are posted": _sends_only,
        "a constant": lambda machine, messages: 2.1e-3,
    },
    "check_hidden": {
        "tokens of one rank": lambda machine: _crossing(machine, all_ranks=False),
        "half the flops, as if causal": lambda machine: _crossing(machine, flops=2),
        "a constant": lambda machine: 5848,
        "never": lambda machine: float("inf"),
        "no number": lambda machine: float("nan"),
    },
    "check_order": {
        "the same order everywhere": {race: ["all_gather", "ring", "tasp"] for race in RACES},
        "one schedule twice": {race: ["all_gather", "ring", "ring"] for race in RACES},
    },
    "check_recap": {
        "ms, not us": [0.03, 4, "latency", 155, "port"],
        "compute and communication added": [30, 4, "latency", 186, "port"],
    },
}
