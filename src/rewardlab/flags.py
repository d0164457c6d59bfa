"""Flags and configuration files -> settings, for every command.

tyro splits the arguments and prints the help. Values are read here, so that a mistake gets the same message on the
command line and in a file.
"""

from __future__ import annotations

import dataclasses
import keyword
import logging
import math
import os
import shutil
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from rewardlab.core.config import Setting, field_texts, from_mapping, read_settings, settings_of
from rewardlab.core.earlier_names import renamed, renamed_flags
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import at_home
from rewardlab.core.other_names import ALSO_CALLED, VALUES_ALSO_CALLED, in_other_units
from rewardlab.core.terminal import brief, listed, short, visible
from rewardlab.core.values import did_you_mean, fits
from rewardlab.training.settings.conventions import Conventions

logger = logging.getLogger("rewardlab")
Settings = TypeVar("Settings")

SHORTHANDS: dict[str, list[str]] = {
    "--hf-dataset": ["--dataset"],
    "--use-chat-template": ["--chat-template", "template"],
    "--no-chat-template": ["--chat-template", "plain"],
    "--as": ["--consumer"],
}
NARROWEST, WIDEST = 40, 200
"""Smallest and largest width of the help, in columns."""
WANTED: dict[type, str] = {int: "a whole number", float: "a finite number", Path: "a path"}
"""Type of a setting -> how messages call its values."""
METRIC, MODE = "early_stopping_metric", "early_stopping_mode"
"""Settings of which the second says in which direction the first is better."""
Words = tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]]
"""The words after a flag: one tuple for each time that the flag is given."""


def parse(
    settings_type: type[Settings],
    arguments: Sequence[str],
    command: str,
    purpose: str,
    conventions: Conventions | None = None,
    *,
    given_names: set[str] | None = None,
) -> Settings:
    """Return the settings of a command from its arguments: flags override the configuration file, which overrides the
    defaults. `--help` prints them by section under `purpose`, a line on what the command does, and exits. To
    `given_names` the names of all settings that flags or the file give are added.

    The settings are built once, from all values together, so that checks across settings see the final values.

    Raises ConfigError for unknown flags, for values that cannot be used and for required settings that are missing.
    """
    known = settings_of(settings_type)
    path, words = _split_config(_expand(arguments))
    flags, lines = renamed_flags(words, known)
    in_file, more_lines = renamed(_settings_in(path), known, f"--config {path}") if path is not None else ({}, [])
    for line in (*more_lines, *lines):
        logger.info("%s", line)
    if conventions is not None:
        in_file = conventions.translate(in_file, f"--config {path}")
    _require_own(in_file, known, f"--config {path}")
    kind: Any = settings_type
    hints = _hints(kind)
    # A section becomes a field of a dataclass, whose name cannot be a word of Python.
    word = command.rpartition(" ")[2]
    own = f"{word}ing" if keyword.iskeyword(word) else word
    together = _together(kind, own, in_file, hints if _asks_for_all(flags) else _named(flags, hints))
    twins: dict[str, Any] = {section.name: section.default for section in dataclasses.fields(together)}
    with _width_for_help():
        parsed, unknown = tyro.cli(
            together,
            args=flags,
            prog=f"rewardlab {command}",
            description=f"{purpose}\n\n"
            "Flags override --config FILE (YAML, TOML, or a run's config.json); the value None unsets.",
            config=(tyro.conf.OmitArgPrefixes,),
            return_unknown_args=True,
        )
    if unknown:
        raise _unknown(unknown[0], hints, command)
    # tyro does not say whether a switch with its default value was given, and one that was given has to override a
    # preset. So switches are looked up among the arguments.
    switched = {word[2:].replace("_", "-").removeprefix("no-").replace("-", "_") for word in flags if word[:2] == "--"}
    given = {
        field.name: _read(value, hints[field.name], _flag(field.name, hints))
        for title, twin in twins.items()
        for field in dataclasses.fields(twin)
        if (value := getattr(getattr(parsed, title), field.name)) != field.default
        or (hints[field.name] is bool and field.name in switched)
    }
    values: dict[str, object] = {**in_file, **given}
    for name in in_other_units(given, known):
        values.pop(name, None)
    if _is_mode_of_another_metric(in_file, given, known):
        metric, mode = given[METRIC], values.pop(MODE)
        logger.info(
            *("%s %s: the file's %s %s is of another metric and is left out", _dashed(METRIC), metric),
            *(_dashed(MODE), mode),
        )
    if conventions is not None:
        values = conventions.complete(values)
    if given_names is not None:
        given_names.update(values)
    for name, setting in known.items():
        if setting.default is dataclasses.MISSING and name not in values:
            raise ConfigError(f"{_flag(name, hints)} is missing; see `rewardlab {command} --help`.")
    return from_mapping(settings_type, values, where=f"rewardlab {command}" if path is None else f"--config {path}")


