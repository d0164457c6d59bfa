"""`rewardlab train` from a configuration to a verified reward model.

Everything that can be wrong with flags, data or the output folder is found before the model is loaded.
"""

from __future__ import annotations

import logging
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rewardlab.artifact.canaries import render_canaries
from rewardlab.artifact.load import load
from rewardlab.artifact.save import (
    NOTABLE_ROUNDING,
    choose_pad,
    save_reward_model,
    saved_dtype,
    verify_in_clean_process,
)
from rewardlab.core.config import config_hash, to_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import provenance, remove, require_writable_folder, write_json, write_text
from rewardlab.core.types import Preference, TokenGroup
from rewardlab.data.chat import Renderer, build_renderer, load_tokenizer
from rewardlab.data.loader import TokenReport, steps_per_epoch, tokenize, weigh
from rewardlab.data.pack import require_fit
from rewardlab.data.sources import LoadedPreferences, first_rows, load_preferences, shared_prompts, split_by_prompt
from rewardlab.model.builtin import resolve_model_name
from rewardlab.model.load import choose_layout, disk_class_of, load_reward_model, read_config, resolve_precision
from rewardlab.model.reward import Layout
from rewardlab.training.compat import settle_reading
from rewardlab.training.config import RewardTrainerConfig
from rewardlab.training.evaluate import EvalResult, evaluate_groups, write_evaluation
from rewardlab.training.records import Records
from rewardlab.training.reward_trainer import Datasets, RewardTrainer

logger = logging.getLogger("rewardlab")
FEW_EVALUATIONS = 50
"""Below this, an accuracy is uncertain by ±14 points or more."""
RUN_FILES = (
    "config.json",
    "manifest.json",
    "metrics.csv",
    "metrics.jsonl",
    "reward_distributions.json",
    "samples.txt",
    "report.txt",
    "evals",
    "best",
)


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
    train_seconds: float

    @property
    def model(self) -> Path:
        """`best`, or the last step's folder."""
        return self.best if self.best is not None else self.last


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    train: LoadedPreferences
    eval: Sequence[Preference]
    test: Sequence[Preference]
    reports: dict[str, Any]


def train(config: RewardTrainerConfig) -> TrainResult:
    """Train a reward model as `config` says; see docs/api.md.

    Raises RewardlabError for anything the user can mend; nothing of an earlier run is overwritten unless asked.
    """
    _claim_folder(config)
    config = settle_reading(config, _first_rows(config))
    prepared = _load_data(config)
    path = resolve_model_name(config.model, logger.info)
    model_config = read_config(path, trust_remote_code=config.trust_remote_code)
    disk_class = disk_class_of(model_config)
    _require_positions(config, model_config)
    renderer = build_renderer(load_tokenizer(path, trust_remote_code=config.trust_remote_code), config)
    render_canaries(renderer)
    choose_pad(renderer, model_config.get_text_config().vocab_size)
    data, test_groups, tokens = _tokenize(config, prepared, renderer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layout = choose_layout(
        model_config, disk_class, config, max_length=config.max_seq_len, share=config.shares_prompts, log=logger.info
    )
    require_fit([*data.train, *data.eval, *test_groups], config.micro_token_budget, layout=layout)
    resolved = _resolve(config, num_groups=len(data.train), device=device, layout=layout)

    torch.manual_seed(resolved.seed)
    model = load_reward_model(
        path,
        resolved,
        seed=resolved.seed,
        layout=layout,
        device=device,
        log=logger.info,
    )
    _write_run_start(resolved, renderer, data, prepared, tokens)
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

    assert resolved.steps is not None
    trainer = RewardTrainer(
        resolved, model, data, num_steps=resolved.steps, records=Records(resolved.output_dir), save=save
    )
    test_baseline = None
    if test_groups:  # nothing is chosen by it: the other half of a before-and-after
        test_baseline = evaluate_groups(
            model,
            test_groups,
            beta=resolved.beta,
            budget=resolved.micro_token_budget,
            progress="test data before training",
        )
        write_evaluation(resolved.output_dir / "evals", "test_before_training", test_baseline)
    started = time.perf_counter()
    trainer.fit()
    trainer.release()
    result = _finish(resolved, trainer, test_groups, time.perf_counter() - started)
    return replace(result, test_baseline=test_baseline)


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
                    budget=config.micro_token_budget,
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
        train_seconds=seconds,
    )


