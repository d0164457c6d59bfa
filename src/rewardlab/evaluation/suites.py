"""Judges a saved model on public test suites, each by its own rule (`rewardlab eval --suite`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.json_form import encode
from rewardlab.analysis.precision import PrecisionCard
from rewardlab.analysis.suites.judging import SuiteResult, judge_suite
from rewardlab.core.bars import bar
from rewardlab.core.config import to_mapping
from rewardlab.core.errors import RenderError
from rewardlab.core.evaluation_folder import placing_evaluation
from rewardlab.core.files import finite_or_none, provenance, sha256_file, write_json, write_jsonl
from rewardlab.core.run_folder import SCORES_SUM, SPEC_SUM
from rewardlab.core.suites import SuiteItem
from rewardlab.core.types import Comparison, Message, Preference, ScoreRow, TokenGroup
from rewardlab.core.values import require
from rewardlab.data.bulk import render_replies
from rewardlab.data.chat import EndsInPadding, Overlong, Renderer, ReplyTooLong
from rewardlab.data.layout import Rendered, lay_out
from rewardlab.data.markers import ControlTokensError
from rewardlab.data.suites.reading import SuiteData, folder_of, read_suite, require_suites
from rewardlab.data.token_report import tell_typed
from rewardlab.evaluation.config import EvalConfig
from rewardlab.evaluation.evaluate import Finish, card_maker, resolve
from rewardlab.evaluation.saved import SavedModel
from rewardlab.score import score_rows

CHUNK: Final = 64
"""Number of items that are rendered together."""
CAUSES: Final[Mapping[str, type[RenderError] | tuple[type[RenderError], ...]]] = {
    "longer than the model's limit": (ReplyTooLong, Overlong),
    "ends in the padding token": EndsInPadding,
    "control tokens that cannot be told apart": ControlTokensError,
}
REFUSED, NOT_FINITE = "refused by the chat template", "score not finite"


@dataclass(frozen=True, kw_only=True)
class SuiteEvaluation:
    """The results of a suite, with counts of its rows."""

    result: SuiteResult
    left_out: Mapping[str, int]
    """Cause for which the suite's rule does not judge a row -> number of rows."""
    causes: Mapping[str, int]
    """Cause for which a reply has no score -> number of replies; their comparisons count as lost."""
    truncated: int
    """Number of replies whose prompt was cut to fit the model's limit."""
    shortened: int
    """Number of replies whose middle was cut to fit it."""
    rows: Sequence[ScoreRow]
    """One for each reply that was scored, numbered as in the suite."""


@dataclass(frozen=True, kw_only=True)
class Tokenised:
    """The items of a suite as groups."""

    groups: tuple[TokenGroup, ...]
    items: tuple[int, ...]
    """Index of the item of each group; an item has no group if none of its replies could be rendered."""
    replies: tuple[tuple[int, ...], ...]
    """Index, in its item, of each reply of each group."""
    causes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class JudgedSuites:
    """What `rewardlab eval --suite` says of one model."""

    suites: Sequence[SuiteEvaluation]
    card: PrecisionCard | None
    """The same model in other precisions, on pairs of all the suites; None where that was not wanted or not
    possible."""
    meaning: str = ""
    """Of an ensemble: what was made of whose scores."""


def evaluate_suites(config: EvalConfig, *, finish: Finish | None = None) -> JudgedSuites:
    """Run `rewardlab eval --suite`: score each suite once, judge it by its rule, and write scores and rows.

    Raises DataError for a suite that cannot be read, ArtifactError for a damaged model, and ConfigError for a folder
    that holds a run, or an earlier evaluation without --overwrite.
    """
    config.require_complete()
    require(len(config.run.folders) == 1, "evaluate_suites judges one model. Give several to judge_suites.")
    config = config.replace(model=config.run.folders[0], models=(), ensemble=())
    require_suites(config.run.suite, config.run.suite_data)
    with placing_evaluation(config.run.output_dir, (), overwrite=config.run.overwrite) as place:
        judged = evaluate_suites_into(place, config)
        if finish is not None:
            finish(place)
    return judged


def evaluate_suites_into(place: Path, config: EvalConfig) -> JudgedSuites:
    """Judge one model as `evaluate_suites` does, and write the files to `place`, which is empty."""
    run, suites = config.run, config.run.suite
    model = SavedModel(config)
    # The data come first: what is wrong with them is told before weights are loaded and canaries scored.
    data = [read_suite(suite, folder_of(suite, suites, config.run.suite_data)) for suite in suites]
    tokenised = [tokenise(one, model.renderer) for one in data]
    scores = [
        model.scores(own.groups, progress=f"scoring {one.suite}") for one, own in zip(data, tokenised, strict=True)
    ]
    write_json(
        place / "manifest.json",
        {
            "config": to_mapping(resolve(config, model)),
            "data": [facts(one) for one in data],
            "tokens": {one.suite: dict(own.causes) for one, own in zip(data, tokenised, strict=True)},
            SPEC_SUM: model.spec_sum,
            "provenance": provenance(),
        },
    )
    judged = [
        _judge(one, own, its_scores, place, seed=run.seed)
        for one, own, its_scores in zip(data, tokenised, scores, strict=True)
    ]
    # The card comes last, since it changes the model.
    card = _card(place, config, model, tokenised, scores) if run.precision_card else None
    return JudgedSuites(suites=judged, card=card)


def _card(
    place: Path,
    config: EvalConfig,
    model: SavedModel,
    tokenised: Sequence[Tokenised],
    scores: Sequence[Sequence[np.ndarray]],
) -> PrecisionCard | None:
    """Write and return the precision card, on the preferences of all suites of which two replies have tokens; None if
    there are none and, with a warning, if the model cannot be computed in float32 here."""
    judged = [
        (group, own)
        for one, its_scores in zip(tokenised, scores, strict=True)
        for group, own in zip(one.groups, its_scores, strict=True)
        if group.comparisons
    ]
    if not judged:
        return None
    groups = [group for group, _ in judged]
    return card_maker(place, config, model, groups, score_rows(groups, [own for _, own in judged]))()


