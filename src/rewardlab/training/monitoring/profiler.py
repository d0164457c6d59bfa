"""Traces some steps with torch's profiler: a trace to look at, and a table of the operators that took longest."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import torch
from torch import profiler

from rewardlab.core.errors import ConfigError
from rewardlab.core.files import write_text
from rewardlab.training.monitoring.observers import Observer

logger = logging.getLogger("rewardlab")

WARMUP_STEPS: Final = 2
"""Steps before the traced ones, in which kernels are chosen and the profiler itself starts."""
MOST_OPERATORS: Final = 30
"""Rows of the table."""


def require_steps(num_traced: int, num_steps: int) -> None:
    """Raise ConfigError if a run is too short to be traced."""
    if num_steps < WARMUP_STEPS + num_traced:
        raise ConfigError(
            f"--profile-steps {num_traced}: with {WARMUP_STEPS} steps to warm up that is more than the {num_steps} "
            f"of the run. Trace fewer, or raise --steps."
        )


class StepProfiler:
    """Traces the steps after `WARMUP_STEPS`, counted from the first one of this process."""

    def __init__(self, device: torch.device, folder: Path, *, num_traced: int) -> None:
        self.device = device
        self.folder = folder
        self.done = False
        activities = [profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(profiler.ProfilerActivity.CUDA)
        self._profiler = profiler.profile(
            activities=activities,
            schedule=profiler.schedule(wait=WARMUP_STEPS - 1, warmup=1, active=num_traced, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
        )
        self._running = False
        self._steps = 0

    def observer(self) -> Observer:
        """Return the observer to be told what happens."""
        return Observer(name="--profile", step_begins=self._begin, step_done=self._step_done, close=self._close)

    def _begin(self, step: int) -> None:
        if not self._running and not self.done:
            self._running = True
            self._profiler.start()

    def _step_done(self, step: int) -> None:
        if self._running:
            self._steps += 1
            self._profiler.step()
            # Stopped as soon as the trace is written, since the profiler slows every step down while it runs.
            if self.done:
                self._stop()

    def _close(self, failed: bool) -> None:
        if self._running:
            self._stop()
        if not self.done:
            logger.warning("--profile: the run ended before %d steps, so nothing was traced", WARMUP_STEPS + 1)

    def _stop(self) -> None:
        self._running = False
        self._profiler.stop()

    def _write(self, trace: Any) -> None:
        self.done = True
        self.folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(self.folder / "trace.json"))
        sort_by = f"self_{'device' if self.device.type == 'cuda' else 'cpu'}_time_total"
        table = trace.key_averages().table(sort_by=sort_by, row_limit=MOST_OPERATORS)
        write_text(self.folder / "operators.txt", table)
        logger.info(
            "profile: %d steps in %s (chrome://tracing or ui.perfetto.dev) and %s",
            self._steps - WARMUP_STEPS,
            self.folder / "trace.json",
            self.folder / "operators.txt",
        )
