"""What is nearly right is named with what it was probably meant to be; labels that turn rows around are counted."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from common import make_tokenizer
from loading import load, pair, write
from parsing import read
from rewardlab.cli import main
from rewardlab.core.errors import DataError
from rewardlab.data.formats import meant_column
from rewardlab.data.formats.known import nearest
from rewardlab.data.prepare import load_data
from rewardlab.data.reading import log_source
from rewardlab.data.rows import UnusableRowError
from rewardlab.data.templates import build_renderer
from rewardlab.training.settings.config import RewardTrainerConfig

PAIR = {"prompt": "Why?", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        (("prompt", "choosen", "rejected"), "'choosen' as 'chosen'"),
        (("Prompt", "Chosen", "Rejected"), "'Prompt' as 'prompt', 'Chosen' as 'chosen', 'Rejected' as 'rejected'"),
        (("pair_id", "role", "repsonse"), "'repsonse' as 'response'"),
        (("p", "chosen_response", "answer-rejected"), "'chosen_response' as 'chosen', 'answer-rejected' as 'rejected'"),
        (("prompt", "responses", "rating"), "'rating' as 'scores'"),
        (("promt", " responses ", "scores"), "'promt' as 'prompt', ' responses ' as 'responses'"),
        (("history", "human_ref_a", "human_ref_B", "labels"), "'human_ref_a' as 'human_ref_A'"),
    ],
)
def test_misspelt_columns_are_named_with_those_that_they_look_like(tmp_path: Path, columns, hint) -> None:
    path = write(tmp_path / "a.jsonl", [dict.fromkeys(columns, "x")])
    with pytest.raises(DataError) as caught:
        load(path)
    assert f"match no known schema of preferences. Perhaps {hint} is meant. The nearest formats: " in str(caught.value)


@pytest.mark.parametrize(
    "columns",
    [
        ("prompt", "good", "bad"),
        ("prompt", "response_a", "response_b", "pref"),
        ("prompt", "answer_chosen", "answer_rejected", "source"),
        ("instruction", "good", "bad"),
    ],
)
def test_a_format_of_which_only_the_prompt_is_there_is_no_nearer_than_pairs(columns) -> None:
    said = nearest(columns, list(filter(None, (meant_column(name, columns) for name in columns))))
    assert re.match("pairs lacks|whole conversations or HH transcripts lacks", said)
    assert "Nectar" not in said
    assert nearest(["prompt", "answers_"], ["answers"]).startswith("Nectar, answers with ranks lacks 'answers'; ")


@pytest.mark.parametrize("wrapped", [{"data": [PAIR] * 2}, {"version": "1", "data": [PAIR]}, {"data": PAIR, "id": "3"}])
def test_columns_inside_another_are_told(wrapped: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(wrapped), encoding="utf-8")
    with pytest.raises(DataError, match=r"The columns of pairs are inside 'data': make what is in it the rows\."):
        load(tmp_path / "a.json")


SIDES = "--prompt-column question --chosen-column response_A --rejected-column response_B"
TASK = {"id": 1, "data": {"prompt": "Why?", "answer1": "a", "answer2": "b"}}
RESULT = {"type": "pairwise", "from_name": "pw", "to_name": "t1,t2", "value": {"selected": "left"}}


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        (
            {
                "pair_id": "1",
                "question": "q",
                "response_model": "m",
                "response_A": "a",
                "response_B": "b",
                "label": "A>B",
            },
            f"If these are two replies and a verdict on them, give {SIDES} --map-label FIRST=1 SECOND=0.",
        ),
        (
            {"prompt": "q", "response_a": "a", "response_b": "b", "better": "a"},
            "If these are two replies and a verdict on them, give --chosen-column response_a --rejected-column "
            "response_b --label-column better --map-label FIRST=1 SECOND=0.",
        ),
        (
            {"question_id": "1", "winner": "model_a", "prompt": "q", "response_1": "a", "response_2": "b"},
            "If these are two replies and a verdict on them, give --chosen-column response_1 --rejected-column "
            "response_2 --label-column winner --map-label FIRST=1 SECOND=0.",
        ),
        (
            {"comparison_id": "1", "prompt_id": "1", "text": "q", "completion_a": "a", "completion_b": "b", "pref": 1},
            "If these are two replies and a verdict on them, give --chosen-column completion_a --rejected-column "
            "completion_b --label-column COLUMN --map-label FIRST=1 SECOND=0.",
        ),
        (
            {"context": [], "original_response": "a", "good_edited_response": "b", "bad_edited_response": "c"},
            "Give --prompt-column context --chosen-column good_edited_response --rejected-column bad_edited_response.",
        ),
        (
            {"context": [], "original_response": "a", "edited_response": "b", "change_summary": "c"},
            "If the edited reply is to be the better one, give --prompt-column context --chosen-column edited_response "
            "--rejected-column original_response.",
        ),
        (
            {"prompt": "q", "context": "", "original_response": "a", "edited_response": "b"},
            "If the edited reply is to be the better one, give --chosen-column edited_response --rejected-column "
            "original_response.",
        ),
        (
            {"promt": "q", "answer_a": "a", "answer_b": "b", "label": "A", "question_type": "why"},
            "If these are two replies and a verdict on them, give --prompt-column promt --chosen-column answer_a "
            "--rejected-column answer_b --map-label FIRST=1 SECOND=0.",
        ),
        (
            {"instruct": "q", "output_1": "a", "output_2": "b", "preference": 1},
            "If these are two replies and a verdict on them, give --prompt-column instruct --chosen-column output_1 "
            "--rejected-column output_2 --label-column preference --map-label FIRST=1 SECOND=0.",
        ),
        (
            {"conversation_id": "c", "opening_prompt": "q", "conversation_history": []},
            "These are conversations of PRISM, of which a function on docs/more-datasets.md in rewardlab's repository "
            "makes a row of each turn.",
        ),
        (
            {"prompt": "q", "completions": ["step 1", "step 2"], "labels": [True, False]},
            "These are steps of a solution with a label each, for a reward model of steps (PRM). Here whole replies "
            "are compared: write pairs, or a row for each whole solution with a label.",
        ),
        (
            {"orig_instruction": "q", "orig_response_A": "a", "orig_response_B": "b", "orig_preference": "A"}
            | {"instruction": "Which is better?", "output": "A"},
            "Give --prompt-column orig_instruction --chosen-column orig_response_A --rejected-column orig_response_B "
            "--label-column orig_preference --map-label A=1 B=0.",
        ),
        (
            {**TASK, "annotations": [{"id": 7, "result": [{"type": "choices"}, RESULT]}]},
            "This is Label Studio's full export, with the texts in 'data' and the choices in 'annotations': export "
            "JSON_MIN instead, and give --chosen-column answer1 --rejected-column answer2 --label-column pw "
            "--map-label left=1 right=0.",
        ),
        (
            {"id": 1, "data": {"prompt": "Why?", "chosen": "a", "rejected": "b"}, "annotations": [{"result": None}]},
            "This is Label Studio's full export, with the texts in 'data' and the choices in 'annotations': export "
            "JSON_MIN instead, and give --chosen-column LEFT --rejected-column RIGHT --label-column RESULT --map-label "
            "left=1 right=0.",
        ),
    ],
)
def test_flags_for_two_replies_and_for_exports_are_told(row: dict[str, Any], hint: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(write(tmp_path / "a.jsonl", [row]))
    assert f"match no known schema of preferences. {hint} The nearest formats: " in str(caught.value)
    assert "Perhaps" not in str(caught.value)


def test_a_name_of_something_else_is_not_told_as_a_misspelt_side_or_prompt() -> None:
    names = ["prompt_id", "question_id", "comparison_id", "edited_response", "edited"]
    assert [meant_column(name, ["x"]) for name in names] == [None] * 5
    assert [meant_column(name, ["x"]) for name in ("pairid", "rejectd_response")] == ["pair_id", "rejected_response"]
    assert [meant_column("accepted", [other]) for other in ("rejected", "x")] == ["chosen", None]


def test_the_number_of_a_prompt_is_not_told_as_the_prompt_of_rows_that_lack_one(tmp_path: Path) -> None:
    for name, is_told in (("promts", True), ("prompt_id", False)):
        with pytest.raises(UnusableRowError, match="plain|Human") as caught:
            read({name: "x", "chosen": "a", "rejected": "b"})
        assert (f"--prompt-column {name}" in str(caught.value)) == is_told


def test_a_misspelt_column_beside_two_replies_is_told_where_it_is_all_that_is_missing(tmp_path: Path) -> None:
    row = {"prompt": "q", "response_1": "a", "response_2": "b", "preference_strenght": 2}
    with pytest.raises(DataError, match="Perhaps 'preference_strenght' as 'preference_strength' is meant"):
        load(write(tmp_path / "a.jsonl", [row]))


def test_a_number_is_not_told_as_a_misspelt_reply_or_list_of_scores(tmp_path: Path) -> None:
    utterance = {"user_prompt": "Why?", "model_response": "a", "score": 61, "if_chosen": True, "turn": 0}
    with pytest.raises(DataError) as caught:
        load(write(tmp_path / "a.jsonl", [utterance]))
    assert "Perhaps" not in str(caught.value)
    with pytest.raises(DataError, match="Perhaps 'score' as 'scores', 'if_chosen' as 'chosen' is meant"):
        load(write(tmp_path / "b.jsonl", [utterance | {"score": [1, 2], "if_chosen": "a"}]))


def test_an_ending_in_capitals_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [PAIR]).rename(tmp_path / "A.JSONL")
    with pytest.raises(DataError, match=r"unknown extension.* written in small letters: rename it\."):
        load(tmp_path / "A.JSONL")


def test_columns_that_look_like_nothing_get_no_hint(tmp_path: Path) -> None:
    assert [meant_column(name, ["prompt"]) for name in ("prompt", "question", "id", "promptt", "")] == [None] * 5
    with pytest.raises(DataError, match=r"match no known schema of preferences. The nearest formats: "):
        load(write(tmp_path / "a.jsonl", [{"question": "x", "id": 1}]))


@pytest.mark.parametrize("reading", [{}, {"prompt_column": "question"}, {"map_label": ("A=1",)}])
def test_a_table_whose_first_row_is_read_as_its_header_is_refused_in_few_words(tmp_path: Path, reading) -> None:
    texts = ["Why? " * 100_000, *(f"a{number} " * 100 for number in range(1000))]
    (tmp_path / "a.csv").write_text("\n".join([",".join(texts)] * 2), encoding="utf-8")
    with pytest.raises(DataError, match=r"'Why\? Why") as caught:
        load(tmp_path / "a.csv", **reading)
    assert " and 977 more" in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_plain_texts_whose_prompt_column_is_misspelt_are_told_so(tmp_path: Path) -> None:
    rows = [{"Prompt": "Why?", "chosen": "a", "rejected": "b"}]
    with pytest.raises(DataError, match=r"no_prompt: 1 .*is the column 'Prompt' the 'prompt'\?"):
        load(write(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize("name", ["question", "input", "messages"])
@pytest.mark.parametrize("template", ["auto", "concat"])
def test_plain_texts_whose_prompt_has_another_name_are_told_the_flag(name: str, template: str) -> None:
    row = {name: "Why?", "chosen": "a", "rejected": "b"}
    with pytest.raises(UnusableRowError, match=f"'{name}' the 'prompt'. If so, use --prompt-column {name}"):
        read(row, chat_template=template)
    with pytest.raises(UnusableRowError, match=f"missing_field: no text in 'prompt', .* use --prompt-column {name}"):
        read({"prompt": None, **row}, chat_template=template)
    assert read(row, prompt_column=name).preference.prompt[0].content == "Why?"


def test_what_labels_and_prompts_of_other_kinds_need_is_told(tmp_path: Path) -> None:
    pair = {"prompt": "Why?", "chosen": "a", "rejected": "b"}
    for row, flag in ((pair | {"label": True}, "--map-label"), ({"chosen": "a", "rejected": "b"}, "--prompt-column")):
        with pytest.raises(DataError, match=rf"the only row cannot be used:\n  \w+: 1 .*; {flag} "):
            load(write(tmp_path / "a.jsonl", [row]))


@pytest.mark.parametrize(("mark", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")])
def test_another_separator_is_named(tmp_path: Path, mark: str, name: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(mark.join(["prompt", "chosen", "rejected"]) + "\n" + mark.join(["Why, so?", "a", "b"]) + "\n")
    with pytest.raises(
        DataError, match=rf"a.csv:1: the header .* is separated by {name}, wanted commas. Save the file"
    ):
        load(path)


def test_a_misspelt_name_brings_every_file_like_it(tmp_path: Path) -> None:
    for name in ("pairs.jsonl", "pairs.parquet", "other.jsonl"):
        write(tmp_path / name, [pair(0)])
    with pytest.raises(DataError) as caught:
        load(tmp_path / "pairss.jsonl")
    assert str(caught.value).endswith(f"There is: {tmp_path / 'pairs.jsonl'}, {tmp_path / 'pairs.parquet'}.")


@pytest.mark.parametrize(("labels", "swapped"), [([1, 1, 0.5], 0), ([1, 0, 0.3], 2), ([None] * 3, 0)])
def test_labels_are_counted_and_those_that_swap_the_preferred_reply(tmp_path: Path, caplog, labels, swapped) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(pair(n) | {"label": label}) + "\n" for n, label in enumerate(labels)))
    labelled = sum(label is not None for label in labels)
    (report,) = load(path).reports
    assert (report.labelled, report.swapped) == (labelled, swapped)
    config = RewardTrainerConfig.of(model="m", dataset=(str(path),), eval_fraction=0.0, cache_dir="none", num_workers=1)
    with caplog.at_level(logging.INFO, logger="rewardlab"):
        prepared = load_data(config.data, build_renderer(make_tokenizer(), config.data.rendering), seed=0)
    (told,) = prepared.reports["train"]
    assert (told["labelled"], told["swapped"]) == (labelled, swapped)
    line = f"'label' of {labelled} rows is read as the probability that chosen is preferred"
    said = [record for record in caplog.records if "'label' of" in record.getMessage()]
    assert len(said) == (labelled > 0)
    if labelled:
        assert line in said[0].getMessage()
        assert (said[0].levelno == logging.WARNING) == (swapped > 0)
        assert (f"in {swapped} it is below 1/2, so that rejected is preferred" in said[0].getMessage()) == (swapped > 0)


def test_comparisons_that_prefer_their_second_reply_are_counted_and_told(tmp_path: Path, caplog) -> None:
    judged = [{"first": 0, "second": 1, "label": 0.2}, {"first": 0, "second": 2}, {"first": 1, "second": 2, "label": 0}]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "p", "replies": ["a", "b", "c"], "comparisons": judged}) + "\n")
    (report,) = load(path).reports
    assert report.second_preferred == report.as_dict()["second_preferred"] == 2
    with caplog.at_level(logging.INFO, logger="rewardlab"):
        log_source(report)
    assert "2 of the comparisons have a label below 1/2, so that their second reply is preferred" in caplog.text


def test_messages_that_are_written_into_a_text_are_counted_and_told(tmp_path: Path, caplog) -> None:
    said = [{"role": "user", "content": "Why?"}]
    dated = "[{'content': 'Why?', 'at': datetime.date(2024, 1, 2), 'role': 'user'}]"
    others = ('[{"name": "apple"}]', '{"value": 3}', '{"from": "EUR", "value": 3}', '[{"content": "a"}]')
    rows = [pair(n) | {"prompt": text} for n, text in enumerate((json.dumps(said), str(said), dated, *others))]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (report,) = load(path).reports
    assert report.json_texts == report.as_dict()["json_texts"] == 3
    log_source(report)
    assert "in 3 rows a text is messages written as JSON, and is read as a text" in caplog.text
    whole = tmp_path / "b.jsonl"
    texts = {side: json.dumps([*said, {"role": "assistant", "content": side}]) for side in ("chosen", "rejected")}
    whole.write_text(json.dumps(texts))
    with pytest.raises(DataError, match="if these are messages, store them as a list, not as text"):
        load(whole)


def test_several_replies_in_the_place_of_one_are_told_where_they_go(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [pair(0) | {"rejected": ["No.", "Never."]}])
    with pytest.raises(DataError, match="got a list of texts.*wanted one reply; .* `replies` with `comparisons`"):
        load(path)


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_tools_tell_of_messages_that_are_written_into_a_text(tmp_path: Path, log, capsys, command) -> None:
    said = json.dumps([{"role": "user", "content": "Why?"}])
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(pair(n) | {"prompt": said}) + "\n" for n in range(2)))
    main(["data", command, str(path), *(["--output", str(tmp_path / "b.jsonl")] if command == "convert" else [])])
    assert "in 2 rows a text is messages written as JSON, and is read as a text" in log.text
