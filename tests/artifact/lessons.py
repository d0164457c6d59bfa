"""A model that has learned as reward models do: by updates too small for the nearest half-precision value to show."""

from __future__ import annotations

from common import make_model, make_tokenizer
from harness.tiny import learn_slightly
from rewardlab.data.chat import Renderer
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.model.reward import RewardModel


def wide_renderer() -> Renderer:
    """ChatML, with room for all canaries but the longest."""
    return build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=256))


def slightly_trained(model: RewardModel | None = None) -> RewardModel:
    """`learn_slightly`, of a tiny model."""
    return learn_slightly(make_model() if model is None else model, wide_renderer())
