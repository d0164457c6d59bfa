"""Verify, import, export, average, card and push from their command lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rewardlab.arguments import (
    AverageArguments,
    CardArguments,
    ExportArguments,
    ImportArguments,
    PushArguments,
    VerifyArguments,
)
from rewardlab.commands.parsing import parse_command
from rewardlab.console import answer_to, say
from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.core.files import write_json
from rewardlab.core.folders import require_writable_folder
from rewardlab.core.signals import BEGINS_ANEW, ended_by_signals
from rewardlab.core.terminal import quoted


@ended_by_signals(BEGINS_ANEW)
def verify(arguments: Sequence[str]) -> None:
    settings = parse_command(VerifyArguments, arguments, "verify")
    if settings.is_live:
        _verify_endpoint(settings)
        return
    from rewardlab.serve.verifying.folder import verify

    folder = _with_spec(Path(settings.folder))
    result = verify(folder, precision="fp32" if settings.precision == "auto" else settings.precision)
    say(
        f"{result.folder}: verified. {result.num_files} files unchanged, {result.num_canaries} canaries give their "
        f"scores in {result.precision} (largest distance {result.largest_distance:.1e})."
    )
    if result.unnoticed:
        say(f"This model's canaries would not reveal: {', '.join(result.unnoticed)}.")


def _verify_endpoint(settings: VerifyArguments) -> None:
    """Verify a live endpoint. Raises EndpointError if its scores are wrong, ConfigError if a package is missing."""
    from rewardlab.client import EXTRA
    from rewardlab.client.config import token_in

    try:
        from rewardlab.serve.verifying.consumers import TAKE_A_ROUTE, verify_as
        from rewardlab.serve.verifying.endpoints import Wire
        from rewardlab.serve.verifying.live import verify_live
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        raise ConfigError(
            f'a live endpoint needs the package {error.name}. Install it with: pip install "rewardlab[client]"'
        ) from error

    if settings.json is not None:
        require_writable_folder(settings.json.parent, "--json")
    token = token_in(settings.token_env, flag="--token-env")
    whole = settings.consumer in TAKE_A_ROUTE
    with Wire(settings.folder, token=token, timeout_s=settings.timeout_s, whole=whole) as wire:
        if settings.consumer == "none":
            result = verify_live(wire, folder=settings.model, name=settings.served_name, precision=settings.precision)
        else:
            assert settings.model is not None
            result = verify_as(
                wire,
                settings.consumer,
                folder=settings.model,
                name=settings.served_name,
                precision=settings.precision,
            )
    say(*result.lines())
    if settings.json is not None:
        write_json(settings.json, result.as_dict())
    if not result.is_right:
        raise EndpointError(result.verdict)
    say(result.verdict)


def _with_spec(folder: Path) -> Path:
    """Return the reward-model folder to verify. A foreign model is first imported, with the answers to a few questions.

    Raises ConfigError for a foreign model if there is no terminal to ask on.
    """
    from rewardlab.serve.folders.questions import ask_for_rendering, is_foreign

    if not is_foreign(folder):
        return folder
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{folder}: it holds a model and no reward_spec.json, so nothing says how its conversations are rendered "
            f"and which scores are right. Give the folder that `rewardlab train` wrote (…/best or …/step_N); another "
            f"project's reward model gets a spec by `rewardlab import {quoted(str(folder))} --output-dir NEW`."
        )
    from rewardlab.serve.folders.import_model import import_in_place, import_model, import_report

    say(f"{folder} holds a model and no reward_spec.json. A few questions make a reward-model folder of it.")
    answers = ask_for_rendering(folder, answer_to)
    if answers.target is None:
        result, place = import_in_place(folder, answers.settings), folder
    else:
        result, place = import_model(folder, answers.target, answers.settings), answers.target
    say(*import_report(result, place))
    return place


@ended_by_signals(BEGINS_ANEW)
def import_(arguments: Sequence[str]) -> None:
    settings = parse_command(ImportArguments, arguments, "import")
    from rewardlab.serve.folders.import_model import import_in_place, import_model, import_report

    if settings.output_dir is None:
        say(*import_report(import_in_place(settings.source, settings.foreign), settings.source))
        return
    require_writable_folder(settings.output_dir.parent, "--output-dir")
    result = import_model(settings.source, settings.output_dir, settings.foreign, overwrite=settings.overwrite)
    say(*import_report(result, settings.output_dir))


@ended_by_signals(BEGINS_ANEW)
def export(arguments: Sequence[str]) -> None:
    settings = parse_command(ExportArguments, arguments, "export")
    require_writable_folder(settings.output_dir.parent, "--output-dir")
    if settings.adapter:
        from rewardlab.serve.folders.export_adapter import export_adapter

        made = export_adapter(
            settings.folder,
            settings.output_dir,
            base=settings.base,
            with_base=settings.with_base,
            overwrite=settings.overwrite,
        )
        say(
            f"{settings.output_dir}: the adapters and the head of {settings.folder} for {made.base}. PEFT gives its "
            f"{made.num_canaries} canaries (largest distance {made.distance:.1e}, {made.allowed:g} allowed)."
        )
        return
    from rewardlab.artifact.shards import FileForm, bytes_of_size
    from rewardlab.serve.folders.export import export

    most = None if settings.max_shard_size is None else bytes_of_size(settings.max_shard_size)
    form = FileForm(max_shard_bytes=most, zero_bias=settings.zero_bias)
    spec = export(
        settings.folder,
        settings.output_dir,
        dtype=settings.dtype,
        overwrite=settings.overwrite,
        form=form,
        text_only=settings.text_only,
    )
    say(
        f"{settings.output_dir}: {settings.folder} in {spec.save_dtype} (rounding: {spec.rounding}), verified. Its "
        f"canonical scores are up to {spec.max_rounding_error:.1e} from those of {settings.folder} on the canaries."
    )


@ended_by_signals(BEGINS_ANEW)
def average(arguments: Sequence[str]) -> None:
    settings = parse_command(AverageArguments, arguments, "average")
    require_writable_folder(settings.output_dir.parent, "--output-dir")
    from rewardlab.serve.folders.average import average

    made = average(settings.folders, settings.output_dir, weights=settings.weights, overwrite=settings.overwrite)
    say(*made.lines(settings.output_dir))


@ended_by_signals(BEGINS_ANEW)
def card(arguments: Sequence[str]) -> None:
    settings = parse_command(CardArguments, arguments, "card")
    from rewardlab.evaluation.texts import find_texts
    from rewardlab.report.build import write_card_of

    written = write_card_of(settings.folder, find_texts=find_texts, overwrite=settings.overwrite)
    say(*(f"wrote {path}" for path in written))


@ended_by_signals(BEGINS_ANEW)
def push(arguments: Sequence[str]) -> None:
    settings = parse_command(PushArguments, arguments, "push")
    from rewardlab.serve.folders.push import push, push_report

    made = push(settings.folder, settings.repo, private=settings.private, card=settings.card, dry_run=settings.dry_run)
    say(*push_report(made, private=settings.private))
