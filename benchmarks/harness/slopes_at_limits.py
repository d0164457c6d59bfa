"""Claims on calibration slopes and intercepts, exactly at their limits: found above them, and below."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from harness.near_other_ends import Kind, drawn_tables
from harness.simulation import Rate
from rewardlab.analysis.crossed import Crossed
from rewardlab.analysis.linearised import observed_in
from rewardlab.core.errors import DataError
from rewardlab.experiments.claims import parse
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.verdicts import contrast_of

LEVELS: Final = (0.05, 0.01)
SIZES: Final = ((60, 1), (200, 1), (400, 1), (60, 4))
"""Prompts, and comparisons of each."""
TRUTHS: Final = {"calibration_slope": 1.0, "calibration_intercept": 0.0}
IN_COMMON: Final = 0.5
"""Part of what two arms see that both have in common."""


def slopes_at_limits(draws: int, generator: np.random.Generator) -> Iterator[Rate]:
    """Of a calibrated arm by one and three seeds, and of two arms by one. Draws without a slope find nothing."""
    for quantity in TRUTHS:
        for accuracy in (0.75, 0.9, 0.95, 0.98):
            for arms, seeds in ((1, 1), (1, 3), (2, 1)):
                for prompts, each in SIZES:
                    prompt_N = np.repeat(np.arange(prompts), each)
                    found = [_contrast(quantity, accuracy, arms, seeds, prompt_N, generator) for _ in range(draws)]
                    case = (
                        f"{quantity} of {'an arm' if arms == 1 else 'two arms'}, accuracy {accuracy:g}, "
                        f"{seeds} seed{'s' * (seeds > 1)}, {prompts} prompts of {each}"
                    )
                    yield from _rates(case, [one for one in found if one is not None], draws)


def _rates(case: str, found: list[Crossed], draws: int) -> Iterator[Rate]:
    by_seen = [replace(one, bounded=None) for one in found]
    missing = 1 - len(found) / draws
    for side in ("above", "below"):
        p = np.array([[one.p_above() if side == "above" else one.p_below() for one in own] for own in (found, by_seen)])
        for level in LEVELS:
            rates = ((p <= level).sum(axis=1) / draws).tolist()
            yield Rate(
                case=f"{case}: found {side} at {level:.0%}",
                rate=rates[0],
                low=0.0,
                high=level + 2 * math.sqrt(level * (1 - level) / draws),
                beside={"by the variance seen": rates[1], "without a value": missing},
            )


def _contrast(
    quantity: str, accuracy: float, arms: int, seeds: int, prompt_N: np.ndarray, generator: np.random.Generator
) -> Crossed | None:
    """The claim on one drawn study; None where a seed has no slope."""
    kind = Kind(quantity="accuracy", accuracy=accuracy)
    drawn = drawn_tables(kind, [seeds] * arms, 1.0 if arms == 1 else IN_COMMON, prompt_N, generator)
    try:
        seen = {
            Term(quantity, name): observed_in(quantity, tables, beta=kind.ahead)
            for name, tables in zip("ab", drawn, strict=False)
        }
    except DataError:
        return None
    claim = f"{quantity}(a) > {f'{quantity}(b)' if arms == 2 else TRUTHS[quantity]}"
    return contrast_of(parse(claim).parts[0], seen)
