"""Names of settings in TRL, transformers and other trainers, for hints to users who know those."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

ALSO_CALLED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model_name_or_path": "model",
        "learning_rate": "lr",
        "num_train_epochs": "epochs",
        "max_steps": "steps",
        "per_device_train_batch_size": "batch_size",
        "train_batch_size": "batch_size",
        "gradient_accumulation_steps": "batch_size",
        "max_length": "max_seq_len",
        "max_seq_length": "max_seq_len",
        "dataset_name": "dataset",
        "train_file": "dataset",
        "validation_file": "eval_dataset",
        "dataset_train_split": "hf_split",
        "dataset_test_split": "eval_split",
        "test_split_size": "eval_fraction",
        "overwrite_output_dir": "overwrite",
        "logging_steps": "log_every",
        "eval_steps": "eval_every",
        "eval_strategy": "eval_every",
        "evaluation_strategy": "eval_every",
        "save_steps": "save_every",
        "save_strategy": "save_every",
        "resume_from_checkpoint": "resume",
        "load_best_model_at_end": "early_stopping_metric",
        "metric_for_best_model": "early_stopping_metric",
        "greater_is_better": "early_stopping_mode",
        "lr_scheduler_type": "lr_scheduler",
        "optim": "optimizer",
        "label_smoothing_factor": "label_smoothing",
        "center_rewards_coefficient": "center_lambda",
        "use_peft": "lora",
        "lora_r": "lora_rank",
        "use_rslora": "rslora",
        "use_dora": "dora",
        "load_in_4bit": "quantization",
        "load_in_8bit": "quantization",
        "bf16": "precision",
        "fp16": "precision",
        "dtype": "precision",
        "torch_dtype": "precision",
        "gradient_checkpointing": "activation_checkpointing",
        "torch_compile": "compile",
        "use_liger_kernel": "liger",
        "fsdp": "sharding",
        "deepspeed": "sharding",
        "dataset_num_proc": "num_workers",
        "use_lora": "lora",
        "max_norm": "max_grad_norm",
        "grad_clip": "max_grad_norm",
        "grad_accum": "micro_token_budget",
        "margin_lambda": "regularization_lambda",
        "profile_gpu": "profile_memory",
        "rm_eval_thresholds": "thresholds",
        "chat_template_kwargs": "template_arguments",
        "enable_thinking": "template_arguments",
        "base_url": "url",
        "trainable_norms": "lora_modules_to_save",
    }
)
"""Name in TRL, transformers, another trainer or a client of servers -> our setting. The values of some have another
meaning (docs/coming-from-trl.md)."""

VALUES_ALSO_CALLED: Final[Mapping[str, str]] = MappingProxyType({"none": "constant", "None": "constant"})
"""Value elsewhere -> ours, for hints: a rate without a schedule is constant. It is used only where ours is a choice."""

SETTLED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "rm_pair_aware": "The replies to a prompt always stay in one micro-batch.",
        "rm_require_complete_pairs": "A row without a whole pair is never trained on.",
        "rm_drop_incomplete_pairs": "Rows without a whole pair are dropped and counted; --incomplete-pairs error stops "
        "at a pair in long form that is not whole, and --max-drop-fraction says how many rows may go.",
        "rm_log_per_response_metrics": "Scores of single replies are always judged; rates at --thresholds are added.",
        "rm_calibration_bins": "The calibration error always has 10 bins, so that runs can be compared.",
        "rm_meta_keys": "What belongs to a row travels with it.",
    }
)
"""Name elsewhere -> what holds here, where there is nothing to set."""

SAME_THING: Final = (("steps", "epochs"), ("warmup_steps", "warmup_ratio"))
"""Pairs of settings for the same thing in different units, of which at most one may be set."""


def in_other_units(given: Mapping[str, object], known: Mapping[str, Any]) -> list[str]:
    """Return settings that a file, or the base of a plan, may have for what is `given` beside it in other units, so
    that what is given would not win. `known` are all settings, with their defaults.

    `--epochs` does nothing beside the steps of a file. Its epochs do nothing beside `--steps`, and stay on record.
    """
    names = []
    for first, second in SAME_THING:
        if given.get(second) is not None:
            names += [first]
        elif given.get(first) is not None and second in known and known[second].default is None:
            names += [second]
    return [name for name in names if name not in given]
