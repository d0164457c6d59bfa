"""The command line. Parses arguments and composes; a command's modules are imported when it is chosen."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from rewardlab.core.config import config_hash, from_mapping, read_config_file
from rewardlab.core.errors import ConfigError, RewardlabError
from rewardlab.data.config import DataConfig
from rewardlab.model.config import ModelConfig
from rewardlab.training.config import EvalConfig, LossConfig, RewardTrainerConfig, TrainerConfig

Settings = TypeVar("Settings")

SHORTHANDS: dict[str, list[str]] = {
    "--hf-dataset": ["--dataset"],
    "--use-chat-template": ["--chat-template", "template"],
    "--no-chat-template": ["--chat-template", "plain"],
}
ROOMS: dict[str, type] = {"data": DataConfig, "model": ModelConfig, "loss": LossConfig, "run": TrainerConfig}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyArguments:
    """Settings of `rewardlab verify`."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Reward-model folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreArguments:
    """Settings of `rewardlab score`."""

    model: str
    """Reward-model folder, such as `runs/…/best`."""
    input: Path
    """JSONL rows with `messages`, or `prompt` and `response`, or `prompt` and `responses`."""
    output: Path
    """The same rows with `score` (or `scores`) added."""
    precision: str = "fp32"
    """fp32 gives the canonical scores; bf16 is faster on hardware that has it."""
    micro_token_budget: int = 8192
    """Tokens computed at a time; changes no number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuickstartArguments:
    """Settings of `rewardlab quickstart`."""

    output_dir: Path = Path("runs/quickstart")
    """Run folder; an earlier quickstart in it is replaced."""
    steps: int | None = None
    """Training steps; by default what fits in five minutes on two CPU cores."""
    pairs: int | None = None
    """Training pairs to generate; by default one pass over the steps."""
    seed: int = 0
    """Decides data, head and order."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `rewardlab` script. Exits with 2 for anything the user can mend."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_overview())
        return
    if given[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"rewardlab {version('rewardlab')}")
        return
    command, rest = given[0], _expand(given[1:])
    _show_log()
    try:
        if command not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(command, COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown command {command!r}.{hint} Commands: {', '.join(COMMANDS)}.")
        COMMANDS[command][0](rest)
    except RewardlabError as error:
        sys.exit(_fail(str(error)))
    except OSError as error:
        sys.exit(_fail(f"{error}. What was saved before is still there."))
    except KeyboardInterrupt:
        sys.exit(130)


def parse_train(arguments: Sequence[str]) -> RewardTrainerConfig:
    """Flags over the configuration file (`--config`) over defaults.

    Raises ConfigError for anything that does not resolve.
    """
    defaults, flags = _split_config(arguments)
    settings: dict[str, Any] = {}
    for name, value in defaults.items():
        settings[name.replace("-", "_")] = value
    where = "configuration file"
    known = {field.name for field in dataclasses.fields(RewardTrainerConfig)}
    if unknown := [name for name in settings if name not in known]:
        from_mapping(RewardTrainerConfig, dict.fromkeys(unknown), where=where)  # raises with the nearest name
    parts: dict[str, Any] = {
        room: from_mapping(part, {name: value for name, value in settings.items() if name in _names(part)}, where=where)
        for room, part in ROOMS.items()
    }
    parsed = _parse(_grouped(), flags, "rewardlab train", default=_grouped()(**parts))
    values = {name: getattr(getattr(parsed, room), name) for room, part in ROOMS.items() for name in _names(part)}
    return RewardTrainerConfig(**values)


def _train(arguments: Sequence[str]) -> None:
    config = parse_train(arguments)
    print(f"rewardlab train, settings {config_hash(config)}")
    from rewardlab.report.run import train_report
    from rewardlab.training.run import train

    result = train(config)
    print(
        train_report(
            selection={"before training": result.baseline, "chosen model": result.selected},
            test={"before training": result.test_baseline, "chosen model": result.test},
            chosen=str(result.model),
        )
    )


def _eval(arguments: Sequence[str]) -> None:
    defaults, flags = _split_config(arguments)
    config = _parse(
        EvalConfig, flags, "rewardlab eval", default=from_mapping(EvalConfig, defaults, where="configuration file")
    )
    from rewardlab.report.run import evaluation_report
    from rewardlab.training.evaluate import evaluate_folder

    result, reports, _ = evaluate_folder(config)
    for report in reports:
        print(
            f"{report.name}[{report.split}]: {report.rows_read} rows read, {report.kept} kept, "
            f"dropped {dict(report.dropped) or 'none'}"
        )
    print(evaluation_report(result.overall, result.by_source))
    print(f"scores and metrics: {config.output_dir}")


def _verify(arguments: Sequence[str]) -> None:
    folder = _parse(VerifyArguments, arguments, "rewardlab verify").folder
    from rewardlab.serve.verify import verify

    found = verify(folder)
    print(
        f"{found.folder}: verified. {found.num_files} files unchanged, {found.num_canaries} canaries give their "
        f"scores (largest distance {found.largest_distance:.1e})."
    )
    if found.unnoticed:
        print(f"This model's canaries would not reveal: {', '.join(found.unnoticed)}.")


def _score(arguments: Sequence[str]) -> None:
    settings = _parse(ScoreArguments, arguments, "rewardlab score")
    from rewardlab.serve.score_file import score_file

    count = score_file(
        settings.model,
        settings.input,
        settings.output,
        precision=settings.precision,
        token_budget=settings.micro_token_budget,
    )
    print(f"{count} replies scored: {settings.output}")


def _quickstart(arguments: Sequence[str]) -> None:
    settings = _parse(QuickstartArguments, arguments, "rewardlab quickstart")
    from rewardlab.quickstart import run_quickstart

    print(run_quickstart(settings.output_dir, num_steps=settings.steps, num_pairs=settings.pairs, seed=settings.seed))


Command = Callable[[Sequence[str]], None]
COMMANDS: dict[str, tuple[Command, str]] = {
    "quickstart": (_quickstart, "train a first reward model on generated preferences; downloads nothing but packages"),
    "train": (_train, "train a reward model from preferences"),
    "eval": (_eval, "judge a reward model on preferences, with intervals"),
    "score": (_score, "score replies in a file"),
    "verify": (_verify, "check that a reward-model folder still gives the scores it was saved with"),
}


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "rewardlab: reward models you can trust.",
            "",
            "usage: rewardlab COMMAND [flags]",
            "",
            *lines,
            "",
            "rewardlab COMMAND --help lists the flags of a command; --config FILE reads them from YAML or TOML.",
        ]
    )


