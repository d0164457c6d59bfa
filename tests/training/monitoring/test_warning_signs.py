"""Faults planted in real runs on a tiny model are named in the log, the record and the report; a healthy run is not."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import rewardlab.training.run as run_module
import runs
from common import write_pairs
from rewardlab.analysis.health import ADVICE, judge
from rewardlab.analysis.signs import NARROW, NEEDED_SPREAD, RunFacts
from rewardlab.batch import PackedBatch
from rewardlab.cli import main
from rewardlab.core.files import read_jsonl
from rewardlab.model.reward import RewardModel
from rewardlab.report.run import train_report
from rewardlab.training.loop.reward_trainer import RewardSteps
from rewardlab.training.run import TrainResult, train

pytestmark = pytest.mark.usefixtures("verified_here")
config_for = partial(
    runs.config_for,
    steps=40,
    log_every=2,
    eval_every=4,
    baselines=False,
    label_smoothing=0.0,
    micro_token_budget=4096,  # one micro-batch a step: none of the signs is about how a step is divided
)


def names_of(result: TrainResult) -> list[str]:
    """Signs in the order in which they were told; the record and the log have the same."""
    recorded = [row for _, row in read_jsonl(result.output_dir / "warnings.jsonl")]
    assert recorded == [sign.as_dict() for sign in result.warnings]
    return [sign.name for sign in result.warnings]


def rewritten(path: Path, source: Path, change: Callable[[dict[str, str], random.Random], dict[str, str]]) -> Path:
    """A file of pairs with every row changed."""
    draw = random.Random(0)
    rows = [change(json.loads(line), draw) for line in source.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def swapped(row: dict[str, str]) -> dict[str, str]:
    """With the other reply preferred."""
    return row | {"chosen": row["rejected"], "rejected": row["chosen"]}


def random_pairs(path: Path, count: int, *, offset: int) -> Path:
    """Pairs whose labels follow from nothing: two replies of random words, either preferred."""
    draw = random.Random(offset)
    words = ["light", "water", "soil", "Paris", "France", "basil", "more", "here", "maybe", "yes"]
    rows = [
        {
            "prompt": f"Number {n + offset}?",
            "chosen": " ".join(draw.choices(words, k=4)),
            "rejected": " ".join(draw.choices(words, k=4)),
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Three hundred pairs in which the polite reply is preferred."""
    return write_pairs(tmp_path / "many.jsonl", 300)


@pytest.mark.slow
def test_a_healthy_run_is_silent(base_model, many, tmp_path, log):
    result = train(config_for(base_model, many, tmp_path / "run", profile_memory=True))
    assert names_of(result) == []
    assert "WARNING" not in log.text
    assert (tmp_path / "run/warnings.jsonl").read_text() == "", "watched, and nothing seen"
    assert result.selected.overall.sums.accuracy > 0.9, "it was one in which something is learned"
    report = train_report(selection={}, test={}, speed="fast", ending="x", warnings=result.warnings)
    assert "Warning" not in report


@pytest.mark.slow
def test_a_control_without_replies_tells_no_sign_of_what_it_is_for(base_model, many, tmp_path):
    result = train(config_for(base_model, many, tmp_path / "run", diagnostic_mode="prompt_only"))
    assert names_of(result) == []


@pytest.mark.slow
def test_a_mark_of_the_preferred_reply_and_test_data_the_other_way_round_are_named(base_model, many, tmp_path, log):
    test = rewritten(tmp_path / "test.jsonl", write_pairs(tmp_path / "t", 60, offset=900), lambda r, _: swapped(r))
    same = write_pairs(tmp_path / "same.jsonl", 100, offset=400)
    data = {"eval_dataset": (str(same),), "test_dataset": (str(test),)}
    result = train(config_for(base_model, many, tmp_path / "run", baselines=True, **data))
    assert names_of(result) == ["shallow_labels", "reversed_labels"]
    first, last = result.warnings
    assert (first.step, last.step) == (0, 40)
    assert "a bag of words reaches an accuracy of 1.000" in first.text
    assert last.text.endswith("on the test data, below 0.5 by more than its interval.")
    assert last.line() in log.text


@pytest.mark.slow
def test_a_model_that_learned_less_than_a_bag_of_words_is_told(base_model, many, tmp_path, log):
    result = train(config_for(base_model, many, tmp_path / "run", baselines=True, lr=1e-9))
    assert names_of(result)[-1] == "behind_baseline"
    (sign,) = [sign for sign in result.warnings if sign.name == "behind_baseline"]
    assert "right more often than the chosen model on the evaluation data: " in sign.text
    assert "a bag of words by 0." in sign.text
    assert "before" not in sign.text
    assert json.loads((tmp_path / "run/warnings.jsonl").read_text().splitlines()[-1]) == sign.as_dict()


