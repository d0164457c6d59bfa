"""What others give to a chat template and a run here does not is told, where it would change what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common import CHATML, make_tokenizer
from rewardlab.core.files import write_jsonl
from rewardlab.data.config import ReadingConfig, RenderingConfig
from rewardlab.data.finding import find_sources
from rewardlab.data.templates import build_renderer
from rewardlab.data.unread import ROWS, unread

THINKING = "{% if enable_thinking is defined and enable_thinking is false %}{{ 'No thoughts.' }}{% endif %}" + CHATML
NAMING = CHATML.replace("message['role']", "(message.name or message['role'])")
PAIR = {"prompt": "Why?", "chosen": "a", "rejected": "b"}
OFF = {"enable_thinking": False}


@pytest.fixture
def told(tmp_path: Path) -> Any:
    def lines(rows: list[dict[str, Any]], template: str = THINKING, **rendering: Any) -> list[str]:
        write_jsonl(tmp_path / "rows.jsonl", [PAIR | row for row in rows])
        (source,) = find_sources([str(tmp_path / "rows.jsonl")], "train")
        renderer = build_renderer(make_tokenizer(template), RenderingConfig(max_seq_len=256, **rendering))
        return unread(source, ReadingConfig(), renderer)

    return lines


def lines_of(folder: Path, rows: list[dict[str, Any]], **reading: Any) -> list[str]:
    write_jsonl(folder / "rows.jsonl", rows)
    (source,) = find_sources([str(folder / "rows.jsonl")], "train")
    renderer = build_renderer(make_tokenizer(CHATML), RenderingConfig(max_seq_len=256))
    return unread(source, ReadingConfig(**reading), renderer)


def test_a_verdict_that_nothing_reads_is_told(tmp_path: Path) -> None:
    # Replies in the order in which they were shown, and which of them won: without the label every row says that the
    # first did, and a model of these labels is worth nothing.
    rows = [{"q": f"q {n}", "a": f"a {n}", "b": f"b {n}", "winner": "AB"[n % 2], "strength": n} for n in range(6)]
    flags = {"prompt_column": "q", "chosen_column": "a", "rejected_column": "b"}
    (line,) = lines_of(tmp_path, rows, **flags)
    assert line == (
        "the column winner is not read: the reply in a counts as the better one in every row. If winner (A, B) says "
        "which of the two is, name it with --label-column winner, and with --map-label VALUE=1 what means a, with "
        "VALUE=0 what means b, with VALUE=0.5 a tie."
    )
    assert not lines_of(tmp_path, rows, label_column="winner", map_label=("A=1", "B=0"), **flags)
    for name, values in (("preferred_response", (1, 2)), ("Human_Preference", ("left", "right", "tie"))):
        named = [PAIR | {"chosen": f"a {n}", name: values[n % len(values)]} for n in range(6)]
        assert f"the column {name} is not read" in lines_of(tmp_path, named)[0]


def test_columns_that_are_no_verdict_are_not_told(tmp_path: Path) -> None:
    for more in (
        [{"winner": "A"}, {"winner": "A"}],  # the same in every row: the rows are sorted already
        [{"winner": f"model {n}"} for n in range(9)],
        [{"preference": {"a": 1}}, {"preference": {"b": 1}}],
        [{"preference_strength": n % 2} for n in range(4)],
        [{"answer": "AB"[n % 2]} for n in range(4)],
        [{"winner": "AB"[n % 2], "label": n % 2} for n in range(4)],
    ):
        assert not lines_of(tmp_path, [PAIR | {"chosen": f"a {n}"} | row for n, row in enumerate(more)])


def test_arguments_of_rows_are_told_with_the_flag_that_gives_them(told: Any) -> None:
    for given in (OFF, OFF | {"unknown": 1, "tone": None}, '{"enable_thinking": false}'):
        (line,) = told([{"chat_template_kwargs": given}] * 2)
        assert line == (
            "the column chat_template_kwargs is not read; --template-arguments enable_thinking=false gives the chat "
            "template the same for all rows, in training and wherever the model scores."
        )
    two = THINKING + "{# tone #}"
    (line,) = told([{"chat_template_kwargs": OFF | {"tone": "very dry"}}], two, template_arguments=("tone=dry",))
    assert """--template-arguments enable_thinking=false 'tone="very dry"' gives""" in line


def test_arguments_that_hold_anyway_or_change_nothing_are_not_told(told: Any) -> None:
    assert not told([{"chat_template_kwargs": OFF}], template_arguments=("enable_thinking=false",))
    assert told([{"chat_template_kwargs": OFF}], template_arguments=("enable_thinking=true",))
    assert not told([{"chat_template_kwargs": OFF}], CHATML), "the template does not know it"
    for nothing in ({}, None, "", "text", {"enable_thinking": None}):
        assert not told([{"chat_template_kwargs": nothing}])


def test_rows_of_different_arguments_are_told_wherever_they_begin(told: Any) -> None:
    for other in ({"chat_template_kwargs": {"enable_thinking": True}}, {}, {"chat_template_kwargs": None}):
        (line,) = told([{"chat_template_kwargs": OFF}] * 3 + [other])
        assert 'rows have different ones, such as {"enable_thinking": false} and {' in line
        assert "what is to differ belongs into the texts" in line
    assert told([{}] * (ROWS - 1) + [{"chat_template_kwargs": OFF}])
    assert not told([{}] * ROWS + [{"chat_template_kwargs": OFF}]), "as far as rows are looked at"


def test_names_of_messages_are_told_where_the_template_writes_them(told: Any) -> None:
    named = {"prompt": [{"role": "user", "name": "ann", "content": "Why?", "weight": 1, "train": None}]}
    (line,) = told([{}, named], NAMING)
    assert line.startswith("messages have `name`, which others give to this chat template, and which changes what")
    assert not told([named], CHATML)
    assert not told([named], CHATML + "{# its name #}"), "it is mentioned, and not written"
    assert not told([{"prompt": [{"role": "user", "name": "", "content": "Why?"}]}], NAMING)
    replies = {"chosen": [{"role": "assistant", "name": "bot", "content": "a"}]}
    assert len(told([replies], NAMING)) == 1


def test_a_system_prompt_of_a_later_row_is_told(told: Any) -> None:
    (line,) = told([{"system_prompt": None}, {"system_prompt": "Be brief."}])
    assert line == "the column system_prompt is not read; where it is called system, it becomes the first turn."
