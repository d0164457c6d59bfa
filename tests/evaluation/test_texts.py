"""Texts of judged rows are found again in the files they came from, or it is said why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rewardlab.core.types import Comparison, Message, ScoreRow, prompt_key
from rewardlab.data.finding import find_sources
from rewardlab.evaluation.texts import find_texts


def rows_of(path: Path, num: int, *, replies: int = 2) -> list[ScoreRow]:
    """Score rows of the first lines of a file."""
    (source,) = find_sources([str(path)], "test")
    return [
        ScoreRow(
            preference_id=f"{source.label}:{number + 1}",
            source=source.name,
            prompt_key=prompt_key((Message(role="user", content=f"Question {number}"),)),
            reply=reply,
            score=float(-reply),
            num_tokens=5,
            prompt_tokens=2,
            truncated_tokens=0,
            comparisons=(Comparison(first=0, second=1),) if reply == 0 else (),
        )
        for number in range(num)
        for reply in range(replies)
    ]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twenty pairs whose true probabilities are known."""
    rows = [
        {
            "prompt": f"Question {number}",
            "chosen": f"good {number}",
            "rejected": f"bad {number}",
            "true_probability": 0.9 if number % 2 else 0.3,
        }
        for number in range(20)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def keys(rows: list[ScoreRow]) -> list[tuple[str, str]]:
    """Source and id of rows."""
    return [(row.source, row.preference_id) for row in rows]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("test", {"dataset": [], "test_dataset": ["{data}"]}),
        ("selection", {"dataset": ["{data}"], "hf_split": "train"}),
        ("step_20", {"dataset": [], "eval_dataset": ["{data}"]}),
        ("eval", {"dataset": ["{data}"], "hf_split": "test"}),
        ("cross_validated", {"dataset": ["{data}"]}),
    ],
)
def test_texts_are_found_in_the_data_of_the_evaluation(name: str, config: dict, data: Path) -> None:
    rows = rows_of(data, 20)
    settings = {key: [str(data)] if value == ["{data}"] else value for key, value in config.items()}
    found = find_texts(settings, name, keys(rows[6:8]), rows)
    ((key, preference),) = found.preferences.items()
    assert key == (rows[6].source, "pairs.jsonl:4")
    assert [reply[-1].content for reply in preference.replies] == ["good 3", "bad 3"]
    assert found.problems == ()


def test_the_turns_of_all_that_was_judged_are_counted_where_the_prompt_is_still_the_same(data: Path) -> None:
    rows = rows_of(data, 20)
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    lines[3]["prompt"] = "Another question"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    turns = find_texts({"test_dataset": [str(data)]}, "test", [], rows).turns
    assert turns == {key: 2 for key in keys(rows) if key[1] != "pairs.jsonl:4"}


def test_the_ceiling_is_the_mean_of_the_better_side_of_the_true_probabilities(data: Path) -> None:
    rows = rows_of(data, 20)
    found = find_texts({"test_dataset": [str(data)]}, "test", [], rows)
    assert found.ceiling is not None
    assert found.ceiling.value == pytest.approx((0.9 + 0.7) / 2)
    assert found.ceiling.n == 20


def test_the_ceiling_of_sure_probabilities_stays_a_share(data: Path) -> None:
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["true_probability"] = 0.5 if number == 0 else 1.0
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = find_texts({"test_dataset": [str(data)]}, "test", [], rows_of(data, 20)).ceiling
    assert found is not None
    assert (found.value, found.high) == (0.975, 1.0)
    assert 0.5 <= found.low < 0.975


def test_there_is_no_ceiling_where_one_probability_is_missing(data: Path) -> None:
    lines = data.read_text().splitlines()
    lines[4] = json.dumps({name: value for name, value in json.loads(lines[4]).items() if name != "true_probability"})
    data.write_text("\n".join(lines))
    assert find_texts({"test_dataset": [str(data)]}, "test", [], rows_of(data, 20)).ceiling is None


def test_a_line_that_holds_another_prompt_now_gives_no_texts(data: Path) -> None:
    rows = rows_of(data, 20)
    lines = data.read_text().splitlines()
    data.write_text("\n".join(lines[1:] + lines[:1]))
    assert find_texts({"test_dataset": [str(data)]}, "test", keys(rows), rows).preferences == {}


def test_a_preference_of_which_replies_were_lost_gives_no_texts_and_says_why(data: Path) -> None:
    rows = rows_of(data, 20, replies=3)
    found = find_texts({"test_dataset": [str(data)]}, "test", keys(rows[:1]), rows)
    assert found.preferences == {}
    assert found.problems == ("pairs.jsonl:1: some of its replies were not scored, so it is unknown which were.",)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"test_dataset": ["gone.jsonl"]}, "gone.jsonl"),
        ({"test_dataset": ["someone/on-the-hub"]}, "from the hub"),
        ({"test_dataset": 3, "seed": "x", "ties": 7}, None),
        ({}, None),
    ],
)
def test_data_that_cannot_be_read_are_named_and_nothing_is_fetched(config: dict, words: str | None, data: Path) -> None:
    rows = rows_of(data, 3)
    found = find_texts(config, "test", keys(rows), rows)
    assert found.preferences == {}
    assert words is None or words in " ".join(found.problems)


def test_lines_that_are_no_json_are_named(data: Path) -> None:
    rows = rows_of(data, 20)
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:5], '{"prompt": ', *lines[6:]]))
    found = find_texts({"test_dataset": [str(data)]}, "test", keys(rows[-1:]), rows)
    assert "pairs.jsonl:6" in " ".join(found.problems)
