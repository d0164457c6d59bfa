"""How far two trainers are apart after the same steps: losses, gradient norms, weights and updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOSS_TOLERANCE = 1e-4
"""Largest difference of a step's loss."""
WEIGHT_TOLERANCE = 1e-3
"""Largest L2 distance of a weight tensor, relative to its norm."""
UPDATE_TOLERANCE = 1e-3
"""Largest L2 distance of all updates, relative to theirs: says something also where weights hardly move."""


@dataclass(frozen=True, kw_only=True)
class Track:
    """What a trainer did: loss and gradient norm (before clipping) of every step, trained weights before and after."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How far two tracks are apart. Tensors are compared in float64, by L2 distance."""

    model: str
    kind: str
    ours: Sequence[float]
    trl: Sequence[float]
    loss_distance: float
    """Largest, over the steps."""
    grad_norm_distance: float
    """Largest relative one, over the steps."""
    weight_distance: float
    """Largest relative to the norm of a tensor after training."""
    update_distance: float
    """Of all tensors as one vector, relative to how far they moved."""
    worst_update_distance: float
    """Largest of a tensor, relative to how far it moved."""
    worst_update: str
    total_update: float
    """How far the weights moved, relative to their norm: what the distances are about."""
    clipped_steps: int
    """Steps at which clipping acted."""
    seconds: tuple[float, float]
    """(ours, TRL's); the machine's, not a benchmark of speed."""

    @property
    def failures(self) -> list[str]:
        """Which of the three promises does not hold, in words."""
        found = []
        if not self.loss_distance <= LOSS_TOLERANCE:
            step = max(range(len(self.ours)), key=lambda n: abs(self.ours[n] - self.trl[n]))
            found.append(
                f"step {step + 1}: loss {self.ours[step]:.6f} here, {self.trl[step]:.6f} in TRL; they may differ by "
                f"{LOSS_TOLERANCE:g}"
            )
        if not self.weight_distance <= WEIGHT_TOLERANCE:
            found.append(f"a weight is {self.weight_distance:.1e} off, relatively; allowed is {WEIGHT_TOLERANCE:g}")
        if not self.update_distance <= UPDATE_TOLERANCE:
            found.append(f"updates are {self.update_distance:.1e} apart, relatively; allowed is {UPDATE_TOLERANCE:g}")
        return [f"{self.model}, {self.kind}: {text}" for text in found]


def compare(model: str, kind: str, ours: Track, trl: Track, *, max_grad_norm: float) -> Parity:
    """The distances between two tracks of the same steps and tensors."""
    assert set(ours.after) == set(trl.after), set(ours.after) ^ set(trl.after)
    assert len(ours.losses) == len(trl.losses) == len(trl.grad_norms)
    weight, update = {}, {}
    squares = torch.zeros(3, dtype=torch.float64)
    for name, before in ours.before.items():
        start, end, other = (tensor.double() for tensor in (before, ours.after[name], trl.after[name]))
        assert torch.equal(before, trl.before[name]), f"{name} does not start from the same values"
        gap, moved = (end - other).norm(), (end - start).norm()
        weight[name] = float(gap / end.norm())
        update[name] = float(gap / moved) if gap else 0.0
        squares += torch.stack([gap, moved, start.norm()]).square()
    gap, moved, size = squares.sqrt().tolist()
    worst = max(update, key=lambda name: update[name])
    return Parity(
        model=model,
        kind=kind,
        ours=ours.losses,
        trl=trl.losses,
        loss_distance=largest(abs(a - b) for a, b in zip(ours.losses, trl.losses, strict=True)),
        grad_norm_distance=largest(abs(a - b) / a for a, b in zip(ours.grad_norms, trl.grad_norms, strict=True)),
        weight_distance=largest(weight.values()),
        update_distance=gap / moved,
        worst_update_distance=update[worst],
        worst_update=worst,
        total_update=moved / size,
        clipped_steps=sum(norm > max_grad_norm for norm in ours.grad_norms),
        seconds=(ours.seconds, trl.seconds),
    )


def largest(values: Iterable[float]) -> float:
    """Their maximum; NaN if any is NaN, which `max` may overlook."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def table(parity: Parity) -> str:
    """The losses side by side, and the distances."""
    lines = [f"{parity.model}, {parity.kind}", f"{'step':>4}  {'rewardlab':>10}  {'TRL':>10}  {'difference':>10}"]
    for step, (a, b) in enumerate(zip(parity.ours, parity.trl, strict=True), start=1):
        lines.append(f"{step:>4}  {a:>10.6f}  {b:>10.6f}  {a - b:>+10.1e}")
    lines += [
        f"largest difference of a loss          {parity.loss_distance:.1e}  (allowed {LOSS_TOLERANCE:g})",
        f"gradient norm, relative               {parity.grad_norm_distance:.1e}  "
        f"(clipped at {parity.clipped_steps} of {len(parity.ours)} steps)",
        f"weights, relative, worst tensor       {parity.weight_distance:.1e}  (allowed {WEIGHT_TOLERANCE:g})",
        f"updates, relative, all tensors        {parity.update_distance:.1e}  (allowed {UPDATE_TOLERANCE:g}; "
        f"the weights moved by {parity.total_update:.1e} of their norm)",
        f"updates, relative, worst tensor       {parity.worst_update_distance:.1e}  ({parity.worst_update})",
        f"seconds                               {parity.seconds[0]:.0f} rewardlab, {parity.seconds[1]:.0f} TRL",
    ]
    return "\n".join(lines) + "\n"
