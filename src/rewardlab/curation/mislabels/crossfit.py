"""A witness's testimony about each label, out of sample: held-out scores, and probabilities calibrated on other folds.

A head is fitted without the fold that it then judges. So is the temperature that turns its margins into probabilities,
though the margins for that come from heads that have seen the fold; it is one number, which a single label hardly
moves. The temperature calibrates the probabilities for the labels as they are. A probability of 0.2 therefore means: of
pairs like this one, one in five is labelled this way. That may be a mistake, or an opinion that one annotator in five
holds. If a third of all labels is wrong, even a witness that knows the truth gives no label less than a third.

Legend: N pairs, F features, K folds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.special import log_expit

from rewardlab.analysis import stats
from rewardlab.analysis.linear import Comparisons, CrossValidation, cross_validate, fold_of_prompts
from rewardlab.analysis.scaling import fit_temperature
from rewardlab.analysis.stats import by_conversation
from rewardlab.core.types import Estimate
from rewardlab.curation.mislabels.pairs import FloatArray, Pairs
from rewardlab.data.splits import Numbers

LOUDEST: Final = 20.0
"""Log odds are limited to ± this, so that one very sure witness does not outweigh all others."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Witness:
    """Something that has an opinion about pairs: a head, which learns from the other labels, or given scores."""

    name: str
    differences_NF: FloatArray | None = None
    """[N, F] for a head that is to be fitted, features of `first` minus those of `second`; NaN where missing."""
    margins_N: FloatArray | None = None
    """[N] for given scores, score of `first` minus that of `second`; NaN where missing."""

    @property
    def learns(self) -> bool:
        """Return whether it is a head, fitted to the labels."""
        return self.differences_NF is not None

    @property
    def present_N(self) -> npt.NDArray[np.bool_]:
        """[N] whether it has an opinion."""
        values = self.differences_NF if self.differences_NF is not None else self.margins_N
        assert values is not None, "a witness has features or scores"
        return np.asarray(np.isfinite(values).reshape(len(values), -1).all(1))

    def take(self, kept: npt.NDArray[Any]) -> Witness:
        """Return the witness for the pairs at these positions, or where a mask is true."""
        return replace(
            self,
            differences_NF=None if self.differences_NF is None else self.differences_NF[kept],
            margins_N=None if self.margins_N is None else self.margins_N[kept],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Testimony:
    """A witness's opinion of every label, out of sample."""

    name: str
    margin_N: FloatArray
    """[N] held-out score of `first` minus that of `second`; NaN where the witness is silent."""
    log_odds_N: FloatArray
    """[N] calibrated log odds that `first` is preferred; NaN where the witness is silent."""
    temperatures: tuple[float, ...]
    """For each fold, the temperature that was fitted without it."""
    accuracy: Estimate
    """How often it agrees with the labels, by root."""
    loss: Estimate
    """Mean negative log-likelihood of the labels, by root."""
    num_silent: int
    """Number of pairs about which the witness is silent."""

    def probability_N(self, pairs: Pairs) -> FloatArray:
        """Return [N] its probability of each label as it stands; NaN where the witness is silent."""
        found: FloatArray = np.exp(log_expit(self.log_odds_N * pairs.sign_N))
        return found


def folds_of(pairs: Pairs, *, num_folds: int, seed: int) -> Numbers:
    """Return [N] the fold of each pair; those of one root are in one fold. Raises DataError for fewer than two
    roots."""
    prompts, firsts, index_N = np.unique(pairs.prompts_N, return_index=True, return_inverse=True)
    roots_P = np.unique(pairs.roots_N[firsts], return_inverse=True)[1]
    assert len(prompts) == len(roots_P)
    folds: Numbers = fold_of_prompts(roots_P, num_folds, seed)[index_N]
    return folds


def comparisons_of(pairs: Pairs, differences_NF: FloatArray) -> Comparisons:
    """Return pairs with features as the data of a linear model."""
    _, firsts, index_N = np.unique(pairs.prompts_N, return_index=True, return_inverse=True)
    return Comparisons(
        differences=differences_NF,
        labels=pairs.label_N,
        margins=pairs.margin_N,
        weights=pairs.weight_N,
        prompts=index_N,
        prompt_keys=tuple(map(str, pairs.prompts_N[firsts].tolist())),
        roots=np.unique(pairs.roots_N[firsts], return_inverse=True)[1],
    )


def hear(witness: Witness, pairs: Pairs, *, num_folds: int, seed: int) -> Testimony:
    """Return a witness's testimony about each label, by heads and temperatures that were fitted without its fold.

    Raises DataError for fewer than two roots, or if a fit does not converge.
    """
    margin_N = np.full(len(pairs), np.nan)
    present_N = witness.present_N
    if witness.learns:
        # Without a copy of the features where none is missing, as is usual.
        own, heard = (witness, pairs) if present_N.all() else (witness.take(present_N), pairs.take(present_N))
        assert own.differences_NF is not None
        data = comparisons_of(heard, own.differences_NF)
        margin_N[present_N] = _held_out(data, cross_validate(data, num_folds=num_folds, seed=seed))
    else:
        assert witness.margins_N is not None
        margin_N[present_N] = witness.margins_N[present_N]
    fold_N = folds_of(pairs, num_folds=num_folds, seed=seed)
    return _calibrated(witness.name, margin_N, pairs, fold_N)


def _held_out(data: Comparisons, validated: CrossValidation) -> FloatArray:
    """Return [C] the margin of each comparison by the head that was fitted without its fold; equal ones for equal
    features, unlike a product of matrices, so that duplicates keep their order."""
    fold_C, margin_C = validated.fold_P[data.prompts], np.empty(len(data.labels))
    for fold in range(validated.num_folds):
        margin_C[fold_C == fold] = (data.differences[fold_C == fold] * validated.theta_FK[:, fold]).sum(1)
    return margin_C


def _calibrated(name: str, margin_N: FloatArray, pairs: Pairs, fold_N: Numbers) -> Testimony:
    """Return a testimony from held-out margins, with a temperature for each fold fitted on the others."""
    present_N = np.isfinite(margin_N)
    scale = float(np.sqrt(np.mean(np.square(margin_N[present_N])))) if present_N.any() else 0.0
    # The temperature is sought within a fixed range, so margins are first scaled to a mean square of 1.
    unit_N = margin_N / (scale or 1.0)
    log_odds_N, temperatures = np.full(len(pairs), np.nan), []
    for fold in range(int(fold_N.max()) + 1):
        others, own = present_N & (fold_N != fold), present_N & (fold_N == fold)
        temperature = fit_temperature(unit_N[others], pairs.label_N[others]) if others.any() else 1.0
        temperatures.append(temperature * (scale or 1.0))
        log_odds_N[own] = np.clip(unit_N[own] / temperature, -LOUDEST, LOUDEST)
    towards_N = (log_odds_N * pairs.sign_N)[present_N]
    clusters = [cluster for cluster, present in zip(pairs.clusters, present_N, strict=True) if present]
    return Testimony(
        name=name,
        margin_N=margin_N,
        log_odds_N=log_odds_N,
        temperatures=tuple(temperatures),
        accuracy=by_conversation(stats.proportion(np.heaviside(towards_N, 0.5), clusters)),
        loss=by_conversation(stats.mean_loss(-log_expit(towards_N), clusters)),
        num_silent=int((~present_N).sum()),
    )


def together(testimonies: Sequence[Testimony], pairs: Pairs, *, num_folds: int, seed: int) -> Testimony:
    """Return all witnesses as one: the mean of their log odds, calibrated once more.

    A witness that is silent about a pair is left out of the mean there.
    """
    said_WN = np.stack([one.log_odds_N for one in testimonies])
    count_N = np.isfinite(said_WN).sum(0)
    sum_N = np.nansum(said_WN, axis=0)
    mean_N = np.where(count_N > 0, sum_N / np.maximum(count_N, 1), np.nan)
    return _calibrated("together", mean_N, pairs, folds_of(pairs, num_folds=num_folds, seed=seed))
