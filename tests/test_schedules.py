"""Schedules: link loads, steps and trees against THEORY 3, derived here a second time."""

import itertools
from collections import Counter
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_core import Machine, PlanError, check, decompose, machine, plan
from tasp_core.schedules import SCHEDULES, Hops, build
from tasp_core.schedules.wave import best_twins

SEEDED = settings(derandomize=True, deadline=None, max_examples=200, database=None)
NUMBER = st.integers(0, 2**40)

WAVES = [
    (m, u, g, b)
    for m, u in itertools.product(range(1, 7), range(1, 6))
    for g in sorted({1, 2, max(1, m * u - 1)})
    for b in (sorted({0, 1, m - 1}) if m > 1 and u > 1 else [0])
]


def wave(m, u, g, b):
    return build("wave", Machine("test", m, u, 1.0, 0.0, 1.0), {"blocks": g, "twins": b})


def rows(hops):
    """Hops as a set of (step, src, dst, owner, share); none may be repeated."""
    table = list(zip(*(c.tolist() for c in hops[:5]), strict=True))
    assert len(set(table)) == len(table)
    return set(table)


def both(schedule, rank=None):
    """Forward kv rows and backward dkv rows."""
    back = schedule.hops(rank, backward=True)
    forward = rows(schedule.hops(rank))
    assert rows(back.where(back.kind == 0)) == forward
    return forward, rows(back.where(back.kind == 1))


@lru_cache(maxsize=len(WAVES))
def wave_rows(m, u, g, b):
    return both(wave(m, u, g, b))


def theory_wave(m, u, g, b):
    """The arcs of THEORY 3 as written: forward, and reversed at the steps of 3.5 (m > 1)."""
    parts, out, back = max(b, 1), set(), set()

    def at(k, r):
        return k % u * m + r % m

    for a, r, e, i in itertools.product(range(u), range(m), range(g), range(parts)):
        twins = {d for d in range(1, m) if b >= 1 and u > 1 and (d - 1) % b == i}
        what = (at(a, r), e * parts + i)
        for j in range(u):
            k = a + j
            for d in range(1, m):
                if j == 0 or d not in twins:
                    out.add((e + j, at(k, r), at(k, r + d), *what))
                    home = e + 2 * u if j == 0 and d in twins else e + j + 2
                    back.add((home, at(k, r + d), at(k, r), *what))
                else:
                    out.add((e + j, at(k - 1, r + d), at(k, r + d), *what))
                    back.add((e + 2 * u - j, at(k, r + d), at(k - 1, r + d), *what))
            if j:
                out.add((e + j - 1, at(k - 1, r), at(k, r), *what))
                back.add((e + 2 * u - j + 1, at(k, r), at(k - 1, r), *what))
    return out, back


def reversed_trees(forward):
    """Gradients home along reversed arcs, each as early as its computation and its sum allow."""
    trees = {}
    for step, src, dst, owner, share in forward:
        trees.setdefault((owner, share), {})[dst] = (step, src)
    back = set()
    for (owner, share), tree in trees.items():
        ready = {rank: step + 2 for rank, (step, _) in tree.items()}
        for rank in sorted(tree, key=lambda x: -tree[x][0]):  # children before parents
            parent = tree[rank][1]
            back.add((ready[rank], rank, parent, owner, share))
            ready[parent] = max(ready.get(parent, 0), ready[rank] + 1)
    return back


@pytest.mark.parametrize("n", range(2, 65))
def test_tasp_loads_every_link_equally(n):
    made = plan([n], n, schedule="tasp")
    fold = 2 if n in (4, 6) else 1
    hops = made.hops()
    load = np.zeros((n - 1, n, n), dtype=np.int64)
    np.add.at(load, (hops.step, hops.src, hops.dst), 1)
    assert (load == fold * (1 - np.eye(n, dtype=np.int64))).all()
    assert made.schedule.num_shares == fold * (n - 1)
    assert made.schedule.num_steps() == n - 1
    if n <= 32 or n in (48, 64):  # the proof itself, where it is quick
        report = check(made)
        assert report.max_load == report.min_load == fold == made.schedule.limits.inside
        assert report.busy == 1.0
        assert report.peak_shards == (1.0 if n == 2 else 2.0)


@pytest.mark.parametrize("n", range(2, 65))
def test_ring_uses_one_of_n_minus_1_links(n):
    report = check(plan([n], n, schedule="ring"))
    assert report.busy == pytest.approx(1 / (n - 1), rel=1e-12)
    assert (report.max_load, report.min_load) == (1, 0 if n > 2 else 1)
    assert plan([n], n, schedule="ring").schedule.num_steps() == n - 1


@pytest.mark.parametrize("name", ["tasp_paths", "tasp_rails"])
@pytest.mark.parametrize(("m", "u"), [(2, 2), (2, 5), (4, 3), (6, 2), (8, 2)])
def test_paths_load_nics_and_links_with_one_share(name, m, u):
    report = check(plan([100], m * u, schedule=name, machine=f"mesh{m}x{u}"))
    assert (report.max_load, report.min_load) == (1, 1)
    assert (report.max_nic, report.min_nic) == (1, 1)


