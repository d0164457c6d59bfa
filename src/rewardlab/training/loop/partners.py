"""The arguments of a Trainer: two partners that know the task, what changes the weights, and the machine.

`Steps` makes micro-batches, their cost and their loss; `Judge` evaluates the model and writes it to the run folder.
reward_trainer.py and reward_judge.py have those for reward models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from rewardlab.core.signals import StopRequests
from rewardlab.distributed.ranks import Parallel
from rewardlab.training.cost.throughput import PeakFlops, Work
from rewardlab.training.loop.failures import Nouns
from rewardlab.training.loop.totals import StepTotals
from rewardlab.training.monitoring.observers import Observers
from rewardlab.training.monitoring.progress import StepReport, Tally
from rewardlab.training.settings.config import MonitorConfig

MicroBatch = TypeVar("MicroBatch")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The ranks and the device of a run, its observers, and the requests that may stop it."""

    peak_flops: PeakFlops | None = None
    """The most FLOP/s of all ranks together, against which utilisation is measured."""
    parallel: Parallel = field(default_factory=Parallel)
    """How the ranks share a step."""
    stops: StopRequests = field(default_factory=StopRequests)
    """Asked between steps whether the run should end."""
    observers: Observers = field(default_factory=Observers)
    """These receive what happens in a run. The code that made them closes them."""
    batch_timeout_s: float = MonitorConfig.batch_timeout_s
    """Seconds that a step may wait for its plan, which is read from disk."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """The parts that change the weights."""

    optimizer: torch.optim.Optimizer
    """The learning rate of its first parameter group is the one that is logged."""
    schedule: LRScheduler
    max_grad_norm: float
    """Gradients with a larger norm are scaled down to this norm."""


@runtime_checkable
class Steps(Protocol[MicroBatch]):
    """Makes the steps of a task out of micro-batches. Each rank has micro-batches of its own.

    The losses of all micro-batches of a step, on all ranks, are added and divided once by the sum of their weights.
    """

    @property
    def in_float16(self) -> bool:
        """Return whether gradients are computed in float16, so that the loss has to be scaled."""

    @property
    def tally(self) -> Tally[Any]:
        """What is counted in steps, and how the record and the log say it."""

    @property
    def nouns(self) -> Nouns:
        """Words for messages."""

    def plan(self, step: int, budget: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of step `step` (from 0), at most `budget` tokens each.

        Must depend on its arguments alone: it runs beside the training thread, and again after a failure.
        """

    def reads(self, step: int) -> str:
        """Return the names of what `plan` reads for a step, for the message when it cannot be read."""

    def least_budget(self) -> int:
        """Return the smallest budget, in tokens, with which every step can be planned."""

    def weight(self, batch: MicroBatch) -> float:
        """Return what a micro-batch adds to Σ w."""

    def move(self, batch: MicroBatch) -> MicroBatch:
        """Start copying a micro-batch to the device, without waiting for it, and return the copy."""

    def forward(self, batch: MicroBatch, step: int) -> tuple[Tensor, Tensor]:
        """Return (Σ w·ℓ with its graph, detached statistics [S] in float64) of a micro-batch that was moved."""

    def require_gradients(self) -> None:
        """Raise ModelError if the first backward pass of this process gave something that trains no gradient."""

    def head(self) -> nn.Module:
        """Return the module whose gradient norm is logged separately."""

    def work(self, batch: MicroBatch) -> Work:
        """Return the tokens and FLOPs of a micro-batch."""

    def describe(self, batch: MicroBatch) -> str:
        """Return the names of the examples of a micro-batch, for error messages."""

    def report(self, totals: StepTotals) -> StepReport:
        """Return what is logged and recorded of a step."""


@runtime_checkable
class Judge(Protocol):
    """Evaluates the model between steps and writes it to the run folder. All ranks call every method."""

    def evaluate(self, step: int, budget: int) -> None:
        """Evaluate the model as it is after `step`, at most `budget` tokens at a time, and record the result."""

    def best_is_due(self, step: int) -> bool:
        """Return whether the model after `step` is the best so far and is not yet saved as such."""

    def save_best(self, step: int) -> None:
        """Write the model as it is now to `best/`."""

    def should_stop(self) -> str:
        """Return why training should end after the last evaluation, or an empty string."""

    def save(self, step: int) -> None:
        """Write the model as it is now to its `step_N/` folder, if it is not there."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Restore what `state` returned in a checkpoint of `step`, and remove models that the run saved after it."""
