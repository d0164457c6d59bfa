"""Intervals and tests of suites, against slow and obvious versions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm, permutation_test, t

from rewardlab.analysis.combined import Clustered
from rewardlab.analysis.multiple import holm
from rewardlab.analysis.suites import draws
from rewardlab.analysis.suites.draws import Resampled, difference, estimate, judge, significance
from rewardlab.analysis.suites.judging import judge_suite
from rewardlab.analysis.suites.lengths import BASELINES, FITTED, LONGEST, SHORTEST, length_scores
from rewardlab.analysis.suites.outcomes import Outcome
from rewardlab.analysis.suites.registry import SUITES
from rewardlab.core.errors import DataError
from rewardlab.core.suites import SuiteItem, all_pairs
from rewardlab.report.suites import suite_report


def item(id: str, subset: str, pairs: tuple[tuple[int, int], ...], lengths: tuple[int, ...], cluster: str) -> SuiteItem:
    replies = tuple("x" * length for length in lengths)
    return SuiteItem(id=id, subset=subset, cluster=cluster, prompt=(), replies=replies, pairs=pairs)


def suite_2(count: int, *, seed: int = 0) -> tuple[list[SuiteItem], dict[str, list[np.ndarray]]]:
    """RewardBench 2 in small, with Ties, and two scorers that are not equally good."""
    draw = np.random.default_rng(seed)
    items = [
        item(f"{subset}{n}", subset, all_pairs(1, 3), (3, 1, 2, 4), f"{subset}{n}")
        for subset in ("Focus", "Math")
        for n in range(count)
    ]
    items += [
        item(f"{kind}:{n}", "Ties", all_pairs(correct, 2), (1,) * (correct + 2), f"ties {n}")
        for kind, correct in (("ref", 1), ("tied", 3))
        for n in range(count)
    ]
    scores = {
        name: [
            np.round(draw.normal(size=len(one.replies)) + strength * np.isin(range(len(one.replies)), one.better), 1)
            for one in items
        ]
        for name, strength in (("own", 2.0), ("other", 0.7))
    }
    return items, scores


def outcomes(items: list[SuiteItem], scores: dict[str, list[np.ndarray]]) -> dict[str, Outcome]:
    return {name: SUITES["rewardbench2"].rule(items, own, False) for name, own in scores.items()}


def test_a_draw_gives_what_the_rule_gives_on_the_drawn_prompts() -> None:
    """Whole weights: the items of a cluster are repeated so often, and the rule is applied to that suite."""
    items, scores = suite_2(6)
    found = outcomes(items, scores)
    resampled = Resampled.of(items, found["own"], seed=0)
    counts_C = np.random.default_rng(3).integers(0, 4, resampled.num_clusters)
    sums_CS, sizes_CS = resampled.sums(found["own"])
    shares = (counts_C @ sums_CS) / (counts_C @ sizes_CS)

    repeated, again = [], []
    for number, (one, own) in enumerate(zip(items, scores["own"], strict=True)):
        for copy in range(counts_C[resampled.clusters_I[number]]):
            # A copy of a prompt of Ties is another prompt, with both of its rows.
            kind, colon, prompt = one.id.partition(":")
            id = f"{kind}:{prompt}{copy + 1}00" if colon else f"{one.id} copy {copy}"
            repeated.append(
                SuiteItem(id=id, subset=one.subset, cluster=id, prompt=(), replies=one.replies, pairs=one.pairs)
            )
            again.append(own)
    expected = SUITES["rewardbench2"].rule(repeated, again, False)
    for row in found["own"].rows:
        weights = [row.weights.get(name, 0.0) for name in found["own"].shares]
        assert shares @ weights == pytest.approx(expected.value(row), abs=1e-12)


def test_every_draw_keeps_the_weight_of_each_stratum_and_brings_rows_of_a_prompt_together() -> None:
    items, scores = suite_2(6)
    found = outcomes(items, scores)["own"]
    resampled = Resampled.of(items, found, seed=0)
    assert sorted(len(stratum) for stratum in resampled.strata) == [6, 6, 6]
    (block,) = list(resampled.weights(50))
    for stratum in resampled.strata:
        assert block[:, stratum].sum(1) == pytest.approx(6.0)
        assert block[:, stratum].var() > 0
    assert resampled.num_clusters == 18, "ref and tied of a prompt are one cluster"


def test_the_spread_of_the_draws_is_that_of_a_mean() -> None:
    """The variance of the bootstrap of a mean of n is s²/n with s² = Σ (x − x̄)²/(n − 1), also for small n."""
    values = np.array([0.0, 0.0, 1.0, 1.0, 1.0])
    items = [item(str(n), "honest", all_pairs(1, 1), (1, 1), str(n)) for n in range(5)]
    outcome = SUITES["hhh"].rule(items, [np.array([value, 0.5]) for value in values], False)
    judged = judge({"own": outcome}, Resampled.of(items, outcome, seed=0), num_draws=40_000)["own"]
    assert judged.draws_RS[:, 0].var() == pytest.approx(values.var(ddof=1) / 5, rel=0.05)


def test_blocks_of_draws_change_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    items, scores = suite_2(12)
    found = outcomes(items, scores)

    def limits() -> list[tuple[float, float]]:
        resampled = Resampled.of(items, found["own"], seed=0)
        judged = judge(found, resampled, num_draws=50)
        several = [estimate(judged["own"], row, resampled) for row in found["own"].rows]
        return [(one.low, one.high) for one in several]

    whole = limits()
    monkeypatch.setattr(draws, "BLOCK_ENTRIES", 36 * 50 + 1)
    assert limits() == whole


def test_a_perfect_suite_has_an_interval_with_a_width_and_none_beyond_what_is_possible() -> None:
    items, scores = suite_2(20)
    perfect = [
        np.where(np.isin(range(len(own)), one.better), 5.0, 0.0) for one, own in zip(items, scores["own"], strict=True)
    ]
    result = judge_suite("rewardbench2", items, perfect)
    by_name = {row.name: row.score for row in result.rows}
    assert by_name["Focus"].value == by_name["Focus"].high == 1.0
    assert by_name["Focus"].low == pytest.approx(20 / (20 + 1.959964**2), abs=1e-6), "Wilson's lower limit"
    assert by_name["Ties"].value == pytest.approx(1.01)
    assert by_name["Ties"].high == pytest.approx(1.01)
    assert by_name["Ties"].low < 0.97
    assert by_name["RewardBench 2"].low < 1.0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_subsets_of_a_single_row_leave_every_other_row_its_interval(count: int) -> None:
    single = ("hep-go", "hep-js", "hep-rust")[:count]
    subsets = ["hep-cpp"] * 40 + list(single)
    items = [item(str(n), subset, all_pairs(1, 1), (1, 2), str(n)) for n, subset in enumerate(subsets)]
    draw = np.random.default_rng(0)
    result = judge_suite("rewardbench", items, [draw.normal(size=2) for _ in items], num_draws=200)
    by_name = {row.name: row.score for row in result.rows}
    for name in single:
        assert by_name[name].method == "too few prompts (1)"
    for name in ("hep-cpp", "Reasoning", "RewardBench"):
        assert by_name[name].low < by_name[name].value < by_name[name].high
    assert by_name["hep-cpp"].high - by_name["hep-cpp"].low < 0.4
    width = by_name["Reasoning"].high - by_name["Reasoning"].low
    assert width > 0.4 * count / (count + 1), "of the subset of one row nothing is known"


def test_a_row_without_a_finite_draw_has_no_interval() -> None:
    items = [item(str(n), "honest", all_pairs(1, 1), (1, 2), str(n)) for n in range(12)]
    outcome = SUITES["hhh"].rule(items, [np.array([1.0, 0.0])] * 12, False)
    resampled = Resampled.of(items, outcome, seed=0)
    judged = judge({"own": outcome}, resampled, num_draws=5)["own"]
    found = estimate(replace(judged, draws_RS=np.full_like(judged.draws_RS, np.nan)), outcome.rows[0], resampled)
    assert (found.value, math.isnan(found.low), math.isnan(found.high)) == (1.0, True, True)
    assert found.method == "no interval: no draw has a value"


def test_shares_of_the_same_prompts_are_not_taken_for_independent() -> None:
    """Twelve prompts all right: the three difficulties of RM-Bench together know no more than one of them."""
    items = [item(str(n), "chat", all_pairs(3, 3), (1,) * 6, str(n)) for n in range(12)]
    result = judge_suite("rm-bench", items, [np.array([1.0, 1, 1, 0, 0, 0])] * 12, num_draws=50)
    wilson = 12 / (12 + 1.959964**2)
    for row in result.rows:
        assert row.score.low == pytest.approx(wilson, abs=1e-6), row.name
    items, scores = suite_2(12)
    perfect = [
        np.where(np.isin(range(len(own)), one.better), 5.0, 0.0) for one, own in zip(items, scores["own"], strict=True)
    ]
    ties = {row.name: row.score for row in judge_suite("rewardbench2", items, perfect, num_draws=50).rows}["Ties"]
    assert ties.low == pytest.approx(1.0 * wilson + 0.01 * (2 * wilson - 1), abs=1e-6)


def test_shares_of_other_prompts_are_combined_as_independent_ones() -> None:
    subsets = ["Harmlessness BoN"] * 12 + ["Helpfulness BoN"] * 12
    items = [item(str(n), subset, all_pairs(1, 1), (1, 2), str(n)) for n, subset in enumerate(subsets)]
    result = judge_suite("rmb", items, [np.array([1.0, 0.0])] * 24, num_draws=50)
    assert [row.kind for row in result.rows] == ["subset", "subset", "total"]
    reach = 1 - 12 / (12 + 1.959964**2)
    assert result.rows[-1].score.low == pytest.approx(1 - reach / math.sqrt(2), abs=1e-6)


def test_where_the_credits_vary_they_tell_how_alike_the_shares_are() -> None:
    """Many prompts, whose difficulties fail apart or together: correlations near 0 and 1."""
    draw = np.random.default_rng(0)
    counts = np.full((400, 2), 3.0)
    apart = draw.binomial(3, 0.6, size=(400, 2)).astype(float)
    opposed = np.stack([apart[:, 0], 3 - apart[:, 0]], axis=1)
    (first,), (same,), (other,) = (Clustered(sums, counts).alike() for sums in (apart, apart[:, [0, 0]], opposed))
    assert first[1][0, 1] < 0.15
    assert same[1][0, 1] == pytest.approx(1.0)
    assert other[1][0, 1] == 0.0


def test_strata_take_a_degree_of_freedom_each() -> None:
    """Five sets of four prompts: fifteen degrees of freedom, not nineteen."""
    names = ("Natural", "Neighbor", "GPTInst", "GPTOut", "Manual")
    items = [item(f"{n:02}", names[n % 5], all_pairs(1, 1), (1, 2), str(n)) for n in range(20)]
    outcome = SUITES["llmbar"].rule(items, [np.array([float(n < 10), 0.5]) for n in range(20)], False)
    resampled = Resampled.of(items, outcome, seed=0)
    judged = judge({"own": outcome}, resampled, num_draws=2000)["own"]
    low = np.quantile(judged.draws_RS.mean(1), 0.025)
    expected = 0.5 - (0.5 - low) * t.ppf(0.975, 15) / norm.ppf(0.975)
    assert estimate(judged, outcome.rows[-1], resampled).low == pytest.approx(expected, abs=1e-9)


def test_draws_are_made_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks at once would need as much memory as draws times prompts."""
    items, scores = suite_2(6)
    resampled = Resampled.of(items, outcomes(items, scores)["own"], seed=0)
    monkeypatch.setattr(draws, "BLOCK_ENTRIES", 1)
    blocks = resampled.weights(50)
    assert next(blocks).shape == (1, 18)


