"""Expected calibration error (ECE) of preference probabilities, and its range under perfect calibration.

Legend: N comparisons, B bins on [0, 1], H = B/2 bins on [½, 1], C clusters (prompts), R resamples.

The order of the two replies in a comparison is arbitrary, so each comparison is counted in both orders: as (p, y) and
as (1 − p, 1 − y), each with weight one half, so that the weights of the bins sum to N. The two halves of the diagram
are then mirror images, and everything is computed on the upper half, from q = max(p, 1 − p) and the label turned with
it. At p = ½, a tie of scores, the two orders share an edge and their gaps cancel. As a result every number here is the
same for a comparison and for the same comparison with its replies swapped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

from rewardlab.analysis.intervals import PRIOR_PROMPTS, FloatArray
from rewardlab.analysis.stats import (
    MIN_CLUSTERS,
    Numbers,
    central_range,
    cluster_totals,
    has_repeats,
    numbered,
    too_few,
    without_interval,
)
from rewardlab.core.types import Estimate

NUM_BINS = 10
NUM_NULL_DRAWS = 1000
MIN_COMPARISONS = 20
"""Below this many comparisons ECE gets no interval: it would be too wide to be of use (its coverage is 99 %)."""
NUM_NOISE_DRAWS = 1000
"""Draws of the noise in the gaps of the bins behind an interval of ECE. Half of them mirror the other half, so that the
noise has a mean of exactly 0."""
PRIOR_COMPARISONS = 1.0
"""Comparisons added to each bin, with the label variance of a calibrated model, when its noise is estimated. Otherwise
a bin of one comparison would have no noise."""
SURE_SIDE = 2.24
"""Standard deviations of a calibrated bin beyond which it is sure on which side of 0 its gap is."""
DISCRETE_SPREAD = 0.5
"""Standard deviation of the probabilities, times the root of their number, from which on ECEs of samples have all
values between the steps of single comparisons."""
# Bisection steps for a limit of the interval: each halves the range in which the limit lies.
_HALVINGS = 20
# Lowest divisor, which replaces 0.
_TINY = 1e-300
# Labels are redrawn in chunks of this many values, which limits their memory to some tens of megabytes.
_CHUNK_VALUES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """One bar of the reliability diagram. An empty bin has weight 0 and NaN means."""

    low: float
    high: float
    """The edges. The edge nearer to ½ belongs to the bin, the other one does not, except 0 and 1."""
    weight: float
    """Comparisons in the bin, each counted one half for (p, y) and one half for (1 − p, 1 − y)."""
    mean_probability: float
    mean_label: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """ECE, and the range it would have if the model were calibrated."""

    ece: float
    null_low: float
    null_high: float
    """The central 95 % of the ECEs of labels redrawn from the model's own probabilities."""
    n: int
    """Number of comparisons, to which the weights of the bins sum."""
    bins: tuple[Bin, ...]


def ece(p: Numbers, y: Numbers, *, bins: int = NUM_BINS) -> float:
    """Return the expected calibration error Σ_b (n_b/N) |mean p − mean y| over B equal-width bins of symmetrised pairs.

    `p` [N] are probabilities that the first reply is preferred, `y` [N] labels in [0, 1]. `bins` is even, because an
    odd count has a middle bin in which mirror images cancel. NaN without comparisons. ECE is never negative and
    therefore biased upwards: a calibrated model shows about 0.02 at N = 1,000.
    """
    folded = _fold(p, y, bins)
    return _ece_of_totals(_bin_table(folded).sum(axis=0))


def null_band(
    p: Numbers, *, bins: int = NUM_BINS, seed: int = 0, draws: int = NUM_NULL_DRAWS, level: float = 0.95
) -> tuple[float, float]:
    """Return the central range, of share `level`, of the ECEs of a calibrated model with these probabilities `p` [N].

    Labels are redrawn independently as 0 or 1 with P(1) = p. Soft labels scatter less than that, so for them the band
    is wider than necessary. NaN without comparisons.
    """
    probabilities = np.asarray(p, dtype=np.float64)
    if probabilities.size == 0:
        return np.nan, np.nan
    folded = _fold(probabilities, np.ones_like(probabilities), bins)
    return central_range(_null_draws(folded, draws=draws, seed=seed), level=level)


