"""Judges several models, or the bootstrap heads of a probe, as one on public test suites (`--ensemble`, `--suite`).

A suite fits nothing: members are put on one scale by what `rewardlab calibrate --store` recorded in each, as
`rewardlab score` does. The rule of the suite is applied to the combined scores. A reply that a member cannot score has
no combined score, so that it loses its comparisons.

Legend: M members, R replies of a suite with a score by one of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from rewardlab.analysis.ensembles import COMBINATIONS, combinations
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.suites.judging import judge_suite
from rewardlab.core.config import to_mapping
from rewardlab.core.files import provenance, write_json
from rewardlab.core.spec import read_spec
from rewardlab.core.types import ScoreRow
from rewardlab.data.suites.reading import SuiteData, folder_of, read_suite
from rewardlab.evaluation.config import EvalConfig
from rewardlab.evaluation.ensembles import (
    ENSEMBLE,
    read_scaled_heads,
    require_heads,
    stored_scales,
    tell_of_other_data,
)
from rewardlab.evaluation.saved import SavedModel
from rewardlab.evaluation.suites import JudgedSuites, SuiteEvaluation, facts, tokenise, write_suite
from rewardlab.score import compute_groups

NAMES: Final = {how: f"{ENSEMBLE}.{how}" for how in COMBINATIONS}
"""Combination -> its name, which is that of its folder, too."""
BY_CALIBRATION: Final = "the mean and standard deviation of the calibration rows that each holds"
BY_PROBE: Final = "the mean state and the standard deviation of the replies that the probe was fitted to"
Key = tuple[str, int]
"""Id of an item, and number of a reply in it."""


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A suite as the members score it."""

    rows: Mapping[Key, ScoreRow]
    """[R] what the first member with a score says of a reply, with the most that was cut for any of them."""
    members: Sequence[str]
    scores_MR: FloatArray
    """In standard deviations; NaN where a member has no score."""


def require_scales(config: EvalConfig) -> None:
    """Raise ConfigError, before anything is scored, for a single model without heads or a member without a scale."""
    if len(config.run.ensemble) == 1:
        require_heads(config.run.ensemble[0])
    else:
        stored_scales(config.run.ensemble)
        tell_of_other_data({model: read_spec(Path(model)) for model in config.run.ensemble})


def judge_as_one(place: Path, config: EvalConfig, members: Mapping[str, JudgedSuites]) -> dict[str, JudgedSuites]:
    """Judge the models of `--ensemble`, which were judged each for itself, as one; return combination -> its suites.

    The results of each combination are written to a folder of its name in `place`. Raises as `require_scales` does, and
    ArtifactError for a probe of which an earlier version wrote no scale.
    """
    run = config.run
    judged: dict[str, list[SuiteEvaluation]] = {name: [] for name in NAMES.values()}
    of_heads = len(run.ensemble) == 1
    model = SavedModel(config.replace(model=run.ensemble[0], models=(), ensemble=())) if of_heads else None
    found: list[SuiteData] = []
    names: Sequence[str] = list(members)
    for number, suite in enumerate(run.suite):
        data = read_suite(suite, folder_of(suite, run.suite, run.suite_data))
        own = {name: of_model.suites[number].rows for name, of_model in members.items()}
        scaled = _of_models(own, run.ensemble) if model is None else _of_heads(model, data, *own.values())
        for how, scores_R in combinations(scaled.scores_MR, penalty=run.ensemble_penalty).items():
            judged[NAMES[how]].append(_judge(data, scaled, scores_R, place / NAMES[how], seed=run.seed))
        found.append(data)
        names = scaled.members if model is None else [f"{len(scaled.members)} bootstrap heads"]
    said = f"of {', '.join(names)}, each put on one scale by {BY_PROBE if of_heads else BY_CALIBRATION}."
    meanings = {how: f"{meaning}: {said}" for how, meaning in COMBINATIONS.items()}
    meanings["lower"] = f"{COMBINATIONS['lower']} (λ = {run.ensemble_penalty:g}): {said}"
    for how, name in NAMES.items():
        _write_manifest(place / name, config, found, {"members": list(names), "how": how, "meaning": meanings[how]})
    return {NAMES[how]: JudgedSuites(suites=judged[NAMES[how]], card=None, meaning=meanings[how]) for how in NAMES}


