"""Test rows that runs were trained on, or chosen by: what each run counted when it read its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rewardlab.core.terminal import number_of
from rewardlab.experiments.reporting.numbers import Reader
from rewardlab.report.folder import Record

WITH: Final = {"test_with_training": "what was trained on", "test_with_evaluation": "what chose the checkpoint"}
"""Entry of the manifest of a run -> the data that test data are held against there."""


def shared_of(reader: Reader, arms: Sequence[str]) -> tuple[str, ...]:
    """Return with which other data test rows share a prompt, a first turn or a reply: a phrase for each kind, with the
    rows of the run that has the most, and how many runs have any."""
    records = [outcome.record for arm in arms for outcome in reader.done(arm)]
    return tuple(text for entry, what in WITH.items() for text in _shared(records, entry, what))


def _shared(records: Sequence[Record], entry: str, what: str) -> Iterator[str]:
    found = [rows for record in records if (rows := _rows(record, entry))]
    if found:
        most, of = max(found)
        share = f"{most:,} of {of:,}" if of else f"{most:,}"
        yield f"{what} (up to {share} rows, in {len(found)} of {number_of(len(records), 'run')})"


def _rows(record: Record, entry: str) -> tuple[int, int] | None:
    """Return how many test rows of a run are shared, and of how many; None if none is, or that is not known."""
    shared, kept = _in(record.manifest, "data", "shared", entry, "rows"), _in(record.manifest, "tokens", "test", "kept")
    return (shared, kept) if shared else None


def _in(values: Any, *names: str) -> int:
    """Return a count in nested mappings; 0 if there is none."""
    for name in names:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values if isinstance(values, int) and not isinstance(values, bool) and 0 <= values < 1 << 63 else 0
