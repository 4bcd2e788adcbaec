"""Program: one rank's part of a pass as a list of instructions, each with what it reads and writes.

An executor runs the instructions in their order and needs nothing else. No tensors here. Buffers, in rows
(tokens); those with * begin with the rank's own rows, rows of other ranks follow:

    kv *            keys and values
    q *             queries, in the backward pass with dout, out and lse; UNPACK takes them apart in place
    out *, dq *     results of the queries: partial outputs with their lse (forward), gradients (backward)
    dkv *           gradients of keys and values; a remote share's own accumulates until it is sent home
    partial_send    partial outputs of remote queries, as they are sent
    partial_recv    received partial outputs (forward) or query gradients (backward) of own queries
    dkv_recv        gradient receive buffer

SEND and RECV list messages; POST starts those listed since the last POST, together. From SEND or RECV
to the next WAIT the rows are in flight: a send's must not change, a receive's must not be read.

`str(program)` prints one instruction per line, with a label where a step begins, and `Program.parse` reads
that back:

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
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from ..errors import PlanError
from ..schedules import DKV, DQ, KINDS, KV, OUT, Q
from ..sequence.tiles import Sequences
from .buffers import Runs, end_to_end, union

SMALL_BYTES = 1 << 20  # a message with parts up to this size, on average, is not divided
SENDS = {KV: "kv", DKV: "dkv", Q: "q", OUT: "partial_send", DQ: "dq"}
RECEIVES = {KV: "kv", DKV: "dkv_recv", Q: "q", OUT: "partial_recv", DQ: "partial_recv"}
OWN_ROWS = ("kv", "q", "out", "dq", "dkv")  # buffers that begin with the rank's own rows


class Region(NamedTuple):
    """Rows [low, high) of a buffer."""

    buffer: str
    low: int
    high: int


Regions = tuple[Region, ...]


class Message(NamedTuple):
    """One send or receive of rows [low, low + count) of a buffer, or of `rows` where it has parts."""

    peer: int
    buffer: str
    low: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    kind: int
    owner: int
    share: int
    tag: int
    rows: Runs | None = None  # buffer rows `src` -> rows of the message, part by part
    shares: tuple[tuple[int, int], ...] | None = None  # (owner, share) of each part

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Buffer rows (low, count) of its parts, in the order in which they travel."""
        if self.rows is None:
            return [(self.low, self.count)]
        return list(zip(self.rows.src.tolist(), self.rows.count.tolist(), strict=True))

    @property
    def parts(self) -> list[tuple[int, int, int, int]]:
        """(owner, share, low, count) of its parts, in the order in which they travel."""
        names = self.shares or ((self.owner, self.share),)
        return [(*name, *rows) for name, rows in zip(names, self.ranges, strict=True)]

    @property
    def regions(self) -> Regions:
        """Its buffer rows."""
        if self.rows is None:
            return (Region(self.buffer, self.low, self.low + self.count),)
        return _regions(self.buffer, self.rows.src, self.rows.count)


