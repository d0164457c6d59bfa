"""What the runs say about one comparison of a claim, as numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rewardlab.core.types import Estimate

_ROUNDING: Final = 1e-12
"""Sides that differ by less are equal: the difference of 0.7 and 0.6 is not exactly 0.1."""
LEAST: Final = 1e-4
MOST: Final = 1e6
"""Outside of these, numbers are written with powers of ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartVerdict:
    """One comparison of a claim."""

    text: str
    estimate: Estimate
    """By how much the comparison holds (above 0 it does), with the interval of two one-sided tests at α: 90 % for
    5 %, not adjusted for the other hypotheses."""
    terms: Mapping[str, float]
    """Term -> its mean over seeds."""
    p_supported: float
    """One-sided p-value, unadjusted, of the comparison not holding; NaN where the noise is not known."""
    p_refuted: float
    error_seeds: float
    """Standard error from what seeds do not share; NaN where it is not known."""
    error_prompts: float
    """Standard error from prompts that all seeds share."""
    num_seeds: int
    """Seeds of the arm with the fewest."""
    num_prompts: int
    not_covered: str
    """What the interval leaves out; empty if nothing."""
    is_of_these_runs: bool = False
    """Whether it is about the models at hand alone, since an arm has one seed and nothing tells how much another one
    would differ."""


def in_full(part: PartVerdict) -> str:
    """Return what one comparison came to, such as ``a > b holds by 0.02 (90% interval 0.01 to 0.03, t interval)``."""
    estimate = part.estimate
    size = _size_of(part)
    if math.isnan(estimate.value):
        return size
    if math.isnan(estimate.low):
        return f"{size} ({estimate.method})"
    if estimate.low == estimate.high:
        return f"{size} (exact)"
    low, high = _limits_of(part)
    return f"{size} ({estimate.level:.0%} interval {low} to {high}, {estimate.method})"


def brief(part: PartVerdict) -> str:
    """Return the same without level and method, such as ``a > b fails by 0.02 [0.01, 0.03]``."""
    if math.isnan(part.estimate.low):
        return _size_of(part)
    low, high = _limits_of(part)
    return f"{_size_of(part)} [{low}, {high}]"


def _size_of(part: PartVerdict) -> str:
    value = part.estimate.value
    if math.isnan(value):
        return f"{part.text} is not defined at the values seen (a division by 0)"
    if abs(value) < _ROUNDING:
        return f"the sides of {part.text} are equal"
    return f"{part.text} {'holds' if value > 0 else 'fails'} by {_number(abs(value), part.estimate)}"


def _limits_of(part: PartVerdict) -> tuple[str, str]:
    """Return the limits of the size: turned around where the comparison fails."""
    estimate = part.estimate
    low, high = (estimate.low, estimate.high) if estimate.value >= 0 else (-estimate.high, -estimate.low)
    return _number(low, estimate), _number(high, estimate)


def _number(value: float, estimate: Estimate) -> str:
    """Return a number with the decimals of its estimate: three digits of the largest of value and limits.

    One that this would round to 0 keeps a digit of its own, since its sign counts.
    """
    largest = max(abs(one) for one in (estimate.value, estimate.low, estimate.high) if math.isfinite(one))
    if not (math.isfinite(value) and LEAST <= largest < MOST):
        return f"{value:.3g}"
    text = f"{value:,.{max(2 - math.floor(math.log10(largest)), 0)}f}"
    return text if value == 0 or text.strip("-0.,") else f"{value:.1g}"
