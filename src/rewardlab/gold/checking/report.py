"""The report of `rewardlab gold check`: text for the terminal, a page, Markdown and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from rewardlab.analysis.json_form import encode
from rewardlab.core.config import to_mapping
from rewardlab.core.files import provenance
from rewardlab.gold import pages
from rewardlab.gold.checking.config import CheckConfig
from rewardlab.gold.checking.run import Checked
from rewardlab.gold.findings import exit_status, worst
from rewardlab.gold.shown import row_block, row_text
from rewardlab.report import document, outputs
from rewardlab.report.document import Block, Document, Paragraph, Section

MADE_BY: Final = "rewardlab gold check"
NAME: Final = "check"


def headline(checked: Checked) -> str:
    """Return the outcome in words."""
    return f"{worst(checked.findings).upper()}: {pages.counted(checked.findings)}."


def text_report(checked: Checked) -> str:
    """Return the report for a terminal."""
    blocks = ["\n".join(checked.files), headline(checked)]
    told = [one for one in pages.graver_first(checked.findings) if one.status != "pass"]
    blocks += [pages.finding_text(one, with_about=True) for one in told]
    if passed := len(checked.findings) - len(told):
        blocks.append(f"{passed} passed. All of them are on the page that --output-dir writes.")
    blocks += [row_text(one) for one in checked.shown]
    return "\n" + "\n\n".join(blocks)


def json_report(checked: Checked, config: CheckConfig) -> dict[str, Any]:
    """Return the report as JSON values."""
    return {
        "made_by": MADE_BY,
        "status": worst(checked.findings),
        "exit_status": exit_status(checked.findings),
        "headline": headline(checked),
        "findings": encode(checked.findings),
        "files": list(checked.files),
        "settings": to_mapping(config),
        "provenance": json.loads(json.dumps(provenance())),
    }


def page(checked: Checked) -> Document:
    """Return the report as a page."""
    found: list[Block] = [Paragraph(text=headline(checked))]
    found += [pages.finding_paragraph(one, with_about=True) for one in pages.graver_first(checked.findings)]
    rows: list[Block] = [row_block(one) for one in checked.shown]
    read: list[Block] = [Paragraph(text=name) for name in checked.files]
    sections = [Section(title="What was found", blocks=tuple(found))]
    sections += [Section(title="Rows", blocks=tuple(rows))] if rows else []
    sections.append(Section(title="What was read", blocks=tuple(read)))
    return Document(
        title="Check of preference data",
        made_by=f"{MADE_BY}: do the files of all stages belong together?",
        parts=(document.Part(title="Check", sections=tuple(sections)),),
        generator=MADE_BY,
    )


def claim(config: CheckConfig) -> None:
    """Make the folder of the results ready, if one is named. Raises as `outputs.claim`."""
    if config.output_dir is not None:
        outputs.claim(config.output_dir, NAME, MADE_BY, overwrite=config.overwrite)


def write(checked: Checked, config: CheckConfig) -> list[Path]:
    """Write check.json, check.md and check.html, if a folder is named; return their paths."""
    if config.output_dir is None:
        return []
    return outputs.write(config.output_dir, NAME, page(checked), json_report(checked, config))
