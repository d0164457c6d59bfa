"""What is drawn of a study can be read: every row on its scale, every arm by its name and colour."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.study_folders import PLAN, do_all, finished_study, frozen_study, train_by_hand
from rewardlab.experiments.one_run import do
from rewardlab.experiments.reporting import tables
from rewardlab.experiments.reporting.page import page
from rewardlab.experiments.reporting.pictures import arm_charts, curve_charts, waterfall_chart
from rewardlab.experiments.reporting.summary import Summary, summarise
from rewardlab.experiments.reporting.text import text_report
from rewardlab.experiments.study import open_study
from rewardlab.report.page import html_page

HEAD = """\
title: Charts
question: What is drawn?
base: {model: m, dataset: [train.jsonl], test_dataset: [test.jsonl], eval_fraction: 0.1, steps: 400}
seeds: [0, 1]
"""


@pytest.mark.slow
def test_rows_of_different_units_are_each_drawn_on_a_scale_of_their_own(tmp_path: Path) -> None:
    study = frozen_study(tmp_path, PLAN + "  early: stopped_at(harsh) < 350\n")
    do_all(study, [run for run in study.runs if run.arm != "harsh"])
    for number, run in enumerate(run for run in study.runs if run.arm == "harsh"):
        do(study, run, train_by_hand("harsh", 0.6, last_step=(200, 300, 300)[number]))
    found = summarise(open_study(study.folder))
    sheet = tables.verdicts(found.hypotheses)
    assert sheet.scale is not None
    for drawn, one in zip(sheet.estimates, found.hypotheses, strict=True):
        (part,) = one.verdict.parts
        assert drawn is not None
        assert max(abs(drawn.low), abs(drawn.high)) == pytest.approx(1), "the row fills its scale"
        assert drawn.value * part.estimate.value > 0, "on its side of 0"
        share = drawn.low / drawn.high
        assert share == pytest.approx(part.estimate.low / part.estimate.high)
    html = html_page(page(found))
    assert "each row on its own scale" in html
    assert ">holds</text>" in html


@pytest.mark.slow
def test_no_interval_of_a_step_goes_beyond_the_steps_of_the_runs(tmp_path: Path) -> None:
    bands = "bands:\n  stopped_at(harsh): {failure: 450, success: 350}\n"
    study = frozen_study(tmp_path, re.sub(r"bands:\n.*\n", bands, PLAN))
    do_all(study, [run for run in study.runs if run.arm != "harsh"])
    for number, run in enumerate(run for run in study.runs if run.arm == "harsh"):
        do(study, run, train_by_hand("harsh", 0.6, last_step=(200, 400, 400)[number]))
    found = summarise(open_study(study.folder))
    place = [column.quantity for column in found.arms.costs].index("stopped_at")
    (row,) = [row for row in found.arms.rows if row.arm == "harsh"]
    estimate = row.costs[place].estimate
    assert estimate is not None
    assert (estimate.low < estimate.value, estimate.high) == (True, 400.0)
    (band,) = found.bands
    assert band.verdict is not None
    assert band.verdict.estimate.high == 400
    assert band.verdict.allowed == ("acceptable", "success"), "no run has the 450 steps of a failure"


@pytest.mark.slow
def test_rows_of_one_unit_share_a_scale(tmp_path: Path) -> None:
    found = summarise(finished_study(tmp_path))
    sheet = tables.verdicts(found.hypotheses)
    assert sheet.scale is None
    assert sheet.estimates == tuple(one.verdict.parts[0].estimate for one in found.hypotheses)


def six_arms(folder: Path, names: str = "plain shuffled sched smooth stop winner_of_it") -> Summary:
    """A finished study of six arms, the first of which is the baseline."""
    arms = ", ".join(f"{name}: {{lr: {place}.0e-5}}" for place, name in enumerate(names.split(), start=1))
    text = f"{HEAD}arms: {{{arms}}}\nbaseline: {names.split()[0]}\nwaterfall: [{', '.join(names.split()[:3])}]\n"
    skills = {name: 0.6 + 0.05 * place for place, name in enumerate(names.split())}
    return summarise(finished_study(folder, text, skills=skills))


@pytest.mark.slow
def test_curves_of_many_arms_share_axes_and_the_baseline_and_no_two_arms_share_a_line(tmp_path: Path) -> None:
    found = six_arms(tmp_path)
    for column in ("Accuracy", "Loss"):
        charts = [chart for chart in curve_charts(found) if chart.title.startswith(column)]
        assert len(charts) == 2
        assert charts[0].y == charts[1].y
        assert charts[0].x == charts[1].x
        names = [{name: series for series, name in chart.legend} for chart in charts]
        assert all(own["plain (2 seeds)"] == 0 for own in names)
        together = names[0] | names[1]
        assert len(together) == 6
        assert len(set(together.values())) == 6
        for chart, own in zip(charts, names, strict=True):
            assert [line.series for line in chart.lines] == [number % 4 for number in own.values()]
            assert [line.dashed for line in chart.lines] == [number >= 4 for number in own.values()]
        assert bool(charts[0].rules) == (column == "Accuracy"), "a model without skill may lose any amount"


@pytest.mark.slow
def test_names_of_arms_stand_below_a_chart_where_there_is_room(tmp_path: Path) -> None:
    (chart,) = arm_charts(six_arms(tmp_path / "short"))
    assert chart.x.names == ("plain", "shuffled", "sched", "smooth", "stop", "winner_of_it")
    assert chart.x.staggered, "in two rows, since the last one is long"
    (chart,) = arm_charts(six_arms(tmp_path / "long", " ".join(f"an_arm_with_a_long_name_{n}" for n in range(6))))
    assert chart.x.names == ("1", "2", "3", "4", "5", "6")
    assert "6: an_arm_with_a_long_name_5" in chart.words


@pytest.mark.slow
def test_the_ablation_is_drawn_as_steps_with_the_intervals_of_the_changes(tmp_path: Path) -> None:
    found = six_arms(tmp_path)
    chart = waterfall_chart(found)
    assert chart is not None
    first, *steps = chart.dots
    level = found.arms.rows[0].cells[0].estimate
    assert level is not None
    assert (first.at[1], first.low, first.high) == (level.value, level.low, level.high)
    assert len(steps) == len(found.steps) == len(chart.bands)
    at = level.value
    for dot, block, step in zip(steps, chart.bands, found.steps, strict=True):
        assert step.estimate is not None
        assert {y for _, y in block.outline} == {at, at + step.estimate.value}, "from where the one before ended"
        assert (dot.low, dot.high) == pytest.approx((at + step.estimate.low, at + step.estimate.high))
        at += step.estimate.value
    assert [series for series, _ in chart.legend] == [0, 2], "both steps are for the better"
    equal = replace(found.steps[0], estimate=replace(level, value=0.0))
    chart = waterfall_chart(replace(found, steps=(equal, found.steps[1])))
    assert chart is not None
    assert [series for series, _ in chart.legend] == [0, 2, 3], "a step of 0 is neither better nor worse"


@pytest.mark.slow
def test_what_arms_are_is_said_line_by_line(tmp_path: Path) -> None:
    found = summarise(finished_study(tmp_path))
    assert "\nplain: nothing added\nsmooth: smoothing\nharsh: " in text_report(found)
    assert "<div><dt>plain</dt><dd>nothing added</dd></div><div><dt>smooth</dt>" in html_page(page(found))


def test_arms_of_several_charts_are_numbered_on_and_share_a_scale(tmp_path: Path) -> None:
    names = [f"an_arm_with_a_long_name_{number}" for number in range(12)]
    text = HEAD.replace("seeds: [0, 1]", "seeds: 1") + f"arms: {{{', '.join(f'{name}: {{}}' for name in names)}}}\n"
    skills = {name: 0.55 + 0.03 * number for number, name in enumerate(names)}
    first, second = arm_charts(summarise(finished_study(tmp_path, text, skills=skills)))
    assert [chart.title for chart in (first, second)] == [
        "Accuracy of every arm, 1 of 2",
        "Accuracy of every arm, 2 of 2",
    ]
    assert [*first.x.names, *second.x.names] == [str(number) for number in range(1, 13)]
    assert "12: an_arm_with_a_long_name_11 " in second.words
    assert first.y == second.y