@pytest.mark.parametrize(("m", "u", "g", "b"), WAVES)
def test_wave_is_the_theory(m, u, g, b):
    forward, backward = wave_rows(m, u, g, b)
    out, back = theory_wave(m, u, g, b)
    assert forward == out
    assert backward == (back if m > 1 else reversed_trees(out))


@pytest.mark.parametrize(("m", "u", "g", "b"), WAVES)
def test_wave_gradients_come_home_as_early_as_they_can(m, u, g, b):
    """Where chunks reach every peer duplicated (no broadcast in other nodes), rails wait two steps more."""
    forward, backward = wave_rows(m, u, g, b)
    parts = max(b, 1)

    def no_fans(share):
        return b and {(d - 1) % b for d in range(1, m)} == {share % parts}

    expected = set()
    for step, src, dst, owner, share in reversed_trees(forward):
        rail = src // m != dst // m and src % m == owner % m
        expected.add((step + 2 * bool(rail and no_fans(share)), src, dst, owner, share))
    assert backward == expected


@pytest.mark.parametrize(("m", "u", "g", "b"), WAVES)
def test_wave_steps_loads_messages_and_buffers(m, u, g, b):
    schedule, n, parts = wave(m, u, g, b), m * u, max(b, 1)
    forward, _ = wave_rows(m, u, g, b)
    steps = g + u - 1 if m > 1 else (g + u - 2 if u > 1 else 0)
    assert schedule.num_steps() == steps
    assert schedule.num_steps(backward=True) == (0 if n == 1 else g + 2 * u - 2 * (m == 1))
    assert len(forward) == n * (n - 1) * g * parts  # every share reaches every other rank once
    kept = b - 1 if b else 1  # parts of a remote block that a link inside carries
    links, nic_out, nic_in = Counter(), Counter(), Counter()
    for step, src, dst, _, _ in forward:
        if src // m == dst // m:
            links[step, src, dst] += 1
        else:
            nic_out[step, src] += 1
            nic_in[step, dst] += 1
    for t in range(steps):
        remote = sum(0 <= t - j < g for j in range(1, u))
        inside = parts * (t < g) + kept * remote
        across = parts * sum(0 <= t - j + 1 < g for j in range(1, u)) + (m - 1) * bool(b) * remote
        ranks = range(n)
        peers = [(x, y) for x in ranks for y in ranks if x != y and x // m == y // m]
        assert {links[t, x, y] for x, y in peers} == ({inside} if m > 1 else set())
        assert {nic_out[t, x] for x in ranks} == {nic_in[t, x] for x in ranks} == {across}
    limits = schedule.limits
    assert limits.inside == parts + (u - 1) * kept or m == 1
    assert limits.across == (u - 1) * (parts + (m - 1) * bool(b))
    if g >= u and n > 1:  # the pipe fills, so the limits is reached
        assert max(links.values(), default=limits.inside) == limits.inside
        assert max(nic_out.values(), default=0) == limits.across
    fans = (m - 1) * (g + u - 1 if kept or u == 1 else g)
    crossings = g + u - 2 + bool(b) if u > 1 else 0
    messages = Counter(src for _, src, _ in {row[:3] for row in forward})
    assert n == 1 or {messages[x] for x in range(n)} == {fans + crossings}
    assert limits.buffer <= (n - 1 if g == u == 1 else 2 * (n - 1) / g)


@pytest.mark.parametrize(("m", "u"), [(1, 4), (2, 2), (3, 2), (4, 1), (4, 2), (2, 5)])
def test_wave_keeps_its_declared_buffer(m, u):
    for b in (0, 1, m - 1) if m > 1 and u > 1 else (0,):
        for g in (1, 2, m * u - 1):
            how = {"machine": f"mesh{m}x{u}", "schedule_options": {"blocks": g, "twins": b}}
            report = check(plan([40], m * u, schedule="wave", **how))
            assert report.peak_shards <= min(m * u - 1, 2 * (m * u - 1) / g) + 1e-9


def test_the_example_of_the_theory():
    """Word for word, as sets a step."""
    text = """t0 0>1:kv0.0 0>2:kv0.0 1>0:kv1.0 1>3:kv1.0 2>3:kv2.0 2>0:kv2.0 3>2:kv3.0 3>1:kv3.0
    t1 0>1:kv0.1 0>1:kv2.0 0>2:kv0.1 1>0:kv1.1 1>0:kv3.0 1>3:kv1.1 2>3:kv2.1 2>3:kv0.0 2>0:kv2.1 3>2:kv3.1 3>2:kv1.0 3>1:kv3.1
    t2 0>1:kv2.1 1>0:kv3.1 2>3:kv0.1 3>2:kv1.1"""  # noqa: E501
    steps = [line.split() for line in text.splitlines()]
    words = [f"{step} {word.replace(':', ' ')}" for step, *line in steps for word in line]
    options = {"blocks": 2, "twins": 0}
    hops = plan([8], 4, schedule="wave", machine="mesh2x2", schedule_options=options).hops()
    assert sorted(hops.lines()) == sorted(words)


ANYWHERE = ("ring", "tasp", "wave", "all_gather")
EVEN = [name for name, kind in SCHEDULES.items() if not kind.variable_size]  # need no layout
CASES = [
    *itertools.product(ANYWHERE, ("mesh1", "mesh2", "mesh5", "mesh6", "mesh1x4"), [None]),
    *itertools.product(EVEN, ("mesh2x2", "mesh4x3"), [None]),
    *itertools.product(
        ["wave"], ("mesh2x2", "mesh4x3"), [{"blocks": 3, "twins": b} for b in (1, 2)]
    ),
]


@pytest.mark.parametrize(("name", "where", "options"), CASES)
def test_one_rank_can_get_its_own_hops(name, where, options):
    where = machine(where)
    schedule = build(name, where, options)
    for backward in (False, True):
        table = schedule.hops(backward=backward)
        assert table.lines() == table.ordered().lines()
        last = int(table.step.max()) + 1 if table.step.size else 0
        assert schedule.num_steps(backward=backward) == last
        for rank in range(where.ranks):
            mine = table.where((table.src == rank) | (table.dst == rank))
            assert schedule.hops(rank, backward=backward).lines() == mine.lines()


@pytest.mark.parametrize("n", range(2, 12))
def test_ring_gradients_ride_one_hop_behind_and_close_the_ring(n):
    schedule = plan([n], n, schedule="tasp").schedule
    forward, backward = both(schedule)
    expected = set()
    for share, cycle in enumerate(decompose(n).cycles):
        for at, distance in itertools.product(range(n), range(1, n)):
            src, dst = cycle[(at + distance) % n], cycle[(at + distance + 1) % n]
            expected.add((distance + 1, src, dst, cycle[at], share))
    assert backward == expected
    assert len(forward) == len(backward)


@pytest.mark.parametrize(
    ("name", "where", "options", "reason"),
    [
        ("wave", "mesh4", {"block": 3}, "no option block; it takes .*blocks, twins"),
        ("tasp", "mesh4", {"blocks": 3}, "'tasp' has no option blocks; it takes"),
        ("all_gather", "mesh4", {"blocks": 2}, "it takes none"),
        ("ring", "mesh4", {"exchange": "fax"}, "exchange must be one of .*p2p.*got 'fax'"),
        ("wave", "mesh4", {"twins": 2}, "at least two nodes of two ranks; use twins=0"),
        ("wave", "mesh1x4", {"twins": 1}, "at least two nodes of two ranks; use twins=0"),
        ("wave", "mesh4", {"blocks": 0}, "blocks must be a whole number >= 1, got 0"),
        ("wave", "mesh4", {"blocks": 1.5}, "blocks must be a whole number >= 1, got 1.5"),
        ("wave", "mesh4x2", {"twins": -1}, "twins must be a whole number >= 0, got -1"),
        ("spiral", "mesh4", None, "no schedule 'spiral'; known are ring"),
        ("tasp_paths", "mesh4", None, "at least 2 nodes, got 1"),
        ("tasp_rails", "mesh3x2", None, "even number of ranks per node, got 3"),
    ],
)
def test_options_and_machines_that_do_not_fit(name, where, options, reason):
    with pytest.raises(PlanError, match=reason):
        build(name, machine(where), options)


@pytest.mark.parametrize(
    ("name", "twins"),
    [("8x2", 14), ("4x2", 7), ("8x3", 0), ("8x4", 0), ("8x16", 0), ("1x4", 0), ("8", 0)],
)
def test_best_twins_of_the_theory(name, twins):
    where = machine(f"mesh{name}")
    assert best_twins(where) == twins
    assert build("wave", where).options == {"blocks": max(1, where.ranks - 1), "twins": twins}


@SEEDED
@given(st.lists(st.tuples(NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, st.sampled_from([0, 1]))))
def test_words_parse_back(rows):
    hops = Hops(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)
    words = hops.lines()
    again = Hops.parse(words)
    assert all((a == b).all() for a, b in zip(again, hops, strict=True))
    assert again.lines() == words
    assert len(set(words)) == len(set(rows))
    ordered = hops.ordered()
    assert sorted(ordered.lines()) == sorted(words)
    assert (np.diff(ordered.step) >= 0).all()


@pytest.mark.parametrize(
    "word",
    [
        "",
        "t3",
        "t3 2>5 kv1",
        "t3 2-5 kv1.4",
        "3 2>5 kv1.4",
        "t-1 2>5 kv1.4",
        "t3 2>5 qv1.4",
        "t3 2>5 kv1x4",
        "t3 2>5 kv1.4 kv1.5",
        "t3 2>5 KV1.4",
        "t3 2>5 kv1.4.2",
        "t1.5 2>5 kv1.4",
    ],
)
def test_words_that_are_no_hops(word):
    with pytest.raises(PlanError, match=r"cannot read hop .*; a hop looks like 't3 2>5 kv1\.4'"):
        Hops.parse(["t0 0>1 kv0.0", word])
