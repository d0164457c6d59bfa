"""Preference datasets by name -> preferences, with an account of every row.

Local files are found and read here (JSONL, JSON, CSV; Parquet and hub names through optional packages); what
the rows mean is the business of `formats`. A row is kept or dropped for one named cause, never lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import sha256_file
from rewardlab.core.types import Preference
from rewardlab.data.config import DataConfig
from rewardlab.data.formats import LONG_FORM, ParsedRow, Rules, group_pairs, read_rows, recognise, seeded_generator
from rewardlab.data.readers import Source, find_sources, read_source
from rewardlab.data.rows import CAUSES, Row, UnusableRowError

MAX_EXAMPLES = 3
"""Places kept for each cause."""


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """What became of the rows of one dataset; kept + dropped = read."""

    name: str
    split: str
    rows_read: int
    """Rows; in long-form data pairs (groups of rows with one pair_id)."""
    kept: int
    """Rows that became preferences, before the limit."""
    dropped: Mapping[str, int]
    """Cause -> rows, most frequent first."""
    examples: Mapping[str, tuple[str, ...]]
    """Cause -> up to three places, as `file:line: detail`."""
    skipped_ties: int
    """Comparisons of kept K-wise rows that were not made because the scores are equal."""
    skipped_identical: int
    """Comparisons of kept K-wise rows that were not made because the replies are the same text."""
    unused_by_limit: int
    """Kept rows left out by the limit."""
    sha256: str | None
    """Of the file; None for data from the hub."""

    def __post_init__(self) -> None:
        assert self.kept + sum(self.dropped.values()) == self.rows_read, self

    def as_dict(self) -> dict[str, object]:
        """A JSON mapping for manifests and reports."""
        return {
            "name": self.name,
            "split": self.split,
            "rows_read": self.rows_read,
            "kept": self.kept,
            "dropped": dict(self.dropped),
            "examples": {cause: list(places) for cause, places in self.examples.items()},
            "skipped_ties": self.skipped_ties,
            "skipped_identical": self.skipped_identical,
            "unused_by_limit": self.unused_by_limit,
            "sha256": self.sha256,
        }


@dataclass(frozen=True, kw_only=True)
class LoadedPreferences:
    """Preferences of one or several datasets, in the order in which the datasets were named."""

    preferences: tuple[Preference, ...]
    reports: tuple[SourceReport, ...]
    """One a dataset."""


def load_preferences(
    names: Sequence[str],
    *,
    split: str,
    config: DataConfig,
    seed: int,
    limit: int | None,
    kwise_loss: str = "pairs",
) -> LoadedPreferences:
    """Read the datasets, each in the order of its file.

    With a `limit`, that many rows of each are used, after a shuffle seeded by (seed, name): a smaller limit
    gives a prefix of what a larger one does.
    Raises DataError for what cannot be found, read or recognised, and where too many rows would be dropped;
    ConfigError if no dataset is named.
    """
    if not names:
        raise ConfigError("no dataset is named. Name files, folders or hub datasets with --dataset.")
    loaded = []
    for source in find_sources(names, split):
        rules = Rules(source=source.name, config=config, seed=seed, kwise_loss=kwise_loss)
        loaded.append(_load_source(source, rules, limit))
    return LoadedPreferences(
        preferences=tuple(chain.from_iterable(preferences for preferences, _ in loaded)),
        reports=tuple(report for _, report in loaded),
    )


def first_rows(names: Sequence[str], split: str) -> list[tuple[str, Row]]:
    """(name, first row) of every dataset that has one.

    Raises DataError as `load_preferences` does for what cannot be found or read.
    """
    found = []
    for source in find_sources(names, split):
        found += [(source.label, row) for _, row in islice(read_source(source), 1)]
    return found


def split_by_prompt(
    preferences: Sequence[Preference], *, fraction: float, seed: int
) -> tuple[tuple[Preference, ...], tuple[Preference, ...]]:
    """(train, held out): a seeded `fraction` of the prompts with all their rows, in the order given.

    Which prompts are held out depends on the set of prompts and the seed, not on the order of the rows.
    At least one prompt is held out unless the fraction is 0. Raises DataError if none were left to train on.
    """
    assert 0 <= fraction <= 1, fraction
    keys = [preference.key for preference in preferences]
    prompts = sorted(set(keys))
    num_held_out = max(1, round(fraction * len(prompts))) if fraction > 0 else 0
    if num_held_out >= len(prompts) and fraction > 0:
        raise DataError(
            f"holding out {num_held_out} of {len(prompts)} different prompts leaves nothing to train on. "
            f"Name evaluation data with --eval-dataset or --eval-split, "
            f"or lower --eval-fraction (0 turns evaluation off)."
        )
    order = np.random.default_rng(seed).permutation(len(prompts))
    held_out = {prompts[index] for index in order[:num_held_out]}
    train: list[Preference] = []
    evaluation: list[Preference] = []
    for key, preference in zip(keys, preferences, strict=True):
        (evaluation if key in held_out else train).append(preference)
    return tuple(train), tuple(evaluation)


def shared_prompts(train: Iterable[Preference], other: Iterable[Preference]) -> set[str]:
    """Keys of the prompts that occur on both sides."""
    return {preference.key for preference in train} & {preference.key for preference in other}


@dataclass(kw_only=True)
class _Tally:
    """What has been read so far."""

    kept: list[ParsedRow] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, place: str, unusable: UnusableRowError) -> None:
        self.dropped[unusable.cause] += 1
        places = self.examples.setdefault(unusable.cause, [])
        if len(places) < MAX_EXAMPLES:
            places.append(f"{place}: {unusable.detail}")

    @property
    def rows_read(self) -> int:
        return len(self.kept) + self.dropped.total()

    def causes(self) -> str:
        """Every cause with its count, meaning and example places, a line each."""
        return "\n".join(
            f"  {cause}: {count} ({CAUSES[cause]}), for example " + "; ".join(self.examples[cause])
            for cause, count in self.dropped.most_common()
        )


def _load_source(source: Source, rules: Rules, limit: int | None) -> tuple[tuple[Preference, ...], SourceReport]:
    """The preferences of one dataset and the account of its rows."""
    tally = _read_tally(read_source(source), source.label, rules)
    _require_usable(tally, source.label, rules.config.max_drop_fraction)
    preferences = [parsed.preference for parsed in tally.kept]
    if limit is not None:
        order = seeded_generator(rules.seed, source.name).permutation(len(preferences))
        preferences = [preferences[index] for index in order[:limit]]
    report = SourceReport(
        name=source.name,
        split=source.split,
        rows_read=tally.rows_read,
        kept=len(tally.kept),
        dropped=dict(tally.dropped.most_common()),
        examples={cause: tuple(tally.examples[cause]) for cause, _ in tally.dropped.most_common()},
        skipped_ties=sum(parsed.skipped_ties for parsed in tally.kept),
        skipped_identical=sum(parsed.skipped_identical for parsed in tally.kept),
        unused_by_limit=len(tally.kept) - len(preferences),
        sha256=sha256_file(source.path) if source.path else None,
    )
    return tuple(preferences), report


def _read_tally(rows: Iterator[tuple[int, Row]], label: str, rules: Rules) -> _Tally:
    """Every row kept or dropped.

    Raises DataError if there are no rows or their layout is unknown.
    """
    first = next(rows, None)
    if first is None:
        raise DataError(f"{label}: no rows. Is it the right file, and written to the end?")
    layout = recognise(first[1], f"{label}:{first[0]}")
    numbered = chain([first], rows)
    units: Iterable[tuple[int, tuple[Row, ...]]]
    units = group_pairs(numbered) if layout is LONG_FORM else ((number, (row,)) for number, row in numbered)
    tally = _Tally()
    for number, unit in units:
        place = f"{label}:{number}"
        try:
            tally.kept.append(read_rows(unit, layout=layout, place=place, rules=rules))
        except UnusableRowError as unusable:
            tally.drop(place, unusable)
    return tally


def _require_usable(tally: _Tally, label: str, max_drop_fraction: float) -> None:
    """Raise DataError if no row is left, or more than the allowed share was dropped."""
    if not tally.kept:
        raise DataError(
            f"{label}: none of the {tally.rows_read} rows can be used:\n{tally.causes()}\n"
            f"Fix the data, or the flags that the causes name."
        )
    dropped = tally.dropped.total()
    share = dropped / tally.rows_read
    if share > max_drop_fraction:
        raise DataError(
            f"{label}: {dropped} of {tally.rows_read} rows cannot be used, a share of {share:.3f}, "
            f"and at most {max_drop_fraction:g} is allowed:\n{tally.causes()}\n"
            f"Fix the data, or allow it with --max-drop-fraction {math.ceil(share * 100) / 100:g}."
        )
