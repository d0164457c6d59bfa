"""The sections that only some folders have: public suites, the precision card, and what a probe found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewardlab.analysis.precision import MEASURES
from rewardlab.core.types import Estimate
from rewardlab.report.charts import Chart, Dot, axis
from rewardlab.report.document import Beside, Block, Paragraph, Section, Table, Tone, shown, with_intervals
from rewardlab.report.folder import Record, estimate_of
from rewardlab.report.tables import column_notes, format_count


def suites_section(record: Record) -> Section:
    """Return the results of public suites, each by its own rule, beside the better of the two length rules."""
    blocks: list[Block] = []
    for suite in record.suites:
        rows, scores = [], []
        for row in suite["rows"]:
            if not isinstance(row, dict):
                continue
            score, baselines = estimate_of(row.get("score")), row.get("baselines")
            better = str(row.get("better_baseline") or "")
            length = estimate_of(baselines.get(better)) if isinstance(baselines, dict) else None
            gain = shown(estimate_of(row.get("gain")))
            rows.append(
                (
                    str(row.get("name")),
                    shown(score),
                    f"{better} {shown(length)}",
                    gain,
                    format_count(row["rows"]) if isinstance(row.get("rows"), int) else "",
                )
            )
            scores.append(score)
        blocks.append(
            with_intervals(
                caption=f"{suite.get('suite')}, by its own rule",
                header=("subset", "score", "better length rule", "above it", "rows"),
                rows=rows,
                estimates=scores,
                label="score",
            )
        )
    return Section(title="Suites", blocks=tuple(blocks))


def precision_section(record: Record) -> Section:
    """Return how far other precisions are from float32, as the cards of the run say."""
    titles = {
        "precision": "The saved model in other precisions",
        "live": "The model as it was judged on the way, beside its folder in float32",
    }
    blocks: list[Block] = []
    for name, title in titles.items():
        card = record.cards.get(name)
        measures = card.get("measures") if card is not None else None
        if card is None or not isinstance(measures, dict):
            continue
        parts = {str(kind): _estimates(part) for kind, part in measures.items() if isinstance(part, dict)}
        rows = [(measure, *(shown(part.get(measure)) for part in parts.values())) for measure in MEASURES]
        notes = {measure: [part[measure] for part in parts.values() if measure in part] for measure in MEASURES}
        blocks.append(
            Table(
                caption=f"{title}, {card.get('preferences')} preferences",
                header=("measure", *parts),
                rows=tuple(row for row in rows if any(row[1:])),
                notes=(*(f"{measure}: {MEASURES[measure]}" for measure in MEASURES), *column_notes(notes)),
                notes_folded=True,
            )
        )
        # Cards of earlier versions, and those of evaluations on the way, have no verdicts.
        off = [str(kind) for kind in card["off"]] if isinstance(card.get("off"), list) else []
        if found := verdicts_of(card):
            blocks += found
        elif off:
            words = "margins are off by more than the interval of their mean leaves open."
            blocks.append(Paragraph(text=f"In {' and '.join(off)} {words}", tone="warning"))
    return Section(title="Precision", blocks=tuple(blocks))


def served_section(record: Record) -> Section:
    """Return in which precisions the model may be served, a sentence for each; no blocks without a precision card."""
    return Section(title="Precision", blocks=tuple(verdicts_of(record.cards.get("precision", {}))))


def verdicts_of(card: Mapping[str, Any]) -> list[Paragraph]:
    """Return the verdicts that a card was written with."""
    tones: dict[str, Tone] = {"may be served": "good", "may not be served": "warning"}
    return [
        Paragraph(
            text=f"{one.get('precision')}: {one.get('answer')}. {one.get('evidence')}",
            tone=tones.get(str(one.get("answer")), "plain"),
        )
        for one in _list(card.get("verdicts"))
    ]


def probe_section(record: Record) -> Section:
    """Return the layers that a probe tried, its learning curve, and what another sample would change."""
    found = record.probe
    blocks: list[Block] = []
    layers = [layer for layer in _list(found.get("layers")) if isinstance(layer.get("held_out"), dict)]
    if layers:
        parts = [_estimates(layer["held_out"]) for layer in layers]
        blocks.append(
            with_intervals(
                caption="Layers, on held-out training prompts; the smallest loss was chosen",
                header=("layer", "accuracy", "NLL", "penalty"),
                rows=[
                    (
                        f"{layer.get('layer')}{' (chosen)' if layer.get('layer') == found.get('chosen_layer') else ''}",
                        shown(own.get("eval_accuracy")),
                        shown(own.get("eval_loss")),
                        f"{layer['penalty']:.2g}" if isinstance(layer.get("penalty"), (int, float)) else "",
                    )
                    for layer, own in zip(layers, parts, strict=True)
                ],
                estimates=[own.get("eval_accuracy") for own in parts],
                label="accuracy",
                mark=0.5,
            )
        )
    if curve := _curve(found):
        blocks.append(curve)
    spread = found.get("uncertainty")
    if isinstance(spread, dict):
        over, sure, unsure = (estimate_of(spread.get(name)) for name in ("over_heads", "sure", "unsure"))
        if over is not None:
            text = (
                f"Another sample of training prompts would move the accuracy within {over.low:.3f} to {over.high:.3f}."
            )
            text += f" Where bootstrap heads agree it is {shown(sure)}, elsewhere {shown(unsure)}."
            blocks.append(Paragraph(text=text))
    return Section(title="Probe", blocks=tuple(blocks))


def _curve(found: Mapping[str, Any]) -> Beside | None:
    """Return accuracy over the number of comparisons that a head was fitted on."""
    points = [
        (float(point["comparisons"]), accuracy, estimate_of(point.get("eval_loss")))
        for point in _list(found.get("learning_curve"))
        if isinstance(point.get("comparisons"), (int, float))
        and (accuracy := estimate_of(point.get("eval_accuracy"))) is not None
        and accuracy.value == accuracy.value
    ]
    if not points:
        return None
    ends = [end for _, own, _ in points for end in (own.value, own.low, own.high)]
    chart = Chart(
        title="Learning curve of the probe",
        words="Accuracy on held-out training prompts, by how many comparisons the head was fitted on.",
        x=axis("comparisons fitted on", [count for count, _, _ in points], include=(0.0,), num_ticks=4, whole=True),
        y=axis("share ranked as labelled", ends),
        dots=tuple(Dot(series=0, at=(count, own.value), low=own.low, high=own.high) for count, own, _ in points),
    )
    rows = tuple((format_count(round(count)), shown(own), shown(loss)) for count, own, loss in points)
    return Beside(
        chart=chart, table=Table(caption="Learning curve", header=("fitted on", "accuracy", "NLL"), rows=rows)
    )


def _estimates(part: Mapping[str, Any]) -> dict[str, Estimate]:
    """Return the estimates of a mapping; what is none is left out."""
    made = {name: estimate_of(entry) for name, entry in part.items()}
    return {name: estimate for name, estimate in made.items() if estimate is not None}


def _list(value: object) -> list[dict[str, Any]]:
    """Return the objects of a list; none if it is no list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
