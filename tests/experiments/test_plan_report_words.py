"""What a report says in words: failures once, by arm and reason; one thing in the singular; names that were given."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.study_folders import do_all, finished_study, frozen_study, write_plan
from rewardlab.core.errors import RewardlabError
from rewardlab.experiments.checking import check
from rewardlab.experiments.one_run import do
from rewardlab.experiments.part_verdict import brief
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.reporting import tables
from rewardlab.experiments.reporting.page import page
from rewardlab.experiments.reporting.summary import summarise
from rewardlab.experiments.reporting.text import text_report
from rewardlab.experiments.study import Study, freeze, open_study
from rewardlab.experiments.words import check_report
from rewardlab.report.markdown import markdown_page

BASE = "base: {model: m, dataset: [train.jsonl], test_dataset: [test.jsonl], eval_fraction: 0.1, steps: 400}\n"
HEAD = f"title: Words\nquestion: What is said?\n{BASE}"


def fail(study: Study, run: str, why: str) -> None:
    def fails(arguments: object) -> None:
        raise RewardlabError(why)

    with pytest.raises(RewardlabError):
        do(study, study.run_named(run), fails)


def test_failures_are_told_once_by_arm_and_reason(tmp_path: Path) -> None:
    study = frozen_study(tmp_path, f"{HEAD}seeds: 2\narms: {{fine: {{}}, wild: {{lr: 1.0}}, gone: {{lr: 2.0}}}}\n")
    for seed in (0, 1):
        fail(study, f"wild/seed_{seed}", f"step {11 + seed}: gradient norm nan. Look at these rows.")
        fail(study, f"gone/seed_{seed}", "no such file.")
    do_all(study, [run for run in study.runs if run.arm == "fine"])
    found = summarise(open_study(study.folder))
    assert [one.text for one in found.deviations] == [
        "2 of 6 runs failed: wild (seeds 0, 1). RewardlabError: step 11: gradient norm nan. Look at these rows (so "
        "wild/seed_0; the others differ in numbers alone).",
        "2 of 6 runs failed: gone (seeds 0, 1). RewardlabError: no such file.",
    ]
    for form in (" ".join(text_report(found).split()), markdown_page(page(found))):
        assert form.count("no such file") == 1
        assert "To be mended: wild (seeds 0, 1); gone (seeds 0, 1)" in form


def test_a_plan_without_a_title_keeps_the_name_of_its_file(tmp_path: Path) -> None:
    path = write_plan(tmp_path, f"question: What?\n{BASE}arms: {{a: {{}}}}\n").rename(tmp_path / "rates.yaml")
    assert freeze(path, tmp_path / "study").plan.title == "rates"
    assert summarise(open_study(tmp_path / "study")).title == "rates"


def test_one_of_anything_is_said_in_the_singular(tmp_path: Path) -> None:
    text = f"{HEAD}seeds: 1\narms: {{a: {{}}}}\nhypotheses: {{good: accuracy(a) > 0.5}}\n"
    checked = check(read_plan(write_plan(tmp_path, text)))
    assert "1 run of 1 arm in 1 phase\n" in check_report(checked)
    assert "1 seed; 3 are the fewest that show their noise. By one, intervals are over" in check_report(checked)
    wrong = check(read_plan(write_plan(tmp_path, text.replace("accuracy(a)", "accuracy(b)"))))
    assert len(wrong.errors) == 1
    assert "1 error: mend" in check_report(wrong)


def test_what_a_check_says_fits_the_report_s_width_and_begins_without_a_blank_line(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    report, told = check_report(check(study.plan)), text_report(summarise(study))
    assert max(map(len, report.splitlines())) <= 100
    assert re.search(r"^warning: .{60,}\n  \S", report, re.MULTILINE), "further lines are indented"
    assert report[0] != "\n" != told[0]


def test_intervals_of_several_kinds_name_their_columns(tmp_path: Path) -> None:
    told = text_report(summarise(finished_study(tmp_path)))
    table = next(block for block in told.split("\n\n") if block.startswith("Health"))
    assert "\nECE on test: 95% intervals: t interval over 3 seeds and " in table
    assert "\nlast step, chosen step: 95% intervals: the same in 3 seeds" in table


@pytest.mark.slow
def test_a_single_test_is_adjusted_over_nothing_and_a_search_is_called_once(tmp_path: Path) -> None:
    phases = (
        "phases: [{name: search, seeds: [7, 8], search: {grid: {lr: [1e-6, 1e-5, 1e-4]}}}, {name: m, arms: [a, b]}]"
    )
    text = f"{HEAD}arms: {{a: {{}}, b: {{lr: 1e-3}}}}\nbaseline: a\n{phases}\nhypotheses: {{good: accuracy(a) > 0.5}}\n"
    said = " ".join(text_report(summarise(finished_study(tmp_path, text))).split())
    assert "p: two-sided. " in said
    assert "over 1" not in said
    assert "search search" not in said
    assert "arms of the search: each setting by itself, those that always change together as one" in said


def test_seconds_are_called_those_of_training_steps(tmp_path: Path) -> None:
    found = summarise(finished_study(tmp_path, f"{HEAD}seeds: 2\narms: {{a: {{}}}}\n"))
    said = " ".join(text_report(found).split())
    assert "seconds in training steps" in said
    assert "loading, evaluating and saving come on top" in said


@pytest.mark.parametrize(("seeds", "told"), [(1, "Every arm had one seed"), (2, "crossed random effects")])
def test_intervals_are_over_seeds_only_where_there_are_several(tmp_path: Path, seeds: int, told: str) -> None:
    found = summarise(finished_study(tmp_path, f"{HEAD}seeds: {seeds}\narms: {{a: {{}}}}\n"))
    assert told in " ".join(markdown_page(page(found)).split())


@pytest.mark.parametrize(("seeds", "whose"), [(1, " for these runs alone"), (2, "")])
def test_verdicts_of_arms_with_one_seed_are_said_to_be_of_these_runs_wherever_they_stand(
    tmp_path: Path, seeds: int, whose: str
) -> None:
    claims = "baseline: a\nhypotheses: {better: accuracy(b) > accuracy(a), worse: accuracy(b) < accuracy(a)}\n"
    study = frozen_study(tmp_path, f"{HEAD}seeds: {seeds}\narms: {{a: {{}}, b: {{}}}}\n{claims}")
    do_all(study, study.runs, skills={"a": 0.5, "b": 0.95}, noise=0.02)
    found = summarise(open_study(study.folder))
    assert found.headline.startswith(f"Of 2 hypotheses: 1 supported{whose}, 1 refuted{whose}.")
    assert [row[1] for row in tables.verdicts(found.hypotheses).rows] == [f"supported{whose}", f"refuted{whose}"]
    assert f"Supported{whose} (p" in " ".join(text_report(found).split())


def test_an_undecided_claim_that_fails_is_not_said_to_hold_and_no_size_is_rounded_to_zero(tmp_path: Path) -> None:
    claims = "baseline: a\nhypotheses: {better: ece(b) > ece(a)}\n"
    text = f"{HEAD}seeds: 2\narms: {{a: {{}}, b: {{}}, c: {{}}}}\n{claims}"
    study = frozen_study(tmp_path, text)
    do_all(study, [run for run in study.runs if run.arm != "c"], skills={"a": 0.76, "b": 0.75}, noise=0.9)
    found = summarise(open_study(study.folder))
    (verdict,) = (one.verdict for one in found.hypotheses)
    (part,) = verdict.parts
    assert verdict.verdict == "undecided"
    assert part.estimate.value < 0 < part.estimate.high
    (said,) = [one.because for one in found.advice if one.do.startswith("To decide better")]
    assert said.startswith(f"ece(b) > ece(a) fails by {-part.estimate.value:.4f} [{-part.estimate.high:.4f}, ")
    assert "fails by " in verdict.sentence
    equal = replace(part, estimate=replace(part.estimate, value=-1e-17))
    assert brief(equal).startswith("the sides of ece(b) > ece(a) are equal [")
    small = replace(part, estimate=replace(part.estimate, value=0.055, low=-0.000687, high=0.111))
    assert brief(small) == "ece(b) > ece(a) holds by 0.055 [-0.001, 0.111]"
    small = replace(small, estimate=replace(small.estimate, value=0.0002, low=-0.00012))
    assert brief(small) == "ece(b) > ece(a) holds by 0.0002 [-0.0001, 0.111]", "the sign is kept"
    large = replace(part, estimate=replace(part.estimate, value=-51234.4, low=-61000.0, high=-4.2))
    assert brief(large) == "ece(b) > ece(a) fails by 51,234 [4, 61,000]"
    assert "at the default rate of the model." in found.methods
    assert "adjusted" not in " ".join(tables.against_baseline(found).notes), "only one difference has a p-value"
