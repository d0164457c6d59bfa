"""Converts a foreign reward model to rewardlab's form: the same backbone, and a head without bias for the raw score."""

from __future__ import annotations

from typing import Any, Final

import torch

from rewardlab.artifact.foreign.layouts import ForeignModel
from rewardlab.core.errors import ModelError
from rewardlab.model import attention
from rewardlab.model.load import read_classifier, wrap
from rewardlab.model.reward import HEAD_ON_DISK, RewardModel

OF_THE_SOURCE: Final = ("mean", "std", "normalize_reward", "value_head_prefix", "auto_map", "summary_dropout_prob")
"""Fields of a configuration by which a project knows how to read its own head. Our head does not need them, and a
project that finds them would apply them a second time."""


def as_reward_model(source: ForeignModel) -> RewardModel:
    """Load the backbone of `source` in float32 on the CPU and give it the head w / std.

    (w · h + bias − mean) / std is that head's score plus `source.constant`. The constant has no place in the
    sequence-classification classes of transformers, whose heads have no bias, and it cancels in every comparison.

    Raises ModelError if weights of the backbone are missing or damaged.
    """
    options = {} if source.key_mapping is None else {"key_mapping": source.key_mapping}
    classifier, missing, _ = read_classifier(
        source.disk_class,
        str(source.folder),
        attention.padded_implementation(source.config.get_text_config()),
        new_head=len(source.counts) > 1,  # one of another shape, which is written below
        options=options,
    )
    if lost := sorted(missing - {f"{HEAD_ON_DISK}.weight"}):
        listed = ", ".join(lost[:5]) + (" …" if len(lost) > 5 else "")
        raise ModelError(
            f"{source.folder}: weights are missing from the files: {listed}. The folder is "
            f"incomplete, or of another architecture."
        )
    model = in_our_form(classifier)
    with torch.no_grad():
        # Divide in float64, so that the quotient is rounded only once.
        model.head.weight.copy_((source.weight.double() / source.std).float())
    return model


def in_our_form(classifier: Any) -> RewardModel:
    """Return a float32 classifier of transformers as a RewardModel, without what told its project of its head."""
    model = wrap(classifier, layout="padded", compute_dtype=torch.float32).eval()
    config: Any = model.backbone.config
    for name in OF_THE_SOURCE:
        if name in vars(config):
            delattr(config, name)
    return model
