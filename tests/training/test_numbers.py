"""The numbers of a run hold together: recomputed from its folders, repeated, and led back to the seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GPTNeoXConfig

import runs
from common import SIZES, make_groups, make_model, make_tokenizer, write_pairs
from rewardlab.artifact.load import load
from rewardlab.batch import pack
from rewardlab.data.step_order import batch_of_step
from rewardlab.evaluation.config import EvalConfig
from rewardlab.evaluation.evaluate import evaluate_folder
from rewardlab.model.config import ModelConfig
from rewardlab.model.load import load_reward_model
from rewardlab.score import score_groups
from rewardlab.training.loop.selection import Selection
from rewardlab.training.run import train

pytestmark = pytest.mark.usefixtures("verified_here")
config_for = partial(runs.config_for, steps=4, log_every=1)


def rows_of(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without what a clock decides."""
    return [{name: row[name] for name in row if name not in runs.CLOCK} for row in runs.rows_of(folder)]


def judged_rows() -> tuple[list[dict], list[dict]]:
    """Pairs with soft labels, ties and strengths; and rows of three or four replies with strengths."""
    draw = np.random.default_rng(5)
    pairs = [
        {
            "prompt": f"How do I keep basil number {n}?",
            "chosen": "Certainly, here is more." + "!" * (n % 3),
            "rejected": f"no {n % 7}",
            "label": float(draw.choice([1.0, 0.8, 0.5, 0.1])),
            "strength": float(draw.choice([0.5, 1.0, 2.5])),
        }
        for n in range(12)
    ]
    ranked = [
        {
            "prompt": f"What is the capital of France, number {n}?",
            "responses": ["Paris.", "yes", f"maybe {n}", "no idea!"][: 3 + n % 2],
            "scores": [float(score) for score in draw.permutation(5)[: 3 + n % 2]],
            "strength": float(draw.choice([0.5, 2.0])),
        }
        for n in range(8)
    ]
    return pairs, ranked


def comparisons_of(row: dict) -> list[tuple[str, str, float]]:
    """(first reply, second reply, label) written out."""
    if "chosen" in row:
        return [(row["chosen"], row["rejected"], row["label"])]
    order = np.argsort([-score for score in row["scores"]])
    return [(row["responses"][i], row["responses"][j], 1.0) for n, i in enumerate(order) for j in order[n + 1 :]]


