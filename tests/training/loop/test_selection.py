"""Which checkpoint is the best, and when training stops: one rule, from scripted evaluations to a whole run."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest

import rewardlab.training.loop.reward_judge as reward_judge_module
from rewardlab.core.errors import ConfigError
from rewardlab.training.loop.selection import Selection, direction, selection_of
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig
from runs import config_for, rows_of

NAN = math.nan


def offered(values, *, losses=None, **settings) -> Selection:
    """A selection after evaluations with these accuracies, or of this metric."""
    selection = Selection(**{"metric": "eval_accuracy", "mode": "max", **settings})
    for step, value in enumerate(values):
        loss = losses[step] if losses else 0.5
        selection.offer(
            step, {selection.metric: value, **({} if selection.metric == "eval_loss" else {"eval_loss": loss})}
        )
    return selection


def test_the_second_of_four_is_the_best():
    found = offered([0.5, 0.9, 0.6, 0.55])
    assert (found.best_step, found.bar, found.since_best) == (1, 0.9, 2)


@pytest.mark.parametrize(
    ("values", "settings", "best"),
    [
        ([0.9, 0.8, 0.7], {}, None),  # the first sets the bar and is never the best
        ([0.5, NAN, 0.6], {}, 2),
        ([0.5, math.inf, 0.6], {}, 2),
        ([NAN, 0.4, 0.3], {}, 1),
        ([0.5, 0.55, 0.62], {"min_delta": 0.1}, 2),
        ([0.5, 0.6, 0.58], {"min_delta": 0.2}, None),
        ([0.7, 0.6, 0.65], {"metric": "eval_loss", "mode": "min"}, 1),
        ([0.7, 0.69, 0.5], {"metric": "eval_loss", "mode": "min", "min_delta": 0.1}, 2),
    ],
)
def test_what_beats_the_bar(values, settings, best):
    assert offered(values, **settings).best_step == best


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.5, 0.4], "no checkpoint beat the untrained model on the evaluation data"),
        ([math.nan, math.nan], "no evaluation had a finite eval_accuracy to choose by"),
    ],
)
def test_why_there_is_no_best(values, said):
    selection = Selection(metric="eval_accuracy", mode="max")
    for step, value in enumerate(values):
        selection.offer(step, {"eval_accuracy": value})
    assert (selection.best_step, selection.why_none()) == (None, said)


def test_equal_accuracies_are_decided_by_the_loss():
    assert offered([0.5, 0.8, 0.8], losses=[0.7, 0.5, 0.4]).best_step == 2
    assert offered([0.5, 0.8, 0.8], losses=[0.7, 0.5, 0.5]).best_step == 1
    assert offered([0.5, 0.8, 0.8], losses=[0.7, 0.5, NAN]).best_step == 1
    assert offered([0.5, 0.8, 0.8], losses=[0.7, 0.5, 0.4], min_delta=0.01).best_step == 1


def test_an_evaluation_with_scores_that_are_no_numbers_is_never_the_best():
    selection = offered([0.5])
    assert not selection.offer(1, {"eval_accuracy": 0.9, "eval_loss": 0.1}, sound=False)
    assert selection.since_best == 1


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("eval_accuracy", "max"),
        ("eval_acc", "max"),
        ("eval_pairwise_accuracy", "max"),
        ("train_accuracy", "max"),
        ("eval_margin", "max"),
        ("eval_loss", "min"),
        ("train_nll", "min"),
        ("eval_ece", "min"),
        ("eval_roc_auc", "max"),
        ("eval_auc", "max"),
        ("eval_negative_margin_rate", "min"),
    ],
)
def test_directions_that_go_without_saying(metric, expected):
    assert direction(metric, "auto") == expected
    assert direction(metric, "min") == "min"


@pytest.mark.parametrize("metric", ["gap_accuracy", "gap_loss", "grad_norm", "mfu", "eval_margin_std"])
def test_others_have_to_be_said(metric):
    with pytest.raises(ConfigError, match="--early-stopping-mode max or min"):
        direction(metric, "auto")
    assert direction(metric, "max") == "max"


def test_a_metric_that_nobody_logs_is_refused_before_anything_is_loaded(tmp_path):
    config = RewardTrainerConfig.of(
        model="nowhere", dataset=("nothing",), output_dir=tmp_path / "run", early_stopping_metric="eval_los"
    )
    refused = r"--early-stopping-metric eval_los: not a column of metrics.csv\. Did you mean 'eval_loss'\?"
    with pytest.raises(ConfigError, match=refused):
        selection_of(config)
    with pytest.raises(ConfigError, match=r"metrics.csv\. Those of evaluations: eval_loss, eval_accuracy, eval_margin"):
        selection_of(config.replace(early_stopping_metric="zzz"))
    with pytest.raises(ConfigError, match="--early-stopping-metric eval_los"):
        train(config)


@pytest.mark.parametrize("metric", ["gap_loss", "gap_acc", "train_eval_accuracy"])
def test_a_metric_of_training_rows_needs_some(tmp_path, metric):
    settings = {"early_stopping_metric": metric, "early_stopping_mode": "min", "early_stopping_patience": 1}
    config = RewardTrainerConfig.of(model="nowhere", dataset=("nothing",), output_dir=tmp_path / "run", **settings)
    with pytest.raises(ConfigError, match=f"--early-stopping-metric {metric}: .* none are evaluated.*train-eval-limit"):
        train(config)
    assert selection_of(config.replace(train_eval_limit=5)).mode == "min"


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations of a run with the accuracies in the list, whatever the model says."""
    accuracies: list[float] = []
    judge = reward_judge_module.evaluate_groups

    def evaluate(*arguments, **options):
        result = judge(*arguments, **options)
        accuracy = accuracies.pop(0)
        estimates = dict(result.overall.estimates)
        estimates["eval_accuracy"] = replace(estimates["eval_accuracy"], value=accuracy)
        return replace(result, overall=replace(result.overall, estimates=estimates))

    monkeypatch.setattr(reward_judge_module, "evaluate_groups", evaluate)
    return accuracies


