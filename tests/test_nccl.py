"""Whole passes of every schedule over a double of NCCL, in one process, against the oracle.

The double pairs by order, runs batches in stream order and blocks where NCCL would (nccl_double.py);
the first tests are of the double itself.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from nccl_double import Double, HangError, MispairedError
from test_kernels import StandIn
from test_pairing import GIANT, altered

import tasp_core as tasp
from tasp_core import Documents, Plan, plan
from tasp_core.kernels.kernel import Kernel
from tasp_core.kernels.reference import Math, oracle
from tasp_core.kernels.varlen import VarlenKernel
from tasp_core.lab.bench.accuracy import Inputs
from tasp_core.planning.heads import split_heads
from tasp_core.runtime import packing
from tasp_core.runtime import sharding as tensors
from tasp_core.runtime.exchange import NcclExchange
from tasp_core.runtime.execute import Attention, Context, run_backward, run_forward
from tasp_core.runtime.ulysses import Group, Ulysses

NAMES = ("out", "lse", "dq", "dk", "dv")


# ---- the double


def ones(n: int, value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((n,), value, dtype=dtype)


def talk(*scripts: list[list[tuple[str, int, torch.Tensor]]], **options: Any) -> Double:
    """Each rank posts its batches of (send or recv, peer, rows), then waits for all of them."""
    double = Double(len(scripts), **options)

    def one(rank: int, group: Any) -> None:
        works = [
            double.post(rank, [(op == "send", peer, rows) for op, peer, rows in batch])
            for batch in scripts[rank]
        ]
        for work in works:
            work.wait()

    double.run(one)
    return double


@pytest.mark.parametrize("eager", [False, True])
def test_the_first_send_meets_the_first_receive(eager):
    a, b = ones(3, 1), ones(3, 2)
    into = [ones(3, 0), ones(3, 0)]
    talk([[("send", 1, a), ("send", 1, b)]], [[("recv", 0, x) for x in into]], eager=eager)
    assert [float(x[0]) for x in into] == [1, 2]
    # in one batch or in several: the order is that of the calls
    into = [ones(3, 0), ones(3, 0)]
    one, other = [[("send", 1, a)], [("send", 1, b)]], [[("recv", 0, x)] for x in into]
    talk(one, other, eager=eager)
    assert [float(x[0]) for x in into] == [1, 2]


@pytest.mark.parametrize(("sent", "received"), [(ones(3), ones(4)), (ones(4), ones(4).double())])
def test_pairs_of_other_sizes_or_dtypes(sent, received):
    with pytest.raises(
        MispairedError, match=r"send 0 of rank 0 to rank 1 .* the receive that it meets"
    ):
        talk([[("send", 1, sent)]], [[("recv", 0, received)]])


def test_a_circular_wait_names_ranks_and_batches():
    first = [[("send", 1, ones(2))], [("recv", 1, ones(2))]]
    with pytest.raises(
        HangError, match=r"rank 0 in batch 0: send to rank 1 .*rank 1 in batch 0: send to"
    ):
        talk(first, [[("send", 0, ones(2))], [("recv", 0, ones(2))]])
    # the same in one batch is not one, and neither is the other order
    talk([first[0] + first[1]], [[("send", 0, ones(2)), ("recv", 0, ones(2))]])
    talk(first, [[("recv", 0, ones(2))], [("send", 0, ones(2))]])
    # three ranks, each waits for the next one's second batch
    ring = [[[("send", (r + 1) % 3, ones(2))], [("recv", (r - 1) % 3, ones(2))]] for r in range(3)]
    with pytest.raises(HangError, match="rank 2 in batch 0"):
        talk(*ring)


def test_what_is_never_met():
    with pytest.raises(HangError, match=r"rank 0 in batch 0: send to rank 1 .*finished: ranks 1"):
        talk([[("send", 1, ones(2))]], [])
    double = Double(2)
    with pytest.raises(
        HangError, match="all ranks have finished, and left rank 1 in batch 0: receive"
    ):
        double.run(lambda rank, _: double.post(1, [(False, 0, ones(1))]) if rank else None)


def test_a_communicator_needs_all_ranks_once():
    two = [[("send", 1, ones(2))]], [[("recv", 0, ones(2))]]
    talk(*two, [])
    with pytest.raises(HangError, match="finished: ranks 2"):
        talk(*two, [], joined=False)
    talk(*two, [[("send", 3, ones(1))]], [[("recv", 2, ones(1))]], joined=False)


def test_rows_under_way_are_anything_and_do_not_change():
    double, into = Double(2), ones(2, 5)

    def one(rank: int, _: Any) -> bool:
        rows = ones(2) if rank == 0 else into
        work = double.post(rank, [(rank == 0, 1 - rank, rows)])
        early = bool(rows.isnan().any())
        if rank == 0 and changes:
            rows += 1
        work.wait()
        return early

    changes = False
    assert double.run(one) == [False, True]
    assert into.tolist() == [1, 1]
    double, changes = Double(2), True
    with pytest.raises(MispairedError, match="rank 0 sends to rank 1 change under way"):
        double.run(one)


def test_collectives_wait_for_all_ranks_and_stand_in_the_stream(monkeypatch):
    from tasp_core.runtime import exchange as transport

    double = Double(3)
    double.install(monkeypatch)
    dist = transport.dist

    def one(rank: int, group: Any) -> Any:
        everyone = [ones(2, 0) for _ in range(3)]
        dist.all_gather(everyone, ones(2, rank), group=group)
        out = torch.arange(6.0) + 10 * rank
        into = torch.empty(6)
        dist.all_to_all_single(into, out, group=group)
        total = ones(1, rank)
        dist.all_reduce(total, group=group)
        dist.barrier(group)
        return [float(x[0]) for x in everyone], into.tolist(), float(total)

    found = double.run(one)
    assert [f[0] for f in found] == [[0, 1, 2]] * 3
    assert found[1][1] == [2, 3, 12, 13, 22, 23]
    assert [f[2] for f in found] == [3] * 3

    def wrong(rank: int, group: Any) -> None:
        if rank == 1:
            dist.all_reduce(ones(1), group=group)
        else:
            dist.barrier(group)

    with pytest.raises(MispairedError, match="rank 1 in batch 0: all_reduce"):
        Double(3).run(wrong)

    def uneven(rank: int, group: Any) -> None:
        sizes = [1, 1] if rank else [2, 0]
        dist.all_to_all_single(torch.empty(2), ones(2), [1, 1], sizes, group=group)

    with pytest.raises(MispairedError, match=r"rank 0 expects .* of rank 0 in a collective"):
        Double(2).run(uneven)

    def late(rank: int, group: Any) -> None:
        work = group.double.post(rank, [(rank == 0, 1 - rank, ones(1))]) if rank < 2 else None
        if rank == 1:
            dist.barrier(group)
        if work:
            work.wait()
        if rank == 0:
            dist.barrier(group)

    with pytest.raises(HangError, match="finished: ranks 2"):
        Double(3).run(late)


# ---- whole passes


def inputs_of(docs: Documents, dtype: torch.dtype = torch.float64, dim: int = 8) -> Inputs:
    return Inputs.random(docs.total, 4, 2, dim, dtype=dtype)


def one_rank(
    p: Plan,
    rank: int,
    group: Any,
    shards: list[torch.Tensor],
    kernel: Kernel,
    ends: Any,
    **options: Any,
) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of a rank, as `attention` runs them."""
    q, k, v, dout = shards
    exchange = ends(group, range(rank % p.intra, p.ranks, p.intra))
    scale = q.shape[-1] ** -0.5
    if p.intra == 1:
        context = Context(p, rank, exchange, kernel, scale, **options)
        kept = context.pack(k, v)
        out, lse = run_forward(context, q, k, v, kept)
        kv = kept if context.keep_kv else None
        return [out, lse, *run_backward(context, dout, q, k, v, out.to(q.dtype), lse, kv)]
    index, member = divmod(rank, p.intra)
    counts = tuple(int(n) for n in p.member_tokens(index)[1:] - p.member_tokens(index)[:-1])
    sizes = q.shape[1], k.shape[1]
    heads = Group(exchange, index * p.intra, member, counts, tuple(split_heads(*sizes, p.intra)))
    options["ulysses"] = Ulysses(heads, *sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    context = Context(p.context_plan, index, exchange, kernel, scale, **options)
    out, lse = Attention.apply(context, *leaves)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, dout)]


