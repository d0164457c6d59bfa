"""Paired comparisons as text, for `rewardlab compare` and for the lines below the closing tables of a run."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from rewardlab.analysis.aligned import ScoreSet, align
from rewardlab.analysis.comparison import AgainstFirst, ComparisonOfModels, Disagreement
from rewardlab.analysis.multiple import holm
from rewardlab.analysis.paired import ALPHA, METRICS, Equivalence, Metric, PairComparison, Paired, compare_metrics
from rewardlab.core.errors import DataError
from rewardlab.core.terminal import number_of, plural, visible
from rewardlab.core.types import ScoreRow
from rewardlab.report.ceiling import ceiling_note
from rewardlab.report.tables import (
    column_notes,
    digits_of,
    format_count,
    format_estimate,
    report_width,
    text_table,
)

TITLES: Final[Mapping[Metric, str]] = {"accuracy": "accuracy", "nll": "NLL", "margin": "margin, sd"}
DIGITS: Final[Mapping[Metric, int]] = {"accuracy": 3, "nll": 3, "margin": 3}
_TEXT: Final = 240
"""Most characters that are shown of each text of a disagreement."""


def format_p(p: float) -> str:
    """Return a p-value with two digits, `<0.0001` below that, and a dash for none."""
    if math.isnan(p):
        return "—"
    if p < 0.0001:
        return "<0.0001"
    return f"{p:.4f}" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def said_p(p: float) -> str:
    """Return a p-value for a sentence: ``p = 0.031``, ``p < 0.0001``."""
    shown = format_p(p)
    return f"p < {shown[1:]}" if shown.startswith("<") else f"p = {shown}"


def compare_report(
    result: ComparisonOfModels,
    *,
    texts: Mapping[tuple[str, str], Mapping[str, str]],
    chose: Sequence[str] = (),
    num_examples: int = 3,
) -> str:
    """Return the text of `rewardlab compare`: each model alone, each against the first, and all together."""
    blocks = [_head(result, chose), _alone(result)]
    for other in result.others:
        blocks += _against_first(other, result, texts, num_examples=num_examples)
    if result.standings:
        blocks.append(_standings(result))
    if result.agreement:
        blocks.append(_agreement(result))
    return "\n" + "\n\n".join(blocks)


def paired_table(compared: Sequence[Paired]) -> str:
    """Return a table of paired differences with a row for each metric of each comparison, and notes."""
    rows, notes = [], {}
    for paired in compared:
        for metric in METRICS:
            if (found := paired.metrics.get(metric)) is None:
                continue
            what = TITLES[metric] if len(compared) == 1 else f"{TITLES[metric]}, {minus(paired)}"
            digits = digits_of(found.difference, least=DIGITS[metric])
            rows.append([what, format_estimate(found.difference, digits=digits), format_p(found.test.p)])
            notes[what] = [found.difference]
    methods: dict[str, dict[str, None]] = {}
    for metric in METRICS:
        for paired in compared:
            if metric in paired.metrics:
                methods.setdefault(paired.metrics[metric].test.method, {})[TITLES[metric]] = None
    tests = [f"p of {'; '.join(titles)}: {method}" for method, titles in methods.items()]
    foot = [*column_notes(notes), *(tests if len(methods) > 1 else [f"p: {method}" for method in methods])]
    head = minus(compared[0]) if len(compared) == 1 else "paired"
    return "\n".join([text_table([head, "difference", "p"], rows), *_wrapped(foot)])


def tests_told(compared: Iterable[Paired]) -> str:
    """Return the kinds of tests of accuracies, each once: one that says more of a kind that is told says it of a pair
    alone."""
    methods = dict.fromkeys(paired.metrics["accuracy"].test.method for paired in compared)
    return "; ".join(one for one in methods if not any(one != other and one.startswith(other) for other in methods))


def minus(paired: Paired) -> str:
    """Return the name of the difference, such as `after − before`."""
    return f"{paired.second} − {paired.first}"


@runtime_checkable
class WithRows(Protocol):
    """An evaluation with its score rows, such as evaluation.evaluate.EvalResult."""

    @property
    def rows(self) -> Sequence[ScoreRow]:
        """The rows that were judged."""


def paired_lines(judged: Mapping[str, object], *, chose: bool = False) -> list[str]:
    """Return lines to put below a table of models on the same data: the last against each other one, by accuracy.

    `chose` says that these data chose the last one. There is no p-value then: the best of several checkpoints that
    learnt nothing is often ahead of others by more than chance allows a single one.
    They are empty without a second model or without score rows. If nothing can be compared, one line says why.
    """
    with_rows = {name: own.rows for name, own in judged.items() if isinstance(own, WithRows)}
    if len(with_rows) < 2 or len(with_rows) < len(judged):
        return []
    *others, last = with_rows
    try:
        compared = [
            compare_metrics(
                align([ScoreSet(name=other, rows=with_rows[other]), ScoreSet(name=last, rows=with_rows[last])]),
                ["accuracy"],
            )
            for other in others
        ]
    except DataError as error:
        return _wrapped([f"paired differences: none ({error})"])
    adjusted = holm([paired.metrics["accuracy"].test.p for paired in compared])
    rows = [
        [
            paired.first,
            format_estimate(paired.metrics["accuracy"].difference),
            *([] if chose else [format_p(p)]),
            format_count(paired.verdicts.only_second),
            format_count(paired.verdicts.only_first),
        ]
        for paired, p in zip(compared, adjusted, strict=True)
    ]
    notes = column_notes({"accuracy": [paired.metrics["accuracy"].difference for paired in compared]})
    holms = ", after Holm's correction" if len(compared) > 1 else ""
    said = f"p: {tests_told(compared)}{holms}"
    if chose:
        said = (
            f"no p: {last} was chosen by these data, which flatters the differences too; test data that chose nothing "
            f"have one"
        )
    table = text_table([f"{last} minus", "accuracy", *([] if chose else ["p"]), "right alone", "wrong alone"], rows)
    return [
        "",
        f"On the same pairs ({visible(last)} against each of the others):",
        table,
        *_wrapped([*notes, said]),
    ]


# --- the blocks of the report -----------------------------------------------------------------------------------


def _wrapped(lines: Iterable[str]) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(visible(line), width=report_width())]


def _head(result: ComparisonOfModels, chose: Sequence[str]) -> str:
    all_models = "both models" if len(result.names) == 2 else f"all {len(result.names)} models"
    lines = [
        f"Compared on {number_of(result.comparisons, 'comparison')} of "
        f"{number_of(result.prompts, 'prompt')}, which {all_models} score. The reference is {result.names[0]}."
    ]
    if result.by_place:
        lines.append(
            f"No ids in {', '.join(result.by_place)}: rows are paired by their number in the file. This is only right "
            "if every file has the same rows in the same order, which cannot be checked."
        )
    if result.gold_labels:
        lines.append("No file says which reply is preferred, so the order of the gold scores counts as the truth.")
    if result.label_ties:
        lines.append(
            f"{result.label_ties:,} "
            f"{plural(result.label_ties, 'is labelled as a tie', 'are labelled as ties')}: left out of "
            f"accuracy and margin."
        )
    lines += [
        f"{name}: {number_of(count, 'comparison')} without a finite score of it, left out for all models."
        for name, count in result.not_finite.items()
    ]
    lines += [
        f"{name}: lacks {number_of(count, 'comparison')} of the others, left out for all models."
        for name, count in result.missing.items()
    ]
    if chose:
        lines.append(
            f"Judged on data that chose the checkpoint, which flatters them: {', '.join(chose)}. p is too small where "
            f"these data did not choose the other model likewise."
        )
    return "\n".join(_wrapped(lines))


def _alone(result: ComparisonOfModels) -> str:
    """Return the table of each model's metrics."""
    shown = [metric for metric in METRICS if all(metric in other.paired.metrics for other in result.others)]
    cells = {result.names[0]: [result.others[0].paired.metrics[metric].first for metric in shown]}
    cells |= {other.paired.second: [other.paired.metrics[metric].second for metric in shown] for other in result.others}
    rows = [
        [
            name,
            *(
                format_estimate(
                    estimate, digits=digits_of(estimate, least=DIGITS[metric] if metric == "accuracy" else 2)
                )
                for metric, estimate in zip(shown, own, strict=True)
            ),
        ]
        for name, own in cells.items()
    ]
    notes = column_notes(
        {TITLES[metric]: [own[number] for own in cells.values()] for number, metric in enumerate(shown)}
    )
    unknown = [name for name, beta in zip(result.names, result.betas, strict=True) if beta is None]
    if unknown and "nll" not in shown:
        notes.append(f"NLL: left out, since the β of {', '.join(unknown)} is not known; give it with --beta.")
    if "nll" in shown:
        betas = dict.fromkeys(f"{beta:g}" for beta in result.betas if beta is not None)
        notes.append(f"NLL: under σ(β d), β {', '.join(betas)}")
    if "margin" in shown:
        notes.append(f"margin, sd: {METRICS['margin']}")
    if result.ceiling is not None:
        notes.append(ceiling_note(result.ceiling))
    return "\n".join([text_table(["model", *(TITLES[metric] for metric in shown)], rows), *_wrapped(notes)])


