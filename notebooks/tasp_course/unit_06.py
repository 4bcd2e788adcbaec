"""Unit 6, many rings: all Hamiltonian cycles of a few ranks, and checks of learners' rings."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np

import tasp_core as tasp
from tasp_core import PlanError, Rings, TopologyError

from .tables import loads, prove
from .verdict import UnfinishedError, exercise, expect, recap

Ring = tuple[int, ...]


def all_cycles(n: int) -> list[Ring]:
    """All Hamiltonian cycles of n ranks, each beginning with rank 0; (n - 1)! of them.

    >>> all_cycles(3)
    [(0, 1, 2), (0, 2, 1)]
    """
    return [(0, *rest) for rest in permutations(range(1, n))]


def arcs(ring: Ring) -> frozenset[tuple[int, int]]:
    """The arcs of a ring, the closing one among them."""
    return frozenset(zip(ring, (*ring[1:], ring[0]), strict=True))


def _verify(what: str, rings: Any, n: int, fold: int) -> None:
    """Raise WrongError unless the rings use every arc `fold` times."""
    number = fold * (n - 1)
    expect(len(rings) == number, f"{what}: {number} rings are asked for, not {len(rings)}")
    for ring in rings:
        expect(hasattr(ring, "__len__"), f"{what}: a ring is a list of {n} ranks, not {ring!r}")
        expect(len(ring) == n, f"{what}: {list(ring)} does not have {n} entries")
    try:
        Rings(np.array([list(r) for r in rings]), fold).verify()
    except TopologyError as error:
        expect(False, f"{what}: {error}")


@exercise
def check_by_hand(answer: Any) -> None:
    """Four arc-disjoint rings on five ranks, others than the picture's."""
    _verify("five ranks", answer, 5, 1)
    adding_1 = arcs(tuple(range(5)))
    expect(
        any(arcs(tuple(ring)) == adding_1 for ring in answer),
        "these rings are right, but none of them is 0 1 2 3 4; find another solution that contains it",
    )


@exercise
def check_disjoint(answer: Any) -> None:
    """Decompositions by search, where there are any."""
    for n in (3, 4, 5, 6, 8):
        try:
            rings = answer(n)
        except UnfinishedError:
            expect(
                n == 3,
                f"n = {n}: your function returned None; where there are no such rings, return `[]`",
            )
            raise
        if n in (4, 6):
            expect(
                list(rings) == [],
                f"n = {n}: {len(rings)} rings are returned, but there is no solution",
            )
        else:
            _verify(f"n = {n}", rings, n, 1)


@exercise
def check_folded(answer: Any) -> None:
    """2(n - 1) rings that use every arc twice."""
    for n in (4, 6, 8, 10):
        _verify(f"n = {n}", answer(n), n, 2)


@exercise
def check_travel(answer: Any) -> None:
    """Schedules of rings: proved, at most 2 KV of other ranks held, links loaded equally."""
    for n in (5, 6, 8):
        rings = tasp.decompose(n)
        lines, what = list(answer(rings.cycles)), f"{len(rings)} rings of {n} ranks"
        odd = [line for line in lines if not isinstance(line, str)]
        expect(not odd, f"{what}: {odd[:1]} is not a hop in text form, such as 't3 2>5 kv1.4'")
        try:
            prove(lines, n, num_shares=len(rings), link=rings.fold, kv=2)
        except PlanError as error:
            expect(False, f"{what}: {str(error).splitlines()[0]}")
        load = loads(lines, n)[:, ~np.eye(n, dtype=bool)]
        expect(
            load.min() == load.max(),
            f"{what}: links carry {load.min()} to {load.max()} shares per step, not all the same",
        )


check_recap = recap(
    (42, "each rank has one arc to every other rank"),
    (6, "each ring uses one of a rank's outgoing arcs"),
    (lambda numbers: sorted(numbers) == [4, 6], "those for which your search found no rings"),
    (10, "one share per ring, and there are 2 * (n - 1) rings"),
    (7, "each rank sends over 7 links at once instead of one"),
)
