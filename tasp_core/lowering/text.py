"""The text form of programs: one instruction per line, a label where a step begins.

    PROGRAM rank=0 ranks=4 backward=0 tokens=16 kv_buffer_rows=32 ... exchange=p2p kinds=kv
    step 0:
      SEND kv0.0 ->1 #0 @kv 0..16
      RECV kv3.0 <-3 #0 @kv 16..32
      POST p2p
      ATTEND kv 0..16 causal 0..16x0..16
      WAIT

Rows are low..high. `#` is the message's number on its link in its step; a message in parts lists their rows
in the order in which they travel, `+owner.share` before the parts of another share. In ATTEND a sequence
is query rows x KV rows (the latter counted from the first row that the call reads), `dkv 0..4>8` adds rows
0 to 4 of the KV gradient to rows from 8 on. Long lines continue on lines that begin with `|`. Lines that
begin with `#` are comments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TypeVar

import numpy as np

from ..errors import PlanError
from ..schedules import KINDS
from ..sequence.tiles import Sequences
from .buffers import Runs, end_to_end
from .program import (
    Add,
    AllGather,
    Attend,
    Call,
    Free,
    Instruction,
    Merge,
    Message,
    Pack,
    Post,
    Program,
    Recv,
    Send,
    Unpack,
    Wait,
    Zero,
)

WIDTH = 100
Moved = TypeVar("Moved", Pack, Add, Merge)
_NUMBERS = [f.name for f in fields(Program) if f.name not in ("exchange", "kinds", "instructions")]


def wrap(line: str, indent: str = "") -> str:
    """A line, cut at spaces, the rest on lines that begin with `|`."""
    lines, current = [], indent
    for word in line.split(" "):
        if len(current) + len(word) > WIDTH and current.strip(" |"):
            lines.append(current.rstrip())
            current = f"{indent}| "
        current += word + " "
    return "\n".join([*lines, current.rstrip()])


def program_text(program: Program) -> str:
    """A program in words; see above."""
    numbers = [f"{name}={int(getattr(program, name))}" for name in _NUMBERS]
    kinds = ",".join(KINDS[kind] for kind in program.kinds)
    lines = [wrap(" ".join(["PROGRAM", *numbers, f"exchange={program.exchange} kinds={kinds}"]))]
    step = -1
    for instruction in program.instructions:
        if instruction.step != step:
            step = instruction.step
            lines.append(f"step {step}:")
        lines.append(wrap(str(instruction), "  "))
    return "\n".join(lines)


def parse_program(text: str) -> Program:
    """See `Program.parse`."""
    lines = [line for line in _lines(text) if not line.startswith("#")]
    if not lines or not lines[0].startswith("PROGRAM "):
        raise PlanError("a program begins with a line 'PROGRAM rank=0 ranks=4 ...'")
    values = dict(word.partition("=")[::2] for word in lines[0].split()[1:])
    step, instructions = 0, []
    try:
        numbers = {name: int(values[name]) for name in _NUMBERS}
        kinds = tuple(KINDS.index(name) for name in values["kinds"].split(",") if name)
        exchange = values["exchange"]
    except (KeyError, ValueError) as error:
        raise PlanError(f"cannot read the program's first line, {lines[0]!r:.200}") from error
    for line in lines[1:]:
        if label := re.fullmatch(r"step (\d+):", line):
            step = int(label[1])
        else:
            instructions.append(parse_instruction(line, step))
    numbers["backward"] = bool(numbers["backward"])
    return Program(**numbers, exchange=exchange, kinds=kinds, instructions=tuple(instructions))


def _lines(text: str) -> Iterator[str]:
    """Lines that are not empty, with those that continue them."""
    line = ""
    for part in map(str.strip, text.splitlines()):
        if part.startswith("|"):
            line += " " + part[1:].strip()
        else:
            if line:
                yield line
            line = part
    if line:
        yield line


def parse_instruction(line: str, step: int = 0) -> Instruction:
    """Read one instruction.

    Raises:
        PlanError: it is none.

    >>> print(parse_instruction("RECV kv2.1 <-2 #0 @kv 512..640"))
    RECV kv2.1 <-2 #0 @kv 512..640
    """
    op, *words = line.split()
    if op not in _PARSERS:
        raise PlanError(f"{line!r:.100}: instructions are {', '.join(_PARSERS)}, got {op!r:.40}")
    try:
        return _PARSERS[op](step, words)
    except (ValueError, IndexError) as error:
        raise PlanError(f"cannot read {line!r:.200}") from error


def _range(text: str) -> tuple[int, int]:
    """low and count of "low..high"."""
    low, high = map(int, text.split(".."))
    return low, high - low


def _runs(rows: list[tuple[int, int, int]]) -> Runs:
    return Runs(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


def _moved_rows(words: list[str]) -> Runs:
    """Rows "src..high>dst"."""
    rows = []
    for word in words:
        source, target = word.split(">")
        low, count = _range(source)
        rows.append((low, int(target), count))
    return _runs(rows)


def _rows(words: list[str]) -> Runs:
    """Rows onto themselves."""
    return _runs([(low, low, count) for low, count in map(_range, words)])


def _message(words: list[str], arrow: str) -> Message:
    what, peer, tag, buffer, *rest = words
    match = re.fullmatch(rf"({'|'.join(KINDS)})(\d+)\.(\d+)", what)
    if not match or not peer.startswith(arrow) or tag[0] != "#" or buffer[0] != "@":
        raise ValueError(words)
    owner, share = int(match[2]), int(match[3])
    names, rows, name = [], [], (owner, share)
    for word in rest:
        if word.startswith("+"):
            other_owner, other_share = map(int, word[1:].split("."))
            name = other_owner, other_share
        else:
            names.append(name)
            rows.append(_range(word))
    count = np.array([n for _, n in rows], dtype=np.int64)
    low = np.array([a for a, _ in rows], dtype=np.int64)
    several = len(rows) > 1
    return Message(
        int(peer[len(arrow) :]),
        buffer[1:],
        rows[0][0],
        int(count.sum()),
        KINDS.index(match[1]),
        owner,
        share,
        int(tag[1:]),
        Runs(low, np.cumsum(count) - count, count) if several else None,
        tuple(names) if several else None,
    )


def _moved(make: type[Moved]) -> Callable[[int, list[str]], Moved]:
    def parse(step: int, words: list[str]) -> Moved:
        source, arrow, target, *rest = words
        if arrow != "->":
            raise ValueError(words)
        return make(step, source, target, _moved_rows(rest))

    return parse


def _attend(step: int, words: list[str], *, backward: bool) -> Attend:
    kv, rows, *rest = words
    if kv != "kv":
        raise ValueError(words)
    sections: list[tuple[str, list[str]]] = []
    for word in rest:
        if word[0].isdigit():
            sections[-1][1].append(word)
        else:
            sections.append((word, []))
    gather, grads = None, []
    calls: list[tuple[bool, list[str], int]] = []
    for name, texts in sections:
        if name == "gather":
            pieces = [np.arange(low, low + count) for low, count in map(_range, texts)]
            gather = np.concatenate([np.zeros(0, dtype=np.int64), *pieces])
        elif name in ("causal", "full"):
            calls.append((name == "causal", texts, 0))
        elif name == "inverse_causal":
            causal, before, _ = calls.pop()
            calls.append((causal, before + texts, len(texts)))
        elif name == "dkv":
            grads.append(_moved_rows(texts))
        else:
            raise ValueError(name)
    return Attend(
        step, *_range(rows), gather, tuple(_call(*call) for call in calls), tuple(grads), backward
    )


def _call(causal: bool, texts: list[str], inverse_causal: int) -> Call:
    sides = [(*_range(q), *_range(k)) for q, k in (text.split("x") for text in texts)]
    sequences = Sequences(*np.array(sides, dtype=np.int64).reshape(-1, 4).T)
    return call_of(causal, sequences, inverse_causal)


def call_of(causal: bool, sequences: Sequences, inverse_causal: int) -> Call:
    """A call, and where its output rows go."""
    q_runs = end_to_end(sequences.q_lo, sequences.q_n)
    k_runs = end_to_end(sequences.k_lo, sequences.k_n)
    return Call(causal, sequences, q_runs, k_runs, inverse_causal)


def _all_gather(step: int, words: list[str]) -> AllGather:
    _, own, _, ranks, _, rows = words
    return AllGather(step, _range(own)[1], int(rows), int(ranks))


_PARSERS: dict[str, Callable[[int, list[str]], Instruction]] = {
    "SEND": lambda step, words: Send(step, _message(words, "->")),
    "RECV": lambda step, words: Recv(step, _message(words, "<-")),
    "POST": lambda step, words: Post(step, words[0], tuple(map(KINDS.index, words[1:]))),
    "ALL_GATHER": _all_gather,
    "WAIT": lambda step, words: Wait(step),
    "UNPACK": lambda step, words: Unpack(step, words[1], _rows(words[2:])),
    "PACK": _moved(Pack),
    "ZERO": lambda step, words: Zero(step, words[0], _rows(words[1:])),
    "ATTEND": lambda step, words: _attend(step, words, backward=False),
    "ATTEND_BACKWARD": lambda step, words: _attend(step, words, backward=True),
    "ADD": _moved(Add),
    "MERGE": _moved(Merge),
    "FREE": lambda step, words: Free(step, words[0], _rows(words[1:])),
}
