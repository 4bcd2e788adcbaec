"""Plan files that were edited: refused where they are read, refused by check, or right when they run.

The same rules hold for words, options and pickles: a schedule and a plan are checked where they are made.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import random
import re
from collections import Counter

import pytest
from interpreter import assert_right
from spread import spread

import tasp_core as tasp
from tasp_core import Plan, PlanError, check, plan
from tasp_core.schedules import DeclaredLimits, Table

DOCS = tasp.Documents.of([13, 20, 7])


def table_of(made, **options):
    return made.with_hops(made.hops(backward=True).lines(), **options)


def planned(schedule, layout="zigzag", machine=None, intra=1, ranks=4, **options):
    return plan(
        DOCS,
        ranks,
        schedule=schedule,
        layout=layout,
        machine=machine,
        intra=intra,
        schedule_options=options or None,
    )


BASES = {
    "ring": planned("ring"),
    "table": table_of(planned("ring")),
    "wave on nodes": planned("wave", machine="mesh2x2"),
    "table on nodes": table_of(planned("wave", machine="mesh2x2")),
    "all_gather on nodes": planned("all_gather", machine="mesh2x2"),
    "moved queries": planned("sap", "contiguous"),
    "table of moved queries": table_of(planned("sap", "contiguous")),
    "helper, packed": planned("helper", "contiguous", exchange="all_to_all"),
    "table of a mesh": table_of(planned("mesh")),
    "trees": planned("trees"),
    "double ring": planned("double_ring", machine="mesh2x2", exchange="all_to_all"),
    "groups": planned("tasp", ranks=8, intra=2),
}
POOL = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3,
    5,
    7,
    10**9,
    10**30,
    0.5,
    2.0,
    -0.0,
    float("nan"),
    float("inf"),
    1e9,
    "",
    "q",
    "4",
    "p2p",
    "all_to_all",
    "carrier pigeon",
    "ring",
    "table",
    "sap",
    "striped",
    "\ud800",
    [],
    [1],
    [0, 1],
    {},
    {"exchange": "all_to_all"},
    {"schedule": "ring", "options": {}},
    "t0 0>1 kv0.0",
    "t9 0>1 kv0.0",
    "t1 1>0 dkv9.0",
    ["t0 0>1 kv0.0"],
    [float("nan")] * 4,
    [-1] * 4,
    ["1"] * 4,
    [True] * 4,
    [1, 1],
    [1, 1, 2, 0, 5],
    [float("inf")] * 4,
    [1e9] * 4,
    [99, 99, 9.0, 9.0],
]


def leaves(value, path=()):
    """Paths of a JSON value's fields, those of objects and lists among them."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield from leaves(inner, (*path, key))


def edited(data, path, change):
    """The data with the field at `path` changed; `change` gets the object or list, and the key."""
    data = copy.deepcopy(data)
    at = data
    for key in path[:-1]:
        at = at[key]
    change(at, path[-1])
    return data


def drop(at, key):
    del at[key]


def twice(at, key):
    if isinstance(at, list):
        at.append(at[key])
    else:
        at[f"{key}s"] = at[key]


def nudge(at, key):
    at[key] = at[key] + 1 if isinstance(at[key], int | float) else f"{at[key]} "


def put(value):
    def change(at, key):
        at[key] = value

    return change


def outcome(data, right):
    """Where a plan file is refused, or that it runs right; anything else is a fault of ours.

    Args:
        right: files of plans that run right, as Plan.to_json writes them. This one's joins them.
    """
    try:
        made = Plan.from_json(json.dumps(data))
    except PlanError:
        return "refused when read"
    assert Plan.from_json(made.to_json()) == made == pickle.loads(pickle.dumps(made))
    if made.docs.total > 200:
        return "too long to run here"
    if made.to_json() in right:
        return "right"
    try:
        report = check(made)
    except PlanError:
        return "refused by check"
    assert report.links_proved or made.schedule.collective
    assert_right(made.context_plan)
    right.add(made.to_json())
    return "right"


@pytest.mark.parametrize("name", spread(BASES, keep=6))
def test_single_edits_are_refused_or_run_right(name):
    dice = random.Random(name)
    data = json.loads(BASES[name].to_json())
    right: set[str] = set()
    assert outcome(data, right) == "right"
    paths = list(leaves(data))
    by_field = {}
    for path in paths:  # not words of hops alone
        by_field.setdefault(re.sub(r"\d+", "#", str(path)), []).append(path)
    found = Counter()
    for same in by_field.values():
        for change in (*map(put, dice.sample(POOL, 3)), drop, twice, nudge):
            path = dice.choice(same)
            try:
                found[outcome(edited(data, path, change), right)] += 1
            except Exception as error:
                raise AssertionError(f"{path} {change}: {error!r}") from error
    assert found["refused when read"] > 50
    assert found["right"] > 3


