"""What the design of a plan can show of each hypothesis, before any run.

A hypothesis that no values of its terms could support, or that none could refute, is not a test. Nor is one whose
margin is far below what the seeds and prompts of the plan can show. Both are reported here, with the chances to support
and to refute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewardlab.analysis import json_form
from rewardlab.experiments.assumed import Assumed, assumed_noise
from rewardlab.experiments.expressions import Claim, Comparison, Range, Term
from rewardlab.experiments.power import ALPHA, POWER, Noise, Reach, chance, reach_of, visible
from rewardlab.experiments.quantities import quantity_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The sizes of a plan."""

    seeds: int
    """Seeds of every arm that the hypothesis names; of the one with the fewest if they differ."""
    prompts: int
    """Prompts of the test data."""
    comparisons: int
    """Comparisons of the test data."""
    hypotheses: int = 1
    """Hypotheses of the plan. Power is that of the first step of Holm's rule: each is tested at α over their number."""
    alpha: float = ALPHA
    pooled_arms: int = 1
    """Arms whose noise over seeds is pooled (`judge(…, pooled=True)`); 1 where it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPower:
    """What can be shown about one comparison."""

    text: str
    visible: float
    """The smallest true distance from the boundary that is found with 80 % chance; NaN if the noise is not known."""
    error: float
    """Standard error that the value is expected to have."""
    margin: float | None
    """The value where the arms are equal, such as 0.03 of `accuracy(a) >= accuracy(b) - 0.03`; None where the
    comparison is not between equals."""
    best_supported: float
    """Chance to support at the most favourable possible value."""
    best_refuted: float
    """Chance to refute at the least favourable one."""
    supported_if_equal: float | None
    """Chance to support where the arms are equal."""
    source: str
    """Where the noise is from, or why nothing is known about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPower:
    """What a design can show about one hypothesis."""

    claim: str
    design: Design
    reach: Reach
    parts: tuple[PartPower, ...]
    expected: float | None
    """The least value of the parts at what is expected; None if nothing was stated."""
    supported: float | None
    """Least chance that all parts are supported at what is expected."""
    refuted: float | None
    """Least chance that some part is refuted there."""
    problems: tuple[str, ...]
    """Why the hypothesis is hardly a test: this design would not decide it, or only with a small chance."""
    notes: tuple[str, ...]
    """What is not known or worth knowing."""

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON, NaN as null."""
        found: dict[str, Any] = json_form.encode(self)
        return found


def claim_power(
    claim: Claim,
    design: Design,
    ranges: Mapping[Term, Range],
    *,
    assumed: Assumed | None = None,
    expected: Mapping[Term, float] | None = None,
) -> ClaimPower:
    """Return what a design can show about a claim whose terms lie in `ranges`.

    `assumed` is the noise, `expected` are true values at which the chances to support and to refute are computed.
    """
    reach = reach_of(claim, ranges)
    noises = [_noise(part, design, assumed or Assumed(), ranges, expected or {}) for part in claim.parts]
    parts = tuple(_part(part, *noise, design, ranges) for part, noise in zip(claim.parts, noises, strict=True))
    at = [part.value(expected) for part in claim.parts] if expected and set(claim.terms) <= expected.keys() else None
    supported, refuted = (None, None) if at is None else _chances(at, [noise for noise, _ in noises], design)
    return ClaimPower(
        claim=str(claim),
        design=design,
        reach=reach,
        parts=parts,
        expected=None if at is None else min(at),
        supported=supported,
        refuted=refuted,
        problems=(*reach.problems, *_problems(reach, parts)),
        notes=tuple(_notes(claim, parts, design)),
    )


def _noise(
    part: Comparison,
    design: Design,
    assumed: Assumed,
    ranges: Mapping[Term, Range],
    expected: Mapping[Term, float],
) -> tuple[Noise | None, str]:
    """Return the noise of a comparison and where it is from, or None and why nothing is known."""
    values = {term: expected.get(term, _middle(term, ranges[term], assumed)) for term in part.terms}
    found = assumed_noise(part, assumed, num_prompts=design.prompts, num_comparisons=design.comparisons, values=values)
    return (None, found) if isinstance(found, str) else (found, "assumptions")


def _middle(term: Term, limits: Range, assumed: Assumed) -> float:
    """Return a rough value of a term, at which expressions that are not linear are differentiated."""
    if term.quantity == "accuracy":
        return assumed.accuracy
    low, high = limits
    if math.isfinite(low) and math.isfinite(high):
        return (low + high) / 2
    return low + 1.0 if math.isfinite(low) else 1.0


def _part(
    part: Comparison, noise: Noise | None, source: str, design: Design, ranges: Mapping[Term, Range]
) -> PartPower:
    margin = _margin(part)
    low, high = part.bounds(ranges)
    if noise is None or math.isnan(noise.seeds):
        why = source if noise is None else "the earlier runs have one seed"
        return PartPower(
            text=str(part),
            visible=math.nan,
            error=math.nan,
            margin=margin,
            best_supported=math.nan,
            best_refuted=math.nan,
            supported_if_equal=None,
            source=why,
        )
    return PartPower(
        text=str(part),
        visible=visible(
            noise, seeds=design.seeds, prompts=design.prompts, alpha=_level(design), arms=design.pooled_arms
        ),
        error=noise.error(design.seeds, design.prompts),
        margin=margin,
        best_supported=_found(high, noise.at_the_ends(), design),
        best_refuted=_found(-low, noise.turned().at_the_ends(), design),
        supported_if_equal=None if margin is None else _found(margin, noise, design),
        source=source,
    )


def _level(design: Design) -> float:
    return design.alpha / design.hypotheses


def _found(ahead: float, noise: Noise, design: Design, *, parts: int = 1) -> float:
    if ahead == math.inf:
        return 1.0
    level = _level(design) / parts
    return chance(ahead, noise, seeds=design.seeds, prompts=design.prompts, alpha=level, arms=design.pooled_arms)


def _margin(part: Comparison) -> float | None:
    """Return the value of a comparison where all arms have the same value of each quantity.

    None if that depends on these values.
    """
    if not part.is_linear:
        return None
    sums: dict[tuple[str, str, int | None], float] = {}
    for term, slope in part.gradient({}).items():
        kind = (term.quantity, term.on, term.step)
        sums[kind] = sums.get(kind, 0.0) + slope
    balanced = all(abs(total) < 1e-12 for total in sums.values())
    return part.value(dict.fromkeys(part.terms, 0.0)) if balanced else None


def _chances(at: list[float], noises: list[Noise | None], design: Design) -> tuple[float | None, float | None]:
    """Return the least chances that all parts are supported, and that any is refuted (Bonferroni)."""
    known = [noise for noise in noises if noise is not None and not math.isnan(noise.seeds)]
    if len(known) < len(noises):
        return None, None
    support = [_found(value, noise, design) for value, noise in zip(at, known, strict=True)]
    refute = [_found(-value, noise.turned(), design, parts=len(at)) for value, noise in zip(at, known, strict=True)]
    return max(0.0, 1 - sum(1 - one for one in support)), max(refute)


def _problems(reach: Reach, parts: tuple[PartPower, ...]) -> list[str]:
    found = []
    for part in parts:
        if part.margin is not None and part.supported_if_equal is not None and 0 < part.margin < part.visible:
            found.append(
                f"{part.text}: if the arms are equal it is supported with a chance of {part.supported_if_equal:.0%} "
                f"only: its margin is {part.margin:.3g}, and this design sees {part.visible:.3g}. Take more test "
                f"prompts or seeds"
            )
        if part.best_supported < POWER and reach.can_hold != "no":
            found.append(
                f"{part.text}: even the most favourable values support it with {part.best_supported:.0%} chance"
            )
        if part.best_refuted < POWER and reach.can_fail != "no" and len(parts) == 1:
            found.append(f"{part.text}: even the least favourable values refute it with {part.best_refuted:.0%} chance")
    return found


def _notes(claim: Claim, parts: tuple[PartPower, ...], design: Design) -> list[str]:
    found = [f"{part.text}: power is not known: {part.source}" for part in parts if math.isnan(part.visible)]
    by_steps = [term for term in claim.terms if quantity_named(term.quantity).varies == "steps"]
    least = math.ceil(math.log2(design.hypotheses / design.alpha))
    if by_steps and design.seeds < least:
        found.append(
            f"{by_steps[0]}: where all runs stop at one step, only {least} seeds or more decide; the plan has "
            f"{design.seeds}"
        )
    if design.seeds == 1:
        found.append("with one seed the verdict is about its models alone, and what runs record is not tested")
    return found
