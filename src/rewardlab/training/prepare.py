"""Datasets by name -> preferences and token groups for training, evaluation and test, every row accounted for."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rewardlab.artifact.canaries import render_canaries
from rewardlab.artifact.save import choose_pad
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.data.cache import Cache, key_of
from rewardlab.data.chat import Renderer, build_renderer, load_tokenizer
from rewardlab.data.config import DataConfig, SelectionConfig
from rewardlab.data.formats import Rules
from rewardlab.data.groups import Groups, Part
from rewardlab.data.loader import TokenReport, report_of, require_enough
from rewardlab.data.pipeline import write_store
from rewardlab.data.readers import Source, find_sources, fingerprint, has_lines
from rewardlab.data.sources import SourceReport, Tally, chosen_by_limit, first_rows, held_out_mask, open_units
from rewardlab.data.store import TokenStore
from rewardlab.data.workers import Crew, available_cores
from rewardlab.model.builtin import BUILTIN_NAMES, cache_folder, resolve_model_name
from rewardlab.model.config import BackboneConfig
from rewardlab.model.load import disk_class_of, read_config
from rewardlab.training.config import RewardTrainerConfig
from rewardlab.training.reward_trainer import Datasets

logger = logging.getLogger("rewardlab")
FEW_EVALUATIONS = 50
"""Below this, an accuracy is uncertain by ±14 points or more."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Data by what they are for, tokenised, and what the manifest says of them."""

    train: Part
    eval: Part
    test: Part
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


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """Datasets to read for one purpose."""

    purpose: str
    """`train`, `eval` or `test`."""
    names: Sequence[str]
    split: str
    limit: int | None


def _all_wanted(config: DataConfig) -> list[_Wanted]:
    """What the configuration names. ConfigError for a split of a lone file."""
    wanted = [_Wanted(purpose="train", names=config.dataset, split=config.hf_split, limit=config.limit)]
    named = [("test", config.test_dataset, config.test_split)]
    if isinstance(config, SelectionConfig):
        named.append(("eval", config.eval_dataset, config.eval_split))
    for purpose, names, split in named:
        if names or split:
            found = names or _with_splits(config.dataset, purpose)
            wanted.append(_Wanted(purpose=purpose, names=found, split=split or "test", limit=config.eval_limit))
    return wanted


def require_inputs(model: BackboneConfig, data: DataConfig) -> None:
    """Raise ModelError, DataError or ConfigError for a model or data that are not there: said before a folder is
    claimed for what is made of them.
    """
    require_sources(data)
    if model.model.lower() not in BUILTIN_NAMES:
        read_config(model.model, trust_remote_code=model.trust_remote_code)


def require_sources(config: DataConfig) -> None:
    """Raise DataError or ConfigError for what shows at once: a dataset that is not there or has no known layout."""
    for wanted in _all_wanted(config):
        for source in find_sources(wanted.names, wanted.split):
            if has_lines(source):
                open_units(source)


def load_data(config: DataConfig, renderer: Renderer, *, seed: int, kwise_loss: str = "pairs") -> Prepared:
    """Read and tokenise what the configuration names; `eval` stays empty unless it says how a checkpoint is chosen.

    Raises DataError or ConfigError for what cannot be used. Prompts shared with the training data are warned about.
    """
    parts: dict[str, Part] = {}
    reports: dict[str, Any] = {"preparation": []}
    sources: list[SourceReport] = []
    with Crew(available_cores() if config.num_workers is None else config.num_workers) as crew:
        for wanted in _all_wanted(config):
            prepared = [
                _prepare(
                    source,
                    Rules(source=source.name, config=config, seed=seed, kwise_loss=kwise_loss),
                    wanted.limit,
                    renderer,
                    crew,
                )
                for source in find_sources(wanted.names, wanted.split)
            ]
            parts[wanted.purpose] = Part.join([(done.store, done.numbers) for done in prepared])
            reports[wanted.purpose] = [done.report.as_dict() for done in prepared]
            reports["preparation"] += [done.preparation for done in prepared]
            sources += [done.report for done in prepared]
    train = parts["train"]
    evaluation, test = (parts.get(purpose, train.take(np.empty(0, np.int64))) for purpose in ("eval", "test"))
    if isinstance(config, SelectionConfig) and "eval" not in parts and config.eval_fraction > 0:
        mask = held_out_mask(train.prompt_keys(), fraction=config.eval_fraction, seed=seed)
        held_out, train = train.take(mask), train.take(~mask)
        evaluation = draw(held_out, config.eval_limit, seed)
        reports["held_out"] = {"evaluated": len(evaluation), "not_used": len(held_out) - len(evaluation)}
    reports |= _shared_prompts(train, evaluation, test)
    if 0 < len(evaluation) < FEW_EVALUATIONS:
        logger.warning(
            "only %d evaluation rows: too few to choose a checkpoint by; name more with --eval-dataset or "
            "--eval-fraction",
            len(evaluation),
        )
    for report in sources:
        _log_source(report)
    return Prepared(train=train, eval=evaluation, test=test, reports=reports)


