"""The report of a study as a page; Markdown is made from the same document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rewardlab.core.terminal import number_of
from rewardlab.experiments.reporting import tables
from rewardlab.experiments.reporting.hypotheses import Judged
from rewardlab.experiments.reporting.notices import notices
from rewardlab.experiments.reporting.numbers import interval
from rewardlab.experiments.reporting.pictures import arm_charts, curve_charts, effect_chart, waterfall_chart
from rewardlab.experiments.reporting.summary import Summary
from rewardlab.experiments.reporting.tables import Sheet
from rewardlab.report import document
from rewardlab.report.document import (
    Beside,
    Block,
    Charts,
    Document,
    Facts,
    Lines,
    Paragraph,
    Part,
    Section,
    Table,
    Tone,
)

MADE_BY: Final = "rewardlab plan report"
TONES: Final[dict[str, Tone]] = {
    "supported": "good",
    "refuted": "alarm",
    "undecided": "warning",
    "not tested": "note",
}


def page(summary: Summary) -> Document:
    """Return the report as a document."""
    sections = (
        Section(title="Verdicts", blocks=tuple(_verdicts(summary))),
        Section(title="Arms", blocks=tuple(_arms(summary))),
        Section(title="Against the baseline", blocks=tuple(_baseline(summary))),
        Section(title="Ablation", blocks=tuple(_waterfall(summary))),
        Section(title="Learning curves", blocks=tuple(_curves(summary))),
        Section(title="Sensitivity", blocks=tuple(_sensitivity(summary))),
        Section(title="Cost and health", blocks=tuple(_costs(summary))),
        Section(title="Bands", blocks=tuple(_bands(summary))),
        Section(title="Gates and selection", blocks=tuple(_choices(summary))),
        Section(title="What to try next", blocks=tuple(_advice(summary))),
        Section(title="Methods", blocks=(Paragraph(text=summary.methods),)),
        Section(title="Deviations from the plan", blocks=tuple(_deviations(summary))),
        Section(title="The plan", blocks=tuple(_plan(summary))),
    )
    return Document(
        title=summary.title,
        made_by=f"{MADE_BY}: {summary.question}",
        parts=(Part(title="Study", sections=tuple(own for own in sections if own.blocks)),),
        generator=MADE_BY,
    )


def _verdicts(summary: Summary) -> Iterator[Block]:
    for text in notices(summary):
        yield Paragraph(text=text, tone="warning")
    yield Paragraph(text=summary.headline)
    if summary.hypotheses:
        yield _table(tables.verdicts(summary.hypotheses))
    for one in summary.hypotheses:
        yield from _hypothesis(one)


def _hypothesis(one: Judged) -> Iterator[Block]:
    verdict = one.verdict
    so_far = (
        f" On {one.planned_runs - one.missing_runs} of {number_of(one.planned_runs, 'run')}."
        if one.is_provisional
        else ""
    )
    changed = f"({one.changed}) " if one.changed else ""
    tone = "warning" if one.changed else TONES[verdict.verdict]
    yield Paragraph(text=f"{verdict.name}: {changed}{verdict.sentence}{so_far}", tone=tone)
    if verdict.decide:
        yield Paragraph(text=verdict.decide)
    for label, text in (("Expected", one.expects), ("Would change our mind", one.would_change)):
        if text:
            yield Paragraph(text=f"{label}: {text}", tone="note")
    terms = [(cell.term, f"{interval(cell.estimate)}{f' ({cell.why})' if cell.why else ''}") for cell in one.terms]
    yield Facts(
        caption=f"{verdict.name}: the claim and its quantities", pairs=(("claim", verdict.claim), *terms), folded=True
    )


def _arms(summary: Summary) -> Iterator[Block]:
    sheet = tables.arms(summary.arms)
    yield _table(sheet)
    if sheet.names:
        yield Facts(caption="What the arms are", pairs=sheet.names)
    charts = tuple(arm_charts(summary))
    if charts:
        yield Charts(charts=charts)


def _baseline(summary: Summary) -> Iterator[Block]:
    if summary.against_baseline:
        yield _table(tables.against_baseline(summary))


def _waterfall(summary: Summary) -> Iterator[Block]:
    if not summary.steps:
        return
    chart, table = waterfall_chart(summary), _table(tables.waterfall(summary))
    yield table if chart is None else Beside(chart=chart, table=table)


def _curves(summary: Summary) -> Iterator[Block]:
    charts = tuple(curve_charts(summary))
    if charts:
        yield Charts(charts=charts)


def _sensitivity(summary: Summary) -> Iterator[Block]:
    for found in summary.sensitivities:
        yield Paragraph(
            text=f"Among the {found.where}. Each setting by itself, those that always change together as one, over "
            f"arms that are alike in everything else: where two settings act together, the mean over the other one is "
            f"shown."
        )
        for effect in found.effects:
            yield Beside(chart=effect_chart(found, effect), table=_table(tables.effect(found, effect)))
        if found.unmatched:
            yield Paragraph(text=f"No arms are alike in everything but: {'; '.join(found.unmatched)}.", tone="note")


def _costs(summary: Summary) -> Iterator[Block]:
    for sheet in (tables.health(summary.arms), tables.costs(summary.arms)):
        if sheet.rows:
            yield _table(sheet)


def _bands(summary: Summary) -> Iterator[Block]:
    if summary.bands:
        yield _table(tables.bands(summary))


def _choices(summary: Summary) -> Iterator[Block]:
    for gate in summary.gates:
        reason = f", because: {gate.reason}" if gate.reason else ""
        tone: Tone = "good" if gate.state == "open" else "warning"
        yield Paragraph(text=f"Gate of {gate.phase}, on validation data: {gate.state}{reason}.", tone=tone)
        yield Facts(
            caption=f"Claims of the gate of {gate.phase}",
            pairs=tuple((one.name, one.sentence) for one in gate.verdicts),
            folded=True,
        )
    for found in summary.selections:
        if found.chosen:
            yield Paragraph(
                text=f"{found.chosen} was chosen at {found.time} on validation data, the best of {found.tried} arms. "
                "It is judged on fresh seeds, under the name winner."
            )
        else:
            yield Paragraph(text=f"Nothing is chosen yet in {found.phase}.", tone="note")
        if found.ranked:
            yield _table(tables.selection(found))


def _advice(summary: Summary) -> Iterator[Block]:
    for one in summary.advice:
        yield Paragraph(text=one.do)
        yield Paragraph(text=f"Because: {one.because.rstrip('.')}.", tone="note")


def _deviations(summary: Summary) -> Iterator[Block]:
    if not summary.deviations:
        yield Paragraph(text="None: no amendment, no run done again, no test data read twice.", tone="good")
    for one in summary.deviations:
        yield Paragraph(text=one.text, tone="warning")
        if one.lines:
            yield Lines(caption="Changed lines of the plan", text="\n".join(one.lines))


def _plan(summary: Summary) -> Iterator[Block]:
    frozen = summary.frozen
    pairs = (
        ("question", summary.question),
        ("frozen at", frozen.time),
        ("SHA-256", frozen.sha256),
        ("by", frozen.code),
        ("version", f"{frozen.version}"),
        ("scale", frozen.scale or "as written"),
        ("with --probe", "yes" if frozen.probes else "no"),
        *((f"--set {name}", value) for name, value in frozen.sets.items()),
    )
    yield Facts(caption="What was frozen, and when", pairs=pairs)
    yield Lines(caption="The plan as it was frozen", text=frozen.text, folded=True)
    if frozen.text_now:
        yield Lines(caption=f"The plan as it holds, version {frozen.version}", text=frozen.text_now, folded=True)
    sheet = tables.seeds(summary.arms)
    if sheet.rows:
        yield _table(sheet)


def _table(sheet: Sheet) -> Table:
    notes = tuple(note for note in sheet.notes if note)
    if sheet.estimates and sheet.scale is not None:
        return Table(
            caption=sheet.caption,
            header=sheet.header,
            rows=sheet.rows,
            notes=notes,
            intervals=sheet.estimates,
            scale=sheet.scale,
            mark=sheet.mark,
        )
    if sheet.estimates:
        return document.with_intervals(
            caption=sheet.caption,
            header=sheet.header,
            rows=sheet.rows,
            estimates=sheet.estimates,
            label=sheet.label,
            mark=sheet.mark,
            notes=notes,
        )
    return Table(caption=sheet.caption, header=sheet.header, rows=sheet.rows, notes=notes)
