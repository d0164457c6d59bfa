"""Laws of reading one row: every schema gives the preference it means, every fault its own cause."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from parsing import KWISE, PAIR, PROMPT, assistant, cause, preference, read, replies, turns, user
from rewardlab.core.errors import DataError
from rewardlab.core.types import Conversation, Message
from rewardlab.data.config import ReadingConfig
from rewardlab.data.formats import SCHEMAS, read_rows, recognise
from rewardlab.data.judgements import Rules
from rewardlab.data.rows import CAUSES, SHOWN_CHARACTERS, UnusableRowError

SHP = {"history": "Why?", "human_ref_A": "a", "human_ref_B": "b", "labels": 1, "score_ratio": 3.0}


class TestPairs:
    def test_texts_are_one_user_and_one_assistant_turn(self) -> None:
        row = preference(PAIR)
        assert row.prompt == PROMPT
        assert row.replies == ((assistant("Because."),), (assistant("No."),))
        assert [(c.first, c.second, c.label, c.weight, c.margin) for c in row.comparisons] == [(0, 1, 1.0, 1.0, 0.0)]
        assert (row.id, row.source, row.ranking) == ("rows.jsonl:7", "rows", (0, 1))

    @pytest.mark.parametrize(
        "side",
        [
            "Because.",
            turns(assistant("Because.")),
            *turns(assistant("Because.")),
            {"from": "gpt", "value": "Because."},
            turns(user("Why?"), assistant("Because.")),
            [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}],
        ],
    )
    @pytest.mark.parametrize("prompt", ["Why?", turns(user("Why?")), [{"from": "human", "value": "Why?"}]])
    def test_text_reply_turns_and_whole_conversations_mean_the_same(self, side: object, prompt: object) -> None:
        assert preference({**PAIR, "prompt": prompt, "chosen": side}) == preference(PAIR)

    def test_single_messages_beside_messages_are_the_replies_to_them(self) -> None:
        sides = {name: {"role": "assistant", "content": PAIR[name]} for name in ("chosen", "rejected")}
        row = {"messages": turns(user("Why?")), **sides}
        assert preference(row) == preference(PAIR)
        assert cause({**row, "messages": None}) == "reply_not_text"
        assert cause({**row, "chosen": {"role": "user", "content": "Because."}}) == "prompt_differs"
        assert preference({"prompt": "Why?", "responses": list(sides.values()), "scores": [1, 0]}).replies == (
            preference(PAIR).replies
        )

    def test_a_reply_may_be_several_turns(self) -> None:
        reply = (assistant("Because."), user("And?"), assistant("So."))
        assert preference({**PAIR, "chosen": turns(*reply)}).replies[0] == reply

    def test_an_empty_system_turn_and_any_unicode_survive_as_they_are(self) -> None:
        prompt = (Message("system", ""), user(" Ünïcödé\u00a0👩‍🚀\r\n "))
        row = preference({**PAIR, "prompt": turns(*prompt), "chosen": " e\u0301 \n"})
        assert row.prompt == prompt
        assert row.replies[0] == (assistant(" e\u0301 \n"),)

    @pytest.mark.parametrize(("label", "ranking"), [(1, (0, 1)), (0, (1, 0)), (0.7, None), (0.5, None), ("0.25", None)])
    def test_the_label_is_kept_and_only_certain_ones_rank(self, label: object, ranking: object) -> None:
        row = preference({**PAIR, "label": label})
        assert row.comparisons[0].label == float(str(label))
        assert row.ranking == ranking

    @pytest.mark.parametrize("label", [-0.1, 1.1, math.nan, "yes", True, [1], 10**400])
    def test_a_label_outside_0_to_1_is_dropped(self, label: object) -> None:
        assert cause({**PAIR, "label": label}) == "bad_label"

    def test_unicode_with_half_a_surrogate_pair_is_dropped(self) -> None:
        assert cause({**PAIR, "chosen": "\ud83d"}) == "bad_unicode"
        with pytest.raises(UnusableRowError, match="in an assistant turn, at character 2"):
            read({**PAIR, "chosen": turns(assistant("a\ud83d"))})

    def test_arrays_beside_the_content_are_read_as_the_lists_that_they_are(self) -> None:
        def with_calls(calls: object) -> dict[str, object]:
            return {**PAIR, "chosen": [{"role": "assistant", "content": "a", "tool_calls": calls, "images": calls}]}

        assert preference(with_calls(np.array([]))).replies[0] == (assistant("a"),)
        assert cause(with_calls(np.array([{"name": "f"}, {"name": "g"}]))) == "bad_roles"
        assert cause({**with_calls(None), "images": np.array([1, 2])}) == "media"

    @pytest.mark.parametrize("column", ["prompt", "chosen", "rejected"])
    def test_a_null_field_is_dropped(self, column: str) -> None:
        assert cause({**PAIR, column: None}) == "missing_field"

    def test_a_later_row_without_a_needed_column_is_dropped(self) -> None:
        rules = Rules(source="rows", reading=ReadingConfig(), seed=0)
        with pytest.raises(UnusableRowError, match="missing_field: no 'rejected'"):
            read_rows([{"prompt": "a", "chosen": "b"}], schema=recognise(PAIR, "x:1"), place="x:2", rules=rules)

    @pytest.mark.parametrize("reply", [5, {"content": "a"}, True, 1.5])
    def test_a_reply_that_is_no_text_is_dropped(self, reply: object) -> None:
        assert cause({**PAIR, "chosen": reply}) == "reply_not_text"

    @pytest.mark.parametrize("reply", ["", " \n", [], turns(user("Why?")), turns(assistant(" "))])
    def test_a_reply_without_text_is_dropped(self, reply: object) -> None:
        assert cause({**PAIR, "rejected": reply}) == "empty_reply"

    def test_replies_that_differ_in_outer_white_space_only_are_identical(self) -> None:
        assert cause({**PAIR, "chosen": "No.\n"}) == "identical_replies"
        assert cause({**PAIR, "chosen": turns(assistant(" No."))}) == "identical_replies"

    @pytest.mark.parametrize("prompt", ["", "  ", [], turns(user(" ")), turns(Message("system", "Be kind."), user(""))])
    def test_a_prompt_without_text_is_dropped(self, prompt: object) -> None:
        assert cause({**PAIR, "prompt": prompt}) == "empty_prompt"

    def test_a_conversation_with_another_prompt_is_dropped(self) -> None:
        assert cause({**PAIR, "chosen": turns(user("How?"), assistant("Because."))}) == "prompt_differs"

    @pytest.mark.parametrize(
        "reply",
        [
            [{"role": "narrator", "content": "a"}],
            [{"role": "assistant", "content": None}],
            [{"role": "assistant", "content": [{"type": "text", "text": None}]}],
            [{"role": "assistant", "content": [{"text": "a"}]}],
            [{"role": "assistant", "content": []}],
            [{"role": "assistant", "content": "a", "tool_calls": [{"name": "f"}]}],
            [{"from": "assistent", "value": "a"}],
            ["a"],
            turns(assistant("a"), user("b")),
            turns(user("Why?"), user("And?"), assistant("a")),
        ],
    )
    def test_turns_that_are_no_reply_are_dropped(self, reply: object) -> None:
        assert cause({**PAIR, "chosen": reply}) == "bad_roles"

    @pytest.mark.parametrize(
        "name", ["tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "refusal"]
    )
    def test_a_turn_of_which_the_content_is_only_a_part_is_dropped(self, name: str) -> None:
        reply = {"role": "assistant", "content": "Because."}
        assert cause({**PAIR, "chosen": [{**reply, name: "x"}]}) == "bad_roles"
        with pytest.raises(
            UnusableRowError, match=f"a turn with {name}, of which the content alone .*: write it into the content"
        ):
            read({**PAIR, "prompt": [{"role": "user", "content": "Why?", name: {"a": 1}}]})
        assert all(preference({**PAIR, "chosen": [{**reply, name: empty}]}).replies for empty in (None, "", []))

    def test_content_in_text_parts_is_the_joined_text(self) -> None:
        text = {"type": "text", "text": "Be", "image": None}
        for names in (("role", "content", "assistant"), ("from", "value", "gpt")):
            reply = {names[0]: names[2], names[1]: [text, {"type": "text", "text": "cause."}]}
            assert preference({**PAIR, "chosen": [reply]}) == preference(PAIR)
        with pytest.raises(UnusableRowError, match='media: a turn with a part of type "image_url", and text alone'):
            read({**PAIR, "prompt": [{"role": "user", "content": [text, {"type": "image_url", "image_url": "x"}]}]})
        assert cause({**PAIR, "prompt": [{"role": "user", "content": [{**text, "image": "x"}]}]}) == "media"
        assert cause({**PAIR, "images": ["x.png"]}) == "media"
        for nothing in (None, "", "NaN", " none", float("nan"), []):
            assert read({**PAIR, "image": nothing}) == read(PAIR)
        assert read({**PAIR, "images": [], "video": None}) == read(PAIR)

    def test_a_prompt_that_is_neither_text_nor_turns_is_dropped(self) -> None:
        assert cause({**PAIR, "prompt": 5}) == "bad_roles"


class TestStrength:
    def test_it_is_kept_as_data_and_does_nothing_unasked(self) -> None:
        (comparison,) = preference({**PAIR, "strength": 2}).comparisons
        assert (comparison.strength, comparison.weight, comparison.margin, comparison.label) == (2.0, 1.0, 0.0, 1.0)

    def test_it_is_the_weight_the_margin_or_the_label_as_asked(self) -> None:
        row = {**PAIR, "strength": 0.8}
        assert preference(row, strength_as="weight").comparisons[0].weight == 0.8
        assert preference(row, strength_as="margin").comparisons[0].margin == 0.8
        assert preference(row, strength_as="soft").comparisons[0].label == 0.8
        with pytest.raises(UnusableRowError, match="bad_strength|0.3"):
            # As a label it would turn the judgement round.
            preference({**PAIR, "strength": 0.3}, strength_as="soft")

    def test_a_soft_label_is_for_the_preferred_side_and_a_tie_stays_one(self) -> None:
        labels = [0, 0.5, 1]
        soft = [
            preference({**PAIR, "strength": 0.8, "label": label}, strength_as="soft").comparisons[0].label
            for label in labels
        ]
        assert soft == pytest.approx([0.2, 0.5, 0.8])

    def test_a_tie_has_no_margin(self) -> None:
        assert preference({**PAIR, "strength": 2, "label": 0.5}, strength_as="margin").comparisons[0].margin == 0.0

    @pytest.mark.parametrize("strength", [-1, math.nan, math.inf, "strong", [1], 1e16, 1e300])
    def test_what_is_no_finite_number_from_0_is_dropped(self, strength: object) -> None:
        assert cause({**PAIR, "strength": strength}) == "bad_strength"

    def test_what_float32_cannot_divide_by_has_no_weight(self) -> None:
        for strength in (0, 1e-320, 9e-31):
            assert cause({**PAIR, "strength": strength}, strength_as="weight") == "zero_weight"
        assert preference({**PAIR, "strength": 1e-30}, strength_as="weight").comparisons[0].weight == 1e-30
        assert preference({**PAIR, "strength": 1e-320}, strength_as="margin").comparisons[0].margin == 1e-320

    def test_above_1_it_is_no_soft_label(self) -> None:
        assert cause({**PAIR, "strength": 1.5}, strength_as="soft") == "bad_strength"

    @pytest.mark.parametrize("strength_as", ["weight", "margin", "soft"])
    def test_a_row_without_it_is_dropped_when_it_is_asked_for(self, strength_as: str) -> None:
        assert cause(PAIR, strength_as=strength_as) == "missing_strength"
        assert cause(KWISE, strength_as=strength_as) == "missing_strength"

    def test_the_margin_comes_from_its_column(self) -> None:
        assert preference({**PAIR, "gap": 1.5}, margin_column="gap").comparisons[0].margin == 1.5

    @pytest.mark.parametrize("margin", [-0.5, math.nan, "wide"])
    def test_a_margin_that_is_no_finite_number_from_0_is_dropped(self, margin: object) -> None:
        assert cause({**PAIR, "gap": margin}, margin_column="gap") == "bad_margin"

    def test_a_row_without_the_margin_column_is_dropped(self) -> None:
        assert cause(PAIR, margin_column="gap") == "missing_field"


class TestWholeConversations:
    def test_the_prompt_is_what_both_sides_share(self) -> None:
        prompt = (Message("system", ""), user("Hi"), assistant("Hello"), user("Why?"))
        row = preference(
            {"chosen": turns(*prompt, assistant("Because.")), "rejected": turns(*prompt, assistant("No."))}
        )
        assert row.prompt == prompt
        assert replies(row) == ["Because.", "No."]

    def test_sides_that_part_at_an_earlier_reply_have_replies_of_several_turns(self) -> None:
        row = preference(
            {
                "chosen": turns(user("Why?"), assistant("a")),
                "rejected": turns(user("Why?"), assistant("b"), user("And?"), assistant("c")),
            }
        )
        assert row.prompt == PROMPT
        assert [len(reply) for reply in row.replies] == [1, 3]

    def test_one_side_may_continue_the_other(self) -> None:
        first = turns(user("Why?"), assistant("a"))
        row = preference({"chosen": first, "rejected": [*first, *turns(user("And?"), assistant("c"))]})
        assert row.prompt == PROMPT

    def test_sides_that_part_at_a_user_turn_are_dropped(self) -> None:
        first, second = turns(user("Why?"), assistant("a")), turns(user("How?"), assistant("b"))
        assert cause({"chosen": first, "rejected": second}) == "prompt_differs"

    @pytest.mark.parametrize(
        ("first", "second", "expected"),
        [
            (turns(user("Why?"), assistant("a")), turns(user("Why?"), assistant("a ")), "identical_replies"),
            (turns(user("Why?"), assistant("a")), turns(user("Why?"), assistant("a")), "identical_replies"),
            (turns(assistant("a")), turns(assistant("b")), "empty_prompt"),
            (turns(user("Why?"), assistant("a"), user("b")), turns(user("Why?"), assistant("c")), "bad_roles"),
            (turns(user("Why?"), assistant("a")), [], "empty_reply"),
            (turns(user("Why?"), assistant("a")), "b", "reply_not_text"),
        ],
    )
    def test_other_faults_have_their_cause(self, first: object, second: object, expected: str) -> None:
        assert cause({"chosen": first, "rejected": second}) == expected


class TestTranscripts:
    def test_turns_are_stripped_and_the_shared_ones_are_the_prompt(self) -> None:
        shared = "\n\nHuman: Hi \n\nAssistant: Hello:\nyou\n\n\nHuman:  Why?\n\nAssistant:"
        row = preference({"chosen": shared + " Because.\n", "rejected": shared + " No."})
        assert row.prompt == (user("Hi"), assistant("Hello:\nyou"), user("Why?"))
        assert row.replies == ((assistant("Because."),), (assistant("No."),))

    @pytest.mark.parametrize(
        "transcript",
        ["\n\nHuman: Why?", "\n\nAssistant: a", "Listen.\n\nHuman: Why?\n\nAssistant: a", "\n\nHuman: a\n\nHuman: b"],
    )
    def test_what_does_not_go_from_human_to_assistant_is_dropped(self, transcript: str) -> None:
        good = "\n\nHuman: Why?\n\nAssistant: b"
        assert cause({"chosen": transcript, "rejected": good}) == "not_a_transcript"
        assert cause({"chosen": good, "rejected": transcript}) == "not_a_transcript"

    @pytest.mark.parametrize("prompt", ["\n\nHuman: Why?\n\nAssistant:", "Human: Why?\n\nAssistant: "])
    @pytest.mark.parametrize("template", ["auto", "concat"])
    def test_a_text_that_repeats_the_transcript_of_the_prompt_is_the_reply_after_it(
        self, prompt: str, template: str
    ) -> None:
        repeated = {"prompt": prompt, "chosen": f"{prompt}Because.", "rejected": "No."}
        alone = preference({**repeated, "chosen": "Because."}, chat_template=template)
        assert preference(repeated, chat_template=template) == alone
        shifted = {**repeated, "chosen": "\n\nHuman: Why?\n\nAssistant: Because."}
        assert replies(preference(shifted, chat_template=template))[0].strip() == "Because."
        assert cause({**repeated, "rejected": prompt}, chat_template=template) == "empty_reply"
        quoting = {**PAIR, "chosen": "Why? Because."}
        assert replies(preference(quoting, chat_template=template)) == ["Why? Because.", "No."]

    def test_transcripts_with_two_prompts_are_dropped(self) -> None:
        sides = [f"\n\nHuman: {prompt}\n\nAssistant: a" for prompt in ("Why?", "How?")]
        assert cause({"chosen": sides[0], "rejected": sides[1]}) == "prompt_differs"

    def test_plain_texts_have_no_prompt(self) -> None:
        assert cause({"chosen": "Because.", "rejected": "No."}) == "no_prompt"

    def test_an_empty_last_turn_is_dropped(self) -> None:
        start = "\n\nHuman: Why?\n\nAssistant:"
        assert cause({"chosen": f"{start} a", "rejected": start}) == "empty_reply"


class TestSHP:
    @pytest.mark.parametrize(("labels", "expected"), [(1, ["a", "b"]), (0, ["b", "a"])])
    def test_label_1_prefers_a_and_label_0_prefers_b(self, labels: int, expected: list[str]) -> None:
        row = preference({**SHP, "labels": labels})
        assert row.prompt == PROMPT
        assert replies(row) == expected
        assert (row.comparisons[0].first, row.comparisons[0].label) == (0, 1.0)

    def test_the_strength_is_the_share_of_votes_of_the_preferred(self) -> None:
        assert preference(SHP).comparisons[0].strength == 0.75
        assert preference(SHP, strength_as="soft").comparisons[0].label == 0.75
        assert preference({**SHP, "score_ratio": None}).comparisons[0].strength is None

    @pytest.mark.parametrize("labels", [2, 0.5, "A", True])
    def test_other_labels_are_dropped(self, labels: object) -> None:
        assert cause({**SHP, "labels": labels}) == "bad_label"

    @pytest.mark.parametrize("ratio", [0.5, -1, math.inf])
    def test_a_ratio_below_1_contradicts_the_label(self, ratio: float) -> None:
        assert cause({**SHP, "score_ratio": ratio}) == "bad_strength"


class TestRecognition:
    @pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.name)
    def test_a_layout_is_recognised_by_its_columns_and_others_do_not_matter(self, schema: Any) -> None:
        columns = [*schema.needed, *schema.one_of[-1:], "meta", "source"]
        assert recognise(columns, "f:1") is schema

    def test_unknown_columns_are_an_error_with_place_columns_and_layouts(self) -> None:
        with pytest.raises(DataError, match=r"^rows\.jsonl:1: the columns 'question', 'good'") as caught:
            recognise(["question", "good"], "rows.jsonl:1")
        assert str(caught.value).count(" lacks ") == 3

    def test_columns_that_no_format_knows_are_answered_with_the_formats_of_ones_own_rows(self) -> None:
        with pytest.raises(
            DataError, match=r"The nearest formats: pairs lacks .*; K-wise lacks .*; whole conversations"
        ):
            recognise(["question", "good", "bad", "who"], "rows.jsonl:1")

    def test_two_columns_that_resemble_the_same_one_are_no_hint(self) -> None:
        with pytest.raises(DataError) as caught:
            recognise(["question", "answer_a", "answer_b", "winner"], "rows.jsonl:1")
        assert "Perhaps" not in str(caught.value)

    @pytest.mark.parametrize(
        ("columns", "nearest"),
        [
            (["prompt", "chosen"], "pairs lacks 'rejected'"),
            (["prompt", "responses"], "K-wise lacks 'scores' or 'ranking'"),
            (["post_id", "history", "human_ref_A", "human_ref_B"], "SHP lacks 'labels'"),
            (["Prompt", "Chosen", "Rejected"], "pairs lacks 'prompt' and 'chosen' and 'rejected'"),
        ],
    )
    def test_the_nearest_format_is_the_one_that_lacks_least(self, columns: list[str], nearest: str) -> None:
        with pytest.raises(DataError) as caught:
            recognise(columns, "rows.jsonl:1")
        first = str(caught.value).partition("The nearest formats: ")[2].split("; ")[:3]
        assert nearest in first

    def test_rows_of_one_rated_reply_are_told_of_the_flag_that_compares_them(self) -> None:
        rated = {"prompt": "a", "response": "b", "stars": 4, "id": "x"}
        with pytest.raises(DataError, match=r"a rating in 'stars', give --attributes stars=1\."):
            recognise(rated, "rows.jsonl:1")
        assert recognise(rated, "rows.jsonl:1", ReadingConfig(attributes=("stars=1",))).name.startswith("HelpSteer")
        with pytest.raises(DataError, match="no known schema") as caught:
            recognise({**rated, "stars": "4"}, "rows.jsonl:1")
        assert "--attributes" not in str(caught.value)

    def test_a_row_of_another_format_names_the_nearest(self) -> None:
        rules = Rules(source="rows", reading=ReadingConfig(), seed=0)
        with pytest.raises(UnusableRowError) as caught:
            read_rows([{"prompt": "a", "responses": ["b"]}], schema=recognise(PAIR, "x:1"), place="x:2", rules=rules)
        assert caught.value.cause == "missing_field"
        assert "no 'chosen'; its nearest formats: K-wise lacks 'scores' or 'ranking'; " in caught.value.detail

    def test_a_row_that_fits_another_format_names_it(self) -> None:
        rules = Rules(source="rows", reading=ReadingConfig(), seed=0)
        row = {"prompt": "a", "responses": ["b", "c"], "scores": [1, 2]}
        with pytest.raises(UnusableRowError, match="no 'chosen'; its columns are those of K-wise, and a dataset is"):
            read_rows([row], schema=recognise(PAIR, "x:1"), place="x:2", rules=rules)


def test_details_are_short_whatever_the_row_holds() -> None:
    with pytest.raises(UnusableRowError) as caught:
        read({**PAIR, "chosen": "x" * 10_000, "rejected": "x" * 10_000})
    assert len(caught.value.detail) < 2 * SHOWN_CHARACTERS


def test_every_cause_has_a_meaning_in_one_line() -> None:
    assert all(meaning and "\n" not in meaning for meaning in CAUSES.values())


def test_conversations_are_immutable_tuples() -> None:
    row = preference({**PAIR, "prompt": turns(user("Why?"))})
    parts: tuple[Conversation, ...] = (row.prompt, *row.replies)
    assert all(isinstance(part, tuple) for part in parts)


@pytest.mark.parametrize(("text", "wanted"), [('["hi \\ud83d"]', "bad_unicode"), ("[" * 100_000, "empty_prompt")])
def test_texts_of_arena_that_no_tokenizer_reads_drop_their_row(text, wanted):
    winner = {"winner_model_a": 1, "winner_model_b": 0, "winner_tie": 0}
    assert cause({"prompt": text, "response_a": '["good"]', "response_b": '["bad"]', **winner}) == wanted


def test_rows_with_chosen_and_rejected_are_pairs_whatever_else_they_hold():
    assert len(preference({**PAIR, "replies": 3, "comparisons": 7}).replies) == 2