class Call(NamedTuple):
    """One variable-length kernel call; its output rows are its sequences' query rows end to end.

    Where output rows go follows from the sequences: see `buffers.end_to_end`.
    """

    causal: bool
    sequences: Sequences
    q_runs: tuple[Runs, ...]  # output rows -> query rows; rows of one entry do not overlap
    k_runs: tuple[Runs, ...]  # key gradient rows -> key rows
    inverse_causal: int = 0  # so many of the last sequences of a causal call, see tiles.py

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs, of one head."""
        _, q, _, k = self.sequences
        return int((q * (q + 1) // 2 if self.causal else q * k).sum())


def _regions(buffer: str, low: np.ndarray, count: np.ndarray) -> Regions:
    return tuple(Region(buffer, *pair) for pair in union(low, count))


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, arrays element by element."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        both = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
        return both and np.array_equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@dataclass(frozen=True, eq=False)
class Instruction:
    """One entry of a program.

    Attributes:
        step: the communication step it belongs to: a label for people, tags and error texts.
        reads, writes: rows it needs and rows it fills or changes.
        begins: those of `writes` whose former contents it does not need.
    """

    op: ClassVar[str] = ""
    step: int

    @property
    def reads(self) -> Regions:
        return ()

    @property
    def writes(self) -> Regions:
        return ()

    @property
    def begins(self) -> Regions:
        return ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            _same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )

    def __hash__(self) -> int:
        return hash((self.op, self.step))


@dataclass(frozen=True, eq=False)
class Send(Instruction):
    """SEND: list a message to another rank; its rows are in flight until WAIT."""

    op = "SEND"
    message: Message

    @property
    def reads(self) -> Regions:
        return self.message.regions

    def __str__(self) -> str:
        return f"{self.op} {_message_text(self.message, '->')}"


@dataclass(frozen=True, eq=False)
class Recv(Instruction):
    """RECV: list a message from another rank; its rows are filled when WAIT ends."""

    op = "RECV"
    message: Message

    @property
    def writes(self) -> Regions:
        return self.message.regions

    begins = writes

    def __str__(self) -> str:
        return f"{self.op} {_message_text(self.message, '<-')}"


@dataclass(frozen=True, eq=False)
class Post(Instruction):
    """POST: start the sends and receives listed since the last POST, by this exchange.

    Every rank takes part in each POST all_to_all, with or without messages of its own: one collective
    for each kind.
    """

    op = "POST"
    exchange: str  # one of schedules.EXCHANGES
    kinds: tuple[int, ...] = ()  # of an all-to-all

    def __str__(self) -> str:
        return " ".join([self.op, self.exchange, *(KINDS[kind] for kind in self.kinds)])


@dataclass(frozen=True, eq=False)
class AllGather(Instruction):
    """ALL_GATHER: every rank's own KV, padded to `rows`, into the KV buffer in rank order, until WAIT."""

    op = "ALL_GATHER"
    tokens: int
    rows: int
    ranks: int

    @property
    def reads(self) -> Regions:
        return (Region("kv", 0, self.tokens),) if self.tokens else ()

    @property
    def writes(self) -> Regions:
        high = self.tokens + self.ranks * self.rows
        return (Region("kv", self.tokens, high),) if self.rows else ()

    begins = writes

    def __str__(self) -> str:
        return f"{self.op} kv 0..{self.tokens} ranks {self.ranks} rows {self.rows}"


IN_FLIGHT = (Send, Recv, AllGather)  # their rows are in flight from here to the next WAIT


@dataclass(frozen=True, eq=False)
class Wait(Instruction):
    """WAIT: until everything in flight has left or arrived."""

    op = "WAIT"

    def __str__(self) -> str:
        return self.op


@dataclass(frozen=True, eq=False)
class Unpack(Instruction):
    """UNPACK: take received queries apart where they lie; their rows of `result` begin empty."""

    op = "UNPACK"
    result: str  # "out" or "dq"
    rows: Runs

    @property
    def reads(self) -> Regions:
        return _regions("q", self.rows.dst, self.rows.count)

    @property
    def writes(self) -> Regions:
        return (*self.reads, *self.begins)

    @property
    def begins(self) -> Regions:
        return _regions(self.result, self.rows.dst, self.rows.count)

    def __str__(self) -> str:
        return f"{self.op} q {self.result} {_ranges_text(self.rows)}"


@dataclass(frozen=True, eq=False)
class Zero(Instruction):
    """ZERO: rows of a gradient buffer begin at zero."""

    op = "ZERO"
    buffer: str
    rows: Runs

    @property
    def writes(self) -> Regions:
        return _regions(self.buffer, self.rows.dst, self.rows.count)

    begins = writes

    def __str__(self) -> str:
        return f"{self.op} {self.buffer} {_ranges_text(self.rows)}"


@dataclass(frozen=True, eq=False)
class _Rows(Instruction):
    """Rows of one buffer that go to rows of another, in the order in which they are listed."""

    source: str
    target: str
    rows: Runs

    @property
    def reads(self) -> Regions:
        return _regions(self.source, self.rows.src, self.rows.count)

    @property
    def writes(self) -> Regions:
        return _regions(self.target, self.rows.dst, self.rows.count)

    def __str__(self) -> str:
        return f"{self.op} {self.source} -> {self.target} {_runs_text(self.rows)}"


