"""Laws of rows with many replies: what is compared, what a tie does, what is drawn."""

from __future__ import annotations

import math

import pytest

from parsing import KWISE, PROMPT, Row, assistant, cause, preference, read, replies, turns, user
from rewardlab.core.errors import DataError
from rewardlab.core.types import Preference


def compared(row: Preference) -> set[tuple[int, int, float]]:
    return {(c.first, c.second, c.label) for c in row.comparisons}


class TestKwise:
    def test_every_pair_with_different_scores_is_compared_the_better_first(self) -> None:
        row = preference(KWISE)
        assert row.prompt == PROMPT
        assert replies(row) == ["a", "b", "c"]
        assert compared(row) == {(1, 0, 1.0), (2, 0, 1.0), (1, 2, 1.0)}
        assert row.ranking == (1, 2, 0)

    def test_a_ranking_means_the_scores_it_comes_from(self) -> None:
        ranked = {"prompt": "Why?", "responses": KWISE["responses"], "ranking": [1, 2, 0]}
        assert preference(ranked) == preference(KWISE) == preference({**KWISE, "ranking": [1, 2, 0]})

    def test_responses_may_be_messages(self) -> None:
        sides = [turns(assistant("a")), turns(user("Why?"), assistant("b")), "c"]
        assert preference({**KWISE, "responses": sides}) == preference(KWISE)

    @pytest.mark.parametrize(
        ("ties", "expected", "skipped"),
        [
            ("auto", {(2, 0, 1.0), (2, 1, 1.0)}, 1),
            ("skip", {(2, 0, 1.0), (2, 1, 1.0)}, 1),
            ("half", {(0, 1, 0.5), (2, 0, 1.0), (2, 1, 1.0)}, 0),
        ],
    )
    def test_ties_are_skipped_or_compared_as_asked(
        self, ties: str, expected: set[tuple[int, int, float]], skipped: int
    ) -> None:
        parsed = read({**KWISE, "scores": [1, 1, 2]}, ties=ties)
        assert compared(parsed.preference) == expected
        assert parsed.preference.ranking is None
        assert parsed.skipped_ties == skipped

    @pytest.mark.parametrize(
        ("ties", "kwise_loss"),
        [("error", "pairs"), ("error", "plackett-luce"), ("auto", "plackett-luce"), ("half", "plackett-luce")],
    )
    def test_a_forbidden_tie_is_an_error_with_the_row_and_the_flag(self, ties: str, kwise_loss: str) -> None:
        with pytest.raises(DataError, match=r"^rows\.jsonl:7: two replies have the same score 1.*--ties skip"):
            read({**KWISE, "scores": [1, 1, 2]}, ties=ties, kwise_loss=kwise_loss)

    def test_plackett_luce_drops_tied_rows_when_ties_are_skipped(self) -> None:
        assert cause({**KWISE, "scores": [1, 1, 2]}, ties="skip", kwise_loss="plackett-luce") == "tied_ranking"
        assert preference(KWISE, ties="auto", kwise_loss="plackett-luce").ranking == (1, 2, 0)

    def test_identical_replies_are_not_compared(self) -> None:
        parsed = read({**KWISE, "responses": ["a", "b", "a "]})
        assert compared(parsed.preference) == {(1, 0, 1.0), (1, 2, 1.0)}
        assert parsed.skipped_identical == 1
        assert parsed.preference.ranking is None

    def test_a_row_of_identical_replies_is_dropped(self) -> None:
        assert cause({**KWISE, "responses": ["a", "a", " a"]}) == "identical_replies"
        assert cause({**KWISE, "responses": ["a", "b", "a"]}, kwise_loss="plackett-luce") == "identical_replies"

    def test_a_row_that_decides_nothing_is_dropped(self) -> None:
        assert cause({**KWISE, "scores": [1, 1, 1]}) == "no_comparison"
        assert cause({**KWISE, "responses": ["a"], "scores": [1]}) == "no_comparison"
        assert cause({**KWISE, "responses": [], "scores": []}) == "no_comparison"

    @pytest.mark.parametrize(
        "columns",
        [
            {"scores": [1, 2]},
            {"scores": [1, 2, math.inf]},
            {"scores": [1, 2, "good"]},
            {"scores": [1, None, None]},
            {"scores": 3},
            {"ranking": [0, 1, 1], "scores": None},
            {"ranking": [1, 2, 3], "scores": None},
            {"ranking": [0, 1], "scores": None},
            {"ranking": "0,1,2", "scores": None},
            {"ranking": [0.5, 1, 2], "scores": None},
            {"ranking": [0, 1, 2]},
        ],
    )
    def test_scores_that_do_not_fit_the_replies_are_dropped(self, columns: Row) -> None:
        assert cause({**KWISE, **columns}) == "bad_scores"

    def test_other_faults_have_their_cause(self) -> None:
        assert cause({**KWISE, "responses": "abc"}) == "reply_not_text"
        assert cause({**KWISE, "responses": ["a", 2, 3]}) == "reply_not_text"
        assert cause({**KWISE, "responses": ["a", "", None]}) == "empty_reply"
        assert cause({**KWISE, "scores": None}) == "missing_field"
        assert cause({**KWISE, "prompt": " "}) == "empty_prompt"

    def test_max_replies_draws_by_seed_and_row_in_the_order_of_the_data(self) -> None:
        row = {"prompt": "Why?", "responses": [f"r{k:02}" for k in range(30)], "scores": list(range(30))}

        def drawn(seed: int, place: str) -> list[str]:
            kept = preference(row, max_replies=4, seed=seed, place=place)
            assert kept.ranking == (3, 2, 1, 0)
            assert len(kept.comparisons) == 6
            return replies(kept)

        first = drawn(0, "f:1")
        assert first == sorted(first)
        assert drawn(0, "f:1") == first
        assert len({tuple(drawn(seed, place)) for seed in (0, 1) for place in ("f:1", "f:2")}) == 4

    def test_max_replies_leaves_smaller_rows_alone(self) -> None:
        assert preference(KWISE, max_replies=3) == preference(KWISE)

    def test_the_margin_column_is_for_every_comparison_but_ties(self) -> None:
        row = preference({**KWISE, "scores": [1, 1, 2], "gap": 0.5}, margin_column="gap", ties="half")
        assert {(c.label, c.margin) for c in row.comparisons} == {(1.0, 0.5), (0.5, 0.0)}
