"""How much each setting matters, where arms differ in few of them: the mean at every value of a setting.

A setting is looked at in matched sets of arms: alike in everything else, and with every value that is compared. In a
whole grid these are all arms, and what is shown is the main effect; where one setting at a time was changed, it is the
effect from the common arm. Settings that always change together are one. Controls, whose data were spoilt on purpose,
are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rewardlab.core.types import Estimate
from rewardlab.experiments.plan import Run
from rewardlab.experiments.quantities import quantity_named
from rewardlab.experiments.reporting.arms import natural
from rewardlab.experiments.reporting.numbers import Column, Reader, change_of, mean_of, search_named
from rewardlab.experiments.reporting.tried import controls
from rewardlab.experiments.study import Study

PRIORITY: Final = ("lr", "label_smoothing", "warmup_steps", "regularization_lambda")
"""Settings in the order in which they are looked at; others follow by name."""
FEWEST_ARMS: Final = 3
SAME: Final = 1e-12
"""Distance up to which two means are one, but for rounding."""
OF_ADAPTERS: Final = ("rslora", "dora")
"""Settings of LoRA beside those whose names begin with `lora_`."""
NOTHING: Final = "–"
"""What a setting of adapters is shown as in an arm that has none."""
Values = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class AtValue:
    """The mean over matched arms at one value of a setting."""

    value: str
    estimate: Estimate
    change: Estimate | None
    """Change from the first value; None for the first value itself."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What one setting changes."""

    setting: str
    """Its name; several settings that always change together are joined by commas."""
    values: tuple[AtValue, ...]
    unmatched: tuple[str, ...]
    """Other values, of arms that have no partners."""
    sets: int
    """Matched sets of arms over which the mean is taken."""
    is_ordered: bool
    """Whether the values are numbers, which are shown from small to large."""
    best: str
    """The value with the best mean; empty where neither side is better, or several values have the best."""

    @property
    def best_at_edge(self) -> bool:
        """Whether the best of three or more numbers is the smallest or the largest."""
        return self.is_ordered and len(self.values) > 2 and self.best in (self.values[0].value, self.values[-1].value)


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The settings in which some arms differ."""

    column: Column
    where: str
    """Where the arms are from: those that are judged, or those of a search."""
    effects: tuple[Effect, ...]
    unmatched: tuple[str, ...]
    """Settings that differ, but in no arms that are alike in everything else."""


def sensitivities_of(study: Study, reader: Reader) -> tuple[Sensitivity, ...]:
    """Return what each setting changes, among the arms that are judged and among those of every search."""
    spoilt = controls({run.arm: run.settings for run in study.runs})
    judged = [run for run in study.runs if run.reads_test and not run.program and run.arm not in spoilt]
    found = [_sensitivity(reader, judged, natural(study.plan.primary), "arms of the plan")]
    for phase in study.plan.phases:
        if phase.search is not None:
            runs = [run for run in study.runs if run.phase == phase.name and not run.reads_test]
            runs = [run for run in runs if run.arm not in spoilt]
            column = Column(quantity=quantity_named(phase.search.metric).name, on="validation")
            found.append(_sensitivity(reader, runs, column, f"arms of the {search_named(phase.name)}"))
    return tuple(one for one in found if one is not None)


def _sensitivity(reader: Reader, runs: Sequence[Run], column: Column, where: str) -> Sensitivity | None:
    arms = {
        run.arm: {name: value for name, value in reader.settings(run).items() if name != "seed"}
        for run in reversed(runs)
        if reader.get(column.term(run.arm)) is not None
    }
    arms = _differing({run.arm: arms[run.arm] for run in runs if run.arm in arms})
    factors = _factors(arms)
    if len(arms) < FEWEST_ARMS or not factors:
        return None
    levels = {arm: {factor: _level(own, factor) for factor in factors} for arm, own in arms.items()}
    effects = {factor: _effect(reader, column, levels, factor) for factor in factors}
    shown = tuple(effect for effect in effects.values() if effect is not None)
    is_more = len(shown) > 1 or any(len(effect.values) > 2 for effect in shown)
    if not is_more:
        return None
    unmatched = tuple(", ".join(factor) for factor, effect in effects.items() if effect is None)
    return Sensitivity(column=column, where=where, effects=shown, unmatched=unmatched)


def _differing(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings in which arms differ, with `NOTHING` for those of adapters where there are none."""
    names = sorted({name for own in arms.values() for name in own}, key=_priority)
    apart = [name for name in names if len({repr(own.get(name)) for own in arms.values()}) > 1]
    return {
        arm: {name: own.get(name) if own.get("lora") or not _is_of_adapters(name) else NOTHING for name in apart}
        for arm, own in arms.items()
    }


