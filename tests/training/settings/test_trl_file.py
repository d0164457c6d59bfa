"""TRL's configuration files: what their keys become, what is said about the rest, and who wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rewardlab.cli import main
from rewardlab.commands.training import parse_train
from rewardlab.core.config import to_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.data.template_files import template_of
from rewardlab.training.settings import trl_keys
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.settings.conventions import NOT_MATCHED
from runs import values_of

NEEDED = {"model_name_or_path": "base", "dataset_name": "org/pairs"}


def parsed(tmp_path: Path, values: dict[str, Any], *flags: str) -> RewardTrainerConfig:
    """`rewardlab train --config FILE` with these keys besides the needed ones."""
    path = tmp_path / "trl.yaml"
    path.write_text(yaml.safe_dump(NEEDED | values), encoding="utf-8")
    return parse_train(["--config", str(path), *flags])


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"model": "base", "dataset": ("org/pairs",), "compat": "trl"}),
    ({"model_name_or_path": "other"}, {"model": "other"}),
    ({"model_name_or_path": "their/model", "model_revision": "v2"}, {"model": "their/model@v2"}),
    ({"model_name_or_path": "their/model", "model_revision": "main"}, {"model": "their/model"}),
    ({"trust_remote_code": True}, {"trust_remote_code": True}),
    ({"streaming": True}, {"streaming": True}),
    ({"output_dir": "out"}, {"output_dir": Path("out")}),
    ({"overwrite_output_dir": True}, {"overwrite": True}),
    ({"learning_rate": 2e-5}, {"lr": 2e-5}),
    ({"learning_rate": "2e-5"}, {"lr": 2e-5}),
    ({"learning_rate": None}, {"lr": 1e-4}),
    ({"num_train_epochs": 2}, {"epochs": 2.0}),
    ({"max_steps": 30}, {"steps": 30}),
    ({"max_steps": -1}, {"steps": None}),
    ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
    ({"max_grad_norm": 0.5}, {"max_grad_norm": 0.5}),
    ({"max_grad_norm": "5e-1"}, {"max_grad_norm": 0.5}),
    ({"max_grad_norm": 0}, {"max_grad_norm": 1e9}),  # "Set to 0 to disable clipping"
    ({"max_grad_norm": -1.0}, {"max_grad_norm": 1e9}),
    ({"max_grad_norm": None}, {"max_grad_norm": 1.0}),
    ({"seed": 7}, {"seed": 7}),
    ({"chat_template_path": None}, {"chat_template": "auto"}),
    ({"max_length": 512}, {"max_seq_len": 512, "truncation": "drop"}),
    ({"max_length": None}, {"max_seq_len": "model", "truncation": "drop"}),
    ({"logging_steps": 5}, {"log_every": 5}),
    ({"logging_steps": 5.0}, {"log_every": 5}),
    ({"save_steps": 20}, {"save_every": 20}),
    ({"save_steps": 20, "save_strategy": "epoch"}, {"save_every": None}),
    ({"per_device_train_batch_size": 4}, {"batch_size": 4}),
    ({"gradient_accumulation_steps": 4}, {"batch_size": 32}),
    ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}, {"batch_size": 16}),
    ({"dataset_config": "en"}, {"dataset": ("org/pairs:en",)}),
    ({"dataset_train_split": "dev"}, {"hf_split": "dev"}),
    ({"eval_strategy": "no"}, {"eval_fraction": 0.0, "eval_split": None}),
    ({"eval_strategy": False}, {"eval_fraction": 0.0}),
    ({"eval_strategy": "steps", "eval_steps": 50}, {"eval_every": 50, "eval_split": "test"}),
    ({"eval_strategy": "steps", "logging_steps": 25}, {"eval_every": 25}),
    ({"eval_strategy": "steps"}, {"eval_every": 10}),
    ({"evaluation_strategy": "epoch", "dataset_test_split": "val"}, {"eval_every": None, "eval_split": "val"}),
    ({"test_split_size": 0.1}, {"eval_fraction": 0.1}),
    ({"test_split_size": 0.1, "eval_strategy": "steps"}, {"eval_fraction": 0.1, "eval_split": None}),
    ({"load_best_model_at_end": True}, {"early_stopping_metric": "eval_loss"}),
    ({"metric_for_best_model": "accuracy"}, {"early_stopping_metric": "eval_accuracy"}),
    ({"metric_for_best_model": "eval_loss"}, {"early_stopping_metric": "eval_loss"}),
    ({"metric_for_best_model": "margin", "save_total_limit": 3}, {"early_stopping_metric": "eval_margin"}),
    (
        {"metric_for_best_model": "margin", "greater_is_better": False},
        {"early_stopping_metric": "eval_margin", "early_stopping_mode": "min"},
    ),
    ({"metric_for_best_model": "accuracy", "greater_is_better": "true"}, {"early_stopping_mode": "auto"}),
    ({"metric_for_best_model": "accuracy", "greater_is_better": "false"}, {"early_stopping_mode": "min"}),
    ({"load_best_model_at_end": True, "greater_is_better": False}, {"early_stopping_mode": "auto"}),
    ({"load_best_model_at_end": True, "greater_is_better": True}, {"early_stopping_mode": "max"}),
    ({"greater_is_better": False}, {"early_stopping_mode": "auto"}),
    ({"metric_for_best_model": "mean_reward", "greater_is_better": False}, {"early_stopping_mode": "auto"}),
    ({"save_total_limit": 3}, {"save_total_limit": 3}),
    ({"bf16": True}, {"precision": "bf16"}),
    ({"fp16": True}, {"precision": "fp16"}),
    ({"fp16": True, "bf16": False}, {"precision": "fp16"}),
    ({"seed": 1}, {"lr_scheduler": "linear", "warmup_steps": None, "warmup_ratio": 0.0}),
    ({"lr_scheduler_type": "cosine"}, {"lr_scheduler": "cosine", "warmup_ratio": 0.0}),
    ({"lr_scheduler_type": "constant", "warmup_steps": 5}, {"lr_scheduler": "constant", "warmup_steps": None}),
    ({"warmup_steps": 20}, {"lr_scheduler": "linear", "warmup_steps": 20}),
    ({"warmup_steps": 0.1}, {"warmup_steps": None, "warmup_ratio": 0.1}),
    ({"warmup_ratio": 0.1}, {"warmup_steps": None, "warmup_ratio": 0.1}),
    ({"warmup_ratio": "1e-1"}, {"warmup_steps": None, "warmup_ratio": 0.1}),  # as YAML reads a bare 1e-1
    ({"warmup_steps": "1e2"}, {"warmup_steps": 100}),
    ({"warmup_steps": "20"}, {"warmup_steps": 20}),
    ({"test_split_size": "1e-1"}, {"eval_fraction": 0.1}),
    ({"bf16": "no"}, {"precision": "fp32"}),
    ({"bf16": "True"}, {"precision": "bf16"}),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}},
        {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.2},
    ),
    ({"bf16": False}, {"precision": "fp32"}),
    ({"use_peft": True}, {"lora": True, "lora_rank": 16, "lora_alpha": 32.0, "lora_dropout": 0.0}),
    ({"use_peft": True}, {"lora_target_modules": ("peft-default",)}),
    ({"use_peft": True, "lora_r": 8, "lora_alpha": 16}, {"lora_rank": 8, "lora_alpha": 16.0}),
    ({"use_peft": True, "lora_dropout": 0.1}, {"lora_dropout": 0.0}),
    ({"use_peft": True, "lora_dropout": 0.1, "disable_dropout": False}, {"lora_dropout": 0.1}),
    ({"use_peft": True, "disable_dropout": False}, {"lora_dropout": 0.05}),
    ({"lora_target_modules": ["q_proj", "k_proj"]}, {"lora_target_modules": ("q_proj", "k_proj")}),
    ({"lora_target_modules": "all-linear"}, {"lora_target_modules": ("all-linear",)}),
    ({"use_rslora": True}, {"rslora": True}),
    ({"use_peft": True, "use_dora": True}, {"lora": True, "dora": True}),
    ({"use_dora": True}, {"lora": False, "dora": False}),
    ({"use_peft": True, "lora_modules_to_save": ["score", "norm"]}, {"lora_modules_to_save": ("norm",)}),
    ({"use_peft": True, "lora_modules_to_save": "norm"}, {"lora_modules_to_save": ("norm",)}),
    ({"use_peft": True, "lora_modules_to_save": ["score"]}, {"lora_modules_to_save": ()}),
    ({"lora_modules_to_save": ["norm"]}, {"lora_modules_to_save": ()}),
    ({"use_peft": True, "load_in_4bit": True}, {"quantization": "nf4"}),
    ({"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"quantization": "nf4"}),
    ({"use_peft": True, "load_in_8bit": True}, {"quantization": "int8"}),
    ({"use_peft": True, "load_in_8bit": False}, {"quantization": "none"}),
    ({"load_in_4bit": True}, {"quantization": "none"}),
    ({"optim": "adamw_torch_fused"}, {"optimizer": "adamw"}),
    ({"optim": "sgd"}, {"optimizer": "sgd", "lr": 1e-4}),
    ({"optim": "adamw_bnb_8bit"}, {"optimizer": "adamw8bit"}),
    ({"optim": "adamw_8bit"}, {"optimizer": "adamw8bit"}),
    ({"optim": "adafactor"}, {"optimizer": "adamw"}),
    ({"center_rewards_coefficient": 0.01}, {"center_lambda": 0.01}),
    ({"center_rewards_coefficient": None}, {"center_lambda": 0.0}),
    ({"report_to": "wandb"}, {"report_to": ("wandb",)}),
    ({"report_to": ["tensorboard", "comet_ml", "trackio"]}, {"report_to": ("tensorboard", "trackio")}),
    ({"report_to": []}, {"report_to": ("none",)}),
    ({"report_to": None}, {"report_to": ("auto",)}),
    ({"report_to": "all"}, {"report_to": ("auto",)}),
]


@pytest.mark.parametrize(("keys", "settings"), SETTINGS, ids=[str(keys)[:60] for keys, _ in SETTINGS])
def test_a_key_becomes_the_setting_that_does_the_same(tmp_path, keys, settings):
    config = parsed(tmp_path, keys)
    assert values_of(config, settings) == settings


def test_every_key_of_a_rule_has_a_case():
    tried = {trl_keys.OLDER_NAMES.get(key, key) for keys, _ in SETTINGS for key in keys} | {*NEEDED, "datasets"}
    assert trl_keys.HANDLED | set(trl_keys.RENAMED) <= tried


REMARKS: list[tuple[dict[str, Any], str]] = [
    ({"fp16": True, "bf16": True}, "bf16: true -> no setting: transformers refuses it beside fp16, which is taken"),
    ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type: polynomial -> no setting: the run takes linear"),
    ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "warmup_steps: 5 -> no setting: TRL's constant schedule"),
    ({"lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler_kwargs: {'power': 2} -> no setting: not passed on"),
    ({"gradient_checkpointing": True}, "gradient_checkpointing: true -> no setting: activations are kept"),
    ({"report_to": ["comet_ml", "wandb"]}, "report_to: comet_ml -> no setting: --report-to knows auto, tensorboard"),
    ({"trackio_space_id": "a/b"}, "trackio_space_id: a/b -> no setting: --report-to trackio writes to this machine"),
    ({"use_dora": True}, "use_dora: true -> no setting: it is about adapters; with --lora, give --dora"),
    ({"lora_modules_to_save": ["norm"]}, "lora_modules_to_save: norm -> no setting: it is about adapters; with --lora"),
    (
        {"load_in_4bit": True},
        "load_in_4bit: true -> no setting: it is about adapters; with --lora, give --quantization",
    ),
    ({"bnb_4bit_quant_type": "fp4", "load_in_4bit": True}, "bnb_4bit_quant_type: fp4 -> no setting: in 4 bits weights"),
    ({"use_bnb_nested_quant": False}, "use_bnb_nested_quant: false -> no setting: with --quantization nf4 the scales"),
    ({"lora_target_parameters": ["x"]}, "lora_target_parameters: x -> no setting: not offered"),
    (
        {"use_peft": True, "lora_modules_to_save": ["score", "norm"]},
        "lora_modules_to_save: score norm -> --lora-modules-to-save norm (whole names; in PEFT their last letters)",
    ),
    ({"adam_beta2": 0.95}, "adam_beta2: 0.95 -> no setting: it is 0.999"),
    ({"optim": "lion_32bit"}, "optim: lion_32bit -> no setting: the optimiser is AdamW; --optimizer knows adamw, sgd"),
    (
        {"optim": "adafactor"},
        "optim: adafactor -> no setting: the optimiser is AdamW; --optimizer adafactor is PyTorch's",
    ),
    ({"optim": "sgd", "optim_args": "momentum=0.9"}, "optim_args: momentum=0.9 -> no setting: not passed on"),
    ({"max_length": None}, "max_length: null -> --max-seq-len model (as many tokens as the model has positions"),
    ({"logging_steps": 0.1}, "logging_steps: 0.1 -> no setting: a share of the run; give --log-every STEPS"),
    ({"save_strategy": "epoch"}, "save_strategy: epoch -> no setting: --save-every counts steps"),
    ({"test_split_size": 100}, "test_split_size: 100 -> no setting: a number of rows"),
    ({"eval_strategy": "epoch"}, "eval_strategy: epoch -> no setting: --eval-every counts steps"),
    ({"metric_for_best_model": "f1"}, "metric_for_best_model: f1 -> no setting: --early-stopping-metric takes"),
    ({"disable_dropout": False}, "disable_dropout: false -> no setting: the model's own dropout is always off"),
    ({"lora_task_type": "CAUSAL_LM"}, "lora_task_type: CAUSAL_LM -> no setting: nothing to choose: the head"),
    (
        {"model_name_or_path": None, "model": "base", "compat": "trl", "model_revision": "v2"},
        "model_revision: v2 -> no setting: give it with the model: --model NAME@v2",
    ),
    ({"model_name_or_path": ".", "model_revision": "v2"}, "v2 -> no setting: the model is a folder"),
    ({"push_to_hub": True}, "push_to_hub: true -> no setting: nothing is uploaded"),
    ({"dtype": "bfloat16"}, "dtype: bfloat16 -> no setting: weights that train are float32"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: 0.1 -> no setting: TRL's RewardTrainer does not use it"),
    ({"datasets": [{"path": "a"}]}, "dataset_name: org/pairs -> no setting: as in TRL, `datasets` takes its place"),
    (
        {"datasets": [{"path": "a", "fraction": 0.3}]},
        "fraction: 0.3 of a -> no setting: every row is used; see --limit",
    ),
]


@pytest.mark.parametrize(("keys", "line"), REMARKS, ids=[str(keys)[:60] for keys, _ in REMARKS])
def test_a_key_without_a_setting_is_named_with_what_to_do(tmp_path, log, keys, line):
    parsed(tmp_path, keys)
    assert line in log.text


@pytest.mark.parametrize(
    ("model", "said"), [("their/model", True), ("other/model", True), ("their/model@v3", False), (".", False)]
)
def test_a_revision_that_a_flag_puts_out_of_use_is_named(tmp_path, log, model, said):
    keys = {"model_name_or_path": "their/model", "model_revision": "v2"}
    assert parsed(tmp_path, keys, "--model", model).model.model == model
    assert (f"--model {model} is taken at its newest state: the model_revision of the file" in log.text) == said


def test_every_key_with_a_setting_has_its_line(tmp_path, log):
    parsed(tmp_path, {"learning_rate": 1e-4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})
    lines = [record.getMessage().strip() for record in log.records]
    assert "learning_rate: 0.0001 -> --lr 0.0001" in lines
    assert "dataset_name: org/pairs -> --dataset org/pairs" in lines
    (batch,) = [line for line in lines if line.startswith("per_device_train_batch_size")]
    assert batch.startswith("per_device_train_batch_size x gradient_accumulation_steps: 4 x 2 -> --batch-size 8")
    assert "times their number" in batch


@pytest.mark.parametrize("harmless", [{"report_to": "none"}, {"optim": "adamw_torch"}, {"adam_beta1": 0.9}])
def test_what_needs_nothing_has_no_line(tmp_path, log, harmless):
    parsed(tmp_path, harmless)
    assert "no setting" not in log.text


OWN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("name", "text", "remark"),
    [
        ("own.jinja", OWN, ""),
        ("tokenizer/chat_template.jinja", OWN, "no tokens are added"),
        ("tokenizer/tokenizer_config.json", json.dumps({"chat_template": OWN}), "no tokens are added"),
        (
            "tokenizer/tokenizer_config.json",
            json.dumps({"chat_template": [{"name": "x", "template": "y"}, {"name": "default", "template": OWN}]}),
            "no tokens are added",
        ),
    ],
)
def test_the_template_that_a_file_names_is_taken(tmp_path, log, name, text, remark):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / name).write_text(text, encoding="utf-8")
    named = str(tmp_path / name.split("/", maxsplit=1)[0])
    config = parsed(tmp_path, {"chat_template_path": named})
    assert template_of(config.data.rendering.chat_template) == OWN
    (line,) = [one.getMessage() for one in log.records if "chat_template_path" in one.getMessage()]
    assert line.startswith(f"  chat_template_path: {named} -> --chat-template {named}")
    assert remark in line
    assert parsed(tmp_path, {"chat_template_path": named}, "--chat-template", "plain").data.rendering.chat_template == (
        "plain"
    )


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("org/tokenizer", "there is no such file. .* A tokenizer of the hub is downloaded first"),
        ("none.jinja", "there is no such file"),
        (".", "this folder has no template, in chat_template.jinja or in tokenizer_config.json"),
        ("empty.jinja", "it is empty"),
    ],
)
def test_a_template_that_cannot_be_read_is_an_error(tmp_path, monkeypatch, named, said):
    monkeypatch.chdir(tmp_path)
    Path("empty.jinja").write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"trl.yaml: chat_template_path: {named}: {said}"):
        parsed(tmp_path, {"chat_template_path": named})


def test_a_mixture_of_datasets_becomes_names(tmp_path):
    entries = [
        {"path": "org/a", "name": "en", "split": "train", "columns": ["chosen", "rejected"]},
        {"path": "json", "data_files": ["b.jsonl", "c.jsonl"]},
        {"path": "csv", "data_files": {"train": "d.csv", "test": "e.csv"}},
    ]
    config = parsed(tmp_path, {"datasets": entries, "test_split_size": 0.2, "eval_strategy": "steps"})
    assert config.data.dataset == ("org/a:en", "b.jsonl", "c.jsonl", "d.csv")
    assert (config.data.hf_split, config.data.selection.eval_fraction, config.data.selection.eval_split) == (
        "train",
        0.2,
        None,
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"learning_rat": 1}, r"'learning_rat' is a key neither of TRL nor of rewardlab. Did you mean 'learning_rate'"),
        (
            {"zebra": 1},
            r"'zebra' is a key neither of TRL nor of rewardlab. docs/coming-from",
        ),
        ({"label_smothing": 0.1}, r"'label_smothing' is a key neither .* Did you mean 'label_smoothing'"),
        (
            {"compat": "trl", "learning_rate": 1e-4, "lr": 1e-5},
            r"lr is set under TRL's name and under ours. Keep one",
        ),
        ({"kwise_loss": "pairs"}, r"is a key of TRL's and kwise_loss one of rewardlab's. Add `compat: trl`"),
        ({"lora_target_modules": ["q"], "lora_modules_to_save": 3, "lr": 1}, r"Add `compat: trl`"),
        (
            {"eval_strategy": "no", "evaluation_strategy": "no"},
            r"eval_strategy is given twice, once under another name",
        ),
        ({"datasets": "a.jsonl"}, r"datasets: in a TRL file this is a list of mappings"),
        ({"datasets": [{"name": "a"}]}, r"datasets: in a TRL file this is a list of mappings"),
        ({"datasets": [{"path": "a", "splt": "b"}]}, r"datasets: unknown key 'splt'. Did you mean 'split'"),
        ({"datasets": [{"path": "a", "data_dir": "b"}]}, r"datasets: data_dir is not read"),
        ({"datasets": [{"path": "a"}, {"path": "b", "split": "dev"}]}, r"datasets: the splits dev, train, and one"),
        ({"datasets": [{"path": "json", "data_files": {"x": "y"}}]}, r"data_files has no 'train'. It has x"),
        ({"warmup_ratio": "long"}, r"warmup_ratio: 'long' is not a number"),
        ({"max_steps": "many"}, r"max_steps: expected a whole number, got 'many'"),
        ({"per_device_train_batch_size": True}, r"per_device_train_batch_size: expected a whole number, got True"),
        ({"learning_rate": "fast"}, r"lr: expected float, got 'fast'"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        parsed(tmp_path, keys)


def test_a_file_of_ours_stays_what_it_is(tmp_path, log):
    path = tmp_path / "ours.yaml"
    path.write_text("model: base\ndataset: a.jsonl\nseed: 3\nlora_alpha: 8\nlora: true\n", encoding="utf-8")
    wanted = RewardTrainerConfig.of(model="base", dataset=("a.jsonl",), seed=3, lora_alpha=8.0, lora=True)
    assert parse_train(["--config", str(path)]) == wanted
    assert log.records == []
    path.write_text("model: base\ndataset: a.jsonl\nlearning_rat: 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown setting 'learning_rat'"):
        parse_train(["--config", str(path)])


def test_modules_to_save_that_are_no_list_are_said_too(tmp_path, log):
    parsed(tmp_path, {"lora_modules_to_save": 3})
    assert any("lora_modules_to_save" in record.getMessage() for record in log.records)


def test_the_held_out_prompts_are_mentioned_unless_the_file_decides(tmp_path, log):
    parsed(tmp_path, {"eval_strategy": "no", "test_split_size": 100})
    assert any("not matched: evaluation" in record.getMessage() for record in log.records)
    log.clear()
    parsed(tmp_path, {"eval_strategy": "no"})
    assert not any("not matched: evaluation" in record.getMessage() for record in log.records)


def test_our_own_settings_may_stand_beside_those_of_trl(tmp_path):
    config = parsed(
        tmp_path, {"compat": "trl", "label_smoothing": 0.1, "chat_template": "plain", "learning_rate": 1e-5}
    )
    assert (config.loss.label_smoothing, config.data.rendering.chat_template, config.optimizer.lr) == (
        0.1,
        "plain",
        1e-5,
    )


def test_flags_win_over_the_file_and_the_file_over_conventions(tmp_path):
    keys = {"learning_rate": 1e-5, "per_device_train_batch_size": 4, "weight_decay": 0.2}
    config = parsed(tmp_path, keys, "--lr", "3e-5", "--label-smoothing", "0.1", "--overlong", "truncate")
    assert (config.optimizer.lr, config.loss.label_smoothing, config.data.rendering.truncation) == (
        3e-5,
        0.1,
        "prompt-left",
    )
    assert (config.run.batch_size, config.optimizer.weight_decay, config.run.epochs, config.run.seed) == (
        4,
        0.2,
        3.0,
        42,
    )
    plain = parsed(tmp_path, keys, "--compat", "none")
    assert (plain.run.compat, plain.optimizer.lr, plain.run.epochs, plain.loss.label_smoothing) == (
        "none",
        1e-5,
        1.0,
        0.05,
    )


def test_what_a_run_saved_repeats_it_whatever_the_conventions_say(tmp_path):
    first = parse_train(["--model", "m", "--dataset", "d", "--compat", "trl", "--lora", "--epochs", "2"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_mapping(first)), encoding="utf-8")
    assert parse_train(["--config", str(path)]) == first


def test_what_was_decided_is_not_called_unmatched(tmp_path, log):
    parsed(tmp_path, {"bf16": True, "eval_strategy": "no", "lr_scheduler_type": "constant"})
    unmatched = [topic for topic, text in NOT_MATCHED.items() if text in log.text]
    assert unmatched == ["gradient checkpointing", "draws", "pad"]
    log.clear()
    parse_train(["--model", "m", "--dataset", "d", "--compat", "trl", "--precision", "fp32", "--eval-fraction", "0.1"])
    unmatched = [topic for topic, text in NOT_MATCHED.items() if text in log.text]
    assert unmatched == ["gradient checkpointing", "draws", "pad"]


def test_the_batch_is_that_of_all_the_processes_that_torchrun_starts(tmp_path, monkeypatch, log):
    monkeypatch.setenv("WORLD_SIZE", "4")
    keys = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    assert parsed(tmp_path, keys).run.batch_size == 64
    assert "x WORLD_SIZE: 2 x 8 x 4 -> --batch-size 64" in log.text
    assert parsed(tmp_path, {"learning_rate": 1e-4}).run.batch_size == 32, "TRL's default is 8 a device"
    assert parsed(tmp_path, keys, "--batch-size", "6").run.batch_size == 6
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert parsed(tmp_path, keys).run.batch_size == 16


@pytest.mark.slow
def test_a_file_that_asks_for_evaluation_trains_on_one_data_file(base_model, tmp_path, log, verified_here):
    rows = [{"prompt": f"How {n}?", "chosen": "yes " * (50 if n == 3 else 2), "rejected": f"no {n}"} for n in range(40)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    keys = {
        "model_name_or_path": str(base_model),
        "dataset_name": str(data),
        "output_dir": str(tmp_path / "run"),
        "eval_strategy": "steps",
        "eval_steps": 5,
        "max_steps": 1,
        "max_length": None,
        "report_to": "none",
    }
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    main(["train", "--config", str(tmp_path / "trl.yaml")])
    assert "dataset_test_split: test -> no setting: the data are one file, without splits" in log.text
    assert "TRL evaluates nothing" not in log.text
    assert "data: pairs[all rows]: 40 rows read, 40 kept" in log.text
    assert "length: up to 512 tokens, the positions of the model" in log.text
    assert "tokens: evaluation: 2 preferences" in log.text
    assert json.loads((tmp_path / "run/config.json").read_text())["max_seq_len"] == 512
