"""The table of the effects of changed texts on a model's scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from rewardlab.analysis.robustness import MEASURES, Effect
from rewardlab.core.terminal import plural
from rewardlab.report.tables import column_notes, format_count, format_estimate, text_table, wrapped

LEVEL = 0.05
MOVES = (
    "moves: what changes beyond chance, by sign flips of prompts, for the score by the interval of its mean too, "
    "corrected for all tests of all rows (Holm, 5 %)."
)


@runtime_checkable
class Moved(Protocol):
    """Effects by perturbation, such as evaluation.perturbed.Robustness."""

    @property
    def effects(self) -> Mapping[str, Effect]:
        """Perturbation -> its effect."""

    @property
    def p_shift(self) -> Mapping[str, float]:
        """Perturbation -> corrected p value for no mean change of the score."""

    @property
    def p_accuracy(self) -> Mapping[str, float]:
        """Perturbation -> corrected p value for no change of the accuracy."""

    @property
    def num_preferences(self) -> int:
        """Number of preferences that were perturbed."""

    @property
    def num_available(self) -> int:
        """Number of preferences from which they were drawn."""

    @property
    def seed(self) -> int:
        """Seed of the draw and of the perturbations."""


def robustness_block(robustness: Moved) -> str:
    """Return title, table and notes."""
    drawn = (
        f"{robustness.num_preferences} of {robustness.num_available} "
        f"{plural(robustness.num_available, 'preference')}, seed {robustness.seed}"
    )
    title = f"Robustness: the same pairs with their texts changed in ways that should not matter ({drawn}):"
    rows = [
        [
            name,
            *(format_estimate(effect.estimates[measure]) for measure in MEASURES),
            moves(robustness.p_shift[name], robustness.p_accuracy[name]),
            format_count(effect.num_preferences),
        ]
        for name, effect in robustness.effects.items()
    ]
    columns = {measure: [effect.estimates[measure] for effect in robustness.effects.values()] for measure in MEASURES}
    notes = [
        *column_notes(columns),
        *(f"{measure}: {meaning}." for measure, meaning in MEASURES.items()),
        MOVES,
        *left_out_notes({name: (own.not_applicable, own.lost) for name, own in robustness.effects.items()}),
    ]
    table = text_table(["texts", *MEASURES, "moves", "prefs"], rows)
    return "\n".join([wrapped(title), table, *map(wrapped, notes)])


def left_out_notes(counts: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return a sentence for each perturbation that leaves some preferences out.

    `counts` maps it to those without anything to change, and those of which a changed reply has no score.
    """
    return [
        f"{name}: left out {', '.join(parts)}."
        for name, (not_applicable, lost) in counts.items()
        if (
            parts := [
                *([f"{format_count(not_applicable)} with nothing to change"] if not_applicable else []),
                *([f"{format_count(lost)} without a score for every reply"] if lost else []),
            ]
        )
    ]


def moves(p_shift: float, p_accuracy: float) -> str:
    """Return what changes beyond chance, with its corrected p value. A p value that was not computed is NaN."""
    if math.isnan(p_shift) and math.isnan(p_accuracy):
        return "too few"
    moved = {"score": p_shift, "accuracy": p_accuracy}
    found = [f"{what} ({_p(p)})" for what, p in moved.items() if p < LEVEL]  # NaN is not below
    return ", ".join(found) or "nothing"


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p {p:.3f}"
