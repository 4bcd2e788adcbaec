"""What models are given and what comes out, on packed rows over ranks: right, or refused by name.

Right is what the stock model gives in float64, document by document, gradients included.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch._dynamo  # once here, not once in every forked rank
import torch.distributed as dist
import transformers as hf
from spread import spread
from torch.nn.functional import cross_entropy
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import tasp_core as tasp
from tasp_core.integrations.inputs import documents_of, shard_inputs, signature
from tasp_core.integrations.transformers import sequence_parallel

hf.logging.set_verbosity_error()
LENGTHS = [17, 1, 22, 8]
DOCS, TOTAL = tasp.Documents.of(LENGTHS), sum(LENGTHS)
OLDER = (
    int(hf.__version__.split(".")[0]) < 5
)  # of encoders, none goes through its attention interface
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 1,
}
DECODER = {"num_key_value_heads": 2, "attention_dropout": 0.0}
ENCODER = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {
    "experts_implementation": "eager",
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
MROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}


def model(kind, **options):
    """A small model in float64, with weights that depend on its kind only."""
    torch.manual_seed(0)
    config = {
        "Mixtral": {"num_local_experts": 4, **DECODER, **EXPERTS},
        "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, **DECODER, **EXPERTS},
        "Olmoe": {"num_experts": 4, **DECODER, **EXPERTS},
        "Qwen2VLText": {**DECODER, **MROPE},
        "Bert": ENCODER,
        "Roberta": ENCODER,
        "Electra": {**ENCODER, "embedding_size": 32},
    }
    name, _, head = kind.partition("For")
    options = {**SIZES, **config.get(name, DECODER), "use_cache": False, **options}
    made = getattr(hf, f"{name}Config")(**options)
    return getattr(hf, f"{name}For{head}" if head else f"{name}Model")(made).double().train()


def token_ids(total=TOTAL, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (batch, total), generator=generator)


def positions_of(docs=DOCS):
    return torch.from_numpy(docs.positions())


def numbers(*values):
    return torch.cat([torch.full((n,), v) for n, v in zip(LENGTHS, values, strict=True)])[None]


def spans(docs):
    return [(a, b) for a, b in itertools.pairwise(docs.cu_seqlens.tolist()) if b > a]


def value(out):
    return out.logits if "logits" in out else out.last_hidden_state


def weights(x):
    """A loss for any output: a weighted sum."""
    return torch.linspace(-1, 1, x.numel(), dtype=x.dtype).sin().view_as(x)


def grads_of(net, group=None, ranks=1):
    found = {
        n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in net.named_parameters()
    }
    for grad in found.values() if ranks > 1 else ():
        dist.all_reduce(grad, group=group)
    return found


def stock(net, ids, docs, **inputs):
    """Outputs of the model as it comes, document by document; `inputs` are cut along the last dim."""
    net.set_attn_implementation("eager")
    outs = []
    for a, b in spans(docs):
        part = {k: x[..., a:b] for k, x in inputs.items()}
        outs.append(net(input_ids=ids[:, a:b], **part))
    return torch.cat([value(o) for o in outs], 1), outs


def close(found, wanted, rtol=2e-5):
    """Equal values, and gradients; rotary tables are float32 in any model."""
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol / 2)


# ---- documents that are told in another way

IMAGE = positions_of()[None].repeat(3, 1, 1)
IMAGE[0, 0, 20:26] = IMAGE[0, 0, 20]  # a picture of 2 x 3 inside the third document
IMAGE[1, 0, 20:26] = IMAGE[1, 0, 20] + torch.tensor([0, 0, 0, 1, 1, 1])
IMAGE[2, 0, 20:26] = IMAGE[2, 0, 20] + torch.tensor([0, 1, 2, 0, 1, 2])
WAYS = {  # kind of model, what it is given, positions that the stock model is given
    "numbers in the mask": ("LlamaForCausalLM", {"attention_mask": numbers(1, 2, 3, 4)}, None),
    "numbers that leap": ("LlamaForCausalLM", {"attention_mask": numbers(3, 5, 6, 90)}, None),
    "numbers and positions": (
        "LlamaForCausalLM",
        {"attention_mask": numbers(1, 2, 3, 4), "position_ids": positions_of()[None]},
        None,
    ),
    "seq_idx": ("LlamaForCausalLM", {"seq_idx": numbers(0, 1, 2, 3).int()}, None),
    "seq_idx and ones": (
        "Qwen3ForCausalLM",
        {"seq_idx": numbers(0, 1, 2, 3)[0], "attention_mask": torch.ones(1, TOTAL)},
        None,
    ),
    "positions without a batch": ("LlamaForCausalLM", {"position_ids": positions_of()}, None),
    "three axes, text": ("Qwen2VLText", {"position_ids": positions_of().expand(3, 1, -1)}, None),
    "three axes, a picture": ("Qwen2VLText", {"position_ids": IMAGE}, IMAGE),
    "four axes": ("Qwen2VLText", {"position_ids": positions_of().expand(4, 1, -1)}, None),
    "four axes, a picture": (
        "Qwen2VLText",
        {"position_ids": torch.cat([positions_of()[None, None], IMAGE])},
        IMAGE,
    ),
}


def told(rank, group, ranks):
    """Of every way: output, gradients, and the documents that the planner was given."""
    found = {}
    for name, (kind, inputs, _) in WAYS.items():
        net, plans = model(kind), []

        def planner(docs, plans=plans):
            plans.append(tasp.plan(docs, ranks))
            return plans[-1]

        with sequence_parallel(net, planner, group):
            out = value(net(input_ids=token_ids(), **inputs))
            whole = tasp.gather(out, plans[-1], group, dim=1)
            (whole * weights(whole)).sum().div(ranks).backward()  # gather adds its gradients up
        lengths = plans[-1].docs.lengths.tolist()
        found[name] = whole.detach(), grads_of(net, group, ranks), lengths
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_documents_are_read_however_they_are_told(ranks):
    wanted = {}
    for name, (kind, _, positions) in WAYS.items():
        net = model(kind)
        given = {} if positions is None else {"position_ids": positions}
        out, _ = stock(net, token_ids(), DOCS, **given)
        (out * weights(out)).sum().backward()
        wanted[name] = out.detach(), grads_of(net), LENGTHS
    for answer in tasp.launch(told, ranks, ranks):
        close(answer, wanted)


def test_what_two_inputs_tell_must_agree():
    cu, p = torch.tensor([0, 17, 18, 40, 48]), tasp.plan(DOCS, 1)
    others = {
        "position_ids": torch.arange(TOTAL)[None],  # one long count
        "attention_mask": numbers(1, 1, 2, 3),
        "seq_idx": numbers(0, 1, 2, 2),
        "cu_seqlens": torch.tensor([0, 17, 48]),
        "cu_seq_lens_k": torch.tensor([0, 17, 48]),
    }
    for name, other in others.items():
        for plan in (p, lambda docs: tasp.plan(docs, 1)):
            for given in ({"cu_seq_lens_q": cu}, {"position_ids": positions_of()[None]}):
                inputs = {"input_ids": token_ids(), **given, name: other}
                if len(inputs) == 2:
                    continue
                with pytest.raises(tasp.PlanError, match=rf"{name} tells|{name}.* tells") as error:
                    shard_inputs(inputs, plan)
                assert all(x in str(error.value) for x in given)
        with pytest.raises(tasp.PlanError, match=rf"the inputs hold .* by {name}, the plan is for"):
            shard_inputs({"input_ids": token_ids(), name: other}, p)
    agreeing = {"cu_seq_lens_q": cu, "attention_mask": numbers(1, 2, 3, 4), "max_length_q": 22}
    assert shard_inputs({"input_ids": token_ids(), **agreeing}, p).keys() == {
        "input_ids",
        "position_ids",
        "tasp",
    }
    assert documents_of(agreeing, TOTAL) == DOCS
    assert documents_of({"attention_mask": torch.ones(1, TOTAL)}, TOTAL) is None


def test_positions_that_do_not_tell_need_cu_seqlens_or_a_plan():
    positions = torch.randint(1, 40, (3, 1, TOTAL), generator=torch.Generator().manual_seed(5))
    inputs = {"input_ids": token_ids(), "position_ids": positions}
    with pytest.raises(tasp.PlanError, match=r"do not tell where documents begin.*give cu_seqlens"):
        shard_inputs(inputs, lambda docs: tasp.plan(docs, 1))
    cu = torch.tensor([0, 17, 48])
    for given, plan in (
        ({}, tasp.plan([TOTAL], 1)),
        ({"cu_seqlens": cu}, lambda d: tasp.plan(d, 1)),
    ):
        found = shard_inputs(inputs | given, plan)
        assert torch.equal(found["position_ids"], positions)
    positions[:, 0, 7] = 0
    with pytest.raises(tasp.PlanError, match="at a token in the row but not at its first"):
        shard_inputs(inputs, tasp.plan([TOTAL], 1))


# ---- inputs that are refused

BLOCKS = numbers(1, 2, 3, 4)[0][:, None] == numbers(1, 2, 3, 4)[0][None]
REFUSED = [
    (
        {"attention_mask": BLOCKS[None, None]},
        r"\[1, 1, 48, 48\] says for pairs of tokens what is visible",
    ),
    ({"attention_mask": torch.zeros(1, 1, TOTAL, TOTAL)}, "says for pairs of tokens"),
    ({"attention_mask": BLOCKS[None]}, r"\[1, 48, 48\] says for pairs"),
    ({"attention_mask": {"full_attention": BLOCKS}}, "is a dict of full_attention"),
    ({"attention_mask": {}}, "is a dict"),
    ({"attention_mask": numbers(2, 1, 3, 4)}, "without going down"),
    ({"attention_mask": numbers(1, 2, 3, 0)}, "hides tokens; pack documents"),
    ({"attention_mask": torch.zeros(1, TOTAL)}, "hides tokens"),
    ({"attention_mask": numbers(1, 2, 3, 4) * 0.5}, "by whole numbers, got torch.float32"),
    ({"attention_mask": torch.ones(1, TOTAL - 1)}, "by whole numbers|48 tokens a row"),
    ({"seq_idx": numbers(0, 1, 0, 2)}, "seq_idx must number documents in row order"),
    ({"seq_idx": numbers(0, 1, 2, 3)[:, 1:]}, r"seq_idx must be \[B, T\] with 48 tokens a row"),
    (
        {"position_ids": torch.arange(TOTAL).view(1, 1, 1, TOTAL)},
        r"must be \[T\], \[B, T\], \[3, B, T\]",
    ),
    ({"position_ids": torch.arange(5, TOTAL + 5)[None]}, "must count 0, 1, 2"),
    (
        {"cu_seqlens": [0, 48], "max_length_q": 22},
        "max_length_q is 22, the longest document has 48",
    ),
    (
        {"loss_mask": torch.ones(1, TOTAL)},
        r"loss_mask = a tensor \[1, 48\].*labels of tokens that do not",
    ),
    ({"weights_of_tokens": torch.ones(1, TOTAL, 3)}, "does not know this input"),
    ({"head_mask": torch.ones(2, 4)}, "head_mask = .*no plan has one"),
    ({"past_key_values": hf.DynamicCache()}, "past_key_values = DynamicCache: .*not for decoding"),
    ({"cache_position": torch.arange(TOTAL)}, "cache_position = .*not for decoding"),
    ({"output_attentions": True}, "output_attentions = True: attention weights are never made"),
    ({"logits_to_keep": 1}, "logits_to_keep = 1: every rank has tokens of its own"),
    ({"logits_to_keep": torch.tensor([3])}, "logits_to_keep = a tensor"),
    ({"num_logits_to_keep": 2}, "num_logits_to_keep = 2"),
    ({"return_dict": False}, "return_dict = False: outputs are known by name"),
    ({"pixel_values": torch.ones(4, 3)}, "pixel_values = .*image"),
    ({"image_grid_thw": torch.ones(1, 3)}, "image_grid_thw = .*does not know this input"),
    ({"temperature": 0.5}, "temperature = 0.5: a plan does not know"),
    (
        {"labels": torch.zeros(1, TOTAL)},
        "labels must be token ids, whole numbers, got torch.float32",
    ),
    ({"labels": torch.ones(1, TOTAL, dtype=torch.bool)}, "got torch.bool"),
    ({"labels": torch.zeros(1, dtype=torch.int64)}, r"labels must be \[B, T\] = \[1, 48\]"),
    ({"shift_labels": token_ids()}, "without labels"),
    ({"inputs_embeds": torch.zeros(1, TOTAL, 32)}, "both input_ids and inputs_embeds"),
    ({"token_type_ids": torch.zeros(1, TOTAL)[:, 1:]}, r"token_type_ids must be \[B, T\]"),
    ({"label_smoothing": 1.5}, "between 0 and 1"),
]


@pytest.mark.parametrize(("inputs", "message"), REFUSED)
def test_inputs_that_are_not_known_to_be_right(inputs, message):
    with pytest.raises(tasp.PlanError, match=message):
        shard_inputs({"input_ids": token_ids(), **inputs}, lambda docs: tasp.plan(docs, 1))


def test_inputs_that_ask_for_nothing_pass():
    p = tasp.plan(DOCS, 1)
    harmless = {
        "labels": None,
        "past_key_values": None,
        "output_attentions": False,
        "logits_to_keep": 0,
        "return_dict": True,
        "attention_mask": torch.ones(1, TOTAL, dtype=torch.bool),
    }
    found = shard_inputs({"input_ids": token_ids(), "use_cache": True, **harmless}, p)
    assert found.keys() == {"input_ids", "position_ids", "use_cache", "tasp"}
    net = model("LlamaForCausalLM")
    with sequence_parallel(net, p):
        net(token_ids(), **harmless)


def one_bad(rank, group, p, inputs, bad):
    net = model("LlamaForCausalLM")
    try:
        with sequence_parallel(net, p, group):
            net(**(bad if rank == 1 else inputs))
    except Exception as error:
        return type(error), str(error)
    return None


def test_one_rank_with_a_wrong_input_is_an_error_on_all():
    ids, p = token_ids(), tasp.plan(DOCS, 2)
    bad = [
        ({"attention_mask": numbers(1, 2, 3, 0)}, "hides tokens"),
        ({"input_ids": ids[:, 1:]}, "rows have 47 tokens"),
        ({"position_ids": "no"}, "position_ids must be a tensor"),
        ({"cu_seqlens": object()}, "Error"),
        ({"labels": ids + 1}, "labels hold 97, outside the 97 classes of LlamaForCausalLM"),
        ({"labels": -ids}, "outside the 97 classes"),
        ({"input_ids": "text"}, "AttributeError"),
    ]
    for inputs, message in bad:
        good = {"input_ids": ids, "labels": ids}
        answers = tasp.launch(one_bad, 2, p, good, good | inputs, timeout_s=15)
        assert "rank 1" in answers[0][1]
        for answer in answers:
            assert answer is not None
            assert issubclass(answer[0], tasp.PlanError)
            assert message in answer[1]


# ---- ranks with different rows

OTHER = {
    "input_ids": {"input_ids": token_ids(seed=1)},
    "one token": {"input_ids": token_ids().index_fill(1, torch.tensor([47]), 96)},
    "position_ids": {"position_ids": IMAGE[:, :, :].clone().index_fill(2, torch.tensor([3]), 9)},
    "labels": {"labels": token_ids(seed=2)},
    "no labels": {"labels": None},
    "num_items_in_batch": {"num_items_in_batch": 40},
    "documents": {"position_ids": positions_of()[None]},
    "arguments": {"use_cache": True},
}


@pytest.mark.parametrize("what", OTHER)
def test_ranks_with_different_rows_are_refused_on_all(what):
    ids = token_ids()
    same = {"input_ids": ids, "labels": ids, "num_items_in_batch": 41}
    if what == "position_ids":
        same["position_ids"] = IMAGE
    planner = lambda docs: tasp.plan(docs, 2)  # noqa: E731
    for answer in tasp.launch(one_bad, 2, planner, same, same | OTHER[what], timeout_s=15):
        assert answer is not None
        assert issubclass(answer[0], tasp.PlanError)
        assert "ranks of a group must be given the same whole rows" in answer[1]
        assert "RowTrainer" in answer[1]
        assert "rank 1 has" in answer[1] or "rank 0 has" in answer[1]


def test_signatures_see_one_bit_and_the_order():
    x = torch.randn(3, 50, 4, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool):
        same = (x * 100).to(dtype)
        one = signature({"x": same, "y": "text", "z": None})
        assert one == signature({"x": same.clone(), "y": "text", "z": None})
        other = same.clone()
        other[2, 49, 3] = ~other[2, 49, 3] if dtype == torch.bool else other[2, 49, 3] + 1
        assert one["x"] != signature({"x": other})["x"]
        assert one["x"] != signature({"x": same.flip(1)})["x"] or dtype == torch.bool
        assert one["x"] != signature({"x": same[:, :, None]})["x"]


# ---- losses and heads

HEADS = [
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "GPT2LMHeadModel",
    "BertForMaskedLM",
    "RobertaForMaskedLM",
    "ElectraForTokenClassification",
    "LlamaForTokenClassification",
    "BertForTokenClassification",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
]

if OLDER:
    new = ("GPT2", "Bert", "Roberta", "Electra", "Olmoe")
    HEADS = [kind for kind in HEADS if not kind.startswith(new)]


def head(kind):
    if kind == "GPT2LMHeadModel":
        torch.manual_seed(0)
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 97}
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **off, use_cache=False)).double().train()
    return model(kind, **({"num_labels": 5, "classifier_dropout": 0.0} if "Token" in kind else {}))


def causal(kind):
    return not kind.startswith(("Bert", "Roberta", "Electra"))


def labels_for(kind, ids):
    labels = ids % 5 if "Token" in kind else ids.clone()
    labels[:, 3:9] = -100
    labels[:, ::7] = -100
    return labels


def wanted_of(kind, ids, docs, divide_by=None, smoothing=0.0):
    """(loss, logits, gradients) of the stock model, document by document, in float64."""
    net, labels = head(kind), labels_for(kind, ids)
    logits, outs = stock(net, ids, docs)
    if "ForCausalLM" in kind or "LMHead" in kind:
        labels = tasp.next_token_labels(labels, docs)
    loss = cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing
    )
    loss = loss / (divide_by or (labels != -100).sum().clamp(min=1))
    if kind.startswith(("Mixtral", "Qwen3Moe", "Olmoe")):
        gates = tuple(torch.cat(x) for x in zip(*(o.router_logits for o in outs), strict=True))
        loss = loss + 0.1 * load_balancing_loss_func(gates, 4, 2)
    loss.backward()
    return loss.detach(), logits.detach(), grads_of(net)


def of_rank(rank, group, kinds, p_of, ids, extra, times=1):
    """The same of the model inside sequence_parallel, put together from all ranks."""
    found = {}
    for kind in kinds:
        net, p = head(kind), p_of(causal(kind))
        with sequence_parallel(net, p, group):
            for _ in range(times):  # the first call compares losses, the second takes them as known
                net.zero_grad()
                out = net(input_ids=ids, labels=labels_for(kind, ids), **extra)
                out.loss.backward()
        assert out.loss is out["loss"] is out[0]
        loss = out.loss.detach().clone()
        if p.ranks > 1:
            dist.all_reduce(loss, group=group)
        for n, w in net.named_parameters() if p.ranks > 1 else ():
            # the older version's experts are modules, and one without tokens has no gradient anywhere
            assert w.grad is not None or (OLDER and ".experts." in n), n
        logits = tasp.gather(out.logits.detach(), p, group, dim=1)
        found[kind] = loss, logits, grads_of(net, group, p.ranks)
    return found


def plans(lengths, ranks, **options):
    def of(causal):
        return tasp.plan(tasp.Documents.of(lengths, causal=causal), ranks, **options)

    return of


@pytest.mark.parametrize(
    ("ranks", "batch", "times", "extra"),
    spread(
        [(1, 1, 2, {}), (2, 1, 2, {}), (2, 2, 1, {"num_items_in_batch": 123}), (4, 2, 2, {})],
        keep=2,
    ),
)
def test_losses_of_heads_are_the_stock_models(ranks, batch, times, extra):
    ids = token_ids(batch=batch)
    wanted = {k: wanted_of(k, ids, DOCS, extra.get("num_items_in_batch")) for k in HEADS}
    for answer in tasp.launch(of_rank, ranks, HEADS, plans(LENGTHS, ranks), ids, extra, times):
        for kind in HEADS:
            close(answer[kind], wanted[kind])


def test_label_smoothing_is_that_of_the_whole_row():
    kinds, ids = [HEADS[0], HEADS[3]], token_ids()
    wanted = {k: wanted_of(k, ids, DOCS, smoothing=0.1) for k in kinds}
    for answer in tasp.launch(of_rank, 2, kinds, plans(LENGTHS, 2), ids, {"label_smoothing": 0.1}):
        close(answer, wanted)


class Weighted(hf.LlamaForCausalLM):
    """A loss of its own beside the model's."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if out.loss is not None:
            out.loss = out.loss + 0.1 * out.logits.square().mean()
        return out


