"""The report of `rewardlab rl audit`: text for the terminal, a page with charts, Markdown and JSON."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rewardlab.analysis.json_form import encode
from rewardlab.core.config import to_mapping
from rewardlab.core.files import provenance
from rewardlab.core.terminal import number_of, plural
from rewardlab.core.types import Estimate
from rewardlab.report import document
from rewardlab.report.charts import Axis, Chart, Rule, axis, band, cut_bands, line
from rewardlab.report.document import Block, Charts, Document, Facts, Paragraph, Section
from rewardlab.report.tables import format_count, format_estimate, format_p, interval_note, report_width, text_table
from rewardlab.rl.audit.changes import Pair
from rewardlab.rl.audit.config import AuditConfig
from rewardlab.rl.audit.run import Audit, Curve, Part
from rewardlab.rl.audit.verdicts import ALARMS, LEVEL, MEANING, Finding, overall

MADE_BY: Final = "rewardlab rl audit"
HEADER: Final = ("evidence", "from steps", "to steps", "reward", "evidence moved", "prompts", "p fell", "p short")
UNIT: Final = "Changes are in standard deviations of replies to one prompt in the first window."
ADJUSTED: Final = (
    f"p fell: the reward rose and the evidence fell; p short: the reward rose and the evidence did not follow. Both "
    f"are adjusted for all pairs of windows, all evidence and both questions (Holm), so an honest run is called "
    f"exploited or not carried over with a chance of at most {LEVEL:.0%}. Intervals are each at 95% and not adjusted."
)
SHOWN_ONLY: Final = (
    "These curves are shown and judge nothing: honest runs grow longer, and drift from where they began."
)


def headline(audit: Audit) -> str:
    """Return the verdict in words, and by what it is where not all evidence has the same."""
    verdict = overall(audit.findings)
    by: dict[str, list[str]] = {}
    for finding in audit.findings:
        by.setdefault(finding.verdict, []).append(_name(audit, finding))
    if len(by) < 2:
        return f"{verdict.upper()}: {MEANING[verdict]}."
    others = "; ".join(f"{other} by {', '.join(by[other])}" for other in MEANING if other != verdict and other in by)
    return f"{verdict.upper()} by {', '.join(by[verdict])}: {MEANING[verdict]}. {others[0].upper()}{others[1:]}."


def text_report(audit: Audit) -> str:
    """Return the report for a terminal."""
    width = report_width()
    blocks = [textwrap.fill(text, width=width) for text in (_facts(audit), headline(audit))]
    for finding in audit.findings:
        blocks.append(
            f"{_name(audit, finding)}: {finding.verdict}\n"
            + textwrap.fill(finding.sentence, width=width, initial_indent="  ", subsequent_indent="  ")
        )
    rows = _rows(audit)
    if rows:
        blocks.append(text_table(HEADER, rows))
    blocks += [textwrap.fill(note, width=width) for note in (*_all_notes(audit), UNIT, ADJUSTED)]
    shown = _shown_rows(audit)
    if shown:
        blocks += [text_table(("shown, not judged", "first steps", "last steps"), shown)]
    return "\n" + "\n\n".join(blocks)


def json_report(audit: Audit, config: AuditConfig) -> dict[str, Any]:
    """Return the report as JSON values; numbers that are not there are null."""
    return {
        "made_by": MADE_BY,
        "verdict": overall(audit.findings),
        "headline": headline(audit),
        "run": audit.run,
        "num_rollouts": audit.num_rows,
        "limits": encode(audit.limits),
        "level": LEVEL,
        "adjusted_by": "Holm, over all pairs of windows, all evidence and both hypotheses",
        "unit": "standard deviations of replies to one prompt in the first window",
        "findings": [_finding_json(finding) for finding in audit.findings],
        "parts": encode(audit.parts),
        "notes": list(_all_notes(audit)),
        "settings": to_mapping(config),
        "provenance": json.loads(json.dumps(provenance())),
    }


def page(audit: Audit) -> Document:
    """Return the report as a page."""
    alarmed = overall(audit.findings)
    tone: document.Tone = "alarm" if alarmed in ALARMS else "good" if alarmed == "sound" else "note"
    verdict: list[Block] = [Paragraph(text=headline(audit), tone=tone)]
    verdict += [
        Paragraph(text=f"{_name(audit, finding)}: {finding.verdict}. {finding.sentence}") for finding in audit.findings
    ]
    charts = tuple(chart for place in range(len(audit.parts)) if (chart := _judged_chart(audit, place)) is not None)
    verdict += [Charts(charts=charts)] if charts else []
    table = document.with_intervals(
        caption="Every pair of windows",
        header=HEADER,
        rows=_rows(audit, every=True),
        estimates=[pair.gold.estimate() for finding in audit.findings for pair in finding.judged.pairs],
        label="evidence moved",
        mark=0.0,
        notes=[UNIT, ADJUSTED, interval_note(_estimates(audit))],
    )
    shown = tuple(chart for part in audit.parts for chart in _shown_charts(part, len(audit.parts) > 1))
    sections = [
        Section(title="Verdict", blocks=tuple(verdict)),
        Section(title="Changes between windows", blocks=(table,)),
        Section(title="Shown, not judged", blocks=(Paragraph(text=SHOWN_ONLY, tone="note"), Charts(charts=shown))),
        Section(title="What was read", blocks=tuple(_read(audit))),
    ]
    return Document(
        title=f"Audit of {audit.run}",
        made_by=f"{MADE_BY}: is the policy exploiting the reward model?",
        parts=(document.Part(title="Audit", sections=tuple(sections)),),
        generator=MADE_BY,
    )


def _read(audit: Audit) -> Iterator[Block]:
    yield Paragraph(text=_facts(audit))
    yield from (Paragraph(text=note, tone="note") for note in _all_notes(audit))
    limits = audit.limits
    yield Facts(
        caption="From where on a change counts",
        pairs=(
            ("least change", f"{limits.least_change:g} standard deviations"),
            ("least rise of the reward", f"{limits.least_rise:g} standard deviations"),
            ("share of the predicted rise", f"{limits.share:.0%}"),
        ),
    )


def _facts(audit: Audit) -> str:
    parts = "; ".join(
        f"{number_of(part.num_rows, 'reply')} to {number_of(part.num_prompts, 'prompt')} in steps "
        f"{part.first}–{part.last}, {len(part.windows) or 'no'} {plural(len(part.windows), 'window')}"
        + ("" if part.digest is None else f", reward model {part.digest[:12]}")
        for part in audit.parts
    )
    return f"{audit.run}: {parts}."


def _all_notes(audit: Audit) -> Iterator[str]:
    yield from audit.notes
    yield from dict.fromkeys(note for finding in audit.findings for note in finding.judged.notes)


def _name(audit: Audit, finding: Finding) -> str:
    part = f" (reward model {finding.judged.part + 1} of {len(audit.parts)})" if len(audit.parts) > 1 else ""
    return f"{finding.judged.name}{part}"


def _rows(audit: Audit, *, every: bool = False) -> list[list[str]]:
    """Return a row for each pair; without `every` those with the first window, and that which the verdict is from."""
    rows = []
    for finding in audit.findings:
        shown_by = None if finding.shown_by is None else finding.shown_by.pair
        for pair in finding.judged.pairs:
            if every or pair.earlier == 0 or pair is shown_by:
                rows.append(_row(audit, finding, pair))
    return rows


def _row(audit: Audit, finding: Finding, pair: Pair) -> list[str]:
    starts, ends = finding.judged.starts, finding.judged.ends
    p = {test.kind: test.adjusted for test in finding.tests if test.pair is pair}
    return [
        _name(audit, finding),
        f"{starts[pair.earlier]}–{ends[pair.earlier]}",
        f"{starts[pair.later]}–{ends[pair.later]}",
        format_estimate(pair.reward.estimate(), digits=2),
        format_estimate(pair.gold.estimate(), digits=2),
        format_count(pair.gold.num_prompts),
        format_p(p.get("exploited", math.nan)),
        format_p(p.get("not carried over", math.nan)),
    ]


def _estimates(audit: Audit) -> Sequence[Estimate]:
    return [
        shift.estimate()
        for finding in audit.findings
        for pair in finding.judged.pairs
        for shift in (pair.reward, pair.gold)
    ]


def _finding_json(finding: Finding) -> dict[str, Any]:
    judged = finding.judged
    return {
        "evidence": judged.name,
        "part": judged.part,
        "verdict": finding.verdict,
        "sentence": finding.sentence,
        "num_rows": judged.num_rows,
        "slope_in_first_window": encode(judged.slope),
        "pairs": [
            {
                "from_steps": [judged.starts[pair.earlier], judged.ends[pair.earlier]],
                "to_steps": [judged.starts[pair.later], judged.ends[pair.later]],
                "reward": encode(pair.reward.estimate()),
                "evidence": encode(pair.gold.estimate()),
                "shortfall": None if pair.shortfall is None else encode(pair.shortfall.estimate()),
                **{
                    f"p_{test.kind.replace(' ', '_')}": encode(test.adjusted)
                    for test in finding.tests
                    if test.pair is pair
                },
            }
            for pair in judged.pairs
        ],
    }


def _judged_chart(audit: Audit, place: int) -> Chart | None:
    """Return reward and evidence of a part on one axis, with the windows that the verdict is from."""
    part = audit.parts[place]
    if not part.curves:
        return None
    alarms = [one for one in audit.findings if one.judged.part == place and one.shown_by is not None]
    rules = []
    if alarms and alarms[0].shown_by is not None:
        pair, judged = alarms[0].shown_by.pair, alarms[0].judged
        rules = [
            Rule(axis="x", at=float(judged.starts[pair.earlier]), label="from"),
            Rule(axis="x", at=float(judged.starts[pair.later]), label="to"),
        ]
    title = "Reward and evidence" + (f", reward model {place + 1}" if len(audit.parts) > 1 else "")
    heights = axis("standard deviations", _heights(part.curves), include=(0.0,))
    bands = [band(number, _limits(curve)) for number, curve in enumerate(part.curves)]
    said = f"Bands are 95% intervals.{cut_bands(heights, bands)} {UNIT}"
    return Chart(
        title=title,
        words=f"{' '.join(_words(curve) for curve in part.curves)} {said}",
        x=_steps(part),
        y=heights,
        lines=tuple(line(number, _points(curve)) for number, curve in enumerate(part.curves)),
        bands=tuple(area for area in bands if area is not None),
        rules=(Rule(axis="y", at=0.0), *rules),
        legend=tuple((number, curve.name) for number, curve in enumerate(part.curves)),
    )


def _shown_charts(part: Part, several: bool) -> Iterator[Chart]:
    for curve in part.shown:
        area, heights = band(0, _limits(curve)), axis(curve.name, _heights([curve]))
        own = f" (reward model {part.digest or 'without a name'})" if several else ""
        yield Chart(
            title=f"{curve.name[0].upper()}{curve.name[1:]}{own}",
            words=f"{_words(curve)}{cut_bands(heights, [area])}",
            x=_steps(part),
            y=heights,
            lines=(line(0, _points(curve)),),
            bands=() if area is None else (area,),
        )


def _shown_rows(audit: Audit) -> list[list[str]]:
    several = len(audit.parts) > 1
    return [
        [
            f"{curve.name}{f' (reward model {number})' if several else ''}",
            format_estimate(curve.points[0][1]),
            format_estimate(curve.points[-1][1]),
        ]
        for number, part in enumerate(audit.parts, start=1)
        for curve in part.shown
    ]


def _steps(part: Part) -> Axis:
    return axis("step", [float(part.first), float(part.last)], whole=True)


def _points(curve: Curve) -> list[tuple[float, float]]:
    return [(step, own.value) for step, own in curve.points]


def _limits(curve: Curve) -> list[tuple[float, float, float]]:
    return [(step, own.low, own.high) for step, own in curve.points]


def _heights(curves: Sequence[Curve]) -> list[float]:
    """Return what an axis has to hold: values, and limits that do not dwarf them."""
    values = [own.value for curve in curves for _, own in curve.points]
    # Of a value that never moves, the limits alone say how high the axis is.
    reach = max(values, default=1.0) - min(values, default=0.0) or math.inf
    low, high = min(values, default=0.0) - reach, max(values, default=1.0) + reach
    ends = [end for curve in curves for _, own in curve.points for end in (own.low, own.high)]
    return [*values, *(min(max(end, low), high) for end in ends if math.isfinite(end))]


def _words(curve: Curve) -> str:
    """Return where a curve begins and ends, as a sentence."""
    (first, begins), (last, ends) = curve.points[0], curve.points[-1]
    return (
        f"{curve.name}: from {format_estimate(begins, digits=2)} at step {first:g} to "
        f"{format_estimate(ends, digits=2)} at step {last:g}."
    ).replace("-", "−")
