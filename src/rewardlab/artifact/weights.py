"""Weights as a safetensors file, written one at a time: who writes holds a single one, which others help to gather.

The file is, byte for byte, what `safetensors.torch.save_file` makes of all of them at once.
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

from rewardlab.core.errors import RewardlabError
from rewardlab.model.parts import Weight, Writers

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
"""What the format calls each dtype, in the order of the format; files begin with the last."""


Cast = Callable[[Tensor, str], Tensor]
"""A weight and its name in the file -> the weight as the file holds it, on the CPU."""
FORMAT: Final = {"format": "pt"}


def write_weights(
    path: Path,
    weights: Mapping[str, Weight],
    ranks: Writers,
    *,
    cast: tuple[torch.dtype, Cast] | None = None,
    metadata: Mapping[str, str] = FORMAT,
) -> dict[str, str]:
    """Write the weights, and return what `digest` gives for each as it should be read back in float32, by its name.

    `cast` = (dtype, how) makes those of floating point what the file holds.

    Every rank calls it; the first writes, and it alone gets the digests. Raises OSError if the disk is full, or what
    a weight or `cast` refuses, on all ranks; a weight that cannot be gathered ends the rank on which it could not.
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
        # A file or a weight that is refused is told below, when no other rank waits for the first one to gather another
        # with it. Any other error may be one of gathering, after which the ranks are no longer at the same weight.
        try:
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
    """Equal for tensors that are equal bit for bit in float32."""
    whole = tensor.detach().cpu().contiguous()
    return hashlib.sha256(bytes_of(whole.float() if whole.is_floating_point() else whole)).hexdigest()


def _write(file: IO[bytes], tensor: Tensor, weight: Weight) -> str:
    assert tuple(tensor.shape) == weight.shape, (tuple(tensor.shape), weight.shape)
    file.write(bytes_of(tensor))
    return digest(tensor)


def _finish(path: Path, failures: Sequence[Exception]) -> None:
    if failures:
        raise failures[0]
    path.chmod((path.parent.stat().st_mode | 0o600) & 0o666)


def header(weights: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]) -> bytes:
    """What stands before the numbers: where each weight lies, in their order."""
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
    return tensor.reshape(-1).view(torch.uint8).numpy().data
