"""Configuration as frozen dataclasses: checked, converted, printed, hashed, documented.

A configuration is composed of sections, each a dataclass that one room reads. For people settings are flat and named as
on the command line (dashes or underscores): names never clash, so a file or a saved `config.json` is one flat mapping.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rewardlab.core.config_file import read_config_file
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import sha256_json
from rewardlab.core.other_names import ALSO_CALLED
from rewardlab.core.terminal import brief, short

Config = TypeVar("Config")
Sections = TypeVar("Sections", bound="Composed")
HASH_DIGITS: Final = 12
"""Hex digits by which a configuration is known."""
HALVES: Final = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Halves of characters, but for those by which Python names the bytes of a file name that is not UTF-8."""


def read_settings(path: Path) -> dict[str, object]:
    """`read_config_file` by the names of fields: dashes become underscores.

    Raises ConfigError also for a name that is there in both spellings.
    """
    settings: dict[str, object] = {}
    for name, value in read_config_file(path).items():
        if (key := name.replace("-", "_")) in settings:
            raise ConfigError(f"--config {path}: {key} is there twice, with dashes and with underscores.")
        settings[key] = value
    return settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a configuration."""

    name: str
    """Flat: as on the command line, with underscores."""
    path: tuple[str, ...]
    """Attributes that lead to it: its sections, then its name."""
    part: type
    """The dataclass that it is a field of."""
    hint: Any
    """Its annotated type."""
    default: Any
    """`dataclasses.MISSING` where it must be given."""

    def of(self, config: object) -> Any:
        """Its value in a configuration."""
        for name in self.path:
            config = getattr(config, name)
        return config


def settings_of(config_type: Any) -> Mapping[str, Setting]:
    """Flat name -> setting, through all sections, in the order in which they are declared."""
    return _settings_of(config_type)


@cache
def _settings_of(config_type: Any) -> Mapping[str, Setting]:
    found: dict[str, Setting] = {}
    for setting in _walk(config_type, (), None):
        assert setting.name not in found, f"{setting.name} is a setting of two sections"
        found[setting.name] = setting
    return MappingProxyType(found)


@cache
def _hints(part: Any) -> dict[str, Any]:
    return get_type_hints(part)


def _walk(part: Any, path: tuple[str, ...], defaults: object) -> Iterator[Setting]:
    """The settings of a dataclass and its sections; `defaults` is the instance that stands as default, if any."""
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
    """The text under each field of a dataclass, those it inherits included, on one line."""
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
    """Build a configuration from a flat mapping; what it does not name keeps its default.

    Raises ConfigError for an unknown name (with the nearest known one) and for a value of the wrong type.
    """
    built: Config = _build(config_type, _converted(config_type, values, where), None)
    return built


def _converted(config_type: type, values: Mapping[str, object], where: str) -> dict[str, object]:
    """Flat values by the names of fields, each as its declared type."""
    known = settings_of(config_type)
    converted: dict[str, object] = {}
    for name, value in values.items():
        key = name.replace("-", "_")
        if key not in known:
            near = did_you_mean(key, known, also=ALSO_CALLED)
            raise ConfigError(f"{where}: unknown setting {brief(name)}.{near}")
        converted[key] = _convert(value, known[key].hint, f"{where}: {name}")
    return converted


def _build(part: Any, values: Mapping[str, object], before: object) -> Any:
    """A dataclass with its sections, from flat values over an instance of it (`before`) or its defaults."""
    hints = _hints(part)
    found: dict[str, object] = {}
    for field in dataclasses.fields(part):
        if dataclasses.is_dataclass(hints[field.name]):
            section = field.default if before is None else getattr(before, field.name)
            found[field.name] = _build(type(section), values, section)
        elif field.init and field.name in values:
            found[field.name] = values[field.name]
        elif field.init and before is not None:
            found[field.name] = getattr(before, field.name)
    return part(**found)


class Composed:
    """A configuration in sections, each a frozen dataclass with its own checks. Settings have flat names for people."""

    @classmethod
    def of(cls: type[Sections], **settings: Any) -> Sections:
        """The configuration with these settings by their flat names, as flags have them with dashes.

        Values are converted as those of a file are: `dataset="a.jsonl"` becomes `("a.jsonl",)`.
        Raises ConfigError for an unknown name (with the nearest known one) and for a value that cannot be.
        """
        return from_mapping(cls, settings, where=cls.__name__)

    def replace(self: Sections, **settings: Any) -> Sections:
        """The same configuration but for these settings by their flat names. Raises ConfigError as `of` does."""
        changed: Sections = _build(type(self), _converted(type(self), settings, type(self).__name__), self)
        return changed


def did_you_mean(name: str, known: Iterable[str], *, also: Mapping[str, str] = MappingProxyType({})) -> str:
    """` Did you mean 'x'?`, or nothing if no known name is near; `also` has known names by others' names for them."""
    names = list(known)
    nearest = [also[name]] if also.get(name) in names else difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def composed(config_type: type[Config]) -> type[Config]:
    """Of a dataclass of sections: what is not a section is a ConfigError that says where settings go."""
    build: Any = config_type.__init__
    changed: Any = config_type
    sections = _hints(changed)

    @wraps(build)
    def build_sections(self: Any, **given: Any) -> None:
        for name, value in given.items():
            if name not in sections or not isinstance(value, sections[name]):
                kind = type(self).__name__
                raise ConfigError(
                    f"{kind}({name}={brief(value)}): takes sections. Settings by their names go to "
                    f"{kind}.of({name}=…), or to `replace` of a configuration."
                )
        build(self, **given)

    changed.__init__ = build_sections
    make: Any = changed.of.__func__

    @wraps(make)
    def of(cls: Any, **settings: Any) -> Any:
        return make(cls, **settings)

    made: Any = of
    made.__signature__ = inspect.Signature(  # what a notebook shows and completes
        [inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)]
        + [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=setting.default, annotation=setting.hint)
            for name, setting in settings_of(config_type).items()
        ]
    )
    changed.of = classmethod(made)
    return config_type


