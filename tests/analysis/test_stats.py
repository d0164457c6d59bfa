"""Laws of the intervals, with scipy as oracle and simulations for what they cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from rewardlab.analysis import stats
from rewardlab.core.types import Estimate


def keys(num_prompts: int, per_prompt: int) -> list[str]:
    return [f"prompt-{number}" for number in range(num_prompts) for _ in range(per_prompt)]


def limits(estimate: Estimate) -> list[float]:
    return [estimate.value, estimate.low, estimate.high]


@given(n=st.integers(10, 3000), share=st.floats(0, 1), level=st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_wilson_is_the_interval_of_scipy(n: int, share: float, level: float) -> None:
    wins = round(share * n)
    expected = scipy.stats.binomtest(wins, n).proportion_ci(level, "wilson")
    estimate = stats.wilson(wins, n, level=level)
    assert limits(estimate) == pytest.approx([wins / n, expected.low, expected.high], abs=1e-12)
    assert (estimate.n, estimate.level) == (n, level)


def test_wilson_ends_exactly_at_zero_and_one() -> None:
    for n in range(10, 200):
        assert stats.wilson(n, n).high == 1.0
        assert stats.wilson(0, n).low == 0.0
        assert 0 < stats.wilson(n, n).low < 1


@pytest.mark.slow
@given(outcomes=st.lists(st.sampled_from([0.0, 1.0]), min_size=10, max_size=60))
def test_a_share_of_plain_wins_has_wilsons_interval_whether_or_not_keys_are_given(outcomes: list[float]) -> None:
    expected = stats.wilson(sum(outcomes), len(outcomes))
    assert limits(stats.proportion(outcomes)) == pytest.approx(limits(expected), abs=1e-12)
    assert stats.proportion(outcomes, keys(len(outcomes), 1)) == stats.proportion(outcomes)
    assert stats.proportion(outcomes).method == "Wilson"


@given(outcomes=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=10, max_size=60))
def test_the_interval_of_a_share_lies_in_the_unit_interval_and_holds_the_share(outcomes: list[float]) -> None:
    estimate = stats.proportion(outcomes)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.low < estimate.high


@given(outcomes=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=10, max_size=60))
def test_ties_are_worth_as_many_plain_outcomes_as_their_variance_says(outcomes: list[float]) -> None:
    """At each limit the squared distance is z² times the variance of a share of that many outcomes, by hand."""
    n, share = len(outcomes), float(np.mean(outcomes))
    plain = share * (1 - share)
    variance = (n * float(np.var(outcomes)) + plain) / (n + 1)
    worth = n * plain / variance if variance else n
    z_squared = float(scipy.stats.norm.ppf(0.975)) ** 2
    estimate = stats.proportion(outcomes)
    for limit in (estimate.low, estimate.high):
        assert worth * (share - limit) ** 2 == pytest.approx(z_squared * limit * (1 - limit), abs=1e-9)


def test_ties_narrow_the_interval_of_a_share() -> None:
    decided, tied = stats.proportion([0.0, 1.0] * 50), stats.proportion([0.0, 1.0] * 25 + [0.5] * 50)
    assert decided.value == tied.value == 0.5
    assert tied.high - tied.low < 0.8 * (decided.high - decided.low)
    assert tied.method == "score interval, ties one half"


def test_all_ties_are_one_half_but_not_for_certain() -> None:
    estimate = stats.proportion([0.5] * 20)
    assert estimate.value == 0.5
    assert 0.5 - estimate.low == pytest.approx(estimate.high - 0.5)
    assert 0.02 < estimate.high - estimate.low < 0.2


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=10, max_size=50))
def test_the_mean_has_at_least_students_interval(values: list[float]) -> None:
    estimate = stats.mean(values)
    reach = scipy.stats.t.ppf(0.975, len(values) - 1) * scipy.stats.sem(values)
    assert estimate.low <= np.mean(values) - reach + 1e-6
    assert estimate.high >= np.mean(values) + reach - 1e-6
    assert (estimate.value, estimate.n) == (pytest.approx(np.mean(values), abs=1e-9), len(values))


def test_without_skewness_the_intervals_of_means_are_students() -> None:
    values = np.concatenate([np.arange(1.0, 31.0), -np.arange(1.0, 31.0)])
    reach = scipy.stats.t.ppf(0.975, 59) * scipy.stats.sem(values)
    assert limits(stats.mean(values)) == pytest.approx([0, -reach, reach])
    assert limits(stats.mean_loss(values + 40)) == pytest.approx([40, 40 - reach, 40 + reach])


def test_the_interval_of_a_loss_inverts_halls_transformation() -> None:
    """f(T) = T + γT²/3 + γ²T³/27 + γ/6 at both limits is Student's quantile; T and γ by scipy."""
    losses = np.random.default_rng(0).exponential(size=25)
    estimate = stats.mean_loss(losses)
    gamma = scipy.stats.skew(losses, bias=False) / math.sqrt(25)
    quantile = scipy.stats.t.ppf(0.975, 24)
    for limit, wanted in ((estimate.low, quantile), (estimate.high, -quantile)):
        t = (losses.mean() - limit) / scipy.stats.sem(losses)
        assert t + gamma * t**2 / 3 + gamma**2 * t**3 / 27 + gamma / 6 == pytest.approx(wanted)
    assert estimate.high - estimate.value > 1.2 * (estimate.value - estimate.low)


