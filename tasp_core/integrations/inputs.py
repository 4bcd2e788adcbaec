"""A model's inputs for whole rows -> its inputs for one rank's tokens.

    inputs = shard_inputs({"input_ids": ids, "position_ids": positions}, plan, group)
    documents_of({"position_ids": positions}, tokens=ids.shape[1])     # where documents begin

A row is one packed sequence of a batch [B, T]. An input is known here or refused by name. Five inputs
may tell where documents begin (`documents_of`); where several do, they must agree. Padding, 4-D masks,
caches, images and per-token weights are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PlanError
from ..planning.plan import Plan
from ..runtime.loss import label_error, next_token_labels, outside_error
from ..runtime.sharding import shard
from ..sequence.documents import Documents

IGNORE = -100
CU_SEQLENS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
MAX_LENGTHS = ("max_length_q", "max_length_k")
DOCUMENTS = (*CU_SEQLENS, *MAX_LENGTHS, "attention_mask", "seq_idx")  # read here, then dropped
PER_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids")  # [B, T, ...]
LABELS = ("labels", "shift_labels", "num_items_in_batch", "label_smoothing")
PASSED = ("use_cache", "output_hidden_states", "output_router_logits", "is_causal")
OFF = {  # what may be passed as long as it asks for nothing, and what to do instead
    "output_attentions": "attention weights are never made; leave it out",
    "logits_to_keep": "every rank has tokens of its own; leave it out and take the logits you need "
    "from tasp.gather(out.logits, plan, group, dim=1)",
}
OFF["num_logits_to_keep"] = OFF["logits_to_keep"]  # its older name
NO_LABELS = "the batch has no labels to count; use a collator that returns `labels`"
ADVICE = {
    "past_key_values": "a plan is for whole rows, not for decoding; use_cache=True returns the keys "
    "and values of this rank's tokens",
    "cache_position": "a plan is for whole rows, not for decoding; leave it out",
    "loss_mask": "set the labels of tokens that do not count to -100",
    "head_mask": "no plan has one; leave it out",
    "pixel_values": "an image's features would have to be spread over the ranks with its tokens; "
    "give inputs_embeds, made from the whole row on every rank",
    "mm_token_type_ids": "it says which tokens are images, whose masks no plan has; give "
    "inputs_embeds and position_ids",
    "return_dict": "outputs are known by name; leave it out",
}
ADVICE |= {"cache": ADVICE["past_key_values"], "loss_weights": ADVICE["loss_mask"]}
SAME_ROWS = (
    "All ranks of a group must be given the same whole rows, each rank takes its tokens out of them: "
    "use integrations.trainer.RowTrainer instead of Trainer, or a sampler whose index is that of the "
    "group, e.g. DistributedSampler(data, num_replicas=groups, rank=rank // plan.ranks)"
)

Planner = Callable[[Documents], Plan]


@dataclass(frozen=True)
class Run:
    """What a model's attention layers need: passed to them as the keyword `tasp`.

    Args:
        tokens: [t] int64, index in the packed sequence of each of this rank's tokens, sharded like all
            inputs; attention compares the order of its rows with it. None: the order is not checked.
        stand_in: this rank has no tokens, so the model gets one that belongs to no document. Attention
            leaves it out and returns zeros for it.
        calls: names of the attention layers that have run in this forward; layers add to it.
    """

    plan: Plan
    group: Any
    kernel: str = "auto"
    tokens: Tensor | None = field(default=None, compare=False, repr=False)
    stand_in: bool = False
    calls: list[str] = field(default_factory=list, compare=False, repr=False)


@dataclass(frozen=True)
class Accepts:
    """What a model's forward accepts, as far as its inputs depend on it.

    Args:
        name: of the model's class.
        labels: "next" where the model's loss compares a token's logits with the next label, "own"
            where with the token's own.
        why_no_labels: why the model's loss is not known to be right on a plan, or "".
        first_position: the position of a document's first token; 2 for most models like Roberta.
        padding_id: the token that such a model does not count, or None.
        segments: whether token_type_ids are embedded; other models make masks of them.
        defaults: default values of the forward's arguments, by name.
        classes: how many classes labels number, or None where that is not known.
    """

    name: str = "the model"
    labels: str = "next"
    why_no_labels: str = ""
    first_position: int = 0
    padding_id: int | None = None
    segments: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    classes: int | None = None


@dataclass(frozen=True)
class Sharded:
    """A rank's part of a model's inputs.

    Args:
        inputs: keyword arguments of the model, without labels.
        labels: [B, t] what this rank's logits are compared with, or None.
        count: what the loss is divided by: the number of labels in the whole rows, or the caller's.
        targets: the number of labels in the whole rows.
        same_on_all: what must be the same on all ranks of the group, by name.
    """

    inputs: dict[str, Any]
    run: Run
    batch: int
    labels: Tensor | None
    count: Any
    targets: Any
    smoothing: float
    same_on_all: dict[str, Any]


# ---- where documents begin


def documents_of(
    inputs: Mapping[str, Any], tokens: int, *, first_position: int = 0
) -> Documents | None:
    """The documents of each row by what `inputs` tell, or None where nothing tells them.

    Read are cu_seqlens (also cu_seq_lens_q, cu_seq_lens_k); position_ids [T], [B, T], and those of
    multimodal rotary embeddings, [4, B, T] with text positions first and [3, B, T] with (0, 0, 0) at
    the first token of each document; attention_mask [B, T] and seq_idx [B, T] that number documents.

    Args:
        tokens: how many a row has.
        first_position: the position of a document's first token.

    Raises:
        PlanError: documents that cannot be read, differ by row of the batch, or by what tells them.
    """
    return _agreed(_told(inputs, tokens, first_position))


def _told(inputs: Mapping[str, Any], tokens: int, first: int) -> dict[str, Documents]:
    """The documents by each input that tells them."""
    told: dict[str, Documents | None] = {}
    for name in CU_SEQLENS:
        if (cu := inputs.get(name)) is not None:
            told[name] = Documents.from_cu_seqlens(torch.as_tensor(cu).tolist(), total=tokens)
    if (positions := inputs.get("position_ids")) is not None:
        told["position_ids"] = _by_positions(_tensor("position_ids", positions), tokens, first)
    if (mask := inputs.get("attention_mask")) is not None:
        told["attention_mask"] = _by_mask(mask, tokens)
    if (index := inputs.get("seq_idx")) is not None:
        told["seq_idx"] = _by_numbers("seq_idx", _tensor("seq_idx", index), tokens)
    return {name: docs for name, docs in told.items() if docs is not None}


def _agreed(told: Mapping[str, Documents]) -> Documents | None:
    """The documents on which all inputs agree.

    Raises:
        PlanError: two inputs that tell different documents.
    """
    for name, docs in told.items():
        first = next(iter(told))
        if _lengths(docs) != _lengths(told[first]):
            raise PlanError(
                f"{first} tells {told[first]!r}, {name} tells {docs!r}; give one of them, or let them agree"
            )
    return next(iter(told.values()), None)


def _lengths(docs: Documents) -> list[int]:
    """Lengths of the documents that hold tokens."""
    return docs.lengths[docs.lengths > 0].tolist()


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise PlanError(f"{name} must be a tensor, got {type(value).__name__}") from None


def _one_row(name: str, values: Tensor, tokens: int) -> np.ndarray:
    """The numbers of one row; all rows of the batch must have the same."""
    if values.dim() not in (1, 2) or values.shape[-1] != tokens:
        raise PlanError(
            f"{name} must be [B, T] with {tokens} tokens a row, got {list(values.shape)}"
        )
    rows = values.reshape(-1, tokens)
    if not bool((rows == rows[:1]).all()):
        raise PlanError(
            f"{name} must be the same in every row of a batch: all rows follow one plan; pack rows "
            "with different documents into one row, [1, T]"
        )
    return rows[0].cpu().numpy()


def _by_numbers(name: str, numbers: Tensor, tokens: int) -> Documents:
    """Documents numbered by token: 1, 1, 1, 2, 3, 3."""
    if numbers.dtype.is_floating_point or numbers.dtype == torch.bool:
        raise PlanError(f"{name} must number documents by whole numbers, got {numbers.dtype}")
    row = _one_row(name, numbers, tokens).astype(np.int64)
    if (np.diff(row) < 0).any():
        raise PlanError(
            f"{name} must number documents in row order, without going down; a document's tokens lie "
            "side by side"
        )
    return Documents([0, *(np.flatnonzero(np.diff(row)) + 1), tokens] if tokens else [0])


def _by_mask(mask: Any, tokens: int) -> Documents | None:
    """Documents that a mask numbers; None for a mask of ones, which tells nothing."""
    if isinstance(mask, Mapping):
        raise PlanError(
            f"attention_mask is a dict of {', '.join(map(str, mask))}: masks for kinds of layers, which "
            "no plan has; leave it out, the layers' own windows are taken, and tell documents by "
            "position_ids or cu_seqlens"
        )
    if not isinstance(mask, Tensor):
        raise PlanError(f"attention_mask must be a tensor [B, T], got {type(mask).__name__}")
    if mask.dim() != 2:
        raise PlanError(
            f"attention_mask of shape {list(mask.shape)} says for pairs of tokens what is visible, which "
            "no plan has; leave it out and tell documents by position_ids or cu_seqlens"
        )
    if bool((mask == 1).all()) and mask.shape[-1] == tokens:
        return None
    if bool((mask <= 0).any()):
        raise PlanError(
            "attention_mask hides tokens; pack documents into rows without padding, or take the padding "
            "off and leave the mask out"
        )
    return _by_numbers("attention_mask", mask, tokens)


def _by_positions(positions: Tensor, tokens: int, first: int) -> Documents | None:
    """Documents at whose first tokens positions begin again."""
    if positions.dim() == 3 and positions.shape[0] == 4:
        return _by_counts(positions[0], tokens, first)  # the text's own, then three axes
    if positions.dim() == 3 and positions.shape[0] == 3:
        if bool((positions == positions[:1]).all()) and bool((positions[0][:, :1] == 0).all()):
            return _by_counts(positions[0], tokens, first)
        starts = _one_row("position_ids", (positions == 0).all(0), tokens)
        if not starts.any():
            return None
        if not starts[0]:
            raise PlanError(
                "position_ids [3, B, T] are (0, 0, 0) at a token in the row but not at its first; let "
                "them restart in every document"
            )
        return Documents([*np.flatnonzero(starts), tokens])
    if positions.dim() > 2:
        raise PlanError(
            f"position_ids must be [T], [B, T], [3, B, T] or [4, B, T], got {list(positions.shape)}"
        )
    return _by_counts(positions, tokens, first)


def _by_counts(positions: Tensor, tokens: int, first: int) -> Documents:
    """Documents in which positions count 0, 1, 2, ..., or up from `first`."""
    row = _one_row("position_ids", positions, tokens)
    begin = int(row[0]) if len(row) else 0
    if begin in (0, first):
        docs = Documents([*np.flatnonzero(row == begin), tokens] if len(row) else [0])
        if np.array_equal(docs.positions() + begin, row):
            return docs
    count = ", ".join(str(first + i) for i in range(3))
    raise PlanError(
        f"position_ids must count {count}, ... inside every document; let them restart where a "
        "document begins, or leave them out and give cu_seqlens"
    )


def _resolve(
    inputs: Mapping[str, Any], tokens: int, plan: Plan | Planner, accepts: Accepts
) -> Plan:
    """The plan of these inputs, compared with the documents that the inputs themselves tell."""
    told = _told(inputs, tokens, accepts.first_position)
    told_docs = _agreed(told)
    if not isinstance(plan, Plan):
        if told_docs is None and inputs.get("position_ids") is not None:
            raise PlanError(
                "position_ids do not tell where documents begin, and a planner has to know; give "
                "cu_seqlens, or a plan"
            )
        plan = plan(told_docs or Documents.of([tokens]))
        if not isinstance(plan, Plan):
            raise PlanError(f"the planner must return a plan, got {type(plan).__name__}")
    if tokens != plan.docs.total:
        raise PlanError(f"rows have {tokens} tokens, the plan is for {plan.docs.total}")
    if told_docs is not None and _lengths(told_docs) != _lengths(plan.docs):
        names = " and ".join(told)
        raise PlanError(f"the inputs hold {told_docs!r} by {names}, the plan is for {plan.docs!r}")
    longest = int(plan.docs.lengths.max(initial=0))
    for name in MAX_LENGTHS:
        if (most := inputs.get(name)) is not None and int(most) < longest:
            raise PlanError(f"{name} is {int(most)}, the longest document has {longest} tokens")
    return plan


# ---- the inputs themselves


def _known(inputs: Mapping[str, Any], accepts: Accepts) -> dict[str, Any]:
    """The inputs that are not None.

    Raises:
        PlanError: an input that is not known to be right on a plan.
    """
    known_inputs = {}
    for name, value in inputs.items():
        is_scalar = isinstance(value, bool | int | float | str)
        if value is None or (
            is_scalar and name in accepts.defaults and accepts.defaults[name] == value
        ):
            continue  # what the model does without it
        if name in OFF or name == "return_dict":
            if is_scalar and bool(value) == (name == "return_dict"):
                continue
            raise PlanError(f"{name} = {_shown(value)}: {OFF.get(name) or ADVICE[name]}")
        known = (*PER_TOKEN, "position_ids", *DOCUMENTS, *LABELS, *PASSED)
        if name not in known:
            advice = ADVICE.get(name, "it may belong to tokens of other ranks; leave it out")
            raise PlanError(
                f"{name} = {_shown(value)}: a plan does not know this input, and it is not passed on "
                f"unread; {advice}"
            )
        known_inputs[name] = value
    return known_inputs


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__


def _positions(inputs: Mapping[str, Any], ids: Tensor, plan: Plan, accepts: Accepts) -> Tensor:
    """position_ids [..., B, T] of whole rows."""
    if (positions := inputs.get("position_ids")) is not None:
        positions, first = _tensor("position_ids", positions), accepts.first_position
        if first and positions.numel() and int(positions.min()) < first:
            raise PlanError(
                f"{accepts.name} counts positions from {first} on, position_ids begin at "
                f"{int(positions.min())}; leave them out and tell documents by cu_seq_lens_q"
            )
        return positions[None] if positions.dim() == 1 else positions
    padding = accepts.padding_id if "input_ids" in inputs else None
    if padding is not None and bool((ids == torch.tensor(padding)).any()):
        raise PlanError(
            f"{accepts.name} does not count padding, and the row has token {padding}, its padding; "
            "take padding off, or give position_ids"
        )
    row = torch.from_numpy(plan.docs.positions() + accepts.first_position).to(ids.device)
    return row.expand(ids.shape[0], -1)


def unknown_loss(model: str, why: str) -> PlanError:
    """The refusal of labels for a model whose loss is not known to be right on a plan."""
    return PlanError(
        f"{model} is given labels, and its loss is not known to be right on a plan: {why}; leave labels "
        "out and compute the loss of out.logits, tasp.token_loss(logits, labels, group, plan=plan)"
    )


def _labels(
    inputs: Mapping[str, Any], ids: Tensor, docs: Documents, accepts: Accepts
) -> Tensor | None:
    """[B, T] the label of each token's logits, or None without labels."""
    labels, shifted = inputs.get("labels"), inputs.get("shift_labels")
    if labels is None:
        if shifted is not None:
            raise PlanError("shift_labels are given without labels; give labels as well")
        return None
    if accepts.why_no_labels:
        raise unknown_loss(accepts.name, accepts.why_no_labels)
    if shifted is not None and accepts.labels == "own":
        raise PlanError(
            f"{accepts.name} compares a token with its own label; leave shift_labels out"
        )
    for name, x in (("labels", labels), ("shift_labels", shifted)):
        if x is not None and (not isinstance(x, Tensor) or x.shape != ids.shape[:2]):
            raise PlanError(f"{name} must be [B, T] = {list(ids.shape[:2])}, got {_shown(x)}")
        why = "" if x is None else label_error(x, name)
        if x is not None and not why and accepts.classes is not None:
            why = outside_error(x, accepts.classes, accepts.name, IGNORE, name)
        if why:
            raise PlanError(why)
    if accepts.labels == "own":
        return labels
    return next_token_labels(labels, docs) if shifted is None else shifted


