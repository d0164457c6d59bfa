"""The command line. Parses arguments and composes; a command's modules are imported when it is chosen."""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from rewardlab.core.config import did_you_mean, field_texts, fields_of, from_mapping, read_settings, require
from rewardlab.core.errors import ConfigError, RewardlabError, RunInterrupted
from rewardlab.core.files import require_writable_folder, write_text
from rewardlab.data.config import SelectionConfig
from rewardlab.model.config import ComputeConfig, ModelConfig, TrainComputeConfig
from rewardlab.training.compat import Conventions
from rewardlab.training.config import (
    EvalConfig,
    LossConfig,
    MonitorConfig,
    ProbeConfig,
    RewardTrainerConfig,
    TrainerConfig,
)
from rewardlab.training.run_folder import with_settings_of_run

Settings = TypeVar("Settings")

SHORTHANDS: dict[str, list[str]] = {
    "--hf-dataset": ["--dataset"],
    "--use-chat-template": ["--chat-template", "template"],
    "--no-chat-template": ["--chat-template", "plain"],
}
ROOMS: dict[str, type] = {
    "data": SelectionConfig,
    "model": ModelConfig,
    "speed": TrainComputeConfig,
    "loss": LossConfig,
    "run": TrainerConfig,
    "monitoring": MonitorConfig,
}
WANTED: dict[type, str] = {int: "a whole number", float: "a finite number", Path: "a path"}
Words = tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]]
"""What stands after a flag, once for each time the flag is given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyArguments:
    """Settings of `rewardlab verify`."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Reward-model folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreArguments(ComputeConfig):
    """Settings of `rewardlab score`."""

    model: str
    """Reward-model folder, such as `runs/…/best`."""
    input: Path
    """JSONL rows with `messages`, or `prompt` and `response`, or `prompt` and `responses`."""
    output: Path
    """The same rows with `score` (or `scores`) added."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """fp32 gives the canonical scores; bf16 is faster on hardware that has it."""
    micro_token_budget: int = 8192
    """Tokens computed at a time; changes no number."""

    def __post_init__(self) -> None:
        require(self.micro_token_budget >= 16, f"--micro-token-budget {self.micro_token_budget}: must be at least 16.")
        require(not self.output.is_dir(), f"--output {self.output}: is a folder. Name the file to write.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuickstartArguments:
    """Settings of `rewardlab quickstart`."""

    output_dir: Path = Path("runs/quickstart")
    """Run folder; an earlier quickstart in it is replaced."""
    steps: int | None = None
    """Training steps; by default what fits in five minutes on two CPU cores."""
    test_pairs: int = 300
    """Test pairs to generate, on topics that no training pair is about."""
    seed: int = 0
    """Decides data, head and order."""

    def __post_init__(self) -> None:
        require(self.steps is None or self.steps >= 1, f"--steps {self.steps}: must be at least 1.")
        require(self.test_pairs >= 1, f"--test-pairs {self.test_pairs}: must be at least 1.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `rewardlab` script. Exits with 2 for anything the user can mend."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without σ is no reason to lose a report
    try:
        with _log_on_stdout():
            _run(list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has left, as `| head` does
        _discard_output()  # Python flushes once more at exit
        sys.exit(141)
    except RunInterrupted as interrupted:
        print(interrupted, file=sys.stderr)
        sys.exit(interrupted.exit_status)
    except (RewardlabError, OSError) as error:
        remark = ". What was saved before is still there." if isinstance(error, OSError) else ""
        who = "" if _is_first_process() else f"rank {os.environ['RANK']}: "
        print(f"error: {who}{error}{remark}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
    elif arguments[0] in ("-V", "--version"):
        print(f"rewardlab {version('rewardlab')}")
    elif arguments[0] not in COMMANDS:
        near = did_you_mean(arguments[0], COMMANDS)
        raise ConfigError(f"unknown command {arguments[0]!r}.{near} Commands: {', '.join(COMMANDS)}.")
    else:
        COMMANDS[arguments[0]][0](arguments[1:])


def parse_train(arguments: Sequence[str]) -> RewardTrainerConfig:
    """Flags over the configuration file (`--config`) over a preset or other conventions over defaults.

    Raises ConfigError for anything that does not resolve.
    """
    conventions = Conventions()
    config = _parse(RewardTrainerConfig, with_settings_of_run(arguments), "train", ROOMS, conventions)
    targets, saved = map(_apart, (config.lora_target_modules, config.lora_modules_to_save))
    config = dataclasses.replace(config, lora_target_modules=targets, lora_modules_to_save=saved)
    conventions.tell(config)
    return config


def _apart(names: Sequence[str]) -> tuple[str, ...]:
    """Names that may also be written with commas between them."""
    return tuple(name for several in names for name in several.split(",") if name)


def _is_first_process() -> bool:
    """Of those that torchrun may have started: the one that reports."""
    return os.environ.get("RANK", "0") == "0"


def _train(arguments: Sequence[str]) -> None:
    config = parse_train(arguments)
    from rewardlab.report.run import train_report
    from rewardlab.training.run import train

    result = train(config)
    if not _is_first_process():
        return
    report = train_report(
        selection=result.compared("selection"),
        test=result.compared("test"),
        speed=result.speed,
        chosen=str(result.model),
        warnings=result.warnings,
    )
    write_text(result.output_dir / "report.txt", report.lstrip() + "\n")
    print(report)


def _eval(arguments: Sequence[str]) -> None:
    config = _parse(EvalConfig, arguments, "eval")
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


def _probe(arguments: Sequence[str]) -> None:
    config = _parse(ProbeConfig, arguments, "probe")
    from rewardlab.report.probe import probe_report
    from rewardlab.training.probe import probe

    result = probe(config)
    report = probe_report(
        layers=result.layers,
        chosen=result.chosen,
        curve=result.curve,
        test=result.test,
        baselines=result.baselines,
        spread=result.uncertainty,
        model=str(result.model),
    )
    write_text(result.output_dir / "report.txt", report.lstrip() + "\n")
    print(report)


def _verify(arguments: Sequence[str]) -> None:
    folder = _parse(VerifyArguments, arguments, "verify").folder
    from rewardlab.serve.verify import verify

    found = verify(folder)
    print(
        f"{found.folder}: verified. {found.num_files} files unchanged, {found.num_canaries} canaries give their "
        f"scores (largest distance {found.largest_distance:.1e})."
    )
    if found.unnoticed:
        print(f"This model's canaries would not reveal: {', '.join(found.unnoticed)}.")


def _score(arguments: Sequence[str]) -> None:
    settings = _parse(ScoreArguments, arguments, "score")
    require_writable_folder(settings.output.parent, "--output")
    from rewardlab.serve.score_file import score_file

    count = score_file(
        settings.model,
        settings.input,
        settings.output,
        precision=settings.precision,
        token_budget=settings.micro_token_budget,
        compute=settings,
    )
    print(f"{count} replies scored: {settings.output}")


def _quickstart(arguments: Sequence[str]) -> None:
    settings = _parse(QuickstartArguments, arguments, "quickstart")
    from rewardlab.quickstart import run_quickstart

    print(
        run_quickstart(settings.output_dir, num_steps=settings.steps, num_test=settings.test_pairs, seed=settings.seed)
    )


Command = Callable[[Sequence[str]], None]
COMMANDS: dict[str, tuple[Command, str]] = {
    "quickstart": (_quickstart, "train a first reward model on generated preferences; downloads nothing but packages"),
    "train": (_train, "train a reward model from preferences"),
    "probe": (_probe, "fit a reward head on a frozen model: the baseline that fine-tuning has to beat"),
    "eval": (_eval, "judge a reward model on preferences, with intervals"),
    "score": (_score, "score replies in a file"),
    "verify": (_verify, "check that a reward-model folder still gives the scores it was saved with"),
}


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    head = ["rewardlab: reward models you can trust.", "", "usage: rewardlab COMMAND [flags]", ""]
    foot = ["", "rewardlab COMMAND --help lists the flags of a command; --config FILE reads them from YAML or TOML."]
    return "\n".join([*head, *lines, *foot])


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Lines(logging.StreamHandler[TextIO]):
    """Progress on stdout. If whoever read it has left, a run goes on without: its record is in its folder."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), BrokenPipeError):
            _discard_output()
        else:
            super().handleError(record)


