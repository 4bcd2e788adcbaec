"""Numerics that broke other systems: N2-N10. N1 is in test_exact.py, N11 in test_layout.py.

Several plans run in each launch; "same bits" is torch.equal.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch._dynamo  # AdamW does so: once here, not once in every forked rank
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import deterministic

import tasp_core as tasp
from tasp_core.kernels import flash
from tasp_core.kernels.aten import AtenCpu
from tasp_core.kernels.reference import oracle
from tasp_core.lab.bench.accuracy import NAMES, Inputs, Reference
from tasp_core.lab.training.llama import TinyLlama
from tasp_core.runtime import execute
from tasp_core.runtime.merge import merge, merge_

SEEDED = settings(derandomize=True, deadline=None, max_examples=200, database=None)
DOCS = tasp.Documents.of([37, 81, 2, 60])
INF = torch.inf


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def planned(ranks, schedule="tasp", layout="zigzag", docs=DOCS):
    machine = f"mesh{ranks // 2}x2" if schedule == "wave" and ranks % 2 == 0 else None
    return tasp.plan(docs, ranks, schedule=schedule, layout=layout, machine=machine)


PLANS4 = [planned(4, s) for s in ("ring", "tasp", "wave", "all_gather")]


def attend(rank, group, p, inputs, view=lambda x: x, **options):
    """This rank's out, lse, dq, dk, dv; its tensors are `view`s of equal values."""
    q, k, v, dout = (view(tasp.shard(x, p, rank)).detach() for x in inputs.tensors())
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = tasp.attention(q, k, v, p, group, return_lse=True, **options)
    out.backward(dout)
    return [out.detach(), lse, q.grad, k.grad, v.grad]


def run(ranks, jobs):
    """For each (plan, inputs, options) every rank's results, from one launch."""

    def work(rank, group):
        alone = group if ranks > 1 else None
        return [attend(rank, alone, p, inputs, **options) for p, inputs, options in jobs]

    return list(zip(*tasp.launch(work, ranks), strict=True))


