"""What `attention` is given: options and shapes that are good, then everything that is bad.

Bad input is a ValueError on every rank, whatever rank it is on, that says what was asked, what was
found and what to do; nothing hangs. Bad documents and plans: test_documents.py, test_plan.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import time

import pytest
import torch

import tasp_core as tasp
from tasp_core.lab.bench.accuracy import Inputs, Reference
from tasp_core.schedules import DKV, DQ

DOCS = tasp.Documents.of([37, 81, 2, 60])
INPUTS = Inputs.random(DOCS.total, 4, 2, 8)


def planned(ranks, schedule="tasp"):
    return tasp.plan(DOCS, ranks, schedule=schedule)


PLANS4 = [planned(4, s) for s in tasp.schedules() if tasp.supports(DOCS, 4, schedule=s)]


def attend(rank, group, p, tensors, **options):
    """This rank's out, lse, dq, dk, dv from its own part of q, k, v, dout."""
    *qkv, dout = (x.detach() for x in tensors)
    q, k, v = (x.requires_grad_() for x in qkv)
    out, lse = tasp.attention(q, k, v, p, group, return_lse=True, **options)
    out.backward(dout)
    return [out.detach(), lse, q.grad, k.grad, v.grad]


def sharded(inputs, p, rank):
    return [tasp.shard(x, p, rank) for x in inputs.tensors()]


def run(ranks, jobs):
    """For each (plan, inputs, options) every rank's results, from one launch."""

    def work(rank, group):
        return [attend(rank, group, p, sharded(x, p, rank), **options) for p, x, options in jobs]

    return list(zip(*tasp.launch(work, ranks), strict=True))


def same(first, second):
    """Whether all ranks' results have the same bits."""
    pairs = zip(itertools.chain(*first), itertools.chain(*second), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# ---- good input


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_batch_gives_the_results_of_its_rows(heads_first):
    rows = [Inputs.random(DOCS.total, 4, 2, 8, seed=s) for s in range(3)]

    def batched(rank, group, p):  # [B, t, H, D], in memory perhaps [B, H, t, D]
        columns = zip(*(sharded(row, p, rank) for row in rows), strict=True)
        stacked = [torch.stack(column) for column in columns]
        if heads_first:
            stacked = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in stacked]
        return attend(rank, group, p, stacked)

    for p in (planned(1), planned(4)):
        both = tasp.launch(batched, p.ranks, p)
        for b, pieces in enumerate(run(p.ranks, [(p, row, {}) for row in rows])):
            found = [[x[b] for x in piece] for piece in both]
            assert same(found, pieces) or p.ranks > 1
            # torch.logaddexp rounds the ends of its vectors differently, so merges may differ by that
            torch.testing.assert_close(found, list(pieces), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_float64_is_exact_to_1e_12_and_math_is_as_good_as_its_dtype(ranks, kernel):
    wide, narrow = Inputs.random(DOCS.total, 4, 2, 8, dtype=torch.float64), INPUTS
    plans = PLANS4 if ranks == 4 else [planned(1)]
    jobs = [(p, x, {"kernel": kernel}) for p in plans for x in (wide, narrow)]
    judges = {x.q.dtype: Reference(x, DOCS, kernel) for x in (wide, narrow)}
    for (p, inputs, _), pieces in zip(jobs, run(ranks, jobs), strict=True):
        errors = judges[inputs.q.dtype].errors(pieces, p)
        assert errors.ok or inputs is wide, errors
        assert inputs is narrow or max(errors.ours.values()) < 1e-12
        assert all(x.dtype == inputs.q.dtype for piece in pieces for x in piece)


@pytest.mark.parametrize("dims", [(8, 24), (24, 8), (5, 3)])
def test_key_and_value_head_dims_may_differ(dims):
    base = Inputs.random(DOCS.total, 4, 2, 24)
    cut = [x[..., :d] for x, d in zip(base.tensors(), (dims[0], *dims, dims[1]), strict=True)]
    inputs = Inputs(*cut)
    judge = Reference(inputs, DOCS)
    for p, pieces in zip(PLANS4, run(4, [(p, inputs, {}) for p in PLANS4]), strict=True):
        assert judge.errors(pieces, p).ok, p.summary()
        assert pieces[0][0].shape[-1] == dims[1]


def test_an_explicit_scale_is_the_scale_of_the_scores():
    inputs = Inputs.random(DOCS.total, 4, 2, 16)
    doubled = dataclasses.replace(inputs, q=2 * inputs.q)
    p = planned(4)
    scaled, wanted = run(4, [(p, inputs, {"scale": 0.5}), (p, doubled, {})])
    for piece in wanted:
        piece[2] *= 2  # the gradient of 2 q
    assert same(scaled, wanted)


def test_gradients_travel_narrower_where_asked():
    judge, options = Reference(INPUTS, DOCS), {"grad_comm_dtype": torch.bfloat16}
    answers = run(4, [(p, INPUTS, o) for p in PLANS4 for o in ({}, options)])
    for p, wide, narrow in zip(PLANS4, answers[::2], answers[1::2], strict=True):
        moved = set(p.hops(backward=True).kind.tolist())
        stay = 2 if DQ in moved else 3  # out, lse, and dq where queries stay home
        assert same([x[:stay] for x in wide], [x[:stay] for x in narrow])
        errors = judge.errors(narrow, p)
        for name in [*["dq"] * (DQ in moved), *["dk", "dv"] * (DKV in moved)]:
            assert judge.limits[name] < errors.ours[name] < 0.03 * judge.exact[name].abs().max()


def test_without_gradients_and_twice():
    def work(rank, group, p):
        q, k, v, _ = (x.requires_grad_() for x in sharded(INPUTS, p, rank))
        out, lse = tasp.attention(q, k, v, p, group, return_lse=True)
        assert out.requires_grad
        assert not lse.requires_grad
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                quiet = tasp.attention(q, k, v, p, group)
            assert torch.equal(quiet, out)
            assert not quiet.requires_grad
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match=r"differentiate twice|does not require grad"):
            grad.sum().backward()

    for ranks in (1, 2):
        tasp.launch(work, ranks, planned(ranks))


