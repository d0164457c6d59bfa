"""`rewardlab eval --suite --ensemble`: combined scores under the rule of the suite, against scores combined by hand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import rewardlab
from common import make_model, make_tokenizer
from rewardlab.analysis.suites.judging import judge_suite
from rewardlab.artifact import calibrated as calibrated_module
from rewardlab.artifact import canaries
from rewardlab.artifact.calibrated import store_calibration
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.files import read_jsonl
from rewardlab.core.spec import CalibrationSpec
from rewardlab.core.suites import SuiteItem
from rewardlab.core.types import Message
from rewardlab.data.config import RenderingConfig
from rewardlab.data.suites.reading import read_suite
from rewardlab.data.templates import build_renderer
from suite_folders import WRITERS

SCALES = [(0.3, 1.5), (-0.2, 0.4)]
"""Mean and standard deviation of the calibration rows of each member."""
LIMITS = ("value", "low", "high")
CALIBRATED = {"num_replies": 9, "num_comparisons": 9, "precision": "fp32", "data": {}, "judged": {}}


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with heads and scales of their own; the second reads fewer tokens."""
    root = tmp_path_factory.mktemp("members")
    folders = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canaries, "CONVERSATIONS", canaries.CONVERSATIONS[:2])
        patch.setattr(calibrated_module, "verify_in_clean_process", rewardlab.verify)
        for number, (limit, (mean, std)) in enumerate(zip((256, 96), SCALES, strict=True)):
            model, folder = make_model(), root / f"m{number}"
            torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(number))
            renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=limit))
            save_reward_model(folder, model, renderer, beta=1.0, save_dtype=torch.float32, provenance={})
            record = CalibrationSpec(reward_mean=mean, reward_std=std, **CALIBRATED)
            store_calibration(folder, temperature=1.0, affine=(1.0, 0.0), calibration=record)
            folders.append(folder)
    return folders


def evaluate(names: Sequence[Path], data: Path, out: Path, *suites: str, more: Sequence[str] = ()) -> None:
    line = ["eval", "--ensemble", *map(str, names), "--suite", *suites, "--suite-data", str(data)]
    main([*line, "--output-dir", str(out), "--no-precision-card", *more])


def scores_in(folder: Path, suite: str, items: Sequence[SuiteItem]) -> list[np.ndarray]:
    """The scores of a suite as they were written, NaN where there is none."""
    found = {
        (row["preference_id"], row["reply"]): float(row["score"])
        for _, row in read_jsonl(folder / f"suite.{suite}.scores.jsonl")
    }
    return [np.array([found.get((item.id, n), math.nan) for n in range(len(item.replies))]) for item in items]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("suite", ["rewardbench2", "rm-bench", "hhh"])
def test_the_rule_of_the_suite_judges_scores_that_were_combined(suite, members, tmp_path, capsys):
    WRITERS[suite](tmp_path / "data", 12)
    items = read_suite(suite, tmp_path / "data").items
    out = tmp_path / "out"
    evaluate(members, tmp_path / "data", out, suite, more=["--ensemble-penalty", "0.7"])
    own = [scores_in(out / folder.name, suite, items) for folder in members]
    for how in ("mean", "minimum", "lower"):
        combined = []
        for a, b in zip(*own, strict=True):
            z = np.stack([(a - SCALES[0][0]) / SCALES[0][1], (b - SCALES[1][0]) / SCALES[1][1]])
            mean, spread = (z[0] + z[1]) / 2, np.abs(z[0] - z[1]) / math.sqrt(2)
            by_hand = {"mean": mean, "minimum": np.minimum(z[0], z[1]), "lower": mean - 0.7 * spread}
            combined.append(by_hand[how])
        wanted = judge_suite(suite, items, combined)
        record = json.loads((out / f"ensemble.{how}/suite.{suite}.json").read_text())
        for row, expected in zip(record["rows"], wanted.rows, strict=True):
            assert row["name"] == expected.name
            for written, wanted_of in ((row["score"], expected.score), (row["gain"], expected.gain)):
                found = [math.nan if written[name] is None else written[name] for name in LIMITS]
                assert found == pytest.approx([getattr(wanted_of, name) for name in LIMITS], abs=1e-9, nan_ok=True)
        for written, expected in zip(scores_in(out / f"ensemble.{how}", suite, items), combined, strict=True):
            np.testing.assert_allclose(written, expected, atol=1e-9)
    printed = " ".join(capsys.readouterr().out.split())
    assert "mean minus λ standard deviations over the members (λ = 0.7): of m0, m1, each put on one scale by" in printed
    page = (out / "report.md").read_text()
    assert "m0, m1, ensemble.mean, ensemble.minimum, ensemble.lower: judged on public test suites alone" in page
    assert "holds no evaluation" not in page
    assert page.count("An ensemble has no precision card of its own") == 3
    assert page.count("These are scores of an ensemble: ") == 3


