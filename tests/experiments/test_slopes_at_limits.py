"""Claims on calibration slopes and intercepts are tested with what prompts would vary if the limit were the truth."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import t as student

from rewardlab.analysis.crossed import Crossed, Observed
from rewardlab.analysis.crossed_slopes import Slopes
from rewardlab.analysis.linearised import observed_in
from rewardlab.analysis.logistic import Fit, logistic
from rewardlab.analysis.score_table import score_table
from rewardlab.core.types import ScoreRow
from rewardlab.experiments.claims import parse
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.verdicts import contrast_of
from scored import rows_of


def calibrated(
    accuracy: float,
    prompts: int,
    generator: np.random.Generator,
    *,
    each: int = 1,
    seeds: int = 1,
    name: str = "calibration_slope",
) -> Observed:
    """A coefficient of a calibrated arm, whose seeds see nearly the same; `each` pairs of a prompt are alike by 0.7."""
    ahead = math.sqrt(2) * NormalDist().inv_cdf(accuracy)
    alike = math.sqrt(0.7 if each > 1 else 0.0)
    common = [
        alike * np.repeat(generator.normal(size=prompts), each)
        + math.sqrt(1 - alike**2) * generator.normal(size=prompts * each)
        for _ in range(2)
    ]
    tables = {}
    for seed in range(seeds):
        own = generator.normal(size=(2, prompts * each)) if seeds > 1 else np.zeros((2, prompts * each))
        sides = math.sqrt(0.9) * np.stack(common) + math.sqrt(0.1) * own if seeds > 1 else np.stack(common)
        rows: list[ScoreRow] = rows_of(np.stack([sides[0] + ahead, sides[1]], axis=1))
        rows = [replace(row, prompt_key=f"{number // (2 * each):03}") for number, row in enumerate(rows)]
        tables[seed] = score_table(rows)
    return observed_in(name, tables, beta=ahead)


def held_against(text: str, **arms: Observed) -> Crossed:
    """The only comparison of a claim."""
    [part] = parse(text).parts
    return contrast_of(part, {term: arms[term.arm] for term in part.terms})


def test_one_arm_by_one_seed_is_tested_by_its_score_and_the_skewness_of_that() -> None:
    one = calibrated(0.95, 80, np.random.default_rng(4))
    [fit] = one.fits
    x = fit.x_N
    student_variance = 80 / 79 * float(np.square(x * (1 - expit(one.mean * x))).sum())
    vary = expit(one.mean * x) * expit(-one.mean * x)
    excess = max(student_variance / (np.square(x) @ vary), 1.0)
    for limit in (0.4, 0.8, 3.0, 6.0):
        p = expit(limit * x)
        information = float(np.square(x) @ (p * (1 - p)))
        score = float(x @ (1 - p)) / math.sqrt(excess * information)
        found = held_against(f"calibration_slope(a) > {limit}", a=one)
        by_score = float(student.sf(abs(score), 79))
        if score > 0:
            ahead = (one.mean - limit) / math.sqrt(found.variance)
            assert found.p_above() == pytest.approx(max(by_score, float(student.sf(ahead, 79))), rel=1e-6)
            continue
        skewness = float((x**3) @ (p * (1 - p) * (2 * p - 1))) / information**1.5 * math.sqrt(excess)
        quantile, skewness = student.isf(found.p_below(), 79), min(skewness, 2.0)
        assert abs(score) == pytest.approx(quantile + skewness / 6 * (quantile**2 - 1), rel=1e-6)


def test_the_likeliest_arms_at_a_limit_are_moved_by_their_variances() -> None:
    generator = np.random.default_rng(5)
    sharp, blunt = calibrated(0.97, 60, generator), calibrated(0.75, 60, generator)
    found = held_against("calibration_slope(a) > calibration_slope(b)", a=sharp, b=blunt)
    assert isinstance(found.bounded, Slopes)
    moved = found.bounded._moved(0.0)
    assert moved[0] - moved[1] == pytest.approx(-found.value)
    own = [float(np.square(np.asarray(one.influence_SC)).sum()) for one in (sharp, blunt)]
    assert moved[0] / moved[1] == pytest.approx(-own[0] / own[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accuracy", "prompts", "each", "above", "before"),
    [(0.98, 60, 1, False, 0.08), (0.95, 60, 1, False, 0.06), (0.95, 60, 4, True, 0.08), (0.98, 60, 4, True, 0.07)],
)
def test_a_slope_at_its_limit_is_found_beyond_it_no_more_often_than_it_may(
    accuracy: float, prompts: int, each: int, above: bool, before: float
) -> None:
    generator, p = np.random.default_rng(6), []
    for _ in range(300):
        try:
            one = calibrated(accuracy, prompts, generator, each=each)
        except ValueError:
            continue  # no pair is lost, so there is no slope
        found = held_against("calibration_slope(a) > 1", a=one)
        both = found, replace(found, bounded=None)
        p.append([each_one.p_above() if above else each_one.p_below() for each_one in both])
    rates = (np.array(p) <= 0.05).sum(axis=0) / 300
    assert rates[0] <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 300)
    assert rates[1] > before, "by the variance seen it would be"


@pytest.mark.parametrize("name", ["calibration_slope", "calibration_intercept"])
@pytest.mark.parametrize(("accuracy", "seeds"), [(0.95, 1), (0.75, 1), (0.95, 3)])
def test_the_interval_says_what_the_p_value_says(name: str, accuracy: float, seeds: int) -> None:
    one = calibrated(accuracy, 60, np.random.default_rng(8), seeds=seeds, name=name)
    shown = held_against(f"{name}(a) > 0", a=one).interval(0.9)
    for limit, of in ((shown.low, Crossed.p_above), (shown.high, Crossed.p_below)):
        assert of(held_against(f"{name}(a) > {limit}", a=one)) == pytest.approx(0.05, rel=1e-4)
    assert shown.low < shown.value < shown.high


def test_of_many_lost_comparisons_next_to_nothing_changes() -> None:
    one = calibrated(0.7, 4_000, np.random.default_rng(9))
    found = held_against("calibration_slope(a) > 1", a=one)
    assert found.bounded is None, "the variance seen is as good"
    by_scores = replace(found, bounded=Slopes(parts=((one, 1.0),), value=found.value))
    assert found.interval(0.9).low == pytest.approx(by_scores.interval(0.9).low, abs=0.004)
    assert found.interval(0.9).high == pytest.approx(by_scores.interval(0.9).high, abs=0.004)


def test_labels_that_are_the_model_s_own_probabilities_vary_by_nothing() -> None:
    x = np.linspace(-3, 3, 40)
    found = logistic(x[:, None], expit(x))
    assert found is not None
    fit = Fit(x_N=x, y_N=expit(x), offset_N=np.zeros(40), clusters_N=np.arange(40), value=float(found[0][0]))
    assert [fit.times_at(by) for by in (-1.0, 0.0, 1.0)] == [1.0, 1.0, 1.0]
    assert fit.third_at(1.0) == 0.0


def test_a_claim_that_has_other_numbers_besides_a_slope_is_tested_too() -> None:
    one = calibrated(0.9, 60, np.random.default_rng(10))
    margin = calibrated(0.9, 60, np.random.default_rng(10), name="margin")
    [part] = parse("calibration_slope(a) > margin(a) - 1").parts
    found = contrast_of(part, {Term("calibration_slope", "a"): one, Term("margin", "a"): margin})
    assert 0 < found.p_above() < 1
    assert found.interval(0.9).low < found.value


@pytest.mark.parametrize("prompts", [40, 400])
@pytest.mark.parametrize("other", ["accuracy", "loss", "ece"])
@pytest.mark.parametrize("name", ["calibration_slope", "calibration_intercept"])
def test_a_number_beside_which_the_other_hardly_varies_has_an_interval(name: str, other: str, prompts: int) -> None:
    generator = np.random.default_rng(11)
    of_both = [calibrated(0.9, prompts, generator, seeds=2, name=quantity) for quantity in (name, other)]
    [part] = parse(f"{name}(a) - {other}(b) > -80").parts
    found = contrast_of(part, {Term(name, "a"): of_both[0], Term(other, "b"): of_both[1]})
    assert found.p_above() < 0.01  # two seeds show their own noise by one degree of freedom
    assert found.interval(0.9).low < found.value < found.interval(0.9).high
