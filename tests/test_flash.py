"""Adapters of flash kernels, on a CPU, against fakes that have the real packages' signatures.

The fakes compute in float64; they check that they get what the real kernel demands, in its own
layout, with every feature switched off. Not covered: the kernels themselves; they need a GPU.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tasp_core.kernels import flash

SCALE = 0.3


def pieces(*cus: Tensor) -> list[list[slice]]:
    """Row slices, sequence by sequence."""
    edges = [[slice(a, b) for a, b in pairwise(cu.tolist())] for cu in cus]
    return [list(slices) for slices in zip(*edges, strict=True)]


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """[H, rows, columns]; keys beyond the diagonal of a square are -inf."""
    s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * SCALE
    assert not causal or q.shape[0] == k.shape[0]
    return s.masked_fill(torch.ones(s.shape[1:]).triu(1).bool(), -torch.inf) if causal else s


def dense(q, k, v, cu_q, cu_k, causal):
    """(out [T, H, E], lse [T, H]); differentiable."""
    out, lse = [], []
    for a, b in pieces(cu_q, cu_k):
        s, values = scores(q[a], k[b], causal), v[b].repeat_interleave(q.shape[1] // k.shape[1], 1)
        out.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), values))
        lse.append(s.logsumexp(-1).t())
    return torch.cat(out), torch.cat(lse)


def gradients(dout, q, k, v, out, lse, cu_q, cu_k, causal):
    """What kernels compute from a given out and lse [T, H]: no softmax is taken anew."""
    grads, group = [torch.zeros_like(x) for x in (q, k, v)], q.shape[1] // k.shape[1]
    delta = (dout * out).sum(-1)
    for a, b in pieces(cu_q, cu_k):
        p = (scores(q[a], k[b], causal) - lse[a].t()[..., None]).exp()
        dp = torch.einsum("qhd,khd->hqk", dout[a], v[b].repeat_interleave(group, 1))
        ds = p * (dp - delta[a].t()[..., None]) * SCALE
        grads[0][a] = torch.einsum("hqk,khd->qhd", ds, k[b].repeat_interleave(group, 1))
        for grad, x, y in ((grads[1], ds, q), (grads[2], p, dout)):
            whole = torch.einsum("hqk,qhd->khd", x, y[a])
            grad[b] = whole.unflatten(1, (k.shape[1], group)).sum(2)
    return tuple(grads)


def laid_out(lse: Tensor, layout: str, cu: Tensor, longest: int) -> Tensor:
    """lse [T, H] as a kernel returns it, with rubbish in the padding."""
    if layout == "BHM":
        padded = torch.full((len(cu) - 1, lse.shape[1], longest), 777.0)
        for block, (rows,) in zip(padded, pieces(cu), strict=True):
            block[:, : rows.stop - rows.start] = lse[rows].t()
        return padded
    if layout == "HT padded":
        return torch.cat([lse.t().float(), torch.full((lse.shape[1], 128), 777.0)], 1)
    return (lse.t() if layout == "HT" else lse).float().contiguous()


def read_back(lse: Tensor, layout: str, cu: Tensor, longest: int) -> Tensor:
    """The [T, H] of an lse that a kernel is given; its shape must be the kernel's own."""
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    if layout != "BHM":
        return (lse if layout == "TH" else lse.t()).double()
    assert lse.shape[::2] == (len(cu) - 1, longest)
    rows = [block[:, : s.stop - s.start].t() for block, (s,) in zip(lse, pieces(cu), strict=True)]
    return torch.cat(rows).double()


# --- fakes: signatures of the real packages, one body ---------------------------------------------

SAME_THING = {
    "query": "q",
    "key": "k",
    "value": "v",
    "cum_seq_q": "cu_seqlens_q",
    "cum_seq_k": "cu_seqlens_k",
    "max_q": "max_seqlen_q",
    "max_k": "max_seqlen_k",
    "is_causal": "causal",
    "scale": "softmax_scale",
    "softmax_lse": "lse",
    "logsumexp": "lse",
    "grad_out": "dout",
}
OURS = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k causal softmax_scale return_lse "
OURS += "dout dq dk dv deterministic rng_state unused num_threads m_block_size num_splits sm_margin"
seen = SimpleNamespace(calls=0, deterministic=None)
layout_in_use = {"now": "HT"}  # operators of torch are registered once: it cannot be an argument


