"""`rewardlab data mislabels` from rows to files: what it writes, refuses and leaves alone."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

import rewardlab
from command_line import refusal, tiny_reward_model
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_jsonl, sha256_file
from rewardlab.curation.mislabels.cleaning import turned_round, write_cleaned
from rewardlab.curation.mislabels.config import MislabelsConfig
from rewardlab.curation.mislabels.reading import judging_split
from rewardlab.curation.mislabels.run import find_mislabels
from rewardlab.curation.rewriting import stamp
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import find_sources
from rewardlab.data.judgements import Rules

WRONG = (3, 17, 42)
"""Lines of the dataset whose labels the judges contradict."""


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("REWARDLAB_CACHE", str(tmp_path / "cache"))


def rows(count: int = 60) -> list[dict]:
    return [
        {
            "prompt": f"Question number {number}, what is its answer?",
            "chosen": f"The answer to {number} is as follows, in full.",
            "rejected": f"no {number}",
            "note": "kept  as it is",
        }
        for number in range(1, count + 1)
    ]


def write(path: Path, of: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in of), encoding="utf-8")
    return path


def judges(folder: Path, count: int = 60) -> list[str]:
    """Two score files that agree on `WRONG`, by the number of the row, without ids."""
    names = []
    for judge in range(2):
        draw = np.random.default_rng(judge)
        path = folder / f"judge_{judge}.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["scores_chosen", "scores_rejected"])
            for number in range(1, count + 1):
                margin = (-4 if number in WRONG else 4) + draw.normal()
                writer.writerow([margin, 0.0])
        names.append(str(path))
    return names


@pytest.fixture
def data(tmp_path) -> Path:
    return write(tmp_path / "pairs.jsonl", rows())


def config_for(data: Path, folder: Path, **changes) -> MislabelsConfig:
    settings = {"dataset": (str(data),), "output_dir": folder / "out", "witness": tuple(judges(folder))}
    return MislabelsConfig.of(**{**settings, **changes})


# --- what it writes ------------------------------------------------------------------------------------------


def test_two_judges_name_the_wrong_rows_and_say_why(data, tmp_path):
    search = find_mislabels(config_for(data, tmp_path, plant=0.1, plant_seeds=2))
    entries = [entry for _, entry in read_jsonl(tmp_path / "out" / "mislabels.jsonl")]
    assert len(entries) == 60
    assert {entry["id"] for entry in entries if entry["flagged"]} == {f"pairs.jsonl:{number}" for number in WRONG}
    assert {entry["id"] for entry in entries[:3]} == {f"pairs.jsonl:{number}" for number in WRONG}
    first = entries[0]
    assert first["witnesses_against"] == 2
    assert all(0 < said["probability"] < 0.3 and said["margin"] < 0 for said in first["witnesses"].values())
    assert any("characters longer" in reason for reason in first["reasons"])
    figures = json.loads((tmp_path / "out" / "mislabels.json").read_text())
    assert figures["flagged"] == 3
    assert figures["data"][0]["kept"] == figures["data"][0]["rows_read"] == 60
    assert figures["planted"]["labels"] == 6
    assert figures["noise"]["confident"]["low"] <= 0.05 <= figures["noise"]["confident"]["high"]
    text = search.text()
    assert "3 are flagged" in " ".join(text.split())
    assert "Chance has a precision of 10%" in text


def test_the_noise_ceiling_is_told_where_labels_have_strengths(data, tmp_path):
    judged = write(tmp_path / "strong.jsonl", [{**row, "strength": 0.7} for row in rows()])
    found = find_mislabels(config_for(judged, tmp_path))
    assert " Ceiling 0.700 [" in " ".join(found.text().split())
    figures = json.loads((tmp_path / "out" / "mislabels.json").read_text())
    assert figures["noise"]["ceiling"]["origin"] == "strengths"
    assert "Ceiling" not in find_mislabels(config_for(data, tmp_path, overwrite=True)).text()


def test_the_texts_are_there_to_be_read_and_cannot_leave_their_blocks(tmp_path):
    hostile = rows()
    hostile[2]["chosen"] = "```\n# not a heading\n\x1b[31mred"
    data = write(tmp_path / "pairs.jsonl", hostile)
    find_mislabels(config_for(data, tmp_path, examples=4))
    text = (tmp_path / "out" / "mislabels.md").read_text()
    assert text.count("\n## ") == 4, "three flagged, and the next one"
    assert "````text\nassistant: ```" in text
    assert "\x1b" not in text
    assert "(not flagged)" in text


@pytest.mark.slow
def test_heads_on_two_layers_of_a_model_testify(base_model, data, tmp_path):
    config = config_for(
        data, tmp_path, model=str(base_model), witness=(), layers=("1", "2"), max_seq_len=128, precision="fp32",
        worth=True, worth_seeds=1,
    )  # fmt: skip
    search = find_mislabels(config)
    assert [one.name for one in search.ranking.testimonies] == ["layer 1", "layer 2"]
    assert search.ranking.testimonies[0].num_silent == 0
    assert search.worth is not None
    assert search.worth.sentences()
    again = find_mislabels(config.replace(overwrite=True))
    np.testing.assert_array_equal(search.ranking.order_N, again.ranking.order_N)


@pytest.mark.slow
def test_a_reward_model_testifies_by_its_scores_and_says_if_it_was_trained_on_the_rows(
    verified_here, data, tmp_path, log
):
    folder = tiny_reward_model(tmp_path / "model", provenance={"config": {"dataset": [str(data)]}})
    search = find_mislabels(config_for(data, tmp_path, witness=(*judges(tmp_path), str(folder)), agree=2))
    said = search.ranking.testimonies[2]
    assert (said.name, said.num_silent) == (str(folder), 0)
    assert "it was trained on pairs.jsonl" in log.text
    own = rewardlab.load(folder)
    row = rows()[4]
    first, second = own.score_replies(row["prompt"], [row["chosen"], row["rejected"]])
    assert said.margin_N[4] * search.pairs.sign_N[4] == pytest.approx(first - second, abs=1e-4)


def test_a_row_of_several_annotators_keeps_the_dissent_and_is_not_removed(tmp_path):
    of = [
        {
            "prompt": row["prompt"],
            "replies": [row["chosen"], row["rejected"]],
            "comparisons": [{"first": 0, "second": 1}] * 2 + ([{"first": 1, "second": 0}] if number == 5 else []),
        }
        for number, row in enumerate(rows(), start=1)
    ]
    data = write(tmp_path / "judged.jsonl", of)
    lines = [
        {"id": f"judged.jsonl:{number}", "reply": reply, "score": 3.0 * (reply == 0)}
        for number in range(1, 61)
        for reply in range(2)
    ]
    names = [str(write(tmp_path / f"scores_{judge}.jsonl", lines)) for judge in range(2)]
    target = tmp_path / "clean.jsonl"
    search = find_mislabels(config_for(data, tmp_path, witness=tuple(names), remove=target))
    entries = [entry for _, entry in read_jsonl(tmp_path / "out" / "mislabels.jsonl")]
    assert [(entry["id"], entry["flagged"]) for entry in entries[:2]] == [
        ("judged.jsonl:5", True),
        (entries[1]["id"], False),
    ]
    assert entries[0]["annotators"] == {"same": 1, "opposite": 2}
    assert any(
        why == "annotators disagree: 1 judge as this label does, 2 the other way" for why in entries[0]["reasons"]
    )
    assert target.read_bytes() == data.read_bytes(), "two of three judgements stand"
    assert search.written


def test_hostile_texts_and_rows_of_many_replies_are_searched_and_written(tmp_path):
    hostile = ["\x00" * 50, "\ud800 half a character", "</s><|im_end|>\u202e", "```\n# no\n```", "x" * 200_000, " a "]
    of = [
        {"prompt": f"{said} {number}", "responses": [said, f"{number} no", f"{number} yes"], "scores": [3, 1, 2]}
        for number in range(24)
        for said in [hostile[number % len(hostile)]]
    ]
    data = write(tmp_path / "kwise.jsonl", of)
    lines = [
        {"id": f"kwise.jsonl:{number}", "reply": reply, "score": float(-score if number == 4 else score)}
        for number in range(1, 25)
        for reply, score in enumerate([3, 1, 2])
    ]
    names = [str(write(tmp_path / f"scores_{judge}.jsonl", lines)) for judge in range(2)]
    clean = {"witness": tuple(names), "remove": tmp_path / "clean.jsonl", "max_drop_fraction": 0.2}
    search = find_mislabels(config_for(data, tmp_path, **clean))
    assert len(search.pairs) == 60, "half a character is dropped and counted by the reader"
    assert {search.pairs.preferences[owner].id for owner in search.pairs.owners_N[search.ranking.flagged_N]} == {
        "kwise.jsonl:4"
    }
    assert len(list(read_jsonl(tmp_path / "out" / "mislabels.jsonl"))) == 60
    assert "\x00" not in (tmp_path / "out" / "mislabels.md").read_text()
    expected = data.read_bytes().splitlines(keepends=True)
    assert (tmp_path / "clean.jsonl").read_bytes() == b"".join(expected[:3] + expected[4:])


def test_scores_of_eval_belong_to_rows_by_source_and_id(data, tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text(
        "".join(
            json.dumps({"source": "pairs", "id": f"pairs.jsonl:{number}", "reply": reply, "score": float(reply == 0)})
            + "\n"
            for number in range(1, 51)
            for reply in range(2)
        )
    )
    search = find_mislabels(config_for(data, tmp_path, witness=(*judges(tmp_path), str(path)), agree=2))
    assert [one.num_silent for one in search.ranking.testimonies] == [0, 0, 10]


# --- cleaned files -------------------------------------------------------------------------------------------


def test_removing_leaves_every_other_row_byte_for_byte_and_a_trace(tmp_path):
    lines = [json.dumps(row).encode() for row in rows()]
    lines[4] = lines[4].replace(b'": "', b'" :   "')
    lines[9] += b"  "
    content = b"\xef\xbb\xbf" + b"\r\n".join(lines[:20]) + b"\r\n\n" + b"\n".join(lines[20:])
    data = tmp_path / "pairs.jsonl"
    data.write_bytes(content)
    target = tmp_path / "clean.jsonl"
    search = find_mislabels(config_for(data, tmp_path, remove=target))
    trace = [row for _, row in read_jsonl(tmp_path / "clean.removed.jsonl")]
    gone = {int(row["row"].rpartition(":")[2]) for row in trace}
    kept = [line for number, line in enumerate(content.splitlines(keepends=True), start=1) if number not in gone]
    assert target.read_bytes() == b"".join(kept)
    assert gone
    assert len(gone) == int(search.ranking.flagged_N.sum())
    assert trace[0]["done"] == "removed"
    assert trace[0]["check"] == "mislabels"
    assert all(said["probability"] < 0.3 for row in trace for said in row["pairs"][0]["witnesses"].values())
    assert data.read_bytes() == content


def test_flipping_is_done_when_asked_and_says_that_removing_does_better(data, tmp_path, capsys):
    out = tmp_path / "turned.jsonl"
    words = ["--output-dir", str(tmp_path / "out"), "--witness", *judges(tmp_path), "--flip", str(out)]
    main(["data", "mislabels", str(data), *words])
    printed = capsys.readouterr().out
    assert "removing suspicious rows does better" in " ".join(printed.split())
    before, after = ([row for _, row in read_jsonl(path)] for path in (data, out))
    changed = [number for number, (one, other) in enumerate(zip(before, after, strict=True), start=1) if one != other]
    assert tuple(changed) == WRONG
    assert after[2]["chosen"] == before[2]["rejected"]
    assert after[2]["note"] == "kept  as it is"


def test_a_label_of_its_own_is_turned_round_and_sides_are_exchanged_without():
    row, plain = {"prompt": "p", "chosen": "a", "rejected": "b"}, ReadingConfig()
    assert turned_round(row, "x:1", plain) == {"prompt": "p", "chosen": "b", "rejected": "a"}
    assert turned_round({**row, "label": 0.2}, "x:1", plain) == {**row, "label": 0.8}
    with pytest.raises(DataError, match="x:1 has no chosen and rejected"):
        turned_round({"prompt": "p", "responses": []}, "x:1", plain)


def test_a_label_that_is_mapped_and_columns_of_other_names_are_turned_round():
    row = {"q": "p", "good": "a", "bad": "b", "label": 2}
    named = {"prompt_column": "q", "chosen_column": "good", "rejected_column": "bad"}
    exchanged = {"q": "p", "good": "b", "bad": "a", "label": 2}
    # With `1 - label` the row would have a label of -1, and would be dropped.
    assert turned_round(row, "x:1", ReadingConfig(**named, map_label=("2=1", "1=0"))) == exchanged
    assert turned_round({**row, "vote": 1.0}, "x:1", ReadingConfig(**named, label_column="vote"))["vote"] == 0.0
    scored = {"chosen": "a", "rejected": "b", "score_chosen": 5, "score_rejected": 2, "chosen_by": "x"}
    rated = turned_round({**scored, "chosen-rating": 5, "rejected-rating": 2}, "a:1", ReadingConfig())
    assert (rated["chosen-rating"], rated["rejected-rating"]) == (2, 5)
    assert turned_round(scored, "x:1", ReadingConfig()) == {
        "chosen": "b", "rejected": "a", "score_chosen": 2, "score_rejected": 5, "chosen_by": "x",
    }  # fmt: skip


def test_what_cannot_be_turned_round_is_refused_before_the_search(tmp_path):
    of = [{"prompt": f"p{n}", "responses": [f"a{n}", f"b{n}"], "scores": [1, 2]} for n in range(60)]
    config = config_for(write(tmp_path / "kwise.jsonl", of), tmp_path, flip=tmp_path / "turned.jsonl")
    with pytest.raises(DataError, match="kwise.jsonl:1 has no chosen and rejected"):
        find_mislabels(config)
    assert not (tmp_path / "out").exists()


def test_what_became_of_the_rows_is_counted_as_when_training_reads_them(tmp_path):
    of = [{**row, "label": 0.9} for row in rows()]
    of[3] |= {"chosen": of[3]["rejected"], "rejected": of[3]["chosen"], "label": 0.1}
    data = write(tmp_path / "labelled.jsonl", of)
    find_mislabels(config_for(data, tmp_path))
    (report,) = json.loads((tmp_path / "out" / "mislabels.json").read_text())["data"]
    assert (report["labelled"], report["swapped"]) == (60, 1)
    assert report["sha256"] == sha256_file(data)
    assert report["format"].startswith("pairs")


def test_all_rows_of_a_removed_preference_go_and_no_others(tmp_path):
    of = [
        {"pair_id": number, "role": role, "prompt": row["prompt"], "text": row[role]}
        for role in ("rejected", "chosen")
        for number, row in enumerate(rows(), start=1)
    ]
    data = write(tmp_path / "long.jsonl", of)
    search = find_mislabels(config_for(data, tmp_path, remove=tmp_path / "clean.jsonl"))
    lines = data.read_bytes().splitlines(keepends=True)
    kept = [line for number, line in enumerate(lines) if number % 60 + 1 not in WRONG]
    assert (tmp_path / "clean.jsonl").read_bytes() == b"".join(kept)
    trace = [row for _, row in read_jsonl(tmp_path / "clean.removed.jsonl")]
    assert [row["rows"] for row in trace] == [[number, number + 60] for number in WRONG]
    assert search.written == ["3 preferences removed, 114 rows left: " + str(tmp_path / "clean.jsonl") + "."]
    with pytest.raises(DataError, match="several rows a preference"):
        find_mislabels(config_for(data, tmp_path, flip=tmp_path / "turned.jsonl", overwrite=True))


@pytest.mark.parametrize("ending", ["jsonl.gz", "csv", "json"])
def test_other_formats_are_written_as_json_lines(ending, tmp_path):
    path = tmp_path / f"pairs.{ending}"
    of = rows(5)
    if ending == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, of[0])
            writer.writeheader()
            writer.writerows(of)
    elif ending == "json":
        path.write_text(json.dumps(of))
    else:
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in of).encode()))
    (source,) = find_sources([str(path)], "train")
    numbers = [2, 3, 4, 5, 6] if ending == "csv" else [1, 2, 3, 4, 5]
    target = tmp_path / "out.jsonl"
    since, rules = stamp(source), Rules(source="pairs", reading=ReadingConfig(), seed=0)
    assert write_cleaned(source, rules, target, {numbers[1]: {"row": numbers[1]}}, done="removed", since=since) == 4
    assert [row for _, row in read_jsonl(target)] == [of[0], *of[2:]]
    assert write_cleaned(source, rules, target, {numbers[0]: {"row": numbers[0]}}, done="flipped", since=since) == 5
    assert next(read_jsonl(target))[1]["chosen"] == of[0]["rejected"]
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DataError, match="changed while it was read"):
        write_cleaned(source, rules, target, {}, done="removed", since=since)


# --- what it refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("pairs.test.jsonl", "test"),
        ("validation.jsonl", "validation"),
        ("my-dev_set.jsonl", "dev"),
        ("eval_pairs.jsonl", "eval"),
        ("valid.jsonl", "valid"),
        ("val.jsonl", "val"),
        ("pairs.train.jsonl", None),
        ("latest.jsonl", None),
        ("test_of_time.train.jsonl", None),
    ],
)
def test_a_split_that_judges_models_is_known_by_its_name(name, word, tmp_path):
    folder = tmp_path / "dev"
    folder.mkdir()
    write(folder / name, rows(2))
    (source,) = find_sources([str(folder / name)], "train")
    assert judging_split(source) == word


@pytest.mark.parametrize("flag", ["remove", "flip"])
def test_splits_that_judge_models_are_never_cleaned(flag, tmp_path):
    data = write(tmp_path / "pairs.test.jsonl", rows())
    with pytest.raises(ConfigError, match="named as a split that judges models \\(test\\)"):
        find_mislabels(config_for(data, tmp_path, **{flag: tmp_path / "clean.jsonl"}))
    assert not (tmp_path / "out").exists()
    assert find_mislabels(config_for(data, tmp_path)).ranking.flagged_N.sum() == 3, "looking is allowed"


def test_one_witness_is_refused(data, tmp_path, capsys):
    words = ["data", "mislabels", str(data), "--output-dir", str(tmp_path / "out")]
    assert "--model is missing" in refusal(capsys, *words)
    assert "at least two" in refusal(capsys, *words, "--witness", judges(tmp_path)[0])
    assert "one head is one witness" in refusal(capsys, *words, "--model", "m", "--layers", "3")
    assert "there are 2 witnesses" in refusal(capsys, *words, "--witness", *judges(tmp_path), "--agree", "3")
    assert "DATASET is missing" in refusal(capsys, "data", "mislabels", "--model", "m")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"below": 0.6}, "--below 0.6"),
        ({"plant": 0.5}, "--plant 0.5"),
        ({"agree": 0}, "--agree 0"),
        ({"worth": True}, "--worth compares heads"),
        ({"remove": Path("x.csv")}, "rows are written as JSON Lines"),
        ({"remove": Path("nowhere/x.jsonl")}, "there is no folder nowhere"),
        ({"remove": Path("x.jsonl"), "flip": Path("x.jsonl")}, "name one file"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(changes, says, data, tmp_path):
    with pytest.raises(ConfigError, match=says):
        find_mislabels(config_for(data, tmp_path, **changes))


def test_nothing_of_others_is_replaced(data, tmp_path):
    config = config_for(data, tmp_path, remove=tmp_path / "clean.jsonl")
    with pytest.raises(ConfigError, match="is the dataset itself"):
        find_mislabels(config.replace(remove=data, overwrite=True))
    (tmp_path / "clean.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="so it is not ours"):
        find_mislabels(config.replace(overwrite=True))
    (tmp_path / "clean.jsonl").unlink()
    find_mislabels(config)
    with pytest.raises(ConfigError, match="replace it with --overwrite"):
        find_mislabels(config)
    with pytest.raises(ConfigError, match="already holds a search"):
        find_mislabels(config.replace(remove=None))
    find_mislabels(config.replace(overwrite=True))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "mislabels.json").write_text("{}")
    with pytest.raises(ConfigError, match="did not write"):
        find_mislabels(config.replace(remove=None, output_dir=foreign, overwrite=True))


def test_scores_without_ids_need_as_many_rows_as_the_data(data, tmp_path):
    (tmp_path / "short").mkdir()
    config = config_for(data, tmp_path, witness=tuple(judges(tmp_path / "short", 59)))
    with pytest.raises(DataError, match="its 59 rows have no ids"):
        find_mislabels(config)


def test_scores_without_ids_belong_to_rows_by_place_whatever_is_dropped_or_empty(tmp_path):
    of = rows()
    of[7]["rejected"] = of[7]["chosen"]
    text = "".join(json.dumps(row) + "\n" + "\n" * (number == 1) for number, row in enumerate(of))
    (tmp_path / "pairs.jsonl").write_text(text)
    search = find_mislabels(config_for(tmp_path / "pairs.jsonl", tmp_path))
    flagged = search.pairs.owners_N[search.ranking.flagged_N]
    asked = {search.pairs.preferences[owner].prompt[0].content for owner in flagged.tolist()}
    assert asked == {of[number - 1]["prompt"] for number in WRONG}


def test_scores_of_other_data_are_no_witness(data, tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"id": "elsewhere:1", "reply": 0, "score": 1.0}\n{"id": "elsewhere:1", "reply": 1, "score": 0}\n')
    with pytest.raises(DataError, match="no score for any of the 60 pairs"):
        find_mislabels(config_for(data, tmp_path, witness=(*judges(tmp_path), str(path))))
