"""Labels, losses and per-token tensors: S1-S4, next_token_labels, roll, gather, shard and unshard.

The rule for losses (loss.py): gradients of parameters add up over ranks, loss = sum / count; with a
wrapper that averages, the loss is multiplied by its world size. Either way they are those of P = 1.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch._dynamo  # DDP does so: once here, not once in every forked rank
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from spread import spread
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import tasp_core as tasp
from tasp_core.lab.training.llama import TinyLlama

SEEDED = settings(derandomize=True, deadline=None, max_examples=100, database=None)
DOCS = tasp.Documents.of([13, 1, 0, 29, 7])
ROWS = ((13, 1, 0, 29, 7), (8,), (1, 1, 1), (2,), (0,), ())


def random(*size, seed=0, dtype=torch.float64):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def token_ids(total, seed=0):
    return torch.randint(0, 256, (total,), generator=torch.Generator().manual_seed(seed))


# ---- labels and losses


@SEEDED
@given(st.lists(st.integers(0, 6), max_size=6), st.integers(0, 2))
def test_labels_are_each_documents_next_tokens(lengths, batch):
    docs = tasp.Documents.of(lengths)
    ids = torch.arange(docs.total) + 5
    rows = ids.expand(batch, -1) if batch else ids
    wanted = []
    for low, high in itertools.pairwise(docs.cu_seqlens.tolist()):
        wanted += [*ids[low + 1 : high].tolist(), -7][: high - low]
    labels = tasp.next_token_labels(rows, docs, ignore=-7)
    assert labels.tolist() == ([wanted] * batch if batch else wanted)
    assert ids.tolist() == list(range(5, docs.total + 5))  # the input is left alone


def test_s4_all_of_the_row_goes_in_and_no_token_is_dropped():
    ids = token_ids(9)
    labels = tasp.next_token_labels(ids, tasp.Documents.of([9]))
    assert labels.tolist() == [*ids[1:].tolist(), -100]
    for wrong in (ids[:-1], torch.cat([ids, ids[:1]])):
        with pytest.raises(tasp.LayoutError, match=rf"{len(wrong)} tokens, the documents 9"):
            tasp.next_token_labels(wrong, tasp.Documents.of([9]))


def test_s3_labels_that_equal_the_inputs_raise_a_warning():
    ids, logits = token_ids(20), random(20, 256)
    with pytest.warns(UserWarning, match="look unshifted; use next_token_labels"):
        tasp.token_loss(logits, ids, inputs=ids)
    labels = tasp.next_token_labels(ids, tasp.Documents.of([20]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tasp.token_loss(logits, labels, inputs=ids)
        tasp.token_loss(logits[:1], ids[:1], inputs=ids[:1])  # one token may be its own successor


def test_losses_of_wrong_shapes_are_refused():
    with pytest.raises(tasp.LayoutError, match=r"logits \[4, 9\] and labels \[5\]"):
        tasp.token_loss(random(4, 9), token_ids(5))
    with pytest.raises(tasp.LayoutError, match="do not match"):
        tasp.token_loss(random(2, 4, 9), token_ids(8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_loss_is_cross_entropy_in_wide_numbers(dtype):
    logits, labels = random(3, 7, 50, dtype=dtype).requires_grad_(), token_ids(21).view(3, 7) % 50
    labels[0, 2:5] = -1
    total, count = tasp.token_loss(logits, labels, ignore=-1)
    exact = cross_entropy(
        logits.double().flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum"
    )
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert int(count) == 18
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=0)
    total.backward()
    assert torch.equal(logits.grad[0, 2:5], torch.zeros_like(logits[0, 2:5]))


def ignored(rank, group, p, silent):
    """(sum, count, gradient) where the ranks in `silent` have no label."""
    logits = random(p.num_tokens(rank), 11, seed=rank).requires_grad_()
    labels = torch.full((p.num_tokens(rank),), -100 if rank in silent else 3)
    total, count = tasp.token_loss(logits, labels, group)
    (total / count.clamp(min=1)).backward()
    return float(total), int(count), logits.grad


def test_s1_ranks_without_labels():
    p = tasp.plan(DOCS, 4)
    for silent in ((1,), (0, 2, 3), (0, 1, 2, 3)):
        answers = tasp.launch(ignored, 4, p, silent)
        labelled = sum(p.num_tokens(r) for r in range(4) if r not in silent)
        for rank, (total, count, grad) in enumerate(answers):
            assert count == labelled
            assert grad.isfinite().all()
            assert (rank in silent) == (total == 0.0) == (not grad.any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_of_ignored_tokens_may_be_anything(dtype, bad):
    start, labels = random(2, 7, 50, dtype=dtype), token_ids(14).view(2, 7) % 50
    labels[0, 2:5], labels[1, 6] = -100, -100
    logits = start.masked_fill((labels == -100)[..., None], bad).requires_grad_()
    right = start.clone().requires_grad_()
    for x in (logits, right):
        total, count = tasp.token_loss(x, labels)
        (total / count).backward()
    assert torch.isfinite(total)
    assert torch.equal(logits.grad, right.grad)
    assert not logits.grad[0, 2:5].any()
    assert torch.equal(logits[0, 2].isfinite(), torch.zeros(50, dtype=torch.bool))  # left alone


def counts(rank, group):
    """What is counted with and without a plan, and what is said to a plan of other ranks."""
    labels, logits = torch.arange(8) % 5, random(8, 5)
    alone, pair = tasp.plan([8], 1), tasp.plan([16], 2)
    found = [
        int(tasp.token_loss(logits, labels, group, plan=p)[1])
        for p, group in ((alone, None), (pair, None), (pair, dist.group.WORLD))
    ]
    said = []
    for p, other in ((alone, dist.group.WORLD), (tasp.plan([8], 4), None)):
        try:
            tasp.token_loss(logits, labels, other, plan=p)
        except tasp.PlanError as error:
            said.append(str(error))
    if rank == 0:  # nobody else calls: it must not wait for them
        found.append(int(tasp.token_loss(logits, labels, plan=alone)[1]))
    return found, said


def test_a_plan_of_one_rank_counts_this_process_alone():
    for rank, (found, said) in enumerate(tasp.launch(counts, 2, timeout_s=10)):
        assert found == [8, 16, 16, *([8] if rank == 0 else [])]
        assert "the plan is for 1 ranks, the group has 2" in said[0]
        assert "the plan is for 4 ranks, the group has 2" in said[1]
    with pytest.raises(
        tasp.PlanError, match=r"for 2 ranks, the group has 1 .torch.distributed is not"
    ):
        tasp.token_loss(random(8, 5), torch.arange(8) % 5, plan=tasp.plan([16], 2))


BAD_LABELS = [
    (torch.arange(8) + 90, "labels hold 97, outside the 97 classes of the logits"),
    (-torch.arange(8), "labels hold -1, outside"),
    (torch.arange(8).float(), "must be token ids, whole numbers, got torch.float32"),
    (torch.arange(8) > 3, "got torch.bool"),
    (torch.arange(7), "do not match"),
]


def one_bad_label(rank, group, labels):
    try:
        tasp.token_loss(random(8, 97), labels if rank == 1 else torch.arange(8), group)
    except tasp.LayoutError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(("labels", "message"), BAD_LABELS)
def test_labels_that_are_no_token_ids(labels, message):
    with pytest.raises(tasp.LayoutError, match=message):
        tasp.token_loss(random(8, 97), labels)
    first, second = tasp.launch(one_bad_label, 2, labels, timeout_s=10)
    assert message in second
    assert "labels or logits of 1 other ranks do not fit" in first


def test_labels_of_any_whole_numbers():
    logits, labels = random(8, 97), torch.arange(8)
    wanted = tasp.token_loss(logits, labels)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert tasp.token_loss(logits, labels.to(dtype)) == wanted


def model():
    torch.manual_seed(3)
    return TinyLlama(dim=32, layers=2, heads=4, kv_heads=2).double()


def gradients(rank, group, p, averaging):
    """The model's gradients on the whole row, by the documented rule."""
    net, ids = model(), token_ids(p.docs.total)
    labels = tasp.next_token_labels(ids, p.docs)
    labels[:9] = -100  # a prompt: ranks have unequal numbers of labels
    local, labels = (tasp.shard(x, p, rank) for x in (ids, labels))
    positions = torch.from_numpy(p.positions(rank))
    forward = DistributedDataParallel(net, process_group=group) if averaging else net
    logits = forward(local, positions, lambda q, k, v: tasp.attention(q, k, v, p, group))
    total, count = tasp.token_loss(logits, labels, group)
    loss = total / count.clamp(min=1)
    (loss * p.ranks if averaging else loss).backward()
    grads = [w.grad for w in net.parameters()]
    if p.ranks > 1 and not averaging:
        for grad in grads:
            dist.all_reduce(grad, group=group)
    return grads


