"""Results that a command began to write and did not finish, such as on a full disk: the same command replaces them.

A mark stands in the folder from before the first file is written until the last one is. It says by a hash which
command it is, so that no other one replaces them unasked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rewardlab.core.errors import DataError
from rewardlab.core.files import read_json, sha256_json, write_json

MARK: Final = ".unfinished.json"


def begin_results(folder: Path, settings: Mapping[str, object]) -> None:
    """Mark that results of these settings are being written to a folder. Raises OSError if the disk is full."""
    write_json(folder / MARK, {"settings": _hash(settings)})


def end_results(folder: Path) -> None:
    """Take the mark away: the results are whole."""
    (folder / MARK).unlink(missing_ok=True)


def are_unfinished(folder: Path, settings: Mapping[str, object]) -> bool:
    """Return whether a folder holds the beginning of what these settings give, whether or not they say `overwrite`."""
    try:
        return read_json(folder / MARK) == {"settings": _hash(settings)}
    except (OSError, DataError):
        return False


def _hash(settings: Mapping[str, object]) -> str:
    return sha256_json({**settings, "overwrite": None})
