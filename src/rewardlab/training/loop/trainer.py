"""The Trainer: steps, clipping, evaluation, logging and saving. It does not know what is learned.

Its two partners do: `Steps` and `Judge`, in partners.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rewardlab.core.bars import steps_bar
from rewardlab.core.errors import DataError, DeviceMemoryError, NonFiniteError
from rewardlab.core.pending import Pending
from rewardlab.training.checkpoints.cadence import Keeper
from rewardlab.training.checkpoints.checkpoint import Checkpoint
from rewardlab.training.cost.memory import release_cached, unless_out_of_memory
from rewardlab.training.cost.throughput import Work
from rewardlab.training.loop import failures
from rewardlab.training.loop.loss_scale import LossScale
from rewardlab.training.loop.optimizer import create_state, optimizer_numbers, restore_numbers, training_tensors
from rewardlab.training.loop.partners import Judge, Machine, MicroBatch, Steps, Update
from rewardlab.training.loop.schedule import seek
from rewardlab.training.loop.totals import Accumulated, Computed, Share, StepTotals
from rewardlab.training.monitoring.progress import Logbook, Progress, StepReport, duration
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import RunConfig

logger = logging.getLogger("rewardlab")
JudgeT = TypeVar("JudgeT", bound=Judge)


class Trainer(Generic[MicroBatch, JudgeT]):
    """Trains a model. Every step is one optimiser update by the weighted mean over all its micro-batches."""

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
        """Without `machine`, the process is alone."""
        machine = machine or Machine()
        self.model = model
        self.config = config
        self.steps = steps
        self.judge = judge
        self.num_steps = num_steps
        self.records = records
        self.parallel = machine.parallel
        self.ranks = self.parallel.ranks
        self.keeper = Keeper(config, records, self.ranks, machine.stops)
        self.observers = machine.observers
        self.batch_timeout_s = machine.batch_timeout_s
        self.step = 0
        self.loss_scale = LossScale.of(in_float16=steps.in_float16)
        self.token_budget = config.token_budget
        """Tokens computed at a time: the configured number, or half of it once memory ran out."""
        self._evaluated_step = -1
        """The last step at which the model was evaluated."""
        self._trained: list[nn.Parameter] = []
        """The weights that train, in the order of the model; from the first step on, which checks their gradients."""
        self.device = next(model.parameters()).device
        self.eval_every = config.interval(num_steps)
        self.log = Logbook(
            records,
            steps.tally,
            num_steps=num_steps,
            eval_every=self.eval_every,
            peak_flops=machine.peak_flops,
            device=self.device,
        )
        self._next: Pending[list[MicroBatch]] | None = None
        self.optimizer = update.optimizer
        self.schedule = update.schedule
        self.max_grad_norm = update.max_grad_norm

    def fit(self) -> None:
        """Train to the last step, evaluating and saving as configured, from the start or from where `restore` left off.

        Raises NonFiniteError before the update if the loss or gradient of a step is not finite, DeviceMemoryError if a
        step does not fit in memory, DataError if its data cannot be read in time, and RunInterrupted between steps on
        request.
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
        """Do all that is due after a step, in an order that resuming can repeat; return whether training is over."""
        self.ranks.signs.step = self.step
        last = self.step == self.num_steps
        evaluates = last or self.step % self.eval_every == 0
        if self.log.progress.window and (evaluates or self.step % self.config.log_every == 0):
            self.observers.row(self.step, self.log.note_steps(self.step))
        elif self.log.progress.window and self.step == 1:
            # A sign of life where steps take minutes, and the loss with which training began.
            self.log.show_step(self.step)
        if evaluates and self._evaluated_step != self.step:
            self._heed_stop()  # before the evaluation, which can outlast the time that a scheduler leaves until a kill
            self._evaluate()
        # Saving is collective, so ranks must decide alike. They judge the same scores, but different CPUs may round the
        # metrics differently; without this agreement one rank would wait in a save that the others skip.
        (best, stop) = self.ranks.any(self.judge.best_is_due(self.step), evaluates and bool(self.judge.should_stop()))
        if best:
            self._checkpoint()  # first, so that a run resumed before best/ is whole still has that model, and saves it
            self.judge.save_best(self.step)
        if stop and not last:
            logger.info("step %d/%d  STOP  %s", self.step, self.num_steps, self.judge.should_stop())
            last = True
        saves = last or bool(self.step and self.config.save_every and self.step % self.config.save_every == 0)
        if saves or self.keeper.is_due(self.step):
            self._checkpoint()  # before the model is saved, so that a run with a saved model can always be resumed
        if saves:
            self.judge.save(self.step)
        if not last:
            self._heed_stop()
        return last

    def _evaluate(self) -> None:
        self.log.note_speed(self.step)
        started = time.perf_counter()
        self.judge.evaluate(self.step, self.token_budget)
        self.log.note_evaluation(time.perf_counter() - started)
        self._evaluated_step = self.step

    def heed_late_signal(self) -> None:
        """Raise RunInterrupted if a signal came after the last step; the rest is then done by resuming."""
        (signalled,) = self.ranks.any(self.config.checkpoints and self.keeper.stops.signalled)
        if signalled:
            raise self.keeper.interruption(self.step, self.num_steps)

    def _heed_stop(self) -> None:
        """Write a checkpoint and raise RunInterrupted if any rank was asked to stop."""
        if self.keeper.is_asked_to_stop():
            self._checkpoint()
            raise self.keeper.interruption(self.step, self.num_steps)

    def _checkpoint(self) -> None:
        """Write a checkpoint of the state after this step, unless it exists already or no step has been taken."""
        if not self.keeper.lacks(self.step):
            return
        state = {
            "token_budget": [self.config.token_budget, self.token_budget],
            "loss_scale": self.loss_scale.state(),
            "evaluated_step": self._evaluated_step,
            "progress": self.log.progress.state(),
            "optimizer_numbers": optimizer_numbers(self.model, self.optimizer),
            "task": self.judge.state(),
        }
        self.parallel.drop_gathered()
        tensors = training_tensors(self.model, self.optimizer)
        folder, seconds = self.keeper.keep(self.step, tensors, state)
        logger.info("step %d/%d  CHECKPOINT  %s (%s)", self.step, self.num_steps, folder, duration(seconds))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint of this run, so that `fit` goes on as if it had never stopped. Raises ArtifactError if it
        is damaged or of another model.
        """
        self.parallel.drop_gathered()
        create_state(self.optimizer, self.model, checkpoint.names())
        checkpoint.read_into(training_tensors(self.model, self.optimizer))
        state = checkpoint.state
        restore_numbers(self.model, self.optimizer, state["optimizer_numbers"])
        self.step = checkpoint.step
        self.keeper.begin(self.step)
        self._evaluated_step = state["evaluated_step"]
        asked, held = state["token_budget"]
        # A budget that was halved for want of memory stays halved, unless the user has now asked for another one.
        if asked == self.config.token_budget:
            self.token_budget = held
        if self.loss_scale.moves:
            self.loss_scale.restore(state["loss_scale"])
        self.log.progress = Progress.from_dict(state["progress"], self.steps.tally)
        seek(self.schedule, self.step)
        self.records.rewind(state["rows"], self.step)
        self.judge.restore(state["task"], self.step)

    def release(self) -> None:
        """Free the memory of the weights and the optimiser; what was saved and recorded stays."""
        self.optimizer.state.clear()
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_floating_point():
                    # Dropped instead of moved, since quantised weights cannot be moved to `meta`.
                    module._parameters[name] = None
        self.model.to("meta")

    def train_step(self, batches: Sequence[MicroBatch]) -> StepReport:
        """Update the weights once, by the weighted mean gradient over `batches`, which `Steps.plan` made.

        If memory runs out, the step is planned and computed again with half the token budget, until it fits. In float16
        it is computed again with half the loss scale until its gradients are finite. Raises NonFiniteError if the loss
        or gradient is not finite or the weights add up to 0, DeviceMemoryError if the step does not fit in memory, and
        DataError if its data cannot be read in time.
        """
        started = time.perf_counter()
        # Each micro-batch's loss is divided by the weight of all, so the total must be known before the first backward.
        (total_weight,) = self.ranks.total([sum(self.steps.weight(batch) for batch in batches)])
        if not total_weight > 0:
            examples = "; ".join(map(self.steps.describe, batches))
            raise failures.no_weight(self.step + 1, total_weight, examples, self.steps.nouns)
        while True:
            batches, accumulated = self._accumulate_in_memory(batches, total_weight)
            # The device still computes: the host counts work and plans the next step before `fetch` waits for it.
            work = sum((self.steps.work(batch) for batch in batches), Work())
            if self.step + 1 < self.num_steps:
                self._begin_plan(self.step + 1)
            own = accumulated.fetch()
            in_float32 = [*own.losses, own.head_grad_norm]
            if not self.loss_scale.halve_if_too_large(self.ranks, own.grad_norm, in_float32=in_float32):
                break
            self.optimizer.zero_grad(set_to_none=True)
            self.log.note_loss_scale(self.step + 1, self.loss_scale.value)
        share = Share.of(own, work)
        share = share.with_numbers(self.ranks.total(share.numbers()))
        if share.num_broken:
            raise self._not_finite(batches, own)
        # AdamW creates its state in the first update, which can be too much for a device that fits the step itself.
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
        """Return `batches` and the result of `_accumulate`, for batches of half the budget while memory runs out."""
        while (accumulated := self._accumulate(batches, total_weight)) is None:
            batches = self._with_half_the_budget()
        return batches, accumulated

    def _accumulate(self, batches: Sequence[MicroBatch], total_weight: float) -> Accumulated | None:
        """Compute and clip the step's gradients; return its losses and norms, or None if any rank ran out of memory."""
        summed = unless_out_of_memory(lambda: self._backward(batches, total_weight))
        if summed is None and not self.parallel.can_back_off:
            raise self._no_memory()
        (failed,) = self.ranks.any(summed is None)
        if failed or summed is None:
            return None
        norms = unless_out_of_memory(self._clip)
        if norms is None and self.ranks.size > 1:  # the others wait in the all-reduce, so the step cannot be repeated
            raise self._no_memory()
        if norms is None:
            return None
        return Accumulated(losses_B=summed[0], statistics_S=summed[1], grad_norm=norms[0], head_grad_norm=norms[1])

    def _backward(self, batches: Sequence[MicroBatch], total_weight: float) -> tuple[Tensor, Tensor]:
        """Accumulate gradients in `.grad`; return ([B] losses, [S] summed statistics) of the micro-batches."""
        self.observers.step_begins(self.step + 1)
        # What the model draws, as for dropout, depends on the step alone, so a resumed run draws the same numbers.
        torch.manual_seed(seed_of_step(self.config.seed, self.step, self.ranks.rank))
        losses, statistics = [], []
        for number, batch in enumerate(ahead(batches, self.steps.move), start=1):
            self.parallel.before_micro_batch(is_last=number == len(batches))
            loss, counted = self.steps.forward(batch, self.step)
            self.observers.forward_done()
            # Divided before backward: float16 gradients stay in range, and micro-batches add up to the mean by
            # themselves.
            torch.autograd.backward(loss / (total_weight / self.loss_scale.value))
            self.observers.backward_done()
            losses.append(loss.detach().double())
            statistics.append(counted)
        return torch.stack(losses), torch.stack(statistics).sum(0)

    def _clip(self) -> tuple[Tensor, Tensor]:
        """Clip gradients; return ([] norm of all, [] norm of the head's) before clipping, over all ranks."""
        # Checked before the sum over the ranks, which fills in gradients that this rank failed to compute.
        if not self._trained:
            self.steps.require_gradients()
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            # An optimiser over other tensors, such as copies that FSDP gathered, would leave weights as they are.
            held = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
            assert held == set(trained), "the optimiser holds all weights that train, and no others"
            self._trained = trained
        trainable = self._trained
        self.parallel.finish_gradients(trainable)
        if self.loss_scale.value != 1:
            # Unscaled before the norm is taken, so that the clipping threshold and the logged norm do not depend on the
            # scale.
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
        """The learning rate of the coming step."""
        return float(self.schedule.get_last_lr()[0])

    def _begin_plan(self, step: int) -> Pending[list[MicroBatch]]:
        """Return the pending plan of a step. It is made in another thread, since reading from a disk may stall."""
        budget = self.token_budget
        key = (step, budget)
        if self._next is None or self._next.key != key:
            self._next = Pending(key, lambda: self.steps.plan(step, budget))
        return self._next

    def _planned(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, planned ahead or now. Raises DataError if that takes too long."""
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
        """Discard the step's gradients and plan it again with half the budget: more micro-batches, the same mean."""
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
        return failures.no_memory(self.step + 1, self.token_budget, self.steps.least_budget(), self.steps.nouns)

    def _not_finite(self, batches: Sequence[MicroBatch], own: Computed) -> NonFiniteError:
        guilty = [batch for batch, loss in zip(batches, own.losses, strict=True) if not math.isfinite(loss)]
        examples = "; ".join(text for text in map(self.steps.describe, guilty or batches) if text)
        said = f"rank {self.ranks.rank}: loss {list(own.losses)}. Examples: {examples}."
        told = self.ranks.gather((bool(guilty), said))
        self.optimizer.zero_grad(set_to_none=True)
        scale = self.loss_scale.value if self.loss_scale.moves else None
        return failures.not_finite(self.step + 1, own.grad_norm, told, loss_scale=scale)

    def speed(self) -> str:
        """Return the closing line about the speed of all steps, with the token budget if memory ran out."""
        line = self.log.closing_line()
        if self.token_budget != self.config.token_budget:
            line += f" Out of memory on the way: --micro-token-budget {self.token_budget} at the end."
        return line


def ahead(batches: Iterable[MicroBatch], move: Callable[[MicroBatch], MicroBatch]) -> Iterator[MicroBatch]:
    """Yield every batch after `move`, called one batch ahead: copying the next overlaps with computing this one."""
    moved: deque[MicroBatch] = deque()
    for batch in batches:
        moved.append(move(batch))
        if len(moved) > 1:
            yield moved.popleft()
    yield from moved


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """Return the seed of torch's generators for a step of a rank."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)


def norm_of(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the [] norm of all gradients together; of whole gradients also where each rank has a shard."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
