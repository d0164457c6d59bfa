"""The part of a model that reads text: all of its backbone, or one module of it in a model that reads images too.

A model that reads images or sound beside text is kept whole. Its text model computes and trains by itself; what reads
the rest is frozen and saved as it was. So a token that stands for an image is one like any other, since no text has an
image in its place.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, Final

import torch
from torch import nn
from transformers import MODEL_MAPPING, PreTrainedModel
from transformers.generation import GenerationMixin

from rewardlab.core.errors import ModelError

TEXT_CONFIG: Final = "text_config"
"""Name of the text model's configuration in that of a model that reads images too."""
NAMES: Final = ("language_model", "text_model", "model")
"""Names of the text model, by which one of several modules with its configuration is chosen."""


def is_composite(config: Any) -> bool:
    """Return whether a configuration of transformers has another one inside for its text model."""
    return config.get_text_config() is not config


def text_path(backbone: nn.Module) -> str:
    """Return the path of the text model in a backbone; "" for one that reads text alone.

    Raises ModelError if it cannot be told which module the text model is.
    """
    config: Any = getattr(backbone, "config", None)  # a layer by itself has none
    if config is None or not is_composite(config):
        return ""
    kind = type(config.get_text_config())
    found: dict[str, Any] = {
        path: module
        for path, module in backbone.named_modules()
        if path and isinstance(module, PreTrainedModel) and type(module.config) is kind
    }
    outermost = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    named = [path for name in NAMES for path in outermost if path.rpartition(".")[2] == name]
    if len(outermost) == 1 or named:
        path: str = (named or outermost)[0]
        if found[path].base_model is not found[path]:
            raise ModelError(
                f"{type(backbone).__name__}: its text model is a {type(found[path]).__name__}, which gives words and "
                f"no states, so no head can be put on it. Use a model of text alone."
            )
        return path
    raise ModelError(
        f"{type(backbone).__name__}: it has {len(outermost)} modules with the configuration of its text model, wanted "
        f"one, so no reward model can be made of it. Use a model of text alone."
    )


def text_part(backbone: nn.Module) -> nn.Module:
    """Return the text model of a backbone, or the backbone itself. Raises ModelError as `text_path` does."""
    return backbone.get_submodule(text_path(backbone))


def freeze_other_parts(backbone: nn.Module) -> list[str]:
    """Freeze all parts beside the text model, and return the paths of the modules that hold them, sorted."""
    if not (path := text_path(backbone)):
        return []
    frozen = set()
    for name, parameter in backbone.named_parameters():
        if not name.startswith(f"{path}."):
            parameter.requires_grad_(False)
            frozen.add(_beside(name, path))
    return sorted(frozen)


def _beside(name: str, path: str) -> str:
    """Return the start of a weight's name up to where it leaves the path of the text model."""
    words, others = name.split("."), path.split(".")
    same = next((place for place, word in enumerate(words) if place >= len(others) or word != others[place]), 0)
    return ".".join(words[: same + 1])


def for_text(config_class: Any, implementation: str) -> str | dict[str, str]:
    """Return how to ask transformers for this attention in the text model; other parts keep their own."""
    return {TEXT_CONFIG: implementation} if TEXT_CONFIG in config_class.sub_configs else implementation


def with_pad(config: Any, pad: int) -> dict[str, Any]:
    """Return the entries of a configuration with this pad token, also for its text model, where transformers looks."""
    values: dict[str, Any] = config.to_dict()
    if is_composite(config):
        values[TEXT_CONFIG]["pad_token_id"] = pad
    return values | {"pad_token_id": pad}


def backbone_of(config: Any, disk_class: Any, implementation: str) -> Any:
    """Build a backbone of text with random weights by the configuration of a text model, for a class that may be that
    of a model that reads images too.
    """
    if disk_class.config_class is type(config):
        model = disk_class._from_config(config, dtype=torch.float32, attn_implementation=implementation)
        return getattr(model, disk_class.base_model_prefix)
    kind = text_class(config, disk_class.config_class)
    return kind._from_config(config, dtype=torch.float32, attn_implementation=implementation)


def text_class(text_config: Any, config_class: Any) -> Any:
    """Return the class of the text model with this configuration in a model with a configuration of a class."""
    kind: Any = type(text_config)
    return listed_class(kind) or _unlisted(kind, config_class)


def listed_class(kind: Any) -> Any | None:
    """Return the class of backbones that transformers lists for a class of configurations, if there is one."""
    try:
        return MODEL_MAPPING[kind]
    except (KeyError, ValueError):  # ValueError: under a name that it does not have
        return None


@cache
def _unlisted(kind: Any, config_class: Any) -> Any:
    """Return the class of a text model that transformers does not list for itself, by its own configuration's class.

    It is found by that class among those beside the whole model's, or else in a whole model of usual sizes: of some
    families these lack what no model can be built without.
    """
    whole = MODEL_MAPPING[config_class]
    models: list[Any] = [
        one
        for one in vars(sys.modules[whole.__module__]).values()
        if isinstance(one, type) and issubclass(one, PreTrainedModel) and not issubclass(one, GenerationMixin)
    ]
    beside = [one for one in models if one.config_class is kind and not one.__name__.endswith("PreTrainedModel")]
    first = [one for one in beside if not any(other in beside for other in one.__mro__[1:])]
    if len(first) == 1:
        return first[0]
    with torch.device("meta"):
        return type(text_part(whole._from_config(config_class())))
