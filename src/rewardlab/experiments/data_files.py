"""The local files that the data and models of runs are: those that settings name, alone, as a folder or by a split."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import OF_MODELS, at_home, sha256_file
from rewardlab.data.config import SelectionConfig, TrainingDataConfig
from rewardlab.data.dataset_names import SETTING, all_named
from rewardlab.data.finding import find_sources
from rewardlab.data.template_files import file_of
from rewardlab.data.weights import local_path
from rewardlab.experiments.plan import Run

DATA: Final = ("dataset", "eval_dataset", "test_dataset")
"""Settings that name data."""
DECIDING: Final = (*DATA, "hf_split", "eval_split", "test_split", "model", "chat_template")
"""Settings that decide which files are read."""


def distinct(runs: Sequence[Run]) -> list[Run]:
    """Return a run for each choice of data, since seeds seldom differ in it, and files take a while to find."""
    chosen = {json.dumps([run.settings.get(name) for name in DECIDING], default=str): run for run in reversed(runs)}
    return list(reversed(chosen.values()))


def data_of(run: Run) -> list[Path]:
    """Return the local files of a run's data: what it reads, and whatever else is in a folder that is named."""
    read = [path for paths in read_by_setting(run).values() for path in paths]
    named = [path for setting in DATA for name in _names(run.settings.get(setting)) for path in _all_in(name)]
    return list(dict.fromkeys([*named, *read]))


def model_files(run: Run) -> list[Path]:
    """Return the files of the base model of a run, if that is a folder on this machine, and of its chat template."""
    folder = Path(str(run.settings.get("model") or ""))
    places = [place for place in (folder, folder / "adapter") if run.settings.get("model") and place.is_dir()]
    found = [path for place in places for path in sorted(place.iterdir())]
    template = file_of(str(run.settings.get("chat_template") or "auto"))
    own = [path for path in found if path.is_file() and path.suffix in OF_MODELS and not path.name.startswith(".")]
    return own if template is None else list(dict.fromkeys([*own, template]))


def read_by_setting(run: Run) -> dict[str, list[Path]]:
    """Return setting of `DATA` -> the local files that are read for it, as its names and splits say.

    Where these cannot be found as data, as may be the case for another program, all files of the names are returned.
    """
    given = run.settings
    found: dict[str, list[Path]] = {setting: [] for setting in DATA}
    config = TrainingDataConfig(
        dataset=_names(given.get("dataset")),
        hf_split=given.get("hf_split") or "train",
        test_dataset=_names(given.get("test_dataset")),
        test_split=given.get("test_split"),
        selection=SelectionConfig(
            eval_dataset=_names(given.get("eval_dataset")), eval_split=given.get("eval_split") or None
        ),
    )
    try:
        read = [(SETTING[named.purpose], name, named.split) for named in all_named(config) for name in named.names]
    except ConfigError:
        return {setting: [path for name in _names(given.get(setting)) for path in _all_in(name)] for setting in DATA}
    for setting, name, split in read:
        found[setting] += _read_for(name, split)
    return found


def _read_for(name: str, split: str) -> list[Path]:
    try:
        (source,) = find_sources((name,), split)
    except DataError:
        return _all_in(name)
    if source.path is None:
        return []
    return [file for path in source.shards or (source.path,) for file in _below(_as_named(path, name))]


def _as_named(path: Path, name: str) -> Path:
    """Return a path as its name is written: from the working folder if that does not begin with /."""
    return path if at_home(name).is_absolute() else Path(os.path.relpath(path))


def _all_in(name: str) -> list[Path]:
    """Return the file of this name, or every file in the folder of this name."""
    path = local_path(name) if name else None
    return [] if path is None else _below(path)


def _below(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())


def _names(named: object) -> tuple[str, ...]:
    names = [named] if isinstance(named, str) else list(named) if isinstance(named, Sequence) else []
    return tuple(str(name) for name in names if name)


def test_files_used(runs: Sequence[Run]) -> list[str]:
    """Return what is wrong with each test file that is also trained on or chosen by, under whatever name.

    Only files of equal size are read.
    """
    used: dict[str, dict[Path, None]] = {setting: {} for setting in DATA}
    for run in distinct(runs):
        for setting, paths in read_by_setting(run).items():
            used[setting] |= dict.fromkeys(paths)
    others: dict[int, list[tuple[str, Path]]] = {}
    for setting in DATA:
        for path in used[setting] if setting != "test_dataset" else ():
            others.setdefault(path.stat().st_size, []).append((setting, path))
    told = []
    for test in used["test_dataset"]:
        alike = [(setting, path) for setting, path in others.get(test.stat().st_size, ()) if _same(test, path)]
        for setting in dict.fromkeys(setting for setting, _ in alike):
            told.append(
                f"{test}: is read as {setting} too. What a verdict is judged on must not be trained on or chosen by: "
                f"name other data."
            )
    return told


def _same(one: Path, other: Path) -> bool:
    return one == other or sha256_file(one) == sha256_file(other)


def changed_in(run: Run, began_with: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Return a file of a run's data or program that is not what it began with; None if there is none.

    Both are file -> SHA-256: what the run began with, and what the plan now has, for all runs.
    """
    for name, digest in began_with.items():
        # The settings and the program are the same, so a file that the plan has no more was in a folder they name.
        if now.get(name) != digest:
            return name
    if not (come := [name for name in now if name not in began_with and any(_may_be(name, one) for one in _all(run))]):
        return None
    # The disk is asked only now, since a study can be looked at where its data are not.
    own = {str(path) for path in data_of(run)}
    return next((name for name in come if name in own), None)


def _all(run: Run) -> Iterator[str]:
    for setting in DATA:
        for name in _names(run.settings.get(setting)):
            yield str(local_path(name) or name)


def _may_be(file: str, name: str) -> bool:
    """Return whether a file may be one of a dataset's: in the folder of its name, or with a name that goes on."""
    return file.startswith((f"{name}/", f"{name}."))
