"""Hidden states of earlier layers, and models cut off after one of them.

The state of layer n is what the head would read if the model ended after n layers: the output of layer n through
the model's own final norm. A head fitted to it belongs to the model cut off after n layers, which is an ordinary
model, and a faster one.

Legend: R replies, N layers, W hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rewardlab.batch import PackedBatch
from rewardlab.core.errors import ConfigError, ModelError
from rewardlab.model.half import HalfWeights
from rewardlab.model.per_layer import layer_overrides
from rewardlab.model.reward import RewardModel
from rewardlab.model.text_part import text_part

FINAL_NORMS: Final = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f")
"""Names that transformers gives to the norm after the last layer."""
SAME: Final = 1e-5
"""Largest allowed difference of norm(last layer) from the backbone's output, relative to its largest entry."""


def resolve_layers(wanted: Sequence[str], num_layers: int) -> list[int]:
    """Return the layer numbers (from 1) that the words `last`, `all` or numbers stand for, in order, each once.

    Raises ConfigError for any other word, and if there is none.
    """
    layers: set[int] = set()
    for word in wanted:
        if word == "all":
            layers |= set(range(1, num_layers + 1))
        elif word == "last":
            layers.add(num_layers)
        elif word.isdecimal() and 1 <= int(word) <= num_layers:
            layers.add(int(word))
        else:
            raise ConfigError(f"--layers {word}: name `last`, `all` or numbers from 1 to {num_layers}.")
    if not layers:
        raise ConfigError("--layers: name at least one, such as `last`.")
    return sorted(layers)


def layer_states(model: RewardModel, batch: PackedBatch, layers: Sequence[int]) -> Float[Tensor, "R N W"]:
    """Return float32 states of the given layers (from 1) at the last token of each reply, from one forward pass.

    Raises ModelError if the backbone's layers or final norm are not where transformers usually has them, or if its
    output is not the final norm of its last layer.
    """
    if list(layers) == [model.config.num_hidden_layers]:
        return model.final_states(batch).float()[:, None]
    stack = decoder_layers(model.backbone)
    read: dict[int, Tensor] = {}

    def keep(number: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            read[number] = model.read(output[0] if isinstance(output, tuple) else output, batch)

        return hook

    hooks = [stack[number - 1].register_forward_hook(keep(number)) for number in {*layers, len(stack)}]
    try:
        final_RW = model.final_states(batch)
    finally:
        for hook in hooks:
            hook.remove()
    # Some architectures change the hidden state once more after the norm, or scale it before. For those norm(layer n)
    # would not be what a model of n layers gives, so the last layer, whose true state is known, is checked every time.
    norm = final_norm(model.backbone)
    difference = (norm(read[len(stack)]) - final_RW).abs().max()
    if final_RW.isfinite().all() and not difference <= SAME * final_RW.abs().max().clamp(min=1) * (
        1 if model.compute_dtype.itemsize >= 4 else 1e3
    ):
        raise ModelError(
            f"{type(model.backbone).__name__}: its output is not its final norm over its last layer, so earlier layers "
            f"cannot be read. Use --layers last."
        )
    return torch.stack([norm(read[number]).float() for number in layers], dim=1)


def cut_off(model: RewardModel, num_layers: int) -> None:
    """Make the model end after `num_layers` layers, in place, and adapt its configuration.

    Raises ModelError if the decoder layers are not in one list, and as `require_cuttable` does.
    """
    require_cuttable(model.config, [num_layers])
    if num_layers == model.config.num_hidden_layers:
        return
    stack = decoder_layers(model.backbone)
    del stack[num_layers:]
    if isinstance(model.half_weights, HalfWeights):
        model.half_weights.forget_others_than(model.backbone)
    config = model.config
    if overrides := layer_overrides(config):
        config.per_layer_config = {layer: own for layer, own in overrides.items() if layer < num_layers}
    total, config.num_hidden_layers = config.num_hidden_layers, num_layers
    for name, value in list(vars(config).items()):
        # Lists with one entry a layer, such as layer_types, have to get shorter with the model.
        if isinstance(value, list) and len(value) == total:
            setattr(config, name, value[:num_layers])


def require_cuttable(text_config: Any, layers: Sequence[int]) -> None:
    """Raise ModelError if a model of this configuration cannot end after each of these layers: in Gemma 3n and 4 one
    matrix holds the embeddings that every layer has of its own, and the last layers take keys of earlier ones.
    """
    joined = any(getattr(text_config, name, 0) for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"))
    if joined and set(layers) != {text_config.num_hidden_layers}:
        raise ModelError(
            f"a model of type {text_config.model_type!r} cannot be cut off after an earlier layer, since its layers "
            f"share weights. Use --layers last."
        )


def require_readable(model: RewardModel) -> None:
    """Raise ModelError if the model's layers or final norm cannot be found; `layer_states` checks the rest."""
    decoder_layers(model.backbone)
    final_norm(model.backbone)


def decoder_layers(backbone: nn.Module) -> nn.ModuleList:
    """Return the list of decoder layers.

    Raises ModelError unless the backbone has exactly one list of as many modules as its configuration has layers.
    """
    return _decoder(backbone)[1]


def final_norm(backbone: nn.Module) -> nn.Module:
    """Return the norm after the last layer, an attribute of the module that holds the list of layers.

    Raises ModelError if there is none with one of the names in FINAL_NORMS.
    """
    holder = _decoder(backbone)[0]
    for name in FINAL_NORMS:
        if isinstance(module := getattr(holder, name, None), nn.Module):
            return module
    raise ModelError(
        f"{type(backbone).__name__}: no final norm is known, so earlier layers cannot be read. Use --layers last."
    )


def _decoder(backbone: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """Return (the module that holds the list of decoder layers, the list).

    Raises ModelError unless there is exactly one such list.
    """
    config: Any = backbone.config  # nn.Module says Tensor
    count = config.get_text_config().num_hidden_layers
    stacks = [
        (module, child)
        for module in text_part(backbone).modules()
        for child in module.children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(stacks) != 1:
        raise ModelError(
            f"{type(backbone).__name__}: it has {len(stacks)} lists of {count} layers, wanted one, so earlier layers "
            f"cannot be read. Use --layers last."
        )
    return stacks[0]
