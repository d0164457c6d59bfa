"""Files that are nearly what they should be: read where they can be, refused with file and line where not."""

from __future__ import annotations

import gzip
import json
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from harness.in_memory import load_preferences
from parsing import cause
from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.types import Message, Preference
from rewardlab.data.chat import to_messages
from rewardlab.data.config import ReadingConfig
from rewardlab.data.in_memory import plain_rows
from rewardlab.data.rows import BESIDE_CONTENT, UnusableRowError, read_conversation, show

ROW = {"prompt": "How?", "chosen": "So.", "rejected": "no"}


def load(*paths: Path) -> tuple[Preference, ...]:
    names = [str(path) for path in paths]
    return load_preferences(names, split="train", reading=ReadingConfig(), seed=0, limit=None).preferences


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path, name):
    text = {
        ".json": json.dumps([ROW]),
        ".csv": "prompt,chosen,rejected\nHow?,So.,no\n",
    }.get(Path(name).suffix, json.dumps(ROW) + "\n")
    data = ("\ufeff" + text).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (preference,) = load(tmp_path / name)
    assert preference.prompt == (Message("user", "How?"),)


DEEP = '{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}"
LONG = '{"prompt": "How?", "chosen": "So.", "rejected": "no", "strength": ' + "9" * 5000 + "}"


@pytest.mark.parametrize("line", [DEEP, LONG], ids=["deep", "long"])
def test_json_that_python_cannot_hold_is_refused_with_its_line(tmp_path, line):
    lines = write(tmp_path / "a.jsonl", f"{json.dumps(ROW)}\n{line}\n")
    with pytest.raises(DataError, match=r"a\.jsonl:2: cannot be read \(.+\)\. Fix or remove this line"):
        load(lines)
    whole = write(tmp_path / "b.json", f"[{line}]")
    with pytest.raises(DataError, match=r"b\.json: not valid JSON"):
        load(whole)


def test_a_csv_cell_with_deep_brackets_is_text(tmp_path):
    deep = "[" * 200_000 + "]" * 200_000
    (preference,) = load(write(tmp_path / "a.csv", f"prompt,chosen,rejected\n{deep},So.,no\n"))
    assert preference.prompt[0].content == deep


def test_a_value_nested_too_deep_is_shown_in_words():
    value: list = []
    for _ in range(100_000):
        value = [value]
    assert show(value) == "a list nested too deep to show"


