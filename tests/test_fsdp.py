"""FSDP2, DDP, DeviceMesh, torch.compile and activation checkpointing around attention; S2, G5."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import torch._dynamo  # once here, not once in every forked rank
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import tasp_core as tasp
from tasp_core.integrations.fsdp import add_up, flat, shard_parameters
from tasp_core.kernels.reference import oracle
from tasp_core.lab.training.llama import TinyLlama
from tasp_core.runtime.exchange import GlooExchange

ROWS = (tasp.Documents.of([13, 1, 29, 7]), tasp.Documents.of([20, 33]))  # of unequal tokens
CALLS = [(dist, name) for name in ("all_gather", "all_reduce")] + [
    (GlooExchange, name) for name in ("start", "handshake")
]


def net(recompute="none"):
    torch.manual_seed(0)
    return TinyLlama(dim=32, layers=2, heads=4, kv_heads=2, recompute=recompute)


def token_ids(row):
    generator = torch.Generator().manual_seed(row)
    return torch.randint(0, 256, (ROWS[row].total,), generator=generator)


def batch(row, p, rank, group):
    """A rank's ids, labels, positions and attention of a row."""
    labels = tasp.next_token_labels(token_ids(row), p.docs)
    labels[:9] = -100
    local, labels = (tasp.shard(x, p, rank) for x in (token_ids(row), labels))
    positions = torch.from_numpy(p.positions(rank))
    return local, labels, positions, lambda q, k, v: tasp.attention(q, k, v, p, group)


def steps(model, batches, group=None, *, scale=1, count=3):
    """(losses, gradient norms) of a few optimiser steps; loss = sum / count over the group's ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    found = []
    for _ in range(count):
        parts = [
            tasp.token_loss(model(ids, positions, attend), labels, group)
            for ids, labels, positions, attend in batches
        ]
        loss = sum(p[0] for p in parts) / sum(p[1] for p in parts)
        optimizer.zero_grad()
        (loss * scale).backward()
        norm = torch.nn.utils.get_total_norm([w.grad for w in model.parameters()])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        total = loss.detach().clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        found += [total.item(), norm.item()]
    return found


def spread(rank, group, wrap):
    """The same steps with rows over dp and each row's tokens over sp, 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    everyone, row, at = flat(mesh, "dp", "sp"), mesh.get_local_rank("dp"), mesh.get_local_rank("sp")
    mine = batch(row, tasp.plan(ROWS[row], 2), at, mesh["sp"].get_group())
    model = net()
    if wrap == "fsdp":
        shard_parameters(model, model.blocks, everyone)
    else:
        model = DistributedDataParallel(model, process_group=everyone.get_group())
        model = add_up(model) if wrap == "ddp" else model
    scale = 4 if wrap == "ddp averaging" else 1
    return steps(model, [mine], everyone.get_group(), scale=scale)


@pytest.mark.parametrize("wrap", ["fsdp", "ddp", "ddp averaging"])
def test_s2_two_rows_on_two_ranks_each_are_one_process(wrap):
    alone = steps(net(), [batch(i, tasp.plan(docs, 1), 0, None) for i, docs in enumerate(ROWS)])
    for found in tasp.launch(spread, 4, wrap):
        assert found == pytest.approx(alone, rel=1e-5)
    wrong = steps(net(), [batch(0, tasp.plan(ROWS[0], 1), 0, None)])
    assert wrong != pytest.approx(alone, rel=1e-3)  # the second row matters


def test_bf16_mixed_precision_keeps_weights_and_reductions_in_float32():
    def work(rank, group):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
        model, seen = net(), []
        shard_parameters(model, model.blocks, mesh, dtype=torch.bfloat16)
        ids, labels, positions, attend = batch(0, tasp.plan(ROWS[0], 2), rank, group)

        def watched(q, k, v):
            seen.append(q.dtype)
            return attend(q, k, v)

        found = steps(model, [(ids, labels, positions, watched)], group)
        return (
            found,
            set(seen),
            {w.dtype for w in model.parameters()},
            {w.grad.dtype for w in model.parameters()},
        )

    alone = steps(net(), [batch(0, tasp.plan(ROWS[0], 1), 0, None)])
    for found, seen, weights, grads in tasp.launch(work, 2):
        assert (seen, weights, grads) == ({torch.bfloat16}, {torch.float32}, {torch.float32})
        assert found == pytest.approx(alone, rel=3e-2)
        assert found != pytest.approx(alone, rel=1e-5)


# ---- G5


