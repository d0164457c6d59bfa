"""What a hypothesis can ask of an arm: names, where each number is from, and which values it can have."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from rewardlab.analysis.measures import AT_THRESHOLD, MEASURE_ALIASES, MEASURES
from rewardlab.core.errors import ConfigError
from rewardlab.core.types import Estimate

Better = Literal["higher", "lower", "neither"]
From = Literal["scores", "curve", "record"]
Varies = Literal["always", "steps", "never"]
PREFIX: Final = "eval_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number of a run."""

    name: str
    low: float
    """The least value that it can have; −∞ where there is none."""
    high: float
    better: Better
    unit: str
    """Empty for shares, scores and other plain numbers."""
    source: From
    """``scores``: from the score rows of test or validation data, so prompts make it uncertain besides seeds.
    ``curve``: a column of metrics.csv. ``record``: one number of the run."""
    meaning: str
    column: str = ""
    """Its column in metrics.csv, by which it can be asked for at a step; empty where there is none."""
    is_share: bool = False
    """Whether it is a mean, perhaps a weighted one, of outcomes between 0 and 1 of comparisons, or of prompts."""
    has_ends: bool = False
    """Whether it is known how far a comparison moves it at most, or if it comes out the other way."""
    varies: Varies = "always"
    """``never``: settings alone decide it, so one seed shows all. ``steps``: whole numbers of steps, so that equal
    values of a few seeds do not show that no seed would differ."""


def _of_scores() -> Iterator[Quantity]:
    shares = ("accuracy", "negative_margin_rate", "agreement", "accuracy_by_prompt", "accuracy_length_controlled")
    bounds = dict.fromkeys((*shares, "ece", "roc_auc", "brier"), (0.0, 1.0))
    bounds |= dict.fromkeys(("loss", "margin_std", "score_std"), (0.0, math.inf))
    lengths = [f"{of}_length_{kind}" for of in ("score", "margin") for kind in ("pearson", "spearman")]
    bounds |= dict.fromkeys(lengths, (-1.0, 1.0))
    plain = ("margin", *(f"margin_p{percent}" for percent in (5, 25, 50, 75, 95)), "score_mean", "chosen_mean")
    bounds |= dict.fromkeys(
        (*plain, "rejected_mean", "calibration_slope", "calibration_intercept"), (-math.inf, math.inf)
    )
    lower = ("loss", "brier", "ece", "negative_margin_rate")
    higher = (*(share for share in shares if share != "negative_margin_rate"), "roc_auc", "margin", "margin_p50")
    columns = {name: f"{PREFIX}{name}" for name in ("accuracy", "loss", "margin", "ece", "score_mean", "score_std")}
    for name, (low, high) in bounds.items():
        yield Quantity(
            name=name,
            low=low,
            high=high,
            better="lower" if name in lower else "higher" if name in higher else "neither",
            unit="",
            source="scores",
            meaning=MEASURES[f"{PREFIX}{name}"],
            column=columns.get(name, ""),
            is_share=name in shares,
            has_ends=name in (*shares, "roc_auc", "brier", "loss"),
        )


def _others() -> Iterator[Quantity]:
    def made(
        name: str, low: float, high: float, better: Better, unit: str, source: From, meaning: str, column: str = ""
    ) -> Quantity:
        return Quantity(
            name=name, low=low, high=high, better=better, unit=unit, source=source, meaning=meaning, column=column
        )

    curve: From = "curve"
    record: From = "record"
    endless = math.inf
    how = "at `step`, or at the chosen one"
    yield made(
        "gap", -1.0, 1.0, "lower", "", curve, f"accuracy on training minus validation rows, {how}", "gap_accuracy"
    )
    yield made(
        "gap_loss", -endless, endless, "lower", "", curve, f"loss on validation minus training rows, {how}", "gap_loss"
    )
    yield made(
        "train_accuracy", 0.0, 1.0, "higher", "", curve, f"accuracy on training rows, {how}", "train_eval_accuracy"
    )
    yield made("train_loss", 0.0, endless, "lower", "", curve, f"loss on training rows, {how}", "train_eval_loss")
    for name, meaning in (("stopped_at", "the last step"), ("best_step", "the step of the chosen checkpoint")):
        yield Quantity(
            name=name,
            low=0.0,
            high=endless,
            better="neither",
            unit="steps",
            source="record",
            meaning=meaning,
            varies="steps",
        )
    yield made(
        "peak_memory", 0.0, endless, "lower", "GiB", record, "the most memory that the run took", "peak_memory_gib"
    )
    yield made("tokens_per_second", 0.0, endless, "higher", "tokens/s", record, "tokens computed a second of training")
    yield made("pairs_per_second", 0.0, endless, "higher", "pairs/s", record, "comparisons a second of training")
    meaning = "standard deviation of pairs/s, by seconds, over its mean; the first row of each start warms up"
    yield made("speed_spread", 0.0, endless, "lower", "", record, meaning)
    yield made("seconds", 0.0, endless, "lower", "s", record, "time in training steps")
    yield made("mfu", 0.0, 1.0, "higher", "", record, "model FLOPs over the peak of the device")
    for name, high in (("trainable_parameters", endless), ("trainable_share", 1.0)):
        meaning = "parameters that train" + (", as a share of all" if name == "trainable_share" else "")
        yield Quantity(
            name=name, low=0.0, high=high, better="lower", unit="", source="record", meaning=meaning, varies="never"
        )


