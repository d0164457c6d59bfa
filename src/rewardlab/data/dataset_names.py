"""The datasets that a configuration names, by purpose, and quick checks that they can be used.

This module imports only what reading rows needs, so that a wrong name is reported before the slow import of the model
libraries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rewardlab.core.errors import ConfigError
from rewardlab.data.config import DataConfig, ReadingConfig, TrainingDataConfig
from rewardlab.data.finding import Source, find_sources, is_lone, source_of_rows
from rewardlab.data.hub import parse_hub_name
from rewardlab.data.judgements import Rules
from rewardlab.data.sources import first_rows, first_rows_in, open_units
from rewardlab.data.weights import Weighted, refuse_weights, split_weights, without_weights

WHOLE_BYTES: Final = 50_000_000
"""Size above which a .json file is not checked: it can only be read as a whole, which takes seconds."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """Datasets to read for one purpose."""

    purpose: str
    """`train`, `eval` or `test`."""
    names: Sequence[str]
    split: str
    limit: int | None
    given: Source | None = None
    """Rows in memory instead of names."""
    streaming: bool = False
    """Whether hub data are read as they arrive."""
    weighted: Weighted | None = None
    """The shares of the datasets, whose names are then `names`; None if all their rows are used."""

    def sources(self) -> Sequence[Source]:
        """Return where the rows are. Raises DataError as `find_sources` does."""
        if self.given is not None:
            return (self.given,)
        return find_sources(self.names, self.split, streaming=self.streaming)


Given = Mapping[str, Source]
"""Purpose -> rows in memory."""
NOTHING: Final[Given] = MappingProxyType({})
SETTING: Final = {"train": "dataset", "eval": "eval_dataset", "test": "test_dataset"}
"""Purpose -> the setting that names its data."""
KEYWORDS: Final = {"train": "preferences", "eval": "eval_preferences", "test": "test_preferences"}
"""Purpose -> the argument that gives rows in memory."""


def given_rows(**rows: object) -> Given:
    """Return purpose -> rows in memory, from the keyword arguments in `KEYWORDS`. None means no rows.

    Raises DataError as `source_of_rows` does.
    """
    purposes = {keyword: purpose for purpose, keyword in KEYWORDS.items()}
    return {purposes[name]: source_of_rows(value, name) for name, value in rows.items() if value is not None}


def all_named(config: DataConfig, given: Given = NOTHING) -> list[Named]:
    """Return the datasets that the configuration names and those `given` in memory, training data first.

    Raises ConfigError if there are no training data, if data for one purpose are both named and given, if a split is
    asked of a single file or of data in memory, and for weights that do not fit or of data that take none.
    """
    if not config.dataset and "train" not in given:
        raise ConfigError(
            "--dataset is missing: name a file, a folder or a hub dataset. Training on rows in memory, and going on "
            "with it, is done in Python: rewardlab.train(config, preferences=...)."
        )
    if config.dataset and "train" in given:
        raise _twice("train", config.dataset)
    weighted = split_weights(config.dataset, "--dataset")
    datasets = config.dataset if weighted is None else weighted.names
    streaming = config.reading.streaming
    named = [
        Named(
            purpose="train",
            names=datasets,
            split=config.hf_split,
            limit=config.limit,
            given=given.get("train"),
            streaming=streaming,
            weighted=weighted,
        )
    ]
    others = [("test", config.test_dataset, config.test_split)]
    if isinstance(config, TrainingDataConfig):
        others.append(("eval", config.selection.eval_dataset, config.selection.eval_split))
    for purpose, names, split in others:
        if names and purpose in given:
            raise _twice(purpose, names)
        if split and purpose in given:
            raise ConfigError(
                f"{purpose}_split={split!r}: rows in memory have no splits. Leave it out, or {KEYWORDS[purpose]}."
            )
        if purpose in given:
            named.append(Named(purpose=purpose, names=(), split="", limit=config.eval_limit, given=given[purpose]))
        elif names or split:
            refuse_weights(names, f"--{purpose}-dataset")
            names = names or tuple(_with_splits(datasets, purpose))
            named.append(
                Named(purpose=purpose, names=names, split=split or "test", limit=config.eval_limit, streaming=streaming)
            )
    return named


def require_apart(named: Sequence[Named]) -> None:
    """Raise ConfigError if the test data are those that choose the checkpoint."""
    by_purpose = {one.purpose: one for one in named}
    test, chosen = by_purpose.get("test"), by_purpose.get("eval")
    if test is None or chosen is None or test.given is not None or chosen.given is not None:
        return
    files = all(is_lone(name) for name in test.names)
    if sorted(test.names) == sorted(chosen.names) and (files or test.split == chosen.split):
        where = ", ".join(test.names) + ("" if files else f", split {test.split}")
        raise ConfigError(
            f"{where}: these are the evaluation data and the test data. Evaluation data choose the checkpoint, so "
            f"numbers on them flatter it. Name others with --test-dataset or --test-split, or no test data."
        )


def _twice(purpose: str, names: Sequence[str]) -> ConfigError:
    """Return the error for data that are both named and given in memory."""
    return ConfigError(f"{SETTING[purpose]}={names!r}: {KEYWORDS[purpose]} are given as well. Give one of the two.")


def _with_splits(names: Sequence[str], kind: str) -> Sequence[str]:
    """Return the names of the training datasets, to be read with another split. Raises ConfigError if they have
    none."""
    if not names:
        raise ConfigError(
            f"--{kind}-split: training data in memory have no splits. Give {KEYWORDS[kind]}, or name --{kind}-dataset."
        )
    for name in names:
        if is_lone(name):
            raise ConfigError(
                f"--{kind}-split: {name} is one file and has no splits, so it would be read again. Name the data with "
                f"--{kind}-dataset."
            )
    return names


def require_sources(config: DataConfig, given: Given = NOTHING) -> None:
    """Check all data of a configuration without reading more than first rows.

    Raises ConfigError as `all_named` and `require_apart` do, DataError as `require_readable` does.
    """
    require_apart(every := all_named(config, given))
    for named in every:
        if named.given is not None:
            _open(named.given, config.reading)
        else:
            _require_first_rows(named.names, named.split, config.reading)


def _open(source: Source, reading: ReadingConfig) -> None:
    """Raise DataError as `open_units` does. Nothing here depends on the seed."""
    open_units(source, Rules(source=source.name, reading=reading, seed=0))


def require_readable(names: Sequence[str], split: str, reading: ReadingConfig) -> None:
    """Raise DataError for a dataset that does not exist, is empty, or begins with a row of no known schema.

    Hub data are not downloaded, and large .json files are not read. Raises ConfigError for names with weights.
    """
    refuse_weights(names, "--dataset")
    _require_first_rows(names, split, reading)


def _require_first_rows(names: Sequence[str], split: str, reading: ReadingConfig) -> None:
    """Raise DataError as `require_readable` does."""
    for source in find_sources(names, split):
        if source.is_on_hub:
            parse_hub_name(source.name)
        elif source.path is None or source.path.suffix != ".json" or source.path.stat().st_size <= WHOLE_BYTES:
            _open(source, reading)


def first_rows_of(config: TrainingDataConfig, given: Given = NOTHING) -> Sequence[tuple[str, Mapping[str, object]]]:
    """Return (dataset, its first row) of all data that are named or given. Raises DataError as `first_rows` does."""
    named = (
        (without_weights(config.dataset, "--dataset"), config.hf_split),
        (config.selection.eval_dataset, config.selection.eval_split or "test"),
        (config.test_dataset, config.test_split or "test"),
    )
    streaming = config.reading.streaming
    held = [row for source in given.values() for row in first_rows_in([source])]
    return [*held, *(row for names, split in named if names for row in first_rows(names, split, streaming=streaming))]
