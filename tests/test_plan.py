"""Plans: tables, JSON, fingerprints, what is refused, and size."""

import json
import math
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tasp_core import Documents, LayoutError, Machine, Plan, PlanError, plan, supports
from tasp_core.schedules import DeclaredLimits

SAMPLE = {
    "ring": plan([30, 0, 11], 4, schedule="ring", layout="contiguous"),
    "tasp": plan([30, 0, 11], 4, schedule="tasp", layout="per_document"),
    "full": plan(Documents.of([30, 0, 11], causal=False), 4, layout="striped"),
    "one": plan([9], 1),
    "none": plan([], 3),
    "paths": plan([64], 8, schedule="tasp_paths", machine="mesh4x2"),
    "rails": plan([64], 8, schedule="tasp_rails", machine="mesh4x2"),
    "empty": plan([64], 8, schedule="wave", machine="h100").with_hops([], num_shares=3),
    "twins": plan([64], 8, schedule="wave", machine="mesh4x2"),
    "blocks": plan([64], 4, schedule="wave", schedule_options={"blocks": 2}),
    "gather": plan([64], 8, schedule="all_gather", machine="mesh4x2"),
    "packed": plan([64], 4, schedule="tasp", schedule_options={"exchange": "all_to_all"}),
    "table": plan([8], 2).with_hops(
        ["t0 0>1 kv0.0", "t2 1>0 dkv0.0"], limits=DeclaredLimits(3, 0, 1.5)
    ),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_json_round_trip(name):
    made = SAMPLE[name]
    text = made.to_json()
    again = Plan.from_json(text)
    assert again == made
    assert again.fingerprint() == made.fingerprint()
    assert again.to_json() == text
    for part in ("docs", "layout", "schedule", "machine"):
        assert getattr(again, part) == getattr(made, part)
    for backward in (False, True):
        assert again.hops(backward=backward).lines() == made.hops(backward=backward).lines()
    assert json.loads(text)["schema"] == 1


@pytest.mark.parametrize("name", SAMPLE)
def test_pickle_and_hash(name):
    made = SAMPLE[name]
    made.subchunks, made.fingerprint()  # caches are filled before it travels
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert hash(again) == hash(made)
    assert again.to_json() == made.to_json()
    assert {made: 1}[again] == 1
    assert made != name


def test_samples_all_differ():
    assert (
        len(set(SAMPLE.values())) == len({p.fingerprint() for p in SAMPLE.values()}) == len(SAMPLE)
    )


BASE = {
    "schedule": "wave",
    "machine": "mesh4x2",
    "layout": "zigzag",
    "schedule_options": {"blocks": 2},
}


def test_equal_plans_built_differently():
    made = plan([5, 0, 7], 8, **BASE)
    cu = np.array([0, 5, 5, 12], dtype=np.int32)
    options = {"twins": made.schedule.twins, "blocks": 2}
    for docs in (Documents.from_cu_seqlens(cu, total=12), Documents(cu), (x for x in (5, 0, 7))):
        again = plan(docs, 8, **{**BASE, "schedule_options": options})
        assert (again, hash(again), again.fingerprint()) == (made, hash(made), made.fingerprint())
    names = ("mesh8", "mi300x", "h100", None, Machine("mine", 8, 1, 1.0))
    assert len({plan([99], 8, machine=name).fingerprint() for name in names}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"schedule": "ring", "schedule_options": None},
        {"schedule_options": {"blocks": 3}},
        {"schedule_options": {"blocks": 2, "twins": 0}},
        {"schedule_options": {"blocks": 2, "exchange": "all_to_all"}},
        {"layout": "contiguous"},
        {"machine": "mesh2x4"},
    ],
)
def test_fingerprints_of_different_plans(change):
    assert (
        plan([5, 7], 8, **BASE).fingerprint() != plan([5, 7], 8, **{**BASE, **change}).fingerprint()
    )


