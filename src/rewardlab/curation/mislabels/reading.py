"""Reading of the rows that are searched, as training reads them, with a count of every row and the limit applied.

Legend: P preferences.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rewardlab.core.bars import bar
from rewardlab.core.errors import ConfigError
from rewardlab.core.types import Preference
from rewardlab.curation.mislabels.config import MislabelsConfig
from rewardlab.curation.rows import walk
from rewardlab.data.finding import ALL_ROWS, SPLITS, Source, find_sources
from rewardlab.data.judgements import Rules
from rewardlab.data.readers import fingerprint
from rewardlab.data.rows import UnusableRowError
from rewardlab.data.sources import chosen_by_limit, open_streamed, open_units
from rewardlab.data.tally import SourceReport, Tally
from rewardlab.data.winners import tell_other_winners

JUDGING: Final = (*(word for word in SPLITS if word != "train"), "evaluation", "testing", "heldout", "holdout")
"""Words that name a split for judging models. Labels there are never changed by what models say."""


@dataclass(frozen=True, kw_only=True)
class ReadData:
    """The preferences that are searched."""

    preferences: Sequence[Preference]
    sources: Sequence[Source]
    reports: Sequence[SourceReport]
    positions: Sequence[int]
    """[P] the row of its dataset from which each was read, counted from 0 over all rows, as other programs' score files
    may number them."""


def sources_of(config: MislabelsConfig) -> tuple[Source, ...]:
    """Return where the datasets are. Raises DataError for one that is not found."""
    return find_sources(config.rows.dataset, config.rows.hf_split, streaming=config.rows.reading.streaming)


def rules_of(source: Source, config: MislabelsConfig) -> Rules:
    """Return the rules by which the rows of a dataset are read."""
    bare = config.rendering.joins_texts
    if config.model.model and not bare:
        # Imported here, since a search without heads needs no torch.
        from rewardlab.artifact.base import goes_on_joining

        bare = goes_on_joining(config.model, config.rendering)
    return Rules(source=source.name, reading=config.rows.reading, seed=config.run.seed, bare=bare)


def read_data(config: MislabelsConfig) -> ReadData:
    """Read the rows of all datasets, drop those that cannot be used, and draw those within the limit.

    Raises DataError if a dataset cannot be read, or if too many of its rows cannot be used.
    """
    rows, reading = config.rows, config.rows.reading
    sources = sources_of(config)
    preferences: list[Preference] = []
    positions: list[int] = []
    reports = []
    for source in sources:
        rules = rules_of(source, config)
        content = fingerprint(source)
        kept: list[tuple[Preference, int]] = []
        stream = open_streamed(source, rules, rows.limit)
        opened = None if stream is None else stream[:2]
        tally = Tally(format=open_units(source, rules)[0].label if stream is None else "")
        read = walk(source, rules, opened=opened)
        for position, row in enumerate(bar(read, title=f"reading {source.name}", unit=" rows")):
            if row.parsed is not None:
                tally.keep(row.parsed)
                # The rows of a stream between the drawn ones are not here to be counted, so their own number is used.
                kept.append((row.parsed.preference, position if stream is None else row.number - 1))
            else:
                assert row.cause is not None, "a row is a preference or has a cause"
                tally.drop(row.place, UnusableRowError(row.cause, row.detail or ""))
        if stream is not None:
            tally = stream[2]
        chosen = sorted(chosen_by_limit(rules, len(kept), rows.limit).tolist())
        preferences += [kept[number][0] for number in chosen]
        positions += [kept[number][1] for number in chosen]
        sha256 = None if source.is_on_hub else content
        reports.append(tally.report(source, used=len(chosen), sha256=sha256))
        reports[-1].require_usable(source.label, reading.max_drop_fraction)
        if not config.model.model:  # with heads it is told where their states are computed
            tell_other_winners(source, reading)
    return ReadData(preferences=preferences, sources=sources, reports=reports, positions=positions)


def judging_split(source: Source) -> str | None:
    """Return the word that names a dataset as one for judging models; None if there is no such word.

    The split in the name of the file decides, else any word of the name or of the split that was asked for.
    """
    if source.path is not None and source.split != ALL_ROWS:
        named = {source.split.casefold()} if _own_split(source) else set(_words(source.path.name))
    elif source.path is not None:
        named = set(_words(source.path.name))
    else:
        named = set(_words(source.split))
    return next((word for word in JUDGING if word in named), None)


def _own_split(source: Source) -> bool:
    """Return whether the split is a word of the file's name, and not only the one that was asked for."""
    assert source.path is not None
    return source.split.casefold() in _words(source.path.name)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+", name.casefold())


def require_training_data(sources: Sequence[Source], done: str) -> Source:
    """Return the one dataset whose rows are to be `removed` or `flipped`.

    Raises ConfigError if there are several, or if it judges models.
    """
    flag = {"removed": "--remove", "flipped": "--flip"}[done]
    if len(sources) != 1:
        raise ConfigError(f"{flag}: cleans one dataset at a time, and {len(sources)} are named. Name one of them.")
    (source,) = sources
    if (word := judging_split(source)) is not None:
        raise ConfigError(
            f"{flag}: {source.label} is named as a split that judges models ({word}), and labels there are never "
            f"changed by what models say of them: whoever removes what a model gets wrong will find it right. Clean "
            f"the training data; if this is training data, rename it."
        )
    return source
