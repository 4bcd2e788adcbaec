"""Machines: names, files, capacities, and the cut bound, proved on every set."""

import itertools
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tasp_core import Machine, TopologyError, cut_bound, machine
from tasp_core.schedules import build
from tasp_core.schedules.wave import best_twins

MESH = {"name": "m", "node_size": 4, "link_gbps": 60.0}


@pytest.mark.parametrize(
    ("name", "node_size", "num_nodes"),
    [
        ("mi300x", 8, 1),
        ("h100", 8, 1),
        ("h100x2", 8, 2),
        ("mi300xx4", 8, 4),
        ("mesh8", 8, 1),
        ("mesh1", 1, 1),
        ("mesh4x2", 4, 2),
        ("mesh1x16", 1, 16),
        ("mesh12x10", 12, 10),
    ],
)
def test_names(name, node_size, num_nodes):
    found = machine(name)
    assert (found.name, found.node_size, found.num_nodes) == (name, node_size, num_nodes)
    assert found.ranks == node_size * num_nodes
    assert found.source


@pytest.mark.parametrize(
    "name", ["mesh0", "mesh", "h100x0", "h200x", "h100x2x2", "mesh4x", "", "."]
)
def test_unknown_names(name):
    with pytest.raises(TopologyError, match=r"no machine '.*': known are .*h100.*JSON file"):
        machine(name)


def test_resources_of_a_full_mesh():
    where = machine("mesh4x2")
    assert where.resources(0, 3) == ("link 0>3",)
    assert where.resources(3, 4) == ("nic_out 3", "nic_in 4")
    assert where.capacity_gbps("link 0>3") == 64.3
    assert {where.capacity_gbps(r) for r in where.resources(3, 4)} == {50.0}


def test_resources_of_a_switch():
    where = machine("h100x2")
    assert where.resources(9, 15) == ("port_out 9", "port_in 15")
    assert where.resources(15, 0) == ("nic_out 15", "nic_in 0")
    assert {where.capacity_gbps(r) for r in where.resources(9, 15)} == {450.0}
    both = replace(where, link_gbps=7.0)
    assert both.resources(0, 1) == ("link 0>1", "port_out 0", "port_in 1")
    assert both.capacity_gbps("link 0>1") == 7.0


@pytest.mark.parametrize("name", ["mi300x", "h100x4", "mesh3x5"])
def test_json_round_trip(name, tmp_path):
    where = replace(machine(name), latency_s=3e-6, source="measured")
    assert Machine.from_json(where.to_json()) == where
    path = tmp_path / "machine.json"
    path.write_text(where.to_json())
    assert machine(path) == machine(str(path)) == where


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"colour": "red"}, r"unknown keys \['colour'\], missing keys \[\]"),
        ({"link_gbs": 5, "ranks": 4}, r"unknown keys \['link_gbs', 'ranks'\]"),
        ({"schema": 2}, '"schema": 1'),
        ({"schema": None}, '"schema": 1'),
        ({"node_size": 0}, "node_size must be a whole number >= 1, got 0"),
        ({"node_size": "4"}, "node_size must be a whole number >= 1, got '4'"),
        ({"num_nodes": 1.5}, r"num_nodes must be a whole number >= 1, got 1\.5"),
        ({"link_gbps": "fast"}, "link_gbps must be a finite number >= 0, got 'fast'"),
    ],
)
def test_machine_files_that_are_wrong(change, reason):
    with pytest.raises(TopologyError, match=reason):
        Machine.from_json(json.dumps({"schema": 1, **MESH, **change}))


@pytest.mark.parametrize("key", ["name", "node_size"])
def test_machine_files_that_lack_a_key(key):
    data = {"schema": 1, **MESH}
    del data[key]
    with pytest.raises(TopologyError, match=rf"missing keys \['{key}'\]"):
        Machine.from_json(json.dumps(data))


@pytest.mark.parametrize(("text", "reason"), [("{", "not JSON"), ("[]", "object"), ("3", "object")])
def test_files_that_are_no_machine(text, reason, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(TopologyError, match=reason):
        machine(path)


@pytest.mark.parametrize("key", ["link_gbps", "port_gbps", "nic_gbps", "latency_s"])
@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan"), None])
def test_impossible_rates(key, value):
    with pytest.raises(TopologyError, match=rf"machine 'm': {key} must be a finite number >= 0"):
        Machine(**{**MESH, key: value})


def test_no_route():
    with pytest.raises(TopologyError, match=r"no route; give link_gbps or port_gbps"):
        Machine("m", 2, nic_gbps=50.0)
    with pytest.raises(TopologyError, match=r"nodes have no route; give nic_gbps"):
        Machine("m", 2, 3, link_gbps=60.0)
    assert Machine("m", 1).ranks == 1
    assert Machine("m", 1, 4, nic_gbps=1.0).ranks == 4


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("mesh8x2", 0.0300), ("mesh8x4", 0.0620), ("mesh8", 1 / 64.3), ("mesh1", 0)],
)
def test_cut_bound_of_the_theory(name, seconds):
    """THEORY 2.2 and 2.4, in KV/GB/s."""
    assert cut_bound(machine(name), 1e9) == pytest.approx(seconds, abs=5e-5)
    assert cut_bound(machine(name), 5e8) == pytest.approx(seconds / 2, abs=5e-5)


