"""The report of `rewardlab diagnose`: text for the terminal, Markdown, and JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rewardlab.analysis.ceiling import Ceiling
from rewardlab.analysis.json_form import encode
from rewardlab.core.types import Estimate
from rewardlab.diagnosing.verdicts import LEVEL, NAMES, Finding
from rewardlab.report.ceiling import ceiling_note
from rewardlab.report.tables import column_notes, format_estimate, over_seeds, report_width, text_table

NOTHING_HELD_OUT: Final = "of some seed nothing was held out on which it could be judged"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The content of a report."""

    findings: Sequence[Finding]
    full: Estimate
    """Accuracy of the model itself, over seeds."""
    full_conversations: Estimate
    """The same with its interval over conversations."""
    full_test: Estimate | None
    """The same on test data, with its interval over seeds."""
    ceiling: Ceiling | None
    """What a perfect model would reach on the held-out conversations; None if the data do not allow an estimate."""
    facts: Mapping[str, Any]
    """Facts about the model, the data, how controls were run, and what was left out."""

    @property
    def headline(self) -> str:
        """The numbers of controls by verdict, in words."""
        count = {kind: sum(one.verdict == kind for one in self.findings) for kind in ("pass", "fail", "undecided")}
        said = ", ".join(f"{number} {kind}" for kind, number in count.items() if number)
        named = [NAMES[one.control] for one in self.findings if one.verdict == "fail"]
        return f"Controls: {said}." + (f" FAILED: {', '.join(named)}." if named else "")

    @property
    def not_run(self) -> list[str]:
        """A sentence for each control that was left out, with the reason."""
        why: Mapping[str, str] = self.facts.get("not_run", {})
        missing = [name for name in NAMES if name not in {one.control for one in self.findings}]
        return [f"{NAMES[name].capitalize()} was not run: {why.get(name, NOTHING_HELD_OUT)}." for name in missing]

    @property
    def multiplicity(self) -> str:
        """A sentence on the number of tests, and the correction for it."""
        tested = sum(not math.isnan(one.p_value) for one in self.findings)
        return (
            f"{tested} of the controls can fail by chance. Their p-values are adjusted by Holm's method, so that with "
            f"an honest model the chance that any of them fails is at most {LEVEL:.0%}."
        )


def text_report(diagnosis: Diagnosis) -> str:
    """Return the report for a terminal."""
    width = report_width()
    blocks = [_facts(diagnosis), diagnosis.headline, _table(diagnosis)]
    blocks.append("\n".join(textwrap.fill(line, width=width) for line in _methods(diagnosis)))
    blocks += [textwrap.fill(line, width=width) for line in _ceiling(diagnosis)]
    for found in diagnosis.findings:
        lines = [f"{NAMES[found.control]}: {found.verdict.upper()}"]
        for part in (found.sentence, f"Expects {found.expects}", *_details(found)):
            lines += textwrap.wrap(part, width=width, initial_indent="  ", subsequent_indent="  ")
        blocks.append("\n".join(lines))
    blocks += [textwrap.fill(line, width=width) for line in (*diagnosis.not_run, diagnosis.multiplicity)]
    return "\n" + "\n\n".join(blocks)


def markdown_report(diagnosis: Diagnosis) -> str:
    """Return the report as Markdown."""
    head = ["control", "measured", "over seeds", "over conversations", "verdict"]
    rows = [["the model itself", "held out", *_both(diagnosis.full, diagnosis.full_conversations), ""]]
    for found in diagnosis.findings:
        for number, one in enumerate(found.measured):
            first = NAMES[found.control] if number == 0 else ""
            verdict = f"**{found.verdict}**" if number == 0 else ""
            rows.append([first, one.name, *_both(one.seeds, one.conversations), verdict])
    lines = ["# Controls", "", _facts(diagnosis), "", diagnosis.headline, ""]
    lines += [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    lines += [part for line in (*_methods(diagnosis), *_ceiling(diagnosis)) for part in ("", line)]
    for found in diagnosis.findings:
        lines += ["", f"**{NAMES[found.control].capitalize()}: {found.verdict}.** {found.sentence}", ""]
        lines += [f"Expects {found.expects} {' '.join(_details(found))}".rstrip()]
    for line in (*diagnosis.not_run, diagnosis.multiplicity):
        lines += ["", line]
    return "\n".join([*lines, ""])


def json_report(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the report as a JSON mapping."""
    return {
        "headline": diagnosis.headline,
        **diagnosis.facts,
        "model_itself": {
            "over_seeds": encode(diagnosis.full),
            "over_conversations": encode(diagnosis.full_conversations),
            "test": None if diagnosis.full_test is None else encode(diagnosis.full_test),
        },
        "ceiling": None if diagnosis.ceiling is None else encode(diagnosis.ceiling),
        "controls": [encode(found) for found in diagnosis.findings],
        "level": LEVEL,
        "adjusted_by": "Holm",
    }


def _ceiling(diagnosis: Diagnosis) -> list[str]:
    return [] if diagnosis.ceiling is None else [ceiling_note(diagnosis.ceiling)]


def _both(seeds: Estimate, conversations: Estimate) -> list[str]:
    return [format_estimate(over_seeds(seeds)), format_estimate(conversations)]


def _methods(diagnosis: Diagnosis) -> list[str]:
    """Return how the intervals of the table were made: a line for each column."""
    measured = [one for found in diagnosis.findings for one in found.measured]
    return column_notes(
        {
            "over seeds": [over_seeds(own) for own in (diagnosis.full, *(one.seeds for one in measured))],
            "over conversations": [diagnosis.full_conversations, *(one.conversations for one in measured)],
        }
    )


def _facts(diagnosis: Diagnosis) -> str:
    facts = diagnosis.facts
    test = "" if diagnosis.full_test is None else f" On test data: {format_estimate(diagnosis.full_test)}."
    return textwrap.fill(
        f"{facts['what']}: {facts['comparisons']:,} comparisons of {facts['conversations']:,} conversations, "
        f"{facts['num_seeds']} seeds. The model itself: accuracy {format_estimate(diagnosis.full)} over seeds, "
        f"{format_estimate(diagnosis.full_conversations)} over conversations.{test}",
        width=report_width(),
    )


def _table(diagnosis: Diagnosis) -> str:
    rows = [["the model itself", "held out", *_both(diagnosis.full, diagnosis.full_conversations), ""]]
    for found in diagnosis.findings:
        for number, one in enumerate(found.measured):
            first, verdict = (NAMES[found.control], found.verdict) if number == 0 else ("", "")
            rows.append([first, one.name, *_both(one.seeds, one.conversations), verdict])
    return text_table(["control", "measured", "over seeds", "over conversations", "verdict"], rows)


def _details(found: Finding) -> list[str]:
    """Return what stands below the expectation: p-values and the band."""
    lines = []
    if not math.isnan(found.p_value):
        lines.append(f"p {found.p_value:.2g}, {found.adjusted:.2g} with all controls accounted for.")
    if found.band is not None:
        band, what = found.band, "drop" if found.drop is not None else "accuracy"
        lines.append(
            f"Earlier guidelines: {what} from {band.low:.2f} to {band.high:.2f} in a single run; at this sample size a "
            f"run whose true {what} is {band.truth:.2f} falls outside in {band.outside:.0%} of cases."
        )
    return lines