def _names(part: type) -> list[str]:
    return [field.name for field in dataclasses.fields(part)]


def _grouped() -> Any:
    """The rooms' settings as one nested type, so that `--help` shows them by room."""
    return dataclasses.make_dataclass("TrainArguments", list(ROOMS.items()), frozen=True, kw_only=True)


def _parse(settings_type: type[Settings], arguments: Sequence[str], program: str, **options: Any) -> Settings:
    parsed: Settings = tyro.cli(
        settings_type, args=list(arguments), prog=program, config=(tyro.conf.OmitArgPrefixes,), **options
    )
    return parsed


def _expand(arguments: Sequence[str]) -> list[str]:
    """Other names of flags, written out."""
    expanded: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        expanded += [*SHORTHANDS[flag], *([value] if equals else [])] if flag in SHORTHANDS else [argument]
    return expanded


def _split_config(arguments: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """(settings of the file named by --config, the other arguments)."""
    rest, path = [], None
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if flag != "--config":
            rest.append(argument)
            continue
        path = value if equals else next(remaining, None)
        if not path:
            raise ConfigError("--config needs the name of a YAML or TOML file.")
    return (read_config_file(Path(path)) if path else {}), rest


def _show_log() -> None:
    logger = logging.getLogger("rewardlab")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