def tokenise(data: SuiteData, renderer: Renderer) -> Tokenised:
    """Render every reply of a suite, and count by cause those that cannot be rendered.

    Replies of a prompt share its tokens.
    """
    groups, numbers, replies = [], [], []
    causes: Counter[str] = Counter()
    for start in bar(range(0, len(data.items), CHUNK), title=f"tokenising {data.suite}"):
        preferences = [_preference(data.suite, item) for item in data.items[start : start + CHUNK]]
        for number, (preference, results) in enumerate(
            zip(preferences, render_replies(preferences, renderer), strict=True), start
        ):
            rendered = {index: one for index, one in enumerate(results) if isinstance(one, Rendered)}
            causes.update(_cause(one) for one in results if isinstance(one, RenderError))
            if rendered:
                judged = tuple(c for c in preference.comparisons if c.first in rendered and c.second in rendered)
                groups.append(lay_out(replace(preference, comparisons=judged), rendered))
                numbers.append(number)
                replies.append(tuple(sorted(rendered)))
    tell_typed(sum(group.num_typed for group in groups), sum(map(len, replies)), renderer.spec, data.suite)
    return Tokenised(groups=tuple(groups), items=tuple(numbers), replies=tuple(replies), causes=dict(causes))


def _preference(suite: str, item: SuiteItem) -> Preference:
    """Return an item as a preference, with each pair once, since score rows cannot hold a pair twice."""
    return Preference(
        id=item.id,
        source=f"{suite}/{item.subset}",
        prompt=item.prompt,
        replies=tuple((Message("assistant", reply),) for reply in item.replies),
        comparisons=tuple(Comparison(first=better, second=worse) for better, worse in dict.fromkeys(item.pairs)),
    )


def _cause(error: RenderError) -> str:
    return next((cause for cause, kind in CAUSES.items() if isinstance(error, kind)), REFUSED)


def scores_of_items(items: Sequence[SuiteItem], tokenised: Tokenised, scores: Sequence[FloatArray]) -> list[FloatArray]:
    """Return for each item [K] scores of its replies, NaN for those that could not be rendered."""
    all_scores = [np.full(len(item.replies), np.nan) for item in items]
    for number, replies, own in zip(tokenised.items, tokenised.replies, scores, strict=True):
        all_scores[number][list(replies)] = own
    return all_scores


def _judge(
    data: SuiteData, tokenised: Tokenised, scores: Sequence[np.ndarray], folder: Path, *, seed: int
) -> SuiteEvaluation:
    """Judge one suite by the scores of each group, and write `suite.<name>.scores.jsonl` and `suite.<name>.json`."""
    by_item = scores_of_items(data.items, tokenised, [own.astype(np.float64) for own in scores])
    result = judge_suite(data.suite, data.items, by_item, seed=seed, left_out=sum(data.left_out.values()))
    rows = score_rows(tokenised.groups, scores)
    not_finite = sum(not math.isfinite(row.score) for row in rows)
    evaluation = SuiteEvaluation(
        result=result,
        left_out=data.left_out,
        causes={**tokenised.causes, **({NOT_FINITE: not_finite} if not_finite else {})},
        truncated=sum(row.truncated_tokens > 0 for row in rows),
        shortened=sum(row.truncated_reply_tokens > 0 for row in rows),
        rows=rows,
    )
    write_suite(folder, data, evaluation, rows)
    return evaluation


def write_suite(folder: Path, data: SuiteData, evaluation: SuiteEvaluation, rows: Sequence[ScoreRow]) -> None:
    """Write the scores of a suite and, after them, its rows with the checksum of the scores."""
    scores = folder / f"suite.{data.suite}.scores.jsonl"
    write_jsonl(scores, (row.as_dict() for row in rows))
    write_json(
        folder / f"suite.{data.suite}.json",
        {
            **suite_summary(evaluation),
            "data": facts(data),
            SCORES_SUM: sha256_file(scores),
        },
    )


def suite_summary(evaluation: SuiteEvaluation) -> dict[str, object]:
    """Return every estimate and count of a suite, as JSON."""
    result = evaluation.result
    return {
        "suite": result.suite,
        "ties": result.ties,
        "weighting": result.weighting,
        "rows": [
            {
                "name": row.name,
                "kind": row.kind,
                "rows": row.num_rows,
                "score": encode(row.score),
                "ties_at_random": encode(row.fair),
                "baselines": {name: encode(own) for name, own in row.baselines.items()},
                "better_baseline": row.better,
                "gain": encode(row.gain),
                "p_value": finite_or_none(row.p_value),
                "p_holm": finite_or_none(row.p_holm),
            }
            for row in result.rows
        ],
        "num_rows": result.num_rows,
        "num_replies": result.num_replies,
        "unscored_rows": result.unscored_rows,
        "unscored_replies": dict(evaluation.causes),
        "truncated_replies": evaluation.truncated,
        "shortened_replies": evaluation.shortened,
        "left_out": dict(evaluation.left_out),
        "incomplete": {name: {"there": there, "published": all_} for name, (there, all_) in result.incomplete.items()},
    }


def facts(data: SuiteData) -> dict[str, object]:
    """Return what a manifest says of the data of a suite, as JSON."""
    return {
        "suite": data.suite,
        "items": len(data.items),
        "left_out": dict(data.left_out),
        "repeated": data.repeated,
        "sources": dict(data.sources),
    }