@pytest.mark.parametrize("averaging", [False, True])
def test_s2_gradients_of_four_ranks_are_those_of_one(averaging):
    alone = gradients(0, None, tasp.plan(DOCS, 1), False)
    norm = torch.stack([g.norm() for g in alone]).norm()
    for layout in ("zigzag", "contiguous"):
        answers = tasp.launch(gradients, 4, tasp.plan(DOCS, 4, layout=layout), averaging)
        for grads in answers:
            mine = torch.stack([g.norm() for g in grads]).norm()
            torch.testing.assert_close(mine, norm, rtol=1e-12, atol=0)
            torch.testing.assert_close(grads, alone, rtol=1e-9, atol=1e-12)


# ---- roll and gather


def rolled(row, docs, shift):
    """Brute force: each token's value `shift` further in its document, zero where there is none."""
    out = torch.zeros_like(row)
    for low, high in itertools.pairwise(docs.cu_seqlens.tolist()):
        for i in range(low, high):
            if low <= i + shift < high:
                out[i] = row[i + shift]
    return out


def roll_all(rank, group, plans, shifts):
    """(rolled, gradient) of this rank for each plan and shift; the result's gradient is random(seed=9)."""
    found = []
    for p, shift in itertools.product(plans, shifts):
        row, back = (random(p.docs.total, 3, seed=s) for s in (4, 9))
        x = tasp.shard(row, p, rank).requires_grad_()
        out = tasp.roll(x, p, group, shift=shift)
        out.backward(tasp.shard(back, p, rank))
        found.append((out.detach(), x.grad))
    return found


