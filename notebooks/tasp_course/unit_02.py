"""Unit 2, a schedule is a table: three broken tables, and checks that prove learners' tables."""

from __future__ import annotations

from typing import Any

from tasp_core import PlanError
from tasp_core.schedules import Hops

from .tables import loads, prove, ring_lines, table_plan
from .verdict import exercise, expect, recap

__all__ = [
    "broken_tables",
    "check_quick",
    "check_recap",
    "check_repairs",
    "check_ring",
    "prove",
    "show",
]


def broken_tables() -> dict[str, list[str]]:
    """The ring on four ranks with one fault each: a hop too early, a hop left out, one link twice."""
    ring = ring_lines(4)
    out = {
        "A": ["t2 0>1 kv2.0"],
        "B": ["t2 3>0 kv1.0"],
        "C": ["t1 2>3 kv1.0", "t2 3>0 kv1.0"],
    }
    put = {"A": ["t0 3>1 kv2.0"], "B": [], "C": ["t1 1>0 kv1.0", "t2 2>3 kv1.0"]}
    return {name: [hop for hop in ring if hop not in out[name]] + put[name] for name in out}


def show(lines: list[str], ranks: int = 4) -> str:
    """The step x rank table of hops in text form."""
    return table_plan(lines, ranks).table()


def _first_line(error: PlanError) -> str:
    return str(error).splitlines()[0]


@exercise
def check_ring(answer: Any) -> None:
    """Hops of the ring for 2, 3, 4 and 7 ranks."""
    for n in (2, 3, 4, 7):
        lines = list(answer(n))
        try:
            prove(lines, n)
        except PlanError as error:
            expect(False, f"n = {n}: {_first_line(error)}")
        hops = Hops.parse(lines)
        distance = (hops.dst - hops.src) % n
        wrong = next((hop for hop, d in zip(lines, distance, strict=True) if d != 1), "")
        expect(not wrong, f"n = {n}: {wrong} does not go to the right neighbour")
        steps = int(hops.step.max()) + 1
        expect(
            steps == n - 1,
            f"n = {n}: the steps are t0 to t{steps - 1}; {n - 1} steps are enough, the first is t0",
        )


@exercise
def check_repairs(answer: Any) -> None:
    """One hop out, one in, for each of the broken tables."""
    for name, lines in broken_tables().items():
        pair = isinstance(answer[name], tuple | list) and len(answer[name]) == 2
        expect(pair, f"{name}: a pair is asked for: the hop to take out and the hop to put in")
        out, put = answer[name]
        expect(not out or out in lines, f"{name}: {out!r} is not in the table")
        fixed = [hop for hop in lines if hop != out] + [put] * bool(put)
        try:
            prove(fixed, 4)
        except PlanError as error:
            expect(False, f"{name}: with this repair, {_first_line(error)}")


@exercise
def check_quick(answer: Any) -> None:
    """Tables with the fewest steps under a limit on shares sent and received per step."""
    for n, ports in ((4, 3), (4, 1), (7, 2), (8, 3), (5, 9)):
        lines, what = list(answer(n, ports)), f"n = {n}, ports = {ports}"
        try:
            prove(lines, n)
        except PlanError as error:
            expect(False, f"{what}: {_first_line(error)}")
        load = loads(lines, n)
        busiest = max(int(load.sum(axis=1).max()), int(load.sum(axis=2).max()))
        expect(busiest <= ports, f"{what}: a rank sends or receives {busiest} shares in one step")
        fewest = -(-(n - 1) // ports)
        expect(len(load) == fewest, f"{what}: {len(load)} steps, fewer are enough")


check_recap = recap(
    (5, "the text form is tSTEP SENDER>RECEIVER"),
    (1, "the text form ends with kvOWNER.SHARE"),
    (7, "each step brings one more kv; a rank's own kv needs no step"),
    (8, "the ring uses one outgoing link of each rank"),
    (3, "each rank receives 7 shares, at most 3 per step"),
)
