"""The sections that only some folders have: suites, precision cards, probes, robustness, ensembles and controls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rewardlab.analysis.precision import CARD_WORTH, MEASURES
from rewardlab.analysis.robustness import MEASURES as MOVED
from rewardlab.core.controls import expectation_of, judges_by_true_labels, notice_of
from rewardlab.core.files import to_float
from rewardlab.core.types import Estimate
from rewardlab.report.charts import Chart, Dot, axis
from rewardlab.report.document import Beside, Block, Paragraph, Section, Table, Tone, shown, with_intervals
from rewardlab.report.ensembles import left_out_note
from rewardlab.report.evaluations import estimate_of
from rewardlab.report.folder import EnsembleRecord, Record
from rewardlab.report.robustness import MOVES, left_out_notes, moves
from rewardlab.report.run import command
from rewardlab.report.sections import comparison
from rewardlab.report.suites import MARK, P_MEANS, interval_notes, missing_notes, p_text
from rewardlab.report.tables import column_notes, count_of, format_count, interval_note, over_seeds

TIES_MEAN = "ties at random: the score where ties are broken at random (½ for a pair, 1/k at the top)."


def suites_section(record: Record) -> Section:
    """Return the results of public suites, each by its own rule, compared with the best rule by length."""
    blocks: list[Block] = []
    ensemble = record.manifest.get("ensemble")
    if isinstance(ensemble, dict) and isinstance(ensemble.get("meaning"), str):
        blocks.append(Paragraph(text=f"These are scores of an ensemble: {ensemble['meaning']}", tone="note"))
    for suite in record.suites:
        rows: list[tuple[str, ...]] = []
        scores: list[Estimate | None] = []
        named: list[tuple[str, Estimate]] = []
        differs = False
        for row in suite["rows"]:
            if not isinstance(row, dict):
                continue
            score, baselines = estimate_of(row.get("score")), row.get("baselines")
            better, kind = str(row.get("better_baseline") or ""), str(row.get("kind") or "subset")
            length = estimate_of(baselines.get(better)) if isinstance(baselines, dict) else None
            p_value = to_float(row.get("p_holm" if kind == "subset" else "p_value"))
            fair = estimate_of(row.get("ties_at_random"))
            differs |= fair is not None and score is not None and abs(fair.value - score.value) > 1e-12
            rows.append(
                (
                    f"{MARK.get(kind, '')}{row.get('name')}",
                    shown(score),
                    f"{better} {shown(length)}",
                    shown(estimate_of(row.get("gain"))),
                    p_text(p_value),
                    count_of(row.get("rows")),
                    shown(fair),
                )
            )
            scores.append(score)
            named += [] if score is None else [(str(row.get("name")), score)]
        blocks.append(
            with_intervals(
                caption=f"{suite.get('suite')}, by its own rule",
                header=(
                    "subset",
                    "score",
                    "better length rule",
                    "above it",
                    "p",
                    "rows",
                    *differs * ("ties at random",),
                ),
                rows=rows if differs else [row[:-1] for row in rows],
                estimates=scores,
                label="score",
                notes=(*_rule_of(suite), *interval_notes(named), P_MEANS, *differs * (TIES_MEAN,)),
            )
        )
        blocks += [Paragraph(text=note, tone="note") for note in _missing(suite)]
    return Section(title="Suites", blocks=tuple(blocks))


def _rule_of(suite: Mapping[str, Any]) -> list[str]:
    """Return what a suite says of its rule, if it says anything."""
    ties, weighting = suite.get("ties"), suite.get("weighting")
    return [f"Rule: {ties}. Total: {weighting}."] if isinstance(ties, str) and isinstance(weighting, str) else []


def _missing(suite: Mapping[str, Any]) -> list[str]:
    """Return what keeps the scores of a suite from being those of all its rows, as the terminal says it."""
    causes = _counts(suite.get("unscored_replies"))
    parts = {str(name): _counts(part) for name, part in _mapping(suite.get("incomplete")).items()}
    return missing_notes(
        unscored_rows=_number(suite.get("unscored_rows")),
        unscored_replies=sum(causes.values()),
        causes=causes,
        truncated=_number(suite.get("truncated_replies")),
        shortened=_number(suite.get("shortened_replies")),
        left_out=_counts(suite.get("left_out")),
        incomplete={name: (own["there"], own.get("published")) for name, own in parts.items() if "there" in own},
    )


def _counts(value: object) -> dict[str, int]:
    """Return the whole numbers of a mapping by their names; other entries are left out."""
    return {
        str(name): count
        for name, count in _mapping(value).items()
        if isinstance(count, int) and count == _number(count)
    }


def _number(value: object) -> int:
    """Return a whole number; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def robustness_section(record: Record) -> Section:
    """Return the effects of changed texts on scores and verdicts."""
    found = record.robustness
    named = found.get("perturbations")
    effects = (
        {str(name): one for name, one in named.items() if isinstance(one, dict)} if isinstance(named, dict) else {}
    )
    parts = {name: _estimates(_mapping(one.get("estimates"))) for name, one in effects.items()}
    if not any(parts.values()):
        return Section(title="Robustness", blocks=())
    notes = {measure: [own[measure] for own in parts.values() if measure in own] for measure in MOVED}
    # The columns fill the width of a page, so intervals are not drawn beside them.
    table = Table(
        caption=f"The same pairs with their texts changed in ways that should not matter, {found.get('preferences')} "
        f"preferences",
        header=("texts", *MOVED, "moves", "preferences"),
        rows=tuple(
            (
                name,
                *(shown(own.get(measure)) for measure in MOVED),
                moves(*(to_float(effects[name].get(key)) for key in ("p_shift_holm", "p_accuracy_holm"))),
                count_of(effects[name].get("preferences")),
            )
            for name, own in parts.items()
        ),
        notes=(*(f"{measure}: {meaning}." for measure, meaning in MOVED.items()), MOVES, *column_notes(notes)),
        notes_folded=True,
    )
    left_out = {name: (_number(one.get("not_applicable")), _number(one.get("lost"))) for name, one in effects.items()}
    said = [Paragraph(text=note, tone="note") for note in left_out_notes(left_out)]
    return Section(title="Robustness", blocks=(table, *said))


