"""Sliding windows: every layout and schedule on real ranks against float64, and what travels for them.

Exactness is held as in test_exact.py; the plain kernel is `math` in float32, which masks scores
itself and shares nothing with the tiles that are run.
"""

from __future__ import annotations

import itertools
import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tasp_core as tasp
from tasp_core.cli.app import app
from tasp_core.kernels.aten import AtenCpu
from tasp_core.kernels.reference import Math, oracle
from tasp_core.kernels.varlen import VarlenKernel
from tasp_core.lab.bench.accuracy import NAMES, Inputs, Reference, run_rank
from tasp_core.runtime import execute
from tasp_core.sequence import tiles
from tasp_core.sequence.masks import edges
from tests.spread import spread
from tests.test_exact import Case, failures, results_of
from tests.test_kernels import StandIn

WINDOWS = (1, 2, 7, 128, 5000)
DOCUMENTS = ((300,), (137, 741, 89), (0, 137, 0, 1, 62), (7, 3), (1,) * 20)
HEADS = ((8, 2), (4, 4), (6, 1), (2, 2), (4, 1))
SCHEDULES = (("ring", None), ("tasp", None), ("wave", 2), ("all_gather", None), ("sap", None))


def cases(ranks: int) -> list[Case]:
    """Every layout x schedule x mask, with windows, documents and heads in turn."""
    turn = random.Random(ranks)
    rows = []
    for (schedule, nodes), layout, causal in itertools.product(
        SCHEDULES, tasp.layouts(), (True, False)
    ):
        window, documents = turn.choice(WINDOWS), turn.randrange(len(DOCUMENTS))
        machine = f"mesh{ranks // nodes}x{nodes}" if nodes and ranks % nodes == 0 else None
        rows.append(
            Case(
                ranks,
                schedule,
                machine,
                layout,
                causal,
                DOCUMENTS[documents],
                HEADS[documents],
                window,
            )
        )
    return rows


@pytest.mark.parametrize("ranks", spread(range(1, 5), keep=2))
def test_every_layout_and_schedule(ranks):
    assert failures(cases(ranks)) == []


@pytest.mark.parametrize("layout", spread(tasp.layouts(), keep=2))
def test_h4_a_window_of_128_is_dense_and_never_full_causal(layout):
    docs = tasp.Documents.of([4096], window=128)
    inputs = Inputs.random(docs.total, 2, 1, 16)
    judge = Reference(inputs, docs)
    causal = oracle(*inputs.tensors()[:3], tasp.Documents.of([4096]))
    plans = [
        tasp.plan(docs, 4, schedule=s, layout=layout, machine="mesh2x2" if n else None)
        for s, n in SCHEDULES
    ]
    by_rank = tasp.launch(results_of, 4, plans, inputs)
    for i, p in enumerate(plans):
        pieces = [r[i] for r in by_rank]
        assert judge.errors(pieces, p).ok, p.summary()
        assert tasp.check(p).pairs == docs.num_pairs == 128 * 4096 - 128 * 127 // 2
        out = tasp.unshard([x[0] for x in pieces], p)
        assert (out - causal["out"]).abs().max() > 0.1


def dense(inputs: Inputs, window_size: tuple[int, int], scale: float) -> dict[str, torch.Tensor]:
    """flash-attn's definition: row i sees keys i - before .. i + after; by autograd."""
    q, k, v = (x.clone().requires_grad_() for x in inputs.tensors()[:3])
    far = torch.arange(len(k))[None, :] - torch.arange(len(q))[:, None]
    mask = (far >= -window_size[0]) & (far <= window_size[1])
    k_all, v_all = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k_all) * scale
    scores = scores.masked_fill(~mask, -torch.inf)
    out = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v_all)
    out.backward(inputs.dout)
    values = (out.detach(), scores.logsumexp(-1).T.detach(), q.grad, k.grad, v.grad)
    return dict(zip(NAMES, values, strict=True))


