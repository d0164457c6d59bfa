"""What the steps of a task count crosses the loop without the loop's knowing what it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pytest
import torch

from rewardlab.core.types import Sums
from rewardlab.training.cost.throughput import Throughput
from rewardlab.training.loop.tally import PreferenceTally
from rewardlab.training.monitoring.progress import Logbook, Progress, StepReport
from rewardlab.training.monitoring.records import Records


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
    log = Logbook(records, WordTally(), num_steps=4, peak_flops=None, device=torch.device("cpu"))
    for loss, words in [(6.0, 2), (6.0, 4)]:
        log.progress.add(report(Words(loss, words), examples=words))
    with caplog.at_level("INFO", logger="rewardlab"):
        values = log.note_steps(2)
    assert values["train_loss"] == 2.0, "sums are divided once"
    assert values["train_pairs"] == 6
    assert "loss 2.0000  6 words  grad 2.00  lr 1.0e-01  1.5 words/s  " in caplog.text


@pytest.mark.parametrize(("tally", "sums"), [(WordTally(), Words(1.5, 3)), (PreferenceTally(), Sums(loss=2.0))])
def test_progress_that_a_checkpoint_keeps_comes_back_as_it_was(tally, sums):
    progress = Progress()
    progress.add(report(sums, examples=3))
    assert progress.state()["window"][0]["sums"] == asdict(sums)
    assert Progress.from_dict(progress.state(), tally) == progress