def test_the_interval_of_a_loss_keeps_its_digits_where_losses_are_hardly_skewed() -> None:
    """For a small γ the limit of Hall is at T = y − γ/6 − γy²/3, but for terms of γ²."""
    losses = 40 + np.concatenate([np.arange(1.0, 31.0), -np.arange(1.0, 31.0)])
    losses[29] += 1e-5
    estimate, gamma = stats.mean_loss(losses), scipy.stats.skew(losses, bias=False) / math.sqrt(60)
    assert 1e-9 < gamma < 1e-7
    for limit, y in zip((estimate.low, estimate.high), scipy.stats.t.ppf([0.975, 0.025], 59), strict=True):
        t = (losses.mean() - limit) / scipy.stats.sem(losses)
        assert t == pytest.approx(y - gamma / 6 - gamma * y**2 / 3, rel=1e-13, abs=0)


def test_equal_prompts_give_the_intervals_of_their_means() -> None:
    values = np.random.default_rng(0).exponential(size=(20, 3)) + np.arange(20)[:, None] % 3
    for function in (stats.mean, stats.mean_loss):
        estimate = function(values.ravel(), keys(20, 3))
        assert limits(estimate) == pytest.approx(limits(function(values.mean(axis=1))))
        assert estimate.n == 20
        assert estimate.method.endswith(", by prompt")


@pytest.mark.parametrize("number", [1, 3, 9, 10])
def test_below_ten_prompts_or_values_there_is_no_interval_of_any_kind(number: int) -> None:
    outcomes = np.arange(number) % 2
    alone = [stats.wilson(1, number), *(f(outcomes) for f in (stats.proportion, stats.mean, stats.mean_loss))]
    keyed = [f(outcomes, keys(number, 1)) for f in (stats.proportion, stats.mean_share, stats.mean, stats.mean_loss)]
    repeated = [f(np.tile(outcomes, 2), keys(number, 2)) for f in (stats.proportion, stats.mean, stats.mean_loss)]
    for estimate in (*alone, *keyed, *repeated):
        assert estimate.n == number
        assert math.isnan(estimate.low) == math.isnan(estimate.high) == (number < 10)
        assert not math.isnan(estimate.value)
    if number < 10:
        assert {estimate.method for estimate in (*keyed, *repeated)} == {f"too few prompts ({number})"}
        assert [estimate.method for estimate in alone[:2]] == [
            f"too few {what} ({number})" for what in ("outcomes", "values")
        ]


