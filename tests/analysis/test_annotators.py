"""Krippendorff's α: published values, the definition by all pairs, Cohen's κ where they are equal, and its interval."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from rewardlab.analysis import stats
from rewardlab.analysis.annotators import in_both_orders, krippendorff_alpha

# Example C of Krippendorff (2011), Computing Krippendorff's Alpha-Reliability: four observers, twelve units, gaps.
OBSERVERS = (
    "1 2 3 3 2 1 4 1 2 . . .",
    "1 2 3 3 2 2 4 1 2 5 . 3",
    ". 3 3 3 2 3 4 2 2 5 1 .",
    "1 2 3 3 2 4 4 1 2 5 1 .",
)


def published():
    units, values = [], []
    for row in OBSERVERS:
        for unit, value in enumerate(row.split()):
            if value != ".":
                units.append(unit)
                values.append(float(value))
    return np.array(units), np.array(values)


def by_definition(units, values, metric):
    """1 − D_o / D_e over all ordered pairs of values, as the paper writes it."""

    def apart(a, b):
        return float(a != b) if metric == "nominal" else (a - b) ** 2

    groups = [values[units == unit] for unit in np.unique(units)]
    groups = [group for group in groups if len(group) > 1]
    pooled = np.concatenate(groups)
    seen = sum(sum(apart(a, b) for a, b in permutations(group, 2)) / (len(group) - 1) for group in groups)
    expected = sum(apart(a, b) for a, b in permutations(pooled, 2)) / (len(pooled) - 1)
    return 1 - seen / expected


@pytest.mark.parametrize(("metric", "value"), [("nominal", 0.743), ("interval", 0.849)])
def test_the_published_example_gives_the_published_values(metric, value):
    units, values = published()
    found = krippendorff_alpha(units, values, [str(unit) for unit in units], metric=metric)
    assert round(found.value, 3) == value
    # The twelfth unit was judged once, so it has no part.
    assert found.n == 11


@pytest.mark.parametrize("metric", ["nominal", "interval"])
def test_it_is_the_definition_whatever_the_number_of_judges(metric):
    generator = np.random.default_rng(3)
    units = generator.integers(0, 20, 70)
    values = generator.integers(0, 4, 70) + 1000.0
    found = krippendorff_alpha(units, values, [str(unit) for unit in units], metric=metric)
    assert found.value == pytest.approx(by_definition(units, values, metric), abs=1e-9)


def test_two_judges_in_both_orders_have_cohens_kappa_but_for_the_correction_of_small_samples():
    generator = np.random.default_rng(1)
    first = generator.integers(0, 2, 40)
    second = np.where(generator.random(40) < 0.8, first, 1 - first)
    units = np.repeat(np.arange(40), 2)
    values = np.stack([first, second], axis=1).ravel().astype(float)
    both = in_both_orders(units, values, [str(unit) for unit in units], mirror=1.0)
    alpha = krippendorff_alpha(*both, metric="nominal").value
    kappa = cohen_kappa_score(np.concatenate([first, 1 - first]), np.concatenate([second, 1 - second]))
    number = len(both[1])
    assert 1 - alpha == pytest.approx((1 - kappa) * (number - 1) / number)


def test_data_that_name_the_better_reply_first_need_both_orders():
    # Nine of ten judges confirm the first reply: they agree, but a share of 0.9 hides that from α without both orders.
    units = np.repeat(np.arange(50), 2)
    values = np.ones(100)
    values[[1, 21, 41, 61, 81]] = 0
    keys = [str(unit) for unit in units]
    assert krippendorff_alpha(units, values, keys, metric="nominal").value < 0.1
    assert krippendorff_alpha(*in_both_orders(units, values, keys, mirror=1.0), metric="nominal").value > 0.75


def test_the_order_of_judgements_and_the_names_of_units_do_not_matter():
    units, values = published()
    keys = [f"prompt {unit // 2}" for unit in units]
    order = np.random.default_rng(0).permutation(len(units))
    one = krippendorff_alpha(units, values, keys, metric="interval")
    other = krippendorff_alpha(units[order] * 7 + 3, values[order], [keys[place] for place in order], metric="interval")
    assert one.value == pytest.approx(other.value)
    assert one.n == other.n


def test_what_cannot_be_known_has_no_value_or_no_interval():
    keys = [str(number) for number in range(30)]
    once = krippendorff_alpha(np.arange(30), np.ones(30), keys, metric="nominal")
    assert math.isnan(once.value)
    assert once.method == "nothing was judged twice"
    twice = [*keys, *keys]
    units = np.tile(np.arange(30), 2)
    equal = krippendorff_alpha(units, np.ones(60), twice, metric="interval")
    assert math.isnan(equal.value)
    agreed = krippendorff_alpha(units, np.tile(np.arange(30) % 2, 2).astype(float), twice, metric="nominal")
    assert agreed.value == 1
    assert math.isnan(agreed.low)
    few = krippendorff_alpha(units % 9, np.arange(60) % 2 + 0.0, [str(unit % 9) for unit in units], metric="nominal")
    assert few.method == "too few prompts (9)"


def test_judgements_that_say_nothing_have_an_alpha_whose_interval_holds_zero():
    generator = np.random.default_rng(5)
    held = []
    for _ in range(150):
        units = np.repeat(np.arange(60), 3)
        values = generator.integers(0, 2, 180).astype(float)
        keys = [str(unit // 2) for unit in units]
        found = krippendorff_alpha(*in_both_orders(units, values, keys, mirror=1.0), metric="nominal")
        held.append(found.low <= 0 <= found.high)
    # Three standard errors below 0.95 of 150 draws.
    assert np.mean(held) >= 0.89


@pytest.mark.parametrize("factor", [2.0**-700, 2.0**900])
def test_the_scale_of_values_does_not_matter_however_large_they_are(factor: float) -> None:
    units = np.repeat(np.arange(30), 2)
    values = np.random.default_rng(0).normal(size=60)
    keys = [str(unit) for unit in units]
    with np.errstate(over="raise"):
        scaled = krippendorff_alpha(units, values * factor, keys, metric="interval")
    assert scaled == krippendorff_alpha(units, values, keys, metric="interval")


def test_a_nominal_alpha_of_two_votes_has_the_interval_of_the_share_of_pairs_that_agree():
    agreed = np.arange(20) < 13
    values = np.stack([np.ones(20), agreed.astype(float)], axis=1).ravel()
    units, keys = np.repeat(np.arange(20), 2), [str(unit) for unit in np.repeat(np.arange(20), 2)]
    found = krippendorff_alpha(*in_both_orders(units, values, keys, mirror=1.0), metric="nominal")
    # With both orders chance alone gives 1 − (1 − α) = 1 − 2 · (80 − 1)/80 · (share that differs).
    share = stats.wilson(13, 20)
    low, high = (1 - 2 * 79 / 80 * (1 - limit) for limit in (share.low, share.high))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.02)
    assert found.method == "score interval, by prompt"


def test_a_nominal_alpha_of_prompts_of_unequal_size_is_known_less_well_than_of_equal_ones():
    """Student's quantile for the effective number of prompts takes the place of the normal one."""
    generator = np.random.default_rng(0)
    widths = []
    for sizes in ([4] * 20, [1] * 18 + [31, 31]):
        prompt = np.repeat(np.arange(20), sizes)
        values = np.repeat(generator.integers(0, 2, 80), 2) + (np.arange(160) % 8 == 0) * 1.0
        keys = [str(one) for one in np.repeat(prompt, 2)]
        both = in_both_orders(np.repeat(np.arange(80), 2), values % 2, keys, mirror=1.0)
        found = krippendorff_alpha(*both, metric="nominal")
        widths.append(found.high - found.low)
    assert widths[1] > 1.5 * widths[0]


@pytest.mark.parametrize(("votes", "agreed"), [(2, 5), (2, 9), (3, 5)])
def test_the_bias_of_leaving_out_prompts_does_not_move_the_interval_of_a_nominal_alpha(votes: int, agreed: int) -> None:
    """The interval is that of the share of the way from the lowest α to 1; by its middle it is seen where that lies."""
    prompts = 10
    values = np.ones((prompts, votes))
    values[:, -1] = np.arange(prompts) < agreed
    units = np.repeat(np.arange(prompts), votes)
    both = in_both_orders(units, values.ravel(), [str(unit) for unit in units], mirror=1.0)
    found = krippendorff_alpha(*both, metric="nominal")
    share = stats.wilson(agreed, prompts)
    # All units that do not agree are as far apart as they can be, so the share of the way is that of the others.
    way = (1 - found.value) / (1 - agreed / prompts)
    low, high = (1 - way * (1 - limit) for limit in (share.low, share.high))
    # Leaving out each prompt, with α computed anew, spreads a little more than the share itself.
    assert (found.low + found.high) / 2 == pytest.approx((low + high) / 2, abs=0.01)
