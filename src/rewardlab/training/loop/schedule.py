"""The learning rate over a run: the schedules of transformers, by their names, advanced once an optimiser step."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from rewardlab.core.terminal import number_of
from rewardlab.training.settings.config import WARMUP_RATIO, ScheduleConfig

MOST_DECAY: Final = 3.0
"""Shares of a weight that all steps may take away together, at the full rate. After these, a schedule that falls to 0
leaves a fifth."""


def warmup_steps(config: ScheduleConfig, num_steps: int) -> int:
    """Return the steps of linear warm-up: as configured, or a share of the run, rounded up; 0 if the share is below one
    step.
    """
    if config.warmup_steps is not None:
        return config.warmup_steps
    ratio = config.warmup_ratio
    if ratio is None:
        ratio = 0.0 if config.lr_scheduler == "constant" else WARMUP_RATIO
    share = ratio * num_steps
    return math.ceil(share) if share >= 1 else 0


def warmup_notice(warmup: int | None, num_steps: int | None, lr: float) -> str:
    """Return a line for a run that ends before its warm-up does; an empty one for any other, or if a number is None."""
    # Step k has the share (k - 1) / warmup of the rate, so the step behind the warm-up is the first with all of it.
    if not warmup or num_steps is None or num_steps > warmup:
        return ""
    return (
        f"the warm-up takes {warmup} steps and the run has {num_steps}, so its rate ends at "
        f"{lr * (num_steps - 1) / warmup:.2g} and never reaches --lr {lr:g}. Lower --warmup-steps "
        f"or --warmup-ratio, or train longer."
    )


def floor_notice(config: ScheduleConfig) -> str:
    """Return a line for a `min_lr_ratio` that the schedule does not use; an empty one for any other."""
    if config.lr_scheduler == "cosine_with_min_lr" or config.min_lr_ratio == ScheduleConfig.min_lr_ratio:
        return ""
    return (
        f"--min-lr-ratio {config.min_lr_ratio:g} does nothing with --lr-scheduler {config.lr_scheduler}; it is where "
        f"cosine_with_min_lr ends."
    )


def batch_notice(batch_size: int, num_preferences: int) -> str:
    """Return a line for batches larger than the data; an empty one for any other."""
    if batch_size <= num_preferences:
        return ""
    return (
        f"--batch-size {batch_size} is more than the {number_of(num_preferences, 'training preference')}, so every "
        f"step takes all of them, and an epoch is one step."
    )


def decay_notice(weight_decay: float, num_steps: int | None, lr: float) -> str:
    """Return a line for a weight decay that leaves next to nothing of a weight; an empty one for any other."""
    a_step = lr * weight_decay
    if num_steps is None or a_step * num_steps < MOST_DECAY:
        return ""
    return (
        f"a step takes up to {a_step:.2g} of each weight away (--lr {lr:g} times --weight-decay {weight_decay:g}), "
        f"{a_step * num_steps:.2g} in {number_of(num_steps, 'step')}: next to nothing is left of what the model knew"
        f"{', or the weights explode' if a_step > 1 else ''}. Lower --weight-decay; 0.01 is usual."
    )


def build_schedule(optimizer: torch.optim.Optimizer, config: ScheduleConfig, num_steps: int) -> LRScheduler:
    """Return the schedule of a run of `num_steps`; call its `step()` after the optimiser's.

    As in transformers, the first step has a rate of 0 and the step after the warm-up the full rate.
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
    """Set a schedule of `build_schedule` to where it stands after `step` steps."""
    assert isinstance(schedule, LambdaLR)
    # Set directly, since a rate depends on the step alone; PyTorch's own way would take `step` calls.
    schedule.last_epoch, schedule._step_count = step, step + 1
    rates = [base * share(step) for base, share in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = list(rates)
