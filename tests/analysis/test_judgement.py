"""Laws of a judgement: numbers by oracles, whatever the order of rows and replies, and every row accounted for."""

from __future__ import annotations

import json
import math
import pickle
import random
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from rewardlab.analysis.influence import area_under_curve
from rewardlab.analysis.judgement import Judgement, judge_rows
from rewardlab.analysis.measures import AT_THRESHOLD, MEASURE_ALIASES, MEASURES, at_threshold, measure_named
from rewardlab.analysis.metrics import evaluate
from rewardlab.analysis.score_table import score_table
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Comparison, ScoreRow
from score_rows import Case, pair_rows, random_rows, ranked_rows, score_row

FEW = 10
"""Draws, where a test is not about what is drawn."""
scores = st.one_of(st.floats(-20, 20), st.sampled_from([0.0, 1.0, 150.0, math.nan, math.inf]))
labels = st.one_of(st.floats(0, 1).map(lambda y: round(y, 6)), st.sampled_from([0.0, 0.5, 1.0]))
cases = st.lists(st.tuples(scores, scores, labels), min_size=1, max_size=40)


def judged(rows: list[ScoreRow], **other) -> Judgement:
    return judge_rows(rows, **{"beta": 0.7, "draws": FEW} | other)


def two_sided(rows: list[ScoreRow]) -> tuple[np.ndarray, np.ndarray]:
    """Scores of preferred and of other replies, of hard labels, by a loop."""
    by_reply = {(row.source, row.preference_id, row.reply): row.score for row in rows}
    found = []
    for row in rows:
        for comparison in row.comparisons:
            pair = row.score, by_reply[row.source, row.preference_id, comparison.second]
            found.append(pair if comparison.label > 0.5 else pair[::-1])
    preferred, other = np.array(found).T
    return preferred, other


def test_numbers_that_training_prints_are_the_same_here() -> None:
    rows = random_rows(150)
    judgement, estimates = judged(rows), evaluate(rows, beta=0.7).estimates
    for name, estimate in estimates.items():
        ours = judgement.estimates[name]
        assert (ours.n, ours.method) == (estimate.n, estimate.method)
        for field in ("value", "low", "high"):
            assert getattr(ours, field) == pytest.approx(getattr(estimate, field), abs=1e-12), name


@pytest.mark.parametrize("shift", [0.0, 1e3, -1e6])
def test_auc_brier_and_loss_are_those_of_scikit_learn_also_for_large_scores_and_ties(shift: float) -> None:
    rows = [replace(row, score=row.score + shift) for row in random_rows(200)]
    preferred, other = two_sided(rows)
    assert len(np.unique(np.concatenate([preferred, other]))) < 100  # ties there are
    judgement = judged(rows)
    truth = np.repeat([1, 0], len(preferred))
    assert judgement["auc"].value == pytest.approx(roc_auc_score(truth, np.concatenate([preferred, other])), abs=1e-12)
    p = 1 / (1 + np.exp(-0.7 * (preferred - other)))
    ones = np.ones(len(p))
    assert judgement["brier_score"].value == pytest.approx(brier_score_loss(ones, p), abs=1e-9)
    assert judgement["nll"].value == pytest.approx(log_loss(ones, p, labels=[0, 1]), abs=1e-9)


@given(pairs=st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 101.0, 102.5]), st.sampled_from([-1.0, 0.0, 101.0]),
                                st.sampled_from([0.0, 1.0])), min_size=1, max_size=25))  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_auc_counts_every_combination_of_a_preferred_and_an_other_reply(pairs: list[Case]) -> None:
    rows = pair_rows(pairs)
    preferred, other = two_sided(rows)
    by_hand = np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a in preferred for b in other])
    found = area_under_curve(preferred, other, np.arange(preferred.size))
    assert found.value == pytest.approx(by_hand, abs=1e-12)


def test_other_labels_turn_accuracy_auc_and_margins_round() -> None:
    rows = random_rows(120)
    turned = [replace(row, comparisons=tuple(replace(c, label=1 - c.label) for c in row.comparisons)) for row in rows]
    one, other = judged(rows), judged(turned)
    for name in ("eval_accuracy", "eval_roc_auc", "eval_accuracy_macro", "eval_agreement", "eval_accuracy_by_prompt"):
        assert other[name].value == pytest.approx(1 - one[name].value, abs=1e-12), name
        assert other[name].low == pytest.approx(1 - one[name].high, abs=1e-9), name
    for name in ("eval_margin", "eval_margin_p50", "eval_calibration_slope"):
        assert other[name].value == pytest.approx(-one[name].value, abs=1e-9), name
    assert other["eval_margin_length_pearson"] == one["eval_margin_length_pearson"]
    assert one["eval_chosen_mean"].value == pytest.approx(other["eval_rejected_mean"].value)


