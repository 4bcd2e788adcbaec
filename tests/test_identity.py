"""Every pass says what it is before it exchanges; ranks that disagree are all told, and no one waits.

Also what stands beside it: the backend that carries a device's tensors, the order of the rows, autocast.
"""

from __future__ import annotations

import gc
import re
import time
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from spread import spread
from torch.nn.functional import scaled_dot_product_attention

import tasp_core as tasp
from tasp_core.lab.bench.accuracy import Inputs, Reference, run_rank
from tasp_core.lowering.program import Message
from tasp_core.runtime import exchange, process_group
from tasp_core.runtime.launch import RankError

DOCS = tasp.Documents.of([137, 201, 46])
INPUTS = Inputs.random(DOCS.total, 4, 2, 8)
PLANS = {
    "p2p": tasp.plan(DOCS, 4, schedule="tasp"),
    "all_to_all": tasp.plan(DOCS, 4, schedule="tasp", schedule_options={"exchange": "all_to_all"}),
    "all_gather": tasp.plan(DOCS, 4, schedule="all_gather"),
    "Ulysses and ring": tasp.plan(DOCS, 4, schedule="ring", intra=2),
    "Ulysses alone": tasp.plan(DOCS, 4, intra=4),
    "moved queries": tasp.plan(DOCS, 4, schedule="helper", layout="contiguous"),
}
THREE = tasp.plan(DOCS, 3)


def shards(p, rank, grad=True):
    return [tasp.shard(x, p, rank).requires_grad_(grad) for x in INPUTS.tensors()[:3]]


def said(error, fn):
    with pytest.raises(error) as caught:
        fn()
    return str(caught.value)


# ---- passes in another order


def swapped(rank, group, p):
    """Two calls; the last rank goes back through them in the other order."""
    a, b = (tasp.attention(*shards(p, rank), p, group) for _ in range(2))
    order = (b, a) if rank == 3 else (a, b)
    return said(tasp.PlanError, lambda: [x.sum().backward() for x in order])


@pytest.mark.parametrize("kind", list(PLANS))
def test_backward_passes_in_another_order_are_refused_on_every_rank(kind):
    for text in tasp.launch(swapped, 4, PLANS[kind], timeout_s=30):
        assert "rank 3 has the backward pass of call 2" in text
        assert "the others have the backward pass of call 1" in text


def forward_instead(rank, group, p):
    """One rank skips a backward pass and goes on with the next forward pass."""
    out = tasp.attention(*shards(p, rank), p, group)

    def go():
        if rank != 1:
            out.sum().backward()
        tasp.attention(*shards(p, rank), p, group)

    return said(tasp.PlanError, go)


@pytest.mark.parametrize("kind", list(PLANS))
def test_a_backward_pass_never_meets_a_forward_pass(kind):
    for text in tasp.launch(forward_instead, 4, PLANS[kind], timeout_s=30):
        assert "rank 1 has the forward pass; the others have the backward pass of call 1" in text


def twice(rank, group, p):
    """One rank goes back twice through the same call, the others through two calls."""
    a, b = (tasp.attention(*shards(p, rank), p, group) for _ in range(2))

    def go():
        b.sum().backward(retain_graph=True)
        (b if rank == 2 else a).sum().backward()

    return said(tasp.PlanError, go)


@pytest.mark.parametrize("kind", ["all_to_all", "Ulysses and ring", "p2p"])
def test_a_second_pass_through_one_call_is_not_taken_for_another(kind):
    for text in tasp.launch(twice, 4, PLANS[kind], timeout_s=30):
        assert "rank 2 has the backward pass of call 2" in text


def one_without_gradients(rank, group, p):
    return said(tasp.PlanError, lambda: tasp.attention(*shards(p, rank, grad=rank != 1), p, group))


def test_a_rank_without_gradients_among_others_is_refused_at_once():
    for text in tasp.launch(one_without_gradients, 4, PLANS["p2p"], timeout_s=30):
        assert "q, k or v require gradients: rank 1 has False; the others have True" in text


