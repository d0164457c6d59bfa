"""Where the report of a study goes. Only files of its own are replaced."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from rewardlab.analysis.json_form import encode
from rewardlab.core.types import Estimate
from rewardlab.experiments.config import ReportConfig
from rewardlab.experiments.reporting.notices import notices
from rewardlab.experiments.reporting.page import MADE_BY, page
from rewardlab.experiments.reporting.summary import Summary
from rewardlab.report import outputs

NAME: Final = "report"
TABLES: Final = ("arms.csv", "hypotheses.csv", "seeds.csv")
LIMITS: Final = ("value", "low", "high", "level", "n", "method")
ARMS: Final = ("arm", "seeds", "planned", "quantity", "step", "on", *LIMITS, "why")
HYPOTHESES: Final = (
    *("hypothesis", "verdict", "provisional", "part", *LIMITS),
    *("p_supported", "p_refuted", "adjusted_supported", "adjusted_refuted", "decide", "expects", "would_change"),
    *("change", "claim_before"),
)
SEEDS: Final = ("arm", "seed", "quantity", "step", "on", "value")


def folder_of(config: ReportConfig) -> Path:
    """Return the folder of the results."""
    return config.study / "report" if config.output_dir is None else config.output_dir


def claim(config: ReportConfig) -> None:
    """Make the folder ready, before anything is computed. Raises as `outputs.claim`."""
    outputs.claim(folder_of(config), NAME, MADE_BY, overwrite=config.overwrite, also=TABLES)


def write(summary: Summary, config: ReportConfig) -> list[Path]:
    """Write report.json, report.md, report.html and three tables; return their paths."""
    texts = (arms_csv(summary), hypotheses_csv(summary), seeds_csv(summary))
    tables = dict(zip(TABLES, texts, strict=True))
    return outputs.write(folder_of(config), NAME, page(summary), json_report(summary), tables)


def json_report(summary: Summary) -> dict[str, Any]:
    """Return the report as JSON values; numbers that are not there are null."""
    return {"made_by": MADE_BY, "notices": notices(summary), **encode(summary)}


def arms_csv(summary: Summary) -> str:
    """Return every quantity of every arm, a row each; empty cells where there is no value, with the reason."""
    found = summary.arms
    rows = [
        (row.arm, row.seeds, row.planned, column.quantity, column.step, column.on, *_six(cell.estimate), cell.why)
        for row in found.rows
        for column, cell in zip((*found.columns, *found.costs), (*row.cells, *row.costs), strict=True)
    ]
    rows += [(arm, 0, 0, "", None, "", *_six(None), why) for arm, why in found.left_out.items()]
    return _csv(ARMS, rows)


def hypotheses_csv(summary: Summary) -> str:
    """Return every comparison of every hypothesis, a row each."""
    rows = []
    for one in summary.hypotheses:
        verdict = one.verdict
        p = (verdict.p_supported, verdict.p_refuted, verdict.adjusted_supported, verdict.adjusted_refuted)
        told = (*map(_known, p), verdict.decide or ("" if verdict.parts else verdict.sentence))
        for part in verdict.parts or (None,):
            text, estimate = (verdict.claim, None) if part is None else (part.text, part.estimate)
            head = (verdict.name, verdict.verdict, int(one.is_provisional), text)
            rows.append((*head, *_six(estimate), *told, one.expects, one.would_change, one.change, one.claim_before))
    return _csv(HYPOTHESES, rows)


def seeds_csv(summary: Summary) -> str:
    """Return every quantity of every seed, a row each."""
    found = summary.arms
    rows = [
        (row.arm, seed, column.quantity, column.step, column.on, value)
        for row in found.rows
        for column, cell in zip((*found.columns, *found.costs), (*row.cells, *row.costs), strict=True)
        for seed, value in cell.by_seed.items()
    ]
    return _csv(SEEDS, rows)


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if value is None else value for value in row] for row in rows)
    return sink.getvalue()


def _six(estimate: Estimate | None) -> tuple[object, ...]:
    """Return value, limits, level, n and method, empty where there is none."""
    if estimate is None:
        return ("",) * len(LIMITS)
    limits = map(_known, (estimate.value, estimate.low, estimate.high))
    return (*limits, estimate.level, estimate.n, estimate.method)


def _known(value: float) -> float | str:
    return value if value == value else ""
