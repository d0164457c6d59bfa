"""The report of `rewardlab gold curve`: text for the terminal, a page with charts, Markdown, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rewardlab.analysis.best_of_n import Point
from rewardlab.analysis.json_form import encode
from rewardlab.analysis.overoptimisation import KL_LABEL, Overoptimisation
from rewardlab.core.config import to_mapping
from rewardlab.core.files import provenance
from rewardlab.core.types import Estimate
from rewardlab.gold.curving.config import CurveConfig
from rewardlab.gold.curving.pictures import both_sets, charts_of, gold_of
from rewardlab.gold.curving.run import PromptSet, Result, inputs_of
from rewardlab.gold.curving.words import fit_sentence, headline, interval, sentence, sizes, told_apart
from rewardlab.gold.findings import percent
from rewardlab.report import document
from rewardlab.report.document import Block, Charts, Document, Paragraph, Section, Table
from rewardlab.report.tables import format_count, format_estimate, format_p, interval_note, report_width, text_table

MADE_BY: Final = "rewardlab gold curve"
HEADER: Final = ("proxy", "n", "KL ≤", "gold", "gain of gold", "gain of proxy")
PAIRED: Final = ("proxies", "difference of gold", "p", "at the largest n")
UNITS: Final = (
    "Gold is in its own unit; the gain of a proxy by its own pick is in its standard deviations within prompts. Each "
    "point is the mean over all subsets of n replies, which is unbiased. * marks an n above half of the replies, where "
    "a point depends on the one or two best of each prompt."
)
BOUND: Final = (
    f"KL ≤ is log n − (n − 1)/n, the {KL_LABEL}, not its value: where replies repeat or a proxy ties them the "
    "divergence is smaller."
)
RULES: Final = (
    "A curve turns over if gold at the largest n is shown to lie below that at a smaller one, by the largest t "
    "statistic over all n, at 5% over all curves (Holm). The sizes at which gold may be highest are those that the "
    "same test does not rule out at 5%, for each curve alone."
)
COLUMNS: Final = (
    *("prompts", "proxy", "trained_weights", "n", "kl_upper_bound", "above_half_of_replies"),
    *("gold", "gold_low", "gold_high", "gold_gain", "gold_gain_low", "gold_gain_high"),
    *("proxy_score", "proxy_score_low", "proxy_score_high"),
    *("proxy_gain", "proxy_gain_low", "proxy_gain_high"),
    *("proxy_gain_sd", "proxy_gain_sd_low", "proxy_gain_sd_high"),
)
"""Columns of curve.csv."""


def text_report(result: Result) -> str:
    """Return the report for a terminal."""
    width = report_width()
    blocks = [headline(result)]
    for one in result.sets:
        blocks.append(textwrap.fill(_facts(one), width=width))
        for own in result.of(one.name):
            said = "\n".join(
                textwrap.fill(text, width=width, initial_indent="  ", subsequent_indent="  ") for text in _says(own)
            )
            blocks.append(f"{result.label(own.proxy)}, {own.prompts}: {own.verdict}\n{said}")
        blocks.append(text_table(HEADER, _rows(result, one)))
        if paired := _paired(result, one):
            blocks.append(text_table(PAIRED, paired))
    blocks += [textwrap.fill(text, width=width) for text in (*result.notes, UNITS, BOUND, RULES)]
    return "\n" + "\n\n".join(blocks)


def json_report(result: Result, config: CurveConfig) -> dict[str, Any]:
    """Return the report as JSON values; numbers that are not there are null."""
    return {
        "made_by": MADE_BY,
        "headline": headline(result),
        "most": result.most,
        "kl": KL_LABEL,
        "sets": encode(result.sets),
        "curves": [
            {
                **encode(one),
                "verdict": one.verdict,
                "sentence": sentence(one),
                "fit_cannot_tell": one.fit.why_not or None,
            }
            for one in result.curves
        ],
        "sources": dict(result.sources),
        "sizes": encode(dict(result.sizes)),
        "contrasts": encode(result.contrasts),
        "notes": list(result.notes),
        "inputs": {one.name: own.digests() for one, own in zip(result.sets, inputs_of(config), strict=True)},
        "settings": to_mapping(config),
        "provenance": json.loads(json.dumps(provenance())),
    }


def csv_report(result: Result) -> str:
    """Return every point of every curve, a row each."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(COLUMNS)
    replies = {one.name: one.replies for one in result.sets}
    for one in result.curves:
        for point, scaled in zip(one.points, one.scaled, strict=True):
            estimates = (point.gold, point.gold_gain, point.proxy, point.proxy_gain, scaled)
            numbers = [value for own in estimates for value in _three(own)]
            doubt = int(2 * point.n > replies[one.prompts])
            size = result.sizes.get(one.proxy)
            trained = size.num if size is not None and size.is_trained else ""
            writer.writerow([one.prompts, one.proxy, trained, point.n, point.kl_bound, doubt, *numbers])
    return sink.getvalue()


