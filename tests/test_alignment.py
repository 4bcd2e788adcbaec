"""What GPU kernels are given starts, row by row and head by head, on 16-byte borders.

They load 16 bytes at once: from elsewhere it is a misaligned address, or other numbers. A stand-in with
a GPU kernel's interface looks at every tensor that it gets, in both passes, on real programs.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from test_kernels import StandIn

import tasp_core as tasp
from tasp_core.kernels.reference import oracle
from tasp_core.kernels.varlen import VarlenKernel
from tasp_core.kernels.views import aligned
from tasp_core.lab.bench.accuracy import Inputs
from tasp_core.lab.bench.one_process import run_in_process
from tasp_core.runtime import execute

DIMS = (8, 20, 24, 64, 68, 72)
DTYPES = (torch.float16, torch.bfloat16)
BOUND = {torch.float16: 0.02, torch.bfloat16: 0.15}


class Careful(StandIn):
    """A stand-in that takes rows on 16-byte borders only; `seen` counts tensors."""

    def __init__(self) -> None:
        self.seen = 0

    def look(self, lse, **tensors):
        for name, x in tensors.items():
            where = [x.data_ptr(), *(n * x.itemsize for n in x.stride()[:-1])]
            assert x.stride(-1) == 1, name
            assert not any(n % 16 for n in where), (name, x.shape, x.stride(), x.data_ptr() % 16)
            self.seen += 1
        assert lse is None or lse.data_ptr() % lse.itemsize == 0  # read number by number

    def forward(self, q, k, v, *rest):
        self.look(None, q=q, k=k, v=v)
        return super().forward(q, k, v, *rest)

    def backward(self, dout, q, k, v, out, lse, *rest):
        self.look(lse, dout=dout, q=q, k=k, v=v, out=out)
        grads = super().backward(dout, q, k, v, out, lse, *rest)
        return tuple(g.to(q.dtype) for g in grads)


def inputs_of(tokens, heads, kv_heads, dim, value_dim, dtype):
    base = Inputs.random(tokens, heads, kv_heads, max(dim, value_dim), dtype=dtype)
    cut = zip(base.tensors(), (dim, dim, value_dim, value_dim), strict=True)
    return Inputs(*(x[..., :n].contiguous() for x, n in cut))


def assert_close(found, inputs, docs):
    q, k, v, dout = inputs.tensors()
    exact = oracle(q, k, v, docs, dout=dout)
    for name in ("out", "dq", "dk", "dv"):
        worst = float((found[name].double() - exact[name]).abs().max())
        assert worst < BOUND[q.dtype] * max(1.0, float(exact[name].abs().max())), (name, worst)


def passes(context, shards):
    q, k, v, dout = shards
    q = aligned(q)
    out, lse = execute.run_forward(context, q, k, v)
    grads = execute.run_backward(context, aligned(dout), q, k, v, out.to(q.dtype), lse)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (1, 1)])
def test_every_tensor_of_every_pair_of_head_dims(heads, dtype):
    docs = tasp.Documents.of([13, 1, 9])
    for dim, value_dim in itertools.product(DIMS, DIMS):
        kernel = Careful()
        inputs = inputs_of(docs.total, *heads, dim, value_dim, dtype)
        plan = tasp.plan(docs, 1)
        context = execute.Context(plan, 0, None, VarlenKernel(kernel), dim**-0.5)
        assert_close(passes(context, inputs.tensors()), inputs, docs)
        assert kernel.seen == 3 + 5, (dim, value_dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(20, 24), (24, 20), (68, 72), (72, 68), (20, 20), (4, 100)])
@pytest.mark.parametrize(("schedule", "layout"), [("ring", "zigzag"), ("mesh", "contiguous")])
def test_rows_that_travelled_and_queries_of_other_ranks(schedule, layout, dims, dtype):
    docs = tasp.Documents.of([37, 1, 22, 3])
    plan = tasp.plan(docs, 4, schedule=schedule, layout=layout)
    inputs, kernel = inputs_of(docs.total, 4, 2, *dims, dtype), Careful()
    ranks = run_in_process(plan, inputs, VarlenKernel(kernel))
    found = [tasp.unshard(list(pieces), plan) for pieces in zip(*ranks, strict=True)]
    names = ("out", "lse", "dq", "dk", "dv")
    assert_close(dict(zip(names, found, strict=True)), inputs, docs)
    assert kernel.seen > 4 * 8


def test_the_stand_in_refuses_what_lies_elsewhere():
    kernel, kv = Careful(), torch.zeros(5, 2, 44, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="k"):
        kernel.look(None, k=kv[..., :24])  # rows of 88 bytes
    with pytest.raises(AssertionError, match="v"):
        kernel.look(None, v=torch.zeros(5, 2, 48, dtype=torch.bfloat16)[..., 4:28])
    kernel.look(None, k=aligned(kv[..., :24]), v=torch.zeros(5, 2, 48, dtype=torch.half)[..., 24:])


@pytest.mark.parametrize("offset", [2, 6, 8])
def test_memory_of_other_libraries_may_begin_anywhere(offset):
    """As from DLPack or a buffer: the tensor's own storage begins off a border, at offset 0 of it."""
    memory = bytearray(4096)
    base = torch.frombuffer(memory, dtype=torch.bfloat16, count=512).data_ptr() % 16
    start = (offset - base) % 16
    x = torch.frombuffer(memory, dtype=torch.bfloat16, offset=start, count=256).view(4, 4, 16)
    assert (x.storage_offset(), x.data_ptr() % 16) == (0, offset)
    assert aligned(x).data_ptr() % 16 == 0
    assert torch.equal(aligned(x), x)
    whole = torch.zeros(4, 4, 16, dtype=torch.bfloat16)
    assert aligned(whole) is whole
    fake = torch.empty(4, 4, 16, device="meta", dtype=torch.bfloat16)
    assert aligned(fake) is fake
