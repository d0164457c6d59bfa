"""Ranges that a plan expects: read, held against what is possible and what can be seen, found again in the report."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.study_folders import PLAN, do_all, finished_study, frozen_study, told, train_by_hand, write_plan
from rewardlab.analysis.crossed import Observed
from rewardlab.core.errors import ConfigError
from rewardlab.experiments.bands import Bands, band_verdict
from rewardlab.experiments.checking import check
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.one_run import do
from rewardlab.experiments.plan_bands import read_band
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.reporting import tables
from rewardlab.experiments.reporting.files import json_report
from rewardlab.experiments.reporting.page import page
from rewardlab.experiments.reporting.pictures import arm_charts
from rewardlab.experiments.reporting.summary import summarise
from rewardlab.experiments.reporting.text import text_report
from rewardlab.experiments.study import open_study
from rewardlab.report.markdown import markdown_page

PLANS = Path(__file__).resolve().parents[2] / "examples" / "plans"


def with_bands(bands: str, plan: str = PLAN) -> str:
    """The plan with other bands."""
    return re.sub(r"bands:\n.*\n", f"bands: {bands}\n", plan)


def record(*values: float) -> Observed:
    return Observed(by_seed_S=np.array(values, dtype=np.float64), seeds=tuple(range(len(values))), varies="always")


# --- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "wanted `failure` and `success`, two numbers, or `expected"),
        ({"failure": 0.5, "expected": [0.5, 0.6]}, "wanted `failure` and `success`"),
        ({"expected": 0.5}, "expected: wanted two numbers, the smaller first, got 0.5"),
        ({"expected": [0.6, 0.5]}, "the smaller first"),
        ({"expected": [0.5, 0.5]}, "the smaller first"),
        ({"expected": [0.5, 0.6, 0.7]}, "wanted two numbers"),
        ({"expected": [0.5, True]}, "wanted two numbers"),
        ({"expected": [0.5, float("nan")]}, "wanted two numbers"),
        ({"expected": "0.5 to 0.6"}, "wanted two numbers"),
        ({"expected": [0.5, 10**400]}, "wanted two numbers"),
        ({"failure": 10**400, "success": 1.0}, "wanted two numbers"),
        ({"expected": ["1e-5", 1.0]}, r"YAML reads 1e-5 as a text: write 1\.0e-5"),
    ],
)
def test_a_band_that_cannot_be_meant_is_refused_with_its_place(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"plan: bands.accuracy.a.: .*{why}"):
        read_band("accuracy(a)", values, "plan: bands.accuracy(a)")


def test_edges_and_a_range_may_stand_alone_or_together_and_a_scale_unsets_them() -> None:
    ranges = {band.about: (band.failure, band.expected) for band in read_plan(PLANS / "lora.yaml").bands}
    assert ranges["accuracy(lora_r8)"] == (None, (0.60, 0.63))
    both = {band.about: band for band in read_plan(PLANS / "baselines.yaml").bands}["stopped_at(together)"]
    assert (both.failure, both.success, both.expected) == (900, 600, (400, 600))
    assert read_plan(PLANS / "lora.yaml", scale="tiny").bands == ()
    (left,) = [band for band in read_plan(PLANS / "ablation.yaml", scale="tiny").bands if "A4" in band.about][:1]
    assert left.expected is None, "what is expected of a 7B model is not expected of a tiny one"


@pytest.mark.parametrize(
    ("bands", "level", "why"),
    [
        ("{accuracy(smooth): {expected: [1.1, 1.2]}}", "error", "expected 1.1 to 1.2: no possible values support it"),
        ("{accuracy(smooth): {expected: [0, 1]}}", "error", "expected 0 to 1: no possible values refute it"),
        ("{stopped_at(smooth): {expected: [500, 600]}}", "error", "is 400 in every run without early stopping"),
        ("{gap(smooth): {expected: [0, 0.1]}}", "error", "gap(smooth) is not measured: set train_eval_limit"),
        ("{gap(smooth): {failure: 0.2, success: 0.1}}", "error", "gap(smooth) is not measured: set train_eval_limit"),
        ("{'accuracy(smooth, step=30)': {expected: [0.5, 0.7]}}", "error", "smooth is evaluated every 40 steps"),
        ("{acuracy(smooth): {expected: [0.5, 0.7]}}", "error", "Did you mean accuracy"),
        ("{accuracy(smooth): {expected: [0.2, 0.9]}}", "error", ""),
        ("{peak_memory(smooth): {expected: [4, 5]}}", "error", ""),
    ],
)
def test_a_range_that_nothing_or_everything_meets_keeps_a_plan_from_being_frozen(
    tmp_path: Path, bands: str, level: str, why: str
) -> None:
    found = told(tmp_path, with_bands(bands), level)
    assert [why in one for one in found] == ([True] if why else []), found


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ("accuracy(plain", "it is not an expression ('(' was never closed):"),
        ("accuracy(plan)", "'accuracy(plan)' asks the arm 'plan', which the plan does not have. Did you mean plain?"),
        ("accuracy(plain) > 0.5", "it holds something other than quantities of arms"),
        ("2 * accuracy(plain)", "it holds something other than one quantity of an arm, such as accuracy(full)"),
    ],
)
def test_what_is_wrong_with_the_name_of_a_band_is_shown_in_what_was_written(
    tmp_path: Path, about: str, why: str
) -> None:
    text = with_bands(f"{{'{about}': {{expected: [0.5, 0.8]}}}}")
    (error,) = told(tmp_path, text, "error")
    assert error.startswith(f"bands: '{about}': {why}")
    assert "> 0\n" not in error
    assert not told(tmp_path, f"{text}assume: {{test_comparisons: 1000, test_prompts: 1000}}\n", "warning")


def test_ranges_that_are_narrower_than_the_design_sees_share_a_warning(tmp_path: Path) -> None:
    sizes = "assume: {test_comparisons: 1000, test_prompts: 1000}\n"
    narrow = "{accuracy(plain): {expected: [0.6, 0.62]}, accuracy(smooth): {expected: [0.7, 0.72]}}"
    (warning,) = told(tmp_path, with_bands(narrow) + sizes, "warning")
    assert "would hardly be shown to be inside: accuracy(plain), accuracy(smooth) (0.02 wide; 0.1" in warning
    assert not told(tmp_path, with_bands("{accuracy(plain): {expected: [0.5, 0.8]}}") + sizes, "warning")


def test_a_band_of_an_arm_that_is_left_out_is_told(tmp_path: Path) -> None:
    text = with_bands("{accuracy(harsh): {expected: [0.2, 0.9]}}") + "scales: {small: {leave_out: [harsh]}}\n"
    problems = check(read_plan(write_plan(tmp_path, text), scale="small")).problems
    assert "bands: accuracy(harsh) is not looked at at this scale: no harsh" in [one.text for one in problems]


# --- verdicts ------------------------------------------------------------------------------------------------------


def test_the_ends_of_a_range_are_inside_and_more_than_expected_is_above() -> None:
    bands = Bands(term=Term("seconds", "a"), expected=(4.0, 6.0))
    assert [bands.place(value) for value in (3.9, 4.0, 5.0, 6.0, 6.1)] == [
        *("below", "inside", "inside", "inside", "above"),
    ]
    inside = band_verdict(bands, record(5.0, 5.1, 4.9))
    assert (inside.at, inside.allowed, inside.place, inside.places) == (None, (), "inside", ("inside",))
    assert inside.sentence.startswith("seconds(a) is 5: inside: 4 to 6 expected (95% interval 4.7")
    assert band_verdict(bands, record(9.0, 9.1, 8.9)).places == ("above",)
    wide = band_verdict(bands, record(3.0, 5.0, 7.0))
    assert (wide.place, wide.places) == ("inside", ("below", "inside", "above"))
    assert "inside, but below or above is possible" in wide.sentence


def test_without_an_interval_no_place_is_excluded() -> None:
    alone = band_verdict(Bands(term=Term("seconds", "a"), expected=(4.0, 6.0)), record(5.0))
    assert (alone.place, alone.places) == ("inside", ("below", "inside", "above"))
    assert "no interval" in alone.sentence


# --- the report ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_report_says_where_each_quantity_lies_beside_what_was_expected(tmp_path: Path) -> None:
    bands = (
        "{accuracy(smooth): {failure: 0.58, success: 0.63, expected: [0.5, 0.6]}, accuracy(harsh): "
        "{expected: [0.3, 0.9]}, seconds(plain): {failure: 90, success: 70}}"
    )
    found = summarise(finished_study(tmp_path, with_bands(bands)))
    sheet = tables.bands(found)
    assert sheet.header == ("quantity", "mean", "band", "failure", "success", "expected", "found")
    rows = {row[0]: row[2:] for row in sheet.rows}
    assert rows["accuracy(smooth)"] == ("success", "< 0.58", "> 0.63", "0.5 to 0.6", "above")
    assert rows["accuracy(harsh)"] == ("", "", "", "0.3 to 0.9", "inside")
    assert rows["seconds(plain)"][1:] == ("> 90", "< 70", "", "")
    assert "Expected: the range that the plan named before its runs." in text_report(found)
    assert "0.5 to 0.6" in markdown_page(page(found))
    told_of = {one["about"]: one for one in json.loads(json.dumps(json_report(found)))["bands"]}
    assert told_of["accuracy(smooth)"]["expected"] == [0.5, 0.6]
    assert told_of["accuracy(smooth)"]["verdict"]["places"] == ["above"]


@pytest.mark.slow
def test_a_plan_without_ranges_or_without_edges_has_no_columns_for_them(tmp_path: Path) -> None:
    found = summarise(finished_study(tmp_path / "edges"))
    assert tables.bands(found).header == ("quantity", "mean", "band", "failure", "success")
    found = summarise(finished_study(tmp_path / "ranges", with_bands("{accuracy(plain): {expected: [0.2, 0.9]}}")))
    assert tables.bands(found).header == ("quantity", "mean", "expected", "found")
    (chart,) = arm_charts(summarise(finished_study(tmp_path / "again")))
    assert (chart.bands, chart.notes) == ((), ())


@pytest.mark.slow
def test_the_chart_of_the_arms_shows_what_was_expected(tmp_path: Path) -> None:
    bands = "{accuracy(smooth): {expected: [0.2, 0.4]}, accuracy(plain): {failure: 0.5, success: 0.6}}"
    found = summarise(finished_study(tmp_path, with_bands(bands)))
    (chart,) = arm_charts(found)
    (area,) = chart.bands
    assert area.null, "it is no interval"
    assert {y for _, y in area.outline} == {0.2, 0.4}
    assert {round(x) for x, _ in area.outline} == {2}, "at the place of the second arm"
    assert chart.y.low <= 0.2
    assert "Expected: smooth 0.2 to 0.4." in chart.words


@pytest.mark.slow
def test_what_has_no_value_yet_says_why(tmp_path: Path) -> None:
    study = frozen_study(tmp_path, with_bands("{accuracy(harsh): {expected: [0.2, 0.4]}}"))
    do_all(study, [run for run in study.runs if run.arm != "harsh"])
    sheet = tables.bands(summarise(open_study(study.folder)))
    assert [row[2:] for row in sheet.rows] == [("0.2 to 0.4", "—")]
    assert any(note.startswith("accuracy(harsh): ") for note in sheet.notes)
    for run in study.runs:
        if run.arm == "harsh":
            do(study, run, train_by_hand("harsh", 0.3))
    sheet = tables.bands(summarise(open_study(study.folder)))
    assert [row[3] for row in sheet.rows] == ["inside"]


# --- the shipped plans ---------------------------------------------------------------------------------------------


def test_what_stopping_is_expected_to_do_is_claimed_of_step_time_and_accuracy() -> None:
    plan = read_plan(PLANS / "ablation.yaml")
    assert {name: one.claim for name, one in plan.hypotheses.items() if name.startswith("H5")} == {
        "H5": "stopped_at(A4) < 900",
        "H5_time": "seconds(A4) < seconds(A3)",
        "H5_best": "accuracy(A4) >= accuracy(A3) - 0.02",
    }
    without = {**plan.arms["A4"].settings}
    assert without.pop("early_stopping_patience") == 5
    assert without == plan.arms["A3"].settings, "nothing else differs"
    stops = {band.about: band for band in plan.bands}["stopped_at(A4)"]
    assert (stops.failure, stops.success, stops.expected) == (900, 600, (400, 600))


def test_every_arm_of_the_ablation_and_every_rank_has_the_range_that_was_expected() -> None:
    ablation = {band.about: band.expected for band in read_plan(PLANS / "ablation.yaml").bands}
    assert {f"accuracy(A{number})" for number in range(1, 6)} <= {about for about, own in ablation.items() if own}
    lora = {band.about: band.expected for band in read_plan(PLANS / "lora.yaml").bands}
    for arm, accuracy, memory in (
        ("full", (0.63, 0.65), (7, 9)),
        ("lora_r8", (0.60, 0.63), (3, 5)),
        ("lora_r16", (0.61, 0.64), (4, 6)),
    ):
        assert (lora[f"accuracy({arm})"], lora[f"peak_memory({arm})"]) == (accuracy, memory)


@pytest.mark.parametrize("scale", [None, "tiny"])
def test_controls_are_expected_to_show_what_the_guidelines_say(scale: str | None) -> None:
    expected = {band.about: band.expected for band in read_plan(PLANS / "diagnostics.yaml", scale=scale).bands}
    assert expected["accuracy(label_shuffle)"] == expected["accuracy(prompt_only)"] == (0.45, 0.55)
    assert expected["loss(label_shuffle)"] is not None
    assert expected["loss(label_shuffle)"][0] < math.log(2) < expected["loss(label_shuffle)"][1]
    assert expected["accuracy(random_negatives)"] == (0.50, 0.60)
    assert ("train_accuracy(random_negatives)" in expected) == (scale is None), "a head alone learns less by heart"
