"""Lengths and documents that broke other systems: L1-L5, L7-L15, N12. L6 is in test_layout.py.

"= dense" is what `Reference` says: out, lse, dq, dk, dv against the float64 oracle, within twice the
plain single-device kernel's own error or 8 roundings of the largest value.
"""

from __future__ import annotations

import itertools
import time
import tracemalloc

import numpy as np
import pytest
import torch
from spread import spread

import tasp_core as tasp
from tasp_core.kernels.aten import AtenCpu
from tasp_core.kernels.reference import oracle
from tasp_core.lab.bench.accuracy import NAMES, Inputs, Reference, run_rank
from tasp_core.lab.training.llama import TinyLlama

SCHEDULES = ("ring", "tasp", "wave", "all_gather")


def planned(docs, ranks, schedule="tasp", layout="zigzag"):
    """The plan; a wave goes over two nodes where it can."""
    machine = f"mesh{ranks // 2}x2" if schedule == "wave" and ranks % 2 == 0 else None
    return tasp.plan(docs, ranks, schedule=schedule, layout=layout, machine=machine)


def results(rank, group, jobs):
    return [run_rank(rank, group, p, inputs)[0] for p, inputs in jobs]


def run(ranks, jobs):
    """For each (plan, inputs), every rank's out, lse, dq, dk, dv: one launch for all."""
    by_rank = tasp.launch(results, ranks, jobs, timeout_s=100)
    return list(zip(*by_rank, strict=True))


def assert_dense(ranks, docs, inputs, schedules=SCHEDULES, layouts=("zigzag", "striped")):
    plans = [planned(docs, ranks, s, lay) for s in schedules for lay in layouts]
    judge = Reference(inputs, docs)
    for p, pieces in zip(plans, run(ranks, [(p, inputs) for p in plans]), strict=True):
        errors = judge.errors(pieces, p)
        assert errors.ok, (str(p), errors)


def test_l1_five_documents_do_not_see_each_other():
    docs = tasp.Documents.of([200, 312, 12, 400, 100])
    inputs = Inputs.random(1024, 4, 2, 16)
    assert_dense(2, docs, inputs)
    p, middle = planned(docs, 2), slice(512, 524)
    changed = [x.clone() for x in inputs.tensors()]
    for x in changed:
        x[middle] += 3.0
    before, after = run(2, [(p, inputs), (p, Inputs(*changed))])
    for i, name in enumerate(NAMES):  # no bit of another document moves
        old, new = (tasp.unshard([piece[i] for piece in pieces], p) for pieces in (before, after))
        same = (old == new).flatten(1).all(1)
        outside = torch.ones(1024, dtype=torch.bool)
        outside[middle] = False
        assert same[outside].all(), name
        assert not same[middle].all(), name