@pytest.mark.parametrize("docs", [[7, 5], [12], [5, 7, 1], Documents.of([5, 7], causal=False)])
def test_fingerprints_of_different_documents(docs):
    assert plan([5, 7], 4).fingerprint() != plan(docs, 4).fingerprint()
    assert plan([5, 7], 4) != plan(docs, 4)


def test_fingerprints_of_different_tables():
    made = plan([8], 2)
    words = made.hops(backward=True).lines()
    tables = [made.with_hops(words), made.with_hops(words[1:]), made.with_hops(words, num_shares=2)]
    tables.append(made.with_hops(words, limits=DeclaredLimits(5, 5, 5.0)))
    assert len({p.fingerprint() for p in [made, *tables]}) == 5


def test_with_hops_keeps_how_steps_are_exchanged():
    made = SAMPLE["packed"]
    assert made.with_hops(made.hops(backward=True).lines()).schedule.exchange == "all_to_all"


TABLES = [
    """\
step  into 0           into 1           into 2
0     1>kv1.1 2>kv2.0  0>kv0.0 2>kv2.1  0>kv0.1 1>kv1.0
1     1>kv2.1 2>kv1.0  0>kv2.0 2>kv0.1  0>kv1.1 1>kv0.0""",
    """\
step   into 0           into 1           into 2           into 3
0      1>kv1.0 2>kv2.0  0>kv0.0 3>kv3.0  0>kv0.0 3>kv3.0  1>kv1.0 2>kv2.0
1 <--  1>kv3.0          0>kv2.0          3>kv1.0          2>kv0.0""",
]


def test_str_is_the_table():
    head = (
        "plan: tasp x zigzag, 3 ranks, 8 tokens in 2 documents, causal; 2 shares per rank, 2 steps"
    )
    assert str(plan([6, 2], 3)) == f"{head}\n{TABLES[0]}"
    head = "plan: tasp x striped, 1 ranks, 3 tokens in 1 document, full; 1 share per rank, 0 steps"
    one = plan(Documents.of([3], causal=False), 1, layout="striped")
    assert str(one) == f"{head}\nstep  into 0"
    options = {"blocks": 1, "twins": 0}
    wide = plan([8], 4, schedule="wave", machine="mesh2x2", schedule_options=options)
    assert wide.table(mark=1) == TABLES[1]
    assert " 1>kv1.0 +1 " in wide.table(width=1)


def tampered(name="tasp", **change):
    return json.dumps({**json.loads(SAMPLE[name].to_json()), **change})


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "null", '"plan"', tampered()[:-9]])
def test_text_that_is_no_plan(text):
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json(text)


@pytest.mark.parametrize("schema", [0, 2, None, "1"])
def test_other_schemas(schema):
    with pytest.raises(PlanError, match=rf"plan has schema {schema!r}, this version reads 1"):
        Plan.from_json(tampered(schema=schema))


