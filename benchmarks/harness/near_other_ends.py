"""Hypotheses on AUC, Brier score and loss near the end of their range, and on accuracy by several comparisons a prompt,
exactly at their limits, and ahead of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy.special import expit, ndtri

from harness.simulation import Rate
from rewardlab.analysis.crossed import Crossed
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.linearised import observed_in
from rewardlab.analysis.score_table import Pairs, Replies, ScoreTable
from rewardlab.experiments.assumed import Assumed, assumed_noise
from rewardlab.experiments.claims import parse
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.power import Noise, chance
from rewardlab.experiments.verdicts import contrast_of

OWN: Final = 0.1
"""Share of the variance of a score that a seed does not have in common with others."""
ALIKE: Final = 0.7
"""Correlation of two comparisons of a prompt."""
LEVELS: Final = (0.05, 0.01)
AHEAD: Final = 2.5
"""Standard errors by which a claim holds, where it is to be found."""
LARGE: Final = 20_000
"""Prompts from which the assumptions of a forecast are taken."""
SIZES: Final = ((60, 1), (200, 1), (400, 1), (60, 4), (60, 12))
"""Prompts, and comparisons of each."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Comparisons of a true accuracy; the scores of both replies are normal and differ by `ahead`."""

    quantity: str
    accuracy: float
    sure: float = 1.0
    """1 where the probabilities σ(βd) are about calibrated; 3 for a model that is too sure."""

    @property
    def ahead(self) -> float:
        """By how much the mean scores of the two replies differ, in standard deviations of one."""
        return math.sqrt(2) * float(ndtri(self.accuracy))

    @property
    def truth(self) -> float:
        """The true value. Of independent scores AUC is the accuracy."""
        if self.quantity in ("accuracy", "roc_auc"):
            return self.accuracy
        z = np.linspace(-9, 9, 20_001)
        weights = np.exp(-z * z / 2) / np.exp(-z * z / 2).sum()
        logit = self.sure * self.ahead * (self.ahead + math.sqrt(2) * z)
        values = np.logaddexp(0, -logit) if self.quantity == "loss" else np.square(expit(-logit))
        return float(weights @ values)

    @property
    def claim(self) -> str:
        """The hypothesis that it is better than its true value."""
        return f"{self.quantity}(a) {'<' if self.quantity in ('brier', 'loss') else '>'} {self.truth:.17g}"

    def __str__(self) -> str:
        """In words."""
        sure = ", too sure" if self.sure > 1 else ""
        return f"{self.quantity} of {self.truth:.3g}, accuracy {self.accuracy:g}{sure}"


KINDS: Final = tuple(
    Kind(quantity=quantity, accuracy=accuracy, sure=sure)
    for quantity, sures in (("roc_auc", (1.0,)), ("brier", (1.0, 3.0)), ("loss", (1.0, 3.0)), ("accuracy", (1.0,)))
    for accuracy in (0.9, 0.95, 0.98)
    for sure in sures
)


def near_other_ends(draws: int, generator: np.random.Generator) -> Iterator[Rate]:
    """How often a claim is found that is exactly at its limit."""
    for kind, seeds, prompts, each in _studies():
        found = [_contrast(kind, seeds, prompts, each, generator) for _ in range(draws)]
        p = np.array([(one.p_above(), replace(one, bounded=None).p_above()) for one in found])
        for level in LEVELS:
            rates = np.mean(p <= level, axis=0).tolist()
            high = level + 2 * math.sqrt(level * (1 - level) / draws)
            case = f"{_case(kind, seeds, prompts, each)}, at {level:.0%}"
            yield Rate(case=case, rate=rates[0], low=0.0, high=high, beside={"by the variance seen": rates[1]})


def power_near_the_end(draws: int, generator: np.random.Generator) -> Iterator[Rate]:
    """How often one is found, at 5 %, whose limit the truth is ahead of."""
    for kind, seeds, prompts, each in _studies():
        found = [_contrast(kind, seeds, prompts, each, generator) for _ in range(draws)]
        limit = -AHEAD * float(np.std([one.value for one in found]))
        p = np.array([(one.p_above(limit), replace(one, bounded=None).p_above(limit)) for one in found])
        rates = np.mean(p <= LEVELS[0], axis=0).tolist()
        beside = {"by the variance seen": rates[1]}
        if kind.quantity in ("brier", "loss"):
            beside["said before"] = _said(kind, seeds, prompts, each, generator)
        yield Rate(case=_case(kind, seeds, prompts, each), rate=rates[0], low=0.0, high=1.0, beside=beside)


def _said(kind: Kind, seeds: int, prompts: int, each: int, generator: np.random.Generator) -> float:
    """The chance to find it, as a plan says it before any run from assumptions that are right."""
    [part] = parse(kind.claim).parts
    assumed = assumed_of(kind, each, 1.0, generator)
    noise = assumed_noise(part, assumed, num_prompts=prompts, num_comparisons=prompts * each, values={})
    assert isinstance(noise, Noise)
    return chance(AHEAD * noise.error(seeds, prompts), noise, seeds=seeds, prompts=prompts, alpha=LEVELS[0])


