"""Files of the programs that are arms of a plan: frozen with it, as data are, and kept in the study."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from rewardlab.core.errors import DataError
from rewardlab.core.files import sha256_file
from rewardlab.experiments.plan import Run

logger = logging.getLogger("rewardlab")
MAX_COPIED_BYTES: Final = 10_000_000
"""Larger files are taken for what programs read, not for programs, and are not copied."""


def program_files(run: Run, plan_folder: Path) -> list[Path]:
    """Return the files that the words of a run's program name, alone or behind `=`, in the order of the words.

    A first word that begins with / is left out: it is an interpreter, which differs between machines.
    """
    found: dict[Path, None] = {}
    for number, word in enumerate(run.program):
        if number == 0 and word.startswith("/"):
            continue
        filled = word.replace("{plan_folder}", str(plan_folder))
        found |= {Path(part): None for part in (filled, filled.partition("=")[2]) if _is_file(part)}
    return list(found)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False  # no file can have this name, as with a long word of code


def keep_programs(runs: Iterable[Run], plan_folder: Path, digests: Mapping[str, str], folder: Path) -> None:
    """Copy the files of programs, whose SHA-256 are in `digests`, into the folder of a study; warn of larger ones.

    Raises DataError for a file that changes meanwhile.
    """
    for path in dict.fromkeys(path for run in runs for path in program_files(run, plan_folder)):
        if (digest := digests.get(str(path))) is None:
            continue
        kept = copy_of(folder, path, digest)
        if kept.is_file() and sha256_file(kept) == digest:
            continue
        if path.stat().st_size > MAX_COPIED_BYTES:
            logger.warning(
                "%s: is larger than %d MB, so it is frozen by its SHA-256 and the study keeps no copy",
                *(path, MAX_COPIED_BYTES // 1_000_000),
            )
            continue
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_name(f".{kept.name}.tmp-{os.getpid()}")
        try:
            shutil.copyfile(path, unfinished)
            if sha256_file(unfinished) != digest:
                raise DataError(f"{path}: changed while it was being frozen. Do it again once nothing writes to it.")
            unfinished.replace(kept)
        finally:
            unfinished.unlink(missing_ok=True)


def copy_of(folder: Path, path: str | Path, digest: str) -> Path:
    """Return where a study keeps the copy of a program's file, which is there unless the file is too large."""
    return folder / "frozen" / "programs" / digest[:12] / Path(path).name
