"""Hugging Face transformers on a plan: its public AttentionInterface, under the name "tasp".

    with sequence_parallel(model, plan, group):                  # every rank is given the same rows
        out = model(input_ids=ids, labels=labels)                # in: [B, T]; out: this rank's tokens
        out.loss.backward()                                      # losses and gradients ADD UP over ranks
    whole = tasp.gather(out.logits, plan, group, dim=1)          # prefill: logits of the whole row

A row is one packed sequence of T tokens, as in transformers' input_ids [B, T]. Each model is proved at its
first use (models.py); docs/models.md lists families. Each layer's own sliding window is used: give a plan
without one. `labels` are as transformers has them, unshifted. `inputs.py` says what a model accepts,
`heads.py` which losses and outputs it may have. Not covered: padding (pack rows instead), dropout,
attention sinks, soft caps, decoding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..errors import PlanError
from ..planning.plan import Plan
from ..runtime.attention import attention
from ..runtime.exchange import exchange_of
from ..sequence.documents import Documents
from .heads import Head, accepts
from .inputs import (
    SAME_ROWS,
    Accepts,
    Planner,
    Run,
    Sharded,
    documents_of,
    group_size,
    prepare,
    shard_inputs,
    signature,
)
from .models import (
    ALONE,
    NAME,
    Mask,
    NoPlanError,
    Probe,
    Proof,
    asked,
    check_kinds,
    check_lengths,
    forget_changed,
    mask_of,
    prove,
)

__all__ = ["NAME", "Run", "active", "documents_of", "sequence_parallel", "shard_inputs"]


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    tasp: Run | Probe | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A layer's attention, in transformers' signature: q, k, v [B, H, t, D] to (out [B, t, H, D], None).

    Args:
        tasp: the call that the layer belongs to, or the proof of the model; transformers passes it on.
    """
    if tasp is None:
        raise NoPlanError(
            f"attention layer {getattr(module, 'layer_idx', '?')} has no plan: call the model inside "
            "sequence_parallel(model, plan, group), or with the inputs that shard_inputs returns"
        )
    docs = tasp.docs if isinstance(tasp, Probe) else tasp.plan.docs
    ask = asked(module, query, key, attention_mask, docs, **kwargs)
    if isinstance(tasp, Probe):
        return tasp.attend(module, query, key, value, ask, scaling), None
    config = getattr(module, "config", None)
    check_kinds(config)
    check_lengths(config, docs)
    if docs.slices is not None:
        raise PlanError(
            f"{ask.layer} has the mask of its model, the plan has slices; make it with Documents.of"
        )
    if ask.causal != docs.causal:
        kinds = ["full", "causal"]
        raise PlanError(
            f"{ask.layer} is {kinds[ask.causal]}, the plan {kinds[docs.causal]}; "
            f"make it with Documents.of(..., causal={ask.causal})"
        )
    plan = _windowed(tasp.plan, ask.window, ask.layer)
    tasp.calls.append(ask.layer)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    # a rank without tokens runs the model on one stand-in token: it takes part with none, gives zeros
    if tasp.stand_in:
        q, k, v = q[:, :0], k[:, :0], v[:, :0]
    out = attention(q, k, v, plan, tasp.group, scaling, tasp.kernel, tokens=tasp.tokens)
    if tasp.stand_in:
        out = torch.cat([out, out.new_zeros(len(out), 1, *out.shape[2:])], 1)
    return out, None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, mask_of)


@lru_cache(maxsize=64)
def _windowed(plan: Plan, window: int | None, layer: str) -> Plan:
    """The plan with a layer's sliding window as its mask, and every token on the rank where it was."""
    docs = plan.docs
    if window is not None and window >= docs.lengths.max(initial=0):
        window = None  # nothing lies outside it
    if window == docs.window:
        return plan
    if docs.window is not None:
        raise PlanError(
            f"{layer} has window {window}, the plan {docs.window}; give the plan without a window, "
            "each layer's own is taken"
        )
    data = json.loads(plan.to_json())
    data["documents"]["window"] = window
    other = Plan.from_json(json.dumps(data))
    if not all(np.array_equal(other.tokens(r), plan.tokens(r)) for r in range(plan.ranks)):
        raise PlanError(
            f"layout {plan.layout.name!r} places tokens by the window, and {layer} has window {window}; "
            "use another layout"
        )
    return other


