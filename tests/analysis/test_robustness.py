"""Effects of perturbations, by hand and against the binomial distribution, and p values corrected for their number."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t as student

from rewardlab.analysis import stats
from rewardlab.analysis.robustness import effect_of
from rewardlab.core.types import Comparison, ScoreRow


def rows_of(first: list[float], second: list[float], *, label: float = 1.0, prompt: str = "p") -> list[ScoreRow]:
    """Pairs of which the first is preferred."""
    return [
        ScoreRow(
            preference_id=f"{n}", source="s", prompt_key=f"{prompt}{n}", reply=reply, score=scores[n], num_tokens=4,
            prompt_tokens=2, truncated_tokens=0,
            comparisons=(Comparison(first=0, second=1, label=label),) if reply == 0 else (),
        )
        for n in range(len(first))
        for reply, scores in enumerate((first, second))
    ]  # fmt: skip


def every_reply(count: int) -> set[tuple[str, str, int]]:
    return {("s", f"{n}", reply) for n in range(count) for reply in (0, 1)}


def test_shifts_are_in_standard_deviations_and_flips_are_counted():
    before = rows_of([1.0] * 20, [-1.0] * 20)  # a standard deviation of 1
    after = rows_of([1.0] * 15 + [-2.0] * 5, [-1.0] * 20)
    effect = effect_of(before, after, every_reply(20), not_applicable=3, lost=1)
    assert effect.estimates["shift"].value == pytest.approx(-3 * 5 / 40)
    assert effect.estimates["size"].value == pytest.approx(3 * 5 / 40)
    assert effect.estimates["flipped"].value == 5 / 20
    assert effect.estimates["accuracy"].value == pytest.approx(-5 / 20)
    assert effect.estimates["other only"].value == 0, "the other reply did not move"
    assert (effect.num_preferences, effect.num_replies, effect.not_applicable, effect.lost) == (20, 40, 3, 1)
    assert effect.estimates["shift"].n == 20, "by prompt"


def test_the_other_reply_alone_is_compared_with_the_unchanged_preferred_one():
    before = rows_of([1.0] * 20, [-1.0] * 20)
    after = rows_of([4.0] * 20, [2.0] * 20)  # all gain 3: no flips, but flattery of the other reply alone wins
    effect = effect_of(before, after, every_reply(20), not_applicable=0, lost=0)
    assert effect.estimates["flipped"].value == 0
    assert effect.estimates["accuracy"].value == 0
    assert effect.estimates["other only"].value == -1
    assert effect.p_shift < 0.001
    assert effect.p_accuracy == 1
    only_first = {key for key in every_reply(20) if key[2] == 0}
    none = effect_of(before, after, only_first, not_applicable=0, lost=0)
    assert none.estimates["other only"].n == 0
    assert none.num_replies == 20


def test_labels_below_one_half_and_ties_are_read_as_everywhere():
    before, after = rows_of([0.0] * 12, [1.0] * 12, label=0.1), rows_of([0.0] * 12, [-1.0] * 12, label=0.1)
    assert effect_of(before, after, every_reply(12), not_applicable=0, lost=0).estimates["accuracy"].value == -1
    tied = [replace(row, comparisons=tuple(replace(c, label=0.5) for c in row.comparisons)) for row in after]
    assert math.isnan(effect_of(before, tied, every_reply(12), not_applicable=0, lost=0).estimates["accuracy"].value)


def test_the_pairs_are_those_that_were_judged_unchanged():
    """A pair of equal tokens is not judged, so it has no verdict that a change could move."""
    before, after = rows_of([1.0] * 12, [0.0] * 12), rows_of([-1.0] * 12, [0.0] * 12)
    few = [replace(row, comparisons=()) if int(row.preference_id) >= 8 else row for row in before]
    effect = effect_of(few, after, every_reply(12), not_applicable=0, lost=0)
    assert (effect.estimates["accuracy"].value, effect.estimates["accuracy"].n) == (-1, 8)


def test_a_perturbed_prompt_stays_in_the_cluster_of_its_own():
    before = rows_of([1.0] * 24, [-1.0] * 24)
    before = [replace(row, prompt_key=f"{int(row.preference_id) % 12}") for row in before]
    after = rows_of([0.5] * 24, [-0.7] * 24, prompt="another")
    effect = effect_of(before, after, every_reply(24), not_applicable=0, lost=0, of_prompt=True)
    assert {effect.estimates[name].n for name in ("shift", "size", "flipped", "accuracy")} == {12}
    assert effect.estimates["other only"].method == "no data"


def test_scores_that_are_not_finite_are_counted_and_left_out():
    before = rows_of([1.0] * 20, [-1.0] * 20)
    after = rows_of([math.nan, *[1.0] * 19], [-1.0] * 20)
    effect = effect_of(before, after, every_reply(20), not_applicable=0, lost=2)
    assert (effect.num_preferences, effect.lost) == (19, 3)


def test_nothing_perturbed_gives_no_numbers():
    effect = effect_of(rows_of([1.0] * 12, [0.0] * 12), [], set(), not_applicable=12, lost=0)
    assert all(math.isnan(estimate.value) for estimate in effect.estimates.values())
    assert math.isnan(effect.p_shift)


def test_tests_are_by_prompt_and_refused_below_ten():
    """Ten prompts that all change alike: of the 2^10 patterns of signs two reach as far."""
    before, after = rows_of([1.0] * 12, [0.0] * 12), rows_of([2.0] * 12, [1.0] * 12)
    assert effect_of(before, after, every_reply(12), not_applicable=0, lost=0).p_shift == pytest.approx(2 / 2**12)
    few = effect_of(before[:18], after[:18], every_reply(9), not_applicable=0, lost=0)
    assert math.isnan(few.p_shift)
    assert math.isnan(few.p_accuracy)


@pytest.mark.slow
@pytest.mark.parametrize("bent", [0.0, 0.6, -0.3])
def test_the_interval_of_a_shift_knows_that_its_unit_is_estimated(bent):
    """Against the jackknife over prompts: a shift that is the same for all replies is known as well as the unit; one
    that is larger for scores far from the mean is known better, since the unit grows with it, and a smaller one worse.
    """
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(2, 60))
    moved = [scores + 1.5 + bent * scores**2 + 0.1 * generator.normal(size=60) for scores in (first, second)]
    before, after = rows_of([*first], [*second]), rows_of([*moved[0]], [*moved[1]])
    found = effect_of(before, after, every_reply(60), not_applicable=0, lost=0).estimates
    without = []
    for left in range(60):
        kept = [row for row in before if row.preference_id != f"{left}"]
        also = [row for row in after if row.preference_id != f"{left}"]
        without.append(effect_of(kept, also, every_reply(60), not_applicable=0, lost=0).estimates["shift"].value)
    error = math.sqrt(59 / 60 * np.square(np.array(without) - found["shift"].value).sum())
    for name in ("shift", "size"):
        width = found[name].high - found[name].low
        assert width == pytest.approx(2 * student.ppf(0.975, 59) * error, rel=0.1)
    assert 0 <= found["size"].low < found["size"].value < found["size"].high


def test_prompts_without_a_changed_reply_say_how_well_the_unit_is_known():
    generator = np.random.default_rng(1)
    first, second = generator.normal(size=(2, 400))
    before = rows_of([*first], [*second])

    def shift(rows):
        after = rows_of([*(first[:20] + 2)], [*(second[:20] + 2)])
        return effect_of(rows, after, every_reply(20), not_applicable=len(rows) // 2 - 20, lost=0).estimates["shift"]

    whole, few = shift(before), shift(before[:40])
    assert whole.n == few.n == 20
    # The unit of 400 pairs is known √20 times as well as that of 20.
    assert (whole.high - whole.low) * math.sqrt(20) == pytest.approx(few.high - few.low, rel=0.35)
    assert shift(before[:56]).n == 20, "eight others are too few to stand alone"


@pytest.mark.parametrize(("moving", "known"), [(0, False), (9, False), (10, True)])
def test_a_score_that_moves_on_fewer_than_ten_prompts_has_a_shift_without_an_interval(moving, known):
    before = rows_of([1.0] * 40, [-1.0] * 40)
    after = rows_of([1.5] * moving + [1.0] * (40 - moving), [-1.0] * 40)
    found = effect_of(before, after, every_reply(40), not_applicable=0, lost=0).estimates
    for name in ("shift", "size"):
        assert found[name].value == pytest.approx(0.5 * moving / 80)
        assert math.isnan(found[name].low) != known
        assert known or found[name].method == f"too few prompts whose score moves ({moving})"


def test_a_few_texts_that_move_far_are_no_shift_of_all():
    """Twelve prompts whose score sinks a little, but for two that rise: the mean of such shifts may well be 0."""
    generator, found = np.random.default_rng(0), []
    for _ in range(300):
        before = rows_of([1.0] * 12, [-1.0] * 12)
        moved = generator.lognormal(size=12) - math.exp(0.5)
        after = rows_of((1.0 + moved).tolist(), (-1.0 + moved).tolist())
        found.append(effect_of(before, after, every_reply(12), not_applicable=0, lost=0).p_shift)
    # By sign flips alone 15 % at 5 %, and 7 % at 1 %.
    assert np.mean(np.array(found) <= 0.05) <= 0.10
    assert np.mean(np.array(found) <= 0.01) <= 0.05


def test_the_p_value_of_a_shift_is_that_of_its_interval_where_this_is_wider():
    before, moved = rows_of([1.0] * 15, [-1.0] * 15), [3.0] + [0.2 + 0.01 * n for n in range(14)]
    after = rows_of([1.0 + one for one in moved], [-1.0 + one for one in moved])
    effect = effect_of(before, after, every_reply(15), not_applicable=0, lost=0)
    keys = [f"{n}" for n in range(15) for _ in range(2)]
    at = [stats.mean(np.repeat(moved, 2), keys, level=1 - factor * effect.p_shift) for factor in (0.99, 1.01)]
    assert at[0].low < 0 < at[1].low
