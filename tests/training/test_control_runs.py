"""Controls as runs: they train, resume, tie exactly where they must, and say what they are."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from common import make_groups, make_model, write_pairs
from rewardlab.batch import pack
from rewardlab.cli import main
from rewardlab.core.files import read_jsonl
from rewardlab.core.spec import read_spec
from rewardlab.score import score_groups
from rewardlab.serve.engine.local import LocalEngine
from rewardlab.serve.folders.push import push, push_report
from rewardlab.training.loop.losses import preference_loss
from rewardlab.training.run import train
from rewardlab.training.settings.config import LossConfig
from runs import config_for


@pytest.fixture(autouse=True)
def _here(verified_here, monkeypatch, tmp_path):
    monkeypatch.setenv("REWARDLAB_CACHE", str(tmp_path / "cache"))


def test_without_replies_a_run_ends_at_exactly_one_half(tmp_path, base_model, pairs_file):
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=4, diagnostic_mode="prompt_only")
    result = train(config)
    assert result.selected is not None
    assert result.baseline is not None
    for judged in (result.baseline, result.selected):
        assert judged.overall.estimates["eval_accuracy"].value == 0.5
        assert judged.overall.sums.score_ties == judged.overall.sums.decided > 0
    rows = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert all(row["gradient_norm"] == 0.0 for row in rows if "gradient_norm" in row)
    assert all(row["train_loss"] == pytest.approx(np.log(2)) for row in rows if "train_loss" in row)


@pytest.mark.parametrize("share", [True, False])
def test_replies_of_the_same_tokens_have_the_same_score_and_no_gradient(share):
    model = make_model()
    groups = [
        replace(group, suffixes=(group.suffixes[0],) * group.num_replies, ranking=None)
        for group in make_groups(6, replies=3)
    ]
    for budget in (8, 512):
        assert all(len(set(scores.tolist())) == 1 for scores in score_groups(model, groups, budget=budget))
    batch = pack(groups, share=share)
    preference_loss(model(batch), batch, LossConfig()).backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    assert any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_a_control_that_is_resumed_is_the_one_that_was_begun(tmp_path, base_model, pairs_file):
    names = {"diagnostic_mode": "random_negatives", "diagnostic_seed": 5, "checkpoint_every": 2, "eval_every": 2}
    names |= {"lr_scheduler": "constant", "warmup_steps": 0}
    whole = train(config_for(base_model, pairs_file, tmp_path / "whole", steps=4, **names))
    train(config_for(base_model, pairs_file, tmp_path / "part", steps=2, **names))
    resumed = train(
        config_for(base_model, pairs_file, tmp_path / "part", steps=4, resume="auto", reschedule=True, **names)
    )
    assert resumed.selected is not None
    assert whole.selected is not None
    assert [row.score for row in resumed.selected.rows] == [row.score for row in whole.selected.rows]
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("whole", "part")]
    controls = [manifest["data"]["control"] for manifest in manifests]
    assert controls[0] == controls[1]
    assert controls[0]["counts"]["train"][0]["changed"] > 0


@pytest.mark.slow
def test_everything_that_a_control_leaves_says_that_it_is_one(tmp_path, base_model, capsys, caplog):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 40)
    said = "THIS IS A CONTROL, NOT A MODEL TO USE (label_shuffle of the train data)"
    words = ["--model", str(base_model), "--dataset", str(pairs), "--max-seq-len", "128", "--precision", "fp32"]
    words += ["--diagnostic-mode", "label_shuffle", "--bootstrap", "0", "--output-dir", str(tmp_path / "run")]
    main(["probe", *words])
    assert capsys.readouterr().out.count(said) >= 2
    assert said in (tmp_path / "run" / "report.md").read_text().replace("\\_", "_")
    best = tmp_path / "run" / "best"
    assert read_spec(best).provenance["control"] == {"mode": "label_shuffle", "splits": ["train"]}
    assert push_report(push(best, "me/it", card=False, dry_run=True), private=True)[0] == said
    caplog.set_level(logging.WARNING, logger="rewardlab")
    torch.manual_seed(0)
    LocalEngine.load({"control": best}).close()
    assert said in caplog.text
    caplog.clear()
    main(["eval", str(best), "--dataset", str(pairs), "--output-dir", str(tmp_path / "judged"), "--precision", "fp32"])
    assert caplog.text.count(said) == 1
    assert said in (tmp_path / "judged" / "report.md").read_text().replace("\\_", "_")
