"""Prepares a run up to where the model is loaded: data, layout, settings and the run folder.

Everything that can be wrong with flags, data or the output folder is found here, before the model costs time.
"""

from __future__ import annotations

import logging
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rewardlab.artifact.base import Base, decide_computing, open_base, require_inputs, settle_rendering
from rewardlab.artifact.save import saved_dtype
from rewardlab.core.config import config_hash, settings_of, to_mapping
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import provenance, write_json, write_summed_json, write_text
from rewardlab.core.run_folder import MANIFEST, claim_folder, clear_folder, holds_models, only_writer
from rewardlab.core.terminal import visible
from rewardlab.core.types import TokenGroup
from rewardlab.data.chat import Renderer
from rewardlab.data.dataset_names import NOTHING, Given, first_rows_of
from rewardlab.data.groups import Datasets, Groups
from rewardlab.data.pack import require_fit
from rewardlab.data.prepare import Prepared, draw, load_data, token_groups
from rewardlab.data.readers import fingerprint
from rewardlab.data.step_order import steps_per_epoch
from rewardlab.data.template_files import shown as shown_template
from rewardlab.data.token_report import TokenReport
from rewardlab.data.weights import without_weights
from rewardlab.distributed.meeting import require_same_folder
from rewardlab.distributed.ranks import Ranks
from rewardlab.distributed.sharding import device_of_rank
from rewardlab.evaluation.baselines import fit_baselines
from rewardlab.evaluation.evaluate import EvalResult, write_evaluation
from rewardlab.model.compute import require_kernels
from rewardlab.model.heads import require_one_output
from rewardlab.model.load import choose_layout
from rewardlab.model.quantization import require_quantization
from rewardlab.model.reward import AttentionLayout
from rewardlab.model.trainable import require_layers
from rewardlab.report.tables import format_estimate
from rewardlab.training.checkpoints.resume import (
    Interrupted,
    config_digests,
    find_interrupted,
    held_out_by,
    require_same_base,
    require_same_data,
    require_same_run,
    resumed_manifest,
    truncation_of,
    with_decisions,
)
from rewardlab.training.cost.throughput import PeakFlops
from rewardlab.training.default_budget import decided_early
from rewardlab.training.loop.optimizer import require_optimizer
from rewardlab.training.loop.schedule import batch_notice, decay_notice, floor_notice, warmup_notice, warmup_steps
from rewardlab.training.loop.selection import selection_of
from rewardlab.training.loop.step_rows import tell_rows_of_prompts
from rewardlab.training.monitoring.monitor import require_monitoring
from rewardlab.training.notices import FEATURES, continued_notices, idle_notices, unjudged_notices
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.settings.conventions import length_from, settle_reading

logger = logging.getLogger("rewardlab")

LOCK_WAIT_S = 120.0
"""Seconds that a resumed run waits for the process before it: a file server notices late that a machine is dead."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A run with everything decided that can be decided before the model is loaded."""

    config: RewardTrainerConfig
    """The settings with every default decided, except `micro_token_budget` where a trial or a GPU's size decides it."""
    base: Base
    device: torch.device
    layout: AttentionLayout
    data: Datasets
    test: Sequence[TokenGroup]
    baselines: Mapping[str, Mapping[str, EvalResult]]
    tokens: Mapping[str, TokenReport]
    """What tokenising did to each kind of data."""
    facts: Mapping[str, Any]
    """Entries of the manifest that say what the data and the template are."""
    interrupted: Interrupted | None
    """The run to resume; None for a new one."""
    changes: Sequence[str] = ()
    """Settings that differ from those the resumed run began with."""

    @property
    def resumed_at(self) -> int | None:
        """The step of the checkpoint that a run goes on from; None for a new one."""
        return None if self.interrupted is None else self.interrupted.checkpoint.step


