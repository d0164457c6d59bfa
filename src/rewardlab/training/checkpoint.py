"""Checkpoints: what an exact resume needs, in folders of their own beside the reward models.

checkpoints/step_N/
  tensors/          weights that train and the optimiser's state (torch.distributed.checkpoint)
  state.json        step, open sums of the log, rows of the record, what selects the best
  checkpoint.json   SHA-256 of every file, so that damage is seen before anything is read

A folder is written under another name and renamed when all of it is on the disk. The tensors are in one file a rank,
and can be read by any number of ranks.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import read_json, remove, replacing_folder, sha256_file, write_json, write_text
from rewardlab.training.ranks import Ranks
from rewardlab.training.run_folder import CHECKPOINTS, saved_steps

logger = logging.getLogger("rewardlab")
FORMAT: Final = 1
DAMAGED: Final = ".damaged"
"""Ending of the name that a checkpoint gets when it turns out not to be what was written."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One that was found whole."""

    folder: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.state["step"])

    def names(self) -> set[str]:
        """Names of its tensors."""
        return set(FileSystemReader(self.folder / "tensors").read_metadata().state_dict_metadata)

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill live tensors by name.

        Raises ArtifactError if the checkpoint is of other tensors: of another model, or of other parts that train.
        """
        reader, held = FileSystemReader(self.folder / "tensors"), self.names()
        if different := sorted(held ^ set(tensors)):
            raise ArtifactError(
                f"{self.folder} is of a model of which other parts train: {different[0]} and {len(different) - 1} more "
                f"are not in both. Resume with the settings that the run began with."
            )
        try:
            with _quiet():
                load(dict(tensors), storage_reader=reader)
        except CheckpointException as error:  # which is no Exception; sizes, most likely
            raise ArtifactError(f"{self.folder} does not fit the model: {_cause(error)}") from error


def write_checkpoint(
    run: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, ranks: Ranks, keep: int
) -> Path:
    """Write `checkpoints/step_N` in the folder of a run and remove all but the `keep` newest; returns its folder.

    Every rank calls it, with its own shards. Raises OSError if the disk is full: earlier checkpoints are untouched.
    """
    target = run / CHECKPOINTS / f"step_{step}"
    with _shared_folder(target, ranks) as temporary:
        writer = FileSystemWriter(temporary / "tensors")
        try:
            with _quiet():
                save(dict(tensors), storage_writer=writer)
        except CheckpointException as error:
            raise _refusal(error, target) from error
        own = {
            path.relative_to(temporary).as_posix(): sha256_file(path)
            for path in (temporary / "tensors").glob(f"__{ranks.rank}_*")
        }
        sums = {name: value for part in ranks.gather(own) for name, value in part.items()}
        if ranks.is_first:
            # Not `to_json`: a bar that no evaluation has set yet is NaN, and nobody else reads this file.
            write_text(temporary / "state.json", json.dumps({"format": FORMAT, "step": step, **state}))
            for name in ("tensors/.metadata", "state.json"):
                sums[name] = sha256_file(temporary / name)
            write_json(temporary / "checkpoint.json", {"format": FORMAT, "sha256": dict(sorted(sums.items()))})
    if ranks.is_first:
        prune(run, keep=keep)
    return target


@contextmanager
def _shared_folder(target: Path, ranks: Ranks) -> Iterator[Path]:
    """`replacing_folder` by the first rank for all: they write into it, and it gets its name when all are done."""
    if ranks.is_first:
        with replacing_folder(target) as temporary:
            yield Path(ranks.from_first(str(temporary)))
            ranks.wait()
    else:
        yield Path(ranks.from_first(""))
        ranks.wait()
    ranks.wait()


def _cause(error: CheckpointException) -> str:
    """What went wrong on the first rank that failed."""
    failures = [failure[0] if isinstance(failure, tuple) else failure for failure in error.failures.values()]
    return str(failures[0]) if failures else str(error)


def _refusal(error: CheckpointException, target: Path) -> OSError:
    """Why a checkpoint cannot be written; PyTorch's writer says of a full disk that a file is too short."""
    said = _cause(error)
    if "No space left" in said or "unexpected pos" in said:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
    return OSError(f"{target}: cannot be written ({said})")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the remark that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def prune(run: Path, *, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints of a run."""
    for folder in _found(run)[keep:]:
        remove(folder)


def prune_after(run: Path, step: int) -> None:
    """Remove the checkpoints of a run that are later than a step."""
    for later, folder in saved_steps(run / CHECKPOINTS):
        if later > step:
            remove(folder)


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run; a damaged one is set aside and told, and the one before it taken.

    Raises ArtifactError if there are checkpoints and all of them are damaged.
    """
    found = _found(run)
    for folder in found:
        if not (damage := _damage(folder)):
            return Checkpoint(folder=folder, state=_state(folder))
        aside = folder.with_name(folder.name + DAMAGED)
        remove(aside)
        folder.rename(aside)
        logger.warning(
            "RESUME: %s is damaged (%s); it is now %s, and the one before it is taken", folder, damage, aside
        )
    if found:
        raise ArtifactError(
            f"every checkpoint of {run} is damaged. Restore {run / CHECKPOINTS} from a copy, or start again with "
            f"--overwrite."
        )
    return None


def checkpoint_at(folder: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises ArtifactError if it is damaged."""
    if damage := _damage(folder):
        raise ArtifactError(f"{folder} is damaged ({damage}). Resume from another one, or from the run's folder.")
    return Checkpoint(folder=folder, state=_state(folder))


def _found(run: Path) -> list[Path]:
    """The newest first."""
    folder = run / CHECKPOINTS
    return [path for _, path in reversed(saved_steps(folder))] if folder.is_dir() else []


def _state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def _damage(folder: Path) -> str:
    """What is wrong with a checkpoint; empty if nothing is."""
    try:
        listed = read_json(folder / "checkpoint.json")
        if not isinstance(listed, dict) or listed.get("format") != FORMAT:
            return f"it is not of format {FORMAT}"
        for name, sha256 in listed["sha256"].items():
            if sha256_file(folder / name) != sha256:
                return f"{name} is not what was written"
    except (FileNotFoundError, ValueError, KeyError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