# ---- bad input: one launch for all cases that every rank must refuse, and then be able to go on


def tensors(change, names="qkv"):
    return {name: change for name in names}


MORE = [40, 140]
CASES = {
    # what is bad on rank 1: (changes, what the message has)
    "2-D": (tensors(lambda x: x[0]), r"must all be \[t, heads, dim\] or .*got q \[4, 8\]"),
    "q 4-D": ({"q": lambda x: x[None]}, r"all \[B, t, heads, dim\], got q \[1, 90, 4, 8\], k \[90"),
    "5-D": (tensors(lambda x: x[None, None]), r"got q \[1, 1, 90, 4, 8\]"),
    "a token more": (
        tensors(lambda x: torch.cat([x, x[:1]])),
        r"\[91, 91, 91\] tokens, .* rank 90; shard",
    ),
    "k a token less": (
        {"k": lambda x: x[1:]},
        r"\[90, 89, 90\] tokens, the plan gives this rank 90",
    ),
    "the whole row": (
        tensors(lambda x: torch.cat([x, x])),
        r"\[180, 180, 180\] tokens.*shard with",
    ),
    "batches": (
        {"q": lambda x: x[None].repeat(2, 1, 1, 1), **tensors(lambda x: x[None], "kv")},
        r"batch sizes differ.*: q \[2, 90, 4, 8\], k \[1, 90",
    ),
    "v heads": ({"v": lambda x: x[:, :1]}, r"k and v must have equal heads.*v \[90, 1, 8\]"),
    "k dim": (
        {"k": lambda x: x[..., :6]},
        r"q and k equal dims of at least 1, got .*k \[90, 2, 6\]",
    ),
    "no dim": (tensors(lambda x: x[..., :0]), r"equal dims of at least 1, got q \[90, 4, 0\]"),
    "no heads": (tensors(lambda x: x[:, :0], "kv"), r"4 query heads are not a multiple of 0"),
    "3 over 2": (
        {"q": lambda x: x[:, :3]},
        r"3 query heads are not a multiple of 2.*repeat k and v",
    ),
    "1 over 2": (
        {"q": lambda x: x[:, :1]},
        "1 query heads are not a multiple of 2 key/value heads",
    ),
    "dtypes": ({"q": lambda x: x.half()}, "one dtype and one device, got torch.float16 on cpu"),
    "devices": ({"k": lambda x: x.to("meta")}, "one dtype and one device, .*torch.float32 on meta"),
    "integers": (tensors(lambda x: x.long()), "bfloat16, float32 or float64, got torch.int64"),
    "fp8": (tensors(lambda x: x.to(torch.float8_e4m3fn)), "or float64, got torch.float8_e4m3fn"),
    "a list": ({"v": lambda x: x.tolist()}, "v must be a tensor, got list"),
    "kernel": (
        {"kernel": lambda _: "cudnn"},
        "no kernel 'cudnn'; known are auto, math, aten, flash",
    ),
    "flash": ({"kernel": lambda _: "flash"}, "kernel 'flash' on cpu takes fp16 and bf16, not"),
}
DIFFERENCES = {
    # what is good, but not what the other rank does
    "schedule": (
        {"plan": lambda p: tasp.plan(DOCS, 2, schedule="ring")},
        "schedule: rank 1 has ring",
    ),
    "options": (
        {"plan": lambda p: tasp.plan(DOCS, 2, schedule_options={"exchange": "all_to_all"})},
        "schedule: rank 1 has tasp .*all_to_all",
    ),
    "layout": (
        {"plan": lambda p: tasp.plan(DOCS, 2, layout="striped")},
        "layout: rank 1 has striped",
    ),
    "documents": (
        {"plan": lambda p: tasp.plan(MORE, 2)},
        r"documents: rank 1 has Documents.of\(\[40, 140\], causal=True",
    ),
    "mask": (
        {"plan": lambda p: tasp.plan(dataclasses.replace(DOCS, causal=False), 2)},
        "documents: rank 1 has .*causal=False.*; the others have .*causal=True",
    ),
    "dtype": (
        tensors(lambda x: x.bfloat16()),
        "rank 1 has torch.bfloat16; the others have torch.float32",
    ),
    "scale": ({"scale": lambda _: 0.1}, "scale: rank 1 has 0.1; the others have None"),
    "heads": (
        {"q": lambda x: x[:, :2]},
        r"heads.*: rank 1 has \[0, 2, 8, 2, 8\]; the others have \[0, 4",
    ),
    "kv heads": (tensors(lambda x: x[:, :1], "kv"), r"kv heads.*: rank 1 has \[0, 4, 8, 1, 8\]"),
    "value dim": ({"v": lambda x: x[..., :5]}, r"v dim: rank 1 has \[0, 4, 8, 2, 5\]"),
    "a batch": (tensors(lambda x: x[None]), r"batch.*: rank 1 has \[1, 4, 8, 2, 8\]"),
}


