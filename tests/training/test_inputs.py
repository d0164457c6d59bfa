"""What a run takes in: rows left out for a cause, prompts on several sides."""

from __future__ import annotations

import json

import pytest

from common import write_pairs
from rewardlab.core.errors import DataError
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig

pytestmark = pytest.mark.usefixtures("verified_here")


def config_for(base_model, data, folder, **changes) -> RewardTrainerConfig:
    settings = {"steps": 1, "batch_size": 8, "lr": 1e-3, "max_seq_len": 128, "precision": "fp32", "eval_fraction": 0.0}
    names = {"model": str(base_model), "dataset": (str(data),), "output_dir": folder}
    return RewardTrainerConfig.of(**{**settings, **names, **changes})


@pytest.mark.slow
def test_test_prompts_that_chose_the_checkpoint_are_reported(base_model, pairs_file, tmp_path, caplog):
    test = write_pairs(tmp_path / "test.jsonl", 6, offset=100)
    both = write_pairs(tmp_path / "both.jsonl", 4, offset=100)
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=1, eval_dataset=(str(both),))
    with caplog.at_level("WARNING", logger="rewardlab"):
        train(config.replace(test_dataset=(str(test),)))
    assert "the test data share 4 prompts, 4 first turns with the evaluation data (4 of 6 rows)" in caplog.text
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["data"]["shared"]["test_with_evaluation"]["prompts"] == 4


@pytest.mark.slow
def test_rows_of_weight_zero_are_left_out_and_counted(base_model, tmp_path):
    data = tmp_path / "weighted.jsonl"
    rows = [json.loads(line) for line in write_pairs(data, 10).read_text().splitlines()]
    data.write_text("".join(json.dumps(row | {"strength": float(n % 5 > 0)}) + "\n" for n, row in enumerate(rows)))
    config = config_for(base_model, data, tmp_path / "run", steps=10, batch_size=1, strength_as="weight")
    with pytest.raises(DataError, match=r"(?s)zero_weight: 2 .*weighted.jsonl:1: .*--max-drop-fraction 0.2"):
        train(config)
    train(config.replace(max_drop_fraction=0.2))
    (report,) = json.loads((tmp_path / "run/manifest.json").read_text())["data"]["train"]
    assert (report["kept"], report["dropped"]) == (8, {"zero_weight": 2})
