"""The noise ceiling: how often a perfect model would agree with single labels, found from the data alone.

Legend: N judgements, U pairs of replies that were judged several times, C clusters (prompts).

For a pair, let p be the probability that one more judge prefers the first reply, and t = |2p − 1|. A model that knows
p is right with probability max(p, 1 − p) = (1 + t)/2, so the ceiling is c = (1 + E t)/2. The votes of a few judges do
not give p: the larger share of their votes is above max(p, 1 − p) on average. But two votes on a pair agree with
probability p² + (1 − p)² = (1 + t²)/2, without bias, so E t² is known. From that follow

    bounds      E t² ≤ E t ≤ √(E t²), whatever the distribution of p: pairs that are either certain or coin tosses give
                the first, pairs that are all equally noisy the second;
    a value     between them, for p from a symmetric beta distribution, which E t² determines.

The interval of a ceiling from votes is that of the agreement, carried through the bounds: it holds the truth whichever
distribution p has (benchmarks/ceiling_coverage.py).

Shares whose numbers of votes are not known, and differ, bound the agreement too: that of a share s of n votes is
estimated by (n·x − 1)/(n − 1) with x = s² + (1 − s)², the more votes the higher, from the fewest that give s up to x.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import betaln
from scipy.stats import binomtest

from rewardlab.analysis import stats
from rewardlab.analysis.intervals import FloatArray
from rewardlab.core.types import Comparison, Estimate, Preference, ScoreRow, TokenGroup

IntArray = npt.NDArray[np.int64]
Origin = Literal[
    "repeats",
    "label votes",
    "mixed label votes",
    "soft labels",
    "strength votes",
    "mixed strength votes",
    "strengths",
    "other rows",
]
WORDS: Final[dict[Origin, str]] = {
    "repeats": "pairs that were judged several times",
    "label votes": "soft labels, which are all shares of {votes} votes",
    "mixed label votes": "soft labels, which are shares of different numbers of votes",
    "soft labels": "soft labels",
    "strength votes": "strengths, which are all shares of {votes} votes",
    "mixed strength votes": "strengths, which are shares of different numbers of votes",
    "strengths": "strengths from 0.5 to 1",
    "other rows": "pairs that were judged again in other rows",
}
"""Origin -> its name in words, the most trustworthy first."""
ASSUMPTIONS: Final[dict[Origin, str]] = {
    "repeats": "judges vote independently, and pairs judged several times are like the others",
    "label votes": "each label is the share of so many independent votes, and not a probability that is rounded",
    "strength votes": "each strength is the share of so many independent votes, and not a probability that is rounded",
    "mixed label votes": "each label is the share of a few independent votes, and not a probability that is rounded; "
    "how many they were is not known",
    "mixed strength votes": "each strength is the share of a few independent votes, and not a probability that is "
    "rounded; how many they were is not known",
    "other rows": "judges vote independently, and none of these rows is a copy of another, which would always agree",
    "soft labels": "each label is the probability that a single judge prefers the reply; shares of few votes are too "
    "sure, and with them the ceiling is too high",
    "strengths": "each strength is the probability that a single judge prefers the better reply; shares of few votes "
    "are too sure, and with them the ceiling is too high",
}
SOFT_SHARE: Final = 0.1
"""Least share of labels strictly between 0 and 1, and not ½, at which all labels are read as probabilities. With fewer,
a label of 0 or 1 need not be certain: it may be a plain label, about which nothing more is known."""
MOST_VOTES: Final = 9
"""Largest number of votes that is recognised by its shares: with more votes, some share is close to any number."""
MOST_MIXED: Final = 5
"""The same for shares of different numbers of votes, of which more values are near some share."""
SURE_MIXED: Final = 0.01
"""Level at which shares of one number of votes are found to be too often near ½ for it."""
NEAR: Final = 0.006
"""How far a share may be from that of whole votes: 0.67 is 2 of 3."""
FROM_VOTES: Final = "agreement of two judgements, within the bounds of any distribution"
FROM_MIXED: Final = "agreement of two judgements for any number of votes, within the bounds of any distribution"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What a perfect model would reach, and where that is known from."""

    origin: Origin
    accuracy: Estimate
    """Share of single labels with which a model that knows every probability agrees."""
    agreement: Estimate | None
    """Share of pairs of judgements of the same pair that agree; None where there are no votes of a known number."""
    num_judgements: int
    """Judgements, or labels, behind it."""
    votes: int | None = None
    """Number of votes of which the labels or strengths are shares; None if they are not, or of different numbers."""

    @property
    def source(self) -> str:
        """Where the ceiling is from, in words."""
        return WORDS[self.origin].format(votes=self.votes)

    @property
    def assumption(self) -> str:
        """What the ceiling takes for granted, in words."""
        return ASSUMPTIONS[self.origin]

    @property
    def is_known(self) -> bool:
        """Whether there was enough for an interval."""
        return not math.isnan(self.accuracy.low)

    @property
    def of_agreement(self) -> bool:
        """Whether it bounds the agreement with single judges, where labels or strengths say what most judges prefer.

        Accuracy counts the side of the majority as right, so there a perfect model reaches 1.
        """
        return self.origin not in ("repeats", "other rows")

    @property
    def of_strengths(self) -> bool:
        """Whether it is from strengths, the labels being hard."""
        return self.origin in ("strengths", "strength votes", "mixed strength votes")