def right_orders(rank, group, plans):
    """Calls of several plans, backward in one order on all ranks, is no fault."""
    found = []
    for p in plans:
        outs, inputs = [], []
        for _ in range(2):
            x = shards(p, rank)
            inputs.append(x)
            outs.append(tasp.attention(*x, p, group))
        for out in outs:
            out.backward(tasp.shard(INPUTS.dout, p, rank))
        assert all(map(torch.equal, *([y.grad for y in x] for x in inputs)))
        found.append([outs[0].detach(), *(x.grad for x in inputs[0])])
    return found


def test_the_same_order_on_all_ranks_is_right_in_every_kind_of_exchange():
    plans = list(PLANS.values())
    by_rank = tasp.launch(right_orders, 4, plans, timeout_s=60)
    alone = tasp.plan(DOCS, 1)
    wanted = tasp.launch(right_orders, 1, [alone])[0][0]
    for i, p in enumerate(plans):
        whole = [tasp.unshard([r[i][j] for r in by_rank], p) for j in range(4)]
        for found, want in zip(whole, wanted, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


# ---- as on NCCL: no tags, and no host waits for the device


class AsOnNccl(exchange.NcclExchange):
    """As over NCCL in all but the messages themselves, which go over gloo."""

    transfer = exchange.GlooExchange.transfer
    all_to_all = exchange.GlooExchange.all_to_all


def as_on_nccl(monkeypatch):
    monkeypatch.setattr(exchange, "GlooExchange", AsOnNccl)


def two_known_plans(rank, group, first, second):
    for p in (first, second):
        run_rank(rank, group, p, INPUTS)
    mine = second if rank == 1 else first
    return said(tasp.PlanError, lambda: run_rank(rank, group, mine, INPUTS))


def test_two_plans_that_were_agreed_on_earlier_do_not_meet(monkeypatch):
    as_on_nccl(monkeypatch)
    first, second = PLANS["p2p"], tasp.plan(DOCS.lengths[::-1], 4, schedule="tasp")
    for text in tasp.launch(two_known_plans, 4, first, second, timeout_s=30):
        assert "documents: rank 1 has" in text


def one_with_an_error(rank, group, p):
    run_rank(rank, group, p, INPUTS)
    x = shards(p, rank)
    x[0] = x[0][: -1 if rank == 2 else None]
    return said(tasp.PlanError, lambda: tasp.attention(*x, p, group))


def test_an_error_on_one_rank_after_the_others_have_agreed_is_told_to_all(monkeypatch):
    as_on_nccl(monkeypatch)
    for text in tasp.launch(one_with_an_error, 4, PLANS["p2p"], timeout_s=30):
        assert "rank 2: q, k, v have" in text


class Order(AsOnNccl):
    """Writes down when it posts and when a handshake ends."""

    seen: ClassVar = []

    def post(self, *args):
        self.seen.append("post")
        return super().post(*args)

    def finish_handshake(self):
        if self._handshake.is_open:
            self.seen.append("agreed")
        super().finish_handshake()


def posted_before_agreed(rank, group, p):
    for _ in range(2):
        tasp.attention(*shards(p, rank, grad=False), p, group)
    return Order.seen


def test_a_new_plan_is_compared_before_the_first_message_and_a_known_one_beside_it(monkeypatch):
    monkeypatch.setattr(exchange, "GlooExchange", Order)
    for seen in tasp.launch(posted_before_agreed, 4, PLANS["p2p"], timeout_s=30):
        steps = seen.count("post") // 2
        assert seen[:2] == ["agreed", "post"]
        assert seen[1 + steps : 3 + steps] == ["post", "agreed"]


def several_calls(rank, group, p):
    """What happens in each of three calls' backward passes, and how many signatures are known then."""
    passes = []
    for _ in range(3):
        out = tasp.attention(*shards(p, rank), p, group)
        Order.seen.clear()
        out.sum().backward()
        passes.append((Order.seen[:2], len(process_group.state_of(group).agreed)))
    return passes


def test_the_backward_pass_of_a_later_call_is_a_known_one(monkeypatch):
    """Its signature names its call: it would be compared anew each time, and remembered for nothing."""
    monkeypatch.setattr(exchange, "GlooExchange", Order)
    for first, *later in tasp.launch(several_calls, 4, PLANS["p2p"], timeout_s=30):
        assert first == (["agreed", "post"], 2)  # a forward and a backward pass
        assert later == [(["post", "agreed"], 2)] * 2


def joins(rank, group, p):
    """Collectives on the group itself, before its first message and later."""
    seen, post, reduce = [], AsOnNccl.post, dist.all_reduce

    def posting(self, *args):
        seen.append("post")
        return post(self, *args)

    def reducing(tensor, group):
        seen.append(f"all_reduce of {tensor.numel()}")
        reduce(tensor, group=group)

    AsOnNccl.post, dist.all_reduce = posting, reducing
    for one in (p, p, tasp.plan([5], 4, schedule="ring")):
        q, k, v = (torch.randn(one.num_tokens(rank), 2, 8) for _ in range(3))
        tasp.attention(q, k, v, one, group)
    return seen


def test_all_ranks_make_nccls_communicator_before_the_first_message(monkeypatch):
    """NCCL makes it at a group's first call; a rank that has no message then would be missed."""
    as_on_nccl(monkeypatch)
    for seen in tasp.launch(joins, 4, PLANS["p2p"], timeout_s=30):
        assert seen[0] == "all_reduce of 1"
        assert set(seen[1:]) == {"post"}


# ---- what else all ranks call


def unlike(rank, group, p, kind):
    x = torch.randn(p.num_tokens(rank), 2, 3)
    odd = rank == 2
    calls = {
        "shift": lambda: tasp.roll(x, p, group, shift=1 + odd),
        "shape": lambda: tasp.gather(x[..., : 3 - odd], p, group),
        "dim": lambda: tasp.gather(x.movedim(0, 1) if odd else x, p, group, dim=int(odd)),
        "dtype": lambda: tasp.roll(x.double() if odd else x, p, group),
        "name": lambda: (tasp.roll if odd else tasp.gather)(x, p, group),
    }
    return said(tasp.LayoutError, calls[kind])


@pytest.mark.parametrize("kind", ["shift", "shape", "dim", "dtype", "name"])
def test_gather_and_roll_of_other_rows_or_shifts_are_refused(kind):
    for text in tasp.launch(unlike, 4, PLANS["p2p"], kind, timeout_s=30):
        assert "rank 2 has" in text


def back_in_another_order(rank, group, p, kind):
    a, b = (torch.ones(p.num_tokens(rank), requires_grad=True) for _ in range(2))
    call = tasp.gather if kind == "gather" else tasp.roll
    outs = [call(x, p, group) for x in (a, b)]
    if rank == 1:
        outs.reverse()
    return said(
        tasp.LayoutError, lambda: [(i + 1) * x.sum().backward() for i, x in enumerate(outs)]
    )


@pytest.mark.parametrize("kind", ["gather", "roll"])
def test_gather_and_roll_go_back_in_one_order(kind):
    for text in tasp.launch(back_in_another_order, 4, PLANS["p2p"], kind, timeout_s=30):
        assert f"rank 1 has the backward pass of {kind}, call 2" in text


def odd_tensor(rank, group, p, kind):
    x = torch.randn(p.num_tokens(rank), 2, requires_grad=kind == "grad" and rank == 1)
    odd = {"dim": (x, 5), "none": (None, 0), "scalar": (torch.tensor(1.0), 0), "grad": (x, 0)}[kind]
    local, dim = odd if rank == 1 else (x, 0)
    return said(tasp.LayoutError, lambda: tasp.gather(local, p, group, dim=dim))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dim", "rank 1: gather: a tensor of shape .* has no dim 5"),
        ("none", "rank 1: gather takes a tensor, got NoneType"),
        ("scalar", r"rank 1: gather: a tensor of shape \[\] has no dim 0"),
        ("grad", "gradients: rank 1 has True; the others have False"),
    ],
)
def test_what_one_rank_cannot_gather_is_told_to_all(kind, message):
    for text in tasp.launch(odd_tensor, 4, PLANS["p2p"], kind, timeout_s=30):
        assert re.search(message, text), text


