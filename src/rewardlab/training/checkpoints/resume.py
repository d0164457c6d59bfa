"""Resumes a run: which settings may differ from those it began with, and whether its data are still the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from rewardlab.analysis.metrics import column_of
from rewardlab.core.config import HASH_DIGITS, from_mapping, settings_of, to_mapping
from rewardlab.core.errors import ArtifactError, ConfigError, DataError
from rewardlab.core.files import SUM, read_json, read_summed_json, sha256_json, sha256_text, versions_of
from rewardlab.core.run_folder import CHECKPOINTS, MANIFEST, holds_models, holds_run, run_of, sweep
from rewardlab.core.spec import CUT_BY_STEPS, CUT_FEWEST, TRUNCATION_OF
from rewardlab.data.splits import RULES
from rewardlab.data.template_files import shown
from rewardlab.model.sharded_weights import whole_of
from rewardlab.training.checkpoints.checkpoint import Checkpoint, checkpoint_at, newest_checkpoint
from rewardlab.training.settings.config import RewardTrainerConfig

logger = logging.getLogger("rewardlab")
AUTO: Final = "auto"
SUMMED_AT_ONCE: Final = 2**22
"""Integers that are summed at once where frozen weights are compared."""
DRAWN_BY_CONVERSATION: Final = 2
"""The first format of checkpoints in which adapter dropout does not depend on micro-batches."""

PERMISSIONS: Final = ("dry_run", "overwrite", "resume", "reschedule")
"""Settings of one start of the program, which are not properties of the run."""
PROBED: Final = (
    "max_seq_len",
    "special_tokens_in_text",
    "precision",
    "attention",
    "micro_token_budget",
    "attention_backend",
    "linear_backend",
    "norm_backend",
    "elementwise_backend",
    "allocator",
)
"""Settings that are measured or found out when a run begins; a resumed run takes what was decided then."""
UNDECIDED: Final = ("auto", None)
"""Values of these settings that leave the decision to the run."""
EARLIER: Final = {"special_tokens_in_text": "keep", "norm_backend": "torch", "elementwise_backend": "torch"}
"""Values that runs had before a setting existed, where they differ from today's default."""
BY_CONTENT: Final = (
    "model",
    "dataset",
    "hf_split",
    "eval_dataset",
    "eval_split",
    "test_dataset",
    "test_split",
)
"""Names, which may change when files move; what they stand for is compared instead."""
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
    "precision_card",
    "profile_memory",
    "track_gpu",
    "gpu_sample_interval_ms",
    "profile",
    "profile_steps",
    "thresholds",
    "batch_timeout_s",
    "rank_timeout_s",
    "publish_to",
    "publish_every",
    "publish_as",
    "publish_token_env",
    "publish_timeout_s",
)
"""Settings that change no weight and do not affect which model is chosen."""
CADENCE: Final = ("eval_every", "early_stopping_patience", "early_stopping_min_delta")
"""Settings that change no weight, but affect which model is chosen and when the run stops."""
ROUNDING: Final = (
    "micro_token_budget",
    "attention",
    "attention_backend",
    "linear_backend",
    "norm_backend",
    "elementwise_backend",
    "allocator",
    "compile",
    "activation_checkpointing",
    "liger",
    "sharding",
    "defer_gradient_sync",
    "cache_states",
)
"""Settings that change numbers by rounding alone."""
LENGTH: Final = ("steps", "epochs", "warmup_steps", "warmup_ratio", "lr_scheduler", "min_lr_ratio")
"""Settings that change the learning rate; they may differ only with `--reschedule`."""
SOURCE_FACTS: Final = ("name", "rows_read", "kept", "dropped", "unused_by_limit", "sha256")
"""Facts by which a dataset is recognised as the same; paths of files are not among them."""
TOLD: Final = ("dropped_ids", "special_tokens_in_text")
"""Entries of a report on tokens that do not describe the tokens themselves."""
NOT_COMPUTED: Final = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
"""Entries of a model's configuration that do not decide what it computes."""
LEVEL: Final = ("constant", "constant_with_warmup")
"""Schedules whose learning rate does not depend on the number of steps."""


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """A run that can be resumed."""

    checkpoint: Checkpoint
    config: RewardTrainerConfig
    """The settings it ran with, with every default decided."""
    config_hash: str
    """The hash of the settings in config.json."""
    manifest: Mapping[str, Any]


