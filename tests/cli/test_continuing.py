"""Training goes on from an imported and from an exported folder in shards, with the head that it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForSequenceClassification

from command_line import tiny_reward_model
from common import CONFIGS, make_tokenizer, write_pairs
from foreign_models import linear_head
from rewardlab.artifact.load import load
from rewardlab.cli import main
from rewardlab.serve.verifying.folder import verify

FLAGS = ["--max-seq-len", "128", "--precision", "fp32", "--eval-fraction", "0", "--report-to", "none"]


def imported(home: Path) -> Path:
    source = linear_head(home / "source", statistics=(0.5, 2.0)).folder
    main(["import", str(source), "--output-dir", str(home / "rm")])
    return home / "rm"


def exported(home: Path) -> Path:
    flags = ["--dtype", "float32", "--max-shard-size", "20KB", "--zero-bias"]
    main(["export", str(tiny_reward_model(home / "source")), "--output-dir", str(home / "rm"), *flags])
    return home / "rm"


@pytest.fixture
def verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is quick."""
    for place in ("serve.folders.export", "serve.folders.import_model", "training.run"):
        monkeypatch.setattr(f"rewardlab.{place}.verify_in_clean_process", verify)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("made", [imported, exported])
def test_training_goes_on_with_the_head_of_the_folder(made, tmp_path, verified_here, capsys):
    start = made(tmp_path)
    head = load(start).model.head.weight
    pairs = write_pairs(tmp_path / "pairs.jsonl", 16)
    run = tmp_path / "run"
    line = f"train --model {start} --dataset {pairs} --output-dir {run} --steps 1 --batch-size 8 --lr 1e-6"
    main([*line.split(), *FLAGS])
    assert f"head: kept from rm, norm {head.norm():.4g}" in capsys.readouterr().out
    after = load(run / "step_1").model.head.weight
    torch.testing.assert_close(after, head, atol=1e-4, rtol=0)
    assert not torch.equal(after, head), "it trained"


def test_a_head_of_zeros_is_said_where_training_begins(tmp_path, verified_here, capsys):
    start = tmp_path / "zero"
    config = CONFIGS["llama"]()
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    torch.nn.init.zeros_(model.score.weight)
    model.save_pretrained(start)
    make_tokenizer().save_pretrained(start)
    pairs = write_pairs(tmp_path / "pairs.jsonl", 16)
    line = f"train --model {start} --dataset {pairs} --output-dir {tmp_path / 'run'} --steps 1 --batch-size 8"
    main([*line.split(), *FLAGS])
    said = "head: kept from zero, norm 0; every score is 0 at first: --new-head draws another head"
    assert said in capsys.readouterr().out
