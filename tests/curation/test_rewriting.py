"""Datasets are written again: what stays is byte for byte what it was, and exactly what is named goes."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rewardlab.core.errors import DataError
from rewardlab.curation import rewriting
from rewardlab.curation.rewriting import as_line, replacing_lines, stamp, write_without
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import Source, find_sources, source_of_rows
from rewardlab.data.judgements import Rules
from rewardlab.data.readers import read_source
from rewardlab.data.sources import rows_of_units

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.gz": gzip.compress,
    ".jsonl.zst": zstandard.ZstdCompressor().compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".zst":
        return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content)).read()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def row(number: int) -> bytes:
    return json.dumps({"prompt": f"p{number}", "chosen": f"a{number}", "rejected": "b"}).encode()


def found(path: Path) -> Source:
    (source,) = find_sources([str(path)], "train")
    return source


def without(source: Source, target: Path, *numbers: int) -> int:
    return write_without(source, target, set(numbers), since=stamp(source))


def rules(**reading: object) -> Rules:
    return Rules(source="a", reading=ReadingConfig(**reading), seed=0)


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("target", rewriting.ENDINGS)
def test_lines_of_every_packing_stay_byte_for_byte(ending: str, target: str, tmp_path: Path) -> None:
    lines = [b"\xef\xbb\xbf" + row(1) + b"\r\n", b" \n", row(3) + b"\r", row(4).replace(b' "', b'   "') + b"\n", row(5)]
    (tmp_path / f"a{ending}").write_bytes(PACK[ending](b"".join(lines)))
    source, out = found(tmp_path / f"a{ending}"), tmp_path / f"b{target}"
    assert [number for number, _ in read_source(source)] == [1, 3, 4, 5]
    assert without(source, out) == 4
    assert unpacked(out) == b"".join(lines)
    assert without(source, out, 3, 5) == 2
    assert unpacked(out) == lines[0] + lines[1] + lines[3]
    before = out.read_bytes()
    without(source, out, 3, 5)
    assert out.read_bytes() == before, "the same rows give the same bytes"


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_numbered_files_become_one_and_their_rows_are_counted_on(ending: str, tmp_path: Path) -> None:
    parts = [
        b"\xef\xbb\xbf" + row(1) + b"\n\n" + row(2),
        b"\xef\xbb\xbf" + row(3) + b"\n" + row(4) + b"\n",
        row(5) + b"\n",
    ]
    for number, part in enumerate(parts):
        (tmp_path / f"train-0000{number}-of-00003{ending}").write_bytes(PACK[ending](part))
    source, out = found(tmp_path), tmp_path / "out.jsonl"
    assert [str(each["prompt"]) for _, each in read_source(source)] == ["p1", "p2", "p3", "p4", "p5"]
    assert without(source, out, 2, 3) == 3
    assert out.read_bytes() == b"\xef\xbb\xbf" + row(1) + b"\n\n" + row(4) + b"\n" + row(5) + b"\n"
    assert without(source, out) == 5
    assert len(list(read_source(found(out)))) == 5, "the second file does not continue the last line of the first"


@settings(max_examples=25, deadline=None)
@given(
    parts=st.lists(
        st.lists(st.sampled_from([b"\n", b"\r\n", b"\r", b" \n", b"\xc2\xa0\n", b"row"])), min_size=1, max_size=3
    ),
    draw=st.data(),
)
def test_what_stays_are_the_rows_that_were_read(parts: list, draw: st.DataObject, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("parts")
    number = 0
    for place, part in enumerate(parts):
        content = b""
        for text in part:
            number += text == b"row"
            content += row(number) + b"\r\n" if text == b"row" else text
        (folder / f"train-{place}-of-{len(parts)}.jsonl").write_bytes(content)
    source = found(folder)
    gone = draw.draw(st.sets(st.integers(1, max(1, number))))
    assert without(source, folder / "out.jsonl", *gone) == sum(one not in gone for one in range(1, number + 1))
    left = [str(each["prompt"]) for _, each in read_source(found(folder / "out.jsonl"))]
    assert left == [f"p{one}" for one in range(1, number + 1) if one not in gone]


def test_lines_that_are_too_long_to_be_read_are_copied_in_pieces(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rewriting, "_PIECE", 40)
    lines = [row(1) + b"\r\n", row(2)[:38] + b"\r\n", row(3)[:39] + b"\r\n", b"x" * 500 + b"\n", row(5) + b"\n"]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    for number in range(1, 6):
        assert without(found(tmp_path / "a.jsonl"), tmp_path / "b.jsonl", number) == 4
        assert (tmp_path / "b.jsonl").read_bytes() == b"".join(lines[: number - 1] + lines[number:])


def test_rows_that_are_no_lines_keep_every_value(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "\ud800 é", "rejected": "b", "extra": [1, None]}, {"prompt": "q"}]
    assert without(source_of_rows(rows, "own"), tmp_path / "b.jsonl", 2) == 1
    assert json.loads((tmp_path / "b.jsonl").read_bytes()) == rows[0]
    timed = {"at": datetime(2026, 1, 2), "said": "\ud800"}
    assert json.loads(as_line(timed, "a:1")) == {"at": "2026-01-02 00:00:00", "said": "\ud800"}
    for hopeless in (float("nan"), float("inf"), b"bytes", {1, 2}):
        with pytest.raises(DataError, match="own:1: cannot be written as JSON"):
            as_line({"prompt": hopeless}, "own:1")
    parquet.write_table(pyarrow.table({"prompt": ["p"], "margin": [float("nan")]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="c.parquet:1: cannot be written as JSON"):
        without(found(tmp_path / "c.parquet"), tmp_path / "b.jsonl")
    assert len((tmp_path / "b.jsonl").read_bytes().splitlines()) == 1, "what was there stays"


def test_a_dataset_that_changed_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(row(1) + b"\n")
    source = found(tmp_path / "a.jsonl")
    since = stamp(source)
    (tmp_path / "a.jsonl").write_bytes(row(1) + b"\n" + row(2))
    with pytest.raises(DataError, match="changed while it was read"):
        write_without(source, tmp_path / "b.jsonl", (), since=since)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match="changed while it was read"):
        write_without(source, tmp_path / "b.jsonl", (), since=since)
    assert not (tmp_path / "b.jsonl").exists()


def test_the_rows_of_a_preference_are_all_that_share_its_group(tmp_path: Path) -> None:
    rated = [{"prompt": p, "response": f"r{n}", "helpfulness": n} for n, p in enumerate(["a", "b", "a", "", "b", "a"])]
    source = source_of_rows([*rated, {"prompt": "", "response": "r", "helpfulness": 1}], "rated")
    assert rows_of_units(source, rules(), [1, 4]) == {1: [1, 3, 6], 4: [4]}
    named = [{"q" if name == "prompt" else name: value for name, value in each.items()} for each in rated]
    assert rows_of_units(source_of_rows(named, "rated"), rules(prompt_column="q"), [2]) == {2: [2, 5]}
    assert rows_of_units(
        source_of_rows([{"prompt": "p", "chosen": "a", "rejected": "b"}] * 3, "pairs"), rules(), [2]
    ) == {2: [2]}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst"])
def test_a_full_disk_names_the_file_of_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as refused, replacing_lines(tmp_path / name) as rows:
        rows.write(b"{}\n")
    assert refused.value.filename == str(tmp_path / name)
    assert not list(tmp_path.iterdir())
