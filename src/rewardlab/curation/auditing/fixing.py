"""The cleaned files of an audit: the rows that stay, unchanged, and a trace of every row that was removed.

Rows are only ever removed: no text and no label is changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from rewardlab.core.errors import ConfigError
from rewardlab.core.files import write_json
from rewardlab.core.folders import require_writable_folder
from rewardlab.core.terminal import number_of, plural
from rewardlab.curation.auditing.across import FAMILIES
from rewardlab.curation.auditing.config import AuditConfig
from rewardlab.curation.auditing.facts import ROW_CHECKS, Mask
from rewardlab.curation.auditing.overlaps import datasets_of
from rewardlab.curation.auditing.result import Audit
from rewardlab.curation.auditing.run import Audited
from rewardlab.curation.rewriting import (
    ENDINGS,
    Nulls,
    Stamp,
    also_rows,
    as_line,
    ending_of,
    replacing_lines,
    require_apart,
    require_package,
    stamp,
    trace_beside,
    write_without,
)
from rewardlab.data.finding import Source
from rewardlab.data.shards import EXTENSIONS
from rewardlab.data.sources import rows_of_units

TRACE: Final = "removed.jsonl"
MUCH: Final = 0.2
"""Share of the rows above which it is said that so many went."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where an audit writes."""

    json: Path | None
    scores: Path | None
    cleaned: Sequence[Path]
    """The cleaned file of each dataset; empty without `--fix`."""
    trace: Path | None
    stamps: Sequence[Stamp]
    """Size and time of each dataset's files before they were read, to notice later changes."""

    def write(self, audit: Audit) -> list[str]:
        """Write what `--json` and `--scores` ask for, and return what was written, in words."""
        said = []
        if self.json is not None:
            write_json(self.json, audit.as_dict())
            said.append(f"the audit with every flagged row: {self.json}")
        if self.scores is not None:
            with replacing_lines(self.scores) as sink:
                for row in audit.score_rows():
                    sink.write(as_line(row, str(self.scores)).encode())
            said.append(f"the scores of every row: {self.scores}")
        return said


@dataclass(frozen=True, kw_only=True)
class Removed:
    """A row that is removed, and one reason. A row can have several."""

    row: int
    check: str
    value: float


def claim_outputs(config: AuditConfig, sources: Sequence[Source]) -> Outputs:
    """Return where the audit of these datasets writes.

    Raises ConfigError if something is in the way, if an input would be replaced, or if the cleaned file is not named
    like JSON Lines; DataError if a dataset of `--against` is not found; RewardlabError for a folder that cannot be
    written to.
    """
    cleaned: list[Path] = []
    trace = None
    if config.output is not None and len(sources) == 1:
        if ending_of(config.output) is None:
            raise ConfigError(
                f"--output {config.output}: cleaned rows are JSON Lines; name it …{' or …'.join(ENDINGS)}."
            )
        cleaned = [config.output]
        trace = trace_beside(config.output, TRACE)
    elif config.output is not None:
        cleaned = [config.output / name for name in _file_names(sources)]
        trace = config.output / TRACE
    targets = [path for path in (config.json, config.scores, trace, *cleaned) if path is not None]
    require_apart(targets, (*sources, *datasets_of(config.against, config.hf_split, config.reading)))
    for path in targets:
        if path.exists() and not config.overwrite:
            raise ConfigError(f"{path} exists. Choose another name, or replace it with --overwrite.")
        require_package(path, f"{path}: writing .zst")
        require_writable_folder(path.parent, "--output" if path in (trace, *cleaned) else "--json and --scores")
    stamps = [stamp(source) for source in sources]
    return Outputs(json=config.json, scores=config.scores, cleaned=cleaned, trace=trace, stamps=stamps)


def _file_names(sources: Sequence[Source]) -> list[str]:
    """Return the names of the cleaned files in a folder of several: those of the files, as JSON Lines."""
    names = []
    for source in sources:
        # `train-*-of-00003.jsonl`, the pattern of several files, becomes one.
        label = re.sub(r"[-.]\*(-of-\d+)?", "", source.label.replace("/", "."))
        ending = max((ending for ending in EXTENSIONS if label.endswith(ending)), key=len, default="")
        own = {".zst": ".jsonl.zst"}.get(ending, ending)
        names.append((label, label.removesuffix(ending) + (own if own in ENDINGS else ENDINGS[0])))
    twice = Counter(name for _, name in names)
    # `a.csv` and `a.parquet` would both be `a.jsonl`.
    return [name if twice[name] == 1 else f"{label}{ENDINGS[0]}" for label, name in names]


