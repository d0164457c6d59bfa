"""Laws of pairs in two rows: found by their number, and either complete or accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import pytest

from parsing import PAIR, Row, assistant, cause, preference, read, turns, user
from rewardlab.core.errors import DataError
from rewardlab.data.pairs import group_rows


def long_form(role: str, text: str, **columns: object) -> dict[str, object]:
    return {"pair_id": 1, "role": role, "prompt": "Why?", "response": text, **columns}


class TestLongForm:
    def test_two_rows_are_a_pair_in_any_order(self) -> None:
        rows = (long_form("rejected", "No."), long_form("chosen", "Because."))
        assert preference(*rows) == preference(*reversed(rows)) == preference(PAIR)

    @pytest.mark.parametrize("column", ["response", "completion", "text", "content"])
    def test_the_text_is_in_any_of_four_columns(self, column: str) -> None:
        rows = [
            {"pair_id": 1, "role": role, "prompt": "Why?", column: text}
            for role, text in [("chosen", "Because."), ("rejected", "No.")]
        ]
        assert preference(*rows) == preference(PAIR)

    def test_messages_are_whole_conversations(self) -> None:
        rows = [
            {"pair_id": 1, "role": role, "messages": turns(user("Why?"), assistant(text))}
            for role, text in [("chosen", "Because."), ("rejected", "No.")]
        ]
        assert preference(*rows) == preference(PAIR)
        assert preference(*({**row, "prompt": turns(user("Why?"))} for row in rows)) == preference(PAIR)

    @pytest.mark.parametrize(
        ("names", "kept"), [(("ann", "ann"), "ann"), (("ann", None), "ann"), ((None, 7), "7"), (("ann", "bob"), None)]
    )
    def test_the_annotator_of_either_side_is_kept_unless_they_differ(
        self, names: Sequence[object], kept: str | None
    ) -> None:
        first, second = names
        rows = long_form("chosen", "Because.", annotator=first), long_form("rejected", "No.", annotator=second)
        (judged,) = preference(*rows).comparisons
        assert judged.annotator == kept

    def test_label_and_strength_may_stand_on_either_or_on_both_sides(self) -> None:
        expected = preference({**PAIR, "label": 0.7, "strength": 2, "gap": 1}, margin_column="gap")
        one, two = {"label": 0.7}, {"strength": 2, "gap": 1}
        for first, second in [(one, two), (two, one), ({**one, **two}, {**one, **two})]:
            rows = (long_form("chosen", "Because.", **first), long_form("rejected", "No.", **second))
            assert preference(*rows, margin_column="gap") == expected

    @pytest.mark.parametrize(
        ("column", "values", "expected"),
        [
            ("label", (1, 0.5), "bad_label"),
            ("label", (0.7, 0.2), "bad_label"),
            ("label", (True, False), "bad_label"),
            ("label", ("yes", "no"), "bad_label"),
            ("label", (2, -1), "bad_label"),
            ("label", (1e308, 1.5e308), "bad_label"),
            ("strength", (1, 0), "bad_strength"),
            ("gap", (1, 0), "bad_margin"),
        ],
    )
    def test_sides_that_contradict_each_other_are_dropped(
        self, column: str, values: tuple[object, object], expected: str
    ) -> None:
        rows = (long_form("chosen", "a", **{column: values[0]}), long_form("rejected", "b", **{column: values[1]}))
        assert cause(*rows, margin_column="gap") == expected

    @pytest.mark.parametrize(
        ("chosen", "rejected", "label"), [(1, 0, 1.0), (0.7, 0.3, 0.7), ("1.0", "0", 1.0), (0.1, 0.9, 0.1)]
    )
    def test_labels_of_the_two_sides_may_be_a_probability_each(self, chosen, rejected, label) -> None:
        rows = (long_form("rejected", "No.", label=rejected), long_form("chosen", "Because.", label=chosen))
        assert preference(*rows) == preference({**PAIR, "label": label})

    @pytest.mark.parametrize(
        "roles", [["chosen"], ["rejected"], ["chosen", "chosen"], ["chosen", "rejected", "chosen"]]
    )
    def test_a_pair_without_exactly_two_sides_is_dropped_or_an_error(self, roles: Sequence[str]) -> None:
        rows = [long_form(role, f"r{k}") for k, role in enumerate(roles)]
        assert cause(*rows) == "incomplete_pair"
        with pytest.raises(DataError, match=r"^rows\.jsonl:7: pair 1 .*--incomplete-pairs drop"):
            read(*rows, incomplete_pairs="error")

    def test_other_faults_have_their_cause(self) -> None:
        good = long_form("rejected", "No.")
        assert cause(long_form("better", "a"), good) == "bad_roles"
        assert cause(long_form("chosen", "a", prompt="How?"), good) == "prompt_differs"
        assert cause({**long_form("chosen", "a"), "response": None}, good) == "missing_field"
        assert cause({**long_form("chosen", "a"), "pair_id": None}) == "missing_field"
        assert cause({**long_form("chosen", "a"), "prompt": None}, {**good, "prompt": None}) == "no_prompt"
        assert cause(long_form("chosen", ""), good) == "empty_reply"

    def test_rows_are_grouped_by_pair_wherever_they_stand(self) -> None:
        rows: list[Row] = [{"pair_id": pair_id} for pair_id in (1, "b", None, 1, "", "b", None)]
        groups = [(number, len(group)) for number, group in group_rows(enumerate(rows, start=1), itemgetter("pair_id"))]
        assert groups == [(1, 2), (2, 2), (3, 1), (5, 1), (7, 1)]
