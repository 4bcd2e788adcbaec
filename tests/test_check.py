"""Proofs: right plans pass, and at least two wrong ones for each property are refused by name."""

import itertools
import re
from dataclasses import dataclass

import numpy as np
import pytest

import tasp_core as tasp
from tasp_core import Documents, PlanError, check, plan
from tasp_core.schedules import KV, DeclaredLimits, Hops, Table

LOOSE = DeclaredLimits(99, 99, 99.0)


def words_of(made):
    return made.hops(backward=True).lines()


def swap(words, *changes):
    """The words with some replaced (old, new), dropped (old, None) or added (None, new)."""
    words = list(words)
    for old, new in changes:
        if old is not None:
            words.remove(old)  # the test is wrong if it is not there
        if new is not None:
            words.append(new)
    return words


def refused(wrong, *reasons, step=None):
    """The message of a refused plan; it carries the plan's table, with the step at fault marked."""
    with pytest.raises(PlanError) as caught:
        check(wrong)
    what, *table = str(caught.value).splitlines()
    for reason in reasons:
        assert reason in what
    assert wrong.summary() in table
    assert any(line.startswith("step") and "into 0" in line for line in table)
    marked = [line for line in table if "<--" in line]
    assert [line.split()[:2] for line in marked] == ([] if step is None else [[f"{step}", "<--"]])
    return what


def ring4(total=40, **options):
    return plan([total], 4, schedule="ring", **options)


def changed(made, *changes, limits=None, **options):
    return made.with_hops(swap(words_of(made), *changes), limits=limits, **options)


@pytest.mark.parametrize(
    ("bad", "step"),
    [
        ("t0 0>9 kv0.0", 0),
        ("t1 7>1 kv3.0", 1),
        ("t2 1>2 kv4.0", 2),
        ("t0 0>2 kv0.5", 0),
        ("t1 2>2 kv1.0", 1),
        ("t3 0>4 dkv1.0", 3),
        ("t2 3>0 dkv3.1", 2),
    ],
)
def test_names(bad, step):
    refused(changed(ring4(), (None, bad)), "outside 0..3", "outside 0..0", f"at {bad}", step=step)


@pytest.mark.parametrize(
    ("changes", "reason", "bad", "step"),
    [
        # rank 0 gets rank 3's keys in step 0 and may not pass them on in step 0
        ([("t1 0>1 kv3.0", "t0 0>1 kv3.0")], "does not hold yet", "t0 0>1 kv3.0", 0),
        # rank 2 never gets rank 0's keys
        ([("t1 1>2 kv0.0", None)], "does not hold yet", "t2 2>3 kv0.0", 2),
        ([("t2 2>3 kv0.0", "t0 2>3 kv0.0")], "does not hold yet", "t0 2>3 kv0.0", 0),
        ([(None, "t2 0>1 kv0.0")], "arrives twice", "t2 0>1 kv0.0", 2),
        ([(None, "t1 2>0 kv3.0")], "arrives twice", "t1 2>0 kv3.0", 1),
        ([(None, "t1 1>0 kv0.0")], "sent its own share", "t1 1>0 kv0.0", 1),
        ([(None, "t2 2>1 kv1.0")], "sent its own share", "t2 2>1 kv1.0", 2),
    ],
)
def test_holding(changes, reason, bad, step):
    refused(changed(ring4(), *changes, limits=LOOSE), reason, f"at {bad}", step=step)


@dataclass(frozen=True)
class Forked(Table):
    """A table whose backward pass moves keys by a table of its own."""

    other: tuple[str, ...] = ()

    def hops(self, rank=None, *, backward=False):
        return Hops.parse(self.other).ordered() if backward else super().hops(rank)


@pytest.mark.parametrize("lost", ["t2 2>3 kv0.0", "t0 0>1 kv0.0"])
def test_holding_of_the_backward_pass(lost):
    made = ring4()
    words = words_of(made)
    other = tuple(swap(words, (lost, None)))
    schedule = Forked(4, 4, lines=tuple(words), claim=LOOSE, other=other)
    wrong = tasp.Plan(made.docs, made.layout, schedule, made.machine)
    refused(wrong, "the backward table moves kv or q by other hops")


@pytest.mark.parametrize(
    ("lost", "rank", "owner"),
    [("t2 2>3 kv0.0", 3, 0), ("t2 3>0 kv1.0", 0, 1), ("t2 0>1 kv2.0", 1, 2)],
)
def test_coverage(lost, rank, owner):
    """Zigzag on one document: every rank needs keys of every other."""
    reason = f"rank {rank} needs share 0 of rank {owner}'s KV and never receives it"
    refused(changed(ring4(), (lost, None)), reason, "visible pairs are not computed")


def test_coverage_counts_what_is_lost():
    made = plan(Documents.of([8], causal=False), 2, schedule="ring", layout="contiguous")
    what = refused(made.with_hops(["t0 0>1 kv0.0", "t2 1>0 dkv0.0"]), "rank 0", "rank 1's KV")
    assert ": 16 visible pairs are not computed" in what
    refused(made.with_hops([]), "rank 0 needs share 0 of rank 1's KV")