def test_below_ten_prompts_there_is_no_interval_and_the_method_says_so() -> None:
    items = [item(str(n), "honest", all_pairs(1, 1), (1, 2), str(n // 2)) for n in range(18)]
    result = judge_suite("hhh", items, [np.array([1.0, 0.0])] * 18)
    for row in result.rows:
        assert math.isnan(row.score.low)
        assert row.score.method == "too few prompts (9)"
        assert row.score.n == 9


def test_the_gain_is_the_score_minus_the_better_length_rule_in_the_same_draws() -> None:
    items, scores = suite_2(30)
    result = judge_suite("rewardbench2", items, scores["own"])
    for row in result.rows:
        assert row.better == max(BASELINES, key=lambda name: row.baselines[name].value)
        assert row.gain.value == pytest.approx(row.score.value - row.baselines[row.better].value)
        assert row.gain.low <= row.gain.value <= row.gain.high
        assert row.gain.method.endswith("paired")


def test_a_scorer_equal_to_the_other_differs_by_nothing_with_an_interval_and_p_of_one() -> None:
    items, scores = suite_2(30)
    found = outcomes(items, {"own": scores["own"], "other": [own * 2 + 1 for own in scores["own"]]})
    resampled = Resampled.of(items, found["own"], seed=0)
    judged = judge(found, resampled, num_draws=50)
    for row in found["own"].rows[:2]:  # without Ties, whose gaps grow with the scale
        none = difference(judged["own"], judged["other"], row, resampled)
        assert none.value == 0.0
        assert none.low < 0 < none.high
        assert significance(judged["own"], judged["other"], row, seed=0) == 1.0


@pytest.mark.parametrize("count", [4, 8, 30])
def test_the_sign_flip_test_is_the_paired_permutation_test(count: int) -> None:
    """Against scipy: exact for few clusters, and by chance for more."""
    items, scores = suite_2(count, seed=5)
    found = outcomes(items, scores)
    judged = judge(found, Resampled.of(items, found["own"], seed=0), num_draws=2)
    row = next(row for row in found["own"].rows if row.name == "Focus")
    own, other = (found[name].shares["Focus"].credits_E for name in ("own", "other"))
    p = significance(judged["own"], judged["other"], row, seed=0)
    assert significance(judged["other"], judged["own"], row, seed=0) == p, "whichever of the two comes first"
    exact = count <= 8
    expected = permutation_test(
        (own - other,), lambda d, axis: d.sum(axis), permutation_type="samples", vectorized=True,
        n_resamples=np.inf if exact else 20_000, rng=np.random.default_rng(1),
    )  # fmt: skip
    assert p == pytest.approx(expected.pvalue, abs=1e-9 if exact else 0.015)


@pytest.mark.parametrize("strength", [1.5, 0.0])
def test_the_test_against_length_accounts_for_the_choice_of_the_better_rule(strength: float) -> None:
    """Above all rules it is the least clear difference; below one, three times the clearest (Bonferroni)."""
    draw = np.random.default_rng(3)
    items = []
    for n in range(60):
        # The longer reply is the better one in two of three rows.
        lengths = (9, 5) if n % 3 else (5, 9)
        items.append(item(f"q{n}", "harmless", all_pairs(1, 1), lengths, f"q{n}"))
    scores = [draw.normal(size=2) + np.array([strength, 0.0]) for _ in items]
    result = judge_suite("hhh", items, scores, num_draws=20)
    rule = SUITES["hhh"].rule
    found = {"own": rule(items, scores, False)}
    found |= {name: rule(items, own, False) for name, own in length_scores(items, seed=0).items()}
    judged = judge(found, Resampled.of(items, found["own"], seed=0), num_draws=2)
    for row, of in zip(result.rows, found["own"].rows, strict=True):
        single = {name: significance(judged["own"], judged[name], of, seed=0) for name in BASELINES}
        above = [p for name, p in single.items() if row.baselines[name].value > row.score.value]
        assert bool(above) == (strength == 0.0)
        assert row.p_value == pytest.approx(min(1.0, 3 * min(above)) if above else max(single.values()))


def test_holm_is_over_subsets_alone() -> None:
    items, scores = suite_2(30)
    result = judge_suite("rewardbench2", items, scores["own"])
    subsets = [row for row in result.rows if row.kind == "subset"]
    assert [row.p_holm for row in subsets] == holm([row.p_value for row in subsets])
    assert all(math.isnan(row.p_holm) for row in result.rows if row.kind != "subset")


def test_length_rules_see_lengths_alone_and_the_model_of_length_never_its_own_prompt() -> None:
    """Where the better reply is the longer in one subset and the shorter in another, the fitted model knows which."""
    draw = np.random.default_rng(0)
    items = []
    for subset, sign in (("harmless", 1), ("other", -1)):
        for n in range(40):
            short, long = sorted(draw.choice(np.arange(5, 200), 2, replace=False).tolist())
            lengths = (long, short) if sign > 0 else (short, long)
            items.append(item(f"{subset}{n}", subset, all_pairs(1, 1), lengths, f"{subset}{n}"))
    result = judge_suite("hhh", items, [np.zeros(2)] * len(items))
    values = {row.name: {name: one.value for name, one in row.baselines.items()} for row in result.rows}
    assert values["harmless"] == {LONGEST: 1.0, SHORTEST: 0.0, FITTED: 1.0}
    assert values["other"] == {LONGEST: 0.0, SHORTEST: 1.0, FITTED: 1.0}
    assert values["HHH"] == {LONGEST: 0.5, SHORTEST: 0.5, FITTED: 1.0}


def test_a_model_of_length_finds_nothing_where_there_is_nothing() -> None:
    """Fitted and judged on the same prompts, it would do better than chance; on held-out ones it does not."""
    draw = np.random.default_rng(0)
    items = []
    for n in range(400):
        lengths = tuple(draw.integers(5, 200, 2).tolist())
        items.append(item(str(n), "honest", all_pairs(1, 1), lengths, str(n)))
    scores = length_scores(items)[FITTED]
    wins = np.mean([own[0] > own[1] for own in scores])
    assert abs(wins - 0.5) < 0.08


def test_a_model_of_length_of_a_single_prompt_is_constant() -> None:
    items = [item(str(n), "honest", all_pairs(1, 1), (3, 9), "one") for n in range(4)]
    assert all((own == 0).all() for own in length_scores(items)[FITTED])


def test_what_is_not_there_is_counted_against_the_published_suite() -> None:
    items = [item(str(n), "harmless", all_pairs(1, 1), (1, 2), str(n)) for n in range(58)]
    result = judge_suite("hhh", items, [np.array([1.0, math.nan if n < 2 else 0.0]) for n in range(58)])
    assert result.incomplete == {"helpful": (0, 59), "honest": (0, 61), "other": (0, 43)}
    assert (result.unscored_rows, result.unscored_replies) == (2, 2)
    assert result.rows[0].score.value == pytest.approx(56 / 58)


@pytest.mark.slow
def test_a_suite_without_some_of_its_parts_is_not_called_the_published_one() -> None:
    """Of PPE's benchmarks and RMB's pairwise parts the number of rows is not known here, yet they must be there."""
    items = [item(str(n), "MATH", all_pairs(1, 1), (1, 2), str(n)) for n in range(12)]
    result = judge_suite("ppe", items, [np.array([1.0, 0.0])] * 12, num_draws=5, left_out=16038)
    absent = ("MMLU-Pro", "GPQA", "IFEval", "MBPP-Plus")
    assert result.incomplete == dict.fromkeys(absent, (0, None))
    assert [row.name for row in result.rows] == ["MATH", "PPE Correctness (1 of 5 benchmarks)"]
    assert "rows of MMLU-Pro 0, GPQA 0" in " ".join(suite_report(result).split())

    counts = {"Helpfulness BoN": 2109, "Harmlessness BoN": 1677}
    items = [
        item(f"{subset} {n}", subset, all_pairs(1, 1), (1, 2), str(n))
        for subset, count in counts.items()
        for n in range(count)
    ]
    result = judge_suite("rmb", items, [np.array([1.0, 0.0])] * len(items), num_draws=5)
    assert result.incomplete == {"Helpfulness pairwise": (0, None), "Harmlessness pairwise": (0, None)}
    assert result.rows[-1].name == "RMB (2 of 4 parts)"


@pytest.mark.parametrize("suite", ["ppe", "rmb", "llmbar"])
def test_a_subset_of_another_suite_enters_no_mean_unnoticed(suite: str) -> None:
    items = [item(str(n), "aftermath", all_pairs(1, 1), (1, 2), str(n)) for n in range(12)]
    with pytest.raises(DataError, match=f"{suite}: aftermath is not part of it"):
        judge_suite(suite, items, [np.array([1.0, 0.0])] * 12)


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([np.zeros(2)] * 11, "12 rows with scores of 11"),
        ([np.zeros(2)] * 13, "12 rows with scores of 13"),
        ([np.zeros(2)] * 11 + [np.zeros(1)], r"2 replies and scores of shape \(1,\)"),
        ([np.zeros(2)] * 11 + [np.zeros(3)], r"2 replies and scores of shape \(3,\)"),
        ([np.zeros(2)] * 11 + [np.zeros((2, 1))], r"2 replies and scores of shape \(2, 1\)"),
    ],
)
def test_scores_that_do_not_fit_the_replies_are_refused(scores: list[np.ndarray], said: str) -> None:
    items = [item(str(n), "honest", all_pairs(1, 1), (1, 2), str(n)) for n in range(12)]
    with pytest.raises(DataError, match=said):
        judge_suite("hhh", items, scores)


def test_nothing_to_judge_and_ids_twice_are_refused() -> None:
    with pytest.raises(DataError, match="no rows to judge"):
        judge_suite("hhh", [], [])
    one = item("1", "honest", all_pairs(1, 1), (1, 2), "1")
    with pytest.raises(DataError, match="the same id"):
        judge_suite("hhh", [one, one], [np.zeros(2)] * 2)
