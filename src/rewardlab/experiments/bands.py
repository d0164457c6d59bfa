"""Bands of a quantity: failure, acceptable, success; the range in which it is expected; and what an interval allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from rewardlab.analysis import json_form
from rewardlab.analysis.crossed import Observed
from rewardlab.core.errors import ConfigError
from rewardlab.core.types import Estimate
from rewardlab.experiments.at_limits import weighed_sum
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.quantities import clamped

Verdict = Literal["failure", "acceptable", "success"]
Place = Literal["below", "inside", "above"]
VERDICTS: Final[tuple[Verdict, ...]] = ("failure", "acceptable", "success")
PLACES: Final[tuple[Place, ...]] = ("below", "inside", "above")
_Name = TypeVar("_Name", Verdict, Place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """Two edges, a range, or both.

    Success lies beyond the one edge, failure beyond the other, what is acceptable between them:
    ``Bands(term=…, failure=0.58, success=0.63)`` rises, success is above 0.63; ``failure=900, success=600`` falls. The
    range is where the quantity is expected: a run that is far better than expected is outside, too.
    """

    term: Term
    failure: float | None = None
    success: float | None = None
    expected: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        edges = [edge for edge in (self.failure, self.success) if edge is not None]
        if edges and (not all(map(math.isfinite, edges)) or len(set(edges)) < 2):
            raise ConfigError(
                f"bands of {self.term} have the edges {self.failure} (failure) and {self.success} (success); wanted "
                "two different numbers, success above failure where more is better, below it where less is."
            )

    def of(self, value: float) -> Verdict:
        """Return the band of a value; edges are acceptable."""
        assert self.failure is not None
        assert self.success is not None
        sign = 1 if self.success > self.failure else -1
        if sign * value > sign * self.success:
            return "success"
        return "failure" if sign * value < sign * self.failure else "acceptable"

    def place(self, value: float) -> Place:
        """Return where a value lies beside what is expected; the ends of the range are inside."""
        assert self.expected is not None
        low, high = self.expected
        return "below" if value < low else "above" if value > high else "inside"


@dataclass(frozen=True, slots=True, kw_only=True)
class BandVerdict:
    """What the runs say about the bands of one quantity."""

    term: str
    estimate: Estimate
    """Mean over seeds, with an interval over seeds and prompts."""
    by_seed: Mapping[str, float]
    """Seed -> value."""
    at: Verdict | None
    """The band of the estimate; None where the plan names no edges."""
    allowed: tuple[Verdict, ...]
    """Every band that the interval touches; all three where there is no interval."""
    place: Place | None
    """Where the estimate lies beside what was expected; None where the plan expects nothing."""
    places: tuple[Place, ...]
    """Every such place that the interval touches; all three where there is no interval."""
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON, NaN as null."""
        found: dict[str, Any] = json_form.encode(self)
        return found


def band_verdict(bands: Bands, observed: Observed, *, level: float = 0.95, max_steps: int | None = None) -> BandVerdict:
    """Return which bands the runs of an arm leave open, by the interval of this level.

    `max_steps` are the steps that its runs should have; None where that is not known.
    """
    found = weighed_sum([(bands.term.quantity, observed, 1.0)], observed.mean)
    estimate = clamped(found.interval(level), bands.term.quantity, max_steps=max_steps)
    if math.isnan(estimate.low):
        why = f"no interval ({estimate.method}), so no band is excluded"
    else:
        why = f"{level:.0%} interval {estimate.low:.4g} to {estimate.high:.4g}, {estimate.method}"
    has_edges = bands.failure is not None
    at, allowed = _touched(estimate, bands.of, VERDICTS) if has_edges else (None, ())
    place, places = (None, ()) if bands.expected is None else _touched(estimate, bands.place, PLACES)
    said = [] if at is None else [told(at, allowed, joined=", but ")]
    if place is not None and bands.expected is not None:
        said.append(f"{told(place, places, joined=', but ')}: {bands.expected[0]:g} to {bands.expected[1]:g} expected")
    return BandVerdict(
        term=str(bands.term),
        estimate=estimate,
        by_seed={str(seed): value for seed, value in zip(observed.seeds, observed.by_seed_S.tolist(), strict=True)},
        at=at,
        allowed=allowed,
        place=place,
        places=places,
        sentence=f"{bands.term} is {estimate.value:.4g}: {'; '.join(said)} ({why}).",
    )


def _touched(
    estimate: Estimate, of: Callable[[float], _Name], order: tuple[_Name, ...]
) -> tuple[_Name, tuple[_Name, ...]]:
    """Return the part of a scale in which an estimate lies, and all parts that its interval touches, in their order."""
    if math.isnan(estimate.low):
        return of(estimate.value), order
    first, last = sorted((order.index(of(estimate.low)), order.index(of(estimate.high))))
    return of(estimate.value), order[first : last + 1]


def told(at: str, allowed: Sequence[str], *, joined: str = "; ") -> str:
    """Return in words where an estimate lies, and where its interval lets it be besides."""
    others = [one for one in allowed if one != at]
    return f"{at}{joined}{' or '.join(others)} is possible" if others else at
