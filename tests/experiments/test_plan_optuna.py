"""A search by Optuna finds the better rate, drops hopeless trials, goes on where it ended, and reads no test data."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.experiments import running
from rewardlab.experiments.checking import check
from rewardlab.experiments.config import RunConfig
from rewardlab.experiments.gates import candidates, select
from rewardlab.experiments.one_run import do, redo
from rewardlab.experiments.plan import Run, Sweep
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.records import TEST_SCORES, record_of
from rewardlab.experiments.slurm.submitting import submit
from rewardlab.experiments.study import Study, open_study
from rewardlab.experiments.sweeps import fewest_seeds
from study_folders import frozen_study, train_by_hand, write_plan

PLAN = """\
question: Which rate?
base: {model: a-model-3b, dataset: [train.jsonl], test_dataset: [test.jsonl], eval_fraction: 0.1, steps: 400}
arms: {base: {}}
phases:
- name: search
  seeds: [10, 11, 12, 13]
  search: {optuna: {OPTUNA, settings: {lr: {log: [1.0e-6, 1.0e-2]}}}}
- {name: confirm, arms: [winner, base]}
hypotheses: {better: accuracy(winner) > accuracy(base)}
slurm: {time: "01:00:00"}
"""
TRIALS = 6
PLAIN = PLAN.replace("OPTUNA", f"trials: {TRIALS}, seed: 3")
PRUNED = PLAN.replace("OPTUNA", f"trials: {TRIALS}, seed: 3, pruner: wilcoxon, p_threshold: 0.3")
BEST = 1e-4


def skill(run: Run) -> float:
    """The nearer the rate is to the best one, the better."""
    return max(0.55, 0.85 - 0.1 * abs(math.log10((run.settings["lr"] or 1e-2) / BEST)))


class Killed(BaseException):
    """Ends `plan run` between two runs."""


class Trained:
    """Runs that are written by hand: how many were done, until this ends or fails them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kill_after = self.fail_after = 10_000

    def all(self, study: Study, runs: Sequence[Run], **how: Any) -> list[Run]:
        for run in runs:
            if len(self.names) >= self.kill_after:
                raise Killed
            if len(self.names) >= self.fail_after:
                return list(runs)
            do(study, run, train_by_hand("same noise for all arms", skill(run), prompts=40))
            self.names.append(run.name)
        return []


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    done = Trained()
    monkeypatch.setattr(running, "run_all", done.all)
    return done


def run(study: Study, **how: Any) -> tuple[int, list[str]]:
    told: list[str] = []
    return running.run_study(RunConfig(study=study.folder, **how), say=told.append, redo=redo), told


def drawn(study: Study) -> list[str]:
    return [str(entry["arm"]) for entry in open_study(study.folder).entries if entry["kind"] == "drawn"]


@pytest.mark.slow
def test_a_search_finds_the_better_rate_and_its_winner_is_run_with_fresh_seeds(tmp_path: Path, trained) -> None:
    study = frozen_study(tmp_path, PLAIN)
    assert run(study)[0] == 0
    study = open_study(study.folder)
    rates = [entry["settings"]["lr"] for entry in study.entries if entry["kind"] == "drawn"]
    assert len(rates) == len(set(rates)) == TRIALS
    assert study.winner is not None
    assert study.winner["settings"]["lr"] == min(rates, key=lambda rate: abs(math.log(rate / BEST)))
    assert (study.winner["tried"], study.winner["on"], study.winner["pruned"]) == (TRIALS, "validation", [])
    assert [one.seed for one in study.runs if one.arm == "winner"] == [0, 1, 2]
    assert all(record_of(study, one).is_over for one in study.runs)
    searched = [one for one in study.runs if one.phase == "search"]
    assert len(searched) == 4 * TRIALS
    assert not any((study.run_folder(one) / TEST_SCORES).exists() for one in searched), "no test data were read"
    assert not any(one.settings.get("test_dataset") for one in searched)


@pytest.mark.slow
def test_later_trials_lie_nearer_to_the_best_rate_than_those_at_random(tmp_path: Path, trained) -> None:
    many = PLAN.replace("OPTUNA", "trials: 20, seed: 1").replace("[10, 11, 12, 13]", "[10]")
    study = frozen_study(tmp_path, many)
    run(study, phases=("search",))
    entries = [entry for entry in open_study(study.folder).entries if entry["kind"] == "drawn"]
    far = [abs(math.log10(entry["settings"]["lr"] / BEST)) for entry in entries]
    assert sum(far[10:]) / 10 < sum(far[:10]) / 10


