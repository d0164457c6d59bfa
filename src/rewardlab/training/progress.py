"""What the steps of a run did: one report a step, summed for the log, the speed lines and the closing line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rewardlab.core.types import Sums
from rewardlab.training.throughput import Peak, Throughput


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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepReport:
        """Inverse of `dataclasses.asdict`."""
        parts = {"sums": Sums(**values["sums"]), "throughput": Throughput.from_dict(values["throughput"])}
        return cls(**{**values, **parts})


@dataclass(kw_only=True)
class Progress:
    """Sums that are still open at some step; a checkpoint keeps them, so that a resumed run closes the same ones."""

    window: list[StepReport] = field(default_factory=list)
    """Steps since the last line of the log; their sums are divided once."""
    since_evaluation: Throughput = field(default_factory=Throughput)
    total: Throughput = field(default_factory=Throughput)
    """Of all steps."""

    def add(self, report: StepReport) -> None:
        """Count a step."""
        self.window.append(report)
        self.since_evaluation += report.throughput
        self.total += report.throughput

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Inverse of `state`."""
        return cls(
            window=[StepReport.from_dict(report) for report in values["window"]],
            since_evaluation=Throughput.from_dict(values["since_evaluation"]),
            total=Throughput.from_dict(values["total"]),
        )

    def close_window(self, peak: Peak | None, peak_memory: int) -> tuple[int, dict[str, Any]]:
        """(steps, columns of metrics.csv) of the window, after which a new one begins. `peak_memory` in bytes."""
        reports, self.window = self.window, []
        sums = sum((report.sums for report in reports), Sums())
        throughput = sum((report.throughput for report in reports), Throughput())
        return len(reports), {
            "train_loss": sums.mean_loss,
            "train_nll": sums.mean_nll,
            "train_acc": sums.accuracy,
            "train_margin": sums.mean_margin,
            "train_pairs": sums.comparisons,
            "grad_norm": sum(report.grad_norm for report in reports) / len(reports),
            "lr": reports[-1].lr,
            "head_grad_norm": sum(report.head_grad_norm for report in reports) / len(reports),
        } | throughput.values(peak, peak_memory)
