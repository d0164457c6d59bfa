"""What equal arms, constant values and choices after the fact may show: no more than the level that is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from rewardlab.analysis.crossed import Observed, combined
from rewardlab.analysis.linearised import observed_in
from rewardlab.analysis.score_table import score_table
from rewardlab.experiments.claims import parse
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.reporting.numbers import contrast
from rewardlab.experiments.verdicts import Verdict, contrast_of, judge
from scored import rows_of

FloatArray = np.ndarray
ROWS = 200


def of_prompts(right_SC: FloatArray) -> Observed:
    by_seed_S = right_SC.mean(1)
    return Observed(
        by_seed_S=by_seed_S,
        seeds=tuple(range(len(right_SC))),
        influence_SC=(right_SC - by_seed_S[:, None]) / right_SC.shape[1],
        clusters=tuple(f"{number:04}" for number in range(right_SC.shape[1])),
    )


def of_curve(right_SC: FloatArray) -> Observed:
    by_seed_S = right_SC.mean(1)
    error = math.sqrt(float(np.mean(by_seed_S * (1 - by_seed_S))) / right_SC.shape[1])
    return Observed(by_seed_S=by_seed_S, seeds=tuple(range(len(right_SC))), row_error=error, num_rows=ROWS)


def record(*values: float, varies: str = "always") -> Observed:
    return Observed(by_seed_S=np.array(values), seeds=tuple(range(len(values))), varies=varies)


def found_by(claim: str, seen: Callable[[FloatArray], Observed], *, seeds: int = 3, times: int = 400) -> float:
    """How often equal arms, right on 70 % of prompts that they share, support a claim."""
    generator, found = np.random.default_rng(0), 0
    parsed = parse(claim)
    for _ in range(times):
        common_C = math.sqrt(0.7) * generator.normal(size=ROWS) + 0.524
        observed = {}
        for term in parsed.terms:
            latent_SC = common_C + math.sqrt(0.3) * generator.normal(size=(seeds, ROWS))
            observed[term] = seen((latent_SC > 0).astype(float))
        found += judge({"h": parsed}, observed)[0].verdict == "supported"
    return found / times


MOST = 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)


@pytest.mark.parametrize(
    "claim",
    [
        "accuracy(a) > accuracy(b)",
        *(
            pytest.param(claim, marks=pytest.mark.slow)
            for claim in (
                "max(accuracy(a), accuracy(b), accuracy(c), accuracy(d)) > accuracy(e)",
                "accuracy(e) < max(accuracy(a), accuracy(b), accuracy(c), accuracy(d))",
                "min(accuracy(a), accuracy(b), accuracy(c)) < accuracy(e)",
            )
        ),
    ],
)
def test_equal_arms_are_found_apart_no_more_often_than_told_whoever_is_chosen_afterwards(claim: str) -> None:
    assert found_by(claim, of_prompts) <= MOST


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("claim", ["accuracy(a, step=9) > accuracy(b, step=9)", "accuracy(a, step=9) > 0.7"])
def test_values_of_curves_have_the_noise_of_their_rows(claim: str) -> None:
    assert found_by(claim, of_curve) <= MOST


def test_a_mean_of_two_curves_counts_the_rows_that_they_share_twice() -> None:
    one, two = (
        Observed(by_seed_S=np.array([0.7, 0.7]), seeds=(0, 1), row_error=0.03, num_rows=90),
        Observed(by_seed_S=np.array([0.6, 0.6]), seeds=(0, 1), row_error=0.04, num_rows=80),
    )
    both = combined([(one, 0.5), (two, 0.5)], 0.65)
    apart = combined([(one, 1.0), (two, -1.0)], 0.1)
    assert both.prompts is not None
    assert apart.prompts is not None
    assert math.sqrt(both.prompts.variance) == pytest.approx(0.035), "errors that add up may be the same errors"
    assert math.sqrt(apart.prompts.variance) == pytest.approx(0.05), "those that cancel each other may not be"
    assert (both.num_prompts, both.prompts.freedom) == (80, 79)


def test_curves_without_intervals_say_what_their_verdict_leaves_out() -> None:
    term = Term("ece", "a", step=9, on="validation")
    unknown = Observed(by_seed_S=np.array([0.10, 0.11, 0.10]), seeds=(0, 1, 2), row_error=math.nan)
    [found] = judge({"h": parse("ece(a, step=9) < 0.3")}, {term: unknown})
    assert "how much other validation rows would change it is not known" in found.sentence
    assert "over rows not known" in found.parts[0].estimate.method


@pytest.mark.parametrize("share", [0.01, 0.02])
@pytest.mark.parametrize("seeds", [2, 3])
def test_arms_that_differ_on_a_few_prompts_are_not_certain_to_differ(seeds: int, share: float) -> None:
    generator, found, times = np.random.default_rng(1), 0, 300
    for _ in range(times):
        base_C = (generator.random(100) < 0.7).astype(float)
        arms = [of_prompts(np.abs(base_C - (generator.random((seeds, 100)) < share / 2))) for _ in range(2)]
        one = contrast("accuracy", [arms[0]], [arms[1]])
        p = min(1.0, 2 * min(one.p_above(), one.p_below()))
        found += p < 0.05
        estimate = one.interval(0.95)
        assert estimate.high > estimate.low or math.isnan(estimate.low), "an interval of no width is none"
    assert found / times < MOST


@pytest.mark.parametrize(("seeds", "p"), [(2, 0.25), (3, 0.125), (5, 0.03125)])
@pytest.mark.parametrize("claim", ["stopped_at(a) >= 100", "stopped_at(a) > 99", "stopped_at(a) >= stopped_at(b)"])
def test_equal_steps_show_what_as_many_coins_show_also_at_the_limit(claim: str, seeds: int, p: float) -> None:
    observed = {term: record(*[100.0] * seeds, varies="steps") for term in parse(claim).terms}
    [found] = judge({"h": parse(claim)}, observed)
    assert (found.p_supported, found.p_refuted) == (p, 1.0)
    assert math.isnan(found.parts[0].estimate.low)
    assert "every seed has the same value" in found.sentence


def test_equal_values_of_runs_are_no_certainty_either() -> None:
    term = Term("train_accuracy", "a", on="validation")
    [found] = judge({"h": parse("train_accuracy(a) > 0.7")}, {term: record(0.8, 0.8)})
    assert found.p_supported == 0.25
    [exact] = judge(
        {"h": parse("trainable_share(a) < 0.7")}, {Term("trainable_share", "a"): record(0.1, varies="never")}
    )
    assert exact.p_supported == 0.0


def test_what_rounding_leaves_of_arms_that_agree_is_no_noise() -> None:
    generator = np.random.default_rng(2)
    claim = parse("accuracy(a) >= mean(accuracy(b), accuracy(c)) - 0.03")
    weighted = parse("0.1 * accuracy(a) + 0.2 * accuracy(a) >= 0.3 * accuracy(b) - 0.009")
    for _ in range(30):
        same = of_prompts(np.repeat((generator.random((1, 30)) < 0.7).astype(float), 3, axis=0))
        for one, share in ((claim, 0.03 / 2), (weighted, 0.009 / 0.6)):
            [found] = judge({"h": one}, dict.fromkeys(one.terms, same))
            assert found.p_supported == pytest.approx((1 - share) ** 30)


def test_a_choice_after_the_fact_is_told_beside_its_interval() -> None:
    generator = np.random.default_rng(3)
    observed: Mapping[Term, Observed] = {
        Term("accuracy", name): of_prompts((generator.random((3, 200)) < 0.7).astype(float)) for name in "abc"
    }
    chosen, product = (
        judge({"h": parse(text)}, observed)[0]
        for text in (
            "max(accuracy(a), accuracy(b)) > accuracy(c)",
            "max(accuracy(a), accuracy(b)) * accuracy(a) > accuracy(c)",
        )
    )
    assert "p accounts for the choice" in chosen.sentence
    assert "neither in the interval nor in p" in product.sentence


def near_the_end(
    text: str, outcomes: Callable[[FloatArray], Mapping[str, FloatArray]], *, times: int = 400
) -> list[Verdict]:
    """Verdicts on a claim about arms whose three seeds agree on 19 of 20 of 200 prompts."""
    generator, parsed = np.random.default_rng(6), parse(text)
    found = []
    for _ in range(times):
        common, own = generator.random((1, ROWS)), generator.random((3, ROWS))
        arms = outcomes(np.where(generator.random(own.shape) < 0.05, own, common))
        observed = {term: of_prompts(arms[term.arm].astype(float)) for term in parsed.terms}
        found.append(judge({"h": parsed}, observed)[0])
    return found


def lost(rank_SC: FloatArray) -> Mapping[str, FloatArray]:
    """Arm a is wrong on three prompts in a hundred on which arm b is right, and otherwise equal."""
    return {"a": rank_SC < 0.7, "b": rank_SC < 0.73}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("text", "outcomes", "side"),
    [
        ("accuracy(a) >= accuracy(b) - 0.03", lost, "supported"),
        ("accuracy(a) > 0.98", lambda rank_SC: {"a": rank_SC < 0.98}, "supported"),
        ("accuracy(a) > 0.95", lambda rank_SC: {"a": rank_SC < 0.95}, "supported"),
        ("accuracy(a) > 0.03", lambda rank_SC: {"a": rank_SC < 0.03}, "refuted"),
        ("negative_margin_rate(a) < 0.03", lambda rank_SC: {"a": rank_SC < 0.03}, "supported"),
        ("2 * accuracy(b) - 2 * accuracy(a) <= 0.06", lost, "supported"),
    ],
)
def test_shares_near_the_end_and_arms_that_differ_on_few_prompts_keep_their_level(text, outcomes, side) -> None:
    found = near_the_end(text, outcomes)
    assert np.mean([one.verdict == side for one in found]) <= MOST
    for one in found:
        limits = one.parts[0].estimate
        assert (limits.low > 0) == (one.p_supported < 0.05), "the interval beside a verdict says what it says"
        assert (limits.high < 0) == (one.p_refuted < 0.05)


def test_an_undecided_share_near_the_end_asks_for_more_prompts_than_there_are() -> None:
    found = near_the_end("accuracy(a) > 0.93", lambda rank_SC: {"a": rank_SC < 0.95}, times=100)
    asked = [one.needed.prompts for one in found if one.verdict == "undecided" and one.parts[0].estimate.value > 0]
    assert len(asked) > 30
    assert all(prompts is None or prompts > ROWS for prompts in asked)


@pytest.mark.parametrize("seeds", [1, 3])
def test_ordinary_shares_are_told_as_well_as_by_their_variance_alone(seeds: int) -> None:
    generator, claim = np.random.default_rng(7), parse("accuracy(a) > accuracy(b)")
    p, widths = [], []
    for _ in range(60):
        common_C = generator.normal(size=400)
        arms = [
            of_prompts((common_C + 0.6 * generator.normal(size=(seeds, 400)) > limit).astype(float))
            for limit in (-0.75, -0.6)
        ]
        observed = dict(zip((Term("accuracy", "a"), Term("accuracy", "b")), arms, strict=True))
        found = contrast_of(claim.parts[0], observed)
        assert found.bounded is not None
        both = found, replace(found, bounded=None)
        p.append([one.p_above() for one in both])
        widths.append([one.interval(0.9).high - one.interval(0.9).low for one in both])
    found_by = (np.array(p) <= 0.05).sum(axis=0)
    assert found_by[1] > 15
    assert found_by[1] - found_by[0] <= 2
    assert np.median(p, axis=0)[0] == pytest.approx(np.median(p, axis=0)[1], rel=0.1)
    assert np.mean(widths, axis=0)[0] == pytest.approx(np.mean(widths, axis=0)[1], rel=0.02)


def test_a_prompt_of_many_comparisons_could_move_a_share_further() -> None:
    sizes = np.array([30.0] + [1.0] * 29)
    right_C = np.ones((1, 30))
    one = replace(of_prompts(right_C), weight_SC=(sizes / sizes.sum())[None])
    term = Term("accuracy", "a")
    claim = parse("accuracy(a) > 0.8").parts[0]
    uneven, even = (contrast_of(claim, {term: seen}).bounded for seen in (one, of_prompts(right_C)))
    assert uneven is not None
    assert even is not None
    assert even.least == pytest.approx(-0.8)
    assert uneven.p_above(0.0) > even.p_above(0.0)


def test_losses_are_no_shares() -> None:
    generator = np.random.default_rng(8)
    claim = parse("loss(a) < 0.7").parts[0]
    assert contrast_of(claim, {Term("loss", "a"): of_prompts(generator.random((2, 60)))}).bounded is None


def by_length(generator: np.random.Generator, prompts: int, *, accuracy: float, longer: float) -> Observed:
    """Accuracy with length controlled of one seed, with a share of prompts whose preferred reply is the longer one."""
    rows = rows_of(np.stack([generator.random(prompts) < accuracy, np.full(prompts, 0.5)], axis=1))
    more = generator.integers(1, 80, size=prompts) * np.where(generator.random(prompts) < longer, 1, -1)
    lengths = np.stack([100 + more, 100 - more], axis=1).reshape(-1)
    rows = [replace(row, num_tokens=int(length)) for row, length in zip(rows, lengths, strict=True)]
    return observed_in("accuracy_length_controlled", {0: score_table(rows)})


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "longer"), [(150, 0.2), (60, 0.5)])
def test_accuracy_with_length_controlled_keeps_its_level_though_small_sides_are_all_right_by_chance(
    prompts: int, longer: float
) -> None:
    generator, term = np.random.default_rng(9), Term("accuracy_length_controlled", "a")
    claim, p = parse("accuracy_length_controlled(a) > 0.95").parts[0], []
    for _ in range(150):
        found = contrast_of(claim, {term: by_length(generator, prompts, accuracy=0.95, longer=longer)})
        by_what_varied = replace(found, bounded=None, num_alike=0.0)
        p.append([found.p_above() if found.value > 0 else 1.0, by_what_varied.p_above() if found.value > 0 else 1.0])
    assert (np.array(p) < 0.05).mean(axis=0)[0] <= 0.085
    assert (np.array(p) < 0.05).mean(axis=0)[1] > 0.14


def test_accuracy_with_length_controlled_is_the_mean_of_its_outcomes_by_their_weights() -> None:
    one = by_length(np.random.default_rng(10), 90, accuracy=0.8, longer=0.2)
    assert one.weight_SC is not None
    assert one.outcome_SC is not None
    assert one.weight_SC.sum() == pytest.approx(1.0)
    assert (one.weight_SC * one.outcome_SC).sum() == pytest.approx(one.mean)
    assert 1 < one.num_alike < 80
