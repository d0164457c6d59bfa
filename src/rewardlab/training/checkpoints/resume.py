"""Going on with a run: which settings may differ from those it began with, and whether the data are still the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from rewardlab.core.config import HASH_DIGITS, from_mapping, settings_of, to_mapping
from rewardlab.core.errors import ArtifactError, ConfigError, DataError
from rewardlab.core.files import SUM, read_json, read_summed_json, sha256_json
from rewardlab.core.run_folder import CHECKPOINTS, MANIFEST, holds_models, holds_run, run_of, sweep
from rewardlab.core.spec import CUT_BY_STEPS, CUT_FEWEST
from rewardlab.data.roots import RULES
from rewardlab.model.parts import whole_of
from rewardlab.training.checkpoints.checkpoint import Checkpoint, checkpoint_at, newest_checkpoint
from rewardlab.training.settings.config import RewardTrainerConfig

logger = logging.getLogger("rewardlab")
AUTO: Final = "auto"
DRAWN_BY_CONVERSATION: Final = 2
"""Format of checkpoints since dropout does not depend on micro-batches."""

PERMISSIONS: Final = ("overwrite", "resume", "reschedule")
"""About one start of the program, not about what the run is."""
PROBED: Final = (
    "special_tokens_in_text",
    "precision",
    "attention",
    "micro_token_budget",
    "attention_backend",
    "linear_backend",
    "allocator",
)
"""Measured or found out when the run began; a resumed run takes what was decided then."""
EARLIER: Final = {"special_tokens_in_text": "keep"}
"""What held in runs that began before there was such a setting, where that is not today's default."""
BY_CONTENT: Final = (
    "model",
    "dataset",
    "hf_split",
    "eval_dataset",
    "eval_split",
    "test_dataset",
    "test_split",
)
"""Names, which may change when files move: what they stand for is compared."""
FREE: Final = (
    "output_dir",
    "log_every",
    "log_samples",
    "save_every",
    "save_dtype",
    "save_total_limit",
    "checkpoints",
    "checkpoint_minutes",
    "checkpoint_every",
    "checkpoint_limit",
    "max_hours",
    "num_workers",
    "cache_dir",
    "baselines",
    "trust_remote_code",
    "compat",
    "preset",
    "report_to",
    "profile_memory",
    "track_gpu",
    "gpu_sample_interval_ms",
    "profile",
    "profile_steps",
    "batch_timeout_s",
)
"""They move no weight and choose no model."""
CADENCE: Final = ("eval_every", "early_stopping_patience", "early_stopping_min_delta")
"""They move no weight, but decide which model is chosen and when the run stops."""
ROUNDING: Final = (
    "micro_token_budget",
    "attention",
    "attention_backend",
    "linear_backend",
    "allocator",
    "compile",
    "activation_checkpointing",
    "liger",
    "sharding",
    "defer_gradient_sync",
)
"""They change numbers by rounding alone."""
LENGTH: Final = ("steps", "epochs", "warmup_steps", "warmup_ratio", "lr_scheduler", "min_lr_ratio")
"""They move the learning rate; allowed with `--reschedule`."""
SOURCE_FACTS: Final = ("name", "rows_read", "kept", "dropped", "unused_by_limit", "sha256")
"""What says of a dataset that it is still the same; file names with folders do not."""
TOLD: Final = ("dropped_ids", "special_tokens_in_text")
"""What a report on tokens says beside what they are."""
LEVEL: Final = ("constant", "constant_with_warmup")
"""Schedules in which the number of steps moves no learning rate."""


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """A run that can go on."""

    checkpoint: Checkpoint
    config: RewardTrainerConfig
    """The settings it ran with, every default decided."""
    config_hash: str
    """Of the settings as they are in config.json."""
    manifest: Mapping[str, Any]


