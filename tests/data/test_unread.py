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
from rewardlab.data.unread import unread
from rewardlab.data.winners import ROWS, first_of

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
        return unread(first_of(source), ReadingConfig(), renderer)

    return lines


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


def test_a_strength_that_the_loss_makes_no_use_of_is_told(tmp_path: Path) -> None:
    renderer = build_renderer(make_tokenizer(CHATML), RenderingConfig(max_seq_len=256))
    rows = [PAIR | {"sure": 3}]
    (line,) = unread(rows, ReadingConfig(strength_column="sure"), renderer)
    assert line == (
        "--strength-column sure: the loss makes no use of a strength without --strength-as weight, margin or soft."
    )
    assert not unread(rows, ReadingConfig(strength_column="sure", strength_as="weight"), renderer)


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


@pytest.mark.parametrize(
    ("prompt", "mark"),
    [
        ("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>"),
        ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhy?", "<|start_header_id|>"),
        ("<|prompter|>Why?<|endoftext|><|assistant|>", "<|prompter|>"),
        ("prompter: Why?\nassistant: Hm.\nprompter: So?", "prompter:"),
        ("<s>[INST] Why? [/INST]", "[INST]"),
        ("<bos><start_of_turn>user\nWhy?<end_of_turn>", "<start_of_turn>"),
        ("BEGINNING OF CONVERSATION: USER: Why? ASSISTANT:", "USER:"),
        ("<|system|>\nBe brief.</s>\n<|user|>\nWhy?</s>\n<|assistant|>\n", "<|system|>"),
        ("<｜begin▁of▁sentence｜>Be brief.<｜User｜>Why?<｜Assistant｜>", "<｜User｜>"),
    ],
)
def test_prompts_that_a_chat_template_has_written_already_are_told(told: Any, prompt: str, mark: str) -> None:
    (line,) = told([{"prompt": prompt}] * 2 + [{}])
    assert f'marks such as "{mark}", in 2 of the first 3 rows. Such a text is read as one turn of the user' in line
    assert not told([{"prompt": prompt}] + [{}] * 2), "a text that speaks of them"
    assert not told([{"prompt": prompt}], chat_template="concat"), "texts stay as they are"
    assert not told([{"prompt": [{"role": "user", "content": prompt}]}]), "turns already"


def test_words_that_look_like_turns_are_not_told(told: Any) -> None:
    for prompt in ("What does the USER: do?", "Human: Why?", "Is [INS] a mark? user: no", "A prompter: who?"):
        assert not told([{"prompt": prompt}] * 3)


BEFORE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello! How are you?"}]


@pytest.mark.parametrize(
    ("column", "held", "shown"),
    [
        ("context", "Basil dies in the dark.", '"Basil dies in the dark."'),
        ("input", "Basil dies in the dark.", '"Basil dies in the dark."'),
        ("messages", [*BEFORE, {"role": "user", "content": "Why?"}], '"Hi"'),
        ("conversations", [{"from": "human", "value": "Hi"}], '"Hi"'),
    ],
)
def test_what_stands_before_the_prompt_in_a_column_that_nothing_reads_is_told(
    told: Any, column: str, held: object, shown: str
) -> None:
    (line,) = told([{}, {column: held}, {column: None}], CHATML)
    assert line.startswith(
        f"the column {column} is not read, and in 1 of the first 3 rows it has a text that the row has nowhere else, "
        f"such as {shown}. If it belongs to the prompt"
    )


@pytest.mark.parametrize(
    "row",
    [
        {"context": "gardening"},
        {"context": {"topic": "how to grow basil"}},
        {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "a"}]},
        {"conversation": [{"input": "What was it?", "output": "No idea."}]},
        {"prompt": "Why is  it so?", "context": " Why is\nit so? "},
        {"prompt": "Why is it so?", "input": "Human: Why is it so?\n\nAssistant:"},
        {"prompt": "Why is it so?", "system": "Be brief, please.", "input": "Be brief, please.\nWhy is it so?"},
        {"prompt": 'Why is it "so"?', "messages": '[{"role": "user", "content": "Why is it \\"so\\"?"}]'},
    ],
)
def test_names_and_repeated_turns_are_no_part_of_a_prompt(told: Any, row: dict[str, Any]) -> None:
    assert not told([row] * 2, CHATML)