def from_votes(
    pairs_N: IntArray, first_N: npt.NDArray[np.bool_], clusters_N: Sequence[str], *, origin: Origin = "repeats"
) -> Ceiling | None:
    """Return the ceiling from votes [N] for the first reply or the other of the pairs in `pairs_N`.

    Leave tied votes out before. Each pair counts with its number of votes, as it does in the accuracy against them.
    None if no pair has two votes.
    """
    _, first_U, pair_N, sizes_U = np.unique(pairs_N, return_index=True, return_inverse=True, return_counts=True)
    won_U = np.bincount(pair_N, first_N.astype(np.float64), minlength=len(sizes_U)).astype(np.float64)
    judged = sizes_U >= 2
    if not judged.any():
        return None
    won, size = won_U[judged], sizes_U[judged].astype(np.float64)
    keys = [clusters_N[index] for index in first_U[judged]]
    return _from_counts(won, size, keys, origin=origin, num_judgements=int(size.sum()))


def _from_counts(
    won_U: FloatArray, size_U: FloatArray, keys: Sequence[str], *, origin: Origin, num_judgements: int
) -> Ceiling:
    """Return the ceiling from pairs with `won_U` of `size_U` votes for one reply."""
    lost_U = size_U - won_U
    agreeing_U = (won_U * (won_U - 1) + lost_U * (lost_U - 1)) / (size_U * (size_U - 1))
    agreeing_U = np.clip(agreeing_U, 0.0, 1.0)
    if len(keys) and (size_U != size_U[0]).any():
        # An accuracy counts each judgement once, so a pair that many judged weighs more in it.
        times_U = size_U.astype(np.int64)
        repeated = [key for key, times in zip(keys, times_U.tolist(), strict=True) for _ in range(times)]
        agreement = stats.mean_share(np.repeat(agreeing_U, times_U), repeated)
    else:
        agreement = stats.mean_share(agreeing_U, keys)
    accuracy = replace(
        agreement,
        value=accuracy_from_agreement(agreement.value),
        low=lowest_accuracy(agreement.low),
        high=highest_accuracy(agreement.high),
        method=agreement.method if math.isnan(agreement.low) else FROM_VOTES,
    )
    return Ceiling(origin=origin, accuracy=accuracy, agreement=agreement, num_judgements=num_judgements)


def from_probabilities(
    sure_N: FloatArray, clusters_N: Sequence[str], *, origin: Literal["soft labels", "strengths"]
) -> Ceiling:
    """Return the ceiling from the probabilities [N], at least ½, that a judge prefers the more probable reply.

    Where all of them are shares of a few votes they are taken as votes, since such shares are too sure.
    """
    votes, fewest_N = num_votes(sure_N), _fewest_votes(sure_N)
    if fewest_N is not None and (votes is None or _too_even(sure_N, fewest_N, votes)):
        return _from_mixed(sure_N, fewest_N, clusters_N, of_labels=origin == "soft labels")
    if votes is not None:
        size_N = np.full(len(sure_N), float(votes))
        kind: Origin = "label votes" if origin == "soft labels" else "strength votes"
        found = _from_counts(
            np.rint(sure_N * votes), size_N, clusters_N, origin=kind, num_judgements=votes * len(sure_N)
        )
        return replace(found, votes=votes)
    accuracy = stats.mean_share(sure_N, clusters_N)
    return Ceiling(origin=origin, accuracy=accuracy, agreement=None, num_judgements=len(sure_N))


