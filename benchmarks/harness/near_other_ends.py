"""Hypotheses on AUC, Brier score and loss near the end of their range, and on accuracy by several comparisons a prompt,
exactly at their limits, and ahead of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy.special import expit, ndtri

from harness.simulation import Rate
from rewardlab.analysis.crossed import Crossed
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.linearised import observed_in
from rewardlab.analysis.score_table import Pairs, Replies, ScoreTable
from rewardlab.experiments.claims import parse
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.power import Assumed, Noise, assumed_noise, chance
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
    prompt_N = np.repeat(np.arange(LARGE), each)
    scores = [side + _scores(2, prompt_N, generator) for side in (kind.ahead / 2, -kind.ahead / 2)]
    tables = {seed: _table(*rows, prompt_N) for seed, rows in enumerate(zip(*scores, strict=True))}
    beta = kind.sure * kind.ahead
    observed = observed_in(kind.quantity, tables, beta=beta)
    values_N = tables[0].pairs.nll(beta=beta)
    if kind.quantity == "brier":
        values_N = np.square(1 - tables[0].pairs.probability(beta=beta))
    away_N = values_N - values_N.mean()
    moved_SC = LARGE * observed.influence_SC
    # The variance of the mean of a prompt, over that of single comparisons.
    together = float(np.square(moved_SC).mean() / np.square(away_N).mean()) * each
    assumed = Assumed(
        over_seeds={kind.quantity: 0.0},
        over_prompts={kind.quantity: float(away_N.std())},
        skewness={kind.quantity: float((away_N**3).mean() / away_N.std() ** 3)},
        within_prompt=(together - 1) / (each - 1) if each > 1 else 0.0,
        alike=dict.fromkeys([kind.quantity], (float(np.corrcoef(moved_SC)[0, 1]),) * 2),
    )
    [part] = parse(kind.claim).parts
    noise = assumed_noise(part, assumed, num_prompts=prompts, num_comparisons=prompts * each, values={})
    assert isinstance(noise, Noise)
    return chance(AHEAD * noise.error(seeds, prompts), noise, seeds=seeds, prompts=prompts, alpha=LEVELS[0])


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
    prompt_N = np.repeat(np.arange(prompts), each)
    scores = [side + _scores(seeds, prompt_N, generator) for side in (kind.ahead / 2, -kind.ahead / 2)]
    tables = {seed: _table(*rows, prompt_N) for seed, rows in enumerate(zip(*scores, strict=True))}
    observed = observed_in(kind.quantity, tables, beta=kind.sure * kind.ahead)
    return contrast_of(parse(kind.claim).parts[0], {Term(kind.quantity, "a"): observed})


def _scores(seeds: int, prompt_N: np.ndarray, generator: np.random.Generator) -> FloatArray:
    """[S, N] standard normal scores that seeds, and the comparisons of a prompt, have partly in common."""
    alike = ALIKE if prompt_N[-1] + 1 < len(prompt_N) else 0.0
    of_prompt_N = generator.normal(size=prompt_N[-1] + 1)[prompt_N]
    common_N = math.sqrt(alike) * of_prompt_N + math.sqrt(1 - alike) * generator.normal(size=len(prompt_N))
    own_SN = generator.normal(size=(seeds, len(prompt_N)))
    found: FloatArray = math.sqrt(1 - OWN) * common_N + math.sqrt(OWN) * own_SN
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
