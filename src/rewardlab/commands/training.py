"""Train, probe and the quickstart from their command lines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rewardlab.arguments import (
    QuickstartArguments,
)
from rewardlab.commands.judging import report_on
from rewardlab.commands.parsing import parse_command
from rewardlab.console import is_first_process, print_report, say
from rewardlab.core.errors import words_of
from rewardlab.core.files import keep_report
from rewardlab.core.run_folder import with_settings_of_run
from rewardlab.core.signals import BEGINS_ANEW, ended_by_signals, ending_with_status
from rewardlab.data.config import DataConfig
from rewardlab.probing.config import ProbeConfig
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.settings.conventions import Conventions


def parse_train(arguments: Sequence[str]) -> RewardTrainerConfig:
    """Return the settings of a training run.

    Flags override the configuration file (`--config`), which overrides a preset or other conventions, which override
    the defaults. Raises ConfigError for unknown flags and values that cannot be used.
    """
    conventions = Conventions()
    config = parse_command(RewardTrainerConfig, with_settings_of_run(arguments), "train", conventions)
    targets, saved = map(_apart, (config.model.lora_target_modules, config.model.lora_modules_to_save))
    config = config.replace(lora_target_modules=targets, lora_modules_to_save=saved)
    config.require_evaluation()
    conventions.tell(config)
    return config


def _apart(names: Sequence[str]) -> tuple[str, ...]:
    """Split names that are separated by commas, as users of TRL may write them."""
    return tuple(name for several in names for name in several.split(",") if name)


def train(arguments: Sequence[str]) -> None:
    with ending_with_status():
        with _told_to_others():
            config = parse_train(arguments)
            from rewardlab.data.dataset_names import require_sources
            from rewardlab.training.publishing import publisher_of

            # Checked before torch is imported, so that a mistyped file name is reported at once.
            require_sources(config.data)
            publish = publisher_of(config.publish)  # which refuses a token that is not there
        if config.run.dry_run:
            _try_run(config)
            return
        from rewardlab.report.run import next_steps, precision_blocks, train_report
        from rewardlab.training.run import train

        result = train(config, publish=publish)
        if not is_first_process():
            return
        report = train_report(
            selection=result.compared("selection"),
            test=result.compared("test"),
            shared=result.shared,
            speed=result.speed,
            ending=next_steps(str(result.model), result.step),
            warnings=result.warnings,
            computed_in=result.computed_in,
            cards=precision_blocks(result.live, result.card),
        )
        print_report(_noticed(report, config.data), folder=result.output_dir)
        report_on(result.output_dir)


@contextmanager
def _told_to_others() -> Iterator[None]:
    """Tell the other processes of the run, if there are any, of an error before they meet: they wait for this one."""
    try:
        yield
    except Exception as error:  # of any class: whatever ends this process, the others wait for it
        if os.environ.get("RANK"):
            from rewardlab.distributed.meeting import tell_of_failure

            tell_of_failure(words_of(error) if isinstance(error, OSError) else str(error))
        raise


def _try_run(config: RewardTrainerConfig) -> None:
    """Try a training run in small, and print what the whole run would take."""
    from rewardlab.training.rehearsal import rehearse
    from rewardlab.training.rehearsed import dry_run_report

    if (tried := rehearse(config)) is not None:
        report = dry_run_report(tried)
        print_report(_noticed(report, config.data))


@ended_by_signals(BEGINS_ANEW)
def probe(arguments: Sequence[str]) -> None:
    config = parse_command(ProbeConfig, arguments, "probe")
    from rewardlab.data.dataset_names import require_sources

    require_sources(config.data)
    from rewardlab.probing.run import ProbeResult, probe
    from rewardlab.report.probe import probe_report

    def report_of(result: ProbeResult) -> str:
        report = probe_report(
            layers=result.layers,
            chosen=result.chosen,
            curve=result.curve,
            test=result.test,
            baselines=result.baselines,
            spread=result.uncertainty,
            card=result.card,
            model=str(result.model),
        )
        return _noticed(report, config.data)

    def finish(result: ProbeResult, place: Path) -> None:
        keep_report(report_of(result), place)
        report_on(result.output_dir, now=place)

    result = probe(config, finish=finish)
    print_report(report_of(result))
    if (page := result.output_dir / "report.html").is_file():
        say(f"report: {page}")


def _noticed(report: str, data: DataConfig) -> str:
    """Return a report; if its model is a control, the notice stands above and below it."""
    notice = data.diagnostic.notice
    return report if notice is None else f"\n{notice}\n{report}\n{notice}"


@ended_by_signals(BEGINS_ANEW)
def quickstart(arguments: Sequence[str]) -> None:
    """Train and judge a first model. Raises RunInterrupted if a signal ends it, and else as training does."""
    settings = parse_command(QuickstartArguments, arguments, "quickstart")
    from rewardlab.quickstart import run_quickstart

    report = run_quickstart(
        settings.output_dir, num_steps=settings.steps, num_test=settings.test_pairs, seed=settings.seed
    )
    print_report(report)
