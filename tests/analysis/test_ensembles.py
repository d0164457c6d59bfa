"""Combinations of members by hand, and disagreement against scikit-learn's AUC."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from rewardlab.analysis.ensembles import Scale, combine, disagreement, on_one_scale, scale_of
from rewardlab.analysis.influence import area_under_curve, auroc
from rewardlab.core.errors import DataError
from scored import rows_of

PLAIN = Scale(mean=0.0, std=1.0)


def test_mean_minimum_and_mean_minus_spread_by_hand():
    one, other = rows_of([[1.0, 4.0]]), rows_of([[3.0, 0.0]])
    ensemble = combine([one, other], [PLAIN, PLAIN], penalty=0.5)
    assert [row.score for row in ensemble.rows["mean"]] == [2.0, 2.0]
    assert [row.score for row in ensemble.rows["minimum"]] == [1.0, 0.0]
    wanted = [2 - 0.5 * math.sqrt(2), 2 - 0.5 * math.sqrt(8)]
    assert [row.score for row in ensemble.rows["lower"]] == pytest.approx(wanted)
    assert ensemble.rows["mean"][0].comparisons == one[0].comparisons


@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 50), st.floats(-100, 100), st.integers(0, 100))
def test_units_and_locations_of_members_do_not_matter(factor, shift, seed):
    draw = np.random.default_rng(seed)
    one, other = (rows_of(draw.normal(size=(8, 2)).tolist()) for _ in range(2))
    moved = [replace(row, score=row.score * factor + shift) for row in other]
    before = combine([one, other], [scale_of(rows, beta=1.0) for rows in (one, other)])
    after = combine([one, moved], [scale_of(one, beta=1.0), scale_of(moved, beta=1 / factor)])
    for how in before.rows:
        assert [row.score for row in after.rows[how]] == pytest.approx([r.score for r in before.rows[how]], abs=1e-6)
    assert after.beta == pytest.approx(before.beta)


def test_members_in_another_order_and_rows_in_another_order_give_the_same():
    draw = np.random.default_rng(0)
    one, other = (rows_of(draw.normal(size=(6, 2)).tolist()) for _ in range(2))
    first = combine([one, other], [PLAIN, PLAIN])
    again = combine([list(reversed(other)), one], [PLAIN, PLAIN])
    scores = [{(row.preference_id, row.reply): row.score for row in found.rows["lower"]} for found in (first, again)]
    assert scores[0] == pytest.approx(scores[1])


def test_preferences_that_a_member_lacks_are_counted_and_left_out():
    one, other = rows_of([[1.0, 0.0]] * 4), rows_of([[2.0, 0.0]] * 4)
    ensemble = combine([one, [row for row in other[:-1] if row.preference_id != "d.jsonl:1"]], [PLAIN, PLAIN])
    assert {row.preference_id for row in ensemble.rows["mean"]} == {"d.jsonl:0", "d.jsonl:2"}
    assert ensemble.left_out == 2
    with pytest.raises(DataError, match="no preference in common"):
        combine([one, [replace(row, source="other") for row in other]], [PLAIN, PLAIN])
    with pytest.raises(DataError, match="too long for one member and not for another"):
        combine([one, [row for row in other if row.reply == 0]], [PLAIN, PLAIN])


def test_a_score_that_is_not_finite_leaves_no_combination():
    ensemble = combine([rows_of([[math.nan, 1.0], [1.0, 0.0]]), rows_of([[1.0, 1.0], [1.0, 0.0]])], [PLAIN, PLAIN])
    for rows in ensemble.rows.values():
        assert math.isnan(rows[0].score)
        assert all(math.isfinite(row.score) for row in rows[1:])
    assert disagreement(ensemble).num_right == 1


def test_a_member_that_says_the_same_of_all_has_no_scale():
    with pytest.raises(DataError, match="the same score"):
        scale_of(rows_of([[1.0, 1.0]] * 3), beta=1.0)


def test_the_two_areas_are_one_statistic():
    draw = np.random.default_rng(7)
    preferred, other = draw.normal(0.5, 1, 300).round(1), draw.normal(0, 1, 300).round(1)
    comparisons = np.arange(300)
    by_sides = auroc(np.concatenate([preferred, other]), np.repeat([True, False], 300), np.tile(comparisons, 2))
    of_pairs = area_under_curve(preferred, other, comparisons)
    assert by_sides.value == pytest.approx(of_pairs.value, abs=1e-12)
    assert (by_sides.low, by_sides.high) == pytest.approx((of_pairs.low, of_pairs.high), abs=0.005)


def test_auroc_is_that_of_scikit_learn_with_ties():
    metrics = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(1)
    values, positive = draw.integers(0, 12, 300).astype(float), draw.random(300) < 0.2
    found = auroc(values, positive, np.arange(300))
    assert found.value == pytest.approx(metrics.roc_auc_score(positive, values))
    assert found.low < found.value < found.high
    assert math.isnan(auroc(values, np.zeros(300, dtype=bool), np.arange(300)).value)


def test_few_mistakes_have_an_auroc_without_an_interval():
    values = np.random.default_rng(0).normal(size=200)
    for mistakes in (9, 10):
        found = auroc(values, np.arange(200) < mistakes, np.arange(200))
        assert math.isnan(found.low) == (mistakes == 9)
    clustered = auroc(values, np.arange(200) < 18, np.arange(200) // 2)
    assert clustered.method == "too few prompts of the rarer kind (9)"


def test_the_interval_of_auroc_is_delongs():
    """Its variance by the definition: var(V10)/m + var(V01)/n, here as sums of squares over m² and n²."""
    draw = np.random.default_rng(2)
    positive = np.arange(4000) < 800
    values = draw.normal(size=4000) + 0.5 * positive
    found = auroc(values, positive, np.arange(4000))
    above, below = values[positive], values[~positive]
    v10 = (above[:, None] > below).mean(1)
    v01 = (above[:, None] > below).mean(0)
    error = math.sqrt(v10.var() / 800 + v01.var() / 3200)
    assert (found.high - found.low) / (2 * 1.96) == pytest.approx(error, rel=0.02)


def test_disagreement_that_marks_the_errors_is_seen_and_noise_is_not():
    draw = np.random.default_rng(3)
    margin = np.where(draw.random(400) < 0.8, 1.0, -1.0)
    spread = np.where(margin < 0, 2.0, 0.5) * draw.integers(13, 20, 400) / 16  # sums without rounding
    members = [rows_of(np.stack([margin + sign * spread, np.zeros(400)], axis=1).tolist()) for sign in (1, -1)]
    found = disagreement(combine(members, [PLAIN, PLAIN]))
    assert found.by_spread.value == 1
    assert (found.num_errors, found.num_right) == (int((margin < 0).sum()), int((margin > 0).sum()))
    assert found.by_margin.value == pytest.approx(0.5), "the mean margins are of one size"


def test_mistakes_with_the_smaller_mean_margins_are_told_by_these():
    for wrong, told in ((-1.0, 1.0), (-3.0, 0.0)):
        margin = np.where(np.arange(60) < 20, wrong, 2.0)
        members = [rows_of(np.stack([margin + sign, np.zeros(60)], axis=1).tolist()) for sign in (0.5, -0.5)]
        assert disagreement(combine(members, [PLAIN, PLAIN])).by_margin.value == told


def test_labels_below_one_half_prefer_the_second_and_tied_ones_are_left_out():
    swapped = combine([rows_of([[0.0, 1.0]] * 12, label=0.0), rows_of([[0.0, 2.0]] * 12, label=0.2)], [PLAIN, PLAIN])
    assert disagreement(swapped).num_errors == 0
    tied = combine([rows_of([[0.0, 1.0]] * 12, label=0.5)] * 2, [PLAIN, PLAIN])
    assert (disagreement(tied).num_errors, disagreement(tied).num_right) == (0, 0)


def test_what_a_member_adds_to_all_replies_of_a_prompt_and_its_unit_do_not_matter():
    generator = np.random.default_rng(0)
    prompts = [str(k // 4) for k in range(40)]
    one, other = generator.normal(size=(2, 40))
    offsets = np.repeat(generator.normal(size=10) * 100, 4)
    plain = on_one_scale(np.stack([one, other]), prompts)
    moved = on_one_scale(np.stack([one, 7 * other + offsets]), prompts)
    assert moved == pytest.approx(plain, abs=1e-9)
    by_prompt = plain.reshape(2, 10, 4)
    assert by_prompt.mean(axis=2) == pytest.approx(np.zeros((2, 10)), abs=1e-12)
    assert np.square(by_prompt).sum(axis=(1, 2)) == pytest.approx([30.0, 30.0])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_member_that_tells_no_two_replies_to_a_prompt_apart_has_no_scale(sign):
    levels = sign * np.repeat([0.1, 0.7, 0.3], 3)
    with pytest.raises(DataError, match="member 2 gives all replies to each prompt the same score"):
        on_one_scale(np.stack([np.arange(9.0), levels]), [str(k // 3) for k in range(9)])


def test_the_interval_of_auroc_has_students_quantile_for_the_prompts_of_the_rarer_kind():
    draw = np.random.default_rng(4)
    positive = np.arange(2000) < 12
    values = draw.normal(size=2000)
    found = auroc(values, positive, np.arange(2000))
    above, below = values[positive], values[~positive]
    v10, v01 = (above[:, None] > below).mean(1), (above[:, None] > below).mean(0)
    error = math.sqrt(v10.var() / 12 + v01.var() / 1988)
    # Near ½ the score interval is about symmetric, with reach q·error/√(1 + q²/n) for n = p(1 − p)/error².
    quantile = float(student.ppf(0.975, 11))
    number = found.value * (1 - found.value) / error**2
    reach = quantile * error / math.sqrt(1 + quantile**2 / number)
    assert (found.high - found.low) / 2 == pytest.approx(reach, rel=0.02)


def test_an_auroc_of_1_is_known_no_better_than_ten_mistakes_can_tell():
    positive = np.arange(1000) < 10
    found = auroc(positive * 1.0, positive, np.arange(1000))
    alone = auroc((np.arange(20) < 10) * 1.0, np.arange(20) < 10, np.arange(20))
    assert (found.value, found.high, found.n) == (1.0, 1.0, 1000)
    assert found.low == alone.low < 0.8
    turned = auroc(1.0 - positive, positive, np.arange(1000))
    assert (turned.low, turned.high) == (0.0, pytest.approx(1 - found.low))
