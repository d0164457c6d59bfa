"""Convex Bradley–Terry fits: the one answer, whatever the company; penalties, folds and samples by prompt."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from common import make_groups
from rewardlab.analysis import linear, stats
from rewardlab.analysis.linear import (
    TOLERANCE,
    Comparisons,
    bootstrap_weights,
    compare,
    cross_validate,
    fit,
    fold_of_prompts,
    held_out_logits,
    may_be_chance,
    nested_subsets,
    nll_of,
)
from rewardlab.core.errors import DataError
from rewardlab.core.types import Estimate


def make_data(count=120, features=6, *, prompts=None, roots=None, seed=0, noise=1.0) -> Comparisons:
    draw = np.random.default_rng(seed)
    differences = draw.normal(size=(count, features)) * np.geomspace(3, 0.1, features)
    logits = differences @ draw.normal(size=features) / noise
    labels = (draw.random(count) < expit(logits)).astype(float)
    numbers = np.arange(count) if prompts is None else draw.integers(0, prompts, count)
    numbers[: numbers.max() + 1] = np.arange(numbers.max() + 1)
    return Comparisons(
        differences=differences,
        labels=labels,
        margins=np.zeros(count),
        weights=draw.uniform(0.2, 2.0, count),
        prompts=numbers,
        prompt_keys=tuple(map(str, range(numbers.max() + 1))),
        roots=np.arange(numbers.max() + 1) if roots is None else np.asarray(roots),
    )


def one(data: Comparisons, penalty: float) -> np.ndarray:
    return fit(data, data.weights[:, None], np.array([penalty]))[:, 0]


def test_the_fit_is_that_of_logistic_regression_without_intercept():
    data = make_data()
    penalty = 0.03
    reference = LogisticRegression(C=1 / (penalty * data.weights.sum()), fit_intercept=False, tol=1e-10, max_iter=5000)
    reference.fit(data.differences, data.labels, sample_weight=data.weights)
    # What is within TOLERANCE of the minimum of a function with curvature `penalty` is this near to the place of it.
    np.testing.assert_allclose(one(data, penalty), reference.coef_[0], atol=math.sqrt(2 * TOLERANCE / penalty))


def test_soft_labels_ties_and_margins_follow_the_formula():
    data = make_data()
    draw = np.random.default_rng(3)
    data = Comparisons(
        differences=data.differences,
        labels=draw.choice([0.0, 0.2, 0.5, 0.8, 1.0], len(data.labels)),
        margins=draw.choice([0.0, 0.7], len(data.labels)),
        weights=data.weights,
        prompts=data.prompts,
        prompt_keys=data.prompt_keys,
        roots=data.roots,
    )

    def objective(theta):
        total = 0.0
        for difference, y, m, w in zip(data.differences @ theta, data.labels, data.margins, data.weights, strict=True):
            if y < 0.5:
                difference, y = -difference, 1 - y
            margin = 0.0 if y == 0.5 else m
            total += w * (y * np.log1p(np.exp(margin - difference)) + (1 - y) * np.log1p(np.exp(difference - margin)))
        return total / data.weights.sum() + 0.05 * theta @ theta

    found = one(data, 0.1)
    best = minimize(objective, np.zeros(6), tol=1e-12)
    np.testing.assert_allclose(found, best.x, atol=1e-3)
    assert objective(found) <= best.fun + 1e-8


def test_each_column_is_what_it_would_be_alone_and_the_start_does_not_matter():
    data = make_data()
    weights = np.stack([data.weights, data.weights * (data.prompts % 2 == 0), np.ones(len(data.labels))], axis=1)
    penalties = np.array([0.001, 0.1, 1.0])
    together = fit(data, weights, penalties)
    for column in range(3):
        alone = fit(data, weights[:, [column]], penalties[[column]], start_FB=np.full((6, 1), 3.0))
        np.testing.assert_allclose(together[:, column], alone[:, 0], atol=2e-2)
    assert not np.allclose(together[:, 0], together[:, 1], atol=0.05)


def test_where_there_are_many_features_only_few_columns_are_fitted_at_a_time(monkeypatch):
    data, penalties = make_data(), np.geomspace(0.01, 1.0, 5)
    weights = np.repeat(data.weights[:, None], 5, axis=1)
    together, sizes, alone = fit(data, weights, penalties), [], linear._lbfgs

    def counted(objective, theta_FB, tolerance):
        sizes.append(theta_FB.shape)
        return alone(objective, theta_FB, tolerance)

    monkeypatch.setattr(linear, "_lbfgs", counted)
    monkeypatch.setattr(linear, "MAX_COEFFICIENTS", 13)
    np.testing.assert_allclose(fit(data, weights, penalties), together, atol=1e-9)
    assert sizes == [(6, 2), (6, 2), (6, 1)]


def test_a_sparse_matrix_gives_the_same_fit():
    data = make_data()
    sparse = Comparisons(
        differences=csr_matrix(data.differences),
        labels=data.labels,
        margins=data.margins,
        weights=data.weights,
        prompts=data.prompts,
        prompt_keys=data.prompt_keys,
        roots=data.roots,
    )
    np.testing.assert_allclose(one(sparse, 0.01), one(data, 0.01), atol=1e-9)


def test_separable_data_have_an_answer_because_of_the_penalty():
    data = make_data(noise=1e-6)
    theta = one(data, 1e-4)
    assert np.isfinite(theta).all()
    assert ((data.differences @ theta > 0) == (data.labels == 1)).mean() > 0.95


@pytest.mark.parametrize("penalty", [1e-3, 0.1])
def test_wide_separable_data_are_fitted_to_the_stated_distance(penalty):
    """Where the curvature at the minimum is far below that at zero, a rule that looks at zero would stop early."""
    data = make_data(60, features=120, noise=0.01)
    found = one(data, penalty)

    def objective(theta):
        losses = nll_of(data.labels, data.differences @ theta)
        return (data.weights * losses).sum() / data.weights.sum() + penalty / 2 * theta @ theta

    theta = found.copy()
    for _ in range(60):  # Newton, to the end
        p = expit(data.differences @ theta)
        share = data.weights / data.weights.sum()
        gradient = data.differences.T @ (share * (p - data.labels)) + penalty * theta
        hessian = (data.differences.T * (share * p * (1 - p))) @ data.differences + penalty * np.eye(120)
        theta = theta - np.linalg.solve(hessian, gradient)
    assert objective(found) - objective(theta) <= TOLERANCE


def test_data_without_any_weight_are_refused_and_an_empty_sample_is_the_whole():
    data = make_data(30)
    with pytest.raises(DataError, match="no comparison has any weight"):
        fit(data, np.zeros((30, 1)), np.array([0.1]))
    lone = Comparisons(
        differences=data.differences,
        labels=data.labels,
        margins=data.margins,
        weights=np.where(data.prompts == 0, 1.0, 0.0),
        prompts=data.prompts,
        prompt_keys=data.prompt_keys,
        roots=data.roots,
    )
    assert (bootstrap_weights(lone, num_draws=40, seed=0).sum(0) > 0).all()


def test_cross_validation_never_scores_a_prompt_by_a_fit_that_saw_it():
    data = make_data(200, prompts=40, noise=2.0)
    found = cross_validate(data, num_folds=5, seed=1)
    assert found.num_folds == 5
    fold = found.fold_P[data.prompts]
    for column in range(5):
        alone = fit(data, (data.weights * (fold != column))[:, None], np.array([found.penalty]))
        np.testing.assert_allclose(found.theta_FK[:, column], alone[:, 0], atol=2e-2)
    own = sum(
        (data.weights * nll_of(data.labels, data.differences @ found.theta_FK[:, column]))[fold == column].sum()
        for column in range(5)
    )
    assert found.losses[found.penalty] == pytest.approx(own / data.weights.sum())
    assert found.losses[found.penalty] <= min(found.losses.values()) + 1e-3


def test_noise_wants_a_stronger_penalty_than_signal():
    clear, noisy = make_data(400, noise=0.2), make_data(60, features=30, noise=50.0)
    assert cross_validate(clear).penalty < cross_validate(noisy).penalty
    assert cross_validate(clear, penalties=[0.5, 1.0]).at_edge


def test_folds_are_even_and_fewer_prompts_than_folds_are_a_fold_each():
    folds = fold_of_prompts(np.arange(23), 5, seed=0)
    assert sorted(np.bincount(folds)) == [4, 4, 5, 5, 5]
    assert sorted(fold_of_prompts(np.arange(3), 5, seed=0)) == [0, 1, 2]
    assert (fold_of_prompts(np.arange(23), 5, seed=0) != fold_of_prompts(np.arange(23), 5, seed=1)).any()
    for roots in ([0], [0, 0, 0]):
        with pytest.raises(DataError, match="at least two prompts"):
            fold_of_prompts(np.array(roots), 5, seed=0)


@given(
    roots=st.lists(st.integers(0, 12), min_size=2, max_size=60).filter(lambda roots: len(set(roots)) > 1),
    num_folds=st.integers(2, 7),
    seed=st.integers(0, 3),
)
def test_a_root_is_in_one_fold_and_folds_differ_by_no_more_than_the_largest(roots, num_folds, seed):
    numbers = np.unique(roots, return_inverse=True)[1]
    folds = fold_of_prompts(numbers, num_folds, seed)
    assert all(len(set(folds[numbers == root])) == 1 for root in range(numbers.max() + 1))
    sizes = np.bincount(folds)
    assert len(sizes) == min(num_folds, numbers.max() + 1)
    assert sizes.min() > 0
    assert sizes.max() - sizes.min() <= np.bincount(numbers).max()


@pytest.mark.parametrize("count", [2, 4, 23, 200])
def test_where_no_prompts_belong_together_the_draws_are_those_by_prompt(count):
    """As the versions drew that knew no roots."""
    draw = np.random.default_rng((3, 1)).permutation(count)
    folds = np.empty(count, dtype=np.intp)
    folds[draw] = np.arange(count) % min(5, count)
    np.testing.assert_array_equal(fold_of_prompts(np.arange(count), 5, seed=3), folds)
    data = make_data(3 * count, prompts=count)
    counts = np.random.default_rng((3, 2)).multinomial(count, np.full(count, 1 / count), size=8).T
    drawn = data.weights[:, None] * counts[data.prompts]
    np.testing.assert_array_equal(bootstrap_weights(data, num_draws=8, seed=3), drawn)


def test_what_belongs_together_is_drawn_together():
    roots = np.arange(30) // 3
    data = make_data(90, prompts=30, roots=roots)
    drawn = (bootstrap_weights(data, num_draws=50, seed=0) / data.weights[:, None]).round(9)
    for column in drawn.T:
        counts = {root: set(column[roots[data.prompts] == root]) for root in range(10)}
        assert all(len(values) == 1 for values in counts.values())
        assert sum(values.pop() for values in counts.values()) == 10


def test_a_bootstrap_sample_takes_whole_prompts_as_many_as_there_are():
    data = make_data(90, prompts=30)
    drawn = bootstrap_weights(data, num_draws=50, seed=0) / data.weights[:, None]
    for column in drawn.T:
        counts = {prompt: set(column[data.prompts == prompt].round(9)) for prompt in range(30)}
        assert all(len(values) == 1 for values in counts.values())
        assert sum(values.pop() for values in counts.values()) == pytest.approx(30)
    assert len({tuple(column) for column in drawn.T}) == 50


def test_smaller_subsets_lie_within_larger_ones():
    small, half, whole = nested_subsets(40, [0.1, 0.5, 1.0], seed=0)
    assert (small.sum(), half.sum(), whole.sum()) == (4, 20, 40)
    assert (small <= half).all()
    assert next(nested_subsets(40, [0.001], seed=0)).sum() == 1


def test_comparisons_of_groups_keep_their_order_labels_and_prompts():
    groups = make_groups(7, replies=4)
    features = np.random.default_rng(0).normal(size=(sum(group.num_replies for group in groups), 3))
    data = compare(groups, features)
    row = offset = 0
    for number, group in enumerate(groups):
        for comparison in group.comparisons:
            first, second = features[offset + comparison.first], features[offset + comparison.second]
            np.testing.assert_array_equal(data.differences[row], first - second)
            judged = (comparison.label, comparison.margin, comparison.weight)
            assert (data.labels[row], data.margins[row], data.weights[row]) == judged
            assert data.prompt_keys[data.prompts[row]] == str(number)
            row += 1
        offset += group.num_replies
    assert row == len(data.labels)
    assert data.roots.tolist() == list(range(7))
    joined = compare(groups, features, np.array([9, 4, 9, 4, 1, 0, 9]))
    assert joined.roots.tolist() == [0, 1, 0, 1, 2, 3, 0], "numbered as they first occur"
    assert joined.num_roots == 4


def test_labels_that_say_nothing_are_taken_for_something_too_often_unless_said_to_be_chance() -> None:
    found, left = 0, 0
    for seed in range(200):
        data = replace(make_data(80, 2, seed=seed), labels=np.random.default_rng((seed, 1)).integers(0, 2, 80) * 1.0)
        logits = held_out_logits(data, cross_validate(data, penalties=(0.01, 1.0), seed=seed))
        right = np.heaviside(logits * np.where(data.labels > 0.5, 1.0, -1.0), 0.5)
        accuracy = stats.mean_share(right, data.prompt_keys)
        outside = not accuracy.low <= 0.5 <= accuracy.high
        found += outside
        left += outside and not may_be_chance(accuracy)
    assert found > 20, "more than 10 %: the interval takes comparisons as independent"
    assert left <= 16, "5 %, and two standard errors"


@pytest.mark.parametrize(
    ("value", "low", "high", "told"),
    [
        (0.6, 0.52, 0.68, True),
        (0.7, 0.6, 0.78, False),
        (0.52, 0.45, 0.59, False),
        (0.4, 0.32, 0.48, True),
        (0.6, math.nan, math.nan, False),
    ],
)
def test_what_may_be_chance_leaves_one_half_out_by_little(value: float, low: float, high: float, told: bool) -> None:
    assert may_be_chance(Estimate(value=value, low=low, high=high, n=9, method="")) is told


def test_a_fit_holds_no_turned_copy_of_the_features() -> None:
    data = make_data(4000, 200)
    start = np.zeros((200, 1))
    tracemalloc.start()
    try:
        fit(data, data.weights[:, None], np.array([0.1]), start_FB=start)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1.5 * data.differences.nbytes, "their squares, for a moment, and little besides"
