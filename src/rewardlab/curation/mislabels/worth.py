"""The worth of removing the flagged rows: heads fitted with and without them, judged on rows that were not cleaned.

The conversations are divided into folds. Each fold in turn is held out and never cleaned. Wrong labels are searched for
only in the other folds, so that held-out labels have no influence on what is removed. Three heads are fitted there: on
all rows, without the flagged ones, and without as many random ones. The third shows what is lost by having fewer rows.
All three have the same penalty with the same weight against the sum of the losses, as under the same prior.

If the evaluation data were cleaned too, there would be a gain whatever the flags are worth, since cleaning removes the
pairs that a model gets wrong.

Legend: N pairs, P rows, S seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import log_expit

from rewardlab.analysis import stats
from rewardlab.analysis.linear import cross_validate, fit
from rewardlab.analysis.multiple import holm
from rewardlab.analysis.paired import change_of_shares, significance_of
from rewardlab.analysis.stats import by_conversation
from rewardlab.core.bars import bar
from rewardlab.core.errors import DataError
from rewardlab.core.types import Estimate
from rewardlab.curation.mislabels.crossfit import Witness, comparisons_of, folds_of
from rewardlab.curation.mislabels.pairs import FloatArray, Pairs
from rewardlab.curation.mislabels.ranking import Rule, flagged_rows, rank

ARMS: Final = ("all rows", "without the flagged", "without as many random")
ALPHA: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The heads without the flagged rows minus other heads, on the same held-out pairs."""

    against: str
    """The other arm."""
    accuracy: Estimate
    """Change in the share of held-out pairs that are ranked as labelled."""
    loss: Estimate
    """Change in the mean negative log-likelihood of the held-out labels; below 0 is better."""
    p: float
    """Sign-flip test of the change of accuracy by root, after Holm's correction for both comparisons."""

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `none` if no effect can be shown."""
        if math.isnan(self.p) or self.p > ALPHA or self.accuracy.low <= 0 <= self.accuracy.high:
            return "none"
        return "better" if self.accuracy.value > 0 else "worse"


@dataclass(frozen=True, kw_only=True)
class Worth:
    """The effect of removing the flagged rows on a head."""

    removed: float
    """Rows removed from the training part, on average over folds and seeds."""
    trained_on: float
    """Rows of the training part, on average."""
    accuracy: Mapping[str, Estimate]
    """Arm -> accuracy on held-out pairs."""
    effects: Sequence[Effect]
    """Against all rows, and against as many random ones removed."""
    seeds: int
    folds: int

    def sentences(self) -> list[str]:
        """Return what was found, in words."""
        if not self.removed:
            return ["Nothing was flagged in the parts that heads are fitted on, so there is no effect to measure."]
        found = []
        for effect in self.effects:
            points = f"{100 * effect.accuracy.value:+.1f} points [{100 * effect.accuracy.low:+.1f}, "
            points += f"{100 * effect.accuracy.high:+.1f}]"
            others = "heads on all rows" if effect.against == ARMS[0] else "heads without as many random rows"
            told = {
                "none": f"No effect can be told against {others}: {points}. That is the usual answer.",
                "better": f"Heads without the flagged rows are better than {others}: {points}.",
                "worse": f"Heads without the flagged rows are worse than {others}: {points}. Keep the rows.",
            }
            found.append(told[effect.verdict])
        return found


def measure_worth(witnesses: Sequence[Witness], pairs: Pairs, rule: Rule, *, num_seeds: int) -> Worth:
    """Compare heads with and without the rows that are flagged, over folds and seeds.

    The head is that of the layer that predicts the labels of the training part best. Raises DataError if no witness is
    a head, and as `ranking.rank` does.
    """
    heads = [witness for witness in witnesses if witness.learns]
    if not heads:
        raise DataError("--worth fits heads on the states of a model. Name one with --model.")
    kept_N = np.logical_and.reduce([head.present_N for head in heads])
    pairs, witnesses = pairs.take(kept_N), [witness.take(kept_N) for witness in witnesses]
    margins_SAN = np.full((num_seeds, len(ARMS), len(pairs)), np.nan)
    removed, trained = [], []
    for seed in bar(range(num_seeds), title="worth of removing", unit=""):
        fold_N = folds_of(pairs, num_folds=rule.num_folds, seed=rule.seed + 1000 * (seed + 1))
        for fold in range(int(fold_N.max()) + 1):
            out_N = fold_N == fold
            margins_AM, gone, count = _arms(witnesses, pairs, out_N, rule, draw=(seed, fold))
            margins_SAN[seed][:, out_N] = margins_AM
            removed.append(gone)
            trained.append(count)
    return _judged(margins_SAN, pairs, removed=removed, trained=trained, num_folds=rule.num_folds)


def _arms(
    witnesses: Sequence[Witness], pairs: Pairs, out_N: np.ndarray, rule: Rule, *, draw: tuple[int, int]
) -> tuple[FloatArray, int, int]:
    """Return ([A, held-out pairs] margins of the heads of each arm, rows removed, rows before removing)."""
    training = pairs.take(~out_N)
    inside = [witness.take(~out_N) for witness in witnesses]
    ranking = rank(inside, training, rule)
    heads = [number for number, witness in enumerate(inside) if witness.learns]
    best = min(heads, key=lambda number: ranking.testimonies[number].loss.value)
    features_NF, held_out_MF = inside[best].differences_NF, witnesses[best].take(out_N).differences_NF
    assert features_NF is not None
    assert held_out_MF is not None
    flagged_P = flagged_rows(training, ranking.flagged_N)
    there = np.unique(training.owners_N)
    data = comparisons_of(training, features_NF)
    penalty = cross_validate(data, num_folds=rule.num_folds, seed=rule.seed).penalty
    generator = np.random.default_rng((rule.seed, 6, *draw))
    random_P = np.zeros(len(flagged_P), dtype=bool)
    random_P[generator.permutation(there)[: int(flagged_P.sum())]] = True
    gone_AN = np.stack([np.zeros(len(training), bool), *(mask[training.owners_N] for mask in (flagged_P, random_P))])
    weights_NA = data.weights[:, None] * ~gone_AN.T
    # The penalty was chosen with one fold held out, and weighs as much against the sum of the losses in every arm.
    reference = data.weights.sum() * (1 - 1 / rule.num_folds)
    theta_FA = fit(data, weights_NA, penalty * reference / weights_NA.sum(0))
    return (held_out_MF @ theta_FA).T, int(flagged_P.sum()), len(there)


def _judged(
    margins_SAN: FloatArray, pairs: Pairs, *, removed: Sequence[int], trained: Sequence[int], num_folds: int
) -> Worth:
    """Return the arms' accuracies and their paired differences, each pair's values averaged over the seeds first."""
    towards_SAN = margins_SAN * pairs.sign_N
    right_AN, loss_AN = np.heaviside(towards_SAN, 0.5).mean(0), -log_expit(towards_SAN).mean(0)
    clusters = pairs.clusters
    tests = [significance_of(right_AN[1] - right_AN[other], clusters).p for other in (0, 2)]
    effects = [
        Effect(
            against=ARMS[other],
            accuracy=by_conversation(change_of_shares(right_AN[1] - right_AN[other], clusters)),
            loss=by_conversation(stats.mean(loss_AN[1] - loss_AN[other], clusters)),
            p=p,
        )
        for other, p in zip((0, 2), holm(tests), strict=True)
    ]
    return Worth(
        removed=float(np.mean(removed)),
        trained_on=float(np.mean(trained)),
        accuracy={
            arm: by_conversation(stats.mean_share(right_AN[number], clusters)) for number, arm in enumerate(ARMS)
        },
        effects=effects,
        seeds=len(margins_SAN),
        folds=num_folds,
    )