@pytest.mark.slow
def test_a_hopeless_trial_is_dropped_and_cannot_be_chosen(tmp_path: Path, trained) -> None:
    study = frozen_study(tmp_path, PRUNED)
    status, told = run(study)
    assert status == 0
    study = open_study(study.folder)
    search = study.plan.phases[0].search
    assert search is not None
    assert search.pruned, told
    assert set(search.pruned.values()) <= {(10, 11), (10, 11, 12)}
    assert f"search: {next(iter(search.pruned))} is dropped after" in "\n".join(told)
    searched = [one for one in study.runs if one.phase == "search"]
    assert len(searched) == 4 * TRIALS - sum(4 - len(seeds) for seeds in search.pruned.values())
    assert all(record_of(study, one).is_over for one in study.runs)
    assert not {one.arm for one in candidates(study, study.plan.phases[0])} & set(search.pruned)
    assert study.winner is not None
    assert study.winner["pruned"] == sorted(search.pruned)
    best = min(drawn(study), key=lambda name: abs(math.log(float(name.partition("=")[2]) / BEST)))
    assert study.winner["arm"] == best, "the best rate was not dropped"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Runs and trials of a search that nothing disturbs, in their order."""
    done, whole = Trained(), frozen_study(tmp_path_factory.mktemp("whole"), PRUNED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "run_all", done.all)
        run(whole, phases=("search",))
    return done.names, drawn(whole)


@pytest.mark.slow
@pytest.mark.parametrize("kill_after", [0, 3, 10])
def test_a_search_that_was_killed_goes_on_with_the_same_trials(
    tmp_path: Path, trained, undisturbed, kill_after: int
) -> None:
    study = frozen_study(tmp_path / "killed", PRUNED)
    trained.kill_after = kill_after
    with pytest.raises(Killed):
        run(study, phases=("search",))
    assert open_study(study.folder).not_drawn > 0
    with pytest.raises(DataError, match=f"of {TRIALS} trials are drawn"):
        select(open_study(study.folder), open_study(study.folder).plan.phases[0])
    trained.kill_after = 10_000
    run(study, phases=("search",))
    assert (trained.names, drawn(study)) == undisturbed
    assert open_study(study.folder).winner is not None
    trained.names = []
    run(study, phases=("search",))
    assert (trained.names, len(drawn(study))) == ([], TRIALS), "nothing is left to do"


@pytest.mark.slow
def test_a_search_none_of_whose_trials_can_be_done_ends_after_the_first(tmp_path: Path, trained) -> None:
    study = frozen_study(tmp_path, PLAIN)
    trained.fail_after = 0
    status, told = run(study, phases=("search",))
    assert (status, len(drawn(study))) == (1, 1)
    assert "no trial has been done" in told[-1]
    trained.fail_after = 10_000
    assert run(study, phases=("search",))[0] == 0
    assert len(drawn(study)) == TRIALS


def test_a_search_is_not_submitted(tmp_path: Path) -> None:
    study = frozen_study(tmp_path, PLAIN)
    with pytest.raises(ConfigError, match="Optuna chooses each arm.*plan run STUDY --phases search"):
        submit(study, (), dry_run=True)


def test_a_missing_package_is_told_with_the_command_that_installs_it(tmp_path: Path, trained, monkeypatch) -> None:
    study = frozen_study(tmp_path, PLAIN)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r'pip install "rewardlab\[optuna\]"'):
        run(study)
    assert drawn(study) == []


def test_check_counts_the_runs_of_all_trials_and_tries_both_ends_of_every_range(tmp_path: Path) -> None:
    plan = read_plan(write_plan(tmp_path, PLAIN))
    found = check(plan)
    assert len([one for one in found.runs if one.phase == "search"]) == 4 * TRIALS
    rates = [one.settings["lr"] for one in found.runs if one.phase == "search"]
    assert (min(rates), max(rates)) == (1e-6, 1e-2)
    bad = write_plan(tmp_path, PLAIN.replace("lr: {log: [1.0e-6, 1.0e-2]}", "label_smoothing: {uniform: [0.0, 3.0]}"))
    with pytest.raises(ConfigError, match=r": label_smoothing [\d.]+: must be"):
        check(read_plan(bad))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("trials: 0", "trials: wanted a whole number from 1, got 0"),
        ("trials: 5, sampler: cma", "sampler: wanted one of tpe, random, got 'cma'"),
        ("trials: 5, prune: wilcoxon", "unknown 'prune'"),
        ("trials: 5, p_threshold: 2", "p_threshold: wanted a number between 0 and 1"),
        # 2^-4 is the smallest p-value of four seeds, so at 0.1 a trial can be dropped only when it is over.
        ("trials: 5, pruner: wilcoxon", "dropped after 4 seeds at the earliest.*Raise p_threshold above 0.125"),
    ],
)
def test_a_search_that_cannot_be_is_refused(tmp_path: Path, asked: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_plan(write_plan(tmp_path, PLAN.replace("OPTUNA", asked)))


@pytest.mark.parametrize(("threshold", "seeds"), [(0.3, 2), (0.25, 3), (0.1, 4), (0.05, 5), (0.9, 2)])
def test_the_fewest_seeds_are_those_of_the_smallest_p_value_below_the_threshold(threshold: float, seeds: int) -> None:
    from scipy.stats import wilcoxon

    assert fewest_seeds(Sweep(trials=1, settings={}, p_threshold=threshold)) == seeds
    worse = [-0.01 * (1 + number) for number in range(seeds)]
    assert wilcoxon(worse, alternative="less").pvalue < threshold
    assert seeds == 2 or wilcoxon(worse[:-1], alternative="less").pvalue >= threshold