# ---- the backend of a device's tensors


@pytest.mark.parametrize(
    ("config", "cpu", "cuda"),
    [
        ("cpu:gloo,cuda:nccl", "gloo", "nccl"),
        ("cuda:nccl", None, "nccl"),
        ("cpu:gloo,cuda:gloo", "gloo", "gloo"),
        ("cpu:gloo", "gloo", None),
        ("cuda:NCCL,cpu:gloo", "gloo", "nccl"),
    ],
)
def test_the_backend_is_that_of_the_device(config, cpu, cuda, monkeypatch):
    class Group:
        pass

    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    group = Group()
    assert process_group.backend_of(group, "cpu") == cpu
    assert process_group.over_nccl(group, "cuda") == (cuda == "nccl")
    refused = process_group.carriage_error(group, torch.device("cuda", 0))
    assert bool(refused) == (cuda != "nccl")
    if refused:
        assert "tensors are on cuda:0" in refused
        assert "'nccl' or 'cpu:gloo,cuda:nccl'" in refused
    assert bool(process_group.carriage_error(group, torch.device("cpu"))) == (cpu != "gloo")


def on_several_backends(rank, group):
    p = PLANS["p2p"]
    named = [dist.new_group(backend=b) for b in ("cpu:gloo", "gloo")]
    return [run_rank(rank, g, p, INPUTS)[0] for g in (group, *named)]


