"""Laws of reading files: every format gives the same rows, and what cannot be read is named with its place."""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from loading import ALLOW_DROPS, THREE, THREE_CONTENTS, contents, ids, load, pair, write
from rewardlab.core.errors import DataError
from rewardlab.data.finding import find_sources
from rewardlab.data.readers import READERS, has_lines, read_each_row, read_source
from rewardlab.evaluation.table_rows import read_rows
from rewardlab.gold.checking.reading import read_pairs
from rewardlab.gold.files.prompts import read_prompts


def columns_of(count: int) -> dict[str, list[list[dict[str, str]]]]:
    """Two sides of conversations."""
    return {
        side: [
            [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"{side} {n}"}]
            for n in range(count)
        ]
        for side in ("chosen", "rejected")
    }


class TestFiles:
    def test_jsonl_ids_are_file_and_line_and_empty_lines_do_not_count(self, tmp_path: Path) -> None:
        path = tmp_path / "pairs.jsonl"
        path.write_text(f"{json.dumps(pair(0))}\n\n{json.dumps(pair(1))}\n")
        loaded = load(path)
        assert ids(loaded.preferences) == ["pairs.jsonl:1", "pairs.jsonl:3"]
        assert {row.source for row in loaded.preferences} == {"pairs"}

    def test_every_format_of_file_gives_the_same_rows(self, tmp_path: Path) -> None:
        write(tmp_path / "a.jsonl", THREE)
        write(tmp_path / "b.jsonl.gz", THREE)
        (tmp_path / "c.json").write_text(json.dumps(THREE))
        (tmp_path / "d.json").write_text(json.dumps({name: [row[name] for row in THREE] for name in THREE[0]}))
        with (tmp_path / "e.csv").open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, list(THREE[0]))
            writer.writeheader()
            writer.writerows(THREE)
        with (tmp_path / "f.tsv").open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(THREE[0]), delimiter="\t")
            table.writeheader()
            table.writerows(THREE)
        (tmp_path / "g.ndjson").write_bytes((tmp_path / "a.jsonl").read_bytes())
        for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.json", "e.csv", "f.tsv", "g.ndjson"):
            assert contents(load(tmp_path / name)) == THREE_CONTENTS, name

    def test_parquet_gives_the_same_rows(self, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow")
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in THREE]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
        loaded = load(tmp_path / "p.parquet")
        assert contents(loaded) == THREE_CONTENTS
        assert ids(loaded.preferences) == ["p.parquet:1", "p.parquet:2", "p.parquet:3"]

    def test_broken_parquet_is_an_error_with_the_file(self, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow")
        (tmp_path / "p.parquet").write_bytes(b"PAR1 no table")
        with pytest.raises(DataError, match=r"p\.parquet: cannot be read as Parquet"):
            load(tmp_path / "p.parquet")

    def test_parquet_without_pyarrow_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        (tmp_path / "p.parquet").write_bytes(b"")
        with pytest.raises(DataError, match=r'needs the package pyarrow.*pip install "rewardlab\[hub\]"'):
            load(tmp_path / "p.parquet")

    def test_a_broken_json_line_is_an_error_with_file_and_line(self, tmp_path: Path) -> None:
        path = tmp_path / "pairs.jsonl"
        path.write_text(json.dumps(pair(0)) + '\n{"prompt": "Why?", "chos\n')
        with pytest.raises(DataError, match=r"pairs\.jsonl:2: not valid JSON"):
            load(path, **ALLOW_DROPS)

    @pytest.mark.parametrize("before", ["", "\ufeff", "\n \n"])
    def test_json_lines_named_json_are_read_as_lines(self, tmp_path: Path, before: str) -> None:
        path = tmp_path / "pairs.json"
        path.write_text(before + "\n\n".join(json.dumps(row) for row in THREE), encoding="utf-8")
        (source,) = find_sources([str(path)], "train")
        first = 1 + before.count("\n")
        assert has_lines(source)
        assert contents(load(path)) == THREE_CONTENTS
        assert ids(load(path).preferences) == [f"pairs.json:{first + 2 * number}" for number in range(3)]
        assert [number for number, _ in read_each_row(path)] == [first, first + 2, first + 4]

    def test_tools_that_read_other_layouts_of_json_read_lines_too(self, tmp_path: Path) -> None:
        path = write(tmp_path / "pairs.json", THREE)
        assert [row["chosen"] for _, row in read_rows(path)] == ["good 0", "good 1", "good 2"]
        assert [found.chosen for found in read_pairs(path)] == ["good 0", "good 1", "good 2"]
        asked = write(tmp_path / "prompts.json", [{"prompt": row["prompt"]} for row in THREE])
        assert [found.prompt[0].content for found in read_prompts(str(asked))] == [row["prompt"] for row in THREE]

    def test_a_damaged_line_of_a_json_file_is_an_error_with_its_line(self, tmp_path: Path) -> None:
        path = tmp_path / "pairs.json"
        path.write_text(f"{json.dumps(pair(0))}\nnull\n")
        with pytest.raises(DataError, match=r"pairs\.json:2: expected a JSON object, got NoneType"):
            load(path, **ALLOW_DROPS)
        path.write_text(f'{{"prompt": "Why?", "chos\n{json.dumps(pair(0))}\n')
        with pytest.raises(DataError, match=r"pairs\.json: not valid JSON .* or an object a line"):
            load(path, **ALLOW_DROPS)

    @pytest.mark.parametrize("note", ['{"x": 1}\n]', '{"x": {}\n}]', '{"x": 1}\n, "y"]', '"z"]\n'])
    def test_one_json_value_over_several_lines_is_not_taken_for_lines(self, tmp_path: Path, note: str) -> None:
        path, count = tmp_path / "pairs.json", 1 + note.count(",")
        columns = {name: [value] * count for name, value in (("prompt", "Why?"), ("chosen", "a"), ("rejected", "b"))}
        path.write_text(f'{{"note": [{note}, {json.dumps(columns)[1:]}')
        assert contents(load(path)) == [("Why?", "a", "b")] * count

    @pytest.mark.parametrize("indent", [None, 2])
    @pytest.mark.parametrize(
        "row",
        [
            pair(0),
            {"prompt": [{"role": "user", "content": "Why?"}], "chosen": "a", "rejected": "b", "tags": ["x"]},
            {"prompt": [{"from": "human", "value": "Why?"}], "responses": ["a", "b"], "scores": [1, 2]},
            {"prompt": "Why?", "responses": ["a", "b"], "scores": [1, 2]},
            {side: columns[0] for side, columns in columns_of(1).items()},
            {"prompt": "Why?", **{side: columns[0][1:] for side, columns in columns_of(1).items()}},
        ],
    )
    def test_one_object_may_be_one_row(self, tmp_path: Path, row: dict[str, object], indent: int | None) -> None:
        (tmp_path / "f.json").write_text(json.dumps(row, indent=indent))
        (tmp_path / "f.jsonl").write_text(json.dumps(row))
        (one,), (line,) = load(tmp_path / "f.json").preferences, load(tmp_path / "f.jsonl").preferences
        assert (one.prompt, one.replies, one.comparisons) == (line.prompt, line.replies, line.comparisons)
        assert one.id == "f.json:1"

    @pytest.mark.parametrize("sides", [columns_of(1), {"chosen": ["a"], "rejected": ["b"], "prompt": ["Why?"]}])
    def test_columns_of_one_row_stay_columns(self, tmp_path: Path, sides: dict[str, list[str]]) -> None:
        (tmp_path / "f.json").write_text(json.dumps(sides))
        (row,) = (row for _, row in read_each_row(tmp_path / "f.json"))
        assert row == {name: values[0] for name, values in sides.items()}

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (
                {"name": "x", "prompt": ["a"], "chosen": ["b"], "rejected": ["c"]},
                r"got name \(not a list\), prompt \(1",
            ),
            ({"prompt": ["a"], "chosen": ["b", "c"]}, r"equal length; got prompt \(1\), chosen \(2\)"),
            (
                {"prompt": {"0": "a"}, "chosen": {"0": "b"}, "rejected": {"0": "c"}},
                r'got prompt \(not a list\).* pandas writes rows by to_json\(…, orient="records", lines=True\)\.',
            ),
            ({"version": 1, "rows": []}, r"got version \(not a list\), rows \(0\)"),
            ("text", "got a JSON str"),
            ([pair(0), 5], r"f\.json:2: row 2 is int"),
        ],
    )
    def test_json_that_is_no_table_is_an_error(self, tmp_path: Path, value: object, message: str) -> None:
        (tmp_path / "f.json").write_text(json.dumps(value))
        with pytest.raises(DataError, match=message):
            load(tmp_path / "f.json", **ALLOW_DROPS)

    def test_csv_cells_may_hold_line_breaks_and_ids_name_the_first_line(self, tmp_path: Path) -> None:
        path = tmp_path / "f.csv"
        path.write_text('prompt,chosen,rejected,label\n"Why,\nthough?",a,b,\nHow?,c,d,0.25\n')
        loaded = load(path)
        assert contents(loaded) == [("Why,\nthough?", "a", "b"), ("How?", "c", "d")]
        assert ids(loaded.preferences) == ["f.csv:2", "f.csv:4"]
        assert [row.comparisons[0].label for row in loaded.preferences] == [1.0, 0.25]

    def test_csv_cells_may_hold_lists_but_a_reply_in_brackets_is_text(self, tmp_path: Path) -> None:
        path = tmp_path / "k.csv"
        path.write_text('prompt,responses,scores\nWhy?,"[""a"", ""b""]","[1, 2]"\n')
        assert load(path).preferences[0].ranking == (1, 0)
        path = tmp_path / "f.csv"
        path.write_text('prompt,chosen,rejected\n"[{""role"": ""user"", ""content"": ""Why?""}]",[1],[x]\n')
        assert contents(load(path)) == [("Why?", "[1]", "[x]")]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("prompt,chosen,rejected\na,b,c\na,b,c,d\n", r"f\.csv:3: 4 cells"),
            ('prompt\n"a" b\n', r"f\.csv:2: not valid.* Double quotes within a cell are written twice\."),
            (
                'prompt,chosen,rejected\na,b,c\na,"b,c\nd,e,f\n',
                r"f\.csv:3: a cell begins with a double quote here that none closes\. Double",
            ),
            ("Why is it so?,Because it is,No\n1,2,3\n", r"Is the first line a row\? A table begins with a line of"),
        ],
    )
    def test_broken_csv_is_an_error_with_file_and_line(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "f.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            load(tmp_path / "f.csv", **ALLOW_DROPS)

    @pytest.mark.parametrize("name", ["f.csv", "f.jsonl", "f.jsonl.gz", "f.json"])
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (
                b"\n\n\xc3\xa9 caf\xe9\n",
                r":3: not UTF-8 text: byte 0xe9, which is 'é' in Windows-1252\. Save it again ",
            ),
            ("a\n你好\n".encode("gb18030"), r":2: not UTF-8 text: byte 0xc4\. Save .* iconv -f ENCODING -t UTF-8 OLD"),
            ("a\nПривет\n".encode("cp1251"), r":2: not UTF-8 text: byte 0xcf\. Save .* WINDOWS-1251\): iconv"),
            ("é,b\n".encode("utf-16"), r":1: not UTF-8 text: it is UTF-16\. .* iconv -f UTF-16 -t UTF-8 OLD > NEW\."),
            (
                b"PK\x03\x04\x14\x00\xff\xff",
                r":1: not UTF-8 text: it is a zip archive, as Excel's workbooks are\. Save",
            ),
            (b"a\x00\xff\n", r":1: not UTF-8 text: byte 0xff, invalid start byte\. Is it UTF-8 text, and complete\?$"),
            (b"a\n\xc3", r":2: not UTF-8 text: byte 0xc3, unexpected end of data\. Is it UTF-8 text, and complete\?$"),
        ],
    )
    def test_a_file_that_is_not_utf8_is_told_with_the_line_and_what_to_do(
        self, tmp_path: Path, name: str, content: bytes, message: str
    ) -> None:
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        with pytest.raises(DataError, match=rf"{re.escape(str(path))}{message}"):
            list(READERS[path.suffix](path) if path.suffix in READERS else read_each_row(path))

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("f.jsonl.gz", b'{"a": "b"}\n', r"not compressed by gzip, as its name says\. Rename it to f\.jsonl\."),
            ("f.jsonl.zst", b'{"a": "b"}\n', r"not compressed by zstd, as its name says\. Rename it to f\.jsonl\."),
            ("f.jsonl.zst", gzip.compress(b"{}"), r"compressed by gzip\. Unpack it, or name it \.jsonl\.gz if"),
            ("f.jsonl.gz", b"\x1f\x8b\x08", r"cannot be read after line 0 .* and complete\?"),
        ],
    )
    def test_a_file_that_is_not_packed_as_its_name_says_is_told_its_name(
        self, tmp_path: Path, name: str, content: bytes, message: str
    ) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{re.escape(name)}: .*{message}"):
            list(read_each_row(tmp_path / name))

    def test_a_compressed_file_that_is_damaged_and_not_utf8_is_refused(self, tmp_path: Path) -> None:
        # Its bytes are read once more for the message, to the end, where the checksum is wrong.
        packed = bytearray(gzip.compress(b"\xff"))
        packed[-8] ^= 1
        (tmp_path / "f.jsonl.gz").write_bytes(packed)
        with pytest.raises(DataError, match=r"f\.jsonl\.gz: cannot be read \(CRC check failed .*complete\?"):
            list(read_each_row(tmp_path / "f.jsonl.gz"))

    def test_a_table_with_commas_is_none_with_tabs(self, tmp_path: Path) -> None:
        (tmp_path / "f.tsv").write_text("prompt,chosen,rejected\na,b,c\n")
        with pytest.raises(DataError, match=r"f\.tsv:1: the header .* is separated by commas, wanted tabs\. Save the"):
            load(tmp_path / "f.tsv")
        (tmp_path / "g.tsv").write_text("prompt\tchosen\trejected\na, b\tb\tc\nd\te\tf\tg\n")
        with pytest.raises(DataError, match=r"g\.tsv:3: 4 cells .* Put cells that contain a tab in double quotes\."):
            load(tmp_path / "g.tsv", **ALLOW_DROPS)

    @pytest.mark.parametrize("indent", [None, 1])
    def test_a_list_of_rows_in_a_file_of_lines_is_told_from_damaged_lines(self, tmp_path: Path, indent) -> None:
        (tmp_path / "f.jsonl").write_text(json.dumps(THREE * 40, indent=indent))
        with pytest.raises(DataError, match=r"f\.jsonl:1: .* If the file is one list of rows, name it \.json\."):
            load(tmp_path / "f.jsonl", **ALLOW_DROPS)

    def test_a_long_csv_cell_is_read_and_the_limit_of_the_csv_module_restored(self, tmp_path: Path) -> None:
        before = csv.field_size_limit()
        (tmp_path / "f.csv").write_text(f"prompt,chosen,rejected\nWhy?,{'x' * (before + 1)},b\n")
        assert len(load(tmp_path / "f.csv").preferences[0].replies[0][0].content) == before + 1
        assert csv.field_size_limit() == before

    def test_the_limit_of_the_csv_module_stands_while_a_file_is_half_read(self, tmp_path: Path) -> None:
        before = csv.field_size_limit()
        (tmp_path / "f.csv").write_text("prompt,chosen,rejected\nWhy?,a,b\nHow?,c,d\n")
        rows = READERS[".csv"](tmp_path / "f.csv")
        assert next(rows) == (2, {"prompt": "Why?", "chosen": "a", "rejected": "b"})
        assert csv.field_size_limit() == before

    @pytest.mark.parametrize(
        ("name", "text"), [("f.jsonl", "\n"), ("f.json", "[]"), ("f.csv", "prompt,chosen\n"), ("g.csv", "")]
    )
    def test_a_file_without_rows_is_an_error(self, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=rf"{name}: no rows"):
            load(tmp_path / name)

    def test_unknown_columns_are_an_error_with_file_line_and_columns(self, tmp_path: Path) -> None:
        path = write(tmp_path / "f.jsonl", [{"question": "a", "better": "b"}])
        with pytest.raises(DataError, match=r"f\.jsonl:1: the columns 'question', 'better'.*lacks 'chosen' and 'rej"):
            load(path)


@pytest.mark.parametrize("indent", [None, 4])
@pytest.mark.parametrize("before", ["", "\ufeff", "\n \n"])
def test_a_jsonl_file_that_is_one_object_of_columns_is_read_as_columns(tmp_path, indent, before):
    path = tmp_path / "rm_implicit.jsonl"
    path.write_text(before + json.dumps(columns_of(3), indent=indent) + "\n\n", encoding="utf-8")
    (source,) = find_sources([str(path)], "train")
    rows = [row for _, row in read_source(source)]
    assert [row["chosen"][1]["content"] for row in rows] == ["chosen 0", "chosen 1", "chosen 2"]
    assert not has_lines(source)


def test_lines_stay_lines_though_the_first_one_looks_like_columns(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(columns_of(1)), json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"})]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (source,) = find_sources([str(path)], "train")
    assert has_lines(source)
    assert [row["chosen"] for _, row in read_source(source)] == [columns_of(1)["chosen"], "b"]
