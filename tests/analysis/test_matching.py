"""Intervals of a proxy's match with gold: what few prompts that lose, and few rows far below 1, can say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import pearsonr, ttest_1samp

from rewardlab.analysis import stats
from rewardlab.analysis.intervals import loss_limits, mean_limits
from rewardlab.analysis.matching import Replies, SliceMatch, match_of, slice_matches, slope_of, spread_of


def replies_of(gold: np.ndarray) -> Replies:
    """Rows of as many replies as there are columns, each of a prompt of its own."""
    rows, replies = gold.shape
    return Replies.of(np.arange(rows, dtype=np.intp).repeat(replies), [str(row) for row in range(rows)], gold.ravel())


@pytest.mark.parametrize(("losing", "known"), [(9, False), (10, True)])
def test_the_share_gained_has_no_interval_where_few_prompts_lose(losing: int, known: bool) -> None:
    gold = np.random.default_rng(0).normal(size=(60, 2))
    scores = gold * np.where(np.arange(60) < losing, -1, 1)[:, None]
    share = match_of(replies_of(gold), scores.ravel()).regret.share
    assert np.isnan(share.low) != known
    assert share.method.startswith("t interval" if known else f"too few prompts with a regret ({losing})")


def test_what_the_share_gained_lacks_to_one_has_the_interval_of_a_loss() -> None:
    gold = np.random.default_rng(1).normal(size=(60, 4))
    scores = gold + np.random.default_rng(2).normal(size=(60, 4))
    share = match_of(replies_of(gold), scores.ravel()).regret.share
    lost = gold.max(1) - gold[np.arange(60), scores.argmax(1)]
    whole = gold.max(1) - gold.mean(1)
    lacking = lost.mean() / whole.mean()
    values = lacking + (lost - lacking * whole) / whole.mean()
    wanted = loss_limits(*(row[None] for row in (values, values**2, np.ones(60))), level=0.95)
    assert (1 - share.low, 1 - share.high) == pytest.approx((wanted.high[0], wanted.low[0]))


def test_the_spread_is_known_less_well_by_the_two_numbers_fitted_and_leaves_out_prompts() -> None:
    gold = np.random.default_rng(3).normal(size=(40, 2))
    scores = gold + np.random.default_rng(4).normal(size=(40, 2))
    spread = match_of(replies_of(gold), scores.ravel()).spread
    ours, theirs = (np.square(one[:, 0] - one[:, 1]) for one in (scores, gold))
    logs = [np.log((one.sum() - one) / one.sum()) for one in (ours, theirs)]
    moved = 39 * (logs[1] - logs[0]) / 2 * np.sqrt(39 / 37)
    moved -= moved.mean()
    wanted = mean_limits(*(row[None] for row in (moved, moved**2, np.ones(40))), level=0.95)
    assert np.log([spread.low, spread.high]) - np.log(spread.value) == pytest.approx([wanted.low[0], wanted.high[0]])


def test_pearsons_in_a_row_may_have_a_tail_that_its_rows_do_not_show() -> None:
    gold = np.random.default_rng(5).normal(size=(15, 4))
    scores = gold + 0.15 * np.random.default_rng(7).normal(size=(15, 4))
    found = match_of(replies_of(gold), scores.ravel()).within["Pearson"]
    losses = np.array([1 - pearsonr(*row).statistic for row in zip(scores, gold, strict=True)])
    wanted, plain = stats.mean_loss(losses, tail=2.5), stats.mean_loss(losses)
    assert (1 - found.high, 1 - found.low) == pytest.approx((wanted.low, wanted.high))
    assert wanted.high > plain.high


@pytest.mark.parametrize("rest", [0.0, 1e-7], ids=["all others tied", "all others nearly tied"])
def test_a_slope_that_one_prompt_decides_has_no_interval(rest: float) -> None:
    generator = np.random.default_rng(0)
    prompt = np.arange(30).repeat(6)
    gold = rest * generator.normal(size=prompt.size)
    gold[:6] = generator.normal(size=6)
    found = slope_of(gold + 0.1 * generator.normal(size=prompt.size), gold, prompt)
    assert np.isfinite(found.value)
    assert np.isnan(found.low)
    assert found.n == (30 if rest else 1)
    gold[:90] = generator.normal(size=90)  # of fifteen prompts, the others tied
    gold[90:] = 0.0
    found = slope_of(gold + 0.1 * generator.normal(size=prompt.size), gold, prompt)
    assert found.n == 15
    assert found.low < 1 < found.high


@pytest.mark.parametrize("of_proxy", [True, False], ids=["proxy", "gold"])
def test_a_spread_that_one_prompt_decides_has_no_interval(of_proxy: bool) -> None:
    generator = np.random.default_rng(0)
    prompt = np.arange(40).repeat(2)
    plain, one = generator.normal(size=(2, prompt.size))
    one[2:] *= 1e-9
    margins = (one, plain) if of_proxy else (plain, one)
    found = spread_of(*margins, prompt)
    assert found.value > 0
    assert np.isnan(found.low)
    assert found.method == "one prompt decides it"
    assert spread_of(plain, plain[::-1], prompt).low > 0


def one_slice(inside: np.ndarray, outside: np.ndarray, prompts: list[str] | None = None) -> SliceMatch:
    """The slice `in` of pairs whose scores are ordered as gold's where the outcome is 1."""
    outcome = np.concatenate([inside, outside])
    gold = np.tile([1.0, 0.0], (outcome.size, 1))
    scores = np.where(outcome[:, None] == 1, gold, 1 - gold)
    keys = prompts or [str(row) for row in range(outcome.size)]
    replies = Replies.of(np.arange(outcome.size, dtype=np.intp).repeat(2), keys, gold.ravel())
    columns = {"column": ["in"] * inside.size + ["out"] * outside.size}
    return slice_matches(replies, scores.ravel(), columns)[0]


