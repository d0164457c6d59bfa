"""The base Trainer: steps, clipping, cadence, logging, evaluation and saving. It does not know what a reward is.

A task fills in the hooks; nobody overrides anything else.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor, nn

from rewardlab.core.bars import steps_bar
from rewardlab.core.errors import DataError, DeviceMemoryError, NonFiniteError
from rewardlab.core.types import Sums
from rewardlab.training import failures
from rewardlab.training.checkpoint import Checkpoint
from rewardlab.training.config import MonitorConfig, TrainerConfig
from rewardlab.training.interrupt import StopRequests
from rewardlab.training.keeper import Keeper
from rewardlab.training.logbook import Logbook, duration
from rewardlab.training.loss_scale import LossScale
from rewardlab.training.memory import release_cached, unless_out_of_memory
from rewardlab.training.observers import Observers
from rewardlab.training.optimizer import create_state, optimizer_numbers, restore_numbers, training_tensors
from rewardlab.training.pending import Pending
from rewardlab.training.progress import Progress, StepReport
from rewardlab.training.ranks import Parallel
from rewardlab.training.records import Records
from rewardlab.training.schedule import build_schedule, seek
from rewardlab.training.stepping import ahead, norm_of, seed_of_step
from rewardlab.training.throughput import Peak, Throughput, Work

logger = logging.getLogger("rewardlab")
MicroBatch = TypeVar("MicroBatch")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run runs on, and who may end it."""

    peak: Peak | None = None
    """What utilisation is measured against, of all ranks together."""
    parallel: Parallel = field(default_factory=Parallel)
    """How the ranks share a step."""
    stops: StopRequests = field(default_factory=StopRequests)
    """Asked between steps whether to go on."""


