"""The datasets that a configuration names, for what, and what shows at once of those that cannot be used.

Imports no more than reading rows needs, so that a wrong name is told before the libraries of models are imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from rewardlab.core.errors import ConfigError
from rewardlab.data.config import DataConfig, TrainingDataConfig
from rewardlab.data.readers import Source, find_sources, source_of_rows
from rewardlab.data.sources import first_rows, first_rows_in, open_units

WHOLE_BYTES: Final = 50_000_000
"""Above this, a .json file, which can only be read as a whole, is not read for its first row."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """Datasets to read for one purpose."""

    purpose: str
    """`train`, `eval` or `test`."""
    names: Sequence[str]
    split: str
    limit: int | None
    given: Source | None = None
    """Rows in memory, in place of names."""

    def sources(self) -> Sequence[Source]:
        """Where the rows are. Raises DataError as `find_sources` does."""
        return (self.given,) if self.given is not None else find_sources(self.names, self.split)


Given = Mapping[str, Source]
"""Purpose -> rows in memory."""
NOTHING: Final[Given] = MappingProxyType({})
SETTING: Final = {"train": "dataset", "eval": "eval_dataset", "test": "test_dataset"}
"""Purpose -> the setting that names its data."""
KEYWORDS: Final = {"train": "preferences", "eval": "eval_preferences", "test": "test_preferences"}
"""Purpose -> the argument that gives rows in memory."""


def given_rows(**rows: object) -> Given:
    """Rows in memory by the arguments that give them (`KEYWORDS`); None gives nothing.

    Raises DataError as `source_of_rows` does.
    """
    purposes = {keyword: purpose for purpose, keyword in KEYWORDS.items()}
    return {purposes[name]: source_of_rows(value, name) for name, value in rows.items() if value is not None}


def all_named(config: DataConfig, given: Given = NOTHING) -> list[Named]:
    """What the configuration names and what is `given` in memory, training data first.

    Raises ConfigError if no training data are there, for data that are there twice, and for a split of a lone file or
    of data in memory.
    """
    if not config.dataset and "train" not in given:
        raise ConfigError("--dataset is missing: name a file, a folder or a hub dataset.")
    if config.dataset and "train" in given:
        raise _twice("train", config.dataset)
    named = [
        Named(
            purpose="train",
            names=config.dataset,
            split=config.hf_split,
            limit=config.limit,
            given=given.get("train"),
        )
    ]
    others = [("test", config.test_dataset, config.test_split)]
    if isinstance(config, TrainingDataConfig):
        others.append(("eval", config.selection.eval_dataset, config.selection.eval_split))
    for purpose, names, split in others:
        if names and purpose in given:
            raise _twice(purpose, names)
        if purpose in given:
            found = Named(purpose=purpose, names=(), split="", limit=config.eval_limit, given=given[purpose])
            named.append(found)
        elif names or split:
            found_names = names or _with_splits(config.dataset, purpose)
            named.append(Named(purpose=purpose, names=found_names, split=split or "test", limit=config.eval_limit))
    return named


def _twice(purpose: str, names: Sequence[str]) -> ConfigError:
    """The error for data that are in memory and named."""
    return ConfigError(f"{SETTING[purpose]}={names!r}: {KEYWORDS[purpose]} are given as well. Give one of the two.")


def _with_splits(names: Sequence[str], kind: str) -> Sequence[str]:
    """The training datasets, to be read with another split; ConfigError where there is none."""
    if not names:
        raise ConfigError(
            f"--{kind}-split: training data in memory have no splits. Give {KEYWORDS[kind]}, or name --{kind}-dataset."
        )
    for name in names:
        if Path(name).is_file():
            raise ConfigError(
                f"--{kind}-split: {name} is one file and has no splits, so it would be read again. Name the data with "
                f"--{kind}-dataset."
            )
    return names


def require_sources(config: DataConfig, given: Given = NOTHING) -> None:
    """Raise DataError or ConfigError for what shows at once: see `require_readable`."""
    for named in all_named(config, given):
        if named.given is not None:
            open_units(named.given)
        else:
            require_readable(named.names, named.split)


def require_readable(names: Sequence[str], split: str) -> None:
    """Raise DataError for a dataset that is not there, is empty, or begins with a row of no known schema.

    Hub data are not asked for, and of a large .json file nothing is read.
    """
    for source in find_sources(names, split):
        if source.path is not None and (source.path.suffix != ".json" or source.path.stat().st_size <= WHOLE_BYTES):
            open_units(source)


def first_rows_of(config: TrainingDataConfig, given: Given = NOTHING) -> Sequence[tuple[str, Mapping[str, object]]]:
    """(dataset, its first row) of all data that are named or given."""
    named = (
        (config.dataset, config.hf_split),
        (config.selection.eval_dataset, config.selection.eval_split or "test"),
        (config.test_dataset, config.test_split or "test"),
    )
    held = [row for source in given.values() for row in first_rows_in([source])]
    return [*held, *(row for names, split in named if names for row in first_rows(names, split))]
