"""What a design can show: the smallest visible difference, chances to support and to refute, values that are possible.

The noise of one comparison of a hypothesis has three parts: how its value differs from seed to seed, how one seed's
value depends on the prompts that were drawn, and how the prompts move all seeds alike. More seeds make the first two
smaller, more prompts the last two. The noise comes from earlier runs (`noise_of`) or from stated assumptions
(`assumed.py`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from scipy.optimize import linprog
from scipy.special import chdtri, ndtr, stdtrit

from rewardlab.analysis.bounded import Bounded
from rewardlab.analysis.crossed import Crossed
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.stats import MIN_CLUSTERS
from rewardlab.experiments.expressions import Claim, Comparison, Range, Term
from rewardlab.experiments.tails import DRAWS, Tail, chance_to_exceed, least_found

POWER: Final = 0.80
ALPHA: Final = 0.05
MOST_TIMES: Final = 100
"""Multiple of the prompts or seeds beyond which no number is looked for: nobody collects that many."""
_NODES, _WEIGHTS = (one.tolist() for one in np.polynomial.legendre.leggauss(64))
_HALVINGS: Final = 60
_DRAWS: Final = 4_000
_MOST_ARMS: Final = 40
"""Most arms that are drawn: with more, the pooled variance is hardly known better."""
_TRIALS: Final = 2_000
_FAR: Final = 1e6
"""Stands for ∞ where values are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The noise of one comparison, as variances of its value for one seed."""

    seeds: float
    """σ²_S, over seeds, on endlessly many prompts; NaN if it is not known."""
    within: float
    """σ²_SP/C: what the prompts do to one seed, apart from what they do to all seeds."""
    prompts: float
    """σ²_P/C: what the prompts do to all seeds."""
    num_prompts: int
    """C, to which the two belong; 0 where nothing comes from prompts."""
    tail: Tail | None = None
    """The third moments with C prompts, of a claim on what has a long tail; None for all others."""

    def turned(self) -> Noise:
        """Return the noise of the negative value, by which a claim is refuted."""
        return self if self.tail is None else replace(self, tail=self.tail.turned())

    def at_the_ends(self) -> Noise:
        """Return the noise for values at the ends of their ranges, where shares have no tail: nothing varies there."""
        return replace(self, tail=None) if self.tail is not None and self.tail.most < math.inf else self

    def error(self, seeds: int, prompts: int) -> float:
        """Return the standard error of the value with so many seeds and prompts."""
        own, shared = self._variances(seeds, prompts)
        return math.sqrt(own + shared)

    def _variances(self, seeds: int, prompts: int) -> tuple[float, float]:
        share = self.num_prompts / prompts if self.num_prompts else 1.0
        if seeds == 1:
            # One seed shows nothing about the noise over seeds; the verdict is about this model.
            return 0.0, (self.within + self.prompts) * share
        return (self.seeds + self.within * share) / seeds, self.prompts * share


def noise_of(found: Crossed, *, limit: float | None = None) -> Noise:
    """Return the noise of one seed, as the runs of several showed it; with `limit` as it would be if that were true."""
    tail = _tail_of(found, has_ends=limit is None)
    found = found if limit is None else found.at_limit(limit)
    seeds = sum(part.variance for part in found.seeds)
    # Noise of an arm of one seed that was taken from others is of one seed, the rest of as many as the others have.
    is_unknown = found.is_borrowed or (found.single_seeds and not found.seeds)
    own = math.nan if is_unknown else max(seeds - found.within, 0.0) * found.num_seeds
    return Noise(
        seeds=own,
        within=found.within * found.num_seeds,
        prompts=0.0 if found.prompts is None else found.prompts.variance,
        num_prompts=found.num_prompts,
        tail=tail,
    )


def _tail_of(found: Crossed, *, has_ends: bool) -> Tail | None:
    """Return the third moment of the mean over seeds of a claim on losses; None for other claims."""
    if not isinstance(found.bounded, Bounded) or not found.bounded.is_skewed:
        return None
    values_C = np.repeat(found.bounded.values, found.bounded.counts)
    third = float(((values_C - values_C.mean()) ** 3).mean()) / values_C.size**2
    return Tail.seen(third, float(values_C.var()) / values_C.size, has_ends=has_ends)


def chance(ahead: float, noise: Noise, *, seeds: int, prompts: int, alpha: float = ALPHA, arms: int = 1) -> float:
    """Return the chance that the one-sided test of `crossed` at level `alpha` finds a true value of `ahead` above 0.

    The variance over seeds is drawn with its χ², the mean from a normal distribution; the variance over prompts, which
    has many degrees of freedom, is taken as known. With noise pooled over several `arms` the variance is drawn as that
    rule finds it. Of what has a long tail, the mean and the variance over prompts are drawn together.
    """
    own, shared = noise._variances(seeds, prompts)
    error = math.sqrt(own + shared)
    if not error > 0:
        return float(ahead > 0) if error == 0 else math.nan
    if noise.tail is not None and prompts >= MIN_CLUSTERS:
        return _chance_of_tail(ahead, noise, noise.tail, seeds=seeds, prompts=prompts, alpha=alpha, arms=arms)
    of_prompts = float(stdtrit(max(prompts - 1, 1), alpha)) ** 2 * shared if shared else 0.0
    if not own:
        return float(ndtr((ahead - math.sqrt(of_prompts)) / error))
    ratio_R, weight_R = _variances_seen(seeds, arms)
    of_seeds = float(stdtrit(arms * (seeds - 1), alpha)) ** 2 * own
    reach_R = np.sqrt(of_seeds * ratio_R + of_prompts)
    return float(weight_R @ ndtr((ahead - reach_R) / error))


def _chance_of_tail(
    ahead: float, noise: Noise, tail: Tail, *, seeds: int, prompts: int, alpha: float, arms: int
) -> float:
    own, shared = noise._variances(seeds, prompts)
    share = noise.num_prompts / prompts
    over_seeds = noise.seeds / seeds if seeds > 1 else 0.0
    moved = own + shared - over_seeds
    if not moved > 0:
        return chance(ahead, replace(noise, tail=None), seeds=seeds, prompts=prompts, alpha=alpha, arms=arms)
    found = tail.drawn(prompts, moved, seeds=seeds, share=share)
    own_R = np.zeros(DRAWS)
    if own:
        own_R = float(stdtrit(arms * (seeds - 1), alpha)) ** 2 * own * _variances_drawn(seeds, arms)
    quantile = -float(stdtrit(prompts - 1, alpha))
    if tail.of_counts:
        # Around a limit that is v away outcomes vary by v² less than around their mean.
        quantile /= math.sqrt(1 + quantile**2 / prompts)
    least_R = least_found(
        tail,
        found,
        share=share,
        moved=moved,
        shared=shared,
        own_R=own_R,
        quantile=quantile,
        constant=tail.reach * (1 - alpha ** (1 / prompts)),
    )
    return chance_to_exceed(least_R, ahead, found, moved=moved, over_seeds=over_seeds)


@functools.lru_cache(maxsize=64)
def _variances_drawn(seeds: int, arms: int) -> FloatArray:
    """Return [R] estimates of a variance over seeds of 1, as many as prompts are drawn."""
    if arms > 1:
        return _variances_seen(seeds, arms)[0][:DRAWS]
    quantiles_R = np.random.default_rng(1).permutation((np.arange(DRAWS) + 0.5) / DRAWS)
    found: FloatArray = chdtri(seeds - 1, quantiles_R) / (seeds - 1)
    return found


@functools.lru_cache(maxsize=1024)
def _variances_seen(seeds: int, arms: int) -> tuple[FloatArray, FloatArray]:
    """Return [R] estimates of a variance over seeds of 1, and [R] weights that sum to 1.

    For one arm, or two paired ones, they are found by quadrature. For noise that is pooled over `arms` they are drawn,
    for a difference of two of these arms.
    """
    if arms == 1:
        freedom = seeds - 1
        return chdtri(freedom, (1 - np.array(_NODES)) / 2) / freedom, np.array(_WEIGHTS) / 2
    drawn_RAS = np.random.default_rng(0).normal(size=(_DRAWS, min(arms, _MOST_ARMS), seeds))
    own_R = np.var(drawn_RAS[:, 0] - drawn_RAS[:, 1], axis=1, ddof=1) / 2
    return np.maximum(own_R, np.var(drawn_RAS, axis=2, ddof=1).mean(1)), np.full(_DRAWS, 1 / _DRAWS)


def visible(
    noise: Noise, *, seeds: int, prompts: int, alpha: float = ALPHA, power: float = POWER, arms: int = 1
) -> float:
    """Return the smallest true distance from 0 that is found with this chance; NaN if the noise is not known."""
    error = noise.error(seeds, prompts)
    if not error > 0:
        return error
    high = error
    while chance(high, noise, seeds=seeds, prompts=prompts, alpha=alpha, arms=arms) < power:
        high *= 2
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = chance(middle, noise, seeds=seeds, prompts=prompts, alpha=alpha, arms=arms) >= power
        low, high = (low, middle) if enough else (middle, high)
        if high - low < 1e-6 * high:
            break
    return high


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """How large a study would have to be to decide, if the truth is what was estimated; None where no number does."""

    prompts: int | None
    """With as many seeds."""
    seeds: int | None
    """With as many prompts."""
    both: tuple[int, int] | None
    """Seeds and prompts, made larger by the same factor."""


def needed(
    ahead: float,
    noise: Noise,
    *,
    seeds: int,
    prompts: int,
    alpha: float = ALPHA,
    power: float = POWER,
    arms: int = 1,
) -> Needed:
    """Return how many prompts, or seeds, or both, find a true distance of `ahead` from 0 with this chance.

    No number beyond `MOST_TIMES` times the present one is looked for.
    """

    def enough(of_seeds: int, of_prompts: int) -> bool:
        return chance(ahead, noise, seeds=of_seeds, prompts=of_prompts, alpha=alpha, arms=arms) >= power

    if not ahead > 0:
        return Needed(prompts=None, seeds=None, both=None)
    more_prompts = _least(lambda count: enough(seeds, count), prompts) if prompts else None
    if math.isnan(noise.seeds):
        return Needed(prompts=more_prompts, seeds=None, both=None)
    more_seeds = _least(lambda count: enough(count, prompts), max(seeds, 2))
    times = _least(lambda tenths: enough(_times(seeds, tenths), _times(prompts, tenths)), 10) if prompts else None
    both = None if times is None else (_times(seeds, times), _times(prompts, times))
    return Needed(prompts=more_prompts, seeds=more_seeds, both=both)


def _times(count: int, tenths: int) -> int:
    return math.ceil(count * tenths / 10)


def _least(enough: Callable[[int], bool], start: int) -> int | None:
    """Return the least number from `start` on for which `enough` holds; None if none up to `MOST_TIMES` times does."""
    most = MOST_TIMES * start
    if not enough(most):
        return None
    low, high = start - 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# --- possible values -------------------------------------------------------------------------------------------

Possible = Literal["yes", "no", "not shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Whether a claim can hold, and whether it can fail, for values within their ranges."""

    can_hold: Possible
    can_fail: Possible
    holds_at: Mapping[str, float] | None
    """Term -> a value of it, together an example for which the claim holds."""
    fails_at: Mapping[str, float] | None

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the claim is not a test; empty if it is one, or if that could not be decided."""
        answers = ((self.can_hold, "support"), (self.can_fail, "refute"))
        return tuple(f"no possible values {what} it" for answer, what in answers if answer == "no")


def reach_of(claim: Claim, ranges: Mapping[Term, Range], *, seed: int = 0) -> Reach:
    """Return whether a claim can hold and can fail, with an example of each.

    For linear claims this is decided, by linear programming; for others by bounds and by examples, drawn with `seed`,
    and may stay open.
    """
    holds = _feasible(claim.parts, ranges, seed=seed, holding=True)
    failing = [_feasible([part], ranges, seed=seed, holding=False) for part in claim.parts]
    answers = [answer for answer, _ in failing]
    fails: Possible = "yes" if "yes" in answers else "not shown" if "not shown" in answers else "no"
    example = next((at for answer, at in failing if answer == "yes"), None)
    return Reach(can_hold=holds[0], can_fail=fails, holds_at=_named(holds[1]), fails_at=_named(example))


def _named(example: Mapping[Term, float] | None) -> dict[str, float] | None:
    return None if example is None else {str(term): value for term, value in example.items()}


def _feasible(
    parts: Sequence[Comparison], ranges: Mapping[Term, Range], *, seed: int, holding: bool
) -> tuple[Possible, Mapping[Term, float] | None]:
    """Return whether values exist for which all parts hold (or, for one part, fail), with an example."""
    terms = list(dict.fromkeys(term for part in parts for term in part.terms))

    def as_wanted(values: Mapping[Term, float]) -> bool:
        found = [part.value(values) for part in parts]
        return all(not math.isnan(v) and part.holds(v) is holding for part, v in zip(parts, found, strict=True))

    if all(part.is_linear for part in parts):
        example = _by_program(parts, terms, ranges, sign=1.0 if holding else -1.0)
        return ("yes", example) if example is not None and as_wanted(example) else ("no", None)
    for part in parts:
        low, high = part.bounds(ranges)
        if not part.holds(high) if holding else part.holds(low):
            return "no", None
    generator = np.random.default_rng(seed)
    limits = [(max(low, -_FAR), min(high, _FAR)) for low, high in (ranges[term] for term in terms)]
    corners = itertools.islice(itertools.product(*limits), _TRIALS)
    drawn = ([generator.uniform(low, high) for low, high in limits] for _ in range(_TRIALS))
    for point in itertools.chain(corners, drawn):
        values = dict(zip(terms, point, strict=True))
        if as_wanted(values):
            return "yes", values
    return "not shown", None


def _by_program(
    parts: Sequence[Comparison], terms: Sequence[Term], ranges: Mapping[Term, Range], *, sign: float
) -> Mapping[Term, float] | None:
    """Return values at which the least of the parts' values, times `sign`, is largest."""
    at_zero = dict.fromkeys(terms, 0.0)
    rows, ends = [], []
    for part in parts:
        slopes = part.gradient(at_zero)
        rows.append([*(-sign * slopes.get(term, 0.0) for term in terms), 1.0])
        ends.append(sign * part.value(at_zero))
    limits = [tuple(end if math.isfinite(end) else None for end in ranges[term]) for term in terms]
    # The last variable is the least value of the parts. It is at most 1, so that infinite ranges leave a solution.
    goal = [0.0] * len(terms) + [-1.0]
    found = linprog(goal, A_ub=rows, b_ub=ends, bounds=[*limits, (None, 1.0)], method="highs")
    return dict(zip(terms, found.x[:-1].tolist(), strict=True)) if found.status == 0 else None
