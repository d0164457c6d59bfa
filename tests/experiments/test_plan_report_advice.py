"""Controls get no advice, and nobody is told to try what another arm of the study has tried."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.study_folders import frozen_study, train_by_hand
from rewardlab.core.files import write_json
from rewardlab.experiments.one_run import do
from rewardlab.experiments.reporting.summary import Summary, summarise
from rewardlab.experiments.study import open_study

HEAD = """\
title: Advice
question: What next?
base: {model: m, dataset: [train.jsonl], test_dataset: [test.jsonl], eval_fraction: 0.1, steps: 400}
seeds: [0, 1]
"""


def done(
    folder: Path,
    arms: str,
    *,
    signs: dict[str, str] | None = None,
    gaps: dict[str, float] | None = None,
    ends: dict[str, int] | None = None,
) -> Summary:
    study = frozen_study(folder, f"{HEAD}arms: {arms}\n")
    for run in study.runs:
        sign, gap = (signs or {}).get(run.arm, ""), (gaps or {}).get(run.arm, 0.02)
        do(study, run, train_by_hand(run.arm, 0.7, sign=sign, gap=gap, last_step=(ends or {}).get(run.arm, 400)))
    return summarise(open_study(study.folder))


@pytest.mark.slow
def test_a_control_is_neither_advised_nor_a_setting_that_matters(tmp_path: Path) -> None:
    arms = "{plain: {}, low: {lr: 1e-6}, high: {lr: 1e-4}, shuffled: {diagnostic_mode: label_shuffle}}"
    found = done(tmp_path, arms, signs={"shuffled": "no_skill"}, gaps={"shuffled": 0.3})
    assert not [one for one in found.advice if "shuffled" in one.because]
    (sensitivity,) = found.sensitivities
    assert [effect.setting for effect in sensitivity.effects] == ["lr"]
    assert not sensitivity.unmatched
    assert "shuffled" in [row.arm for row in found.arms.rows], "its numbers are shown all the same"


def test_what_another_arm_showed_is_told_in_place_of_an_advice(tmp_path: Path) -> None:
    arms = "{plain: {}, stops: {early_stopping_patience: 3}}"
    found = done(tmp_path, arms, gaps={"plain": 0.3}, ends={"stops": 300})
    (gap,) = [one.do for one in found.advice if one.because.startswith("gap above")]
    assert gap.startswith("Arms of this study have tried what mends a large gap; go on from them: stops (")
    assert "early_stopping_patience 3): gap 0.0" in gap
    assert "Less of everything" not in gap


def test_what_was_tried_in_vain_is_named_with_the_advice(tmp_path: Path) -> None:
    arms = "{plain: {}, slow: {lr: 1e-7}}"
    found = done(tmp_path, arms, signs={"plain": "overfitting", "slow": "overfitting"})
    (said,) = [one for one in found.advice if one.because.startswith("warning sign overfitting")]
    assert "Try fewer --epochs" in said.do
    assert said.do.endswith("Tried in this study, and not enough: slow (lr 1e-07).")
    assert said.because == "warning sign overfitting: plain (2 of 2 runs), slow (2 of 2 runs)"


def test_early_stopping_that_stopped_no_run_has_shown_nothing(tmp_path: Path) -> None:
    arms = "{plain: {}, patient: {early_stopping_patience: 30}}"
    found = done(tmp_path / "other", arms, gaps={"plain": 0.3})
    (gap,) = [one.do for one in found.advice if one.because.startswith("gap above")]
    assert gap.startswith("Less of everything")
    assert "patient" not in gap

    found = done(tmp_path / "own", arms, gaps={"plain": 0.02, "patient": 0.3})
    (gap,) = [one.do for one in found.advice if one.because.startswith("gap above")]
    assert gap.endswith("when it overfits). --early-stopping-patience stopped no run of patient (30).")


def test_what_all_arms_have_is_not_advised_as_new(tmp_path: Path) -> None:
    """The arm from which the others depart has tried what is turned on in it."""
    arms = "{plain: {early_stopping_patience: 2, score_regularization_lambda: 0.1}}"
    found = done(tmp_path, arms, gaps={"plain": 0.3}, ends={"plain": 300})
    (gap,) = [one.do for one in found.advice if one.because.startswith("gap above")]
    assert gap.endswith(
        "Tried in this study, and not enough: plain (early_stopping_patience 2, score_regularization_lambda 0.1)."
    )


def test_a_last_checkpoint_that_did_not_beat_the_untrained_model_is_not_called_the_best(tmp_path: Path) -> None:
    found = {}
    for name in ("best", "step_400"):
        study = frozen_study(tmp_path / name, f"{HEAD}arms: {{plain: {{}}}}\n")
        for run in study.runs:
            by_hand = train_by_hand(run.arm, 0.7)

            def train(arguments: Sequence[str], name: str = name, by_hand=by_hand) -> None:
                by_hand(arguments)
                folder = Path(json.loads(Path(arguments[1]).read_text(encoding="utf-8"))["output_dir"])
                spec = json.loads((folder / "best/reward_spec.json").read_text(encoding="utf-8"))
                write_json(folder / "best/reward_spec.json", {**spec, "provenance": {"step": 400}})
                (folder / "best").rename(folder / name)

            do(study, run, train)
        found[name] = {one.because: one.do for one in summarise(open_study(study.folder)).advice}
    longer, look = "the best step is the last in every seed of plain", "no checkpoint beat the untrained model on "
    assert "Train longer" in found["best"][longer]
    assert longer not in found["step_400"]
    assert "the last one is judged" in found["step_400"][f"{look}validation data in 2 of 2 runs of plain"]
    assert not [because for because in found["best"] if because.startswith(look)]


def test_runs_without_validation_data_have_no_best_checkpoint_and_none_that_was_beaten(tmp_path: Path) -> None:
    study = frozen_study(tmp_path, HEAD.replace("0.1", "0") + "arms: {plain: {}}\n")
    for run in study.runs:

        def train(arguments: Sequence[str]) -> None:
            train_by_hand("plain", 0.7)(arguments)
            folder = Path(json.loads(Path(arguments[1]).read_text(encoding="utf-8"))["output_dir"])
            spec = json.loads((folder / "best/reward_spec.json").read_text(encoding="utf-8"))
            write_json(folder / "best/reward_spec.json", {**spec, "provenance": {"step": 400}})
            (folder / "best").rename(folder / "step_400")
            for path in (folder / "evals").glob("selection.*"):
                path.unlink()

        do(study, run, train)
    advice = {one.because: one.do for one in summarise(open_study(study.folder)).advice}
    assert not [because for because in advice if "untrained model" in because or "best step" in because]