def to_mapping(config: object) -> dict[str, object]:
    """The flat JSON mapping of a configuration, in the order of its settings."""
    return {name: _plain(setting.of(config)) for name, setting in settings_of(type(config)).items()}


def config_hash(config: object) -> str:
    """Twelve hex digits that change whenever a setting does."""
    return sha256_json(to_mapping(config))[:HASH_DIGITS]


def fits(number: int) -> bool:
    """Whether a whole number is one of 64 bits, which is what counters, indices and generators take."""
    return -(1 << 63) <= number < 1 << 63


def require_between(config: object, **ranges: tuple[float, float]) -> None:
    """Raise ConfigError for a setting outside its range (lowest, highest); what is not set, or a word, has none.

    The highest is far above what anyone asks for: beyond it memory or a clock would end, and not in words.
    """
    for name, (lowest, highest) in ranges.items():
        value = getattr(config, name)
        if not isinstance(value, (int, float)):
            continue
        flag = f"--{name.replace('_', '-')} {brief(value)}"
        require(value >= lowest, f"{flag}: must be at least {lowest:,}.")
        require(value <= highest, f"{flag}: must be at most {highest:,}.")


def require_seed(seed: int) -> None:
    """Raise ConfigError for what generators of random numbers do not start from."""
    require(seed >= 0 and fits(seed), f"--seed {brief(seed)}: must be at least 0 and have at most 63 bits.")


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _convert(value: object, hint: Any, where: str) -> object:
    """`value` as the annotated type, without guessing: '16' is no number, but 5e-6 read as text by YAML is."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        kinds = [argument for argument in arguments if argument is not type(None)]
        if len(kinds) == 1:
            return _convert(value, kinds[0], where)
        for kind in kinds:
            with contextlib.suppress(ConfigError):
                return _convert(value, kind, where)
        wanted = " or ".join(
            " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else kind.__name__ for kind in kinds
        )
        raise ConfigError(f"{where}: expected {wanted}, got {brief(value)}.")
    if origin is Literal:
        return _convert_choice(value, arguments, where)
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        require("" not in items, f"{where}: a name is empty. Leave it out.")
        return tuple(_convert(item, arguments[0], where) for item in items)
    if (plain := _convert_plain(value, hint)) is None:
        raise ConfigError(f"{where}: expected {getattr(hint, '__name__', hint)}, got {brief(value)}.")
    _require_usable(plain, where)
    return plain


def _require_usable(value: object, where: str) -> None:
    """Raise ConfigError for what no file, name or counter can be."""
    if isinstance(value, (str, Path)) and "\0" in str(value):
        raise ConfigError(f"{where}: {brief(value)} has a null character, which no file and no name may have.")
    if isinstance(value, (str, Path)) and HALVES.search(str(value)):
        raise ConfigError(f"{where}: {brief(value)} has half a character, which no file and no name may have.")
    if isinstance(value, int) and not fits(value):
        raise ConfigError(f"{where}: {brief(value)} has more than 64 bits.")


def _convert_choice(value: object, choices: Sequence[str], where: str) -> str:
    """One of several words, or ConfigError with the nearest."""
    if isinstance(value, str) and value in choices:
        return value
    nearest = did_you_mean(short(value), choices) if isinstance(value, str) else ""
    raise ConfigError(f"{where}: {brief(value)} is not one of {', '.join(map(repr, choices))}.{nearest}")


def _convert_plain(value: Any, hint: Any) -> object | None:
    """A path, number, switch or text; None if the value is none of the kind."""
    if hint is Path:
        return Path(value) if isinstance(value, (str, Path)) and value != "" else None
    if isinstance(value, bool) and hint is not bool:
        return None
    if hint is float:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return None
        return number if math.isfinite(number) else None
    return value if isinstance(value, hint) else None
