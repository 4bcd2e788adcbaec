"""Tiny models of many families of transformers, and the run that tells which of them are right on plans.

    python -m tests.model_families            # writes docs/models.md from what it finds (minutes)

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

SINCE_5 = int(hf.__version__.split(".")[0]) >= 5
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


def small(**options: Any) -> Family:
    """A family of the usual configuration."""
    return Family(options)


FAMILIES: dict[str, Family] = {
    "Albert": Family({**BERT, "embedding_size": 16}, head="ForMaskedLM", causal=False),
    "BioGpt": small(**BERT, activation_dropout=0.0),
    "Camembert": Family({**BERT, "pad_token_id": 1}, head="ForMaskedLM", causal=False),
    "CodeGen": Family({"rotary_dim": 4, "n_positions": 64, "n_ctx": 64}, base=GPT),
    "Cwm": small(**HEAD, **WINDOWS),
    "DistilBert": Family(
        {
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "vocab_size": 97,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        head="ForMaskedLM",
        causal=False,
        base={},
    ),
    "Electra": Family({**BERT, "embedding_size": 32}, head="ForMaskedLM", causal=False),
    "Esm": Family(
        {
            **BERT,
            "pad_token_id": 1,
            "mask_token_id": 3,
            "position_embedding_type": "rotary",
            "emb_layer_norm_before": False,
        },
        head="ForMaskedLM",
        causal=False,
    ),
    "Esm, absolute": Family(
        {**BERT, "pad_token_id": 1, "mask_token_id": 3}, "Esm", head="ForMaskedLM", causal=False
    ),
    "Ernie": Family({**BERT}, head="ForMaskedLM", causal=False),
    "ExaoneMoe": small(
        **HEAD,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        sliding_window=8,
        layer_types=WINDOWS["layer_types"],
    ),
    "Gemma4": Family(
        {
            **HEAD,
            **WINDOWS,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
        config="Gemma4TextConfig",
    ),
    "Gemma3n, shared keys": Family(
        {
            **HEAD,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
            "laurel_rank": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        "Gemma3n",
        config="Gemma3nTextConfig",
    ),
    "Jais2": small(),
    "KimiLinear": small(
        **LATENT,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        num_shared_experts=1,
    ),
    "Laguna": small(
        **HEAD, **WINDOWS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "Longformer": Family(
        {**BERT, "attention_window": 8, "pad_token_id": 1}, head="ForMaskedLM", causal=False
    ),
    "MiMoV2Flash": small(
        **HEAD, **WINDOWS, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "MiniCPM3": small(**LATENT),
    "Mistral4": small(**DEEPSEEK),
    "NanoChat": small(),
    "Qwen3VL, text": Family(
        {
            **HEAD,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
            "use_cache": False,
        },
        "Qwen3VLText",
        "Model",
    ),
    "SolarOpen": small(
        **HEAD,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "Youtu": small(**LATENT),
    "XLNet": Family(
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "vocab_size": 97, "dropout": 0.0},
        head="LMHeadModel",
        base={},
    ),
    "CTRL": Family(
        {
            "vocab_size": 97,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "dff": 48,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
        head="LMHeadModel",
        base={},
    ),
    "Reformer": Family(
        {
            "attn_layers": ["local", "lsh"],
            "attention_head_size": 8,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "feed_forward_size": 48,
            "axial_pos_embds": False,
            "vocab_size": 97,
            "is_decoder": True,
            "max_position_embeddings": 64,
        },
        head="ModelWithLMHead",
        base={},
    ),
    "Bert, pooled": Family({**BERT}, "Bert", "Model", causal=False),
    "Llama, sequence classification": Family({}, "Llama", "ForSequenceClassification"),
    "Llama, token classification": Family({}, "Llama", "ForTokenClassification"),
    "Llama, longer dynamic": Family(
        {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "Llama",
    ),
    "Llama, yarn": Family(
        {
            "max_position_embeddings": 64,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 16,
            },
        },
        "Llama",
    ),
    "Bart": Family(
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "vocab_size": 97,
        },
        head="ForConditionalGeneration",
        base={},
    ),
    "Bart, decoder": Family(
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "vocab_size": 97,
            "is_encoder_decoder": False,
            "is_decoder": True,
            "dropout": 0.0,
        },
        "Bart",
        head="ForCausalLM",
        base={},
    ),
    "MBart, decoder": Family(
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "vocab_size": 97,
            "is_encoder_decoder": False,
            "is_decoder": True,
            "dropout": 0.0,
        },
        "MBart",
        head="ForCausalLM",
        base={},
    ),
    "ViT": Family(
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 16,
            "patch_size": 4,
        },
        head="Model",
        base={},
        causal=False,
    ),
    "MPNet": Family({**BERT}, head="ForMaskedLM", causal=False),
    "DebertaV2": Family({**BERT}, head="ForMaskedLM", causal=False),
    "FNet": Family({}, head="ForMaskedLM", causal=False),
    "EmbeddingGemma": Family(
        {**HEAD, **WINDOWS, "rope_scaling": None, "use_bidirectional_attention": True},
        "Gemma3Text",
        "Model",
        config="Gemma3TextConfig",
        causal=False,
    ),
    "Llama, not causal": Family({"is_causal": False}, "Llama", causal=False),
    "Zaya": small(**HEAD, num_experts=4),
    "DeepseekV4": small(),
    "Flint": small(**HEAD),
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
                **({"hidden_size": 32} if SINCE_5 else {}),
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


def make(name: str, dtype: torch.dtype) -> Any:
    """The family's model, always with the same weights."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(hf, family.config or f"{family.kind or name}Config")
    net = getattr(hf, class_of(name))(config(**{**family.base, **family.options})).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    for weight in net.parameters():  # also biases, sinks and gates, which begin as 0 or 1
        weight.data += 0.05 * torch.randn(weight.shape, generator=generator).to(dtype)
    return net