def _against_first(
    other: AgainstFirst,
    result: ComparisonOfModels,
    texts: Mapping[tuple[str, str], Mapping[str, str]],
    *,
    num_examples: int,
) -> list[str]:
    paired = other.paired
    lines = []
    if len(result.others) > 1:
        lines.append(
            f"{TITLES[result.metric]}: {said_p(other.adjusted)} after Holm's correction for "
            f"{len(result.others)} comparisons with {result.names[0]}."
        )
    verdicts = paired.verdicts
    lines.append(
        f"Right: both {verdicts.both:,}, only {paired.first} {verdicts.only_first:,}, only {paired.second} "
        f"{verdicts.only_second:,}, neither {verdicts.neither:,}"
        + (f"; with a tied score {verdicts.tied:,}." if verdicts.tied else ".")
    )
    lines.append(
        f"{paired.mcnemar.method}: {said_p(paired.mcnemar.p)}."
        if paired.mcnemar is not None
        else "McNemar's test is left out: prompts repeat or scores tie, so rows are not independent 0/1 outcomes."
    )
    lines.append(
        "Too few disagreements for any difference of accuracy to be shown with 80% power."
        if math.isnan(paired.smallest.value)
        else f"Smallest difference of accuracy that these pairs show with 80% power: "
        f"{format_estimate(paired.smallest)} ({paired.smallest.method})."
    )
    if paired.equivalence is not None:
        lines += _equivalence(paired, paired.equivalence)
    blocks = ["\n".join([paired_table([paired]), *_wrapped(lines)])]
    if other.slices:
        blocks.append(_slices(other, result))
    if num_examples and other.disagreements:
        blocks.append(_examples(other, texts, num_examples))
    return blocks


