"""Kernels: the oracle against autograd, torch's CPU kernel, and the door for packed GPU kernels.

No GPU is needed: a stand-in with a GPU kernel's interface (rows end to end, cumulative lengths)
runs real lowered programs, so that gathering, rounds and padding are tried on a CPU.
"""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
import torch

import tasp_core as tasp
from tasp_core import kernels
from tasp_core.kernels import views
from tasp_core.kernels.aten import AtenCpu
from tasp_core.kernels.reference import Math, oracle
from tasp_core.kernels.resolve import resolve
from tasp_core.kernels.varlen import VarlenKernel
from tasp_core.lab.bench.accuracy import NAMES, Inputs, Reference
from tasp_core.lowering.program import Call
from tasp_core.runtime import execute
from tasp_core.sequence.tiles import Sequences


def by_autograd(inputs, docs, scale):
    """Dense masked attention of the row in float64, gradients by autograd."""
    q, k, v = (x.double().requires_grad_() for x in inputs.tensors()[:3])
    group = q.shape[1] // k.shape[1]
    doc = torch.from_numpy(docs.document_of(np.arange(docs.total)))
    mask = doc[:, None] == doc[None, :]
    if docs.causal:
        mask &= torch.ones_like(mask).tril()
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
    scores = scores.masked_fill(~mask, -torch.inf)
    out = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v.repeat_interleave(group, 1))
    out.backward(inputs.dout.double())
    return dict(zip(NAMES, (out, scores.logsumexp(-1).T, q.grad, k.grad, v.grad), strict=True))


CASES = list(
    itertools.product(
        ([50, 1, 1, 1, 1, 0, 33], [7] * 9, [700]), (True, False), ((4, 4, 16), (6, 1, 8))
    )
)


@pytest.mark.parametrize(("lengths", "causal", "sizes"), CASES)
def test_oracle_equals_autograd(lengths, causal, sizes):
    docs = tasp.Documents.of(lengths, causal=causal)
    inputs = Inputs.random(docs.total, *sizes)
    exact = by_autograd(inputs, docs, 0.3)
    q, k, v, dout = inputs.tensors()
    found = oracle(q, k, v, docs, dout=dout, scale=0.3)
    for name in NAMES:
        torch.testing.assert_close(found[name], exact[name], rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("lengths", "causal", "sizes"), CASES)
def test_cpu_kernel_is_as_exact_as_its_dtype(lengths, causal, sizes, dtype):
    docs = tasp.Documents.of(lengths, causal=causal)
    inputs = Inputs.random(docs.total, *sizes, dtype=dtype)
    q, k, v, dout = inputs.tensors()
    exact = oracle(q, k, v, docs, dout=dout)
    found = oracle(q, k, v, docs, dout=dout, kernel=AtenCpu())
    for name in NAMES:
        bound = 100 * torch.finfo(dtype).eps * exact[name].abs().max()
        assert (found[name].double() - exact[name]).abs().max() <= bound


class StandIn:
    """A packed kernel as on GPUs; insists on what they insist on."""

    name, head_dim_multiple = "stand-in", 8

    @staticmethod
    def _call(q, k, v, cu_q, cu_k, max_q, max_k, causal):
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert cu_q[0] == cu_k[0] == 0
        assert (int(cu_q[-1]), int(cu_k[-1])) == (len(q), len(k))
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert q.shape[-1] % 8 == 0
        q_lo, q_n = cu_q[:-1].long().numpy(), cu_q.diff().long().numpy()
        k_lo, k_n = cu_k[:-1].long().numpy(), cu_k.diff().long().numpy()
        assert (max_q, max_k) == (q_n.max(), k_n.max())
        assert not causal or (q_n == k_n).all()
        return Call(causal, Sequences(q_lo, q_n, k_lo, k_n), (), ())

    def forward(self, q, k, v, cu_q, cu_k, max_q, max_k, causal, scale):
        call = self._call(q, k, v, cu_q, cu_k, max_q, max_k, causal)
        out, lse = Math().forward(q, k, v, call, scale)
        return out.to(q.dtype), lse

    def backward(self, dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale):
        call = self._call(q, k, v, cu_q, cu_k, max_q, max_k, causal)
        return Math().backward(dout, q, k, v, out, lse, call, scale)


