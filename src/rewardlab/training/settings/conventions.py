"""Fills in settings that are not given: from a preset (`--preset`), or from TRL's conventions (`--compat trl`).

Flags and files win over both. What is filled in, and what of TRL cannot be matched, is printed. TRL's configuration
files are translated here too. Needs nothing but the standard library, since the command line reads it before anything
else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rewardlab.core.config import settings_of
from rewardlab.core.errors import ConfigError
from rewardlab.data.template_files import WORDS, shown
from rewardlab.training.settings.config import FULL_LR, HEAD_LR, LORA_LR, RewardTrainerConfig
from rewardlab.training.settings.other_files import require_no_other_trainer
from rewardlab.training.settings.presets import fill, preset_of
from rewardlab.training.settings.trl_file import flag, is_trl_file, num_ranks, show, translate
from rewardlab.training.settings.trl_keys import KEYS

logger = logging.getLogger("rewardlab")

BATCH_SIZE: Final = 8
"""TRL's default batch size, on each device."""
TRL: Final[dict[str, object]] = {
    "max_seq_len": 1024,
    "truncation": "drop",
    "special_tokens_in_text": "keep",
    "lora_rank": 16,
    "lora_alpha": 32.0,
    # TRL names 0.05, but its disable_dropout, on by default, sets the dropout of adapters to 0 too.
    "lora_dropout": 0.0,
    "lora_target_modules": ("peft-default",),
    "label_smoothing": 0.0,
    "epochs": 3.0,
    "batch_size": BATCH_SIZE,
    "lr": 1e-4,
    "lr_scheduler": "linear",
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "seed": 42,
    "half_rounding": "nearest",
    "log_every": 10,
}
"""Defaults of TRL 1.16's RewardConfig and ModelConfig, by our names."""

NOT_MATCHED: Final[Mapping[str, str]] = {
    "precision": "TRL computes in bf16; --precision auto does so where the processor has it",
    "evaluation": "TRL evaluates nothing unless asked; here 5 % of the prompts are held out to choose the checkpoint "
    "(--eval-fraction 0 trains on all)",
    "gradient checkpointing": "TRL computes activations twice; here they are kept: more memory, the same numbers",
    "draws": "head and order of the rows come from other generators, and a new head is drawn with variance "
    "1 / (width + 1)",
    "pad": "in TRL the embedding of the pad token gets no gradient, and a score is read before EOS where EOS pads",
}
"""Topic -> how a run with TRL's defaults still differs from TRL's own."""

DECIDES_EVALUATION: Final = ("eval_dataset", "eval_split", "eval_fraction")
OURS: Final = tuple(settings_of(RewardTrainerConfig))


class Conventions:
    """Reads one configuration: first the file, then everything together."""

    def __init__(self) -> None:
        self.settled: set[str] = set()
        """Topics of NOT_MATCHED that the file has decided."""
        self.pinned = ""
        """The model of a TRL file with the revision that it names; empty if it names none."""
        self.preset_in_file: object = None
        self.from_preset: dict[str, object] = {}
        """The settings that the preset filled in."""

    def translate(self, values: Mapping[str, object], where: str) -> dict[str, object]:
        """Return the values of a file by our names.

        A file is TRL's if it has a key that only TRL has, which then implies `compat: trl`. Raises ConfigError for what
        cannot be translated, for a file of another trainer, and for one that mixes TRL's names with ours and does not
        say `compat: trl`.
        """
        self.preset_in_file = values.get("preset")
        require_no_other_trainer(values, OURS, where)
        if not is_trl_file(values, OURS):
            return dict(values)
        own = [key for key in values if key in OURS and key not in KEYS]
        if own and "compat" not in values:
            theirs = [key for key in values if key in KEYS and key not in OURS]
            raise ConfigError(
                f"{where}: {theirs[0]} is a key of TRL's and {own[0]} one of rewardlab's. Add `compat: trl` to read "
                f"the file with TRL's defaults, or write rewardlab's names throughout (docs/coming-from-trl.md in "
                f"rewardlab's repository has them)."
            )
        made = translate(values, OURS, where=where)
        logger.info("%s is a TRL configuration:", where)
        for line in made.lines:
            logger.info("  %s", line)
        self.settled |= made.settled
        self.pinned = str(made.settings.get("model", "")) if values.get("model_revision") else ""
        return {"compat": "trl", **made.settings}

    def complete(self, values: Mapping[str, object]) -> dict[str, object]:
        """Return the settings with those of the preset, or of TRL's conventions, filled in.

        Raises ConfigError for a preset together with `compat: trl`, for a preset that would change nothing, and for
        settings of adapters in a run without adapters.
        """
        self.from_preset, preset = fill(values), preset_of(values)
        if preset is not None and not self.from_preset and preset.name != self.preset_in_file:
            raise ConfigError(
                f"--preset {preset.name} would change nothing: all its settings are given, and a given setting wins "
                f"over a preset. Leave the preset out, or remove those settings from the file (a run's config.json has "
                f"all of them)."
            )
        if values.get("compat") != "trl":
            completed = {**values, **self.from_preset}
            _require_adapters(completed)
            return completed
        default = {name: setting.default for name, setting in settings_of(RewardTrainerConfig).items()}
        default["lr"] = HEAD_LR if values.get("train_head_only") else LORA_LR if values.get("lora") else FULL_LR
        theirs = TRL | {"batch_size": BATCH_SIZE * num_ranks()}
        filled = {name: value for name, value in theirs.items() if name not in values}
        changed = [
            f"{flag(name, value)} (not {show(default[name])})"
            for name, value in filled.items()
            # Settings of LoRA do nothing without adapters, so they are not listed then.
            if value != default[name] and not (name.startswith("lora_") and not values.get("lora"))
        ]
        logger.info("compat trl: %s", ", ".join(changed) or "every setting is given")
        model = str(values.get("model"))
        if "@" in self.pinned and "@" not in model and not Path(model).exists():
            logger.warning(
                "compat trl: --model %s is taken at its newest state: the model_revision of the file is that of %s. "
                "--model NAME@REVISION names one",
                *(model, self.pinned),
            )
        settled = {*self.settled, *(["evaluation"] if any(name in values for name in DECIDES_EVALUATION) else [])}
        settled |= {"precision"} if "precision" in values else set()
        for topic, text in NOT_MATCHED.items():
            if topic not in settled:
                logger.info("compat trl: not matched: %s: %s", topic, text)
        return {**values, **filled}

    def tell(self, config: RewardTrainerConfig) -> None:
        """Log what the preset set, and what was given instead."""
        preset = preset_of({"preset": config.run.preset})
        if preset is None:
            return
        if not self.from_preset:
            logger.info("preset %s: fills in nothing, since everything is given", preset.name)
            return
        logger.info("preset %s: %s", preset.name, preset.purpose)
        inert = () if config.model.lora else [name for name in preset.settings if name.startswith("lora_")]
        sets = [_flag(name, value) for name, value in self.from_preset.items() if name not in inert]
        held = {name: setting.of(config) for name, setting in settings_of(RewardTrainerConfig).items()}
        yours = [
            f"{_flag(name, held[name])} (not {_flag(name, value)})"
            for name, value in preset.settings.items()
            if name not in inert and held[name] != value
        ]
        logger.info("preset %s: sets %s", preset.name, ", ".join(sets))
        if yours:
            logger.info("preset %s: yours instead: %s", preset.name, ", ".join(yours))
        if preset.advice:
            logger.info("preset %s: %s", preset.name, preset.advice)


