"""Check JSON files against the dataclasses that they become: one check for every file of a model folder.

Nothing is converted and nothing is guessed. A value of another type than its field's, a field that is missing, unknown
or duplicated, NaN, and nesting or size beyond that of any valid file each raise one error. It names the file, the
field, what was found, what was expected and what to do.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rewardlab.core.errors import RewardlabError
from rewardlab.core.files import UTF8
from rewardlab.core.values import did_you_mean

MAX_BYTES: Final = 16 << 20
"""Largest size of a JSON file in bytes. Files of valid folders have some kilobytes."""
MAX_DEPTH: Final = 64
"""Deepest nesting of lists and objects."""
MAX_INTEGER: Final = 2**63 - 1
NAMES: Final = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    tuple: "a list",
    type(None): "null",
}
"""Type -> what its values are called in messages."""
Whole = TypeVar("Whole")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """How to refuse a file: the kind of error, and what to do about it."""

    error: type[RewardlabError]
    remedy: str

    def of(self, message: str) -> RewardlabError:
        """Return the error with this message and the remedy."""
        return self.error(f"{message} {self.remedy}")


class _Mismatch(Exception):
    """A value that does not match: its place in the file, and what is wrong with it."""

    def __init__(self, place: str, wrong: str) -> None:
        super().__init__(place, wrong)
        self.place, self.wrong = place, wrong

    def sentence(self) -> str:
        """Return both as a sentence; one that ends in a question has its mark already."""
        return f"{self.place}{': ' if self.place else ''}{self.wrong}{'' if self.wrong.endswith('?') else '.'}"


def read_object(path: Path, refusal: Refusal) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises the error of `refusal` if the file does not hold an object, or holds what no valid file does: the same name
    twice in an object, NaN or infinity, lone surrogates, more than `MAX_BYTES`, or more than `MAX_DEPTH` levels.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise refusal.of(f"{path}: it has {size} bytes; at most {MAX_BYTES} are read.")
    try:
        value = json.loads(
            path.read_text(encoding=UTF8), object_pairs_hook=_once, parse_constant=_no_number, parse_float=_finite
        )
        if not isinstance(value, dict):
            raise _Mismatch("", f"expected an object, found {shown(value)}")
        _require_plain(value)
    except _Mismatch as wrong:
        raise refusal.of(f"{path}: {wrong.sentence()}") from wrong
    except (ValueError, RecursionError) as error:
        # Also text that is not UTF-8, and numbers of thousands of digits.
        raise refusal.of(f"{path}: not valid JSON ({error}).") from error
    return value


def typed(
    kind: type[Whole], values: Mapping[str, Any], *, where: str, refusal: Refusal, open_ended: bool = False
) -> Whole:
    """Return a JSON object as the dataclass `kind`, whose fields give names and types. Fields with a default
    may be absent.

    With `open_ended`, fields that `kind` does not know are ignored. Values stay as they are, a whole number also
    where the type is float, so that what is written again is what was read.

    Raises the error of `refusal`, naming `where` and the field, for a value that does not match.
    """
    try:
        whole: Whole = _object(kind, values, "", open_ended=open_ended)
    except _Mismatch as wrong:
        raise refusal.of(f"{where}: {wrong.sentence()}") from wrong
    return whole


def shown(value: object) -> str:
    """Return a value as a message shows it: its kind, and its content where that is short."""
    kind = NAMES.get(type(value), type(value).__name__)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        # Printing an integer of thousands of digits takes long, and Python refuses it.
        return "a whole number of more than 64 bits"
    if isinstance(value, str | int | float):
        text = repr(value)
        return f"{kind}, {text if len(text) <= 60 else text[:60] + ' …'}"
    return kind


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict. Raises _Mismatch for a name that appears twice."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise _Mismatch(repr(name[:60]), "appears twice, so readers would differ in the value that they take")
        values[name] = value
    return values


def _no_number(name: str) -> float:
    raise _Mismatch("", f"holds {name}, which JSON does not allow")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Mismatch("", f"holds {text[:60]}, which is too large for a 64-bit float")
    return number


def _require_plain(value: object) -> None:
    """Raise _Mismatch for nesting deeper than `MAX_DEPTH`, and for text that cannot be written as UTF-8."""
    layer: list[object] = [value]
    for _ in range(MAX_DEPTH):
        layer = [inner for outer in layer for inner in _inside(outer)]
        if not layer:
            return
    raise _Mismatch("", f"lists and objects are nested more than {MAX_DEPTH} levels deep")


def _inside(value: object) -> Iterator[object]:
    """Yield the lists and objects directly inside a value. Raises _Mismatch for text that UTF-8 cannot hold."""
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    for item in items:
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                raise _Mismatch(repr(item)[:60], "holds a lone surrogate (half of a character)") from None
        elif isinstance(item, list | dict):
            yield item


def _object(kind: Any, values: object, place: str, *, open_ended: bool = False) -> Any:
    """Return a JSON object at `place` as the dataclass `kind`. Raises _Mismatch if it does not match."""
    if not isinstance(values, Mapping):
        raise _Mismatch(place, f"expected an object, found {shown(values)}")
    hints, fields = _fields(kind)
    if not open_ended and (unknown := [name for name in values if name not in fields]):
        near = did_you_mean(unknown[0], fields) or f" Known are {', '.join(fields)}."
        raise _Mismatch(_inner(place, unknown[0][:60]), f"unknown field.{near}".rstrip("."))
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            arguments[name] = _value(hints[name], values[name], _inner(place, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise _Mismatch(_inner(place, name), f"is missing; expected {_wanted(hints[name])}")
    return kind(**arguments)


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], dict[str, dataclasses.Field[Any]]]:
    """Return a dataclass's types and fields by name. A type is written as text, which takes long to look up."""
    return get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}