QUANTITIES: Final[Mapping[str, Quantity]] = MappingProxyType({one.name: one for one in (*_of_scores(), *_others())})
"""Name -> quantity."""
_OWN_ALIASES: Final[Mapping[str, str]] = {
    "median_margin": "margin_p50",
    "gap_accuracy": "gap",
    "gap_acc": "gap",
    "train_eval_gap": "gap",
    "train_acc": "train_accuracy",
    "train_eval_acc": "train_accuracy",
    "train_eval_accuracy": "train_accuracy",
    "train_eval_loss": "train_loss",
    "peak_memory_gib": "peak_memory",
    "final_step": "stopped_at",
    "chosen_step": "best_step",
    "throughput": "tokens_per_second",
}
ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{
            name: of.removeprefix(PREFIX)
            for name, of in MEASURE_ALIASES.items()
            if of.removeprefix(PREFIX) in QUANTITIES and name.isidentifier()
        },
        **{f"{PREFIX}{name}": name for name, one in QUANTITIES.items() if one.source == "scores"},
        **_OWN_ALIASES,
    }
)
"""Other names -> ours."""


def quantity_named(name: str) -> Quantity:
    """Return a quantity by its name or another name in use.

    Raises ConfigError, with the nearest name, if there is none, and for a rate at a threshold.
    """
    own = ALIASES.get(name, name)
    if own in QUANTITIES:
        return QUANTITIES[own]
    if f"{PREFIX}{name.removeprefix(PREFIX)}" in AT_THRESHOLD:
        raise ConfigError(
            f"{name!r} is not a quantity of an arm: it is a rate at a threshold, and arms have no zero of scores in "
            f"common. Ask for roc_auc, which is over all thresholds; `rewardlab eval --thresholds` gives the rates."
        )
    near = difflib.get_close_matches(name, [*QUANTITIES, *ALIASES], n=1)
    hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(QUANTITIES)}."
    raise ConfigError(f"{name!r} is not a quantity of an arm. {hint}")


def range_of(quantity: str, *, max_steps: int | None = None) -> tuple[float, float]:
    """Return the least and the largest value that a quantity can have, for an arm of at most `max_steps` steps.

    Raises ConfigError for an unknown name.
    """
    one = quantity_named(quantity)
    high = one.high
    if one.varies == "steps" and max_steps is not None:
        high = min(high, float(max_steps))
    return one.low, high


def clamped(estimate: Estimate, name: str, *, max_steps: int | None = None) -> Estimate:
    """Return an estimate of a quantity with its interval cut to the quantity's range, which a t interval may leave.

    `max_steps` are the steps that the runs should have; None where that is not known.
    """
    return cut(estimate, range_of(name, max_steps=max_steps))


def cut(estimate: Estimate, limits: tuple[float, float]) -> Estimate:
    """Return an estimate with its interval cut to what is possible; its value stays inside."""
    if math.isnan(estimate.low):
        return estimate
    low, high = max(estimate.low, limits[0]), min(estimate.high, limits[1])
    return replace(estimate, low=min(low, estimate.value), high=max(high, estimate.value))
