"""Opens a frozen model to read its states: for probes, for controls and for searches for wrong labels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rewardlab.artifact.base import Base, decide_computing
from rewardlab.model.config import BackboneConfig, ComputeConfig, ModelConfig
from rewardlab.model.layers import require_readable
from rewardlab.model.load import choose_layout, load_reward_model
from rewardlab.model.reward import AttentionLayout, RewardModel

logger = logging.getLogger("rewardlab")


@dataclass(frozen=True, kw_only=True)
class Decided:
    """How a frozen model is computed here."""

    layout: AttentionLayout
    device: torch.device
    settings: dict[str, Any]
    """Settings by their flat names: arithmetic, attention, kernels, how control tokens are read."""


def decide_frozen(base: Base, model: BackboneConfig, compute: ComputeConfig, *, max_length: int) -> Decided:
    """Return how a frozen model is computed on this machine. Raises ConfigError as `decide_computing` does."""
    layout = choose_layout(base.config, base.disk_class, model, max_length=max_length, share=True, log=logger.info)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = decide_computing(base, model, compute, layout=layout, device=device, train=False)
    return Decided(layout=layout, device=device, settings=settings)


def load_frozen(
    base: Base, model: BackboneConfig, compute: ComputeConfig, layers: Sequence[int], *, decided: Decided, seed: int
) -> RewardModel:
    """Return the model with a new head, computed as was `decided`.

    Raises ModelError if it cannot be loaded, or if the states of `layers` cannot be read.
    """
    opened = load_reward_model(
        base.path,
        ModelConfig(
            model=model.model,
            attention=model.attention,
            precision=model.precision,
            trust_remote_code=model.trust_remote_code,
            new_head=True,
        ),
        compute,
        seed=seed,
        layout=decided.layout,
        device=decided.device,
        log=_log_but_head,
    )
    if list(layers) != [opened.config.num_hidden_layers]:
        require_readable(opened)
    return opened


def _log_but_head(line: str) -> None:
    """Log a line about loading, unless it is about the head, which is not used here."""
    if not line.startswith(("head:", "parameters:")):
        logger.info(line)