def _equivalence(paired: PairComparison, found: Equivalence) -> list[str]:
    if math.isnan(found.not_worse.p):
        return [f"Whether it is at most {found.margin:g} worse cannot be said: {found.interval.method}."]
    what, margin = TITLES[found.metric], f"{found.margin:g}"
    worse = "shown" if found.is_not_worse else "not shown"
    same = "shown" if found.is_equivalent else "not shown"
    return [
        f"{paired.second} less than {margin} worse in {what}: {worse} ({said_p(found.not_worse.p)}, one-sided). "
        f"The two less than {margin} apart: {same} (TOST, {said_p(found.equivalent.p)}). 90% interval of the "
        f"difference: {format_estimate(found.interval)}."
    ]


def _slices(other: AgainstFirst, result: ComparisonOfModels) -> str:
    rows = [
        [
            f"{part.column}: {part.value}",
            format_estimate(part.difference),
            format_p(part.test.p),
            format_p(part.adjusted),
            format_count(part.comparisons),
        ]
        for part in other.slices
    ]
    tested = sum(not math.isnan(part.adjusted) for own in result.others for part in own.slices)
    notes = column_notes({TITLES[result.metric]: [part.difference for part in other.slices]})
    of_all = " of all models" if len(result.others) > 1 else ""
    notes.append(f"Holm: p after correction for the {number_of(tested, 'slice')}{of_all} tested.")
    head = [minus(other.paired), TITLES[result.metric], "p", "Holm", "comparisons"]
    return "\n".join([text_table(head, rows), *_wrapped(notes)])


