"""Laws of the metrics: ties, orientation, numbers that are not finite, and sums of parts."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import asdict, replace
from functools import reduce
from itertools import pairwise
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss

from rewardlab.analysis.judgement import judge_rows
from rewardlab.analysis.metrics import (
    ALIASES,
    EARLIER_COLUMNS,
    METRICS,
    by_source,
    current_columns,
    evaluate,
    oriented,
    sums,
)
from rewardlab.core.errors import DataError
from rewardlab.core.types import Comparison, Sums, join_comparisons
from rewardlab.training.monitoring.records import COLUMNS
from score_rows import Case, pair_rows, score_row

scores = st.one_of(st.floats(-20, 20), st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf]))
labels = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0]))
cases = st.lists(st.tuples(scores, scores, labels), max_size=30)


def as_numbers(value: Sums) -> list[float]:
    return [value.loss, value.weight, value.nll, value.correct, value.margin] + [
        float(count)
        for count in (value.comparisons, value.decided, value.score_ties, value.label_ties, value.non_finite)
    ]


def test_a_score_tie_counts_one_half() -> None:
    rows = pair_rows([(1.0, 1.0, 1.0), (1.0, 1.0, 0.0), (2.0, 1.0, 1.0)])
    assert sums(rows, beta=1).correct == 2.0
    assert sums(rows, beta=1).score_ties == 2
    assert evaluate(rows, beta=1).estimates["eval_accuracy"].value == pytest.approx(2 / 3)


def test_a_label_tie_is_left_out_of_accuracy_and_margin_and_counted() -> None:
    result = sums(pair_rows([(1.0, 0.0, 1.0), (9.0, 0.0, 0.5), (0.0, 0.0, 0.5)]), beta=1)
    assert (result.accuracy, result.mean_margin) == (1.0, 1.0)
    assert (result.comparisons, result.decided, result.label_ties, result.score_ties) == (3, 1, 2, 0)
    assert result.nll > 9 / 2  # but the loss judges them


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_counted_and_never_compared(bad: float) -> None:
    good = [(1.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
    result = sums(pair_rows([*good, (bad, 0.0, 1.0), (0.0, bad, 0.5), (bad, bad, 0.0)]), beta=1)
    assert result == replace(sums(pair_rows(good), beta=1), comparisons=5, non_finite=3)
    estimates = evaluate(pair_rows([*good, (bad, 0.0, 1.0)]), beta=1).estimates
    assert [estimate.n for estimate in estimates.values()] == [2] * len(METRICS)
    assert estimates["eval_accuracy"].value == 0.5


@given(pairs=cases)
def test_every_comparison_is_decided_tied_or_not_finite(pairs: list[Case]) -> None:
    result = sums(pair_rows(pairs), beta=0.7)
    assert result.comparisons == len(pairs) == result.decided + result.label_ties + result.non_finite
    assert result.weight == result.comparisons - result.non_finite
    assert result.loss == result.nll
    assert 0 <= result.correct <= result.decided


@pytest.mark.slow
@given(pairs=cases)
def test_swapping_the_order_of_comparisons_changes_no_metric(pairs: list[Case]) -> None:
    # A label within rounding of a tie is a tie after 1 − y and was none before; it is not about orientation.
    pairs = [(first, second, round(label, 6)) for first, second, label in pairs]
    once, twice = (evaluate(pair_rows(pairs, swapped=swapped), beta=0.7) for swapped in (False, True))
    assert as_numbers(twice.sums) == pytest.approx(as_numbers(once.sums))
    for name, estimate in once.estimates.items():
        other = twice.estimates[name]
        assert (other.n, other.method) == (estimate.n, estimate.method)
        for side in ("value", "low", "high"):
            assert getattr(other, side) == pytest.approx(getattr(estimate, side), nan_ok=True, abs=1e-9), (name, side)


@pytest.mark.slow
@given(pairs=cases, cuts=st.lists(st.integers(0, 30), max_size=4))
def test_the_sums_of_parts_are_the_sums_of_the_whole(pairs: list[Case], cuts: list[int]) -> None:
    rows = pair_rows(pairs)
    edges = [0, *sorted(cuts), len(pairs)]
    parts = [sums(rows[2 * start : 2 * end], beta=0.7) for start, end in pairwise(edges)]
    whole = sums(rows[: 2 * edges[-2]], beta=0.7) + sums(rows[2 * edges[-2] :], beta=0.7)
    assert as_numbers(reduce(add, parts)) == pytest.approx(as_numbers(whole))
    assert as_numbers(whole) == pytest.approx(as_numbers(sums(rows, beta=0.7)))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5])
def test_accuracy_is_exact_for_any_batch_size(batch_size: int) -> None:
    """Four of five are right: a mean of the means of batches of four would say 0.5."""
    rows = pair_rows([(1.0, 0.0, 1.0)] * 4 + [(0.0, 1.0, 1.0)])
    batches = [rows[start : start + 2 * batch_size] for start in range(0, len(rows), 2 * batch_size)]
    assert reduce(add, (sums(batch, beta=1) for batch in batches)).accuracy == 0.8


@pytest.mark.slow
@given(pairs=st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.sampled_from([0.0, 1.0])), min_size=1))
def test_accuracy_and_loss_are_those_of_scikit_learn(pairs: list[Case]) -> None:
    pairs = [pair for pair in pairs if pair[0] != pair[1]] or [(1.0, 0.0, 0.0)]
    first, second, label = (np.array(column) for column in zip(*pairs, strict=True))
    result = evaluate(pair_rows(pairs), beta=0.7)
    probability = 1 / (1 + np.exp(-0.7 * (first - second)))
    assert result.estimates["eval_accuracy"].value == pytest.approx(accuracy_score(label, first > second))
    assert result.estimates["eval_loss"].value == pytest.approx(log_loss(label, probability, labels=[0, 1]))


@settings(max_examples=50)
@given(pairs=cases)
def test_estimates_and_sums_agree(pairs: list[Case]) -> None:
    result = evaluate(pair_rows(pairs), beta=0.7)
    assert set(result.estimates) == set(METRICS)
    for name, value in (
        ("eval_accuracy", result.sums.accuracy),
        ("eval_loss", result.sums.mean_nll),
        ("eval_margin", result.sums.mean_margin),
    ):
        assert result.estimates[name].value == pytest.approx(value, nan_ok=True)


@pytest.mark.slow
@settings(max_examples=25)
@given(pairs=cases)
def test_what_judging_gives_too_is_the_same(pairs: list[Case]) -> None:
    rows = pair_rows(pairs)
    if not any(math.isfinite(row.score) for row in rows):
        return
    judged = judge_rows(rows, beta=0.7)
    for name, estimate in evaluate(rows, beta=0.7).estimates.items():
        own, theirs = asdict(estimate), asdict(judged[name])
        assert {key: value for key, value in own.items() if key != "method"} == pytest.approx(
            {key: value for key, value in theirs.items() if key != "method"}, nan_ok=True, rel=1e-9, abs=1e-12
        ), name
        assert own["method"] == theirs["method"]


def test_the_loss_stays_finite_where_a_probability_rounds_to_zero() -> None:
    result = sums(pair_rows([(-1e4, 0.0, 1.0), (1e4, 0.0, 1.0), (0.0, 1e4, 0.25)]), beta=1)
    assert result.nll == pytest.approx(1e4 + 0.0 + 0.25 * 1e4)


def test_beta_scales_the_loss_and_not_the_margin() -> None:
    rows = pair_rows([(1.0, 0.0, 1.0), (3.0, 1.0, 0.0)])
    once, twice = sums(rows, beta=1), sums(rows, beta=2)
    assert (once.margin, twice.margin) == (-1.0, -1.0)
    assert twice.nll == pytest.approx(np.log1p(np.exp([-2.0, 4.0])).sum())


def test_calibration_is_judged_at_the_probability_that_beta_gives() -> None:
    rows = pair_rows([(2.0, 0.0, 1.0), (2.0, 0.0, 0.0)] * 10)
    for beta in (1.0, 2.0):
        expected = 1 / (1 + math.exp(-2 * beta)) - 0.5
        assert evaluate(rows, beta=beta).estimates["eval_ece"].value == pytest.approx(expected)


def test_weights_and_margins_of_the_data_do_not_enter_the_metrics() -> None:
    plain, weighted = (
        [score_row(0, 0, 1.0, (Comparison(first=0, second=1, weight=weight, margin=margin),)), score_row(0, 1, 0.0)]
        for weight, margin in ((1.0, 0.0), (5.0, 2.0))
    )
    assert repr(evaluate(weighted, beta=1)) == repr(evaluate(plain, beta=1)) != repr(evaluate([], beta=1))


@pytest.mark.slow
@given(pairs=cases)
def test_orientation_makes_every_label_at_least_one_half(pairs: list[Case]) -> None:
    columns = oriented(join_comparisons(pair_rows(pairs)))
    for (first, second, label), turned, difference in zip(pairs, columns.label, columns.difference, strict=True):
        assert turned == max(label, 1 - label)
        if math.isfinite(first) and math.isfinite(second):
            assert difference == (first - second if label >= 0.5 else second - first)
        else:
            assert not math.isfinite(difference)


def test_repeated_prompts_are_the_unit_of_every_interval() -> None:
    generator = np.random.default_rng(0)
    rows = []
    for number in range(120):
        judged = Comparison(first=0, second=1)
        key = f"prompt-{number % 60}"
        rows += [
            score_row(number, 0, generator.normal(1), (judged,), prompt_key=key),
            score_row(number, 1, 0.0, prompt_key=key),
        ]
    for estimate in evaluate(rows, beta=1).estimates.values():
        assert estimate.n == 60
        assert "by prompt" in estimate.method
    assert evaluate(rows, beta=1, seed=0).estimates != evaluate(rows, beta=1, seed=1).estimates
    assert evaluate(rows, beta=1, seed=0) == evaluate(rows, beta=1, seed=0)


def test_comparisons_of_one_preference_with_several_replies_share_its_prompt() -> None:
    judgements = tuple(Comparison(first=0, second=second) for second in (1, 2, 3))
    rows = [score_row(0, 0, 3.0, judgements), *(score_row(0, reply, float(reply)) for reply in (1, 2, 3))]
    estimate = evaluate(rows, beta=1).estimates["eval_accuracy"]
    assert (estimate.value, estimate.n, estimate.method) == (pytest.approx(2.5 / 3), 1, "too few prompts (1)")


def test_sources_are_evaluated_apart_and_add_up() -> None:
    one = pair_rows([(1.0, 0.0, 1.0)] * 3, source="one")
    two = pair_rows([(0.0, 1.0, 1.0)] * 2 + [(math.nan, 1.0, 1.0)], source="two")
    apart = by_source([*two, *one], beta=1)
    assert list(apart) == ["two", "one"]
    assert (apart["one"].sums.accuracy, apart["two"].sums.accuracy) == (1.0, 0.0)
    added = apart["one"].sums + apart["two"].sums
    assert as_numbers(added) == pytest.approx(as_numbers(sums([*one, *two], beta=1)))
    assert repr(apart["two"]) == repr(evaluate(two, beta=1))


def test_no_rows_are_no_data_and_no_error() -> None:
    result = evaluate([], beta=1)
    assert result.sums == Sums()
    assert {estimate.method for estimate in result.estimates.values()} == {"no data"}


def test_every_alias_leads_to_a_metric_and_no_metric_is_an_alias() -> None:
    assert set(ALIASES.values()) == set(METRICS)
    assert not set(ALIASES) & set(METRICS)


def test_columns_of_earlier_versions_get_the_names_of_today() -> None:
    row = {
        "step": "4",
        "eval_acc": "0.5",
        "eval_acc_low": "0.4",
        "train_eval_acc_high": "",
        "gap_acc": "0.1",
        "lr": "1",
    }
    names = ["step", "eval_accuracy", "eval_accuracy_low", "train_eval_accuracy_high", "gap_accuracy", "lr"]
    assert list(current_columns(row)) == names
    assert list(current_columns(row).values()) == list(row.values())
    assert set(EARLIER_COLUMNS.values()) <= {*COLUMNS, "train_accuracy_low", "train_accuracy_high"}


def test_a_reply_that_has_two_rows_is_refused() -> None:
    rows = pair_rows([(1.0, 0.0, 1.0)])
    with pytest.raises(DataError, match="hold a reply twice"):
        evaluate([*rows, *rows], beta=1.0)


def test_one_prompt_with_a_long_key_does_not_make_all_keys_as_long() -> None:
    rows = pair_rows([(1.0, float(number % 3), 1.0) for number in range(1500)])
    longer = {key: f"{key} {'and so on ' * 5000}" for key in (rows[0].prompt_key, rows[-1].prompt_key)}
    long = [replace(row, prompt_key=longer.get(row.prompt_key, row.prompt_key)) for row in rows]
    tracemalloc.start()
    try:
        found = evaluate(long, beta=1.0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.estimates == evaluate(rows, beta=1.0).estimates
    assert most < 100 * 2**20, "an array of such keys takes 300 MB"


def test_scores_of_0_and_1_that_are_all_right_say_nothing_of_how_far_loss_and_margin_may_be_off() -> None:
    rows = pair_rows([(1.0, 0.0, 1.0)] * 40)
    for found in (evaluate(rows, beta=1.0).estimates, judge_rows(rows, beta=1.0, draws=5).estimates):
        for name in ("eval_loss", "eval_margin"):
            assert (math.isnan(found[name].low), found[name].method) == (True, "no variation")
        assert found["eval_accuracy"].low < 1
    assert found["eval_brier"].method == found["eval_chosen_mean"].method == "no variation"
