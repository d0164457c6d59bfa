"""The chance to find a claim on a loss, whose values have a long tail, against simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom

from rewardlab.analysis.crossed import Observed
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.linearised import observed_in
from rewardlab.analysis.score_table import score_table
from rewardlab.experiments.assumed import Assumed, assumed_noise
from rewardlab.experiments.claims import parse
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.power import Noise, chance, needed, noise_of, visible
from rewardlab.experiments.quantities import quantity_named
from rewardlab.experiments.tails import third_of_mean
from rewardlab.experiments.verdicts import contrast_of
from scored import rows_of

SKEWED = Assumed(over_prompts={"loss": 0.5}, over_seeds={"loss": 0.0}, skewness={"loss": 6.0}, within_prompt=0.0)


def noise(claim: str, prompts: int = 60, *, comparisons: int = 0, assumed: Assumed = SKEWED) -> Noise:
    [part] = parse(claim).parts
    count = comparisons or prompts
    found = assumed_noise(part, assumed, num_prompts=prompts, num_comparisons=count, values={})
    assert isinstance(found, Noise)
    return found


def losses(generator: np.random.Generator, prompts: int = 60) -> Observed:
    """Losses of mean 1, standard deviation ½ and skewness 6."""
    shape = 4 / 6**2
    moved = 0.5 * (generator.gamma(shape, size=prompts) - shape) / math.sqrt(shape)
    value = 1 + float(moved.mean())
    return Observed(
        by_seed_S=np.array([value]),
        seeds=(0,),
        influence_SC=(moved - moved.mean())[None] / prompts,
        clusters=tuple(map(str, range(prompts))),
        each_SC=np.ones((1, prompts)),
        turned_S=np.array([1.5]),
        has_long_tail=True,
    )


@pytest.mark.parametrize(("claim", "limit"), [("loss(a) < 1", 1.0), ("loss(a) > 1", -1.0)])
def test_the_chance_to_find_a_loss_is_that_of_simulated_studies(claim: str, limit: float) -> None:
    generator, [part] = np.random.default_rng(0), parse(claim).parts
    said = noise(claim)
    ahead = 2.5 * said.error(1, 60)
    found = [contrast_of(part, {Term("loss", "a"): losses(generator)}).p_above(-ahead) <= 0.05 for _ in range(400)]
    assert chance(ahead, said, seeds=1, prompts=60) == pytest.approx(np.mean(found), abs=0.1)
    if limit > 0:
        assert chance(ahead, replace(said, tail=None), seeds=1, prompts=60) > np.mean(found) + 0.25, "else far off"


def test_a_claim_is_refuted_as_its_opposite_is_supported() -> None:
    below, above = noise("loss(a) < 1"), noise("loss(a) > 1")
    assert below.turned() == above
    assert visible(below, seeds=1, prompts=60) > 1.3 * visible(above, seeds=1, prompts=60)


def test_what_two_arms_have_in_common_of_a_tail_cancels_but_not_that_one_may_still_lose() -> None:
    found = noise("loss(a) < loss(b)")
    assert found.tail is not None
    assert found.tail.rising == found.tail.falling
    assert found.tail.down == found.tail.up > 0
    assert chance(0.15, found, seeds=1, prompts=60) < chance(0.15, replace(found, tail=None), seeds=1, prompts=60)


def test_only_claims_whose_test_knows_of_a_tail_have_one() -> None:
    assert noise("ece(a) < 0.1", assumed=Assumed()).tail is None
    assert noise("loss(a) < ece(a)", assumed=Assumed()).tail is None
    assert noise("loss(a) < 0.5 + accuracy(a)", assumed=Assumed()).tail is not None
    brier = noise("brier(a) < 0.2", assumed=Assumed()).tail
    assert brier is not None
    assert not brier.is_loss
    rows = rows_of(np.random.default_rng(0).normal(size=(40, 2)))
    table = {0: score_table(rows)}
    for name in ("accuracy", "loss", "brier", "roc_auc", "ece", "margin"):
        one = observed_in(name, table)
        quantity = quantity_named(name)
        assert quantity.has_ends == (quantity.is_share or one.turned_S is not None), name


def outcomes(right_C: FloatArray) -> Observed:
    """Outcomes of single comparisons in one seed."""
    value = float(right_C.mean())
    return Observed(
        by_seed_S=np.array([value]),
        seeds=(0,),
        influence_SC=(right_C - value)[None] / right_C.size,
        clusters=tuple(map(str, range(right_C.size))),
    )


@pytest.mark.parametrize(("accuracy", "prompts", "ahead"), [(0.97, 60, 0.06), (0.97, 200, 0.03), (0.99, 200, 0.02)])
def test_the_chance_to_find_an_accuracy_near_1_is_that_of_simulated_studies(accuracy, prompts, ahead) -> None:
    generator, [part] = np.random.default_rng(0), parse(f"accuracy(a) > {accuracy - ahead:.17g}").parts
    said = noise("accuracy(a) > 0.7", prompts, assumed=Assumed(over_seeds={"accuracy": 0.0}).at_accuracy(accuracy))
    found = [
        contrast_of(part, {Term("accuracy", "a"): outcomes((generator.random(prompts) < accuracy) * 1.0)}).p_above()
        for _ in range(400)
    ]
    rate = float(np.mean(np.array(found) <= 0.05))
    assert chance(ahead, said, seeds=1, prompts=prompts) == pytest.approx(rate, abs=0.12)
    assert chance(ahead, replace(said, tail=None), seeds=1, prompts=prompts) > rate + 0.15, "else far too high"


@pytest.mark.parametrize("prompts", [60, 400])
def test_the_chance_to_tell_two_arms_of_an_accuracy_near_1_apart_is_that_of_simulated_studies(prompts) -> None:
    generator, margin, apart = np.random.default_rng(0), 2.5 * math.sqrt(0.04 / prompts), 0.02
    assumed = Assumed(accuracy=0.97, disagreeing=2 * apart, disagreeing_seeds=2 * apart, over_seeds={"accuracy": 0.0})
    said = noise("accuracy(a) > accuracy(b)", prompts, assumed=assumed)
    [part] = parse(f"accuracy(a) > accuracy(b) - {margin:.17g}").parts
    found = []
    for _ in range(400):
        one_C = generator.random(prompts)
        arms = {"a": one_C >= 0.03, "b": (one_C >= 0.03 + apart) | ((one_C >= 0.01) & (one_C < 0.03))}
        seen = {Term("accuracy", name): outcomes(right_C * 1.0) for name, right_C in arms.items()}
        one = contrast_of(part, seen)
        found.append((one.p_of_constant if one.is_constant else one.p_above()) <= 0.05)
    assert chance(margin, said, seeds=1, prompts=prompts) == pytest.approx(np.mean(found), abs=0.12)


@pytest.mark.parametrize("errors", [2.5, 3.5])
def test_arms_that_may_not_differ_on_any_prompt_are_found_as_often_as_counts_say(errors: float) -> None:
    generator, prompts, own = np.random.default_rng(1), 60, 0.005
    assumed = Assumed(accuracy=0.99, disagreeing=2 * own, disagreeing_seeds=2 * own, over_seeds={"accuracy": 0.0})
    said = noise("accuracy(a) > accuracy(b)", prompts, assumed=assumed)
    margin = errors * said.error(1, prompts)
    [part] = parse(f"accuracy(a) > accuracy(b) - {margin:.17g}").parts
    found = []
    for _ in range(400):
        rank_C = generator.random(prompts)
        arms = {"a": rank_C >= 2 * own, "b": (rank_C >= 3 * own) | (rank_C < own)}
        seen = {Term("accuracy", name): outcomes(right_C * 1.0) for name, right_C in arms.items()}
        one = contrast_of(part, seen)
        found.append((one.p_of_constant if one.is_constant else one.p_above()) <= 0.05)
    assert chance(margin, said, seeds=1, prompts=prompts) == pytest.approx(np.mean(found), abs=0.1)


@pytest.mark.parametrize("losses", [1, 2, 3, 4])
def test_by_single_counts_an_accuracy_is_found_by_just_as_many_losses_as_the_test_takes(losses: int) -> None:
    prompts, accuracy = 150, 0.98
    right_C = (np.arange(prompts) >= losses) * 1.0
    said = noise("accuracy(a) > 0.7", prompts, assumed=Assumed(over_seeds={"accuracy": 0.0}).at_accuracy(accuracy))

    def p_at(limit: float) -> float:
        [part] = parse(f"accuracy(a) > {limit:.17g}").parts
        return contrast_of(part, {Term("accuracy", "a"): outcomes(right_C)}).p_above()

    limit = brentq(lambda limit: p_at(limit) - 0.05, 0.8, 1 - losses / prompts - 1e-6)
    # The chance to have at most so many losses, and one fewer, by the draws that the forecast has.
    at_most, fewer = (binom.cdf(losses - less, prompts, 1 - accuracy) for less in (0, 1))
    assert chance(accuracy - limit + 2e-4, said, seeds=1, prompts=prompts) == pytest.approx(at_most, abs=0.04)
    assert chance(accuracy - limit - 2e-4, said, seeds=1, prompts=prompts) == pytest.approx(fewer, abs=0.04)


def test_losses_of_more_accurate_arms_have_a_longer_tail_and_these_disagree_less() -> None:
    default = Assumed()
    same, near = default.at_accuracy(0.7), default.at_accuracy(0.97)
    assert dict(same.over_prompts) == pytest.approx(dict(default.over_prompts))
    assert dict(same.skewness) == pytest.approx(dict(default.skewness))
    assert near.skewness["loss"] > 4 * same.skewness["loss"]
    assert near.over_prompts["loss"] < same.over_prompts["loss"]
    assert near.correlations("accuracy") == pytest.approx(default.correlations("accuracy"))
    assert near.disagreeing < 2 * 0.03, "two arms that are each wrong in 3 % cannot disagree on more"
    assert same.over_seeds == pytest.approx(dict(default.over_seeds))
    assert near.over_seeds["accuracy"] == pytest.approx(0.015 * math.sqrt(0.97 * 0.03 / 0.21))
    assert near.over_seeds["accuracy"] < 0.03 / 2, "seeds hardly ever have an accuracy above 1"


@pytest.mark.parametrize("correlation", [0.0, 0.3, 1.0])
def test_comparisons_of_a_prompt_share_their_third_moment_as_they_share_their_variance(correlation: float) -> None:
    assert third_of_mean(1, correlation) == 1
    least, most = 1 / 12**2, 1.0
    assert third_of_mean(12, correlation) == pytest.approx(
        {0.0: least, 0.3: (1 + 33 * 0.3 + 110 * 0.3 ** (5 / 3)) / 144, 1.0: most}[correlation]
    )


def test_more_prompts_and_seeds_make_a_tail_matter_less() -> None:
    few, many = noise("loss(a) < 1", 60), noise("loss(a) < 1", 6000)
    lost = [
        chance(2.5 * one.error(1, prompts), replace(one, tail=None), seeds=1, prompts=prompts)
        - chance(2.5 * one.error(1, prompts), one, seeds=1, prompts=prompts)
        for one, prompts in ((few, 60), (many, 6000))
    ]
    assert lost[0] > 0.3 > 0.1 > lost[1]
    assert chance(0.2, few, seeds=1, prompts=6000) == pytest.approx(chance(0.2, many, seeds=1, prompts=6000), abs=0.01)


def test_what_an_undecided_loss_needs_counts_its_skewness() -> None:
    found = contrast_of(parse("loss(a) < 1.1").parts[0], {Term("loss", "a"): losses(np.random.default_rng(3))})
    own = noise_of(found, limit=0.0)
    assert own.tail is not None
    assert own.tail.falling.third_prompts > own.tail.rising.third_prompts == 0
    with_tail, without = (needed(0.1, one, seeds=1, prompts=60).prompts for one in (own, replace(own, tail=None)))
    assert with_tail is not None
    assert without is not None
    assert with_tail > without


def test_shares_vary_no_more_than_at_one_half_and_not_at_all_at_the_ends() -> None:
    share = noise("accuracy(a) > 0.6", 20, assumed=Assumed(over_seeds={"accuracy": 0.0}))
    assert share.tail is not None
    assert share.tail.most == pytest.approx(0.25 / 20)
    uncapped = replace(share, tail=replace(share.tail, most=math.inf))
    assert chance(0.3, uncapped, seeds=1, prompts=20) < chance(0.3, share, seeds=1, prompts=20)
    assert share.at_the_ends().tail is None
    assert noise("loss(a) < 1").at_the_ends().tail is not None