def count_targets(inputs: Mapping[str, Any], plan: Plan | Planner, accepts: Accepts) -> Tensor:
    """How many labels whole rows have; a loss over several rows is divided by it."""
    known_inputs = _known(inputs, accepts)
    ids = known_inputs.get("input_ids", known_inputs.get("inputs_embeds"))
    if ids is None or known_inputs.get("labels") is None:
        raise PlanError(NO_LABELS)
    docs = documents_of(known_inputs, ids.shape[1], first_position=accepts.first_position)
    if docs is None or isinstance(plan, Plan):
        docs = plan.docs if isinstance(plan, Plan) else Documents.of([ids.shape[1]])
    labels = _labels(known_inputs, ids, docs, accepts)
    assert labels is not None
    return (labels != IGNORE).sum()


def prepare(
    inputs: Mapping[str, Any], plan: Plan | Planner, group: Any, kernel: str, accepts: Accepts
) -> Sharded:
    """As `shard_inputs`, with labels and their count apart from the model's inputs."""
    known_inputs = _known(inputs, accepts)
    id_names = [name for name in ("input_ids", "inputs_embeds") if name in known_inputs]
    if len(id_names) != 1:
        names = (
            "both input_ids and inputs_embeds" if id_names else "no input_ids and no inputs_embeds"
        )
        raise PlanError(f"inputs have {names}, only {', '.join(inputs)}; give one of them")
    ids = known_inputs[id_names[0]]
    if ids.dim() != (2 if id_names == ["input_ids"] else 3):
        raise PlanError(f"{id_names[0]} must be whole rows, [B, T, ...], got {list(ids.shape)}")
    plan = _resolve(known_inputs, ids.shape[1], plan, accepts)
    size = group_size(plan, group)
    if plan.ranks != size:
        raise PlanError(
            f"the plan is for {plan.ranks} ranks, the group has {size}; make the plan with ranks={size} "
            "or pass the right group"
        )
    rank = dist.get_rank(group) if plan.ranks > 1 else 0
    per_token = {name: known_inputs[name] for name in PER_TOKEN if name in known_inputs}
    for name, x in per_token.items():
        if not isinstance(x, Tensor) or x.shape[:2] != ids.shape[:2]:
            raise PlanError(f"{name} must be [B, T] = {list(ids.shape[:2])}, got {_shown(x)}")
    if "token_type_ids" in per_token and not accepts.segments:
        raise PlanError(
            f"{accepts.name} makes masks of token_type_ids, which no plan has; leave them out"
        )
    positions = _positions(known_inputs, ids, plan, accepts)
    if positions.shape[-2] not in (1, ids.shape[0]) or positions.shape[-1] != ids.shape[1]:
        raise PlanError(
            f"position_ids {list(positions.shape)} do not fit rows {list(ids.shape[:2])}"
        )
    labels = _labels(known_inputs, ids, plan.docs, accepts)
    targets = None if labels is None else (labels != IGNORE).sum()
    count = known_inputs.get("num_items_in_batch", targets)
    smoothing = float(known_inputs.get("label_smoothing", 0.0))
    if not 0 <= smoothing <= 1:
        raise PlanError(f"label_smoothing must be between 0 and 1, got {smoothing}")
    stand_in = plan.num_tokens(rank) == 0

    def part(x: Tensor, dim: int = 1) -> Tensor:
        return x.narrow(dim, 0, 1) if stand_in else shard(x, plan, rank, dim=dim)

    passed = {name: known_inputs[name] for name in PASSED if name in known_inputs}
    with torch.inference_mode(False):  # attention compares them once, where changes would show
        tokens = shard(torch.arange(plan.docs.total, device=ids.device), plan, rank)
    run = Run(plan, group, kernel, tokens, stand_in)
    own = {name: part(x) for name, x in per_token.items()} | {"position_ids": part(positions, -1)}
    mine = None if labels is None else part(labels)
    if stand_in and mine is not None:
        mine = torch.full_like(mine, IGNORE)
    same = per_token | {
        "position_ids": positions,
        "labels": labels,
        "plan": plan.fingerprint()[:16],
    }
    same |= {
        "num_items_in_batch": known_inputs.get("num_items_in_batch"),
        "label_smoothing": smoothing,
    }
    same |= {"arguments": ", ".join(f"{k}={_shown(v)}" for k, v in sorted(passed.items()))}
    return Sharded(
        own | passed | {"tasp": run}, run, ids.shape[0], mine, count, targets, smoothing, same
    )


