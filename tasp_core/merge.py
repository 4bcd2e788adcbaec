"""Exact merge of partial attention results (out, lse) over disjoint sets of keys.

    lse = logaddexp(lse1, lse2);   out = out1 exp(lse1 - lse) + out2 exp(lse2 - lse)

(0, -inf) is the identity, also against itself. No exponent is ever positive, so nothing overflows.
Shapes: out [T, H, D], lse [T, H]; T tokens, H heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _weights(lse1: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lse = torch.logaddexp(lse1, lse2)
    safe = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)  # exp(-inf - 0) = 0, no NaN
    return lse, torch.exp(lse1 - safe), torch.exp(lse2 - safe)


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
    lse, w1, w2 = _weights(lse1, lse2)
    return out1 * w1[..., None].to(out1.dtype) + out2 * w2[..., None].to(out2.dtype), lse


def merge_(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> None:
    """`merge` into out1 and lse1, in place; out2 and lse2 may be of a narrower dtype.

    The weights add up to 1, so one interpolation does it; it is exact where either weight is 1.
    """
    lse, _, w2 = _weights(lse1, lse2.to(lse1.dtype))
    out1.lerp_(out2.to(out1.dtype), w2[..., None])
    lse1.copy_(lse)
