"""Configuration as frozen dataclasses: checked, converted, printed, hashed, documented.

A configuration is composed of sections; each section is a dataclass that one package (`data`, `model`, …) reads. Users
see flat settings, named as on the command line with dashes or underscores. No two sections have a setting of the same
name, so a configuration file or a saved `config.json` is one flat mapping.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar, get_type_hints

from rewardlab.core.config_file import read_config_file
from rewardlab.core.earlier_names import renamed
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import sha256_json
from rewardlab.core.other_names import ALSO_CALLED
from rewardlab.core.terminal import brief
from rewardlab.core.values import convert, did_you_mean, fits, require, without_wrapper

Config = TypeVar("Config")
Sections = TypeVar("Sections", bound="Composed")
HASH_DIGITS: Final = 12
"""Length of `config_hash`, in hex digits."""
FEW: Final = 30
"""Most settings that a message about an unknown one lists."""
BY_NAME: Final = MappingProxyType(
    {"attributes": False, "map_label": False, "template_arguments": True, "judge_template_arguments": True}
)
"""Settings whose entries are `NAME=VALUE`, which files also write as a mapping; whether VALUE is JSON."""


def read_settings(path: Path, *, given_by: str = "--config") -> dict[str, object]:
    """Return the settings in a file by the names of fields: dashes become underscores. `given_by` is what messages say
    named the file.

    Raises ConfigError as `read_config_file` does, and for a name that appears in both spellings.
    """
    settings: dict[str, object] = {}
    for name, value in read_config_file(path, given_by=given_by).items():
        if (key := name.replace("-", "_")) in settings:
            raise ConfigError(f"{given_by} {path}: {key} appears twice, with dashes and with underscores. Keep one.")
        settings[key] = value
    return settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a configuration."""

    name: str
    """Its flat name: as on the command line, with underscores."""
    path: tuple[str, ...]
    """The attributes that lead to it: its sections, then its name."""
    part: type
    """The dataclass that it is a field of."""
    hint: Any
    """Its annotated type."""
    default: Any
    """Its default, or `dataclasses.MISSING` where it must be given."""

    def of(self, config: object) -> Any:
        """Return its value in a configuration."""
        for name in self.path:
            config = getattr(config, name)
        return config


def settings_of(config_type: Any) -> Mapping[str, Setting]:
    """Return flat name -> setting, through all sections, in the order in which they are declared."""
    return _settings_of(config_type)


@cache
def _settings_of(config_type: Any) -> Mapping[str, Setting]:
    settings: dict[str, Setting] = {}
    for setting in _walk(config_type, (), None):
        assert setting.name not in settings, f"{setting.name} is a setting of two sections"
        settings[setting.name] = setting
    return MappingProxyType(settings)


@cache
def _hints(part: Any) -> dict[str, Any]:
    return get_type_hints(part)