def group_size(plan: Plan, group: Any) -> int:
    """Ranks of a group; None: of the default group, or this process alone for a plan of one rank."""
    if group is None and (plan.ranks == 1 or not (dist.is_available() and dist.is_initialized())):
        return 1
    return dist.get_world_size(group)


def shard_inputs(
    inputs: Mapping[str, Any],
    plan: Plan | Planner,
    group: Any = None,
    *,
    kernel: str = "auto",
    accepts: Accepts | None = None,
) -> dict[str, Any]:
    """A model's keyword arguments for whole rows -> those for this rank's tokens, and for attention.

    input_ids, inputs_embeds, token_type_ids, labels and position_ids ([T], [B, T], [3, B, T] or
    [4, B, T]) are sharded; labels are shifted first, inside documents; positions are made where there
    are none. Inputs that tell documents are read, compared with the plan and dropped (`documents_of`).

    A rank without tokens gets one, the row's first, with the label -100: its loss is 0, attention
    leaves it out, and its logits belong to no token. `inputs["tasp"].stand_in` is then True.

    Args:
        plan: the rows' plan, or a function from their documents to it. Every row of the batch follows
            it.
        group: plan.ranks ranks; None: the default group, or one process.
        accepts: what the model accepts; default: that of a next-token model whose positions begin at
            0. `sequence_parallel` reads it from the model, and compares the ranks' rows; this does not.

    Returns:
        keyword arguments; with labels, the model's loss is this rank's part of sum / count, where
        count is `num_items_in_batch` (of all rows of a step, where several make one) or the rows' own.

    Raises:
        PlanError: padding, inputs that do not fit the plan, and inputs that are not known to be right.
    """
    sharded = prepare(inputs, plan, group, kernel, accepts or Accepts())
    if sharded.labels is None:
        return sharded.inputs
    if sharded.smoothing:
        raise PlanError("label_smoothing is computed inside sequence_parallel only")
    count = sharded.count
    count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
    labels = {"labels": sharded.labels, "num_items_in_batch": count}
    if (accepts or Accepts()).labels == "next":
        labels["shift_labels"] = sharded.labels
    return {**sharded.inputs, **labels}