def test_any_order_of_the_rows_gives_the_same_numbers_to_the_bit() -> None:
    rows = random_rows(80) + [replace(row, source="ranked") for row in ranked_rows(np.eye(12)[:, :4].tolist())]
    shuffled = rows.copy()
    random.Random(1).shuffle(shuffled)
    options = {"thresholds": (0.5,), "slices": {"kind": {("source-0", "row-0"): "a"}}}
    assert json.dumps(judged(shuffled, **options).as_dict()) == json.dumps(judged(rows, **options).as_dict())


@pytest.mark.slow
@given(pairs=cases)
@settings(max_examples=20, deadline=None)
def test_a_comparison_recorded_the_other_way_round_changes_nothing(pairs: list[Case]) -> None:
    if not any(math.isfinite(score) for case in pairs for score in case[:2]):
        pairs = [(1.0, 0.0, 1.0)]
    once, twice = (judged(pair_rows(pairs, each=2, swapped=swapped)) for swapped in (False, True))
    assert once.counts == twice.counts
    for name, estimate in once.estimates.items():
        for field in ("value", "low", "high"):
            values = getattr(estimate, field), getattr(twice.estimates[name], field)
            assert values[0] == pytest.approx(values[1], nan_ok=True, abs=1e-7, rel=1e-6), (name, field)
    for name in once.slices:
        parts = [[(part.label, part.num_comparisons) for part in one.slices[name]] for one in (once, twice)]
        assert parts[0] == parts[1], name


def test_label_ties_have_no_preferred_reply_and_are_in_no_slice_by_length_difference() -> None:
    lengths = [(5, 90), (40, 10), (7, 7), (30, 1)]
    sliced = []
    for swapped in (False, True):
        rows = pair_rows([(1.0, 0.0, 0.5)] * 2 + [(1.0, 0.0, 1.0)] * 2, swapped=swapped)
        rows = [replace(row, num_tokens=10 + lengths[int(row.preference_id[4:])][row.reply]) for row in rows]
        sliced.append([(part.label, part.num_comparisons) for part in judged(rows).slices["length_difference"]])
    assert sliced[0] == sliced[1] == [("0", 1), ("29", 1)]


@pytest.mark.slow
@given(pairs=cases)
@settings(max_examples=20, deadline=None)
def test_every_estimate_lies_in_its_interval_and_every_comparison_is_counted_once(pairs: list[Case]) -> None:
    if not any(math.isfinite(score) for case in pairs for score in case[:2]):
        pairs = [(1.0, 0.0, 1.0)]
    judgement = judged(pair_rows(pairs, each=2), thresholds=(0.0, 1.0))
    counts = judgement.counts
    assert counts.comparisons == len(pairs) == counts.decided + counts.label_ties + counts.non_finite
    assert set(judgement.estimates) <= set(MEASURES) | {at_threshold(s, t) for s in AT_THRESHOLD for t in (0.0, 1.0)}
    assert set(judgement.num_rows) == set(judgement.estimates)
    for name, estimate in judgement.estimates.items():
        assert math.isnan(estimate.low) or estimate.low <= estimate.value <= estimate.high, name
        assert math.isnan(estimate.low) == math.isnan(estimate.high), name
        assert math.isnan(estimate.low) or estimate.n >= 10, name
        assert estimate.method, name
    for slices in judgement.slices.values():
        assert sum(part.num_comparisons for part in slices) <= len(pairs)
    assert sum(part.num_comparisons for part in judgement.slices["source"]) == len(pairs)


def test_every_name_of_the_table_is_computed_where_there_are_groups_and_gold_scores() -> None:
    rows = ranked_rows(np.random.default_rng(0).normal(size=(30, 4)).tolist())
    gold = {(row.source, row.preference_id, row.reply): -float(row.reply) for row in rows}
    assert list(judged(rows, gold=gold).estimates) == list(MEASURES)
    assert set(judged(random_rows(20)).estimates) < set(MEASURES)


def test_all_names_in_use_lead_to_a_measure() -> None:
    assert set(MEASURE_ALIASES.values()) <= set(MEASURES)
    assert not set(MEASURE_ALIASES) & set(MEASURES)
    judgement = judged(random_rows(40), thresholds=(0.25,))
    seeds = ("eval_loss", "eval_pairwise_accuracy", "eval_mean_margin", "eval_margin_std", "eval_negative_margin_rate",
             "eval_roc_auc", "eval_ece", "eval_fpr@0.25", "eval_fnr@0.25", "fpr@0.25", "tpr@0.25")  # fmt: skip
    for name in seeds:
        assert not math.isnan(judgement[name].value), name
    assert measure_named("some_other") == "some_other"
    with pytest.raises(KeyError):
        judgement["some_other"]


