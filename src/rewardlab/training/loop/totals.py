"""The results of a step: on the device, on a rank, over all ranks. One class for each of these stages.

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
    """Sums over the micro-batches."""
    grad_norm: Tensor
    """[] norm of all gradients together, before clipping."""
    head_grad_norm: Tensor

    def fetch(self) -> Computed:
        """Return the same numbers on the host. This is the one time in a step that the host waits for the device."""
        # One tensor, so that there is one copy from the device and not one for each number.
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
    """What a rank computed in a step, on the host."""

    losses: Sequence[float]
    """[B] Σ w·ℓ of each micro-batch."""
    statistics: Sequence[float]
    """[S] sums over the micro-batches."""
    grad_norm: float
    head_grad_norm: float

    @property
    def is_finite(self) -> bool:
        """Return whether all losses and the gradient norm are finite, so that the weights may be updated."""
        return all(map(math.isfinite, [*self.losses, self.grad_norm]))


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a rank adds to a step; the shares of all ranks are added number by number."""

    num_broken: float
    """1 for a rank whose loss or gradient is not finite."""
    loss: float
    """Σ w·ℓ over its micro-batches."""
    statistics: Sequence[float]
    """[S] sums over its micro-batches."""
    work: Work

    @classmethod
    def of(cls, computed: Computed, work: Work) -> Share:
        """Return the share of a rank."""
        finite = computed.is_finite
        return cls(
            # Counted by itself, so that after the sum every rank sees it and stops at the same step.
            num_broken=float(not finite),
            loss=math.fsum(computed.losses) if finite else math.nan,
            statistics=computed.statistics,
            work=work,
        )

    def numbers(self) -> list[float]:
        """Return all of its numbers in a list, to be summed over the ranks."""
        return [self.num_broken, self.loss, *self.statistics, *self.work.numbers()]

    def with_numbers(self, numbers: Sequence[float]) -> Share:
        """Return the share that has these numbers: the inverse of `numbers`, for a list of the same length."""
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
    """Norm of all gradients before clipping."""
    head_grad_norm: float
    work: Work
    seconds: float
    lr: float
    """Learning rate of the update."""
