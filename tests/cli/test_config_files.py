"""A configuration file says what flags would; flags win, and what cannot be used is named."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from command_line import BASE, refusal
from rewardlab.commands.training import parse_train
from rewardlab.core.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "model: base\ndataset: [a.jsonl, b.jsonl]\nmax_seq_len: 99\nlora: true\nlr: 5e-6\n"),
        ("run.yml", "model: base\ndataset:\n- a.jsonl\n- b.jsonl\nmax-seq-len: 99\nlora: true\nlr: 5.0e-6\n"),
        ("run.toml", 'model = "base"\ndataset = ["a.jsonl", "b.jsonl"]\nmax_seq_len = 99\nlora = true\nlr = 5e-6\n'),
        ("dash.toml", 'model = "base"\ndataset = ["a.jsonl", "b.jsonl"]\nmax-seq-len = 99\nlora = true\nlr = 5e-6\n'),
        (
            "run.json",
            '{"model": "base", "dataset": ["a.jsonl", "b.jsonl"], "max-seq-len": 99, "lora": true, "lr": 5e-06}',
        ),
    ],
)
def test_a_file_says_what_flags_would(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    wanted = parse_train(shlex.split("--model base --dataset a.jsonl b.jsonl --max-seq-len 99 --lora --lr 5e-6"))
    assert parse_train(["--config", str(tmp_path / name)]) == wanted
    assert parse_train([f"--config={tmp_path / name}"]) == wanted


def test_a_folder_at_home_is_found_where_no_shell_has_replaced_its_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("output_dir: ~/runs/a\n")
    for words in (["--output-dir=~/runs/a"], ["--config=~/run.yaml"]):
        assert parse_train([*BASE, *words]).run.output_dir == tmp_path / "runs/a"
    assert parse_train([*BASE, "--output-dir=~nobody-of-this-name"]).run.output_dir == Path("~nobody-of-this-name")


def test_flags_override_the_file_wherever_they_stand(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: base\ndataset: a.jsonl\nsteps: 5\nsystem_prompt: Be kind.\n"
        "lora: true\nlora_target_modules: q_proj,k_proj"
    )
    config = parse_train(["--config", str(path)])
    assert (config.data.dataset, config.model.lora_target_modules) == (("a.jsonl",), ("q_proj", "k_proj"))
    flags = ["--steps", "6", "--dataset", "b.jsonl", "--system-prompt", ""]
    wanted = config.replace(steps=6, dataset=("b.jsonl",), system_prompt="")
    assert parse_train([*flags, "--config", str(path)]) == wanted
    assert parse_train(["--config", str(path), *flags]) == wanted


@pytest.mark.parametrize(
    ("in_file", "flags", "steps", "epochs", "warmup"),
    [
        ("steps: 5", "--epochs 3", None, 3.0, (None, None)),
        ("epochs: 3", "--steps 5", 5, 3.0, (None, None)),
        ("steps: 5\nepochs: 3", "", 5, 3.0, (None, None)),
        ("steps: 5", "--epochs 3 --steps 7", 7, 3.0, (None, None)),
        ("warmup_steps: 0", "--warmup-ratio 0.3", None, 1.0, (None, 0.3)),  # as in the config.json of a short run
        ("warmup_steps: 4", "--warmup-ratio 0.3", None, 1.0, (None, 0.3)),
        ("warmup_ratio: 0.3", "--warmup-steps 4", None, 1.0, (4, None)),
        ("warmup_ratio: 0.3", "--lr 1e-3", None, 1.0, (None, 0.3)),
    ],
)
def test_a_flag_wins_over_the_same_in_other_units(tmp_path, in_file, flags, steps, epochs, warmup):
    (tmp_path / "run.yaml").write_text(in_file + "\n")
    config = parse_train([*BASE, "--config", str(tmp_path / "run.yaml"), *flags.split()])
    assert (config.run.steps, config.run.epochs) == (steps, epochs)
    assert (config.schedule.warmup_steps, config.schedule.warmup_ratio) == warmup


@pytest.mark.parametrize(
    ("in_file", "flags", "mode"),
    [
        ("early_stopping_metric: eval_loss\nearly_stopping_mode: min", "--early-stopping-metric eval_accuracy", "auto"),
        ("early-stopping-mode: min", "--early-stopping-metric eval_margin", "auto"),
        (
            "early_stopping_metric: gap_accuracy\nearly_stopping_mode: min",
            "--early-stopping-metric gap_accuracy",
            "min",
        ),
        ("early_stopping_metric: loss\nearly_stopping_mode: max", "--early-stopping-metric eval_loss", "max"),
        (
            "early_stopping_metric: eval_loss\nearly_stopping_mode: min",
            "--early-stopping-metric epoch --early-stopping-mode max",
            "max",
        ),
        ("early_stopping_metric: eval_loss\nearly_stopping_mode: max", "--lr 1e-3", "max"),
        ("model_name_or_path: base\nmetric_for_best_model: loss\ngreater_is_better: false", "--lr 1e-3", "auto"),
        (
            "model_name_or_path: base\nmetric_for_best_model: loss\ngreater_is_better: true",
            "--early-stopping-metric eval_accuracy",
            "auto",
        ),
    ],
)
def test_a_flag_for_another_metric_drops_the_direction_of_the_files(tmp_path, in_file, flags, mode):
    (tmp_path / "run.yaml").write_text(in_file + "\n")
    config = parse_train([*BASE, "--config", str(tmp_path / "run.yaml"), *flags.split()])
    assert config.run.early_stopping_mode == mode


@pytest.mark.parametrize(
    ("in_file", "flags", "wanted"),
    [
        ("true", [], True),
        ("true", ["--lora"], True),
        ("true", ["--no-lora"], False),
        ("false", [], False),
        ("false", ["--lora"], True),
        ("false", ["--no-lora"], False),
        ("false", ["--lora", "--no-lora"], False),
        ("true", ["--no-lora", "--lora"], True),
    ],
)
def test_a_switch_in_the_file_can_be_turned_both_ways(tmp_path, in_file, flags, wanted):
    path = tmp_path / "run.toml"
    path.write_text(f"lora = {in_file}\n")
    assert parse_train([*BASE, "--config", str(path), *flags]).model.lora is wanted


def test_the_value_none_unsets_what_the_file_says(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 5\nlr: 1e-3\nsystem_prompt: Be kind.\neval_dataset: [a.jsonl]\n")
    flags = ["--steps", "None", "--lr=None", "--system-prompt", "None", "--eval-dataset"]
    assert parse_train([*BASE, "--config", str(path), *flags]) == parse_train(BASE)


def test_a_value_that_a_flag_overrides_is_not_judged(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("limit: 0\nlora: perhaps\nmax_seq_len: many\n")
    config = parse_train([*BASE, "--config", str(path), "--limit", "3", "--lora", "--max-seq-len", "64"])
    assert (config.data.limit, config.model.lora, config.data.rendering.max_seq_len) == (3, True, 64)


def test_an_empty_file_says_nothing(tmp_path):
    (tmp_path / "run.yaml").write_text("# later\n")
    assert parse_train([*BASE, "--config", str(tmp_path / "run.yaml")]) == parse_train(BASE)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "run.yaml",
            "lerning_rate: 1\nlabel_smothing: 0.1\n",
            r"unknown setting 'lerning_rate'\. Correct it or take it out\. docs/",
        ),
        ("run.yaml", "label-smothing: 0.1\n", r"unknown setting 'label_smothing'\. Did you mean 'label_smoothing'\?"),
        ("run.toml", "[data]\nlimit = 3\n", r"unknown setting 'data'"),
        ("run.yaml", "steps: many\n", r"steps: expected int, got 'many'"),
        ("run.yaml", "steps: '16'\n", r"steps: expected int, got '16'\. Write 16, without quotes\.$"),
        (
            "run.yaml",
            "max_seq_len: '16'\n",
            r"max_seq_len: expected int or 'auto' or 'model', got '16'\. Write 16, without quotes\.$",
        ),
        ("run.yaml", "hf_split:\n", r"hf_split: expected str, got None\. Give it a value, or take it out\.$"),
        ("run.yaml", "limit: true\n", r"limit: expected int, got True"),
        ("run.yaml", "limit: None\n", r"limit: got the text 'None'. Write null for no value, or leave it out."),
        ("run.yaml", "system_prompt: None\n", r"system_prompt: got the text 'None'. Write null for no value"),
        ("run.yaml", "lora: 1\n", r"lora: expected bool, got 1"),
        ("run.toml", 'lora = "yes"\n', r"lora: expected bool, got 'yes'\. Write true, without quotes\.$"),
        ("run.yaml", "lora: 'off'\n", r"lora: expected bool, got 'off'\. Write false, without quotes\.$"),
        ("run.yaml", "lr: fast\n", r"lr: expected float, got 'fast'"),
        ("run.yaml", "lr: .nan\n", r"lr: expected float, got nan"),
        ("run.yaml", "eval_split: no\n", r"eval_split: expected str, got False\. Put a word such as no, off, yes or"),
        ("run.yaml", "eval-dataset: [1]\n", r"eval_dataset: expected str, got 1"),
        ("run.yaml", "precision: fp8\n", r"precision: 'fp8' is not one of 'auto', 'fp32', 'bf16'"),
        ("run.yaml", "max-seq-len: 64\nmax_seq_len: 32\n", r"max_seq_len appears twice"),
        ("run.yaml", "- a\n- b\n", r"expected `name: value` lines, got a list"),
        ("run.yaml", "just text\n", r"expected `name: value` lines, got a str"),
        ("run.yaml", "a: [1\n", r"not valid YAML"),
        ("run.toml", "steps = \n", r"not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_key_and_value(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"--config {tmp_path / name}: ") + message):
        parse_train([*BASE, "--config", str(tmp_path / name)])


@pytest.mark.parametrize("name", ["nosuch.yaml", "."])
def test_a_file_that_is_not_there_is_named(tmp_path, name, capsys):
    path = tmp_path / name
    said = refusal(capsys, "train", *BASE, "--config", path)
    what = "is a folder" if name == "." else "no such file"
    assert said == f"--config {path}: {what}. Give a YAML or TOML file with the names of the flags.\n"


def test_other_commands_read_files_too(tmp_path, capsys):
    path = tmp_path / "eval.yaml"
    path.write_text("model: nosuch\nhf-splits: test\n")
    assert "unknown setting 'hf_splits'. Did you mean 'hf_split'?" in refusal(capsys, "eval", "--config", path)


@pytest.mark.parametrize("command", ["eval", "score"])
def test_the_file_of_a_training_run_is_told_as_such(tmp_path, capsys, command):
    path = tmp_path / "run.yaml"
    path.write_text("model: a\nlr: 1e-5\nsteps: 4\nlora: true\nbatch_size: 8\n")
    said = refusal(capsys, command, "--config", path)
    assert "has settings of `rewardlab train` that this command lacks: lr, steps, lora and 1 more." in said
    path.write_text(f"folder: {tmp_path}\n")
    assert refusal(capsys, "verify", "--config", path).startswith(f"{tmp_path}: no reward_spec.json")
    assert refusal(capsys, "verify", "--config", path, "nosuch").startswith("nosuch: no such folder")
