"""`attention(q, k, v, plan, group)`: sequence-parallel attention as one differentiable function.

    out = tasp.attention(q, k, v, plan, group)      # rows in plan.tokens(rank) order, on every rank

A call goes through these files, in this order: attention -> validate (this rank's arguments) ->
handshake (all ranks agree) -> execute (runs the rank's program; lowering/ makes it at the first call) ->
exchange (each step's messages) -> merge (partial results into one). Where ranks do not agree, or one has
wrong arguments, every rank raises the same error and no result is computed.
Does not cover: dropout, biases, KV caches. This file imports torch only when called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..planning.heads import split_heads
from ..planning.plan import Plan
from .validate import option_error, order_error, signature_of, validation_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..kernels.kernel import Kernel
    from .exchange import Exchange
    from .ulysses import Ulysses


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
    executor: str = "steps",
) -> Any:
    """Attention of a packed sequence whose tokens are spread over the ranks of `group` by `plan`.

    Args:
        q: [t, Hq, Dk], t = plan.num_tokens(rank) rows in plan.tokens(rank) order; or [B, t, Hq, Dk],
            where each of the B packed sequences follows the plan. Strided views are fine.
        k: [t, Hkv, Dk] or [B, t, Hkv, Dk]; Hkv divides Hq.
        v: [t, Hkv, Dv] or [B, t, Hkv, Dv].
        plan: the same plan on every rank.
        group: a torch.distributed process group of plan.ranks ranks, or an `Exchange`
            (runtime/exchange.py); None: the default group, or a single process when plan.ranks is 1.
        scale: factor on the scores; default Dk ** -0.5.
        kernel: "auto", "math", "aten" or "flash", or a `kernels.Kernel` of your own.
        return_lse: also return the log-sum-exp of the scores, [t, Hq] or [B, t, Hq], not
            differentiable, float32 (float64 for float64 inputs).
        grad_comm_dtype: dtype in which the gradients of K and V travel; default float32 (float64).
        keep_kv: keep the KV that arrives for the backward pass, in which it then does not travel
            again. Takes memory for all KV that a rank needs, instead of the KV of two ranks with
            relaying schedules. Default: no.
        tokens: [t] int64, the id of the token in each row, plan.tokens(rank) if the order is right;
            compared with the plan. Default: the order is not checked.
        executor: "steps": a step's messages travel while it is computed, then comes the next step.
            "dependencies" (CPUs): messages run on a thread of their own, up to a step ahead where buffers
            of two ranks' KV have room, so that ranks wait less where steps are not even. Same results.

    Returns:
        out [t, Hq, Dv] or [B, t, Hq, Dv] in q's dtype. Differentiable once, in q, k and v.

    Raises:
        PlanError: on every rank, when any rank's tensors or plan do not fit; says which and why.
        TransportError: a peer stopped answering.
        ImportError: torch is missing, or older than the oldest that was tried.

    >>> import torch
    >>> from tasp_core import launch, plan, shard
    >>> p = plan([3, 5], ranks=2)
    >>> q, k, v = (torch.ones(p.docs.total, heads, 16) for heads in (4, 2, 2))
    >>> def run(rank, group):
    ...     out = attention(*(shard(x, p, rank) for x in (q, k, v)), p, group)
    ...     return list(out.shape)
    >>> launch(run, 2)
    [[4, 4, 16], [4, 4, 16]]
    """
    from .. import torch_required  # noqa: F401, I001 (before all that imports torch)
    import torch

    from . import checkpointing

    # one graph break where torch.compile traces a model; eager code does not pay for it
    tracing = torch.compiler.is_compiling()
    run = checkpointing.opaque() if tracing else checkpointing.run_or_recall
    return run(
        _attention,
        q,
        k,
        v,
        plan,
        group,
        scale,
        kernel,
        return_lse=return_lse,
        grad_comm_dtype=grad_comm_dtype,
        keep_kv=keep_kv,
        tokens=tokens,
        executor=executor,
    )


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
    executor: str,
) -> Any:
    """The call: validate, agree with the other ranks, run the pass; arguments and errors of `attention`."""
    import torch

    from ..kernels.resolve import resolve
    from .execute import Attention, Context

    q, k, v = _autocast(q, k, v)
    exchange = _exchange(group, plan, q.device if isinstance(q, torch.Tensor) else None)
    rank, group_size = (exchange.group_rank, exchange.group_size) if exchange else (0, 1)
    error = validation_error(q, k, v, plan, rank, group_size, kernel)
    device = q.device.type if isinstance(q, torch.Tensor) else "cpu"
    error = error or option_error(scale, grad_comm_dtype, executor, device)
    error = error or order_error(tokens, plan, rank)
    signature: dict[str, str] = {}  # of the backward pass
    if exchange and group_size > 1:
        error = error or exchange.carriage_error(q.device)
        if error:
            call = exchange.handshake({"error": error})
        else:
            signature = signature_of(q, k, v, plan, scale, grad_comm_dtype, keep_kv=bool(keep_kv))
            call = exchange.handshake({**signature, "pass": "the forward pass"})
        signature["pass"] = f"the backward pass of call {call}"
    if error:
        raise PlanError(f"rank {rank}: {error}")

    batched = q.dim() == 4
    if batched:  # tokens first: [t, B, H, D]
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    context = Context(
        plan.context_plan,
        rank // plan.intra,
        exchange,
        resolve(kernel, q.device.type, q.dtype),
        q.shape[-1] ** -0.5 if scale is None else scale,
        grad_comm_dtype,
        bool(keep_kv),
        _ulysses(exchange, plan, q, k) if exchange and plan.intra > 1 else None,
        signature,
        executor == "dependencies" and exchange is not None,
    )
    out, lse = Attention.apply(context, q, k, v)
    if batched:
        out, lse = out.transpose(0, 1), lse.transpose(0, 1)
    return (out, lse) if return_lse else out


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Under autocast, the tensors in the dtype in which scaled_dot_product_attention would get them.

    Else, and what autocast does not cast (no tensors, float64, other devices), as they are.
    """
    import torch

    device = getattr(getattr(tensors[0], "device", None), "type", "cpu")
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Any) -> Any:
        known = isinstance(x, torch.Tensor) and x.is_floating_point() and x.device.type == device
        return x.to(dtype) if known and x.dtype != torch.float64 else x

    return tuple(map(cast, tensors))


