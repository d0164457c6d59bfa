"""Local datasets of several files: numbered files of one split, and folders that `datasets` saved.

Numbered files are named `train-00000-of-00003.parquet`, as on the hub, in the folder of the dataset or in `data` below
it, or `0000.parquet`, `0001.parquet`, … in a folder that is named for the split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rewardlab.core.errors import DataError

EXTENSIONS: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".csv", ".parquet", ".zst")
"""Endings of files that are read. A file that ends in `.zst` alone holds JSON Lines."""
OTHER_FORMATS: Final = (
    *(".csv.gz", ".json.gz", ".parquet.gz", ".tsv", ".tsv.gz", ".xls", ".xlsx"),
    *(".arrow", ".feather", ".zip", ".bz2", ".xz"),
    *(".csv.zst", ".json.zst", ".parquet.zst", ".tsv.zst", ".tar.zst"),
)
"""Endings of files that would otherwise be taken for JSON Lines, as files with any other name are."""
PACKED: Final = (".gz", ".zst", ".bz2", ".xz", ".zip")
"""Endings of files that are compressed, of which only JSON Lines are read."""
IN_ORDER: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".csv", ".parquet")
"""Endings of files that may be numbered parts of one dataset."""
_PART = re.compile(r"-(\d+)-of-(\d+)")
_NUMBER = re.compile(r"(?:part-)?(\d+)")
MAX_NUMBERS_SHOWN: Final = 5


def extension_of(path: Path) -> str | None:
    """Return the ending of a file that is read; None for any other."""
    if path.name.endswith(OTHER_FORMATS):
        return None
    return next((extension for extension in EXTENSIONS if path.name.endswith(extension)), None)


def how_to_read(path: Path) -> str:
    """Return what to do with a file that has no ending of those that are read, as a sentence."""
    packed = next((ending for ending in PACKED if path.name.endswith(ending)), None)
    if packed is None:
        return "Convert it to one of these."
    lines = f", or name it .jsonl{packed} if every line of it is a row" if packed in (".gz", ".zst") else ""
    return f"Of what is compressed, only JSON Lines are read: unpack it first{lines}."


def find_numbered(folder: Path, split: str) -> Iterator[tuple[Path, tuple[Path, ...]]]:
    """Yield (pattern of their names, files in order) of a split in numbered files, each set of files once.

    Raises DataError if one of several files is missing.
    """
    for place in (folder, folder / "data"):
        for (count, _), files in _parts(place, split).items():
            if missing := [number for number in range(count) if number not in files]:
                raise _incomplete(place, split, missing, count)
            yield place / _PART.sub(r"-*-of-\2", files[0].name), tuple(files[number] for number in range(count))
    by_extension: dict[str, dict[int, Path]] = {}
    for path, extension in _data_files(folder / split):
        if match := _NUMBER.fullmatch(path.name.removesuffix(extension)):
            by_extension.setdefault(extension, {})[int(match[1])] = path
    for extension, files in by_extension.items():
        yield folder / split / f"*{extension}", tuple(files[number] for number in sorted(files))


def _parts(place: Path, split: str) -> dict[tuple[int, str], dict[int, Path]]:
    """Return (count, extension) -> number -> file of the files `SPLIT-NUMBER-of-COUNT.*` in a folder."""
    found: dict[tuple[int, str], dict[int, Path]] = {}
    for path, extension in _data_files(place):
        stem = path.name.removesuffix(extension)
        if stem.startswith(split) and (match := _PART.fullmatch(stem, len(split))):
            found.setdefault((int(match[2]), extension), {})[int(match[1])] = path
    return found


def _data_files(folder: Path) -> list[tuple[Path, str]]:
    if not folder.is_dir():
        return []
    files = [(path, extension_of(path)) for path in sorted(folder.iterdir())]
    return [(path, extension) for path, extension in files if extension in IN_ORDER and path.is_file()]


def _incomplete(place: Path, split: str, missing: list[int], count: int) -> DataError:
    """Return the error for numbered files that are not all there."""
    more = len(missing) - MAX_NUMBERS_SHOWN
    listed = ", ".join(map(str, missing[:MAX_NUMBERS_SHOWN])) + (f" and {more} more" if more > 0 else "")
    return DataError(
        f"{place}: of the {count} files of the split {split!r}, numbered from 0, {listed} "
        f"{'is' if len(missing) == 1 else 'are'} missing. Get the dataset again, or name single files."
    )


# --- folders that `datasets` saved ---------------------------------------------------------------------------


def is_saved(folder: Path) -> bool:
    """Return whether a folder was written by `Dataset.save_to_disk`."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def saved_splits(folder: Path) -> list[str]:
    """Return the splits of a folder that was written by `DatasetDict.save_to_disk`; none for any other folder."""
    splits = _entry(folder / "dataset_dict.json", "splits")
    return [str(split) for split in splits] if isinstance(splits, list) else []


def saved_split(folder: Path) -> str | None:
    """Return the split that a saved dataset says it is."""
    split = _entry(folder / "state.json", "_split")
    return split if isinstance(split, str) and split else None


def _entry(path: Path, name: str) -> object:
    """Return an entry of a JSON object in a file; None if there is no such file, object or entry."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value.get(name) if isinstance(value, dict) else None


def files_of_saved(folder: Path) -> list[Path]:
    """Return the files that a saved dataset consists of, sorted: its tables and the two that describe it."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".arrow", ".json") and path.is_file())
