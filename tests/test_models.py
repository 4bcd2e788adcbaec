"""Which models are right on plans: what is refused by name, and what must not be refused.

The families of `model_families.py` run under the marker `models`; these tests take the reported cases, and
others of their kind, on one rank in this process.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import transformers as hf
from model_families import (
    DOCS,
    FAMILIES,
    GRADIENTS,
    HEAD,
    LOGITS,
    PAGE,
    SINCE_5,
    SIZES,
    Stock,
    error_of,
    find,
    known,
    make,
    on_ranks,
    output,
    page_section,
    sections,
    stock,
    token_ids,
    without_figures,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import masking_utils

import tasp_core as tasp
from tasp_core.integrations import models
from tasp_core.integrations.fsdp import shard_parameters
from tasp_core.integrations.inputs import shard_inputs
from tasp_core.integrations.models import NAME, Mask, asked, prove, read_mask
from tasp_core.integrations.transformers import sequence_parallel

hf.logging.set_verbosity_error()


def present(*names):
    """Those of these families that the installed transformers has."""
    return [name for name in names if name in known()]


def llama(kind="Llama", head="ForCausalLM", **options):
    torch.manual_seed(0)
    return getattr(hf, kind + head)(getattr(hf, f"{kind}Config")(**{**SIZES, **options}))


def run(net, docs=DOCS, **inputs):
    """The model's output on one rank."""
    with sequence_parallel(net, tasp.plan(docs, 1)):
        return net(**{"input_ids": token_ids(), **inputs})


# ---- all families


@pytest.mark.models
@pytest.mark.timeout(900)
def test_every_family_is_right_or_refused_and_the_page_says_so():
    found = find(known())
    wrong = {
        name: rows for name, rows in found.items() if {r.verdict for r in rows.values()} & {"wrong"}
    }
    assert not wrong
    assert sum(all(r.verdict == "right" for r in rows.values()) for rows in found.values()) >= 45
    pages = sections(PAGE.read_text())
    if hf.__version__ in pages:
        written, now = without_figures(pages[hf.__version__]), without_figures(page_section(found))
        assert written == now, "docs/models.md is not what is found: python -m tests.model_families"


RIGHT = ["Llama", "Mistral", "Gemma3", "DeepseekV3"]


@pytest.mark.parametrize("name", RIGHT + ["Roberta", "ModernBert"] * SINCE_5)
def test_right_families(name):
    for answer in tasp.launch(on_ranks, 2, 2, {name: stock(name)}):
        assert answer[name][0] <= LOGITS
        assert answer[name][1] <= GRADIENTS


def test_wrong_families_would_be_seen():
    wanted = Stock.of("Llama", torch.float64)
    changed = Stock(wanted.dtype, wanted.output * 1.001, wanted.gradients)
    (answer,) = tasp.launch(on_ranks, 1, 1, {"Llama": changed})
    assert answer["Llama"][0] > LOGITS
    gradients = [wanted.gradients[0] * 1.01, *wanted.gradients[1:]]
    (answer,) = tasp.launch(
        on_ranks, 1, 1, {"Llama": Stock(wanted.dtype, wanted.output, gradients)}
    )
    assert answer["Llama"][1] > GRADIENTS


# ---- layers that mix tokens outside attention

MIXERS = {
    "Qwen3Next": "layer 0's Qwen3NextGatedDeltaNet",
    "Qwen3_5": "layer 0's Qwen3_5GatedDeltaNet",
    "NemotronH": "layer 0's NemotronHMamba2Mixer",
    "GraniteMoeHybrid": "layer 0's GraniteMoeHybridMambaLayer",
    "Bamba": "layer 0's BambaMixer",
    "Jamba": "layer 0's JambaMambaMixer",
    "FalconH1": "layer 0's FalconH1Mixer",
    "Lfm2": "layer 0's Lfm2ShortConv",
    "RecurrentGemma": "layer 0's RecurrentGemmaRecurrentBlock",
    "MiniMax": "layer 0's MiniMaxLightningAttention",
    "Mamba": "layer 0's MambaMixer",
    "Mamba2": "layer 0's Mamba2Mixer",
    "KimiLinear": "layer 0's KimiLinearDeltaAttention",
    "FNet": "layer 0's FNetFourierTransform",
    "Zaya": "layer 0's ZayaAttention",
}


