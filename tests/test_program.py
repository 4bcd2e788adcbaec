"""Programs: they print and parse back, and the order of their instructions respects reads and writes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from interpreter import interpret
from spread import spread

import tasp_core as tasp
from tasp_core import Plan, PlanError, lower, plan
from tasp_core.lowering import passes
from tasp_core.lowering.hazards import hazards
from tasp_core.lowering.program import (
    WIDTH,
    Add,
    Attend,
    Free,
    Instruction,
    Merge,
    Pack,
    Post,
    Program,
    Recv,
    Send,
    Unpack,
    Wait,
    Zero,
    parse_instruction,
)

DOCS = tasp.Documents.of([37, 1, 0, 26])
ONE = tasp.Documents.of([96])  # every rank attends to KV of every other one
CASES = spread(itertools.product(tasp.schedules(), tasp.layouts()), keep=len(tasp.schedules()))


def plans(schedule: str, layout: str) -> list[Plan]:
    """Plans of up to six ranks, with and without nodes and all-to-alls; full, causal and windowed."""
    masks = itertools.cycle(
        [
            DOCS,
            tasp.Documents.of(DOCS.lengths, causal=False),
            tasp.Documents.of(DOCS.lengths, causal=True, window=9),
        ]
    )
    variants = [(1, None, {}), (2, None, {}), (3, None, {}), (4, None, {}), (4, "mesh2x2", {})]
    variants += [(6, "mesh3x2", {}), (3, None, {"exchange": "all_to_all"})]
    made = []
    for (ranks, machine, options), docs in zip(variants, masks, strict=False):
        keywords = {"machine": machine, "layout": layout, "schedule": schedule}
        keywords["schedule_options"] = options or None
        if tasp.supports(docs, ranks, **keywords):
            made.append(plan(docs, ranks, **keywords))
    return made


def programs(p: Plan) -> list[tuple[Program, bool]]:
    """Every rank's programs of both passes, with and without keep_kv."""
    return [
        (lower(p, rank, backward=backward, keep_kv=keep), keep)
        for rank in range(p.ranks)
        for backward, keep in itertools.product((False, True), repeat=2)
    ]


@pytest.mark.parametrize(("schedule", "layout"), CASES)
def test_programs_print_parse_back_and_respect_reads_and_writes(schedule, layout):
    seen = 0
    for p in plans(schedule, layout):
        for program, keep in programs(p):
            text = str(program)
            again = Program.parse(text)
            assert again == program, text
            assert str(again) == text
            assert hazards(program, keep_kv=keep) == [], text
            seen += len(program.instructions)
    assert seen > 50


def test_a_parsed_program_runs_as_the_one_that_was_printed():
    p = plan(DOCS, 4, schedule="mesh", layout="striped", schedule_options={"rows": 2})
    for backward in (False, True):
        first = [lower(p, r, backward=backward) for r in range(4)]
        again = [Program.parse(str(x)) for x in first]
        pairs = zip(
            interpret(p, backward=backward, programs=first),
            interpret(p, backward=backward, programs=again),
            strict=True,
        )
        assert all(np.array_equal(a.result, b.result) for a, b in pairs)


def test_programs_that_differ_are_not_equal():
    program = lower(plan(DOCS, 3, schedule="ring"), 1, backward=True)
    for number, instruction in enumerate(program.instructions):
        changed = [*program.instructions]
        changed[number] = replace(instruction, step=instruction.step + 1)
        assert replace(program, instructions=tuple(changed)) != program
    text = str(program)
    assert "kv 0.." in text
    for before, after in (("#0", "#1"), ("causal", "full"), (">0", ">1"), ("tokens=", "tokens=1")):
        assert before in text
        assert Program.parse(text.replace(before, after, 1)) != program


def test_long_lines_wrap_and_comments_are_skipped():
    p = plan([400, 300], 4, schedule="sap", layout="striped")
    text = str(lower(p, 1, backward=True))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert any(line.strip().startswith("|") for line in text.splitlines())
    commented = text.replace("step 1:", "# a comment\n\nstep 1:")
    assert Program.parse(commented) == lower(p, 1, backward=True)


