"""Read a whole suite, from a folder as it is published or from the hub. Needs neither torch nor a model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Final

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import sha256_file
from rewardlab.core.suites import SuiteItem
from rewardlab.data.finding import Source
from rewardlab.data.readers import read_source
from rewardlab.data.rows import Row, UnreadRow, show
from rewardlab.data.shards import EXTENSIONS
from rewardlab.data.suites.item_rows import Place, UnfitRowError
from rewardlab.data.suites.layouts import LAYOUTS, Layout

TIES: Final = "Ties"
ALL_TWICE: Final = 0.5
"""Share of repeated rows from which on a folder is taken to hold its suite twice."""


@dataclass(frozen=True, kw_only=True)
class SuiteData:
    """The items of a suite and where they came from."""

    suite: str
    items: tuple[SuiteItem, ...]
    left_out: Mapping[str, int]
    """Cause for which the rule of the suite does not judge a row -> number of rows."""
    repeated: int
    """Rows equal to an earlier one of their subset; they count like every other."""
    sources: Mapping[str, str | None]
    """File, or dataset and split of the hub -> SHA-256; None for the hub."""


def require_suites(suites: Sequence[str], folder: Path | None) -> None:
    """Check what can be checked without reading a suite whole.

    Raises ConfigError for a suite named twice or a suite without a hub dataset that has no folder, DataError if a
    folder has no file of the suite or if the first row of a file is not one of the suite.
    """
    for suite, count in Counter(suites).items():
        if count > 1:
            raise ConfigError(f"--suite {suite}: named {count} times. Name it once.")
    for suite in suites:
        layout = LAYOUTS[suite]
        if folder is None:
            if not layout.hub:
                raise ConfigError(f"--suite {suite}: needs --suite-data FOLDER. Get it from {layout.home}.")
            continue
        for _, source in _sources(suite, folder_of(suite, suites, folder)):
            # A large .json file can only be read whole, which is left to the run.
            if source.path is not None and (source.path.suffix != ".json" or source.path.stat().st_size < 5_000_000):
                first = next(read_source(source), None)
                if first is not None:
                    _require_columns(suite, layout, first[1], f"{source.label}:{first[0]}")


def folder_of(suite: str, suites: Sequence[str], folder: Path | None) -> Path | None:
    """Return the folder of one of several suites: the one of its name inside `folder`, else `folder` itself.

    Raises DataError if there are several suites and no such folder.
    """
    if folder is None or (folder / suite).is_dir():
        return None if folder is None else folder / suite
    if len(suites) > 1:
        raise DataError(
            f"--suite-data {folder}: no folder {suite} in it. For several suites it holds one folder for each, named "
            f"like the suite: {', '.join(suites)}."
        )
    return folder


def read_suite(suite: str, folder: Path | None) -> SuiteData:
    """Read a suite from a folder, or from the hub if there is none.

    Raises DataError for a folder without files of the suite, for rows that are not rows of it, naming place and cause,
    for a folder that holds the suite twice, and if the hub does not give it.
    """
    layout = LAYOUTS[suite]
    items: list[SuiteItem] = []
    left_out: Counter[str] = Counter()
    sources: dict[str, str | None] = {}
    for name, source in _sources(suite, folder):
        sources[source.label] = sha256_file(source.path) if source.path is not None else None
        for number, row in read_source(source):
            place = Place(path=name, number=number, split=source.split)
            _require_columns(suite, layout, row, f"{source.label}:{number}")
            try:
                read = layout.read(row, place)
            except UnfitRowError as error:
                raise DataError(
                    f"{source.label}:{number}: not a row of {suite}: {error}. Get the suite from {layout.home}."
                ) from error
            if isinstance(read, str):
                left_out[read] += 1
            else:
                items.append(read)
    if not items:
        where = "" if folder is None else f"--suite-data {folder}: "
        raise DataError(f"{where}no rows of {suite} to judge. Get the suite from {layout.home}.")
    return SuiteData(
        suite=suite,
        items=tuple(_with_own_ids(items)),
        left_out=dict(left_out),
        repeated=_count_repeated(suite, items, folder),
        sources=sources,
    )


def _sources(suite: str, folder: Path | None) -> Iterator[tuple[PurePath, Source]]:
    """Yield (name that says the subset, source) of every file, in order. Raises DataError if there is none."""
    layout = LAYOUTS[suite]
    if folder is None:
        for name, split in layout.hub:
            label = f"{name}[{split}]"
            yield PurePath(name.replace(":", "/")), Source(name=name, split=split, label=label, path=None)
        return
    if folder.is_file():
        raise DataError(f"--suite-data {folder}: is a file. Name the folder with the files of {suite}.")
    if not folder.is_dir():
        raise DataError(f"--suite-data {folder}: no such folder. Get {suite} from {layout.home}.")
    for path in _files(layout, folder, suite):
        yield (
            path.relative_to(folder.parent),
            Source(name=suite, split="", label=str(path.relative_to(folder)), path=path),
        )


def _files(layout: Layout, folder: Path, suite: str) -> list[Path]:
    """Return the files that the first fitting pattern names. Raises DataError if there is none."""
    there = sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith(EXTENSIONS))
    there = [path for path in there if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    for pattern in layout.files:
        fitting = set(folder.glob(pattern))
        if chosen := [path for path in there if path in fitting]:
            return chosen
    raise DataError(
        f"--suite-data {folder}: no {', '.join(EXTENSIONS)} file in it. Get {suite} from {layout.home}, and name the "
        f"folder that holds its files."
    )


def _require_columns(suite: str, layout: Layout, row: Row, where: str) -> None:
    """Raise DataError unless a row has the columns of the suite."""
    if any(all(name in row for name in columns) for columns in layout.columns):
        return
    if isinstance(row, UnreadRow):
        raise DataError(f"{where}: the row is too long to be read.")
    nearest = max(layout.columns, key=lambda columns: sum(name in row for name in columns))
    missing = ", ".join(name for name in nearest if name not in row)
    raise DataError(
        f"{where}: not a row of {suite}: the columns {missing} are missing (there are: "
        f"{show(', '.join(row)) or 'none'}). Get the suite from {layout.home}, and leave other files out of the folder."
    )


def _with_own_ids(items: Sequence[SuiteItem]) -> Iterator[SuiteItem]:
    """Yield the items; of those that share an id, every later one gets a number added, in order of its texts.

    A number that would make an id which another row has is passed over.

    Raises DataError for rows of RewardBench 2's Ties subset that share an id.
    """
    by_id: dict[str, list[SuiteItem]] = {}
    for item in items:
        by_id.setdefault(item.id, []).append(item)
    taken, named = set(by_id), {}
    # Sorted, so that the order of rows and files changes no id.
    for name in sorted(by_id):
        first, *others = sorted(by_id[name], key=lambda item: (item.subset, item.cluster, item.replies))
        named[name] = [first]
        numbers = itertools.count(2)
        for item in others:
            if item.subset == TIES:
                raise DataError(
                    f"two rows of the Ties subset have the id {name}, by which its rule joins them. Keep one."
                )
            id = next(own for number in numbers if (own := f"{name} #{number}") not in taken)
            taken.add(id)
            named[name].append(replace(item, id=id))
    for name in by_id:
        yield from named[name]


def _count_repeated(suite: str, items: Sequence[SuiteItem], folder: Path | None) -> int:
    """Return the number of rows equal to an earlier one. Raises DataError if these are half of all or more."""
    distinct = {(item.subset, item.prompt, item.replies, item.pairs) for item in items}
    repeated = len(items) - len(distinct)
    if repeated >= ALL_TWICE * len(items):
        raise DataError(
            f"{suite}: {repeated} of {len(items)} rows are there twice. Does {folder or 'the dataset'} hold the suite "
            f"more than once, in several formats perhaps? Keep one."
        )
    return repeated
