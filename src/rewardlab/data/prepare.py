"""Datasets by name -> preferences and token groups for training, evaluation and test, with every row accounted for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

from rewardlab.core.terminal import number_of, plural
from rewardlab.data.chat import Renderer
from rewardlab.data.config import DataConfig, TrainingDataConfig
from rewardlab.data.controlled import controls_of, report_control, selected
from rewardlab.data.dataset_names import NOTHING, Given, all_named
from rewardlab.data.groups import Groups, Part
from rewardlab.data.kinds import Kinds, unlike
from rewardlab.data.reading import log_source, read_named
from rewardlab.data.splits import RULES, HeldOut, count_shared, hold_out
from rewardlab.data.tally import SourceReport
from rewardlab.data.token_report import TokenReport, report_of, require_enough, tell_typed

logger = logging.getLogger("rewardlab")
FEW_EVALUATIONS = 50
"""Below this many evaluation rows an accuracy is uncertain by ±14 points or more."""
FEWEST_PROMPTS: Final = 10
"""With fewer, numbers have no intervals."""
FEW_LEFT_OUT = 0.05
"""Share of preferences that may be left out for their tokens without a warning."""
HELD_OUT: Final = "held_out"
"""Purpose of training data that are read again, since a control changes what is held out of them in another way."""
FAR = 0.1
"""Relative difference between the prompts wanted and those held out above which a warning is logged."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Tokenised data by purpose, and the reports on them for the manifest."""

    train: Part
    eval: Part
    test: Part
    reports: dict[str, Any]


def load_data(
    config: DataConfig,
    renderer: Renderer,
    *,
    seed: int,
    kwise_loss: str = "pairs",
    held_out_by: Sequence[str] = RULES,
    given: Given = NOTHING,
    shows_row: bool = False,
) -> Prepared:
    """Read and tokenise the datasets that the configuration names, and hold out evaluation data.

    `eval` is empty unless `config` is a `TrainingDataConfig`, which says how a checkpoint is chosen. If that names no
    evaluation data, a share of the training prompts is held out by the first of the rules that can (see
    `roots.hold_out`). `given` are rows in memory instead of names. With `shows_row` the first row of
    each file is logged as it was understood. Texts that two kinds of data have in common are
    counted, and a warning is logged.

    Raises DataError or ConfigError for datasets that cannot be used, and DataError if nothing is left to train on.
    """
    rendering = config.rendering
    named = all_named(config, given)
    holds_out = (
        isinstance(config, TrainingDataConfig)
        and all(one.purpose != "eval" for one in named)
        and config.selection.eval_fraction > 0
    )
    controls = controls_of(config, seed)
    if holds_out and controls.get("train") != controls.get("eval"):
        named = [*named, replace(named[0], purpose=HELD_OUT)]
        controls |= {HELD_OUT: controls["eval"]} if "eval" in controls else {}
    read = read_named(
        named,
        config.reading,
        renderer,
        seed=seed,
        kwise_loss=kwise_loss,
        bare=rendering.joins_texts,
        controls=controls,
        shows_row=shows_row,
    )
    parts = read.parts
    sources = {purpose: reports for purpose, reports in read.sources.items() if purpose != HELD_OUT}
    reports: dict[str, Any] = {"preparation": list(read.preparation)}
    if read.weights:
        reports["weights"] = {purpose: shares for purpose, shares in read.weights.items() if purpose != HELD_OUT}
    reports |= {purpose: [report.as_dict() for report in several] for purpose, several in sources.items()}
    train = parts["train"]
    evaluation, test = (parts.get(purpose, train.take(np.empty(0, np.int64))) for purpose in ("eval", "test"))
    if holds_out:
        assert isinstance(config, TrainingDataConfig)
        # A control leaves the texts by which rows are held out as they were, so both readings have the same rows.
        split = hold_out(train.texts(), fraction=config.selection.eval_fraction, seed=seed, rules=held_out_by)
        held_out, train = parts.get(HELD_OUT, train).take(split.mask_P), train.take(~split.mask_P)
        whole = {"train": train, "eval": held_out, "test": test}
        held_out = selected(held_out)
        evaluation = draw(held_out, config.eval_limit, seed)
        used = {"evaluated": len(evaluation), "not_used": len(held_out) - len(evaluation)}
        reports["held_out"] = split.as_dict() | used
        _log_held_out(split)
    else:
        whole = {"train": train, "eval": evaluation, "test": test}
    if config.diagnostic.diagnostic_mode != "none":
        reports["control"] = report_control(config, whole, seed)
        train, evaluation, test = selected(train), selected(evaluation), selected(test)
    reports["shared"] = _count_all_shared(train, evaluation, test)
    _tell_other_kinds(sources, fills_system=rendering.system_prompt is not None)
    if 0 < len(evaluation) < FEW_EVALUATIONS:
        logger.warning(
            "only %d evaluation %s: too few to choose a checkpoint by; name more with --eval-dataset or "
            "--eval-fraction",
            len(evaluation),
            plural(len(evaluation), "row"),
        )
    _tell_few_prompts(evaluation, test)
    for source_reports in sources.values():
        for report in source_reports:
            log_source(report)
    return Prepared(train=train, eval=evaluation, test=test, reports=reports)


