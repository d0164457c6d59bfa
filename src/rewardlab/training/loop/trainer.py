"""The Trainer: steps, clipping, cadence, logging, evaluation and saving. It does not know what is learned.

It has two partners. One makes steps: what a micro-batch is, what it costs and what its loss is (`Steps`). The other
judges the model and writes it to the run folder (`Judge`). For reward models they are in reward_trainer.py. A step is
computed by `train_step` and the methods below it, in the order in which they are called.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from rewardlab.core.bars import steps_bar
from rewardlab.core.errors import DataError, DeviceMemoryError, NonFiniteError
from rewardlab.core.pending import Pending
from rewardlab.core.signals import StopRequests
from rewardlab.distributed.ranks import Parallel
from rewardlab.training.checkpoints.cadence import Keeper
from rewardlab.training.checkpoints.checkpoint import Checkpoint
from rewardlab.training.cost.memory import release_cached, unless_out_of_memory
from rewardlab.training.cost.throughput import Peak, Work
from rewardlab.training.loop import failures
from rewardlab.training.loop.loss_scale import LossScale
from rewardlab.training.loop.optimizer import create_state, optimizer_numbers, restore_numbers, training_tensors
from rewardlab.training.loop.schedule import seek
from rewardlab.training.loop.totals import Accumulated, Computed, Share, StepTotals
from rewardlab.training.monitoring.observers import Observers
from rewardlab.training.monitoring.progress import Logbook, Progress, StepReport, duration
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import MonitorConfig, RunConfig

logger = logging.getLogger("rewardlab")
MicroBatch = TypeVar("MicroBatch")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run runs on, who watches it and who may end it."""

    peak: Peak | None = None
    """What utilisation is measured against, of all ranks together."""
    parallel: Parallel = field(default_factory=Parallel)
    """How the ranks share a step."""
    stops: StopRequests = field(default_factory=StopRequests)
    """Asked between steps whether to go on."""
    observers: Observers = field(default_factory=Observers)
    """Told what happens; whoever made them closes them."""
    batch_timeout_s: float = MonitorConfig.batch_timeout_s
    """How long a step may wait for its plan, which is read from a disk."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What moves the weights."""

    optimizer: torch.optim.Optimizer
    """Its first group has the learning rate that is logged."""
    schedule: LRScheduler
    max_grad_norm: float
    """Gradients longer than this are scaled down to it."""