def _inner(place: str, name: str) -> str:
    """Return the place of a field inside the object at `place`."""
    return f"{place}.{name}" if place else name


def _value(hint: Any, value: object, place: str) -> Any:
    """Return `value` as the type `hint`: dataclasses from objects, tuples from lists. Raises _Mismatch if it is not."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return value
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in arguments if kind is not type(None)]
        if value is None and len(kinds) < len(arguments):
            return None
        assert len(kinds) == 1, f"{place}: unions of several types are not told apart"
        try:
            return _value(kinds[0], value, place)
        except _Mismatch as wrong:
            if wrong.place == place:
                raise _Mismatch(place, f"expected {_wanted(hint)}, found {shown(value)}") from None
            raise
    if dataclasses.is_dataclass(hint):
        return _object(hint, value, place)
    if origin in (list, tuple, dict):
        return _several(hint, value, place)
    fits = _is_of(hint, value)
    if not fits or (isinstance(value, int) and abs(value) > MAX_INTEGER):
        raise _Mismatch(place, f"expected {_wanted(hint)}, found {shown(value)}")
    return value


def _is_of(hint: Any, value: object) -> bool:
    """Return whether a plain value is of a plain type, or one of the texts that a Literal lists."""
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    # A bool is an int in Python, but not a number in JSON.
    return isinstance(value, float | int if hint is float else hint) and (hint is bool or not isinstance(value, bool))


def _several(hint: Any, value: Any, place: str) -> Any:
    """Return a list, a tuple (of the length that its type names) or a dict, with its items checked."""
    origin, kinds = get_origin(hint), get_args(hint)
    if not isinstance(value, dict if origin is dict else list):
        raise _Mismatch(place, f"expected {_wanted(hint)}, found {shown(value)}")
    if isinstance(value, dict):
        return {name: _value(kinds[1], item, f"{place}.{name[:60]}") for name, item in value.items()}
    if origin is tuple and len(value) != len(kinds):
        raise _Mismatch(place, f"expected {_wanted(hint)}, found a list of {len(value)}")
    if hint == list[int] and set(map(type, value)) == {int} and max(map(abs, value)) <= MAX_INTEGER:
        # The tokens of canaries: hundreds, in every spec. The items of other lists are looked at one by one, so that
        # the message can name the one that does not match.
        return list(value)
    kinds = kinds if origin is tuple else kinds * len(value)
    items = [_value(kind, item, f"{place}[{n}]") for n, (kind, item) in enumerate(zip(kinds, value, strict=True))]
    return tuple(items) if origin is tuple else items


def _wanted(hint: Any) -> str:
    """Return what messages call a type."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_wanted(kind) for kind in arguments)
    if origin is tuple:
        return f"a list of {len(arguments)}: {', '.join(_wanted(kind) for kind in arguments)}"
    return NAMES.get(origin or hint, "an object")
