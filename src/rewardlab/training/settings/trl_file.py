"""Translates TRL's configuration files: what `trl reward --config` reads, for `rewardlab train --config`.

Each key becomes a setting, needs nothing, or is named with what to do instead. Needs nothing but the standard library.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

from rewardlab.core.errors import ConfigError
from rewardlab.core.files import at_home
from rewardlab.core.terminal import quoted
from rewardlab.core.values import did_you_mean
from rewardlab.training.settings.config import OptimizerName, SchedulerName, Viewer
from rewardlab.training.settings.trl_keys import KEYS, NO, NUMBERS, OLDER_NAMES, REMARKS, RENAMED, SWITCHES, YES
from rewardlab.training.settings.trl_template import template_named

Values = Mapping[str, object]
SCHEDULES: Final = get_args(SchedulerName)
OPTIMIZERS: Final[Mapping[Any, str]] = {"sgd": "sgd", "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit"}
VIEWERS: Final = get_args(Viewer)
UNCLIPPED: Final = 1e9  # a norm that no gradient has
OF_NEITHER: Final = " docs/coming-from-trl.md and docs/settings.md in rewardlab's repository have all of them."


@dataclass(kw_only=True)
class Translation:
    """Settings by our names, a line for every key, and the topics that the file itself decided."""

    settings: dict[str, object] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """Key -> the older name under which the file has it."""
    settled: set[str] = field(default_factory=set)
    """Topics of conventions.NOT_MATCHED that the file itself decided."""

    def set(self, setting: str, value: object, key: str, value_there: object, remark: str = "") -> None:
        """Record a key that becomes a setting."""
        self.settings[setting] = value
        key = self.names.get(key, key)
        self.lines.append(f"{key}: {show(value_there)} -> {flag(setting, value)}{remark and f' ({remark})'}")

    def say(self, key: str, value_there: object, text: str) -> None:
        """Record a key that becomes no setting, and why."""
        self.lines.append(f"{self.names.get(key, key)}: {show(value_there)} -> no setting: {text}")


def flag(setting: str, value: object) -> str:
    """Return a setting as it would stand on the command line."""
    name = setting.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    words = value if isinstance(value, (list, tuple)) else [value]
    return " ".join([f"--{name}", *(quoted(show(word)) for word in words)])


def show(value: object) -> str:
    """Return a value about as YAML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def is_trl_file(values: Values, ours: Sequence[str]) -> bool:
    """Return whether a file is TRL's: it has a key that TRL knows and we do not."""
    return any(key in KEYS and key not in ours for key in values)


def translate(values: Values, ours: Sequence[str], *, where: str) -> Translation:
    """Return the file by our names. Our own settings may stand in it beside TRL's.

    Raises ConfigError for a key that neither side knows, for a setting given under both names, and for data that cannot
    be read as the file asks.
    """
    own = {key: value for key, value in values.items() if key in ours and key not in KEYS}
    file = _by_current_names({key: value for key, value in values.items() if key not in own}, ours, where)
    made = Translation(names={new: old for old, new in OLDER_NAMES.items() if old in values})
    for key, setting in RENAMED.items():
        if file.get(key) is not None:
            made.set(setting, file[key], key, file[key])
    for rule in RULES:
        rule(file, made, where)
    for remark in REMARKS:
        for key in remark.keys:
            if key in file and file[key] not in remark.harmless:
                made.say(key, file[key], remark.text)
    if twice := sorted(set(made.settings) & set(own)):
        raise ConfigError(f"{where}: {twice[0]} is set under TRL's name and under ours. Keep one of the two.")
    made.settings |= own
    return made


