"""Exact merge of partial attention results (out, lse) over disjoint sets of keys.

    lse = logaddexp(lse1, lse2);   out = out1 exp(lse1 - lse) + out2 exp(lse2 - lse)

The two weights add up to 1: w2 = sigmoid(lse2 - lse1), out = out1 + w2 (out2 - out1). (0, -inf) is
the identity, also against itself, and nothing overflows.
Shapes: out [T, H, D], lse [T, H]; T tokens, H heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _second_weight(lse1: Tensor, lse2: Tensor) -> Tensor:
    """exp(lse2 - lse), from the difference alone: the rounding of a large lse does not enter."""
    empty = (lse1 == -torch.inf) & (lse2 == -torch.inf)
    return torch.sigmoid(torch.where(empty, torch.zeros_like(lse2), lse2 - lse1))


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The result over both sets of keys, from the results over each.

    Args:
        out1, out2: [T, H, D] partial outputs, each normalised over its own keys.
        lse1, lse2: [T, H] log-sum-exp of the scores over those keys; -inf: no key.

    Returns:
        out [T, H, D] and lse [T, H] in the inputs' dtypes.

    >>> one, none = torch.ones(1, 1, 2), torch.zeros(1, 1, 2)
    >>> out, lse = merge(one, torch.zeros(1, 1), none, torch.full((1, 1), -torch.inf))
    >>> out.tolist(), lse.tolist()
    ([[[1.0, 1.0]]], [[0.0]])
    """
    weight = _second_weight(lse1, lse2)[..., None].to(out2.dtype)
    return torch.lerp(out1, out2, weight), torch.logaddexp(lse1, lse2)


def merge_(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> None:
    """`merge` into out1 and lse1, in place; out2 and lse2 may be of a narrower dtype than these."""
    lse2 = lse2.to(lse1.dtype)
    weight = _second_weight(lse1, lse2)[..., None].to(out1.dtype)
    out1.lerp_(out2.to(out1.dtype), weight)
    torch.logaddexp(lse1, lse2, out=lse1)
