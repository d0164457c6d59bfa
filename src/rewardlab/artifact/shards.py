"""Weights in one file or in several with an index, and the bias of zero that some engines expect."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from rewardlab.core.errors import ConfigError
from rewardlab.core.files import write_json
from rewardlab.core.terminal import short
from rewardlab.model.files import INDEX, ONE_FILE
from rewardlab.model.reward import HEAD_ON_DISK
from rewardlab.model.sharded_weights import Weight, Writers

UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
BIAS: Final = f"{HEAD_ON_DISK}.bias"
"""Name of the head's bias on disk. It is zero where there is one: transformers would ignore another value."""


@dataclass(frozen=True, kw_only=True)
class FileForm:
    """How the weights of a folder are divided into files."""

    max_shard_bytes: int | None = None
    """Largest size of a file of weights; None for one file. A single weight above it gets a file of its own."""
    zero_bias: bool = False
    """Whether the files hold a bias of zero for the head."""


ONE: Final = FileForm()


def bytes_of_size(text: str) -> int:
    """Return the number of bytes of a text such as `5GB` or `500MiB`. Raises ConfigError for any other text."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMG]i?B)?", text, flags=re.IGNORECASE)
    if match is None or (size := int(float(match[1]) * UNITS[(match[2] or "").upper()])) < 1:
        raise ConfigError(f"--max-shard-size {short(text)}: must be a size such as 5GB, 500MB or 2GiB.")
    return size


Write = Callable[[Path, Mapping[str, Weight]], dict[str, str]]
"""Writes weights to one file and returns their digests, as `write_weights` does."""


def write_files(
    folder: Path, weights: Mapping[str, Weight], ranks: Writers, *, form: FileForm, dtype: torch.dtype, write: Write
) -> dict[str, str]:
    """Write the weights of a model, in `dtype`, to the files of `form`; return all digests that `write` returns."""
    # The shapes and dtypes are known on every rank, so all of them divide the weights in the same way.
    shards = _divided(weights, dtype, form.max_shard_bytes)
    if len(shards) == 1:
        return write(folder / ONE_FILE, weights)
    digests: dict[str, str] = {}
    place: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        place |= dict.fromkeys(names, file)
        digests |= write(folder / file, {name: weights[name] for name in names})
    total = sum(_size(weight, dtype) for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
    ranks.by_first(lambda: write_json(folder / INDEX, index))
    return digests


def zero_bias() -> Weight:
    """Return the bias of zero as a weight to be written."""
    return Weight(shape=(1,), dtype=torch.float32, whole=_zero)


def _zero(wanted: bool) -> Tensor | None:
    return torch.zeros(1) if wanted else None


def _divided(weights: Mapping[str, Weight], dtype: torch.dtype, most: int | None) -> list[list[str]]:
    """Return the names in each file, in the order of the model; only a file of one weight may be larger than `most`."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, weight in weights.items():
        size = _size(weight, dtype)
        if most is not None and shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _size(weight: Weight, dtype: torch.dtype) -> int:
    """Return how many bytes a weight takes in its file."""
    held = dtype if weight.dtype.is_floating_point else weight.dtype
    return math.prod(weight.shape) * held.itemsize
