"""Compares a saved model in float32, in rewardlab's half precision, and with weights rounded to the nearest.

The last is what inference engines do if they are told to compute a float32 folder in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from rewardlab.analysis.json_form import encode
from rewardlab.analysis.precision import CANONICAL, NEAREST, PrecisionCard, precision_card
from rewardlab.artifact.halves import computing_in, round_to_nearest
from rewardlab.artifact.save import live_scores
from rewardlab.core.errors import ModelError
from rewardlab.core.files import write_json
from rewardlab.core.types import ScoreRow, TokenGroup
from rewardlab.data.chat import Renderer
from rewardlab.model.load import PRECISION
from rewardlab.model.reward import RewardModel
from rewardlab.model.sharded_weights import drop_gathered
from rewardlab.score import ALONE, FloatArray, Scorer, Together, score_groups, score_rows

MOST: Final = 200
"""Most preferences of a card: enough to know the error of a margin to within a tenth of itself (1.96 / √(2 · 200)), at
the cost of two or three short evaluations.
"""
CARD_FILE: Final = "precision.json"
LIVE_FILE: Final = "live.json"


def judge_precisions(
    scorer: Scorer,
    groups: Sequence[TokenGroup],
    *,
    save_dtype: str,
    precision: str,
    budget: int | None,
    seed: int,
    ranks: Together = ALONE,
    exact: Sequence[ScoreRow] | None = None,
) -> PrecisionCard:
    """Score a sample of the groups in float32 and twice in `precision` (`bf16` or `fp16`), and return the differences.

    `scorer` is a saved model in float32, whole or sharded. Its weights are rounded at the end, so it cannot be used
    afterwards. `exact` are its score rows for all groups, if they are known.
    """
    sample, known = draw(groups, exact, seed=seed)
    names = precisions(precision, save_dtype)
    scores = score_precisions(scorer, sample, names, exact=known, budget=budget, ranks=ranks)
    return card_of(sample, scores, beta=scorer.beta, num_available=len(groups), seed=seed)


def draw(
    groups: Sequence[TokenGroup], exact: Sequence[ScoreRow] | None, *, seed: int
) -> tuple[list[TokenGroup], list[FloatArray] | None]:
    """Return the groups that a card compares, and [K] scores in float32 of each if `exact` has the rows of all."""
    drawn = sorted(np.random.default_rng(seed).permutation(len(groups))[:MOST].tolist())
    sample = [groups[number] for number in drawn]
    if exact is None:
        return sample, None
    ends = np.cumsum([group.num_replies for group in groups])
    by_group = np.split(np.array([row.score for row in exact], dtype=np.float32), ends[:-1])
    return sample, [by_group[number] for number in drawn]


def precisions(half: str, save_dtype: str) -> tuple[str, ...]:
    """Return the precisions that are compared with float32: `bf16` or `fp16`, and weights rounded to the nearest.

    The latter is left out if the folder is saved in this dtype, since every engine then has the same weights.
    """
    saved_so = save_dtype == str(PRECISION[half]).removeprefix("torch.")
    return (half,) if saved_so else (half, NEAREST + half)


def score_precisions(
    scorer: Scorer,
    sample: Sequence[TokenGroup],
    names: Sequence[str],
    *,
    exact: Sequence[FloatArray] | None,
    budget: int | None,
    ranks: Together = ALONE,
) -> dict[str, Sequence[FloatArray]]:
    """Return precision -> [K] scores of each group, float32 first: `exact`, or computed.

    The weights of the model are rounded at the end, so it cannot be used afterwards.
    """
    model, half = scorer.model, names[0]
    score = partial(score_groups, model, sample, budget=budget, ranks=ranks)
    if exact is None:
        exact = score(progress=f"judging in {CANONICAL}")
    scores: dict[str, Sequence[FloatArray]] = {CANONICAL: exact}
    with computing_in(model, PRECISION[half]):
        scores[half] = score(progress=f"judging in {half}")
    for rounded in names[1:]:
        round_to_nearest(model, PRECISION[half])
        scores[rounded] = score(progress=f"judging in {rounded}")
    return scores


def card_of(
    sample: Sequence[TokenGroup],
    scores: Mapping[str, Sequence[FloatArray]],
    *,
    beta: float,
    num_available: int,
    seed: int,
) -> PrecisionCard:
    """Return the card of a sample of groups, whose scores are given by precision."""
    rows = {name: score_rows(sample, own) for name, own in scores.items()}
    return precision_card(rows, beta=beta, num_available=num_available, seed=seed)


def require_range(model: RewardModel, renderer: Renderer) -> None:
    """Raise ModelError if a model that should train in float16 gives some canary a score that is not finite in it."""
    if model.compute_dtype is not torch.float16:
        return
    scores = live_scores(model, renderer)
    drop_gathered(model)
    if not all(map(math.isfinite, scores)):
        raise ModelError(
            f"{type(model.backbone).__name__} has no finite scores in float16, whose range ends at 65,504. "
            f"Use --precision bf16 or fp32."
        )


def judge_live(
    live: Sequence[ScoreRow], saved: Sequence[ScoreRow], *, name: str, beta: float, seed: int
) -> PrecisionCard:
    """Return the differences between the chosen model as it was evaluated during training and its folder in float32.

    `name` is its name in the card.
    """
    count = len({(row.source, row.preference_id) for row in saved})
    return precision_card({CANONICAL: saved, name: live}, beta=beta, num_available=count, seed=seed)


def write_card(folder: Path, card: PrecisionCard, name: str = CARD_FILE) -> None:
    """Write every estimate of the card, its sample and, for a saved model, the precisions in which it may be served."""
    write_json(
        folder / name,
        {
            "preferences": card.num_preferences,
            "available": card.num_available,
            "seed": card.seed,
            "measures": encode(card.measures),
            "off": card.off(),
            "not_finite": dict(card.not_finite),
            # The card of an evaluation during training has no verdicts: that model cannot be served.
            **({"verdicts": [asdict(verdict) for verdict in card.verdicts()]} if name == CARD_FILE else {}),
        },
    )
