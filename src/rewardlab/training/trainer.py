"""The base Trainer: steps, clipping, cadence, logging, evaluation and saving. It does not know what a reward is.

A task fills in the hooks; nobody overrides anything else.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor, nn
from tqdm import tqdm

from rewardlab.core.errors import DeviceMemoryError, NonFiniteError
from rewardlab.core.types import Sums
from rewardlab.training.compiled import compiled_programs, growth_line
from rewardlab.training.config import TrainerConfig
from rewardlab.training.memory import peak_memory, release_cached, unless_out_of_memory
from rewardlab.training.records import Records
from rewardlab.training.schedule import build_schedule
from rewardlab.training.throughput import Peak, Throughput, Work, closing_line, speed_line

logger = logging.getLogger("rewardlab")
MicroBatch = TypeVar("MicroBatch")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one macro-step did."""

    sums: Sums
    grad_norm: float
    """Before clipping."""
    head_grad_norm: float
    throughput: Throughput
    lr: float
    """Learning rate of the update."""


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
        peak: Peak | None = None,
    ) -> None:
        """The optimiser's first group has the learning rate that is logged. `peak` is what utilisation is measured
        against.
        """
        self.model = model
        self.config = config
        self.num_steps = num_steps
        self.records = records
        self.peak = peak
        self.step = 0
        self.token_budget = config.token_budget
        """Tokens computed at a time: the configuration's, or half of it once memory ran out."""
        self.total = Throughput()
        """Of all steps of this process."""
        self._gradients_checked = False
        self._programs = compiled_programs()
        self.device = next(model.parameters()).device
        self._next: tuple[tuple[int, int], list[MicroBatch]] | None = None
        self.optimizer = optimizer
        self.schedule = build_schedule(self.optimizer, config, num_steps)
        self.eval_every = config.eval_every or max(1, num_steps // 10)

    # The hooks of a task.

    @abstractmethod
    def _plan(self, step: int) -> list[MicroBatch]:
        """The micro-batches of macro-step `step` (from 0), at most `token_budget` tokens each."""

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
        """Evaluate the model as it is, record it, and keep it if it is better."""

    @abstractmethod
    def _should_stop(self) -> str:
        """Why training should end after the evaluation just made, or an empty text."""

    @abstractmethod
    def _save(self) -> None:
        """Write the model as it is to its `step_N/` folder."""

    @final
    def fit(self) -> None:
        """Train to the last step, evaluating and saving at the configured cadence.

        Raises NonFiniteError before the update of a step whose loss or gradient is not finite.
        """
        self._evaluate()
        window, since_evaluation = _Window(), Throughput()
        bar = tqdm(total=self.num_steps, desc="training", disable=None, leave=False)
        while self.step < self.num_steps:
            report = self.train_step(self._planned(self.step))
            self.step += 1
            bar.update()
            window.add(report)
            since_evaluation += report.throughput
            last = self.step == self.num_steps
            due = last or self.step % self.eval_every == 0
            if due or self.step % self.config.log_every == 0:
                self._log(window)
                window = _Window()
            if due:
                self._log_speed(since_evaluation)
                since_evaluation = Throughput()
                self._evaluate()
                if not last and (reason := self._should_stop()):
                    logger.info("step %d/%d  STOP  %s", self.step, self.num_steps, reason)
                    last = True
            if last or (self.config.save_every and self.step % self.config.save_every == 0):
                self._save()
            if last:
                break
        bar.close()

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

        If memory runs out the step is planned again with half the budget and computed from its start, once.
        """
        started = time.perf_counter()
        # Known before any backward: each micro-batch's share depends on all the others.
        total_weight = sum(self._weight(batch) for batch in batches)
        if not total_weight > 0:
            raise NonFiniteError(
                f"step {self.step + 1}: the weights of its comparisons add up to {total_weight}. Examples: "
                f"{'; '.join(map(self._describe, batches))}. Leave out rows of weight 0, or raise --batch-size."
            )
        found = self._accumulate(batches, total_weight)
        if found is None:
            batches = self._with_half_the_budget()
            found = self._accumulate(batches, total_weight)
        if found is None:
            raise self._no_memory()
        if not self._gradients_checked:
            self._require_gradients()
            self._gradients_checked = True
        # The host works while the device does.
        work = sum((self._work(batch) for batch in batches), Work())
        if self.step + 1 < self.num_steps:
            self._planned(self.step + 1)
        host = found.tolist()  # the one synchronisation with the device in a macro-step
        per_batch, rest = host[: len(batches)], host[len(batches) :]
        self._require_finite(batches, per_batch, rest[-2])
        if unless_out_of_memory(self._update) is None:
            raise DeviceMemoryError(
                f"step {self.step + 1}: out of memory for the optimiser's state; AdamW's is two float32 copies of "
                f"every weight that trains. Train with --lora, another --optimizer or a smaller model; "
                f"--micro-token-budget does not change this."
            )
        sums = self._to_sums(math.fsum(per_batch), total_weight, rest[:-2])
        seconds = time.perf_counter() - started
        throughput = Throughput(work=work, comparisons=sums.comparisons, seconds=seconds, steps=1)
        self.total += throughput
        rate = self.lr
        self.schedule.step()
        return StepReport(sums=sums, grad_norm=rest[-2], head_grad_norm=rest[-1], throughput=throughput, lr=rate)

    def _accumulate(self, batches: Sequence[MicroBatch], total_weight: float) -> Tensor | None:
        """Clipped gradients of the step; returns, still on the device, the loss of each micro-batch, the summed
        statistics, the gradient norm and the head's. None if memory ran out on any rank.
        """

        def compute() -> Tensor:
            losses, statistics = [], []
            for batch in ahead(batches, self._move):
                loss, counted = self._forward(batch)
                torch.autograd.backward(loss / total_weight)
                losses.append(loss.detach().double())
                statistics.append(counted)
            head_norm = _norm(self._head().parameters())
            grad_norm = nn.utils.clip_grad_norm_(self._trainable(), self.config.max_grad_norm, foreach=True)
            return torch.cat(
                [torch.stack(losses), torch.stack(statistics).sum(0), torch.stack([grad_norm, head_norm]).double()]
            )

        found = unless_out_of_memory(compute)
        return None if self._any_rank(found is None) else found

    def _update(self) -> bool:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return True

    @property
    def lr(self) -> float:
        """Learning rate of the coming step."""
        return float(self.schedule.get_last_lr()[0])

    def _any_rank(self, flag: bool) -> bool:
        """Whether `flag` holds on any rank, so that all do the same next; there is one."""
        return flag

    def _planned(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step, made ahead of it or now."""
        key = (step, self.token_budget)
        if self._next is None or self._next[0] != key:
            self._next = (key, self._plan(step))
        return self._next[1]

    def _with_half_the_budget(self) -> list[MicroBatch]:
        """Drop what the step has computed, and plan it again: more micro-batches, the same mean."""
        self.optimizer.zero_grad(set_to_none=True)
        release_cached(self.device)
        budget = max(self.token_budget // 2, self._least_budget())
        if budget >= self.token_budget:
            raise self._no_memory()
        logger.warning(
            "step %d/%d  OUT OF MEMORY at --micro-token-budget %d; from here on %d, so set that",
            self.step + 1,
            self.num_steps,
            self.token_budget,
            budget,
        )
        self.token_budget = budget
        return self._planned(self.step)

    def _no_memory(self) -> DeviceMemoryError:
        self.optimizer.zero_grad(set_to_none=True)
        return DeviceMemoryError(
            f"step {self.step + 1}: out of memory, also with --micro-token-budget {self.token_budget}. "
            f"Set a smaller --micro-token-budget (at least {self._least_budget()}, the largest preference), lower "
            f"--max-seq-len, or turn on --activation-checkpointing. The weights are those of step {self.step}."
        )

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _require_finite(self, batches: Sequence[MicroBatch], losses: Sequence[float], grad_norm: float) -> None:
        if all(map(math.isfinite, losses)) and math.isfinite(grad_norm):
            return
        guilty = [batch for batch, loss in zip(batches, losses, strict=True) if not math.isfinite(loss)] or batches
        self.optimizer.zero_grad(set_to_none=True)
        raise NonFiniteError(
            f"step {self.step + 1}, rank 0: loss {losses}, gradient norm {grad_norm}; stopped before the update, so "
            f"the weights are those of step {self.step}. Examples: {'; '.join(map(self._describe, guilty))}. "
            f"Look at these rows; otherwise lower --lr, or use --precision fp32."
        )

    def _log(self, window: _Window) -> None:
        values = window.values(self.peak, peak_memory(self.device))
        self.records.add(self.step, values)
        remaining = (self.num_steps - self.step) * values["seconds"] / window.num_steps
        logger.info(
            "step %d/%d  loss %.4f  acc %.3f  margin %+.3f  grad %.2f  lr %.1e  %.1f pairs/s  %s left",
            self.step,
            self.num_steps,
            values["train_loss"],
            values["train_acc"],
            values["train_margin"],
            values["grad_norm"],
            values["lr"],
            values["pairs_per_second"],
            _duration(remaining),
        )

    def _log_speed(self, throughput: Throughput) -> None:
        values = throughput.values(self.peak, peak_memory(self.device))
        logger.info("step %d/%d  SPEED  %s", self.step, self.num_steps, speed_line(values))
        if compiled := growth_line(self._programs, self.step - throughput.steps):
            logger.info("step %d/%d  COMPILED  %s", self.step, self.num_steps, compiled)
            self._programs = compiled_programs()

    @final
    def speed(self) -> str:
        """The closing line about all steps, and what memory made of the budget."""
        line = closing_line(self.total, self.peak, peak_memory(self.device))
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


class _Window:
    """Steps since the last line of the log; their sums are divided once."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def add(self, report: StepReport) -> None:
        self.reports.append(report)

    @property
    def num_steps(self) -> int:
        return len(self.reports)

    def values(self, peak: Peak | None, peak_memory: int) -> dict[str, Any]:
        """Columns of metrics.csv."""
        sums = sum((report.sums for report in self.reports), Sums())
        throughput = sum((report.throughput for report in self.reports), Throughput())
        return {
            "train_loss": sums.mean_loss,
            "train_nll": sums.mean_nll,
            "train_acc": sums.accuracy,
            "train_margin": sums.mean_margin,
            "train_pairs": sums.comparisons,
            "grad_norm": sum(report.grad_norm for report in self.reports) / len(self.reports),
            "lr": self.reports[-1].lr,
            "head_grad_norm": sum(report.head_grad_norm for report in self.reports) / len(self.reports),
        } | throughput.values(peak, peak_memory)


def _norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return nn.utils.get_total_norm(gradients)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
