"""What the finished runs of an earlier study show about noise, for the power of the next plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rewardlab.analysis.crossed import Observed, combined
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.score_table import ScoreTable
from rewardlab.core.errors import ConfigError, RewardlabError
from rewardlab.experiments.assumed import Assumed
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.outcomes import Outcomes
from rewardlab.experiments.power import noise_of
from rewardlab.experiments.quantities import quantity_named
from rewardlab.experiments.study import open_study
from rewardlab.experiments.tails import third_of_mean

Tables = Mapping[str, Mapping[int, ScoreTable]]
"""Arm -> seed -> its test scores."""


def noise_seen(folder: Path, quantities: Iterable[str]) -> tuple[Assumed, str]:
    """Return the noise of a study's arms, and a text that names it. What it does not show has the values of `Assumed`.

    Every number is a mean over all arms, since the next plan has other arms. Raises ConfigError for a folder without a
    study, or a study without two finished runs of one arm.
    """
    study = open_study(folder)
    outcomes = Outcomes(study, may_read="test")
    tables: dict[str, dict[int, ScoreTable]] = {}
    for arm in dict.fromkeys(run.arm for run in study.runs if run.reads_test):
        found = {}
        for outcome in outcomes.done(arm):
            try:
                found[outcome.run.seed] = outcome.table("test")
            except RewardlabError as error:
                raise ConfigError(f"assume.study: {error}") from None
        if len(found) > 1:
            tables[arm] = found
    if not tables:
        raise ConfigError(f"assume.study: {folder}: no arm has two finished runs, so it shows no noise over seeds.")
    default = _of_outcomes(tables)
    wanted = dict.fromkeys([*default.over_seeds, *(quantity_named(name).name for name in quantities)])
    terms = {name: {arm: _term(name, arm) for arm in tables} for name in wanted}
    seen, _ = outcomes.observe(term for by_arm in terms.values() for term in by_arm.values())
    over_seeds, over_prompts = dict(default.over_seeds), dict(default.over_prompts)
    cubes: dict[str, float] = {}
    alike: dict[str, tuple[float, float]] = {}
    over_rows: dict[str, float] = {}
    for name, by_arm in terms.items():
        observed = {arm: seen[term] for arm, term in by_arm.items() if term in seen}
        if observed:
            over_seeds[name] = math.sqrt(float(np.mean([_over_seeds(one) for one in observed.values()])))
        if of_rows := [one.row_error for one in observed.values() if one.row_error is not None and one.has_row_error]:
            over_rows[name] = math.sqrt(float(np.mean(np.square(of_rows))))
        if of_prompts := [*_over_comparisons(observed, tables, default)]:
            square, cube = np.mean(of_prompts, axis=0).tolist()
            over_prompts[name] = math.sqrt(square)
            alike[name] = _alike(list(observed.values()))
            cubes[name] = cube
    runs = sum(map(len, tables.values()))
    return (
        replace(
            default,
            over_seeds=over_seeds,
            over_prompts=over_prompts,
            skewness={
                name: _skewness(name, cubes, over_prompts, default)
                for name in dict.fromkeys([*default.skewness, *cubes])
                if quantity_named(name).has_ends
            },
            over_rows=over_rows,
            alike=alike,
        ),
        f"as in {folder} ({runs} runs of {len(tables)} arm{'s' * (len(tables) > 1)})",
    )


def _term(name: str, arm: str) -> Term:
    return Term(name, arm, on="validation" if quantity_named(name).source == "curve" else "test")


def _over_seeds(one: Observed) -> float:
    """Return the variance over seeds on endlessly many prompts."""
    return noise_of(combined([(one, 1.0)], one.mean)).seeds


def _skewness(name: str, cubes: Mapping[str, float], over_prompts: Mapping[str, float], default: Assumed) -> float:
    """Return the skewness over comparisons, from the third moment that was seen."""
    if name not in cubes:
        return default.skewness[name]
    return cubes[name] / over_prompts[name] ** 3 if over_prompts[name] else 0.0


def _over_comparisons(
    observed: Mapping[str, Observed], tables: Tables, assumed: Assumed
) -> Iterator[tuple[float, float]]:
    """Yield, for each arm, the variance over comparisons that gives its noise over prompts, and the third moment."""
    for arm, one in observed.items():
        if one.influence_SC is None:
            continue
        pairs = next(iter(tables[arm].values())).pairs
        count, prompts = len(pairs.label), len(one.clusters)
        each = count / max(prompts, 1)
        square = float(np.square(one.influence_SC).sum(axis=1).mean()) * count
        cube = float((one.influence_SC**3).sum(axis=1).mean()) * prompts**2
        within = assumed.within_prompt
        yield square / (1 + (each - 1) * within), cube / third_of_mean(each, within)


def _alike(observed: Sequence[Observed]) -> tuple[float, float]:
    """Return the correlation over prompts of two seeds of one arm, and of two arms.

    Each is a mean product over a mean square. Only pairs of different seeds count, since arms may share some.
    """
    arms: list[int] = []
    seeds: list[int] = []
    parts: list[tuple[FloatArray, list[int]]] = []
    numbers: dict[str, int] = {}
    for number, one in enumerate(observed):
        assert one.influence_SC is not None
        arms += [number] * len(one.seeds)
        seeds += one.seeds
        parts.append((one.influence_SC, [numbers.setdefault(prompt, len(numbers)) for prompt in one.clusters]))
    # A prompt that an arm was not judged on adds nothing to the products of its runs.
    moved_RC = np.zeros((len(seeds), len(numbers)))
    start = 0
    for influence_SC, places in parts:
        moved_RC[start : start + len(influence_SC), places] = influence_SC
        start += len(influence_SC)
    products_RR = moved_RC @ moved_RC.T
    square = float(products_RR.trace()) / len(seeds)
    arm_R, seed_R = np.array(arms), np.array(seeds)
    counted_RR = np.triu(seed_R[:, None] != seed_R)
    same_RR = arm_R[:, None] == arm_R
    if not square:
        return 1.0, 1.0
    of_one, of_two = (products_RR[counted_RR & (same_RR == same)] / square for same in (True, False))
    of_seeds = min(float(np.mean(of_one)), 1.0)
    return of_seeds, min(float(np.mean(of_two)), 1.0) if of_two.size else of_seeds


def _of_outcomes(tables: Tables) -> Assumed:
    """Return the accuracy of the arms, and how often arms, and seeds of one arm, disagree."""
    default = Assumed()
    right: dict[tuple[str, int], tuple[int, FloatArray]] = {}
    judged: dict[tuple[object, ...], int] = {}
    within: list[float] = []
    for arm, by_seed in tables.items():
        for seed, table in by_seed.items():
            pairs = table.pairs.decided
            rows = (table.preferences, pairs.preference.tobytes(), pairs.prompt.tobytes())
            right[arm, seed] = judged.setdefault(rows, len(judged)), pairs.outcome
            within += _within(pairs.outcome, pairs.prompt)
    apart: dict[bool, list[float]] = {True: [], False: []}
    for (one, other), (first, second) in zip(
        itertools.combinations(right, 2), itertools.combinations(right.values(), 2), strict=True
    ):
        if one[1] != other[1] and first[0] == second[0]:
            apart[one[0] == other[0]].append(float(np.mean(first[1] != second[1])))
    of_seeds = float(np.mean(apart[True])) if apart[True] else default.disagreeing_seeds
    of_arms = float(np.mean(apart[False])) if apart[False] else max(default.disagreeing, of_seeds)
    return replace(
        default,
        accuracy=float(np.mean([outcome.mean() for _, outcome in right.values()])),
        disagreeing=max(of_arms, of_seeds),
        disagreeing_seeds=of_seeds,
        within_prompt=float(np.mean(within)) if within else default.within_prompt,
    )


def _within(outcome_N: FloatArray, prompt_N: np.typing.NDArray[np.int64]) -> list[float]:
    """Return the correlation of two comparisons of one prompt, in a list; empty where every prompt has only one."""
    away_N = outcome_N - outcome_N.mean()
    counts, sums = np.bincount(prompt_N), np.bincount(prompt_N, away_N)
    pairs, spread = float((counts * (counts - 1)).sum()), float(np.square(away_N).mean())
    if not pairs or not spread:
        return []
    products = float(np.square(sums).sum() - np.square(away_N).sum()) / pairs
    return [min(max(products / spread, 0.0), 1.0)]