def _is_of_adapters(name: str) -> bool:
    return name.startswith("lora_") or name in OF_ADAPTERS


def _factors(arms: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the settings in which arms differ, those together that always change together, by priority."""
    by_pattern: dict[tuple[int, ...], list[str]] = {}
    for name in next(iter(arms.values()), {}):
        said = [repr(own[name]) for own in arms.values()]
        seen: dict[str, int] = {}
        pattern = tuple(seen.setdefault(text, len(seen)) for text in said)
        if len(seen) > 1:
            by_pattern.setdefault(pattern, []).append(name)
    return [tuple(together) for together in by_pattern.values()]


def _priority(name: str) -> tuple[int, str]:
    return (PRIORITY.index(name) if name in PRIORITY else len(PRIORITY), name)


def _level(own: Mapping[str, Any], factor: tuple[str, ...]) -> Values:
    return tuple(own[name] for name in factor)


def _effect(
    reader: Reader,
    column: Column,
    levels: Mapping[str, Mapping[tuple[str, ...], Values]],
    factor: tuple[str, ...],
) -> Effect | None:
    """Return what a setting changes; None if no arms are alike in everything else and have all its values."""
    values = {repr(own[factor]): own[factor] for own in levels.values()}
    matched: dict[str, dict[str, str]] = {}
    for arm, own in levels.items():
        others = repr([value for name, value in own.items() if name != factor])
        matched.setdefault(others, {})[repr(own[factor])] = arm
    kept = _compared(list(matched.values()))
    if not kept:
        return None
    # A set that lacks a value would make the means of two values means over different arms.
    whole = [arms for arms in matched.values() if kept <= arms.keys()]
    is_ordered = len(factor) == 1 and all(_is_number(values[key][0]) for key in kept)
    listed = [key for key in values if key in kept]
    order = sorted(listed, key=lambda key: values[key][0]) if is_ordered else listed
    found = {key: [_known(reader, column, arms[key]) for arms in whole] for key in order}
    shown = tuple(
        AtValue(
            value=_text(values[key]),
            estimate=mean_of(column.quantity, own, max_steps=reader.most_steps(arms[key] for arms in whole)),
            change=None if key == order[0] else change_of(column.quantity, own, found[order[0]]),
        )
        for key, own in found.items()
    )
    sign = {"higher": 1.0, "lower": -1.0}.get(column.better)
    best = "" if sign is None else best_of({one.value: sign * one.estimate.value for one in shown})
    return Effect(
        setting=", ".join(factor),
        values=shown,
        unmatched=tuple(_text(own) for key, own in values.items() if key not in kept and set(own) != {NOTHING}),
        sets=len(whole),
        is_ordered=is_ordered,
        best=best,
    )


def best_of(means: Mapping[str, float]) -> str:
    """Return the value with the largest mean; empty where several have it."""
    highest = max(means.values())
    found = [value for value, mean in means.items() if math.isclose(mean, highest, rel_tol=0, abs_tol=SAME)]
    return found[0] if len(found) == 1 else ""


def _compared(sets: Sequence[Mapping[str, str]]) -> frozenset[str]:
    """Return the values that are compared: those for which the sets that have all of them hold most arms."""
    seen = {frozenset(arms) for arms in sets}
    candidates = {one & other for one in seen for other in seen}
    several = [values for values in candidates if len(values) > 1]

    def held(values: frozenset[str]) -> tuple[int, int, list[str]]:
        count = sum(values <= arms.keys() for arms in sets)
        return len(values) * count, count, sorted(values)

    return max(several, key=held, default=frozenset())


def _known(reader: Reader, column: Column, arm: str) -> Any:
    found = reader.get(column.term(arm))
    assert found is not None, "arms without a value were left out"
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(values: Values) -> str:
    return ", ".join(
        "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in values
    )
