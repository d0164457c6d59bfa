"""Ranks labels by the testimonies about them, the most suspicious first, and flags some of them.

Legend: N pairs, P preferences, W witnesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rewardlab.curation.mislabels.crossfit import Testimony, Witness, hear, together
from rewardlab.curation.mislabels.pairs import FloatArray, Pairs
from rewardlab.data.splits import Numbers

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The rule by which a label is flagged."""

    below: float
    """A witness testifies against a label whose probability it puts below this."""
    agree: int
    """How many witnesses must testify against it."""
    num_folds: int
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """All labels, with the testimony of the witnesses about each."""

    testimonies: Sequence[Testimony]
    together: Testimony
    probability_WN: FloatArray
    """[W, N] probability of each label as it stands, by each witness; NaN where the witness is silent."""
    order_N: Numbers
    """[N] pairs, the most suspicious first; those without any testimony last."""
    against_N: Numbers
    """[N] how many witnesses testify against the label."""
    flagged_N: BoolArray
    """[N] whether that is enough to flag it."""


def rank(witnesses: Sequence[Witness], pairs: Pairs, rule: Rule) -> Ranking:
    """Hear all witnesses and rank the labels. Raises DataError as `hear` does."""
    heard = [hear(witness, pairs, num_folds=rule.num_folds, seed=rule.seed) for witness in witnesses]
    joint = together(heard, pairs, num_folds=rule.num_folds, seed=rule.seed)
    probability_WN = np.stack([one.probability_N(pairs) for one in heard])
    against_N = (np.nan_to_num(probability_WN, nan=1.0) < rule.below).sum(0)
    return Ranking(
        testimonies=heard,
        together=joint,
        probability_WN=probability_WN,
        order_N=suspicion_order(joint, pairs),
        against_N=against_N,
        flagged_N=against_N >= rule.agree,
    )


def suspicion_order(testimony: Testimony, pairs: Pairs) -> Numbers:
    """Return [N] pairs by the log odds of their labels, the lowest first, those without testimony last."""
    return np.argsort(np.nan_to_num(testimony.log_odds_N * pairs.sign_N, nan=np.inf), kind="stable")


def flagged_rows(pairs: Pairs, flagged_N: BoolArray) -> BoolArray:
    """Return [P] whether a row counts as wrong, which it does if at least half of its judgements are flagged."""
    judged_P = np.bincount(pairs.owners_N, minlength=len(pairs.preferences))
    flagged_P = np.bincount(pairs.owners_N, weights=flagged_N, minlength=len(pairs.preferences))
    rows: BoolArray = (judged_P > 0) & (2 * flagged_P >= judged_P) & (flagged_P > 0)
    return rows
