"""Outputs of a model whose tokens are spread over ranks: its loss, and one value for each token.

The loss is this rank's sum divided by the number of labels of all rows, whatever head the model has. It
replaces the model's own loss, and only where the two are known to be the same:

- Next-token models (ForCausalLM, LMHeadModel) call `model.loss_function` with all logits and labels and
  return its result. Ours replaces that function meanwhile, so every call is checked.
- Heads with a label for each token (ForMaskedLM, ForTokenClassification) may compute their loss
  themselves; at the first call it is compared with ours on the same logits.
- A router's balance loss is made of the whole group's tokens, by the formula of
  `load_balancing_loss_func`; at the first call the formula is compared with the model's own result.

Every other loss, and every output that is not one value for each token, is refused by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING

from ..errors import PlanError
from ..runtime.exchange import exchange_of
from ..runtime.loss import token_sum
from .inputs import IGNORE, Accepts, Sharded, unknown_loss
from .models import first_position

KINDS = {  # the end of a class's name: which label a token's logits are compared with
    "ForCausalLM": "next",
    "LMHeadModel": "next",
    "ForMaskedLM": "own",
    "ForTokenClassification": "own",
}
CACHES = ("past_key_values", "cache")
OUTPUTS = (
    "loss",
    "logits",
    "last_hidden_state",
    "hidden_states",
    "router_logits",
    "aux_loss",
    *CACHES,
)


def core_of(model: nn.Module) -> Any:
    """The model inside a PEFT wrapper, or the model."""
    get_base_model: Any = getattr(model, "get_base_model", None)
    return get_base_model() if get_base_model else model


# ---- what a model is


def accepts(model: nn.Module) -> Accepts:
    """What the model accepts.

    Raises:
        PlanError: a model that returns tuples.
    """
    core = core_of(model)
    name = type(core).__name__
    parameters: dict[str, inspect.Parameter] = {}
    # a forward(*args, **kwargs) of a subclass passes on to the next class's
    for kind in type(core).__mro__:
        if kind is not nn.Module and "forward" in vars(kind):
            parameters = {**inspect.signature(vars(kind)["forward"]).parameters, **parameters}
    if getattr(core.config, "return_dict", True) is False:
        raise PlanError(
            f"{name} returns tuples, and outputs are known by name; set config.return_dict=True"
        )
    labels, why = _loss_kind(core)
    start, padding = first_position(core)
    return Accepts(
        name,
        labels,
        why,
        start,
        padding,
        segments=bool(getattr(core.config, "type_vocab_size", 0)),
        defaults={k: p.default for k, p in parameters.items() if p.default is not p.empty},
        classes=_classes(core),
    )


def _loss_kind(core: Any) -> tuple[str, str]:
    """("next" or "own", as in `Accepts.labels`; why the model's loss is not known, or "")."""
    heads = [
        c.__name__
        for c in type(core).__mro__
        if re.search(r"For[A-Z]\w+$|LMHeadModel$", c.__name__)
    ]
    head = heads[0] if heads else ""
    kind = next((kind for end, kind in KINDS.items() if head.endswith(end)), "")
    if not kind:
        return "next", (
            "known are the losses of " + ", ".join(KINDS) + " (one label for each token, one sum)"
        )
    stock = "ForCausalLM" if kind == "next" else next(end for end in KINDS if head.endswith(end))
    own = core.__dict__.get("_loss_function")
    if own is None and (loss_type := getattr(core, "loss_type", None)) in LOSS_MAPPING:
        own = LOSS_MAPPING[loss_type]
    if own is not None and own is not LOSS_MAPPING[stock]:
        return (
            kind,
            f"its loss_function is {getattr(own, '__name__', own)!r}, not transformers' own",
        )
    return kind, ""


def _classes(core: Any) -> int | None:
    """How many classes the labels of each token have."""
    config = core.config
    if re.search("ForTokenClassification", " ".join(c.__name__ for c in type(core).__mro__)):
        return getattr(config, "num_labels", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "vocab_size", None)


# ---- what comes out


class Head:
    """The head of one model inside `sequence_parallel`: its loss and its outputs, call by call.

    Args:
        group: the ranks that share the rows; None: the default group, or this process alone.
    """

    def __init__(self, model: nn.Module, group: Any) -> None:
        self.core, self.group = core_of(model), group
        self.call: Sharded | None = None
        self.losses: list[tuple[Tensor, Tensor]] = []  # our loss, and the model's copy of it
        self.inline = self.same_added = self.same_balance = False
        self.before = self.core.__dict__.get("_loss_function")

    def enter(self) -> None:
        """Replace the model's loss function."""
        self.core._loss_function = self._loss

    def leave(self) -> None:
        """Put the model's own loss function back."""
        if self.before is None:
            self.core.__dict__.pop("_loss_function", None)
        else:
            self.core._loss_function = self.before

    def begin(self, call: Sharded) -> dict[str, Any]:
        """The labels that the model itself gets at this call, as keyword arguments."""
        self.call, self.losses = call, []
        return {} if call.labels is None or self.inline else {"labels": call.labels}

    def _sum(self, logits: Tensor, smoothing: float) -> Tensor:
        assert self.call is not None
        assert self.call.labels is not None
        labels = self.call.labels.to(logits.device)
        return token_sum(logits, labels, IGNORE, label_smoothing=smoothing)

    def _own_loss(self, logits: Tensor) -> Tensor:
        """This rank's sum / count of all rows."""
        assert self.call is not None
        count = self.call.count
        if isinstance(count, Tensor):
            count = count.to(logits.device)
            count = torch.where(count > 0, count, torch.ones_like(count))
        return self._sum(logits, self.call.smoothing) / (
            count if isinstance(count, Tensor) else count or 1
        )

    def _loss(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The model calls this as its loss function."""
        mine = None if self.call is None else self.call.labels
        if mine is None or not isinstance(labels, Tensor) or labels.shape != mine.shape:
            raise self._refusal("it calls its loss function with other labels than it was given")
        if labels is not mine and not torch.equal(labels.to(mine.device), mine):
            raise self._refusal("it calls its loss function with other labels than it was given")
        if logits.shape[:-1] != labels.shape:
            raise self._refusal(f"logits {list(logits.shape)} are not one row for each label")
        if kwargs.get("ignore_index", IGNORE) != IGNORE:
            raise self._refusal(f"it ignores labels {kwargs['ignore_index']}, not {IGNORE}")
        loss = self._own_loss(logits)
        self.losses.append((loss, loss.clone()))
        return self.losses[-1][1]

    def _refusal(self, why: str) -> PlanError:
        return unknown_loss(type(self.core).__name__, why)

    def finish(self, out: Any) -> Any:
        """The outputs of this rank's tokens, and its part of the loss.

        Raises:
            PlanError: an output that is not one value for each token, or a loss that is not known.
        """
        call, name = self.call, type(self.core).__name__
        assert call is not None
        if not isinstance(out, Mapping):
            raise PlanError(f"{name} returns {type(out).__name__}; set config.return_dict=True")
        outputs = {k: v for k, v in out.items() if v is not None and not _nothing(v)}
        if "pooler_output" in outputs:
            raise PlanError(
                f"{name} returns pooler_output, made of a row's first token, which other ranks do not "
                "have; build the model with add_pooling_layer=False"
            )
        if extra := [k for k in outputs if k not in OUTPUTS]:
            raise PlanError(
                f"{name} returns {', '.join(extra)}, not known to be values of this rank's tokens; use a "
                "model without them"
            )
        tokens = 1 if call.run.stand_in else call.run.plan.num_tokens(self._rank())
        rows = (call.batch, tokens)
        for key, x in self._per_token(outputs):
            if x.dim() < 3 or tuple(x.shape[:2]) != rows:
                raise PlanError(
                    f"{name} returns {key} {list(x.shape)}, not one row for each of this rank's tokens, "
                    f"{list(rows)}; use a model whose head keeps all tokens"
                )
        local, part = self._balance(outputs)
        loss, added = self._model_loss(outputs, local)
        self.losses = []  # they hold the graph
        if call.run.stand_in:
            kept = ("loss", "aux_loss", *CACHES)
            outputs |= {k: _no_tokens(v) for k, v in outputs.items() if k not in kept}
            for key in CACHES:
                _empty_cache(outputs.get(key))
        if part is not None:
            outputs["aux_loss"] = part
        if loss is not None and added and part is not None:
            loss = loss + self._coefficient() * part
        outputs.pop("loss", None)
        return type(out)(**({} if loss is None else {"loss": loss}), **outputs)

    @staticmethod
    def _per_token(outputs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        named = [(k, outputs[k]) for k in ("logits", "last_hidden_state") if k in outputs]
        return named + [("hidden_states", x) for x in outputs.get("hidden_states", ())]

    def _rank(self) -> int:
        assert self.call is not None
        return dist.get_rank(self.group) if self.call.run.plan.ranks > 1 else 0

    def _agree(self, error: str) -> None:
        """Raise the same error on all ranks where one of them has an error; all ranks call this."""
        assert self.call is not None
        if self.call.run.plan.ranks > 1:
            exchange = exchange_of(self.group)
            exchange.handshake({"pass": "what the model returns", "error": error}, PlanError)
            exchange.finish_handshake()
        if error:
            raise PlanError(error)

    def _model_loss(
        self, outputs: Mapping[str, Any], balance: Tensor | None
    ) -> tuple[Tensor | None, bool]:
        """(our loss, known to equal the model's; whether the model adds its balance loss to it)."""
        call, loss = self.call, outputs.get("loss")
        assert call is not None
        if call.labels is None:
            if loss is not None:
                raise self._refusal("it returns a loss without labels")
            return None, False
        if len(self.losses) > 1:
            raise self._refusal(f"it calls its loss function {len(self.losses)} times")
        if self.losses:
            ours, copy = self.losses[0]
            if loss is None:
                raise self._refusal("it returns no loss")
            if loss is copy and _untouched(copy, ours):
                return ours, False
            if balance is None:
                raise self._refusal("it adds something to the sum over tokens")
            if not self.same_added:
                gap = loss.detach() - ours.detach() - self._coefficient() * balance
                bad = not bool(gap.abs() <= 1e-5 * (1 + loss.detach().abs()))
                why = "it adds something else than router_aux_loss_coef * aux_loss"
                self._agree(str(self._refusal(why)) if bad else "")
                self.same_added = True
            return ours, True
        logits = outputs.get("logits")
        if not isinstance(logits, Tensor):
            raise self._refusal("it returns no logits")
        if self._kind() == "next":
            raise self._refusal("it does not call its loss function")
        ours = self._own_loss(logits)
        if not self.inline:
            self._compare(outputs, logits)
        return ours, False

    def _kind(self) -> str:
        return _loss_kind(self.core)[0]

    def _compare(self, outputs: Mapping[str, Any], logits: Tensor) -> None:
        """At the first call: the model's own mean loss over this rank's tokens must equal ours."""
        call, loss = self.call, outputs.get("loss")
        assert call is not None
        assert call.labels is not None
        count = int((call.labels != IGNORE).sum())
        error = ""
        if not isinstance(loss, Tensor):
            error = str(self._refusal("it returns no loss"))
        elif count:
            mean = float(self._sum(logits.detach(), 0.0)) / count
            if not abs(float(loss.detach()) - mean) <= _tolerance(logits) * (1 + abs(mean)):
                why = f"of the same logits it makes {float(loss.detach()):.6g}, the mean is {mean:.6g}"
                error = str(self._refusal(why))
        self._agree(error)
        self.inline = int(call.targets) > 0  # without a label nothing was compared

    # ---- a router's balance loss

    def _coefficient(self) -> float:
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            if isinstance(weight := getattr(self.core, name, None), int | float):
                return float(weight)
        raise self._refusal("the weight of its aux_loss, router_aux_loss_coef, is not found")

    def _balance(self, outputs: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """(the model's own balance loss of this rank's tokens, this rank's part of the group's)."""
        call, model_says = self.call, outputs.get("aux_loss")
        assert call is not None
        if not isinstance(model_says, Tensor):
            return None, None
        name = type(self.core).__name__
        router_logits = outputs.get("router_logits")
        top = getattr(self.core, "num_experts_per_tok", None)
        if not isinstance(router_logits, tuple) or not isinstance(top, int):
            raise PlanError(
                f"{name} has an aux_loss of unknown making (no router_logits or num_experts_per_tok); set "
                "output_router_logits=False"
            )
        if call.run.stand_in:
            router_logits = _no_tokens(router_logits)
        counts, sums, rows = _routed(router_logits, top)
        experts = len(counts)
        if not self.same_balance:
            error = ""
            if rows:
                own = float(experts * (counts * sums.detach()).sum() / rows**2)
                says = float(model_says.detach())
                if not abs(own - says) <= _tolerance(router_logits[0]) * (1 + abs(own)):
                    error = (
                        f"{name} makes aux_loss {says:.6g} of this rank's tokens, the formula of "
                        f"load_balancing_loss_func {own:.6g}; set output_router_logits=False"
                    )
            self._agree(error)
            self.same_balance = True
        total = len(router_logits) * call.batch * call.run.plan.docs.total
        if call.run.plan.ranks > 1:
            dist.all_reduce(counts, group=self.group)
        return model_says.detach(), experts * (counts * sums).sum() / max(total, 1) ** 2


def _routed(router_logits: tuple[Tensor, ...], top: int) -> tuple[Tensor, Tensor, int]:
    """Sums over all layers and tokens of what a router says.

    Args:
        router_logits: of each layer, [tokens, experts].
        top: experts per token.

    Returns:
        [experts] how often each expert is chosen; [experts] its probabilities, added up; layers x tokens.
    """
    dtype = torch.float64 if router_logits[0].dtype == torch.float64 else torch.float32
    counts, rows = router_logits[0].new_zeros(router_logits[0].shape[-1], dtype=dtype), 0
    sums = torch.zeros_like(counts)
    for layer in router_logits:
        weights = layer.to(counts.device).softmax(-1)
        chosen = weights.topk(top, dim=-1).indices.flatten()
        counts = counts.index_add(0, chosen, torch.ones_like(chosen, dtype=dtype))
        sums = sums + weights.to(dtype).sum(0)
        rows += len(weights)
    return counts, sums, rows


def _tolerance(logits: Tensor) -> float:
    """Relative tolerance between two means over the same logits; a model may compute in their dtype."""
    return 1e-5 if logits.dtype.itemsize >= 4 else 1e-2


def _untouched(copy: Tensor, ours: Tensor) -> bool:
    """Whether nobody has changed the copy in place."""
    if copy.is_inference():
        return bool(torch.equal(copy.nan_to_num(), ours.nan_to_num()))
    return copy._version == 0


def _nothing(value: Any) -> bool:
    """Outputs that stand for none, such as attentions (None, None)."""
    return isinstance(value, tuple) and all(x is None for x in value)


def _no_tokens(value: Any) -> Any:
    """Per-token outputs [B, 1, ...], of which no token is left; router logits are [1, experts]."""
    if isinstance(value, tuple):
        return tuple(_no_tokens(x) for x in value)
    return value[:0] if value.dim() == 2 else value[:, :0]


def _empty_cache(cache: Any) -> None:
    for layer in getattr(cache, "layers", ()):
        if isinstance(getattr(layer, "keys", None), Tensor):
            layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
