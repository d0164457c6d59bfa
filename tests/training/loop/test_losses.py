"""The loss formulas against slow, obvious versions and against the formulas of TRL."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from common import make_groups
from rewardlab.batch import pack
from rewardlab.training.loop.losses import (
    bradley_terry,
    centering,
    margin_regularizer,
    plackett_luce,
    preference_loss,
    score_regularizer,
    smooth,
    statistics,
    to_sums,
    total_weight,
)
from rewardlab.training.settings.config import LossConfig

numbers = st.floats(-50, 50)


def draw(count=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected, margin = torch.randn(3, count, dtype=torch.float64, generator=generator)
    return chosen * 3, rejected * 3, margin.abs()


@pytest.mark.slow
@given(d=numbers, y=st.floats(0, 1), m=st.floats(0, 3), eps=st.floats(0, 0.4), beta=st.floats(0.1, 3))
@settings(max_examples=300, deadline=None)
def test_the_loss_of_i_j_y_is_the_loss_of_j_i_one_minus_y(d, y, m, eps, beta):
    one = bradley_terry(*torch.tensor([[d], [y], [m]], dtype=torch.float64), beta=beta, label_smoothing=eps)
    other = bradley_terry(*torch.tensor([[-d], [1 - y], [m]], dtype=torch.float64), beta=beta, label_smoothing=eps)
    assert float(one) == pytest.approx(float(other), rel=1e-9, abs=1e-9)


def test_bradley_terry_margin_and_centring_equal_the_formulas_of_trl():
    chosen, rejected, margin = draw()
    scores = (chosen.requires_grad_(), rejected.requires_grad_())
    ones = torch.ones_like(chosen)
    for given_margin in (torch.zeros_like(margin), margin):
        theirs = -F.logsigmoid(chosen - rejected - given_margin).mean()
        theirs = theirs + 0.01 * torch.mean((chosen + rejected) ** 2)
        ours = (bradley_terry(chosen - rejected, ones, given_margin) + 0.01 * centering(chosen, rejected)).mean()
        assert float((ours - theirs).detach().abs()) <= 1e-10
        for own, other in zip(torch.autograd.grad(ours, scores), torch.autograd.grad(theirs, scores), strict=True):
            assert float((own - other).abs().max()) <= 1e-10


def test_soft_labels_and_smoothing_are_a_cross_entropy():
    chosen, rejected, _ = draw()
    label = torch.rand(64, dtype=torch.float64)
    target = label * 0.9 + (1 - label) * 0.1
    expected = F.binary_cross_entropy_with_logits(2 * (chosen - rejected), target, reduction="none")
    assert torch.allclose(bradley_terry(chosen - rejected, label, beta=2.0, label_smoothing=0.1), expected, atol=1e-12)


def test_the_two_smoothing_conventions_differ_by_a_factor_of_two():
    label = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    assert torch.allclose(smooth(label, 0.05), label * 0.9 + 0.1 / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_extreme_gaps_stay_finite_with_the_right_gradient(dtype):
    gap = torch.tensor([-1e4, -30.0, 0.0, 30.0, 1e4], dtype=dtype, requires_grad=True)
    loss = bradley_terry(gap, torch.ones(5, dtype=dtype))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert torch.allclose(gap.grad, -torch.sigmoid(-gap.detach()))


def test_a_tie_has_no_margin():
    zero = torch.zeros(1, dtype=torch.float64)
    assert float(bradley_terry(zero, zero + 0.5, zero + 3)) == pytest.approx(math.log(2))


def test_regularisers_are_what_they_say():
    first, second = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.5])
    assert margin_regularizer(first - second).tolist() == [4.0, 6.25]
    assert margin_regularizer(first - second, "l1").tolist() == [2.0, 2.5]
    assert score_regularizer(first, second).tolist() == [10.0, 4.25]
    assert centering(first, second).tolist() == [16.0, 2.25]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_plackett_luce_of_two_replies_is_bradley_terry(smoothing):
    rewards = torch.randn(20, dtype=torch.float64)
    ranking = torch.arange(20).reshape(10, 2)
    expected = bradley_terry(
        rewards[0::2] - rewards[1::2], torch.ones(10, dtype=torch.float64), beta=1.7, label_smoothing=smoothing
    )
    assert torch.allclose(plackett_luce(rewards, ranking, beta=1.7, label_smoothing=smoothing), expected, atol=1e-12)


def test_plackett_luce_of_three_replies_is_the_product_of_choices():
    rewards = torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64)
    best, middle, worst = (rewards[n].exp() for n in (2, 0, 1))
    expected = -math.log(best / (best + middle + worst)) - math.log(middle / (middle + worst))
    ranking = torch.tensor([[2, 0, 1, -1], [3, 0, -1, -1]])
    both = plackett_luce(rewards, ranking)
    assert float(both[0]) == pytest.approx(expected)
    assert float(both[1]) == pytest.approx(-math.log(torch.sigmoid(rewards[3] - rewards[0])))
    reverse = plackett_luce(rewards, torch.tensor([[1, 0, 2, -1], [0, 3, -1, -1]]))
    smoothed = plackett_luce(rewards, ranking, label_smoothing=0.25)
    assert torch.allclose(smoothed, 0.75 * both + 0.25 * reverse)


def test_plackett_luce_has_a_finite_gradient_where_rows_are_filled():
    rewards = torch.randn(5, dtype=torch.float64, requires_grad=True)
    plackett_luce(rewards, torch.tensor([[2, 0, 1, 4], [3, 0, -1, -1]]), label_smoothing=0.1).sum().backward()
    assert rewards.grad.isfinite().all()
    assert rewards.grad.abs().min() > 0


def test_the_whole_loss_equals_a_loop_over_comparisons():
    config = LossConfig(
        beta=1.3, label_smoothing=0.1, regularization_lambda=0.3, score_regularization_lambda=0.05, center_lambda=0.02
    )
    groups = make_groups(6, replies=4)
    batch = pack(groups)
    rewards = torch.randn(batch.num_replies, dtype=torch.float64)
    expected, offset = 0.0, 0
    for group in groups:
        for c in group.comparisons:
            i, j, y = offset + c.first, offset + c.second, c.label
            if y < 0.5:
                i, j, y = j, i, 1 - y
            d = float(rewards[i] - rewards[j])
            logit = 1.3 * d - (c.margin if y > 0.5 else 0.0)
            target = y * 0.9 + (1 - y) * 0.1
            p = 1 / (1 + math.exp(-logit))
            loss = -target * math.log(p) - (1 - target) * math.log(1 - p)
            ri, rj = float(rewards[i]), float(rewards[j])
            expected += c.weight * (loss + 0.3 * d * d + 0.05 * (ri * ri + rj * rj) + 0.02 * (ri + rj) ** 2)
        offset += group.num_replies
    assert float(preference_loss(rewards, batch, config)) == pytest.approx(expected, abs=1e-9)


def test_plackett_luce_takes_the_place_of_comparisons_only_where_there_is_a_ranking():
    ranked, unranked = make_groups(2, replies=4, seed=5)
    unranked = replace(unranked, ranking=None)
    config = LossConfig(kwise_loss="plackett-luce", label_smoothing=0.0)
    batch = pack([ranked, unranked])
    rewards = torch.randn(batch.num_replies, dtype=torch.float64)
    weight = sum(c.weight for c in ranked.comparisons)
    own = plackett_luce(rewards, torch.tensor([ranked.ranking]))[0] * weight
    rest = preference_loss(rewards[ranked.num_replies :], pack([unranked]), LossConfig(label_smoothing=0.0))
    assert float(preference_loss(rewards, batch, config)) == pytest.approx(float(own + rest))
    assert total_weight(batch) == pytest.approx(weight + sum(c.weight for c in unranked.comparisons))


def test_statistics_use_raw_labels_count_ties_half_and_never_compare_nan():
    (group,) = make_groups(1, seed=1)
    from rewardlab.core.types import Comparison

    comparisons = (
        Comparison(first=0, second=1, label=1.0),
        Comparison(first=0, second=1, label=0.0),
        Comparison(first=0, second=1, label=0.5),
        Comparison(first=0, second=0, label=1.0),
    )
    group = replace(group, suffixes=group.suffixes[:2], comparisons=comparisons, ranking=None)
    batch = pack([group, group])
    sums = to_sums(0.0, 1.0, statistics(torch.tensor([2.0, 1.0, float("nan"), 0.0]), batch, beta=1.0).tolist())
    assert (sums.comparisons, sums.non_finite, sums.label_ties, sums.score_ties) == (8, 4, 1, 1)
    assert (sums.decided, sums.correct, sums.margin) == (3, 1.5, 0.0)
    assert sums.nll == pytest.approx(
        -math.log(torch.sigmoid(torch.tensor(1.0))) * 1
        - math.log(torch.sigmoid(torch.tensor(-1.0)))
        - 0.5 * math.log(0.7310586)
        - 0.5 * math.log(0.2689414)
        + math.log(2),
        abs=1e-5,
    )


def test_a_ranking_of_replies_of_the_same_tokens_has_the_loss_of_chance_and_no_gradient():
    group = next(group for group in make_groups(20, replies=4) if group.num_replies == 4)
    alike = replace(group, suffixes=(group.suffixes[0],) * 4, ranking=(2, 0, 3, 1))
    batch = pack([alike])
    assert batch.ranking_GK.tolist() == [[0, 0, 0, 0]]
    assert set(batch.first_C.tolist()) == {0}
    rewards = torch.linspace(-3.3, 3.1, 4, requires_grad=True)
    loss = preference_loss(rewards, batch, LossConfig(kwise_loss="plackett-luce"))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.log(math.factorial(4)) * total_weight(batch), rel=1e-6)
    assert rewards.grad is not None
    assert rewards.grad.tolist() == [0.0, 0.0, 0.0, 0.0]
