"""Trees: proofs on odd machines, nothing over what is dead, and far nearer the bound than the rest."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from spread import spread

from tasp_core import (
    Documents,
    Machine,
    Plan,
    PlanError,
    TopologyError,
    check,
    machine,
    plan,
    select,
    simulate,
)
from tasp_core.schedules import build

TOPO = Path(__file__).parent / "topo"
MESH = replace(machine("mesh8"), nic_gbps=0.0, host_gbps=5.0)
ODD = {
    "dead cable": MESH.degraded({"link 0>3": 0, "link 3>0": 0}),
    "slow link": MESH.degraded({"link 2>5": 16.0}),
    "dead nic": machine("mesh4x2").degraded({"nic_out 0": 0, "nic_in 0": 0}),
    "slow nic": machine("h100x2").degraded({"nic_out 5": 10.0, "nic_in 5": 10.0}),
    "nodes of 8 and 4": Machine("u", 4, 3, port_gbps=450.0, nic_gbps=50.0, nodes=(2, 1)),
    "shared nics": replace(machine("mesh4x2"), nics=2),
    "v100 cube": machine(TOPO / "v100_cube.txt"),
    "mi250x": machine(TOPO / "mi250x.txt"),
    "bridges": machine(TOPO / "bridges_ragged.txt"),
    "pcie": machine("a100_pcie"),
}


def bare(where):
    return replace(where, message_s=0.0, tflops=0.0)


def share_of_bound(schedule, where, **options):
    docs = Documents.of([where.ranks * 31250], causal=False)  # 64 MB of KV
    made = plan(docs, where.ranks, schedule=schedule, layout="contiguous", machine=where, **options)
    found = simulate(made, where, heads=4, head_dim=128)
    return found.bound_s / found.comm_s


@pytest.mark.parametrize("name", spread(ODD, keep=5))
def test_proved_with_exact_limits(name):
    where = ODD[name]
    made = plan([where.ranks * 20 + 3], where.ranks, schedule="trees", machine=where)
    report = check(made)
    limits = made.schedule.limits
    assert report.peak_shards == pytest.approx(limits.buffer)
    assert report.max_load == limits.inside
    assert report.max_nic <= limits.across
    assert Plan.from_json(made.to_json()) == made
    for backward in (False, True):
        table = made.hops(backward=backward)
        assert made.schedule.num_steps(backward=backward) == int(table.step.max()) + 1


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 11])
def test_proved_on_plain_meshes(n):
    check(plan([10 * n + 1], n, schedule="trees"))


GAINS = [
    # machine, least share of the bound, and how often the best of the others'
    ("dead cable", 0.88, 4.0),
    ("slow link", 0.85, 2.0),
    ("dead nic", 0.92, 1.3),
    ("slow nic", 0.68, 2.0),
    ("v100 cube", 0.80, 2.0),
    ("mi250x", 0.80, 3.0),
]


@pytest.mark.parametrize(("name", "least", "gain"), GAINS)
def test_nearer_the_bound_than_what_knows_no_faults(name, least, gain):
    where = bare(ODD[name])
    found = share_of_bound("trees", where)
    others = ["ring", "tasp", "wave"] + ["double_ring"] * (where.num_nodes > 1)
    assert least <= found <= 1 + 1e-9
    assert found >= gain * max(share_of_bound(x, where) for x in others)


def test_dead_and_needlessly_slow_ways_stay_empty():
    where = ODD["dead cable"]
    made = plan([4000], 8, schedule="trees", machine=where)
    used = simulate(made, where, heads=1, head_dim=64).link_bytes
    assert not any(name.startswith(("host", "link 0>3", "link 3>0")) for name in used)
    hops = made.hops()
    assert not ((hops.src == 0) & (hops.dst == 3)).any()
    back = made.hops(backward=True)
    assert not ((back.src == 3) & (back.dst == 0)).any()


def test_select_takes_trees_where_they_win():
    where = ODD["dead cable"]
    choice = select(Documents.of([16384], causal=False), where, heads=8, head_dim=128)
    assert choice.plan.schedule.name == "trees"
    rows = select(Documents.of([4096]), machine("mesh4"), heads=8, head_dim=128).table
    assert any("not all alike" in r.excluded for r in rows if r.schedule == "trees")


def test_the_same_options_give_the_same_hops():
    first = build("trees", ODD["slow nic"])
    again = build("trees", machine("h100x2"), first.options)
    assert again.hops().lines() == first.hops().lines()
    assert json.loads(first.options["wires"])["overrides"] == [
        ["nic_in 5", 10.0],
        ["nic_out 5", 10.0],
    ]
    other = build("trees", machine("h100x2"))
    assert other.options != first.options


def test_a_wrong_tree_is_caught():
    made = plan([4000], 8, schedule="trees", machine=ODD["dead cable"])
    words = made.hops(backward=True).lines()
    relayed = next(w for w in words if ">3 kv0." in w and not w.startswith("t0"))
    with pytest.raises(PlanError, match=r"not hold yet|never receives|other hops"):
        check(made.with_hops([w for w in words if w != relayed]))
    early = ["t0" + w[w.index(" ") :] if w == relayed else w for w in words]
    with pytest.raises(PlanError, match=r"does not hold yet|are declared"):
        check(made.with_hops(early))


@pytest.mark.parametrize(
    ("name", "options", "error", "reason"),
    [
        ("mesh8", {"shares": 0}, PlanError, "shares must be a whole number >= 1"),
        ("mesh8", {"steps": 1.5}, PlanError, "steps must be a whole number >= 1"),
        ("mesh8", {"branches": 2}, PlanError, "no option branches"),
        ("h100x16", {}, PlanError, "too many to search; use fewer shares, or 'wave'"),
        ("mesh4", {"wires": '{"name": "", "node_size": 1}'}, PlanError, "describe 1 ranks, not 4"),
        ("mesh4", {"wires": '{"name": "", "node_size": 4}'}, TopologyError, "have no route"),
    ],
)
def test_options_that_do_not_fit(name, options, error, reason):
    with pytest.raises(error, match=reason):
        build("trees", machine(name), options)
