"""Means of bounded values against Wilson's and Tango's tests, and how often they are found where nothing is there."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import ndtr

from rewardlab.analysis import stats
from rewardlab.analysis.bounded import Bounded, Moves
from rewardlab.analysis.intervals import loss_limits, mean_limits, student_limits, wilson_limits


def of_outcomes(outcomes_C, *, shift: float = 0.0) -> Bounded:
    """The mean of outcomes in [0, 1] of as many prompts of one size, plus `shift`."""
    outcomes_C = np.asarray(outcomes_C, dtype=np.float64)
    count, mean = outcomes_C.size, outcomes_C.mean()
    moves = Moves(
        moved_C=(outcomes_C - mean) / count,
        down_C=np.full(count, -mean / count),
        up_C=np.full(count, (1 - mean) / count),
    )
    return Bounded.of([(moves, 1.0)], mean + shift)


def of_changes(first_C, second_C, *, margin: float) -> Bounded:
    """The second mean minus the first, plus `margin`."""
    moves = []
    for outcomes_C in (np.asarray(second_C, dtype=np.float64), np.asarray(first_C, dtype=np.float64)):
        count, mean = outcomes_C.size, outcomes_C.mean()
        moves.append(
            Moves(
                moved_C=(outcomes_C - mean) / count,
                down_C=np.full(count, -mean / count),
                up_C=np.full(count, (1 - mean) / count),
            )
        )
    return Bounded.of([(moves[0], 1.0), (moves[1], -1.0)], float(np.mean(second_C) - np.mean(first_C)) + margin)


@pytest.mark.parametrize(("right", "count"), [(1, 12), (7, 12), (29, 30), (140, 200)])
def test_single_outcomes_have_wilsons_interval(right: int, count: int) -> None:
    own = of_outcomes([1.0] * right + [0.0] * (count - right), shift=0.25)
    wanted = wilson_limits(np.array([right / count]), np.array([float(count)]), level=0.9)
    assert own.low(0.05) == pytest.approx(float(wanted.low[0]) + 0.25, abs=1e-9)
    assert own.high(0.05) == pytest.approx(float(wanted.high[0]) + 0.25, abs=1e-9)


@pytest.mark.parametrize(("lost", "won", "count"), [(1, 0, 60), (2, 1, 100), (9, 4, 200), (0, 3, 80)])
def test_paired_outcomes_have_tangos_test(lost: int, won: int, count: int) -> None:
    first_C = np.array([1.0] * lost + [0.0] * won + [1.0] * (count - lost - won))
    second_C = np.array([0.0] * lost + [1.0] * won + [1.0] * (count - lost - won))
    # The likeliest shares of losses and wins whose difference is the margin, by search.
    margin = 0.06

    def unlikely(share_lost: float) -> float:
        share_won = share_lost - margin
        terms = ((lost, share_lost), (won, share_won), (count - lost - won, 1 - share_lost - share_won))
        return -sum(number * math.log(share) for number, share in terms if number)

    at = minimize_scalar(unlikely, bounds=(margin + 1e-12, 0.5), method="bounded", options={"xatol": 1e-13}).x
    variance = (at + (at - margin) - margin**2) / count
    ahead = (won - lost) / count + margin
    wanted = float(ndtr(-ahead / math.sqrt(variance)))
    assert of_changes(first_C, second_C, margin=margin).p_above(0.0) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("count", [10, 40, 90])
def test_values_that_agree_show_no_more_than_that_none_is_at_the_end(count: int) -> None:
    own = of_outcomes(np.ones(count))
    for limit in (0.6, 0.9, 0.97):
        assert own.p_above(limit) >= limit**count * (1 - 1e-9) or own.p_above(limit) == 0.5
    assert own.low(0.05) <= 0.05 ** (1 / count) + 1e-9
    assert own.high(0.05) == pytest.approx(1.0)
    assert own.p_above(1.0) == 0.5


@pytest.mark.parametrize("tail", [0.001, 0.025, 0.2])
def test_limits_are_where_the_p_value_is_the_tail(tail: float) -> None:
    generator = np.random.default_rng(0)
    own = of_changes(generator.random(50).round(1), generator.random(50).round(1), margin=0.1)
    assert own.p_above(own.low(tail)) == pytest.approx(tail, rel=1e-6)
    assert own.p_below(own.high(tail)) == pytest.approx(tail, rel=1e-6)
    assert own.least < own.low(tail) < own.mean < own.high(tail) < own.most
    p = [own.p_above(limit) for limit in np.linspace(own.least, own.most, 101)]
    assert p == sorted(p)


def test_turned_values_have_turned_limits() -> None:
    generator = np.random.default_rng(1)
    outcomes_C = (generator.random(30) < 0.9).astype(float)
    own, turned = of_outcomes(outcomes_C), of_outcomes(1 - outcomes_C)
    assert own.low(0.05) == pytest.approx(1 - turned.high(0.05), abs=1e-9)
    assert own.p_above(0.7) == pytest.approx(turned.p_below(0.3))


def test_prompts_of_two_arms_that_share_none_count_for_the_arm_that_they_are_of() -> None:
    # All of 20 prompts are right in the first arm, all of 20 others in the second.
    here_C, away_C = np.repeat([1.0, 0.0], 20), np.repeat([0.0, 1.0], 20)
    moves = [Moves(moved_C=np.zeros(40), down_C=-one_C / 20, up_C=np.zeros(40)) for one_C in (here_C, away_C)]
    own = Bounded.of([(moves[0], 1.0), (moves[1], -1.0)], 0.0)
    assert own.p_above(-0.1) >= 0.9**20 * 0.9
    assert own.least == pytest.approx(-2.0)


@pytest.mark.parametrize("alpha", [0.05, 0.01])
@pytest.mark.parametrize("count", [30, 60, 120, 300])
def test_a_loss_of_the_margin_is_taken_for_a_smaller_one_about_as_often_as_told(count: int, alpha: float) -> None:
    generator = np.random.default_rng(2)
    drawn = generator.binomial(count, 0.03, size=2000)
    found = 0
    for lost, times in zip(*np.unique(drawn, return_counts=True), strict=True):
        second_C = np.repeat([0.0, 1.0], [lost, count - lost])
        found += times * (of_changes(np.ones(count), second_C, margin=0.03).p_above(0.0) <= alpha)
    assert found / 2000 <= 1.3 * alpha + 2 * math.sqrt(alpha * (1 - alpha) / 2000)


@pytest.mark.parametrize("tail", [0.05, 0.005])
def test_losses_have_the_p_values_of_the_interval_of_a_loss_too(tail: float) -> None:
    losses = np.random.default_rng(3).exponential(size=40)
    moves = Moves(moved_C=(losses - losses.mean()) / 40, down_C=np.zeros(40), up_C=np.full(40, 5 / 40))
    own = Bounded.of([(moves, 1.0)], float(losses.mean()), is_skewed=True)
    wanted = stats.mean_loss(losses, level=1 - 2 * tail)
    low, high = own.skewed_limits(tail)
    assert (low, high) == pytest.approx((wanted.low, wanted.high))
    assert own.p_skewed(low)[0] == pytest.approx(tail)
    assert own.p_skewed(high)[1] == pytest.approx(tail)
    plain = Bounded.of([(moves, 1.0)], float(losses.mean()))
    assert plain.p_skewed(high) == (0.0, 0.0)
    assert plain.skewed_limits(tail) == (math.inf, -math.inf)


@pytest.mark.parametrize(("shift", "limit", "share"), [(-0.25, 0.5, 0.75), (-2.0, -1.6, 0.4), (3.0, 3.3, 0.3)])
def test_values_that_agree_have_the_chance_that_all_miss_the_end(shift: float, limit: float, share: float) -> None:
    """`share` of the values are at the top if the mean is the limit, and the others at the bottom."""
    top = of_outcomes(np.ones(12), shift=shift)
    assert top.p_above(limit) == pytest.approx(min(share**12, 0.5))
    bottom = of_outcomes(np.zeros(12), shift=-1 - shift)
    assert bottom.p_below(-limit) == pytest.approx(min(share**12, 0.5))


def test_losses_that_are_all_equal_leave_no_doubt_by_their_skewness() -> None:
    moves = Moves(moved_C=np.zeros(20), down_C=np.zeros(20), up_C=np.full(20, 5 / 20))
    own = Bounded.of([(moves, 1.0)], 0.5, is_skewed=True)
    assert [own.p_skewed(limit) for limit in (0.25, 0.5, 0.75)] == [(0.0, 1.0), (0.5, 0.5), (1.0, 0.0)]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_interval_of_a_mean_takes_the_wider_limit_on_each_side(sign: float) -> None:
    values = sign * np.random.default_rng(5).exponential(size=(1, 30)) ** 2
    of = (values, np.square(values), np.ones_like(values))
    found, student, hall = (limits(*of, level=0.95) for limits in (mean_limits, student_limits, loss_limits))
    assert found.low == min(student.low, hall.low)
    assert found.high == max(student.high, hall.high)
    assert (student.low < hall.low) == (sign > 0), "each of them is the wider one on one side"
    assert (student.high > hall.high) == (sign < 0)


@pytest.mark.parametrize(("limit", "excess"), [(0.9, 0.009), (0.5, 0.025), (1.0, 0.0), (0.0, 0.0), (-1.0, 0.0)])
def test_the_variance_of_values_that_agree_is_that_of_outcomes_with_the_limit_for_their_mean(
    limit: float, excess: float
) -> None:
    assert of_outcomes(np.ones(10)).excess_at(limit) == pytest.approx(excess, abs=1e-9)
