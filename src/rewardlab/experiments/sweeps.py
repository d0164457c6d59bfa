"""Searches by Optuna, as a plan asks for them and as the log of a study tells them. `sampling` asks Optuna.

The log is all that is kept of a search: an entry for each trial that was drawn, one for each that was dropped. What the
trials came to is read from their runs. So a search goes on after whatever ended it, with the trials that it would have
had anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rewardlab.core.errors import ConfigError
from rewardlab.experiments.grids import MOST_ARMS, rounded, ways_of
from rewardlab.experiments.plan import Arm, Phase, Plan, Search, Sweep, Way

DRAWN: Final = "drawn"
"""Kind of the entry of a trial: `phase`, `trial` (its number), `arm` and `settings`."""
PRUNED: Final = "pruned"
"""Kind of the entry of an arm that was dropped: `phase`, `arm`, and the `seeds` that it was run with."""
KEYS: Final = ("trials", "sampler", "pruner", "seed", "p_threshold", "settings")
SAMPLERS: Final = ("tpe", "random")
PRUNERS: Final = ("none", "wilcoxon")


def sweep_of(given: Mapping[str, Any], where: str) -> Sweep | None:
    """Return a search by Optuna; None where nothing is given. Raises ConfigError for values that it cannot have."""
    if not given:
        return None
    if unknown := sorted(set(given) - set(KEYS)):
        raise ConfigError(f"{where}: unknown {unknown[0]!r}. It may say: {', '.join(KEYS)}.")
    values = {"sampler": "tpe", "pruner": "none", "seed": 0, "p_threshold": 0.1, **given}
    for name, known in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
        if values[name] not in known:
            raise ConfigError(f"{where}: {name}: wanted one of {', '.join(known)}, got {values[name]!r:.60}.")
    for name, least in (("trials", 1), ("seed", 0)):
        number = values.get(name)
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ConfigError(f"{where}: {name}: wanted a whole number from {least}, got {number!r:.60}.")
    if values["trials"] > MOST_ARMS:
        raise ConfigError(f"{where}: trials: wanted at most {MOST_ARMS:,}, got {values['trials']:,}.")
    threshold = values["p_threshold"]
    if not isinstance(threshold, int | float) or isinstance(threshold, bool) or not 0 < threshold < 1:
        raise ConfigError(f"{where}: p_threshold: wanted a number between 0 and 1, got {threshold!r:.60}.")
    return Sweep(**{**values, "settings": ways_of(values.get("settings"), where)})


def fewest_seeds(sweep: Sweep) -> int:
    """Return after how many seeds a trial can be dropped at the earliest.

    If a trial is worse with each of n seeds, the one-sided p-value of Wilcoxon's signed ranks is 2^-n, and none is
    smaller.
    """
    return max(2, math.floor(-math.log2(sweep.p_threshold)) + 1)


def require_able_to_prune(sweep: Sweep, num_seeds: int, where: str) -> None:
    """Raise ConfigError if the pruner cannot drop a trial before its last seed."""
    needed = fewest_seeds(sweep)
    if sweep.pruner == "none" or num_seeds > needed:
        return
    told = f"Raise p_threshold above {0.5 ** max(2, num_seeds - 1):g}, or t" if num_seeds > 2 else "T"
    raise ConfigError(
        f"{where}: pruner: with p_threshold {sweep.p_threshold:g} a trial is dropped after {needed} seeds at the "
        f"earliest, and the phase has {num_seeds}, so nothing could be saved. {told}ake more seeds, or `pruner: none`."
    )


# --- what the log tells --------------------------------------------------------------------------------------------


def drawn_trials(entries: Sequence[Mapping[str, Any]], phase: str) -> dict[int, Arm]:
    """Return number of the trial -> its arm, of a phase. Two trials may have one arm, which is run once."""
    return {
        int(entry["trial"]): Arm(name=str(entry["arm"]), settings=dict(entry["settings"]))
        for entry in entries
        if entry["kind"] == DRAWN and entry["phase"] == phase
    }


def with_drawn(plan: Plan, entries: Sequence[Mapping[str, Any]]) -> Plan:
    """Return the plan with the arms that its searches by Optuna have drawn so far."""
    phases = []
    for phase in plan.phases:
        if phase.search is not None and phase.search.optuna is not None:
            arms = {arm.name: arm for arm in drawn_trials(entries, phase.name).values()}
            phase = replace(phase, search=_found(phase, phase.search, tuple(arms.values()), entries))
        phases.append(phase)
    return replace(plan, phases=tuple(phases))


def _found(phase: Phase, search: Search, arms: tuple[Arm, ...], entries: Sequence[Mapping[str, Any]]) -> Search:
    dropped = {
        str(entry["arm"]): tuple(int(seed) for seed in entry["seeds"])
        for entry in entries
        if entry["kind"] == PRUNED and entry["phase"] == phase.name
    }
    return replace(search, arms=arms, pruned=dropped)


# --- before anything is drawn --------------------------------------------------------------------------------------


def with_stand_ins(plan: Plan) -> Plan:
    """Return the plan with an arm for each trial that is not drawn yet, spread over the ranges from end to end.

    They show what a search may cost, and whether `rewardlab train` would refuse any of it. They are never run.
    """
    phases = []
    for phase in plan.phases:
        if phase.search is not None and phase.search.optuna is not None:
            arms = _stand_ins(phase.search.optuna, phase.name)
            phase = replace(phase, search=replace(phase.search, arms=arms))
        phases.append(phase)
    return replace(plan, phases=tuple(phases))


def _stand_ins(sweep: Sweep, phase: str) -> tuple[Arm, ...]:
    found: dict[str, Arm] = {}
    for number in range(sweep.trials):
        share = number / max(sweep.trials - 1, 1)
        settings = {name: _at(way, share, number) for name, way in sweep.settings.items()}
        found.setdefault(repr(settings), Arm(name=f"{phase}_trial_{number}", settings=settings))
    return tuple(found.values())


def _at(way: Way, share: float, number: int) -> Any:
    """Return the value of a setting a share of the way from its lower to its upper end."""
    kind, values = way
    if kind == "choice":
        return values[number % len(values)]
    low, high = values
    if kind == "integers":
        return round(low + share * (high - low))
    if kind == "log":
        return rounded(math.exp(math.log(low) + share * (math.log(high) - math.log(low))), low, high)
    return rounded(low + share * (high - low), low, high)