def test_groups_of_several_backends_run(monkeypatch):
    def init(*args, **kwargs):
        return real(*args[1:], **kwargs)

    real = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", init)  # without the name "gloo"
    judge = Reference(INPUTS, DOCS)
    by_rank = tasp.launch(on_several_backends, 4, timeout_s=60)
    for i in range(3):
        assert judge.errors([found[i] for found in by_rank], PLANS["p2p"]).ok


def in_uneven_groups(rank, group, p):
    """Ranks are in different numbers of groups, and each pair runs plans of its own."""
    members = [[0, 1], [2, 3], [0, 2]]
    groups = [dist.new_group(some) for some in members]
    result = []
    for some, pair in zip(members, groups, strict=True):
        if rank in some:
            place = dist.get_rank(pair)
            found = run_rank(place, pair, p, INPUTS)[0]
            wrong = tasp.plan(DOCS, 2, schedule="ring") if place else p
            result.append(
                (
                    found,
                    said(
                        tasp.PlanError, lambda a=pair, b=place, c=wrong: run_rank(b, a, c, INPUTS)
                    ),
                )
            )
            assert process_group.control_group(pair) is process_group.control_group(pair)
    return result


def test_ranks_in_different_numbers_of_groups_compare_in_each_of_them():
    p = tasp.plan(DOCS, 2, schedule="tasp")
    by_rank = tasp.launch(in_uneven_groups, 4, p, timeout_s=60)
    judge = Reference(INPUTS, DOCS)
    for ranks, turns in (((0, 1), (0, 0)), ((2, 3), (0, 0)), ((0, 2), (1, 1))):
        pair = [by_rank[r][t] for r, t in zip(ranks, turns, strict=True)]
        assert judge.errors([found for found, _ in pair], p).ok
        assert all("has ring" in text or "have ring" in text for _, text in pair)


class UsedByOne(torch.nn.Module):
    """A layer that rank 0 alone uses, before attention in which both take part."""

    def __init__(self, p, rank, group):
        super().__init__()
        torch.manual_seed(0)
        self.extra, self.all = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.args = p, rank, group

    def forward(self, q, k, v):
        p, rank, group = self.args
        q, k = self.all(q), self.all(k)
        return tasp.attention(self.extra(q) if rank == 0 else q, k, v, p, group)


def beside_ddp(rank, group, p, wrapped):
    net = UsedByOne(p, rank, group)
    run = net
    if wrapped:
        run = torch.nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    run(*shards(p, rank, grad=False)).square().sum().backward()
    grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in net.parameters()]
    if not wrapped:
        for g in grads:
            dist.all_reduce(g)
            g /= 2
    return grads