def _require_adapters(values: Mapping[str, object]) -> None:
    """Raise ConfigError for settings of adapters where nothing says whether there are any: all weights would train.

    A saved configuration, and one in which adapters are turned off, say it.
    """
    for name, value in values.items():
        if "lora" not in values and (name.startswith("lora_") or name == "rslora"):
            raise ConfigError(f"{flag(name, value)}: it needs adapters. Add --lora, or leave it out.")


def _flag(name: str, value: object) -> str:
    return flag(name, "None" if value is None else value)


def length_from(config: RewardTrainerConfig) -> str:
    """Return a sentence on where the length limit may be from that nobody gave; empty if it is from no convention."""
    if config.run.compat != "trl" or config.data.rendering.max_seq_len != TRL["max_seq_len"]:
        return ""
    return f"Where no length is given, --compat trl takes TRL's default of {TRL['max_seq_len']}."


def settle_reading(
    config: RewardTrainerConfig, rows: Sequence[tuple[str, Mapping[str, object]]]
) -> RewardTrainerConfig:
    """Return the configuration with what TRL decides by the rows, under `compat trl`: template and margins.

    TRL uses the chat template for messages and bare texts otherwise. `rows` holds the name and the first row of every
    dataset. Explicit settings stay. Raises ConfigError if some datasets hold texts and others messages.
    """
    if config.run.compat != "trl" or not rows:
        return config
    decided: dict[str, Any] = {}
    if config.data.rendering.chat_template == "auto":
        kinds = {"template" if _has_messages(row) else "concat": name for name, row in rows}
        if len(kinds) > 1:
            raise ConfigError(
                f"--compat trl: {kinds['concat']} holds texts and {kinds['template']} messages, which TRL renders in "
                f"two ways; a reward model has one. Choose --chat-template template or concat."
            )
        decided["chat_template"] = next(iter(kinds))
    elif config.data.rendering.chat_template not in WORDS and (
        bare := [name for name, row in rows if not _has_messages(row)]
    ):
        logger.warning(
            "compat trl: %s holds texts, which TRL renders without any template; here they are turns of "
            "--chat-template %s. --chat-template concat reads them as TRL does",
            *(bare[0], shown(config.data.rendering.chat_template)),
        )
    without = [name for name, row in rows if not isinstance(row.get("margin"), (int, float))]
    if (
        len(without) < len(rows)
        and config.data.reading.margin_column is None
        and config.data.reading.strength_as != "margin"
    ):
        if without:
            logger.warning(
                "compat trl: the margins are not used, since %s has none; --margin-column margin uses them and leaves "
                "out rows without one",
                without[0],
            )
        else:
            decided["margin_column"] = "margin"
    for name, value in decided.items():
        logger.info("compat trl: by the rows: %s", flag(name, value))
    return config.replace(**decided)


def _has_messages(row: Mapping[str, object]) -> bool:
    lists = [value for value in row.values() if isinstance(value, (list, tuple)) and value]
    # Look for the keys of turns: the mappings of `comparisons` are not turns.
    return any(isinstance(value[0], Mapping) and not {"role", "from"}.isdisjoint(value[0]) for value in lists)
