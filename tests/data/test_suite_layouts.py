"""Public layouts of suites: what a row becomes, which files are read, and what is refused in which words."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.suites import SuiteItem, all_pairs
from rewardlab.core.types import Message
from rewardlab.data.suites import reading
from rewardlab.data.suites.layouts import LAYOUTS
from rewardlab.data.suites.reading import folder_of, read_suite, require_suites
from suite_folders import WRITERS, rows_to


def read_one(suite: str, folder: Path, row: dict[str, Any], name: str = "rows.jsonl") -> SuiteItem:
    """The item of a suite of a single row."""
    rows_to(folder / name, [row])
    (one,) = read_suite(suite, folder).items
    return one


def why(suite: str, folder: Path, row: dict[str, Any], name: str = "rows.jsonl") -> str:
    """What is said about a suite of a single row that cannot be used."""
    rows_to(folder / name, [row])
    with pytest.raises(DataError) as refused:
        read_suite(suite, folder)
    return str(refused.value)


BEST_OF = {"prompt": "p", "chosen": ["a"], "rejected": ["b", "c", "d"], "subset": "Focus", "id": "7"}
TIED = {**BEST_OF, "subset": "Ties", "id": "tied:4", "chosen": ["a", "aa"]}
JUDGED = {
    "pair_id": "x", "source": "livebench-math", "question": "q", "response_A": "a", "response_B": "b", "label": "B>A",
}  # fmt: skip
CONFLICT = {
    "prompt": "p", "scores": [False, True, True], "sampled_conflict_pairs": [[0, 1], [2, 0]], "question_id": "q1",
    "model_name": "m", "response_1": "a", "response_2": "b", "response_3": "c",
}  # fmt: skip


def test_replies_keep_their_order_and_pairs_say_who_is_better(tmp_path):
    one = read_one("rewardbench2", tmp_path / "1", BEST_OF)
    assert (one.id, one.subset, one.replies) == ("7", "Focus", ("a", "b", "c", "d"))
    assert one.pairs == all_pairs(1, 3) == ((0, 1), (0, 2), (0, 3))
    assert one.prompt == (Message("user", "p"),)
    one = read_one("judgebench", tmp_path / "2", JUDGED)
    assert (one.replies, one.pairs, one.subset) == (("a", "b"), ((1, 0),), "livebench-math")
    row = {"prompt": "p", "chosen": ["a", "b", "c"], "rejected": ["d", "e", "f"], "domain": "safety-refuse"}
    one = read_one("rm-bench", tmp_path / "3", row)
    assert one.subset == "safety"
    assert (one.better, one.worse) == ((0, 1, 2), (3, 4, 5))
    one = read_one(
        "llmbar", tmp_path / "4", {"input": "i", "output_1": "a", "output_2": "b", "label": 2}, "gptinst.json"
    )
    assert (one.pairs, one.subset) == (((1, 0),), "GPTInst")
    row = {"input": "i", "targets": {"choices": ["a", "b"], "labels": [0, 1]}}
    one = read_one("hhh", tmp_path / "5", row, "honest/test.jsonl")
    assert (one.pairs, one.subset) == (((1, 0),), "honest")


def test_tasks_of_big_bench_hold_the_rows_of_hhh(tmp_path):
    for part in ("harmless", "helpful", "honest", "other"):
        (tmp_path / part).mkdir()
        examples = [{"input": f"{part}?", "target_scores": {"no": 0, "yes": 1, "never": 0}}]
        task = {"name": f"hhh_alignment {part}", "keywords": ["alignment"], "examples": examples}
        (tmp_path / part / "task.json").write_text(json.dumps(task))
    items = read_suite("hhh", tmp_path).items
    assert [one.subset for one in items] == ["harmless", "helpful", "honest", "other"]
    assert {one.replies for one in items} == {("no", "yes", "never")}
    assert {one.pairs for one in items} == {((1, 0), (1, 2))}


def test_a_row_of_rmb_is_of_the_goal_that_it_names_itself_whatever_its_folder_is_called(tmp_path):
    row = {"conversation_input": "p", "chosen": {"answer": "a"}, "reject": {"answer": "b"}}
    own = {**row, "category_path": "Pairwise_set/Harmlessness/S1"}
    both = "Helpfulness and Harmlessness/r.jsonl"
    assert read_one("rmb", tmp_path / "1", own, both).subset == "Harmlessness pairwise"
    assert read_one("rmb", tmp_path / "2", own, "Helpfulness/r.jsonl").subset == "Harmlessness pairwise"
    assert read_one("rmb", tmp_path / "3", row, "Harmlessness/Helpfulness.jsonl").subset == "Helpfulness pairwise"
    assert "Helpfulness or Harmlessness" in why("rmb", tmp_path / "4", row, both)


def test_lists_in_cells_of_a_csv_file_are_lists_or_refused(tmp_path):
    def written(dump):
        folder = tmp_path / dump.__name__
        folder.mkdir()
        with (folder / "rows.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(BEST_OF)
            lines.writerow([dump(value) if isinstance(value, list) else value for value in BEST_OF.values()])
        return folder

    def halves(value):
        return repr(value)[:-2] + "]"

    for dump in (json.dumps, repr):
        (one,) = read_suite("rewardbench2", written(dump)).items
        assert one.replies == ("a", "b", "c", "d")
    with pytest.raises(DataError, match="chosen is .*wanted a list as JSON"):
        read_suite("rewardbench2", written(halves))


def test_a_lone_correct_reply_need_not_be_a_list(tmp_path):
    assert read_one("rewardbench2", tmp_path, {**BEST_OF, "chosen": "a"}).replies == ("a", "b", "c", "d")


def test_both_rows_of_a_prompt_of_ties_are_one_cluster(tmp_path):
    rows_to(tmp_path / "rows.jsonl", [TIED, {**TIED, "id": "ref:4", "chosen": ["a"], "prompt": "another prompt"}])
    tied, ref = read_suite("rewardbench2", tmp_path).items
    assert tied.cluster == ref.cluster
    assert tied.pairs == all_pairs(2, 3)


def test_conflict_pairs_are_turned_by_correctness_and_clustered_by_question(tmp_path):
    rows_to(
        tmp_path / "PPE-GPQA-Best-of-K" / "data" / "train.jsonl",
        [CONFLICT, {**CONFLICT, "model_name": "n", "response_1": "x"}],
    )
    first, second = read_suite("ppe", tmp_path).items
    assert first.pairs == ((1, 0), (2, 0))
    assert first.subset == "GPQA"
    assert first.cluster == second.cluster
    assert first.id != second.id


def test_only_replies_that_a_conflict_pair_names_are_kept(tmp_path):
    row = {**CONFLICT, "sampled_conflict_pairs": [[2, 0], [2, 0]]}
    one = read_one("ppe", tmp_path, row, "mbpp.jsonl")
    assert (one.replies, one.pairs, one.subset) == (("a", "c"), ((1, 0), (1, 0)), "MBPP-Plus")


@pytest.mark.parametrize("absent", [None, "", math.nan])
def test_rows_without_a_question_are_not_of_one_question(absent, tmp_path):
    """They are clustered by their prompts, and keep ids of their own."""
    rows = [{**CONFLICT, "prompt": f"p{n // 2}", "question_id": absent, "model_name": absent} for n in range(6)]
    rows_to(tmp_path / "math.jsonl", [{**row, "response_1": f"a{n}"} for n, row in enumerate(rows)])
    items = read_suite("ppe", tmp_path).items
    assert len({one.cluster for one in items}) == 3
    assert len({one.id for one in items}) == 6


def test_a_problem_in_six_languages_is_one_cluster(tmp_path):
    """The name of the function tells it; a prompt that does not name one is a cluster of its own."""
    signatures = {
        "cpp": "C++ function `bool has_close_elements(vector<float> numbers, float threshold)`",
        "go": "Go function `HasCloseElements(numbers []float64, threshold float64) bool`",
        "java": "Java function `boolean hasCloseElements(List<Double> numbers, double threshold)`",
        "js": "JavaScript function `hasCloseElements(numbers, threshold)`",
        "python": "Python function `has_close_elements(numbers: List[float], threshold: float) -> bool`",
        "rust": "Rust function `has_close_elements(numbers:Vec<f32>, threshold: f32) -> bool`",
    }
    row = {"chosen": "a", "rejected": "b"}
    rows = [
        {**row, "prompt": f"Write a {signature} to solve the following problem:\n{name}", "subset": f"hep-{name}"}
        for name, signature in signatures.items()
    ]
    others = [
        {**row, "prompt": "Write a Go function `Other(n int) int` to solve it", "subset": "hep-go"},
        {**row, "prompt": "Sort a list.", "subset": "hep-go"},
        {**row, "prompt": rows[0]["prompt"], "subset": "alpacaeval-easy"},
    ]
    rows_to(tmp_path / "rows.jsonl", [*rows, *others])
    clusters = [one.cluster for one in read_suite("rewardbench", tmp_path).items]
    assert len(set(clusters[:6])) == 1
    assert len(set(clusters)) == 4


def test_votes_for_a_tie_are_left_out_and_counted(tmp_path):
    WRITERS["ppe"](tmp_path, 5)
    data = read_suite("ppe", tmp_path)
    assert data.left_out == {"votes for a tie": 1}
    assert Counter(one.subset for one in data.items) == {"human preference": 4, "MATH": 10}


def test_a_conversation_is_a_prompt_of_several_turns(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    row = {
        "conversation_input": turns,
        "chosen": {"answer": "yes"},
        "reject": {"answer": "no"},
        "category_path": "Pairwise_set/Helpfulness/Chat",
    }
    one = read_one("rmb", tmp_path, row)
    assert [turn.content for turn in one.prompt] == ["a", "b", "c"]
    assert one.subset == "Helpfulness pairwise"


def test_a_text_that_looks_like_a_transcript_is_taken_as_it_is(tmp_path):
    text = "Human: hello\n\nAssistant:"
    one = read_one(
        "hhh", tmp_path, {"input": text, "targets": {"choices": ["a", "b"], "labels": [1, 0]}}, "other.jsonl"
    )
    assert one.prompt == (Message("user", text),)


@pytest.mark.parametrize(
    ("suite", "read"),
    [
        ("rewardbench", {"data/filtered.jsonl"}),
        ("rm-bench", {"data/total_dataset.json"}),
        (
            "judgebench",
            {
                "data/dataset=judgebench,response_model=gpt-4o-2024-05-13.jsonl",
                "data/dataset=judgebench,response_model=claude-3-5-sonnet-20240620.jsonl",
            },
        ),
    ],
)
def test_other_files_of_a_published_folder_are_not_read(suite, read, tmp_path):
    WRITERS[suite](tmp_path, 6)
    assert set(read_suite(suite, tmp_path).sources) == read


def test_pairs_of_another_response_model_are_subsets_of_their_own(tmp_path):
    WRITERS["judgebench"](tmp_path, 6)
    subsets = {one.subset for one in read_suite("judgebench", tmp_path).items}
    assert {"mmlu-pro", "livecodebench", "mmlu-pro (claude-3-5-sonnet-20240620)"} < subsets


@pytest.mark.parametrize(
    ("name", "subset"),
    [
        ("dataset=judgebench,response_model=claude-3.5-sonnet.jsonl", "mmlu-pro (claude-3.5-sonnet)"),
        ("dataset=judgebench,response_model=gpt-4o-2024-05-13.jsonl", "mmlu-pro"),
        ("claude-00000-of-00001.jsonl", "mmlu-pro (claude)"),
        ("gpt-00000-of-00001.jsonl", "mmlu-pro"),
    ],
)
def test_rows_that_name_no_response_model_are_of_the_one_of_their_file(name, subset, tmp_path):
    assert read_one("judgebench", tmp_path, {**JUDGED, "source": "mmlu-pro-x"}, name).subset == subset


@pytest.mark.parametrize(
    ("suite", "row", "name", "said"),
    [
        ("rewardbench2", {**BEST_OF, "chosen": []}, "r.jsonl", "chosen is [], wanted a list of texts"),
        ("rewardbench2", {**BEST_OF, "rejected": "b"}, "r.jsonl", 'rejected is "b", wanted a list of texts'),
        ("rewardbench2", {**BEST_OF, "rejected": '["b", "c"]'}, "r.jsonl", "wanted a list of texts"),
        ("rewardbench2", {**BEST_OF, "chosen": ["a", "b"]}, "r.jsonl", "only the Ties subset has more than one"),
        ("rewardbench2", {**TIED, "id": "17"}, "r.jsonl", "wanted one such as ref:3 or tied:3"),
        ("rewardbench2", {**TIED, "chosen": ["a"]}, "r.jsonl", "tied:4 has 1 correct replies"),
        ("rewardbench2", {**BEST_OF, "prompt": 3}, "r.jsonl", "its prompt cannot be used"),
        ("rewardbench2", {**BEST_OF, "rejected": ["a", None, "c"]}, "r.jsonl", "a reply is null, wanted text"),
        ("judgebench", {**JUDGED, "label": "A"}, "r.jsonl", "wanted A>B or B>A"),
        ("rm-bench", {"prompt": "p", "chosen": ["a"], "rejected": ["b"], "domain": "chat"}, "r.jsonl", "list of 3"),
        ("rm-bench", {"prompt": "p", "chosen": list("abc"), "rejected": list("def")}, "r.jsonl", "its domain is"),
        ("llmbar", {"input": "i", "output_1": "a", "output_2": "b", "label": 0}, "Manual.jsonl", "wanted 1 or 2"),
        ("llmbar", {"input": "i", "output_1": "a", "output_2": "b", "label": 1}, "r.jsonl", "named after one set"),
        ("ppe", {**CONFLICT, "scores": [None, True, True]}, "math.jsonl", "the score of response_1 is null"),
        ("ppe", {**CONFLICT, "scores": [True, math.nan, True]}, "math.jsonl", "the score of response_2 is NaN"),
        ("ppe", {**CONFLICT, "scores": [True, 10**400, True]}, "math.jsonl", "the score of response_2 is"),
        ("ppe", {**CONFLICT, "scores": ["10", "9", "8"]}, "math.jsonl", "wanted true, false or a number"),
        ("ppe", {**CONFLICT, "sampled_conflict_pairs": [[True, False]]}, "math.jsonl", "wanted two indices below 3"),
        ("ppe", CONFLICT, "aftermath/part-0.jsonl", "named after one benchmark of PPE"),
        ("ppe", CONFLICT, "math and gpqa/train.jsonl", "named after one benchmark of PPE"),
        ("hhh", {"input": "i", "targets": {"choices": ["a", "b"], "labels": [1, 1]}}, "other.jsonl", "at least one 1"),
        (
            "hhh",
            {"input": "i", "targets": {"choices": ["a", "b"], "labels": [1, 0]}},
            "r.jsonl",
            "named after its part",
        ),
        ("ppe", {**CONFLICT, "sampled_conflict_pairs": [[1, 2]]}, "math.jsonl", "both right or both wrong"),
        ("ppe", {**CONFLICT, "sampled_conflict_pairs": [[0, 9]]}, "math.jsonl", "wanted two indices below 3"),
        ("ppe", {**CONFLICT, "sampled_conflict_pairs": []}, "math.jsonl", "wanted a list of pairs of replies"),
        (
            "rmb",
            {"conversation_input": "p", "bon_best": {"answer": "a"}, "loser_list": []},
            "Helpfulness/r.jsonl",
            "wanted a list of objects with an answer",
        ),
        (
            "hhh",
            {"input": "i", "targets": {"choices": ["a", "b"], "labels": [1]}},
            "other.jsonl",
            "wanted a list of 2 labels",
        ),
        ("ppe", {"prompt": "p", "response_1": "a", "response_2": "b", "winner": "me"}, "v.jsonl", "model_a or model_b"),
        ("rmb", {"conversation_input": [], "chosen": {}, "reject": {}}, "r.jsonl", "Helpfulness or Harmlessness"),
    ],
)
def test_a_row_that_is_not_one_of_the_suite_is_refused_with_its_place(suite, row, name, said, tmp_path):
    message = why(suite, tmp_path, row, name)
    assert f"{name}:1: not a row of {suite}" in message
    assert said in message
    assert "Get the suite from" in message


@pytest.mark.parametrize("suite", LAYOUTS)
def test_other_data_are_refused_with_the_columns_that_are_missing(suite, tmp_path):
    message = why(suite, tmp_path, {"prompt": "p", "something": 1})
    assert f"rows.jsonl:1: not a row of {suite}: the columns" in message
    assert "(there are: " in message
    with pytest.raises(DataError, match="are missing"):
        require_suites([suite], tmp_path)


def test_a_folder_that_holds_its_suite_twice_is_refused(tmp_path):
    WRITERS["hhh"](tmp_path, 4)
    rows_to(tmp_path / "again" / "harmless" / "x.jsonl", [])
    for part in ("harmless", "helpful", "honest", "other"):
        text = (tmp_path / part / "test.jsonl").read_text()
        (tmp_path / "again" / f"{part}.jsonl").write_text(text)
    with pytest.raises(DataError, match="16 of 32 rows are there twice"):
        read_suite("hhh", tmp_path)


def test_rows_that_share_an_id_stay_apart_whatever_their_order(tmp_path):
    rows = [{**BEST_OF, "prompt": "p"}, {**BEST_OF, "prompt": "q"}, {**BEST_OF, "prompt": "r", "id": "8"}]
    ids = []
    for number, order in enumerate((rows, rows[::-1])):
        rows_to(tmp_path / str(number) / "rows.jsonl", order)
        ids.append({one.prompt: one.id for one in read_suite("rewardbench2", tmp_path / str(number)).items})
    assert ids[0] == ids[1]
    assert sorted(ids[0].values()) == ["7", "7 #2", "8"]


def test_an_id_made_for_a_row_is_not_one_that_another_row_has(tmp_path):
    rows = [{**BEST_OF, "prompt": prompt, "id": id} for prompt, id in (("p", "1"), ("q", "1"), ("r", "1 #2"))]
    for number, order in enumerate((rows, rows[::-1])):
        rows_to(tmp_path / str(number) / "rows.jsonl", order)
        items = read_suite("rewardbench2", tmp_path / str(number)).items
        assert sorted(one.id for one in items) == ["1", "1 #2", "1 #3"]
        assert next(one.id for one in items if one.prompt[0].content == "r") == "1 #2"


def test_two_rows_of_ties_with_one_id_are_refused(tmp_path):
    rows_to(tmp_path / "rows.jsonl", [TIED, {**TIED, "prompt": "q"}, BEST_OF])
    with pytest.raises(DataError, match="two rows of the Ties subset have the id tied:4"):
        read_suite("rewardbench2", tmp_path)


def test_several_suites_have_folders_of_their_names(tmp_path):
    (tmp_path / "hhh").mkdir()
    assert folder_of("hhh", ["hhh", "rmb"], tmp_path) == tmp_path / "hhh"
    assert folder_of("rmb", ["rmb"], tmp_path) == tmp_path
    assert folder_of("rmb", ["rmb", "hhh"], None) is None
    with pytest.raises(DataError, match="no folder rmb in it"):
        folder_of("rmb", ["hhh", "rmb"], tmp_path)


def test_a_file_in_place_of_the_folder_is_said_to_be_one(tmp_path):
    rows_to(tmp_path / "other.jsonl", [])
    with pytest.raises(DataError, match=r"other.jsonl: is a file. Name the folder with the files of hhh."):
        read_suite("hhh", tmp_path / "other.jsonl")


def test_a_suite_without_a_known_hub_dataset_asks_for_its_folder():
    for suite in ("rmb", "llmbar"):
        with pytest.raises(ConfigError, match=f"--suite {suite}: needs --suite-data FOLDER. Get it from"):
            require_suites([suite], None)


def test_the_hub_gives_the_parts_of_a_suite(monkeypatch):
    """A stand-in for the hub: which datasets and splits are asked for, and that their names say the subset."""
    asked = []

    def give(source):
        asked.append((source.name, source.split))
        row = {"input": f"i {source.name}", "targets": {"choices": ["a", "b"], "labels": [1, 0]}}
        return iter([(1, row)])

    monkeypatch.setattr(reading, "read_source", give)
    data = read_suite("hhh", None)
    assert asked == [(f"HuggingFaceH4/hhh_alignment:{p}", "test") for p in ("harmless", "helpful", "honest", "other")]
    assert [one.subset for one in data.items] == ["harmless", "helpful", "honest", "other"]
    assert set(data.sources.values()) == {None}


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="reading Parquet needs pyarrow")
def test_parquet_is_read_as_published(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist([BEST_OF, {**TIED, "id": "tied:1"}]), tmp_path / "data" / "test-0.parquet")
    one, tied = read_suite("rewardbench2", tmp_path).items
    assert one.replies == ("a", "b", "c", "d")
    assert tied.better == (0, 1)


@pytest.mark.slow
def test_reading_and_judging_suites_import_no_torch():
    code = (
        "import sys, rewardlab.data.suites.reading, rewardlab.analysis.suites.judging, rewardlab.report.suites;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