class Hidden(hf.BertForMaskedLM):
    """The same, by a head that does not call its loss function."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if out.loss is not None:
            out.loss = 2 * out.loss
        return out


class Pooled(hf.LlamaForCausalLM):
    """One row of logits for each row of tokens."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits[:, -1]
        return out


def odd(name):
    """Models of which something is not one value for each token, or not one known sum."""
    torch.manual_seed(0)
    llama = hf.LlamaConfig(**SIZES, **DECODER, use_cache=False, num_labels=5)
    bert = hf.BertConfig(**SIZES, **ENCODER)
    if name == "own loss function":
        net = hf.LlamaForCausalLM(llama)
        net.loss_function = lambda logits, labels, **kwargs: logits.sum()
        return net
    if name == "tuples":
        llama.return_dict = False
        return hf.LlamaForCausalLM(llama)
    if name == "long rope":
        llama = hf.LlamaConfig(
            **SIZES,
            **DECODER,
            max_position_embeddings=20,
            rope_scaling={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        )
        return hf.LlamaForCausalLM(llama)
    made = {
        "classes of rows": (hf.LlamaForSequenceClassification, llama),
        "classes of rows, bert": (hf.BertForSequenceClassification, bert),
        "answers": (hf.LlamaForQuestionAnswering, llama),
        "more in the loss": (Weighted, llama),
        "inside": (Hidden, bert),
        "pooled": (Pooled, llama),
        "pooler": (hf.BertModel, bert),
    }
    kind, config = made[name]
    return kind(config)


LABEL = torch.zeros(1, TOTAL, dtype=torch.int64)
ODD = [
    (
        "classes of rows",
        {"labels": LABEL},
        "LlamaForSequenceClassification is given labels, and its loss",
    ),
    ("classes of rows", {}, r"output 'logits' has shape \[1, 5\] .*: it is not per token"),
    (
        "classes of rows, bert",
        {"labels": LABEL[:, 0]},
        "BertForSequenceClassification is given labels",
    ),
    ("answers", {"labels": LABEL}, "LlamaForQuestionAnswering is given labels"),
    ("answers", {"start_positions": LABEL[:, 0]}, "start_positions = a tensor"),
    ("own loss function", {"labels": LABEL}, "its loss_function is '<lambda>'"),
    ("more in the loss", {"labels": LABEL}, "adds something to the sum over tokens"),
    ("inside", {"labels": LABEL}, "of the same logits it makes"),
    ("pooled", {}, r"output 'logits' has shape \[1, 97\] .*: it is not per token"),
    ("pooler", {}, "output 'pooler_output' has shape .*add_pooling_layer=False"),
    ("tuples", {}, "return_dict"),
    ("long rope", {}, "'dynamic' rotary positions: beyond 20 tokens .* the longest here has 22"),
]

if OLDER:
    ODD = [case for case in ODD if case[0] not in ("classes of rows, bert", "inside", "pooler")]


def refused(rank, group, ranks, cases):
    found = []
    for name, inputs, _ in cases:
        net = odd(name)
        docs = tasp.Documents.of(LENGTHS, causal=not isinstance(net, hf.BertPreTrainedModel))
        try:
            with sequence_parallel(net, tasp.plan(docs, ranks), group):
                net(input_ids=token_ids(), **inputs)
            found.append("nothing was refused")
        except tasp.PlanError as error:
            found.append(str(error))
        assert "_loss_function" not in net.__dict__ or name == "own loss function"
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_and_models_that_are_not_known_to_be_right(ranks):
    for answer in tasp.launch(refused, ranks, ranks, ODD):
        for (_, _, message), text in zip(ODD, answer, strict=True):
            with pytest.raises(tasp.PlanError, match=message):
                raise tasp.PlanError(text)


def test_models_are_as_they_were_and_are_not_entered_twice():
    net, ids = head("LlamaForCausalLM"), token_ids()
    net.set_attn_implementation("eager")
    before = net(input_ids=ids, labels=ids).loss
    with sequence_parallel(net, tasp.plan([TOTAL], 1)):
        assert float(net(input_ids=ids, labels=ids).loss.detach()) == pytest.approx(
            float(before.detach())
        )
        again = sequence_parallel(net, tasp.plan([TOTAL], 1))
        with pytest.raises(tasp.PlanError, match="inside sequence_parallel already"), again:
            pass
        assert torch.is_tensor(net(input_ids=ids, labels=ids).loss)
    assert torch.equal(net(input_ids=ids, labels=ids).loss, before)


@pytest.mark.skipif(OLDER, reason="Roberta does not go through this version's attention interface")
def test_positions_of_models_that_do_not_begin_at_0():
    net, p = head("RobertaForMaskedLM"), tasp.plan(tasp.Documents.of(LENGTHS, causal=False), 1)
    with sequence_parallel(net, p):
        made = net(input_ids=token_ids()).logits
        given = net(input_ids=token_ids(), position_ids=positions_of()[None] + 2).logits
        with pytest.raises(
            tasp.PlanError, match="counts positions from 2 on, position_ids begin at 0"
        ):
            net(input_ids=token_ids(), position_ids=positions_of()[None])
        with pytest.raises(tasp.PlanError, match="must count 2, 3, 4"):
            net(input_ids=token_ids(), position_ids=positions_of()[None] + 1)
        with pytest.raises(tasp.PlanError, match="has token 1, its padding"):
            net(input_ids=torch.ones_like(token_ids()))
    assert torch.equal(made, given)


# ---- ranks without tokens

FEW = [("contiguous", [3], 4, 1), ("zigzag", [1], 2, 2), ("striped", [1, 1], 4, 1)]
FEW_KINDS = [
    "LlamaForCausalLM",
    "BertForMaskedLM",
    "MixtralForCausalLM",
    "LlamaForTokenClassification",
]
FEW_KINDS = [kind for kind in FEW_KINDS if kind in HEADS]


@pytest.mark.parametrize(("layout", "lengths", "ranks", "batch"), FEW)
def test_ranks_without_tokens(layout, lengths, ranks, batch):
    docs = tasp.Documents.of(lengths)
    ids, p_of = token_ids(docs.total, batch), plans(lengths, ranks, layout=layout, schedule="ring")
    assert min(p_of(True).num_tokens(r) for r in range(ranks)) == 0
    wanted = {k: wanted_of(k, ids, docs) for k in FEW_KINDS}
    for answer in tasp.launch(of_rank, ranks, FEW_KINDS, p_of, ids, {}):
        for kind in FEW_KINDS:
            close(answer[kind], wanted[kind])


def empty_outputs(rank, group, p):
    net = model("LlamaForCausalLM", use_cache=True)
    with torch.no_grad(), sequence_parallel(net, p, group):
        out = net(input_ids=token_ids(3), use_cache=True, output_hidden_states=True)
    cache = getattr(out, "cache", None) or out.past_key_values
    shapes = [out.logits.shape[1], *(x.shape[1] for x in out.hidden_states)]
    direct = shard_inputs({"input_ids": token_ids(3), "labels": token_ids(3)}, p, group)
    assert direct["tasp"].stand_in == (p.num_tokens(rank) == 0)
    assert not direct["tasp"].stand_in or direct["labels"].tolist() == [[-100]]
    return {*shapes, *(layer.keys.shape[2] for layer in cache.layers)}


def test_outputs_of_a_rank_without_tokens_have_none():
    p = tasp.plan([3], 4)
    answers = tasp.launch(empty_outputs, 4, p)
    assert answers == [{p.num_tokens(r)} for r in range(4)]


def test_documents_may_be_told_by_lists():
    assert documents_of({"cu_seqlens": [0, 17, 18, 40, 48]}, TOTAL) == DOCS
    assert documents_of({"position_ids": np.array(DOCS.positions())}, TOTAL) == DOCS
    with pytest.raises(tasp.PlanError, match="same in every row of a batch"):
        documents_of({"seq_idx": torch.cat([numbers(0, 1, 2, 3), numbers(0, 0, 1, 2)])}, TOTAL)
