"""Whole command lines in use for reward models resolve to what they say, and to nothing else.

The flags one by one are in test_flags.py, the lines of the documentation in tests/docs.
"""

from __future__ import annotations

import shlex

import pytest
import yaml

from command_line import DEFAULTS
from rewardlab.commands.training import parse_train
from rewardlab.core.config import to_mapping
from rewardlab.training.settings.presets import PRESETS
from runs import values_of

SHP = "--hf-dataset stanfordnlp/SHP"
JUDGED = "--eval-split test --eval-limit 1000 --eval-every 100"
PLAIN = f"{SHP} --limit 5000 --steps 1000 --batch-size 16 --lr 5e-6 --weight-decay 0.01 {JUDGED}"
SCHEDULED = f"{PLAIN} --lr-scheduler cosine --warmup-steps 50"
SMOOTHED = f"{SCHEDULED} --label-smoothing 0.05"
STOPPED = f"{SMOOTHED} --early-stopping-patience 5"
SEVEN = '--lora-target-modules "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"'

LINES = {
    "baseline": (
        f"--model Qwen/Qwen2.5-7B {STOPPED} --hf-split train --micro-token-budget 8192 --max-seq-len 1024 "
        "--log-every 10 --save-every 100 --profile-memory --output-dir checkpoints_rm_v2_baseline"
    ),
    "A1": f"--model Qwen/Qwen2.5-7B {PLAIN} --output-dir checkpoints_rm_v2_A1_none",
    "A2": f"--model Qwen/Qwen2.5-7B {SCHEDULED} --output-dir checkpoints_rm_v2_A2_scheduler",
    "A3": f"--model Qwen/Qwen2.5-7B {SMOOTHED} --output-dir checkpoints_rm_v2_A3_smoothing",
    "A4": f"--model Qwen/Qwen2.5-7B {STOPPED} --output-dir checkpoints_rm_v2_A4_full",
    "all weights": f"--model Qwen/Qwen2.5-7B {STOPPED} --profile-memory --output-dir checkpoints_rm_v2_full_ft",
    "rank 8": f"--model Qwen/Qwen2.5-7B {STOPPED} --lora --lora-rank 8 --lora-alpha 16 --profile-memory",
    "rank 16": f"--model Qwen/Qwen2.5-7B {STOPPED} --lora --lora-rank 16 --lora-alpha 32 --profile-memory",
    "a rate of three": (
        f"--model Qwen/Qwen2.5-7B {SHP} --limit 2000 --steps 300 --batch-size 16 --lr 1e-6 --weight-decay 0.01 "
        "--lr-scheduler cosine --warmup-steps 30 --eval-split test --eval-limit 500 --eval-every 50"
    ),
    "trial": (
        f"--model Qwen/Qwen2.5-0.5B {STOPPED} --hf-split train --micro-token-budget 8192 --max-seq-len 1024 "
        "--beta 1.0 --regularization-lambda 0.001 --lora --lora-rank 8 --profile-memory --output-dir checkpoints_rm_v2"
    ),
    "best of the study": (
        f"--model Qwen/Qwen2.5-3B {SHP} --hf-split train {JUDGED} --limit 5000 --batch-size 16 "
        f"--micro-token-budget 8192 --max-seq-len 1024 --lora --lora-rank 4 --lora-alpha 32 {SEVEN} --lr 5e-5 "
        "--weight-decay 0.01 --steps 1000 --lr-scheduler cosine --warmup-steps 50 --label-smoothing 0.05 "
        "--score-regularization-lambda 0.1 --track-gpu --output-dir out"
    ),
    "rank-stabilised": f"--model m {SHP} --lora --lora-rank 4 --lora-alpha 32 --rslora",
    "attention": f'--model m {SHP} --lora --lora-target-modules "q_proj,k_proj,v_proj,o_proj"',
    "7B": (
        f"--model m {SHP} --lr 1e-5 --lora --lora-rank 16 --lora-alpha 32 --weight-decay 0.05 "
        "--early-stopping-patience 3"
    ),
    "stopped": f"--model m {SHP} --early-stopping-patience 5 --early-stopping-min-delta 0.001",
    "rolled back": f"--model m {SHP} --label-smoothing 0 --lr-scheduler constant",
    "smoke": f"--model Qwen/Qwen2.5-0.5B {SHP} --hf-split train --steps 10 --limit 100",
}
OTHER_NAMES = {"hf_dataset": "dataset"}


def said_by(words: list[str]) -> dict[str, list[str]]:
    """Setting -> the values that stand after its flag."""
    settings: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            values = settings.setdefault(OTHER_NAMES.get(name, name), [])
        else:
            values.append(word)
    return settings


def means(value: object, words: list[str]) -> bool:
    """Whether a value, as JSON has it, is what words on the command line say."""
    if isinstance(value, list):
        return value == [part for word in words for part in word.split(",")]
    if isinstance(value, bool):
        return value and words == []
    (word,) = words
    return value == word or (isinstance(value, (int, float)) and float(value) == float(word))


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_resolves_to_what_it_says_and_to_nothing_else(line):
    words = shlex.split(line)
    settings, config = said_by(words), to_mapping(parse_train(words))
    assert [name for name, said in settings.items() if not means(config[name], said)] == []
    untouched = {name: value for name, value in to_mapping(DEFAULTS).items() if name not in settings}
    assert {name: config[name] for name in untouched} == untouched


def test_a_value_that_is_not_what_a_line_says_would_be_noticed():
    assert said_by(["--hf-dataset", "a", "b", "--lora"]) == {"dataset": ["a", "b"], "lora": []}
    assert means(["a", "b"], ["a,b"])
    assert means(5e-6, ["5e-6"])
    assert not means(5e-5, ["5e-6"])
    assert not means(False, [])
    assert not means(["a"], ["a", "b"])


def test_the_configuration_of_a_proxy_in_trl_is_the_preset(tmp_path):
    theirs = {
        "model_name_or_path": "m",
        "dataset_name": "d",
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "warmup_ratio": 0.05,
        "learning_rate": 5e-6,
        "lr_scheduler_type": "cosine",
        "num_train_epochs": 1,
        "save_strategy": "epoch",
    }
    path = tmp_path / "trl.yaml"
    path.write_text(yaml.safe_dump(theirs))
    config, preset = parse_train(["--config", str(path)]), PRESETS["proxy-rm"].settings
    assert values_of(config, preset) == dict(preset)
