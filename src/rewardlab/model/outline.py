"""A model before its weights are read: its modules on the meta device, and where in the files each weight lies.

From an outline every rank reads only its own part of a model. Names in files are mapped to names in the model by
transformers' own rules. Models for which these rules do more than rename (fuse experts, unpack quantised weights), and
other kinds of files, get no outline: transformers reads them whole.
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
from rewardlab.model.disk_class import is_foreign
from rewardlab.model.files import INDEX, ONE_FILE, Found, Named, read_headers, shards_in, transformers_names
from rewardlab.model.reward import HEAD_ON_DISK
from rewardlab.model.text_part import for_text

DTYPES: Final = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"}
"""dtypes of safetensors whose values are the weights themselves; others are packed parts of quantised weights."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a weight lies: a safetensors file, and the weight's name in it."""

    file: str
    key: str

    def read(self, rows: slice | None = None) -> Tensor:
        """Read the weight, or the given rows of it, in the dtype of the file, and nothing else of the file."""
        with safe_open(self.file, framework="pt") as weights:
            entry = weights.get_slice(self.key)
            # A weight without dimensions has no rows to select.
            tensor: Tensor = entry[:] if rows is None or not entry.get_shape() else entry[rows]
            return tensor


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A sequence classifier without its weights, and where they lie."""

    classifier: Any
    """Its parameters, and buffers that files hold, are float32 on the meta device; other buffers have their values."""
    places: Mapping[str, Place]
    """Name in the classifier -> where the weight lies."""
    missing: frozenset[str]
    """Names of the classifier that are in no file: only those of a head, if any."""
    extra: frozenset[str]
    """Names in the files that the classifier does not have."""


class Originals(Mapping[str, Tensor]):
    """Weights in float32 by their names, each read from its file when it is asked for."""

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
    """Return the outline of the model at `name`, or a text that says why transformers has to read it whole.

    With `new_head` a head of another shape in the files counts as missing.
    """
    # Code that comes with a model may load its weights in its own way.
    if is_foreign(disk_class):
        return "its class is not one of transformers"
    config = AutoConfig.from_pretrained(name, num_labels=1)
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised"
    if getattr(config, "transformers_weights", None) is not None or find_adapter_config_file(name) is not None:
        return "its weights are in files with unusual names"
    files = _files_of(name)
    if not files:
        return "its weights are in no safetensors files"
    classifier = _empty(disk_class, config, implementation)
    # Two parameters that are one tensor would be sharded and read as two.
    if getattr(classifier, "all_tied_weights_keys", None):
        return "it has tied weights"
    wanted = classifier.state_dict()
    try:
        in_files = read_headers([Path(file) for file in files])
        named = transformers_names(classifier, wanted)
    except (ModelError, OSError) as error:
        return f"one of its files cannot be read ({error})"
    except ImportError as error:
        return f"this version of transformers keeps its rules for the names of weights elsewhere ({error})"
    return _match(classifier, wanted, in_files, named, new_head=new_head)


def _files_of(name: str) -> list[str]:
    """Return the paths of the model's safetensors files, downloaded from the hub if need be; none if one is missing.

    `cached_file` returns None for a missing file instead of raising, because of the option in `missing`.
    """
    missing: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    if (path := cached_file(name, ONE_FILE, **missing)) is not None:
        return [path]
    if (path := cached_file(name, INDEX, **missing)) is None:
        return []
    paths = [cached_file(name, file, **missing) for file in shards_in(Path(path))]
    return [path for path in paths if path is not None] if None not in paths else []


def _empty(disk_class: Any, config: Any, implementation: str) -> Any:
    """Build the classifier on the meta device, with real values only in buffers that no file holds."""
    with torch.device("meta"):
        attention = for_text(disk_class.config_class, implementation)
        classifier = disk_class._from_config(config, dtype=torch.float32, attn_implementation=attention)
    # Non-persistent buffers, such as the frequencies of rope, are in no file. They are computed when a model is built,
    # which on the meta device leaves them without values. So they are put on the CPU and computed again there;
    # initialize_weights does nothing to what is still on the meta device.
    for module in classifier.modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers.get(name)) is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    classifier.initialize_weights()
    return classifier


def _match(
    classifier: Any, wanted: Mapping[str, Tensor], in_files: Mapping[str, Found], named: Named, *, new_head: bool
) -> Outline | str:
    """Return the outline with the weights of the files under the names of the classifier, or why there is none."""
    places: dict[str, Place] = {}
    extra: set[str] = set()
    for key, weight in in_files.items():
        name, converted = named(key)
        if converted:
            return "transformers converts its weights while it reads them"
        # Extra weights are usual: the output layer of a language model is one, which a classifier does not have.
        if name not in wanted:
            extra.add(key)
            continue
        if name in places:
            return f"two weights in its files have the name {name} in the model"
        if weight.dtype not in DTYPES:
            return f"{key} has the dtype {weight.dtype}"
        if weight.shape != tuple(wanted[name].shape):
            if new_head and name.startswith(f"{HEAD_ON_DISK}."):
                continue
            return f"{key} has another shape than the model"
        places[name] = Place(file=weight.file, key=key)
    missing = frozenset(wanted.keys() - places.keys())
    if any(not name.startswith(f"{HEAD_ON_DISK}.") for name in missing):
        return "weights are missing from its files"
    return Outline(classifier=classifier, places=places, missing=missing, extra=frozenset(extra))
