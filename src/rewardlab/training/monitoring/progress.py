"""Sums up the steps of a run for the lines of the log and the rows of the record."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import torch
from torch._dynamo.utils import counters

from rewardlab.training.cost.memory import peak_memory
from rewardlab.training.cost.throughput import PeakFlops, Throughput, closing_line, speed_line
from rewardlab.training.monitoring.records import Records

logger = logging.getLogger("rewardlab")
SumsT = TypeVar("SumsT")

MUCH: Final = 1 / 3
"""Share of a run's time above which evaluating is told to take much of it."""
LONG_S: Final = 300.0
"""Seconds of evaluating in a whole run, below which nothing is said of its share."""


@runtime_checkable
class Tally(Protocol[SumsT]):
    """What a task counts in its steps. Sums are dataclasses of numbers; those of several steps are added by `+`."""

    @property
    def unit(self) -> str:
        """What the throughput of the task counts, in the plural."""

    def none(self) -> SumsT:
        """Return the sums over no step."""

    def read(self, values: Mapping[str, Any]) -> SumsT:
        """Return the sums that `dataclasses.asdict` turned into `values`."""

    def columns(self, sums: SumsT) -> dict[str, Any]:
        """Return columns of metrics.csv, with `train_loss` among them."""

    def words(self, values: Mapping[str, Any]) -> str:
        """Return what a line of the log says of these columns, besides the loss."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The result of one step."""

    sums: Any
    """What the task counts, see `Tally`."""
    grad_norm: float
    """Norm of all gradients before clipping."""
    head_grad_norm: float
    throughput: Throughput
    lr: float
    """Learning rate of the update."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], tally: Tally[Any]) -> StepReport:
        """Return the report that `dataclasses.asdict` turned into `values`."""
        parts = {"sums": tally.read(values["sums"]), "throughput": Throughput.from_dict(values["throughput"])}
        return cls(**{**values, **parts})


@dataclass(kw_only=True)
class Progress:
    """Sums that are still open at some step. A checkpoint keeps them, so that a resumed run closes the same sums."""

    window: list[StepReport] = field(default_factory=list)
    """Steps since the last line of the log; their sums are divided once."""
    since_evaluation: Throughput = field(default_factory=Throughput)
    total: Throughput = field(default_factory=Throughput)
    """All steps."""

    def add(self, report: StepReport) -> None:
        """Add a step."""
        self.window.append(report)
        self.since_evaluation += report.throughput
        self.total += report.throughput

    def state(self) -> dict[str, Any]:
        """Return the sums as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], tally: Tally[Any]) -> Progress:
        """Return the progress that `state` gave."""
        return cls(
            window=[StepReport.from_dict(report, tally) for report in values["window"]],
            since_evaluation=Throughput.from_dict(values["since_evaluation"]),
            total=Throughput.from_dict(values["total"]),
        )

    def close_window(
        self, tally: Tally[Any], peak_flops: PeakFlops | None, peak_memory: int
    ) -> tuple[int, dict[str, Any]]:
        """Return (number of steps, columns of metrics.csv) of the window, and begin a new one.

        `peak_memory` is in bytes.
        """
        reports, self.window = self.window, []
        sums = sum((report.sums for report in reports), tally.none())
        throughput = sum((report.throughput for report in reports), Throughput())
        return len(reports), {
            **tally.columns(sums),
            # Norms have no weights, so they are averaged over steps; losses are sums that are divided once.
            "grad_norm": sum(report.grad_norm for report in reports) / len(reports),
            "lr": reports[-1].lr,
            "head_grad_norm": sum(report.head_grad_norm for report in reports) / len(reports),
        } | throughput.values(peak_flops, peak_memory)


