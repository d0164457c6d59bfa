"""Verdicts from numbers whose truth is known, and from numbers that say nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import t as student

from rewardlab.analysis.crossed import Observed, Varies
from rewardlab.core.errors import ConfigError
from rewardlab.experiments.bands import Bands, band_verdict
from rewardlab.experiments.claims import parse
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.power import noise_of
from rewardlab.experiments.reporting.numbers import change_of
from rewardlab.experiments.verdicts import contrast_of, judge

A, B = Term("accuracy", "a"), Term("accuracy", "b")
PROMPTS = tuple(map(str, range(400)))


def arm(right: float, seeds: Sequence[int] = (0, 1, 2), *, draw: int = 0) -> Observed:
    """An arm whose outcomes on prompts that all arms share are right so often."""
    hard_C = np.random.default_rng(99).normal(size=len(PROMPTS))
    own_SC = np.random.default_rng(draw).normal(size=(len(seeds), len(PROMPTS)))
    latent = 0.9 * hard_C + 0.4 * own_SC
    outcome_SC = (latent < np.quantile(latent, right)).astype(float)
    by_seed_S = outcome_SC.mean(1)
    influence = (outcome_SC - by_seed_S[:, None]) / len(PROMPTS)
    return Observed(by_seed_S=by_seed_S, seeds=tuple(seeds), influence_SC=influence, clusters=PROMPTS)


def record(*values: float, varies: Varies = "always") -> Observed:
    return Observed(by_seed_S=np.array(values, dtype=np.float64), seeds=tuple(range(len(values))), varies=varies)


def test_clear_claims_are_supported_or_refuted_and_close_ones_undecided() -> None:
    observed = {A: arm(0.80, draw=1), B: arm(0.70, draw=2)}
    claims = {
        "better": parse("accuracy(a) > accuracy(b)"),
        "worse": parse("accuracy(a) < accuracy(b)"),
        "close": parse("accuracy(a) > 0.795"),
        "both": parse("accuracy(a) > accuracy(b) and accuracy(a) > 0.5"),
        "one of two": parse("accuracy(a) > accuracy(b) and accuracy(a) < 0.5"),
    }
    found = {one.name: one for one in judge(claims, observed)}
    assert {name: one.verdict for name, one in found.items()} == {
        "better": "supported",
        "worse": "refuted",
        "close": "undecided",
        "both": "supported",
        "one of two": "refuted",
    }
    assert found["close"].decide.startswith(("If the truth", "More data would hardly"))
    assert found["better"].parts[0].estimate.value == pytest.approx(0.1, abs=0.01)
    assert found["better"].parts[0].estimate.level == pytest.approx(0.9)


def test_holm_counts_every_hypothesis_of_the_plan_also_those_not_tested() -> None:
    observed = {A: arm(0.72, draw=1)}
    claim = parse("accuracy(a) > 0.655")
    [alone] = judge({"h": claim}, observed)
    many = {"h": claim, **{f"missing {n}": parse(f"accuracy(m{n}) > 0.5") for n in range(9)}}
    first, *others = judge(many, observed, missing={Term("accuracy", "m0"): "its runs failed"})
    assert first.p_supported == alone.p_supported
    assert first.adjusted_supported == pytest.approx(10 * alone.p_supported)
    assert (alone.verdict, first.verdict) == ("supported", "undecided")
    assert "On its own" in first.sentence
    assert {one.verdict for one in others} == {"not tested"}
    assert others[0].sentence == "Not tested: its runs failed."


def test_one_seed_is_judged_by_prompts_and_says_what_that_leaves_out() -> None:
    [one] = judge({"h": parse("accuracy(a) > 0.5")}, {A: arm(0.8, seeds=[0])})
    assert one.verdict == "supported"
    assert one.is_of_these_runs
    assert one.sentence.startswith("Supported for these runs alone (p ")
    assert "how much another seed would differ is in no interval" in one.sentence
    [several] = judge({"h": parse("accuracy(a) > 0.5")}, {A: arm(0.8)})
    [lent] = judge({"h": parse("accuracy(a) > accuracy(b)")}, {A: arm(0.9, seeds=[0]), B: arm(0.5, draw=2)})
    for other in (several, lent):
        assert not other.is_of_these_runs
        assert other.sentence.startswith("Supported (p ")
    [close] = judge({"h": parse("accuracy(a) > 0.795")}, {A: arm(0.8, seeds=[0])})
    assert close.verdict == "undecided"
    assert not close.is_of_these_runs, "what is not decided is told of nobody"
    memory = Term("peak_memory", "a")
    [blind] = judge({"h": parse("peak_memory(a) < 9")}, {memory: record(8.0)})
    assert blind.verdict == "undecided"
    assert math.isnan(blind.p_supported)


def test_an_arm_of_one_seed_varies_as_arms_of_several_do() -> None:
    a, b = (Term("gap", arm, on="validation") for arm in "ab")
    values = np.array([0.10, 0.13, 0.14])
    observed = {
        a: Observed(by_seed_S=np.array([0.19]), seeds=(0,), row_error=0.0, num_rows=100),
        b: Observed(by_seed_S=values, seeds=(0, 1, 2), row_error=0.0, num_rows=100),
    }
    [one] = judge({"h": parse("gap(a) > gap(b)")}, observed)
    # Crawford & Howell's t test of a single value against a sample.
    t = (0.19 - values.mean()) / (values.std(ddof=1) * math.sqrt(1 + 1 / 3))
    assert one.p_supported == pytest.approx(student.sf(t, 2), rel=1e-6)
    assert one.verdict == "undecided", "by its rows alone the difference would be certain"
    assert "taken from b, with several" in one.sentence
    assert one.decide.startswith("More seeds of the arms that have one")
    [wide] = judge({"h": parse("gap(a) > 0.15")}, observed)
    assert wide.p_supported == pytest.approx(student.sf(0.04 / values.std(ddof=1), 2), rel=1e-6)
    [alone] = judge({"h": parse("gap(a) > 0.15")}, {a: observed[a]})
    assert "how much another seed would differ is in no interval" in alone.sentence


def test_settings_are_exact_and_equal_stops_are_not() -> None:
    share, stop = Term("trainable_share", "a"), Term("stopped_at", "a")
    observed = {share: record(0.01, varies="never"), stop: record(700, 700, 700, varies="steps")}
    claims = {"few": parse("trainable_share(a) <= 0.01"), "not": parse("trainable_share(a) < 0.01")}
    assert [one.verdict for one in judge(claims, observed)] == ["supported", "refuted"]
    [early] = judge({"early": parse("stopped_at(a) < 900")}, observed)
    assert early.verdict == "undecided"
    assert early.p_supported == 0.125
    assert "5 seeds" in early.decide
    [five] = judge({"early": parse("stopped_at(a) < 900")}, {stop: record(*[700] * 5, varies="steps")})
    assert five.verdict == "supported"


def test_numbers_of_runs_are_judged_over_seeds_alone() -> None:
    lora, full = Term("peak_memory", "lora"), Term("peak_memory", "full")
    observed = {lora: record(4.0, 4.1, 3.9), full: record(8.0, 8.2, 8.1)}
    [one] = judge({"h": parse("peak_memory(lora) <= 0.6 * peak_memory(full)")}, observed)
    assert one.verdict == "supported"
    differences = 0.6 * observed[full].by_seed_S - observed[lora].by_seed_S
    assert one.parts[0].error_seeds == pytest.approx(differences.std(ddof=1) / math.sqrt(3))


def test_verdicts_are_json() -> None:
    found = judge({"h": parse("accuracy(a) > 0.79"), "m": parse("accuracy(b) > 0")}, {A: arm(0.8)})
    again = json.loads(json.dumps([one.as_dict() for one in found]))
    assert again[0]["parts"][0]["estimate"]["value"] == found[0].parts[0].estimate.value
    assert again[1]["p_supported"] is None


def test_bands_that_the_interval_touches_are_allowed() -> None:
    rising = Bands(term=A, failure=0.58, success=0.63)
    found = band_verdict(rising, arm(0.8))
    assert (found.at, found.allowed) == ("success", ("success",))
    close = band_verdict(rising, arm(0.62))
    assert close.at == "acceptable"
    assert "success" in close.allowed
    falling = Bands(term=Term("stopped_at", "a"), failure=900, success=600)
    assert [falling.of(value) for value in (950, 900, 600, 500)] == ["failure", "acceptable", "acceptable", "success"]
    assert band_verdict(falling, record(700.0)).allowed == ("failure", "acceptable", "success")
    with pytest.raises(ConfigError, match="two different numbers"):
        Bands(term=A, failure=0.6, success=0.6)


def test_too_few_prompts_and_a_division_by_0_decide_nothing_and_say_so() -> None:
    few = Observed(by_seed_S=np.array([0.9, 0.9]), seeds=(0, 1), influence_SC=np.zeros((2, 5)), clusters=tuple("abcde"))
    [one] = judge({"h": parse("accuracy(a) > 0.5")}, {A: few})
    assert one.verdict == "undecided"
    assert one.decide == "At least 10 test prompts are needed for any verdict."
    zero = {Term("seconds", "a"): record(1.0, 1.1), Term("seconds", "b"): record(0.0, 0.0)}
    [undefined] = judge({"h": parse("seconds(a) / seconds(b) > 1")}, zero)
    assert undefined.verdict == "undecided"
    assert "not defined" in undefined.sentence
    assert judge({}, {}) == []


def test_prompts_that_all_agree_show_no_more_than_their_number_can() -> None:
    """Twelve of twelve right in each seed is seen with a chance of 0.9¹² = 0.28 where the truth is 0.9."""

    def always_right(prompts: int) -> Observed:
        return Observed(
            by_seed_S=np.ones(3),
            seeds=(0, 1, 2),
            influence_SC=np.zeros((3, prompts)),
            clusters=tuple(str(number) for number in range(prompts)),
        )

    claim, term = parse("accuracy(a) > 0.9"), Term("accuracy", "a")
    few, many = (judge({"H": claim}, {term: always_right(count)})[0] for count in (12, 100))
    assert (few.verdict, many.verdict) == ("undecided", "supported")
    assert few.p_supported == pytest.approx(0.9**12)
    # The limit of the interval is the distance at which that chance is the level of its side.
    assert few.parts[0].estimate.low == pytest.approx(0.1 - (1 - 0.05 ** (1 / 12)))
    below = judge({"H": parse("accuracy(a) < 0.9")}, {term: always_right(100)})[0]
    assert below.verdict == "refuted"
    unbounded = judge({"H": parse("margin(a) > 0")}, {Term("margin", "a"): always_right(100)})[0]
    assert unbounded.verdict == "undecided", "nothing tells how far a prompt could move a margin"


@pytest.mark.parametrize(
    ("claim", "possible"),
    [
        ("accuracy(a) > accuracy(b)", (-1, 1)),
        ("accuracy(a) < accuracy(b) + 0.2", (-0.8, 1.2)),
        ("accuracy(a) > 0.9", (-0.9, 0.1)),
        ("2 * accuracy(a) > accuracy(b)", (-1, 2)),
    ],
)
def test_intervals_of_claims_end_where_no_values_can_be(claim: str, possible: tuple[float, float]) -> None:
    observed = {A: scattered(0.5, 0.95), B: scattered(0.9, 0.6)}
    [one] = judge({"h": parse(claim)}, observed)
    estimate = one.parts[0].estimate
    assert (estimate.low, estimate.high) == pytest.approx(possible), "two seeds this far apart leave everything open"


def test_differences_of_shares_are_no_larger_than_one() -> None:
    change = change_of("accuracy", [scattered(0.5, 0.95)], [scattered(0.9, 0.6)])
    assert (change.low, change.high) == (-1, 1)
    loss = change_of("loss", [scattered(0.5, 0.95)], [scattered(0.9, 0.6)])
    assert loss.low < -1 < 1 < loss.high, "a loss has no largest value"


def scattered(*accuracies: float) -> Observed:
    """An arm whose seeds have come to accuracies far apart."""
    parts = [arm(right, seeds=[seed], draw=seed) for seed, right in enumerate(accuracies)]
    return Observed(
        by_seed_S=np.concatenate([one.by_seed_S for one in parts]),
        seeds=tuple(range(len(parts))),
        influence_SC=np.concatenate([one.influence_SC for one in parts if one.influence_SC is not None]),
        clusters=PROMPTS,
    )


def test_an_arm_of_one_seed_varies_as_the_others_of_its_claim_whatever_else_is_claimed() -> None:
    c = Term("accuracy", "c")
    observed = {A: arm(0.85, [0], draw=1), B: arm(0.70, draw=2)}
    wild = Observed(by_seed_S=np.array([0.5, 0.7, 0.9]), seeds=(0, 1, 2), row_error=0.01)
    claims = {"better": parse("accuracy(a) > accuracy(b)"), "other": parse("accuracy(c) > 0.9")}
    alone, beside = (judge(claims, observed | more)[0] for more in ({}, {c: wild}))
    assert alone.verdict == "supported"
    assert beside.parts == alone.parts
    assert "is taken from b" in alone.sentence

    observed[B] = arm(0.70, [0], draw=2)
    borrowed = judge(claims, observed | {c: wild})[0]
    assert borrowed.verdict == "undecided"
    assert "is taken from c" in borrowed.sentence
    noise = noise_of(contrast_of(claims["better"].parts[0], observed | {c: wild}))
    assert math.isnan(noise.seeds), "that of one arm was seen for no seeds of both"


def test_the_choice_of_a_side_is_no_choice_of_an_arm() -> None:
    observed = {A: arm(0.80, draw=1), B: arm(0.70, draw=2)}
    claims = {
        "apart": parse("abs(accuracy(a) - accuracy(b)) > 0.02"),
        "best": parse("max(accuracy(a), accuracy(b)) > 0.02"),
    }
    apart, best = judge(claims, observed)
    assert "that of the side that came out" in apart.sentence
    assert "that of the extreme arm" in best.sentence
