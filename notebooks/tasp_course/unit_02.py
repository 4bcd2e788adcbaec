"""Unit 2, a schedule is a table: three broken tables, and checks that prove learners' tables."""

from __future__ import annotations

from typing import Any

from tasp_core import PlanError
from tasp_core.schedules import Hops

from .tables import loads, prove, ring_words, table_plan
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
    """The ring on four ranks with one fault each: too early, left out, one link twice."""
    ring = ring_words(4)
    out = {
        "A": ["t2 0>1 kv2.0"],
        "B": ["t2 3>0 kv1.0"],
        "C": ["t1 2>3 kv1.0", "t2 3>0 kv1.0"],
    }
    put = {"A": ["t0 3>1 kv2.0"], "B": [], "C": ["t1 1>0 kv1.0", "t2 2>3 kv1.0"]}
    return {name: [w for w in ring if w not in out[name]] + put[name] for name in out}


def show(words: list[str], ranks: int = 4) -> str:
    """The step x rank table of words."""
    return table_plan(words, ranks).table()


def _first_line(error: PlanError) -> str:
    return str(error).splitlines()[0]


@exercise
def check_ring(answer: Any) -> None:
    """Words of the ring for 2, 3, 4 and 7 ranks."""
    for n in (2, 3, 4, 7):
        words = list(answer(n))
        try:
            prove(words, n)
        except PlanError as error:
            expect(False, f"n = {n}: {_first_line(error)}")
        hops = Hops.parse(words)
        away = next(
            (w for w, d in zip(words, (hops.dst - hops.src) % n, strict=True) if d != 1), ""
        )
        expect(not away, f"n = {n}: {away} does not go to the right neighbour")
        steps = int(hops.step.max()) + 1
        expect(
            steps == n - 1,
            f"n = {n}: steps t0 to t{steps - 1}, {n - 1} are enough; the first is t0",
        )


@exercise
def check_repairs(answer: Any) -> None:
    """One hop out, one in, for each of the broken tables."""
    for name, words in broken_tables().items():
        pair = isinstance(answer[name], tuple | list) and len(answer[name]) == 2
        expect(pair, f"{name}: a pair is asked for, the word to take out and the word to put in")
        out, put = answer[name]
        expect(not out or out in words, f"{name}: {out!r} is not in the table")
        fixed = [w for w in words if w != out] + [put] * bool(put)
        try:
            prove(fixed, 4)
        except PlanError as error:
            expect(False, f"{name}: repaired like this, {_first_line(error)}")


@exercise
def check_quick(answer: Any) -> None:
    """Tables that take the fewest steps under a limit of shares in and out."""
    for n, ports in ((4, 3), (4, 1), (7, 2), (8, 3), (5, 9)):
        words, what = list(answer(n, ports)), f"n = {n}, ports = {ports}"
        try:
            prove(words, n)
        except PlanError as error:
            expect(False, f"{what}: {_first_line(error)}")
        load = loads(words, n)
        busiest = max(int(load.sum(axis=1).max()), int(load.sum(axis=2).max()))
        expect(busiest <= ports, f"{what}: a rank sends or takes in {busiest} shares in one step")
        fewest = -(-(n - 1) // ports)
        expect(len(load) == fewest, f"{what}: {len(load)} steps, fewer are enough")


check_recap = recap(
    (5, "sender > receiver"),
    (1, "kvOWNER.SHARE"),
    (7, "in each step one more kv is seen; the own one needs none"),
    (8, "one link leaves each rank"),
    (3, "7 shares are to be taken in, 3 a step"),
)
