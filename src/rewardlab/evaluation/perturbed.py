"""Scores the same preferences with texts changed in ways that should not matter, and compares the scores."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from rewardlab.analysis.json_form import encode
from rewardlab.analysis.multiple import holm
from rewardlab.analysis.robustness import Effect, effect_of
from rewardlab.core.errors import DataError
from rewardlab.core.files import finite_or_none, write_json
from rewardlab.core.spec import LEAVE_OUT, STOP
from rewardlab.core.types import Preference, ScoreRow, TokenGroup
from rewardlab.data.originals import Key, Original
from rewardlab.data.perturb import PERTURBATIONS, Perturbation, perturb
from rewardlab.data.token_report import tokenize
from rewardlab.evaluation.saved import SavedModel

logger = logging.getLogger("rewardlab")
PERTURBED_FILE: Final = "eval.perturbed.json"
MOST: Final = 500
"""Most preferences that are perturbed, drawn with the seed. With this many, a flip rate is known to within 4 points."""


@dataclass(frozen=True, kw_only=True)
class Robustness:
    """The effects of all perturbations on a model."""

    effects: Mapping[str, Effect]
    p_shift: Mapping[str, float]
    p_accuracy: Mapping[str, float]
    """Perturbation -> p value. Both kinds of p values are corrected (Holm) as one family, since a perturbation counts
    as having an effect if either is small."""
    num_preferences: int
    num_available: int
    seed: int

    def as_dict(self) -> dict[str, object]:
        """Return everything as JSON, NaN as null."""
        return {
            "preferences": self.num_preferences,
            "available": self.num_available,
            "seed": self.seed,
            "perturbations": {
                name: {
                    "meaning": PERTURBATIONS[name].meaning,
                    "estimates": encode(effect.estimates),
                    "p_shift": finite_or_none(effect.p_shift),
                    "p_shift_holm": finite_or_none(self.p_shift[name]),
                    "p_accuracy": finite_or_none(effect.p_accuracy),
                    "p_accuracy_holm": finite_or_none(self.p_accuracy[name]),
                    "preferences": effect.num_preferences,
                    "replies": effect.num_replies,
                    "not_applicable": effect.not_applicable,
                    "lost": effect.lost,
                }
                for name, effect in self.effects.items()
            },
        }


def drawn(groups: Sequence[TokenGroup], *, seed: int) -> set[Key]:
    """Return source and id of the preferences that are perturbed."""
    chosen = np.random.default_rng(seed).permutation(len(groups))[:MOST]
    return {(group.source, group.preference_id) for group in (groups[int(number)] for number in chosen)}


def judge_perturbations(
    model: SavedModel, rows: Sequence[ScoreRow], originals: Iterable[Original], *, num_available: int, seed: int
) -> Robustness:
    """Perturb the `originals`, score them, and compare them with `rows`, the scores of all unperturbed replies."""
    preferences = [original.preference for original in originals]
    num_rows: dict[Key, int] = {}
    for row in rows:
        num_rows[row.source, row.preference_id] = num_rows.get((row.source, row.preference_id), 0) + 1
    # Replies above the length limit have no rows, so not all that is judged of such preferences can be compared.
    whole = [one for one in preferences if num_rows.get((one.source, one.id)) == len(one.replies)]
    effects = {
        name: _effect(name, perturbation, model, rows, whole, cut=len(preferences) - len(whole), seed=seed)
        for name, perturbation in PERTURBATIONS.items()
    }
    p_shift, p_accuracy = corrected(effects)
    return Robustness(
        effects=effects,
        p_shift=p_shift,
        p_accuracy=p_accuracy,
        num_preferences=len(preferences),
        num_available=num_available,
        seed=seed,
    )


def corrected(effects: Mapping[str, Effect]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the p values of shifts and of accuracies, corrected by Holm as one family; NaN where missing."""
    found = holm([p for effect in effects.values() for p in (effect.p_shift, effect.p_accuracy)])
    return dict(zip(effects, found[::2], strict=True)), dict(zip(effects, found[1::2], strict=True))


def _effect(
    name: str,
    perturbation: Perturbation,
    model: SavedModel,
    rows: Sequence[ScoreRow],
    preferences: Sequence[Preference],
    *,
    cut: int,
    seed: int,
) -> Effect:
    found = [one for preference in preferences if (one := perturb(preference, perturbation, seed=seed)) is not None]
    groups: list[TokenGroup] = []
    # A text that a perturbation makes too long is not a row of the user's data: leave it out even if the model's rule
    # is to stop at rows that are too long.
    renderer = model.renderer.by(truncation=LEAVE_OUT) if model.renderer.spec.truncation == STOP else model.renderer
    if found:
        try:
            groups, _ = tokenize(
                [one.preference for one in found],
                renderer,
                max_drop_fraction=1.0,
                name=name,
                own_limit=True,
                # Where a change makes two replies equal, their order is lost, which is a change of the verdict.
                keep_identical=True,
            )
        except DataError as error:
            logger.warning("perturbation %r: nothing can be scored (%s)", name, error)
    sizes = {(one.preference.source, one.preference.id): len(one.preference.replies) for one in found}
    kept = [group for group in groups if sizes[group.source, group.preference_id] == group.num_replies]
    scored = {(group.source, group.preference_id) for group in kept}
    changed = {
        (one.preference.source, one.preference.id, number)
        for one in found
        for number in one.changed
        if (one.preference.source, one.preference.id) in scored
    }
    return effect_of(
        rows,
        model.score(kept, progress=f"scoring ({name})") if kept else [],
        changed,
        not_applicable=len(preferences) - len(found),
        lost=cut + len(found) - len(kept),
        of_prompt=perturbation.of == "prompt",
        seed=seed,
    )


def write_robustness(folder: Path, robustness: Robustness) -> None:
    """Write `eval.perturbed.json`."""
    write_json(folder / PERTURBED_FILE, robustness.as_dict())
