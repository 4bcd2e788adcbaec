"""What is wrong with a rank's arguments of `attention`, and what all ranks must agree on."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..lowering.streams import EXECUTORS
from ..planning.heads import split_heads
from ..planning.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..kernels.kernel import Kernel


def order_error(tokens: Any, plan: Plan, rank: int) -> str:
    """Where the rows are not in the plan's order, as far as `tokens` tells, or "".

    Args:
        tokens: [t] int64, the id of the token in each row of q, k and v; None: nothing to compare.
    """
    if tokens is None:
        return ""
    import torch

    wanted = plan.num_tokens(rank)
    if (
        not isinstance(tokens, torch.Tensor)
        or tokens.dtype != torch.int64
        or list(tokens.shape) != [wanted]
    ):
        shape = getattr(tokens, "shape", None)
        what = type(tokens).__name__ if shape is None else f"{tokens.dtype} {list(shape)}"
        return f"tokens must be an int64 tensor [{wanted}], one token id per row, got {what}"
    proved, key = _proved_orders(), None
    if not tokens.is_inference():  # those do not tell when they are changed: compared every time
        key = plan.fingerprint(), rank, tokens._version
    if key and proved.get(tokens) == key:
        return ""
    order = torch.from_numpy(plan.tokens(rank)).to(tokens.device)
    wrong = torch.nonzero(tokens != order)
    if len(wrong):
        row = int(wrong[0])
        return (
            f"{len(wrong)} of {wanted} rows of q, k, v are not in the plan's order: row {row} is token "
            f"{int(tokens[row])}, the plan (layout {plan.layout.name!r}) has token {int(order[row])} "
            "there; shard every tensor with tasp.shard(tensor, plan, rank)"
        )
    if key:
        proved[tokens] = key
    return ""


@lru_cache(maxsize=1)
def _proved_orders() -> Any:
    """Token tensors that were compared: (plan, rank, the tensor's version), for as long as each lives."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def validation_error(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    rank: int,
    group_size: int,
    kernel: str | Kernel,
) -> str:
    """What is wrong with this rank's own arguments, or "".

    Args:
        group_size: ranks of the group that was passed.
    """
    import torch
    import torch.distributed as dist

    if not isinstance(plan, Plan):
        return f"plan must be a Plan made by tasp.plan(...), got {type(plan).__name__}"
    if plan.ranks != group_size:
        alone = not (dist.is_available() and dist.is_initialized())
        hint = " (torch.distributed is not initialised: use torchrun or tasp.launch)"
        return (
            f"the plan is for {plan.ranks} ranks, the group has {group_size}{hint if alone else ''}; "
            f"make the plan with ranks={group_size} or pass the right group"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            return f"{name} must be a tensor, got {type(x).__name__}"
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.dim() not in (3, 4) or k.dim() != q.dim() or v.dim() != q.dim():
        return f"q, k, v must all be [t, heads, dim] or all [B, t, heads, dim], got {shapes}"
    tokens = plan.num_tokens(rank)
    counts = [x.shape[-3] for x in (q, k, v)]
    if counts != [tokens] * 3:
        return (
            f"q, k, v have {counts} tokens, the plan gives this rank {tokens}; "
            "shard with tasp.shard(tensor, plan, rank)"
        )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if q.dim() == 4 and not q.shape[0] == k.shape[0] == v.shape[0] > 0:
        return f"batch sizes differ or are 0: {shapes}"
    if v.shape[-2] != kv_heads or k.shape[-1] != q.shape[-1] or min(q.shape[-1], v.shape[-1]) < 1:
        return f"k and v must have equal heads, q and k equal dims of at least 1, got {shapes}"
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        return (
            f"{heads} query heads are not a multiple of {kv_heads} key/value heads; repeat k and v"
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        return f"q, k, v must have one dtype and one device, got {kinds}"
    if not q.dtype.is_floating_point or q.dtype.itemsize < 2:
        return f"q, k, v must be float16, bfloat16, float32 or float64, got {q.dtype}"
    try:
        from ..kernels.resolve import resolve

        split_heads(heads, kv_heads, plan.intra)
        resolve(kernel, q.device.type, q.dtype)
    except ValueError as error:
        return str(error)
    return ""


def option_error(
    scale: float | None, grad_comm_dtype: torch.dtype | None, executor: str, device: str
) -> str:
    """What is wrong with the options, or "".

    Args:
        device: the type of the tensors' device.
    """
    import torch

    if executor not in EXECUTORS:
        return f"executor must be one of {', '.join(EXECUTORS)}, got {executor!r}"
    if executor == "dependencies" and device != "cpu":
        return f'executor="dependencies" is for CPUs, the tensors are on {device}; leave it out'

    if scale is not None and not (isinstance(scale, int | float) and abs(scale) < float("inf")):
        return f"scale must be a finite number or None (head dim ** -0.5), got {scale!r}"
    if grad_comm_dtype is not None:
        known = isinstance(grad_comm_dtype, torch.dtype) and grad_comm_dtype.is_floating_point
        if not known or grad_comm_dtype.itemsize < 2:
            return (
                f"grad_comm_dtype must be a float dtype or None (float32), got {grad_comm_dtype!r}"
            )
    return ""


def signature_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    scale: float | None,
    grad_comm_dtype: torch.dtype | None,
    *,
    keep_kv: bool,
) -> dict[str, str]:
    """What must be equal on all ranks before they exchange."""
    import torch

    docs = plan.docs
    sizes = [q.shape[0] if q.dim() == 4 else 0, *q.shape[-2:], k.shape[-2], v.shape[-1]]
    return {
        "documents": f"{docs!r} ({hash_text(docs.cu_seqlens.tobytes())})",
        "layout": plan.layout.name,
        "schedule": f"{plan.schedule.name} {plan.schedule.options or ''}".strip(),
        "intra": str(plan.intra),
        "plan": plan.fingerprint()[:16],
        "batch, heads, dim, kv heads, v dim": str(sizes),
        "dtype": str(q.dtype),
        "scale": str(scale),
        "grad_comm_dtype": str(grad_comm_dtype),
        "keep_kv": str(keep_kv),
        "device": q.device.type,
        # whether a backward pass may follow, in which all ranks must take part
        "q, k or v require gradients": str(
            torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        ),
    }


@lru_cache(maxsize=256)
def hash_text(data: bytes) -> str:
    """Short digest of bytes, for messages."""
    import hashlib

    return hashlib.sha256(data).hexdigest()[:8]