@pytest.mark.parametrize(
    "line",
    [
        "SNED kv0.0 ->1 #0 @kv 0..4",
        "SEND kv0.0 <-1 #0 @kv 0..4",
        "SEND xy0.0 ->1 #0 @kv 0..4",
        "SEND kv0.0 ->1 @kv 0..4",
        "SEND kv0.0 ->1 #0 @kv",
        "ATTEND q 0..4 causal 0..4x0..4",
        "ATTEND kv 0..4 triangular 0..4x0..4",
        "ADD dkv_recv dkv 0..4>0",
        "FREE kv 0-4",
        "POST p2p parcels",
    ],
)
def test_lines_that_are_no_instructions(line):
    with pytest.raises(PlanError, match=line[:10]):
        parse_instruction(line)


def test_headers_that_lack_something():
    text = str(lower(plan(DOCS, 2), 0))
    for wrong in ("", "SEND", text.replace("PROGRAM ", ""), text.replace(" ranks=2", "")):
        with pytest.raises(PlanError, match=r"begins with|first line"):
            Program.parse(wrong)


# ---- orders that are wrong


def moved(program: Program, source: int, target: int) -> Program:
    """The program with one instruction taken out and put in again before the instruction `target`."""
    instructions = [*program.instructions]
    one = instructions.pop(source)
    instructions.insert(target - (target > source), one)
    return replace(program, instructions=tuple(instructions))


def overlap(one: Instruction, other: Instruction) -> bool:
    """Whether one of two instructions writes rows that the other reads or writes."""
    for a, b in ((one, other), (other, one)):
        for w in a.writes:
            for r in (*b.reads, *b.writes):
                if w.buffer == r.buffer and max(w.low, r.low) < min(w.high, r.high):
                    return True
    return False


def accumulates(one: Instruction, other: Instruction) -> bool:
    """Whether both only add to what is there already: sums may be taken in any order."""
    kinds = (Attend, Add, Merge)
    return isinstance(one, kinds) and isinstance(other, kinds)


BARRIER = (Wait, Post)


def test_every_swap_of_neighbours_that_depend_on_each_other_is_detected():
    seen = {}
    for schedule in ("ring", "tasp", "helper", "mesh", "sap", "all_gather", "trees"):
        for backward in (False, True):
            p = plan(DOCS, 4, schedule=schedule, layout="zigzag")
            for rank in range(4):
                program = lower(p, rank, backward=backward)
                pairs = itertools.pairwise(program.instructions)
                for number, (one, other) in enumerate(pairs):
                    # POST and WAIT say when what is listed moves: rows do not say that
                    ends = isinstance(one, BARRIER) or isinstance(other, BARRIER)
                    if ends or not overlap(one, other) or accumulates(one, other):
                        continue
                    wrong = moved(program, number, number + 2)
                    assert hazards(wrong), (str(p), rank, str(one), str(other))
                    key = type(one).__name__, type(other).__name__
                    seen[key] = seen.get(key, 0) + 1
    for pair in (
        ("Attend", "Free"),
        ("Zero", "Attend"),
        ("Add", "Free"),
        ("Merge", "Free"),
    ):
        assert seen.get(pair), (pair, seen)


@pytest.mark.parametrize(
    ("kind", "shift", "backward"),
    [
        (Wait, -1, False),  # before the POST it waits for
        (Post, 1, True),  # after the WAIT
        (Recv, -1, False),  # before the rows are free, or after its POST
        (Attend, -1, False),  # before what it reads has arrived
        (Attend, 1, False),  # after its rows are free
        (Zero, 1, True),  # after what adds to it
        (Free, -1, True),  # before the last use
        (Unpack, 1, False),  # after what reads the queries
        (Pack, -1, False),  # before its rows exist
        (Send, -1, True),  # before what it sends is complete
        (Send, 1, True),  # after its POST
    ],
)
def test_an_instruction_in_a_wrong_place_is_detected(kind, shift, backward):
    """Moved far enough, up or down, each kind of instruction makes a hazard in some program."""
    detected = 0
    for schedule in ("ring", "mesh"):
        for rank in range(4):
            p = plan(ONE, 4, schedule=schedule, layout="zigzag")
            program = lower(p, rank, backward=backward)
            size = len(program.instructions)
            for number, instruction in enumerate(program.instructions):
                target = 0 if shift < 0 else size
                if isinstance(instruction, kind) and number not in (0, size - 1):
                    detected += bool(hazards(moved(program, number, target)))
    assert detected >= 4


