"""What the stages hand on: rows, parts of files, the layout of one JSON file a fact, and prompts of any data."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path, PurePath
from typing import Any

import pytest

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Message
from rewardlab.gold.files.inputs import InputConfig
from rewardlab.gold.files.layouts import write_responses, write_rewards
from rewardlab.gold.files.parts import Shard, parts_of, shard_of
from rewardlab.gold.files.prompts import read_prompts
from rewardlab.gold.files.rows import GoldRow, read_gold_rows
from rewardlab.gold.stage import Place

ROW = {"id": "a", "prompt": [{"role": "user", "content": "hi"}], "responses": ["x", None], "gold": [1.5, None]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- rows ------------------------------------------------------------------------------------------------------


def test_a_row_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    row = {**ROW, "samples": [{"seed": 3, "stop": "length"}, {"seed": 4, "error": "no"}], "gold_errors": {"1": "no"}}
    row |= {"source": "mine", "judgements": [1]}
    (found,) = read_gold_rows(write(tmp_path / "rows.jsonl", row))
    assert found.as_json() == row
    assert found.is_cut == (True, False)


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_tables_hold_scores_as_json(tmp_path: Path, ending: str) -> None:
    row = {**ROW, "samples": [{"seed": 3, "stop": "length"}, {"error": "no"}], "gold_errors": {"1": "no"}}
    path = tmp_path / f"rows.{ending}"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if ending == "tsv" else ",")
        writer.writerow(row)
        writer.writerow([value if isinstance(value, str) else json.dumps(value) for value in row.values()])
        writer.writerow(["b", "hi", json.dumps(["x", "y"]), "", "", ""])
    first, second = read_gold_rows(path)
    assert first.as_json() == row
    assert (second.gold, second.samples, dict(second.gold_errors)) == (None, (), {})


def test_rows_without_ids_are_numbered_over_all_files(tmp_path: Path) -> None:
    bare = {"prompt": "hi", "replies": ["x"]}
    files = [write(tmp_path / name, bare, bare) for name in ("one.jsonl", "two.jsonl")]
    found = list(read_gold_rows(files))
    assert [row.id for row in found] == ["0", "1", "2", "3"]
    assert found[0].prompt == (Message("user", "hi"),)


def test_replies_may_be_assistant_turns_as_trl_keeps_completions(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "x"}
    path = write(tmp_path / "rows.jsonl", {"prompt": "hi", "responses": [turn, [turn], "x", None]})
    (found,) = read_gold_rows(path)
    assert found.responses == ("x", "x", "x", None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"responses": []}, "`responses` is empty"),
        ({"responses": "x"}, "not a list of texts"),
        ({"responses": ["x", 5]}, "`responses` cannot be read .a response is 5, not text"),
        ({"responses": ["x", {"role": "user", "content": "y"}]}, "one assistant turn"),
        ({"gold": [1.0]}, "1 score for 2 replies"),
        ({"gold_errors": {"reply": "too long"}}, "`gold_errors` names 'reply'; wanted the number of one of the 2"),
        ({"gold_errors": {"2": "too long"}}, "`gold_errors` names '2'"),
        ({"gold": [1.0, True]}, "reply 1 .* is True"),
        ({"gold": ["1", 2]}, "reply 0 .* is '1'"),
        ({"gold": None}, "no gold scores .* `rewardlab gold label` first"),
        ({"samples": [{}]}, "does not say of each of the 2 replies"),
        ({"prompt": []}, "missing or empty"),
        ({"prompt": [{"role": "assistant", "content": "hi"}]}, "ends with a turn of the assistant"),
        ({"prompt": 3}, "missing or empty"),
        ({"prompt": [{"role": "user"}]}, "cannot be read"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "rows.jsonl", ROW, {**ROW, **change})
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{message}"):
        list(read_gold_rows(path, labelled=True))


def test_names_of_other_rows_in_parquet_are_no_errors_of_a_row(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {**ROW, "gold_errors": {"0": "too long", "5": None}})
    assert [row.gold_errors for row in read_gold_rows(path)] == [{"0": "too long"}]


def test_a_score_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**ROW, "gold": [float("nan"), 1.0]}) + "\n")
    with pytest.raises(DataError, match="reply 0 .* is nan"):
        list(read_gold_rows(path))


# --- parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "count"), [(10, 3), (3, 5), (0, 2), (16, 16), (1_000_003, 97)])
def test_parts_are_neighbours_and_together_the_whole(rows: int, count: int) -> None:
    parts = [Shard(number, count).rows(rows) for number in range(count)]
    assert [row for part in parts for row in part] == list(range(rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_parts_of_a_file_are_found_in_order_and_a_missing_one_is_named(tmp_path: Path) -> None:
    whole = tmp_path / "samples.jsonl"
    paths = [Shard(number, 11).path(whole) for number in range(11)]
    assert paths[1].name == "samples-00002-of-00011.jsonl"
    for path in reversed(paths):
        path.touch()
    assert parts_of(whole) == paths
    paths[3].unlink()
    with pytest.raises(DataError, match="part 4 of 11 is missing"):
        parts_of(whole)
    Shard(0, 2).path(whole).touch()
    with pytest.raises(DataError, match="parts of 2 and 11"):
        parts_of(whole)
    with pytest.raises(DataError, match="no such file"):
        parts_of(tmp_path / "others.jsonl")


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/0", "-1/3", "a/b"])
def test_a_part_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="K/N"):
        shard_of(text)


def test_a_task_of_a_slurm_array_takes_the_part_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not a task of a Slurm array"):
        shard_of("slurm")
    for name, value in {"ID": "7", "MIN": "5", "MAX": "9", "COUNT": "5"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert shard_of("slurm") == Shard(2, 5)
    assert shard_of("1/2") == Shard(0, 2)
    assert shard_of(None) is None
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "3")
    with pytest.raises(ConfigError, match="have gaps"):
        shard_of("slurm")


# --- the layout of one file a fact -----------------------------------------------------------------------------


def layout(folder: Path, prompts: Any, responses: Any, rewards: Any) -> InputConfig:
    names = {"prompts": prompts, "responses": responses, "rewards": rewards}
    for name, value in names.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return InputConfig(**{f"{name}_path": folder / f"{name}.json" for name in names})


REPLIES = [{"response_1": "a", "response_2": "b", "response_3": "c"}, {"response_1": "d", "response_2": "e"}]


def test_files_that_belong_together_by_place_are_rows(tmp_path: Path) -> None:
    found = list(layout(tmp_path, ["one", "two"], REPLIES, [[1, 2, 3], [4.25, None]]).rows(labelled=True))
    assert [row.responses for row in found] == [("a", "b", "c"), ("d", "e")]
    assert [row.gold for row in found] == [(1.0, 2.0, 3.0), (4.25, None)]
    assert [row.prompt[-1].content for row in found] == ["one", "two"]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    rows = [
        GoldRow(id="0", prompt=(Message("user", "one"),), responses=("ü\n", None), gold=(0.1 + 0.2, None)),
        GoldRow(id="1", prompt=(Message("user", "two"),), responses=("x", "y"), gold=(-7.59375, 1e-300)),
    ]
    write_responses(tmp_path / "responses.json", rows)
    write_rewards(tmp_path / "rewards.json", rows)
    (tmp_path / "prompts.json").write_text(json.dumps(["one", "two"]))
    names = {f"{name}_path": tmp_path / f"{name}.json" for name in ("prompts", "responses", "rewards")}
    found = list(InputConfig(**names).rows(labelled=True))
    assert [(row.responses, row.gold) for row in found] == [(row.responses, row.gold) for row in rows]


def test_files_with_a_row_a_line_are_read_too(tmp_path: Path) -> None:
    rewards = [[1, 2, 3], [4.25, None]]
    names = {
        "prompts_path": write(tmp_path / "prompts.jsonl", {"prompt": "one"}, {"prompt": "two"}),
        "responses_path": write(tmp_path / "responses.json", *REPLIES),
        "rewards_path": write(tmp_path / "rewards.jsonl", *rewards),
    }
    wanted = list(layout(tmp_path, ["one", "two"], REPLIES, rewards).rows(labelled=True))
    write(tmp_path / "responses.jsonl", *REPLIES)
    for responses in ("responses.json", "responses.jsonl"):
        asked = InputConfig(**{**names, "responses_path": tmp_path / responses})
        found = list(asked.rows(labelled=True))
        assert [(row.responses, row.gold) for row in found] == [(row.responses, row.gold) for row in wanted]
    write_rewards(tmp_path / "rewards.jsonl", wanted)
    assert [row.gold for row in InputConfig(**names).rows(labelled=True)] == [row.gold for row in wanted]
    write(tmp_path / "rewards.jsonl", rewards)
    assert [row.gold for row in InputConfig(**names).rows(labelled=True)] == [row.gold for row in wanted]
    (tmp_path / "rewards.jsonl").write_text("[[1, 2, 3],\n[4.25, null]]\n")
    assert [row.gold for row in InputConfig(**names).rows(labelled=True)] == [row.gold for row in wanted]
    lines = {**names, "rewards_path": write(tmp_path / "lines.json", *rewards)}
    assert [row.gold for row in InputConfig(**lines).rows(labelled=True)] == [row.gold for row in wanted]
    (tmp_path / "rewards.jsonl").write_text("[1, 2, 3]\n[4.25,\n")
    with pytest.raises(DataError, match=r"rewards\.jsonl:2: not valid JSON"):
        list(InputConfig(**names).rows())


def test_files_of_different_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rewards\.json has 1 row and .*prompts\.json has 2"):
        list(layout(tmp_path, ["one", "two"], REPLIES, [[1, 2, 3]]).rows())


def test_rewards_that_are_not_as_many_as_the_replies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rewards\.json:2: got 3 scores for 2 replies"):
        list(layout(tmp_path, ["one", "two"], REPLIES, [[1, 2, 3], [1, 2, 3]]).rows())


def test_the_first_so_many_replies(tmp_path: Path) -> None:
    for name, value in {"p": ["one", "two"], "r": REPLIES, "s": [[1, 2], [4, 5]]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    asked = InputConfig(
        prompts_path=tmp_path / "p.json", responses_path=tmp_path / "r.json", rewards_path=tmp_path / "s.json",
        num_responses=2, system="Be brief.",
    )  # fmt: skip
    found = list(asked.rows(labelled=True))
    assert [row.responses for row in found] == [("a", "b"), ("d", "e")]
    assert found[0].prompt == (Message("system", "Be brief."), Message("user", "one"))


def test_the_first_so_many_replies_have_the_first_so_many_scores(tmp_path: Path) -> None:
    asked = layout(tmp_path, ["one", "two"], REPLIES, [[1, 2, 3], [4, 5]])
    found = list(dataclasses.replace(asked, num_responses=1).rows(labelled=True))
    assert [(row.responses, row.gold) for row in found] == [(("a",), (1.0,)), (("d",), (4.0,))]
    with pytest.raises(DataError, match=r"responses\.json:2: has 2 responses, wanted 3"):
        list(dataclasses.replace(asked, num_responses=3).rows())


def test_numbers_of_replies_with_a_gap_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has response_3, but no response_2"):
        list(layout(tmp_path, ["one"], [{"response_1": "a", "response_3": "c"}], [[1]]).rows())


def test_half_a_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompts-path and --responses-path: give both"):
        InputConfig(prompts_path=tmp_path / "p.json")
    with pytest.raises(ConfigError, match="one file of ours, or theirs"):
        InputConfig(prompts_path=tmp_path / "p.json", responses_path=tmp_path / "r.json", input=(tmp_path / "x",))


def test_the_names_of_an_output() -> None:
    for name in ("rm_rewards.json", "rm_rewards.jsonl"):
        place = Place.of(Path("data") / name)
        assert (place.rows.name, place.twin.name) == ("rm_rewards.jsonl", "rm_rewards.json")
    assert Place.of(Path("x.jsonl.gz")).rows.name == "x.jsonl.gz"
    with pytest.raises(ConfigError, match=r"ends in \.jsonl"):
        Place.of(Path("x.csv"))


# --- prompts ---------------------------------------------------------------------------------------------------

USER = (Message("user", "hi"),)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("texts.json", '["hi"]'),
        ("conversations.json", '[[{"role": "user", "content": "hi"}]]'),
        ("rows.json", '[{"prompt": "hi"}]'),
        ("column.json", '{"prompts": ["hi"]}'),
        ("rows.jsonl", '{"messages": [{"role": "user", "content": "hi"}]}\n'),
        ("instructions.json", '[{"instruction": "hi", "input": ""}]'),
        ("table.csv", "question\nhi\n"),
        ("pairs.jsonl", '{"prompt": "hi", "chosen": "a", "rejected": "b"}\n'),
        ("kwise.jsonl", '{"prompt": "hi", "responses": ["a", "b"], "scores": [1, 2]}\n'),
        (
            "hh.jsonl",
            '{"chosen": "\\n\\nHuman: hi\\n\\nAssistant: a", "rejected": "\\n\\nHuman: hi\\n\\nAssistant: b"}\n',
        ),
    ],
)
def test_prompts_of_every_kind_of_file(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    (found,) = read_prompts(str(tmp_path / name))
    assert found.prompt == USER


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
@pytest.mark.parametrize("value", ["hi", MESSAGES], ids=["texts", "messages"])
def test_prompts_a_line_are_read_whatever_the_name_ends_in(tmp_path: Path, name: str, value: object) -> None:
    path = write(tmp_path / name, value, value)
    assert [one.prompt for one in read_prompts(str(path))] == [USER, USER]
    path.write_text(path.read_text() + "hi\n")
    with pytest.raises(DataError, match=rf"{name}:3: not valid JSON"):
        list(read_prompts(str(path)))


@pytest.mark.parametrize("indent", [None, 1])
def test_a_whole_list_of_prompts_is_read_from_a_jsonl_file(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "x.jsonl"
    for values in (["hi", "hi"], [MESSAGES, MESSAGES]):
        path.write_text(json.dumps(values, indent=indent))
        assert [one.prompt for one in read_prompts(str(path))] == [USER, USER]


def test_an_instruction_has_its_input_behind_it(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"instruction": "Sum up.", "input": "A text.", "dataset": "farm"}]')
    (found,) = read_prompts(str(tmp_path / "x.json"))
    assert found.prompt[0].content == "Sum up.\n\nA text."
    assert found.extra == {"dataset": "farm"}


def test_repeats_stay_in_files_of_prompts_and_go_in_preferences(tmp_path: Path, log) -> None:
    prompts, pairs = tmp_path / "prompts.json", tmp_path / "pairs.jsonl"
    prompts.write_text('["hi", "hi"]')
    pairs.write_text('{"prompt": "hi", "chosen": "a", "rejected": "b"}\n' * 2)
    assert [len(list(read_prompts(str(path)))) for path in (prompts, pairs)] == [2, 1]
    assert "2 rows, 1 different prompts; each is taken once" in log.text
    assert [len(list(read_prompts(str(path), repeats=True))) for path in (prompts, pairs)] == [2, 2]
    assert len(list(read_prompts(str(prompts), repeats=False))) == 1


def test_a_system_turn_is_added_where_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([[{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}], "hi"]))
    assert [one.prompt[0] for one in read_prompts(str(path), system="")] == [
        Message("system", "own"),
        Message("system", ""),
    ]


@pytest.mark.parametrize("content", ["[]", '[{"text": "hi"}]', '[""]'])
def test_what_holds_no_prompts_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError, match=r"x\.json"):
        list(read_prompts(str(tmp_path / "x.json")))


# --- what does not fit --------------------------------------------------------------------------------------------


def test_a_row_with_fewer_replies_than_are_asked_for_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "why?", "responses": ["a", "b"]}) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: has 2 responses, wanted 3 \(--num-responses\)"):
        list(InputConfig(input=(path,), num_responses=3).rows())


def test_a_whole_file_beside_parts_of_its_name_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "x.jsonl"
    whole.touch()
    assert parts_of(whole) == [whole]
    Shard(0, 2).path(whole).touch()
    with pytest.raises(ConfigError, match=r"x\.jsonl: x-00001-of-00002\.jsonl is there too"):
        parts_of(whole)


def test_a_prompt_with_images_or_tools_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([[{"role": "user", "content": "What is this?", "images": ["a.png"]}]]))
    with pytest.raises(DataError, match=r"prompts\.json:1: .*has images beside its text"):
        list(read_prompts(str(path)))
    write(rows := tmp_path / "rows.jsonl", {"prompt": "Who?", "images": []}, {"prompt": "What?", "images": ["a.png"]})
    with pytest.raises(DataError, match=r"rows\.jsonl:2: has images beside its prompt"):
        list(read_prompts(str(rows)))
    write(rows, {"prompt": "Who?", "tools": []}, {"prompt": "What?", "tools": [{"type": "function"}]})
    with pytest.raises(DataError, match=r"rows\.jsonl:2: has tools beside its prompt"):
        list(read_prompts(str(rows)))


def test_very_many_parts_are_found_without_comparing_each_with_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, whole = 300, tmp_path / "labels.jsonl"
    names = [Shard(number, count).path(whole).name for number in range(count)]
    for name in names:
        (tmp_path / name).touch()
    compared, equal = 0, PurePath.__eq__

    def counted(path: PurePath, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(path, other)

    monkeypatch.setattr(PurePath, "__eq__", counted)
    assert [path.name for path in parts_of(whole)] == names
    assert compared <= count
    (tmp_path / names[123]).unlink()
    with pytest.raises(DataError, match="part 124 of 300 is missing"):
        parts_of(whole)
