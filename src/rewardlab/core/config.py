"""Configuration as frozen dataclasses: checked, converted, printed, hashed, documented.

Settings are flat and named as on the command line (dashes or underscores). Which dataclass a setting lives in
says which room uses it; the names never clash, so a file or a saved `config.json` is one flat mapping.
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
from collections.abc import Iterable, Mapping, Sequence
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


def fields_of(config: Any) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a dataclass or of an instance of one, for types that do not say that they are dataclasses."""
    return dataclasses.fields(config)


def hints_of(config_type: Any) -> dict[str, Any]:
    """The annotated type of each field of a dataclass."""
    return _hints_of(config_type)


@cache
def _hints_of(config_type: Any) -> dict[str, Any]:
    return get_type_hints(config_type)


@cache
def field_texts(part: type) -> dict[str, str]:
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
    hints = hints_of(config_type)
    settable = {field.name: hints[field.name] for field in fields_of(config_type) if field.init}
    converted: dict[str, Any] = {}
    for name, value in values.items():
        key = name.replace("-", "_")
        if key not in settable:
            near = did_you_mean(key, settable, also=ALSO_CALLED)
            raise ConfigError(f"{where}: unknown setting {brief(name)}.{near}")
        converted[key] = _convert(value, settable[key], f"{where}: {name}")
    return config_type(**converted)


def did_you_mean(name: str, known: Iterable[str], *, also: Mapping[str, str] = MappingProxyType({})) -> str:
    """` Did you mean 'x'?`, or nothing if no known name is near; `also` has known names by others' names for them."""
    names = list(known)
    nearest = [also[name]] if also.get(name) in names else difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def settings(settings_type: type[Config]) -> type[Config]:
    """Of a dataclass: an unknown keyword is a ConfigError with the nearest name, as it is in a file."""
    build: Any = settings_type.__init__
    known = [field.name for field in fields_of(settings_type) if field.init]

    @wraps(build)
    def build_known(self: Any, *arguments: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                near = did_you_mean(name, known, also=ALSO_CALLED)
                raise ConfigError(f"{type(self).__name__}: unknown setting {name!r}.{near}")
        build(self, *arguments, **values)

    changed: Any = settings_type
    changed.__init__ = build_known
    return settings_type


def to_mapping(config: object) -> dict[str, object]:
    """The flat JSON mapping of a configuration, in the order of its fields."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields_of(config)}


def config_hash(config: object) -> str:
    """Twelve hex digits that change whenever a setting does."""
    return sha256_json(to_mapping(config))[:HASH_DIGITS]


def convert_fields(config: object, *, where: str) -> None:
    """Bring every field of a frozen configuration to its declared type, as a file's values are.

    For configurations built in Python: `dataset="a.jsonl"` becomes `("a.jsonl",)`, a wrong choice is a ConfigError.
    """
    hints = hints_of(type(config))
    for field in fields_of(config):
        value = _convert(getattr(config, field.name), hints[field.name], f"{where}: {field.name}")
        object.__setattr__(config, field.name, value)


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
