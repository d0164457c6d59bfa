"""What a plan says before any run of the chance to find a claim, beside how often it is found in simulated studies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from harness.near_other_ends import Kind, assumed_of, drawn_tables
from harness.simulation import Rate
from rewardlab.analysis.crossed import Crossed
from rewardlab.analysis.linearised import observed_in
from rewardlab.experiments.assumed import assumed_noise
from rewardlab.experiments.claims import parse
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.power import Noise, chance
from rewardlab.experiments.verdicts import contrast_of

LEVEL: Final = 0.05
AHEAD: Final = (1.5, 2.5, 3.5)
"""Standard errors by which a claim holds."""
WITHIN: Final = 0.1
"""How far apart both may lie, besides two standard errors of what was found."""
SIZES: Final = ((60, 1), (400, 1), (60, 4))
"""Prompts, and comparisons of each."""
ARMS: Final = (None, 0.3, 0.8)
"""None for one arm against its true value; for two equal arms the part of what they see that both have in common."""
KINDS: Final = tuple(
    Kind(quantity=quantity, accuracy=accuracy)
    for quantity in ("accuracy", "loss", "brier")
    for accuracy in (0.6, 0.9, 0.97, 0.99)
)


def forecasts(draws: int, generator: np.random.Generator) -> Iterator[Rate]:
    """How often claims are found at 5 %; beside it what was said before from assumptions that are right."""
    for kind, between, each in itertools.product(KINDS, ARMS, (1, 4)):
        assumed = assumed_of(kind, each, 1.0 if between is None else between, generator)
        claim = kind.claim if between is None else f"{kind.claim.rsplit(maxsplit=1)[0]} {kind.quantity}(b)"
        [part] = parse(claim).parts
        for (prompts, own), seeds in itertools.product(SIZES, (1, 3)):
            if own != each:
                continue
            noise = assumed_noise(part, assumed, num_prompts=prompts, num_comparisons=prompts * each, values={})
            assert isinstance(noise, Noise)
            prompt_N = np.repeat(np.arange(prompts), each)
            found = []
            for _ in range(draws):
                arms = drawn_tables(kind, [seeds] * (1 if between is None else 2), between or 1.0, prompt_N, generator)
                seen = {
                    Term(kind.quantity, name): observed_in(kind.quantity, own_tables, beta=kind.ahead)
                    for name, own_tables in zip("ab", arms, strict=False)
                }
                found.append(contrast_of(part, seen))
            for ahead in AHEAD:
                by = ahead * noise.error(seeds, prompts)
                rate = float(np.mean([_is_found(one, by) for one in found]))
                said = chance(by, noise, seeds=seeds, prompts=prompts, alpha=LEVEL)
                plain = chance(by, replace(noise, tail=None), seeds=seeds, prompts=prompts, alpha=LEVEL)
                apart = WITHIN + 2 * np.sqrt(said * (1 - said) / draws)
                yield Rate(
                    case=f"{kind}, {'one arm' if between is None else f'two arms, {between:g} in common'}, "
                    f"{seeds} seed{'s' * (seeds > 1)}, {prompts} prompts of {each}, {ahead:g} standard errors",
                    rate=rate,
                    low=max(said - apart, 0.0),
                    high=min(said + apart, 1.0),
                    beside={"said before": said, "by the variance alone": plain},
                )


def _is_found(seen: Crossed, by: float) -> bool:
    """Whether the claim is found if its limit is further away by so much."""
    if seen.is_constant:
        moved = replace(seen, value=seen.value + by)
        return moved.value > 0 and moved.p_of_constant <= LEVEL
    return seen.p_above(-by) <= LEVEL
