"""The keys of TRL's configuration files: their names here, or what is said about them.

Every key of TRL 1.16's `ScriptArguments`, `DatasetMixtureConfig`, `ModelConfig` and `RewardConfig` is in one of these
tables; a test compares them with TRL where it is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rewardlab.core.other_names import ALSO_CALLED

RENAMED: Final[Mapping[str, str]] = {
    **{
        name: name
        for name in (*("trust_remote_code", "output_dir", "weight_decay", "seed", "lora_alpha", "streaming"),)
    },
    **{
        name: ALSO_CALLED[name]
        for name in (
            *("model_name_or_path", "overwrite_output_dir", "learning_rate", "num_train_epochs"),
            *("use_peft", "lora_r", "use_rslora", "center_rewards_coefficient"),
        )
    },
}
"""Keys whose values mean the same here as in TRL; null leaves TRL's default."""

OLDER_NAMES: Final[Mapping[str, str]] = {
    "evaluation_strategy": "eval_strategy",
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Names that other versions of transformers and TRL have for a key -> the key."""


NUMBERS: Final = (
    *("warmup_steps", "test_split_size", "eval_steps", "logging_steps", "save_steps", "max_steps", "max_length"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "save_total_limit", "lora_dropout"),
    "max_grad_norm",
)
"""Keys of numbers, which may stand in a file as text."""
SWITCHES: Final = (
    *("fp16", "bf16", "use_peft", "disable_dropout", "load_best_model_at_end", "load_in_4bit", "load_in_8bit"),
    "greater_is_better",
)
"""Keys of what is on or off, which may stand in a file as text."""
YES: Final = ("yes", "true", "t", "y", "1")
NO: Final = ("no", "false", "f", "n", "0")
"""Texts that transformers reads as on and off."""


@dataclass(frozen=True, kw_only=True)
class Remark:
    """Keys that become no setting, what is said about them, and the values that need no remark."""

    keys: tuple[str, ...]
    text: str
    harmless: tuple[object, ...] = (None, False, 0, "", "none")


def _named(*lines: str) -> tuple[str, ...]:
    """Return the words of all lines."""
    return tuple(word for line in lines for word in line.split())


REMARKS: Final[Sequence[Remark]] = (
    Remark(
        keys=_named(
            "dataset_num_proc dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers",
            "dataloader_prefetch_factor dataloader_in_order dataloader_multiprocessing_context",
            "per_device_eval_batch_size eval_accumulation_steps eval_do_concat_batches eval_use_gather_object",
            "pad_to_multiple_of remove_unused_columns length_column_name label_names prediction_loss_only",
            "batch_eval_metrics include_for_metrics include_num_input_tokens_seen skip_memory_metrics",
            "torch_empty_cache_steps use_cache attn_implementation bf16_full_eval fp16_full_eval tf32",
            "do_train do_eval do_predict eval_on_start log_level log_level_replica log_on_each_node",
            "logging_first_step logging_nan_inf_filter logging_dir disable_tqdm run_name project",
            "save_only_model save_on_each_node ignore_data_skip debug local_rank",
            "restore_callback_states_from_checkpoint use_liger_kernel liger_kernel_config torch_compile",
            "torch_compile_backend torch_compile_mode auto_find_batch_size ignore_bias_buffers",
            "average_tokens_across_devices gradient_checkpointing_kwargs",
        ),
        text="about speed, display or evaluation in TRL; nothing to set here",
        harmless=(None,),
    ),
    Remark(
        keys=("label_smoothing_factor",), text="TRL's RewardTrainer does not use it; --label-smoothing would be used"
    ),
    Remark(
        keys=("gradient_checkpointing", "activation_offloading"),
        text="activations are kept here: more memory, less time, the same numbers. If memory runs out, lower "
        "--micro-token-budget, or use --activation-checkpointing full",
    ),
    Remark(
        keys=("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        text="--report-to trackio writes to this machine; set TRACKIO_SPACE_ID for a space",
        harmless=(None,),
    ),
    Remark(
        keys=_named("push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"),
        text="nothing is uploaded; the folder best/ can be uploaded as it is",
    ),
    Remark(
        keys=("resume_from_checkpoint", "enable_jit_checkpoint"),
        text="a run of TRL's cannot be resumed here; a run of rewardlab's goes on with --resume",
    ),
    Remark(keys=("data_seed",), text="one seed decides everything; set --seed"),
    Remark(keys=("full_determinism",), text="runs on one CPU thread repeat bit for bit anyway; a GPU is not promised"),
    Remark(keys=("use_cpu", "no_cuda"), text="the first CUDA device is used if there is one; hide it to use the CPU"),
    Remark(
        keys=_named(
            "deepspeed fsdp fsdp_config parallelism_config accelerator_config ddp_backend ddp_timeout",
            "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph",
        ),
        text="with many devices, torchrun starts the run and --sharding says how they share the model",
    ),
    Remark(
        keys=("use_bnb_nested_quant", "bnb_4bit_quant_storage"),
        text="with --quantization nf4 the scales are quantised too, and bytes hold the weights",
        harmless=(None, True, "uint8"),
    ),
    Remark(
        keys=("lora_target_parameters", "neftune_noise_alpha", "optim_target_modules"),
        text="not offered; the run goes on without it",
    ),
    Remark(
        keys=("eos_token", "pad_token"),
        text="they are taken from the tokenizer in the model's folder; change them there",
    ),
    Remark(keys=("model_init_kwargs",), text="not passed on; see --precision, --attention and --trust-remote-code"),
    Remark(
        keys=("dtype",),
        text="weights that train are float32; --precision is about arithmetic, --save-dtype about the saved folder",
        harmless=(None, "float32", "auto"),
    ),
    Remark(keys=("dataset_streaming",), text="not taken over; --streaming reads a dataset of the hub as it arrives"),
    Remark(keys=("dataloader_drop_last",), text="the last, smaller batch of an epoch is used too"),
    Remark(
        keys=("train_sampling_strategy", "group_by_length"),
        text="the order is always drawn with --seed; inside a step, rows of like length are put together",
        harmless=(None, False, "random"),
    ),
    Remark(keys=("optim_args",), text="not passed on; optimisers run with their usual settings"),
    Remark(keys=("adam_beta1",), text="it is 0.9", harmless=(None, 0.9)),
    Remark(keys=("adam_beta2",), text="it is 0.999", harmless=(None, 0.999)),
    Remark(keys=("adam_epsilon",), text="it is 1e-8", harmless=(None, 1e-8, "1e-8")),
    Remark(keys=("lora_task_type",), text="nothing to choose: the head is always trained and saved", harmless=(None,)),
    Remark(keys=("eval_delay",), text="step 0 is always evaluated, to have a bar that the model must beat"),
    Remark(keys=("env",), text="set environment variables in the shell", harmless=(None, {})),
    Remark(keys=("logging_strategy",), text="--log-every counts steps", harmless=(None, "steps")),
)

HANDLED: Final = frozenset(
    _named(
        "model_revision per_device_train_batch_size gradient_accumulation_steps max_steps max_length logging_steps",
        "dataset_name dataset_config dataset_train_split dataset_test_split datasets test_split_size",
        "eval_strategy eval_steps load_best_model_at_end metric_for_best_model greater_is_better",
        "save_strategy save_steps save_total_limit",
        "bf16 fp16 lr_scheduler_type lr_scheduler_kwargs warmup_steps",
        "lora_dropout disable_dropout lora_target_modules lora_modules_to_save use_dora",
        "load_in_4bit load_in_8bit bnb_4bit_quant_type optim max_grad_norm report_to",
        "chat_template_path",
    )
)
"""Keys with a rule of their own in trl_file."""

KEYS: Final = frozenset({*RENAMED, *OLDER_NAMES, *HANDLED, *(key for remark in REMARKS for key in remark.keys)})
"""Every key that TRL knows."""
