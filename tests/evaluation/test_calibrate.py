"""A calibration is fitted on some prompts and judged on others, stored on request, and applied when asked."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import expit

import rewardlab
from common import make_model, make_tokenizer, write_pairs
from rewardlab.artifact import calibrated as calibrated_module
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.errors import ArtifactError, DataError
from rewardlab.core.files import read_jsonl
from rewardlab.core.spec import read_spec
from rewardlab.core.types import Comparison, ScoreRow
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.evaluation.calibrate import calibrate
from rewardlab.evaluation.config import CalibrateConfig, EvalConfig
from rewardlab.evaluation.evaluate import evaluate_folder, judge, write_evaluation
from rewardlab.evaluation.saved import SavedModel
from rewardlab.evaluation.score_files import read_scores
from rewardlab.report.build import tell
from rewardlab.report.card import write_card
from rewardlab.report.folder import read_folder
from rewardlab.report.run import evaluation_report
from rewardlab.serve.verifying.folder import verify


@pytest.fixture(autouse=True)
def _verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check after storing, made in this process, where it is quick."""
    monkeypatch.setattr(calibrated_module, "verify_in_clean_process", rewardlab.verify)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that likes some replies of `write_pairs` more, by luck of its weights; its head is signed so."""
    folder = tmp_path_factory.mktemp("calibrated") / "rm"
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=128))
    model = make_model()
    with torch.no_grad():
        model.head.weight.mul_(-1 if mean_margin(model, renderer) < 0 else 1)
    save_reward_model(folder, model, renderer, beta=2.0, save_dtype=torch.float32, provenance={})
    return folder


def mean_margin(model: object, renderer: object) -> float:
    scorer = rewardlab.Scorer(model, renderer)
    pairs = [scorer.score_replies(f"How do I keep basil number {n}?", [YES, "no 3"]) for n in range(4)]
    return float(np.mean([first - second for first, second in pairs]))


YES = "Certainly, here is more on basil."


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of which every fifth is labelled the other way round, so that no model is sure of them."""
    path = write_pairs(tmp_path_factory.mktemp("data") / "noisy.jsonl", 160)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[::5]:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_for(model: Path, data: Path, out: Path, **settings: object) -> CalibrateConfig:
    return CalibrateConfig.of(model=str(model), dataset=(str(data),), output_dir=out, judge_fraction=0.4, **settings)


@pytest.mark.slow
def test_nothing_is_stored_unless_it_is_asked(copy, noisy, tmp_path):
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    result = calibrate(config_for(copy, noisy, tmp_path / "out"))
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before
    assert not result.stored
    written = json.loads((tmp_path / "out/calibration.json").read_text())
    assert written["temperature"] == result.scaling.temperature
    assert written["judged"]["pairs"]["after"]["NLL"]["value"] == result.judgement.pairs["after"]["NLL"].value


def test_no_prompt_both_fits_and_judges(saved, noisy, tmp_path):
    calibrate(config_for(saved, noisy, tmp_path / "out"))
    keys = [
        {row["prompt_key"] for _, row in read_jsonl(tmp_path / f"out/{name}.scores.jsonl")}
        for name in ("fitted", "judged")
    ]
    assert not keys[0] & keys[1]
    assert len(keys[0] | keys[1]) == 160


@pytest.mark.slow
def test_too_few_pairs_to_fit_on_are_told_where_the_others_are_before_anything_is_scored(saved, tmp_path, monkeypatch):
    monkeypatch.delattr(SavedModel, "score")
    few = write_pairs(tmp_path / "few.jsonl", 60)
    with pytest.raises(
        DataError, match=r"too few to calibrate on.*others judge the calibration \(--judge-fraction 0.4\)"
    ):
        calibrate(config_for(saved, few, tmp_path / "out"))
    judge = write_pairs(tmp_path / "judge.jsonl", 20, offset=100)
    with pytest.raises(DataError, match="at least 50 are needed. Name more data"):
        calibrate(config_for(saved, write_pairs(few, 40), tmp_path / "out", judge_dataset=(str(judge),)))


