"""Recall and precision of a search for labels that were flipped on purpose.

A random share of the labels is flipped in memory, everything is fitted again, and the ranking is compared with the
known flips. They are drawn evenly over easy and hard pairs. Real mistakes are on hard pairs, where witnesses are unsure
too or share the annotator's mistake, so fewer of them are found. On the other hand, labels that were wrong before count
here as false alarms. So the figures compare rankings and show what is possible at best; they do not estimate the share
of real mistakes among flagged labels.

Legend: N pairs, S seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.influence import auroc
from rewardlab.analysis.stats import by_conversation
from rewardlab.core.bars import bar
from rewardlab.core.types import Estimate
from rewardlab.curation.mislabels.crossfit import Witness
from rewardlab.curation.mislabels.pairs import FloatArray, Pairs
from rewardlab.curation.mislabels.ranking import BoolArray, Ranking, Rule, rank, suspicion_order
from rewardlab.data.splits import Numbers

DEPTHS: Final = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Shares of the pairs, from the top of the ranking, at which it is judged, in addition to the planted share."""
TOGETHER: Final = "together"
"""Name of the ranking by all witnesses."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the top of a ranking contains, over all seeds."""

    pairs: int
    """Number of pairs in the top, on average over seeds."""
    precision: Estimate
    """Share of them that were planted."""
    recall: Estimate
    """Share of the planted pairs that are among them."""


@dataclass(frozen=True, kw_only=True)
class RankedBy:
    """How well one ranking finds planted labels."""

    name: str
    at_depth: Mapping[float, Found]
    """Share of the pairs -> what is found at this depth."""
    area: Estimate
    """Probability that a planted label is ranked before one that is not, with ties as ½."""
    less: Estimate | None
    """Its precision minus that of all witnesses together, at the planted share, on the same planted labels; None for
    the ranking by all witnesses itself."""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Planted labels, and how well each ranking finds them."""

    share: float
    """Share of the labels that was flipped: the precision of a random ranking at any depth."""
    labels: int
    """Number of labels that each seed flips."""
    seeds: int
    rankings: Sequence[RankedBy]
    """The rankings, that by all witnesses together first."""
    flagged: Found
    """The labels that the rule flags."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Draw:
    """One seed: which labels were flipped, and the rankings."""

    wrong_N: BoolArray
    orders: Mapping[str, Numbers]
    suspicion: Mapping[str, FloatArray]
    """Ranking -> [N] minus the log odds of the label."""
    flagged_N: BoolArray


def plant(witnesses: Sequence[Witness], pairs: Pairs, rule: Rule, *, share: float, num_seeds: int) -> Planted:
    """Flip a share of the labels, `num_seeds` times with other draws, and judge the rankings by what they find.

    Raises DataError as `ranking.rank` does.
    """
    seeds = bar(range(num_seeds), title="planted labels", unit="")
    draws = [_draw(witnesses, pairs, rule, share=share, seed=seed) for seed in seeds]
    clusters_N = np.array(pairs.clusters)
    names = list(draws[0].orders)
    depths = sorted({*DEPTHS, share})
    rankings = []
    for name in names:
        found = {
            depth: _found(draws, [_top(draw.orders[name], depth) for draw in draws], clusters_N) for depth in depths
        }
        rankings.append(
            RankedBy(
                name=name,
                at_depth=found,
                area=_area(draws, name, pairs),
                less=None if name == TOGETHER else _less(draws, name, share, clusters_N),
            )
        )
    return Planted(
        share=share,
        labels=int(draws[0].wrong_N.sum()),
        seeds=num_seeds,
        rankings=rankings,
        flagged=_found(draws, [draw.flagged_N for draw in draws], clusters_N),
    )


def _draw(witnesses: Sequence[Witness], pairs: Pairs, rule: Rule, *, share: float, seed: int) -> _Draw:
    wrong_N = np.zeros(len(pairs), dtype=bool)
    count = max(1, round(share * len(pairs)))
    wrong_N[np.random.default_rng((rule.seed, 5, seed)).permutation(len(pairs))[:count]] = True
    planted = pairs.turned_round(wrong_N)
    ranking = rank(witnesses, planted, rule)
    orders = dict(_orders(ranking, planted))
    heard = {TOGETHER: ranking.together, **{one.name: one for one in ranking.testimonies}}
    suspicion = {
        name: -np.nan_to_num(one.log_odds_N * planted.sign_N, nan=np.inf, posinf=np.inf) for name, one in heard.items()
    }
    return _Draw(wrong_N=wrong_N, orders=orders, suspicion=suspicion, flagged_N=ranking.flagged_N)


def _orders(ranking: Ranking, pairs: Pairs) -> Iterator[tuple[str, Numbers]]:
    yield TOGETHER, ranking.order_N
    for testimony in ranking.testimonies:
        yield testimony.name, suspicion_order(testimony, pairs)


def _top(order_N: Numbers, depth: float) -> BoolArray:
    """Return [N] whether a pair is among the first `depth` of the ranking."""
    top_N = np.zeros(len(order_N), dtype=bool)
    top_N[order_N[: max(1, round(depth * len(order_N)))]] = True
    return top_N


def _found(draws: Sequence[_Draw], tops: Sequence[BoolArray], clusters_N: np.ndarray) -> Found:
    """Return precision and recall over all draws, with intervals by root, since each root has pairs in every draw."""
    named = [(draw.wrong_N[top_N], clusters_N[top_N]) for draw, top_N in zip(draws, tops, strict=True)]
    wrong = [(top_N[draw.wrong_N], clusters_N[draw.wrong_N]) for draw, top_N in zip(draws, tops, strict=True)]
    return Found(
        pairs=round(sum(int(top_N.sum()) for top_N in tops) / len(tops)),
        precision=_share(named),
        recall=_share(wrong),
    )


def _share(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Estimate:
    outcomes = np.concatenate([outcome for outcome, _ in parts]).astype(float)
    return by_conversation(stats.proportion(outcomes, np.concatenate([clusters for _, clusters in parts]).tolist()))


def _area(draws: Sequence[_Draw], name: str, pairs: Pairs) -> Estimate:
    values = np.concatenate([draw.suspicion[name] for draw in draws])
    wrong = np.concatenate([draw.wrong_N for draw in draws])
    return by_conversation(auroc(values, wrong, np.tile(pairs.roots_N, len(draws))))


def _less(draws: Sequence[_Draw], name: str, depth: float, clusters_N: np.ndarray) -> Estimate:
    """Return the precision of a ranking minus that of all witnesses, paired, since both name equally many pairs."""
    values, clusters = [], []
    for draw in draws:
        own_N, all_N = (_top(draw.orders[which], depth) & draw.wrong_N for which in (name, TOGETHER))
        # The mean over all pairs, times N over the number of named ones, is the difference of the two precisions.
        scale = len(own_N) / max(1, round(depth * len(own_N)))
        values.append(scale * (own_N.astype(float) - all_N.astype(float)))
        clusters += clusters_N.tolist()
    return by_conversation(stats.mean_with_ties(np.concatenate(values), clusters))
