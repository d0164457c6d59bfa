"""Computes the hidden states that the head reads once, and keeps them on disk.

The states of a reply depend on its tokens, on the weights of the backbone and on the arithmetic. The name of the folder
is a hash of these. So another model, template or limit gets another folder, and states of different models cannot be
confused. Each file has its checksum beside it; if a file does not match, its states are computed again.

For each model there are also lists of the conversations whose last states each folder holds, so that other data with
some of the same conversations can find them (probing/cached.py).

Legend: R replies, W hidden width.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rewardlab.core.errors import DataError
from rewardlab.core.files import read_summed_json, sha256_file, write_summed_json
from rewardlab.core.folders import remove
from rewardlab.core.types import IntArray, TokenGroup
from rewardlab.data.groups import num_replies
from rewardlab.model.layers import layer_states
from rewardlab.model.reward import RewardModel
from rewardlab.score import compute_groups

logger = logging.getLogger("rewardlab")
FloatArray = npt.NDArray[np.float32]
CHUNK = 2048
"""Preferences computed between two writes to disk."""
DIGITS = 16
"""Hex digits of the hashes of a model, and of a model with data."""
FORMAT = 1
"""Increased whenever what is stored changes."""
SAYS_NOTHING = frozenset(
    {
        "transformers_version",
        "_name_or_path",
        # Differs between a reward-model folder and the model that it was trained from, though the backbone is the same.
        "architectures",
        "dtype",
        "id2label",
        "label2id",
        "num_labels",
        "pad_token_id",
        "problem_type",
        "rewardlab_spec_sha256",
        "use_cache",
    }
)
"""Entries of a model's configuration that do not affect the states."""


def states_of(
    model: RewardModel,
    groups: Sequence[TokenGroup],
    layers: Sequence[int],
    *,
    budget: int | None,
    cache: Path | None,
    name: str,
    of_model: str | None = None,
) -> dict[int, FloatArray]:
    """Return layer -> [R, W] float32 states of every reply, in order, read from `cache` if they are in it.

    Arrays are memory-mapped if a cache is given. `name` names the data in the progress bar and in messages. `of_model`
    is the model's `hash_of`, if it is known already. Raises DataError for a state that is not finite.
    """
    shape = (int(num_replies(groups).sum()), model.head.in_features)
    if cache is None:
        with tempfile.TemporaryDirectory() as scratch:
            _compute(model, groups, layers, Path(scratch), budget, name, shape)
            return {layer: np.load(state_file(Path(scratch), layer)) for layer in layers}
    of_model = of_model or hash_of(model)
    folder = cache / "states" / fingerprint(model, groups, of_model)
    missing = [layer for layer in layers if not is_whole(state_file(folder, layer), shape)]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_left_over(folder)
        _compute(model, groups, missing, folder, budget, name, shape)
    if model.config.num_hidden_layers in layers:
        _list_conversations(lists_of(cache, of_model) / f"{folder.name}.json", groups)
    logger.info(
        "states: %s: layers %s %s %s",
        name,
        " ".join(map(str, layers)),
        "read from" if not missing else "computed and kept in",
        folder,
    )
    return {layer: np.load(state_file(folder, layer), mmap_mode="r") for layer in layers}


def hash_of(model: RewardModel) -> str:
    """Return sixteen hex digits that change with the backbone's weights, its configuration and the arithmetic."""
    digest = hashlib.sha256()
    backbone: Any = model.backbone  # nn.Module says that `config` is a Tensor
    config = backbone.config.to_dict()
    settings = json.dumps({name: config[name] for name in sorted({*config} - SAYS_NOTHING)}, default=str)
    digest.update(f"{FORMAT} {model.compute_dtype} {model.layout} {settings}".encode())
    for name, tensor in sorted(model.backbone.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:DIGITS]


def fingerprint(model: RewardModel, groups: Sequence[TokenGroup], of_model: str | None = None) -> str:
    """Return sixteen hex digits that change with the weights, the configuration, the arithmetic or any token.

    `of_model` is the model's `hash_of`, if it is known already.
    """
    digest = hashlib.sha256((of_model or hash_of(model)).encode())
    for group in groups:
        digest.update(group.num_replies.to_bytes(4, "little"))
        for part in (group.shared, *group.suffixes):
            # Lengths are hashed too, so that tokens cannot move from one part to the next unnoticed.
            digest.update(len(part).to_bytes(4, "little"))
            digest.update(part.astype(np.int32).tobytes())
    return digest.hexdigest()[:DIGITS]


