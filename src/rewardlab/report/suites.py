"""The tables of a suite: scores by its rule, scores of length alone, and the effect of ties and missing scores."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

from rewardlab.analysis.suites.judging import SuiteResult, SuiteRow
from rewardlab.analysis.suites.lengths import BASELINES
from rewardlab.core.terminal import plural, visible
from rewardlab.core.types import Estimate
from rewardlab.report.tables import (
    format_count,
    format_estimate,
    format_points,
    interval_note,
    report_width,
    text_table,
    wrapped,
)

MOST_SHOWN = 6
"""Most subsets that a note names."""
MARK = {"subset": "", "section": "– ", "total": "= "}
"""Kind of a row -> the mark before its name."""
P_MEANS = (
    "p: sign-flip tests by prompt against the three length rules, two-sided: the largest where the model is above all, "
    "else three times the smallest of those above it; after Holm's correction over the subsets, plain for – and =. "
    "The better rule was chosen on the same rows, which favours it."
)


def suite_report(
    result: SuiteResult,
    *,
    left_out: Mapping[str, int] | None = None,
    causes: Mapping[str, int] | None = None,
    truncated: int = 0,
    shortened: int = 0,
) -> str:
    """Return the tables of a suite with notes on the rule, the intervals, and missing rows and scores.

    `left_out` and `causes` map the reasons why rows are not judged, and why replies have no score, to their numbers.
    `truncated` is the number of replies whose prompt was cut to fit the model's limit, `shortened` the number of those
    that lost their middle.
    """
    rows = result.rows
    gains = [
        [
            f"{MARK[row.kind]}{row.name}",
            format_estimate(row.score, percent=True),
            format_points(row.gain),
            row.better,
            _p_value(row),
        ]
        for row in rows
    ]
    blocks = [
        f"{result.title}, by its own rule",
        text_table(["", "score", "minus length rule, points", "which", "p"], gains),
        "\n".join(_notes(result, left_out or {}, causes or {}, truncated, shortened)),
        "What length alone reaches, by the same rule:",
        text_table(
            ["", *BASELINES],
            [[row.name, *(format_estimate(row.baselines[name], percent=True) for name in BASELINES)] for row in rows],
        ),
    ]
    if result.differs:
        title = "With ties broken at random (½ for a pair, 1/k at the top) in place of the suite's rule:"
        blocks += [wrapped(title), _fair(rows)]
    return "\n" + "\n\n".join(blocks)


def _p_value(row: SuiteRow) -> str:
    """Return the p-value of a row: after Holm's correction for a subset, uncorrected for other rows."""
    return p_text(row.p_holm if row.kind == "subset" else row.p_value)


def p_text(value: float) -> str:
    """Return a p-value as a cell; a dash for NaN."""
    if math.isnan(value):
        return "—"
    return "<0.001" if value < 0.0005 else f"{value:.3f}"


def _fair(rows: Sequence[SuiteRow]) -> str:
    """Return a table of the rows whose score changes if ties are broken at random."""
    differing = [row for row in rows if abs(row.fair.value - row.score.value) > 1e-12]
    cells = [[row.name, *(format_estimate(one, percent=True) for one in (row.score, row.fair))] for row in differing]
    return text_table(["", "rule of the suite", "ties at random"], cells)


def _notes(
    result: SuiteResult, left_out: Mapping[str, int], causes: Mapping[str, int], truncated: int, shortened: int
) -> list[str]:
    count = format_count
    notes = [
        f"{count(result.num_rows)} {plural(result.num_rows, 'row')}, {count(result.num_replies)} "
        f"{plural(result.num_replies, 'reply')}.",
        f"Rule: {result.ties}. Total: {result.weighting}.",
        *interval_notes([(row.name, row.score) for row in result.rows]),
        P_MEANS,
    ]
    notes += missing_notes(
        unscored_rows=result.unscored_rows,
        unscored_replies=result.unscored_replies,
        causes=causes,
        truncated=truncated,
        shortened=shortened,
        left_out=left_out,
        incomplete=result.incomplete,
    )
    return [line for note in notes if note for line in textwrap.wrap(note, width=report_width())]


def interval_notes(scores: Sequence[tuple[str, Estimate]]) -> list[str]:
    """Return how the intervals of a suite were made, and which rows have none: sentences on (name, score) of rows."""
    few = [name for name, score in scores if math.isnan(score.low) and not math.isnan(score.value)]
    return [
        interval_note(score for _, score in scores if not math.isnan(score.low)),
        "Differences are paired: in every draw both are of the same prompts.",
        *([f"No interval below ten prompts: {', '.join(map(visible, few))}."] if few else []),
    ]


def missing_notes(
    *,
    unscored_rows: int,
    unscored_replies: int,
    causes: Mapping[str, int],
    truncated: int,
    shortened: int,
    left_out: Mapping[str, int],
    incomplete: Mapping[str, tuple[int, int | None]],
) -> list[str]:
    """Return what keeps the scores of a suite from being those of all its rows, whole: a sentence for each kind.

    The parameters are those of `suite_report` and of a `SuiteResult`.
    """
    notes = []
    if unscored_replies:
        why = ", ".join(f"{format_count(number)} {cause}" for cause, number in causes.items())
        notes.append(
            f"{format_count(unscored_replies)} {plural(unscored_replies, 'reply')} in "
            f"{format_count(unscored_rows)} {plural(unscored_rows, 'row')} "
            f"{plural(unscored_replies, 'has', 'have')} no score"
            f"{f' ({why})' if why else ''}. Each comparison with one of them counts as lost."
        )
    if truncated:
        notes.append(
            f"The {plural(truncated, 'prompt')} of {format_count(truncated)} "
            f"{plural(truncated, 'reply was', 'replies were')} cut to fit the model's limit."
        )
    if shortened:
        notes.append(
            f"{format_count(shortened)} {plural(shortened, 'reply lost its', 'replies lost their')} middle, to fit "
            f"the model's limit."
        )
    for cause, number in left_out.items():
        rows = f"{format_count(number)} {plural(number, 'row')}"
        notes.append(f"Left out by the suite's rule: {rows} ({visible(cause)}).")
    if incomplete:
        parts = [
            f"{visible(name)} {format_count(there)}{'' if published is None else f' of {format_count(published)}'}"
            for name, (there, published) in incomplete.items()
        ]
        more = [f"{len(parts) - MOST_SHOWN} subsets more"] if len(parts) > MOST_SHOWN else []
        notes.append(
            f"Not the published suite, so not comparable with published numbers: rows of "
            f"{', '.join([*parts[:MOST_SHOWN], *more])}."
        )
    return notes
