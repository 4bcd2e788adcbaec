"""Hazards: where the order of a program's instructions does not respect what they read and write.

    hazards(program)        # [] or one line for each access that comes too early or too late

Every row of every buffer is followed through the list. It is empty, filled, arriving (from RECV to WAIT) or
leaving (from SEND to WAIT). An instruction may read filled rows only, change filled rows that are not
leaving, and begin rows only where they are empty: FREE says that nobody needs the former contents.
Together this is read after write, write after read and write after write, with messages in flight.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from .passes import buffer_rows
from .program import (
    IN_FLIGHT,
    OWN_ROWS,
    AllGather,
    Free,
    Post,
    Program,
    Recv,
    Region,
    Send,
    Wait,
)

EMPTY, FILLED, ARRIVING = range(3)
WORDS = ("empty", "filled", "arriving")


class _Rows:
    """What is in each row of each buffer."""

    def __init__(self, program: Program, *, keep_kv: bool) -> None:
        self.state, self.leaving = {}, {}
        for name, size in buffer_rows(program).items():
            self.state[name] = np.full(size, EMPTY)
            self.leaving[name] = np.zeros(size, dtype=bool)
            if name in OWN_ROWS:
                self.state[name][: program.tokens] = FILLED
        if keep_kv and program.backward:
            self.state["kv"][:] = FILLED

    def of(self, region: Region) -> np.ndarray:
        return self.state[region.buffer][region.low : region.high]

    def is_leaving(self, region: Region) -> np.ndarray:
        return self.leaving[region.buffer][region.low : region.high]

    def errors(self, region: Region, *, begins: bool, writes: bool) -> str:
        """Why these rows may not be accessed now, or nothing."""
        state = self.of(region)
        wanted = EMPTY if begins else FILLED
        if wrong := sorted({WORDS[int(x)] for x in np.unique(state) if x != wanted}):
            return f"are {' and '.join(wrong)}, not {WORDS[wanted]}"
        return "are still leaving" if writes and self.is_leaving(region).any() else ""


def hazards(program: Program, *, keep_kv: bool = False) -> list[str]:
    """Accesses that the order of the instructions gets wrong; one line each, at most one per region.

    Args:
        keep_kv: the program is one of those that `lower(..., keep_kv=True)` makes.

    >>> from tasp_core import plan
    >>> from tasp_core.lowering.lower import lower
    >>> hazards(lower(plan([64], ranks=4, schedule="ring"), 0))
    []
    """
    rows = _Rows(program, keep_kv=keep_kv)
    result: list[str] = []
    listed: dict[str, int] = defaultdict(int)  # sends and receives that no POST has started
    in_flight = 0
    for number, instruction in enumerate(program.instructions):
        where = f"instruction {number}, step {instruction.step}: {str(instruction)[:80]}"
        frees = isinstance(instruction, Free)
        begins = () if frees else instruction.begins
        changes = [r for r in instruction.writes if r not in begins]
        checks = (
            *((r, False, False) for r in instruction.reads if r not in changes),
            *((r, False, True) for r in changes),
            *((r, True, True) for r in begins),
        )
        for region, fresh, writes in checks:
            if error := rows.errors(region, begins=fresh, writes=writes):
                name = f"{region.buffer} {region.low}..{region.high}"
                result.append(f"{where}: rows {name} {error}")
        for region in begins:
            rows.of(region)[:] = ARRIVING if isinstance(instruction, IN_FLIGHT) else FILLED
        if isinstance(instruction, Free):
            for region in instruction.writes:
                rows.of(region)[:] = EMPTY
        elif isinstance(instruction, Send | AllGather):
            for region in instruction.reads:
                rows.is_leaving(region)[:] = True
        if isinstance(instruction, Send | Recv):
            listed[instruction.op] += 1
        elif isinstance(instruction, Post | AllGather):
            in_flight += 1
            if isinstance(instruction, Post):
                listed.clear()
        elif isinstance(instruction, Wait):
            if listed or not in_flight:
                why = "is listed, but not posted" if listed else "is in flight"
                result.append(f"{where}: {' and '.join(listed) or 'nothing'} {why}")
            in_flight = 0
            for state in rows.state.values():
                state[state == ARRIVING] = FILLED
            for leaving in rows.leaving.values():
                leaving[:] = False
    if listed or in_flight:
        result.append("the program ends before all messages have been waited for")
    return result