def _by_current_names(values: Values, ours: Sequence[str], where: str) -> dict[str, object]:
    file: dict[str, object] = {}
    for key, value in values.items():
        if key not in KEYS:
            near = did_you_mean(key, [*KEYS, *ours]) or OF_NEITHER
            raise ConfigError(f"{where}: {key!r} is a key neither of TRL nor of rewardlab.{near}")
        if (current := OLDER_NAMES.get(key, key)) in file:
            raise ConfigError(f"{where}: {current} is given twice, once under another name. Keep one.")
        file[current] = _unquoted(current, value)
    return file


def _unquoted(key: str, value: object) -> object:
    """Return the number or switch that a text stands for, as TRL reads it: YAML takes `1e-1` and what is quoted for
    text."""
    if not isinstance(value, str):
        return value
    if key in SWITCHES:
        return {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False)}.get(value.lower(), value)
    if key in NUMBERS:
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


# --- keys with a rule of their own -----------------------------------------------------------------------------


def _whole(file: Values, key: str, default: int, where: str) -> int:
    value = file.get(key, default)
    value = default if value is None else value
    # In Python `true` is the whole number 1, which nobody means by it.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where}: {key}: expected a whole number, got {value!r}.")
    return value


def _batch(file: Values, made: Translation, where: str) -> None:
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if all(file.get(key) is None for key in keys):
        return
    # A step of TRL's counts pairs on each device and in each accumulated batch; --batch-size counts all of them.
    factors = [_whole(file, keys[0], 8, where), _whole(file, keys[1], 1, where)]
    names, remark = list(keys), "with several devices in TRL: times their number"
    if (ranks := num_ranks()) > 1:
        factors, names, remark = [*factors, ranks], [*names, "WORLD_SIZE"], "of all processes together, as in TRL"
    made.set(
        *("batch_size", math.prod(factors), " x ".join(names), " x ".join(map(str, factors))),
        remark=f"{remark}; memory is set by --micro-token-budget",
    )


