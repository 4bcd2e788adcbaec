"""The cut bound is that of the slowest of all sets of ranks: networkx's maximum flow proves it."""

import itertools
import random
import subprocess
import sys
from functools import cache
from math import fsum
from pathlib import Path

import networkx
import pytest

from tasp_core import Bus, Machine, TopologyError, cut_bound, machine, plan, simulate, supports
from tasp_core.machines.bounds import cuts, into_gbps, machine_graph, tightest_cuts
from tasp_core.machines.presets import PRESETS

TOPO = sorted((Path(__file__).parent / "topo").glob("*.txt"))
EQUAL = [*PRESETS, "h100x2", "mesh2", "mesh5", "mesh8", "mesh2x2", "mesh4x2", "mesh1x4", "mesh3x5"]
BASES = [
    Machine("mesh", 4, link_gbps=10.0, nic_gbps=3.0),
    Machine("switch", 4, 2, port_gbps=90.0, nic_gbps=10.0),
    Machine("shared NICs", 4, 2, port_gbps=90.0, nic_gbps=10.0, nics=2),
    Machine("hosts", 3, 2, link_gbps=8.0, nic_gbps=10.0, host_gbps=6.0),
    Machine("unequal nodes", 1, 6, link_gbps=4.0, nic_gbps=2.0, nodes=(4, 2)),
    Machine("bus", 4, host_gbps=3.0, buses=(Bus("x", 4.0, (0, 1), (2, 3)),)),
    Machine("links and hosts", 5, host_gbps=3.0, link_gbps=2.0),
]


@cache
def degraded(seed):
    """One of BASES with some resources slower or dead."""
    chance = random.Random(seed)
    base = BASES[seed % len(BASES)]
    pairs = itertools.permutations(range(base.ranks), 2)
    names = sorted({name for pair in pairs for name in base.resources(*pair)})
    while True:
        chosen = chance.sample(names, chance.randint(1, 6))
        try:
            return base.degraded({name: chance.choice([0, 0.5, 1.0, 2.0, 4.0]) for name in chosen})
        except TopologyError:  # a rank without a route, or a dead bus
            continue


def slowest_set(where):
    """The least GB/s per rank outside, over all sets of ranks: one maximum flow for each set."""
    ranks, result = range(where.ranks), float("inf")
    graph = machine_graph(where)
    for size in range(1, where.ranks):
        for inside in itertools.combinations(ranks, size):
            flows = graph.copy()
            flows.add_edges_from(("outside", r) for r in ranks if r not in inside)
            flows.add_edges_from((r, "inside") for r in inside)
            gbps = networkx.maximum_flow_value(flows, "outside", "inside")
            result = min(result, gbps / (where.ranks - size))
    return result


def tightest(where):
    """The same by few flows."""
    cut = tightest_cuts(where)[-1]
    return cut.gbps / (where.ranks - len(cut.inside))


@pytest.mark.parametrize("name", EQUAL)
def test_of_equal_ranks_the_maximum_flow_finds_no_slower_set(name):
    where = machine(name)
    assert cut_bound(where, 1e9) == pytest.approx(1 / tightest(where), rel=1e-9)


@pytest.mark.parametrize("path", TOPO, ids=lambda path: path.stem)
def test_of_parsed_topologies_the_maximum_flow_finds_no_slower_set(path):
    where = machine(path)
    if where.ranks == 1:
        assert (tightest_cuts(where), cut_bound(where, 1e9)) == ([], 0.0)
    else:
        assert cut_bound(where, 1e9) == pytest.approx(1 / tightest(where), rel=1e-9)


@pytest.mark.parametrize("seed", range(28))
def test_of_degraded_machines_no_set_of_ranks_is_slower(seed):
    where = degraded(seed)
    bound = cut_bound(where, 1e9)
    assert bound == pytest.approx(1 / tightest(where), rel=1e-9)
    if where.ranks <= 6:
        assert bound == pytest.approx(1 / slowest_set(where), rel=1e-9)


SMALL = ("a100_nv4", "bridges_ragged", "mi210_pcie")


@pytest.mark.parametrize(
    "name", ["mesh4", "mesh2x2", "mesh1x4", *(p for p in TOPO if p.stem in SMALL)], ids=str
)
def test_few_flows_find_what_the_flows_of_all_sets_find(name):
    where = machine(name)
    assert tightest(where) == pytest.approx(slowest_set(where), rel=1e-9)


@pytest.mark.parametrize("seed", range(0, 28, 7))
def test_a_cut_is_what_can_enter_a_set_by_any_choice_of_resources(seed):
    """Each cut of a mesh lets in no less than the best choice of one resource per route."""
    where = degraded(seed)
    for inside, gbps in cuts(where):
        outside = [r for r in range(where.ranks) if r not in inside]
        routes = [where.resources(*pair) for pair in itertools.product(outside, inside)]
        chosen = (set(choice) for choice in itertools.product(*routes))
        assert gbps == pytest.approx(min(fsum(map(where.capacity_gbps, c)) for c in chosen))


@pytest.mark.parametrize(("name", "tried"), [("bridges_ragged", 1 / 325), ("mi210_pcie", 1 / 89)])
def test_pairs_with_bridges_are_as_slow_as_their_way_through_the_hosts(name, tried):
    """Neither a single rank nor the node, which alone were tried, is the slowest set here."""
    where = machine(TOPO[0].parent / f"{name}.txt")
    assert 3 / into_gbps(where, [0]) == pytest.approx(3 * tried)
    assert cut_bound(where, 1e9) == pytest.approx(2 / 50)
    assert 3 * tried < 2 / 50
    assert cuts(where)[-1] == ((0, 1), 50.0)


@pytest.mark.parametrize("seed", range(0, 28, 3))
def test_no_schedule_is_faster_than_the_bound(seed):
    where = degraded(seed)
    for schedule in ("ring", "tasp", "wave", "trees"):
        options = {"schedule": schedule, "layout": "contiguous", "machine": where}
        if supports([64], where.ranks, **options):
            made = plan([840 * where.ranks], where.ranks, **options)
            times = simulate(made, heads=1, head_dim=128)
            assert times.comm_s >= cut_bound(where, 840 * 512) * (1 - 1e-9) > 0


def test_names_are_machines():
    assert cut_bound("mesh3", 1e9) == cut_bound(machine("mesh3"), 1e9)
    with pytest.raises(TopologyError, match="no machine 'mesh'"):
        cut_bound("mesh", 1e9)


def test_the_bound_of_many_ranks_needs_no_networkx():
    code = (
        "import sys, tasp_core; tasp_core.cut_bound('h100x128', 1e9); "
        "tasp_core.cut_bound(tasp_core.machine('h100x4').degraded({'nic_in 0': 1.0}), 1e9); "
        "print('networkx' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert said.stdout == "False\n"
