"""The noise of a comparison before any run, from what is assumed about single comparisons of a test set.

What is stated, or was seen in an earlier study (`observed_noise.py`), are shares and moments of comparisons and their
correlations. From them follow the variances of a claim, and the tail of which its test knows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from rewardlab.experiments.expressions import Comparison, Term
from rewardlab.experiments.power import Noise
from rewardlab.experiments.quantities import quantity_named
from rewardlab.experiments.tails import FURTHEST, Tail, moments_of_losses

FEW_WRONG: Final = 3
"""Prompts in which the first comparison is expected to be ranked wrongly, below which the test is one of single counts.
In simulations chances were off by up to 41 points there, and by up to 17 elsewhere (docs/design/verdicts-simulated.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What is assumed about noise before any run.

    The defaults are about what `earlier.noise_seen` finds in four studies of three seeds, heads and LoRA adapters of
    the first layers of a 135M model on a few hundred comparisons (docs/design/verdicts.md has them side by side).
    Large models may well vary less: what earlier runs of one's own showed is better.
    """

    disagreeing: float = 0.17
    """Share of comparisons that exactly one of two arms ranks as labelled."""
    disagreeing_seeds: float = 0.15
    """The same for two seeds of one arm, at most `disagreeing`."""
    accuracy: float = 0.70
    """Accuracy that the arms reach, about."""
    within_prompt: float = 0.2
    """Correlation of two comparisons of one prompt."""
    over_seeds: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({"accuracy": 0.015, "ece": 0.01, "loss": 0.01, "brier": 0.005})
    )
    """Quantity -> standard deviation over seeds on endlessly many prompts."""
    over_prompts: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({"ece": 0.45, "loss": 0.55, "brier": 0.25})
    )
    """Quantity -> standard deviation of its influence over comparisons; that of accuracy follows from `accuracy`."""
    skewness: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({"loss": 1.75, "brier": 1.3}))
    """Quantity with a long tail -> skewness over comparisons; 0 for others. The default is that of normal margins with
    the accuracy and the standard deviations above; of outcomes it follows from `accuracy`."""
    over_rows: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Quantity of a curve -> standard error of one seed from its validation rows; 0 for others."""
    alike: Mapping[str, tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))
    """Quantity -> correlation over prompts of two seeds of one arm, and of two arms; others have that of accuracies."""

    def at_accuracy(self, accuracy: float) -> Assumed:
        """Return what is assumed of arms of another accuracy.

        Two arms, and two seeds, stay as alike: they disagree less where fewer comparisons are ranked wrongly. Losses
        and Brier scores vary over comparisons as those of normal margins of the two accuracies do. Over seeds these
        two and accuracies vary in proportion to the standard deviation of single outcomes.
        """
        plain = accuracy * (1 - accuracy) / (self.accuracy * (1 - self.accuracy))
        before, after = moments_of_losses(self.accuracy), moments_of_losses(accuracy)
        return replace(
            self,
            accuracy=accuracy,
            disagreeing=self.disagreeing * plain,
            disagreeing_seeds=self.disagreeing_seeds * plain,
            over_seeds={
                name: sd * math.sqrt(plain) if name in (*after, "accuracy") else sd
                for name, sd in self.over_seeds.items()
            },
            over_prompts={
                name: sd * after[name].sd / before[name].sd if name in after else sd
                for name, sd in self.over_prompts.items()
            },
            skewness={
                name: one * after[name].skewness / before[name].skewness if name in after else one
                for name, one in self.skewness.items()
            },
        )

    def is_rough(self, num_prompts: int) -> bool:
        """Return whether so few comparisons are expected to be ranked wrongly, or rightly, that a chance to find what
        has a long tail is known only roughly: less than `FEW_WRONG` of one in each prompt."""
        return num_prompts * min(self.accuracy, 1 - self.accuracy) < FEW_WRONG

    def of_comparisons(self, quantity: str) -> float | None:
        """Return the standard deviation over comparisons; None if nothing is assumed."""
        if quantity in ("accuracy", "negative_margin_rate"):
            return math.sqrt(self.accuracy * (1 - self.accuracy))
        return self.over_prompts.get(quantity)

    def skewness_of(self, quantity: str) -> float | None:
        """Return the skewness over comparisons; None if nothing is assumed. That of outcomes follows from their share.

        Of outcomes of which a share p is 1 it is (1 − 2p)/√(p(1 − p)).
        """
        if quantity not in ("accuracy", "negative_margin_rate"):
            return self.skewness.get(quantity)
        falling = (1 - 2 * self.accuracy) / math.sqrt(self.accuracy * (1 - self.accuracy))
        return falling if quantity == "accuracy" else -falling

    def correlations(self, quantity: str) -> tuple[float, float]:
        """Return the correlation over prompts of two seeds of one arm, and of two arms.

        Two that disagree on a share d of comparisons, whose outcomes have the variance v, have outcomes of covariance
        v − d/2.
        """
        plain = self.accuracy * (1 - self.accuracy)
        by_accuracy = (1 - self.disagreeing_seeds / 2 / plain, 1 - self.disagreeing / 2 / plain)
        return self.alike.get(quantity, by_accuracy)