def test_rows_received_before_they_are_free_are_detected():
    """Write after read, in particular: a receive into rows that are still needed."""
    seen = 0
    for schedule, rank in itertools.product(("ring", "tasp", "mesh"), range(4)):
        program = lower(plan(ONE, 4, schedule=schedule), rank, backward=True)
        for at, instruction in enumerate(program.instructions):
            if not isinstance(instruction, Recv):
                continue
            frees = [
                number
                for number, one in enumerate(program.instructions[:at])
                if isinstance(one, Free) and overlap(one, instruction)
            ]
            if frees:
                seen += 1
                wrong = hazards(moved(program, at, frees[-1]))
                assert any("RECV" in line and "filled, not empty" in line for line in wrong), wrong
    assert seen > 10


def test_an_order_without_hazards_computes_the_same():
    """Random moves, of which some are harmless: what has no hazard gives every rank the same result."""
    dice, harmless, harmful = random.Random(1), 0, 0
    for schedule, backward in itertools.product(("tasp", "helper", "mesh"), (False, True)):
        p = plan(DOCS, 3, schedule=schedule, layout="contiguous")
        right = [lower(p, r, backward=backward) for r in range(3)]
        expected = interpret(p, backward=backward, programs=right)
        for _ in range(60):
            rank = dice.randrange(3)
            instructions = right[rank].instructions
            number = dice.randrange(len(instructions))
            steps = [i.step for i in instructions]
            step = steps[number]
            low, high = steps.index(step), len(steps) - steps[::-1].index(step)
            target = dice.randint(low, high)
            fixed = (Wait, Post)
            if isinstance(instructions[number], fixed) or target in (number, number + 1):
                continue
            crossed = instructions[min(number, target) : max(number, target)]
            if isinstance(instructions[number], Send | Recv) and any(
                isinstance(i, Send | Recv | Post) for i in crossed if i is not instructions[number]
            ):
                continue  # the order of messages is agreed with the other ranks
            wrong = [*right]
            wrong[rank] = moved(right[rank], number, target)
            if hazards(wrong[rank]):
                harmful += 1
                continue
            harmless += 1
            results = interpret(p, backward=backward, programs=wrong)
            for one, other in zip(expected, results, strict=True):
                own = len(one.tokens)
                assert np.array_equal(one.result[:own], other.result[:own])
                assert not backward or np.array_equal(one.grad[:own], other.grad[:own])
    assert harmless > 20
    assert harmful > 20


# ---- the passes, one by one


def draft(p: Plan, rank: int = 0, *, backward: bool = False, keep_kv: bool = False) -> passes.Draft:
    return passes.expand_hops(p, rank, backward=backward, keep_kv=keep_kv)


def test_expand_hops_lists_what_a_rank_moves_and_computes():
    p = plan([64], 4, schedule="ring")
    made = draft(p, 1)
    assert made.times is made.rows is None
    assert [(x.kv is None, x.after) for x in made.pairings] == [
        (False, 0),
        (False, 1),
        (False, 2),
        (True, passes.OWN),
    ]
    assert set(made.posted.dst[made.posted.src == 1].tolist()) == {2}
    kept = draft(p, 1, backward=True, keep_kv=True)
    assert not (kept.posted.kind == passes.KV).any()
    assert len(kept.kv_arrivals.step) == len(made.kv_arrivals.step) > 0
    gathered = draft(plan([64], 4, schedule="all_gather"), 1)
    assert gathered.collective
    assert not len(gathered.posted.step)


