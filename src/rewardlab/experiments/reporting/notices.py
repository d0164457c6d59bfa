"""What must be known before any number of a report is read: what is not done, and what was changed."""

from __future__ import annotations

from collections import Counter

from rewardlab.experiments.reporting.history import STATES, Progress, by_arm
from rewardlab.experiments.reporting.summary import Summary


def notices(summary: Summary) -> list[str]:
    """Return the notices that head every form of the report; none for a finished study without deviations."""
    found = [] if summary.progress.is_complete else [_unfinished(summary.progress)]
    if summary.arms.apart:
        said = "; ".join(summary.arms.apart)
        found.append(
            f"DIFFERENT TEST DATA: arms were judged on different rows, so what differs may be the rows. {said}."
        )
    if summary.arms.shared:
        found.append(
            f"TEST DATA THAT WERE SEEN: numbers on them flatter the models. They share prompts, first turns or replies "
            f"with {' and with '.join(summary.arms.shared)}."
        )
    found += [f"AMENDED PLAN: {one.text}" for one in summary.amendments]
    later = [f"{one.verdict.name}: {one.changed}" for one in summary.hypotheses if one.change]
    if later := [*later, *(f"{name}: taken out" for name in summary.removed)]:
        said = "; ".join(later)
        found.append(f"CLAIMS OF AFTERWARDS: what is chosen after results were seen tests no expectation. {said}.")
    others = [one for one in summary.deviations if one.kind != "amendment" and not one.kind.endswith(" runs")]
    if others:
        kinds = Counter(one.kind for one in others)
        said = ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
        found.append(f"DEVIATIONS from the frozen plan: {said}. They are listed below.")
    return found


def _unfinished(progress: Progress) -> str:
    counts = Counter(one.state for one in progress.unfinished)
    said = "".join(f"; {count} {STATES[state]}" for state, count in counts.items())
    failed = [one.run for one in progress.unfinished if one.state in ("failed", "damaged", "outdated")]
    why = f"To be mended: {'; '.join(by_arm(failed))}. The deviations say why." if failed else ""
    unknown = f"; {progress.unknown}" if progress.unknown else ""
    return (
        f"UNFINISHED: {progress.done} of {progress.total} runs are done{said}{unknown}. Verdicts are on what is done, "
        f"and may change. {why}"
    ).rstrip()
