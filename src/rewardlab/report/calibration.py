"""The text that `rewardlab calibrate` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewardlab.analysis.scaling import MEASURES, Scaling, ScalingJudgement
from rewardlab.core.terminal import plural
from rewardlab.core.types import Estimate
from rewardlab.report.tables import column_notes, format_estimate, text_table, wrapped

SHARES = {
    "reply": "no first turn and no reply but for phrases",
    "first_turn": "no first turn, but some replies",
    "prompt": "no prompt, but some first turns and replies",
}
"""Rule by which prompts were divided -> what the judging data then share with the fitted data."""
FITTED = {"temperature": "temperature", "reward_mean": "mean", "reward_std": "standard deviation"}
"""Fitted number -> its name in the text."""


def calibration_report(scaling: Scaling, judgement: ScalingJudgement, *, rule: str | None, shared_roots: int) -> str:
    """Return the text: the fitted maps, the data behind them, and tables of before and after on the judging data."""
    scale, shift = scaling.affine
    fitted = (
        f"Fitted on {scaling.num_comparisons:,} {plural(scaling.num_comparisons, 'comparison')}: "
        f"temperature {scaling.temperature:.4g}{_interval(scaling, 'temperature')}; affine "
        f"{scale:.4g} · score {'+' if shift >= 0 else '−'} {abs(shift):.4g} (scale and shift go "
        f"together, and are judged below). Raw scores there: mean "
        f"{scaling.reward_mean:.4g}{_interval(scaling, 'reward_mean')}, standard deviation "
        f"{scaling.reward_std:.4g}{_interval(scaling, 'reward_std')}."
    )
    notes = column_notes({FITTED[name]: [one] for name, one in scaling.estimates.items()})
    lines = []
    if scaling.at_edge:
        lines.append(
            "Every pair there is ranked as labelled, so the temperature is only the lowest that is tried, and is not "
            "stored."
        )
    division = "other data were named" if rule is None else f"it shares with what was fitted on {SHARES[rule]}"
    if shared_roots:
        division += f", and has rows of {shared_roots:,} conversations of it, which flatters the calibration"
    lost = f"; {judgement.num_non_finite} left out, whose scores are not finite" if judgement.num_non_finite else ""
    judged = (
        f"Judged on {judgement.num_comparisons:,} {plural(judgement.num_comparisons, 'comparison')} ({division}{lost})."
    )
    return "\n\n".join(
        [
            "\n".join(map(wrapped, [fitted, *notes])),
            *map(wrapped, [*lines, judged]),
            _table("pairs", judgement.pairs),
            wrapped("pairs: probability that the first of two replies is preferred, σ(β · difference / temperature)."),
            _table("replies", judgement.replies),
            wrapped(
                "replies: probability that a reply is a preferred one, σ(scale · score + shift); before, σ(score), "
                "what a server gives that puts a sigmoid on the score."
            ),
        ]
    )


def _interval(scaling: Scaling, name: str) -> str:
    """Return the interval of a fitted number, with a space before it; empty without one."""
    known = scaling.estimates.get(name)
    return "" if known is None or math.isnan(known.low) else f" [{known.low:.4g}, {known.high:.4g}]"


def _table(first: str, found: Mapping[str, Mapping[str, Estimate]]) -> str:
    rows = [
        [name, *(format_estimate(own[measure]) if measure in own else "" for measure in MEASURES)]
        for name, own in found.items()
    ]
    columns = {measure: [own[measure] for own in found.values() if measure in own] for measure in MEASURES}
    return "\n".join([text_table([first, *MEASURES], rows), *map(wrapped, column_notes(columns))])
