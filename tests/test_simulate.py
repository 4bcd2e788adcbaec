"""Simulate: hand-computed cases, the figures of THEORY, and what must hold for every plan."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tasp_core import (
    Documents,
    Machine,
    check,
    cut_bound,
    machine,
    plan,
    schedules,
    simulate,
    supports,
)
from tasp_core.costs.traffic import Traffic, charge

QUICK = {"latency_s": 0.0, "message_s": 0.0, "tflops": 0.0}


def full(tokens, ranks, schedule, where, **options):
    """A full-mask plan on contiguous equal shards: one message a hop, every share needed."""
    docs = Documents.of([tokens * ranks], causal=False)
    return plan(docs, ranks, schedule=schedule, layout="contiguous", machine=where, **options)


def run(p, where=None, **options):
    return simulate(p, where, **{"heads": 1, "head_dim": 128, "dtype": "bfloat16", **options})


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_ring_and_tasp_on_a_mesh(n):
    """n - 1 steps of KV over one link against n - 1 steps of KV / (n - 1); latency comes on top."""
    where = replace(machine(f"mesh{n}"), **QUICK, link_gbps=2.0) if n > 1 else None
    where = replace(where, latency_s=3e-6)
    tokens = 1680 * (n - 1)
    kv = tokens * 512
    ring = run(full(tokens, n, "ring", where))
    tasp = run(full(tokens, n, "tasp", where))
    assert ring.comm_s == pytest.approx((n - 1) * (kv / 2e9 + 3e-6), rel=1e-12)
    assert tasp.comm_s == pytest.approx(kv / 2e9 + (n - 1) * 3e-6, rel=1e-12)
    assert tasp.bound_s == pytest.approx(kv / 2e9, rel=1e-12)
    assert ring.total_s == ring.comm_s
    assert ring.compute_s == 0.0
    assert ring.link_bytes == {f"link {r}>{(r + 1) % n}": (n - 1) * kv for r in range(n)}
    assert set(tasp.link_bytes.values()) == {float(kv)}
    assert len(tasp.link_bytes) == n * (n - 1)
    back = run(full(tokens, n, "ring", where), backward=True)
    # kv in steps 0 .. n-2, gradients of float32, twice the bytes, in steps 2 .. n: overlapping
    steps = [(t < n - 1) + 2 * (t >= 2) for t in range(n + 1)]
    expected = sum(x * kv / 2e9 + 3e-6 * (x > 0) for x in steps)
    assert back.comm_s == pytest.approx(expected, rel=1e-12)


def test_message_cost_is_paid_by_the_busier_end():
    where = replace(machine("mesh4"), **QUICK)
    where = replace(where, message_s=1e-3, link_gbps=1e6)
    zigzag = plan([1 << 18], 4, schedule="ring", machine=where)  # a share has two parts
    assert run(zigzag).comm_s == pytest.approx(3 * 4e-3, rel=1e-2)  # two sent, two received
    small = plan([4096], 4, schedule="ring", machine=where)  # small ones travel as one
    assert run(small).comm_s == pytest.approx(3 * 2e-3, rel=1e-3)
    packed = plan([4096], 4, machine=where, schedule_options={"exchange": "all_to_all"})
    assert run(packed).comm_s == pytest.approx(3 * 6e-3, rel=1e-3)  # one to and from each peer
    assert run(full(64, 4, "ring", where)).comm_s == pytest.approx(3 * 2e-3, rel=1e-3)


def test_messages_take_of_the_processor_that_computes():
    """Ring: two messages' ends and two shares' bytes a step, beside its computing and its link."""
    tokens, kv = 1024, 1024 * 512
    where = replace(machine("mesh4"), **QUICK, link_gbps=1e6)
    host = replace(where, message_cpu_s=1e-3, copy_gbps=2.0)
    each = 2e-3 + 2 * kv / 2e9
    alone = run(full(tokens, 4, "ring", host))
    assert (alone.comm_s, alone.compute_s) == (pytest.approx(3 * each, rel=1e-3), 0)
    rates = {"tflops": 1.0, "kernel_s": 0.0, "memory_gbps": 0.0}
    t = run(full(tokens, 4, "ring", replace(host, **rates)))
    assert t.total_s == pytest.approx(3 * each + t.compute_s, rel=1e-3)
    assert t.compute_s == run(full(tokens, 4, "ring", replace(where, **rates))).compute_s > 0
    slow = replace(host, link_gbps=kv / 1e9, **rates)  # 1 s a step: the processor waits
    last = t.compute_s / 4  # of what has come in the last step
    assert run(full(tokens, 4, "ring", slow)).total_s == pytest.approx(3 + last, rel=1e-6)


def test_a_token_bucket_forgives_what_a_resource_has_saved_up():
    """Rank 0 sends 2 MB, then rank 1 sends 1 MB, of which its link has saved up 0.5."""
    where = replace(machine("mesh3"), **QUICK, link_gbps=1.0, burst_bytes=5e5)
    steps = np.array([0, 1])
    traffic = Traffic(steps, np.array([0, 1]), np.array([1, 2]), np.array([2e6, 1e6]), steps + 1)
    assert charge(where, traffic).seconds.tolist() == pytest.approx([2e-3, 0.5e-3])
    assert charge(replace(where, burst_bytes=0.0), traffic).seconds.tolist() == [2e-3, 1e-3]
    same = traffic._replace(src=np.zeros(2, dtype=int), dst=np.ones(2, dtype=int))  # no pause
    assert charge(where, same).seconds.tolist() == pytest.approx([2e-3, 1e-3])


def test_of_ranks_that_share_cores_the_busy_get_what_the_idle_leave():
    own = Machine("m", 4, link_gbps=1e6, latency_s=0.0, tflops=1e-3)
    p = plan([4000], 4, schedule="all_gather", layout="contiguous", machine=own)  # work 1, 3, 5, 7
    alone = run(p).compute_s
    shared = run(p, replace(own, ranks_a_core=4.0)).compute_s
    assert shared == pytest.approx(alone * 4 / 7, rel=1e-2)  # all cores stay busy to the end
    threads = run(p, replace(own, ranks_a_core=0.25)).compute_s  # each rank has several cores
    assert threads == pytest.approx(alone)
    few = run(p, replace(own, ranks_a_core=1.25)).compute_s
    assert few == pytest.approx(alone * (0.5 + 3 / 1.25) / 3.5, rel=1e-2)  # one core at most


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
    """The table of THEORY 3.3 within 1 %."""
    where = replace(machine(name), **QUICK)
    cases = {"ring": ring, "tasp": flat, "wave": best}
    cases |= {"tasp_paths": paths, "tasp_rails": paths} if paths else {}
    for schedule, share in cases.items():
        found = run(full(20160, where.ranks, schedule, where))
        assert found.bound_s == pytest.approx(cut_bound(where, 20160 * 512), rel=1e-12)
        assert found.bound_s / found.comm_s == pytest.approx(share, rel=0.01), schedule
    options = {"schedule_options": {"twins": 0}}
    found = run(full(20160, where.ranks, "wave", where, **options))
    assert found.bound_s / found.comm_s == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize(("name", "share"), [("8x2", 0.929), ("8x4", 0.93), ("4x2", 0.857)])
def test_backward_wave_and_its_bound(name, share):
    """THEORY 3.5: float32 gradients, g = 2 (n - 1): .929-.976; half as many blocks lose some."""
    where = replace(machine(f"mesh{name}"), **QUICK)
    plain = full(40320, where.ranks, "wave", where, schedule_options={"twins": 0})
    found = run(plain, backward=True)
    assert found.bound_s == pytest.approx(3 * cut_bound(where, 40320 * 512), rel=1e-12)
    assert found.bound_s / found.comm_s == pytest.approx(share, abs=0.01)
    many = {"blocks": 2 * (where.ranks - 1)}
    better = run(full(40320, where.ranks, "wave", where, schedule_options=many), backward=True)
    assert 0.925 < better.bound_s / better.comm_s < 0.98


@pytest.mark.parametrize(
    ("schedule", "blocks", "ms"),
    [("wave", 15, 0.190), ("wave", 1, 0.054), ("tasp_paths", 0, 0.188)],
)
def test_small_kv_is_ruled_by_steps(schedule, blocks, ms):
    """THEORY 3.4: 1 MB a rank on 8x2, 10 us a step."""
    where = replace(machine("mesh8x2"), tflops=0.0)
    options = {"schedule_options": {"blocks": blocks}} if blocks else {}
    found = run(full(1953, 16, schedule, where, **options))
    assert found.comm_s * 1e3 == pytest.approx(ms, rel=0.02)


def test_the_emulated_two_by_four():
    """THEORY 3.8's limits: 64 Mbit/s inside, 50 Mbit/s NICs, 2 MB of KV; a floor of what was measured."""
    where = Machine("2x4", 4, 2, link_gbps=0.008, nic_gbps=0.00625, latency_s=0.0)
    assert cut_bound(where, 2e6) == pytest.approx(0.463, abs=0.001)
    measured = {"ring": 2.285, "tasp": 2.119, "tasp_paths": 0.873, "wave": 0.765}
    for schedule, seconds in measured.items():
        found = run(full(3906, 8, schedule, where)).comm_s
        assert 0.55 * seconds < found < 1.1 * seconds, schedule


