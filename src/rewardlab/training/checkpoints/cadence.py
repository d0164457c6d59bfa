"""When a run writes a checkpoint, and when it ends early because somebody asked for it."""

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
from rewardlab.training.settings.config import RunConfig


class Keeper:
    """Keeps checkpoints in the folder of a run. Every rank has one and asks it the same, in the same order."""

    def __init__(self, config: RunConfig, run: Path, ranks: Ranks, stops: StopRequests) -> None:
        self._config, self._run, self._ranks = config, run, ranks
        self.stops = stops
        self.kept_step = 0
        """The last step of which there is a checkpoint, written or read; there is nothing to keep of step 0."""
        self.began_at = 0
        """The step after which this process began."""
        self._kept_at = time.monotonic()

    def begin(self, step: int) -> None:
        """Go on after a step: checkpoints of later ones are of a course that is given up."""
        self.began_at = self.kept_step = step
        self._ranks.wait()  # until all have read theirs
        if self._ranks.is_first:
            prune_after(self._run, step)

    def lacks(self, step: int) -> bool:
        """Whether there is no checkpoint of this step and should be one."""
        return self._config.checkpoints and step != self.kept_step

    def is_due(self, step: int) -> bool:
        """Whether it is time for another, by steps or by the clock of any rank."""
        if self._config.checkpoint_every is not None:
            return step % self._config.checkpoint_every == 0
        (due,) = self._ranks.any(time.monotonic() - self._kept_at >= 60 * self._config.checkpoint_minutes)
        return due

    def keep(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> tuple[Path, float]:
        """Write the checkpoint of a step; returns its folder and the seconds that took."""
        started = time.monotonic()
        folder = write_checkpoint(
            self._run, step, tensors, state, ranks=self._ranks, keep=self._config.checkpoint_limit
        )
        self.kept_step, self._kept_at = step, time.monotonic()
        return folder, self._kept_at - started

    def finish(self) -> None:
        """Of a run that has come to its end one checkpoint is enough."""
        if self._config.checkpoints and self._ranks.is_first:
            prune(self._run, keep=1)

    def is_asked_to_stop(self) -> bool:
        """Whether any rank is."""
        (asked,) = self._ranks.any(bool(self.stops.reason))
        return asked

    def interruption(self, step: int, num_steps: int) -> RunInterrupted:
        """The error that ends the run after a step, with what to do next."""
        reasons = [reason for reason in self._ranks.gather(self.stops.reason) if reason]
        if step == 0:
            remedy = "Nothing was trained yet."
        elif self.kept_step == step:
            remedy = "Start the same command again with --resume auto to go on."
        else:
            remedy = "It cannot go on from here: --no-checkpoints."
        status = self.stops.exit_status
        if step == self.began_at and reasons[0].startswith("--max-hours"):
            remedy, status = "Not one step fitted into that; give it more.", STUCK  # queued again, it would never end
        return RunInterrupted(f"stopped by {reasons[0]} after step {step} of {num_steps}. {remedy}", exit_status=status)