def find_interrupted(config: RewardTrainerConfig) -> Interrupted | None:
    """Return the run that `--resume` asks for; None if there is none yet, so that a new one begins.

    Raises ConfigError if there is a run without a checkpoint to resume from, or if `--resume` names a run outside
    --output-dir, and ArtifactError if its checkpoints or its files are damaged.
    """
    assert config.run.resume is not None
    run = config.run.output_dir
    if config.run.resume != AUTO and (named := run_of(config.run.resume)).resolve() != run.resolve():
        raise ConfigError(
            f"--resume {config.run.resume}: a run goes on in its own folder, {named}, not in --output-dir {run}. To "
            f"branch off, copy the folder and resume the copy."
        )
    if not holds_run(run) or not (run / "config.json").is_file():
        logger.info("RESUME: no run in %s yet; a new one begins", run)
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
        logger.warning("RESUME: the run in %s has no checkpoint yet; it begins again from the start", run)
        return None
    values, manifest = _read_object(run / "config.json"), _read_object(run / MANIFEST)
    entries, settings_hash = [{}, *manifest.get("resumed", [])], sha256_json(values)[:HASH_DIGITS]
    # On each start the manifest is written before config.json. A process killed in between leaves the settings of the
    # start before, whose hash is in the manifest's last entry.
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
    """Return a JSON object in the folder of a run. Raises ArtifactError if it is missing, damaged or not an object."""
    remedy = "A run cannot go on without it: restore it from a copy, or begin again with --overwrite."
    if not path.is_file():
        raise ArtifactError(f"{path} is not a file. {remedy}")
    try:
        values = read_json(path)
        # Earlier versions wrote no checksum.
        if isinstance(values, dict) and SUM in values:
            values = read_summed_json(path)
    except DataError as error:
        raise ArtifactError(f"{error} {remedy}") from error
    if not isinstance(values, dict):
        raise ArtifactError(f"{path} does not hold a JSON object. {remedy}")
    return values


def with_decisions(config: RewardTrainerConfig, run: RewardTrainerConfig) -> RewardTrainerConfig:
    """Return the settings asked for, with what they leave open replaced by what the run decided when it began."""
    known = settings_of(RewardTrainerConfig)
    # A new measurement could decide otherwise on a busy machine, and the run would then compute in another way.
    taken: dict[str, Any] = {name: known[name].of(run) for name in PROBED if known[name].of(config) in UNDECIDED}
    if config.run.eval_every is None:
        taken["eval_every"] = run.run.eval_every
    schedule = config.schedule
    # `constant` has no warm-up to take over: a run that goes on with it has left that of its first schedule.
    if schedule.warmup_steps is None and schedule.warmup_ratio is None and schedule.lr_scheduler != "constant":
        taken["warmup_steps"] = run.schedule.warmup_steps
    return config.replace(**taken)


def held_out_by(run: Interrupted | None) -> Sequence[str]:
    """Return the rules by which evaluation rows are held out; those of the run if one is resumed."""
    held_out = run.manifest["data"].get("held_out") if run is not None else None
    if held_out is None:
        return RULES
    if "rule" not in held_out:
        logger.warning(
            "RESUME: evaluation rows are held out by whole prompts alone, which is how this run began; a new run keeps "
            "first turns and replies together too"
        )
    return (held_out.get("rule", "prompt"),)


def truncation_of(config: RewardTrainerConfig, run: Interrupted | None) -> str:
    """Return the rule by which long conversations are cut; that of the run if one is resumed.

    Runs of earlier versions that left rows out recorded how others would have been cut. They take the rule of today.
    """
    rule = TRUNCATION_OF[config.data.rendering.truncation]
    return str(run.manifest.get("truncation", CUT_BY_STEPS)) if run is not None and rule == CUT_FEWEST else rule


