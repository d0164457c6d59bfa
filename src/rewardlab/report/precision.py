"""The precision card as text."""

from __future__ import annotations

import textwrap

from rewardlab.analysis.precision import CANONICAL, MEASURES, PrecisionCard
from rewardlab.report.tables import column_notes, format_estimate, text_table


def card_block(card: PrecisionCard) -> str:
    """What is compared and on which rows, a table of measures by precision, and how the intervals were made."""
    drawn = (
        f"{card.num_preferences} of {card.num_available} preferences, drawn with seed {card.seed}"
        if card.num_preferences < card.num_available
        else f"all {card.num_preferences} preferences"
    )
    half = next(name for name in card.measures if name != CANONICAL)
    title = (
        f"Precision card: the saved model in {CANONICAL}, in {half} as rewardlab computes it, and with weights rounded "
        f"to the nearest {half}, as engines make them of {CANONICAL} folders ({drawn}):"
    )
    if f"nearest {half}" not in card.measures:
        title = f"Precision card: the saved model, whose weights are {half}, in {CANONICAL} and in {half} ({drawn}):"
    rows = [
        [measure, *(format_estimate(found[measure]) if measure in found else "" for found in card.measures.values())]
        for measure in MEASURES
    ]
    notes = column_notes(
        {measure: [found[measure] for found in card.measures.values() if measure in found] for measure in MEASURES}
    )
    meanings = [f"{measure}: {MEASURES[measure]}" for measure in ("score spread", "margin error")]
    foot = [line for note in [*notes, *meanings] for line in textwrap.wrap(note, width=100)]
    return "\n".join([*textwrap.wrap(title, width=100), text_table(["", *card.measures], rows), *foot])
