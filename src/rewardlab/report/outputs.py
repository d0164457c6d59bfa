"""The output files of a command that judges: NAME.json, NAME.md and NAME.html. It replaces only files of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_json, write_json, write_text
from rewardlab.core.folders import remove_left_over, require_writable_folder
from rewardlab.core.together import together
from rewardlab.report.document import Document
from rewardlab.report.markdown import markdown_page
from rewardlab.report.page import html_page

EMPTY: Final[Mapping[str, str]] = MappingProxyType({})


def files_of(name: str) -> tuple[str, str, str]:
    """Return the names of the files."""
    return f"{name}.json", f"{name}.md", f"{name}.html"


def claim(folder: Path, name: str, made_by: str, *, overwrite: bool, also: Sequence[str] = ()) -> None:
    """Make the folder ready, before anything is computed. `also` are other files that will be written.

    Raises ConfigError if it holds files of these names that `made_by` did not write, RewardlabError if it cannot be
    written.
    """
    require_writable_folder(folder, "--output-dir")
    files = files_of(name)
    for file in (*files, *also):
        # Temporary files of these exist for milliseconds only, so one that is there is of a run that was killed.
        remove_left_over(folder / file, alone=True)
    there = [file for file in (*files, *also) if (folder / file).exists()]
    if there and not overwrite and not _is_own(folder / files[0], made_by):
        raise ConfigError(
            f"{folder / there[0]} is there, and `{made_by}` did not write it. Name another folder with --output-dir, "
            f"or replace it with --overwrite."
        )


def write(
    folder: Path, name: str, document: Document, values: Mapping[str, Any], tables: Mapping[str, str] = EMPTY
) -> list[Path]:
    """Write the JSON, the Markdown, the page and `tables` (name of a file -> its text); return their paths.

    The JSON names the command that wrote the files, so it is the first to get its name: if the run is killed after
    that, the next one recognises the files as its own.
    """
    paths = [folder / file for file in (*files_of(name), *tables)]
    with together():
        write_json(paths[0], dict(values))
        write_text(paths[1], markdown_page(document))
        write_text(paths[2], html_page(document))
        for file, text in tables.items():
            write_text(folder / file, text)
    return paths


def _is_own(path: Path, made_by: str) -> bool:
    try:
        values = read_json(path)
    except (OSError, DataError):
        return False
    return isinstance(values, Mapping) and values.get("made_by") == made_by
