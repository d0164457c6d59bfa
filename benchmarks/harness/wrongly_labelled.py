"""Simulated judged pairs whose right labels are known, and witnesses with features that predict them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rewardlab.core.types import Comparison, Message, Preference
from rewardlab.curation.mislabels.crossfit import Witness
from rewardlab.curation.mislabels.pairs import Pairs, held_together, pairs_of
from rewardlab.curation.mislabels.ranking import Rule

RULE = Rule(below=0.3, agree=2, num_folds=5, seed=0)


def preference(
    number: int, *, prompt: str | None = None, replies: Sequence[str] = (), comparisons: Sequence[Comparison] = ()
) -> Preference:
    said = replies or (f"the first reply to number {number}", f"another reply to number {number}")
    return Preference(
        id=f"pairs.jsonl:{number + 1}",
        source="pairs",
        prompt=(Message("user", prompt or f"question number {number}"),),
        replies=tuple((Message("assistant", reply),) for reply in said),
        comparisons=tuple(comparisons) or (Comparison(first=0, second=1),),
    )


def simulated(
    count: int, *, width: int = 20, noise: float = 0.5, wrong: float = 0.0, seed: int = 0
) -> tuple[Pairs, list[Witness], np.ndarray]:
    """(pairs, two heads that see most of the features each, [N] which labels are wrong).

    `noise` is the scale of what people disagree about; `wrong` the share of labels that are turned round besides.
    """
    draw = np.random.default_rng(seed)
    preferences = [preference(number) for number in range(count)]
    pairs = pairs_of(preferences, held_together(preferences, None)[0], seed=seed)
    truth = np.random.default_rng(99).normal(size=width)
    features = draw.normal(size=(count, width))
    score = features @ truth + noise * draw.logistic(size=count)
    # The label prefers the side that scores higher; features are those of `first` minus those of `second`.
    features *= (np.where(score > 0, 1.0, -1.0) * pairs.sign_N)[:, None]
    mistaken = draw.random(count) < wrong
    third = width // 4
    heads = [
        Witness(name="layer 1", differences_NF=features[:, :-third]),
        Witness(name="layer 2", differences_NF=features[:, third:]),
    ]
    return pairs.turned_round(mistaken), heads, mistaken