def make_ready(config: RewardTrainerConfig, ranks: Ranks, held: ExitStack, given: Given = NOTHING) -> Ready:
    """Return data, layout and settings; raise every error that can be found without the model's weights.

    `given` are rows in memory, in place of data that the configuration names. The run folder is locked for this process
    until `held` closes. Raises ConfigError for settings that do not fit together or a folder that holds another run,
    DataError for unusable data, and ArtifactError for damaged checkpoints.
    """
    # Only the first rank touches the run folder: ranks that each took its lock would lock each other out.
    interrupted = ranks.by_first(lambda: _claim(config, held, given))
    require_same_folder(config.run.output_dir, ranks, all_write=config.run.checkpoints)
    _require_same_rows(ranks, given)
    require_sharding(config, ranks, goes_on=interrupted is not None)
    if config.run.compat != "none":
        config = settle_reading(config, first_rows_of(config.data, given))
    if interrupted is not None:
        # Before anything is measured, so that what the run decided when it began is not decided again.
        config = with_decisions(config, interrupted.config)
    config = config.replace(**settle_rendering(config.model, config.data.rendering))
    truncation = truncation_of(config, interrupted)
    base = open_base(config.model, config.data.rendering, truncation=truncation, length_from=length_from(config))
    require_layers(config.model, base.config.get_text_config())
    require_one_output(base.path, base.config, new_head=config.model.new_head)
    prepared = load_data(
        config.data,
        base.renderer,
        seed=config.run.seed,
        kwise_loss=config.loss.kwise_loss,
        held_out_by=held_out_by(interrupted),
        given=given,
        shows_row=config.run.log_samples > 0,
    )
    data, test, tokens = to_groups(config, prepared, base.renderer)
    device = device_of_rank()
    config = decided_early(config, device, ranks)
    # The choice is by a measurement, like that of kernels in _resolve, so ranks could choose differently.
    layout = ranks.from_first(
        choose_layout(
            base.config,
            base.disk_class,
            config.model,
            max_length=config.data.rendering.length_limit,
            share=True,
            log=logger.info,
        )
    )
    if isinstance(config.run.micro_token_budget, int):
        # A preference larger than the budget would otherwise be found only at the step that draws it.
        require_fit([data.train], config.run.token_budget, layout=layout)
    baselines = fit_all_baselines(config, data, test)
    # Every rank measures which kernels are fastest and may find others, so what the first one found holds for all.
    how = {"resumes": interrupted is not None, "divided": ranks.size > 1 and config.run.sharding != "none"}
    resolved = _agreed(ranks, _resolve(config, base, num_groups=len(data.train), device=device, layout=layout, **how))
    if ranks.is_first:
        tell_rows_of_prompts(resolved, data.train, layout=layout, num_ranks=ranks.size)
    warmup = warmup_notice(resolved.schedule.warmup_steps, resolved.run.steps, resolved.learning_rate)
    decay = decay_notice(resolved.optimizer.weight_decay, resolved.run.steps, resolved.learning_rate)
    batch = batch_notice(resolved.run.batch_size, len(data.train))
    for said in filter(None, (warmup, floor_notice(resolved.schedule), decay, batch)):
        logger.warning("schedule: %s", said)
    continued = continued_notices(resolved, base)
    for said in [*idle_notices(config), *unjudged_notices(resolved, data, test), *continued]:
        logger.warning("%s", said)
    facts = {
        "data": prepared.reports,
        "tokens": {name: report.as_dict() for name, report in tokens.items()},
        "template_hash": base.renderer.spec.template_hash,
        "model_config": config_digests(base.config),
        "base_commit": base.commit,
        "truncation": base.renderer.spec.truncation,
        "ranks": ranks.size,
        # What a GPU computes does not depend on them.
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }
    changes: Sequence[str] = ()
    if interrupted is not None:
        # Compared after every default is decided: a default that was left out and one that was written out are the
        # same.
        changes = require_same_run(resolved, interrupted, reschedule=config.run.reschedule)
        require_same_data(facts, interrupted.manifest)
    return Ready(
        config=resolved,
        base=base,
        device=device,
        layout=layout,
        data=data,
        test=test,
        baselines=baselines,
        tokens=tokens,
        facts=facts,
        interrupted=interrupted,
        changes=changes,
    )


