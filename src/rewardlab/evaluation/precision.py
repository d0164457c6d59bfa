"""A saved model in float32, in half precision as rewardlab computes it, and with weights rounded to the nearest.

The last is what an engine makes of a float32 folder that it is told to compute in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
import torch

from rewardlab.analysis.precision import CANONICAL, NEAREST, PrecisionCard, precision_card
from rewardlab.artifact.halves import computing_in, round_to_nearest
from rewardlab.artifact.save import live_scores
from rewardlab.core.errors import ModelError
from rewardlab.core.files import jsonable, write_json
from rewardlab.core.types import ScoreRow, TokenGroup
from rewardlab.data.chat import Renderer
from rewardlab.model.load import PRECISION
from rewardlab.model.reward import RewardModel
from rewardlab.score import ALONE, FloatArray, Scorer, Together, score_groups, score_rows

MOST: Final = 200
"""Preferences of a card: enough for a margin's error to within a tenth of itself (1.96 / √(2 · 200)), and two or three
short evaluations."""
CARD_FILE: Final = "precision.json"
LIVE_FILE: Final = "live.json"


def judge_precisions(
    scorer: Scorer,
    groups: Sequence[TokenGroup],
    *,
    save_dtype: str,
    precision: str,
    budget: int,
    seed: int,
    ranks: Together = ALONE,
    exact: Sequence[ScoreRow] | None = None,
) -> PrecisionCard:
    """Score a sample of the groups in float32 and twice in `precision`, `bf16` or `fp16`.

    `scorer` is a folder's model in float32, whole or in parts, whose weights are rounded in the end: its last use.
    `exact` are its rows for all groups, if they are known.
    """
    drawn = sorted(np.random.default_rng(seed).permutation(len(groups))[:MOST].tolist())
    sample = [groups[number] for number in drawn]
    model, dtype = scorer.model, PRECISION[precision]

    def scored(title: str) -> list[FloatArray]:
        return score_groups(model, sample, budget=budget, progress=f"judging in {title}", ranks=ranks)

    if exact is None:
        scores = {CANONICAL: scored(CANONICAL)}
    else:
        ends = np.cumsum([group.num_replies for group in groups])
        by_group = np.split(np.array([row.score for row in exact]), ends[:-1])
        scores = {CANONICAL: [by_group[number] for number in drawn]}
    with computing_in(model, dtype):
        scores[precision] = scored(precision)
    if save_dtype != str(dtype).removeprefix("torch."):  # else its weights are as they are in any engine
        round_to_nearest(model, dtype)
        scores[NEAREST + precision] = scored(NEAREST + precision)
    return precision_card(
        {name: score_rows(sample, found) for name, found in scores.items()},
        beta=scorer.beta,
        num_available=len(groups),
        seed=seed,
    )


def require_range(model: RewardModel, renderer: Renderer) -> None:
    """Raise ModelError if a model that is to train in float16 has canaries without a finite score in it."""
    if model.compute_dtype is torch.float16 and not all(map(math.isfinite, live_scores(model, renderer))):
        raise ModelError(
            f"{type(model.backbone).__name__} has no finite scores in float16, whose range ends at 65,504. "
            f"Use --precision bf16 or fp32."
        )


def judge_live(
    live: Sequence[ScoreRow], saved: Sequence[ScoreRow], *, name: str, beta: float, seed: int
) -> PrecisionCard:
    """The chosen model as it was evaluated while it trained, under `name`, beside its folder in float32."""
    count = len({(row.source, row.preference_id) for row in saved})
    return precision_card({CANONICAL: saved, name: live}, beta=beta, num_available=count, seed=seed)


def write_card(folder: Path, card: PrecisionCard, name: str = CARD_FILE) -> None:
    """Every estimate of the card, and what it was drawn from."""
    values = {
        name: {measure: jsonable(asdict(found)) for measure, found in part.items()}
        for name, part in card.measures.items()
    }
    write_json(
        folder / name,
        {
            "preferences": card.num_preferences,
            "available": card.num_available,
            "seed": card.seed,
            "measures": values,
            "off": card.off(),
            "not_finite": dict(card.not_finite),
        },
    )
