"""Runs `rewardlab gold curve`: rows and scores, the curves of every proxy over every set, and what they say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rewardlab.analysis.best_of_n import Candidates, Curves, curves_of
from rewardlab.analysis.overoptimisation import (
    Contrast,
    Overoptimisation,
    adjusted,
    contrasts,
    judge,
    within_spread,
)
from rewardlab.analysis.stats import MIN_CLUSTERS
from rewardlab.core.errors import DataError
from rewardlab.core.types import Estimate
from rewardlab.core.values import require
from rewardlab.gold.curving.config import CurveConfig
from rewardlab.gold.curving.pools import Pool, largest_size, pool_of, used, with_ensemble
from rewardlab.gold.curving.sizes import Sizes, sizes_of
from rewardlab.gold.files.inputs import InputConfig
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.proxies import named_sources, pinned, proxy_scores

IN, OUT = "in distribution", "out of distribution"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """What a report says about one set of prompts."""

    name: str
    num_rows: int
    num_used: int
    num_prompts: int
    """Different prompts among the rows that are used."""
    without_gold: int
    without_proxy: int
    too_few: int
    replies: float
    """Replies to a prompt, the median; above half as many a point depends on the one or two best."""
    texts: Estimate
    """Share of replies to a prompt that are different texts."""
    levels: dict[str, Estimate]
    """Proxy, without ensembles -> share of replies to a prompt that have different scores."""
    gold_spread: float
    """Standard deviation of gold within prompts: what a gain of 1 is worth."""
    overlap: int = 0
    """Prompts that are in the first set too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything that a report says."""

    sets: tuple[PromptSet, ...]
    curves: tuple[Overoptimisation, ...]
    """Curves of every proxy, set by set."""
    contrasts: tuple[Contrast, ...]
    most: int
    notes: tuple[str, ...]
    sizes: Sizes = field(default_factory=dict)
    """Sizes of the proxies, the smallest first; ensembles have none."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """Proxy -> where its scores are from: a folder, a file, or a hub name with its commit."""

    def label(self, proxy: str) -> str:
        """Return the name of a proxy, with its size if that is known."""
        size = self.sizes.get(proxy)
        return proxy if size is None else f"{proxy} ({size})"

    def of(self, name: str) -> list[Overoptimisation]:
        """Return the curves over one set."""
        return [one for one in self.curves if one.prompts == name]


def curve(config: CurveConfig) -> Result:
    """Return the curves. Scores that are computed are kept in the folder of the results.

    Raises ConfigError and DataError for files that are not there or do not belong together, as `read_gold_rows` and
    `proxy_scores`, and for rows without enough scored replies.
    """
    named = named_sources(pinned(config.curving.proxies))
    sizes = sizes_of(named, config.curving.sizes)
    ordered = {name: named[name] for name in sizes}
    sources = (tuple(f"{name}={what}" for name, what in ordered.items()), _for_ood(config, ordered))
    pools = [_read(*one, config) for one in zip((IN, OUT), inputs_of(config), sources, strict=False)]
    return replace(curve_of(pools, config, sizes), sources=ordered)


def curve_of(pools: Sequence[Pool], config: CurveConfig, sizes: Sizes | None = None) -> Result:
    """Return the curves over sets that are read; `curve` reads them."""
    settings = config.curving
    most = settings.most or largest_size(pools)
    pools = [used(pool, most) for pool in pools]
    names = pools[0].names
    if settings.ensemble:
        pools = [with_ensemble(pool, settings.ensemble, penalty=settings.penalty) for pool in pools]
    every = {pool.name: {name: _curves(pool, name, most) for name in pool.names} for pool in pools}
    judged = []
    for pool in pools:
        for name, curves in every[pool.name].items():
            scale = within_spread([one.proxy_K[name] for one in pool.replies])
            judged.append(judge(curves, proxy=name, prompts=pool.name, scale=scale, seed=settings.seed))
    found = adjusted(judged)
    first = set(pools[0].keys)
    sets = tuple(_described(pool, names, 0 if pool is pools[0] else len(first & set(pool.keys))) for pool in pools)
    return Result(
        sets=sets,
        curves=tuple(found),
        contrasts=tuple(contrasts(every)),
        most=most,
        sizes=sizes or {},
        notes=(*_notes(sets, most), *(f"{pool.name}: {why}" for pool in pools for why in pool.causes)),
    )


def inputs_of(config: CurveConfig) -> list[InputConfig]:
    """Return where the rows of each set are."""
    ood = config.curving.ood
    return [
        config.rows,
        *([InputConfig(input=ood, num_responses=config.rows.num_responses, system=config.rows.system)] if ood else []),
    ]


def _for_ood(config: CurveConfig, first: Mapping[str, str]) -> tuple[str, ...]:
    """Return the sources of scores for the second set: those of the first, except for proxies with their own."""
    own = {value.partition("=")[0]: value for value in config.curving.ood_proxies}
    unknown = [name for name in own if name not in first]
    require(not unknown, f"--ood-proxies {', '.join(unknown)}: --proxies has no proxy of this name.")
    return tuple(own.get(name, f"{name}={what}") for name, what in first.items())


def _read(name: str, where: InputConfig, sources: Sequence[str], config: CurveConfig) -> Pool:
    rows: list[GoldRow] = list(where.rows(labelled=True))
    if not rows:
        raise DataError(f"{name}: there are no rows.")
    folder = config.output_dir / "scores" / name.replace(" ", "-")
    return pool_of(name, rows, proxy_scores(sources, rows, folder, config.scoring))


def _curves(pool: Pool, proxy: str, most: int) -> Curves:
    candidates = [Candidates(prompt=one.key, proxy_K=one.proxy_K[proxy], gold_K=one.gold_K) for one in pool.replies]
    return curves_of(candidates, most=most)


def _described(pool: Pool, names: Sequence[str], overlap: int) -> PromptSet:
    return PromptSet(
        name=pool.name,
        num_rows=pool.num_rows,
        num_used=len(pool.replies),
        num_prompts=len(set(pool.keys)),
        without_gold=pool.without_gold,
        without_proxy=pool.without_proxy,
        too_few=pool.too_few,
        replies=pool.num_replies,
        texts=pool.texts(),
        levels={name: pool.levels(name) for name in names},
        gold_spread=within_spread([one.gold_K for one in pool.replies]),
        overlap=overlap,
    )


def _notes(sets: Sequence[PromptSet], most: int) -> Iterator[str]:
    """Yield what has to be known to read the curves."""
    for one in sets:
        if one.without_gold or one.without_proxy:
            yield (
                f"{one.name}: replies left out: {one.without_gold:,} without a gold score, {one.without_proxy:,} "
                f"without the score of some proxy. Unless these are random ones, the curve is that of the others alone."
            )
        if one.too_few:
            yield (
                f"{one.name}: rows left out: {one.too_few:,} of {one.num_rows:,}, which have fewer than {most} replies "
                f"that are scored."
            )
        if 2 * most > one.replies:
            yield (
                f"{one.name}: with {one.replies:g} replies to a prompt, a curve beyond n = {one.replies // 2:g} "
                f"depends on the one or two best of each. For n up to {most} sample {2 * most} to {4 * most}."
            )
        if one.num_prompts < MIN_CLUSTERS:
            yield f"{one.name}: {one.num_prompts} prompts; below {MIN_CLUSTERS} there are no intervals and no verdict."
        if one.overlap:
            yield f"{one.name}: {one.overlap:,} of its {one.num_prompts:,} prompts are {sets[0].name} too."
