"""Tiny models of many families of transformers, and the run that tells which of them are right on plans.

    python tests/model_families.py            # writes docs/models.md from what it finds (minutes)

A family is right if logits and gradients of its model on 1, 2 and 4 ranks are those of the stock model,
computed in float64 document by document; it is refused if every rank raises PlanError before a number
comes out. Anything else is wrong, and `tests/test_models.py` fails on it.
"""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once here, not once in every forked rank
import torch.distributed as dist
import transformers as hf

import tasp_core as tasp
from tasp_core.integrations.transformers import sequence_parallel

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
DOCS = tasp.Documents.of([13, 1, 29, 7])
RANKS = (1, 2, 4)
LOGITS, GRADIENTS = 1e-5, 1e-4  # largest errors of a right model, relative to the largest value

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "experts_implementation": "eager",  # the fused kernels have no float64
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HEAD = {"head_dim": 8}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
DEEPSEEK = {
    **LATENT,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
GPT = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
PLAIN = {"vocab_size": 97, "hidden_size": 32}
BERT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Family:
    """A model's class in transformers and how small it is made."""

    options: dict[str, Any] = field(default_factory=dict)
    kind: str = ""  # class name without ending; the family's name where empty
    head: str = "ForCausalLM"
    config: str = ""
    causal: bool = True
    base: dict[str, Any] = field(default_factory=lambda: SIZES)

    def make(self, name: str) -> Any:
        """The model in float64, always with the same weights; AttributeError where it is not known."""
        kind = self.kind or name
        config = getattr(hf, self.config or f"{kind}Config")(**{**self.base, **self.options})
        torch.manual_seed(0)
        net = getattr(hf, kind + self.head)(config).double().eval()
        generator = torch.Generator().manual_seed(1)
        for weight in net.parameters():  # also biases, sinks and gates, which begin as 0 or 1
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.data += 0.05 * noise
        return net


def small(**options: Any) -> Family:
    """A family of the usual configuration."""
    return Family(options)


FAMILIES: dict[str, Family] = {
    "Afmoe": small(**HEAD, **EXPERTS, num_dense_layers=1, **WINDOWS),
    "Apertus": small(),
    "Arcee": small(),
    "Bamba": small(**MAMBA, attn_layer_indices=[1]),
    "Bert": Family({**BERT, "is_decoder": False}, head="ForMaskedLM", causal=False),
    "Bert, decoder": Family({**BERT, "is_decoder": True}, "Bert", "LMHeadModel"),
    "BigBird": Family(
        {**BERT, "block_size": 4, "num_random_blocks": 1}, head="ForMaskedLM", causal=False
    ),
    "BitNet": small(),
    "Bloom": Family({"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0}, base=PLAIN),
    "Cohere": small(),
    "Cohere2": small(**WINDOWS),
    "DeepseekV2": small(**DEEPSEEK),
    "DeepseekV3": small(**DEEPSEEK),
    "DeepseekV32": small(
        **{**DEEPSEEK, "q_lora_rank": 16}, index_topk=4, index_n_heads=2, index_head_dim=8
    ),
    "Dbrx": Family(
        {
            "vocab_size": 97,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "ffn_config": {
                "ffn_hidden_size": 16,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": 32,
            },
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        },
        base={},
    ),
    "DiffLlama": small(),
    "Doge": small(keep_window_size=8),
    "Dots1": small(
        **EXPERTS,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        layer_types=WINDOWS["layer_types"],
        sliding_window=8,
    ),
    "Ernie4_5": small(**HEAD),
    "Ernie4_5_Moe": small(
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=16,
        moe_num_shared_experts=1,
        moe_layer_start_index=0,
    ),
    "EuroBert": Family(head="ForMaskedLM", causal=False),
    "Exaone4": small(**WINDOWS),
    "Falcon, rotary": Family(
        {"num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}, "Falcon", base=PLAIN
    ),
    "Falcon, ALiBi": Family(
        {"num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}, "Falcon", base=PLAIN
    ),
    "FalconH1": small(**{**MAMBA, "mamba_d_head": 8}, mamba_d_ssm=32),
    "FlexOlmo": small(num_experts=4, num_experts_per_tok=2),
    "Gemma": small(**HEAD),
    "Gemma2": small(**HEAD, **WINDOWS),
    "Gemma2, no soft caps": Family({**HEAD, **WINDOWS, "attn_logit_softcapping": None}, "Gemma2"),
    "Gemma3": Family({**HEAD, **WINDOWS, "rope_scaling": None}, config="Gemma3TextConfig"),
    "Gemma3n": Family(
        {
            **HEAD,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
            "laurel_rank": 4,
            "num_kv_shared_layers": 0,
            "layer_types": WINDOWS["layer_types"],
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
        config="Gemma3nTextConfig",
    ),
    "Glm": small(**HEAD),
    "Glm4": small(**HEAD),
    "Glm4Moe": small(
        **HEAD,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "GlmMoeDsa": small(
        **{**DEEPSEEK, "q_lora_rank": 16}, index_topk=4, index_n_heads=2, index_head_dim=8
    ),
    "GPT2": Family({}, head="LMHeadModel", base=GPT),
    "GPTBigCode": Family({}, base=GPT),
    "GPTJ": Family({"rotary_dim": 4}, base=GPT),
    "GPTNeo": Family(
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        base=PLAIN,
    ),
    "GPTNeoX": small(),
    "GptOss": small(
        **HEAD, **WINDOWS, num_local_experts=4, num_experts_per_tok=2, rope_scaling=None
    ),
    "Granite": small(),
    "GraniteMoe": small(num_local_experts=4, num_experts_per_tok=2),
    "GraniteMoeShared": small(
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=16
    ),
    "GraniteMoeHybrid": small(
        **MAMBA,
        layer_types=["mamba", "attention"],
        num_local_experts=0,
        shared_intermediate_size=48,
    ),
    "GraniteMoeHybrid, attention only": Family(
        {
            **MAMBA,
            "layer_types": ["attention", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
        },
        "GraniteMoeHybrid",
    ),
    "Helium": small(**HEAD),
    "HunYuanDenseV1": small(**HEAD),
    "HunYuanMoEV1": small(**HEAD, num_experts=4, moe_topk=2),
    "Jamba": small(
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "JetMoe": small(num_local_experts=4, num_experts_per_tok=2, kv_channels=8),
    "Lfm2": small(layer_types=["conv", "full_attention"]),
    "Llama": small(),
    "Llama, dynamic rope": Family(
        {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "Llama",
    ),
    "Llama4, chunks of 8": Family(
        {**HEAD, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
        "Llama4",
        config="Llama4TextConfig",
    ),
    "Llama4, chunks of 32": Family(
        {
            **HEAD,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 0],
        },
        "Llama4",
        config="Llama4TextConfig",
    ),
    "Llama4, scales from 40 on": Family(
        {
            **HEAD,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 0],
            "floor_scale": 40,
        },
        "Llama4",
        config="Llama4TextConfig",
    ),
    "LongcatFlash": small(
        **{**LATENT, "q_lora_rank": 16},
        head_dim=4,
        num_layers=2,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        n_routed_experts=4,
        zero_expert_num=1,
        moe_topk=2,
    ),
    "Mamba": Family({"num_hidden_layers": 2}, base=PLAIN),
    "Mamba2": Family(
        {
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 1,
            "chunk_size": 16,
        },
        base=PLAIN,
    ),
    "MiniMax": small(
        **HEAD,
        num_local_experts=2,
        num_experts_per_tok=1,
        block_size=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "MiniMaxM2": small(**HEAD, num_local_experts=4, num_experts_per_tok=2),
    "Ministral": small(**HEAD, **WINDOWS),
    "Ministral3": small(**HEAD),
    "Mistral": small(sliding_window=8),
    "Mixtral": small(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "ModernBert": Family(
        {"local_attention": 8, "global_attn_every_n_layers": 2}, head="ForMaskedLM", causal=False
    ),
    "ModernBertDecoder": small(pad_token_id=0, local_attention=8, global_attn_every_n_layers=2),
    "Mpt": Family(
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "vocab_size": 97},
        base={},
    ),
    "Nemotron": small(),
    "NemotronH": small(
        **HEAD,
        layers_block_type=["mamba", "attention"],
        hybrid_override_pattern="M*",
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=16,
    ),
    "Olmo": small(),
    "Olmo2": small(),
    "Olmo3": small(**WINDOWS),
    "Olmoe": small(num_experts=4, num_experts_per_tok=2),
    "OlmoHybrid": small(layer_types=["linear_attention", "full_attention"]),
    "OPT": Family(
        {
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "dropout": 0.0,
        },
        base=PLAIN,
    ),
    "Persimmon": small(),
    "Phi": small(),
    "Phi3": small(sliding_window=8),
    "Phi3, longrope": Family(
        {
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 16,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": [2.0] * 4,
                "short_factor": [1.0] * 4,
            },
        },
        "Phi3",
    ),
    "Phimoe": small(num_local_experts=4, num_experts_per_tok=2),
    "Qwen2": small(),
    "Qwen2, a window in one layer": Family(
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "Qwen2"
    ),
    "Qwen2Moe": small(**EXPERTS, shared_expert_intermediate_size=16),
    "Qwen2VL, text": Family(
        {
            "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
            "use_cache": False,
        },
        "Qwen2VLText",
        "Model",
    ),
    "Qwen2_5_VL, text": Family(
        {
            "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
            "use_cache": False,
        },
        "Qwen2_5_VLText",
        "Model",
    ),
    "Qwen3": small(**HEAD),
    "Qwen3Moe": small(**HEAD, **EXPERTS),
    "Qwen3Next": small(
        **HEAD,
        **EXPERTS,
        **DELTA,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "Qwen3_5": Family(
        {**HEAD, **DELTA, "layer_types": ["linear_attention", "full_attention"]},
        config="Qwen3_5TextConfig",
    ),
    "RecurrentGemma": Family(
        {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 64}
    ),
    "Roberta": Family({**BERT, "pad_token_id": 1}, head="ForMaskedLM", causal=False),
    "RoFormer": Family({**BERT}, head="ForMaskedLM", causal=False),
    "Rwkv": Family({"num_hidden_layers": 2, "attention_hidden_size": 32}, base=PLAIN),
    "SeedOss": small(**HEAD),
    "SmolLM3": small(),
    "StableLm": small(),
    "Starcoder2": small(sliding_window=8, residual_dropout=0.0, embedding_dropout=0.0),
    "T5": Family(
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 97,
            "decoder_start_token_id": 0,
        },
        head="ForConditionalGeneration",
        base={},
    ),
    "VaultGemma": small(**HEAD, **WINDOWS),
    "XGLM": Family(
        {
            "vocab_size": 97,
            "d_model": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "attention_heads": 4,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
        },
        base={},
    ),
    "XLMRoberta": Family({**BERT, "pad_token_id": 1}, head="ForMaskedLM", causal=False),
    "Zamba": small(
        mamba_d_state=8,
        mamba_dt_rank=4,
        n_mamba_heads=2,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "hybrid"],
        use_mamba_kernels=False,
    ),
    "Zamba2": small(
        mamba_d_state=8,
        mamba_headdim=16,
        n_mamba_heads=4,
        mamba_ngroups=1,
        chunk_size=16,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "hybrid"],
        num_mem_blocks=1,
        use_mem_rope=True,
    ),
}


# ---- one run


def ids_and_weights(outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [1, T], and weights [1, T, outputs] that make a number out of a model's output."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (1, DOCS.total), generator=generator)
    return ids, torch.randn(1, DOCS.total, outputs, generator=generator, dtype=torch.float64)


def output(out: Any) -> torch.Tensor:
    return out.logits if "logits" in out else out.last_hidden_state


def stock(net: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Output and gradients of the model as it comes, document by document."""
    net.set_attn_implementation("eager")
    ids, _ = ids_and_weights(1)
    cuts = itertools.pairwise(DOCS.cu_seqlens.tolist())
    whole = torch.cat([output(net(input_ids=ids[:, a:b])) for a, b in cuts if b > a], dim=1)
    _, weights = ids_and_weights(whole.shape[-1])
    (whole * weights).sum().backward()
    return whole.detach(), [w.grad for w in net.parameters()]


def on_ranks(rank: int, group: Any, ranks: int, wanted: dict[str, Any]) -> dict[str, Any]:
    """What each family gives on these ranks: errors of output and gradients, or what was raised."""
    return {name: one_family(rank, group, ranks, name, wanted[name]) for name in wanted}


def one_family(rank: int, group: Any, ranks: int, name: str, wanted: Any) -> Any:
    try:
        net = FAMILIES[name].make(name)
    except Exception as error:  # of the family's configuration
        return "make", str(error)
    docs = tasp.Documents.of(DOCS.lengths, causal=FAMILIES[name].causal)
    plan = tasp.plan(docs, ranks, layout="zigzag")
    ids, _ = ids_and_weights(1)
    try:
        with sequence_parallel(net, plan, group):
            own = output(net(input_ids=ids))
            _, weights = ids_and_weights(own.shape[-1])
            (own * tasp.shard(weights, plan, rank, dim=1)).sum().backward()
    except Exception as error:
        return type(error).__name__, str(error)
    if not isinstance(wanted, tuple):
        return "stock", wanted
    whole = tasp.gather(own.detach(), plan, group, dim=1)
    worst = 0.0
    # some gradients are 0 but for rounding, such as that of a bias of keys
    least = 1e-3 * max(float(right.abs().max()) for right in wanted[1] if right is not None)
    for weight, right in zip(net.parameters(), wanted[1], strict=True):
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if ranks > 1:
            dist.all_reduce(grad, group=group)
        if right is not None:
            worst = max(worst, error_of(grad, right, least))
    return error_of(whole, wanted[0]), worst


def error_of(found: torch.Tensor, right: torch.Tensor, least: float = 1e-30) -> float:
    """Largest difference, relative to the largest value; infinity where one is not a number."""
    error = float((found - right).abs().max() / right.abs().max().clamp(min=least))
    return error if error == error else float("inf")


def find(names: list[str]) -> dict[str, dict[int, Any]]:
    """What each family gives on 1, 2 and 4 ranks, alike on every rank of them."""
    wanted: dict[str, Any] = {}
    for name in names:
        try:
            wanted[name] = stock(FAMILIES[name].make(name))
        except Exception as error:
            wanted[name] = f"{type(error).__name__}: {error}"
    gc.collect()
    found: dict[str, dict[int, Any]] = {name: {} for name in names}
    for ranks in RANKS:
        answers = tasp.launch(on_ranks, ranks, ranks, wanted, timeout_s=280)
        for name in names:
            found[name][ranks] = [answer[name] for answer in answers]
    return found
