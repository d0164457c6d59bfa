"""Verdicts: what fails, what passes, what cannot be told, and in which words."""

from __future__ import annotations

import math

import numpy as np
import pytest

import diagnose_simulation
from common import make_groups
from rewardlab.core.types import Preference
from rewardlab.data.config import Control
from rewardlab.data.controls import changed_by
from rewardlab.diagnosing.arms import Arm
from rewardlab.diagnosing.heads import shuffle_groups
from rewardlab.diagnosing.verdicts import NAMES, Limits, exit_status, judge_all


def arm(truth: float, *, seed: int = 0, rows: int = 400, seeds: int = 5, spread: float = 0.02) -> Arm:
    """Every seed ranks nearly this share right, of the same conversations."""
    draw = np.random.default_rng(seed)
    order = draw.permutation(rows)
    right = [(order < (truth + spread * draw.normal()) * rows).astype(float) for _ in range(seeds)]
    return Arm(right_SN=np.stack(right), clusters=tuple(map(str, range(rows))))


TIES = Arm(right_SN=np.full((5, 400), 0.5), clusters=tuple(map(str, range(400))))
HONEST = {
    "full": arm(0.75),
    "label_shuffle": arm(0.5, seed=1, spread=0.03),
    "prompt_only": TIES,
    "response_only": arm(0.62, seed=2),
    "random_negatives": arm(0.55, seed=3),
    "random_negatives_changed": arm(0.95, seed=4),
    "length_matched": arm(0.745, seed=5),
    "random_subset": arm(0.75, seed=6),
    "length_only": arm(0.51, seed=7),
    "bag_of_words": arm(0.63, seed=8),
}


def verdicts(**changes: Arm) -> dict[str, str]:
    return {one.control: one.verdict for one in judge_all({**HONEST, **changes}, Limits())}


def test_an_honest_model_passes_every_control():
    assert verdicts() == dict.fromkeys(NAMES, "pass")


@pytest.mark.parametrize("full", [0.5, 0.75])
def test_of_a_model_at_chance_on_as_many_pairs_nothing_is_said_about_length(full):
    changes = {"full": arm(full), "length_matched": arm(0.5, seed=5), "random_subset": arm(0.5, seed=6)}
    found = {one.control: one for one in judge_all({**HONEST, **changes}, Limits())}
    assert found["length_matched"].verdict == "undecided"
    assert "may be at chance" in found["length_matched"].sentence