def test_a_run_stops_when_nothing_gets_better_and_keeps_the_best(
    base_model, pairs_file, tmp_path, verified_here, scripted, caplog
):
    scripted += [0.3, 0.5, 0.9, 0.6, 0.55, 0.99]
    caplog.set_level(logging.INFO, logger="rewardlab")
    config = config_for(
        base_model, pairs_file, tmp_path / "run", steps=10, eval_every=1, save_every=1, early_stopping_patience=2
    )
    result = train(config)
    (line,) = [line for line in caplog.messages if "STOP" in line]
    assert line == (
        "step 4/10  STOP  no better eval_accuracy in 2 evaluations since step 2 (0.9000; --early-stopping-patience)"
    )
    assert (result.best_step, result.last.name) == (2, "step_4")
    assert scripted == [0.99], "and no evaluation later"
    assert [float(row["eval_accuracy"]) for row in rows_of(tmp_path / "run")] == [0.3, 0.5, 0.9, 0.6, 0.55]
    weights = [(tmp_path / "run" / name / "model.safetensors").read_bytes() for name in ("best", "step_2", "step_4")]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.slow
def test_only_the_newest_folders_are_kept_and_the_best(base_model, pairs_file, tmp_path, verified_here, scripted):
    scripted += [0.3, 0.5, 0.4, 0.4, 0.4, 0.4]
    config = config_for(
        base_model, pairs_file, tmp_path / "run", steps=5, eval_every=1, save_every=1, save_total_limit=2
    )
    train(config)
    assert sorted(path.name for path in (tmp_path / "run").glob("step_*")) == ["step_4", "step_5"]
    assert (tmp_path / "run" / "best").is_dir()


@pytest.mark.slow
def test_an_evaluation_that_is_no_number_is_told(base_model, pairs_file, tmp_path, verified_here, scripted, caplog):
    scripted += [0.3, NAN, 0.5]
    train(config_for(base_model, pairs_file, tmp_path / "run", steps=2, eval_every=1))
    (line,) = [line for line in caplog.messages if "not finite" in line]
    assert line == "step 1/2  eval_accuracy is not finite, so this evaluation cannot be the best"


@pytest.mark.slow
def test_a_loss_of_training_is_not_called_infinite_before_the_first_step(
    base_model, pairs_file, tmp_path, verified_here, caplog
):
    rule = {"early_stopping_metric": "train_loss"}
    result = train(config_for(base_model, pairs_file, tmp_path / "run", steps=2, eval_every=1, **rule))
    assert "is not finite" not in caplog.text
    assert result.best_step is not None
