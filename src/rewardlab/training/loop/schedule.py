"""How the learning rate moves over a run: the schedules of transformers, by their names, one step a macro-step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from rewardlab.training.settings.config import WARMUP_RATIO, ScheduleConfig


def warmup_steps(config: ScheduleConfig, num_steps: int) -> int:
    """Steps of linear warm-up: as given, or a share of the run, rounded up; no step of a share below one."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    ratio = config.warmup_ratio
    if ratio is None:
        ratio = 0.0 if config.lr_scheduler == "constant" else WARMUP_RATIO
    share = ratio * num_steps
    return math.ceil(share) if share >= 1 else 0


def build_schedule(optimizer: torch.optim.Optimizer, config: ScheduleConfig, num_steps: int) -> LRScheduler:
    """The schedule of a run of `num_steps`; its `step()` follows the optimiser's.

    Warm-up goes from 0 in the first step to the full rate in the one after it, as in transformers.
    """
    options: dict[str, Any] = {}
    if config.lr_scheduler == "cosine_with_min_lr":
        options["min_lr_rate"] = config.min_lr_ratio
    schedule: LRScheduler = get_scheduler(
        config.lr_scheduler,
        optimizer,
        num_warmup_steps=warmup_steps(config, num_steps),
        num_training_steps=num_steps,
        scheduler_specific_kwargs=options,
    )
    return schedule


def seek(schedule: LRScheduler, step: int) -> None:
    """Put a schedule of `build_schedule` where it stands after `step` steps: a rate is a function of the step alone."""
    assert isinstance(schedule, LambdaLR)
    schedule.last_epoch, schedule._step_count = step, step + 1
    rates = [base * share(step) for base, share in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = list(rates)
