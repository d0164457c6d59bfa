"""What stands beside the numbers of a run: baselines fitted on the same data, and the gap to rows it trains on."""

from __future__ import annotations

import csv
import json

import pytest

import rewardlab.training.start as start_module
from common import write_pairs
from rewardlab.analysis.stats import difference
from rewardlab.cli import main
from rewardlab.core.types import ScoreRow
from rewardlab.evaluation.evaluate import judge
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig

pytestmark = pytest.mark.usefixtures("verified_here")


@pytest.fixture
def config(base_model, pairs_file, tmp_path) -> RewardTrainerConfig:
    """A short run with evaluation and test data."""
    return RewardTrainerConfig.of(
        model=str(base_model),
        dataset=(str(pairs_file),),
        test_dataset=(str(write_pairs(tmp_path / "test.jsonl", 20, offset=100)),),
        output_dir=tmp_path / "run",
        steps=3,
        batch_size=8,
        eval_fraction=0.3,
        max_seq_len=128,
        precision="fp32",
        train_eval_limit=10,
    )


@pytest.mark.slow
def test_baselines_are_judged_on_the_same_rows_as_the_model(config):
    result = train(config)
    compared = result.compared("test")
    assert list(compared) == ["length only", "bag of words", "before", "after"]
    identities = [{(row.preference_id, row.reply) for row in found.rows} for found in compared.values()]
    assert all(found == identities[0] for found in identities)
    assert compared["bag of words"].overall.sums.accuracy > 0.9, "polite words are what is preferred"
    assert list(result.compared("selection")) == list(compared)
    written = json.loads((config.run.output_dir / "evals" / "test_bag_of_words.metrics.json").read_text())
    assert written["all"]["estimates"]["eval_accuracy"]["value"] == compared["bag of words"].overall.sums.accuracy


@pytest.mark.slow
def test_baselines_are_fitted_on_training_rows_alone(config, monkeypatch):
    seen = {}
    original = start_module.fit_baselines

    def watch(groups, judged, *, seed):
        seen["train"], seen["judged"] = {group.preference_id for group in groups}, judged
        return original(groups, judged, seed=seed)

    monkeypatch.setattr(start_module, "fit_baselines", watch)
    train(config)
    assert len(seen["train"]) == 28
    for groups in seen["judged"].values():
        assert not seen["train"] & {group.preference_id for group in groups}


@pytest.mark.slow
def test_they_can_be_turned_off_and_are_in_the_report(config, capsys):
    flags = [
        *(
            "--model",
            config.model.model,
            "--dataset",
            *config.data.dataset,
            "--test-dataset",
            *config.data.test_dataset,
        ),
        *("--steps", "1", "--max-seq-len", "128"),
    ]
    main(["train", *flags, "--output-dir", str(config.run.output_dir)])
    text = capsys.readouterr().out
    assert "baseline: bag of words: accuracy" in text
    assert text.count("\nlength only ") == 3, "in two tables, and beside the model on the same test pairs"
    main(["train", *flags, "--no-baselines", "--output-dir", str(config.run.output_dir), "--overwrite"])
    assert "length only" not in capsys.readouterr().out
    assert not list((config.run.output_dir / "evals").glob("*words*"))


@pytest.mark.slow
def test_the_gap_is_the_difference_of_two_evaluations(config, caplog):
    config = config.replace(eval_every=1)
    with caplog.at_level("INFO", logger="rewardlab"):
        train(config)
    with (config.run.output_dir / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["eval_accuracy"]]
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    for row in rows:
        assert float(row["gap_accuracy"]) == pytest.approx(
            float(row["train_eval_accuracy"]) - float(row["eval_accuracy"])
        )
        assert float(row["gap_loss"]) == pytest.approx(float(row["eval_loss"]) - float(row["train_eval_loss"]))
        for name in ("gap_accuracy", "gap_loss"):
            assert float(row[f"{name}_low"]) < float(row[name]) < float(row[f"{name}_high"])
    held_out = judge(_rows(config.run.output_dir / "evals" / "step_3.scores.jsonl"), beta=1.0).overall
    loss = held_out.estimates["eval_loss"]
    low, high = (float(rows[-1][f"gap_loss_{end}"]) for end in ("low", "high"))
    assert high - low > loss.high - loss.low, "a difference is less certain than either side"
    assert difference(loss, loss).value == 0
    assert "step 3/3  GAP   acc" in caplog.text
    assert "on 10 training rows, above the evaluation by" in caplog.text


def _rows(path):
    return [ScoreRow.from_dict(json.loads(line)) for line in path.read_text().splitlines()]
