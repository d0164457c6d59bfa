"""Noise over seeds that one arm takes from others.

Legend: S seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rewardlab.analysis.crossed import Crossed, Observed, Part


def pooled_over(arms: Sequence[Observed]) -> Part | None:
    """Return the variance of a number from seed to seed, pooled over arms; None if no arm has two seeds."""
    several = [one for one in arms if len(one.seeds) > 1]
    freedom = sum(len(one.seeds) - 1 for one in several)
    squares = sum(float(np.square(one.by_seed_S - one.mean).sum()) for one in several)
    return Part(variance=squares / freedom, freedom=freedom) if freedom else None


def with_pooled(found: Crossed, terms: Sequence[tuple[Observed, float, Part]]) -> Crossed:
    """Return an expression with its noise over seeds taken from many arms, given with each number and its derivative.

    A is then the larger of its own estimate and the pooled one, with the degrees of freedom of the pool. This assumes
    that the arms vary alike over seeds. If a compared arm varies more than the others, there are too many findings,
    though fewer than with the pooled estimate alone.
    """
    own = sum(part.variance for part in found.seeds)
    pooled = sum(weight**2 * part.variance / len(one.seeds) for one, weight, part in terms)
    freedom = min((part.freedom for _, _, part in terms), default=0.0)
    if found.single_seeds or not found.seeds or freedom <= sum(part.freedom for part in found.seeds):
        return found
    return replace(found, seeds=(Part(variance=max(own, pooled), freedom=freedom),), is_pooled=True)


def with_noise_of_others(found: Crossed, terms: Sequence[tuple[Observed, float, Part | None]]) -> Crossed:
    """Return an expression in which arms of one seed vary over seeds as arms of several do, given with each number, its
    derivative and the variance from seed to seed of other arms; as it is where that is not known of all.

    Otherwise the noise of that seed would be in no interval. Of one arm of one seed and one of k this is the t test of
    a single value against a sample, with the variance s²(1 + 1/k): Crawford & Howell (1998), The Clinical
    Neuropsychologist 12, 482-486. It assumes that the arms vary alike.
    """
    single = [(weight, part) for one, weight, part in terms if weight and one.varies != "never" and len(one.seeds) == 1]
    known = [(weight, part) for weight, part in single if part is not None]
    if found.is_blind or not known or len(known) < len(single):
        return found
    variance = sum(weight**2 * part.variance for weight, part in known)
    borrowed = Part(variance=variance, freedom=min(part.freedom for _, part in known))
    return replace(found, seeds=(*found.seeds, borrowed), single_seeds=False, is_borrowed=True)