@runtime_checkable
class Steps(Protocol[MicroBatch]):
    """Makes the steps of a task out of micro-batches, of which each rank has its own.

    The losses of all micro-batches of a step, on all ranks, are added and divided once by the sum of their weights.
    """

    @property
    def in_float16(self) -> bool:
        """Whether gradients are computed in float16, so that the loss has to be scaled."""

    def plan(self, step: int, budget: int) -> list[MicroBatch]:
        """The micro-batches of step `step` (from 0) on this rank, at most `budget` tokens each.

        A function of its arguments alone, since it is called beside the training thread and again after a failure.
        """

    def reads(self, step: int) -> str:
        """What `plan` reads for a step, by names alone: said when it cannot be read."""

    def least_budget(self) -> int:
        """The smallest budget, in tokens, with which every step can be planned."""

    def weight(self, batch: MicroBatch) -> float:
        """What a micro-batch adds to Σ w."""

    def move(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch on its way to the device, without waiting for it."""

    def forward(self, batch: MicroBatch, step: int) -> tuple[Tensor, Tensor]:
        """(Σ w·ℓ with its graph, detached statistics [S] in float64) of a micro-batch that was moved."""

    def require_gradients(self) -> None:
        """Raise ModelError if the backward pass just made, the first of this process, missed something that trains."""

    def head(self) -> nn.Module:
        """The part whose gradient norm is logged apart."""

    def work(self, batch: MicroBatch) -> Work:
        """What a micro-batch computes."""

    def describe(self, batch: MicroBatch) -> str:
        """Which examples a micro-batch holds, for error messages."""

    def report(self, totals: StepTotals) -> StepReport:
        """What is told and recorded of a step."""


@runtime_checkable
class Judge(Protocol):
    """Judges the model between steps, and writes it to the run folder. All ranks call it alike."""

    def evaluate(self, step: int, budget: int) -> None:
        """Evaluate the model as it is after `step`, computing at most `budget` tokens at a time, and record it."""

    def best_is_due(self, step: int) -> bool:
        """Whether the model after `step` was found to be the best so far, and is not yet on the disk as that."""

    def save_best(self, step: int) -> None:
        """Write the model as it is to `best/`."""

    def should_stop(self) -> str:
        """Why training should end after the last evaluation, or an empty text."""

    def save(self, step: int) -> None:
        """Write the model as it is to its `step_N/` folder, if it is not there."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Inverse of `state`, for a checkpoint of `step`. What the run saved after it is removed."""


JudgeT = TypeVar("JudgeT", bound=Judge)


class Trainer(Generic[MicroBatch, JudgeT]):
    """Every step is one optimiser update by the mean over all that its micro-batches weigh."""

    def __init__(
        self,
        model: nn.Module,
        config: RunConfig,
        *,
        steps: Steps[MicroBatch],
        judge: JudgeT,
        update: Update,
        num_steps: int,
        records: Records,
        machine: Machine | None = None,
    ) -> None:
        """By default the process is alone."""
        machine = machine or Machine()
        self.model = model
        self.config = config
        self.steps = steps
        self.judge = judge
        self.num_steps = num_steps
        self.records = records
        self.parallel = machine.parallel
        self.ranks = self.parallel.ranks
        self.keeper = Keeper(config, records.folder, self.ranks, machine.stops)
        self.observers = machine.observers
        self.batch_timeout_s = machine.batch_timeout_s
        self.step = 0
        self.loss_scale = LossScale.of(in_float16=steps.in_float16)
        self.token_budget = config.token_budget
        """Tokens computed at a time: the configuration's, or half of it once memory ran out."""
        self._evaluated_step = -1
        """The last step at which the model was evaluated."""
        self._gradients_checked = False
        self.device = next(model.parameters()).device
        self.log = Logbook(records, num_steps=num_steps, peak=machine.peak, device=self.device)
        self._next: Pending[list[MicroBatch]] | None = None
        self.optimizer = update.optimizer
        self.schedule = update.schedule
        self.max_grad_norm = update.max_grad_norm
        self.eval_every = config.interval(num_steps)

    def fit(self) -> None:
        """Train to the last step, evaluating and saving at the configured cadence, from the start or from where
        `restore` left off.

        Raises NonFiniteError before the update of a step whose loss or gradient is not finite, and RunInterrupted
        between two steps if that was asked for.
        """
        with steps_bar(self.num_steps, self.step) as bar:
            ended = self._finish_step()
            while not ended:
                self.log.progress.add(self.train_step(self._planned(self.step)))
                self.step += 1
                self.observers.step_done(self.step)
                bar.update()
                ended = self._finish_step()
        self.keeper.finish()

    def _finish_step(self) -> bool:
        """All that is due after a step, in an order in which it can be taken up again after any part of it; returns
        whether training is over.
        """
        last = self.step == self.num_steps
        evaluates = last or self.step % self.eval_every == 0
        if self.log.progress.window and (evaluates or self.step % self.config.log_every == 0):
            self.observers.row(self.step, self.log.note_steps(self.step))
        if evaluates and self._evaluated_step != self.step:
            self._heed_stop()
            self.log.note_speed(self.step)
            self.judge.evaluate(self.step, self.token_budget)
            self._evaluated_step = self.step
        # Ranks agree by hand: their metrics are of the same scores, but perhaps not by the same processor.
        (best, stop) = self.ranks.any(
            evaluates and self.judge.best_is_due(self.step), evaluates and bool(self.judge.should_stop())
        )
        if best:
            self._checkpoint()  # first: whoever resumes finds the best model on the disk, or in hand
            self.judge.save_best(self.step)
        if stop and not last:
            logger.info("step %d/%d  STOP  %s", self.step, self.num_steps, self.judge.should_stop())
            last = True
        saves = last or bool(self.step and self.config.save_every and self.step % self.config.save_every == 0)
        if saves or self.keeper.is_due(self.step):
            self._checkpoint()  # before the model is saved: a run that shows one can go on
        if saves:
            self.judge.save(self.step)
        if not last:
            self._heed_stop()
        return last

    def heed_late_signal(self) -> None:
        """Raise RunInterrupted if a signal came after the last step, and what is still to do can be done later."""
        (signalled,) = self.ranks.any(self.config.checkpoints and self.keeper.stops.signalled)
        if signalled:
            raise self.keeper.interruption(self.step, self.num_steps)

    def _heed_stop(self) -> None:
        """Raise RunInterrupted, after a checkpoint, if any rank was asked to end."""
        if self.keeper.is_asked_to_stop():
            self._checkpoint()
            raise self.keeper.interruption(self.step, self.num_steps)

    def _checkpoint(self) -> None:
        """Keep the state after this step, unless that is done or there is nothing yet to keep."""
        if not self.keeper.lacks(self.step):
            return
        state = {
            "token_budget": [self.config.token_budget, self.token_budget],
            "loss_scale": self.loss_scale.state(),
            "evaluated_step": self._evaluated_step,
            "progress": self.log.progress.state(),
            "optimizer_numbers": optimizer_numbers(self.model, self.optimizer),
            "rows": [self.records.rows[step] for step in sorted(self.records.rows)],
            "task": self.judge.state(),
        }
        self.parallel.drop_gathered()
        tensors = training_tensors(self.model, self.optimizer)
        folder, seconds = self.keeper.keep(self.step, tensors, state)
        logger.info("step %d/%d  CHECKPOINT  %s (%s)", self.step, self.num_steps, folder, duration(seconds))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of this run: the next `fit` trains from there, as if nothing had happened."""
        self.parallel.drop_gathered()
        create_state(self.optimizer, self.model, checkpoint.names())
        checkpoint.read_into(training_tensors(self.model, self.optimizer))
        state = checkpoint.state
        restore_numbers(self.model, self.optimizer, state["optimizer_numbers"])
        self.step = checkpoint.step
        self.keeper.begin(self.step)
        self._evaluated_step = state["evaluated_step"]
        asked, held = state["token_budget"]
        if asked == self.config.token_budget:  # otherwise it was changed by hand
            self.token_budget = held
        if self.loss_scale.moves:
            self.loss_scale.restore(state["loss_scale"])
        self.log.progress = Progress.from_dict(state["progress"])
        seek(self.schedule, self.step)
        self.records.rewind(state["rows"], self.step)
        self.judge.restore(state["task"], self.step)

    def release(self) -> None:
        """Give the memory of weights and optimiser back; what was saved and recorded stays."""
        self.optimizer.state.clear()
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_floating_point():
                    module._parameters[name] = None  # quantised weights cannot be moved to `meta`
        self.model.to("meta")

    def train_step(self, batches: Sequence[MicroBatch]) -> StepReport:
        """Move the weights once, by the mean gradient over all that the batches weigh, which `Steps.plan` made.

        If memory runs out the step is planned again with half the budget and computed from its start, once. In float16
        it is computed again, with half the loss scale, until its gradients are finite.
        """
        started = time.perf_counter()
        # Known before any backward: each micro-batch's share depends on all the others.
        (total_weight,) = self.ranks.total([sum(self.steps.weight(batch) for batch in batches)])
        if not total_weight > 0:
            raise failures.no_weight(self.step + 1, total_weight, "; ".join(map(self.steps.describe, batches)))
        while True:
            batches, accumulated = self._accumulate_in_memory(batches, total_weight)
            # The host works while the device does.
            work = sum((self.steps.work(batch) for batch in batches), Work())
            if self.step + 1 < self.num_steps:
                self._begin_plan(self.step + 1)
            own = accumulated.fetch()
            in_float32 = [*own.losses, own.head_grad_norm]
            if not self.loss_scale.is_too_large(self.ranks, own.grad_norm, in_float32=in_float32):
                break
            self.optimizer.zero_grad(set_to_none=True)
            self.log.note_loss_scale(self.step + 1, self.loss_scale.value)
        share = Share.of(own, work)
        share = share.like(self.ranks.total(share.numbers()))
        if share.num_broken:
            raise self._not_finite(batches, own)
        if unless_out_of_memory(self._update) is None:
            raise failures.no_memory_for_state(self.step + 1)
        self.loss_scale.count_step()
        totals = StepTotals(
            loss=share.loss,
            weight=total_weight,
            statistics=share.statistics,
            grad_norm=own.grad_norm,
            head_grad_norm=own.head_grad_norm,
            work=share.work,
            seconds=time.perf_counter() - started,
            lr=self.lr,
        )
        self.schedule.step()
        return self.steps.report(totals)

    def _accumulate_in_memory(
        self, batches: Sequence[MicroBatch], total_weight: float
    ) -> tuple[Sequence[MicroBatch], Accumulated]:
        """What `_accumulate` gives, and for which batches: if memory runs out, those of half the budget."""
        found = self._accumulate(batches, total_weight)
        if found is None:
            batches = self._with_half_the_budget()
            found = self._accumulate(batches, total_weight)
        if found is None:
            raise self._no_memory()
        return batches, found

    def _accumulate(self, batches: Sequence[MicroBatch], total_weight: float) -> Accumulated | None:
        """Clipped gradients of the step, and what is told of it. None if memory ran out on any rank."""
        summed = unless_out_of_memory(lambda: self._backward(batches, total_weight))
        if summed is None and not self.parallel.can_back_off:
            raise self._no_memory()
        (failed,) = self.ranks.any(summed is None)
        if failed or summed is None:
            return None
        norms = unless_out_of_memory(self._clip)
        if norms is None and self.ranks.size > 1:  # the others are in the middle of adding up
            raise self._no_memory()
        if norms is None:
            return None
        return Accumulated(losses_B=summed[0], statistics_S=summed[1], grad_norm=norms[0], head_grad_norm=norms[1])

    def _backward(self, batches: Sequence[MicroBatch], total_weight: float) -> tuple[Tensor, Tensor]:
        """(the loss of each micro-batch, their summed statistics); gradients of this rank are added up on the way."""
        self.observers.step_begins(self.step + 1)
        # What a model draws in a step is a function of the step, so a resumed run draws the same.
        torch.manual_seed(seed_of_step(self.config.seed, self.step, self.ranks.rank))
        losses, statistics = [], []
        for number, batch in enumerate(ahead(batches, self.steps.move), start=1):
            self.parallel.before_micro_batch(is_last=number == len(batches))
            loss, counted = self.steps.forward(batch, self.step)
            self.observers.forward_done()
            torch.autograd.backward(loss / (total_weight / self.loss_scale.value))
            self.observers.backward_done()
            losses.append(loss.detach().double())
            statistics.append(counted)
        return torch.stack(losses), torch.stack(statistics).sum(0)

    def _clip(self) -> tuple[Tensor, Tensor]:
        """(norm of all gradients, norm of the head's), summed over the ranks and in float64; then clips them."""
        if not self._gradients_checked:  # before those of other ranks are added
            self.steps.require_gradients()
            self._gradients_checked = True
        trainable = self._trainable()
        self.parallel.sum_gradients(trainable)
        if self.loss_scale.value != 1:
            torch._foreach_mul_([p.grad for p in trainable if p.grad is not None], 1 / self.loss_scale.value)
        head_norm, grad_norm = norm_of(self.steps.head().parameters()), norm_of(trainable)
        nn.utils.clip_grads_with_norm_(trainable, self.max_grad_norm, grad_norm, foreach=True)
        return grad_norm.double(), head_norm.double()

    def _update(self) -> bool:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return True

    @property
    def lr(self) -> float:
        """Learning rate of the coming step."""
        return float(self.schedule.get_last_lr()[0])

    def _begin_plan(self, step: int) -> Pending[list[MicroBatch]]:
        """The plan of a step, in the making since now or before; made beside this thread, where a read may stall."""
        budget = self.token_budget
        key = (step, budget)
        if self._next is None or self._next.key != key:
            self._next = Pending(key, lambda: self.steps.plan(step, budget))
        return self._next

    def _planned(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step, made ahead of it or now. DataError if that takes too long."""
        pending = self._begin_plan(step)
        if not pending.wait(self.batch_timeout_s):
            what = self.steps.reads(step)
            raise DataError(
                f"step {step + 1}: its data could not be read within {self.batch_timeout_s:g} s: {what}. Is the disk "
                f"or network share there? Keep prepared data on a local disk with --cache-dir, or wait longer with "
                f"--batch-timeout-s. The weights are those of step {self.step}."
            )
        return pending.result()

    def _with_half_the_budget(self) -> list[MicroBatch]:
        """Drop what the step has computed, and plan it again: more micro-batches, the same mean."""
        self.optimizer.zero_grad(set_to_none=True)
        release_cached(self.device)
        budget = max(self.token_budget // 2, self.steps.least_budget())
        if budget >= self.token_budget:
            raise self._no_memory()
        self.log.note_budget(self.step + 1, self.token_budget, budget)
        self.token_budget = budget
        return self._planned(self.step)

    def _no_memory(self) -> DeviceMemoryError:
        self.optimizer.zero_grad(set_to_none=True)
        if not self.parallel.can_back_off:
            return failures.no_memory_on_rank(self.step + 1, self.ranks.rank, self.token_budget)
        return failures.no_memory(self.step + 1, self.token_budget, self.steps.least_budget())

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _not_finite(self, batches: Sequence[MicroBatch], own: Computed) -> NonFiniteError:
        guilty = [batch for batch, loss in zip(batches, own.losses, strict=True) if not math.isfinite(loss)]
        examples = "; ".join(text for text in map(self.steps.describe, guilty or batches) if text)
        said = f"rank {self.ranks.rank}: loss {list(own.losses)}. Examples: {examples}."
        told = self.ranks.gather((bool(guilty), said))
        self.optimizer.zero_grad(set_to_none=True)
        scale = self.loss_scale.value if self.loss_scale.moves else None
        return failures.not_finite(self.step + 1, own.grad_norm, told, loss_scale=scale)

    def speed(self) -> str:
        """The closing line about all steps, and what memory made of the budget."""
        line = self.log.closing_line()
        if self.token_budget != self.config.token_budget:
            line += f" Out of memory on the way: --micro-token-budget {self.token_budget} at the end."
        return line


def ahead(batches: Iterable[MicroBatch], move: Callable[[MicroBatch], MicroBatch]) -> Iterator[MicroBatch]:
    """Every batch after `move`, which is called for the next one before the present one is handed out."""
    moved: deque[MicroBatch] = deque()
    for batch in batches:
        moved.append(move(batch))
        if len(moved) > 1:
            yield moved.popleft()
    yield from moved


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """What torch's generators are seeded with before a step."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)


def norm_of(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Of all gradients together, whole ones also where each rank has a shard."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
