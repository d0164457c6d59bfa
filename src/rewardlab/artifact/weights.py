"""Writes weights to a safetensors file one at a time, so that the writing rank holds only one gathered weight.

The file is, byte for byte, the one that `safetensors.torch.save_file` would write from all weights at once.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor

from rewardlab.core.errors import RewardlabError, naming
from rewardlab.model.sharded_weights import Weight, Writers

KINDS: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""dtype -> its name in the format, in the order in which safetensors sorts them; files begin with the last."""


Cast = Callable[[Tensor, str], Tensor]
"""(a weight, its name in the file) -> the weight as the file holds it, on the CPU."""
FORMAT: Final = {"format": "pt"}
"""The smallest metadata that transformers accepts."""


def write_weights(
    path: Path,
    weights: Mapping[str, Weight],
    ranks: Writers,
    *,
    cast: tuple[torch.dtype, Cast] | None = None,
    metadata: Mapping[str, str] = FORMAT,
) -> dict[str, str]:
    """Write the weights; return for each name the `digest` of the weight as it should be read back in float32.

    `cast` = (dtype, function) says how floating-point weights become those of the file.

    Every rank calls this; the first writes, and it alone gets the digests. Raises OSError if the disk is full, and any
    RewardlabError of a weight or of `cast`, on all ranks. Any other error while a weight is gathered is raised only on
    the rank where it happened.
    """
    dtypes = {
        name: cast[0] if cast is not None and weight.dtype.is_floating_point else weight.dtype
        for name, weight in weights.items()
    }
    order = sorted(weights, key=lambda name: (-list(KINDS).index(dtypes[name]), name))
    digests: dict[str, str] = {}
    failures: list[Exception] = []

    @contextmanager
    def kept() -> Iterator[None]:
        # An error of the first rank in writing or casting is kept and raised at the end. If it were raised here, the
        # other ranks would wait forever to gather the next weight with it. Any other error may come from gathering
        # itself, after which the ranks are no longer at the same weight and cannot go on.
        try:
            with naming(path):
                yield
        except (OSError, RewardlabError) as error:
            if not ranks.is_first:
                raise
            failures.append(error)

    with ExitStack() as stack:
        file: IO[bytes] | None = None
        with kept():
            if ranks.is_first:
                file = stack.enter_context(path.open("wb"))
                file.write(header({name: (weights[name].shape, dtypes[name]) for name in order}, metadata))
        for name in order:
            with kept():
                tensor = weights[name].whole(file is not None and not failures)
                if file is not None and tensor is not None:
                    held = tensor.detach().cpu() if cast is None else cast[1](tensor, name)
                    assert held.dtype is dtypes[name], (name, held.dtype)
                    digests[name] = _write(file, held.contiguous(), weights[name])
        with kept():
            stack.close()
    ranks.by_first(lambda: _finish(path, failures))
    return digests


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's values in float32: equal for tensors that are equal bit for bit there."""
    whole = tensor.detach().cpu().contiguous()
    return hashlib.sha256(bytes_of(whole.float() if whole.is_floating_point() else whole)).hexdigest()


def _write(file: IO[bytes], tensor: Tensor, weight: Weight) -> str:
    """Append a weight's bytes to the file and return its digest."""
    assert tuple(tensor.shape) == weight.shape, (tuple(tensor.shape), weight.shape)
    file.write(bytes_of(tensor))
    return digest(tensor)


def _finish(path: Path, failures: Sequence[Exception]) -> None:
    """Raise the first failure if there was one, and give the file the permissions of its folder."""
    if failures:
        raise failures[0]
    path.chmod((path.parent.stat().st_mode | 0o600) & 0o666)


def header(weights: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file: its length, then JSON with each weight's place, padded to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, (shape, dtype) in weights.items():
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def bytes_of(tensor: Tensor) -> Any:
    """Return the memory of a contiguous CPU tensor as a buffer, without copying it."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
