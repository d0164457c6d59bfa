"""Fits a calibration on held-out preferences, judges it on others, and stores it in the model if asked to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from rewardlab.analysis.json_form import encode
from rewardlab.analysis.scaling import Scaling, ScalingJudgement, fit_scaling, judge_scaling, require_pairs
from rewardlab.artifact.calibrated import store_calibration
from rewardlab.core.config import to_mapping
from rewardlab.core.errors import DataError
from rewardlab.core.evaluation_folder import placing_evaluation
from rewardlab.core.files import provenance, write_json
from rewardlab.core.lock import LOCK, only_process
from rewardlab.core.run_folder import SPEC_SUM, holds_run
from rewardlab.core.spec import CalibrationSpec, read_spec
from rewardlab.core.terminal import plural
from rewardlab.data.groups import Groups
from rewardlab.data.splits import count_shared_roots, hold_out
from rewardlab.data.tally import SourceReport
from rewardlab.evaluation.config import CalibrateConfig
from rewardlab.evaluation.evaluate import judge, read_groups, write_evaluation
from rewardlab.evaluation.saved import SavedModel

logger = logging.getLogger("rewardlab")
CALIBRATION_FILE: Final = "calibration.json"


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """A calibration, and its judgement on data that it was not fitted on."""

    output_dir: Path
    scaling: Scaling
    judgement: ScalingJudgement
    sources: Mapping[str, Sequence[SourceReport]]
    """`fitted` and, if other data were named, `judged` -> reports on the rows."""
    rule: str | None
    """How prompts were divided (`splits.RULES`); None if other data were named."""
    shared_roots: int
    """Number of conversations (`data.splits`) with rows in both parts, which flatters the calibration."""
    stored: bool


def calibrate(
    config: CalibrateConfig, *, finish: Callable[[CalibrationResult, Path], object] | None = None
) -> CalibrationResult:
    """Run `rewardlab calibrate`. The files get their places together, once `finish` has added to those in a folder.

    Raises DataError for data that cannot be used or are too few, and, with --store, for a temperature at the edge of
    its range or a calibration that is judged on conversations that it was fitted on; ArtifactError for a damaged model;
    ConfigError for a folder that holds a run, for an earlier calibration without --overwrite, and with --store for a
    model that another process writes.
    """
    config.require_complete()
    names = (*config.data.dataset, *config.run.judge_dataset)
    read_spec(Path(config.run.model))  # Before a folder is made for the results.
    run = config.run
    owner = _only_owner(Path(run.model)) if run.store else nullcontext()
    with placing_evaluation(run.output_dir, names, overwrite=run.overwrite) as place, owner:
        result, store = _calibrate(place, config)
        if finish is not None:
            finish(result, place)
        if result.stored:
            # The last of all: the model does not change for results that are not whole.
            store()
    if run.store and not result.stored:
        raise DataError(
            f"--store: every pair is ranked as labelled, so no temperature is best and "
            f"{result.scaling.temperature:.4g} is only the lowest that is tried: nothing was stored. Calibrate on more "
            f"data, or harder ones. What was fitted: {run.output_dir / CALIBRATION_FILE}"
        )
    return result


@contextmanager
def _only_owner(model: Path) -> Iterator[None]:
    """Lock a model that is about to be replaced, and the run that it is part of, against other processes.

    Raises ArtifactError if there is no model, ConfigError if another process holds one of the two.
    """
    read_spec(model)
    folder = model.resolve()
    with ExitStack() as held:
        # Runs and probes lock their own folder and write models inside it.
        around = folder.parent
        for place in (around, folder) if holds_run(around) or (around / LOCK).is_file() else (folder,):
            held.enter_context(only_process(place, "--model"))
        try:
            yield
        finally:
            # Models are passed on, so their folders should contain nothing but the model.
            (folder / LOCK).unlink(missing_ok=True)


def _calibrate(place: Path, config: CalibrateConfig) -> tuple[CalibrationResult, Callable[[], object]]:
    """Calibrate, and write the results to `place`, which is empty. Return them, and what stores them in the model,
    which is to be done if that is wanted and a temperature is best (`stored`)."""
    run = config.run
    evaluation = config.evaluation()
    model = SavedModel(evaluation)
    groups, reports, tokens = read_groups(evaluation, model)
    sources, counts = {"fitted": reports}, {"fitted": tokens.as_dict()}
    if run.judge_dataset:
        others, sources["judged"], more = read_groups(config.evaluation(run.judge_dataset), model)
        counts["judged"] = more.as_dict()
        parts, rule, advice = {"fitted": groups, "judged": others}, None, "Name more data."
    else:
        advice = (
            f"The others judge the calibration (--judge-fraction {run.judge_fraction:g}). Name more data, or others to "
            f"judge on with --judge-dataset."
        )
        parts, rule = _divided(groups, fraction=run.judge_fraction, seed=run.seed)
    # Before anything is scored, which takes long.
    require_pairs(int(parts["fitted"].num_comparisons().sum()), "comparisons", advice=advice)
    shared_roots = _shared_roots(parts, store=run.store)
    rows = {name: model.score(part, progress=f"scoring ({name})") for name, part in parts.items()}
    scaling = fit_scaling(rows["fitted"], beta=model.spec.beta, advice=advice)
    judgement = judge_scaling(scaling, rows["judged"], beta=model.spec.beta)
    write_json(
        place / "manifest.json",
        {
            "config": to_mapping(config.replace(**model.decided, overwrite=False)),
            "data": {name: [source.as_dict() for source in several] for name, several in sources.items()},
            "tokens": counts,
            SPEC_SUM: model.spec_sum,
            "provenance": provenance(),
        },
    )
    for name, own in rows.items():
        write_evaluation(place, name, judge(own, beta=model.spec.beta))
    model.release()
    judged = {"shared_roots": shared_roots, **judgement_as_dict(judgement)}
    write_json(
        place / CALIBRATION_FILE,
        {
            **asdict(scaling),
            "estimates": encode(scaling.estimates),
            "judged": judged,
        },
    )
    data = {name: [{"name": one.name, "split": one.split, "sha256": one.sha256} for one in several]
            for name, several in sources.items()}  # fmt: skip
    result = CalibrationResult(
        output_dir=run.output_dir,
        scaling=scaling,
        judgement=judgement,
        sources=sources,
        rule=rule,
        shared_roots=shared_roots,
        stored=run.store and not scaling.at_edge,
    )
    calibration = CalibrationSpec(
        reward_mean=scaling.reward_mean,
        reward_std=scaling.reward_std,
        num_replies=scaling.num_replies,
        num_comparisons=scaling.num_comparisons,
        precision=run.precision,
        data=data,
        judged=judged,
    )
    return result, partial(
        store_calibration,
        model.path,
        temperature=scaling.temperature,
        affine=scaling.affine,
        calibration=calibration,
    )


def _divided(groups: Groups, *, fraction: float, seed: int) -> tuple[dict[str, Groups], str]:
    """Return the groups to fit on and those to judge on, each conversation in only one of them, and the rule.

    Raises DataError if there are too few prompts to divide.
    """
    if len(np.unique(groups.prompt_keys())) < 2:
        raise DataError("the data have one prompt, so none is left to judge the calibration. Name --judge-dataset.")
    split = hold_out(groups.texts(), fraction=fraction, seed=seed)
    return {"fitted": groups.take(~split.mask_P), "judged": groups.take(split.mask_P)}, split.rule


def _shared_roots(parts: Mapping[str, Groups], *, store: bool) -> int:
    """Return how many conversations have rows in both parts, with a warning if there are some.

    Raises DataError for them with `store`.
    """
    shared = count_shared_roots(parts["fitted"].texts(), parts["judged"].texts())
    if not shared:
        return 0
    said = (
        f"{shared:,} {plural(shared, 'conversation has', 'conversations have')} rows in what is fitted "
        f"on and in what judges, by first turns and replies"
    )
    if store:
        raise DataError(
            f"--store: {said}, so the calibration would be judged on its own data. Judge it on other conversations "
            f"with --judge-dataset, or leave --store out."
        )
    logger.warning("%s, which flatters the calibration", said)
    return shared


def judgement_as_dict(judgement: ScalingJudgement) -> dict[str, object]:
    """Return a judgement as JSON, NaN as null."""

    return {
        "pairs": encode(judgement.pairs),
        "replies": encode(judgement.replies),
        "num_comparisons": judgement.num_comparisons,
        "num_non_finite": judgement.num_non_finite,
    }
