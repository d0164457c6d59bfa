"""The class in which a reward model is saved: a `…ForSequenceClassification` of transformers, or one that is made here.

Transformers has such a class for about half of its causal families. For the others a class is made of its parts, with
the names that vLLM looks for: vLLM reads a `GraniteForSequenceClassification` as its own Granite with a head.
"""

from __future__ import annotations

import copyreg
from functools import cache
from typing import Any, Final

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)
from transformers.modeling_layers import GenericForSequenceClassification

from rewardlab.core.errors import ModelError

SEQUENCE_CLASSIFIER: Final = "ForSequenceClassification"
_CAUSAL: Final = "ForCausalLM"


def disk_class_of(config: Any) -> Any:
    """Return the `…ForSequenceClassification` class for a configuration (of transformers); see `is_made`.

    Raises ModelError if transformers has no causal model of text for the model type.
    """
    kind: Any = type(config)
    if kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[kind]
    if (name := _causal_name(config)) is None:
        raise ModelError(
            f"transformers has neither a sequence-classification class nor a causal model of text alone for model "
            f"type {config.model_type!r}, so no reward model can be made of it. Use a model that has one, such as "
            f"Llama, Qwen2, Qwen3, Mistral, Gemma, Phi-3 or GPT-NeoX."
        )
    return _made(kind, name.removesuffix(_CAUSAL) + SEQUENCE_CLASSIFIER)


def is_made(disk_class: Any) -> bool:
    """Return whether `disk_class_of` made the class, since transformers has none for the family.

    A folder of such a class is read by rewardlab and by vLLM, but not by `AutoModelForSequenceClassification`.
    """
    return isinstance(disk_class, _MadeClass)


def is_foreign(disk_class: Any) -> bool:
    """Return whether a class is Python code that came with a model."""
    return not (disk_class.__module__.startswith("transformers.models.") or is_made(disk_class))


def _causal_name(config: Any) -> str | None:
    """Return the name of the family's causal class; None unless its backbone is a decoder of text alone."""
    kind = type(config)
    decodes_alone = config.get_text_config() is config and not getattr(config, "is_encoder_decoder", False)
    sees_or_hears = any(word in part for part in kind.sub_configs for word in ("audio", "image", "vision"))
    if sees_or_hears or not decodes_alone or kind not in MODEL_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    name: str = MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__
    return name if name.endswith(_CAUSAL) else None


class _MadeClass(type):
    """The type of classes that are made here. They stand in no module, so pickle makes them again."""

    config_class: Any


@cache
def _made(config_class: Any, name: str) -> Any:
    """Make the class, once for each class of configurations, so that equal models have one class."""
    backbone = MODEL_MAPPING[config_class]
    # The family's own base class knows its kernels, how weights are drawn, and what stays together when it is sharded.
    family = next(kind for kind in backbone.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    parts = {
        # Transformers judges a class by its module: whether weights are renamed when they are read, how they are drawn,
        # and whether experts are multiplied together.
        "__module__": backbone.__module__,
        "__doc__": f"{backbone.__name__} with a head, as transformers has it for other families.",
        "config_class": config_class,
        "base_model_prefix": backbone.base_model_prefix,
    }
    return _MadeClass(name, (GenericForSequenceClassification, family), parts)


copyreg.pickle(_MadeClass, lambda made: (_made, (made.config_class, made.__name__)))