def test_computing_hides_behind_communication_and_the_other_way_round():
    """Ring, full mask: total = own step + n - 1 steps of the slower of the two, then the last one."""
    n, tokens, flops = 4, 1000, 4 * 1000 * 1000 * 128
    where = Machine("m", n, link_gbps=1.0, latency_s=0.0, tflops=2.0)
    compute, comm = flops / 2e12, tokens * 512 / 1e9
    assert comm > compute
    found = run(full(tokens, n, "ring", where))
    assert found.compute_s == pytest.approx(n * compute)
    assert found.total_s == pytest.approx(3 * comm + compute)
    slow = run(full(tokens, n, "ring", replace(where, tflops=0.2)))
    assert slow.total_s == pytest.approx(n * 10 * compute)
    assert slow.comm_s == found.comm_s
    assert slow.idle == pytest.approx(0, abs=1e-12)
    serial = run(full(tokens, n, "ring", where), overlap=False)
    assert serial.total_s == pytest.approx(3 * comm + n * compute)
    back = run(full(tokens, n, "ring", replace(where, backward_tflops=0.5)), backward=True)
    assert back.compute_s == pytest.approx(n * 2.5 * compute * 4)
    causal = run(plan([n * tokens], n, schedule="ring", machine=where))
    assert causal.compute_s == pytest.approx(n * compute / 2, rel=0.01)


