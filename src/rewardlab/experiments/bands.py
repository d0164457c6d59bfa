"""Bands of a quantity: failure, acceptable, success, and which of them an interval allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rewardlab.analysis import json_form
from rewardlab.analysis.crossed import Observed, combined
from rewardlab.core.errors import ConfigError
from rewardlab.core.types import Estimate
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.quantities import clamped, range_of

Band = Literal["failure", "acceptable", "success"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """Two edges: success lies beyond the one, failure beyond the other, what is acceptable between them.

    ``Bands(term=…, failure=0.58, success=0.63)`` rises: success is above 0.63. ``failure=900, success=600`` falls.
    """

    term: Term
    failure: float
    success: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.failure) and math.isfinite(self.success)) or self.failure == self.success:
            raise ConfigError(
                f"bands of {self.term} have the edges {self.failure} (failure) and {self.success} (success); wanted "
                "two different numbers, success above failure where more is better, below it where less is."
            )

    def of(self, value: float) -> Band:
        """Return the band of a value; edges are acceptable."""
        sign = 1 if self.success > self.failure else -1
        if sign * value > sign * self.success:
            return "success"
        return "failure" if sign * value < sign * self.failure else "acceptable"


@dataclass(frozen=True, slots=True, kw_only=True)
class BandVerdict:
    """What the runs say about the bands of one quantity."""

    term: str
    estimate: Estimate
    """Mean over seeds, with an interval over seeds and prompts."""
    by_seed: Mapping[str, float]
    """Seed -> value."""
    at: Band
    """The band of the estimate."""
    allowed: tuple[Band, ...]
    """Every band that the interval touches; all three where there is no interval."""
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON, NaN as null."""
        found: dict[str, Any] = json_form.encode(self)
        return found


def band_verdict(bands: Bands, observed: Observed, *, level: float = 0.95, max_steps: int | None = None) -> BandVerdict:
    """Return which bands the runs of an arm leave open, by the interval of this level.

    `max_steps` are the steps that its runs should have; None where that is not known.
    """
    low, high = range_of(bands.term.quantity)
    found = combined([(observed, 1.0)], observed.mean, reach=high - low)
    estimate = clamped(found.interval(level), bands.term.quantity, max_steps=max_steps)
    order: tuple[Band, ...] = ("failure", "acceptable", "success")
    if math.isnan(estimate.low):
        allowed = order
        why = f" no interval ({estimate.method}), so no band is excluded"
    else:
        first, last = sorted((order.index(bands.of(estimate.low)), order.index(bands.of(estimate.high))))
        allowed = order[first : last + 1]
        why = f" {level:.0%} interval {estimate.low:.4g} to {estimate.high:.4g}, {estimate.method}"
    at = bands.of(estimate.value)
    said = (
        allowed[0] if len(allowed) == 1 else f"{at}, but {' or '.join(one for one in allowed if one != at)} is possible"
    )
    return BandVerdict(
        term=str(bands.term),
        estimate=estimate,
        by_seed={str(seed): value for seed, value in zip(observed.seeds, observed.by_seed_S.tolist(), strict=True)},
        at=at,
        allowed=allowed,
        sentence=f"{bands.term} is {estimate.value:.4g}: {said} ({why.strip()}).",
    )
