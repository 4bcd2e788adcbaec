"""Which transformers models are right on a plan: what a layer asks for, and a proof at the first use.

    proof = prove(model)                     # sequence_parallel does it; by hand only beside shard_inputs

A rank holds some tokens of a row, in any order, and only attention sees the other ranks' tokens. A model
is right on a plan if only attention mixes tokens, if each token knows its position by position_ids alone,
and if attention is fully described by q, k, v and a mask of documents. `prove` tests this in four forwards
of a dozen tokens. `asked` reads what one attention layer asks for, in every forward. Both compare with
lists of what is known to be right and refuse everything else by name. Not covered: inputs, labels, losses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils

from ..errors import PlanError
from ..sequence.documents import Documents

NAME = "tasp"  # of our attention among transformers' implementations
ALONE = "run this model without sequence_parallel"
# Layer kinds of `config.layer_types`: attention over tokens, and layers that work on each token alone.
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")
PER_TOKEN = ("mlp", "moe", "dense", "sparse")
# Keywords of attention layers that do not change what attention computes, or say what the plan says.
HARMLESS = (
    *("cu_seq_lens_k", "cu_seq_lens_q", "cu_seqlens", "max_length_k", "max_length_q", "max_seqlen"),
    *("labels", "num_items_in_batch", "shift_labels", "position_embeddings", "position_ids"),
    *("cache_position", "deterministic", "is_causal", "use_cache", "return_dict"),
    *("output_hidden_states", "output_router_logits"),
)


# ---- masks


class NoPlanError(PlanError):
    """An attention layer that did not get the keyword `tasp`."""


class MaskUsedError(PlanError, AttributeError):
    """A model computes with its attention mask, so that attention would see something else."""


@dataclass(frozen=True, eq=False)
class Mask:
    """What a model asks to be visible; it takes the place of other implementations' mask tensor.

    A model may only pass it on to its attention layers. `problem` names what no plan has.
    """

    causal: bool = False
    window: int | None = None  # tokens; as in Documents
    chunk: int | None = None  # tokens see those of their own chunk only
    problem: str | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MaskUsedError(
            f"the model computes with its attention mask ({name}): it makes a mask of its own, "
            f"which no plan has; {ALONE}"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MaskUsedError(
            f"the model computes with its attention mask (torch.{func.__name__}): it makes a mask of "
            f"its own, which no plan has; {ALONE}"
        )


def _used(operator: str) -> Callable[..., Any]:
    def method(self: Mask, *_: Any) -> Any:
        return getattr(self, operator)  # raises

    return method


OPERATORS = (
    "getitem len iter add radd sub rsub mul rmul and rand or ror invert neg eq ne lt le gt ge"
)
for _operator in OPERATORS.split():
    setattr(Mask, f"__{_operator}__", _used(_operator))


def _blocks() -> dict[Any, str]:
    """Code of the functions that transformers' mask factories return -> the factory's name."""
    factories = {}
    for name in dir(masking_utils):
        factory = getattr(masking_utils, name)
        for code in getattr(getattr(factory, "__code__", None), "co_consts", ()):
            if inspect.iscode(code) and code.co_name in ("inner_mask", "and_mask", "or_mask"):
                factories[code] = name
    return factories


BLOCKS = _blocks()


def read_mask(function: Callable[..., Any]) -> Mask:
    """The mask that a function made of transformers' own building blocks describes.

    >>> read_mask(masking_utils.sliding_window_causal_mask_function(8))
    Mask(causal=True, window=8, chunk=None, problem=None)
    >>> union = masking_utils.or_masks(masking_utils.causal_mask_function, lambda *_: True)
    >>> read_mask(union).problem
    'a union of masks (or_masks)'
    """
    parts = list(_parts(function))
    causal = any(p.causal for p in parts)
    problem = next((p.problem for p in parts if p.problem), None)
    windows = [p.window for p in parts if p.window is not None]
    chunks = [p.chunk for p in parts if p.chunk is not None]
    if not causal and any(window <= 0 for window in windows):
        problem = problem or "a window on one side of a token, without a causal mask"
    windows = [abs(window) for window in windows]
    return Mask(causal, min(windows, default=None), min(chunks, default=None), problem)


def _parts(function: Any) -> Iterator[Mask]:
    """The masks whose intersection this is; a window that looks back only counts below zero."""
    if function is masking_utils.causal_mask_function:
        yield Mask(causal=True)
        return
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        yield Mask()
        return
    block = BLOCKS.get(getattr(function, "__code__", None))
    closure = dict(inspect.getclosurevars(function).nonlocals) if block else {}
    if block == "and_masks":
        for part in closure["mask_functions"]:
            yield from _parts(part)
    elif block in ("remap_positions_for_packed_sequence", "add_offsets_to_mask_function"):
        yield from _parts(closure["mask_function"])
    elif block == "packed_sequence_mask_function":
        yield Mask()  # the plan has the documents; this sees only where this rank's tokens break off
    elif block == "sliding_window_overlay":
        yield Mask(window=-int(closure["sliding_window"]))
    elif block == "sliding_window_bidirectional_overlay":
        yield Mask(window=int(closure["sliding_window"]) + 1)  # this far on either side, and itself
    elif block in ("chunked_overlay", "_legacy_chunked_overlay"):
        yield Mask(chunk=int(closure["chunk_size"]))
    elif block == "or_masks":
        yield Mask(problem="a union of masks (or_masks)")
    else:
        name = block or getattr(function, "__qualname__", repr(function))
        yield Mask(problem=f"a mask function of its own ({name})")


def mask_of(
    *_: Any,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **__: Any,
) -> Mask:
    """transformers' mask interface: the mask described for attention layers, not as a tensor."""
    if attention_mask is not None and not bool(attention_mask.all()):
        return Mask(problem="a mask that hides padding")
    return read_mask(mask_function)