@pytest.mark.parametrize("key", ["documents", "machine", "layout", "ranks", "schedule", "options"])
def test_json_without_a_key(key):
    data = json.loads(tampered())
    del data[key]
    with pytest.raises(PlanError, match=f"not a plan: it has no key '{key}'"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "change",
    [
        {"schedule": "spiral"},
        {"options": {"blocks": 1}},
        {"documents": {"cu_seqlens": [0, 5, 3]}},
        {"documents": {"lengths": [3]}},
        {"machine": {"name": "m"}},
    ],
)
def test_json_of_impossible_plans(change):
    with pytest.raises(PlanError):
        Plan.from_json(tampered(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": 2},
        {"ranks": "four"},
        {"node_size": 2},
        {"documents": {"cu_seqlens": [0, 30, 30, 41], "causal": True, "window": 0}},
        {"documents": {"cu_seqlens": [0, 30, 30, 41], "causal": "no", "window": None}},
        {"layout": "spiral"},
        {"machine": {"name": "m", "node_size": 0}},
    ],
)
def test_json_of_plans_that_contradict_themselves(change):
    with pytest.raises(PlanError):
        Plan.from_json(tampered(**change))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": "prefix_lm"}, "mask 'prefix_lm' has no name here; write it as slices"),
        (
            {"machine": "mesh3x2", "schedule": "tasp_paths", "ranks": 6},
            "even number of ranks per node, got 3",
        ),
        ({"machine": "h100x2"}, "has 16 ranks (2 nodes of 8), the plan is for 4"),
        ({"machine": "nowhere"}, "no machine 'nowhere'"),
        ({"heads": 28, "kv_heads": 8}, "28 query heads are not a multiple of 8 key/value heads"),
        ({"heads": 0}, "0 query heads"),
        ({"layout": "spiral"}, "no layout 'spiral'"),
        ({"schedule": "spiral"}, "no schedule 'spiral'"),
        ({"ranks": 0}, "ranks must be a whole number >= 1, got 0"),
        ({"docs": [3, -1]}, "whole numbers >= 0, got -1"),
        ({"intra": 3}, "intra=3"),
    ],
)
def test_supports_says_why_not(options, reason):
    given_ = {"docs": [8], "ranks": 4, **options}
    answer = supports(given_.pop("docs"), given_.pop("ranks"), **given_)
    assert not answer
    assert reason in answer.reason


def test_supports_says_yes():
    for mask in (None, "causal", "full"):
        assert supports([8], 4, mask=mask, heads=40, kv_heads=8)
    assert supports([8], 5, heads=28).reason == "yes"
    assert supports(ranks=16, machine="h100x2", schedule="tasp_paths").ok


@pytest.mark.parametrize("kv_heads", [0, -2])
def test_supports_looks_at_kv_heads(kv_heads):
    assert not supports([8], 4, heads=8, kv_heads=kv_heads)


@pytest.mark.parametrize(
    ("ranks", "options", "error", "reason"),
    [
        (0, {}, PlanError, "ranks must be a whole number >= 1, got 0"),
        (-1, {}, PlanError, "got -1"),
        (2.5, {}, PlanError, "got 2.5"),
        (True, {}, PlanError, "got True"),
        (4, {"intra": 3}, PlanError, "intra=3 does not divide the 4 ranks"),
        (4, {"intra": 0}, PlanError, "intra must be a whole number >= 1, got 0"),
        (4, {"machine": "mesh8"}, PlanError, "give a machine with 4 ranks"),
        (4, {"layout": "spiral"}, LayoutError, "no layout 'spiral'"),
        *(
            (x, {}, PlanError, "ranks must be a whole number")
            for x in (None, "4", math.inf, math.nan)
        ),
    ],
)
def test_plans_that_are_refused(ranks, options, error, reason):
    with pytest.raises(error, match=reason):
        plan([8], ranks, **options)


@pytest.mark.parametrize("schedule", ["ring", "tasp", "wave", "all_gather"])
@pytest.mark.parametrize("rank", [-1, 4])
def test_hops_of_a_rank_that_does_not_exist(schedule, rank):
    with pytest.raises(PlanError, match=rf"rank {rank} does not exist"):
        plan([8], 4, schedule=schedule).hops(rank)


def test_one_of_1024_ranks():
    begin = time.process_time()
    made = plan([1 << 20], 1024, schedule="tasp")
    hops = made.hops(5)
    tokens = made.tokens(5)
    assert time.process_time() - begin < 10
    assert len(hops.step) == 2 * 1023 * 1023
    assert ((hops.src == 5) | (hops.dst == 5)).all()
    assert len(tokens) == 1024


def test_planning_needs_no_torch_and_fingerprints_do_not_depend_on_the_process():
    code = """
import sys, tasp_core as tasp
made = tasp.plan([64], 8, schedule="wave", machine="mesh4x2")
assert tasp.check(made).pairs == 64 * 65 // 2
print(made.fingerprint(), "torch" in sys.modules)
"""
    root = Path(__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [SAMPLE["twins"].fingerprint(), "False"]