def test_coverage_lets_unneeded_keys_stay_at_home():
    """Causal and contiguous: rank 0 needs no keys; two documents: no rank needs any."""
    one = plan([8], 2, schedule="ring", layout="contiguous")
    assert check(one.with_hops(["t0 0>1 kv0.0", "t2 1>0 dkv0.0"])).pairs == 36
    two = plan([4, 4], 2, schedule="ring", layout="contiguous")
    report = check(two.with_hops([]))
    assert (report.pairs, report.messages, report.peak_shards) == (20, 0, 0.0)


def exchange(n, *late):
    """Every rank sends its keys to every other at step 0; pairs in `late` one step later."""
    pairs = list(itertools.permutations(range(n), 2))
    kv = [f"t{int(pair in late)} {pair[0]}>{pair[1]} kv{pair[0]}.0" for pair in pairs]
    return kv + [f"t3 {b}>{a} dkv{a}.0" for a, b in pairs]


def two_blocks(old, new):
    made = plan([48], 4, schedule="wave", schedule_options={"blocks": 2})
    return changed(made, (old, new), limits=DeclaredLimits(1, 0, 9.0))


def late_relay(limits):
    """Ring of 4 whose rank 1 passes rank 0's keys on a step late."""
    late = [("t1 1>2 kv0.0", "t2 1>2 kv0.0"), ("t2 2>3 kv0.0", "t3 2>3 kv0.0")]
    return changed(ring4(), *late, limits=limits)


def nodes_of_two(*late):
    made = plan([64], 4, schedule="wave", machine="mesh2x2")
    return made.with_hops(exchange(4, *late), num_shares=1, limits=DeclaredLimits(1, 1, 9.0))


OVERLOADED = [
    (two_blocks("t1 0>1 kv0.1", "t0 0>1 kv0.1"), "link 0>1", 0, "0>1"),
    (two_blocks("t0 2>3 kv2.0", "t1 2>3 kv2.0"), "link 2>3", 1, "2>3"),
    (late_relay(DeclaredLimits(1, 1, 9.0)), "link 1>2", 2, "1>2"),
    (nodes_of_two(), "NIC out 0", 0, r"0>[23]"),
    (nodes_of_two((0, 3), (1, 2), (2, 0), (2, 1), (3, 0)), "NIC out 2", 1, r"2>[01]"),
    (nodes_of_two((0, 2), (1, 2), (2, 0), (3, 0)), "NIC in 1", 0, r"[23]>1"),
]


@pytest.mark.parametrize(("wrong", "what", "step", "link"), OVERLOADED)
def test_links(wrong, what, step, link):
    refused(wrong, f"{what} carries 2 shares in step {step}, 1 are declared", step=step)


@pytest.mark.parametrize(("wrong", "what", "step", "link"), OVERLOADED)
def test_links_name_a_hop_of_the_link_at_fault(wrong, what, step, link):
    assert re.search(rf" at t{step} {link} kv", refused(wrong, what, step=step))


HOARDING = [
    (late_relay(DeclaredLimits(9, 9, 2.0)), "rank 1 holds 3", 2, "2", 1),
    (
        plan([48], 4).with_hops(exchange(4), num_shares=1, limits=DeclaredLimits(9, 9, 2.0)),
        "rank 0 holds 3",
        0,
        "2",
        0,
    ),
    (
        changed(
            plan([48], 4, schedule="wave"),
            ("t2 0>1 kv0.2", "t1 0>1 kv0.2"),
            limits=DeclaredLimits(9, 9, 2.0),
        ),
        "rank 1 holds 2.33",
        1,
        "2",
        1,
    ),
]


@pytest.mark.parametrize(("wrong", "what", "step", "most", "rank"), HOARDING)
def test_memory(wrong, what, step, most, rank):
    reason = f"{what} travelling KV in step {step}, {most} are declared"
    refused(wrong, reason, step=step)


@pytest.mark.parametrize(("wrong", "what", "step", "most", "rank"), HOARDING)
def test_memory_names_a_hop_into_the_rank_at_fault(wrong, what, step, most, rank):
    assert re.search(rf" at t{step} \d>{rank} kv", refused(wrong, what, step=step))