# ---- one attention layer


@dataclass(frozen=True)
class Asked:
    """What an attention layer asks for, of what a plan can have."""

    layer: str
    causal: bool
    window: int | None


def _hiding(window: int | None, docs: Documents) -> int | None:
    return None if window is None or window >= docs.lengths.max(initial=0) else window


def asked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    docs: Documents,
    *,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **keywords: Any,
) -> Asked:
    """What a layer asks for by its mask, its keywords and its attributes.

    Args:
        query, key: [B, H, t, D].
        mask: what `mask_of` returned, or None where the model makes no mask.
        docs: the documents that attention is to see.
        keywords: all others that the layer gives to its attention function.

    Raises:
        PlanError: something that no plan has.
    """
    layer = f"attention layer {_index(module)}"
    if dropout:
        raise PlanError(f"{layer} asks for dropout {dropout}, which no plan has; set dropout to 0")
    if mask is not None and not isinstance(mask, Mask):
        raise PlanError(
            f"{layer} asks for an attention mask of the model's own making ({_described(mask)}), which "
            "no plan has; tell documents by position_ids or cu_seq_lens_q and leave attention_mask "
            f"out; where the model makes the mask itself, {ALONE}"
        )
    unknown = [
        k for k, v in keywords.items() if k not in HARMLESS and v is not None and v is not False
    ]
    if unknown:
        raise PlanError(
            f"{layer} asks for {', '.join(sorted(unknown))}, which no plan has; leave it out if it is an "
            f"input of yours; else {ALONE}"
        )
    if query.shape[2] != key.shape[2]:
        raise PlanError(
            f"{layer} has {query.shape[2]} queries and {key.shape[2]} keys: cross attention, or "
            "decoding with a cache; a plan is for a row that attends to itself"
        )
    causal = keywords.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    told = _hiding(sliding_window, docs)
    if mask is None:
        return Asked(layer, bool(causal), told)
    if mask.problem:
        raise PlanError(f"{layer} asks for {mask.problem}, which no plan has; {ALONE}")
    longest = int(docs.lengths.max(initial=0))
    if mask.chunk is not None and mask.chunk < longest:
        raise PlanError(
            f"{layer} attends in chunks of {mask.chunk} tokens and the longest document has {longest}: "
            f"no plan has chunks; {ALONE}, or give documents of at most {mask.chunk} tokens"
        )
    if sliding_window is not None and told != _hiding(mask.window, docs):
        raise PlanError(
            f"{layer} has window {sliding_window} by its keyword and {mask.window} by its mask; "
            f"attention implementations differ on it; {ALONE}"
        )
    return Asked(layer, mask.causal, _hiding(mask.window, docs))


def _index(module: nn.Module) -> str:
    index = getattr(module, "layer_idx", None)
    return "?" if index is None else str(index)


def _described(mask: Any) -> str:
    if isinstance(mask, Tensor):
        return f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}"
    return type(mask).__name__


