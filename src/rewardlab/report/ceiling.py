"""The noise ceiling in words: beside accuracies, and of a dataset."""

from __future__ import annotations

from collections.abc import Mapping

from rewardlab.analysis.ceiling import Ceiling
from rewardlab.analysis.metrics import Evaluation
from rewardlab.core.terminal import number_of
from rewardlab.core.types import Estimate
from rewardlab.report.tables import format_count, format_estimate


def ceiling_line(found: Ceiling) -> str:
    """Return a ceiling in a sentence: its value, its source, and its assumption."""
    what = "agreement with a single judge" if found.of_agreement else "accuracy against single labels"
    agree = "" if found.agreement is None else f", two of which agree in {format_estimate(found.agreement)}"
    return (
        f"Ceiling {format_estimate(found.accuracy)}: the {what} that a perfect model would reach, from {found.source} "
        f"(n = {format_count(found.accuracy.n)}, "
        f"{number_of(found.num_judgements, 'judgement')}{agree}). It assumes "
        f"that {found.assumption}."
    )


def ceiling_note(found: Ceiling, *, where: str = "") -> str:
    """Return a ceiling in a sentence for use beside accuracies, with a note if it does not bound these.

    `where` says where the agreement stands with which it is to be compared.
    """
    beside = ""
    if found.of_agreement:
        beside = " It is not a bound on accuracy, which counts as right the reply that most judges prefer."
    if found.of_agreement and not found.of_strengths:
        beside += f" Compare it with the agreement with these labels{where}."
    return f"{ceiling_line(found)}{beside}"


def ceiling_lines(evaluations: Mapping[str, Evaluation]) -> list[str]:
    """Return a line for each different ceiling of a table of evaluations; none if their data do not allow one.

    Accuracy is measured against the side that a soft label or a strength favours. A ceiling of agreement does not bound
    it, so such a line also has the agreement of each model.
    """
    named: dict[Ceiling, list[str]] = {}
    for name, evaluation in evaluations.items():
        if evaluation.ceiling is not None:
            named.setdefault(evaluation.ceiling, []).append(name)
    lines = []
    for ceiling, names in named.items():
        whom = "" if len(names) == len(evaluations) else f"{', '.join(names)}: "
        lines.append(f"{whom}{ceiling_line(ceiling)}{_agreements({name: evaluations[name] for name in names})}")
    return lines


def _agreements(evaluations: Mapping[str, Evaluation]) -> str:
    found: dict[str, Estimate] = {
        name: evaluation.agreement for name, evaluation in evaluations.items() if evaluation.agreement is not None
    }
    listed = ", ".join(f"{name} {format_estimate(own)}" for name, own in found.items())
    return f" Compare it with the agreement of each model, and not with accuracy: {listed}." if found else ""
