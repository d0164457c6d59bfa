"""What a judge writes of training rows beside the held-out ones, and of scores that are no numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from common import make_groups, make_model
from rewardlab.analysis.stats import difference
from rewardlab.data.groups import Datasets
from rewardlab.evaluation.evaluate import evaluate_groups
from rewardlab.training.loop.reward_judge import RewardJudge
from rewardlab.training.loop.reward_trainer import reward_trainer
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import RewardTrainerConfig

SEEN, HELD_OUT = make_groups(30, seed=1), make_groups(30, seed=2)


def judge_in(folder: Path, **settings: Any) -> RewardJudge:
    """The judge of a run that has evaluated nothing yet."""
    config = RewardTrainerConfig.of(model="x", dataset=("y",), train_eval_limit=30, lr=1e-3, **settings)
    trainer = reward_trainer(
        config,
        make_model(),
        Datasets(train=SEEN, eval=HELD_OUT, train_eval=SEEN),
        num_steps=4,
        records=Records(folder),
        save=lambda folder, step: None,
    )
    assert isinstance(trainer.judge, RewardJudge)
    return trainer.judge


def test_columns_of_training_rows_are_those_of_an_evaluation_of_them_and_a_gap_is_above_0_where_they_do_better(
    tmp_path: Path,
) -> None:
    judge = judge_in(tmp_path)
    judge.evaluate(0, 1000)
    row = judge.records.rows[0]
    seen, held_out = (
        evaluate_groups(judge.model, groups, beta=1.0, budget=1000, progress="judging").overall.estimates
        for groups in (SEEN, HELD_OUT)
    )
    accuracy, loss = (seen[f"eval_{name}"] for name in ("accuracy", "loss"))
    wanted = {
        "train_eval_accuracy": accuracy.value,
        "train_eval_accuracy_low": accuracy.low,
        "train_eval_accuracy_high": accuracy.high,
        "train_eval_loss": loss.value,
    }
    gaps = {
        "gap_accuracy": difference(accuracy, held_out["eval_accuracy"]),
        "gap_loss": difference(held_out["eval_loss"], loss),
    }
    for name, gap in gaps.items():
        wanted |= {name: gap.value, f"{name}_low": gap.low, f"{name}_high": gap.high}
    assert {name: row[name] for name in wanted} == pytest.approx(wanted)
    assert len({round(value, 9) for value in wanted.values()}) == len(wanted), "no two are alike"
    assert gaps["gap_accuracy"].value == pytest.approx(accuracy.value - held_out["eval_accuracy"].value)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (0, []),
        (1, ["eval_accuracy is not finite (1 pair has no finite scores), so this evaluation cannot be the best"]),
        (30, ["eval_accuracy is not finite (30 pairs have no finite scores), so this evaluation cannot be the best"]),
    ],
)
def test_scores_that_are_no_numbers_are_told_with_their_pairs_even_where_the_metric_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, lost: int, said: list[str]
) -> None:
    judge = judge_in(tmp_path)
    forward = judge.model.forward

    def breaks(batch: Any, past: Any = None) -> torch.Tensor:
        scores = forward(batch, past).clone()
        scores[: 2 * lost : 2] = math.nan  # of the first reply of each of so many pairs
        return scores

    monkeypatch.setattr(judge.model, "forward", breaks)
    judge.evaluate(0, 100_000)
    assert (judge.records.rows[0]["eval_accuracy"] is None) == (lost == len(HELD_OUT))
    lines = [line.partition("/4  ")[2] for line in caplog.messages if "cannot be the best" in line]
    assert lines == said
