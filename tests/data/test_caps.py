"""No row stalls a run: what is too large is dropped for a cause of its own, and never in memory as a whole."""

from __future__ import annotations

import csv
import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from loading import ALLOW_DROPS, ids, load, pair
from rewardlab.core.errors import DataError
from rewardlab.data import pipeline
from rewardlab.data.readers import MAX_RECORD_CHARACTERS
from rewardlab.data.rows import MAX_CHARACTERS, MAX_REPLIES, MAX_TURNS
from rewardlab.data.sources import first_rows

MANY = "word " * (MAX_CHARACTERS // 5)


def turns(number: int) -> list[dict[str, str]]:
    return [{"role": "user" if n % 2 == 0 else "assistant", "content": "x"} for n in range(number)]


def ranked(number: int) -> dict[str, object]:
    return {"prompt": "q", "responses": [str(n) for n in range(number)], "scores": list(range(number))}


def long_row(**changed: object) -> dict[str, object]:
    return pair(0) | {"prompt": "?" + MANY} | changed


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    """In the format that the name says."""
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    elif path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode(), 1) if path.suffix == ".gz" else text.encode())
    return path


def dropped(path: Path, **settings: object) -> dict[str, int]:
    (report,) = load(path, **ALLOW_DROPS, **settings).reports
    assert report.kept == 1
    return dict(report.dropped)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.parquet"])
@pytest.mark.parametrize("first", [True, False])
def test_a_row_of_too_many_characters_is_dropped_in_every_format(tmp_path: Path, name: str, first: bool) -> None:
    rows = [long_row(), pair(1)] if first else [pair(1), long_row()]
    path = write(tmp_path / name, rows)
    assert dropped(path) == {"row_too_long": 1}
    assert first_rows([str(path)], "train")[0][1].keys() == pair(1).keys()


@pytest.mark.parametrize("first", [True, False])
def test_so_is_a_long_form_row_and_with_it_its_pair_is_incomplete(tmp_path: Path, first: bool) -> None:
    def row(pair_id: int, role: str, text: str) -> dict[str, object]:
        return {"pair_id": pair_id, "role": role, "prompt": "Why?", "response": text}

    whole = [row(0, "chosen", "a"), row(0, "rejected", "b")]
    torn = [row(1, "chosen", MANY), row(1, "rejected", "b")]
    path = write(tmp_path / "a.jsonl", torn + whole if first else whole + torn)
    assert dropped(path) == {"row_too_long": 1, "incomplete_pair": 1}


def test_only_rows_that_are_too_long_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a.jsonl: every row has more than 8,000,000 characters"):
        load(write(tmp_path / "a.jsonl", [long_row(), long_row()]))


@pytest.mark.parametrize("text", [MANY[: MAX_CHARACTERS - 200], MANY[: MAX_CHARACTERS // 6] + "é" * 1000])
def test_what_is_just_short_enough_is_read(tmp_path: Path, text: str) -> None:
    assert dropped(write(tmp_path / "a.jsonl", [pair(0) | {"prompt": text}])) == {}


@pytest.mark.slow
def test_turns_and_replies_have_a_limit(tmp_path: Path) -> None:
    rows = [
        pair(0) | {"prompt": turns(MAX_TURNS - 1)},
        pair(0) | {"prompt": turns(MAX_TURNS + 1)},
        pair(0) | {"chosen": turns(MAX_TURNS + 2)[1:]},
    ]
    assert dropped(write(tmp_path / "a.jsonl", rows)) == {"too_many_turns": 2}
    texts = {n: "".join(f"\n\nHuman: {k}\n\nAssistant: {k}" for k in range(n)) for n in (1, MAX_TURNS // 2 + 1)}
    transcripts = [{"chosen": text, "rejected": text + "no"} for text in texts.values()]
    assert dropped(write(tmp_path / "t.jsonl", transcripts)) == {"too_many_turns": 1}
    several = write(tmp_path / "k.jsonl", [ranked(MAX_REPLIES), ranked(MAX_REPLIES + 1)])
    assert dropped(several) == {"too_many_replies": 1}
    (report,) = load(several, max_replies=3).reports
    assert (report.kept, dict(report.dropped)) == (2, {})


@pytest.mark.slow
def test_a_csv_row_without_an_end_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    line = "Why?," + "x" * 99_990 + ",no\n"
    path.write_text('prompt,chosen,rejected\nWhy?,a,b\nWhy?,"a,b\n' + line * (MAX_RECORD_CHARACTERS // len(line) + 1))
    with pytest.raises(DataError, match=r"a.csv:3: this row has no end within 32,000,000 .*double quote missing"):
        load(path)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_that_is_too_long_is_never_in_memory_as_a_whole(tmp_path: Path, name: str) -> None:
    size = 20 * MAX_CHARACTERS
    opener = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "wt") as file:
        file.write('{"prompt": "')
        for _ in range(20):
            file.write("x" * MAX_CHARACTERS)
        file.write('", "chosen": "a", "rejected": "b"}\n' + json.dumps(pair(1)) + "\n")
    tracemalloc.start()
    try:
        loaded = load(tmp_path / name, **ALLOW_DROPS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ids(loaded.preferences) == [f"{name}:2"]
    assert dict(loaded.reports[0].dropped) == {"row_too_long": 1}
    assert peak < size / 4


def test_a_chunk_holds_fewer_rows_if_they_are_long() -> None:
    long, short = (1, "x" * (pipeline.CHUNK_CHARACTERS // 2 + 1)), (2, "x")
    units = [long, long, long, *[short] * (2 * pipeline.CHUNK)]
    chunks = list(pipeline.chunked(units))
    assert [unit for chunk in chunks for unit in chunk] == units
    assert [len(chunk) for chunk in chunks] == [2, pipeline.CHUNK, pipeline.CHUNK, 1]