def class_of(name: str) -> str:
    return (FAMILIES[name].kind or name) + FAMILIES[name].head


def known() -> list[str]:
    """Families that the installed transformers has."""
    return [name for name in FAMILIES if hasattr(hf, class_of(name))]


def token_ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 97, (1, DOCS.total), generator=generator)


def weights_of(outputs: int) -> torch.Tensor:
    """What makes one number of a model's output [1, T, outputs]."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, DOCS.total, outputs, generator=generator)


def output(out: Any) -> torch.Tensor:
    return out.logits if "logits" in out else out.last_hidden_state


@dataclass(frozen=True)
class Stock:
    """Output and gradients of a model as it comes, document by document."""

    dtype: torch.dtype
    output: torch.Tensor
    gradients: list[torch.Tensor | None]

    @classmethod
    def of(cls, name: str, dtype: torch.dtype) -> Stock:
        net = make(name, dtype)
        net.set_attn_implementation("eager")
        ids, cuts = token_ids(), itertools.pairwise(DOCS.cu_seqlens.tolist())
        whole = torch.cat([output(net(input_ids=ids[:, a:b])) for a, b in cuts], dim=1)
        (whole * weights_of(whole.shape[-1])).sum().backward()
        return cls(dtype, whole.detach(), [w.grad for w in net.parameters()])


def stock(name: str) -> Stock | str:
    """In float64, or in float32 where older experts have no float64; else why there is none."""
    reason = ""
    for dtype in (torch.float64, torch.float32):
        try:
            return Stock.of(name, dtype)
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {error}"
    return reason


def on_ranks(rank: int, group: Any, ranks: int, wanted: dict[str, Stock | str]) -> dict[str, Any]:
    """What each family gives on these ranks: errors of output and gradients, or what was raised."""
    torch.set_num_threads(1)
    return {name: one_family(rank, group, ranks, name, wanted[name]) for name in wanted}


def one_family(rank: int, group: Any, ranks: int, name: str, wanted: Stock | str) -> Any:
    docs = tasp.Documents.of(DOCS.lengths, causal=FAMILIES[name].causal)
    plan = tasp.plan(docs, ranks, layout="zigzag")
    try:
        net = make(name, torch.float64 if isinstance(wanted, str) else wanted.dtype)
        with sequence_parallel(net, plan, group):
            own = output(net(input_ids=token_ids()))
            weights = tasp.shard(weights_of(own.shape[-1]), plan, rank, dim=1)
            (own * weights).sum().backward()
        whole = tasp.gather(own.detach(), plan, group, dim=1)
    except Exception as error:
        return type(error).__name__, str(error)
    if isinstance(wanted, str):
        return "the stock model fails", wanted
    worst = 0.0
    # some gradients are 0 but for rounding, such as that of a bias of keys
    least = 1e-3 * max(float(g.abs().max()) for g in wanted.gradients if g is not None)
    for weight, right in zip(net.parameters(), wanted.gradients, strict=True):
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if ranks > 1:
            dist.all_reduce(gradient, group=group)
        if right is not None:
            worst = max(worst, error_of(gradient, right, least))
    return error_of(whole, wanted.output), worst


def error_of(found: torch.Tensor, right: torch.Tensor, least: float = 1e-30) -> float:
    """Largest difference, relative to the largest value; infinity where one is not a number."""
    error = float((found - right).abs().max() / right.abs().max().clamp(min=least))
    return error if error == error else float("inf")


@dataclass(frozen=True)
class Row:
    """One family on one number of ranks."""

    verdict: str  # "right", "refused", "wrong"
    why: str = ""
    errors: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, answers: list[Any]) -> Row:
        """From the answers of all ranks."""
        if all(isinstance(a[0], float) for a in answers):
            errors = max(a[0] for a in answers), max(a[1] for a in answers)
            fine = errors[0] <= LOGITS and errors[1] <= GRADIENTS
            return cls("right" if fine else "wrong", f"errors {errors}", errors)
        if all(a[0] == "PlanError" for a in answers):
            return cls("refused", answers[0][1])
        return cls("wrong", "; ".join(dict.fromkeys(f"{a[0]}: {a[1]}" for a in answers)))


def find(names: list[str]) -> dict[str, dict[int, Row]]:
    """What each family gives on each number of ranks."""
    hf.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors this small more only wait for each other
    wanted = {name: stock(name) for name in names}
    torch.set_num_threads(threads)
    gc.collect()
    found: dict[str, dict[int, Row]] = {name: {} for name in names}
    for ranks in RANKS:
        answers = tasp.launch(on_ranks, ranks, ranks, wanted, timeout_s=400)
        for name in names:
            found[name][ranks] = Row.of([answer[name] for answer in answers])
    return found


# ---- the page

HEAD_OF_PAGE = """# Models that are right on plans