@pytest.mark.parametrize("ranks", spread([1, 2, 3, 4], keep=2))
def test_roll_and_its_gradient_against_a_loop(ranks):
    shifts = range(-3, 4)
    plans = [tasp.plan(d, ranks, layout=lay) for d in ROWS for lay in tasp.layouts()]
    answers = tasp.launch(roll_all, ranks, plans, shifts)
    for i, (p, shift) in enumerate(itertools.product(plans, shifts)):
        out, grad = (tasp.unshard([a[i][j] for a in answers], p) for j in (0, 1))
        row, back = (random(p.docs.total, 3, seed=s) for s in (4, 9))
        assert torch.equal(out, rolled(row, p.docs, shift)), (str(p), shift)
        assert torch.equal(grad, rolled(back, p.docs, -shift)), (str(p), shift)
        # the transpose: <roll(x), y> = <x, roll_T(y)>
        assert float((out * back).sum()) == pytest.approx(float((row * grad).sum()), abs=1e-12)


def test_roll_along_another_dim_and_of_whole_numbers():
    docs, ids = tasp.Documents.of([5, 4]), torch.arange(18).view(2, 9)

    def work(rank, group, p):
        return tasp.roll(tasp.shard(ids, p, rank, dim=1), p, group, shift=2, dim=1)

    p = tasp.plan(docs, 3)
    whole = tasp.unshard(tasp.launch(work, 3, p), p, dim=1)
    assert whole.tolist() == [[2, 3, 4, 0, 0, 7, 8, 0, 0], [11, 12, 13, 0, 0, 16, 17, 0, 0]]


