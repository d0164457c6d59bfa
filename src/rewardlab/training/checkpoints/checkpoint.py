"""Writes and finds checkpoints: what an exact resume needs, in folders of their own beside the reward models.

checkpoints/step_N/
  tensors/          weights that train and the optimiser's state (training/checkpoints/shards.py)
  state.json        step, open sums of the log, newest rows of the record, what selects the best
  rows/             its earlier rows, where there are many (training/checkpoints/row_files.py)
  checkpoint.json   SHA-256 of every file, so that damage is seen before anything is read

A folder is written under another name and renamed once all of it is on the disk. The tensors are in one file for each
rank, and any number of ranks can read them. Nothing in a checkpoint is ever executed. Folders of format 1, which
torch.distributed.checkpoint wrote, can be read too (training/checkpoints/distcp.py).
"""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import read_json, read_summed_json, sha256_file, write_summed_json, write_text
from rewardlab.core.folders import remove, replacing_folder
from rewardlab.core.run_folder import CHECKPOINTS, saved_steps
from rewardlab.distributed.ranks import Ranks
from rewardlab.training.checkpoints.distcp import METADATA, open_distcp
from rewardlab.training.checkpoints.row_files import ROOM, RowFiles, name_of, read_rows
from rewardlab.training.checkpoints.shards import INDEX, Held, open_shards, read_shards, write_shards

logger = logging.getLogger("rewardlab")
FORMAT: Final = 2
WITH_ROW_FILES: Final = 3
"""As FORMAT, with rows in files of their own. Short runs have none, and versions up to 0.13 can go on with these."""
INDICES: Final = {1: METADATA, FORMAT: INDEX, WITH_ROW_FILES: INDEX}
"""For each format, the file that says where the tensors are."""
OPEN: Final[Mapping[int, Callable[[Path], dict[str, Held]]]] = {
    1: open_distcp,
    FORMAT: open_shards,
    WITH_ROW_FILES: open_shards,
}
SUMS: Final = "checkpoint.json"
DAMAGED: Final = ".damaged"
"""Suffix added to the name of a checkpoint that is found to be damaged."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files were found complete and undamaged."""

    folder: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The number of steps done."""
        return int(self.state["step"])

    @property
    def format(self) -> int:
        """The format of the version that wrote it; see FORMAT."""
        return int(self.state["format"])

    def names(self) -> set[str]:
        """Return the names of its tensors."""
        return set(self._held())

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill live tensors by name.

        Raises ArtifactError if the checkpoint is of another model, or of other parameters that train, or if it is
        damaged.
        """
        read_shards(self._held(), tensors, where=self.folder)

    def _held(self) -> dict[str, Held]:
        return OPEN[self.format](self.folder / "tensors")


def write_checkpoint(
    run: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    rows: RowFiles,
    ranks: Ranks,
    keep: int,
) -> Path:
    """Write `checkpoints/step_N` in the folder of a run, remove all but the `keep` newest, and return its folder.

    Every rank calls it, with its own shards. Raises OSError if the disk is full; earlier checkpoints are untouched.
    """
    target = run / CHECKPOINTS / f"step_{step}"
    with _shared_folder(target, ranks) as temporary:
        room = temporary / "tensors"
        if ranks.is_first:
            room.mkdir()
        ranks.wait()
        try:
            written = write_shards(room, tensors, ranks)
        except OSError as error:
            # Name the folder that people know: the temporary one is removed again.
            if error.errno is not None:
                raise OSError(error.errno, error.strerror, str(target)) from error
            raise
        sums = {f"tensors/{name}": digest for name, digest in written.items()}
        if ranks.is_first:
            files, newest = rows.write(temporary)
            kind = WITH_ROW_FILES if files else FORMAT
            record = {"row_files": len(files), "rows": newest}
            # json.dumps and not `to_json`, which refuses NaN: the bar of the selection is NaN until an evaluation sets
            # it, and only this program reads the file.
            write_text(temporary / "state.json", json.dumps({"format": kind, "step": step, **state, **record}))
            for name in (f"tensors/{INDEX}", "state.json"):
                sums[name] = sha256_file(temporary / name)
            write_summed_json(temporary / SUMS, {"format": kind, "files": dict(sorted((sums | files).items()))})
    if ranks.is_first:
        rows.kept(target)
        # Earlier checkpoints are removed only now that the new one is complete on the disk.
        prune(run, keep=keep)
    return target