def ensemble_section(ensemble: EnsembleRecord) -> Section:
    """Return the models of `--ensemble` as one, and whether their disagreement predicts errors."""
    facts = ensemble.facts
    members = facts.get("members")
    names = ", ".join(map(str, members)) if isinstance(members, list) else "unknown models"
    blocks: list[Block] = [
        Paragraph(
            text=f"Ensemble of {names} (λ = {to_float(facts.get('penalty')):g}), each put on one scale by "
            f"{facts.get('scaled_by')}."
        )
    ]
    if ensemble.evaluations:
        blocks.append(comparison(ensemble.evaluations, caption="The members as one", first="combination"))
    found = _mapping(facts.get("disagreement"))
    spread = {
        "standard deviation of the margin over members": estimate_of(found.get("by_spread")),
        "smallness of the mean margin": estimate_of(found.get("by_margin")),
    }
    combined = _mapping(facts.get("combinations"))
    blocks.append(
        with_intervals(
            caption="Does disagreement predict errors?",
            header=("what predicts errors", "AUROC"),
            rows=[(name, shown(estimate)) for name, estimate in spread.items()],
            estimates=list(spread.values()),
            label="AUROC",
            mark=0.5,
            notes=(
                f"AUROC: chance that a mistake of the mean ({count_of(found.get('num_errors'))}) has more of it than a "
                f"right answer ({count_of(found.get('num_right'))}); 0.5 says nothing. The second needs no ensemble.",
                interval_note(_known(spread.values())),
                *(f"{name}: {meaning}." for name, meaning in combined.items()),
            ),
        )
    )
    if left_out := _number(facts.get("left_out")):
        blocks.append(Paragraph(text=left_out_note(left_out), tone="note"))
    blocks += [Paragraph(text=problem, tone="warning") for problem in ensemble.problems]
    return Section(title="Ensemble", blocks=tuple(blocks))


