"""Laws of rows with the labels of several annotators: no first row hides those of the rows that follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest

from loading import ALLOW_DROPS, load, write
from parsing import PAIR, cause, preference, replies

AGAINST: dict[str, Any] = {**PAIR, "labels": {"ann": 0, "bob": 0}}


@pytest.mark.parametrize("nobodys", [[None, None], [], {}, {"ann": None}, "[null]"])
def test_a_first_row_that_nobody_judged_is_dropped_and_the_labels_of_the_others_are_read(
    tmp_path: Path, nobodys: object
) -> None:
    loaded = load(write(tmp_path / "rows.jsonl", [{**PAIR, "labels": nobodys}, AGAINST]), **ALLOW_DROPS)
    (row,) = loaded.preferences
    assert [(one.first, one.label) for one in row.comparisons] == [(1, 1.0), (1, 1.0)]
    assert dict(loaded.reports[0].dropped) == {"missing_field": 1}


@pytest.mark.parametrize("unread", [[True, False], {"ann": "A"}])
def test_labels_that_are_no_numbers_are_dropped_with_what_to_do(tmp_path: Path, unread: object) -> None:
    loaded = load(write(tmp_path / "rows.jsonl", [{**PAIR, "labels": unread}, AGAINST]), **ALLOW_DROPS)
    (report,) = loaded.reports
    assert dict(report.dropped) == {"bad_label": 1}
    assert "--map-label" in report.examples["bad_label"][0]
    assert len(loaded.preferences) == 1


def test_a_list_of_words_is_something_else_that_is_called_labels(tmp_path: Path) -> None:
    loaded = load(write(tmp_path / "rows.jsonl", [{**PAIR, "labels": ["biology", "easy"]}]))
    assert loaded.reports[0].format.startswith("pairs, ")


@pytest.mark.parametrize("labels", [[0, 0], {"ann": 0}, "[0, 0]", "{'ann': 0}"])
def test_labels_after_a_first_row_with_null_are_dropped_by_name_and_never_read_as_chosen(
    tmp_path: Path, labels: object
) -> None:
    loaded = load(write(tmp_path / "rows.jsonl", [{**PAIR, "labels": None}, {**PAIR, "labels": labels}]), **ALLOW_DROPS)
    (report,) = loaded.reports
    assert (len(loaded.preferences), dict(report.dropped)) == (1, {"bad_label": 1})
    assert "put a row that has them first" in report.examples["bad_label"][0]


@pytest.mark.parametrize("label", [True, False, 0, 1, 0.5, "0", "True", "false"])
def test_one_label_that_is_called_labels_is_dropped_by_name_and_never_read_as_chosen(
    tmp_path: Path, label: object
) -> None:
    rows = [{**PAIR, "labels": label}, PAIR]
    (report,) = load(write(tmp_path / "rows.jsonl", rows), **ALLOW_DROPS).reports
    assert dict(report.dropped) == {"bad_label": 1}
    assert "if it is the label, use --label-column labels" in report.examples["bad_label"][0]
    (kept,) = load(write(tmp_path / "both.jsonl", [{**PAIR, "label": 0, "labels": label}])).preferences
    assert [one.label for one in kept.comparisons] == [0.0]
    tags = [{**PAIR, "labels": tag} for tag in (None, "", "easy", 7)]
    assert len(load(write(tmp_path / "tags.jsonl", tags)).preferences) == 4


def test_one_label_that_is_called_labels_is_mapped_as_that_of_the_row(tmp_path: Path) -> None:
    rows = [{**PAIR, "labels": "b"}, {**PAIR, "labels": "a"}]
    loaded = load(write(tmp_path / "rows.jsonl", rows), map_label=("a=1", "b=0"))
    assert [row.comparisons[0].label for row in loaded.preferences] == [0.0, 1.0]


@pytest.mark.parametrize("labels", [[0], {"ann": 0}, [0.2], [1], [0, 0], [0, 1]])
def test_replies_have_the_numbers_of_the_row_however_many_annotators_prefer_the_rejected_one(
    tmp_path: Path, labels: object
) -> None:
    rows = [{**PAIR, "labels": labels}, {**PAIR, "labels": [1, 1]}]
    judged, named = load(write(tmp_path / "rows.jsonl", rows)).preferences
    assert judged.replies == named.replies, "scores by the number of a reply are of the row's own"
    said = list(labels.values()) if isinstance(labels, dict) else labels
    assert isinstance(said, list)
    assert [one.first for one in judged.comparisons] == [int(label < 0.5) for label in said]
    assert judged.ranking == {(0,): (1, 0), (1,): (0, 1)}.get(tuple(sorted(set(said))))


@pytest.mark.parametrize("labels", [[{"selected": "right"}], '[{"selected": "right"}]'], ids=["list", "CSV"])
def test_a_pairwise_choice_of_label_studio_is_a_label_by_its_annotator(labels: object) -> None:
    row = {"prompt": "Why?", "answer1": "a", "answer2": "b", "pw": labels, "annotator": 3}
    named = {"chosen_column": "answer1", "rejected_column": "answer2", "label_column": "pw"}
    read = preference(row, **named, map_label=("left=1", "right=0"))
    (one,) = read.comparisons
    assert (replies(read)[one.first], one.label, one.annotator) == ("b", 1.0, "3")
    assert cause(row, **named, map_label=("left=1",)) == "unmapped_label"


HELPSTEER3: dict[str, Any] = {"context": [{"role": "user", "content": "Why?"}], "response1": "a", "response2": "b"}


@pytest.mark.parametrize("by", ["pandas", "datasets"])
def test_annotators_in_a_cell_as_pandas_and_datasets_write_it_are_read(tmp_path: Path, by: str) -> None:
    row = HELPSTEER3 | {"overall_preference": 2, "individual_preference": [{"score": 3}, {"score": -1}]}
    if by == "datasets":
        datasets.Dataset.from_list([row]).to_csv(tmp_path / "rows.csv")
    else:
        pd.DataFrame([row]).to_csv(tmp_path / "rows.csv", index=False)
    (found,) = load(tmp_path / "rows.csv").preferences
    assert [(turn.role, turn.content) for turn in found.prompt] == [("user", "Why?")]
    assert [(one.annotator, one.strength, one.first) for one in found.comparisons] == [("1", 3.0, 1), ("2", 1.0, 0)]


def test_annotators_in_a_text_that_is_no_list_are_never_left_out_alone() -> None:
    row = HELPSTEER3 | {"overall_preference": 2}
    assert cause({**row, "individual_preference": "[{'score': 3} …"}) == "bad_label"


@pytest.mark.parametrize("nobodys", ["[]", "[None]", "nan", "", "not rated"])
def test_a_cell_without_annotators_leaves_the_one_preference_of_all(nobodys: str) -> None:
    row = HELPSTEER3 | {"overall_preference": 2, "individual_preference": nobodys}
    (one,) = preference(row).comparisons
    assert (one.strength, one.annotator) == (2.0, None)