@pytest.mark.slow
def test_one_of_several_datasets_the_other_way_round_is_named_by_its_name(base_model, many, tmp_path):
    same = write_pairs(tmp_path / "same.jsonl", 60, offset=400)
    turned = rewritten(tmp_path / "turned.jsonl", write_pairs(tmp_path / "t", 60, offset=900), lambda r, _: swapped(r))
    data = {"test_dataset": (str(same), str(turned))}
    (sign,) = train(config_for(base_model, many, tmp_path / "run", **data)).warnings
    assert (sign.name, sign.step) == ("reversed_labels", 40)
    assert "on the test data of turned, below 0.5" in sign.text
    assert "same" not in sign.text


@pytest.mark.slow
def test_reversed_labels_are_named_in_log_record_and_report_and_by_the_rows_alone(base_model, many, tmp_path, log):
    evaluation = rewritten(
        tmp_path / "eval.jsonl", write_pairs(tmp_path / "e", 60, offset=900), lambda r, _: swapped(r)
    )
    result = train(config_for(base_model, many, tmp_path / "run", eval_dataset=(str(evaluation),)))
    assert names_of(result)[0] == "reversed_labels"
    first = result.warnings[0]
    assert f"step {first.step}/40  WARNING  {first.line()}" in log.text
    assert f"{first.name}: {first.text} {ADVICE[first.name]}" == first.line()
    report = train_report(selection={}, test={}, speed="fast", ending="x", warnings=result.warnings)
    assert f"step {first.step}: reversed_labels: the evaluation accuracy is" in " ".join(report.split())
    settings = json.loads((tmp_path / "run/config.json").read_text())
    facts = RunFacts(num_steps=settings["steps"], warmup_steps=settings["warmup_steps"], beta=settings["beta"])
    rows = [row for _, row in read_jsonl(tmp_path / "run/metrics.jsonl")]
    assert judge(rows, facts) == list(result.warnings)
    assert judge(runs.rows_of(tmp_path / "run"), facts) == list(result.warnings), "metrics.csv says the same"


@pytest.mark.slow
def test_memorised_pairs_are_named_as_overfitting(base_model, tmp_path):
    few = random_pairs(tmp_path / "few.jsonl", 8, offset=0)
    others = random_pairs(tmp_path / "others.jsonl", 200, offset=1000)
    settings = {"eval_dataset": (str(others),), "steps": 60, "lr": 1e-2, "eval_every": 6}
    result = train(config_for(base_model, few, tmp_path / "run", **settings))
    assert "overfitting" in names_of(result)
    sign = next(sign for sign in result.warnings if sign.name == "overfitting")
    assert "beyond the intervals, while the training loss went from" in sign.text


@pytest.mark.slow
def test_labels_that_follow_from_nothing_are_named_as_no_skill(base_model, tmp_path):
    data = random_pairs(tmp_path / "random.jsonl", 1200, offset=0)
    result = train(config_for(base_model, data, tmp_path / "run", lr=1e-4, batch_size=16, steps=60))
    assert "no_skill" in names_of(result)
    assert set(names_of(result)) <= {"no_skill", "narrow_scores"}


@pytest.mark.slow
def test_a_learning_rate_far_too_high_is_named_as_exploding(base_model, tmp_path):
    data = random_pairs(tmp_path / "random.jsonl", 300, offset=0)
    settings = {"lr": 4.0, "max_grad_norm": 100.0, "batch_size": 64, "micro_token_budget": 8192, "log_every": 1}
    schedule = {"lr_scheduler": "constant_with_warmup", "warmup_steps": 4, "steps": 8}
    result = train(config_for(base_model, data, tmp_path / "run", **settings, **schedule))
    assert names_of(result)[0] == "exploding"
    assert re.search(r"over the last \d+ pairs; its median before was", result.warnings[0].text)


@pytest.mark.slow
def test_scores_kept_together_are_named_as_narrow(base_model, many, tmp_path):
    # Trained on, the scores are drawn on to 0, and with them the loss rises, which on some processors is named as well.
    result = train(config_for(base_model, many, tmp_path / "run", score_regularization_lambda=10.0, steps=28))
    assert names_of(result) == ["narrow_scores"]
    assert re.search(r"an accuracy of 0\.\d+ \[.*\] needs", result.warnings[0].text)


@pytest.mark.slow
def test_scores_are_not_narrow_where_labels_are_hardly_sure(base_model, many, tmp_path):
    """Labels of 0.6 put scores near each other, however often their order is right."""
    soft = [
        rewritten(tmp_path / f"{name}.jsonl", pairs, lambda row, draw: {**row, "label": 0.55})
        for name, pairs in (("soft", many), ("eval", write_pairs(tmp_path / "more.jsonl", 200, offset=400)))
    ]
    config = config_for(base_model, soft[0], tmp_path / "run", eval_dataset=(str(soft[1]),), lr=1e-3)
    result = train(config)
    *_, last = (row for _, row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "eval_accuracy_low" in row)
    low = last["eval_accuracy_low"]
    assert last["eval_score_std"] < NARROW * NEEDED_SPREAD * math.log(low / (1 - low)), (
        "too near for labels that are sure"
    )
    assert "narrow_scores" not in names_of(result)


