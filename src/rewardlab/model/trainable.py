"""Choice of the weights that train: all of them, upper layers, adapters, or the head alone. The head always trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rewardlab.core.errors import ModelError
from rewardlab.core.values import require
from rewardlab.model import lora
from rewardlab.model.config import ModelConfig
from rewardlab.model.frozen import is_held_half, read_wide
from rewardlab.model.layers import decoder_layers
from rewardlab.model.quantization import num_weights
from rewardlab.model.reward import RewardModel
from rewardlab.model.rounding import round_weights
from rewardlab.model.text_part import freeze_other_parts


def require_layers(config: ModelConfig, text_config: Any) -> None:
    """Raise ConfigError if --freeze-layers leaves no layer to train."""
    count = text_config.num_hidden_layers
    require(
        config.freeze_layers < count,
        f"--freeze-layers {config.freeze_layers}: the model has {count} layers, so at most {count - 1} can be frozen; "
        f"--train-head-only freezes all of them.",
    )


def choose_trainable(model: RewardModel, config: ModelConfig, *, seed: int) -> None:
    """Freeze the weights that are not to train, and add adapters, drawn from `seed`, if they are asked for.

    Raises ModelError for names that the model does not have, and if the layers to freeze cannot be found.
    """
    if config.lora:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model.draws = lora.add_adapters(model.backbone, config)
    elif config.train_head_only:
        model.backbone.requires_grad_(False)
    elif config.freeze_layers:
        _freeze_first(model.backbone, config.freeze_layers)
    if not config.lora:
        freeze_other_parts(model.backbone)


def _freeze_first(backbone: nn.Module, count: int) -> None:
    """Freeze every embedding and the first `count` decoder layers.

    Raises ModelError if the decoder layers are not in one list.
    """
    try:
        layers = decoder_layers(backbone)
    except ModelError as error:
        raise ModelError(
            f"--freeze-layers {count}: the layers of {type(backbone).__name__} are not in one list, so their order is "
            f"not known. Leave the flag out, or use --lora or --train-head-only."
        ) from error
    embeddings = [module for module in backbone.modules() if isinstance(module, nn.Embedding)]
    for module in [*embeddings, *layers[:count]]:
        module.requires_grad_(False)


def half_frozen(backbone: nn.Module, dtype: torch.dtype) -> bool:
    """Hold frozen matrices in `dtype`, the one they are computed in; norms, biases and weights that train are left.

    They are rounded stochastically by their names, as for a file: rounding to the nearest would undo most of an earlier
    training (model/rounding.py). Embeddings give float32 all the same (model/frozen.py).

    Returns whether any value was changed. Weights read from a file in this dtype are not. Weights that are still empty
    do not count, since they cannot be compared.
    """
    rounded = False
    for path, module in backbone.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad or not is_held_half(module, parameter):
                continue
            weight, name = parameter.data, f"backbone.{lora.bare_name(f'{path}.{own}'.lstrip('.'))}"
            held = weight.to(dtype) if weight.is_meta else round_weights(weight, dtype, name)
            rounded = rounded or not (held.is_meta or torch.equal(held.to(parameter.dtype), parameter.data))
            parameter.data = held
        read_wide(module, dtype)
    return rounded


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return (number of trainable weights, number of all weights)."""
    counts = [(num_weights(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(count for count, trains in counts if trains), sum(count for count, _ in counts)


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Return the numbers of `trainable` and of all weights (`total`), by these names."""
    return dict(zip(("trainable", "total"), count_parameters(model), strict=True))


def parameters_line(model: RewardModel) -> str:
    """Return the line of the log that says how many weights train, and with adapters how many of which kind."""
    trainable, total = count_parameters(model)
    line = f"parameters: {trainable:,} of {total:,} trained ({trainable / total:.2%})"
    if not lora.has_adapters(model):
        return line
    adapters = sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and lora.is_adapter(name))
    head = sum(parameter.numel() for parameter in model.head.parameters())
    return f"{line}: adapters {adapters:,}, modules to save {trainable - adapters - head:,}, head {head:,}"
