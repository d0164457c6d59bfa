"""TRL's conventions and configuration files: what they become, what is said about the rest, and who wins."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import rewardlab.training.run as run_module
from conftest import CHATML, make_tokenizer, write_base_model, write_pairs
from rewardlab.artifact.load import load
from rewardlab.cli import main, parse_train
from rewardlab.core.errors import ConfigError
from rewardlab.serve.verify import verify
from rewardlab.training import trl_keys
from rewardlab.training.compat import NOT_MATCHED, OURS, TRL, settle_reading
from rewardlab.training.config import RewardTrainerConfig
from rewardlab.training.run import train

NEEDED = {"model_name_or_path": "base", "dataset_name": "org/pairs"}
TEXTS = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
MESSAGES = {
    "prompt": [{"role": "user", "content": "Hi"}],
    "chosen": [{"role": "assistant", "content": "yes"}],
    "rejected": [{"role": "assistant", "content": "no"}],
}


def parsed(tmp_path: Path, values: dict[str, Any], *flags: str) -> RewardTrainerConfig:
    """`rewardlab train --config FILE` with these keys besides the needed ones."""
    path = tmp_path / "trl.yaml"
    path.write_text(yaml.safe_dump(NEEDED | values), encoding="utf-8")
    return parse_train(["--config", str(path), *flags])


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="rewardlab")
    return caplog


# --- keys of a file ------------------------------------------------------------------------------------------

SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"model": "base", "dataset": ("org/pairs",), "compat": "trl"}),
    ({"model_name_or_path": "other"}, {"model": "other"}),
    ({"trust_remote_code": True}, {"trust_remote_code": True}),
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
    ({"seed": 7}, {"seed": 7}),
    ({"max_length": 512}, {"max_seq_len": 512, "overlong": "drop"}),
    ({"max_length": None}, {"max_seq_len": 1024}),
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
    ({"load_best_model_at_end": True}, {"best_metric": "eval_loss"}),
    ({"metric_for_best_model": "accuracy"}, {"best_metric": "eval_accuracy"}),
    ({"metric_for_best_model": "eval_loss"}, {"best_metric": "eval_loss"}),
    ({"bf16": True}, {"precision": "bf16"}),
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
    ({"center_rewards_coefficient": 0.01}, {"center_lambda": 0.01}),
    ({"center_rewards_coefficient": None}, {"center_lambda": 0.0}),
]


@pytest.mark.parametrize(("keys", "settings"), SETTINGS, ids=[str(keys)[:60] for keys, _ in SETTINGS])
def test_a_key_becomes_the_setting_that_does_the_same(tmp_path, keys, settings):
    config = parsed(tmp_path, keys)
    assert {name: getattr(config, name) for name in settings} == settings


def test_every_key_of_a_rule_has_a_case():
    tried = {trl_keys.OLDER_NAMES.get(key, key) for keys, _ in SETTINGS for key in keys} | {*NEEDED, "datasets", "fp16"}
    assert trl_keys.HANDLED | set(trl_keys.RENAMED) <= tried | {"lr_scheduler_type", "lora_modules_to_save"}


REMARKS: list[tuple[dict[str, Any], str]] = [
    ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type: cosine -> no setting: the learning rate is constant"),
    ({"warmup_ratio": 0.1}, "warmup_ratio: 0.1 -> no setting: the learning rate is constant"),
    ({"fp16": True}, "fp16: true -> no setting: not offered; --precision"),
    ({"gradient_checkpointing": True}, "gradient_checkpointing: true -> no setting: activations are kept"),
    ({"report_to": "wandb"}, "report_to: wandb -> no setting: the record of a run is metrics.csv"),
    ({"use_dora": True}, "use_dora: true -> no setting: not offered"),
    ({"load_in_4bit": True}, "load_in_4bit: true -> no setting: weights are not quantised"),
    ({"adam_beta2": 0.95}, "adam_beta2: 0.95 -> no setting: it is 0.999"),
    ({"optim": "lion_32bit"}, "optim: lion_32bit -> no setting: the optimiser is AdamW"),
    ({"max_length": None}, "max_length: null -> no setting: there is always a limit"),
    ({"logging_steps": 0.1}, "logging_steps: 0.1 -> no setting: a share of the run; give --log-every STEPS"),
    ({"save_strategy": "epoch"}, "save_strategy: epoch -> no setting: --save-every counts steps"),
    ({"test_split_size": 100}, "test_split_size: 100 -> no setting: a number of rows"),
    ({"eval_strategy": "epoch"}, "eval_strategy: epoch -> no setting: --eval-every counts steps"),
    ({"metric_for_best_model": "margin"}, "metric_for_best_model: margin -> no setting: --best-metric takes"),
    ({"disable_dropout": False}, "disable_dropout: false -> no setting: the model's own dropout is always off"),
    (
        {"lora_modules_to_save": ["score", "embed_tokens"]},
        "lora_modules_to_save: embed_tokens -> no setting: with --lora",
    ),
    ({"lora_task_type": "CAUSAL_LM"}, "lora_task_type: CAUSAL_LM -> no setting: nothing to choose: the head"),
    ({"model_revision": "v2"}, "model_revision: v2 -> no setting: the main revision is used"),
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


def test_a_mixture_of_datasets_becomes_names(tmp_path):
    entries = [
        {"path": "org/a", "name": "en", "split": "train", "columns": ["chosen", "rejected"]},
        {"path": "json", "data_files": ["b.jsonl", "c.jsonl"]},
        {"path": "csv", "data_files": {"train": "d.csv", "test": "e.csv"}},
    ]
    config = parsed(tmp_path, {"datasets": entries, "test_split_size": 0.2, "eval_strategy": "steps"})
    assert config.dataset == ("org/a:en", "b.jsonl", "c.jsonl", "d.csv")
    assert (config.hf_split, config.eval_fraction, config.eval_split) == ("train", 0.2, None)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"learning_rat": 1}, r"'learning_rat' is a key neither of TRL nor of rewardlab. Did you mean 'learning_rate'"),
        ({"label_smothing": 0.1}, r"'label_smothing' is a key neither .* Did you mean 'label_smoothing'"),
        (
            {"compat": "trl", "learning_rate": 1e-4, "lr": 1e-5},
            r"lr is set under TRL's name and under ours. Keep one",
        ),
        ({"kwise_loss": "pairs"}, r"is a key of TRL's and kwise_loss one of rewardlab's. Add `compat: trl`"),
        ({"lora_target_modules": ["q"], "lora_modules_to_save": 3, "lr": 1}, r"Add `compat: trl`"),
        (
            {"eval_strategy": "no", "evaluation_strategy": "no"},
            r"eval_strategy is there twice, also under another name",
        ),
        ({"datasets": "a.jsonl"}, r"datasets: in a TRL file this is a list of mappings"),
        ({"datasets": [{"name": "a"}]}, r"datasets: in a TRL file this is a list of mappings"),
        ({"datasets": [{"path": "a", "splt": "b"}]}, r"datasets: unknown key 'splt'. Did you mean 'split'"),
        ({"datasets": [{"path": "a", "data_dir": "b"}]}, r"datasets: data_dir is not read"),
        ({"datasets": [{"path": "a"}, {"path": "b", "split": "dev"}]}, r"datasets: the splits dev, train, and one"),
        ({"datasets": [{"path": "json", "data_files": {"x": "y"}}]}, r"data_files has no 'train'. It has x"),
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
    wanted = RewardTrainerConfig(model="base", dataset=("a.jsonl",), seed=3, lora_alpha=8.0, lora=True)
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
    assert (config.label_smoothing, config.chat_template, config.lr) == (0.1, "plain", 1e-5)


def test_flags_win_over_the_file_and_the_file_over_conventions(tmp_path):
    keys = {"learning_rate": 1e-5, "per_device_train_batch_size": 4, "weight_decay": 0.2}
    config = parsed(tmp_path, keys, "--lr", "3e-5", "--label-smoothing", "0.1", "--overlong", "truncate")
    assert (config.lr, config.label_smoothing, config.overlong) == (3e-5, 0.1, "truncate")
    assert (config.batch_size, config.weight_decay, config.epochs, config.seed) == (4, 0.2, 3.0, 42)
    plain = parsed(tmp_path, keys, "--compat", "none")
    assert (plain.compat, plain.lr, plain.epochs, plain.label_smoothing) == ("none", 1e-5, 1.0, 0.05)


def test_what_a_run_saved_repeats_it_whatever_the_conventions_say(tmp_path):
    first = parse_train(["--model", "m", "--dataset", "d", "--compat", "trl", "--lora", "--epochs", "2"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dataclasses.asdict(first), default=str), encoding="utf-8")
    assert parse_train(["--config", str(path)]) == first


# --- conventions ---------------------------------------------------------------------------------------------


def test_conventions_fill_in_what_was_not_said_and_print_it(log):
    config = parse_train(["--model", "m", "--dataset", "d", "--compat", "trl", "--lr", "1e-5"])
    assert (config.lr, config.batch_size, config.epochs, config.seed) == (1e-5, 8, 3.0, 42)
    assert (config.label_smoothing, config.weight_decay, config.overlong) == (0.0, 0.0, "drop")
    (line,) = [record.getMessage() for record in log.records if "(not " in record.getMessage()]
    assert line.startswith("compat trl: --overlong drop (not truncate), --label-smoothing 0 (not 0.05)")
    assert "--lr" not in line
    assert "--lora-rank" not in line, "without --lora there are no adapters to speak of"
    assert [text for text in NOT_MATCHED.values() if text not in log.text] == []


def test_what_was_decided_is_not_called_unmatched(tmp_path, log):
    parsed(tmp_path, {"bf16": True, "eval_strategy": "no", "lr_scheduler_type": "constant"})
    unmatched = [topic for topic, text in NOT_MATCHED.items() if text in log.text]
    assert unmatched == ["gradient checkpointing", "draws", "pad"]
    log.clear()
    parse_train(["--model", "m", "--dataset", "d", "--compat", "trl", "--precision", "fp32", "--eval-fraction", "0.1"])
    unmatched = [topic for topic, text in NOT_MATCHED.items() if text in log.text]
    assert unmatched == ["learning rate", "gradient checkpointing", "draws", "pad"]


def test_without_the_flag_nothing_changes(log):
    config = parse_train(["--model", "m", "--dataset", "d"])
    assert config == RewardTrainerConfig(model="m", dataset=("d",))
    assert log.records == []


@pytest.mark.parametrize(
    ("rows", "changes", "decided"),
    [
        ([TEXTS], {}, {"chat_template": "concat"}),
        ([MESSAGES, MESSAGES], {}, {"chat_template": "template"}),
        ([MESSAGES], {"chat_template": "plain"}, {"chat_template": "plain"}),
        ([TEXTS | {"margin": 1}], {}, {"chat_template": "concat", "margin_column": "margin"}),
        ([TEXTS | {"margin": 1}], {"margin_column": "votes"}, {"margin_column": "votes"}),
        ([TEXTS | {"margin": 1}, TEXTS], {}, {"margin_column": None}),
        ([TEXTS | {"margin": 1}], {"strength_as": "margin"}, {"margin_column": None}),
        ([], {}, {"chat_template": "auto"}),
        ([TEXTS], {"compat": "none"}, {"chat_template": "auto"}),
    ],
)
def test_the_rows_decide_template_and_margin_as_in_trl(rows, changes, decided):
    config = RewardTrainerConfig(**{"model": "m", "dataset": ("d",), "compat": "trl", **changes})
    settled = settle_reading(config, [(f"d{number}", row) for number, row in enumerate(rows)])
    assert {name: getattr(settled, name) for name in decided} == decided
    assert dataclasses.replace(settled, **{name: getattr(config, name) for name in decided}) == config or rows


def test_texts_beside_messages_are_refused():
    config = RewardTrainerConfig(model="m", dataset=("d",), compat="trl")
    with pytest.raises(ConfigError, match="a.jsonl holds texts and b.jsonl messages"):
        settle_reading(config, [("a.jsonl", TEXTS), ("b.jsonl", MESSAGES)])


# --- runs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def _quick(monkeypatch):
    monkeypatch.setattr(run_module, "verify_in_clean_process", verify)


@pytest.mark.usefixtures("_quick")
def test_a_model_trained_on_bare_texts_has_one_score_everywhere(tmp_path, capsys):
    """Training, `rewardlab score`, `load` and plain transformers give the same tokens."""
    from transformers import AutoTokenizer

    base = write_base_model(tmp_path / "base", template=None)
    make_tokenizer(None, pad="<|unused|>").save_pretrained(str(base))
    pairs = write_pairs(tmp_path / "pairs.jsonl", 12)
    with pairs.open("a", encoding="utf-8") as file:
        file.write(json.dumps(TEXTS | {"prompt": "no " * 200}) + "\n")
    config = tmp_path / "trl.yaml"
    keys = {"model_name_or_path": str(base), "dataset_name": str(pairs), "max_steps": 2, "max_length": 128}
    config.write_text(yaml.safe_dump(keys | {"eval_strategy": "no", "output_dir": str(tmp_path / "run")}))
    main(["train", "--config", str(config), "--precision", "fp32"])
    printed = capsys.readouterr().out
    assert "compat trl: by the rows: --chat-template concat" in printed
    assert "tokens: training: 1 preferences left out: overlong 1" in printed
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert (saved["chat_template"], saved["compat"], saved["overlong"], saved["lr"]) == ("concat", "trl", "drop", 1e-4)
    folder = tmp_path / "run/step_2"
    row = json.loads(pairs.read_text().splitlines()[0])
    messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert tokenizer.decode(plain) == row["prompt"] + row["chosen"] + "<|im_end|>"
    scorer = load(folder)
    rendered = scorer.renderer.render(*_split(messages)).token_ids.tolist()
    assert rendered == plain == tokenizer(row["prompt"] + row["chosen"] + "<|im_end|>")["input_ids"]
    replies = tmp_path / "replies.jsonl"
    replies.write_text(json.dumps({"prompt": row["prompt"], "response": row["chosen"]}) + "\n")
    main(["score", "--model", str(folder), "--input", str(replies), "--output", str(tmp_path / "scored.jsonl")])
    assert json.loads((tmp_path / "scored.jsonl").read_text())["score"] == pytest.approx(
        scorer.score([messages])[0], abs=1e-6
    )
    main(["eval", "--model", str(folder), "--dataset", str(pairs), "--output-dir", str(tmp_path / "eval")])
    first = json.loads((tmp_path / "eval/eval.scores.jsonl").read_text().splitlines()[0])
    assert first["score"] == pytest.approx(scorer.score([messages])[0], abs=1e-5)


def _split(messages: list[dict[str, str]]) -> tuple[Any, Any]:
    from rewardlab.data.chat import to_messages

    turns = to_messages(messages)
    return turns[:-1], turns[-1:]


@pytest.mark.usefixtures("_quick")
def test_transcripts_are_read_alike_in_training_and_evaluation(tmp_path):
    base = write_base_model(tmp_path / "base", template=None)
    make_tokenizer(None, pad="<|unused|>").save_pretrained(str(base))
    path = tmp_path / "hh.jsonl"
    rows = [
        {
            "chosen": f"\n\nHuman: Is {n} light?\n\nAssistant: yes",
            "rejected": f"\n\nHuman: Is {n} light?\n\nAssistant: no",
        }
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = ["--compat", "trl", "--steps", "1", "--eval-fraction", "0", "--max-seq-len", "128", "--precision", "fp32"]
    named = ["--model", str(base), "--dataset", str(path), "--output-dir", str(tmp_path / "run"), "--lora"]
    folder = train(parse_train([*flags, *named])).last
    settings = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["target_modules"]) == (16, ["q_proj", "v_proj"]), "PEFT's choice for Llama"
    main(["eval", "--model", str(folder), "--dataset", str(path), "--output-dir", str(tmp_path / "eval")])
    scored = json.loads((tmp_path / "eval/eval.scores.jsonl").read_text().splitlines()[0])
    scorer = load(folder)
    text = rows[0]["chosen"] + "<|im_end|>"
    assert scored["num_tokens"] == len(scorer.renderer.tokenizer(text, add_special_tokens=False)["input_ids"])


def test_reading_conventions_needs_no_torch():
    program = (
        "import sys, rewardlab.training.compat; print([m for m in ('torch', 'numpy', 'yaml') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


# --- TRL itself ----------------------------------------------------------------------------------------------


def defaults_of_trl() -> dict[str, Any]:
    """Every key of its four dataclasses, with its default."""
    trl = pytest.importorskip("trl", reason='TRL is not installed (pip install "rewardlab[bench]")')
    from trl.scripts.utils import DatasetMixtureConfig

    parts = (trl.ScriptArguments, DatasetMixtureConfig, trl.ModelConfig, trl.RewardConfig)
    return {field.name: field.default for part in parts for field in dataclasses.fields(part)}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_no_key_of_trl_is_missing():
    assert sorted(set(defaults_of_trl()) - trl_keys.KEYS) == []


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_conventions_are_the_defaults_of_trl():
    theirs = defaults_of_trl()
    names = {ours: key for key, ours in trl_keys.RENAMED.items()} | {
        "max_seq_len": "max_length",
        "batch_size": "per_device_train_batch_size",
        "log_every": "logging_steps",
    }
    assert {name: theirs[names[name]] for name in TRL if name in names} == {
        name: value for name, value in TRL.items() if name in names
    }
    assert set(TRL) - set(names) == {"overlong", "lora_dropout", "lora_target_modules", "label_smoothing"}
    assert theirs["lora_target_modules"] is None
    assert theirs["disable_dropout"] is True
    assert theirs["lr_scheduler_type"] == "linear"
    assert theirs["eval_strategy"] == "no"
    assert set(TRL) <= set(OURS)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("disable_dropout", "rate"), [(True, 0.0), (False, 0.05)])
def test_trl_switches_the_dropout_of_adapters_off_unless_told_otherwise(tmp_path, disable_dropout, rate):
    trl = pytest.importorskip("trl", reason='TRL is not installed (pip install "rewardlab[bench]")')
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForSequenceClassification

    base = write_base_model(tmp_path / "base", template=CHATML)
    trainer = trl.RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(base, num_labels=1),
        args=trl.RewardConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, disable_dropout=disable_dropout),
        train_dataset=Dataset.from_list([TEXTS]),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(task_type="SEQ_CLS", lora_dropout=0.05),
    )
    assert {module.p for module in trainer.model.modules() if isinstance(module, torch.nn.Dropout)} == {rate}
