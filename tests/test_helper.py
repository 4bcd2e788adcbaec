"""Schedules that move queries: helper (DistFlashAttn), token_ring, mesh; what `check` refuses of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import tasp_core as tasp
from tasp_core.schedules import KV, OUT, OffloadedPairs, Q
from tasp_core.schedules.query_moving import Helper


@pytest.mark.parametrize("ranks", range(2, 10))
def test_helper_needs_half_the_steps_on_causal_rows_and_balances_them(ranks):
    p = tasp.plan([32 * ranks], ranks, schedule="helper", layout="contiguous")
    report = tasp.check(p)
    ring = tasp.check(tasp.plan([32 * ranks], ranks, schedule="ring", layout="contiguous"))
    assert (report.work > 0).any(axis=0).sum() == ranks // 2 + 1  # DistFlashAttn's count of steps
    assert (ring.work > 0).any(axis=0).sum() == ranks
    pairs = ranks * (ranks - 1) / 2 / ranks  # off-diagonal tiles a rank, in the mean
    most = (pairs if ranks % 2 else pairs + 0.5) * 32 * 32 + 32 * 33 / 2
    assert report.work.sum(axis=1).max() == most
    assert report.balance < ring.balance or ranks == 2


def test_helper_fetches_keys_where_nobody_is_idle():
    p = tasp.plan(tasp.Documents.of([64], causal=False), 5, schedule="helper", layout="contiguous")
    assert not len(p.schedule.offloaded.step)
    assert set(p.hops().kind.tolist()) == {KV}
    assert p.schedule.num_steps() == 4


def test_token_ring_moves_no_keys_and_stops_where_nobody_sees():
    p = tasp.plan([64], 4, schedule="token_ring", layout="contiguous")
    hops = p.hops()
    assert set(hops.kind.tolist()) == {Q, OUT}
    # queries of rank r are seen by keys of ranks 0..r: rank 0's stay at home
    assert not (hops.owner == 0).any()
    assert set(p.hops(backward=True).lines()) == {w.replace("out", "dq") for w in hops.lines()}
    apart = tasp.plan([16] * 4, 4, schedule="token_ring", layout="contiguous")
    assert not len(apart.hops().step)


@pytest.mark.parametrize(("ranks", "rows"), [(6, 2), (6, 3), (9, 3), (12, 3), (5, 1), (5, 5)])
def test_mesh_moves_columns_of_queries_and_rows_of_keys(ranks, rows):
    docs = tasp.Documents.of([24 * ranks], causal=False)
    p = tasp.plan(docs, ranks, schedule="mesh", schedule_options={"rows": rows})
    report, hops, columns = tasp.check(p), p.hops(), ranks // rows
    into = [np.bincount(hops.dst[hops.kind == kind], minlength=ranks) for kind in (KV, Q, OUT)]
    assert [set(x.tolist()) for x in into] == [{rows - 1}, {columns - 1}, {columns - 1}]
    assert report.balance == 1.0
    assert report.peak_remote_queries <= columns - 1


def test_mesh_keeps_queries_inside_nodes_and_refuses_what_does_not_divide():
    p = tasp.plan([512], 8, schedule="mesh", machine="mesh4x2")
    assert p.schedule.options == {"rows": 2}
    hops = p.hops()
    crossing = hops.where(hops.src // 4 != hops.dst // 4)
    assert set(crossing.kind.tolist()) == {KV}
    with pytest.raises(tasp.PlanError, match="rows=3 must divide 8 ranks: use 1, 2, 4, 8"):
        tasp.plan([512], 8, schedule="mesh", schedule_options={"rows": 3})


def refused(p: tasp.Plan, reason: str) -> None:
    with pytest.raises(tasp.PlanError) as caught:
        tasp.check(p)
    assert reason in str(caught.value).splitlines()[0]


WRONG_HOPS = [
    ("t0 4>0 q4.0", None, "does not hold both"),
    ("t1 3>0 q3.0", "t2 3>0 q3.0", "after its last contribution is computed"),
    ("t0 4>0 q4.0", "t0 3>0 q4.0", "sends what it does not hold"),
    (
        "t2 0>4 dq4.0",
        None,
        "partial output of q4.0 home once if it computes one, else never; it sends it 0 times",
    ),
    ("t3 1>4 dq4.0", "t1 1>4 dq4.0", "after its last contribution is computed; this is not so at"),
    ("t3 1>4 dq4.0", "t3 1>3 dq4.0", "after its last contribution is computed; this is not so at"),
]


@pytest.mark.parametrize(("word", "other", "reason"), WRONG_HOPS)
def test_wrong_tables_are_refused(word, other, reason):
    p = tasp.plan([64], 5, schedule="helper", layout="contiguous")
    words = p.hops(backward=True).lines()
    assert tasp.check(p.with_hops(words)).pairs == p.docs.num_pairs
    assert word in words
    refused(p.with_hops([x for x in (other if w == word else w for w in words) if x]), reason)


def test_too_many_remote_queries_are_refused():
    p = tasp.plan([64], 5, schedule="token_ring", layout="contiguous")
    tight = p.schedule.limits._replace(remote_queries=2.0)
    refused(
        p.with_hops(p.hops(backward=True).lines(), limits=tight), "shards of remote queries in step"
    )


@dataclass(frozen=True)
class Bent(Helper):
    """A helper whose list of offloaded pairs is wrong."""

    change: str = ""

    @property
    def offloaded(self) -> OffloadedPairs:
        m = super().offloaded
        if self.change == "twice":
            return OffloadedPairs(*(np.append(c, c[:1]) for c in m))
        if self.change == "lost":
            return m.where(np.arange(len(m.step)) > 0)
        if self.change == "home":
            return m._replace(rank=m.q_owner)
        return m._replace(step=m.step - 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("twice", "is offloaded twice"),
        ("lost", "it sends it 1 times"),
        ("home", "is their home"),
        ("early", "does not hold both"),
    ],
)
def test_wrong_lists_of_offloaded_pairs_are_refused(change, reason):
    p = tasp.plan([64], 5, schedule="helper", layout="contiguous")
    schedule = Bent(5, 5, layout=p.layout, change=change)
    refused(tasp.Plan(p.docs, p.layout, schedule, p.machine), reason)
