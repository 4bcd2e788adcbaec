"""Token loss over ranks that hold different numbers of labelled tokens, with one scale rule.

    sum, count = token_loss(logits, labels, group, plan=plan)   # sum: this rank's; count: the group's
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

from ..errors import LayoutError, PlanError
from ..planning.plan import Plan
from ..sequence.documents import Documents


def next_token_labels(ids: Tensor, docs: Documents, ignore: int = -100) -> Tensor:
    """Each token's successor inside its document; `ignore` at every document's last token.

    Call it on the packed sequence, then shard: labels cross shard borders, never documents.

    Args:
        ids: [..., T] token ids of packed sequences of T = docs.total tokens.

    Raises:
        LayoutError: T differs.

    >>> next_token_labels(torch.tensor([5, 6, 7, 8]), Documents.of([3, 1])).tolist()
    [6, 7, -100, -100]
    """
    if ids.shape[-1] != docs.total:
        raise LayoutError(
            f"ids have {ids.shape[-1]} tokens, the documents {docs.total}; give all ids of the packed "
            "sequence, inputs and labels then have the same length and no token is dropped"
        )
    labels = torch.full_like(ids, ignore)
    labels[..., :-1] = ids[..., 1:]
    last = torch.from_numpy(docs.cu_seqlens[1:][docs.lengths > 0] - 1).to(ids.device)
    labels[..., last] = ignore
    return labels


def label_error(labels: Tensor, name: str = "labels") -> str:
    """Why labels are no token ids, or ""; `name` is what the caller calls them."""
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        return (
            f"{name} must be token ids, whole numbers, got {labels.dtype}; for weights or "
            "probabilities compute the loss yourself and divide by the group's count"
        )
    return ""


def outside_error(labels: Tensor, classes: int, of: str, ignore: int, name: str = "labels") -> str:
    """An error text about the first label outside 0 .. classes - 1, or "" if there is none.

    Reads the labels, so that the host waits for a GPU.

    Args:
        labels: [...] whole numbers; those equal to `ignore` may be anything.
        of, name: what has the classes, and what the caller calls the labels, in the error text.
    """
    outside = labels[(labels != ignore) & ((labels < 0) | (labels >= classes))]
    if not len(outside):
        return ""
    return (
        f"{name} hold {int(outside[0])}, outside the {classes} classes of {of}; mark tokens without a "
        f"label by {ignore}"
    )


def token_sum(
    logits: Tensor, labels: Tensor, ignore: int = -100, *, label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy summed over the labelled tokens, float32 (float64 for float64 logits).

    Logits of ignored tokens may be anything, NaN too: they have no part in the sum or its gradient.

    Args:
        logits: [..., V]. labels: [...] whole numbers.
        label_smoothing: as in torch.nn.functional.cross_entropy.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    labels = labels.reshape(-1).long()
    unused = (labels == ignore)[:, None]
    if rows.dtype in (torch.float32, torch.float64):
        rows = rows.masked_fill(unused, 0.0)  # a copy, the logits are the caller's; soon dropped
    else:
        rows = rows.float().masked_fill_(unused, 0.0)
    return cross_entropy(
        rows, labels, ignore_index=ignore, reduction="sum", label_smoothing=label_smoothing
    )


def token_loss(
    logits: Tensor,
    labels: Tensor,
    group: Any = None,
    ignore: int = -100,
    *,
    inputs: Tensor | None = None,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy as (sum, count): loss = sum / count, or 0 where count is 0.

    Args:
        logits: [..., V] of this rank's tokens; V vocabulary entries. NaN at ignored labels is fine.
        labels: [...] whole numbers, `ignore` where there is nothing to predict.
        group: process group that shares the packed sequence; None: the default group if there is
            one, or this process alone for a plan of one rank.
        inputs: [...] the tokens that went in; equal labels then raise a warning.
        plan: the packed sequence's plan; the group must then have its ranks. Without it, `group=None`
            counts over the default group whatever the plan is.

    Returns:
        sum: scalar float32 (float64 for float64 logits), this rank's, differentiable;
        count: scalar int64, the group's.

    Raises:
        LayoutError: shapes do not match; labels that are no token ids or, on a CPU, outside the
            vocabulary. On a CPU all ranks of the group raise, on a GPU the rank itself.
        PlanError: a group of another size than the plan's.

    >>> logits, labels = torch.zeros(3, 4), torch.tensor([1, 2, -100])
    >>> total, count = token_loss(logits, labels)
    >>> round(float(total / count), 4), int(count)              # log 4: four values, equally likely
    (1.3863, 2)
    """
    started = dist.is_available() and dist.is_initialized()
    alone = not started or (group is None and plan is not None and plan.ranks == 1)
    if plan is not None:
        size = 1 if alone else dist.get_world_size(group)
        if size != plan.ranks:
            hint = "" if started else " (torch.distributed is not initialised)"
            raise PlanError(
                f"the plan is for {plan.ranks} ranks, the group has {size}{hint}; pass the group that "
                "shares the packed sequence"
            )
    error = _validation_error(logits, labels, ignore)
    on_cpu = isinstance(labels, Tensor) and labels.device.type == "cpu"
    if error and (alone or not on_cpu):
        raise LayoutError(error)
    count = torch.zeros((), dtype=torch.int64) if error else (labels != ignore).sum()
    if not alone:
        pair = torch.stack([count, torch.full_like(count, bool(error))])
        dist.all_reduce(pair, group=group)
        count = pair[0]
        if on_cpu and pair[1]:  # on a GPU nobody reads it: it would stop the host
            raise LayoutError(
                error or f"the labels or logits of {int(pair[1])} other ranks do not fit, see there"
            )
    if inputs is not None and labels.numel() > 1 and torch.equal(inputs, labels):
        warnings.warn(
            "labels equal the inputs: they look unshifted; use next_token_labels(ids, docs) "
            "on the packed sequence before sharding",
            stacklevel=2,
        )
    return token_sum(logits, labels, ignore), count


def _validation_error(logits: Tensor, labels: Tensor, ignore: int) -> str:
    """What is wrong with logits and labels, or ""."""
    if logits.shape[:-1] != labels.shape:
        return (
            f"logits {list(logits.shape)} and labels {list(labels.shape)} do not match; "
            "logits are labels' shape with the vocabulary behind it"
        )
    if why := label_error(labels):
        return why
    if labels.device.type == "cpu":  # elsewhere it would stop the host
        return outside_error(labels, logits.shape[-1], "the logits", ignore)
    return ""
