"""Lines of the log and rows of the record about the steps of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from rewardlab.training.compiled import compiled_programs, growth_line
from rewardlab.training.memory import peak_memory
from rewardlab.training.progress import Progress
from rewardlab.training.records import Records
from rewardlab.training.throughput import Peak, Throughput, closing_line, speed_line

logger = logging.getLogger("rewardlab")


class Logbook:
    """Sums up what steps did, and tells it: `progress` holds what has not been told yet."""

    def __init__(self, records: Records, *, num_steps: int, peak: Peak | None, device: torch.device) -> None:
        """`peak` is what utilisation is measured against."""
        self.progress = Progress()
        self._records, self._num_steps, self._peak, self._device = records, num_steps, peak, device
        self._programs = compiled_programs()

    def note_steps(self, step: int) -> Mapping[str, Any]:
        """The row and the line of the steps since the last ones; the row's values."""
        num_steps, values = self.progress.close_window(self._peak, peak_memory(self._device))
        self._records.add(step, values)
        remaining = (self._num_steps - step) * values["seconds"] / num_steps
        logger.info(
            "step %d/%d  loss %.4f  acc %.3f  margin %+.3f  grad %.2f  lr %.1e  %.1f pairs/s  %s left",
            step,
            self._num_steps,
            values["train_loss"],
            values["train_acc"],
            values["train_margin"],
            values["grad_norm"],
            values["lr"],
            values["pairs_per_second"],
            duration(remaining),
        )
        return values

    def note_budget(self, step: int, tried: int, budget: int) -> None:
        """A step that did not fit into memory, and is computed again in smaller parts."""
        logger.warning(
            "step %d/%d  OUT OF MEMORY at --micro-token-budget %d; from here on %d, so set that",
            *(step, self._num_steps, tried, budget),
        )

    def note_loss_scale(self, step: int, value: float) -> None:
        """A step that is computed again in float16."""
        logger.info(
            "step %d/%d  LOSS SCALE  gradients beyond float16's range; computed again with a loss scale of %g",
            *(step, self._num_steps, value),
        )

    def note_speed(self, step: int) -> None:
        """The line about the speed of the steps since the last evaluation."""
        throughput, self.progress.since_evaluation = self.progress.since_evaluation, Throughput()
        if not throughput.steps:
            return
        values = throughput.values(self._peak, peak_memory(self._device))
        logger.info("step %d/%d  SPEED  %s", step, self._num_steps, speed_line(values))
        if compiled := growth_line(self._programs, step - throughput.steps):
            logger.info("step %d/%d  COMPILED  %s", step, self._num_steps, compiled)
            self._programs = compiled_programs()

    def closing_line(self) -> str:
        """About all steps together."""
        return closing_line(self.progress.total, self._peak, peak_memory(self._device))


def duration(seconds: float) -> str:
    """`3m05s`, or `7s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
