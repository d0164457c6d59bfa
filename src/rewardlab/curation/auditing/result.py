"""The results of an audit: the finding of each check, and all of them together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewardlab.analysis.intervals import share_limits
from rewardlab.analysis.stats import MIN_CLUSTERS, wilson, without_interval
from rewardlab.core.types import Estimate
from rewardlab.curation.auditing.facts import Mask, Scores
from rewardlab.curation.auditing.registry import Check
from rewardlab.curation.shingles import Numbers


@dataclass(frozen=True, kw_only=True)
class ReadSource:
    """How many rows of a dataset were kept and dropped; kept + dropped = read."""

    label: str
    """The beginning of the places (`file:line`) of its rows."""
    split: str
    read: int
    kept: int
    dropped: Mapping[str, int]
    """Cause -> rows, most frequent first."""
    left_out: Mapping[str, int]
    """Cause -> replies of kept rows that are left out beside others, most frequent first."""
    left_out_example: str
    """The place and the detail of the first of them; empty if there is none."""

    def __post_init__(self) -> None:
        assert self.kept + sum(self.dropped.values()) == self.read, self


@dataclass(frozen=True, kw_only=True, eq=False)
class Finding:
    """The rows that one check flagged. Rows are indices into the rows of the audit."""

    check: Check
    rows_F: Numbers
    """[F] the rows that are flagged, in order."""
    scores_F: Scores
    """[F] their scores."""
    share: Estimate
    """Share of the checked rows that are flagged."""
    counts: Mapping[str, int]
    """Exact counts of things that are not rows: pairs, groups, prompts."""
    details: Mapping[int, str]
    """Row -> what was found in it, for the first rows."""
    num_rows: int
    """Number of rows checked."""

    @property
    def flagged(self) -> int:
        """Number of rows flagged."""
        return len(self.rows_F)

    @property
    def is_above_limit(self) -> bool:
        """Return whether more rows are flagged than the limit allows."""
        return self.check.limit is not None and not self.check.limit.allows(self.flagged, self.num_rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Audit:
    """The results of all checks of an audit."""

    sources: Sequence[ReadSource]
    findings: Sequence[Finding]
    not_run: Mapping[str, str]
    """Checks that were not run -> what they need."""
    notes: Sequence[str]
    """How the audit was done, where that depends on installed packages or on settings."""
    labels_U: Sequence[str]
    """Dataset -> beginning of places, by the index in `sources_U`."""
    sources_U: Numbers
    numbers_U: Numbers
    scores: Mapping[str, Scores]
    """Check -> [U] score of every row."""

    @property
    def failed(self) -> list[str]:
        """The checks that are above their limits."""
        return [finding.check.name for finding in self.findings if finding.is_above_limit]

    def place(self, row: int) -> str:
        """Return a row as `file:line`."""
        return f"{self.labels_U[int(self.sources_U[row])]}:{int(self.numbers_U[row])}"

    def score_rows(self) -> Iterator[dict[str, object]]:
        """Yield for every row its place and the scores that are not 0."""
        names = list(self.scores)
        for row, values in enumerate(zip(*(self.scores[name].tolist() for name in names), strict=True)):
            found = {name: round(value, 4) for name, value in zip(names, values, strict=True) if value}
            yield {"row": self.place(row), "scores": found}

    def as_dict(self) -> dict[str, object]:
        """Return a JSON mapping with every flagged row."""
        return {
            "sources": [
                {
                    "name": source.label,
                    "split": source.split,
                    "rows_read": source.read,
                    "kept": source.kept,
                    "dropped": dict(source.dropped),
                    "left_out_replies": dict(source.left_out),
                    **({"left_out_example": source.left_out_example} if source.left_out else {}),
                }
                for source in self.sources
            ],
            "rows": len(self.numbers_U),
            "failed": self.failed,
            "checks": {finding.check.name: self._finding(finding) for finding in self.findings},
            "not_run": dict(self.not_run),
            "notes": list(self.notes),
        }

    def _finding(self, finding: Finding) -> dict[str, object]:
        check, share = finding.check, finding.share
        return {
            "meaning": check.meaning,
            "score": check.score,
            "threshold": check.threshold,
            "limit": None if check.limit is None else str(check.limit),
            "above_limit": finding.is_above_limit,
            "flagged": finding.flagged,
            "share": {
                "value": share.value if finding.num_rows else None,
                "low": None if math.isnan(share.low) else share.low,
                "high": None if math.isnan(share.high) else share.high,
                "level": share.level,
                "method": share.method,
            },
            "counts": dict(finding.counts),
            "rows": [
                {"row": self.place(row), "score": round(score, 4)}
                | ({"found": finding.details[row]} if row in finding.details else {})
                for row, score in zip(finding.rows_F.tolist(), finding.scores_F.tolist(), strict=True)
            ],
        }


def share_of(flagged_U: Mask, clusters_U: Numbers) -> Estimate:
    """Return the share of rows flagged, as `stats.proportion` does, for clusters that are numbers.

    Rows of one prompt are one cluster.
    """
    num_rows = len(flagged_U)
    clusters_U = np.unique(clusters_U, return_inverse=True)[1]
    sizes_C = np.bincount(clusters_U, minlength=1).astype(np.float64)
    if num_rows == 0 or sizes_C.max() <= 1:
        return wilson(float(flagged_U.sum()), num_rows)
    sums_C = np.bincount(clusters_U, flagged_U, minlength=1).astype(np.float64)
    value = float(flagged_U.mean())
    if len(sizes_C) < MIN_CLUSTERS:
        return without_interval(value, len(sizes_C))
    _, low, high = (float(limit[0]) for limit in share_limits(sums_C[None], sums_C[None], sizes_C[None], level=0.95))
    return Estimate(value=value, low=low, high=high, n=len(sizes_C), method="score interval, by prompt")
