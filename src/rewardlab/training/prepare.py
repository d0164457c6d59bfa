"""Datasets by name -> preferences and token groups for training, evaluation and test, every row accounted for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rewardlab.artifact.canaries import render_canaries
from rewardlab.artifact.save import choose_pad
from rewardlab.core.errors import ConfigError
from rewardlab.core.types import Preference, TokenGroup
from rewardlab.data.chat import Renderer, build_renderer, load_tokenizer
from rewardlab.data.config import DataConfig, SelectionConfig
from rewardlab.data.loader import TokenReport, tokenize, weigh
from rewardlab.data.sources import LoadedPreferences, first_rows, load_preferences, shared_prompts, split_by_prompt
from rewardlab.model.builtin import resolve_model_name
from rewardlab.model.config import BackboneConfig
from rewardlab.model.load import disk_class_of, read_config
from rewardlab.training.config import RewardTrainerConfig
from rewardlab.training.reward_trainer import Datasets

logger = logging.getLogger("rewardlab")
FEW_EVALUATIONS = 50
"""Below this, an accuracy is uncertain by ±14 points or more."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Preferences by what they are for, and what the manifest says of them."""

    train: LoadedPreferences
    eval: Sequence[Preference]
    test: Sequence[Preference]
    reports: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Base:
    """A model before its weights are read: enough to tokenise for it."""

    path: str
    config: Any
    """Of transformers."""
    disk_class: Any
    """The sequence-classification class that it is saved as."""
    renderer: Renderer


def open_base(model: BackboneConfig, data: DataConfig) -> Base:
    """Find the model and build its renderer.

    Raises ModelError, RenderError or ArtifactError for a model that could not be saved as a reward model, ConfigError
    for a limit beyond its positions.
    """
    path = resolve_model_name(model.model, logger.info)
    config = read_config(path, trust_remote_code=model.trust_remote_code)
    disk_class = disk_class_of(config)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and data.max_seq_len > positions:
        raise ConfigError(
            f"--max-seq-len {data.max_seq_len} is above the {positions} positions of this model. Use at most "
            f"{positions}."
        )
    renderer = build_renderer(load_tokenizer(path, trust_remote_code=model.trust_remote_code), data)
    render_canaries(renderer)
    choose_pad(renderer, config.get_text_config().vocab_size)
    return Base(path=path, config=config, disk_class=disk_class, renderer=renderer)


def first_rows_of(config: SelectionConfig) -> Sequence[tuple[str, Mapping[str, object]]]:
    """(dataset, its first row) of all data that are named."""
    named = (
        (config.dataset, config.hf_split),
        (config.eval_dataset, config.eval_split or "test"),
        (config.test_dataset, config.test_split or "test"),
    )
    return [row for names, split in named if names for row in first_rows(names, split)]


def load_data(config: DataConfig, *, seed: int, kwise_loss: str = "pairs") -> Prepared:
    """Read what the configuration names; `eval` stays empty unless it says how a checkpoint is chosen.

    Raises DataError or ConfigError for what cannot be used. Prompts shared with the training data are warned about.
    """

    def read(names: Sequence[str], split: str, limit: int | None) -> LoadedPreferences:
        return load_preferences(names, split=split, config=config, seed=seed, limit=limit, kwise_loss=kwise_loss)

    train = read(config.dataset, config.hf_split, config.limit)
    sources = {"train": train.reports}
    reports: dict[str, Any] = {}
    evaluation: Sequence[Preference] = ()
    test: Sequence[Preference] = ()
    if config.test_dataset or config.test_split:
        names = config.test_dataset or _with_splits(config.dataset, "test")
        loaded = read(names, config.test_split or "test", config.eval_limit)
        test, sources["test"] = loaded.preferences, loaded.reports
    if isinstance(config, SelectionConfig):
        if config.eval_dataset or config.eval_split:
            names = config.eval_dataset or _with_splits(config.dataset, "eval")
            loaded = read(names, config.eval_split or "test", config.eval_limit)
            evaluation, sources["eval"] = loaded.preferences, loaded.reports
        elif config.eval_fraction > 0:
            kept, held_out = split_by_prompt(train.preferences, fraction=config.eval_fraction, seed=seed)
            train = replace(train, preferences=kept)
            evaluation = draw(held_out, config.eval_limit, seed)
            reports["held_out"] = {"evaluated": len(evaluation), "not_used": len(held_out) - len(evaluation)}
    reports |= _shared_prompts(train.preferences, evaluation, test)
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
    return Prepared(train=train, eval=evaluation, test=test, reports=reports)


def _shared_prompts(
    train: Sequence[Preference], evaluation: Sequence[Preference], test: Sequence[Preference]
) -> dict[str, int]:
    """Counts, with a warning each, of prompts that two kinds of data have in common."""
    counts = {}
    for data, other, key, what in (
        (evaluation, train, "prompts_shared_with_evaluation", "evaluation data are also in the training data"),
        (test, train, "prompts_shared_with_test", "test data are also in the training data"),
        (test, evaluation, "test_prompts_shared_with_evaluation", "test data are also in the evaluation data"),
    ):
        if common := shared_prompts(other, data):
            logger.warning("%d prompts of the %s; its numbers flatter the model", len(common), what)
            counts[key] = len(common)
    return counts


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


def draw(rows: Sequence[Row], limit: int | None, seed: int) -> Sequence[Row]:
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


def token_groups(
    preferences: Sequence[Preference], renderer: Renderer, config: DataConfig, name: str
) -> tuple[list[TokenGroup], TokenReport]:
    """Render and tokenise, and say in one line what came of it.

    Raises DataError if too many rows cannot be used.
    """
    groups, report = tokenize(
        preferences,
        renderer,
        max_drop_fraction=config.max_drop_fraction,
        name=f"{name} data",
        overlong=config.overlong,
    )
    logger.info(
        "tokens: %s: %d preferences, %d tokens, %.2f times fewer than unshared; longest %d, cut %d",
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
    return groups, report


def tokenize_all(
    config: RewardTrainerConfig, prepared: Prepared, renderer: Renderer
) -> tuple[Datasets, Sequence[TokenGroup], dict[str, TokenReport]]:
    """(training and evaluation data, test data, what tokenising did to each)."""
    groups: dict[str, list[TokenGroup]] = {}
    reports: dict[str, TokenReport] = {}
    parts = {"training": prepared.train.preferences, "evaluation": prepared.eval, "test": prepared.test}
    for name, preferences in parts.items():
        if preferences:
            groups[name], reports[name] = token_groups(preferences, renderer, config, name)
    train = weigh(groups["training"], by=config.kwise_weight)
    data = Datasets(
        train=train,
        eval=groups.get("evaluation", []),
        train_eval=draw(train, config.train_eval_limit, config.seed),
    )
    return data, groups.get("test", []), reports