def gather_all(rank, group, plans):
    found = []
    for p in plans:
        row = random(2, p.docs.total, 3, seed=4)
        x = tasp.shard(row, p, rank, dim=1).requires_grad_()
        whole = tasp.gather(x, p, group, dim=1)
        (whole * (rank + 1)).backward(random(2, p.docs.total, 3, seed=9))
        found.append((whole.detach(), x.grad))
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_gather_gives_the_row_to_all_and_gradients_add_up(ranks):
    plans = [tasp.plan(d, ranks, layout=lay) for d in ROWS for lay in tasp.layouts()]
    answers = tasp.launch(gather_all, ranks, plans)
    for (i, p), rank in itertools.product(enumerate(plans), range(ranks)):
        row, back = (random(2, p.docs.total, 3, seed=s) for s in (4, 9))
        whole, grad = answers[rank][i]
        assert torch.equal(whole, row), str(p)
        times = ranks * (ranks + 1) // 2  # 1 + 2 + ...: every rank's use of the row
        torch.testing.assert_close(grad, times * tasp.shard(back, p, rank, dim=1))


# ---- shard and unshard


def test_shard_is_differentiable_and_unshard_undoes_it():
    p = tasp.plan(DOCS, 3, layout="striped")
    row = random(DOCS.total, 2).requires_grad_()
    pieces = [tasp.shard(row, p, r) for r in range(3)]
    assert torch.equal(tasp.unshard(pieces, p), row)
    sum((r + 1) * piece.sum() for r, piece in enumerate(pieces)).backward()
    for rank in range(3):
        assert (row.grad[p.tokens(rank)] == rank + 1).all()


def test_tensors_that_do_not_fit_are_refused_with_both_sizes():
    p, row = tasp.plan(DOCS, 3), random(DOCS.total, 4)
    pieces = [tasp.shard(row, p, r) for r in range(3)]
    with pytest.raises(tasp.LayoutError, match=r"shape \[49, 4\] has 49 tokens, the plan has 50"):
        tasp.shard(row[1:], p, 0)
    with pytest.raises(
        tasp.LayoutError, match=r"dim 1 of a tensor .* has 4 tokens, the plan has 50"
    ):
        tasp.shard(row, p, 0, dim=1)
    with pytest.raises(tasp.LayoutError, match="rank 3 does not exist"):
        tasp.shard(row, p, 3)
    with pytest.raises(tasp.LayoutError, match="unshard needs 3 pieces, one per rank, got 2"):
        tasp.unshard(pieces[:2], p)
    with pytest.raises(tasp.LayoutError, match=f"piece of rank 1.*has {len(pieces[1]) - 1} tokens"):
        tasp.unshard([pieces[0], pieces[1][1:], pieces[2]], p)
    one = tasp.plan(DOCS, 1)
    for function in (tasp.gather, tasp.roll):
        with pytest.raises(tasp.LayoutError, match=r"dim 0 .* 49 tokens, the plan has 50"):
            function(row[1:], one)


def one_more(rank, group, p, function):
    rows = random(p.num_tokens(rank) + (rank == 1), 2)
    try:
        function(rows, p, group)
    except ValueError as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize("function", [tasp.gather, tasp.roll])
def test_one_rank_with_a_wrong_size_is_an_error_on_all(function):
    p = tasp.plan(DOCS, 2)
    for answer in tasp.launch(one_more, 2, p, function, timeout_s=3):
        assert answer is not None
        assert answer[0] is tasp.LayoutError
        assert "rank 1" in answer[1]
