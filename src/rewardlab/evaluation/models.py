"""Judges several reward models on the same data, one after the other, each in its own folder."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from rewardlab.artifact.adapters import Members
from rewardlab.core.config import require, to_mapping
from rewardlab.core.files import provenance, sha256_file, write_json
from rewardlab.core.run_folder import (
    EVALUATION_FILES,
    MANIFEST,
    MODELS_FILE,
    SPEC_SUM,
    claim_evaluation,
    clear_evaluation,
    only_writer,
)
from rewardlab.core.spec import SPEC_FILE, read_spec
from rewardlab.data.tally import SourceReport
from rewardlab.data.token_report import TokenReport
from rewardlab.evaluation.config import EvalConfig, EvalRunConfig
from rewardlab.evaluation.ensembles import JudgedEnsemble, judge_ensemble, members_of, require_heads
from rewardlab.evaluation.evaluate import EvalResult, evaluate_folder, summary
from rewardlab.evaluation.suite_ensembles import NAMES, claim_ensemble, judge_as_one
from rewardlab.evaluation.suites import JudgedSuites, evaluate_suites

logger = logging.getLogger("rewardlab")


@dataclass(frozen=True, kw_only=True)
class JudgedModel:
    """One of the models of an evaluation."""

    model: str
    """Its folder."""
    output_dir: Path
    result: EvalResult
    sources: Sequence[SourceReport]
    tokens: TokenReport


def names_of(folders: Sequence[str]) -> dict[str, str]:
    """Return name -> folder. A name is the last part of a path, with as many parts before it as make all names differ.

    Names that are still equal, because some characters are replaced, are numbered. No name is that of a file or folder
    that an evaluation writes.
    """
    parts = [[part for part in Path(folder).absolute().parts if part != "/"] for folder in folders]
    depth = 1
    while depth < max(map(len, parts), default=1) and len({tuple(own[-depth:]) for own in parts}) < len(parts):
        depth += 1
    names: dict[str, str] = {}
    for folder, own in zip(folders, parts, strict=True):
        # The model of a run is called best or step_N: the name of the run says more.
        name = re.sub(r"[^\w.+-]+", "_", "-".join(own[-depth:])).lstrip(".") or "model"
        free = name
        for number in count(2):
            if free not in names and free not in (*EVALUATION_FILES, *NAMES.values()):
                break
            free = f"{name}-{number}"
        names[free] = folder
    return names


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The results of `rewardlab eval`."""

    models: Mapping[str, JudgedModel]
    """Name -> one of the models, in the order in which they were named."""
    ensemble: JudgedEnsemble | None
    """The members of `--ensemble` as one."""

    @property
    def results(self) -> dict[str, EvalResult]:
        """Name -> evaluation, the combinations of the ensemble last."""
        own = {name: one.result for name, one in self.models.items()}
        return own if self.ensemble is None else {**own, **self.ensemble.results}


def judge_folders(config: EvalConfig) -> Judged:
    """Run `rewardlab eval`: judge every named model, and those of `--ensemble` as one.

    The results of one model are written to `--output-dir` itself, those of several to folders in it with their names;
    `models.json` there holds the metrics of all. Raises as `evaluate_folder` does, and ConfigError for a penalty
    without an ensemble and for an ensemble of one model that is not a probe.
    """
    config.require_complete()
    _require_penalised(config)
    folders = config.run.folders
    if len(folders) == 1 and not config.run.ensemble:
        judged_alone = _judged(config, folders[0], config.run.output_dir)
        return Judged(models={names_of(folders).popitem()[0]: judged_alone}, ensemble=None)
    named = names_of(folders)
    for folder in folders:
        read_spec(Path(folder))  # Before the first one is scored, which may take hours.
    if len(config.run.ensemble) == 1:
        require_heads(config.run.ensemble[0])
    out = config.run.output_dir
    with only_writer(out):
        places = {name: out / name for name in named}
        for place in (out, *places.values()):
            claim_evaluation(place, config.run.inputs(config.data), overwrite=config.run.overwrite)
        judged: dict[str, JudgedModel] = {}
        members = members_of(config)
        for number, (name, folder) in enumerate(named.items(), start=1):
            logger.info("model %d of %d: %s (%s)", number, len(named), name, folder)
            is_member = folder in config.run.ensemble
            judged[name] = _judged(config, folder, places[name], members if is_member else None)
            if number == 1:  # It may take long until the next one is judged, and what is there is of other models.
                clear_evaluation(out)
        if members is not None:
            members.release()
        judged = {name: _with_card(one) for name, one in judged.items()}
        _write(
            config,
            {
                name: {
                    "model": one.model,
                    "metrics": summary(one.result),
                    "beta": one.result.beta,
                    "calibrated": one.result.calibrated,
                }
                for name, one in judged.items()
            },
            data={name: [source.as_dict() for source in one.sources] for name, one in judged.items()},
            tokens={name: one.tokens.as_dict() for name, one in judged.items()},
        )
        ensemble = None
        if config.run.ensemble:
            of_folder = {one.model: (name, one.result.rows) for name, one in judged.items()}
            ensemble = judge_ensemble(config, dict(of_folder[folder] for folder in config.run.ensemble))
    return Judged(models=judged, ensemble=ensemble)


