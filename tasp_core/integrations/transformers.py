"""Hugging Face transformers on a plan: its public AttentionInterface, under the name "tasp".

    with sequence_parallel(model, plan, group):                  # the same rows on every rank
        out = model(input_ids=ids, labels=labels)                # whole [B, T] in, this rank's tokens out
        out.loss.backward()                                      # losses and gradients ADD UP over ranks
    whole = tasp.gather(out.logits, plan, group, dim=1)          # prefill: logits of the whole row

Each model is proved at its first use, see models.py; docs/models.md lists families. A layer's sliding
window is the model's business: give the plan of the row without one. `labels` are as transformers has
them, unshifted. Not covered: padding (pack rows instead), dropout, sinks, soft caps, decoding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..attention import attention
from ..documents import Documents
from ..errors import PlanError
from ..loss import next_token_labels
from ..plan import Plan
from ..tensors import shard
from .models import (
    ALONE,
    NAME,
    Mask,
    NoPlanError,
    Probe,
    asked,
    check_kinds,
    check_lengths,
    check_media,
    mask_of,
    prove,
)

PER_TOKEN = ("input_ids", "token_type_ids", "inputs_embeds")  # [B, T, ...]
CU_SEQLENS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
ROW = (*CU_SEQLENS, "max_length_q", "max_length_k")  # of the whole row: the plan knows them

Planner = Callable[[Documents], Plan]


@dataclass(frozen=True)
class Run:
    """What a model's attention layers need: passed to them as the keyword `tasp`."""

    plan: Plan
    group: Any
    kernel: str = "auto"
    calls: list[str] = field(default_factory=list, compare=False, repr=False)  # what attended


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
    """transformers' attention signature: q, k, v [B, H, t, D] in, out [B, t, H, D]."""
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
    if ask.causal != docs.causal:
        kinds = ["full", "causal"]
        raise PlanError(
            f"{ask.layer} is {kinds[ask.causal]}, the plan {kinds[docs.causal]}; "
            f"make it with Documents.of(..., causal={ask.causal})"
        )
    plan = _windowed(tasp.plan, ask.window, ask.layer)
    tasp.calls.append(ask.layer)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attention(q, k, v, plan, tasp.group, scaling, tasp.kernel), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, mask_of)


@lru_cache(maxsize=64)
def _windowed(plan: Plan, window: int | None, layer: str) -> Plan:
    """The plan as it is for a layer with this sliding window, the tokens where they are."""
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


def documents_of(inputs: Mapping[str, Any], tokens: int) -> Documents | None:
    """The row's documents as `inputs` tell them: by cu_seqlens, else by position_ids [B, T], else None.

    Raises:
        PlanError: position_ids that do not count 0, 1, 2, ... in every document, or differ by row.
    """
    for name in CU_SEQLENS:
        if (cu := inputs.get(name)) is not None:
            return Documents.from_cu_seqlens(torch.as_tensor(cu).tolist(), total=tokens)
    positions = inputs.get("position_ids")
    if positions is None or positions.dim() != 2:  # [3, B, T] do not tell where documents begin
        return None
    row = positions[0].cpu().numpy()
    starts = np.flatnonzero(row == 0)
    if (positions == positions[:1]).all() and (starts[:1] == 0).all() and len(starts) > 0:
        docs = Documents([*starts, tokens])
        if np.array_equal(docs.positions(), row):
            return docs
    raise PlanError(
        "position_ids must count 0, 1, 2, ... inside every document and be the same in every row of "
        "a batch; pack rows with different documents into one, or give cu_seqlens"
    )


def _resolve(inputs: Mapping[str, Any], tokens: int, plan: Plan | Planner) -> Plan:
    """The plan of these inputs, held against the documents that the inputs themselves tell."""
    found = documents_of(inputs, tokens)
    if not isinstance(plan, Plan):
        plan = plan(found or Documents.of([tokens]))
    elif found and _some(found) != _some(plan.docs):
        raise PlanError(f"the inputs hold {found!r}, the plan is for {plan.docs!r}")
    if tokens != plan.docs.total:
        raise PlanError(f"rows have {tokens} tokens, the plan is for {plan.docs.total}")
    return plan


