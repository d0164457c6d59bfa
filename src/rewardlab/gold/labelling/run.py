"""Label every reply with the score of a gold reward model."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from rewardlab.core.config import to_mapping
from rewardlab.core.files import sha256_file
from rewardlab.curation.rewriting import as_line
from rewardlab.gold.files.layouts import write_rewards, write_rows
from rewardlab.gold.files.parts import Shard, shard_of
from rewardlab.gold.files.rows import GoldRow, read_gold_rows
from rewardlab.gold.judging.tally import Summary
from rewardlab.gold.kept_results import Kept
from rewardlab.gold.labelling.config import LabelConfig
from rewardlab.gold.labelling.judged import Judged, judge_all, judges_of
from rewardlab.gold.reward_models import RewardModel, Scored, reply_key, reward_models, score_by
from rewardlab.gold.stage import (
    Asked,
    Place,
    claimed,
    earlier,
    read_manifest,
    require_few_errors,
    require_own,
    require_same_source,
    write_manifest,
    writing,
)
from rewardlab.gold.workers import team_of

logger = logging.getLogger("rewardlab")
AT_A_TIME = 10_000
"""Scores of an earlier output that are taken over together."""
DECIDES = ("served_model_name", "overlong", "precision", "max_length")
"""Settings of scoring that decide a score; the others say how fast it comes."""


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """What was written."""

    place: Place
    counts: Mapping[str, int]
    """`rows`, `replies`, `scored`, `errors`, `cut`, and `examples` of errors."""
    examples: tuple[str, ...] = ()
    """Why replies have no score, a few of them."""
    was_complete: bool = False
    """Whether it had all been done before."""
    judge: Summary | None = None
    """What a language model as judge said and cost."""
    tokens: int = 0
    """Tokens of the conversations that this call had scored, as far as they are known."""
    tokens_per_s: float = 0.0
    """How many of them a second, the time to load the model included."""


def label(config: LabelConfig) -> Labelled:
    """Label the rows. The same call goes on from what an interrupted one left, and then writes the same files.

    Raises ConfigError if the output is of something else, DataError for rows that cannot be read, EndpointError if no
    server is left, ArtifactError for a folder that fails its checks, and DataError after the output is written if too
    many replies have no score.
    """
    shard = shard_of(config.shard)
    place = Place.of(config.output if shard is None else shard.path(config.output))
    by_judge = config.scoring.backend == "chat"
    inputs = config.rows.digests()  # first, so that a missing file is refused before a model is imported
    sources = [] if by_judge else reward_models(config.model, config.scoring)
    judges = judges_of(config.scoring, config.judge) if by_judge else []
    asked = _asked(config, shard, sources, inputs)
    may = {"overwrite": config.overwrite, "follow_input": config.follow_input}
    state = require_own(place, asked, read=config.rows.files(), **may)
    if not config.restart and state == "complete":
        logger.info("%s: is complete", place.rows)
        return _before(place)
    rows = partial(_rows, config, shard)
    accept = partial(require_same_source, place, overwrite=config.overwrite or config.restart)
    with claimed(place, restart=config.restart) as kept:
        if not config.restart:
            _take_over(place, kept)
        started = time.monotonic()
        if by_judge:
            done: Scored | Judged = judge_all(rows, judges, kept, accept=accept)
        else:
            # The name holds the commit of a model on the hub, so that workers of Ray load the very same one.
            model = sources[0].name if config.scoring.backend == "local" else config.model
            team = team_of(partial(reward_models, model, config.scoring), config.workers)
            done = score_by(rows, team, kept, title="labelling", accept=accept)
        spent = time.monotonic() - started
        with writing(place, asked):
            labelled = _write(place, rows, done)
            if isinstance(done, Scored) and done.num_tokens:
                labelled = replace(labelled, tokens=done.num_tokens, tokens_per_s=done.num_tokens / spent)
            write_manifest(place, asked, decided={"identity": dict(done.identity)}, counts=labelled.counts)
        # With errors the results stay for the next call: the rows hold neither all that a judge said, nor what was cut.
        kept.is_done = not labelled.counts["errors"]
    require_few_errors(
        place,
        errors=labelled.counts["errors"],
        replies=labelled.counts["replies"],
        most=config.max_error_fraction,
        examples=labelled.examples,
    )
    return labelled


def _rows(config: LabelConfig, shard: Shard | None) -> Iterator[GoldRow]:
    """Yield the rows. Raises DataError for a column that could not be written again, before anything is scored."""
    for row in _part(config, shard):
        if row.extra:
            as_line(row.extra, row.where)
        yield row


def _part(config: LabelConfig, shard: Shard | None) -> Iterator[GoldRow]:
    if shard is None:
        return config.rows.rows()
    wanted = shard.some_rows(sum(1 for _ in config.rows.rows()))
    return islice(config.rows.rows(), wanted.start, wanted.stop)


def _asked(config: LabelConfig, shard: Shard | None, sources: list[RewardModel], inputs: Mapping[str, str]) -> Asked:
    scoring = to_mapping(config.scoring)
    settings: dict[str, Any] = {
        "backend": config.scoring.backend,
        **{name: scoring[name] for name in DECIDES},
        **(_judge(config) if not sources else sources[0].asked),
        "num_responses": config.rows.num_responses,
        "system": config.rows.system,
        "shard": None if shard is None else f"{shard.number + 1}/{shard.count}",
    }
    return Asked(stage="label", settings=settings, inputs=inputs)


def _judge(config: LabelConfig) -> dict[str, Any]:
    """Return the settings that decide what a judge says."""
    judge = config.judge
    text = None if judge.judge_prompt is None else sha256_file(judge.judge_prompt)
    told: dict[str, Any] = {"judge_max_tokens": judge.judge_max_tokens, "judge_seed": judge.judge_seed}
    if judge.judge_template_arguments:
        told["judge_template_arguments"] = list(judge.judge_template_arguments)
    return {"judge_prompt": text, **told, "keep_answers": judge.keep_answers}


def _take_over(place: Place, kept: Kept) -> None:
    """Take over the scores of an earlier output, under keys made from what decided them."""
    manifest = earlier(place)
    if manifest is None:
        return
    identity = manifest["decided"].get("identity", {})
    if "template" in identity:  # a judge's scores are made from pairs, which are asked again
        return
    waiting: list[tuple[str, dict[str, float]]] = []
    for row in read_gold_rows(place.rows):
        for text, score in zip(row.responses, row.gold or (), strict=False):
            if text is not None and score is not None and (key := reply_key(row, text, identity)) not in kept:
                waiting.append((key, {"score": score}))
        if len(waiting) >= AT_A_TIME:
            kept.add(waiting)
            waiting = []
    if waiting:
        kept.add(waiting)


def _write(place: Place, rows: partial[Iterator[GoldRow]], found: Scored | Judged) -> Labelled:
    counts = {"rows": 0, "replies": 0, "scored": 0, "errors": 0}
    examples: dict[str, None] = {}

    def done() -> Iterator[GoldRow]:
        for row in rows():
            labelled = found.row(row)
            counts["rows"] += 1
            counts["replies"] += len(labelled.responses)
            counts["scored"] += len(labelled.responses) - len(labelled.gold_errors)
            counts["errors"] += len(labelled.gold_errors)
            for why in labelled.gold_errors.values():
                if len(examples) < 3:
                    examples.setdefault(why)
            yield labelled

    write_rows(place.rows, (row.as_json() for row in done()))
    write_rewards(place.twin, read_gold_rows(place.rows))
    counts["cut"] = found.cut
    summary = found.tally.summary() if isinstance(found, Judged) else None
    return Labelled(place=place, counts=counts, examples=tuple(examples), judge=summary)


def _before(place: Place) -> Labelled:
    manifest = read_manifest(place)
    assert manifest is not None
    return Labelled(place=place, counts=manifest["counts"], was_complete=True)
