"""Evaluates a model on held-out preferences, with the same code during and after training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from rewardlab.analysis.json_form import encode
from rewardlab.analysis.judgement import Judgement, judge_rows
from rewardlab.analysis.kwise import ReplyKey
from rewardlab.analysis.metrics import Evaluation, by_source, evaluate
from rewardlab.analysis.mistakes import worst_mistakes
from rewardlab.analysis.precision import CANONICAL, PrecisionCard
from rewardlab.analysis.signs_at_ends import reversed_at_the_end
from rewardlab.analysis.slices import SliceColumn
from rewardlab.artifact.adapters import Members
from rewardlab.artifact.load import load
from rewardlab.core.config import require_kind, to_mapping
from rewardlab.core.errors import DataError, RewardlabError
from rewardlab.core.evaluation_folder import placing_evaluation
from rewardlab.core.files import (
    provenance,
    read_json,
    read_jsonl,
    sha256_file,
    write_json,
    write_jsonl,
)
from rewardlab.core.run_folder import (
    ALL,
    JUDGED_BY,
    SCORES_SUM,
    SPEC_SUM,
    source_apart,
)
from rewardlab.core.spec import read_spec
from rewardlab.core.types import Estimate, ScoreRow, TokenGroup, join_comparisons
from rewardlab.core.values import require
from rewardlab.data.dataset_names import Named
from rewardlab.data.groups import Groups
from rewardlab.data.originals import Key, Original, read_originals
from rewardlab.data.prepare import token_groups
from rewardlab.data.reading import read_named
from rewardlab.data.tally import SourceReport
from rewardlab.data.token_report import TokenReport
from rewardlab.distributed.ranks import Ranks
from rewardlab.evaluation.config import EvalConfig
from rewardlab.evaluation.gold_scores import read_gold, write_gold
from rewardlab.evaluation.perturbed import (
    Robustness,
    drawn,
    judge_perturbations,
    write_robustness,
)
from rewardlab.evaluation.precision import card_of, draw, precisions, score_precisions, write_card
from rewardlab.evaluation.records import NUM_MISTAKES, slices_of, write_mistakes, write_slices
from rewardlab.evaluation.saved import SavedModel
from rewardlab.model.reward import RewardModel
from rewardlab.score import ALONE, FloatArray, Together, score_groups, score_rows

logger = logging.getLogger("rewardlab")
JUDGEMENT_FILE: Final = "eval.judgement.json"


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """An evaluation, with the score rows from which it was computed."""

    rows: Sequence[ScoreRow]
    overall: Evaluation
    by_source: Mapping[str, Evaluation]
    beta: float
    """The β by which it was judged: σ(beta · difference) is the probability of a preference."""
    calibrated: bool = False
    """Whether `beta` is that of the model divided by the temperature that is stored in it."""
    judgement: Judgement | None = None
    """All further results from the score rows; None except for the evaluation of a folder."""
    robustness: Robustness | None = None
    """The effects of changed texts on the scores; None if not asked for."""
    card: PrecisionCard | None = None
    """The comparison with other precisions; None if not wanted or not possible."""
    make_card: Callable[[], PrecisionCard | None] | None = None
    """Makes the card later, for a member of an ensemble with a shared backbone: once the backbone is released, so that
    two models are never in memory together. None for all others."""


def evaluate_groups(
    model: RewardModel,
    groups: Sequence[TokenGroup],
    *,
    beta: float,
    budget: int | None,
    progress: str,
    ranks: Together = ALONE,
) -> EvalResult:
    """Score every reply, divided among the `ranks`, and judge the scores."""
    scores = score_groups(model, groups, budget=budget, progress=progress, ranks=ranks)
    return judge(score_rows(groups, scores), beta=beta)


def judge(rows: Sequence[ScoreRow], *, beta: float, calibrated: bool = False) -> EvalResult:
    """Return the metrics of score rows, over all of them and by source."""
    return EvalResult(
        rows=rows,
        overall=evaluate(rows, beta=beta),
        by_source=by_source(rows, beta=beta),
        beta=beta,
        calibrated=calibrated,
    )


def distributions(rows: Sequence[ScoreRow]) -> dict[str, list[float]]:
    """Return the scores of the preferred (`chosen`) and the other (`rejected`) reply of every decided comparison."""
    chosen, rejected = [], []
    for joined in join_comparisons(rows):
        if joined.comparison.label == 0.5:
            continue
        preferred, other = joined.first, joined.second
        if joined.comparison.label < 0.5:
            preferred, other = other, preferred
        chosen.append(preferred.score)
        rejected.append(other.score)
    return {"chosen": chosen, "rejected": rejected}


def score_spread(rows: Sequence[ScoreRow]) -> dict[str, float]:
    """Return mean and standard deviation (divisor N − 1, as in every judgement) of all finite scores, as columns of
    metrics.csv; NaN for fewer than two."""
    scores = np.array([row.score for row in rows if math.isfinite(row.score)], dtype=np.float64)
    spread = float(scores.std(ddof=1)) if scores.size > 1 else math.nan
    return {"eval_score_mean": float(scores.mean()) if scores.size else math.nan, "eval_score_std": spread}


def write_evaluation(folder: Path, name: str, result: EvalResult) -> None:
    """Write `<name>.scores.jsonl` and `<name>.metrics.json`, which holds the checksum of the scores and the β by which
    they were judged."""
    folder.mkdir(parents=True, exist_ok=True)
    scores = folder / f"{name}.scores.jsonl"
    write_jsonl(scores, (row.as_dict() for row in result.rows))
    # The checksum is written after the scores: a process that is killed in between leaves scores that do not match it
    # and are therefore not used.
    judged_by = dict(zip(JUDGED_BY, (result.beta, result.calibrated), strict=True))
    write_json(folder / f"{name}.metrics.json", {**summary(result), SCORES_SUM: sha256_file(scores), **judged_by})


def read_evaluation(folder: Path, name: str, *, beta: float, ranks: Ranks) -> EvalResult | None:
    """Return the evaluation that `write_evaluation` wrote, judged again; None if it is missing or damaged.

    Every rank has to call this; the first one reads for all.
    """
    rows = ranks.by_first(lambda: read_scores(folder, name))
    return None if rows is None else judge(rows, beta=beta)


def read_scores(folder: Path, name: str) -> list[ScoreRow] | None:
    """Return the scores that `write_evaluation` wrote; None if they are missing or, with a warning, damaged."""
    scores, metrics = folder / f"{name}.scores.jsonl", folder / f"{name}.metrics.json"
    if not scores.is_file():
        return None
    try:
        values = read_json(metrics) if metrics.is_file() else None
    except (OSError, DataError):
        values = None
    if not isinstance(values, dict) or values.get(SCORES_SUM) != sha256_file(scores):
        logger.warning("%s does not match its checksum in %s, so it is not used", scores, metrics.name)
        return None
    return [ScoreRow.from_dict(row) for _, row in read_jsonl(scores)]


def summary(result: EvalResult) -> dict[str, object]:
    """Return every estimate and count, over all and by source, as JSON; over all also those by gold scores.

    A source with the name of another entry of the file stands in quotes.
    """
    by_gold = {} if result.judgement is None else result.judgement.by_gold
    taken = (ALL, SCORES_SUM, *JUDGED_BY)
    overall: Mapping[str, Estimate] = {**result.overall.estimates, **by_gold}
    found = {ALL: (overall, result.overall.sums)}
    found |= {source_apart(name, taken): (own.estimates, own.sums) for name, own in result.by_source.items()}
    return {
        name: {
            "estimates": encode(estimates),
            "sums": encode(sums),
        }
        for name, (estimates, sums) in found.items()
    }


def resolve(config: EvalConfig, model: SavedModel) -> EvalConfig:
    """Return the configuration with every default decided, in the form in which it is written."""
    return config.replace(**model.decided, overwrite=False)


Finish = Callable[[Path], object]
"""Writes further files into the folder of an evaluation that is whole but for these, before it gets its place."""


def evaluate_folder(
    config: EvalConfig, *, finish: Finish | None = None
) -> tuple[EvalResult, Sequence[SourceReport], TokenReport]:
    """Run `rewardlab eval` for one model: score a dataset with a saved reward model and write scores and metrics.

    Returns the evaluation, a report of rows read, kept and dropped for each dataset, and one on tokens. The files get
    their places together, once `finish` has added to them.

    Raises DataError for unusable data, ArtifactError for a damaged model, and ConfigError for a folder that holds a
    run, for an earlier evaluation without --overwrite, and for more than one model (see `models.judge_folders`).
    """
    require_kind(config, EvalConfig)
    config.require_complete()
    require(len(config.run.folders) == 1, "evaluate_folder judges one model. Give several to judge_folders.")
    # However the model was named on the command line, the settings are written with --model.
    config = config.replace(model=config.run.folders[0], models=(), ensemble=())
    read_spec(Path(config.run.model))  # Before a folder is made for its results.
    run = config.run
    with placing_evaluation(run.output_dir, run.inputs(config.data), overwrite=run.overwrite) as place:
        evaluated = evaluate_into(place, config)
        if finish is not None:
            finish(place)
    return evaluated


def read_groups(config: EvalConfig, model: SavedModel) -> tuple[Groups, Sequence[SourceReport], TokenReport]:
    """Return the held-out data as tokens for a model, and the reports on their rows. Raises DataError for unusable
    data."""
    spec = model.spec
    read = read_named(
        [named_data(config)], config.data.reading, model.renderer, seed=config.run.seed, bare=spec.renderer.joins_texts
    )
    groups, report = token_groups(
        read.parts["evaluation"], model.renderer, config.data.reading.max_drop_fraction, "evaluation", own_limit=True
    )
    return groups, read.sources["evaluation"], report


def named_data(config: EvalConfig) -> Named:
    """Return the datasets to judge on."""
    data = config.data
    streaming = data.reading.streaming
    return Named(purpose="evaluation", names=data.dataset, split=data.hf_split, limit=data.limit, streaming=streaming)


def originals_of(config: EvalConfig, model: SavedModel, wanted: Collection[Key] | None = None) -> Iterator[Original]:
    """Yield the preferences behind the groups of `read_groups`, and others that it left out, with their texts."""
    return read_originals(
        named_data(config),
        config.data.reading,
        seed=config.run.seed,
        bare=model.spec.renderer.joins_texts,
        wanted=wanted,
    )


def evaluate_into(
    place: Path, config: EvalConfig, members: Members | None = None
) -> tuple[EvalResult, Sequence[SourceReport], TokenReport]:
    """Evaluate one model as `evaluate_folder` does, and write the files to `place`, which is empty.

    `members` are those of an ensemble to which the model belongs; they may share a backbone.
    """
    run = config.run
    model = SavedModel(config, members)
    # Read the data first, so that faults in them are reported before weights are loaded and canaries scored.
    groups, sources, report = read_groups(config, model)
    judged = {(group.source, group.preference_id) for group in groups}
    slices = slices_of(originals_of(config, model, judged), run.slice, judged=judged)
    # Read before anything is removed: it may be the folder of the evaluation that is replaced.
    gold = None if run.gold is None else read_gold(run.gold, groups, max_replies=config.data.reading.max_replies)
    result = judge(model.score(groups, progress="scoring"), beta=model.beta, calibrated=run.calibrated)
    _warn_of_reversed(model.path, result)
    judgement = _judgement(config, result.rows, beta=model.beta, slices=slices, gold=gold)
    result = replace(result, judgement=judgement)
    write_json(
        place / "manifest.json",
        {
            "config": to_mapping(resolve(config, model)),
            "data": [source.as_dict() for source in sources],
            "tokens": report.as_dict(),
            SPEC_SUM: model.spec_sum,
            "provenance": provenance(),
        },
    )
    write_evaluation(place, "eval", result)
    worst = worst_mistakes(result.rows, most=NUM_MISTAKES).comparisons
    wanted = {(joined.source, joined.preference_id) for joined in worst}
    write_mistakes(place, "eval", worst, originals_of(config, model, wanted))
    write_slices(place, "eval", slices)
    if gold is not None:
        write_gold(place, "eval", gold, result.rows)
    if judgement is not None:
        write_json(place / JUDGEMENT_FILE, judgement.as_dict())
    robustness = _robustness(place, config, model, groups, result) if run.perturb else None
    result = replace(result, robustness=robustness)
    # The card comes last, since making it changes the weights of the model.
    if run.precision_card:
        make_card = card_maker(place, config, model, groups, result.rows)
        if model.is_on_shared_backbone:
            model.release()
            result = replace(result, make_card=make_card)
        else:
            result = replace(result, card=make_card())
    return result, sources, report


def _warn_of_reversed(model: Path, result: EvalResult) -> None:
    """Warn of data on which the model is clearly worse than a coin, as a run warns of its own."""
    accuracies = {name: own.estimates["eval_accuracy"] for name, own in result.by_source.items()}
    if (found := reversed_at_the_end(accuracies, model=str(model))) is not None:
        logger.warning(
            "%s Look whether these data and those of its training mean the same reply by `chosen`; for soft labels and "
            "K-wise scores, which end of the scale is good.",
            found,
        )


def _robustness(
    place: Path, config: EvalConfig, model: SavedModel, groups: Sequence[TokenGroup], result: EvalResult
) -> Robustness:
    """Write and return the effects of changed texts on the scores."""
    originals = originals_of(config, model, drawn(groups, seed=config.run.seed))
    robustness = judge_perturbations(model, result.rows, originals, num_available=len(groups), seed=config.run.seed)
    write_robustness(place, robustness)
    return robustness


def _judgement(
    config: EvalConfig,
    rows: Sequence[ScoreRow],
    *,
    beta: float,
    slices: Mapping[str, SliceColumn],
    gold: Mapping[ReplyKey, float] | None,
) -> Judgement | None:
    """Return all further results from the score rows; None, with a warning, if there cannot be any."""
    run = config.run
    try:
        return judge_rows(rows, beta=beta, thresholds=run.thresholds, slices=slices, gold=gold, seed=run.seed)
    except DataError as error:
        logger.warning("no judgement beside the metrics: %s", error)
        return None


def card_maker(
    place: Path, config: EvalConfig, model: SavedModel, groups: Sequence[TokenGroup], rows: Sequence[ScoreRow]
) -> Callable[[], PrecisionCard | None]:
    """Return what makes, writes to `place` and returns the precision card of a model, on a sample of the groups that it
    has scored (`rows`). The model has to be loaded again after it."""
    sample, exact = draw(groups, rows if config.run.precision == "fp32" else None, seed=config.run.seed)
    return partial(_card, place, config, model, sample, exact, num_available=len(groups))


def _card(
    place: Path,
    config: EvalConfig,
    model: SavedModel,
    sample: Sequence[TokenGroup],
    exact: Sequence[FloatArray] | None,
    *,
    num_available: int,
) -> PrecisionCard | None:
    """Write and return the precision card; None, with a warning, if the model cannot be computed in float32 here."""
    run, beta = config.run, model.beta
    try:
        scores = _in_precisions(config, model, sample, exact)
    except (RewardlabError, torch.OutOfMemoryError) as error:
        logger.warning("no precision card (--no-precision-card leaves it out): %s", error)
        return None
    finally:
        model.release()
    card = card_of(sample, scores, beta=beta, num_available=num_available, seed=run.seed)
    write_card(place, card)
    return card


def _in_precisions(
    config: EvalConfig, model: SavedModel, sample: Sequence[TokenGroup], exact: Sequence[FloatArray] | None
) -> Mapping[str, Sequence[FloatArray]]:
    """Return the scores that a card compares, from the cache if all of them are in it."""
    run = config.run
    names = precisions("fp16" if run.precision == "fp16" else "bf16", model.spec.save_dtype)
    known = {} if exact is None else {CANONICAL: exact}
    wanted = [name for name in (CANONICAL, *names) if name not in known]
    kept = {name: own for name in wanted if (own := model.kept(sample, name)) is not None}
    if len(kept) == len(wanted):
        return {**known, **kept}
    if exact is not None:
        scorer = model.scorer_to_change()
    else:
        # The card needs a model in float32, unlike this one. This one is loaded too, since that checks its canaries.
        model.scorer()
        model.release()
        scorer = load(model.path, attention=run.attention, check=False)
    scores = score_precisions(scorer, sample, names, exact=exact, budget=run.micro_token_budget)
    for name in wanted:
        model.keep(sample, name, scores[name])
    return scores