def mean_loss(folder: Path, rows: list[dict], *, by_prompt: bool) -> float:
    """The formulas of the design term by term, with β 1.3, ε 0.1, λ 0.05, 0.02 and c 0.01: each conversation alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def score(prompt: str, reply: str) -> torch.Tensor:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        with torch.no_grad():
            return model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0, 0].double()

    total = weights = 0.0
    for row in rows:
        judged = comparisons_of(row)
        for first, second, label in judged:
            weight = row["strength"] / (len(judged) if by_prompt else 1)
            a, b = score(row["prompt"], first), score(row["prompt"], second)
            y = label * 0.9 + (1 - label) * 0.1
            loss = -(y * logsigmoid(1.3 * (a - b)) + (1 - y) * logsigmoid(1.3 * (b - a)))
            loss += 0.05 * (a - b) ** 2 + 0.02 * (a**2 + b**2) + 0.01 * (a + b) ** 2
            total += weight * float(loss)
            weights += weight
    return total / weights


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("lora", "weighting"), [(False, "prompt"), (False, "comparison"), (True, "prompt")])
def test_the_logged_loss_is_that_of_the_saved_weights_on_the_rows_of_the_step(base_model, tmp_path, lora, weighting):
    pairs, ranked = judged_rows()
    for name, rows in (("pairs", pairs), ("ranked", ranked)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_for(
        base_model,
        tmp_path / "pairs.jsonl",
        tmp_path / "run",
        dataset=(str(tmp_path / "pairs.jsonl"), str(tmp_path / "ranked.jsonl")),
        eval_fraction=0.0,
        batch_size=6,
        save_every=1,
        strength_as="weight",
        kwise_weight=weighting,
        lora=lora,
        beta=1.3,
        label_smoothing=0.1,
        regularization_lambda=0.05,
        score_regularization_lambda=0.02,
        center_lambda=0.01,
        seed=3,
    )
    train(config)
    logged = [float(row["train_loss"]) for row in rows_of(tmp_path / "run")]
    for step in range(1, 4):
        chosen = batch_of_step(step, num_groups=20, batch_size=6, seed=3)
        wanted = mean_loss(
            tmp_path / f"run/step_{step}", [[*pairs, *ranked][n] for n in chosen], by_prompt=weighting == "prompt"
        )
        assert logged[step] == pytest.approx(wanted, abs=1e-5), f"step {step + 1}"
    assert np.ptp(logged) > 0.01, "the steps can be told apart"


def contents(folder: Path) -> dict[str, object]:
    """Everything of a run that a number can be read from, but for times and the folder's own name."""
    weights = {
        f"{path.relative_to(folder)}/{name}": tensor.numpy().tobytes()
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    scores = {path.name: path.read_text() for path in sorted((folder / "evals").iterdir())}
    kept = ("reward_distributions.json", "samples.txt")
    return weights | scores | {name: (folder / name).read_text() for name in kept} | {"rows": rows_of(folder)}


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_command_gives_the_same_bits_twice(base_model, pairs_file, tmp_path, lora):
    test = write_pairs(tmp_path / "test.jsonl", 6, offset=100)
    settings = {"lora": lora, "test_dataset": (str(test),), "train_eval_limit": 4, "save_every": 2}
    for name in "ab":
        train(config_for(base_model, pairs_file, tmp_path / name, **settings))
    first, second = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert first == second
    assert len(first["rows"]) == 5
    assert "test.scores.jsonl" in first
    assert any("adapter" in name for name in first) == lora


@pytest.mark.slow
def test_another_process_gives_the_same_bits(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "here", lora=True, steps=2)
    train(config)
    # The last check, in yet another process, writes nothing.
    program = "from rewardlab import cli; from rewardlab.artifact import canaries; from rewardlab.training import run; "
    program += "run.verify_in_clean_process = lambda folder: None; "
    program += "canaries.CONVERSATIONS = canaries.CONVERSATIONS[:2]; cli.main()"  # as in this process
    command = [sys.executable, "-c", program, "train", "--config", str(tmp_path / "here/config.json")]
    answer = subprocess.run(
        [*command, "--output-dir", str(tmp_path / "there")],
        capture_output=True,
        text=True,
        check=False,
        # This process runs in one thread; sums of another number of threads are other sums.
        env=os.environ | {"PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "1"},
    )
    assert answer.returncode == 0, answer.stderr
    here, there = contents(tmp_path / "here"), contents(tmp_path / "there")
    assert here == there


@pytest.mark.slow
def test_the_head_depends_on_the_seed(base_model, pairs_file, tmp_path):
    """One batch holds all rows, so no order can have a part in it."""
    heads = []
    for seed in (0, 1):
        config = config_for(base_model, pairs_file, tmp_path / str(seed), seed=seed, steps=1, lr=1e-12, batch_size=64)
        result = train(config.replace(eval_fraction=0.0))
        heads.append(load_file(result.last / "model.safetensors")["score.weight"])
    assert (heads[0] - heads[1]).norm() > 0.5 * heads[0].norm()


@pytest.mark.slow
def test_the_order_of_the_data_depends_on_the_seed(base_model, pairs_file, tmp_path):
    """The head comes with the model and next to nothing is learned, so batches differ by their rows alone."""
    scorer = train(config_for(base_model, pairs_file, tmp_path / "start", steps=1)).last
    runs = {}
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        config = config_for(scorer, pairs_file, folder, seed=seed, steps=5, lr=1e-12, eval_dataset=(str(pairs_file),))
        result = train(config)
        losses = [float(row["train_loss"]) for row in rows_of(folder) if row["train_loss"]]
        runs[seed] = (result.baseline.overall.sums.mean_nll, losses)
    assert runs[0][0] == runs[1][0], "the same model"
    assert np.abs(np.subtract(runs[0][1], runs[1][1])).max() > 1e-3, "other batches"
    assert np.mean(runs[0][1]) == pytest.approx(np.mean(runs[1][1]), abs=1e-5), "the same rows in all"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("attention", ["shared", "padded"])
def test_any_token_budget_gives_the_same_evaluation(base_model, pairs_file, tmp_path, attention):
    """Equal to law 3's rounding, not to the bit: the kernels for other numbers of rows add in other orders (on a
    processor of AMD's 1.8e-6 apart).
    """
    folder = train(config_for(base_model, pairs_file, tmp_path / "run", steps=1)).last
    results = {}
    for budget in (16, 100, 8192):
        config = EvalConfig.of(
            model=str(folder),
            dataset=(str(pairs_file),),
            output_dir=tmp_path / f"eval{budget}",
            attention=attention,
            micro_token_budget=budget,
            precision_card=False,
            reuse=False,
        )
        results[budget], _, _ = evaluate_folder(config)
    wanted = results[8192]
    for result in results.values():
        for row, same in zip(result.rows, wanted.rows, strict=True):
            assert abs(row.score - same.score) <= 1e-5 * max(1, abs(same.score))
            assert replace(row, score=0.0) == replace(same, score=0.0)
        assert result.overall.sums.correct == wanted.overall.sums.correct
        assert result.overall.sums.nll == pytest.approx(wanted.overall.sums.nll, abs=1e-4)


def dropout_model(folder: Path) -> Path:
    """A chat model that drops a third of everything while it trains."""
    torch.manual_seed(0)
    config = GPTNeoXConfig(**SIZES, hidden_dropout=0.3, attention_dropout=0.3)
    config.eos_token_id = config.pad_token_id = 2
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_the_models_own_dropout_is_off_while_it_trains(tmp_path):
    model = load_reward_model(
        str(dropout_model(tmp_path / "base")),
        ModelConfig(precision="fp32"),
        seed=0,
        layout="padded",
        device=torch.device("cpu"),
        log=print,
    )
    assert model.training
    batch = pack(make_groups(4))
    with torch.no_grad():
        training = model(batch)
        assert torch.equal(training, model.eval()(batch))
        for module in model.train().modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
        assert not torch.allclose(training, model(batch), atol=1e-3), "it would have shown"


def test_scores_are_taken_in_evaluation_mode_whatever_the_model_is_in():
    model = make_model("gpt_neox", config=GPTNeoXConfig(**SIZES, hidden_dropout=0.5), layout="padded")
    groups = make_groups(6)
    wanted = np.concatenate(score_groups(model.eval(), groups, budget=200))
    assert not model.training
    model.train()
    assert np.array_equal(np.concatenate(score_groups(model, groups, budget=200)), wanted)
    assert model.training
    with torch.no_grad():
        assert np.abs(model(pack(groups)).numpy() - wanted).max() > 1e-2, "dropout would have shown"


@pytest.mark.slow
def test_the_test_data_judge_the_chosen_checkpoint_and_not_the_last(base_model, pairs_file, tmp_path, monkeypatch):

    def offer(self, step, values, **_):
        self.best_step = 2 if step == 2 else self.best_step
        return step == 2

    monkeypatch.setattr(Selection, "offer", offer)
    test = write_pairs(tmp_path / "test.jsonl", 12, offset=100)
    config = config_for(base_model, pairs_file, tmp_path / "run", eval_every=2, test_dataset=(str(test),))
    result = train(config)
    assert (result.best_step, result.last.name, result.model.name) == (2, "step_4", "best")
    conversations = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
        for row in map(json.loads, test.read_text().splitlines())
        for side in ("chosen", "rejected")
    ]
    scores = [row.score for row in result.test.rows]
    assert scores == pytest.approx(load(tmp_path / "run/best").score(conversations), abs=1e-5)
    last = load(tmp_path / "run/step_4").score(conversations)
    assert np.abs(np.subtract(scores, last)).max() > 1e-3
    report = json.loads((tmp_path / "run/evals/test.metrics.json").read_text())
    assert report["all"]["sums"]["nll"] == pytest.approx(result.test.overall.sums.nll)