TRUE_LABELS_CHOSE: Final = (
    "Read it at the last step, under the training curves. The evaluation data keep their true labels, and these chose "
    "best/, which alone brings the accuracy of best/ above 0.5 on them."
)


def controls_section(record: Record) -> Section:
    """Return the findings of `rewardlab diagnose`; for a run that is itself a control, what it is expected to show."""
    blocks: list[Block] = []
    if (notice := notice_of(record.control)) is not None:
        blocks.append(Paragraph(text=f"{notice}.", tone="warning"))
        if (expected := expectation_of(record.control)) is not None:
            blocks.append(Paragraph(text=f"Such a run is expected to reach {expected}"))
        if record.kind == "train" and judges_by_true_labels(record.control):
            blocks.append(Paragraph(text=TRUE_LABELS_CHOSE, tone="note"))
    if found := controls_of(record):
        own = _mapping(record.controls.get("model_itself"))
        rows = [("the model itself", "held out", *_over(own, "over_seeds", "over_conversations"), "")]
        drawn = [estimate_of(own.get("over_conversations"))]
        seeds = [estimate_of(own.get("over_seeds"))]
        for control in found:
            for number, one in enumerate(_list(control.get("measured"))):
                first = (control_name(control), str(control.get("verdict"))) if number == 0 else ("", "")
                rows.append((first[0], str(one.get("name")), *_over(one, "seeds", "conversations"), first[1]))
                drawn.append(estimate_of(one.get("conversations")))
                seeds.append(estimate_of(one.get("seeds")))
        blocks += [
            Paragraph(text=f"{record.controls.get('what')}. {record.controls.get('headline')}"),
            with_intervals(
                caption="What the controls measured",
                header=("control", "measured", "over seeds", "over conversations", "verdict"),
                rows=rows,
                estimates=drawn,
                label="accuracy",
                mark=0.5,
                notes=column_notes(
                    {"over seeds": list(map(over_seeds, _known(seeds))), "over conversations": _known(drawn)}
                ),
            ),
        ]
        blocks += [
            Paragraph(
                text=f"{control_name(control)}: {control.get('verdict')}. {control.get('sentence')}",
                tone="warning" if control.get("verdict") == "fail" else "plain",
            )
            for control in found
        ]
    return Section(title="Controls", blocks=tuple(blocks))


def controls_of(record: Record) -> list[dict[str, Any]]:
    """Return the findings of `rewardlab diagnose`."""
    return _list(record.controls.get("controls"))


def control_name(control: Mapping[str, Any]) -> str:
    """Return the name of a control in reports."""
    return str(control.get("control")).replace("_", " ")


def _over(part: Mapping[str, Any], seeds: str, conversations: str) -> tuple[str, ...]:
    own = estimate_of(part.get(seeds))
    return shown(None if own is None else over_seeds(own)), shown(estimate_of(part.get(conversations)))


def precision_section(record: Record) -> Section:
    """Return how far scores in other precisions are from those in float32, by the run's precision cards."""
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
        off = [str(kind) for kind in card["off"]] if isinstance(card.get("off"), list) else []
        said = verdicts_of(card)
        if off and not said:  # cards of earlier versions, and those of evaluations on the way
            words = "margins are off by more than the interval of their mean leaves open."
            said = [Paragraph(text=f"In {' and '.join(off)} {words}", tone="warning")]
        blocks += said
        blocks.append(
            Table(
                caption=f"{title}, {card.get('preferences')} preferences",
                header=("measure", *parts),
                rows=tuple(row for row in rows if any(row[1:])),
                notes=(*(f"{measure}: {MEASURES[measure]}" for measure in MEASURES), *column_notes(notes)),
                notes_folded=True,
            )
        )
    if "precision" not in record.cards and record.finished:
        blocks.append(Paragraph(text=_without_card(record), tone="note"))
    return Section(title="Precision", blocks=tuple(blocks))


