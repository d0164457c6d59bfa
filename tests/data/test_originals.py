"""Texts that are read again are those that were prepared: same ids, same conversations, whatever the format."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from harness.in_memory import load_preferences
from rewardlab.data.config import ReadingConfig
from rewardlab.data.dataset_names import Named
from rewardlab.data.originals import read_originals

PAIRS = [{"prompt": f"How {n}?", "chosen": f"so {n}", "rejected": "no", "kind": "ab"[n % 2]} for n in range(6)]
FORMATS = {
    "pairs.jsonl": PAIRS,
    "kwise.jsonl": [
        {"prompt": f"Why {n}?", "responses": ["a", "b", f"c {n}"], "scores": [3, 1, 2], "kind": "k"} for n in range(4)
    ],
    "long.jsonl": [
        {"pair_id": n, "role": role, "prompt": f"When {n}?", "response": f"{role} {n}", "kind": None if m else "l"}
        for n in range(3)
        for m, role in enumerate(("chosen", "rejected"))
    ],
    "hh.jsonl": [
        {"chosen": f"\n\nHuman: Hi {n}\n\nAssistant: yes", "rejected": f"\n\nHuman: Hi {n}\n\nAssistant: no"}
        for n in range(3)
    ],
    "dropped.jsonl": [PAIRS[0], {"prompt": "Same?", "chosen": "x", "rejected": "x"}, PAIRS[1]],
}


@pytest.mark.parametrize("name", FORMATS)
def test_originals_are_the_preferences_that_are_prepared(tmp_path, name):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in FORMATS[name]))
    reading = ReadingConfig(max_drop_fraction=1.0, max_replies=2)
    prepared = load_preferences([str(path)], split="test", reading=reading, seed=3, limit=None).preferences
    again = list(read_originals(named(path), reading, seed=3))
    assert [original.preference for original in again] == list(prepared)
    wanted = {again[0].key, again[-1].key}
    some = read_originals(named(path), reading, seed=3, wanted=wanted)
    assert [original.preference for original in some] == [prepared[0], prepared[-1]]


def named(path: Path) -> Named:
    return Named(purpose="evaluation", names=(str(path),), split="test", limit=None)


def test_columns_come_from_the_row_or_from_either_row_of_a_pair(tmp_path):
    for name, kinds in (("pairs.jsonl", list("ababab")), ("long.jsonl", ["l"] * 3), ("hh.jsonl", [None] * 3)):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in FORMATS[name]))
        found = list(read_originals(named(path), ReadingConfig(), seed=0))
        assert [original.columns.get("kind") for original in found] == kinds
    assert found[0].num_turns == 2


def test_files_without_lines_of_json_are_read_too(tmp_path):
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, PAIRS[0])
        writer.writeheader()
        writer.writerows(PAIRS)
    found = list(read_originals(named(path), ReadingConfig(), seed=0))
    assert [original.columns["kind"] for original in found] == list("ababab")
    assert found[2].preference.prompt[0].content == "How 2?"
