"""The tables of a study's report, which the terminal and the pages share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rewardlab.core.terminal import number_of
from rewardlab.core.types import Estimate
from rewardlab.experiments.bands import told
from rewardlab.experiments.part_verdict import PartVerdict
from rewardlab.experiments.quantities import quantity_named
from rewardlab.experiments.reporting.arms import ArmRow, Arms
from rewardlab.experiments.reporting.choices import BandFound, Selection
from rewardlab.experiments.reporting.hypotheses import Judged
from rewardlab.experiments.reporting.numbers import (
    Cell,
    Difference,
    interval,
    intervals,
    search_named,
)
from rewardlab.experiments.reporting.sensitivity import Effect, Sensitivity
from rewardlab.experiments.reporting.summary import Summary
from rewardlab.report.ceiling import ceiling_note
from rewardlab.report.charts import Axis
from rewardlab.report.tables import column_notes, format_p, interval_note

OWN_SCALES: Final = Axis(
    label="each row on its own scale", low=-1.0, high=1.0, ticks=(-1.0, 0.0, 1.0), names=("fails", "0", "holds")
)
"""Scale of rows with different units, each divided by the end of its interval that is furthest from 0."""
HEALTH: Final[Mapping[str, str]] = {
    "gap": "gap",
    "ece": "ECE on test",
    "stopped_at": "last step",
    "best_step": "chosen step",
}
"""Quantity -> its heading in the table of health."""
COST: Final[Mapping[str, str]] = {
    "trainable_parameters": "weights that train",
    "trainable_share": "share of all",
    "tokens_per_second": "tokens/s",
    "pairs_per_second": "pairs/s",
    "peak_memory": "memory (GiB)",
    "seconds": "seconds in training steps",
}
"""Quantity -> its heading in the table of cost."""


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table: what it shows, its cells, the interval of each row that is drawn, and notes."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    estimates: tuple[Estimate | None, ...] = ()
    """One a row, where intervals are drawn."""
    label: str = ""
    """Label of the scale on which they are drawn."""
    mark: float | None = None
    scale: Axis | None = None
    """Scale on which they are drawn; None for one that holds all of them."""
    notes: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    """What its rows are: (name, in words), each on a line of its own."""


def verdicts(judged: Sequence[Judged]) -> Sheet:
    """Return every hypothesis with its verdict; several comparisons of one are several rows."""
    rows = []
    for one in judged:
        verdict = one.verdict
        for number, part in enumerate(verdict.parts or (None,)):
            head = (verdict.name, one.found, format_p(_p(one))) if number == 0 else ("", "", "")
            holds = "—" if part is None else interval(part.estimate)
            rows.append((*head, holds, verdict.claim if part is None else part.text))
    parts = [part for one in judged for part in one.verdict.parts or (None,)]
    alike = len({_scale_of(part) for part in parts if part is not None}) < 2
    known = [part.estimate for part in parts if part is not None]
    num_tested = max((one.verdict.num_hypotheses for one in judged), default=0)
    return Sheet(
        caption="Verdicts",
        header=("hypothesis", "verdict", "p", "holds by", "claim"),
        rows=tuple(rows),
        estimates=tuple(None if part is None else part.estimate if alike else _by_itself(part) for part in parts),
        label="holds by (fails below 0)",
        mark=0.0,
        scale=None if alike else OWN_SCALES,
        notes=(
            "Holds by: the side that is claimed to be larger minus the other one, over seeds and prompts.",
            f"p: one-sided, of the verdict or of the nearer one{_adjusted(num_tested, 'hypotheses')}.",
            interval_note(known),
        ),
    )


def _adjusted(count: int, over: str) -> str:
    """Return in words over how many tests p-values are adjusted; empty for a single one."""
    return f", adjusted over {count} {over} (Holm)" if count > 1 else ""


def _scale_of(part: PartVerdict) -> frozenset[tuple[str, float]]:
    """Return the units of a comparison: those of its quantities, with the largest value that these can have."""
    quantities = [quantity_named(term.partition("(")[0]) for term in part.terms]
    return frozenset((one.unit, one.high) for one in quantities)


def _by_itself(part: PartVerdict) -> Estimate:
    """Return by how much a comparison holds, as shares of the end of its interval that is furthest from 0."""
    own = part.estimate
    ends = [abs(end) for end in (own.value, own.low, own.high) if math.isfinite(end)]
    furthest = max(ends, default=0.0) or 1.0
    return replace(own, value=own.value / furthest, low=own.low / furthest, high=own.high / furthest)


def _p(one: Judged) -> float:
    verdict = one.verdict
    of = {"supported": verdict.adjusted_supported, "refuted": verdict.adjusted_refuted}
    if verdict.verdict in of:
        return of[verdict.verdict]
    known = [p for p in of.values() if p == p]
    return min(known, default=float("nan"))


def arms(found: Arms) -> Sheet:
    """Return all arms with every quantity that is asked for; those left out too."""
    columns = [intervals([row.cells[number].estimate for row in found.rows]) for number in range(len(found.columns))]
    rows = [(row.arm, _seeds(row), *cells) for row, *cells in zip(found.rows, *columns, strict=True)]
    rows += [(arm, "left out", *["—"] * len(found.columns)) for arm in found.left_out]
    shown = [*(row.cells[0].estimate for row in found.rows), *[None] * len(found.left_out)]
    reasons = _undone(found)
    reasons += _reasons([cell for row in found.rows if row.seeds for cell in row.cells])
    return Sheet(
        caption="Arms: mean over seeds",
        header=("arm", "seeds", *(column.title for column in found.columns)),
        rows=tuple(rows),
        estimates=tuple(shown),
        label=found.columns[0].title,
        notes=(
            *_data(found),
            *map(ceiling_note, found.ceilings),
            *_methods(
                {column.title: [row.cells[number] for row in found.rows] for number, column in enumerate(found.columns)}
            ),
            *reasons,
        ),
        names=(
            *((row.arm, row.says) for row in found.rows if row.says),
            *((arm, f"left out: {why}") for arm, why in found.left_out.items()),
        ),
    )


def _data(found: Arms) -> Iterator[str]:
    if len(found.data) == 1 and not found.apart:
        yield f"Test data: {found.data[0]}."
    elif found.data:
        told = "; ".join(f"{row.arm}: {row.data}" for row in found.rows if row.seeds)
        yield f"Runs were judged on different test data: {told}."
    on = dict.fromkeys(column.on for column in found.columns)
    if "validation" in on:
        titles = [column.title for column in found.columns if column.on == "validation"]
        yield f"On validation data: {', '.join(titles)}."


def seeds(found: Arms) -> Sheet:
    """Return the primary quantity of every seed."""
    rows = [(row.arm, seed, f"{value:.4g}") for row in found.rows for seed, value in row.cells[0].by_seed.items()]
    return Sheet(
        caption=f"Every seed: {found.columns[0].title}",
        header=("arm", "seed", found.columns[0].title),
        rows=tuple(rows),
        notes=("One run is one value, so it has no interval over seeds; those of the arms do.",),
    )


def health(found: Arms) -> Sheet:
    """Return the quantities that show how each arm trained, with its warning signs."""
    return _of_runs(found, "Health: mean over seeds", HEALTH, signs=True)


def costs(found: Arms) -> Sheet:
    """Return what each arm costs."""
    return _of_runs(found, "Cost: mean over seeds", COST, signs=False)


def _of_runs(found: Arms, caption: str, names: Mapping[str, str], *, signs: bool) -> Sheet:
    of = {column.quantity: number for number, column in enumerate(found.costs)}
    kept = {name: of[name] for name in names if any(row.costs[of[name]].estimate is not None for row in found.rows)}
    dropped = [title for name, title in names.items() if name not in kept]
    columns = [intervals([row.costs[number].estimate for row in found.rows]) for number in kept.values()]
    ends = [(_signs(row),) if signs else () for row in found.rows]
    rows = [(row.arm, *cells, *end) for row, end, *cells in zip(found.rows, ends, *columns, strict=True)]
    rows = rows if kept else []
    cells = [row.costs[number] for row in found.rows if row.seeds for number in kept.values()]
    return Sheet(
        caption=caption,
        header=("arm", *(names[name] for name in kept), *(("warning signs",) if signs else ())),
        rows=tuple(rows),
        notes=(
            "Gap: accuracy on training minus validation rows, at the chosen checkpoint." if "gap" in kept else "",
            "Seconds: of training steps alone; loading, evaluating and saving come on top."
            if "seconds" in kept
            else "",
            *_methods(
                {names[name]: [row.costs[number] for row in found.rows if row.seeds] for name, number in kept.items()}
            ),
            f"Not measured: {', '.join(dropped)}." if dropped else "",
            *_reasons(cells),
        ),
    )


def _signs(row: ArmRow) -> str:
    if not row.seeds:
        return "—"
    return ", ".join(f"{name} in {count} of {row.seeds}" for name, count in row.signs.items()) or "none"


def changes(found: Sequence[Difference], caption: str, title: str, over: str) -> Sheet:
    """Return differences of arms with their intervals and p-values."""
    shown = intervals([one.estimate for one in found])
    rows = [(f"{one.arm} − {one.other}", text, format_p(one.adjusted)) for one, text in zip(found, shown, strict=True)]
    known = [one.estimate for one in found if one.estimate is not None]
    why = list(dict.fromkeys(f"{one.why[0].upper()}{one.why[1:]}." for one in found if one.why))
    return Sheet(
        caption=caption,
        header=("difference", title, "p"),
        rows=tuple(rows),
        estimates=tuple(one.estimate for one in found),
        label=f"difference of {title}",
        mark=0.0,
        notes=(
            f"Paired by seed and prompt. p: two-sided{_adjusted(sum(one.p == one.p for one in found), over)}.",
            interval_note(known),
            *why,
        ),
    )


def against_baseline(summary: Summary) -> Sheet:
    """Return every arm minus the baseline."""
    caption = f"Against the baseline {summary.baseline}"
    return changes(summary.against_baseline, caption, summary.primary.title, "arms")


def waterfall(summary: Summary) -> Sheet:
    """Return every step of the ablation."""
    caption = f"What each step adds, beginning with {summary.waterfall[0]}"
    return changes(summary.steps, caption, summary.primary.title, "steps")


def effect(found: Sensitivity, one: Effect) -> Sheet:
    """Return the mean at each value of a setting."""
    means = intervals([own.estimate for own in one.values])
    changes = ["", *intervals([own.change for own in one.values[1:]])]
    rows = zip([own.value for own in one.values], means, changes, strict=True)
    sets = "one set of arms" if one.sets == 1 else f"{one.sets} sets of arms"
    return Sheet(
        caption=f"{one.setting}: {found.column.title}",
        header=(one.setting, "mean", f"change from {one.values[0].value}"),
        rows=tuple(rows),
        estimates=tuple(own.estimate for own in one.values),
        label=found.column.title,
        notes=(
            f"{'Main effect: mean' if one.sets > 1 else 'Mean'} over {sets} that are alike in everything else.",
            f"Not comparable: {', '.join(one.unmatched)}." if one.unmatched else "",
            interval_note([own.estimate for own in one.values]),
        ),
    )


def selection(found: Selection) -> Sheet:
    """Return the arms of a search, the best first, and the winner on fresh seeds."""
    title, name = found.metric.replace("_", " "), search_named(found.phase)
    rows = [(one.arm, f"{title}, validation, seeds of the search", interval(one.estimate)) for one in found.ranked]
    estimates: list[Estimate | None] = [one.estimate for one in found.ranked]
    for cell, where in ((found.fresh, "validation"), (found.test, "test")):
        if cell is not None:
            rows.insert(0, ("the winner", f"{title}, {where}, fresh seeds", _cell(cell)))
            estimates.insert(0, cell.estimate)
    cells = [cell for cell in (found.fresh, found.test) if cell is not None]
    return Sheet(
        caption=f"{name[0].upper()}{name[1:]}: {number_of(found.tried, 'arm')}, by {title} on validation data",
        header=("arm", "what", "mean"),
        rows=tuple(rows),
        estimates=tuple(estimates),
        label=title,
        notes=(
            "The best of a search is flattered by being chosen on these numbers; those on fresh seeds are not.",
            interval_note([one for one in estimates if one is not None]),
            *_reasons(cells),
            *([f"Without a finished run: {', '.join(found.untold)}."] if found.untold else []),
            *([f"Dropped before the last seed: {', '.join(found.pruned)}."] if found.pruned else []),
            *found.late,
        ),
    )


def bands(summary: Summary) -> Sheet:
    """Return where the quantities of all bands lie: beside their edges, and beside what was expected of them."""
    with_edges = any(one.failure is not None for one in summary.bands)
    with_ranges = any(one.expected is not None for one in summary.bands)
    rows = []
    for one in summary.bands:
        found = one.verdict
        cells = _edges(one) if with_edges else ()
        if with_ranges:
            low, high = one.expected or (math.nan, math.nan)
            lies = "" if one.expected is None else "—" if found is None else told(str(found.place), found.places)
            cells = (*cells, "" if one.expected is None else f"{low:g} to {high:g}", lies)
        rows.append((one.about, interval(None if found is None else found.estimate), *cells))
    known = [one.verdict.estimate for one in summary.bands if one.verdict is not None]
    return Sheet(
        caption="Bands of the plan",
        header=(
            *("quantity", "mean"),
            *(("band", "failure", "success") if with_edges else ()),
            *(("expected", "found") if with_ranges else ()),
        ),
        rows=tuple(rows),
        notes=(
            interval_note(known),
            "Expected: the range that the plan named before its runs." if with_ranges else "",
            *(f"{one.about}: {one.why}." for one in summary.bands if one.why),
        ),
    )


def _edges(one: BandFound) -> tuple[str, str, str]:
    """Return the band of a quantity, and where failure and success begin."""
    if one.failure is None or one.success is None:
        return "", "", ""
    above = one.success > one.failure
    said = "—" if one.verdict is None else told(str(one.verdict.at), one.verdict.allowed)
    return said, f"{'<' if above else '>'} {one.failure:g}", f"{'>' if above else '<'} {one.success:g}"


def _seeds(row: ArmRow) -> str:
    return f"{row.seeds} of {row.planned}"


def _cell(cell: Cell) -> str:
    return interval(cell.estimate)


def _methods(columns: Mapping[str, Sequence[Cell]]) -> list[str]:
    """Return level and method of the intervals of a table, with the columns that they are of if these differ."""
    known = {title: [cell.estimate for cell in cells if cell.estimate is not None] for title, cells in columns.items()}
    if len({interval_note(estimates) for estimates in known.values() if estimates}) > 1:
        return column_notes(known)
    return [interval_note([estimate for estimates in known.values() for estimate in estimates])]


def _undone(found: Arms) -> list[str]:
    names = [row.arm for row in found.rows if not row.seeds]
    return [f"No run is done, or can be read, of: {', '.join(names)}."] if names else []


def _reasons(cells: Sequence[Cell]) -> list[str]:
    """Return why cells have no value, equal reasons once."""
    by_why: dict[str, list[str]] = {}
    for cell in cells:
        if cell.why:
            by_why.setdefault(cell.why, []).append(cell.term)
    return [f"{', '.join(terms)}: {why}." for why, terms in by_why.items()]
