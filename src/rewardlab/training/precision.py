"""A saved model in float32, in half precision as rewardlab computes it, and with weights rounded to the nearest.

The last is what an engine makes of a float32 folder that it is told to compute in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np

from rewardlab.analysis.precision import CANONICAL, PrecisionCard, precision_card
from rewardlab.artifact.halves import round_to_nearest
from rewardlab.artifact.load import load
from rewardlab.core.files import jsonable, write_json
from rewardlab.core.spec import read_spec
from rewardlab.core.types import TokenGroup
from rewardlab.model.load import PRECISION
from rewardlab.model.reward import RewardModel
from rewardlab.score import ALONE, FloatArray, Together, score_groups, score_rows

MOST: Final = 300
"""Preferences of a card: enough for a margin's error to within a tenth of itself, and three short evaluations."""
CARD_FILE: Final = "precision.json"


def judge_precisions(
    folder: Path,
    groups: Sequence[TokenGroup],
    *,
    precision: str,
    budget: int,
    seed: int,
    attention: str = "auto",
    ranks: Together = ALONE,
) -> PrecisionCard:
    """Score a sample of the groups in float32 and twice in `precision`, `bf16` or `fp16`; the folder was checked."""
    drawn = np.random.default_rng(seed).permutation(len(groups))[:MOST]
    sample = [groups[number] for number in sorted(drawn.tolist())]
    spec, dtype = read_spec(folder), PRECISION[precision]

    def scored(model: RewardModel, title: str) -> list[FloatArray]:
        return score_groups(model, sample, budget=budget, progress=f"judging in {title}", ranks=ranks)

    exact = load(folder, check=False, attention=attention).model
    scores = {CANONICAL: scored(exact, CANONICAL)}
    if spec.save_dtype != str(dtype).removeprefix("torch."):  # else its weights are as they are in any engine
        round_to_nearest(exact, dtype)
        scores[f"nearest {precision}"] = scored(exact, f"nearest {precision}")
    del exact
    scores[precision] = scored(load(folder, precision=precision, check=False, attention=attention).model, precision)
    order = [CANONICAL, precision, f"nearest {precision}"]
    return precision_card(
        {name: score_rows(sample, scores[name]) for name in order if name in scores},
        beta=spec.beta,
        num_available=len(groups),
        seed=seed,
    )


def write_card(folder: Path, card: PrecisionCard) -> None:
    """`precision.json`: every estimate of the card, and what it was drawn from."""
    values = {
        name: {measure: jsonable(asdict(found)) for measure, found in part.items()}
        for name, part in card.measures.items()
    }
    write_json(
        folder / CARD_FILE,
        {
            "preferences": card.num_preferences,
            "available": card.num_available,
            "seed": card.seed,
            "measures": values,
            "notable": card.notable(),
        },
    )
