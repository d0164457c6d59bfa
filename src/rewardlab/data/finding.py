"""Find datasets by name, as files or on the hub.

A name is a file, a folder that `datasets` saved, a folder (`folder/<split>.jsonl`, or the same in numbered files, see
`shards`), the beginning of a path (`folder/name` for `folder/name.<split>.jsonl.gz`) or otherwise a hub name
(`organisation/name`, `organisation/name:configuration`, each with `@revision`).
"""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from rewardlab.core.errors import DataError
from rewardlab.core.files import absent, at_home
from rewardlab.core.terminal import listed
from rewardlab.core.types import Preference
from rewardlab.data.shards import (
    EXTENSIONS,
    OTHER_FORMATS,
    extension_of,
    find_numbered,
    how_to_read,
    is_saved,
    saved_split,
    saved_splits,
)

SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Words in a file name that name its split and not its dataset."""
OTHER_FOLDERS = {
    "reward_spec.json": "a reward model",
    "model.safetensors": "a model",
    "model.safetensors.index.json": "a model",
    "metrics.jsonl": "a run",
}
"""File by which a folder that holds no data is told -> what it is the folder of."""
LLAMA_FACTORY = "dataset_info.json"
"""Where LLaMA-Factory lists datasets by their names."""
ALL_ROWS = "all rows"
IN_MEMORY = "in memory"
"""Stand for the split of a single file without a split in its name, and of rows in memory."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset that was found."""

    name: str
    """For metrics: the file name without split and extension, or the hub name."""
    split: str
    """The split in the file's name if it has one, else the one asked for; `all rows` for a lone file."""
    label: str
    """Beginning of the places of rows: the file name or `hub-name[split]`."""
    path: Path | None
    """None for a hub dataset, and for rows in memory. A folder if `datasets` saved it. For a dataset in several files,
    a pattern of their names, which is not itself a file."""
    shards: tuple[Path, ...] = ()
    """The files, in order, of a dataset in several files."""
    rows: Iterable[object] | None = field(default=None, repr=False, compare=False)
    """Rows in memory, which can be iterated more than once."""
    streaming: bool = False
    """Whether the rows of a hub dataset are read as they arrive, without downloading it first."""

    @property
    def is_on_hub(self) -> bool:
        """Return whether the rows come from the hub."""
        return self.path is None and self.rows is None


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Where a local dataset is."""

    path: Path
    shards: tuple[Path, ...] = ()


def find_sources(names: Sequence[str], split: str, *, streaming: bool = False) -> tuple[Source, ...]:
    """Return where each dataset is, with labels that tell all of them apart. `streaming` concerns those of the hub.

    Raises DataError for a name that is not found, is ambiguous, is given twice, or is not UTF-8.
    """
    for name in names:
        _require_text(name)
    located = [(name, _find_local(name, split)) for name in names]
    paths = [found.path for _, found in located if found is not None]
    for known in paths:
        _require_text(str(known))
    for place, count in Counter(str(found.path.resolve()) if found else name for name, found in located).items():
        if count > 1:
            raise DataError(f"dataset {place} is named {count} times. Name it once.")
    sources, labels = [], iter(_distinct_labels(paths))
    for name, found in located:
        if found is None:
            label = f"{name}[{split}]"
            sources.append(Source(name=name, split=split, label=label, path=None, streaming=streaming))
        else:
            label = next(labels)
            bare, own_split = _bare_name(found, label, split)
            split_read = own_split or (ALL_ROWS if found.path == at_home(name).absolute() else split)
            sources.append(Source(name=bare, split=split_read, label=label, path=found.path, shards=found.shards))
    counts = Counter(source.name for source in sources)
    return tuple(
        replace(source, name=source.label) if source.path and counts[source.name] > 1 else source for source in sources
    )


def is_lone(name: str) -> bool:
    """Return whether a name is one file, or one dataset that `datasets` saved: it has no splits."""
    path = at_home(name)
    return path.is_file() or is_saved(path)


def source_of_rows(rows: object, name: str) -> Source:
    """Return rows in memory as a dataset: mappings, `Preference`s, a `datasets.Dataset`, or an iterable of such rows.

    Rows of an iterator, which can be iterated only once, are copied to a list. Raises DataError for anything else.
    """
    is_one = isinstance(rows, (str, bytes, Mapping, Preference, Path))
    if is_one or not isinstance(rows, Iterable):
        kind = type(rows).__name__
        raise DataError(
            f"{name}: got a {kind}, wanted rows: mappings such as {{'prompt': …, 'chosen': …, 'rejected': …}}, "
            f"Preferences, or a datasets.Dataset. Files and hub names go to --dataset."
        )
    # An iterable that is not a sequence may give other rows, or none, in a second pass, so it is copied.
    held = rows if hasattr(rows, "__getitem__") and hasattr(rows, "__len__") else list(rows)
    return Source(name=name, split=IN_MEMORY, label=name, path=None, rows=held)


def _require_text(name: str) -> None:
    """Raise DataError for a name that is not UTF-8 or has a null character: logs and manifests cannot hold it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        raise DataError(f"dataset {shown}: its name is not UTF-8. Rename the file, or link to it.") from None
    if "\0" in name:
        raise DataError(f"dataset {name!r}: a file name cannot have a null character.")