@dataclass(frozen=True, kw_only=True)
class _Done:
    """A dataset, prepared."""

    store: TokenStore
    numbers: npt.NDArray[np.int64]
    """Of its preferences that are used, in their order."""
    report: SourceReport
    preparation: dict[str, object]


def _prepare(source: Source, rules: Rules, limit: int | None, renderer: Renderer, crew: Crew) -> _Done:
    """A dataset from the cache, or read, tokenised and kept there; says how long it took.

    Raises DataError for what cannot be read, and where too many rows would be dropped.
    """
    started = time.perf_counter()
    content, overlong = fingerprint(source), rules.config.overlong
    cache = Cache(_cache_folder(rules.config.cache_dir) if content else None)

    def key(of_limit: int | None) -> str:
        return key_of(source, content or "", rules=rules, limit=of_limit, renderer=renderer, overlong=overlong)

    def write(folder: Path) -> None:
        write_store(folder, source, rules=rules, limit=limit, renderer=renderer, overlong=overlong, crew=crew)
        if source.path is not None and content != fingerprint(source):
            raise DataError(f"{source.label} changed while it was read. Start again when it is complete.")

    whole = cache.find(key(None)) if limit is not None else None
    store, made = (whole, False) if whole is not None else cache.make(key(limit), write)
    tally = Tally.from_dict(store.facts)
    chosen = chosen_by_limit(rules, tally.kept, limit)
    # A store that was written for a limit holds the chosen preferences alone, in the order of the file.
    numbers = np.argsort(np.argsort(chosen)) if limit is not None and whole is None else chosen
    seconds = time.perf_counter() - started
    sha256 = content if source.path else None
    report = tally.report(source, used=len(chosen), sha256=sha256)
    _log_preparation(source, made, report.rows_read, len(chosen), seconds)
    report.require_usable(source.label, rules.config.max_drop_fraction)
    preparation = {"name": source.name, "from_cache": not made, "seconds": round(seconds, 3)}
    return _Done(store=store, numbers=numbers, report=report, preparation=preparation)


def _cache_folder(setting: str) -> Path | None:
    """Where prepared data are kept; None for nowhere."""
    if setting == "none":
        return None
    return cache_folder(os.environ) / "tokens" if setting == "auto" else Path(setting).expanduser().absolute()


def _log_preparation(source: Source, made: bool, num_rows: int, num_used: int, seconds: float) -> None:
    name = f"{source.name}[{source.split}]"
    if made:
        rate = num_used / max(seconds, 1e-9)
        logger.info("prepared: %s: %d rows in %.1f s, %.0f preferences/s", name, num_rows, seconds, rate)
    else:
        logger.info("prepared: %s: read from cache in %.1f s", name, seconds)


def _shared_prompts(train: Part, evaluation: Part, test: Part) -> dict[str, int]:
    """Counts, with a warning each, of prompts that two kinds of data have in common."""
    counts = {}
    for data, other, key, what in (
        (evaluation, train, "prompts_shared_with_evaluation", "evaluation data are also in the training data"),
        (test, train, "prompts_shared_with_test", "test data are also in the training data"),
        (test, evaluation, "test_prompts_shared_with_evaluation", "test data are also in the evaluation data"),
    ):
        if common := len(np.intersect1d(other.prompt_keys(), data.prompt_keys())):
            logger.warning("%d prompts of the %s; its numbers flatter the model", common, what)
            counts[key] = common
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


Rows = TypeVar("Rows", Part, Groups)


def draw(rows: Rows, limit: int | None, seed: int) -> Rows:
    """At most `limit` rows, drawn with the seed, in their own order."""
    if limit is None or limit >= len(rows):
        return rows
    return rows.take(np.sort(np.random.default_rng((seed, len(rows))).permutation(len(rows))[:limit]))


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


def token_groups(part: Part, renderer: Renderer, config: DataConfig, name: str) -> tuple[Groups, TokenReport]:
    """The groups of a part of the data, and in one line what came of it.

    Raises DataError if too many rows cannot be used.
    """
    report = report_of(part)
    require_enough(report, config.max_drop_fraction, f"{name} data", renderer.spec.max_length)
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
    return part.groups(), report


def to_groups(
    config: RewardTrainerConfig, prepared: Prepared, renderer: Renderer
) -> tuple[Datasets, Groups, dict[str, TokenReport]]:
    """(training and evaluation data, test data, what tokenising did to each)."""
    groups: dict[str, Groups] = {}
    reports: dict[str, TokenReport] = {}
    parts = {"training": prepared.train, "evaluation": prepared.eval, "test": prepared.test}
    for name, part in parts.items():
        if len(part):
            groups[name], reports[name] = token_groups(part, renderer, config, name)
    train = groups["training"]
    if config.kwise_weight == "prompt":
        train = train.weighed()
    nothing = train.take(np.empty(0, np.int64))
    data = Datasets(
        train=train,
        eval=groups.get("evaluation", nothing),
        train_eval=draw(train, config.train_eval_limit, config.seed),
    )
    return data, groups.get("test", nothing), reports
