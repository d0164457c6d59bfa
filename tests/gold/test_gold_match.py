"""`gold match`: its numbers against slow versions, its verdicts on planted faults, its report and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kendalltau, pearsonr, spearmanr

from harness.gold_rows import SCORE_FAULTS, SPREAD, Size, draw_rows, draw_scores, gold_of, proxy, with_gold
from rewardlab.analysis.matching import Replies, match_of, outcomes_of, slice_matches
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Estimate
from rewardlab.gold.files.layouts import write_rows
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.findings import Finding, exit_status
from rewardlab.gold.matching import verdicts
from rewardlab.gold.matching.columns import Part, part_of, slice_columns
from rewardlab.gold.matching.config import MatchConfig
from rewardlab.gold.matching.files import claim, write
from rewardlab.gold.matching.order import order_of
from rewardlab.gold.matching.report import json_report, text_report
from rewardlab.gold.matching.run import Matched, match, match_parts
from rewardlab.gold.matching.runs import RunFacts
from rewardlab.gold.proxies import Proxy
from rewardlab.gold.scoring import ScoringConfig


def drawn(rows: int = 200, replies: int = 2, seed: int = 0, tag: str = "") -> list[GoldRow]:
    return draw_rows(Size(rows, replies), np.random.default_rng(seed), tag=tag)


def scored(rows: list[GoldRow], match_rate: float = 0.88, seed: int = 1, scale: float = 1.0) -> np.ndarray:
    return draw_scores(rows, match_rate, np.random.default_rng(seed), scale=scale)


def part(rows: list[GoldRow], *scores: np.ndarray, name: str = "test") -> Part:
    return part_of(name, rows, [proxy(own, f"p{number}") for number, own in enumerate(scores)])


def findings(matched: Matched) -> dict[str, Finding]:
    return {one.name: one for one in matched.findings}


def judged(rows: list[GoldRow], scores: np.ndarray, **more: object) -> dict[str, Finding]:
    return findings(match_parts(part(rows, scores), **more))


def facts(**changed: object) -> RunFacts:
    base = RunFacts(
        folder=Path("run"),
        epochs=1.0,
        loss_is="train_nll",
        end_loss=sure(0.2),
        epoch_loss=sure(0.2),
        train_accuracy=sure(0.95),
        own_accuracy=sure(0.88),
        own_accuracy_on="test",
        learning_rate=5e-6,
        num_epochs=1.0,
        problems=(),
    )
    return dataclasses.replace(base, **changed)


def sure(value: float, reach: float = 0.02) -> Estimate:
    return Estimate(value=value, low=value - reach, high=value + reach, n=500, method="given")


# --- numbers ---------------------------------------------------------------------------------------------------


def test_the_match_is_the_share_of_pairs_in_gold_s_order() -> None:
    rows = drawn(rows=30, replies=4)
    scores, gold = np.round(scored(rows) / 4), gold_of(rows)
    gold[:5, 1] = gold[:5, 0]
    rows = with_gold(rows, gold)
    own = part(rows, scores).replies
    found = match_of(own, scores.ravel())
    outcomes = [
        0.5
        if scores[row, i] == scores[row, j]
        else float((scores[row, i] > scores[row, j]) == (gold[row, i] > gold[row, j]))
        for row in range(30)
        for i, j in combinations(range(4), 2)
        if gold[row, i] != gold[row, j]
    ]
    assert found.agreement.match.value == pytest.approx(np.mean(outcomes))
    assert found.agreement.gold_ties == 5
    assert found.num_pairs == 175
    assert found.proxy_ties == outcomes.count(0.5) > 0


def test_correlations_within_rows_are_the_means_of_scipy_s() -> None:
    rows = drawn(rows=25, replies=5)
    scores, gold = np.round(scored(rows) / 3), gold_of(rows)
    scores[0], gold[1] = 1.0, 2.0
    rows = with_gold(rows, gold)
    found = match_of(part(rows, scores).replies, scores.ravel())
    measures: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
        "Pearson": lambda x, y: pearsonr(x, y).statistic,
        "Spearman": lambda x, y: spearmanr(x, y).statistic,
        "Kendall": lambda x, y: kendalltau(x, y).statistic,
    }
    for name, measure in measures.items():
        values = [0.0, *(measure(scores[row], gold[row]) for row in range(2, 25))]
        assert found.within[name].value == pytest.approx(np.mean(values)), name
    assert found.rows_without_order == 1


def test_slope_spread_and_regret_are_those_of_slow_versions() -> None:
    rows = drawn(rows=60, replies=3)
    scores, gold = scored(rows), gold_of(rows)
    found = match_of(part(rows, scores).replies, scores.ravel())
    ours, theirs = (
        np.array([own[row, i] - own[row, j] for row in range(60) for i, j in combinations(range(3), 2)])
        for own in (scores, gold)
    )
    assert found.slope.value == pytest.approx((ours * theirs).sum() / (theirs**2).sum())
    assert found.spread.value == pytest.approx(np.sqrt((ours**2).sum() / (theirs**2).sum()))
    assert found.score_spread.value == pytest.approx(scores.std() / gold.std())
    picked = gold[np.arange(60), scores.argmax(1)]
    assert found.regret.lost.value == pytest.approx((gold.max(1) - picked).mean())
    assert found.regret.gained.value == pytest.approx((picked - gold.mean(1)).mean())
    assert found.regret.share.value == pytest.approx((picked - gold.mean(1)).sum() / (gold.max(1) - gold.mean(1)).sum())


def test_a_perfect_proxy_of_another_scale_loses_nothing() -> None:
    rows = drawn(replies=4)
    found = match_of(part(rows, 3 * gold_of(rows) - 7).replies, (3 * gold_of(rows) - 7).ravel())
    assert found.agreement.match.value == 1.0
    assert found.regret.lost.value == pytest.approx(0.0)
    assert found.regret.share.value == pytest.approx(1.0)
    assert found.slope.value == pytest.approx(3.0)


def test_ties_of_gold_do_not_move_the_scale_of_the_margins() -> None:
    rows = drawn(rows=100)
    gold = gold_of(rows)
    scores = 0.5 * gold
    gold[:40, 1] = gold[:40, 0]
    found = match_of(part(with_gold(rows, gold), scores).replies, scores.ravel())
    assert found.spread.value == pytest.approx(0.5)


def test_slices_divide_all_pairs_and_find_where_a_proxy_is_blind() -> None:
    rows = drawn(rows=300)
    scores = scored(rows, 0.95)
    scores[1::2] = scored(rows, 0.5, seed=9)[1::2]
    own = part(rows, scores)
    columns = slice_columns(own)
    found = slice_matches(own.replies, own.scores["p0"], columns)
    for column in columns:
        assert sum(one.num_pairs for one in found if one.column == column) == 300
    by_source = {one.value: one for one in found if one.column == "source"}
    assert by_source["a"].match.value > 0.9
    assert by_source["b"].apart.high < -0.2
    assert by_source["b"].adjusted < 0.001
    outcome = outcomes_of(own.replies.margins(own.scores["p0"]), own.replies.gold_N)
    assert by_source["b"].match.value == pytest.approx(outcome[1::2].mean())


def test_identical_replies_and_what_is_missing_are_left_out_and_counted() -> None:
    rows = drawn(rows=40, replies=3)
    rows[0] = dataclasses.replace(rows[0], responses=("same", "same", "other"))
    rows[1] = dataclasses.replace(rows[1], gold=(None, 1.0, 2.0))
    rows[2] = dataclasses.replace(rows[2], responses=(None, "a", "b"))
    scores = [list(map(float, own)) for own in scored(rows)]
    given = Proxy(
        name="p", scores=tuple((None, *own[1:]) if number == 3 else tuple(own) for number, own in enumerate(scores))
    )
    own = part_of("test", rows, [given])
    assert (own.replies.num_identical, own.without_gold, own.without_text) == (1, 1, 1)
    assert own.without_score == {"p": 1}
    assert len(own.replies.first_N) == 36 * 3 + 2 + 3 * 1


@pytest.mark.slow
def test_intervals_are_by_prompt() -> None:
    rows = drawn(rows=300)
    scores = scored(rows, 0.8)
    single = match_of(part(rows, scores).replies, scores.ravel()).agreement.match
    doubled = match_of(part(rows + rows, np.concatenate([scores, scores])).replies, np.tile(scores.ravel(), 2))
    assert doubled.agreement.match.n == single.n == 300
    assert doubled.agreement.match.low == pytest.approx(single.low, abs=0.01)


# --- order -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replies", [2, 4])
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("swapped", "reverse order of the replies"),
        ("shifted by a row", "taken from 1 row further down"),
        ("shifted from the middle on", "taken from 1 row further up"),
    ],
)
def test_scores_in_the_wrong_place_are_named(fault: str, told: str, replies: int) -> None:
    rows = drawn(replies=replies)
    found = judged(rows, SCORE_FAULTS[fault](scored(rows), np.random.default_rng(2)))
    assert found["order of scores"].status == "fail"
    assert told in found["order of scores"].evidence


def test_the_place_from_which_on_scores_are_shifted_is_found() -> None:
    rows = drawn(rows=400)
    scores = scored(rows, 0.95)
    order = order_of(
        SCORE_FAULTS["shifted from the middle on"](scores, np.random.default_rng(0)),
        gold_of(rows),
        [row.key for row in rows],
    )
    assert order.first_row is not None
    assert abs(order.first_row - 201) <= 10


@pytest.mark.slow
def test_a_sign_that_is_turned_round_is_told_from_replies_that_are_swapped() -> None:
    rows = drawn(replies=4)
    assert "opposite sign" in judged(rows, -scored(rows))["order of scores"].evidence


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("match_rate", [0.5, 0.66, 0.9])
def test_honest_scores_are_in_order_whatever_they_know(match_rate: float) -> None:
    for seed in range(10):
        rows = drawn(seed=seed)
        scores = scored(rows, match_rate, seed=seed + 50)
        assert order_of(scores, gold_of(rows), [row.key for row in rows]).named is None


# --- verdicts --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_good_proxy_passes_everything_that_can_be_known() -> None:
    rows, train = drawn(rows=600), drawn(rows=900, seed=4, tag="t")
    matched = match_parts(
        part(rows, scored(rows)), part(train, scored(train, 0.95, seed=3), name="train"), runs={"p0": facts()}
    )
    assert {one.status for one in matched.findings} == {"pass"}, [
        one for one in matched.findings if one.status != "pass"
    ]
    assert exit_status(matched.findings) == 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("match_rate", "rows", "status"),
    [(0.88, 600, "pass"), (0.75, 1000, "warn"), (0.6, 600, "fail"), (0.5, 600, "fail"), (0.8, 100, "undecided")],
)
def test_the_match_is_judged_by_its_interval(match_rate: float, rows: int, status: str) -> None:
    own = drawn(rows=rows)
    found = judged(own, scored(own, match_rate))["match on test"]
    assert found.status == status, found.evidence
    assert ("not shown to be better than chance" in found.evidence) == (match_rate == 0.5)


@pytest.mark.slow
def test_compressed_scores_fail_with_a_poor_match_and_are_told_with_a_good_one() -> None:
    rows = drawn(rows=600)
    poor = judged(rows, scored(rows, 0.66, scale=0.1))["compressed scores"]
    assert poor.status == "fail"
    assert "--lr 5e-5 and --epochs 2" in poor.advice
    assert judged(rows, scored(rows, 0.9, scale=0.1))["compressed scores"].status == "warn"
    assert judged(rows, scored(rows, 0.66, scale=0.8))["compressed scores"].status == "pass"


@pytest.mark.slow
def test_compressed_gold_is_named() -> None:
    rows = drawn(rows=300)
    narrow = with_gold(rows, gold_of(rows) / 20)
    found = judged(narrow, scored(rows))["compressed scores"]
    assert found.status == "fail"
    assert "gold's own scores are the narrow ones" in found.evidence


@pytest.mark.slow
def test_low_training_accuracy_and_learning_by_heart_are_told_apart() -> None:
    rows, train = drawn(rows=600), drawn(rows=900, seed=4, tag="t")
    test_part = part(rows, scored(rows, 0.6))
    low = findings(match_parts(test_part, part(train, scored(train, 0.66), name="train")))
    assert low["training accuracy"].status == "fail"
    assert low["generalisation"].status == "pass"
    assert low["hardly learned"].status == "warn"
    by_heart = findings(match_parts(test_part, part(train, scored(train, 0.96), name="train")))
    assert by_heart["training accuracy"].status == "pass"
    assert by_heart["generalisation"].status == "fail"
    assert by_heart["hardly learned"].status == "pass"


@pytest.mark.parametrize(
    ("rows", "match_rate", "status"),
    [(600, 0.501, "warn"), (600, 0.6, "warn"), (30, 0.7, "undecided"), (600, 0.88, "pass")],
)
def test_a_match_near_chance_is_not_called_one_of_a_proxy_that_has_learned(rows, match_rate, status) -> None:
    draw = drawn(rows=rows)
    found = judged(draw, scored(draw, match_rate))["hardly learned"]
    assert found.status == status
    assert ("better than chance" in found.evidence) == (match_rate < 0.55)
    assert bool(found.advice) == (status != "pass")


@pytest.mark.parametrize(
    ("low", "value", "high", "good", "status"),
    [
        (0.69, 0.75, 0.795, 0.8, "undecided"),
        (0.15, 0.2, 0.25, 0.8, "pass"),
        (0.64, 0.66, 0.69, 0.6, "pass"),
        (0.64, 0.66, 0.69, 0.8, "warn"),
        (0.46, 0.5, 0.54, 0.8, "warn"),
        (math.nan, 0.66, math.nan, 0.8, "undecided"),
    ],
)
def test_whether_a_proxy_has_hardly_learned_is_judged_by_the_whole_interval(low, value, high, good, status) -> None:
    rows = drawn(rows=30)
    (found,) = match_parts(part(rows, scored(rows))).test.matches.values()
    agreed = dataclasses.replace(found.agreement, match=Estimate(value=value, low=low, high=high, n=200, method="-"))
    order = order_of(scored(rows).reshape(30, 2), gold_of(rows), [row.key for row in rows])
    tested = dataclasses.replace(found, agreement=agreed)
    own = verdicts.Judged(name="p", test=tested, train=None, order=order, train_order=None, run=None)
    assert verdicts._near_66(own, verdicts.Limits(good_match=good)).status == status


def test_between_two_replies_all_three_correlations_are_one_number_with_one_interval() -> None:
    rows = drawn(rows=200)
    (match,) = match_parts(part(rows, scored(rows, 0.7))).test.matches.values()
    within = match.within
    pearson = within["Pearson"]
    assert pearson.low < pearson.value < pearson.high
    for other in (within["Spearman"], within["Kendall"]):
        assert (other.value, other.low, other.high, other.method) == (
            pearson.value,
            pearson.low,
            pearson.high,
            pearson.method,
        )


@pytest.mark.parametrize(
    ("end", "epoch", "statuses"),
    [
        (sure(0.2), sure(0.2), ("pass", "pass")),
        (sure(0.4), sure(0.4), ("warn", "pass")),
        (sure(0.6), sure(0.6), ("warn", "fail")),
        (sure(0.31), None, ("undecided", "undecided")),
    ],
)
def test_losses_are_judged_by_their_intervals(end: Estimate, epoch: Estimate | None, statuses: Sequence[str]) -> None:
    rows = drawn()
    found = judged(rows, scored(rows), runs={"p0": facts(end_loss=end, epoch_loss=epoch)})
    assert (found["loss at the end"].status, found["loss after an epoch"].status) == tuple(statuses)


def test_a_loss_of_too_few_steps_says_why_it_is_not_judged() -> None:
    rows = drawn()
    few = Estimate(value=0.2, low=math.nan, high=math.nan, n=7, method="")
    found = judged(rows, scored(rows), runs={"p0": facts(end_loss=few, epoch_loss=None)})
    assert found["loss at the end"].status == "undecided"
    assert "Fewer than ten logged steps have no interval" in found["loss at the end"].advice


@pytest.mark.slow
def test_scores_of_other_texts_than_the_run_was_judged_on_are_named() -> None:
    rows = drawn(rows=400)
    found = judged(rows, scored(rows, 0.6), runs={"p0": facts()})["template and texts"]
    assert found.status == "fail"
    assert "another template, another system turn" in found.advice
    assert judged(rows, scored(rows), runs={"p0": facts()})["template and texts"].status == "pass"


def test_what_follows_from_a_wrong_order_says_so() -> None:
    rows = drawn()
    found = judged(rows, scored(rows)[:, ::-1], runs={"p0": facts()})
    assert found["match on test"].advice.startswith("First put the scores in order")
    assert found["template and texts"].status != "fail"


# --- several proxies -------------------------------------------------------------------------------------------


def test_proxies_are_compared_on_the_same_pairs() -> None:
    rows = drawn(rows=500)
    strong, weak, same = scored(rows, 0.92, seed=1), scored(rows, 0.7, seed=2), scored(rows, 0.92, seed=1)
    matched = match_parts(part(rows, strong, weak, same))
    worse, equal = matched.beside
    assert worse.difference.difference.high < 0
    assert worse.adjusted < 0.001
    assert equal.difference.difference.value == 0.0
    assert equal.adjusted == 1.0
    assert worse.verdicts.only_first > worse.verdicts.only_second
    assert matched.standings["p1"].p_best < 0.05 <= matched.standings["p0"].p_best


# --- the command -----------------------------------------------------------------------------------------------


def config(folder: Path, rows: list[GoldRow], **more: object) -> MatchConfig:
    write_rows(folder / "labels.jsonl", (row.as_json() for row in rows))
    return MatchConfig.of(input=(folder / "labels.jsonl",), **{"proxies": ("p=scores.json",), **more})


def given(rows_scores: np.ndarray) -> Callable[..., list[Proxy]]:
    def scores(
        sources: Sequence[str], rows: Sequence[GoldRow], folder: Path, scoring: ScoringConfig, most: int | None
    ) -> list[Proxy]:
        return [proxy(rows_scores, source.partition("=")[0]) for source in sources]

    return scores


@pytest.mark.slow
def test_the_report_says_what_was_found_and_is_written(tmp_path: Path) -> None:
    rows = drawn(replies=3)
    own = config(tmp_path, rows)
    claim(own)
    matched = match(own, scores=given(scored(rows)))
    told = text_report(matched)
    assert "Left out: nothing." in told
    assert "match rate" in told
    assert [path.name for path in write(matched, own)] == ["match.json", "match.md", "match.html"]
    values = json.loads((tmp_path / "match" / "match.json").read_text(encoding="utf-8"))
    assert values == json.loads(json.dumps(json_report(matched, own)))
    assert values["test"]["matches"]["p"]["agreement"]["match"]["n"] == 200
    assert "labels.jsonl" in values["inputs"]
    claim(own)
    (tmp_path / "match" / "match.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="did not write it"):
        claim(own)


@pytest.mark.slow
def test_prompts_of_both_parts_are_told(tmp_path: Path) -> None:
    rows = drawn()
    write_rows(tmp_path / "train.jsonl", (row.as_json() for row in rows[:50] + drawn(rows=150, seed=8, tag="t")))
    own = config(tmp_path, rows, train_input=(tmp_path / "train.jsonl",), train_proxies=("p=train.json",))
    matched = match(own, scores=given(scored(rows)))
    assert matched.notes[0].startswith("50 prompts are in both parts")
    assert matched.train is not None
    without = match(config(tmp_path, rows, train_input=(tmp_path / "train.jsonl",)), scores=given(scored(rows)))
    assert without.train is None
    assert "--train-proxies" in without.notes[0]


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    rows = drawn()
    with pytest.raises(DataError, match="scores of 199 rows and the test part has 200"):
        match(config(tmp_path, rows), scores=given(scored(rows)[1:]))
    with pytest.raises(DataError, match="3 scores for 2 replies"):
        match(config(tmp_path, rows), scores=given(np.ones((200, 3))))
    with pytest.raises(DataError, match="at least 10 are needed"):
        part(rows[:9], scored(rows)[:9])
    with pytest.raises(ConfigError, match="no proxy has this name"):
        match(config(tmp_path, rows, runs=("q=run",)), scores=given(scored(rows)))
    with pytest.raises(ConfigError, match="--proxies is missing"):
        MatchConfig.of(input=(tmp_path / "labels.jsonl",))


def test_replies_without_texts_have_all_pairs() -> None:
    own = Replies.of(np.array([0, 0, 0, 1]), ["a", "b"], np.array([1.0, 2.0, 3.0, SPREAD]))
    assert list(zip(own.first_N.tolist(), own.second_N.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 2)]
