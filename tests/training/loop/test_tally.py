"""What the steps of a task count crosses the loop without the loop's knowing what it is."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from common import make_groups, make_model
from rewardlab.core.types import Sums
from rewardlab.data.groups import Datasets
from rewardlab.training.cost.throughput import Throughput
from rewardlab.training.loop.reward_trainer import reward_trainer
from rewardlab.training.loop.tally import PreferenceTally
from rewardlab.training.monitoring import progress
from rewardlab.training.monitoring.progress import Logbook, Progress, StepReport
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import RewardTrainerConfig
from runs import rows_of


@dataclass(frozen=True)
class Words:
    loss: float = 0.0
    words: int = 0

    def __add__(self, other: Words) -> Words:
        return Words(self.loss + other.loss, self.words + other.words)


class WordTally:
    """A task that has nothing to do with preferences."""

    unit = "words"

    def none(self):
        return Words()

    def read(self, values):
        return Words(**values)

    def columns(self, sums):
        return {"train_loss": sums.loss / sums.words, "train_pairs": sums.words}

    def words(self, values):
        return f"{values['train_pairs']} words"


def report(sums, *, examples: int) -> StepReport:
    throughput = Throughput(comparisons=examples, seconds=2.0, steps=1)
    return StepReport(sums=sums, grad_norm=2.0, head_grad_norm=1.0, throughput=throughput, lr=0.1)


def test_any_task_is_logged_and_recorded_in_its_own_words(tmp_path, caplog):
    records = Records(tmp_path)
    log = Logbook(records, WordTally(), num_steps=4, eval_every=2, peak_flops=None, device=torch.device("cpu"))
    for loss, words in [(6.0, 2), (6.0, 4)]:
        log.progress.add(report(Words(loss, words), examples=words))
    with caplog.at_level("INFO", logger="rewardlab"):
        values = log.note_steps(2)
    assert values["train_loss"] == 2.0, "sums are divided once"
    assert values["train_pairs"] == 6
    assert "loss 2.0000  6 words  grad 2.00  lr 1.0e-01  1.5 words/s  " in caplog.text
    with caplog.at_level("INFO", logger="rewardlab"):
        log.note_speed(2)
    assert "SPEED  1.5 words/s  " in caplog.text
    assert log.closing_line().startswith("Speed: 1.5 words/s over 2 steps")


def lines_about_evaluating(folder, caplog, *, seconds: float) -> list[str]:
    """Of a run of 100 steps of 2 s, evaluated 11 times."""
    device = torch.device("cpu")
    log = Logbook(Records(folder), WordTally(), num_steps=100, eval_every=10, peak_flops=None, device=device)
    with caplog.at_level("INFO", logger="rewardlab"):
        log.note_evaluation(seconds)
        for step in (4, 8, 10, 14):
            log.progress.add(report(Words(1.0, 2), examples=2))
            log.note_steps(step)
            if step == 10:
                log.note_evaluation(seconds)
    return [one.getMessage() for one in caplog.records if "EVALUATING" in one.getMessage()]


@pytest.mark.parametrize("seconds", [27.0, 0.0])
def test_evaluations_that_are_short_are_not_told_of(seconds, tmp_path, caplog):
    assert lines_about_evaluating(tmp_path, caplog, seconds=seconds) == []


def test_evaluations_of_a_small_share_are_not_told_of(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(progress, "LONG_S", 0.0)
    assert lines_about_evaluating(tmp_path, caplog, seconds=9.0) == [], "99 s beside 200 s"


def test_evaluations_that_take_much_of_a_run_are_told_once_with_what_changes_it(tmp_path, caplog):
    assert lines_about_evaluating(tmp_path, caplog, seconds=30.0) == [
        "step 4/100  EVALUATING  takes about 62 % of the time of this run: 11 times 30s, and 3m20s of steps. "
        "--eval-limit evaluates fewer rows (of test data, too), --eval-every less often, and a lower --eval-fraction "
        "holds fewer out"
    ]


@pytest.mark.parametrize(("replies", "unit"), [(2, "pairs"), (4, "comparisons")])
def test_a_run_on_rankings_says_that_it_counts_comparisons(replies, unit, tmp_path, caplog):
    train, held_out = make_groups(6, replies=replies), make_groups(4, seed=2, replies=replies)
    trainer = reward_trainer(
        RewardTrainerConfig.of(model="x", dataset=("y",), batch_size=6, lr=1e-3),
        make_model("llama").train(),
        Datasets(train=train, eval=held_out),
        num_steps=1,
        records=Records(tmp_path),
        save=lambda folder, step: None,
    )
    with caplog.at_level("INFO", logger="rewardlab"):
        trainer.fit()
    said = " ".join(caplog.text.split())
    assert re.search(rf"step 1/1 loss .* {unit}/s 0s left", said)
    count = sum(len(group.comparisons) for group in held_out)
    each = r"-?\d\.\d{3} \[\S+(, \S+)?\]"
    assert re.search(rf"step 1/1 EVAL accuracy {each} loss {each} margin {each} {count} {unit}\b", said)
    assert re.search(rf"step 1/1 SPEED .* tok/s \S+ {unit}/s padding", said)
    assert re.match(rf"Speed: \S+ {unit}/s, ", trainer.speed())


def fit(folder: Path, **settings: int) -> None:
    """A run of six steps."""
    trainer = reward_trainer(
        RewardTrainerConfig.of(model="x", dataset=("y",), batch_size=2, lr=1e-3, **settings),
        make_model("llama").train(),
        Datasets(train=make_groups(6), eval=make_groups(4, seed=2)),
        num_steps=6,
        records=Records(folder),
        save=lambda folder, step: None,
    )
    folder.mkdir()
    trainer.fit()


@pytest.mark.slow
def test_the_first_step_and_the_last_have_a_line_and_the_rows_are_those_without(tmp_path, caplog):
    caplog.set_level("INFO", logger="rewardlab")
    fit(tmp_path / "run", eval_every=4)
    lines = re.findall(r"step (\d)/6  loss .* grad (\S+)", caplog.text)
    assert [step for step, _ in lines] == ["1", "4", "6"]
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == ["0", "4", "6"]
    caplog.clear()
    fit(tmp_path / "every", eval_every=4, log_every=1)
    every = re.findall(r"step (\d)/6  loss .* grad (\S+)", caplog.text)
    assert [step for step, _ in every] == list("123456")
    assert every[0] == lines[0]
    mean = sum(float(norm) for _, norm in every[:4]) / 4
    assert float(rows[1]["grad_norm"]) == pytest.approx(mean, abs=0.005), "the first step counts once, and in this row"


@pytest.mark.parametrize(("tally", "sums"), [(WordTally(), Words(1.5, 3)), (PreferenceTally(), Sums(loss=2.0))])
def test_progress_that_a_checkpoint_keeps_comes_back_as_it_was(tally, sums):
    progress = Progress()
    progress.add(report(sums, examples=3))
    assert progress.state()["window"][0]["sums"] == asdict(sums)
    assert Progress.from_dict(progress.state(), tally) == progress
