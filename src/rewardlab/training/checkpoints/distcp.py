"""Reads tensors that earlier versions wrote with torch.distributed.checkpoint, without executing anything.

tensors/.metadata       a pickle that says which part of which tensor lies where tensors/__N_M.distcp    the parts, each
as torch.save writes it

A pickle can call any function that it names. Here the few names that such a file needs stand for plain records, and any
other is refused; the parts are read by torch.load with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rewardlab.artifact.weights import KINDS
from rewardlab.training.checkpoints.shards import Held, Piece

METADATA: Final = ".metadata"


class _Record:
    """Stands in for an object of torch.distributed.checkpoint, and keeps its attributes."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Index(_Record):
    """Stands in for the key of a part of a tensor: its name and offsets."""

    def key(self) -> tuple[str, tuple[int, ...]]:
        return self.state["fqn"], tuple(self.state["offset"])

    # Pickle sets the state of a dict's keys before it uses them, so the key is known here.
    def __hash__(self) -> int:
        return hash(self.key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and self.key() == other.key()


def _nothing(*_: object) -> None:
    """Stand in for a function whose result is not needed here."""


STANDING_IN: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    **{
        (f"torch.distributed.checkpoint.{module}", name): _Record
        for module, name in (
            ("metadata", "Metadata"),
            ("metadata", "TensorStorageMetadata"),
            ("metadata", "TensorProperties"),
            ("metadata", "ChunkStorageMetadata"),
            ("metadata", "StorageMeta"),
            ("filesystem", "_StorageInfo"),
        )
    },
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): _Index,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _nothing,
    ("builtins", "getattr"): _nothing,  # so Python before 3.11.4 wrote a member of that enumeration
    ("torch.serialization", "_get_layout"): _nothing,
    ("torch", "Size"): tuple,
    ("pathlib", "PosixPath"): _nothing,
    ("pathlib", "WindowsPath"): _nothing,
}
DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in KINDS}


class _Names(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # This is the only way in which a pickle can reach code, so every name that is not listed is refused.
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) not in STANDING_IN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint does")
        return STANDING_IN[module, name]


def open_distcp(folder: Path) -> dict[str, Held]:
    """Return the tensors in a folder by name. Raises ValueError if they are not what an earlier version wrote."""
    try:
        metadata: Any = _Names(io.BytesIO((folder / METADATA).read_bytes())).load()
        storage = {index.key(): info.state for index, info in metadata.state["storage_data"].items()}
        return {
            name: _held(folder, name, entry.state, storage)
            for name, entry in metadata.state["state_dict_metadata"].items()
        }
    except (OSError, ValueError):
        raise
    # A damaged pickle can raise almost any error.
    except Exception as error:
        raise ValueError(f"{METADATA} cannot be read ({error})") from error


def _held(folder: Path, name: str, entry: Any, storage: dict[tuple[str, tuple[int, ...]], Any]) -> Held:
    pieces = []
    for chunk in entry["chunks"]:
        offsets, sizes = chunk.state["offsets"], chunk.state["sizes"]
        # FSDP divides tensors by rows, and `read_shards` knows no other division.
        if tuple(sizes[1:]) != tuple(entry["size"][1:]):
            raise ValueError(f"{name} is not divided by rows")
        read = _reader(folder, storage[name, tuple(offsets)])
        pieces.append(Piece(start=offsets[0] if offsets else 0, count=sizes[0] if sizes else 1, read=read))
    held = Held(dtype=entry["properties"].state[0], shape=tuple(entry["size"]), pieces=pieces)
    held.require_whole(name)
    return held


def _reader(folder: Path, info: Any) -> Callable[[int, int], Tensor]:
    file, offset, length = str(info["relative_path"]), int(info["offset"]), int(info["length"])
    # A name with a folder in it could make a damaged or crafted file read others elsewhere.
    if Path(file).name != file:
        raise ValueError(f"{file} is not the name of a file here")

    def read(first: int, last: int) -> Tensor:
        with (folder / file).open("rb") as stream:
            stream.seek(offset)
            content = io.BytesIO(stream.read(length))
        try:
            part: Any = torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle, as above
            raise ValueError((str(error).splitlines() or [""])[0]) from error
        if not isinstance(part, Tensor):
            raise ValueError("it is not a tensor")
        return part[first:last] if part.ndim else part

    return read
