"""Laws of rows with one reply that is rated, or good or bad: replies to one prompt are compared, and to no other."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from loading import ALLOW_DROPS, load, write
from parsing import assistant, cause, preference, replies, turns, user
from rewardlab.core.errors import DataError
from rewardlab.core.types import Message
from rewardlab.data.config import ReadingConfig
from rewardlab.data.formats import recognise
from rewardlab.data.rows import UnusableRowError

GOOD = {"prompt": "Why?", "completion": "Because.", "label": True}
BAD = {"prompt": "Why?", "completion": "No.", "label": False}


def better(*rows: dict[str, object], **settings: object) -> set[tuple[str, str]]:
    """(better, worse) of every comparison."""
    found = preference(*rows, **settings)
    texts = replies(found)
    return {(texts[one.first], texts[one.second]) for one in found.comparisons if one.label == 1.0}


class TestGoodOrBad:
    @pytest.mark.parametrize("values", [(True, False), (1, 0), (1.0, 0.0), ("True", "False"), ("1", "0"), (0.7, 0.2)])
    def test_the_larger_label_is_better_whichever_row_comes_first(self, values: tuple[object, object]) -> None:
        rows = ({**GOOD, "label": values[0]}, {**BAD, "label": values[1]})
        assert better(*rows) == better(*rows[::-1]) == {("Because.", "No.")}

    def test_each_good_reply_is_compared_with_each_bad_one_and_none_with_its_like(self) -> None:
        rows = [GOOD, BAD, {**GOOD, "completion": "So."}, {**BAD, "completion": "Never."}]
        assert better(*rows) == {(g, b) for g in ("Because.", "So.") for b in ("No.", "Never.")}
        halves = preference(*rows, ties="half").comparisons
        assert sorted(one.label for one in halves) == [0.5, 0.5, 1, 1, 1, 1]

    @pytest.mark.parametrize("name", ["completion", "response", "output"])
    def test_the_reply_may_have_other_names(self, name: str) -> None:
        rows = [{name: row["completion"], "prompt": "Why?", "label": row["label"]} for row in (GOOD, BAD)]
        named = {"response_column": name} if name == "output" else {}
        assert better(*rows, **named) == {("Because.", "No.")}

    def test_words_are_labels_as_the_flag_says(self) -> None:
        rows = ({**GOOD, "label": "thumbs_down"}, {**BAD, "label": "thumbs_up"})
        assert better(*rows, map_label=("thumbs_up=1", "thumbs_down=0")) == {("No.", "Because.")}

    def test_what_cannot_be_compared_is_dropped(self) -> None:
        assert cause(GOOD) == cause(GOOD, {**GOOD, "completion": "So."}) == "no_comparison"
        assert cause(GOOD, {**GOOD, "label": False}) == "identical_replies"
        for label in (2, -1, "good", [1], None, float("nan")):
            assert cause(GOOD, {**BAD, "label": label}) == ("missing_field" if label is None else "bad_label")
        assert cause(GOOD, {**BAD, "completion": " "}) == "empty_reply"
        assert cause(GOOD, {**BAD, "completion": None}) == "missing_field"
        assert cause(GOOD, BAD, strength_as="weight") == "missing_strength"
        with pytest.raises(UnusableRowError, match="--map-label turns words into numbers, and a rating is compared by"):
            preference(GOOD, {**BAD, "label": 5})

    @pytest.mark.parametrize(
        ("reply", "said"),
        [
            ({"prompt": "Why?", "response": "a"}, "numbers, and a rating is compared by --attributes label=1$"),
            ({"prompt": "Why?", "completion": "a"}, "by --attributes label=1 --response-column completion$"),
            ({"messages": turns(user("Why?"), assistant("a"))}, "turns words into numbers$"),
        ],
    )
    def test_what_is_said_of_a_rating_leads_to_its_comparison(self, reply: dict[str, object], said: str) -> None:
        with pytest.raises(UnusableRowError, match=said):
            preference({**reply, "label": 4}, {**reply, "label": 1})

    @pytest.mark.parametrize("reply", [{"prompt": "Why?", "completion": "a"}, {"messages": turns(user("Why?"))}])
    def test_rows_with_a_column_that_attributes_names_are_not_read_by_their_label(self, reply: dict) -> None:
        reading = ReadingConfig(attributes=("stars=2",))
        row = {**reply, "stars": 5, "label": 0}
        assert recognise(row, "a:1").name.startswith("unpaired")
        assert recognise({**reply, "label": 0}, "a:1", reading).name.startswith("unpaired")
        with pytest.raises(DataError, match="match no known schema") as caught:
            recognise(row, "a:1", reading)
        if "completion" in reply:
            assert "give --attributes stars=2 --response-column completion." in str(caught.value)

    def test_prompts_are_the_same_by_their_turns_and_their_system_turn(self, tmp_path: Path) -> None:
        shared = {"completion": "a", "label": 1}
        rows = [
            {"prompt": turns(user("Why?")), **shared},
            {"prompt": [{"content": "Why?", "role": "user"}], **shared, "completion": "b", "label": 0},
            {"prompt": turns(user("Why?")), "system": "Be brief.", **shared, "label": 0},
            {"prompt": turns(user("Why?")), "system": "Be brief.", **shared, "completion": "b"},
        ]
        first, second = load(write(tmp_path / "rows.jsonl", rows)).preferences
        assert [[c.first for c in one.comparisons] for one in (first, second)] == [[0], [1]]
        assert second.prompt == (Message("system", "Be brief."), user("Why?"))

    def test_a_completion_that_is_the_whole_conversation_is_read_without_its_prompt(self) -> None:
        before = (Message("system", "Be brief."), user("Why?"))
        for shared in (before[1:], before):
            rows = [{**row, "completion": turns(*shared, assistant(str(row["completion"])))} for row in (GOOD, BAD)]
            assert preference(*rows).prompt == shared
            assert better(*rows) == {("Because.", "No.")}

    def test_the_last_turn_of_a_conversation_is_the_reply(self) -> None:
        before = (user("Hi"), assistant("Hello."), user("Why?"))
        rows = [{"messages": turns(*before, assistant(said)), "label": said == "Yes."} for said in ("No.", "Yes.")]
        assert preference(*rows).prompt == before
        assert better(*rows) == {("Yes.", "No.")}
        assert cause({"messages": turns(*before), "label": True}) == "bad_roles"

    def test_a_draw_has_replies_of_both_labels(self) -> None:
        rows = [{**GOOD, "completion": f"good {k}"} for k in range(30)] + [BAD]
        drawn = [preference(*rows, max_replies=3, place=f"rows:{k}") for k in range(20)]
        assert all([one.label for one in found.comparisons] == [1.0, 1.0] for found in drawn)
        assert len({tuple(replies(found)) for found in drawn}) > 10
        assert preference(*rows, max_replies=3) == preference(*rows, max_replies=3)

    def test_pairs_with_a_label_stay_pairs(self) -> None:
        pair = {"prompt": "Why?", "chosen": "a", "rejected": "b", "response": "a", "messages": [], "label": 0}
        assert recognise(pair, "a:1").name == "pairs"

    def test_cells_of_csv_say_the_same(self, tmp_path: Path) -> None:
        with (tmp_path / "rows.csv").open("w", newline="") as file:
            csv.writer(file).writerows([[*GOOD], [*BAD.values()], [*GOOD.values()]])
        (found,) = load(tmp_path / "rows.csv").preferences
        assert replies(found) == ["No.", "Because."]
        assert [(one.first, one.second) for one in found.comparisons] == [(1, 0)]

    def test_lone_replies_are_counted_and_named_by_the_error(self, tmp_path: Path) -> None:
        path = write(tmp_path / "rows.jsonl", [GOOD, BAD, {**GOOD, "prompt": "How?"}])
        with pytest.raises(
            DataError, match=r"(?s)1 of 2 prompts cannot .*no_comparison: 1 .*a lone reply to its prompt"
        ):
            load(path)
        (report,) = load(path, **ALLOW_DROPS).reports
        assert (report.rows_read, report.kept, dict(report.dropped)) == (2, 1, {"no_comparison": 1})


class TestRatings:
    @pytest.mark.parametrize("values", [(True, False), ("true", "False"), ("4", "1.5")])
    def test_switches_and_texts_are_ratings_too(self, values: tuple[object, object]) -> None:
        rows = [{"prompt": "Why?", "response": text, "safe": value} for text, value in zip("ab", values, strict=True)]
        assert better(*rows, attributes=("safe=1",)) == better(*rows[::-1], attributes=("safe=1",)) == {("a", "b")}
        assert better(*rows, attributes=("safe=-1",)) == {("b", "a")}

    @pytest.mark.parametrize(("judged", "flags"), [("stars", {"attributes": ("stars=1",)}), ("label", {})])
    def test_one_instruction_with_two_inputs_is_two_prompts(self, tmp_path: Path, judged: str, flags: dict) -> None:
        said = [("Cat", "Katze", 1), ("Dog", "Hund", 1), ("Cat", "Hund", 0), ("Dog", "Katze", 0)]
        rows = [{"instruction": "Translate.", "input": i, "response": reply, judged: good} for i, reply, good in said]
        found = load(write(tmp_path / "rows.jsonl", rows), prompt_column="instruction", **flags).preferences
        assert [(one.prompt[0].content, *replies(one)) for one in found] == [
            ("Translate.\nCat", "Katze", "Hund"),
            ("Translate.\nDog", "Hund", "Katze"),
        ]

    def test_the_error_names_the_flag_and_a_rank_is_better_the_smaller_it_is(self) -> None:
        for row, flag in (
            ({"prompt": "a", "response": "b", "is_safe": True}, "a rating in 'is_safe', give --attributes is_safe=1."),
            ({"prompt": "a", "response": "b", "rank": 1}, "a rank in 'rank', give --attributes rank=-1."),
            (
                {"prompt": "a", "completion": "b", "stars": 1},
                "a rating in 'stars', give --attributes stars=1 --response-column completion.",
            ),
        ):
            with pytest.raises(DataError) as caught:
                recognise(row, "a:1")
            assert flag in str(caught.value)
        rows = [{"prompt": "Why?", "completion": text, "rank": rank} for text, rank in (("third", 3), ("first", 1))]
        assert better(*rows, attributes=("rank=-1",), response_column="completion") == {("first", "third")}