def _find_local(name: str, split: str) -> _Found | None:
    """Return where a local dataset is, with an absolute path; None if the name can only be one on the hub.

    Links are not followed: in the cache of the hub they point to files whose names are hashes. Raises DataError for an
    unknown extension, for several files that match, and if a name that must be local is not found.
    """
    path = at_home(name)
    if path.is_file():
        if extension_of(path) is None:
            raise DataError(
                f"{path}: unknown extension. Preferences are read from {', '.join(EXTENSIONS)} files. "
                f"{how_to_read(path)}"
            )
        return _Found(path=path.absolute())
    if is_saved(path):
        return _Found(path=path.absolute())
    if path.is_fifo() or name == "-":
        raise DataError(f"dataset {name!r}: {absent(path)}.")
    candidates = _candidates(path, split)
    if len(candidates) > 1:
        where = " or ".join(str(found.path) for found in candidates)
        raise DataError(f"dataset {name!r}, split {split!r}: could be {where}. Name one of these files.")
    if candidates:
        return replace(candidates[0], path=candidates[0].path.absolute())
    base, colon, weight = name.rpartition(":")
    if colon and is_number(weight) and _is_local(base, split):
        raise DataError(
            f"dataset {name!r}: {weight} is a weight. Weights are for several training datasets (--dataset of train "
            f"and probe) and for data mix; here, name {base} alone."
        )
    if (cut := re.search(r"[:#[].*", name)) and cut.start() and _is_local(base := name[: cut.start()], split):
        raise DataError(
            f"dataset {name!r}: {base} is there, and {cut[0]!r} is no part of its name. Name {base} alone: --limit "
            f"takes some of its rows, and a split of a folder is named by --hf-split."
        )
    near = _near_files(path)
    if _is_path_like(name, path) or near or _unread_file(path, split):
        raise _missing(name, path, split, near)
    return None


def _candidates(path: Path, split: str) -> list[_Found]:
    """Return what there is of a split: in a folder `path`, or beside it with names that begin with its name."""
    wanted = [path / f"{split}{extension}" for extension in EXTENSIONS]
    if path.name:
        wanted += [path.with_name(f"{path.name}.{split}{extension}") for extension in EXTENSIONS]
    found = [_Found(path=candidate) for candidate in wanted if candidate.is_file()]
    if is_saved(path / split):
        found.append(_Found(path=path / split))
    return found + [_Found(path=pattern, shards=files) for pattern, files in find_numbered(path, split)]


def _folders_with(path: Path, split: str) -> list[str]:
    """Return the names of the folders in a folder that hold data of a split, such as a hub dataset's configurations."""
    try:
        return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and _candidates(entry, split))
    except OSError:  # it is not a folder, or may not be read
        return []


def _missing(name: str, path: Path, split: str, near: Sequence[str]) -> DataError:
    """Return the error for a local dataset that is not there."""
    what = f"dataset {name!r}, split {split!r}: no such file."
    if there := saved_splits(path):
        return DataError(f"{what} {path} holds the splits {', '.join(there)}, which datasets saved.")
    if (path / LLAMA_FACTORY).is_file():
        return DataError(
            f"{what} {path / LLAMA_FACTORY} lists datasets of LLaMA-Factory, which are not found by their names here. "
            f"Name a data file itself, such as {path / 'NAME.json'}."
        )
    if unread := _unread_file(path, split):
        kinds = ", ".join(EXTENSIONS)
        return DataError(f"{what} There is {unread}, and only {kinds} files are read. {how_to_read(unread)}")
    if below := _folders_with(path, split):
        where = "folders" if len(below) > 1 else "a folder"
        return DataError(f"{what} {path} has {where} with one: {listed(below)}. Name one, such as {path / below[0]}.")
    if kind := next((kind for file, kind in OTHER_FOLDERS.items() if (path / file).is_file()), None):
        return DataError(f"{what} {path} is the folder of {kind}, and data are wanted here. Are two names swapped?")
    endings = f"(.* is one of {', '.join(EXTENSIONS)})"
    looked_for = f"{path}/{split}.* and {path}.{split}.* {endings}"
    if extension_of(path) and not path.is_dir():
        looked_for = str(path)
    found = f"There is: {listed(near)}." if near else f"No data file in {path.parent} has a name like it."
    if not near and "/" not in name and not extension_of(path):
        found += " On the hub, a dataset is named organisation/name."
    if path.is_dir() and not near:
        found = f"{path} is a folder without data files."
    return DataError(f"{what} Looked for {looked_for}. {found}")


