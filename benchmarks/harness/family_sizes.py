"""Sizes that make a tiny model of every family of transformers that generates text, whatever the family calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from transformers import CONFIG_MAPPING

from rewardlab.model.text_part import TEXT_CONFIG, is_composite

VOCABULARY: Final = 384
SIZES: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "lru_width", "word_embed_proj_dim"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "expert_ffn_hidden_size"), 64
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "zero_expert_num"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("head_dim", "rotary_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "mamba_n_groups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    "linear_num_value_heads": 4,
    # Of Kimi's linear attention. Transformers' own implementation of it, in use without the package fla, holds 64 times
    # heads times width numbers a token, several times a layer: 1 MiB a token each time at the usual 32 heads of 128.
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "num_kv_shared_layers": 0,
    # Fewer than a canary has tokens. Equal scores of tokens, between which the length of the row would decide, come of
    # few heads, so there are as many as usual.
    "index_topk": 64,
    "index_n_heads": 32,
    "sliding_window": 64,
    "initializer_range": 0.2,
}
"""What makes a model tiny, under the names that the families have for it."""
BESIDE: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("embed_dim", "out_hidden_size", "output_dim", "projection_dim", "qformer_hidden_size"), 32),
    **dict.fromkeys(("encoder_ffn_dim", "mlp_dim", "multimodal_intermediate_size", "projector_hidden_size"), 64),
    **dict.fromkeys(("depth", "encoder_layers", "n_layer", "num_layers", "num_hidden_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "num_heads", "num_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("image_size", "num_mel_bins"), 32),
    **dict.fromkeys(("num_queries", "num_query_tokens", "mm_tokens_per_image"), 4),
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [1],
    "patch_size": 8,
    "initializer_range": 0.2,
}
"""The same for the parts beside the text model that no text goes through."""
EXPERTS: Final = {"num_experts_per_tok": 2}
HEADS: Final = {"head_dim": 8}
ALSO: Final[Mapping[str, Mapping[str, Any]]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64},
    },
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "deepseek_v2": EXPERTS,
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [1, 1, 2]},
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4_text": {"global_head_dim": 8, "num_global_key_value_heads": 2},
    "gemma4_unified_text": {"global_head_dim": 8, "num_global_key_value_heads": 2},
    "glm5_next_text": {
        "qk_rope_head_dim": 0,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "index_head_dim": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "emu3_vqgan": {"base_channels": 32, "hidden_size": 32},
    "granite4_vision": {
        **{"deepstack_layer_map": [[0, 1]], "spatial_target_layers": [2], "downsample_rate": "1/2"},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 64},
    },
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "audio_config": {
            **{"hidden_size": 32, "intermediate_size": 64, "num_blocks": 2, "num_attention_heads": 4},
            **{"nemo_conv_channels": 32, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32},
        },
    },
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS,
    "hunyuan_vl_text": {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1, 1]},
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        **{"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 16, "index_topk_blocks": 3},
    },
    "ministral": HEADS,
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1},
    "longcat_flash": HEADS,
    "molmo2_vision": {"image_size": [32, 32], "head_dim": 8},
    "molmo2_adapter": {"vision_feature_layer": [0], "text_hidden_size": 32, "head_dim": 8},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 32, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 64, "indexer_compress_ratio": 4, "hc_lowrank": 8},
        **{"ple_layer_ids": [1], "ngram_vocab_size_base": 1000, "split_ngram_parts": 1, "heads_per_ngram": 2},
    },
    "step3p5": {"sliding_window": 64},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"mamba_headdim": 8, "n_mamba_heads": 8, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48}},
    "inkling2_vision": {"text_hidden_size": 32},
}
"""Sizes of one family that have to fit each other, or that its configuration has no usual ones for."""
WITH_SECTIONS: Final = frozenset(
    {
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen2_5_omni_text",
        "qwen3_omni_moe_text",
        "glm4v_text",
        "glm4v_moe_text",
        "glm_ocr_text",
        "paddleocr_vl_text",
    }
)
"""Text models that divide rotary frequencies by a default that fits their usual width alone."""
TOKENS: Final = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def config_of(family: str) -> Any:
    """A tiny configuration of the family. Raises what the family's class raises if its sizes do not fit each other."""
    kind = CONFIG_MAPPING[family]
    known = kind()
    return kind(**(whole_sizes(known) if is_composite(known) else text_sizes(known)))


def text_sizes(known: Any) -> dict[str, Any]:
    """Sizes of a tiny model of text, by the names that its usual configuration has."""
    sizes = {name: size for name, size in SIZES.items() if _has(known, name)}
    if "qk_rope_head_dim" in sizes:
        sizes.pop("head_dim", None)  # the sum of two others there
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    rope = known.rope_parameters if _has(known, "rope_parameters") else {}
    # One number of frequencies for time, height and width each.
    if "mrope_section" in rope or known.model_type in WITH_SECTIONS:
        half = int(sizes.get("head_dim", 8) * rope.get("partial_rotary_factor", 1.0)) // 2
        sizes["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    return {**sizes, **TOKENS, **ALSO.get(known.model_type, {})}


def whole_sizes(known: Any) -> dict[str, Any]:
    """Sizes of a tiny model that reads images or sound too: those of its parts, each with its own."""
    sizes: dict[str, Any] = {**_beside(known), **ALSO.get(known.model_type, {})}
    for name in known.sub_configs:
        if (part := getattr(known, name, None)) is not None:
            inner = text_sizes(part) if name == TEXT_CONFIG else whole_sizes(part)
            sizes[name] = {"model_type": part.model_type, **inner, **sizes.get(name, {})}
    return sizes


def _beside(known: Any) -> dict[str, Any]:
    return {name: size for name, size in (SIZES | BESIDE).items() if name in vars(known) and _has(known, name)}


def _has(config: Any, name: str) -> bool:
    kept = getattr(type(config), name, None)
    if isinstance(kept, property) and kept.fset is None:  # follows from others
        return False
    try:
        return getattr(config, name, None) is not None
    except RuntimeError:  # one value a layer
        return True
