"""What Optuna says about a search: which settings to try next, and whether a trial is worth its remaining seeds.

Nothing is kept between two questions. Each time Optuna is given all trials again, and draws with a generator of its own
for the number of the trial. So an answer depends on the trials and on the seed of the search alone, and a search that
was interrupted goes on as it would have.

Trials are compared seed by seed: Wilcoxon's signed-rank test of the differences between a trial and the best one (Akiba
et al. 2019, arXiv:1907.10902; `optuna.pruners.WilcoxonPruner`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import numpy as np

from rewardlab.core.errors import ConfigError
from rewardlab.experiments.grids import rounded
from rewardlab.experiments.plan import Settings, Sweep, Way

INSTALL: Final = 'pip install "rewardlab[optuna]"'
AT_RANDOM: Final = 10
"""Trials that TPE draws at random before it trusts what it has seen; half of all, where there are fewer than 20."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a trial came to."""

    settings: Settings
    by_seed: Mapping[int, float]
    """Seed -> the metric on validation data."""
    pruned: bool = False


def require_optuna() -> Any:
    """Return the package. Raises ConfigError, with the command that installs it, where it is missing."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ConfigError(
            f"a search by Optuna needs the package optuna: {INSTALL}. Without it, search with `grid` or `random`."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def next_settings(sweep: Sweep, trials: Sequence[Trial], *, number: int, higher_is_better: bool) -> dict[str, Any]:
    """Return the settings of trial `number`, after those before it."""
    optuna = require_optuna()
    study = _told(optuna, sweep, trials, number=number, higher_is_better=higher_is_better)
    drawn = study.ask(_distributions(optuna, sweep)).params
    return {name: _setting(way, drawn[name]) for name, way in sweep.settings.items()}


def is_hopeless(sweep: Sweep, trial: Trial, others: Sequence[Trial], *, higher_is_better: bool) -> bool:
    """Return whether a trial is so far worse than the best of the others, seed by seed, that it is dropped."""
    optuna = require_optuna()
    study = _told(optuna, sweep, others, number=len(others), higher_is_better=higher_is_better)
    asked = study.ask(_distributions(optuna, sweep))
    for seed, value in trial.by_seed.items():
        asked.report(value, seed)
    return bool(asked.should_prune())


def usable(sweep: Sweep, settings: Settings) -> bool:
    """Return whether Optuna can be given a trial: its settings are those that are drawn now, within today's ranges.

    An amended plan may draw other settings, or other values, than earlier trials did.
    """
    return set(settings) == set(sweep.settings) and all(
        _within(sweep.settings[name], settings[name]) for name in settings
    )


def _told(optuna: Any, sweep: Sweep, trials: Sequence[Trial], *, number: int, higher_is_better: bool) -> Any:
    """Return a study in memory that knows the trials."""
    own = int(np.random.SeedSequence([sweep.seed, number]).generate_state(1)[0])
    first = min(AT_RANDOM, max(1, sweep.trials // 2))
    samplers = optuna.samplers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # Optuna calls the pruner so
        pruners = optuna.pruners
        study = optuna.create_study(
            direction="maximize" if higher_is_better else "minimize",
            sampler=samplers.TPESampler(seed=own, n_startup_trials=first)
            if sweep.sampler == "tpe"
            else samplers.RandomSampler(seed=own),
            pruner=pruners.WilcoxonPruner(p_threshold=sweep.p_threshold)
            if sweep.pruner == "wilcoxon"
            else pruners.NopPruner(),
        )
    distributions = _distributions(optuna, sweep)
    states = optuna.trial.TrialState
    for trial in trials:
        if not usable(sweep, trial.settings) or not trial.by_seed:
            continue
        study.add_trial(
            optuna.trial.create_trial(
                state=states.PRUNED if trial.pruned else states.COMPLETE,
                params={name: _param(way, trial.settings[name]) for name, way in sweep.settings.items()},
                distributions=distributions,
                intermediate_values=dict(trial.by_seed),
                value=None if trial.pruned else fmean(trial.by_seed.values()),
            )
        )
    return study


def _distributions(optuna: Any, sweep: Sweep) -> dict[str, Any]:
    made = optuna.distributions
    found = {}
    for name, (kind, values) in sweep.settings.items():
        if kind == "choice":
            # A choice is given by its place, since some settings are lists, which Optuna does not take.
            found[name] = made.CategoricalDistribution(tuple(range(len(values))))
        elif kind == "integers":
            found[name] = made.IntDistribution(*values)
        else:
            found[name] = made.FloatDistribution(float(values[0]), float(values[1]), log=kind == "log")
    return found


def _setting(way: Way, param: Any) -> Any:
    kind, values = way
    if kind == "choice":
        return values[param]
    return int(param) if kind == "integers" else rounded(float(param), *values)


def _param(way: Way, setting: Any) -> Any:
    kind, values = way
    return _place(values, setting) if kind == "choice" else setting


def _place(values: Sequence[Any], setting: Any) -> int | None:
    # Compared by `repr`: 1, 1.0 and True are equal, but are three values.
    return next((place for place, value in enumerate(values) if repr(value) == repr(setting)), None)


def _within(way: Way, setting: Any) -> bool:
    kind, values = way
    if kind == "choice":
        return _place(values, setting) is not None
    wanted = int if kind == "integers" else float
    return isinstance(setting, wanted) and bool(values[0] <= setting <= values[1])