def _require_same_rows(ranks: Ranks, given: Given) -> None:
    """Raise DataError on every rank unless all ranks were given the same rows."""
    # A collective call: also ranks that were given nothing take part, or the others would wait for them.
    if ranks.size > 1:
        told = ranks.gather({purpose: fingerprint(source) for purpose, source in given.items()})
        if any(one != told[0] for one in told):
            raise DataError("the ranks were given different rows. Give every process all rows, in the same order.")


def _claim(config: RewardTrainerConfig, held: ExitStack, given: Given) -> Interrupted | None:
    """Check all that needs neither data nor model, lock the run folder, and return the run in it to resume, if any."""
    # These need neither data nor model, so a wrong flag is reported before minutes go into reading.
    selection_of(config)
    if "eval" not in given:
        config.require_evaluation()
    require_optimizer(config.optimizer.optimizer)
    require_quantization(config.model.quantization)
    require_monitoring(config)
    require_kernels(config.compute, device_of_rank())
    require_inputs(config.model, config.data, given)
    # Locked before anybody looks into it: the process of the interrupted run may still be writing its last checkpoint.
    held.enter_context(only_writer(config.run.output_dir, wait_s=LOCK_WAIT_S if config.run.resume is not None else 0.0))
    interrupted = find_interrupted(config) if config.run.resume is not None else None
    # With --resume a folder without models may be replaced: a process that was killed while it began has left it, and a
    # batch job that is queued again must be able to start.
    may_begin = config.run.resume is not None and not holds_models(config.run.output_dir)
    overwrite = config.run.overwrite or interrupted is not None or may_begin
    require_free(config, overwrite=overwrite, replaces=interrupted is None)
    return interrupted


def require_free(config: RewardTrainerConfig, *, overwrite: bool, replaces: bool = True) -> None:
    """Raise ConfigError unless the run may write to its folder, as `claim_folder` does."""
    datasets = without_weights(config.data.dataset, "--dataset")
    claim_folder(
        config.run.output_dir,
        (config.model.model, *datasets, *config.data.selection.eval_dataset, *config.data.test_dataset),
        overwrite=overwrite,
        replaces=replaces,
    )


def require_sharding(config: RewardTrainerConfig, ranks: Ranks, *, goes_on: bool) -> None:
    """Raise ConfigError for settings that several ranks cannot use together.

    `goes_on` is whether the run is resumed, so that its token budget is already decided.
    """
    if ranks.size == 1:
        return
    if config.model.cache_states:
        raise ConfigError(
            "--cache-states is for one process: with the states at hand a step has nothing to divide. Start the run "
            "without torchrun, or leave it out."
        )
    if config.run.micro_token_budget == "auto" and config.run.sharding != "none" and not goes_on:
        raise ConfigError(
            "--micro-token-budget auto tries a whole model. Use --sharding none, or give a number: what auto finds on "
            "one of these devices, or more, since weights and optimiser are shared."
        )
    if config.run.sharding != "none" and (
        config.model.quantization != "none" or config.optimizer.optimizer in ("adafactor", "adamw8bit")
    ):
        what = "--quantization" if config.model.quantization != "none" else f"--optimizer {config.optimizer.optimizer}"
        raise ConfigError(f"{what} cannot be divided among devices. Use --sharding none, or leave it out.")


