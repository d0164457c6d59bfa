"""Laws of CSV cells and Parquet columns: messages and lists are found as such, and every other cell stays its text."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from pprint import pformat

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loading import contents, load
from rewardlab.core.errors import DataError
from rewardlab.data.cells import MAX_PYTHON_CHARACTERS, read_cell
from rewardlab.data.readers import read_each_row
from rewardlab.data.rows import Row

HI = [{"role": "user", "content": "hi"}]
TURNS = [*HI, {"role": "assistant", "content": "it's {\n} a 'reply'"}, {"role": "user", "content": None}]
SHARED = {"from": "gpt", "value": "good"}
SAID = {"role": "assistant", "content": "} {'a' 'b'"}
PAIR_OF_TEXTS = np.array(["h", "it's"], dtype=object)
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


class TestCells:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            (json.dumps(HI), HI),
            (f"  {json.dumps(HI, indent=1)}\n", HI),
            (json.dumps([SHARED]), [SHARED]),
            (json.dumps(SHARED), SHARED),
            (json.dumps(HI[0]), HI[0]),
            (json.dumps([{"role": "assistant", "tool_calls": []}]), [{"role": "assistant", "tool_calls": []}]),
            (str(TURNS), TURNS),
            (str(SHARED), SHARED),
            (str(np.array(TURNS, dtype=object)), TURNS),
            # Of short messages numpy writes several on a line, and parts of a content as a call.
            (str(np.array([*HI, SAID], dtype=object)), [*HI, SAID]),
            (str(np.array([{**SAID, "content": np.array(PARTS, dtype=object)}])), [{**SAID, "content": PARTS}]),
            # Python joins a long text of which a printer wrote several.
            (pformat([{**SAID, "content": "a 'long' text " * 20}]), [{**SAID, "content": "a 'long' text " * 20}]),
        ],
    )
    def test_messages_are_found_in_any_column(self, text: str, value: object) -> None:
        assert read_cell("anything", text) == value

    @pytest.mark.parametrize(
        "text",
        [
            *("", "[]", "{}", "[1]", "[x]", "[", '["a"]', " [1] ", '{"a": 1}', '{"from": "EUR", "value": "3"}'),
            *('[{"name": "apple"}]', '[{"role": "chef"}]', '[{"role": "user", "content": "hi"}, 1]', "[" * 9000 + "]"),
            *(
                "['a', 'b']",
                "[{'name': 'role'}]",
                "{'role': 1}",
                "[{'role': open('x')}]",
                "[{'role': 'a', 'content': b}]",
            ),
        ],
    )
    def test_all_else_stays_the_text_that_it_is(self, text: str) -> None:
        assert read_cell("chosen", text) == text

    @pytest.mark.parametrize("column", ["comparisons", "answers", "individual_preference", "messages"])
    def test_a_column_of_objects_is_a_list_whatever_they_are(self, column: str) -> None:
        assert read_cell(column, '[{"name": "apple"}]') == [{"name": "apple"}]
        assert read_cell(column, "[1]") == "[1]"

    @pytest.mark.parametrize(
        ("column", "text", "value"),
        [
            ("responses", "['a', \"it's\"]", ["a", "it's"]),
            ("responses", str(np.array(["a", "it's", "c"], dtype=object)), ["a", "it's", "c"]),
            ("scores", str(np.array([1.5, -2.0, 3.0])), [1.5, -2.0, 3.0]),
            ("scores", "[1.0, nan]", [1.0, None]),
            ("ranking", str(np.array([10, 2])), [10, 2]),
            ("individual_preference", "[{'score': -1}\n {'score': nan}]", [{"score": -1}, {"score": None}]),
            ("scores", str(np.array([1, np.nan, 2])), [1, None, 2]),
            ("scores", str([np.float64(1.5), np.float64("nan")]), [1.5, None]),
            ("responses", str(np.array(["a", None, "b", "c"], dtype=object)), ["a", None, "b", "c"]),
            ("responses", pformat(["a b " * 40, "c"]), ["a b " * 40, "c"]),
            ("responses", str(np.array([["a"], ["b", "c"]], dtype=object)), [["a"], ["b", "c"]]),
            ("individual_preference", "[None {'score': array([1, 2])}]", [None, {"score": [1, 2]}]),
            ("annotations", str(np.array([{"model": "a"}, {"model": "b"}])), [{"model": "a"}, {"model": "b"}]),
            ("history", str(np.array([PAIR_OF_TEXTS, PAIR_OF_TEXTS, None], dtype=object)[:2]), [["h", "it's"]] * 2),
            # numpy leaves out what is in the middle of a long array
            ("scores", str(np.arange(2000)), str(np.arange(2000))),
        ],
    )
    def test_lists_are_read_as_pandas_and_numpy_write_them(self, column: str, text: str, value: object) -> None:
        assert read_cell(column, text) == value

    @pytest.mark.parametrize("column", ["responses", "scores", "ranking"])
    def test_a_column_of_lists_is_a_list_with_white_space_around_it(self, column: str) -> None:
        assert read_cell(column, " [1, 2]\n") == [1, 2]

    @pytest.mark.parametrize("text", ['[["Hi", "It is."]]', "[['Hi', 'It is.']]"])
    def test_a_history_of_exchanges_is_a_list_and_one_that_is_a_prompt_a_text(self, text: str) -> None:
        assert read_cell("history", text) == [["Hi", "It is."]]
        assert read_cell("history", "[]") == []
        assert read_cell("chosen", text) == text
        for prompt in (
            "[1]",
            "[array(['Hi'])]",
            '["Hi", "It is."]',
            '[["Hi"]]',
            "[[1, 2]]",
            "[[Hi, there]]",
            "[[solved]] why?",
        ):
            assert read_cell("history", prompt) == prompt

    @pytest.mark.parametrize("middle", ["1+", "-", "[", "not ", "a.", "1 if 1 else ", "lambda:", r"'\d'"])
    def test_a_hostile_literal_is_text_and_says_nothing(self, middle: str) -> None:
        text = "[{'role': 'user', 'content': " + middle * 20_000 + "}]"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = read_cell("prompt", text)
        assert found == ([{"role": "user", "content": "\\d" * 20_000}] if "d'" in middle else text)

    def test_quotes_that_nothing_closes_take_no_time_beyond_their_number(self) -> None:
        text = "[{'role': 'user', 'content': " + "\\'" * 400_000 + "}]"
        assert read_cell("prompt", text) == text

    def test_a_literal_that_is_too_long_is_text(self) -> None:
        text = str([{"role": "user", "content": "x" * MAX_PYTHON_CHARACTERS}])
        assert read_cell("prompt", text) == text

    def test_rows_of_pandas_and_replies_in_json_are_read_as_they_are_meant(self, tmp_path: Path) -> None:
        with (tmp_path / "f.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["prompt", "chosen", "rejected"])
            rows.writerow([HI, [{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]])
            rows.writerow(["List fruit", '[{"name": "apple"}]', '[{"name": "car"}]'])
        assert contents(load(tmp_path / "f.csv")) == [
            ("hi", "a", "b"),
            ("List fruit", '[{"name": "apple"}]', '[{"name": "car"}]'),
        ]

    @pytest.mark.parametrize("named", ["subset", "domain"])
    @pytest.mark.parametrize(
        "written",
        [json.dumps, str, lambda texts: str(np.array(texts, dtype=object))],
        ids=["json", "python", "numpy"],
    )
    def test_lists_of_replies_beside_a_suite_are_read_as_in_json(
        self, tmp_path: Path, named: str, written: Callable[[list[str]], str]
    ) -> None:
        sides = {"chosen": ["It's light.", "Light,\nalways."], "rejected": ["No.", 'A "lamp".']}
        rows = [{"prompt": "Why?", **sides, named: "chat"}, {"prompt": "How?", **sides, named: "chat"}]
        with (tmp_path / "f.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows({**row, **{name: written(row[name]) for name in sides}} for row in rows)
        (tmp_path / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        by_json, by_csv = (load(tmp_path / name).preferences for name in ("f.jsonl", "f.csv"))
        assert [len(one.comparisons) for one in by_csv] == [4, 4]
        assert [(one.replies, one.comparisons) for one in by_csv] == [(one.replies, one.comparisons) for one in by_json]

    def test_a_list_of_texts_is_one_reply_where_the_first_row_has_none(self, tmp_path: Path) -> None:
        with (tmp_path / "f.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["prompt", "chosen", "rejected", "subset"])
            rows.writerow(["Name two fruits.", '["apple", "pear"]', "No.", "chat"])
            rows.writerow(["Name two cars.", '["a", "b"]', '["c", "d"]', "chat"])
        assert contents(load(tmp_path / "f.csv")) == [
            ("Name two fruits.", '["apple", "pear"]', "No."),
            ("Name two cars.", '["a", "b"]', '["c", "d"]'),
        ]


def rows_with(path: Path, values: pa.Array) -> list[Row]:
    """Rows of a Parquet file of pairs with a column `labels`, which a file of rows to be scored gives alike."""
    sides = {name: [name] * len(values) for name in ("prompt", "chosen", "rejected")}
    pq.write_table(pa.table(sides | {"labels": values}), path)
    return [row for _, row in read_each_row(path) if isinstance(row, dict)]


NAMED = pa.map_(pa.string(), pa.decimal128(5, 2))


class TestParquet:
    def test_maps_are_mappings_and_decimals_numbers_at_any_depth(self, tmp_path: Path) -> None:
        kind = pa.struct({"x": pa.list_(NAMED), "n": pa.decimal128(20, 0), "t": pa.string()})
        held = {"x": [[("ann", Decimal("0.25")), ("bob", None)], None], "n": Decimal(2**60), "t": "text"}
        rows = rows_with(tmp_path / "p.parquet", pa.array([held, None], type=kind))
        assert [row["labels"] for row in rows] == [
            {"x": [{"ann": 0.25, "bob": None}, None], "n": 2**60, "t": "text"},
            None,
        ]

    def test_a_map_of_annotators_is_read_as_their_labels(self, tmp_path: Path) -> None:
        rows_with(tmp_path / "p.parquet", pa.array([[("ann", Decimal(0)), ("bob", Decimal(1))]], type=NAMED))
        (found,) = load(tmp_path / "p.parquet").preferences
        assert [(one.annotator, one.first) for one in found.comparisons] == [("ann", 1), ("bob", 0)]

    def test_a_key_twice_is_an_error_with_file_row_and_column(self, tmp_path: Path) -> None:
        values = pa.array([[("ann", Decimal(0))], [("ann", Decimal(0)), ("ann", Decimal(1))]], type=NAMED)
        with pytest.raises(DataError, match=r"p\.parquet:2: the map in 'labels' has the key \"ann\" twice"):
            rows_with(tmp_path / "p.parquet", values)

    def test_a_map_whose_keys_json_cannot_hold_stays_pairs(self, tmp_path: Path) -> None:
        kind = pa.map_(pa.struct({"x": pa.int64()}), pa.int64())
        (row,) = rows_with(tmp_path / "p.parquet", pa.array([[({"x": 1}, 2)]], type=kind))
        assert row["labels"] == [({"x": 1}, 2)]
