"""A run that goes back to an earlier checkpoint takes its course from there, with the best model of that time."""

from __future__ import annotations

import shutil

import pytest
import torch

from resuming import config_for, interrupted, stop_after, weights_of
from rewardlab.core.errors import RunInterrupted
from rewardlab.core.run_folder import saved_step
from rewardlab.training.checkpoints.checkpoint import newest_checkpoint
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig
from runs import history_of

pytestmark = pytest.mark.usefixtures("verified_here")


@pytest.mark.slow
def test_an_earlier_checkpoint_can_be_gone_back_to(base_model, pairs_file, tmp_path, monkeypatch, log):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    with monkeypatch.context() as patched:
        stop_after(patched, 5)
        with pytest.raises(RunInterrupted):
            train(config.replace(resume=str(tmp_path / "run/checkpoints/step_4")))
    assert "checkpoints/step_4, after step 4" in log.text
    assert newest_checkpoint(tmp_path / "run").step == 5
    train(config)
    train(config.replace(resume=None, output_dir=tmp_path / "whole"))
    assert history_of(tmp_path / "run") == history_of(tmp_path / "whole")


@pytest.mark.slow
def test_a_course_that_is_given_up_leaves_no_checkpoint_and_no_best(base_model, pairs_file, tmp_path, log):
    config = config_for(base_model, pairs_file, tmp_path / "run", lr=1e-3, checkpoint_limit=9, eval_every=1)
    best = train(config).best_step
    assert best > 2
    checkpoints = tmp_path / "run/checkpoints"
    (last,) = checkpoints.iterdir()
    assert last.name == "step_8"
    short = config.replace(output_dir=tmp_path / "short", checkpoint_every=1)
    with pytest.MonkeyPatch.context() as patched:
        stop_after(patched, 2)
        with pytest.raises(RunInterrupted):
            train(short)
    shutil.copytree(tmp_path / "short/checkpoints/step_2", checkpoints / "step_2")
    with pytest.MonkeyPatch.context() as patched:
        stop_after(patched, 3)
        with pytest.raises(RunInterrupted):
            train(config.replace(resume=str(checkpoints / "step_2")))
    assert f"best/ is of the later step {best} and is removed, so " in log.text
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_2", "step_3"]
    assert not (tmp_path / "run/step_8").exists()
    train(config.replace(resume="auto"))
    assert saved_step(tmp_path / "run/best") == best


def later_is_better(base_model, pairs_file, folder, **changes) -> RewardTrainerConfig:
    """Every evaluation is better than the one before; one every other step, and a checkpoint after each step."""
    rule = {"early_stopping_metric": "epoch", "early_stopping_mode": "max"}
    often = {"checkpoint_every": 1, "checkpoint_limit": 9, "save_every": None}
    return config_for(base_model, pairs_file, folder, **rule, **often, **changes)


def stop(config: RewardTrainerConfig, step: int, **changes) -> None:
    with pytest.MonkeyPatch.context() as patched:
        stop_after(patched, step)
        with pytest.raises(RunInterrupted):
            train(config.replace(**changes))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("source", ["the checkpoint", "a saved step"])
def test_going_back_keeps_the_model_that_was_the_best_then(source, base_model, pairs_file, tmp_path, log):
    config = later_is_better(base_model, pairs_file, tmp_path / "run")
    stop(config, 5)
    best = tmp_path / "run/best"
    then = weights_of(best)
    if source == "a saved step":
        shutil.copytree(best, tmp_path / "run/step_4")
    stop(config, 7, resume="auto")
    assert saved_step(best) == 6
    back = 4 if source == "the checkpoint" else 5
    # The setting may change on resuming, and what is due is done all the same.
    stop(config, back + 1, resume=str(tmp_path / f"run/checkpoints/step_{back}"), eval_every=8)
    assert saved_step(best) == 4
    assert all(torch.equal(then[name], kept) for name, kept in weights_of(best).items())
    assert ("copied from" in log.text) == (source == "a saved step")


@pytest.mark.slow
def test_going_back_to_where_the_best_model_is_lost_says_so_to_the_end(base_model, pairs_file, tmp_path, log):
    config = later_is_better(base_model, pairs_file, tmp_path / "run")
    stop(config, 7)
    stop(config, 7, resume=str(tmp_path / "run/checkpoints/step_5"), early_stopping_min_delta=1e6)
    lost = "so there is none until another model beats epoch 1.0000 of step 4, whose model was not kept"
    assert f"best/ is of the later step 6 and is removed, {lost}" in log.text
    assert not (tmp_path / "run/best").exists()
    log.clear()
    result = train(config.replace(resume="auto", early_stopping_min_delta=1e6, eval_every=1, early_stopping_patience=2))
    assert "no better epoch in 2 evaluations since step 4 (1.0000" in log.text
    assert "no checkpoint that is kept beat step 4 on the evaluation data, so there is no best/" in log.text
    assert (result.best, result.best_step) == (None, None)