def test_rates_at_a_threshold_count_a_score_at_it_as_positive() -> None:
    judgement = judged(pair_rows([(2.0, 1.0, 1.0), (1.0, 0.0, 1.0), (0.0, 2.0, 1.0)]), thresholds=(1.0, 100.5))
    assert judgement["eval_tpr@1"].value == pytest.approx(2 / 3)
    assert judgement["eval_fnr@1"].value == pytest.approx(1 / 3)
    assert judgement["eval_fpr@1"].value == pytest.approx(2 / 3)
    assert judgement["eval_fpr@100.5"].value == 0
    for spelt in ("eval_tpr@1.0", "tpr@1.", "eval_tpr@1e0", f"eval_tpr@{1.0}"):
        assert judgement[spelt] is judgement["eval_tpr@1"]
    for other in ("eval_tpr@2", "eval_tpr@one", "eval_tpr@", "eval_accuracy@1"):
        with pytest.raises(KeyError):
            judgement[other]


def test_soft_labels_weigh_by_how_decided_they_are() -> None:
    judgement = judged(pair_rows([(1.0, 0.0, 1.0), (0.0, 1.0, 0.75), (0.0, 0.0, 0.5)]))
    assert judgement["eval_accuracy"].value == 0.5
    assert judgement["eval_accuracy_soft"].value == pytest.approx(1 / 1.5)
    assert judgement["eval_agreement"].value == pytest.approx((1 + 0.25 + 0.5) / 3)
    assert judgement["eval_agreement_ceiling"].value == pytest.approx((1 + 0.75 + 0.5) / 3)
    assert judgement.counts.soft_labels == 1


def test_the_macro_mean_counts_each_source_once_and_the_mean_by_prompt_each_prompt() -> None:
    rows = pair_rows([(1.0, 0.0, 1.0)] * 3 + [(0.0, 1.0, 1.0)], each=4, source="large")
    rows += [replace(row, prompt_key="other", source="small") for row in pair_rows([(0.0, 1.0, 1.0)])]
    judgement = judged(rows)
    assert judgement["eval_accuracy"].value == pytest.approx(0.6)
    assert judgement["eval_accuracy_macro"].value == pytest.approx((0.75 + 0) / 2)
    assert judgement["eval_accuracy_by_prompt"].value == pytest.approx((0.75 + 0) / 2)


def test_an_interval_is_refused_below_ten_prompts() -> None:
    judgement = judged(random_rows(200, each=25), thresholds=(0.0,))
    for name, estimate in judgement.estimates.items():
        assert math.isnan(estimate.low), name
        assert "too few prompts (8)" in estimate.method or name == "eval_brier_uncertainty", (name, estimate.method)


def test_scores_that_are_not_finite_are_counted_and_change_nothing_else() -> None:
    rows = random_rows(60)
    bad = [replace(row, preference_id=f"bad {row.preference_id}", score=math.nan) for row in rows[:4]]
    clean, dirty = judged(rows), judged(rows + bad)
    assert (dirty.counts.non_finite, dirty.counts.non_finite_replies) == (2, 4)
    assert repr(dirty.estimates) == repr(clean.estimates), "equal, also where both are NaN"
    assert dirty.roc == clean.roc


def test_a_judgement_survives_json() -> None:
    judgement = judged(random_rows(60) + [replace(r, source="k") for r in ranked_rows(np.eye(12)[:, :3].tolist())])
    text = json.dumps(judgement.as_dict(), allow_nan=False)
    again = Judgement.from_dict(json.loads(text))
    assert again.as_dict() == judgement.as_dict()
    assert again.counts == judgement.counts
    assert again["auc"] == judgement["auc"]
    assert math.isnan(again.roc.threshold[0])


@pytest.mark.parametrize(
    "other",
    [
        {"seed": "0"},
        {"beta": "1e"},
        {"slices": [1]},
        {"estimates": None},
        {"counts": 3},
        {"reliability": {"null_miscalibration": [1]}},
        {"roc": {"threshold": "abc"}},
    ],
    ids=str,
)
def test_json_of_another_form_is_a_type_error(other: dict) -> None:
    values = judged(random_rows(20)).as_dict()
    merged = {name: values[name] | value if isinstance(value, dict) else value for name, value in other.items()}
    with pytest.raises(TypeError):
        Judgement.from_dict(values | merged)
    with pytest.raises(TypeError):
        Judgement.from_dict(json.loads("[]"))


