"""Score the replies in a file with several saved reward models as one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from rewardlab.analysis.ensembles import Combination, Scale, combinations
from rewardlab.artifact.adapters import Members
from rewardlab.core.errors import ConfigError
from rewardlab.core.spec import CUT_MIDDLE, read_spec
from rewardlab.evaluation.ensembles import stored_scales, tell_of_other_data
from rewardlab.serve.file_scoring.file import DEFAULT, ScoreSettings, backend_of, settled, surveyed
from rewardlab.serve.file_scoring.journal import Outcome
from rewardlab.serve.file_scoring.results import FileScores, Result, result_of, with_spread

logger = logging.getLogger("rewardlab")
MEAN: Final = Combination()


def score_ensemble(
    models: Sequence[str],
    source: Path,
    target: Path,
    settings: ScoreSettings = DEFAULT,
    *,
    combination: Combination = MEAN,
) -> FileScores:
    """Write the rows of `source` to `target` with the combined score of the members, and their disagreement.

    Each member's score is brought to mean 0 and standard deviation 1 by what `rewardlab calibrate` stored in it, so the
    unit is a standard deviation. `score_std` (`score_stds` for several responses) is the standard deviation over the
    members. A reply that a member cannot score gets null, with the member and its cause in `score_error`;
    `truncated_tokens` and `truncated_reply_tokens` are the most that was cut for a member. If nothing is said about
    long conversations, they are refused if one of the members was trained without any. Members are scored one after the
    other, on one backbone if they are adapters of one base, and the scores of each are kept as `score_file` keeps them.

    A single model must be a probe, whose bootstrap heads are the members, computed in one pass: then the unit is a
    standard deviation of the probe's own scores on the replies that it was fitted to, whose mean is 0.

    Raises ConfigError for a single model that is not a probe, for a model that is named twice or has no calibration,
    and as `score_file` does.
    """
    if len(models) == 1:
        return _score_heads(models[0], source, target, settings, combination)
    scales = _scales(models)
    renderers = [read_spec(Path(model)).renderer for model in models]
    settings = settled(settings, renderers)
    members = Members([Path(model) for model in models], precision=settings.precision)
    backends = [backend_of(model, settings, members) for model in models]
    # The check reads a prompt as turns if at least one member does.
    bare = all(backend.bare for backend in backends)
    may_shorten = any(renderer.truncation == CUT_MIDDLE for renderer in renderers)
    with surveyed(source, target, settings, bare=bare, spread=True, may_shorten=may_shorten) as work:
        journals = work.journals([backend.identity for backend in backends])
        for number, (model, backend) in enumerate(zip(models, backends, strict=True), start=1):
            logger.info("member %d of %d: %s", number, len(models), model)
            work.score(backend, journals[number - 1])
        together = zip(*(journal.outcomes() for journal in journals), strict=True)
        counts = work.finish(_combined(outcomes, models, scales, combination) for outcomes in together)
    num_replies = counts.scored + counts.unscored
    backends[0].tell(journals[0].num_typed, num_replies, str(source))
    return counts


def _score_heads(
    model: str, source: Path, target: Path, settings: ScoreSettings, combination: Combination
) -> FileScores:
    """Do what `score_ensemble` does with the bootstrap heads of a probe."""
    renderer = read_spec(Path(model)).renderer
    settings = settled(settings, [renderer])
    backend = backend_of(model, settings, heads=combination)
    may_shorten = renderer.truncation == CUT_MIDDLE
    with surveyed(source, target, settings, bare=backend.bare, spread=True, may_shorten=may_shorten) as work:
        journal = work.journal(backend.identity)
        work.score(backend, journal)
        counts = work.finish(with_spread(outcome) for outcome in journal.outcomes())
    backend.tell(journal.num_typed, counts.scored + counts.unscored, str(source))
    return counts


def _scales(models: Sequence[str]) -> list[Scale]:
    places = [Path(model).resolve() for model in models]
    twice = [model for number, model in enumerate(models) if places[number] in places[:number]]
    if twice:
        raise ConfigError(f"--ensemble: {twice[0]} is named twice. Name it once.")
    scales = stored_scales(models)
    tell_of_other_data({model: read_spec(Path(model)) for model in models})
    return scales


def _combined(
    outcomes: Sequence[Outcome], models: Sequence[str], scales: Sequence[Scale], combination: Combination
) -> Result:
    """Return a row with its combined scores, or with the cause if a member could not be asked about it."""
    of_members = [result_of(outcome, list) for outcome in outcomes]
    refused = [result for result in of_members if result.is_refused]
    if refused:
        return replace(refused[0], spread=[None])
    raw_MR = np.array([[np.nan if value is None else value for value in own.scores] for own in of_members], np.float64)
    scaled_MR = np.stack([(raw_R - scale.mean) / scale.std for raw_R, scale in zip(raw_MR, scales, strict=True)])
    scores_R = combinations(scaled_MR, penalty=combination.penalty)[combination.how]
    known_R = np.isfinite(scores_R)
    values = [float(score) if known else None for score, known in zip(scores_R, known_R, strict=True)]
    spread = [
        float(scaled_MR[:, number].std(ddof=1)) if known else None for number, known in enumerate(known_R.tolist())
    ]
    cut = [max(numbers) for numbers in zip(*(own.truncated_tokens for own in of_members), strict=True)]
    shortened = [max(numbers) for numbers in zip(*(own.truncated_reply_tokens for own in of_members), strict=True)]
    errors: dict[int, str] = {}
    for own, model in zip(reversed(of_members), reversed(models), strict=True):
        errors |= {number: f"{model}: {cause}" for number, cause in own.causes.items()}
    return Result(
        scores=values,
        raw=values,
        truncated_tokens=cut,
        truncated_reply_tokens=shortened,
        causes=errors,
        spread=spread,
    )
