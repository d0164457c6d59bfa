"""Values of CSV cells and of Parquet columns, as JSON would hold them."""

from __future__ import annotations

import ast
import importlib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, TypeGuard

from rewardlab.core.errors import DataError
from rewardlab.core.types import Preference
from rewardlab.data.rows import SHAREGPT_ROLES, show

CSV_LISTS: Final = ("responses", "replies", "scores", "ranking")
"""Columns whose cells are JSON lists of any kind."""
SIDES: Final = ("chosen", "rejected")
"""Columns whose cells may be lists of texts beside one of `SUITES`."""
SUITES: Final = frozenset({"subset", "domain"})
"""Columns by which RewardBench and RM-Bench are known, in which each side may be several replies."""
OBJECT_LISTS: Final = (
    *("comparisons", "answers", "completions", "summaries", "individual_preference", "three_most_similar_preferences"),
    *("messages", "conversations", "conversation_a", "conversation_b", "annotations"),
)
"""Columns whose cells are JSON lists of objects of any kind, some of which may be null, and never a text."""
HISTORY: Final = "history"
"""Column whose cells are JSON lists of `[question, answer]`, or a text: in SHP it is the prompt."""
MAX_PYTHON_CHARACTERS: Final = 1_000_000
"""Longest cell that is read as a literal of Python, which takes some hundred bytes of memory a character."""
_ENTRY: Final = r"""['"\[{\d]|-\d|(?:nan|None|True|False)\b|(?:array|list)\("""
"""How an entry of an array begins."""
_OF_NUMPY: Final = re.compile(
    rf"""(?P<text>'(?:[^'\\]|\\.)*+(?:'|\Z)|"(?:[^"\\]|\\.)*+(?:"|\Z))(?P<more>\s++(?={_ENTRY}))?"""
    rf"""|(?P<between>(?<=[}}\])\d.ne])\s++(?={_ENTRY}))|\b(?:array|list)\((?=\[)|(?P<nan>\bnan\b)"""
    r"""|,\s*+dtype=[\w<>']{1,20}+\)|(?<=\])\)|\bnp\.(?:float|int|uint)\d{1,3}+\((?P<number>[^()'"]{1,40}+)\)""",
    re.DOTALL,
)
"""A text of a literal, and what numpy writes differently than Python: nothing but white space between the entries of
an array, an array or a list within an object as a call, and a number too. A space after an `n` or an `e` outside of
texts follows `nan`, `None`, `True` or `False`."""
_LOOKS_LIKE_MESSAGES: Final = re.compile(
    r"""\s*\[\s*\{\s*(?:(['"])(?:content|value)\1:.*?)?(['"])(?:role|from)\2:\s*(['"])(?:user|system|assistant|human|gpt)\3""",
    re.DOTALL,
)
"""Messages that were written as text, by JSON or by Python, though they may hold what neither reads."""


# --- CSV -----------------------------------------------------------------------------------------------------


def lists_in(first: Mapping[str, str | None]) -> Sequence[str]:
    """Return the columns of a table whose cells are lists of any kind, told by its first row: `CSV_LISTS`, and both
    sides where they are lists of texts, as in RewardBench 2 and RM-Bench. Elsewhere such a text is one reply."""
    are_lists = not SUITES.isdisjoint(first) and all(
        are_texts(read_cell(side, first.get(side), SIDES)) for side in SIDES
    )
    return (*CSV_LISTS, *SIDES) if are_lists else CSV_LISTS


