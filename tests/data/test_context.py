"""Laws of what stands before a prompt in columns of its own: used where it fits, refused by name where not."""

from __future__ import annotations

from typing import Any

import pytest

from parsing import PAIR, assistant, cause, preference, replies, turns, user
from rewardlab.core.types import Message

SYSTEM = Message("system", "Be brief.")
BEFORE = (user("Hi"), assistant("Hello."))
HISTORIES = [[["Hi", "Hello."]], turns(*BEFORE), [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]]
VOTED = {**PAIR, "labels": [1, 0]}
SCORED = {"prompt": "Why?", "responses": ["Because.", "No."], "scores": [1, 0]}
LLAMA = {"conversations": turns(user("Why?")), "chosen": "Because.", "rejected": "No."}
ALPACA = {"instruction": "Why?", "chosen": "Because.", "rejected": "No."}


@pytest.mark.parametrize("row", [PAIR, VOTED, SCORED, LLAMA, ALPACA], ids=str)
@pytest.mark.parametrize("history", HISTORIES)
def test_system_and_history_come_before_the_prompt(row: dict[str, Any], history: object) -> None:
    read = preference({**row, "system": "Be brief.", "history": history})
    assert read.prompt == (SYSTEM, *BEFORE, user("Why?"))
    assert replies(read) == ["Because.", "No."]
    for nothing in (None, "", []):
        assert preference({**row, "system": nothing or None, "history": nothing}) == preference(row)


def test_what_the_prompt_says_already_is_not_repeated() -> None:
    whole = (SYSTEM, *BEFORE, user("Why?"))
    columns = {"system": " Be brief.\n", "history": HISTORIES[0]}
    assert preference({**PAIR, **columns, "prompt": turns(*whole)}).prompt == whole
    assert preference({**PAIR, **columns, "prompt": turns(SYSTEM, user("Why?"))}).prompt == whole
    blank = turns(Message("system", ""), user("Why?"))
    assert preference({**PAIR, "system": "Be brief.", "prompt": blank}).prompt == (SYSTEM, user("Why?"))


@pytest.mark.parametrize("repeated", [(), (user("Why?"),), (SYSTEM, user("Why?"))], ids=len)
def test_a_reply_may_repeat_the_prompt_with_its_system_turn_or_without(repeated: tuple[Message, ...]) -> None:
    row = {**PAIR, "system": "Be brief.", "chosen": turns(*repeated, assistant("Because."))}
    assert preference(row) == preference({**PAIR, "system": "Be brief."})


def test_a_transcript_is_read_after_its_system_turn() -> None:
    row = {**PAIR, "prompt": "\n\nHuman: Why?\n\nAssistant:", "chosen": " Because.\n", "system": "Be brief."}
    assert preference(row) == preference({**PAIR, "system": "Be brief."})
    kept = preference({**row, "chosen": f"{row['prompt']} Because."}, chat_template="concat")
    assert kept.prompt == (SYSTEM, user("\n\nHuman: Why?\n\nAssistant:"))
    assert replies(kept) == [" Because.", "No."]


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ({"prompt": turns(Message("system", "Be long."), user("Why?")), "system": "Be brief."}, "context_differs"),
        ({"prompt": turns(user("A"), assistant("B"), user("Why?")), "history": [["Hi", "Hello."]]}, "context_differs"),
        ({"system": {"role": "system"}}, "bad_roles"),
        ({"system": "\ud83d"}, "bad_unicode"),
        ({"history": "Hi"}, "bad_roles"),
        ({"history": [["Hi"]]}, "bad_roles"),
        ({"history": [["Hi", None]]}, "bad_roles"),
    ],
    ids=str,
)
def test_columns_that_do_not_fit_drop_the_row(columns: dict[str, Any], wanted: str) -> None:
    assert cause({**PAIR, **columns}) == wanted


def test_whole_conversations_have_their_history_and_take_the_system_turn() -> None:
    sides = {"chosen": turns(user("Why?"), assistant("a")), "rejected": turns(user("Why?"), assistant("b"))}
    assert preference({**sides, "system": "Be brief.", "history": "x"}).prompt == (SYSTEM, user("Why?"))
    own = {name: turns(SYSTEM, user("Why?"), assistant(name)) for name in sides}
    assert preference({**own, "system": "Be brief."}).prompt == (SYSTEM, user("Why?"))
    assert cause({**own, "system": "Be long."}) == "context_differs"