def test_collectives_of_a_wrapper_that_are_under_way_meet_no_handshake():
    """DDP reduces at once what a rank has not used, in the midst of the others' backward pass."""
    p = tasp.plan(DOCS, 2)
    wanted = tasp.launch(beside_ddp, 2, p, False, timeout_s=30)
    for found, want in zip(tasp.launch(beside_ddp, 2, p, True, timeout_s=30), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


# ---- who did not come


def asleep(rank, group, p, victim):
    """As a rank that is stuck elsewhere: it neither takes part nor ends."""
    tasp.attention(*shards(p, rank), p, group)
    if rank == victim:
        time.sleep(4.5)
        return None
    with pytest.raises(tasp.TransportError) as caught:
        tasp.attention(*shards(p, rank), p, group)
    return str(caught.value), caught.value.peers


@pytest.mark.parametrize("kind", spread(["Ulysses and ring", "p2p"], keep=1))
def test_a_rank_that_does_not_come_is_named_by_collectives_too(kind):
    def work(rank, group):
        # a group with a time-out of its own, so that the sleeping rank wakes before all is over
        short = dist.new_group(timeout=timedelta(seconds=1))
        return asleep(rank, short, PLANS[kind], 2)

    texts = tasp.launch(work, 4, timeout_s=40)
    assert texts[2] is None
    for text, peers in (texts[0], texts[1], texts[3]):
        assert "rank 2 did not take part" in text, text
        assert peers == (2,)


# ---- tags after a failure


def after_a_failure(rank, group):
    ends = exchange.exchange_of(group)
    said(tasp.PlanError, lambda: (ends.handshake({"x": str(rank)}), ends.finish_handshake()))
    failed = sorted(process_group.state_of(ends.group).failed_prefixes)
    taken = [ends._handshake.prefix_of(bytes([p >> 7, (p << 1) & 255])) for p in failed]
    return failed, taken


def test_no_later_call_takes_the_tags_of_one_that_failed():
    """Messages of the failed call may still wait; one of equal tag would be taken for them."""
    by_rank = tasp.launch(after_a_failure, 3)
    for failed, taken in by_rank:
        assert (failed, taken) == by_rank[0]
        assert len(failed) == 3
        assert not set(failed) & set(taken)


def refused_while_under_way(rank, group):
    """Ranks 0 and 1 agree, rank 2 does not; rank 1 sends when rank 0 has given up what it asked for."""
    ends = exchange.exchange_of(group)
    kv = torch.full((4, 1, 1 << 16), float(rank))
    message = Message(1 - rank, "kv", 0, 4, 0, 0, 0, 0)
    ends.handshake({"x": str(rank == 2)})
    if rank == 0:
        wait = ends.post(0, (), (message,), {"kv": kv})
        said(tasp.PlanError, wait)
        del wait, kv
        gc.collect()
    else:
        said(tasp.PlanError, ends.finish_handshake)
    dist.barrier(group)
    if rank == 1:
        ends.post(0, (message,), (), {"kv": kv})
    return run_rank(rank, group, THREE, INPUTS)[0]  # the connection carries what follows


def test_rows_of_a_refused_calls_message_are_kept_until_it_is_sent():
    results = tasp.launch(refused_while_under_way, 3, timeout_s=30)
    assert Reference(INPUTS, DOCS).errors(results, THREE).ok


# ---- the order of the rows


def in_another_order(rank, group, p, other):
    tokens = torch.from_numpy(other.tokens(rank).copy())
    q, k, v = (x[tokens] for x in INPUTS.tensors()[:3])
    return said(tasp.PlanError, lambda: tasp.attention(q, k, v, p, group, tokens=tokens))


@pytest.mark.parametrize(
    ("layout", "found", "intra"),
    [("zigzag", "contiguous", 1), ("striped", "zigzag", 1), ("zigzag", "striped", 2)],
)
def test_rows_in_the_order_of_another_layout_are_refused(layout, found, intra):
    p, other = (tasp.plan([96], 4, layout=x, intra=intra) for x in (layout, found))
    assert {p.num_tokens(r) for r in range(4)} == {24}
    for text in tasp.launch(in_another_order, 4, p, other, timeout_s=30):
        assert "rows of q, k, v are not in the plan's order" in text
        assert f"layout {layout!r}" in text


def one_rank_swaps_two_rows(rank, group, p):
    tokens = torch.from_numpy(p.tokens(rank).copy())
    x = shards(p, rank, grad=False)
    out = tasp.attention(*x, p, group, tokens=tokens)
    assert torch.equal(out, tasp.attention(*x, p, group, tokens=tokens))
    if rank == 1:
        tokens[[3, 5]] = tokens[[5, 3]]  # in place: the same tensor, proved before
    return said(tasp.PlanError, lambda: tasp.attention(*x, p, group, tokens=tokens))


def test_one_rank_with_two_rows_swapped_is_named_on_all():
    for text in tasp.launch(one_rank_swaps_two_rows, 4, PLANS["p2p"], timeout_s=30):
        assert "rank 1: 2 of" in text
        assert "row 3 is token" in text


def test_the_order_is_proved_in_inference_mode_too():
    p, x = tasp.plan(DOCS, 1), INPUTS.tensors()[:3]
    with torch.inference_mode():
        tokens = torch.arange(DOCS.total)
        assert torch.equal(tasp.attention(*x, p, tokens=tokens), tasp.attention(*x, p))
        tokens[[3, 5]] = tokens[[5, 3]]
        with pytest.raises(tasp.PlanError, match="2 of 384 rows"):
            tasp.attention(*x, p, tokens=tokens)


@pytest.mark.parametrize(
    "tokens", [[1, 2, 3], torch.arange(4), torch.arange(384.0), torch.arange(384)[None]]
)
def test_token_ids_of_another_shape_or_type_are_refused(tokens):
    p = tasp.plan(DOCS, 1)
    with pytest.raises(tasp.PlanError, match=r"tokens must be an int64 tensor \[384\]"):
        tasp.attention(*INPUTS.tensors()[:3], p, tokens=tokens)


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_autocast_casts_as_torchs_own_attention_does(dtype, kernel):
    p = tasp.plan([50], 1)
    q, k, v, dout = Inputs.random(50, 4, 4, 8).tensors()
    mixed = [q.float(), k.float(), v.to(dtype)]  # rotary embeddings in float32 beside a half v
    with torch.autocast("cpu", dtype):
        x = [t.clone().requires_grad_() for t in mixed]
        out = tasp.attention(*x, p, kernel=kernel)
        theirs = scaled_dot_product_attention(*(t.movedim(1, 0) for t in mixed), is_causal=True)
    out.backward(dout.to(dtype))
    assert out.dtype == theirs.dtype == dtype
    y = [t.to(dtype).requires_grad_() for t in mixed]
    cast = tasp.attention(*y, p, kernel=kernel)
    cast.backward(dout.to(dtype))
    assert torch.equal(out, cast)  # and nothing inside is cast once more
    for a, b in zip(x, y, strict=True):
        assert a.grad.dtype == a.dtype
        assert torch.equal(a.grad, b.grad.to(a.dtype))
    exact = tasp.attention(*(t.double() for t in mixed), p)
    gap = (theirs.movedim(0, 1).double() - exact).abs().max()
    assert (out.double() - exact).abs().max() <= 2 * gap


def test_autocast_leaves_float64_and_other_devices_alone():
    p, x = tasp.plan([50], 1), [t.double() for t in Inputs.random(50, 2, 2, 8).tensors()[:3]]
    plain = tasp.attention(*x, p)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tasp.attention(*x, p), plain)
    x[2] = x[2].float()
    with pytest.raises(tasp.PlanError, match="one dtype"):
        tasp.attention(*x, p)