def are_texts(value: object) -> TypeGuard[Sequence[str]]:
    """Return whether a value is a list of texts and has one."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(entry, str) for entry in value)


def read_cell(column: str, text: str | None, lists: Sequence[str] = CSV_LISTS) -> object:
    """Return a cell as a list or a mapping if it holds messages, as a list if the column holds lists (it is one of
    `lists`, or one of objects), otherwise as text.

    Both are JSON, or what pandas and numpy write for them. Other cells stay text even if they are JSON, since a reply
    may be `[1]` or `[{"name": "apple"}]`.
    """
    bare = text.strip() if text else ""
    if not (bare.startswith("[") and bare.endswith("]")) and not (bare.startswith("{") and bare.endswith("}")):
        return text
    try:
        value = json.loads(bare)
    except (ValueError, RecursionError):
        is_likely = column in (*lists, *OBJECT_LISTS, HISTORY) or "'role'" in bare or "'from'" in bare
        value = python_literal(bare) if is_likely else None
    if isinstance(value, list) and (
        column in lists or (column in OBJECT_LISTS and _are_objects([one for one in value if one is not None]))
    ):
        return value
    return value if holds_messages(value) or (column == HISTORY and _are_exchanges(value)) else text


def has_json_text(preference: Preference) -> bool:
    """Return whether a turn is a text that would be read as messages in a CSV file, or looks as if it should be."""
    turns = chain(preference.prompt, *preference.replies)
    return any(
        _LOOKS_LIKE_MESSAGES.match(turn.content) or not isinstance(read_cell("", turn.content), str) for turn in turns
    )


def holds_messages(value: object) -> bool:
    """Return whether a value is a list of mappings with a message among them, or a message by itself.

    Of a lone mapping with `from` and `value` the sender must be known: a reply may be `{"from": "EUR", "value": 3}`.
    """
    if isinstance(value, list):
        return _are_objects(value) and any(map(_is_message, value))
    if not isinstance(value, Mapping) or not _is_message(value):
        return False
    sender = value.get("role", value.get("from"))
    return "role" in value or (isinstance(sender, str) and sender in SHAREGPT_ROLES)


def _are_objects(values: list[object]) -> bool:
    return bool(values) and all(isinstance(value, Mapping) for value in values)


def _are_exchanges(value: object) -> bool:
    """Return whether a value is a list of `[question, answer]`, or an empty one."""
    return isinstance(value, list) and all(
        isinstance(entry, list) and len(entry) == 2 and all(isinstance(text, str) for text in entry) for entry in value
    )


def _is_message(value: object) -> bool:
    """Return whether a mapping has the keys of a message; its role may be unknown, which reading says later."""
    if not isinstance(value, Mapping):
        return False
    return ("role" in value and ("content" in value or "tool_calls" in value)) or ("from" in value and "value" in value)


def python_literal(text: str) -> object:
    """Return the list or mapping that Python, pandas or numpy wrote as this text; None if it is none, or too long."""
    if len(text) > MAX_PYTHON_CHARACTERS:
        return None
    value = _literal(text)
    if value is None or _may_be_array(value):
        value = _literal(_OF_NUMPY.sub(_as_python, text))
    # Of more than 1,000 entries numpy writes the first and the last alone.
    return None if isinstance(value, list) and ... in value else value


def _literal(text: str) -> object:
    """Return the value of a literal of Python; None if it is none."""
    try:
        with warnings.catch_warnings():
            # The parser warns of a backslash that stands for itself.
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        # Text that only resembles a literal, or is nested too deep.
        return None


def _may_be_array(value: object) -> bool:
    """Return whether a list may be an array of texts of which Python made one: it joins texts without a comma between
    them. A list with a comma is one that Python wrote, and may have cut long texts itself."""
    while isinstance(value, list) and len(value) == 1:
        (value,) = value
        if isinstance(value, str):
            return True
    return False


def _as_python(found: re.Match[str]) -> str:
    """Return what Python writes in place of something that numpy wrote."""
    if found["text"] is not None:
        return found["text"] + (", " if found["more"] else "")
    if (number := found["number"]) is not None:
        return "None" if number == "nan" else number
    return ", " if found["between"] else "None" if found["nan"] else ""


# --- Parquet -------------------------------------------------------------------------------------------------

Convert = Callable[[Any], Any]


def conversions(schema: Iterable[Any]) -> dict[str, Convert]:
    """Return column -> what makes of its Python values such as JSON has, for the columns of a table that need it."""
    return {field.name: convert for field in schema if (convert := _conversion(field.type)) is not None}


def converted(row: Mapping[str, Any], by: Mapping[str, Convert], place: str) -> dict[str, Any]:
    """Return a row whose maps are mappings and whose decimals are numbers of Python.

    Raises DataError, naming place and column, for a map that has a key twice.
    """
    values = dict(row)
    for name, convert in by.items():
        try:
            values[name] = convert(values[name])
        except _KeyTwiceError as error:
            raise DataError(f"{place}: the map in {name!r} has the key {error} twice. Keep one.") from None
    return values


class _KeyTwiceError(Exception):
    """A map has a key twice. `converted` turns it into a DataError."""


def _conversion(kind: Any) -> Convert | None:
    """Return what makes of a Python value of a type of Arrow such as JSON has; None if it is one."""
    types = importlib.import_module("pyarrow.types")
    if types.is_decimal(kind):
        return partial(_where_any, int if kind.scale <= 0 else float)
    if types.is_map(kind) and any(is_kind(kind.key_type) for is_kind in (types.is_string, types.is_integer)):
        # Other keys have no form in JSON: such a map stays a list of pairs.
        return partial(_where_any, partial(_mapping, _conversion(kind.item_type)))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        entry = _conversion(kind.value_type)
        return None if entry is None else partial(_where_any, partial(_each, entry))
    if types.is_struct(kind) and (fields := conversions(kind)):
        return partial(_where_any, partial(_fields, fields))
    return None


def _where_any(convert: Convert, value: Any) -> Any:
    return None if value is None else convert(value)


def _each(convert: Convert, values: Iterable[Any]) -> list[Any]:
    return [convert(value) for value in values]


def _fields(by: Mapping[str, Convert], held: Mapping[str, Any]) -> dict[str, Any]:
    return {**held, **{name: convert(held[name]) for name, convert in by.items()}}


def _mapping(of_item: Convert | None, pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return pairs as a mapping. Raises _KeyTwiceError if two have the same key."""
    held: dict[Any, Any] = {}
    for key, item in pairs:
        if key in held:
            raise _KeyTwiceError(show(key))
        held[key] = item if of_item is None else of_item(item)
    return held
