"""The report of an inspection of a dataset, as text for the terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from rewardlab.analysis.inspection import Inspection, Judges, LabelBalance, Lengths, Sample, Spread
from rewardlab.analysis.linear import may_be_chance
from rewardlab.core.terminal import listed, number_of, plural, visible
from rewardlab.core.types import Estimate
from rewardlab.report.ceiling import ceiling_line
from rewardlab.report.tables import format_count, format_estimate, interval_note, report_width, text_table

MOST_KINDS: Final = 8
"""Most values of K, turns, scripts and languages that are listed; the others are added up."""
MOST_CHARACTERS: Final = 600
"""Most characters that are shown of a turn of a sample."""
FEW_SPACES: Final = ("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan")
"""Scripts that are written without spaces between words."""
ROOTS: Final[Mapping[str, str]] = {
    "reply": "rows with the same first user turn or a distinctive reply in common",
    "first_turn": "rows with the same first user turn; their replies join nearly all rows",
    "prompt": "rows with the same prompt; first turns and replies join nearly all rows",
}


def inspection_report(found: Inspection, causes: Mapping[str, str]) -> str:
    """Return the report on a dataset as text. `causes` maps each cause of dropping a row to its meaning."""
    blocks = [
        _head(found, causes),
        _block("Rows", _rows(found)),
        _block("Lengths", _spread_table(length_spreads(found.lengths)), "\n".join(map(_wrapped, length_notes(found)))),
        _block("Labels", _labels(found)),
        *([_block("Strengths", _spread_table({"strength": found.strengths}))] if found.strengths is not None else []),
        _block("How far judges agree, and the noise ceiling", *_judges(found.judges)),
        _block("Scripts and languages", *_tongues(found)),
        *([_block("Samples", *map(_sample, found.samples))] if found.samples else []),
    ]
    return "\n\n".join(blocks)


def inspected_by() -> str:
    """Return the line that names the program and version that wrote a page."""
    try:
        return f"Written by rewardlab {version('rewardlab')}: rewardlab data inspect."
    except PackageNotFoundError:
        return "Written by rewardlab data inspect."


def _block(title: str, *parts: str) -> str:
    return "\n".join([f"{title}:", *(part for part in parts if part)])


def _head(found: Inspection, causes: Mapping[str, str]) -> str:
    dropped = found.rows_read - found.kept
    lines = [
        f"=== {visible(found.name)} [{visible(found.split)}] ===",
        _wrapped(f"Format: {found.format}, since {found.why}."),
        f"Rows: {format_count(found.rows_read)} read, {format_count(found.kept)} kept, {format_count(dropped)} dropped"
        + (f", {format_count(found.used)} looked at (--limit)." if found.used < found.kept else "."),
    ]
    for cause, count in found.dropped.items():
        lines.append(
            _wrapped(f"  {cause}: {format_count(count)} ({causes.get(cause, 'no words for it')})", indent="    ")
        )
        lines += [_wrapped(f"    {visible(place)}", indent="      ") for place in found.examples.get(cause, ())]
    lines += [_wrapped(f"Replies: {found.left_out}")] if found.left_out else []
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "  ") -> str:
    return textwrap.fill(
        visible(text), width=report_width(), subsequent_indent=indent, break_on_hyphens=False, replace_whitespace=False
    )


def counted(counts: Mapping[int, int] | Mapping[str, int]) -> str:
    """Return values with their numbers of rows; if there are many, only the most frequent ones."""
    named = {str(name): count for name, count in counts.items()}
    if len(named) > MOST_KINDS:
        kept = sorted(sorted(named, key=lambda name: -named[name])[:MOST_KINDS], key=list(named).index)
        rest = sum(named.values()) - sum(named[name] for name in kept)
        named = {name: named[name] for name in kept} | {"others": rest}
    return ", ".join(f"{name}: {format_count(count)}" for name, count in named.items() if count)


def row_facts(found: Inspection) -> list[tuple[str, str]]:
    """Return (what, how many) of rows, prompts, conversations, K and turns."""
    return [
        ("different prompts", format_count(found.prompts)),
        ("conversations", f"{format_count(found.roots)}; the largest has {_prompts(found.largest_root)}"),
        ("joined by", ROOTS.get(found.root_rule, found.root_rule)),
        ("replies a row (K: rows)", counted(found.num_replies)),
        ("comparisons", format_count(found.labels.comparisons)),
        ("turns of the prompt (turns: rows)", counted(found.turns)),
        ("system turns", counted(found.system)),
    ]


def _prompts(count: int) -> str:
    return f"{format_count(count)} prompt{'' if count == 1 else 's'}"


def _rows(found: Inspection) -> str:
    return "\n".join(_wrapped(f"  {name}: {value}", indent="    ") for name, value in row_facts(found))


def spread_rows(named: Mapping[str, Spread]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table of quantiles. These are exact, since they are of all rows."""
    first = next((own for own in named.values() if own.quantiles), None)
    head = ["", "mean", "least", *(first.quantiles if first is not None else ()), "most"]
    rows = [
        [name, *(_plain(value) for value in (own.mean, own.lowest, *own.quantiles.values(), own.highest))]
        for name, own in named.items()
        if own.quantiles
    ]
    return head, rows