def test_the_roc_curve_encloses_the_auc() -> None:
    judgement = judged(random_rows(150, ties=True))
    roc = judgement.roc
    assert (roc.false_positive[0], roc.true_positive[0]) == (0, 0)
    assert (roc.false_positive[-1], roc.true_positive[-1]) == (1, 1)
    assert np.trapezoid(roc.true_positive, roc.false_positive) == pytest.approx(judgement["auc"].value, abs=1e-9)
    many = judged(random_rows(2000, ties=False)).roc
    assert len(many.threshold) <= 201
    assert np.all(np.diff(many.true_positive) >= 0)


def test_slope_and_intercept_are_those_of_logistic_regressions() -> None:
    rows = random_rows(300, sharpness=1.5)
    preferred, other = two_sided(rows)
    logit = 0.7 * (preferred - other)
    judgement = judged(rows)
    x, y = np.concatenate([logit, -logit]), np.repeat([1, 0], len(logit))
    fitted = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10).fit(x[:, None], y)
    assert judgement["calibration_slope"].value == pytest.approx(fitted.coef_[0, 0], rel=1e-5)
    a = judgement["calibration_intercept"].value
    wins, p = np.where(logit == 0, 0.5, logit > 0), 1 / (1 + np.exp(-(a + np.abs(logit))))
    assert (wins - p).sum() == pytest.approx(0, abs=1e-8)


def test_slices_hold_every_comparison_and_missing_values_are_a_slice() -> None:
    rows = random_rows(120)
    keys = sorted({(row.source, row.preference_id) for row in rows})
    columns = {
        "turns": {key: number % 3 + 1 for number, key in enumerate(keys)},
        "strength": {key: number / 7 for number, key in enumerate(keys[:100])},
        "flagged": {key: number % 2 == 0 for number, key in enumerate(keys)},
    }
    slices = judged(rows, slices=columns).slices
    assert list(slices)[-3:] == ["turns", "strength", "flagged"]
    for name, parts in slices.items():
        assert sum(part.num_comparisons for part in parts) == 120, name
    assert [part.label for part in slices["turns"]] == ["1", "2", "3"]
    assert [part.label for part in slices["flagged"]] == ["no", "yes"]
    assert (len(slices["strength"]), slices["strength"][-1].label) == (6, "missing")
    assert slices["strength"][-1].num_comparisons == 20
    first = slices["source"][0]
    own = [row for row in rows if row.source == first.label]
    assert first.estimates["eval_accuracy"] == evaluate(own, beta=0.7).estimates["eval_accuracy"]
    assert len(slices["margin_decile"]) > 5


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"beta": 0.0}, ConfigError, "above 0"),
        ({"beta": math.nan}, ConfigError, "finite"),
        ({"thresholds": (math.inf,)}, ConfigError, "threshold"),
        ({"slices": {"source": {("made-up", "row-0"): 1}}}, DataError, "built-in"),
        ({"slices": {"turns": {("elsewhere", "row-0"): 1}}}, DataError, "none of the 1 preferences"),
        ({"gold": {("elsewhere", "row-0", 0): 1.0}}, DataError, "none of the 1 gold scores"),
        ({"gold": {("made-up", "row-0", 0): math.nan}}, DataError, "none of the 1 gold scores"),
        ({"beta": 1e200}, DataError, "smaller β"),
    ],
)
def test_settings_that_cannot_be_used_are_told(options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        judged(pair_rows([(1.0, 0.0, 1.0)]), **options)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no score rows"),
        (pair_rows([(1.0, 0.0, 1.0)]) * 2, "a reply twice"),
        (pair_rows([(1.0, 0.0, 1.0)])[:1], "no score row"),
        (pair_rows([(math.nan, math.inf, 1.0)]), "none of the 2 scores is finite"),
        (pair_rows([(1e200, 0.0, 1.0)]), "Divide the scores"),
        (pair_rows([(1.0, 0.0, math.nan)]), "label nan"),
        (pair_rows([(1.0, 0.0, 1.5)]), "label 1.5"),
        ([score_row(0, 0, 1.0, (Comparison(first=1, second=0),)), score_row(0, 1, 0.0)], "has the first reply 1"),
        ([score_row(0, 0, 1.0, (Comparison(first=0, second=0),)), score_row(0, 1, 0.0)], "with itself"),
    ],
)
def test_rows_that_cannot_be_judged_are_told(rows: list[ScoreRow], words: str) -> None:
    with pytest.raises(DataError, match=words):
        judged(rows)


