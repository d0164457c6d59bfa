"""Where a judgement of the room goes: NAME.json, NAME.md and NAME.html. Only files of its own are replaced."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_json, require_writable_folder, write_json, write_text
from rewardlab.gold.findings import ORDER, Finding
from rewardlab.report.document import Document, Paragraph, Table, Tone
from rewardlab.report.markdown import markdown_page
from rewardlab.report.page import html_page
from rewardlab.report.tables import report_width

TONES: Mapping[str, Tone] = {"fail": "alarm", "warn": "warning", "undecided": "note", "pass": "good"}


def files_of(name: str) -> tuple[str, str, str]:
    """Return the names of the files."""
    return f"{name}.json", f"{name}.md", f"{name}.html"


def claim(folder: Path, name: str, made_by: str, *, overwrite: bool, also: Sequence[str] = ()) -> None:
    """Make the folder ready, before anything is computed. `also` are other files that will be written.

    Raises ConfigError if it holds files of these names that `made_by` did not write, RewardlabError if it cannot be
    written.
    """
    require_writable_folder(folder, "--output-dir")
    files = files_of(name)
    there = [file for file in (*files, *also) if (folder / file).exists()]
    if there and not overwrite and not _is_own(folder / files[0], made_by):
        raise ConfigError(
            f"{folder / there[0]} is there, and `{made_by}` did not write it. Name another folder with --output-dir, "
            f"or replace it with --overwrite."
        )


def write(folder: Path, name: str, document: Document, values: Mapping[str, Any]) -> list[Path]:
    """Write the page, the Markdown and the JSON; return their paths."""
    paths = [folder / file for file in files_of(name)]
    write_text(paths[2], html_page(document))
    write_text(paths[1], markdown_page(document))
    write_json(paths[0], dict(values))
    return paths


def _is_own(path: Path, made_by: str) -> bool:
    try:
        values = read_json(path)
    except (OSError, DataError):
        return False
    return isinstance(values, Mapping) and values.get("made_by") == made_by


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
    return Paragraph(
        text=f"{finding.status.upper()}: {about}{finding.name}. {finding.evidence}{advice}", tone=TONES[finding.status]
    )


def finding_table(findings: Sequence[Finding], *, caption: str) -> Table:
    """Return all findings as a table."""
    return Table(
        caption=caption,
        header=("about", "what", "status"),
        rows=tuple((one.about, one.name, one.status) for one in findings),
    )


def counted(findings: Sequence[Finding]) -> str:
    """Return how many findings have each status, in words."""
    counts = {status: sum(one.status == status for one in findings) for status in ORDER}
    words = {"fail": "failed", "warn": "to look at", "undecided": "undecided", "pass": "passed"}
    return ", ".join(f"{count} {words[status]}" for status, count in counts.items() if count)
