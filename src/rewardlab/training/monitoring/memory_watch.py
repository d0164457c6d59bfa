"""Memory of every step, forward and backward apart, to memory.csv."""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from rewardlab.core.libc import resident
from rewardlab.training.cost.memory import peak_memory, take_peak
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
"""Columns of memory.csv: tensors and allocator after the step, the most that tensors took in any forward and backward
pass of it (on a GPU); what the process has, and the most that it had so far (on a CPU)."""
GIB: Final = 2**30


class MemoryWatch:
    """Writes a row a step; the host asks its own books, so the device is never waited for."""

    def __init__(self, device: torch.device, path: Path, cadence: Cadence) -> None:
        """The most since the last time is said where `cadence` is due."""
        self.device = device
        self.cadence = cadence
        self._forward = self._backward = 0
        self._since: list[dict[str, float]] = []
        self._file = path.open("a", encoding="utf-8", newline="", buffering=1)
        self._writer = csv.DictWriter(self._file, fieldnames=COLUMNS, restval="", lineterminator="\n")
        if not self._file.tell():
            self._writer.writeheader()

    def observer(self) -> Observer:
        """What it wants to be told."""
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
        take_peak(self.device)

    def _forward_done(self) -> None:
        self._forward = max(self._forward, take_peak(self.device))

    def _backward_done(self) -> None:
        self._backward = max(self._backward, take_peak(self.device))

    def _step_done(self, step: int) -> None:
        found: dict[str, int | None]
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            found = {
                "allocated_gib": stats["allocated_bytes.all.current"],
                "reserved_gib": stats["reserved_bytes.all.current"],
                "forward_peak_gib": self._forward,
                "backward_peak_gib": self._backward,
            }
        else:
            found = {"process_gib": resident(), "process_peak_gib": peak_memory(self.device) or None}
        row = {name: value / GIB for name, value in found.items() if value is not None}
        self._since.append(row)
        self._writer.writerow({"step": step} | {name: round(value, 4) for name, value in row.items()})

    def _row(self, step: int, values: Mapping[str, Any]) -> None:
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