def under_autocast(rank, group, p):
    with torch.autocast("cpu", torch.bfloat16):
        x = shards(p, rank)
        out = tasp.attention(*x, p, group)
        out.float().sum().backward()
    return out.detach(), *(t.grad for t in x)


def test_autocast_on_ranks_is_that_of_one_process():
    (alone,) = tasp.launch(under_autocast, 1, tasp.plan(DOCS, 1))
    for p in (PLANS["p2p"], PLANS["Ulysses and ring"]):
        by_rank = tasp.launch(under_autocast, 4, p, timeout_s=30)
        for i, want in enumerate(alone):
            found = tasp.unshard([r[i] for r in by_rank], p)
            torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


def mixed_ranks(rank, group, p):
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0):
        return said(tasp.PlanError, lambda: tasp.attention(*shards(p, rank), p, group))


def test_autocast_on_one_rank_alone_is_refused():
    for text in tasp.launch(mixed_ranks, 4, PLANS["p2p"], timeout_s=30):
        assert "dtype: rank 0 has torch.bfloat16; the others have torch.float32" in text


def test_a_failed_launch_still_says_what_failed():
    """The helpers above raise inside ranks: an assertion that fails there fails here."""
    with pytest.raises(RankError):
        tasp.launch(lambda rank, group: said(tasp.PlanError, lambda: None), 1)
