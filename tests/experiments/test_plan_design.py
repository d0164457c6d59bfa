"""What a design says of its hypotheses, and noise that is pooled over arms."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from rewardlab.analysis.crossed import Observed, combined
from rewardlab.analysis.crossed_pooled import pooled_over, with_pooled
from rewardlab.core.errors import ConfigError
from rewardlab.experiments.assumed import Assumed, assumed_noise
from rewardlab.experiments.checking import check
from rewardlab.experiments.claims import parse
from rewardlab.experiments.design import Design, claim_power
from rewardlab.experiments.expressions import Claim, Term
from rewardlab.experiments.observed_noise import _within, noise_seen
from rewardlab.experiments.outcomes import Outcomes
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.power import Noise, chance, noise_of
from rewardlab.experiments.quantities import range_of
from rewardlab.experiments.verdicts import contrast_of, judge, pool_of
from rewardlab.experiments.words import check_report
from study_folders import PLAN, finished_study, frozen_study, write_plan

SMALL = Design(seeds=3, prompts=300, comparisons=300, hypotheses=5)
LARGE = Design(seeds=10, prompts=5000, comparisons=5000)


def ranges(claim: Claim) -> Mapping[Term, tuple[float, float]]:
    return {term: range_of(term.quantity, max_steps=1000) for term in claim.terms}


def arm(generator: np.random.Generator, *, seeds: int = 3, sd: float = 0.02, prompts: int = 50) -> Observed:
    values_SC = 0.7 + sd * generator.normal(size=(seeds, 1)) + 0.1 * generator.normal(size=(seeds, prompts))
    by_seed_S = values_SC.mean(1)
    return Observed(
        by_seed_S=by_seed_S,
        seeds=tuple(range(seeds)),
        influence_SC=(values_SC - by_seed_S[:, None]) / prompts,
        clusters=tuple(map(str, range(prompts))),
    )


def test_a_margin_far_below_what_is_visible_is_a_problem() -> None:
    claim = parse("accuracy(a) >= accuracy(b) - 0.03")
    small, large = (claim_power(claim, design, ranges(claim)) for design in (SMALL, LARGE))
    assert small.parts[0].margin == pytest.approx(0.03)
    assert small.parts[0].visible > 0.06
    assert "if the arms are equal it is supported with a chance of" in small.problems[0]
    assert large.problems == ()
    assert large.parts[0].visible < 0.03
    assert large.parts[0].supported_if_equal is not None
    assert large.parts[0].supported_if_equal > 0.8


def test_a_claim_that_values_cannot_support_or_refute_is_a_problem() -> None:
    never = parse("stopped_at(a) > 1000")
    assert claim_power(never, LARGE, ranges(never)).problems == ("no possible values support it",)
    always = parse("accuracy(a) >= 0")
    assert claim_power(always, LARGE, ranges(always)).problems == ("no possible values refute it",)
    # 0.99 to 1 is less than these sizes show.
    hardly = parse("accuracy(a) > 0.99")
    assert "even the most favourable values" in claim_power(hardly, SMALL, ranges(hardly)).problems[0]


def test_what_is_not_known_is_said() -> None:
    memory = parse("peak_memory(a) <= 0.6 * peak_memory(b)")
    found = claim_power(memory, SMALL, ranges(memory))
    assert math.isnan(found.parts[0].visible)
    assert "nothing is assumed about peak_memory" in found.notes[0]
    stop = parse("stopped_at(a) < 900")
    assert "7 seeds or more" in claim_power(stop, SMALL, ranges(stop)).notes[1]
    assert json.loads(json.dumps(found.as_dict()))["parts"][0]["visible"] is None


@pytest.mark.slow
def test_an_earlier_study_shows_the_noise_of_the_next(tmp_path: Path) -> None:
    study = finished_study(tmp_path, noise=0.4)
    assumed, said = noise_seen(study.folder, ["margin", "gap", "stopped_at", "accuracy", "roc_auc"])
    assert said == f"as in {study.folder} (9 runs of 3 arms)"
    claims = {name: parse(f"{name}(harsh) > {name}(plain)") for name in ("accuracy", "margin", "gap")}
    terms = [term for claim in claims.values() for term in claim.terms]
    observed, _ = Outcomes(study, may_read="test").observe(terms)
    design = Design(seeds=3, prompts=200, comparisons=200)
    for claim in claims.values():
        own = math.sqrt(contrast_of(claim.parts[0], observed).variance)
        told = claim_power(claim, design, ranges(claim), assumed=assumed).parts[0].error
        # Three seeds show their noise within a factor of two or so, and here it is a mean over three arms.
        assert 0.5 < told / own < 2, claim
    assert 0.6 < assumed.accuracy < 0.8
    assert 0 < assumed.disagreeing_seeds <= assumed.disagreeing < 0.5
    assert assumed.within_prompt == Assumed().within_prompt, "each prompt has one comparison"
    losses, _ = Outcomes(study, may_read="test").observe(Term("loss", arm) for arm in ("plain", "smooth", "harsh"))
    moved = np.concatenate([one.influence_SC for one in losses.values() if one.influence_SC is not None])
    assert assumed.skewness["loss"] == pytest.approx((moved**3).mean() / np.square(moved).mean() ** 1.5)
    assert "margin" not in assumed.skewness, "a margin has no end"
    area = parse("roc_auc(plain) > 0.7").parts[0]
    noise = assumed_noise(area, assumed, num_prompts=200, num_comparisons=200, values={})
    assert isinstance(noise, Noise)
    assert noise.tail is not None
    assert noise.tail.down > 0, "what is lost by a wrong pair is more than what is gained by a right one"


@pytest.mark.slow
def test_check_takes_the_noise_of_an_earlier_study(tmp_path: Path) -> None:
    study = finished_study(tmp_path / "earlier")
    text = PLAN + f"assume: {{study: {study.folder}}}\n"
    checked = check(read_plan(write_plan(tmp_path, text)))
    assert f"noise as in {study.folder} (9 runs of 3 arms):" in " ".join(check_report(checked).split())
    stated = check(read_plan(write_plan(tmp_path, text.replace("study}", "study, seed_sd: 0.1}"))))
    assert stated.noise_is.endswith("except for what the plan states")
    found, wide = (one.tested["harms"].power for one in (checked, stated))
    assert found is not None
    assert wide is not None
    # Two arms, three seeds each, whose accuracies are told to differ by 0.1 from seed to seed.
    assert wide.parts[0].error > math.sqrt(2 * 0.1**2 / 3) > found.parts[0].error
    begun = frozen_study(tmp_path / "begun")
    for folder, why in ((tmp_path, "holds no study"), (begun.folder, "no arm has two finished runs")):
        with pytest.raises(ConfigError, match=why):
            check(read_plan(write_plan(tmp_path, PLAN + f"assume: {{study: {folder}}}\n")))
    with pytest.raises(ConfigError, match="assume.study: wanted a text, got 3"):
        read_plan(write_plan(tmp_path, PLAN + "assume: {study: 3}\n"))


def test_comparisons_of_one_prompt_that_agree_are_correlated() -> None:
    prompt_N = np.repeat(np.arange(500), 4)
    generator = np.random.default_rng(0)
    by_prompt_N = (generator.random(500) < 0.7).astype(float)[prompt_N]
    alone_N = (generator.random(2000) < 0.7).astype(float)
    mixed_N = np.where(generator.random(2000) < 0.5, by_prompt_N, alone_N)
    assert _within(by_prompt_N, prompt_N) == [1.0]
    assert _within(alone_N, prompt_N)[0] < 0.05
    assert _within(mixed_N, prompt_N)[0] == pytest.approx(0.25, abs=0.05)
    assert _within(alone_N, np.arange(2000)) == []


def test_chances_at_what_is_expected_are_those_of_the_parts() -> None:
    claim = parse("accuracy(a) > 0.6 and accuracy(b) > 0.6")
    expected = dict.fromkeys(claim.terms, 0.63)
    assumed = Assumed(over_seeds={"accuracy": 0.01})
    found = claim_power(claim, LARGE, ranges(claim), assumed=assumed, expected=expected)
    single = parse("accuracy(a) > 0.6")
    alone = claim_power(single, LARGE, ranges(single), assumed=assumed, expected=expected)
    assert alone.supported is not None
    assert found.supported == pytest.approx(1 - 2 * (1 - alone.supported))
    assert found.refuted is not None
    assert found.refuted < 0.01
    assert found.expected == pytest.approx(0.03)


def test_pooled_noise_is_that_of_all_arms_and_never_less_than_ones_own() -> None:
    generator = np.random.default_rng(1)
    arms = [arm(generator) for _ in range(4)]
    pool = pooled_over(arms)
    assert pool is not None
    assert pool.freedom == 8
    assert pool.variance == pytest.approx(np.mean([one.by_seed_S.var(ddof=1) for one in arms]))
    own = combined([(arms[0], 1.0), (arms[1], -1.0)], 0.0)
    [part] = with_pooled(own, [(arms[0], 1.0, pool), (arms[1], -1.0, pool)]).seeds
    assert part.freedom == 8
    assert part.variance == pytest.approx(max(own.seeds[0].variance, 2 * pool.variance / 3))
    assert pooled_over([arm(generator, seeds=1)]) is None


def test_pooling_is_of_one_quantity_of_score_rows_at_a_time() -> None:
    generator = np.random.default_rng(2)
    observed = {Term("accuracy", name): arm(generator) for name in "ab"}
    observed |= {
        Term("loss", "a"): arm(generator),
        Term("seconds", "a"): Observed(by_seed_S=np.ones(3), seeds=(0, 1, 2)),
    }
    assert {kind: part.freedom for kind, part in pool_of(observed).items()} == {
        ("accuracy", "test", None): 4,
        ("loss", "test", None): 2,
    }
    claim = parse("accuracy(a) > accuracy(b)")
    [own], [pooled] = (judge({"h": claim}, observed, pooled=pooled) for pooled in (False, True))
    assert "noise of all arms" in pooled.parts[0].estimate.method
    assert "noise of all arms" not in own.parts[0].estimate.method


@pytest.mark.slow
def test_the_chance_with_pooled_noise_is_that_of_simulated_studies() -> None:
    generator = np.random.default_rng(3)
    claim = parse("accuracy(a) > accuracy(b)")
    noise = noise_of(contrast_of(claim.parts[0], {term: arm(generator, seeds=4000) for term in claim.terms}))
    found = []
    for _ in range(400):
        observed = {Term("accuracy", name): arm(generator) for name in "abcd"}
        observed[claim.terms[0]] = Observed(
            by_seed_S=observed[claim.terms[0]].by_seed_S + 0.05,
            seeds=(0, 1, 2),
            influence_SC=observed[claim.terms[0]].influence_SC,
            clusters=observed[claim.terms[0]].clusters,
        )
        found.append(judge({"h": claim}, observed, pooled=True)[0].verdict == "supported")
    assert np.mean(found) == pytest.approx(chance(0.05, noise, seeds=3, prompts=50, arms=4), abs=0.06)