def test_a_small_slice_that_is_all_right_by_chance_is_not_apart() -> None:
    generator = np.random.default_rng(0)
    outside = (np.arange(1000) < 900).astype(float)
    drawn = [one_slice((generator.random(10) < 0.9).astype(float), outside).p for _ in range(200)]
    assert np.mean(np.array(drawn) < 0.05) < 0.1
    right = one_slice(np.ones(10), outside)
    assert right.p > 0.05
    assert right.apart.low < 0 < right.apart.high


def test_a_slice_that_is_all_wrong_is_apart_from_others_that_are_all_right() -> None:
    found = one_slice(np.zeros(12), np.ones(30))
    assert found.apart.value == -1
    assert found.apart.high < 0
    assert found.p < 1e-6
    assert one_slice(np.ones(12), np.ones(30)).p == 1


@pytest.mark.parametrize("shared", [False, True], ids=["own prompts", "shared prompts"])
def test_p_of_a_slice_and_its_interval_say_the_same(shared: bool) -> None:
    generator = np.random.default_rng(3)
    told = set()
    for _ in range(60):
        inside, outside = ((generator.random(size) < chance).astype(float) for size, chance in ((20, 0.7), (60, 0.92)))
        keys = [str(row % 40) for row in range(80)] if shared else None
        found = one_slice(inside, outside, keys)
        is_apart = not found.apart.low <= 0 <= found.apart.high
        assert (found.p < 0.05) == is_apart
        told.add(is_apart)
    assert told == {True, False}


def test_a_slice_of_the_same_prompts_that_errs_where_others_do_not_is_known_by_its_differences() -> None:
    """One pair of each prompt on either side, mostly of opposite outcomes: Student's interval of their differences."""
    inside = (np.arange(40) % 2 == 0).astype(float)
    outside = 1 - inside
    outside[:9], inside[30:36] = 1, 1
    found = one_slice(inside, outside, [str(row % 40) for row in range(80)])
    wanted = ttest_1samp(inside - outside, 0).confidence_interval(0.95)
    assert (found.apart.low, found.apart.high) == pytest.approx((wanted.low, wanted.high))
    alike = one_slice(inside, inside, [str(row % 40) for row in range(80)]).apart
    side = stats.mean_share(inside)
    assert alike.high == pytest.approx(math.hypot(side.high - side.value, side.value - side.low)), "the wider of both"
