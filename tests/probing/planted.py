"""States whose preferences follow a known head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from common import make_groups
from rewardlab.core.types import Comparison


def planted(count: int, *, width: int = 12, seed: int = 0, noise: float = 0.5, replies: int = 2):
    """(groups, states) whose preferences follow a known head."""
    draw = np.random.default_rng(seed)
    truth = np.random.default_rng(99).normal(size=width)
    groups = make_groups(count, seed=seed, replies=replies)
    states = draw.normal(size=(sum(group.num_replies for group in groups), width)) + 30.0
    scores = states @ truth + draw.gumbel(size=len(states)) * noise
    made, row = [], 0
    for group in groups:
        own = scores[row : row + group.num_replies]
        made.append(
            replace(
                group,
                comparisons=tuple(
                    Comparison(first=c.first, second=c.second, label=float(own[c.first] > own[c.second]))
                    for c in group.comparisons
                ),
            )
        )
        row += group.num_replies
    return made, states, truth
