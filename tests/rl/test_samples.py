"""Files of prompts with replies are read as they are, or refused with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rewardlab.core.errors import DataError
from rewardlab.core.types import Message
from rewardlab.rl.samples import Samples, read_samples


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_rows_of_texts_and_messages_under_either_name_are_read(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    path = written(
        tmp_path / "samples.jsonl",
        {"prompt": "Hello", "replies": ["Hi.", ""], "gold": [1, 0.5], "more": None},
        {"messages": turns, "responses": ["Hi."], "gold": None},
    )
    assert list(read_samples(path)) == [
        Samples(where=f"{path}:1", prompt="Hello", replies=("Hi.", ""), gold=(1.0, 0.5)),
        Samples(
            where=f"{path}:2",
            prompt=(Message("system", "Be kind."), Message("user", "Hello")),
            replies=("Hi.",),
            gold=None,
        ),
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not valid JSON"),
        ({"replies": ["Hi."]}, "has neither `prompt` nor `messages`"),
        ({"prompt": "Hello", "messages": [], "replies": ["Hi."]}, "has both `prompt` and `messages`"),
        ({"prompt": "Hello"}, "has neither `replies` nor `responses`"),
        ({"prompt": 3, "replies": ["Hi."]}, "the prompt cannot be read"),
        ({"prompt": [{"role": "user"}], "replies": ["Hi."]}, "the prompt cannot be read"),
        ({"prompt": [], "replies": ["Hi."]}, "the prompt is empty"),
        ({"prompt": [{"role": "assistant", "content": "Hi"}], "replies": ["Hi."]}, "ends with a turn of the assistant"),
        ({"prompt": "Hello", "replies": []}, "not a list of texts"),
        ({"prompt": "Hello", "replies": "Hi."}, "not a list of texts"),
        ({"prompt": "Hello", "replies": ["Hi.", None]}, "not a list of texts"),
        ({"prompt": "Hello", "replies": ["Hi."], "gold": [1, 2]}, "not a list of 1 finite numbers"),
        ({"prompt": "Hello", "replies": ["Hi."], "gold": ["1"]}, "not a list of 1 finite numbers"),
        ('{"prompt": "Hello", "replies": ["Hi."], "gold": [NaN]}', "not a list of 1 finite numbers"),
    ],
)
def test_a_row_that_is_none_is_refused_with_file_and_line(row: Any, said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "samples.jsonl", {"prompt": "Hello", "replies": ["Hi."]}, row)
    with pytest.raises(DataError, match=f"{path}:2: .*{said}"):
        list(read_samples(path))


def test_a_file_without_rows_or_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        list(read_samples(written(tmp_path / "empty.jsonl")))
    with pytest.raises(DataError, match="there is no such file"):
        list(read_samples(tmp_path / "none.jsonl"))
