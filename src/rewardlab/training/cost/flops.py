"""Counts what a micro-batch costs a RewardModel: tokens, padding, model FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from torch import nn

from rewardlab.batch import PackedBatch
from rewardlab.core.errors import ModelError
from rewardlab.model.layers import decoder_layers, final_norm
from rewardlab.model.per_layer import layer_configs
from rewardlab.model.quantization import num_weights, weight_shape
from rewardlab.model.reward import RewardModel
from rewardlab.training.cost.throughput import ModelShape, Work


def shape_of(model: RewardModel) -> ModelShape:
    """Return what decides the model's FLOPs, read from its weights and its configuration."""
    config = model.config
    weights = {True: 0.0, False: 0.0}
    last = {True: 0, False: 0}
    for parameter, share in _multiplied(model.text_part, _expert_share(config)):
        weights[parameter.requires_grad] += num_weights(parameter) * share
    if model.read_only_where_scored is not None:
        for parameter, _ in _multiplied(model.read_only_where_scored, 1.0):
            last[parameter.requires_grad] += num_weights(parameter)
    idle = idle_layers(model.text_part)
    idle_weights = sum(
        num_weights(parameter) * share
        for layer in idle
        for parameter, share in _multiplied(layer, _expert_share(config))
    )
    window = getattr(config, "sliding_window", None) or 0
    # A configuration without `layer_types` has the same kind of attention in all layers.
    every = "sliding_attention" if window and getattr(config, "use_sliding_window", True) else "full_attention"
    kinds = list(getattr(config, "layer_types", None) or [every] * config.num_hidden_layers)
    windowed = kinds.count("sliding_attention") if window else 0
    widths = [_attention_width(layer) for layer in layer_configs(config)]
    return ModelShape(
        frozen_weights=round(weights[False]),
        trained_weights=round(weights[True]),
        last_frozen=last[False],
        last_trained=last[True],
        head_weights=model.head.weight.numel(),
        attention_width=sum(widths) // len(widths),
        full_layers=kinds.count("full_attention"),
        windowed_layers=windowed,
        window=window,
        idle_weights=round(idle_weights),
        idle_full_layers=kinds[: len(idle)].count("full_attention"),
        idle_windowed_layers=kinds[: len(idle)].count("sliding_attention") if window else 0,
    )


def _attention_width(config: Any) -> int:
    """Return the width of a layer's queries; 0 in a model of recurrent layers alone, which has no heads."""
    heads: int = getattr(config, "num_attention_heads", None) or 0
    return heads and heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


def idle_layers(backbone: nn.Module) -> list[nn.Module]:
    """Return the layers below everything that trains, through which no gradient passes; none where that is unknown."""
    try:
        layers = list(decoder_layers(backbone))
        above = {id(parameter) for module in (*layers, final_norm(backbone)) for parameter in module.parameters()}
    except ModelError:
        return []
    # Something outside the layers trains, embeddings say, so gradients pass through all layers.
    if any(parameter.requires_grad and id(parameter) not in above for parameter in backbone.parameters()):
        return []
    return list(takewhile(lambda layer: not any(p.requires_grad for p in layer.parameters()), layers))


def linear_shapes(model: RewardModel) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of the backbone's matrices; those of the head if it has none."""
    shapes = [weight_shape(parameter)[-2:] for parameter, _ in _multiplied(model.backbone, 1.0)]
    return [(outputs, inputs) for outputs, inputs in shapes or [tuple(model.head.weight.shape)]]


def work_of_head(batch: PackedBatch, shape: ModelShape) -> Work:
    """Return the work of a micro-batch whose states are known: no tokens, and the FLOPs of the head alone."""
    return Work(model_flops=6 * batch.num_replies * shape.head_weights)


def _multiplied(backbone: nn.Module, expert_share: float) -> Iterator[tuple[nn.Parameter, float]]:
    """Yield every matrix that tokens are multiplied with, and the share of the tokens for which that holds."""
    # Embeddings are looked up by index, which takes no FLOPs.
    looked_up = {id(module.weight) for module in backbone.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in backbone.named_parameters():
        if parameter.ndim >= 2 and id(parameter) not in looked_up:
            yield parameter, expert_share if ".experts." in name else 1.0


def _expert_share(config: object) -> float:
    """Return the share of a layer's experts that a token visits; 1 for models without experts."""
    chosen = getattr(config, "num_experts_per_tok", None)
    total = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return chosen / total if chosen and total else 1.0


def work_of(batch: PackedBatch, shape: ModelShape, *, layout: str, row_tokens: int | None = None) -> Work:
    """Return the work of a micro-batch. One without indices is a dummy, all of which counts as padding.

    `row_tokens` is the length with which a packed row is computed, where it is more than the row has
    (RewardModel.row_length).
    """
    lengths = [shared + own for shared, suffixes in batch.groups for own in suffixes]
    groups = batch.groups if layout != "padded" else [(0, (length,)) for length in lengths]
    computed = (row_tokens or batch.num_tokens) if layout != "padded" else max(lengths) * len(lengths)
    needed = sum(shared + sum(suffixes) for shared, suffixes in groups)
    if not batch.indices:
        return Work(computed_tokens=computed, padding_tokens=computed)
    return Work(
        computed_tokens=computed,
        padding_tokens=computed - needed,
        unshared_tokens=sum(lengths),
        model_flops=shape.flops(groups),
    )