def _some(docs: Documents) -> list[int]:
    """Lengths of the documents that hold tokens."""
    return docs.lengths[docs.lengths > 0].tolist()


def shard_inputs(
    inputs: Mapping[str, Any], plan: Plan | Planner, group: Any = None, *, kernel: str = "auto"
) -> dict[str, Any]:
    """A model's keyword arguments for whole rows -> those for this rank's tokens, and for attention.

    input_ids, inputs_embeds, labels, and position_ids of [B, T] or [3, B, T] are sharded; labels are
    shifted first, inside documents; positions are made where there are none. A mask without padding
    is dropped; all else passes through.

    Args:
        plan: the rows' plan, or a function from their documents (read off cu_seqlens or position_ids)
            to it. Every row of the batch follows it.
        group: plan.ranks ranks; None: the default group, or one process.

    Returns:
        keyword arguments; with labels, the model's loss is this rank's part of sum / count, where
        count is `num_items_in_batch` (of all rows of a step, where several make one) or the rows' own.

    Raises:
        PlanError: padding, or inputs that do not fit the plan.
    """
    out = {k: v for k, v in inputs.items() if k not in ROW and v is not None}
    ids = out.get("input_ids", out.get("inputs_embeds"))
    if ids is None:
        raise PlanError(f"inputs have no input_ids and no inputs_embeds, only {', '.join(inputs)}")
    plan = _resolve(inputs, ids.shape[1], plan)
    rank = dist.get_rank(group) if plan.ranks > 1 else 0
    mask = out.pop("attention_mask", None)
    if mask is not None and not bool(mask.all()):
        raise PlanError("attention_mask hides tokens; pack documents into rows without padding")
    if out.get("position_ids") is None:
        row = torch.from_numpy(plan.docs.positions()).to(ids.device)
        out["position_ids"] = row.expand(ids.shape[0], -1)
    out["position_ids"] = shard(out["position_ids"], plan, rank, dim=-1)
    if (labels := out.get("labels")) is not None:
        shifted = out.pop("shift_labels", None)
        shifted = next_token_labels(labels, plan.docs) if shifted is None else shifted
        count = (shifted != -100).sum().clamp(min=1)
        out["num_items_in_batch"] = out.get("num_items_in_batch", count)
        out["labels"] = out["shift_labels"] = shard(shifted, plan, rank, dim=1)
    out |= {name: shard(out[name], plan, rank, dim=1) for name in PER_TOKEN if name in out}
    return {**out, "tasp": Run(plan, group, kernel)}


@contextmanager
def sequence_parallel(
    model: PreTrainedModel, plan: Plan | Planner, group: Any = None, *, kernel: str = "auto"
) -> Iterator[PreTrainedModel]:
    """Inside, `model(...)` takes whole rows and computes this rank's tokens; see `shard_inputs`.

    Run backward inside too when layers are checkpointed. A wrapper (DDP, FSDP) goes around the model.

    Raises:
        PlanError: the model's attention does not go through the interface, or its proof fails.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise PlanError(
            f"{type(model).__name__} does not use transformers' AttentionInterface, so that its attention "
            f"cannot run on a plan; {ALONE}"
        )

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if len(args) > 1:
            raise PlanError("give the model's inputs by keyword, only input_ids may come first")
        given = {**dict(zip([model.main_input_name], args, strict=False)), **kwargs}
        check_media(type(model).__name__, given)
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        proof = prove(model, before, getattr(tokens, "device", None))
        out = shard_inputs(given, plan, group, kernel=kernel)
        check_lengths(model.config.get_text_config(), out["tasp"].plan.docs)
        return (), proof.with_positions(given, out)

    def counted(_: Any, __: Any, kwargs: dict[str, Any], ___: Any) -> None:
        prove(model, before).check_calls(kwargs["tasp"].calls)

    handles = [
        model.register_forward_pre_hook(hook, with_kwargs=True),
        model.register_forward_hook(counted, with_kwargs=True),
    ]
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(before)
