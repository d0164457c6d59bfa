"""`rewardlab gold` from its command line: finds the stage that is named, and calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rewardlab.commands.parsing import parse_command, run_tool
from rewardlab.console import is_first_process, print_report, say
from rewardlab.core.errors import ConfigError
from rewardlab.core.signals import BEGINS_ANEW, GOES_ON, ended_by_signals
from rewardlab.gold.rmood_flags import theirs, translated


def settings_for(config_type: type[Any], arguments: Sequence[str], stage: str) -> Any:
    """Return the settings of a stage from its arguments. Raises as `parse_command`."""
    named = ", ".join(f"--{name}" for name in theirs(stage))
    earlier = f"; of earlier scripts also {named}" if named else ""
    more = f"Flags may have underscores (--prompts_path){earlier}." if stage != "run" else ""
    return parse_command(config_type, translated(arguments, stage, say=say), f"gold {stage}", more=more)


@ended_by_signals(GOES_ON)
def sample(arguments: Sequence[str]) -> None:
    from rewardlab.gold.sampling.config import SampleConfig

    config = settings_for(SampleConfig, arguments, "sample")
    from rewardlab.gold.sampling.report import text_report
    from rewardlab.gold.sampling.run import sample

    print_report(text_report(sample(config)))


@ended_by_signals(GOES_ON)
def label(arguments: Sequence[str]) -> None:
    from rewardlab.gold.labelling.config import LabelConfig

    config = settings_for(LabelConfig, arguments, "label")
    from rewardlab.gold.labelling.report import text_report
    from rewardlab.gold.labelling.run import label

    print_report(text_report(label(config), config.judge))


@ended_by_signals(BEGINS_ANEW)
def build(arguments: Sequence[str]) -> None:
    from rewardlab.gold.building.config import BuildConfig

    config = settings_for(BuildConfig, arguments, "build")
    from rewardlab.gold.building.report import text_report
    from rewardlab.gold.building.run import build

    print_report(text_report(build(config), config))


def train(arguments: Sequence[str]) -> None:
    from rewardlab.commands.training import train
    from rewardlab.gold.training import HELP, next_step, train_arguments

    if {"-h", "--help"} & set(arguments):
        from rewardlab.training.settings.config import RewardTrainerConfig

        parse_command(RewardTrainerConfig, ["--help"], "gold train", more=HELP)
    train(train_arguments(arguments))
    if is_first_process() and (told := next_step(arguments)) is not None:
        say(told)


@ended_by_signals(GOES_ON)
def match(arguments: Sequence[str]) -> None:
    """Measure how well proxies match gold. Exit status: 0, or 1 if a verdict fails, 2 for an error."""
    from rewardlab.gold.matching.config import MatchConfig

    config = settings_for(MatchConfig, arguments, "match")
    from rewardlab.gold.findings import exit_status
    from rewardlab.gold.matching.files import claim, write
    from rewardlab.gold.matching.report import text_report
    from rewardlab.gold.matching.run import match

    claim(config)
    found = match(config)
    _tell(text_report(found), write(found, config), exit_status(found.findings))


@ended_by_signals(GOES_ON)
def curve(arguments: Sequence[str]) -> None:
    from rewardlab.gold.curving.config import CurveConfig

    config = settings_for(CurveConfig, arguments, "curve")
    from rewardlab.gold.curving.files import claim, write
    from rewardlab.gold.curving.report import text_report
    from rewardlab.gold.curving.run import curve

    claim(config)
    found = curve(config)
    _tell(text_report(found), write(found, config), 0)


@ended_by_signals(BEGINS_ANEW)
def check(arguments: Sequence[str]) -> None:
    """Check the files of all stages. Exit status: 0, or 1 if a fault is found, 2 for an error."""
    from rewardlab.gold.checking.config import CheckConfig

    config = settings_for(CheckConfig, arguments, "check")
    from rewardlab.gold.checking.report import claim, text_report, write
    from rewardlab.gold.checking.run import check
    from rewardlab.gold.findings import exit_status

    claim(config)
    found = check(config)
    _tell(text_report(found), write(found, config), exit_status(found.findings))


def _tell(report: str, written: Sequence[Path], status: int) -> None:
    """Print a report and the names of written files; exit if the status is not 0."""
    print_report(report)
    if written:
        say("", *(f"wrote {path}" for path in written))
    if status:
        sys.stdout.flush()
        sys.exit(status)


@ended_by_signals(GOES_ON)
def run(arguments: Sequence[str]) -> None:
    """Run all stages that are not complete. The exit status is the worst one of the stages."""
    from rewardlab.gold.pipeline.config import RunConfig

    config = settings_for(RunConfig, arguments, "run")
    from rewardlab.gold.pipeline.plan import read_plan, require_makers
    from rewardlab.gold.pipeline.run import run

    plan = read_plan(config.plan)
    for stage in plan.stages:
        _require_settings(plan.arguments(stage), stage)
    require_makers(plan)
    run(plan, config, TOOLS, say=say)


def _require_settings(arguments: Sequence[str], stage: str) -> None:
    """Raise ConfigError for settings of a stage that cannot be used, before any stage begins."""
    from rewardlab.commands.training import parse_train
    from rewardlab.gold.building.config import BuildConfig
    from rewardlab.gold.checking.config import CheckConfig
    from rewardlab.gold.curving.config import CurveConfig
    from rewardlab.gold.labelling.config import LabelConfig
    from rewardlab.gold.matching.config import MatchConfig
    from rewardlab.gold.sampling.config import SampleConfig

    configs: Mapping[str, type[Any]] = {
        "sample": SampleConfig,
        "label": LabelConfig,
        "build": BuildConfig,
        "match": MatchConfig,
        "curve": CurveConfig,
        "check": CheckConfig,
    }
    try:
        if stage == "train":
            # The folder that `build` will write counts as data.
            parse_train([word.replace("--data=", "--dataset=") for word in arguments])
        else:
            settings_for(configs[stage], arguments, stage)
    except ConfigError as error:
        raise ConfigError(f"{stage}: {error}") from error


TOOLS: Final[Mapping[str, Callable[[Sequence[str]], None]]] = {
    "sample": sample,
    "label": label,
    "build": build,
    "train": train,
    "match": match,
    "curve": curve,
    "check": check,
    "run": run,
}


def gold(arguments: Sequence[str]) -> None:
    """Run the stage that the first argument names. Raises ConfigError if no stage has that name."""
    run_tool("gold", TOOLS, arguments, usage="")