def test_kernel_calls_and_memory_cost_time():
    where = Machine("m", 2, link_gbps=1e6, latency_s=0.0, tflops=1e9, kernel_s=1.0)
    assert run(plan([64], 2, schedule="ring", machine=where)).compute_s == pytest.approx(3.0)
    slow = replace(where, kernel_s=0.0, memory_gbps=1.0)
    nbytes = 32 * 4 + 32 * 14  # the second step's part is merged with the first's
    assert run(full(32, 2, "ring", slow)).compute_s == pytest.approx(nbytes * 128 / 1e9, rel=1e-3)


def test_a_rank_waits_only_for_its_own_messages():
    """Contiguous causal ranks have unequal work; the lightest one is not held up by the heaviest."""
    where = Machine("m", 4, link_gbps=1e6, latency_s=0.0, tflops=1.0)
    found = run(plan([4000], 4, schedule="all_gather", layout="contiguous", machine=where))
    ends = found.compute[:, -1, 1]
    assert (np.diff(ends) > 0).all()
    assert found.compute.shape == found.comm.shape == (4, found.steps, 2)
    assert found.idle > 0.3


@pytest.mark.parametrize(
    ("kind", "seconds"), [("ring", 3 * 512e-6 + 3e-5), ("direct", 512e-6 + 1e-5)]
)
def test_all_gather_is_a_ring_or_direct(kind, seconds):
    """THEORY 2.6: Gloo's walks a ring, so it takes what Ring takes."""
    where = Machine("m", 4, link_gbps=1.0, all_gather=kind)
    found = run(full(1000, 4, "all_gather", where))
    assert found.comm_s == pytest.approx(seconds)
    assert sum(found.link_bytes.values()) == pytest.approx(12 * 512e3)


