"""The tables of a suite fit a terminal, and say what was counted, left out and missing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rewardlab.analysis.suites.judging import SuiteResult, judge_suite
from rewardlab.core.suites import SuiteItem, all_pairs
from rewardlab.report.suites import suite_report


def judged(*, subset: str = "livebench-reasoning", tie: bool = False, lost: int = 0) -> SuiteResult:
    """Forty pairs of JudgeBench, of which the model is right on three quarters."""
    draw = np.random.default_rng(0)
    items, scores = [], []
    for n in range(40):
        lengths = draw.integers(10, 90, 2).tolist()
        name = subset if n % 2 else "mmlu-pro (claude-3-5-sonnet-20240620)" if n % 4 else "mmlu-pro"
        items.append(
            SuiteItem(
                id=str(n), subset=name, cluster=str(n), prompt=(), replies=tuple("x" * k for k in lengths),
                pairs=all_pairs(1, 1),
            )
        )  # fmt: skip
        low = 0.0 if n % 8 < 6 else 1.0 if tie else 2.0
        scores.append(np.array([math.nan if n < lost else 1.0, low]))
    return judge_suite("judgebench", items, scores, num_draws=50)


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_the_tables_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, suite_report(judged(tie=True)).splitlines())) <= columns


def test_every_row_has_an_interval_and_totals_are_marked() -> None:
    report = suite_report(judged())
    totals = [line for line in report.splitlines() if line.startswith("= JudgeBench")]
    assert totals
    assert all("% [" in total and "[—]" not in total for total in totals)


def test_ties_have_a_table_only_where_they_change_a_number() -> None:
    assert "With ties broken at random" in suite_report(judged(tie=True))
    assert "With ties broken at random" not in suite_report(judged())


def test_what_was_left_out_cut_or_lost_is_said() -> None:
    report = " ".join(
        suite_report(judged(lost=3), left_out={"votes for a tie": 7}, causes={"too long": 3}, truncated=1234).split()
    )
    assert "3 replies in 3 rows have no score (3 too long). Each comparison with one of them counts as lost." in report
    assert "Left out by the suite's rule: 7 rows (votes for a tie)." in report
    assert "The prompts of 1,234 replies were cut" in report
    assert "livebench-reasoning 20 of 98" in report


def test_names_from_data_cannot_write_to_the_terminal() -> None:
    assert "\x1b" not in suite_report(judged(subset="\x1b[31mred"))