def _tell_few_prompts(evaluation: Part, test: Part) -> None:
    """Log a warning for rows that are many and have too few prompts between them for intervals."""
    for name, part in (("evaluation", evaluation), ("test", test)):
        prompts = len(np.unique(part.prompt_keys()))
        if len(part) >= FEW_EVALUATIONS and prompts < FEWEST_PROMPTS:
            logger.warning(
                "the %d %s rows have only %s: below %d their numbers have no intervals, and say little about other "
                "prompts; name more",
                len(part),
                name,
                number_of(prompts, "prompt"),
                FEWEST_PROMPTS,
            )


def _log_held_out(split: HeldOut) -> None:
    """Log how many prompts are held out, and what training sees of their conversations."""
    unseen = {
        "reply": "training sees none of their first turns and none of their replies but for phrases",
        "first_turn": "training sees none of their first turns, but some of their replies, which join nearly all rows",
        "prompt": "training sees none of these prompts, but first turns and replies of theirs",
    }
    missed = abs(split.prompts - split.wanted) > FAR * split.wanted
    logger.log(
        logging.INFO if split.rule == "reply" and not missed else logging.WARNING,
        "held out: %s%s; %s",
        number_of(split.prompts, "prompt"),
        f" instead of {split.wanted}, since up to {split.largest} belong together" if missed else "",
        unseen[split.rule],
    )


def _count_all_shared(train: Part, evaluation: Part, test: Part) -> dict[str, dict[str, int]]:
    """Count what two kinds of data have in common (see `roots.count_shared`), and log a line if it is anything."""
    counts = {}
    for (name, data), (other_name, other) in (
        (("evaluation", evaluation), ("training", train)),
        (("test", test), ("training", train)),
        (("test", test), ("evaluation", evaluation)),
    ):
        if not len(data) or not len(other):
            continue
        shared = counts[f"{name}_with_{other_name}"] = count_shared(data.texts(), other.texts())
        what = {"prompts": "prompt", "first_turns": "first turn", "replies": "reply"}
        if listed := ", ".join(number_of(shared[key], noun) for key, noun in what.items() if shared[key]):
            line = "the %s data share %s with the %s data (%d of %s); numbers on them flatter the model"
            logger.warning(line, name, listed, other_name, shared["rows"], number_of(len(data), "row"))
        if shared["phrases"]:
            phrases = number_of(shared["phrases"], "phrase")
            logger.info("the %s data share %s as replies with the %s data", name, phrases, other_name)
    return counts


def _tell_other_kinds(sources: Mapping[str, Sequence[SourceReport]], *, fills_system: bool) -> None:
    """Log a warning if evaluation or test data of their own are of another kind than the training data."""
    counted: dict[str, Kinds] = {}
    for purpose, several in sources.items():
        kinds = counted[purpose] = Kinds()
        for report in several:
            kinds.add(report.kept, report.system_turns, report.scripts)
    for purpose, name in (("eval", "evaluation"), ("test", "test")):
        if purpose in counted:
            for line in unlike(counted["train"], counted[purpose], name, fills_system=fills_system):
                logger.warning("data: %s", line)


Rows = TypeVar("Rows", Part, Groups)


def draw(rows: Rows, limit: int | None, seed: int) -> Rows:
    """Return at most `limit` rows, drawn with the seed, in their original order."""
    if limit is None or limit >= len(rows):
        return rows
    return rows.take(np.sort(np.random.default_rng((seed, len(rows))).permutation(len(rows))[:limit]))


def token_groups(
    part: Part,
    renderer: Renderer,
    max_drop_fraction: float,
    name: str,
    *,
    own_limit: bool = False,
    held_out: bool = False,
) -> tuple[Groups, TokenReport]:
    """Return the groups of a part of the data and the report on them, and log the report.

    `own_limit` says that the length limit comes with a model, so that no flag can raise it; `held_out` that the part
    was drawn from the training data.

    Raises DataError if too many rows cannot be used.
    """
    report = report_of(part)
    limit = renderer.spec.max_length
    require_enough(report, max_drop_fraction, f"{name} data", limit, own_limit=own_limit, held_out=held_out)
    logger.info(
        "tokens: %s: %s, %d tokens, %.2f times fewer than unshared; longest %d, cut %d%s",
        name,
        number_of(report.kept, "preference"),
        report.tokens,
        report.unshared_tokens / max(report.tokens, 1),
        report.longest,
        report.truncated_replies,
        f", cut in their middle {report.shortened_replies}" if report.shortened_replies else "",
    )
    tell_typed(report.special_tokens_in_text, report.replies, renderer.spec, name)
    if report.dropped:
        causes = ", ".join(f"{cause} {count}" for cause, count in report.dropped.items())
        count = report.preferences - report.kept
        level = logging.WARNING if count > FEW_LEFT_OUT * report.preferences else logging.INFO
        logger.log(
            level, "tokens: %s: %d of %s left out: %s", name, count, number_of(report.preferences, "preference"), causes
        )
    if report.lost_replies or report.lost_comparisons:
        logger.info(
            "tokens: %s: of the other preferences, left out: %s too long for the limit or without a rendering, and %s "
            "with these or between replies of equal tokens",
            name,
            number_of(report.lost_replies, "reply"),
            number_of(report.lost_comparisons, "comparison"),
        )
    return part.groups(), report