def _claim_folder(config: RewardTrainerConfig) -> None:
    folder = config.output_dir
    require_writable_folder(folder, "--output-dir")
    for name in (config.model, *config.dataset, *config.eval_dataset, *config.test_dataset):
        path = Path(name)
        if path.exists() and any(
            (folder / own).resolve() in (path.resolve(), *path.resolve().parents)
            for own in (*RUN_FILES, *(p.name for p in folder.glob("step_*")))
        ):
            raise ConfigError(
                f"{name} lies in the run that --output-dir {folder} would replace. Choose another folder."
            )
    if not any((folder / name).exists() for name in RUN_FILES) and not list(folder.glob("step_*")):
        return
    if not config.overwrite:
        raise ConfigError(f"{folder} already holds a run. Choose another --output-dir, or replace it with --overwrite.")


def _require_positions(config: RewardTrainerConfig, model_config: Any) -> None:
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and config.max_seq_len > positions:
        raise ConfigError(
            f"--max-seq-len {config.max_seq_len} is above the {positions} positions of this model. Use at most "
            f"{positions}."
        )


def _clear_folder(folder: Path) -> None:
    """Remove an earlier run, and what an interrupted save left; other files stay."""
    for path in folder.iterdir():
        if path.name in RUN_FILES or re.fullmatch(r"step_\d+|\.(best|step_\d+)\.(tmp|old)-\d+", path.name):
            remove(path)


def _first_rows(config: RewardTrainerConfig) -> Sequence[tuple[str, Mapping[str, object]]]:
    """Of all data that are named, where conventions depend on it."""
    if config.compat == "none":
        return ()
    named = (
        (config.dataset, config.hf_split),
        (config.eval_dataset, config.eval_split or "test"),
        (config.test_dataset, config.test_split or "test"),
    )
    return [row for names, split in named if names for row in first_rows(names, split)]


def _load_data(config: RewardTrainerConfig) -> _Prepared:
    def read(names: Sequence[str], split: str, limit: int | None) -> LoadedPreferences:
        return load_preferences(
            names, split=split, config=config, seed=config.seed, limit=limit, kwise_loss=config.kwise_loss
        )

    train = read(config.dataset, config.hf_split, config.limit)
    sources = {"train": train.reports}
    reports: dict[str, Any] = {}
    evaluation: Sequence[Preference] = ()
    test: Sequence[Preference] = ()
    if config.test_dataset or config.test_split:
        names = config.test_dataset or _with_splits(config.dataset, "test")
        loaded = read(names, config.test_split or "test", config.eval_limit)
        test, sources["test"] = loaded.preferences, loaded.reports
    if config.eval_dataset or config.eval_split:
        names = config.eval_dataset or _with_splits(config.dataset, "eval")
        loaded = read(names, config.eval_split or "test", config.eval_limit)
        evaluation, sources["eval"] = loaded.preferences, loaded.reports
    elif config.eval_fraction > 0:
        kept, held_out = split_by_prompt(train.preferences, fraction=config.eval_fraction, seed=config.seed)
        train = replace(train, preferences=kept)
        evaluation = _draw(held_out, config.eval_limit, config.seed)
        reports["held_out"] = {"evaluated": len(evaluation), "not_used": len(held_out) - len(evaluation)}
    for name, preferences in (("evaluation", evaluation), ("test", test)):
        if common := shared_prompts(train.preferences, preferences):
            logger.warning(
                "%d prompts of the %s data are also in the training data; its numbers flatter the model",
                len(common),
                name,
            )
            reports[f"prompts_shared_with_{name}"] = len(common)
    if 0 < len(evaluation) < FEW_EVALUATIONS:
        logger.warning(
            "only %d evaluation rows: too few to choose a checkpoint by; name more with --eval-dataset or "
            "--eval-fraction",
            len(evaluation),
        )
    for name, parts in sources.items():
        reports[name] = [report.as_dict() for report in parts]
        for report in parts:
            _log_source(report)
    return _Prepared(train=train, eval=evaluation, test=test, reports=reports)


