"""Groups, hangs and shapes that broke other systems: G1-G4, G7, H1, H3, H5-H7; and `launch`."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from spread import spread

import tasp_core as tasp
from tasp_core.kernels import flash
from tasp_core.kernels.aten import AtenCpu
from tasp_core.lab.bench.accuracy import NAMES, Inputs, Reference, run_rank
from tasp_core.lowering.program import Message
from tasp_core.runtime import execute
from tasp_core.runtime.exchange import exchange_of

DOCS = tasp.Documents.of([37, 81, 2, 60])


def results(rank, group, plans, inputs):
    return [run_rank(rank, group, p, inputs)[0] for p in plans]


def errors_of(plans, inputs, docs):
    """Errors of each plan, all plans run in one launch."""
    judge = Reference(inputs, docs)
    by_rank = tasp.launch(results, plans[0].ranks, plans, inputs)
    return [judge.errors([r[i] for r in by_rank], p) for i, p in enumerate(plans)]


# ---- lengths, ranks, heads


def test_g1_32769_tokens_on_eight_ranks_thin_head():
    # Only some queries have a gradient, so dk and dv of all keys follow from those rows alone.
    total, scale = 32769, 8**-0.5
    docs, inputs = tasp.Documents.of([total]), Inputs.random(total, 1, 1, 8)
    dice = np.random.default_rng(0)
    rows = np.unique([0, 1, total - 1, *dice.choice(total, 197, replace=False)])
    inputs.dout[np.setdiff1d(np.arange(total), rows)] = 0
    p = tasp.plan(docs, 8)
    by_rank = tasp.launch(results, 8, [p], inputs)
    found = [tasp.unshard([r[0][i] for r in by_rank], p) for i in range(5)]
    q, k, v, dout = (x.squeeze(1).double().numpy() for x in inputs.tensors())
    q, dout = q[rows], dout[rows]
    scores = np.where(np.arange(total) <= rows[:, None], q @ k.T * scale, -np.inf)
    lse = np.logaddexp.reduce(scores, axis=1)
    weights = np.exp(scores - lse[:, None])
    out = weights @ v
    ds = weights * (dout @ v.T - (dout * out).sum(1, keepdims=True)) * scale
    exact = {"out": out, "lse": lse, "dq": ds @ k, "dk": ds.T @ q, "dv": weights.T @ dout}
    for name, whole in zip(NAMES, found, strict=True):
        mine = whole.squeeze(1).double().numpy()
        mine = mine if name in ("dk", "dv") else mine[rows]
        gap = np.abs(mine - exact[name])
        assert gap.max() <= 2e-6 * np.abs(exact[name]).max(), (name, gap.max())
    assert not np.delete(found[2].numpy(), rows, axis=0).any()


def test_g7_twelve_ranks():
    inputs = Inputs.random(DOCS.total, 2, 1, 8)
    (errors,) = errors_of([tasp.plan(DOCS, 12, schedule="tasp", layout="zigzag")], inputs, DOCS)
    assert errors.ok, errors


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(40, 8, 16), (32, 2, 8), (8, 1, 8)])
def test_h1_head_counts_that_heads_alone_could_not_share(heads, kv_heads, ranks):
    docs, inputs = tasp.Documents.of([50, 30]), Inputs.random(80, heads, kv_heads, 8)
    assert tasp.supports(docs, ranks, heads=heads, kv_heads=kv_heads)
    (errors,) = errors_of([tasp.plan(docs, ranks)], inputs, docs)
    assert errors.ok, errors


def test_h3_lse_of_either_shape_is_understood():
    lse = torch.arange(12.0).view(4, 3)  # 4 heads, 3 tokens
    assert torch.equal(flash.lse_rows(lse, tokens=3, heads=4), lse.T)
    assert torch.equal(flash.lse_rows(lse[None], tokens=3, heads=4), lse.T)
    two = torch.stack([lse[:, :2], lse[:, 1:]])  # [B, H, T]: sequences of 2 and 1 tokens, padded
    cu = torch.tensor([0, 2, 3], dtype=torch.int32)
    rows = flash.lse_rows(two, tokens=3, heads=4, cu=cu)
    assert torch.equal(rows, torch.stack([lse[:, 0], lse[:, 1], lse[:, 1]]))


@pytest.mark.parametrize("mask", ["prefix_lm", "chunked", "banded"])
def test_h5_masks_that_are_not_supported_are_refused_before_any_work(mask):
    answer = tasp.supports(DOCS, 4, mask=mask)
    assert not answer
    assert mask in answer.reason
    assert "write it as slices" in answer.reason


@pytest.mark.parametrize("causal", [False, True])
def test_h6_h7_either_mask_with_defaults_on_four_cpu_ranks(causal):
    docs, inputs = tasp.Documents.of([64, 36], causal=causal), Inputs.random(100, 4, 4, 8)
    (errors,) = errors_of([tasp.plan(docs, 4)], inputs, docs)
    assert errors.ok, errors


# ---- groups


@pytest.mark.parametrize("ranks", [2, 3])
def test_g3_the_first_operation_of_a_group_may_be_a_partial_step(ranks):
    def first(rank, group):  # only rank 0 sends, only rank 1 receives
        fresh = dist.new_group(list(range(ranks)))
        kv = torch.zeros(8, 1, 2)
        kv[:4] = 7.0
        sends = (Message(1, "kv", 1, 2, 0, 0, 0, 0),) if rank == 0 else ()
        recvs = (Message(0, "kv", 6, 2, 0, 0, 0, 0),) if rank == 1 else ()
        exchange_of(fresh).post(0, sends, recvs, {"kv": kv})()
        return kv[4:, 0, 0].tolist()

    answers = tasp.launch(first, ranks, timeout_s=20)
    assert answers == [[0.0, 0.0, 7.0 * (r == 1), 7.0 * (r == 1)] for r in range(ranks)]


def test_two_groups_of_two_in_a_world_of_four_run_plans_of_their_own():
    other = tasp.Documents.of([90, 4], causal=False)
    rows = [(DOCS, Inputs.random(DOCS.total, 4, 2, 8)), (other, Inputs.random(94, 4, 2, 8, seed=1))]
    members = [[0, 2], [3, 1]]
    schedules = ("ring", "tasp", "wave", "all_gather")
    plans = [[tasp.plan(docs, 2, schedule=s) for s in schedules] for docs, _ in rows]

    def work(rank, group):
        groups = [dist.new_group(ids) for ids in members]
        mine = next(i for i, ids in enumerate(members) if rank in ids)
        at = dist.get_rank(groups[mine])
        with pytest.raises(tasp.PlanError, match="not in the group"):
            run_rank(0, groups[1 - mine], plans[0][0], rows[0][1])
        return mine, at, results(at, groups[mine], plans[mine], rows[mine][1])

    answers = tasp.launch(work, 4)
    for group, (docs, inputs) in enumerate(rows):
        judge = Reference(inputs, docs)
        pieces = [x[2] for x in sorted((a for a in answers if a[0] == group), key=lambda a: a[1])]
        for i, p in enumerate(plans[group]):
            assert judge.errors([x[i] for x in pieces], p).ok, p.summary()


def test_g4_two_groups_used_from_two_threads_are_right():
    inputs = [Inputs.random(DOCS.total, 4, 2, 8, seed=s) for s in (0, 1)]
    plans = [tasp.plan(DOCS, 2, schedule=s) for s in ("tasp", "ring")]

    def work(rank, group):
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        found = [[], []]

        def one(i):
            for _ in range(10):
                found[i].append(run_rank(rank, groups[i], plans[i], inputs[i])[0])

        threads = [threading.Thread(target=one, args=(i,)) for i in (0, 1)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return found

    answers = tasp.launch(work, 2, timeout_s=60)
    for i, p in enumerate(plans):
        judge, runs = Reference(inputs[i], DOCS), list(zip(*(a[i] for a in answers), strict=True))
        assert len(runs) == 10
        for pieces in runs:
            assert judge.errors(pieces, p).ok, p.summary()


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_one_collective_a_step_gives_the_bits_of_single_messages(layout):
    inputs, cases = Inputs.random(DOCS.total, 4, 2, 8), (("tasp", None), ("wave", "mesh2x2"))
    plans = [
        tasp.plan(DOCS, 4, schedule=s, machine=m, layout=layout, schedule_options={"exchange": e})
        for s, m in cases
        for e in ("p2p", "all_to_all")
    ]
    for pieces in tasp.launch(results, 4, plans, inputs):
        for single, together in (pieces[:2], pieces[2:]):
            assert all(map(torch.equal, single, together))


# ---- ranks that fail


def third_call_fails(rank, group, p, inputs):
    """Rank 1's kernel raises in its third step."""
    calls, real = [], AtenCpu.forward

    def counting(self, q, k, v, call, scale):
        calls.append(call)
        if rank == 1 and len(calls) == 4:  # own keys take two calls, later steps one
            raise FloatingPointError("this kernel is broken")
        return real(self, q, k, v, call, scale)

    AtenCpu.forward = counting
    return run_rank(rank, group, p, inputs)[1]


