"""Score rows that are read again."""

from __future__ import annotations

import json

from rewardlab.core.types import Comparison, ScoreRow


def test_the_names_of_rows_are_held_once_for_all_replies_and_models() -> None:
    judged = (Comparison(first=0, second=1),)
    row = ScoreRow(
        preference_id="pairs.jsonl:7",
        source="people say",
        prompt_key="a long hash",
        reply=0,
        score=float("nan"),
        num_tokens=30,
        prompt_tokens=20,
        truncated_tokens=0,
        comparisons=judged,
    )
    line = json.dumps(row.as_dict())
    first, second = (ScoreRow.from_dict(json.loads(line)) for _ in range(2))
    for name in ("preference_id", "source", "prompt_key"):
        assert getattr(first, name) == getattr(row, name)
        assert getattr(first, name) is getattr(second, name)
    assert first.comparisons == judged
