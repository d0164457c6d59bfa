"""How findings are shown: as text, as paragraphs and as a table of a page."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rewardlab.gold.findings import ORDER, Finding
from rewardlab.report.document import Paragraph, Tone
from rewardlab.report.tables import report_width

TONES: Mapping[str, Tone] = {"fail": "alarm", "warn": "warning", "undecided": "warning", "pass": "good"}


def graver_first(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings by their status, the gravest first, else in order."""
    return sorted(findings, key=lambda one: ORDER.index(one.status))


def finding_text(finding: Finding, *, with_about: bool) -> str:
    """Return a finding as lines for a terminal."""
    about = f"{finding.about}: " if with_about and finding.about else ""
    lines = [f"{finding.status.upper():<9} {about}{finding.name}", _indented(finding.evidence)]
    if finding.advice:
        lines.append(_indented(f"→ {finding.advice}"))
    return "\n".join(lines)


def _indented(text: str) -> str:
    return textwrap.fill(text, width=report_width(), initial_indent=" " * 10, subsequent_indent=" " * 10)


def finding_paragraph(finding: Finding, *, with_about: bool) -> Paragraph:
    """Return a finding as a paragraph of a page."""
    about = f"{finding.about}: " if with_about and finding.about else ""
    advice = f" What to do: {finding.advice}" if finding.advice else ""
    # Where nothing is to be done, an undecided verdict stays a note.
    tone = "note" if finding.status == "undecided" and not finding.advice else TONES[finding.status]
    return Paragraph(text=f"{finding.status.upper()}: {about}{finding.name}. {finding.evidence}{advice}", tone=tone)


def counted(findings: Sequence[Finding]) -> str:
    """Return how many findings have each status, in words."""
    counts = {status: sum(one.status == status for one in findings) for status in ORDER}
    words = {"fail": "failed", "warn": "to look at", "undecided": "undecided", "pass": "passed"}
    return ", ".join(f"{count} {words[status]}" for status, count in counts.items() if count)
