"""`rewardlab train` from a configuration to a verified reward model.

Everything that can be wrong with flags, data or the output folder is found before the model is loaded.
"""

from __future__ import annotations

import logging
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from rewardlab.analysis.health import WarningSign
from rewardlab.artifact.load import load
from rewardlab.artifact.save import (
    NOTABLE_ROUNDING,
    save_reward_model,
    saved_dtype,
    verify_in_clean_process,
)
from rewardlab.core.config import config_hash, to_mapping
from rewardlab.core.files import provenance, write_json, write_text
from rewardlab.core.types import TokenGroup
from rewardlab.data.chat import Renderer
from rewardlab.data.loader import TokenReport, steps_per_epoch
from rewardlab.data.pack import largest_cost, require_fit
from rewardlab.model.compute import choose_compute
from rewardlab.model.load import PRECISION, choose_layout, load_reward_model, resolve_precision
from rewardlab.model.reward import Layout, RewardModel
from rewardlab.report.tables import format_estimate
from rewardlab.training.baselines import fit_baselines
from rewardlab.training.budget import choose_budget
from rewardlab.training.compat import settle_reading
from rewardlab.training.config import RewardTrainerConfig
from rewardlab.training.evaluate import EvalResult, evaluate_groups, write_evaluation
from rewardlab.training.monitor import require_monitoring, watch_run
from rewardlab.training.peak import peak_of
from rewardlab.training.prepare import Base, Prepared, first_rows_of, load_data, open_base, require_sources, to_groups
from rewardlab.training.records import Records
from rewardlab.training.reward_trainer import Datasets, RewardTrainer, selection_of
from rewardlab.training.run_folder import claim_folder, clear_folder
from rewardlab.training.schedule import warmup_steps
from rewardlab.training.throughput import Peak
from rewardlab.training.work import linear_shapes

logger = logging.getLogger("rewardlab")


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run left behind."""

    output_dir: Path
    best: Path | None
    """The checkpoint that evaluated best; None without evaluation data, or if none beat the untrained model."""
    best_step: int | None
    last: Path
    baseline: EvalResult | None
    """Of the untrained model on the evaluation data."""
    selected: EvalResult | None
    """Of the chosen model on the evaluation data that chose it."""
    test_baseline: EvalResult | None
    """Of the untrained model on the test data."""
    test: EvalResult | None
    """Of the chosen model, reloaded from its folder in float32, on the test data."""
    baselines: Mapping[str, Mapping[str, EvalResult]]
    """`length only` and `bag of words`, fitted on the training data -> `selection` and `test` -> evaluation."""
    train_seconds: float
    speed: str
    """Rates of the training steps and peak memory, in a line."""
    warnings: Sequence[WarningSign]
    """What was wrong on the way, in the order in which it was seen."""

    @property
    def model(self) -> Path:
        """`best`, or the last step's folder."""
        return self.best if self.best is not None else self.last

    def compared(self, on: Literal["selection", "test"]) -> dict[str, EvalResult]:
        """What was judged on the same data, by name: the baselines, `before` and `after` training."""
        before, after = (self.baseline, self.selected) if on == "selection" else (self.test_baseline, self.test)
        found = {name: results.get(on) for name, results in self.baselines.items()}
        found |= {"before": before, "after": after}
        return {name: result for name, result in found.items() if result is not None}