@pytest.mark.parametrize("schedule", spread(["tasp", "ring", "wave"], keep=1))
def test_g2_a_rank_that_raises_in_its_third_step_is_named_first(schedule):
    p = tasp.plan([160], 4, schedule=schedule)
    assert [len(s.compute.calls) for s in tasp.lower(p, 1).steps] == [2, 1, 1, 1]
    start = time.monotonic()
    with pytest.raises(tasp.RankError) as caught:
        tasp.launch(third_call_fails, 4, p, Inputs.random(160, 2, 1, 8))
    assert time.monotonic() - start < 30
    assert caught.value.first == 1
    assert "rank 1 failed first" in str(caught.value)
    assert "this kernel is broken" in caught.value.errors[1]
    assert isinstance(caught.value.__cause__, FloatingPointError)
    assert set(caught.value.errors) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("name", "late"),
    spread(itertools.product(["ring", "tasp", "all_to_all", "all_gather"], [False, True]), keep=4),
)
def test_the_others_say_what_they_waited_for(name, late):
    options = {"exchange": name} if name == "all_to_all" else None
    p = tasp.plan(DOCS, 4, schedule=name if options is None else "tasp", schedule_options=options)
    real = execute.Context.post

    def post(self, *args):
        if self.rank == 1:
            raise OSError("the network card is on fire")
        time.sleep(0.5 if late else 0)
        return real(self, *args)

    def work(rank, group):
        execute.Context.post = post
        return run_rank(rank, group, p, Inputs.random(DOCS.total, 2, 1, 8))[1]

    with pytest.raises(tasp.RankError) as caught:
        tasp.launch(work, 4)
    for rank in (0, 2, 3):
        assert f"TransportError: rank {rank}, step " in caught.value.errors[rank]


