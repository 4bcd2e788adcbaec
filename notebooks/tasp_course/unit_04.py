"""Unit 4, causal work and balance: checks against what the planner counts."""

from __future__ import annotations

from typing import Any

import numpy as np

import tasp_core as tasp

from .verdict import exercise, expect, recap


@exercise
def check_work(answer: Any) -> None:
    """Pairs per rank and step of a contiguous ring."""
    for n, b in ((4, 8), (3, 5), (1, 4)):
        plan = tasp.plan([n * b], n, schedule="ring", layout="contiguous")
        right = tasp.check(plan).work
        rows = [list(row) if hasattr(row, "__len__") else [] for row in answer(n, b)]
        square = [len(row) for row in rows] == [n] * n
        expect(square, f"n = {n}: return {n} lists of {n} numbers, with 0 where no pair is visible")
        got = np.array(rows)
        for r, t in np.argwhere(got != right)[:1]:
            case = "own KV" if t == 0 else "earlier KV" if t <= r else "later KV"
            expect(False, f"n = {n}, b = {b}, rank {r}, step {t} ({case}): not {got[r, t]} pairs")


@exercise
def check_zigzag(answer: Any) -> None:
    """Tokens of every rank."""
    for n, total in ((4, 32), (3, 6), (1, 8), (5, 40)):
        plan = tasp.plan([total], n, schedule="ring", layout="zigzag")
        got = [list(answer(rank, n, total)) for rank in range(n)]
        what = f"n = {n}, total = {total}"
        odd = [x for tokens in got for x in tokens if not hasattr(x, "__index__")]
        expect(not odd, f"{what}: return a list of tokens; {odd[:1]} is not a token")
        seen = sorted(x for tokens in got for x in tokens)
        expect(seen == list(range(total)), f"{what}: every token must be on exactly one rank")
        for rank in range(n):
            right = plan.tokens(rank).tolist()
            expect(got[rank] == right, f"{what}: rank {rank} should not hold {got[rank][:6]}...")


@exercise
def check_bound(answer: Any) -> None:
    """Work of the busiest rank over the mean, for long contiguous sequences."""
    for n in (1, 2, 3, 8, 64):
        plan = tasp.plan([500 * n], n, schedule="ring", layout="contiguous")
        right, got = tasp.check(plan).balance, answer(n)
        expect(
            abs(got / right - 1) < 0.01, f"n = {n}: the counted ratio is {right:.3f}, not {got:.3f}"
        )


check_recap = recap(
    (10, "1 + 2 + 3 + 4"),
    (1, "its later steps bring KV that comes after all its queries"),
    (6, "block 1 from the back, of blocks 0 to 7"),
    (2.0, "2 - 1 / n"),
    (1.0, "each rank has one complete document"),
)
