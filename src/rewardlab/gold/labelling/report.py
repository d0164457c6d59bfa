"""What `rewardlab gold label` prints."""

from __future__ import annotations

from rewardlab.core.terminal import number_of, plural
from rewardlab.gold.judging.config import JudgeConfig
from rewardlab.gold.judging.tally import text_report as judge_report
from rewardlab.gold.labelling.run import Labelled


def text_report(labelled: Labelled, judge: JudgeConfig) -> str:
    """Return what was written, and what is worth knowing about it."""
    counts, place = labelled.counts, labelled.place
    before = " (all of them before)" if labelled.was_complete else ""
    lines = [
        f"{number_of(counts['scored'], 'gold score')} of "
        f"{number_of(counts['rows'], 'prompt')}{before}: {place.rows} and {place.twin.name}"
    ]
    if labelled.tokens:
        lines.append(f"{labelled.tokens:,} tokens scored now, {labelled.tokens_per_s:,.0f} a second")
    if counts["cut"]:
        lines.append(
            f"{counts['cut']:,} {plural(counts['cut'], 'reply was', 'replies were')} scored after something "
            f"was cut (--max-length, --overlong)"
        )
    if counts["errors"]:
        lines.append(
            f"{counts['errors']:,} {plural(counts['errors'], 'reply has', 'replies have')} no score; "
            f"`gold_errors` says why, and the same command asks again:"
        )
        lines += [f"  {why}" for why in labelled.examples]
    if labelled.judge is not None:
        lines.append(judge_report(labelled.judge, judge))
    return "\n".join(lines)
