"""Heads fitted to given states: held-out scores, bootstrap heads, the learning curve, folds by conversation."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

import rewardlab.probing.heads as heads_module
from common import make_groups, stored
from planted import planted
from rewardlab.analysis.linear import compare
from rewardlab.core.types import Comparison
from rewardlab.probing.heads import Features, fit_heads, fit_layer, judged_of, learning_curve, uncertainty


def fitted(groups, states, *, num_folds=5, num_draws=0, seed=0):
    """(layer fit, heads, features)."""
    features = Features.of(groups, states)
    found = fit_layer(features, layer=7, num_folds=num_folds, seed=seed)
    return found, fit_heads(features, found, num_draws=num_draws, seed=seed), features


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_a_planted_head_is_found_and_its_scores_are_held_out():
    groups, states, truth = planted(400, replies=3)
    found, heads, _ = fitted(groups, states)
    assert cosine(heads.head_W, truth) > 0.97
    assert found.result.overall.sums.accuracy > 0.85
    shuffled = [
        replace(group, comparisons=tuple(replace(c, label=float(flip)) for c in group.comparisons))
        for group, flip in zip(groups, np.random.default_rng(1).integers(0, 2, len(groups)), strict=True)
    ]
    blind, _, _ = fitted(shuffled, np.random.default_rng(2).normal(size=(len(states), 300)))
    assert 0.4 < blind.result.overall.sums.accuracy < 0.6, "300 features of noise learn nothing that is held out"


def test_the_head_is_that_of_a_direct_fit_on_the_states():
    groups, states, _ = planted(200)
    groups = [
        replace(group, comparisons=tuple(replace(c, weight=3.0 if n % 2 else 0.5) for c in group.comparisons))
        for n, group in enumerate(groups)
    ]
    found, heads, _ = fitted(groups, states)
    scale = np.sqrt((compare(groups, states).differences ** 2).mean(0))
    data = compare(groups, states / scale)
    sign = 2 * data.labels - 1

    def objective(theta):
        losses = np.logaddexp(0, -sign * (data.differences @ theta))
        return (data.weights * losses).sum() / data.weights.sum() + found.penalty * 0.8 / 2 * theta @ theta

    best = minimize(objective, np.zeros(12), tol=1e-12)
    np.testing.assert_allclose(heads.head_W * scale, best.x, atol=5e-3)
    unweighted = [replace(g, comparisons=tuple(replace(c, weight=1.0) for c in g.comparisons)) for g in groups]
    other = fit_heads(Features.of(unweighted, states), found, num_draws=0, seed=0)
    assert np.abs(other.head_W - heads.head_W).max() > 0.02 * np.abs(heads.head_W).max()


def test_a_dimension_that_differs_by_rounding_alone_is_left_out():
    groups, states, _ = planted(200)
    noise = np.random.default_rng(4).normal(size=len(states))
    states[:, 3] = (3000 + 1e-4 * noise).astype(np.float32)
    states[:, 5] = 1.0
    _, heads, _ = fitted(groups, states)
    assert heads.head_W[3] == heads.head_W[5] == 0.0
    assert np.isfinite(heads.head_W).all()


def test_far_from_zero_scores_are_not_rounded_to_ties():
    groups, states, _ = planted(200)
    far = states + 1e5
    one, other = (fitted(groups, of)[0].result.overall for of in (states, far))
    assert other.sums.score_ties == 0
    assert other.sums.accuracy == one.sums.accuracy


@pytest.mark.slow
def test_bootstrap_heads_spread_as_fresh_samples_do():
    def accuracy(groups, states, heads):
        return uncertainty(groups, states, heads).over_heads.value

    test, test_states, _ = planted(1500, width=60, seed=1000, noise=3.0)
    chosen = replace(fitted(*planted(150, width=60, noise=3.0)[:2])[0], penalty=0.2)
    fresh, ranges = [], []
    for seed in range(12):
        groups, states, _ = planted(150, width=60, seed=seed, noise=3.0)
        heads = fit_heads(Features.of(groups, states), chosen, num_draws=100, seed=0)
        fresh.append(accuracy(test, test_states, heads))
        found = uncertainty(test, test_states, heads)
        assert found.over_heads.low < found.over_heads.value < found.over_heads.high
        assert found.bias < 0, "each bootstrap head has seen fewer prompts"
        ranges.append(found.over_heads.high - found.over_heads.low)
    assert 0.5 < np.mean(ranges) / (2 * 1.96 * np.std(fresh)) < 2


def test_a_range_is_of_a_hundred_heads_or_more():
    groups, states, _ = planted(60)
    chosen, _, features = fitted(groups, states)
    for count in (1, 99):
        few = uncertainty(groups, states, fit_heads(features, chosen, num_draws=count, seed=0))
        assert np.isnan([few.over_heads.low, few.over_heads.high]).all()
        assert few.over_heads.method == f"too few bootstrap heads ({count}; a range needs 100)"
    enough = uncertainty(groups, states, fit_heads(features, chosen, num_draws=100, seed=0)).over_heads
    assert enough.low <= enough.value <= enough.high


@pytest.mark.slow
def test_the_curve_rises_and_its_end_is_the_cross_validation():
    groups, states, _ = planted(400, width=30)
    weighted = [replace(g, comparisons=tuple(replace(c, weight=2.0) for c in g.comparisons)) for g in groups]
    found, _, features = fitted(groups, states)
    curve = learning_curve(features, found, seed=0)
    assert [point.share for point in curve] == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0]
    assert [point.loss.value for point in curve] == sorted((point.loss.value for point in curve), reverse=True)
    end, judged = curve[-1].accuracy, found.result.overall.estimates["eval_accuracy"]
    assert (end.value, end.low, end.high) == pytest.approx((judged.value, judged.low, judged.high), abs=1e-9)
    assert curve[-1].loss.value == pytest.approx(found.result.overall.sums.mean_nll, abs=1e-4)
    assert curve[-1].comparisons == pytest.approx(0.8 * sum(len(group.comparisons) for group in groups))
    again = learning_curve(Features.of(weighted, states), found, seed=0)
    assert [point.loss.value for point in again] == pytest.approx([point.loss.value for point in curve], abs=1e-4)


def test_the_small_ends_of_the_curve_are_means_over_different_draws(monkeypatch):
    groups, states, _ = planted(120, width=30)
    found, _, features = fitted(groups, states)
    three = learning_curve(features, found, seed=0)
    monkeypatch.setattr("rewardlab.probing.heads.DRAWS", 1)
    one = learning_curve(features, found, seed=0)
    assert one[0].accuracy.value != three[0].accuracy.value
    assert one[-1] == three[-1]
    assert 0 <= one[0].accuracy.low < one[0].accuracy.high <= 1


def test_a_smaller_share_is_fitted_with_a_stronger_penalty_of_the_mean(monkeypatch):
    seen = []
    groups, states, _ = planted(120)
    found, _, features = fitted(groups, states)
    original = heads_module.fit
    monkeypatch.setattr(
        heads_module,
        "fit",
        lambda data, weights, penalties: (seen.append(penalties), original(data, weights, penalties))[1],
    )
    learning_curve(features, found, seed=0)
    means = [penalties.mean() for penalties in seen]
    assert means == sorted(means, reverse=True)
    assert means[-1] == pytest.approx(found.penalty, rel=0.05)
    assert means[0] == pytest.approx(16 * found.penalty, rel=0.3)


def test_where_the_heads_agree_the_head_is_more_often_right():
    groups, states, _ = planted(300, noise=2.0)
    _, heads, _ = fitted(groups, states, num_draws=100)
    test, test_states, _ = planted(400, seed=5, noise=2.0)
    found = uncertainty(test, test_states, heads)
    assert found.sure.value > found.unsure.value + 0.1
    assert found.num_sure + found.num_unsure == found.over_heads.n == 400
    offset = np.cumsum([0, *(group.num_replies for group in test)])
    difference = np.array([test_states[n] - test_states[n + 1] for n in offset[:-1]])
    margins = difference @ heads.bootstrap_WB
    own = difference @ heads.head_W
    rows = found.comparisons
    np.testing.assert_allclose([row["margin"] for row in rows], own, atol=1e-9)
    np.testing.assert_allclose([row["margin_sd"] for row in rows], margins.std(1), rtol=1e-9)
    agree = (np.sign(margins) == np.sign(own)[:, None]).mean(1)
    np.testing.assert_allclose([row["heads_that_agree"] for row in rows], agree)
    assert found.num_sure == (agree >= 0.95).sum()


def remembered(conversations: int, *, each: int = 4, width: int = 80):
    """(groups, states) of which nothing can be learnt, but what was preferred in each conversation be remembered."""
    draw = np.random.default_rng(0)
    groups, states = [], []
    for number, group in enumerate(make_groups(conversations * each)):
        if number % each == 0:
            own, label = draw.normal(size=width), float(draw.integers(2))
        groups.append(replace(group, comparisons=(Comparison(first=0, second=1, label=label),)))
        states += [own + 0.1 * draw.normal(size=width), -own + 0.1 * draw.normal(size=width)]
    return groups, np.array(states)


def test_no_prompt_is_scored_by_a_head_that_saw_its_conversation():
    groups, states = remembered(40)
    by_prompt, _, _ = fitted(groups, states)
    assert by_prompt.result.overall.sums.accuracy > 0.9, "what is remembered of a conversation gives it away"
    found, heads, features = fitted(stored(groups, together=4), states, num_draws=20)
    assert 0.25 < found.result.overall.sums.accuracy < 0.75
    curve = learning_curve(features, found, seed=0)
    assert all(0.2 < point.accuracy.value < 0.8 for point in curve)
    assert curve[-1].accuracy.value == pytest.approx(found.result.overall.sums.accuracy)
    assert features.data.num_roots == 40
    assert heads.bootstrap_WB.shape == (80, 20)


def test_where_prompts_share_nothing_the_numbers_are_those_by_prompt():
    groups, states, _ = planted(60, replies=3)
    with_texts = stored(groups)
    (found, heads, features), (other, others, other_features) = (
        fitted(given, states, num_draws=10) for given in (list(with_texts), with_texts)
    )
    assert found.penalty == other.penalty
    assert [row.score for row in found.result.rows] == [row.score for row in other.result.rows]
    np.testing.assert_array_equal(heads.head_W, others.head_W)
    np.testing.assert_array_equal(heads.bootstrap_WB, others.bootstrap_WB)
    curves = (learning_curve(of, chosen, seed=0) for of, chosen in ((features, found), (other_features, other)))
    one, another = (
        [(point.comparisons, point.accuracy.value, point.loss.value) for point in curve] for curve in curves
    )
    assert one == another


def test_ties_alone_say_nothing_about_certainty():
    groups, states, _ = planted(30)
    tied = [replace(g, comparisons=tuple(replace(c, label=0.5) for c in g.comparisons)) for g in groups]
    _, heads, _ = fitted(groups, states, num_draws=10)
    assert uncertainty(tied, states, heads) is None


def test_features_are_made_with_room_for_one_copy_of_the_states() -> None:
    groups, _, _ = planted(1000)
    states = np.random.default_rng(0).normal(size=(2000, 256)).astype(np.float32)
    before = states.copy()
    tracemalloc.start()
    try:
        features = Features.of(groups, states)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3 * features.features_RF.nbytes, "the copy, the features and what their differences take"
    np.testing.assert_array_equal(states, before, "only the copy is centred")


def test_features_of_several_layers_read_the_groups_once():
    groups, states, _ = planted(50)
    read = []

    class Stored(list):
        def __iter__(self):
            read.append("all")
            return super().__iter__()

    judged = judged_of(Stored(groups))
    before = len(read)
    layers = [Features.of(Stored(groups), states * layer, judged) for layer in (1, 2, 3)]
    assert len(read) == before
    alone = Features.of(groups, states)
    np.testing.assert_array_equal(layers[0].features_RF, alone.features_RF)
    np.testing.assert_array_equal(layers[0].data.differences, alone.data.differences)
    np.testing.assert_array_equal(layers[0].data.roots, alone.data.roots)
    assert layers[0].data.prompt_keys == alone.data.prompt_keys
