"""The noise ceiling: unbiased from votes, inside its bounds, and shown beside accuracies where data tell of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import beta, binom

from ceiling_coverage import KINDS, judge
from rewardlab.analysis.ceiling import (
    accuracy_from_agreement,
    from_probabilities,
    from_votes,
    highest_accuracy,
    lowest_accuracy,
    num_votes,
    of_score_rows,
)
from rewardlab.analysis.judgement import judge_rows
from rewardlab.analysis.metrics import evaluate
from rewardlab.core.types import Comparison
from rewardlab.report.ceiling import ceiling_note
from rewardlab.report.run import comparison_table
from score_rows import pair_rows, score_row


@pytest.mark.parametrize("shape", [0.05, 0.5, 1.0, 3.0, 40.0])
def test_the_value_is_exact_where_probabilities_have_a_beta_distribution(shape):
    density = beta(shape, shape).pdf
    # By symmetry half of the range will do, and its end is no pole of the density.
    half = quad(lambda p: (1 - p) * density(p), 0, 0.5, limit=200)[0]
    agreement = 2 * quad(lambda p: (p**2 + (1 - p) ** 2) * density(p), 0, 0.5, limit=200)[0]
    assert accuracy_from_agreement(agreement) == pytest.approx(2 * half, abs=1e-5)


def test_the_value_lies_between_the_bounds_which_two_distributions_reach():
    for agreement in np.linspace(0.5, 1.0, 51).tolist():
        value = accuracy_from_agreement(agreement)
        assert lowest_accuracy(agreement) - 1e-12 <= value <= highest_accuracy(agreement) + 1e-12
    # All alike: p = 0.8 for every pair.
    assert highest_accuracy(0.8**2 + 0.2**2) == pytest.approx(0.8)
    # Sixty of a hundred pairs are certain, the others coin tosses.
    assert lowest_accuracy(0.6 + 0.4 / 2) == pytest.approx(0.6 + 0.4 / 2)
    assert math.isnan(accuracy_from_agreement(math.nan))


@pytest.mark.parametrize("votes", [2, 3, 7])
def test_the_agreement_of_two_votes_is_unbiased_and_the_majority_is_not(votes):
    p = 0.7
    agreement, majority = 0.0, 0.0
    for won in range(votes + 1):
        first = np.array([True] * won + [False] * (votes - won))
        found = from_votes(np.zeros(votes, dtype=np.int64), first, ["a"] * votes)
        pairs = [one == other for one, other in combinations(first, 2)]
        assert found.agreement.value == pytest.approx(np.mean(pairs))
        agreement += binom(votes, p).pmf(won) * found.agreement.value
        majority += binom(votes, p).pmf(won) * max(won, votes - won) / votes
    assert agreement == pytest.approx(p**2 + (1 - p) ** 2)
    assert majority > p + 0.02


@pytest.mark.parametrize("kind", ["uniform", "all alike", "certain or tossed", "all tossed"])
def test_intervals_hold_the_truth_whatever_the_distribution(kind):
    cell = judge(KINDS[kind], 100, 2, 200, np.random.default_rng(7), with_alpha=False)
    # Three standard errors below 0.95 of 200 draws.
    assert cell.coverage >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 200)
    # The value is exact for the beta distribution alone; the majority is too high for all of them.
    assert cell.value < cell.majority
    if kind == "uniform":
        assert abs(cell.value - cell.truth) < 0.015 < cell.majority - cell.truth


def test_pairs_of_a_prompt_are_one_observation():
    generator = np.random.default_rng(0)
    pairs = np.repeat(np.arange(100), 2)
    first = np.repeat(generator.random(25) < 0.5, 8)
    alone = from_votes(pairs, first, [str(pair) for pair in pairs])
    together = from_votes(pairs, first, [str(pair // 4) for pair in pairs])
    assert alone is not None
    assert together is not None
    assert alone.accuracy.value == together.accuracy.value
    assert (alone.accuracy.n, together.accuracy.n) == (100, 25)


def judged_twice(labels, *, prompt=None):
    """Rows of two replies, with a judgement for each of the labels, every other one in the other order."""
    rows = []
    for number, own in enumerate(labels):
        judgements = [[], []]
        for turn, label in enumerate(own):
            first = turn % 2
            value = label if first == 0 else 1 - label
            judgements[first].append(Comparison(first=first, second=1 - first, label=value))
        key = f"prompt-{number}" if prompt is None else prompt
        rows += [
            score_row(number, reply, float(1 - reply), tuple(judgements[reply]), prompt_key=key) for reply in (0, 1)
        ]
    return rows


def test_score_rows_tell_it_from_several_judgements_in_either_order():
    found = of_score_rows(judged_twice([(1.0, 1.0)] * 30 + [(1.0, 0.0)] * 10))
    assert found is not None
    assert found.agreement is not None
    assert found.origin == "repeats"
    assert found.agreement.value == 0.75
    assert found.num_judgements == 80
    assert found.accuracy.low <= 0.75 <= found.accuracy.high


def test_ties_are_no_votes_and_single_hard_labels_tell_nothing():
    assert of_score_rows(judged_twice([(1.0,)] * 40)) is None
    assert of_score_rows(judged_twice([(1.0, 0.5)] * 40)) is None
    assert of_score_rows([]) is None
    # Nine prompts are too few for an interval.
    assert of_score_rows(judged_twice([(1.0, 0.0)] * 9)) is None
    with_ties = of_score_rows(judged_twice([(1.0, 1.0, 0.5)] * 20))
    assert with_ties is not None
    assert with_ties.accuracy.value == 1


def test_soft_labels_tell_what_the_judgement_calls_the_ceiling_of_agreement():
    generator = np.random.default_rng(2)
    rows = pair_rows([(1.0, 0.0, float(label)) for label in generator.random(60)])
    found = of_score_rows(rows)
    assert found is not None
    assert found.origin == "soft labels"
    assert found.of_agreement
    known = judge_rows(rows, beta=1.0, draws=20)["eval_agreement_ceiling"]
    assert found.accuracy.value == pytest.approx(known.value)
    assert evaluate(rows, beta=1.0).agreement.value == pytest.approx(
        judge_rows(rows, beta=1.0, draws=20)["eval_agreement"].value
    )


def test_a_few_soft_labels_among_hard_ones_tell_nothing():
    assert of_score_rows(pair_rows([(1.0, 0.0, 1.0)] * 60 + [(1.0, 0.0, 0.7)] * 5)) is None


def test_shares_of_three_votes_are_taken_as_votes():
    rng = np.random.default_rng(4)
    p = rng.beta(1, 1, 4000)
    won = rng.binomial(3, p)
    shares = np.round(np.maximum(won, 3 - won) / 3, 2)
    found = from_probabilities(shares, [str(number) for number in range(4000)], origin="strengths")
    assert (found.votes, found.origin) == (3, "strength votes")
    assert found.accuracy.value == pytest.approx(0.75, abs=0.02)
    # Taken as probabilities they would promise far too much.
    assert shares.mean() > 0.82
    assert num_votes(np.array([0.5, 1.0])) == 2
    assert num_votes(np.array([0.61, 0.87, 0.99])) is None


def drawn_shares(votes, *, pairs=400, seed=7):
    """Shares of the majority of so many votes a pair, one of `votes` by chance, for p spread evenly."""
    rng = np.random.default_rng(seed)
    size = rng.choice(votes, size=pairs)
    share = rng.binomial(size, rng.random(pairs)) / size
    return np.round(np.maximum(share, 1 - share), 2)


@pytest.mark.parametrize("votes", [(2, 3), (3, 4, 5), (2, 4)])
def test_shares_of_different_numbers_of_votes_hold_the_ceiling_and_do_not_promise_more(votes):
    keys, values, told = [str(number) for number in range(400)], [], 0
    for seed in range(20):
        found = from_probabilities(drawn_shares(votes, seed=seed), keys, origin="soft labels")
        assert found.accuracy.low < 0.75 < found.accuracy.high
        values.append(found.accuracy.value)
        told += (found.origin, found.votes, found.agreement) == ("mixed label votes", None, None)
    # Two and four votes look like four once in a while. As four or six votes, or as probabilities, it were 0.8.
    assert told >= 15
    assert np.mean(values) < 0.76


def test_a_ceiling_from_different_numbers_of_votes_says_so():
    keys = [str(number) for number in range(400)]
    found = from_probabilities(drawn_shares((3, 4, 5)), keys, origin="strengths")
    assert found.of_strengths
    assert found.of_agreement
    assert "strengths, which are shares of different numbers of votes" in ceiling_note(found)


@pytest.mark.parametrize("votes", [2, 3, 4, 5, 6, 9])
def test_shares_of_one_number_of_votes_are_not_taken_for_those_of_several(votes):
    keys = [str(number) for number in range(400)]
    found = [from_probabilities(drawn_shares([votes], seed=seed), keys, origin="soft labels") for seed in range(20)]
    assert all((one.origin, one.votes) == ("label votes", votes) for one in found)
    # Nothing smaller would explain a strength that all judgements have.
    assert from_probabilities(np.full(40, 2 / 3), keys[:40], origin="strengths").votes == 3


def judged_by_strength(strengths, *, labels=None):
    """Rows of two replies with a hard label and the strength of it; a label of ½ is a tie."""
    rows = []
    for number, (strength, label) in enumerate(zip(strengths, labels or [1.0] * len(strengths), strict=True)):
        judged = (Comparison(first=0, second=1, label=label, strength=strength),)
        rows += [score_row(number, 0, 1.0, judged), score_row(number, 1, 0.0)]
    return rows


def test_strengths_from_one_half_to_one_tell_it_as_they_do_of_a_dataset():
    strengths = np.random.default_rng(3).uniform(0.5, 1, 80).tolist()
    found = of_score_rows(judged_by_strength(strengths))
    assert found is not None
    assert (found.origin, found.of_agreement) == ("strengths", True)
    assert found.accuracy.value == pytest.approx(np.mean(strengths))
    # Half of the labels are the other way round: the strength is that of the reply which the label prefers.
    turned = evaluate(judged_by_strength(strengths, labels=[float(n % 2) for n in range(80)]), beta=1.0)
    right = [s if n % 2 else 1 - s for n, s in enumerate(strengths)]
    assert turned.ceiling == found
    assert turned.agreement.value == pytest.approx(np.mean(right))
    table = " ".join(comparison_table({"mine": turned}, first="model").split())
    assert f"Compare it with the agreement of each model, and not with accuracy: mine {np.mean(right):.3f}" in table
    assert "It is not a bound on accuracy" in ceiling_note(found)


@pytest.mark.parametrize("odd", [None, 0.4, 1.2])
def test_a_strength_that_is_no_probability_of_the_preferred_reply_tells_nothing(odd):
    assert of_score_rows(judged_by_strength([0.7] * 40 + [odd])) is None
    assert of_score_rows(judged_by_strength([1.0] * 40)) is None
    # Of a tie it is not asked.
    assert of_score_rows(judged_by_strength([0.7] * 40 + [odd], labels=[1.0] * 40 + [0.5])) is not None


def test_it_stands_below_the_accuracies_and_nowhere_else():
    told = evaluate(judged_twice([(1.0, 1.0)] * 30 + [(1.0, 0.0)] * 10), beta=1.0)
    silent = evaluate(judged_twice([(1.0,)] * 40), beta=1.0)
    assert "Ceiling" not in comparison_table({"one": silent}, first="model")
    table = " ".join(comparison_table({"before": told, "after": replace(told)}, first="model").split())
    assert told.ceiling is not None
    own = told.ceiling.accuracy
    numbers = f"{own.value:.3f} [{own.low:.3f}, {own.high:.3f}]"
    assert table.count(f"Ceiling {numbers}: the accuracy against single labels") == 1
    assert "from pairs that were judged several times (n = 40, 80 judgements" in table
    mixed = " ".join(comparison_table({"one": told, "other": silent}, first="source").split())
    assert "one: Ceiling" in mixed


def test_beside_a_ceiling_of_agreement_stands_the_agreement_of_each_model():
    rng = np.random.default_rng(2)
    soft = evaluate(pair_rows([(1.0, 0.0, float(label)) for label in rng.random(60)]), beta=1.0)
    table = " ".join(comparison_table({"mine": soft}, first="model").split())
    assert "the agreement with a single judge that a perfect model would reach, from soft labels" in table
    assert "Compare it with the agreement of each model, and not with accuracy: mine 0." in table


def test_a_pair_weighs_by_its_votes_as_it_does_in_an_accuracy() -> None:
    """Of 200 pairs that eight judges agree on, and 200 coin tosses with two judges, a perfect model gets 0.9."""
    certain = [(number, True) for number in range(200) for _ in range(8)]
    tossed = [(200 + number, vote) for number in range(200) for vote in (True, number % 2 == 0)]
    pairs, votes = zip(*certain, *tossed, strict=True)
    found = from_votes(np.array(pairs), np.array(votes), [str(pair) for pair in pairs])
    assert found is not None
    assert found.agreement is not None
    assert found.agreement.value == pytest.approx((1600 + 400 * 0.5) / 2000)
    assert found.accuracy.low <= 0.9 <= found.accuracy.high
    assert found.accuracy.n == 400
