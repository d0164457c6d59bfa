"""`--ensemble` of eval and score: members on one scale, combined; the bootstrap heads of a probe as members."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import rewardlab
from common import make_model, make_tokenizer
from reward_models import save_tiny
from rewardlab.artifact import calibrated as calibrated_module
from rewardlab.artifact.calibrated import store_calibration
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.errors import ArtifactError, ConfigError
from rewardlab.core.spec import CalibrationSpec, read_spec
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.evaluation.config import EvalConfig
from rewardlab.evaluation.ensembles import canary_scores, read_heads, tell_of_other_data
from rewardlab.evaluation.models import judge_folders
from rewardlab.serve.file_scoring.ensemble import score_ensemble


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of one backbone with heads of their own."""
    folder = tmp_path_factory.mktemp("members")
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=128))
    for number in range(3):
        model = make_model()
        torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(number))
        save_reward_model(folder / f"m{number}", model, renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return [folder / f"m{number}" for number in range(3)]


@pytest.fixture
def probed(members: list[Path], tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A model in a run folder with bootstrap heads, as a probe writes it; the model and what the file holds."""
    best = Path(shutil.copytree(members[0], tmp_path / "probe/best"))
    own = load(best).model.head.weight.detach().numpy()[0].astype(np.float64)
    draw = np.random.default_rng(0)
    heads = {
        "head": own,
        "bootstrap": own + 0.1 * draw.normal(size=(50, len(own))),
        "centre": draw.normal(size=len(own)),
        "std": np.float64(0.7),
    }
    np.savez(tmp_path / "probe/heads.npz", layer=2, **heads)
    return best, heads


@pytest.fixture
def calibrated(members: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The same, each with a scale of its own."""
    monkeypatch.setattr(calibrated_module, "verify_in_clean_process", rewardlab.verify)
    copies = []
    for number, folder in enumerate(members):
        copy = Path(shutil.copytree(folder, tmp_path / folder.name))
        record = CalibrationSpec(
            reward_mean=float(number), reward_std=number + 1.0, num_replies=9, num_comparisons=9, precision="fp32",
            data={}, judged={},
        )  # fmt: skip
        store_calibration(copy, temperature=2.0, affine=(1.0, 0.0), calibration=record)
        copies.append(copy)
    return copies


def test_members_are_judged_alone_and_as_one(members, pairs_file, tmp_path, capsys):
    out = tmp_path / "out"
    main(["eval", "--ensemble", *map(str, members), "--dataset", str(pairs_file), "--output-dir", str(out)])
    printed = capsys.readouterr().out
    said = " ".join(printed.split())
    for name in ("m0", "m2", "ensemble mean", "ensemble minimum", "ensemble lower"):
        assert re.search(rf"^{name} +\d\.\d\d\d \[", printed, re.MULTILINE), name
    assert "on these data, since m0, m1, m2 hold no calibration" in said
    assert "standard deviation of the margin over members" in said
    rows = {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for name, path in {f"m{n}": out / f"m{n}/eval.scores.jsonl" for n in range(3)}.items()
    }
    standard = []
    for own in rows.values():
        scores = np.array([row["score"] for row in own])
        standard.append((scores - scores.mean()) / scores.std(ddof=1))
    mean = [json.loads(line)["score"] for line in (out / "ensemble.mean.scores.jsonl").read_text().splitlines()]
    assert mean == pytest.approx(np.mean(standard, axis=0))
    found = json.loads((out / "ensemble.json").read_text())
    assert found["disagreement"]["num_errors"] + found["disagreement"]["num_right"] == 40


@pytest.mark.slow
def test_stored_scales_are_used_where_all_have_one(calibrated, members, pairs_file, tmp_path):
    config = EvalConfig.of(
        ensemble=tuple(map(str, calibrated)), dataset=str(pairs_file), output_dir=tmp_path / "out",
        ensemble_penalty=0.0,
    )  # fmt: skip
    judged = judge_folders(config).ensemble
    assert "calibration rows that each member holds" in judged.scaled_by
    lower, mean = (judged.results[f"ensemble {how}"].rows for how in ("lower", "mean"))
    assert [row.score for row in lower] == pytest.approx([row.score for row in mean]), "λ is 0"
    mixed = config.replace(ensemble=(str(calibrated[0]), str(members[1])), output_dir=tmp_path / "mixed")
    assert "since m1 holds no calibration" in judge_folders(mixed).ensemble.scaled_by


def test_members_that_were_calibrated_on_other_data_are_told(tmp_path, caplog):
    folders = [save_tiny(tmp_path / name, scale=(0.0, 1.0)) for name in "abc"]
    specs = {folder.name: read_spec(folder) for folder in folders}
    tell_of_other_data(specs)
    assert not caplog.messages
    data = {"fitted": [{"name": "held-out", "split": "test", "sha256": "0" * 64}]}
    specs["b"] = replace(specs["b"], calibration=replace(specs["b"].calibration, data=data))
    tell_of_other_data(specs)
    assert "--ensemble: b was calibrated on other data than a, so their scales may be too" in caplog.text


@pytest.mark.slow
def test_temperatures_count_when_asked_alone(calibrated, pairs_file, tmp_path):
    for asked in (False, True):
        out = tmp_path / f"{asked}"
        config = EvalConfig.of(
            ensemble=tuple(map(str, calibrated)), dataset=str(pairs_file), output_dir=out, calibrated=asked
        )
        judge_folders(config)
        found = json.loads((out / "ensemble.json").read_text())
        # β is 1, T is 2 and the standard deviations are 1, 2 and 3.
        assert (found["beta"], found["calibrated"]) == (1.0 if asked else 2.0, asked)
        metrics = json.loads((out / "ensemble.mean.metrics.json").read_text())
        assert (metrics["beta"], metrics["calibrated"]) == (found["beta"], asked)


@pytest.mark.slow
def test_another_evaluation_leaves_nothing_of_the_ensemble(members, pairs_file, tmp_path):
    config = EvalConfig.of(
        ensemble=tuple(map(str, members[:2])), dataset=str(pairs_file), output_dir=tmp_path / "out", overwrite=True
    )
    judge_folders(config)
    assert (tmp_path / "out/ensemble.json").is_file()
    judge_folders(config.replace(ensemble=(), models=tuple(map(str, members[:2]))))
    assert not list((tmp_path / "out").glob("ensemble*"))


@pytest.mark.slow
def test_the_bootstrap_heads_of_a_probe_are_an_ensemble(probed, pairs_file, tmp_path):
    best, heads = probed
    own = heads["head"]
    config = EvalConfig.of(ensemble=(str(best),), dataset=str(pairs_file), output_dir=tmp_path / "out")
    judged = judge_folders(config)
    assert judged.ensemble.members == ["50 bootstrap heads"]
    np.savez(best.parent / "heads.npz", head=own, bootstrap=np.stack([own, own]), layer=2)
    same = judge_folders(config.replace(overwrite=True))
    single = np.array([row.score for row in same.models["best"].result.rows])
    mean = np.array([row.score for row in same.ensemble.results["ensemble mean"].rows])
    assert mean == pytest.approx(single - single.mean(), abs=1e-5)
    accuracy = same.ensemble.results["ensemble mean"].overall.sums.correct
    assert accuracy == same.models["best"].result.overall.sums.correct


def test_score_takes_the_bootstrap_heads_of_a_probe_from_one_pass(probed, tmp_path, capsys):
    best, heads = probed
    rows = [
        {"prompt": "How?", "responses": ["So.", "no", "x" * 600]},
        {"prompt": "Why?", "response": "Because."},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["score", "--ensemble", str(best), "--input", str(data), "--output", str(tmp_path / "out.jsonl")]
    main([*line, "--ensemble-as", "lower", "--ensemble-penalty", "0.5"])
    assert (
        "3 replies scored (ensemble lower of bootstrap heads, in standard deviations), 1 not" in capsys.readouterr().out
    )
    first, second = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    asked = [("How?", "So."), ("How?", "no"), ("Why?", "Because.")]
    turns = [[{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}] for prompt, reply in asked]
    scorer = load(best)
    states = scorer.final_states(turns)
    assert states @ heads["head"] == pytest.approx(scorer.score(turns), abs=1e-5), "what the head reads"
    scores = heads["bootstrap"] @ (states - heads["centre"]).T / heads["std"]
    wanted = scores.mean(axis=0) - 0.5 * scores.std(axis=0, ddof=1)
    spread = scores.std(axis=0, ddof=1)
    assert first["scores"] == [pytest.approx(wanted[0], abs=1e-5), pytest.approx(wanted[1], abs=1e-5), None]
    assert first["score_stds"] == [pytest.approx(spread[0], abs=1e-5), pytest.approx(spread[1], abs=1e-5), None]
    assert "above the limit of 128" in first["score_errors"]["2"]
    assert (second["score"], second["score_std"]) == pytest.approx((wanted[2], spread[2]), abs=1e-5)


def test_score_refuses_one_model_without_heads_and_heads_without_a_scale(members, probed, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "How?", "response": "So."}) + "\n")
    with pytest.raises(ConfigError, match="one model is not an ensemble. Name two or more, or a probe"):
        score_ensemble([str(members[0])], data, tmp_path / "out.jsonl")
    best, heads = probed
    np.savez(best.parent / "heads.npz", head=heads["head"], bootstrap=heads["bootstrap"], layer=2)
    with pytest.raises(ArtifactError, match="holds no `centre`, so another version of rewardlab wrote it"):
        score_ensemble([str(best)], data, tmp_path / "out.jsonl")


def test_what_is_no_ensemble_is_refused(members, pairs_file, tmp_path, capsys):
    config = EvalConfig.of(ensemble=(str(members[0]),), dataset=str(pairs_file), output_dir=tmp_path / "out")
    with pytest.raises(ConfigError, match="one model is not an ensemble"):
        judge_folders(config)
    with pytest.raises(ConfigError, match="--ensemble-penalty 2: belongs to an ensemble"):
        judge_folders(config.replace(ensemble=(), model=str(members[0]), ensemble_penalty=2.0))
    np.savez(tmp_path / "heads.npz", head=np.zeros(3), bootstrap=np.zeros((5, 3)))
    with pytest.raises(ArtifactError, match=r"heads of shape \(5, 3\), wanted two or more of width 32"):
        read_heads(tmp_path / "heads.npz", width=32, spec=read_spec(members[0]))


@pytest.mark.parametrize("damage", [lambda _: b"no", lambda _: b"", lambda whole: whole[:100]])
def test_damaged_heads_are_named(members, tmp_path, damage):
    path = tmp_path / "heads.npz"
    np.savez(path, head=np.zeros(32), bootstrap=np.zeros((5, 32)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ArtifactError, match=r"heads.npz: damaged: the heads cannot be read .* Run `rewardlab probe`"):
        read_heads(path, width=32, spec=read_spec(members[0]))


def test_heads_of_another_model_of_the_same_width_are_refused(members, tmp_path):
    path, own = tmp_path / "heads.npz", read_spec(members[0])
    np.savez(path, head=np.zeros(32), bootstrap=np.zeros((5, 32)), canaries=canary_scores(own))
    calibrated = replace(own, temperature=2.0, digests={}, files={})
    assert read_heads(path, width=32, spec=calibrated).shape == (5, 32)
    with pytest.raises(ArtifactError, match="its heads belong to another model, whose canaries have other scores"):
        read_heads(path, width=32, spec=read_spec(members[1]))
    rounded = [replace(canary, score=canary.score + 0.01) for canary in own.canaries]
    export = replace(own, canaries=rounded, max_rounding_error=0.01, exported_from={"folder": "x"})
    assert read_heads(path, width=32, spec=export).shape == (5, 32)


@pytest.mark.slow
def test_score_writes_the_combined_score_and_the_disagreement(calibrated, tmp_path, capsys):
    rows = [
        {"prompt": "How?", "responses": ["So.", "no", "x" * 600], "id": 1},
        {"prompt": "Why?", "response": "Because.", "score_std": 5},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["score", "--ensemble", *map(str, calibrated), "--input", str(data), "--output", str(tmp_path / "out.jsonl")]
    main([*line, "--ensemble-as", "lower", "--ensemble-penalty", "0.5"])
    first, second = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    scaled = [
        (np.array(load(folder).score_replies("How?", ["So.", "no"])) - number) / (number + 1)
        for number, folder in enumerate(calibrated)
    ]
    wanted = np.mean(scaled, axis=0) - 0.5 * np.std(scaled, axis=0, ddof=1)
    assert first["scores"] == [*(pytest.approx(value, abs=1e-6) for value in wanted), None]
    assert first["score_stds"][:2] == pytest.approx(np.std(scaled, axis=0, ddof=1), abs=1e-6)
    assert first["score_errors"]["2"].startswith(f"{calibrated[0]}: ")
    assert first["id"] == 1
    assert second.keys() == {"prompt", "response", "score", "score_std"}
    assert "3 replies scored (ensemble lower of 3, in standard deviations), 1 not" in capsys.readouterr().out
    assert not list(tmp_path.glob(".out.jsonl*")), "nothing is left of the members"


def test_score_refuses_a_member_that_is_named_twice(calibrated, tmp_path):
    again = tmp_path / "again"
    again.symlink_to(calibrated[0])
    for other in (calibrated[0], again):
        with pytest.raises(ConfigError, match=f"--ensemble: {other} is named twice"):
            score_ensemble([str(calibrated[0]), str(calibrated[1]), str(other)], tmp_path / "i", tmp_path / "o")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "m"], "--ensemble: leave out --model"),
        (["--output-as", "probability"], "--ensemble: leave out --model and --output-as"),
        ([], "holds no calibration, so its scores cannot be put on the scale of the others"),
    ],
)
def test_score_refuses_what_it_cannot_combine(members, tmp_path, capsys, flags, message):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "How?", "response": "So."}) + "\n")
    line = ["score", "--ensemble", *map(str, members), "--input", str(data), "--output", str(tmp_path / "out.jsonl")]
    with pytest.raises(SystemExit):
        main([*line, *flags])
    assert message in capsys.readouterr().err
