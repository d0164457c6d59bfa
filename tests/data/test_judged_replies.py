"""Laws of reading a row of replies of which some were compared: judgements, weights, margins, rankings."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from loading import load
from parsing import cause, preference, replies

JUDGED = {
    "prompt": "Why?",
    "replies": ["a", "b", [{"role": "assistant", "content": "c"}]],
    "comparisons": [{"first": 0, "second": 1}, {"first": 2, "second": 1, "label": 0.25, "weight": 3, "margin": 0.5}],
    "ranking": [0, 1, 2],
}


def test_judged_replies_are_read_as_they_are():
    read_row = preference(JUDGED)
    assert replies(read_row) == ["a", "b", "c"]
    first, second = read_row.comparisons
    assert (first.first, first.second, first.label, first.weight, first.margin) == (0, 1, 1.0, 1.0, 0.0)
    assert (second.first, second.second, second.label, second.weight, second.margin) == (2, 1, 0.25, 3.0, 0.5)
    assert read_row.ranking == (0, 1, 2)


def test_a_preference_written_as_json_is_read_as_the_same():
    row = json.loads(json.dumps(dataclasses.asdict(preference(JUDGED))))
    assert preference(row) == preference(JUDGED)


def test_a_csv_file_of_judged_replies_says_the_same(tmp_path: Path):
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        cells = [value if isinstance(value, str) else json.dumps(value) for value in JUDGED.values()]
        csv.writer(file).writerows([[*JUDGED], cells])
    (found,) = load(tmp_path / "rows.csv").preferences
    wanted = preference(JUDGED)
    assert dataclasses.replace(found, id=wanted.id, source=wanted.source) == wanted


def test_of_judged_replies_two_that_were_compared_are_always_drawn():
    for seed in range(12):
        row = preference(JUDGED, max_replies=2, seed=seed)
        assert len(row.replies) == 2
        assert {row.comparisons[0].first, row.comparisons[0].second} == {0, 1}
        assert sorted(row.ranking) == [0, 1]


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"comparisons": [{"first": 0, "second": 3}]}, "bad_comparison"),
        ({"comparisons": [{"first": 1, "second": 1}]}, "bad_comparison"),
        ({"comparisons": [{"first": 0}]}, "bad_comparison"),
        ({"comparisons": ["a"]}, "bad_comparison"),
        ({"comparisons": "ab"}, "bad_comparison"),
        ({"comparisons": []}, "no_comparison"),
        ({"replies": "ab"}, "bad_comparison"),
        ({"replies": ["a", "a", "c"], "comparisons": [{"first": 0, "second": 1}]}, "identical_replies"),
        ({"comparisons": [{"first": 0, "second": 1, "label": 2}]}, "bad_label"),
        ({"comparisons": [{"first": 0, "second": 1, "weight": -1}]}, "bad_strength"),
        ({"comparisons": [{"first": 0, "second": 1, "weight": 1e16}]}, "bad_strength"),
        ({"comparisons": [{"first": 0, "second": 1, "weight": 1e-320}]}, "zero_weight"),
        ({"comparisons": [{"first": 0, "second": 1, "margin": "x"}]}, "bad_margin"),
        ({"comparisons": [{"first": 0, "second": 1, "margin": 1e16}]}, "bad_margin"),
        ({"comparisons": [{"first": 0, "second": 1, "weight": 0}]}, "zero_weight"),
        ({"ranking": [0, 1]}, "bad_scores"),
        ({"ranking": [1, 0, 2]}, "bad_scores"),
    ],
)
def test_what_judged_replies_are_dropped_for(changed, wanted):
    assert cause({**JUDGED, **changed}) == wanted


def test_a_comparison_without_strength_is_left_out_and_the_others_of_its_row_stay():
    two = [{"first": 0, "second": 1, "strength": 2}, {"first": 0, "second": 2, "strength": 0}]
    (kept,) = preference({**JUDGED, "comparisons": two}, strength_as="weight").comparisons
    assert (kept.second, kept.weight) == (1, 2.0)
    assert cause({**JUDGED, "comparisons": two[1:]}, strength_as="weight") == "zero_weight"


def test_plackett_luce_ranks_judged_replies_that_are_ranked_strictly():
    ranked = {"kwise_loss": "plackett-luce"}
    assert preference({**JUDGED, "comparisons": [{"first": 0, "second": 1}]}, **ranked).ranking == (0, 1, 2)
    assert cause({**JUDGED, "ranking": None}, **ranked) == "missing_field"
    tied = [{"first": 0, "second": 1, "label": 0.5}]
    assert cause({**JUDGED, "comparisons": tied}, **ranked) == "tied_ranking"
    assert cause({**JUDGED, "replies": ["a", "b", "b"], "ranking": [0, 1, 2]}, **ranked) == "identical_replies"
    two = {"prompt": "Why?", "replies": ["a", "b"], "comparisons": [{"first": 1, "second": 0}]}
    assert preference(two, **ranked).ranking == (1, 0)


@pytest.mark.parametrize("soft", [{"label": 0.7}, {"margin": 1.5}, {"label": 0.2, "first": 1, "second": 0}])
def test_plackett_luce_drops_judged_replies_whose_margins_or_soft_labels_it_would_ignore(soft):
    one, two = {"first": 0, "second": 1, **soft}, {"first": 0, "second": 2}
    pair = {"prompt": "Why?", "replies": ["a", "b"], "ranking": [0, 1]}
    for row in ({**JUDGED, "comparisons": [two, one]}, {**pair, "comparisons": [one]}):
        assert cause(row, kwise_loss="plackett-luce") == "soft_ranking"
        assert preference(row).ranking == tuple(row["ranking"])


def test_a_margin_of_the_row_is_that_of_its_comparisons_unless_they_have_their_own():
    row = {**JUDGED, "gap": 2.0, "comparisons": [{"first": 0, "second": 1}, {"first": 0, "second": 2, "gap": 1.0}]}
    assert [one.margin for one in preference(row, margin_column="gap").comparisons] == [2.0, 1.0]
