"""Verdicts on hypotheses: supported, refuted or undecided, and what would decide.

Every comparison of a claim is tested from both sides at level α. A claim is supported if each of its parts is
(intersection-union test: its p-value is the largest), and refuted if any part is (the smallest p-value times the number
of parts). Both kinds of findings are adjusted over all hypotheses of the plan by Holm's rule, those that could not be
tested included: the chance of any false *supported* in a study is at most α, and so is that of any false *refuted*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rewardlab.analysis import json_form
from rewardlab.analysis.crossed import Crossed, Observed, Part
from rewardlab.analysis.crossed_pooled import pooled_over, with_noise_of_others, with_pooled
from rewardlab.analysis.multiple import holm
from rewardlab.analysis.stats import MIN_CLUSTERS
from rewardlab.core.terminal import listed
from rewardlab.experiments.at_limits import weighed_sum
from rewardlab.experiments.expressions import Claim, Comparison, Term
from rewardlab.experiments.part_verdict import PartVerdict, in_full
from rewardlab.experiments.power import ALPHA, MOST_TIMES, POWER, Needed, needed, noise_of
from rewardlab.experiments.quantities import cut, range_of

Finding = Literal["supported", "refuted", "undecided", "not tested"]
ONE_SEED: Final = (
    "an arm has one seed, so this is about its model: how much another seed would differ is in no interval"
)
THESE_RUNS: Final = " for these runs alone"
"""Follows a verdict that would say too much of arms: by another seed of each it might be another one."""
OF_OTHERS: Final = "an arm has one seed, and how much another one would differ is taken from {arms}, with several"
ONE_VALUE: Final = "an arm has one seed and no prompts, so nothing tells how much another run would differ"
EQUAL: Final = "every seed has the same value; how likely another one is to differ is told by their number alone"
CHOSEN: Final = "the interval is that of the extreme arm as if it had been named before; p accounts for the choice"
OF_A_SIDE: Final = (
    "the interval is that of the side that came out, as if it had been named before; p accounts for the choice"
)
NOT_APART: Final = "the choice by min or max after the fact is neither in the interval nor in p"
ROWS: Final = "how much other validation rows would change it is not known, and in no interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the runs say about one hypothesis."""

    name: str
    claim: str
    verdict: Finding
    sentence: str
    parts: tuple[PartVerdict, ...]
    p_supported: float
    """p-value of all parts together, unadjusted; NaN if it was not tested."""
    p_refuted: float
    adjusted_supported: float
    """Adjusted over the hypotheses of the plan (Holm 1979)."""
    adjusted_refuted: float
    num_hypotheses: int
    alpha: float
    needed: Needed | None
    """For an undecided claim, sizes that would decide it with 80 % chance, if truth and noise are as estimated."""
    decide: str
    """The same as a sentence; empty where the claim is decided or was not tested."""

    @property
    def is_of_these_runs(self) -> bool:
        """Whether it is decided for the models at hand alone: of other seeds of the same arms it says nothing."""
        return self.verdict in ("supported", "refuted") and any(part.is_of_these_runs for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON, NaN as null."""
        found: dict[str, Any] = json_form.encode(self)
        return found


@dataclass(frozen=True, kw_only=True)
class _Tested:
    """A part with its numbers."""

    part: Comparison
    found: Crossed
    means: Mapping[Term, float]
    p: tuple[float, float]
    """P-values of support and of refutation."""
    lenders: tuple[str, ...] = ()
    """Arms of several seeds by which those of one are taken to vary."""
    apart: str = ""
    """Which prompts not all of its arms were judged on; empty if they were judged on the same."""


def judge(
    claims: Mapping[str, Claim],
    observed: Mapping[Term, Observed],
    *,
    alpha: float = ALPHA,
    missing: Mapping[Term, str] | None = None,
    pooled: bool = False,
) -> list[Verdict]:
    """Return a verdict on each claim, by name, in their order.

    `observed` has the values of every term. A claim with a term that is not in it is not tested; `missing` may say why.
    With `pooled`, the noise over seeds of numbers from score rows is taken from all arms of `observed` together, which
    assumes that they vary alike (see `crossed_pooled.with_pooled`). It belongs in the plan, before the runs.
    """
    pool = pool_of(observed) if pooled else {}
    tested: dict[str, list[_Tested]] = {}
    reasons: dict[str, str] = {}
    for name, claim in claims.items():
        if gone := [term for term in claim.terms if term not in observed]:
            told = ((missing or {}).get(term, f"{term} was not observed") for term in gone)
            reasons[name] = "; ".join(dict.fromkeys(told))
        else:
            tested[name] = [_test(part, observed, pool, claim.terms) for part in claim.parts]
    raw = {name: _of_parts(parts) for name, parts in tested.items()}
    # A hypothesis that could not be tested stays one of the family: it was claimed before the runs.
    supported, refuted = (
        dict(zip(claims, holm([_or_one(raw[name][side]) if name in raw else 1.0 for name in claims]), strict=True))
        for side in (0, 1)
    )
    return [
        _untested(name, claim, reasons[name], len(claims), alpha)
        if name in reasons
        else _verdict(name, claim, tested[name], raw[name], (supported[name], refuted[name]), len(claims), alpha)
        for name, claim in claims.items()
    ]


Kind = tuple[str, str, int | None]
"""Quantity, split and step of a term."""


def pool_of(observed: Mapping[Term, Observed], *, curves: bool = False) -> dict[Kind, Part]:
    """Return the variance over seeds of every quantity from score rows, and from `curves`, pooled over arms."""
    arms: dict[Kind, list[Observed]] = {}
    for term, one in observed.items():
        if one.influence_SC is not None or (curves and one.row_error is not None):
            arms.setdefault(_kind(term), []).append(one)
    found = {kind: pooled_over(ones) for kind, ones in arms.items()}
    return {kind: part for kind, part in found.items() if part is not None}


def _kind(term: Term) -> Kind:
    return term.quantity, term.on, term.step


def _lenders(kind: Kind, near: Sequence[Term], observed: Mapping[Term, Observed]) -> list[Term]:
    """Return the terms by which arms of one seed are taken to vary: those of `near` with several seeds, or all others.

    So what other hypotheses ask for changes no verdict on a claim whose own arms tell how much seeds differ.
    """
    several = [term for term, one in observed.items() if _kind(term) == kind and len(one.seeds) > 1]
    return [term for term in several if term in near] or several


def contrast_of(
    part: Comparison,
    observed: Mapping[Term, Observed],
    pool: Mapping[Kind, Part] | None = None,
    *,
    near: Sequence[Term] = (),
) -> Crossed:
    """Return the value of a comparison, above 0 where it holds, with its noise over seeds and prompts.

    `near` are the terms of its claim, if it is a part of one.
    """
    means = {term: observed[term].mean for term in part.terms}
    gradient = part.gradient(means)
    weighed = [(term.quantity, observed[term], slope) for term, slope in gradient.items()]
    found = weighed_sum(weighed, part.value(means))
    pooled = [
        (observed[term], slope, pool[_kind(term)]) for term, slope in gradient.items() if pool and _kind(term) in pool
    ]
    found = with_pooled(found, pooled) if len(pooled) == len(gradient) else found
    if not found.single_seeds:
        return found
    # Only a seed that is missing takes noise from other arms unasked: in no interval it would be worse.
    kinds = dict.fromkeys(map(_kind, gradient))
    lent = (pool_of(_some(observed, _lenders(kind, near or part.terms, observed)), curves=True) for kind in kinds)
    others = {kind: found_part for one in lent for kind, found_part in one.items()}
    return with_noise_of_others(
        found, [(observed[term], slope, others.get(_kind(term))) for term, slope in gradient.items()]
    )


def _some(observed: Mapping[Term, Observed], terms: Sequence[Term]) -> dict[Term, Observed]:
    return {term: observed[term] for term in terms}


def _test(
    part: Comparison, observed: Mapping[Term, Observed], pool: Mapping[Kind, Part], near: Sequence[Term]
) -> _Tested:
    means = {term: observed[term].mean for term in part.terms}
    found, p = contrast_of(part, observed, pool, near=near), _p_of(part, observed, pool, near)
    single = [_kind(term) for term in part.terms if len(observed[term].seeds) == 1] if found.is_borrowed else []
    arms = dict.fromkeys(term.arm for kind in dict.fromkeys(single) for term in _lenders(kind, near, observed))
    return _Tested(part=part, found=found, means=means, p=p, lenders=tuple(arms), apart=_apart(part, observed))


def _p_of(
    part: Comparison, observed: Mapping[Term, Observed], pool: Mapping[Kind, Part], near: Sequence[Term]
) -> tuple[float, float]:
    """Return the p-values of support and of refutation of a comparison.

    One with `max` holds where any of its arguments makes it hold, one with `min` where all do. "All" is tested by
    intersection–union, "any" by Bonferroni's rule, so that a choice after the fact is paid for.
    """
    if (choices := part.choices) is not None:
        each = [_p_of(one, observed, pool, near) for one in choices[1]]
        support, refutation = zip(*each, strict=True)
        if choices[0] == "all":
            return _of_all(support), _of_any(refutation)
        return _of_any(support), _of_all(refutation)
    found = contrast_of(part, observed, pool, near=near)
    if not found.is_testable:
        return math.nan, math.nan
    if not found.variance > 0:
        seen = found.p_of_constant
        return (seen, 1.0) if part.holds(found.value) else (1.0, seen)
    return found.p_above(), found.p_below()


def _of_all(values: Sequence[float]) -> float:
    """Return the p-value of all of several claims: the largest; NaN if one was not tested."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def _of_any(values: Sequence[float]) -> float:
    """Return the p-value of any of several claims: the smallest times their number; NaN if none was tested."""
    known = [p for p in values if not math.isnan(p)]
    return min(1.0, len(values) * min(known)) if known else math.nan


def _apart(part: Comparison, observed: Mapping[Term, Observed]) -> str:
    """Return which prompts not all arms of a comparison were judged on; empty if they were judged on the same."""
    judged: dict[str, list[set[str]]] = {}
    for term in part.terms:
        if observed[term].influence_SC is not None:
            judged.setdefault(term.on, []).append(set(observed[term].clusters))
    for on, prompts in judged.items():
        common, every = set.intersection(*prompts), set.union(*prompts)
        if common != every:
            return (
                f"the arms were judged on different {on} prompts ({len(common):,} of {len(every):,} are common to all)"
                f", so what differs may be the prompts"
            )
    return ""


def _of_parts(parts: Sequence[_Tested]) -> tuple[float, float]:
    """Return the p-values of a claim: that of support is NaN if any part is not testable, of refutation if none is."""
    support, refutation = zip(*(one.p for one in parts), strict=True)
    return _of_all(support), _of_any(refutation)


def _or_one(p: float) -> float:
    return 1.0 if math.isnan(p) else p


def _untested(name: str, claim: Claim, why: str, count: int, alpha: float) -> Verdict:
    return Verdict(
        name=name,
        claim=str(claim),
        verdict="not tested",
        sentence=f"Not tested: {why}.",
        parts=(),
        p_supported=math.nan,
        p_refuted=math.nan,
        adjusted_supported=math.nan,
        adjusted_refuted=math.nan,
        num_hypotheses=count,
        alpha=alpha,
        needed=None,
        decide="",
    )


def _verdict(
    name: str,
    claim: Claim,
    parts: Sequence[_Tested],
    raw: tuple[float, float],
    adjusted: tuple[float, float],
    count: int,
    alpha: float,
) -> Verdict:
    verdict: Finding = "undecided"
    if not math.isnan(raw[0]) and adjusted[0] <= alpha:
        verdict = "supported"
    elif not math.isnan(raw[1]) and adjusted[1] <= alpha:
        verdict = "refuted"
    open_ones = _what_decides(parts, raw, adjusted, count, alpha) if verdict == "undecided" else (None, "")
    shown = tuple(_shown(one, alpha) for one in parts)
    return Verdict(
        name=name,
        claim=str(claim),
        verdict=verdict,
        sentence=_sentence(verdict, shown, raw, adjusted, count, alpha),
        parts=shown,
        p_supported=raw[0],
        p_refuted=raw[1],
        adjusted_supported=math.nan if math.isnan(raw[0]) else adjusted[0],
        adjusted_refuted=math.nan if math.isnan(raw[1]) else adjusted[1],
        num_hypotheses=count,
        alpha=alpha,
        needed=open_ones[0],
        decide=open_ones[1],
    )


def _shown(one: _Tested, alpha: float) -> PartVerdict:
    found, p = one.found, one.p
    lent = OF_OTHERS.format(arms=listed(one.lenders)) if found.is_borrowed else ""
    of_seeds_alone = ONE_VALUE if found.is_blind else ONE_SEED if found.single_seeds else lent
    same = EQUAL if found.is_constant and not found.num_prompts else ""
    taken = OF_A_SIDE if one.part.takes_sides_alone else CHOSEN
    choice = "" if not one.part.takes_extremes else taken if one.part.choices else NOT_APART
    left_out = [why for why in (of_seeds_alone or same, ROWS * found.rows_unknown, choice, one.apart) if why]
    of_seeds = math.sqrt(sum(part.variance for part in found.seeds))
    possible = one.part.bounds({term: range_of(term.quantity) for term in one.means})
    return PartVerdict(
        text=str(one.part),
        estimate=cut(found.interval(1 - 2 * alpha), possible),
        terms={str(term): mean for term, mean in one.means.items()},
        p_supported=p[0],
        p_refuted=p[1],
        error_seeds=math.nan if found.single_seeds and not found.seeds else of_seeds,
        error_prompts=0.0 if found.prompts is None else math.sqrt(found.prompts.variance),
        num_seeds=found.num_seeds,
        num_prompts=found.num_prompts,
        not_covered="; ".join(left_out),
        is_of_these_runs=found.single_seeds and not found.is_blind,
    )


# --- words -----------------------------------------------------------------------------------------------------


def _sentence(
    verdict: Finding,
    parts: Sequence[PartVerdict],
    raw: tuple[float, float],
    adjusted: tuple[float, float],
    count: int,
    alpha: float,
) -> str:
    over = f" after Holm over {count} hypotheses" if count > 1 else ""
    p = {"supported": adjusted[0], "refuted": adjusted[1]}.get(verdict)
    said = "; ".join(in_full(part) for part in parts)
    left_out = "".join(f" But {why}." for why in dict.fromkeys(part.not_covered for part in parts) if why)
    if p is not None:
        whose = THESE_RUNS * any(part.is_of_these_runs for part in parts)
        return f"{verdict.capitalize()}{whose} ({_p(p)}{over}): {said}.{left_out}"
    known = [q for q in raw if not math.isnan(q)]
    if not known:
        return f"Undecided: {said}.{left_out}"
    alone = " On its own it would be decided; with all hypotheses of the plan accounted for it is not." * (
        min(known) <= alpha and count > 1
    )
    nearest = min(_or_one(q) for q in adjusted)
    return f"Undecided (smallest {_p(nearest)}{over}): {said}.{left_out}{alone}"


def _p(value: float) -> str:
    return f"p = {value:.3f}" if value >= 0.001 else "p < 0.001"


def _what_decides(
    parts: Sequence[_Tested], raw: tuple[float, float], adjusted: tuple[float, float], count: int, alpha: float
) -> tuple[Needed | None, str]:
    """Return what would decide an undecided claim, as numbers and as a sentence."""
    if any(one.found.is_blind for one in parts):
        return None, "A second seed of the arms that have one, and better a third, would tell the noise between runs."
    if any(not one.found.is_testable for one in parts):
        few = any(0 < one.found.num_prompts < MIN_CLUSTERS for one in parts)
        return None, f"At least {MIN_CLUSTERS} test prompts are needed for any verdict." if few else ""
    if any(one.found.num_prompts and one.found.is_constant for one in parts):
        return None, "All prompts agree, so only more test prompts tell how often one does not."
    supporting = all(one.found.value > 0 for one in parts)
    side = 0 if supporting else 1
    factor = adjusted[side] / raw[side] if 0 < raw[side] < 1 and adjusted[side] < 1 else float(count)
    level = alpha / factor / (1 if supporting else len(parts))
    chosen = [one for one in parts if one.p[side] > level] if supporting else [min(parts, key=lambda one: one.p[1])]
    if any(one.found.is_borrowed for one in chosen):
        return None, "More seeds of the arms that have one would tell how much theirs differ, and what would decide."
    if any(one.found.is_constant for one in chosen):
        seeds = math.ceil(math.log(level) / math.log(0.5))
        return None, f"{seeds} seeds whose values are all on the same side would decide it."
    sizes = []
    for one in chosen:
        found = one.found
        noise = noise_of(found, limit=0.0)
        # The difference that was seen is taken for the true one.
        sizes.append(
            needed(
                abs(found.value),
                noise if found.value > 0 else noise.turned(),
                seeds=found.num_seeds,
                prompts=found.num_prompts,
                alpha=level,
                arms=max(round(found.seeds[0].freedom / (found.num_seeds - 1)), 1) if found.is_pooled else 1,
            )
        )
    return _largest(sizes), _decide(_largest(sizes), chosen, supporting=supporting)


def _largest(sizes: Sequence[Needed]) -> Needed:
    """Return the sizes that decide all parts; None where some part cannot be decided in that way."""

    def most(counts: Sequence[int | None]) -> int | None:
        known = [count for count in counts if count is not None]
        return max(known) if len(known) == len(counts) else None

    pairs = [one.both for one in sizes if one.both is not None]
    both = (max(seeds for seeds, _ in pairs), max(prompts for _, prompts in pairs)) if pairs else None
    return Needed(
        prompts=most([one.prompts for one in sizes]),
        seeds=most([one.seeds for one in sizes]),
        both=both if len(pairs) == len(sizes) else None,
    )


def _decide(sizes: Needed, chosen: Sequence[_Tested], *, supporting: bool) -> str:
    seeds, prompts = min(one.found.num_seeds for one in chosen), max(one.found.num_prompts for one in chosen)
    side = "support" if supporting else "refute"
    on = next(term.on for one in chosen for term in one.part.terms)
    unit = f"{on} {max(chosen, key=lambda one: one.found.num_prompts).found.unit}"
    ways = []
    if sizes.prompts is not None:
        ways.append(f"about {sizes.prompts:,} {unit} in place of {prompts:,}, with {seeds} seed{'s' * (seeds > 1)}")
    if sizes.seeds is not None:
        same = f", on the same {prompts:,} {unit.partition(' ')[2]}" if prompts else ""
        ways.append(f"about {sizes.seeds} seeds in place of {seeds}{same}")
    if not ways and sizes.both is not None:
        ways.append(f"about {sizes.both[0]} seeds together with {sizes.both[1]:,} {unit}")
    if any(one.found.single_seeds for one in chosen) and not ways:
        return "Noise over seeds is not known with one seed, so no size can be named; run two more seeds first."
    if not ways:
        return (
            f"More data would hardly decide it: the estimate lies so close to the claim's limit that, if the truth is "
            f"what was estimated, not even {MOST_TIMES} times the prompts and seeds would {side} it with {POWER:.0%} "
            f"chance."
        )
    return f"If the truth is what was estimated, {', or '.join(ways)} would {side} it with {POWER:.0%} chance."
