"""Files of trainers that are not TRL are refused by the name of the trainer, with what their keys are called here."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rewardlab.commands.training import parse_train
from rewardlab.core.config import settings_of
from rewardlab.core.errors import ConfigError
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.settings.other_files import LAUNCHERS, OWN_KEYS
from rewardlab.training.settings.trl_keys import KEYS

FACTORY = {
    "model_name_or_path": "m",
    "stage": "rm",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "dataset": "dpo_en_demo",
    "cutoff_len": 2048,
    "output_dir": "saves",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
}
AXOLOTL = {
    "base_model": "m",
    "reward_model": True,
    "sequence_len": 2048,
    "micro_batch_size": 2,
    "chat_template": "gemma",
}
SWIFT = {"model": "m", "dataset": ["d#100"], "rlhf_type": "rm", "train_type": "lora", "torch_dtype": "bfloat16"}


def refused(tmp_path: Path, values: dict[str, object]) -> str:
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        parse_train(["--config", str(path)])
    return str(error.value)


@pytest.mark.parametrize(
    ("trainer", "values", "said"),
    [
        ("LLaMA-Factory", FACTORY, ["max_seq_len for cutoff_len", "have no name here: stage, do_train."]),
        ("Axolotl", AXOLOTL, ["model for base_model", "batch_size: It counts the rows of a whole step"]),
        ("ms-swift", SWIFT, ["lora for train_type", "precision for torch_dtype", "have no name here: rlhf_type."]),
    ],
)
def test_a_file_of_another_trainer_is_refused_with_our_names(trainer, values, said, tmp_path):
    message = refused(tmp_path, values)
    assert f"this is a configuration of {trainer} (" in message
    assert all(part in message for part in said)


@pytest.mark.parametrize(
    ("launcher", "values"),
    [
        ("accelerate", {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 8}),
        ("DeepSpeed", {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}),
    ],
)
def test_a_file_of_a_launcher_is_refused_with_what_takes_its_place(launcher, values, tmp_path):
    message = refused(tmp_path, values)
    assert f"this is a configuration of {launcher}, which is not used here. torchrun starts a run" in message


def test_one_key_of_another_trainer_is_a_slip(tmp_path):
    message = refused(tmp_path, {"model": "m", "dataset": "d", "cutoff_len": 8})
    assert message.endswith("unknown setting 'cutoff_len'. Did you mean 'max_seq_len'?")


def test_keys_by_which_other_trainers_are_recognised_are_neither_ours_nor_those_of_trl():
    theirs = frozenset().union(*OWN_KEYS.values(), *LAUNCHERS.values())
    assert not theirs & {*settings_of(RewardTrainerConfig), *KEYS}
