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
ENOUGH_RATE: Final = 5e-5
ENOUGH_EPOCHS: Final = 2
"""Learning rate and epochs that repaired proxies which had hardly learned."""


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
    test_built: Estimate | None = None
    """Match on those pairs of the test rows that `gold build` made comparisons of, as its run was judged by; None where
    these are all pairs, or not known."""
    train_built: Estimate | None = None
    """The same of the training rows."""
    least_loss: float = 0.0
    """The lowest loss that the labels of its run allow, as they are soft; 0 where they are certain or not known."""
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


def more_training(run: RunFacts | None) -> str:
    """Return the advice for a proxy that has learned too little: of rate and epochs, what its run did not have."""
    rate = None if run is None else run.learning_rate
    epochs = math.nan if run is None else run.epochs
    flags = [] if rate is not None and rate >= ENOUGH_RATE else ["--lr 5e-5"]
    flags += [] if epochs >= ENOUGH_EPOCHS - 1e-6 else ["--epochs 2"]
    if flags:
        return f"Train it again with {' and '.join(flags)}, and look at the loss from step to step."
    return (
        f"Its run had --lr {rate:g} and {epochs:.3g} epochs, which is enough elsewhere. Look at the loss from step to "
        f"step, check the pairs with `rewardlab gold check`, and try a larger proxy."
    )