def test_prompts_that_end_with_a_turn_of_the_assistant_are_told(told: Any) -> None:
    asked = [{"role": "user", "content": "Why?"}]
    (line,) = told([{"prompt": asked}, {"prompt": [*asked, {"role": "assistant", "content": "Because"}]}], CHATML)
    assert line.startswith(
        'the column prompt ends with a turn of the assistant in 1 of the first 2 rows, such as "Because", and the '
        "reply follows as a second one."
    )
    assert not told([{"prompt": [*BEFORE, *asked]}, {"prompt": "Assistant: Because"}], CHATML)


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So it is."}], "label": True},
        {
            "messages": [{"role": "user", "content": "Why is it so?"}],
            "chosen": {"role": "assistant", "content": "a"},
            "rejected": {"role": "assistant", "content": "b"},
        },
    ],
    ids=["the last turn is the reply", "messages are the prompt"],
)
def test_conversations_that_are_read_are_not_told(row: dict[str, Any]) -> None:
    renderer = build_renderer(make_tokenizer(CHATML), RenderingConfig(max_seq_len=256))
    assert not unread([row], ReadingConfig(), renderer)


def test_a_passage_around_the_prompt_is_told(told: Any) -> None:
    row = {"prompt": "Why is it so?", "context": "Basil dies in the dark. Why is it so?"}
    (line,) = told([row], CHATML)
    assert line.startswith("the column context is not read")


def test_an_input_that_belongs_to_an_instruction_is_read(tmp_path: Path) -> None:
    renderer = build_renderer(make_tokenizer(CHATML), RenderingConfig(max_seq_len=256))
    row = {"instruction": "Translate.", "input": "Good morning to you.", "chosen": "a", "rejected": "b"}
    assert not unread([row], ReadingConfig(), renderer)
    assert not unread([row], ReadingConfig(prompt_column="instruction"), renderer)
    (line,) = unread([row | {"prompt": "Translate."}], ReadingConfig(), renderer)
    assert line.startswith("the column input is not read")


def test_prompts_that_speak_of_marks_and_columns_that_are_not_the_prompt_are_not_told(told: Any) -> None:
    written = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    for prompt in (
        "What does [INST] mean?",
        "Why does `<|im_start|>` stand before user?",
        "Is USER: Why? ASSISTANT: a?",
    ):
        assert not told([{"prompt": prompt}] * 3)
    asked = [{"role": "user", "content": "Why?"}]
    for other in ("input", "instruction", "question"):
        assert not told([{"prompt": asked, other: written}] * 3)
    assert not told([{"prompt": asked}] * 3 + [{"prompt": written}]), "of all rows, not of those with texts"


def test_marks_are_looked_for_in_the_column_that_the_format_reads() -> None:
    renderer = build_renderer(make_tokenizer(CHATML), RenderingConfig(max_seq_len=256))
    alpaca = {"instruction": "<|im_start|>user\nWhy?<|im_end|>", "input": "", "chosen": "a", "rejected": "b"}
    (line,) = unread([alpaca], ReadingConfig(), renderer)
    assert line.startswith("the column instruction holds turns")
    named = {"q": alpaca["instruction"], "chosen": "a", "rejected": "b"}
    (line,) = unread([named], ReadingConfig(prompt_column="q"), renderer)
    assert line.startswith("the column q holds turns")


def test_long_texts_with_turns_of_users_are_looked_through_once(told: Any) -> None:
    # Each `USER: ` was searched to the end of the text: of this one in minutes.
    assert not told([{"prompt": "USER: hello\nBOT: fine\n" * 40_000}])
