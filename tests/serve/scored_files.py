"""Files of rows scored by the stub, as tests of formats, picks and mistakes write and read them."""

from __future__ import annotations

import csv
import gzip
import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.serve.file_scoring.file import DEFAULT, ScoreSettings, score_with
from scoring_stub import Stub

WRITE = ScoreSettings(on_error="write")


def write_jsonl(path: Path, rows: list) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read_jsonl(path: Path) -> list[dict]:
    content = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()]


def scored(source: Path, target: Path, settings: ScoreSettings = DEFAULT) -> list[dict]:
    score_with(Stub(), source, target, settings)
    if target.suffix == ".parquet":
        return pq.read_table(target).to_pylist()
    if target.suffix == ".csv":
        with target.open(newline="") as file:
            return list(csv.DictReader(file))
    return json.loads(target.read_text()) if target.suffix == ".json" else read_jsonl(target)


def refusal(source: Path, target: Path, settings: ScoreSettings = DEFAULT) -> str:
    """Return the error, which leaves nothing behind and asks for no score."""
    backend, before = Stub(), sorted(source.parent.iterdir())
    with pytest.raises((DataError, ConfigError)) as caught:
        score_with(backend, source, target, settings)
    assert backend.asked == []
    assert sorted(source.parent.iterdir()) == before
    return str(caught.value)


def write_rows(path: Path, count: int) -> Path:
    draw = random.Random(0)
    with path.open("w") as file:
        for n in range(count):
            row = {"id": n, "prompt": f"How {n}?", "response": f"So {n}{'!' * draw.randrange(2)}"}
            if n % 3 == 1:
                row = {"id": n, "prompt": f"How {n}?", "responses": [f"{n}.{k}" for k in range(1 + n % 4)]}
            file.write(json.dumps(row) + "\n")
    return path
