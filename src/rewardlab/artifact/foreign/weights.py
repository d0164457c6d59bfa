"""The weight files of a foreign model: names and shapes, and single weights, from safetensors or pickles.

Pickles are read only by `torch.load(weights_only=True)`, which runs none of their code.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from rewardlab.core.errors import ModelError
from rewardlab.model.files import DAMAGED_BASE, FETCH, files_in, read_headers, weight_files

PICKLE: Final = "pytorch_model.bin"
PICKLE_INDEX: Final = "pytorch_model.bin.index.json"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A weight in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """The dtype as the file names it: `F32`, or `torch.float32` in a pickle."""


def entries_of(folder: Path) -> dict[str, Entry]:
    """Return name -> entry of every weight that transformers would read from a folder; safetensors come first.

    Raises ModelError if there are no weights, or for files that are missing, damaged or would run code.
    """
    files = weight_files(folder) or _pickles(folder)
    if not files:
        raise ModelError(
            f"{folder}: no weights: neither model.safetensors nor {PICKLE}, nor an index of either. {FETCH}"
        )
    return {name: entry for file in files for name, entry in entries_in(file).items()}


def entries_in(file: Path) -> dict[str, Entry]:
    """Return name -> entry of every weight in one file. Raises ModelError if it is damaged or would run code."""
    if file.suffix == ".safetensors":
        headers = read_headers([file])
        return {name: Entry(file=file, shape=one.shape, dtype=one.dtype) for name, one in headers.items()}
    return {
        name: Entry(file=file, shape=tuple(tensor.shape), dtype=str(tensor.dtype))
        for name, tensor in _read_pickle(file).items()
    }


def read_weight(entry: Entry, name: str) -> Tensor:
    """Return a weight in float32. Raises ModelError if its file is damaged."""
    if entry.file.suffix == ".safetensors":
        with safe_open(entry.file, framework="pt") as weights:
            tensor: Tensor = weights.get_tensor(name)
    else:
        tensor = _read_pickle(entry.file)[name]
    return tensor.float()


def _pickles(folder: Path) -> list[Path]:
    """Return the pickles with the weights of a folder. Raises ModelError if its index names one that is missing."""
    if (folder / PICKLE).is_file():
        return [folder / PICKLE]
    index = folder / PICKLE_INDEX
    return files_in(index) if index.is_file() else []


def _read_pickle(file: Path) -> Mapping[str, Tensor]:
    """Return the weights in a pickle, memory-mapped if its format allows that."""
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{file}: it holds more than weights, or would run code when it is opened, which is never allowed. Convert "
            f"it to safetensors where you trust it."
        ) from error
    except Exception as error:  # torch raises errors of many types for a damaged file
        raise DAMAGED_BASE.of(f"{file}: damaged, or cut off ({type(error).__name__}).") from error
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise DAMAGED_BASE.of(f"{file}: it is not a table of weights by name.")
    return content
