"""The text that `rewardlab eval` prints: one model by source, or several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from rewardlab.analysis.judgement import Judgement
from rewardlab.analysis.measures import AT_THRESHOLD, MEASURES, at_threshold
from rewardlab.analysis.metrics import Evaluation
from rewardlab.analysis.precision import PrecisionCard
from rewardlab.analysis.slices import of_column
from rewardlab.core.terminal import number_of, plural
from rewardlab.core.types import Estimate
from rewardlab.report.from_scores import RATES
from rewardlab.report.precision import card_block, verdict_block
from rewardlab.report.robustness import Moved, robustness_block
from rewardlab.report.run import COLUMNS, DIGITS, by_source_and_name, comparison_table, evaluation_report, fitting
from rewardlab.report.tables import column_notes, format_count, format_estimate, text_table, wrapped

SEVERAL = ("accuracy", "NLL", "ECE")
"""Columns of a table of several models. Margins are in the unit of each model's score, so they are not compared."""


@runtime_checkable
class Result(Protocol):
    """The results of a judged model, such as evaluation.evaluate.EvalResult."""

    @property
    def overall(self) -> Evaluation:
        """The evaluation of all comparisons."""

    @property
    def by_source(self) -> Mapping[str, Evaluation]:
        """Source -> its evaluation."""

    @property
    def judgement(self) -> Judgement | None:
        """All further results from its score rows."""

    @property
    def robustness(self) -> Moved | None:
        """The effects of changed texts on its scores; None if not asked for."""

    @property
    def card(self) -> PrecisionCard | None:
        """The comparison with other precisions; None if not asked for."""


def judged_blocks(
    results: Mapping[str, Result], computed_in: str, *, slices: Sequence[str] = (), thresholds: Sequence[float] = ()
) -> list[str]:
    """Return the blocks of a report on models by name. `computed_in` says how their scores were computed.

    `slices` and `thresholds` are those that were asked for; each gets its own table for all models.
    """
    several = len(results) > 1
    if several:
        blocks = [comparison_table(by_source_and_name(results), first="model", columns=SEVERAL)]
    else:
        blocks = [evaluation_report(result.overall, result.by_source) for result in results.values()]
    blocks.append(f"computed in {computed_in}")
    judgements = {name: result.judgement for name, result in results.items() if result.judgement is not None}
    if thresholds and judgements:
        blocks.append(f"\n{threshold_table(judgements, thresholds)}\n")
    if by_gold := {name: own for name, own in judgements.items() if own.by_gold}:
        blocks.append(f"\n{gold_table(by_gold)}\n")
    blocks += [f"\n{slice_table(judgements, column)}\n" for column in slices if judgements]
    for name, result in results.items():
        head = f"\n{name}\n" if several else "\n"
        if result.robustness is not None:
            blocks.append(f"{head}{robustness_block(result.robustness)}\n")
        if result.card is not None:
            blocks.append(f"{head}{(verdict_block if several else card_block)(result.card)}\n")
    return blocks


def slice_table(judgements: Mapping[str, Judgement], column: str) -> str:
    """Return a table of slices by one column, with a row for each value and model.

    Where the data have a column that is called like a slicing that is always there, the table is of the column.
    """
    if any(of_column(column) in judged.slices for judged in judgements.values()):
        column = of_column(column)
    metrics = {name: metric for name, metric in COLUMNS.items() if name != "ECE"}
    every = [one for judged in judgements.values() for one in judged.slices.get(column, ())]
    rows: list[list[str]] = []
    estimates: dict[str, list[Estimate]] = {name: [] for name in metrics}
    for label in dict.fromkeys(one.label for one in every):
        for model, judged in judgements.items():
            for one in judged.slices.get(column, ()):
                if one.label != label:
                    continue
                name = label if len(judgements) == 1 else f"{label} {model}"
                cells = [fitting(name, one.estimates[m], least=DIGITS[m]) for m in metrics.values()]
                rows.append([name, *cells, format_count(one.num_comparisons)])
                for metric_name, metric in metrics.items():
                    estimates[metric_name].append(one.estimates[metric])
    notes = [*column_notes(estimates), "Slices are not corrected for their number: of twenty, one differs by chance."]
    kwise = any(own.counts.groups or own.counts.unusable_groups for own in judgements.values())
    unit = "comparisons" if kwise else "pairs"
    return "\n".join([text_table([column, *metrics, unit], rows), *map(wrapped, notes)])


def threshold_table(judgements: Mapping[str, Judgement], thresholds: Sequence[float]) -> str:
    """Return a table of the rates of wrong and right acceptance at each threshold, for every model."""
    rows: list[list[str]] = []
    estimates: dict[str, list[Estimate]] = {title: [] for title in RATES.values()}
    for threshold in thresholds:
        for model, judged in judgements.items():
            found = {stem: judged[at_threshold(stem, threshold)] for stem in RATES}
            name = f"{threshold:g}" if len(judgements) == 1 else f"{threshold:g} {model}"
            rows.append([name, *(format_estimate(estimate) for estimate in found.values())])
            for stem, estimate in found.items():
                estimates[RATES[stem]].append(estimate)
    meanings = [f"{title}: {AT_THRESHOLD[stem]}" for stem, title in RATES.items()]
    notes = [*column_notes(estimates), *meanings]
    return "\n".join([text_table(["threshold", *RATES.values()], rows), *map(wrapped, notes)])


def gold_table(judgements: Mapping[str, Judgement]) -> str:
    """Return a table of what gold scores say, with a row for each number and model."""
    rows: list[list[str]] = []
    meanings: dict[str, str] = {}
    estimates: dict[str, list[Estimate]] = {}
    for metric in dict.fromkeys(metric for judged in judgements.values() for metric in judged.by_gold):
        title = metric.removeprefix("eval_").replace("_", " ")
        meanings[title] = MEASURES[metric]
        for model, judged in judgements.items():
            if (estimate := judged.by_gold.get(metric)) is None:
                continue
            name = title if len(judgements) == 1 else f"{title} {model}"
            rows.append([name, format_estimate(estimate), format_count(judged.num_rows[metric])])
            estimates.setdefault(title, []).append(estimate)
    notes = [*column_notes(estimates), *(f"{title}: {meaning}" for title, meaning in meanings.items())]
    for model, judged in judgements.items():
        if missing := judged.counts.replies_without_gold:
            notes.append(
                f"{model}: {missing:,} of {number_of(judged.counts.replies, 'reply')} "
                f"{plural(missing, 'has', 'have')} no gold score"
            )
    return "\n".join([text_table(["by gold scores", "value", "replies or groups"], rows), *map(wrapped, notes)])
