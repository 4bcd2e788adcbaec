"""One door to attention kernels that return (out, lse) and to their backward with a given out, lse.

    math    plain tensor operations 512 rows at a time; any device, float32 and float64; the oracle
    aten    torch's own flash kernels: CPU (all float dtypes), CUDA and ROCm (fp16, bf16)
    flash   flash-attn 2, 3 or 4 where installed (fp16, bf16)

A call is a set of sequences (lower.Call): query rows against key rows, all FULL or all square CAUSAL,
some of the latter mirrored. So a kernel needs no window, and how it would align one does not matter.
Backward takes the row's FINAL out and lse, so that each call's dq, dk, dv are exact partial sums.
Shapes: q [t, H, D], k [s, K, D], v [s, K, E], out [t, H, E], lse [t, H]; K divides H.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import flash, torch_required  # noqa: F401 (refuses an old torch)
from .documents import Documents
from .errors import PlanError
from .program import Call
from .tiles import Sequences
from .views import Picker, aligned, batches, each

Triple = tuple[Tensor, Tensor, Tensor]
HALF = (torch.float16, torch.bfloat16)


class Kernel(ABC):
    """A forward and a backward over the sequences of a call."""

    name = ""
    computes = True  # whether calls are made at all; without, a pass is its exchange alone
    native_partials = False  # whether partial results come in the input dtype even if narrow

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to compute in when a row's result is merged from several calls."""
        narrow = dtype in HALF and not self.native_partials
        return torch.float32 if narrow else dtype

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out [rows, H, E] and lse [rows, H] of the call's query rows, sequence after sequence."""

    @abstractmethod
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call,
        scale: float,
    ) -> Triple:  # fmt: skip
        """dq of the call's query rows, dk and dv of its key rows, sequence after sequence."""

    def finish(self) -> None:  # noqa: B027 (most are done when they return)
        """Wait for what is begun, before results leave the rank or the pass; streams wait by themselves."""


class Math(Kernel):
    """Plain softmax(q k^T) v, at least in float32, 512 query rows at a time.

    With a `window`, sequences are whole documents, of which a row sees so many tokens only.
    """

    name, rows = "math", 512

    def __init__(self, window: int | None = None) -> None:
        self.window = window

    def _chunks(
        self, q: Tensor, k: Tensor, causal: bool, mirrored: bool, scale: float
    ) -> Iterator[Any]:
        """(rows, keys, scores [K, G, rows, keys]) for rows of grouped queries [t, K, G, D]."""
        # row i sees keys i + least .. i + most
        most = 0 if causal and not mirrored else len(k)
        least = 0 if mirrored else -len(q)
        if self.window is not None:
            least, most = max(least, 1 - self.window), min(most, self.window - 1)
        for low in range(0, len(q), self.rows):
            high = min(low + self.rows, len(q))
            keys = slice(max(0, low + least), min(len(k), high + most))
            scores = torch.einsum("qkgd,skd->kgqs", q[low:high], k[keys]) * scale
            row = torch.arange(low, high, device=q.device)[:, None]
            ahead = torch.arange(keys.start, keys.stop, device=q.device) - row
            hidden = (ahead < least) | (ahead > most)
            yield slice(low, high), keys, scores.masked_fill_(hidden, -torch.inf)

    @staticmethod
    def _wide(*tensors: Tensor) -> list[Tensor]:
        return [x.float() if x.dtype in HALF else x for x in tensors]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for a, m, b, n, mirrored in each(call):
            qs, ks, vs = self._wide(q[a : a + m], k[b : b + n], v[b : b + n])
            grouped = qs.unflatten(1, (ks.shape[1], -1))
            for _, keys, scores in self._chunks(grouped, ks, call.causal, mirrored, scale):
                lse = torch.logsumexp(scores, -1)
                p = torch.exp(scores - lse[..., None])
                out = torch.einsum("kgqs,ske->qkge", p, vs[keys])
                outs.append(out.flatten(1, 2))
                lses.append(lse.permute(2, 0, 1).flatten(1, 2))
        return torch.cat(outs), torch.cat(lses)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call,
        scale: float,
    ) -> Triple:  # fmt: skip
        grads = []
        for a, m, b, n, mirrored in each(call):
            do, qs, ks, vs, os = self._wide(
                *(x[a : a + m] for x in (dout, q)),
                *(x[b : b + n] for x in (k, v)),
                out[a : a + m],
            )
            heads = (ks.shape[1], -1)
            grouped, do, os = (x.unflatten(1, heads) for x in (qs, do, os))
            row_lse = lse[a : a + m].to(ks.dtype).unflatten(1, heads).permute(1, 2, 0)
            delta = (do * os).sum(-1).permute(1, 2, 0)
            dq, dk, dv = torch.empty_like(grouped), torch.zeros_like(ks), torch.zeros_like(vs)
            for rows, keys, scores in self._chunks(grouped, ks, call.causal, mirrored, scale):
                p = torch.exp(scores - row_lse[:, :, rows, None])
                dv[keys] += torch.einsum("kgqs,qkge->ske", p, do[rows])
                dp = torch.einsum("qkge,ske->kgqs", do[rows], vs[keys])
                ds = p * (dp - delta[:, :, rows, None]) * scale
                dq[rows] = torch.einsum("kgqs,skd->qkgd", ds, ks[keys])
                dk[keys] += torch.einsum("kgqs,qkgd->skd", ds, grouped[rows])
            grads.append((dq.flatten(1, 2), dk, dv))
        return _cat(grads)


