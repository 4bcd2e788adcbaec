"""Kernel `math`, plain tensor operations 512 query rows at a time, and the float64 reference made of it.

Shapes as in kernel.py. Heads are grouped by KV head: q [t, K, G, D] with G = H / K query heads per KV head.
In einsum, q: query rows, s: key rows, k: KV heads, g: query heads of a group, d: key dim, e: value dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PlanError
from ..lowering.program import Call
from ..sequence.documents import Documents
from ..sequence.masks import Mask
from ..sequence.tiles import Sequences
from .aten import _cat
from .kernel import HALF, Kernel, Triple
from .views import each


class Math(Kernel):
    """Plain softmax(q k^T) v, at least in float32, 512 query rows at a time.

    Args:
        window: of a sliding window; the sequences of a call must then be whole documents.
        mask: which keys each query sees; the only sequence of a call is then the whole packed sequence.
    """

    name, rows = "math", 512

    def __init__(self, window: int | None = None, mask: Mask | None = None) -> None:
        self.window, self.mask = window, mask

    def _chunks(
        self, q: Tensor, k: Tensor, causal: bool, inverse_causal: bool, scale: float
    ) -> Iterator[Any]:
        """(rows, keys, scores [K, G, rows, keys]) of 512 query rows at a time; hidden scores are -inf.

        Args:
            q, k: one sequence: grouped queries [t, K, G, D], keys [s, K, D].

        Yields:
            rows (a slice) of q, and keys (a slice or indices) of k: those that any of the rows may see.
        """
        if self.mask is not None:
            yield from self._masked_chunks(q, k, self.mask, scale)
            return
        # row i sees keys i + least .. i + most; CAUSAL and INVERSE_CAUSAL sequences are squares
        most = 0 if causal and not inverse_causal else len(k)
        least = 0 if inverse_causal else -len(q)
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

    def _masked_chunks(self, q: Tensor, k: Tensor, mask: Mask, scale: float) -> Iterator[Any]:
        """As `_chunks`, for the whole packed sequence and any mask; `keys` are indices."""
        for low in range(0, len(q), self.rows):
            rows = np.arange(low, min(low + self.rows, len(q)))
            _, first, stop = mask.runs(rows)
            # +1 where a run of keys begins, -1 after its end: keys with a positive sum are seen
            change = np.zeros(len(k) + 1, dtype=np.int64)
            np.add.at(change, first, 1)
            np.add.at(change, stop, -1)
            seen = np.flatnonzero(np.cumsum(change)[:-1])
            hidden = torch.from_numpy(~mask.dense(rows, seen)).to(q.device)
            keys = torch.from_numpy(seen).to(q.device)
            queries = slice(low, low + len(rows))
            scores = torch.einsum("qkgd,skd->kgqs", q[queries], k[keys]) * scale
            yield queries, keys, scores.masked_fill_(hidden, -torch.inf)

    @staticmethod
    def _at_least_float32(*tensors: Tensor) -> list[Tensor]:
        return [x.float() if x.dtype in HALF else x for x in tensors]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `Kernel.forward`: lse = log sum exp(scores), out = exp(scores - lse) v."""
        outs, lses = [], []
        for q_first, q_count, k_first, k_count, inverse_causal in each(call):
            q_rows, k_rows = slice(q_first, q_first + q_count), slice(k_first, k_first + k_count)
            qs, ks, vs = self._at_least_float32(q[q_rows], k[k_rows], v[k_rows])
            grouped = qs.unflatten(1, (ks.shape[1], -1))
            for _, keys, scores in self._chunks(grouped, ks, call.causal, inverse_causal, scale):
                lse = torch.logsumexp(scores, -1)
                p = torch.exp(scores - _finite(lse)[..., None])
                out = torch.einsum("kgqs,ske->qkge", p, vs[keys])
                outs.append(out.flatten(1, 2))
                lses.append(lse.permute(2, 0, 1).flatten(1, 2))
        return torch.cat(outs), torch.cat(lses)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        scale: float,
    ) -> Triple:
        """As `Kernel.backward`. With p = exp(scores - final lse), the weights of these keys:

        dv = p^T dout, dp = dout v^T, ds = p (dp - delta) scale with delta = rowsum(dout * out),
        dq = ds k, dk = ds^T q.
        """
        grads = []
        for q_first, q_count, k_first, k_count, inverse_causal in each(call):
            q_rows, k_rows = slice(q_first, q_first + q_count), slice(k_first, k_first + k_count)
            do, qs, ks, vs, os = self._at_least_float32(
                dout[q_rows], q[q_rows], k[k_rows], v[k_rows], out[q_rows]
            )
            heads = (ks.shape[1], -1)
            grouped, do, os = (x.unflatten(1, heads) for x in (qs, do, os))
            row_lse = lse[q_rows].to(ks.dtype).unflatten(1, heads).permute(1, 2, 0)  # [K, G, t]
            delta = (do * os).sum(-1).permute(1, 2, 0)
            dq, dk, dv = torch.empty_like(grouped), torch.zeros_like(ks), torch.zeros_like(vs)
            for rows, keys, scores in self._chunks(grouped, ks, call.causal, inverse_causal, scale):
                p = torch.exp(scores - _finite(row_lse[:, :, rows])[..., None])
                dv[keys] += torch.einsum("kgqs,qkge->ske", p, do[rows])
                dp = torch.einsum("qkge,ske->kgqs", do[rows], vs[keys])
                ds = p * (dp - delta[:, :, rows, None]) * scale
                dq[rows] = torch.einsum("kgqs,skd->qkgd", ds, ks[keys])
                dk[keys] += torch.einsum("kgqs,qkgd->skd", ds, grouped[rows])
            grads.append((dq.flatten(1, 2), dk, dv))
        return _cat(grads)


