"""The sets of prompts, as far as every proxy and gold have scored them, and what had to be left out.

Legend: P prompts, K replies of one prompt, M members, R replies of all prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.ensembles import COMBINATIONS, combinations, on_one_scale
from rewardlab.analysis.intervals import FloatArray
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Estimate
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.proxies import Proxy


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """The replies to one prompt that gold and every proxy have scored."""

    key: str
    gold_K: FloatArray
    proxy_K: Mapping[str, FloatArray]
    num_texts: int
    """Different texts among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One set of prompts."""

    name: str
    replies: tuple[Replies, ...]
    """[P]"""
    num_rows: int
    """Rows that were read."""
    without_gold: int
    """Replies without a gold score, including those without a text."""
    without_proxy: int
    """Replies with a gold score that some proxy did not score."""
    too_few: int = 0
    """Rows with fewer scored replies than the largest n, which are left out."""
    causes: tuple[str, ...] = ()
    """Why proxies gave no scores, a sentence each."""

    @property
    def names(self) -> tuple[str, ...]:
        """The proxies."""
        return tuple(self.replies[0].proxy_K) if self.replies else ()

    @property
    def keys(self) -> list[str]:
        """[P] keys of prompts."""
        return [one.key for one in self.replies]

    @property
    def num_replies(self) -> float:
        """Replies to a prompt, the median."""
        return float(np.median([len(one.gold_K) for one in self.replies]))

    def texts(self) -> Estimate:
        """Return the share of replies to a prompt that are different texts, over prompts."""
        return stats.mean_share([one.num_texts / len(one.gold_K) for one in self.replies], self.keys)

    def levels(self, proxy: str) -> Estimate:
        """Return the share of replies to a prompt that a proxy gives different scores, over prompts."""
        shares = [len(np.unique(one.proxy_K[proxy])) / len(one.proxy_K[proxy]) for one in self.replies]
        return stats.mean_share(shares, self.keys)


def pool_of(name: str, rows: Sequence[GoldRow], proxies: Sequence[Proxy]) -> Pool:
    """Return the replies that gold and all proxies have scored; rows may have few of them, or none."""
    without_gold = without_proxy = 0
    found = []
    for place, row in enumerate(rows):
        gold = row.gold or (None,) * len(row.responses)
        scores = {proxy.name: proxy.scores[place] for proxy in proxies}
        has_gold = [score is not None for score in gold]
        has_all = [has and all(own[k] is not None for own in scores.values()) for k, has in enumerate(has_gold)]
        without_gold += len(gold) - sum(has_gold)
        without_proxy += sum(has_gold) - sum(has_all)
        kept = [k for k, has in enumerate(has_all) if has]
        found.append(
            Replies(
                key=row.key,
                gold_K=_numbers(gold, kept),
                proxy_K={proxy: _numbers(own, kept) for proxy, own in scores.items()},
                num_texts=len({row.responses[k] for k in kept}),
            )
        )
    return Pool(
        name=name,
        replies=tuple(found),
        num_rows=len(rows),
        without_gold=without_gold,
        without_proxy=without_proxy,
        causes=tuple(proxy.note for proxy in proxies if proxy.note),
    )


def _numbers(scores: Sequence[float | None], kept: Sequence[int]) -> FloatArray:
    return np.array([scores[k] for k in kept], dtype=np.float64)


def largest_size(pools: Sequence[Pool]) -> int:
    """Return the largest n for which nine in ten rows of every set have replies.

    Raises DataError if that is below 2.
    """
    found = min(sorted(len(one.gold_K) for one in pool.replies)[pool.num_rows // 10] for pool in pools)
    if found < 2:
        raise DataError(
            "one in ten prompts has fewer than two replies with the scores of gold and of every proxy. Sample more "
            "replies, score those that lack a score, or leave such prompts out with --most."
        )
    return found


def used(pool: Pool, most: int) -> Pool:
    """Return the set without rows of fewer than `most` replies. Raises DataError if none is left."""
    kept = tuple(one for one in pool.replies if len(one.gold_K) >= most)
    if not kept:
        longest = max((len(one.gold_K) for one in pool.replies), default=0)
        raise DataError(
            f"{pool.name}: no prompt has {most} replies with the scores of gold and of every proxy; the most is "
            f"{longest}. Lower --most, or sample more replies."
        )
    return replace(pool, replies=kept, too_few=len(pool.replies) - len(kept))


def with_ensemble(pool: Pool, members: Sequence[str], *, penalty: float) -> Pool:
    """Return the set with three more proxies, which combine the members (`ensembles.COMBINATIONS`).

    Raises ConfigError for a member that is not a proxy, and for a proxy that has the name of a combination; DataError
    as `on_one_scale`.
    """
    if unknown := [name for name in members if name not in pool.names]:
        raise ConfigError(
            f"--ensemble {unknown[0]}: there is no proxy of this name; there are {', '.join(pool.names)}."
        )
    names = {how: f"ensemble {how}" for how in COMBINATIONS}
    if taken := [name for name in names.values() if name in pool.names]:
        raise ConfigError(f"--proxies {taken[0]}=…: the ensemble has this name. Give the proxy another one.")
    scores_MR = np.stack([np.concatenate([one.proxy_K[name] for one in pool.replies]) for name in members])
    prompts_R = [str(place) for place, one in enumerate(pool.replies) for _ in one.gold_K]
    combined = combinations(on_one_scale(scores_MR, prompts_R), penalty=penalty)
    ends = np.cumsum([0, *(len(one.gold_K) for one in pool.replies)]).tolist()
    return replace(
        pool,
        replies=tuple(
            Replies(
                key=one.key,
                gold_K=one.gold_K,
                proxy_K={**one.proxy_K, **{names[how]: scores_R[start:end] for how, scores_R in combined.items()}},
                num_texts=one.num_texts,
            )
            for one, (start, end) in zip(pool.replies, pairwise(ends), strict=True)
        ),
    )