@pytest.mark.parametrize(("causal", "window_size"), [(True, (64, 0)), (False, (64, 64))])
def test_n6_window_65_is_flash_attns_window_size_64(causal, window_size):
    docs = tasp.Documents.of([700], causal=causal, window=65)
    assert docs.window_size == window_size
    inputs = Inputs.random(700, 4, 2, 16, dtype=torch.float64)
    exact = dense(inputs, window_size, 0.25)
    found = oracle(*inputs.tensors()[:3], docs, dout=inputs.dout)
    mine, _ = run_rank(0, None, tasp.plan(docs, 1), inputs)
    for name, ours in zip(NAMES, mine, strict=True):
        torch.testing.assert_close(found[name], exact[name], rtol=0, atol=1e-11)
        torch.testing.assert_close(ours.double(), exact[name], rtol=0, atol=1e-11)


def test_n6_queries_and_keys_of_different_lengths_are_refused():
    p = tasp.plan(tasp.Documents.of([8], window=3), 1)
    q, k = torch.zeros(8, 2, 4), torch.zeros(6, 2, 4)
    with pytest.raises(tasp.PlanError, match=r"have \[8, 6, 6\] tokens"):
        tasp.attention(q, k, k, p)


@pytest.mark.parametrize("window", [12, 300])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_that_hides_nothing_keeps_the_plain_kernels_bits(window, causal):
    inputs = Inputs.random(30, 4, 2, 16)
    lengths = [12, 0, 7, 11]
    docs = tasp.Documents.of(lengths, causal=causal, window=window)
    mine, _ = run_rank(0, None, tasp.plan(docs, 1), inputs)
    q, k, v, dout = inputs.tensors()
    plain = oracle(q, k, v, tasp.Documents.of(lengths, causal=causal), dout=dout, kernel=AtenCpu())
    assert all(torch.equal(x, plain[name]) for name, x in zip(NAMES, mine, strict=True))