def _with_splits(names: Sequence[str], kind: str) -> Sequence[str]:
    """The training datasets, to be read with another split; ConfigError for a lone file, which has none."""
    for name in names:
        if Path(name).is_file():
            raise ConfigError(
                f"--{kind}-split: {name} is one file and has no splits, so it would be read again. Name the data with "
                f"--{kind}-dataset."
            )
    return names


Row = TypeVar("Row")


def _draw(rows: Sequence[Row], limit: int | None, seed: int) -> Sequence[Row]:
    """At most `limit` rows, drawn with the seed, in their own order."""
    if limit is None or limit >= len(rows):
        return rows
    return [rows[index] for index in sorted(np.random.default_rng((seed, len(rows))).permutation(len(rows))[:limit])]


def _log_source(report: Any) -> None:
    dropped = ", ".join(f"{cause} {count}" for cause, count in report.dropped.items()) or "none"
    logger.info(
        "data: %s[%s]: %d rows read, %d kept, dropped: %s",
        report.name,
        report.split,
        report.rows_read,
        report.kept,
        dropped,
    )


def _tokenize(
    config: RewardTrainerConfig, prepared: _Prepared, renderer: Renderer
) -> tuple[Datasets, Sequence[TokenGroup], dict[str, TokenReport]]:
    reports: dict[str, TokenReport] = {}

    def groups_of(preferences: Sequence[Preference], name: str) -> list[TokenGroup]:
        if not preferences:
            return []
        groups, reports[name] = tokenize(
            preferences,
            renderer,
            max_drop_fraction=config.max_drop_fraction,
            name=f"{name} data",
            overlong=config.overlong,
        )
        report = reports[name]
        logger.info(
            "tokens: %s: %d preferences, %d tokens, %.2f times fewer than without sharing; longest %d, cut %d",
            name,
            report.kept,
            report.tokens,
            report.unshared_tokens / max(report.tokens, 1),
            report.longest,
            report.truncated_replies,
        )
        if report.dropped:
            causes = ", ".join(f"{cause} {count}" for cause, count in report.dropped.items())
            logger.info("tokens: %s: %d preferences left out: %s", name, report.preferences - report.kept, causes)
        return groups

    train_groups = weigh(groups_of(prepared.train.preferences, "training"), by=config.kwise_weight)
    data = Datasets(
        train=train_groups,
        eval=groups_of(prepared.eval, "evaluation"),
        train_eval=_draw(train_groups, config.train_eval_limit, config.seed),
    )
    return data, groups_of(prepared.test, "test"), reports


def _resolve(
    config: RewardTrainerConfig, *, num_groups: int, device: torch.device, layout: Layout
) -> RewardTrainerConfig:
    """The configuration with every default decided: what is printed, hashed, saved and, on resuming, reused."""
    steps = config.steps
    if steps is None:
        steps = max(1, round(config.epochs * steps_per_epoch(num_groups, config.batch_size)))
    decided: dict[str, Any] = {
        "overwrite": False,  # a permission for this run, not part of what it is
        "steps": steps,
        "lr": config.learning_rate,
        "precision": resolve_precision(config.precision, device),
        "attention": "padded" if layout == "padded" else "shared",
        "eval_every": config.eval_every or max(1, steps // 10),
        "save_dtype": str(saved_dtype(config.save_dtype)).removeprefix("torch."),
    }
    return replace(config, **decided)


def _write_run_start(
    config: RewardTrainerConfig, renderer: Renderer, data: Datasets, prepared: _Prepared, tokens: dict[str, TokenReport]
) -> None:
    folder = config.output_dir
    _clear_folder(folder)
    write_json(folder / "config.json", to_mapping(config))
    write_json(
        folder / "manifest.json",
        {
            "config_hash": config_hash(config),
            "data": prepared.reports,
            "tokens": {name: report.as_dict() for name, report in tokens.items()},
            "template_hash": renderer.spec.template_hash,
            "provenance": provenance(),
        },
    )
    write_text(folder / "samples.txt", _samples(data.train[: config.log_samples], renderer))
    shown = ", ".join(f"{name}={value}" for name, value in to_mapping(config).items() if value not in (None, [], False))
    logger.info(textwrap.fill(f"configuration {config_hash(config)}: {shown}", width=100, subsequent_indent="  "))


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
