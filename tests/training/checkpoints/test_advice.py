"""What a run advises when its saved scores differ from its live ones."""

from __future__ import annotations

import pytest

from rewardlab.training.checkpoints.model_folders import _what_to_do
from rewardlab.training.settings.config import RewardTrainerConfig


@pytest.mark.parametrize(
    ("saved", "flags", "advice"),
    [
        ("bfloat16", {"precision": "bf16"}, "--save-dtype float32 saves the weights as they are"),
        ("float16", {"precision": "fp32"}, "--save-dtype float32 saves the weights as they are"),
        ("float32", {"precision": "fp32"}, ""),
        ("float32", {"precision": "bf16", "half_rounding": "nearest"}, "--half-rounding stochastic"),
        ("float32", {"precision": "bf16", "half_rounding": "stochastic"}, "--precision fp32"),
    ],
)
def test_the_advice_about_rounding_is_one_that_changes_something(saved, flags, advice):
    said = _what_to_do(saved, RewardTrainerConfig.of(model="m", dataset="d", **flags))
    assert advice in said
    assert bool(said) == bool(advice)
    assert ("--save-dtype" in said) == (saved != "float32")