def _unread_file(path: Path, split: str) -> Path | None:
    """Return a file that would be the dataset if files with its ending were read."""
    wanted = [path / f"{split}{ending}" for ending in OTHER_FORMATS]
    if path.name:
        wanted += [path.with_name(f"{path.name}.{split}{ending}") for ending in OTHER_FORMATS]
    return next((candidate for candidate in wanted if candidate.is_file()), None)


def is_number(text: str) -> bool:
    """Return whether a text is a number as weights are written: digits, with a point and an exponent if need be."""
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None


def _is_local(name: str, split: str) -> bool:
    """Return whether there is a local dataset of this name."""
    path = at_home(name)
    return path.is_file() or is_saved(path) or bool(_candidates(path, split))


def _is_path_like(name: str, path: Path) -> bool:
    """Return whether a name must be local: names on the hub have one slash before a revision, and none of our
    extensions."""
    bare = name.partition("@")[0]
    in_form = name.startswith((".", "/", "~")) or bare.count("/") != 1 or extension_of(Path(bare)) is not None
    return in_form or path.exists()


def _near_files(path: Path) -> list[str]:
    """Return the data files in the folder `path`, or those beside it with a name that begins with or resembles its
    name."""
    if path.is_dir():
        return [str(file) for file in _data_files(path)]
    beside = {file.name: str(file) for file in _data_files(path.parent)} if path.parent.is_dir() else {}
    stem = path.name.removesuffix(extension_of(path) or "")
    same = [file for name, file in beside.items() if name.startswith(f"{stem}.")]
    by_stem: dict[str, list[str]] = {}
    for name, file in beside.items():
        by_stem.setdefault(_strip_split(name.removesuffix(extension_of(Path(name)) or ""), "")[0], []).append(file)
    alike = [file for name in difflib.get_close_matches(_strip_split(stem, "")[0], by_stem) for file in by_stem[name]]
    return same or alike


def _data_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if extension_of(file) and file.is_file())


def _distinct_labels(paths: Sequence[Path]) -> list[str]:
    """Return the file name of each path, preceded by as many folders as are needed to tell it from the other paths.

    A folder or a pattern that is named for the split alone is preceded by one in any case.
    """
    parts = [path.parts for path in paths]

    @cache
    def ends(depth: int) -> Counter[tuple[str, ...]]:
        return Counter(own[-depth:] for own in parts)

    labels = []
    for path, own in zip(paths, parts, strict=True):
        depth = 2 if path.name.startswith("*") or path.name in saved_splits(path.parent) else 1
        while ends(depth)[own[-depth:]] > 1:
            depth += 1
        labels.append(_as_text("/".join(own[-depth:])))
    return labels


def _bare_name(found: _Found, label: str, split: str) -> tuple[str, str | None]:
    """Return (name without extension and split, the split that is in the name of the file or was saved, or None)."""
    path = found.path
    if found.shards:
        # `hh/data/train-*-of-3.parquet` and `hh/train/*.parquet` are the dataset hh.
        folder = path.parent.parent if path.parent.name in ("data", split) else path.parent
        return _as_text(folder.name or split), split
    if is_saved(path):
        own = saved_split(path)
        in_dict = bool(saved_splits(path.parent)) or path.name == split
        return _as_text(path.parent.name if in_dict else path.name), path.name if in_dict else own
    bare, own_split = _strip_split(label.removesuffix(extension_of(path) or ""), split)
    return bare or _as_text(path.parent.name or path.stem), own_split


def _as_text(name: str) -> str:
    """Return a file name with bytes that are not UTF-8 escaped, since it is written to files and messages."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _strip_split(stem: str, split: str) -> tuple[str, str | None]:
    """Split `name.train` into (`name`, `train`), `folder/train` into (`folder`, `train`), `train` into (``,
    `train`)."""
    for word in (split, *SPLITS):
        for ending in (f".{word}", f"/{word}"):
            if word and stem.endswith(ending):
                return stem.removesuffix(ending), word
        if word and stem == word:
            return "", word
    return stem, None
