"""The controls as training runs: a folder for each control and seed. Interrupted runs are resumed, finished ones
kept."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from rewardlab.artifact.base import open_base, settle_rendering
from rewardlab.artifact.load import load
from rewardlab.core.config import from_mapping, read_settings, settings_of, to_mapping
from rewardlab.core.earlier_names import renamed
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_json, sha256_file, write_json
from rewardlab.core.run_folder import MANIFEST
from rewardlab.core.types import ScoreRow, join_comparisons
from rewardlab.data.dataset_names import all_named, first_rows_of
from rewardlab.data.finding import Source
from rewardlab.data.prepare import load_data, token_groups
from rewardlab.data.reading import read_named
from rewardlab.data.splits import Texts, find_roots
from rewardlab.data.template_files import template_of
from rewardlab.diagnosing.arms import Arm
from rewardlab.diagnosing.config import DiagnoseConfig
from rewardlab.evaluation.evaluate import EvalResult, evaluate_groups
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.settings.conventions import Conventions, settle_reading

logger = logging.getLogger("rewardlab")
DONE: Final = "control.json"
"""The file in the folder of a finished run with its outcomes on held-out conversations."""
MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "full": {},
    # Only its last step is judged: a checkpoint that the true labels of the held-out conversations choose is not at
    # chance on them, whatever the shuffled labels taught.
    "label_shuffle": {
        "diagnostic_mode": "label_shuffle",
        "diagnostic_shuffle_rate": 0.5,
        "eval_every": 1_000_000,
        "early_stopping_patience": None,
    },
    "prompt_only": {"diagnostic_mode": "prompt_only"},
    "response_only": {"diagnostic_mode": "response_only"},
    "random_negatives": {"diagnostic_mode": "random_negatives"},
    "length_matched": {"diagnostic_mode": "length_matched"},
}
"""Control -> the settings of its runs. `random_subset` follows, with as many rows as were of equal length."""
SELECTING: Final = ("random_negatives", "length_matched", "random_subset")
"""Runs whose data may be too few to train on."""
HELD_OUT: Final = 0.3
"""Share of the conversations that a run holds out unless `--train-config` says otherwise. It is large, since verdicts
are based on held-out conversations."""
FEWEST: Final = 10
"""The smallest number of held-out comparisons for which runs are worth their time."""
BASELINES: Final[Mapping[str, str]] = {"length only": "length_only", "bag of words": "bag_of_words"}


def run_trained(
    config: DiagnoseConfig, seeds: Sequence[int], folder: Path, *, given: Collection[str] = ()
) -> tuple[dict[str, Arm], dict[str, Arm], dict[str, Any]]:
    """Return (control -> accuracies of its runs on held-out conversations, the same on test data, facts).

    Each seed decides what is held out, what a control draws and the order of training. Raises as
    `rewardlab.training.run.train` does; interrupted runs are resumed when diagnose is called again.
    """
    outcomes: dict[str, list[Mapping[str, float]]] = {}
    elsewhere: dict[str, list[Mapping[str, float]]] = {}
    not_run: dict[str, str] = {}
    for seed in seeds:
        kept = 1.0
        for name in (*MODES, "random_subset"):
            settings = _settings(config, name, seed, folder / name / f"seed_{seed}", kept, given)
            if settings is None or name in not_run:
                continue
            done, why = _run_or_why(settings, name)
            if why is not None:
                not_run[name] = f"with seed {seed}, {why}"
            if name == "length_matched":
                kept = float(done.get("kept", 1.0))
            for of, found in (("selection", outcomes), ("test", elsewhere)):
                for control, right in _told(name, done, of):
                    found.setdefault(control, []).append(right)
    if "random_subset" in not_run:
        not_run.setdefault("length_matched", not_run["random_subset"])
    of_prompts = _conversations(config, seeds, folder, given)
    arms = _arms(outcomes, len(seeds), of_prompts["selection"])
    if "full" not in arms:
        raise DataError("--train: of some seed nothing but ties was held out, so there is no accuracy. Name more data.")
    test = _arms(elsewhere, len(seeds), of_prompts.get("test", {}))
    return arms, test, {"runs": str(folder), "not_run": not_run}


def _require_enough(done: Mapping[str, Any], settings: RewardTrainerConfig) -> None:
    """Raise DataError, before many more runs, if a run holds out too few comparisons to decide anything."""
    selection = settings.data.selection
    if 0 < (count := len(done.get("selection", {}))) < FEWEST and not selection.eval_dataset:
        raise DataError(
            f"--train: a run holds out {count} comparisons, which can decide nothing; {FEWEST} are the least. Raise "
            f"eval_fraction ({selection.eval_fraction:g}) in --train-config, or give more data, and choose another "
            f"--output-dir."
        )


def _run_or_why(settings: RewardTrainerConfig, name: str) -> tuple[Mapping[str, Any], str | None]:
    """Return (the outcomes of a run, empty if the control is left out; the reason for that, or None).

    A control may leave too few rows to train on; that must not stop the other controls.
    """
    try:
        done = _run(settings)
    except DataError as error:
        if name not in SELECTING:
            raise
        logger.warning("control: %s is left out: %s", name, error)
        return {}, str(error).rstrip(".")
    if name == "full":
        _require_enough(done, settings)
    if name == "length_matched" and done["kept"] >= 1:
        return {}, (
            f"in all comparisons the replies are about equally long, since they differ by fewer than "
            f"{settings.data.diagnostic.diagnostic_length_threshold} tokens (--diagnostic-length-threshold)"
        )
    return done, None


def sources_of(config: DiagnoseConfig, folder: Path, *, given: Collection[str] = ()) -> Iterator[Source]:
    """Yield the datasets that the runs read."""
    settings = _settings(config, "full", config.run.seed, folder, 1.0, given)
    assert settings is not None
    for named in all_named(settings.data):
        yield from named.sources()


def _told(name: str, done: Mapping[str, Any], of: str) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield (control, outcomes) of a run on its `selection` or `test` data: for itself and for what it is compared
    with."""
    beside = {"": name, " changed": f"{name}_changed"}
    if name == "full":
        beside |= {f" {baseline}": control for baseline, control in BASELINES.items()}
    for ending, control in beside.items():
        if f"{of}{ending}" in done:
            yield control, done[f"{of}{ending}"]