def test_a_stored_calibration_leaves_scores_and_canaries_and_passes_verification(copy, noisy, tmp_path):
    (copy / "notes.txt").write_text("mine")
    (copy / "empty").mkdir()
    for name, place in {"gone": "nowhere", "same": "notes.txt", "data": str(noisy.parent)}.items():
        (copy / name).symlink_to(place)
    raw = load(copy).score_replies("How?", ["So.", "no"])
    before = read_spec(copy)
    result = calibrate(config_for(copy, noisy, tmp_path / "out", store=True))
    spec = read_spec(copy)
    assert verify(copy).num_canaries == len(before.canaries)
    assert spec.canaries == before.canaries
    assert set(spec.files) == set(before.files), "what others put there is no part of the model"
    assert (copy / "notes.txt").read_text() == "mine"
    assert (copy / "empty").is_dir()
    assert [str((copy / name).readlink()) for name in ("gone", "same", "data")] == [
        "nowhere",
        "notes.txt",
        str(noisy.parent),
    ]
    assert spec.temperature == result.scaling.temperature != 1
    assert spec.affine == result.scaling.affine
    assert spec.calibration is not None
    assert spec.calibration.reward_mean == result.scaling.reward_mean
    assert spec.calibration.judged["shared_roots"] == 0
    assert spec.calibration.data["fitted"][0]["name"] == "noisy"
    scorer = load(copy)
    assert scorer.score_replies("How?", ["So.", "no"]) == raw
    scale, shift = result.scaling.affine
    assert scorer.calibrated(raw) == pytest.approx([scale * score + shift for score in raw])
    assert scorer.probabilities(raw) == pytest.approx(expit(scorer.calibrated(raw)))
    again = calibrate(config_for(copy, noisy, tmp_path / "again", store=True))
    assert again.scaling == result.scaling, "fitted to raw scores, whatever was stored"


@pytest.mark.slow
def test_conversations_that_both_fit_and_judge_are_counted_and_nothing_is_stored(copy, noisy, tmp_path):
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    rows = [json.loads(line) for line in noisy.read_text().splitlines()]
    fresh = [
        json.loads(line) for line in write_pairs(tmp_path / "fresh.jsonl", 60, offset=1000).read_text().splitlines()
    ]
    for row, again in zip(rows[:5], fresh, strict=False):
        again["prompt"] = row["prompt"]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in fresh))
    config = config_for(copy, noisy, tmp_path / "out", judge_dataset=(str(other),))
    assert calibrate(config).shared_roots == 5
    assert json.loads((tmp_path / "out/calibration.json").read_text())["judged"]["shared_roots"] == 5
    with pytest.raises(DataError, match="--store: 5 conversations have rows in what is fitted on and in what judges"):
        calibrate(config.replace(store=True, overwrite=True))
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


@pytest.mark.slow
def test_a_temperature_at_its_edge_is_not_stored(copy, noisy, tmp_path):
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    rows, scorer = [json.loads(line) for line in noisy.read_text().splitlines()], load(copy)
    for row in rows:
        first, second = scorer.score_replies(row["prompt"], [row["chosen"], row["rejected"]])
        if first < second:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    sorted_pairs = tmp_path / "sorted.jsonl"
    sorted_pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="no temperature is best and 0.001 is only the lowest that is tried"):
        calibrate(config_for(copy, sorted_pairs, tmp_path / "out", store=True))
    assert json.loads((tmp_path / "out/calibration.json").read_text())["at_edge"]
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


def test_a_calibration_that_was_edited_is_noticed(copy, noisy, tmp_path):
    calibrate(config_for(copy, noisy, tmp_path / "out", store=True))
    values = json.loads((copy / "reward_spec.json").read_text())
    values["calibration"]["reward_mean"] += 1
    (copy / "reward_spec.json").write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match="calibration changed after the model was saved"):
        load(copy)


def test_a_folder_without_calibration_has_no_entry_of_it(saved):
    values = json.loads((saved / "reward_spec.json").read_text())
    assert "calibration" not in values
    assert "calibration" not in values["digests"]


@pytest.mark.slow
def test_eval_judges_by_the_temperature_when_asked(copy, noisy, tmp_path, capsys):
    result = calibrate(config_for(copy, noisy, tmp_path / "out", store=True))
    evaluations = {}
    for calibrated in (False, True):
        config = EvalConfig.of(
            model=str(copy), dataset=str(noisy), output_dir=tmp_path / f"{calibrated}", calibrated=calibrated
        )
        evaluations[calibrated], *_ = evaluate_folder(config)
    raw, scaled = evaluations[False], evaluations[True]
    assert list(scaled.rows) == list(raw.rows), "scores are raw"
    assert scaled.judgement.beta == pytest.approx(2.0 / result.scaling.temperature)
    assert scaled.overall.sums.mean_nll < raw.overall.sums.mean_nll
    assert scaled.overall.sums.correct == raw.overall.sums.correct
    for own in (raw, scaled):
        assert own.card.measures["float32"]["NLL"].value == pytest.approx(own.overall.sums.mean_nll)
    # Everything that reads the folders later uses the β by which they were judged.
    for calibrated, beta in ((False, 2.0), (True, pytest.approx(2.0 / result.scaling.temperature))):
        folder = tmp_path / f"{calibrated}"
        written = json.loads((folder / "eval.metrics.json").read_text())
        assert (written["beta"], written["calibrated"]) == (beta, calibrated)
        assert read_scores(folder, name="m").scores.beta == beta
        told = tell(read_folder(folder), find_texts=None, draws=20)
        assert told.judgement is not None
        assert told.record.beta == told.judgement.beta == beta
        own = evaluations[calibrated].judgement.estimates["eval_brier"].value
        assert told.judgement.estimates["eval_brier"].value == pytest.approx(own)
        card = write_card(told.record, told.judgement, ceiling=None, overwrite=True).read_text()
        assert ("judged as calibrated" in card) == calibrated
        assert ("Probabilities are calibrated" in card) == calibrated