def find_interrupted(config: RewardTrainerConfig) -> Interrupted | None:
    """What `--resume` asks to go on with; None to begin from the start.

    Raises ConfigError if there is a run without anything to resume from, ArtifactError if all of it is damaged.
    """
    assert config.run.resume is not None
    run = config.run.output_dir
    if config.run.resume != AUTO and (named := run_of(config.run.resume)).resolve() != run.resolve():
        raise ConfigError(
            f"--resume {config.run.resume}: a run goes on in its own folder, {named}, not in --output-dir {run}. To "
            f"branch off, copy the folder and resume the copy."
        )
    if not holds_run(run) or not (run / "config.json").is_file():
        logger.info("RESUME: no run in %s yet; it begins from the start", run)
        return None
    sweep(run)
    is_checkpoint = config.run.resume != AUTO and Path(config.run.resume).parent.name == CHECKPOINTS
    checkpoint = checkpoint_at(Path(config.run.resume)) if is_checkpoint else newest_checkpoint(run)
    if checkpoint is None:
        if config.run.resume != AUTO or holds_models(run):
            raise ConfigError(
                f"{run} holds a run without checkpoints, so it cannot be resumed. Begin again with --overwrite, or in "
                f"another --output-dir."
            )
        logger.warning("RESUME: the run in %s had not come to a checkpoint; it begins again from the start", run)
        return None
    values, manifest = _read_object(run / "config.json"), _read_object(run / MANIFEST)
    entries, settings_hash = [{}, *manifest.get("resumed", [])], sha256_json(values)[:HASH_DIGITS]
    # The manifest is written first, so a process that is killed in between leaves the settings before it.
    if settings_hash not in (manifest.get("config_hash"), entries[-1].get("config_hash_before")):
        raise ArtifactError(
            f"{run / 'config.json'} is not what the run wrote, by the hash in {MANIFEST}. Restore both from a copy, or "
            f"begin again with --overwrite."
        )
    return Interrupted(
        checkpoint=checkpoint,
        config=from_mapping(RewardTrainerConfig, {**EARLIER, **values}, where=str(run / "config.json")),
        config_hash=settings_hash,
        manifest=manifest,
    )


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object in the folder of a run. Raises ArtifactError if it is none, or not what was written."""
    remedy = "A run cannot go on without it: restore it from a copy, or begin again with --overwrite."
    if not path.is_file():
        raise ArtifactError(f"{path} is no file. {remedy}")
    try:
        values = read_json(path)
        if isinstance(values, dict) and SUM in values:  # since a later version
            values = read_summed_json(path)
    except DataError as error:
        raise ArtifactError(f"{error} {remedy}") from error
    if not isinstance(values, dict):
        raise ArtifactError(f"{path} holds no JSON object. {remedy}")
    return values


def with_decisions(config: RewardTrainerConfig, run: RewardTrainerConfig) -> RewardTrainerConfig:
    """Settings as asked for, with what a run found out when it began in place of `auto` and of lengths left open."""
    known = settings_of(RewardTrainerConfig)
    taken: dict[str, Any] = {name: known[name].of(run) for name in PROBED if known[name].of(config) == "auto"}
    if config.run.eval_every is None:
        taken["eval_every"] = run.run.eval_every
    if config.schedule.warmup_steps is None and config.schedule.warmup_ratio is None:
        taken["warmup_steps"] = run.schedule.warmup_steps
    return config.replace(**taken)


def held_out_by(run: Interrupted | None) -> Sequence[str]:
    """The rules by which evaluation rows are held out: of a run that goes on, the one that it began with."""
    found = run.manifest["data"].get("held_out") if run is not None else None
    if found is None:
        return RULES
    if "rule" not in found:
        logger.warning(
            "RESUME: evaluation rows are held out by whole prompts alone, which is how this run began; a new run keeps "
            "first turns and replies together too"
        )
    return (found.get("rule", "prompt"),)


def truncation_of(run: Interrupted | None) -> str:
    """The rule by which long conversations are cut: of a run that goes on, the one that it began with."""
    return CUT_FEWEST if run is None else str(run.manifest.get("truncation", CUT_BY_STEPS))


def require_same_run(config: RewardTrainerConfig, run: Interrupted, *, reschedule: bool) -> list[str]:
    """What is different, a line each, in the resolved configuration of now and that of the run.

    Raises ConfigError where it would be another run.
    """
    now, then, step = to_mapping(config), to_mapping(run.config), run.checkpoint.step
    passed_over = {*PERMISSIONS, *BY_CONTENT}
    if now["steps"] == then["steps"]:
        passed_over |= {"epochs"}  # another way to say the same
    changed = [name for name in now if now[name] != then[name] and name not in passed_over]
    lines = {name: f"--{name.replace('_', '-')} {now[name]}, it was {then[name]}" for name in changed}
    may_change = {*FREE, *CADENCE, *ROUNDING}
    if reschedule:
        may_change |= set(LENGTH)
    elif config.schedule.lr_scheduler in LEVEL:
        may_change |= {"steps", "epochs"}
    if refused := [name for name in changed if name not in may_change]:
        remedy = "Give the settings that the run began with, or begin another run in another --output-dir."
        if set(refused) <= set(LENGTH):
            remedy = (
                f"The learning rate of every step would be another, so this is not the run that began. Leave the "
                f"length as it was, or take the new course from step {step} on with --reschedule."
            )
        raise ConfigError(f"--resume: {'; '.join(lines[name] for name in refused)}. {remedy}")
    assert config.run.steps is not None
    if config.run.steps < step:
        raise ConfigError(f"--resume: --steps {config.run.steps} is behind the checkpoint, which is at step {step}.")
    notes = {
        **dict.fromkeys(ROUNDING, "equal up to rounding from here on"),
        **dict.fromkeys(CADENCE, "which model is chosen may change"),
        **dict.fromkeys(LENGTH, "the learning rate takes another course from here on"),
    }
    return [lines[name] + (f" ({notes[name]})" if name in notes else "") for name in changed]


def require_same_data(facts: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Raise DataError unless data and template are those that the manifest of the run describes."""
    now, then = (_facts(json.loads(json.dumps(found)), manifest) for found in (facts, manifest))
    for what in now:
        if now[what] != then[what]:
            raise DataError(
                f"--resume: {what} not what the run began with (see manifest.json), so this would be another run. "
                f"Restore them, or begin another run in another --output-dir."
            )