def judge_suites(config: EvalConfig) -> dict[str, JudgedSuites]:
    """Run `rewardlab eval --suite`: judge every model that is named on the suites, and those of `--ensemble` as one.

    Returns name -> its suites, the combinations of the ensemble last.

    Folders are those of `judge_folders`. Raises as `evaluate_suites` and `claim_ensemble` do, and ConfigError for a
    penalty without an ensemble.
    """
    config.require_complete()
    _require_penalised(config)
    out, folders = config.run.output_dir, config.run.folders
    if len(folders) == 1 and not config.run.ensemble:
        return {names_of(folders).popitem()[0]: evaluate_suites(config)}
    named = names_of(folders)
    for folder in folders:
        read_spec(Path(folder))
    with only_writer(out):
        for place in (out, *(out / name for name in named)):
            claim_evaluation(place, (), overwrite=config.run.overwrite)
        if config.run.ensemble:
            claim_ensemble(config)
        judged: dict[str, JudgedSuites] = {}
        for number, (name, folder) in enumerate(named.items(), start=1):
            judged[name] = evaluate_suites(config.replace(model=folder, models=(), ensemble=(), output_dir=out / name))
            if number == 1:
                clear_evaluation(out)
        facts: dict[str, Mapping[str, object]] = {name: {"model": folder} for name, folder in named.items()}
        if config.run.ensemble:
            of_folder = {folder: name for name, folder in named.items()}
            members = {name: judged[name] for name in map(of_folder.__getitem__, config.run.ensemble)}
            judged |= judge_as_one(config, members)
            facts |= {name: {"ensemble": config.run.ensemble} for name in judged if name not in named}
        _write(config, facts, data={}, tokens={})
    return judged


def _require_penalised(config: EvalConfig) -> None:
    """Raise ConfigError for a λ without an ensemble, which would change nothing."""
    penalty = config.run.ensemble_penalty
    require(
        bool(config.run.ensemble) or penalty == EvalRunConfig.ensemble_penalty,
        f"--ensemble-penalty {penalty:g}: belongs to an ensemble. Name its members with --ensemble.",
    )


def _judged(config: EvalConfig, folder: str, place: Path, members: Members | None = None) -> JudgedModel:
    own = config.replace(model=folder, models=(), ensemble=(), output_dir=place)
    result, sources, tokens = evaluate_folder(own, members=members)
    return JudgedModel(model=folder, output_dir=place, result=result, sources=sources, tokens=tokens)


def _with_card(one: JudgedModel) -> JudgedModel:
    """Return a model with its precision card, which had to wait until the ensemble's backbone was released."""
    if one.result.make_card is None:
        return one
    with only_writer(one.output_dir):
        return replace(one, result=replace(one.result, card=one.result.make_card(), make_card=None))


def _write(
    config: EvalConfig,
    models: Mapping[str, Mapping[str, object]],
    *,
    data: Mapping[str, object],
    tokens: Mapping[str, object],
) -> None:
    """Write `manifest.json` and `models.json` of an evaluation of several models; `models` has the facts about each."""
    out = config.run.output_dir
    write_json(
        out / MANIFEST,
        {
            "config": to_mapping(config.replace(overwrite=False)),
            "data": data,
            "tokens": tokens,
            "provenance": provenance(),
        },
    )
    write_json(out / MODELS_FILE, {name: {**one, **_sums(one)} for name, one in models.items()})


def _sums(facts: Mapping[str, object]) -> dict[str, str]:
    """Return the hash by which a model is known again; of a combination of an ensemble there is none."""
    return {SPEC_SUM: sha256_file(Path(str(facts["model"])) / SPEC_FILE)} if "model" in facts else {}
