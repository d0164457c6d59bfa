"""The checklist after a run, answered with numbers.

The questions are those of the guidelines for reward models on human preferences: are there a model and a record, is the
model better than the baselines, did it overfit, can its probabilities be trusted, does it depend on length, were
prompts cut, are sides swapped, and were the controls run. An answer is `yes` or `no` only if intervals decide it.
Otherwise it is `look`, or `not known` if the folder does not say. Where the data that judge a run chose its checkpoint,
the limits are those for all evaluations of which it is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any, Final, Literal

from rewardlab.analysis.judgement import Judgement
from rewardlab.analysis.lengths import FEWEST_A_SIDE
from rewardlab.core.controls import notice_of
from rewardlab.core.terminal import number_of, plural
from rewardlab.core.types import Estimate
from rewardlab.report.document import Check, Checklist, Section, shown
from rewardlab.report.extras import control_name, controls_of
from rewardlab.report.folder import Record
from rewardlab.report.overlap import overlap_of
from rewardlab.report.paired import AgainstBaselines, said_of
from rewardlab.report.run import BASELINES
from rewardlab.report.sections import compared, what

Answer = Literal["yes", "no", "look", "not known"]
NOTHING = "The folder does not say."
TITLE = "Checklist after the run"
LENGTH_TELLS: Final = (
    f"Too few comparisons to tell: length is taken away where {FEWEST_A_SIDE} prompts prefer the longer reply and "
    f"{FEWEST_A_SIDE} the shorter one, at differences of about the same size."
)
LENGTH_POINTS: Final = 0.01
"""A loss of accuracy with length taken away that is smaller than this asks for no look, however sure it is."""
LENGTH_ODDS: Final = 0.1
"""The same of the log odds that scores overrate a standard deviation of length by: 2.5 points of probability at most.