def _settings_in(path: Path) -> dict[str, object]:
    """Return `read_settings`. Raises ConfigError for `None` too, which YAML reads as a text, and which a setting such
    as `system_prompt` would take; in JSON it stands in quotes."""
    in_file = read_settings(path)
    for name in (name for name, value in in_file.items() if value == "None" and path.suffix != ".json"):
        raise ConfigError(f"--config {path}: {name}: got the text 'None'. Write null for no value, or leave it out.")
    return in_file


def _require_own(in_file: Mapping[str, object], known: Mapping[str, Setting], where: str) -> None:
    """Raise ConfigError for a file of the settings of `train`, such as a run's config.json, that another command is
    given. Settings that neither has are left to others."""
    foreign = [name for name in in_file if name.replace("-", "_") not in known]
    if not foreign:
        return
    from rewardlab.training.settings.config import RewardTrainerConfig

    if all(name.replace("-", "_") in settings_of(RewardTrainerConfig) for name in foreign):
        raise ConfigError(
            f"{where}: has settings of `rewardlab train` that this command lacks: {listed(foreign, 3)}. "
            f"Give it a file of its own, or flags."
        )


def _is_mode_of_another_metric(
    in_file: Mapping[str, object], given: Mapping[str, object], known: Mapping[str, Setting]
) -> bool:
    """Return whether a flag names another metric than the file's, whose direction the file alone says."""
    if METRIC not in given or MODE in given or in_file.get(MODE, "auto") == "auto":
        return False
    # As in TRL, `loss` is `eval_loss`.
    new, old = (str(name).removeprefix("eval_") for name in (given[METRIC], in_file.get(METRIC, known[METRIC].default)))
    return new != old


@contextmanager
def _width_for_help() -> Iterator[None]:
    """Within the block, make the terminal seem between NARROWEST and WIDEST columns wide.

    tyro hangs when it lays out text in a column or two, which some terminals report.
    """
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST))
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _expand(arguments: Sequence[str]) -> list[str]:
    """Replace the flags in SHORTHANDS by the flags that they stand for."""
    expanded: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        expanded += [*SHORTHANDS[flag], *([value] if equals else [])] if flag in SHORTHANDS else [argument]
    return expanded


def _split_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return (the file named by --config, the other arguments).

    Raises ConfigError if --config names no file or is given more than once.
    """
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
    return (at_home(paths[0]) if paths else None), rest


@cache
def _hints(settings_type: type) -> dict[str, Any]:
    """Return the type of every setting, by its name."""
    return {
        name: get_type_hints(setting.part, include_extras=True)[name]
        for name, setting in settings_of(settings_type).items()
    }


def _asks_for_all(words: Sequence[str]) -> bool:
    """Return whether the words ask for the help, or for a shell's completions, which list every flag."""
    return any(word in ("-h", "--help") or word[:6] == "--tyro" for word in words)


