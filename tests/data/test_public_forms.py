"""Laws of forms that public datasets have in common: whole conversations beside a prompt, scores of both sides, tools,
later votes of a session."""

from __future__ import annotations

import json

import pytest

from parsing import PAIR, assistant, cause, preference, read, replies, turns, user
from rewardlab.core.errors import DataError
from rewardlab.core.types import Message
from rewardlab.data.formats.known import recognise
from rewardlab.data.rows import UnusableRowError

SYSTEM = Message("system", "Be brief.")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


class TestConversationsBesideTheirPrompt:
    @pytest.mark.parametrize(
        "before",
        [(SYSTEM, user("Why?")), (user("Hi"), assistant("Hello."), user("Why?")), (user(" Why?\n"),)],
        ids=str,
    )
    @pytest.mark.parametrize("prompt", ["Why?", turns(user("Why?"))], ids=["text", "turn"])
    def test_all_turns_up_to_it_are_the_prompt(self, before: tuple[Message, ...], prompt: object) -> None:
        sides = {name: turns(*before, assistant(PAIR[name])) for name in ("chosen", "rejected")}
        row = preference({"prompt": prompt, **sides})
        assert row.prompt == before
        assert replies(row) == ["Because.", "No."]
        assert preference({"prompt": prompt, **sides, "system": "Be brief."}).prompt[0] == SYSTEM

    def test_conversations_that_begin_with_it_are_read_as_before(self) -> None:
        more = (assistant("a"), user("And?"))
        sides = {name: turns(user("Why?"), *more, assistant(PAIR[name])) for name in ("chosen", "rejected")}
        row = preference({"prompt": "Why?", **sides})
        assert row.prompt == (user("Why?"),)
        assert row.replies[0] == (*more, assistant("Because."))

    def test_conversations_with_other_prompts_are_dropped(self) -> None:
        sides = {name: turns(SYSTEM, user("How?"), assistant(PAIR[name])) for name in ("chosen", "rejected")}
        assert cause({"prompt": "Why?", **sides}) == "prompt_differs"
        one = {"chosen": turns(SYSTEM, user("Why?"), assistant("a")), "rejected": turns(user("Why?"), assistant("b"))}
        assert cause({"prompt": "Why?", **one}) == "prompt_differs"
        other = turns(Message("system", "Be long."), user("Why?"), assistant("b"))
        assert cause({"prompt": "Why?", **one, "rejected": other}) == "prompt_differs"
        assert cause({"prompt": "Be brief.", **one, "rejected": one["chosen"]}) == "prompt_differs"
        reply = {"prompt": "Why?", "chosen": turns(assistant("a"), user("Why?"), assistant("b")), "rejected": "c"}
        assert len(preference(reply).replies[0]) == 3


class TestScoresOfBothSides:
    @pytest.mark.parametrize(
        ("chosen", "rejected"),
        [
            ("score_chosen", "score_rejected"),
            ("chosen_score", "rejected_score"),
            ("chosen_rating", "rejected_rating"),
            ("rating_chosen", "rating_rejected"),
            ("chosen-rating", "rejected-rating"),
            ("chosen_avg_rating", "rejected_avg_rating"),
        ],
    )
    def test_their_difference_is_the_strength_with_a_prompt_or_without(self, chosen: str, rejected: str) -> None:
        whole = {name: turns(user("Why?"), assistant(PAIR[name])) for name in ("chosen", "rejected")}
        for row in (PAIR, whole):
            scored = {**row, chosen: 8.0, rejected: "3"}
            (one,) = preference(scored, strength_as="margin").comparisons
            assert (one.label, one.strength, one.margin) == (1.0, 5.0, 5.0)
            assert preference({**scored, "strength": 2}).comparisons[0].strength == 2.0
            assert preference({**scored, rejected: 9}).comparisons[0].strength is None
            assert cause({**scored, rejected: 9}, strength_as="margin") == "bad_strength"
            (turned,) = preference({**scored, rejected: 9, "label": 0}, strength_as="margin").comparisons
            assert (turned.label, turned.margin) == (0.0, 1.0)
            assert cause({**scored, "label": 0}, strength_as="margin") == "bad_strength"
            # A tie prefers no side, so that both orders of its scores mean the same.
            for worse in (3, 13):
                (tie,) = preference({**scored, rejected: worse, "label": 0.5}, strength_as="weight").comparisons
                assert (tie.label, tie.weight) == (0.5, 5.0)
            # More than any strength may be is none, and no reason to lose the pair.
            assert preference({**scored, chosen: 1e16}).comparisons[0].strength is None
            assert cause({**scored, chosen: 1e16}, strength_as="margin") == "bad_strength"
            if "prompt" not in row or chosen != "score_chosen":
                assert preference({**scored, rejected: None}).comparisons[0].strength is None
                assert cause({**scored, rejected: None}, strength_as="margin") == "missing_strength"


class TestTools:
    @pytest.mark.parametrize(
        "tools", [[TOOL], json.dumps([TOOL]), json.dumps([TOOL], indent=1), str([TOOL]), [{"name": "f"}]], ids=str
    )
    def test_a_row_that_defines_tools_is_dropped_by_name(self, tools: object) -> None:
        assert cause({**PAIR, "tools": tools}) == "tools"
        with pytest.raises(UnusableRowError, match="tools: tools is .*which the prompt would lack; if it does, take"):
            read({**PAIR, "tools": tools})

    @pytest.mark.parametrize(
        "tools", [None, "", "[]", [], ["hammer"], "hammer", "[a", '["{"]', 5, "[" * 100_000], ids=str
    )
    def test_what_defines_none_is_ignored_like_other_columns(self, tools: object) -> None:
        assert read({**PAIR, "tools": tools}) == read(PAIR)