def in_one_process(plan, inputs):
    """All ranks of a plan without a network: every rank's keys, whole, as one gathered buffer."""
    context = execute.Context(plan, 0, None, VarlenKernel(StandIn()), 0.25)
    q, k, v, dout = (tasp.shard(x, plan, 0) for x in inputs.tensors())
    out, lse = execute.run_forward(context, q, k, v)
    return [out, lse, *execute.run_backward(context, dout, q, k, v, out, lse)]


@pytest.mark.parametrize("lengths", [[50, 1, 0, 33], [7] * 9, [1] * 20])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", [(8, 8), (12, 20), (20, 12)])
def test_packed_kernel_pads_head_dims_and_runs_a_row(lengths, causal, dims):
    docs = tasp.Documents.of(lengths, causal=causal)
    base = Inputs.random(docs.total, 4, 2, max(dims))
    inputs = Inputs(
        base.q[..., : dims[0]],
        base.k[..., : dims[0]],
        base.v[..., : dims[1]],
        base.dout[..., : dims[1]],
    )
    found = in_one_process(tasp.plan(docs, 1), inputs)
    exact = by_autograd(inputs, docs, 0.25)
    for name, mine in zip(NAMES, found, strict=True):
        torch.testing.assert_close(mine.double(), exact[name], rtol=0, atol=1e-5)


def on_stand_in(rank, group, plans, inputs):
    kernels.resolve.cache_clear()
    kernels.resolve = lambda *_: VarlenKernel(StandIn())
    from tasp_core.lab.bench.accuracy import run_rank

    return [run_rank(rank, group, p, inputs)[0] for p in plans]


def test_packed_kernel_gathers_and_adds_in_rounds_on_four_ranks():
    docs = tasp.Documents.of([137, 2, 201, 60])
    inputs = Inputs.random(docs.total, 4, 2, 12)
    plans = [
        tasp.plan(docs, 4, schedule=s, layout=lay, machine=m)
        for s, m in (("ring", None), ("tasp", None), ("all_gather", None), ("wave", "mesh2x2"))
        for lay in tasp.layouts()
    ]
    judge = Reference(inputs, docs)
    by_rank = tasp.launch(on_stand_in, 4, plans, inputs)
    for i, p in enumerate(plans):
        errors = judge.errors([r[i] for r in by_rank], p)
        assert errors.ok, (p.summary(), errors)


def test_sequences_at_even_distances_run_as_one_batch(monkeypatch):
    sizes = []
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def counted(q, *args, **kwargs):
        sizes.append(q.shape[0])
        return op(q, *args, **kwargs)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", counted)
    docs = tasp.Documents.of([5, 5, 5, 5, 9, 2, 2])
    inputs = Inputs.random(docs.total, 2, 2, 8)
    oracle(*inputs.tensors()[:3], docs, kernel=AtenCpu())
    assert sizes == [4, 1, 2]


def test_the_door_says_what_it_cannot_do():
    assert resolve("auto", "cpu", torch.bfloat16).name == "aten"
    with pytest.raises(
        tasp.PlanError, match="no kernel 'cudnn'; known are auto, math, aten, flash"
    ):
        resolve("cudnn", "cpu", torch.float32)
    with pytest.raises(ValueError, match="flash"):
        resolve("flash", "cpu", torch.bfloat16)
    with pytest.raises(tasp.PlanError, match="takes fp16 and bf16"):
        resolve("aten", "cuda", torch.float32)
    with pytest.warns(UserWarning, match="slow kernel 'math'"):
        assert resolve.__wrapped__("auto", "cuda", torch.float32).name == "math"


def test_what_is_remembered_for_a_program_goes_with_it():
    array = np.arange(3)
    views.device_cached(array, "rows", torch.device("cpu"), lambda: torch.zeros(3))
    key = (id(array), "rows", torch.device("cpu"))
    assert key in views._MADE
    del array
    gc.collect()
    assert key not in views._MADE


def test_indices_of_programs_do_not_pile_up():
    inputs = Inputs.random(200, 2, 2, 8)
    sizes = []
    for length in (3, 4, 5):
        docs = tasp.Documents.of([length] * (200 // length) + [200 % length])
        in_one_process(tasp.plan(docs, 1), inputs)
        execute.program_of.cache_clear()
        gc.collect()
        sizes.append(len(views._MADE))
    assert sizes[0] == sizes[1] == sizes[2]
