"""Values of settings: converted to the types of their fields, and what messages say of those that cannot be."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from rewardlab.core.errors import ConfigError
from rewardlab.core.files import at_home
from rewardlab.core.other_names import REMARKS, SETTLED, VALUES_ALSO_CALLED
from rewardlab.core.terminal import brief, short

MISSPELT: Final = 0.85
"""How similar (difflib's ratio) a known name is at least, for a name to be taken for that one and misspelt."""
SHORTEST: Final = 3
"""Letters that an abbreviation has at least."""
HALVES: Final = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Lone surrogates, which UTF-8 cannot encode, except those that Python uses for the bytes of a file name that is not
UTF-8 (PEP 383)."""


class Section:
    """Base of dataclasses of settings: what a field is given is converted to its type, as values of a file are.

    So `dataset="a.jsonl"` becomes `("a.jsonl",)`, and a text a path. It happens before the checks of `__post_init__`,
    which may rely on the types. Raises ConfigError, naming the class and the setting, for a value of another type.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        made: Any = cls
        if (check := cls.__dict__.get("__post_init__")) is not None:
            made.__post_init__ = _after_conversion(check)

    def __post_init__(self) -> None:
        _convert_fields(self)


def _after_conversion(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return checks of a section that follow the conversion of its values."""

    @wraps(check)
    def convert_and_check(self: Any) -> None:
        _convert_fields(self)
        check(self)

    return convert_and_check


def _convert_fields(section: Any) -> None:
    kind: Any = type(section)
    for name, hint in _fields(kind):
        value = getattr(section, name)
        converted = convert(value, hint, f"{kind.__name__}: {name}")
        if converted is not value:
            object.__setattr__(section, name, converted)


@cache
def _fields(section: Any) -> list[tuple[str, Any]]:
    """Return name and type of each field of a dataclass that its constructor takes and `convert` can convert."""
    hints = get_type_hints(section)
    own = [(field.name, hints[field.name]) for field in dataclasses.fields(section) if field.init]
    return [(name, hint) for name, hint in own if _is_plain(hint)]


def _is_plain(hint: Any) -> bool:
    """Return whether a type is one that settings in files have; functions and sections are not."""
    if get_origin(hint) in (Union, types.UnionType, tuple):
        return all(kind in (type(None), ...) or _is_plain(kind) for kind in get_args(hint))
    return get_origin(hint) is Literal or hint in (str, int, float, bool, Path)


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def fits(number: int) -> bool:
    """Return whether a whole number fits into 64 bits, as counters, indices and random generators require."""
    return -(1 << 63) <= number < 1 << 63


def did_you_mean(name: str, known: Iterable[str], *, also: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return ` Did you mean 'x'?`, or an empty text if no known name is similar.

    `also` maps names that other libraries use to known names. One that differs in capitals alone is taken first. Next
    best to a name that is spelt nearly the same is the only one that has all words of the given one: `--patience` is
    `--early-stopping-patience`, and not `--ties`. An abbreviation is found if one name alone begins so. For a name that
    has no setting here, what holds is said.
    """
    if settled := SETTLED.get(name.removeprefix("--").replace("-", "_")):
        return f" {settled}"
    names = list(known)
    if also.get(name) in names:
        remark = REMARKS.get(name.removeprefix("--").replace("-", "_"))
        return f" Did you mean {also[name]!r}?{f' {remark}' if remark else ''}"
    # The dashes of flags do not count: they would make any two short ones similar.
    own, shown = name.removeprefix("--"), {each.removeprefix("--"): each for each in names}
    if same := [each for each in shown if each.casefold() == own.casefold()]:
        return f" Did you mean {shown[same[0]]!r}?"
    nearest = difflib.get_close_matches(own, shown, n=1)
    longer = [each for each in shown if _words(own) < _words(each)]
    is_sure = any(each.startswith(own) for each in nearest) or difflib.get_close_matches(own, nearest, cutoff=MISSPELT)
    if len(longer) == 1 and not is_sure:
        nearest = longer
    begun = [each for each in shown if len(own) >= SHORTEST and re.match(f"{re.escape(own)}[^-_]", each)]
    if len(begun) == 1 and not nearest:
        nearest = begun
    return f" Did you mean {shown[nearest[0]]!r}?" if nearest else ""


def _words(name: str) -> set[str]:
    return set(re.findall("[^-_]+", name.casefold()))


def convert(value: object, hint: Any, where: str) -> object:
    """Return `value` as the annotated type. Raises ConfigError, beginning with `where`, if it is not of that type.

    Texts are not taken for whole numbers ('16' is an error). For floats they are, since YAML 1.1 reads 5e-6 as text.
    Paths are texts, and numbers of numpy are Python's: Python code has both.
    """
    value, origin, arguments = without_wrapper(value), get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        kinds = [argument for argument in arguments if argument is not type(None)]
        if len(kinds) == 1:
            return convert(value, kinds[0], where)
        for kind in kinds:
            with contextlib.suppress(ConfigError):
                return convert(value, kind, where)
        wanted = " or ".join(
            " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else kind.__name__ for kind in kinds
        )
        raise ConfigError(f"{where}: expected {wanted}, got {brief(value)}.{_how_to_write(value, kinds)}")
    if origin is Literal:
        return _convert_choice(value, arguments, where)
    if origin is tuple:
        # A single value stands for a list of one, so that `dataset: a.jsonl` needs no brackets.
        items = value if isinstance(value, (list, tuple)) else [value]
        require("" not in items, f"{where}: a name is empty. Leave it out.")
        return tuple(convert(item, arguments[0], where) for item in items)
    if (plain := _convert_plain(value, hint)) is None:
        wanted = getattr(hint, "__name__", hint)
        raise ConfigError(f"{where}: expected {wanted}, got {brief(value)}.{_how_to_write(value, [hint])}")
    _require_usable(plain, where)
    return plain


def path_of(value: object, name: str) -> Path:
    """Return an argument as a path. Raises ConfigError, naming the argument, for what is none."""
    return Path(str(convert(value, Path, name)))


def one_of(value: object, choices: Iterable[str], name: str) -> str:
    """Return an argument that is one of several words. Raises ConfigError, naming the argument, if it is none."""
    return _convert_choice(without_wrapper(value), tuple(choices), name)


def truth_of(value: object, name: str) -> bool:
    """Return an argument that is true or false. Raises ConfigError, naming the argument, for anything else.

    Python takes the text "false", and any other that is not empty, for true.
    """
    return bool(convert(value, bool, name))


def _how_to_write(value: object, kinds: Sequence[Any]) -> str:
    """Return how a value of another type is written as one of `kinds`, as a sentence; an empty text if that is clear.

    YAML reads `no`, `off`, `yes` and `on` as truth values, what stands in quotes as text, and an empty value as null.
    """
    if value is None:
        return " Give it a value, or take it out."
    if isinstance(value, bool) and str in kinds:
        return " Put a word such as no, off, yes or on in quotes."
    text = value.strip().casefold() if isinstance(value, str) else ""
    if bool in kinds and text in {"true", "false", "yes", "no", "on", "off"}:
        return f" Write {str(text in {'true', 'yes', 'on'}).lower()}, without quotes."
    return f" Write {text}, without quotes." if int in kinds and text.isdecimal() else ""


def without_wrapper(value: object) -> object:
    """Return a path as text and a number of numpy as Python's; anything else as it is."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    numpy = sys.modules.get("numpy")  # where it was never imported there are none of its numbers
    return value.item() if numpy and isinstance(value, numpy.generic) else value


def _require_usable(value: object, where: str) -> None:
    """Raise ConfigError for a text that cannot be a file name, and for a number of more than 64 bits."""
    if isinstance(value, (str, Path)) and "\0" in str(value):
        raise ConfigError(f"{where}: {brief(value)} has a null character, which file names cannot hold.")
    if isinstance(value, (str, Path)) and HALVES.search(str(value)):
        raise ConfigError(f"{where}: {brief(value)} has a lone surrogate (half a character), which UTF-8 cannot hold.")
    if isinstance(value, int) and not fits(value):
        raise ConfigError(f"{where}: {brief(value)} has more than 64 bits.")


def _convert_choice(value: object, choices: Sequence[str], where: str) -> str:
    """Return `value` if it is one of the choices. Raises ConfigError, with the nearest choice, if not."""
    if isinstance(value, str) and value in choices:
        return value
    named = str(value) if isinstance(value, (str, type(None))) else ""
    nearest = did_you_mean(short(named), choices, also=VALUES_ALSO_CALLED) if named else ""
    raise ConfigError(f"{where}: {brief(value)} is not one of {', '.join(map(repr, choices))}.{nearest}")


def _convert_plain(value: Any, hint: Any) -> object | None:
    """Return `value` as a path, number, boolean or text; None if it is not of that type."""
    if hint is Path:
        return at_home(value) if isinstance(value, (str, Path)) and value != "" else None
    # In Python True is an int, so `lr: true` would otherwise be read as 1.
    if isinstance(value, bool) and hint is not bool:
        return None
    if hint is float:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return None
        return number if math.isfinite(number) else None
    return value if isinstance(value, hint) else None
