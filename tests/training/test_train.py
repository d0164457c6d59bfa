"""`train` from data to a verified artifact, on a tiny model; laws 6 (head), 9 (repeatable), 10 (baseline)."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import runs
from common import make_groups, make_model, write_base_model, write_pairs
from rewardlab.artifact.load import load
from rewardlab.data.groups import Datasets
from rewardlab.evaluation.evaluate import judge
from rewardlab.score import score_groups
from rewardlab.training.loop.reward_trainer import reward_trainer
from rewardlab.training.monitoring.records import COLUMNS, Records
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig
from runs import rows_of

pytestmark = pytest.mark.usefixtures("verified_here")
config_for = partial(runs.config_for, steps=6, log_every=2, eval_every=3, save_dtype="float32")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("lora", [False, True])
def test_a_run_learns_and_leaves_a_complete_folder(base_model, pairs_file, tmp_path, lora):
    result = train(config_for(base_model, pairs_file, tmp_path / "run", lora=lora, lora_rank=2, steps=12, lr=1e-2))
    folder = tmp_path / "run"
    assert result.selected.overall.sums.accuracy > result.baseline.overall.sums.accuracy or (
        result.selected.overall.sums.mean_nll < result.baseline.overall.sums.mean_nll
    )
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "manifest.json",
        "metrics.csv",
        "metrics.jsonl",
        "reward_distributions.json",
        "samples.txt",
        "evals",
        "best",
        "step_12",
    } <= names
    assert {name for name in names if name.startswith(".")} == {".lock"}, "no temporary files are left"
    rows = rows_of(folder)
    assert tuple(rows[0]) == COLUMNS
    assert [int(row["step"]) for row in rows] == [0, 2, 3, 4, 6, 8, 9, 10, 12]
    assert float(rows[-1]["train_loss"]) < float(rows[1]["train_loss"])
    assert all(json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    distribution = json.loads((folder / "reward_distributions.json").read_text())["12"]
    margins = np.subtract(distribution["chosen"], distribution["rejected"])
    assert margins.mean() == pytest.approx(float(rows[-1]["eval_margin"]))
    assert "⟦score read here⟧" in (folder / "samples.txt").read_text()
    assert (folder / "step_12" / "adapter").exists() == lora
    scores = load(folder / "best").score(
        [
            [{"role": "user", "content": "How do I keep soil?"}, {"role": "assistant", "content": reply}]
            for reply in ("Certainly, here is more.", "no! 3")
        ]
    )
    assert scores[0] > scores[1]


def test_the_record_can_be_recomputed_from_the_score_rows(base_model, pairs_file, tmp_path):
    from rewardlab.core.files import read_jsonl
    from rewardlab.core.types import ScoreRow

    train(config_for(base_model, pairs_file, tmp_path / "run"))
    for row in rows_of(tmp_path / "run"):
        if not row["eval_accuracy"]:
            continue
        path = tmp_path / "run" / "evals" / f"step_{row['step']}.scores.jsonl"
        again = judge([ScoreRow.from_dict(values) for _, values in read_jsonl(path)], beta=1.0).overall
        assert again.sums.accuracy == float(row["eval_accuracy"])
        assert again.sums.mean_nll == pytest.approx(float(row["eval_loss"]), abs=1e-12)
        assert again.sums.comparisons == int(row["eval_pairs"])


@pytest.mark.slow
def test_the_logged_training_loss_is_the_loss_of_the_weights_before_the_step(base_model, pairs_file, tmp_path):
    """With all pairs in one batch, the loss logged at step 1 is that of the untrained model on these rows."""
    config = config_for(
        base_model,
        pairs_file,
        tmp_path / "run",
        steps=1,
        batch_size=64,
        log_every=1,
        eval_fraction=0.0,
        label_smoothing=0.0,
        train_eval_limit=0,
    )
    train(config)
    logged = float(rows_of(tmp_path / "run")[0]["train_loss"])
    second = train(config.replace(output_dir=tmp_path / "again", eval_dataset=(str(pairs_file),)))
    assert second.baseline.overall.sums.mean_nll == pytest.approx(logged, abs=1e-6)


@pytest.mark.slow
def test_the_same_command_gives_the_same_bits_and_any_budget_the_same_numbers(base_model, pairs_file, tmp_path):
    first = train(config_for(base_model, pairs_file, tmp_path / "a"))
    train(config_for(base_model, pairs_file, tmp_path / "b"))
    train(config_for(base_model, pairs_file, tmp_path / "c", micro_token_budget=90))
    weights = [load_file(tmp_path / name / first.last.name / "model.safetensors") for name in "abc"]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert (tmp_path / "a/reward_distributions.json").read_text() == (
        tmp_path / "b/reward_distributions.json"
    ).read_text()
    for key in weights[0]:
        assert (weights[0][key] - weights[2][key]).norm() <= 1e-3 * weights[0][key].norm()


@pytest.mark.slow
def test_the_resolved_configuration_repeats_the_run(base_model, pairs_file, tmp_path):
    from rewardlab.commands.training import parse_train

    train(config_for(base_model, pairs_file, tmp_path / "a", steps=None, epochs=0.5, lr=None, lora=True))
    saved = json.loads((tmp_path / "a/config.json").read_text())
    assert (saved["steps"], saved["lr"], saved["precision"], saved["attention"]) == (2, 5e-5, "fp32", "shared")
    again = parse_train(["--config", str(tmp_path / "a/config.json"), "--output-dir", str(tmp_path / "b")])
    train(again)
    assert (tmp_path / "a/reward_distributions.json").read_text() == (
        tmp_path / "b/reward_distributions.json"
    ).read_text()


@pytest.mark.slow
def test_a_fresh_head_is_never_saved_as_best(base_model, pairs_file, tmp_path):
    result = train(config_for(base_model, pairs_file, tmp_path / "run", steps=2, lr=1e-12))
    sums = result.baseline.overall.sums
    assert result.best is None or result.selected.overall.sums.mean_nll < sums.mean_nll
    reversed_pairs = tmp_path / "reversed.jsonl"
    rows = map(json.loads, write_pairs(tmp_path / "other.jsonl", 12, offset=500).read_text().splitlines())
    reversed_pairs.write_text(
        "".join(json.dumps(row | {"chosen": row["rejected"], "rejected": row["chosen"]}) + "\n" for row in rows)
    )
    stuck = train(
        config_for(
            base_model,
            pairs_file,
            tmp_path / "stuck",
            steps=4,
            lr=1e-2,
            eval_every=2,
            eval_dataset=(str(reversed_pairs),),
            early_stopping_metric="eval_loss",
        )
    )
    assert stuck.best is None
    assert not (tmp_path / "stuck/best").exists()
    assert stuck.model == tmp_path / "stuck/step_4"


@pytest.mark.slow
def test_selection_and_judgement_are_kept_apart(base_model, pairs_file, tmp_path):
    test = write_pairs(tmp_path / "test.jsonl", 12, offset=100)
    result = train(config_for(base_model, pairs_file, tmp_path / "run", test_dataset=(str(test),), train_eval_limit=5))
    assert result.test.overall.sums.comparisons == 12
    again = load(result.model).score(
        [
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            for row in map(json.loads, test.read_text().splitlines())
            for side in ("chosen", "rejected")
        ]
    )
    assert [row.score for row in result.test.rows] == pytest.approx(again, abs=1e-5)
    assert rows_of(tmp_path / "run")[-1]["train_eval_accuracy"] != ""


@pytest.mark.slow
def test_prompts_on_both_sides_are_reported(base_model, pairs_file, tmp_path, caplog):
    with caplog.at_level("WARNING", logger="rewardlab"):
        train(config_for(base_model, pairs_file, tmp_path / "run", steps=1, eval_dataset=(str(pairs_file),)))
    assert "the evaluation data share 40 prompts, 40 first turns with the training data (40 of 40 rows)" in caplog.text
    shared = json.loads((tmp_path / "run/manifest.json").read_text())["data"]["shared"]
    assert shared["evaluation_with_training"]["prompts"] == 40


def test_bf16_compute_keeps_float32_masters_head_and_scores(base_model, pairs_file, tmp_path):
    result = train(
        config_for(base_model, pairs_file, tmp_path / "run", precision="bf16", steps=3, lr=1e-5, save_dtype="float32")
    )
    assert result.last.exists()
    model = make_model("llama").train()
    model.compute_dtype = torch.bfloat16
    trainer = reward_trainer(
        RewardTrainerConfig.of(model="x", dataset=("y",), batch_size=4, lr=1e-5),
        model,
        Datasets(train=make_groups(8)),
        num_steps=3,
        records=Records(tmp_path),
        save=lambda folder, step: None,
    )
    report = trainer.train_step(trainer.steps.plan(0, trainer.token_budget))
    assert math.isfinite(report.sums.loss)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert score_groups(model, make_groups(2), budget=100)[0].dtype == np.float32


@pytest.mark.slow
def test_an_existing_reward_model_keeps_its_head_and_a_new_one_must_be_asked_for(base_model, pairs_file, tmp_path):
    first = train(config_for(base_model, pairs_file, tmp_path / "a", steps=3))
    head = load_file(first.last / "model.safetensors")["score.weight"]
    config = config_for(first.last, pairs_file, tmp_path / "b", steps=1, lr=1e-12)
    kept = load_file(train(config).last / "model.safetensors")["score.weight"]
    assert torch.allclose(head, kept, atol=1e-6)
    renewed = train(config.replace(output_dir=tmp_path / "c", new_head=True, seed=7))
    assert not torch.allclose(head, load_file(renewed.last / "model.safetensors")["score.weight"], atol=1e-3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("modules", [("all-linear",), ("q_proj", "v_proj")])
@pytest.mark.parametrize("rslora", [False, True])
def test_lora_always_trains_and_saves_the_head(base_model, pairs_file, tmp_path, modules, rslora):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    result = train(
        config_for(
            base_model,
            pairs_file,
            tmp_path / "run",
            lora=True,
            lora_rank=4,
            lr=1e-2,
            lora_target_modules=modules,
            rslora=rslora,
        )
    )
    adapter = result.last / "adapter"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (
        "SEQ_CLS",
        4,
        32.0,
        rslora,
    )
    assert "score" not in settings["target_modules"]
    assert settings["modules_to_save"] == ["score"]
    merged = AutoModelForSequenceClassification.from_pretrained(result.last)
    base = AutoModelForSequenceClassification.from_pretrained(base_model, num_labels=1)
    adapted = PeftModel.from_pretrained(base, adapter)
    ids = torch.tensor([[1, 40, 41, 42, 43]])
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-5)
    lora_a = load_file(adapter / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in lora_a.items() if "lora_B" in name)


@pytest.mark.slow
def test_prompts_are_shared_with_adapter_dropout_too(base_model, pairs_file, tmp_path, caplog):
    with caplog.at_level("INFO", logger="rewardlab"):
        train(config_for(base_model, pairs_file, tmp_path / "run", lora=True, lora_dropout=0.1, steps=1))
    assert "layout: shared" in caplog.text


@pytest.mark.slow
def test_sliding_windows_share_prompts_and_load_back(pairs_file, tmp_path, caplog):
    base = write_base_model(tmp_path / "gemma", family="gemma3")
    config = json.loads((base / "config.json").read_text())
    config |= {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    (base / "config.json").write_text(json.dumps(config))
    found = []
    for attention in ("auto", "padded"):
        with caplog.at_level("INFO", logger="rewardlab"):
            result = train(config_for(base, pairs_file, tmp_path / attention, steps=2, attention=attention))
        found.append(
            load(result.last).score(
                [[{"role": "user", "content": "How? " * 9}, {"role": "assistant", "content": "So."}]]
            )
        )
    assert "layout: shared" in caplog.text
    assert load(result.last).model.layout == "shared"
    assert found[0] == pytest.approx(found[1], abs=1e-4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("system_prompt", ["", "Be 'brief'."])
def test_plain_transformers_renders_the_system_prompt_of_the_run(base_model, pairs_file, tmp_path, system_prompt):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    result = train(config_for(base_model, pairs_file, tmp_path / "run", steps=1, system_prompt=system_prompt))
    messages = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "yes"}]
    tokenizer = AutoTokenizer.from_pretrained(result.last)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.startswith(f"<|im_start|>system\n{system_prompt}<|im_end|>")
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        plain = float(AutoModelForSequenceClassification.from_pretrained(result.last)(ids).logits)
    assert load(result.last).score([messages]) == pytest.approx([plain], abs=1e-5)


@pytest.mark.slow
def test_too_few_evaluation_rows_are_warned_about(base_model, pairs_file, tmp_path, caplog):
    with caplog.at_level("WARNING", logger="rewardlab"):
        train(config_for(base_model, pairs_file, tmp_path / "run", steps=1, eval_fraction=0.1))
    assert "only 4 evaluation rows" in caplog.text
