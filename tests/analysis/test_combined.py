"""Sums of shares of which one is known from few outcomes: its score interval counts, though it does not vary."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from rewardlab.analysis import combined, stats
from rewardlab.analysis.combined import Clustered, combined_reach, widened_to_parts
from rewardlab.analysis.influence import share_by_influence
from rewardlab.analysis.intervals import wilson_limits
from rewardlab.analysis.judgement import macro_accuracy, weighted_accuracy
from rewardlab.analysis.lengths import length_controlled_accuracy
from rewardlab.analysis.score_table import Pairs
from rewardlab.core.types import Estimate


def sources_of(*sizes: int, outcome: np.ndarray | float = 1.0, longer: int = 0, prompts: int | None = None) -> Pairs:
    """Decided pairs of sources of these sizes, in turn of so many `prompts`, each of one of its own where this is None;
    the first `longer` prefer the longer reply, the others the shorter one, by as much.
    """
    source = np.arange(len(sizes)).repeat(sizes)
    numbers, nothing = np.arange(source.size), np.zeros(source.size)
    return Pairs(
        difference=2 * np.broadcast_to(np.asarray(outcome), source.size) - 1,
        label=np.ones(source.size),
        preferred=nothing,
        other=nothing,
        length_preferred=np.where(numbers < longer, 30.0, -30.0),
        length_other=nothing,
        truncated=np.zeros(source.size, dtype=bool),
        prompt=numbers if prompts is None else numbers % prompts,
        source=source,
        preference=numbers,
    )


def test_a_small_source_that_is_all_right_by_chance_is_not_known_exactly() -> None:
    pairs, outcome = sources_of(10, 1000), np.ones(1010)
    outcome[10:110] = 0
    found = macro_accuracy(outcome, pairs)
    assert found.value == pytest.approx(0.95)
    small, large = stats.mean_share(outcome[:10]), stats.mean_share(outcome[10:])
    reach = math.hypot(small.value - small.low, large.value - large.low) / 2
    assert found.low == pytest.approx(found.value - reach)
    assert found.low < 0.9


def test_the_mean_over_a_small_and_a_large_source_is_held_as_often_as_it_says() -> None:
    generator, pairs = np.random.default_rng(0), sources_of(10, 1000)
    found = [macro_accuracy((generator.random(1010) < 0.9).astype(float), pairs) for _ in range(300)]
    assert np.mean([one.low <= 0.9 <= one.high for one in found]) > 0.93


def test_a_small_side_of_length_that_is_all_right_by_chance_is_not_known_exactly() -> None:
    outcome = np.ones(1010)
    outcome[10:110] = 0
    found = length_controlled_accuracy(sources_of(1010, outcome=outcome, longer=10))
    assert found.value == pytest.approx(0.95)
    small, large = stats.mean_share(outcome[:10]), stats.mean_share(outcome[10:])
    assert found.low == pytest.approx(found.value - math.hypot(small.value - small.low, large.value - large.low) / 2)


def test_few_certain_labels_that_are_all_right_by_chance_are_worth_no_more_than_their_weights() -> None:
    """Weights of 1 and of 0.04 count as (Σw)²/Σw² plain outcomes at most, here 215 and not 1,010, and as two shares."""
    weight = np.where(np.arange(1010) < 10, 1.0, 0.04)
    outcome = (np.arange(1010) % 10 > 0).astype(float)
    outcome[:10] = 1
    found = weighted_accuracy(outcome, weight, sources_of(1010))
    number = weight.sum() ** 2 / np.square(weight).sum()
    plain = wilson_limits(np.array([found.value]), np.array([number]), level=0.95)
    few, many = stats.mean_share(outcome[:10]), stats.mean_share(outcome[10:])
    part = 10 / weight.sum()
    below = math.hypot(part * (few.value - few.low), (1 - part) * (many.value - many.low))
    assert found.value - below < plain.low[0]
    assert found.low == pytest.approx(found.value - below)
    assert found.high == pytest.approx(plain.high[0], rel=1e-3)
    assert weighted_accuracy(outcome, np.full(1010, 0.5), sources_of(1010)).method == "score interval, by influence"


def test_a_weighted_accuracy_of_right_outcomes_is_1_within_its_interval() -> None:
    """Weights divided by their mean add up to their number but for rounding, which no accuracy may go beyond."""
    for number in range(10, 200):
        weight = np.resize([0.1, 0.1, 0.1, 1.0], number)
        found = weighted_accuracy(np.ones(number), weight, sources_of(number))
        assert found.low < found.value <= found.high <= 1
        assert found.value == pytest.approx(1, abs=1e-12)


def test_an_accuracy_of_few_certain_labels_is_held_as_often_as_it_says() -> None:
    generator, weight = np.random.default_rng(0), np.where(np.arange(1010) < 10, 1.0, 0.04)
    found = [
        weighted_accuracy((generator.random(1010) < 0.9).astype(float), weight, sources_of(1010)) for _ in range(200)
    ]
    assert np.mean([one.low <= 0.9 <= one.high for one in found]) > 0.93


def test_an_accuracy_of_few_certain_labels_that_are_ranked_worse_is_held_as_often_too() -> None:
    generator, weight = np.random.default_rng(0), np.where(np.arange(510) < 10, 1.0, 0.04)
    chance = np.where(np.arange(510) < 10, 0.8, 0.95)
    truth = float(np.average(chance, weights=weight))
    found = [
        weighted_accuracy((generator.random(510) < chance).astype(float), weight, sources_of(510)) for _ in range(400)
    ]
    assert np.mean([one.low <= truth <= one.high for one in found]) > 0.94


def test_parts_of_the_same_prompts_are_taken_to_be_wrong_together() -> None:
    outcome, prompts = np.ones(40), np.arange(40)
    halves = [(0.5, prompts < 20), (0.5, prompts >= 20)]
    none = Estimate(value=1.0, low=1.0, high=1.0, n=40, method="score interval")
    apart = widened_to_parts(none, outcome, prompts, halves)
    together = widened_to_parts(none, outcome, prompts % 20, halves)
    own = stats.mean_share(outcome[:20])
    assert together.low == pytest.approx(own.low)
    assert 1 - apart.low == pytest.approx((1 - own.low) / math.sqrt(2))
    assert together.high == apart.high == 1


def test_reaches_of_independent_shares_add_up_by_their_squares() -> None:
    assert combined_reach(np.array([[0.3, 0.1], [0.4, 0.0]])) == pytest.approx((0.5, 0.1))
    together = Clustered(np.ones((3, 2)), np.ones((3, 2)))
    assert combined_reach(np.array([[0.3, 0.1], [0.4, 0.0]]), together) == pytest.approx((0.7, 0.1))


def test_what_has_no_interval_is_not_given_one() -> None:
    few = share_by_influence(0.5, np.zeros(9), np.arange(9))
    assert widened_to_parts(few, np.ones(9), np.arange(9), [(1.0, np.ones(9, dtype=bool))]) is few


@pytest.mark.parametrize("shared", [False, True], ids=["prompts of their own", "prompts that sources share"])
def test_many_sources_take_memory_by_their_comparisons(shared: bool) -> None:
    peaks = []
    for sources in (400, 800):
        decided = sources_of(*[12] * sources, prompts=3 * sources if shared else None)
        outcome = (np.arange(12 * sources) % 7 > 0).astype(np.float64)
        tracemalloc.start()
        macro_accuracy(outcome, decided)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2.5 * peaks[0]


@pytest.mark.parametrize("at_once", [1, 30, 10**6])
def test_shares_are_alike_by_what_their_clusters_give_them(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combined, "AT_ONCE", at_once)
    draw = np.random.default_rng(3)
    counts_CU = draw.integers(0, 3, (40, 9)).astype(np.float64)
    counts_CU[:, 8] = 0
    counts_CU[:2, 8] = 1
    sums_CU = np.round(counts_CU * draw.random((40, 9)))
    found = np.concatenate([alike.toarray() for _, alike in Clustered(sums_CU, counts_CU).alike()])
    left_CU = sums_CU - counts_CU * sums_CU.sum(0) / counts_CU.sum(0)
    for one in range(9):
        for other in range(9):
            assert found[one, other] == pytest.approx(max(correlation(left_CU, counts_CU, one, other), 0.0), abs=1e-12)
    reaches_U2 = draw.random((9, 2))
    expected = [math.sqrt(reach @ found @ reach) for reach in reaches_U2.T]
    assert combined_reach(reaches_U2, Clustered(sums_CU, counts_CU)) == pytest.approx(expected)


def correlation(left_CU: np.ndarray, counts_CU: np.ndarray, one: int, other: int) -> float:
    """That of two shares, with a cluster that fails in both as far as they have the same clusters."""

    def together(first: int, second: int) -> float:
        lengths = [np.linalg.norm(counts_CU[:, share]) for share in (first, second)]
        sizes = [counts_CU[:, share].sum() / np.count_nonzero(counts_CU[:, share]) for share in (first, second)]
        overlap = counts_CU[:, first] @ counts_CU[:, second] / math.prod(lengths)
        return float(left_CU[:, first] @ left_CU[:, second] + overlap * math.prod(sizes))

    return together(one, other) / math.sqrt(together(one, one) * together(other, other))


def test_sources_of_few_prompts_vary_about_their_own_means() -> None:
    """The variance of each source of five prompts is that of five values about a mean fitted to them: /4, not /5."""
    outcome = np.tile([1.0, 1, 1, 0, 0, 1, 1, 0, 0, 0], 100)
    found = macro_accuracy(outcome, sources_of(*[5] * 200))
    error = math.sqrt(0.6 * 0.4 / 4 / 200)
    assert (found.low, found.high) == pytest.approx((0.5 - 1.96 * error, 0.5 + 1.96 * error), abs=0.0003)
