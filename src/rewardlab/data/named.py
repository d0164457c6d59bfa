"""The datasets that a configuration names, for what, and what shows at once of those that cannot be used.

Imports no more than reading rows needs, so that a wrong name is told before the libraries of models are imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rewardlab.core.errors import ConfigError
from rewardlab.data.config import DataConfig, TrainingDataConfig
from rewardlab.data.readers import find_sources
from rewardlab.data.sources import first_rows, open_units

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


def all_named(config: DataConfig) -> list[Named]:
    """What the configuration names, training data first. ConfigError for a split of a lone file."""
    named = [Named(purpose="train", names=config.dataset, split=config.hf_split, limit=config.limit)]
    others = [("test", config.test_dataset, config.test_split)]
    if isinstance(config, TrainingDataConfig):
        others.append(("eval", config.selection.eval_dataset, config.selection.eval_split))
    for purpose, names, split in others:
        if names or split:
            found = names or _with_splits(config.dataset, purpose)
            named.append(Named(purpose=purpose, names=found, split=split or "test", limit=config.eval_limit))
    return named


def _with_splits(names: Sequence[str], kind: str) -> Sequence[str]:
    """The training datasets, to be read with another split; ConfigError for a lone file, which has none."""
    for name in names:
        if Path(name).is_file():
            raise ConfigError(
                f"--{kind}-split: {name} is one file and has no splits, so it would be read again. Name the data with "
                f"--{kind}-dataset."
            )
    return names


def require_sources(config: DataConfig) -> None:
    """Raise DataError or ConfigError for what shows at once: see `require_readable`."""
    for named in all_named(config):
        require_readable(named.names, named.split)


def require_readable(names: Sequence[str], split: str) -> None:
    """Raise DataError for a dataset that is not there, is empty, or begins with a row of no known layout.

    Hub data are not asked for, and of a large .json file nothing is read.
    """
    for source in find_sources(names, split):
        if source.path is not None and (source.path.suffix != ".json" or source.path.stat().st_size <= WHOLE_BYTES):
            open_units(source)


def first_rows_of(config: TrainingDataConfig) -> Sequence[tuple[str, Mapping[str, object]]]:
    """(dataset, its first row) of all data that are named."""
    named = (
        (config.dataset, config.hf_split),
        (config.selection.eval_dataset, config.selection.eval_split or "test"),
        (config.test_dataset, config.test_split or "test"),
    )
    return [row for names, split in named if names for row in first_rows(names, split)]
