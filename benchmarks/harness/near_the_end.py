"""Hypotheses on shares near 1, and on arms that differ on few prompts, exactly at their limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from harness.simulation import Rate
from rewardlab.analysis.crossed import Observed
from rewardlab.experiments.claims import parse
from rewardlab.experiments.expressions import Claim
from rewardlab.experiments.verdicts import contrast_of

Right = npt.NDArray[np.bool_]
DRAWN_ANEW: Final = 0.05
"""Share of the outcomes of a prompt in which a seed does not follow what all seeds have in common."""
LEVELS: Final = (0.05, 0.01)


def near_the_end(draws: int, generator: np.random.Generator) -> Iterator[Rate]:
    """How often the larger side is found to be larger, though the claim is exactly at its limit."""
    margin = 0.03
    kinds = [(f"a > {share:g}", f"accuracy(a) > {share:g}", share, 0.0, share) for share in (0.9, 0.95, 0.98)]
    for gain in (0.0, 0.01):
        name = f"a ≥ b − {margin:g}, {margin + gain:.0%} lost and {gain:.0%} won"
        kinds.append((name, f"accuracy(a) >= accuracy(b) - {margin:g}", 0.73 - margin - gain, gain, 0.73))
    for name, text, below, above, other in kinds:
        claim = parse(text)
        for seeds in (1, 3):
            for prompts in (60, 100, 200, 400):
                p = []
                for _ in range(draws):
                    rank_SC = _ranks(seeds, prompts, generator)
                    arms = {"a": (rank_SC < below) | (rank_SC >= 1 - above), "b": rank_SC < other}
                    p.append(_p_of(claim, arms))
                for level in LEVELS:
                    case = f"{name}, {seeds} seed{'s' * (seeds > 1)}, {prompts} prompts, at {level:.0%}"
                    high = level + 2 * math.sqrt(level * (1 - level) / draws)
                    rates = np.mean(np.array(p) <= level, axis=0).tolist()
                    beside = {"by the variance seen": rates[1]}
                    yield Rate(case=case, rate=rates[0], low=0.0, high=high, beside=beside)


def _ranks(seeds: int, prompts: int, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """[S, C] uniform numbers that decide outcomes: those of the prompt, but for a few that each seed draws anew."""
    common, own = generator.random((1, prompts)), generator.random((seeds, prompts))
    return np.where(generator.random(own.shape) < DRAWN_ANEW, own, common)


def _p_of(claim: Claim, arms: Mapping[str, Right]) -> tuple[float, float]:
    """The p-value of support, and the one by the variance that was seen."""
    seen = {}
    for term in claim.terms:
        right_SC = arms[term.arm].astype(np.float64)
        by_seed_S = right_SC.mean(1)
        seen[term] = Observed(
            by_seed_S=by_seed_S,
            seeds=tuple(range(len(right_SC))),
            influence_SC=(right_SC - by_seed_S[:, None]) / right_SC.shape[1],
            clusters=tuple(map(str, range(right_SC.shape[1]))),
        )
    found = contrast_of(claim.parts[0], seen)
    if not found.variance > 0:
        same = found.p_of_constant if found.value > 0 else 1.0
        return same, same
    return found.p_above(), replace(found, bounded=None).p_above()
