"""What a report says of settings, searches and costs, and what it advises."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.study_folders import do_all, finished_study, frozen_study
from rewardlab.experiments.gates import select
from rewardlab.experiments.reporting import tables
from rewardlab.experiments.reporting.pictures import arm_charts, curve_charts
from rewardlab.experiments.reporting.sensitivity import best_of
from rewardlab.experiments.reporting.summary import Summary, summarise
from rewardlab.experiments.reporting.text import text_report
from rewardlab.experiments.study import open_study

HEAD = """\
title: Settings
question: Which settings matter?
base: {model: m, dataset: [train.jsonl], test_dataset: [test.jsonl], eval_fraction: 0.1, steps: 400}
seeds: [0, 1]
"""
GRID = HEAD + "grid: {label_smoothing: [0.0, 0.1], lr: [1.0e-6, 5.0e-6, 1.0e-5]}\n"
SEARCH = (
    HEAD
    + """\
arms: {plain: {label_smoothing: 0.02}}
phases:
  - {name: first, arms: [plain]}
  - {name: tries, seeds: [10, 11], search: {grid: {warmup_steps: [0, 50]}}}
  - {name: last, arms: [winner], seeds: [20, 21]}
hypotheses: {wins: accuracy(winner) > accuracy(plain)}
"""
)


def rising(text: str, folder: Path, **how: object) -> Summary:
    """A finished study whose arms are better the later they come."""
    study = frozen_study(folder, text)
    arms = list(dict.fromkeys(run.arm for run in study.runs))
    do_all(study, study.runs, skills={arm: 0.6 + 0.04 * place for place, arm in enumerate(arms)}, **how)
    return summarise(open_study(study.folder))


@pytest.mark.slow
def test_a_main_effect_is_the_mean_over_all_arms_with_the_value(tmp_path: Path) -> None:
    found = rising(GRID, tmp_path)
    means = {row.arm: row.cells[0].estimate.value for row in found.arms.rows if row.cells[0].estimate}
    (sensitivity,) = found.sensitivities
    assert [effect.setting for effect in sensitivity.effects] == ["lr", "label_smoothing"], "the order of priority"
    for effect in sensitivity.effects:
        for one in effect.values:
            own = [mean for arm, mean in means.items() if f"{effect.setting}={one.value}" in arm.split(",")]
            assert len(own) == effect.sets
            assert one.estimate.value == pytest.approx(sum(own) / len(own))
    rate = sensitivity.effects[0]
    assert rate.best == "1e-05"
    assert rate.best_at_edge
    assert rate.values[0].change is None
    assert rate.values[2].change is not None
    assert rate.values[2].change.value == pytest.approx(rate.values[2].estimate.value - rate.values[0].estimate.value)
    assert "Main effect" in text_report(found)
    assert any("Widen the grid of lr" in one.do and "above 1e-05" in one.do for one in found.advice)


@pytest.mark.parametrize(
    ("setting", "values", "best", "advice"),
    [
        ("label_smoothing", (0.2, 0.1, 0.0), "0", []),
        ("label_smoothing", (0.0, 0.1, 0.2), "0.2", ["above 0.2"]),
        ("max_drop_fraction", (0.1, 0.5, 1.0), "1", []),
        ("warmup_steps", (10, 5, 0), "0", []),
        ("warmup_steps", (10, 5, 1), "1", ["below 1"]),
    ],
)
def test_a_grid_is_not_to_be_widened_beyond_what_there_is(
    tmp_path: Path, setting: str, values: tuple[float, ...], best: str, advice: list[str]
) -> None:
    skills = dict(zip("abc", (0.6, 0.7, 0.8), strict=True))
    arms = "{" + ", ".join(f"{arm}: {{{setting}: {value}}}" for arm, value in zip("abc", values, strict=True)) + "}"
    found = summarise(finished_study(tmp_path, f"{HEAD}arms: {arms}\n", skills=skills))
    (effect,) = found.sensitivities[0].effects
    assert effect.best == best
    told = [one.do for one in found.advice if "Widen the grid" in one.do]
    assert [f"try values {side}." in one for side, one in zip(advice, told, strict=True)] == [True] * len(advice)


def test_several_values_with_the_best_mean_are_a_tie() -> None:
    assert best_of({"0": 0.75, "0.1": 0.75, "0.2": 0.75 + 1e-16}) == ""
    assert best_of({"0": 0.75, "0.1": 0.7, "0.2": 0.75}) == ""
    assert best_of({"0": 0.75, "0.1": 0.75, "0.2": 0.76}) == "0.2"


@pytest.mark.slow
def test_arms_that_share_nothing_else_have_no_effect_of_a_setting(tmp_path: Path) -> None:
    text = HEAD + "arms: {a: {lr: 1e-6, steps: 400}, b: {lr: 1e-5, steps: 300}, c: {lr: 1e-4, batch_size: 8}}\n"
    assert rising(text, tmp_path).sensitivities == ()


@pytest.mark.slow
def test_one_setting_at_a_time_and_settings_that_go_together(tmp_path: Path) -> None:
    arms = "{a: {}, b: {label_smoothing: 0.2}, c: {lora: true, lora_rank: 8}, d: {lora: true, lora_rank: 16}}"
    (found,) = rising(HEAD + f"arms: {arms}\n", tmp_path).sensitivities
    assert {effect.setting: [one.value for one in effect.values] for effect in found.effects} == {
        "label_smoothing": ["0.05", "0.2"],
        "lora_rank": ["8", "16"],
    }
    assert all(effect.sets == 1 for effect in found.effects)
    assert found.unmatched == ("lora",), "adapters of which rank would be held against none?"
    assert all(effect.unmatched == () for effect in found.effects), "an arm without adapters has no rank"


@pytest.mark.slow
def test_arms_without_adapters_are_shown_without_a_rank_and_what_is_off_is_no_default(tmp_path: Path) -> None:
    arms = "{a: {}, b: {early_stopping_patience: 2}, c: {lora: true, lora_rank: 8, lora_alpha: 16}}"
    (found,) = rising(HEAD + f"arms: {arms}\n", tmp_path).sensitivities
    assert {effect.setting: [one.value for one in effect.values] for effect in found.effects} == {
        "early_stopping_patience": ["not set", "2"],
        "lora, lora_alpha, lora_rank": ["False, –, –", "True, 16, 8"],
    }


@pytest.mark.slow
def test_a_winner_is_shown_on_fresh_seeds_beside_the_numbers_that_chose_it(tmp_path: Path) -> None:
    study = finished_study(tmp_path, SEARCH, skills={"warmup_steps=50": 0.9, "warmup_steps=0": 0.6})
    waiting = summarise(study)
    assert not waiting.progress.is_complete
    assert "the runs of the winner" in text_report(waiting)
    select(study, next(phase for phase in study.plan.phases if phase.search))
    study = open_study(study.folder)
    do_all(study, [run for run in study.runs if run.arm == "winner"], skills={"winner": 0.8})
    found = summarise(open_study(study.folder))
    (selection,) = found.selections
    assert (selection.chosen, selection.tried) == ("warmup_steps=50", 2)
    assert [one.arm for one in selection.ranked] == ["warmup_steps=50", "warmup_steps=0"]
    assert selection.fresh is not None
    assert selection.fresh.estimate is not None
    assert selection.fresh.estimate.value < selection.ranked[0].estimate.value
    assert list(selection.fresh.by_seed) == ["20", "21"]
    sheet = tables.selection(selection)
    assert [row[0] for row in sheet.rows] == ["the winner", "the winner", "warmup_steps=50", "warmup_steps=0"]
    assert [row.arm for row in found.arms.rows] == ["plain", "winner"], "arms of the search read no test data"


@pytest.mark.slow
def test_health_is_told_of_every_arm_and_large_gaps_are_advised_on(tmp_path: Path) -> None:
    found = rising(GRID, tmp_path, gap=0.2, sign="overfitting")
    row = found.arms.rows[0]
    costs = {column.quantity: cell for column, cell in zip(found.arms.costs, row.costs, strict=True)}
    assert costs["trainable_share"].estimate is not None
    assert costs["trainable_share"].estimate.method == "exact"
    assert costs["seconds"].estimate is not None
    assert costs["seconds"].estimate.value == 80
    assert costs["gap"].estimate is not None
    assert costs["gap"].estimate.value == pytest.approx(0.2, abs=0.01)
    assert row.signs == {"overfitting": 2}
    assert "overfitting in 2 of 2" in tables.health(found.arms).rows[0]
    advised = [one.because for one in found.advice]
    assert any(text.startswith("gap above 0.1:") and "and 2 more" in text for text in advised)
    assert any("warning sign overfitting" in text for text in advised)
    calm = rising(HEAD + "arms: {a: {}}\n", tmp_path / "calm")
    assert not [one for one in calm.advice if one.because.startswith(("gap", "warning"))]


def test_bands_tell_what_the_interval_leaves_open(tmp_path: Path) -> None:
    text = (
        HEAD
        + "arms: {a: {}}\nbands: {accuracy(a): {failure: 0.5, success: 0.55}, gap(a): {failure: 0.1, success: 0}}\n"
    )
    found = rising(text, tmp_path)
    rows = {row[0]: row for row in tables.bands(found).rows}
    assert rows["accuracy(a)"][3:] == ("< 0.5", "> 0.55")
    assert rows["gap(a)"][3:] == ("> 0.1", "< 0")
    assert rows["gap(a)"][2].startswith("acceptable")


@pytest.mark.slow
def test_charts_hold_every_arm_and_every_seed(tmp_path: Path) -> None:
    found = rising(GRID, tmp_path)
    (chart,) = arm_charts(found)
    assert sum(dot.series == 1 for dot in chart.dots) == 12
    assert sum(dot.series == 0 for dot in chart.dots) == 6
    assert all(row.arm in chart.words for row in found.arms.rows)
    curves = list(curve_charts(found))
    assert sum(len(one.lines) for one in curves) == 12, "accuracy and loss of six arms"
    assert max(len(one.lines) for one in curves) <= 4
    assert "not intervals" in curves[0].words


@pytest.mark.slow
def test_methods_name_model_data_seeds_and_when_it_was_frozen(tmp_path: Path) -> None:
    found = rising(GRID, tmp_path)
    for part in ("from m on train.jsonl", "6 arms of 2 seeds (0, 1)", "1e-06 or 5e-06 or 1e-05", found.frozen.time):
        assert part in found.methods
    assert str(tmp_path) not in found.methods, "a folder of one machine says nothing to a reader"


@pytest.mark.slow
def test_methods_tell_of_the_search_of_gates_and_of_the_size_of_the_data(tmp_path: Path) -> None:
    text = SEARCH.replace("arms: [plain]}", "arms: [plain], gate: {learns: accuracy(plain) > 0.95}}")
    study = frozen_study(tmp_path, text)
    do_all(study, [run for run in study.runs if run.arm == "plain"])
    study.note("gate passed", phase="first", reason="time was short", state="closed")
    study = open_study(study.folder)
    do_all(study, [run for run in study.runs if run.arm != "plain"], skills={"warmup_steps=50": 0.9})
    assert "nothing is chosen yet" in summarise(study).methods
    select(study, next(phase for phase in study.plan.phases if phase.search))
    study = open_study(study.folder)
    do_all(study, [run for run in study.runs if run.arm == "winner"], skills={"winner": 0.8})
    said = summarise(open_study(study.folder)).methods
    for part in (
        "The search tries tried 2 arms with 2 seeds each (10, 11), by accuracy on validation data: warmup_steps=50 was "
        "chosen, and was run again with fresh seeds (20, 21)",
        "The gate of first, on validation data (learns: accuracy(plain) > 0.95), was passed by hand (time was short)",
        "(1,800 preferences after validation data were held out)",
        "chosen on 200 preferences of validation data",
    ):
        assert part in said


def test_methods_describe_runs_that_finished_and_count_the_others(tmp_path: Path) -> None:
    text = HEAD + "arms: {fine: {lr: 1.0e-5}, gone: {lr: 7.0e-3, model: unused-model}}\n"
    study = frozen_study(tmp_path, text)
    assert "trained" not in summarise(study).methods, "nothing was"
    do_all(study, [run for run in study.runs if run.arm == "fine"])
    said = summarise(open_study(study.folder)).methods
    assert "in 1 arm of 2 seeds (0, 1)" in said
    assert "0.007" not in said
    assert "unused-model" not in said
    assert (
        "2 of 4 runs of judged arms are not done, or cannot be read, and are not described here: gone (2 of 2)." in said
    )
