"""A suite judged: every row by the suite's rule with its interval, ours beside it, and what length alone reaches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.multiple import holm
from rewardlab.analysis.suites.draws import DRAWS, Judged, Resampled, difference, estimate, judge, significance
from rewardlab.analysis.suites.lengths import BASELINES, length_scores
from rewardlab.analysis.suites.outcomes import Kind, RuleRow, Scores, Share
from rewardlab.analysis.suites.registry import SUITES, missing_rows
from rewardlab.core.errors import DataError
from rewardlab.core.suites import SuiteItem
from rewardlab.core.types import Estimate

OWN, FAIR = "model", "ties broken at random"


@dataclass(frozen=True, kw_only=True)
class SuiteRow:
    """One line of the table of a suite."""

    name: str
    kind: Kind
    score: Estimate
    """Score of the model by the rule of the suite."""
    fair: Estimate
    """The same rule with ties broken at random: ½ for a pair, 1/k for k replies at the top."""
    baselines: Mapping[str, Estimate]
    """Name of a length baseline -> its score by the rule of the suite."""
    better: str
    """The baseline with the highest score on this row."""
    gain: Estimate
    """The score minus that of `better`, paired. Choosing the better of three on the same rows favours the baseline."""
    p_value: float
    """Sign-flip test of the model against all three, two-sided; NaN where there is too little. See `_against_all`."""
    p_holm: float
    """The same after Holm's correction over the subsets; NaN for sections and totals."""
    num_rows: int
    """Rows of the suite in this line."""


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """A suite judged."""

    suite: str
    title: str
    ties: str
    weighting: str
    rows: tuple[SuiteRow, ...]
    num_rows: int
    num_replies: int
    unscored_rows: int
    """Rows with a reply that has no finite score; its comparisons count as lost."""
    unscored_replies: int
    incomplete: Mapping[str, tuple[int, int | None]]
    """Subset -> (rows that are there, rows of the published suite), where the two differ; None for a subset of which
    nothing is there, and the published number is not known."""

    @property
    def differs(self) -> bool:
        """Whether breaking ties at random gives another number anywhere."""
        return any(abs(row.fair.value - row.score.value) > 1e-12 for row in self.rows)


def judge_suite(
    suite: str,
    items: Sequence[SuiteItem],
    scores: Scores,
    *,
    seed: int = 0,
    num_draws: int = DRAWS,
    left_out: int = 0,
) -> SuiteResult:
    """Judge scores of a suite's items by its rule.

    `scores` has an array [K] for each item, NaN for a reply that could not be scored. `left_out` rows are part of the
    published suite and, by its rule, not judged. The order of the items changes no number.

    Raises DataError if there are no items, if two have one id, if the scores are not as many as the replies, or if the
    rule cannot be applied.
    """
    if not items:
        raise DataError(f"{suite}: no rows to judge.")
    if len({item.id for item in items}) < len(items):
        raise DataError(f"{suite}: two rows have the same id.")
    order = sorted(range(len(items)), key=lambda number: items[number].id)
    items = [items[number] for number in order]
    scores = _in_order(suite, items, scores, order)
    rule = SUITES[suite].rule
    outcomes = {OWN: rule(items, scores, False), FAIR: rule(items, scores, True)}
    for name, own in length_scores(items, seed=seed).items():
        outcomes[name] = rule(items, own, False)
    resampled = Resampled.of(items, outcomes[OWN], seed=seed)
    judged = judge(outcomes, resampled, num_draws=num_draws)
    rows = []
    for row in outcomes[OWN].rows:
        estimates = {name: estimate(one, row, resampled) for name, one in judged.items()}
        baselines = {name: estimates[name] for name in BASELINES}
        better = max(BASELINES, key=lambda name: (baselines[name].value, -BASELINES.index(name)))
        rows.append(
            SuiteRow(
                name=row.name,
                kind=row.kind,
                score=estimates[OWN],
                fair=estimates[FAIR],
                baselines=baselines,
                better=better,
                gain=difference(judged[OWN], judged[better], row, resampled),
                p_value=_against_all(judged, row, seed=seed),
                p_holm=math.nan,
                num_rows=_num_rows(outcomes[OWN].shares, row.weights),
            )
        )
    missing = [~np.isfinite(own) for own in scores]
    return SuiteResult(
        suite=suite,
        title=SUITES[suite].title,
        ties=SUITES[suite].ties,
        weighting=SUITES[suite].weighting,
        rows=tuple(_with_holm(rows)),
        num_rows=len(items),
        num_replies=sum(map(len, scores)),
        unscored_rows=sum(bool(own.any()) for own in missing),
        unscored_replies=int(sum(own.sum() for own in missing)),
        incomplete=missing_rows(suite, items, left_out),
    )


def _against_all(judged: Mapping[str, Judged], row: RuleRow, *, seed: int) -> float:
    """Return the p-value of the model against the length baselines, with the choice of the better one accounted for.

    A model that is better than the better one must be so against each: the largest p-value (Berger 1982, Technometrics
    24, 295-300). It is worse if it is so against any: the smallest times their number.
    """
    own = judged[OWN]
    p_values = {name: significance(own, judged[name], row, seed=seed) for name in BASELINES}
    value = own.outcome.value(row)
    ahead = [p for name, p in p_values.items() if judged[name].outcome.value(row) > value]
    return min(1.0, len(BASELINES) * min(ahead)) if ahead else max(p_values.values())


def _in_order(suite: str, items: Sequence[SuiteItem], scores: Scores, order: Sequence[int]) -> list[FloatArray]:
    """Return [K] scores of the items, which are in `order` already. Raises DataError unless every reply has one."""
    if len(scores) != len(items):
        raise DataError(f"{suite}: {len(items)} rows with scores of {len(scores)}. Give an array for each row.")
    arrays = [np.asarray(scores[number], dtype=np.float64) for number in order]
    for item, scores_K in zip(items, arrays, strict=True):
        if scores_K.shape != (len(item.replies),):
            raise DataError(
                f"{suite}: row {item.id} has {len(item.replies)} replies and scores of shape {scores_K.shape}. Give "
                f"one score a reply, NaN for one that has none."
            )
    return arrays


def _num_rows(shares: Mapping[str, Share], weights: Mapping[str, float]) -> int:
    """Return the number of items with a credit in one of these shares."""
    return len(np.unique(np.concatenate([shares[name].items_E for name in weights])))


def _with_holm(rows: Sequence[SuiteRow]) -> list[SuiteRow]:
    """Return the rows with p-values corrected over the subsets; sections and totals are made of the same rows."""
    subsets = [row for row in rows if row.kind == "subset"]
    adjusted = dict(zip((row.name for row in subsets), holm([row.p_value for row in subsets]), strict=True))
    return [replace(row, p_holm=adjusted[row.name]) if row.kind == "subset" else row for row in rows]
