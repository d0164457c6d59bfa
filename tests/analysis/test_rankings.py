"""Rankings of more than two replies: scikit-learn, scipy and counting by hand as oracles."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats as oracle
from sklearn.metrics import ndcg_score

from rewardlab.analysis import stats
from rewardlab.analysis.kwise import KWise, _judge, bounded_mean, kendall_tau_b, kwise, ndcg, win_shares
from rewardlab.analysis.score_table import score_table
from rewardlab.core.types import Comparison, ScoreRow
from score_rows import ranked_rows, score_row

groups = st.integers(3, 6).flatmap(
    lambda size: st.tuples(*(arrays(np.float64, (4, size), elements=st.sampled_from([0.0, 1.0, 2.0, 3.5]))
                             for _ in range(2)))
)  # fmt: skip


def judged(rows: list[ScoreRow], **other) -> KWise:
    return kwise(score_table(rows), **other)


@pytest.mark.slow
@given(group=groups)
@settings(max_examples=60)
def test_tau_b_is_that_of_scipy_and_0_for_scores_that_are_all_equal(group: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = group
    for own, score, reference in zip(kendall_tau_b(x, y), x, y, strict=True):
        truth = oracle.kendalltau(score, reference).statistic if np.ptp(score) and np.ptp(reference) else 0.0
        assert own == pytest.approx(truth, abs=1e-12)


@pytest.mark.slow
@given(group=groups)
@settings(max_examples=60)
def test_ndcg_is_that_of_scikit_learn_with_ties(group: tuple[np.ndarray, np.ndarray]) -> None:
    scores, gains = group[0], group[1] + 0.5
    for own, score, gain in zip(ndcg(scores, gains), scores, gains, strict=True):
        assert own == pytest.approx(ndcg_score(gain[None], score[None]), abs=1e-12)


def test_the_reference_of_a_full_ranking_falls_from_one_to_nothing() -> None:
    rows = ranked_rows([[0.0, 0.0, 0.0, 0.0]])
    assert win_shares(rows).tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0])


def test_picks_and_regret_by_hand() -> None:
    found = judged(ranked_rows([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [2.0, 2.0, 1.0], [0.0, 0.0, 0.0]])).estimates
    assert found["eval_best_of_k"].value == pytest.approx((1 + 0 + 1 / 2 + 1 / 3) / 4)
    assert found["eval_regret"].value == pytest.approx((0 + 1 / 2 + 1 / 4 + 1 / 2) / 4)
    assert found["eval_kendall_tau"].value == pytest.approx((1 - 1 / 3 + 2 / math.sqrt(2 * 3) + 0) / 4)
    assert found["eval_kwise_spearman"].value == pytest.approx((1 - 0.5 + math.sqrt(3) / 2 + 0) / 4)
    # Gains 1, ½ and 0 at the discounts 1, 1/log₂3 and ½: in their order, in the order 2, 3, 1, with the first two
    # tied, and all three tied.
    second = 1 / math.log2(3)
    best = 1 + second / 2
    tied = (1.5 * (1 + second) / 2, 1.5 * (1 + second + 0.5) / 3)
    assert found["eval_ndcg"].value == pytest.approx((1 + (0.5 + 0.5) / best + tied[0] / best + tied[1] / best) / 4)


def test_regrets_of_fewer_than_ten_prompts_that_lose_have_no_interval() -> None:
    generator = np.random.default_rng(0)
    gold_values = np.sort(generator.normal(size=(40, 4)))
    names = ("eval_regret", "eval_gold_regret")
    for losing in (0, 9, 10):
        scores = gold_values.copy()
        scores[:losing, :2] += 9.0
        rows = [score_row(group, reply, float(scores[group, reply])) for group in range(40) for reply in range(4)]
        gold = {
            (row.source, row.preference_id, row.reply): float(v) for row, v in zip(rows, gold_values.flat, strict=True)
        }
        found = judged(rows, gold=gold).estimates
        # Where none loses, a share of a regret of at most 1 has an interval; in units of gold it would have no width.
        known = {"eval_regret": losing in (0, 10), "eval_gold_regret": losing == 10}
        assert {name: not math.isnan(found[name].low) for name in names} == known
        if losing == 9:
            assert found["eval_gold_regret"].method == "too few prompts with a regret (9)"
    one_chosen = judged(ranked_rows([[3.0, 2.0, 1.0]] * 35 + [[1.0, 2.0, 3.0]] * 5)).estimates["eval_regret"]
    assert one_chosen.low < one_chosen.value < one_chosen.high, "lost or not, as wins"


def test_means_near_their_highest_have_the_interval_of_what_is_lacking() -> None:
    generator = np.random.default_rng(0)
    values = 1 - np.where(generator.random(60) < 0.5, 0.0, 0.1 * generator.exponential(size=60))
    keys = [f"{number // 2}" for number in range(60)]
    found, lost = bounded_mean(values, keys), stats.mean_loss(1 - values, keys)
    assert (found.value, found.low, found.high) == pytest.approx((1 - lost.value, 1 - lost.high, 1 - lost.low))
    assert found.method == "t interval, corrected for skewness, by prompt"
    assert found.high <= 1
    # Where fewer than ten prompts lack anything, how much is hardly known: the score interval stands in.
    values[18:] = 1.0
    few = bounded_mean(values, keys)
    assert few.method == "score interval, by prompt"
    same = bounded_mean(np.full(60, 0.4), keys)
    assert same.low < 0.4 < same.high, "nothing varies, and it has a width"
    signs = bounded_mean(np.where(values < 1, -1.0, 1.0), keys)
    share = stats.mean_share(np.where(values < 1, 0.0, 1.0), keys)
    assert (signs.low, signs.high) == pytest.approx((2 * share.low - 1, 2 * share.high - 1))


def test_a_mean_ends_where_the_same_scores_in_the_best_order_do() -> None:
    """One chosen reply among three equal ones: τ-b of strict scores is at most √½, Spearman's at most √0.6."""
    rows = [
        score_row(group, reply, 4.0 - reply, comparisons=() if reply else chosen)
        for chosen in [tuple(Comparison(first=0, second=other) for other in (1, 2, 3))]
        for group in range(40)
        for reply in range(4)
    ]
    found = judged(rows).estimates
    for name, highest in (("eval_kendall_tau", math.sqrt(0.5)), ("eval_kwise_spearman", math.sqrt(0.6))):
        own = found[name]
        assert own.value == own.high == pytest.approx(highest)
        wilson = stats.wilson(40, 40)
        assert own.low == pytest.approx(highest * (2 * wilson.low - 1))
    lowest = judged([replace(row, score=-row.score) for row in rows]).estimates["eval_kendall_tau"]
    assert lowest.value == lowest.low == pytest.approx(-math.sqrt(0.5))


