"""What was looked at, what it came to, and what to do: one entry for each thing that `gold match` and `check` judge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rewardlab.core.types import Estimate
from rewardlab.report.tables import format_estimate

Status = Literal["fail", "warn", "undecided", "pass"]
ORDER: Final[Sequence[Status]] = ("fail", "warn", "undecided", "pass")
"""Statuses, the gravest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was judged."""

    name: str
    status: Status
    evidence: str
    """The numbers, with their intervals, in a sentence or several."""
    advice: str = ""
    """What to do; empty where nothing is to be done."""
    about: str = ""
    """The proxy, or the file, that it is about."""


def worst(findings: Sequence[Finding]) -> Status:
    """Return the gravest status; `undecided` if nothing was judged."""
    return min((one.status for one in findings), key=ORDER.index, default="undecided")


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if anything failed, else 0."""
    return int(any(one.status == "fail" for one in findings))


def is_above(estimate: Estimate | None, threshold: float) -> bool:
    """Return whether the whole interval lies at or above a threshold; False without an interval."""
    return estimate is not None and estimate.low >= threshold


def is_below(estimate: Estimate | None, threshold: float) -> bool:
    """Return whether the whole interval lies below a threshold; False without an interval."""
    return estimate is not None and estimate.high < threshold


def further(shift: int) -> str:
    """Return where another row is: ``1 row further down``, for a shift of +1."""
    return f"{abs(shift)} row{'s' if abs(shift) > 1 else ''} further {'down' if shift > 0 else 'up'}"


def percent(estimate: Estimate) -> str:
    """Return a share with its interval: ``73.4% [69.5, 77.1]``."""
    return format_estimate(estimate, percent=True)


def points(estimate: Estimate) -> str:
    """Return a difference of shares with its interval: ``1.7 points [-10.4, 13.7]``."""
    return percent(estimate).replace("%", " points")


def number(estimate: Estimate) -> str:
    """Return a number with its interval, with three significant digits."""
    size = max(
        (abs(value) for value in (estimate.value, estimate.low, estimate.high) if math.isfinite(value)), default=1.0
    )
    return format_estimate(estimate, digits=max(0, min(6, 2 - math.floor(math.log10(size)))) if size > 0 else 2)
