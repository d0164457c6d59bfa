"""Mean losses of one model, NLL and Brier score, whose intervals allow for errors that were not drawn.

Where a few errors have nearly all of the loss, comparisons of which none is ranked wrongly do not show it, and neither
does their variance. So the upper limit is at least that of the likeliest distribution with a lost comparison as its
end (empirical likelihood: Owen 1988, Biometrika 75, 237-249; `bounded.py`), as claims of plans on losses are tested.

Legend: N comparisons.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import expit

from rewardlab.analysis import stats
from rewardlab.analysis.bounded import Unlikely
from rewardlab.analysis.intervals import FloatArray
from rewardlab.core.types import Estimate

TOSSED: Final = 0.25
"""Comparisons that are tossed, at the mean size of the logits, beside those that a temperature is fitted to.

One in all costs more: of 60 comparisons at an accuracy of 0.98 a loss that is 2.5 standard errors ahead was never found
(300 draws, not kept)."""
HOTTEST: Final = 20.0
"""Highest temperature."""
WIDENED: Final = ", widened for errors not drawn"
"""End of the method of an estimate whose upper limit is by the errors that might have been drawn."""


def nll_values(logit: FloatArray, label: FloatArray) -> FloatArray:
    """Return [N] negative log-likelihoods of labels in [0, 1] under σ(logit)."""
    found: FloatArray = label * np.logaddexp(0.0, -logit) + (1 - label) * np.logaddexp(0.0, logit)
    return found


def brier_values(logit: FloatArray, label: FloatArray) -> FloatArray:
    """Return [N] squared differences of σ(logit) and labels in [0, 1]."""
    found: FloatArray = np.square(expit(logit) - label)
    return found


def nll_estimate(logit: FloatArray, label: FloatArray, clusters: Sequence[str]) -> Estimate:
    """Return the mean NLL of labels [N] in [0, 1] under σ(logit [N]), clustered by prompt where keys repeat."""
    return _widened(stats.level_loss(nll_values(logit, label), clusters), nll_values, logit, label, clusters)


def brier_estimate(logit: FloatArray, label: FloatArray, clusters: Sequence[str]) -> Estimate:
    """Return the mean Brier score, likewise."""
    found = _widened(stats.level_loss(brier_values(logit, label), clusters), brier_values, logit, label, clusters)
    return replace(found, high=min(found.high, 1.0)) if found.method.endswith(WIDENED) else found


def _widened(
    found: Estimate,
    values: Callable[[FloatArray, FloatArray], FloatArray],
    logit: FloatArray,
    label: FloatArray,
    clusters: Sequence[str],
) -> Estimate:
    """Return a mean loss with its upper limit raised to that of errors that might have been drawn, if fewer than ten
    prompts have one."""
    turned, certain = np.where(label < 0.5, -logit, logit), np.maximum(label, 1 - label)
    erring = set(itertools.compress(clusters, (turned < 0).tolist()))
    if math.isnan(found.high) or len(erring) >= stats.MIN_CLUSTERS:
        return found
    lost = values(-np.abs(turned), certain)
    chances = expit(-np.abs(turned) / temperature_of(turned, certain))
    unlikely = Unlikely(values=lost, chances=chances)
    bounded = unlikely.mean_of(values(turned, certain), stats.numbered(clusters)[0])
    high = bounded.high((1 - found.level) / 2)
    return replace(found, high=high, method=f"{found.method}{WIDENED}") if high > found.high else found


def temperature_of(logit: FloatArray, label: FloatArray) -> float:
    """Return the temperature, from 1 to `HOTTEST`, that fits labels [N] and `TOSSED` more that are tossed.

    A model that is too sure thinks that what it is sure of hardly ever loses, and of few lost comparisons none of that
    kind may have been drawn.
    """
    tossed = float(np.abs(logit).mean())

    def loss(log_temperature: float) -> float:
        scale = math.exp(-log_temperature)
        sides = float(np.logaddexp(0.0, -tossed * scale) + np.logaddexp(0.0, tossed * scale))
        return float(nll_values(logit * scale, label).sum()) + TOSSED / 2 * sides

    return math.exp(minimize_scalar(loss, bounds=(0.0, math.log(HOTTEST)), method="bounded").x)
