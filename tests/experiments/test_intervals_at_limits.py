"""Intervals of tables, bands and searches, where a number shows less variance than the truth beside it would have."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binom

from rewardlab.analysis.crossed import Observed
from rewardlab.core.types import Estimate
from rewardlab.experiments.bands import Bands, band_verdict
from rewardlab.experiments.claims import parse
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.reporting.numbers import contrast, mean_of
from rewardlab.experiments.verdicts import contrast_of

PAIRS = 100


def right(count: int) -> Observed:
    """Accuracy of one seed that ranks so many of the pairs rightly."""
    outcome_1C = (np.arange(PAIRS) < count).astype(float)[None]
    return Observed(
        by_seed_S=outcome_1C.mean(1),
        seeds=(0,),
        influence_SC=(outcome_1C - outcome_1C.mean()) / PAIRS,
        clusters=tuple(f"{number:03}" for number in range(PAIRS)),
    )


def in_a_table(observed: Observed) -> Estimate:
    return mean_of("accuracy", [observed])


def in_bands(observed: Observed) -> Estimate:
    return band_verdict(Bands(term=Term("accuracy", "a"), failure=0.5, success=0.9), observed).estimate


@pytest.mark.parametrize("shown", [in_a_table, in_bands])
@pytest.mark.parametrize("truth", [0.9, 0.95, 0.98])
def test_an_accuracy_near_1_is_held_as_often_as_told(truth: float, shown: Callable[[Observed], Estimate]) -> None:
    held = 0.0
    for count in range(60, PAIRS + 1):
        estimate = shown(right(count))
        held += binom.pmf(count, PAIRS, truth) * (estimate.low <= truth <= estimate.high)
    assert held >= 0.93, "by the variance seen 87.7 % of the draws hold 0.95"


@pytest.mark.parametrize("count", [92, 98])
def test_a_table_says_what_the_verdict_beside_it_says(count: int) -> None:
    a, b = right(count), right(90)
    claim = parse("accuracy(a) > accuracy(b)")
    in_verdict = contrast_of(claim.parts[0], {Term("accuracy", "a"): a, Term("accuracy", "b"): b})
    in_table = contrast("accuracy", [a], [b])
    assert (in_table.p_above(), in_table.p_below()) == (in_verdict.p_above(), in_verdict.p_below())
    assert in_table.interval(0.95) == in_verdict.interval(0.95)
    low = in_table.interval(0.95).low
    assert not math.isnan(low)
    assert in_table.p_above(low) == pytest.approx(0.025, abs=1e-6)


def test_the_difference_of_an_arm_that_lost_its_seeds_has_the_noise_of_the_others() -> None:
    a, b = right(90), Observed(by_seed_S=np.array([0.6, 0.7, 0.8]), seeds=(0, 1, 2), row_error=0.01)
    alone = contrast("accuracy", [a], [a])
    found = contrast("accuracy", [a], [b])
    assert alone.single_seeds
    assert not found.single_seeds
    assert sorted(part.variance for part in found.seeds) == pytest.approx([0.01 / 3, 0.01])
    assert "noise as of other arms" in found.method
