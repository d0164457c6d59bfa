"""A model that several processes hold in parts: filled from files part by part, and looked at one weight at a time.

Beyond its parts a process never holds more than one whole weight, and what FSDP gathers for a forward pass.
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

from rewardlab.model.half import rows_of
from rewardlab.model.outline import Outline, Place, read_outline
from rewardlab.model.reward import RewardModel, disk_name
from rewardlab.model.rounding import round_weights

Log = Callable[[str], None]


@runtime_checkable
class Writers(Protocol):
    """Processes of which the first writes what all of them help to gather."""

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes."""

    def by_first(self, do: Callable[[], Any]) -> Any:
        """What the first alone does: its result for all, or its error."""


class _Alone:
    is_first = True

    def by_first(self, do: Callable[[], Any]) -> Any:
        return do()


ALONE: Final[Writers] = _Alone()


@runtime_checkable
class Division(Writers, Protocol):
    """Processes that hold a model in parts. Every method is called by all of them, in the same order."""

    def divide(self, model: RewardModel) -> None:
        """Leave each process with its part, in place, on the device of the head; weights may still be empty."""

    def gather(self, thing: Any) -> list[Any]:
        """What each of them hands in."""

    def tell(self, line: str) -> None:
        """Say something, once."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A weight that is looked at when its turn comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: Callable[[bool], Tensor | None]
    """Every process that holds a part calls it; whether this one wants the weight, whole and on the CPU."""


def whole_of(tensor: Tensor) -> Tensor:
    """A weight whose parts lie with several processes, all of which call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def drop_gathered(model: nn.Module) -> None:
    """Leave a model with its parts alone, as they were trained: a forward pass may leave gathered copies, and parts
    that are rounded.
    """
    if isinstance(model, FSDPModule):
        model.reshard()
    if isinstance(model, RewardModel) and model.half_weights is not None:
        model.half_weights.restore()


def worst(measure: Callable[[], float], division: Division | None) -> Callable[[], float]:
    """What `measure` gives on that process on which it is largest, so that all decide alike."""
    if division is None:
        return measure

    def measured() -> float:
        found: list[float] = division.gather(measure())
        return next((number for number in found if number != number), max(found))

    return measured


def outline_of(
    disk_class: Any, name: str, implementation: str, *, new_head: bool, division: Division, log: Log
) -> Outline | None:
    """The outline of a model, or None, with a line that says why, where it has to be read whole first."""
    try:
        found = read_outline(disk_class, name, implementation, new_head=new_head)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        found = f"{type(error).__name__}: {error}"
    reasons = [reason for reason in division.gather(found if isinstance(found, str) else None) if reason is not None]
    if reasons:
        log(f"load: every rank reads the whole model into its own memory first, because {reasons[0]}")
        return None
    assert isinstance(found, Outline)
    return found


def places_in(outline: Outline, model: RewardModel) -> dict[str, Place]:
    """Where the weights lie, by the names of a bare RewardModel."""
    names = {disk_name(name, model.disk_class): name for name in model.state_dict()}
    return {names[name]: place for name, place in outline.places.items()}


def fill_head(model: RewardModel, places: Mapping[str, Place], device: torch.device) -> None:
    """Put the head on the device, with its weights where files hold them."""
    model.head.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.head.named_parameters():
            if (place := places.get(f"head.{name}")) is not None:
                parameter.copy_(place.read())


@contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """Meanwhile empty weights look as if they lay on the CPU, all their numbers in one place.

    PEFT puts adapters where the weight of their layer is, and on the meta device they would lose what was drawn.
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
            module._parameters[name] = nn.Parameter(parameter.data, requires_grad=stand_in_now.requires_grad)


def fill(model: RewardModel, places: Mapping[str, Place], bare: Callable[[str], str]) -> bool:
    """Read this process's part of every weight that is empty, once the model is divided; `bare` takes their names to
    those of the places.

    Returns whether rounding to the dtype in which any is held has changed it here.
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
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not part.numel():
        return False
    rows = rows_of(tensor) if isinstance(tensor, DTensor) else slice(0, None)
    read = place.read(rows)
    assert read.shape == part.shape, (place.key, read.shape, part.shape)
    if not part.is_floating_point():
        part.copy_(read)
        return False
    begin = rows.start * math.prod(read.shape[1:])
    held = round_weights(read.float(), part.dtype, name, start=begin)
    part.copy_(held)
    return not torch.equal(held.float(), read.float())
