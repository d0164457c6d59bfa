"""Judge, calibrate, compare, report and watch from their command lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rewardlab.arguments import (
    CompareArguments,
    ReportArguments,
    WatchArguments,
)
from rewardlab.commands.parsing import parse_command
from rewardlab.console import complain, print_report, say
from rewardlab.core.config import to_mapping
from rewardlab.core.errors import RewardlabError, words_of
from rewardlab.core.evaluation_folder import claim_evaluation
from rewardlab.core.files import keep_report
from rewardlab.core.folders import require_writable_folder
from rewardlab.core.run_folder import settle_if_free
from rewardlab.core.signals import BEGINS_ANEW, ended_by_signals
from rewardlab.core.terminal import plural
from rewardlab.evaluation.config import CalibrateConfig, EvalConfig


@ended_by_signals(BEGINS_ANEW)
def evaluate(arguments: Sequence[str]) -> None:
    config = parse_command(EvalConfig, arguments, "eval")
    if config.run.suite:
        _eval_suites(config)
        return
    from rewardlab.data.dataset_names import require_readable

    settle_if_free(config.run.output_dir)
    claim_evaluation(config.run.output_dir, config.run.inputs(config.data), overwrite=config.run.overwrite)
    require_readable(config.data.dataset, config.data.hf_split, config.data.reading)
    from rewardlab.data.formats import unit_of
    from rewardlab.data.reading import tell_oddities
    from rewardlab.evaluation.models import judge_folders
    from rewardlab.report.ensembles import ensemble_block
    from rewardlab.report.judged import judged_blocks

    run = config.run
    judged = judge_folders(config, finish=lambda place: report_on(run.output_dir, now=place))
    reports = {
        f"{report.name}[{report.split}]: {report.rows_read} {plural(report.rows_read, unit_of(report.format))} read, "
        f"{report.kept} kept, "
        f"dropped {', '.join(f'{cause} {count}' for cause, count in report.dropped.items()) or 'none'}": report
        for one in judged.models.values()
        for report in one.sources
    }
    say(*reports)
    for report in reports.values():
        tell_oddities(report)
    ensemble = judged.ensemble
    computed = f"{run.precision}, calibrated by the temperature of each model" if run.calibrated else run.precision
    for block in judged_blocks(judged.results, computed, slices=run.slice, thresholds=run.thresholds):
        print_report(block)
    if ensemble is not None:
        members = {name: getattr(ensemble, name) for name in ("members", "scaled_by", "penalty", "left_out")}
        print_report(f"\n{ensemble_block(ensemble.disagreement, **members)}\n")
    say(f"scores, metrics and report.html: {run.output_dir}")


def _eval_suites(config: EvalConfig) -> None:
    """Judge models, and those of an ensemble as one, on public test suites."""
    from rewardlab.data.suites.reading import require_suites

    settle_if_free(config.run.output_dir)
    claim_evaluation(config.run.output_dir, (), overwrite=config.run.overwrite)
    # Checked before torch is imported, so that a mistyped folder is reported at once.
    require_suites(config.run.suite, config.run.suite_data)
    from rewardlab.evaluation.models import judge_suites
    from rewardlab.report.precision import card_block, verdict_block
    from rewardlab.report.suites import suite_report
    from rewardlab.report.tables import report_width

    out = config.run.output_dir
    judged = judge_suites(config, finish=lambda place: report_on(out, now=place))
    for name, of_model in judged.items():
        for one in of_model.suites:
            if len(judged) > 1:
                say("", f"model {name}", *textwrap.wrap(of_model.meaning, width=report_width()))
            print_report(
                suite_report(
                    one.result,
                    left_out=one.left_out,
                    causes=one.causes,
                    truncated=one.truncated,
                    shortened=one.shortened,
                )
            )
    say(f"computed in {config.run.precision}")
    for name, of_model in judged.items():
        if of_model.card is not None:
            block = card_block(of_model.card) if len(judged) == 1 else f"{name}\n{verdict_block(of_model.card)}"
            print_report(f"\n{block}\n")
    say(f"scores, rows and report.html: {out}")


def _write_report(folder: Path, *, later: Path) -> None:
    """Write the report on what has just been judged in a folder, whose content is then moved to `later`."""
    from rewardlab.evaluation.texts import find_texts
    from rewardlab.report.build import write_report

    write_report([folder], output_dir=folder, find_texts=find_texts, later=later)


def report_on(run: Path, *, now: Path | None = None) -> None:
    """Write the report of a run or an evaluation that has ended, and which may have another name `now`. It is complete
    without the report, so a failure is only a message."""
    from rewardlab.report.run import command

    try:
        _write_report(now or run, later=run)
    except Exception as error:  # of any class, also for want of memory: hours of work must not go with a page
        own = str(error) if isinstance(error, RewardlabError) else f"{type(error).__name__}: {error}."
        why = words_of(error) if isinstance(error, OSError) else own
        complain(f"report.html was not written: {why} To try again: {command('report', str(run))}")
    else:
        if now is None:
            say(f"report: {run / 'report.html'}")


@ended_by_signals(BEGINS_ANEW)
def calibrate(arguments: Sequence[str]) -> None:
    config = parse_command(CalibrateConfig, arguments, "calibrate")
    from rewardlab.data.dataset_names import require_readable

    names = (*config.data.dataset, *config.run.judge_dataset)
    settle_if_free(config.run.output_dir)
    claim_evaluation(config.run.output_dir, names, overwrite=config.run.overwrite)
    require_readable(config.data.dataset, config.data.hf_split, config.data.reading)
    require_readable(config.run.judge_dataset, config.data.hf_split, config.data.reading)
    from rewardlab.evaluation.calibrate import CalibrationResult, calibrate
    from rewardlab.report.calibration import calibration_report

    def report_of(result: CalibrationResult) -> str:
        return calibration_report(result.scaling, result.judgement, rule=result.rule, shared_roots=result.shared_roots)

    result = calibrate(config, finish=lambda result, place: keep_report(report_of(result), place))
    print_report(report_of(result))
    how = "stored in" if result.stored else "not stored (--store does that) in"
    say(f"{how} {config.run.model}; scores and calibration: {result.output_dir}")


@ended_by_signals(BEGINS_ANEW)
def compare(arguments: Sequence[str]) -> None:
    settings = parse_command(CompareArguments, arguments, "compare")
    config = settings.comparison
    if config.output_dir is not None:
        require_writable_folder(config.output_dir.parent, "--output-dir")
    from rewardlab.evaluation.compare import claim_comparison, compare_files, write_comparison
    from rewardlab.report.compare import compare_report

    if config.output_dir is not None:
        settle_if_free(config.output_dir)
        claim_comparison(config.output_dir, settings.models, overwrite=config.overwrite)
    compared = compare_files(settings.models, config)
    print_report(
        compare_report(
            compared.result, texts=compared.texts, chose=compared.chose, num_examples=config.examples
        ).lstrip()
    )
    if config.output_dir is not None:
        write_comparison(config.output_dir, compared, settings=to_mapping(settings), overwrite=config.overwrite)
        say(f"comparison: {config.output_dir}")


@ended_by_signals(BEGINS_ANEW)
def report(arguments: Sequence[str]) -> None:
    settings = parse_command(ReportArguments, arguments, "report")
    from rewardlab.evaluation.texts import find_texts
    from rewardlab.report.build import write_report

    written = write_report(
        settings.runs,
        output_dir=settings.output_dir or settings.runs[0],
        find_texts=find_texts if settings.texts else None,
        num_mistakes=settings.mistakes,
        card=settings.card,
        overwrite=settings.overwrite,
        controls=settings.controls,
    )
    say(*(f"wrote {path}" for path in written))


def watch(arguments: Sequence[str]) -> None:
    settings = parse_command(WatchArguments, arguments, "watch")
    from rewardlab.evaluation.texts import find_texts
    from rewardlab.report.live import serve
    from rewardlab.report.watch import watch

    try:
        if settings.port is None:
            watch(settings.run, every_s=settings.every, once=settings.once)
        else:
            serve(settings.run, port=settings.port, every_s=settings.every, find_texts=find_texts, say=say)
    except KeyboardInterrupt:
        say("")