@pytest.mark.parametrize("name", present(*MIXERS))
def test_layers_that_mix_tokens_are_refused_by_name(name):
    docs = tasp.Documents.of(DOCS.lengths, causal=FAMILIES[name].causal)
    message = (
        MIXERS[name] + r" \(.*\) mixes tokens outside attention"
        if SINCE_5
        else "run this model without"
    )
    with pytest.raises(tasp.PlanError, match=message):
        run(make(name, torch.float32), docs)


class Shift(nn.Module):
    """Adds a little of the token before, as short convolutions do."""

    def __init__(self, inner, amount):
        super().__init__()
        self.context_plan, self.amount = inner, amount

    def forward(self, x):
        return self.context_plan(x + self.amount * x.roll(1, 1))


class OverTokens(Shift):
    """A norm whose scale comes from all tokens of the row."""

    def forward(self, x):
        return self.context_plan(x) * (1 + self.amount * x.norm())


@pytest.mark.parametrize("kind", [Shift, OverTokens])
@pytest.mark.parametrize("amount", [0.1, 1e-12])
def test_a_trace_of_another_token_is_found(kind, amount):
    net = llama()
    net.model.layers[1].mlp = kind(net.model.layers[1].mlp, amount)
    with pytest.raises(
        tasp.PlanError, match=rf"layer 1's {kind.__name__} \(model.layers.1.mlp\) mixes"
    ):
        run(net)


def test_kinds_of_layers_without_a_proof():
    """By shard_inputs alone, the configuration is what an attention layer knows of its model."""
    for name in present("Qwen3Next", "Lfm2", "MiniMax"):
        net = make(name, torch.float32)
        net.set_attn_implementation(NAME)
        with pytest.raises(
            tasp.PlanError, match=r"layer 0 is '(linear_attention|conv)'|computes with its"
        ):
            net(**shard_inputs({"input_ids": token_ids()}, tasp.plan(DOCS, 1)))


# ---- masks


def test_masks_are_read_off_transformers_own_functions():
    m = masking_utils
    zero = torch.zeros(1, dtype=torch.long)
    packed = m.packed_sequence_mask_function(zero[None])
    cases = [
        (m.causal_mask_function, Mask(True)),
        (m.sliding_window_causal_mask_function(5), Mask(True, 5)),
        (m.chunked_causal_mask_function(6, zero), Mask(True, None, 6)),
        (
            m.and_masks(m.and_masks(m.causal_mask_function, packed), m.sliding_window_overlay(3)),
            Mask(True, 3),
        ),
        (m.add_offsets_to_mask_function(m.causal_mask_function, 1, 1), Mask(True)),
    ]
    if SINCE_5:
        inner = m.sliding_window_causal_mask_function(5)
        cases += [
            (m.bidirectional_mask_function, Mask()),
            (m.sliding_window_bidirectional_mask_function(4), Mask(False, 5)),
            (
                m.and_masks(m.remap_positions_for_packed_sequence(inner, zero[None]), packed),
                Mask(True, 5),
            ),
        ]
    for function, wanted in cases:
        found = read_mask(function)
        assert (found.causal, found.window, found.chunk) == (
            wanted.causal,
            wanted.window,
            wanted.chunk,
        )
        assert found.problem is None

    def prefix(batch, head, q, k):
        return k < 4

    def inner_mask(batch, head, q, k):  # the name of transformers' own, but not its code
        return k < 4

    for function, problem in [
        (m.or_masks(m.causal_mask_function, prefix), "union of masks"),
        (m.and_masks(m.causal_mask_function, prefix), "a mask function of its own .*prefix"),
        (inner_mask, "a mask function of its own .*inner_mask"),
        (m.and_masks(m.causal_mask_function, m.or_masks(packed, prefix)), "union of masks"),
        (m.padding_mask_function(zero[None] > 0), "padding_mask_function"),
        (m.sliding_window_overlay(4), "on one side"),
    ]:
        assert re.search(problem, read_mask(function).problem)


