"""What `gold match` reads of the run that a proxy came from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gold_matched import drawn, findings, part, scored
from reward_models import save_tiny
from rewardlab.artifact.seal import seal
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import write_json
from rewardlab.core.spec import read_spec
from rewardlab.gold.matching.run import match_parts
from rewardlab.gold.matching.runs import read_run, run_folder_of, spec_of, step_of, what_of


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


def model_of(folder: Path, *, step: int) -> None:
    """Save a model that says that it is of this step."""
    spec = replace(read_spec(save_tiny(folder)), provenance={"step": step})
    write_json(folder / "reward_spec.json", seal(folder, spec).to_dict())


def judged_as(folder: Path, name: str, accuracy: float) -> None:
    """Write an evaluation of a run."""
    estimate = {"value": accuracy, "low": accuracy - 0.05, "high": accuracy + 0.05, "n": 100, "method": "made up"}
    (folder / "evals").mkdir(exist_ok=True)
    (folder / "evals" / f"{name}.metrics.json").write_text(
        json.dumps({"all": {"estimates": {"eval_accuracy": estimate}, "sums": {}}}), encoding="utf-8"
    )


def test_accuracies_are_those_of_the_model_and_not_of_what_was_trained_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = ["step,train_accuracy,train_pairs,train_eval_accuracy,train_eval_accuracy_low,train_eval_accuracy_high"]
    lines += [f"{10 * n},{0.5 + n / 20},64,{0.55 + n / 20},{0.5 + n / 20},{0.6 + n / 20}" for n in range(1, 10)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    model_of(folder / "best", step=20)
    model_of(folder / "step_90", step=90)
    judged_as(folder, "selection", 0.6)
    judged_as(folder, "step_90", 0.7)

    steps = {name: step_of(spec_of(f"p={folder / name}")) for name in ("best", "step_90")}
    assert steps == {"best": 20, "step_90": 90}
    assert step_of(spec_of(str(folder))) == 20
    chosen, last = (read_run(folder, steps[name]) for name in ("best", "step_90"))
    assert [one.train_accuracy and one.train_accuracy.value for one in (chosen, last)] == pytest.approx([0.65, 1.0])
    assert [one.own_accuracy and one.own_accuracy.value for one in (chosen, last)] == [0.6, 0.7]
    assert [one.own_accuracy_on for one in (chosen, last)] == ["selection", "step_90"]
    assert repr(read_run(folder)) == repr(chosen), "of scores in a file the model that the run chose is assumed"
    assert read_run(folder, 50).own_accuracy is None, "nothing judged this model"

    without = "\n".join(",".join(line.split(",")[:3]) for line in lines) + "\n"
    (folder / "metrics.csv").write_text(without, encoding="utf-8")
    batches = read_run(folder, 20).train_accuracy
    assert batches is not None
    assert batches.value == pytest.approx(0.6, abs=0.01)


def test_an_accuracy_that_was_measured_while_it_learned_fails_no_proxy(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", [0.4] * 60, epochs=4.0)
    lines = ["step,epoch,train_accuracy,train_pairs"]
    lines += [f"{n},{n / 15},{0.667 if n <= 6 else 1.0},64" for n in range(1, 61)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    early, end = read_run(folder, 6), read_run(folder, 60)
    assert early.learned_over == "steps 4–6 of 60; the model is of step 6"
    assert end.learned_over == ""
    short = replace(early, learned_over=read_run(run_folder(tmp_path / "short", [0.4] * 8), 8).learned_over)
    assert short.learned_over == "steps 5–8 of 8; the model is of step 8", "half of its steps"

    rows = drawn(rows=300)
    for own, status in ((early, "undecided"), (replace(early, learned_over=""), "fail")):
        found = findings(match_parts(part(rows, scored(rows, 0.501)), runs={"p0": own}))
        assert found["training accuracy"].status == status
    found = findings(match_parts(part(rows, scored(rows, 0.501)), runs={"p0": early}))
    assert "while it learned (steps 4–6 of 60" in found["training accuracy"].evidence
    assert "--train-input" in found["training accuracy"].advice
    assert found["generalisation"].status == "undecided"
    good = findings(match_parts(part(rows, scored(rows)), runs={"p0": early}))["generalisation"]
    assert good.status == "pass"
    for one in (good, found["generalisation"]):
        assert "lost on new prompts." not in one.evidence or "not known" in one.evidence
        assert "points" not in one.evidence


def test_a_source_with_and_without_a_name() -> None:
    assert what_of("p=runs/x/best") == Path("runs/x/best")
    assert what_of("runs/a=b/best") == Path("runs/a=b/best")
