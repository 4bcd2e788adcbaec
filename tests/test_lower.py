"""Lowering: programs fit in few rows and calls, both ends agree, and they compute the right thing.

The last is proved by an interpreter of programs on integers.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import assert_right
from spread import spread

from tasp_core import Documents, LayoutError, Plan, layouts, lower, plan, schedules, supports
from tasp_core.lowering.buffers import place
from tasp_core.lowering.program import Program
from tasp_core.sequence.tiles import tile

ROWS = ((64,), (7, 3), (40, 1, 0, 23), (1,) * 9, (2,), (0,), ())
SEEDED = settings(derandomize=True, deadline=None, max_examples=80, database=None)


def machines(ranks: int) -> list[str | None]:
    """No machine, and every way to spread the ranks evenly over two or more nodes."""
    return [None] + [f"mesh{m}x{ranks // m}" for m in range(1, ranks) if ranks % m == 0]


@pytest.fixture(scope="module", params=spread(range(2), keep=1))
def sample(request):
    """Plans of every number of ranks, schedule and layout, and their forward or backward programs."""
    dice, made = random.Random(request.param), []
    for ranks, schedule, layout in itertools.product((1, 2, 3, 4, 6), schedules(), layouts()):
        docs = Documents.of(dice.choice(ROWS), causal=dice.random() < 0.5)
        options = {"schedule": schedule, "layout": layout, "machine": dice.choice(machines(ranks))}
        if supports(docs, ranks, **options):
            made.append(plan(docs, ranks, **options))
    return [(p, programs(p, backward=b)) for p in made for b in (False, True)]


def programs(p: Plan, *, backward: bool = False) -> list[Program]:
    return [lower(p, rank, backward=backward) for rank in range(p.ranks)]


def most(p: Plan) -> int:
    return int(p.layout.counts.max())


# ---- what programs cost


@pytest.mark.parametrize(
    ("name", "uneven"),
    spread(
        itertools.product(("ring", "tasp", "wave", "tasp_paths", "tasp_rails"), (0, 1, 5)), keep=6
    ),
)
def test_travelling_keys_of_two_ranks_are_enough(name, uneven):
    seen = 0
    for ranks, layout in itertools.product((2, 3, 4, 6), layouts()):
        machine = machines(ranks)[-1] if "_" in name else None
        if not supports([9], ranks, schedule=name, machine=machine):
            continue
        options = {"schedule": name, "machine": machine, "layout": layout}
        shares = plan([9], ranks, **options).schedule.num_shares
        p = plan([4 * ranks * shares + uneven], ranks, **options)
        # shares are cut by floor: a row more for each share at hand and block of its rank
        blocks = 1 if layout in ("contiguous", "striped") else 2
        extra = blocks * (ranks - 1) if uneven and shares > 1 else 0
        for program in programs(p) + programs(p, backward=True):
            assert program.kv_buffer_rows <= 2 * most(p) + extra, (str(p), program.kv_buffer_rows)
        seen += 1
    assert seen >= 4


@pytest.mark.parametrize(("m", "u"), [(4, 1), (2, 2), (1, 4), (3, 2)])
def test_a_wave_needs_less_rows_the_more_blocks_it_has(m, u):
    n, rows = m * u, {}
    for blocks in (1, 2, n - 1, 2 * (n - 1)):
        options = {"blocks": blocks, "twins": 0}
        where = {"machine": f"mesh{m}x{u}", "schedule_options": options}
        p = plan([4 * n * (n - 1)], n, schedule="wave", **where)
        rows[blocks] = max(x.kv_buffer_rows for x in programs(p))
        assert rows[blocks] <= p.schedule.limits.buffer * most(p)
    assert rows[1] == most(p) * (n - 1 if m > 1 else 2)  # one block: everything of a node at once
    assert rows[n - 1] <= 2 * most(p)
    assert rows[1] >= rows[2] > rows[n - 1] > rows[2 * (n - 1)] or m == 1


def test_at_most_two_calls_a_step_and_no_copies_where_layouts_are_dense(sample):
    counted = 0
    for p, lowered in sample:
        dense = p.layout.name in ("contiguous", "zigzag") and p.schedule.name != "all_gather"
        gathered = most(p) * p.ranks if p.schedule.collective else None
        assert all(gathered in (None, x.kv_buffer_rows) for x in lowered)
        for step in (s for x in lowered for s in x.steps if s.compute):
            masks = [call.causal for call in step.compute.calls]
            assert len(masks) == len(set(masks))  # one FULL, one CAUSAL
            counted += len(masks)
            # guests meet keys from several places at once; what stays longer lies apart
            dense &= not len(p.schedule.offloaded.step)
            dense &= p.schedule.name not in ("trees", "paced", "double_ring")
            assert step.compute.gather is None or not dense, str(p)
            for call in step.compute.calls:
                seq = call.sequences
                assert min(len(seq.q_n), *seq.q_n, *seq.k_n) > 0
                assert not call.causal or (seq.q_n == seq.k_n).all()
    assert counted > 1000


# ---- both ends of every link agree


def test_sends_equal_receives(sample):
    moved = 0
    for p, lowered in sample:
        sends, recvs = Counter(), Counter()
        for rank, program in enumerate(lowered):
            for t, step in enumerate(program.steps):
                for m in step.sends:
                    sends[t, rank, m.peer, m.kind, m.owner, m.share, m.count, m.tag] += 1
                for m in step.recvs:
                    recvs[t, m.peer, rank, m.kind, m.owner, m.share, m.count, m.tag] += 1
                for one in (step.sends, step.recvs):  # tags tell messages of a link and step apart
                    assert max(Counter((m.peer, m.tag) for m in one).values(), default=1) == 1
                assert all(m.count > 0 and m.peer != rank for m in step.sends + step.recvs)
        assert sends == recvs, str(p)
        moved += sends.total()
    assert moved > 5000


@pytest.mark.parametrize("name", ["ring", "tasp", "wave"])
@pytest.mark.parametrize("lengths", [(64,), (2, 1), (1,), ()])
def test_every_rank_takes_part_in_every_collective_step(name, lengths):
    # also ranks whose last arrival has no tokens
    for ranks, backward in itertools.product((2, 4, 8), (False, True)):
        p = plan(lengths, ranks, schedule=name, schedule_options={"exchange": "all_to_all"})
        assert len({len(x.steps) for x in programs(p, backward=backward)}) == 1, (ranks, backward)


def test_a_rank_that_does_not_exist():
    with pytest.raises(LayoutError, match="rank 4 does not exist"):
        lower(plan([8], 4), 4)


# ---- programs run on integers (interpreter.py)


@st.composite
def any_plan(draw) -> Plan:
    ranks = draw(st.integers(1, 6))
    lengths, window = draw(st.lists(st.integers(0, 14), max_size=4)), draw(st.integers(1, 16))
    window = window if window < 10 else None
    docs = Documents.of(lengths, causal=draw(st.booleans()), window=window)
    options = {
        "schedule": draw(st.sampled_from(list(schedules()))),
        "layout": draw(st.sampled_from(list(layouts()))),
        "machine": draw(st.sampled_from(machines(ranks))),
    }
    if options["schedule"] == "wave":
        options["schedule_options"] = {"blocks": draw(st.integers(1, 6))}
    ok = supports(docs, ranks, **options)
    return plan(docs, ranks, **options) if ok else plan(docs, ranks, layout=options["layout"])


@SEEDED
@given(any_plan())
def test_programs_compute_the_attention_they_stand_for(p):
    assert_right(p)


@pytest.mark.parametrize(
    ("name", "layout"),
    spread(itertools.product(schedules(), layouts()), keep=2 * len(schedules())),
)
def test_programs_of_eight_ranks(name, layout):
    for machine in (None, "mesh4x2"):
        options = {"schedule": name, "layout": layout, "machine": machine}
        if supports([37, 1, 26], 8, **options):
            assert_right(plan([37, 1, 26], 8, **options))


BROKEN = {
    "place": lambda unit, birth, death, *rest: place(unit, birth, death - 1, *rest),  # reused early
    "tile": lambda q, k, docs: tile(
        q, k, Documents(docs.cu_seqlens, False)
    ),  # keys after the query
    "rounds": lambda low, count: np.zeros(len(low), dtype=int),  # overlapping runs at once
    "working_order": lambda keys: np.arange(len(keys.doc)),  # keys as they come
    "group_by_keys": lambda q, k: [],  # remote queries are forgotten
}
MODULE = {
    "place": "lowering.passes",
    "group_by_keys": "lowering.passes",
    "tile": "lowering.kernel_calls",
}
MODULE["rounds"] = "lowering.buffers"
MODULE["working_order"] = "sequence.tiles"


@pytest.mark.parametrize("name", list(BROKEN))
def test_the_interpreter_sees_a_wrong_lowering(name, monkeypatch):
    plans = [
        plan([24, 17], 4, schedule=s, layout="striped") for s in ("ring", "mesh", "all_gather")
    ]
    [assert_right(p) for p in plans]
    module = sys.modules["tasp_core." + MODULE[name]]
    monkeypatch.setattr(module, name, BROKEN[name])
    with pytest.raises(AssertionError):
        [assert_right(p) for p in plans]