Written by `python -m tests.model_families`, held against what is found by `make test-models` and, on the
oldest transformers that is supported, by `make test-hf`.

Tiny models of each family ran with random weights inside `sequence_parallel`, on 1, 2 and 4 ranks, on a
packed row of documents of {lengths} tokens in the zigzag layout, and once as stock model, document by
document, in float64 (float32 where an older version has no float64).

- **Right**: output within 1e-5 and gradients within 1e-4 of the stock model, relative to the largest value.
- **Refused**: every rank raised `PlanError` with this reason, before a number came out.

There is no third kind: `sequence_parallel` proves each model at its first use
(`tasp_core/integrations/models.py`), also those that are not listed here. Inputs, labels and losses are
not the subject of this page.
"""


def page_section(found: dict[str, dict[int, Row]]) -> str:
    """The installed version's part of the page."""
    verdicts = [{row.verdict for row in rows.values()} for rows in found.values()]
    lines = [
        f"## transformers {hf.__version__}\n",
        f"{len(found)} families: {verdicts.count({'right'})} right, "
        f"{verdicts.count({'refused'})} refused.\n",
        "| family | class | 1 rank | 2 ranks | 4 ranks | errors of output, of gradients; or why |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted(found, key=str.lower):
        rows = found[name]
        errors = [max(row.errors[i] for row in rows.values()) for i in (0, 1)]
        what = f"{errors[0]:.0e}, {errors[1]:.0e}"
        if any(row.verdict != "right" for row in rows.values()):
            what = " ".join(rows[RANKS[-1]].why.replace("|", "/").split())
        cells = (name, class_of(name), *(rows[ranks].verdict for ranks in RANKS), what)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def sections(page: str) -> dict[str, str]:
    """Version -> its part of the page."""
    parts = page.split("\n## ")[1:]
    return {part.split()[1]: "## " + part.rstrip() + "\n" for part in parts}


def without_figures(section: str) -> list[str]:
    """Its lines, without the errors of right families, which differ from one machine to another."""
    rows = [line.split(" | ") for line in section.splitlines()]
    return [" | ".join(row[:-1] if row[2:5] == ["right"] * 3 else row) for row in rows]


def write_page(found: dict[str, dict[int, Row]]) -> None:
    """The page with this version's part replaced."""
    parts = sections(PAGE.read_text()) if PAGE.exists() else {}
    parts[hf.__version__] = page_section(found)
    lengths = ", ".join(map(str, DOCS.lengths.tolist()))
    newest = sorted(parts, key=lambda version: [*map(int, version.split(".")[:2])], reverse=True)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join([HEAD_OF_PAGE.format(lengths=lengths), *(parts[v] for v in newest)]))


if __name__ == "__main__":
    write_page(find(known()))
