"""The benchmark of looked-up states: it compares what it says it compares."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

import cached_states


def test_the_furthest_number_of_two_records_is_found() -> None:
    row = {
        "step": "3",
        "train_loss": "0.5",
        "train_margin": "-20",
        "eval_loss": "",
        "eval_margin": "",
        "grad_norm": "1",
    }
    assert cached_states.furthest([row], [row]) == 0
    assert cached_states.furthest([row], [{**row, "train_margin": "-22"}]) == pytest.approx(2 / 22)
    assert cached_states.furthest([row], [{**row, "train_loss": "0.6"}]) == pytest.approx(0.1)
    assert cached_states.furthest([row], [{**row, "eval_loss": "0.6"}]) == math.inf
    assert cached_states.furthest([row], [{**row, "step": "4"}]) == math.inf


def test_the_first_rows_of_a_file_are_taken(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "pairs.jsonl.gz", "wt") as file:
        file.write("".join(f'{{"n": {n}}}\n' for n in range(5)))
    rows = cached_states.first_rows(str(tmp_path / "pairs.jsonl.gz"), 3, tmp_path)
    assert rows.read_text() == '{"n": 0}\n{"n": 1}\n{"n": 2}\n'


@pytest.mark.soak
def test_whole_commands_agree(tmp_path: Path) -> None:
    flags = ["--model", "tiny-llama", "--pairs", "40", "--threads", "1", "--results", str(tmp_path)]
    assert cached_states.main(flags) == 0
    (path,) = tmp_path.glob("cached_states.*.json")
    ways = json.loads(path.read_text(encoding="utf-8"))["ways"]
    assert ways["looked up, another seed and rate"]["states"]["replies"]["of_the_run"] == {
        "looked_up": 80,
        "computed": 0,
    }