def assumed_of(kind: Kind, each: int, between: float, generator: np.random.Generator) -> Assumed:
    """What is true of two arms that have a part `between` of what all seeds see in common, from a large study."""
    prompt_N = np.repeat(np.arange(LARGE), each)
    tables = drawn_tables(kind, (2, 1 if between == 1 else 2), between, prompt_N, generator)
    beta = kind.sure * kind.ahead
    first_SC, other_SC = (LARGE * observed_in(kind.quantity, own, beta=beta).influence_SC for own in tables)
    pairs = tables[0][0].pairs
    if kind.quantity == "accuracy":
        values_N = (pairs.difference > 0).astype(np.float64)
    else:
        values_N = pairs.nll(beta=beta) if kind.quantity == "loss" else np.square(1 - pairs.probability(beta=beta))
    away_N = values_N - values_N.mean()
    # The variance of the mean of a prompt, over that of single comparisons.
    together = float(np.square(first_SC).mean() / np.square(away_N).mean()) * each
    of_seeds, of_arms = (float(np.corrcoef(first_SC[0], one_C)[0, 1]) for one_C in (first_SC[1], other_SC[0]))
    of_comparisons = {} if kind.quantity == "accuracy" else {kind.quantity: float(away_N.std())}
    return Assumed(
        accuracy=kind.accuracy,
        over_seeds={kind.quantity: 0.0},
        over_prompts=of_comparisons,
        skewness={name: float((away_N**3).mean() / sd**3) for name, sd in of_comparisons.items()},
        within_prompt=(together - 1) / (each - 1) if each > 1 else 0.0,
        alike={kind.quantity: (of_seeds, of_seeds if between == 1 else of_arms)},
    )


def _studies() -> Iterator[tuple[Kind, int, int, int]]:
    for kind in KINDS:
        for seeds in (1, 3):
            for prompts, each in SIZES:
                # Accuracy by single comparisons is among the kinds of near_the_end.py.
                if kind.quantity != "accuracy" or each > 1:
                    yield kind, seeds, prompts, each


def _case(kind: Kind, seeds: int, prompts: int, each: int) -> str:
    return f"{kind}, {seeds} seed{'s' * (seeds > 1)}, {prompts} prompts of {each}"


def _contrast(kind: Kind, seeds: int, prompts: int, each: int, generator: np.random.Generator) -> Crossed:
    """The claim on one drawn study."""
    [tables] = drawn_tables(kind, (seeds,), 1.0, np.repeat(np.arange(prompts), each), generator)
    observed = observed_in(kind.quantity, tables, beta=kind.sure * kind.ahead)
    return contrast_of(parse(kind.claim).parts[0], {Term(kind.quantity, "a"): observed})


def drawn_tables(
    kind: Kind, seeds: Sequence[int], between: float, prompt_N: np.ndarray, generator: np.random.Generator
) -> list[dict[int, ScoreTable]]:
    """The score tables of arms with so many seeds, which have a part `between` of what their seeds see in common."""
    sides = [
        [side + own_SN for own_SN in _scores(seeds, between, prompt_N, generator)]
        for side in (kind.ahead / 2, -kind.ahead / 2)
    ]
    return [
        {seed: _table(*rows, prompt_N) for seed, rows in enumerate(zip(*both, strict=True))}
        for both in zip(*sides, strict=True)
    ]


def _scores(
    seeds: Sequence[int], between: float, prompt_N: np.ndarray, generator: np.random.Generator
) -> list[FloatArray]:
    """[S, N] standard normal scores of each arm, which seeds and the comparisons of a prompt partly have in common."""
    common_N = _common(prompt_N, generator)
    found = []
    for count in seeds:
        of_arm_N = common_N
        if between < 1:
            of_arm_N = math.sqrt(between) * common_N + math.sqrt(1 - between) * _common(prompt_N, generator)
        own_SN = generator.normal(size=(count, len(prompt_N)))
        found.append(math.sqrt(1 - OWN) * of_arm_N + math.sqrt(OWN) * own_SN)
    return found


def _common(prompt_N: np.ndarray, generator: np.random.Generator) -> FloatArray:
    """[N] standard normal numbers that the comparisons of a prompt have partly in common."""
    alike = ALIKE if prompt_N[-1] + 1 < len(prompt_N) else 0.0
    of_prompt_N = generator.normal(size=prompt_N[-1] + 1)[prompt_N]
    found: FloatArray = math.sqrt(alike) * of_prompt_N + math.sqrt(1 - alike) * generator.normal(size=len(prompt_N))
    return found


def _table(preferred_N: FloatArray, other_N: FloatArray, prompt_N: np.ndarray) -> ScoreTable:
    """The score table of these comparisons; nothing but their scores is used."""
    zero_N, none = np.zeros(len(prompt_N)), np.zeros(0)
    at_N, nowhere = zero_N.astype(np.int64), none.astype(np.int64)
    return ScoreTable(
        replies=Replies(
            score=none, length=none, truncated=none > 0, number=nowhere, prompt=nowhere, source=nowhere,
            preference=nowhere,
        ),
        pairs=Pairs(
            difference=preferred_N - other_N, label=zero_N + 1, preferred=preferred_N, other=other_N,
            length_preferred=zero_N, length_other=zero_N, truncated=zero_N > 0, prompt=prompt_N, source=at_N,
            preference=at_N,
        ),
        prompts=np.array([f"{prompt:04}" for prompt in range(prompt_N[-1] + 1)], dtype=object),
        sources=("simulated",),
        preferences=(),
        rows=(),
    )  # fmt: skip
