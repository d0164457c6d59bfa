"""The report of a study for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rewardlab.experiments.reporting import tables
from rewardlab.experiments.reporting.notices import notices
from rewardlab.experiments.reporting.summary import Summary
from rewardlab.experiments.reporting.tables import Sheet
from rewardlab.report.tables import report_width, text_table


def text_report(summary: Summary) -> str:
    """Return what a study came to; charts, the frozen text and the learning curves are in the page."""
    return "\n\n".join(_blocks(summary))


def _blocks(summary: Summary) -> Iterator[str]:
    yield _wrapped(f"{summary.title}: {summary.question}")
    yield from (_wrapped(f"! {text}") for text in notices(summary))
    yield _wrapped(summary.headline)
    yield from _hypotheses(summary)
    yield from _sheet(tables.arms(summary.arms))
    if summary.against_baseline:
        yield from _sheet(tables.against_baseline(summary))
    if summary.steps:
        yield from _sheet(tables.waterfall(summary))
    for found in summary.sensitivities:
        yield _wrapped(
            f"Sensitivity, among the {found.where}: each setting by itself, those that always change together as one"
        )
        for effect in found.effects:
            yield from _sheet(tables.effect(found, effect))
        if found.unmatched:
            yield _wrapped(f"No arms are alike in everything but: {'; '.join(found.unmatched)}.")
    yield from _sheet(tables.health(summary.arms))
    yield from _sheet(tables.costs(summary.arms))
    if summary.bands:
        yield from _sheet(tables.bands(summary))
    yield from _choices(summary)
    if summary.deviations:
        yield "Deviations from the frozen plan\n" + _list([one.text for one in summary.deviations])
    if summary.advice:
        yield "What to try next\n" + _list([f"{one.do} ({one.because})" for one in summary.advice])
    yield _wrapped(summary.methods)


def _hypotheses(summary: Summary) -> Iterator[str]:
    if not summary.hypotheses:
        return
    yield from _sheet(tables.verdicts(summary.hypotheses))
    for one in summary.hypotheses:
        changed = f"{one.changed[0].upper()}{one.changed[1:]}" if one.changed else ""
        said = [changed, one.verdict.sentence, one.verdict.decide]
        said += [f"Expected: {one.expects}"] if one.expects else []
        said += [f"Would change our mind: {one.would_change}"] if one.would_change else []
        yield f"{one.verdict.name}\n" + _list([text for text in said if text])


def _choices(summary: Summary) -> Iterator[str]:
    for gate in summary.gates:
        by_hand = f" ({gate.reason})" if gate.reason else ""
        lines = _list([f"{one.name}: {one.sentence}" for one in gate.verdicts])
        yield f"{_wrapped(f'Gate of {gate.phase}, on validation data: {gate.state}{by_hand}')}\n{lines}"
    for found in summary.selections:
        yield from _sheet(tables.selection(found))


def _sheet(sheet: Sheet) -> Iterator[str]:
    if not sheet.rows:
        return
    notes = [_wrapped(note) for note in sheet.notes if note]
    names = [_wrapped(f"{name}: {said}") for name, said in sheet.names]
    yield "\n".join([sheet.caption, text_table(sheet.header, sheet.rows), *notes, *names])


def _list(lines: Sequence[str]) -> str:
    return "\n".join(
        textwrap.fill(line, width=report_width(), initial_indent="  - ", subsequent_indent="    ") for line in lines
    )


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, width=report_width()) for line in text.splitlines())
