"""The findings of the controls: for each, the expectation and its reason, the measurement, a verdict, and a sentence.

A control fails only if an honest model would hardly give such a measurement, corrected for all tests of the set (Holm
1979). It passes if its interval excludes more than is allowed, and is undecided otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from scipy.stats import norm

from rewardlab.analysis.multiple import holm
from rewardlab.analysis.stats import MIN_CLUSTERS
from rewardlab.core.controls import EXPECTS
from rewardlab.core.terminal import number_of
from rewardlab.core.types import Estimate
from rewardlab.diagnosing.arms import Arm, Arms, Contrast, p_of_mean, share_of
from rewardlab.report.tables import format_estimate

Verdict = Literal["pass", "fail", "undecided"]
LEVEL: Final = 0.05
"""Probability that any control of the set fails though the model is honest."""
WIDE: Final = 0.10
"""An interval over seeds that extends further than this to one side decides nothing."""
MOST_DROP: Final = 0.10
"""`length_matched` passes if a drop of this size on pairs of equal length is excluded, and as many random pairs are
above chance; the bands expect the same."""
NAMES: Final[Mapping[str, str]] = {
    "label_shuffle": "label shuffle",
    "prompt_only": "prompt only",
    "response_only": "response only",
    "random_negatives": "random negatives",
    "length_matched": "length matched",
    "length_only": "length only",
    "bag_of_words": "bag of words",
}
"""Control -> its name in reports, in their order."""
BESIDE: Final[Mapping[str, str]] = {"random_negatives": "random_negatives_changed", "length_matched": "random_subset"}
"""Control -> the arm with which it is compared, without which it says nothing."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """The range that earlier guidelines expect of one run, and how often an honest model falls outside."""

    low: float
    high: float
    truth: float
    """The accuracy that an honest model is assumed to have."""
    outside: float
    """Share of single runs on this many held-out conversations that fall outside though `truth` holds."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One number of a control."""

    name: str
    seeds: Estimate
    """Over seeds."""
    conversations: Estimate
    """Over conversations."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The finding of one control."""

    control: str
    expects: str
    measured: Sequence[Measured]
    verdict: Verdict
    sentence: str
    p_value: float
    """The p-value of the measurement if the model is honest; NaN if nothing is random."""
    adjusted: float
    """The p-value corrected for all tests of the set."""
    share: Estimate | None = None
    """The share of the accuracy above chance, for controls that measure one."""
    drop: Estimate | None = None
    """The drop of accuracy on pairs of equal length, for controls that measure one."""
    band: Band | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of the accuracy above chance may come from a shortcut."""

    length: float = 0.5
    shortcut: float = 0.9


def judge_all(arms: Arms, limits: Limits, *, test: Arms | None = None) -> list[Finding]:
    """Return the findings of all controls that were run, in the order of `NAMES`.

    `arms` are `full` (the model itself) and those of `NAMES`; beside `random_negatives` (judged on original pairs)
    `random_negatives_changed` (on those with replies to other prompts), and beside `length_matched` `random_subset`.
    Without these a control is left out. `test` holds the same on other data, which is shown and not judged.
    """
    full, test = arms["full"], test or {}
    there = [name for name in NAMES if name in arms and BESIDE.get(name, name) in arms]
    found = [_finding(name, arms, limits, full, test) for name in there]
    adjusted = holm([one.p_value for one in found])
    return [_decided(replace(one, adjusted=p), limits, arms) for one, p in zip(found, adjusted, strict=True)]


def _finding(name: str, arms: Arms, limits: Limits, full: Arm, test: Arms) -> Finding:
    """Return what a control measured, still without a verdict."""
    arm = arms[name]
    measured = [_measured("held out", arm)]
    share = drop = band = None
    p_value = math.nan
    if name == "label_shuffle":
        p_value = p_of_mean(arm.by_seed, 0.5)
        band = _band(arm, 0.45, 0.55, truth=0.5)
    elif name == "length_matched":
        beside = arms[BESIDE[name]]
        measured = [_measured("pairs of equal length", arm), _measured("as many at random", beside)]
        contrast = Contrast.of([(beside, 1.0), (arm, -1.0)])
        p_value, drop = contrast.p_above(), contrast.estimate()
        band = _band_of_drop(contrast, 0.05, 0.15, truth=0.10)
    elif name != "prompt_only":
        limit = limit_of(name, limits)
        p_value = Contrast.of([(arm, 1.0), (full, -limit)], 0.5 * (1 - limit)).p_above()
        share = share_of(arm, full)
        if name == "random_negatives":
            measured = [_measured("original pairs", arm), _measured("changed pairs", arms[BESIDE[name]])]
            band = _band(arm, 0.50, 0.60, truth=0.55)
    if name in test:
        measured.append(_measured("test data", test[name]))
    if name == "prompt_only":
        measured = [_without_chance(one) for one in measured]
    return Finding(
        control=name,
        expects=EXPECTS[name],
        measured=measured,
        verdict="undecided",
        sentence="",
        p_value=p_value,
        adjusted=math.nan,
        share=share,
        drop=drop,
        band=band,
    )


def limit_of(name: str, limits: Limits) -> float:
    """Return the share of the accuracy above chance that may come from this shortcut."""
    return limits.length if name == "length_only" else limits.shortcut


def _measured(name: str, arm: Arm) -> Measured:
    return Measured(name=name, seeds=arm.over_seeds(), conversations=arm.over_conversations())


def _without_chance(one: Measured) -> Measured:
    """Return what prompt only measured. Its ties follow from the control, not from a sample: other conversations would
    tie too, so there is no interval over them."""
    tied = replace(one.conversations, low=math.nan, high=math.nan, method="nothing is left to chance")
    return replace(one, conversations=tied)


def _decided(found: Finding, limits: Limits, arms: Arms) -> Finding:
    """Return the finding with its verdict and its sentence."""
    fails = found.adjusted <= LEVEL
    measured = found.share or found.drop
    if measured is not None and measured.n < MIN_CLUSTERS:
        sentence = (
            f"Of {number_of(measured.n, 'conversation')} nothing can be told about others; it takes {MIN_CLUSTERS}. "
            f"Name more data."
        )
        return replace(found, verdict="undecided", sentence=sentence)
    if found.control == "prompt_only":
        verdict, sentence = _of_prompt_only(found)
    elif found.control == "label_shuffle":
        verdict, sentence = _of_shuffle(found, fails=fails)
    elif found.control == "length_matched":
        verdict, sentence = _of_lengths(found, arms[BESIDE[found.control]], fails=fails)
    else:
        verdict, sentence = _of_share(found, limit_of(found.control, limits), arms["full"], fails=fails)
    return replace(found, verdict=verdict, sentence=sentence)


def _of_prompt_only(found: Finding) -> tuple[Verdict, str]:
    seeds = found.measured[0].seeds
    if seeds.value == seeds.low == seeds.high == 0.5:
        return "pass", "Without their text, no reply is preferred to another."
    return (
        "fail",
        f"Accuracy {seeds.value:.3f} without any reply: something beside the text of the replies, such as prompts that "
        f"differ between the sides, says which one is preferred.",
    )


def _of_shuffle(found: Finding, *, fails: bool) -> tuple[Verdict, str]:
    seeds = found.measured[0].seeds
    inside = seeds.low <= 0.5 <= seeds.high
    if fails and seeds.value < 0.5:
        return "fail", (
            f"From labels that say nothing the model falls to {seeds.value:.3f}, below chance: the true labels reach "
            f"it the wrong way round, or it preferred the worse replies before it was trained."
        )
    if fails:
        return "fail", (
            f"From labels that say nothing the model reaches {seeds.value:.3f}: the true labels reach it otherwise, "
            f"or it knew them before it was trained."
        )
    if inside and max(seeds.high - 0.5, 0.5 - seeds.low) <= WIDE:
        return "pass", "Labels that say nothing teach nothing."
    if inside:
        return "undecided", (
            f"0.5 lies within the interval over seeds, which is too wide (beyond ±{WIDE:.2f}) to exclude a leak. Run "
            f"more --seeds, or more data."
        )
    return "undecided", (
        "0.5 lies outside the interval over seeds, but with all controls accounted for that is not enough for a leak. "
        "Run more --seeds."
    )


def _of_lengths(found: Finding, beside: Arm, *, fails: bool) -> tuple[Verdict, str]:
    drop = found.drop
    assert drop is not None
    said = f"{100 * drop.value:+.1f} points of accuracy ({100 * drop.low:+.1f} to {100 * drop.high:+.1f})"
    if fails:
        return "fail", f"Where replies are equally long, the model loses {said.lstrip('+')}: it uses length."
    if drop.high < MOST_DROP:
        if math.isnan(share_of(beside, beside).low):
            own = format_estimate(beside.over_seeds())
            return "undecided", f"On as many random pairs ({own}) the model may be at chance, so there is none to lose."
        return "pass", f"The drop where replies are equally long is {said}; no loss of {100 * MOST_DROP:.0f} points."
    return "undecided", f"The drop where replies are equally long is {said}: too uncertain to exclude a use of length."


SHORTCUTS: Final[Mapping[str, str]] = {
    "response_only": "without the prompt",
    "random_negatives": "from telling replies to other prompts apart",
    "length_only": "from length alone",
    "bag_of_words": "from the words of the replies alone",
}
"""Control -> the source of its accuracy, as part of a sentence."""


def _of_share(found: Finding, limit: float, full: Arm, *, fails: bool) -> tuple[Verdict, str]:
    share, where = found.share, SHORTCUTS[found.control]
    assert share is not None
    if math.isnan(share.low):
        own = format_estimate(full.over_seeds())
        if fails:
            return (
                "fail",
                f"The accuracy {where} ({found.measured[0].seeds.value:.3f}) has more than the {limit:.0%} that is "
                f"allowed of what the model itself ({own}) has above chance.",
            )
        return "undecided", f"The model itself ({own}) may be at chance, so no share of its accuracy can be told."
    low, high = max(share.low, 0.0), max(share.high, 0.0)
    value = max(share.value, 0.0)
    said = f"{value:.0%} of the accuracy above chance is there {where} ({low:.0%} to {high:.0%})"
    if fails:
        return "fail", f"{said}; more than the {limit:.0%} that is allowed."
    if share.high < limit:
        return "pass", f"{said}."
    return "undecided", f"{said}; whether that is more than {limit:.0%} cannot be told."


def _band(arm: Arm, low: float, high: float, *, truth: float) -> Band:
    """Return a band for the accuracy of a single run, judged on the conversations at hand."""
    error = math.sqrt(Contrast.of([(arm, 1.0)]).variance_conversations + float(arm.by_seed.var(ddof=1)))
    return Band(low=low, high=high, truth=truth, outside=_outside(truth, low, high, error))


def _band_of_drop(contrast: Contrast, low: float, high: float, *, truth: float) -> Band:
    error = math.sqrt(contrast.variance_conversations + float(contrast.by_seed.var(ddof=1)))
    return Band(low=low, high=high, truth=truth, outside=_outside(truth, low, high, error))


def _outside(truth: float, low: float, high: float, error: float) -> float:
    """Return the probability that a normal variable with this mean and standard error lies outside the band."""
    if error <= 0:
        return 0.0 if low <= truth <= high else 1.0
    return float(norm.cdf((low - truth) / error) + norm.sf((high - truth) / error))


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if any control failed, else 0."""
    return int(any(one.verdict == "fail" for one in findings))
