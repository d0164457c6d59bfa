"""Intervals hold the truth as often as they say, where the methods that come to mind first do not.

All draws of a case are computed at once. A share of draws that is 0.93 to 0.97 in truth lies within `ROOM` of it; the
older method, under the same bounds, has to fail, so each case can tell them apart.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import coverage
from harness import simulated
from harness.simulated import LOSSES, MARGINS, UNEVEN, Totals
from rewardlab.analysis import calibration
from rewardlab.analysis.intervals import Limits, loss_limits, mean_limits, share_limits, wilson_limits

DRAWS = 2000
ROOM = 3 * math.sqrt(0.95 * 0.05 / DRAWS)
"""Three standard errors of a coverage."""


def covered(limits: Limits, truth: float) -> float:
    return float(np.mean((limits.low <= truth) & (truth <= limits.high)))


def holds(limits: Limits, truth: float) -> bool:
    return 0.93 - ROOM <= covered(limits, truth) <= 0.97 + ROOM


def new(formula, totals: Totals) -> Limits:
    return formula(totals.sums, totals.squares, totals.sizes, level=0.95)


@pytest.mark.parametrize(
    ("prompts", "shape", "alike", "truth"),
    [
        (15, "2 each", 0.0, 0.97),
        (25, "2 each", 0.2, 0.9),
        (25, "8 each", 0.2, 0.97),
        (40, "8 each", 0.8, 0.97),
        (40, UNEVEN, 0.2, 0.7),
    ],
)
def test_an_accuracy_by_prompt(prompts, shape, alike, truth):
    generator = np.random.default_rng(0)
    sizes = simulated.sizes(shape, DRAWS, prompts, generator)
    totals = simulated.outcomes(sizes, truth, alike, generator)
    assert holds(new(share_limits, totals), truth)
    assert not holds(coverage.student_limits(totals, share=True), truth)
    if shape != "2 each":
        total = totals.sizes.sum(-1)
        assert not holds(wilson_limits(totals.sums.sum(-1) / total, total, level=0.95), truth), "as if independent"


@pytest.mark.parametrize(("n", "truth"), [(10, 0.97), (25, 0.97)])
def test_a_share_of_means_near_one(n, truth):
    generator = np.random.default_rng(0)
    chance = generator.beta(2 * truth, 2 * (1 - truth), size=(DRAWS, n))
    totals = Totals.alone(generator.binomial(3, chance) / 3)
    assert holds(new(share_limits, totals), truth)
    assert not holds(coverage.student_limits(totals, share=True), truth)


@pytest.mark.parametrize("name", ["NLL, calibrated", "NLL, overconfident", "Brier score"])
@pytest.mark.parametrize("n", [15, 25])
def test_a_mean_of_losses(name, n):
    shape = LOSSES[name]
    totals = Totals.alone(shape.draw(np.random.default_rng(1).normal(size=(DRAWS, n))))
    assert holds(new(loss_limits, totals), shape.mean)
    if name != "NLL, calibrated":
        assert not holds(coverage.student_limits(totals), shape.mean)


@pytest.mark.parametrize("alike", [0.0, 0.2, 0.8])
def test_a_mean_over_prompts_of_very_unequal_size(alike):
    generator = np.random.default_rng(0)
    sizes = simulated.sizes(UNEVEN, DRAWS, 25, generator)
    losses = simulated.values(sizes, LOSSES["NLL, calibrated"], alike, generator)
    truth = LOSSES["NLL, calibrated"].mean
    assert covered(new(loss_limits, losses), truth) > 0.93 - ROOM
    assert covered(coverage.student_limits(losses), truth) < 0.93 - ROOM


def test_a_mean_of_any_shape():
    """Student's interval is for what is symmetric, Hall's for what is skewed; the wider limits are for both."""
    generator = np.random.default_rng(0)
    skewed, heavy = MARGINS["exponential, skewness 2"], MARGINS["Student, 3 degrees of freedom"]
    for shape, without in ((skewed, coverage.student_limits), (heavy, lambda totals: new(loss_limits, totals))):
        totals = Totals.alone(shape.draw(generator.normal(size=(2 * DRAWS, 15))))
        assert holds(new(mean_limits, totals), shape.mean)
        assert covered(without(totals), shape.mean) < 0.93


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("n", "spread", "sharpness"), [(40, 1.5, 1.0), (40, 1.5, 3.0), (100, 3.0, 1.5), (500, 1.5, 1.3)]
)
def test_an_expected_calibration_error(n, spread, sharpness, monkeypatch):
    """The basic bootstrap reaches 0.87 to 0.89 in the last three."""
    monkeypatch.setattr(calibration, "NUM_NOISE_DRAWS", 400)
    generator, draws = np.random.default_rng(2), 400
    truth = simulated.true_ece(spread, sharpness)
    found = [calibration.ece_estimate(*simulated.judged(n, spread, sharpness, generator)) for _ in range(draws)]
    limits = coverage.limits_of(found)
    assert covered(limits, truth if sharpness != 1.0 else 0.0) >= 0.93 - 3 * math.sqrt(0.95 * 0.05 / draws)
    assert (limits.low <= limits.value).all()
    assert (limits.value <= limits.high).all()
    told_from_calibrated = np.mean(limits.low > 0)
    assert told_from_calibrated < 0.07 if sharpness == 1.0 else told_from_calibrated > 0.07