def _three(estimate: Estimate | None) -> list[float | str]:
    """Return value and limits, empty where there is none."""
    if estimate is None:
        return ["", "", ""]
    return [value if value == value else "" for value in (estimate.value, estimate.low, estimate.high)]


def page(result: Result) -> Document:
    """Return the report as a page."""
    is_good = all(one.verdict == "no turn-over" for one in result.curves)
    verdict: list[Block] = [Paragraph(text=headline(result), tone="note" if is_good else "warning"), _verdicts(result)]
    compared = tuple(both_sets(result))
    verdict += [Charts(charts=compared)] if compared else []
    sections = [Section(title="Where gold turns over", blocks=tuple(verdict))]
    for one in result.sets:
        sections.append(Section(title=one.name.capitalize(), blocks=tuple(_set_blocks(result, one))))
    notes = [Paragraph(text=text, tone="note") for text in (*result.notes, UNITS, BOUND, RULES)]
    sections.append(Section(title="How to read it", blocks=tuple(notes)))
    return Document(
        title="Over-optimisation",
        made_by=f"{MADE_BY}: what happens to gold as a proxy picks the best of ever more replies",
        parts=(document.Part(title="Curves", sections=tuple(sections)),),
        generator=MADE_BY,
    )


def _verdicts(result: Result) -> Table:
    return document.with_intervals(
        caption=f"Fall of gold from its maximum to n = {result.most}",
        header=("proxy", "size", "prompts", "verdict", "gold highest at n", "fall"),
        rows=[
            [
                own.proxy,
                str(result.sizes.get(own.proxy) or "—"),
                own.prompts,
                own.verdict,
                f"{own.turn.peak.value:g} ({'—' if math.isnan(own.adjusted_p) else sizes(own)})",
                format_estimate(own.turn.fall),
            ]
            for own in result.curves
        ],
        estimates=[own.turn.fall for own in result.curves],
        label="fall of gold",
        mark=0.0,
        notes=[
            "The maximum was found in the same data, which the limits allow for and the value does not.",
            interval_note([own.turn.fall for own in result.curves]),
        ],
    )


def _set_blocks(result: Result, one: PromptSet) -> Iterator[Block]:
    yield Paragraph(text=_facts(one))
    for own in result.of(one.name):
        yield Paragraph(text=f"{result.label(own.proxy)}: {own.verdict}. {' '.join(_says(own))}")
    yield Charts(charts=tuple(charts_of(result, one)))
    yield Table(
        caption=f"Curves, {one.name}",
        header=HEADER,
        rows=tuple(map(tuple, _rows(result, one))),
        notes=(interval_note([gold_of(own, 0) for own in result.of(one.name)]), "All n are in curve.csv."),
    )
    found = [own for own in result.contrasts if own.prompts == one.name]
    if found:
        yield document.with_intervals(
            caption=f"Gold by the picks of two proxies at n = {result.most}, paired by prompt",
            header=PAIRED,
            rows=_paired(result, one),
            estimates=[own.difference for own in found],
            label="difference of gold",
            mark=0.0,
            notes=[interval_note([own.difference for own in found]), "p: sign flips by prompt, Holm over all pairs."],
        )


def _says(own: Overoptimisation) -> list[str]:
    return [sentence(own), fit_sentence(own.fit, own.most)]


def _paired(result: Result, one: PromptSet) -> list[list[str]]:
    return [
        [f"{own.second} − {own.first}", interval(own.difference), format_p(own.adjusted), told_apart(own)]
        for own in result.contrasts
        if own.prompts == one.name
    ]


def _facts(one: PromptSet) -> str:
    levels = "; ".join(f"{name} {percent(own)}" for name, own in one.levels.items())
    return (
        f"{one.name.capitalize()}: {format_count(one.num_used)} rows of {format_count(one.num_rows)}, "
        f"{format_count(one.num_prompts)} prompts, {one.replies:g} replies each (median). Of the replies to a prompt "
        f"{percent(one.texts)} are different texts. Different scores: {levels}."
    )


def _rows(result: Result, one: PromptSet) -> list[list[str]]:
    """Return the rows of a table: each proxy at powers of two, where gold is highest, and at the largest n."""
    return [_row(own, own.points[n - 1], one) for own in result.of(one.name) for n in _told(own)]


def _told(own: Overoptimisation) -> Sequence[int]:
    powers = [2**k for k in range(own.most.bit_length()) if 2**k <= own.most]
    return sorted({*powers, round(own.turn.peak.value), own.most})


def _row(own: Overoptimisation, point: Point, one: PromptSet) -> list[str]:
    assert point.gold is not None
    return [
        own.proxy,
        f"{point.n}{'*' if 2 * point.n > one.replies else ''}",
        f"{point.kl_bound:.2f}",
        interval(point.gold),
        interval(gold_of(own, point.n - 1)),
        interval(own.scaled[point.n - 1]),
    ]
