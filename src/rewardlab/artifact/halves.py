"""Half precision in the artifact: weights rounded for a file, and reference scores for every canary.

A reference in half precision is the score that rewardlab itself computes there: with linear layers' weights that are
rounded stochastically and seeded by name, so they are the same bits wherever the folder is loaded. An engine that is
told to compute a float32 folder in bfloat16 rounds the weights to the nearest instead, which makes a different model.
Each canary has a decoy with that model's score.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rewardlab.analysis.faults import PRECISION_MISMATCH
from rewardlab.artifact.canaries import score_tokens
from rewardlab.artifact.canary_states import CanaryStates
from rewardlab.core.errors import ArtifactError
from rewardlab.core.spec import Canary
from rewardlab.core.types import IntArray
from rewardlab.model.half import HalfWeights
from rewardlab.model.reward import HalfPrecisionError, RewardModel
from rewardlab.model.rounded_parts import RoundedParts
from rewardlab.model.rounding import round_weights
from rewardlab.model.sharded_weights import drop_gathered

logger = logging.getLogger("rewardlab")
HALVES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT16_FINEST: Final = 2.0**-16
"""Root mean square of weights below which float16 is coarser than bfloat16: its values are at least 2**-24 apart."""
TAKE_BFLOAT16: Final = "Take bfloat16, which has the range of float32."


def stored(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a weight as the file holds it: on the CPU, and rounded stochastically to `dtype`.

    The rounding is seeded by `name`, the weight's name in the RewardModel.

    Raises ArtifactError if its values are too large or too small for float16.
    """
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor
    if dtype is torch.float16:
        _require_float16_range(tensor, name)
    return round_weights(tensor, dtype, name)


def _require_float16_range(tensor: Tensor, name: str) -> None:
    """Raise ArtifactError for values above float16's largest, and for matrices whose weights are too small for it."""
    limit = torch.finfo(torch.float16).max
    if (largest := float(tensor.abs().max())) > limit:
        raise ArtifactError(
            f"{name} holds {largest:.4g}, and the largest float16 value is {limit:.0f}. {TAKE_BFLOAT16}"
        )
    # Small biases may be rounded: they are added to numbers of ordinary size, so their rounding hardly matters.
    size = float(tensor.float().square().mean().sqrt())
    if tensor.ndim >= 2 and 0 < size < FLOAT16_FINEST:
        raise ArtifactError(
            f"{name} holds weights of {size:.1e} (root mean square), too small for float16, which would round them "
            f"more coarsely than bfloat16. {TAKE_BFLOAT16}"
        )


def with_half_precision(
    canaries: Sequence[Canary], model: RewardModel, save_dtype: str, states: CanaryStates | None = None
) -> list[Canary]:
    """Return the canaries with references in half precision and the decoy of weights rounded to the nearest.

    `model` is the saved one in float32. Its weights are rounded in place at the end, so it must not be used afterwards.
    `states` are as in `make_canaries`, which confirmed them.
    References in float16 are computed only on CUDA and for folders in float16: a CPU takes several times as long for
    them as for bfloat16, and float16 is so near to float32 that the canonical scores serve for both.

    Raises ArtifactError if the canonical scores are not finite, or if a folder in half precision has references in its
    own dtype that are not finite or cannot be computed.
    """
    if not all(math.isfinite(canary.score) for canary in canaries):
        raise ArtifactError("scores of the canaries are not finite in float32: the model has diverged.")
    states = CanaryStates() if states is None else states
    sequences = [np.asarray(canary.token_ids, np.int32) for canary in canaries]
    wanted = [name for name in HALVES if name in ("bfloat16", save_dtype) or model.device.type == "cuda"]
    references = {}
    for name in wanted:
        try:
            references[name] = _half_scores(model, sequences, HALVES[name], states)
        except HalfPrecisionError as error:
            if name == save_dtype:
                raise ArtifactError(f"{error} Save the folder in float32.") from error
            logger.warning("the folder is for float32 alone: %s", error)
    overflown = [name for name, scores in references.items() if not all(map(math.isfinite, scores))]
    if save_dtype in overflown:
        way_out = TAKE_BFLOAT16 if save_dtype == "float16" else "Take float32."
        raise ArtifactError(f"scores are not finite in {save_dtype} arithmetic. {way_out}")
    # A precision in which the model overflows gets no references; loading it in that precision is then an error.
    for name in overflown:
        del references[name]
    decoys: dict[str, list[float]] = {}
    # Rounding does not change weights that are bfloat16 already, so the decoy would equal the score.
    if save_dtype != "bfloat16":
        # The head is applied to states that are known, and it is a weight as well.
        known = states.hold(model, PRECISION_MISMATCH, sequences)
        round_to_nearest(model.head if known else model, torch.bfloat16)
        with states.of(model, PRECISION_MISMATCH):
            decoys[PRECISION_MISMATCH] = score_tokens(model, sequences)
    return [
        replace(
            canary,
            decoys=canary.decoys | {fault: scores[number] for fault, scores in decoys.items()},
            references={name: scores[number] for name, scores in references.items()},
        )
        for number, canary in enumerate(canaries)
    ]


def _half_scores(
    model: RewardModel, sequences: Sequence[IntArray], dtype: torch.dtype, states: CanaryStates
) -> list[float]:
    """Score token sequences with a float32 model as it would compute when loaded in half precision."""
    with computing_in(model, dtype), states.of(model, str(dtype)):
        return score_tokens(model, sequences)


@contextmanager
def computing_in(model: RewardModel, dtype: torch.dtype) -> Iterator[None]:
    """Within the block, make a float32 model, whole or sharded, compute as it would when loaded in half precision."""
    own = model.compute_dtype
    model.compute_dtype = dtype
    if isinstance(model, FSDPModule):
        # What FSDP gathered for the last pass would stand where the shards are looked for.
        drop_gathered(model)
        model.half_weights = RoundedParts(model.backbone, "backbone", dtype)
    else:
        model.half_weights = HalfWeights(model.backbone, "backbone", dtype, "stochastic")
    try:
        yield
    finally:
        drop_gathered(model)
        model.half_weights.drop()
        model.half_weights, model.compute_dtype = None, own


def round_to_nearest(model: nn.Module, dtype: torch.dtype) -> None:
    """Round every weight, in place, to the nearest value of a half precision, as engines do with a float32 folder.

    `model` may also be a part of a model that is not sharded. The arithmetic stays float32: engines differ in theirs,
    and it changes scores far less than rounded weights do.
    """
    drop_gathered(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
