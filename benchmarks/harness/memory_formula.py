"""What docs/scaling.md says that a step takes of a device's memory, as numbers."""

from __future__ import annotations

from typing import Any


def layer_bytes_a_token(config: Any, *, lora: bool, lora_rank: int = 0, keys: float = 1.0) -> float:
    """Activations of a decoder layer that are kept for the backward pass, in bf16 with a ragged kernel.

    Inputs of matrices and what activation functions need are bf16. Norms keep their input in float32, and where the
    embeddings train the row that the layers add to is float32 too. `keys` are the keys of a packed row over its tokens:
    a prompt's are copied for each reply.
    """
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    grouped = 2 * config.num_key_value_heads * width
    wide, adapters = (24, 14 * lora_rank) if lora else (26, 0)
    kept = wide * config.hidden_size + 8 * config.intermediate_size + 2 * grouped * keys + adapters
    return kept + 4 * heads + 8  # sums of the attention and of the norms


def predict(
    config: Any,
    *,
    trained: int,
    frozen: int,
    multiplied: int,
    tokens: int,
    keys: float,
    lora_rank: int,
    checkpointing: str,
) -> dict[str, float]:
    """Bytes by what they are for, of a step in bf16 on one device, one micro-batch at a time.

    `trained` and `frozen` are numbers of weights, `multiplied` those of the layers' matrices that train. Not for
    selective checkpointing.
    """
    lora = lora_rank > 0
    layer = layer_bytes_a_token(config, lora=lora, lora_rank=lora_rank, keys=keys)
    boundary = (2 if lora else 4) * config.hidden_size
    layers = config.num_hidden_layers
    kept = layers * layer if checkpointing == "none" else layers * boundary + layer
    return {
        "weights": 4.0 * trained + 2.0 * frozen,
        "gradients": 4.0 * trained,
        "moments": 8.0 * trained,
        "copies": 2.0 * multiplied,  # kept from step to step
        "activations": kept * tokens,
    }
