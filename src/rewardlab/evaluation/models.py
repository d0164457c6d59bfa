"""Judges several reward models on the same data, one after the other, each in its own folder."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TypeVar

from rewardlab.core.config import to_mapping
from rewardlab.core.errors import RewardlabError
from rewardlab.core.evaluation_folder import placing_evaluation
from rewardlab.core.files import provenance, sha256_file, write_json
from rewardlab.core.folders import remove
from rewardlab.core.run_folder import EVALUATION_FILES, MANIFEST, MODELS_FILE, SPEC_SUM
from rewardlab.core.spec import SPEC_FILE, read_spec
from rewardlab.core.terminal import listed
from rewardlab.core.values import require
from rewardlab.data.tally import SourceReport
from rewardlab.data.token_report import TokenReport
from rewardlab.evaluation.config import EvalConfig, EvalRunConfig
from rewardlab.evaluation.ensembles import JudgedEnsemble, judge_ensemble, members_of, require_heads
from rewardlab.evaluation.evaluate import EvalResult, Finish, evaluate_folder, evaluate_into, summary
from rewardlab.evaluation.suite_ensembles import NAMES, judge_as_one, require_scales
from rewardlab.evaluation.suites import JudgedSuites, evaluate_suites, evaluate_suites_into

logger = logging.getLogger("rewardlab")
One = TypeVar("One")


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


def judge_folders(config: EvalConfig, *, finish: Finish | None = None) -> Judged:
    """Run `rewardlab eval`: judge every named model, and those of `--ensemble` as one.

    The results of one model are written to `--output-dir` itself, those of several to folders in it with their names;
    `models.json` there holds the metrics of all. They get their places together, once `finish` has added to them.

    Raises as `evaluate_folder` does, and ConfigError for a penalty without an ensemble and for an ensemble of one model
    that is not a probe. An error at one of several models leaves the results of those before it (`_judge_each`).
    """
    config.require_complete()
    _require_penalised(config)
    folders = config.run.folders
    if len(folders) == 1 and not config.run.ensemble:
        (name,) = names_of(folders)
        judged_alone = _model(folders[0], config.run.output_dir, evaluate_folder(config, finish=finish))
        return Judged(models={name: judged_alone}, ensemble=None)
    named = names_of(folders)
    for folder in folders:
        read_spec(Path(folder))  # Before the first one is scored, which may take hours.
    if len(config.run.ensemble) == 1:
        require_heads(config.run.ensemble[0])
    out, inputs = config.run.output_dir, config.run.inputs(config.data)
    judged: dict[str, JudgedModel] = {}
    placed = placing_evaluation(out, inputs, overwrite=config.run.overwrite, rooms=list(named))
    with placed as place, _telling_of(judged, config):
        members = members_of(config)

        def judge(name: str, own: EvalConfig) -> JudgedModel:
            of_ensemble = members if own.run.model in config.run.ensemble else None
            return _model(own.run.folders[0], out / name, evaluate_into(place / name, own, of_ensemble))

        error = _judge_each(named, config, judge, judged)
        if error is not None:
            config = _without_others(place, config, named, judged)
        if members is not None:
            members.release()
        judged |= {name: _with_card(one) for name, one in judged.items()}
        _write(
            place,
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
            ensemble = judge_ensemble(place, config, dict(of_folder[folder] for folder in config.run.ensemble))
        if finish is not None:
            finish(place)
    _raise_later(error, out, judged)
    return Judged(models=judged, ensemble=ensemble)


def judge_suites(config: EvalConfig, *, finish: Finish | None = None) -> dict[str, JudgedSuites]:
    """Run `rewardlab eval --suite`: judge every model that is named on the suites, and those of `--ensemble` as one.

    Returns name -> its suites, the combinations of the ensemble last.

    Folders are those of `judge_folders`, and so is what an error at one of several models leaves. Raises as
    `evaluate_suites` and `require_scales` do, and ConfigError for a penalty without an ensemble.
    """
    config.require_complete()
    _require_penalised(config)
    out, folders = config.run.output_dir, config.run.folders
    if len(folders) == 1 and not config.run.ensemble:
        return {names_of(folders).popitem()[0]: evaluate_suites(config, finish=finish)}
    named = names_of(folders)
    for folder in folders:
        read_spec(Path(folder))
    if config.run.ensemble:
        require_scales(config)
    rooms = [*named, *(NAMES.values() if config.run.ensemble else ())]
    judged: dict[str, JudgedSuites] = {}
    placed = placing_evaluation(out, (), overwrite=config.run.overwrite, rooms=rooms)
    with placed as place, _telling_of(judged, config):
        error = _judge_each(named, config, lambda name, own: evaluate_suites_into(place / name, own), judged)
        if error is not None:
            config = _without_others(place, config, named, judged)
        facts: dict[str, Mapping[str, object]] = {name: {"model": named[name]} for name in judged}
        if config.run.ensemble:
            of_folder = {folder: name for name, folder in named.items()}
            members = {name: judged[name] for name in map(of_folder.__getitem__, config.run.ensemble)}
            judged |= judge_as_one(place, config, members)
            facts |= {name: {"ensemble": config.run.ensemble} for name in judged if name not in named}
        _write(place, config, facts, data={}, tokens={})
        if finish is not None:
            finish(place)
    _raise_later(error, out, judged)
    return judged


def _judge_each(
    named: Mapping[str, str], config: EvalConfig, judge: Callable[[str, EvalConfig], One], judged: dict[str, One]
) -> RewardlabError | RuntimeError | None:
    """Judge the models (name -> folder) one after the other into `judged`. Return the error that ends this, if those
    before are to be written all the same: unless they belong to an ensemble, which needs all, or would take the place
    of earlier results, which may be of all."""
    for number, (name, folder) in enumerate(named.items(), start=1):
        logger.info("model %d of %d: %s (%s)", number, len(named), name, folder)
        try:
            judged[name] = judge(
                name, config.replace(model=folder, models=(), ensemble=(), output_dir=config.run.output_dir / name)
            )
        except (RewardlabError, RuntimeError) as error:  # of a model or its rows, or torch's, such as of memory
            if not judged or config.run.ensemble or config.run.overwrite:
                raise
            return error
    return None


def _without_others(
    place: Path, config: EvalConfig, named: Mapping[str, str], judged: Mapping[str, object]
) -> EvalConfig:
    """Remove what was written of models that were not judged; return the settings that name those that were."""
    for name in named.keys() - judged.keys():
        remove(place / name)
    return config.replace(model="", models=tuple(named[name] for name in judged))


def _raise_later(error: RewardlabError | RuntimeError | None, out: Path, judged: Mapping[str, object]) -> None:
    """Raise what ended the work on several models, now that the results of those before are written."""
    if error is not None:
        logger.warning(
            "%s: has the results of %s alone. With --overwrite the same command judges all of them",
            out,
            listed([*judged]),
        )
        raise error


@contextmanager
def _telling_of(judged: Mapping[str, object], config: EvalConfig) -> Iterator[None]:
    """If the block ends early, say what becomes of the models that were judged by then."""
    try:
        yield
    except BaseException:
        if judged:
            kept = config.run.reuse and config.data.reading.cache_dir != "none"
            logger.warning(
                "nothing is written of %s: results of several models appear together. %s",
                listed([*judged]),
                "Their scores are kept, so that the next command does not compute them again"
                if kept
                else "They will be scored again, since no scores are kept",
            )
        raise


def _require_penalised(config: EvalConfig) -> None:
    """Raise ConfigError for a λ without an ensemble, which would change nothing."""
    penalty = config.run.ensemble_penalty
    require(
        bool(config.run.ensemble) or penalty == EvalRunConfig.ensemble_penalty,
        f"--ensemble-penalty {penalty:g}: belongs to an ensemble. Name its members with --ensemble.",
    )


def _model(folder: str, place: Path, evaluated: tuple[EvalResult, Sequence[SourceReport], TokenReport]) -> JudgedModel:
    result, sources, tokens = evaluated
    return JudgedModel(model=folder, output_dir=place, result=result, sources=sources, tokens=tokens)


def _with_card(one: JudgedModel) -> JudgedModel:
    """Return a model with its precision card, which had to wait until the ensemble's backbone was released."""
    if one.result.make_card is None:
        return one
    return replace(one, result=replace(one.result, card=one.result.make_card(), make_card=None))


def _write(
    place: Path,
    config: EvalConfig,
    models: Mapping[str, Mapping[str, object]],
    *,
    data: Mapping[str, object],
    tokens: Mapping[str, object],
) -> None:
    """Write `manifest.json` and `models.json` of an evaluation of several models; `models` has the facts about each."""
    write_json(
        place / MANIFEST,
        {
            "config": to_mapping(config.replace(overwrite=False)),
            "data": data,
            "tokens": tokens,
            "provenance": provenance(),
        },
    )
    write_json(place / MODELS_FILE, {name: {**one, **_sums(one)} for name, one in models.items()})


def _sums(facts: Mapping[str, object]) -> dict[str, str]:
    """Return the hash by which a model is known again; of a combination of an ensemble there is none."""
    return {SPEC_SUM: sha256_file(Path(str(facts["model"])) / SPEC_FILE)} if "model" in facts else {}
