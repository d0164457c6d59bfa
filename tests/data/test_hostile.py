"""Hostile rows and names: every reader gives an account of every row, or refuses in words; nothing else."""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loading import ALLOW_DROPS, load, pair
from rewardlab.core.errors import DataError, RewardlabError
from rewardlab.core.files import to_json

EXAMPLES, MANY = (
    settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck)) for number in (40, 5000)
)
"""Files of each format: a sample, and what `scripts/test --soak` tries."""


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def long_form(role: str, **raw: str) -> str:
    """A row as text, values as they are to stand in the file."""
    columns = {"pair_id": "1", "role": f'"{role}"', "prompt": '"Why?"', "response": f'"{role}"'} | raw
    return "{" + ", ".join(f'"{name}": {value}' for name, value in columns.items()) + "}\n"


@pytest.mark.parametrize("depth", [400, 600, 900])
def test_long_form_rows_may_be_nested_where_no_layout_looks(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(long_form("chosen", more=nested(depth)) + long_form("rejected"))
    assert load(path).reports[0].kept == 1
    deep = [long_form(role, pair_id="2", prompt=nested(depth)) for role in ("chosen", "rejected")]
    path.write_text(long_form("chosen") + long_form("rejected") + "".join(deep))
    assert dict(load(path, **ALLOW_DROPS).reports[0].dropped) == {"bad_roles": 1}
    path.write_text("".join(long_form(role, pair_id=nested(depth)) for role in ("chosen", "rejected")))
    assert load(path).reports[0].rows_read == 1


def test_a_pair_of_very_many_rows_is_told_in_few_words(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(long_form("chosen") * 5000 + long_form("chosen", pair_id="2") + long_form("rejected", pair_id="2"))
    (report,) = load(path, **ALLOW_DROPS).reports
    assert report.examples["incomplete_pair"] == ("a.jsonl:1: pair 1 has 5000 rows, wanted one of each side",)


@pytest.mark.parametrize("kind", ["timestamp", "date32", "nested"])
def test_dates_that_python_lacks_are_no_reason_to_refuse_a_file(tmp_path: Path, kind: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    late = arrow.array([10**15], type=arrow.timestamp("ms"))
    times = {
        "timestamp": late,
        "date32": arrow.array([2**31 - 2], type=arrow.date32()),
        "nested": arrow.StructArray.from_arrays([late], names=["when"]),
    }
    columns = {name: [value] for name, value in pair(0).items()} | {"when": times[kind]}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    if kind == "nested":
        with pytest.raises(DataError, match=r"a.parquet: cannot be read as Parquet after row 0"):
            load(tmp_path / "a.parquet")
    else:
        assert load(tmp_path / "a.parquet").reports[0].kept == 1


def test_a_name_that_is_not_utf8_is_refused_as_it_can_be_shown(tmp_path: Path) -> None:
    path = Path(os.fsdecode(bytes(tmp_path) + b"/f\xff.jsonl"))
    path.write_text(json.dumps(pair(0)))
    with pytest.raises(DataError, match=r"f\\xff.jsonl: its name is not UTF-8. Rename the file") as caught:
        load(path)
    str(caught.value).encode()
    with pytest.raises(DataError, match="a file name cannot have a null character"):
        load("a\0b.jsonl")


@pytest.mark.parametrize("line", ['{"prompt": "a", "prompt": "b"}', '{"prompt": [{"role": "user", "role": "user"}]}'])
def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(pair(0)) + "\n" + line + "\n")
    with pytest.raises(
        DataError, match=r"a.jsonl:2: cannot be read \(the key '(prompt|role)' appears twice in one object"
    ):
        load(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text(f"[{line}]")
    with pytest.raises(DataError, match="line 1: the key .* appears twice"):
        load(tmp_path / "a.json")


# --- any rows at all ------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(
    [
        "",
        " ",
        "a",
        "\0",
        "\ud800",
        "é",
        "\n\nHuman: a\n\nAssistant: b",
        "Human:\n\nAssistant:",
        '"',
        "a,b;c\td",
        "[1]",
        "[" * 99,
    ]
) | st.text(max_size=5)
NUMBERS = st.sampled_from([0, 1, 0.5, -1, 10**400, 1e308, float("nan"), float("inf"), True, None]) | st.integers()
TURNS = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "assistant", "system", "robot", 7]), "content": TEXTS | NUMBERS,
                  "from": TEXTS, "value": TEXTS, "tool_calls": st.just([1])}
)  # fmt: skip
VALUES = st.recursive(TEXTS | NUMBERS | TURNS, lambda inner: st.lists(inner, max_size=3), max_leaves=6)
GOOD: dict[str, dict[str, Any]] = {
    "pairs": pair(0),
    "kwise": {"prompt": "q", "responses": ["a", "b"], "scores": [1, 0]},
    "shp": {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 1, "score_ratio": 2.0},
    "whole": {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
    "long": {"pair_id": 1, "role": "chosen", "prompt": "q", "response": "a"},
}
MORE = ("label", "strength", "ranking", "messages", "text", "more")
FORMATS = ("jsonl", "jsonl.gz", "json", "csv", "parquet")


@st.composite
def changed_rows(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]]]:
    """A schema, and rows of it with any columns left out or of other values."""
    schema = draw(st.sampled_from(sorted(GOOD)))
    rows = []
    for _ in range(draw(st.integers(0, 5))):
        names = draw(st.lists(st.sampled_from([*GOOD[schema], *MORE]), max_size=3))
        row = {**GOOD[schema], **{name: draw(VALUES) for name in names}}
        for name in draw(st.lists(st.sampled_from(sorted(row)), max_size=1)):
            del row[name]
        rows.append(row)
    return schema, rows