Of very many comparisons intervals exclude any true value but 0 exactly, and no model has that."""
OVERRATES: Final = " The scores overrate longer replies: log odds to add for a standard deviation more length"
NEAR_PEAK: Final = 0.03
"""An accuracy at most this far below the highest one of the run still counts as equal to it."""
WANTED: Final = frozenset({"label_shuffle", "prompt_only", "random_negatives", "length_matched"})
"""Controls that should be run for every model."""
SLOPES: Final = (0.8, 1.25)
"""Calibration slopes with which probabilities can be trusted: log odds are wrong by at most a quarter. An interval
inside is a yes, one outside a no. That an interval contains 1 is not enough, since it may be very wide."""


def checklist_section(record: Record, judgement: Judgement | None, against: AgainstBaselines | None = None) -> Section:
    """Return every question with its answer. `against` is the model against its baselines on the same pairs."""
    questions: list[Callable[[], Check]] = [lambda: _collected(record)]
    if record.suites and not record.evaluations:
        # Suites are judged by rules of their own: there are no pairs of which the other questions could be answered.
        return Section(title=TITLE, blocks=(Checklist(checks=(_collected(record), _controls(record))),))
    if record.kind != "eval":
        questions.append(lambda: _model(record))
    questions += [
        lambda: _above_chance(record),
        lambda: _above_baselines(record, against),
        lambda: _independent(record),
        lambda: _swapped(record),
    ]
    if record.kind == "train":
        questions += [lambda: _overfitted(record), lambda: _signs(record)]
    questions += [
        lambda: _calibrated(judgement),
        lambda: _length(judgement),
        lambda: _cut(record, judgement),
        lambda: _dropped(record),
        lambda: _enough(record),
        lambda: _controls(record),
    ]
    return Section(title=TITLE, blocks=(Checklist(checks=tuple(ask() for ask in questions)),))


def _collected(record: Record) -> Check:
    rows = f"{number_of(len(record.rows), 'row')} of metrics, " if record.kind == "train" else ""
    what = "suite" if record.suites and not record.evaluations else "evaluation"
    return Check(
        question="Did it come to its end, with its record complete?",
        answer="look" if record.finished and record.problems else "yes" if record.finished else "no",
        numbers=f"{rows}{number_of(len(record.evaluations) or len(record.suites), what)}, "
        f"{number_of(len(record.problems), 'file')} missing or damaged.",
    )


def _model(record: Record) -> Check:
    if record.model_folder is None:
        return Check(question="Is there a model?", answer="no", numbers="Neither best/ nor step_N/ holds one.")
    step = record.model.provenance.get("step") if record.model is not None else None
    of = f" of step {step}" if isinstance(step, int) else ""
    return Check(
        question="Is there a model?",
        answer="yes" if record.model is not None else "look",
        numbers=f"{record.model_folder.name}/{of}. rewardlab verify proves that it gives its scores.",
    )


def _above_chance(record: Record) -> Check:
    question = "Is it better than a coin?"
    accuracy = _metric(record, "eval_accuracy")
    if accuracy is None:
        return Check(question=question, answer="not known", numbers=NOTHING)
    assert record.judged is not None
    return Check(
        question=question,
        answer=_decided(_after_looks(accuracy, record), above=0.5),
        numbers=f"Accuracy {shown(accuracy)} on {what(record, record.judged.name)}{_of_looks(record)}.",
    )


def _above_baselines(record: Record, against: AgainstBaselines | None) -> Check:
    question = "Is it better than length alone and a bag of words?"
    accuracy = _metric(record, "eval_accuracy")
    if accuracy is None or record.judged is None:
        return Check(question=question, answer="not known", numbers=NOTHING)
    rivals = {
        name: judged.estimates["all"]["eval_accuracy"]
        for name, judged in compared(record, record.judged.name).items()
        if name in BASELINES and "eval_accuracy" in judged.estimates["all"]
    }
    if not rivals:
        return Check(
            question=question,
            answer="not known",
            numbers="No baselines beside this evaluation; rewardlab train and probe fit them (--baselines).",
        )
    said = ", ".join(f"{name} {shown(estimate)}" for name, estimate in rivals.items())
    if against is not None and against.pairs.keys() == rivals.keys():
        # The model must be better than every baseline: so no correction for their number is needed.
        is_better = all(_after_looks(one, record).low > 0 for one in against.differences.values())
        return Check(
            question=question,
            answer="yes" if is_better else "no" if against.is_worse else "look",
            numbers=f"{shown(accuracy)}{_of_looks(record)} against {said}. {said_of(against)}",
        )
    # Without rows that can be paired, the intervals decide only where they are apart.
    answer: Answer = "look"
    if all(_after_looks(accuracy, record).low > rival.high for rival in rivals.values()):
        answer = "yes"
    elif any(accuracy.high < rival.low for rival in rivals.values()):
        answer = "no"
    return Check(
        question=question,
        answer=answer,
        numbers=f"{shown(accuracy)} against {said}. The rows could not be paired"
        f"{f': {against.problem}' if against is not None and against.problem else '.'}",
    )


def _without_test(record: Record) -> str:
    """Return why there are no numbers of test data."""
    if any(record.config.get(name) for name in ("test_dataset", "test_split")):
        return "The test data, which are judged last, have no numbers yet"
    return "There are no test data"


def _independent(record: Record) -> Check:
    question = "Were the numbers made on data that chose nothing?"
    if record.judged is None:
        return Check(question=question, answer="not known", numbers=NOTHING)
    trained, chose = (overlap_of(record.shared, other) for other in ("training", "evaluation"))
    if record.kind == "eval":
        return Check(
            question=question, answer="look", numbers="The data were named by hand; see that no training read them."
        )
    if record.judged.name != "test":
        return Check(
            question=question,
            answer="no",
            numbers=f"{_without_test(record)}; the numbers are of {what(record, record.judged.name)}.",
        )
    if trained.prompts is None:
        return Check(
            question=question,
            answer="no" if chose.prompts else "not known",
            numbers=f"{chose.words[0].upper()}{chose.words[1:]}; whether training read them the folder does not say.",
        )
    count, alike = trained.prompts, max(trained.rows, chose.rows)
    too = f", {chose.prompts:,} in the data that chose the checkpoint" if chose.prompts else ""
    return Check(
        question=question,
        answer="no" if count or chose.prompts else "look" if alike else "yes",
        numbers=f"Test data, {count:,} of their prompts also in the training data{too}"
        + (f"; {number_of(alike, 'row')} with a prompt, a first turn or a reply of theirs." if alike else "."),
    )


def _swapped(record: Record) -> Check:
    question = "Do evaluation and training data mean the same reply by “chosen”?"
    accuracy = _metric(record, "eval_accuracy")
    if accuracy is None:
        return Check(question=question, answer="not known", numbers=NOTHING)
    decided = _after_looks(accuracy, record)
    below = math.isfinite(decided.high) and decided.high < 0.5
    return Check(
        question=question,
        answer="no" if below else "yes" if decided.low > 0.5 else "look",
        numbers=f"Accuracy {shown(accuracy)}; swapped sides would put it below one half.",
    )


def _overfitted(record: Record) -> Check:
    question = "Did it stay at its best, within 3 points of the peak?"
    course = [
        (row["step"], row["eval_accuracy"], row.get("eval_accuracy_low", math.nan))
        for row in record.rows
        if "eval_accuracy" in row
    ]
    if len(course) < 2:
        return Check(question=question, answer="not known", numbers="Fewer than two evaluations on the way.")
    peak_step, peak, _ = max(course, key=lambda point: point[1])
    last_step, last, last_low = course[-1]
    told = any(sign.name == "overfitting" for sign in record.signs)
    return Check(
        question=question,
        answer="no" if told else "yes" if last_low >= peak - NEAR_PEAK else "look",
        numbers=f"Highest evaluation accuracy {peak:.3f} at step {peak_step:,.0f}"
        + (", the last" if last_step == peak_step else f", {last:.3f} at step {last_step:,.0f}, the last")
        + (f", which is at least {last_low:.3f}" if math.isfinite(last_low) else "")
        + (", and overfitting was told as a warning sign." if told else ". The highest of several flatters itself."),
    )


def _signs(record: Record) -> Check:
    names = ", ".join(dict.fromkeys(sign.name.replace("_", " ") for sign in record.signs))
    so_far = "" if record.finished else " so far"
    return Check(
        question="Was it free of warning signs?",
        answer="no" if record.signs else "yes" if record.rows and record.finished else "not known",
        numbers=f"{len(record.signs)} told: {names}." if record.signs else f"None told{so_far}.",
    )


def _calibrated(judgement: Judgement | None) -> Check:
    question = "Can its probabilities be believed?"
    if judgement is None:
        return Check(question=question, answer="not known", numbers=NOTHING)
    slope, ece = judgement.estimates.get("eval_calibration_slope"), judgement.estimates.get("eval_ece")
    if slope is None or not math.isfinite(slope.low):
        why = "." if slope is None else f": {slope.method}."
        return Check(question=question, answer="not known", numbers=f"No interval of a calibration slope{why}")
    least, most = SLOPES
    sure = ": it is too sure" if slope.high < 1 else ": it is not sure enough" if slope.low > 1 else ""
    answer: Answer = "look"
    if least <= slope.low and slope.high <= most:
        answer = "yes"
    elif slope.high < least or slope.low > most:
        answer = "no"
    return Check(
        question=question,
        answer=answer,
        numbers=f"Calibration slope {shown(slope)}, 1 at best, {least:g} to {most:g} near enough{sure}; "
        f"expected calibration error {shown(ece)}.",
    )


def _length(judgement: Judgement | None) -> Check:
    question = "Is it as good where length does not tell?"
    if judgement is None:
        return Check(question=question, answer="not known", numbers=NOTHING)
    own, plain = (judgement.estimates.get(name) for name in ("eval_accuracy_length_controlled", "eval_accuracy"))
    if own is None or plain is None or not math.isfinite(own.value):
        return Check(question=question, answer="not known", numbers=LENGTH_TELLS)
    correlation = judgement.estimates.get("eval_score_length_spearman")
    # Of data whose labels do not follow length, the two accuracies are equal for a model that goes by length too.
    left = judgement.estimates.get("eval_length_coefficient")
    overrates = left is not None and left.high < 0 and left.value <= -LENGTH_ODDS
    falls = own.high < plain.value and own.value <= plain.value - LENGTH_POINTS
    answer = _decided(own, above=0.5)
    return Check(
        question=question,
        answer="look" if answer == "yes" and (falls or overrates) else answer,
        numbers=f"Accuracy {shown(own)} with length taken away, {shown(plain)} with it; rank correlation of reward and "
        f"length {shown(correlation)}." + (f"{OVERRATES} {shown(left)}." if overrates else ""),
    )


def _cut(record: Record, judgement: Judgement | None) -> Check:
    question = "Did the model read whole prompts?"
    named = _tokens(record)
    counts = {
        name: (part["truncated_replies"], part["replies"])
        for name, part in named.items()
        if isinstance(part.get("truncated_replies"), int) and isinstance(part.get("replies"), int)
    }
    if not counts and judgement is not None:
        counts = {"judged": (judgement.counts.truncated_replies, judgement.counts.replies)}
    if not counts:
        return Check(question=question, answer="not known", numbers=NOTHING)
    said = [f"Replies whose prompt was cut: {_shares(counts)}."]
    # There are numbers only if the model was trained by the rule that cuts replies.
    shortened = {
        name: (part["shortened_replies"], part["replies"])
        for name, part in named.items()
        if name in counts and isinstance(number := part.get("shortened_replies"), int) and number
    }
    if shortened:
        said.append(f"Replies that lost their middle: {_shares(shortened)}.")
    return Check(
        question=question,
        answer="look" if shortened or any(part for part, _ in counts.values()) else "yes",
        numbers=" ".join(said),
    )


def _tokens(record: Record) -> dict[str, Mapping[str, Any]]:
    """Return what tokenising did to each part of the data, as the manifest has it."""
    tokens = record.manifest.get("tokens")
    parts = tokens if isinstance(tokens, dict) else {}
    # That of an evaluation has no parts, but mappings of causes.
    if isinstance(parts.get("replies"), int):
        return {"all": parts}
    return {str(name): part for name, part in parts.items() if isinstance(part, dict)}


def _shares(counts: Mapping[str, tuple[int, int]]) -> str:
    return "; ".join(f"{name} {part:,} of {of:,}" for name, (part, of) in counts.items())


def _dropped(record: Record) -> Check:
    question = "Were nearly all rows used (95% at least)?"
    data = record.manifest.get("data")
    lists = data.values() if isinstance(data, dict) else [data]
    reports = [one for some in lists if isinstance(some, list) for one in some if isinstance(one, dict)]
    read = sum(one["rows_read"] for one in reports if isinstance(one.get("rows_read"), int))
    kept = sum(one["kept"] for one in reports if isinstance(one.get("kept"), int))
    if not read:
        return Check(question=question, answer="not known", numbers=NOTHING)
    # Rows that could be read may still be left out for their tokens, such as those above the limit of length.
    preferences = {
        name: (part["preferences"] - part["kept"], part["preferences"])
        for name, part in _tokens(record).items()
        if isinstance(part.get("preferences"), int) and isinstance(part.get("kept"), int)
    }
    lost = {name: counts for name, counts in preferences.items() if counts[0]}
    nearly_all = kept >= 0.95 * read and all(count <= 0.05 * of for count, of in lost.values())
    return Check(
        question=question,
        answer="yes" if nearly_all else "look",
        numbers=f"{kept:,} of {number_of(read, 'row')} {plural(read, 'was', 'were')} usable."
        + (f" Preferences left out for their tokens: {_shares(lost)}." if lost else ""),
    )


def _enough(record: Record) -> Check:
    question = "Were there a thousand comparisons or more to judge by?"
    counts = {} if record.judged is None else record.judged.counts["all"]
    number = counts.get("comparisons", math.nan) - counts.get("non_finite", 0)
    accuracy = _metric(record, "eval_accuracy")
    if not math.isfinite(number) or accuracy is None:
        return Check(question=question, answer="not known", numbers=NOTHING)
    wide = (accuracy.high - accuracy.low) / 2
    known = f"; accuracy is known to ± {100 * wide:.1f} points" if math.isfinite(wide) else ""
    return Check(
        question=question,
        answer="yes" if number >= 1000 else "look",
        numbers=f"{number:,.0f} {plural(number, 'comparison')}{known}.",
    )


def _controls(record: Record) -> Check:
    question = "Were the controls run (shuffled labels, prompts alone, replies of other prompts, equal lengths)?"
    if (notice := notice_of(record.control)) is not None:
        return Check(question=question, answer="not known", numbers=f"{notice}; controls are run of models to use.")
    found = controls_of(record)
    if not found:
        where = "No results of controls in this folder; rewardlab diagnose makes them, --controls names them."
        return Check(question=question, answer="not known", numbers=where)
    passed = all(control.get("verdict") == "pass" for control in found)
    complete = {str(control.get("control")) for control in found} >= WANTED
    said = "; ".join(f"{control_name(control)}: {control.get('verdict')}" for control in found)
    return Check(
        question=question,
        answer="yes" if passed and complete else "look",
        numbers=f"{record.controls.get('headline')} {said[0].upper()}{said[1:]}.",
    )


def _metric(record: Record, metric: str) -> Estimate | None:
    return None if record.judged is None else record.judged.estimates["all"].get(metric)


def _looks(record: Record) -> int:
    """Return how many checkpoints the data that judge a run have judged, if they chose one; else 1."""
    if record.kind != "train" or record.judged is None or record.judged.name == "test":
        return 1
    return max(1, sum("eval_accuracy" in row for row in record.rows))


def _of_looks(record: Record) -> str:
    return f" (one of {looks:,} evaluations, for which the answer allows)" if (looks := _looks(record)) > 1 else ""


def _after_looks(estimate: Estimate, record: Record) -> Estimate:
    """Return an estimate with limits that hold for all evaluations of which the run chose one (Bonferroni)."""
    normal, outside = NormalDist(), (1 - estimate.level) / 2
    stretch = normal.inv_cdf(1 - outside / _looks(record)) / normal.inv_cdf(1 - outside)
    low, high = (estimate.value + stretch * (limit - estimate.value) for limit in (estimate.low, estimate.high))
    return replace(estimate, low=low, high=high)


def _decided(estimate: Estimate, *, above: float) -> Answer:
    """Return whether an estimate is above a value; `look` if its interval contains the value or is missing."""
    if not math.isfinite(estimate.low):
        return "look"
    return "yes" if estimate.low > above else "no" if estimate.high <= above else "look"