def to_groups(
    config: RewardTrainerConfig, prepared: Prepared, renderer: Renderer
) -> tuple[Datasets, Groups, dict[str, TokenReport]]:
    """Return (training and evaluation data, test data, report of what tokenising did to each).

    Rows held out of the training data are some of its rows, whose share is judged on those that stay: of a few, a
    single one would be too many.

    Raises DataError if too many rows are unusable.
    """
    groups: dict[str, Groups] = {}
    reports: dict[str, TokenReport] = {}
    most = config.data.reading.max_drop_fraction
    held_out = "evaluation" if "held_out" in prepared.reports else None
    parts = {"training": prepared.train, "evaluation": prepared.eval, "test": prepared.test}
    for name, part in parts.items():
        if len(part):
            allowed = 1.0 if name == held_out else most
            groups[name], reports[name] = token_groups(part, renderer, allowed, name, held_out=name == held_out)
    train = groups["training"]
    if config.loss.kwise_weight == "prompt":
        train = train.weighed()
    nothing = train.take(np.empty(0, np.int64))
    data = Datasets(
        train=train,
        eval=groups.get("evaluation", nothing),
        # Drawn once, so that all evaluations judge the same rows and the gap shows the model, not the draw.
        train_eval=draw(train, config.data.selection.train_eval_limit, config.run.seed),
    )
    return data, groups.get("test", nothing), reports


def fit_all_baselines(
    config: RewardTrainerConfig, data: Datasets, test: Sequence[TokenGroup]
) -> dict[str, dict[str, EvalResult]]:
    """Return evaluations of the baselines by name and by data (`selection`, `test`); empty if none are wanted."""
    judged = {"selection": data.eval, "test": test}
    if not config.data.selection.baselines or not any(judged.values()):
        return {}
    evaluations = fit_baselines(data.train, judged, seed=config.run.seed)
    for name, results in evaluations.items():
        for on, result in results.items():
            logger.info(
                "baseline: %s: accuracy %s on %s data",
                name,
                format_estimate(result.overall.estimates["eval_accuracy"]),
                {"selection": "evaluation"}.get(on, on),
            )
    return evaluations


def _resolve(
    config: RewardTrainerConfig,
    base: Base,
    *,
    num_groups: int,
    device: torch.device,
    layout: AttentionLayout,
    resumes: bool,
    divided: bool,
) -> RewardTrainerConfig:
    """Return the configuration with every default decided: what is printed, hashed, saved and used on resuming."""
    steps = config.run.steps
    if steps is None:
        steps = max(1, round(config.run.epochs * steps_per_epoch(num_groups, config.run.batch_size)))
    named, compute = config.compute.attention_backend, config.compute
    # A run on padded rows has no use for the kernel of packed rows that it named when it began, and may go on where
    # that is refused: runs of GPT-OSS named one before any kernel knew of its sinks.
    unused = {"attention_backend": named} if resumes and layout == "padded" and named != "auto" else {}
    if unused:
        compute = replace(compute, attention_backend="segments")
    how = {"train": True, "divided": divided}
    computed = decide_computing(base, config.model, compute, layout=layout, device=device, **how) | unused
    decided: dict[str, Any] = computed | {
        # These four are about this start; they are not properties of the run, so its hash must not depend on them.
        "dry_run": False,
        "overwrite": False,
        "resume": None,
        "reschedule": False,
        "steps": steps,
        "lr": config.learning_rate,
        "backbone_lr_mult": config.optimizer.backbone_share if config.optimizer.differential_lr else None,
        "warmup_steps": warmup_steps(config.schedule, steps),
        "warmup_ratio": None,
        "eval_every": config.run.interval(steps),
        "save_every": _save_every(config, steps),
        "save_dtype": str(saved_dtype(config.run.save_dtype)).removeprefix("torch."),
    }
    return config.replace(**decided)


def _agreed(ranks: Ranks, found: RewardTrainerConfig) -> RewardTrainerConfig:
    """Return what the first rank decided, but for Triton's kernels, which all have to choose: one may have none."""
    chosen = set(ranks.gather(found.compute.elementwise_backend))
    backend = chosen.pop() if len(chosen) == 1 else "torch"
    return ranks.from_first(found).replace(elementwise_backend=backend)


def _save_every(config: RewardTrainerConfig, steps: int) -> int | None:
    """Return the steps between saved models: of every evaluation if each is to be published."""
    if config.publish.publish_to is None or config.publish.publish_every != "eval":
        return config.run.save_every
    interval = config.run.interval(steps)
    if config.run.save_every not in (None, interval):
        raise ConfigError(
            f"--publish-every eval saves the model at every evaluation, each {interval} steps, and --save-every asks "
            f"for each {config.run.save_every}. Leave --save-every out, or choose --eval-every to be the same."
        )
    return interval


