"""The example of docs/length.md takes length out of the labels, and what it writes is read."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import chdir
from pathlib import Path

import pytest

from harness.in_memory import load_preferences
from pages import run_examples
from rewardlab.data.config import ReadingConfig


def words(count: int, mark: str) -> str:
    return " ".join([mark] * count)


def test_the_weights_of_the_page_on_length_give_longer_and_shorter_replies_the_same_say(tmp_path: Path) -> None:
    lengths = [(9, 3), (8, 4), (9, 4), (3, 8), (2, 1), (1, 2), (5, 5), (40, 3)]
    rows = [
        {"prompt": f"Question {n}?", "chosen": words(own, "good"), "rejected": words(other, "bad")}
        for n, (own, other) in enumerate(lengths)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with chdir(tmp_path):
        run_examples("length.md")
    loaded = load_preferences(
        [str(tmp_path / "balanced.jsonl")],
        split="train",
        reading=ReadingConfig(max_drop_fraction=0.2),
        seed=0,
        limit=None,
    )
    say: dict[int, float] = defaultdict(float)
    for preference in loaded.preferences:
        (judged,) = preference.comparisons
        own, other = (len(preference.replies[k][0].content.split()) for k in (judged.first, judged.second))
        say[own - other > 0] += judged.weight if own != other else 0.0
    assert len(loaded.preferences) == len(rows) - 1, "none is as much shorter as the last one is longer"
    assert loaded.reports[0].dropped == {"zero_weight": 1}
    assert say[True] == pytest.approx(say[False])
