"""Streams: which instructions of a program may run beside which, from what they read and write.

A program is one list in step order. Its instructions fall into two streams, each of which keeps the order
of the list: what moves messages, and what computes. An instruction only has to wait for those of the other
stream that it depends on: read after write, write after read, write after write. So messages of a step may
start before the computation of the step before has ended, as far as their rows are free.

    >>> from tasp_core import plan
    >>> from tasp_core.lowering.lower import lower
    >>> made = streams_of(lower(plan([64], ranks=4, schedule="ring"), 0))
    >>> len(made.messages), len(made.computations)
    (12, 7)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .passes import buffer_rows
from .program import AllGather, Post, Program, Recv, Region, Send, Wait

EXECUTORS = ("steps", "dependencies")  # how `attention` runs programs, and `simulate` predicts them
MESSAGES = (Send, Recv, Post, AllGather, Wait)
NEVER = -1


class Streams(NamedTuple):
    """The two streams, as indices of `program.instructions` in their order.

    Attributes:
        messages: SEND, RECV, POST, ALL_GATHER and WAIT. computations: all others.
        after: for each instruction, the last one of the other stream that has to end before it begins;
            NEVER if there is none. What a POST starts ends at its WAIT.
    """

    messages: tuple[int, ...]
    computations: tuple[int, ...]
    after: tuple[int, ...]


class _LastUses:
    """For each row of each buffer, the last instruction of one stream that has read or written it."""

    def __init__(self, program: Program) -> None:
        sizes = buffer_rows(program)
        self.read = {name: np.full(rows, NEVER) for name, rows in sizes.items()}
        self.written = {name: np.full(rows, NEVER) for name, rows in sizes.items()}

    def last(self, region: Region, *, writes: bool) -> int:
        """The last use that an access to these rows has to wait for."""
        rows = slice(region.low, region.high)
        last = int(self.written[region.buffer][rows].max(initial=NEVER))
        if writes:
            last = max(last, int(self.read[region.buffer][rows].max(initial=NEVER)))
        return last

    def record(self, index: int, reads: list[Region], writes: list[Region]) -> None:
        """Instruction `index` ends having used these rows."""
        for table, regions in ((self.read, reads), (self.written, writes)):
            for region in regions:
                table[region.buffer][region.low : region.high] = index


def streams_of(program: Program) -> Streams:
    """A program's two streams, and what each instruction waits for; kept with the program."""
    if "streams" not in program.__dict__:
        program.__dict__["streams"] = _streams(program)
    result: Streams = program.__dict__["streams"]
    return result


def _streams(program: Program) -> Streams:
    by_messages, by_computations = _LastUses(program), _LastUses(program)
    in_flight: tuple[list[Region], list[Region]] = ([], [])  # rows that leave, and that arrive
    messages: list[int] = []
    computations: list[int] = []
    after: list[int] = []
    for index, instruction in enumerate(program.instructions):
        is_message = isinstance(instruction, MESSAGES)
        others = by_computations if is_message else by_messages
        waits_for = [others.last(region, writes=False) for region in instruction.reads]
        waits_for += [others.last(region, writes=True) for region in instruction.writes]
        after.append(max(waits_for, default=NEVER))
        (messages if is_message else computations).append(index)
        if not is_message:
            by_computations.record(index, list(instruction.reads), list(instruction.writes))
        elif isinstance(instruction, Wait):
            by_messages.record(index, *in_flight)
            in_flight = ([], [])
        else:
            in_flight[0].extend(instruction.reads)
            in_flight[1].extend(instruction.writes)
    return Streams(tuple(messages), tuple(computations), tuple(after))
