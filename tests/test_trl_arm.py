"""The arm of a plan that is trained by TRL leaves what a run leaves, judged on the same rows."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import rewardlab
from common import write_base_model, write_pairs
from pages import module_at
from rewardlab.core.config import to_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import write_json
from rewardlab.report.evaluations import read_scores
from rewardlab.report.folder import read_folder
from rewardlab.training.settings.config import RewardTrainerConfig

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "plans" / "trl_arm.py"


@pytest.fixture(scope="module")
def arm() -> ModuleType:
    pytest.importorskip("trl")
    return module_at(SCRIPT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_it_trains_by_trl_and_leaves_what_a_run_leaves(
    arm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewardlab.serve.folders.import_model.verify_in_clean_process", rewardlab.verify)
    config = RewardTrainerConfig.of(
        model=str(write_base_model(tmp_path / "base")),
        dataset=(str(write_pairs(tmp_path / "train.jsonl", 24)),),
        test_dataset=(str(write_pairs(tmp_path / "test.jsonl", 12, offset=100)),),
        eval_fraction=0.25,
        output_dir=tmp_path / "run",
        steps=3,
        batch_size=8,
        max_seq_len=128,
        lr=1e-3,
        lr_scheduler="linear",
        label_smoothing=0.0,
        precision="fp32",
    )
    write_json(tmp_path / "settings.json", to_mapping(config))
    arm.main([str(tmp_path / "settings.json"), str(tmp_path / "run")])
    record = read_folder(tmp_path / "run")
    assert record.problems == ()
    assert record.finished
    assert record.model is not None
    assert (record.kind, record.step, record.num_steps) == ("train", 3, 3)
    assert len(read_scores(record.evaluations["test"])) == 24
    assert 0 < len(read_scores(record.evaluations["selection"])) <= 12
    assert record.manifest["parameters"]["trainable"] == record.manifest["parameters"]["total"]


def test_settings_that_it_cannot_follow_are_refused(arm: ModuleType) -> None:
    arm.require_the_same({"steps": 3, "lora": False})
    with pytest.raises(ConfigError, match=r"label_smoothing: 0\.05 is not done by this arm"):
        arm.require_the_same({"steps": 3, "label_smoothing": 0.05})
    with pytest.raises(ConfigError, match="steps: name the number"):
        arm.require_the_same({"steps": None})


def test_a_micro_batch_divides_the_batch_and_fits(arm: ModuleType) -> None:
    assert arm.micro_batch(16, longest=100, budget=1000) == 4
    assert arm.micro_batch(16, longest=10, budget=10_000) == 16
    assert arm.micro_batch(16, longest=5000, budget=1000) == 1
