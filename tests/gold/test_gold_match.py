"""`gold match`: its numbers against slow versions, its verdicts on planted faults, its report and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kendalltau, pearsonr, spearmanr

from gold_matched import drawn, judged, part, scored
from harness.gold_rows import SCORE_FAULTS, SPREAD, gold_of, proxy, with_gold
from rewardlab.analysis.matching import Replies, match_of, outcomes_of, slice_matches
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.gold.files.layouts import write_rows
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.matching.columns import part_of, quarters, slice_columns
from rewardlab.gold.matching.config import MatchConfig
from rewardlab.gold.matching.files import claim, write
from rewardlab.gold.matching.order import order_of
from rewardlab.gold.matching.report import json_report, text_report
from rewardlab.gold.matching.run import match, match_parts, require_memory
from rewardlab.gold.proxies import Proxy
from rewardlab.gold.scoring import ScoringConfig

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


def test_quarters_of_the_margins_are_named_by_their_limits_and_equal_ones_stand_together() -> None:
    parts = quarters(np.arange(1.0, 9.0))
    assert parts == [name for name in ("1 up to 2", "2 up to 4", "3 up to 6", "4 above 6") for _ in range(2)]
    assert quarters(np.array([1.0] * 7 + [2.0] * 3)) == ["1 up to 1"] * 7 + ["2 above 1"] * 3
    assert quarters(np.array([1.0] * 3 + [2.0] * 7)) == ["1 up to 1"] * 3 + ["2 above 1"] * 7
    assert quarters(np.ones(4)) == ["1 all"] * 4


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
def test_rows_that_are_not_there_leave_no_folder_beside_them(tmp_path: Path) -> None:
    missing = tmp_path / "pairs/labels.test.jsonl"
    for command in (["match"], ["curve"]):
        with pytest.raises(SystemExit) as ended:
            main(["gold", *command, "--input", str(missing), "--proxies", "scores.json"])
        assert ended.value.code == 2
        assert not missing.parent.exists()


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


def test_more_pairs_than_memory_holds_are_refused_before_anything_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = drawn(rows=4, replies=1000)
    rows = with_gold(rows, gold_of(rows))
    require_memory(rows)
    monkeypatch.setattr("rewardlab.training.cost.memory.available", lambda: 600_000_000)
    with pytest.raises(DataError, match=r"4 rows with up to 1,000 replies have 1,998,000 pairs .*--num-responses"):
        require_memory(rows)
    require_memory(rows[:3])
    monkeypatch.setattr("rewardlab.training.cost.memory.available", lambda: None)
    require_memory(rows)