def _walk(part: Any, path: tuple[str, ...], defaults: object) -> Iterator[Setting]:
    """Yield the settings of a dataclass and its sections.

    `defaults` is the instance that the enclosing dataclass declares as default for this section, None at the top.
    """
    hints = _hints(part)
    for field in dataclasses.fields(part):
        default = field.default if defaults is None else getattr(defaults, field.name)
        where = (*path, field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _walk(hints[field.name], where, default)
        elif field.init:
            yield Setting(name=field.name, path=where, part=part, hint=hints[field.name], default=default)


@cache
def field_texts(part: Any) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, inherited fields included, each on one line.

    These texts are the `--help` texts and the table of docs/settings.md.
    """
    # Python discards strings that follow a field, so they are read from the source.
    inherited = [field_texts(base) for base in part.__bases__ if base is not object]
    (definition,) = ast.parse(inspect.getsource(part)).body
    assert isinstance(definition, ast.ClassDef)
    own = {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    return {name: text for texts in [*inherited, own] for name, text in texts.items()}


def from_mapping(config_type: type[Config], values: Mapping[str, object], *, where: str) -> Config:
    """Build a configuration from a flat mapping. Settings that it does not name keep their defaults.

    `where` names the origin of the mapping in messages. Raises ConfigError for an unknown name (with the nearest known
    one), for a value of the wrong type, and for a value that a section refuses.
    """
    built: Config = _build(config_type, _converted(config_type, values, where), None)
    return built


def _converted(config_type: type, values: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the flat values by the names of fields, each converted to its declared type."""
    known = settings_of(config_type)
    converted: dict[str, object] = {}
    for name, value in renamed(values, known, where)[0].items():
        key = name.replace("-", "_")
        if key not in known:
            near = did_you_mean(key, known, also=ALSO_CALLED) or all_of(known)
            raise ConfigError(f"{where}: unknown setting {brief(name)}.{near}")
        if key in BY_NAME and isinstance(value, Mapping):
            value = [_entry(one, of, is_json=BY_NAME[key]) for one, of in value.items()]
        converted[key] = convert(value, known[key].hint, f"{where}: {name}")
    return converted


def _entry(name: object, value: object, *, is_json: bool) -> str:
    """Return an entry of a mapping as it stands on a command line: `true` for YAML's, a text as it is or as JSON."""
    words = [
        one if isinstance(one, str) and not quoted else json.dumps(without_wrapper(one), default=str)
        for one, quoted in ((name, False), (value, is_json))
    ]
    return "=".join(words)


def all_of(known: Mapping[str, Setting]) -> str:
    """Return where all settings stand, as a sentence: here if they are few."""
    few = (
        f"There are: {', '.join(known)}."
        if len(known) <= FEW
        else "docs/settings.md in rewardlab's repository has all."
    )
    return f" Correct it or take it out. {few}"


def _build(part: Any, values: Mapping[str, object], before: object) -> Any:
    """Build a dataclass with its sections from flat values. Others are taken from `before`, or are the defaults."""
    hints = _hints(part)
    arguments: dict[str, object] = {}
    for field in dataclasses.fields(part):
        if dataclasses.is_dataclass(hints[field.name]):
            section = field.default if before is None else getattr(before, field.name)
            arguments[field.name] = _build(type(section), values, section)
        elif field.init and field.name in values:
            arguments[field.name] = values[field.name]
        elif field.init and before is not None:
            arguments[field.name] = getattr(before, field.name)
    return part(**arguments)


class Composed:
    """Base of configurations: sections, each a frozen dataclass with its own checks, and flat names for settings."""

    @classmethod
    def of(cls: type[Sections], **settings: Any) -> Sections:
        """Return the configuration with these settings, by their flat names (those of the flags, with underscores).

        Values are converted as those of a file are: `dataset="a.jsonl"` becomes `("a.jsonl",)`.
        Raises ConfigError for an unknown name (with the nearest known one) and for a value that is not allowed.
        """
        return from_mapping(cls, settings, where=cls.__name__)

    def replace(self: Sections, **settings: Any) -> Sections:
        """Return a copy with these settings, by their flat names, changed. Raises ConfigError as `of` does."""
        changed: Sections = _build(type(self), _converted(type(self), settings, type(self).__name__), self)
        return changed


def composed(config_type: type[Config]) -> type[Config]:
    """Class decorator for a dataclass of sections.

    Its constructor then raises ConfigError for an argument that is not a section, and says how to pass single settings;
    the signature of its `of` lists all settings with types and defaults.
    """
    build: Any = config_type.__init__
    changed: Any = config_type
    sections = _hints(changed)

    @wraps(build)
    def build_sections(self: Any, **given: Any) -> None:
        for name, value in given.items():
            if name not in sections or type(value) is not sections[name]:
                kind = type(self).__name__
                raise ConfigError(
                    f"{kind}({name}={brief(value)}): the arguments of {kind} are sections. Pass single settings to "
                    f"{kind}.of({name}=…), or to `replace` of a configuration."
                )
        build(self, **given)

    changed.__init__ = build_sections
    make: Any = changed.of.__func__

    @wraps(make)
    def of(cls: Any, **settings: Any) -> Any:
        return make(cls, **settings)

    made: Any = of
    # Without it, notebooks and editors would show and complete only `**settings`.
    made.__signature__ = inspect.Signature(
        [inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)]
        + [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=setting.default, annotation=setting.hint)
            for name, setting in settings_of(config_type).items()
        ]
    )
    changed.of = classmethod(made)
    return config_type


def to_mapping(config: object) -> dict[str, object]:
    """Return the flat JSON mapping of a configuration, in the order of its settings."""
    return {name: _plain(setting.of(config)) for name, setting in settings_of(type(config)).items()}


def config_hash(config: object) -> str:
    """Return twelve hex digits that change whenever a setting does."""
    return sha256_json(to_mapping(config))[:HASH_DIGITS]


def require_between(config: object, **ranges: tuple[float, float]) -> None:
    """Raise ConfigError for a setting outside its range (lowest, highest). None and text values are not checked.

    The upper bounds are far above any useful value. They exist because a larger number would end in an overflow or an
    out-of-memory error that does not name the setting.
    """
    for name, (lowest, highest) in ranges.items():
        value = getattr(config, name)
        if not isinstance(value, (int, float)):
            continue
        flag = f"--{name.replace('_', '-')} {brief(value)}"
        require(value >= lowest, f"{flag}: must be at least {lowest:,}.")
        require(value <= highest, f"{flag}: must be at most {highest:,}.")


def require_seed(seed: int) -> None:
    """Raise ConfigError for a seed that random generators refuse: negative, or of more than 63 bits."""
    require(seed >= 0 and fits(seed), f"--seed {brief(seed)}: must be at least 0 and have at most 63 bits.")


def require_kind(config: object, kind: type) -> None:
    """Raise ConfigError unless a configuration is of this kind, as a dict of settings is not."""
    if not isinstance(config, kind):
        name = kind.__name__
        settings = "**settings" if isinstance(config, Mapping) else "…"
        raise ConfigError(
            f"got {brief(config)}, a {type(config).__name__}; wanted a {name}. Pass {name}.of({settings}), which takes "
            f"settings by the names of their flags, with underscores."
        )


def _plain(value: object) -> object:
    """Return a value as JSON can hold it: paths as text, tuples as lists."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
