"""Whether a model has a head that a reward can come from, asked before its weights and any data are read."""

from __future__ import annotations

from typing import Any

import torch

from rewardlab.core.errors import ModelError
from rewardlab.model.disk_class import SEQUENCE_CLASSIFIER
from rewardlab.model.files import CONFIG, told
from rewardlab.model.reward import HEAD_ON_DISK
from rewardlab.model.text_part import text_path


def is_classifier(config: Any) -> bool:
    """Return whether a configuration says that its model has a trained head."""
    return any(SEQUENCE_CLASSIFIER in name for name in config.architectures or [])


def require_one_output(name: str, config: Any, *, new_head: bool) -> None:
    """Raise ModelError if the head of the model at `name` has several outputs and is to be kept."""
    if not is_classifier(config) or config.num_labels == 1 or new_head:
        return
    raise ModelError(
        f"{name}: its head has {config.num_labels} outputs, a reward model has one. Make one of them by `rewardlab "
        f"import --outputs`, or draw a new head with --new-head."
    )


def require_place_for_head(name: str, config: Any, disk_class: Any) -> None:
    """Raise ModelError if models of this class are read in another way than by one linear layer at the last token, or
    if it cannot be told where in them text is read.

    No weights are read: on the meta device they have shapes and take no memory.
    """
    with told(name, f"no model can be built from {CONFIG}"), torch.device("meta"):
        classifier = disk_class._from_config(config, dtype=torch.float32, attn_implementation="eager")
    if not isinstance(getattr(classifier, HEAD_ON_DISK, None), torch.nn.Linear):
        raise not_causal(f"{name}: {disk_class.__name__} has no linear head `{HEAD_ON_DISK}`.")
    text_path(getattr(classifier, disk_class.base_model_prefix))


def not_causal(said: str) -> ModelError:
    """Return the error for a model that is not a decoder."""
    return ModelError(
        f"{said} Encoders, and models with both an encoder and a decoder, are not supported: take a causal model, "
        f"such as Llama, Qwen2, Qwen3, Mistral, Gemma, Phi-3 or GPT-NeoX."
    )


def needs_own_code(name: str) -> ModelError:
    """Return the error for a model of an architecture that transformers does not have."""
    return ModelError(
        f"{name}: its architecture is Python code that comes with the model, and none that transformers has, so no "
        f"reward model can be made of it. Take a model of an architecture that transformers has. To judge this one, "
        f"score the replies with its own code: `rewardlab compare` reads files of scores."
    )
