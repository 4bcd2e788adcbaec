"""`attention(q, k, v, plan, group)`: sequence-parallel attention as one differentiable function.

    out = tasp.attention(q, k, v, plan, group)      # rows in plan.tokens(rank) order, on every rank

Validates on every rank and raises the same error on all of them before anything is exchanged.
Does not cover: dropout, biases, key/value caches. This file imports torch only when called.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .errors import PlanError
from .heads import split_heads
from .plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .kernels import Kernel


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    group: Any = None,
    scale: float | None = None,
    kernel: str | Kernel = "auto",
    *,
    return_lse: bool = False,
    grad_comm_dtype: torch.dtype | None = None,
    keep_kv: bool = False,
    tokens: Tensor | None = None,
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
        kernel: "auto", "math", "aten" or "flash", or a `kernels.Kernel` of your own.
        return_lse: also return the log-sum-exp of the scores, [t, Hq] or [B, t, Hq], not
            differentiable, float32 (float64 for float64 inputs).
        grad_comm_dtype: dtype of key/value gradients on the wire; default float32 (float64).
        keep_kv: keep the keys and values that arrive for the backward pass, in which they then do
            not travel again; memory for all keys a rank needs instead of two shards. Default: no.

    Returns:
        out [t, Hq, Dv] or [B, t, Hq, Dv] in q's dtype. Differentiable once, in q, k and v.

    Raises:
        PlanError: on every rank, when any rank's tensors or plan do not fit; says which and why.
        TransportError: a peer stopped answering.
        ImportError: torch is missing, or older than the oldest that was tried.
    """
    from . import torch_required  # noqa: F401, I001 (before all that imports torch)
    import torch

    from . import recompute

    # one graph break where torch.compile traces a model; eager code does not pay for it
    run = recompute.opaque() if torch.compiler.is_compiling() else recompute.once
    return run(
        _attention, q, k, v, plan, group, scale, kernel,
        return_lse=return_lse, grad_comm_dtype=grad_comm_dtype, keep_kv=keep_kv, tokens=tokens,
    )  # fmt: skip


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    group: Any,
    scale: float | None,
    kernel: str | Kernel,
    *,
    return_lse: bool,
    grad_comm_dtype: torch.dtype | None,
    keep_kv: bool,
    tokens: Tensor | None,
) -> Any:
    """`attention` itself."""
    import torch
    import torch.distributed as dist

    from .execute import Attention, Context
    from .kernels import resolve
    from .transport import Exchange, carriage_error

    q, k, v = _autocast(q, k, v)
    exchange = None
    ranks = getattr(plan, "ranks", 0)
    if group is not None or (dist.is_available() and dist.is_initialized() and ranks != 1):
        device = q.device if isinstance(q, torch.Tensor) else None
        exchange = Exchange(group, _members(plan, group), device)
    rank = exchange.own if exchange else 0
    error = _complaint(q, k, v, plan, rank, exchange.world if exchange else 1, kernel)
    error = error or _option_complaint(scale, grad_comm_dtype) or _order_error(tokens, plan, rank)
    note: dict[str, str] = {}
    if exchange and exchange.world > 1:
        error = error or carriage_error(exchange.group, q.device)
        if not error:
            note = _note(q, k, v, plan, scale, grad_comm_dtype)
            note |= {"keep_kv": str(bool(keep_kv)), "device": q.device.type}
            note["q, k or v require gradients"] = str(_differentiates(q, k, v))
        call = exchange.handshake(
            {"error": error} if error else note | {"pass": "the forward pass"}
        )
        note["pass"] = f"the backward pass of call {call}"
    if error:
        raise PlanError(f"rank {rank}: {error}")

    batched = q.dim() == 4
    if batched:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    context = Context(
        plan.inner,
        rank // plan.intra,
        exchange,
        resolve(kernel, q.device.type, q.dtype),
        q.shape[-1] ** -0.5 if scale is None else scale,
        grad_comm_dtype,
        bool(keep_kv),
        _ulysses(exchange.group, plan, rank, q, k) if exchange and plan.intra > 1 else None,
        note,
    )
    out, lse = Attention.apply(context, q, k, v)
    if batched:
        out, lse = out.transpose(0, 1), lse.transpose(0, 1)
    return (out, lse) if return_lse else out


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors as scaled_dot_product_attention gets them under autocast; else as they are."""
    import torch

    device = getattr(getattr(tensors[0], "device", None), "type", "cpu")
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Any) -> Any:
        known = isinstance(x, torch.Tensor) and x.is_floating_point() and x.device.type == device
        return x.to(dtype) if known and x.dtype != torch.float64 else x

    return tuple(map(cast, tensors))


def _differentiates(*tensors: Tensor) -> bool:
    """Whether a backward pass may follow, in which all ranks must take part."""
    import torch

    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _members(plan: Any, group: Any) -> Sequence[int] | None:
    """The ranks that run the inner plan together with this one; None: all, or not known yet."""
    import torch.distributed as dist

    if not isinstance(plan, Plan) or plan.intra == 1:
        return None
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    return range(rank % plan.intra, world, plan.intra) if world == plan.ranks else None


def _ulysses(group: Any, plan: Plan, rank: int, q: Tensor, k: Tensor) -> Any:
    """The exchange of heads for tokens in a rank's Ulysses group."""
    import numpy as np

    from .ulysses import Group, Ulysses

    index, member = divmod(rank, plan.intra)
    heads, kv_heads = q.shape[-2], k.shape[-2]
    counts = tuple(np.diff(plan.member_tokens(index)).tolist())
    split = tuple(split_heads(heads, kv_heads, plan.intra))
    return Ulysses(Group(group, index * plan.intra, member, counts, split), heads, kv_heads)


