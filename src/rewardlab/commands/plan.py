"""`rewardlab plan` from its command line: finds the tool that is named, and calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rewardlab.commands.parsing import parse_command, run_tool
from rewardlab.console import print_report, say
from rewardlab.core.errors import ConfigError
from rewardlab.core.signals import BEGINS_ANEW, GOES_ON, ended_by_signals
from rewardlab.core.terminal import quoted

if TYPE_CHECKING:
    from pathlib import Path

    from rewardlab.experiments.plan import Run
    from rewardlab.experiments.study import Study


@ended_by_signals(BEGINS_ANEW)
def check(arguments: Sequence[str]) -> None:
    """Check a plan and print the report. Exit status: 0, or 1 if the plan cannot be frozen as it is."""
    from rewardlab.experiments.config import ReadConfig

    config = parse_command(ReadConfig, arguments, "plan check")
    from rewardlab.experiments.checking import check
    from rewardlab.experiments.plan_file import read_plan
    from rewardlab.experiments.words import check_report

    checked = check(read_plan(config.plan, scale=config.scale, probes=config.probe, sets=config.sets()), look=_refusal)
    print_report(check_report(checked))
    _exit(1 if checked.errors else 0)


def freeze(arguments: Sequence[str]) -> None:
    """Freeze a plan. Raises ConfigError (exit status 2) if the plan cannot be frozen as it is."""
    from rewardlab.experiments.config import FreezeConfig

    config = parse_command(FreezeConfig, arguments, "plan freeze")
    from rewardlab.experiments.checking import check
    from rewardlab.experiments.plan_file import read_plan
    from rewardlab.experiments.study import freeze
    from rewardlab.experiments.words import check_report

    sets = config.sets()
    checked = check(read_plan(config.plan, scale=config.scale, probes=config.probe, sets=sets), look=_refusal)
    print_report(check_report(checked))
    if checked.errors:
        raise ConfigError(f"{config.plan}: is not frozen: {checked.errors[0]}")
    study = freeze(config.plan, config.folder, scale=config.scale, probes=config.probe, sets=sets)
    say("", f"frozen in {study.folder}. Run it: rewardlab plan run {study.word}")


def amend(arguments: Sequence[str]) -> None:
    """Amend a frozen plan. Raises ConfigError if `--seen` is missing, or the edited plan could not be frozen."""
    from rewardlab.experiments.config import AmendConfig

    config = parse_command(AmendConfig, arguments, "plan amend")
    from rewardlab.experiments.study import SEEN, amend, begun_and_judged
    from rewardlab.experiments.words import amendment_lines

    if config.seen is None:
        raise ConfigError(
            f"--seen: say what had been seen: {', '.join(f'{key} ({text})' for key, text in SEEN.items())}."
        )
    _require_checked(config.study)
    begun, judged = begun_and_judged(config.study)
    study = amend(config.study, reason=config.reason, seen=config.seen, begun=begun, judged=judged)
    say(*amendment_lines(study))


def _require_checked(folder: Path) -> None:
    """Raise ConfigError if the edited plan of a study could not be frozen as it is."""
    from rewardlab.experiments.checking import check
    from rewardlab.experiments.study import edited_plan

    if errors := check(edited_plan(folder), look=_refusal).errors:
        raise ConfigError(f"{folder}: the plan is not amended: {errors[0]}")


def _refusal(run: Run) -> str:
    """Return why the model of a run cannot be used with its settings; empty if it can, or must be fetched first."""
    from pathlib import Path

    if not Path(run.settings["model"]).is_dir():
        from rewardlab.experiments.pitfalls import missing_on_hub

        return missing_on_hub(run.settings["model"])
    if run.settings["trust_remote_code"]:
        return ""
    from rewardlab.artifact.base import open_base, settle_rendering
    from rewardlab.core.config import from_mapping
    from rewardlab.core.errors import RewardlabError
    from rewardlab.training.settings.config import RewardTrainerConfig

    config = from_mapping(RewardTrainerConfig, {**run.settings, "output_dir": "."}, where=run.arm)
    try:
        settled = settle_rendering(config.model, config.data.rendering)
        open_base(config.model, replace(config.data.rendering, **settled))
    except RewardlabError as error:
        return str(error)
    return ""


def run(arguments: Sequence[str]) -> None:
    """Do the runs of a study. Exit status: 0, 1 if a run failed or a gate is closed, 2 if a gate is undecided."""
    from rewardlab.experiments.config import RunConfig

    config = parse_command(RunConfig, arguments, "plan run")
    from rewardlab.core.errors import RunInterrupted
    from rewardlab.core.signals import INTERRUPTED, RESUME_LATER, Terminated
    from rewardlab.experiments.running import run_study

    try:
        status = run_study(config, say=say, redo=_redo)
    except Terminated as ended:
        raise RunInterrupted(f"stopped by {ended}. {GOES_ON}", exit_status=RESUME_LATER) from None
    except KeyboardInterrupt:
        raise RunInterrupted(f"stopped by Ctrl-C. {GOES_ON}", exit_status=INTERRUPTED) from None
    ending = f"rewardlab plan report {quoted(str(config.study))} tells what came of it"
    say("", f"exit status {status}" if status else ending)
    _exit(status)


def task(arguments: Sequence[str]) -> None:
    """Do one run of a study. Exit status: that of the run; 75 if it was interrupted and can be resumed."""
    from rewardlab.core.signals import ending_with_status
    from rewardlab.experiments.config import TaskConfig

    config = parse_command(TaskConfig, arguments, "plan task")
    with ending_with_status():
        from rewardlab.commands.training import train
        from rewardlab.experiments.one_run import do
        from rewardlab.experiments.study import open_study

        study = open_study(config.study)
        do(study, study.run_named(config.run), train, again=config.redo)


def _redo(study: Study, run: Run) -> None:
    from rewardlab.experiments.one_run import redo

    redo(study, run)


@ended_by_signals(BEGINS_ANEW)
def gate(arguments: Sequence[str]) -> None:
    """Judge a gate. Exit status: 0 if the gate is open, 1 if it is closed, 2 if it is undecided."""
    from rewardlab.experiments.config import GateConfig

    config = parse_command(GateConfig, arguments, "plan gate")
    from rewardlab.experiments.gates import after_choice, judge_gate, select
    from rewardlab.experiments.running import chosen_line, gate_lines, phase_named
    from rewardlab.experiments.study import open_study

    study = open_study(config.study)
    phase = phase_named(study, config.phase)
    if phase.search is not None:
        say(chosen_line(select(study, phase), after_choice(study, phase)))
    found = judge_gate(study, phase)
    say(*gate_lines(found))
    _exit(found.exit_status)


def submit(arguments: Sequence[str]) -> None:
    """Submit the runs of a study to Slurm."""
    from rewardlab.experiments.config import SubmitConfig

    config = parse_command(SubmitConfig, arguments, "plan submit")
    from rewardlab.experiments.slurm.submitting import submission_lines, submit
    from rewardlab.experiments.study import open_study

    study = open_study(config.study)
    say(*submission_lines(study, submit(study, config.phases, dry_run=config.dry_run, again=config.again)))


def status(arguments: Sequence[str]) -> None:
    """Print how far a study is. Exit status: 0 if all runs are done, 1 if one failed, 2 if some are not done yet."""
    from rewardlab.experiments.config import StatusConfig

    config = parse_command(StatusConfig, arguments, "plan status")
    from rewardlab.core.files import to_json
    from rewardlab.experiments.slurm.queue import ask_slurm
    from rewardlab.experiments.status import status_of, text_report
    from rewardlab.experiments.study import open_study

    study = open_study(config.study)
    found = status_of(study, ask_slurm(study.folder))
    print_report(to_json(found.as_dict()) if config.json else text_report(found))
    _exit(found.exit_status)


@ended_by_signals(BEGINS_ANEW)
def archive(arguments: Sequence[str]) -> None:
    """Write the archive of a study."""
    from rewardlab.experiments.config import ArchiveConfig

    config = parse_command(ArchiveConfig, arguments, "plan archive")
    from rewardlab.experiments.archiving import archive
    from rewardlab.experiments.study import open_study

    made = archive(open_study(config.study), config.output, weights=config.weights)
    say(f"{made.path}: {made.num_files:,} files, {made.num_bytes / 1e6:.1f} MB, SHA-256 {made.sha256}")
    if made.left_out:
        say(f"without models ({', '.join(made.left_out)}); --weights keeps them")


@ended_by_signals(BEGINS_ANEW)
def report(arguments: Sequence[str]) -> None:
    """Write the report of a study. Exit status: 0 if all runs support every hypothesis, 1 if any is refuted, else 2."""
    from rewardlab.experiments.config import ReportConfig

    config = parse_command(ReportConfig, arguments, "plan report")
    from rewardlab.experiments.reporting.files import claim, write
    from rewardlab.experiments.reporting.history import note_look
    from rewardlab.experiments.reporting.summary import summarise
    from rewardlab.experiments.reporting.text import text_report
    from rewardlab.experiments.study import open_study

    study = open_study(config.study)
    claim(config)
    summary = summarise(study)
    print_report(text_report(summary))
    say("", *(f"wrote {path}" for path in write(summary, config)))
    note_look(study, summary.progress)
    _exit(summary.exit_status)


def _exit(status: int) -> None:
    if status:
        sys.stdout.flush()
        sys.exit(status)


TOOLS: Final[Mapping[str, Callable[[Sequence[str]], None]]] = {
    "check": check,
    "freeze": freeze,
    "amend": amend,
    "run": run,
    "task": task,
    "submit": submit,
    "status": status,
    "report": report,
    "archive": archive,
    "gate": gate,
}


def plan(arguments: Sequence[str]) -> None:
    """Run the tool that the first argument names. Raises ConfigError if no tool has that name."""
    run_tool("plan", TOOLS, arguments, usage="PLAN|STUDY")
