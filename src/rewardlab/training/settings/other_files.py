"""Recognises configuration files of trainers other than TRL, which are not translated, and says what their keys are
called here. Needs nothing but the standard library."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from rewardlab.core.errors import ConfigError
from rewardlab.core.other_names import ALSO_CALLED, REMARKS
from rewardlab.core.terminal import short

OWN_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "LLaMA-Factory": frozenset(
        {
            "stage",
            "finetuning_type",
            "cutoff_len",
            "dataset_dir",
            "lora_target",
            "preprocessing_num_workers",
            "template",
        }
    ),
    "Axolotl": frozenset(
        {"base_model", "sequence_len", "micro_batch_size", "val_set_size", "sample_packing", "reward_model"}
    ),
    "ms-swift": frozenset(
        {"rlhf_type", "train_type", "tuner_type", "split_dataset_ratio", "val_dataset", "target_modules", "attn_impl"}
    ),
    "OpenRLHF": frozenset(
        {"pretrain", "save_path", "train_batch_size", "micro_train_batch_size", "packing_samples", "zero_stage"}
    ),
}
"""Trainer -> keys that its files have and TRL's have not."""
LAUNCHERS: Final[Mapping[str, frozenset[str]]] = {
    "accelerate": frozenset({"compute_environment", "distributed_type", "main_training_function", "rdzv_backend"}),
    "DeepSpeed": frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "gradient_clipping"}),
}
"""What starts runs of other trainers -> keys that its files have."""
FEWEST: Final = 2
"""Keys of a trainer by which its files are recognised: one alone may be a slip."""

MOST: Final = 20
"""Keys without a name here that a message shows."""


def require_no_other_trainer(values: Collection[str], ours: Collection[str], where: str) -> None:
    """Raise ConfigError for the keys of a file that is another trainer's, with what they are called here."""
    keys = [str(key) for key in values]
    for launcher, own in LAUNCHERS.items():
        if len(own.intersection(keys)) >= FEWEST:
            raise ConfigError(
                f"{where}: this is a configuration of {launcher}, which is not used here. torchrun starts a run on "
                f"many devices, and --sharding says how they share the model."
            )
    found = {trainer: [key for key in keys if key in own] for trainer, own in OWN_KEYS.items()}
    trainer = max(found, key=lambda name: len(found[name]))
    if len(found[trainer]) < FEWEST:
        return
    renamed = {key: ALSO_CALLED[key] for key in keys if ALSO_CALLED.get(key) in ours}
    others = [key for key in keys if key not in renamed and key not in ours]
    remarks = dict.fromkeys(f" {ALSO_CALLED[key]}: {REMARKS[key]}" for key in renamed if key in REMARKS)
    has_no_name = f" The others have no name here: {', '.join(map(short, others[:MOST]))}." if others else ""
    raise ConfigError(
        f"{where}: this is a configuration of {trainer} ({', '.join(found[trainer])}), and of other trainers' files "
        f"only TRL's are read. Write one with rewardlab's names: "
        f"{', '.join(f'{own} for {key}' for key, own in renamed.items())}.{''.join(remarks)}{has_no_name} "
        f"The page docs/coming-from-trl.md in rewardlab's repository says more."
    )
