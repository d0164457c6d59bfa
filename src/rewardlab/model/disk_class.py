"""The class in which a reward model is saved: a `…ForSequenceClassification` of transformers, or one that is made here.

Transformers has such a class for about half of its causal families. For the others a class is made of its parts, with
the names that vLLM looks for: vLLM reads a `GraniteForSequenceClassification` as its own Granite with a head. Models
that read images or sound too are kept whole: a `Mistral3ForSequenceClassification` has the vision tower of Mistral 3.
"""

from __future__ import annotations

import copyreg
from functools import cache
from typing import Any, Final

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)
from transformers.modeling_layers import GenericForSequenceClassification

from rewardlab.core.errors import ModelError
from rewardlab.model.text_part import TEXT_CONFIG, is_composite

SEQUENCE_CLASSIFIER: Final = "ForSequenceClassification"
UNFIT: Final = frozenset({"blip", "kosmos-2", "kosmos-2.5"})
"""Families whose text model sees later tokens unless it is told otherwise, or counts positions from its pad token,
which is another one in a reward model."""
_CAUSAL: Final = "ForCausalLM"
_GENERATES: Final = (_CAUSAL, "ForConditionalGeneration")
"""What the names of generating classes end in."""


def disk_class_of(config: Any) -> Any:
    """Return the `…ForSequenceClassification` class for a configuration (of transformers); see `is_made`.

    Raises ModelError if transformers has no causal model of text for the model type, by itself or in one that reads
    images or sound too.
    """
    kind: Any = type(config)
    if kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[kind]
    if kind in MODEL_MAPPING and MODEL_MAPPING[kind].__name__.endswith(_GENERATES):
        raise ModelError(
            f"model type {config.model_type!r}: transformers has no backbone of it without the output layer, so no "
            f"head can take that layer's place. Use its text model alone, model type "
            f"{config.get_text_config().model_type!r}: load it by AutoModelForCausalLM and save it to a folder."
        )
    if (name := _whole_name(config) if is_composite(config) else _causal_name(config)) is None:
        raise ModelError(
            f"transformers has neither a sequence-classification class nor a causal model of text for model type "
            f"{config.model_type!r}, so no reward model can be made of it. Use a model that has one, such as Llama, "
            f"Qwen2, Qwen3, Mistral, Gemma, Phi-3 or GPT-NeoX."
        )
    return _made(kind, name + SEQUENCE_CLASSIFIER)


def name_for_engines(disk_class: Any) -> str:
    """Return what config.json calls a disk class: by this name vLLM finds the family's generating class.

    It is the name of the class but for text models of Gemma 3 and Qwen3.5, whose classes transformers calls by `Text`
    and vLLM does not.
    """
    kind, name = disk_class.config_class, str(disk_class.__name__)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__ if kind in MODEL_FOR_CAUSAL_LM_MAPPING else ""
    return causal.removesuffix(_CAUSAL) + SEQUENCE_CLASSIFIER if causal.endswith(_CAUSAL) else name


def is_made(disk_class: Any) -> bool:
    """Return whether `disk_class_of` made the class, since transformers has none for the family.

    A folder of such a class is read by rewardlab and by vLLM, but not by `AutoModelForSequenceClassification`.
    """
    return isinstance(disk_class, _MadeClass)


def is_foreign(disk_class: Any) -> bool:
    """Return whether a class is Python code that came with a model."""
    return not (disk_class.__module__.startswith("transformers.models.") or is_made(disk_class))


def _causal_name(config: Any) -> str | None:
    """Return the name of a family whose backbone is a decoder of text alone, without what it does; else None."""
    kind = type(config)
    sees_or_hears = any(word in part for part in kind.sub_configs for word in ("audio", "image", "vision"))
    if sees_or_hears or getattr(config, "is_encoder_decoder", False) or kind not in MODEL_MAPPING:
        return None
    name = MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__ if kind in MODEL_FOR_CAUSAL_LM_MAPPING else ""
    return name.removesuffix(_CAUSAL) if name.endswith(_CAUSAL) else None


def _whole_name(config: Any) -> str | None:
    """Return the name of a family that reads images or sound too, without what it does; None unless a decoder reads
    its text.
    """
    kind, text = type(config), config.get_text_config()
    if config.model_type in UNFIT:
        return None
    decodes = not any(getattr(one, "is_encoder_decoder", False) for one in (config, text))
    if not decodes or TEXT_CONFIG not in kind.sub_configs or kind not in MODEL_MAPPING:
        return None
    mappings = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
    name = next((mapping[kind].__name__ for mapping in mappings if kind in mapping), "")
    return next((name.removesuffix(word) for word in _GENERATES if name.endswith(word)), None)


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
        "base_model_prefix": backbone.base_model_prefix or "model",
    }
    _rename_as_for(name.removesuffix(SEQUENCE_CLASSIFIER), name)
    return _MadeClass(name, (GenericForSequenceClassification, family), parts)


def _rename_as_for(family: str, name: str) -> None:
    """Have transformers read weights of the class called `name` by the names that a family's generating class has for
    them in files, where these are rules of that class alone (Qwen2-VL).
    """
    try:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )
    except ImportError:  # other versions of transformers keep their rules elsewhere
        return
    rules = next((found for word in _GENERATES if (found := get_checkpoint_conversion_mapping(family + word))), None)
    if rules and get_checkpoint_conversion_mapping(name) is None:
        register_checkpoint_conversion_mapping(name, rules)


copyreg.pickle(_MadeClass, lambda made: (_made, (made.config_class, made.__name__)))