def num_votes(shares_N: FloatArray) -> int | None:
    """Return the smallest number of votes, from 2 to `MOST_VOTES`, of which all these are shares, or None."""
    for votes in range(2, MOST_VOTES + 1):
        if (np.abs(np.rint(shares_N * votes) / votes - shares_N) <= NEAR).all():
            return votes
    return None


def _fewest_votes(shares_N: FloatArray) -> FloatArray | None:
    """Return [N] the smallest number of votes, from 2 to `MOST_MIXED`, of which each is a share; None if one is not."""
    fewest_N = np.full(len(shares_N), math.inf)
    for votes in range(MOST_MIXED, 1, -1):
        fewest_N[np.abs(np.rint(shares_N * votes) / votes - shares_N) <= NEAR] = votes
    return fewest_N if np.isfinite(fewest_N).all() else None


def _too_even(sure_N: FloatArray, fewest_N: FloatArray, votes: int) -> bool:
    """Return whether shares are too often near ½ to be all of so many votes, and some may be of fewer.

    Of n votes k and n − k come out with C(n, k)·E[pᵏqⁿ⁻ᵏ + qᵏpⁿ⁻ᵏ], of which the expectation falls from k = n to n/2
    whatever the distribution of p is. Shares of fewer votes may be nearer to ½ than that.
    """
    if not ((fewest_N < votes) & (sure_N < 1)).any():
        return False
    won_N, least = np.rint(sure_N * votes).astype(np.int64), (votes + 1) // 2
    seen = [int((won_N == won).sum()) for won in range(least, votes + 1)]
    ways = [math.comb(votes, won) * (1 if 2 * won == votes else 2) for won in range(least, votes + 1)]
    p_values = [
        float(binomtest(outer, outer + inner, outer_ways / (outer_ways + inner_ways), alternative="less").pvalue)
        for (inner, outer), (inner_ways, outer_ways) in zip(pairwise(seen), pairwise(ways), strict=True)
        if outer + inner
    ]
    return min(p_values) * len(p_values) <= SURE_MIXED


def _from_mixed(sure_N: FloatArray, fewest_N: FloatArray, clusters_N: Sequence[str], *, of_labels: bool) -> Ceiling:
    """Return the ceiling from shares of unknown numbers of votes, at least `fewest_N`."""
    alike_N = np.square(sure_N) + np.square(1 - sure_N)
    least = stats.mean_share(np.clip((fewest_N * alike_N - 1) / (fewest_N - 1), 0.0, 1.0), clusters_N)
    accuracy = replace(
        least,
        value=accuracy_from_agreement(least.value),
        low=lowest_accuracy(least.low),
        high=highest_accuracy(stats.mean_share(alike_N, clusters_N).high),
        method=least.method if math.isnan(least.low) else FROM_MIXED,
    )
    origin: Origin = "mixed label votes" if of_labels else "mixed strength votes"
    return Ceiling(origin=origin, accuracy=accuracy, agreement=None, num_judgements=len(sure_N))


def accuracy_from_agreement(agreement: float) -> float:
    """Return the ceiling where p has a symmetric beta distribution, from the probability that two judges agree.

    Beta(a, a) has E t² = 1/(2a + 1) and E t = 2 / (a·4^a·B(a, a)). An agreement below ½ counts as ½.
    """
    square = max(2 * agreement - 1, 0.0)
    if not 0 < square < 1:
        return (1 + square) / 2 if not math.isnan(agreement) else math.nan
    shape = (1 / square - 1) / 2
    # Beyond this the normal limit of the beta distribution is exact to twelve digits.
    if shape > 1e12:
        return 0.5 + math.sqrt(2 * square / math.pi) / 2
    return 0.5 + math.exp(-math.log(shape) - shape * math.log(4) - float(betaln(shape, shape)))


