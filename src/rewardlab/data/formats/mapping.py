"""Columns under other names, and labels in words: the row as the formats know it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from rewardlab.core.errors import DataError
from rewardlab.core.files import to_float
from rewardlab.core.terminal import short
from rewardlab.data.cells import python_literal
from rewardlab.data.config import ReadingConfig
from rewardlab.data.rows import Row, UnreadRow, UnusableRowError, columns_shown, is_absent, label_word, show

LISTS = ("responses", "scores", "label")
"""Columns whose text may be a list (of labels, also an object) as JSON, as CSV files have it."""

WHOLE = re.compile(r"(-?\d+)\.0+")
"""A whole number as pandas writes it where others in its column are none."""
CHOICE = "selected"
"""Where Label Studio's results of a pairwise choice hold `left` or `right`."""


def mapped(row: Row, reading: ReadingConfig) -> Row:
    """Return a row with its columns named as `--prompt-column` and its like say, and its label as `--map-label` says.

    A column that a flag names takes the place of one that is called so. A label that is a list or a mapping, as several
    annotators give it, is named `labels`.

    Raises UnusableRowError for a label that `--map-label` does not name.
    """
    names, values = reading.own_columns, reading.label_values
    if isinstance(row, UnreadRow) or not (names or values):
        return row
    # A strength may also be what a format is known by, such as HelpSteer2's `preference_strength`: it stays.
    renamed = {own for name, own in names.items() if name != "strength"}
    known = {name: value for name, value in row.items() if name not in names and name not in renamed}
    for name, own in names.items():
        if own in row:
            known[name] = unpacked(row[own]) if name in LISTS else row[own]
    if "label" in names and isinstance(label := known.get("label"), (list, tuple, Mapping)):
        known = {name: value for name, value in known.items() if name != "label"} | {"labels": label}
    return _with_numbers(known, values) if values else known


def require_columns(row: Row, reading: ReadingConfig, place: str) -> None:
    """Raise DataError if the first row of a dataset lacks a column that a flag names, or a label to map."""
    for name, own in reading.own_columns.items():
        if own not in row:
            raise DataError(
                f"{place}: --{name}-column {short(own)}: there is no such column. There are: {columns_shown(row)}."
            )
    if reading.map_label and reading.label_column is None and not {"label", "labels"} & row.keys():
        raise DataError(
            f"{place}: --map-label: there is no column 'label' or 'labels'. Name yours with --label-column; there are: "
            f"{columns_shown(row)}."
        )


def _with_numbers(row: dict[str, object], values: Mapping[str, float]) -> Row:
    name = "label" if "label" in row else "labels"
    label = row.get(name)
    if isinstance(label, Mapping):
        number: object = {who: _number(said, values) for who, said in label.items()}
    elif isinstance(label, (list, tuple)):
        number = [_number(choice_of(said), values) for said in label]
    elif is_absent(label) and "" not in values:
        raise UnusableRowError("missing_field", f"no {name!r}, which --map-label reads")
    else:
        # One label alone is that of the row, whatever its column is called.
        return {**row, "label": _number("" if label is None else label, values)}
    return {**row, name: number}


def _number(value: object, values: Mapping[str, float]) -> float | None:
    """Return the number that stands for a value; None if the annotator gave no label.

    Texts are compared without the white space around them, and without `.0` behind a number, which pandas writes in a
    column of whole numbers with an empty cell; numbers as numbers.
    """
    if value is None:
        return None
    text = str(value).lower() if isinstance(value, bool) else value.strip() if isinstance(value, str) else None
    if text is not None and text in values:
        return values[text]
    if text is None:
        same = [number for name, number in values.items() if to_float(name) == to_float(value)]
        if same:
            return same[0]
    elif (whole := WHOLE.fullmatch(text)) is not None and whole[1] in values:
        return values[whole[1]]
    raise UnusableRowError(
        "unmapped_label",
        f"the label is {show(value)}, and --map-label names {', '.join(values) or 'nothing'}",
        label=label_word(value),
    )


def choice_of(value: object) -> object:
    """Return what Label Studio's result of a pairwise choice says, `left` or `right`; any other value as it is."""
    return value[CHOICE] if isinstance(value, Mapping) and CHOICE in value else value


def unpacked(value: object) -> object:
    """Return the list or object that a text holds as JSON, or as pandas writes it, as cells of CSV files do; any other
    value as it is."""
    if isinstance(value, str) and value.startswith(("[", "{")):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            held = python_literal(value)
            return held if isinstance(held, list | dict) else value
    return value