def _spread_table(named: Mapping[str, Spread]) -> str:
    head, rows = spread_rows(named)
    return text_table(head, rows) if rows else "  none"


def _plain(value: float) -> str:
    """Return an exact number of the data as text: whole numbers and those from 100 without decimals, others with three
    digits."""
    if math.isnan(value):
        return "—"
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"


def length_spreads(lengths: Lengths) -> dict[str, Spread]:
    """Return name -> spread, for each kind of length that is reported."""
    return {
        f"prompt ({lengths.unit})": lengths.prompts,
        f"reply ({lengths.unit})": lengths.replies,
        f"both ({lengths.unit})": lengths.conversations,
    }


def length_notes(found: Inspection) -> Iterator[str]:
    """Yield the notes about lengths: how they were counted, how many are too long, what sharing saves."""
    lengths = found.lengths
    if lengths.unit == "words":
        yield (
            "Counted in words, the runs between white space; --model or --tokenizer counts tokens. Quantiles are "
            "exact: they are of all rows."
        )
        few = sum(share for script, share in found.tongues.scripts.items() if script in FEW_SPACES)
        if few > 0.05:
            yield f"{few:.0%} of the letters are of scripts without spaces, for which words say little."
    else:
        yield f"Counted in tokens of {lengths.counted_by}, uncut. Quantiles are exact: they are of all rows."
    if lengths.limit is not None:
        share = lengths.overlong / lengths.conversations.count if lengths.conversations.count else 0.0
        yield (
            f"Above the limit of {format_count(lengths.limit)} tokens: "
            f"{number_of(lengths.overlong, 'conversation')} "
            f"({share:.2%}) in {number_of(lengths.overlong_rows, 'row')}."
        )
    for cause, count in lengths.unrendered.items():
        yield (
            f"Not rendered: {number_of(count, 'row')} ({cause.replace('_', ' ')}); "
            f"{plural(count, 'it has', 'they have')} no lengths."
        )
    for cause, count in lengths.unrendered_replies.items():
        yield (
            f"Not rendered: {number_of(count, 'reply')} ({cause.replace('_', ' ')}) of rows that keep others "
            f"to compare; {plural(count, 'it has', 'they have')} no lengths, and training leaves "
            f"{plural(count, 'it', 'them')} out."
        )
    if lengths.unshared:
        saved = 1 - lengths.computed / lengths.unshared
        what = "the prompt" if lengths.unit == "words" else "what replies share"
        yield (
            f"Shared part: {format_count(lengths.computed)} of {format_count(lengths.unshared)} {lengths.unit} are "
            f"computed where {what} is computed once, which saves {saved:.1%}."
        )


def label_counts(labels: LabelBalance) -> str:
    """Return the counts of labels in words: decided, ties, soft, below one half."""
    parts = [f"{number_of(labels.comparisons, 'comparison')}: {format_count(labels.decided)} decided"]
    counts = {
        "labelled as ties": labels.label_ties,
        "not compared since their scores are equal": labels.skipped_ties,
        "with soft labels": labels.soft,
        "with a label below 1/2, so that the second reply is preferred": labels.below_half,
    }
    return ", ".join([*parts, *(f"{format_count(count)} {what}" for what, count in counts.items() if count)]) + "."


def label_estimates(found: Inspection) -> dict[str, Estimate]:
    """Return name -> estimate for labels and baselines."""
    labels = found.labels
    named: dict[str, Estimate] = {}
    if labels.first_is_better is not None:
        named["the better reply stands first"] = labels.first_is_better
    named["the better reply is the longer one"] = labels.longer_is_better
    named |= {f"  by {size}": estimate for size, estimate in labels.by_difference}
    return named | {f"baseline, {name}": estimate for name, estimate in found.baselines.accuracy.items()}


