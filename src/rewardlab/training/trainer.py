"""The base Trainer: steps, clipping, cadence, logging, evaluation and saving. It does not know what a reward is.

A task fills in the hooks; nobody overrides anything else.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor, nn
from tqdm import tqdm

from rewardlab.core.errors import NonFiniteError
from rewardlab.core.types import Sums
from rewardlab.training.config import TrainerConfig
from rewardlab.training.optimizer import build_optimizer
from rewardlab.training.records import Records

logger = logging.getLogger("rewardlab")
MicroBatch = TypeVar("MicroBatch")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one macro-step did."""

    sums: Sums
    grad_norm: float
    """Before clipping."""
    head_grad_norm: float
    num_tokens: int
    seconds: float


class Trainer(ABC, Generic[MicroBatch]):
    """Runs macro-steps: every step is one optimiser update by the mean over all comparisons of its micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainerConfig,
        *,
        lr: float,
        num_steps: int,
        decay_exempt: Iterable[str],
        records: Records,
    ) -> None:
        self.model = model
        self.config = config
        self.num_steps = num_steps
        self.records = records
        self.lr = lr
        self.step = 0
        self.optimizer = build_optimizer(
            model, lr=lr, weight_decay=config.weight_decay, decay_exempt=frozenset(decay_exempt)
        )
        self.eval_every = config.eval_every or max(1, num_steps // 10)

    # The hooks of a task.

    @abstractmethod
    def _plan(self, step: int) -> list[MicroBatch]:
        """The micro-batches of macro-step `step` (from 0)."""

    @abstractmethod
    def _weight(self, batch: MicroBatch) -> float:
        """What a micro-batch adds to Σ w."""

    @abstractmethod
    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(Σ w·ℓ with its graph, detached statistics) of a micro-batch."""

    @abstractmethod
    def _to_sums(self, loss: float, weight: float, statistics: list[float]) -> Sums:
        """Sums from what came back from the device."""

    @abstractmethod
    def _describe(self, batch: MicroBatch) -> str:
        """Which examples a micro-batch holds, for error messages."""

    @abstractmethod
    def _count_tokens(self, batch: MicroBatch) -> int:
        """Tokens that a micro-batch computes."""

    @abstractmethod
    def _head(self) -> nn.Module:
        """The part whose gradient norm is logged apart."""

    @abstractmethod
    def _evaluate(self) -> None:
        """Evaluate the model as it is, record it, and keep it if it is better."""

    @abstractmethod
    def _save(self) -> None:
        """Write the model as it is to its `step_N/` folder."""

    @final
    def fit(self) -> None:
        """Train to the last step, evaluating and saving at the configured cadence.

        Raises NonFiniteError before the update of a step whose loss or gradient is not finite.
        """
        self._evaluate()
        window = _Window()
        bar = tqdm(total=self.num_steps, desc="training", disable=None, leave=False)
        while self.step < self.num_steps:
            report = self.train_step(self._plan(self.step))
            self.step += 1
            bar.update()
            window.add(report)
            last = self.step == self.num_steps
            due = last or self.step % self.eval_every == 0
            if due or self.step % self.config.log_every == 0:
                self._log(window)
                window = _Window()
            if due:
                self._evaluate()
            if last or (self.config.save_every and self.step % self.config.save_every == 0):
                self._save()
        bar.close()

    @final
    def release(self) -> None:
        """Give the memory of weights and optimiser back; what was saved and recorded stays."""
        self.optimizer.state.clear()
        self.model.to("meta")

    @final
    def train_step(self, batches: Sequence[MicroBatch]) -> StepReport:
        """Move the weights once, by the mean gradient over every comparison of the batches."""
        started = time.perf_counter()
        # Known before any backward: each micro-batch's share depends on all the others.
        total_weight = sum(self._weight(batch) for batch in batches)
        if not total_weight > 0:
            raise NonFiniteError(
                f"step {self.step + 1}: the weights of its comparisons add up to {total_weight}. Examples: "
                f"{'; '.join(map(self._describe, batches))}. Leave out rows of weight 0, or raise --batch-size."
            )
        losses, statistics = [], []
        for batch in batches:
            loss, counted = self._forward(batch)
            torch.autograd.backward(loss / total_weight)
            losses.append(loss.detach().double())
            statistics.append(counted)
        head_norm = _norm(self._head().parameters())
        grad_norm = nn.utils.clip_grad_norm_(self._trainable(), self.config.max_grad_norm, foreach=True)
        # The one synchronisation with the device in a macro-step.
        host = torch.cat(
            [torch.stack(losses), torch.stack(statistics).sum(0), grad_norm.double()[None], head_norm.double()[None]]
        ).tolist()
        per_batch, rest = host[: len(batches)], host[len(batches) :]
        self._require_finite(batches, per_batch, rest[-2])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(
            sums=self._to_sums(math.fsum(per_batch), total_weight, rest[:-2]),
            grad_norm=rest[-2],
            head_grad_norm=rest[-1],
            num_tokens=sum(self._count_tokens(batch) for batch in batches),
            seconds=time.perf_counter() - started,
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
        values = window.values() | {"lr": self.lr}
        self.records.add(self.step, values)
        remaining = (self.num_steps - self.step) * values["seconds"] / window.num_steps
        logger.info(
            "step %d/%d  loss %.4f  acc %.3f  margin %+.3f  grad %.2f  %.1f pairs/s  %.0f tok/s  %s left",
            self.step,
            self.num_steps,
            values["train_loss"],
            values["train_acc"],
            values["train_margin"],
            values["grad_norm"],
            values["pairs_per_second"],
            values["tokens_per_second"],
            _duration(remaining),
        )


class _Window:
    """Steps since the last line of the log; their sums are divided once."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def add(self, report: StepReport) -> None:
        self.reports.append(report)

    @property
    def num_steps(self) -> int:
        return len(self.reports)

    def values(self) -> dict[str, Any]:
        """Columns of metrics.csv."""
        sums = sum((report.sums for report in self.reports), Sums())
        seconds = sum(report.seconds for report in self.reports)
        tokens = sum(report.num_tokens for report in self.reports)
        return {
            "train_loss": sums.mean_loss,
            "train_nll": sums.mean_nll,
            "train_acc": sums.accuracy,
            "train_margin": sums.mean_margin,
            "train_pairs": sums.comparisons,
            "grad_norm": sum(report.grad_norm for report in self.reports) / len(self.reports),
            "head_grad_norm": sum(report.head_grad_norm for report in self.reports) / len(self.reports),
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "pairs_per_second": sums.comparisons / seconds,
        }


def _norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return nn.utils.get_total_norm(gradients)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