def check_lengths(config: Any, docs: Documents) -> None:
    """Refuse what depends on the sequence length, since a rank sees another length than one process.

    Raises:
        PlanError: a configuration of this kind, with documents so long that it makes a difference.
    """
    longest = int(docs.lengths.max(initial=0))
    for kind, limit in _ropes(config):
        if longest > limit:
            raise PlanError(
                f"the model has {kind!r} rotary positions: beyond {limit} tokens they change for all "
                f"tokens by the longest document that a rank holds, and the longest here has {longest}; "
                f"{ALONE}, one document per row, or give documents of at most {limit} tokens"
            )
    scale = getattr(config, "floor_scale", 0)
    if scale and getattr(config, "attn_temperature_tuning", False) and docs.total >= scale:
        raise PlanError(
            f"the model scales queries by their place among a rank's tokens, from token {int(scale)} on "
            f"(attn_temperature_tuning), and rows have {docs.total}; {ALONE}, one document per row, or "
            "give shorter rows"
        )


def check_kinds(config: Any, model: str = "the model") -> None:
    """Refuse models whose configuration names layers that are not known to work on each token alone.

    Raises:
        PlanError: the first such layer.
    """
    for name in ("layer_types", "layers_block_type"):
        for i, kind in enumerate(getattr(config, name, None) or ()):
            if kind not in ATTENTION + PER_TOKEN:
                raise PlanError(
                    f"{model}'s layer {i} is {kind!r}, not attention of a known kind "
                    f"({', '.join(ATTENTION)}); {ALONE}"
                )


def _ropes(config: Any) -> Iterator[tuple[str, int]]:
    """Rotary embeddings that depend on the length of the sequence, and up to which length they do not."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None)
        if not isinstance(parameters, Mapping):
            continue
        for rope in (parameters, *(x for x in parameters.values() if isinstance(x, Mapping))):
            kind = rope.get("rope_type", rope.get("type"))
            if kind is not None and ("dynamic" in kind or kind == "longrope"):
                limit = config.max_position_embeddings
                if kind == "longrope":
                    original = getattr(config, "original_max_position_embeddings", None)
                    limit = rope.get("original_max_position_embeddings") or original or limit
                yield kind, int(limit)


# ---- the proof

TOKENS, POISONED = 11, 4  # a prime, so that no other axis of a tensor is as long
LENGTH = 6  # tokens in each of two documents
ORDER = [(5 * i + 2) % (2 * LENGTH) for i in range(2 * LENGTH)]  # where a rank might hold them


@dataclass(frozen=True)
class Proof:
    """What is known of a model that was proved."""

    model: str  # its class
    calls: int  # of attention in a forward

    def check_calls(self, calls: list[str]) -> None:
        """Every forward must attend as often as the one that was proved.

        Raises:
            PlanError: it does not.
        """
        if len(calls) != self.calls:
            raise PlanError(
                f"{self.model} called attention {len(calls)} times in a forward and {self.calls} times in "
                "its proof: layers were skipped, or attend in another way; switch that off"
            )


@dataclass
class Probe:
    """The proof's attention, in the place of a plan: computed here from the layer's own q, k, v."""

    docs: Documents
    order: Tensor | None  # token of the row at each place; None: each token attends to itself only
    calls: list[str] = field(default_factory=list)  # layers that attended
    modules: list[nn.Module] = field(default_factory=list)
    qkv: list[Tensor] = field(default_factory=list)  # their q, k and v, [B, t, H, D]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ask: Asked,
        scaling: float | None,
    ) -> Tensor:
        """[B, H, t, D] in, [B, t, H, D] out."""
        self.calls.append(ask.layer)
        self.modules.append(module)
        self.qkv += [x.transpose(1, 2) for x in (query, key, value)]
        groups = query.shape[1] // key.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        if self.order is None:
            return v.transpose(1, 2).contiguous()
        at = self.order.to(query.device)
        ends = torch.from_numpy(self.docs.cu_seqlens[1:].copy()).to(at.device)
        document = torch.bucketize(at, ends, right=True)
        seen = document[:, None] == document[None, :]
        back = at[:, None] - at[None, :]
        if ask.causal:
            seen &= back >= 0
        if ask.window is not None:
            seen &= back.abs() < ask.window
        dtype = torch.promote_types(query.dtype, torch.float32)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = (query.to(dtype) @ k.to(dtype).transpose(-1, -2)) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return (weights @ v.to(dtype)).to(value.dtype).transpose(1, 2).contiguous()


@dataclass
class Trace:
    """What one forward computed for each token of the row: tensors [tokens, ...]."""

    outputs: list[Tensor]
    attended: list[Tensor]  # what the modules that attend returned
    qkv: list[Tensor]  # their q, k and v; none where attention was not ours


_PROVED: WeakKeyDictionary[nn.Module, tuple[Any, Proof]] = WeakKeyDictionary()


@torch.compiler.disable
def prove(
    model: PreTrainedModel, stock: str = "eager", device: torch.device | None = None
) -> Proof:
    """Hold a model against what every plan takes for granted; once for each model.

    It is proved as in evaluation: a module that mixes tokens in training alone is not seen. Weights,
    modes and random numbers stay as they are. Ranks that share it (FSDP) must all come
    here; nothing else is exchanged.

    Args:
        stock: the attention implementation to compare with.
        device: of inputs; None: that of the model's embeddings.

    Raises:
        PlanError: what the model does that a plan does not carry, by name.
    """
    _refuse_skipped_layers(model)
    if model not in _PROVED:
        _PROVED[model] = _structure(model), _Prover(model, stock, device).prove()
    return _PROVED[model][1]


def forget_changed(model: PreTrainedModel) -> None:
    """Drop a model's proof where its modules or its configuration are no longer those that were proved."""
    if model in _PROVED and _PROVED[model][0] != _structure(model):
        del _PROVED[model]


