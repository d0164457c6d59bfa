"""Settings of a configuration that may have another value at each layer, such as Gemma 4's widths of heads. No torch.

Transformers raises an error where such a setting is read without saying of which layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def layer_configs(config: Any) -> Sequence[Any]:
    """Return the configurations of the layers: [`config`] where all layers have its settings."""
    if not getattr(config, "is_heterogeneous", False):
        return [config]
    return [config.per_layer_config[number] for number in range(config.num_hidden_layers)]


def layer_overrides(config: Any) -> dict[int, dict[str, Any]]:
    """Return the settings that layers have for themselves, by the numbers of the layers; none where all are alike."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    return {int(layer): dict(own) for layer, own in config.to_dict()["per_layer_config"].items()}


def largest(config: Any, name: str) -> Any:
    """Return a setting, or its largest value where it is one number a layer; None if it has none, or it is None."""
    values = [value for one in layer_configs(config) if (value := getattr(one, name, None)) is not None]
    return values[0] if len(values) == 1 else max(values, default=None)
