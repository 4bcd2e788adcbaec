"""Per-token tensors by a plan's layout: shard, unshard, gather, roll.

`shard(x, plan, rank)` takes a rank's tokens out of a tensor over the packed sequence; `unshard(pieces,
plan)` puts the packed sequence together again; `gather` does so over a group; `roll` shifts along
documents across ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LayoutError
from ..planning.plan import Plan
from .exchange import ProcessGroupExchange, exchange_of


def _tokens_error(tensor: Tensor, dim: int, tokens: int, what: str) -> str:
    """What is wrong with the tensor's number of tokens, or ""."""
    size = tensor.shape[dim]
    if size == tokens:
        return ""
    return (
        f"{what}: dim {dim} of a tensor of shape {list(tensor.shape)} has {size} tokens, "
        f"the plan has {tokens}; is it the right tensor, plan or dim?"
    )


def _check_tokens(tensor: Tensor, dim: int, tokens: int, what: str) -> None:
    if text := _tokens_error(tensor, dim, tokens, what):
        raise LayoutError(text)


class _Call:
    """One call of `gather` or `roll`, of which all ranks agree before each of its passes."""

    def __init__(
        self, local: Any, dim: Any, plan: Plan, group: Any, what: str, shift: int | None = None
    ) -> None:
        """Refuse, on every rank, tokens that are not the plan's and tensors of different shapes."""
        self.exchange: ProcessGroupExchange | None = None
        device = local.device if isinstance(local, Tensor) else torch.device("cpu")
        if plan.ranks > 1:
            self.exchange = exchange_of(group, device=device)
        rank = self.exchange.rank if self.exchange else 0
        text = _local_error(local, dim, plan, rank, what)
        if self.exchange is None:
            if text:
                raise LayoutError(text)
            return
        text = text or self.exchange.carriage_error(device)
        self.signature = {"error": text, "plan": plan.fingerprint()[:16], "shift": str(shift)}
        if not text:
            rows = [str(n) for n in local.shape]
            rows[dim] = "t"
            self.signature["shape"] = f"[{', '.join(rows)}] of {local.dtype} on {device.type}"
            self.signature["gradients"] = str(torch.is_grad_enabled() and local.requires_grad)
        call = self.exchange.handshake({**self.signature, "pass": what}, LayoutError)
        self.exchange.finish_handshake()
        self.signature["pass"] = f"the backward pass of {what}, call {call}"

    def begin_backward(self) -> None:
        """All ranks get an error where they run backward passes in different orders."""
        if self.exchange:
            self.exchange.handshake(self.signature, LayoutError, begins=False)
            self.exchange.finish_handshake()


def _local_error(local: Any, dim: Any, plan: Plan, rank: int, what: str) -> str:
    """What is wrong with a rank's own tensor, or ""."""
    if not isinstance(local, Tensor):
        return f"{what} takes a tensor, got {type(local).__name__}"
    if not isinstance(dim, int) or not -local.dim() <= dim < local.dim():
        return f"{what}: a tensor of shape {list(local.shape)} has no dim {dim!r}"
    return _tokens_error(local, dim, plan.num_tokens(rank), what)


def shard(tensor: Tensor, plan: Plan, rank: int, dim: int = 0) -> Tensor:
    """A rank's tokens of a per-token tensor, in plan.tokens(rank) order; differentiable.

    Args:
        tensor: any tensor whose `dim` has plan.docs.total entries.

    Raises:
        LayoutError: `dim` has another size.

    >>> from tasp_core import plan
    >>> shard(torch.arange(8), plan([8], ranks=2, layout="zigzag"), 0).tolist()
    [0, 1, 6, 7]
    """
    _check_tokens(tensor, dim, plan.docs.total, "shard")
    index = torch.from_numpy(plan.tokens(rank)).to(tensor.device)
    return tensor.index_select(dim, index)


