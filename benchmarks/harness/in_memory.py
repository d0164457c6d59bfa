"""Reading data sets as lists in memory: slow and plain, what the tests hold `data/reading.py` against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from rewardlab.core.errors import ConfigError
from rewardlab.core.types import Preference
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import Source, find_sources
from rewardlab.data.judgements import Rules
from rewardlab.data.readers import fingerprint
from rewardlab.data.sources import chosen_by_limit, open_units, parse_units
from rewardlab.data.splits import Texts, hold_out
from rewardlab.data.tally import SourceReport


@dataclass(frozen=True, kw_only=True)
class LoadedPreferences:
    """Preferences of one or several datasets, in the order in which the datasets were named."""

    preferences: tuple[Preference, ...]
    reports: tuple[SourceReport, ...]
    """One report for each dataset."""


def load_preferences(
    names: Sequence[str],
    *,
    split: str,
    reading: ReadingConfig,
    seed: int,
    limit: int | None,
    kwise_loss: str = "pairs",
    bare: bool = False,
) -> LoadedPreferences:
    """Read the datasets, each in the order of its file.

    With a `limit`, that many rows of each are used, after a shuffle seeded by (seed, name). A smaller limit gives a
    prefix of what a larger one gives.

    Raises DataError if a dataset cannot be found, read or recognised, or too many of its rows cannot be used;
    ConfigError if no dataset is named.
    """
    if not names:
        raise ConfigError("no dataset is named. Name files, folders or hub datasets with --dataset.")
    loaded = []
    for source in find_sources(names, split):
        rules = Rules(source=source.name, reading=reading, seed=seed, kwise_loss=kwise_loss, bare=bare)
        loaded.append(_load_source(source, rules, limit))
    return LoadedPreferences(
        preferences=tuple(chain.from_iterable(preferences for preferences, _ in loaded)),
        reports=tuple(report for _, report in loaded),
    )


def _load_source(source: Source, rules: Rules, limit: int | None) -> tuple[tuple[Preference, ...], SourceReport]:
    """Return the preferences of one dataset and the report on its rows. Raises DataError as `load_preferences` does."""
    schema, units = open_units(source, rules)
    parsed, tally = parse_units(units, source=source, schema=schema, rules=rules)
    tally.format = schema.label
    kept = [preference for preference in parsed if preference is not None]
    preferences = tuple(kept[index] for index in chosen_by_limit(rules, len(kept), limit))
    report = tally.report(source, used=len(preferences), sha256=fingerprint(source) if source.path else None)
    report.require_usable(source.label, rules.reading.max_drop_fraction)
    return preferences, report


def split_by_root(
    preferences: Sequence[Preference], *, fraction: float, seed: int
) -> tuple[tuple[Preference, ...], tuple[Preference, ...]]:
    """Return (training rows, held-out rows) by `hold_out`, both in the given order. A fraction of 0 holds out nothing.

    Raises DataError if no prompts are left to train on.
    """
    if fraction == 0:
        return tuple(preferences), ()
    mask_P = hold_out(Texts.of(preferences), fraction=fraction, seed=seed).mask_P
    sides: tuple[list[Preference], list[Preference]] = ([], [])
    for preference, out in zip(preferences, mask_P, strict=True):
        sides[int(out)].append(preference)
    return tuple(sides[0]), tuple(sides[1])