def rows_of_source(source: str, count: int) -> list[ScoreRow]:
    return [
        ScoreRow(
            preference_id=f"{n}", source=source, prompt_key=f"{source} {n}", reply=reply, score=float(n % 3 - reply),
            num_tokens=4, prompt_tokens=2, truncated_tokens=0,
            comparisons=(Comparison(first=0, second=1),) if reply == 0 else (),
        )
        for n in range(count)
        for reply in (0, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("source", ["all", "beta", "calibrated", "scores_sha256", "'all'"])
def test_a_source_with_the_name_of_another_entry_replaces_nothing(source, tmp_path):
    rows = rows_of_source(source, 12) + rows_of_source("rest", 15)
    write_evaluation(tmp_path, "eval", judge(rows, beta=1.5))
    values = json.loads((tmp_path / "eval.metrics.json").read_text())
    counts = {name: part["sums"]["comparisons"] for name, part in values.items() if isinstance(part, dict)}
    assert counts == {"all": 27, f"'{source}'": 12, "rest": 15}
    assert (values["beta"], values["calibrated"]) == (1.5, False)
    assert read_scores(tmp_path, name="m").scores.beta == 1.5
    table = evaluation_report(judge(rows, beta=1.5).overall, judge(rows, beta=1.5).by_source).splitlines()
    lasts = {line.split()[0]: int(line.split()[-1]) for line in table[2:5]}
    assert lasts == {f"'{source}'" if "all" in source else source: 12, "rest": 15, "all": 27}


@pytest.mark.slow
def test_score_writes_what_is_asked_for(copy, noisy, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "How?", "responses": ["So.", "no", "x" * 500]}) + "\n")

    def scores(kind: str) -> list[float | None]:
        out = tmp_path / f"{kind}.jsonl"
        line = ["score", "--model", str(copy), "--input", str(rows), "--output", str(out), "--overwrite"]
        main([*line, "--output-as", kind])
        return json.loads(out.read_text())["scores"]

    with pytest.raises(SystemExit):
        scores("calibrated")
    assert "the model holds no calibration" in capsys.readouterr().err
    raw = scores("raw")
    calibrate(config_for(copy, noisy, tmp_path / "out", store=True))
    scale, shift = read_spec(copy).affine
    assert scores("raw") == raw
    wanted = [scale * score + shift for score in raw[:2]]
    assert scores("calibrated") == [*map(pytest.approx, wanted), None]
    assert scores("probability") == [*(pytest.approx(expit(value)) for value in wanted), None]
    assert "2 replies scored (probability), 1 not" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_prints_before_and_after_and_says_whether_it_is_stored(copy, noisy, tmp_path, capsys):
    line = ["calibrate", str(copy), "--dataset", str(noisy), "--judge-dataset"]
    other = write_pairs(tmp_path / "other.jsonl", 60, offset=1000)
    main([*line, str(other), "--output-dir", str(tmp_path / "out"), "--store"])
    out = capsys.readouterr().out
    assert re.search(r"Fitted on .*[^\n]\n(mean|temperature): 95% intervals: ", out, re.DOTALL), out
    printed = " ".join(out.split())
    assert "Judged on 60 comparisons (other data were named)." in printed
    assert re.search(r"pairs NLL Brier ECE [- ]+before +\d", printed)
    assert re.search(r"after − before +-?\d", printed)
    assert f"stored in {copy}; scores and calibration: {tmp_path / 'out'}" in printed
    assert (tmp_path / "out/report.txt").is_file()


def test_eval_by_a_calibration_that_is_not_there_is_refused(saved, noisy, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["eval", str(saved), "--dataset", str(noisy), "--output-dir", str(tmp_path), "--calibrated"])
    assert f"--calibrated: {saved} holds no calibration" in capsys.readouterr().err
