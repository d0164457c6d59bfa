"""What a model's attention computes, apart from which tokens of a packed row belong together.

Legend: H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

TRIAL_WINDOW: Final = 48
"""The window with which kernels are tried for a model that has windows: short enough to matter on a small row."""
WITH_SINKS: Final = frozenset({"gpt_oss"})
"""Types of model (`model_type` of transformers) whose attention has sinks; nothing in a configuration says so."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Formula:
    """One layer's attention: softmax(scale · q · k) over the keys that a token may see, times the values."""

    scale: float | None = None
    """Factor of the logits; None for 1 / sqrt(head width)."""
    softcap: float | None = None
    """Logits become softcap · tanh(logit / softcap), as in Gemma 2."""
    window: int | None = None
    """How many tokens a token sees, itself among them: a sliding window. None for all in front of it."""
    sinks: Float[Tensor, " H"] | None = None
    """For each head a logit that takes its share of the softmax and has no value, as in GPT-OSS."""

    @property
    def is_plain(self) -> bool:
        """Return whether PyTorch's own attention, under a mask, computes it."""
        return self.softcap is None and self.sinks is None

    def scale_for(self, width: int) -> float:
        """Return the factor of the logits of heads of this width."""
        return width**-0.5 if self.scale is None else self.scale


def formulas_of(text_config: Any, *, device: torch.device | str = "cpu") -> list[Formula]:
    """Return the formulas by which kernels are tried for a model: without a window, and with one if it has windows.

    Sinks are random numbers.
    """
    softcap = getattr(text_config, "attn_logit_softcapping", None)
    sinks = None
    if text_config.model_type in WITH_SINKS:
        draw = torch.Generator().manual_seed(0)
        sinks = torch.randn(text_config.num_attention_heads, generator=draw).to(device)
    window = getattr(text_config, "sliding_window", None)
    windows = [None] if not window else [None, min(window, TRIAL_WINDOW)]
    return [Formula(softcap=softcap, window=window, sinks=sinks) for window in windows]