def test_order_puts_each_pairing_after_the_arrival_of_its_kv():
    for schedule in ("ring", "helper", "mesh", "sap"):
        p = plan([300, 80], 4, schedule=schedule)
        for rank in range(4):
            before = draft(p, rank)
            made = passes.order(before)
            steps = [x.step for x in made.pairings]
            assert steps == sorted(steps)
            assert len(made.pairings) == len(before.pairings)
            arrival = dict(zip(made.kv_arrivals.subchunk, made.kv_arrivals.step, strict=True))
            for pairing in made.pairings:
                for subchunk in () if pairing.kv is None else pairing.kv.tolist():
                    assert pairing.step > arrival.get(subchunk, -1)


def test_assign_rows_gives_what_lives_at_once_rows_of_its_own():
    p = plan([300, 80], 4, schedule="tasp", layout="zigzag")
    made = passes.assign_rows(passes.order(draft(p, 2, backward=True)))
    rows, arrivals = made.rows, made.kv_arrivals
    for place, births in ((rows.kv, arrivals.step), (rows.dkv, made.times.kv_use)):
        low = place.of(arrivals.subchunk)
        for born in np.unique(births):
            here = births == born
            used = np.concatenate(
                [np.arange(a, a + n) for a, n in zip(low[here], arrivals.count[here], strict=True)]
            )
            assert len(used) == len(set(used.tolist()))
            assert used.min() >= made.tokens


def test_pack_messages_keeps_every_row_of_every_transfer():
    p = plan([300, 80], 4, schedule="sap", layout="zigzag")
    for rank, backward in itertools.product(range(4), (False, True)):
        made = passes.assign_rows(passes.order(draft(p, rank, backward=backward)))
        packed = passes.pack_messages(made)
        for side, name in ((made.posted.src, "sends"), (made.posted.dst, "recvs")):
            moved_rows = int(made.posted.count[side == rank].sum())
            messages = [m for posted in packed.messages for m in getattr(posted, name)]
            assert sum(m.count for m in messages) == moved_rows
            assert all(sum(n for *_, n in m.parts) == m.count for m in messages)
            names = {(o, s) for m in messages for o, s, *_ in m.parts}
            here = side == rank
            expected = zip(made.posted.owner[here], made.posted.share[here], strict=True)
            assert names == set(expected)


def test_kernel_calls_cover_every_visible_pair_once():
    p = plan([300, 80], 4, schedule="mesh", layout="zigzag")
    total = 0
    for rank in range(4):
        made = passes.kernel_calls(
            passes.pack_messages(passes.assign_rows(passes.order(draft(p, rank))))
        )
        total += sum(call.pairs for a in made.attends if a for call in a.calls)
    assert total == p.docs.num_pairs


def test_emit_starts_messages_before_the_computation_and_waits_after_it():
    made = draft(plan([64], 4, schedule="ring"), 0, backward=True)
    for one in passes.PASSES:
        made = one(made)
    program = passes.emit(made)
    assert [i.op for i in program.steps[2].instructions] == (
        ["SEND"] * 2 + ["RECV"] * 2 + ["POST", "ZERO", "ATTEND_BACKWARD", "WAIT", "ADD"]
    )
    assert not any(isinstance(i, Free) for i in program.instructions)
    assert hazards(program)  # rows are overwritten that nobody has freed


def test_insert_frees_frees_every_received_row_once():
    for schedule in ("ring", "helper", "all_gather"):
        for backward in (False, True):
            program = lower(plan(DOCS, 4, schedule=schedule), 1, backward=backward)
            sizes = passes.buffer_rows(program)
            filled = {name: np.zeros(size, dtype=int) for name, size in sizes.items()}
            for instruction in program.instructions:
                by = -1 if isinstance(instruction, Free) else 1
                for region in instruction.begins:
                    rows = filled[region.buffer][region.low : region.high]
                    rows += by
                    assert ((rows == 0) | (rows == 1)).all()
            assert all((rows == 0).all() for rows in filled.values())
    kept = lower(plan(DOCS, 4), 1, keep_kv=True)
    assert not any(isinstance(i, Free) and i.buffer == "kv" for i in kept.instructions)


@pytest.mark.parametrize("line", ["", "WAIT extra", "FREE kv 5..2", "SEND", "FREE kv -1..2"])
def test_a_line_that_is_no_instruction_is_refused(line):
    with pytest.raises(PlanError, match=r"cannot read|instructions are"):
        parse_instruction(line)
