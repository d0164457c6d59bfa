"""Intervals of statistics that are no means: values by oracles, spreads by the jackknife, and what has none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats as oracle
from sklearn.metrics import roc_auc_score

from rewardlab.analysis import influence
from rewardlab.analysis.distributions import distribution, quantile, standard_deviation
from rewardlab.analysis.influence import (
    _midranks,
    antisymmetric_correlations,
    area_under_curve,
    by_influence,
    correlations,
    places,
    product_moment,
    rank_correlation,
)
from rewardlab.analysis.intervals import mean_limits

few_values = arrays(np.float64, st.integers(3, 30), elements=st.sampled_from([-1.0, 0.0, 0.5, 2.0]))


def draw(n: int, *, tied: bool = False, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=n)
    y = 0.5 * x + generator.normal(size=n)
    return (x.round(), y.round()) if tied else (x, y)


@given(values=few_values)
def test_midranks_are_those_of_scipy(values: np.ndarray) -> None:
    assert _midranks(np.unique(values, return_inverse=True)[1]) * values.size == pytest.approx(
        oracle.rankdata(values) - 0.5
    )


@pytest.mark.parametrize("tied", [False, True])
def test_correlations_are_those_of_scipy(tied: bool) -> None:
    x, y = draw(80, tied=tied)
    pearson, spearman = correlations(x, y, np.arange(80))
    assert pearson.value == pytest.approx(oracle.pearsonr(x, y).statistic)
    assert spearman.value == pytest.approx(oracle.spearmanr(x, y).statistic)


def test_the_interval_of_pearsons_correlation_is_near_fishers_for_normal_values() -> None:
    x, y = draw(400)
    ours, fishers = correlations(x, y, np.arange(400))[0], oracle.pearsonr(x, y).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((fishers.low, fishers.high), abs=0.03)


def jackknife(statistic, columns: list[np.ndarray], clusters: np.ndarray) -> float:
    """Standard error by leaving out one cluster at a time."""
    left = np.array([statistic(*(c[clusters != k] for c in columns)) for k in np.unique(clusters)])
    return math.sqrt((len(left) - 1) / len(left) * np.square(left - left.mean()).sum())


def auc_of(preferred: np.ndarray, other: np.ndarray) -> float:
    return roc_auc_score(np.repeat([1, 0], [len(preferred), len(other)]), np.concatenate([preferred, other]))


def spearman_both_ways(x: np.ndarray, y: np.ndarray) -> float:
    return oracle.spearmanr(np.concatenate([x, -x]), np.concatenate([y, -y])).statistic


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("statistic", "influences"),
    [
        (lambda x, y: oracle.pearsonr(x, y).statistic,
         lambda x, y: product_moment(x - x.mean(), y - y.mean())[1]),
        (lambda x, y: oracle.spearmanr(x, y).statistic, lambda x, y: rank_correlation(x, y)[1]),
        (spearman_both_ways, lambda x, y: rank_correlation(
            np.concatenate([x, -x]), np.concatenate([y, -y]))[1].reshape(2, -1).mean(axis=0)),
        (auc_of, lambda x, y: influence.shares_below(x, y) - influence.shares_below(y, x)),
    ],
    ids=["Pearson", "Spearman", "Spearman both ways", "AUC"],
)  # fmt: skip
def test_influences_give_the_spread_that_leaving_out_prompts_gives(statistic, influences, tied, each) -> None:
    # Pairs of a prompt are alike, so that a spread that takes them for independent would be too small.
    x, y = (values + np.repeat(draw(240 // each, seed=1)[0], each) for values in draw(240))
    x, y = (x.round(), y.round()) if tied else (x, y)
    clusters = np.arange(240) // each
    psi = influences(x, y)
    totals = np.bincount(clusters, psi - psi.mean())
    spread = math.sqrt(np.square(totals).sum()) / 240
    assert spread == pytest.approx(jackknife(statistic, [x, y], clusters), rel=0.08)


@given(x=few_values, seed=st.integers(0, 5))
@settings(max_examples=30)
def test_influences_of_ranks_have_a_mean_of_nothing(x: np.ndarray, seed: int) -> None:
    y = np.random.default_rng(seed).permutation(x)
    value, psi = rank_correlation(x, y)
    assert math.isnan(value) or psi.mean() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("centred", [True, False])
def test_pairs_of_one_prompt_alone_that_vary_leave_influences_finite(centred: bool) -> None:
    for seed in range(8):
        x, y = (np.concatenate([values, np.zeros(9)]) for values in draw(3, seed=seed))
        value, psi = influence.pearson(x, y, np.arange(12) // 3, centred=centred)
        assert abs(value) < 1
        assert np.isfinite(psi).all()


def test_an_auc_of_one_has_an_interval_with_a_width() -> None:
    found = area_under_curve(np.arange(20.0) + 100, np.arange(20.0), np.arange(20))
    assert (found.value, found.high) == (1.0, 1.0)
    assert 0.7 < found.low < 0.95


def test_the_interval_of_the_auc_is_delongs_where_it_is_far_from_the_ends() -> None:
    x, y = draw(400)
    found = area_under_curve(x + 0.4, y, np.arange(400))
    v10, v01 = influence.shares_below(x + 0.4, y), 1 - influence.shares_below(y, x + 0.4)
    both = np.cov(v10, v01)
    reach = 1.96 * math.sqrt(both.sum() / 400)  # paired: the covariance of a pair's own two parts counts
    assert (found.low, found.high) == pytest.approx((found.value - reach, found.value + reach), abs=0.004)


def test_correlations_of_differences_do_not_depend_on_which_reply_is_subtracted() -> None:
    x, y = draw(60)
    sign = np.where(np.random.default_rng(1).random(60) < 0.5, -1, 1)
    one, other = (antisymmetric_correlations(s * x, s * y, np.arange(60)) for s in (1, sign))
    for a, b in zip(one, other, strict=True):
        assert (a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high), abs=1e-12)
    doubled = np.concatenate([x, -x]), np.concatenate([y, -y])
    assert one[0].value == pytest.approx(oracle.pearsonr(*doubled).statistic)
    assert one[1].value == pytest.approx(oracle.spearmanr(*doubled).statistic)


def test_values_that_do_not_vary_have_no_correlation_and_no_interval() -> None:
    x = np.arange(30.0)
    for found in correlations(x, np.ones(30), np.arange(30)):
        assert math.isnan(found.value)
        assert found.method == "no data"
    for found in correlations(x, 2 * x + 1, np.arange(30)):
        assert found.value == pytest.approx(1)
        assert math.isnan(found.low) or found.low > 0.999


def test_no_interval_below_ten_prompts_however_many_pairs_they_have() -> None:
    x, y = draw(90)
    found = correlations(x, y, np.arange(90) // 10)[0]
    assert found.method == "too few prompts (9)"
    assert math.isnan(found.low)
    assert by_influence(0.5, x, np.arange(90) // 9, scale="log").n == 10


def test_more_pairs_of_the_same_prompts_make_no_interval_narrower() -> None:
    x, y = draw(40)
    once, clusters = correlations(x, y, np.arange(40))[1], np.repeat(np.arange(40), 5)
    five = correlations(np.repeat(x, 5), np.repeat(y, 5), clusters)[1]
    assert five.n == once.n == 40
    assert five.high - five.low == pytest.approx(once.high - once.low, rel=0.1)


# --- distributions ---------------------------------------------------------------------------------------------


def test_the_spread_of_two_values_that_are_equally_frequent_is_not_known_exactly() -> None:
    """By influence alone 75 to 86 % of these intervals hold it, and many have no width, or none at all."""
    generator, held = np.random.default_rng(3), []
    for _ in range(300):
        found = standard_deviation((generator.random(100) < 0.45).astype(np.float64), np.arange(100))
        held.append(found.low <= math.sqrt(0.45 * 0.55) <= found.high + 1e-9)
    assert np.mean(held) > 0.93
    even = standard_deviation(np.tile([0.0, 1.0], 50), np.arange(100))
    assert even.low < 0.495 < even.value == even.high


def test_a_standard_deviation_of_scores_of_any_size() -> None:
    x = draw(300)[0]
    found = standard_deviation(x, np.arange(300))
    assert found.value == pytest.approx(x.std(ddof=1))
    chi = [math.sqrt(299 / oracle.chi2.ppf(q, 299)) * found.value for q in (0.975, 0.025)]
    assert (found.low, found.high) == pytest.approx(chi, abs=0.02)
    large = standard_deviation(1e100 * x, np.arange(300))
    assert (large.value, large.low) == pytest.approx((1e100 * found.value, 1e100 * found.low))
    for size in (1e-158, 1e-200, 1e-300):
        small = standard_deviation(size * x, np.arange(300))
        assert (small.value / size, small.low / size) == pytest.approx((found.value, found.low))
    assert standard_deviation(np.ones(20), np.arange(20)).method == "no variation"


def test_the_interval_of_a_median_is_that_of_order_statistics() -> None:
    x = np.random.default_rng(2).permutation(np.arange(1.0, 101.0))
    found = quantile(x, np.arange(100), share=0.5)
    assert found.value == 50.5
    assert 40 <= found.low <= 41.5  # scipy: the 40th and the 61st of 100
    assert 59.5 <= found.high <= 61


def test_a_percentile_beyond_what_the_values_can_tell_has_no_interval() -> None:
    found = quantile(draw(40)[0], np.arange(40), share=0.99)
    assert math.isnan(found.low)
    assert found.method == "too few values for this percentile (40)"


def test_a_histogram_counts_every_value() -> None:
    x = draw(500)[0]
    found = distribution(x, np.arange(500), [str(n) for n in range(500)])
    assert sum(found.counts) == found.num_values == 500
    assert (found.lowest.value, found.highest.value) == (x.min(), x.max()) == (found.edges[0], found.edges[-1])
    assert found.percentiles["p90"].value == pytest.approx(np.quantile(x, 0.9))
    same = distribution(np.full(12, 3.0), np.arange(12), [str(n) for n in range(12)])
    assert same.counts == (12,)
    assert distribution(np.empty(0), np.empty(0, int), []).counts == ()


def test_a_pearson_correlation_has_the_interval_of_the_jackknife_on_fishers_scale() -> None:
    """By one value a prompt; without the skewness of what leaving out moves, which widens it."""
    generator = np.random.default_rng(3)
    x, y = generator.standard_t(3, size=25), generator.normal(size=25)
    for found, statistic in (
        (correlations(x, y, np.arange(25))[0], lambda x, y: oracle.pearsonr(x, y).statistic),
        (
            antisymmetric_correlations(x, y, np.arange(25))[0],
            lambda x, y: float((x * y).sum() / math.sqrt((x**2).sum() * (y**2).sum())),
        ),
    ):
        left = [math.atanh(statistic(np.delete(x, n), np.delete(y, n))) for n in range(25)]
        pseudo = 24 * (math.atanh(statistic(x, y)) - np.array(left))
        middle = math.atanh(found.value)
        wanted = mean_limits(*(v[None] for v in (pseudo - pseudo.mean(), (pseudo - pseudo.mean()) ** 2, np.ones(25))),
                             level=0.95)  # fmt: skip
        low, high = (math.tanh(middle + float(limit[0])) for limit in (wanted.low, wanted.high))
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)


@pytest.mark.parametrize("sizes", [np.full(12, 4), np.arange(1, 13)], ids=["even", "uneven"])
def test_by_several_values_a_prompt_it_is_the_jackknife_over_prompts(sizes: np.ndarray) -> None:
    generator = np.random.default_rng(4)
    clusters = np.repeat(generator.permutation(12), sizes)  # not in the order of their numbers
    x, y = (generator.standard_t(3, size=12)[clusters] + generator.normal(size=clusters.size) for _ in range(2))
    y += x
    for found, centre, statistic in (
        (correlations(x, y, clusters)[0], True, lambda x, y: math.atanh(oracle.pearsonr(x, y).statistic)),
        (
            antisymmetric_correlations(x, y, clusters)[0],
            False,
            lambda x, y: math.atanh((x * y).sum() / math.sqrt((x**2).sum() * (y**2).sum())),
        ),
    ):
        value, psi = product_moment(x - centre * x.mean(), y - centre * y.mean())
        moved = np.array([statistic(x, y) - statistic(x[clusters != c], y[clusters != c]) for c in range(12)])
        size = np.bincount(clusters)
        wanted = np.sqrt(11 / 12 * (1 - size / clusters.size)) * clusters.size * moved * (1 - value**2)
        psi = psi + ((wanted - np.bincount(clusters, psi)) / size)[clusters]
        same = by_influence(value, psi, clusters, scale="fisher")
        assert (found.low, found.high) == pytest.approx((same.low, same.high), abs=1e-9)


def test_one_value_far_from_all_others_leaves_a_correlation_with_an_interval() -> None:
    x, y = np.zeros(30), np.random.default_rng(0).normal(size=30)
    x[0] = 1e9
    for found in (correlations(x, y, np.arange(30))[0], antisymmetric_correlations(x, y, np.arange(30))[0]):
        assert -1 <= found.low <= found.value <= found.high <= 1


def test_one_pair_that_keeps_pearsons_correlation_from_1_leaves_it_an_interval_as_one_that_nearly_does() -> None:
    """Without that pair z is infinite, or as large as noise lets it be."""
    x = np.tile([1.0, -1.0], 25)
    ends = []
    for noise in (0.0, 1e-9, 1e-4):
        y = x + noise * np.random.default_rng(0).normal(size=50)
        y[-1] = 1.0
        found, _ = antisymmetric_correlations(x, y, np.arange(50))
        assert found.value == pytest.approx(0.96, abs=1e-4)
        ends.append((found.low, found.high))
    assert ends[1] == pytest.approx(ends[0], abs=1e-6)
    assert ends[2] == pytest.approx(ends[0], abs=1e-3)
    assert -0.98 < ends[0][0] < 0.96 < ends[0][1] < 0.999


@given(st.lists(st.sampled_from([-3, 0, 1, 2, 5, 11, 400, 10**12]), max_size=30))
def test_prompts_are_numbered_as_by_sorting_them(numbers: list[int]) -> None:
    clusters = np.array(numbers, dtype=np.int64)
    found, count = places(clusters)
    np.testing.assert_array_equal(found, np.unique(clusters, return_inverse=True)[1])
    assert count == len(set(numbers))


def test_millions_of_differences_are_sorted_once_each_and_their_prompts_never(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    clusters = np.repeat(np.arange(40), 5)
    x, y = generator.normal(size=(2, clusters.size)).round(1)
    expected = antisymmetric_correlations(x, y, clusters)
    sizes, unique = [], np.unique

    def counted(values: np.ndarray, **asked: bool) -> object:
        sizes.append(values.size)
        return unique(values, **asked)

    monkeypatch.setattr(np, "unique", counted)
    assert antisymmetric_correlations(x, y, clusters) == expected
    assert sizes == [2 * x.size] * 2