def test_all_gather_over_nodes_crosses_once():
    where = Machine("m", 4, 2, port_gbps=100.0, nic_gbps=1.0, all_gather="direct", latency_s=0.0)
    found = run(full(1000, 8, "all_gather", where))
    assert found.comm_s == pytest.approx(512e-6) == pytest.approx(found.bound_s)


def test_ulysses_moves_heads_inside_groups():
    """Forward: q, k, v and out of every token, (a - 1) / a of them to others (THEORY 5.6)."""
    where = Machine("m", 4, link_gbps=1.0, latency_s=0.0)
    p = full(1000, 4, "ring", where, intra=4)
    found = run(p, where, heads=8)
    each = 1000 * (8 // 4) * 128 * 2  # to each peer, of q, k, v or out
    lse = 1000 * 2 * 4
    assert found.total_s == pytest.approx((4 * each + lse) / 1e9)
    assert sum(found.link_bytes.values()) == pytest.approx(12 * (4 * each + lse))
    back = run(p, heads=8, backward=True)  # dout; dq, dk, dv
    assert back.total_s == pytest.approx(4 * each / 1e9)
    assert found.bound_s is None
    few = run(p, where, heads=8, kv_heads=2)  # a kv head goes to two members
    assert few.total_s == pytest.approx((2 * each + each + lse) / 1e9)
    two = full(1000, 4, "ring", where, intra=2)
    assert run(two, heads=8).comm_s == pytest.approx(
        (4 * 2 * each + 2 * lse + 2000 * 4 * 512) / 1e9
    )


PACKED = Documents.of([300, 20, 1200, 5, 5, 700, 64, 900])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["mesh4", "mesh4x2", "h100x2", "a100_pcie"])
def test_what_must_hold_for_every_plan(name, backward):
    where = machine(name)
    checked = 0
    for schedule, layout in itertools.product(schedules(), ("contiguous", "zigzag", "balanced")):
        options = {"schedule": schedule, "layout": layout, "machine": where}
        if not supports(PACKED, where.ranks, **options):
            continue
        p = plan(PACKED, where.ranks, **options)
        found = run(p, heads=4, backward=backward)
        assert (found.bound_s or 0.0) <= found.comm_s * (1 + 1e-9)  # none where queries move
        low = max(found.comm_s, found.compute_s)
        assert low * (1 - 1e-9) <= found.total_s <= found.comm_s + found.compute_s
        assert (np.diff(found.compute, axis=2) >= 0).all()
        assert (found.compute[:, 1:, 0] >= found.compute[:, :-1, 1] - 1e-15).all()
        if not backward and not p.schedule.collective:
            flops = check(p).work * 4 * 4 * 128 / (where.tflops * 1e12)
            spent = np.diff(found.compute, axis=2)[..., 0]
            assert (spent >= flops - 1e-12).all()
            if not p.docs.total % 4:
                sent = check(p).tokens_sent.sum() * 512 * 4
                ends = [x for x in found.link_bytes.items() if "out" in x[0] or "link" in x[0]]
                assert sum(v for k, v in ends if not k.startswith("bus")) == pytest.approx(sent)
        checked += 1
    assert checked > 8


def test_sap_moves_what_is_needed_and_its_bound_knows():
    where = replace(machine("mesh4"), **QUICK)
    tasp, sap = (
        run(plan(PACKED, 4, schedule=s, layout="balanced", machine=where)) for s in ("tasp", "sap")
    )
    assert sum(sap.link_bytes.values()) < 0.5 * sum(tasp.link_bytes.values())
    assert sap.bound_s < cut_bound(where, PACKED.total / 4 * 512)
    assert sap.bound_s <= sap.comm_s


def test_a_slow_nic_and_a_dead_link_are_felt():
    where = machine("mesh4x2")
    p = full(4096, 8, "wave", where)
    slow = run(p, where.degraded({"nic_out 0": 5.0}))
    assert slow.comm_s > 3 * run(p).comm_s
    assert slow.link_bytes == run(p).link_bytes
    dead = run(p, where.degraded({"link 0>1": 0}))
    assert "link 0>1" not in dead.link_bytes
    assert dead.comm_s > run(p).comm_s
