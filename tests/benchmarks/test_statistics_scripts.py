"""Simulations behind the intervals and tests run on few draws, and name every kind of data that is not as wanted."""

from __future__ import annotations

import json

import pytest

import coverage
import coverage_count
import coverage_judged
import coverage_measures
import coverage_paired
import judge_rows
import mislabels_worth
import paired_tests
import verdict_levels
from benchmark_results import page_in, result


@pytest.mark.slow
def test_the_tests_of_a_comparison_are_tried_on_every_kind_of_data(tmp_path, capsys):
    kinds = ["size", "tost", "correlations"]
    assert paired_tests.main(["--draws", "3", "--results", str(tmp_path), "--kinds", *kinds]) == 0
    (path,) = tmp_path.glob("paired_tests.*.json")
    cells = json.loads(path.read_text())["cells"]
    assert set(cells) == set(kinds)
    assert all(0 <= cell["rate"] <= 1 for kind in cells.values() for cell in kind)
    page = path.with_suffix(".md").read_text()
    outside = [cell for kind in cells.values() for cell in kind if not cell["low"] <= cell["rate"] <= cell["high"]]
    assert all(cell["case"] in page for cell in outside)


@pytest.mark.slow
def test_coverage_of_every_kind_of_interval(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(coverage, "PROMPTS", (10, 15))
    assert coverage.main(["--draws", "8", "--results", str(tmp_path), "--kinds", *coverage.KINDS]) == 0
    cells = result(tmp_path)["cells"]
    assert set(cells) == set(coverage.KINDS)
    assert all(cell["width"] > 0 and 0 <= cell["coverage"] <= 1 for kind in cells.values() for cell in kind)
    page = page_in(tmp_path)
    outside = [cell for kind in cells.values() for cell in kind if not 0.93 <= cell["coverage"] <= 0.97]
    assert outside
    assert all(cell["case"] in page for cell in outside), "every kind of data whose coverage is wrong is named"
    assert "Accuracy by prompt" in capsys.readouterr().out


@pytest.mark.slow
def test_coverage_of_statistics_that_are_no_means(tmp_path, monkeypatch):
    monkeypatch.setattr(coverage_measures, "PROMPTS", (15,))
    flags = ["--draws", "4", "--slow-draws", "2", "--truth-prompts", "2000", "--results", str(tmp_path)]
    assert coverage_measures.main([*flags, "--designs", "plain", "soft labels"]) == 0
    cells = result(tmp_path)["cells"]
    assert {"AUC", "Spearman", "calibration slope", "Brier, miscalibration"} <= set(cells)
    assert {"accuracy, macro, small sources", "accuracy, soft, few certain labels"} <= set(cells)
    assert all(cell["width"] >= 0 and 0 <= cell["coverage"] <= 1 for kind in cells.values() for cell in kind)


@pytest.mark.slow
def test_coverage_of_further_intervals_of_a_judgement(tmp_path, monkeypatch):
    monkeypatch.setattr(coverage_judged, "PROMPTS", (15,))
    monkeypatch.setattr(coverage_judged, "EACH", (4,))
    monkeypatch.setattr(coverage_judged, "ECE_PROMPTS", (15,))
    assert coverage_judged.main(["--draws", "4", "--large", "300", "--results", str(tmp_path)]) == 0
    cells = result(tmp_path)["cells"]
    assert {"gold: eval_kendall_tau", "comparisons: eval_regret", "AUROC of disagreement", "change of NLL"} <= set(
        cells
    )
    assert {"ECE by prompt", "null band of ECE"} <= set(cells)
    assert all(cell["width"] >= 0 and 0 <= cell["coverage"] <= 1 for kind in cells.values() for cell in kind)


@pytest.mark.slow
def test_coverage_of_comparisons_of_changed_texts_and_of_matches(tmp_path, monkeypatch):
    monkeypatch.setattr(coverage_paired, "PROMPTS", (15,))
    monkeypatch.setattr(coverage_paired, "SHAPES", ("4 each",))
    assert coverage_paired.main(["--draws", "4", "--large", "300", "--results", str(tmp_path)]) == 0
    cells = result(tmp_path)["cells"]
    assert {"difference of accuracies", "changed texts: shift", "gold: match rate"} <= set(cells)
    assert len(cells["difference of NLL"]) == len(coverage_paired.MODELS)
    assert all(cell["width"] >= 0 and 0 <= cell["coverage"] <= 1 for kind in cells.values() for cell in kind)


@pytest.mark.slow
def test_what_removing_flagged_rows_is_said_to_be_worth(tmp_path):
    asked = ["--draws", "2", "--pairs", "100", "--results", str(tmp_path), "--kinds", "nothing to learn"]
    assert mislabels_worth.main(asked) == 0
    (cells,) = result(tmp_path)["cells"].values()
    assert [cell["against"] for cell in cells] == ["all rows", "without as many random"]
    assert all(cell["truth"] == 0 < cell["removed"] and 0 <= cell["coverage"] <= 1 for cell in cells)


@pytest.mark.slow
def test_levels_of_verdicts_are_tried_on_every_kind_of_data_and_one_that_is_not_kept_is_an_error(tmp_path, monkeypatch):
    kinds = [kind for kind in verdict_levels.KINDS if not kind.startswith("lengths")] + ["lengths_found"]
    asked = ["--draws", "1", "--results", str(tmp_path), "--kinds", *kinds]
    monkeypatch.setattr(verdict_levels, "most", lambda draws: 1.0)
    assert verdict_levels.main(asked) == 0
    cells = result(tmp_path)["cells"]
    assert set(cells) == set(kinds)
    assert all(cell["case"] in page_in(tmp_path) for kind in cells.values() for cell in kind)
    monkeypatch.setattr(verdict_levels, "most", lambda draws: -1.0)
    assert verdict_levels.main([*asked[:4], "--kinds", "shuffled"]) == 1


@pytest.mark.slow
def test_what_judging_rows_costs(tmp_path):
    assert judge_rows.main(["--rows", "400", "--draws", "5", "--rounds", "2", "--results", str(tmp_path)]) == 0
    found = result(tmp_path)
    assert set(found["kinds"]) == set(judge_rows.KINDS)
    assert found["failed"] == []
    assert "| pairs | 400 | 200 | **" in page_in(tmp_path)


def test_the_pages_count_the_cells_of_the_records() -> None:
    page = coverage_count.PAGE
    rows = [line.strip("| ").split(" | ") for line in page.read_text(encoding="utf-8").splitlines() if "](../" in line]
    found = [[label[1 : label.index("]")], *numbers] for label, *numbers in rows if len(numbers) == 4]
    assert found == coverage_count.by_record()
    kinds = page.with_name("intervals.md").read_text(encoding="utf-8")
    assert all(f"| {' | '.join(row)} |" in kinds for row in coverage_count.by_kind())
