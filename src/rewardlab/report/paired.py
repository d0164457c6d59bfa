"""Paired differences for the report: a model against its baselines, and several runs beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rewardlab.analysis.aligned import ScoreSet, align
from rewardlab.analysis.multiple import holm
from rewardlab.analysis.paired import ALPHA, Paired, compare_metrics
from rewardlab.core.errors import RewardlabError
from rewardlab.core.types import Estimate, ScoreRow
from rewardlab.report.compare import TITLES, format_p, tests_told
from rewardlab.report.document import Block, Paragraph, Section, shown, with_intervals
from rewardlab.report.evaluations import read_scores
from rewardlab.report.folder import Record
from rewardlab.report.run import BASELINES
from rewardlab.report.sections import compared
from rewardlab.report.tables import column_notes, format_count


@dataclass(frozen=True, kw_only=True)
class AgainstBaselines:
    """A model against each baseline, on the same pairs."""

    pairs: Mapping[str, Paired]
    """Baseline -> the model against it, as the closing tables have it; none where nothing can be compared."""
    problem: str = ""
    """Why there are none."""

    @property
    def p(self) -> dict[str, float]:
        """Baseline -> p of equal accuracy, after Holm's correction."""
        found = holm([pair.metrics["accuracy"].test.p for pair in self.pairs.values()])
        return dict(zip(self.pairs, found, strict=True))

    @property
    def differences(self) -> dict[str, Estimate]:
        """Baseline -> accuracy of the model minus that of the baseline."""
        return {name: pair.metrics["accuracy"].difference for name, pair in self.pairs.items()}

    @property
    def is_worse(self) -> bool:
        """Whether it is worse than some baseline, corrected for their number."""
        p = self.p
        return any(difference.high < 0 and p[name] <= ALPHA for name, difference in self.differences.items())


def against_baselines(record: Record, rows: Sequence[ScoreRow]) -> AgainstBaselines:
    """Return the model, whose score rows are given, against the baselines on the same data whose rows lie in the
    folder."""
    if record.judged is None or not rows:
        return AgainstBaselines(pairs={})
    pairs = {}
    for name, judged in compared(record, record.judged.name).items():
        if name not in BASELINES:
            continue
        try:
            # As many as of the model, of which it is told.
            theirs = read_scores(judged, [])
        except (RewardlabError, OSError):
            theirs = []
        if not theirs:
            return AgainstBaselines(pairs={}, problem=f"those of {name} are missing or damaged.")
        try:
            aligned = align([ScoreSet(name=name, rows=theirs), ScoreSet(name="this model", rows=rows)])
        except RewardlabError as error:
            return AgainstBaselines(pairs={}, problem=str(error))
        pairs[name] = compare_metrics(aligned, ["accuracy"])
    return AgainstBaselines(pairs=pairs)


def runs_section(runs: Mapping[str, tuple[Sequence[ScoreRow], float]]) -> Section:
    """Return each run against the first on the same rows: name -> score rows and β. What has other rows is said."""
    if len(runs) < 2:
        return Section(title="Paired differences", blocks=())
    sets = [ScoreSet(name=name, rows=rows, beta=beta) for name, (rows, beta) in runs.items()]
    first, *others = sets
    pairs: list[Paired] = []
    blocks: list[Block] = []
    for other in others:
        try:
            pairs.append(compare_metrics(align([first, other]), ["accuracy", "nll"]))
        except RewardlabError as error:
            words = f"{other.name} and {first.name} are not compared pair by pair: {error}"
            blocks.append(Paragraph(text=words, tone="note"))
    if pairs:
        blocks.insert(0, _table(first.name, pairs))
    return Section(title="Paired differences", blocks=tuple(blocks))


def _table(first: str, pairs: Sequence[Paired]) -> Block:
    adjusted = holm([pair.metrics["accuracy"].test.p for pair in pairs])
    rows = []
    for pair, p in zip(pairs, adjusted, strict=True):
        nll = pair.metrics.get("nll")
        rows.append(
            (
                pair.second,
                shown(pair.metrics["accuracy"].difference),
                format_p(p),
                "—" if nll is None else shown(nll.difference),
                format_count(pair.verdicts.only_second),
                format_count(pair.verdicts.only_first),
                format_count(pair.comparisons),
            )
        )
    return with_intervals(
        caption=f"On the same rows: each run minus {first}",
        header=("run", TITLES["accuracy"], "p", TITLES["nll"], "right alone", "wrong alone", "comparisons"),
        rows=rows,
        estimates=[pair.metrics["accuracy"].difference for pair in pairs],
        label="difference of accuracy",
        mark=0.0,
        notes=(
            f"p of accuracy: {tests_told(pairs)}{', after Holm’s correction' if len(pairs) > 1 else ''}.",
            *column_notes(
                {
                    TITLES[name]: [pair.metrics[name].difference for pair in pairs if name in pair.metrics]
                    for name in ("accuracy", "nll")
                }
            ),
        ),
    )


def said_of(found: AgainstBaselines) -> str:
    """Return the differences in words."""
    p = found.p
    parts = [
        f"minus that of {name}: {shown(difference)} (p {format_p(p[name]) if math.isfinite(p[name]) else '—'})"
        for name, difference in found.differences.items()
    ]
    # The closing table of the run counts the untrained model too, so its p may be another one.
    correction = f"; p after Holm's correction for these {len(parts)}" if len(parts) > 1 else ""
    return f"On the same pairs, its accuracy {'; '.join(parts)}{correction}."
