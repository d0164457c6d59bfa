"""Where a curve is highest and whether it falls: against slow versions of the tests, and on planted curves."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy.stats import t as student

from rewardlab.analysis import stats
from rewardlab.analysis.turnover import ALPHA, by_prompt, largest_t, turn_over

SIZES = (1, 2, 3, 4, 5)


def values(mean: list[float], *, prompts: int = 60, noise: float = 0.3, seed: int = 0) -> np.ndarray:
    """Curves of prompts about a mean, with errors that grow along the curve and a level of their own."""
    generator = np.random.default_rng(seed)
    steps = generator.normal(size=(prompts, len(mean))) * noise
    return np.array(mean) + np.cumsum(steps, axis=1) + 5 * generator.normal(size=(prompts, 1))


def slow_p(values_CM: np.ndarray, *, draws: int, seed: int) -> float:
    """The larger of two p-values of the largest t statistic, a draw and a column at a time."""
    count = len(values_CM)

    def t_of(sample: np.ndarray, centre: float) -> float:
        error = sample.std(ddof=1) / math.sqrt(count)
        return (sample.mean() - centre) / error if error > 0 else math.copysign(math.inf, sample.mean() - centre)

    generator = np.random.default_rng(seed)
    times = generator.multinomial(count, np.full(count, 1 / count), size=draws)
    plus = generator.integers(0, 2, size=(draws, count), dtype=np.int8)
    seen = max(t_of(column, 0.0) for column in values_CM.T)
    drawn, flipped = [], []
    for row, signs in zip(times, plus, strict=True):
        taken = np.repeat(np.arange(count), row)
        # The error of a draw has the divisor of the bootstrap, which the fast version uses too.
        drawn.append(max(t_of(column[taken], column.mean()) for column in values_CM.T))
        flipped.append(max(t_of(column * (2.0 * signs - 1), 0.0) for column in values_CM.T))
    return max((1 + sum(one >= seen * (1 - 1e-9) for one in own)) / (1 + draws) for own in (drawn, flipped))


@pytest.mark.parametrize("seed", range(4))
def test_the_p_value_is_that_of_a_loop_over_draws_and_columns(seed: int) -> None:
    generator = np.random.default_rng(seed)
    found = generator.exponential(size=(14, 3)) - 0.8 + 0.3 * generator.normal(size=(14, 1))
    assert largest_t(found, draws=199, seed=seed) == slow_p(found, draws=199, seed=seed)


def test_one_column_comes_to_all_patterns_of_signs() -> None:
    generator = np.random.default_rng(1)
    column = generator.normal(size=(11, 1)) + 0.4
    sums = [float(np.dot(signs, column[:, 0])) for signs in product((-1, 1), repeat=11)]
    exact = float(np.mean(np.array(sums) >= column.sum() - 1e-9))
    # The bootstrap t may doubt more, never less than the flips say.
    assert largest_t(column, draws=4_000) >= exact - 0.02
    assert largest_t(column, draws=4_000) <= max(exact, float(student.sf(3.0, 10))) + 0.1


def test_a_curve_that_turns_is_found_with_its_place_and_its_fall() -> None:
    found = turn_over(values([0.0, 1.0, 1.5, 1.0, 0.0]), SIZES)
    assert found.p <= 0.001
    assert found.may_be == (3,)
    assert (found.peak.value, found.peak.low, found.peak.high, found.peak.level) == (3.0, 3.0, 3.0, 0.95)
    assert found.fall.low > 1.2
    assert found.fall.low < 1.5 < found.fall.high
    assert found.fall.level == pytest.approx(1 - 2 * ALPHA)
    assert found.is_gain_shown


def test_a_curve_that_rises_has_no_fall_and_is_highest_at_the_end() -> None:
    found = turn_over(values([0.0, 0.5, 1.0, 1.5, 2.0]), SIZES)
    assert found.p == 1.0
    assert found.may_be == (5,)
    assert (found.fall.value, found.fall.low, found.fall.high) == (0.0, 0.0, 0.0)


def test_a_curve_that_falls_from_the_start_gains_nothing() -> None:
    found = turn_over(values([0.0, -1.0, -2.0, -3.0, -4.0]), SIZES)
    assert found.may_be == (1,)
    assert not found.is_gain_shown
    assert found.p <= 0.001


def test_a_flat_curve_is_highest_anywhere_and_what_may_be_hidden_is_told() -> None:
    found = turn_over(values([0.0] * 5, seed=2), SIZES)
    assert found.may_be == SIZES
    assert found.p > ALPHA
    assert found.fall.low == 0.0
    assert found.fall.high > found.fall.value >= 0
    assert not found.is_gain_shown


@pytest.mark.parametrize("seed", range(12))
def test_a_turn_over_is_told_exactly_where_the_last_size_is_ruled_out_and_the_fall_is_above_zero(seed: int) -> None:
    found = turn_over(values([0.0, 0.3, 0.3, 0.2, 0.05], prompts=25, seed=seed), SIZES, draws=499)
    assert (found.p <= ALPHA) == (5 not in found.may_be) == (found.fall.low > 0)
    assert found.peak.value in found.may_be
    assert found.fall.low <= found.fall.value <= found.fall.high


def test_levels_of_prompts_do_not_matter() -> None:
    plain = values([0.0, 1.0, 0.4, 0.3, 0.2])
    moved = plain + 1e3 * np.arange(60.0)[:, None]
    one, other = turn_over(plain, SIZES, draws=199), turn_over(moved, SIZES, draws=199)
    assert one.may_be == other.may_be
    assert one.p == other.p
    assert one.fall.low == pytest.approx(other.fall.low, abs=1e-9)


def test_a_fall_that_all_prompts_share_to_the_digit_is_certain() -> None:
    found = turn_over(np.tile([0.0, 1.0, 0.25], (12, 1)), (1, 2, 3), draws=99)
    assert found.may_be == (2,)
    assert found.p == 1 / 100
    assert (found.fall.low, found.fall.value, found.fall.high) == (0.75, 0.75, 0.75)


def test_prompts_that_hardly_ever_differ_do_not_look_certain() -> None:
    """Four of fifty prompts fall, or rise: another fifty may hold twice as many, so no fall is ruled out either."""
    for change in (1.0, -1.0):
        curves = np.zeros((50, 2))
        curves[:4, 0] = change
        found = turn_over(curves, (1, 2))
        assert math.isnan(found.p)
        assert math.isnan(found.fall.high)
        assert found.fall.method == "too few prompts that differ (4)"
        assert found.may_be == (1, 2)
        curves[4, 0] = change
        assert not math.isnan(turn_over(curves, (1, 2)).p)


def test_few_prompts_have_no_verdict() -> None:
    found = turn_over(values([0.0, 1.0, 0.0], prompts=9), (1, 2, 3))
    assert math.isnan(found.p)
    assert math.isnan(found.peak.low)
    assert found.may_be == (1, 2, 3)
    assert found.fall.method == "too few prompts (9)"
    assert not found.is_gain_shown


def test_rows_of_one_prompt_are_one_prompt_with_the_error_of_a_ratio() -> None:
    generator = np.random.default_rng(0)
    keys = [f"p{k}" for k in (*range(15), *range(10), *range(5))]
    rows = generator.normal(size=(30, 3))
    found = by_prompt(rows, keys)
    assert found.shape == (15, 3)
    assert found.mean(0) == pytest.approx(rows.mean(0))
    # The ratio estimate's variance by residuals, without its divisor for large prompts.
    sizes = np.array([keys.count(f"p{k}") for k in range(15)])
    sums = np.stack([rows[[i for i, key in enumerate(keys) if key == f"p{k}"]].sum(0) for k in range(15)])
    residuals = sums - rows.mean(0) * sizes[:, None]
    wanted = np.sqrt(np.square(residuals).sum(0) / 30**2)
    assert found.std(axis=0, ddof=0) / math.sqrt(15) == pytest.approx(wanted)
    apart = by_prompt(rows, [str(k) for k in range(30)])
    assert apart is rows
    assert stats.mean(apart[:, 0]).value == pytest.approx(rows[:, 0].mean())
