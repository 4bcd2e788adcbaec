"""Machines that are not all alike: topology texts, dead and slow resources, shared NICs, unequal nodes."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tasp_core import Bus, Machine, Plan, TopologyError, cut_bound, machine, plan
from tasp_core.machines.bounds import into_gbps
from tasp_core.machines.topology_text import Rates, is_topology, parse_topology

TOPO = Path(__file__).parent / "topo"
MESH4 = Machine("m", 4, link_gbps=10.0, nic_gbps=3.0)
SWITCH4X2 = Machine("s", 4, 2, port_gbps=90.0, nic_gbps=10.0)


def read(name):
    return machine(TOPO / f"{name}.txt")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100_nvswitch", {"port_gbps": 450.0, "link_gbps": 0.0, "host_gbps": 0.0, "nics": 0}),
        ("a100_nv4", {"link_gbps": 100.0, "port_gbps": 0.0, "overrides": (), "ranks": 4}),
        ("a100_pcie", {"host_gbps": 25.0, "link_gbps": 0.0, "nics": 2, "ranks": 8}),
        ("v100_cube", {"host_gbps": 25.0, "link_gbps": 0.0, "nics": 4, "ranks": 8}),
        ("bridges_ragged", {"host_gbps": 25.0, "nics": 1, "ranks": 4}),
        ("one_gpu", {"ranks": 1, "link_gbps": 0.0}),
        ("mi300x", {"link_gbps": 64.0, "host_gbps": 0.0, "ranks": 8, "overrides": ()}),
        ("mi250x", {"link_gbps": 0.0, "host_gbps": 25.0, "ranks": 8}),
        ("mi210_pcie", {"host_gbps": 25.0, "ranks": 4}),
    ],
)
def test_topology_texts(name, expected):
    found = read(name)
    assert {key: getattr(found, key) for key in expected} == expected
    assert found.name == name
    assert "smi" in found.source
    assert Machine.from_json(found.to_json()) == found
    assert found.ranks == 1 or 0 < cut_bound(found, 1e9) < 1


def test_ways_through_partial_links_switches_and_sockets():
    cube = read("v100_cube")
    assert cube.capacity_gbps(*cube.resources(0, 3)) == 50.0
    assert cube.capacity_gbps(*cube.resources(0, 1)) == 25.0
    assert cube.resources(0, 7) == ("host_out 0", "host_in 7")
    pcie = read("a100_pcie")
    assert pcie.resources(0, 1) == ("host_out 0", "host_in 1")
    assert pcie.resources(0, 2) == ("host_out 0", "bus up0 0", "bus down1 0", "host_in 2")
    assert "bus socket0>1 0" in pcie.resources(3, 4)
    two_hops = read("mi250x")
    assert two_hops.resources(0, 1) == ("link 0>1",)
    assert two_hops.resources(0, 3) == ("host_out 0", "host_in 3")


def test_colours_blanks_and_rates():
    text = (TOPO / "h100_nvswitch.txt").read_text()
    assert "\x1b[4m" in text
    plain = "\n\n".join(
        "  " + "   ".join(line.split()) for line in text.split("Legend")[0].split("\n")
    )
    plain = plain.replace("\x1b[4m", "").replace("\x1b[0m", "")
    assert parse_topology(plain, "n") == parse_topology(text, "n")
    fast = parse_topology(text, rates=Rates(nvlink_gbps=50.0, nic_gbps=100.0))
    assert (fast.port_gbps, fast.nic_gbps) == (900.0, 100.0)
    assert not is_topology('{"schema": 1}')


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("GPU3\tNV18", "GPU3\tNV1B", r"line 5: cannot read cell 'NV1B'"),
        ("GPU3\tNV18", "GPU9\tNV18", r"line 5: expected the row of GPU3: 'GPU9"),
        ("GPU3\tNV18", "", r"line 5: expected the row of GPU3"),
        ("NIC8\tNODE", "Legend\tNODE", r"expected the row of NIC8"),
    ],
)
def test_texts_that_cannot_be_read_name_the_line(tmp_path, old, new, reason):
    text = (TOPO / "h100_nvswitch.txt").read_text()
    assert old in text
    path = tmp_path / "node.txt"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(TopologyError, match=reason):
        machine(path)


def test_texts_that_lack_a_part(tmp_path):
    nvidia, amd = ((TOPO / f"{n}.txt").read_text() for n in ("h100_nvswitch", "mi300x"))
    path = tmp_path / "node.txt"
    for text, reason in (
        ("\n".join(nvidia.splitlines()[:6]), r"line 1: the table of 18 devices has 5 rows"),
        (nvidia.split("\n", 1)[1], "no table of GPUs"),
        (amd.replace("Link Type", "Kind of Link"), 'no section "Link Type between two GPUs"'),
        (amd.replace("XGMI", "XMGI", 1), r"line \d+: cannot read cell 'XMGI'"),
    ):
        path.write_text(text)
        with pytest.raises(TopologyError, match=reason):
            machine(path)


def test_a_dead_link_falls_back():
    broken = MESH4.degraded({"link 0>3": 0, "link 1>2": 4.0})
    assert broken.resources(0, 3) == ("nic_out 0", "nic_in 3")
    assert broken.resources(3, 0) == ("link 3>0",)
    assert broken.capacity_gbps("link 1>2") == broken.route_gbps(1, 2) == 4.0
    assert broken.route_gbps(0, 3) == 3.0
    hosted = replace(MESH4, host_gbps=5.0).degraded({"link 0>3": 0})
    assert hosted.resources(0, 3) == ("host_out 0", "host_in 3")
    assert broken.degraded({"link 0>3": 10.0}).resources(0, 3) == ("link 0>3",)
    assert not broken.homogeneous
    assert MESH4.homogeneous


def test_a_dead_nic_falls_back_to_a_mates():
    broken = SWITCH4X2.degraded({"nic_out 3": 0, "nic_in 4": 0})
    assert broken.resources(3, 6) == ("port_out 3", "port_in 0", "nic_out 0", "nic_in 6")
    assert broken.resources(0, 4) == ("nic_out 0", "nic_in 5", "port_out 5", "port_in 4")
    assert broken.resources(6, 3) == ("nic_out 6", "nic_in 3")
    assert cut_bound(broken, 1e9) > cut_bound(SWITCH4X2, 1e9)


@pytest.mark.parametrize(
    ("base", "overrides", "reason"),
    [
        (MESH4, {"link 0>4": 1.0}, "'link 0>4', which is no resource"),
        (MESH4, {"link 2>2": 1.0}, "no resource"),
        (MESH4, {"port_in 0": 1.0}, "'port_in 0', which is no resource"),
        (MESH4, {"bus a 0": 1.0}, "no resource"),
        (MESH4, {"link 0>1": -1.0}, "override 'link 0>1' must be|link 0>1 must be a finite number"),
        (replace(MESH4, nic_gbps=0.0), {"link 2>1": 0}, "no route from rank 2 to rank 1 is alive"),
        (
            SWITCH4X2,
            {f"nic_in {r}": 0 for r in range(4)},
            r"no route from rank \d to rank \d is alive",
        ),
        (Machine("p", 2, port_gbps=1.0), {"port_out 1": 0}, "no route from rank 1 to rank 0"),
        (replace(SWITCH4X2, nics=2), {"nic_in 1": 5.0}, "'nic_in 1', which is no resource"),
    ],
)
def test_overrides_that_cannot_be(base, overrides, reason):
    with pytest.raises(TopologyError, match=reason):
        base.degraded(overrides)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"nics": 5}, "nics=5 need nic_gbps"),
        ({"nics": -1}, "nics must be a whole number >= 0"),
        ({"nodes": (3, 1)}, r"nodes \(3, 1\) must add up to num_nodes, 2"),
        ({"nodes": (2, 0)}, "each of nodes must be a whole number >= 1"),
        ({"buses": (("b", 1.0, (0,)),)}, "cannot read overrides or buses"),
        ({"buses": (("b", 0.0, (0,), (1,)),)}, "bus b must be a finite number"),
        ({"overrides": 3}, "cannot read overrides|not iterable"),
        ({"all_gather": "tree"}, "all_gather must be one of"),
        ({"message_s": float("nan")}, "message_s must be a finite number"),
        ({"tflops": -1.0}, "tflops must be a finite number"),
    ],
)
def test_machines_that_cannot_be(change, reason):
    with pytest.raises((TopologyError), match=reason):
        replace(SWITCH4X2, **change)


def test_shared_nics():
    shared = replace(SWITCH4X2, nics=2)
    assert shared.resources(1, 6) == ("nic_out 0", "nic_in 6")
    assert shared.resources(3, 5) == ("nic_out 2", "nic_in 4")
    assert cut_bound(shared, 1e9) == pytest.approx(4 / 20)  # 4 KV into a node by 2 NICs
    three = Machine("t", 5, 2, port_gbps=1.0, nic_gbps=1.0, nics=3)
    assert [three.resources(r, 9)[0] for r in range(5)] == [
        "nic_out 0",
        "nic_out 0",
        "nic_out 2",
        "nic_out 2",
        "nic_out 4",
    ]


def test_unequal_nodes():
    """A node of 8 and one of 4, planned as three runs of 4."""
    uneven = Machine("u", 4, 3, port_gbps=90.0, nic_gbps=10.0, nodes=(2, 1))
    assert uneven.ranks == 12
    assert uneven.resources(0, 7) == ("port_out 0", "port_in 7")
    assert uneven.resources(7, 8) == ("nic_out 7", "nic_in 8")
    assert [uneven.node(r) for r in (0, 7, 8, 11)] == [0, 0, 1, 1]
    assert cut_bound(uneven, 1e9) == pytest.approx(8 / 40)  # 8 KV into the small node by 4 NICs
    assert Plan.from_json((p := plan([64], 12, schedule="wave", machine=uneven)).to_json()) == p


def test_a_dead_link_and_the_bound():
    broken = MESH4.degraded({"link 0>3": 2.0})
    assert into_gbps(broken, [3]) == pytest.approx(22.0)
    assert into_gbps(broken, [2]) == pytest.approx(30.0)
    assert cut_bound(broken, 1e9) == pytest.approx(3 / 22)
    # what leaves a rank: one KV, by what is left of its links
    mute = MESH4.degraded({f"link 0>{r}": 0.25 for r in (1, 2, 3)})
    assert cut_bound(mute, 1e9) == pytest.approx(1 / 0.75)


def test_bus_limits_the_bound():
    where = machine("a100_pcie")
    assert where.resources(0, 5) == ("host_out 0", "bus socket_out 0", "host_in 5")
    assert cut_bound(where, 1e9) == pytest.approx(7 / 25)
    narrow = where.degraded({"bus socket_in 0": 5.0})
    assert into_gbps(narrow, [0, 1, 2, 3]) == pytest.approx(5.0)
    assert cut_bound(narrow, 1e9) == pytest.approx(4 / 5)
    assert machine("a100_pciex2").resources(8, 13)[1] == "bus socket_out 1"
    assert Bus(*narrow.buses[0]) == narrow.buses[0]


def into_by_force(where, inside):
    """GB/s into a set: the least of all choices of one resource for each pair that crosses."""
    pairs = [where.resources(a, b) for a in range(where.ranks) for b in inside if a not in inside]
    return min(sum(map(where.capacity_gbps, set(choice))) for choice in itertools.product(*pairs))


@pytest.mark.parametrize(
    "where",
    [
        Machine("a", 2, 2, link_gbps=5.0, nic_gbps=2.0).degraded({"nic_in 1": 0.5}),
        Machine("b", 2, 2, port_gbps=5.0, nic_gbps=2.0, nics=1),
        Machine("c", 4, host_gbps=3.0, buses=(Bus("x", 1.0, (0, 1), (2, 3)),)),
        Machine("d", 1, 4, nic_gbps=2.0, link_gbps=3.0, nodes=(3, 1)),
        MESH4.degraded({"link 0>3": 0, "link 1>3": 0}),
    ],
)
def test_no_choice_of_resources_cuts_a_rank_off_for_less(where):
    for rank in range(where.ranks):
        assert into_gbps(where, [rank]) == pytest.approx(into_by_force(where, [rank]))


def test_between_groups_the_slowest_member_counts():
    slow = Machine("m", 4, 2, link_gbps=10.0, nic_gbps=3.0).degraded(
        {"link 0>2": 1.0, "link 0>1": 2.0, "nic_out 5": 1.5}
    )
    found = plan([64], 8, schedule="ring", machine=slow, intra=2).machine
    assert found.overrides == (("link 0>1", 1.0), ("nic_out 2", 1.5))
    shared = plan([64], 8, schedule="ring", machine=replace(SWITCH4X2, nics=2), intra=2).machine
    assert (shared.nics, shared.nic_gbps) == (0, 5.0)