def train(config: RewardTrainerConfig) -> TrainResult:
    """Train a reward model as `config` says; see docs/api.md.

    Raises RewardlabError for anything the user can mend; nothing of an earlier run is overwritten unless asked.
    """
    _claim(config)
    if config.compat != "none":
        config = settle_reading(config, first_rows_of(config))
    require_sources(config)
    base = open_base(config, config)
    renderer, path = base.renderer, base.path
    prepared = load_data(config, renderer, seed=config.seed, kwise_loss=config.kwise_loss)
    data, test_groups, tokens = to_groups(config, prepared, renderer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layout = choose_layout(
        base.config,
        base.disk_class,
        config,
        max_length=config.max_seq_len,
        share=config.shares_prompts,
        log=logger.info,
    )
    if config.micro_token_budget != "auto":
        require_fit([data.train], config.token_budget, layout=layout)
    baselines = _baselines(config, data, test_groups)
    resolved = _resolve(config, base, num_groups=len(data.train), device=device, layout=layout)
    torch.manual_seed(resolved.seed)
    model = load_reward_model(
        path,
        resolved,
        resolved,
        seed=resolved.seed,
        layout=layout,
        device=device,
        log=logger.info,
    )
    resolved = _settle_budget(resolved, model, data)
    peak = peak_of(device, model.compute_dtype, linear_shapes(model))
    logger.info("peak: %s", peak.line())
    _write_run_start(resolved, renderer, data, prepared, tokens, peak)
    for name, results in baselines.items():
        for on, judged in results.items():
            write_evaluation(resolved.output_dir / "evals", f"{on}_{name.replace(' ', '_')}", judged)
    dtype = saved_dtype(resolved.save_dtype)
    facts = {"config": to_mapping(resolved), "config_hash": config_hash(resolved), **provenance()}

    def save(folder: Path) -> None:
        spec = save_reward_model(
            folder,
            model,
            renderer,
            beta=resolved.beta,
            save_dtype=dtype,
            provenance=facts | {"step": trainer.step},
            adapter=(resolved, path) if resolved.lora else None,
        )
        logger.info("saved %s (%s)", folder, spec.save_dtype)
        if spec.max_rounding_error > NOTABLE_ROUNDING:
            logger.warning(
                "saved scores differ from the live ones by up to %.2f on the canaries (saved as %s, live in %s); "
                "evaluations of the folder are about the saved ones. --save-dtype float32 keeps most precision",
                spec.max_rounding_error,
                spec.save_dtype,
                resolved.precision,
            )

    test_baseline = _judge_before(resolved, model, test_groups)
    assert resolved.steps is not None
    watch = watch_run(resolved, next(model.parameters()).device, tokens)
    trainer = RewardTrainer(
        resolved,
        model,
        data,
        num_steps=resolved.steps,
        records=Records(resolved.output_dir),
        save=save,
        peak=peak,
        observers=watch.observers,
    )
    started = time.perf_counter()
    with watch.observers:
        trainer.fit()
    seconds, speed = time.perf_counter() - started, trainer.speed()
    trainer.release()
    result = _finish(resolved, trainer, test_groups, seconds)
    warnings = tuple(watch.health.signs)
    return replace(result, test_baseline=test_baseline, baselines=baselines, speed=speed, warnings=warnings)


def _claim(config: RewardTrainerConfig) -> None:
    """Take the run folder, once what can be told without data and model is right."""
    selection_of(config)
    require_monitoring(config)
    claim_folder(
        config.output_dir,
        (config.model, *config.dataset, *config.eval_dataset, *config.test_dataset),
        overwrite=config.overwrite,
    )


def _settle_budget(config: RewardTrainerConfig, model: RewardModel, data: Datasets) -> RewardTrainerConfig:
    """With a number in place of `--micro-token-budget auto`."""
    if config.micro_token_budget != "auto":
        return config
    largest = largest_cost([data.train], model.layout)
    choice = choose_budget(model, data.train, config, batch_size=config.batch_size, floor=largest)
    logger.info("micro-token budget: %d by trial (%s)", choice.budget, choice.reason)
    return replace(config, micro_token_budget=choice.budget)


def _baselines(
    config: RewardTrainerConfig, data: Datasets, test: Sequence[TokenGroup]
) -> dict[str, dict[str, EvalResult]]:
    judged = {"selection": data.eval, "test": test}
    if not config.baselines or not any(judged.values()):
        return {}
    found = fit_baselines(data.train, judged, seed=config.seed)
    for name, results in found.items():
        for on, result in results.items():
            logger.info(
                "baseline: %s: accuracy %s on %s data",
                name,
                format_estimate(result.overall.estimates["eval_accuracy"]),
                {"selection": "evaluation"}.get(on, on),
            )
    return found


def _judge_before(config: RewardTrainerConfig, model: RewardModel, test: Sequence[TokenGroup]) -> EvalResult | None:
    """The untrained model on the test data: nothing is chosen by it, it is the other half of a before-and-after."""
    if not test:
        return None
    result = evaluate_groups(
        model, test, beta=config.beta, budget=config.token_budget, progress="test data before training"
    )
    write_evaluation(config.output_dir / "evals", "test_before_training", result)
    return result


def _finish(
    config: RewardTrainerConfig, trainer: RewardTrainer, test: Sequence[TokenGroup], seconds: float
) -> TrainResult:
    """Verify the chosen model in a clean process and read the test data, once, with it."""
    last = config.output_dir / f"step_{trainer.step}"
    best = config.output_dir / "best" if trainer.best_step is not None else None
    if trainer.baseline is not None and best is None:
        logger.warning(
            "no checkpoint beat the untrained model on the evaluation data, so there is no best/; the last one is %s",
            last,
        )
    chosen = best or last
    verify_in_clean_process(chosen)
    logger.info("verified %s in a clean process", chosen)
    selected = test_result = None
    if trainer.data.eval or test:
        scorer = load(chosen, check=False)
        for name, groups in (("selection", trainer.data.eval), ("test", test)):
            if groups:
                result = evaluate_groups(
                    scorer.model,
                    groups,
                    beta=config.beta,
                    budget=config.token_budget,
                    progress=f"judging on {name} data",
                )
                write_evaluation(config.output_dir / "evals", name, result)
                selected, test_result = (result, test_result) if name == "selection" else (selected, result)
    return TrainResult(
        output_dir=config.output_dir,
        best=best,
        best_step=trainer.best_step,
        last=last,
        baseline=trainer.baseline,
        selected=selected,
        test_baseline=None,
        test=test_result,
        baselines={},
        train_seconds=seconds,
        speed="",
        warnings=(),
    )


def _resolve(
    config: RewardTrainerConfig, base: Base, *, num_groups: int, device: torch.device, layout: Layout
) -> RewardTrainerConfig:
    """The configuration with every default decided: what is printed, hashed, saved and, on resuming, reused."""
    steps = config.steps
    if steps is None:
        steps = max(1, round(config.epochs * steps_per_epoch(num_groups, config.batch_size)))
    precision = resolve_precision(config.precision, device)
    compute = choose_compute(
        config, base.config.get_text_config(), device=device, dtype=PRECISION[precision], log=logger.info
    )
    decided: dict[str, Any] = compute | {
        "overwrite": False,  # a permission for this run, not part of what it is
        "steps": steps,
        "lr": config.learning_rate,
        "warmup_steps": warmup_steps(config, steps),
        "warmup_ratio": None,
        "precision": precision,
        "attention": "padded" if layout == "padded" else "shared",
        "eval_every": config.eval_every or max(1, steps // 10),
        "save_dtype": str(saved_dtype(config.save_dtype)).removeprefix("torch."),
    }
    return replace(config, **decided)


def _write_run_start(
    config: RewardTrainerConfig,
    renderer: Renderer,
    data: Datasets,
    prepared: Prepared,
    tokens: dict[str, TokenReport],
    peak: Peak,
) -> None:
    folder = config.output_dir
    clear_folder(folder)
    write_json(folder / "config.json", to_mapping(config))
    write_json(
        folder / "manifest.json",
        {
            "config_hash": config_hash(config),
            "data": prepared.reports,
            "tokens": {name: report.as_dict() for name, report in tokens.items()},
            "peak": {"flops_per_second": peak.flops, "source": peak.source},
            "template_hash": renderer.spec.template_hash,
            "provenance": provenance(),
        },
    )
    write_text(folder / "samples.txt", _samples(data.train[: config.log_samples], renderer))
    shown = ", ".join(f"{name}={value}" for name, value in to_mapping(config).items() if value not in (None, [], False))
    logger.info(
        textwrap.fill(
            f"configuration {config_hash(config)}: {shown}", width=100, subsequent_indent="  ", break_on_hyphens=False
        )
    )


def _samples(groups: Sequence[TokenGroup], renderer: Renderer) -> str:
    """Rendered replies as decoded tokens, the borders between tokens visible."""
    lines = []
    for group in groups:
        for reply in range(group.num_replies):
            pieces = [renderer.tokenizer.decode([int(token)]) for token in group.conversation(reply)]
            boundary = group.prompt_tokens[reply]
            lines += [
                f"=== {group.preference_id}  reply {reply}  {len(pieces)} tokens, {boundary} before the reply, "
                f"{len(group.shared)} shared, {group.truncated_tokens[reply]} cut ===",
                "|".join(pieces[:boundary]) + "⟦reply⟧" + "|".join(pieces[boundary:]) + "⟦score read here⟧",
                "",
            ]
        lines += [f"judged: {[(c.first, c.second, c.label) for c in group.comparisons]}", ""]
    return "\n".join(lines)
