"""The shards of weights under FSDP, rounded to half precision in place while the model computes."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rewardlab.model.half import AS_SAVED, weights_with_copies
from rewardlab.model.rounding import Part, name_seed, round_together


class RoundedParts:
    """The shards of weights that would have copies, rounded in place while a model under FSDP computes.

    FSDP casts the weights it gathers to half precision, to the nearest. That changes nothing if they are rounded
    already, so their shards are rounded before. The float32 values are kept beside them and put back before the weights
    are read or updated. Every rank draws for its shard what a single process would draw for these rows.
    """

    def __init__(self, module: nn.Module, prefix: str, dtype: torch.dtype) -> None:
        """Take the float32 weights that train of linear layers and joined experts; `prefix` is as in `HalfWeights`."""
        self.dtype = dtype
        self._weights = [
            (name_seed(name), weight)
            for name, layer, own in weights_with_copies(module, prefix)
            if (weight := getattr(layer, own)).requires_grad and weight.dtype is torch.float32
        ]
        self._draw: tuple[int, ...] | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def refresh(self, draw: tuple[int, ...] = AS_SAVED) -> bool:
        """Round every shard by this draw, unless it is rounded so already; return whether it was not."""
        if self._draw == draw:
            return False
        self.restore()
        parts: list[Part] = []
        for seed_of_name, weight in self._weights:
            assert isinstance(weight, DTensor)
            part, width = weight.to_local(), prod(weight.shape[1:])
            self._kept.append((part, part.clone()))
            # The draws are counted over the whole weight, so those of a shard begin at its first row.
            start = rows_of(weight).start * width
            parts.append(Part(part, (*draw, *seed_of_name), part, start))
        round_together(parts, self.dtype)
        self._draw = draw
        return True

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the float32 values."""
        for part, kept in self._kept:
            part.copy_(kept)
        self._kept, self._draw = [], None

    def drop(self) -> None:
        """Put back the float32 values and stop rounding these weights."""
        self.restore()
        self._weights = []


def rows_of(tensor: DTensor) -> slice:
    """Return the rows of a weight that lie with this rank: FSDP shards the first dimension in equal chunks.

    The last ranks have fewer rows, or none, if the rows do not divide evenly.
    """
    mesh = tensor.device_mesh
    (dimension,) = (number for number, placement in enumerate(tensor.placements) if placement.is_shard(0))
    count = tensor.shape[0]
    chunk = -(-count // mesh.size(dimension))
    start = min(count, chunk * mesh.get_local_rank(dimension))
    return slice(start, min(count, start + chunk))
