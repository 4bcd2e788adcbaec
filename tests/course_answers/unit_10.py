"""Wrong answers to the exercises of unit 10."""

from __future__ import annotations

import torch
from torch import Tensor

from tasp_course.unit_10 import Route

Grads = tuple[Tensor, Tensor, Tensor]


def _shifted(owner: int, n: int, by: int) -> Route:
    return [(d + by, (owner + d) % n, (owner + d + 1) % n) for d in range(1, n)]


def _backwards(owner: int, n: int) -> Route:
    return [(d + 1, (owner - d) % n, (owner - d - 1) % n) for d in range(n - 1, 0, -1)]


def _from_the_owner(owner: int, n: int) -> Route:
    return [(d + 1, (owner + d) % n, (owner + d + 1) % n) for d in range(n - 1)]


def _tile(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    own: bool = False,
    row_sum: bool = True,
    scaled: bool = True,
) -> Grads:
    scores = scale * q @ k.T
    p = torch.exp(scores - (scores.logsumexp(-1) if own else lse)[:, None])
    total = (dout * out).sum(-1, keepdim=True) if row_sum else 0
    ds = p * (dout @ v.T - total) * (scale if scaled else 1)
    return ds @ k, ds.T @ q, p.T @ dout


WRONG = {
    "check_route": {
        "one step too early": lambda owner, n: _shifted(owner, n, 0),
        "one step too late": lambda owner, n: _shifted(owner, n, 2),
        "against the ring": _backwards,
        "starts at the owner": _from_the_owner,
        "text form": lambda owner, n: [
            f"t{s} {a}>{b} dkv{owner}.0" for s, a, b in _shifted(owner, n, 1)
        ],
    },
    "check_backward": {
        "the tile's own lse": lambda *x: _tile(*x, own=True),
        "without delta": lambda *x: _tile(*x, row_sum=False),
        "without the scale": lambda *x: _tile(*x, scaled=False),
    },
    "check_error": {
        "one rounding": lambda n, eps: eps / 5 * n**0.5,
        "errors add up, not squares": lambda n, eps: sum(eps / 5 * k**0.5 for k in range(1, n + 1)),
        "float32 always": lambda n, eps: 2.0**-23 / 5 * (n * (n + 1) / 2) ** 0.5,
    },
    "check_recap": {
        "one hop too many": [8, 2, "final", "no", 2],
        "proportional to the number of terms": [7, 2, "final", "no", 4],
    },
}
