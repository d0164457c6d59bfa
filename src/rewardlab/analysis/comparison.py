"""Everything that is said about several models on the same comparisons: pairs, slices, standings, gold.

Legend: M models, N comparisons.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.agreement import Agreement, agreement
from rewardlab.analysis.aligned import FEWEST, Aligned, Pair, ScoreSet, align
from rewardlab.analysis.ceiling import Ceiling, of_score_rows
from rewardlab.analysis.intervals import root_mean_square
from rewardlab.analysis.multiple import Standing, holm, standings
from rewardlab.analysis.paired import (
    FALLING,
    Columns,
    Metric,
    PairComparison,
    change_within,
    columns_of,
    compare_pair,
    difference_of,
    tested,
    without_rounding,
)
from rewardlab.analysis.signflip import Significance
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.terminal import brief, short
from rewardlab.core.types import Comparison, Estimate, ScoreRow

MOST_VALUES: Final = 50
"""Most different values of a column to slice by."""
NONE: Final = "none"
"""Value of comparisons without one. A text that is itself this one stands in quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The difference of two models on the comparisons with one value of a column: what comparing these alone says.

    So the margin of a slice is in standard deviations of the model's differences in that slice.
    """

    column: str
    value: str
    comparisons: int
    difference: Estimate
    test: Significance
    """NaN below ten comparisons or prompts, which are not tested."""
    adjusted: float
    """p-value after Holm's correction for all slices of all models that were tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A comparison that one of two models ranks better than the other."""

    pair: Pair
    outcomes: tuple[float, float]
    """1 right, ½ tied, 0 wrong; of the first model and of the second."""
    margins: tuple[float | None, float | None]
    """Score differences, preferred minus other, in standard deviations of each model's differences; None where it has
    verdicts and no scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainstFirst:
    """One model against the first."""

    paired: PairComparison
    adjusted: float
    """p-value of the metric asked for, after Holm's correction for the number of models."""
    slices: tuple[Slice, ...]
    disagreements: tuple[Disagreement, ...]
    """In the order of `disagreements`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOfModels:
    """What `compare_models` found."""

    names: tuple[str, ...]
    metric: Metric
    betas: tuple[float | None, ...]
    comparisons: int
    """With finite scores by all models."""
    prompts: int
    """Of these comparisons, label ties included."""
    label_ties: int
    not_finite: Mapping[str, int]
    missing: Mapping[str, int]
    others: tuple[AgainstFirst, ...]
    standings: Mapping[str, Standing]
    """Empty for two models, where the test says it all."""
    agreement: Mapping[str, Agreement]
    """Model -> agreement with the gold scores; empty without them."""
    by_place: tuple[str, ...]
    """Models, and `gold`, whose rows have no ids and belong to those of the same number."""
    gold_labels: bool
    """Whether the gold scores say which reply is preferred, because no file did."""
    ceiling: Ceiling | None = None
    """What a perfect model would reach, where the rows hold repeated judgements, soft labels or strengths."""


def compare_models(
    sets: Sequence[ScoreSet],
    *,
    metric: Metric = "accuracy",
    margin: float | None = None,
    slices: Mapping[str, Mapping[tuple[str, str], str]] | None = None,
    gold: ScoreSet | None = None,
    common: bool = False,
) -> ComparisonOfModels:
    """Compare models on the same comparisons, each with the first.

    `slices` maps columns to the value of each preference, by source and id; None slices by source if there are
    several. The column `source` is known without values, and so are those of `built_in_slices`.

    Raises DataError as `align` does, and for a column with too many values or none; ConfigError if the metric cannot
    be computed.
    """
    aligned, gold_scores, gold_labels = _with_gold(sets, gold, common=common)
    outcome = columns_of(aligned, metric)
    if outcome is None:
        raise ConfigError(_why_not(metric, aligned))
    asked = _slices_of(aligned, slices)
    compared = [compare_pair(aligned, second, metric=metric, margin=margin) for second in range(1, len(sets))]
    adjusted = holm([paired.metrics[metric].test.p for paired in compared])
    by_slice = _with_holm([_by_slice(aligned, outcome, metric, second, asked) for second in range(1, len(sets))])
    others = tuple(
        AgainstFirst(paired=paired, adjusted=p, slices=own, disagreements=disagreements(aligned, second))
        for second, (paired, p, own) in enumerate(zip(compared, adjusted, by_slice, strict=True), start=1)
    )
    return ComparisonOfModels(
        names=aligned.names,
        metric=metric,
        betas=aligned.betas,
        comparisons=len(aligned.pairs),
        prompts=len(set(aligned.prompt_keys)),
        label_ties=int((aligned.label_N == 0.5).sum()),
        not_finite=aligned.not_finite,
        missing=aligned.missing,
        others=others,
        standings=_standings(aligned, outcome, metric) if len(sets) > 2 else {},
        agreement={} if gold_scores is None else _agreement(sets, aligned, gold_scores),
        by_place=tuple(own.name for own in (*sets, *([] if gold is None else [gold])) if own.by_place),
        gold_labels=gold_labels,
        ceiling=of_score_rows(sets[0].rows),
    )


def built_in_slices(aligned: Aligned) -> dict[str, list[str]]:
    """Return slices that every evaluation of ours has: source, which reply is longer, and whether anything was cut."""
    longer, cut = [], []
    for preferred, other in aligned.rows:
        gap = (preferred.num_tokens - preferred.prompt_tokens) - (other.num_tokens - other.prompt_tokens)
        longer.append("preferred" if gap > 0 else "other" if gap < 0 else "equal")
        cut.append("cut" if preferred.is_cut or other.is_cut else "whole")
    found = {"source": [_shown_value(pair.source) for pair in aligned.pairs]}
    if any(row.num_tokens for row, _ in aligned.rows):
        found |= {"longer": longer, "truncated": cut}
    return found


def disagreements(aligned: Aligned, second: int) -> tuple[Disagreement, ...]:
    """Return the decided comparisons on which the first model and that of number `second` have different outcomes.

    Those with the largest difference of margins come first. The margin of a model with verdicts alone counts 0, so that
    beside it those come first that the other model is surest of. Then right against wrong comes before a tie, and at
    last the order is that of the rows.
    """
    decided = aligned.decided
    two = decided.difference_MN[[0, second]]
    outcome = np.heaviside(two, 0.5)
    scored = [not aligned.verdicts_only[number] for number in (0, second)]
    first_N, second_N = (
        own / (root_mean_square(own) or 1.0) if known else np.zeros_like(own)
        for own, known in zip(two, scored, strict=True)
    )
    numbers = np.lexsort((-np.abs(outcome[1] - outcome[0]), -np.abs(second_N - first_N)))
    return tuple(
        Disagreement(
            pair=decided.pairs[number],
            outcomes=(float(outcome[0, number]), float(outcome[1, number])),
            margins=(
                float(first_N[number]) if scored[0] else None,
                float(second_N[number]) if scored[1] else None,
            ),
        )
        for number in numbers
        if outcome[0, number] != outcome[1, number]
    )


def _with_gold(
    sets: Sequence[ScoreSet], gold: ScoreSet | None, *, common: bool
) -> tuple[Aligned, dict[tuple[str, str, int], float] | None, bool]:
    """Return the aligned sets, the gold scores by reply, and whether the gold scores had to say what is preferred."""
    if gold is None:
        return align(sets, common=common), None, False
    if any(row.comparisons for own in sets for row in own.rows):
        aligned, by_gold = align([*sets, gold], common=common), False
    else:
        if not common:
            _require_all_replies(sets, gold)
        aligned, by_gold = align([*sets, _judged_by(gold)], common=common), True
    bare = all(pair.source == "" for pair in aligned.pairs)
    scores = {("" if bare else row.source, row.preference_id, row.reply): row.score for row in gold.rows}
    without = Aligned(
        names=aligned.names[:-1],
        pairs=aligned.pairs,
        difference_MN=aligned.difference_MN[:-1],
        rows=aligned.rows,
        betas=aligned.betas[:-1],
        verdicts_only=aligned.verdicts_only[:-1],
        not_finite=aligned.not_finite,
        missing=aligned.missing,
    )
    return without, scores, by_gold


def _require_all_replies(sets: Sequence[ScoreSet], gold: ScoreSet) -> None:
    """Raise DataError if a model scores a reply that the gold model, which is to judge it, does not."""
    replies: dict[str, set[int]] = {}
    for row in gold.rows:
        replies.setdefault(row.preference_id, set()).add(row.reply)
    for own in sets:
        lacking = [row for row in own.rows if row.reply not in replies.get(row.preference_id, ())]
        if lacking:
            raise DataError(
                f"{gold.name} lacks {len(lacking):,} of the replies that {own.name} scores, such as reply "
                f"{lacking[0].reply} of {short(lacking[0].preference_id)!r}. Score them all with the gold model, or "
                f"compare those that it has with --common."
            )


def _judged_by(gold: ScoreSet) -> ScoreSet:
    """Return gold scores that judge every two replies of a preference by their order.

    Two of which one has no finite score are compared too, so that the comparison is counted as one without.
    """
    groups: dict[tuple[str, str], list[ScoreRow]] = {}
    for row in gold.rows:
        groups.setdefault((row.source, row.preference_id), []).append(row)
    judged = []
    for rows in groups.values():
        for row in rows:
            below = [other for other in rows if other.score < row.score and math.isfinite(other.score - row.score)]
            unknown = [
                other
                for other in rows
                if other.reply > row.reply and not (math.isfinite(other.score) and math.isfinite(row.score))
            ]
            tied = [other for other in rows if other.score == row.score and other.reply > row.reply]
            judged.append(
                replace(
                    row,
                    comparisons=(
                        *(Comparison(first=row.reply, second=other.reply) for other in [*below, *unknown]),
                        *(Comparison(first=row.reply, second=other.reply, label=0.5) for other in tied),
                    ),
                )
            )
    return replace(gold, rows=judged)


def _why_not(metric: Metric, aligned: Aligned) -> str:
    if verdicts := [name for name, only in zip(aligned.names, aligned.verdicts_only, strict=True) if only]:
        return f"--metric {metric}: {', '.join(verdicts)} has verdicts (right, wrong) and no scores. Compare accuracy."
    unknown = [name for name, beta in zip(aligned.names, aligned.betas, strict=True) if beta is None]
    return f"--metric nll: the β of {', '.join(unknown)} is not known. Give it with --beta (1 for most reward models)."


def _slices_of(aligned: Aligned, slices: Mapping[str, Mapping[tuple[str, str], str]] | None) -> dict[str, list[str]]:
    """Return the value of each comparison in every column asked for."""
    known = built_in_slices(aligned)
    if slices is None:
        return {"source": known["source"]} if len(set(known["source"])) > 1 else {}
    found = {}
    for column, values in slices.items():
        if not values and column in known:
            found[column] = known[column]
            continue
        names = [
            values.get((pair.source, pair.preference_id), values.get(("", pair.preference_id), ""))
            for pair in aligned.pairs
        ]
        if not any(names):
            raise DataError(
                f"--slice {short(column)}: no file has this column. Known without one: {', '.join(known)}. Name a "
                f"file with `id` and the column with --columns."
            )
        if (count := len(set(names))) > MOST_VALUES:
            raise DataError(f"--slice {short(column)}: it has {count} different values; at most {MOST_VALUES}.")
        found[column] = [_shown_value(name) for name in names]
    return found


def _shown_value(name: str) -> str:
    """Return the name of a slice. The word for rows without a value is in quotes where it is a value itself."""
    return f"'{NONE}'" if name == NONE else name or NONE


def _by_slice(
    aligned: Aligned, columns: Columns, metric: Metric, second: int, asked: Mapping[str, Sequence[str]]
) -> tuple[Slice, ...]:
    """Return the slices of a model, whose p-values are not corrected yet."""
    used = np.ones(len(aligned.pairs), dtype=bool) if metric == "nll" else aligned.label_N != 0.5
    found = []
    for column, values in asked.items():
        own = np.array(values, dtype=object)[used]
        for value in sorted(Counter(own), key=str):
            kept = own == value
            keys = [key for key, keep in zip(columns.prompt_keys, kept, strict=True) if keep]
            change = change_within(columns, second, kept)
            enough = len(set(keys)) >= stats.MIN_CLUSTERS and len(keys) >= FEWEST
            none = Significance(p=math.nan, method="not tested: too few")
            found.append(
                Slice(
                    column=column,
                    value=value,
                    comparisons=len(keys),
                    difference=difference_of(metric, change, keys),
                    test=tested(metric, change, keys) if enough else none,
                    adjusted=math.nan,
                )
            )
    return tuple(found)


def _with_holm(by_model: Sequence[Sequence[Slice]]) -> list[tuple[Slice, ...]]:
    """Return the slices of each model with p-values corrected over all that were tested."""
    adjusted = iter(holm([part.test.p for own in by_model for part in own]))
    return [tuple(replace(part, adjusted=next(adjusted)) for part in own) for own in by_model]


def _standings(aligned: Aligned, columns: Columns, metric: Metric) -> dict[str, Standing]:
    sign = -1.0 if metric in FALLING else 1.0
    prompts_N, _ = stats.numbered(columns.prompt_keys)
    values_MN = without_rounding(columns.values_MN) if metric == "margin" else columns.values_MN
    gains = {name: sign * values for name, values in zip(aligned.names, values_MN, strict=True)}
    return standings(gains, prompts_N, of_any_size=metric != "accuracy")


def _agreement(
    sets: Sequence[ScoreSet], aligned: Aligned, gold: Mapping[tuple[str, str, int], float]
) -> dict[str, Agreement]:
    replies = dict.fromkeys(
        (pair.source, pair.preference_id, reply) for pair in aligned.pairs for reply in (pair.preferred, pair.other)
    )
    keys = {
        (pair.source, pair.preference_id): row.prompt_key
        for pair, (row, _) in zip(aligned.pairs, aligned.rows, strict=True)
    }
    gold_R = np.array([gold[reply] for reply in replies])
    gold_N = np.array(
        [
            gold[pair.source, pair.preference_id, pair.preferred] - gold[pair.source, pair.preference_id, pair.other]
            for pair in aligned.pairs
        ]
    )
    found = {}
    for number, own in enumerate(sets):
        bare = all(source == "" for source, _, _ in replies)
        scores = {("" if bare else row.source, row.preference_id, row.reply): row.score for row in own.rows}
        found[own.name] = agreement(
            margins_N=aligned.difference_MN[number],
            gold_margins_N=gold_N,
            prompts_N=aligned.prompt_keys,
            scores_R=np.array([scores[reply] for reply in replies]),
            gold_scores_R=gold_R,
            prompts_R=[keys[source, name] for source, name, _ in replies],
        )
    return found


def name_apart(names: Sequence[str]) -> None:
    """Raise ConfigError unless all names differ and none is empty."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or "" in names:
        raise ConfigError(f"--names {brief(twice[0] if twice else '')}: every model needs a name of its own.")
