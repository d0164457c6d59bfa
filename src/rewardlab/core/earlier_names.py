"""Settings that had another name: values that were written under it are still read as the setting of today."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import brief


@dataclass(frozen=True, kw_only=True)
class Renamed:
    """A renamed setting."""

    name: str
    """Its name today, with underscores."""
    values: Mapping[str, str]
    """Earlier value -> the same value today."""


EARLIER_NAMES: Final[Mapping[str, Renamed]] = MappingProxyType(
    {"overlong": Renamed(name="truncation", values={"truncate": "prompt-left", "drop": "drop"})}
)
"""Earlier name -> the setting today. It is used only if a configuration has today's name and not the earlier one, since
`rewardlab score --overlong` is another setting."""


def renamed(values: Mapping[str, object], known: Collection[str], where: str) -> tuple[dict[str, object], list[str]]:
    """Return (settings by today's names, a line for each one that was given by its earlier name).

    `known` are the names that a configuration has; `where` begins the lines and the messages. Raises ConfigError for a
    value that the setting never had, and for a setting that is given under both names.
    """
    settings, lines = dict(values), []
    for earlier, today in _of(known).items():
        if earlier not in settings:
            continue
        if today.name in settings:
            raise ConfigError(f"{where}: {earlier} is the earlier name of {today.name}. Give the latter alone.")
        value = settings.pop(earlier)
        if not isinstance(value, str) or value not in today.values:
            raise ConfigError(f"{where}: {earlier}: {_expected(brief(value), earlier, today)}")
        settings[today.name] = today.values[value]
        lines.append(f"{where}: {earlier}: {value} is read as {today.name}: {today.values[value]}, its name today")
    return settings, lines


def renamed_flags(arguments: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Return (arguments with flags by today's names, a line for each one that was given by its earlier name).

    Raises ConfigError as `renamed` does.
    """
    of_flag = {_flag(earlier): today for earlier, today in _of(known).items()}
    named, lines = list[str](), list[str]()
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if flag not in of_flag:
            named.append(argument)
            continue
        today = of_flag[flag]
        if any(other.partition("=")[0] == _flag(today.name) for other in arguments):
            raise ConfigError(f"{flag} is the earlier name of {_flag(today.name)}. Give the latter alone.")
        given = value if equals else next(remaining, "")
        if given not in today.values:
            raise ConfigError(f"{flag} {_expected(brief(given), flag, today, of=_flag(today.name))}")
        named += [_flag(today.name), today.values[given]]
        lines.append(f"{flag} {given} is read as {_flag(today.name)} {today.values[given]}, its name today")
    return named, lines


def _of(known: Collection[str]) -> dict[str, Renamed]:
    return {earlier: today for earlier, today in EARLIER_NAMES.items() if today.name in known and earlier not in known}


def _expected(value: str, earlier: str, today: Renamed, of: str | None = None) -> str:
    choices = ", ".join(today.values)
    return f"{value} is not one of {choices}. {earlier} is the earlier name of {of or today.name}, which has more."


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