ARENA = {
    "conversation_a": turns(user("Why?"), assistant("No.")),
    "conversation_b": turns(user("Why?"), assistant("Because.")),
    "winner": "model_b",
}


class TestArena:
    def test_conversations_may_be_json_texts(self) -> None:
        texts = {name: json.dumps(ARENA[name]) for name in ("conversation_a", "conversation_b")}
        assert preference({**ARENA, **texts}) == preference(ARENA)
        assert replies(preference({**ARENA, **texts})) == ["Because.", "No."]
        assert cause({**ARENA, "conversation_a": "[{"}) == "reply_not_text"

    @pytest.mark.parametrize("as_text", [False, True])
    def test_a_later_vote_without_the_turns_before_it_is_dropped(self, as_text: bool) -> None:
        said = [{"user": {}, "model_side_a": {}, "model_side_b": {}}]
        full = [json.dumps(said * n) if as_text else said * n for n in range(3)]
        assert preference({**ARENA, "evaluation_order": 1, "full_conversation": full[2]}) == preference(ARENA)
        assert preference({**ARENA, "evaluation_order": 2, "full_conversation": full[1]}) == preference(ARENA)
        assert cause({**ARENA, "evaluation_order": 2, "full_conversation": full[2]}) == "context_differs"
        assert cause({**ARENA, "evaluation_order": 2}) == "context_differs"

    def test_another_column_of_that_name_is_ignored(self) -> None:
        assert preference({**ARENA, "evaluation_order": "first"}) == preference(ARENA)


def test_objects_in_cells_of_tables_are_read_and_never_taken_for_a_question() -> None:
    asked = {"full_text": "Why?", "id": "1"}
    answers = {"answer_0": "No.", "score_0": -0.5, "answer_1": "Because.", "score_1": 0.5}
    assert preference({"question": json.dumps(asked), **answers}) == preference({"question": asked, **answers})
    assert preference({"question": str(asked), **answers}) == preference({"question": asked, **answers})
    assert cause({"question": str(asked)[:-1], **answers}) == "bad_roles"
    for text in ("{Why?}", "[1, 2]", '{"a": 1}', "{full_text} of what?"):
        assert preference({"question": text, **answers}).prompt == (user(text),)
    info, texts = {"post": "I bought basil."}, [{"text": "a"}, {"text": "b"}]
    summed = {"info": info, "summaries": texts, "choice": 1}
    assert preference({**summed, "info": json.dumps(info)}) == preference(summed)
    before = [["Hi", "Hello."]]
    assert preference({**PAIR, "history": json.dumps(before)}) == preference({**PAIR, "history": before})
    assert preference({**PAIR, "history": "[]"}) == preference(PAIR)


def test_answers_without_votes_are_told_of_other_formats() -> None:
    with pytest.raises(Exception, match=r"match no known schema.*The nearest formats: (?!Stack Exchange)"):
        read({"question": "Why?", "answers": [{"text": "Because."}]})


ONE_GOOD = {"prompt": "Why?", "response": "c", "messages": turns(user("Why?"), assistant("c")), "label": 1}


@pytest.mark.parametrize(
    "row",
    [
        ARENA,
        {"prompt": "Why?", "answers": [{"answer": "a", "rank": 1}, {"answer": "b", "rank": 2}]},
        {"instruction": "Why?", "completions": [{"response": t, "overall_score": s} for s, t in enumerate("ab")]},
    ],
    ids=["arena", "nectar", "ultrafeedback"],
)
def test_columns_of_a_good_reply_beside_those_of_another_format_are_ignored(row: dict[str, object]) -> None:
    assert preference({**ONE_GOOD, **row}) == preference(row)


def test_an_empty_cell_for_the_rejected_reply_leaves_the_conversation() -> None:
    sides = [turns(user("Why?"), assistant(text)) for text in ("a", "b")]
    row = {"messages": sides[0], "rejected_response": "", "rejected_messages": sides[1]}
    assert replies(preference(row)) == ["a", "b"]
    assert cause({**row, "rejected_messages": ""}) == "empty_reply"


@pytest.mark.parametrize("models", ["nm", "no", "on", "mg", "gg", "n"])
def test_rated_responses_are_those_of_the_models_that_the_annotations_name(models: str) -> None:
    # Those of one judge, who is named in each, were taken for ratings of a model, and all rows were dropped.
    row = {
        "instruction": "Hi",
        "responses": [{"model": model, "response": f"Hello, {model}!"} for model in "mno"],
        "annotations": [{"model": model, "rating": 4 + n} for n, model in enumerate(models)],
    }
    if models in ("nm", "no", "on"):  # a first row of which one response has no rating says as much as one of all
        assert recognise(row, "x:1").name.startswith("CodeUltraFeedback")
        return
    with pytest.raises(DataError, match=r"match no known schema.*The nearest formats: (?!CodeUltra)"):
        recognise(row, "x:1")
