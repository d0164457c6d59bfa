"""What a step came to, on its way from the device, over the ranks, to the record: each border is crossed by one object.

Legend: B micro-batches of a rank, S statistics that a task counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewardlab.training.cost.throughput import Work


@dataclass(frozen=True, kw_only=True)
class Accumulated:
    """What the micro-batches of a step left on the device, all in float64."""

    losses_B: Tensor
    """Σ w·ℓ of each micro-batch."""
    statistics_S: Tensor
    """Their sums over the micro-batches."""
    grad_norm: Tensor
    """Of all gradients together, before clipping."""
    head_grad_norm: Tensor

    def fetch(self) -> Computed:
        """The same on the host: the one time that a step waits for the device."""
        norms = torch.stack([self.grad_norm, self.head_grad_norm])
        numbers = torch.cat([self.losses_B, self.statistics_S, norms]).tolist()
        num_losses = len(self.losses_B)
        return Computed(
            losses=numbers[:num_losses],
            statistics=numbers[num_losses:-2],
            grad_norm=numbers[-2],
            head_grad_norm=numbers[-1],
        )


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What a rank computed in a step."""

    losses: Sequence[float]
    """[B] Σ w·ℓ of each micro-batch."""
    statistics: Sequence[float]
    """[S]"""
    grad_norm: float
    head_grad_norm: float

    @property
    def is_finite(self) -> bool:
        """Whether the weights may be moved by it."""
        return all(map(math.isfinite, [*self.losses, self.grad_norm]))


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a rank adds to a step; the shares of all ranks are added number by number."""

    num_broken: float
    """1 for a rank whose loss or gradient is not finite."""
    loss: float
    """Σ w·ℓ over its micro-batches."""
    statistics: Sequence[float]
    """[S]"""
    work: Work

    @classmethod
    def of(cls, computed: Computed, work: Work) -> Share:
        """That of a rank."""
        finite = computed.is_finite
        return cls(
            num_broken=float(not finite),
            loss=math.fsum(computed.losses) if finite else math.nan,
            statistics=computed.statistics,
            work=work,
        )

    def numbers(self) -> list[float]:
        """All of it in a list."""
        return [self.num_broken, self.loss, *self.statistics, *self.work.numbers()]

    def like(self, numbers: Sequence[float]) -> Share:
        """Inverse of `numbers`, for a list of the same length."""
        num_broken, loss, *rest = numbers
        num_statistics = len(self.statistics)
        return Share(
            num_broken=num_broken,
            loss=loss,
            statistics=rest[:num_statistics],
            work=Work.from_numbers(rest[num_statistics:]),
        )


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """A whole step: every micro-batch of every rank."""

    loss: float
    """Σ w·ℓ."""
    weight: float
    """Σ w, by which the loss was divided."""
    statistics: Sequence[float]
    """[S], as `Steps.forward` counts them."""
    grad_norm: float
    """Before clipping."""
    head_grad_norm: float
    work: Work
    seconds: float
    lr: float
    """Learning rate of the update."""