# ---- the same rows on every rank


def signature(values: Mapping[str, Any]) -> dict[str, str]:
    """A short text of each value, equal on two ranks exactly where their values are."""
    tensors = {k: v for k, v in values.items() if isinstance(v, Tensor)}
    devices = {x.device for x in tensors.values()}
    sums: dict[str, int] = {}
    for device in devices:  # one host synchronisation per device
        names = [k for k, x in tensors.items() if x.device == device]
        digests = torch.stack([_digest(tensors[k]) for k in names])
        sums |= dict(zip(names, digests.tolist(), strict=True))
    return {
        name: f"{list(tensors[name].shape)} #{sums[name] % 2**64:016x}"
        if name in tensors
        else str(value)
        for name, value in values.items()
    }


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22  # numbers hashed at once


@lru_cache(maxsize=16)
def _odd_numbers(count: int, offset: int, device: torch.device) -> Tensor:
    """Odd 64-bit numbers without a pattern (splitmix64)."""
    z = (torch.arange(count, device=device) + offset) * -7046029254386353131
    z = (z ^ (z >> 30)) * -4658895280553007687
    z = (z ^ (z >> 27)) * -7723592293110705685
    return (z ^ (z >> 31)) | 1


def _digest(x: Tensor) -> Tensor:
    """A sum modulo 2 ** 64 of all elements' bits, each times odd numbers of its row and column.

    One different element always changes it; several do, except with a probability of about 2 ** -60.
    """
    x = x.detach()
    rows = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    width = max(rows.shape[1], 1)
    of_column, of_row = (
        _odd_numbers(n, offset, x.device) for offset, n in ((1, width), (2**40, len(rows)))
    )
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for i in range(0, len(rows), step := max(CHUNK // width, 1)):
        bits = rows[i : i + step].contiguous().view(BITS[x.dtype.itemsize]).long()
        total += ((bits * of_column).sum(-1) * of_row[i : i + step]).sum()
    return total
