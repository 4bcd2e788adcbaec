"""Rehearsal: a plan's communication on an emulated machine, now or as it was recorded.

    rehearsal = rehearse(plan, machine)     # emulates the machine's network, if this system allows it
    rehearsal.seconds, rehearsal.how        # "emulated now", or "recorded" where it is not allowed

    python -m tasp_course.rehearsal        # records CASES again: visualize/recorded/capstone.json

All bandwidths are divided by the same factor, so that the pass takes about a second. Before it is timed,
the result is compared with float64. Only bandwidths are emulated, not latencies and not kernels.
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
    """The times of an emulated pass, one per run, the simulated time, the machine and the plan."""

    name: str
    how: str
    seconds: tuple[float, ...]
    modelled_s: float
    machine: Machine
    plan: Plan

    @property
    def median_s(self) -> float:
        """Median over the runs."""
        return median(self.seconds)

    def __str__(self) -> str:
        runs = ", ".join(f"{s:.3f}" for s in self.seconds)
        return (
            f"{self.name}, {self.how}: {runs} s; modelled {self.modelled_s:.3f} s, "
            f"off by {abs(self.modelled_s / self.median_s - 1):.1%}"
        )


def slowed(plan: Plan, machine: Machine) -> tuple[Plan, Machine]:
    """A plan like this one for a shorter sequence, and a machine so slow that it takes about a second.

    Raises:
        TopologyError: a machine that cannot be emulated.
    """
    factor = TOKENS / plan.docs.total
    docs = Documents.of(
        [max(1, round(n * factor)) for n in plan.docs.lengths], causal=plan.docs.causal
    )

    def at(link_mbit: float) -> tuple[Plan, Machine, float]:
        slow = emulated(machine, link_mbit=link_mbit)
        short = tasp.plan(
            docs,
            slow.ranks,
            schedule=plan.schedule.name,
            layout=plan.layout.name,
            machine=slow,
            schedule_options={k: v for k, v in plan.schedule.options.items() if k != "exchange"},
        )
        return short, slow, tasp.simulate(short, slow, **HEADS).comm_s

    short, slow, seconds = at(1000.0)
    return at(1000.0 * seconds / LONGEST_S)[:2] if seconds else (short, slow)


def _rank(rank: int, group: Any, plan: Plan, inputs: Inputs, repeats: int) -> list[float]:
    timed = Pass(plan, rank, group, inputs, lambda: drain(group))
    return [timed.run("communication", backward=False)[0] for _ in range(repeats + 1)][1:]


def emulate(name: str, plan: Plan, machine: Machine, *, repeats: int = 3) -> Rehearsal:
    """Check the result of the shortened plan, then time its communication on the emulated machine.

    Raises:
        FabricError: this process may not build networks.
        TopologyError: a machine that cannot be emulated.
        PlanError: a plan with Ulysses, or a wrong result.
    """
    if plan.intra > 1:
        raise PlanError("rehearsals take plans without Ulysses: intra=1")
    short, slow = slowed(plan, machine)
    inputs = Inputs.random(short.docs.total, HEADS["heads"], HEADS["kv_heads"], HEADS["head_dim"])
    errors, _ = verify(short, inputs)
    if not errors.ok:
        raise PlanError(f"the result is wrong: {errors.ours}")
    with Fabric(slow) as net:
        by_rank = net.launch(_rank, short, inputs, repeats, timeout_s=60.0)
    seconds = tuple(max(runs) for runs in zip(*by_rank, strict=True))
    modelled_s = tasp.simulate(short, slow, **HEADS).comm_s
    return Rehearsal(name, "emulated now", seconds, modelled_s, slow, short)


def recorded(path: Path = RECORD) -> list[Rehearsal]:
    """The rehearsals that `python -m tasp_course.rehearsal` has recorded."""
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
    """Emulate the plan here, if this system allows it; else return the recorded case most like it."""
    name = f"{plan.schedule.name} x {plan.layout.name} on {machine.name}"
    if not missing():
        with suppress(
            FabricError
        ):  # the process has the rights, but a kernel module may be missing
            return emulate(name, plan, machine)
    cases = recorded()
    same = [r for r in cases if r.plan.schedule.name == plan.schedule.name] or cases
    return next((r for r in same if r.machine.name.startswith(machine.name)), same[0])


def main() -> None:
    """Record all cases."""
    rows = []
    for text, schedule, layout in CASES:
        machine = tasp.machine(TOPOLOGIES / f"{text}.txt")
        docs = Documents.of([TOKENS], causal=False)
        plan = tasp.plan(docs, machine.ranks, schedule=schedule, layout=layout, machine=machine)
        case = emulate(f"{schedule} on {text}", plan, machine)
        sys.stdout.write(f"{case}\n")
        row = {"name": case.name, "seconds": case.seconds, "modelled_s": case.modelled_s}
        described = json.loads(case.machine.to_json())
        described.pop("schema")
        rows.append({**row, "machine": described, "plan": case.plan.to_json()})
    write(RECORD, "capstone", config={"tokens": TOKENS, **HEADS}, right=True, cases=rows)


if __name__ == "__main__":
    main()