def passes(
    p: Plan,
    inputs: Inputs,
    monkeypatch: Any,
    *,
    kernel: Kernel | None = None,
    seed: int = 0,
    eager: bool = False,
    ends: Any = NcclExchange,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv of the whole row, all ranks over the double."""
    double = Double(p.ranks, seed=seed, eager=eager)
    double.install(monkeypatch)
    shards = [[tasp.shard(x, p, rank) for x in inputs.tensors()] for rank in range(p.ranks)]
    found = double.run(
        lambda rank, group: one_rank(
            p, rank, group, shards[rank], kernel or Math(), ends, **options
        )
    )
    whole = [tasp.unshard(list(pieces), p) for pieces in zip(*found, strict=True)]
    return dict(zip(NAMES, whole, strict=True))


def worst(found: dict[str, torch.Tensor], inputs: Inputs, docs: Documents) -> float:
    """The largest error of any result, relative to its largest value; NaN counts as infinite."""
    q, k, v, dout = inputs.tensors()
    exact = oracle(q, k, v, docs, dout=dout)
    errors = [
        float((found[name].double() - exact[name]).abs().nan_to_num(torch.inf).max())
        / max(1.0, float(exact[name].abs().max()))
        for name in NAMES
    ]
    return max(errors)


ROWS = ([70], [37, 1, 0, 30], [5] * 13, [60, 2, 3])
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": False}, {"window": 9})
MORE: dict[str, list[dict[str, Any]]] = {
    "sap": [{"relay": 3}, {"relay": 2, "buffer_tokens": 16}, {"move_q": True}],
    "wave": [{"blocks": 2, "twins": 0}],
    "mesh": [{"rows": 1}],
}


def cases() -> list[Any]:
    """Every schedule, its options, layout and machine, with a row, mask and kind of pass each."""
    some, dice = [], random.Random(3)
    for name, layout in itertools.product(tasp.schedules(), tasp.layouts()):
        for machine, ranks in ((None, 4), ("mesh2x2", 4), (None, 3), ("mesh3x2", 6)):
            for options in ({}, *MORE.get(name, [])):
                docs = Documents.of(dice.choice(ROWS), **dice.choice(MASKS))
                keywords = {
                    "docs": docs,
                    "ranks": ranks,
                    "schedule": name,
                    "layout": layout,
                    "machine": machine,
                    "schedule_options": options,
                }
                some.append((keywords, dice.random() < 0.3, dice.choice([64, 1 << 20])))
    return some


def run(some: list[Any], monkeypatch: Any) -> int:
    """How many of the cases there are; each is exact."""
    ran = 0
    for seed, (keywords, keep, small) in enumerate(some):
        if not tasp.supports(**keywords):
            continue
        monkeypatch.setattr(packing, "SMALL_BYTES", small)
        p, inputs = plan(**keywords), inputs_of(keywords["docs"])
        options = {"seed": seed, "eager": bool(seed % 2), "keep_kv": keep}
        assert worst(passes(p, inputs, monkeypatch, **options), inputs, p.docs) < 1e-10, str(p)
        ran += 1
    return ran


@pytest.mark.parametrize("schedule", list(tasp.schedules()))
def test_every_schedule_is_exact_over_nccl(schedule, monkeypatch):
    some = [case for case in cases() if case[0]["schedule"] == schedule]
    possible = [case for case in some if tasp.supports(**case[0])]
    count = min(5, len(possible))
    assert run(random.Random(4).sample(possible, count), monkeypatch) == count >= 5


@pytest.mark.full
@pytest.mark.parametrize("schedule", list(tasp.schedules()))
def test_every_schedule_layout_and_machine_is_exact_over_nccl(schedule, monkeypatch):
    assert run([case for case in cases() if case[0]["schedule"] == schedule], monkeypatch) >= 5


@pytest.mark.parametrize("name", GIANT)
def test_what_mispaired_is_exact(name, monkeypatch):
    keywords: dict[str, Any] = {"ranks": 4, "docs": (3000, 1096), "causal": True, **GIANT[name]}
    lengths = [n // 20 for n in keywords.pop("docs")]
    docs = Documents.of(lengths, causal=keywords.pop("causal"))
    p, inputs = plan(docs, schedule="sap", **keywords), inputs_of(docs)
    for small in (1 << 11, 1 << 20):
        monkeypatch.setattr(packing, "SMALL_BYTES", small)
        assert worst(passes(p, inputs, monkeypatch, seed=small), inputs, docs) < 1e-10


@pytest.mark.parametrize("name", ["ring", "tasp", "wave", "paced", "trees", "double_ring"])
def test_all_to_alls(name, monkeypatch):
    docs = Documents.of([37, 1, 30])
    options = {"exchange": "all_to_all"}
    for layout, machine in itertools.product(("zigzag", "striped"), (None, "mesh2x2")):
        keywords = {"schedule": name, "layout": layout, "machine": machine}
        if tasp.supports(docs, 4, **keywords, schedule_options=options):
            p, inputs = plan(docs, 4, **keywords, schedule_options=options), inputs_of(docs)
            assert worst(passes(p, inputs, monkeypatch), inputs, docs) < 1e-10


@pytest.mark.parametrize("schedule", ["ring", "all_gather", "mesh", "wave"])
def test_heads_over_groups(schedule, monkeypatch):
    docs = Documents.of([37, 1, 30])
    inputs = inputs_of(docs)
    for ranks, intra in ((4, 2), (4, 4)):
        p = plan(docs, ranks, schedule=schedule, intra=intra)
        assert worst(passes(p, inputs, monkeypatch, seed=ranks), inputs, docs) < 1e-10


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)]
)
@pytest.mark.parametrize("schedule", ["ring", "mesh", "token_ring", "sap"])
def test_dtypes_on_the_wire_agree(schedule, dtype, bound, monkeypatch):
    docs = Documents.of([90, 1, 30])
    layout = "contiguous" if schedule == "sap" else "zigzag"
    p, inputs = plan(docs, 4, schedule=schedule, layout=layout), inputs_of(docs, dtype)
    for kernel, wire in ((Math(), None), (VarlenKernel(StandIn()), torch.bfloat16)):
        found = passes(p, inputs, monkeypatch, kernel=kernel, grad_comm_dtype=wire)
        assert worst(found, inputs, docs) < max(bound, 0.1 if wire else 0)


def test_gather_and_roll(monkeypatch):
    docs = Documents.of([37, 1, 30])
    p, row = plan(docs, 4), torch.arange(2.0 * docs.total).view(-1, 2) + 1
    double = Double(4)
    double.install(monkeypatch)

    def one(rank: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        local = tasp.shard(row, p, rank)
        # None: what handshakes belong to, which go over gloo
        return (
            tensors._Gather.apply(local, p, group, 0, None),
            tensors._Roll.apply(local, p, group, 1, None),
        )

    found = double.run(one)
    assert all(torch.equal(whole, row) for whole, _ in found)
    rolled = tasp.unshard([shifted for _, shifted in found], p)
    wanted = [torch.cat([x[1:], x[:1] * 0]) for x in row.split([37, 1, 30])]
    assert torch.equal(rolled, torch.cat(wanted))


# ---- planted faults


class Swapped(NcclExchange):
    """Rank 1 posts the messages of every link the other way round."""

    def start(self, t, recvs, sends):
        return super().start(t, recvs, sends[::-1] if self.rank == 1 else sends)


class Late(NcclExchange):
    """Rank 1 posts what it sends a step later than the others do."""

    waiting: Any = ()

    def start(self, t, recvs, sends):
        sends, self.waiting = (self.waiting, sends) if self.rank == 1 else (sends, ())
        return super().start(t, recvs, list(sends))


FAULTY = {
    "ring": {},
    "tasp": {"layout": "striped"},
    "sap": {"schedule_options": {"relay": 3}},
    "double_ring": {},
}


@pytest.mark.parametrize("ends", [Swapped, Late])
@pytest.mark.parametrize("name", FAULTY)
def test_a_rank_that_posts_otherwise_is_seen(name, ends, monkeypatch):
    docs = Documents.of([97])
    p, inputs = plan(docs, 4, schedule=name, **FAULTY[name]), inputs_of(docs)
    assert worst(passes(p, inputs, monkeypatch), inputs, docs) < 1e-10
    try:
        found = passes(p, inputs, monkeypatch, ends=ends)
    except (MispairedError, HangError, tasp.TransportError):
        return
    assert worst(found, inputs, docs) > 1e-3


def test_a_table_that_one_rank_reads_otherwise_is_seen(monkeypatch):
    """Equal sizes and dtypes: nothing fails, gradients and keys change places."""
    docs = Documents.of([64])
    p, inputs = plan(docs, 4, schedule="ring"), inputs_of(docs)
    words = p.hops(1, backward=True).lines()
    a, b = words.index("t2 0>1 kv2.0"), words.index("t2 0>1 dkv3.0")
    words[a], words[b] = words[b], words[a]
    wrong = altered(p, 1, True, words)
    found = passes(wrong, inputs, monkeypatch)
    assert worst({**found}, inputs, docs) > 1e-3
    with pytest.raises(tasp.PlanError, match="in step 2, message 0 from rank 0 to rank 1"):
        tasp.check(wrong)
    narrow = inputs_of(docs, torch.bfloat16)  # keys in bf16, gradients in float32
    with pytest.raises(tasp.TransportError) as caught:
        passes(wrong, narrow, monkeypatch)
    assert "the receive that it meets" in str(caught.value)