def _named(words: Sequence[str], hints: Mapping[str, Any]) -> set[str]:
    """Return the settings that the words can set: those whose flag is among them, and positional ones.

    tyro takes a millisecond for each flag that it is told of, and of the others a line needs none.
    """
    stems = {word[2:].partition("=")[0].replace("-", "_") for word in words if word[:2] == "--"}
    stems |= {stem.removeprefix("no_") for stem in stems}
    return {name for name, hint in hints.items() if name in stems or tyro.conf.Positional in get_args(hint)}


def _together(settings_type: type, own: str, in_file: Mapping[str, object], names: Collection[str]) -> Any:
    """Return a dataclass for tyro with a field for each section that has one of the settings in `names`: a twin of it
    with those settings, whose fields hold words, not values."""
    titles = get_type_hints(settings_type) | {own: settings_type}
    twins = {
        title: _in_words(title, chosen, _hints(settings_type), in_file)
        for title, settings in sections_of(settings_type, own).items()
        if (chosen := [setting for setting in settings if setting.name in names])
    }
    return dataclasses.make_dataclass(
        "Arguments",
        [
            (title, Annotated[twin, tyro.conf.arg(help=_flowing(titles[title]))], dataclasses.field(default=twin()))
            for title, twin in twins.items()
        ],
        frozen=True,
    )


def _flowing(section: type) -> str:
    """Return what a section is about, from its docstring, as paragraphs without the ends of lines in the source."""
    return "\n\n".join(" ".join(part.split()) for part in (section.__doc__ or "").split("\n\n"))


def sections_of(settings_type: type, command: str) -> dict[str, list[Setting]]:
    """Return the settings of each section, by its title, including those of nested sections.

    Settings outside all sections have the title `command`.
    """
    sections: dict[str, list[Setting]] = {}
    for setting in settings_of(settings_type).values():
        sections.setdefault(setting.path[0] if len(setting.path) > 1 else command, []).append(setting)
    return sections


def _in_words(title: str, settings: Sequence[Setting], hints: Mapping[str, Any], in_file: Mapping[str, object]) -> Any:
    """Return a section as a dataclass for tyro: the same names and help, but fields of words (except switches)."""
    fields: list[tuple[str, Any, Any]] = []
    for setting in settings:
        name = setting.name
        hint, default = hints[name], in_file.get(name, setting.default)
        kind: Any = Words
        metavar: str = _metavar(hint)
        unset: object = ()
        if hint is bool:
            kind, unset = bool, default if isinstance(default, bool) else setting.default
        elif tyro.conf.Positional in get_args(hint):
            kind, metavar = tyro.conf.Positional[tuple[str, ...]], name.upper()
        explained = tyro.conf.arg(
            help=field_texts(setting.part)[name], metavar=metavar, help_behavior_hint=_shown(default)
        )
        fields.append((name, Annotated[kind, explained], dataclasses.field(default=unset)))
    return dataclasses.make_dataclass(title.capitalize(), fields, frozen=True, kw_only=True)


def _metavar(hint: Any) -> str:
    """Return how the help shows the value of a setting of this type."""
    if get_origin(hint) is tuple:
        return f"{_metavar(get_args(hint)[0])} ..."
    if get_origin(hint) is Literal:
        return f"{{{','.join(get_args(hint))}}}"
    if hint is bool:
        return ""
    kind, *words = _kinds(hint)
    if get_origin(kind) is Literal:
        return _metavar(kind)
    return "|".join([str(kind.__name__).upper(), *(word for choice in words for word in get_args(choice))])


def _shown(default: object) -> str:
    """Return how the help shows a default: nothing for None, False, and an empty text or list."""
    if default is dataclasses.MISSING:
        return "(required)"
    if default is None or default is False or default in ("", (), []):
        return ""
    words = default if isinstance(default, (tuple, list)) else [default]
    return f"(default: {visible(' '.join(map(str, words)))})"