def _settings(
    config: DiagnoseConfig, name: str, seed: int, folder: Path, kept: float, given: Collection[str] = ()
) -> RewardTrainerConfig | None:
    """Return the settings of a run; None for a random subset if all pairs are of equal length.

    The file of `--train-config` says what neither is among `given` nor has another value than its default.
    """
    values = read_train_config(config.run.train_config)
    values |= winning(config, given)
    values |= {"output_dir": str(folder), "seed": seed, "diagnostic_seed": seed, "resume": "auto", "overwrite": False}
    values["dry_run"] = False
    values |= MODES.get(name, {})
    if name == "random_subset":
        if kept >= 1:
            return None
        rows = _rows_of(folder.parent.parent / "full" / f"seed_{seed}")
        values["limit"] = max(2, round(kept * rows))
    values.setdefault("report_to", ["none"])
    values.setdefault("eval_fraction", HELD_OUT)
    made = from_mapping(RewardTrainerConfig, values, where="--train-config")
    if made.data.selection.eval_fraction == 0 and not made.data.selection.eval_dataset:
        raise ConfigError("--train: the runs hold nothing out. Leave --eval-fraction above 0 in --train-config.")
    return made


def winning(config: DiagnoseConfig, given: Collection[str] = ()) -> dict[str, object]:
    """Return the settings of data, model and computing that win over those of `--train-config`: the model, those of
    `given`, and those with another value than their default."""
    known = {name for section in (config.data, config.model, config.compute) for name in to_mapping(section)}
    defaults = to_mapping(RewardTrainerConfig.of(model="any", output_dir=Path("any")))
    return {
        name: value
        for name, value in to_mapping(config).items()
        if name in known and (name in {"model", *given} or value != defaults.get(name))
    }


def read_train_config(path: Path | None) -> dict[str, object]:
    """Return the settings in the file of `--train-config`, as `rewardlab train --config` reads them: what a preset or
    TRL's conventions fill in is there, under today's names.

    Raises ConfigError as `rewardlab train` does, and for a file of a control.
    """
    if path is None:
        return {}
    values = dict(_as_train_reads(path, sha256_file(path) if path.is_file() else ""))
    if isinstance(named := values.get("chat_template"), str):
        values["chat_template"] = template_of(named)
    return values


@lru_cache(maxsize=1)
def _as_train_reads(path: Path, content: str) -> Mapping[str, object]:
    """`content` is the digest of the file, which is read anew, and told of in the log, only if it has changed."""
    where, conventions = f"--train-config {path}", Conventions()
    read = read_settings(path, given_by="--train-config")
    named, lines = renamed(read, settings_of(RewardTrainerConfig), where)
    for line in lines:
        logger.info("%s", line)
    values = conventions.complete(conventions.translate(named, where))
    if values.get("diagnostic_mode", "none") != "none":
        raise ConfigError(f"{where}: diagnostic_mode: diagnose runs all controls, and the model itself. Leave it out.")
    if values.get("publish_to") is not None:
        logger.warning("%s: publish_to is left out: the models of controls are not for use", where)
    return {name: value for name, value in values.items() if not name.startswith("publish_")}


def _rows_of(folder: Path) -> int:
    """Return the rows that the run in a folder read, of all its training datasets together."""
    manifest = read_json(folder / MANIFEST)
    assert isinstance(manifest, dict)
    reports = manifest["data"]["train"]
    return int(sum(report["kept"] - report["unused_by_limit"] for report in reports) / len(reports))