def _exchange(group: Any, plan: Any, device: torch.device | None) -> Exchange | None:
    """What carries the call's messages; None: this process runs the plan alone."""
    import torch.distributed as dist

    from .exchange import Exchange, exchange_of

    if isinstance(group, Exchange):
        return group
    started = dist.is_available() and dist.is_initialized()
    if group is None and not (started and getattr(plan, "ranks", 0) != 1):
        return None
    return exchange_of(group, members_of(plan, group), device)


def members_of(plan: Any, group: Any) -> Sequence[int] | None:
    """The ranks of `group` that run the context-parallel plan together with this one; None: all.

    None too for what is not a plan for this group: `validation_error` says what is wrong with it.
    """
    import torch.distributed as dist

    if not isinstance(plan, Plan) or plan.intra == 1:
        return None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return range(rank % plan.intra, size, plan.intra) if size == plan.ranks else None


def _ulysses(exchange: Exchange, plan: Plan, q: Tensor, k: Tensor) -> Ulysses:
    """The exchange of heads for tokens in this rank's Ulysses group."""
    import numpy as np

    from .ulysses import Group, Ulysses

    index, member = divmod(exchange.group_rank, plan.intra)
    heads, kv_heads = q.shape[-2], k.shape[-2]
    counts = tuple(np.diff(plan.member_tokens(index)).tolist())
    split = tuple(split_heads(heads, kv_heads, plan.intra))
    return Ulysses(Group(exchange, index * plan.intra, member, counts, split), heads, kv_heads)
