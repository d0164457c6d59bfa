"""Do a search by Optuna: draw an arm, do its runs seed by seed, drop it if it is hopeless, draw the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rewardlab.core.errors import DataError
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.grids import arm_of
from rewardlab.experiments.outcomes import Outcomes
from rewardlab.experiments.plan import Arm, Phase, Run, Search, Sweep
from rewardlab.experiments.quantities import Quantity, quantity_named
from rewardlab.experiments.records import record_of, undone
from rewardlab.experiments.sampling import Trial, is_hopeless, next_settings, require_optuna, usable
from rewardlab.experiments.study import Study, open_study
from rewardlab.experiments.sweeps import DRAWN, PRUNED, drawn_trials, fewest_seeds

Do = Callable[[Study, Sequence[Run]], Sequence[Run]]
"""Does runs and returns those that are not done afterwards."""
Say = Callable[[str], None]
Known = dict[tuple[str, tuple[int, ...]], Mapping[int, float]]
"""Arm and the seeds of it that are done -> seed -> the metric."""


def search_by_optuna(folder: Path, phase: str, do: Do, *, say: Say) -> list[Run]:
    """Do the trials of a phase that are not done, and return the runs that failed.

    A trial that failed is left out of what Optuna is told, and is tried again the next time. Raises ConfigError where
    Optuna is missing, DataError if a run has no value of the metric.
    """
    require_optuna()
    known: Known = {}

    def now() -> _Search:
        return _Search(open_study(folder), phase, known)

    left: list[Run] = []
    for number in range(now().sweep.trials):
        arm = _draw(now(), number, say)
        left += _do_trial(now(), arm, do, say)
        if left and not now().trials():
            say(f"{phase}: no trial has been done, and {arm.name} failed: the search does not go on")
            break
    return list({run.name: run for run in left}.values())


class _Search:
    """A phase that searches by Optuna, as the log and the runs tell it now."""

    def __init__(self, study: Study, phase: str, known: Known) -> None:
        """Look at a phase of a study. `known` keeps what was read of runs that are done, for the next questions."""
        self.study, self._known = study, known
        self.phase: Phase = next(one for one in study.plan.phases if one.name == phase)
        assert self.phase.search is not None
        assert self.phase.search.optuna is not None
        self.search: Search = self.phase.search
        self.sweep: Sweep = self.phase.search.optuna
        self.quantity: Quantity = quantity_named(self.search.metric)

    @property
    def higher_is_better(self) -> bool:
        return self.quantity.better != "lower"

    def drawn(self) -> dict[int, Arm]:
        """Return number -> arm."""
        return drawn_trials(self.study.entries, self.phase.name)

    def runs(self, arm: str) -> list[Run]:
        """Return the runs of an arm that are to be done, in the order of the seeds of the phase."""
        return [run for run in self.study.runs if run.arm == arm and run.phase == self.phase.name]

    def trials(self, *, but: str = "") -> list[Trial]:
        """Return the trials that are over, except those of the arm `but`, in the order in which they were drawn."""
        arms = [arm for arm in self.drawn().values() if arm.name != but]
        return [self.trial(arm) for arm in arms if not undone(self.study, self.runs(arm.name))]

    def trial(self, arm: Arm) -> Trial:
        """Return what the runs of an arm came to so far. Raises DataError if they have no value of the metric."""
        over = tuple(run.seed for run in self.runs(arm.name) if record_of(self.study, run).is_over)
        if (arm.name, over) not in self._known:
            self._known[arm.name, over] = self._values(arm.name, over)
        values = self._known[arm.name, over]
        return Trial(settings=arm.settings, by_seed=values, pruned=arm.name in self.search.pruned)

    def _values(self, arm: str, seeds: Sequence[int]) -> Mapping[int, float]:
        term = Term(self.quantity.name, arm, on="validation")
        found, missing = Outcomes(self.study, may_read="validation").observe([term])
        if term not in found:
            raise DataError(f"{self.phase.name}: {arm}: {missing[term]}, so Optuna cannot be told how it went.")
        values = dict(zip(found[term].seeds, map(float, found[term].by_seed_S), strict=True))
        return {seed: values[seed] for seed in seeds if math.isfinite(values.get(seed, math.nan))}


def _draw(search: _Search, number: int, say: Say) -> Arm:
    """Return the arm of a trial, which is drawn now if the log does not have it."""
    drawn = search.drawn()
    if number in drawn:
        return drawn[number]
    trials = search.trials()
    if foreign := sum(not usable(search.sweep, trial.settings) for trial in trials):
        say(f"{search.phase.name}: Optuna is not told of {foreign} trials outside the ranges of the amended plan")
    values = next_settings(search.sweep, trials, number=number, higher_is_better=search.higher_is_better)
    arm = arm_of(values, search.phase.name)
    again = arm.name in {one.name for one in drawn.values()}
    search.study.note(DRAWN, phase=search.phase.name, trial=number, arm=arm.name, settings=dict(arm.settings))
    told = ", which was tried before and is not run again" if again else ""
    say(f"{search.phase.name}: trial {number + 1} of {search.sweep.trials}: {arm.name}{told}")
    return arm


def _do_trial(search: _Search, arm: Arm, do: Do, say: Say) -> list[Run]:
    """Do the runs of a trial that are not done, and return those that failed; stop early if it is hopeless."""
    runs = search.runs(arm.name)
    prunes = search.sweep.pruner != "none" and arm.name not in search.search.pruned
    first = min(fewest_seeds(search.sweep), len(runs)) if prunes else len(runs)
    for end in range(first, len(runs) + 1):
        begin = 0 if end == first else end - 1
        pending = undone(search.study, runs[begin:end])
        if left := list(do(search.study, pending)) if pending else []:
            return left
        if prunes and end < len(runs) and _drop(search, arm, runs[:end], say):
            return []
    return []


def _drop(search: _Search, arm: Arm, done: Sequence[Run], say: Say) -> bool:
    """Return whether a trial is hopeless after these runs; if so, note that it is dropped."""
    others = [trial for trial in search.trials(but=arm.name) if not trial.pruned]
    whole = search.trial(arm)
    so_far = Trial(
        settings=arm.settings, by_seed={run.seed: whole.by_seed[run.seed] for run in done if run.seed in whole.by_seed}
    )
    if not is_hopeless(search.sweep, so_far, others, higher_is_better=search.higher_is_better):
        return False
    search.study.note(PRUNED, phase=search.phase.name, arm=arm.name, seeds=[run.seed for run in done])
    say(f"{search.phase.name}: {arm.name} is dropped after {len(done)} of {len(search.phase.seeds)} seeds")
    return True
