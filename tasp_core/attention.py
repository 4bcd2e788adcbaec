"""`attention(q, k, v, plan, group)`: sequence-parallel attention as one differentiable function.

    out = tasp.attention(q, k, v, plan, group)      # rows in plan.tokens(rank) order, on every rank

Validates on every rank and raises the same error on all of them before anything is exchanged.
Does not cover: dropout, biases, key/value caches. This file imports torch only when called.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .errors import PlanError
from .plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    group: Any = None,
    scale: float | None = None,
    kernel: str = "auto",
    *,
    return_lse: bool = False,
    grad_comm_dtype: torch.dtype | None = None,
) -> Any:
    """Attention of a packed row whose tokens are spread over the ranks of `group` by `plan`.

    Args:
        q: [t, Hq, Dk], t = plan.num_tokens(rank) rows in plan.tokens(rank) order; or [B, t, Hq, Dk],
            where every one of the B rows follows the plan. Strided views are fine.
        k: [t, Hkv, Dk] or [B, t, Hkv, Dk]; Hkv divides Hq.
        v: [t, Hkv, Dv] or [B, t, Hkv, Dv].
        plan: the same plan on every rank.
        group: a torch.distributed process group of plan.ranks ranks; None: the default group, or a
            single process when plan.ranks is 1.
        scale: factor on the scores; default Dk ** -0.5.
        kernel: "auto", "math", "aten" or "flash".
        return_lse: also return the log-sum-exp of the scores, [t, Hq] or [B, t, Hq], not
            differentiable, float32 (float64 for float64 inputs).
        grad_comm_dtype: dtype of key/value gradients on the wire; default float32 (float64).

    Returns:
        out [t, Hq, Dv] or [B, t, Hq, Dv] in q's dtype. Differentiable once, in q, k and v.

    Raises:
        PlanError: on every rank, when any rank's tensors or plan do not fit; says which and why.
        TransportError: a peer stopped answering.
    """
    import torch.distributed as dist

    from .execute import Attention, Context
    from .transport import Exchange

    exchange = None
    if group is not None or (dist.is_available() and dist.is_initialized() and plan.ranks > 1):
        exchange = Exchange(group)
    found = exchange.ranks if exchange else 1
    if found != plan.ranks:
        hint = (
            ""
            if exchange
            else " (torch.distributed is not initialised: use torchrun or tasp.launch)"
        )
        raise PlanError(
            f"the plan is for {plan.ranks} ranks, the group has {found}{hint}; "
            f"make the plan with ranks={found} or pass the right group"
        )
    rank = exchange.rank if exchange else 0
    error = _complaint(q, k, v, plan, rank, kernel)
    if exchange and plan.ranks > 1:
        _agree(exchange, plan, _note(q, k, v, plan, scale, error))
    if error:
        raise PlanError(f"rank {rank}: {error}")
    from .kernels import resolve

    context = Context(
        plan,
        rank,
        exchange if plan.ranks > 1 else None,
        resolve(kernel, q.device.type, q.dtype),
        q.shape[-1] ** -0.5 if scale is None else scale,
        grad_comm_dtype,
    )
    batch = q.shape[0] if q.dim() == 4 else None
    if batch is not None:  # one plan for every row: a batch is more heads
        q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (q, k, v))
    out, lse = Attention.apply(context, q, k, v)
    if batch is not None:
        out, lse = (x.unflatten(1, (batch, -1)).transpose(0, 1) for x in (out, lse))
    return (out, lse) if return_lse else out


def _complaint(q: Tensor, k: Tensor, v: Tensor, plan: Plan, rank: int, kernel: str) -> str:
    """What is wrong with this rank's own arguments, or ""."""
    import torch

    if not isinstance(plan, Plan):
        return f"plan must be a Plan made by tasp.plan(...), got {type(plan).__name__}"
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
    if q.dim() == 4 and not q.shape[0] == k.shape[0] == v.shape[0]:
        return f"batch sizes differ: {shapes}"
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
        from .kernels import resolve

        resolve(kernel, q.device.type, q.dtype)
    except ValueError as error:
        return str(error)
    return ""


def _note(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None, error: str
) -> dict[str, str]:
    """What must be equal on all ranks before they exchange."""
    if error:
        return {"error": error}
    docs = plan.docs
    sizes = [q.shape[0] if q.dim() == 4 else 0, *q.shape[-2:], k.shape[-2], v.shape[-1]]
    return {
        "documents": f"{docs!r} ({hash_text(docs.cu_seqlens.tobytes())})",
        "layout": plan.layout.name,
        "schedule": f"{plan.schedule.name} {plan.schedule.options or ''}".strip(),
        "plan": plan.fingerprint()[:16],
        "batch, heads, dim, kv heads, v dim": str(sizes),
        "dtype": str(q.dtype),
        "scale": str(scale),
    }


@lru_cache(maxsize=256)
def hash_text(data: bytes) -> str:
    """Short digest of bytes, for messages."""
    import hashlib

    return hashlib.sha256(data).hexdigest()[:8]


def _agree(exchange: Any, plan: Plan, note: dict[str, str]) -> None:
    """Handshake: on gloo before every call; on a GPU, where it costs a host synchronisation, once."""
    key = tuple(note.values())
    agreed = _agreed_notes(exchange.group)
    if exchange.on_cpu or key not in agreed:
        exchange.handshake(note)
        agreed[key] = None
        if len(agreed) > 4096:
            agreed.pop(next(iter(agreed)))


@lru_cache(maxsize=64)
def _agreed_notes(group: Any) -> dict[tuple[str, ...], None]:
    """What the ranks of a group have agreed on, oldest first."""
    return {}
