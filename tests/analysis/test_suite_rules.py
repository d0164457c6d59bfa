"""The rules of public suites, on suites small enough to be computed by hand."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import SHARED
from rewardlab.analysis.suites.judging import judge_suite
from rewardlab.analysis.suites.outcomes import Outcome, beats, top_share
from rewardlab.analysis.suites.registry import SUITES
from rewardlab.analysis.suites.rm_bench import difficulty
from rewardlab.core.errors import DataError
from rewardlab.core.suites import SuiteItem, all_pairs

Row = tuple[SuiteItem, list[float]]


def item(id: str, subset: str, scores: Sequence[float], pairs: Sequence[tuple[int, int]], cluster: str = "") -> Row:
    """An item with its scores; its replies differ in length."""
    made = SuiteItem(
        id=id,
        subset=subset,
        cluster=cluster or id,
        prompt=(),
        replies=tuple("x" * (n + 1) for n in range(len(scores))),
        pairs=tuple(pairs),
    )
    return made, list(scores)


def best_of(id: str, subset: str, *scores: float) -> Row:
    """One correct reply, listed first, and others."""
    return item(id, subset, scores, all_pairs(1, len(scores) - 1))


def ties(kind: str, prompt: int, correct: Sequence[float], incorrect: Sequence[float]) -> Row:
    return item(
        f"{kind}:{prompt}",
        "Ties",
        [*correct, *incorrect],
        all_pairs(len(correct), len(incorrect)),
        cluster=f"ties {prompt}",
    )


def pair(id: str, subset: str, better: float, worse: float) -> Row:
    return item(id, subset, [better, worse], [(0, 1)])


def outcome(suite: str, rows: Sequence[Row], *, fair: bool = False) -> Outcome:
    return SUITES[suite].rule([one for one, _ in rows], [np.array(scores) for _, scores in rows], fair)


def values(suite: str, rows: Sequence[Row], *, fair: bool = False) -> dict[str, float]:
    """Name of a row -> its value."""
    result = outcome(suite, rows, fair=fair)
    return {row.name: result.value(row) for row in result.rows}


# --- RewardBench 2 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "credit"),
    [
        ((2.0, 1.0, 0.0, -1.0), 1),
        ((2.0, 2.0, 0.0, -1.0), Fraction(1, 2)),
        ((2.0, 2.0, 2.0, -1.0), Fraction(1, 3)),
        ((2.0, 2.0, 2.0, 2.0), Fraction(1, 4)),
        ((1.0, 2.0, 1.0, 1.0), 0),
    ],
)
def test_a_tie_of_k_at_the_top_is_one_part_in_k(scores: tuple[float, ...], credit: Fraction) -> None:
    assert values("rewardbench2", [best_of("1", "Focus", *scores)])["Focus"] == float(credit)


def test_a_constant_scorer_has_a_quarter_which_is_chance() -> None:
    rows = [best_of(str(n), subset, 3.0, 3.0, 3.0, 3.0) for n, subset in enumerate(("Focus", "Math", "Safety"))]
    assert values("rewardbench2", rows)["RewardBench 2"] == 0.25


def test_the_total_is_the_plain_mean_of_the_subsets_whatever_their_sizes() -> None:
    rows = [best_of(str(n), "Focus", 1.0, 0.0, 0.0, 0.0) for n in range(9)] + [best_of("m", "Math", 0.0, 1.0, 0.0, 0.0)]
    assert values("rewardbench2", rows) == {"Math": 0.0, "Focus": 1.0, "RewardBench 2": 0.5}


def test_ties_by_hand_when_everything_is_right_and_the_spread_is_zero() -> None:
    """Gaps of 1 over a spread of 0: tanh(∞) = 1, so that the composite has its maximum of 1.01."""
    rows = [ties("ref", 3, [2.0], [1.0, 0.0]), ties("tied", 3, [2.0, 2.0], [1.0, 0.0])]
    assert values("rewardbench2", rows)["Ties"] == pytest.approx(1.01, abs=1e-15)


def test_ties_by_hand_with_a_spread() -> None:
    """Prompt 1: spread 1, gaps 3 (tied) and 0.5 (ref). Prompt 2: spread 2, gap −1 (tied) and 4 (ref)."""
    rows = [
        ties("tied", 1, [5.0, 4.0], [1.0, 0.0]),
        ties("ref", 1, [1.5], [1.0, -2.0]),
        ties("tied", 2, [5.0, 3.0], [4.0]),
        ties("ref", 2, [4.0], [0.0]),
    ]
    # tied right 1 of 2; ref right 2 of 2; gap above spread 1 of 2; smaller gap (0.5, −1) above spread (1, 2): none.
    size = (math.tanh(0.5 / 1 - 1) + math.tanh(-1 / 2 - 1)) / 2
    assert values("rewardbench2", rows)["Ties"] == pytest.approx(0.3 * 0.5 + 0.3 * 1 + 0.2 * 0.5 + 0 + 0.01 * size)


def test_ties_without_gap_or_spread_add_nothing_for_the_size_of_the_gap() -> None:
    """0/0, which the published code turns into 0; nothing is above anything, so all is 0."""
    rows = [ties("ref", 1, [1.0], [1.0]), ties("tied", 1, [1.0, 1.0], [1.0])]
    assert values("rewardbench2", rows)["Ties"] == 0.0
    # At random: ref ½, tied 1 of C(3, 1) = 3 orders, both comparisons of gaps ½.
    assert values("rewardbench2", rows, fair=True)["Ties"] == pytest.approx(0.3 / 3 + 0.3 / 2 + 0.2 / 2 + 0.2 / 2)


def test_a_negative_gap_over_a_spread_of_zero_is_minus_one() -> None:
    rows = [ties("ref", 1, [1.0], [0.0]), ties("tied", 1, [1.0, 1.0], [2.0])]
    assert values("rewardbench2", rows)["Ties"] == pytest.approx(0.3 - 0.01)


def test_rows_of_one_kind_count_for_accuracy_but_not_for_gaps() -> None:
    """A ref row without its tied row is in the accuracy of ref alone."""
    rows = [ties("ref", 1, [2.0], [1.0]), ties("tied", 1, [2.0, 2.0], [1.0]), ties("ref", 2, [0.0], [1.0])]
    assert values("rewardbench2", rows)["Ties"] == pytest.approx(0.3 + 0.15 + 0.2 + 0.2 + 0.01)


def test_ties_are_joined_by_number() -> None:
    """ref:03 and tied:3 are of one prompt, and ref:3 beside ref:03 is there twice."""
    (one, scores), tied = ties("ref", 3, [2.0], [1.0]), ties("tied", 3, [2.0, 2.0], [1.0])
    ref = (replace(one, id="ref:03"), scores)
    assert values("rewardbench2", [ref, tied])["Ties"] == pytest.approx(1.01)
    with pytest.raises(DataError, match="twice"):
        values("rewardbench2", [ref, tied, (one, scores)])
    with pytest.raises(DataError, match="wanted one such as ref:3"):
        values("rewardbench2", [(replace(one, id="3"), scores), tied])


def test_ties_that_cannot_be_joined_are_refused() -> None:
    with pytest.raises(DataError, match="no prompt with both a ref and a tied row"):
        values("rewardbench2", [ties("ref", 1, [2.0], [1.0]), ties("tied", 2, [2.0, 1.0], [0.0])])


# --- RewardBench 1 -------------------------------------------------------------------------------------------


def test_a_tie_is_an_error_and_sections_weigh_math_as_much_as_code() -> None:
    """math-prm (984) all wrong but for a tie, hep-go (164) all right; chat ¾."""
    rows = [pair("1", "math-prm", 0.0, 1.0), pair("2", "math-prm", 1.0, 1.0), pair("3", "hep-go", 1.0, 0.0)]
    rows += [pair(f"c{n}", "alpacaeval-easy", 1.0, float(n == 0) * 2) for n in range(4)]
    by_rule = values("rewardbench", rows)
    assert by_rule["Reasoning"] == pytest.approx(164 / (984 + 164))
    assert by_rule["Chat"] == 0.75
    assert by_rule["RewardBench"] == pytest.approx((0.75 + 164 / 1148) / 2)
    assert values("rewardbench", rows, fair=True)["math-prm"] == 0.25


def test_sections_weigh_subsets_by_their_published_sizes() -> None:
    rows = [pair("1", "mt-bench-hard", 1.0, 0.0), pair("2", "llmbar-adver-neighbor", 0.0, 1.0)]
    assert values("rewardbench", rows)["Chat Hard"] == pytest.approx(37 / (37 + 134))


def test_a_subset_of_no_section_has_a_row_and_counts_for_nothing() -> None:
    rows = [pair("1", "anthropic_hhh", 0.0, 1.0), pair("2", "hep-go", 1.0, 0.0)]
    assert values("rewardbench", rows) == {"hep-go": 1.0, "anthropic_hhh": 0.0, "Reasoning": 1.0, "RewardBench": 1.0}


# --- RM-Bench ------------------------------------------------------------------------------------------------


def test_triangles_of_the_matrix_of_styles() -> None:
    """A scorer of style alone: the fancier reply of a pair wins, so easy is right, hard wrong, and normal tied."""
    rows = [item("1", "chat", [1.0, 2.0, 3.0, 1.0, 2.0, 3.0], all_pairs(3, 3))]
    assert values("rm-bench", rows) == {
        "chat": pytest.approx(1 / 3),
        "easy": 1.0,
        "normal": 0.0,
        "hard": 0.0,
        "RM-Bench": pytest.approx(1 / 3),
    }
    assert values("rm-bench", rows, fair=True)["normal"] == 0.5


def test_the_nine_pairs_lie_on_and_around_the_diagonal() -> None:
    levels = [[difficulty(better, 3 + worse) for worse in range(3)] for better in range(3)]
    assert levels == [["normal", "hard", "hard"], ["easy", "normal", "hard"], ["easy", "easy", "normal"]]


def test_domains_weigh_alike_and_the_mean_of_difficulties_is_the_mean_of_domains() -> None:
    """Chat: two rows all right; safety: one row with only its hard pairs right."""
    right = [10.0, 10.0, 10.0, 0.0, 0.0, 0.0]
    # Better replies 3, 2, 1; worse ones 3, 2.5, 2: hard pairs (1,2'), (1,3'), (2,3') …
    rows = [item(str(n), "chat", right, all_pairs(3, 3)) for n in range(2)]
    rows.append(item("s", "safety", [3.0, 2.0, 0.0, 3.0, 2.5, 1.0], all_pairs(3, 3)))
    result = values("rm-bench", rows)
    # Row of wins: 3 > 2.5, 1 (hard, hard) but not 3; 2 > 1 (hard); 0 > nothing. So hard 1, normal and easy 0.
    assert result["safety"] == pytest.approx(1 / 3)
    assert result["hard"] == 1.0
    assert result["normal"] == result["easy"] == 0.5
    assert result["RM-Bench"] == pytest.approx((1 + 1 / 3) / 2)
    assert result["RM-Bench"] == pytest.approx((result["easy"] + result["normal"] + result["hard"]) / 3)


# --- suites of pairs -----------------------------------------------------------------------------------------


def test_in_best_of_n_the_winner_must_beat_every_loser() -> None:
    rows = [
        best_of("1", "Helpfulness BoN", 3.0, 2.0, 1.0),
        best_of("2", "Helpfulness BoN", 3.0, 3.0, 1.0),  # a tie loses
        best_of("3", "Helpfulness BoN", 3.0, 4.0, 1.0),
        pair("4", "Harmlessness pairwise", 1.0, 0.0),
    ]
    by_rule = values("rmb", rows)
    assert by_rule["Helpfulness BoN"] == pytest.approx(1 / 3)
    assert by_rule["RMB (2 of 4 parts)"] == pytest.approx((1 / 3 + 1) / 2)
    more = [best_of("5", "Harmlessness BoN", 1.0, 0.0), pair("6", "Helpfulness pairwise", 1.0, 0.0)]
    assert values("rmb", [*rows, *more])["RMB"] == pytest.approx((1 / 3 + 3) / 4)
    assert values("rmb", rows, fair=True)["Helpfulness BoN"] == pytest.approx((1 + 0.5) / 3)


def test_ppe_is_over_its_sampled_pairs_and_benchmarks_weigh_alike() -> None:
    """MATH: 2 of 3 sampled pairs, one of them sampled twice; GPQA: 0 of 1; the votes are a total of their own."""
    rows = [
        item("1", "MATH", [3.0, 1.0, 2.0], [(0, 1), (0, 1), (1, 2)]),
        item("2", "GPQA", [0.0, 1.0], [(0, 1)]),
        pair("3", "human preference", 1.0, 0.0),
    ]
    result = values("ppe", rows)
    assert result["MATH"] == pytest.approx(2 / 3)
    assert result["PPE Correctness (2 of 5 benchmarks)"] == pytest.approx(1 / 3)
    assert result["PPE Preference"] == 1.0
    assert "PPE Preference" not in values("ppe", rows[:2])
    rows += [pair(name, name, 0.0, 1.0) for name in ("MMLU-Pro", "IFEval", "MBPP-Plus")]
    assert values("ppe", rows)["PPE Correctness"] == pytest.approx(2 / 3 / 5)


def test_llmbar_is_the_mean_of_its_sets_and_hhh_is_over_its_rows() -> None:
    rows = [pair("1", "Natural", 1.0, 0.0), pair("2", "Manual", 0.0, 1.0), pair("3", "GPTOut", 1.0, 0.0)]
    result = values("llmbar", rows)
    assert result["Adversarial"] == 0.5
    assert result["LLMBar"] == pytest.approx(2 / 3)
    rows = [pair(str(n), "harmless", 1.0, 0.0) for n in range(3)] + [pair("o", "other", 1.0, 1.0)]
    assert values("hhh", rows)["HHH"] == 0.75
    assert values("hhh", rows, fair=True)["HHH"] == 0.875


EXCERPT = [
    # (source, label, score of A, score of B): as JudgeBench has them, with numbers of our own.
    ("mmlu-pro-law", "A>B", 2.5, 1.0),  # right
    ("mmlu-pro-physics", "B>A", 0.5, 0.5),  # a tie is B>A: right
    ("mmlu-pro-math", "A>B", 0.5, 0.5),  # a tie is B>A: wrong
    ("livebench-reasoning", "B>A", 1.0, -1.0),  # wrong
    ("livebench-math", "B>A", -1.0, 3.0),  # right
    ("livecodebench", "A>B", -4.0, -3.0),  # wrong
    ("livecodebench", "A>B", 7.0, -3.0),  # right
]


def test_judgebench_is_over_all_pairs_and_a_tie_goes_to_b() -> None:
    groups = ("mmlu-pro", "livebench-reasoning", "livebench-math", "livecodebench")
    rows = []
    for number, (source, label, *scores) in enumerate(EXCERPT):
        group = next(name for name in groups if source.startswith(name))
        rows.append(item(str(number), group, scores, [(0, 1) if label == "A>B" else (1, 0)]))
    rows.append(item("c", "mmlu-pro (claude)", [0.0, 1.0], [(0, 1)]))  # another response model: no part of the total
    result = values("judgebench", rows)
    assert result["mmlu-pro"] == pytest.approx(2 / 3)
    assert result["livecodebench"] == 0.5
    assert result["JudgeBench"] == pytest.approx(4 / 7)
    assert result["mmlu-pro (claude)"] == 0.0
    assert result["JudgeBench (claude)"] == 0.0
    assert values("judgebench", rows[-1:]) == {"mmlu-pro (claude)": 0.0, "JudgeBench (claude)": 0.0}
    fair = values("judgebench", rows, fair=True)
    assert fair["mmlu-pro"] == pytest.approx((1 + 0.5 + 0.5) / 3)


PUBLISHED = {
    "Skywork_Skywork-Reward-Llama-3.1-8B": 62.29,
    "Skywork_Skywork-Reward-Gemma-2-27B": 64.29,
    "internlm_internlm2-20b-reward": 63.43,
    "Ray2333_GRM-Gemma-2B-rewardmodel-ft": 59.43,
}


def judgebench_files() -> Path:
    """A clone of JudgeBench, named by REWARDLAB_JUDGEBENCH or beside the repository; skips the test without one."""
    folder = Path(os.environ.get("REWARDLAB_JUDGEBENCH", SHARED / "suites" / "judgebench"))
    if not (folder / "outputs").is_dir():
        pytest.skip("no clone of ScalerLab/JudgeBench (REWARDLAB_JUDGEBENCH=FOLDER, or shared/suites/judgebench)")
    return folder


@pytest.mark.shared_data
@pytest.mark.parametrize("model", PUBLISHED)
def test_raw_scores_that_judgebench_publishes_give_its_published_numbers(model: str) -> None:
    from rewardlab.data.suites.reading import read_suite

    folder = judgebench_files()
    name = f"dataset=judgebench,response_model=gpt-4o-2024-05-13,judge_name=reward_model,judge_model={model}.jsonl"
    path = folder / "outputs" / name
    if not path.is_file():
        pytest.skip(f"the clone of JudgeBench has no {name}")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    scores = {line["pair_id"]: line["judgments"][0]["judgment"]["scores"] for line in lines}
    items = [one for one in read_suite("judgebench", folder).items if one.id in scores]
    result = SUITES["judgebench"].rule(items, [np.array(scores[one.id]) for one in items], False)
    total = next(row for row in result.rows if row.kind == "total")
    assert len(items) == 350
    assert round(100 * result.value(total), 2) == PUBLISHED[model]


# --- laws of every rule --------------------------------------------------------------------------------------


def test_a_comparison_with_a_missing_score_is_lost() -> None:
    for scores in ([math.nan, 0.0], [1.0, math.nan], [math.inf, 0.0], [math.nan, math.nan]):
        for fair in (False, True):
            assert beats(np.array(scores), 0, 1, fair=fair) == 0.0
        assert top_share(np.array(scores), 0, [1]) == 0.0
        for better in (0, 1):  # JudgeBench gives B a tie, but no missing score
            rows = [item("1", "mmlu-pro", scores, [(better, 1 - better)])]
            assert values("judgebench", rows)["JudgeBench"] == 0.0
    rows = [ties("ref", 1, [2.0], [1.0]), ties("tied", 1, [2.0, math.nan], [1.0])]
    assert values("rewardbench2", rows)["Ties"] == pytest.approx(0.3)
    rows = [ties("ref", 1, [math.nan], [0.0, 0.0]), ties("tied", 1, [5.0, 5.1, 5.2], [0.0, 0.0])]
    assert values("rewardbench2", rows)["Ties"] == pytest.approx(0.5), "whatever is made with the gap of ref is lost"


SHAPES: dict[str, Callable[[int], tuple[str, int, Sequence[tuple[int, int]]]]] = {
    "rewardbench": lambda n: (("hep-go", "math-prm", "mt-bench-hard")[n % 3], 2, all_pairs(1, 1)),
    "rewardbench2": lambda n: (("Focus", "Math")[n % 2], 4, all_pairs(1, 3)),
    "rm-bench": lambda n: (("chat", "safety")[n % 2], 6, all_pairs(3, 3)),
    "judgebench": lambda n: (("mmlu-pro", "livecodebench")[n % 2], 2, [(n % 2, 1 - n % 2)]),
    "ppe": lambda n: (("MATH", "GPQA", "human preference")[n % 3], 4, [(0, 1), (2, 3)]),
    "rmb": lambda n: (("Helpfulness BoN", "Helpfulness pairwise")[n % 2], 3, all_pairs(1, 2)),
    "llmbar": lambda n: (("Natural", "Manual")[n % 2], 2, all_pairs(1, 1)),
    "hhh": lambda n: (("honest", "other")[n % 2], 2, all_pairs(1, 1)),
}


Drawn = list[list[float]]
small_suites = st.lists(st.lists(st.integers(-2, 2).map(float), min_size=6, max_size=6), min_size=2, max_size=9)
"""Six scores for each row, of which many are equal; a suite takes as many as its rows have replies."""


def rows_of(suite: str, drawn: Drawn) -> list[Row]:
    rows = []
    for n, scores in enumerate(drawn):
        subset, replies, pairs = SHAPES[suite](n)
        rows.append(item(f"row {n}", subset, scores[:replies], pairs, cluster=f"prompt {n // 2}"))
    return rows


@pytest.mark.slow
@given(st.sampled_from(sorted(SHAPES)), small_suites, st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_the_order_of_rows_changes_no_number(suite: str, drawn: Drawn, seed: int) -> None:
    rows = rows_of(suite, drawn)
    shuffled = [rows[n] for n in np.random.default_rng(seed).permutation(len(rows))]

    def judged(several: list[Row]) -> object:
        result = judge_suite(
            suite, [one for one, _ in several], [np.array(scores) for _, scores in several], num_draws=20
        )
        return repr(result)

    assert judged(rows) == judged(shuffled)


def test_rows_in_another_place_have_the_same_intervals() -> None:
    """Suites without ids name their rows by file and line, so another order of the lines gives other ids."""
    names = ("honest", "other", "helpful", "harmless")
    draw = np.random.default_rng(3)
    scores = [draw.integers(0, 3, 2).astype(np.float64) for _ in range(60)]
    order = draw.permutation(60)

    def judged(places: Sequence[int]) -> dict[str, str]:
        rows = [
            item(f"test.jsonl:{place:03d}", names[row % 4], scores[row], [(0, 1)], cluster=f"prompt {row}")[0]
            for place, row in enumerate(places)
        ]
        return {row.name: repr(row) for row in judge_suite("hhh", rows, [scores[row] for row in places]).rows}

    assert judged(range(60)) == judged(order.tolist())


@given(st.sampled_from(sorted(SHAPES)), small_suites, st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_rising_transform_of_the_scores_changes_no_rule_of_order(suite: str, drawn: Drawn, fair: bool) -> None:
    rows = rows_of(suite, drawn)  # without the Ties subset, the only one whose rule has sizes in it
    transformed = [(one, [math.exp(score) * 1000 - 7 for score in scores]) for one, scores in rows]
    assert values(suite, rows, fair=fair) == values(suite, transformed, fair=fair)


@pytest.mark.slow
@given(st.sampled_from(sorted(SHAPES)), small_suites)
@settings(max_examples=20, deadline=None)
def test_breaking_ties_at_random_is_the_mean_over_tie_breaks(suite: str, drawn: Drawn) -> None:
    rows = rows_of(suite, drawn)
    draw = np.random.default_rng(0)
    mean: dict[str, list[float]] = {}
    for _ in range(100):
        broken = [(one, (np.array(scores) + draw.uniform(0, 0.5, len(scores))).tolist()) for one, scores in rows]
        for name, value in values(suite, broken).items():
            mean.setdefault(name, []).append(value)
    fair = values(suite, rows, fair=True)
    for name, several in mean.items():
        assert fair[name] == pytest.approx(np.mean(several), abs=max(6 * np.std(several) / 10, 1e-9))


def test_ties_broken_at_random_in_the_ties_subset_too() -> None:
    """The accuracy terms; those on gaps are comparisons of two numbers and not of replies."""
    rows = [ties("ref", 1, [1.0], [1.0, 1.0, 0.0]), ties("tied", 1, [1.0, 1.0, 2.0], [1.0, 0.0])]
    fair = outcome("rewardbench2", rows, fair=True)
    draw = np.random.default_rng(1)
    found = {"ref": 0.0, "tied": 0.0}
    for _ in range(4000):
        for kind, (one, scores) in zip(found, rows, strict=True):
            broken = np.array(scores) + draw.uniform(0, 0.5, len(scores))
            found[kind] += (broken[list(one.better)].min() > broken[list(one.worse)].max()) / 4000
    for kind, share in found.items():
        assert fair.shares[f"Ties: accuracy of {kind}"].credits_E[0] == pytest.approx(share, abs=0.04)
