"""Names of settings in TRL, transformers and other trainers, for hints to users who know those."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

ALSO_CALLED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model_name_or_path": "model",
        "model_name": "model",
        "learning_rate": "lr",
        "num_train_epochs": "epochs",
        "max_steps": "steps",
        "per_device_train_batch_size": "batch_size",
        "train_batch_size": "batch_size",
        "gradient_accumulation_steps": "batch_size",
        "grad_accum": "batch_size",
        "grad_acc": "batch_size",
        "accumulate_grad_batches": "batch_size",
        "micro_batch_size": "batch_size",
        "micro_train_batch_size": "batch_size",
        "pretrain": "model",
        "base_model": "model",
        "max_length": "max_seq_len",
        "max_seq_length": "max_seq_len",
        "max_len": "max_seq_len",
        "cutoff_len": "max_seq_len",
        "sequence_len": "max_seq_len",
        "dataset_name": "dataset",
        "train_file": "dataset",
        "validation_file": "eval_dataset",
        "dataset_train_split": "hf_split",
        "dataset_test_split": "eval_split",
        "test_split_size": "eval_fraction",
        "val_size": "eval_fraction",
        "val_set_size": "eval_fraction",
        "split_dataset_ratio": "eval_fraction",
        "val_dataset": "eval_dataset",
        "max_samples": "limit",
        "max_train_samples": "limit",
        "prompt_key": "prompt_column",
        "input_key": "prompt_column",
        "chosen_key": "chosen_column",
        "rejected_key": "rejected_column",
        "template": "chat_template",
        "tokenizer_chat_template": "chat_template",
        "additional_target": "lora_modules_to_save",
        "l2": "weight_decay",
        "save_path": "output_dir",
        "overwrite_output_dir": "overwrite",
        "logging_steps": "log_every",
        "eval_steps": "eval_every",
        "eval_strategy": "eval_every",
        "evaluation_strategy": "eval_every",
        "save_steps": "save_every",
        "save_strategy": "save_every",
        "resume_from_checkpoint": "resume",
        "load_checkpoint": "resume",
        "load_best_model_at_end": "early_stopping_metric",
        "metric_for_best_model": "early_stopping_metric",
        "greater_is_better": "early_stopping_mode",
        "lr_scheduler_type": "lr_scheduler",
        "optim": "optimizer",
        "label_smoothing_factor": "label_smoothing",
        "center_rewards_coefficient": "center_lambda",
        "use_peft": "lora",
        "finetuning_type": "lora",
        "train_type": "lora",
        "tuner_type": "lora",
        "adapter": "lora",
        "lora_target": "lora_target_modules",
        "target_modules": "lora_target_modules",
        "actor_learning_rate": "lr",
        "critic_learning_rate": "lr",
        "num_epochs": "epochs",
        "max_epochs": "epochs",
        "lora_r": "lora_rank",
        "freeze_trainable_layers": "freeze_layers",
        "use_rslora": "rslora",
        "use_dora": "dora",
        "load_in_4bit": "quantization",
        "load_in_8bit": "quantization",
        "bf16": "precision",
        "fp16": "precision",
        "fp32": "precision",
        "dtype": "precision",
        "torch_dtype": "precision",
        "gradient_checkpointing": "activation_checkpointing",
        "torch_compile": "compile",
        "use_liger_kernel": "liger",
        "fsdp": "sharding",
        "deepspeed": "sharding",
        "zero_stage": "sharding",
        "dataset_num_proc": "num_workers",
        "dataloader_num_workers": "num_workers",
        "preprocessing_num_workers": "num_workers",
        "attn_implementation": "attention_backend",
        "attn_impl": "attention_backend",
        "flash_attn": "attention_backend",
        "flash_attention": "attention_backend",
        "use_wandb": "report_to",
        "use_lora": "lora",
        "max_norm": "max_grad_norm",
        "grad_clip": "max_grad_norm",
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

_WHOLE_STEP: Final = (
    "It counts the rows of a whole step: those of a micro-batch, times those that are accumulated, times the devices."
)
REMARKS: Final[Mapping[str, str]] = MappingProxyType(
    {"freeze_trainable_layers": "It counts the first layers, which stay as they are; there the last ones train."}
    | dict.fromkeys(
        (
            *("per_device_train_batch_size", "gradient_accumulation_steps", "grad_accum", "grad_acc"),
            *("accumulate_grad_batches", "micro_batch_size", "micro_train_batch_size"),
        ),
        _WHOLE_STEP,
    )
)
"""Name elsewhere -> how the values of our setting differ, where a user who only changed the name would be misled."""

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
        **dict.fromkeys(
            ("packing", "packing_samples", "sample_packing"),
            "Rows are packed wherever the model allows it; the line `layout` of the log says so.",
        ),
        **dict.fromkeys(
            ("dataset_config", "dataset_config_name", "subset"),
            "The configuration of a dataset of the hub is written behind its name, as NAME:CONFIGURATION.",
        ),
        **dict.fromkeys(
            ("tokenizer", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_type"),
            "The tokenizer is the one in the folder of the model.",
        ),
        **dict.fromkeys(
            ("device", "device_map", "cpu", "use_cpu", "no_cuda"),
            "A CUDA device is used if there is one; the environment variable CUDA_VISIBLE_DEVICES chooses or hides it.",
        ),
        **dict.fromkeys(
            ("gpus", "num_gpus", "nproc_per_node", "num_processes"), "A run on several devices is started by torchrun."
        ),
        **dict.fromkeys(("push_to_hub", "hub_model_id"), "`rewardlab push` uploads a saved model."),
        **dict.fromkeys(("stage", "rlhf_type", "do_train"), "`rewardlab train` always trains a reward model."),
        "num_labels": "A reward model gives one score.",
        "disable_dropout": "The model's own dropout is always off; --lora-dropout is that of adapters.",
        "max_prompt_length": "Prompt and reply have one limit, --max-seq-len; --truncation says what is cut.",
        "wandb_project": "The environment variable WANDB_PROJECT names the project; --report-to wandb writes to it.",
        "save_hf_ckpt": "Saved models are folders of Hugging Face.",
        "dataset_dir": "Name the data file itself, as --dataset FOLDER/FILE. Its columns are recognised.",
        "remove_unused_columns": "Columns that a format does not have are left out.",
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