def fields_of(name, **change):
    return json.dumps({**json.loads(BASES[name].to_json()), **change})


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("table", {"limits": [float("nan")] * 4}, "NaN is no number of JSON"),
        ("table", {"limits": [-1, 1, 2.0, 0.0]}, "limits: inside must be .*>= 0, got -1"),
        ("table", {"limits": [1, True, 2.0, 0.0]}, "limits: across must be .* got True"),
        (
            "table",
            {"limits": [1, 1, "2", 0.0]},
            "limits: buffer must be a finite number .* got '2'",
        ),
        ("table", {"limits": [1, 1, 2.0, None]}, "limits: remote_queries must be .* got None"),
        ("table", {"limits": [1, 1]}, r"limits must be 4 numbers"),
        ("table", {"limits": 3}, "limits must be a list of numbers, got 3"),
        ("table", {"node_size": 7}, "node_size must be that of the machine, 4, got 7"),
        ("table", {"node_size": "q"}, "node_size must be a whole number >= 1, got 'q'"),
        ("table", {"node_size": 0}, "node_size must be a whole number >= 1, got 0"),
        ("table on nodes", {"node_size": 4}, "node_size must be that of the machine, 2, got 4"),
        ("ring", {"node_size": 2}, "node_size must be that of the machine, 4, got 2"),
        ("ring", {"intra": 10**9}, "intra must be a whole number >= 1 and <= 262144, got 10"),
        ("ring", {"intra": 3}, r"world_size must be ranks x intra, 4 x 3, got 4"),
        ("ring", {"ranks": True}, "ranks must be a whole number >= 1, got True"),
        ("ring", {"ranks": 4.0}, "ranks must be a whole number >= 1, got 4.0"),
        ("ring", {"ranks": 8, "world_size": 8}, "num_nodes must be ranks, 8, got 4"),
        ("ring", {"options": {"exchange": "carrier pigeon"}}, "exchange must be one of .*pigeon"),
        ("table", {"options": {"exchange": "carrier pigeon"}}, "exchange must be one of .*pigeon"),
        ("table", {"options": {"exchange": ["p2p"]}}, "exchange must be one of"),
        ("table", {"options": {"blocks": 2}}, "a key 'options.blocks' that no plan has"),
        ("table", {"hops": ["t0 0>1 kv0.0", 5]}, "cannot read hop 5"),
        ("table", {"hops": ["t" + "9" * 20 + " 0>1 kv0.0"]}, "cannot read hop"),
        ("table", {"hops": ["t\u0663 0>1 kv0.0"]}, "cannot read hop"),
        ("table", {"hops": "t0 0>1 kv0.0"}, "hops must be a list of words"),
        ("table", {"num_shares": 10**9}, "num_shares must be at most"),
        (
            "table",
            {"like": {"schedule": "ring", "options": {}}},
            "like must be a schedule that cuts",
        ),
        (
            "table",
            {"like": {"schedule": "sap", "options": {}}},
            "num_shares is 1 .*they must be equal",
        ),
        ("table of moved queries", {"num_shares": 1}, "they must be equal"),
        ("table", {"promisse": []}, "a key 'promisse' that no plan has"),
        ("ring", {"hops": []}, "a key 'hops' that no plan has"),
        ("ring", {"layout": ["zigzag"]}, r"layout must be a name, got \['zigzag'\]"),
        ("ring", {"layout": "spiral"}, "layout: no layout 'spiral'"),
        ("ring", {"schedule": "spiral"}, "schedule must be one of ring.*got 'spiral'"),
        ("wave on nodes", {"options": {"blocks": True, "twins": 0}}, "options.blocks must be int"),
        ("wave on nodes", {"options": {"blocks": "3"}}, "options.blocks must be int, got '3'"),
        ("moved queries", {"options": {"move_q": "yes"}}, "options.move_q must be bool"),
        (
            "moved queries",
            {"options": {"buffer_tokens": -5}},
            "buffer_tokens must be .*>= 0, got -5",
        ),
        ("trees", {"options": {"wires": "{", "shares": 1, "steps": 1, "floor": 0.0}}, "options: "),
        ("ring", {"machine": {"name": "m", "node_size": True}}, "machine.node_size must be"),
        ("ring", {"machine": {"name": 5, "node_size": 4}}, "machine.name must be text, got 5"),
        (
            "ring",
            {"machine": {"name": "m", "node_size": 4, "link_gbps": True}},
            "machine.link_gbps",
        ),
        ("ring", {"machine": {"name": "m", "node_size": 4}}, "machine: .*have no route"),
        ("ring", {"machine": []}, r"machine must be an object, got \[\]"),
        (
            "ring",
            {"documents": {"cu_seqlens": [0, 40.0], "causal": True, "window": None}},
            "documents.cu_seqlens must be whole numbers >= 0, got 40.0",
        ),
        (
            "ring",
            {"documents": {"cu_seqlens": [0, 40], "causal": 1, "window": None}},
            "documents.causal must be true or false, got 1",
        ),
        (
            "ring",
            {"documents": {"cu_seqlens": [0, 40], "causal": True, "window": "9"}},
            "documents.window must be a whole number >= 1, got '9'",
        ),
        (
            "ring",
            {"documents": {"cu_seqlens": [0, 1 << 40], "causal": True, "window": None}},
            "at most 2147483648 tokens",
        ),
    ],
)
def test_a_field_that_no_plan_has_is_named(name, change, reason):
    with pytest.raises(PlanError, match=reason):
        Plan.from_json(fields_of(name, **change))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"schema": 1, "schema": 1}', "'schema' is there twice"),
        ("[" * 100000, "cannot be read as JSON"),
        ("1" * 10000, "cannot be read as JSON"),
        ('{"schema": true}', "schema True"),
        ('{"schema": 1.0}', "schema 1.0"),
        ('"\\ud800"', "cannot be read as JSON"),
    ],
)
def test_text_that_no_reader_should_take(text, reason):
    with pytest.raises(PlanError, match=reason):
        Plan.from_json(text)


