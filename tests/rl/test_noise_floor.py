"""What the noise floor promises, attacked: rewards observed again, anywhere within their noise."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, target
from hypothesis import strategies as st

from rewardlab.core.errors import ConfigError
from rewardlab.rl import Noise, RolloutError, floored
from rewardlab.rl.checking import finite
from rewardlab.rl.credit import combine
from rewardlab.rl.noise import GROWTH, LARGEST_TOLERANCE
from rewardlab.rl.shaping import kl_shaped, standardised

EIGHTHS = st.integers(-40, 40).map(lambda n: n / 8)
TOLERANCES = st.sampled_from([0.0, 1e-4, 0.05, 0.15, LARGEST_TOLERANCE])


def left(rewards: object, noise: object) -> np.ndarray:
    """The deviations that are left of one group."""
    return floored(rewards, [0] * len(rewards), noise).deviations_R


@st.composite
def observed_twice(draw):
    """Rewards and their noise by two observations, each no further from the other than the noise of either.

    Eighths and small factors, so that deviations that lie exactly on their bound are common.
    """
    size = draw(st.integers(2, 7))
    first = np.array(draw(st.lists(EIGHTHS, min_size=size, max_size=size)))
    noise = np.array(draw(st.lists(st.sampled_from([0, 1, 2, 4, 8, 12]), min_size=size, max_size=size))) / 8
    if draw(st.booleans()):
        noise[:] = noise[0]
    again = noise * draw(st.lists(st.sampled_from([1, 0.75, 1.25, GROWTH]), min_size=size, max_size=size))
    most = np.minimum(noise, again)
    direction = draw(st.lists(st.sampled_from([-1.0, 1.0, 0.0, 0.5]), min_size=size, max_size=size))
    if draw(st.booleans()):
        direction = -np.sign(first - first.mean())
    return (first, noise), (first + most * direction, again)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(observed_twice())
def test_a_deviation_that_is_left_in_both_observations_has_the_same_sign(twice) -> None:
    (first, noise), (second, again) = twice
    one, other = left(first, noise), left(second, again)
    target(float(np.sum((one != 0) & (other != 0))))
    assert not (one * other < 0).any()


@st.composite
def scored_twice(draw):
    """Two scorings of conversations, each within the tolerance of one reference, by exact arithmetic."""
    tolerance = draw(TOLERANCES)
    references = draw(st.lists(st.floats(-20, 20), min_size=2, max_size=8))
    allowed = [Fraction(tolerance) * max(1, abs(Fraction(reference))) for reference in references]
    scorings = []
    for _ in range(2):
        # Rounded towards the reference, so that a score in float64 is within the tolerance too.
        signs = draw(st.lists(st.sampled_from([-1, 1]), min_size=len(references), max_size=len(references)))
        scores = []
        for reference, most, sign in zip(references, allowed, signs, strict=True):
            score = float(Fraction(reference) + sign * most)
            while abs(Fraction(score) - Fraction(reference)) > most:
                score = math.nextafter(score, reference)
            scores.append(score)
        scorings.append(scores)
    return tolerance, references, *scorings


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(scored_twice())
def test_the_sign_of_what_is_left_does_not_depend_on_who_computes_the_scores(scored) -> None:
    tolerance, references, first, second = scored
    noise = Noise(tolerance=tolerance, source="a test")
    one, other, exact = (left(scores, noise.between_scorings(scores)) for scores in (first, second, references))
    assert not (one * other < 0).any()
    assert not (one * exact < 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("large", [1e3, 1e12, 1e13, 1e14])
@pytest.mark.parametrize(
    "shape",
    [
        lambda scores, noise, large: combine(scores, [large] * 4, how="add", noise_R=noise),
        lambda scores, noise, large: kl_shaped(combine(scores, noise_R=noise), [large] * 4, beta=1.0),
        lambda scores, noise, large: standardised(combine(scores, noise_R=noise), mean=large, std=1.0),
    ],
    ids=["environment", "penalty", "mean"],
)
def test_scores_beside_something_large_have_no_sign_that_rounding_could_turn_around(shape, large: float) -> None:
    generator = np.random.default_rng(0)
    noise = Noise(tolerance=1e-4, source="a test")

    def left_of(scores: np.ndarray) -> np.ndarray:
        shaped = shape(scores, noise.between_scorings(scores), large)
        return left(shaped.rewards_R, shaped.noise_R)

    for _ in range(500):
        reference = generator.normal(size=4) * 10 ** generator.uniform(-4, 1)
        reach = 1e-4 * np.maximum(1, np.abs(reference))
        one, other = (left_of(reference + reach * generator.uniform(-1, 1, size=4)) for _ in range(2))
        assert (one * other >= 0).all()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(scored_twice())
def test_the_distance_between_two_scorings_is_bounded_by_either(scored) -> None:
    tolerance, references, first, second = scored
    noise = Noise(tolerance=tolerance, source="a test")
    one, other = noise.between_scorings(first), noise.between_scorings(second)
    apart = np.abs(np.subtract(first, second))
    rounding = 4 * np.finfo(float).eps * np.maximum(1, np.abs(references))
    assert (apart <= np.minimum(one, other) + rounding).all()
    assert (np.maximum(one, other) <= GROWTH * np.minimum(one, other) * (1 + 1e-15)).all()


def test_the_bound_between_two_scorings_is_reached() -> None:
    noise = Noise(tolerance=0.15, source="a test")
    assert noise.between_scorings([0.85, -8.5])[0] == pytest.approx(0.3)
    low, high = 10 * 0.85, 10 * 1.15
    assert noise.between_scorings([low])[0] == pytest.approx(high - low, rel=1e-12)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(EIGHTHS, st.sampled_from([0, 0.1, 0.5, 1.0]), st.integers(0, 2)), min_size=1, max_size=20))
def test_what_is_left_adds_up_to_0_keeps_the_mean_and_is_never_larger(rows) -> None:
    rewards, noise, groups = (list(column) for column in zip(*rows, strict=True))
    found = floored(rewards, groups, noise)
    for group in set(groups):
        mine = np.array(groups) == group
        before = np.array(rewards)[mine] - np.mean(np.array(rewards)[mine])
        after = found.deviations_R[mine]
        assert abs(math.fsum(after)) <= 1e-14 * max(1, np.abs(after).sum())
        assert (np.abs(after) <= np.abs(before) + 1e-14).all()
        assert (after * before >= 0).all()
        mean = float(np.mean(np.array(rewards)[mine]))
        short = 2.0**-14 * abs(mean) if mine.sum() > 1 and not after.any() else 0.0
        assert abs(np.mean(found.rewards_R[mine]) - mean) <= short + 1e-13
    kept = found.num_groups - found.num_groups_single - found.num_groups_below
    assert kept == len({group for group, value in zip(groups, found.deviations_R, strict=True) if value})
    inside = [
        value == 0 and any(found.deviations_R[number] for number, other in enumerate(groups) if other == group)
        for value, group in zip(found.deviations_R, groups, strict=True)
    ]
    assert found.num_rollouts_below == sum(inside)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=12))
def test_without_noise_nothing_changes_bit_for_bit(rewards) -> None:
    for noise in (None, [0.0] * len(rewards)):
        found = floored(rewards, [0] * len(rewards), noise)
        assert found.rewards_R.tobytes() == np.array(rewards, dtype=np.float64).tobytes()


def test_rewards_that_are_all_beyond_the_noise_do_not_change_bit_for_bit() -> None:
    rewards = [0.1, 0.7, -1.3, 2.9]
    found = floored(rewards, [0] * 4, [1e-3] * 4)
    assert found.rewards_R.tolist() == rewards
    assert (found.num_groups_below, found.num_rollouts_below) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(EIGHTHS, min_size=2, max_size=9), st.sampled_from([0.125, 0.3, 1.0]))
def test_a_group_whose_range_is_within_the_noise_is_zero_and_counted(rewards, noise) -> None:
    rewards = (np.array(rewards) - min(rewards)) * min(1.0, noise / max(np.ptp(rewards), 1e-9)) + 5.0
    found = floored(rewards, ["a"] * len(rewards), [noise] * len(rewards))
    assert not found.deviations_R.any()
    assert (found.num_groups, found.num_groups_below, found.num_rollouts_below) == (1, 1, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-9, 9), min_size=2, max_size=33), st.floats(-30, 30), st.sampled_from([np.float32, np.float64])
)
def test_a_library_that_takes_the_mean_in_float32_finds_exactly_0_in_a_group_within_the_noise(
    rewards, shift, dtype
) -> None:
    seen = floored(np.array(rewards) + shift, [0] * len(rewards), [100.0] * len(rewards)).rewards_R.astype(dtype)
    assert not (seen - seen.mean()).any()
    total = dtype(0)
    for value in seen:
        total += value
    assert not (seen - total / dtype(len(seen))).any()


def test_one_reply_that_is_certainly_better_is_rewarded_and_those_below_the_mean_pay_for_it() -> None:
    deviations = left([8.0, 1.7, 0.0, 0.0, 0.0, 0.0], [1.2] * 6)  # mean 1.617, each moved 2 at most
    above = 8 - 9.7 / 6
    assert deviations.tolist() == pytest.approx([above, 0.0, *[-above / 4] * 4], abs=1e-14)


def test_one_reply_that_is_barely_better_leaves_the_group_without_advantages() -> None:
    """Otherwise the second reply would bear a counterweight here, and be rewarded in the other observation."""
    noise = [0.0, 0.125, 0.0]
    assert not left([0.5, 0.375, 0.375], noise).any()
    assert not left([0.5, 0.5, 0.375], noise).any()


def test_the_heavier_side_is_scaled_down_to_the_lighter() -> None:
    deviations = left([3.0, 1.0, 1.0, -2.0], [0.4] * 4)  # mean 0.75: 2.25, 0.25, 0.25, -2.75; each moved 0.6 at most
    assert deviations.tolist() == [pytest.approx(2.25), 0.0, 0.0, pytest.approx(-2.25)]


def test_groups_may_be_mixed_named_by_anything_and_single() -> None:
    found = floored([1.0, 9.0, 2.0, 7.0], [("a", 1), "b", ("a", 1), None], [0.1] * 4)
    assert found.deviations_R.tolist() == [-0.5, 0.0, 0.5, 0.0]
    assert found.rewards_R.tolist() == [1.0, 9.0, 2.0, 7.0]
    assert (found.num_groups, found.num_groups_single, found.num_groups_below) == (3, 2, 0)
    empty = floored([], [], [])
    assert (len(empty.rewards_R), empty.num_groups, empty.num_rollouts_below) == (0, 0, 0)


def test_groups_named_by_an_array_or_by_tensors_are_those_of_equal_numbers() -> None:
    for names in (np.array([0, 1, 0, 1]), [*torch.tensor([0, 1, 0, 1])]):
        assert floored([1.0, 5.0, 2.0, 7.0], names, None).deviations_R.tolist() == [-0.5, -1.0, 0.5, 1.0]


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, 10**400, np.array([1.0, 2.0])])
def test_a_reward_that_is_no_finite_number_is_an_error_that_names_the_rollout(bad) -> None:
    with pytest.raises(RolloutError, match=r"1 of 3 rollouts have no reward .*rollout 1: ") as refused:
        floored([1.0, bad, 2.0], [0, 0, 0], [0.0] * 3)
    assert refused.value.rollouts == (1,)


@pytest.mark.parametrize("bad", ["5.0", [1.0], 1j, object()])
def test_what_is_no_number_is_missing(bad) -> None:
    with pytest.raises(RolloutError, match="rollout 0: "):
        finite([bad, 1.0], what="reward")


def test_many_bad_rewards_are_all_numbered_and_some_named() -> None:
    with pytest.raises(RolloutError, match="and 12 more") as refused:
        floored([None] * 20, [0] * 20, None)
    assert refused.value.rollouts == tuple(range(20))


def test_noise_that_is_no_distance_is_an_error() -> None:
    with pytest.raises(RolloutError, match="the noise of rollout 1 is -0.1"):
        floored([1.0, 2.0], [0, 0], [0.1, -0.1])
    with pytest.raises(RolloutError, match="have no noise") as refused:
        floored([1.0, 2.0], [0, 0], [math.nan, 0.1])
    assert refused.value.rollouts == (0,)
    with pytest.raises(ConfigError, match="noise: got 1 for 2 rollouts"):
        floored([1.0, 2.0], [0, 0], [0.1])
    with pytest.raises(ConfigError, match="groups: got 3 for 2 rollouts"):
        floored([1.0, 2.0], [0, 0, 0], [0.1, 0.1])
    for nameless in ([0], math.nan):
        with pytest.raises(ConfigError, match="rollout 1 is in group .*, which cannot name a group"):
            floored([1.0, 2.0], ["a", nameless], [0.1, 0.1])


@pytest.mark.parametrize("scale", [1e-200, 3e307])
def test_rewards_and_noise_of_any_size_are_compared(scale: float) -> None:
    rewards, noise = np.array([2.0, 2.2, 1.9, -2.0, -2.4, 0.1]), np.array([0.3, 0.2, 0.6, 0.5, 1.1, 0.4])
    expected = left(rewards, noise)
    assert 0 < (expected == 0).sum() < len(expected)
    np.testing.assert_allclose(left(rewards * scale, noise * scale) / scale, expected, rtol=1e-12)
    assert not left(rewards * scale, [5 * scale] * 6).any()


def test_noise_that_is_beyond_all_floats_is_an_error_that_names_the_rollout() -> None:
    with pytest.raises(RolloutError, match="no noise") as caught:
        Noise(tolerance=0.2, source="").between_scorings([1.0, 1.7e308])
    assert caught.value.rollouts == (1,)


def test_rewards_too_far_apart_to_compare_are_an_error() -> None:
    with pytest.raises(RolloutError, match="their difference is not a finite number"):
        floored([1.7e308, -1.7e308], [0, 0], None)


@pytest.mark.parametrize("tolerance", [-0.1, math.nan, 0.21, 1.0, math.inf])
def test_a_tolerance_that_says_nothing_is_refused(tolerance) -> None:
    with pytest.raises(ConfigError, match="tolerance: got .* wanted 0 to 0.2"):
        Noise(tolerance=tolerance, source="a test")