@contextmanager
def _log_on_stdout() -> Iterator[None]:
    logger = logging.getLogger("rewardlab")
    handler, level = _Lines(sys.stdout), logger.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# --- arguments -> settings -----------------------------------------------------------------------------------


def _parse(
    settings_type: type[Settings],
    arguments: Sequence[str],
    command: str,
    rooms: Mapping[str, type] | None = None,
    conventions: Conventions | None = None,
) -> Settings:
    """Flags over the configuration file over defaults; `--help` shows them by `rooms`.

    tyro splits the arguments and prints the help. Values are read here and the settings are built once, from all
    of them, so that a mistake gets the same words wherever it was made.
    """
    path, flags = _split_config(_expand(arguments))
    in_file = read_settings(path) if path is not None else {}
    if conventions is not None:
        in_file = conventions.translate(in_file, f"--config {path}")
    rooms = rooms or {command: settings_type}
    hints = {name: hint for part in rooms.values() for name, hint in get_type_hints(part, include_extras=True).items()}
    twins = {room: _in_words(part, hints, in_file) for room, part in rooms.items()}
    fields = [
        (room, Annotated[twin, tyro.conf.arg(help=rooms[room].__doc__)], dataclasses.field(default=twin()))
        for room, twin in twins.items()
    ]
    together: Any = dataclasses.make_dataclass("Arguments", fields, frozen=True)
    parsed, unknown = tyro.cli(
        together,
        args=flags,
        prog=f"rewardlab {command}",
        description=f"{COMMANDS[command][1]}\n\n"
        "Flags override --config FILE (YAML, TOML, or a run's config.json); the value None unsets.",
        config=(tyro.conf.OmitArgPrefixes,),
        return_unknown_args=True,
    )
    if unknown:
        raise _unknown(unknown[0], hints, command)
    switched = {word[2:].replace("_", "-").removeprefix("no-").replace("-", "_") for word in flags if word[:2] == "--"}
    given = {
        field.name: _read(value, hints[field.name], _flag(field.name, hints))
        for room, twin in twins.items()
        for field in dataclasses.fields(twin)
        if (value := getattr(getattr(parsed, room), field.name)) != field.default
        or (hints[field.name] is bool and field.name in switched)  # a default that is given is given
    }
    values: dict[str, object] = {**in_file, **given}
    if conventions is not None:
        values = conventions.complete(values)
    for field in fields_of(settings_type):
        if field.default is dataclasses.MISSING and field.name not in values:
            raise ConfigError(f"{_flag(field.name, hints)} is missing; see `rewardlab {command} --help`.")
    return from_mapping(settings_type, values, where=f"--config {path}")


