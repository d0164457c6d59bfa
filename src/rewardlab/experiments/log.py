"""The log of a study: what people decided about its plan, and when. Entries are appended, never changed.

Each entry holds the hash of the one before, so that an entry that was changed or taken out is noticed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ConfigError
from rewardlab.core.files import append_text, encodable, parse_line, require_no_pipe, sha256_json, to_json

logger = logging.getLogger("rewardlab")
LOG: Final = "log.jsonl"
EXAMPLE: Final = '{"kind": "frozen", "time": "2026-01-31T12:00:00Z", "before": "…"}'
"""An entry, for messages."""
FIRST: Final = "0" * 64
"""What stands for the hash before the first entry."""


def now() -> str:
    """Return the time in UTC, to the second."""
    return _stamp(datetime.now(UTC))


def time_of(path: Path) -> str:
    """Return when a file was written, in UTC, to the second."""
    return _stamp(datetime.fromtimestamp(path.stat().st_mtime, UTC))


def _stamp(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the entries, oldest first. Raises ConfigError if the log was changed, DataError if it is damaged.

    The beginning of an entry at the end is left out: the process that wrote it was killed, and nothing followed from
    it.
    """
    return _read(folder / LOG)[0]


def _read(path: Path) -> tuple[list[dict[str, Any]], bytes]:
    """Return (the entries, what follows the last line end)."""
    require_no_pipe(path)
    *lines, tail = path.read_bytes().split(b"\n")
    entries: list[dict[str, Any]] = []
    before = FIRST
    for number, line in enumerate([*lines, tail] if _is_whole(tail) else lines, start=1):
        if not line.strip():
            continue
        entry = parse_line(path, number, line.decode("utf-8", errors="replace"), like=EXAMPLE)
        if entry.get("before") != before:
            raise ConfigError(
                f"{path}: line {number} does not follow from the line before: the log was changed. Restore it, or "
                f"freeze the plan again in another folder."
            )
        before = _hash(entry)
        entries.append(dict(entry))
    return entries, tail


def _is_whole(line: bytes) -> bool:
    """Return whether a line without an end is an entry all the same, as an editor may leave it."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def hashes_of(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the hash of each entry. Hashes kept elsewhere, as in records, show whether the last ones were changed."""
    return [_hash(entry) for entry in entries]


def append_log(folder: Path, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Append an entry and return it. Raises ConfigError if the log was changed."""
    path = folder / LOG
    path.touch()
    entries, tail = _read(path)
    entry = {"kind": kind, "time": now(), **values, "before": _hash(entries[-1]) if entries else FIRST}
    if tail and not _is_whole(tail):
        logger.warning("%s: its last line was cut off while it was written, and is taken out", path)
        os.truncate(path, path.stat().st_size - len(tail))
    begin = "\n" if _is_whole(tail) else ""
    append_text(path, begin + encodable(to_json(entry, indent=None)) + "\n")
    return entry


def _hash(entry: Mapping[str, Any]) -> str:
    # Through JSON, so that what was just made and what is read back are the same.
    return sha256_json(json.loads(to_json(dict(entry))))