def frozen_fingerprint(model: nn.Module) -> str:
    """A number that changes with any bit of the weights that do not train; a checkpoint does not hold them.

    Sums of the bits as integers, so that neither device nor order matters. Every rank calls it for a model in parts.
    """
    total = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            bits = whole_of(parameter.detach()).contiguous().view(torch.uint8).view(-1)
            whole = bits[: len(bits) // 4 * 4].view(torch.int32)
            found = int(whole.sum(dtype=torch.int64)) + int(bits[len(whole) * 4 :].sum(dtype=torch.int64))
            total = (31 * total + found) % (1 << 61)
    return f"{total:x}"


def require_same_base(fingerprint: str, manifest: Mapping[str, Any]) -> None:
    """Raise DataError if the weights that do not train are not those that the run began with."""
    if manifest.get("frozen_weights") != fingerprint:
        raise DataError(
            "--resume: the frozen weights of --model are not those that the run began with. Name the same model, with "
            "its files as they were."
        )


def resumed_manifest(now: Mapping[str, Any], run: Interrupted, changes: Sequence[str]) -> dict[str, Any]:
    """The manifest of a run that goes on: what it began with, and an entry about this start. Tells changes."""
    logger.info("RESUME: %s, after step %d", run.checkpoint.folder, run.checkpoint.step)
    for line in changes:
        logger.warning("RESUME: %s", line)
    before, after = run.manifest["provenance"], now["provenance"]
    for what in ("packages", "platform", "python"):
        if before.get(what) != after.get(what):
            logger.warning("RESUME: %s: %s, it was %s; equal up to rounding", what, after.get(what), before.get(what))
    if run.checkpoint.format < DRAWN_BY_CONVERSATION and run.config.model.lora and run.config.model.lora_dropout:
        logger.warning("RESUME: the version that began this run drew the dropout of adapters otherwise, by micro-batch")
    if run.manifest.get("ranks") != now["ranks"]:
        logger.warning("RESUME: %s ranks, it was %s; equal up to rounding", now["ranks"], run.manifest.get("ranks"))
    entry = {
        "step": run.checkpoint.step,
        "changed": list(changes),
        "config_hash_before": run.config_hash,
        "provenance": after,
    }
    return {**run.manifest, "config_hash": now["config_hash"], "resumed": [*run.manifest.get("resumed", []), entry]}


def _facts(manifest: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """What the data and the template of a run are, without names that may have moved, and as far as `told` says it."""

    def content(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        # By its name a limit draws the rows; otherwise it may change as files move.
        return [
            {key: report[key] for key in SOURCE_FACTS if key != "name" or report["unused_by_limit"]}
            for report in reports
        ]

    data = manifest["data"]
    # What is held out was once told in fewer numbers.
    held_out = data.get("held_out") and {key: data["held_out"].get(key) for key in told["data"].get("held_out", ())}
    return {
        "the training data are": content(data["train"]),
        "the evaluation data are": [content(data.get("eval", [])), held_out],
        "the test data are": content(data.get("test", [])),
        "the tokens are": {
            name: {key: value for key, value in report.items() if key not in TOLD}
            for name, report in manifest["tokens"].items()
        },
        "the chat template is": manifest["template_hash"],
    }