def _without_card(record: Record) -> str:
    """Return why there is no precision card of the model, where that is known, and what makes one."""
    if record.manifest.get("ensemble"):
        return "An ensemble has no precision card of its own: see those of its members."
    config, asked = record.config, record.config.get("precision_card")
    if asked in (False, "never"):
        why = "it was switched off"
    elif record.kind == "train" and asked == "auto" and config.get("precision") == "fp32":
        why = f"a run in float32 of fewer than {CARD_WORTH:,} preferences ends without one"
    elif record.kind != "eval" and "test" not in record.evaluations and "selection" not in record.evaluations:
        why = "the run has no data to make one on"
    else:
        why = "the log may say why"
    model = record.model_folder or "MODEL"
    held_out = config.get("dataset" if record.kind == "eval" else "test_dataset") or config.get("eval_dataset")
    data = ["--dataset", *_names(held_out)]
    # Of a dataset on the hub: `eval` judges its test split unless told otherwise.
    split = config.get("hf_split" if record.kind == "eval" else "test_split") or "test"
    data += [] if split == "test" else ["--hf-split", str(split)]
    if suites := config.get("suite"):
        folder = config.get("suite_data")
        data = ["--suite", *_names(suites), *([] if folder is None else ["--suite-data", str(folder)])]
    line = command("eval", str(model), *data, "--output-dir", "runs/card")
    return f"No precision card says in which precision the model may be served ({why}). To make one: {line}"


def _names(held_out: object) -> list[str]:
    names = [str(name) for name in held_out] if isinstance(held_out, list) else []
    return names or ["HELD-OUT.jsonl"]


def served_section(record: Record) -> Section:
    """Return the precisions in which the model may be served, a sentence for each; no blocks without a card."""
    return Section(title="Precision", blocks=tuple(verdicts_of(record.cards.get("precision", {}))))


def verdicts_of(card: Mapping[str, Any]) -> list[Paragraph]:
    """Return the verdicts that were written into a card."""
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
                notes=_notes([(own.get("eval_accuracy"), own.get("eval_loss")) for own in parts]),
            )
        )
    if curve := _curve(found):
        blocks.append(curve)
    spread = found.get("uncertainty")
    if isinstance(spread, dict):
        over, sure, unsure = (estimate_of(spread.get(name)) for name in ("over_heads", "sure", "unsure"))
        if over is not None:
            text = (
                f"How far another sample of training prompts would move the accuracy: {over.method}."
                if math.isnan(over.low)
                else f"Another sample of training prompts would move the accuracy within {over.low:.3f} to "
                f"{over.high:.3f}."
            )
            text += f" Where bootstrap heads agree it is {shown(sure)}, elsewhere {shown(unsure)}."
            blocks.append(Paragraph(text=text))
    return Section(title="Probe", blocks=tuple(blocks))


def _curve(found: Mapping[str, Any]) -> Beside | None:
    """Return the accuracy by the number of comparisons that a head was fitted on."""
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
        chart=chart,
        table=Table(
            caption="Learning curve",
            header=("fitted on (comparisons)", "accuracy", "NLL"),
            rows=rows,
            notes=_notes([(own, loss) for _, own, loss in points]),
        ),
    )


def _notes(found: Sequence[tuple[Estimate | None, Estimate | None]]) -> tuple[str, ...]:
    """Return how the intervals of columns of accuracy and NLL were made."""
    accuracies, losses = zip(*found, strict=True)
    return tuple(column_notes({"accuracy": _known(accuracies), "NLL": _known(losses)}))


def _known(estimates: Iterable[Estimate | None]) -> list[Estimate]:
    return [estimate for estimate in estimates if estimate is not None]


def _estimates(part: Mapping[str, Any]) -> dict[str, Estimate]:
    """Return the estimates of a mapping; entries that are not estimates are left out."""
    made = {name: estimate_of(entry) for name, entry in part.items()}
    return {name: estimate for name, estimate in made.items() if estimate is not None}


def _mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[dict[str, Any]]:
    """Return the JSON objects in a list; an empty list if the value is not a list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
