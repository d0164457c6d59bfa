"""Numbers of score rows with the influence of every prompt on them: what `crossed` needs of one arm.

Legend: N comparisons or replies, S seeds, C prompts. Influences are those of influence.py: T ≈ t + (1/N) Σ ψ_n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from rewardlab.analysis import calibration, influence
from rewardlab.analysis.crossed import Observed
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.lengths import length_controlled_influence, length_controlled_weights
from rewardlab.analysis.logistic import Fit, logistic
from rewardlab.analysis.losses import temperature_of
from rewardlab.analysis.score_table import LARGEST, IntArray, Pairs, Replies, ScoreTable
from rewardlab.core.errors import DataError

Linearised = tuple[float, FloatArray, IntArray]
"""A value, the influences [N] on it, and the prompts [N] that they belong to."""
Measure = Callable[[ScoreTable, float], Linearised]


def linearised(quantity: str, table: ScoreTable, *, beta: float = 1.0) -> Linearised:
    """Return a quantity with the influences on it. The value is NaN where the rows do not give it."""
    return QUANTITIES[quantity](table, beta)


def observed_in(name: str, tables: Mapping[int, ScoreTable], *, beta: float = 1.0) -> Observed:
    """Return a quantity of an arm from the score rows of its seeds, with probabilities σ(β d).

    Quantities are names of `QUANTITIES`. Raises KeyError for another, DataError if the rows of a seed do not give it.
    """
    found = {}
    for seed, table in tables.items():
        found[seed] = linearised(name, table, beta=beta)
        if not math.isfinite(found[seed][0]):
            raise DataError(
                f"seed {seed}: the score rows do not give {name} (none that is decided, or nothing that varies)."
            )
    clusters = sorted({str(key) for table in tables.values() for key in table.prompts})
    place = {name: number for number, name in enumerate(clusters)}
    moved_SC, weight_SC, each_SC = np.zeros((3, len(tables), len(clusters)))
    for row_C, weight_C, each_C, (seed, table) in zip(moved_SC, weight_SC, each_SC, tables.items(), strict=True):
        _, psi_N, prompt_N = found[seed]
        # Influences have a mean of 0, but for those of leaving out prompts of uneven size, whose sums are to stay.
        at = [place[str(key)] for key in table.prompts]
        row_C[at] = np.bincount(prompt_N, psi_N, minlength=len(table.prompts)) / max(psi_N.size, 1)
        weight_C[at] = np.bincount(prompt_N, minlength=len(table.prompts)) / max(psi_N.size, 1)
        each_C[at] = np.bincount(table.pairs.finite.prompt, minlength=len(table.prompts))
    turned = _TURNED.get(name)
    observed = Observed(
        by_seed_S=np.array([value for value, _, _ in found.values()]),
        seeds=tuple(found),
        influence_SC=moved_SC,
        clusters=tuple(clusters),
        weight_SC=weight_SC,
        each_SC=each_SC,
        has_long_tail=name == "loss",
        turned_S=None if turned is None else np.array([turned(table, beta) for table in tables.values()]),
        fits=tuple(
            replace(_FITS[name](table.pairs.finite, beta), value=found[seed][0])
            for seed, table in tables.items()
            if name in _FITS
        ),
        excess=float(np.mean([_excess(name, table, beta) for table in tables.values()])),
    )
    return _with_outcomes(observed, tables) if name == "accuracy_length_controlled" else observed


def _with_outcomes(observed: Observed, tables: Mapping[int, ScoreTable]) -> Observed:
    """Return accuracy with length controlled with the outcomes whose weighted mean it is, and their weights."""
    place = {name: number for number, name in enumerate(observed.clusters)}
    outcome_SC, weight_SC = np.zeros((2, len(tables), len(place)))
    for outcome_C, weight_C, table in zip(outcome_SC, weight_SC, tables.values(), strict=True):
        pairs, at = table.pairs.decided, [place[str(key)] for key in table.prompts]
        weight = length_controlled_weights(pairs)
        weight_C[at] = np.bincount(pairs.prompt, weight, minlength=len(at))
        outcome_C[at] = np.bincount(pairs.prompt, weight * pairs.outcome, minlength=len(at))
    outcome_SC /= np.where(weight_SC > 0, weight_SC, 1.0)
    return replace(observed, weight_SC=weight_SC, outcome_SC=outcome_SC)


# --- values and influences -------------------------------------------------------------------------------------


def _mean(of: Callable[[Pairs, float], FloatArray], *, decided: bool = True) -> Measure:
    def measure(table: ScoreTable, beta: float) -> Linearised:
        pairs = table.pairs.decided if decided else table.pairs.finite
        return _of_values(of(pairs, beta), pairs.prompt)

    return measure


def _of_values(values: FloatArray, prompts: IntArray) -> Linearised:
    value = float(values.mean()) if values.size else math.nan
    return value, values - value, prompts


def _agreement(pairs: Pairs, beta: float) -> FloatArray:
    return pairs.label * pairs.outcome + (1 - pairs.label) * (1 - pairs.outcome)


def _brier(pairs: Pairs, beta: float) -> FloatArray:
    return np.square(pairs.probability(beta=beta) - pairs.label)


def _by_prompt(table: ScoreTable, beta: float) -> Linearised:
    pairs = table.pairs.decided
    names, prompt, count = np.unique(pairs.prompt, return_inverse=True, return_counts=True)
    return _of_values(np.bincount(prompt, pairs.outcome) / np.maximum(count, 1), names.astype(np.int64))


def _deviation(values: FloatArray, prompts: IntArray) -> Linearised:
    centred = values - values.mean() if values.size else values
    mean = float(np.square(centred).mean()) if values.size > 1 else 0.0
    if mean <= 0:
        return math.nan, centred, prompts
    deviation = math.sqrt(mean * values.size / (values.size - 1))
    return deviation, deviation * (np.square(centred) / mean - 1) / 2, prompts


def _quantile(share: float) -> Measure:
    def measure(table: ScoreTable, beta: float) -> Linearised:
        pairs = table.pairs.decided
        values = pairs.difference
        if not values.size:
            return math.nan, values, pairs.prompt
        value = float(np.quantile(values, share))
        # The density as Woodruff's interval sees it: over the values within two standard errors of the share.
        reach = 2 * math.sqrt(share * (1 - share) / max(len(np.unique(pairs.prompt)), 1))
        low, high = max(share - reach, 0.0), min(share + reach, 1.0)
        spread = float(np.quantile(values, high) - np.quantile(values, low))
        below = (values < value) + (values == value) / 2.0
        return value, spread / (high - low) * (share - below), pairs.prompt

    return measure


def _ece(table: ScoreTable, beta: float) -> Linearised:
    pairs = table.pairs.finite
    if not pairs.label.size:
        return math.nan, pairs.label, pairs.prompt
    value, moved, _ = calibration.ece_influence(pairs.probability(beta=beta), pairs.label)
    return value, moved, pairs.prompt


def _excess(name: str, table: ScoreTable, beta: float) -> float:
    """Return by how much a quantity may exceed the truth on average; 0 for all except ECE."""
    if name != "ece":
        return 0.0
    pairs = table.pairs.finite
    return calibration.ece_influence(pairs.probability(beta=beta), pairs.label, table.keys(pairs))[2]


def _area(table: ScoreTable, beta: float) -> Linearised:
    pairs = table.pairs.decided
    if not pairs.label.size:
        return math.nan, pairs.label, pairs.prompt
    above = influence.shares_below(pairs.preferred, pairs.other)
    below = 1 - influence.shares_below(pairs.other, pairs.preferred)
    value = float(above.mean())
    return value, above + below - 2 * value, pairs.prompt


def _correlated(kind: str, of: str) -> Measure:
    """Return the measure of a correlation with length: of scores over replies, or of margins over pairs in both
    orders."""

    def measure(table: ScoreTable, beta: float) -> Linearised:
        replies, pairs = table.replies.finite, table.pairs.finite
        x, y = (replies.score, replies.length) if of == "score" else (pairs.difference, pairs.length_difference)
        prompts = replies.prompt if of == "score" else pairs.prompt
        if of == "margin" and kind == "spearman":
            return *influence.antisymmetric_rank_correlation(x, y), prompts
        if kind == "spearman":
            return *influence.rank_correlation(x, y), prompts
        value, psi = influence.pearson(x, y, prompts, centred=of == "score")
        return value, _undivided(psi, prompts), prompts

    return measure


def _undivided(influence: FloatArray, prompts: IntArray) -> FloatArray:
    """Return influences [N] of leaving out prompts such that sums over prompts have the variance of the jackknife.

    Those of `influence.by_leaving_out` have it by the residuals of intervals.py, which divide each by the share of the
    rows that others have.
    """
    _, index_N, size_C = np.unique(prompts, return_inverse=True, return_counts=True)
    others_C = 1 - size_C / max(prompts.size, 1)
    whole_C = np.sqrt((1 - 1 / max(size_C.size, 1)) / np.where(others_C > 0, others_C, 1.0))
    return influence * whole_C[index_N]


def _slope(pairs: Pairs, beta: float) -> Fit:
    logit = pairs.logit(beta=beta)
    return Fit(x_N=logit, y_N=pairs.label, offset_N=np.zeros_like(logit), clusters_N=pairs.prompt, value=math.nan)


def _intercept(pairs: Pairs, beta: float) -> Fit:
    logit = pairs.logit(beta=beta)
    turned = np.where(logit < 0, 1 - pairs.label, np.where(logit == 0, 0.5, pairs.label))
    return Fit(x_N=np.ones_like(logit), y_N=turned, offset_N=np.abs(logit), clusters_N=pairs.prompt, value=math.nan)


_FITS: Final[Mapping[str, Callable[[Pairs, float], Fit]]] = {
    "calibration_slope": _slope,
    "calibration_intercept": _intercept,
}
"""Coefficient of a regression -> the regression, without its value."""


def _fitted(of: Callable[[Pairs, float], Fit]) -> Measure:
    def measure(table: ScoreTable, beta: float) -> Linearised:
        pairs = table.pairs.finite
        fit = of(pairs, beta)
        found = logistic(fit.x_N[:, None], fit.y_N, offset=fit.offset_N)
        if found is None:
            return math.nan, np.zeros(pairs.label.size), pairs.prompt
        return float(found[0][0]), found[1][:, 0], pairs.prompt

    return measure


def _length_controlled(table: ScoreTable, beta: float) -> Linearised:
    decided = table.pairs.decided
    value, moved, kept = length_controlled_influence(decided)
    return value, _undivided(moved, decided.prompt[kept]), decided.prompt[kept]


def _scores(of: Callable[[Replies], FloatArray]) -> Measure:
    def measure(table: ScoreTable, beta: float) -> Linearised:
        replies = table.replies.finite
        return _of_values(of(replies), replies.prompt)

    return measure


# --- comparisons that come out the other way --------------------------------------------------------------------


def _chances_to_lose(size_N: FloatArray) -> FloatArray:
    """Return how likely comparisons are to be lost as the model has it, σ(−|logit|), in units of the largest chance."""
    with np.errstate(over="ignore"):
        surprise = np.logaddexp(0.0, np.minimum(size_N, LARGEST))
    found: FloatArray = np.exp(surprise.min() - surprise)
    return found


def _turned_loss(table: ScoreTable, beta: float) -> float:
    pairs = table.pairs.finite
    lost = replace(pairs, difference=-np.abs(pairs.difference))
    return _if_lost(lost.nll(beta=beta), pairs, beta) - float(pairs.nll(beta=beta).mean())


def _turned_brier(table: ScoreTable, beta: float) -> float:
    pairs = table.pairs.finite
    lost = replace(pairs, difference=-np.abs(pairs.difference))
    return _if_lost(_brier(lost, beta), pairs, beta) - float(_brier(pairs, beta).mean())


def _if_lost(values: FloatArray, pairs: Pairs, beta: float) -> float:
    """Return the value that all lost comparisons would have to have, to add as much to the mean and to the variance as
    those with these values [N]: Σwv²/Σwv, w their chances to lose.

    Chances are those at the temperature that fits the comparisons (`temperature_of`).
    """
    size_N = np.minimum(np.abs(beta * pairs.difference), LARGEST)
    weights_N = _chances_to_lose(size_N / temperature_of(beta * pairs.difference, pairs.label))
    # Divided by the largest, so that squares do not overflow.
    unit = float(values.max(initial=0.0)) or 1.0
    return unit * float(weights_N @ np.square(values / unit)) / float(weights_N @ (values / unit))


def _turned_area(table: ScoreTable, beta: float) -> float:
    pairs = table.pairs.decided
    lower, higher = np.minimum(pairs.preferred, pairs.other), np.maximum(pairs.preferred, pairs.other)
    above = influence.shares_below(lower, pairs.other)
    below = 1 - influence.shares_below(higher, pairs.preferred)
    chances = _chances_to_lose(np.abs(beta * pairs.difference))
    return float(np.average(above + below, weights=chances)) - 2 * _area(table, beta)[0]


_TURNED: Final[Mapping[str, Callable[[ScoreTable, float], float]]] = {
    "loss": _turned_loss,
    "brier": _turned_brier,
    "roc_auc": _turned_area,
}
"""Quantity -> by how much the influence of a comparison that comes out the other way differs from 0."""


QUANTITIES: Final[Mapping[str, Measure]] = MappingProxyType(
    {
        "accuracy": _mean(lambda pairs, beta: pairs.outcome),
        "negative_margin_rate": _mean(lambda pairs, beta: (pairs.outcome == 0).astype(np.float64)),
        "agreement": _mean(_agreement, decided=False),
        "accuracy_by_prompt": _by_prompt,
        "accuracy_length_controlled": _length_controlled,
        "loss": _mean(lambda pairs, beta: pairs.nll(beta=beta), decided=False),
        "brier": _mean(_brier, decided=False),
        "ece": _ece,
        "roc_auc": _area,
        "calibration_slope": _fitted(_slope),
        "calibration_intercept": _fitted(_intercept),
        "margin": _mean(lambda pairs, beta: pairs.difference),
        "margin_std": lambda table, beta: _deviation(table.pairs.decided.difference, table.pairs.decided.prompt),
        **{f"margin_p{percent}": _quantile(percent / 100) for percent in (5, 25, 50, 75, 95)},
        "score_mean": _scores(lambda replies: replies.score),
        "score_std": lambda table, beta: _deviation(table.replies.finite.score, table.replies.finite.prompt),
        "chosen_mean": _mean(lambda pairs, beta: pairs.preferred),
        "rejected_mean": _mean(lambda pairs, beta: pairs.other),
        **{
            f"{of}_length_{kind}": _correlated(kind, of)
            for of in ("score", "margin")
            for kind in ("pearson", "spearman")
        },
    }
)
"""Quantity -> its value and influences from score rows."""
