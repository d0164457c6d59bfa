"""Formats a precision card as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from rewardlab.analysis.precision import CANONICAL, MEASURES, NEAREST, PrecisionCard
from rewardlab.core.terminal import plural
from rewardlab.report.tables import column_notes, format_estimate, report_width, text_table

WRITTEN: Final = {"bf16": "bfloat16", "fp16": "float16"}
"""Precision -> name of the dtype in which a folder is saved."""


def card_block(card: PrecisionCard) -> str:
    """Return the card of a saved model: what is compared, on which rows, a table of measures, and the methods of the
    intervals."""
    drawn = (
        f"{card.num_preferences} of {card.num_available} {plural(card.num_available, 'preference')}, drawn "
        f"with seed {card.seed}"
        if card.num_preferences < card.num_available
        else f"all {card.num_preferences} {plural(card.num_preferences, 'preference')}"
    )
    half = next(name for name in card.measures if name != CANONICAL)
    title = (
        f"Precision card: the saved model in {CANONICAL}, in {half} as rewardlab computes it, and with weights rounded "
        f"to the nearest {half}, as engines make them of {CANONICAL} folders ({drawn}):"
    )
    if NEAREST + half not in card.measures:
        title = f"Precision card: the saved model, whose weights are {half}, in {CANONICAL} and in {half} ({drawn}):"
    advice = (
        f"For an engine that computes in {half}, make a folder with `rewardlab export FOLDER --dtype {WRITTEN[half]}`."
    )
    said = [*map(str, card.verdicts()), *([advice] if NEAREST + half in card.off() else [])]
    return _block(title, card, said)


def verdict_block(card: PrecisionCard) -> str:
    """Return a line for each precision: whether the saved model may be served in it, and why."""
    lines = ["In which precision may it be served?", *map(str, card.verdicts())]
    return "\n".join(line for one in lines for line in textwrap.wrap(one, width=report_width()))


def live_block(card: PrecisionCard) -> str:
    """Return the card that compares the model as evaluated during training with its saved folder in float32."""
    (live,) = (name for name in card.measures if name != CANONICAL)
    title = (
        f"Live evaluation: the model as it was judged on the way ({live}), beside its folder in {CANONICAL} "
        f"(the {card.num_preferences} {plural(card.num_preferences, 'preference')} of the evaluation data):"
    )
    return _block(title, card, [])


def _block(title: str, card: PrecisionCard, said: Sequence[str]) -> str:
    """Return the title, a table of measures by precision, the lines of `said`, and notes."""
    rows = [
        [measure, *(format_estimate(own[measure]) if measure in own else "" for own in card.measures.values())]
        for measure in MEASURES
    ]
    notes = column_notes(
        {measure: [own[measure] for own in card.measures.values() if measure in own] for measure in MEASURES}
    )
    meanings = [f"{measure}: {MEASURES[measure]}" for measure in ("score spread", "margin error")]
    meanings += [
        f"{name}: {count} {plural(count, 'reply has', 'replies have')} no finite score in it, and "
        f"{plural(count, 'is', 'are')} left out of what is compared."
        for name, count in card.not_finite.items()
        if count
    ]
    foot = [line for note in [*said, *notes, *meanings] for line in textwrap.wrap(note, width=report_width())]
    return "\n".join([*textwrap.wrap(title, width=report_width()), text_table(["", *card.measures], rows), *foot])
