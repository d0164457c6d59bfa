"""Programs of torch.compile: counted, and told when there are more of them."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

import rewardlab.training.compiled as compiled_module
from rewardlab.training.run import train
from runs import config_for


@pytest.fixture
def counter(monkeypatch):
    counter = Counter(unique_graphs=5)
    monkeypatch.setattr(compiled_module, "counters", {"stats": counter})
    return counter


def test_new_programs_are_told_with_each_evaluation(base_model, pairs_file, tmp_path, monkeypatch, counter, caplog):
    from rewardlab.training.reward_trainer import RewardTrainer

    made = {1: 3, 2: 1, 5: 2}
    step = RewardTrainer.train_step

    def compiling(self, batches):
        counter["unique_graphs"] += made.get(self.step + 1, 0)
        return step(self, batches)

    monkeypatch.setattr(RewardTrainer, "train_step", compiling)
    with caplog.at_level(logging.INFO, logger="rewardlab"):
        train(config_for(base_model, pairs_file, tmp_path / "run", steps=6, eval_every=2))
    lines = [line for line in caplog.messages if "COMPILED" in line]
    assert lines == [
        "step 2/6  COMPILED  9 programs so far, 4 of them after step 0",
        "step 6/6  COMPILED  11 programs so far, 2 of them after step 4",
    ]