def test_a_few_conversations_that_are_all_right_by_chance_are_no_failure():
    def all_right(rows: int) -> Arm:
        return Arm(right_SN=np.ones((5, 3 * rows)), clusters=tuple(str(n // 3) for n in range(3 * rows)))

    # Ten are all right with a chance of 6 % where three in four are, and six controls are tested.
    assert verdicts(full=all_right(10), length_only=all_right(10))["length_only"] == "undecided"
    assert verdicts(full=all_right(20), length_only=all_right(20))["length_only"] == "fail"
    found = judge_all({**HONEST, "full": all_right(9), "length_only": all_right(9)}, Limits())
    judged = {one.control: one for one in found}
    for control in ("response_only", "random_negatives", "length_only", "bag_of_words"):
        assert judged[control].verdict == "undecided"
        assert math.isnan(judged[control].p_value)
        assert judged[control].sentence.startswith("Of 9 conversations nothing can be told")
    few = {"length_matched": all_right(9), "random_subset": all_right(9)}
    assert verdicts(**few) == dict.fromkeys(NAMES, "pass") | {"length_matched": "undecided"}


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        ({"label_shuffle": arm(0.7, seed=1)}, "label_shuffle"),
        ({"prompt_only": arm(0.51)}, "prompt_only"),
        ({"response_only": arm(0.76, seed=2)}, "response_only"),
        ({"random_negatives": arm(0.76, seed=3)}, "random_negatives"),
        ({"length_matched": arm(0.58, seed=5)}, "length_matched"),
        ({"length_only": arm(0.74, seed=7)}, "length_only"),
        ({"bag_of_words": arm(0.77, seed=8)}, "bag_of_words"),
    ],
)
def test_a_shortcut_fails_the_control_that_is_about_it(changes, fails):
    found = judge_all({**HONEST, **changes}, Limits(shortcut=0.6, length=0.3))
    assert {one.control: one.verdict for one in found}[fails] == "fail"
    assert exit_status(found) == 1
    assert exit_status(judge_all(HONEST, Limits())) == 0


def test_shuffled_labels_that_lead_below_chance_are_not_said_to_reach_the_truth():
    by_side = {}
    for accuracy in (0.7, 0.3):
        (found,) = [
            one
            for one in judge_all({**HONEST, "label_shuffle": arm(accuracy, seed=1)}, Limits())
            if one.control == "label_shuffle"
        ]
        assert found.verdict == "fail"
        by_side[accuracy] = found.sentence
    assert "the true labels reach it otherwise" in by_side[0.7]
    assert "below chance: the true labels reach it the wrong way round" in by_side[0.3]


def test_what_prompt_only_measured_has_no_interval_over_conversations_on_test_data_either():
    (found,) = [one for one in judge_all(HONEST, Limits(), test={"prompt_only": TIES}) if one.control == "prompt_only"]
    assert [one.name for one in found.measured] == ["held out", "test data"]
    assert all(math.isnan(one.conversations.low) for one in found.measured)
    assert found.verdict == "pass"


def test_what_is_allowed_decides():
    half = {**HONEST, "length_only": arm(0.64, seed=7)}
    by_limit = {
        limit: next(one for one in judge_all(half, Limits(length=limit)) if one.control == "length_only")
        for limit in (0.2, 0.95)
    }
    assert by_limit[0.2].verdict == "fail"
    assert by_limit[0.95].verdict == "pass"
    assert "of the accuracy above chance is there from length alone" in by_limit[0.2].sentence


def test_a_model_at_chance_has_no_share_to_tell():
    found = judge_all({**HONEST, "full": arm(0.5)}, Limits())
    (share,) = [one for one in found if one.control == "bag_of_words"]
    assert share.verdict in ("undecided", "fail")
    assert math.isnan(share.share.low)


def test_p_values_are_adjusted_for_all_that_can_fail_by_chance():
    found = judge_all(HONEST, Limits())
    tested = [one for one in found if not math.isnan(one.p_value)]
    assert len(tested) == len(NAMES) - 1
    smallest = min(tested, key=lambda one: one.p_value)
    assert smallest.adjusted == pytest.approx(min(1.0, len(tested) * smallest.p_value))


def test_bands_say_how_often_an_honest_run_falls_outside():
    found = {one.control: one for one in judge_all(HONEST, Limits())}
    few = {
        name: arm(one.mean, seed=n, rows=60) for n, (name, one) in enumerate(HONEST.items()) if name != "prompt_only"
    }
    few["prompt_only"] = Arm(right_SN=np.full((5, 60), 0.5), clusters=tuple(map(str, range(60))))
    fewer = {one.control: one for one in judge_all(few, Limits())}
    for name in ("label_shuffle", "random_negatives", "length_matched"):
        assert 0 < found[name].band.outside < fewer[name].band.outside < 1


def test_heads_shuffle_judgements_as_the_data_do():
    groups = make_groups(40, replies=4)
    control = Control(mode="label_shuffle", shuffle_rate=0.5, seed=3)
    for group, made in zip(groups, shuffle_groups(groups, 3), strict=True):
        row = Preference(
            id=group.preference_id,
            source=group.source,
            prompt=(),
            replies=tuple(() for _ in range(group.num_replies)),
            comparisons=group.comparisons,
            ranking=group.ranking,
        )
        wanted, _ = changed_by(control, row)
        assert (made.comparisons, made.ranking) == (wanted.comparisons, wanted.ranking)


@pytest.mark.slow
@pytest.mark.parametrize("kind", diagnose_simulation.KINDS)
def test_simulated_models_are_told_apart(kind):
    found = diagnose_simulation.family(kind, 240, np.random.default_rng(7))
    failed = {one.control for one in found if one.verdict == "fail"}
    # What length tells, it tells without a prompt too.
    also = {"response_only"} if kind == "length" else set()
    assert failed - also == set(diagnose_simulation.WANTED.get(kind, ()))


@pytest.mark.soak
def test_an_honest_model_passes_at_the_stated_rate():
    families = [diagnose_simulation.family("honest", 100, np.random.default_rng(n), first=100 * n) for n in range(200)]
    passed = sum(all(one.verdict != "fail" for one in of) for of in families)
    assert passed >= 183  # 0.95 of 200 and its error
