"""The sections of a report that show what a run wrote: headline, warning signs, data, speed, settings, provenance.

Nothing is computed here: every measured value is an estimate that was read, with its interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from rewardlab.analysis.ceiling import Ceiling
from rewardlab.analysis.health import ADVICE
from rewardlab.core.controls import notice_of
from rewardlab.core.terminal import listed, number_of, plural
from rewardlab.core.types import Estimate
from rewardlab.report.ceiling import ceiling_note
from rewardlab.report.document import Block, Paragraph, Section, Table, shown, with_intervals
from rewardlab.report.evaluations import Judged
from rewardlab.report.folder import Record
from rewardlab.report.overlap import overlap_of
from rewardlab.report.run import COLUMNS, digits_in
from rewardlab.report.tables import column_notes, count_of, format_count

WHAT: Final = {
    "eval": "the data of this evaluation",
    "selection": "the data that chose the checkpoint, which flatters it",
    "cross_validated": "held-out training prompts, which chose the layer, which flatters it a little",
}
"""Name of an evaluation -> description of its data."""
BESIDE: Final = {"before_training": "before training", "length_only": "length only", "bag_of_words": "bag of words"}
"""End of the name of an evaluation -> its row in a table, in this order."""
SHARED: Final = {
    "rows": "row",
    "prompts": "prompt",
    "first_turns": "first turn",
    "replies": "reply",
    "phrases": "phrase",
}
"""What two parts of the data share, by its name in the manifest -> one of these."""


def status(record: Record) -> str:
    """Return a sentence that says whether the run is finished."""
    if record.kind != "train":
        done = {"probe": "A probe", "eval": "An evaluation"}[record.kind]
        return f"{done} that is finished." if record.finished else f"{done} that has not come to its end."
    planned = f" of {record.num_steps:,}" if record.num_steps else ""
    if not record.finished:
        numbers = "Numbers are those of the last evaluation on the way." if record.judged else "No evaluation so far."
        if record.ended:
            return f"Ended before its time (last record: step {record.step:,}{planned}): {record.ended} {numbers}"
        return f"Not finished: step {record.step:,}{planned} so far. {numbers}"
    early = record.num_steps is not None and record.step < record.num_steps
    return f"Finished at step {record.step:,}{planned}{', ended early' if early else ''}."


def what(record: Record, name: str) -> str:
    """Return a description of the data of an evaluation of a run."""
    if name.startswith("step_"):
        return f"evaluation data at step {name[5:]}, on the way"
    return overlap_of(record.shared, "evaluation").words if name == "test" else WHAT.get(name, name)


def compared(record: Record, name: str) -> dict[str, Judged]:
    """Return an evaluation together with others on the same data: before it, the untrained model and baselines."""
    # An evaluation during the run has the same data as the one at its end, so it is compared with the same baselines.
    on = "selection" if name.startswith("step_") else name
    ends = {other.removeprefix(f"{on}_"): other for other in record.evaluations if other.startswith(f"{on}_")}
    if on == "selection" and "step_0" in record.evaluations and name != "step_0":
        ends["before_training"] = "step_0"
    order = [*(end for end in BESIDE if end in ends), *(end for end in ends if end not in BESIDE)]
    found = {BESIDE.get(end, end.replace("_", " ")): record.evaluations[ends[end]] for end in order}
    return {**found, "probe" if record.kind == "probe" else "this model": record.evaluations[name]}


def headline(record: Record, *, ceiling: Estimate | Ceiling | None = None) -> Section:
    """Return the numbers of the model beside those of the baselines, with intervals.

    `ceiling` is the accuracy of a judge who knew the true probabilities, or a noise ceiling from repeated judgements,
    soft labels or strengths.
    """
    control = notice_of(record.control)
    first: tuple[Block, ...] = () if control is None else (Paragraph(text=f"{control}.", tone="warning"),)
    judged = record.judged
    if judged is None and record.suites:
        told = Paragraph(text="Judged on public test suites alone, whose scores are below.", tone="note")
        return Section(title="Headline", blocks=(*first, told))
    if judged is None:
        said = "This folder holds no evaluation, so nothing can be said about how good the model is."
        why = " The run has not come to its first evaluation." if not record.finished else ""
        return Section(title="Headline", blocks=(*first, Paragraph(text=f"{said}{why}", tone="warning")))
    blocks: list[Block] = [*first]
    own = judged.estimates["all"]
    if "eval_accuracy" in own:
        blocks.append(
            Paragraph(
                text=f"Accuracy {shown(own['eval_accuracy'])} on {what(record, judged.name)}: "
                f"{_decided(own['eval_accuracy'], judged.counts['all'])}.",
            )
        )
    blocks += [Paragraph(text=text, tone="warning") for text in _cautions(record, judged)]
    blocks.append(comparison(compared(record, judged.name), caption=f"On {what(record, judged.name)}", first="model"))
    if judged.calibrated:
        blocks.append(
            Paragraph(
                text=f"Probabilities are calibrated: σ({record.beta:.4g} · score difference), β divided by the "
                "temperature that the model holds.",
                tone="note",
            )
        )
    if isinstance(ceiling, Ceiling):
        blocks.append(Paragraph(text=ceiling_note(ceiling, where=", which stands among the ranks")))
    elif ceiling is not None and math.isfinite(ceiling.value):
        blocks.append(
            Paragraph(
                text=f"Ceiling: the labels themselves are noisy. Whoever knew the true probabilities would be right in "
                f"{shown(ceiling)} of these comparisons on average.",
            )
        )
    ties = judged.counts["all"].get("label_ties", 0)
    blocks.append(
        Paragraph(
            text=(
                f"Ties: {ties:,.0f} of {pairs_of(judged)} comparisons "
                f"{plural(ties, 'is labelled as a tie', 'are labelled as ties')}, and left out of accuracy "
                "and margin."
                if ties
                else "No comparison is labelled as a tie."
            )
            + ("" if ceiling is not None else " How noisy the labels are, and so the ceiling, is not known."),
            tone="note",
        )
    )
    other = "selection" if judged.name == "test" and "selection" in record.evaluations else None
    if other:
        table = comparison(compared(record, other), caption=f"On {what(record, other)}", first="model")
        blocks.append(table)
    return Section(title="Headline", blocks=tuple(blocks))


def _cautions(record: Record, judged: Judged) -> Iterator[str]:
    """Yield what to know before the numbers: that no checkpoint was better, and where rows are too few."""
    folder = record.model_folder
    compares = record.kind == "train" and record.finished and "step_0" in record.evaluations
    if compares and folder is not None and folder.name != "best":
        first = record.evaluations["step_0"].estimates["all"].get("eval_accuracy")
        if first is not None and not math.isfinite(first.value):
            why = "the evaluation data have no accuracy to choose by, as where all rows are label ties."
        else:
            why = "no checkpoint beat the untrained model on the evaluation data, unless it was removed since."
        yield f"There is no best/: {why} This model is {folder.name}/, that of the last step."
    chose = record.evaluations.get("selection")
    for one in {one.name: one for one in (judged, chose) if one is not None}.values():
        accuracy = one.estimates["all"].get("eval_accuracy")
        if accuracy is not None and math.isfinite(accuracy.value) and not math.isfinite(accuracy.low):
            more = " Hold out more (--eval-fraction, --eval-dataset, --test-dataset)." if record.kind == "train" else ""
            yield f"No interval for the accuracy on {what(record, one.name)}: {accuracy.method}.{more}"


def comparison(evaluations: Mapping[str, Judged], *, caption: str, first: str) -> Table:
    """Return a table of evaluations, with the accuracy also drawn."""
    parts = {name: (judged.estimates["all"], judged.counts["all"]) for name, judged in evaluations.items()}
    return estimates_table(parts, caption=caption, first=first)


def estimates_table(
    parts: Mapping[str, tuple[Mapping[str, Estimate], Mapping[str, float]]], *, caption: str, first: str
) -> Table:
    """Return a table of named (estimates, counts): accuracy, also drawn, NLL, margin, ECE and comparisons."""
    columns = [name for name, metric in COLUMNS.items() if any(metric in own for own, _ in parts.values())]
    least = {column: 2 if column == "margin" else 3 for column in columns}
    notes = column_notes(
        {name: [own[COLUMNS[name]] for own, _ in parts.values() if COLUMNS[name] in own] for name in columns}
    )
    for name, (_, counts) in parts.items():
        tied, lost = (counts.get(key, 0) for key in ("score_ties", "non_finite"))
        notes += [f"{name}: {tied:,.0f} {plural(tied, 'score')} tied, counted one half."] if tied > 0 else []
        notes += [f"{name}: {lost:,.0f} {plural(lost, 'comparison')} without a finite score."] if lost > 0 else []
    return with_intervals(
        caption=caption,
        header=[first, *columns, "comparisons"],
        rows=[
            [
                name,
                *(
                    shown(estimate, digits=digits_in(name, estimate, least=least[column]))
                    for column, estimate in ((column, own.get(COLUMNS[column])) for column in columns)
                ),
                _count(counts),
            ]
            for name, (own, counts) in parts.items()
        ],
        estimates=[own.get("eval_accuracy") for own, _ in parts.values()],
        label="accuracy",
        mark=0.5,
        notes=notes,
    )


def side_by_side(records: Sequence[Record], names: Sequence[str]) -> Section:
    """Return a table with one row for each run, from the evaluation by which it is judged."""
    parts, notes, told = {}, [], dict[str, str]()
    on_suites = [name for name, record in zip(names, records, strict=True) if record.judged is None and record.suites]
    for name, record in zip(names, records, strict=True):
        if name in on_suites:
            continue
        if record.judged is None:
            notes.append(f"{name}: holds no evaluation.")
            continue
        told[record.judged.name.replace("_", " ")] = what(record, record.judged.name)
        parts[f"{name} ({record.judged.name.replace('_', ' ')})"] = (
            record.judged.estimates["all"],
            record.judged.counts["all"],
        )
    blocks: list[Block] = []
    if parts:
        blocks.append(estimates_table(parts, caption="Each run by the evaluation that says most", first="run"))
    if len(told) > 1:
        means = "; ".join(f"{name}: {data}" for name, data in told.items())
        blocks.append(Paragraph(text=f"The data are not of one kind. {means}.", tone="note"))
    blocks += [Paragraph(text=note, tone="warning") for note in notes]
    if on_suites:
        said = f"{', '.join(on_suites)}: judged on public test suites alone, whose scores are below."
        blocks.append(Paragraph(text=said, tone="note"))
    blocks.append(
        Paragraph(
            text="Whether two runs differ is not read off two intervals, but off their paired difference on the same "
            "rows; rewardlab compare says more about it.",
            tone="note",
        )
    )
    return Section(title="Side by side", blocks=tuple(blocks))


def signs_section(record: Record) -> Section:
    """Return the warning signs in words, and what to try."""
    if record.kind != "train":  # nothing else has steps that could be watched
        return Section(title="Warning signs", blocks=())
    if not record.signs:
        so_far = "" if record.finished else " so far"
        told = f"The run told no warning signs{so_far}." if record.rows else "No record of steps, so no warning signs."
        # A run that an error ended has told none either, so only one that came to its end is called good.
        good = record.rows and record.finished
        return Section(title="Warning signs", blocks=(Paragraph(text=told, tone="good" if good else "note"),))
    return Section(
        title="Warning signs",
        blocks=tuple(
            Paragraph(
                text=f"Step {sign.step:,}, {sign.name.replace('_', ' ')}: {sign.text} "
                f"{ADVICE.get(sign.name, sign.advice)}",
                tone="warning",
            )
            for sign in record.signs
        ),
    )


def data_section(record: Record) -> Section:
    """Return how many rows were read, kept and dropped, by source and by purpose."""
    data = record.manifest.get("data")
    parts = data if isinstance(data, dict) else {"evaluation": data}
    notes: list[Paragraph] = []
    sources = [
        (str(purpose), source)
        for purpose, several in parts.items()
        for source in (several if isinstance(several, list) else ())
        if isinstance(source, dict)
    ]
    blocks = _rows([(purpose, source) for purpose, source in sources if "rows_read" in source])
    blocks += _suites([source for _, source in sources if "suite" in source])
    blocks += _tokens(record.manifest.get("tokens"))
    shared = data.get("shared") if isinstance(data, dict) else None
    if isinstance(shared, dict):
        for pair, counts in shared.items():
            if isinstance(counts, dict) and any(isinstance(count, int) and count for count in counts.values()):
                notes.append(_shared(pair, {name: count for name, count in counts.items() if count}))
        if shared and not notes:
            there = {name for pair in shared for name in pair.replace("_", " ").split(" with ")}
            named = [name for name in ("training", "evaluation", "test") if name in there]
            listed = f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else "parts of the"
            blocks.append(Paragraph(text=f"The {listed} data share no prompt and no reply."))
    blocks += notes
    if not blocks:
        blocks.append(Paragraph(text="The manifest says nothing about the data.", tone="note"))
    return Section(title="Data", blocks=tuple(blocks))


def _rows(sources: Sequence[tuple[str, Mapping[str, object]]]) -> list[Block]:
    """Return a table of the rows of (purpose, report on a source); nothing of no sources."""
    if not sources:
        return []
    causes = {"dropped, by cause": "dropped"}
    if any(source.get("left_out_replies") for _, source in sources):
        causes["replies left out of kept rows"] = "left_out_replies"
    rows = [
        (
            purpose,
            f"{source.get('name')} [{source.get('split')}]",
            count_of(source.get("rows_read")),
            count_of(source.get("kept")),
            *(_by_cause(source.get(key)) for key in causes.values()),
            count_of(source.get("unused_by_limit")),
        )
        for purpose, source in sources
    ]
    header = ("used for", "data", "rows read", "kept", *causes, "left out by a limit")
    return [Table(caption="Rows", header=header, rows=tuple(rows))]


def _suites(suites: Sequence[Mapping[str, object]]) -> list[Block]:
    """Return a table of what was read of public suites; nothing of no suites."""
    if not suites:
        return []
    rows = [
        (
            str(suite["suite"]),
            count_of(suite.get("items")),
            count_of(suite.get("repeated")),
            _by_cause(suite.get("left_out")),
            listed([str(name) for name in sources]) if isinstance(sources := suite.get("sources"), dict) else "—",
        )
        for suite in suites
    ]
    header = ("suite", "rows", "of these repeated", "left out by its rule", "read from")
    return [Table(caption="Rows of the suites", header=header, rows=tuple(rows))]


def _by_cause(counts: object) -> str:
    known = counts if isinstance(counts, dict) else {}
    return ", ".join(f"{cause} {count_of(count)}" for cause, count in known.items()) or "none"


def _shared(pair: str, counts: Mapping[str, int]) -> Paragraph:
    """Return what one part of the data shares with another (`test_with_training`), each kind with its count."""
    one, _, other = pair.replace("_", " ").partition(" with ")
    kinds = [
        f"{count_of(count)} {plural(count, SHARED[name]) if name in SHARED else name.replace('_', ' ')}"
        for name, count in counts.items()
    ]
    *most, last = kinds
    found = f"{', '.join(most)} and {last}" if most else last
    means = " Phrases are replies that are short or stand in many conversations." if "phrases" in counts else ""
    text = f"The {one} data share {found} with the {other} data.{means}"
    return Paragraph(text=text, tone="note" if set(counts) == {"phrases"} else "warning")


def _tokens(tokens: object) -> list[Block]:
    if not isinstance(tokens, dict):
        return []
    named = tokens if any(isinstance(part, dict) and "replies" in part for part in tokens.values()) else {"all": tokens}
    parts = [part for part in named.values() if isinstance(part, dict)]
    columns = {
        "preferences": "kept",
        "replies": "replies",
        "prompts cut": "truncated_replies",
        **({"replies cut": "shortened_replies"} if any(part.get("shortened_replies") for part in parts) else {}),
        "replies lost": "lost_replies",
        "tokens": "tokens",
        "longest (tokens)": "longest",
    }
    if not any(key in part for part in parts for key in columns.values()):
        return []
    rows = [
        (str(name), *(count_of(part.get(key)) for key in columns.values()))
        for name, part in named.items()
        if isinstance(part, dict)
    ]
    return [Table(caption="Tokens", header=("data", *columns), rows=tuple(rows))] if rows else []


def problems_section(record: Record, more: Iterable[str] = ()) -> Section:
    """Return what is missing or damaged; an empty section if nothing is."""
    problems = (*record.problems, *more)
    return Section(
        title="What is missing", blocks=tuple(Paragraph(text=problem, tone="warning") for problem in problems)
    )


def duration(seconds: float) -> str:
    """Return seconds in words: ``2 h 5 min``, ``3 min 20 s``, ``12 s``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{seconds:.1f} s"


def pairs_of(judged: Judged) -> str:
    """Return the number of comparisons of an evaluation."""
    return _count(judged.counts["all"])


def _count(counts: Mapping[str, float]) -> str:
    number = counts.get("comparisons", math.nan)
    return format_count(round(number)) if math.isfinite(number) else "—"


def _decided(accuracy: Estimate, counts: Mapping[str, float]) -> str:
    """Return the number of comparisons that an accuracy is of, which are not label ties, and that of their prompts.

    An estimate counts prompts if these repeat.
    """
    decided = counts.get("decided", counts.get("comparisons", math.nan))
    if accuracy.n == decided == 1:
        return "1 comparison"
    prompts = "as many prompts" if accuracy.n == decided else number_of(accuracy.n, "prompt")
    return f"{_count({'comparisons': decided})} {plural(decided, 'comparison')} of {prompts}"
