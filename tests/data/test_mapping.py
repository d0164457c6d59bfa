"""Laws of columns under other names and of labels in words: they change nothing but names, and guess nothing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loading import ALLOW_DROPS, load, write
from parsing import KWISE, PAIR, cause, preference
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.data.config import MAPPED_COLUMNS, ReadingConfig
from rewardlab.data.formats.mapping import mapped
from rewardlab.data.rows import UnusableRowError

OWN = {"question": "Why?", "good": "Because.", "bad": "No."}
COLUMNS: dict[str, Any] = {"prompt_column": "question", "chosen_column": "good", "rejected_column": "bad"}
WORDS: dict[str, Any] = {"label_column": "winner", "map_label": ("A=1", "B=0", "tie=0.5")}


def test_a_row_under_other_names_is_the_row_under_ours() -> None:
    assert preference(OWN, **COLUMNS) == preference(PAIR)
    renamed = {"question": "Why?", "answers": KWISE["responses"], "ratings": KWISE["scores"]}
    names = {"prompt_column": "question", "responses_column": "answers", "scores_column": "ratings"}
    assert preference(renamed, **names) == preference(KWISE)


def test_names_may_be_swapped_and_hide_a_column_of_our_name() -> None:
    swapped = preference(PAIR, chosen_column="rejected", rejected_column="chosen")
    assert swapped.replies == preference(PAIR).replies[::-1]
    assert preference({**OWN, "chosen": "hidden"}, **COLUMNS) == preference(PAIR)


@given(st.dictionaries(st.sampled_from([*MAPPED_COLUMNS, "a", "b"]), st.integers()), st.permutations(MAPPED_COLUMNS))
def test_mapping_renames_as_the_flags_say_and_keeps_every_other_column(row: dict[str, int], own: list[str]) -> None:
    named = dict(zip(MAPPED_COLUMNS[:3], own, strict=False))
    found = mapped(row, ReadingConfig(**{f"{name}_column": column for name, column in named.items()}))
    assert {name: found[name] for name in named if name in found} == {
        name: row[column] for name, column in named.items() if column in row
    }
    others = {name: value for name, value in row.items() if name not in named and name not in named.values()}
    assert {name: value for name, value in found.items() if name not in named} == others


@pytest.mark.parametrize(("said", "label"), [("A", 1.0), (" B ", 0.0), ("tie", 0.5)])
def test_a_label_in_words_is_the_number_that_the_flag_gives_it(said: str, label: float) -> None:
    assert preference({**OWN, "winner": said}, **COLUMNS, **WORDS).comparisons[0].label == label


@pytest.mark.parametrize(
    ("said", "label"), [(1, 1.0), (1.0, 1.0), ("1", 1.0), (" 1.0", 1.0), ("2.00", 0.0), (True, 0.25), (2, 0.0)]
)
def test_numbers_are_compared_as_numbers_and_switches_as_words(said: object, label: float) -> None:
    values = ("1=1", "2=0", "true=0.25")
    assert preference({**PAIR, "label": said}, map_label=values).comparisons[0].label == label


@pytest.mark.parametrize("said", ["01", "1_0", "1e0", "+1", "1."])
def test_texts_that_are_written_otherwise_are_other_words(said: str) -> None:
    with pytest.raises(UnusableRowError, match="and --map-label names"):
        preference({**PAIR, "label": said}, map_label=("1=1", "10=0"))


@pytest.mark.parametrize("cell", ["[1, 0, null]", '{"ann": 1, "bob": 0, "eve": null}'])
def test_a_label_of_several_annotators_may_be_json_in_a_cell(tmp_path: Path, cell: str) -> None:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["question", "good", "bad", "votes"], [*OWN.values(), cell]])
    (row,) = load(tmp_path / "rows.csv", **COLUMNS, label_column="votes").preferences
    assert [(one.first, one.label) for one in row.comparisons] == [(0, 1.0), (1, 1.0)]


def test_a_value_without_a_number_is_dropped_by_name_and_the_error_lists_what_was_seen(tmp_path: Path) -> None:
    assert cause({**OWN, "winner": "C"}, **COLUMNS, **WORDS) == "unmapped_label"
    assert cause({**OWN, "winner": None}, **COLUMNS, **WORDS) == "missing_field"
    rows = [{**OWN, "winner": said} for said in ("A", "both bad", "B", "skip")]
    with pytest.raises(DataError) as caught:
        load(write(tmp_path / "a.jsonl", rows), **COLUMNS, **WORDS)
    assert "unmapped_label: 2" in str(caught.value)
    assert 'the label is "both bad", and --map-label names A, B, tie' in str(caught.value)
    assert 'the label is "skip"' in str(caught.value)
    (report,) = load(tmp_path / "a.jsonl", **COLUMNS, **WORDS, **ALLOW_DROPS).reports
    assert (report.kept, dict(report.dropped)) == (2, {"unmapped_label": 2})


@pytest.mark.parametrize(
    ("labels", "flags", "said"),
    [
        ((1, 2), (), "Seen were 1, 2: --map-label 1=1 2=0, or 1=0 2=1."),
        ((2, 3), (), "Seen were 2, 3: --map-label 2=1 3=0, or 2=0 3=1."),
        (("A", "it's B"), (), """Seen were A, 'it'"'"'s B': --map-label A=1 'it'"'"'s B'=0, or"""),
        ((0, 1, 2), (), "Seen were 0, 1, 2. A label with =1 says"),
        ((1, 2), ("1=1",), "or give 2 a number with --map-label too. A label with =1 says"),
        (tuple(range(2, 20)), (), "such as --map-label A=1 B=0. A label"),
        (("A", "\ud800"), (), "Seen were A. A label with =1 says"),
        (("\ud800", "\0"), (), "such as --map-label A=1 B=0. A label"),
    ],
)
def test_labels_without_a_meaning_are_listed_and_their_rows_not_offered_to_be_left_out(
    tmp_path: Path, labels: tuple[object, ...], flags: tuple[str, ...], said: str
) -> None:
    rows = [{**PAIR, "prompt": f"Why {n}?", "label": labels[n % len(labels)]} for n in range(40)]
    with pytest.raises(DataError) as caught:
        load(write(tmp_path / "a.jsonl", rows), map_label=flags)
    assert said in str(caught.value)
    assert "--max-drop-fraction" not in str(caught.value)


def test_a_few_labels_without_a_meaning_among_other_faults_are_no_reason_to_map_labels(tmp_path: Path) -> None:
    rows = [{**PAIR, "prompt": f"Why {n}?", **({"label": 2} if n < 2 else {"rejected": ""})} for n in range(9)]
    rows += [{**PAIR, "prompt": f"How {n}?"} for n in range(9)]
    with pytest.raises(DataError, match=r"Fix the data, or allow it with --max-drop-fraction 0\.5\.$"):
        load(write(tmp_path / "a.jsonl", rows))


def test_the_first_row_may_have_a_label_without_a_number(tmp_path: Path) -> None:
    rows = [{**OWN, "winner": said} for said in ("both bad", "A")]
    assert len(load(write(tmp_path / "a.jsonl", rows), **COLUMNS, **WORDS, **ALLOW_DROPS).preferences) == 1


def test_labels_of_several_annotators_are_mapped_one_by_one() -> None:
    row = {**OWN, "votes": {"ann": "A", "bob": "B", "eve": None}}
    names = {**COLUMNS, "label_column": "votes", "map_label": ("A=1", "B=0")}
    found = preference(row, **names)
    assert [(one.annotator, one.first, one.weight) for one in found.comparisons] == [("ann", 0, 1.0), ("bob", 1, 1.0)]
    assert cause({**row, "votes": ["A", "C"]}, **names) == "unmapped_label"


def test_csv_and_parquet_give_what_json_lines_give(tmp_path: Path) -> None:
    rows = [{**OWN, "winner": said} for said in ("A", "B", "tie")]
    lines = load(write(tmp_path / "a.jsonl", rows), **COLUMNS, **WORDS).preferences
    csv = tmp_path / "a.csv"
    csv.write_text("winner,question,good,bad\n" + "".join(f"{row['winner']},Why?,Because.,No.\n" for row in rows))
    by_csv = load(csv, **COLUMNS, **WORDS).preferences
    assert [(one.prompt, one.replies, one.comparisons) for one in by_csv] == [
        (one.prompt, one.replies, one.comparisons) for one in lines
    ]
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    by_parquet = load(tmp_path / "b.parquet", **COLUMNS, **WORDS).preferences
    assert [one.comparisons for one in by_parquet] == [one.comparisons for one in lines]


def test_lists_in_cells_of_renamed_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    texts, numbers = (json.dumps(KWISE[name]).replace('"', '""') for name in ("responses", "scores"))
    path.write_text(f'question,answers,ratings\nWhy?,"{texts}","{numbers}"\n')
    names = {"prompt_column": "question", "responses_column": "answers", "scores_column": "ratings"}
    (found,) = load(path, **names).preferences
    assert found.replies == preference(KWISE).replies
    assert found.comparisons == preference(KWISE).comparisons


def test_a_column_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [OWN])
    with pytest.raises(DataError, match=r"a\.jsonl:1: --chosen-column best: there is no such column.*'question'"):
        load(path, **{**COLUMNS, "chosen_column": "best"})
    with pytest.raises(DataError, match=r"--map-label: there is no column 'label'.*--label-column"):
        load(path, **COLUMNS, map_label=("A=1",))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"map_label": ("A",)}, r"--map-label A: wanted NAME=NUMBER"),
        ({"map_label": ("A=2",)}, r"--map-label A=2: the number must be from 0 to 1"),
        ({"map_label": ("A=1", "A=0")}, r"--map-label A=0: this name is given twice"),
        ({"map_label": ("A=nan",)}, r"wanted NAME=NUMBER"),
        ({"map_label": ("A=1,B=0",)}, r"several are written with spaces between them: --map-label A=1 B=0\."),
        ({"attributes": ("helpful=1,short=-0.5",)}, r"spaces between them: --attributes helpful=1 short=-0\.5\."),
        ({"attributes": ("helpfulness",)}, r"--attributes helpfulness: wanted NAME=NUMBER"),
        ({"attributes": ("=1",)}, r"--attributes: a name is empty"),
        ({"prompt_column": "a", "chosen_column": "a"}, r"the column 'a' is named twice"),
        ({"prompt_column": ""}, r"the name of the column is empty"),
        ({"max_per_post": 0}, r"--max-per-post 0: must be at least 1"),
        ({"min_score_ratio": 0.5}, r"--min-score-ratio 0.5: must be at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReadingConfig(**settings)


def test_a_value_may_hold_the_sign_and_be_empty() -> None:
    assert ReadingConfig(map_label=("a=b=1", "=0.5")).label_values == {"a=b": 1.0, "": 0.5}
    assert ReadingConfig(map_label=("both, bad=0.5",)).label_values == {"both, bad": 0.5}


def test_the_format_says_which_columns_were_taken_for_which(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{**OWN, "winner": "A"}])
    (report,) = load(path, **COLUMNS, **WORDS).reports
    assert report.format == "pairs, by the columns prompt (question), chosen (good), rejected (bad), label (winner)"


def test_a_strength_under_another_name() -> None:
    row = {"prompt": "Why?", "chosen": "a", "rejected": "b", "magnitude": 3, "strength": 1}
    (one,) = preference(row, strength_column="magnitude", strength_as="weight").comparisons
    assert (one.strength, one.weight) == (3.0, 3.0)
    kwise = {"prompt": "Why?", "responses": ["a", "b"], "scores": [1, 0], "magnitude": "2.5"}
    assert preference(kwise, strength_column="magnitude", strength_as="margin").comparisons[0].margin == 2.5
    assert cause({**row, "magnitude": -1}, strength_column="magnitude") == "bad_strength"
    assert cause({**row, "magnitude": None}, strength_column="magnitude", strength_as="weight") == "missing_strength"
    # A column by which a format is known stays what it is.
    steered = {"prompt": "Why?", "response_1": "a", "response_2": "b", "preference_strength": 2}
    read = preference(steered, strength_column="preference_strength", strength_as="weight")
    assert (read.replies[0][0].content, read.comparisons[0].weight) == ("b", 2.0)
