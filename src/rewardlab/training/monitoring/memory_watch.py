"""Writes the memory of every step, forward and backward separately, to memory.csv."""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from rewardlab.core.libc import resident
from rewardlab.training.cost.memory import peak_memory, take_peak_memory
from rewardlab.training.monitoring.observers import Cadence, Observer

logger = logging.getLogger("rewardlab")

COLUMNS: Final = (
    "step",
    "allocated_gib",
    "reserved_gib",
    "forward_peak_gib",
    "backward_peak_gib",
    "process_gib",
    "process_peak_gib",
)
"""Columns of memory.csv, in GiB.

On a GPU: tensors and allocator after the step, and the peak of tensors in any of its forward and backward passes. On a
CPU: memory of the process, and its peak so far.
"""
GIB: Final = 2**30


class MemoryWatch:
    """Writes a row for each step. It reads counters on the host, so it never waits for the device."""

    def __init__(self, device: torch.device, path: Path, cadence: Cadence) -> None:
        """The largest values since the last time are logged where `cadence` is due."""
        self.device = device
        self.cadence = cadence
        self._forward = self._backward = 0
        self._since: list[dict[str, float]] = []
        # Line buffering: a run that is killed leaves whole rows.
        self._file = path.open("a", encoding="utf-8", newline="", buffering=1)
        self._writer = csv.DictWriter(self._file, fieldnames=COLUMNS, restval="", lineterminator="\n")
        if not self._file.tell():
            self._writer.writeheader()

    def observer(self) -> Observer:
        """Return the observer to be told what happens."""
        phases: dict[str, Any] = {}
        if self.device.type == "cuda":
            phases = {
                "step_begins": self._step_begins,
                "forward_done": self._forward_done,
                "backward_done": self._backward_done,
            }
        return Observer(
            name="--profile-memory",
            step_done=self._step_done,
            row=self._row,
            close=lambda failed: self._file.close(),
            **phases,
        )

    def _step_begins(self, step: int) -> None:
        self._forward = self._backward = 0
        take_peak_memory(self.device)

    def _forward_done(self) -> None:
        # Reading the peak resets torch's counter, so the backward pass that follows is measured by itself.
        self._forward = max(self._forward, take_peak_memory(self.device))

    def _backward_done(self) -> None:
        self._backward = max(self._backward, take_peak_memory(self.device))

    def _step_done(self, step: int) -> None:
        sizes: dict[str, int | None]
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            sizes = {
                "allocated_gib": stats["allocated_bytes.all.current"],
                "reserved_gib": stats["reserved_bytes.all.current"],
                "forward_peak_gib": self._forward,
                "backward_peak_gib": self._backward,
            }
        else:
            sizes = {"process_gib": resident(), "process_peak_gib": peak_memory(self.device) or None}
        row = {name: value / GIB for name, value in sizes.items() if value is not None}
        self._since.append(row)
        self._writer.writerow({"step": step} | {name: round(value, 4) for name, value in row.items()})

    def _row(self, step: int, values: Mapping[str, Any]) -> None:
        # A row is reported once with values of training steps and once with those of an evaluation; one line is enough.
        if "train_loss" not in values or not self.cadence.is_due(step):
            return
        most = {name: max(row[name] for row in self._since) for name in (self._since or [{}])[-1]}
        self._since = []
        words = {"process_gib": "process", "process_peak_gib": "its peak so far"}
        text = "  ".join(
            f"{words.get(name, name.removesuffix('_gib').replace('_', ' '))} {value:.2f} GiB"
            for name, value in most.items()
        )
        logger.info("%s  MEMORY  %s", self.cadence.label(step), text)
