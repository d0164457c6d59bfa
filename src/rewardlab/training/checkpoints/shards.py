"""Writes the tensors of a run to disk: a safetensors file for each rank, and an index in JSON of the rows in each.

tensors/rank_N.safetensors  what a rank wrote: its rows of sharded tensors, its share of replicated ones
tensors/index.json          name -> dtype, shape, and the pieces: file, first row, number of rows

Both are plain data: reading them executes nothing. Any number of ranks can read what any other number wrote.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from rewardlab.artifact.weights import FORMAT, KINDS, bytes_of, header
from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import read_json, write_json
from rewardlab.distributed.ranks import Ranks
from rewardlab.model.rounded_parts import rows_of

INDEX: Final = "index.json"
DTYPES: Final = {kind: dtype for dtype, kind in KINDS.items()}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some rows of a tensor, as they lie on the disk. A tensor without dimensions counts as one row."""

    start: int
    count: int
    read: Callable[[int, int], Tensor]
    """Reads its rows from the first number up to the second, counted within the piece."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor on the disk."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Sequence[Piece]

    def require_whole(self, name: str) -> None:
        """Raise ValueError unless the pieces together are all of its rows, each once."""
        end = 0
        for piece in sorted(self.pieces, key=lambda piece: piece.start):
            if piece.start != end:
                break
            end += piece.count
        if end != num_rows(self.shape):
            raise ValueError(f"{name}: some of its rows are missing")


def num_rows(shape: Sequence[int]) -> int:
    """Return the number of rows of a tensor; one without dimensions has one row."""
    return shape[0] if len(shape) else 1


def write_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, str]:
    """Write this rank's part of the tensors into a folder that exists, and, on the first rank, the index.

    Every rank calls it, with the same names. What several ranks hold alike is written by one of them, so that all write
    about the same number of bytes. Returns the SHA-256 of every file of all ranks by its name. Raises OSError on all
    ranks if one of them cannot write.
    """
    file = f"rank_{ranks.rank}.safetensors"
    own = _share(tensors, ranks)
    failure: OSError | None = None
    sums: dict[str, str] = {}
    try:
        sums[file] = _write(folder / file, {name: part for name, (part, _) in own.items()})
    # Not raised here: the other ranks are on their way to `gather` and would wait for this one for ever.
    except OSError as error:
        said = f"{error.strerror or error}{f', on rank {ranks.rank}' if ranks.size > 1 else ''}"
        failure = OSError(said) if error.errno is None else OSError(error.errno, said, str(folder))
    places = {name: (start, num_rows(part.shape)) for name, (part, start) in own.items()}
    told = ranks.gather((failure, sums, places))
    for problem, _, _ in told:
        if problem is not None:
            raise problem
    index: dict[str, dict[str, Any]] = {
        name: {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "pieces": []}
        for name, tensor in sorted(tensors.items())
    }
    for rank, (_, _, theirs) in enumerate(told):
        for name, (start, count) in theirs.items():
            index[name]["pieces"].append([f"rank_{rank}.safetensors", start, count])
    if ranks.is_first:
        write_json(folder / INDEX, index)
    return {name: digest for _, digests, _ in told for name, digest in digests.items()}


def open_shards(folder: Path) -> dict[str, Held]:
    """Return what `write_shards` wrote, by name; tensors are read later. Raises ValueError, KeyError or TypeError if
    the index is damaged.
    """
    index: Any = read_json(folder / INDEX)
    held = {}
    for name, entry in index.items():
        pieces = [
            Piece(start=int(start), count=int(count), read=_reader(folder, file, name, len(entry["shape"])))
            for file, start, count in entry["pieces"]
        ]
        held[name] = Held(dtype=DTYPES[entry["dtype"]], shape=tuple(map(int, entry["shape"])), pieces=pieces)
        held[name].require_whole(name)
    return held


def read_shards(held: Mapping[str, Held], tensors: Mapping[str, Tensor], *, where: Path) -> None:
    """Fill live tensors, or this rank's rows of them, by name. `where` is for messages.

    Raises ArtifactError if names, shapes or dtypes differ, or if a file does not hold what the index says.
    """
    if different := sorted(held.keys() ^ tensors.keys()):
        raise ArtifactError(
            f"{where} is of a model in which other parameters train: {different[0]} and {len(different) - 1} more are "
            f"in only one of the two. Resume with the settings that the run began with."
        )
    for name, tensor in tensors.items():
        entry = held[name]
        if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
            raise ArtifactError(
                f"{where} does not fit the model: {name} is {entry.dtype} {list(entry.shape)} there, and "
                f"{tensor.dtype} {list(tensor.shape)} here. Resume with the settings that the run began with."
            )
        part, start = _local(tensor)
        end = start + (num_rows(part.shape) if part.numel() else 0)
        for piece in entry.pieces:
            # The ranks that wrote may have divided the rows elsewhere, so a shard may need parts of several pieces.
            first, last = max(start, piece.start), min(end, piece.start + piece.count)
            if first < last:
                try:
                    rows = piece.read(first - piece.start, last - piece.start)
                    target = part[first - start : last - start] if part.ndim else part
                    if rows.shape != target.shape or rows.dtype is not target.dtype:
                        raise ValueError(f"{list(rows.shape)} of {rows.dtype}")
                except (OSError, ValueError, SafetensorError) as error:
                    raise ArtifactError(f"{where} is damaged: {name} cannot be read ({error}).") from error
                target.copy_(rows)


def _local(tensor: Tensor) -> tuple[Tensor, int]:
    """Return (this rank's rows of a tensor, the row of the whole tensor at which they begin)."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    return tensor.to_local().detach(), rows_of(tensor).start


def _share(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, tuple[Tensor, int]]:
    """Return the parts that this rank writes, each with the row at which it begins.

    Each part is written by one of the ranks that hold it: the one with the fewest bytes so far. All ranks reach the
    same division without communicating, from names and shapes.
    """
    own: dict[str, tuple[Tensor, int]] = {}
    bytes_by_holder: dict[int, list[int]] = {}
    for name, tensor in sorted(tensors.items()):
        holders, number = _holders(tensor, ranks)
        loads = bytes_by_holder.setdefault(holders, [0] * holders)
        chosen = loads.index(min(loads))
        loads[chosen] += tensor.numel() * tensor.itemsize
        part, start = _local(tensor)
        # A rank may hold no rows of a small tensor; an empty part is written only if the tensor itself is empty.
        if number == chosen and (part.numel() or not tensor.numel()):
            own[name] = (part, start)
    return own


def _holders(tensor: Tensor, ranks: Ranks) -> tuple[int, int]:
    """Return (how many ranks hold this rank's part of a tensor, the number of this rank among them)."""
    if not isinstance(tensor, DTensor):
        return ranks.size, ranks.rank
    alike = [number for number, placement in enumerate(tensor.placements) if placement.is_replicate()]
    holders, number = 1, 0
    for dimension in alike:
        size = tensor.device_mesh.size(dimension)
        holders, number = holders * size, number * size + tensor.device_mesh.get_local_rank(dimension)
    return holders, number


def _write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file, one tensor after the other, flush it to the disk, and return its SHA-256."""
    # The order of the safetensors format: the largest dtypes first, so that all data are aligned.
    order = sorted(tensors, key=lambda name: (-list(KINDS).index(tensors[name].dtype), name))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        head = header({name: (tuple(tensors[name].shape), tensors[name].dtype) for name in order}, FORMAT)
        digest.update(head)
        file.write(head)
        for name in order:
            # One tensor at a time, so that no second copy of the model has to fit into the memory of the host.
            content = bytes_of(tensors[name].detach().cpu().contiguous())
            digest.update(content)
            file.write(content)
        file.flush()
        # Without this the rename of the folder could reach the disk before the data, and a loss of power would leave a
        # checkpoint of empty files.
        os.fsync(file.fileno())
    return digest.hexdigest()


def _reader(folder: Path, file: str, name: str, num_dimensions: int) -> Callable[[int, int], Tensor]:
    if Path(file).name != file:
        # A name with a folder in it could make a damaged or crafted index read files elsewhere.
        raise ValueError(f"{file} is not the name of a file here")

    def read(first: int, last: int) -> Tensor:
        with safe_open(folder / file, framework="pt") as weights:
            rows: Tensor = weights.get_slice(name)[first:last] if num_dimensions else weights.get_tensor(name)
            return rows

    return read