class Logbook:
    """Adds up steps, and logs and records the sums; `progress` holds what has not been logged yet."""

    def __init__(
        self,
        records: Records,
        tally: Tally[Any],
        *,
        num_steps: int,
        eval_every: int,
        peak_flops: PeakFlops | None,
        device: torch.device,
    ) -> None:
        """`peak_flops` is what utilisation is measured against; without it there is none."""
        self.progress = Progress()
        self._records, self._tally, self._num_steps = records, tally, num_steps
        self._evaluations = 1 + math.ceil(num_steps / eval_every)
        self._evaluation_s: float | None = None
        self._peak_flops, self._device = peak_flops, device
        self._programs = compiled_programs()

    def note_steps(self, step: int) -> Mapping[str, Any]:
        """Record and log the steps since the last time; return the values of the row."""
        num_steps, values = self.progress.close_window(self._tally, self._peak_flops, peak_memory(self._device))
        self._records.add(step, values)
        self._log(step, num_steps, values)
        if self._evaluation_s is not None:
            self._tell_of_evaluations(step, self._evaluation_s)
        return values

    def note_evaluation(self, seconds: float) -> None:
        """Take the first evaluation of this process as what each takes; the next line of steps may tell of it."""
        if self._evaluation_s is None:
            self._evaluation_s = seconds

    def _tell_of_evaluations(self, step: int, each_s: float) -> None:
        """Log once, if so, that evaluating takes much of the run, with the settings that change it."""
        self._evaluation_s = 0.0
        total = self.progress.total
        evaluating, training = each_s * self._evaluations, total.seconds / total.steps * self._num_steps
        if evaluating > LONG_S and evaluating > MUCH * (evaluating + training):
            logger.info(
                "step %d/%d  EVALUATING  takes about %.0f %% of the time of this run: %d times %s, and %s of steps. "
                "--eval-limit evaluates fewer rows (of test data, too), --eval-every less often, and a lower "
                "--eval-fraction holds fewer out",
                *(step, self._num_steps, 100 * evaluating / (evaluating + training)),
                *(self._evaluations, duration(each_s), duration(training)),
            )

    def show_step(self, step: int) -> None:
        """Log the open steps, without closing their sums or recording them: the next row is as it would be without."""
        window = Progress(window=self.progress.window)
        self._log(step, *window.close_window(self._tally, self._peak_flops, peak_memory(self._device)))

    def _log(self, step: int, num_steps: int, values: Mapping[str, Any]) -> None:
        remaining = (self._num_steps - step) * values["seconds"] / num_steps
        logger.info(
            "step %d/%d  loss %.4f  %s  grad %.2f  lr %.1e  %.1f %s/s  %s left",
            step,
            self._num_steps,
            values["train_loss"],
            self._tally.words(values),
            values["grad_norm"],
            values["lr"],
            values["pairs_per_second"],
            self._tally.unit,
            duration(remaining),
        )

    def note_budget(self, step: int, tried: int, budget: int) -> None:
        """Log that a step did not fit into memory and is computed again in smaller micro-batches."""
        logger.warning(
            "step %d/%d  OUT OF MEMORY at --micro-token-budget %d; from here on %d, so set that",
            *(step, self._num_steps, tried, budget),
        )

    def note_loss_scale(self, step: int, value: float) -> None:
        """Log that a step is computed again with a smaller loss scale."""
        logger.info(
            "step %d/%d  LOSS SCALE  gradients beyond float16's range; computed again with a loss scale of %g",
            *(step, self._num_steps, value),
        )

    def note_speed(self, step: int) -> None:
        """Log the speed of the steps since the last evaluation."""
        throughput, self.progress.since_evaluation = self.progress.since_evaluation, Throughput()
        if not throughput.steps:
            return
        values = throughput.values(self._peak_flops, peak_memory(self._device))
        logger.info("step %d/%d  SPEED  %s", step, self._num_steps, speed_line(values, unit=self._tally.unit))
        if compiled := growth_line(self._programs, step - throughput.steps):
            logger.info("step %d/%d  COMPILED  %s", step, self._num_steps, compiled)
            self._programs = compiled_programs()

    def closing_line(self) -> str:
        """Return a line about the speed of all steps together."""
        memory = peak_memory(self._device)
        return closing_line(self.progress.total, self._peak_flops, memory, unit=self._tally.unit)


def duration(seconds: float) -> str:
    """Return seconds as `3m05s`, or `7s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def compiled_programs() -> int:
    """Return how many programs torch.compile has made in this process so far."""
    return int(counters["stats"]["unique_graphs"])


def growth_line(before: int, since: int) -> str:
    """Return a line if programs were compiled since step `since`, when there were `before`; else an empty string."""
    now = compiled_programs()
    if now == before:
        return ""
    return f"{now} programs so far, {now - before} of them after step {since}"