def capacity_into(where, inside):
    """GB/s that can enter a set of ranks: a largest flow, by what is symmetric in it."""
    m, u = where.node_size, where.num_nodes
    total, within = 0.0, [sum(r // m == k for r in inside) for k in range(u)]
    for s in within:
        o = m - s
        if s and o:  # o x s pairs, evenly used
            limits = [where.link_gbps] if where.link_gbps else []
            limits += [where.port_gbps / max(o, s)] if where.port_gbps else []
            total += o * s * min(limits)
    # NICs: senders of one node reach the receivers of all others (cut of a transport problem)
    outside = [m - s for s in within]
    cuts = [sum(outside), sum(within)]
    cuts += [sum(outside) - outside[k] + sum(within) - within[k] for k in range(u)]
    return total + where.nic_gbps * min(cuts) if u > 1 else total


MACHINES = [
    Machine("test", m, u, link_gbps=link, port_gbps=port, nic_gbps=nic)
    for m, u in [(1, 2), (1, 5), (2, 1), (5, 1), (2, 2), (2, 4), (3, 2), (3, 3), (4, 2), (5, 2)]
    for link, port in [(60.0, 0.0), (0.0, 300.0), (60.0, 100.0), (1.0, 500.0)]
    for nic in (0.5, 50.0, 1000.0)
]


@pytest.mark.parametrize("where", MACHINES)
def test_cut_bound_is_the_worst_of_all_sets(where):
    ranks = range(where.ranks)
    worst = max(
        (where.ranks - size) / capacity_into(where, inside)
        for size in range(1, where.ranks)
        for inside in itertools.combinations(ranks, size)
    )
    assert cut_bound(where, 1e9) == pytest.approx(worst, rel=1e-9)


def test_best_twins_sees_ports_behind_links():
    both = Machine("both", 8, 2, link_gbps=1000.0, port_gbps=450.0, nic_gbps=50.0)
    assert best_twins(both) == best_twins(machine("h100x2")) == 14


def seconds(name, where, options=None):
    """Step-synchronous: every step takes as long as its busiest resource; 1 GB of KV a rank."""
    schedule = build(name, where, options)
    hops, total = schedule.hops(), 0.0
    links, count = np.unique(np.stack(hops[:3], axis=1), axis=0, return_counts=True)
    loads = Counter()
    for (step, src, dst), shares in zip(links.tolist(), count.tolist(), strict=True):
        for resource in where.resources(src, dst):
            loads[step, resource] += shares / schedule.num_shares
    for step in range(schedule.num_steps()):
        total += max(x / where.capacity_gbps(r) for (t, r), x in loads.items() if t == step)
    return total


@pytest.mark.parametrize(
    ("name", "ring", "flat", "paths", "plain", "best"),
    [
        ("mesh8x2", 0.100, 0.187, 0.800, 0.955, 0.990),
        ("h100x2", 0.100, 0.187, 0.800, 0.955, 0.990),
        ("mesh8x3", 0.100, 0.144, 0.800, 0.974, 0.974),
        ("mesh8x4", 0.100, 0.129, 0.800, 0.983, 0.983),
        ("mesh4x2", 0.206, 0.360, 0.823, 0.908, 0.976),
        ("mesh8", 0.143, 1.0, None, 1.0, 1.0),
        ("mesh6", 0.200, 1.0, None, 1.0, 1.0),
    ],
)
def test_shares_of_the_cut_bound(name, ring, flat, paths, plain, best):
    """The table of THEORY 3.3; switch nodes give the same numbers."""
    where = machine(name)
    expected = {("ring", None): ring, ("tasp", None): flat, ("wave", None): best}
    if paths:
        expected |= {("tasp_paths", None): paths, ("tasp_rails", None): paths}
    for (schedule, options), share in expected.items():
        found = cut_bound(where, 1e9) / seconds(schedule, where, options)
        assert found == pytest.approx(share, abs=0.01), schedule
    found = cut_bound(where, 1e9) / seconds("wave", where, {"twins": 0})
    assert found == pytest.approx(plain, abs=0.01)