def refused(rank, group, changes, who):
    """(type, text, seconds) of what attention raises when the ranks in `who` change their arguments."""
    p = planned(2)
    given = dict(zip("qkv", sharded(INPUTS, p, rank), strict=False)) | {"plan": p}
    for name in changes if rank in who else ():
        given[name] = changes[name](given.get(name))
    start = time.perf_counter()
    try:
        tasp.attention(**given, group=group)
    except Exception as error:
        return type(error), str(error), time.perf_counter() - start
    return None, "nothing was raised", time.perf_counter() - start


def all_refused(rank, group):
    found = {n: refused(rank, group, c, (1,)) for n, (c, _) in (CASES | DIFFERENCES).items()}
    return found, attend(rank, group, planned(2), sharded(INPUTS, planned(2), rank))


@pytest.fixture(scope="module")
def answers():
    return tasp.launch(all_refused, 2, timeout_s=60)


@pytest.mark.parametrize("name", [*CASES, *DIFFERENCES])
def test_every_rank_raises_the_same_error(answers, name):
    for kind, text, seconds in (rank[0][name] for rank in answers):
        assert text == answers[0][0][name][1]
        assert kind is tasp.PlanError, text
        assert seconds < 10
    assert re.search((CASES | DIFFERENCES)[name][1], text), text
    advice = "no result is returned; give every rank the same documents, options and shapes"
    assert text.startswith("rank 1: ") if name in CASES else advice in text


def test_after_errors_the_group_still_works(answers):
    assert Reference(INPUTS, DOCS).errors([rank[1] for rank in answers], planned(2)).ok


@pytest.mark.parametrize("name", list(CASES))
def test_one_process_raises_too(name):
    given = dict(zip("qkv", Inputs.random(90, 4, 2, 8).tensors(), strict=False))
    changed = {n: change(given.get(n)) for n, change in CASES[name][0].items()}
    with pytest.raises(tasp.PlanError, match=CASES[name][1]):
        tasp.attention(**given | changed, plan=tasp.plan([90], 1))


HANGS = {
    "a plan for four ranks": {"plan": lambda p: planned(4)},
    "a plan for one rank": {"plan": lambda p: planned(1)},
    "no plan": {"plan": lambda p: "ring"},
    "all on meta": tensors(lambda x: x.to("meta")),
}


@pytest.mark.parametrize("who", [(1,), (0, 1)])
@pytest.mark.parametrize("name", list(HANGS))
def test_bad_plans_and_devices_are_an_error_on_every_rank(name, who):
    for kind, text, _ in tasp.launch(refused, 2, HANGS[name], who, timeout_s=3):
        assert issubclass(kind or object, ValueError), text
        assert who == (0, 1) or "rank 1" in text


def test_a_plan_for_several_ranks_without_a_group():
    with pytest.raises(tasp.PlanError, match=r"for 4 ranks, the group has 1 .*torchrun.*ranks=1"):
        tasp.attention(*INPUTS.tensors()[:3], planned(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_ranks_must_agree_on_what_gradients_travel_in(dtype):
    def work(rank, group):
        p, options = planned(2), {"grad_comm_dtype": dtype} if rank == 1 else {}
        with pytest.raises(ValueError, match="rank 1"):
            attend(rank, group, p, sharded(INPUTS, p, rank), **options)

    tasp.launch(work, 2, timeout_s=3)


@pytest.mark.parametrize("options", [{"grad_comm_dtype": torch.int32}, {"scale": "0.1"}])
def test_options_no_rank_can_use_are_refused(options):
    def work(rank, group):
        p = planned(2)
        with pytest.raises(ValueError, match="got"):
            attend(rank, group, p, sharded(INPUTS, p, rank), **options)

    tasp.launch(work, 2, timeout_s=10)


def test_an_empty_batch_is_empty_or_refused():
    def work(rank, group):
        q, k, v, _ = (x[None][:0] for x in INPUTS.tensors())
        try:
            return tuple(tasp.attention(q, k, v, planned(1)).shape)
        except ValueError:
            return "refused"

    assert tasp.launch(work, 1)[0] in ("refused", (0, DOCS.total, 4, 8))