def test_a_mask_of_the_model_s_own_making_is_refused():
    """By shard_inputs alone: what reaches an attention layer."""
    net, ids = llama(), token_ids()
    net.set_attn_implementation(NAME)
    given = shard_inputs({"input_ids": ids}, tasp.plan(DOCS, 1))
    T = ids.shape[1]
    for mask in (torch.zeros(1, 1, T, T), torch.ones(1, 1, T, T, dtype=torch.bool).tril()):
        with pytest.raises(
            tasp.PlanError, match=r"mask of the model's own making \((float32|bool) \[1, 1, 50"
        ):
            net(**given, attention_mask=mask)
    with pytest.raises(tasp.PlanError, match="a mask that hides padding"):
        net(**given, attention_mask=(torch.arange(T) < 40)[None])
    windowed = llama(
        "Qwen3", **HEAD, use_sliding_window=True, sliding_window=8, max_window_layers=1
    )
    windowed.set_attn_implementation(NAME)
    mask = torch.zeros(1, 1, T, T)
    with pytest.raises(tasp.PlanError, match="mask of the model's own making"):
        windowed(**given, attention_mask={"full_attention": mask, "sliding_attention": mask})


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda mask: mask[:, :, :4], "getitem"),
        (lambda mask: mask + 1, "add"),
        (lambda mask: torch.ones(1) * mask, "torch.mul"),
        (lambda mask: torch.where(mask, 0.0, 1.0), "torch.where"),
        (lambda mask: mask == 0, "eq"),
        (lambda mask: mask.to(torch.float32), "to"),
    ],
)
def test_a_model_that_computes_with_its_mask_is_refused(use, name):
    with pytest.raises(tasp.PlanError, match=rf"computes with its attention mask \({name}\)"):
        use(Mask())


def test_unions_of_masks_are_refused_by_the_layer_that_asks():
    config = hf.Gemma3TextConfig(**{**SIZES, **HEAD, "use_bidirectional_attention": True})
    torch.manual_seed(0)
    full = tasp.Documents.of(DOCS.lengths, causal=False)
    with pytest.raises(
        tasp.PlanError, match=r"attention layer 0 asks for (a union of masks|a mask function)"
    ):
        run(hf.Gemma3TextModel(config), full)


def test_chunks_are_right_as_long_as_they_hide_nothing():
    for chunk, longest in ((29, 29), (64, 29)):
        net = make("Llama4, chunks of 32", torch.float64)
        net.config.attention_chunk_size = chunk
        wanted = Stock.of("Llama4, chunks of 32", torch.float64).output
        assert longest == DOCS.lengths.max()
        assert error_of(output(run(net)).detach(), wanted) <= LOGITS
    for chunk in (8, 28):
        net = make("Llama4, chunks of 32", torch.float64)
        net.config.attention_chunk_size = chunk
        with pytest.raises(
            tasp.PlanError, match=f"chunks of {chunk} tokens and the longest document has 29"
        ):
            run(net)


