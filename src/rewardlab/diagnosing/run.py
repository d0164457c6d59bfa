"""Runs `rewardlab diagnose`: the controls for a configuration, over several seeds, and what they show."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from rewardlab.analysis.ceiling import Ceiling, of_groups
from rewardlab.artifact.base import require_inputs
from rewardlab.core.config import config_hash, to_mapping
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import provenance, read_json, sha256_file, sha256_json, write_json, write_text
from rewardlab.core.folders import remove
from rewardlab.core.run_folder import only_writer
from rewardlab.core.together import together
from rewardlab.data.readers import fingerprint
from rewardlab.data.template_files import template_of
from rewardlab.diagnosing.arms import Arms
from rewardlab.diagnosing.config import DiagnoseConfig, DiagnoseRunConfig
from rewardlab.diagnosing.heads import Settings, run_controls, why_no_lengths
from rewardlab.diagnosing.report import Diagnosis, json_report, markdown_report
from rewardlab.diagnosing.states import compute_states
from rewardlab.diagnosing.verdicts import Limits, judge_all

logger = logging.getLogger("rewardlab")
BEGUN: Final = "diagnose_config.json"
FOUND: Final = "diagnose.json"
PAGE: Final = "diagnose.md"
RUNS: Final = "runs"
FREE: Final = ("overwrite", "seeds", "most_from_length", "most_from_shortcut", "cache", "micro_token_budget")
"""Settings that change no run and no state."""


def diagnose(config: DiagnoseConfig, *, given: Collection[str] = ()) -> Diagnosis:
    """Run all controls as `config` says, write diagnose.json and diagnose.md, and return what was found.

    `given` are names of settings that win over `train_config`, those with their defaults too; all others do.

    Raises a subclass of RewardlabError for anything the user can fix.
    """
    require_inputs(config.model, config.data)
    # The text in place of a file's name, so that what is kept of earlier calls is of this template.
    config = config.replace(chat_template=template_of(config.data.rendering.chat_template))
    with only_writer(config.run.output_dir):
        started = time.perf_counter()
        _claim(config, given)
        seeds = range(config.run.seed, config.run.seed + config.run.seeds)
        if config.run.train:
            from rewardlab.diagnosing.runs import run_trained

            arms, test, facts = run_trained(config, seeds, config.run.output_dir / RUNS, given=given)
            ceiling = None  # each seed holds out other rows, and only their outcomes are kept
        else:
            computed = compute_states(config)
            settings = Settings(
                seeds=seeds, folds=config.run.folds, threshold=config.data.diagnostic.diagnostic_length_threshold
            )
            arms, test = run_controls(computed.variants, settings, computed.test)
            missing = why_no_lengths(computed.variants, settings)
            ceiling = of_groups(computed.variants.groups)
            left_out = computed.facts["not_run"] | ({} if missing is None else {"length_matched": missing})
            facts = {**computed.facts, "not_run": left_out}
        diagnosis = _diagnosis(config, arms, test, facts, ceiling)
        _write(config, diagnosis, time.perf_counter() - started)
        return diagnosis


def _diagnosis(
    config: DiagnoseConfig, arms: Arms, test: Arms, facts: Mapping[str, Any], ceiling: Ceiling | None
) -> Diagnosis:
    limits = Limits(length=config.run.most_from_length, shortcut=config.run.most_from_shortcut)
    full = arms["full"]
    how = "training runs" if config.run.train else f"heads on layer {facts['layer']}"
    return Diagnosis(
        findings=judge_all(arms, limits, test=test),
        full=full.over_seeds(),
        full_conversations=full.over_conversations(),
        full_test=test["full"].over_seeds() if "full" in test else None,
        ceiling=ceiling,
        facts={
            "what": f"{config.model.model}, {how}, on {', '.join(config.data.dataset)}",
            "comparisons": full.num_judged,
            "conversations": full.num_conversations,
            "num_seeds": config.run.seeds,
            "length_threshold": config.data.diagnostic.diagnostic_length_threshold,
            "donors": "a draw for each seed" if config.run.train else "one draw, whose states serve all seeds",
            "by_seed": {name: arm.by_seed.tolist() for name, arm in arms.items()},
            "test_by_seed": {name: arm.by_seed.tolist() for name, arm in test.items()},
            **facts,
        },
    )


def _claim(config: DiagnoseConfig, given: Collection[str] = ()) -> None:
    """Make the output folder ready. Raises ConfigError if it holds anything but the results of this configuration.

    A call that failed before it found anything leaves its configuration alone, which nothing depends on.
    """
    folder = config.run.output_dir
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output-dir {folder}: is a file. Name a folder.")
    inside = {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.is_dir() else set()
    if inside and BEGUN not in inside:
        raise ConfigError(f"--output-dir {folder}: holds files that diagnose did not write. Name another folder.")
    wanted = _identity(config, given)
    kept = [name for name in (FOUND, PAGE, RUNS) if name in inside]
    if kept and _begun(folder / BEGUN) != wanted:
        if not config.run.overwrite:
            raise ConfigError(
                f"--output-dir {folder}: holds the controls of another configuration, or of other data or model "
                f"files. Name another folder, or replace them with --overwrite."
            )
        for name in kept:
            remove(folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / BEGUN, {"config": to_mapping(config), "identity": wanted})


def _identity(config: DiagnoseConfig, given: Collection[str] = ()) -> str:
    """Return the hash of all that decides what is kept of earlier calls.

    More seeds, and other limits for the verdicts, are the same. With `--train` it changes with the content of the
    model's folder, of the data and of `--train-config` too, and with what this version sets for each control, since
    runs that are done are not run again.
    """
    free = DiagnoseRunConfig()
    same = config.replace(
        output_dir=free.output_dir,
        **{name: getattr(free, name) for name in FREE},
        num_workers=None,
        cache_dir="auto",
    )
    if not config.run.train:
        return config_hash(same)
    from rewardlab.diagnosing.runs import MODES, read_train_config, sources_of, winning

    settings = read_train_config(config.run.train_config)
    contents = [fingerprint(source) for source in sources_of(config, config.run.output_dir, given=given)]
    files = _files_of(Path(config.model.model))
    decided = [config_hash(same.replace(train_config=None)), settings, contents, files, dict(MODES)]
    # Other settings that win over the file are in the first hash.
    defaults = sorted((winning(config, given).keys() - winning(config).keys()) & settings.keys())
    return sha256_json([*decided, defaults] if defaults else decided)


def _files_of(folder: Path) -> dict[str, str]:
    """Return the digests of the files of a model's folder by their names; empty for the name of a model elsewhere.

    Hidden files and pages of text, which change no run, are left out.
    """
    if not folder.is_dir():
        return {}
    paths = (path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and path.suffix != ".md")
    return {path.name: sha256_file(path) for path in paths if path.is_file()}


def _begun(path: Path) -> object:
    try:
        begun = read_json(path)
    except (DataError, OSError):
        return None
    return begun.get("identity") if isinstance(begun, dict) else None


def _write(config: DiagnoseConfig, diagnosis: Diagnosis, seconds: float) -> None:
    folder = config.run.output_dir
    values = {**json_report(diagnosis), "config": to_mapping(config), "seconds": seconds, "provenance": provenance()}
    # Of a call with more seeds or other limits, neither takes the place of an earlier one without the other.
    with together(last=folder / FOUND):
        write_json(folder / FOUND, values)
        write_text(folder / PAGE, markdown_report(diagnosis))
    logger.info("wrote %s and %s in %.0f s", folder / FOUND, folder / PAGE, seconds)
