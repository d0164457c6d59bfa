"""What `gold match` reads of the run that a proxy came from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rewardlab.core.errors import ConfigError
from rewardlab.gold.matching.runs import read_run, run_folder_of, what_of


def run_folder(folder: Path, losses: Sequence[float], epochs: float = 1.0) -> Path:
    (folder / "best").mkdir(parents=True)
    count = len(losses)
    lines = ["step,epoch,train_nll,train_accuracy,train_pairs"]
    lines += [f"{n + 1},{epochs * (n + 1) / count},{loss},0.9,64" for n, loss in enumerate(losses)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"lr": 5e-6, "epochs": epochs}), encoding="utf-8")
    return folder


def test_a_run_tells_its_losses_and_its_training_accuracy(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    losses = [*(0.69 - 0.004 * np.arange(100)), *(0.25 + 0.01 * generator.normal(size=20))]
    folder = run_folder(tmp_path / "run", losses)
    assert run_folder_of(f"p={folder / 'best'}") == folder
    assert run_folder_of(str(folder)) == folder
    assert run_folder_of(f"p={tmp_path / 'scores.json'}") is None
    found = read_run(folder)
    assert found.end_loss is not None
    assert found.end_loss.value == pytest.approx(np.mean(losses[-12:]))
    assert found.end_loss.high < 0.3
    assert found.epoch_loss is not None
    assert found.train_accuracy is not None
    assert found.train_accuracy.value == pytest.approx(0.9, abs=0.001)
    assert found.learning_rate == 5e-6
    short = read_run(run_folder(tmp_path / "short", losses[:30], epochs=0.5))
    assert short.epoch_loss is None
    with pytest.raises(ConfigError, match="no such folder"):
        read_run(tmp_path / "none")


def test_a_source_with_and_without_a_name() -> None:
    assert what_of("p=runs/x/best") == Path("runs/x/best")
    assert what_of("runs/a=b/best") == Path("runs/a=b/best")