@contextmanager
def _shared_folder(target: Path, ranks: Ranks) -> Iterator[Path]:
    """Create one temporary folder for all ranks to write into, and rename it to `target` when all are done.

    The first rank creates and renames it.
    """
    if ranks.is_first:
        with replacing_folder(target) as temporary:
            # The random name of the temporary folder is known to the first rank alone.
            yield Path(ranks.from_first(str(temporary)))
            ranks.wait()
    else:
        # No rank returns before the first one has renamed the folder, so that all of them can read it afterwards.
        yield Path(ranks.from_first(""))
        ranks.wait()
    ranks.wait()


def prune(run: Path, *, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints of a run."""
    for folder in _folders(run)[keep:]:
        remove(folder)


def prune_after(run: Path, step: int) -> None:
    """Remove the checkpoints of a run that are later than a step."""
    for later, folder in saved_steps(run / CHECKPOINTS):
        if later > step:
            remove(folder)


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of a run; None if it has none at all.

    A damaged one is renamed with a warning, and the one before it is used. Raises ArtifactError if there are
    checkpoints and all of them are damaged.
    """
    folders = _folders(run)
    for folder in folders:
        if not (damage := _damage(folder)):
            return Checkpoint(folder=folder, state=_state(folder))
        # Renamed, not deleted: the user may want to look into it, and the next resume must not find it again.
        aside = folder.with_name(folder.name + DAMAGED)
        remove(aside)
        folder.rename(aside)
        logger.warning(
            "RESUME: %s is damaged (%s); it was renamed to %s, and the one before it is used", folder, damage, aside
        )
    if folders:
        raise ArtifactError(
            f"every checkpoint of {run} is damaged. Restore {run / CHECKPOINTS} from a copy, or start again with "
            f"--overwrite."
        )
    return None


def checkpoint_at(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder. Raises ArtifactError if it is damaged."""
    if damage := _damage(folder):
        raise ArtifactError(f"{folder} is damaged ({damage}). Resume from another one, or from the run's folder.")
    return Checkpoint(folder=folder, state=_state(folder))


def _folders(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run, the newest first."""
    folder = run / CHECKPOINTS
    return [path for _, path in reversed(saved_steps(folder))] if folder.is_dir() else []


def _state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    if count := state.get("row_files", 0):
        state["rows"] = [*read_rows(folder, count), *state["rows"]]
    return state


def _damage(folder: Path) -> str:
    """Return what is wrong with a checkpoint; empty if nothing is."""
    try:
        _require_folders(folder, folder / "tensors")
        kind, sums = _listed(folder / SUMS)
        if kind == WITH_ROW_FILES:
            _require_folders(folder / ROOM)
        _require_listed(sums, f"tensors/{INDICES[kind]}", "state.json")
        for name, sha256 in sums.items():
            _require_plain(folder / name)
            if sha256_file(folder / name) != sha256:
                return f"{name} does not match its checksum"
        state = _state(folder)
        if state["format"] != kind:
            return "state.json is of another format"
        _require_listed(sums, *map(name_of, range(state.get("row_files", 0))))
        OPEN[kind](folder / "tensors")
    # Damaged JSON can parse as anything, so each of these errors means damage and none is a fault of the program.
    except (ValueError, TypeError, AttributeError) as error:
        return str(error)
    except (OSError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _listed(path: Path) -> tuple[int, dict[str, str]]:
    """Return (format, name -> SHA-256) from the list of a checkpoint's files."""
    _require_plain(path)
    listed: Any = read_json(path)
    kind = listed["format"]
    if kind not in OPEN:
        raise ValueError(f"it is of format {kind}, and this version reads {', '.join(map(str, OPEN))}")
    files: Any = listed["sha256"] if kind == 1 else read_summed_json(path)["files"]
    return kind, dict(files)


def _require_listed(sums: Mapping[str, str], *names: str) -> None:
    for name in names:
        if name not in sums:
            raise ValueError(f"{SUMS} does not list {name}")


def _require_folders(*places: Path) -> None:
    for place in places:
        if not stat.S_ISDIR(place.lstat().st_mode):
            raise ValueError(f"{place.name} is not a folder")


def _require_plain(path: Path) -> None:
    """Raise ValueError for a folder, a link, which may lead elsewhere, or a pipe, which may be waited for."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{path.name} is not a plain file")