def test_gold_scores_take_the_place_of_comparisons() -> None:
    generator = np.random.default_rng(0)
    scores = generator.normal(size=(40, 4))
    rows = [score_row(group, reply, float(scores[group, reply])) for group in range(40) for reply in range(4)]
    gold_values = scores + 0.5 * generator.normal(size=scores.shape)
    gold = {("made-up", f"row-{g}", r): float(gold_values[g, r]) for g, r in itertools.product(range(40), range(4))}
    found = judged(rows, gold=gold)
    taus = [oracle.kendalltau(a, b).statistic for a, b in zip(scores, gold_values, strict=True)]
    assert found.estimates["eval_kendall_tau"].value == pytest.approx(np.mean(taus))
    assert found.estimates["eval_gold_spearman"].value == pytest.approx(
        oracle.spearmanr(scores.ravel(), gold_values.ravel()).statistic
    )
    lost = gold_values.max(1) - gold_values[np.arange(40), scores.argmax(1)]
    assert found.estimates["eval_gold_regret"].value == pytest.approx(lost.mean())
    assert (found.num_groups, found.num_gold) == (40, 160)
    assert judged(rows).num_unusable == 40


def test_groups_of_other_sizes_and_groups_that_cannot_be_judged_are_counted() -> None:
    rows = ranked_rows([[3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0], [1.0, 0.0], [math.nan, 1.0, 0.0]])
    tied = tuple(Comparison(first=0, second=other, label=0.5) for other in (1, 2))
    rows += [score_row(9, reply, float(reply), tied if reply == 0 else ()) for reply in range(3)]
    found = judged(rows)
    assert (found.num_groups, found.num_unusable) == (2, 2)
    assert found.estimates["eval_kendall_tau"].value == 1


def test_replies_that_nobody_compared_are_left_out_of_their_group() -> None:
    judged_ones = tuple(Comparison(first=0, second=other) for other in (1, 2))
    rows = [score_row(0, reply, float(-reply), judged_ones if reply == 0 else ()) for reply in range(4)]
    rows[3] = score_row(0, 3, 99.0)
    assert judged(rows).estimates["eval_best_of_k"].value == 1


def test_groups_of_one_prompt_count_together() -> None:
    scores = np.random.default_rng(0).normal(size=(60, 3)).tolist()
    alone = judged(ranked_rows(scores)).estimates["eval_regret"]
    shared = judged(
        [row for g, s in enumerate(scores) for row in
         [score_row(g, r.reply, r.score, r.comparisons, prompt_key=f"p{g // 4}") for r in ranked_rows([s])]]
    ).estimates["eval_regret"]  # fmt: skip
    assert (alone.n, shared.n) == (60, 15)
    assert shared.value == pytest.approx(alone.value)


def test_groups_of_thousands_of_replies_are_sorted_and_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(2)
    scores, reference = (generator.integers(0, 12, size=(6, 30)).astype(np.float64) for _ in range(2))
    scores[5] = 1.0
    pairwise = _judge(scores, reference, True)
    monkeypatch.setattr("rewardlab.analysis.kwise._CHUNK_VALUES", 30**2 - 1)
    by_sorting = _judge(scores, reference, True)
    for name, found in pairwise.items():
        assert by_sorting[name] == pytest.approx(found, abs=1e-12), name


def test_a_large_group_needs_memory_for_its_replies_and_not_for_their_pairs() -> None:
    scores = np.random.default_rng(0).normal(size=(1, 3000))
    tracemalloc.start()
    found = _judge(scores, scores, True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3000**2, "a byte a pair"
    assert found["tau"] == pytest.approx([1.0])