def written(path: Path, rows: list[dict[str, Any]]) -> Path | None:
    """The rows in a file; None where the format cannot hold them."""
    if path.name.endswith(".parquet"):
        arrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
        try:
            table = arrow.Table.from_pylist(rows)
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        except (arrow.ArrowException, OverflowError, UnicodeEncodeError):
            return None
        return path
    try:
        if path.suffix == ".csv":
            names = list(dict.fromkeys(name for row in rows for name in row))
            cells = [
                [row.get(n) if isinstance(row.get(n), str) else json.dumps(row.get(n)) for n in names] for row in rows
            ]
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([names, *cells])
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            text = "".join(json.dumps(row) + "\n" for row in rows).encode()
            path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    except (UnicodeEncodeError, csv.Error):
        return None
    return path


FIGURES: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _figures() -> Iterator[None]:
    yield
    sys.stdout.write(f"\nfuzz: {', '.join(f'{count} {what}' for what, count in FIGURES.items())}\n")


def account(path: Path) -> int | None:
    """Rows read of a file, all of them kept or dropped; None if it is refused in words."""
    FIGURES["files"] += 1
    try:
        (report,) = load(path, **ALLOW_DROPS).reports
    except RewardlabError as refused:
        str(refused).encode("utf-8", "surrogatepass")
        FIGURES["files refused"] += 1
        return None
    to_json(report.as_dict()).encode()
    FIGURES["rows kept"] += report.kept
    FIGURES["rows dropped"] += sum(report.dropped.values())
    assert report.kept + sum(report.dropped.values()) == report.rows_read
    return report.rows_read


def pairs_in(rows: list[dict[str, Any]]) -> int:
    """Groups of long-form rows: those without a pair_id are groups of their own."""
    keys = [str(row.get("pair_id")) if row.get("pair_id") not in (None, "") else None for row in rows]
    return len({key for key in keys if key is not None}) + keys.count(None)


def require_every_row(folder: Path, ending: str, schema: str, rows: list[dict[str, Any]]) -> None:
    """A good row and these: each is kept or dropped, or the file is refused in words."""
    path = written(folder / f"a.{ending}", [GOOD[schema], *rows])
    if path is None:
        return
    found = account(path)
    if found is not None and schema != "long":
        assert found == 1 + len(rows)
    if found is not None and schema == "long" and ending in ("jsonl", "jsonl.gz", "json"):
        assert found == pairs_in([GOOD[schema], *rows])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ending", FORMATS)
@EXAMPLES
@given(changed=changed_rows())
def test_no_row_is_lost_and_no_reader_breaks(tmp_path_factory: pytest.TempPathFactory, ending: str, changed) -> None:
    require_every_row(tmp_path_factory.mktemp("rows"), ending, *changed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ending", FORMATS)
@MANY
@given(changed=changed_rows())
def test_no_row_of_very_many_is_lost(tmp_path_factory: pytest.TempPathFactory, ending: str, changed) -> None:
    require_every_row(tmp_path_factory.mktemp("rows"), ending, *changed)


CHANGES = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=6)


def require_damage_is_told(folder: Path, ending: str, changes: list[tuple[int, int]], *, cut: bool) -> None:
    """A file with other bytes at some places, perhaps cut off, is read or refused in words."""
    path = written(folder / f"a.{ending}", [pair(n) for n in range(6)])
    assert path is not None
    content = bytearray(path.read_bytes())
    for place, value in changes:
        content[place % len(content)] = value
    path.write_bytes(bytes(content[: changes[0][0] % len(content)]) if cut else bytes(content))
    account(path)


@pytest.mark.parametrize("ending", FORMATS)
@EXAMPLES
@given(changes=CHANGES, cut=st.booleans())
def test_changed_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, ending, changes, cut) -> None:
    require_damage_is_told(tmp_path_factory.mktemp("rows"), ending, changes, cut=cut)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ending", FORMATS)
@MANY
@given(changes=CHANGES, cut=st.booleans())
def test_very_many_changed_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, ending, changes, cut
) -> None:
    require_damage_is_told(tmp_path_factory.mktemp("rows"), ending, changes, cut=cut)
