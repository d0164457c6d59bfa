"""The journal of scores, kept beside the output in `.NAME.partial`, from which a run that was killed resumes.

`state.json` identifies what the scores belong to: input, model, precision, backend. `scores.jsonl` has one line for
each part of the rows, appended and flushed to the disk as soon as it is scored, in whatever order parts are finished,
with a checksum. If a kill leaves an incomplete line, the line is cut off and its part is scored again. So is the part
of a damaged line; the others are kept.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import SUM, append_text, read_summed_json, sha256_json, to_json, write_summed_json
from rewardlab.core.folders import remove
from rewardlab.core.lock import LOCK
from rewardlab.core.terminal import cut_to

logger = logging.getLogger("rewardlab")
STATE: Final = "state.json"
SCORES: Final = "scores.jsonl"
FORMAT: Final = 2
"""Version of both files, of the rule by which rows are divided into parts, and of what is read from a row."""

FINISHED: Final = "finished.json"
"""Identifies the finished output. It is written just before the output is moved into place; once the file there is this
one, the kept scores are no longer needed."""

Outcome = str | list[float | str | list[float]]
"""The outcome of a row: the cause for which it could not be asked, or the entry of each reply (`backends.Entry`)."""


def partial_of(target: Path) -> Path:
    """Return the folder that keeps the scores for an output file until it is written."""
    return target.with_name(f".{target.name}.partial")


class Journal:
    """The scores of one model for the rows of one file, by part."""

    def __init__(self, folder: Path, identity: Mapping[str, object]) -> None:
        """Open the journal in `folder`, or begin one. `identity` names what decides the scores: input, model,
        precision, backend.

        Raises ConfigError if the folder holds scores of something else.
        """
        self.folder = folder
        self.decided: dict[str, Any] = {}
        """What the backend decided at its first start; a resumed run has to compute in the same way."""
        self._identity = _whole(identity)
        self._places: dict[int, tuple[int, int]] = {}
        self.num_rows = 0
        """Rows that are scored."""
        self.num_typed = 0
        """The number of replies in whose conversation a control token is typed."""
        if (folder / STATE).exists():
            self._open()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, part: int) -> bool:
        return part in self._places

    def _open(self) -> None:
        try:
            state = read_summed_json(self.folder / STATE)
        except DataError as error:
            raise ConfigError(f"{error} Or begin again with --restart.") from error
        decided = state.get("decided")
        self.decided = decided if isinstance(decided, dict) else {}
        if state.get("identity") != self._identity:
            before = state.get("identity")
            raise ConfigError(
                f"{self.folder} holds the scores of an interrupted run that cannot go on: "
                f"{_differences(before if isinstance(before, dict) else {}, self._identity)}. Score what it scored, as "
                f"it did, name another --output, or discard it with --restart."
            )
        self._read()

    def _read(self) -> None:
        """Index the lines, leave damaged ones out, and cut off an incomplete one that a kill has left at the end."""
        path, end = self.folder / SCORES, 0
        if not path.exists():
            return
        damaged = []
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                if (entry := _parsed(line)) is None:
                    damaged.append(number)
                elif entry["part"] not in self._places:
                    self._add(entry, end, len(line))
                end += len(line)
        if damaged:
            logger.warning(
                "%s: damaged in line %s; the rows of such lines are scored again", path, ", ".join(map(str, damaged))
            )
        if end < path.stat().st_size:
            logger.warning("%s: the last line was cut off by the end of the run; its rows are scored again", path)
            os.truncate(path, end)

    def _add(self, entry: Mapping[str, Any], start: int, size: int) -> None:
        self._places[entry["part"]] = (start, size)
        self.num_rows += len(entry["rows"])
        self.num_typed += entry["typed"]

    def begin(self, decided: Mapping[str, Any]) -> None:
        """Write down what the scores belong to, and what the backend decided."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.decided = dict(decided)
        write_summed_json(self.folder / STATE, {"identity": self._identity, "decided": self.decided})
        (self.folder / SCORES).touch()

    def append(self, part: int, outcomes: Sequence[Outcome], *, num_typed: int = 0) -> None:
        """Append the outcomes of a part; they are on the disk when this returns. Raises OSError if the disk is full."""
        entry = {"part": part, "typed": num_typed, "rows": list(outcomes)}
        line = to_json({**entry, SUM: sha256_json(entry)}, indent=None).encode("utf-8", "backslashreplace") + b"\n"
        start = (self.folder / SCORES).stat().st_size
        append_text(self.folder / SCORES, line.decode())
        self._add(entry, start, len(line))

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the outcome of every row, in the order of the rows; all parts must be there.

        Raises DataError for a line that was changed after it was written.
        """
        with (self.folder / SCORES).open("rb") as file:
            for part in sorted(self._places):
                start, size = self._places[part]
                file.seek(start)
                entry = _parsed(file.read(size))
                if entry is None:
                    raise DataError(f"{file.name}: part {part} was damaged after it was written. Run the same again.")
                yield from entry["rows"]


def _whole(identity: Mapping[str, object]) -> dict[str, Any]:
    """Return an identity with the version, as JSON would give it back, so that the two can be compared."""
    whole: dict[str, Any] = json.loads(to_json({"format": FORMAT, **identity}))
    return whole


def _file_of(path: Path) -> dict[str, object]:
    """Return what identifies a file under any name: it is renamed after this is written down."""
    status = path.stat()
    return {"inode": status.st_ino, "size": status.st_size, "time": status.st_mtime_ns}


def mark_finished(folder: Path, output: Path) -> None:
    """Note that the scores in a folder are no longer needed once `output` has been renamed to its final name."""
    write_summed_json(folder / FINISHED, _file_of(output))


def clear_spent(folder: Path, target: Path, identity: Mapping[str, object]) -> None:
    """Empty the folder of an output if it belongs to something else and holds nothing that is still needed.

    That is the case if it has no scores, or if all are in the output: a run was killed before it removed them.
    """
    try:
        same = read_summed_json(folder / STATE).get("identity") == _whole(identity)
        spent = (folder / FINISHED).exists() and _file_of(target) == read_summed_json(folder / FINISHED)
    except (DataError, OSError):
        # Nothing was begun, or the state is damaged, which `Journal` reports.
        return
    if not same and (spent or not holds_scores(folder)):
        empty(folder)


def holds_scores(folder: Path) -> bool:
    """Return whether some row is scored in a folder or one of its members' folders."""
    return any(path.stat().st_size for path in folder.rglob(SCORES))


def empty(folder: Path) -> None:
    """Remove everything but the lock, which this process holds."""
    for path in folder.iterdir():
        if path.name != LOCK:
            remove(path)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return a line of scores; None if it is not as it was written."""
    try:
        entry = json.loads(line)
        checksum = entry.pop(SUM) if isinstance(entry, dict) else None
        return entry if checksum is not None and sha256_json(entry) == checksum else None
    except (ValueError, KeyError, RecursionError):
        return None


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words which entries differ."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return "; ".join(f"{name} was {_short(before.get(name))}, now {_short(now.get(name))}" for name in names)


def _short(value: object) -> str:
    return cut_to(value if isinstance(value, str) else to_json(value, indent=None), 60)
