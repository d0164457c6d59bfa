"""Expressions of shares, losses and AUC over seeds and prompts as means of what has an end, for bounded.py.

Legend: S seeds, C prompts (clusters).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from rewardlab.analysis.bounded import Bounded, Moves
from rewardlab.analysis.crossed import Observed
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.stats import MIN_CLUSTERS

_ROUNDING: Final = 1e-12


def shares_over(parts: Sequence[tuple[Observed, float]], value: float) -> Bounded | None:
    """Return an expression with these derivatives as a mean over prompts; None for fewer than ten prompts.

    An outcome of a share lies between 0 and 1 in every seed. Loss, Brier score and AUC have no such end: theirs is the
    value of a comparison that comes out the other way, on the side of lost comparisons. What does not come from prompts
    is taken as known.

    If a prompt has m comparisons, √m of them are taken to come out at the end at once, of shares too unless every
    outcome of a prompt is 0, ½ or 1. All m would find next to nothing, none would trust what happens not to vary. None
    where m is not known.
    """
    of_prompts = [(one, weight) for one, weight in parts if weight and one.influence_SC is not None]
    if not all(one.each_SC is not None or _has_single_outcomes(one) for one, _ in of_prompts):
        return None
    names = sorted({name for one, _ in of_prompts for name in one.clusters})
    if len(names) < MIN_CLUSTERS:
        return None
    place = {name: number for number, name in enumerate(names)}
    is_skewed = any(one.has_long_tail for one, _ in of_prompts)
    return Bounded.of([(_moves(one, place), weight) for one, weight in of_prompts], value, is_skewed=is_skewed)


def _has_single_outcomes(one: Observed) -> bool:
    """Return whether the outcome of every prompt is that of one comparison in every seed: 0, ½ or 1."""
    weight_SC = _weight_of(one)
    judged_SC = weight_SC > 0
    outcome_SC = one.by_seed_S[:, None] + _moved(one) / np.where(judged_SC, weight_SC, 1.0)
    return bool(np.isclose(2 * outcome_SC, np.round(2 * outcome_SC), atol=_ROUNDING)[judged_SC].all())


def _weight_of(one: Observed) -> FloatArray:
    """Return [S, C] each prompt's part of the comparisons of a seed."""
    assert one.influence_SC is not None
    return np.full_like(one.influence_SC, 1 / len(one.clusters)) if one.weight_SC is None else one.weight_SC


def _moved(one: Observed) -> FloatArray:
    """Return [S, C] how far the outcome of each prompt moves the share of a seed."""
    assert one.influence_SC is not None
    if one.outcome_SC is None:
        return one.influence_SC
    moved: FloatArray = _weight_of(one) * (one.outcome_SC - one.by_seed_S[:, None])
    return moved


def _moves(one: Observed, place: Mapping[str, int]) -> Moves:
    """Return how far prompts move the mean over seeds of a share, and could."""
    down_SC, up_SC = _ends(one)
    at_C = np.array([place[name] for name in one.clusters])
    moved_C, down_C, up_C = (
        np.bincount(at_C, moved_SC.mean(axis=0), minlength=len(place)).astype(np.float64)
        for moved_SC in (_moved(one), down_SC, up_SC)
    )
    return Moves(moved_C=moved_C, down_C=down_C, up_C=up_C)


def _ends(one: Observed) -> tuple[FloatArray, FloatArray]:
    """Return [S, C] how far each prompt could move the value of a seed down, and up."""
    weight_SC, value_S1 = _weight_of(one), one.by_seed_S[:, None]
    if one.each_SC is not None and (one.turned_S is not None or not _has_single_outcomes(one)):
        weight_SC = weight_SC / np.sqrt(np.maximum(one.each_SC, 1))
    if one.turned_S is None:
        return -weight_SC * value_S1, weight_SC * (1 - value_S1)
    turned_S1 = one.turned_S[:, None]
    return weight_SC * np.minimum(turned_S1, 0), weight_SC * np.maximum(turned_S1, 0)