def lowest_accuracy(agreement: float) -> float:
    """Return the lowest ceiling with this agreement of two judges: pairs are either certain or coin tosses."""
    return agreement if math.isnan(agreement) else max(agreement, 0.5)


def highest_accuracy(agreement: float) -> float:
    """Return the highest ceiling with this agreement of two judges: all pairs are equally noisy."""
    return agreement if math.isnan(agreement) else (1 + math.sqrt(max(2 * agreement - 1, 0.0))) / 2


def from_labels(labels_N: FloatArray, clusters_N: Sequence[str]) -> Ceiling | None:
    """Return the ceiling from soft labels [N], ties included; None where nearly all are 0, ½ or 1."""
    soft = (labels_N > 0) & (labels_N < 1) & (labels_N != 0.5)
    if not soft.any() or soft.mean() < SOFT_SHARE:
        return None
    return from_probabilities(np.maximum(labels_N, 1 - labels_N), clusters_N, origin="soft labels")


def from_strengths(strengths_N: FloatArray, clusters_N: Sequence[str]) -> Ceiling | None:
    """Return the ceiling from the strengths [N] of judgements that are not ties; None unless they may be probabilities.

    They may if all lie from ½ to 1, and not all are 1. NaN is a judgement without a strength.
    """
    if not len(strengths_N) or not ((strengths_N >= 0.5) & (strengths_N <= 1)).all() or (strengths_N == 1).all():
        return None
    return from_probabilities(strengths_N, clusters_N, origin="strengths")


def of_score_rows(rows: Iterable[ScoreRow]) -> Ceiling | None:
    """Return the ceiling from the judgements in score rows, as `of_judgements` does."""
    return of_judgements(
        ((row.source, row.preference_id), row.prompt_key, one) for row in rows for one in row.comparisons
    )


def of_groups(groups: Iterable[TokenGroup]) -> Ceiling | None:
    """Return the ceiling from the judgements of preferences as tokens, as `of_judgements` does."""
    return of_judgements(
        ((group.source, group.preference_id), group.prompt_key, one) for group in groups for one in group.comparisons
    )


def of_preferences(preferences: Iterable[Preference]) -> Ceiling | None:
    """Return the ceiling from the judgements of preferences, as `of_judgements` does."""
    return of_judgements(((one.source, one.id), one.key, judged) for one in preferences for judged in one.comparisons)


def of_judgements(judgements: Iterable[tuple[Hashable, str, Comparison]]) -> Ceiling | None:
    """Return the ceiling from judgements, each as (what names its preference, its prompt, the comparison).

    It is from several judgements of the same two replies, else from soft labels, else from strengths; None if there
    are none of these, or too few for an interval. Replies are identified by their place in the preference, so the same
    two texts in another preference are another pair.
    """
    labels: list[float] = []
    strengths: list[float] = []
    keys: list[str] = []
    pairs: list[int] = []
    numbers: dict[tuple[Hashable, int, int], int] = {}
    for name, prompt_key, one in judgements:
        low, high = sorted((one.first, one.second))
        pairs.append(numbers.setdefault((name, low, high), len(numbers)))
        labels.append(oriented_label(one))
        strengths.append(math.nan if one.strength is None else one.strength)
        keys.append(prompt_key)
    label_N = np.array(labels, dtype=np.float64)
    decided_N = label_N != 0.5
    voters = [key for key, keep in zip(keys, decided_N, strict=True) if keep]
    if len(numbers) < len(pairs):
        found = from_votes(np.array(pairs, dtype=np.int64)[decided_N], label_N[decided_N] > 0.5, voters)
        if found is not None and found.is_known:
            return found
    soft = from_labels(label_N, keys)
    if soft is not None and soft.is_known:
        return soft
    strong = from_strengths(np.array(strengths, dtype=np.float64)[decided_N], voters)
    return strong if strong is not None and strong.is_known else None


def oriented_label(one: Comparison) -> float:
    """Return the probability that the reply with the lower index is preferred."""
    return one.label if one.first < one.second else 1 - one.label
