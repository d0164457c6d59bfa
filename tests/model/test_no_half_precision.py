"""Models whose own code cannot compute in half precision: trained and saved in float32, and told of in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from common import make_tokenizer, write_pairs
from harness.family_sizes import config_of
from rewardlab.artifact.load import load
from rewardlab.core.errors import ArtifactError
from rewardlab.core.spec import read_spec
from rewardlab.model import precision
from rewardlab.model.config import ComputeConfig
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.reward import HalfPrecisionError
from rewardlab.serve.folders.export import export
from rewardlab.training.run import train
from runs import config_for

REFUSED = "DbrxModel cannot compute in bfloat16: its code mixes it with float32.*Take --precision fp32"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DBRX, whose experts add their outputs, half under autocast, to float32."""
    folder = tmp_path_factory.mktemp("dbrx")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of("dbrx")).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("verified_here")
def test_it_is_trained_in_float32_and_its_folder_is_for_float32(base: Path, tmp_path: Path, caplog):
    settings = config_for(base, write_pairs(tmp_path / "pairs.jsonl", 12), tmp_path / "run", steps=1)
    folder = train(settings).last
    assert "the folder is for float32 alone: DbrxModel cannot compute in bfloat16" in caplog.text
    assert all("bfloat16" not in canary.references for canary in read_spec(folder).canaries)
    assert load(folder).score([[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]])
    with pytest.raises((ArtifactError, HalfPrecisionError), match=REFUSED):
        load(folder, precision="bf16")
    with pytest.raises(ArtifactError, match=f"{REFUSED}.*Save the folder in float32"):
        export(folder, tmp_path / "half", dtype="bfloat16")


def test_training_in_bf16_is_refused_in_words(base: Path, tmp_path: Path):
    settings = config_for(base, write_pairs(tmp_path / "pairs.jsonl", 12), tmp_path / "run", precision="bf16")
    with pytest.raises(HalfPrecisionError, match=REFUSED):
        train(settings)


def test_auto_takes_float32(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(precision, "resolve_precision", lambda wanted, device: "bf16")
    config, lines = config_of("dbrx"), []
    chosen = precision.choose_precision(
        "auto",
        config,
        disk_class_of(config),
        ComputeConfig(),
        layout="padded",
        device=torch.device("cpu"),
        log=lines.append,
    )
    assert chosen == "fp32"
    assert lines[-1].startswith("precision: fp32. DbrxModel cannot compute in bfloat16")