@dataclass(frozen=True, eq=False)
class Pack(_Rows):
    """PACK: partial outputs and their lse, as one row each, to be sent."""

    op = "PACK"

    @property
    def begins(self) -> Regions:
        return self.writes


@dataclass(frozen=True, eq=False)
class Add(_Rows):
    """ADD: received gradients to the rows they belong to; several runs may add to the same rows."""

    op = "ADD"


@dataclass(frozen=True, eq=False)
class Merge(_Rows):
    """MERGE: received partial outputs into those of the rank's own queries, weighted by their lse."""

    op = "MERGE"


@dataclass(frozen=True, eq=False)
class Free(Instruction):
    """FREE: nothing needs these rows any more, the next instruction may overwrite them."""

    op = "FREE"
    buffer: str
    rows: Runs

    @property
    def writes(self) -> Regions:
        return _regions(self.buffer, self.rows.dst, self.rows.count)

    begins = writes

    def __str__(self) -> str:
        return f"{self.op} {self.buffer} {_ranges_text(self.rows)}"


@dataclass(frozen=True, eq=False)
class Attend(Instruction):
    """ATTEND: kernel calls on rows [low, low + count) of `kv`, or on those of them in `gather`.

    Sequences of the calls are rows of `q` against these rows, counted from the first. Forward, results
    are merged into `out`; ATTEND_BACKWARD adds to `dq` and `dkv`.
    """

    low: int
    count: int
    gather: np.ndarray | None  # KV rows to copy first, relative to `low`; None: read in place
    calls: tuple[Call, ...]
    grads: tuple[Runs, ...]  # KV rows of the calls -> `dkv` rows; rows of one entry do not overlap
    backward: bool = False

    @property
    def op(self) -> str:  # type: ignore[override]
        return "ATTEND_BACKWARD" if self.backward else "ATTEND"

    def _sides(self) -> tuple[np.ndarray, ...]:
        columns = zip(*(call.sequences for call in self.calls), strict=True)
        return tuple(np.concatenate(column) for column in columns)

    @property
    def reads(self) -> Regions:
        if not self.calls:
            return ()
        q_low, q_count, k_low, k_count = self._sides()
        if self.gather is None:
            kv = _regions("kv", self.low + k_low, k_count)
        else:
            rows = self.low + self.gather
            kv = _regions("kv", rows, np.ones_like(rows))
        return (*_regions("q", q_low, q_count), *kv)

    @property
    def writes(self) -> Regions:
        if not self.calls:
            return ()
        q_low, q_count, *_ = self._sides()
        grads = [_regions("dkv", runs.dst, runs.count) for runs in self.grads]
        results = _regions("dq" if self.backward else "out", q_low, q_count)
        return (*results, *(region for regions in grads for region in regions))

    def __str__(self) -> str:
        parts = [self.op, f"kv {self.low}..{self.low + self.count}"]
        if self.gather is not None:
            cuts = np.flatnonzero(np.diff(self.gather) != 1) + 1
            pieces = np.split(self.gather, cuts) if len(self.gather) else []
            parts += ["gather", *(f"{p[0]}..{p[-1] + 1}" for p in pieces)]
        for call in self.calls:
            texts = [
                f"{a}..{a + m}x{b}..{b + n}"
                for a, m, b, n in zip(*(c.tolist() for c in call.sequences), strict=True)
            ]
            turn = len(texts) - call.inverse_causal
            parts += ["causal" if call.causal else "full", *texts[:turn]]
            parts += ["inverse_causal", *texts[turn:]] if call.inverse_causal else []
        for runs in self.grads:
            parts += ["dkv", _runs_text(runs)]
        return " ".join(parts)


