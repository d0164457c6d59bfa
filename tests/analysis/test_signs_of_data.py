"""Warning signs of the data and of a learning rate far off are told where their numbers are clear."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rewardlab.analysis.health import ADVICE, Health, judge
from rewardlab.analysis.signs import RunFacts
from rewardlab.core.types import Estimate

FACTS = RunFacts(num_steps=120, warmup_steps=12)


def accuracy(value: float, low: float, high: float) -> Estimate:
    return Estimate(value=value, low=low, high=high, level=0.95, n=200, method="Wilson")


def row(step: int, **values: float) -> dict[str, Any]:
    """Values, each name with an interval of 0.05 at both sides."""
    intervals = {
        f"{name}_{end}": value + side
        for name, value in values.items()
        if name.startswith("eval_")
        for end, side in (("low", -0.05), ("high", 0.05))
    }
    return {"step": step, **values, **intervals}


def test_baselines_that_leave_next_to_nothing_to_learn_are_told():
    length, words = accuracy(0.927, 0.886, 0.954), accuracy(1.0, 0.981, 1.0)
    (sign,) = Health(FACTS).judge_baselines({"length only": {"test": length}, "bag of words": {"test": words}})
    assert (sign.name, sign.step, sign.advice) == ("shallow_labels", 0, ADVICE["shallow_labels"])
    assert sign.text == (
        "length alone reaches an accuracy of 0.927 [0.886, 0.954] on test data; a bag of words reaches an "
        "accuracy of 1.000 [0.981, 1.000] on test data."
    )
    honest = {"length only": {"test": accuracy(0.74, 0.65, 0.82)}, "bag of words": {"test": accuracy(0.95, 0.9, 0.98)}}
    assert Health(FACTS).judge_baselines(honest) == []
    few = {"bag of words": {"evaluation": accuracy(1.0, float("nan"), float("nan"))}}
    assert Health(FACTS).judge_baselines(few) == [], "of too few for an interval"


def test_a_model_that_is_worse_than_a_coin_on_test_data_or_a_source_is_told():
    found = {
        "the evaluation data": accuracy(0.7, 0.6, 0.8),
        "the test data": accuracy(0.47, 0.42, 0.53),
        "the test data of hh": accuracy(0.2, 0.15, 0.26),
    }
    health = Health(FACTS)
    (sign,) = health.judge_chosen(found)
    assert sign.name == "reversed_labels"
    assert sign.text == (
        "the accuracy of the chosen model is 0.200 [0.150, 0.260] on the test data of hh, below 0.5 by more than its "
        "interval."
    )
    assert health.judge_chosen({"the test data": accuracy(0.45, 0.41, 0.49)}) == [], "by a single interval only"
    assert Health(replace(FACTS, intended=frozenset({"reversed_labels"}))).judge_chosen(found) == []


@pytest.mark.parametrize("acc", [0.2, 0.44])
def test_margins_below_zero_are_not_called_overfitting_either(acc):
    rows = [
        row(12 * n, eval_accuracy=acc, eval_margin=-0.1 * n, eval_loss=0.7 + 0.1 * n)
        | {"train_nll": 0.7 - 0.03 * n, "train_loss": 0.7 - 0.03 * n, "train_pairs": 160, "train_accuracy": 0.6}
        for n in range(11)
    ]
    assert [sign.name for sign in judge(rows, FACTS)] == ["reversed_labels"]


@pytest.mark.parametrize(
    ("norms", "losses", "said"),
    [
        ([34.8, 10.6, 0.14, 0.05, 0.03], [0.694], "The gradient norm fell from 34.8 to 0.05, as where steps"),
        ([4.0, 3.0, 3.5, 4.0, 2.0], [0.694, 41.3], "So large a loss shows steps that are far too large"),
        ([4.0, 3.0, 3.5, 4.0, 2.0], [0.694], ""),
    ],
)
def test_no_skill_says_where_the_rate_is_too_high_and_not_too_low(norms, losses, said):
    rows = [
        {"step": 10 * n, "train_nll": losses[n % len(losses)], "train_accuracy": 0.5, "train_pairs": 160}
        | {"grad_norm": norms[min(n, 5) - 1]}
        for n in range(1, 13)
    ]
    (sign,) = judge(rows, FACTS)
    assert sign.name == "no_skill"
    assert said in sign.text
    assert ("--lr is too high" in sign.text) is bool(said)


def test_preferences_that_are_all_ties_are_said_to_be():
    rows = [{"step": 10 * n, "train_nll": 0.693, "train_pairs": 160, "grad_norm": 0.1} for n in range(1, 13)]
    (sign,) = judge(rows, FACTS)
    assert sign.text.endswith("a coin toss has 0.693; all of them are ties.")


def test_a_limit_that_cuts_one_side_is_told():
    (sign,) = Health(FACTS).start({}, cut_alone={"training": (57, 3, 100), "test": (12, 11, 100)})
    assert (sign.name, sign.step, sign.advice) == ("one_side_cut", 0, ADVICE["one_side_cut"])
    assert sign.text == (
        "the limit of tokens tells which reply is preferred: in 57 of the 60 preferences of the training data of which "
        "one reply alone lost something, of its prompt or of its own, that is the preferred one."
    )
    (sign,) = Health(FACTS).start({}, cut_alone={"test": (0, 40, 400)})
    assert "in 40 of the 40 preferences of the test data" in sign.text
    assert sign.text.endswith("of its prompt or of its own, that is the other one.")
    for counts in ((29, 0, 29), (60, 0, 601), (52, 8, 100), (30, 30, 60), (0, 0, 0)):
        assert Health(FACTS).start({}, cut_alone={"training": counts}) == [], counts


def test_cuts_that_follow_length_in_data_that_like_long_replies_are_not_told():
    # Labels that prefer the longer reply in 70 % of the pairs, as people's do, cut the preferred one as often.
    draw = np.random.default_rng(0)
    for _ in range(300):
        cut = int(draw.integers(30, 300))
        preferred = int(draw.binomial(cut, draw.uniform(0.5, 0.7)))
        assert Health(FACTS).start({}, cut_alone={"training": (preferred, cut - preferred, 2 * cut)}) == []


def test_a_model_that_simpler_judges_beat_on_the_same_pairs_is_told():
    found = {
        "length only": accuracy(-0.048, -0.098, 0.002),
        "bag of words": accuracy(-0.174, -0.221, -0.125),
        "before": accuracy(-0.05, -0.09, -0.02),
    }
    health = Health(FACTS)
    health.judge_chosen({"the test data": accuracy(0.49, 0.46, 0.53)})
    (sign,) = health.judge_beside(found, data="the test data")
    assert (sign.name, sign.advice) == ("behind_baseline", ADVICE["behind_baseline"])
    assert sign.text == (
        "right more often than the chosen model on the test data: a bag of words by 0.174 [0.125, 0.221] and the "
        "model before training by 0.050 [0.020, 0.090]."
    )
    nearly = {"bag of words": accuracy(-0.06, -0.11, -0.01)}
    assert health.judge_beside(nearly, data="the test data") == [], "by a single interval only"
    assert health.judge_beside({"before": accuracy(-1.0, float("nan"), float("nan"))}, data="the test data") == []


def test_a_model_of_reversed_labels_is_not_told_that_simpler_judges_beat_it():
    health = Health(FACTS)
    assert health.judge_chosen({"the test data": accuracy(0.2, 0.15, 0.26)})
    assert health.judge_beside({"before": accuracy(-0.3, -0.36, -0.24)}, data="the test data") == []


def test_a_control_with_nothing_to_learn_may_be_behind():
    facts = replace(FACTS, intended=frozenset({"behind_baseline"}))
    assert Health(facts).judge_beside({"bag of words": accuracy(-0.3, -0.36, -0.24)}, data="the test data") == []