def test_two_runs_give_the_same_bits():
    docs = tasp.Documents.of([137, 341, 89], window=50)
    plans = [
        tasp.plan(docs, 4, schedule=s, layout=lay, machine="mesh2x2" if n else None)
        for s, n in SCHEDULES
        for lay in ("zigzag", "striped")
    ]
    inputs = Inputs.random(docs.total, 4, 2, 16)
    first, second = (tasp.launch(results_of, 4, plans, inputs) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(
            torch.equal(x, y) for r, s in zip(a, b, strict=True) for x, y in zip(r, s, strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [3, 64])
def test_narrow_dtypes_stay_as_exact_as_one_rounding(dtype, window):
    docs = tasp.Documents.of([137, 341, 89], window=window)
    inputs = Inputs.random(docs.total, 4, 2, 16, dtype=dtype)
    p = tasp.plan(docs, 1)
    assert Reference(inputs, docs).errors([run_rank(0, None, p, inputs)[0]], p).ok


# --- kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel", [Math(), AtenCpu(), VarlenKernel(StandIn())], ids=lambda k: k.name
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_every_kernel_computes_mirrored_squares(kernel, causal, window):
    docs = tasp.Documents.of([50, 1, 0, 33], causal=causal, window=window)
    inputs = Inputs.random(docs.total, 4, 2, 8)
    context = execute.Context(tasp.plan(docs, 1), 0, None, kernel, 0.25)
    q, k, v, dout = inputs.tensors()
    out, lse = execute.run_forward(context, q, k, v)
    found = [out, lse, *execute.run_backward(context, dout, q, k, v, out, lse)]
    exact = oracle(q, k, v, docs, dout=dout, scale=0.25)
    for name, mine in zip(NAMES, found, strict=True):
        torch.testing.assert_close(mine.double(), exact[name], rtol=0, atol=1e-5)


def test_kernels_without_the_window_are_refused():
    docs = tasp.Documents.of([9], window=3)
    q = torch.zeros(9, 1, 4)
    for kernel in (AtenCpu(), Math(), Math(4)):
        with pytest.raises(tasp.PlanError, match=r"takes no window=3; use Math\(window\)"):
            oracle(q, q, q, docs, kernel=kernel)


# --- what travels, and what is computed -----------------------------------------------------------


def computes(p: tasp.Plan):
    for rank, backward in itertools.product(range(p.ranks), (False, True)):
        steps = tasp.lower(p, rank, backward=backward).steps
        yield from (step.compute for step in steps if step.compute)


@pytest.mark.parametrize("layout", list(tasp.layouts()))
@pytest.mark.parametrize("causal", [True, False])
def test_two_calls_a_step_no_empty_row_and_nothing_hidden_is_computed(layout, causal):
    """N3: a row that sees no key of a call is not in it, so no kernel's convention matters."""
    docs = tasp.Documents.of([900, 0, 1, 333], causal=causal, window=128)
    for schedule, nodes in SCHEDULES:
        p = tasp.plan(docs, 4, schedule=schedule, layout=layout, machine=nodes and "mesh2x2")
        pairs = 0
        for compute in computes(p):
            assert len(compute.calls) <= 2
            for call in compute.calls:
                q, k = call.sequences.q_n, call.sequences.k_n
                assert q.min() > 0
                assert k.min() > 0
                assert not call.causal or (q == k).all()
                pairs += int(np.sum(q * (q + 1) // 2 if call.causal else q * k))
        assert pairs == 2 * docs.num_pairs  # forward and backward


def tokens_in(p: tasp.Plan) -> list[int]:
    hops = p.hops()
    return (
        np.bincount(hops.dst, weights=p.tokens_moved(hops), minlength=p.ranks).astype(int).tolist()
    )


def test_sap_moves_only_a_windows_reach_over_each_border():
    docs = tasp.Documents.of([4096], window=128)
    assert tokens_in(tasp.plan(docs, 4, schedule="sap", layout="contiguous")) == [0, 127, 127, 127]
    both = tasp.Documents.of([4096], causal=False, window=128)
    assert tokens_in(tasp.plan(both, 4, schedule="sap", layout="contiguous")) == [
        127,
        254,
        254,
        127,
    ]
    # two blocks a rank, three borders to each side but the fold in the middle
    assert tokens_in(tasp.plan(docs, 4, schedule="sap", layout="zigzag")) == [127, 254, 254, 127]
    # every other stripe sees nothing of a token: window 2 of 4 ranks, one neighbour only
    two = tasp.plan(tasp.Documents.of([400], window=2), 4, schedule="sap", layout="striped")
    assert sorted(set(zip(*(x.tolist() for x in two.hops()[1:3]), strict=True))) == [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 0),
    ]


def test_wrong_windows_are_seen(monkeypatch):
    """A band one token too wide or too narrow fails the checker and the comparison with float64."""
    docs = tasp.Documents.of([300], window=20)
    inputs = Inputs.random(300, 2, 2, 8)
    judge, good = Reference(inputs, docs), tasp.plan(docs, 1)
    assert judge.errors([run_rank(0, None, good, inputs)[0]], good).ok
    for low, high in ((-20, 0), (-18, 0), (-19, 1)):
        wrong = partial(edges, low=low, high=high)
        monkeypatch.setattr(
            tiles, "edges", lambda lead, stride, *_, wrong=wrong: wrong(lead, stride)
        )
        execute.program_of.cache_clear()
        p = tasp.plan(docs, 1)
        assert not judge.errors([run_rank(0, None, p, inputs)[0]], p).ok
        with pytest.raises(tasp.PlanError, match="pairs are computed"):
            tasp.check(p)
    execute.program_of.cache_clear()


def test_plans_keep_their_window():
    docs = tasp.Documents.of([300], window=20)
    p = tasp.plan(docs, 4)
    assert "causal in a window of 20" in p.summary()
    assert tasp.Plan.from_json(p.to_json()) == p
    assert p.fingerprint() != tasp.plan([300], 4).fingerprint()
    assert tasp.supports(docs, 4, schedule="sap")
    assert not tasp.supports([300], 4, mask="chunked")


def test_the_command_line_takes_a_window():
    command = ["check", "--docs", "4096", "--window", "128", "--json"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0
    assert json.loads(found.stdout)["pairs"] == tasp.Documents.of([4096], window=128).num_pairs
    with pytest.raises(tasp.PlanError, match="window must be a whole number >= 1"):
        CliRunner().invoke(app, ["plan", "--window", "0"], catch_exceptions=False)