@pytest.mark.parametrize("num_prompts", [12, 50])
@pytest.mark.parametrize("outcomes", [[1.0, 1.0], [0.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
def test_prompts_that_do_not_differ_still_leave_doubt_about_a_share(num_prompts: int, outcomes: list[float]) -> None:
    estimate = stats.proportion(outcomes * num_prompts, keys(num_prompts, 2))
    assert 0 <= estimate.low <= np.mean(outcomes) <= estimate.high <= 1
    assert estimate.high - estimate.low > 1 / num_prompts
    assert estimate.method == "score interval, by prompt"
    if outcomes == [1.0, 1.0]:
        assert limits(estimate) == pytest.approx(limits(stats.wilson(num_prompts, num_prompts)))


@given(sizes=st.lists(st.integers(1, 9), min_size=10, max_size=20), seed=st.integers(0, 99))
def test_a_share_by_prompt_holds_its_value_stays_in_range_and_turns_with_its_labels(
    sizes: list[int], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    clusters = [f"{prompt}" for prompt, size in enumerate(sizes) for _ in range(size)]
    outcomes = generator.choice([0.0, 0.5, 1.0], p=[0.1, 0.1, 0.8], size=len(clusters))
    one, other = stats.proportion(outcomes, clusters), stats.proportion(1 - outcomes, clusters)
    assert 0 <= one.low <= one.value <= one.high <= 1
    assert limits(other) == pytest.approx([1 - one.value, 1 - one.high, 1 - one.low])


@pytest.mark.parametrize("function", [stats.proportion, stats.mean, stats.mean_loss])
def test_rows_that_repeat_their_prompts_do_not_narrow_an_interval(function) -> None:
    """Four copies of every row say what the rows say: the width is about theirs, not half of it."""
    outcomes = (np.random.default_rng(0).random(60) < 0.8).astype(float)
    alone, copies = function(outcomes), function(np.repeat(outcomes, 4), keys(60, 4))
    independent = function(np.repeat(outcomes, 4))
    width = alone.high - alone.low
    assert copies.high - copies.low == pytest.approx(width, rel=0.02)
    assert independent.high - independent.low < 0.6 * width


def test_equal_values_have_an_empty_interval_around_their_mean() -> None:
    assert limits(stats.mean([2.0] * 10)) == [2.0, 2.0, 2.0]
    assert limits(stats.mean([2.0] * 100, keys(50, 2))) == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("offset", [1e6, 1e9])
@pytest.mark.parametrize("function", [stats.mean, stats.mean_loss])
def test_an_interval_by_prompt_has_one_width_however_far_from_zero(function, offset: float) -> None:
    values = np.random.default_rng(1).exponential(size=120)
    clusters = [f"prompt-{max(0, number - 60)}" for number in range(120)]
    # These differ by the offset exactly, for what it rounds off is missing in both.
    far, near = values + offset, (values + offset) - offset
    wanted = [limit + offset for limit in limits(function(near, clusters))]
    assert limits(function(far, clusters)) == pytest.approx(wanted, rel=1e-15, abs=0)


@pytest.mark.parametrize("per_prompt", [1, 2])
@pytest.mark.parametrize("function", [stats.mean, stats.mean_loss, lambda *args: stats.mean_loss(*args, tail=2.0)])
def test_intervals_of_means_stretch_with_values_of_any_size(function, per_prompt: int) -> None:
    values, clusters = np.random.default_rng(1).exponential(size=60), keys(60 // per_prompt, per_prompt)
    usual = function(values, clusters)
    for size in (2.0**-1000, 2.0**-520, 2.0**520, 2.0**1000):
        assert limits(function(size * values, clusters)) == [size * limit for limit in limits(usual)]


def test_of_values_that_hardly_ever_differ_there_is_no_interval() -> None:
    generator = np.random.default_rng(0)
    given = held = held_by_mean = 0
    for _ in range(400):
        gains = np.where(generator.random(100) < 0.03, generator.exponential(size=100), 0.0)
        plain, found = stats.mean(gains), stats.mean_with_ties(gains)
        held_by_mean += plain.low <= 0.03 <= plain.high
        if math.isnan(found.low):
            assert stats.num_differing(gains) == np.count_nonzero(gains) < 5
            assert found.method == stats.too_few_differ(stats.num_differing(gains))
            continue
        assert found == plain
        given += 1
        held += found.low <= 0.03 <= found.high
    assert held_by_mean < 0.9 * 400
    assert held >= 0.95 * given


def test_what_differs_is_counted_by_prompt_and_not_by_rounding() -> None:
    prompts = [f"p{number // 3}" for number in range(36)]
    values = np.full(36, 0.1)
    assert stats.num_differing(values, prompts) == 0
    values[[0, 1]] = [0.3, -0.1]  # one prompt, with the mean of the others
    assert stats.num_differing(values, prompts) == 0
    values[[3, 6, 7]] = 0.2
    assert stats.num_differing(values, prompts) == 2
    assert stats.num_differing(np.arange(12.0)) == 11


def test_no_data_says_so() -> None:
    for estimate in (stats.proportion([]), stats.proportion([], []), stats.mean([]), stats.mean([], [])):
        assert (estimate.n, estimate.method) == (0, "no data")
        assert all(map(math.isnan, limits(estimate)))
    assert stats.wilson(0, 0).method == "no data"


@settings(max_examples=20)
@given(order=st.permutations(range(120)))
def test_the_order_of_the_rows_does_not_change_an_interval(order: list[int]) -> None:
    values = np.random.default_rng(0).exponential(size=120)
    clusters = [f"prompt-{number % 50}" for number in range(120)]
    for function, column in ((stats.proportion, np.round(values) % 2), (stats.mean, values), (stats.mean_loss, values)):
        shuffled = function(column[order], [clusters[index] for index in order])
        assert limits(shuffled) == pytest.approx(limits(function(column, clusters)), rel=1e-9)


def test_a_higher_level_gives_a_wider_interval_of_each_kind() -> None:
    outcomes = np.random.default_rng(0).integers(0, 2, size=200).astype(float)
    for clusters in (None, keys(20, 10), keys(100, 2)):
        for function in (stats.proportion, stats.mean):
            narrow, wide = (function(outcomes, clusters, level=level) for level in (0.8, 0.99))
            assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([0.25, 1.0], "an outcome is 0, ½ or 1"),
        ([math.nan, 1.0], "not finite"),
        (np.zeros((2, 2)), "one axis"),
    ],
)
def test_what_is_no_outcome_is_refused(values: list[float] | np.ndarray, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        stats.proportion(values)


def test_keys_that_do_not_match_the_values_are_refused() -> None:
    for clusters in (["a"], ["a", "a", "a"]):
        with pytest.raises(AssertionError, match="one key a value"):
            stats.mean([1.0, 2.0], clusters)


def test_the_interval_of_a_difference_is_newcombe_s_for_two_wilson_intervals():
    # Newcombe (1998), Statistics in Medicine 17, 873-890, Table II, method 10: 56/70 against 48/80.
    found = stats.difference(stats.wilson(56, 70), stats.wilson(48, 80))
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_a_difference_has_an_interval_only_if_both_have_one():
    found = stats.difference(stats.wilson(5, 10), stats.wilson(9, 9))
    assert found.value == -0.5
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_a_share_of_means_stays_inside_and_is_the_proportion_for_plain_outcomes():
    outcomes = [1.0, 0.5, 0.0, 1.0, 1.0] * 2
    assert stats.mean_share(outcomes) == stats.proportion(outcomes)
    high = stats.mean_share([1.0] * 19 + [2 / 3])
    assert high.value < high.high <= 1
    same = stats.mean_share([1 / 3] * 20)
    assert same.low < 1 / 3 < same.high


def test_a_long_tail_that_few_losses_do_not_show_raises_the_upper_limit_only() -> None:
    losses = np.abs(np.random.default_rng(1).normal(size=20))
    plain, longer = stats.mean_loss(losses), stats.mean_loss(losses, tail=1.6)
    assert (longer.value, longer.low) == (plain.value, plain.low)
    assert longer.high > plain.high
    # Losses whose skewness is larger than 1.6 times their variation have the same interval as without.
    skewed = np.array([0.1] * 15 + [0.2, 0.3, 0.5, 0.9, 1.2])
    assert scipy.stats.skew(skewed, bias=False) > 1.6 * skewed.std(ddof=1) / skewed.mean()
    assert stats.mean_loss(skewed, tail=1.6) == stats.mean_loss(skewed)


def test_a_larger_tail_never_lowers_the_upper_limit() -> None:
    losses = np.random.default_rng(2).exponential(size=12)
    highs = [stats.mean_loss(losses, tail=tail).high for tail in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)]
    assert highs == sorted(highs)


def test_p_by_an_interval_is_the_level_at_which_it_ends_at_zero() -> None:
    values = np.random.default_rng(0).normal(0.4, size=30)
    p = stats.p_by_interval(stats.mean_by_level(values))
    assert 1e-6 < p < 0.5
    assert stats.mean(values, level=1 - p).low == pytest.approx(0, abs=1e-6)
    assert stats.p_by_interval(stats.mean_by_level(values + 100)) == stats.LEAST_P
    assert stats.p_by_interval(stats.mean_by_level(np.zeros(30))) == 1
    assert math.isnan(stats.p_by_interval(stats.mean_by_level(values[:9])))


@given(st.lists(st.tuples(st.text(max_size=2), st.floats(-9, 9)), min_size=1, max_size=40))
def test_totals_of_keys_come_in_the_order_of_sorted_keys_however_often_they_repeat(rows):
    rows = [(key.replace("\0", "0"), value) for key, value in rows]
    for repeated in (rows, rows * 8):
        keys, values = [key for key, _ in repeated], np.array([value for _, value in repeated])
        wanted = [values[[key == one for key in keys]].sum() for one in sorted(set(keys))]
        found = stats.cluster_totals(np.stack([values, np.ones_like(values)], axis=1), keys)
        np.testing.assert_allclose(found[:, 0], wanted, atol=1e-9)
        assert found[:, 1].tolist() == [keys.count(one) for one in sorted(set(keys))]


def test_values_of_one_model_that_are_all_equal_have_no_interval() -> None:
    """Margins of 1 and -1 of which 97 % are 1: of 30, all are 1 in two samples of five."""
    generator, held, given = np.random.default_rng(0), 0, 0
    for _ in range(300):
        margin = np.where(generator.random(30) < 0.97, 1.0, -1.0)
        for found, truth in (
            (stats.level_mean(margin), 0.94),
            (stats.level_loss(np.logaddexp(0, -margin)), 0.97 * np.logaddexp(0, -1) + 0.03 * np.logaddexp(0, 1)),
        ):
            assert math.isnan(found.low) == (np.ptp(margin) == 0)
            assert found.method == "no variation" or not math.isnan(found.low)
            given, held = given + (not math.isnan(found.low)), held + (found.low <= truth <= found.high)
    assert held / given >= 0.93
    assert stats.mean([1.0] * 30).low == 1.0  # what is known to be equal, such as the gain of a model over itself