def _examples(other: AgainstFirst, texts: Mapping[tuple[str, str], Mapping[str, str]], count: int) -> str:
    """Return the comparisons that one of the two models ranks better than the other, in the order they come in."""
    paired = other.paired
    blocks = []
    for name, better in ((paired.second, 1), (paired.first, 0)):
        own = [one for one in other.disagreements if one.outcomes[better] > one.outcomes[1 - better]]
        if not own:
            continue
        head = f"{name} is right where {paired.second if better == 0 else paired.first} is not: {len(own):,}"
        shown = f", {_chosen(own[0], paired, count)}" if len(own) > count else ""
        blocks.append(
            "\n".join([*_wrapped([f"{head}{shown}"]), *(_example(one, paired, texts) for one in own[:count])])
        )
    return "\n".join(blocks)


def _chosen(one: Disagreement, paired: PairComparison, count: int) -> str:
    """Return which disagreements come first, by whose margins are known."""
    scored = list(_margins(one, paired))
    if len(scored) == 2:
        return f"the {count} furthest apart"
    return f"the {count} that {scored[0]} is surest of" if scored else f"the first {count}"


def _margins(one: Disagreement, paired: PairComparison) -> dict[str, float]:
    """Return the margin of each model that has scores, not verdicts alone."""
    both = zip((paired.first, paired.second), one.margins, strict=True)
    return {name: margin for name, margin in both if margin is not None}


def _example(one: Disagreement, paired: PairComparison, texts: Mapping[tuple[str, str], Mapping[str, str]]) -> str:
    place = f"{one.pair.source}: {one.pair.preference_id}" if one.pair.source else one.pair.preference_id
    margins = [f"{name} {margin:+.2f}" for name, margin in _margins(one, paired).items()]
    shown = f"; margin{'s' if len(margins) > 1 else ''} {', '.join(margins)} sd" if margins else ""
    lines = [f"  {place}, reply {one.pair.preferred} over {one.pair.other}{shown}"]
    found = texts.get((one.pair.source, one.pair.preference_id)) or texts.get(("", one.pair.preference_id)) or {}
    for name in ("prompt", "preferred", "other"):
        if name in found:
            text = " ".join(found[name].split())
            lines.append(f"    {name}: {text if len(text) <= _TEXT else text[: _TEXT - 1] + '…'}")
    return "\n".join(
        part
        for line in lines
        for part in textwrap.wrap(visible(line), width=report_width(), subsequent_indent="      ")
    )


def _standings(result: ComparisonOfModels) -> str:
    rows = [
        [name, format_estimate(own.rank, digits=1), format_p(own.p_best), "yes" if own.p_best >= ALPHA else "no"]
        for name, own in result.standings.items()
    ]
    best = [name for name, own in result.standings.items() if own.p_best >= ALPHA]
    table = text_table(["model", "rank", "p as good as the best", "may be the best"], rows)
    notes = [
        *column_notes({"rank": [own.rank for own in result.standings.values()]}),
        "p: model confidence set (Hansen, Lunde & Nason 2011), T_max, sign flips by prompt",
        f"Not distinguishable from the best in {TITLES[result.metric]}: {', '.join(best)}."
        if best
        else "Ranks need ten prompts to say how sure they are.",
    ]
    return "\n".join([table, *_wrapped(notes)])


def _agreement(result: ComparisonOfModels) -> str:
    rows = [
        [name, format_estimate(own.match), *(format_estimate(found, digits=2) for found in own.correlations.values())]
        for name, own in result.agreement.items()
    ]
    kinds = list(next(iter(result.agreement.values())).correlations)
    notes = column_notes(
        {"match": [own.match for own in result.agreement.values()]}
        | {kind: [own.correlations[kind] for own in result.agreement.values()] for kind in kinds}
    )
    ties = next(iter(result.agreement.values())).gold_ties
    notes.append("match: share of comparisons ordered as the gold model orders them")
    if ties:
        notes.append(f"{ties:,} comparisons that the gold model ties are left out of the match rate")
    return "\n".join(["Against the gold scores:", text_table(["model", "match", *kinds], rows), *_wrapped(notes)])