def test_g5_sixteen_ranks_as_tp_by_sp_by_dp():
    docs = (tasp.Documents.of([9, 23, 1]), tasp.Documents.of([40]))
    torch.manual_seed(1)
    rows = [[torch.randn(d.total, n, 8) for n in (4, 2, 2)] for d in docs]

    def work(rank, group):
        mesh = init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("dp", "tp", "sp"))
        dp, tp, sp = (mesh.get_local_rank(name) for name in ("dp", "tp", "sp"))
        p = tasp.plan(docs[dp], 4, schedule="wave" if dp else "tasp")
        heads = [x.chunk(2, dim=1)[tp] for x in rows[dp]]
        q, k, v = (tasp.shard(x, p, sp).requires_grad_() for x in heads)
        out = tasp.attention(q, k, v, p, mesh["sp"].get_group())
        out.backward(torch.ones_like(out))
        return (dp, tp), p, sp, (out.detach(), q.grad, k.grad, v.grad)

    answers = tasp.launch(work, 16, timeout_s=100)
    for dp, tp in itertools.product(range(2), range(2)):
        mine = sorted((a for a in answers if a[0] == (dp, tp)), key=lambda a: a[2])
        found = [tasp.unshard([a[3][i] for a in mine], mine[0][1]) for i in range(4)]
        q, k, v = (x.chunk(2, dim=1)[tp] for x in rows[dp])
        exact = oracle(q, k, v, docs[dp], dout=torch.ones_like(q))
        for name, value in zip(("out", "dq", "dk", "dv"), found, strict=True):
            torch.testing.assert_close(value.double(), exact[name], rtol=1e-5, atol=1e-5)


# ---- torch.compile and checkpointing


def gradients(model, mine, group, p):
    ids, labels, positions, attend = mine
    total, count = tasp.token_loss(model(ids, positions, attend), labels, group)
    (total / count).backward()
    values = [total.detach(), *(w.grad for w in model.parameters())]
    for value in values if p.ranks > 1 else ():
        dist.all_reduce(value, group=group)
    return values


def compiled(rank, group, plans):
    """Gradients by a compiled model, plan after plan, and how often attention itself was called."""
    found, calls, real = [], [], tasp.attention
    model = net()
    fast = torch.compile(model, backend="aot_eager")
    for p in plans:
        ids, labels, positions, _ = batch(0, p, rank, group)

        def attend(q, k, v, p=p):
            return real(q, k, v, p, group)

        model.zero_grad()
        with torch.autograd.profiler.profile() as profile:
            found.append(gradients(fast, (ids, labels, positions, attend), group, p))
        calls.append(sum(e.name == "Attention" for e in profile.function_events))
        found[-1] = [x.clone() for x in found[-1]]
    return found, calls


def test_a_compiled_model_has_the_same_gradients():
    one = tasp.plan(ROWS[0], 1)
    exact = gradients(net(), batch(0, one, 0, None), None, one)
    plans = [tasp.plan(ROWS[0], 2, layout=layout) for layout in ("zigzag", "balanced")]
    for found, calls in tasp.launch(compiled, 2, plans):
        assert calls == [2, 2]  # one a layer, run as it is, whatever the plan
        for values in found:
            torch.testing.assert_close(values, exact, rtol=1e-5, atol=1e-6)


def checkpointing(rank, group, cases, wrap):
    """For each case and plan: gradients, and how often each collective was called."""
    counts = Counter()

    def counting(name, real):
        def call(*args, **kwargs):
            counts[name] += 1
            return real(*args, **kwargs)

        return call

    for owner, name in CALLS:
        setattr(owner, name, counting(name, getattr(owner, name)))
    found = []
    for recompute, p in cases:
        model = net(recompute)
        if wrap:
            shard_parameters(
                model, model.blocks, init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
            )
        counts.clear()
        ids, labels, positions, attend = batch(0, p, rank, group)
        total, count = tasp.token_loss(model(ids, positions, attend), labels, group)
        (total / count).backward()
        called = dict(counts)
        grads = [w.grad.full_tensor() if wrap else w.grad for w in model.parameters()]
        for grad in grads if not wrap else ():
            dist.all_reduce(grad, group=group)
        found.append((grads, called))
    return found


@pytest.mark.parametrize("wrap", [False, True])
def test_recomputation_does_not_exchange_again_when_attention_is_kept(wrap):
    plans = [tasp.plan(ROWS[0], 2), tasp.plan(ROWS[0], 2, intra=2)]  # rings; Ulysses
    cases = [(recompute, p) for p in plans for recompute in ("none", "kept", "all")]
    one = tasp.plan(ROWS[0], 1)
    exact = gradients(net(), batch(0, one, 0, None), None, one)[1:]
    for found in tasp.launch(checkpointing, 2, cases, wrap):
        for grads, _ in found:
            torch.testing.assert_close(grads, exact, rtol=1e-5, atol=1e-6)
        counts = [called for _, called in found]
        for plain, kept, again in (counts[:3], counts[3:]):
            assert kept == plain
            assert sum(again.values()) > sum(plain.values())
