"""Best-of-n curves: what the best of n replies is worth, by the reward model that picks it and by a second judge.

Each prompt has K scored replies. For n ≤ K the curve is the mean, over all subsets of n replies, of the score of the
reply that is picked from the subset: an unbiased estimate of picking from n new replies. Nothing is drawn. With the
replies in rising order, reply i (counted from 1) is the best of C(i − 1, n − 1) of the C(K, n) subsets.

Legend: P prompts, K replies of one prompt, N sizes (1 to N).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rewardlab.analysis import stats
from rewardlab.analysis.intervals import FloatArray
from rewardlab.core.errors import DataError
from rewardlab.core.terminal import number_of
from rewardlab.core.types import Estimate

Scores = Sequence[float | None] | npt.NDArray[np.floating]
"""One score for each reply to a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What picking the best of n replies is worth; intervals are over prompts."""

    n: int
    proxy: Estimate
    """Expected score of the reply that is picked, by the model that picks it."""
    proxy_gain: Estimate
    """The same minus that of a single reply, prompt by prompt."""
    gold: Estimate | None
    """Expected gold score of the reply that the proxy picks; None without gold scores."""
    gold_gain: Estimate | None
    kl_bound: float
    """Nats: see `kl_upper_bound`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The scored replies to one prompt."""

    prompt: str
    """A name for messages; prompts of equal names are one prompt in the intervals."""
    proxy_K: Scores
    gold_K: Scores | None = None


def kl_upper_bound(n: int) -> float:
    """Return log n − (n − 1)/n in nats, an upper bound on the KL divergence of best-of-n from the policy it draws from.

    It is the divergence itself only in the limit where no two draws are ever equal, as for continuous outcomes; where
    replies repeat or are tied the divergence is smaller, in whatever way ties are broken at random. Source of the
    bound: Beirami et al. (2024), arXiv 2401.01879. The formula stood in earlier work as the divergence: Stiennon et
    al. (2020), arXiv 2009.01325; Gao et al. (2022), arXiv 2210.10760.
    """
    assert n >= 1, f"the best of {n} replies"
    return math.log(n) - (n - 1) / n


def picked(proxy_K: FloatArray, gold_K: FloatArray, *, most: int) -> FloatArray:
    """Return [N], N = most ≤ K: the mean of `gold_K` over the replies that the proxy picks from all subsets of n.

    Replies with the same proxy score are equally likely to be picked, so each has the mean gold score of all of them.
    """
    assert 1 <= most <= len(proxy_K) == len(gold_K)
    order = np.argsort(proxy_K, kind="stable")
    gold_K = gold_K[order]
    _, first, tied_K, sizes = np.unique(proxy_K[order], return_index=True, return_inverse=True, return_counts=True)
    # The mean of a tie is taken about its first entry, so that the mean of equal numbers is exactly that number.
    first_K = gold_K[first][tied_K]
    gold_K = first_K + (np.bincount(tied_K, gold_K - first_K) / sizes)[tied_K]
    # Distances below the largest are summed, so that equal scores, and the best of all K, come out without rounding.
    # The proxy's own curve cannot fall by rounding either: the distance shrinks by a part of 1/K or more with each n.
    top = gold_K.max()
    below_K = top - gold_K
    return np.array([top - weights_K @ below_K for weights_K in _weights(len(gold_K), most)])


@lru_cache(maxsize=2)
def _weights(num_replies: int, most: int) -> FloatArray:
    """Return [N, K], for n = 1 to `most`, C(i − 1, n − 1)/C(K, n) for the replies i = 1 to K.

    Each row is that of n − 1 times ((i − n + 1)/(K − n + 1)) · (n/(n − 1)): no factorial and no difference of large
    numbers, so a weight is right to about 3n units of rounding, or 0 where it is too small for a float.
    """
    rank_K = np.arange(1, num_replies + 1)
    weights_NK = np.empty((most, num_replies))
    weights_NK[0] = 1 / num_replies
    for n in range(2, most + 1):
        weights_NK[n - 1] = weights_NK[n - 2] * (np.maximum(rank_K - n + 1, 0) / (num_replies - n + 1)) * (n / (n - 1))
    weights_NK.flags.writeable = False
    return weights_NK


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """What the best of n replies is worth for each prompt alone; the estimates are means over them."""

    prompts: tuple[str, ...]
    """[P] names of prompts, by which intervals are made."""
    proxy_PN: FloatArray
    """Expected score of the reply that is picked, for n = 1 to N."""
    gold_PN: FloatArray | None
    """Expected gold score of the same reply; None without gold scores."""


def curves_of(candidates_P: Sequence[Candidates], *, most: int | None = None) -> Curves:
    """Return each prompt's curve for n = 1, 2, …: up to the fewest replies that a prompt has, or `most` if smaller.

    All replies of a prompt are used, also where another prompt has fewer.

    Raises DataError naming the prompt for a score that is missing or not finite, for replies without gold scores where
    other prompts have them, and for a prompt without replies; and if there are no prompts.
    """
    if not candidates_P:
        raise DataError("a best-of-n curve needs prompts with scored replies; got none.")
    proxy_PK = [_finite(one.prompt, "score", one.proxy_K) for one in candidates_P]
    has_gold = any(one.gold_K is not None for one in candidates_P)
    gold_PK = [_gold(one) for one in candidates_P] if has_gold else None
    num = min([len(proxy_K) for proxy_K in proxy_PK] + ([] if most is None else [most]))
    assert num >= 1, f"most={most}: the best of one reply is the least"
    return Curves(
        prompts=tuple(one.prompt for one in candidates_P),
        proxy_PN=np.stack([picked(proxy_K, proxy_K, most=num) for proxy_K in proxy_PK]),
        gold_PN=None
        if gold_PK is None
        else np.stack([picked(*scores_K, most=num) for scores_K in zip(proxy_PK, gold_PK, strict=True)]),
    )


def best_of_n(candidates_P: Sequence[Candidates], *, most: int | None = None, level: float = 0.95) -> tuple[Point, ...]:
    """Return the means over prompts of their curves, as `points_of`. Raises as `curves_of` does."""
    return points_of(curves_of(candidates_P, most=most), level=level)


def points_of(curves: Curves, *, level: float = 0.95) -> tuple[Point, ...]:
    """Return the means of curves over prompts, for n = 1, 2, … as far as the curves go.

    Intervals are of the mean over prompts (`stats.mean_with_ties`), so there is none below ten prompts, nor where fewer
    than five prompts differ from the others. The gain of a single reply over itself is exactly 0.
    """
    num = curves.proxy_PN.shape[1]
    proxy, proxy_gain = _estimates(curves.proxy_PN, curves.prompts, level)
    gold: Sequence[Estimate | None] = [None] * num
    gold_gain = gold
    if curves.gold_PN is not None:
        gold, gold_gain = _estimates(curves.gold_PN, curves.prompts, level)
    return tuple(
        Point(
            n=n + 1,
            proxy=proxy[n],
            proxy_gain=proxy_gain[n],
            gold=gold[n],
            gold_gain=gold_gain[n],
            kl_bound=kl_upper_bound(n + 1),
        )
        for n in range(num)
    )


def _estimates(curves_PN: FloatArray, prompts: Sequence[str], level: float) -> tuple[list[Estimate], list[Estimate]]:
    """Return for each n the mean over prompts, and that of the difference from n = 1."""
    values = [stats.mean_with_ties(curve_P, prompts, level=level) for curve_P in curves_PN.T]
    first = stats.mean(np.zeros(len(curves_PN)), prompts, level=level)
    gains = [stats.mean_with_ties(curve_P - curves_PN[:, 0], prompts, level=level) for curve_P in curves_PN.T[1:]]
    gains = [first, *gains]
    return values, gains


def _finite(prompt: str, what: str, scores_K: Scores) -> FloatArray:
    """Return scores as an array [K]. Raises DataError naming the prompt if there are none, or one is not finite."""
    found_K = np.array([math.nan if score is None else score for score in scores_K], dtype=np.float64)
    if not found_K.size:
        raise DataError(f"prompt {prompt!r:.200}: it has no replies. Leave it out, or sample replies to it.")
    if wrong := np.flatnonzero(~np.isfinite(found_K)).tolist():
        raise DataError(
            f"prompt {prompt!r:.200}: the {what} of reply {wrong[0]} (counted from 0) is {scores_K[wrong[0]]}; wanted "
            f"a finite number for each of its {number_of(found_K.size, 'reply')}. Score it again, or leave "
            f"the reply out."
        )
    return found_K


def _gold(one: Candidates) -> FloatArray:
    """Return the gold scores [K]. Raises DataError naming the prompt if they are not as many as the replies."""
    if one.gold_K is None or len(one.gold_K) != len(one.proxy_K):
        got = "none" if one.gold_K is None else str(len(one.gold_K))
        raise DataError(
            f"prompt {one.prompt!r:.200}: it has {number_of(len(one.proxy_K), 'reply')} and {got} of their "
            f"gold scores; wanted one "
            f"for each, as other prompts have them."
        )
    return _finite(one.prompt, "gold score", one.gold_K)
