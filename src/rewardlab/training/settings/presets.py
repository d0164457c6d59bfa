"""Presets: settings that have proved themselves, by the names of their fields (`--preset NAME`).

Settings given by flag or file win over a preset, and a preset wins over the defaults. A preset names no model, data or
folders. docs/presets.md says where its values come from and how far to trust them. Needs nothing but the standard
library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rewardlab.core.errors import ConfigError
from rewardlab.core.other_names import SAME_THING


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings that belong together."""

    name: str
    purpose: str
    source: str
    settings: Mapping[str, object]
    advice: str = ""
    """What to change first if the preset does not fit."""


STUDY_SMOOTHING: Final = 0.05
"""Targets of 0.95 and 0.05, as the study's pages say; its code computed y(1 − ε) + ε/2, which would be 0.025 here."""

SCHEDULE: Final[Mapping[str, object]] = {"lr_scheduler": "cosine", "warmup_ratio": 0.05}
LORA_ON_SHP: Final[Mapping[str, object]] = {
    "lora": True,
    # For Qwen and Llama these are seven: q, k, v, o, gate, up and down.
    "lora_target_modules": ("all-linear",),
    **SCHEDULE,
    "steps": 1000,
    "batch_size": 16,
    "label_smoothing": STUDY_SMOOTHING,
}
ALL_WEIGHTS: Final[Mapping[str, object]] = {"lora": False, "lr": 5e-6, **SCHEDULE, "epochs": 1.0}

PRESETS: Final[Mapping[str, Preset]] = {
    preset.name: preset
    for preset in (
        Preset(
            name="0.5b-trial",
            purpose="a first LoRA run of a model of about 0.5B, to see that data and settings work",
            source="a plan's trial configuration, its learning rate raised",
            settings={
                **LORA_ON_SHP,
                "lora_rank": 8,
                "lora_alpha": 16.0,
                "lr": 1e-4,
                "weight_decay": 0.01,
                "early_stopping_patience": 5,
            },
        ),
        Preset(
            name="3b-lora-shp",
            purpose="a 3B model with LoRA on pairs like SHP's, three passes over 5,000 of them",
            source="the best run of the study",
            settings={
                **LORA_ON_SHP,
                "lora_rank": 4,
                "lora_alpha": 32.0,
                "lr": 5e-5,
                "weight_decay": 0.01,
                "score_regularization_lambda": 0.1,
            },
        ),
        Preset(
            name="7b-lora-shp",
            purpose="a 7B model with LoRA on pairs like SHP's, more careful than 3b-lora-shp",
            source="the study's advice after two 7B runs overfitted; not run by it",
            settings={
                **LORA_ON_SHP,
                "lora_rank": 16,
                "lora_alpha": 32.0,
                "lr": 1e-5,
                "weight_decay": 0.05,
                "score_regularization_lambda": 0.1,
                "early_stopping_patience": 3,
            },
            advice="stopping is decided by the evaluation data, so name a thousand pairs or more (--eval-split, "
            "--eval-dataset)",
        ),
        Preset(
            name="full-finetuning",
            purpose="all weights of a model, once through the data",
            source="the validation plan's full fine-tuning; published recipes lie around it",
            settings={
                **ALL_WEIGHTS,
                "weight_decay": 0.01,
                "batch_size": 16,
                "label_smoothing": STUDY_SMOOTHING,
            },
        ),
        Preset(
            name="proxy-rm",
            purpose="a proxy of a gold reward model, on some 20,000 pairs that it labelled",
            source="a pipeline from gold labels to a proxy, trained with TRL",
            settings={**ALL_WEIGHTS, "weight_decay": 0.0, "batch_size": 64, "label_smoothing": 0.0},
            advice="if it underfits (train_accuracy below 0.8, accuracy against the gold labels near 0.66): --lr 5e-5 "
            "--epochs 2",
        ),
        Preset(
            name="plain",
            purpose="Bradley-Terry alone at a constant rate, every improvement off: the first arm of an ablation",
            source="arm A1 of the validation plan, and its way back",
            settings={
                "lr_scheduler": "constant",
                "weight_decay": 0.01,
                "label_smoothing": 0.0,
                "regularization_lambda": 0.0,
                "score_regularization_lambda": 0.0,
                "center_lambda": 0.0,
                "early_stopping_patience": None,
            },
        ),
    )
}


LARGE: Final = 5e9
"""Weights from which on a model counts as larger than those of 3B, from which the rates of adapters are."""
MOST_FOR_LARGE: Final = 2e-5
"""Learning rate of adapters up to which nothing is said of a large model: twice that of `7b-lora-shp`."""


def rate_notice(*, weights: float, lora: bool, lr: float) -> str:
    """Return what to say of a learning rate that was found for smaller models; empty if there is nothing to say."""
    if not lora or weights < LARGE or lr <= MOST_FOR_LARGE:
        return ""
    own = PRESETS["7b-lora-shp"].settings
    return (
        f"{weights / 1e9:.3g} billion weights, and adapters with --lr {lr:g}, which is a rate for 3 billion: both 7B "
        f"runs of one study with 5e-05 peaked early and ended 7 and 9 points lower. --preset 7b-lora-shp has "
        f"--lr {own['lr']:g} (docs/guidelines.md in rewardlab's repository, larger models)"
    )


def preset_of(values: Mapping[str, object]) -> Preset | None:
    """Return the preset that settings name; None if they name none, or one that does not exist."""
    name = values.get("preset")
    return PRESETS.get(name) if isinstance(name, str) else None


def fill(given: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that the preset named in `given` adds: those that are not given, nor replaced by others.

    Raises ConfigError if `compat: trl` is given as well.
    """
    preset = preset_of(given)
    if preset is None:
        return {}
    if given.get("compat") == "trl":
        raise ConfigError(
            f"--preset {preset.name} and --compat trl both say what holds where nothing is given. Keep one; a file of "
            f"TRL's implies --compat trl, and --compat none reads it with rewardlab's defaults."
        )
    return {
        name: value
        for name, value in preset.settings.items()
        if name not in given and not _said_otherwise(name, given, preset)
    }


def _said_otherwise(name: str, given: Mapping[str, object], preset: Preset) -> bool:
    """Return whether other given settings decide the same thing: epochs instead of steps, say."""
    # The learning rate of a preset is for adapters or for all weights, so it is left out where the other one trains.
    if name == "lr":
        return "lora" in given and given["lora"] != preset.settings["lora"]
    if name in ("warmup_steps", "warmup_ratio") and given.get("lr_scheduler") == "constant":
        return True
    return any(given.get(other) is not None for names in SAME_THING if name in names for other in names)
