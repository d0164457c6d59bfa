"""Decides when a run writes a checkpoint, and when it ends early because somebody asked for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rewardlab.core.errors import RunInterrupted
from rewardlab.core.signals import STUCK, StopRequests
from rewardlab.distributed.ranks import Ranks
from rewardlab.training.checkpoints.checkpoint import prune, prune_after, write_checkpoint
from rewardlab.training.checkpoints.row_files import RowFiles
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import RunConfig


class Keeper:
    """Keeps checkpoints in the folder of a run. Every rank has one and calls the same methods in the same order."""

    def __init__(self, config: RunConfig, records: Records, ranks: Ranks, stops: StopRequests) -> None:
        self._config, self._run, self._ranks = config, records.folder, ranks
        self._rows = RowFiles(records)
        self.stops = stops
        self.kept_step = 0
        """The step of the last checkpoint, written or read; 0 if there is none, since step 0 needs no checkpoint."""
        self.began_at = 0
        """The step after which this process began."""
        self._kept_at = time.monotonic()

    def begin(self, step: int) -> None:
        """Go on after `step`, and remove the checkpoints of later steps, which the run computes again."""
        self.began_at = self.kept_step = step
        # Every rank must have read its checkpoint before the first one removes any.
        self._ranks.wait()
        if self._ranks.is_first:
            prune_after(self._run, step)

    def lacks(self, step: int) -> bool:
        """Return whether this step should have a checkpoint and has none."""
        return self._config.checkpoints and step != self.kept_step

    def is_due(self, step: int) -> bool:
        """Return whether it is time for another checkpoint, by steps or by the clock of any rank."""
        if self._config.checkpoint_every is not None:
            return step % self._config.checkpoint_every == 0
        # Clocks differ between ranks and writing is collective, so the ranks must agree.
        (due,) = self._ranks.any(time.monotonic() - self._kept_at >= 60 * self._config.checkpoint_minutes)
        return due

    def keep(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> tuple[Path, float]:
        """Write the checkpoint of a step, rows of the record included; return (folder, seconds that it took)."""
        started = time.monotonic()
        folder = write_checkpoint(
            self._run,
            step,
            tensors,
            state,
            rows=self._rows,
            ranks=self._ranks,
            keep=self._config.checkpoint_limit,
        )
        self.kept_step, self._kept_at = step, time.monotonic()
        return folder, self._kept_at - started

    def finish(self) -> None:
        """Remove all checkpoints but the newest; a run that has finished needs no more."""
        if self._config.checkpoints and self._ranks.is_first:
            prune(self._run, keep=1)

    def is_asked_to_stop(self) -> bool:
        """Return whether any rank was asked to stop."""
        (asked,) = self._ranks.any(bool(self.stops.reason))
        return asked

    def interruption(self, step: int, num_steps: int) -> RunInterrupted:
        """Return the error that ends the run after a step, with what to do next."""
        reasons = [reason for reason in self._ranks.gather(self.stops.reason) if reason]
        if step == 0:
            remedy = "Nothing was trained yet."
        elif self.kept_step == step:
            remedy = "Start the same command again with --resume auto to go on."
        else:
            remedy = "It cannot be resumed from here, because of --no-checkpoints."
        status = self.stops.exit_status
        # A batch script that queues the run again on the usual exit status would do so for ever.
        if reasons[0].startswith("--max-hours"):
            if step == self.began_at:
                remedy, status = "Not one step was done in that time; raise --max-hours.", STUCK
            elif self.kept_step != step:
                status = STUCK
        return RunInterrupted(f"stopped by {reasons[0]} after step {step} of {num_steps}. {remedy}", exit_status=status)
