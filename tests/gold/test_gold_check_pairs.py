"""Pairs against rows of which many have one prompt or one reply: the same findings, and no more work for each pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rewardlab.core.types import Message
from rewardlab.gold.checking.pairs import Index, pair_findings
from rewardlab.gold.checking.reading import Built, Pair, Stages
from rewardlab.gold.files.rows import GoldRow

Texts = Callable[[int], tuple[str, str, str]]
"""The prompt and the two replies of a row, by its number."""


def read(texts: Texts, rows: int, *, moved: int) -> Stages:
    """Rows, and a pair for each row with its prompt and the replies of the row that stands `moved` further down."""
    labels, pairs = [], []
    for number in range(rows):
        prompt, one, other = texts(number)
        asked = (Message("user", prompt),)
        labels.append(GoldRow(id=str(number), prompt=asked, responses=(one, other), gold=(1.0, 0.0)))
        _, chosen, rejected = texts(number + moved)
        pairs.append(Pair(prompt=asked, chosen=chosen, rejected=rejected, number=number + 1))
    built = Built(path=Path("train.jsonl"), side="train", pairs=pairs)
    return Stages(
        prompts=None, samples=None, responses=None, rewards=None, labels=labels, built=(built,), names={}, folders=()
    )


def told(stages: Stages) -> str:
    return next(one.evidence for one in pair_findings(stages) if one.name == "pairs and rows")


def alternating(number: int) -> tuple[str, str, str]:
    """A prompt of its own, and the same replies as every other row."""
    return f"Question {number}?", *(("Yes.", "No.") if number % 2 else ("True.", "False."))


def recurring(number: int) -> tuple[str, str, str]:
    """One of two prompts, and replies of its own."""
    return f"Question {number % 2}?", f"Yes, {number}.", f"No, {number}."


@pytest.mark.parametrize(("texts", "moved"), [(alternating, 1), (recurring, 1), (alternating, 0), (recurring, 0)])
def test_a_pair_costs_no_more_where_many_rows_share_a_prompt_or_a_reply(
    texts: Texts, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    has_both = Index.has_both

    def counted(self: Index, row: int, pair: Pair) -> bool:
        nonlocal looks
        looks += 1
        return has_both(self, row, pair)

    monkeypatch.setattr(Index, "has_both", counted)
    needed = []
    for rows in (1000, 2000):
        looks = 0
        told(read(texts, rows, moved=moved))
        needed.append(looks)
    assert needed[1] <= 2.1 * needed[0]


def test_replies_that_many_rows_have_still_tell_by_how_many_rows_they_were_moved() -> None:
    # The replies of the last pair are of a row that is not there.
    found = told(read(lambda number: (f"{number}?", f"Yes, {number}.", "No."), 20, moved=1))
    assert "19 have replies that stand 1 row further down" in found
    assert "have replies that stand 1 row further" in told(read(alternating, 50, moved=1))
    assert told(read(alternating, 50, moved=0)).startswith("All 50 pairs have a prompt of the rows")