def num_ranks() -> int:
    """Return the processes that torchrun started for this run. In TRL each of them has a batch of its own."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if re.fullmatch("[1-9][0-9]{0,5}", size) else 1


def _revision(file: Values, made: Translation, where: str) -> None:
    revision, model = file.get("model_revision"), file.get("model_name_or_path")
    if revision in (None, "main"):
        return
    if model is None:
        made.say("model_revision", revision, f"give it with the model: --model NAME@{revision}")
    elif Path(str(model)).exists():
        made.say("model_revision", revision, "the model is a folder, which has one revision")
    else:
        made.set("model", f"{model}@{revision}", "model_revision", revision)


def _length_of_run(file: Values, made: Translation, where: str) -> None:
    if (steps := _whole(file, "max_steps", -1, where)) > 0:
        made.set("steps", steps, "max_steps", steps)
    if "max_length" in file:
        if file["max_length"] is None:
            remark = "as many tokens as the model has positions; longer rows are left out"
            made.set("max_seq_len", "model", "max_length", None, remark)
        else:
            made.set("max_seq_len", file["max_length"], "max_length", file["max_length"], "longer rows are left out")


def _cadence(file: Values, made: Translation, where: str) -> None:
    for key, setting in (("logging_steps", "log_every"), ("save_steps", "save_every")):
        if file.get(key) is not None and not (key == "save_steps" and file.get("save_strategy", "steps") != "steps"):
            _steps(file[key], key, setting, made)
    strategy = file.get("save_strategy", "steps")
    if strategy == "epoch":
        made.say("save_strategy", strategy, "--save-every counts steps; best/ and the last step are always saved")
    elif strategy not in ("steps", None):
        made.say("save_strategy", strategy, "best/ and the last step are always saved")


def _steps(value: object, key: str, setting: str, made: Translation) -> None:
    """Record a cadence in steps; TRL also accepts a share of the run."""
    if isinstance(value, float) and value < 1:
        made.say(key, value, f"a share of the run; give {flag(setting, 'STEPS')}")
    else:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        made.set(setting, whole, key, value)


def _data(file: Values, made: Translation, where: str) -> None:
    name, mixture = file.get("dataset_name"), file.get("datasets")
    if mixture:
        if name:
            made.say("dataset_name", name, "as in TRL, `datasets` takes its place")
        _mixture(mixture, made, where)
        return
    if name is not None:
        configuration = file.get("dataset_config")
        made.set(
            *("dataset", (f"{name}:{configuration}" if configuration else str(name),), "dataset_name", name),
        )
    if file.get("dataset_train_split") is not None:
        made.set("hf_split", file["dataset_train_split"], "dataset_train_split", file["dataset_train_split"])


def _mixture(mixture: object, made: Translation, where: str) -> None:
    if not isinstance(mixture, list) or not all(isinstance(entry, dict) and entry.get("path") for entry in mixture):
        raise ConfigError(
            f"{where}: datasets: in a TRL file this is a list of mappings, each with a path. "
            f"Names alone go under rewardlab's setting `dataset`."
        )
    known = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")
    names: list[str] = []
    for entry in mixture:
        for key in entry:
            if key not in known:
                raise ConfigError(f"{where}: datasets: unknown key {key!r}.{did_you_mean(str(key), known)}")
        if entry.get("data_dir"):
            raise ConfigError(f"{where}: datasets: data_dir is not read. Name the folder itself as path.")
        names += _names_of(entry, where)
        if entry.get("fraction") is not None:
            made.say("fraction", f"{entry['fraction']} of {entry['path']}", "every row is used; see --limit")
        if entry.get("columns"):
            made.say("columns", entry["columns"], "every column is seen; see --margin-column for a margin among them")
    splits = sorted({str(entry.get("split") or "train") for entry in mixture})
    if len(splits) > 1:
        raise ConfigError(
            f"{where}: datasets: the splits {', '.join(splits)}, and one split is read of all. Use files, whose split "
            f"does not matter, or name them in --dataset yourself."
        )
    made.set("dataset", tuple(names), "datasets", f"{len(mixture)} entries")
    made.set("hf_split", splits[0], "datasets: split", splits[0])


def _names_of(entry: Values, where: str) -> list[str]:
    files = entry.get("data_files")
    if isinstance(files, dict):
        split = str(entry.get("split") or "train")
        if split not in files:
            raise ConfigError(f"{where}: datasets: data_files has no {split!r}. It has {', '.join(map(str, files))}.")
        files = files[split]
    if files:
        return [str(name) for name in files] if isinstance(files, list) else [str(files)]
    return [f"{entry['path']}:{entry['name']}" if entry.get("name") else str(entry["path"])]


def _evaluation(file: Values, made: Translation, where: str) -> None:
    share, strategy = file.get("test_split_size"), file.get("eval_strategy")
    if strategy is False:
        strategy = "no"  # YAML reads a bare `no` as false
    if isinstance(share, float) and 0 < share < 1:
        made.set("eval_fraction", share, "test_split_size", share, "of the prompts, with all their rows")
    elif share is not None:
        made.say("test_split_size", share, "a number of rows; hold out a share of the prompts with --eval-fraction")
    if strategy == "no" and share is None:
        made.set("eval_fraction", 0.0, "eval_strategy", "no", "nothing is evaluated; the last step is the model")
    elif strategy in ("steps", "epoch"):
        split = str(file.get("dataset_test_split") or "test")
        if share is None and not file.get("datasets") and _is_one_file(file.get("dataset_name")):
            remark = "the data are one file, without splits; a share of its prompts is held out (--eval-fraction)"
            made.say("dataset_test_split", split, remark)
            made.settled.add("evaluation")
        elif share is None and not file.get("datasets"):
            made.set("eval_split", split, "dataset_test_split", split)
        if strategy == "epoch":
            made.say(
                "eval_strategy", strategy, "--eval-every counts steps; by default it is a tenth of the run, at least 5"
            )
        else:
            key = "eval_steps" if file.get("eval_steps") is not None else "logging_steps"
            _steps(file.get(key) or 10, key, "eval_every", made)
    if {"eval_fraction", "eval_split"} & made.settings.keys():
        made.settled.add("evaluation")
    _best(file, made)


def _is_one_file(name: object) -> bool:
    return isinstance(name, str) and "\0" not in name and at_home(name).is_file()


def _best(file: Values, made: Translation) -> None:
    metric = file.get("metric_for_best_model")
    if metric is None and file.get("load_best_model_at_end"):
        # The default of transformers, if the best model is to be loaded at the end.
        metric = "loss"
    name, greater = f"eval_{str(metric).removeprefix('eval_')}", file.get("greater_is_better")
    if name in ("eval_loss", "eval_accuracy", "eval_margin"):
        made.set("early_stopping_metric", name, "metric_for_best_model", metric, "best/ is always kept")
        if greater is not None:
            # A mode that is the metric's own stays `auto`, so that it also fits another metric that a flag names.
            if bool(greater) == (name != "eval_loss"):
                made.say("greater_is_better", greater, f"--early-stopping-mode auto is the same for {name}")
            else:
                made.set("early_stopping_mode", "max" if greater else "min", "greater_is_better", greater)
            greater = None
    elif metric is not None:
        made.say(
            *("metric_for_best_model", metric),
            "--early-stopping-metric takes eval_accuracy, eval_loss, and every other column of metrics.csv",
        )
    if greater is not None:  # of a metric that is not taken over, if there is one
        made.say("greater_is_better", greater, "see --early-stopping-mode; by default it fits --early-stopping-metric")
    if limit := file.get("save_total_limit"):
        made.set("save_total_limit", limit, "save_total_limit", limit)


def _precision(file: Values, made: Translation, where: str) -> None:
    if file.get("fp16"):
        made.set("precision", "fp16", "fp16", True)
        if file.get("bf16"):
            made.say("bf16", True, "transformers refuses it beside fp16, which is taken")
    elif (half := file.get("bf16")) is not None:
        made.set("precision", "bf16" if half else "fp32", "bf16", half)
    else:
        return
    made.settled.add("precision")


def _schedule(file: Values, made: Translation, where: str) -> None:
    kind = file.get("lr_scheduler_type")
    if kind in SCHEDULES:
        made.set("lr_scheduler", kind, "lr_scheduler_type", kind)
    elif kind is not None:
        made.say("lr_scheduler_type", kind, f"the run takes linear; --lr-scheduler knows {', '.join(SCHEDULES)}")
    warmup = file.get("warmup_steps")
    if warmup and kind == "constant":
        made.say("warmup_steps", warmup, "TRL's constant schedule has no warm-up either")
    elif isinstance(warmup, str):
        raise ConfigError(f"{where}: {made.names.get('warmup_steps', 'warmup_steps')}: {warmup!r} is not a number.")
    elif isinstance(warmup, (int, float)) and warmup:
        share = warmup < 1
        made.set("warmup_ratio" if share else "warmup_steps", warmup if share else int(warmup), "warmup_steps", warmup)
    given = file.get("lr_scheduler_kwargs")
    options = dict(given) if isinstance(given, Mapping) else {}
    if kind == "cosine_with_min_lr" and options.get("min_lr_rate") is not None:
        made.set("min_lr_ratio", options.pop("min_lr_rate"), "lr_scheduler_kwargs", file.get("lr_scheduler_kwargs"))
    if options:
        made.say("lr_scheduler_kwargs", options, "not passed on; --min-lr-ratio is where cosine_with_min_lr ends")


def _adapters(file: Values, made: Translation, where: str) -> None:
    kept = file.get("disable_dropout") is False
    if kept:
        made.say("disable_dropout", False, "the model's own dropout is always off, --lora-dropout is as given")
    if kept and (file.get("use_peft") or file.get("lora_dropout") is not None):
        rate = file.get("lora_dropout")
        made.set("lora_dropout", 0.05 if rate is None else rate, "lora_dropout", rate)
    elif file.get("lora_dropout"):
        made.set(
            *("lora_dropout", 0.0, "lora_dropout", file["lora_dropout"]),
            remark="TRL's disable_dropout, on by default, switches it off there too",
        )
    targets = file.get("lora_target_modules")
    if targets is not None:
        made.set(
            *("lora_target_modules", tuple(targets) if isinstance(targets, list) else (targets,)),
            *("lora_target_modules", targets),
        )
    _only_with_adapters(file, made)


def _only_with_adapters(file: Values, made: Translation) -> None:
    """Record keys that do nothing in TRL without `use_peft`, and that are refused here without --lora."""
    adapted = bool(file.get("use_peft"))
    modules = file.get("lora_modules_to_save") or []
    # The head, which TRL calls `score`, is always trained and saved here, so it needs no setting.
    others = tuple(name for name in (modules if isinstance(modules, (list, tuple)) else [modules]) if name != "score")
    kind = "nf4" if file.get("load_in_4bit") else "int8"
    quantized = "load_in_4bit" if kind == "nf4" else "load_in_8bit"
    if kind == "nf4" and (other := file.get("bnb_4bit_quant_type", kind)) != kind:
        made.say("bnb_4bit_quant_type", other, "in 4 bits weights are held as nf4, with double quantisation")
    for key, setting, value, remark in (
        ("use_dora", "dora", True, ""),
        ("lora_modules_to_save", "lora_modules_to_save", others, "whole names; in PEFT their last letters"),
        (quantized, "quantization", kind, "compute as --precision says"),
    ):
        if not (file.get(key) and value):
            continue
        if adapted:
            made.set(setting, value, key, file[key], remark)
        else:
            made.say(key, file[key], f"it is about adapters; with --lora, give {flag(setting, value)}")


def _optimizer(file: Values, made: Translation, where: str) -> None:
    norm, kind = file.get("max_grad_norm"), file.get("optim")
    if norm is not None:
        clips = isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm <= 0
        remark = "" if clips else "in TRL 0 clips nothing, as so large a number does here"
        made.set("max_grad_norm", norm if clips else UNCLIPPED, "max_grad_norm", norm, remark)
    if kind in OPTIMIZERS:
        made.set("optimizer", OPTIMIZERS[kind], "optim", kind)
    elif kind == "adafactor":
        made.say(
            *("optim", kind),
            "the optimiser is AdamW; --optimizer adafactor is PyTorch's, whose --lr is a share of a weight's size",
        )
    elif kind not in (None, "adamw_torch", "adamw_torch_fused"):
        made.say("optim", kind, f"the optimiser is AdamW; --optimizer knows {', '.join(get_args(OptimizerName))}")


def _viewers(file: Values, made: Translation, where: str) -> None:
    asked = file.get("report_to")
    if asked is None:
        return
    names = [str(name) for name in asked] if isinstance(asked, (list, tuple)) else [str(asked)]
    if others := [name for name in names if name not in VIEWERS]:
        made.say(
            "report_to", others, f"--report-to knows {', '.join(VIEWERS)}; the record is metrics.jsonl in any case"
        )
    known = tuple(dict.fromkeys(name for name in names if name in VIEWERS))
    if known or not names:
        made.set("report_to", known or ("none",), "report_to", list(known) or "none")


def _template(file: Values, made: Translation, where: str) -> None:
    if named := file.get("chat_template_path"):
        value, remark = template_named(named, where)
        made.set("chat_template", value, "chat_template_path", named, remark)


RULES: Final[Sequence[Callable[[Values, Translation, str], None]]] = (
    _revision,
    _batch,
    _length_of_run,
    _cadence,
    _data,
    _evaluation,
    _precision,
    _schedule,
    _adapters,
    _optimizer,
    _viewers,
    _template,
)
