"""Replies that cannot be used are left out alone, where two others of their row are left to be compared."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from parsing import Row, cause, read, replies
from rewardlab.core.files import write_jsonl
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import find_sources
from rewardlab.data.judgements import Rules
from rewardlab.data.reading import tell_oddities
from rewardlab.data.sources import open_units, parse_units
from rewardlab.data.tally import Tally

TEXTS = ["r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7"]
SCORES = [3, 1, 4, 0, 5, 9, 2, 6]
UNUSABLE = [
    (None, "reply_not_text"),
    ("  ", "empty_reply"),
    ([{"role": "user", "content": "Me?"}], "prompt_differs"),
    ([{"role": "assistant", "content": "See.", "tool_calls": [{}]}], "bad_roles"),
    ("\ud800", "bad_unicode"),
]


def eight(number: int, value: object, **columns: object) -> Row:
    """A row of eight replies of which this one has another value."""
    return {"prompt": "Why?", "responses": [*TEXTS[:number], value, *TEXTS[number + 1 :]], "scores": SCORES, **columns}


def without(number: int, **columns: object) -> Row:
    """The row that never had it."""
    kept = [k for k in range(len(TEXTS)) if k != number]
    return {
        "prompt": "Why?",
        "responses": [TEXTS[k] for k in kept],
        "scores": [SCORES[k] for k in kept],
        **columns,
    }


@pytest.mark.parametrize("loss", ["pairs", "plackett-luce"])
@pytest.mark.parametrize(("value", "why"), UNUSABLE)
def test_the_others_are_compared_as_if_it_had_never_been_there(value: object, why: str, loss: str) -> None:
    for number in (0, 3, 7):
        found = read(eight(number, value), kwise_loss=loss)
        assert found.preference == read(without(number), kwise_loss=loss).preference
        assert [reason for reason, _ in found.left_out] == [why]
    for limit in (2, 5):
        same = {"max_replies": limit, "kwise_loss": loss}
        assert read(eight(3, value), **same).preference == read(without(3), **same).preference


@pytest.mark.parametrize("score", [None, "", math.nan])
def test_a_reply_without_a_score_is_left_out(score: object) -> None:
    found = read({**eight(3, "r3"), "scores": [*SCORES[:3], score, *SCORES[4:]]})
    assert found.preference == read(without(3)).preference
    assert found.left_out == (("bad_scores", "reply 3 of all, counted from 0: no score"),)
    both = read({**eight(3, None), "scores": [*SCORES[:3], score, *SCORES[4:]]})
    assert [reason for reason, _ in both.left_out] == ["reply_not_text"], "it is counted once"
    ranking = sorted(range(8), key=lambda k: -SCORES[k])
    ranked = read({**eight(3, "r3"), "scores": [*SCORES[:3], score, *SCORES[4:]], "ranking": ranking})
    assert ranked.preference == found.preference


def test_a_ranking_ranks_the_others() -> None:
    ranking = sorted(range(8), key=lambda k: -SCORES[k])
    found = read(eight(4, None, scores=None, ranking=ranking))
    assert [replies(found.preference)[k] for k in found.preference.ranking or ()] == [
        TEXTS[k] for k in ranking if k != 4
    ]


def test_with_fewer_than_two_left_the_row_is_dropped_for_the_first() -> None:
    assert cause({"prompt": "Why?", "responses": ["a", None, " "], "scores": [1, 2, 3]}) == "reply_not_text"
    assert cause({"prompt": "Why?", "responses": [" ", None, "a"], "scores": [1, 2, 3]}) == "empty_reply"
    assert cause({"prompt": "Why?", "responses": [" ", "a", "b"], "scores": [1, 2, 2]}) == "no_comparison"


def test_judged_replies_lose_the_comparisons_of_one_that_is_left_out() -> None:
    comparisons = [{"first": 0, "second": 1}, {"first": 3, "second": 0}, {"first": 2, "second": 3, "weight": 2}]
    row = {"prompt": "Why?", "replies": ["a", None, "c", "d"], "comparisons": comparisons, "ranking": [2, 3, 0, 1]}
    found = read(row)
    assert replies(found.preference) == ["a", "c", "d"]
    assert {(c.first, c.second, c.weight) for c in found.preference.comparisons} == {(2, 0, 1.0), (1, 2, 2.0)}
    assert found.preference.ranking == (1, 2, 0)
    assert (found.order, [why for why, _ in found.left_out]) == ((0, 2, 3), ["reply_not_text"])
    assert cause({**row, "comparisons": comparisons[:1]}) == "reply_not_text"
    for seed in range(8):
        drawn = read(row, max_replies=2, seed=seed).preference
        assert len(drawn.comparisons) == 1
        assert set(replies(drawn)) in ({"a", "d"}, {"c", "d"})


RATED = [{"prompt": "Why?", "response": text, "helpfulness": stars} for text, stars in (("a", 1), ("b", 3), ("c", 2))]
UNPAIRED = [{"prompt": "Why?", "completion": text, "label": text != "a"} for text in "abc"]
NECTAR: dict[str, Any] = {
    "prompt": "Why?",
    "answers": [{"answer": text, "rank": rank} for text, rank in (("a", 2), ("b", 1))],
}
ULTRA: dict[str, Any] = {
    "instruction": "Why?",
    "completions": [{"response": text, "overall_score": score} for text, score in (("a", 2), ("b", 1))],
}


@pytest.mark.parametrize(
    ("rows", "more", "why"),
    [
        (RATED, [{**RATED[0], "response": None}], "missing_field"),
        (RATED, [{**RATED[0], "response": " "}], "empty_reply"),
        (RATED, [{**RATED[0], "response": "d", "helpfulness": math.nan}], "bad_scores"),
        (RATED, [{**RATED[0], "response": "d", "images": ["x.png"]}], "media"),
        (UNPAIRED, [{**UNPAIRED[0], "completion": ""}], "empty_reply"),
        (UNPAIRED, [{**UNPAIRED[0], "completion": "d", "label": None}], "missing_field"),
    ],
)
def test_a_row_that_is_one_of_the_replies_to_a_prompt_is_left_out_alone(
    rows: list[dict[str, Any]], more: list[dict[str, Any]], why: str
) -> None:
    found = read(*rows, *more)
    assert (found.preference, [reason for reason, _ in found.left_out]) == (read(*rows).preference, [why])


def test_published_rows_leave_a_reply_out_too() -> None:
    for row, name, bad in (
        (NECTAR, "answers", {"answer": None, "rank": 3}),
        (NECTAR, "answers", {"answer": "c", "rank": None}),
        (ULTRA, "completions", {"response": None, "overall_score": 5}),
    ):
        found = read({**row, name: [*row[name], bad]})
        assert found.preference == read(row).preference
        assert len(found.left_out) == 1


def test_a_label_of_another_kind_still_drops_the_prompt() -> None:
    """A rating called label would otherwise be read where it happens to be 0 or 1."""
    assert cause(*UNPAIRED, {**UNPAIRED[0], "completion": "d", "label": 4}) == "bad_label"


def test_left_out_replies_are_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_jsonl(tmp_path / "k.jsonl", [eight(3, None), without(3), eight(2, " ")])
    (source,) = find_sources([str(tmp_path / "k.jsonl")], "train")
    rules = Rules(source="k", reading=ReadingConfig(), seed=0)
    schema, units = open_units(source, rules)
    halves = [parse_units([unit], source=source, schema=schema, rules=rules)[1] for unit in units]
    tally = Tally(format=schema.label)
    for half in halves:
        tally.add(Tally.from_dict(half.as_dict()))
    report = tally.report(source, used=3, sha256=None)
    assert (report.kept, dict(report.dropped)) == (3, {})
    assert report.as_dict()["left_out_replies"] == {"reply_not_text": 1, "empty_reply": 1}
    example = "k.jsonl:1: reply 3 of all, counted from 0: got null, wanted text or a list of messages"
    assert report.as_dict()["left_out_example"] == example
    with caplog.at_level(logging.WARNING):
        tell_oddities(report)
    (told,) = caplog.messages
    assert "2 replies are left out, and the others of their rows kept: reply_not_text 1, empty_reply 1" in told
    assert "k.jsonl:1: reply 3 of all, counted from 0: got null, wanted text" in told
