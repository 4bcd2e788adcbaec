"""Token loss over ranks that hold different numbers of labelled tokens, with one scale rule.

    sum, count = token_loss(logits, labels, group)      # sum: this rank's; count: the group's
    (sum / count.clamp(min=1)).backward()

Parameters' gradients then ADD UP over ranks: all-reduce them with SUM. With a wrapper that averages
(DDP, FSDP) multiply the loss by its world size first. Either way they equal those of one process.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from .documents import Documents
from .errors import LayoutError


def next_token_labels(ids: Tensor, docs: Documents, ignore: int = -100) -> Tensor:
    """Each token's successor inside its document; `ignore` at every document's last token.

    Call it on the whole row, then shard: labels cross shard borders, never documents.

    Args:
        ids: [..., T] token ids of a row (or rows) of T = docs.total tokens.

    Raises:
        LayoutError: T differs.

    >>> next_token_labels(torch.tensor([5, 6, 7, 8]), Documents.of([3, 1])).tolist()
    [6, 7, -100, -100]
    """
    if ids.shape[-1] != docs.total:
        raise LayoutError(
            f"ids have {ids.shape[-1]} tokens, the documents {docs.total}; give all of the row's ids, "
            "inputs and labels then have the same length and no token is dropped"
        )
    labels = torch.full_like(ids, ignore)
    labels[..., :-1] = ids[..., 1:]
    last = torch.from_numpy(docs.cu_seqlens[1:][docs.lengths > 0] - 1).to(ids.device)
    labels[..., last] = ignore
    return labels


def token_loss(
    logits: Tensor,
    labels: Tensor,
    group: Any = None,
    ignore: int = -100,
    *,
    inputs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy as (sum, count): loss = sum / count, or 0 where count is 0.

    Args:
        logits: [..., V] of this rank's tokens; V vocabulary entries.
        labels: [...] int64, `ignore` where there is nothing to predict.
        group: process group that shares the row; None: the default group if there is one.
        inputs: [...] the tokens that went in; equal labels then raise a warning.

    Returns:
        sum: scalar float32 (float64), this rank's, differentiable; count: scalar int64, the group's.

    Raises:
        LayoutError: shapes do not match.
    """
    if logits.shape[:-1] != labels.shape:
        raise LayoutError(
            f"logits {list(logits.shape)} and labels {list(labels.shape)} do not match; "
            "logits are labels' shape with the vocabulary behind it"
        )
    if inputs is not None and labels.numel() > 1 and torch.equal(inputs, labels):
        warnings.warn(
            "labels equal the inputs: they look unshifted; use next_token_labels(ids, docs) "
            "on the whole row before sharding",
            stacklevel=2,
        )
    wide = logits.reshape(-1, logits.shape[-1])
    wide = wide if wide.dtype == torch.float64 else wide.float()
    total = cross_entropy(wide, labels.reshape(-1), ignore_index=ignore, reduction="sum")
    count = (labels != ignore).sum()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(count, group=group)
    return total, count