@pytest.mark.parametrize(
    ("change", "reason", "step"),
    [
        (("t4 3>0 dkv0.0", None), "stops before its owner at t3 2>3 dkv0.0", 3),
        (("t4 1>2 dkv2.0", None), "stops before its owner at t3 0>1 dkv2.0", 3),
        (("t2 1>2 dkv0.0", None), "rank 1 never sends its part of dkv0.0 home", None),
        (("t2 0>1 dkv3.0", None), "rank 0 never sends its part of dkv3.0 home", None),
        (("t2 1>2 dkv0.0", "t1 1>2 dkv0.0"), "before it is computed at t1 1>2 dkv0.0", 1),
        (("t4 3>0 dkv0.0", "t3 3>0 dkv0.0"), "before it is computed at t3 3>0 dkv0.0", 3),
        ((None, "t5 1>0 dkv0.0"), "leaves a rank twice at t5 1>0 dkv0.0", 5),
        ((None, "t3 3>2 dkv2.0"), "leaves a rank twice at t3 3>2 dkv2.0", 3),
        ((None, "t5 0>1 dkv0.0"), "owner sends its own gradient away at t5 0>1 dkv0.0", 5),
        ((None, "t4 2>3 dkv2.0"), "owner sends its own gradient away at t4 2>3 dkv2.0", 4),
        (("t2 1>2 dkv0.0", "t5 1>2 dkv0.0"), "after its sum has left at t5 1>2 dkv0.0", 5),
        (("t3 0>1 dkv2.0", "t4 0>1 dkv2.0"), "after its sum has left at t4 0>1 dkv2.0", 4),
    ],
)
def test_gradients(change, reason, step):
    refused(changed(ring4(), change), reason, step=step)


ROWS = [Documents.of(x) for x in ([], [0], [1], [0, 1, 0, 1], [1] * 9, [137, 0, 41, 8], [64])]
ROWS.append(Documents.of([64, 0, 7], causal=False))


@pytest.mark.parametrize("layout", sorted(tasp.layouts()))
@pytest.mark.parametrize(
    "where", ["mesh1", "mesh2", "mesh3", "mesh6", "mesh2x2", "mesh4x2", "mesh1x3"]
)
@pytest.mark.parametrize("schedule", sorted(tasp.schedules()))
def test_right_plans_pass(schedule, where, layout):
    machine = tasp.machine(where)
    if not tasp.supports([8], machine.ranks, schedule=schedule, machine=machine):
        assert schedule in ("tasp_paths", "tasp_rails", "paced")
        assert machine.num_nodes == 1 or machine.node_size == 1
        return
    for docs in ROWS:
        made = plan(docs, machine.ranks, schedule=schedule, layout=layout, machine=machine)
        report = check(made)
        assert report.pairs == docs.num_pairs == report.work.sum()
        assert report.work.shape == (machine.ranks, made.schedule.num_steps() + 1)
        assert report.peak_shards <= made.schedule.limits.buffer + 1e-9
        trips = 2 if len(made.schedule.offloaded.step) else 1  # out comes home
        everything = docs.total * (machine.ranks - 1) * trips
        moved = report.tokens_sent.sum()
        assert moved <= everything if made.schedule.variable_size else moved == everything
    assert (check(made.with_hops(words_of(made))).work == report.work).all()


def test_the_report_of_a_small_plan():
    report = check(plan([4], 2, schedule="ring", layout="contiguous"))
    assert report.work.tolist() == [[3, 0], [3, 4]]
    assert report.tokens_sent.tolist() == [2, 2]
    assert (report.max_load, report.min_load, report.busy, report.messages) == (1, 1, 1.0, 2)
    assert (report.max_nic, report.peak_shards, report.pairs) == (0, 1.0, 10)
    assert report.balance == pytest.approx(7 / 5)
    assert report.step_balance == 2.0
    for line in ("coverage   proved: 10 visible pairs", "work       max/mean 1.4000 over ranks"):
        assert line in str(report)


def test_the_busiest_link():
    made = ring4()
    extra = [("t2 1>2 kv3.0", "t2 0>2 kv3.0"), ("t2 0>1 kv2.0", "t2 3>1 kv2.0")]
    report = check(changed(made, *extra, limits=LOOSE))
    assert report.busiest == (2, 3, 3)
    assert (report.max_load, report.min_load) == (1, 0)
    assert np.isclose(report.busy, 1 / 3)


def test_kv_words_travel_in_both_passes():
    made = ring4()
    back = made.hops(backward=True)
    assert back.where(back.kind == KV).lines() == made.hops().lines()


@pytest.mark.parametrize("schedule", sorted(tasp.schedules()))
def test_32_ranks(schedule):
    """CASES G7."""
    made = plan([4096, 1, 77], 32, schedule=schedule, machine="mesh8x4")
    report = check(made)
    assert report.pairs == made.docs.num_pairs
    moved = report.tokens_sent.sum()
    everything = 31 * made.docs.total * (2 if len(made.schedule.offloaded.step) else 1)
    assert moved < everything if made.schedule.variable_size else moved == everything
    assert report.balance < 1.06


def test_a_gradient_does_not_arrive_before_the_receiver_has_computed_its_own_part():
    """The receiver's rows would begin at zero afterwards: on ranks dk and dv were wrong."""
    made = plan([48], 4, schedule="ring", layout="contiguous")
    wide = DeclaredLimits(2, 2, 4.0)
    wrong = changed(made, ("t2 1>2 dkv0.0", "t2 1>3 dkv0.0"), limits=wide)
    refused(wrong, "arrives at a rank that has not computed its own part yet at t2 1>3", step=2)
