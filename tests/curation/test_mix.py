"""Laws of `rewardlab data mix`: shares as asked for, each row at most once, the same bytes for the same seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loading import pair, write
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.curation.files import converting, mixing
from rewardlab.curation.files.config import ConvertConfig, MixConfig
from rewardlab.curation.files.converting import convert
from rewardlab.curation.files.mixing import Mixed, mix
from rewardlab.data import pipeline
from written import configured, preferences_in, rows_in, told_by


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Files of 60 and 30 rows."""
    a = write(tmp_path / "a.jsonl", [pair(k) for k in range(60)])
    return a, write(tmp_path / "b.jsonl.zst", [pair(k) for k in range(60, 90)])


def run(tmp_path: Path, *names: Path | str, output: str = "mix.jsonl", **settings: Any) -> Mixed:
    """`mix`, to a file beside."""
    return mix(configured(MixConfig, *names, output=tmp_path / output, **settings))


def sources_in(done: Mixed) -> Counter[str]:
    """Rows of each dataset."""
    return Counter(row["source"] for row in rows_in(done.output))


def test_the_scarcest_decides_how_many_rows_there_are(tmp_path: Path, two: tuple[Path, Path]) -> None:
    done = run(tmp_path, f"{two[0]}:0.25", f"{two[1]}:0.75")
    assert sources_in(done) == {"a": 10, "b": 30}
    assert len({row["id"] for row in rows_in(done.output)}) == done.rows == 40
    told = told_by(done.output)
    assert [one["share"] for one in told["weights"]["datasets"]] == [0.25, 0.75]
    assert [(one["kept"], one["used"]) for one in told["sources"]] == [(60, 10), (30, 30)]
    assert all(one["sha256"] for one in told["sources"])


def test_rows_makes_it_smaller_and_more_than_there_are_is_an_error(tmp_path: Path, two: tuple[Path, Path]) -> None:
    assert sources_in(run(tmp_path, f"{two[0]}:1", f"{two[1]}:2", rows=9)) == {"a": 3, "b": 6}
    with pytest.raises(DataError, match=r"--rows 46: these weights allow 45 rows"):
        run(tmp_path, f"{two[0]}:1", f"{two[1]}:2", rows=46, overwrite=True)
    with pytest.raises(DataError, match=r"--rows 91: the datasets have 90 rows"):
        run(tmp_path, *two, rows=91, overwrite=True)


def test_without_weights_all_rows_are_shuffled_together(tmp_path: Path, two: tuple[Path, Path]) -> None:
    done = run(tmp_path, *two)
    assert sources_in(done) == {"a": 60, "b": 30}
    order = [row["source"] for row in rows_in(done.output)]
    assert order != sorted(order)
    assert 10 < order[:45].count("b") < 20
    assert run(tmp_path, *two, output="some.jsonl", rows=7).rows == 7


def test_the_seed_decides_rows_and_order_and_workers_do_not(
    tmp_path: Path, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = f"{two[0]}:1", f"{two[1]}:1"
    first = run(tmp_path, *names, output="1.jsonl.gz").output.read_bytes()
    monkeypatch.setattr(pipeline, "CHUNK", 7)
    assert run(tmp_path, *names, output="2.jsonl.gz").output.read_bytes() == first
    assert run(tmp_path, *names, output="3.jsonl.gz", seed=1).output.read_bytes() != first


def test_a_mix_is_read_like_its_parts(tmp_path: Path, two: tuple[Path, Path]) -> None:
    done = run(tmp_path, *two, output="mix.parquet")
    parts = [*preferences_in(two[0]), *preferences_in(two[1])]
    assert {row.key for row in preferences_in(done.output)} == {row.key for row in parts}


def test_a_limit_holds_for_each_dataset(tmp_path: Path, two: tuple[Path, Path]) -> None:
    assert sources_in(run(tmp_path, f"{two[0]}:2", f"{two[1]}:1", limit=10)) == {"a": 10, "b": 5}


def test_nothing_is_left_where_weights_do_not_fit(tmp_path: Path, two: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="has the weight 1, and"):
        run(tmp_path, f"{two[0]}:1", two[1])
    with pytest.raises(DataError, match="would be not one row"):
        run(tmp_path, f"{two[0]}:1", f"{two[1]}:1000")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl.zst"]


@pytest.mark.parametrize("tool", ["mix", "convert"])
def test_a_file_that_another_process_has_made_meanwhile_stays(
    tmp_path: Path, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    output = tmp_path / "out.jsonl"
    where, name = (mixing, "_write_shuffled") if tool == "mix" else (converting, "_write_each")
    real = getattr(where, name)

    def beside_another(*given: Any) -> Any:
        output.write_text("of another\n")
        return real(*given)

    monkeypatch.setattr(where, name, beside_another)
    command, kind = (mix, MixConfig) if tool == "mix" else (convert, ConvertConfig)
    with pytest.raises(ConfigError, match=r"--output .*out.jsonl: exists. Name another file"):
        command(configured(kind, *two, output=output))
    assert output.read_text() == "of another\n"
    assert command(configured(kind, *two, output=output, overwrite=True)).rows == 90
