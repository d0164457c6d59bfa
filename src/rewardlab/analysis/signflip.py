"""The sign-flip permutation test of a paired difference, by prompt.

If two models are equally good, exchanging them on any one prompt changes nothing but the sign of that prompt's
difference. The p-value is the share of all sign patterns whose sum lies at least as far from 0 as the one seen.
Source: Fisher (1935), The Design of Experiments, chapter 3; Good (2005), Permutation, Parametric and Bootstrap Tests,
chapter 3; for models on the same items Dror, Baumer, Shlomov & Reichart (2018), ACL.

Legend: C prompts, R draws, V distinct sizes of a prompt's total.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr
from scipy.stats import binom

from rewardlab.analysis.intervals import FloatArray

MOST_PATTERNS: Final = 2**18
"""Most sign patterns that are all tried. With more, totals that are not multiples of ½ get random patterns."""
DRAWS: Final = 9_999
"""Random patterns. With the one that was seen they are 10,000, so p is a multiple of 1e-4."""
NORMAL_PROMPTS: Final = 5_000
"""Number of prompts of equal weight (`effective_prompts`) from which the normal limit replaces random patterns."""
_MOST_STEPS: Final = 5_000_000
"""Most half steps that totals of multiples of ½ may add up to for the exact distribution."""
_MOST_SIZES: Final = 400
_CHUNK_VALUES: Final = 4_000_000
# Sums that are equal in exact arithmetic differ by rounding, depending on the order of the terms.
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Significance:
    """The two-sided p-value of a test, and how it was computed."""

    p: float
    method: str


def sign_flip(totals_C: FloatArray, *, seed: int = 0) -> Significance:
    """Return the two-sided p-value of Σ totals being 0, by flipping the sign of each prompt's total.

    `totals_C` are the sums of paired differences over the comparisons of each prompt. Totals that are multiples of ½
    (differences of accuracy) get the exact distribution, whatever the number of prompts. For others all patterns are
    tried if there are at most `MOST_PATTERNS`, and the normal limit is used if the sum moves as with `NORMAL_PROMPTS`
    equal prompts or more. In between DRAWS random patterns are tried, and the one that was seen counts among them, so
    that p is never 0 and the test keeps its size (Phipson & Smyth 2010, Statistical Applications in Genetics and
    Molecular Biology 9).
    """
    assert np.isfinite(totals_C).all(), "leave out what is not finite first"
    moving = np.abs(totals_C[totals_C != 0])
    seen = abs(float(totals_C.sum()))
    if not moving.size:
        return Significance(p=1.0, method="sign flips by prompt, exact: no prompt differs")
    if _on_steps(moving):
        return Significance(p=_on_half_steps(moving, seen), method="sign flips by prompt, exact")
    if moving.size <= MOST_PATTERNS.bit_length() - 1:
        sums = _all_sums(moving)
        return Significance(
            p=float(np.mean(np.abs(sums) >= _reached(seen, moving))), method="sign flips by prompt, exact"
        )
    if effective_prompts(moving) >= NORMAL_PROMPTS:
        p = float(2 * ndtr(-_reached(seen, moving) / np.sqrt(np.square(moving).sum())))
        return Significance(p=min(1.0, p), method="sign flips by prompt, normal limit")
    extreme = _random_extremes(moving, _reached(seen, moving), seed=seed)
    return Significance(p=(1 + extreme) / (1 + DRAWS), method=f"sign flips by prompt, {DRAWS:,} random patterns")


def effective_prompts(totals_C: FloatArray) -> float:
    """Return (Σ T²)²/Σ T⁴, the number of equal prompts that would move the sum as much; 0 if none differs.

    Under random signs the excess kurtosis of the sum is −2 over this number, so the sum is far from normal where a few
    prompts carry it.
    """
    squares_C = np.square(totals_C / max(float(np.abs(totals_C).max(initial=0.0)), np.finfo(np.float64).tiny))
    return float(squares_C.sum() ** 2 / np.square(squares_C).sum()) if squares_C.any() else 0.0


def _reached(seen: float, moving: FloatArray) -> float:
    return seen - _ROUNDING * float(moving.sum())


def _on_steps(moving: FloatArray) -> bool:
    """Return whether totals are multiples of ½, few enough for `_on_half_steps`."""
    steps = 2 * moving
    return bool(
        (steps == np.round(steps)).all() and steps.sum() <= _MOST_STEPS and len(np.unique(steps)) <= _MOST_SIZES
    )


def _on_half_steps(moving: FloatArray, seen: float) -> float:
    """Return the exact p-value for totals that are multiples of ½."""
    sums, chances = _half_step_sums(moving)
    return min(1.0, float(chances[np.abs(sums) >= round(2 * seen)].sum()))


def attainable_size(totals_C: FloatArray, *, alpha: float) -> float:
    """Return how often the exact test rejects at `alpha` two models that are equally good, given the sizes of totals.

    Totals are multiples of ½. The sum has few values where few prompts differ, so this is often far below `alpha`.
    """
    moving = np.abs(totals_C[totals_C != 0])
    if not moving.size:
        return 0.0
    sums, chances = _half_step_sums(moving)
    size = np.abs(sums)
    tails = np.cumsum(np.bincount(size, chances)[::-1])[::-1]
    # Sums between two that can be have no chance, and the tail of the next.
    return float(np.max(tails[tails <= alpha * (1 + _ROUNDING)], initial=0.0))


def _half_step_sums(moving: FloatArray) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Return the sums, in halves, of totals with random signs, and their chances.

    n totals of size v add up to v(2B − n) with B binomial(n, ½). The distributions of the V sizes are convolved.
    """
    sizes_V, counts_V = np.unique(np.round(2 * moving).astype(np.int64), return_counts=True)
    # All sums have one parity, so only every other one is kept here.
    chances, lowest = np.ones(1), 0
    for size, count in zip(sizes_V.tolist(), counts_V.tolist(), strict=True):
        own, first = _without_zeros(binom.pmf(np.arange(count + 1), count, 0.5))
        chances, before = _without_zeros(_convolved(chances, own, step=size))
        lowest += 2 * before + size * (2 * first - count)
    return lowest + 2 * np.arange(len(chances)), chances


