"""What `simulate` predicts from counts is what the instructions of every rank say.

`simulate` builds no programs: it must do 1,024 ranks. Its tables are compared here with the programs of
sampled plans, step by step: bytes and parts of messages by link, visible pairs and kernel calls by rank.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

import tasp_core as tasp
from tasp_core import Plan, lower, plan
from tasp_core.costs.bytes import RowBytes
from tasp_core.costs.traffic import Sizes, traffic_of
from tasp_core.lowering.program import AllGather, Attend, Program, Send
from tasp_core.planning.work import own_steps, work_of
from tasp_core.schedules import DKV

HEADS, KV_HEADS, DIM, ITEM = 4, 2, 8, 2
ROW = RowBytes.of(HEADS, KV_HEADS, DIM, ITEM)
LENGTHS = ((64,), (137, 20, 0, 89), (1,) * 9, (7, 3))


def sampled() -> list[Plan]:
    """Plans of every schedule and layout; lengths, masks and machines by chance."""
    dice, made = random.Random(3), []
    for schedule, layout, ranks in itertools.product(tasp.schedules(), tasp.layouts(), (3, 4, 6)):
        docs = tasp.Documents.of(
            dice.choice(LENGTHS),
            causal=dice.random() < 0.7,
            window=dice.choice([None, None, 20]),
        )
        machines = [None, {3: "mesh3", 4: "mesh2x2", 6: "mesh3x2"}[ranks]]
        options = [{"schedule": schedule, "layout": layout, "machine": m} for m in machines]
        options = [x for x in options if tasp.supports(docs, ranks, **x)]
        if options:
            made.append(plan(docs, ranks, **dice.choice(options)))
    return made


PLANS = sampled()


def sent(programs: list[Program]) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(bytes, parts of messages) by (step, source, destination), from the SENDs."""
    result: dict[tuple[int, int, int], tuple[int, int]] = {}
    for program in programs:
        for i in program.instructions:
            if isinstance(i, Send):
                m, link = i.message, (i.step, program.rank, i.message.peer)
                nbytes, parts = result.get(link, (0, 0))
                size = m.count * ROW.of_kind(m.kind, program.backward)
                result[link] = nbytes + size, parts + len(m.ranges)
    return result


def predicted(p: Plan, *, backward: bool) -> dict[tuple[int, int, int], tuple[int, int]]:
    """The same from the table that `simulate` charges to links."""
    hops = p.hops(backward=backward)
    hops = hops.where(hops.kind == DKV) if p.schedule.collective else hops
    table = traffic_of(p, hops, Sizes.of(p, HEADS, KV_HEADS, DIM, "bfloat16", 1), backward)
    columns = zip(*(column.tolist() for column in table), strict=True)
    return {(t, a, b): (int(nbytes), parts) for t, a, b, nbytes, parts in columns}


def differences(p: Plan, programs: list[Program], *, backward: bool) -> list[str]:
    """In what counts and programs differ."""
    wrong = [] if sent(programs) == predicted(p, backward=backward) else ["bytes or messages"]
    steps = p.schedule.num_steps(backward=backward) + 1
    work = work_of(p, p.hops(backward=backward), range(p.ranks), steps, backward=backward)
    pairs, calls = np.zeros((2, p.ranks, steps), dtype=np.int64)
    for program in programs:
        for i in program.instructions:
            if isinstance(i, Attend):
                pairs[program.rank, i.step] += sum(call.pairs for call in i.calls)
                calls[program.rank, i.step] += len(i.calls)
    wrong += [] if np.array_equal(work.pairs, pairs) else ["pairs"]
    # A pair of pieces that is seen in part is counted as one CAUSAL call, one that is seen whole as FULL.
    # Programs need both for stripes, and a CAUSAL one for a square of one token: one call more or less.
    wrong += [] if abs(work.calls - calls).max(initial=0) <= 1 else ["calls"]
    wrong += [] if np.array_equal(work.calls > 0, calls > 0) else ["steps with calls"]
    cut = len(p.schedule.offloaded.step) or own_steps(p, backward=backward).any()
    dense = len(p.docs.lengths) == 1 and p.docs.window is None and p.layout.name != "striped"
    if dense and not cut and p.subchunks.count.min() > 1:
        wrong += [] if np.array_equal(work.calls, calls) else ["calls, exactly"]
    return wrong


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("schedule", list(tasp.schedules()))
def test_bytes_pairs_and_calls_of_each_step_are_those_of_the_instructions(schedule, backward):
    plans = [p for p in PLANS if p.schedule.name == schedule]
    assert len(plans) >= 3
    for p in plans:
        programs = [lower(p, rank, backward=backward) for rank in range(p.ranks)]
        assert differences(p, programs, backward=backward) == [], str(p)


def test_a_program_that_does_something_else_is_seen():
    p = plan([137, 20, 89], 4, schedule="ring")
    programs = [lower(p, rank) for rank in range(4)]
    assert differences(p, programs, backward=False) == []
    for kind, reason in ((Send, "bytes or messages"), (Attend, "pairs")):
        first = next(i for i in programs[1].instructions if isinstance(i, kind))
        rest = tuple(i for i in programs[1].instructions if i is not first)
        wrong = [programs[0], replace(programs[1], instructions=rest), *programs[2:]]
        assert reason in differences(p, wrong, backward=False)


@pytest.mark.parametrize("schedule", ["ring", "tasp", "helper", "all_gather", "sap"])
@pytest.mark.parametrize("backward", [False, True])
def test_all_bytes_that_simulate_puts_on_links_are_sent(schedule, backward):
    p = plan([137, 20, 89], 4, schedule=schedule, machine="mesh4")
    programs = [lower(p, rank, backward=backward) for rank in range(4)]
    total = sum(nbytes for nbytes, _ in sent(programs).values())
    for program in programs:
        for i in program.instructions:
            if isinstance(i, AllGather):
                total += (i.ranks - 1) * i.rows * ROW.kv
    predicted_bytes = tasp.simulate(
        p, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype="bfloat16", backward=backward
    ).link_bytes
    assert sum(predicted_bytes.values()) == total > 0
