"""What is wrong with a body that is not a request: one fault of all that were found, its place and what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from rewardlab.client.protocol import WireGroup, WireMessage
from rewardlab.data.rows import BESIDE_CONTENT
from rewardlab.serve.http.refusals import InvalidError

SAME: Final = (
    ("replies", "reply", "responses", "response", "completions", "completion"),
    ("conversations", "conversation", "messages", "chat"),
    ("input", "inputs", "text", "texts"),
    ("query", "queries"),
    ("prompt", "prompts", "question"),
    ("content", "value", "text"),
    ("role", "from"),
)
"""Names under which different projects send the same thing."""
_MESSAGE: Final = "a message, an object with role and content"
WANTED: Final = {
    "": "a JSON object",
    "prompt": "a text, or a list of messages",
    "prompt.*": _MESSAGE,
    "replies": "a list of texts, also for one",
    "replies.*": "a text; a reply of messages goes into conversations, behind the messages of its prompt",
    "groups": "a list of objects with prompt and replies, also for one",
    "groups.*": "an object with prompt and replies",
    "conversations": "a list of conversations, also for one, each a list of messages",
    "conversations.*": "a list of messages: conversations is a list of such lists, also for one",
    "conversations.*.*": _MESSAGE,
    "token_ids": "a list of lists of token ids, also for one",
    "token_ids.*": "a list of token ids: token_ids is a list of such lists, also for one",
    "messages": "a list of messages",
    "content": "a text; of a content in parts send their texts, joined",
}
"""What stands in a field, or in an element of one, whose type may be mistaken."""
SAID: Final = {"extra_forbidden": "no such field", "too_short": "is empty"}
"""Kind of a fault -> what is said of it; `too_short` is said of lists."""
TYPES: Final = ("string_type", "list_type", "dict_type", "model_type", "model_attributes_type")
"""Faults that are told by what was wanted."""


def refusal_of(kind: type[BaseModel], value: Any, error: ValidationError) -> InvalidError:
    """Return the refusal of a body, which names one fault; where a field may have several types, the deepest one."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    places = [_place_in(value, fault["loc"], missing=fault["type"] == "missing") for fault in faults]
    which = max(range(len(faults)), key=lambda number: (len(places[number]), -number))
    place, fault = places[which], faults[which]
    said = SAID.get(fault["type"]) or fault["msg"].removeprefix("Value error, ")
    if fault["type"] in TYPES and (wanted := WANTED.get(_kind_of(place))):
        said = f"wanted {wanted}"
    hint = ""
    if fault["type"] in ("extra_forbidden", "missing"):
        hint = _meant(place, _fields_at(kind, place), _inside(value, place[:-1]), lacks=fault["type"] == "missing")
    name = ".".join(map(str, place))
    return InvalidError(f"{name or 'the body'}: {said}.{hint}", param=name or None)


def _place_in(value: Any, loc: Sequence[int | str], *, missing: bool) -> list[int | str]:
    """Return a place without the parts that pydantic adds for a type among several; only fields of `value` stay.

    With `missing`, the last part names a field that `value` lacks, which stays too.
    """
    place: list[int | str] = []
    for number, part in enumerate(loc):
        if isinstance(value, dict) and (part in value or (missing and number == len(loc) - 1)):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            value = value[part] if part < len(value) else None
        else:
            continue
        place.append(part)
    return place


def _kind_of(place: Sequence[int | str]) -> str:
    """Return the name of the field at a place; of an element of a field, its name and `.*`, of one of that `.*.*`."""
    end = max((number for number, part in enumerate(place) if isinstance(part, str)), default=0)
    return ".".join(str(part) if isinstance(part, str) else "*" for part in place[end:])


def _fields_at(kind: type[BaseModel], place: Sequence[int | str]) -> Iterable[str]:
    """Return the names of the fields of the object that holds a place."""
    if len(place) == 1:
        return kind.model_fields
    # Bodies have two objects besides themselves: groups, and the messages of everything else.
    return WireGroup.model_fields if place[0] == "groups" and len(place) == 3 else WireMessage.model_fields


def _inside(value: Any, place: Sequence[int | str]) -> Mapping[str, Any]:
    """Return the object at a place."""
    for part in place:
        value = value[part]
    return value if isinstance(value, dict) else {}


def _meant(place: Sequence[int | str], known: Iterable[str], holder: Mapping[str, Any], *, lacks: bool) -> str:
    """Return a hint at the right name of an unknown field, or at the field that was sent for one that is missing."""
    name, fields = str(place[-1]), list(known)
    if not lacks and len(place) > 1 and name in BESIDE_CONTENT:
        return " Only the content of a message is scored: write it there, or leave it out."
    if not lacks:
        free = [field for field in fields if holder.get(field) is None]
        near = [same] if (same := _same(name, free)) else difflib.get_close_matches(name, free, n=1)
        return f" Did you mean {near[0]!r}?" if near else ""
    sent = _same(name, [key for key in holder if key not in fields])
    return f" Write {name!r} where you wrote {sent!r}." if sent else ""


def _same(name: str, names: Sequence[str]) -> str | None:
    """Return the one of `names` under which others send what `name` is, if there is one."""
    groups = [group for group in SAME if name in group]
    return next((other for group in groups for other in group if other in names), None)
