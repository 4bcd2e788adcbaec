"""Rehearsal: a plan's communication on an emulated machine, now or as it was recorded.

    found = rehearse(plan, machine)        # builds the machine's network on this one, if it may
    found.seconds, found.how               # "emulated now", or "recorded" where it may not

    python -m tasp_course.rehearsal        # records CASES again: visualize/recorded/capstone.json

All rates are slowed down alike, until the pass takes about a second; tensors are checked first.
Only bytes are emulated: not latency, not kernels.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tasp_core as tasp
from tasp_core import Documents, Machine, Plan
from tasp_core.errors import FabricError, PlanError
from tasp_core.lab.bench.accuracy import Inputs, verify
from tasp_core.lab.bench.emulated import drain
from tasp_core.lab.bench.passes import Pass
from tasp_core.lab.emulation.network import Fabric, missing
from tasp_core.lab.emulation.wiring import emulated
from tasp_core.result_file import write

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGIES, RECORD = ROOT / "tests" / "topo", ROOT / "visualize" / "recorded" / "capstone.json"
TOKENS, LONGEST_S = 4096, 1.2
HEADS: dict[str, Any] = {"heads": 8, "kv_heads": 8, "head_dim": 64, "dtype": "float32"}
KV_BYTES = 2 * HEADS["kv_heads"] * HEADS["head_dim"] * 4  # of one token
# (topology text, schedule, layout): what is recorded
CASES = (
    ("mi300x", "tasp", "contiguous"),
    ("mi300x", "ring", "contiguous"),
    ("a100_nv4", "tasp", "contiguous"),
    ("h100_nvswitch", "ring", "contiguous"),
    ("v100_cube", "tasp", "contiguous"),
)


@dataclass(frozen=True)
class Rehearsal:
    """What an emulated pass took, by runs; what the simulator says; the machine and its steps."""

    name: str
    how: str
    seconds: tuple[float, ...]
    modelled_s: float
    machine: Machine
    plan: Plan

    @property
    def median_s(self) -> float:
        """The middle run."""
        return median(self.seconds)

    def __str__(self) -> str:
        runs = ", ".join(f"{s:.3f}" for s in self.seconds)
        return (
            f"{self.name}, {self.how}: {runs} s; modelled {self.modelled_s:.3f} s, "
            f"off by {abs(self.modelled_s / self.median_s - 1):.1%}"
        )


def slowed(plan: Plan, machine: Machine) -> tuple[Plan, Machine]:
    """A short row by the same spec, on the machine with its rates slowed down for about a second.

    Raises:
        TopologyError: a machine that cannot be emulated.
    """
    part = TOKENS / plan.docs.total
    docs = Documents.of(
        [max(1, round(n * part)) for n in plan.docs.lengths], causal=plan.docs.causal
    )

    def at(link_mbit: float) -> tuple[Plan, Machine, float]:
        on = emulated(machine, link_mbit=link_mbit)
        small = tasp.plan(
            docs,
            on.ranks,
            schedule=plan.schedule.name,
            layout=plan.layout.name,
            machine=on,
            schedule_options={k: v for k, v in plan.schedule.options.items() if k != "exchange"},
        )
        return small, on, tasp.simulate(small, on, **HEADS).comm_s

    small, on, seconds = at(1000.0)
    return at(1000.0 * seconds / LONGEST_S)[:2] if seconds else (small, on)


def _rank(rank: int, group: Any, plan: Plan, given: Inputs, repeats: int) -> list[float]:
    one = Pass(plan, rank, group, given, lambda: drain(group))
    return [one.run("communication", backward=False)[0] for _ in range(repeats + 1)][1:]


def emulate(name: str, plan: Plan, machine: Machine, *, repeats: int = 3) -> Rehearsal:
    """Check the short row's result on real ranks, then time its communication on the emulated machine.

    Raises:
        FabricError: no rights for it. TopologyError: a machine that cannot be emulated.
        PlanError: a plan with heads over groups, or whose results are wrong.
    """
    if plan.intra > 1:
        raise PlanError("rehearsals take plans without Ulysses: intra=1")
    small, on = slowed(plan, machine)
    given = Inputs.random(small.docs.total, HEADS["heads"], HEADS["kv_heads"], HEADS["head_dim"])
    errors, _ = verify(small, given)
    if not errors.ok:
        raise PlanError(f"the result is wrong: {errors.ours}")
    with Fabric(on) as net:
        by_rank = net.launch(_rank, small, given, repeats, timeout_s=60.0)
    seconds = tuple(max(runs) for runs in zip(*by_rank, strict=True))
    modelled_s = tasp.simulate(small, on, **HEADS).comm_s
    return Rehearsal(name, "emulated now", seconds, modelled_s, on, small)


def recorded(path: Path = RECORD) -> list[Rehearsal]:
    """What `python -m tasp_course.rehearsal` found where it was run last."""
    rows = json.loads(path.read_text())["cases"]
    return [
        Rehearsal(
            row["name"],
            "recorded",
            tuple(row["seconds"]),
            row["modelled_s"],
            Machine(**row["machine"]),
            Plan.from_json(row["plan"]),
        )
        for row in rows
    ]


def rehearse(plan: Plan, machine: Machine) -> Rehearsal:
    """Emulate the plan here, if this system lets us; else the recorded case most like it."""
    name = f"{plan.schedule.name} x {plan.layout.name} on {machine.name}"
    if not missing():
        with suppress(FabricError):  # the rights are there, and then some kernel module is not
            return emulate(name, plan, machine)
    found = recorded()
    alike = [r for r in found if r.plan.schedule.name == plan.schedule.name] or found
    return next((r for r in alike if r.machine.name.startswith(machine.name)), alike[0])


def main() -> None:
    """Record all cases."""
    rows = []
    for text, schedule, layout in CASES:
        machine = tasp.machine(TOPOLOGIES / f"{text}.txt")
        docs = Documents.of([TOKENS], causal=False)
        plan = tasp.plan(docs, machine.ranks, schedule=schedule, layout=layout, machine=machine)
        found = emulate(f"{schedule} on {text}", plan, machine)
        sys.stdout.write(f"{found}\n")
        row = {"name": found.name, "seconds": found.seconds, "modelled_s": found.modelled_s}
        described = json.loads(found.machine.to_json())
        described.pop("schema")
        rows.append({**row, "machine": described, "plan": found.plan.to_json()})
    write(RECORD, "capstone", config={"tokens": TOKENS, **HEADS}, right=True, cases=rows)


if __name__ == "__main__":
    main()