def calibrate(
    p: Numbers, y: Numbers, *, bins: int = NUM_BINS, seed: int = 0, draws: int = NUM_NULL_DRAWS
) -> Calibration:
    """Return ECE, its null band and the reliability diagram of probabilities `p` [N] and labels `y` [N]."""
    folded = _fold(p, y, bins)
    null_low, null_high = null_band(p, bins=bins, seed=seed, draws=draws)
    return Calibration(
        ece=_ece_of_totals(_bin_table(folded).sum(axis=0)),
        null_low=null_low,
        null_high=null_high,
        n=folded.probability.size,
        bins=_diagram(folded),
    )


def ece_estimate(
    p: Numbers,
    y: Numbers,
    clusters: Sequence[str] | None = None,
    *,
    bins: int = NUM_BINS,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Return ECE with an interval, clustered by prompt where the keys in `clusters` [N] repeat.

    ECE is a sum of absolute values, so it overestimates the truth, the more so the fewer the comparisons. For a
    calibrated model the truth is 0, the end of the range, which bootstrap intervals miss. This interval instead holds
    every true value under which the observed ECE is not among the extreme (1 − level)/2 on either side: hybrid
    resampling (Chuang & Lai 2000, Statistica Sinica 10, 1-50), with the gaps of the bins distributed normally around
    the likeliest gaps for that value, with the noise that these would have (`_Candidates`). It is widened to hold the
    ECE itself, and reaches up to the ECE that three of four samples of a calibrated model exceed: of one that is
    smaller than nearly all such samples give, no true value would be left, as if there were no noise. Fewer than 20
    comparisons or 10 prompts get no interval.
    """
    folded = _fold(p, y, bins)
    table = _bin_table(folded)
    value = _ece_of_totals(table.sum(axis=0))
    repeated = clusters is not None and has_repeats(clusters)
    totals = cluster_totals(table, clusters) if clusters is not None and repeated else table
    n = len(totals)
    if len(table) < MIN_COMPARISONS or n < MIN_CLUSTERS:
        few = too_few(n) if repeated and n < MIN_CLUSTERS else too_few(len(table), "comparisons")
        return without_interval(value, n, method=few, level=level)
    gap_H = table[:, :-1].mean(axis=0)
    noise_H = _noise_by_prompt(folded, table, gap_H, clusters)
    root_HH = _root_of_correlation(totals, gap_H) if repeated else None
    low, high = _ece_limits(_Candidates.of(folded, gap_H, noise_H, root_HH), tail=(1 - level) / 2, seed=seed)
    unit = ", by prompt" if repeated else ""
    return Estimate(
        value=value, low=min(low, value), high=max(high, value), n=n, method=f"test inversion{unit}", level=level
    )


def ece_influence(
    p: Numbers, y: Numbers, clusters: Sequence[str] | None = None, *, bins: int = NUM_BINS
) -> tuple[float, FloatArray, float]:
    """Return ECE, the influence [N] of every comparison on it, and by how much it may exceed the truth on average.

    The influence is how the gap of the comparison's bin moves, with the sign of the gap. A gap of g with noise of
    standard deviation σ is seen as E|g + σz| > |g|. The excess is the sum of these over the bins, at gaps that are
    nearer to 0 than those seen by σ: at the gaps themselves it would be too small, for noise has made them larger.
    """
    folded = _fold(p, y, bins)
    table = _bin_table(folded)
    gap_H = table[:, :-1].mean(axis=0)
    value = float(np.abs(gap_H).sum())
    deviation_H = np.sqrt(_noise_by_prompt(folded, table, gap_H, clusters))
    standard_H = np.maximum(np.abs(gap_H) / np.maximum(deviation_H, _TINY) - 1, 0.0)
    excess_H = 2 * deviation_H * (norm.pdf(standard_H) - standard_H * norm.sf(standard_H))
    return value, table[:, :-1] @ np.sign(gap_H) - value, float(excess_H.sum())


def _noise_by_prompt(
    folded: _Folded, table: FloatArray, gap_H: FloatArray, clusters: Sequence[str] | None
) -> FloatArray:
    """Return [H] variances of the bins' mean gaps, over prompts where the keys in `clusters` [N] repeat."""
    noise_H = _noise(folded, table, gap_H)
    if clusters is None or not has_repeats(clusters):
        return noise_H
    totals = cluster_totals(table, clusters)
    n = len(totals)
    # Rows of one prompt may be right or wrong together. As for shares, the larger of the two variances is used, with a
    # part of a prompt added that is wholly wrong: of few wrong prompts, or none, the variance seen is too small.
    residuals_CH = totals[:, :-1] - gap_H * totals[:, -1:]
    squares_H = np.square(residuals_CH).sum(axis=0) + PRIOR_PROMPTS * np.square(_of_a_prompt(folded, clusters))
    found: FloatArray = np.maximum(noise_H, squares_H * n / max(n - 1, 1) / len(table) ** 2)
    return found


def _of_a_prompt(folded: _Folded, clusters: Sequence[str]) -> FloatArray:
    """Return [H] by how much one prompt more would move a bin's sum of gaps if all of its labels came out 0."""
    index_N, count = numbered(clusters)
    cells = np.bincount(index_N * folded.num_bins + folded.bin, minlength=count * folded.num_bins)
    size_CH = cells.reshape(count, folded.num_bins).astype(np.float64)
    count_H = np.maximum(size_CH.sum(axis=0), 1)
    right_H = np.bincount(folded.bin, folded.label, folded.num_bins) / count_H
    return np.asarray(np.square(size_CH).sum(axis=0) / count_H * right_H)


def _root_of_correlation(totals: FloatArray, gap_H: FloatArray) -> FloatArray:
    """Return [H, H] a root of the correlation over prompts of the bins' mean gaps, from prompts' totals [C, H + 1].

    Rows of one prompt that are right or wrong together lie in several bins, whose gaps then add up.
    """
    residuals_CH = totals[:, :-1] - gap_H * totals[:, -1:]
    covariance_HH = residuals_CH.T @ residuals_CH
    deviation_H = np.sqrt(np.diag(covariance_HH))
    varies_H = deviation_H > 0
    scale_H = np.where(varies_H, deviation_H, 1.0)
    correlation_HH = covariance_HH / np.outer(scale_H, scale_H) + np.diag(~varies_H)
    values_H, vectors_HH = np.linalg.eigh(correlation_HH)
    # The symmetric root is the one that does not jump where eigenvectors do.
    return np.asarray((vectors_HH * np.sqrt(np.maximum(values_H, 0.0))) @ vectors_HH.T)


def _noise(folded: _Folded, table: FloatArray, gap_H: FloatArray) -> FloatArray:
    """Return [H] variances of the bins' mean gaps over independent comparisons, whose number in a bin is random too."""
    num_comparisons = len(table)
    count_H = np.bincount(folded.bin, minlength=folded.num_bins).astype(np.float64)
    filled_H = np.maximum(count_H, 1)
    mean_H = gap_H * num_comparisons / filled_H
    squares_H = np.maximum(np.square(table[:, :-1]).sum(axis=0) - count_H * np.square(mean_H), 0.0)
    uncertain = folded.probability * (1 - folded.probability)
    calibrated_H = np.bincount(folded.bin, uncertain, folded.num_bins) / filled_H
    return _variance(count_H, squares_H, calibrated_H, mean_H, total=num_comparisons)


def _variance(
    count_H: FloatArray, squares_H: FloatArray, calibrated_H: FloatArray, mean_H: FloatArray, *, total: int
) -> FloatArray:
    """Return [H] variances of the bins' mean gaps, from the sums of squares within bins of `count_H` comparisons, what
    one of a calibrated model would add to them, and the mean gaps within bins."""
    within_H = (squares_H + PRIOR_COMPARISONS * calibrated_H) / (np.maximum(count_H, 1) - 1 + PRIOR_COMPARISONS)
    variance: FloatArray = count_H * (within_H + np.square(mean_H) * (1 - count_H / total)) / total**2
    return variance


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    """Absolute gaps [H] that the bins with comparisons may truly have, and how those seen would scatter about them.

    Few labels of a bin that is right nearly always, or always, hardly vary, so what was seen does not say how much they
    would if the truth were another. As for shares (Wilson), a gap is held against the noise that it would have itself,
    which is that of labels with the mean that it gives the bin.
    """

    seen: FloatArray
    """[H] absolute gaps."""
    noise: Callable[[FloatArray], FloatArray]
    """Gaps [H] -> the variances that they would have; at least those by what was seen."""
    most: FloatArray
    """[H] the largest gaps that labels between 0 and 1 allow."""
    half_step: float
    """Half of what one comparison moves an ECE by."""
    discreteness: float
    """From 0 to 1: how much the probabilities are so alike that an ECE has few values, a step apart."""
    root: FloatArray | None = None
    """[H, H] independent normal numbers -> numbers as correlated as the gaps are; None where they are independent."""

    @property
    def weight(self) -> FloatArray:
        """[H] how easily each gap moves: the largest variance of it, of none, and of one comparison more."""
        nearby = (self.seen, np.zeros_like(self.seen), np.minimum(self.seen + 2 * self.half_step, self.most))
        found: FloatArray = np.maximum(np.maximum.reduce([self.noise(gaps_H) for gaps_H in nearby]), _TINY)
        return found

    @classmethod
    def of(
        cls, folded: _Folded, gap_H: FloatArray, noise_H: FloatArray, root_HH: FloatArray | None = None
    ) -> _Candidates:
        """Return the candidates for gaps [H], p − y in the mean over all comparisons, with these variances as seen and
        the root of their correlation over prompts."""
        total = folded.probability.size
        count_H = np.bincount(folded.bin, minlength=folded.num_bins).astype(np.float64)
        filled = count_H > 0
        count_H, gap_H, noise_H = count_H[filled], gap_H[filled], noise_H[filled]
        columns = (folded.probability, folded.probability * (1 - folded.probability))
        mean_H, uncertain_H = (np.bincount(folded.bin, column, folded.num_bins)[filled] / count_H for column in columns)
        own_H = gap_H * total / count_H
        # Where the side of the gap is not sure, it is taken to be that on which labels vary more.
        sure_H = np.abs(own_H) > SURE_SIDE * np.sqrt(uncertain_H / count_H)
        side_H = np.where(sure_H & (own_H < 0), -1.0, 1.0)

        def plain(moved_H: FloatArray) -> FloatArray:
            """Return the variances of gaps of labels of 0 and 1, with p − y = `moved_H` in each bin."""
            label_H = np.clip(mean_H - moved_H, 0.0, 1.0)
            squares_H = count_H * label_H * (1 - label_H)
            return _variance(count_H, squares_H, uncertain_H, moved_H, total=total)

        # Soft labels vary less than those of 0 and 1, labels of one prompt that are alike more.
        plain_H = plain(own_H)
        scatter_H = np.where(plain_H > 0, noise_H / np.maximum(plain_H, _TINY), 1.0)
        spread = math.sqrt(total) * float(folded.probability.std())
        return cls(
            seen=np.abs(gap_H),
            noise=lambda gaps_H: np.maximum(scatter_H * plain(side_H * gaps_H * total / count_H), noise_H),
            most=np.where(side_H > 0, mean_H, 1 - mean_H) * count_H / total,
            half_step=1 / (2 * total),
            root=None if root_HH is None else root_HH[:, filled],
            discreteness=max(0.0, 1 - spread / DISCRETE_SPREAD),
        )


def _ece_limits(own: _Candidates, *, tail: float, seed: int) -> tuple[float, float]:
    """Return the smallest and the largest ECE that the observed absolute gaps [H] allow; the largest is at least the
    lower quartile of a calibrated model's.

    The likeliest gaps with a given sum are the observed ones, each moved in proportion to its variance but not below 0.
    So a single number, the move, parametrises all candidates, from all zero (a calibrated model) upwards.
    """
    if not own.seen.size:
        return 0.0, 0.0
    calibrated_H = own.noise(np.zeros_like(own.seen))
    size = own.seen.size if own.root is None else len(own.root)
    half = np.random.default_rng(seed).normal(size=(NUM_NOISE_DRAWS // 2, size))
    half = half if own.root is None else half @ own.root
    normal_RH = np.concatenate([half, -half])
    seen, step = float(own.seen.sum()), own.half_step * own.discreteness
    low = _last_candidate(own, normal_RH, share=1 - tail, seen=seen - step)
    high = _last_candidate(own, normal_RH, share=tail, seen=seen + step)
    quartile = np.quantile(np.abs(normal_RH * np.sqrt(calibrated_H)).sum(axis=1), 0.25)
    return low, max(high, float(quartile))


def _last_candidate(own: _Candidates, normal_RH: FloatArray, *, share: float, seen: float) -> float:
    """Return the largest true ECE under which at least `share` of the noisy ECEs are at most the one `seen`.

    It is 0 if no true ECE is small enough.
    """

    def below(gaps_H: FloatArray) -> float:
        return float((np.abs(gaps_H + normal_RH * np.sqrt(own.noise(gaps_H))).sum(axis=1) <= seen).mean())

    weight_H = own.weight
    # From the move at which all gaps are 0, up to one that adds 20 standard deviations to their sum.
    lowest, highest = -float((own.seen / weight_H).max()), 20 / math.sqrt(float(weight_H.sum()))
    if below(np.zeros_like(own.seen)) < share:
        return 0.0
    for _ in range(_HALVINGS):
        middle = (lowest + highest) / 2
        moved_H = np.clip(own.seen + middle * weight_H, 0.0, own.most)
        lowest, highest = (middle, highest) if below(moved_H) >= share else (lowest, middle)
    return float(np.clip(own.seen + lowest * weight_H, 0.0, own.most).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folded:
    """Comparisons turned so that the model prefers the first reply."""

    probability: FloatArray
    """[N], in [½, 1]."""
    label: FloatArray
    """[N], ½ at p = ½, where the two orders share a bin and their labels average to ½."""
    bin: npt.NDArray[np.int64]
    """[N], index among the H upper bins."""
    num_bins: int
    """H."""


def _fold(p: Numbers, y: Numbers, bins: int) -> _Folded:
    """Return comparisons turned so that the model prefers the first reply, from probabilities [N] and labels [N]."""
    assert bins >= 2, f"{bins} bins: at least 2"
    assert bins % 2 == 0, f"{bins} bins: an even number"
    probability, label = np.asarray(p, dtype=np.float64), np.asarray(y, dtype=np.float64)
    assert probability.ndim == 1
    assert probability.shape == label.shape
    for values in (probability, label):
        assert ((values >= 0) & (values <= 1)).all(), "probabilities and labels lie in [0, 1]"
    swapped = probability < 0.5
    probability = np.where(swapped, 1 - probability, probability)
    label = np.where(swapped, 1 - label, label)
    label = np.where(probability == 0.5, 0.5, label)
    half = bins // 2
    # A probability of 1 belongs to the last bin and not to one beyond it.
    index = np.minimum((probability * bins).astype(np.int64), bins - 1) - half
    return _Folded(probability=probability, label=label, bin=index, num_bins=half)


def _bin_table(folded: _Folded) -> FloatArray:
    """Return [N, H + 1]: each comparison's gap p − y in the column of its bin, and a last column of ones.

    The ECE of any subsample or resample is a function of its column sums alone.
    """
    num_comparisons = folded.probability.size
    table = np.zeros((num_comparisons, folded.num_bins + 1))
    table[np.arange(num_comparisons), folded.bin] = folded.probability - folded.label
    table[:, -1] = 1
    return table


def _ece_of_totals(totals: FloatArray) -> float:
    return float(np.abs(totals[:-1]).sum() / totals[-1]) if totals[-1] else float("nan")


def _null_draws(folded: _Folded, *, draws: int, seed: int) -> FloatArray:
    """Return [R] ECEs of labels redrawn from the probabilities."""
    generator = np.random.default_rng(seed)
    num_comparisons = folded.probability.size
    in_bin_NH = (folded.bin[:, None] == np.arange(folded.num_bins)) & (folded.probability != 0.5)[:, None]
    in_bin_NH = in_bin_NH.astype(np.float64)
    chunk = max(1, _CHUNK_VALUES // num_comparisons)
    parts = []
    for start in range(0, draws, chunk):
        label_RN = generator.random((min(chunk, draws - start), num_comparisons)) < folded.probability
        gaps_RH = (folded.probability - label_RN) @ in_bin_NH
        parts.append(np.abs(gaps_RH).sum(axis=1) / num_comparisons)
    return np.concatenate(parts)


def _diagram(folded: _Folded) -> tuple[Bin, ...]:
    """Return the B bins of the reliability diagram, the lower half being the mirror image of the upper."""
    half = folded.num_bins
    weight = np.bincount(folded.bin, minlength=half) / 2
    probability = np.bincount(folded.bin, folded.probability, half) / 2
    label = np.bincount(folded.bin, folded.label, half) / 2
    upper = [
        _bar(b, 2 * half, weight=float(weight[b]), probability=float(probability[b]), label=float(label[b]))
        for b in range(half)
    ]
    mirrored = [
        Bin(
            low=1 - bar.high,
            high=1 - bar.low,
            weight=bar.weight,
            mean_probability=1 - bar.mean_probability,
            mean_label=1 - bar.mean_label,
        )
        for bar in reversed(upper)
    ]
    return (*mirrored, *upper)


def _bar(index: int, num_bins: int, *, weight: float, probability: float, label: float) -> Bin:
    return Bin(
        low=0.5 + index / num_bins,
        high=0.5 + (index + 1) / num_bins,
        weight=weight,
        mean_probability=probability / weight if weight else float("nan"),
        mean_label=label / weight if weight else float("nan"),
    )