def test_rows_without_comparisons_have_a_distribution_of_rewards_alone() -> None:
    judgement = judged([score_row(number, 0, float(number)) for number in range(12)])
    assert judgement["eval_score_mean"].value == 5.5
    assert math.isnan(judgement["eval_accuracy"].value)
    assert judgement["eval_accuracy"].method == "no data"


@pytest.mark.parametrize("size", [1e-200, 1e-160, 1e-155, 1e140])
def test_scores_of_any_size_are_judged(size: float) -> None:
    draw = np.random.default_rng(3)
    pairs = [(float(a), float(b), float(draw.random() < 0.7)) for a, b in draw.normal(size=(40, 2))]
    usual, found = (judged(pair_rows([(k * a, k * b, y) for a, b, y in pairs]), beta=1 / k) for k in (1.0, size))
    for name, own in usual.estimates.items():
        unit = size if re.search(r"_(margin|mean|std|margin_p\d+)$", name) else 1.0
        other, wanted = found[name], pytest.approx([own.value, own.low, own.high], rel=1e-9, abs=1e-12, nan_ok=True)
        assert [other.value / unit, other.low / unit, other.high / unit] == wanted, name
        assert other.method == own.method, name


def test_a_reply_in_several_comparisons_counts_in_each() -> None:
    comparisons = (Comparison(first=0, second=1), Comparison(first=0, second=2, label=0.0))
    rows = [score_row(0, 0, 1.0, comparisons), score_row(0, 1, 0.0), score_row(0, 2, 2.0)]
    judgement = judged(rows)
    assert judgement.counts.comparisons == judgement.num_rows["eval_accuracy"] == 2
    assert judgement["eval_chosen_mean"].value == 1.5
    assert judgement["eval_rejected_mean"].value == 0.5


def test_gold_scores_of_pairs_are_correlated_with_scores_and_replies_without_one_are_counted() -> None:
    rows = random_rows(60)
    generator = np.random.default_rng(0)
    gold = {(row.source, row.preference_id, row.reply): row.score + generator.normal() for row in rows[:100]}
    judgement = judged(rows, gold=gold)
    own = [(row.score, gold[row.source, row.preference_id, row.reply]) for row in rows[:100]]
    assert judgement["eval_gold_spearman"].value == pytest.approx(spearmanr(own).statistic)
    assert judgement["eval_gold_spearman"].low < judgement["eval_gold_spearman"].value
    assert judgement.num_rows["eval_gold_spearman"] == 100
    assert (judgement.counts.replies_without_gold, judged(rows).counts.replies_without_gold) == (20, 0)
    assert not {"eval_gold_regret", "eval_ndcg"} & set(judgement.estimates)


def test_comparisons_without_a_part_in_accuracy_with_length_controlled_are_counted() -> None:
    # 100 pairs of replies of equal length, 60 with differences of 1 or -1, and 3 that are far longer and won.
    differences = [0] * 100 + [1, -1] * 30 + [500] * 3
    rows = pair_rows([(1.0, 0.0, 1.0)] * len(differences))
    rows = [
        replace(row, num_tokens=510 + (differences[int(row.preference_id[4:])] if row.reply == 0 else 0))
        for row in rows
    ]
    judgement = judged(rows)
    assert judgement.num_rows["eval_accuracy_length_controlled"] == 60
    assert judgement.counts.length_uncontrolled == 103
    assert judgement.num_rows["eval_accuracy"] == 163
    equal = judged(pair_rows([(1.0, 0.0, 1.0)] * 12))
    assert equal.num_rows["eval_accuracy_length_controlled"] == 12 - equal.counts.length_uncontrolled == 0


def test_prompts_are_told_apart_by_short_texts_in_the_order_of_their_keys() -> None:
    rows = [replace(row, prompt_key=row.prompt_key * 400) for row in random_rows(300, each=2)]
    table = score_table(rows)
    keys = table.keys(table.pairs)
    assert max(map(len, keys)) == 3
    assert [str(table.prompts[int(key)]) for key in keys] == table.prompts[table.pairs.prompt].tolist()
    assert sorted(set(keys)) == table.names(np.arange(len(table.prompts)))


def test_what_was_judged_can_be_sent_to_another_process_and_turned_into_a_dict() -> None:
    rows = pair_rows([(1.0, 0.0, 1.0), (0.5, 2.0, 1.0)])
    for judged in (judge_rows(rows, beta=1.0, draws=FEW), evaluate(rows, beta=1.0)):
        assert repr(pickle.loads(pickle.dumps(judged))) == repr(judged)
        assert asdict(judged)["estimates"]["eval_accuracy"]["value"] == 0.5