def _finite(lse: Tensor) -> Tensor:
    """lse with 0 for rows that see no key: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    docs: Documents,
    *,
    dout: Tensor | None = None,
    scale: float | None = None,
    kernel: Kernel | None = None,
) -> dict[str, Tensor]:
    """Attention of a whole packed sequence on one device, in float64 with kernel `math`.

    Document by document; if `docs` has a mask of slices, all documents as one sequence.

    Args:
        q, k, v: [T, H, D], [T, K, D], [T, K, E] in the order of the packed sequence.
        dout: [T, H, E]; with it the gradients dq, dk, dv are returned too.
        kernel: another kernel, which runs in the inputs' dtype ("the plain kernel" of error reports).
            Only `Math` takes a window or slices: Math(docs.window), or Math(mask=docs.slices).

    Returns:
        {"out", "lse"} and, with dout, {"dq", "dk", "dv"}.

    Raises:
        PlanError: a kernel that was not made for the documents' window or slices.
    """
    if kernel is None:
        kernel, (q, k, v) = Math(docs.window, docs.slices), (x.double() for x in (q, k, v))
        dout = None if dout is None else dout.double()
    if getattr(kernel, "window", None) != docs.window:
        raise PlanError(f"kernel {kernel.name!r} takes no window={docs.window}; use Math(window)")
    if getattr(kernel, "mask", None) != docs.slices:
        raise PlanError(
            f"kernel {kernel.name!r} has another mask than these documents; use Math(mask=docs.slices)"
        )
    borders = docs.cu_seqlens if docs.slices is None else np.array([0, docs.total])
    low, count = borders[:-1], np.diff(borders)
    low, count = low[count > 0], count[count > 0]
    call = Call(docs.causal, Sequences(low, count, low, count), (), ())
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not len(count):
        empty = {"out": q.new_zeros(0, q.shape[1], v.shape[2]), "lse": q.new_zeros(q.shape[:2])}
        return empty if dout is None else {**empty, "dq": q, "dk": k, "dv": v}
    out, lse = kernel.forward(q, k, v, call, scale)
    result = {"out": (out := out.to(q.dtype)), "lse": lse}
    if dout is not None:
        grads = kernel.backward(dout, q, k, v, out, lse, call, scale)
        result |= {n: g.to(q.dtype) for n, g in zip(("dq", "dk", "dv"), grads, strict=True)}
    return result
