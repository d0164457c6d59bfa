"""The memory that a step keeps for its backward pass, by the formulas of docs/scaling.md. Imports no torch."""

from __future__ import annotations

from typing import Any

from rewardlab.model.per_layer import largest


def layer_bytes_a_token(
    config: Any,
    *,
    lora: bool,
    lora_rank: int = 0,
    keys: float = 1.0,
    checkpointed: bool = False,
    fused_norms: bool = False,
) -> float:
    """Return the bytes a token that a decoder layer keeps, in bf16 with a ragged kernel.

    `config` is that of a model of transformers, or anything with its names. Inputs of matrices and what activation
    functions need are bf16. Norms keep their input in float32, and where they train what they multiply too, but for
    `fused_norms`. Of a gated feed-forward part both factors of the product are kept, and the product where the layer is
    `checkpointed`. `keys` are the keys of a packed row over its tokens: a prompt's are copied for each reply.
    """
    heads = config.num_attention_heads
    width = largest(config, "head_dim") or config.hidden_size // heads
    # Where the configuration has no number of their heads, as GPT-NeoX's, keys have one for each query's.
    grouped = 2 * (largest(config, "num_key_value_heads") or heads) * width
    wide, adapters = (16, 14 * lora_rank) if lora else (16 if fused_norms else 24, 0)
    inner = (6 if checkpointed else 4) * largest(config, "intermediate_size")
    kept = wide * config.hidden_size + inner + 2 * grouped * keys + adapters
    return float(kept + 4 * heads + 8)  # sums of the attention and of the norms


def bytes_a_token(
    config: Any, *, lora_rank: int, checkpointing: str, keys: float = 1.0, fused_norms: bool = False
) -> float:
    """Return the bytes a token that all layers keep; a rank of 0 is all weights. Not for selective checkpointing."""
    checkpointed = checkpointing != "none"
    layer = layer_bytes_a_token(
        config,
        lora=lora_rank > 0,
        lora_rank=lora_rank,
        keys=keys,
        checkpointed=checkpointed,
        fused_norms=fused_norms,
    )
    layers = config.num_hidden_layers
    return float(layers * 4 * config.hidden_size + layer) if checkpointed else float(layers) * layer
