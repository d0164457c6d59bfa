"""The report of `rewardlab gold build` for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from rewardlab.analysis.stats import MIN_CLUSTERS
from rewardlab.core.terminal import number_of, plural, quoted
from rewardlab.gold.building.config import BuildConfig
from rewardlab.gold.building.pairing import PAIR_CAUSES, REPLY_CAUSES, Counts
from rewardlab.gold.building.run import Built
from rewardlab.report.tables import format_count, format_estimate, interval_note, report_width, text_table

HEADER = ("side", "prompts", "labelled rows", "preferences", "pairs")


def text_report(built: Built, config: BuildConfig) -> str:
    """Return what was written and what was left out, by cause."""
    rows = [
        (name, *(format_count(told[column]) for column in ("prompts", "labels", "rows", "pairs")))
        for name, told in built.sides.items()
    ]
    width = report_width()
    lines = [textwrap.fill(line, width=width, subsequent_indent="  ") for line in _lines(built, config)]
    return "\n" + "\n\n".join([text_table(HEADER, rows), "\n".join(lines)])


def _lines(built: Built, config: BuildConfig) -> Iterator[str]:
    counts = built.counts
    yield (
        f"rows: {format_count(counts.rows)} read, {format_count(counts.rows_used)} "
        f"{plural(counts.rows_used, 'gives', 'give')} pairs; "
        f"{format_count(counts.rows_without_two)} {plural(counts.rows_without_two, 'has', 'have')} fewer "
        f"than two replies to compare, "
        f"{format_count(counts.rows_without_pair)} no pair that is decided"
    )
    yield _sum("replies", counts.replies, counts.replies_used, counts.replies_left_out, REPLY_CAUSES)
    yield _sum("pairs", counts.pairs, counts.pairs_used, counts.pairs_left_out, PAIR_CAUSES)
    yield from _warnings(counts)
    yield from _few_held_out(built)
    if built.shared:
        yield (
            f"both sides: {number_of(built.shared['prompts'], 'prompt')}, "
            f"{number_of(built.shared['near_duplicate_prompts'], 'group')} of alike "
            f"prompts and {number_of(built.shared['replies'], 'distinctive reply')} in common"
        )
    facts = built.facts
    yield (
        f"the better reply was sampled first in {format_estimate(facts.winner_first, percent=True)} and is the longer "
        f"one in {format_estimate(facts.winner_longer, percent=True)} (means over rows; "
        f"{interval_note([facts.winner_first, facts.winner_longer])})"
    )
    margins = ", ".join(f"{float(level):.0%}: {value:.4g}" for level, value in facts.margins.items())
    yield f"differences of gold scores, quantiles: {margins}"
    if config.soft_tau is not None:
        yield "labels are soft in the rows of our form only; TRL's pairs have no place for them"
    yield f"next: rewardlab gold train --data {quoted(str(built.folder))} --model MODEL --output-dir RUN"


def _sum(what: str, number: int, used: int, left_out: Mapping[str, int], causes: Mapping[str, str]) -> str:
    """Return a line that says how many are used, and how many are left out by cause."""
    reasons = [f"{format_count(left_out[cause])} {text}" for cause, text in causes.items() if left_out.get(cause)]
    return f"{what}: {format_count(number)}, {format_count(used)} used" + "".join(f"; {one}" for one in reasons)


def _few_held_out(built: Built) -> Iterator[str]:
    held_out = built.sides["test"]["prompts"] if "test" in built.sides else 0
    if 0 < held_out < MIN_CLUSTERS:
        yield (
            f"only {number_of(held_out, 'prompt')} {plural(held_out, 'is', 'are')} held out: below {MIN_CLUSTERS} "
            f"`rewardlab gold match` and `rewardlab gold curve` have no intervals and no verdict. Build again with a "
            f"larger --test-fraction (and --overwrite), or label more prompts"
        )


def _warnings(counts: Counts) -> Iterator[str]:
    if counts.rows_of_one_id:
        yield (
            f"{format_count(counts.rows_of_one_id)} {plural(counts.rows_of_one_id, 'row has', 'rows have')} "
            f"the id of an earlier row, as files that were numbered "
            f"alike do; all are used, but the ids of preferences do not tell them apart"
        )
    if counts.largest_disagreement:
        yield (
            f"identical replies to a prompt have gold scores up to {counts.largest_disagreement:.3g} apart: that much "
            f"of a difference is noise of the labelling"
        )