@pytest.mark.parametrize("nothing", [None, ""])
def test_without_a_prompt_the_sides_of_a_pair_are_whole_conversations(nothing: str | None) -> None:
    said = {"chosen": turns(user("Why?"), assistant("Because.")), "rejected": turns(user("Why?"), assistant("No."))}
    texts = {name: f"Human: Why?\n\nAssistant: {PAIR[name]}" for name in said}
    for sides in (said, texts):
        assert preference({"prompt": nothing, **sides}) == preference(PAIR)
    assert cause({**PAIR, "prompt": nothing}) == ("missing_field" if nothing is None else "empty_prompt")


def test_both_rows_of_a_pair_in_long_form_have_one_context() -> None:
    rows = [
        {"pair_id": 1, "role": role, "prompt": "Why?", "response": role, "system": "Be brief.", "history": []}
        for role in ("chosen", "rejected")
    ]
    assert preference(*rows).prompt == (SYSTEM, user("Why?"))
    assert cause(rows[0], {**rows[1], "system": "Be long."}) == "prompt_differs"


def test_columns_that_are_named_prompts_keep_what_belongs_to_them() -> None:
    row = {"system": "Be brief.", "question": "Why?", "chosen": "Because.", "rejected": "No."}
    assert preference(row, prompt_column="question").prompt == (SYSTEM, user("Why?"))
    asked = {"instruction": "Translate.", "input": "Why?", "chosen": "Warum?", "rejected": "No."}
    assert preference(asked, prompt_column="instruction") == preference(asked)
    assert preference(asked, prompt_column="instruction").prompt == (user("Translate.\nWhy?"),)
    assert preference(asked, prompt_column="input").prompt == (user("Why?"),)
    assert cause({**asked, "input": ["x"]}, prompt_column="instruction") == "bad_roles"


ASKED = {"prompt": "Why?"}
RATED = {**ASKED, "response": "Because.", "helpfulness": 3}
OTHERS: dict[str, list[dict[str, Any]]] = {
    "judged": [{**ASKED, "replies": ["Because.", "No."], "comparisons": [{"first": 0, "second": 1}]}],
    "rated": [RATED, {**RATED, "response": "No.", "helpfulness": 1}],
    "ranked": [{**ASKED, "answers": [{"answer": "Because.", "rank": 1}, {"answer": "No.", "rank": 2}]}],
    "ultrafeedback": [
        {
            "instruction": "Why?",
            "completions": [{"response": "Because.", "overall_score": 8}, {"response": "No.", "overall_score": 2}],
        }
    ],
    "rewardbench": [{**ASKED, "chosen": ["Because."], "rejected": ["No."], "subset": "x"}],
    "helpsteer2": [{**ASKED, "response_1": "Because.", "response_2": "No.", "preference_strength": -1}],
    "helpsteer3": [{"context": "Why?", "response1": "Because.", "response2": "No.", "overall_preference": -1}],
    "safe-rlhf": [{**ASKED, "response_0": "Because.", "response_1": "No.", "better_response_id": 0}],
}


@pytest.mark.parametrize("rows", OTHERS.values(), ids=OTHERS)
def test_replies_that_are_rated_ranked_or_compared_have_the_turns_before_their_prompt(
    rows: list[dict[str, Any]],
) -> None:
    read = preference(*({**row, "system": "Be brief.", "history": HISTORIES[0]} for row in rows))
    assert read.prompt == (SYSTEM, *BEFORE, user("Why?"))
    assert replies(read) == ["Because.", "No."]
    assert preference(*({**row, "system": None, "history": []} for row in rows)) == preference(*rows)
    assert cause(*({**row, "history": "Hi"} for row in rows)) == "bad_roles"


@pytest.mark.parametrize("columns", [{"system": "Be long."}, {"history": HISTORIES[0]}], ids=str)
def test_rated_replies_of_one_prompt_have_one_context(columns: dict[str, Any]) -> None:
    first, second = OTHERS["rated"]
    assert cause(first, {**second, **columns}) == "prompt_differs"


def test_battles_take_the_system_turn() -> None:
    sides = {f"conversation_{side}": turns(user("Why?"), assistant(side)) for side in "ab"}
    read = preference({**sides, "winner": "model_a", "system": "Be brief."})
    assert read.prompt == (SYSTEM, user("Why?"))
    battle = {"prompt": ["Why?"], "response_a": ["Because."], "response_b": ["No."]}
    outcome = {"winner_model_a": 1, "winner_model_b": 0, "winner_tie": 0}
    assert preference({**battle, **outcome, "system": "Be brief."}).prompt == (SYSTEM, user("Why?"))