def checked(arguments: dict[str, Any], *allowed: str) -> SimpleNamespace:
    """The arguments under one name each; every feature that is not ours must be off."""
    given = {SAME_THING.get(name, name): x for name, x in arguments.items()}
    for name, x in given.items():
        if name not in (*OURS.split(), *allowed):
            assert x is None or x in (False, 0, -1, (-1, -1)), f"{name}={x}"
    a = SimpleNamespace(**given)
    assert a.softmax_scale == SCALE
    assert a.cu_seqlens_q.dtype == a.cu_seqlens_k.dtype == torch.int32
    assert a.max_seqlen_q >= max(2, *a.cu_seqlens_q.diff())  # 1 means decoding to flash-attn 2
    assert all(x.stride(-1) == 1 for x in (a.q, a.k, a.v))
    return a


def forward_body(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    a = checked(arguments)
    assert getattr(a, "return_lse", True)
    assert not torch.is_grad_enabled()
    seen.calls += 1
    out, lse = dense(a.q, a.k, a.v, a.cu_seqlens_q, a.cu_seqlens_k, a.causal)
    return out, laid_out(lse, layout_in_use["now"], a.cu_seqlens_q, a.max_seqlen_q)


def backward_body(arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    a = checked(arguments, "out", "lse")
    assert a.out.dtype == a.dout.dtype == a.q.dtype
    assert all(x.stride(-1) == 1 for x in (a.out, a.dout))
    flag = torch.are_deterministic_algorithms_enabled()
    seen.deterministic = getattr(a, "deterministic", flag)
    if hasattr(a, "unused"):  # torch's own
        wanted = (torch.uint64, (2,)) if torch.version.hip is None else (torch.int64, ())
        assert (a.rng_state.dtype, a.rng_state.shape) == wanted
        assert a.unused.numel() == 1
    lse = read_back(a.lse, layout_in_use["now"], a.cu_seqlens_q, a.max_seqlen_q)
    assert lse.shape == a.q.shape[:2]
    grads = gradients(a.dout, a.q, a.k, a.v, a.out, lse, a.cu_seqlens_q, a.cu_seqlens_k, a.causal)
    if getattr(a, "dq", None) is not None:
        for given, grad in zip((a.dq, a.dk, a.dv), grads, strict=True):
            given.copy_(grad)
    return grads


# what is returned, by style of package
RETURNS = {
    "forward": lambda a: forward_body(a),
    "forward, 4 values": lambda a: (*forward_body(a), torch.zeros(0), torch.zeros(0)),
    "forward, 5 values": lambda a: (*forward_body(a), None, None, None),
    "forward, 8 values": lambda a: (
        lambda out, lse: (out, a["q"], a["k"], a["v"], out, lse, None, None)
    )(*forward_body(a)),
    "gradients": lambda a: backward_body(a),
    "gradients and delta": lambda a: (*backward_body(a), torch.zeros(1)),
    "delta": lambda a: (backward_body(a), torch.zeros(1))[1],
}


def function(name: str, signature: str, returns: str) -> Any:
    """A function of that signature; an operator of torch if it starts with "op:"."""
    space = {"returns": RETURNS[returns], "T": Tensor, "Opt": Tensor | None, "V": (Tensor,) * 4}
    plain, result = (
        signature.removeprefix("op:"),
        "T" if returns == "delta" else "tuple[T, T, T, T]",
    )
    exec(f"def {name}({plain}) -> {result}: return returns(dict(locals()))", space)
    if plain == signature:
        return space[name]
    grads = ("dq", "dk", "dv") if returns == "delta" else ()
    op = f"tasp_fake_{len(plain)}::{name}"
    return torch.library.custom_op(op, space[name], mutates_args=grads, device_types="cpu")


LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
OP_LENGTHS = "cu_seqlens_q: T, cu_seqlens_k: T, max_seqlen_q: int, max_seqlen_k: int"
OP_OPTIONAL = "cu_seqlens_q: Opt = None, cu_seqlens_k: Opt = None, "
OP_WINDOW = "window_size_left: int = -1, window_size_right: int = -1, "
OP_GIVEN = "dout: T, q: T, k: T, v: T, out: T, softmax_lse: T, "
FLASH2 = ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
FLASH3 = ("_flash_attn_forward", "_flash_attn_backward")
NONE_3 = "page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, "

FLASH2_25 = (
    function(
        FLASH2[0],
        f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size, "
        "alibi_slopes, return_softmax, block_table",
        "forward, 8 values",
    ),
    function(
        FLASH2[1],
        f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {LENGTHS}, dropout_p, "
        "softmax_scale, causal, window_size, alibi_slopes, deterministic, rng_state=None",
        "gradients and delta",
    ),
)
FLASH2_28 = (
    function(
        FLASH2[0],
        f"op:q: T, k: T, v: T, {OP_LENGTHS}, dropout_p: float, "
        f"softmax_scale: float, causal: bool, {OP_WINDOW} softcap: float = 0.0, "
        "alibi_slopes: Opt = None, return_softmax: bool = False, block_table: Opt = None, "
        "leftpad_k: Opt = None, seqused_k: Opt = None, zero_tensors: bool = False",
        "forward, 4 values",
    ),
    function(
        FLASH2[1],
        f"op:{OP_GIVEN} dq: Opt, dk: Opt, dv: Opt, {OP_LENGTHS}, "
        "dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, "
        "window_size_right: int, softcap: float, alibi_slopes: Opt, deterministic: bool, "
        "rng_state: Opt = None, zero_tensors: bool = False",
        "delta",
    ),
)
FLASH3_28 = (
    function(
        FLASH3[0],
        "q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, "
        f"cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, {NONE_3}"
        "k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, "
        "attention_chunk=0, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0",
        "forward, 4 values",
    ),
    function(
        FLASH3[1],
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, "
        "sequed_k, max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, causal, "
        "window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0",
        "gradients and delta",
    ),
)
FLASH3_OPS = (
    function(
        FLASH3[0],
        "op:q: T, k: T, v: T, k_new: Opt = None, v_new: Opt = None, "
        f"qv: Opt = None, out_: Opt = None, {OP_OPTIONAL} max_seqlen_q: int | None = None, "
        "max_seqlen_k: int | None = None, softmax_scale: float | None = None, "
        f"causal: bool = False, {OP_WINDOW} softcap: float = 0.0, num_splits: int = 1",
        "forward, 4 values",
    ),
    function(
        FLASH3[1],
        f"op:{OP_GIVEN} {OP_OPTIONAL} sequed_q: Opt = None, sequed_k: Opt = None, "
        "max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dq: Opt = None, "
        "dk: Opt = None, dv: Opt = None, softmax_scale: float | None = None, "
        f"is_causal: bool = False, {OP_WINDOW} softcap: float = 0.0, "
        "deterministic: bool = False, sm_margin: int = 0",
        "delta",
    ),
)
FLASH4 = (
    "{} cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None"
)
FLASH4 += (
    ", max_seqlen_k=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None"
)
FLASH4 += ", window_size_right=None, {}"
FLASH4_FORWARD = FLASH4.format("q, k, v,", "num_splits=1, return_lse=False, out=None, lse=None")
FLASH4_BACKWARD = FLASH4.format(
    "q, k, v, out, dout, lse,", "m_block_size=64, deterministic=False, dq=None, dk=None, dv=None"
)
ATEN_FORWARD = "query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, "
ATEN_FORWARD += "return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None"
ATEN_BACKWARD = "grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, "
ATEN_BACKWARD += "dropout_p, is_causal, rng_state, unused, *, scale=None, window_size_left=None"
ATEN = (
    function("forward", ATEN_FORWARD, "forward, 5 values"),
    function("backward", ATEN_BACKWARD, "gradients"),
)
FLASH4_B5, FLASH4_B36 = (
    (function("forward", FLASH4_FORWARD, style), function("backward", FLASH4_BACKWARD, "gradients"))
    for style in ("forward", "forward, 5 values")
)


class Fake(NamedTuple):
    adapter: type[flash.Varlen]
    functions: tuple[Any, Any]
    layout: str = "HT"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> type[flash.Varlen]:
        """Puts the functions where the adapter looks for them."""
        monkeypatch.setitem(layout_in_use, "now", self.layout)
        names = dict(zip(self.adapter.functions, self.functions, strict=True))
        if self.adapter is flash.AtenFlash:
            monkeypatch.setattr(torch.version, "hip", "7.0" if self.layout == "BHM" else None)
            monkeypatch.setattr(flash.AtenFlash, "lookup", lambda self, name: names[name])
        else:
            module_of(monkeypatch, self.adapter.module, **names)
        return self.adapter


def module_of(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


FAKES = {
    "aten": Fake(flash.AtenFlash, ATEN),
    "aten on ROCm": Fake(flash.AtenFlash, ATEN, "BHM"),
    "flash-attn 2.5": Fake(flash.Flash2, FLASH2_25, "BHM"),
    "flash-attn 2.8": Fake(flash.Flash2, FLASH2_28),
    "flash-attn 2.8, Triton": Fake(flash.Flash2, FLASH2_28, "TH"),
    "flash-attn 3 of 2.8": Fake(flash.Flash3, FLASH3_28),
    "flash-attn 3, operators": Fake(flash.Flash3, FLASH3_OPS),
    "flash-attn 4 beta 5": Fake(flash.Flash4, FLASH4_B5),
    "flash-attn 4 beta 36": Fake(flash.Flash4, FLASH4_B36),
}


@pytest.fixture(params=FAKES.values(), ids=FAKES)
def adapter(request, monkeypatch) -> type[flash.Varlen]:
    return request.param.install(monkeypatch)


# --- forward and backward -------------------------------------------------------------------------


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def tensors(rows: int, keys: int, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    """q, k, v, dout."""
    torch.manual_seed(rows + 31 * keys + heads)
    sizes = ((rows, heads), (keys, kv_heads), (keys, kv_heads), (rows, heads))
    return [torch.randn(*size, 64, dtype=torch.float64) for size in sizes]


def expected(q, k, v, dout, cu_q, cu_k, causal):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, cu_q, cu_k, causal)
    return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, dout)


def assert_close(found, wanted) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)  # lse travels in float32


CASES = {
    "gqa": ([3, 1, 6], [2, 7, 1], False, 4, 2),
    "causal": ([3, 1, 6], [3, 1, 6], True, 4, 2),
    "one sequence": ([5], [9], False, 2, 2),
    "as many tokens as heads": ([3, 1], [3, 1], True, 4, 1),
    "one token a sequence": ([1, 1, 1], [4, 2, 1], False, 2, 1),
    "one head": ([2, 3], [1, 2], False, 1, 1),
    "one of all": ([1], [1], True, 1, 1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_backward_equal_dense_autograd(adapter, case):
    lengths_q, lengths_k, causal, heads, kv_heads = case
    cu_q, cu_k = cumulative(lengths_q), cumulative(lengths_k)
    sizes = (cu_q, cu_k, max(lengths_q), max(lengths_k), causal, SCALE)
    q, k, v, dout = tensors(sum(lengths_q), sum(lengths_k), heads, kv_heads)
    out, lse, grads = expected(q, k, v, dout, cu_q, cu_k, causal)
    kernel = adapter()
    found, found_lse = kernel.forward(q, k, v, *sizes)
    assert (found.dtype, found_lse.dtype) == (q.dtype, torch.float32)
    assert_close((found, found_lse), (out, lse))
    assert_close(kernel.backward(dout, q, k, v, found, found_lse, *sizes), grads)
    # one that has run no forward yet has to learn the layout of lse some other way
    assert_close(adapter().backward(dout, q, k, v, out, lse, *sizes), grads)


def test_gradients_of_disjoint_keys_add_up(adapter):
    """The final out and lse make each part's dq, dk, dv exact, whatever other parts there are."""
    kernel, cu = adapter(), cumulative([5])
    q, k, v, dout = tensors(5, 8)
    out, lse, (dq, dk, dv) = expected(q, k, v, dout, cu, cumulative([8]), False)
    total = torch.zeros_like(dq)
    for part in (slice(0, 3), slice(3, 8)):
        cu_k = cumulative([part.stop - part.start])
        given = (dout, q, k[part], v[part], out, lse, cu, cu_k, 5, 5, False, SCALE)
        grads = kernel.backward(*given)
        assert_close(grads[1:], (dk[part], dv[part]))
        total += grads[0]
    assert_close([total], [dq])


def test_inputs_may_be_strided_and_wide_and_need_gradients(adapter):
    q, k, v, dout = tensors(6, 6, 2, 2)
    cu = cumulative([6])
    sizes = (cu, cu, 6, 6, True, SCALE)
    out, lse, grads = expected(q, k, v, dout, cu, cu, True)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    assert strided[0].stride(-1) != 1
    found, found_lse = adapter().forward(*strided, *sizes)
    assert not found.requires_grad
    assert_close((found, found_lse), (out, lse))
    # accumulators differ from q in dtype: kernels want out and dout in q's, and lse in float32
    narrow = adapter().backward(dout.float(), *strided, out.float(), lse, *sizes)
    assert_close(narrow, grads)


def test_backward_is_deterministic_unless_told_otherwise(adapter):
    q, k, v, dout = tensors(3, 3)
    cu = cumulative([3])
    out, lse, _ = expected(q, k, v, dout, cu, cu, True)
    for wanted in (True, False):
        kernel = adapter(deterministic=wanted)
        kernel.backward(dout, q, k, v, out, lse, cu, cu, 3, 3, True, SCALE)
        assert seen.deterministic is wanted
        assert torch.get_deterministic_debug_mode() == 0  # torch's own flag is put back
        with pytest.raises(AssertionError):  # also after an error
            kernel.backward(dout, q, k, v, out, lse, cu, cu, 3, 3, True, SCALE + 1)
        assert torch.get_deterministic_debug_mode() == 0


def test_determinism_is_not_asked_where_the_kernel_refuses_it(monkeypatch):
    flash3, flash4 = (
        FAKES[f"flash-attn {n}"].install(monkeypatch) for n in ("3 of 2.8", "4 beta 5")
    )
    assert [flash3().is_deterministic(dim) for dim in (64, 192, 256)] == [True, True, False]
    for major, wanted in ((10, True), (12, False)):
        monkeypatch.setattr(flash, "_device", lambda major=major: ("cuda", major, 0))
        assert flash4().is_deterministic(128) is wanted


def test_the_layout_is_probed_at_most_once(adapter):
    q, k, v, _ = tensors(4, 4)  # as many tokens as heads: the shape of lse does not tell
    kernel, cu, calls = adapter(), cumulative([4]), seen.calls
    for _ in range(3):
        kernel.forward(q, k, v, cu, cu, 4, 4, True, SCALE)
    assert seen.calls == calls + (3 if kernel.layout == "BHM" else 4)


def test_head_dims_beyond_a_kernels_limits_are_refused_in_words(monkeypatch):
    kernel, cu = FAKES["flash-attn 4 beta 5"].install(monkeypatch)(), cumulative([2])
    for dim in (256, 96):
        q = torch.zeros(2, 2, dim)
        with pytest.raises(ValueError, match=rf"flash4 takes head dims up to 128.*found \[{dim}"):
            kernel.forward(q, q, q, cu, cu, 2, 2, True, SCALE)
    limits = {a.name: (a.max_head_dim, a.unequal_dims) for a in flash._ADAPTERS.values()}
    others = dict.fromkeys(("aten", "flash2", "flash3"), (256, False))
    assert limits == {"flash4": (128, False), **others}


def test_aten_binds_and_runs_the_real_operators_of_this_torch():
    """On the meta device: signature, dtypes and shapes are torch's own."""
    kernel = flash.AtenFlash()
    q, k = (torch.empty(n, h, 64, dtype=torch.bfloat16, device="meta") for n, h in ((5, 4), (9, 2)))
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    out, lse = kernel.forward(q, k, k, cu, cu, 3, 6, False, SCALE)
    assert (out.shape, lse.shape, kernel.layout) == (q.shape, (5, 4), "HT")
    grads = kernel.backward(out, q, k, k, out.float(), lse, cu, cu, 3, 6, False, SCALE)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]


# --- lse ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["HT", "TH", "BHM", "HT padded"])
def test_lse_rows_reads_every_layout(layout):
    cu, lse = cumulative([3, 1, 3]), torch.randn(7, 2)
    assert torch.equal(flash.lse_rows(laid_out(lse, layout, cu, 5), 7, 2, cu), lse)
    if layout != "HT padded":
        assert torch.equal(flash.lse_rows(flash.lse_for(lse, layout, cu, 5), 7, 2, cu), lse)
    if layout.startswith("HT"):
        assert torch.equal(flash.lse_rows(laid_out(lse, layout, cu, 5)[None], 7, 2), lse)


def test_lse_for_fills_the_padding_with_infinity():
    lse = flash.lse_for(torch.zeros(4, 2), "BHM", cumulative([3, 1]), 3)
    assert torch.isposinf(lse).sum() == 2 * 2
    assert torch.isposinf(lse[1, :, 1:]).all()


def test_lse_rows_wants_an_order_where_the_shape_does_not_tell():
    lse = torch.randn(4, 4)
    with pytest.raises(ValueError, match="pass order="):
        flash.lse_rows(lse, 4, 4)
    assert torch.equal(flash.lse_rows(lse, 4, 4, order="TH"), lse)
    assert torch.equal(flash.lse_rows(lse, 4, 4, order="HT"), lse.t())


@pytest.mark.parametrize(
    ("shape", "cu", "order"),
    [
        ((3, 2), None, None),  # too short
        ((5, 2), None, "HT"),  # the other way round
        ((2, 5), None, "TH"),
        ((3, 2, 5), None, None),  # blocks, but no cu
        ((3, 2, 5), cumulative([3, 2]), None),  # blocks of other sequences
        ((2, 3, 5), cumulative([3, 2]), None),  # blocks of other heads
        ((10,), None, None),
    ],
)
def test_lse_rows_refuses_what_does_not_fit(shape, cu, order):
    with pytest.raises(ValueError, match="5 tokens and 2 heads; possible"):
        flash.lse_rows(torch.zeros(shape), 5, 2, cu, order=order)


def test_a_kernel_with_a_strange_lse_is_refused(adapter, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "laid_out", lambda *_: torch.zeros(3, 3, 3))
    q, k, v, _ = tensors(5, 5)
    cu = cumulative([5])
    with pytest.raises(ValueError, match="log-sum-exp of shape"):
        adapter().forward(q, k, v, cu, cu, 5, 5, True, SCALE)


def test_normalise_empty():
    out, lse = torch.full((3, 2, 4), torch.nan), torch.tensor([[1.0], [torch.inf], [0.0]])
    empty = torch.tensor([False, True, True])
    clean, clean_lse = flash.normalise_empty(out, lse.repeat(1, 2), empty)
    assert (clean[1:] == 0).all()
    assert clean[0].isnan().all()
    assert clean_lse.tolist() == [[1.0] * 2, [-torch.inf] * 2, [-torch.inf] * 2]


# --- what can be used, and why not ----------------------------------------------------------------


def on_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, major: int, *fakes: str
) -> dict[str, str]:
    """What is available on a device, with only these packages installed."""
    monkeypatch.setattr(flash, "_device", lambda: (kind, major, 0))
    for package in (flash.Flash2, flash.Flash3, flash.Flash4):
        monkeypatch.setitem(sys.modules, package.module.split(".")[0], None)
        monkeypatch.setitem(sys.modules, package.module, None)
    for fake in fakes:
        FAKES[f"flash-attn {fake}"].install(monkeypatch)
    return flash.available("cuda")


def test_without_a_device_nothing_is_available(monkeypatch):
    assert set(flash.available("cpu")) == {"aten", "flash2", "flash3", "flash4"}
    assert all("'cpu'" in why for why in flash.available("cpu").values())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert all("needs a CUDA or ROCm device" in why for why in flash.available("cuda").values())
    assert flash.best("cuda") is None
    for name in ("flash", "aten", "flash2", "flash5"):
        with pytest.raises(
            ValueError, match=rf"asked for kernel '{name}'; found aten: needs a CUDA"
        ):
            flash.find(name)


def test_missing_modules_are_reported(monkeypatch):
    states = on_device(monkeypatch, "cuda", 9)
    assert states["aten"] == "ok"
    assert flash.Flash2.module in states["flash2"]
    assert flash.Flash3.module in states["flash3"]
    assert states["flash4"] == "not made for cuda devices of version 9.0"
    assert flash.find("aten").name == "aten"
    with pytest.raises(ValueError, match=r"asked for kernel 'flash'; .*flash2: ModuleNotFound"):
        flash.find("flash")


def test_missing_and_foreign_functions_are_reported(monkeypatch):
    def state(forward: str | None, backward: str = "*args, **kwargs") -> str:
        on_device(monkeypatch, "cuda", 9)
        signatures = dict(zip(FLASH3, (forward, backward), strict=True)) if forward else {}
        found = {name: function(name, s, "forward") for name, s in signatures.items()}
        module_of(monkeypatch, flash.Flash3.module, **found)
        return flash.available("cuda")["flash3"]

    known = "q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal"
    assert "has no attribute '_flash_attn_forward'" in state(None)
    assert "_flash_attn_forward takes no q, k, v, cu_seqlens_q" in state("*args, **kwargs")
    assert "takes no cu_seqlens_q, cu_seqlens_k:" in state("q, k, v, softmax_scale, causal")
    assert "_flash_attn_backward takes no dout, out" in state(known, known)
    assert "demands moon_phase, unknown" in state(f"{known}, moon_phase")
    monkeypatch.setattr(flash.AtenFlash, "functions", ("_flash_attention_sideways",) * 2)
    assert "_flash_attention_sideways" in flash.available("cuda")["aten"]


def test_a_broken_installation_is_reported_in_one_line(monkeypatch):
    def broken(name: str) -> None:
        raise OSError("undefined symbol: _ZN2at\nand a page of noise")

    monkeypatch.setattr(flash.importlib, "import_module", broken)
    assert on_device(monkeypatch, "cuda", 8)["flash2"] == "OSError: undefined symbol: _ZN2at"


@pytest.mark.parametrize(
    ("kind", "major", "wanted"),
    [("cuda", 8, 2), ("cuda", 9, 3), ("cuda", 10, 4), ("cuda", 12, 4), ("rocm", 9, 2)],
)
def test_flash_is_the_newest_one_made_for_the_device(monkeypatch, kind, major, wanted):
    on_device(monkeypatch, kind, major, "2.8", "3, operators", "4 beta 36")
    assert flash.best("cuda") == flash.find("flash").name == f"flash{wanted}"
    assert flash.best("cpu") is None
    on_device(monkeypatch, kind, major, "2.5")
    assert flash.find("flash").name == "flash2"


def test_old_gpus_have_none(monkeypatch):
    states = on_device(monkeypatch, "cuda", 7, "2.8")
    assert set(states.values()) == {"not made for cuda devices of version 7.0"}