def _without_zeros(chances: FloatArray) -> tuple[FloatArray, int]:
    """Return the chances without zeros at the ends, which float64 could not hold, and how many the first ones were.

    It keeps convolutions short: sums beyond some 38 standard deviations have no chance in float64.
    """
    kept = np.flatnonzero(chances)
    return chances[kept[0] : kept[-1] + 1], int(kept[0])


def _convolved(chances: FloatArray, own: FloatArray, *, step: int) -> FloatArray:
    """Return the convolution of chances with others that lie `step` places apart.

    Only places that are a multiple of `step` apart have to do with each other, so each of the `step` classes is
    convolved by itself: zeros between the others would make it `step` times as much work. Where there are fewer others
    than classes, all classes are moved and added at once, an operation for each of the others.
    """
    rows = -(-len(chances) // step)
    padded = np.zeros(rows * step)
    padded[: len(chances)] = chances
    classes = padded.reshape(rows, step)
    if len(own) < step:
        whole = np.zeros((rows + len(own) - 1, step))
        for place, chance in enumerate(own.tolist()):
            whole[place : place + rows] += classes * chance
        return whole.ravel()
    whole = np.empty((rows + len(own) - 1, step))
    for place, column in enumerate(np.ascontiguousarray(classes.T)):
        whole[:, place] = np.convolve(column, own)
    return whole.ravel()


def _all_sums(moving: FloatArray) -> FloatArray:
    """Return the sums under all 2^C patterns."""
    sums = np.zeros(1)
    for total in moving:
        sums = np.concatenate([sums + total, sums - total])
    return sums


def _random_extremes(moving: FloatArray, reached: float, *, seed: int) -> int:
    """Return how many of the random patterns have a sum at least as far from 0 as `reached`."""
    generator, extreme = np.random.default_rng(seed), 0
    chunk = max(1, _CHUNK_VALUES // moving.size)
    whole = float(moving.sum())
    for start in range(0, DRAWS, chunk):
        plus_RC = generator.integers(0, 2, size=(min(chunk, DRAWS - start), moving.size), dtype=np.int8)
        extreme += int((np.abs(2 * (plus_RC @ moving) - whole) >= reached).sum())
    return extreme