def _expand(arguments: Sequence[str]) -> list[str]:
    """Other names of flags, written out."""
    expanded: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        expanded += [*SHORTHANDS[flag], *([value] if equals else [])] if flag in SHORTHANDS else [argument]
    return expanded


def _split_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """(the file named by --config, the other arguments)."""
    rest, paths = list[str](), list[str]()
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if flag == "--config":
            paths.append(value if equals else next(remaining, ""))
        else:
            rest.append(argument)
    if "" in paths or len(paths) > 1:
        raise ConfigError(f"--config {' '.join(paths)}: takes the name of one YAML or TOML file.")
    return (Path(paths[0]) if paths else None), rest


def _in_words(part: type, hints: Mapping[str, Any], in_file: Mapping[str, object]) -> Any:
    """`part` as tyro gets it: its names and help, with words in place of values (but for switches)."""
    texts = field_texts(part)
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(part):
        hint, default = hints[field.name], in_file.get(field.name, field.default)
        kind: Any = Words
        metavar: str = _metavar(hint)
        unset: object = ()
        if hint is bool:
            kind, unset = bool, default if isinstance(default, bool) else field.default
        elif tyro.conf.Positional in get_args(hint):
            kind, metavar = tyro.conf.Positional[tuple[str, ...]], field.name.upper()
        explained = tyro.conf.arg(help=texts[field.name], metavar=metavar, help_behavior_hint=_shown(default))
        fields.append((field.name, Annotated[kind, explained], dataclasses.field(default=unset)))
    return dataclasses.make_dataclass(part.__name__, fields, frozen=True, kw_only=True)


