"""An audit as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rewardlab.core.terminal import number_of, plural, short, visible
from rewardlab.curation.auditing.result import Audit, Finding
from rewardlab.report.tables import format_count, format_estimate, interval_note, text_table


def audit_report(audit: Audit, *, num_examples: int) -> str:
    """Return the report: rows read, a table of all checks, the first rows of each, and what is above its limit."""
    blocks = [_sources(audit), _table(audit)]
    blocks += [block for finding in audit.findings if (block := _examples(audit, finding, num_examples))]
    if audit.not_run:
        needs: dict[str, list[str]] = {}
        for name, need in audit.not_run.items():
            needs.setdefault(need, []).append(name)
        blocks.append("\n".join(f"not run: {', '.join(names)} (need {need})" for need, names in needs.items()))
    blocks.append("\n".join(audit.notes))
    blocks.append(_verdict(audit))
    return "\n\n".join(blocks)


def _sources(audit: Audit) -> str:
    lines = []
    for source in audit.sources:
        causes = _counted(source.dropped)
        dropped = source.read - source.kept
        lines.append(
            f"{source.label}: {number_of(source.read, 'row')} read = {source.kept:,} kept + {dropped:,} dropped"
            + (f" ({causes})" if causes else "")
        )
        if source.left_out:
            count, causes = sum(source.left_out.values()), _counted(source.left_out)
            left_out = plural(count, "reply is", "replies are")
            lines.append(f"  {count:,} {left_out} left out, and the others of their rows kept ({causes}), for example")
            lines.append(f"    {visible(source.left_out_example)}")
    return "\n".join(lines)


def _counted(causes: Mapping[str, int]) -> str:
    return ", ".join(f"{cause} {count:,}" for cause, count in causes.items())


def _table(audit: Audit) -> str:
    rows = [
        [
            finding.check.name,
            format_count(finding.flagged),
            format_estimate(finding.share, percent=True),
            "—" if finding.check.limit is None else str(finding.check.limit),
            "ABOVE" if finding.is_above_limit else "",
            finding.check.meaning,
        ]
        for finding in audit.findings
    ]
    table = text_table(["check", "rows", "share", "limit", "", "meaning"], rows)
    note = interval_note([finding.share for finding in audit.findings])
    return f"{table}\n{note}"


def _examples(audit: Audit, finding: Finding, number: int) -> str:
    """Return what was counted and the first rows of a finding; an empty text if nothing is flagged."""
    if not finding.flagged:
        return ""
    counts = ", ".join(f"{name} {count:,}" for name, count in finding.counts.items())
    rows = "1 row" if finding.flagged == 1 else f"{finding.flagged:,} rows"
    lines = [f"{finding.check.name}: {rows}" + (f"; {counts}" if counts else "")]
    for row, score in zip(finding.rows_F[:number].tolist(), finding.scores_F[:number].tolist(), strict=True):
        found = f"  {short(finding.details[row])}" if row in finding.details else ""
        lines.append(f"  {audit.place(row)}  {score:g}{found}")
    if finding.flagged > number > 0:
        lines.append(f"  … and {finding.flagged - number:,} more (--json FILE lists all)")
    return "\n".join(lines)


def _verdict(audit: Audit) -> str:
    if not audit.failed:
        return "clean: no check is above its limit"
    above = (
        "1 check is above its limit" if len(audit.failed) == 1 else f"{len(audit.failed)} checks are above their limits"
    )
    return f"{above}: {', '.join(audit.failed)}"
