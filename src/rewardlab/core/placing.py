"""Results of several files that appear together, in a folder where other files may stand, or not at all.

They are written to a folder inside that one, on the same disk, so that neither what is around it nor a link to it
matters. Only when all of them are whole are earlier results moved aside and these into their place, which takes
milliseconds. Whatever ends a process before the last of these moves, the next one that writes there (`settle`) puts
back what stood there, so that no result is half of one run and half of another.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from rewardlab.core.errors import ConfigError, DataError, RewardlabError, naming, words_of
from rewardlab.core.files import read_json, write_json
from rewardlab.core.folders import fsync_folder, is_at_work, move, remove, sweep_away
from rewardlab.core.lock import only_process
from rewardlab.core.signals import held_back, results_are_whole
from rewardlab.core.together import Waiting, one_by_one

MOVING: Final = ".results.moving"
"""Name of the folder of results that are all written and perhaps not all moved into place."""
WRITTEN: Final = ".results.tmp-"
"""Begins the name of one whose results are still being written, or are of no more use; the process id follows."""
NEW, OLD, PLAN = "new", "old", "plan.json"
"""What is in it: the results, those that they replace, and which files these are."""
MOVES_FOR_S: Final = 10.0
"""Seconds for which a reader waits for a command that is moving results."""
LAST: Final = "manifest.json"
"""The name by which results are recognised: files of this name are moved last."""
Stamp = list[list[object]]
"""Name, size and time of change of a file, or of every file in a folder: moving does not change them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What takes whose place, by names in the folder."""

    new: Mapping[str, Stamp]
    """Name -> stamp."""
    old: Sequence[str]
    alone: bool = True
    """Whether no files elsewhere get their names in the same moment."""

    def ordered(self) -> list[str]:
        """The names of the new results in the order in which they are moved."""
        return sorted(self.new, key=lambda name: (name == LAST, PurePosixPath(name).name == LAST, name))


@contextmanager
def placing(
    folder: Path,
    earlier: Callable[[], Iterable[str]],
    *,
    whole: Collection[str] = (),
    beside: Waiting | None = None,
) -> Iterator[Path]:
    """Yield an empty folder whose content takes its place in `folder` when the block ends without an error.

    This process must have locked `folder` (`run_folder.only_writer`). `earlier` is asked then for the names in `folder`
    of earlier results, which go; other files there stay, but for those with the names of new results. A name may be a
    path into a folder. Of the new results, the folders named in `whole` are moved as one. Files that wait for their
    names elsewhere (`files.together`) get them in the same moment, `beside` these.

    On any error `folder` stays as it was. Raises ConfigError if a folder has the name of a file among the new results.
    """
    written = folder / f"{WRITTEN}{os.getpid()}"
    try:
        remove(written)
        for name in (NEW, OLD):
            (written / name).mkdir(parents=True)
        with one_by_one(), naming(folder, temporary=written / NEW):
            yield written / NEW
            fsync_folder(written)
            plan = _plan(folder, written / NEW, earlier(), whole, alone=beside is None)
            write_json(written / PLAN, asdict(plan))
        with held_back():
            try:
                written.rename(folder / MOVING)
                _move_in(folder, plan)
                if beside is not None:
                    beside.place()
                (folder / MOVING).rename(written)
            except OSError as error:
                _put_back(folder, error)
                raise
            results_are_whole(folder)
    finally:
        sweep_away(written)


def _put_back(folder: Path, error: OSError) -> None:
    """Put back what stood there. Raises RewardlabError, which names the first error too, if that cannot be done."""
    try:
        settle(folder)
    except (RewardlabError, OSError) as second:
        left = words_of(second) if isinstance(second, OSError) else str(second)
        raise RewardlabError(
            f"{folder}: {words_of(error)}; and the earlier results could not be put back: {left} They are in "
            f"{folder / MOVING / OLD}, and the same command tries again."
        ) from error


def settle(folder: Path) -> None:
    """Put back what earlier results a process that was killed had moved aside, and remove what it left; where it had
    moved everything, the new results stay.

    This process must have locked `folder`. Raises ConfigError if something else has taken a name meanwhile.
    """
    moving = folder / MOVING
    if moving.is_dir() and not moving.is_symlink():
        plan = _read_plan(moving / PLAN)
        moved = [_is_moved(folder, name, stamp) for name, stamp in plan.new.items()]
        if not (plan.alone and moved and all(moved)):
            _move_back(folder, plan)
        moving.rename(folder / f"{WRITTEN}{os.getpid()}")
    for left_over in folder.glob(f"{WRITTEN}*"):
        process = left_over.name.removeprefix(WRITTEN)
        if not (process.isdecimal() and is_at_work(int(process))):
            sweep_away(left_over)


def settle_to_read(path: Path) -> None:
    """Put back what a killed process left half moved, before a file or folder is read: a command that judges several
    models moves what is in their folders from the one around them. One that is moving results is waited for, a moment.

    Raises ConfigError, with what happened, if it cannot be done.
    """
    path = path.absolute()
    for place in (path, path.parent, path.parent.parent):
        if not (place / MOVING).is_dir() or not _concerns(place, path):
            continue
        try:
            with only_process(place, "--output-dir", wait_s=MOVES_FOR_S):
                settle(place)
        except (RewardlabError, OSError) as error:
            raise ConfigError(
                f"{place}: a command that replaces the results there has moved only some of them so far, or was killed "
                f"while it did. Then the same command, or any that writes there, puts them back. Now that failed: "
                f"{words_of(error) if isinstance(error, OSError) else error}"
            ) from error


def _concerns(folder: Path, path: Path) -> bool:
    """Return whether results that are half moved in `folder` are in `path`, which is that folder or in it."""
    inside = PurePosixPath(path.relative_to(folder).as_posix())
    try:
        plan = _read_plan(folder / MOVING / PLAN)
    except (OSError, DataError):
        return path == folder  # of what lies in it nothing is known to be concerned
    names = [PurePosixPath(name) for name in (*plan.new, *plan.old)]
    return any(inside in (name, *name.parents) or name in inside.parents for name in names)


def _is_moved(folder: Path, name: str, stamp: Stamp) -> bool:
    return not os.path.lexists(folder / MOVING / NEW / name) and _stamp(folder / name) == stamp


def _move_back(folder: Path, plan: Plan) -> None:
    """Take back the new results that were moved, and put the earlier ones where they stood."""
    moving = folder / MOVING
    for name in (*plan.new, *plan.old):
        for copy in (folder / name).parent.glob(f".{glob.escape(PurePosixPath(name).name)}.tmp-*"):
            remove(copy)  # of a move to another disk
    for name, stamp in plan.new.items():
        # Only what was moved there, unchanged since: anything else is somebody else's.
        if _stamp(folder / name) == stamp:
            remove(moving / NEW / name)  # what a move to another disk had left
            move(folder / name, moving / NEW / name)
    for number, name in enumerate(plan.old):
        aside, place = moving / OLD / str(number), folder / name
        if not os.path.lexists(aside):
            continue
        # What a move to another disk had left of it, before or after.
        if (there := _stamp(place)) and all(one in _stamp(aside) for one in there):
            remove(place)
        elif there and all(one in there for one in _stamp(aside)):
            remove(aside)
            continue
        if os.path.lexists(place):
            raise ConfigError(
                f"{place} was put there after a process was killed that replaced the results in {folder}. The "
                f"earlier file of that name is {aside}. Move one of the two away."
            )
        move(aside, place)


def _move_in(folder: Path, plan: Plan) -> None:
    """Move earlier results aside, and then the new ones into their place: never do some of both stand there."""
    moving = folder / MOVING
    for number, name in enumerate(plan.old):
        move(folder / name, moving / OLD / str(number))
    # A folder of which only earlier results were the content goes with them.
    for around in sorted({(folder / name).parent for name in plan.old} - {folder}, reverse=True):
        if not any(around.iterdir()) and not around.is_symlink():
            around.rmdir()
    for name in plan.ordered():
        move(moving / NEW / name, folder / name)


def _plan(folder: Path, new: Path, earlier: Iterable[str], whole: Collection[str], *, alone: bool) -> Plan:
    """Return what is to be moved. Raises ConfigError if a folder has the name of a new file."""
    names = list(_units(new, new, whole))
    for name in names:
        if name not in whole and (folder / name).is_dir() and not (folder / name).is_symlink():
            raise ConfigError(
                f"{folder / name} is a folder, and has the name of a file that is written here. Move it away, or "
                f"choose another --output-dir."
            )
    gone = dict.fromkeys(name for name in (*earlier, *names) if os.path.lexists(folder / name))
    # What is in a folder, or behind a link, that goes itself goes with it.
    old = [name for name in gone if not any(str(around) in gone for around in PurePosixPath(name).parents)]
    return Plan(new={name: _stamp(new / name) for name in names}, old=old, alone=alone)


def _units(root: Path, room: Path, whole: Collection[str]) -> Iterator[str]:
    """Yield the names below `root` that are moved as one: files, and folders that are moved whole."""
    for path in sorted(room.iterdir()):
        name = path.relative_to(root).as_posix()
        if path.is_dir() and not path.is_symlink() and name not in whole:
            yield from _units(root, path, whole)
        else:
            yield name


def _stamp(path: Path) -> Stamp:
    """Return the stamp of a file or folder; an empty one if there is none."""
    if not os.path.lexists(path):
        return []
    inside = sorted(path.rglob("*")) if path.is_dir() and not path.is_symlink() else [path]
    files = [(one, one.lstat()) for one in inside if one.is_symlink() or not one.is_dir()]
    return [["", 0, 0], *([one.relative_to(path).as_posix(), at.st_size, at.st_mtime_ns] for one, at in files)]


def _read_plan(path: Path) -> Plan:
    """Return the plan of results that are moved. Raises DataError if it is damaged, or names what is outside."""
    found = read_json(path)
    values = found if isinstance(found, dict) else {}
    new, old = values.get("new"), values.get("old")
    if not isinstance(new, dict) or not isinstance(old, list) or not all(map(_is_inside, (*new, *old))):
        raise DataError(
            f"{path}: damaged. Of results that were being replaced, {path.parent / OLD} has the earlier ones, and "
            f"{path.parent / NEW} new ones that were not moved. Take out what you need, and remove {path.parent}."
        )
    return Plan(new=new, old=old, alone=values.get("alone") is True)


def _is_inside(name: object) -> bool:
    """Return whether a name stays in the folder, but for links, which lead where the user has put them."""
    return isinstance(name, str) and not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
