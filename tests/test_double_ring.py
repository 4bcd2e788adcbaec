"""Double ring: proofs, the table of THEORY 3.3, and its tables derived a second time by walking."""

import itertools
from dataclasses import replace

import pytest

from tasp_core import Documents, PlanError, check, decompose, machine, plan, simulate

SHAPES = [
    (m, u, rings)
    for m, u, rings in itertools.product((1, 2, 3, 4, 5, 6, 8), (1, 2, 3, 4), ("all", "one"))
    if 1 < m * u <= 24
]


def double_ring(m, u, rings="all", docs=None, **options):
    docs = Documents.of([7 * m * u + 3]) if docs is None else docs
    options = {"rings": rings, **options}
    name = f"mesh{m}x{u}"
    return plan(docs, m * u, schedule="double_ring", machine=name, schedule_options=options)


@pytest.mark.parametrize(("m", "u", "rings"), SHAPES)
def test_proved_forward_and_backward(m, u, rings):
    made = double_ring(m, u, rings)
    report = check(made)
    limits = made.schedule.limits
    assert report.peak_shards <= limits.buffer + 1e-9
    if u > 1 and m > 1:
        assert report.peak_shards >= 3.0 if rings == "all" else limits.buffer >= 3.0
    assert report.max_load == (limits.inside if m > 1 else report.max_load)
    assert report.max_nic == limits.across
    steps = max(m - 1, 1) * u if m > 1 else u - 1
    assert made.schedule.num_steps() == steps


@pytest.mark.parametrize(("m", "u"), [(3, 2), (4, 3), (5, 2), (2, 4)])
def test_walked_by_hand(m, u):
    """Follow every share: into a node by its rail, round a ring of the node, out by the rail."""
    cycles = decompose(m).cycles if m > 2 else ((0, 1),)
    length, expected = m - 1, set()
    for a, r, (i, cycle) in itertools.product(range(u), range(m), enumerate(cycles)):
        start = cycle.index(r)
        for j in range(u):
            k = (a + j) % u
            if j:
                expected.add(
                    ((j - 1) * length + i % length, (k - 1) % u * m + r, k * m + r, a * m + r, i)
                )
            walk = [k * m + cycle[(start + x) % m] for x in range(m)]
            for d, (src, dst) in enumerate(itertools.pairwise(walk)):
                expected.add((j * length + d, src, dst, a * m + r, i))
    hops = double_ring(m, u).hops()
    assert set(zip(*(c.tolist() for c in hops[:5]), strict=True)) == expected


@pytest.mark.parametrize(
    ("name", "share"),
    [("8x2", 0.844), ("8x3", 0.828), ("8x4", 0.820), ("8x16", 0.951), ("4x2", 0.811)],
)
def test_shares_of_the_cut_bound(name, share):
    """THEORY 3.3, double ring with many rings inside."""
    where = replace(machine(f"mesh{name}"), latency_s=0.0, tflops=0.0)
    docs = Documents.of([where.ranks * 2520], causal=False)
    made = plan(docs, where.ranks, schedule="double_ring", layout="contiguous", machine=where)
    found = simulate(made, heads=1, head_dim=128)
    assert found.bound_s / found.comm_s == pytest.approx(share, rel=0.005)


def test_one_node_and_one_rank_a_node_are_plain_rings():
    assert double_ring(5, 1).hops().lines() == plan([38], 5, schedule="tasp").hops().lines()
    alone = double_ring(1, 4).hops().lines()
    assert alone == plan([31], 4, schedule="ring", machine="mesh1x4").hops().lines()
    assert double_ring(5, 1, "one").hops().lines() == plan([38], 5, schedule="ring").hops().lines()


def test_a_rail_that_comes_too_late_or_twice_is_caught():
    made = double_ring(3, 2)
    words = made.hops(backward=True).lines()
    late = [w.replace("t0 0>3 kv0.0", "t2 0>3 kv0.0") for w in words]
    assert late != words
    with pytest.raises(PlanError, match="sends what it does not hold yet"):
        check(made.with_hops(late))
    twice = [*words, "t1 0>3 kv0.0"]
    with pytest.raises(PlanError, match="a share arrives twice"):
        check(made.with_hops(twice))
    home = [w for w in words if not (w.endswith("dkv0.0") and " 3>0 " in w)]
    assert len(home) == len(words) - 1
    with pytest.raises(PlanError, match=r"stops before its owner|never sends"):
        check(made.with_hops(home))


def test_options():
    assert double_ring(4, 2).schedule.options == {"rings": "all"}
    assert double_ring(4, 2, "one").schedule.num_shares == 1
    with pytest.raises(PlanError, match=r"rings must be one of .* got 'two'"):
        double_ring(4, 2, "two")
    with pytest.raises(PlanError, match="no option inner"):
        double_ring(4, 2, inner=2)
