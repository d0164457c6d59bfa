"""`rewardlab eval --suite`: a folder of every public layout, from the command line to its files."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from common import make_model, make_tokenizer
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.files import read_jsonl
from rewardlab.core.types import Message, ScoreRow, join_comparisons
from rewardlab.data.config import RenderingConfig
from rewardlab.data.suites.reading import read_suite
from rewardlab.data.templates import build_renderer
from rewardlab.evaluation.saved import SavedModel
from suite_folders import WRITERS, rows_to


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny reward model that reads 256 tokens."""
    folder = tmp_path_factory.mktemp("suites") / "reward"
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=256))
    save_reward_model(folder, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return folder


def evaluate(saved: Path, folder: Path, out: Path, *suites: str, more: tuple[str, ...] = ()) -> None:
    main(
        [
            "eval",
            "--model",
            str(saved),
            "--suite",
            *suites,
            "--suite-data",
            str(folder),
            "--output-dir",
            str(out),
            *more,
        ]
    )


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("suite", WRITERS)
def test_a_folder_of_every_layout_is_scored_judged_and_written(suite, saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    WRITERS[suite](tmp_path / "data", 12)
    evaluate(saved, tmp_path / "data", tmp_path / "out", suite)
    printed = capsys.readouterr().out
    tables = printed.partition("computed in")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert "What length alone reaches" in printed
    record = json.loads((tmp_path / "out" / f"suite.{suite}.json").read_text())
    data = read_suite(suite, tmp_path / "data")
    assert record["num_rows"] == len(data.items)
    assert record["unscored_rows"] == 0
    assert {row["name"] for row in record["rows"] if row["kind"] == "subset"} == {item.subset for item in data.items}
    totals = [row for row in record["rows"] if row["kind"] == "total"]
    assert totals
    assert all(0 <= row["score"]["low"] <= row["score"]["value"] <= row["score"]["high"] <= 1.01 for row in totals)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["config"]["suite"] == [suite]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in manifest["data"][0]["sources"].values())


@pytest.mark.slow
def test_a_suite_ends_with_a_precision_card_on_its_own_pairs(saved, tmp_path, capsys):
    for suite in ("llmbar", "hhh"):
        WRITERS[suite](tmp_path / "data" / suite, 50)
    evaluate(saved, tmp_path / "data", tmp_path / "out", "llmbar", "hhh")
    printed = capsys.readouterr().out
    card = json.loads((tmp_path / "out" / "precision.json").read_text())
    scores = {name: tmp_path / "out" / f"suite.{name}.scores.jsonl" for name in ("llmbar", "hhh")}
    judged = {(row["source"], row["preference_id"]) for path in scores.values() for _, row in read_jsonl(path)}
    assert card["available"] == len(judged)
    assert card["preferences"] == min(200, len(judged))
    assert list(card["measures"]) == ["float32", "bf16", "nearest bf16"]
    assert card["measures"]["bf16"]["margin error"]["value"] > 0
    for verdict in card["verdicts"]:
        assert f"{verdict['precision']}: {verdict['answer']}" in " ".join(printed.split())
        assert f"{verdict['precision']}: {verdict['answer']}" in (tmp_path / "out" / "report.md").read_text()
    again = tmp_path / "again"
    evaluate(saved, tmp_path / "data", again, "llmbar", "hhh", more=("--no-precision-card",))
    assert not (again / "precision.json").exists()
    page = (again / "report.md").read_text()
    assert "it was switched off" in page
    assert f"rewardlab eval {saved} --suite llmbar hhh --suite-data {tmp_path / 'data'}" in page.replace("\\", "")
    for name, path in scores.items():
        assert path.read_bytes() == (again / f"suite.{name}.scores.jsonl").read_bytes()


@pytest.mark.slow
def test_several_models_on_a_suite_have_a_verdict_each(saved, tmp_path, capsys):
    shutil.copytree(saved, tmp_path / "other")
    WRITERS["hhh"](tmp_path / "data", 12)
    line = ["eval", str(saved), str(tmp_path / "other"), "--suite", "hhh", "--suite-data", str(tmp_path / "data")]
    main([*line, "--output-dir", str(tmp_path / "out")])
    assert capsys.readouterr().out.count("In which precision may it be served?") == 2
    assert all((tmp_path / "out" / name / "precision.json").is_file() for name in ("reward", "other"))


@pytest.mark.slow
def test_a_reply_has_the_score_that_a_loaded_model_gives_it(saved, tmp_path):
    import rewardlab

    WRITERS["rmb"](tmp_path / "data", 3)
    evaluate(saved, tmp_path / "data", tmp_path / "out", "rmb")
    rows = [ScoreRow.from_dict(row) for _, row in read_jsonl(tmp_path / "out" / "suite.rmb.scores.jsonl")]
    items = {item.id: item for item in read_suite("rmb", tmp_path / "data").items}
    scorer = rewardlab.load(str(saved))
    for row in rows[:7]:
        item = items[row.preference_id]
        expected = scorer.score([(*item.prompt, Message("assistant", item.replies[row.reply]))])
        assert row.score == pytest.approx(expected[0], abs=1e-5)
    assert len(list(join_comparisons(rows))) == sum(len(item.pairs) for item in items.values())


@pytest.mark.slow
def test_several_suites_are_read_from_folders_of_their_names(saved, tmp_path, capsys):
    for suite in ("llmbar", "hhh"):
        WRITERS[suite](tmp_path / "data" / suite, 4)
    evaluate(saved, tmp_path / "data", tmp_path / "out", "llmbar", "hhh")
    printed = capsys.readouterr().out
    assert "LLMBar, by its own rule" in printed
    assert "HHH, by its own rule" in printed
    assert "No interval below ten prompts" in printed
    assert {path.name for path in (tmp_path / "out").glob("suite.*")} == {
        f"suite.{suite}.{ending}" for suite in ("llmbar", "hhh") for ending in ("json", "scores.jsonl")
    }


@pytest.mark.slow
def test_a_reply_above_the_limit_is_counted_and_its_comparison_is_lost(saved, tmp_path, capsys):
    rows = [
        {"prompt": f"basil {n}?", "chosen": "yes " * (300 if n < 3 else 1), "rejected": "no", "subset": "hep-go"}
        for n in range(12)
    ]
    rows_to(tmp_path / "data" / "filtered.jsonl", rows)
    evaluate(saved, tmp_path / "data", tmp_path / "out", "rewardbench")
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 replies in 3 rows have no score (3 longer than the model's limit)" in printed
    assert "Each comparison with one of them counts as lost." in printed
    record = json.loads((tmp_path / "out" / "suite.rewardbench.json").read_text())
    scores = {
        (row["preference_id"], row["reply"]): row["score"]
        for _, row in read_jsonl(tmp_path / "out" / "suite.rewardbench.scores.jsonl")
    }
    whole = [key for key, _ in scores if (key, 0) in scores and (key, 1) in scores]
    wins = sum(scores[key, 0] > scores[key, 1] for key in set(whole))
    assert len(set(whole)) == 9
    assert record["rows"][0]["score"]["value"] == pytest.approx(wins / 12)


@pytest.mark.slow
def test_an_earlier_evaluation_is_replaced_only_on_request_and_then_wholly(saved, tmp_path, capsys, pairs_file):
    WRITERS["hhh"](tmp_path / "data", 3)
    out = tmp_path / "out"
    evaluate(saved, tmp_path / "data", out, "hhh")
    line = ("eval", "--model", saved, "--suite", "hhh", "--suite-data", tmp_path / "data", "--output-dir", out)
    assert "already holds an evaluation" in refusal(capsys, *line)
    main(["eval", "--model", str(saved), "--dataset", str(pairs_file), "--output-dir", str(out), "--overwrite"])
    assert not list(out.glob("suite.*"))
    evaluate(saved, tmp_path / "data", out, "hhh", more=("--overwrite",))
    assert not (out / "eval.metrics.json").exists()
    assert (out / "suite.hhh.json").exists()


def test_what_cannot_be_judged_is_refused_in_words(saved, tmp_path, capsys):
    line = ("eval", "--model", saved, "--output-dir", tmp_path / "out", "--suite")
    (tmp_path / "empty").mkdir()
    assert "no such folder" in refusal(capsys, *line, "hhh", "--suite-data", tmp_path / "nowhere")
    assert "no .jsonl" in refusal(capsys, *line, "hhh", "--suite-data", tmp_path / "empty")
    assert "--suite llmbar: needs --suite-data FOLDER" in refusal(capsys, *line, "llmbar")
    assert "must be one of rewardbench" in refusal(capsys, *line, "rewardbank")
    assert "named 2 times" in refusal(capsys, *line, "hhh", "hhh")
    assert "--suite and --dataset" in refusal(capsys, *line, "hhh", "--dataset", "pairs.jsonl")
    read = ("--max-replies", "2", "--hf-split", "train", "--prompt-column", "p", "--num-workers", "1")
    said = refusal(capsys, *line, "hhh", *read)
    assert "--max-replies, --prompt-column, --hf-split and --suite: a suite is read by its own layout" in said
    assert "--suite-data names the files of a --suite" in refusal(
        capsys, "eval", "--model", saved, "--suite-data", tmp_path, "--output-dir", tmp_path / "out"
    )
    rows_to(tmp_path / "other" / "test.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    said = refusal(capsys, *line, "rewardbench2", "--suite-data", tmp_path / "other")
    assert "not a row of rewardbench2: the columns subset, id are missing" in said
    assert not (tmp_path / "out").exists()


def test_all_scores_that_are_not_finite_are_lost_and_counted(saved, tmp_path, capsys, monkeypatch):
    own = SavedModel.scores
    monkeypatch.setattr(SavedModel, "scores", lambda *a, **k: [scores * math.nan for scores in own(*a, **k)])
    WRITERS["hhh"](tmp_path / "data", 12)
    evaluate(saved, tmp_path / "data", tmp_path / "out", "hhh")
    assert "score not finite" in " ".join(capsys.readouterr().out.split())
    record = json.loads((tmp_path / "out" / "suite.hhh.json").read_text())
    assert all(row["score"]["value"] == 0 for row in record["rows"])