def _order_error(tokens: Any, plan: Plan, rank: int) -> str:
    """Where the rows are not in the plan's order, as far as `tokens` tells, or ""."""
    if tokens is None:
        return ""
    import torch

    wanted = plan.num_tokens(rank)
    if (
        not isinstance(tokens, torch.Tensor)
        or tokens.dtype != torch.int64
        or list(tokens.shape) != [wanted]
    ):
        found = getattr(tokens, "shape", None)
        what = type(tokens).__name__ if found is None else f"{tokens.dtype} {list(found)}"
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


def _complaint(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    rank: int,
    found: int,
    kernel: str | Kernel,
) -> str:
    """What is wrong with this rank's own arguments, in a group of `found` ranks, or ""."""
    import torch
    import torch.distributed as dist

    if not isinstance(plan, Plan):
        return f"plan must be a Plan made by tasp.plan(...), got {type(plan).__name__}"
    if plan.ranks != found:
        alone = not (dist.is_available() and dist.is_initialized())
        hint = " (torch.distributed is not initialised: use torchrun or tasp.launch)"
        return (
            f"the plan is for {plan.ranks} ranks, the group has {found}{hint if alone else ''}; "
            f"make the plan with ranks={found} or pass the right group"
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
        from .kernels import resolve

        split_heads(heads, kv_heads, plan.intra)
        resolve(kernel, q.device.type, q.dtype)
    except ValueError as error:
        return str(error)
    return ""


def _option_complaint(scale: float | None, grad_comm_dtype: torch.dtype | None) -> str:
    """What is wrong with the options, or ""."""
    import torch

    if scale is not None and not (isinstance(scale, int | float) and abs(scale) < float("inf")):
        return f"scale must be a finite number or None (head dim ** -0.5), got {scale!r}"
    if grad_comm_dtype is not None:
        known = isinstance(grad_comm_dtype, torch.dtype) and grad_comm_dtype.is_floating_point
        if not known or grad_comm_dtype.itemsize < 2:
            return (
                f"grad_comm_dtype must be a float dtype or None (float32), got {grad_comm_dtype!r}"
            )
    return ""


def _note(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None, wire: torch.dtype | None
) -> dict[str, str]:
    """What must be equal on all ranks before they exchange."""
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
        "grad_comm_dtype": str(wire),
    }


@lru_cache(maxsize=256)
def hash_text(data: bytes) -> str:
    """Short digest of bytes, for messages."""
    import hashlib

    return hashlib.sha256(data).hexdigest()[:8]
