"""Local datasets of several files: numbered files of one split, and folders that `datasets` saved.

Numbered files are named `train-00000-of-00003.parquet`, as on the hub, in the folder of the dataset or in `data` below
it, or `0000.parquet`, `0001.parquet`, … in a folder that is named for the split. In older repositories of the hub a
hash follows: `train-00000-of-00003-8349d0765e6718df.parquet`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from rewardlab.core.errors import DataError
from rewardlab.core.terminal import listed

EXTENSIONS: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".zst")
"""Endings of files that are read. A file that ends in `.zst` alone holds JSON Lines."""
OTHER_FORMATS: Final = (
    *(".csv.gz", ".json.gz", ".parquet.gz", ".tsv.gz", ".xls", ".xlsx"),
    *(".arrow", ".feather", ".zip", ".bz2", ".xz"),
    *(".csv.zst", ".json.zst", ".parquet.zst", ".tsv.zst", ".tar.zst"),
)
"""Endings of files that would otherwise be taken for JSON Lines, as files with any other name are."""
PACKED: Final = (".gz", ".zst", ".bz2", ".xz", ".zip")
"""Endings of files that are compressed, of which only JSON Lines are read."""
IN_ORDER: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".csv", ".tsv", ".parquet")
"""Endings of files that may be numbered parts of one dataset."""
_PART = re.compile(r"-(\d+)-of-(\d+)(-[0-9a-f]+)?")
_NUMBER = re.compile(r"(?:part-)?(\d+)")
MAX_NUMBERS_SHOWN: Final = 5


def extension_of(path: Path) -> str | None:
    """Return the ending of a file that is read; None for any other."""
    if path.name.endswith(OTHER_FORMATS):
        return None
    return next((extension for extension in EXTENSIONS if path.name.endswith(extension)), None)


def how_to_read(path: Path) -> str:
    """Return what to do with a file that has no ending of those that are read, as a sentence."""
    if is_saved(path.parent):
        return f"It is a part of a dataset that was saved: name its folder, {path.parent}."
    if extension_of(path.with_name(path.name.lower())):
        return "Endings are written in small letters: rename it."
    packed = next((ending for ending in PACKED if path.name.endswith(ending)), None)
    if packed is None:
        return "Convert it to one of these."
    lines = f", or name it .jsonl{packed} if every line of it is a row" if packed in (".gz", ".zst") else ""
    return f"Of what is compressed, only JSON Lines are read: unpack it first{lines}."


def find_numbered(folder: Path, split: str) -> Iterator[tuple[Path, tuple[Path, ...]]]:
    """Yield (pattern of their names, files in order) of a split in numbered files, each set of files once.

    Raises DataError if one of several files is missing or has the number of another one, and for data files among
    those in the folder of a split that have no number.
    """
    for place in (folder, folder / "data"):
        for (count, _), files in _parts(place, split).items():
            in_order = _in_order(place, split, files, range(count))
            yield place / _pattern(in_order[0].name), in_order
    by_extension: dict[str, dict[int, Path]] = {}
    others: list[Path] = []
    for path, extension in _data_files(folder / split):
        if match := _NUMBER.fullmatch(path.name.removesuffix(extension)):
            _add(by_extension.setdefault(extension, {}), int(match[1]), path)
        else:
            others.append(path)
    if by_extension and others:
        left_out = listed([path.name for path in others], MAX_NUMBERS_SHOWN)
        raise DataError(
            f"{folder / split}: {left_out} would be left out, since other files there are numbered. Number all files "
            f"of the split {split!r}, move the others away, or name single files."
        )
    for extension, files in by_extension.items():
        # A folder is numbered from 0, as on the hub, or by hand from 1.
        wanted = range(0 if 0 in files or min(files) > 1 else 1, max(files) + 1)
        yield folder / split / f"*{extension}", _in_order(folder / split, split, files, wanted)


def _pattern(name: str) -> str:
    """Return a pattern of the names of all files that are numbered as this one is."""
    return _PART.sub(lambda part: f"-*-of-{part[2]}{'-*' if part[3] else ''}", name)


def _parts(place: Path, split: str) -> dict[tuple[int, str], dict[int, Path]]:
    """Return (count, extension) -> number -> file of the files `SPLIT-NUMBER-of-COUNT.*` in a folder."""
    found: dict[tuple[int, str], dict[int, Path]] = {}
    for path, extension in _data_files(place):
        stem = path.name.removesuffix(extension)
        if stem.startswith(split) and (match := _PART.fullmatch(stem, len(split))):
            _add(found.setdefault((int(match[2]), extension), {}), int(match[1]), path)
    return found


def _add(files: dict[int, Path], number: int, path: Path) -> None:
    """Add a file under its number. Raises DataError if another file has it."""
    if number in files:
        raise DataError(
            f"{path.parent}: {files[number].name} and {path.name} both have the number {number}, so one of them would "
            f"be left out. Remove or renumber one, or name single files."
        )
    files[number] = path


def _in_order(place: Path, split: str, files: dict[int, Path], wanted: range) -> tuple[Path, ...]:
    """Return the files by their numbers. Raises DataError unless these are exactly the numbers that are wanted."""
    # A number in a name may be huge, so that `wanted` is gone through only as far as a message needs, and has no len().
    count = wanted.stop - wanted.start
    beyond = [path.name for number, path in files.items() if number not in wanted]
    if num_missing := count - len(files) + len(beyond):
        missing = list(islice((number for number in wanted if number not in files), MAX_NUMBERS_SHOWN))
        raise _incomplete(place, split, missing, num_missing, wanted)
    if beyond:
        left_out = listed(beyond, MAX_NUMBERS_SHOWN)
        raise DataError(
            f"{place}: the {count} files of the split {split!r}, numbered from 0, are all there, and {left_out} "
            f"would be left out. Remove or renumber what is too much, or name single files."
        )
    return tuple(files[number] for number in wanted)


def _data_files(folder: Path) -> list[tuple[Path, str]]:
    if not folder.is_dir():
        return []
    files = [(path, extension_of(path)) for path in sorted(folder.iterdir())]
    return [(path, extension) for path, extension in files if extension in IN_ORDER and path.is_file()]


def _incomplete(place: Path, split: str, missing: list[int], num_missing: int, wanted: range) -> DataError:
    """Return the error for numbered files that are not all there, of which the first that are missing are given."""
    more = num_missing - len(missing)
    numbers = ", ".join(map(str, missing)) + (f" and {more} more" if more > 0 else "")
    return DataError(
        f"{place}: of the {wanted.stop - wanted.start} files of the split {split!r}, numbered from {wanted.start}, "
        f"{numbers} {'is' if num_missing == 1 else 'are'} missing. Get the dataset again, or name single files."
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
