"""From a plan to its runs: every arm with every seed, with all settings that it is started with."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rewardlab.core.config import from_mapping, settings_of, to_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.core.other_names import in_other_units
from rewardlab.experiments.plan import WINNER, Arm, Phase, Plan, Run
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.settings.presets import fill

FLAG: Final = re.compile(
    r"(?<![\w/-])--(?P<no>no-)?(?P<name>[a-z][a-z0-9-]*)"
    # Values that are certain to be some: NAME=VALUE, as often as wanted, and the name of a column before the next flag
    # or at the end of a part of the sentence.
    r"(?:(?P<pairs>(?: (?:'[^'=]+=[^']*'|(?:'[^'=]+'|[\w.-]+)=[\w.+-]*\w)(?![^\s,;:.)]))+)"
    r"|(?<=-column) (?P<column>(?!(?:and|or)\b)(?:'[^']+'|[\w.]*\w))(?= --|[.,;)]|$))?"
)
"""A flag of a command in a message, with its values where they are known for such."""
PAIR: Final = re.compile(r" ((?:'[^']*'|[^\s'])+)")
"""A value of the form NAME=VALUE, with what a shell needs around it."""
CODE: Final = re.compile(r"((?<![^\s(])`[^`]+`(?!\w))")
"""A command between backticks; a backtick within a path begins none."""
TEST: Final = ("test_dataset", "test_split")
"""Settings that name test data."""


def runs_of(plan: Plan, *, winner: Mapping[str, Any] | None = None) -> tuple[Run, ...]:
    """Return the runs in the order of work, each once. Those of `winner` are there once a search has chosen it.

    Raises ConfigError, naming arm and setting, for settings that `rewardlab train` would refuse, for an arm that is run
    in two phases with different seeds, and for a winner that would be judged on the seeds of its search.
    """
    runs: dict[str, Run] = {}
    first: dict[str, tuple[str, list[int]]] = {}
    for phase in plan.phases:
        found = list(_of_phase(plan, phase, winner))
        for arm in dict.fromkeys(run.arm for run in found):
            seeds = sorted(run.seed for run in found if run.arm == arm)
            before, others = first.setdefault(arm, (phase.name, seeds))
            if others != seeds:
                raise ConfigError(
                    f"arm {arm}: has the seeds {others} in {before} and {seeds} in {phase.name}. A gate would judge it "
                    f"by a part of its runs: give both phases the same seeds, or name two arms."
                )
        for run in found:
            known = runs.setdefault(run.name, run)
            if known.settings != run.settings:
                raise ConfigError(f"{run.name}: is run in {known.phase} and in {run.phase} with other settings.")
    return tuple(runs.values())


def settings_of_arm(plan: Plan, arm: Arm, seed: int, *, reads_test: bool) -> dict[str, Any]:
    """Return what an arm is trained with. Raises ConfigError for settings that `rewardlab train` would refuse."""
    replaced = in_other_units(arm.settings, settings_of(RewardTrainerConfig))
    given = {**{name: value for name, value in plan.base.items() if name not in replaced}, **arm.settings}
    if not reads_test:
        given = {name: value for name, value in given.items() if name not in TEST}
    where = f"arm {arm.name}"
    try:
        made = from_mapping(RewardTrainerConfig, {**fill(given), **given, "seed": seed}, where=where)
        made.require_evaluation()
    except ConfigError as error:
        # Errors about the type of a value begin with the place already.
        told = str(error)
        raise ConfigError(in_keys(told if told.startswith(f"{where}: ") else f"{where}: {told}")) from None
    whole = to_mapping(made)
    whole.pop("output_dir")
    return whole


def in_keys(message: str) -> str:
    """Return a message of `rewardlab train` with the keys of a plan in place of the flags of settings, and values that
    a flag is given as a plan writes them. What stands between backticks is a command, and stays."""
    known = settings_of(RewardTrainerConfig)

    def key(flag: re.Match[str]) -> str:
        name = flag["name"].replace("-", "_")
        if name not in known:
            return flag[0]
        if flag["no"]:
            return f"{name}: false"
        value = f"[{', '.join(map(_word, PAIR.findall(flag['pairs'])))}]" if flag["pairs"] else flag["column"]
        after = flag.string[flag.end() :]
        if not value:
            # NAME=VALUE in a form that is not known: the flag with its value is right at least in a command.
            return flag[0] if re.match(r" \S*=", after) else name
        # A message that begins with what was given goes on with a colon.
        return f"{name}{' ' if after.startswith(':') else ': '}{value}{',' if after.startswith(' --') else ''}"

    return "".join(part if CODE.fullmatch(part) else FLAG.sub(key, part) for part in CODE.split(message))


def _word(pair: str) -> str:
    """Return a word of a command as an entry of a list in YAML."""
    plain = pair.replace("'", "")
    return plain if re.fullmatch(r"\w[\w.=+-]*", plain) else f"'{plain}'"


def _of_phase(plan: Plan, phase: Phase, winner: Mapping[str, Any] | None) -> Iterator[Run]:
    for arm, reads_test in _arms(plan, phase, winner):
        # Settings take long to check, and seeds differ in nothing but the seed.
        settings = settings_of_arm(plan, arm, phase.seeds[0], reads_test=reads_test)
        for seed in _seeds(phase, arm, reads_test):
            yield Run(
                phase=phase.name,
                arm=arm.name,
                seed=seed,
                settings={**settings, "seed": seed},
                program=arm.program,
                reads_test=reads_test,
            )


def _seeds(phase: Phase, arm: Arm, reads_test: bool) -> Sequence[int]:
    """Return the seeds of an arm; an arm that a search dropped is not run with those that were left."""
    if reads_test or phase.search is None:
        return phase.seeds
    return phase.search.pruned.get(arm.name, phase.seeds)


def _arms(plan: Plan, phase: Phase, winner: Mapping[str, Any] | None) -> Iterator[tuple[Arm, bool]]:
    if phase.search is not None:
        for arm in phase.search.arms:
            yield arm, False
    for name in phase.arms:
        if name != WINNER:
            yield plan.arms[name], True
            continue
        before = itertools.takewhile(lambda one: one.name != phase.name, plan.phases)
        search = next((one for one in before if one.search is not None), None)
        if search is None:
            raise ConfigError(
                f"phase {phase.name}: the arm {WINNER} needs an earlier phase with a search. Move it to a phase after "
                f"that search."
            )
        if shared := sorted(set(search.seeds) & set(phase.seeds)):
            raise ConfigError(
                f"phase {phase.name}: the seeds {shared} chose the winner in {search.name}. It is judged on fresh "
                f"seeds only: name others."
            )
        if winner is not None:
            yield replace(Arm(name=WINNER, settings=winner["settings"]), says=f"chosen: {winner['arm']}"), True
