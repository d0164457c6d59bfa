"""What a design can show, against simulation; and what can hold at all."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rewardlab.analysis.crossed import Part, half_width
from rewardlab.experiments.assumed import Assumed, assumed_noise
from rewardlab.experiments.claims import parse
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.power import Noise, chance, needed, reach_of, visible

NOISE = Noise(seeds=1e-4, within=1e-4, prompts=2e-4, num_prompts=400)
A, B = Term("accuracy", "a"), Term("accuracy", "b")
SHARES = {A: (0.0, 1.0), B: (0.0, 1.0)}


@pytest.mark.parametrize(("seeds", "prompts"), [(2, 400), (3, 400), (3, 4000), (10, 100)])
def test_the_chance_is_that_of_simulated_studies(seeds: int, prompts: int) -> None:
    generator, share = np.random.default_rng(0), 400 / prompts
    own, shared = (1e-4 + 1e-4 * share) / seeds, 2e-4 * share
    for ahead in (0.0, 0.03):
        found = []
        for _ in range(4000):
            value = ahead + math.sqrt(own + shared) * generator.normal()
            seen = own * generator.chisquare(seeds - 1) / (seeds - 1)
            parts = [Part(variance=seen, freedom=seeds - 1), Part(variance=shared, freedom=prompts - 1)]
            found.append(value > half_width(parts, 0.05))
        assert chance(ahead, NOISE, seeds=seeds, prompts=prompts) == pytest.approx(np.mean(found), abs=0.025)


def test_what_is_visible_is_found_four_times_in_five() -> None:
    smallest = visible(NOISE, seeds=3, prompts=400)
    assert chance(smallest, NOISE, seeds=3, prompts=400) == pytest.approx(0.8, abs=1e-3)
    assert visible(NOISE, seeds=5, prompts=400) < smallest
    assert visible(NOISE, seeds=3, prompts=800) < smallest
    assert visible(NOISE, seeds=3, prompts=400, alpha=0.01) > smallest


def test_what_is_needed_decides_and_one_less_does_not() -> None:
    found = needed(0.04, NOISE, seeds=3, prompts=400)
    assert found.seeds is not None
    assert chance(0.04, NOISE, seeds=found.seeds, prompts=400) >= 0.8
    assert chance(0.04, NOISE, seeds=found.seeds - 1, prompts=400) < 0.8
    assert needed(0.0, NOISE, seeds=3, prompts=400) == needed(-1.0, NOISE, seeds=3, prompts=400)
    only_prompts = Noise(seeds=1.0, within=1e-4, prompts=1e-4, num_prompts=400)
    assert needed(0.5, only_prompts, seeds=3, prompts=400).prompts is None


def test_noise_by_assumption_is_that_of_the_pairs_on_which_arms_disagree() -> None:
    assumed = Assumed(disagreeing=0.2, disagreeing_seeds=0.08, over_seeds={"accuracy": 0.01})
    [part] = parse("accuracy(a) >= accuracy(b) - 0.03").parts
    noise = assumed_noise(part, assumed, num_prompts=500, num_comparisons=500, values={A: 0.7, B: 0.7})
    assert isinstance(noise, Noise)
    assert noise.seeds == pytest.approx(2 * 0.01**2)
    assert noise.within == pytest.approx(0.08 / 500)
    # One seed of each: the paired difference has the variance of the disagreement.
    assert noise.within + noise.prompts == pytest.approx(0.2 / 500)
    unknown = assumed_noise(parse("margin(a) > 1").parts[0], assumed, num_prompts=9, num_comparisons=9, values={})
    assert unknown == "nothing is assumed about margin over seeds; name an earlier study (assume.study)"


def test_claims_that_cannot_hold_or_cannot_fail_are_told() -> None:
    both = reach_of(parse("accuracy(a) >= accuracy(b) - 0.03"), SHARES)
    assert (both.can_hold, both.can_fail) == ("yes", "yes")
    assert reach_of(parse("accuracy(a) > 1"), SHARES).can_hold == "no"
    assert reach_of(parse("accuracy(a) >= 1"), SHARES).can_hold == "yes"
    assert reach_of(parse("accuracy(a) >= 0"), SHARES).can_fail == "no"
    # Each part can hold, but not both.
    assert reach_of(parse("accuracy(a) > accuracy(b) + 0.1 and accuracy(b) > 0.95"), SHARES).can_hold == "no"


def test_claims_that_are_not_linear_get_examples_or_stay_open() -> None:
    ratio = reach_of(parse("accuracy(a) / accuracy(b) > 0.9"), SHARES)
    assert (ratio.can_hold, ratio.can_fail) == ("yes", "yes")
    assert ratio.holds_at is not None
    assert ratio.holds_at["accuracy(a)"] / ratio.holds_at["accuracy(b)"] > 0.9
    product = reach_of(parse("accuracy(a) * accuracy(b) > 1"), SHARES)
    assert product.can_hold == "no"
    assert (
        reach_of(parse("accuracy(a) * accuracy(a) + 0.01 < accuracy(a) * accuracy(a)"), SHARES).can_hold == "not shown"
    )


@pytest.mark.parametrize(
    ("text", "prompts"),
    [("gap(a) < 0.1", 0.05**2), ("gap(a) < gap(b)", 2 * 0.05**2), ("mean(gap(a), gap(b)) < 0.1", 0.05**2)],
)
def test_the_rows_of_a_curve_are_in_its_noise(text: str, prompts: float) -> None:
    [part] = parse(text).parts
    assumed = Assumed(over_seeds={"gap": 0.01}, over_rows={"gap": 0.05})
    found = assumed_noise(part, assumed, num_prompts=100, num_comparisons=100, values={})
    assert isinstance(found, Noise)
    assert found.prompts == pytest.approx(prompts)
    assert found.within == 0.0