def removals(audited: Audited, remove: Sequence[str]) -> tuple[list[Removed], Mask]:
    """Return (every row to remove with its reason, [U] whether a row stays).

    Rows that are flagged by themselves go first. Then each check across rows is computed among the rows that are still
    there, until none flags any row. So a duplicate stays if the row that it copies was removed.
    """
    facts, checks = audited.facts, audited.checks
    found: list[Removed] = []
    stays_U = np.ones(len(facts.kept_U), dtype=bool)
    for column, name in enumerate(ROW_CHECKS):
        if name in remove and name in audited.audit.scores:
            scores_U = facts.scores_UC[:, column]
            for row in np.flatnonzero(scores_U >= np.float32(checks[name].threshold)).tolist():
                found.append(Removed(row=row, check=name, value=float(scores_U[row])))
                stays_U[row] = False
    across = [name for name in FAMILIES if name in remove]
    before = -1
    while before != len(found):
        before = len(found)
        for name in across:
            rows = np.flatnonzero(stays_U)
            scored = FAMILIES[name](facts.only(stays_U), audited.near).scores
            scores_U = scored.get(name, np.zeros(len(rows), dtype=np.float32))
            for place in np.flatnonzero(scores_U >= np.float32(checks[name].threshold)).tolist():
                found.append(Removed(row=int(rows[place]), check=name, value=float(scores_U[place])))
                stays_U[rows[place]] = False
    return sorted(found, key=lambda one: one.row), stays_U


def write_fixed(audited: Audited, config: AuditConfig, outputs: Outputs) -> list[str]:
    """Write the cleaned files and the trace, and return what was written, in words.

    Raises DataError if a file has changed since it was read, or if a row cannot be written as JSON.
    """
    found, stays_U = removals(audited, config.remove)
    said = []
    members: list[dict[int, list[int]]] = []
    nulled: list[dict[str, object]] = []
    for number, (source, path) in enumerate(zip(audited.sources, outputs.cleaned, strict=True)):
        own_U = audited.facts.sources_U == number
        gone = set(audited.facts.numbers_U[own_U & ~stays_U].tolist())
        members.append(rows_of_units(source, audited.rules[number], gone))
        rows = {row for own in members[-1].values() for row in own}
        unread = set(audited.facts.numbers_U[own_U & stays_U & ~audited.facts.kept_U].tolist())
        nulls = Nulls({row for own in rows_of_units(source, audited.rules[number], unread).values() for row in own})
        left = write_without(source, path, rows, since=outputs.stamps[number], nulls=nulls)
        nulled += [
            {"column": name, "rows": count, "first": place, "done": "NaN written as null"}
            for name, (count, place) in nulls.columns.items()
        ]
        units = f"{int((own_U & stays_U).sum()):,} of {number_of(int(own_U.sum()), 'row')}; {len(gone):,} removed"
        several = (
            f" (of several rows each: {left:,} {plural(left, 'row is', 'rows are')} left)"
            if len(rows) != len(gone)
            else ""
        )
        said.append(f"{path}: {units}{several}")
        if nulls.columns:
            told = ", ".join(f"{name} ({number_of(count, 'row')})" for name, (count, _) in nulls.columns.items())
            said.append(f"{path}: NaN, which JSON has not, is null in {told}")
    assert outputs.trace is not None
    with replacing_lines(outputs.trace) as sink:
        for one in found:
            source_number, unit = audited.facts.sources_U[one.row], int(audited.facts.numbers_U[one.row])
            entry: dict[str, object] = {"row": audited.audit.place(one.row)}
            entry |= also_rows(members[source_number][unit]) | {"check": one.check, "value": round(one.value, 4)}
            sink.write(as_line(entry | {"done": "removed"}, str(outputs.trace)).encode())
        for entry in nulled:
            sink.write(as_line(entry, str(outputs.trace)).encode())
    said.append(f"why each row went: {outputs.trace}")
    said += _much_removed(found, stays_U)
    if kept := _still_above(audited, stays_U):
        said.append(f"above their limits and still in: {', '.join(kept)}; --remove names what goes")
    return said


def _much_removed(found: Sequence[Removed], stays_U: Mask) -> list[str]:
    """Return what is said where so many rows went that what was taken for a defect may be how the data are made."""
    share = float((~stays_U).sum()) / max(len(stays_U), 1)
    if share <= MUCH:
        return []
    counts = Counter(one.check for one in found)
    checks = ", ".join(f"{name} {count:,}" for name, count in counts.most_common(3))
    said = [f"{share:.0%} of all rows went ({checks}): is that a defect of them, or how these data are made?"]
    if counts["contradictions"]:
        said.append(
            "several people who judge a pair in rows of their own contradict each other here; `rewardlab data "
            "convert --join pairs` makes one row of them, where it is no defect"
        )
    if counts["leaks"] or counts["near-duplicates"]:
        said.append("texts that are one template for the most part are alike; a higher --near tells them apart")
    return said


def _still_above(audited: Audited, stays_U: Mask) -> list[str]:
    """Return the checks that are above their limits among the rows that stay, as another audit of these would say.

    A row can be flagged by several checks, so those that `--remove` leaves out may have none left.
    """
    kept = []
    for name in audited.audit.failed:
        check = audited.checks[name]
        scores_S = audited.audit.scores[name][stays_U]
        if name in FAMILIES:
            scores_S = FAMILIES[name](audited.facts.only(stays_U), audited.near).scores.get(name, scores_S[:0])
        flagged = int((scores_S >= np.float32(check.threshold)).sum())
        if check.limit is not None and not check.limit.allows(flagged, int(stays_U.sum())):
            kept.append(name)
    return kept