def test_a_killed_rank_is_named():
    def work(rank, group):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_rank(rank, group, tasp.plan([90], 4), Inputs.random(90, 2, 1, 8))[1]

    start = time.monotonic()
    with pytest.raises(tasp.RankError) as caught:
        tasp.launch(work, 4)
    assert time.monotonic() - start < 15
    # not always named first: the others may report the lost connection before it is seen to be dead
    assert "rank 2 died without a word" in str(caught.value)


def test_a_rank_that_hangs_is_named_after_the_time_out():
    def work(rank, group):
        if rank == 1:
            time.sleep(60)
        return rank

    start = time.monotonic()
    with pytest.raises(
        tasp.RankError, match=r"rank 1 failed first:\nhung: no result in 2"
    ) as caught:
        tasp.launch(work, 3, timeout_s=2)
    assert 1.9 < time.monotonic() - start < 10
    assert list(caught.value.errors) == [1]  # the others had answered
    assert " in work\n" in caught.value.errors[1]  # where it stood


def test_a_rank_that_hangs_inside_attention_is_named_too():
    def work(rank, group):
        if rank == 1:
            time.sleep(60)
        return run_rank(rank, group, tasp.plan([90], 3), Inputs.random(90, 2, 1, 8))[1]

    with pytest.raises(tasp.RankError) as caught:
        tasp.launch(work, 3, timeout_s=3)
    assert "hung" in caught.value.errors[1] or "still running" in caught.value.errors[1]


def test_results_come_in_rank_order_and_closures_and_errors_travel():
    secret = 3

    def late(rank, group, more):
        time.sleep(0.05 * (3 - rank))
        return rank, os.getpid(), secret + more, dist.get_world_size(group)

    answers = tasp.launch(late, 3, 4)
    assert [a[0] for a in answers] == [0, 1, 2]
    assert len({a[1] for a in answers} | {os.getpid()}) == 4
    assert {a[2:] for a in answers} == {(7, 3)}

    def fails(rank, group):
        raise KeyError(f"of rank {rank}") if rank else ArithmeticError("zero")

    with pytest.raises(tasp.RankError) as caught:
        tasp.launch(fails, 2)
    assert set(caught.value.errors) == {0, 1}
    assert type(caught.value.__cause__) is (KeyError if caught.value.first else ArithmeticError)
    for wrong in (0, -1, 1.5):
        with pytest.raises(tasp.PlanError, match="whole number of ranks >= 1"):
            tasp.launch(late, wrong)
