"""Laws of files compressed with Zstandard: they hold what the plain file holds, and never more of it in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from loading import THREE, THREE_CONTENTS, contents, ids, load, pair, write
from rewardlab.core import zst
from rewardlab.core.errors import DataError
from rewardlab.core.files import read_lines
from rewardlab.data.rows import MAX_CHARACTERS


@pytest.mark.parametrize("name", ["hh.train.jsonl.zst", "hh.train.zst"])
def test_a_compressed_file_is_read_like_a_plain_one(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, THREE)
    loaded = load(tmp_path / "hh")
    assert contents(loaded) == THREE_CONTENTS
    assert ids(loaded.preferences)[2] == f"{name}:3"
    assert (loaded.reports[0].name, loaded.reports[0].split) == ("hh", "train")


@pytest.mark.parametrize("name", ["pairs.csv.zst", "pairs.parquet.zst", "pairs.tar.zst"])
def test_what_is_compressed_but_no_json_lines_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(zstandard.compress(b"a,b"))
    with pytest.raises(DataError, match=r"unknown extension"):
        load(tmp_path / name)


@given(pieces=st.lists(st.binary(max_size=3000), max_size=6), fed=st.integers(1, 2000))
@settings(max_examples=60, deadline=None)
def test_any_frames_give_the_bytes_that_the_package_gives(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], fed: int
) -> None:
    path = tmp_path_factory.mktemp("frames") / "rows.zst"
    path.write_bytes(b"".join(zstandard.compress(piece) for piece in pieces))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zst, "FED_BYTES", fed)
        with zst.open_zst(path, "latin-1") as file:
            assert file.buffer.read() == b"".join(pieces)


@pytest.mark.parametrize("keep", [5, 0.5, -1])
def test_a_file_that_was_cut_off_is_an_error_and_not_a_shorter_file(tmp_path: Path, keep: float) -> None:
    path = write(tmp_path / "hh.jsonl.zst", [pair(k) for k in range(2000)])
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(DataError, match=r"hh\.jsonl\.zst: cannot be read after line \d+ \(the compressed file ends"):
        load(path)


def test_damaged_and_foreign_bytes_are_one_clear_sentence(tmp_path: Path) -> None:
    path = tmp_path / "hh.jsonl.zst"
    path.write_text(json.dumps(pair(0)))
    with pytest.raises(DataError, match=r"hh\.jsonl\.zst: it is not compressed by zstd, as its name says"):
        load(path)
    packed = bytearray(
        zstandard.ZstdCompressor(write_checksum=True).compress(json.dumps([pair(k) for k in range(99)]).encode())
    )
    packed[len(packed) // 2] ^= 255
    path.write_bytes(bytes(packed))
    with pytest.raises(DataError, match="cannot be read after line 0"):
        load(path)


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "hh.jsonl.zst", THREE)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataError, match=r'needs the package zstandard.*pip install "rewardlab\[data\]"'):
        load(path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_a_line_that_explodes_is_dropped_without_being_held(tmp_path: Path) -> None:
    packer = zstandard.ZstdCompressor().compressobj()
    path = tmp_path / "bomb.jsonl.zst"
    row = json.dumps(pair(0)).encode()
    with path.open("wb") as file:
        file.write(packer.compress(row + b"\n"))
        for _ in range(600):
            file.write(packer.compress(bytes([120]) * 1_000_000))
        file.write(packer.compress(b"\n" + row + b"\n") + packer.flush())
    code = (
        "from pathlib import Path; from rewardlab.core.files import read_lines; "
        f"lengths = [len(line) for _, line in read_lines(Path({str(path)!r}), max_characters={MAX_CHARACTERS})]; "
        "print(lengths, Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lengths, _, peak = done.stdout.rpartition(" ")
    assert json.loads(lengths) == [len(row) + 1, MAX_CHARACTERS + 1, len(row) + 1]
    # 600 MB of text; the interpreter, the parts that are held and the longest line are far below.
    assert int(peak) < 250_000


def test_lines_longer_than_a_piece_stay_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "hh.jsonl.zst", [{"a": "ü" * 300_000}, {"b": 1}])
    assert [json.loads(line) for _, line in read_lines(path)] == [{"a": "ü" * 300_000}, {"b": 1}]
