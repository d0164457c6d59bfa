"""Results on the disk by what decides them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewardlab.gold.kept_results import Kept, key_of


def test_what_was_added_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    Kept(tmp_path).add([("a", {"score": 1.5}), ("b", {"text": "ä\ud800"})])
    again = Kept(tmp_path)
    assert len(again) == 2
    assert list(again.each(["b", "a", "c"])) == [{"text": "ä\ud800"}, {"score": 1.5}, None]


def test_a_torn_line_is_cut_off_and_the_next_goes_on_behind_the_whole_ones(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.add([("a", {"score": 1.0})])
    kept.add([("b", {"score": 2.0})])
    with kept.path.open("r+b") as file:
        file.truncate(kept.path.stat().st_size - 3)
    again = Kept(tmp_path)
    assert "a" in again
    assert "b" not in again
    again.add([("b", {"score": 3.0})])
    assert Kept(tmp_path).get("b") == {"score": 3.0}


@pytest.mark.parametrize("damaged", [b"x" * 20, b"[" * 100_000])
def test_a_damaged_line_costs_what_it_held_and_no_more(damaged: bytes, tmp_path: Path, log) -> None:
    kept = Kept(tmp_path)
    kept.add([(name, {"score": 1.0}) for name in "abc"])
    lines = kept.path.read_bytes().splitlines(keepends=True)
    kept.path.write_bytes(lines[0] + damaged + b"\n" + lines[2])
    again = Kept(tmp_path)
    assert ["a" in again, "b" in again, "c" in again] == [True, False, True]
    assert "1 lines are damaged" in log.text


def test_a_name_holds_everything_that_decides() -> None:
    assert key_of(prompt=["x"], index=0) == key_of(index=0, prompt=["x"])
    assert len({key_of(prompt=["x"], index=index, seed=seed) for index in (0, 1) for seed in (0, 1)}) == 4