class Step(NamedTuple):
    """The instructions of one step, and views of them. Nothing runs by steps: it is a way to look."""

    instructions: tuple[Instruction, ...]

    @property
    def sends(self) -> tuple[Message, ...]:
        """Messages sent, in the order in which they are posted.

        To and from one peer they come in the order of their tags, on both ends alike: NCCL pairs
        messages by that order, gloo by their tags.
        """
        return tuple(i.message for i in self.instructions if isinstance(i, Send))

    @property
    def recvs(self) -> tuple[Message, ...]:
        """Messages received, in the order in which they are posted."""
        return tuple(i.message for i in self.instructions if isinstance(i, Recv))

    @property
    def compute(self) -> Attend | None:
        """What is computed, if anything."""
        return next((i for i in self.instructions if isinstance(i, Attend)), None)


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's part of a pass. Buffer sizes are in tokens (rows), beside the rank's own."""

    rank: int
    ranks: int
    backward: bool
    tokens: int
    kv_buffer_rows: int
    remote_grad_rows: int
    grad_receive_rows: int
    remote_query_rows: int
    received_partial_rows: int
    gathered_rows: int  # rows of one rank in a collective's buffer
    num_steps: int
    exchange: str  # how messages move: one of schedules.EXCHANGES
    kinds: tuple[int, ...]  # what moves in the pass on any rank; equal on all ranks
    instructions: tuple[Instruction, ...]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The instructions by step."""
        by_step: list[list[Instruction]] = [[] for _ in range(self.num_steps)]
        for instruction in self.instructions:
            by_step[instruction.step].append(instruction)
        return tuple(Step(tuple(instructions)) for instructions in by_step)

    @property
    def collective(self) -> str | None:
        """The collective that moves every rank's KV, if one does."""
        gathers = any(isinstance(i, AllGather) for i in self.instructions)
        return "all_gather" if gathers else None

    @property
    def num_calls(self) -> int:
        """Kernel calls of the pass."""
        return sum(len(i.calls) for i in self.instructions if isinstance(i, Attend))

    @property
    def sends_queries(self) -> bool:
        """Whether its own queries travel."""
        return any(i.message.kind == Q for i in self.instructions if isinstance(i, Send))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and all(
            _same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )

    def __hash__(self) -> int:
        return hash((self.rank, self.ranks, self.backward, self.tokens, len(self.instructions)))

    def __str__(self) -> str:
        return program_text(self)

    @classmethod
    def parse(cls, text: str) -> Program:
        """Read a printed program back: `Program.parse(str(program)) == program`.

        Raises:
            PlanError: a line that is not an instruction, or a header that lacks something.
        """
        return parse_program(text)


def _ranges_text(rows: Runs) -> str:
    return " ".join(
        f"{a}..{a + n}" for a, n in zip(rows.dst.tolist(), rows.count.tolist(), strict=True)
    )


def _runs_text(rows: Runs) -> str:
    return " ".join(
        f"{s}..{s + n}>{d}" for s, d, n in zip(*(c.tolist() for c in rows), strict=True)
    )


def _message_text(m: Message, arrow: str) -> str:
    texts, before = [], (m.owner, m.share)
    for owner, share, low, count in m.parts:
        texts += [f"+{owner}.{share}"] if (owner, share) != before else []
        texts.append(f"{low}..{low + count}")
        before = owner, share
    name = f"{KINDS[m.kind]}{m.owner}.{m.share}"
    return f"{name} {arrow}{m.peer} #{m.tag} @{m.buffer} " + " ".join(texts)


# ---- text form

WIDTH = 100
Moved = TypeVar("Moved", Pack, Add, Merge)
_NUMBERS = [f.name for f in fields(Program) if f.name not in ("exchange", "kinds", "instructions")]


def wrap(line: str, indent: str = "") -> str:
    """A line, cut at spaces, the rest on lines that begin with `|`."""
    lines, current = [], indent
    for item in line.split(" "):
        if len(current) + len(item) > WIDTH and current.strip(" |"):
            lines.append(current.rstrip())
            current = f"{indent}| "
        current += item + " "
    return "\n".join([*lines, current.rstrip()])