def label_notes(found: Inspection) -> Iterator[str]:
    """Yield the notes below the estimates of labels and baselines."""
    if found.labels.first_is_better is None:
        yield "The format names the better reply, so that its place says nothing."
    if found.baselines.accuracy:
        yield (
            f"Baselines: linear models of a reply's length alone (in words), and of its words alone, fitted on "
            f"{number_of(found.baselines.rows, 'row')}; each comparison is judged by one that saw nothing of its "
            "conversation. A reward model that is not clearly better may have learned no more."
        )
    if chance := [name for name, accuracy in found.baselines.accuracy.items() if may_be_chance(accuracy)]:
        yield (
            f"{listed(chance)}: may be chance though the interval leaves 0.5 out. Each comparison also fitted the "
            "models that judge others, so near 0.5 it is up to 1.4 times too narrow."
        )
    if found.baselines.strengths_are_reversed:
        (low, weaker), (high, stronger) = found.baselines.by_strength
        yield (
            f"Are the strengths the wrong way round? The bag of words finds the better reply less often where they are "
            f"high: {high} {format_estimate(stronger)}, {low} {format_estimate(weaker)}. A high strength says that the "
            f"preference is strong. Turn numbers round that count down from the strongest before --strength-as. "
            f"Several sources of other scales may look so too: inspect each alone."
        )
    if found.baselines.missing:
        yield f"Not fitted: {found.baselines.missing}"


def _labels(found: Inspection) -> str:
    return "\n".join(
        [
            _wrapped(label_counts(found.labels)),
            _estimates(label_estimates(found), "share of decided comparisons", "conversations"),
            *map(_wrapped, label_notes(found)),
        ]
    )


def _estimates(named: Mapping[str, Estimate], column: str, counted_in: str) -> str:
    rows = [[name, format_estimate(own), format_count(own.n)] for name, own in named.items()]
    return "\n".join([text_table(["", column, counted_in], rows), _wrapped(interval_note(named.values()))])


def judge_notes(judges: Judges) -> Iterator[str]:
    """Yield the notes about repeated judgements and the noise ceilings."""
    yield (
        f"{number_of(judges.annotators, 'named annotator')}; {number_of(judges.repeated, 'pair')} "
        f"judged several "
        f"times in one row, {number_of(judges.repeated_elsewhere, 'pair')} of texts in several rows."
    )
    if not judges.ceilings:
        yield (
            "The noise ceiling is not known: no pair is judged twice, labels are hard, and there are no strengths that "
            "are probabilities."
        )


def _judges(judges: Judges) -> Iterator[str]:
    yield from map(_wrapped, judge_notes(judges))
    if judges.alpha:
        yield _estimates(judges.alpha, "Krippendorff's α", "prompts")
    yield from (_wrapped(ceiling_line(one)) for one in judges.ceilings)


def script_words(found: Inspection) -> str:
    """Return the share of each script in words."""
    listed = list(found.tongues.scripts.items())
    shown = [f"{name} {share:.1%}" for name, share in listed[:MOST_KINDS]]
    rest = sum(share for _, share in listed[MOST_KINDS:])
    what = ", ".join([*shown, *([f"others {rest:.1%}"] if rest else [])]) or "none"
    return f"Letters of prompts and replies: {format_count(found.tongues.letters)}; {what}."


def language_estimates(found: Inspection) -> dict[str, Estimate]:
    """Return the most frequent languages with their shares."""
    return dict(list(found.tongues.languages.items())[:MOST_KINDS])


def _tongues(found: Inspection) -> Iterator[str]:
    yield _wrapped(script_words(found))
    if found.tongues.languages:
        yield _estimates(
            language_estimates(found), f"share of {format_count(found.tongues.sampled)} drawn replies", "prompts"
        )
    elif found.tongues.missing:
        yield _wrapped(f"{found.tongues.missing[0].upper()}{found.tongues.missing[1:]}.")


def _sample(sample: Sample) -> str:
    lines = ["", f"--- {visible(sample.place)}: {visible(sample.judged)} ---"]
    lines += [f"[{visible(role)}] {_cut(text)}" for role, text in sample.prompt]
    for number, turns in enumerate(sample.replies):
        lines.append(f"reply {number}:")
        lines += [f"  [{visible(role)}] {_cut(text)}" for role, text in turns]
    lines += [f"reply {number} as tokens: {visible(text)}" for number, text in enumerate(sample.rendered)]
    return "\n".join(lines)


def _cut(text: str) -> str:
    more = len(text) - MOST_CHARACTERS
    shown = visible(text[:MOST_CHARACTERS], lines=True).replace("\n", "\n    ")
    return shown if more <= 0 else f"{shown} … {format_count(more)} more characters"
