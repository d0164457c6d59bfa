"""Several models on the same comparisons: slices, disagreements, gold scores."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rewardlab.analysis.aligned import ScoreSet, align
from rewardlab.analysis.comparison import MOST_VALUES, compare_models, disagreements
from rewardlab.analysis.multiple import holm
from rewardlab.core.errors import ConfigError, DataError
from scored import rows_of

N = 120
DRAW = np.random.default_rng(2)
TRUTH = DRAW.normal(0.8, 1.0, N)


def scores(noise: float) -> np.ndarray:
    return np.stack([TRUTH + DRAW.normal(0, noise, N), np.zeros(N)], 1)


FIRST, SECOND, GOLD = scores(1.5), scores(0.7), scores(0.0)


def sets(*several: np.ndarray, label: float = 1.0, **more: object) -> list[ScoreSet]:
    return [
        ScoreSet(name=f"m{number}", rows=rows_of(own, label=label), beta=1.0, **more)
        for number, own in enumerate(several)
    ]


PARTS = {("made-up", f"d.jsonl:{number}"): "few" if number < 6 else "ab"[number % 2] for number in range(N)}


def test_a_slice_is_the_comparison_of_its_rows_alone():
    (other,) = compare_models(sets(FIRST, SECOND), slices={"topic": PARTS}).others
    for part in other.slices:
        kept = [number for number in range(N) if PARTS["made-up", f"d.jsonl:{number}"] == part.value]
        change = (SECOND[kept, 0] > 0).mean() - (FIRST[kept, 0] > 0).mean()
        assert part.comparisons == len(kept)
        assert part.difference.value == pytest.approx(change)
    assert [part.value for part in other.slices] == ["a", "b", "few"]


def by_hand(scores: np.ndarray) -> float:
    """The margin in standard deviations over both orders: mean(d)/√mean(d²)."""
    difference = scores[:, 0] - scores[:, 1]
    return float(difference.mean() / np.sqrt(np.square(difference).mean()))


def test_the_margin_of_a_slice_is_that_of_its_rows_alone():
    # On the odd rows the second model differs by its scale alone; on the even ones it is spread four times as wide.
    noise = np.random.default_rng(5).normal(0, 4, N)
    second = 7 * FIRST
    second[::2, 0] += 7 * noise[::2]
    parts = {key: "even" if number % 2 == 0 else "odd" for number, key in enumerate(PARTS)}
    (other,) = compare_models(sets(FIRST, second), metric="margin", slices={"topic": parts}).others
    for part, start in zip(other.slices, (0, 1), strict=True):
        wanted = by_hand(second[start::2]) - by_hand(FIRST[start::2])
        assert part.difference.value == pytest.approx(wanted, abs=1e-12), part.value
        (alone,) = compare_models(sets(FIRST[start::2], second[start::2]), metric="margin").others
        assert part.difference.low == pytest.approx(alone.paired.metrics["margin"].difference.low)
        assert part.test.p == pytest.approx(alone.paired.metrics["margin"].test.p, abs=0.01)
    even, odd = other.slices
    assert even.difference.high < 0
    assert (odd.difference.value, odd.test.p) == (0, 1), "models that differ by a scale alone have no difference"


def test_small_slices_are_not_tested_and_do_not_count_for_holm():
    (other,) = compare_models(sets(FIRST, SECOND), slices={"topic": PARTS}).others
    *tested, few = other.slices
    assert math.isnan(few.test.p)
    assert math.isnan(few.adjusted)
    assert [part.adjusted for part in tested] == holm([part.test.p for part in tested])


def test_slices_of_several_models_are_corrected_together():
    others = compare_models(sets(FIRST, SECOND, scores(1.0), GOLD), slices={"topic": PARTS}).others
    found = [(part.test.p, part.adjusted) for other in others for part in other.slices]
    assert sum(not math.isnan(p) for p, _ in found) == 6
    assert [adjusted for _, adjusted in found] == pytest.approx(holm([p for p, _ in found]), nan_ok=True)


def test_slices_of_the_nll_hold_label_ties_and_those_of_accuracy_do_not():
    mixed = [
        replace(own, rows=[*own.rows, *rows_of(tied, label=0.5, name="ties.jsonl")])
        for own, tied in zip(sets(FIRST, SECOND), (FIRST[:30], SECOND[:30]), strict=True)
    ]
    of_nll = compare_models(mixed, metric="nll", slices={"longer": {}}).others[0].slices
    of_accuracy = compare_models(mixed, slices={"longer": {}}).others[0].slices
    assert [part.comparisons for part in of_nll] == [150]
    assert [part.comparisons for part in of_accuracy] == [120]


def test_a_column_of_ids_is_no_slice_and_a_missing_one_is_named():
    ids = {key: key[1] for key in PARTS}
    with pytest.raises(DataError, match=f"it has 120 different values; at most {MOST_VALUES}"):
        compare_models(sets(FIRST, SECOND), slices={"id": ids})
    with pytest.raises(DataError, match="--slice mood: no file has this column"):
        compare_models(sets(FIRST, SECOND), slices={"mood": {}})


def test_disagreements_are_all_there_is_and_the_largest_come_first():
    found = disagreements(align(sets(FIRST, SECOND)), 1)
    assert len(found) == int(((FIRST[:, 0] > 0) != (SECOND[:, 0] > 0)).sum())
    apart = [abs(one.margins[1] - one.margins[0]) for one in found]
    assert apart == sorted(apart, reverse=True)
    assert all(one.outcomes in ((1.0, 0.0), (0.0, 1.0)) for one in found)


def test_disagreements_come_in_one_order_for_scores_of_any_size():
    found, small = (disagreements(align(sets(FIRST, size * SECOND)), 1) for size in (1.0, 2.0**-600))
    assert small == found


def test_a_model_with_verdicts_alone_has_no_margin_and_the_other_ones_says_what_comes_first():
    verdicts = replace(sets(SECOND)[0], name="v", rows=rows_of(SECOND > 0), verdicts_only=True)
    scored = sets(FIRST)[0]
    found, turned = (disagreements(align(two), 1) for two in ([scored, verdicts], [verdicts, scored]))
    assert {one.margins[1] for one in found} == {None} == {one.margins[0] for one in turned}
    sure = [abs(one.margins[0]) for one in found]
    assert sure == sorted(sure, reverse=True)
    assert [one.pair for one in turned] == [one.pair for one in found]


def test_disagreements_of_verdicts_come_in_the_order_of_the_rows_with_ties_at_last():
    right, mixed = np.tile([1.0, 0.0], (12, 1)), np.array([[1, 0], [0, 0], [0, 1]] * 4)
    found = disagreements(align(sets(right, mixed, verdicts_only=True)), 1)
    assert [one.pair.preference_id for one in found] == [f"d.jsonl:{n}" for n in (2, 5, 8, 11, 1, 4, 7, 10)]
    assert {one.margins for one in found} == {(None, None)}


def test_models_whose_files_name_prompts_differently_have_one_p_in_either_order():
    named = [
        replace(
            own,
            rows=[replace(row, prompt_key=name(int(row.preference_id.split(":")[1]) // 3)) for row in own.rows],
            prompts_by=column,
        )
        for own, column, name in zip(
            sets(FIRST, SECOND, GOLD),
            ("prompt", "prompt_id", "prompt_key"),
            (lambda prompt: f"{prompt:03}", lambda prompt: f"{37 * prompt % 101:03}", lambda prompt: f"q{prompt}"),
            strict=True,
        )
    ]
    there, back = (compare_models(two, metric="margin").others[0].paired for two in (named[:2], named[1::-1]))
    assert there.prompts == back.prompts == N // 3
    assert "random" in there.metrics["margin"].test.method
    for one, other in zip(there.metrics.values(), back.metrics.values(), strict=True):
        assert other.test == one.test
        assert other.difference.value == pytest.approx(-one.difference.value, abs=1e-15)
        assert (other.difference.low, other.difference.high) == pytest.approx(
            (-one.difference.high, -one.difference.low), abs=1e-14
        )
    ranks, turned = (compare_models(own, metric="margin").standings for own in (named, named[::-1]))
    assert {name: own.rank for name, own in ranks.items()} == {name: own.rank for name, own in turned.items()}


def test_several_models_are_compared_with_the_first_after_holms_correction():
    result = compare_models(sets(FIRST, SECOND, GOLD))
    p_values = [other.paired.metrics["accuracy"].test.p for other in result.others]
    assert [other.adjusted for other in result.others] == holm(p_values)
    assert list(result.standings) == ["m0", "m1", "m2"]
    assert not compare_models(sets(FIRST, SECOND)).standings


def test_a_model_and_its_scores_times_a_constant_have_one_rank_by_margin():
    result = compare_models(sets(FIRST, SECOND, 1e-12 * SECOND, 0.3 * SECOND, 0.3 * FIRST), metric="margin")
    assert [own.rank.value for own in result.standings.values()] == [4.5, 2, 2, 2, 4.5]
    assert len({own.first for own in result.standings.values()}) == 2


def test_the_best_in_nll_has_the_smallest_nll():
    result = compare_models(sets(FIRST, SECOND, 0.001 * GOLD), metric="nll")
    nll = {"m0": result.others[0].paired.metrics["nll"].first.value}
    nll |= {other.paired.second: other.paired.metrics["nll"].second.value for other in result.others}
    ranks = {name: own.rank.value for name, own in result.standings.items()}
    assert sorted(nll, key=nll.__getitem__) == sorted(ranks, key=ranks.__getitem__)


def test_gold_scores_that_judge_are_the_truth_and_their_ties_are_label_ties():
    bare = [replace(own, rows=[replace(row, comparisons=()) for row in own.rows]) for own in sets(FIRST, SECOND, GOLD)]
    tied = [replace(row, score=0.0) if row.preference_id == "d.jsonl:7" else row for row in bare[2].rows]
    result = compare_models(bare[:2], gold=replace(bare[2], rows=tied))
    assert result.gold_labels
    assert result.label_ties == 1
    match = result.agreement["m0"]
    right = [(a > 0) == (g > 0) for number, (a, g) in enumerate(zip(FIRST[:, 0], TRUTH, strict=True)) if number != 7]
    assert match.match.value == pytest.approx(np.mean(right))
    assert result.others[0].paired.metrics["accuracy"].first.value == pytest.approx(match.match.value)


def test_gold_scores_beside_labels_judge_nothing():
    (gold,) = sets(GOLD)
    bare = replace(gold, rows=[replace(row, comparisons=()) for row in gold.rows])
    result = compare_models(sets(FIRST, SECOND, label=0.0), gold=bare)
    assert not result.gold_labels
    assert result.others[0].paired.metrics["accuracy"].first.value == pytest.approx(np.mean(FIRST[:, 0] < 0))
    assert result.agreement["m0"].match.value == pytest.approx(np.mean((FIRST[:, 0] > 0) == (TRUTH > 0)))


def test_a_beta_with_which_nothing_can_be_computed_is_refused():
    large = [replace(own, beta=1e160) for own in sets(FIRST, SECOND)]
    with pytest.raises(DataError, match=r"β = 1e\+160 times a score difference of .* is more than 1e\+150"):
        compare_models(large)


def test_verdicts_have_no_margin_and_no_nll():
    with pytest.raises(ConfigError, match=r"--metric margin: m0, m1 has verdicts"):
        compare_models(sets(FIRST, SECOND, verdicts_only=True), metric="margin")
    assert list(compare_models(sets(FIRST, SECOND, verdicts_only=True)).others[0].paired.metrics) == ["accuracy"]
