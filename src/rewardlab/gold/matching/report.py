"""The report of `rewardlab gold match`: text for the terminal, a page, Markdown and JSON."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rewardlab.analysis.json_form import encode
from rewardlab.analysis.matching import SliceMatch
from rewardlab.core.config import to_mapping
from rewardlab.core.files import provenance
from rewardlab.core.terminal import number_of, plural
from rewardlab.core.types import Estimate
from rewardlab.gold.findings import exit_status, number, percent, points, worst
from rewardlab.gold.matching.config import MatchConfig
from rewardlab.gold.matching.examples import as_shown, said
from rewardlab.gold.matching.pictures import margins_chart
from rewardlab.gold.matching.run import Beside, Matched, PartMatch
from rewardlab.gold.pages import counted, finding_paragraph, finding_text, graver_first
from rewardlab.gold.shown import row_block, row_text
from rewardlab.report import document
from rewardlab.report.document import Block, Charts, Document, Paragraph, Section, Table
from rewardlab.report.tables import (
    column_notes,
    format_count,
    format_estimate,
    format_p,
    format_points,
    interval_note,
    missing_intervals,
    report_width,
    text_table,
)

MADE_BY: Final = "rewardlab gold match"
NAME: Final = "match"
MOST_IN_TERMINAL: Final = 240
"""Characters of a text of a pair that are shown in the terminal; the page has more."""
SIDE: Final = (
    "p is of the sign flips by prompt, after Holm's correction for the proxies; right and wrong alone: pairs that the "
    "proxy orders as gold does where the other does not, and the other way; the smallest difference is what these "
    "pairs show with 80% power."
)
SLICES: Final = (
    "apart: the match in the slice less that of all other pairs; p after Holm's correction for all slices of a proxy. "
    "Small margins of gold are harder for every proxy."
)


def headline(matched: Matched) -> str:
    """Return the outcome in words."""
    return f"{worst(matched.findings).upper()}: {counted(matched.findings)}."


def text_report(matched: Matched) -> str:
    """Return the report for a terminal."""
    width = report_width()
    several = len(matched.proxies) > 1
    blocks = [textwrap.fill(_facts(matched, part), width=width) for part in _parts(matched)]
    blocks += [textwrap.fill(note, width=width) for note in matched.notes]
    blocks.append(headline(matched))
    blocks += [finding_text(one, with_about=several) for one in graver_first(matched.findings)]
    for part in _parts(matched):
        for table, named in zip(_tables(part), _estimates(part), strict=True):
            reasons = [textwrap.fill(reason, width=width) for reason in missing_intervals(named)]
            blocks.append("\n".join([text_table(*_as_texts(table)), *reasons]))
        if part is matched.test:
            blocks += [*_slice_texts(part, width)]
    if matched.beside:
        blocks += [textwrap.fill(_beside_text(one), width=width, subsequent_indent="  ") for one in matched.beside]
        blocks.append(textwrap.fill(SIDE, width=width))
    if matched.standings:
        blocks.append(text_table(*_as_texts(_standings(matched))))
    for name, found in matched.examples.items():
        blocks.append(textwrap.fill(said(name, found), width=width))
        blocks += [row_text(as_shown(one), most=MOST_IN_TERMINAL) for one in found.pairs]
    return "\n" + "\n\n".join(blocks)


def json_report(matched: Matched, config: MatchConfig) -> dict[str, Any]:
    """Return the report as JSON values; numbers that are not there are null."""
    parts = {part.name: part for part in _parts(matched)}
    return {
        "made_by": MADE_BY,
        "status": worst(matched.findings),
        "exit_status": exit_status(matched.findings),
        "headline": headline(matched),
        "findings": encode(matched.findings),
        "proxies": list(matched.proxies),
        "sources": dict(matched.sources),
        "test": encode(parts.get("test")),
        "train": encode(parts.get("train")),
        "beside": encode(matched.beside),
        "standings": encode(matched.standings),
        "examples": encode(matched.examples),
        "notes": list(matched.notes),
        "settings": to_mapping(config),
        "inputs": config.rows.digests() | config.train.digests(),
        "provenance": json.loads(json.dumps(provenance())),
    }


def page(matched: Matched) -> Document:
    """Return the report as a page."""
    several = len(matched.proxies) > 1
    verdicts: list[Block] = [Paragraph(text=headline(matched))]
    verdicts += [finding_paragraph(one, with_about=several) for one in graver_first(matched.findings)]
    sections = [Section(title="Verdicts", blocks=tuple(verdicts))]
    if matched.beside:
        blocks: list[Block] = [_beside(matched), Paragraph(text=SIDE, tone="note")]
        blocks += [_standings(matched)] if matched.standings else []
        sections.append(Section(title="Proxies side by side", blocks=tuple(blocks)))
    for part in _parts(matched):
        title = f"Match with gold on {part.name}"
        sections.append(
            Section(
                title=title,
                blocks=(*_tables(part), _pictures(part), _slices(part), Paragraph(text=SLICES, tone="note")),
            )
        )
    for name, found in matched.examples.items():
        pairs: list[Block] = [row_block(as_shown(one)) for one in found.pairs]
        title = f"Where {name} and gold differ most"
        sections.append(Section(title=title, blocks=(Paragraph(text=said(name, found)), *pairs)))
    read: list[Block] = [Paragraph(text=_facts(matched, part)) for part in _parts(matched)]
    read += [Paragraph(text=note, tone="note") for note in matched.notes]
    sections.append(Section(title="What was read", blocks=tuple(read)))
    return Document(
        title=f"Match of {', '.join(matched.proxies)} with gold",
        made_by=f"{MADE_BY}: does a proxy follow the gold model, and if not, why?",
        parts=(document.Part(title="Match", sections=tuple(sections)),),
        generator=MADE_BY,
    )


def _parts(matched: Matched) -> list[PartMatch]:
    return [matched.test] if matched.train is None else [matched.test, matched.train]


def _facts(matched: Matched, part: PartMatch) -> str:
    what = matched.source if part is matched.test else "training rows"
    what += " (training rows)" if part is matched.test and part.name == "train" else ""
    left = {
        "pairs that gold ties": part.gold_ties,
        "pairs of identical replies": part.identical,
        "replies without a text": part.without_text,
        "replies without a gold score": part.without_gold,
        **{f"replies that {name} has no score for": count for name, count in part.without_score.items()},
    }
    told = ", ".join(f"{count:,} {what}" for what, count in left.items() if count) or "nothing"
    return (
        f"{what}: {number_of(part.num_replies, 'reply')} to {number_of(part.num_prompts, 'prompt')} in "
        f"{number_of(part.num_rows, 'row')}, "
        f"{number_of(part.num_pairs - part.gold_ties, 'pair')}. Left out: {told}."
    )


def _as_texts(table: Table) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    return table.header, table.rows


def _tables(part: PartMatch) -> Iterator[Table]:
    names = list(part.matches)
    yield _match_table(part, names)
    yield _table(part, names, f"Scores on {part.name}", _score_rows(part, names), ("gold", *names))


def _pictures(part: PartMatch) -> Charts:
    num_pairs = part.num_pairs - part.gold_ties
    return Charts(
        charts=tuple(
            margins_chart(name, drawn, part.matches[name], num_pairs=num_pairs) for name, drawn in part.drawn.items()
        )
    )


def _estimates(part: PartMatch) -> Iterator[dict[str, list[Estimate]]]:
    """Yield the estimates of both tables of a part by row."""
    yield {what: [one for one, _ in cells] for what, cells in _match_cells(part).items()}
    columns = [part.gold_percentiles, *part.percentiles.values()]
    yield {what: [column[what] for column in columns] for what in part.gold_percentiles}


def _match_cells(part: PartMatch) -> dict[str, list[tuple[Estimate, bool]]]:
    """Return what is measured of the match: name -> (estimate, whether it is a share) of each proxy."""
    found: dict[str, list[tuple[Estimate, bool]]] = {}
    for name, match in part.matches.items():
        rows = {"match rate": (match.agreement.match, True)}
        rows |= {"match rate, pairs of `gold build`": (part.built[name], True)} if part.built else {}
        rows |= {f"{measure} over all replies": (one, False) for measure, one in match.agreement.correlations.items()}
        rows |= {f"{measure} within rows, mean": (one, False) for measure, one in match.within.items()}
        rows |= {f"margins: {measure}": (one, False) for measure, one in match.margins.items()}
        rows |= {
            "margins: slope, own points a point of gold": (match.slope, False),
            "margins: size beside gold's": (match.spread, False),
            "best of all replies: gold lost": (match.regret.lost, False),
            "best of all replies: gold gained": (match.regret.gained, False),
            "best of all replies: share of the possible gain": (match.regret.share, True),
        }
        for what, cell in rows.items():
            found.setdefault(what, []).append(cell)
    return found


def _match_table(part: PartMatch, names: Sequence[str]) -> Table:
    found = _match_cells(part)
    rows_shown = [
        (what, *(percent(one) if share else number(one) for one, share in cells)) for what, cells in found.items()
    ]
    notes = column_notes({what: [one for one, _ in cells] for what, cells in found.items()})
    return document.with_intervals(
        caption=f"On {part.name}",
        header=(part.name, *names),
        rows=rows_shown,
        estimates=[None] * len(rows_shown),
        label="",
        notes=notes,
        notes_folded=True,
    )


def _score_rows(part: PartMatch, names: Sequence[str]) -> list[tuple[str, ...]]:
    columns = [part.gold_percentiles, *(part.percentiles[name] for name in names)]
    return [(what, *(number(column[what]) for column in columns)) for what in part.gold_percentiles]


def _table(
    part: PartMatch, names: Sequence[str], caption: str, rows: Sequence[tuple[str, ...]], header: Sequence[str]
) -> Table:
    columns = (part.gold_percentiles, *(part.percentiles[name] for name in names))
    notes = column_notes({name: list(own.values()) for name, own in zip(header, columns, strict=True)})
    return Table(
        caption=caption,
        header=(f"scores, {part.name}", *header),
        rows=tuple(rows),
        notes=tuple(notes),
        notes_folded=True,
    )


SLICE_HEADER: Final = ("proxy", "slice", "value", "pairs", "match", "apart, points", "p")


def _slice_rows(part: PartMatch) -> list[tuple[str, ...]]:
    return [_slice_row(name, one) for name, slices in part.slices.items() for one in slices]


def _slice_texts(part: PartMatch, width: int) -> Iterator[str]:
    """Yield a table for each proxy, narrow enough for a terminal, and a sentence on the slices that are not in it."""
    left_out = 0
    for name, slices in part.slices.items():
        rows = [_slice_row(name, one) for one in slices]
        shown = [(f"{column}: {value}", *cells) for _, column, value, *cells in rows if not cells[-1].startswith("—")]
        left_out += len(rows) - len(shown)
        if shown:
            yield text_table((f"{name}, slice", *SLICE_HEADER[3:]), shown, max_width=width)
    if any(part.slices.values()):
        few = (
            f" {left_out:,} {plural(left_out, 'slice')} with too few prompts for an interval "
            f"{plural(left_out, 'is', 'are')} on the page alone."
            if left_out
            else ""
        )
        yield textwrap.fill(f"{SLICES}{few}", width=width)


def _slice_row(name: str, one: SliceMatch) -> tuple[str, ...]:
    return (
        name,
        one.column,
        one.value,
        format_count(one.num_pairs),
        percent(one.match),
        format_points(one.apart),
        format_p(one.adjusted),
    )


def _slices(part: PartMatch) -> Table:
    estimates = [one.match for slices in part.slices.values() for one in slices]
    return document.with_intervals(
        caption=f"Match by slice, {part.name}",
        header=SLICE_HEADER,
        rows=_slice_rows(part),
        estimates=estimates,
        label="match",
        mark=0.5,
        notes=column_notes({"match": estimates}),
        notes_folded=True,
    )


def _beside(matched: Matched) -> Table:
    rows = [
        (
            one.second,
            one.first,
            percent(one.difference.second),
            percent(one.difference.first),
            format_points(one.difference.difference),
            format_p(one.adjusted),
            format_count(one.verdicts.only_second),
            format_count(one.verdicts.only_first),
            format_points(one.smallest),
        )
        for one in matched.beside
    ]
    header = (
        "proxy",
        "against",
        "match",
        "match of the other",
        "difference, points",
        "p",
        "right alone",
        "wrong alone",
        "smallest difference, points",
    )
    notes = column_notes(
        {
            "matches": [own for one in matched.beside for own in (one.difference.second, one.difference.first)],
            "difference, points": [one.difference.difference for one in matched.beside],
            "smallest difference, points": [
                one.smallest for one in matched.beside if not math.isnan(one.smallest.value)
            ],
        }
    )
    return Table(
        caption=f"Match on {matched.test.name}, paired",
        header=header,
        rows=tuple(rows),
        notes=tuple(notes),
        notes_folded=True,
    )


def _beside_text(one: Beside) -> str:
    """Return a proxy beside the first as a sentence, since a table of it is wider than a terminal."""
    smallest = "" if math.isnan(one.smallest.value) else f"; the smallest difference shown: {points(one.smallest)}"
    return (
        f"{one.second} beside {one.first}: {percent(one.difference.second)} and {percent(one.difference.first)}, "
        f"difference {points(one.difference.difference)}, p {format_p(one.adjusted)}; right where the other is wrong: "
        f"{format_count(one.verdicts.only_second)} and {format_count(one.verdicts.only_first)} pairs{smallest}."
    )


def _standings(matched: Matched) -> Table:
    rows = [
        (name, format_estimate(one.rank, digits=1), f"{one.first:.0%}", format_p(one.p_best))
        for name, one in matched.standings.items()
    ]
    header = ("proxy", "rank by match", "best in so many draws", "p as good as the best")
    notes = (interval_note(one.rank for one in matched.standings.values()),)
    return Table(caption="Which may be the best", header=header, rows=tuple(rows), notes=notes)
