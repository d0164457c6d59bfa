"""Files of the programs that are arms of a plan: frozen with it, as data are, and kept in the study."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from rewardlab.experiments.plan import Run


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
        return False  # a word that no file can be called by, such as a long one of code


def keep_programs(runs: Iterable[Run], plan_folder: Path, digests: Mapping[str, str], folder: Path) -> None:
    """Copy the files of programs, whose SHA-256 are in `digests`, into the folder of a study."""
    for path in dict.fromkeys(path for run in runs for path in program_files(run, plan_folder)):
        kept = copy_of(folder, path, digests[str(path)])
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, kept)


def copy_of(folder: Path, path: str | Path, digest: str) -> Path:
    """Return where a study keeps the copy of a program's file, which is there if the plan was frozen with one."""
    return folder / "frozen" / "programs" / digest[:12] / Path(path).name