def same(first, second):
    """Whether all ranks' results have the same bits."""
    pairs = zip(itertools.chain(*first), itertools.chain(*second), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# ---- N2-N4: merging


@pytest.mark.parametrize("big", [200.0, 1e4])
def test_n2_extreme_partials_merge_exactly(big):
    lse, high, low = (torch.full(s, x) for s, x in (((1,), big), ((1, 1), 3.0), ((1, 1), -5.0)))
    for out, total in (merge(high, lse, low, -lse), merge(low, -lse, high, lse)):
        assert torch.equal(out, high)
        assert torch.equal(total, lse)
    for sign in (1, -1):  # equal weights, far from zero
        out, total = merge(high, sign * lse, low, sign * lse)
        torch.testing.assert_close(out, torch.full_like(out, -1.0), rtol=1e-6, atol=0)
        torch.testing.assert_close(total, sign * lse + np.log(2), rtol=1e-6, atol=0)


def test_n2_n3_empty_partials_are_the_identity():
    none, empty = torch.zeros(2, 3, 4), torch.full((2, 3), -INF)
    one, some = torch.randn(2, 3, 4), torch.randn(2, 3)
    for left, right in itertools.product(((one, some), (none, empty)), repeat=2):
        if right[0] is none or left[0] is none:
            wanted = left if right[0] is none else right
            assert all(map(torch.equal, merge(*left, *right), wanted))
    for at in range(4):  # in place, all but one empty, in a narrower dtype
        out, lse = none.clone(), empty.clone()
        for i in range(4):
            part = (one, some) if i == at else (none, empty)
            merge_(out, lse, *(x.bfloat16() for x in part))
        assert torch.equal(out, one.bfloat16().float())
        assert torch.equal(lse, some.bfloat16().float())


LSE = st.one_of(st.just(-INF), st.floats(-30, 30, width=32), st.floats(-1e4, 1e4, width=32))


@SEEDED
@given(st.lists(st.tuples(LSE, st.floats(-8, 8, width=32)), min_size=1, max_size=7), st.data())
def test_n2_any_order_and_bracketing_gives_the_float64_result(partials, data):
    lses = np.array([p[0] for p in partials])
    finite = lses[np.isfinite(lses)]
    weights = np.exp(lses - lses.max()) if finite.size else np.zeros(len(lses))
    total = lses.max() + np.log(weights.sum()) if finite.size else -INF
    exact = weights @ np.array([p[1] for p in partials]) / max(weights.sum(), 1.0)
    left = [(torch.full((1, 1, 1), x), torch.full((1, 1), lse)) for lse, x in partials]
    while len(left) > 1:
        left = data.draw(st.permutations(left))
        left = [merge(*left[0], *left[1]), *left[2:]]
    ((out, lse),) = left
    slack = 8e-7 * len(partials) * (1 + np.abs(finite).max(initial=0))
    assert float(lse) == pytest.approx(total, abs=slack)
    if finite.size:  # alone in the list, an empty partial keeps what it was given
        assert float(out) == pytest.approx(exact, abs=8 * slack)


def without_first_document(program):
    """The program without what it computes for the first document's queries."""
    (attend,) = program.instructions
    (call,) = attend.calls
    kept = type(call.sequences)(*(c[1:] for c in call.sequences))
    runs = (execute.Runs(*(np.array([x]) for x in (0, DOCS.lengths[0], DOCS.total - 37))),)
    call = call._replace(sequences=kept, q_runs=runs, k_runs=runs)
    return dataclasses.replace(program, instructions=(dataclasses.replace(attend, calls=(call,)),))


def test_n3_queries_that_see_no_key_give_zero_and_take_no_gradient(monkeypatch):
    inputs = Inputs.random(DOCS.total, 4, 2, 8)
    q, k, v, dout = inputs.tensors()
    wanted = oracle(q, k, v, DOCS, dout=dout, kernel=AtenCpu())
    full = execute.program_of
    cut = lambda *a, **b: without_first_document(full(*a, **b))  # noqa: E731
    monkeypatch.setattr(execute, "program_of", cut)
    found = attend(0, None, planned(1), inputs)
    for name, mine in zip(NAMES, found, strict=True):
        empty = -INF if name == "lse" else 0.0
        assert torch.equal(mine[:37], torch.full_like(mine[:37], empty)), name
        assert torch.equal(mine[37:], wanted[name][37:]), name


@pytest.mark.parametrize("written", [INF, 0.0, -INF, torch.nan])
def test_n4_what_kernels_write_for_empty_rows_does_not_leak(written):
    out, mine = torch.randn(2, 6, 2, 4)
    lse, mine_lse = torch.randn(2, 6, 2)
    empty = torch.tensor([0, 1, 0, 0, 1, 1], dtype=torch.bool)
    wanted = merge(mine, mine_lse, out, lse)
    out[empty], lse[empty] = written, written
    found = merge(mine, mine_lse, *flash.normalise_empty(out, lse, empty))
    for new, full, before in zip(found, wanted, (mine, mine_lse), strict=True):
        assert torch.equal(new[empty], before[empty])
        assert torch.equal(new[~empty], full[~empty])


# ---- N5-N7: what a step meets


def two_steps(rank, group, p, labelled):
    torch.manual_seed(0)
    model = TinyLlama(dim=32, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(p.docs.total) % 256
    labels = tasp.next_token_labels(ids, p.docs)
    labels[labelled:] = -100
    local, labels = (tasp.shard(x, p, rank) for x in (ids, labels))
    sums = []
    for _ in range(2):
        positions = torch.from_numpy(p.positions(rank))
        logits = model(local, positions, lambda q, k, v: tasp.attention(q, k, v, p, group))
        total, count = tasp.token_loss(logits, labels, group)
        optimizer.zero_grad()
        (total / count.clamp(min=1)).backward()
        optimizer.step()
        sums.append((float(total), int(count)))
    return sums, all(x.isfinite().all() for w in model.parameters() for x in (w, w.grad))


@pytest.mark.parametrize("ranks", [1, 4])
def test_n5_rows_without_labels_train_to_finite_numbers(ranks):
    p = planned(ranks, layout="contiguous")
    for labelled, count in ((0, 0), (5, 5)):
        for sums, finite in tasp.launch(two_steps, ranks, p, labelled):
            assert finite
            assert [n for _, n in sums] == [count] * 2
            assert np.isfinite([x for x, _ in sums]).all()
            assert count or sums == [(0.0, 0)] * 2


def test_n6_causal_calls_are_square_so_alignments_of_unequal_lengths_do_not_matter():
    # The convention: row i of a causal sequence sees its keys 0..i, and there are as many rows as keys.
    tried = 0
    for ranks, layout, schedule in itertools.product((1, 3, 4), tasp.layouts(), ("ring", "wave")):
        p = planned(ranks, schedule, layout, tasp.Documents.of([37, 1, 0, 20]))
        own = [p.tokens(r) for r in range(ranks)]
        for rank in range(ranks):
            step = tasp.lower(p, rank).steps[0].compute  # own keys: tokens are known
            keys = own[rank] if step.gather is None else own[rank][step.gather]
            for call in (c for c in step.calls if c.causal):
                for a, m, b, n in zip(*call.sequences, strict=True):
                    rows, columns = own[rank][a : a + m], keys[b : b + n]
                    assert m == n
                    assert (rows >= columns).all()
                    assert (rows[:-1] < columns[1:]).all()
                    tried += 1
    assert tried > 50


def test_n7_poisoned_buffers_change_no_bit():
    inputs = Inputs.random(DOCS.total, 4, 2, 8)
    names, lays = [p.schedule.name for p in PLANS4], ("zigzag", "striped")
    jobs = [(planned(4, s, lay), inputs, {}) for s, lay in itertools.product(names, lays)]

    def poisoned(rank, group):
        assert deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert torch.empty(3).isnan().all()
        return [attend(rank, group, p, inputs) for p, inputs, _ in jobs]

    clean, dirty = run(4, jobs), list(zip(*tasp.launch(poisoned, 4), strict=True))
    for (p, *_), a, b in zip(jobs, clean, dirty, strict=True):
        assert same(a, b), str(p)


# ---- N8-N10: strides, sources, dtypes

VIEWS = {
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "part of a fused tensor": lambda x: torch.cat([x + 1, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "odd offset": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "dim strided": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "all reversed": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
}


@pytest.mark.parametrize("name", list(VIEWS))
def test_n8_views_give_the_bits_of_contiguous_tensors(name):
    inputs = Inputs.random(DOCS.total, 4, 2, 8)
    for ranks, p in ((1, planned(1)), (2, planned(2))):
        wanted, found = run(ranks, [(p, inputs, {}), (p, inputs, {"view": VIEWS[name]})])
        assert same(wanted, found), ranks


def test_n8_expanded_views_and_gradients():
    base = Inputs.random(DOCS.total, 4, 1, 8)
    base.dout.fill_(0.5)
    wide = Inputs(base.q, base.k.repeat(1, 2, 1), base.v.repeat(1, 2, 1), base.dout)

    def view(x):  # keys and values of one head for two, a gradient of one number for all
        one = x.shape[1] == 1
        return x.expand(-1, 2, -1) if one else x[:1, :1, :1].expand_as(x) if (x == 0.5).all() else x

    wanted, found = run(4, [(planned(4), wide, {}), (planned(4), base, {"view": view})])
    assert same(wanted, found)


def test_n9_gradients_from_every_source_rank_to_every_owner():
    inputs, jobs, judges = Inputs.random(DOCS.total, 4, 2, 8), [], []
    for p, source in itertools.product(PLANS4, range(4)):
        dout = torch.zeros_like(inputs.dout)
        dout[p.tokens(source)] = inputs.dout[p.tokens(source)]
        jobs.append((p, dataclasses.replace(inputs, dout=dout), {}))
        judges.append(Reference(jobs[-1][1], DOCS))
    for (p, *_), judge, pieces in zip(jobs, judges, run(4, jobs), strict=True):
        for owner, name in itertools.product(range(4), NAMES):
            exact = tasp.shard(judge.exact[name], p, owner)
            gap = (pieces[owner][NAMES.index(name)] - exact).abs().max()
            assert gap <= judge.limits[name], (p.schedule.name, owner, name)


@pytest.mark.parametrize("ranks", [1, 4])
def test_n10_fp16_gradients_have_fp16_accuracy(ranks):
    inputs = Inputs.random(DOCS.total, 4, 2, 32, dtype=torch.float16)
    judge, p = Reference(inputs, DOCS), planned(ranks)
    (pieces,) = run(ranks, [(p, inputs, {})])
    assert judge.errors(pieces, p).ok
    for i in (0, 2, 3, 4):
        whole, exact = tasp.unshard([x[i] for x in pieces], p), judge.exact[NAMES[i]]
        limit = torch.finfo(torch.float16).eps * exact.abs().max()
        assert whole.dtype == torch.float16
        assert (whole.double() - exact).abs().max() <= limit
        assert (exact.bfloat16().double() - exact).abs().max() > limit  # what bf16 would lose
