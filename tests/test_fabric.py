"""The emulated network: machines as wires, real ranks inside, limits that hold, nothing left behind.

What builds namespaces is `make test-fabric`, which wants a quiet machine, and is skipped, with the
reason, where neither root nor user namespaces allow it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import tasp_core as tasp
from tasp_core.errors import FabricError, TopologyError
from tasp_core.lab.bench.accuracy import Inputs, Reference
from tasp_core.lab.bench.calibrate import Bench, calibrate, network, processor
from tasp_core.lab.bench.emulated import run_case
from tasp_core.lab.bench.emulated_cases import FULL, Case
from tasp_core.lab.bench.passes import Pass, in_turn, method_errors, slowest
from tasp_core.lab.emulation import network as fabric
from tasp_core.lab.emulation.network import Fabric
from tasp_core.lab.emulation.wiring import emulated, wiring
from tasp_core.machines.machine import Machine
from tasp_core.runtime.launch import RankError

REASON = fabric.missing()


def built(test):
    """A test on real namespaces."""
    return pytest.mark.fabric(pytest.mark.skipif(bool(REASON), reason=REASON)(test))


SWITCH = Machine("switch", 3, port_gbps=0.0025)  # 20 Mbit/s
MESH = emulated(tasp.machine("mesh4"), link_mbit=20.0)


def command(*arguments, **options):
    words = [sys.executable, "-m", "tasp_core", "fabric", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **options)


def rows(docs, heads=2, dim=32):
    return Inputs.random(docs.total, heads, heads, dim)


# ---- wires


def test_a_mesh_is_one_wire_a_pair_and_a_switch_one_a_rank():
    mesh, switch = wiring(MESH), wiring(SWITCH)
    assert len(mesh.wires) == 6
    assert not mesh.hubs
    assert [(w.a, w.b, round(w.out_mbit)) for w in switch.wires] == [
        (r, "port", 20) for r in range(3)
    ]


def test_nodes_join_meshes_by_one_nic_a_rank():
    nodes = wiring(emulated(tasp.machine("mesh4x2"), link_mbit=64.3))
    assert nodes.hubs == ("nic",)
    assert sum(w.b == "nic" for w in nodes.wires) == 8
    assert {round(w.in_mbit, 6) for w in nodes.wires if w.b == "nic"} == {50.0}
    assert nodes.via[1] == {0: "to0", 2: "to2", 3: "to3", **dict.fromkeys(range(4, 8), "nic")}


def test_a_slow_link_is_slow_in_its_direction_alone():
    slow = wiring(MESH.degraded({"link 0>1": 0.001})).wires[0]
    assert (round(slow.out_mbit), round(slow.in_mbit)) == (8, 20)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mesh1", "2 to 250 ranks"),
        ("mesh300", "2 to 250 ranks"),
        ("a100_pcie", "0>4 over host_out 0, bus socket_out 0, host_in 4"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(name, said):
    with pytest.raises(TopologyError, match=said):
        wiring(emulated(tasp.machine(name), link_mbit=10.0))


@pytest.mark.parametrize("rate", [0.0, -5.0, float("nan"), float("inf")])
def test_rates_are_positive(rate):
    with pytest.raises(TopologyError, match="link_mbit"):
        emulated(tasp.machine("mesh4"), link_mbit=rate)


def test_scaling_keeps_every_ratio_and_drops_kernels():
    slow = emulated(tasp.machine("h100x2").degraded({"nic_out 3": 25.0}), link_mbit=450.0)
    assert slow.port_gbps / slow.nic_gbps == pytest.approx(9.0)
    assert slow.capacity_gbps("nic_out 3") / slow.nic_gbps == pytest.approx(0.5)
    assert slow.tflops == 0.0


# ---- without rights or tools


@pytest.mark.parametrize("words", [["run", "true"], ["bench"], ["up"]])
def test_without_tools_one_sentence_and_exit_2(words, tmp_path):
    done = command(*words, env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "needs Linux with ip, tc, unshare, sh" in done.stderr


# ---- inside


def _attend(rank, group, plans, inputs, reference):
    passes = [Pass(p, rank, group, inputs, lambda: dist.barrier(group=group)) for p in plans]
    errors = method_errors(passes, reference)
    return errors, in_turn(passes, modes=("communication",), backward=False, repeats=3)


@pytest.fixture(scope="module")
def mesh():
    docs = tasp.Documents.of([2560])
    inputs, plans = rows(docs), [tasp.plan(docs, 4, schedule=s) for s in ("ring", "tasp")]
    with Fabric(MESH) as net:
        return net.launch(_attend, plans, inputs, Reference(inputs, docs), timeout_s=60.0)


@built
def test_attention_inside_is_the_oracle(mesh):
    for errors, _ in mesh:
        assert [e.ok for e in errors] == [True, True]


@built
def test_links_are_limited_and_many_rings_use_them_all(mesh):
    ring, many = (
        min(slowest([samples[i] for _, samples in mesh])["communication forward"]) for i in (0, 1)
    )
    kv_s = 640 * 2 * 2 * 32 * 4 / (MESH.link_gbps * 1e9)  # 0.131 s: one rank's keys over one link
    assert ring > 0.8 * 3 * kv_s  # a bucket may hold 0.05 s
    assert many > 0.5 * kv_s
    assert ring > 2 * many


@built
def test_devices_beside_links_take_what_the_simulator_says():
    one = Case("devices", "mesh4", 20.0, (1024,), FULL, False, 4, repeats=3).with_ccr(0.3)
    ring, many = run_case(one, {})["methods"]
    for row in (ring, many):
        assert row["errors"]["ok"]
        for mode in ("communication", "computation", "whole"):
            said, found = row["predicted"][f"{mode} forward"], row["samples"][f"{mode} forward"]
            assert min(found) == pytest.approx(said, rel=0.2), (row["label"], mode)
    assert min(ring["samples"]["whole forward"]) > 2 * min(many["samples"]["whole forward"])


def _measure(rank, group, node_size):
    return network(Bench(group, torch.device("cpu"), repeats=1), node_size)


@built
def test_calibration_tells_ports_from_links():
    with Fabric(SWITCH) as net:
        found = net.launch(_measure, 3, timeout_s=60.0)[0]
    assert "link_gbps" not in found
    assert found["port_gbps"] == pytest.approx(SWITCH.port_gbps, rel=0.15)


@built
def test_calibration_finds_links_nics_and_the_slow_one():
    on = emulated(tasp.machine("mesh2x2"), link_mbit=40.0).degraded({"link 2>3": 0.002})
    with Fabric(on) as net:
        found = net.launch(_measure, 2, timeout_s=60.0)[0]
    assert found["link_gbps"] == pytest.approx(0.005, rel=0.15)
    assert found["nic_gbps"] == pytest.approx(on.nic_gbps, rel=0.15)
    assert found["overrides"].keys() == {"link 2>3"}
    assert found["overrides"]["link 2>3"] == pytest.approx(0.002, rel=0.15)


def test_a_calibrated_machine_is_a_machine_file(tmp_path):
    def measured(rank, group):
        return calibrate(group, repeats=1, lengths=(64, 128))

    on, samples = tasp.launch(measured, 2, timeout_s=60.0)[0]
    (tmp_path / "m.json").write_text(on.to_json())
    assert tasp.machine(tmp_path / "m.json") == on
    assert min(on.tflops, on.backward_tflops, on.link_gbps) > 0
    assert all(min(values) > 0 for values in samples.values())
    with pytest.raises(RankError, match="nodes of 2"):
        tasp.launch(lambda rank, group: calibrate(group, node_size=2), 3)


def test_messages_cost_what_ranks_compute_with_where_they_share_cores():
    def measured(rank, group, cores):
        os.sched_getaffinity = lambda _: set(range(cores))
        bench = Bench(group, torch.device("cpu"), repeats=1)
        return processor(bench, 0.05), len(bench.samples)

    shared, samples = tasp.launch(measured, 4, 2, timeout_s=60.0)[0]
    assert shared["ranks_a_core"] == 2.0
    assert 1e-6 < shared["message_cpu_s"] < 0.1
    assert samples == 2
    assert tasp.launch(measured, 4, 5, timeout_s=60.0)[0] == ({}, 0)  # a core for messages is left


def _long_and_short(rank, group):
    """Rank 0 sends a long message to rank 2, then a short one to rank 3; when each has arrived."""
    rows = {0: 1 << 20, 2: 1 << 20, 3: 1 << 16}.get(rank, 0)
    data = torch.empty(rows, dtype=torch.uint8)
    work = dist.irecv(data, 0, group=group) if rank > 1 else None
    dist.barrier(group=group)
    start = time.perf_counter()
    works = [work] if work else []
    for n, to in ((1 << 20, 2), (1 << 16, 3)) if rank == 0 else ():
        works.append(dist.isend(data[:n], to, group=group))
    for one in works:
        one.wait()
    return time.perf_counter() - start


@built
def test_at_a_nic_a_short_message_does_not_wait_for_a_long_one():
    with Fabric(emulated(tasp.machine("mesh2x2"), link_mbit=64.0)) as net:
        _, _, long, short = net.launch(_long_and_short, timeout_s=60.0)
    assert short < 0.4 * long  # in one queue it would take as long


# ---- nothing is left


def _wires():
    return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout


@built
def test_up_and_down_by_name():
    if os.getuid() or fabric.named():
        pytest.skip("naming namespaces needs root, and nobody else's fabric")
    done = command("up", "--machine", "mesh3")
    assert done.returncode == 0, done.stderr
    try:
        assert len(fabric.named()) == 3
        assert command("up", "--machine", "mesh2").returncode == 0  # replaces it
        assert len(fabric.named()) == 2
    finally:
        assert command("down").returncode == 0
    assert fabric.named() == []


@built
def test_run_starts_the_command_once_a_rank_and_reports_failure():
    good = command("run", "--machine", "mesh3", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert sorted(good.stdout.split("\n")) == ["", "rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    bad = command(
        "run", "--machine", "mesh2", "--json", "sh", "-c", "test $RANK = 0 || exec sleep 60; exit 3"
    )
    assert (bad.returncode, bad.stdout) == (1, '{"exit_codes": [3, -9]}\n')


@built
def test_killed_it_leaves_no_wire_and_no_process():
    before = _wires()
    words = [sys.executable, "-m", "tasp_core", "fabric", "run", "--machine", "mesh3"]
    with subprocess.Popen(
        [*words, "sh", "-c", "echo $$; exec sleep 300"], stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        inside = [int(run.stdout.readline()) for _ in range(3)]
        os.kill(run.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in inside) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in inside if os.path.exists(f"/proc/{pid}")]
    assert _wires() == before


@built
def test_a_build_that_fails_half_way_says_why_and_is_undone(monkeypatch):
    monkeypatch.setattr(fabric, "shape", lambda name, *_: [f"qdisc add dev {name} root nonsense"])
    before = _wires()
    with pytest.raises(FabricError, match="qdisc kind is unknown"), Fabric(MESH):
        pass
    assert _wires() == before