def program_text(program: Program) -> str:
    """A program as text; see above."""
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
    values = dict(item.partition("=")[::2] for item in lines[0].split()[1:])
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
    backward = bool(numbers.pop("backward"))
    return Program(
        **numbers,
        backward=backward,
        exchange=exchange,
        kinds=kinds,
        instructions=tuple(instructions),
    )


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
    op, *items = line.split() or [""]
    if op not in _PARSERS:
        raise PlanError(f"{line!r:.100}: instructions are {', '.join(_PARSERS)}, got {op!r:.40}")
    try:
        instruction = _PARSERS[op](step, items)
    except (ValueError, IndexError) as error:
        raise PlanError(f"cannot read {line!r:.200}") from error
    if str(instruction).split() != [op, *items]:  # more than it takes, or rows that cannot be
        raise PlanError(f"cannot read {line!r:.200}; it would be {str(instruction)!r:.200}")
    return instruction


def _range(text: str) -> tuple[int, int]:
    """low and count of "low..high"."""
    low, high = map(int, text.split(".."))
    if not 0 <= low <= high:
        raise ValueError(text)
    return low, high - low


def _runs(rows: list[tuple[int, int, int]]) -> Runs:
    return Runs(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


def _moved_rows(items: list[str]) -> Runs:
    """Rows "src..high>dst"."""
    rows = []
    for item in items:
        source, target = item.split(">")
        low, count = _range(source)
        rows.append((low, int(target), count))
    return _runs(rows)


def _rows(items: list[str]) -> Runs:
    """Rows onto themselves."""
    return _runs([(low, low, count) for low, count in map(_range, items)])


def _message(items: list[str], arrow: str) -> Message:
    what, peer, tag, buffer, *rest = items
    match = re.fullmatch(rf"({'|'.join(KINDS)})(\d+)\.(\d+)", what)
    if not match or not peer.startswith(arrow) or tag[0] != "#" or buffer[0] != "@":
        raise ValueError(items)
    owner, share = int(match[2]), int(match[3])
    names, rows, name = [], [], (owner, share)
    for item in rest:
        if item.startswith("+"):
            other_owner, other_share = map(int, item[1:].split("."))
            name = other_owner, other_share
        else:
            names.append(name)
            rows.append(_range(item))
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
    """The parser of an instruction that moves rows between buffers: "dkv_recv -> dkv 0..4>8"."""

    def parse(step: int, items: list[str]) -> Moved:
        source, arrow, target, *rest = items
        if arrow != "->":
            raise ValueError(items)
        return make(step, source, target, _moved_rows(rest))

    return parse


def _attend(step: int, items: list[str], *, backward: bool) -> Attend:
    kv, rows, *rest = items
    if kv != "kv":
        raise ValueError(items)
    sections: list[tuple[str, list[str]]] = []
    for item in rest:
        if item[0].isdigit():
            sections[-1][1].append(item)
        else:
            sections.append((item, []))
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


def _all_gather(step: int, items: list[str]) -> AllGather:
    _, own, _, ranks, _, rows = items
    return AllGather(step, _range(own)[1], int(rows), int(ranks))


_PARSERS: dict[str, Callable[[int, list[str]], Instruction]] = {
    "SEND": lambda step, items: Send(step, _message(items, "->")),
    "RECV": lambda step, items: Recv(step, _message(items, "<-")),
    "POST": lambda step, items: Post(step, items[0], tuple(map(KINDS.index, items[1:]))),
    "ALL_GATHER": _all_gather,
    "WAIT": lambda step, items: Wait(step),
    "UNPACK": lambda step, items: Unpack(step, items[1], _rows(items[2:])),
    "PACK": _moved(Pack),
    "ZERO": lambda step, items: Zero(step, items[0], _rows(items[1:])),
    "ATTEND": lambda step, items: _attend(step, items, backward=False),
    "ATTEND_BACKWARD": lambda step, items: _attend(step, items, backward=True),
    "ADD": _moved(Add),
    "MERGE": _moved(Merge),
    "FREE": lambda step, items: Free(step, items[0], _rows(items[1:])),
}
