"""What a study has tried itself: settings that an advice names, and arms that already differ in them.

Where another arm already has what an arm lacks on purpose, the report does not advise to try it: it says what the other
arm showed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rewardlab.core.terminal import listed

FLAG: Final = re.compile(r"--([a-z][a-z0-9-]*)")
TURNED_ON: Final = re.compile(r"--([a-z][a-z0-9-]*) [0-9]")
"""A flag with a value that is not its default: an arm that has any has tried it."""
PATIENCE: Final = "early_stopping_patience"
MOST_NAMED: Final = 4
"""Most arms that a rule names; of the others it says how many there are."""
Settings = Mapping[str, Mapping[str, Any]]
"""Arm -> its settings."""


def named(names: Sequence[str]) -> str:
    """Return the first names with commas, and how many more there are."""
    return listed(names, MOST_NAMED)


def advised(
    do: str, settings: Settings, *, base: str, concerned: Sequence[str], others: Mapping[str, str], shown: str
) -> str:
    """Return an advice for the arms that are `concerned`, or what `others` showed that have tried it.

    `others` are arms that the advice does not concern -> what they showed. `base` is the arm from which the others
    depart, and `shown` names what is wrong with those concerned.
    """
    flags, on = ([flag.replace("-", "_") for flag in form.findall(do)] for form in (FLAG, TURNED_ON))
    there = [
        f"{arm} ({said}): {showed}"
        for arm, showed in others.items()
        if (said := _apart(flags, settings.get(arm, {}), [settings.get(one, {}) for one in concerned]))
    ]
    if there:
        return f"Arms of this study have tried what mends {shown}; go on from them: {'; '.join(there[:MOST_NAMED])}."
    vain = [
        f"{arm} ({said})"
        for arm in concerned
        if (said := _apart(flags, own := settings.get(arm, {}), [_without(on, settings.get(base, {}), own)]))
    ]
    return f"{do} Tried in this study, and not enough: {named(vain)}." if vain else do


def controls(settings: Settings) -> frozenset[str]:
    """Return the arms that are trained on data which were spoilt on purpose: what is wrong with them is their point."""
    return frozenset(arm for arm, own in settings.items() if (own.get("diagnostic_mode") or "none") != "none")


def idle_patience(settings: Settings, stopped: Mapping[str, int]) -> dict[str, int]:
    """Return arms with early stopping that stopped none of their runs -> their patience: it changed nothing there.

    `stopped` maps arms with finished runs to how many of these ended before their last step.
    """
    own = {arm: settings.get(arm, {}).get(PATIENCE) for arm, number in stopped.items() if not number}
    return {arm: patience for arm, patience in own.items() if isinstance(patience, int)}


def _without(names: Sequence[str], base: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the base with all off that an arm has turned on."""
    return {**base, **{name: None for name in names if own.get(name)}}


def _apart(flags: Sequence[str], own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Return the settings in which an arm differs from all others, with its values; empty if there is none."""
    differing = [
        name for name in dict.fromkeys(flags) if name in own and all(own[name] != other.get(name) for other in others)
    ]
    return ", ".join(f"{name} {_text(own[name])}" for name in differing)


def _text(value: object) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