def _metavar(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"{_metavar(get_args(hint)[0])} ..."
    if get_origin(hint) is Literal:
        return f"{{{','.join(get_args(hint))}}}"
    if hint is bool:
        return ""
    kind, *words = _kinds(hint)
    return "|".join([str(kind.__name__).upper(), *(word for choice in words for word in get_args(choice))])


def _shown(default: object) -> str:
    """A default in the help; nothing where it is that nothing is set."""
    if default is dataclasses.MISSING:
        return "(required)"
    if default is None or default is False or default in ("", (), []):
        return ""
    return f"(default: {' '.join(map(str, default)) if isinstance(default, (tuple, list)) else default})"


def _read(given: Any, hint: Any, flag: str) -> object:
    """What stands on the command line as a value, or ConfigError; if a flag takes one value, its last time counts."""
    if isinstance(given, bool):
        return given
    times = given if isinstance(given[-1], tuple) else (given,)  # a positional argument stands there once
    if get_origin(hint) is tuple:
        return tuple(_read_word(word, get_args(hint)[0], flag) for words in times for word in words)
    if not times[-1]:
        raise ConfigError(f"{flag}: the value is missing. Write one that begins with a dash as {flag}=VALUE.")
    if len(times[-1]) > 1:
        raise ConfigError(f"{flag} {' '.join(times[-1])}: takes one value. Put a value with spaces in quotes.")
    (word,) = times[-1]
    if word == "None" and type(None) in get_args(hint):
        return None
    kind, *choices = _kinds(hint)
    words = [choice for literal in choices for choice in get_args(literal)]
    return word if word in words else _read_word(word, kind, flag, words)


def _read_word(word: str, kind: Any, flag: str, or_else: Sequence[str] = ()) -> object:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        require(word in choices, f"{flag} {word}: must be one of {', '.join(choices)}.{did_you_mean(word, choices)}")
        return word
    try:
        value: object = kind(word)
    except ValueError:
        value = math.nan
    if (isinstance(value, float) and not math.isfinite(value)) or (kind is Path and not word):
        raise ConfigError(f"{flag} {word or repr(word)}: must be {' or '.join([WANTED[kind], *or_else])}.")
    return value


def _kinds(hint: Any) -> list[Any]:
    """`int` for `int | None`, `Path` for a positional Path, `int` and `Literal["auto"]` for either of the two."""
    union = get_origin(hint) in (Union, types.UnionType)
    if not union and tyro.conf.Positional not in get_args(hint):
        return [hint]
    return [kind for kind in get_args(hint) if kind not in (type(None), tyro.conf.Positional)]


def _unknown(argument: str, hints: Mapping[str, Any], command: str) -> ConfigError:
    """The error for an argument that belongs to no flag."""
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return ConfigError(f"unexpected {argument!r}: values follow their flag; a switch such as --lora takes none.")
    switches = [f"--no-{name.replace('_', '-')}" for name, hint in hints.items() if hint is bool]
    near = did_you_mean(flag, [*(_flag(name, hints) for name in hints), *switches, *SHORTHANDS, "--config", "--help"])
    return ConfigError(f"unknown flag {flag!r}.{near} `rewardlab {command} --help` lists the flags.")


def _flag(name: str, hints: Mapping[str, Any]) -> str:
    return name.upper() if tyro.conf.Positional in get_args(hints[name]) else f"--{name.replace('_', '-')}"
