"""keep_attention: what a checkpointed region keeps of its attention calls must not change in place.

Autograd raises where a tensor that it has saved was changed; so must a region, and as autograd it must
not raise where what was changed is a copy, or was changed before the call.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch._dynamo  # once here, not once in every forked rank
from torch.utils.checkpoint import checkpoint

import tasp_core as tasp
from tasp_core.runtime.checkpointing import keep_attention

DOCS = tasp.Documents.of([40, 57])
CHANGES = {
    # after the call
    "v.zero_()": lambda q, k, v, out: v.zero_(),
    "k.add_(1)": lambda q, k, v, out: k.add_(1),
    "q *= 3": lambda q, k, v, out: q.mul_(3),
    "a view of v": lambda q, k, v, out: v[..., 0:1, :2].zero_(),
    "a view of q": lambda q, k, v, out: q.transpose(-1, -2)[..., 0, :].fill_(7),
    "out.mul_(2)": lambda q, k, v, out: out.mul_(2),
    "a view of out": lambda q, k, v, out: out[..., 0, :].add_(1),
}
FINE = {
    "a clone of v": lambda q, k, v, out: v.clone().zero_(),
    "a clone of out": lambda q, k, v, out: out.clone().mul_(2),
    "a new tensor": lambda q, k, v, out: (out * 2).mul_(3),
    "nothing": lambda q, k, v, out: None,
}
FORMS = {
    "float32": (torch.float32, ()),
    "bfloat16": (torch.bfloat16, ()),
    "a batch": (torch.float32, (2,)),
    "a bfloat16 batch": (torch.bfloat16, (2,)),
}


def gradient(rank, group, p, form, change, kept, *, joint=False, before=False):
    """The gradient of a block's input, or the words of the RuntimeError."""
    dtype, batch = FORMS[form]
    torch.manual_seed(rank)
    tokens = p.num_tokens(rank)
    x = torch.randn(*batch, tokens, 32, dtype=dtype, requires_grad=True)
    weights = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(5)).to(dtype)

    def block(x):
        qkv = [(x @ w).unflatten(-1, (4, 8)) for w in weights]
        if joint:  # one memory, as a fused projection gives it
            qkv = list(torch.stack(qkv, -3).unbind(-3))
        q, k, v = qkv
        if before:
            q.mul_(2)
            v[..., 0, :].add_(1)
        out = tasp.attention(q, k, v, p, group)
        change(q, k, v, out)
        return out.sin()

    try:
        options = {"use_reentrant": False, "context_fn": keep_attention}
        y = checkpoint(block, x, **options) if kept else block(x)
        y.float().square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return x.grad


def on_ranks(rank, group, p, cases):
    return [gradient(rank, group, p, *case) for case in cases]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_change_in_place_after_the_call_raises_where_autograd_raises(ranks):
    p = tasp.plan(DOCS, ranks)
    cases = [(f, c, kept) for f in FORMS for c in CHANGES.values() for kept in (False, True)]
    names = [(f, c) for f in FORMS for c in CHANGES]
    for found in tasp.launch(on_ranks, ranks, p, cases, timeout_s=100):
        for (form, change), plain, kept in zip(names, found[::2], found[1::2], strict=True):
            if torch.is_tensor(plain):  # attention has copied q, k and v of a batch
                assert "batch" in form
                assert "out" not in change
                assert torch.equal(plain, kept)
            else:
                assert isinstance(kept, str), (form, change, "was not noticed")
                assert "inplace" in kept


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", list(FORMS))
def test_what_autograd_allows_is_right(ranks, form):
    p = tasp.plan(DOCS, ranks)
    cases = [(form, c, kept) for c in FINE.values() for kept in (False, True)]

    def work(rank, group):
        more = [
            gradient(rank, group, p, form, FINE["nothing"], kept, joint=joint, before=before)
            for joint, before in ((True, False), (False, True))
            for kept in (False, True)
        ]
        return on_ranks(rank, group, p, cases) + more

    for found in tasp.launch(work, ranks):
        assert not [x for x in found if isinstance(x, str)]
        for plain, kept in zip(found[::2], found[1::2], strict=True):
            assert torch.equal(plain, kept)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("v.zero_()", "v of attention call 0 .* float32 .97, 4, 8., is at version 1"),
        ("q *= 3", "q of attention call 0"),
        ("a view of v", r"v of attention call 0 .*expected version 0 instead.*v = v\.clone"),
    ],
)
def test_the_message_names_the_tensor_and_what_to_do(change, name):
    text = gradient(0, None, tasp.plan(DOCS, 1), "float32", CHANGES[change], kept=True)
    assert torch.is_tensor(text) is False
    assert re.search(name, text.replace("torch.", "")), text


def test_out_of_the_region_is_kept_too():
    """The region returns attention's own result, which is changed outside."""
    p = tasp.plan(DOCS, 1)
    q, k, v = (torch.randn(97, 4, 8, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    out = checkpoint(
        lambda q, k, v: tasp.attention(q, k, v, p),
        q,
        k,
        v,
        use_reentrant=False,
        context_fn=keep_attention,
    )
    out.mul_(2)
    with pytest.raises(RuntimeError, match=r"out of attention call 0 .*out = out \* 2"):
        out.sum().backward()


def test_a_graph_that_is_kept_is_recomputed_again():
    p = tasp.plan(DOCS, 1)
    x, w = torch.randn(97, 4, 8, requires_grad=True), torch.randn(8, 8)

    def block(x):
        return tasp.attention(x @ w, (x @ w).sin(), x, p).cos()

    y = checkpoint(block, x, use_reentrant=False, context_fn=keep_attention).square().sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, torch.autograd.grad(block(x).square().sum(), x)[0])


def test_a_second_run_that_calls_attention_more_often_is_told():
    p, calls = tasp.plan(DOCS, 1), []

    def block(x):
        calls.append(None)
        for _ in range(len(calls)):
            x = tasp.attention(x, x, x, p).sin()
        return x

    x = torch.randn(97, 4, 8, requires_grad=True)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        y = checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)
    with pytest.raises(
        RuntimeError, match="calls attention 1 times in its first run and once more"
    ):
        y.sum().backward()