def _read(given: Any, hint: Any, flag: str) -> object:
    """Return the value of a flag from the words after it; a flag that takes one value counts as given the last time.

    Raises ConfigError if the value is missing, is one of several, or does not fit the type in `hint`.
    """
    if isinstance(given, bool):
        return given
    # A flag has one tuple of words for each time it is given; a positional argument has a single one.
    times = given if isinstance(given[-1], tuple) else (given,)
    if tyro.conf.Positional in get_args(hint):
        hint = get_args(hint)[0]
    if get_origin(hint) is tuple:
        return tuple(_read_word(word, get_args(hint)[0], flag) for words in times for word in words)
    if not times[-1]:
        raise ConfigError(f"{flag}: the value is missing. Write one that begins with a dash as {flag}=VALUE.")
    if len(times[-1]) > 1:
        raise ConfigError(f"{flag} {short(' '.join(times[-1]))}: takes one value. Put a value with spaces in quotes.")
    (word,) = times[-1]
    if word == "None" and type(None) in get_args(hint):
        return None
    kind, *choices = _kinds(hint)
    words = [choice for literal in choices for choice in get_args(literal)]
    return word if word in words else _read_word(word, kind, flag, words)


def _read_word(word: str, kind: Any, flag: str, or_else: Sequence[str] = ()) -> object:
    """Return a word as a value of this type; `or_else` are other words that the message says are allowed.

    Raises ConfigError if it is not one.
    """
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if word not in choices:
            near = did_you_mean(short(word), choices, also=VALUES_ALSO_CALLED)
            raise ConfigError(f"{flag} {short(word)}: must be one of {', '.join(choices)}.{near}")
        return word
    try:
        value: object = kind(word)
    except ValueError:
        value = math.nan
    if (isinstance(value, float) and not math.isfinite(value)) or (kind is Path and not word):
        raise ConfigError(f"{flag} {short(word) or repr(word)}: must be {' or '.join([WANTED[kind], *or_else])}.")
    if isinstance(value, int) and not fits(value):
        raise ConfigError(f"{flag} {short(word)}: must be a whole number of at most 64 bits.")
    return value


def _kinds(hint: Any) -> list[Any]:
    """Return the types of values in a hint: `int` for `int | None`, `Path` for a positional Path, and both `int` and
    `Literal["auto"]` for a union of the two.
    """
    union = get_origin(hint) in (Union, types.UnionType)
    if not union and tyro.conf.Positional not in get_args(hint):
        return [hint]
    return [kind for kind in get_args(hint) if kind not in (type(None), tyro.conf.Positional)]


def _unknown(argument: str, hints: Mapping[str, Any], command: str) -> ConfigError:
    """Return the error for an argument that belongs to no flag, with the flag that was probably meant."""
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return ConfigError(
            f"unexpected {brief(argument)}: values follow their flag; a switch such as --lora takes no value."
        )
    switches = [f"--no-{name.replace('_', '-')}" for name, hint in hints.items() if hint is bool]
    own = [_flag(name, hints) for name in hints]
    shorthands = [shorthand for shorthand, (ours, *_) in SHORTHANDS.items() if ours in own]
    known = [*own, *switches, *shorthands, "--config", "--help"]
    also = {_dashed(theirs): _dashed(ours) for theirs, ours in ALSO_CALLED.items()}
    name = _dashed(short(flag).removeprefix("--"))
    placed = [words for words in own if not words.startswith("-") and _dashed(words.lower()) in (name, f"{name}s")]
    near = f" {placed[0]} is given without a flag." if placed else did_you_mean(name, known, also=also)
    if not placed and name not in also and _is_of_training(name):
        near = f" It is a setting of training.{near}"
        if "train_config" in hints:
            near = " It is a setting of training runs: give --train, and write it into the file of --train-config."
    return ConfigError(f"unknown flag {brief(flag)}.{near} `rewardlab {command} --help` lists the flags.")


def _is_of_training(flag: str) -> bool:
    from rewardlab.training.settings.config import RewardTrainerConfig

    return flag.removeprefix("--").replace("-", "_") in settings_of(RewardTrainerConfig)


def _flag(name: str, hints: Mapping[str, Any]) -> str:
    """Return how a setting is written on the command line; in capitals if it is positional."""
    return name.upper() if tyro.conf.Positional in get_args(hints[name]) else _dashed(name)


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
