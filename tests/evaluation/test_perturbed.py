"""`rewardlab eval --perturb` scores the same pairs with changed texts, and says what was left out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from common import make_model, make_tokenizer
from rewardlab.analysis.robustness import Effect
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.data.config import RenderingConfig
from rewardlab.data.perturb import PERTURBATIONS, POLITE
from rewardlab.data.templates import build_renderer
from rewardlab.evaluation import perturbed as perturbed_module
from rewardlab.evaluation.config import EvalConfig
from rewardlab.evaluation.evaluate import evaluate_folder
from rewardlab.evaluation.perturbed import corrected


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("perturbed") / "rm"
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=160))
    save_reward_model(folder, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twenty pairs, twelve of them with a list; the last two end so near the limit that a polite ending does not
    fit.
    """
    rows = [
        {
            "prompt": f"How do I keep basil number {n}?",
            "chosen": "Water it.\n- light\n- soil\n- air" if n < 12 else f"It is **easy** {n}.",
            "rejected": "no" + (" qzxjvk" * 16 if n >= 18 else f" {n}"),
        }
        for n in range(20)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_every_perturbation_has_its_effect_and_its_counts(saved, data, tmp_path, capsys):
    line = ["eval", str(saved), "--dataset", str(data), "--perturb", "--output-dir", str(tmp_path / "out")]
    main(line)
    printed = " ".join(capsys.readouterr().out.split())
    assert "changed in ways that should not matter (20 of 20 preferences, seed 0)" in printed
    found = json.loads((tmp_path / "out/eval.perturbed.json").read_text())["perturbations"]
    assert list(found) == list(PERTURBATIONS)
    assert (found["list order"]["preferences"], found["list order"]["not_applicable"]) == (12, 8)
    assert (found["markdown stripped"]["preferences"], found["markdown stripped"]["not_applicable"]) == (8, 12)
    assert (found["politeness"]["preferences"], found["politeness"]["lost"]) == (18, 2)
    assert "list order: left out 8 with nothing to change." in printed
    assert "politeness: left out 2 without a score for every reply." in printed
    main([*line, "--overwrite", "--seed", "0"])
    assert json.loads((tmp_path / "out/eval.perturbed.json").read_text())["perturbations"] == found


def test_the_shift_is_that_of_the_scores_of_the_changed_texts(saved, data, tmp_path):
    config = EvalConfig.of(model=str(saved), dataset=str(data), output_dir=tmp_path / "out", perturb=True)
    result, *_ = evaluate_folder(config)
    scorer = load(saved)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    moved = []
    for row in rows[:18]:
        replies = [row["chosen"], row["rejected"]]
        before = scorer.score_replies(row["prompt"], replies)
        after = scorer.score_replies(row["prompt"], [reply + POLITE for reply in replies])
        moved += [second - first for first, second in zip(before, after, strict=True)]
    unit = torch.tensor([row.score for row in result.rows], dtype=torch.float64).std(correction=0).item()
    shift = result.robustness.effects["politeness"].estimates["shift"]
    assert shift.value == pytest.approx(sum(moved) / len(moved) / unit, abs=1e-5)
    assert shift.n == 18


@pytest.mark.slow
def test_pairs_that_a_change_makes_equal_lose_their_order(saved, tmp_path):
    """Of each row's three pairs, the one of replies that differ in their markdown alone is a tie without it."""
    bold, plain, other = "It is **{}** ok", "It is {} ok", "no {}"
    path = tmp_path / "kwise.jsonl"
    texts = [[text.format(n) for text in (bold, plain, other)] for n in range(12)]
    rows = [{"prompt": f"Q{n}?", "responses": own, "scores": [3, 2, 1]} for n, own in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EvalConfig.of(model=str(saved), dataset=str(path), output_dir=tmp_path / "out", perturb=True)
    result, *_ = evaluate_folder(config)
    effect = result.robustness.effects["markdown stripped"]
    scorer = load(saved)
    before, after = [], []
    for row, own in zip(rows, texts, strict=True):
        for outcomes, replies in ((before, own), (after, [own[1], own[1], own[2]])):
            scores = scorer.score_replies(row["prompt"], replies)
            outcomes += [(np.sign(scores[i] - scores[j]) + 1) / 2 for i, j in ((0, 1), (0, 2), (1, 2))]
    change = np.array(after) - np.array(before)
    assert effect.estimates["accuracy"].value == pytest.approx(change.mean())
    assert effect.estimates["flipped"].value == pytest.approx(np.abs(change).mean())
    assert (effect.num_preferences, effect.lost) == (12, 0)


def test_all_that_can_make_a_row_move_is_one_family_of_tests():
    def effect(p_shift: float, p_accuracy: float) -> Effect:
        return Effect(
            estimates={}, p_shift=p_shift, p_accuracy=p_accuracy,
            num_preferences=0, num_replies=0, not_applicable=0, lost=0,
        )  # fmt: skip

    effects = {"a": effect(0.01, 0.5), "b": effect(0.02, 0.001), "few": effect(math.nan, math.nan)}
    p_shift, p_accuracy = corrected(effects)
    # Four tests: 4 · 0.001, 3 · 0.01, 2 · 0.02, 1 · 0.5.
    assert p_shift == pytest.approx({"a": 0.03, "b": 0.04, "few": math.nan}, nan_ok=True)
    assert p_accuracy == pytest.approx({"a": 0.5, "b": 0.004, "few": math.nan}, nan_ok=True)


@pytest.mark.slow
def test_at_most_so_many_are_drawn_and_an_evaluation_without_removes_the_table(saved, data, tmp_path, monkeypatch):
    monkeypatch.setattr(perturbed_module, "MOST", 6)
    config = EvalConfig.of(model=str(saved), dataset=str(data), output_dir=tmp_path / "out", perturb=True, seed=3)
    result, *_ = evaluate_folder(config)
    assert (result.robustness.num_preferences, result.robustness.num_available) == (6, 20)
    assert result.robustness.effects["typos"].estimates["shift"].method == "too few prompts (6)"
    evaluate_folder(config.replace(perturb=False, overwrite=True))
    assert not (tmp_path / "out/eval.perturbed.json").exists()
