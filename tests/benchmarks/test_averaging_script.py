"""The script that averages weights, on a tiny model."""

from __future__ import annotations

import json

import numpy as np
import pytest

import averaging
from benchmark_results import page_in, result
from rewardlab.core.types import Comparison, Message, Preference, ScoreRow


@pytest.mark.slow
def test_members_their_scores_and_their_average_are_judged_on_the_same_pairs(tmp_path):
    for part in ("train", "test"):
        rows = [{"prompt": f"Why {k % 12}?", "chosen": f"since {k}", "rejected": f"no {k % 3}"} for k in range(48)]
        (tmp_path / f"few.{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--data", "few", "--data-folder", str(tmp_path), "--pairs", "48", "--test-pairs", "48"]
    size = ["--model", "tiny-llama", "--layers", "0", "--max-seq-len", "128", "--threads", "1", "--batch-size", "8"]
    own = ["--members", "2", "--steps", "2", "--head-steps", "1", "--swapped", "0.25"]
    assert averaging.main([*data, *size, *own, "--results", str(tmp_path / "results")]) == 0
    arms = result(tmp_path / "results")["found"]["0.25"]
    assert list(arms) == [averaging.SAME, averaging.OWN]
    for ways in arms.values():
        assert list(ways) == [averaging.MEMBER, averaging.SCORES, averaging.WEIGHTS]
        assert all(len(one[metric]) == 48 for one in ways.values() for metric in averaging.METRICS)
    assert "25 % of the training labels turned round" in page_in(tmp_path / "results")


def test_that_share_of_the_labels_is_turned_round():
    replies = tuple((Message(role="assistant", content=word),) for word in ("a", "b"))
    rows = [
        Preference(
            id=str(number),
            source="few",
            prompt=(Message(role="user", content=f"Why {number}?"),),
            replies=replies,
            comparisons=(Comparison(first=0, second=1),),
            ranking=(0, 1),
        )
        for number in range(40)
    ]
    turned = averaging.swapped(rows, 0.25, seed=0)
    labels = np.array([one.comparisons[0].label for one in turned])
    assert np.count_nonzero(labels == 0.0) == 10
    assert [one.ranking for one in turned] == [(1, 0) if label == 0 else (0, 1) for label in labels]
    assert [one.prompt for one in turned] == [one.prompt for one in rows]


def test_the_mean_of_scores_takes_each_member_in_its_own_spread():
    def rows(*scores: float) -> list[ScoreRow]:
        return [
            ScoreRow(
                preference_id="1",
                source="few",
                prompt_key="p",
                reply=number,
                score=score,
                num_tokens=1,
                prompt_tokens=1,
                truncated_tokens=0,
                comparisons=(),
            )
            for number, score in enumerate(scores)
        ]

    combined = [row.score for row in averaging.mean_of([rows(0.0, 1.0, 2.0), rows(30.0, 20.0, 10.0)])]
    assert combined == pytest.approx([0.0, 0.0, 0.0]), "one member has ten times the other's spread, and no more to say"