def require_same_run(config: RewardTrainerConfig, run: Interrupted, *, reschedule: bool) -> list[str]:
    """Return a line for each setting that differs between the resolved configuration of now and that of the run.

    Raises ConfigError if a difference would make it another run.
    """
    now, then, step = to_mapping(config), to_mapping(run.config), run.checkpoint.step
    for settings in (now, then):  # one metric goes by several names
        settings["early_stopping_metric"] = column_of(str(settings["early_stopping_metric"]))
    passed_over = {*PERMISSIONS, *BY_CONTENT}
    if now["steps"] == then["steps"]:
        # With equal steps, epochs are only another way to give the same length.
        passed_over |= {"epochs"}
    changed = [name for name in now if now[name] != then[name] and name not in passed_over]
    for settings in (now, then):  # a template is a long text, of which a message says the hash
        settings["chat_template"] = shown(str(settings["chat_template"]))
    lines = {name: f"--{name.replace('_', '-')} {now[name]}, it was {then[name]}" for name in changed}
    may_change = {*FREE, *CADENCE, *ROUNDING}
    if reschedule:
        may_change |= set(LENGTH)
    # At a level learning rate a longer run has the same steps as a shorter one.
    elif config.schedule.lr_scheduler in LEVEL:
        may_change |= {"steps", "epochs"}
    if refused := [name for name in changed if name not in may_change]:
        remedy = "Give the settings that the run began with, or begin another run in another --output-dir."
        if set(refused) <= set(LENGTH):
            remedy = (
                f"The learning rate of every step would differ, so this would not be the same run. Leave the length as "
                f"it was, or change the schedule from step {step} on with --reschedule."
            )
        raise ConfigError(f"--resume: {'; '.join(lines[name] for name in refused)}. {remedy}")
    assert config.run.steps is not None
    if config.run.steps < step:
        raise ConfigError(
            f"--resume: --steps {config.run.steps} is fewer than the {step} steps of the checkpoint. Raise --steps."
        )
    notes = {
        **dict.fromkeys(ROUNDING, "equal up to rounding from here on"),
        **dict.fromkeys(CADENCE, "which model is chosen may change"),
        **dict.fromkeys(LENGTH, "the learning rate follows another schedule from here on"),
    }
    if {config.schedule.lr_scheduler, run.config.schedule.lr_scheduler} <= set(LEVEL):
        notes = {name: note for name, note in notes.items() if name not in ("steps", "epochs")}
    return [lines[name] + (f" ({notes[name]})" if name in notes else "") for name in changed]


