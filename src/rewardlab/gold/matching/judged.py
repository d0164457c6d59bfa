"""What verdicts on a proxy are reached by: what is known about it, and the thresholds that several of them share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from rewardlab.analysis.matching import Match
from rewardlab.core.types import Estimate
from rewardlab.gold.matching.order import Alternative, Order
from rewardlab.gold.matching.runs import RunFacts

POOR_TEST: Final = 0.7
"""Match on test rows below which a proxy is poor: with good training accuracy it does not generalise, without it has
hardly learned (such ones were seen around 0.66)."""
CHANCE: Final = 0.5
MORE_TRAINING: Final = "Train it again with --lr 5e-5 and --epochs 2, and look at the loss from step to step."
"""Advice that repaired such a run."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What is known about one proxy."""

    name: str
    test: Match
    train: Match | None
    order: Order
    train_order: Order | None
    run: RunFacts | None
    template: str = ""
    """What its folder says about the template and the system turn, beside the rows; empty without a folder."""
    template_differs: bool = False
    """Whether the system turn of the rows differs from the one that its folder adds."""
    texts: tuple[Alternative, ...] | None = None
    """The match on some rows with another system turn; None where nothing could be scored again."""
    is_of_training: bool = False
    """Whether `test` and `order` are of the training rows, because there are no others."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Thresholds that settings move."""

    good_match: float = 0.8
    least_spread: float = 0.25


def more_prompts(estimate: Estimate) -> str:
    """Return the advice where an interval decides nothing, or where there is none."""
    if math.isnan(estimate.low):
        return f"There is no interval ({estimate.method}). Label more prompts."
    return "The interval holds the threshold: label more prompts (four times as many halve it)."
