"""A model that has learned as reward models do: by updates too small for the nearest half-precision value to show."""

from __future__ import annotations

import numpy as np
import torch

from conftest import make_model, make_tokenizer
from rewardlab.artifact.canaries import render_canaries
from rewardlab.batch import pack
from rewardlab.core.types import TokenGroup
from rewardlab.data.chat import Renderer, build_renderer
from rewardlab.data.config import DataConfig
from rewardlab.model.reward import RewardModel


def wide_renderer() -> Renderer:
    """ChatML, with room for all canaries but the longest."""
    return build_renderer(make_tokenizer(), DataConfig(max_seq_len=256))


def _less_than_half_a_step(weight: torch.Tensor) -> torch.Tensor:
    """0.4 of the distance of bfloat16 values about each weight."""
    exponent = torch.floor(torch.log2(weight.abs().clamp(min=1e-30)))
    return 0.4 * torch.exp2(exponent) * torch.finfo(torch.bfloat16).eps


def slightly_trained(model: RewardModel | None = None) -> RewardModel:
    """Weights of a bfloat16 base, each moved by less than half a step so that the canaries' scores rise."""
    model = make_model() if model is None else model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    for _, _, token_ids in render_canaries(wide_renderer()):
        group = TokenGroup(
            preference_id="",
            source="",
            prompt_key="",
            shared=np.zeros(0, np.int32),
            suffixes=(token_ids,),
            prompt_tokens=(0,),
            truncated_tokens=(0,),
            comparisons=(),
        )
        model(pack([group])).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.add_(_less_than_half_a_step(parameter) * parameter.grad.sign())
            parameter.grad = None
    return model