@contextmanager
def sequence_parallel(
    model: PreTrainedModel, plan: Plan | Planner, group: Any = None, *, kernel: str = "auto"
) -> Iterator[PreTrainedModel]:
    """Inside, `model(...)` takes whole rows and computes this rank's tokens; see `shard_inputs`.

    Every call compares the ranks' rows, labels and documents first. With labels, `out.loss` is this
    rank's part of the loss of all rows, sum / count (`num_items_in_batch` if given, else their labels;
    0 where there are none), also of masked language models and token classification (`heads`).
    `label_smoothing=0.1` smooths it as Trainer does. Where a model returns a router's `aux_loss`, this is
    a part of the group's, too. Outputs of a rank without tokens have none.

    Run backward inside too when layers are checkpointed. A wrapper (DDP, FSDP) goes around the model.

    Raises:
        PlanError: the model's attention does not go through the interface, or it is inside already.
        PlanError, at a call and on every rank: the model's proof fails; what one rank is given does not
            fit, or ranks are given different rows; outputs and losses that are not known to be right.
    """
    if model in _ACTIVE:
        raise PlanError(f"this {type(model).__name__} is inside sequence_parallel already")
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise PlanError(
            f"{type(model).__name__} does not use transformers' AttentionInterface, so that its attention "
            f"cannot run on a plan; {ALONE}"
        )

    handles = []
    try:
        forget_changed(model)
        head = Head(model, group)
        before_call, after_call = _hooks(model, before, plan, group, kernel, head)
        handles += [
            model.register_forward_pre_hook(before_call, with_kwargs=True),
            model.register_forward_hook(after_call),
        ]
        head.enter()
        try:
            yield model
        finally:
            head.leave()
    finally:
        for handle in handles:
            handle.remove()
        _ACTIVE.pop(model, None)
        model.set_attn_implementation(before)


@dataclass
class Active:
    """State of a model inside `sequence_parallel`; `call`: its last call, set once the model is proved."""

    plan: Plan | Planner
    group: Any
    accepts: Accepts
    call: Sharded | None = None
    proof: Proof | None = None


_ACTIVE: WeakKeyDictionary[torch.nn.Module, Active] = WeakKeyDictionary()


def active(model: torch.nn.Module) -> Active | None:
    """The state of the `sequence_parallel` around a model, or None outside."""
    return _ACTIVE.get(model)


def _hooks(
    model: PreTrainedModel,
    stock: str,
    plan: Plan | Planner,
    group: Any,
    kernel: str,
    head: Head,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The hooks that run before and after the model at every call.

    Args:
        stock: the model's attention implementation outside.
    """
    state = _ACTIVE[model] = Active(plan, group, accepts(model))

    def before(
        _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        cause, call = None, None
        try:
            if len(args) > 1:
                raise PlanError("give the model's inputs by keyword, only input_ids may come first")
            named = {**dict(zip([model.main_input_name], args, strict=False)), **kwargs}
            call = prepare(named, plan, group, kernel, state.accepts)
        except Exception as error:  # raised on all ranks, by `_agree`
            cause = error
        if (call.run.plan.ranks if call else _ranks(plan, group)) > 1:
            _agree(group, signature(call.same_on_all) if call else {"error": _text(cause)})
        if cause or not call:
            raise cause or PlanError("the model's inputs made no plan")
        local = call.inputs
        # all ranks arrive here together: the proof of a model with sharded parameters gathers them
        state.proof = prove(model, stock, local["position_ids"].device)
        check_lengths(model.config.get_text_config(), call.run.plan.docs)
        state.call = call = replace(
            call, inputs={}, same_on_all={}
        )  # do not keep tensors of whole rows
        return (), local | head.begin(call)

    def after(_: Any, args: tuple[Any, ...], out: Any) -> Any:
        assert state.proof is not None
        assert state.call is not None
        state.proof.check_calls(state.call.run.calls)
        return head.finish(out)

    return before, after


def _text(error: Exception | None) -> str:
    """An error's text; with its type where it is not one of ours."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _ranks(plan: Plan | Planner, group: Any) -> int:
    """The group's size as far as it is known where a rank's inputs do not make a plan."""
    if not isinstance(plan, Plan):
        try:
            plan = plan(Documents.of([1]))
        except Exception:  # the user's function; then the group is all there is to go by
            return dist.get_world_size(group) if dist.is_initialized() else 1
    return group_size(plan, group)


def _agree(group: Any, signature: dict[str, str]) -> None:
    """Raise the same error on all ranks where one has an error or other packed sequences."""
    exchange = exchange_of(group)
    exchange.handshake({"pass": "the model's inputs", **signature}, PlanError)
    try:
        exchange.finish_handshake()
    except PlanError as error:
        if re.match(r"rank \d+: ", text := str(error)):
            raise
        raise PlanError(f"{text} {SAME_ROWS}") from None