def assumed_noise(
    part: Comparison, assumed: Assumed, *, num_prompts: int, num_comparisons: int, values: Mapping[Term, float]
) -> Noise | str:
    """Return the noise of a comparison by assumption, or the reason why nothing can be said.

    `values` are roughly what is expected; a linear comparison does not need them.
    """
    varying = {
        term: slope for term, slope in part.gradient(values).items() if quantity_named(term.quantity).varies != "never"
    }
    shares = {}
    for term in varying:
        if term.quantity not in assumed.over_seeds and term.quantity != "negative_margin_rate":
            return f"nothing is assumed about {term.quantity} over seeds; name an earlier study (assume.study)"
        if quantity_named(term.quantity).source == "scores":
            spread = assumed.of_comparisons(term.quantity)
            if spread is None:
                return f"nothing is assumed about {term.quantity} over prompts; name an earlier study (assume.study)"
            shares[term] = varying[term] * spread
    each = num_comparisons / max(num_prompts, 1)
    scale = (1 + (each - 1) * assumed.within_prompt) / max(num_comparisons, 1)
    total = 0.0
    for one, other in itertools.product(shares, repeat=2):
        of_seeds, of_arms = assumed.correlations(one.quantity) if one.quantity == other.quantity else (0.0, 0.0)
        total += shares[one] * shares[other] * (of_seeds if one == other else of_arms)
    # As in `crossed`: errors that add up may be the same error, those that cancel each other may not.
    errors = [
        slope * assumed.over_rows.get(term.quantity, 0.0) for term, slope in varying.items() if term not in shares
    ]
    rows = sum(max(error, 0.0) for error in errors) ** 2 + sum(min(error, 0.0) for error in errors) ** 2
    accuracy = assumed.over_seeds.get("accuracy", 0.0)
    return Noise(
        seeds=sum((slope * assumed.over_seeds.get(term.quantity, accuracy)) ** 2 for term, slope in varying.items()),
        within=sum(share**2 * (1 - assumed.correlations(term.quantity)[0]) for term, share in shares.items()) * scale,
        prompts=max(total, 0.0) * scale + rows,
        num_prompts=num_prompts if shares else 0,
        tail=_assumed_tail(shares, assumed, each=each, num_prompts=num_prompts),
    )


def _assumed_tail(shares: Mapping[Term, float], assumed: Assumed, *, each: float, num_prompts: int) -> Tail | None:
    """Return the third moments of a claim whose terms vary by `shares` over comparisons; None where no test knows of
    them."""
    by_kind: dict[str, list[float]] = {}
    for term, share in shares.items():
        by_kind.setdefault(term.quantity, []).append(share)
    skewness = {kind: assumed.skewness_of(kind) for kind in by_kind}
    if all(one is None for one in skewness.values()) or not all(quantity_named(kind).has_ends for kind in by_kind):
        return None
    sums = []
    for kind, own in by_kind.items():
        tail = Tail.of_terms(
            own,
            skewness[kind] or 0.0,
            assumed.correlations(kind),
            furthest=1.0 if quantity_named(kind).is_share else FURTHEST,
        )
        spread = assumed.of_comparisons(kind)
        if quantity_named(kind).is_share and spread:
            # Outcomes vary by ½ at most, and what several terms make of them by the sum of that.
            reach = sum(map(abs, own)) / spread
            tail = replace(tail, most=(reach / 2) ** 2, reach=reach, of_counts=each == 1)
        sums.append(tail)
    whole = Tail.sum_of(sums, is_loss="loss" in by_kind)
    return whole.over_prompts(max(num_prompts, 1), each=each, correlation=assumed.within_prompt)
