"""Wrong labels in simulated data: found out of sample, with known precision, and never by evidence of themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, log_expit

from harness.wrongly_labelled import RULE, preference, simulated
from rewardlab.analysis.linear import fit
from rewardlab.core.errors import DataError
from rewardlab.core.types import Comparison, Estimate, Message
from rewardlab.curation.mislabels.cleaning import turned_round
from rewardlab.curation.mislabels.crossfit import Witness, comparisons_of, folds_of, hear
from rewardlab.curation.mislabels.lengths import Lengths, lengths_of
from rewardlab.curation.mislabels.noise import confident_count, estimate_noise, share_of_confident
from rewardlab.curation.mislabels.pairs import held_together, pairs_of
from rewardlab.curation.mislabels.planting import TOGETHER, plant
from rewardlab.curation.mislabels.ranking import flagged_rows, rank
from rewardlab.curation.mislabels.reasons import _reasons
from rewardlab.curation.mislabels.text import markdown
from rewardlab.curation.mislabels.worth import measure_worth
from rewardlab.data.config import ReadingConfig

# --- out of sample -------------------------------------------------------------------------------------------


def test_a_held_out_margin_is_that_of_a_head_fitted_without_the_fold():
    pairs, heads, _ = simulated(150, width=4)
    said = hear(heads[0], pairs, num_folds=5, seed=3)
    data = comparisons_of(pairs, heads[0].differences_NF)
    folds = folds_of(pairs, num_folds=5, seed=3)
    from rewardlab.analysis.linear import cross_validate

    penalty = cross_validate(data, num_folds=5, seed=3).penalty
    for fold in range(5):
        theta = fit(data, (data.weights * (folds != fold))[:, None], np.array([penalty]))[:, 0]
        np.testing.assert_allclose(said.margin_N[folds == fold], data.differences[folds == fold] @ theta, atol=1e-3)


def test_a_label_has_no_say_in_its_own_probability():
    pairs, heads, _ = simulated(120, width=4)
    folds = folds_of(pairs, num_folds=5, seed=0)
    one = np.zeros(120, dtype=bool)
    one[7] = True
    before = hear(heads[0], pairs, num_folds=5, seed=0)
    after = hear(heads[0], pairs.turned_round(one), num_folds=5, seed=0)
    # The heads of other folds have seen it, and with them its temperature, one number for the whole fold, moves a bit.
    mates = folds == folds[7]
    np.testing.assert_allclose(before.margin_N[mates], after.margin_N[mates], atol=1e-3)
    assert np.abs(before.margin_N - after.margin_N)[~mates].max() > 1e-2
    assert after.temperatures[folds[7]] == pytest.approx(before.temperatures[folds[7]], rel=0.1)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 1000), st.floats(1e-4, 1e4))
def test_probabilities_do_not_depend_on_the_unit_of_a_score(seed, unit):
    pairs, _, _ = simulated(80, seed=seed)
    margin = np.random.default_rng(seed).normal(size=80) + pairs.sign_N
    plain = hear(Witness(name="a", margins_N=margin), pairs, num_folds=4, seed=0)
    scaled = hear(Witness(name="b", margins_N=margin * unit), pairs, num_folds=4, seed=0)
    np.testing.assert_allclose(plain.log_odds_N, scaled.log_odds_N, rtol=1e-5)


def test_the_temperature_of_a_fold_minimises_the_loss_of_the_others():
    pairs, _, _ = simulated(200)
    margin = 3 * (np.random.default_rng(0).normal(size=200) + pairs.sign_N)
    said = hear(Witness(name="scores", margins_N=margin), pairs, num_folds=4, seed=0)
    folds = folds_of(pairs, num_folds=4, seed=0)
    for fold, temperature in enumerate(said.temperatures):
        towards = (margin * pairs.sign_N)[folds != fold]
        around = temperature * np.geomspace(0.5, 2, 201)
        losses = [-log_expit(towards / each).mean() for each in around]
        assert around[np.argmin(losses)] == pytest.approx(temperature, rel=0.01)
        np.testing.assert_allclose(said.log_odds_N[folds == fold], margin[folds == fold] / temperature, rtol=1e-6)


def test_a_witness_without_an_opinion_is_silent_and_cannot_flag():
    pairs, heads, _ = simulated(100)
    margin = heads[0].differences_NF[:, 0].copy()
    margin[:40] = np.nan
    ranking = rank([heads[0], Witness(name="some", margins_N=margin)], pairs, RULE)
    assert ranking.testimonies[1].num_silent == 40
    assert not ranking.flagged_N[:40].any()
    assert np.isfinite(ranking.together.log_odds_N).all(), "the other witness is heard there"


def test_a_witness_that_knows_nothing_flags_almost_nothing():
    pairs, _, _ = simulated(400)
    draw = np.random.default_rng(5)
    blind = [Witness(name=name, differences_NF=draw.normal(size=(400, 10))) for name in "ab"]
    ranking = rank(blind, pairs, RULE)
    assert ranking.flagged_N.sum() <= 2
    assert ranking.testimonies[0].accuracy.low < 0.5 < ranking.testimonies[0].accuracy.high


# --- ranking -------------------------------------------------------------------------------------------------


def test_wrong_labels_are_ranked_first_and_all_witnesses_together_beat_each_alone():
    pairs, heads, mistaken = simulated(800, wrong=0.1, noise=0.2)
    ranking = rank(heads, pairs, RULE)
    top = ranking.order_N[: int(mistaken.sum())]
    assert mistaken[top].mean() > 0.6
    assert mistaken[ranking.flagged_N].mean() > 0.8
    alone = [mistaken[np.argsort(row)[: len(top)]].mean() for row in ranking.probability_WN]
    assert mistaken[top].mean() > max(alone)


def test_labels_are_ranked_by_the_probability_that_all_witnesses_give_them():
    pairs, heads, _ = simulated(300, wrong=0.1)
    ranking = rank(heads, pairs, RULE)
    assert (np.diff(ranking.together.probability_N(pairs)[ranking.order_N]) >= 0).all()


@pytest.mark.parametrize(("longer", "said"), [(1, "1 character longer"), (-2, "2 characters shorter")])
def test_how_much_longer_the_preferred_reply_is_has_its_noun(longer, said):
    entry = {"witnesses": {}, "characters": {"preferred": 10 + longer, "other": 10}, "opposite_near_duplicates": []}
    assert _reasons({**entry, "annotators": None, "strength": None, "label": 1.0}) == [f"the preferred reply is {said}"]


def test_a_label_is_flagged_where_enough_witnesses_are_below_the_threshold():
    pairs, heads, _ = simulated(200, wrong=0.1)
    by_two, by_one = rank(heads, pairs, RULE), rank(heads, pairs, replace(RULE, agree=1))
    below = by_two.probability_WN < RULE.below
    np.testing.assert_array_equal(by_two.flagged_N, below.all(0))
    np.testing.assert_array_equal(by_one.flagged_N, below.any(0))
    assert by_one.flagged_N.sum() > by_two.flagged_N.sum() > 0


def test_a_row_of_several_judgements_is_wrong_where_at_least_half_of_them_are():
    judged = [Comparison(first=0, second=1)] * 2 + [Comparison(first=1, second=0)]
    preferences = [preference(number, comparisons=judged if number < 2 else ()) for number in range(60)]
    pairs = pairs_of(preferences, held_together(preferences, None)[0], seed=0)
    flagged = np.zeros(len(pairs), dtype=bool)
    flagged[2] = True  # the odd one out of the first row
    flagged[3:5] = True  # two of three of the second
    flagged[10] = True  # a row of one
    assert np.flatnonzero(flagged_rows(pairs, flagged)).tolist() == [1, pairs.owners_N[10]]


def test_the_ranking_by_one_witness_is_that_of_cleanlab():
    cleanlab_rank = pytest.importorskip("cleanlab.rank", reason="cleanlab is an oracle of tests alone")
    pairs, heads, _ = simulated(300, wrong=0.1)
    ranking = rank(heads, pairs, RULE)
    first = expit(ranking.together.log_odds_N)
    labels = (pairs.label_N > 0.5).astype(int)
    quality = cleanlab_rank.get_label_quality_scores(labels, np.stack([1 - first, first], 1), method="self_confidence")
    np.testing.assert_allclose(quality, ranking.together.probability_N(pairs), rtol=1e-9)
    np.testing.assert_array_equal(np.argsort(quality, kind="stable"), ranking.order_N)


def test_flags_that_are_about_length_are_named():
    preferences = [
        preference(number, replies=("a" * (5 + number % 3), "bb" * (5 + number % 2))) for number in range(200)
    ]
    preferences = [replace(one, replies=one.replies[::-1]) if n % 2 else one for n, one in enumerate(preferences)]
    pairs = pairs_of(preferences, held_together(preferences, None)[0], seed=0)
    sizes = np.array([[len(reply[0].content) for reply in one.replies] for one in preferences], dtype=float)
    longer = sizes[np.arange(200), pairs.first_N] - sizes[np.arange(200), pairs.second_N]
    flagged = longer * pairs.sign_N < 0
    found = lengths_of(pairs, flagged)
    assert (found.flagged.value, found.others.value) == (1.0, 0.0)
    assert found.lean
    assert "lean on length" in found.sentence()
    fair = lengths_of(pairs, np.arange(200) % 4 < 2)
    assert fair.flagged.value == fair.others.value == 0.5
    assert not fair.lean
    assert lengths_of(pairs, np.zeros(200, dtype=bool)) is None


# --- how many ------------------------------------------------------------------------------------------------


def test_the_confident_count_is_that_of_cleanlab():
    count = pytest.importorskip("cleanlab.count", reason="cleanlab is an oracle of tests alone")
    pairs, heads, _ = simulated(500, wrong=0.15)
    joint = rank(heads, pairs, RULE).together
    labels, first = (pairs.label_N > 0.5).astype(int), expit(joint.log_odds_N)
    confident, wrong, threshold = confident_count(joint.probability_N(pairs))
    matrix = count.compute_confident_joint(
        labels, np.stack([1 - first, first], 1), thresholds=[threshold, threshold], calibrate=False
    )
    assert int(wrong.sum()) == matrix[0, 1] + matrix[1, 0]
    # cleanlab puts at least one pair in every cell of the diagonal, which holds many here.
    assert int(confident.sum()) == matrix.sum()


@pytest.mark.parametrize("wrong", [0.05, 0.15, 0.3])
def test_with_good_witnesses_both_estimates_are_near_the_truth(wrong):
    pairs, heads, mistaken = simulated(2000, noise=0.05, wrong=wrong, seed=1)
    noise = estimate_noise(rank(heads, pairs, RULE).together, pairs)
    truth = mistaken.mean()
    assert noise.at_most.value - 0.06 < truth < noise.at_most.high
    assert abs(noise.confident.value - truth) < 0.06
    assert noise.wrong.value == pytest.approx(noise.confident.value * len(pairs))


def test_weak_witnesses_make_the_confident_count_too_high_as_the_page_says():
    pairs, heads, _ = simulated(1000, noise=8.0)
    noise = estimate_noise(rank(heads, pairs, RULE).together, pairs)
    assert noise.confident.low > 0.1, "no label is wrong, and people disagree"


def test_the_interval_of_the_confident_count_counts_the_noise_of_its_threshold():
    generator = np.random.default_rng(0)

    def probability_of(size):
        log_odds_N = 2 * np.abs(generator.normal(size=size)) + generator.normal(size=size)
        return expit(np.where(generator.random(size) < 0.2, -log_odds_N, log_odds_N))

    truth, held = share_of_confident(probability_of(400_000), np.arange(400_000).astype(str)).value, []
    names_N = np.arange(400).astype(str)
    for _ in range(400):
        found = share_of_confident(probability_of(400), names_N)
        held.append(found.low <= truth <= found.high)
    assert np.mean(held) >= 0.93, "90 % with the threshold taken as known"


@pytest.mark.slow
def test_the_at_most_estimate_is_an_upper_bound_for_labels_wrong_by_chance():
    held = 0
    for seed in range(20):
        pairs, heads, mistaken = simulated(400, noise=1.0, wrong=0.1, seed=seed)
        held += estimate_noise(rank(heads, pairs, RULE).together, pairs).at_most.high >= mistaken.mean()
    assert held >= 19


# --- planted -------------------------------------------------------------------------------------------------


def test_planted_labels_are_found_with_the_precision_that_a_count_by_hand_gives():
    pairs, heads, _ = simulated(300)
    planted = plant(heads, pairs, RULE, share=0.1, num_seeds=2)
    assert planted.labels == 30
    hits, flags = [], []
    for seed in range(2):
        wrong = np.zeros(300, dtype=bool)
        wrong[np.random.default_rng((0, 5, seed)).permutation(300)[:30]] = True
        ranking = rank(heads, pairs.turned_round(wrong), RULE)
        hits.append(wrong[ranking.order_N[:30]])
        flags.append((int((wrong & ranking.flagged_N).sum()), int(ranking.flagged_N.sum())))
    at = planted.rankings[0].at_depth[0.1]
    assert planted.rankings[0].name == TOGETHER
    assert at.precision.value == pytest.approx(np.mean(hits)) == pytest.approx(at.recall.value)
    assert at.precision.low < at.precision.value < at.precision.high
    found, named = map(sum, zip(*flags, strict=True))
    assert planted.flagged.precision.value == pytest.approx(found / named)
    assert planted.flagged.recall.value == pytest.approx(found / 60)
    assert at.precision.low > 0.3, "chance is 0.1"
    assert planted.rankings[0].area.low > 0.8


def test_blind_witnesses_find_planted_labels_as_chance_does():
    pairs, _, _ = simulated(400)
    draw = np.random.default_rng(5)
    blind = [Witness(name=name, differences_NF=draw.normal(size=(400, 5))) for name in "ab"]
    planted = plant(blind, pairs, RULE, share=0.2, num_seeds=3)
    at = planted.rankings[0].at_depth[0.2].precision
    assert at.low - 0.03 < 0.2 < at.high + 0.03
    assert planted.rankings[0].area.low < 0.53


def test_scores_that_are_there_are_not_fitted_to_planted_labels():
    pairs, heads, _ = simulated(300)
    fixed = Witness(name="scores", margins_N=4.0 * pairs.sign_N + np.random.default_rng(1).normal(size=300))
    planted = plant([heads[0], fixed], pairs, RULE, share=0.1, num_seeds=2)
    own = next(one for one in planted.rankings if one.name == "scores")
    assert own.at_depth[0.1].precision.value == 1.0
    assert own.less is not None
    assert own.less.value >= 0


@pytest.mark.slow
def test_mistakes_on_hard_pairs_are_found_less_often_than_labels_wrong_by_chance():
    draw, found = np.random.default_rng(0), {"hard": [], "by chance": []}
    for seed in range(10):
        pairs, heads, _ = simulated(800, seed=seed)
        # All features, and the head behind the labels, which `simulated` draws with this seed.
        features = np.concatenate([heads[0].differences_NF, heads[1].differences_NF[:, -5:]], axis=1)
        size = np.abs(features @ np.random.default_rng(99).normal(size=20))
        hard = (size < np.quantile(size, 0.3)) & (draw.random(800) < 1 / 3)
        by_chance = np.zeros(800, dtype=bool)
        by_chance[draw.permutation(800)[: hard.sum()]] = True
        for name, wrong in (("hard", hard), ("by chance", by_chance)):
            ranking = rank(heads, pairs.turned_round(wrong), RULE)
            found[name].append(wrong[ranking.order_N[: wrong.sum()]].mean())
    # docs/mislabels.md gives these two.
    assert round(np.mean(found["hard"]), 2) == 0.44
    assert round(np.mean(found["by chance"]), 2) == 0.66


# --- worth ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_labels_that_are_right_are_worth_keeping_and_no_effect_is_claimed():
    pairs, heads, _ = simulated(300, noise=2.0)
    worth = measure_worth(heads, pairs, RULE, num_seeds=2)
    assert {effect.verdict for effect in worth.effects} == {"none"}
    assert all("No effect can be told" in sentence for sentence in worth.sentences())
    assert all(effect.accuracy.low <= effect.accuracy.value <= effect.accuracy.high for effect in worth.effects)


def test_held_out_labels_have_no_say_in_what_is_removed(monkeypatch):
    pairs, heads, _ = simulated(200, wrong=0.2)
    from rewardlab.curation.mislabels import worth as module

    seen = []

    def watched(witnesses, inside, rule):
        seen.append(set(inside.roots_N.tolist()))
        return rank(witnesses, inside, rule)

    monkeypatch.setattr(module, "rank", watched)
    worth = measure_worth(heads, pairs, RULE, num_seeds=1)
    assert len(seen) == worth.folds
    every = set(pairs.roots_N.tolist())
    left_out = [every - part for part in seen]
    assert set().union(*left_out) == every
    assert sum(map(len, left_out)) == len(every), "each root is held out once"


def test_flags_that_are_right_are_found_to_be_worth_something():
    # Three labels in ten are wrong, two witnesses know which, and the held-out labels stay as wrong as ever.
    pairs, heads, _ = simulated(600, noise=0.1, width=60)
    right = [Witness(name=name, margins_N=8.0 * pairs.sign_N) for name in "ab"]
    wrong = np.random.default_rng(3).random(600) < 0.3
    worth = measure_worth([heads[0], *right], pairs.turned_round(wrong), replace(RULE, below=0.45), num_seeds=2)
    assert worth.removed == pytest.approx(wrong.mean() * 480, rel=0.05)
    assert [effect.verdict for effect in worth.effects] == ["better", "better"]
    assert "are better than heads on all rows" in worth.sentences()[0]
    assert worth.accuracy["without the flagged"].value < 0.7, "held-out rows are never cleaned"


def test_no_witness_puts_a_label_below_the_share_of_wrong_ones():
    pairs, _, _ = simulated(400)
    wrong = np.random.default_rng(0).random(400) < 0.42
    perfect = [Witness(name=name, margins_N=8.0 * pairs.sign_N) for name in "ab"]
    ranking = rank(perfect, pairs.turned_round(wrong), RULE)
    assert not ranking.flagged_N.any(), "probabilities hold for the labels as they are, of which two in five are wrong"
    assert wrong[ranking.order_N[: wrong.sum()]].all(), "the ranking is perfect all the same"


def test_worth_needs_a_head():
    pairs, _, _ = simulated(100)
    fixed = [Witness(name=name, margins_N=pairs.sign_N) for name in "ab"]
    with pytest.raises(DataError, match="Name one with --model"):
        measure_worth(fixed, pairs, RULE, num_seeds=1)


def test_a_share_of_too_few_flagged_pairs_has_a_dash_in_place_of_an_interval() -> None:
    few = Estimate(value=1.0, low=math.nan, high=math.nan, n=2, method="too few prompts (2)")
    others = Estimate(value=0.31, low=0.21, high=0.44, n=58, method="Wilson")
    said = Lengths(flagged=few, others=others).sentence()
    assert "100 % [—] of the flagged pairs and in 31 % [21, 44]" in said


@pytest.mark.parametrize("labels", [{"x": 1}, [1, 0], "[1, 0]"])
def test_labels_of_annotators_are_turned_by_their_sides_whatever_label_says(labels):
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "labels": labels, "label": 1}
    assert turned_round(row, "x", ReadingConfig()) == {**row, "chosen": "b", "rejected": "a"}
    assert turned_round({**row, "labels": None}, "x", ReadingConfig()) == {**row, "labels": None, "label": 0}


@pytest.mark.parametrize(("label", "turned"), [(0.9, 0.1), (0.1, 0.9), (1, 0), (1.0, 0.0), (0.7, 0.3), (1e-20, 1.0)])
def test_a_label_is_turned_round_by_its_digits(label: float, turned: float) -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "label": label}
    assert turned_round(row, "x", ReadingConfig()) == {**row, "label": turned}


@pytest.mark.parametrize(
    ("flagged", "title"), [(True, "# Labels that are probably wrong"), (False, "# No label is flagged")]
)
def test_a_page_of_pairs_of_which_none_is_flagged_says_so(flagged: bool, title: str) -> None:
    turns = (Message("user", "Hi"),)
    entry = {"rank": 1, "id": "a", "flagged": flagged, "reasons": ["short"]}
    assert markdown([entry], {1: (turns, turns, turns)}).startswith(title)