def _of_models(rows: Mapping[str, Sequence[ScoreRow]], folders: Sequence[str]) -> Scaled:
    """Return the scores of several models, in standard deviations of the calibration rows that each holds."""
    known = _together(rows.values())
    place = {key: number for number, key in enumerate(known)}
    scores_MR = np.full((len(rows), len(known)), np.nan)
    for scores_R, scale, own in zip(scores_MR, stored_scales(folders), rows.values(), strict=True):
        scores_R[[place[_key(row)] for row in own]] = [(row.score - scale.mean) / scale.std for row in own]
    return Scaled(rows=known, members=list(rows), scores_MR=scores_MR)


def _of_heads(model: SavedModel, data: SuiteData, rows: Sequence[ScoreRow]) -> Scaled:
    """Return the scores of a probe's bootstrap heads, with one pass through the backbone for all of them."""
    scorer = model.scorer()
    heads = read_scaled_heads(require_heads(str(model.path)), width=scorer.model.head.in_features, spec=model.spec)
    states = compute_groups(
        scorer.model,
        tokenise(data, model.renderer).groups,
        lambda batch: scorer.model.final_states(batch).float(),
        budget=model.config.run.micro_token_budget,
        progress=f"states of {data.suite} for the heads",
    )
    scores_MR = heads.scores(np.concatenate(states).astype(np.float64))
    return Scaled(rows=_together([rows]), members=["a head"] * len(scores_MR), scores_MR=scores_MR)


def _key(row: ScoreRow) -> Key:
    return row.preference_id, row.reply


def _together(members: Iterable[Sequence[ScoreRow]]) -> dict[Key, ScoreRow]:
    """Return a row for each reply that some member has scored, with the most that was cut for any of them."""
    known: dict[Key, ScoreRow] = {}
    for row in (row for rows in members for row in rows):
        first = known.setdefault(_key(row), row)
        known[_key(row)] = replace(
            first,
            truncated_tokens=max(first.truncated_tokens, row.truncated_tokens),
            truncated_reply_tokens=max(first.truncated_reply_tokens, row.truncated_reply_tokens),
        )
    return known


def _judge(data: SuiteData, scaled: Scaled, scores_R: FloatArray, folder: Path, *, seed: int) -> SuiteEvaluation:
    """Judge combined scores by the rule of a suite, and write them with the numbers."""
    by_key = dict(zip(scaled.rows, scores_R.tolist(), strict=True))
    by_item = [
        np.array([by_key.get((item.id, reply), math.nan) for reply in range(len(item.replies))]) for item in data.items
    ]
    rows = tuple(replace(row, score=by_key[key]) for key, row in scaled.rows.items())
    unscored = sum(map(len, by_item)) - len(rows)
    known_RM = np.isfinite(scaled.scores_MR).T
    # Of several members that lack a score the first is named, so that the numbers add up.
    causes = Counter(f"without a score by {scaled.members[int(np.argmin(own))]}" for own in known_RM if not own.all())
    causes["without a score by any member"] = unscored
    evaluation = SuiteEvaluation(
        result=judge_suite(data.suite, data.items, by_item, seed=seed, left_out=sum(data.left_out.values())),
        left_out=data.left_out,
        causes={cause: number for cause, number in causes.items() if number},
        truncated=sum(row.truncated_tokens > 0 for row in rows),
        shortened=sum(row.truncated_reply_tokens > 0 for row in rows),
        rows=rows,
    )
    write_suite(folder, data, evaluation, rows)
    return evaluation


def _write_manifest(folder: Path, config: EvalConfig, data: Sequence[SuiteData], ensemble: dict[str, object]) -> None:
    write_json(
        folder / "manifest.json",
        {
            "config": to_mapping(config.replace(model="", models=(), overwrite=False)),
            "data": [facts(one) for one in data],
            "tokens": {},
            "ensemble": ensemble | {"penalty": config.run.ensemble_penalty},
            "provenance": provenance(),
        },
    )