def require_same_data(facts: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Raise DataError unless data, template and what the model computes are as the manifest of the run says."""
    _require_same_config(facts.get("model_config", {}), manifest.get("model_config", {}))
    # Through JSON, since the manifest was: tuples become lists, and keys become strings.
    now, then = (_facts(json.loads(json.dumps(values)), manifest) for values in (facts, manifest))
    for what in now:
        if now[what] != then[what]:
            raise DataError(
                f"--resume: {what} not what the run began with (see manifest.json), so this would be another run. "
                f"{_renamed(facts, manifest) or _upgraded(manifest)}Restore what changed, or begin another run in "
                f"another --output-dir."
            )


def _renamed(now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    """Return a sentence about the first dataset that has another name than when the run began; empty if none has."""
    for purpose in ("train", "eval", "test"):
        pairs = zip(now["data"].get(purpose, ()), then["data"].get(purpose, ()), strict=False)
        for name, before in ((one["name"], other["name"]) for one, other in pairs):
            if name != before:
                return (
                    f"The dataset {before} is now called {name}, and draws of rows and of labels go by the name: give "
                    f"it its old one, by a link or a copy. "
                )
    return ""


def _upgraded(then: Mapping[str, Any]) -> str:
    """Return a sentence about another version of this package that the run began with; empty if it was this one."""
    (version,) = versions_of(["rewardlab"]).values()
    before = then.get("provenance", {}).get("packages", {}).get("rewardlab")
    if before in (None, version):
        return ""
    return f"It began with rewardlab {before}, and this is {version}, which may read rows and templates otherwise. "


NOTHING_FROZEN: Final = "0"
"""What `frozen_fingerprint` returns of a model all of whose weights train."""


def frozen_fingerprint(model: nn.Module) -> str:
    """Return hex digits that change with any bit of the frozen weights, which a checkpoint does not hold.

    It sums the bits as integers, so it depends on neither the device nor the order of the sum. Every rank calls it for
    a sharded model.
    """
    total = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            bits = whole_of(parameter.detach()).contiguous().view(torch.uint8).view(-1)
            # Most bytes are summed as integers of four bytes, which is faster; the few that are left are added singly.
            whole = bits[: len(bits) // 4 * 4].view(torch.int32)
            # In pieces, since the CPU first makes integers of eight bytes of all that is summed at once.
            pieces = (*torch.split(whole, SUMMED_AT_ONCE), bits[len(whole) * 4 :])
            bit_sum = sum(int(piece.sum(dtype=torch.int64)) for piece in pieces)
            # Multiplied before adding, so that parameters which change places change the result.
            total = (31 * total + bit_sum) % (1 << 61)
    return f"{total:x}"


def config_digests(config: Any) -> dict[str, str]:
    """Return entry of a model's configuration -> hex digits that change with its value.

    Where all weights train, a checkpoint holds them, and this alone tells that the model around them is another one.
    """
    texts = {name: json.dumps(value, default=str) for name, value in _entries(config.to_dict())}
    return {name: sha256_text(text)[:HASH_DIGITS] for name, text in sorted(texts.items())}


def _entries(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of a configuration; those of an inner one with both names, as in `text_config.hidden_size`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _entries({str(key): inner for key, inner in value.items()}, f"{before}{name}.")
        elif name not in NOT_COMPUTED:
            yield f"{before}{name}", value


def require_same_base(fingerprint: str, manifest: Mapping[str, Any]) -> None:
    """Raise DataError if the frozen weights are not those that the run began with."""
    if manifest.get("frozen_weights") == NOTHING_FROZEN != fingerprint:
        raise DataError(
            "--resume: no weight was frozen where this run began, and now some are: up to version 0.18 what reads "
            "images beside a text model was not. Finish the run by the version that began it, or begin a new one."
        )
    if manifest.get("frozen_weights") != fingerprint:
        raise DataError(
            "--resume: the frozen weights of --model are not those that the run began with. Name the same model, with "
            "its files as they were. A run in half precision that an earlier version began, with frozen norms in half "
            "precision, cannot go on: it would be another run."
        )


def resumed_manifest(now: Mapping[str, Any], run: Interrupted, changes: Sequence[str]) -> dict[str, Any]:
    """Return the manifest of a resumed run: what it began with, and an entry about this start. Logs what changed."""
    logger.info("RESUME: %s, after step %d", run.checkpoint.folder, run.checkpoint.step)
    for line in changes:
        logger.warning("RESUME: %s", line)
    before, after = run.manifest["provenance"], now["provenance"]
    for what in ("packages", "platform", "python"):
        # Other versions and machines may round differently, so this is a warning, not a refusal.
        if before.get(what) != after.get(what):
            logger.warning("RESUME: %s: %s, it was %s; equal up to rounding", what, after.get(what), before.get(what))
    if run.checkpoint.format < DRAWN_BY_CONVERSATION and run.config.model.lora and run.config.model.lora_dropout:
        logger.warning("RESUME: the version that began this run drew the dropout of adapters otherwise, by micro-batch")
    if run.manifest.get("ranks") != now["ranks"]:
        logger.warning("RESUME: %s ranks, it was %s; equal up to rounding", now["ranks"], run.manifest.get("ranks"))
    threads = run.manifest.get("threads")  # earlier versions did not keep it
    if threads is not None and now["threads"] not in (None, threads):
        logger.warning("RESUME: %s threads (OMP_NUM_THREADS), it was %s; equal up to rounding", now["threads"], threads)
    entry = {
        "step": run.checkpoint.step,
        "changed": list(changes),
        "config_hash_before": run.config_hash,
        "provenance": after,
    }
    return {**run.manifest, "config_hash": now["config_hash"], "resumed": [*run.manifest.get("resumed", []), entry]}


def _facts(manifest: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts by which data and template are compared, without names that may have moved.

    Only facts that `told`, the manifest of the run, has are included.
    """

    data = manifest["data"]
    # Limits, weights and controls draw by the name of the dataset, so it matters there; elsewhere files may move.
    controls = told["data"].get("control", {}).get("settings", {}).values()
    is_drawn = "weights" in told["data"] or any(one.get("seed") is not None for one in controls)

    def content(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [
            {key: report[key] for key in SOURCE_FACTS if key != "name" or report["unused_by_limit"] or is_drawn}
            for report in reports
        ]

    # Earlier versions recorded fewer numbers about held-out data, and only those can be compared.
    held_out = data.get("held_out") and {key: data["held_out"].get(key) for key in told["data"].get("held_out", ())}
    return {
        "the training data are": content(data["train"]),
        "the weights of the datasets are": {
            purpose: [one["rows"] for one in shares["datasets"]] for purpose, shares in data.get("weights", {}).items()
        },
        "the evaluation data are": [content(data.get("eval", [])), held_out],
        "the test data are": content(data.get("test", [])),
        # Before the tokens, of which it may be the reason.
        "the chat template is": manifest["template_hash"],
        "the tokens are": {
            name: {key: report[key] for key in told["tokens"].get(name, report) if key in report and key not in TOLD}
            for name, report in manifest["tokens"].items()
        },
    }


def _require_same_config(now: Mapping[str, str], then: Mapping[str, str]) -> None:
    """Raise DataError if two digests of a model's configuration differ. Other versions know other entries."""
    if changed := sorted(name for name in now.keys() & then.keys() if now[name] != then[name]):
        raise DataError(
            f"--resume: {', '.join(changed)}, in the configuration of the model, {'is' if len(changed) == 1 else 'are'}"
            f" not what the run began with, so this would be another run. Name the same model, with its files as they "
            f"were."
        )
