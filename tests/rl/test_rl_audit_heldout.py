"""Files of held-out results that an audit takes for evidence: JSONL and CSV, and what is refused in each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rewardlab.core.errors import DataError
from rewardlab.rl.audit.heldout import read_heldout


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"step": 1, "value": "x", "item": "a"}, "value is 'x'; expected a finite number"),
        ({"step": 1.5, "value": 1, "item": "a"}, "step is 1.5; expected a whole number"),
        ({"step": 1, "value": 1, "low": 2, "high": 3}, "does not hold the value 1"),
        ({"step": 1, "value": 1, "itme": "a"}, "unknown column 'itme'"),
        ({"step": 1, "value": 1}, "low is None; expected a finite number"),
        ({"step": True, "value": 1, "item": "a"}, "step is True; expected a finite number"),
        ({"step": 1e300, "value": 1, "item": "a"}, "step is 1e+300; expected a"),
        ({"step": 1e60, "value": 1, "item": "a"}, "step is 1e+60; expected a whole number"),
        ({"step": 1, "value": 10**400, "item": "a"}, "expected a finite number, at most 1e+100"),
        ({"step": 1, "value": -1e200, "item": "a"}, "expected a finite number, at most 1e+100"),
        ({"step": 1, "value": 1, "low": 0, "high": 2, "n": -5}, "n is -5; expected a whole number from 1 on"),
        ({"step": 1, "value": 1, "low": 0, "high": 2, "n": 0.5}, "n is 0.5; expected a whole number from 1 on"),
        ({"step": 1, "value": 1, "low": 0, "high": 2, "level": 1e-300}, "its level is not from 0.01 to 0.9999"),
        ({"step": 1, "value": 1, "low": 1, "high": 1}, "the interval of 1 has no width"),
    ],
)
def test_a_row_of_a_held_out_file_that_cannot_be_read_is_named(
    tmp_path: Path, row: dict[str, object], said: str
) -> None:
    (tmp_path / "held.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"held\.jsonl:1: ") as refusal:
        read_heldout(tmp_path / "held.jsonl")
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'0,1,"abc\n1,2,3', "unexpected end of data"),
        (b"0,1," + b"x" * 200_000, "field larger than field limit"),
        (b"0,1,\xff", "invalid start byte"),
        (b"0,1,a,b", "more cells than the first line"),
    ],
)
def test_a_csv_file_of_held_out_results_that_cannot_be_read_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    (tmp_path / "held.csv").write_bytes(b"step,value,item\n" + line + b"\n")
    with pytest.raises(DataError, match=r"held\.csv:[1234]: ") as refusal:
        read_heldout(tmp_path / "held.csv")
    assert said in str(refusal.value)


def test_held_out_results_may_be_csv(tmp_path: Path) -> None:
    (tmp_path / "held.csv").write_text("step,name,value,low,high\n0,a,0.5,0.4,0.6\n10,a,0.6,0.5,0.7\n0,b,1,0.9,1.1\n")
    first, second = read_heldout(tmp_path / "held.csv")
    assert (first.name, first.step_N.tolist(), first.value_N.tolist()) == ("a", [0, 10], [0.5, 0.6])
    assert first.error_N is not None
    assert first.error_N == pytest.approx([0.1 / 1.959964] * 2, rel=1e-6)
    assert second.name == "b"
