"""What tests of interrupted runs share: the settings of a short run, and ways to stop it."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import runs
from rewardlab.core.errors import RunInterrupted
from rewardlab.training.loop.trainer import Trainer
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig

config_for = partial(runs.config_for, steps=8, log_every=3, eval_every=2, save_every=4, checkpoint_every=2)
KINDS = {
    "full": {},
    "lora": {"lora": True, "lora_rank": 2},
    "lora with dropout": {"lora": True, "lora_rank": 2, "lora_dropout": 0.3},
    "padded": {"attention": "padded"},
    "dora and norms": {"lora": True, "lora_rank": 2, "dora": True, "lora_modules_to_save": ("norm",)},
    "adafactor": {"optimizer": "adafactor", "lr": 1e-2},
    "two rates": {"differential_lr": True},
    "bf16": {"precision": "bf16"},
    "bf16, lora": {"precision": "bf16", "lora": True, "lora_rank": 2},
    "fp16": {"precision": "fp16"},
    "a rate far too high": {"lr": 3.0, "max_grad_norm": 100.0, "log_every": 1},
}


def stop_after(monkeypatch, step, *, how=signal.SIGUSR1):
    """Let a signal arrive while the step that ends as `step` is computed."""
    train_step = Trainer.train_step

    def computes(trainer, batches):
        if trainer.step + 1 == step:
            signal.raise_signal(how)
        return train_step(trainer, batches)

    monkeypatch.setattr(Trainer, "train_step", computes)
    return train_step


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def interrupted(base_model, pairs_file, folder, monkeypatch, *, step=5, **changes) -> RewardTrainerConfig:
    """A run stopped after a step, and the configuration that goes on with it."""
    config = config_for(base_model, pairs_file, folder, **changes)
    with monkeypatch.context() as patched:
        stop_after(patched, step)
        with pytest.raises(RunInterrupted):
            train(config)
    return config.replace(resume="auto")