def shard_batch(
    batch: Mapping[str, Any], plan: Plan, rank: int, dim: int = 0
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Shard the per-token tensors of a batch, leave everything else as it is, and say which were.

    A per-token tensor is one whose `dim` has plan.docs.total entries; scalars, None, strings and
    tensors of other sizes pass through.

    Returns:
        (the batch with the same keys, names of what was sharded)

    >>> from tasp_core import plan
    >>> batch = {"ids": torch.arange(8), "step": 3}
    >>> shard_batch(batch, plan([8], ranks=2), 1)
    ({'ids': tensor([2, 3, 4, 5]), 'step': 3}, ('ids',))
    """

    def per_token(x: Any) -> bool:
        inside = isinstance(x, Tensor) and -x.dim() <= dim < x.dim()
        return bool(inside and x.shape[dim] == plan.docs.total)

    names = tuple(name for name, x in batch.items() if per_token(x))
    return {n: shard(x, plan, rank, dim) if n in names else x for n, x in batch.items()}, names


def unshard(pieces: Sequence[Tensor], plan: Plan, dim: int = 0) -> Tensor:
    """The tensor over the packed sequence, from every rank's piece; the inverse of `shard`.

    Raises:
        LayoutError: not one piece per rank, or a piece with another number of tokens.

    >>> from tasp_core import plan
    >>> p = plan([8], ranks=2)
    >>> unshard([shard(torch.arange(8), p, rank) for rank in range(2)], p).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if len(pieces) != plan.ranks:
        raise LayoutError(f"unshard needs {plan.ranks} pieces, one per rank, got {len(pieces)}")
    for rank, piece in enumerate(pieces):
        _check_tokens(piece, dim, plan.num_tokens(rank), f"unshard, piece of rank {rank}")
    order = np.concatenate([plan.tokens(r) for r in range(plan.ranks)])
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    index = torch.from_numpy(inverse).to(pieces[0].device)
    return torch.cat(list(pieces), dim).index_select(dim, index)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, plan: Plan, group: Any, dim: int, call: _Call) -> Tensor:
        ctx.args = plan, group, dim, call
        rows = local.movedim(dim, 0).contiguous()
        most = max(plan.num_tokens(r) for r in range(plan.ranks))
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: len(rows)] = rows
        everyone = [torch.empty_like(padded) for _ in range(plan.ranks)]
        dist.all_gather(everyone, padded, group=group)
        pieces = [everyone[r][: plan.num_tokens(r)] for r in range(plan.ranks)]
        return unshard(pieces, plan).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        plan, group, dim, call = ctx.args
        call.begin_backward()
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=group)
        return shard(total, plan, dist.get_rank(group), dim), None, None, None, None


def gather(local: Tensor, plan: Plan, group: Any = None, dim: int = 0) -> Tensor:
    """The tensor over the packed sequence on every rank; differentiable (gradients add up).

    Args:
        local: this rank's tokens along `dim`, in plan.tokens(rank) order.

    Raises:
        LayoutError: on every rank, when one's `dim` does not have its number of tokens.

    >>> from tasp_core import launch, plan
    >>> p = plan([8], ranks=2)
    >>> launch(lambda rank, group: gather(shard(torch.arange(8), p, rank), p, group).tolist(), 2)
    [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]
    """
    call = _Call(local, dim, plan, group, "gather")
    if plan.ranks == 1:
        return local
    return _Gather.apply(local, plan, group, dim, call)


def _routes(plan: Plan, rank: int, shift: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Of a shift: local rows to send to each rank, and local rows at which each rank's rows arrive."""
    docs = plan.docs

    def sources(r: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of rank r that get a value, and where it is: rank and row."""
        mine = plan.tokens(r)
        source = mine + shift
        inside = (source >= 0) & (source < docs.total)
        inside[inside] = docs.document_of(source[inside]) == docs.document_of(mine[inside])
        at = np.flatnonzero(inside)
        return at, *plan.locate(source[at])

    at, owner, _ = sources(rank)
    arrive = [at[owner == r] for r in range(plan.ranks)]
    send = []
    for r in range(plan.ranks):
        _, owner, row = sources(r)
        send.append(row[owner == rank])
    return send, arrive


class _Roll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: Plan, group: Any, shift: int, call: _Call) -> Tensor:
        ctx.args = plan, group, shift, call
        return _roll_rows(rows, plan, group, shift)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        plan, group, shift, call = ctx.args
        call.begin_backward()
        # the shift back is the transpose: both drop the same tokens
        return _roll_rows(grad, plan, group, -shift), None, None, None, None


def _roll_rows(rows: Tensor, plan: Plan, group: Any, shift: int) -> Tensor:
    rank = dist.get_rank(group) if plan.ranks > 1 else 0
    send, arrive = _routes(plan, rank, shift)
    outgoing = rows[torch.from_numpy(np.concatenate(send)).to(rows.device)].contiguous()
    incoming = outgoing
    if plan.ranks > 1:
        into, out = ([len(x) for x in part] for part in (arrive, send))
        incoming = rows.new_empty((sum(into), *rows.shape[1:]))
        dist.all_to_all_single(incoming, outgoing, into, out, group=group)
    result = torch.zeros_like(rows)
    result[torch.from_numpy(np.concatenate(arrive)).to(rows.device)] = incoming
    return result


def roll(local: Tensor, plan: Plan, group: Any = None, shift: int = 1, dim: int = 0) -> Tensor:
    """For each of this rank's tokens, the value at the token `shift` further in its document.

    Zero where the document has no such token. Crosses ranks, never documents; differentiable. For
    multi-token prediction: head j's labels are roll(labels, plan, group, shift=j).

    Args:
        local: this rank's tokens along `dim`, in plan.tokens(rank) order.

    Raises:
        LayoutError: on every rank, when one's `dim` does not have its number of tokens.

    >>> from tasp_core import launch, plan
    >>> p = plan([5, 3], ranks=2)               # rank 0 has tokens 0, 1, 6, 7; rank 1 the others
    >>> launch(lambda rank, group: roll(shard(torch.arange(8), p, rank), p, group).tolist(), 2)
    [[1, 2, 7, 0], [3, 4, 0, 6]]
    """
    call = _Call(local, dim, plan, group, "roll", shift)
    rows = local.movedim(dim, 0).contiguous()
    return _Roll.apply(rows, plan, group, shift, call).movedim(0, dim)
