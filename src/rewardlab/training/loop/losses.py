"""Rewards -> sums: every loss is a sum over comparisons (or prompts), divided once by the caller.

Legend: R replies, C comparisons, G rankings, K replies of a ranking. d = r_first − r_second, y = label, m = margin.
Formulas and their conventions: docs/design/formulas.md. Everything is computed in the dtype of the rewards, which
is float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from rewardlab.batch import PackedBatch
from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import brief
from rewardlab.core.types import Sums
from rewardlab.core.values import one_of
from rewardlab.training.settings.config import LossConfig

STATISTICS = ("nll", "correct", "margin", "comparisons", "decided", "score_ties", "label_ties", "non_finite")
"""Order of the vector that `statistics` returns; the fields of core.types.Sums."""

WHOLE: Final = (torch.int32, torch.int64)
"""Types of numbers by which torch indexes; bytes and truth values would select replies in place of numbering them."""


def smooth(label: Tensor, epsilon: float) -> Tensor:
    """Return y(1 − ε) + (1 − y)ε, so 1 becomes 1 − ε. (For the convention y(1 − ε) + ε/2, use ε/2 here.)"""
    return label * (1 - epsilon) + (1 - label) * epsilon


def _require_alike(**tensors_C: object) -> None:
    """Raise ConfigError unless all are tensors [C] of one length.

    Shapes such as [C] and [C, 1] would be combined to [C, C], and lengths 1 and C to C, without a word.
    """
    shapes = [tensor.shape if isinstance(tensor, Tensor) else None for tensor in tensors_C.values()]
    if shapes[0] is None or len(shapes[0]) != 1 or shapes.count(shapes[0]) != len(shapes):
        got = ", ".join(f"{name} {_told(tensor)}" for name, tensor in tensors_C.items())
        wanted = "tensors of one dimension and one length" if len(shapes) > 1 else "a tensor of one dimension"
        raise ConfigError(f"got {got}; wanted {wanted}. Squeeze or index what has more dimensions.")


def _told(value: object) -> str:
    if isinstance(value, Tensor):
        return f"of shape {list(value.shape)} and type {value.dtype}"
    return f"{brief(value)}, a {type(value).__name__}"


def bradley_terry(
    difference_C: Float[Tensor, " C"],
    label_C: Float[Tensor, " C"],
    margin_C: Float[Tensor, " C"] | float = 0.0,
    *,
    beta: float = 1.0,
    label_smoothing: float = 0.0,
) -> Float[Tensor, " C"]:
    """Return −[y log σ(βd − m) + (1 − y) log σ(−(βd − m))] for every comparison, oriented so that y ≥ ½.

    Orientation gives (i, j, y) the same loss as (j, i, 1 − y), margin included; a tie has no margin. The loss is finite
    for any finite difference (Bradley and Terry 1952; soft labels as in cross-entropy).

    Raises ConfigError unless differences, labels and margins are tensors of one length; a margin may be a number.
    """
    margins = {"margin_C": margin_C} if isinstance(margin_C, Tensor) else {}
    _require_alike(difference_C=difference_C, label_C=label_C, **margins)
    difference_C, label_C = preferred_first(difference_C, label_C)
    logit_C, target_C = beta * difference_C, smooth(label_C, label_smoothing)
    # A margin says by how much the preferred reply should win, and in a tie neither is preferred.
    logit_C = logit_C - torch.where(label_C == 0.5, torch.zeros_like(logit_C), torch.ones_like(logit_C) * margin_C)
    return -(target_C * F.logsigmoid(logit_C) + (1 - target_C) * F.logsigmoid(-logit_C))


def preferred_first(
    difference_C: Float[Tensor, " C"], label_C: Float[Tensor, " C"]
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    """Return differences and labels with every comparison turned so that its label is at least ½."""
    label_C = label_C.to(difference_C.dtype)
    flipped_C = label_C < 0.5
    return torch.where(flipped_C, -difference_C, difference_C), torch.where(flipped_C, 1 - label_C, label_C)


def margin_regularizer(difference_C: Float[Tensor, " C"], kind: str = "l2") -> Float[Tensor, " C"]:
    """Return d², or |d| for `l1`: it keeps the gap between two replies small. Raises ConfigError for another `kind`."""
    _require_alike(difference_C=difference_C)
    kind = one_of(kind, ("l1", "l2"), "kind")
    return difference_C.abs() if kind == "l1" else difference_C.square()


def score_regularizer(first_C: Float[Tensor, " C"], second_C: Float[Tensor, " C"]) -> Float[Tensor, " C"]:
    """Return r_i² + r_j²: it keeps the scores themselves small. Raises ConfigError unless both have one length."""
    _require_alike(first_C=first_C, second_C=second_C)
    return first_C.square() + second_C.square()


def centering(first_C: Float[Tensor, " C"], second_C: Float[Tensor, " C"]) -> Float[Tensor, " C"]:
    """Return (r_i + r_j)²: it keeps the mean of a pair near zero (Eisenstein et al. 2023).

    Raises ConfigError unless both have one length.
    """
    _require_alike(first_C=first_C, second_C=second_C)
    return (first_C + second_C).square()


def plackett_luce(
    rewards_R: Float[Tensor, " R"], ranking_GK: Int[Tensor, "G K"], *, beta: float = 1.0, label_smoothing: float = 0.0
) -> Float[Tensor, " G"]:
    """Return −log probability of each ranking: Π over ranks of softmax(βr) among those not yet placed (Plackett 1975).

    `ranking_GK` numbers replies from best to worst, padded with −1. Smoothing gives ε to the reversed ranking. At K = 2
    both equal Bradley-Terry.

    Raises ConfigError unless rewards are a tensor [R] and rankings one of whole numbers [G, K].
    """
    _require_alike(rewards_R=rewards_R)
    are_rankings = isinstance(ranking_GK, Tensor) and ranking_GK.dim() == 2 and ranking_GK.dtype in WHOLE
    if not are_rankings:
        raise ConfigError(f"ranking_GK: got {_told(ranking_GK)}; wanted a tensor of whole numbers [G, K].")
    real_GK = ranking_GK >= 0
    logits_GK = (beta * rewards_R)[ranking_GK.clamp(min=0)]
    # A ranking of one reply that stands in all places says nothing: its gradient is 0, without rounding.
    says_nothing_G = ((ranking_GK == ranking_GK[:, :1]) | ~real_GK).all(1)
    logits_GK = torch.where(says_nothing_G[:, None], logits_GK.detach(), logits_GK)

    def negative_log_likelihood(logits_GK: Tensor, real_GK: Tensor) -> Tensor:
        masked_GK = logits_GK.masked_fill(~real_GK, float("-inf"))
        # The denominator for place k sums over the replies at place k and below: a cumulative log-sum-exp from the
        # right.
        rest_GK = masked_GK.flip(1).logcumsumexp(1).flip(1)
        return torch.where(real_GK, rest_GK - logits_GK, torch.zeros_like(logits_GK)).sum(1)

    loss_G = negative_log_likelihood(logits_GK, real_GK)
    if label_smoothing == 0:
        return loss_G
    reversed_GK, real_reversed_GK = logits_GK.flip(1), real_GK.flip(1)
    # Reversing puts the padding in front; a stable sort moves it behind the replies again without reordering them.
    order_GK = torch.argsort(~real_reversed_GK, dim=1, stable=True)
    reversed_G = negative_log_likelihood(reversed_GK.gather(1, order_GK), real_reversed_GK.gather(1, order_GK))
    return (1 - label_smoothing) * loss_G + label_smoothing * reversed_G


def total_weight(batch: PackedBatch) -> float:
    """Return what a batch adds to Σ w: the weights of its comparisons. A ranking counts as its comparisons together."""
    return float(batch.weight_C.sum())


def preference_loss(rewards_R: Float[Tensor, " R"], batch: PackedBatch, config: LossConfig) -> Float[Tensor, ""]:
    """Return Σ w·ℓ of a batch, regularisers included; divide by Σ `total_weight` over all batches of the step.

    With Plackett-Luce, the comparisons of a ranked preference are replaced by its ranking's loss, weighted with the
    weights of those comparisons together.
    """
    first_C, second_C = rewards_R[batch.first_C], rewards_R[batch.second_C]
    difference_C = first_C - second_C
    weight_C = batch.weight_C.to(rewards_R.dtype)
    loss_C = bradley_terry(
        difference_C,
        batch.label_C,
        batch.margin_C.to(rewards_R.dtype),
        beta=config.beta,
        label_smoothing=config.label_smoothing,
    )
    total = rewards_R.new_zeros(())
    if config.kwise_loss == "plackett-luce" and len(batch.ranking_GK):
        loss_C = loss_C.masked_fill(batch.ranked_C, 0.0)
        ranking_loss_G = plackett_luce(
            rewards_R, batch.ranking_GK, beta=config.beta, label_smoothing=config.label_smoothing
        )
        total = total + (ranking_loss_G * _ranking_weights(batch).to(rewards_R.dtype)).sum()
    if config.regularization_lambda:
        loss_C = loss_C + config.regularization_lambda * margin_regularizer(difference_C, config.regularization_type)
    if config.score_regularization_lambda:
        loss_C = loss_C + config.score_regularization_lambda * score_regularizer(first_C, second_C)
    if config.center_lambda:
        loss_C = loss_C + config.center_lambda * centering(first_C, second_C)
    # The zero term keeps every reply in the graph, also those outside all comparisons: a rank whose replies have none
    # must still run a backward pass, or the others wait for it in FSDP's collectives.
    return total + (weight_C * loss_C).sum() + 0.0 * rewards_R.sum()


def _ranking_weights(batch: PackedBatch) -> Float[Tensor, " G"]:
    """Return, for each ranking, the summed weight of its comparisons, without waiting for the device."""
    num_rankings, num_replies = len(batch.ranking_GK), batch.num_replies
    # Both tables have one extra place: index `num_replies` takes the padding of −1, and owner `num_rankings` the
    # replies that are in no ranking.
    index_GK = torch.where(batch.ranking_GK >= 0, batch.ranking_GK, num_replies)
    number_GK = torch.arange(num_rankings, device=index_GK.device)[:, None].expand_as(index_GK)
    owner_R = index_GK.new_full((num_replies + 1,), num_rankings).index_put((index_GK,), number_GK)
    weights_G = batch.weight_C.new_zeros(num_rankings + 1)
    return weights_G.index_add(0, owner_R[batch.first_C], batch.weight_C)[:num_rankings]


@torch.no_grad()
def statistics(rewards_R: Float[Tensor, " R"], batch: PackedBatch, *, beta: float) -> Float[Tensor, " 8"]:
    """Return what the log shows of a batch: float64 sums in the order of STATISTICS, without waiting for the device.

    They judge the raw labels: neither label smoothing nor margins nor regularisers enter.
    """
    difference_C = (rewards_R[batch.first_C] - rewards_R[batch.second_C]).double()
    label_C = batch.label_C
    finite_C = difference_C.isfinite()
    # Zeroed before it is multiplied with masks: NaN times 0 is NaN, and would spoil the sum.
    clean_C = difference_C.where(finite_C, 0.0)
    decided_C = finite_C & (label_C != 0.5)
    oriented_C = torch.where(label_C < 0.5, -clean_C, clean_C)
    nll_C = -(label_C * F.logsigmoid(beta * clean_C) + (1 - label_C) * F.logsigmoid(-beta * clean_C))
    correct_C = (oriented_C > 0).double() + 0.5 * (oriented_C == 0).double()
    ones_C = torch.ones_like(clean_C)
    return torch.stack(
        [
            (nll_C * finite_C).sum(),
            (correct_C * decided_C).sum(),
            (oriented_C * decided_C).sum(),
            ones_C.sum(),
            decided_C.double().sum(),
            (decided_C & (clean_C == 0)).double().sum(),
            (finite_C & (label_C == 0.5)).double().sum(),
            (~finite_C).double().sum(),
        ]
    )


def to_sums(loss: float, weight: float, statistics: Sequence[float]) -> Sums:
    """Return Sums from the totals of a step; `statistics` are in the order of STATISTICS."""
    nll, correct, margin, *counts = statistics
    comparisons, decided, score_ties, label_ties, non_finite = map(round, counts)
    return Sums(
        loss=loss,
        weight=weight,
        nll=nll,
        correct=correct,
        margin=margin,
        comparisons=comparisons,
        decided=decided,
        score_ties=score_ties,
        label_ties=label_ties,
        non_finite=non_finite,
    )