@pytest.mark.parametrize("loads", [[99, 99], [10**9, 10**9]])
def test_a_large_promise_is_fine_and_is_shown(loads):
    made = Plan.from_json(fields_of("table", limits=[*loads, 99.0, 99.0]))
    assert f"0..1 shares per link and step ({loads[0]} declared)" in str(check(made))


def test_links_are_checked_on_the_machine_whatever_the_schedule_was_made_for():
    """Words of an all-gather are single messages; over nodes, NICs carry them."""
    gathers = BASES["all_gather on nodes"]
    assert not check(gathers).links_proved
    assert "links      not proved" in str(check(gathers))
    single = table_of(gathers)
    assert single.schedule.collective is None
    report = check(single)
    assert (report.links_proved, report.max_nic) == (True, 2)
    assert_right(single)
    with pytest.raises(PlanError, match=r"NIC out 0 carries 2 shares in step 0, 1 are declared"):
        check(table_of(gathers, limits=DeclaredLimits(9, 1, 9.0)))
    over = DeclaredLimits(9, 0, 9.0)
    with pytest.raises(PlanError, match="NIC out 0 carries"):
        check(table_of(BASES["wave on nodes"], limits=over))


@pytest.mark.parametrize(
    "limits",
    [
        (float("nan"),) * 4,
        (1, 1, float("inf"), 0.0),
        (-1, 1, 2.0, 0.0),
        (True, 1, 2.0, 0.0),
        ("1",) * 4,
        (1,),
    ],
)
def test_promises_given_in_code(limits):
    with pytest.raises(PlanError, match="limits"):
        BASES["table"].with_hops([], limits=limits)


@pytest.mark.parametrize("exchange", ["carrier pigeon", None, True, 1, ["p2p"]])
def test_exchanges_are_known_wherever_a_schedule_comes_from(exchange):
    for name in ("table", "ring", "moved queries", "table of a mesh"):
        with pytest.raises(PlanError, match="exchange must be one of"):
            dataclasses.replace(BASES[name].schedule, exchange=exchange)
    with pytest.raises(PlanError, match="exchange must be one of"):
        planned("tasp", exchange=exchange)
    old = copy.copy(BASES["table"].schedule)
    object.__setattr__(old, "exchange", exchange)  # as a pickle of another version may have it
    with pytest.raises(PlanError, match="exchange must be one of"):
        pickle.loads(pickle.dumps(old))


