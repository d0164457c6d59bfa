"""The report at the end of a run: evaluations before and after, with intervals, overall and by source."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

from rewardlab.analysis.health import WarningSign
from rewardlab.analysis.metrics import Evaluation
from rewardlab.analysis.precision import PrecisionCard
from rewardlab.core.run_folder import ALL, source_apart
from rewardlab.core.terminal import plural, quoted, visible
from rewardlab.core.types import Estimate
from rewardlab.report.ceiling import ceiling_lines
from rewardlab.report.compare import paired_lines
from rewardlab.report.overlap import overlap_of
from rewardlab.report.precision import card_block, live_block
from rewardlab.report.tables import (
    column_notes,
    digits_of,
    format_count,
    format_estimate,
    report_width,
    text_table,
    wrapped,
)

COLUMNS = {"accuracy": "eval_accuracy", "NLL": "eval_loss", "margin": "eval_margin", "ECE": "eval_ece"}
"""Column of every table of evaluations, in the terminal and on pages -> its metric."""
DIGITS = {"eval_accuracy": 3, "eval_loss": 2, "eval_margin": 2, "eval_ece": 2}
"""Metric -> its digits in the terminal, unless smaller numbers need more."""
BASELINES: Final = ("length only", "bag of words")
"""What a model has to be better than, as tables name it."""
BEFORE_AFTER = ("accuracy", "NLL", "margin")
"""Columns of tables whose first column also holds the name of a source, which leaves room for fewer."""


def evaluation_report(overall: Evaluation, by_source: Mapping[str, Evaluation]) -> str:
    """Return a table with one row for each source and, if there are several, one for all together."""
    named = dict(by_source)
    if len(named) != 1:
        named = {source_apart(name): own for name, own in by_source.items()} | {ALL: overall}
    return comparison_table(named, first="source")


def digits_in(row: str, estimate: Estimate | None, *, least: int) -> int:
    """Return the decimals of an estimate in a row of this name: `least`, or those that tell its numbers apart.

    A baseline has `least`: one that knows nothing has margins of next to nothing, of which nobody wants to know more.
    """
    return least if row.endswith(BASELINES) else digits_of(estimate, least=least)


def fitting(row: str, estimate: Estimate, *, least: int) -> str:
    """Return an estimate with its interval as a row of this name has it, see `digits_in`."""
    return format_estimate(estimate, digits=digits_in(row, estimate, least=least))


def comparison_table(
    evaluations: Mapping[str, Evaluation], *, first: str, columns: Sequence[str] = tuple(COLUMNS)
) -> str:
    """Return a table of named evaluations, with notes on the methods of the intervals and on what was left out."""
    metrics = [COLUMNS[column] for column in columns]
    rows = [
        [
            name,
            *(fitting(name, evaluation.estimates[metric], least=DIGITS[metric]) for metric in metrics),
            format_count(evaluation.sums.comparisons),
        ]
        for name, evaluation in evaluations.items()
    ]
    notes = column_notes(
        {column: [evaluation.estimates[COLUMNS[column]] for evaluation in evaluations.values()] for column in columns}
    )
    for name, evaluation in evaluations.items():
        counts = (
            (evaluation.sums.label_ties, "label tie", "left out of accuracy"),
            (evaluation.sums.score_ties, "score", "tied (counted one half)"),
            (evaluation.sums.non_finite, "score", "not finite (never compared)"),
        )
        notes += [f"{visible(name)}: {count} {plural(count, noun)} {what}" for count, noun, what in counts if count]
    notes += map(visible, ceiling_lines(evaluations))
    foot = [line for note in notes for line in textwrap.wrap(note, width=report_width())]
    unit = "comparisons" if any(one.unit == "comparisons" for one in evaluations.values()) else "pairs"
    return "\n".join([text_table([first, *columns, unit], rows), *foot])


@runtime_checkable
class Judged(Protocol):
    """An evaluation overall and by source, such as evaluation.evaluate.EvalResult."""

    @property
    def overall(self) -> Evaluation:
        """The evaluation of all comparisons."""

    @property
    def by_source(self) -> Mapping[str, Evaluation]:
        """Source -> its evaluation."""


def command(*arguments: str) -> str:
    """Return `rewardlab ARGUMENTS` as it can be typed here: quoted, and with its path if the name would not be found.

    After `make quickstart` the environment is not active, so the name alone would not work.
    """
    own = Path(sys.argv[0])
    if own.name != "rewardlab" or shutil.which("rewardlab") is not None:
        program = "rewardlab"
    else:
        near = own.absolute().is_relative_to(Path.cwd())
        program = str(own.absolute().relative_to(Path.cwd()) if near else own.absolute())
    return " ".join(map(quoted, (program, *arguments)))


def next_steps(model: str, step: int | None = None) -> str:
    """Return the last lines of a report: where the model is, from which step, and what to do with it."""
    of_step = "" if step is None else f"Its step: {step}\n"
    # A value that begins with a dash would be read as a flag.
    named = ("--model", model) if not model.startswith("-") else (f"--model={model}",)
    suggested = command("eval", *named, "--dataset", "YOUR_PAIRS.jsonl")
    return f"Reward model: {visible(model)}\n{of_step}Next: {suggested}"


def warning_block(warnings: Sequence[WarningSign]) -> list[str]:
    """Return a block with the warning signs seen during the run; an empty list if there were none."""
    if not warnings:
        return []
    lines = [
        textwrap.fill(
            f"step {sign.step}: {visible(sign.line())}",
            width=report_width(),
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        for sign in warnings
    ]
    head = "Warning signs on the way (docs/warning-signs.md in rewardlab's repository says what they mean):"
    return ["\n".join([head, *lines])]


def test_title(in_both: int) -> str:
    """Return what stands above a table of test data, of which so many prompts chose the checkpoint too."""
    if not in_both:
        return "Test data (they chose nothing):"
    return f"Test data ({in_both:,} of their prompts chose the checkpoint too, so they flatter it):"


def train_report(
    *,
    selection: Mapping[str, Judged],
    test: Mapping[str, Judged],
    shared: object = None,
    speed: str,
    ending: str,
    warnings: Sequence[WarningSign] = (),
    computed_in: Mapping[str, str] = MappingProxyType({}),
    cards: Sequence[str] = (),
) -> str:
    """Return the closing tables of a training run.

    `shared` counts what parts of the data have in common, as in the manifest. `speed` is a line about its steps,
    `ending` comes last, `cards` before the warning signs, and `computed_in` maps names of rows to the precision in
    which they were computed. The tables say that the evaluation data chose the checkpoint, which makes their numbers
    optimistic; only the test data are unbiased. Below each table, the last model is compared with each of the others
    on the same pairs, with p-values on test data that share no prompt with evaluation data alone.
    """
    blocks = []
    in_both = overlap_of(shared, "evaluation").prompts or 0
    for title, judged, chose in (
        ("Evaluation data (they chose the checkpoint, so they flatter it):", selection, True),
        (test_title(in_both), test, in_both > 0),
    ):
        if judged:
            paired = paired_lines(judged, chose=chose)
            blocks.append("\n".join([title, judged_table(judged), *precision_line(computed_in, judged), *paired]))
    blocks += [*cards, *warning_block(warnings), wrapped(speed), ending]
    return "\n" + "\n\n".join(blocks)


def precision_blocks(live: PrecisionCard | None, card: PrecisionCard | None) -> list[str]:
    """Return blocks that compare the evaluations during training with the saved model, and that in other precisions."""
    return [*([] if live is None else [live_block(live)]), *([] if card is None else [card_block(card)])]


def precision_line(computed_in: Mapping[str, str], judged: Mapping[str, Judged]) -> list[str]:
    """Return the last line below a table, which names the precision of its numbers; nothing if that is unknown."""
    others = [name for name in judged if name not in computed_in]
    named = {name: computed_in[name] for name in computed_in if name in judged}
    if others and "baselines" in computed_in:
        named = {" and ".join(others): computed_in["baselines"], **named}
    line = "; ".join(f"{name} in {precision}" for name, precision in named.items())
    return textwrap.wrap(f"computed: {line}", width=report_width()) if named else []


def judged_table(judged: Mapping[str, Judged]) -> str:
    """Return a table of several models on the same data, with a row for each source and model."""
    return comparison_table(by_source_and_name(judged), first="model", columns=BEFORE_AFTER)


def by_source_and_name(judged: Mapping[str, Judged]) -> dict[str, Evaluation]:
    """Return rows of a before-and-after table: each source, then all of them, with the names in order within each."""
    sources = list(dict.fromkeys(source for result in judged.values() for source in result.by_source))
    if len(sources) == 1:
        return {name: result.overall for name, result in judged.items()}
    rows = {
        f"{source_apart(source)} {name}": result.by_source[source]
        for source in sources
        for name, result in judged.items()
        if source in result.by_source
    }
    return rows | {f"{ALL} {name}": result.overall for name, result in judged.items()}