@pytest.mark.slow
def test_a_reply_that_one_member_cannot_score_loses_its_comparisons_and_is_counted(members, tmp_path, capsys):
    WRITERS["hhh"](tmp_path / "data", 12)
    path = next((tmp_path / "data").rglob("*.json*"))
    text = path.read_text()
    first = read_suite("hhh", tmp_path / "data").items[0].replies[0]
    path.write_text(text.replace(first, f"{first} {'and more ' * 20}"))
    data = read_suite("hhh", tmp_path / "data")
    evaluate(members, tmp_path / "data", tmp_path / "out", "hhh")
    alone = [json.loads((tmp_path / f"out/{folder.name}/suite.hhh.json").read_text()) for folder in members]
    assert [record["unscored_rows"] for record in alone] == [0, 1]
    record = json.loads((tmp_path / "out/ensemble.mean/suite.hhh.json").read_text())
    assert record["unscored_rows"] == 1
    assert record["unscored_replies"] == {"without a score by m1": 1}
    combined = scores_in(tmp_path / "out/ensemble.mean", "hhh", data.items)
    assert [n for n, own in enumerate(combined) if np.isnan(own).any()] == [0]
    assert "1 without a score by m1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_the_heads_of_a_probe_are_members_on_the_scale_of_its_fit(members, tmp_path, capsys):
    best = Path(shutil.copytree(members[0], tmp_path / "probe/best"))
    scorer = rewardlab.load(best)
    own = scorer.model.head.weight.detach().numpy()[0].astype(np.float64)
    draw = np.random.default_rng(0)
    centre = draw.normal(size=len(own))
    heads = own + 0.1 * draw.normal(size=(20, len(own)))
    np.savez(tmp_path / "probe/heads.npz", layer=2, head=own, bootstrap=heads, centre=centre, std=np.float64(0.7))
    WRITERS["hhh"](tmp_path / "data", 12)
    evaluate([best], tmp_path / "data", tmp_path / "out", "hhh")
    items = read_suite("hhh", tmp_path / "data").items
    combined = scores_in(tmp_path / "out/ensemble.mean", "hhh", items)
    conversation = (*items[3].prompt, Message("assistant", items[3].replies[1]))
    by_head = []
    for head in heads:
        with torch.no_grad():
            scorer.model.head.weight.copy_(torch.from_numpy(head[None]).float())
        by_head.append((float(scorer.score([conversation])[0]) - head @ centre) / 0.7)
    assert combined[3][1] == pytest.approx(np.mean(by_head), abs=1e-4)
    assert "of 20 bootstrap heads, each put on one scale by" in " ".join(capsys.readouterr().out.split())


def test_what_has_no_common_scale_is_refused_before_anything_is_scored(members, tmp_path, capsys):
    WRITERS["hhh"](tmp_path / "data", 12)
    with pytest.raises(SystemExit):
        evaluate(members[:1], tmp_path / "data", tmp_path / "out", "hhh")
    assert "one model is not an ensemble. Name two or more, or a probe" in capsys.readouterr().err
    bare = tmp_path / "bare"
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=96))
    save_reward_model(bare, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    with pytest.raises(SystemExit):
        evaluate([members[0], bare], tmp_path / "data", tmp_path / "out", "hhh")
    said = " ".join(capsys.readouterr().err.split())
    assert f"--ensemble: {bare} holds no calibration" in said
    assert f"rewardlab calibrate {bare} --dataset … --store" in said
    assert not list(tmp_path.glob("out/**/*.json*"))


@pytest.mark.slow
def test_a_later_evaluation_replaces_the_combinations_only_on_request(members, tmp_path, capsys):
    WRITERS["hhh"](tmp_path / "data", 12)
    evaluate(members, tmp_path / "data", tmp_path / "out", "hhh")
    before = (tmp_path / "out/ensemble.mean/suite.hhh.scores.jsonl").read_bytes()
    with pytest.raises(SystemExit):
        evaluate(members[::-1], tmp_path / "data", tmp_path / "out", "hhh")
    assert "already holds an evaluation" in capsys.readouterr().err
    evaluate(members[::-1], tmp_path / "data", tmp_path / "out", "hhh", more=["--overwrite"])
    assert (tmp_path / "out/ensemble.mean/suite.hhh.scores.jsonl").read_bytes() == before, "the order says nothing"
    manifest = json.loads((tmp_path / "out/ensemble.lower/manifest.json").read_text())
    assert manifest["ensemble"]["members"] == ["m1", "m0"]
    assert manifest["ensemble"]["penalty"] == 1.0