def test_a_schedule_that_has_no_use_for_an_exchange_takes_none():
    with pytest.raises(PlanError, match="it takes none"):
        planned("all_gather", exchange="all_to_all")
    with pytest.raises(PlanError, match="takes no exchange"):
        dataclasses.replace(BASES["all_gather on nodes"].schedule, exchange="all_to_all")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"machine": tasp.machine("mesh8")}, "the machine is for 8 ranks, the layout for 4"),
        ({"machine": tasp.machine("mesh2x2")}, "nodes of 4 ranks, the machine has nodes of 2"),
        ({"docs": tasp.Documents.of([40])}, "the layout is of other documents"),
        ({"schedule": planned("ring", ranks=2).schedule}, "the schedule is for 2 ranks"),
        ({"schedule": BASES["moved queries"].schedule}, "compiled for layout 'contiguous'"),
        (
            {"schedule": BASES["table of moved queries"].schedule},
            "compiled for layout 'contiguous'",
        ),
        ({"intra": 0}, "intra must be a whole number >= 1"),
        ({"intra": 1 << 20}, "at most 1048576 ranks"),
    ],
)
def test_parts_that_do_not_belong_together(change, reason):
    with pytest.raises(PlanError, match=reason):
        dataclasses.replace(BASES["ring"], **change)


def test_steps_far_away_cost_nothing():
    words = BASES["table"].hops(backward=True).lines()
    late = [re.sub(r"t(\d+)", lambda m: f"t{int(m[1]) * 100_000}", w) for w in words]
    made = BASES["table"].with_hops(late)
    report = check(made)
    assert report.busy < 1e-4
    assert report.min_load == 0
    assert len(made.table().splitlines()) < 10
    with pytest.raises(PlanError, match="does not hold yet") as caught:
        check(made.with_hops([w for w in late if w != late[0]]))
    assert len(str(caught.value).splitlines()) < 12


# ---- heads over groups: numbers in the table are groups


GROUPS = plan([40], 8, schedule="ring", intra=2)


def test_messages_about_groups_say_so():
    words = GROUPS.hops(backward=True).lines()
    assert "rank" not in GROUPS.table()
    assert "into group 3" in GROUPS.table()
    assert "the table is between 4 groups: group 3 (ranks 6..7)" in GROUPS.summary()
    for lost, reason in (
        ("t2 2>3 kv0.0", r"group 3 .ranks 6..7. needs share 0 of group 0 .ranks 0..1.'s KV"),
        ("t0 0>1 kv0.0", "a group sends what it does not hold yet"),
        ("t2 1>2 dkv0.0", r"group 1 \(ranks 2..3\) never sends its part of dkv0.0 home"),
    ):
        with pytest.raises(PlanError, match=reason) as caught:
            check(GROUPS.with_hops([w for w in words if w != lost]))
        assert GROUPS.with_hops(words).summary().split(";")[1] in str(caught.value)
        assert "8 ranks" in str(caught.value)
    with pytest.raises(PlanError, match="link 0>1 between groups carries 1"):
        check(GROUPS.with_hops(words, limits=DeclaredLimits(0, 0, 2.0)))
    with pytest.raises(PlanError, match=r"group 0 \(ranks 0..1\) holds 2 travelling KV"):
        check(GROUPS.with_hops(words, limits=DeclaredLimits(1, 0, 1.5)))
    with pytest.raises(PlanError, match=r"a hop names a group outside 0\.\.3"):
        check(GROUPS.with_hops([*words, "t0 0>7 kv0.0"]))


@pytest.mark.parametrize("rank", [-1, 8, 9])
def test_ranks_outside_are_named_as_they_were_given(rank):
    for ask in (
        GROUPS.tokens,
        GROUPS.positions,
        GROUPS.num_tokens,
        lambda r: tasp.lower(GROUPS, r),
    ):
        with pytest.raises(ValueError, match=rf"rank {rank} does not exist: ranks are 0\.\.7"):
            ask(rank)
    with pytest.raises(
        PlanError, match=rf"group of 2 ranks {rank} does not exist: groups are 0\.\.3"
    ):
        GROUPS.hops(rank)


def test_a_table_keeps_its_exchange_and_a_changed_one_is_another_plan():
    packed = BASES["helper, packed"]
    made = table_of(packed)
    assert isinstance(made.schedule, Table)
    assert made.schedule.exchange == "all_to_all"
    again = Plan.from_json(made.to_json())
    assert again == made
    assert again.schedule.exchange == "all_to_all"
    single = Plan.from_json(json.dumps({**json.loads(made.to_json()), "options": {}}))
    assert single != made
