"""All formats that are read, and which of them a dataset has."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final

from rewardlab.core.errors import DataError
from rewardlab.core.files import is_number
from rewardlab.core.terminal import brief, quoted
from rewardlab.data.config import ReadingConfig
from rewardlab.data.formats.instructed import ALPACA, OPENAI, SHAREGPT, SWIFT
from rewardlab.data.formats.judged import JUDGED
from rewardlab.data.formats.kwise import (
    CODE_ULTRAFEEDBACK,
    KWISE,
    NECTAR,
    NEMO,
    RATED,
    STACK_EXCHANGE,
    ULTRAFEEDBACK,
    rated_by,
)
from rewardlab.data.formats.lone import UNPAIRED, UNPAIRED_CONVERSATIONS, lone
from rewardlab.data.formats.mapping import mapped, require_columns
from rewardlab.data.formats.places import ASKED, REPLIES, VERDICT, by_name, exported, flags_for, two_replies
from rewardlab.data.formats.plain import LONG_FORM, PAIRS, WHOLE
from rewardlab.data.formats.published import (
    ARENA,
    ARENA_55K,
    REWARDBENCH,
    RM_BENCH,
    SAFE_RLHF,
    SUMMARIES,
    ULTRAFEEDBACK_BINARISED,
    UNIFIED,
    WEBGPT,
)
from rewardlab.data.formats.schema import Schema, resembling
from rewardlab.data.formats.shp import SHP, SHP_BY_POST
from rewardlab.data.formats.voted import HELPSTEER2_PREFERENCE, HELPSTEER3, LABELLED, MULTIPREF
from rewardlab.data.rows import Row, UnusableRowError, columns_shown

MOST_NEAR: Final = 3
"""Formats that a message names for columns that match none."""
AS_WRITTEN: Final = ReadingConfig()
"""Reading without flags."""

SCHEMAS = (
    LONG_FORM,
    KWISE,
    SHP,
    ULTRAFEEDBACK_BINARISED,
    LABELLED,
    REWARDBENCH,
    RM_BENCH,
    PAIRS,
    SHAREGPT,
    ALPACA,
    WHOLE,
    SWIFT,
    OPENAI,
    JUDGED,
    HELPSTEER2_PREFERENCE,
    HELPSTEER3,
    SAFE_RLHF,
    RATED,
    STACK_EXCHANGE,
    NECTAR,
    NEMO,
    ULTRAFEEDBACK,
    CODE_ULTRAFEEDBACK,
    WEBGPT,
    SUMMARIES,
    ARENA,
    ARENA_55K,
    UNIFIED,
    MULTIPREF,
    UNPAIRED,
    UNPAIRED_CONVERSATIONS,
)
"""All schemas, in the order in which they are tried. Schemas whose columns are a subset of another's come later,
and last those that need least."""


SIMPLEST: Final = (PAIRS, KWISE, WHOLE)
"""Formats that are the simplest to write."""
PROMPTS: Final = frozenset({"prompt", "instruction", "question", "context"})
"""Columns that hold the prompt in many formats, so that they do not tell these apart."""
RATINGS: Final = ("rating", "ratings")
"""Columns that look like `ranking` and hold scores: as a ranking they would be read the wrong way round."""
NO_NUMBERS: Final = frozenset({"chosen", "prompt", "rejected", "response", "responses", "scores"})
"""Columns that hold texts or lists: one of which the values are numbers, or true and false, is none of them."""

OTHER_CHOSEN: Final = frozenset({"accepted", "preferred"})
"""What others call `chosen` beside `rejected`."""
SENTENCE: Final = 3
"""Fewest spaces by which the name of a column is told to be the text of a row."""


def recognise(columns: Iterable[str] | Row, place: str, reading: ReadingConfig = AS_WRITTEN) -> Schema:
    """Return the first schema that the columns match, as the flags have it read.

    Given a row instead of its columns, its values count too, where columns alone do not tell formats apart.

    Raises DataError, naming the columns found and the nearest formats with what they lack, if there is none.
    """
    names = [name for name in columns if isinstance(name, str)]
    for schema in SCHEMAS:
        known = _as_read(schema, reading)
        if known.fits(names) and (known.suits is None or not isinstance(columns, Mapping) or known.suits(columns)):
            return known
    row = columns if isinstance(columns, Mapping) else {}
    near = _near(names, row)
    found = columns_shown(names) or "(none)"
    hint = _hint(row, names, near, reading)
    raise DataError(
        f"{place}: the columns {found} match no known schema of preferences.{hint} The nearest formats: "
        f"{nearest(names, near.values())}. Rename the columns, or name yours with --prompt-column, --chosen-column and "
        f"--rejected-column (and --label-column, where one says which of the two is preferred), --response-column, or "
        f"--responses-column and --scores-column. docs/formats.md in rewardlab's repository has all formats."
    )


def _near(names: Sequence[str], row: Row) -> dict[str, str]:
    """Return column -> the column of a format that it is probably meant to be, for those that look misspelt."""
    near = {name: meant for name in names if (meant := meant_column(name, names))}
    near = {name: meant for name, meant in near.items() if not (meant in NO_NUMBERS and _is_number(row.get(name)))}
    # Two columns that resemble the same one say nothing.
    near = {name: meant for name, meant in near.items() if list(near.values()).count(meant) == 1}
    # Two replies that resemble those of some format are not misspelt. That they stand beside each other tells more than
    # that another column resembles one, unless that one is all that a format lacks.
    if (sides := two_replies(row)) and not any(schema.fits([*names, *near.values()]) for schema in SCHEMAS):
        return {}
    return {} if set(near) <= set(sides or ()) else near


def _hint(row: Row, names: Sequence[str], near: Mapping[str, str], reading: ReadingConfig) -> str:
    """Return what to do with columns that match no format, as a sentence after a space; nothing if that is unknown."""
    if told := exported(row) or by_name(names):
        return f" {told}"
    if rated := _rating(row, reading.attribute_weights):
        named = "" if "response" in row else " --response-column completion"
        # A rank is better the smaller it is.
        said, weight = ("rank", -1.0) if "rank" in rated.casefold() else ("rating", 1.0)
        weight = reading.attribute_weights.get(rated, weight)
        flag = quoted(f"{rated}={weight:g}")
        return f" If each row is one reply with a {said} in {brief(rated)}, give --attributes {flag}{named}."
    if inside := _inside(row):
        return f" The columns of {inside[1]} are inside {brief(inside[0])}: make what is in it the rows."
    if near:
        return f" Perhaps {', '.join(f'{name!r} as {meant!r}' for name, meant in near.items())} is meant."
    if flags := flags_for(row, _prompt_misspelt(row)):
        verdicts = [name for name in names if VERDICT.fullmatch(name)]
        column = quoted(verdicts[0]) if len(verdicts) == 1 else "COLUMN"
        label = "" if "label" in row else f" --label-column {column}"
        return f" If these are two replies and a verdict on them, give {flags}{label} --map-label FIRST=1 SECOND=0."
    # Of names of columns none is a sentence: then it is the first row that was read as the header.
    if any(name.count(" ") >= SENTENCE for name in names):
        return " Is the first line a row? A table begins with a line of the names of its columns."
    return ""


def _prompt_misspelt(row: Row) -> str | None:
    """Return the only column of one word with a text or messages that looks like one of the prompt; None if there is
    no such one, or several. `question_type` is more than a misspelt `question`."""
    held = [name for name, value in row.items() if isinstance(name, str) and isinstance(value, str | list)]
    near = [name for name in held if name.strip().isalpha() and meant_column(name, row) in ("prompt", *ASKED)]
    return near[0] if len(near) == 1 else None


def _is_number(value: object) -> bool:
    return isinstance(value, bool) or is_number(value)


def _inside(row: Row) -> tuple[str, str] | None:
    """Return (a column that holds the columns of a format, the format), as where a file wraps its rows into an object;
    None if there is none."""
    for name, value in row.items():
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, Mapping) and (fitting := next((one for one in SCHEMAS if one.fits(first)), None)):
            return name, fitting.name
    return None


def _rating(row: Row, asked: Collection[str]) -> str | None:
    """Return the only column with a number, true or false in a row that has a prompt and one reply, or the only one of
    them that is asked for; None for any other row."""
    if "prompt" not in row or {"response", "completion"}.isdisjoint(row):
        return None
    rated = [name for name, value in row.items() if _is_number(value)]
    rated = [name for name in rated if name in asked] or rated
    return str(rated[0]) if len(rated) == 1 else None


def recognise_rows(row: Row, place: str, reading: ReadingConfig) -> Schema:
    """Return the schema of a dataset from its first row as it stands, with the columns by which it was recognised.

    Raises DataError as `recognise` does, and if the row lacks a column that a flag names.
    """
    require_columns(row, reading, place)
    try:
        known = mapped(row, reading)
    except UnusableRowError:
        # The first row may be one that is dropped, but it has the same columns as the others.
        known = mapped(row, replace(reading, map_label=()))
    schema = recognise(known, place, reading)
    own = reading.own_columns
    said = [f"{name} ({own[name]})" if name in own else name for name in schema.needed]
    said += [f"{name} ({own[name]})" if name in own else name for name in schema.one_of if name in known]
    said += [f"{name} ({column})" for name, column in own.items() if name not in (*schema.needed, *schema.one_of)]
    return replace(schema, found=", ".join(said))


def schema_named(name: str, reading: ReadingConfig) -> Schema:
    """Return the schema of this name, as the flags have it read."""
    return next(known for schema in SCHEMAS if (known := _as_read(schema, reading)).name == name)


def unit_of(label: str) -> str:
    """Return what is counted of data in a format, by its name or `label`: rows, or what several rows make together."""
    known = (SHP_BY_POST, *SCHEMAS)  # the longer name first
    return next((one.unit for one in known if label == one.name or label.startswith(f"{one.name}, ")), "row")


def _as_read(schema: Schema, reading: ReadingConfig) -> Schema:
    if schema is SHP and reading.shp == "kwise":
        return SHP_BY_POST
    if schema in (UNPAIRED, UNPAIRED_CONVERSATIONS):
        return lone(schema, reading)
    return rated_by(reading) if schema is RATED else schema


def nearest(columns: Collection[str], likely: Collection[str] = ()) -> str:
    """Return the formats that lack the fewest columns, and which, in words. One that is `likely` meant counts half."""
    lacking = []
    found = {*columns, *likely} - PROMPTS
    for schema in SCHEMAS:
        if schema not in SIMPLEST and found.isdisjoint((*schema.needed, *schema.one_of)):
            continue  # only its prompt is there, as in most formats: that it lacks little else makes it no nearer
        missing = schema.lacks(columns)
        if not missing:
            continue  # its columns are there, and hold something else
        misspelt = len(missing) - len(schema.lacks([*columns, *likely])) if likely else 0
        # Of formats that lack equally many columns, the one of which more columns are present is nearer.
        lacking.append((len(missing) - misspelt / 2, len(missing) - len(schema.needed), schema.name, missing))
    lacking.sort(key=itemgetter(0, 1))
    near = [schema for schema in SCHEMAS if any(schema.name == name for _, _, name, _ in lacking)]
    if not likely and all(2 * len(schema.lacks(columns)) > len(schema.lacks(())) for schema in near):
        # No format has even half of its columns: name those that are the simplest to write.
        lacking = [(0.0, 0, schema.name, schema.lacks(columns)) for schema in SIMPLEST]
    return "; ".join(f"{name} lacks {' and '.join(missing)}" for _, _, name, missing in lacking[:MOST_NEAR])


def meant_column(name: str, present: Collection[str]) -> str | None:
    """Return the column of a schema that a name resembles, misspelt or as `chosen_response`; None if there is none.

    A name that is known resembles no other. Columns that are present are not suggested.
    """
    if name == "context_messages":  # the prompts of OpenRLHF's datasets
        return None if "prompt" in present else "prompt"
    if name.strip().casefold() in RATINGS:
        return None if "scores" in present else "scores"
    words = set(re.split(r"[^a-z]+", name.casefold()))
    known = dict.fromkeys(column for schema in SCHEMAS for column in (*schema.needed, *schema.one_of))
    if "chosen" not in present and "rejected" in present and name.casefold() in OTHER_CHOSEN:
        return "chosen"
    for side in ("chosen", "rejected"):
        if name != side and side not in present and side in words and words <= {side, *REPLIES}:
            return side
    return resembling(name, known, present)