@pytest.mark.slow
def test_scores_that_grow_to_no_purpose_are_named(base_model, many, tmp_path):
    clean = write_pairs(tmp_path / "clean.jsonl", 200, offset=400)
    noisy = rewritten(tmp_path / "eval.jsonl", clean, lambda row, draw: swapped(row) if draw.random() < 0.2 else row)
    result = train(config_for(base_model, many, tmp_path / "run", eval_dataset=(str(noisy),), lr=1e-2))
    assert "growing_scores" in names_of(result)
    assert set(names_of(result)) == {"growing_scores", "overfitting"}, "a fifth of the labels is worse than certainty"
    sign = next(sign for sign in result.warnings if sign.name == "growing_scores")
    assert re.search(r"the margin \(times β\) grew from [\d.]+ at step \d+ to [\d.]+ over 5 evaluations", sign.text)


@pytest.mark.slow
def test_an_accuracy_that_falls_and_rises_late_is_named(base_model, many, tmp_path, monkeypatch):
    own = RewardSteps._loss_and_statistics

    def reversed_for_some_steps(self: RewardSteps, rewards: torch.Tensor, batch: PackedBatch) -> object:
        _, step = self.model.step_draw
        return own(self, -rewards if 30 <= step < 34 else rewards, batch)

    monkeypatch.setattr(RewardSteps, "_loss_and_statistics", reversed_for_some_steps)
    settings = {"lr_scheduler": "constant", "label_smoothing": 0.2, "eval_every": 2, "steps": 44}
    result = train(config_for(base_model, many, tmp_path / "run", **settings))
    assert "oscillating" in names_of(result)
    sign = next(sign for sign in result.warnings if sign.name == "oscillating")
    assert 36 < sign.step <= 44
    assert re.search(r"went 1\.000 \[.*\], 0\.\d+ \[.*\], .* at steps 3\d, 3\d and \d+: further", sign.text)


def without_gradient(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[str], bool]) -> None:
    """Models are loaded with parameters, chosen by name, whose gradient is zero."""
    own = run_module.load_reward_model

    def load(*arguments: object, **settings: object) -> RewardModel:
        model = own(*arguments, **settings)
        for name, parameter in model.named_parameters():
            if chosen(name):
                parameter.register_hook(torch.zeros_like)
        return model

    monkeypatch.setattr(run_module, "load_reward_model", load)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("part", ["head", "backbone"])
def test_a_part_that_does_not_train_is_named(base_model, many, tmp_path, monkeypatch, part):
    without_gradient(monkeypatch, lambda name: name.startswith("head.") == (part == "head"))
    result = train(config_for(base_model, many, tmp_path / "run", steps=8))
    assert names_of(result) == [f"frozen_{part}"]


@pytest.mark.slow
def test_prompts_that_are_mostly_cut_are_named_before_the_first_step(base_model, tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 40)
    data = rewritten(tmp_path / "long.jsonl", pairs, lambda row, _: row | {"prompt": "more and more " * 20})
    settings = {"max_seq_len": 80, "eval_fraction": 0.0, "steps": 1}
    result = train(config_for(base_model, data, tmp_path / "run", **settings))
    assert names_of(result) == ["truncated"]
    assert result.warnings[0].step == 0
    assert "80 of 80 replies of the training data" in result.warnings[0].text


def test_the_report_of_the_command_repeats_the_signs(base_model, pairs_file, tmp_path, capsys):
    data = rewritten(tmp_path / "long.jsonl", pairs_file, lambda row, _: row | {"prompt": "more and more " * 20})
    folder = tmp_path / "run"
    flags = f"--model {base_model} --dataset {data} --output-dir {folder} --max-seq-len 80 --steps 1 --eval-fraction 0"
    main(["train", *flags.split(), "--report-to", "none"])
    report = (folder / "report.txt").read_text()
    assert "Warning signs on the way" in report
    assert "step 0: truncated: prompts were cut to fit the limit of tokens: 80 of 80 replies" in " ".join(
        report.split()
    )
    said = capsys.readouterr().out
    assert "step 0/1  WARNING  truncated: prompts were cut" in said
    assert report.strip() in said


@pytest.mark.slow
def test_the_spread_of_the_scores_is_that_of_the_score_rows(base_model, many, tmp_path):
    import numpy as np

    train(config_for(base_model, many, tmp_path / "run", steps=2))
    scores = [row["score"] for _, row in read_jsonl(tmp_path / "run/evals/step_2.scores.jsonl")]
    last = runs.rows_of(tmp_path / "run")[-1]
    assert float(last["eval_score_mean"]) == pytest.approx(np.mean(scores), abs=1e-12)
    assert float(last["eval_score_std"]) == pytest.approx(np.std(scores, ddof=1), abs=1e-12)
