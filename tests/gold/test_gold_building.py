"""Preferences from gold scores: what is compared, what is left out and counted, and what the files hold."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import labelled
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.lock import only_process
from rewardlab.core.types import Preference
from rewardlab.gold.building.config import BuildConfig
from rewardlab.gold.building.report import text_report
from rewardlab.gold.building.run import Built, build
from rewardlab.gold.files.inputs import InputConfig
from rewardlab.gold.files.rows import read_gold_rows

FILES = {f"{name}{ending}" for name in ("train", "test") for ending in (".jsonl", ".trl.jsonl", ".columns.json")}
FILES |= {"labels.train.jsonl", "labels.test.jsonl", "manifest.json"}


def run(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> Built:
    """Build without a test side, unless the settings say otherwise."""
    source = labelled.write(tmp_path / "labels.jsonl", rows)
    given = {"output_dir": tmp_path / "out", "test_fraction": 0.0, "near": "none", **settings}
    return build(BuildConfig(inputs=InputConfig(input=(source,)), **given))


def texts(preference: Preference) -> list[tuple[str, str, float]]:
    """(first reply, second reply, label) of each comparison."""
    said = [reply[-1].content for reply in preference.replies]
    return [(said[one.first], said[one.second], one.label) for one in preference.comparisons]


def test_the_reply_with_the_higher_score_is_chosen_in_every_file(tmp_path):
    rows = labelled.rows(40)
    built = run(tmp_path, rows)
    wanted = []
    for row in rows:
        better = row["gold"].index(max(row["gold"]))
        wanted.append((row["prompt"], row["responses"][better], row["responses"][1 - better]))
    lines = labelled.lines(built.folder / "train.trl.jsonl")
    columns = json.loads((built.folder / "train.columns.json").read_text())
    as_pairs = [[(one["chosen"], one["rejected"]) for one in lines], list(zip(*columns.values(), strict=True))]
    for pairs in as_pairs:
        assert [(chosen[:-1], chosen[-1]["content"], rejected[-1]["content"]) for chosen, rejected in pairs] == wanted
        assert all(chosen[:-1] == rejected[:-1] for chosen, rejected in pairs)
    own = labelled.preferences(built.folder / "train.jsonl")
    assert [texts(one) for one in own] == [[(chosen, rejected, 1.0)] for _, chosen, rejected in wanted]
    assert [one.comparisons[0].strength for one in own] == [abs(row["gold"][0] - row["gold"][1]) for row in rows]
    assert [[reply[-1].content for reply in one.replies] for one in own] == [row["responses"] for row in rows], (
        "replies keep the order in which they were sampled"
    )


def test_every_reply_and_pair_is_used_or_counted_by_cause(tmp_path):
    rows = [
        labelled.row(0, [1.0, 1.0]),
        labelled.row(1, [1.0, 1.25]),
        labelled.row(2, [1.0, None]),
        labelled.row(3, [3.0, 1.0]) | {"responses": ["same ", "same"]},
        labelled.row(4, [3.0, 1.0]) | {"responses": ["x", " "]},
        labelled.row(5, [3.0, 1.0]) | {"responses": ["x", None]},
        labelled.row(6, [3.0, 1.0]) | {"responses": ["x", "y\ud83d"]},
        labelled.row(7, [3.0, 1.0], samples=[{"stop": "length"}, {"stop": "stop"}]),
        labelled.row(8, [5.0, 1.0]),
    ]
    built = run(tmp_path, rows, min_margin=0.5, drop_cut=True)
    counts = built.counts
    assert counts.replies_left_out == Counter(
        missing_score=1, identical=1, empty=1, missing_reply=1, bad_unicode=1, cut=1
    )
    assert counts.pairs_left_out == Counter(tie=1, small_margin=1)
    assert (counts.replies, counts.replies_used) == (18, 12)
    assert (counts.pairs, counts.pairs_used) == (3, 1)
    assert (counts.rows, counts.rows_used, counts.rows_without_two, counts.rows_without_pair) == (9, 1, 6, 2)
    assert counts.largest_disagreement == 2.0
    report = " ".join(text_report(built, BuildConfig(output_dir=built.folder)).split())
    for told in ("1 have equal scores", "1 differ by less than", "1 have no gold score", "1 could not be sampled",
                 "1 repeat an earlier reply", "1 ended at the token limit", "gold scores up to 2 apart"):  # fmt: skip
        assert told in report
    kept = json.loads((built.folder / "manifest.json").read_text())["counts"]
    assert kept["replies_left_out"] == dict(counts.replies_left_out)


def test_prompts_that_cannot_be_trained_on_are_counted_and_kept_in_the_labels(tmp_path):
    rows = labelled.rows(20)
    rows[3]["prompt"] = [{"role": "user", "content": "half \ud83d"}]
    rows[4]["prompt"] = [{"role": "user", "content": " "}, {"role": "system", "content": "Be brief."}]
    built = run(tmp_path, rows, near=0.8)
    assert built.counts.replies_left_out == Counter(unusable_prompt=4)
    assert len(labelled.preferences(built.folder / "train.jsonl")) == 18
    assert labelled.lines(built.folder / "labels.train.jsonl") == rows


def test_a_margin_at_the_least_is_kept(tmp_path):
    built = run(tmp_path, [labelled.row(0, [1.0, 1.5]), labelled.row(1, [1.0, 1.25])], min_margin=0.5)
    assert [one["id"] for one in labelled.lines(built.folder / "train.jsonl")] == ["q0"]


SCORES = [0.5, 2.0, -1.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("pairs", "wanted"),
    [
        ("all", {pair for pair in combinations(range(5), 2) if pair != (1, 3)}),
        ("best-worst", {(1, 2)}),
        ("adjacent", {(3, 4), (0, 4), (0, 2)}),
    ],
)
def test_the_pairs_of_a_prompt(tmp_path, pairs, wanted):
    row = labelled.row(0, SCORES)
    built = run(tmp_path, [row], pairs=pairs)
    found = [texts(one) for one in labelled.preferences(built.folder / "train.jsonl")]
    place = {text: number for number, text in enumerate(row["responses"])}
    assert all(len(one) == 1 for one in found)
    assert {tuple(sorted((place[a], place[b]))) for ((a, b, _),) in found} == wanted
    assert all(SCORES[place[a]] > SCORES[place[b]] for ((a, b, _),) in found)
    ids = {one["id"] for one in labelled.lines(built.folder / "train.jsonl")}
    assert ids == {f"q0#{i}-{j}" for i, j in wanted}
    assert built.counts.pairs_left_out["tie"] == (pairs != "best-worst")


def test_a_random_pair_is_drawn_with_the_seed_and_does_not_depend_on_other_rows(tmp_path):
    rows = labelled.rows(60, replies=4)

    def drawn(name: str, rows: list[dict[str, Any]], seed: int) -> dict[str, str]:
        built = run(tmp_path, rows, pairs="random", seed=seed, output_dir=tmp_path / name)
        return dict(one["id"].split("#") for one in labelled.lines(built.folder / "train.jsonl"))

    first = drawn("a", rows, 0)
    assert len(first) == 60
    assert set(Counter(first.values())) == {f"{i}-{j}" for i, j in combinations(range(4), 2)}, "all pairs are drawn"
    assert drawn("b", rows[:30], 0) == {name: pair for name, pair in first.items() if int(name[1:]) < 30}
    assert drawn("c", rows, 1) != first


def test_soft_labels_are_sigmoids_of_the_difference_over_tau(tmp_path):
    rows = [labelled.row(0, [1.0, 4.0]), labelled.row(1, [900.0, -900.0])]
    built = run(tmp_path, rows, soft_tau=2.0)
    labels = [one.comparisons[0].label for one in labelled.preferences(built.folder / "train.jsonl")]
    assert labels == [pytest.approx(1 / (1 + math.exp(-1.5)), rel=1e-12), 1.0]
    assert "TRL's pairs have no place" in text_report(built, BuildConfig(output_dir=built.folder, soft_tau=2.0))


def test_kwise_rows_hold_all_judged_replies_once(tmp_path):
    rows = [labelled.row(0, [0.5, 2.0, None, 1.0]), labelled.row(1, [0.5, 2.0, 2.0, 1.0])]
    built = run(tmp_path, rows, rows_as="kwise")
    strict, tied = labelled.preferences(built.folder / "train.jsonl")
    assert [len(one.replies) for one in (strict, tied)] == [3, 4]
    assert [len(one.comparisons) for one in (strict, tied)] == [3, 5]
    assert strict.ranking == (1, 2, 0)
    assert tied.ranking is None, "two replies are equally good"
    assert len(labelled.lines(built.folder / "train.trl.jsonl")) == 8 == built.counts.pairs_used
    for name, settings in (("soft", {"soft_tau": 1.0}), ("best", {"pairs": "best-worst"})):
        other = run(tmp_path, rows, rows_as="kwise", output_dir=tmp_path / name, **settings)
        assert all(one.ranking is None for one in labelled.preferences(other.folder / "train.jsonl")), (
            "a ranking would say more"
        )


def test_no_prompt_is_on_both_sides_and_labels_are_all_rows(tmp_path):
    rows = labelled.rows(200)
    # The same prompts again, with other replies, one of them a tie.
    rows += [labelled.row(n, [1.0, 1.0 + n % 2]) | {"id": f"again{n}"} for n in range(100)]
    built = run(tmp_path, rows, test_fraction=0.2)
    assert {path.name for path in built.folder.iterdir()} == FILES
    sides = {name: labelled.lines(built.folder / f"labels.{name}.jsonl") for name in ("train", "test")}
    prompts = {name: {json.dumps(row["prompt"]) for row in found} for name, found in sides.items()}
    assert not prompts["train"] & prompts["test"]
    assert built.shared["prompts"] == 0
    assert sorted(row["id"] for found in sides.values() for row in found) == sorted(row["id"] for row in rows)
    assert sorted(map(str, sides["train"] + sides["test"])) == sorted(map(str, rows)), "as they were read"
    assert 25 <= len(sides["test"]) <= 95
    for name, found in sides.items():
        ids = {row["id"] for row in found if row["gold"][0] != row["gold"][1]}
        assert {one["id"] for one in labelled.lines(built.folder / f"{name}.jsonl")} == ids
        assert built.sides[name]["pairs"] == len(ids)
    assert len(list(read_gold_rows(built.folder / "labels.test.jsonl", labelled=True))) == len(sides["test"])


def test_alike_prompts_stay_together(tmp_path):
    rows = []
    for number in range(60):
        one = labelled.row(number, [1.0, 2.0])
        text = " ".join(f"{word}{number}" for word in labelled.WORDS)
        for place, ending in enumerate(("", " please")):
            question = [{"role": "user", "content": f"{text} and {text} and more of {number}{ending}"}]
            rows.append(one | {"id": f"q{number}.{place}", "prompt": question})
    built = run(tmp_path, rows, test_fraction=0.3, near=0.8)
    sides = [
        {row["id"].split(".")[0] for row in labelled.lines(built.folder / f"labels.{name}.jsonl")}
        for name in ("train", "test")
    ]
    assert not sides[0] & sides[1]
    assert built.shared["near_duplicate_prompts"] == 0


def test_the_same_rows_give_the_same_bytes_and_rows_added_later_move_nothing(tmp_path):
    rows = labelled.rows(150)
    first = run(tmp_path, rows, test_fraction=0.2, output_dir=tmp_path / "a").folder
    again = run(tmp_path, rows, test_fraction=0.2, output_dir=tmp_path / "b").folder
    for name in FILES - {"manifest.json"}:
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
    fewer = run(tmp_path, rows[:100], test_fraction=0.2, output_dir=tmp_path / "c").folder
    held = {row["id"] for row in labelled.lines(first / "labels.test.jsonl")}
    kept = {row["id"] for row in labelled.lines(fewer / "labels.test.jsonl")}
    assert kept == {name for name in held if int(name[1:]) < 100}
    other = run(tmp_path, rows, test_fraction=0.2, seed=1, output_dir=tmp_path / "d").folder
    assert (other / "labels.test.jsonl").read_bytes() != (first / "labels.test.jsonl").read_bytes()


def test_the_manifest_names_inputs_and_outputs_by_their_hashes(tmp_path):
    from rewardlab.core.files import sha256_file

    built = run(tmp_path, labelled.rows(40), test_fraction=0.2)
    told = json.loads((built.folder / "manifest.json").read_text())
    assert told["inputs"][0]["sha256"] == sha256_file(tmp_path / "labels.jsonl")
    outputs = {one["file"]: one for one in told["outputs"]}
    assert set(outputs) == FILES - {"manifest.json"}
    for name, facts in outputs.items():
        assert facts["sha256"] == sha256_file(built.folder / name)
    assert outputs["train.trl.jsonl"]["rows"] == built.sides["train"]["pairs"]
    assert told["settings"]["test_fraction"] == 0.2


def test_the_layout_with_a_file_a_fact_is_read(tmp_path):
    rows = labelled.rows(12)
    (tmp_path / "rm_prompts.json").write_text(json.dumps([row["prompt"][-1]["content"] for row in rows]))
    (tmp_path / "rm_sft.json").write_text(
        json.dumps([{f"response_{k + 1}": text for k, text in enumerate(row["responses"])} for row in rows])
    )
    (tmp_path / "rm_rewards.json").write_text(json.dumps([row["gold"] for row in rows]))
    theirs = InputConfig(
        prompts_path=tmp_path / "rm_prompts.json",
        responses_path=tmp_path / "rm_sft.json",
        rewards_path=tmp_path / "rm_rewards.json",
        system="",
    )
    built = build(BuildConfig(inputs=theirs, output_dir=tmp_path / "out", test_fraction=0.0))
    ours = run(tmp_path, rows, output_dir=tmp_path / "ours")
    for name in ("train.trl.jsonl", "train.columns.json"):
        assert (built.folder / name).read_bytes() == (ours.folder / name).read_bytes()


def test_a_folder_is_replaced_only_if_asked_and_only_its_own(tmp_path):
    rows = labelled.rows(20)
    built = run(tmp_path, rows)
    with pytest.raises(ConfigError, match=r"holds preferences\..*--overwrite"):
        run(tmp_path, rows)
    settings = json.loads((built.folder / "manifest.json").read_text())["settings"]
    run(tmp_path, rows[:10], overwrite=True)
    again = json.loads((built.folder / "manifest.json").read_text())["settings"]
    assert again == settings, "the same settings make the same preferences, whatever they replace"
    assert len(labelled.lines(built.folder / "labels.train.jsonl")) == 10
    (built.folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="did not write"):
        run(tmp_path, rows, overwrite=True)
    with pytest.raises(ConfigError, match="holds a dataset that is read"):
        run(tmp_path, rows, output_dir=tmp_path, overwrite=True)
    assert (built.folder / "notes.txt").read_text() == "mine"


def test_a_failure_leaves_the_folder_as_it_was(tmp_path):
    rows = labelled.rows(20)
    built = run(tmp_path, rows)
    before = {path.name: path.read_bytes() for path in built.folder.iterdir()}
    with pytest.raises(DataError, match=r"the train side would have no pair: 1 row,"):
        run(tmp_path, [labelled.row(0, [1.0, 1.0])], overwrite=True)
    with pytest.raises(DataError, match=r"out\.jsonl:1: it has no gold scores|labels\.jsonl:2: it has no gold scores"):
        run(tmp_path, [rows[0], {"prompt": "Hi?", "responses": ["a", "b"]}], overwrite=True)
    with pytest.raises(DataError, match="too far apart"):
        run(tmp_path, [labelled.row(0, [1.7e308, -1.7e308])], overwrite=True)
    assert {path.name: path.read_bytes() for path in built.folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(("fraction", "told"), [(0.0, False), (0.1, True), (0.5, False)])
def test_a_test_side_too_small_for_any_verdict_is_told_before_a_proxy_is_trained(
    tmp_path: Path, fraction: float, told: bool
) -> None:
    built = run(tmp_path, labelled.rows(40), test_fraction=fraction)
    report = " ".join(text_report(built, BuildConfig(output_dir=built.folder)).split())
    assert ("held out: below 10 `rewardlab gold match` and `rewardlab gold curve` have no intervals" in report) is told


def test_a_test_side_without_pairs_says_what_to_do(tmp_path):
    rows = labelled.rows(100)
    held = {row["id"] for row in labelled.lines(
        run(tmp_path, rows, test_fraction=0.2, output_dir=tmp_path / "a").folder / "labels.test.jsonl")}  # fmt: skip
    tied = [row | {"gold": [1.0, 1.0]} if row["id"] in held else row for row in rows]
    with pytest.raises(DataError, match=r"test side would have no pair.*--test-fraction 0\."):
        run(tmp_path, tied, test_fraction=0.2, output_dir=tmp_path / "b")


def test_scores_that_are_all_equal_or_missing_are_told_in_words(tmp_path):
    rows = [row | {"gold": [1.0, 1.0] if n % 2 else [1.0, None]} for n, row in enumerate(labelled.rows(20))]
    with pytest.raises(DataError, match="10 of 40 replies have no gold score; 10 of 10 pairs have equal scores"):
        run(tmp_path, rows)


def test_input_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    import rewardlab.gold.building.run as module

    original = module.divide

    def meddle(rows: Any, **settings: Any) -> Any:
        found = original(rows, **settings)
        path = tmp_path / "labels.jsonl"
        path.write_text(path.read_text().replace("2.", "3."))
        return found

    monkeypatch.setattr(module, "divide", meddle)
    with pytest.raises(DataError, match="changed while it was read"):
        run(tmp_path, labelled.rows(20))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"soft_tau": 0.0}, "--soft-tau"),
        ({"soft_tau": 1e-12}, r"--soft-tau 1e-12: must be from 1e-09 to 1e\+09"),
        ({"min_margin": -1.0}, "--min-margin"),
        ({"test_fraction": 0.95}, "--test-fraction"),
        ({"near": 0.0}, "--near"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path, settings, told):
    with pytest.raises(ConfigError, match=told):
        BuildConfig(output_dir=tmp_path, **settings)


def test_without_input_it_says_what_to_name(tmp_path):
    with pytest.raises(ConfigError, match=r"--input is missing.*gold label"):
        build(BuildConfig(output_dir=tmp_path / "out"))


def test_rows_of_two_files_with_one_id_are_all_used_and_told(tmp_path):
    rows = labelled.rows(30)
    files = [labelled.write(tmp_path / name, part) for name, part in (("a.jsonl", rows[:20]), ("b.jsonl", rows[20:]))]
    again = [{**row, "id": f"q{number}"} for number, row in enumerate(rows[20:])]
    files[1] = labelled.write(files[1], again)
    config = BuildConfig(
        inputs=InputConfig(input=tuple(files)), output_dir=tmp_path / "out", test_fraction=0.0, near="none"
    )
    built = build(config)
    assert (built.counts.rows_used, built.counts.rows_of_one_id) == (30, 10)
    assert "10 rows have the id of an earlier row" in text_report(built, config)
    assert build(replace(config, inputs=InputConfig(input=(files[0],)), overwrite=True)).counts.rows_of_one_id == 0


def test_two_builds_of_one_folder_do_not_meet(tmp_path):
    held = tmp_path / ".out.partial"
    held.mkdir()
    with only_process(held, "--output-dir"), pytest.raises(ConfigError, match="--output-dir"):
        run(tmp_path, labelled.rows(10))
    assert run(tmp_path, labelled.rows(10)).counts.rows == 10
    assert not held.exists()
