"""A model that is sharded over several ranks: each reads its own part from the files, and weights are gathered one by
one.

So a rank never holds more than its part, one whole weight, and what FSDP gathers for a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rewardlab.core.types import Log
from rewardlab.model.outline import Outline, Place, read_outline
from rewardlab.model.reward import RewardModel, disk_name
from rewardlab.model.rounded_parts import rows_of
from rewardlab.model.rounding import round_weights


@runtime_checkable
class Writers(Protocol):
    """The ranks that save a model together: all of them gather its weights, and the first writes them."""

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the one that writes."""

    def by_first(self, do: Callable[[], Any]) -> Any:
        """Call `do` on the first rank alone; return its result, or raise its error, on all ranks."""


class _Alone:
    """A process by itself."""

    is_first = True

    def by_first(self, do: Callable[[], Any]) -> Any:
        return do()


ALONE: Final[Writers] = _Alone()


@runtime_checkable
class Division(Writers, Protocol):
    """The ranks among which a model is divided.

    Methods are collective operations: every rank calls them, in the same order.
    """

    def divide(self, model: RewardModel) -> None:
        """Leave each rank with its part of the model, in place, on the head's device; weights may still be empty."""

    def gather(self, thing: Any) -> list[Any]:
        """Return what every rank handed in, in the order of the ranks, on all of them."""

    def tell(self, line: str) -> None:
        """Log a line, once for all ranks."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A weight that is gathered or computed only when it is needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: Callable[[bool], Tensor | None]
    """Gathers the weight. Every rank that holds a part of it has to call this; the argument says whether this rank
    wants the result, and one that does not gets None."""


def whole_of(tensor: Tensor) -> Tensor:
    """Return a weight whole. If it is sharded, every rank that holds a part has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def drop_gathered(model: nn.Module) -> None:
    """Free the weights that FSDP gathered for a forward pass, and undo the rounding of those that the rank holds.

    Before a model is saved: FSDP keeps the last gathered weights, and `RoundedParts` rounds shards in place.
    """
    if isinstance(model, FSDPModule):
        model.reshard()
    if isinstance(model, RewardModel) and model.half_weights is not None:
        model.half_weights.restore()


def worst(measure: Callable[[], float], division: Division | None) -> Callable[[], float]:
    """Return a function that measures on every rank and returns the largest result, so that all ranks decide alike.

    A NaN on any rank counts as the largest.
    """
    if division is None:
        return measure

    def measured() -> float:
        results: list[float] = division.gather(measure())
        # `max` may drop a NaN, which differs from itself and is neither larger nor smaller than any number.
        return next((number for number in results if number != number), max(results))

    return measured


def outline_of(
    disk_class: Any, name: str, implementation: str, *, new_head: bool, division: Division, log: Log
) -> Outline | None:
    """Return the outline of a model; or None, with a line in the log that says why the model has to be read whole."""
    try:
        outline = read_outline(disk_class, name, implementation, new_head=new_head)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        outline = f"{type(error).__name__}: {error}"
    # The ranks decide together: a file may be unreadable on one node alone, and ranks that took different ways would
    # wait for each other in different collectives.
    reasons = [
        reason for reason in division.gather(outline if isinstance(outline, str) else None) if reason is not None
    ]
    if reasons:
        log(f"load: every rank reads the whole model into its own memory first, because {reasons[0]}")
        return None
    assert isinstance(outline, Outline)
    return outline


def places_in(outline: Outline, model: RewardModel) -> dict[str, Place]:
    """Return where the weights lie, by the names of a RewardModel without adapters."""
    names = {disk_name(name, model.disk_class): name for name in model.state_dict()}
    return {names[name]: place for name, place in outline.places.items()}


def fill_head(model: RewardModel, places: Mapping[str, Place], device: torch.device) -> None:
    """Move the empty head to the device and read its weights, if the files hold any."""
    model.head.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.head.named_parameters():
            if (place := places.get(f"head.{name}")) is not None:
                parameter.copy_(place.read())


@contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """Within the block, replace weights on the meta device by zeros on the CPU that take no memory.

    PEFT creates adapters on the device of their layer's weight. On the meta device their initial values would be lost.
    Every stand-in is one zero expanded to the shape of its weight.
    """
    held = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for module, name, parameter in held:
        stand_in = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        module._parameters[name] = nn.Parameter(stand_in, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for module, name, parameter in held:
            stand_in_now = module._parameters[name]
            assert stand_in_now is not None
            # What was frozen inside, as PEFT freezes the backbone, stays frozen.
            module._parameters[name] = nn.Parameter(parameter.data, requires_grad=stand_in_now.requires_grad)


def fill(model: RewardModel, places: Mapping[str, Place], bare: Callable[[str], str]) -> bool:
    """Read this rank's part of every weight of a divided model that is still empty.

    `bare` maps the names of weights to those in `places`. Returns whether any weight on this rank was changed by
    rounding to the dtype in which the model holds it.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        return chain(model.named_parameters(), model.named_buffers())

    empty = {name for name, tensor in tensors() if tensor.is_meta}
    device = model.device
    module: Any = model  # nn.Module says nothing of `_apply`
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    rounded = False
    with torch.no_grad():
        for name, tensor in tensors():
            if name in empty:
                rounded = _fill(tensor, places[bare(name)], bare(name)) or rounded
    return rounded


def _fill(tensor: Tensor, place: Place, name: str) -> bool:
    """Read this rank's part of one weight; return whether rounding changed it."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not part.numel():  # a weight with fewer rows than ranks leaves some of them without any
        return False
    rows = rows_of(tensor) if isinstance(tensor, DTensor) else slice(0, None)
    read = place.read(rows)
    assert read.shape == part.shape, (place.key, read.shape, part.shape)
    if not part.is_floating_point():
        part.copy_(read)
        return False
    # Stochastic rounding draws for each value by its place in the whole weight, so that ranks together round as one
    # process would.
    begin = rows.start * math.prod(read.shape[1:])
    held = round_weights(read.float(), part.dtype, name, start=begin)
    part.copy_(held)
    return not torch.equal(held.float(), read.float())
