"""A model before its weights are read: its modules on the meta device, and where in the files each weight lies.

Names in files are taken to names inside by transformers' own rules. What those rules do beyond renaming (joining
experts, unpacking quantised weights), and other kinds of files, is left to transformers, which reads a model whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import cached_file, find_adapter_config_file

from rewardlab.core.errors import ModelError
from rewardlab.model.files import INDEX, ONE_FILE, Found, Named, read_headers, shards_in, transformers_names
from rewardlab.model.reward import HEAD_ON_DISK

DTYPES: Final = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"}
"""Kinds of numbers that are what they are; others are parts of quantised weights."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a weight lies."""

    file: str
    key: str

    def read(self, rows: slice | None = None) -> Tensor:
        """The weight, or rows of it, as the file has it; nothing else of the file is read."""
        with safe_open(self.file, framework="pt") as weights:
            lying = weights.get_slice(self.key)
            read: Tensor = lying[:] if rows is None or not lying.get_shape() else lying[rows]
            return read


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A sequence classifier without weights."""

    classifier: Any
    """Parameters and buffers that files hold are on the meta device, in float32; all other buffers are right."""
    places: Mapping[str, Place]
    """By the names of the classifier."""
    missing: frozenset[str]
    """Names that are in no file: those of the head, or none."""
    extra: frozenset[str]
    """Names in the files that are none of the classifier's."""


class Originals(Mapping[str, Tensor]):
    """Weights in float32, each read when it is asked for."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        weight = self._places[name].read()
        return weight.float() if weight.is_floating_point() else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_outline(disk_class: Any, name: str, implementation: str, *, new_head: bool) -> Outline | str:
    """The outline of the model at `name`, or why it has to be read whole by transformers.

    `new_head`: a head of another shape in the files counts as missing.
    """
    if not disk_class.__module__.startswith("transformers.models."):
        return "its class is not one of transformers"
    config = AutoConfig.from_pretrained(name, num_labels=1)
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised"
    if getattr(config, "transformers_weights", None) is not None or find_adapter_config_file(name) is not None:
        return "its files are not named as usual"
    files = _files_of(name)
    if not files:
        return "its weights are in no safetensors files"
    classifier = _empty(disk_class, config, implementation)
    if getattr(classifier, "all_tied_weights_keys", None):
        return "it has tied weights"
    wanted = classifier.state_dict()
    try:
        found = read_headers([Path(file) for file in files])
        named = transformers_names(classifier, wanted)
    except (ModelError, OSError) as error:
        return f"a file of it cannot be read ({error})"
    except ImportError as error:
        return f"this version of transformers keeps its rules for the names of weights elsewhere ({error})"
    return _matched(classifier, wanted, found, named, new_head=new_head)


def _files_of(name: str) -> list[str]:
    """Paths of the safetensors files, brought from the hub if need be; none if there are others in their place."""
    missing: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    if (path := cached_file(name, ONE_FILE, **missing)) is not None:
        return [path]
    if (path := cached_file(name, INDEX, **missing)) is None:
        return []
    paths = [cached_file(name, file, **missing) for file in shards_in(Path(path))]
    return [path for path in paths if path is not None] if None not in paths else []


def _empty(disk_class: Any, config: Any, implementation: str) -> Any:
    """The classifier on the meta device, but for buffers that no file holds."""
    with torch.device("meta"):
        classifier = disk_class._from_config(config, dtype=torch.float32, attn_implementation=implementation)
    for module in classifier.modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers.get(name)) is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    classifier.initialize_weights()  # computes those buffers; on the meta device it does nothing
    return classifier


def _matched(
    classifier: Any, wanted: Mapping[str, Tensor], found: Mapping[str, Found], named: Named, *, new_head: bool
) -> Outline | str:
    """The weights of the files under the names of the classifier."""
    places: dict[str, Place] = {}
    extra: set[str] = set()
    for key, weight in found.items():
        name, converted = named(key)
        if converted:
            return "transformers converts its weights while it reads them"
        if name not in wanted:  # such as the head of a language model
            extra.add(key)
            continue
        if name in places:
            return f"two of its weights are {name}"
        if weight.dtype not in DTYPES:
            return f"{key} is of kind {weight.dtype}"
        if weight.shape != tuple(wanted[name].shape):
            if new_head and name.startswith(f"{HEAD_ON_DISK}."):
                continue
            return f"{key} has another shape than the model"
        places[name] = Place(file=weight.file, key=key)
    missing = frozenset(wanted.keys() - places.keys())
    if any(not name.startswith(f"{HEAD_ON_DISK}.") for name in missing):
        return "weights are missing from its files"
    return Outline(classifier=classifier, places=places, missing=missing, extra=frozenset(extra))