def test_the_mask_s_window_counts_and_a_keyword_must_agree():
    """The eager implementation reads the mask, flash attention the keyword."""
    net = llama("Mistral", sliding_window=8)
    wanted = output(run(net))
    for layer in net.model.layers:
        layer.self_attn.config.sliding_window = 8
    calls = []
    real = models.asked

    def without_keyword(*args, sliding_window=None, **keywords):
        calls.append(sliding_window)
        return real(*args, **keywords)

    def another_keyword(*args, sliding_window=None, **keywords):
        return real(*args, sliding_window=4, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasp_core.integrations.transformers.asked", without_keyword)
        torch.testing.assert_close(output(run(net)), wanted)
        assert set(calls) == {8}
        patch.setattr("tasp_core.integrations.transformers.asked", another_keyword)
        with pytest.raises(tasp.PlanError, match="window 4 by its keyword and 8 by its mask"):
            run(net)


# ---- keywords


SINKS = {"GptOss": "s_aux", "Gemma2": "softcap", "VaultGemma": "softcap", "MiMoV2Flash": "s_aux"}


@pytest.mark.parametrize("name", present(*SINKS))
def test_keywords_of_layers_that_no_plan_has(name):
    with pytest.raises(
        tasp.PlanError, match=f"attention layer 0 asks for {SINKS[name]}, which no plan"
    ):
        run(make(name, torch.float32))


@pytest.mark.parametrize("change", ["sink", "cap"])
def test_what_layers_do_without_a_word(change, monkeypatch):
    """A stock layer that reads its sinks or caps off an attribute, not off a keyword."""

    def eager(module, query, key, value, attention_mask, scaling, **_):
        k, v = (x.repeat_interleave(2, dim=1) for x in (key, value))
        scores = query @ k.transpose(-1, -2) * scaling
        if change == "cap":
            scores = 0.01 * torch.tanh(scores / 0.01)
        scores = scores + attention_mask
        if change == "sink":
            scores = torch.nn.functional.pad(scores, (1, 0))
        weights = scores.softmax(-1)[..., -k.shape[2] :]
        return (weights @ v).transpose(1, 2).contiguous(), None

    monkeypatch.setattr("transformers.models.llama.modeling_llama.eager_attention_forward", eager)
    net = make("Llama", torch.float32)
    net.set_attn_implementation("eager")
    with pytest.raises(tasp.PlanError, match="neither their mask nor their keywords tell"):
        run(net)


def test_outputs_that_depend_on_more():
    net = llama()
    net.lm_head.register_forward_hook(
        lambda _, __, out: out * (1 + torch.arange(out.shape[1]))[:, None]
    )
    with pytest.raises(tasp.PlanError, match="its outputs depend on more than each token"):
        run(net)


@pytest.mark.parametrize("keyword", ["head_mask", "sinks", "bias", "alibi"])
def test_keywords_that_nobody_reads(keyword):
    """They reach every attention layer, where any might have meant something; inputs and layers refuse."""
    given = {keyword: torch.zeros(1, DOCS.total)}
    with pytest.raises(tasp.PlanError, match=f"{keyword} = a tensor .* does not know this input"):
        run(llama(), **given)
    net, docs = llama(), tasp.Documents.of(DOCS.lengths)
    x = torch.zeros(1, 2, 3, 8)
    message = f"attention layer 0 asks for {keyword}, which no plan has"
    with pytest.raises(tasp.PlanError, match=message):
        asked(net.model.layers[0].self_attn, x, x, None, docs, **given)
    assert run(llama(), **{keyword: None}).logits.isfinite().all()


def test_attention_weights_are_not_promised():
    with pytest.raises(tasp.PlanError, match="output_attentions"):
        run(llama(), output_attentions=True)


# ---- positions


@pytest.mark.skipif(not SINCE_5, reason="Roberta does not use AttentionInterface before 5.0")
def test_positions_from_the_padding_token_on():
    """Roberta counts from 2; so do its positions here, and given ones that count from 0 are refused."""
    net = make("Roberta", torch.float64)
    docs = tasp.Documents.of(DOCS.lengths, causal=False)
    wanted = Stock.of("Roberta", torch.float64).output
    assert error_of(output(run(net, docs)).detach(), wanted) <= LOGITS
    positions = torch.from_numpy(DOCS.positions())[None]
    with pytest.raises(tasp.PlanError, match="RobertaForMaskedLM counts positions from 2 on"):
        run(net, docs, position_ids=positions)
    padded = token_ids().index_fill(1, torch.tensor([49]), 1)
    with pytest.raises(tasp.PlanError, match="does not count padding, and the row has token 1"):
        run(net, docs, input_ids=padded)
    cu = torch.from_numpy(DOCS.cu_seqlens.copy())
    found = run(net, docs, position_ids=positions + 2, cu_seq_lens_q=cu)
    assert error_of(output(found).detach(), wanted) <= LOGITS


class Counting(nn.Module):
    """Positions counted by where tokens lie, whatever position_ids say."""

    def __init__(self, inner):
        super().__init__()
        self.context_plan = inner

    def forward(self, x, position_ids):
        own = torch.arange(x.shape[1])[None]
        return self.context_plan(x, own)


def test_positions_that_are_not_those_of_position_ids():
    net = llama()
    net.model.rotary_emb = Counting(net.model.rotary_emb)
    with pytest.raises(tasp.PlanError, match="does not read position_ids"):
        run(net)
    table = nn.Embedding(64, 32)
    net = llama()
    net.model.embed_tokens.register_forward_hook(
        lambda _, __, out: out + table(torch.arange(out.shape[1]))
    )
    with pytest.raises(tasp.PlanError, match=r"does not read position_ids|place in the row"):
        run(net)
    for name in present("Bart, decoder", "MBart, decoder"):
        causal = FAMILIES[name].causal
        with pytest.raises(
            tasp.PlanError, match=r"position_ids|does not count positions|keyword arguments|mask"
        ):
            run(make(name, torch.float32), tasp.Documents.of(DOCS.lengths, causal=causal))


@pytest.mark.parametrize(
    ("family", "kind", "factors"),
    [
        ("Llama", "dynamic", {"factor": 2.0}),
        ("Qwen2", "dynamic", {"factor": 4.0}),
        ("Phi3", "longrope", {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4}),
    ],
)
def test_rotary_positions_that_change_with_the_longest_document(family, kind, factors):
    """Right up to the length from which on they change, which is 20 tokens here."""
    limits = {"max_position_embeddings": 20}
    if family == "Phi3":
        limits = {"max_position_embeddings": 64, "original_max_position_embeddings": 20}
    # older versions want `type` alone for Phi3
    kinds = {"rope_type": kind} if SINCE_5 or family != "Phi3" else {"type": kind}

    def fresh():  # the stock model keeps what it computed for a long document
        return llama(family, **limits, rope_scaling={**kinds, **factors})

    message = f"'{kind}' rotary positions: beyond 20 tokens .* the longest here has 29"
    net = fresh()
    with pytest.raises(tasp.PlanError, match=message):
        run(net)
    short = tasp.Documents.of([20, 20, 10])
    wanted = [fresh()(input_ids=x).logits for x in token_ids().split([20, 20, 10], 1)]
    torch.testing.assert_close(run(net, short).logits, torch.cat(wanted, 1), rtol=1e-4, atol=1e-6)


def test_queries_that_are_scaled_by_their_place():
    """Llama 4 counts places in what a rank holds; right as long as none is far enough to be scaled."""
    name = "Llama4, scales from 40 on"
    net = make(name, torch.float64)
    with pytest.raises(tasp.PlanError, match=r"from token 40 on .* rows have 50"):
        run(net)
    for scale in (50, 51):
        net.config.floor_scale = scale
        for layer in net.model.layers:
            layer.self_attn.floor_scale = scale
        if scale == 50:
            with pytest.raises(tasp.PlanError, match="from token 50 on"):
                run(net)
    assert error_of(output(run(net)).detach(), Stock.of(name, torch.float64).output) <= LOGITS


# ---- outputs, calls, and what the proof leaves behind


def test_outputs_that_are_not_per_token():
    full = tasp.Documents.of(DOCS.lengths, causal=False)
    for net, docs in [
        (llama("Llama", "ForSequenceClassification"), DOCS),
        (llama("Qwen2", "ForSequenceClassification"), DOCS),
        *([(make("Bert, pooled", torch.float32), full)] if SINCE_5 else []),
    ]:
        with pytest.raises(tasp.PlanError, match="is not per token"):
            run(net, docs)
    for labels in (2, 11, 12):  # also as many as tokens in the proof
        net = llama("Llama", "ForTokenClassification", num_labels=labels)
        assert run(net).logits.shape == (1, DOCS.total, labels)


def test_calls_of_attention_are_counted():
    net = llama()
    net.model.layers = net.model.layers[:1]  # the configuration says two
    with pytest.raises(tasp.PlanError, match="has 2 attention layers and called attention 1 times"):
        run(net)
    net = llama()
    message = "called attention 1 times in a forward and 2 times in its proof"
    with sequence_parallel(net, tasp.plan(DOCS, 1)):
        net(input_ids=token_ids())
        net.model.layers = net.model.layers[:1]  # after the proof
        with pytest.raises(tasp.PlanError, match=message):
            net(input_ids=token_ids())
    net = llama(layerdrop=0.1).train()
    with pytest.raises(tasp.PlanError, match="skips layers at random in training"):
        run(net)


def test_models_that_cannot_be_proved():
    for name, message in [
        ("T5", "encoder and a decoder|AttentionInterface"),
        ("Bart", "encoder and a decoder"),
        ("ViT", "takes pixel_values, not a row of tokens"),
        ("Bloom", "does not use transformers' AttentionInterface"),
        ("Nemotron", "does not hand keyword arguments on|AttentionInterface"),
    ]:
        causal = FAMILIES[name].causal
        with pytest.raises(tasp.PlanError, match=message):
            run(make(name, torch.float32), tasp.Documents.of(DOCS.lengths, causal=causal))


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw", "input_features"])
def test_images_and_sounds_are_refused(name):
    with pytest.raises(tasp.PlanError, match=f"{name} = a tensor .* does not know this input"):
        run(llama(), **{name: torch.zeros(1, 3, 4, 4)})
    assert run(llama(), **{name: None}).logits.isfinite().all()


def test_the_proof_is_made_once_and_leaves_the_model_as_it_was():
    net = llama().train()
    net.model.layers[0].eval()
    modes = [module.training for module in net.modules()]
    before, forwards = net.config._attn_implementation, []
    hook = net.model.embed_tokens.register_forward_hook(lambda *_: forwards.append(1))
    state = torch.get_rng_state()
    prove(net)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in net.modules()] == modes
    assert net.config._attn_implementation == before
    assert all(w.grad is None for w in net.parameters())
    assert all(len(m._forward_hooks) == (m is net.model.embed_tokens) for m in net.modules())
    proved = len(forwards)
    assert 0 < proved <= 5
    run(net)
    run(net)
    assert len(forwards) == proved + 2
    hook.remove()


