"""Unit 3, from table to ranks: an order that hangs, live ranges of shares, a slow machine, checks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tasp_core import Documents, Machine
from tasp_core.kernels.reference import oracle
from tasp_core.schedules import Hops

from .real import on_ranks, only_blocking, require_message_size
from .tables import ring_lines
from .verdict import exercise, expect, recap

LATE_S = 0.05
SLOW = Machine("slow", 4, link_gbps=25.0, tflops=100.0, source="invented, for this unit")
Life = tuple[int, int]


def all_send_first(rank: int, group: Any) -> float:
    """Every rank sends to the right before it receives from the left: a deadlock."""
    n = dist.get_world_size(group)
    got = torch.empty(1)
    dist.send(torch.tensor([float(rank)]), (rank + 1) % n, group)
    dist.recv(got, (rank - 1) % n, group)
    return float(got)


def ring_lives(n: int) -> list[Life]:
    """(arrival, last use) of each share that a rank of a ring receives: it is used one step later."""
    return [(t, t + 1) for t in range(n - 1)]


def error_against_float64(out: Tensor, docs: Documents) -> float:
    """Largest difference from attention on one process in float64, on the inputs of seed 0."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(docs.total, heads, 32) for heads in (4, 2, 2))
    return float((out - oracle(q, k, v, docs)["out"]).abs().max())


def _steps(lines: list[str]) -> list[list[tuple[int, int, int]]]:
    hops = Hops.parse(lines)
    rows = list(zip(*(c.tolist() for c in hops[:4]), strict=True))
    return [[r[1:] for r in rows if r[0] == t] for t in range(int(hops.step.max()) + 1)]


@exercise
def check_move(answer: Any) -> None:
    """Complete schedules, step by step, on four ranks, two of them late: a ring, a direct exchange."""
    data = np.random.default_rng(3).normal(size=(4, 4)).astype("float32")
    direct = [f"t0 {r}>{(r + d) % 4} kv{r}.0" for r in range(4) for d in (1, 2, 3)]

    def run(rank: int, group: Any, steps: list[Any]) -> Any:
        require_message_size(torch.empty(4))
        held = {rank: torch.from_numpy(data[rank].copy())}
        for hops in steps:
            if rank % 2:
                time.sleep(
                    LATE_S
                )  # a rank that does not wait receives nothing from this one, or sends it nan
            before, after = dict(held), answer(rank, group, hops, held)
            if not isinstance(after, dict):
                return after
            held = {owner: x.clone() for owner, x in after.items()}
            for x in (*before.values(), *after.values()):
                x.fill_(torch.nan)
        return {owner: x.numpy() for owner, x in held.items()}

    for what, lines in (("the ring", ring_lines(4)), ("all at once", direct)):
        for rank, held in enumerate(on_ranks(run, 4, _steps(lines))):
            expect(isinstance(held, dict), f"return the dict `held`, not {held!r}")
            for owner in range(4):
                expect(
                    owner in held,
                    f"{what}: after the last step rank {rank} does not hold kv{owner}",
                )
                expect(
                    np.array_equal(held[owner], data[owner]),
                    f"{what}: held[{owner}] of rank {rank} is not what rank {owner} began with; do you "
                    "send held[owner], store what arrives under its owner, and wait for both?",
                )


@exercise
def check_turn(answer: Any) -> None:
    """Each number is sent one rank to the right, on four and on three ranks, by blocking calls."""
    own = [2.5, -1.0, 7.0, 0.125]

    def run(rank: int, group: Any) -> Any:
        require_message_size(torch.empty(1))
        only_blocking()
        return answer(rank, group, own[rank])

    for n in (4, 3):
        for rank, got in enumerate(on_ranks(run, n)):
            right = own[(rank - 1) % n]
            expect(got == right, f"{n} ranks: rank {rank} should return {right}, it returned {got}")


def _most_live(lives: list[Life]) -> int:
    steps = range(max(last for _, last in lives) + 1)
    return max(sum(first <= t <= last for first, last in lives) for t in steps)


@exercise
def check_slots(answer: Any) -> None:
    """Slots of live ranges: those of a ring, one share at a time, and a mixture."""
    mixed = [(0, 3), (0, 1), (1, 1), (2, 5), (3, 4), (4, 4), (5, 6), (6, 8)]
    for lives in (ring_lives(6), ring_lives(2), [(t, t) for t in range(4)], mixed):
        slots = list(answer(lives))
        expect(len(slots) == len(lives), f"{lives}: return {len(lives)} numbers, one per share")
        for i, (first, _) in enumerate(lives):
            clash = [j for j in range(i) if slots[j] == slots[i] and lives[j][1] >= first]
            expect(
                not clash,
                f"{lives}: share {i} overwrites share {clash and clash[0]}, which is still in use",
            )
        fewest = _most_live(lives)
        expect(
            set(slots) == set(range(fewest)),
            f"{lives}: use exactly the slots 0 to {fewest - 1}: so many shares are live at once",
        )


check_recap = recap(
    ("isend", "the i stands for immediate"),
    (3, "no rank has sent anything"),
    (2, "one share is read and forwarded while the next one arrives"),
    (5, "with overlap, a step takes the longer of the two times"),
    (2, "at best compute and communication take the same time and overlap completely"),
)