def write_run_start(ready: Ready, fingerprint: str, peak_flops: PeakFlops) -> None:
    """Write settings, manifest, samples and baselines; for a resumed run, record what is different from now on.

    Raises DataError if the frozen weights are not those that a resumed run began with.
    """
    config, folder, interrupted = ready.config, ready.config.run.output_dir, ready.interrupted
    manifest = {
        "config_hash": config_hash(config),
        **ready.facts,
        "peak": {"flops_per_second": peak_flops.flops, "source": peak_flops.source},
        "frozen_weights": fingerprint,
        "provenance": provenance(),
    }
    if interrupted is None:
        # Cleared only here, after everything that can be refused has been checked.
        clear_folder(folder)
    else:
        require_same_base(fingerprint, interrupted.manifest)
        manifest = resumed_manifest(manifest, interrupted, ready.changes)
    # The manifest comes first, since it is what marks the folder as holding a run.
    write_summed_json(folder / MANIFEST, manifest)
    write_json(folder / "config.json", to_mapping(config))
    if interrupted is None:
        write_text(folder / "samples.txt", _samples(ready.data.train[: config.run.log_samples], ready.base.renderer))
    for name, results in ready.baselines.items():
        for on, judged in results.items():
            write_evaluation(folder / "evals", f"{on}_{name.replace(' ', '_')}", judged)


def log_settings(config: RewardTrainerConfig) -> None:
    """Log the hash and the settings of a run, as `configuration_block` has them."""
    for line in configuration_block(config, width=min(100, shutil.get_terminal_size((100, 24)).columns)).splitlines():
        logger.info("%s", line)


def configuration_block(config: RewardTrainerConfig, *, width: int) -> str:
    """Return the hash and the settings as text, without settings that are off or empty by default, and without the
    defaults of features that are off."""
    values = to_mapping(config)
    values["chat_template"] = shown_template(config.data.rendering.chat_template)
    usual = {name: own.default for name, own in settings_of(RewardTrainerConfig).items()}
    usual = {name: list(value) if isinstance(value, tuple) else value for name, value in usual.items()}
    idle = tuple(start for start, switch in FEATURES.items() if values[switch] in (None, False, "none"))
    shown = ", ".join(
        f"{name}={visible(str(value))}"
        for name, value in values.items()
        if (value != [] and value != usual[name]) or (value and not name.startswith(idle))
    )
    return textwrap.fill(
        f"configuration {config_hash(config)}: {shown}",
        width=width,
        subsequent_indent="  ",
        break_on_hyphens=False,
    )


def _samples(groups: Sequence[TokenGroup], renderer: Renderer) -> str:
    """Return replies as decoded tokens with visible borders between them; control characters are escaped."""
    lines = []
    for group in groups:
        for reply in range(group.num_replies):
            # Each token is decoded by itself, since the text of all of them together does not show where tokens begin.
            pieces = [renderer.tokenizer.decode([int(token)]) for token in group.conversation(reply)]
            boundary = group.prompt_tokens[reply]
            name = visible(group.preference_id)
            of_reply = group.truncated_reply_tokens[reply]
            lines += [
                f"=== {name}  reply {reply}  {len(pieces)} tokens, {boundary} before the reply, "
                f"{len(group.shared)} shared, {group.truncated_tokens[reply]} cut"
                f"{f', {of_reply} from the middle of the reply' if of_reply else ''} ===",
                "|".join(pieces[:boundary]) + "⟦reply⟧" + "|".join(pieces[boundary:]) + "⟦score read here⟧",
                "",
            ]
        lines += [f"judged: {[(c.first, c.second, c.label) for c in group.comparisons]}", ""]
    return visible("\n".join(lines), lines=True)
