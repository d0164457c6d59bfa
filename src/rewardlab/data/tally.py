"""The counts of the rows of a dataset, while it is read and as a report: none is lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rewardlab.core.errors import DataError
from rewardlab.core.terminal import listed, plural, quoted
from rewardlab.data.cells import has_json_text
from rewardlab.data.finding import Source
from rewardlab.data.formats import unit_of
from rewardlab.data.formats.shown import described_in_brief
from rewardlab.data.judgements import ParsedRow
from rewardlab.data.kinds import has_system_turn, script_of
from rewardlab.data.rows import CAUSES, FILTERS, UnusableRowError

MAX_EXAMPLES = 3
"""Examples reported for each cause."""
MOST_LABELS = 6
"""Different labels that a message lists; where there are more, they are numbers."""
FAIR = 0.3
"""Share of rows whose label says nothing from which they are not offered to be left out."""
LABELS = ("bad_label", "unmapped_label")
"""Causes that a meaning of each label mends."""


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """The counts of the rows of one dataset; kept + dropped = rows_read."""

    name: str
    split: str
    rows_read: int
    """Number of rows; where several rows make one preference, of their pairs, prompts or posts."""
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
    labelled: int
    """Kept rows with a `label`, the probability that `chosen` is preferred."""
    swapped: int
    """Of these, those below ½: `rejected` is preferred."""
    unused_by_limit: int
    """Kept rows left out by the limit."""
    sha256: str | None
    """Hash of the file, of the list of several files, or of rows in memory; None for data from the hub."""
    format: str = ""
    """The format that was recognised, and the columns by which."""
    second_preferred: int = 0
    """Comparisons that rows of judged replies hold with a label below ½: `second` is preferred."""
    json_texts: int = 0
    """Kept rows in which a text is messages written as JSON, which are read as the text that they are."""
    system_turns: int = 0
    """Kept rows whose prompt has a system turn."""
    scripts: Mapping[str, int] = field(default_factory=dict)
    """Script of most letters of the first reply -> kept rows."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Cause -> judgements of kept groups of rows that a flag left out."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Cause -> replies of kept rows that cannot be used, which are left out beside the others of their rows."""
    left_out_example: str = ""
    """The place and the detail of the first of them."""
    read_labels: tuple[str, ...] = ()
    unread_labels: tuple[str, ...] = ()
    """Labels of kept rows, and those of dropped ones that have no meaning, as `--map-label` takes them; the first few
    of each."""
    hub: Mapping[str, object] | None = None
    """For data from the hub: the revision that was asked for, the commit, and how they were streamed."""

    def __post_init__(self) -> None:
        assert self.kept + sum(self.dropped.values()) == self.rows_read, self

    def as_dict(self) -> dict[str, object]:
        """Return a JSON mapping for manifests and reports."""
        return {
            "name": self.name,
            "split": self.split,
            "format": self.format,
            "rows_read": self.rows_read,
            "kept": self.kept,
            "dropped": dict(self.dropped),
            "examples": {cause: list(places) for cause, places in self.examples.items()},
            "skipped_ties": self.skipped_ties,
            "skipped_identical": self.skipped_identical,
            "skipped": dict(self.skipped),
            "left_out_replies": dict(self.left_out),
            **({"left_out_example": self.left_out_example} if self.left_out else {}),
            "labelled": self.labelled,
            "swapped": self.swapped,
            "second_preferred": self.second_preferred,
            "json_texts": self.json_texts,
            "system_turns": self.system_turns,
            "scripts": dict(self.scripts),
            "unused_by_limit": self.unused_by_limit,
            "sha256": self.sha256,
            **({} if self.hub is None else {"hub": dict(self.hub)}),
        }

    def left_out_in_words(self, *, with_example: bool = True) -> str:
        """Return how many replies of kept rows are left out, and why; an empty text if none is.

        The example, if it is asked for, may quote the data.
        """
        if not self.left_out:
            return ""
        causes = ", ".join(f"{cause} {number:,}" for cause, number in self.left_out.items())
        count = sum(self.left_out.values())
        replies = f"{count:,} {plural(count, 'reply is', 'replies are')} left out"
        return f"{replies}, and the others of their rows kept: {causes}" + (
            f", for example {self.left_out_example}" if with_example else ""
        )

    def require_usable(self, label: str, max_drop_fraction: float) -> None:
        """Raise DataError if no row is left, or more than the allowed share was dropped.

        Rows that a filter leaves out because a flag asks for it count for neither.
        """
        causes = "\n".join(
            f"  {cause}: {count} ({CAUSES[cause]}), for example " + "; ".join(self.examples[cause])
            for cause, count in self.dropped.items()
        )
        unit = unit_of(self.format)
        labels = self._unread_labels()
        if not self.kept:
            none = plural(self.rows_read, f"the only {unit} cannot", f"none of the {self.rows_read} {unit}s can")
            raise DataError(
                f"{label}: {none} be used:\n{causes}\nFix the data, or {labels or 'the flags that the causes name.'}"
            )
        wanted = self.rows_read - sum(self.dropped.get(cause, 0) for cause in FILTERS)
        dropped = wanted - self.kept
        allow = f"allow it with --max-drop-fraction {math.ceil(dropped / wanted * 100) / 100:g}."
        if (share := dropped / wanted) > max_drop_fraction:
            if labels:
                # Without many rows of some labels, those of the others alone would bend the data.
                allow = f"{labels} Or {allow}" if share < FAIR else labels
            raise DataError(
                f"{label}: {dropped} of {wanted} {plural(wanted, unit)} cannot be used, a share of {share:.3f}, "
                f"and at most {max_drop_fraction:g} is allowed:\n{causes}\n"
                f"Fix the data, or {allow}"
            )

    def _unread_labels(self) -> str:
        """Return how labels get a meaning if those without one are why most dropped rows are dropped; else an empty
        text."""
        unread = sum(self.dropped.get(cause, 0) for cause in LABELS)
        if 2 * unread <= sum(self.dropped.values()) - sum(self.dropped.get(cause, 0) for cause in FILTERS):
            return ""
        means = (
            "A label with =1 says that the first reply (`chosen`) is better, or the only one good; with =0 the "
            "contrary, with =0.5 a tie."
        )
        if "unmapped_label" in self.dropped:
            words = listed([quoted(one) for one in self.unread_labels]) or "the others"
            return f"give {words} a number with --map-label too. {means}"
        seen = sorted({*self.read_labels, *self.unread_labels})
        if not self.unread_labels or len(seen) > MOST_LABELS:
            return f"say what each label means with --map-label, such as --map-label A=1 B=0. {means}"
        examples = ""
        if len(seen) == 2:
            first, second = map(quoted, seen)
            examples = f": --map-label {first}=1 {second}=0, or {first}=0 {second}=1"
        words = listed([quoted(one) for one in seen])
        return f"say what each label means with --map-label. Seen were {words}{examples}. {means}"


def first_few(labels: list[str]) -> list[str]:
    """Return the different labels in order, one more at most than a message lists."""
    return list(dict.fromkeys(labels))[: MOST_LABELS + 1]


@dataclass(kw_only=True)
class Tally:
    """Running counts of the rows read so far."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    skipped_ties: int = 0
    skipped_identical: int = 0
    labelled: int = 0
    swapped: int = 0
    second_preferred: int = 0
    json_texts: int = 0
    system_turns: int = 0
    scripts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    left_out_example: str = ""
    read_labels: list[str] = field(default_factory=list)
    unread_labels: list[str] = field(default_factory=list)
    format: str = ""
    """The recognised format, once the dataset was opened."""
    first: str = ""
    """The first row that became a preference, in brief."""

    def keep(self, parsed: ParsedRow) -> None:
        """Count a row that became a preference."""
        self.kept += 1
        self.first = self.first or described_in_brief(parsed.preference)
        self.skipped_ties += parsed.skipped_ties
        self.skipped_identical += parsed.skipped_identical
        self.skipped.update(parsed.skipped)
        self.left_out.update(cause for cause, _ in parsed.left_out)
        if parsed.left_out and not self.left_out_example:
            self.left_out_example = f"{parsed.preference.id}: {parsed.left_out[0][1]}"
        self.labelled += parsed.label is not None
        if parsed.label is not None and len(self.read_labels) <= MOST_LABELS:
            self.read_labels = first_few([*self.read_labels, f"{parsed.label:g}"])
        self.swapped += parsed.label is not None and parsed.label < 0.5
        self.second_preferred += parsed.second_preferred
        self.json_texts += has_json_text(parsed.preference)
        self.system_turns += has_system_turn(parsed.preference)
        if script := script_of(parsed.preference.replies[0][-1].content):
            self.scripts[script] += 1

    def drop(self, place: str, unusable: UnusableRowError) -> None:
        """Count a row that was dropped."""
        self.dropped[unusable.cause] += 1
        if unusable.label and len(self.unread_labels) <= MOST_LABELS:
            self.unread_labels = first_few([*self.unread_labels, unusable.label])
        places = self.examples.setdefault(unusable.cause, [])
        if len(places) < MAX_EXAMPLES:
            places.append(f"{place}: {unusable.detail}")

    def add(self, later: Tally) -> None:
        """Add the counts of the rows that follow these."""
        self.kept += later.kept
        self.dropped.update(later.dropped)
        for cause, places in later.examples.items():
            self.examples[cause] = (self.examples.get(cause, []) + places)[:MAX_EXAMPLES]
        self.skipped_ties += later.skipped_ties
        self.skipped_identical += later.skipped_identical
        self.labelled += later.labelled
        self.swapped += later.swapped
        self.second_preferred += later.second_preferred
        self.json_texts += later.json_texts
        self.system_turns += later.system_turns
        self.scripts.update(later.scripts)
        self.skipped.update(later.skipped)
        self.left_out.update(later.left_out)
        self.left_out_example = self.left_out_example or later.left_out_example
        self.read_labels = first_few([*self.read_labels, *later.read_labels])
        self.unread_labels = first_few([*self.unread_labels, *later.unread_labels])
        self.format = self.format or later.format
        self.first = self.first or later.first

    def as_dict(self) -> dict[str, object]:
        """Return the counts as a JSON mapping."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tally:
        """Return the counts from a mapping: the inverse of `as_dict`. Other names in it are ignored."""
        counters = {name: Counter(values[name]) for name in ("dropped", "skipped", "left_out", "scripts")}
        return cls(**{name: values[name] for name in vars(cls())} | counters)

    def report(self, source: Source, *, used: int, sha256: str | None) -> SourceReport:
        """Return the report on a dataset of which `used` preferences are used."""
        return SourceReport(
            name=source.name,
            split=source.split,
            rows_read=self.kept + self.dropped.total(),
            kept=self.kept,
            dropped=dict(self.dropped.most_common()),
            examples={cause: tuple(self.examples[cause]) for cause, _ in self.dropped.most_common()},
            skipped_ties=self.skipped_ties,
            skipped_identical=self.skipped_identical,
            labelled=self.labelled,
            swapped=self.swapped,
            second_preferred=self.second_preferred,
            json_texts=self.json_texts,
            system_turns=self.system_turns,
            scripts=dict(self.scripts.most_common()),
            unused_by_limit=self.kept - used,
            sha256=sha256,
            format=self.format,
            skipped=dict(self.skipped.most_common()),
            left_out=dict(self.left_out.most_common()),
            left_out_example=self.left_out_example,
            read_labels=tuple(self.read_labels),
            unread_labels=tuple(self.unread_labels),
        )
