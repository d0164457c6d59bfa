"""Half precision in the artifact: how weights are rounded for a file, and the scores that come with every canary.

A reference in half precision is what rewardlab itself computes there: by copies of the linear layers' weights, rounded
stochastically and seeded by name, which are the same bits wherever the folder is loaded. An engine told to compute
a float32 folder in bfloat16 rounds its weights to the nearest instead and so has another model: a decoy says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rewardlab.artifact.canaries import PRECISION_MISMATCH, score_tokens
from rewardlab.core.errors import ArtifactError
from rewardlab.core.spec import Canary
from rewardlab.core.types import IntArray
from rewardlab.model.half import HalfWeights, RoundedParts
from rewardlab.model.parts import drop_gathered
from rewardlab.model.reward import RewardModel
from rewardlab.model.rounding import round_weights

HALVES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT16_FINEST: Final = 2.0**-16
"""Root mean square below which float16, whose values are never nearer than 2**-24, is coarser than bfloat16."""
TAKE_BFLOAT16: Final = "Take bfloat16, which has the range of float32."


def stored(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A weight on the CPU as a file holds it, rounded stochastically under its name inside the RewardModel.

    Raises ArtifactError if float16 has not the range for it.
    """
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor
    if dtype is torch.float16:
        _require_float16_range(tensor, name)
    return round_weights(tensor, dtype, name)


def _require_float16_range(tensor: Tensor, name: str) -> None:
    limit = torch.finfo(torch.float16).max
    if (largest := float(tensor.abs().max())) > limit:
        raise ArtifactError(f"{name} holds {largest:.4g}, and float16 ends at {limit:.0f}. {TAKE_BFLOAT16}")
    size = float(tensor.float().square().mean().sqrt())
    if tensor.ndim >= 2 and 0 < size < FLOAT16_FINEST:  # a bias is added to numbers of ordinary size
        raise ArtifactError(
            f"{name} holds weights of {size:.1e} (root mean square), too small for float16, which would keep less of "
            f"them than bfloat16. {TAKE_BFLOAT16}"
        )


def with_half_precision(canaries: Sequence[Canary], model: RewardModel, save_dtype: str) -> list[Canary]:
    """The canaries with references in half precision, and the decoy of weights rounded to the nearest.

    `model` is the saved one in float32; its weights are rounded in place at the end, so this is its last use. float16
    is left to CUDA and to folders in float16: a CPU takes several times as long for it as for bfloat16, and it is so
    near to float32 that the canonical scores serve for both.

    Raises ArtifactError if the scores are not finite, or those of a folder in half precision are not finite there.
    """
    if not all(math.isfinite(canary.score) for canary in canaries):
        raise ArtifactError("scores of the canaries are not finite in float32: the model has diverged.")
    sequences = [np.asarray(canary.token_ids, np.int32) for canary in canaries]
    wanted = [name for name in HALVES if name in ("bfloat16", save_dtype) or model.device.type == "cuda"]
    references = {name: _half_scores(model, sequences, HALVES[name]) for name in wanted}
    endless = [name for name, scores in references.items() if not all(map(math.isfinite, scores))]
    if save_dtype in endless:
        way_out = TAKE_BFLOAT16 if save_dtype == "float16" else "Take float32."
        raise ArtifactError(f"scores are not finite in {save_dtype} arithmetic. {way_out}")
    for name in endless:  # nothing is promised there
        del references[name]
    decoys: dict[str, list[float]] = {}
    if save_dtype != "bfloat16":
        round_to_nearest(model, torch.bfloat16)
        decoys[PRECISION_MISMATCH] = score_tokens(model, sequences)
    return [
        replace(
            canary,
            decoys=canary.decoys | {fault: scores[number] for fault, scores in decoys.items()},
            references={name: scores[number] for name, scores in references.items()},
        )
        for number, canary in enumerate(canaries)
    ]


def _half_scores(model: RewardModel, sequences: Sequence[IntArray], dtype: torch.dtype) -> list[float]:
    """Scores of token sequences by a float32 model, as `load` has it compute in half precision."""
    with computing_in(model, dtype):
        return score_tokens(model, sequences)


@contextmanager
def computing_in(model: RewardModel, dtype: torch.dtype) -> Iterator[None]:
    """Meanwhile a float32 model, whole or in parts, computes in half precision as `load` has it do."""
    own = model.compute_dtype
    model.compute_dtype = dtype
    if isinstance(model, FSDPModule):
        model.half_weights = RoundedParts(model.backbone, "backbone", dtype)
    else:
        model.half_weights = HalfWeights(model.backbone, "backbone", dtype, "stochastic")
    try:
        yield
    finally:
        drop_gathered(model)
        model.half_weights.drop()
        model.half_weights, model.compute_dtype = None, own


def round_to_nearest(model: RewardModel, dtype: torch.dtype) -> None:
    """Make every weight, in place, the nearest value of a half precision: what an engine makes of a float32 folder.

    The arithmetic stays float32; that of engines differs from one to the next and moves scores far less.
    """
    drop_gathered(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