class Trainer(ABC, Generic[MicroBatch]):
    """Runs macro-steps: every step is one optimiser update by the mean over all comparisons of its micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainerConfig,
        *,
        optimizer: torch.optim.Optimizer,
        num_steps: int,
        records: Records,
        machine: Machine | None = None,
        observers: Observers | None = None,
        in_float16: bool = False,
    ) -> None:
        """The optimiser's first group has the learning rate that is logged. By default the process is alone; who made
        the observers closes them. `in_float16` says that gradients are computed in it, so the loss has to be scaled.
        """
        machine = machine or Machine()
        self.model = model
        self.config = config
        self.num_steps = num_steps
        self.records = records
        self.parallel = machine.parallel
        self.ranks = self.parallel.ranks
        self.keeper = Keeper(config, records.folder, self.ranks, machine.stops)
        self.observers = observers or Observers()
        self.batch_timeout_s = MonitorConfig.batch_timeout_s
        """Seconds to wait for a plan; a task sets it by its settings."""
        self.step = 0
        self.loss_scale = LossScale.of(in_float16=in_float16)
        self.token_budget = config.token_budget
        """Tokens computed at a time: the configuration's, or half of it once memory ran out."""
        self._evaluated_step = -1
        """The last step at which the model was evaluated."""
        self._gradients_checked = False
        self.device = next(model.parameters()).device
        self.log = Logbook(records, num_steps=num_steps, peak=machine.peak, device=self.device)
        self._next: Pending[list[MicroBatch]] | None = None
        self.optimizer = optimizer
        self.schedule = build_schedule(self.optimizer, config, num_steps)
        self.eval_every = config.interval(num_steps)

    # The hooks of a task.

    @abstractmethod
    def _plan(self, step: int) -> list[MicroBatch]:
        """The micro-batches of macro-step `step` (from 0), at most `token_budget` tokens each."""

    @abstractmethod
    def _reads(self, step: int) -> str:
        """What `_plan` reads for a step, by names alone: said when it cannot be read."""

    @abstractmethod
    def _least_budget(self) -> int:
        """The smallest `token_budget` with which every step can be planned."""

    @abstractmethod
    def _move(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch on its way to the device, without waiting for it."""

    @abstractmethod
    def _weight(self, batch: MicroBatch) -> float:
        """What a micro-batch adds to Σ w."""

    @abstractmethod
    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(Σ w·ℓ with its graph, detached statistics) of a micro-batch that was moved."""

    @abstractmethod
    def _to_sums(self, loss: float, weight: float, statistics: list[float]) -> Sums:
        """Sums from what came back from the device."""

    @abstractmethod
    def _describe(self, batch: MicroBatch) -> str:
        """Which examples a micro-batch holds, for error messages."""

    @abstractmethod
    def _work(self, batch: MicroBatch) -> Work:
        """What a micro-batch computes."""

    @abstractmethod
    def _head(self) -> nn.Module:
        """The part whose gradient norm is logged apart."""

    @abstractmethod
    def _require_gradients(self) -> None:
        """Raise ModelError if the backward pass just made, the first of this process, missed something that trains."""

    @abstractmethod
    def _evaluate(self) -> None:
        """Evaluate the model as it is, and record it."""

    @abstractmethod
    def _best_is_due(self) -> bool:
        """Whether the model as it is was found to be the best so far, and is not yet on the disk as that."""

    @abstractmethod
    def _save_best(self) -> None:
        """Write the model as it is to `best/`."""

    @abstractmethod
    def _should_stop(self) -> str:
        """Why training should end after the last evaluation, or an empty text."""

    @abstractmethod
    def _save(self) -> None:
        """Write the model as it is to its `step_N/` folder, if it is not there."""

    @abstractmethod
    def _task_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the task, as JSON."""

    @abstractmethod
    def _restore_task(self, state: Mapping[str, Any]) -> None:
        """Inverse of `_task_state`; `step` is that of the checkpoint. What the run saved after it is removed."""

    @final
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
            self._evaluate()
            self._evaluated_step = self.step
        # Ranks agree by hand: their metrics are of the same scores, but perhaps not by the same processor.
        (best, stop) = self.ranks.any(evaluates and self._best_is_due(), evaluates and bool(self._should_stop()))
        if best:
            self._checkpoint()  # first: whoever resumes finds the best model on the disk, or in hand
            self._save_best()
        if stop and not last:
            logger.info("step %d/%d  STOP  %s", self.step, self.num_steps, self._should_stop())
            last = True
        saves = last or bool(self.step and self.config.save_every and self.step % self.config.save_every == 0)
        if saves or self.keeper.is_due(self.step):
            self._checkpoint()  # before the model is saved: a run that shows one can go on
        if saves:
            self._save()
        if not last:
            self._heed_stop()
        return last

    @final
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
            "task": self._task_state(),
        }
        self.parallel.drop_gathered()
        tensors = training_tensors(self.model, self.optimizer)
        folder, seconds = self.keeper.keep(self.step, tensors, state)
        logger.info("step %d/%d  CHECKPOINT  %s (%s)", self.step, self.num_steps, folder, duration(seconds))

    @final
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
        self._restore_task(state["task"])

    @final
    def release(self) -> None:
        """Give the memory of weights and optimiser back; what was saved and recorded stays."""
        self.optimizer.state.clear()
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_floating_point():
                    module._parameters[name] = None  # quantised weights cannot be moved to `meta`
        self.model.to("meta")

    @final
    def train_step(self, batches: Sequence[MicroBatch]) -> StepReport:
        """Move the weights once, by the mean gradient over every comparison of the batches, which `_plan` made.

        If memory runs out the step is planned again with half the budget and computed from its start, once. In float16
        it is computed again, with half the loss scale, until its gradients are finite.
        """
        started = time.perf_counter()
        # Known before any backward: each micro-batch's share depends on all the others.
        (total_weight,) = self.ranks.total([sum(self._weight(batch) for batch in batches)])
        if not total_weight > 0:
            raise failures.no_weight(self.step + 1, total_weight, "; ".join(map(self._describe, batches)))
        while True:
            batches, found = self._in_memory(batches, total_weight)
            # The host works while the device does.
            work = sum((self._work(batch) for batch in batches), Work())
            if self.step + 1 < self.num_steps:
                self._begin_plan(self.step + 1)
            host = found.tolist()  # the one synchronisation with the device in a macro-step
            losses, (*counted, grad_norm, head_grad_norm) = host[: len(batches)], host[len(batches) :]
            if not self.loss_scale.is_too_large(self.ranks, grad_norm, in_float32=[*losses, head_grad_norm]):
                break
            self.optimizer.zero_grad(set_to_none=True)
            self.log.note_loss_scale(self.step + 1, self.loss_scale.value)
        loss, statistics, work = self._of_all_ranks(batches, losses, counted, grad_norm, work)
        if unless_out_of_memory(self._update) is None:
            raise failures.no_memory_for_state(self.step + 1)
        self.loss_scale.count_step()
        sums = self._to_sums(loss, total_weight, statistics)
        seconds = time.perf_counter() - started
        throughput = Throughput(work=work, comparisons=sums.comparisons, seconds=seconds, steps=1)
        rate = self.lr
        self.schedule.step()
        return StepReport(sums=sums, grad_norm=grad_norm, head_grad_norm=head_grad_norm, throughput=throughput, lr=rate)

    def _in_memory(self, batches: Sequence[MicroBatch], total_weight: float) -> tuple[Sequence[MicroBatch], Tensor]:
        """What `_accumulate` gives, and for which batches: if memory runs out, those of half the budget."""
        found = self._accumulate(batches, total_weight)
        if found is None:
            batches = self._with_half_the_budget()
            found = self._accumulate(batches, total_weight)
        if found is None:
            raise self._no_memory()
        return batches, found

    def _of_all_ranks(
        self, batches: Sequence[MicroBatch], losses: list[float], statistics: list[float], grad_norm: float, work: Work
    ) -> tuple[float, list[float], Work]:
        """(loss, statistics, work) of a step, summed over the ranks.

        Raises NonFiniteError on all ranks if a loss or the gradient of any is not finite.
        """
        finite = all(map(math.isfinite, [*losses, grad_norm]))
        own = [float(not finite), math.fsum(losses) if finite else math.nan, *statistics, *work.numbers()]
        broken, loss, *rest = self.ranks.total(own)
        if broken:
            raise self._not_finite(batches, losses, grad_norm)
        return loss, rest[: len(statistics)], Work.from_numbers(rest[len(statistics) :])

    def _accumulate(self, batches: Sequence[MicroBatch], total_weight: float) -> Tensor | None:
        """Clipped gradients of the step; returns, still on the device, the loss of each micro-batch, the summed
        statistics, the gradient norm and the head's. None if memory ran out on any rank.
        """

        def compute() -> list[Tensor]:
            self.observers.step_begins(self.step + 1)
            # What a model draws in a step is a function of the step, so a resumed run draws the same.
            torch.manual_seed(seed_of_step(self.config.seed, self.step, self.ranks.rank))
            losses, statistics = [], []
            for number, batch in enumerate(ahead(batches, self._move), start=1):
                self.parallel.before_micro_batch(is_last=number == len(batches))
                loss, counted = self._forward(batch)
                self.observers.forward_done()
                torch.autograd.backward(loss / (total_weight / self.loss_scale.value))
                self.observers.backward_done()
                losses.append(loss.detach().double())
                statistics.append(counted)
            return [torch.stack(losses), torch.stack(statistics).sum(0)]

        def clip() -> Tensor:
            if not self._gradients_checked:  # before those of other ranks are added
                self._require_gradients()
                self._gradients_checked = True
            trainable = self._trainable()
            self.parallel.sum_gradients(trainable)
            if self.loss_scale.value != 1:
                torch._foreach_mul_([p.grad for p in trainable if p.grad is not None], 1 / self.loss_scale.value)
            head_norm, grad_norm = norm_of(self._head().parameters()), norm_of(trainable)
            nn.utils.clip_grads_with_norm_(trainable, self.config.max_grad_norm, grad_norm, foreach=True)
            return torch.stack([grad_norm, head_norm]).double()

        found = unless_out_of_memory(compute)
        if found is None and not self.parallel.can_back_off:
            raise self._no_memory()
        (failed,) = self.ranks.any(found is None)
        if failed or found is None:
            return None
        norms = unless_out_of_memory(clip)
        if norms is None and self.ranks.size > 1:  # the others are in the middle of adding up
            raise self._no_memory()
        return None if norms is None else torch.cat([*found, norms])

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
        key = (step, self.token_budget)
        if self._next is None or self._next.key != key:
            self._next = Pending(key, lambda: self._plan(step))
        return self._next

    def _planned(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step, made ahead of it or now. DataError if that takes too long."""
        pending = self._begin_plan(step)
        if not pending.wait(self.batch_timeout_s):
            raise DataError(
                f"step {step + 1}: its data could not be read within {self.batch_timeout_s:g} s: {self._reads(step)}. "
                f"Is the disk or network share there? Keep prepared data on a local disk with --cache-dir, or wait "
                f"longer with --batch-timeout-s. The weights are those of step {self.step}."
            )
        return pending.result()

    def _with_half_the_budget(self) -> list[MicroBatch]:
        """Drop what the step has computed, and plan it again: more micro-batches, the same mean."""
        self.optimizer.zero_grad(set_to_none=True)
        release_cached(self.device)
        budget = max(self.token_budget // 2, self._least_budget())
        if budget >= self.token_budget:
            raise self._no_memory()
        self.log.note_budget(self.step + 1, self.token_budget, budget)
        self.token_budget = budget
        return self._planned(self.step)

    def _no_memory(self) -> DeviceMemoryError:
        self.optimizer.zero_grad(set_to_none=True)
        if not self.parallel.can_back_off:
            return failures.no_memory_on_rank(self.step + 1, self.ranks.rank, self.token_budget)
        return failures.no_memory(self.step + 1, self.token_budget, self._least_budget())

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _not_finite(self, batches: Sequence[MicroBatch], losses: Sequence[float], grad_norm: float) -> NonFiniteError:
        guilty = [batch for batch, loss in zip(batches, losses, strict=True) if not math.isfinite(loss)]
        examples = "; ".join(text for text in map(self._describe, guilty or batches) if text)
        told = self.ranks.gather((bool(guilty), f"rank {self.ranks.rank}: loss {losses}. Examples: {examples}."))
        self.optimizer.zero_grad(set_to_none=True)
        scale = self.loss_scale.value if self.loss_scale.moves else None
        return failures.not_finite(self.step + 1, grad_norm, told, loss_scale=scale)

    @final
    def speed(self) -> str:
        """The closing line about all steps, and what memory made of the budget."""
        line = self.log.closing_line()
        if self.token_budget != self.config.token_budget:
            line += f" Out of memory on the way: --micro-token-budget {self.token_budget} at the end."
        return line