def _structure(model: PreTrainedModel) -> tuple[Any, ...]:
    """What a proof is about: kinds of modules, not weights."""
    kinds = tuple((name, type(module)) for name, module in model.named_modules())
    return kinds, str(model.config.to_dict())


def _refuse_skipped_layers(model: PreTrainedModel) -> None:
    """Layers that are dropped at random: every rank would drop others, and wait for messages."""
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if model.training and (chance := getattr(model.config, name, 0)):
            raise PlanError(
                f"{type(model).__name__} skips layers at random in training ({name} {chance}), on each "
                f"rank others; set config.{name} = 0"
            )


def first_position(model: nn.Module) -> tuple[int, int | None]:
    """The position of a document's first token, and the token that is not counted, if there is one.

    Roberta's kin count positions from the padding token's number on and leave padding tokens out.
    """
    for module in model.modules():
        makers = (f"create_position_ids_from_{x}" for x in ("input_ids", "inputs_embeds"))
        padding = getattr(module, "padding_idx", None)
        if (
            hasattr(module, "position_embeddings")
            and any(hasattr(module, name) for name in makers)
            and isinstance(padding, int)
        ):
            return padding + 1, padding
    return 0, None


class _Prover:
    """One proof of one model.

    Args:
        stock: the attention implementation to compare with; eager for all but eager and sdpa.
        device: where the proof runs; None: where the model's embeddings are.

    Attributes:
        ids: [1, 2 LENGTH] tokens for the proof, from the upper half of the vocabulary and none of them a
            special token (padding, end of sequence), which a model might treat in its own way.
        first: the position of a document's first token.
        attending: the modules that have called attention.
    """

    def __init__(self, model: PreTrainedModel, stock: str, device: torch.device | None) -> None:
        self.model: Any = model
        self.name = type(model).__name__
        self.stock = stock if stock in ("eager", "sdpa") else "eager"
        self.check_kind()
        config = model.config.get_text_config()
        self.config = config
        weight: Any = model.get_input_embeddings().weight
        self.device, self.dtype = device or weight.device, weight.dtype
        special: set[int] = set()
        for name, value in vars(config).items():
            if name.endswith("token_id") and value is not None:
                special |= set(value if isinstance(value, list | tuple) else [value])
        size = int(getattr(config, "vocab_size", weight.shape[0]))
        usual = [i for i in range(size // 2, size) if i not in special]
        self.ids = torch.tensor([list(islice(cycle(usual or [0]), 2 * LENGTH))], device=self.device)
        self.first, _ = first_position(model)
        self.attending: list[nn.Module] = []

    def check_kind(self) -> None:
        """Refuse what cannot be proved."""
        model, what = self.model, None
        parameters = inspect.signature(model.forward).parameters
        if model.config.is_encoder_decoder:
            what = "is an encoder and a decoder: two rows, and attention from one to the other"
        elif model.main_input_name != "input_ids":
            what = f"takes {model.main_input_name}, not a row of tokens"
        elif not hasattr(model.get_input_embeddings(), "weight"):
            what = "has no embedding of tokens"
        elif all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            what = "does not hand keyword arguments on, so its attention layers cannot be told the plan"
        if what:
            raise PlanError(f"{self.name} {what}; {ALONE}")

    def prove(self) -> Proof:
        with _implementation(self.model, NAME), _as_evaluated(self.model), torch.no_grad():
            probe = self.check_mixing()
            self.attending = list(dict.fromkeys(probe.modules))
            calls = self.check_calls(probe)
            self.check_numbers()
        return Proof(self.name, calls)

    # -- one forward each

    def forward(self, ids: Tensor, **inputs: Any) -> list[Tensor]:
        """Outputs of these tokens, [B, t, ...]; refuses outputs that are not per token."""
        if "use_cache" in inspect.signature(self.model.forward).parameters:
            inputs["use_cache"] = False
        try:
            out = self.model.forward(input_ids=ids, **inputs)
        except NoPlanError as error:
            raise PlanError(
                f"{self.name} does not hand keyword arguments on to its attention layers, so that they "
                f"cannot be told the plan; {ALONE}"
            ) from error
        except PlanError as error:
            raise PlanError(f"{self.name}: {error}") from error
        except (torch.OutOfMemoryError, torch.distributed.DistError):
            raise
        except Exception as error:
            raise PlanError(
                f"{self.name} cannot be proved on a row of {ids.shape[1]} tokens "
                f"({type(error).__name__}: {error}); {ALONE}"
            ) from error
        outputs = []
        for name, value in out.items() if isinstance(out, Mapping) else enumerate(out):
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() == 0:
                continue
            if value.shape[:2] != ids.shape:
                raise PlanError(
                    f"{self.name}'s output {name!r} has shape {list(value.shape)} for a row of "
                    f"{ids.shape[1]} tokens: it is not per token, and a rank has only some; take a "
                    "model without this head (BERT's kind: add_pooling_layer=False) and gather first"
                )
            outputs.append(value)
        if not outputs:
            raise PlanError(f"{self.name} returns no output per token; {ALONE}")
        return outputs

    def traced(self, ids: Tensor, probe: Probe | None = None, **inputs: Any) -> Trace:
        """One forward, and what its attention layers were given and returned."""
        attended: list[Tensor] = []

        def watch(_: nn.Module, __: Any, out: Any) -> None:
            for value in out if isinstance(out, tuple | list) else (out,):
                if isinstance(value, Tensor) and value.shape[:2] == ids.shape:
                    attended.append(value)
                    return

        handles = [module.register_forward_hook(watch) for module in self.attending]
        try:
            outputs = self.forward(ids, **inputs, **({"tasp": probe} if probe else {}))
        finally:
            for handle in handles:
                handle.remove()
        qkv = probe.qkv if probe else []
        return Trace(*([x.flatten(0, 1) for x in xs] for xs in (outputs, attended, qkv)))

    def by_document(self, implementation: str, stride: int = 0) -> Trace:
        """A document in each row of a batch, with the model's own positions or every stride-th."""
        inputs: dict[str, Any] = {}
        if stride:
            positions = torch.arange(LENGTH, device=self.device) * stride + self.first
            inputs["position_ids"] = positions.expand(2, -1)
        if implementation == NAME:
            inputs["probe"] = Probe(Documents.of([LENGTH]), torch.arange(LENGTH))
        with _implementation(self.model, implementation):
            return self.traced(self.ids.view(2, LENGTH), **inputs)

    def packed(self, order: list[int]) -> Trace:
        """Both documents in one row, its tokens in this order, as on a rank; found in row order."""
        docs, at = Documents.of([LENGTH, LENGTH]), torch.tensor(order)
        positions = torch.from_numpy(docs.positions().copy())[at][None].to(self.device) + self.first
        trace = self.traced(self.ids[:, order], Probe(docs, at), position_ids=positions)
        back = at.argsort().to(self.device)
        parts = (trace.outputs, trace.attended, trace.qkv)
        return Trace(*([x[back.to(x.device)] for x in xs] for xs in parts))

    def alone(self) -> tuple[list[Tensor], Probe]:
        """A row whose tokens attend to themselves only."""
        probe = Probe(Documents.of([1] * TOKENS), None)
        positions = torch.arange(TOKENS, device=self.device)[None] + self.first
        return self.forward(self.ids[:, :TOKENS], position_ids=positions, tasp=probe), probe

    # -- what is proved

    def check_mixing(self) -> Probe:
        """With attention to itself only, NaN in one token must stay in that token."""

        def poison(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            out = out.clone()
            out[:, POISONED] = float("nan")
            return out

        handles = [self.model.get_input_embeddings().register_forward_hook(poison)]
        try:
            outputs, probe = self.alone()
            if not any(_spread(value, 1) for value in outputs):
                return probe
            first: list[str] = []
            for path, module in self.model.named_modules():
                handles.append(module.register_forward_hook(_watch(path, first)))
            self.alone()
        finally:
            for handle in handles:
                handle.remove()
        raise PlanError(
            f"{self.mixer(first[0]) if first else self.name} mixes tokens outside attention, and neither "
            f"a rank nor a document of a packed row begins where it does; {ALONE}, one document per row"
        )

    def mixer(self, path: str) -> str:
        """The module in words: that of a layer below which tokens are mixed."""
        steps = path.split(".")
        layers = [i for i, step in enumerate(steps) if step.isdigit()]
        if not layers:
            return f"{self.name}'s {type(self.model.get_submodule(path)).__name__} ({path})"
        path = ".".join(steps[: layers[0] + 2])
        return (
            f"layer {steps[layers[0]]}'s {type(self.model.get_submodule(path)).__name__} ({path})"
        )

    def check_numbers(self) -> None:
        """Two documents in one row, out of order, must give what each gives by itself.

        Positions show in q, k and v, whatever attention makes of them; attention in what its modules
        return, however little of it comes through to the end.
        """
        own, right = self.by_document(NAME), self.by_document(self.stock)
        mixed = self.packed(ORDER)
        if not self.same(mixed.qkv, own.qkv):
            first = self.first
            if self.same(self.by_document(NAME, stride=2).qkv, own.qkv):
                why = "it does not read position_ids, and a rank would count its tokens from 0"
            elif not self.same(self.by_document(NAME, stride=1).qkv, own.qkv):
                why = f"it does not count positions {first}, {first + 1}, ... in a document"
            else:
                why = "a token's place in the row matters, not its position_ids alone"
        elif not self.same(mixed.attended, right.attended):
            why = "its attention layers do with q, k and v what neither their mask nor their keywords tell"
        elif not self.same(mixed.outputs, right.outputs):
            why = "its outputs depend on more than each token and its attention"
        else:
            return
        raise PlanError(
            f"{self.name} is not the stock model on rows of two documents: {why}; {ALONE}"
        )

    def same(self, ours: list[Tensor], right: list[Tensor]) -> bool:
        """Whether tensors agree: in every token, or, in low precision, where experts flip, in most."""
        device: str = self.device.type
        low = self.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(device)
        low = low or torch.get_float32_matmul_precision() != "highest"
        if len(ours) != len(right):
            return False
        for own, stock in zip(ours, right, strict=True):
            error = (own.double() - stock.double()).abs().flatten(1).amax(1)
            error = error / stock.double().abs().max().clamp(min=1e-30)
            worst = error.median() if low else error.max()
            if not float(worst) <= (0.1 if low else 1e-3):
                return False
        return True

    def check_calls(self, probe: Probe) -> int:
        """Every layer that attends must have come to our interface."""
        check_kinds(self.config, self.name)
        kinds = list(
            getattr(self.config, "layer_types", None)
            or getattr(self.config, "layers_block_type", None)
            or ()
        )
        layers = sum(kind in ATTENTION for kind in kinds)
        layers = (
            layers or getattr(self.config, "decoder_layers", None) or self.config.num_hidden_layers
        )
        calls = len(probe.calls)  # some layers call it twice, some models one layer many times
        if layers not in (calls, len(set(probe.calls))):
            raise PlanError(
                f"{self.name} has {layers} attention layers and called attention {calls} times; the other "
                f"layers attend in another way or not at all; {ALONE}"
            )
        return calls


def _spread(value: Tensor, axis: int) -> bool:
    """Whether tokens other than the poisoned one are not finite; they lie along this axis."""
    others = value.isfinite().movedim(axis, 0).flatten(1).all(1)
    others[POISONED] = True
    return not bool(others.all())


def _watch(path: str, first: list[str]) -> Callable[..., None]:
    """A forward hook that notes the module if the NaN spread in it before it did in any other."""

    def hook(_: nn.Module, __: Any, out: Any) -> None:
        for value in out if isinstance(out, tuple | list) else (out,):
            if first or not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            axes = [axis for axis, size in enumerate(value.shape) if size == TOKENS]
            if any(_spread(value, axis) for axis in axes):
                first.append(path)

    return hook


@contextmanager
def _implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Another attention implementation inside."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _as_evaluated(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, afterwards every module's own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
