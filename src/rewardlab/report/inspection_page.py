"""The report of an inspection of datasets, as one HTML page with histograms, in the style of the other reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from rewardlab.analysis.inspection import Inspection, Sample, Spread
from rewardlab.core.terminal import number_of, plural
from rewardlab.core.types import Estimate
from rewardlab.report.ceiling import ceiling_line
from rewardlab.report.charts import Axis, Bar, Chart, Dot, Rule, axis, share_axis
from rewardlab.report.document import (
    Block,
    Charts,
    Document,
    Facts,
    Paragraph,
    Part,
    Section,
    Shown,
    Table,
    Turn,
    shown,
    with_intervals,
)
from rewardlab.report.inspection import (
    inspected_by,
    judge_notes,
    label_counts,
    label_estimates,
    label_notes,
    language_estimates,
    length_notes,
    length_spreads,
    row_facts,
    script_words,
    spread_rows,
)
from rewardlab.report.page import html_page
from rewardlab.report.tables import format_count, interval_note

GENERATOR: Final = "rewardlab data inspect"
MARK: Final = f'<meta name="generator" content="{GENERATOR}">'
"""The line that marks a page as one that an inspection wrote and may replace."""
MOST_CHARACTERS: Final = 4000
"""Most characters that are shown of a turn; the rest is counted."""
MOST_BARS: Final = 16
"""Most bars of a chart of K or of turns; all larger values share one bar."""


def inspection_page(found: Sequence[Inspection], causes: Mapping[str, str]) -> str:
    """Return the page about datasets. `causes` maps each cause of dropping a row to its meaning."""
    title = f"Preference data: {found[0].name}" if len(found) == 1 else f"{len(found)} sets of preference data"
    return html_page(
        Document(
            title=title,
            made_by=inspected_by(),
            parts=tuple(Part(title=f"{one.name} [{one.split}]", sections=_sections(one, causes)) for one in found),
            generator=GENERATOR,
        )
    )


def _sections(found: Inspection, causes: Mapping[str, str]) -> tuple[Section, ...]:
    sections = [
        Section(title="Rows", blocks=tuple(_rows(found, causes))),
        Section(title="Lengths", blocks=tuple(_lengths(found))),
        Section(title="Labels and baselines", blocks=tuple(_labels(found))),
        Section(title="Strengths", blocks=() if found.strengths is None else tuple(_strengths(found.strengths))),
        Section(title="Agreement and the noise ceiling", blocks=tuple(_judges(found))),
        Section(title="Scripts and languages", blocks=tuple(_tongues(found))),
        Section(title="Samples", blocks=tuple(map(_sample, found.samples))),
    ]
    return tuple(section for section in sections if section.blocks)


def _rows(found: Inspection, causes: Mapping[str, str]) -> Iterable[Block]:
    yield Paragraph(text=f"Format: {found.format}, since {found.why}.")
    looked = f" {format_count(found.used)} of them are looked at (--limit)." if found.used < found.kept else ""
    yield Paragraph(
        text=f"{number_of(found.rows_read, 'row')} read: {format_count(found.kept)} kept, "
        f"{format_count(found.rows_read - found.kept)} dropped.{looked}",
    )
    if found.dropped:
        yield Table(
            caption="Dropped rows, by cause",
            header=("cause", "rows", "meaning", "for example"),
            rows=tuple(
                (cause, format_count(count), causes.get(cause, ""), " · ".join(found.examples.get(cause, ())))
                for cause, count in found.dropped.items()
            ),
        )
    if found.left_out:
        yield Paragraph(text=f"Replies: {found.left_out}")
    yield Facts(caption="What is in them", pairs=tuple(row_facts(found)))
    charts = {
        "Replies a row": (found.num_replies, "replies (K)"),
        "Turns of the prompt": (found.turns, "turns, system turns not counted"),
    }
    # A chart with a single bar would only repeat the facts above it.
    drawn = tuple(_counts(title, *what) for title, what in charts.items() if len(what[0]) > 1)
    if drawn:
        yield Charts(charts=drawn)


def _lengths(found: Inspection) -> Iterable[Block]:
    lengths = found.lengths
    yield _quantiles(length_spreads(lengths), "Lengths, of all rows")
    yield from (Paragraph(text=note, tone="note") for note in length_notes(found))
    rules = () if lengths.limit is None else (Rule(axis="x", at=float(lengths.limit), label="limit"),)
    whole = lengths.conversations.histogram.edges
    within = bool(whole) and lengths.limit is not None and lengths.limit <= whole[-1]
    charts = (
        _histogram("Prompts", lengths.prompts, lengths.unit, "prompt"),
        _histogram("Replies", lengths.replies, lengths.unit, "reply"),
        _histogram("Prompt and reply together", lengths.conversations, lengths.unit, "conversation", rules * within),
    )
    yield Charts(charts=tuple(chart for chart in charts if chart is not None))


def _labels(found: Inspection) -> Iterable[Block]:
    named = label_estimates(found)
    yield Paragraph(text=label_counts(found.labels))
    yield with_intervals(
        caption="Shares of decided comparisons",
        header=("what", "share", "conversations"),
        rows=[(name, shown(own), format_count(own.n)) for name, own in named.items()],
        estimates=list(named.values()),
        label="share",
        mark=0.5,
        notes=[interval_note(named.values())],
    )
    yield from (Paragraph(text=note, tone="note") for note in label_notes(found))
    zero = (Rule(axis="x", at=0.0, label="equal"),)
    title = "Length of the better reply minus that of the other"
    charts = (
        _histogram(title, found.labels.difference, found.lengths.unit, "comparison", zero),
        _by_difference(found.labels.by_difference),
    )
    yield Charts(charts=tuple(chart for chart in charts if chart is not None))


def _strengths(strengths: Spread) -> Iterable[Block]:
    yield _quantiles({"strength": strengths}, "Strengths, of all comparisons that have one")
    if (chart := _histogram("Strengths", strengths, "strength", "comparison")) is not None:
        yield Charts(charts=(chart,))


def _judges(found: Inspection) -> Iterable[Block]:
    yield from (Paragraph(text=note) for note in judge_notes(found.judges))
    if found.judges.alpha:
        caption = "Krippendorff's α: 1 where all agree, 0 where judgements say nothing"
        yield _estimates(found.judges.alpha, caption, "α", "prompts")
    if found.judges.ceilings:
        named = {f"from {one.source}": one.accuracy for one in found.judges.ceilings}
        yield _estimates(named, "Noise ceiling: what a perfect model would reach", "ceiling", "prompts")
        yield from (Paragraph(text=ceiling_line(one), tone="note") for one in found.judges.ceilings)


def _tongues(found: Inspection) -> Iterable[Block]:
    yield Paragraph(text=script_words(found))
    if found.tongues.languages:
        caption = f"Languages, guessed of {number_of(found.tongues.sampled, 'reply')} drawn with the seed"
        yield _estimates(language_estimates(found), caption, "share", "prompts")
    elif found.tongues.missing:
        yield Paragraph(text=f"{found.tongues.missing[0].upper()}{found.tongues.missing[1:]}.", tone="note")


def _sample(sample: Sample) -> Shown:
    tokens = [
        (f"Reply {number} as the model sees it", (_turn("", text),)) for number, text in enumerate(sample.rendered)
    ]
    return Shown(
        title=sample.place,
        facts=(sample.judged,),
        prompt=tuple(_turn(role, text) for role, text in sample.prompt),
        replies=(
            *(
                (f"Reply {number}", tuple(_turn(role, text) for role, text in turns))
                for number, turns in enumerate(sample.replies)
            ),
            *tokens,
        ),
    )


def _turn(role: str, text: str) -> Turn:
    return Turn(role=role, text=text[:MOST_CHARACTERS], left_out=max(len(text) - MOST_CHARACTERS, 0))


def _quantiles(named: Mapping[str, Spread], caption: str) -> Table:
    head, rows = spread_rows(named)
    return Table(caption=caption, header=("of", *head[1:]), rows=tuple(map(tuple, rows)))


def _estimates(named: Mapping[str, Estimate], caption: str, label: str, counted_in: str) -> Table:
    return with_intervals(
        caption=caption,
        header=("what", label, counted_in),
        rows=[(name, shown(own), format_count(own.n)) for name, own in named.items()],
        estimates=list(named.values()),
        label=label,
        notes=[interval_note(named.values())],
    )


def _histogram(title: str, found: Spread, unit: str, thing: str, rules: tuple[Rule, ...] = ()) -> Chart | None:
    """Return the histogram of a spread; None without values."""
    bars = found.histogram
    if not bars.counts:
        return None
    beyond = (
        f" {format_count(bars.beyond)} more {plural(bars.beyond, 'lies', 'lie')} outside the drawing."
        if bars.beyond
        else ""
    )
    middle = found.quantiles["50%"]
    return Chart(
        title=title,
        words=f"{number_of(found.count, thing)}; in {unit}, half of them up to {middle:,.4g}, from "
        f"{found.lowest:,.4g} to {found.highest:,.4g}.{beyond}".replace("-", "−"),
        x=axis(unit, bars.edges),
        y=axis(plural(2, thing), map(float, bars.counts), include=(0.0,), num_ticks=4, whole=True),
        bars=tuple(
            Bar(series=0, left=left, right=right, height=float(count))
            for (left, right), count in zip(pairwise(bars.edges), bars.counts, strict=True)
        ),
        rules=tuple(rule for rule in rules if bars.edges[0] < rule.at < bars.edges[-1]),
    )


def _counts(title: str, counts: Mapping[int, int], label: str) -> Chart:
    """Return a chart with a bar for each value, and one for all values above the first few."""
    listed = dict(list(counts.items())[:MOST_BARS])
    rest = sum(counts.values()) - sum(listed.values())
    names = [f"{value}" for value in listed]
    heights = [float(count) for count in listed.values()]
    if rest:
        names.append("more")
        heights.append(float(rest))
    words = ", ".join(f"{name}: {height:,.0f}" for name, height in zip(names, heights, strict=True))
    places = tuple(float(number) for number in range(len(names)))
    return Chart(
        title=title,
        words=f"{words} rows." if words else "No rows.",
        x=Axis(label=label, low=-0.5, high=max(len(names), 1) - 0.5, ticks=places, names=tuple(names)),
        y=axis("rows", heights, include=(0.0,), num_ticks=4, whole=True),
        bars=tuple(
            Bar(series=0, left=place - 0.4, right=place + 0.4, height=height)
            for place, height in zip(places, heights, strict=True)
        ),
    )


def _by_difference(found: Sequence[tuple[str, Estimate]]) -> Chart | None:
    """Return a chart of how often the longer reply is the better one, by the size of the difference."""
    there = [(size, own) for size, own in found if math.isfinite(own.value)]
    if len(there) < 2:
        return None
    places = tuple(float(number) for number in range(len(there)))
    return Chart(
        title="How often the longer reply is the better one",
        words="; ".join(f"{size}: {shown(own)}" for size, own in there) + ". The dotted line is one half.",
        x=Axis(
            label=f"size of the difference ({there[0][0].partition(' ')[2]})",
            low=-0.5,
            high=len(there) - 0.5,
            ticks=places,
            names=tuple(size.partition(" ")[0] for size, _ in there),
        ),
        y=share_axis("longer is better"),
        dots=tuple(
            Dot(series=0, at=(place, own.value), low=own.low, high=own.high, text=f"{size}: {shown(own)}")
            for place, (size, own) in zip(places, there, strict=True)
        ),
        rules=(Rule(axis="y", at=0.5),),
    )