def test_a_refused_model_is_refused_again():
    net = llama("Llama", "ForSequenceClassification")
    for _ in range(2):
        with pytest.raises(tasp.PlanError, match="is not per token"):
            run(net)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*RIGHT, "Qwen3Moe"] + ["Roberta"] * SINCE_5)
def test_low_precision_is_proved_too(name, dtype):
    assert prove(make(name, dtype)).calls == 2


def test_low_precision_is_refused_too():
    net = llama().to(torch.bfloat16)
    net.model.rotary_emb = Counting(net.model.rotary_emb)
    with pytest.raises(tasp.PlanError, match="position_ids"):
        prove(net)


def sharded(rank, group, p, ids, enter_first):
    """Logits of a model whose parameters FSDP2 shards, before or after sequence_parallel is entered."""
    mesh, net = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",)), llama()
    if not enter_first:
        shard_parameters(net, net.model.layers, mesh)
    with sequence_parallel(net, p, group):
        if enter_first:
            shard_parameters(net, net.model.layers, mesh)
        for _ in range(2):  # the second after a backward pass
            out = net(input_ids=ids)
            out.logits.square().sum().backward()
    return tasp.gather(out.logits.detach(), p, group, dim=1)


@pytest.mark.parametrize("enter_first", [True, False])
def test_the_proof_of_a_model_with_sharded_parameters(enter_first):
    cuts = [(a, b) for a, b in itertools.pairwise(DOCS.cu_seqlens.tolist())]
    wanted = torch.cat([llama()(input_ids=token_ids()[:, a:b]).logits for a, b in cuts], 1)
    for found in tasp.launch(sharded, 2, tasp.plan(DOCS, 2), token_ids(), enter_first):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_model_that_was_changed_is_proved_again():
    net = llama()
    assert run(net).logits.isfinite().all()

    class Sums(nn.Module):
        def forward(self, x):
            return x.cumsum(1)

    net.model.layers[0].mlp = Sums()
    with pytest.raises(tasp.PlanError, match=r"layer 0's Sums .* mixes tokens outside attention"):
        run(net)


def test_a_refused_model_keeps_its_own_attention():
    net = llama()
    before, net.config.return_dict = net.config._attn_implementation, False
    with pytest.raises(tasp.PlanError, match="returns tuples"):
        run(net)
    assert net.config._attn_implementation == before