class AtenCpu(Kernel):
    """torch's CPU flash kernel; sequences of one shape at even distances run as one batch."""

    name = "aten"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        value_dim = v.shape[-1]
        q, k, v = _equal_dims(q, k, v)
        outs, lses = [], []
        for rows, keys, back in batches(call):
            out, lse = op(rows(q), keys(k), keys(v), 0.0, call.causal, scale=scale)
            outs.append(back(out)[..., :value_dim])
            lses.append(back(lse[..., None])[..., 0])
        return _cat1(outs), _cat1(lses)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call,
        scale: float,
    ) -> Triple:  # fmt: skip
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        key_dim, value_dim = q.shape[-1], v.shape[-1]
        q, k, v, dout, out = _equal_dims(q, k, v, dout, out)
        grads = []
        for rows, keys, back in batches(call):
            row_lse = rows(lse[..., None])[..., 0]
            dq, dk, dv = op(
                rows(dout), rows(q), keys(k), keys(v), rows(out), row_lse, 0.0, call.causal,
                scale=scale,
            )  # fmt: skip
            dq, dk = (back(x)[..., :key_dim] for x in (dq, dk))
            grads.append((dq, dk, back(dv)[..., :value_dim]))
        return _cat(grads)


class VarlenKernel(Kernel):
    """A variable-length flash kernel of a GPU; rows are copied end to end where they are not yet."""

    native_partials = True

    def __init__(self, varlen: Any) -> None:
        self.varlen, self.name = varlen, varlen.name

    def _fit(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Of one head dim that the kernel takes, every row and head of them at a 16-byte border.

        K and V are two slices of one row, [tokens, K, D + E]: of head dims such as 24 and 20 one of
        them is padded, which aligns it, and the other one may lie anywhere. Kernels load 16 bytes at
        once, of all of these; lse they read number by number.
        """
        padded = _equal_dims(*tensors, multiple=self.varlen.head_dim_multiple)
        return tuple(aligned(x) for x in padded)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor]:
        value_dim, pick = v.shape[-1], Picker.of(call, q.device)
        q, k, v = self._fit(q, k, v)
        q, k, v = pick.q(q), pick.k(k), pick.k(v)
        out, lse = self.varlen.forward(q, k, v, *pick.sizes, call.causal, scale)
        return pick.back_q(out)[..., :value_dim], pick.back_q(lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call,
        scale: float,
    ) -> Triple:  # fmt: skip
        key_dim, value_dim = q.shape[-1], v.shape[-1]
        pick = Picker.of(call, q.device)
        q, k, v, dout, out = self._fit(q, k, v, dout, out)
        dq, dk, dv = self.varlen.backward(
            *(pick.q(x) for x in (dout, q)), *(pick.k(x) for x in (k, v)),
            *(pick.q(x) for x in (out, lse)), *pick.sizes, call.causal, scale,
        )  # fmt: skip
        dq, dk, dv = pick.back_q(dq), pick.back_k(dk), pick.back_k(dv)
        return dq[..., :key_dim], dk[..., :key_dim], dv[..., :value_dim]


def _equal_dims(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Zero-padded to one head dim, a multiple of `multiple`: scores and output do not change.

    The head dim is made innermost in memory where it is not: flash kernels take that for granted.
    """
    size = -(-max(x.shape[-1] for x in tensors) // multiple) * multiple
    whole = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    return tuple(x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in whole)


def _cat1(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cat(parts: list[Triple]) -> Triple:
    dq, dk, dv = (_cat1(list(column)) for column in zip(*parts, strict=True))
    return dq, dk, dv


@lru_cache(maxsize=64)
def resolve(name: str | Kernel, device_type: str, dtype: torch.dtype) -> Kernel:
    """The kernel for a name ("auto", "math", "aten", "flash"), device type and dtype; a Kernel is itself.

    "auto" is aten on a CPU; on a GPU flash where installed, else aten, and math for wide dtypes.

    Raises:
        PlanError: an unknown name, or a kernel that cannot serve the device or dtype.
    """
    if device_type not in ("cpu", "cuda"):
        raise PlanError(f"tensors must be on a CPU or a GPU (CUDA, ROCm), got {device_type!r}")
    gpu = device_type != "cpu"
    if isinstance(name, Kernel):
        return name
    if name == "auto":
        if gpu and dtype not in HALF:
            warnings.warn(
                f"flash kernels take no {dtype} on {device_type}: using the slow kernel 'math'",
                stacklevel=2,
            )
            return Math()
        name = "flash" if gpu and flash.best(device_type) else "aten"
    if name == "math":
        return Math()
    if name not in ("aten", "flash"):
        raise PlanError(f"no kernel {name!r}; known are auto, math, aten, flash")
    if name == "aten" and not gpu:
        return AtenCpu()
    if dtype not in HALF:
        raise PlanError(
            f"kernel {name!r} on {device_type} takes fp16 and bf16, not {dtype}; use 'math'"
        )
    found = flash.AtenFlash() if name == "aten" else flash.find("flash")
    return VarlenKernel(found)


def oracle(
    q: Tensor, k: Tensor, v: Tensor, docs: Documents, *, dout: Tensor | None = None,
    scale: float | None = None, kernel: Kernel | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Attention of a whole row on one device, document by document, in float64 with kernel `math`.

    Args:
        q, k, v: [T, H, D], [T, K, D], [T, K, E] in row order.
        dout: [T, H, E]; with it the gradients dq, dk, dv are returned too.
        kernel: another kernel to run, in the inputs' dtype ("the plain kernel"); for documents with
            a window Math(window), the only one that takes it.

    Returns:
        {"out", "lse"} and, with dout, {"dq", "dk", "dv"}.

    Raises:
        PlanError: a kernel without the documents' window.
    """
    if kernel is None:
        kernel, (q, k, v) = Math(docs.window), (x.double() for x in (q, k, v))
        dout = None if dout is None else dout.double()
    if getattr(kernel, "window", None) != docs.window:
        raise PlanError(f"kernel {kernel.name!r} takes no window={docs.window}; use Math(window)")
    some = docs.lengths > 0
    low, count = docs.cu_seqlens[:-1][some], docs.lengths[some]
    call = Call(docs.causal, Sequences(low, count, low, count), (), ())
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not some.any():
        empty = {"out": q.new_zeros(0, q.shape[1], v.shape[2]), "lse": q.new_zeros(q.shape[:2])}
        return empty if dout is None else {**empty, "dq": q, "dk": k, "dv": v}
    out, lse = kernel.forward(q, k, v, call, scale)
    result = {"out": (out := out.to(q.dtype)), "lse": lse}
    if dout is not None:
        grads = kernel.backward(dout, q, k, v, out, lse, call, scale)
        result |= {n: g.to(q.dtype) for n, g in zip(("dq", "dk", "dv"), grads, strict=True)}
    return result