def test_l2_one_document_of_698_twice():
    docs, inputs = tasp.Documents.of([698]), Inputs.random(698, 4, 2, 16)
    assert_dense(4, docs, inputs)
    plans = [planned(docs, 4, s) for s in SCHEDULES]
    first, second = (run(4, [(p, inputs) for p in plans]) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(
            torch.equal(x, y) for r, s in zip(a, b, strict=True) for x, y in zip(r, s, strict=True)
        )


def test_l3_values_constant_per_document_give_exact_means():
    docs = tasp.Documents.of([7, 3])
    inputs = Inputs.random(10, 4, 2, 16)
    inputs.v[:7], inputs.v[7:] = 3.0, -5.0
    plans = [planned(docs, 2, s, lay) for s in SCHEDULES for lay in tasp.layouts()]
    for p, pieces in zip(plans, run(2, [(p, inputs) for p in plans]), strict=True):
        out = tasp.unshard([x[0] for x in pieces], p)
        torch.testing.assert_close(out[:7], torch.full_like(out[:7], 3.0), rtol=3e-7, atol=0)
        torch.testing.assert_close(out[7:], torch.full_like(out[7:], -5.0), rtol=3e-7, atol=0)


def test_l4_lengths_that_divide_nothing():
    docs = tasp.Documents.of([137, 2041, 89])
    p = planned(docs, 8)
    assert sum(p.num_tokens(r) for r in range(8)) == docs.total  # no padding
    assert_dense(8, docs, Inputs.random(docs.total, 4, 2, 16), layouts=("zigzag",))


@pytest.mark.parametrize(("total", "ranks"), [(1001, 4), (17, 2), (2000, 4)])
def test_l5_l13_totals_that_divide_nothing(total, ranks):
    assert_dense(ranks, tasp.Documents.of([total]), Inputs.random(total, 2, 1, 16))


def token_more(rank, group, p, inputs, who):
    rows = [tasp.shard(x, p, rank) for x in inputs.tensors()[:3]]
    if rank == who:
        rows = [torch.cat([x, x[:1]]) for x in rows]
    start = time.perf_counter()
    with pytest.raises(tasp.PlanError) as error:
        tasp.attention(*rows, p, group)
    return str(error.value), time.perf_counter() - start


@pytest.mark.parametrize("who", [0, 2])
def test_l7_a_rank_with_one_token_more_is_named_on_every_rank(who):
    p = planned(tasp.Documents.of([41]), 4)
    answers = tasp.launch(token_more, 4, p, Inputs.random(41, 2, 1, 8), who, timeout_s=15)
    tokens = p.num_tokens(who)
    for text, seconds in answers:
        assert f"rank {who}:" in text
        assert str(tokens + 1) in text
        assert f"gives this rank {tokens}" in text
        assert seconds < 5


def test_l8_4097_tokens_on_four_ranks():
    docs = tasp.Documents.of([4097])
    assert_dense(4, docs, Inputs.random(4097, 2, 1, 16), ("tasp",), ("zigzag",))


def test_l9_only_per_token_tensors_of_a_batch_are_sharded():
    p = planned(tasp.Documents.of([9, 4]), 3)
    row = torch.arange(13)
    batch = {
        "ids": row,
        "hidden": torch.randn(13, 2),
        "scalar": torch.tensor(3.0),
        "mask": torch.ones(1),
        "none": None,
        "name": "a batch",
        "number": 13,
        "other": torch.ones(12, 13),
    }
    for rank in range(3):
        local, names = tasp.shard_batch(batch, p, rank)
        assert names == ("ids", "hidden")
        assert list(local) == list(batch)
        assert local["ids"].tolist() == p.tokens(rank).tolist()
        assert torch.equal(local["hidden"], batch["hidden"][p.tokens(rank)])
        assert all(local[key] is batch[key] for key in batch if key not in names)
    assert tasp.shard_batch(batch, p, 0, dim=1)[1] == ("other",)
    assert tasp.shard_batch(batch, p, 0, dim=-1)[1] == ("ids", "other")
    assert tasp.shard_batch({}, p, 0) == ({}, ())


def log_probabilities(rank, group, plans, ids):
    torch.manual_seed(5)
    model, found = TinyLlama(dim=32, layers=2, heads=4, kv_heads=2).double(), []
    for p in plans:
        local = tasp.shard(ids, p, rank)
        labels = tasp.shard(tasp.next_token_labels(ids, p.docs), p, rank)
        positions = torch.from_numpy(p.positions(rank))
        with torch.no_grad():
            logits = model(local, positions, lambda q, k, v, p=p: tasp.attention(q, k, v, p, group))
            total, count = tasp.token_loss(logits, labels, group)
        found.append((logits.log_softmax(-1), float(total), int(count)))
    return found


def test_l10_log_probabilities_and_losses_are_those_of_one_rank():
    docs = tasp.Documents.of([61, 7, 133])
    ids = torch.randint(0, 256, (docs.total,), generator=torch.Generator().manual_seed(1))
    alone = planned(docs, 1)
    ((wanted, wanted_sum, wanted_count),) = log_probabilities(0, None, [alone], ids)
    assert wanted_count == docs.total - 3
    for ranks in (2, 4):
        plans = [
            planned(docs, ranks, s, lay) for s in SCHEDULES for lay in ("zigzag", "per_document")
        ]
        answers = tasp.launch(log_probabilities, ranks, plans, ids)
        for i, p in enumerate(plans):
            whole = tasp.unshard([a[i][0] for a in answers], p)
            torch.testing.assert_close(whole, wanted, rtol=1e-10, atol=1e-10)
            assert sum(a[i][1] for a in answers) == pytest.approx(wanted_sum, rel=1e-12)
            assert {a[i][2] for a in answers} == {wanted_count}


FEW = ((0, 1, 0, 1), (1,) * 11, (0,), (), (1,), (2, 1), (0, 3))  # L11, and L13's three tokens


FEW_ON = [(1, "zigzag"), *((2, name) for name in tasp.layouts()), (8, "zigzag"), (8, "striped")]


@pytest.mark.parametrize(("ranks", "layout"), spread(FEW_ON, keep=4))
def test_l11_l13_hardly_any_tokens_on_many_ranks(ranks, layout):
    rows, jobs, judges = {d: Inputs.random(sum(d), 4, 2, 8) for d in FEW}, [], []
    for d, causal in itertools.product(FEW, (True, False) if ranks < 8 else (True,)):
        docs = tasp.Documents.of(d, causal=causal)
        judge = Reference(rows[d], docs)
        for schedule in SCHEDULES:
            jobs.append((planned(docs, ranks, schedule, layout), rows[d]))
            judges.append(judge)
    for (p, _), judge, pieces in zip(jobs, judges, run(ranks, jobs), strict=True):
        errors = judge.errors(pieces, p)
        assert errors.ok, (str(p), errors)
        assert all(x.shape[0] == p.num_tokens(r) for r, piece in enumerate(pieces) for x in piece)


@pytest.mark.parametrize("schedule", ["ring", "tasp", "wave"])
def test_l13_ranks_without_tokens_take_part_in_collectives(schedule):
    docs, inputs = tasp.Documents.of([2, 1]), Inputs.random(3, 2, 1, 8)
    p = tasp.plan(docs, 4, schedule=schedule, schedule_options={"exchange": "all_to_all"})
    pieces = tasp.launch(results, 4, [(p, inputs)], timeout_s=10)
    assert Reference(inputs, docs).errors([x[0] for x in pieces], p).ok


def test_l12_keys_without_queries_of_a_document_and_the_reverse():
    # rank 3 is sent keys of document 0 and has no query of it; rank 0 asks, and rank 3 has no key
    docs = tasp.Documents.of([30, 3, 31], causal=False)
    p = planned(docs, 4, layout="contiguous")
    held = [set(docs.document_of(p.tokens(r)).tolist()) for r in range(4)]
    assert held == [{0}, {0, 1}, {1, 2}, {2}]
    assert_dense(4, docs, Inputs.random(64, 2, 1, 16), layouts=("contiguous", "zigzag"))
    causal = tasp.Documents.of([30, 3, 31])
    assert_dense(4, causal, Inputs.random(64, 2, 1, 16), layouts=("contiguous",))


@pytest.mark.parametrize("launched", [False, True])
def test_l14_one_rank_is_bitwise_the_plain_kernel(launched):
    docs, inputs = tasp.Documents.of([137, 200, 89]), Inputs.random(426, 4, 2, 16)
    p = planned(docs, 1)
    mine = (
        tasp.launch(results, 1, [(p, inputs)])[0][0]
        if launched
        else run_rank(0, None, p, inputs)[0]
    )
    plain = oracle(inputs.q, inputs.k, inputs.v, docs, dout=inputs.dout, kernel=AtenCpu())
    assert all(torch.equal(x, plain[name]) for name, x in zip(NAMES, mine, strict=True))


def differing(rank, group, nested, inputs):
    p = planned(tasp.Documents.of(nested[rank]), len(nested))
    rows = [tasp.shard(x, p, rank) for x in inputs.tensors()[:3]]
    start = time.perf_counter()
    with pytest.raises(tasp.PlanError) as error:
        tasp.attention(*rows, p, group)
    return str(error.value), time.perf_counter() - start


@pytest.mark.parametrize("odd", [1, 3])
def test_l15_other_documents_on_one_rank_are_refused_on_all(odd):
    nested = [[10, 20, 10] if r != odd else [10, 10, 20] for r in range(4)]
    for text, seconds in tasp.launch(
        differing, 4, nested, Inputs.random(40, 2, 1, 8), timeout_s=15
    ):
        assert "no result is returned" in text
        assert f"documents: rank {odd} has Documents.of([10, 10, 20]" in text
        assert "the others have Documents.of([10, 20, 10]" in text
        assert "layout:" not in text
        assert seconds < 5


@pytest.mark.parametrize("layout", spread(tasp.layouts(), keep=3))
def test_n12_nothing_dense_is_built_for_long_rows(layout):
    docs = tasp.Documents.of([12345, 0, 30000, 1, 7654])
    tracemalloc.start()
    try:
        for backward in (False, True):
            p, pairs = planned(docs, 8, layout=layout), 0
            for step in (s for r in range(8) for s in tasp.lower(p, r, backward=backward).steps):
                for call in step.compute.calls if step.compute else ():
                    q, k = call.sequences.q_n, call.sequences.k_n
                    pairs += int(np.sum(q * (q + 1) // 2 if call.causal else q * k))
            assert pairs == docs.num_pairs  # and nothing hidden is computed
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8e6  # a mask of 50,000 x 50,000 bits is 312 MB