def _run(config: RewardTrainerConfig) -> dict[str, Any]:
    """Train, unless that is done, and return the outcomes of the run."""
    path = config.run.output_dir / DONE
    if path.is_file():
        done = read_json(path)
        if isinstance(done, dict):
            logger.info("control: %s is done", config.run.output_dir)
            return done
    result = train(config)
    shown: dict[str, Any] = {"kept": _kept(config.run.output_dir)}
    for name, judged in (("selection", result.selected), ("test", result.test)):
        if judged is not None:
            shown[name] = dict(_right(judged))
    for baseline, results in result.baselines.items():
        shown |= {f"{name} {baseline}": dict(_right(judged)) for name, judged in results.items()}
    if config.data.diagnostic.diagnostic_mode == "random_negatives":
        shown["selection changed"] = dict(_right(_judged_on_changed(config, result.model)))
    write_json(path, shown)
    return shown


def _judged_on_changed(config: RewardTrainerConfig, folder: Path) -> EvalResult:
    """Return the evaluation of a model on the held-out rows of its run, with replies to other prompts."""
    scorer = load(folder, check=False, trust_remote_code=config.model.trust_remote_code)
    changed = _settled(config).replace(diagnostic_splits=("eval",))
    part = load_data(changed.data, scorer.renderer, seed=config.run.seed, kwise_loss=config.loss.kwise_loss).eval
    groups, _ = token_groups(part, scorer.renderer, config.data.reading.max_drop_fraction, "changed evaluation")
    return evaluate_groups(scorer.model, groups, beta=config.loss.beta, budget=None, progress="changed pairs")


def _settled(config: RewardTrainerConfig) -> RewardTrainerConfig:
    """Return the settings with what a run decides by the first rows of its data."""
    return config if config.run.compat == "none" else settle_reading(config, first_rows_of(config.data))


def _kept(folder: Path) -> float:
    """Return the share of the training rows that a control kept."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    counts = manifest["data"].get("control", {}).get("counts", {}).get("train", [])
    rows = sum(count["rows"] for count in counts)
    return sum(count["kept"] for count in counts) / rows if rows else 1.0


def _right(result: EvalResult) -> Iterator[tuple[str, float]]:
    """Yield (prompt and comparison, whether it was ranked as labelled) for every comparison that is not a tie."""
    rows: Sequence[ScoreRow] = result.rows
    seen = Counter[str]()
    for one in join_comparisons(rows):
        label = one.comparison.label
        if label != 0.5:
            ahead = one.first.score - one.second.score
            name = f"{one.prompt_key} {one.source} {one.preference_id} {one.first.reply} {one.second.reply}"
            # Number equal names: several annotators may have judged the same two replies.
            seen[name] += 1
            yield f"{name} {seen[name]}", float(np.heaviside(ahead if label > 0.5 else -ahead, 0.5))


def _conversations(
    config: DiagnoseConfig, seeds: Sequence[int], folder: Path, given: Collection[str]
) -> dict[str, dict[str, str]]:
    """Return `selection` and `test` -> prompt key -> its conversation, which has one name over all seeds.

    They are told apart as for heads, by `find_roots`, in the data that the seeds read together: with a limit each seed
    draws other rows. A control keeps the prompt keys of the rows, so the data are read without one.
    """
    found: dict[str, list[Texts]] = {}
    for seed in seeds:
        settings = _settings(config, "full", seed, folder, 1.0, given)
        assert settings is not None
        settings = _settled(settings)
        settings = settings.replace(**settle_rendering(settings.model, settings.data.rendering))
        read = read_named(
            all_named(settings.data),
            settings.data.reading,
            open_base(settings.model, settings.data.rendering).renderer,
            seed=seed,
            kwise_loss=settings.loss.kwise_loss,
            bare=settings.data.rendering.joins_texts,
        )
        # Without evaluation data of their own, runs hold out a part of the training data.
        held = {"selection": read.parts.get("eval", read.parts["train"]), "test": read.parts.get("test")}
        for name, part in held.items():
            if part is not None:
                found.setdefault(name, []).append(part.texts())
    joined = {name: Texts.join(parts) for name, parts in found.items()}
    return {
        name: {
            f"{key:016x}": str(root)
            for key, root in zip(texts.prompts_P.tolist(), find_roots(texts)[0].tolist(), strict=True)
        }
        for name, texts in joined.items()
    }


def _arms(
    found: Mapping[str, Sequence[Mapping[str, float]]], num_seeds: int, of_prompts: Mapping[str, str]
) -> dict[str, Arm]:
    """Return the arms of the controls that every seed has, with a column for each comparison that any seed judged.

    `of_prompts` are prompt key -> conversation; a prompt without one stands for itself.
    """
    arms = {}
    for name, outcomes in found.items():
        if len(outcomes) < num_seeds or not all(outcomes):
            continue
        columns = sorted({column for one in outcomes for column in one})
        right = [[one.get(column, np.nan) for column in columns] for one in outcomes]
        prompts = [column.split(" ")[0] for column in columns]
        clusters = tuple(of_prompts.get(prompt, f"prompt {prompt}") for prompt in prompts)
        arms[name] = Arm(right_SN=np.array(right), clusters=clusters)
    return arms
