"""Whatever the columns of a format hold, a row becomes a preference or is dropped for a named cause."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewardlab.core.errors import DataError
from rewardlab.data.config import ReadingConfig
from rewardlab.data.formats import described, read_rows, recognise_rows
from rewardlab.data.judgements import Rules
from rewardlab.data.rows import UnusableRowError

GOLDEN = [json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "golden").glob("*.json"))]
HOSTILE = [
    "",
    " ",
    "\0",
    "\ud83d",
    "\n\nHuman: a\n\nAssistant:",
    "<extra_id_1>User\n",
    "<|im_end|>",
    "[1",
    "nan",
    "\x1b[2J",
]
READINGS = [
    {},
    {"strength_as": "weight", "ties": "half", "max_per_post": 1, "min_score_ratio": 1.5},
    {"strength_as": "margin", "max_replies": 2},
]
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-4, 4), st.floats(), st.sampled_from(HOSTILE), st.just(10**400)
)
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.just([{"role": "user", "content": None}]),
    st.dictionaries(st.sampled_from(["content", "text", "full_text", "score"]), scalars, max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path to a value inside rows."""
    inside = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [found for key, held in inside for found in [(*path, key), *places(held, (*path, key))]]


@st.composite
def changed_rows(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The settings of a golden file, some of its rows with up to three values changed, and its first row."""
    golden = draw(st.sampled_from(GOLDEN))
    rows = copy.deepcopy(draw(st.lists(st.sampled_from(golden["rows"]), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([path for path in places(rows) if len(path) > 1]))
        holder: Any = rows
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = copy.deepcopy(draw(values))
    return golden["settings"], rows, golden["rows"][0]


def check(changed: tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]], more: dict[str, Any]) -> None:
    """Read changed rows; what comes of them is a preference that holds together, or words."""
    flags, rows, first = changed
    given_flags = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}
    rules = Rules(source="rows", reading=ReadingConfig(**(more | given_flags)), seed=0)
    schema = recognise_rows(first, "rows.jsonl:1", rules.reading)
    try:
        found = read_rows(
            rows if schema.join else rows[:1], schema=schema, place="rows.jsonl:1", rules=rules
        ).preference
    except (UnusableRowError, DataError):
        return
    assert len(found.replies) >= 2
    assert found.comparisons
    for one in found.comparisons:
        assert one.first != one.second
        assert {one.first, one.second} <= set(range(len(found.replies)))
        assert 0 <= one.label <= 1
        assert one.weight > 0
    assert described(found).replace("\n", "").isprintable()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("more", READINGS, ids=str)
@given(changed=changed_rows())
@settings(max_examples=120, deadline=None)
def test_a_changed_row_is_read_or_dropped_by_name_and_never_fails(changed: Any, more: dict[str, Any]) -> None:
    check(changed, more)


@pytest.mark.soak
@pytest.mark.parametrize("more", READINGS, ids=str)
@given(changed=changed_rows())
@settings(max_examples=20_000, deadline=None)
def test_very_many_changed_rows_are_read_or_dropped(changed: Any, more: dict[str, Any]) -> None:
    check(changed, more)
