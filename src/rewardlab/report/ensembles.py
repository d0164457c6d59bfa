"""The text that `rewardlab eval --ensemble` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rewardlab.analysis.ensembles import COMBINATIONS, Disagreement
from rewardlab.core.terminal import number_of
from rewardlab.report.tables import column_notes, format_estimate, text_table, wrapped


def ensemble_block(
    found: Disagreement, *, members: Sequence[str], scaled_by: str, penalty: float, left_out: int
) -> str:
    """Return the text: the ensemble, and whether disagreement of its members predicts errors of their mean."""
    title = f"Ensemble of {', '.join(members)} (λ = {penalty:g}), each put on one scale by {scaled_by}."
    rows = [
        ["standard deviation of the margin over members", format_estimate(found.by_spread)],
        ["smallness of the mean margin", format_estimate(found.by_margin)],
    ]
    notes = [
        *column_notes({"AUROC": [found.by_spread, found.by_margin]}),
        f"AUROC: chance that a mistake of the mean ({found.num_errors}) has more of it than a right answer "
        f"({found.num_right}); 0.5 says nothing. The second needs no ensemble.",
        *(f"ensemble {how}: {meaning}." for how, meaning in COMBINATIONS.items()),
        *([left_out_note(left_out)] if left_out else []),
    ]
    table = text_table(["what predicts errors", "AUROC"], rows)
    return "\n".join([wrapped(title), table, *map(wrapped, notes)])


def left_out_note(left_out: int) -> str:
    """Return what is said of preferences that an ensemble does not judge."""
    return f"{number_of(left_out, 'preference')} left out, which not all members have scored alike."
