"""Reading a model before its last layer, and cutting it off there.

The state of layer n is what the head would read if the model ended after n layers: the output of layer n through
the model's own final norm. A head fitted to it belongs to the model cut off after n layers, which is a model like
any other, and a faster one.

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
from rewardlab.model.reward import RewardModel

FINAL_NORMS: Final = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f")
"""Names that transformers gives to the norm after the last layer."""
SAME: Final = 1e-5
"""How far norm(last layer) may be from the backbone's own output, relative to its largest entry."""


def resolve_layers(wanted: Sequence[str], num_layers: int) -> list[int]:
    """`last`, `all` or numbers from 1 -> layer numbers in order, each once.

    Raises ConfigError for anything else.
    """
    found: set[int] = set()
    for word in wanted:
        if word == "all":
            found |= set(range(1, num_layers + 1))
        elif word == "last":
            found.add(num_layers)
        elif word.isdecimal() and 1 <= int(word) <= num_layers:
            found.add(int(word))
        else:
            raise ConfigError(f"--layers {word}: name `last`, `all` or numbers from 1 to {num_layers}.")
    if not found:
        raise ConfigError("--layers: name at least one, such as `last`.")
    return sorted(found)


def layer_states(model: RewardModel, batch: PackedBatch, layers: Sequence[int]) -> Float[Tensor, "R N W"]:
    """States of the named layers (from 1) at the last token of each reply, in float32, from one forward pass.

    Raises ModelError for a backbone whose layers or final norm are not where transformers usually has them.
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
    """Make the model end after `num_layers` layers, in place."""
    if num_layers == model.config.num_hidden_layers:
        return
    stack = decoder_layers(model.backbone)
    del stack[num_layers:]
    if isinstance(model.half_weights, HalfWeights):
        model.half_weights.forget_others_than(model.backbone)
    config = model.config
    total, config.num_hidden_layers = config.num_hidden_layers, num_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == total:  # such as layer_types: one entry a layer
            setattr(config, name, value[:num_layers])


def require_readable(model: RewardModel) -> None:
    """Raise ModelError unless layers before the last can be read, as far as can be told without a forward pass."""
    decoder_layers(model.backbone)
    final_norm(model.backbone)


def decoder_layers(backbone: nn.Module) -> nn.ModuleList:
    """The list of decoder layers.

    Raises ModelError if there is not exactly one list of that length.
    """
    return _decoder(backbone)[1]


def final_norm(backbone: nn.Module) -> nn.Module:
    """The norm after the last layer, which stands beside the list of layers.

    Raises ModelError if there is none of a known name.
    """
    holder = _decoder(backbone)[0]
    for name in FINAL_NORMS:
        if isinstance(module := getattr(holder, name, None), nn.Module):
            return module
    raise ModelError(
        f"{type(backbone).__name__}: no final norm is known, so earlier layers cannot be read. Use --layers last."
    )


def _decoder(backbone: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """(the module that holds the list of decoder layers, the list)."""
    config: Any = backbone.config  # nn.Module says Tensor
    count = config.get_text_config().num_hidden_layers
    found = [
        (module, child)
        for module in backbone.modules()
        for child in module.children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(found) != 1:
        raise ModelError(
            f"{type(backbone).__name__}: {len(found)} lists of {count} layers, so earlier layers cannot be read. "
            f"Use --layers last."
        )
    return found[0]