def lists_of(cache: Path, of_model: str) -> Path:
    """Return the folder with a list for each folder of last states of a model, by its `hash_of`.

    A list is called `<name of the folder of states>.json` and holds `conversations`, the keys of its rows in order.
    """
    return cache / "states" / "conversations" / of_model


def conversation_keys(shared: IntArray, suffixes: Sequence[IntArray]) -> list[str]:
    """Return 32 hex digits for each conversation `shared` + suffix, which depend on all of its tokens but not on where
    it is divided."""
    of_shared = hashlib.blake2b(shared.astype("<i4").tobytes(), digest_size=16)
    keys = []
    for suffix in suffixes:
        digest = of_shared.copy()
        digest.update(suffix.astype("<i4").tobytes())
        keys.append(digest.hexdigest())
    return keys


def _list_conversations(path: Path, groups: Sequence[TokenGroup]) -> None:
    """Write the list of a folder's conversations, unless it exists."""
    if not path.exists():
        keys = [key for group in groups for key in conversation_keys(group.shared, group.suffixes)]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_summed_json(path, {"conversations": keys})


def _compute(
    model: RewardModel,
    groups: Sequence[TokenGroup],
    layers: Sequence[int],
    folder: Path,
    budget: int | None,
    name: str,
    shape: tuple[int, int],
) -> None:
    """Write the states of the layers. Raises OSError if the disk is full.

    Each file gets its name only when it is complete.
    """
    # The number of the process keeps two probes that run at once from writing into the same file.
    unfinished = {layer: folder / f".layer_{layer}.{os.getpid()}.npy" for layer in layers}
    try:
        arrays = {layer: _new_array(path, shape) for layer, path in unfinished.items()}
        row = 0
        for start in range(0, len(groups), CHUNK):
            part = groups[start : start + CHUNK]
            progress = f"states of {name} data, {start + len(part)} of {len(groups)}"
            states = np.concatenate(
                compute_groups(
                    model, part, lambda batch: layer_states(model, batch, layers), budget=budget, progress=progress
                )
            )
            if not np.isfinite(states).all():
                raise DataError(
                    f"{name} data: the model's states are not finite in preferences "
                    f"{part[0].preference_id} to {part[-1].preference_id}. Use --precision fp32, or another model."
                )
            for column, layer in enumerate(layers):
                arrays[layer][row : row + len(states)] = states[:, column]
            row += len(states)
        for layer in layers:
            arrays[layer].flush()
            target = state_file(folder, layer)
            for path in (target, _sum_of(target)):
                if path.is_dir():
                    remove(path)  # a file cannot replace a folder
            # Write the checksum first: if the process is killed between the two, they do not match, and the states are
            # computed again.
            write_summed_json(_sum_of(target), {"states": sha256_file(unfinished[layer])})
            unfinished[layer].replace(target)
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)


def _new_array(path: Path, shape: tuple[int, int]) -> np.memmap:
    """Create an array on disk, and reserve its whole space now.

    If the disk became full later, a write to the mapped file would end the process by a signal, not by an error.
    """
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def is_whole(path: Path, shape: tuple[int, int]) -> bool:
    """Return whether the file holds the states that were written, in this shape. A damaged file gets a warning."""
    if not os.path.lexists(path):
        return False
    damage = "it is not a file"
    if path.is_file():
        try:
            if not _sum_of(path).is_file():
                damage = "it has no checksum"
            elif read_summed_json(_sum_of(path)) != {"states": sha256_file(path)}:
                damage = "it does not match its checksum"
            else:
                array = np.load(path, mmap_mode="r")
                damage = "" if array.shape == shape and array.dtype == np.float32 else "it has another shape or dtype"
        except (DataError, ValueError, EOFError, OSError) as error:
            damage = str(error)
    if damage:
        logger.warning("%s is damaged (%s); its states are computed again", path, damage)
    return not damage


def _remove_left_over(folder: Path) -> None:
    """Delete the unfinished files of processes that have ended."""
    for path in folder.glob(".layer_*.*.npy"):
        process = path.name.split(".")[2]
        # Without /proc it is not known whether the process still runs, so its file stays.
        if process.isdecimal() and not Path(f"/proc/{process}").exists() and Path("/proc/self").exists():
            path.unlink(missing_ok=True)


def state_file(folder: Path, layer: int) -> Path:
    """Return the file with the states of a layer in a folder of states."""
    return folder / f"layer_{layer}.npy"


def _sum_of(file: Path) -> Path:
    return file.with_suffix(".json")