@pytest.mark.parametrize("damage", ["flipped", "cut", "none at all"])
def test_a_damaged_gz_file_is_refused_with_its_name(tmp_path, damage):
    rows = "".join(json.dumps(ROW | {"prompt": f"How {n * 7919 % 1000}?"}) + "\n" for n in range(2000))
    data = bytearray(gzip.compress(rows.encode()))
    if damage == "flipped":
        data[len(data) // 2 : len(data) // 2 + 40] = b"\xff" * 40
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes({"flipped": data, "cut": data[:-200], "none at all": rows.encode()}[damage])
    said = r": it is not compressed by gzip" if damage == "none at all" else r"(: cannot be read after line \d+|:\d+: )"
    with pytest.raises(DataError, match=rf"a\.jsonl\.gz{said}"):
        load(path)


def test_a_column_that_a_csv_file_names_twice_is_refused_by_name(tmp_path):
    path = write(tmp_path / "a.csv", "prompt,chosen,rejected,chosen\nHow?,So.,no,maybe\n")
    with pytest.raises(DataError, match=r"a\.csv:1: the header names the column 'chosen' more than once"):
        load(path)


TURNS = (Message("user", "Hi"), Message("assistant", "Yes?"), Message("user", "How?"))
OPEN = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: How?\n\nAssistant:"


@pytest.mark.parametrize("prompt", [OPEN, OPEN + " ", OPEN.lstrip(), OPEN.replace("Hi", " Hi \n")])
def test_a_transcript_in_a_prompt_column_becomes_its_turns(tmp_path, prompt):
    rows = [
        {"prompt": prompt, "chosen": " So.", "rejected": " no"},
        {"chosen": f"{prompt.rstrip()} So.", "rejected": f"{prompt.rstrip()} no"},
    ]
    files = [write(tmp_path / f"{n}.jsonl", json.dumps(row)) for n, row in enumerate(rows)]
    split, whole = load(*files)
    assert split.prompt == whole.prompt == TURNS
    assert split.replies == whole.replies == ((Message("assistant", "So."),), (Message("assistant", "no"),))
    several = {"prompt": prompt, "responses": [" So.", " no"], "scores": [1, 0]}
    (ranked,) = load(write(tmp_path / "k.jsonl", json.dumps(several)))
    assert (ranked.prompt, ranked.replies) == (split.prompt, split.replies)


@pytest.mark.parametrize(
    "prompt",
    [
        "Human: beings are many",
        "What is a Human: in the code below?\n\nHuman: x\n\nAssistant:",
        "Human: hello\n\nAssistant: go on",
        "Continue:\n\nHuman: Hi\n\nAssistant:",
        "Human: this ends on the word Assistant:",
        "Humans and machines\n\nAssistant:",
    ],
)
def test_ordinary_text_that_names_a_human_is_one_turn(tmp_path, prompt):
    row = {"prompt": prompt, "chosen": " So.", "rejected": " no"}
    (preference,) = load(write(tmp_path / "a.jsonl", json.dumps(row)))
    assert preference.prompt == (Message("user", prompt),)
    assert preference.replies[0] == (Message("assistant", " So."),)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"role": "robot", "content": "a"}, "unknown role 'robot'. Roles are system, user, assistant, tool"),
        ({"role": "assistant", "content": "a", "tool_calls": [{}]}, "a message has tool_calls"),
        ({"role": "assistant", "content": None}, "needs a role and a text .* and content of type NoneType"),
    ],
)
def test_messages_that_cannot_be_read_as_they_are_meant_are_refused(message, what):
    with pytest.raises(RenderError, match=what):
        to_messages([{"role": "user", "content": "How?"}, message])
    assert to_messages([{"role": "tool", "content": "3", "tool_calls": []}]) == (Message("tool", "3"),)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "Why "}, {"type": "text", "text": "so?"}]},
        {"from": "human", "value": "Why so?"},
        {"from": "user", "value": [{"type": "text", "text": "Why so?"}]},
    ],
)
def test_a_message_is_read_for_a_score_as_it_is_in_training(message: dict[str, Any]) -> None:
    assert to_messages([message]) == read_conversation([message]) == (Message("user", "Why so?"),)


def test_a_part_that_is_no_text_is_refused_by_its_type() -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "SECRET"}}]
    with pytest.raises(RenderError, match='a message has more than text: .* type "image_url".* Leave it out') as told:
        to_messages([{"role": "user", "content": parts}])
    assert "SECRET" not in str(told.value)


@pytest.mark.parametrize("name", BESIDE_CONTENT)
def test_what_the_model_wrote_beside_its_content_is_refused_by_name(name: str) -> None:
    message = {"role": "assistant", "content": "Four.", name: "Two and two."}
    with pytest.raises(RenderError, match=f"a message has {name}, .* or take {name} out"):
        to_messages([message])
    with pytest.raises(UnusableRowError, match=f"bad_roles: a turn with {name}"):
        read_conversation([message])
    for nothing in (None, "", []):
        assert to_messages([message | {name: nothing}]) == (Message("assistant", "Four."),)


@pytest.mark.parametrize("name", ["images", "audio", "videos"])
def test_text_with_images_or_sound_beside_it_is_refused(name: str) -> None:
    message = {"role": "user", "content": "What is this?", name: ["x.png"]}
    with pytest.raises(RenderError, match=f"a message has {name} beside its text"):
        to_messages([message])
    with pytest.raises(UnusableRowError, match=f"media: a turn with {name}"):
        read_conversation([message])
    assert to_messages([message | {name: []}]) == (Message("user", "What is this?"),)


def test_decimals_are_numbers_and_a_label_of_another_type_is_refused_by_name() -> None:
    row = {"prompt": "Q", "chosen": "good", "rejected": "bad"}
    held = [{**row, "label": label} for label in (Decimal(0), Decimal("0.25"), Fraction(1, 2), Decimal("NaN"))]
    assert [row["label"] for _, row in plain_rows(held, "rows")] == [0.0, 0.25, 0.5, None]
    ((_, odd),) = plain_rows([{**row, "label": date(2026, 1, 1), "when": date(2026, 1, 1)}], "rows")
    assert cause(odd) == "bad_label"
    assert cause({**odd, "label": 1.0, "rejected": odd["when"]}) == "reply_not_text"
